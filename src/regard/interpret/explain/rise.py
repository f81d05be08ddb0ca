"""RISE (Petsiuk, Das and Saenko 2018) for any function whose input consists of parts that can be hidden.

Each part of the input is kept with probability p, at random, and the black box is called on the rest:

    importance_i = E[f | part i kept] - E[f | part i hidden] = E[(f(m) - b) (m_i - p)] / (p (1 - p))

for any constant b. With p = 1/2 this is the Banzhaf value of the game f, and for few parts the expectation can be taken
over all 2^n masks. Masks come in antithetic pairs, from u and 1 - u of the same uniform numbers (with p = 1/2: a mask
and its complement), so that effects common to all masks cancel. With p = 1/2 the importances are also the coefficients
of the best linear fit to f, so that least squares estimates them once there are enough pairs; the linear effects of the
other parts are then no longer noise.

Masks of words are independent for each part. Masks of images (`image_masks`) are smooth, and hide a pixel partly: with
the variance v of its mask, which is p (1 - p) for a part that is kept or hidden, the importance is E[(f - b) (m_i - p)]
/ v, the slope of the best linear fit of f by m_i alone.
Shapes: B masks, n parts, O outputs of the black box.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.decoding.sampling import keys
from regard.errors import UserError
from regard.interpret.notebook import NotebookDisplay

Masks = NDArray[np.bool_] | NDArray[np.float32]  # masks of what is kept: True or False, or from 0 to 1
Numbers = NDArray[np.float64]
ScoreFn = Callable[[list[Any]], Any]
Progress = Callable[[int], None]

MAX_EXACT_PARTS = 12  # 4096 calls
BLOCK = 128  # masks between two estimates, and the most in memory at once
MIN_KEEP = 0.01  # with parts kept (or hidden) more rarely, no feasible number of masks gives an estimate
MIN_MASKS = 4  # two pairs: fewer give no standard errors
MIN_FIT_PAIRS = 32  # pairs, in addition to two for each part, from which on least squares is used


@dataclass(frozen=True)
class Sampling:
    """Settings of the estimate. Mask number i is a function of `seed` and i."""

    masks: int = 1000  # the most to draw, in addition to everything kept and everything hidden
    keep: float = 0.5  # the probability that a part is kept
    exact: bool | None = None  # use all 2^n masks; None: if they are no more than `masks`
    antithetic: bool = True  # draw masks in pairs
    tolerance: float | None = None  # stop when no standard error is larger
    seed: int = 0
    batch: int = 64  # inputs per call; changes results only by the rounding of the black box

    def __post_init__(self) -> None:
        if not MIN_KEEP <= self.keep <= 1 - MIN_KEEP:
            raise UserError(f"keep = {self.keep}: must be a probability from {MIN_KEEP} to {1 - MIN_KEEP}")
        if self.masks < MIN_MASKS or self.batch < 1:
            raise UserError(
                f"masks = {self.masks}, batch = {self.batch}: must be at least {MIN_MASKS} masks and batches of 1"
            )
        if self.tolerance is not None and not self.tolerance > 0:
            raise UserError(f"tolerance = {self.tolerance}: must be above 0")

    def enumerates(self, parts: int) -> bool:
        """Whether all masks over `parts` parts are enumerated."""
        if self.exact and parts > MAX_EXACT_PARTS:
            raise UserError(f"{parts} parts have 2^{parts} masks: exact only up to {MAX_EXACT_PARTS} parts")
        return bool(self.exact) or (self.exact is None and parts <= MAX_EXACT_PARTS and 2**parts <= self.masks)


def mask_uniforms(numbers: Sequence[int], count: int, sampling: Sampling) -> tuple[Numbers, Numbers]:
    """`count` uniform numbers [B, count] for each of the masks with these numbers, and the same before pairing.

    Antithetic masks 2k and 2k + 1 are a pair: they use the same uniform numbers as u and 1 - u.
    """
    number = np.asarray(numbers)
    pair = number // 2 if sampling.antithetic else number
    bits = keys(sampling.seed, pair.tolist(), count) >> np.uint64(32)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32  # never 0, 1/2 or 1, so a pair has no ties
    mirrored = sampling.antithetic & (number[:, None] % 2 == 1)
    return np.where(mirrored, 1.0 - uniform, uniform), uniform


class MaskSource(Protocol):
    """The kind of random masks of a black box."""

    independent: bool  # whether each part is kept or hidden on its own

    def draw(self, numbers: Sequence[int], sampling: Sampling) -> Masks:
        """Draw the masks [B, n] with these numbers."""

    def variance(self, keep: float) -> float:
        """The variance of one entry of a mask."""


@dataclass(frozen=True)
class IndependentMasks:
    """Each of n parts is kept with probability p."""

    parts: int
    independent = True

    def draw(self, numbers: Sequence[int], sampling: Sampling) -> NDArray[np.bool_]:
        """True where a part is kept, [B, n]."""
        return mask_uniforms(numbers, self.parts, sampling)[0] < sampling.keep

    def variance(self, keep: float) -> float:
        return keep * (1 - keep)


def every_mask(numbers: Sequence[int], parts: int) -> NDArray[np.bool_]:
    """The masks [B, n] with these numbers among all 2^n: bit i of a number says whether part i is kept."""
    return (np.asarray(numbers)[:, None] >> np.arange(parts) & 1).astype(bool)


@dataclass(frozen=True)
class BlackBox:
    """A function to explain, the parts of its input, and a function that makes an input with some of them hidden.

    `function` maps a list of inputs to scores [B] or [B, O]. The overall score is the sum of the outputs weighted by
    `weights` [O] (None: 1 each). `source` draws the masks (None: independent ones, which `masked` gets as lists; it
    gets others as arrays). The parts of an image are its pixels, row by row; `grid` are its height and width.
    """

    function: ScoreFn
    parts: tuple[str, ...]
    masked: Callable[[Sequence[bool]], Any]
    outputs: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    score: str = "score"  # the name of what the outputs measure
    source: MaskSource | None = None
    grid: tuple[int, int] | None = None

    @property
    def masks(self) -> MaskSource:
        return IndependentMasks(len(self.parts)) if self.source is None else self.source

    def enumerates(self, sampling: Sampling) -> bool:
        """Whether all masks are used instead of random ones."""
        return self.masks.independent and sampling.enumerates(len(self.parts))

    def count_masks(self, sampling: Sampling) -> int:
        """The most masks that an explanation uses."""
        return 2 ** len(self.parts) if self.enumerates(sampling) else sampling.masks

    @classmethod
    def of(cls, function: ScoreFn, features: str | Sequence[Any], hidden: Any = None, **more: Any) -> BlackBox:
        """Make a black box from a text, whose parts are its words, or from a list of parts.

        `function` then receives texts, or lists. `hidden` replaces a hidden part; None: it is left out.
        """
        whole = features.split() if isinstance(features, str) else list(features)

        def masked(keep: Sequence[bool]) -> Any:
            if hidden is None:
                parts = [part for part, kept in zip(whole, keep, strict=True) if kept]
            else:
                parts = [part if kept else hidden for part, kept in zip(whole, keep, strict=True)]
            return " ".join(map(str, parts)) if isinstance(features, str) else parts

        return cls(function, tuple(map(str, whole)), more.pop("masked", None) or masked, **more)


@dataclass(frozen=True, eq=False)
class Explanation(NotebookDisplay):
    """The importance of each part of an input.

    `importance[i]` ([n], or [n, O] for several outputs) is the increase of the score by part i, averaged over masks of
    the other parts; `error` are standard errors (0 where exact). `overall` [n] is the same for the overall score, which
    is `whole` with nothing hidden and `nothing` with everything hidden.
    """

    features: tuple[str, ...]
    importance: Numbers
    error: Numbers
    overall: Numbers
    overall_error: Numbers
    whole: float
    nothing: float
    calls: int
    exact: bool
    outputs: tuple[str, ...] = ()
    keep: float = 0.5
    score: str = "score"  # the name of what the outputs measure
    title: str = ""
    grid: tuple[int, int] | None = None  # height and width of an image, whose pixels are the parts

    def map(self, output: str | None = None) -> Numbers:
        """The importance of an image's pixels, [height, width], for one output (default: for the overall score)."""
        if self.grid is None:
            raise UserError("only explanations of images have a map")
        values = self.overall if output is None else self.importance[:, self.outputs.index(output)]
        return values.reshape(self.grid)

    @cached_property
    def order(self) -> list[int]:
        """The indices of the parts by overall importance, the greatest first; a stable order."""
        return np.argsort(-self.overall, kind="stable").tolist()

    def shares(self) -> Numbers:
        """Normalise the positive importances of each output to sum to one: [O, n], comparable to attention weights.

        Negative importances count as zero; an output without positive ones has a row of zeros.
        """
        rows = self.importance.T if self.importance.ndim == 2 else self.importance[None]
        positive = rows.clip(min=0.0)
        total = positive.sum(1, keepdims=True)
        return np.divide(positive, total, out=np.zeros_like(positive), where=total > 0)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain numbers, texts and lists."""
        return {
            "features": list(self.features),
            "outputs": list(self.outputs),
            "importance": self.importance.tolist(),
            "error": self.error.tolist(),
            "overall": self.overall.tolist(),
            "overall_error": self.overall_error.tolist(),
            "whole": self.whole,
            "nothing": self.nothing,
            "calls": self.calls,
            "exact": self.exact,
            "keep": self.keep,
            "score": self.score,
        }


def explain(
    function: ScoreFn | BlackBox,
    features: str | Sequence[Any] | None = None,
    *,
    hidden: Any = None,
    masked: Callable[[Sequence[bool]], Any] | None = None,
    outputs: Sequence[str] = (),
    progress: Progress | None = None,
    **sampling: Any,
) -> Explanation:
    """Estimate the importance of every feature for the scores of a callable; the settings are those of `Sampling`.

    `function` maps a list of inputs to scores [B] or [B, O]. The words of a text, or the elements of a list, are left
    out at random, or replaced by `hidden`; or `masked` makes the input from a list that says which features are kept.

    >>> explain(lambda texts: ["not" in text for text in texts], "this is not fun").importance.tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    if isinstance(function, BlackBox):
        box = function
    elif features is None:
        raise TypeError("explain(f, features) needs the features of the callable")
    else:
        box = BlackBox.of(function, features, hidden, masked=masked, outputs=tuple(outputs))
    return deque(stream(box, Sampling(**sampling), progress), maxlen=1)[0]  # the last one


def stream(box: BlackBox, sampling: Sampling, progress: Progress | None = None) -> Iterator[Explanation]:
    """Yield better and better explanations, after every block of masks; `progress` is called with the masks used."""
    if not box.parts:
        raise UserError("there is nothing to explain: the input has no parts to hide")
    if box.enumerates(sampling):
        yield _enumerate(box, sampling, progress)
    else:
        yield from _sample(box, sampling, progress)


class MaskScorer:
    """Scores masks with a black box, in batches, and counts the inputs."""

    def __init__(self, box: BlackBox, batch: int) -> None:
        self.box, self.batch, self.calls = box, batch, 0
        self.single = False  # whether the black box has one output

    def __call__(self, masks: Masks) -> Numbers:
        """Map masks [B, n] to [B, O + 1]: the outputs, and the overall score last."""
        rows = [self._scores(masks[at : at + self.batch]) for at in range(0, len(masks), self.batch)]
        outputs = np.concatenate(rows)
        weights = self.box.weights if self.box.weights is not None else np.ones(outputs.shape[1])
        return np.concatenate([outputs, (outputs @ np.asarray(weights, np.float64))[:, None]], 1)

    def _scores(self, masks: Masks) -> Numbers:
        inputs = [self.box.masked(mask) for mask in (masks.tolist() if self.box.source is None else masks)]
        scores = np.asarray(self.box.function(inputs), dtype=np.float64)
        self.calls += len(inputs)
        outputs = len(self.box.outputs)
        if scores.ndim not in (1, 2) or len(scores) != len(inputs) or (outputs and scores.shape[-1] != outputs):
            expected = f"({len(inputs)}, {outputs})" if outputs else f"({len(inputs)},) or ({len(inputs)}, outputs)"
            raise UserError(f"the black box answered {len(inputs)} inputs with shape {scores.shape}, not {expected}")
        if not np.isfinite(scores).all():
            raise UserError("the black box returned a score that is not a finite number")
        self.single = scores.ndim == 1
        return scores[:, None] if self.single else scores


class _Means:
    """The estimate as a running mean of z over groups of masks (pairs, or single ones).

    z = (f - b) (m_i - p) / v, or the mean of that over a pair: [n, O + 1] for each group. The sums of z and of its
    square are matrix products of the two factors, so that z itself is never stored.
    """

    def __init__(self, keep: float, variance: float, paired: bool) -> None:
        self.keep, self.variance, self.paired, self.groups = keep, variance, paired, 0
        self.first = self.second = np.zeros(())  # sums of z and of its square

    def add(self, masks: Masks, scores: Numbers) -> None:
        """`masks` [B, n], pairs next to each other, and f - b [B, O + 1]."""
        factor = (masks - self.keep) / self.variance
        first, second = factor.T @ scores, (factor**2).T @ scores**2
        if self.paired:
            second = second + 2 * (factor[0::2] * factor[1::2]).T @ (scores[0::2] * scores[1::2])
            first, second = first / 2, second / 4
        self.first, self.second = self.first + first, self.second + second
        self.groups += len(masks) // 2 if self.paired else len(masks)

    def estimate(self) -> tuple[Numbers, Numbers]:
        """The means and their standard errors."""
        mean = self.first / self.groups
        variance = (self.second - self.first * mean) / (self.groups - 1)
        return mean, np.sqrt(variance.clip(min=0.0) / self.groups)


class _LeastSquares(_Means):
    """The estimate by least squares, for complementary pairs: f(m) - f(1 - m) = sum of importance_i s_i + residual.

    The residual (interactions of parts) is uncorrelated with every sign s_i = 2 m_i - 1, and s_i^2 = 1, so that the
    usual standard errors, residual^2 (S'S)^-1, hold although it depends on s. With few pairs, it is the mean.
    """

    def __init__(self) -> None:
        super().__init__(0.5, 0.25, True)
        self.gram = self.cross = self.squares = np.zeros(())

    def add(self, masks: Masks, scores: Numbers) -> None:
        super().add(masks, scores)
        signs, change = 2.0 * masks[0::2] - 1.0, scores[0::2] - scores[1::2]
        self.gram = self.gram + signs.T @ signs
        self.cross = self.cross + signs.T @ change
        self.squares = self.squares + (change**2).sum(0)

    def estimate(self) -> tuple[Numbers, Numbers]:
        parts = len(self.first)
        if self.groups < 2 * parts + MIN_FIT_PAIRS:
            return super().estimate()
        inverse = np.linalg.inv(self.gram)
        solution = inverse @ self.cross
        residual = (self.squares - (solution * self.cross).sum(0)).clip(min=0.0) / (self.groups - parts)
        return solution, np.sqrt(np.diagonal(inverse)[:, None] * residual)


def _sample(box: BlackBox, sampling: Sampling, progress: Progress | None) -> Iterator[Explanation]:
    parts, keep, scorer = len(box.parts), sampling.keep, MaskScorer(box, sampling.batch)
    ends = scorer(np.array([[True] * parts, [False] * parts]))
    baseline = ends.mean(0)  # b: any constant is unbiased; this one reduces the variance
    fits = box.masks.independent and sampling.antithetic and keep == 0.5
    estimator = _LeastSquares() if fits else _Means(keep, box.masks.variance(keep), sampling.antithetic)
    count = sampling.masks - (sampling.masks % 2 if sampling.antithetic else 0)
    for start in range(0, count, BLOCK):
        masks = box.masks.draw(range(start, min(start + BLOCK, count)), sampling)
        estimator.add(masks, scorer(masks) - baseline)
        if progress is not None:
            progress(len(masks))
        mean, error = estimator.estimate()
        yield _explanation(scorer, mean, error, ends, sampling)
        if sampling.tolerance is not None and error.max() <= sampling.tolerance:
            return


def _enumerate(box: BlackBox, sampling: Sampling, progress: Progress | None) -> Explanation:
    """Compute the exact expectation over all masks, each weighted by p^kept (1 - p)^hidden."""
    parts, keep, scorer = len(box.parts), sampling.keep, MaskScorer(box, sampling.batch)
    total, ends = np.zeros(()), list[Numbers]()
    for start in range(0, 2**parts, BLOCK):
        masks = every_mask(range(start, min(start + BLOCK, 2**parts)), parts)
        scores = scorer(masks)
        probability = np.where(masks, keep, 1 - keep).prod(1)
        total = total + ((masks - keep) / (keep * (1 - keep)) * probability[:, None]).T @ scores
        ends = [ends[0] if ends else scores[0], scores[-1]]  # the first mask keeps nothing, the last one everything
        if progress is not None:
            progress(len(masks))
    explanation = _explanation(scorer, total, np.zeros_like(total), np.array(ends[::-1]), sampling)
    return replace(explanation, exact=True)


def _explanation(scorer: MaskScorer, mean: Numbers, error: Numbers, ends: Numbers, sampling: Sampling) -> Explanation:
    box, single = scorer.box, scorer.single
    names = () if single else box.outputs or tuple(str(i + 1) for i in range(mean.shape[1] - 1))
    return Explanation(
        features=box.parts,
        importance=mean[:, -1] if single else mean[:, :-1],
        error=error[:, -1] if single else error[:, :-1],
        overall=mean[:, -1],
        overall_error=error[:, -1],
        whole=float(ends[0, -1]),
        nothing=float(ends[1, -1]),
        calls=scorer.calls,
        exact=False,
        outputs=names,
        keep=sampling.keep,
        score=box.score,
        grid=box.grid,
    )
