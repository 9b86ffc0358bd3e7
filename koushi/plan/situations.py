"""What a pipelined rank has going on at every action of its schedule: microbatches in flight, gradients. No torch.

Stages that are alike are counted together, and of all moments only those are kept that no other outdoes, so that a
long schedule of many stages comes down to a few of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

from koushi.plan.schedule import Order, actions

Step = Literal["F", "B", "I", "W", "R"]
"""Actions of a schedule; R: a stage's gradients are reduced, after its last backward."""

FORWARDS, HALVES, SENT, WHOLE = range(4)
"""What is counted: microbatches whose backward has not begun, those whose backward is half done, those whose gradient
has been sent on; stages whose gradients are being added up."""


class Situation(NamedTuple):
    """As a rank begins an action."""

    step: Step
    kind: int
    """Of the stage that acts."""
    first: bool
    """Whether that stage has no gradients yet."""
    reduced: tuple[int, ...]
    """By kind of stage: how many have done with their gradients."""
    counts: tuple[int, ...]
    """By what is counted, then by kind of stage."""
    stage: int
    """An example."""
    in_flight: int
    """Microbatches of all stages that are kept for backward."""


@lru_cache(maxsize=16384)
def situations_of_rank(
    schedule: str,
    pp: int,
    n_stages: int,
    microbatches: int,
    coordinate: int,
    most_sent: int,
    kinds: tuple[int, ...],
    wholes_stay: bool = True,
) -> tuple[Situation, ...]:
    """Of the rank at ``coordinate``, those of a step that no other outdoes.

    ``kinds``: a number for every stage, the same for stages that are alike. What a stage has sent is counted up to
    ``most_sent``, and after backwards that are not split only if ``wholes_stay``.
    """
    order = actions(schedule, pp, n_stages, microbatches)[coordinate]
    return tuple(_outstanding(_every(order, microbatches, most_sent, kinds, wholes_stay)))


def _every(
    order: Order, microbatches: int, most_sent: int, kinds: tuple[int, ...], wholes_stay: bool
) -> Iterable[Situation]:
    many = max(kinds) + 1
    counts, reduced = [0] * (4 * many), [0] * many
    sent: dict[int, int] = {}
    done: dict[int, int] = {}
    in_flight = 0
    found: dict[tuple[object, ...], Situation] = {}

    def note(step: Step, stage: int) -> None:
        key = (step, kinds[stage], stage not in done, tuple(reduced), tuple(counts))
        if key not in found:
            found[key] = Situation(*key, stage, in_flight)

    for step, stage, _ in order:
        note(step, stage)
        kind = kinds[stage]
        if step == "F":
            counts[kind] += 1
            in_flight += 1
            continue
        if step != "W":
            counts[kind] -= 1
            if step == "I" or wholes_stay:
                sent[stage] = sent.get(stage, 0) + 1
                counts[SENT * many + kind] += sent[stage] <= most_sent
        if step == "I":
            counts[HALVES * many + kind] += 1
            continue
        if step == "W":
            counts[HALVES * many + kind] -= 1
        in_flight -= 1
        counts[WHOLE * many + kind] += stage not in done
        done[stage] = done.get(stage, 0) + 1
        if done[stage] == microbatches:
            note("R", stage)
            counts[WHOLE * many + kind] -= 1
            reduced[kind] += 1
    return found.values()


def _outstanding(found: Iterable[Situation]) -> list[Situation]:
    """Those whose counts are not all matched by another's at the same action with as many stages done."""
    alike: dict[tuple[object, ...], list[Situation]] = {}
    for one in sorted(found, key=lambda one: -sum(one.counts)):
        others = alike.setdefault((one.step, one.kind, one.first, one.reduced), [])
        if not any(all(map(ge, other.counts, one.counts)) for other in others):
            others.append(one)
    return [one for others in alike.values() for one in others]
