"""What a pipelined rank has going on at every action of its schedule: microbatches in flight, gradients. No torch.

Stages that are alike are counted together, and of all moments only those are kept that no other outdoes, so that a
long schedule of many stages comes down to a few of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

from koushi.plan.schedule import Order, order_of_rank

Step = Literal["F", "B", "I", "W", "R"]
"""Actions of a schedule; R: a stage's gradients are reduced, after its last backward."""

COUNTED = FORWARDS, HALVES, SENT, WHOLE, LATE = range(5)
"""What is counted: microbatches whose backward has not begun, those whose backward is half done, those whose gradient
has been sent on; stages whose gradients are being added up, and those that have some which are not added yet."""


class Situation(NamedTuple):
    """As a rank begins an action."""

    step: Step
    kind: int
    """Of the stage that acts."""
    first: bool
    """Whether that stage has no sum of gradients yet."""
    late: bool
    """Whether it has gradients that are not added to their sum."""
    reduced: tuple[int, ...]
    """By kind of stage: how many have done with their gradients."""
    counts: tuple[int, ...]
    """By what is counted, then by kind of stage."""
    stage: int
    """An example."""
    in_flight: int
    """Microbatches of all stages that are kept for backward."""


ACTION = 4
"""Situations whose first so many fields are equal begin with the same action."""
ALIKE = 5
"""Those whose first so many are equal differ in counts only; they come one after the other."""


class Habits(NamedTuple):
    """What a rank's stages keep besides."""

    stays_sent: range
    """Which of the gradients that a stage sends, by their number from 1 on, count from then to the end of the step."""
    wholes_stay: bool
    """Whether what a backward that is not split has sent counts too."""
    adds_late: bool
    """Whether gradients of a W are added to their sum only in the stage's next backward."""


@lru_cache(maxsize=16384)
def situations_of_rank(
    schedule: str, pp: int, n_stages: int, microbatches: int, coordinate: int, habits: Habits, kinds: tuple[int, ...]
) -> tuple[Situation, ...]:
    """Of the rank at ``coordinate``, those of a step that no other outdoes.

    ``kinds``: a number for every stage that the rank holds, the same for stages that are alike.
    """
    order = order_of_rank(schedule, pp, n_stages, microbatches, coordinate)
    return tuple(_outstanding(_every(order, microbatches, habits, kinds)))


def _every(order: Order, microbatches: int, habits: Habits, kinds: tuple[int, ...]) -> Iterable[Situation]:
    many = max(kinds) + 1
    counts, reduced = [0] * (len(COUNTED) * many), [0] * many
    sent: dict[int, int] = {}
    done: dict[int, int] = {}
    whole: set[int] = set()
    late: set[int] = set()
    in_flight = 0
    found: dict[tuple[object, ...], Situation] = {}

    def note(step: Step, stage: int) -> None:
        key = (step, kinds[stage], stage not in whole, stage in late, done_with, tuple(counts))
        if key not in found:
            found[key] = Situation(*key, stage, in_flight)

    done_with = tuple(reduced)
    for place, (step, stage, _) in enumerate(order, 1):
        kind = kinds[stage]
        if step == "F":
            if place == len(order) or order[place][:2] != ("F", stage):  # the next of several forwards holds more
                note(step, stage)
            counts[kind] += 1
            in_flight += 1
            continue
        note(step, stage)
        if step != "W":
            counts[kind] -= 1
            if step == "I" or habits.wholes_stay:
                sent[stage] = sent.get(stage, 0) + 1
                counts[SENT * many + kind] += sent[stage] in habits.stays_sent
        summed, waits = _gradients(step, stage, stage in whole, stage in late, habits.adds_late)
        for what, has, stages in ((WHOLE, summed, whole), (LATE, waits, late)):
            if has is not (stage in stages):
                counts[what * many + kind] += 1 if has else -1
                (stages.add if has else stages.discard)(stage)
        if step == "I":
            counts[HALVES * many + kind] += 1
            continue
        if step == "W":
            counts[HALVES * many + kind] -= 1
        in_flight -= 1
        done[stage] = done.get(stage, 0) + 1
        if done[stage] == microbatches:
            note("R", stage)
            counts[WHOLE * many + kind] -= summed
            counts[LATE * many + kind] -= waits
            reduced[kind] += 1
            done_with = tuple(reduced)
    return found.values()


def _gradients(step: Step, stage: int, whole: bool, late: bool, adds_late: bool) -> tuple[bool, bool]:
    """Whether the stage has a sum of gradients after ``step``, and some that are not added to it."""
    if stage == 0 and step in "IW":  # all of the first stage's backward is in its W
        return (whole, late) if step == "I" else (True, False)
    if step == "I":
        return whole or late, False
    return (whole, True) if step == "W" and adds_late else (True, False)


def _outstanding(found: Iterable[Situation]) -> list[Situation]:
    """Those whose counts are not all matched by another's at the same action with as many stages done."""
    alike: dict[tuple[object, ...], list[Situation]] = {}
    for one in sorted(found, key=lambda one: -sum(one.counts)):
        others = alike.setdefault(one[:ALIKE], [])
        counts = one.counts
        for other in reversed(others):
            if all(map(ge, other.counts, counts)):
                break
        else:
            others.append(one)
    return [one for others in alike.values() for one in others]
