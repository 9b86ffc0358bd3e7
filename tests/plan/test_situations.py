"""Situations of a pipelined rank: nothing in the schedule is fuller than those that are kept."""

from __future__ import annotations

import pytest

from koushi.plan.schedule import actions, in_flight
from koushi.plan.situations import FORWARDS, HALVES, LATE, SENT, WHOLE, Habits, Situation, situations_of_rank

CASES = [
    ("GPipe", 4, 4, 6),
    ("1F1B", 4, 4, 6),
    ("Interleaved1F1B", 2, 6, 8),
    ("LoopedBFS", 2, 4, 3),
    ("InterleavedZeroBubble", 2, 4, 6),
    ("ZBVZeroBubble", 3, 6, 7),
    ("DualPipeV", 2, 4, 6),
]


def situations(
    schedule: str,
    pp: int,
    n_stages: int,
    microbatches: int,
    most_sent: int,
    kinds: tuple[int, ...],
    adds_late: bool = False,
) -> tuple[tuple[Situation, ...], ...]:
    """Of every pipeline coordinate."""
    shape = schedule, pp, n_stages, microbatches
    habits = Habits(range(1, most_sent + 1), True, adds_late)
    return tuple(situations_of_rank(*shape, rank, habits, kinds) for rank in range(pp))


@pytest.mark.parametrize(("schedule", "pp", "n_stages", "microbatches"), CASES)
def test_the_most_in_flight_is_kept(schedule: str, pp: int, n_stages: int, microbatches: int) -> None:
    alike = (0,) * n_stages
    found = situations(schedule, pp, n_stages, microbatches, 1, alike)
    for rank, most in enumerate(in_flight(schedule, pp, n_stages, microbatches)):
        # Counted before an action; a forward that comes next is not among them yet.
        fullest = max(one.counts[FORWARDS] + one.counts[HALVES] for one in found[rank] if one.step != "F")
        assert fullest == sum(most)


@pytest.mark.parametrize(("schedule", "pp", "n_stages", "microbatches"), CASES)
def test_every_action_is_outdone_or_kept(schedule: str, pp: int, n_stages: int, microbatches: int) -> None:
    """Counting stage by stage, every F, B, I or W of the table has one at least as full among those that are kept."""
    kinds = tuple(range(n_stages))
    found = situations(schedule, pp, n_stages, microbatches, microbatches, kinds)
    for rank, order in enumerate(actions(schedule, pp, n_stages, microbatches)):
        kept, forwards, halves = found[rank], [0] * n_stages, [0] * n_stages
        for kind, stage, _ in order:
            assert any(
                one.step == kind
                and one.kind == stage
                and all(one.counts[FORWARDS * n_stages + other] >= forwards[other] for other in kinds)
                and all(one.counts[HALVES * n_stages + other] >= halves[other] for other in kinds)
                for one in kept
            )
            forwards[stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            halves[stage] += {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
        assert not any(forwards) and not any(halves)


def test_each_stage_is_reduced_once_with_whole_gradients() -> None:
    found = situations("Interleaved1F1B", 2, 4, 4, 4, (0, 1, 2, 3))
    for rank in (0, 1):
        reductions = [one for one in found[rank] if one.step == "R"]
        assert sorted(one.stage for one in reductions) == [rank, rank + 2]
        for one in reductions:
            assert one.counts[WHOLE * 4 + one.stage] == 1
            assert one.counts[SENT * 4 + one.stage] == 4


def test_what_is_sent_is_counted_no_further_than_asked() -> None:
    assert max(one.counts[SENT * 2] for one in situations("1F1B", 2, 2, 8, 1, (0, 1))[0]) == 1


@pytest.mark.parametrize(("schedule", "pp", "n_stages", "microbatches"), CASES)
def test_gradients_that_are_added_late_are_there_from_a_w_to_the_stages_next_backward(
    schedule: str, pp: int, n_stages: int, microbatches: int
) -> None:
    kinds = tuple(range(n_stages))
    found = situations(schedule, pp, n_stages, microbatches, 0, kinds, adds_late=True)
    for rank, order in enumerate(actions(schedule, pp, n_stages, microbatches)):
        late: set[int] = set()
        summed: set[int] = set()
        fullest = 0
        for step, stage, _ in order:
            if step in "BI" and stage in late | ({stage} if step == "B" else set()):
                late.discard(stage)
                summed.add(stage)
            elif step == "W":
                (late if stage else summed).add(stage)
            fullest = max(fullest, len(late) + len(summed))
        most = max(sum(one.counts[WHOLE * n_stages :]) for one in found[rank] if one.step == "R")
        assert 0 < most <= fullest
        assert all(one.counts[LATE * n_stages] == 0 for one in found[rank]), "the first stage goes backward once"
