"""When torch's pipeline runtime gathers a stage's parameters. No torch."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import groupby

from koushi.plan.schedule import order_of_rank
from koushi.plan.workload import Workload
from koushi.schedules import rank_of_stage, stages_of_rank

MOST_UNSHARDED = 3
"""Stages of a rank that torch's runtime keeps gathered at once: ``_add_unshard_reshard`` in
``torch.distributed.pipelining.schedules`` (2.11 to 2.13)."""


@lru_cache(maxsize=4096)
def unshards_of_rank(schedule: str, pp: int, n_stages: int, microbatches: int, coordinate: int) -> Counter[int]:
    """How often the rank at ``coordinate`` gathers each of its stages in one step.

    Before every action the runtime looks ahead for the next stages to come, gathers those that are not there
    and frees the others.
    """
    held = stages_of_rank(schedule, pp, n_stages, coordinate)
    if len(held) <= MOST_UNSHARDED:
        return Counter(held)
    order = order_of_rank(schedule, pp, n_stages, microbatches, coordinate)
    stages = [stage for stage, _ in groupby(action.stage for action in order)]
    coming: list[tuple[int, ...]] = []
    ahead: list[int] = []
    for stage in reversed(stages):
        if stage in ahead:
            ahead.remove(stage)
        ahead.insert(0, stage)
        coming.append(tuple(ahead[:MOST_UNSHARDED]))
    gathered: Counter[int] = Counter()
    there: tuple[int, ...] = ()
    for wanted in reversed(coming):
        for stage in wanted:
            if stage not in there:
                gathered[stage] += 1
        there = wanted
    return gathered


def unshards(workload: Workload, stage: int) -> int:
    """How often ``stage`` is gathered in one pipelined step."""
    shape = (workload.schedule, workload.mesh.degree("pp"), len(workload.stage_layers))
    return unshards_of_rank(*shape, workload.microbatches, rank_of_stage(*shape, stage))[stage]
