"""Learning rate schedules against their formulas."""

from __future__ import annotations

import math

import pytest

from regard.recipes.schema import TrainingSettings
from regard.training.schedule import peak_rate, rate

STEPS = [1, 2, 3, 10, 399, 400, 401, 1000, 3999, 4000, 4001, 10_000, 99_999, 100_000, 300_000]


@pytest.mark.parametrize("width", [8, 512, 1024])
@pytest.mark.parametrize("warmup", [1, 400, 4000])
def test_noam_is_the_papers_formula(width: int, warmup: int) -> None:
    """Vaswani et al. 2017, equation 3."""
    settings = TrainingSettings(schedule="noam", warmup=warmup)
    for step in STEPS:
        assert rate(settings, width, step) == pytest.approx(width**-0.5 * min(step**-0.5, step * warmup**-1.5), 1e-12)


def test_the_papers_base_model_peaks_at_seven_in_ten_thousand() -> None:
    """512^-0.5 · 4000^-0.5 = 1 / sqrt(2,048,000) = 6.987712...e-4"""
    assert peak_rate(TrainingSettings(), 512) == pytest.approx(6.98771e-4, rel=1e-5)
    assert max(STEPS, key=lambda step: rate(TrainingSettings(), 512, step)) == 4000


def test_a_given_peak_keeps_the_shape_of_noam() -> None:
    settings = TrainingSettings(schedule="noam", warmup=100, learning_rate=0.5)
    assert [rate(settings, 512, step) for step in (1, 50, 100, 400, 10_000)] == pytest.approx(
        [0.005, 0.25, 0.5, 0.25, 0.05]
    )


@pytest.mark.parametrize(
    ("schedule", "after"),  # at the peak, after 1/4, 1/2, 3/4 and all of the decay, and later
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
    ],
)
def test_the_other_schedules_rise_to_the_peak_and_fall_to_zero(schedule: str, after: list[float]) -> None:
    settings = TrainingSettings.model_validate({"schedule": schedule, "warmup": 10, "steps": 50, "learning_rate": 0.2})
    assert [rate(settings, 64, step) for step in (1, 5, 10)] == pytest.approx([0.02, 0.1, 0.2])
    rates = [rate(settings, 64, step) for step in (10, 20, 30, 40, 50, 60)]
    assert rates == pytest.approx([0.2 * part for part in after], abs=1e-15)


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    settings = TrainingSettings(schedule="cosine", warmup=100, steps=10, learning_rate=1.0)
    assert [rate(settings, 64, step) for step in (1, 10)] == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_final_rate_is_the_remaining_share_of_the_peak(schedule: str) -> None:
    """Halfway from 1 to 0.1 is 0.55."""
    settings = TrainingSettings.model_validate(
        {"schedule": schedule, "warmup": 10, "steps": 50, "learning_rate": 0.2, "final_rate": 0.1}
    )
    assert [rate(settings, 64, step) for step in (5, 10, 30, 50, 60)] == pytest.approx([0.1, 0.2, 0.11, 0.02, 0.02])


def test_stable_stays_at_the_peak_and_falls_over_the_last_share_of_the_steps() -> None:
    """The rate decays from 0.2 to 0.02 over the last 40 of 100 steps; step 80 is halfway."""
    settings = TrainingSettings(
        schedule="stable", warmup=10, steps=100, learning_rate=0.2, cooldown=0.4, final_rate=0.1
    )
    rates = [rate(settings, 64, step) for step in (5, 10, 11, 60, 80, 100, 110)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.11, 0.02, 0.02])


def test_the_stable_part_does_not_depend_on_how_long_it_lasts() -> None:
    """A run can be resumed with more steps, since the rates so far are the same."""
    short, long = (
        TrainingSettings(schedule="stable", warmup=10, steps=steps, learning_rate=1.0) for steps in (100, 1000)
    )
    assert [rate(short, 64, step) for step in range(1, 61)] == [rate(long, 64, step) for step in range(1, 61)]
