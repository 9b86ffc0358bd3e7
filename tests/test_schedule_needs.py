"""The needs of every schedule are torch's own."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import get_schedule_class

from koushi.schedules import SCHEDULES, microbatches_fit


def torch_takes(schedule: str, pp: int, per_rank: int, microbatches: int) -> bool:
    try:
        get_schedule_ops(schedule, pp, microbatches, per_rank)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_microbatches(schedule: str, pp: int) -> None:
    per_rank = SCHEDULES[schedule].fewest_stages_per_rank
    counts = range(1, 14)
    ours = [count for count in counts if microbatches_fit(schedule, pp, pp * per_rank, count)]
    assert ours, "some counts must fit"
    assert ours == [count for count in counts if torch_takes(schedule, pp, per_rank, count)]


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_v_schedules_have_two_stages_a_rank(schedule: str) -> None:
    assert not torch_takes(schedule, 2, 3, 12)
    assert torch_takes(schedule, 2, 2, 12)
    assert SCHEDULES[schedule].fewest_stages_per_rank == SCHEDULES[schedule].most_stages_per_rank == 2


def test_every_schedule_is_one_of_torch() -> None:
    for schedule in SCHEDULES:
        assert get_schedule_class(schedule).__name__ == f"Schedule{schedule}"
