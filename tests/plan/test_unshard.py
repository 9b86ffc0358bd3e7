"""How often torch's runtime gathers a stage, against its own lowering of the tables."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.distributed.pipelining.schedules import (
    UNSHARD,
    B,
    F,
    I,
    W,
    _Action,
    _add_unshard_reshard,
)

from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import PRESETS
from koushi.plan.schedule import actions
from koushi.plan.unshard import unshards, unshards_of_rank
from koushi.plan.workload import Transformer, Workload

KINDS = {"F": F, "B": B, "I": I, "W": W}


@pytest.mark.parametrize("schedule", ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"))
@pytest.mark.parametrize("per_rank", (2, 3, 4, 6))
@pytest.mark.parametrize("microbatches", (2, 4, 8))
def test_gathers_are_torchs(schedule: str, per_rank: int, microbatches: int) -> None:
    pp = 2
    for rank, order in enumerate(actions(schedule, pp, pp * per_rank, microbatches)):
        lowered = _add_unshard_reshard([_Action(stage, KINDS[kind], at) for kind, stage, at in order])
        expected = Counter(action.stage_index for action in lowered if action.computation_type == UNSHARD)
        assert unshards_of_rank(schedule, pp, pp * per_rank, microbatches, rank) == expected


def workload(schedule: str, per_rank: int) -> Workload:
    model = Transformer.of(PRESETS["llama3-debug"])
    return Workload(model, MeshSpec.of(pp=2), (1,) * (2 * per_rank), schedule, 8, 1, 8)


def test_a_stage_that_fits_is_gathered_once() -> None:
    assert [unshards(workload("1F1B", 1), stage) for stage in (0, 1)] == [1, 1]
    assert unshards(workload("Interleaved1F1B", 5), 0) > 1
