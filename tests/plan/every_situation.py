"""Every situation of a pipelined rank, each counted anew from the actions before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from koushi.plan.schedule import Order
from koushi.plan.situations import Habits, Situation


def every_situation(order: Order, microbatches: int, habits: Habits, kinds: Sequence[int]) -> Iterator[Situation]:
    """Of the rank that acts in ``order``; ``kinds`` as for ``fullest_situations``."""
    held = dict.fromkeys(action.stage for action in order)
    for place, (step, stage, _) in enumerate(order):
        mine: dict[int, list[str]] = {one: [] for one in held}
        for action in order[:place]:
            mine[action.stage].append(action.kind)
        yield _situation(step, stage, mine, microbatches, habits, kinds)
        mine[stage].append(step)
        if _done(mine[stage]) == microbatches:
            yield _situation("R", stage, mine, microbatches, habits, kinds)


def _situation(
    step: str, stage: int, mine: dict[int, list[str]], microbatches: int, habits: Habits, kinds: Sequence[int]
) -> Situation:
    many = max(kinds) + 1
    counts, reduced = [[0] * many for _ in range(5)], [0] * many
    for one, steps in mine.items():
        forwards, inputs, wholes, done = steps.count("F"), steps.count("I"), steps.count("B"), _done(steps)
        begun, sent = inputs + wholes, inputs + wholes * habits.wholes_stay
        summed, late = gradients(steps, one, habits.adds_late)
        if done == microbatches and not (step == "R" and one == stage):
            reduced[kinds[one]] += 1
            summed = late = False
        each = (
            forwards - begun,
            begun - done,
            sum(one in habits.stays_sent for one in range(1, sent + 1)),
            summed,
            late,
        )
        for what, count in enumerate(each):
            counts[what][kinds[one]] += count
    summed, late = gradients(mine[stage], stage, habits.adds_late)
    in_flight = sum(steps.count("F") - _done(steps) for steps in mine.values())
    flat = tuple(count for by_kind in counts for count in by_kind)
    return Situation(step, kinds[stage], not summed, late, tuple(reduced), flat, stage, in_flight)  # type: ignore[arg-type]


def _done(steps: Sequence[str]) -> int:
    return steps.count("B") + steps.count("W")


def gradients(steps: Sequence[str], stage: int, adds_late: bool) -> tuple[bool, bool]:
    """Whether a stage that has done ``steps`` has a sum of gradients, and some that are not added to it."""
    summed = late = False
    for step in steps:
        if step == "B" or (step == "W" and (stage == 0 or not adds_late)):
            summed, late = True, False
        elif step == "W":
            late = True
        elif step == "I" and stage > 0:
            summed, late = summed or late, False
    return summed, late
