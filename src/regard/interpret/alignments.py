"""Word alignments from cross-attention, compared with gold alignments.

A reference is force-decoded, and the attention of the decoder becomes links between words. Two choices have to be made.
Which rows belong to a word: row t reads token t - 1 and predicts token t, so they are the rows that *predict* the
word's tokens, or those that *read* them, one later. And which attention: that of a head, the mean of a layer's heads,
or the mean of all. Tokens are merged to words as in the pictures: the mean over a target word's rows, the sum over a
source word's tokens. Special tokens are not linked. Words without a counterpart tend to attend evenly, or to a special
token: links may be required to have a minimum weight.

Explanations give alignments too, also of models without attention: source words are hidden at random (RISE), and a
target word is linked with the source word that raises its log-probability most.

L layers, H heads, T target and S source tokens, J target and I source words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import numpy as np
import torch

from regard.data.corpora import corpora
from regard.data.packing import sentence_batches
from regard.decoding import score
from regard.errors import UserError
from regard.interpret.cross_attention import cross_attention
from regard.interpret.explain.models import MaskedInput, MaskMethod
from regard.interpret.explain.rise import BlackBox, Sampling, explain
from regard.metrics.alignment import Aligned, AlignmentScore, Gold, Link, score_links
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.recipes.schema import Recipe
from regard.text import BOS, EOS, Tokenizer

Rows = Literal["predicting", "reading"]
ROW_CHOICES: tuple[Rows, ...] = get_args(Rows)
MIN_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # candidates, where the best is chosen on development data
BATCH_TOKENS = 2048  # of a batch, on either side


@dataclass(frozen=True)
class AttentionView:
    """A way to read links off attention: a layer and a head, from 0 (None: the mean over all), and the rows of a word.

    A target word that gives no source word at least `min_weight` of its attention is not linked.
    """

    layer: int | None = None
    head: int | None = None
    rows: Rows = "predicting"
    min_weight: float = 0.0


@dataclass(frozen=True)
class Alignments:
    """The alignment scores of every view."""

    layers: int
    heads: int
    scores: Mapping[AttentionView, AlignmentScore]
    sentences: int
    truncated: int  # sentences longer than the model reads; the words beyond are not linked

    def best(self, among: Iterable[AttentionView]) -> AttentionView:
        """The view with the lowest alignment error rate, the first of equals."""
        return min(among, key=lambda view: self.scores[view].aer)


@dataclass(frozen=True)
class WordTokens:
    """The tokens of one side of a pair, and for each the index of its word (-1: a special token)."""

    tokens: list[int]
    words: list[int]
    count: int  # of words, those beyond a truncation included
    truncated: bool

    def table(self) -> np.ndarray:
        """[words, tokens] with one where a token belongs to a word."""
        return (np.arange(self.count)[:, None] == np.array(self.words)).astype(np.float32)


def split_words(
    tokenizer: Tokenizer, texts: Sequence[str], *, tag: str | None, max_len: int, lowercase: bool
) -> list[WordTokens]:
    """Encode texts as `encode_side` does (with single spaces between words), and record the word of each token.

    No token reaches from one word into the next, so words are encoded one by one; where the space before a word is part
    of a token, it belongs to the word.
    """
    space = " " if tokenizer.unit in ("bpe", "char") else ""
    split = [(text.lower() if lowercase else text).split() for text in texts]
    encoded = iter(tokenizer.encode_batch([space * (k > 0) + word for words in split for k, word in enumerate(words)]))
    prefix = [tokenizer.tag(tag)] if tag else []
    sides = []
    for words in split:
        all_tokens = [(token, k) for k in range(len(words)) for token in next(encoded)]
        kept = all_tokens[: max_len - len(prefix) - 1]
        tokens = [*prefix, *(token for token, _ in kept), EOS]
        indices = [*(-1 for _ in prefix), *(k for _, k in kept), -1]
        sides.append(WordTokens(tokens, indices, len(words), len(kept) < len(all_tokens)))
    return sides


def _encode_pairs(
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


def word_weights(weights: np.ndarray, source: WordTokens, target: WordTokens) -> np.ndarray:
    """Merge weights [L, H, T, S] of one pair to words [2, L, H, J, I]: by predicting rows, then by reading rows.

    Row t reads token t - 1. Every word has all its rows: the last row reads the last token of the last word.
    """
    predicting = target.table()
    reading = np.roll(predicting, 1, axis=1)  # the last token is EOS, which belongs to no word
    tables = np.stack([predicting, reading])
    means = tables / np.maximum(tables.sum(-1, keepdims=True), 1)
    merged: np.ndarray = means[:, None, None] @ (weights @ source.table().T)
    return merged


def attended_words(
    model: SequenceModel,
    tokenizers: tuple[Tokenizer, Tokenizer],
    recipe: Recipe,
    pairs: Sequence[tuple[str, str]],
    *,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield for each pair with words on both sides its index, `word_weights` [2, L, H, J, I], and if it was truncated.

    Pairs are batched by length, so they come in another order; the weights of each are independent of the others.
    """
    sources, targets = _encode_pairs(tokenizers, recipe, pairs)
    nonempty = [n for n in range(len(pairs)) if sources[n].count and targets[n].count]
    lengths = [max(len(sources[n].tokens), len(targets[n].tokens)) for n in nonempty]
    for group in sentence_batches(lengths, BATCH_TOKENS):
        indices = [nonempty[k] for k in group]
        batch = SeqBatch.from_lists([sources[n].tokens for n in indices], [targets[n].tokens for n in indices], bos=BOS)
        weights = cross_attention(model, batch.to(device))
        for k, n in enumerate(indices):
            unpadded = weights[:, k, :, : len(targets[n].tokens), : len(sources[n].tokens)]
            truncated = sources[n].truncated or targets[n].truncated
            yield n, word_weights(unpadded, sources[n], targets[n]), truncated


def linked(weights: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Decide which of the weights [..., J, I] are links: for each target word the source word with the most weight.

    With a threshold: all source words with at least that weight. A target word without any weight has no link.
    """
    if threshold is not None:
        return (weights >= threshold) & (weights > 0)
    most = np.arange(weights.shape[-1]) == weights.argmax(-1)[..., None]
    return most & (weights > 0)


def views(layers: int, heads: int, min_weight: float = 0.0) -> list[AttentionView]:
    """Every head, the mean of each layer, and the mean of all, for both choices of rows."""
    single = [(layer, head) for layer in range(layers) for head in range(heads)]
    means = [*((layer, None) for layer in range(layers)), (None, None)]
    return [AttentionView(layer, head, rows, min_weight) for rows in ROW_CHOICES for layer, head in (*single, *means)]


def _by_view(weights: np.ndarray) -> np.ndarray:
    """[2, L, H, J, I] -> [views, J, I] in the order of `views`."""
    single = weights.reshape(2, -1, *weights.shape[-2:])
    return np.concatenate([single, weights.mean(2), weights.mean((1, 2))[:, None]], axis=1).reshape(
        -1, *weights.shape[-2:]
    )


def measure(
    model: SequenceModel,
    tokenizers: tuple[Tokenizer, Tokenizer],
    recipe: Recipe,
    corpus: Sequence[Aligned],
    *,
    threshold: float | None = None,
    min_weights: Sequence[float] = (0.0,),
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Alignments:
    """Compute AER, precision and recall of every view in one pass over pairs with gold links."""
    counts: np.ndarray | int = 0  # [min_weights, views, 3]: |A|, |A∩S|, |A∩P|
    shape, truncated = (0, 0), 0
    pairs = [(pair.source, pair.target) for pair in corpus]
    for n, weights, was_truncated in attended_words(model, tokenizers, recipe, pairs, device=device):
        shape, truncated = (weights.shape[1], weights.shape[2]), truncated + was_truncated
        by_view = _by_view(weights)
        heavy = by_view >= np.array(min_weights)[:, None, None, None]  # [min_weights, views, J, I]
        links = linked(by_view, threshold) & heavy
        correct = [(links & table).sum((2, 3)) for table in _tables(corpus[n].gold, links.shape[2:])]
        counts = counts + np.stack([links.sum((2, 3)), *correct], axis=2)
        if progress is not None:
            progress(1)
    if not all(shape):
        raise UserError("no sentence pair has words on both sides")
    sure = sum(len(pair.gold.sure) for pair in corpus)
    scores = {
        view: AlignmentScore.of(int(count), int(in_sure), int(in_possible), sure)
        for min_weight, of_views in zip(min_weights, np.asarray(counts), strict=True)
        for view, (count, in_sure, in_possible) in zip(views(*shape, min_weight), of_views, strict=True)
    }
    return Alignments(*shape, scores, len(corpus), truncated)


def explained_words(
    model: SequenceModel, source: WordTokens, target: WordTokens, sampling: Sampling, how: MaskMethod = "unknown"
) -> np.ndarray:
    """Compute how much each source word raises the log-probability of each target word, as shares [J, I] of each row.

    Source words that lower it count as zero; a target word that no source word raises has a row of zeros.
    """
    device = next(model.parameters()).device
    table, to_words = source.table(), target.table().T.astype(np.float64)
    present = np.flatnonzero(table.any(1))  # words beyond a truncation have no tokens to mask
    masked = MaskedInput(source.tokens, [np.flatnonzero(table[word]).tolist() for word in present], (), how)

    def word_scores(sources: list[list[int]]) -> np.ndarray:
        batch = SeqBatch.from_lists(sources, [target.tokens] * len(sources), bos=BOS).to(device)
        with torch.inference_mode():
            return np.array(score(model.logits, batch)) @ to_words

    box = BlackBox(word_scores, tuple(map(str, present)), masked.masked, tuple(map(str, range(target.count))))
    shares = np.zeros((target.count, source.count))
    shares[:, present] = explain(box, **asdict(sampling)).shares()
    return shares


def measure_explanations(
    model: SequenceModel,
    tokenizers: tuple[Tokenizer, Tokenizer],
    recipe: Recipe,
    corpus: Sequence[Aligned],
    *,
    sampling: Sampling,
    how: MaskMethod = "unknown",
    threshold: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> AlignmentScore:
    """Compute AER, precision and recall of the links from explanations of the references."""
    all_links: list[set[Link]] = []
    sides = _encode_pairs(tokenizers, recipe, [(pair.source, pair.target) for pair in corpus])
    for source, target in zip(*sides, strict=True):
        links: set[Link] = set()
        if source.count and target.count:
            table = linked(explained_words(model, source, target, sampling, how), threshold)
            links = {(int(i), int(j)) for j, i in zip(*table.nonzero(), strict=True)}
        all_links.append(links)
        if progress is not None:
            progress(1)
    return score_links(all_links, [pair.gold for pair in corpus])


def _tables(gold: Gold, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sure and the possible links as tables [J, I]."""
    tables = np.zeros((2, *shape), dtype=bool)
    for table, links in zip(tables, (gold.sure, gold.possible), strict=True):
        for i, j in links:
            table[j, i] = True
    return tables[0], tables[1]
