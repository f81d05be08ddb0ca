"""RISE (Petsiuk, Das and Saenko 2018) for anything whose input can be hidden part by part.

Parts of the input are kept with probability p, at random, and the black box is called on what is left:

    importance_i = E[f | part i kept] - E[f | part i hidden] = E[(f(m) - b) (m_i - p)] / (p (1 - p))

for any constant b. With p = 1/2 this is the Banzhaf value of the game f, and for few parts the expectation can be taken
over all 2^n masks. Masks come in pairs, u and 1 - u of the same uniform numbers (with p = 1/2: a mask and its
complement), so that what all masks have in common drops out. And with p = 1/2 the importances are the coefficients of
the best linear fit to f, so that least squares estimates them, once there are pairs enough: what the other parts add on
their own is then no longer noise.
Shapes: B masks, n parts, O outputs of the black box.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.decoding.sampling import keys
from regard.errors import UserError
from regard.interpret.notebook import NotebookDisplay

Masks = NDArray[np.bool_]
Numbers = NDArray[np.float64]
Asked = Callable[[list[Any]], Any]
Progress = Callable[[int], None]

MOST_EXACT = 12  # parts; 4096 calls
BLOCK = 128  # masks between two looks at the error bars, and the most that are held at once
LEAST_KEEP = 0.01  # with rarer parts kept (or hidden), no number of masks that can be asked tells anything
FEWEST = 4  # masks: two pairs, or there are no error bars
ENOUGH = 32  # pairs, beside two for each part, from which on there is a fit


@dataclass(frozen=True)
class Sampling:
    """How a black box is asked. The masks are a function of `seed` and their number alone."""

    masks: int = 1000  # the most to draw; with everything kept and with nothing it is asked besides
    keep: float = 0.5  # how likely a part is kept
    exact: bool | None = None  # all 2^n masks; None: where they are no more than `masks`
    antithetic: bool = True  # masks in pairs
    tolerance: float | None = None  # stop as soon as every standard error is at most this
    seed: int = 0
    batch: int = 64  # inputs a call; changes results only by the black box's own rounding

    def __post_init__(self) -> None:
        if not LEAST_KEEP <= self.keep <= 1 - LEAST_KEEP:
            raise UserError(f"keep = {self.keep}: must be a probability from {LEAST_KEEP} to {1 - LEAST_KEEP}")
        if self.masks < FEWEST or self.batch < 1:
            few = f"{self.masks} masks in batches of {self.batch}"
            raise UserError(f"{few}: there must be at least {FEWEST}, in batches of 1")
        if self.tolerance is not None and not self.tolerance > 0:
            raise UserError(f"tolerance = {self.tolerance}: must be above 0")

    def enumerates(self, parts: int) -> bool:
        """Whether all masks over so many parts are gone through."""
        if self.exact and parts > MOST_EXACT:
            raise UserError(f"{parts} parts have 2^{parts} masks: exactly only up to {MOST_EXACT} parts")
        return bool(self.exact) or (self.exact is None and parts <= MOST_EXACT and 2**parts <= self.masks)


def draw_masks(numbers: Sequence[int], parts: int, sampling: Sampling) -> Masks:
    """[B, n] the masks with these numbers: True where a part is kept.

    Numbers 2k and 2k + 1 are a pair when they are antithetic: they share their uniform numbers, u and 1 - u.
    """
    number = np.asarray(numbers)
    own = number // 2 if sampling.antithetic else number
    bits = keys(sampling.seed, own.tolist(), parts) >> np.uint64(32)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32  # never 0, 1/2 or 1, so a pair has no ties
    if sampling.antithetic:
        uniform = np.where(number[:, None] % 2 == 1, 1.0 - uniform, uniform)
    return uniform < sampling.keep


def every_mask(numbers: Sequence[int], parts: int) -> Masks:
    """[B, n] the masks with these numbers among all 2^n: bit i of the number says whether part i is kept."""
    return (np.asarray(numbers)[:, None] >> np.arange(parts) & 1).astype(bool)


@dataclass(frozen=True)
class BlackBox:
    """What is asked, the parts of its input, and how an input with some of them hidden is made.

    `ask` gets a list of inputs and gives scores [B] or [B, O]. `weights` [O] say how the outputs add up to the one
    score of the whole answer (None: their sum).
    """

    ask: Asked
    parts: tuple[str, ...]
    masked: Callable[[Sequence[bool]], Any]
    outputs: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    score: str = "score"  # what the outputs are

    @classmethod
    def of(cls, ask: Asked, features: str | Sequence[Any], hidden: Any = None, **more: Any) -> BlackBox:
        """From a text, whose words are its parts, or a list of parts; `ask` then gets texts, or lists.

        `hidden` stands where a part is hidden; None: it is left out.
        """
        whole = features.split() if isinstance(features, str) else list(features)

        def masked(keep: Sequence[bool]) -> Any:
            both = [part if kept else hidden for part, kept in zip(whole, keep, strict=True)]
            left = both if hidden is not None else [part for part, kept in zip(whole, keep, strict=True) if kept]
            return " ".join(map(str, left)) if isinstance(features, str) else left

        return cls(ask, tuple(map(str, whole)), more.pop("masked", None) or masked, **more)


@dataclass(frozen=True, eq=False)
class Explanation(NotebookDisplay):
    """What the answer depended on while parts of the input were hidden.

    `importance[i]` ([n], or [n, O] for several outputs) is by how much part i raises the score, on average over what
    else is hidden; `error` are standard errors (0 where exact). `overall` [n] is the same for the one score of the
    whole answer, which is `whole` with nothing hidden and `nothing` with everything.
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
    score: str = "score"  # what is changed by so much
    title: str = ""

    @cached_property
    def order(self) -> list[int]:
        """The parts, the most important for the whole answer first; equals in their own order."""
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
        """Everything, as plain numbers and texts."""
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
    ask: Asked | BlackBox,
    features: str | Sequence[Any] | None = None,
    *,
    hidden: Any = None,
    masked: Callable[[Sequence[bool]], Any] | None = None,
    outputs: Sequence[str] = (),
    progress: Progress | None = None,
    **sampling: Any,
) -> Explanation:
    """The importance of every feature for what a callable answers; the settings are those of `Sampling`.

    `ask` gets a list of inputs and returns scores [B] or [B, O]. The words of a text, or the entries of a list, are
    left out at random, or replaced by `hidden`; or `masked`, from which features are kept to an input, makes the input.

    >>> explain(lambda texts: ["not" in text for text in texts], "this is not fun").importance.tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    if isinstance(ask, BlackBox):
        box = ask
    elif features is None:
        raise TypeError("a callable is explained by its features: explain(f, features)")
    else:
        box = BlackBox.of(ask, features, hidden, masked=masked, outputs=tuple(outputs))
    return deque(stream(box, Sampling(**sampling), progress), maxlen=1)[0]  # the last one


def stream(box: BlackBox, sampling: Sampling, progress: Progress | None = None) -> Iterator[Explanation]:
    """The explanation as it gets better, after every block of masks; `progress` hears how many masks were asked."""
    if not box.parts:
        raise UserError("there is nothing to explain: the input has no part that could be hidden")
    if sampling.enumerates(len(box.parts)):
        yield _enumerate(box, sampling, progress)
    else:
        yield from _sample(box, sampling, progress)


class Asker:
    """Calls a black box on masks, a batch at a time, and counts the calls."""

    def __init__(self, box: BlackBox, batch: int) -> None:
        self.box, self.batch, self.calls = box, batch, 0
        self.single = False  # it answers with one number

    def __call__(self, masks: Masks) -> Numbers:
        """[B, n] -> [B, O + 1]: the outputs, and the score of the whole last."""
        rows = [self._scores(masks[at : at + self.batch]) for at in range(0, len(masks), self.batch)]
        outputs = np.concatenate(rows)
        weights = self.box.weights if self.box.weights is not None else np.ones(outputs.shape[1])
        return np.concatenate([outputs, (outputs @ np.asarray(weights, np.float64))[:, None]], 1)

    def _scores(self, masks: Masks) -> Numbers:
        inputs = [self.box.masked(mask) for mask in masks.tolist()]
        found = np.asarray(self.box.ask(inputs), dtype=np.float64)
        self.calls += len(inputs)
        wanted = len(self.box.outputs)
        if found.ndim not in (1, 2) or len(found) != len(inputs) or (wanted and found.shape[-1] != wanted):
            expected = f"({len(inputs)}, {wanted})" if wanted else f"({len(inputs)},) or ({len(inputs)}, outputs)"
            raise UserError(f"the black box answered {len(inputs)} inputs with shape {found.shape}, not {expected}")
        if not np.isfinite(found).all():
            raise UserError("the black box gave a score that is not a finite number")
        self.single = found.ndim == 1
        return found[:, None] if self.single else found


class _Means:
    """The estimate as a running mean over groups of masks (pairs, or single ones) of what each contributes, z.

    z = (f - b) (m_i - p) / (p (1 - p)), or a pair's mean of that; [n, O + 1] of them a group, which are never all made:
    the sums need only products of the two factors.
    """

    def __init__(self, keep: float, paired: bool) -> None:
        self.keep, self.paired, self.groups = keep, paired, 0
        self.first = self.second = np.zeros(())  # sums of z and of its square

    def add(self, masks: Masks, scores: Numbers) -> None:
        """`masks` [B, n], pairs next to each other, and f - b [B, O + 1]."""
        tilt = (masks - self.keep) / (self.keep * (1 - self.keep))
        first, second = tilt.T @ scores, (tilt**2).T @ scores**2
        if self.paired:
            second = second + 2 * (tilt[0::2] * tilt[1::2]).T @ (scores[0::2] * scores[1::2])
            first, second = first / 2, second / 4
        self.first, self.second = self.first + first, self.second + second
        self.groups += len(masks) // 2 if self.paired else len(masks)

    def estimate(self) -> tuple[Numbers, Numbers]:
        """The means and their standard errors."""
        mean = self.first / self.groups
        variance = (self.second - self.first * mean) / (self.groups - 1)
        return mean, np.sqrt(variance.clip(min=0.0) / self.groups)


class _Fit(_Means):
    """The estimate by least squares, for pairs of complements: f(m) - f(1 - m) = sum of importance_i s_i + rest.

    The rest, what parts do only together, is uncorrelated with every sign s_i = 2 m_i - 1, and s_i^2 = 1, so that the
    usual standard errors, rest^2 (S'S)^-1, are right though it depends on s. Before there are pairs enough to tell the
    parts from one another, it is the mean.
    """

    def __init__(self) -> None:
        super().__init__(0.5, True)
        self.gram = self.cross = self.squares = np.zeros(())

    def add(self, masks: Masks, scores: Numbers) -> None:
        super().add(masks, scores)
        signs, change = 2.0 * masks[0::2] - 1.0, scores[0::2] - scores[1::2]
        self.gram = self.gram + signs.T @ signs
        self.cross = self.cross + signs.T @ change
        self.squares = self.squares + (change**2).sum(0)

    def estimate(self) -> tuple[Numbers, Numbers]:
        parts = len(self.first)
        if self.groups < 2 * parts + ENOUGH:
            return super().estimate()
        inverse = np.linalg.inv(self.gram)
        found = inverse @ self.cross
        rest = (self.squares - (found * self.cross).sum(0)).clip(min=0.0) / (self.groups - parts)
        return found, np.sqrt(np.diagonal(inverse)[:, None] * rest)


def _sample(box: BlackBox, sampling: Sampling, progress: Progress | None) -> Iterator[Explanation]:
    parts, keep, asker = len(box.parts), sampling.keep, Asker(box, sampling.batch)
    ends = asker(np.array([[True] * parts, [False] * parts]))
    middle = ends.mean(0)  # b: not needed, but with it less is left to chance
    running = _Fit() if sampling.antithetic and keep == 0.5 else _Means(keep, sampling.antithetic)
    most = sampling.masks - (sampling.masks % 2 if sampling.antithetic else 0)
    for start in range(0, most, BLOCK):
        masks = draw_masks(range(start, min(start + BLOCK, most)), parts, sampling)
        running.add(masks, asker(masks) - middle)
        if progress is not None:
            progress(len(masks))
        mean, error = running.estimate()
        yield _explanation(asker, mean, error, ends, sampling)
        if sampling.tolerance is not None and error.max() <= sampling.tolerance:
            return


def _enumerate(box: BlackBox, sampling: Sampling, progress: Progress | None) -> Explanation:
    """The expectation itself: every mask, weighted by p^kept (1 - p)^hidden."""
    parts, keep, asker = len(box.parts), sampling.keep, Asker(box, sampling.batch)
    total, ends = np.zeros(()), list[Numbers]()
    for start in range(0, 2**parts, BLOCK):
        masks = every_mask(range(start, min(start + BLOCK, 2**parts)), parts)
        scores = asker(masks)
        chance = np.where(masks, keep, 1 - keep).prod(1)
        total = total + ((masks - keep) / (keep * (1 - keep)) * chance[:, None]).T @ scores
        ends = [ends[0] if ends else scores[0], scores[-1]]  # nothing kept comes first, everything last
        if progress is not None:
            progress(len(masks))
    found = _explanation(asker, total, np.zeros_like(total), np.array(ends[::-1]), sampling)
    return replace(found, exact=True)


def _explanation(asker: Asker, mean: Numbers, error: Numbers, ends: Numbers, sampling: Sampling) -> Explanation:
    box, single = asker.box, asker.single
    names = () if single else box.outputs or tuple(str(i + 1) for i in range(mean.shape[1] - 1))
    return Explanation(
        features=box.parts,
        importance=mean[:, -1] if single else mean[:, :-1],
        error=error[:, -1] if single else error[:, :-1],
        overall=mean[:, -1],
        overall_error=error[:, -1],
        whole=float(ends[0, -1]),
        nothing=float(ends[1, -1]),
        calls=asker.calls,
        exact=False,
        outputs=names,
        keep=sampling.keep,
        score=box.score,
    )
