"""Which stages a rank holds, and which layers a stage."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from koushi.config.schema import Parallelism, ScheduleName
from koushi.schedules import SCHEDULES, rank_of_stage, stage_layers, stages_of_rank, tied_ends


def placements() -> list[tuple[str, int, int]]:
    """Every schedule on 1 to 8 ranks with every number of stages a rank that it takes, up to 4."""
    return [
        (name, pp, pp * per_rank)
        for name, needs in SCHEDULES.items()
        for pp in range(1, 9)
        for per_rank in range(needs.fewest_stages_per_rank, (needs.most_stages_per_rank or 4) + 1)
    ]


def test_every_schedule_of_the_schema_is_known() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleName))


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_and_stages_are_inverse(name: str) -> None:
    mine = [case for case in placements() if case[0] == name]
    assert len(mine) >= 8
    for _, pp, n_stages in mine:
        held = [stages_of_rank(name, pp, n_stages, index) for index in range(pp)]
        assert sorted(stage for stages in held for stage in stages) == list(range(n_stages))
        for index, stages in enumerate(held):
            assert list(stages) == sorted(stages), "stages come in the order of the model"
            assert all(rank_of_stage(name, pp, n_stages, stage) == index for stage in stages)


def test_loops_deal_out_and_vs_come_back() -> None:
    assert [stages_of_rank("1F1B", 4, 4, index) for index in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [stages_of_rank("Interleaved1F1B", 2, 6, index) for index in range(2)] == [(0, 2, 4), (1, 3, 5)]
    for name in ("ZBVZeroBubble", "DualPipeV"):
        assert [stages_of_rank(name, 3, 6, index) for index in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_pipeline_no_schedule_has_a_meaning(name: str) -> None:
    for n_stages in (1, 3):
        assert stages_of_rank(name, 1, n_stages, 0) == tuple(range(n_stages))
        assert {rank_of_stage(name, 1, n_stages, stage) for stage in range(n_stages)} == {0}


def test_a_v_with_other_than_two_stages_a_rank_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match=re.escape("ZBVZeroBubble has two stages a rank, not 6 over 2 ranks")):
        stages_of_rank("ZBVZeroBubble", 2, 6, 0)


def test_where_the_ends_of_a_tied_embedding_lie() -> None:
    assert tied_ends("1F1B", 1, 1, tied=True) is None
    assert tied_ends("1F1B", 2, 2, tied=False) is None
    for name, needs in SCHEDULES.items():
        assert tied_ends(name, 2, 2 * needs.fewest_stages_per_rank, tied=True) == ((0, 0) if needs.v_shaped else (0, 1))


def parallelism(**given: object) -> Parallelism:
    return Parallelism.model_validate({f"pipeline_parallel_{key}": value for key, value in given.items()})


def test_layers_of_stages_follow_each_other() -> None:
    assert stage_layers(6, 1, parallelism()) == (range(6),)
    assert stage_layers(6, 2, parallelism(degree=2)) == (range(3), range(3, 6))
    assert stage_layers(6, 4, parallelism(degree=4)) == (range(1), range(1, 3), range(3, 5), range(5, 6))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_own_number_of_stages_unless_told(name: str) -> None:
    stages = stage_layers(16, 4, parallelism(degree=4, schedule=name))
    assert len(stages) == 4 * SCHEDULES[name].fewest_stages_per_rank
    assert [layer for stage in stages for layer in stage] == list(range(16))


def test_stages_a_rank_and_layers_a_stage_are_taken_as_given() -> None:
    three = stage_layers(6, 2, parallelism(degree=2, schedule="LoopedBFS", stages_per_rank=3))
    assert len(three) == 6
    given = stage_layers(5, 2, parallelism(degree=2, schedule="GPipe", layers_per_stage=(0, 5)))
    assert given == (range(0), range(5))
