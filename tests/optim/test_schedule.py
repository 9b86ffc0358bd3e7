"""The learning rate: exact at its ends, without jumps, within its bounds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.config.schema import LrSchedule
from koushi.optim.schedule import learning_rate

SCHEDULES = st.builds(
    LrSchedule,
    warmup_steps=st.integers(0, 20),
    decay=st.sampled_from(("none", "linear", "cosine")),
    decay_fraction=st.floats(0, 1),
    min_lr_ratio=st.floats(0, 1),
)


def rates(steps: int, peak: float = 2.0, **options: object) -> list[float]:
    schedule = LrSchedule.model_validate(options)
    return [learning_rate(step, steps, peak, schedule) for step in range(steps)]


def test_warm_up_rises_to_the_peak_at_its_last_step() -> None:
    found = rates(10, warmup_steps=4, decay="none")
    assert found == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_linear_decay_ends_at_the_lowest_rate() -> None:
    assert rates(5, decay="linear", min_lr_ratio=0.5) == pytest.approx([1.8, 1.6, 1.4, 1.2, 1.0])


def test_cosine_decay_ends_at_the_lowest_rate() -> None:
    found = rates(4, decay="cosine", min_lr_ratio=0.1)
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * into / 4)) / 2) for into in (1, 2, 3, 4)]
    assert found == pytest.approx(expected)
    assert found[1] == pytest.approx(1.1), "half of the way at half of the time"
    assert found[-1] == pytest.approx(0.2, rel=1e-15)


def test_the_part_before_decay_is_stable() -> None:
    found = rates(12, warmup_steps=2, decay="linear", decay_fraction=0.3, min_lr_ratio=0.0)
    assert found[:2] == [1.0, 2.0]
    assert found[2:9] == [2.0] * 7
    assert found[9:] == pytest.approx([2 * 2 / 3, 2 / 3, 0.0])


def test_parts_may_be_missing() -> None:
    assert rates(3, warmup_steps=3) == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert rates(3, decay_fraction=0.0) == [2.0] * 3
    assert rates(1, min_lr_ratio=0.25) == [0.5]


@given(schedule=SCHEDULES, steps=st.integers(1, 60), peak=st.floats(1e-6, 10))
def test_bounds_and_order(schedule: LrSchedule, steps: int, peak: float) -> None:
    found = [learning_rate(step, steps, peak, schedule) for step in range(steps)]
    warmed, after = found[: schedule.warmup_steps], found[schedule.warmup_steps :]
    assert warmed == sorted(warmed)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in warmed)
    assert after == sorted(after, reverse=True)
    assert all(peak * schedule.min_lr_ratio * (1 - 1e-12) <= rate <= peak * (1 + 1e-12) for rate in after)
    decays = schedule.decay != "none" and round(len(after) * schedule.decay_fraction) > 0
    if after:
        assert after[-1] == pytest.approx(peak * schedule.min_lr_ratio if decays else peak, abs=1e-12)


@given(schedule=SCHEDULES, steps=st.integers(1, 60))
def test_there_are_no_jumps(schedule: LrSchedule, steps: int) -> None:
    """No step is larger than the steepest slope: a warm-up step, or a cosine's middle."""
    found = [learning_rate(step, steps, 1.0, schedule) for step in range(steps)]
    decay_steps = max(1, round((steps - schedule.warmup_steps) * schedule.decay_fraction))
    for step, (before, after) in enumerate(pairwise(found), start=1):
        largest = 1 / schedule.warmup_steps if step < schedule.warmup_steps else math.pi / 2 / decay_steps
        assert abs(after - before) <= largest + 1e-12
