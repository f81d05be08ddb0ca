"""Learning rates as a function of the step, so that a resumed run needs to remember nothing."""

from __future__ import annotations

import math

from regard.recipes.schema import TrainingSettings


def peak_rate(settings: TrainingSettings, width: int) -> float:
    """The highest rate: as set, or the paper's, 1 / sqrt(width · warmup)."""
    return settings.learning_rate or 1 / math.sqrt(width * settings.warmup)


def rate(settings: TrainingSettings, width: int, step: int) -> float:
    """Linear warm-up to the peak, then a fall of the chosen shape; the first update is step 1.

    linear and cosine fall to `final_rate` times the peak at the last step; stable stays at the peak until the last
    `cooldown` of the steps, and then falls to it linearly.

    noam is the paper's width^-0.5 · min(step^-0.5, step · warmup^-1.5) when the peak is the paper's.
    """
    peak = peak_rate(settings, width)
    if step <= settings.warmup:
        return peak * step / settings.warmup
    if settings.schedule == "noam":
        return peak * math.sqrt(settings.warmup / step)
    if settings.schedule == "constant":
        return peak
    left = 1 - min((step - settings.warmup) / max(settings.steps - settings.warmup, 1), 1.0)
    if settings.schedule == "cosine":
        shape = 0.5 * (1 - math.cos(math.pi * left))
    elif settings.schedule == "linear":
        shape = left
    else:
        shape = min(max(settings.steps - step, 0) / (settings.cooldown * settings.steps), 1.0)
    return peak * (settings.final_rate + (1 - settings.final_rate) * shape)
