"""Learning rates as a function of the step, so that a resumed run needs no state."""

from __future__ import annotations

import math

from regard.recipes.schema import TrainingSettings
from regard.registry import SCHEDULES


def peak_rate(settings: TrainingSettings, width: int) -> float:
    """The highest rate: as set, or the paper's, 1 / sqrt(width · warmup)."""
    return settings.learning_rate or 1 / math.sqrt(width * settings.warmup)


def rate(settings: TrainingSettings, width: int, step: int) -> float:
    """The learning rate of a step, counted from 1: linear warm-up to the peak, then the schedule of the recipe.

    A new schedule is a function here that returns the share of the peak at a step after the warm-up.
    """
    peak = peak_rate(settings, width)
    if step <= settings.warmup:
        return peak * step / settings.warmup
    share: float = SCHEDULES[settings.schedule](settings, step)
    return peak * share


@SCHEDULES.register("noam")
def noam(settings: TrainingSettings, step: int) -> float:
    """The paper's width^-0.5 · min(step^-0.5, step · warmup^-1.5), if the peak is the paper's."""
    return math.sqrt(settings.warmup / step)


@SCHEDULES.register("cosine")
def cosine(settings: TrainingSettings, step: int) -> float:
    """Half a cosine from the peak to `final_rate` of it at the last step."""
    return _falling(settings, 0.5 * (1 - math.cos(math.pi * _remaining(settings, step))))


@SCHEDULES.register("linear")
def linear(settings: TrainingSettings, step: int) -> float:
    """A line from the peak to `final_rate` of it at the last step."""
    return _falling(settings, _remaining(settings, step))


@SCHEDULES.register("stable")
def stable(settings: TrainingSettings, step: int) -> float:
    """The peak until the last `cooldown` of the steps, then a line to `final_rate` of it."""
    return _falling(settings, min(max(settings.steps - step, 0) / (settings.cooldown * settings.steps), 1.0))


@SCHEDULES.register("constant")
def constant(settings: TrainingSettings, step: int) -> float:
    """The peak."""
    return 1.0


def _remaining(settings: TrainingSettings, step: int) -> float:
    """The share of the steps after the warm-up that are still to come."""
    return 1 - min((step - settings.warmup) / max(settings.steps - settings.warmup, 1), 1.0)


def _falling(settings: TrainingSettings, shape: float) -> float:
    """A shape between 1 and 0, scaled to fall to `final_rate`."""
    return settings.final_rate + (1 - settings.final_rate) * shape
