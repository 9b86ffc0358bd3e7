"""Situations of a pipelined rank: nothing in the schedule is fuller than those that are kept."""

from __future__ import annotations

from random import Random

import pytest
from every_situation import every_situation

from koushi.plan.schedule import actions, in_flight
from koushi.plan.situations import COUNTED, FORWARDS, HALVES, SENT, WHOLE, Habits, Situation, fullest_situations

CASES = [
    ("GPipe", 4, 4, 6),
    ("1F1B", 4, 4, 6),
    ("Interleaved1F1B", 2, 6, 8),
    ("LoopedBFS", 2, 4, 3),
    ("InterleavedZeroBubble", 2, 4, 6),
    ("ZBVZeroBubble", 3, 6, 7),
    ("DualPipeV", 2, 4, 6),
]


def weights(what: int, n_stages: int) -> list[int]:
    """Sizes that are 1 of one thing that is counted, and 0 of all else."""
    return [int(one == what) for one in COUNTED for _ in range(n_stages)]


ALIKE = 5
"""Situations whose first so many fields are equal begin with the same action, while as many stages are done."""


def total(one: Situation, sizes: list[int]) -> int:
    return sum(count * size for count, size in zip(one.counts, sizes, strict=True))


def situations(
    schedule: str, pp: int, n_stages: int, microbatches: int, habits: Habits, kinds: tuple[int, ...], sizes: list[int]
) -> tuple[list[Situation], ...]:
    """Of every pipeline coordinate."""
    orders = actions(schedule, pp, n_stages, microbatches)
    return tuple(fullest_situations(order, microbatches, habits, kinds, sizes) for order in orders)


@pytest.mark.parametrize(("schedule", "pp", "n_stages", "microbatches"), CASES)
def test_the_most_in_flight_is_kept(schedule: str, pp: int, n_stages: int, microbatches: int) -> None:
    alike, sizes = (0,) * n_stages, [1, 1, 0, 0, 0]
    found = situations(schedule, pp, n_stages, microbatches, Habits(range(1, 2), True, False), alike, sizes)
    for rank, most in enumerate(in_flight(schedule, pp, n_stages, microbatches)):
        # Counted before an action; a forward that comes next is not among them yet.
        fullest = max(one.counts[FORWARDS] + one.counts[HALVES] for one in found[rank] if one.step != "F")
        assert fullest == sum(most) == max(one.in_flight for one in found[rank] if one.step != "F")


@pytest.mark.parametrize(("schedule", "pp", "n_stages", "microbatches"), CASES)
@pytest.mark.parametrize("habits", [Habits(range(1, 2), True, False), Habits(range(2, 100), False, True)])
def test_the_fullest_with_each_action_is_kept(
    schedule: str, pp: int, n_stages: int, microbatches: int, habits: Habits
) -> None:
    """For any sizes, every situation that is kept is one of the schedule, and none with its action holds more."""
    random = Random(1)
    for rank, order in enumerate(actions(schedule, pp, n_stages, microbatches)):
        for kinds in (tuple(range(n_stages)), tuple(stage % 2 for stage in range(n_stages)), (0,) * n_stages):
            every = list(every_situation(order, microbatches, habits, kinds))
            sizes = [random.choice((0, 1, 7, 50)) for _ in range(len(COUNTED) * (max(kinds) + 1))]
            most: dict[tuple[object, ...], int] = {}
            for one in every:
                most[one[:ALIKE]] = max(total(one, sizes), most.get(one[:ALIKE], 0))
            found = fullest_situations(order, microbatches, habits, kinds, sizes)
            assert {one[:ALIKE]: total(one, sizes) for one in found} == most, rank
            assert len(found) == len(most)
            assert set(found) <= set(every)


def test_each_stage_is_reduced_once_with_whole_gradients() -> None:
    shape = "Interleaved1F1B", 2, 4, 4
    found = situations(*shape, Habits(range(1, 5), True, False), (0, 1, 2, 3), weights(WHOLE, 4))
    for rank in (0, 1):
        reductions = [one for one in found[rank] if one.step == "R"]
        assert sorted(one.stage for one in reductions) == [rank, rank + 2]
        for one in reductions:
            assert one.counts[WHOLE * 4 + one.stage] == 1
            assert one.counts[SENT * 4 + one.stage] == 4


def test_what_is_sent_is_counted_no_further_than_asked() -> None:
    found = situations("1F1B", 2, 2, 8, Habits(range(1, 2), True, False), (0, 1), weights(SENT, 2))
    assert max(one.counts[SENT * 2] for one in found[0]) == 1
