"""Our action tables are torch's own; the simulator keeps what the schedules' papers prove."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from koushi.plan.schedule import Action, Order, StageSeconds, actions, in_flight, simulate, table
from koushi.schedules import SCHEDULES, microbatches_fit, rank_of_stage, stages_of_rank

Case = tuple[str, int, int, int]
"""Schedule, pp, stages, microbatches."""
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def cases(
    ranks: tuple[int, ...] = (2, 3, 4, 8), microbatches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 17, 24)
) -> Iterator[Case]:
    for (schedule, needs), pp, stages, count in product(SCHEDULES.items(), ranks, (1, 2, 3), microbatches):
        most = needs.most_stages_per_rank or stages
        if needs.fewest_stages_per_rank <= stages <= most and microbatches_fit(schedule, pp, pp * stages, count):
            yield schedule, pp, pp * stages, count


def torchs_own(schedule: str, pp: int, n_stages: int, microbatches: int) -> tuple[Order, ...]:
    """Without what is not compute; a forward and a backward that torch overlaps one after the other."""
    found = []
    for rank, row in enumerate(get_schedule_ops(schedule, pp, microbatches, n_stages // pp)):
        order = []
        for operation in (operation for operation in row if operation is not None):
            for one in operation.sub_actions or (operation,):
                kind = KINDS.get(one.computation_type.name)
                if kind is not None:
                    # torch 2.13 counts the forwards of 1F1B's last rank, which it never runs from its table, from 1.
                    late = schedule == "1F1B" and rank == pp - 1 and kind == "F"
                    order.append(Action(kind, one.stage_index, one.microbatch_index - (1 if late else 0)))
        found.append(tuple(order))
    return tuple(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_are_torchs_own(schedule: str) -> None:
    of_schedule = [case for case in cases() if case[0] == schedule]
    assert len(of_schedule) > 12
    for case in of_schedule:
        assert actions(*case) == torchs_own(*case), case


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_does_every_microbatch_once(schedule: str) -> None:
    for name, pp, n_stages, microbatches in (case for case in cases((2, 4, 7), (4, 14, 28)) if case[0] == schedule):
        for rank, order in enumerate(actions(name, pp, n_stages, microbatches)):
            assert len(set(order)) == len(order)
            for stage, microbatch in product(stages_of_rank(name, pp, n_stages, rank), range(microbatches)):
                kinds = "".join(action.kind for action in order if action[1:] == (stage, microbatch))
                assert kinds in ("FB", "FIW")


seconds = st.floats(min_value=0.01, max_value=10)


@settings(max_examples=40, deadline=None)
@given(case=st.sampled_from(list(cases((2, 3, 4), (4, 6, 8)))), data=st.data(), blocking=st.booleans())
def test_nothing_starts_before_what_it_needs(case: Case, data: st.DataObject, blocking: bool) -> None:
    schedule, pp, n_stages, microbatches = case
    stages = [StageSeconds(*data.draw(st.tuples(seconds, seconds, seconds))) for _ in range(n_stages)]
    send = data.draw(st.floats(min_value=0, max_value=3))
    timeline = simulate(schedule, pp, n_stages, microbatches, stages, send, blocking=blocking)
    done: dict[tuple[str, int, int], float] = {}
    for row in timeline.by_rank:
        for action, start, end in row:
            done[("B" if action.kind == "I" else action.kind, *action[1:])] = end
            assert end >= start
    for rank, row in enumerate(timeline.by_rank):
        before = 0.0
        for (kind, stage, microbatch), start, end in row:
            assert start >= before - 1e-9
            before = end
            source = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and 0 <= source < n_stages:
                away = rank_of_stage(schedule, pp, n_stages, source) != rank
                needed = done["F" if kind == "F" else "B", source, microbatch]
                assert start >= needed + (send if away else 0) - 1e-9
    assert timeline.makespan >= max(timeline.busy) - 1e-9
    assert timeline.makespan >= max(end for row in timeline.by_rank for _, _, end in row) - 1e-9
    assert 0 <= timeline.bubble < 1


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (8, 8), (8, 64), (16, 128)])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_of_one_stage_a_rank(schedule: str, pp: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1): arXiv 2104.04473, section 2.2.1, as a share of the whole."""
    timeline = simulate(schedule, pp, pp, microbatches, [StageSeconds(1, 1, 1)] * pp, 0.0)
    assert timeline.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert timeline.makespan == pytest.approx(3 * (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 32)])
def test_virtual_stages_divide_the_bubble(pp: int, per_rank: int, microbatches: int) -> None:
    """(p - 1) / v of a microbatch's whole time: arXiv 2104.04473, section 2.2.2."""
    stages = [StageSeconds(1 / per_rank, 1 / per_rank, 1 / per_rank)] * (pp * per_rank)
    timeline = simulate("Interleaved1F1B", pp, pp * per_rank, microbatches, stages, 0.0)
    assert timeline.makespan == pytest.approx(3 * (microbatches + (pp - 1) / per_rank))


def test_zero_bubble_schedules_earn_their_name() -> None:
    """With I as long as W and F, ZB-V's bubble is about that of filling: arXiv 2405.15362."""
    pp, microbatches = 4, 16
    halves = [StageSeconds(0.5, 0.5, 0.5)] * (2 * pp)
    whole = simulate("Interleaved1F1B", pp, 2 * pp, microbatches, halves, 0.0)
    assert simulate("InterleavedZeroBubble", pp, 2 * pp, microbatches, halves, 0.0).makespan < whole.makespan
    assert simulate("ZBVZeroBubble", pp, 2 * pp, microbatches, halves, 0.0).makespan < whole.makespan


def test_messages_cost_on_the_way_and_more_where_they_hold_up_their_sender() -> None:
    stages = [StageSeconds(1, 1, 1)] * 4
    free, sent, held = (
        simulate("1F1B", 4, 4, 8, stages, send, blocking=blocking).makespan
        for send, blocking in ((0.0, False), (0.1, False), (0.1, True))
    )
    assert free + 0.6 <= sent < held


def test_microbatches_kept_for_backward() -> None:
    """1F1B keeps as many as there are stages to come: arXiv 2104.04473, section 2.2.1. GPipe keeps all."""
    assert in_flight("1F1B", 4, 4, 16) == ((4,), (3,), (2,), (1,))
    assert in_flight("GPipe", 4, 4, 16) == ((16,),) * 4
    for rank, kept in enumerate(in_flight("Interleaved1F1B", 4, 8, 16)):
        # (v - 1) p + 2 (p - rank - 1) + 1 in all.
        assert sum(kept) == 4 + 2 * (3 - rank) + 1


@pytest.mark.parametrize("case", list(cases((2, 4), (8,))), ids=str)
def test_the_most_kept_is_reached_and_never_passed(case: Case) -> None:
    for order, most in zip(actions(*case), in_flight(*case), strict=True):
        now, highest = 0, 0
        for action in order:
            now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            highest = max(highest, now)
        assert now == 0
        assert highest == sum(most)


def test_a_table_has_every_action_once() -> None:
    made = table("DualPipeV", 4, 8, 12)
    assert len(made.ranks) == sum(len(order) for order in made.orders)
    assert all(wait < index for index, wait in enumerate(made.waits))
