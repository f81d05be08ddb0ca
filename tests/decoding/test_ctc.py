"""CTC searches against all paths of tiny outputs."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from regard.decoding.ctc import BLANK, align, greedy, log_probability, prefix_beam_search


def output(seed: int, frames: int = 5, ids: int = 4, sharpness: float = 1.5) -> Tensor:
    """Random log-probabilities [T, V]."""
    scores = torch.randn(frames, ids, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * scores).log_softmax(-1)


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    """Merge repeated ids, then remove blanks, as CTC is defined."""
    merged = [token for t, token in enumerate(path) if t == 0 or token != path[t - 1]]
    return tuple(token for token in merged if token != BLANK)


def paths(log_probs: Tensor) -> dict[tuple[int, ...], dict[tuple[int, ...], float]]:
    """All paths with their log-probabilities, by the text that they stand for."""
    found: dict[tuple[int, ...], dict[tuple[int, ...], float]] = defaultdict(dict)
    rows = log_probs.tolist()
    for path in product(range(log_probs.shape[1]), repeat=len(rows)):
        found[collapse(path)][path] = sum(row[token] for row, token in zip(rows, path, strict=True))
    return found


def total(scores: dict[tuple[int, ...], float]) -> float:
    return math.log(sum(map(math.exp, scores.values())))


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_the_space_finds_all_texts_with_their_exact_probabilities(seed: int) -> None:
    log_probs = output(seed)
    expected = {text: total(scores) for text, scores in paths(log_probs).items()}
    found = {t.tokens: t.score for t in prefix_beam_search(log_probs, beam=10_000, nbest=10_000)}
    assert found == pytest.approx(expected, abs=1e-9)
    assert list(found) == sorted(expected, key=lambda text: -expected[text])


def beam_over_all_ids(log_probs: Tensor, beam: int) -> dict[tuple[int, ...], float]:
    """Prefix beam search as it is defined: every prefix is continued with every id. In probabilities."""
    prefixes = {(): (1.0, 0.0)}  # the probabilities of paths that end in a blank, and in the last id
    for row in log_probs.exp().tolist():
        new: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for prefix, (blank, last) in prefixes.items():
            new[prefix][0] += (blank + last) * row[BLANK]
            for token in set(range(len(row))) - {BLANK}:
                again = prefix[-1:] == (token,)
                new[prefix][1] += last * row[token] if again else 0.0
                new[(*prefix, token)][1] += (blank if again else blank + last) * row[token]
        best = sorted(new, key=lambda prefix: -sum(new[prefix]))[:beam]
        prefixes = {prefix: (new[prefix][0], new[prefix][1]) for prefix in best}
    return {prefix: sum(parts) for prefix, parts in prefixes.items()}


@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_ids_that_cannot_be_kept_need_not_be_tried(beam: int) -> None:
    for seed in range(40):
        log_probs = output(seed, frames=6, ids=9, sharpness=0.5)
        found = {t.tokens: math.exp(t.score) for t in prefix_beam_search(log_probs, beam, beam)}
        assert found == pytest.approx(beam_over_all_ids(log_probs, beam)), seed


def test_greedy_takes_the_likeliest_path_and_the_beam_sums_over_paths() -> None:
    # The likeliest path is two blanks (0.36), but the text of id 1 has 0.24 + 0.24 + 0.16 = 0.64.
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert greedy(log_probs).tokens == () and greedy(log_probs).score == pytest.approx(math.log(0.36))
    (best,) = prefix_beam_search(log_probs, beam=2)
    assert best.tokens == (1,) and best.score == pytest.approx(math.log(0.64))


def test_the_same_id_twice_needs_a_blank_between() -> None:
    certain = torch.full((5, 3), -20.0)
    for t, token in enumerate([1, 1, 0, 1, 2]):
        certain[t, token] = 0.0
    certain = certain.log_softmax(-1)
    assert greedy(certain).tokens == (1, 1, 2)
    assert prefix_beam_search(certain, beam=4)[0].tokens == (1, 1, 2)
    assert align(certain, [1, 1, 2]) == [0, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_and_alignment_find_the_best_of_all_paths(seed: int) -> None:
    log_probs = output(seed)
    by_text = paths(log_probs)
    best = max((score, path) for scores in by_text.values() for path, score in scores.items())
    assert greedy(log_probs).tokens == collapse(best[1]) and greedy(log_probs).score == pytest.approx(best[0])
    for text, scores in by_text.items():
        path = max(scores, key=scores.__getitem__)
        starts = [t for t, token in enumerate(path) if token != BLANK and (t == 0 or path[t - 1] != token)]
        assert align(log_probs, text) == starts, text


def test_log_probabilities_of_texts_are_sums_over_paths() -> None:
    log_probs = output(7)
    expected = {text: total(scores) for text, scores in paths(log_probs).items()}
    assert log_probability(log_probs, list(expected)) == pytest.approx(list(expected.values()), abs=1e-4)


def test_no_frames_give_the_empty_text_and_no_path_of_a_longer_one() -> None:
    nothing = torch.zeros(0, 4)
    assert greedy(nothing).tokens == () and prefix_beam_search(nothing, beam=3)[0].tokens == ()
    with pytest.raises(ValueError, match="3 ids have no path through 2 frames"):
        align(output(0, frames=2), [1, 2, 3])
    with pytest.raises(ValueError, match="no path"):  # a blank must be between
        align(output(0, frames=2), [1, 1])
