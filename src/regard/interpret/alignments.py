"""From cross-attention to word alignments, held against gold ones.

A reference is force-decoded, and what the decoder looked at becomes links between words. Two things have to be said
for that. Which decoder row speaks for a word: row t reads token t - 1 and predicts token t, so a word's rows are those
that *predict* its pieces, or those that *read* them, one later. And whose attention: a head's, the mean of a layer's
heads, or the mean of all. Pieces become words as in the pictures: the mean over a target word's rows, the sum over a
source word's pieces. Marks (begin, end, tags) are no words: nothing is linked with them. Words that stand for nothing
in the other sentence tend to look nowhere in particular, or at a mark: a link may be asked to have some weight.

Explanations align words too, and of models that do not attend as well: source words are hidden at random (RISE), and a
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

Speaking = Literal["predicting", "reading"]
SPEAKING: tuple[Speaking, ...] = get_args(Speaking)
LEASTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)  # to choose among, where that is wanted
BATCH_TOKENS = 2048  # at once, on either side


@dataclass(frozen=True)
class AttentionView:
    """Whose attention, counted from 0 (None: the mean over all), which rows speak for a word, and how loud.

    A target word that gives no source word as much as `least` of its attention is linked with none.
    """

    layer: int | None = None
    head: int | None = None
    rows: Speaking = "predicting"
    least: float = 0.0


@dataclass(frozen=True)
class Alignments:
    """How well every view's links agree with the gold."""

    layers: int
    heads: int
    scores: Mapping[AttentionView, AlignmentScore]
    sentences: int
    cut: int  # sentences that were longer than the model reads; words beyond are linked with nothing

    def best(self, among: Iterable[AttentionView]) -> AttentionView:
        """The view with the least error; the first of those that are equally good."""
        return min(among, key=lambda view: self.scores[view].aer)


@dataclass(frozen=True)
class WordTokens:
    """The tokens of one side of a pair, marks included, and for each the word it is a piece of (-1: a mark)."""

    tokens: list[int]
    words: list[int]
    count: int  # of words, also where the tokens had to be cut
    cut: bool

    def table(self) -> np.ndarray:
        """[words, tokens] one where a token is a piece of a word."""
        return (np.arange(self.count)[:, None] == np.array(self.words)).astype(np.float32)


def split_pieces(
    tokenizer: Tokenizer, texts: Sequence[str], *, tag: str | None, longest: int, lowercase: bool
) -> list[WordTokens]:
    """As `encode_side` for texts with single spaces between their words, but it is known which word a token is of.

    No unit has pieces that reach from one word into the next, so words can be encoded one by one; where the space
    before a word is spelt, it goes with the word.
    """
    space = " " if tokenizer.unit in ("bpe", "char") else ""
    split = [(text.lower() if lowercase else text).split() for text in texts]
    encoded = iter(tokenizer.encode_batch([space * (k > 0) + word for words in split for k, word in enumerate(words)]))
    head = [tokenizer.tag(tag)] if tag else []
    found = []
    for words in split:
        owned = [(token, k) for k in range(len(words)) for token in next(encoded)]
        kept = owned[: longest - len(head) - 1]
        tokens = [*head, *(token for token, _ in kept), EOS]
        owners = [*(-1 for _ in head), *(k for _, k in kept), -1]
        found.append(WordTokens(tokens, owners, len(words), len(kept) < len(owned)))
    return found


def _pieces(
    tokenizers: tuple[Tokenizer, Tokenizer], recipe: Recipe, pairs: Sequence[tuple[str, str]]
) -> tuple[list[WordTokens], list[WordTokens]]:
    """The sources and the targets of pairs, as a recipe's model reads them."""
    first = corpora(recipe.data)[0]
    most, lower = recipe.model.max_positions, recipe.data.lowercase
    left, right = [source for source, _ in pairs], [target for _, target in pairs]
    return (
        split_pieces(tokenizers[0], left, tag=first.source_tag, longest=most, lowercase=lower),
        split_pieces(tokenizers[1], right, tag=first.target_tag, longest=most, lowercase=lower),
    )


def word_weights(weights: np.ndarray, source: WordTokens, target: WordTokens) -> np.ndarray:
    """[L, H, T, S] of one pair -> [2, L, H, J, I]: first by the rows that predict a word, then by those that read it.

    Row t reads token t - 1, and every row has a token before it, so that no word's rows are cut off: the last row reads
    the last piece and predicts the end mark.
    """
    predicting = target.table()
    reading = np.roll(predicting, 1, axis=1)  # the last token is the end mark, no piece of any word
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
    """For each pair with words on both sides: its index, `word_weights` [2, L, H, J, I], and whether it was cut.

    Alike lengths go together, so the pairs come in another order; each one's weights do not depend on the others.
    """
    sources, targets = _pieces(tokenizers, recipe, pairs)
    some = [n for n in range(len(pairs)) if sources[n].count and targets[n].count]
    lengths = [max(len(sources[n].tokens), len(targets[n].tokens)) for n in some]
    for group in sentence_batches(lengths, BATCH_TOKENS):
        chosen = [some[k] for k in group]
        batch = SeqBatch.from_lists([sources[n].tokens for n in chosen], [targets[n].tokens for n in chosen], bos=BOS)
        weights = cross_attention(model, batch.to(device))
        for k, n in enumerate(chosen):
            own = weights[:, k, :, : len(targets[n].tokens), : len(sources[n].tokens)]
            yield n, word_weights(own, sources[n], targets[n]), sources[n].cut or targets[n].cut


def linked(weights: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """[..., J, I] weights -> which are links: of a target word, the source word with most weight (the first of equals).

    With a threshold: every source word with at least so much. A word that looked at no word at all has no link.
    """
    if threshold is not None:
        return (weights >= threshold) & (weights > 0)
    most = np.arange(weights.shape[-1]) == weights.argmax(-1)[..., None]
    return most & (weights > 0)


def views(layers: int, heads: int, least: float = 0.0) -> list[AttentionView]:
    """Every single head, every layer's mean, the mean of all; for either way that rows speak."""
    whose = [(layer, head) for layer in range(layers) for head in range(heads)]
    means = [*((layer, None) for layer in range(layers)), (None, None)]
    return [AttentionView(layer, head, rows, least) for rows in SPEAKING for layer, head in (*whose, *means)]


def _seen(weights: np.ndarray) -> np.ndarray:
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
    leasts: Sequence[float] = (0.0,),
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Alignments:
    """AER, precision and recall of every view's links, in one pass over pairs with gold links."""
    counts: np.ndarray | int = 0  # [leasts, views, 3]: |A|, |A∩S|, |A∩P|
    shape, cut = (0, 0), 0
    pairs = [(pair.source, pair.target) for pair in corpus]
    for n, weights, was_cut in attended_words(model, tokenizers, recipe, pairs, device=device):
        shape, cut = (weights.shape[1], weights.shape[2]), cut + was_cut
        seen = _seen(weights)
        found = linked(seen, threshold) & (seen >= np.array(leasts)[:, None, None, None])  # [leasts, views, J, I]
        hits = [(found & table).sum((2, 3)) for table in _tables(corpus[n].gold, found.shape[2:])]
        counts = counts + np.stack([found.sum((2, 3)), *hits], axis=2)
        if progress is not None:
            progress(1)
    if not all(shape):
        raise UserError("no sentence pair has words on both sides")
    sure = sum(len(pair.gold.sure) for pair in corpus)
    scores = {
        view: AlignmentScore.of(int(links), int(in_sure), int(in_possible), sure)
        for least, some in zip(leasts, np.asarray(counts), strict=True)
        for view, (links, in_sure, in_possible) in zip(views(*shape, least), some, strict=True)
    }
    return Alignments(*shape, scores, len(corpus), cut)


def explained_words(
    model: SequenceModel, source: WordTokens, target: WordTokens, sampling: Sampling, how: MaskMethod = "unknown"
) -> np.ndarray:
    """[J, I] how much each source word speaks for each target word, given the target words before it: shares of a row.

    What speaks against a word counts nothing; a word that nothing speaks for is a row of zeros.
    """
    device = next(model.parameters()).device
    table, into = source.table(), target.table().T.astype(np.float64)
    told = np.flatnonzero(table.any(1))  # words beyond what the model reads have no tokens to hide
    reading = MaskedInput(source.tokens, [np.flatnonzero(table[word]).tolist() for word in told], (), how)

    def asked(sources: list[list[int]]) -> np.ndarray:
        batch = SeqBatch.from_lists(sources, [target.tokens] * len(sources), bos=BOS).to(device)
        with torch.inference_mode():
            return np.array(score(model.logits, batch)) @ into

    box = BlackBox(asked, tuple(map(str, told)), reading.masked, tuple(map(str, range(target.count))))
    shares = np.zeros((target.count, source.count))
    shares[:, told] = explain(box, **asdict(sampling)).shares()
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
    """AER, precision and recall of the links that explanations draw; the references are the outputs explained."""
    found: list[set[Link]] = []
    sides = _pieces(tokenizers, recipe, [(pair.source, pair.target) for pair in corpus])
    for source, target in zip(*sides, strict=True):
        links: set[Link] = set()
        if source.count and target.count:
            drawn = linked(explained_words(model, source, target, sampling, how), threshold)
            links = {(int(i), int(j)) for j, i in zip(*drawn.nonzero(), strict=True)}
        found.append(links)
        if progress is not None:
            progress(1)
    return score_links(found, [pair.gold for pair in corpus])


def _tables(gold: Gold, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sure and the possible links as tables [J, I]."""
    tables = np.zeros((2, *shape), dtype=bool)
    for table, links in zip(tables, (gold.sure, gold.possible), strict=True):
        for i, j in links:
            table[j, i] = True
    return tables[0], tables[1]
