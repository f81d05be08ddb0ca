"""Word alignment: links between the words of sentence pairs, from cross-attention.

Targets are force-decoded in batches, and the attention of the decoder becomes weights between words. Two choices have
to be made. Which rows belong to a word: row t reads token t - 1 and predicts token t, so they are the rows that
*predict* the word's tokens, or those that *read* them, one later. And which attention: that of a head, the mean of a
layer's heads, or the mean of all. Tokens are merged to words: the mean over a target word's rows, the sum over a source
word's tokens. Special tokens are not linked.

Two directions should agree. A second model, of the reverse direction, or the same attention read from the side of the
source, gives other links for the same words; where nothing else is known, the attention is chosen by which both
directions agree best (Chen et al. 2020).

N sentences, L layers, H heads, T target and S source tokens, J target and I source words, V views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from regard import taps
from regard.attention.backends import AttentionWeights
from regard.data.corpora import corpora
from regard.data.packing import sentence_batches
from regard.errors import UserError
from regard.metrics.alignment import Link
from regard.metrics.symmetrise import METHODS
from regard.models import SequenceModel
from regard.packed import SeqBatch, TextBatch
from regard.recipes.schema import Recipe
from regard.text import BOS, Tokenizer
from regard.text.words import WordTokens, split_words

Rows = Literal["predicting", "reading"]
ROW_CHOICES: tuple[Rows, ...] = get_args(Rows)
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}  # maximum size of the padded view of a batch, on either side
SAMPLE_PAIRS = 500  # on which directions are compared to choose the attention


class NoAttention(UserError):
    """The model has no cross-attention."""


@dataclass(frozen=True)
class AttentionView:
    """A way to read links off attention: layer and head, from 0 (None: the mean over all), and the rows of a word."""

    layer: int | None = None
    head: int | None = None
    rows: Rows = "predicting"


def views(layers: int, heads: int) -> list[AttentionView]:
    """Every head, the mean of each layer, and the mean of all, for both choices of rows."""
    single = [(layer, head) for layer in range(layers) for head in range(heads)]
    means = [*((layer, None) for layer in range(layers)), (None, None)]
    return [AttentionView(layer, head, rows) for rows in ROW_CHOICES for layer, head in (*single, *means)]


def by_view(weights: np.ndarray) -> np.ndarray:
    """Word weights [2, L, H, J, I] -> [V, J, I] in the order of `views`."""
    single = weights.reshape(2, -1, *weights.shape[-2:])
    return np.concatenate([single, weights.mean(2), weights.mean((1, 2))[:, None]], axis=1).reshape(
        -1, *weights.shape[-2:]
    )


def split_pairs(
    tokenizers: tuple[Tokenizer, Tokenizer], recipe: Recipe, pairs: Sequence[tuple[str, str]]
) -> tuple[list[WordTokens], list[WordTokens]]:
    """Encode the sources and the targets of pairs as a recipe's model reads them."""
    first = corpora(recipe.data)[0]
    max_len, lowercase = recipe.model.max_positions, recipe.data.lowercase
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    return (
        split_words(tokenizers[0], sources, tag=first.source_tag, max_len=max_len, lowercase=lowercase),
        split_words(tokenizers[1], targets, tag=first.target_tag, max_len=max_len, lowercase=lowercase),
    )


def cross_attention(model: SequenceModel, batch: TextBatch, view: AttentionView | None = None) -> Tensor:
    """Run a teacher-forced pass; return the weights of every cross-attention [L, N, H, T, S], or of one view [N, T, S].

    Both are padded; of a view, only the layer that it names is computed.
    """
    seen: dict[nn.Module, AttentionWeights] = {}
    cross = {module for name, module in model.named_modules() if name.endswith("cross_attn")}

    def record(module: nn.Module, kind: str, value: taps.Value) -> None:
        if module in cross and isinstance(value, AttentionWeights):
            seen[module] = value

    with torch.inference_mode(), taps.listen(record):
        model.logits(batch) if model.lm_head() is None else model.features(batch)
        offered = list(seen.values())
        if not offered:
            raise NoAttention(
                "this model does not attend to its source: there are no weights to show or to align words by"
            )
        if view is None:
            return torch.stack([attention().float() for attention in offered])
        chosen = offered if view.layer is None else offered[view.layer : view.layer + 1]
        layers = [attention().float() for attention in chosen]
        heads = [weights.mean(1) if view.head is None else weights[:, view.head] for weights in layers]
        return torch.stack(heads).mean(0)


def word_weights(weights: np.ndarray, source: WordTokens, target: WordTokens) -> np.ndarray:
    """Merge weights [L, H, T, S] of one pair to words [2, L, H, J, I]: by predicting rows, then by reading rows.

    Row t reads token t - 1. Every word has all its rows: the last row reads the last token of the last word.
    """
    merged: np.ndarray = target_rows(target)[:, None, None] @ (weights @ source.table().T)
    return merged


def target_rows(target: WordTokens) -> np.ndarray:
    """[2, J, T] the weights of rows in the mean of a word's rows: of those that predict it, and that read it."""
    predicting = target.table()
    reading = np.roll(predicting, 1, axis=1)  # the last token is EOS, which belongs to no word
    tables = np.stack([predicting, reading])
    means: np.ndarray = tables / np.maximum(tables.sum(-1, keepdims=True), 1)
    return means


@dataclass(frozen=True)
class Aligner:
    """Computes weights between the words of pairs by a model's cross-attention."""

    model: SequenceModel
    tokenizers: tuple[Tokenizer, Tokenizer]
    recipe: Recipe

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def all_views(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Yield for each pair with words on both sides its index, [2, L, H, J, I], and whether it was truncated.

        Pairs are batched by length, so they come in another order; the weights of each are independent of the others.
        """
        for batch, indices, sources, targets in self._batches(pairs):
            weights = cross_attention(self.model, batch).cpu().numpy()
            for k, n in enumerate(indices):
                unpadded = weights[:, k, :, : len(targets[k].tokens), : len(sources[k].tokens)]
                truncated = sources[k].truncated or targets[k].truncated
                yield n, word_weights(unpadded, sources[k], targets[k]), truncated

    def __call__(
        self,
        pairs: Sequence[tuple[str, str]],
        view: AttentionView,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[np.ndarray]:
        """The word weights [J, I] of every pair by one view; a side without words makes an empty table."""
        tables = [np.zeros((len(target.split()), len(source.split())), np.float32) for source, target in pairs]
        for batch, indices, sources, targets in self._batches(pairs):
            merged = _merged(cross_attention(self.model, batch, view), sources, targets, view.rows)
            for k, n in enumerate(indices):
                tables[n] = merged[k, : targets[k].count, : sources[k].count]
            progress(len(indices))
        return tables

    def _batches(
        self, pairs: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[SeqBatch, list[int], list[WordTokens], list[WordTokens]]]:
        """Batches of pairs with words on both sides: their indices, sources and targets."""
        sources, targets = split_pairs(self.tokenizers, self.recipe, pairs)
        nonempty = [n for n in range(len(pairs)) if sources[n].count and targets[n].count]
        lengths = [max(len(sources[n].tokens), len(targets[n].tokens)) for n in nonempty]
        for group in sentence_batches(lengths, BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])):
            indices = [nonempty[k] for k in group]
            chosen = [sources[n] for n in indices], [targets[n] for n in indices]
            tokens = ([side.tokens for side in sides] for sides in chosen)
            yield SeqBatch.from_lists(*tokens, bos=BOS).to(self.device), indices, *chosen


def _merged(weights: Tensor, sources: list[WordTokens], targets: list[WordTokens], rows: Rows) -> np.ndarray:
    """`word_weights` of one view for a whole batch, on its device: [N, T, S] -> [N, J, I], padded."""
    source = _word_tables(sources, weights.shape[2]).to(weights.device)
    target = _word_tables(targets, weights.shape[1]).to(weights.device)
    if rows == "reading":
        target = target.roll(1, dims=2)
    mean = target / target.sum(2, keepdim=True).clamp(min=1)
    merged: np.ndarray = (mean @ weights @ source.mT).cpu().numpy()
    return merged


def _word_tables(sides: list[WordTokens], tokens: int) -> Tensor:
    """[N, words, tokens] with one where a token belongs to a word."""
    words = np.full((len(sides), tokens), -1)
    for row, side in zip(words, sides, strict=True):
        row[: len(side.words)] = side.words
    most = max(side.count for side in sides)
    return (torch.arange(most)[:, None] == torch.from_numpy(words)[:, None]).float()


def linked(weights: np.ndarray) -> np.ndarray:
    """Decide which of the weights [..., J, I] are links: for each target word the source word with the most weight.

    A target word without any weight has no link.
    """
    if not weights.shape[-1]:
        return np.zeros(weights.shape, bool)
    most = np.arange(weights.shape[-1]) == weights.argmax(-1)[..., None]
    return most & (weights > 0)


def links(weights: np.ndarray) -> set[Link]:
    """The links (source word, target word) of the weights [J, I]: each target word has one at most.

    >>> sorted(links(np.array([[0.9, 0.1], [0.3, 0.7], [0.0, 0.0]])))
    [(0, 0), (1, 1)]
    """
    return {(int(i), int(j)) for j, i in zip(*linked(weights).nonzero(), strict=True)}


def other_direction(weights: np.ndarray) -> np.ndarray:
    """The same attention from the side of the source: the share of each target word in what a source word receives.

    [..., J, I] -> [..., I, J], each row of which sums to one.
    """
    transposed = weights.swapaxes(-1, -2)
    shares: np.ndarray = transposed / np.maximum(transposed.sum(-1, keepdims=True), 1e-9)
    return shares


def most_agreeing(forward: Sequence[np.ndarray], reverse: Sequence[np.ndarray] | None = None) -> tuple[int, int, float]:
    """The indices of the views whose links agree best with those of the other direction, and their agreement.

    `forward` are weights [V, J, I] of each pair, `reverse` those of a reverse model [V', I, J]; without them, each view
    is compared with itself from the side of the source. The agreement of links A and B is 2 |A∩B| / (|A| + |B|).
    """
    common: np.ndarray | int = 0
    counts: tuple[np.ndarray | int, np.ndarray | int] = (0, 0)
    for n, weights in enumerate(forward):
        one = linked(weights).reshape(len(weights), -1).astype(np.float32)
        back = other_direction(weights) if reverse is None else reverse[n]
        other = linked(back).swapaxes(-1, -2).reshape(len(back), -1).astype(np.float32)
        common = common + one @ other.T  # [V, V']
        counts = counts[0] + one.sum(1), counts[1] + other.sum(1)
    agreement = 2 * np.asarray(common) / np.maximum(np.add.outer(*counts), 1)
    if reverse is None:
        agreement = np.where(np.eye(len(agreement), dtype=bool), agreement, -1.0)
    best = np.unravel_index(agreement.argmax(), agreement.shape)
    return int(best[0]), int(best[1]), float(agreement[best])


@dataclass(frozen=True)
class TwoWayAligner:
    """Aligns words in both directions: by a model and one of the reverse direction, or by one model's attention alone.

    The views say which attention of each.
    """

    forward: Aligner
    view: AttentionView
    reverse: Aligner | None = None
    reverse_view: AttentionView | None = None

    @classmethod
    def choose(cls, forward: Aligner, reverse: Aligner | None, pairs: Sequence[tuple[str, str]]) -> TwoWayAligner:
        """Choose the attention by which both directions agree best on the first pairs; guided heads are given."""
        guided = [None if aligner is None else guided_view(aligner.recipe) for aligner in (forward, reverse)]
        if guided[0] is not None and (reverse is None or guided[1] is not None):
            return cls(forward, guided[0], reverse, guided[1])
        sample = [pair for pair in pairs if pair[0].split() and pair[1].split()][:SAMPLE_PAIRS]
        if not sample:
            return cls(forward, AttentionView(), reverse, AttentionView())
        ours, names = _weights_by_view(forward, sample, guided[0])
        if reverse is None:
            return cls(forward, names[most_agreeing(ours)[0]])
        theirs, reverse_names = _weights_by_view(reverse, [(target, source) for source, target in sample], guided[1])
        one, other, _ = most_agreeing(ours, theirs)
        return cls(forward, names[one], reverse, reverse_names[other])

    def directions(
        self, pairs: Sequence[tuple[str, str]], progress: Callable[[int], None] = lambda count: None
    ) -> Iterator[tuple[set[Link], set[Link]]]:
        """The links (source word, target word) of every pair in both directions."""
        forward = self.forward(pairs, self.view, progress)
        if self.reverse is None or self.reverse_view is None:
            reverse = [other_direction(weights) for weights in forward]
        else:
            reverse = self.reverse([(target, source) for source, target in pairs], self.reverse_view)
        for one, other in zip(forward, reverse, strict=True):
            yield links(one), {(i, j) for j, i in links(other)}

    def __call__(
        self, pairs: Sequence[tuple[str, str]], method: str, progress: Callable[[int], None] = lambda count: None
    ) -> Iterator[set[Link]]:
        """The links of every pair, both directions combined by a method of `metrics.symmetrise`."""
        return (METHODS[method](*both) for both in self.directions(pairs, progress))


def guided_view(recipe: Recipe) -> AttentionView | None:
    """The attention that guided alignment trained; None: the run was trained without."""
    head = recipe.model.guided_head
    return AttentionView(*head, "reading") if recipe.training.guided_alignment is not None and head else None


def _weights_by_view(
    aligner: Aligner, pairs: Sequence[tuple[str, str]], given: AttentionView | None
) -> tuple[list[np.ndarray], list[AttentionView]]:
    """The word weights [V, J, I] of each pair by all views or by the given one, and these views."""
    if given is not None:
        return [weights[None] for weights in aligner(pairs, given)], [given]
    by_pair = {n: weights for n, weights, _ in aligner.all_views(pairs)}
    return [by_view(by_pair[n]) for n in range(len(pairs))], views(*by_pair[0].shape[1:3])
