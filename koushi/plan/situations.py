"""What a pipelined rank has going on at every action of its schedule: microbatches in flight, gradients. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

from koushi.plan.schedule import actions

Step = Literal["F", "B", "I", "W", "R"]
"""Actions of a schedule; R: a stage's gradients are reduced, after its last backward."""

BEFORE, WHOLE, REDUCED = range(3)
"""A stage's gradients: none yet, being added up, done."""


class Situation(NamedTuple):
    """As a rank begins an action."""

    step: Step
    stage: int
    """Its place among the rank's stages."""
    gradients: tuple[int, ...]
    """By stage: BEFORE, WHOLE or REDUCED."""
    counts: tuple[int, ...]
    """By stage: microbatches whose backward has not begun; then those whose backward is half done; then those
    whose gradient has been sent on."""


@lru_cache(maxsize=1024)
def situations(schedule: str, pp: int, n_stages: int, microbatches: int) -> tuple[tuple[Situation, ...], ...]:
    """Of every pipeline coordinate, those of a step that no other outdoes."""
    return tuple(
        tuple(_outstanding(_every(order, microbatches))) for order in actions(schedule, pp, n_stages, microbatches)
    )


def _every(order: Iterable[tuple[str, int, int]], microbatches: int) -> Iterable[Situation]:
    order = tuple(order)
    stages = sorted({stage for _, stage, _ in order})
    place = {stage: index for index, stage in enumerate(stages)}
    held = len(stages)
    gradients, counts = [BEFORE] * held, [0] * (3 * held)
    freed = [0] * held
    found: dict[Situation, None] = {}
    for kind, stage, _ in order:
        index = place[stage]
        found[Situation(kind, index, tuple(gradients), tuple(counts))] = None  # type: ignore[arg-type]
        if kind == "F":
            counts[index] += 1
            continue
        if kind != "W":
            counts[index] -= 1
            counts[2 * held + index] += 1
        if kind == "I":
            counts[held + index] += 1
            continue
        if kind == "W":
            counts[held + index] -= 1
        gradients[index] = WHOLE
        freed[index] += 1
        if freed[index] == microbatches:
            found[Situation("R", index, tuple(gradients), tuple(counts))] = None
            gradients[index] = REDUCED
    return found


def _outstanding(found: Iterable[Situation]) -> list[Situation]:
    """Those whose counts are not all matched by another's at the same action and with the same gradients."""
    alike: dict[tuple[str, int, tuple[int, ...]], list[Situation]] = {}
    for one in sorted(found, key=lambda one: -sum(one.counts)):
        others = alike.setdefault(one[:3], [])
        if not any(all(map(ge, other.counts, one.counts)) for other in others):
            others.append(one)
    return [one for others in alike.values() for one in others]
