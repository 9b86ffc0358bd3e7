"""A pipeline schedule without its backwards, for evaluation. Private parts of torch; ``tests/parallel`` fails where
they change.

torch's own ``eval`` goes through all actions, each of which finds that there is no backward; but where a stage's
gradient would go to another stage of the same rank, as where a V turns, it hands it over and fails (2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

BACKWARD = frozenset(
    {
        _ComputationType.FULL_BACKWARD,
        _ComputationType.BACKWARD_INPUT,
        _ComputationType.BACKWARD_WEIGHT,
        _ComputationType.SEND_B,
        _ComputationType.RECV_B,
        _ComputationType.REDUCE_GRAD,
    }
)


@contextmanager
def forward_only(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> Iterator[None]:
    """Have ``schedule`` go through its forwards alone. Schedules of one stage a rank do so by themselves."""
    if not isinstance(schedule, _PipelineScheduleRuntime):
        yield
        return
    whole = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {rank: list(_forwards(order)) for rank, order in whole.items()}
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _forwards(order: Iterable[_Action]) -> Iterator[_Action]:
    for action in order:
        if action.sub_actions is not None:
            yield from _forwards(action.sub_actions)
        elif action.computation_type not in BACKWARD:
            yield action
