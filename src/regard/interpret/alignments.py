"""Word alignments compared with gold alignments: those of attention (`tasks.aligner`), and of explanations.

Explanations give alignments too, also of models without attention: source words are hidden at random (RISE), and a
target word is linked with the source word that raises its log-probability most.

L layers, H heads, T target and S source tokens, J target and I source words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from regard.decoding import score
from regard.errors import UserError
from regard.interpret.explain.models import MaskedInput, MaskMethod
from regard.interpret.explain.rise import BlackBox, Sampling, explain
from regard.metrics.alignment import Aligned, AlignmentScore, Gold, Link, score_links
from regard.models import SequenceModel
from regard.packed import SeqBatch
from regard.tasks.aligner import Aligner, AttentionView, by_view, linked, links, split_pairs, views
from regard.text import BOS
from regard.text.words import WordTokens


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


def measure(
    aligner: Aligner,
    corpus: Sequence[Aligned],
    progress: Callable[[int], None] = lambda count: None,
) -> Alignments:
    """Compute AER, precision and recall of every view in one pass over pairs with gold links."""
    counts: np.ndarray | int = 0  # [views, 3]: |A|, |A∩S|, |A∩P|
    shape, truncated = (0, 0), 0
    for n, weights, was_truncated in aligner.all_views([(pair.source, pair.target) for pair in corpus]):
        shape, truncated = (weights.shape[1], weights.shape[2]), truncated + was_truncated
        chosen = linked(by_view(weights))  # [views, J, I]
        correct = [(chosen & table).sum((1, 2)) for table in _tables(corpus[n].gold, chosen.shape[1:])]
        counts = counts + np.stack([chosen.sum((1, 2)), *correct], axis=1)
        progress(1)
    if not all(shape):
        raise UserError("no sentence pair has words on both sides")
    sure = sum(len(pair.gold.sure) for pair in corpus)
    scores = {
        view: AlignmentScore.of(int(count), int(in_sure), int(in_possible), sure)
        for view, (count, in_sure, in_possible) in zip(views(*shape), np.asarray(counts), strict=True)
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
    aligner: Aligner,
    corpus: Sequence[Aligned],
    sampling: Sampling,
    progress: Callable[[int], None] = lambda count: None,
) -> AlignmentScore:
    """Compute AER, precision and recall of the links from explanations of the references."""
    all_links: list[set[Link]] = []
    sides = split_pairs(aligner.tokenizers, aligner.recipe, [(pair.source, pair.target) for pair in corpus])
    for source, target in zip(*sides, strict=True):
        has_words = source.count and target.count
        all_links.append(links(explained_words(aligner.model, source, target, sampling)) if has_words else set())
        progress(1)
    return score_links(all_links, [pair.gold for pair in corpus])


def _tables(gold: Gold, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sure and the possible links as tables [J, I]."""
    tables = np.zeros((2, *shape), dtype=bool)
    for table, gold_links in zip(tables, (gold.sure, gold.possible), strict=True):
        for i, j in gold_links:
            table[j, i] = True
    return tables[0], tables[1]
