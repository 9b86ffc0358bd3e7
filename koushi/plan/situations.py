"""What a pipelined rank has going on at every action of its schedule: microbatches in flight, gradients. No torch.

Stages that are alike are counted together, and of all moments only those are kept that are the fullest at their action,
so that a long schedule of many stages comes down to a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from koushi.plan.schedule import Order

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


class Habits(NamedTuple):
    """What a rank's stages keep besides."""

    stays_sent: range
    """Which of the gradients that a stage sends, by their number from 1 on, count from then to the end of the step."""
    wholes_stay: bool
    """Whether what a backward that is not split has sent counts too."""
    adds_late: bool
    """Whether gradients of a W are added to their sum only in the stage's next backward."""


def fullest_situations(
    order: Order, microbatches: int, habits: Habits, kinds: Sequence[int], sizes: Sequence[int]
) -> list[Situation]:
    """Of a rank that acts in ``order``: while as many stages are done, the fullest with each action.

    ``kinds``: a number for every stage of the model, the same for those of the rank that are alike. ``sizes``: bytes
    of each that is counted, as in ``Situation.counts``.
    """
    walk = _Walk(microbatches, habits, kinds, sizes)
    walk.go(order)
    return walk.found


class _Walk:
    """Through a rank's actions, with what is there counted and added up."""

    def __init__(self, microbatches: int, habits: Habits, kinds: Sequence[int], sizes: Sequence[int]):
        many = len(sizes) // len(COUNTED)
        self.microbatches, self.habits, self.kinds, self.sizes, self.many = microbatches, habits, kinds, sizes, many
        self.counts = [0] * len(sizes)
        self.reduced = [0] * many
        self.found: list[Situation] = []

    def go(self, order: Order) -> None:
        """In one loop, since a search has hundreds of thousands of actions gone through."""
        kinds, counts, sizes = self.kinds, self.counts, self.sizes
        from_sent, to_sent = self.habits.stays_sent.start, self.habits.stays_sent.stop
        moves = _moves(self.habits.adds_late)
        stays = "BI" if self.habits.wholes_stay else "I"
        sends, halves = SENT * self.many, HALVES * self.many
        sent, done, gradients = [0] * len(kinds), [0] * len(kinds), [NONE] * len(kinds)
        total = in_flight = 0
        fullest: dict[_Action, tuple[int, tuple[int, ...], int, int]] = {}
        for (step, stage, _), (coming, other, _) in zip(order, (*order[1:], _END), strict=True):
            kind, there = kinds[stage], gradients[stage]
            if step != "F" or coming != "F" or other != stage:  # the last of several forwards holds most
                action = step, kind, there
                before = fullest.get(action)
                if before is None or total > before[0]:
                    fullest[action] = total, tuple(counts), stage, in_flight
            if step == "F":
                counts[kind] += 1
                total += sizes[kind]
                in_flight += 1
                continue
            if step != "W":
                counts[kind] -= 1
                total -= sizes[kind]
                if step in stays:
                    sent[stage] += 1
                    if from_sent <= sent[stage] < to_sent:
                        counts[sends + kind] += 1
                        total += sizes[sends + kind]
            if step != "B":
                more = 1 if step == "I" else -1
                counts[halves + kind] += more
                total += more * sizes[halves + kind]
            after = moves[stage == 0][step][there]
            if after != there:
                total += self._turn(kind, there, after)
                gradients[stage] = after
            if step == "I":
                continue
            in_flight -= 1
            done[stage] += 1
            if done[stage] == self.microbatches:
                fullest["R", kind, after] = total, tuple(counts), stage, in_flight
                self._close(fullest)
                total += self._turn(kind, after, NONE)
                self.reduced[kind] += 1

    def _turn(self, kind: int, before: int, after: int) -> int:
        """Bytes that are there more as a stage's gradients go from one state to another."""
        more = 0
        for what, bit in ((WHOLE, SUMMED), (LATE, WAITING)):
            change = bool(after & bit) - bool(before & bit)
            self.counts[what * self.many + kind] += change
            more += change * self.sizes[what * self.many + kind]
        return more

    def _close(self, fullest: dict[_Action, tuple[int, tuple[int, ...], int, int]]) -> None:
        """As a stage is done."""
        reduced = tuple(self.reduced)
        for (step, kind, there), (_, counts, stage, in_flight) in fullest.items():
            first, late = not there & SUMMED, bool(there & WAITING)
            self.found.append(Situation(step, kind, first, late, reduced, counts, stage, in_flight))
        fullest.clear()


_END = (None, -1, -1)
"""What comes after the last action."""
_Action = tuple[Step, int, int]
"""With the kind of the stage that acts, and the state of its gradients."""
NONE, SUMMED, WAITING = 0, 1, 2
"""States of a stage's gradients: whether there is a sum, plus whether there are some that are not added to it."""


@cache
def _moves(adds_late: bool) -> tuple[dict[Step, tuple[int, ...]], dict[Step, tuple[int, ...]]]:
    """By action, the state of a stage's gradients after it by the state before: of later stages, of the first."""
    summed = (SUMMED,) * 4
    inputs = (NONE, SUMMED, SUMMED, SUMMED)
    weights = (WAITING, SUMMED | WAITING, WAITING, SUMMED | WAITING) if adds_late else summed
    as_before = (NONE, SUMMED, WAITING, SUMMED | WAITING)
    beyond: dict[Step, tuple[int, ...]] = {"B": summed, "I": inputs, "W": weights}
    first: dict[Step, tuple[int, ...]] = {"B": summed, "I": as_before, "W": summed}  # goes backward in its W alone
    return beyond, first
