"""Pipeline schedules: which stages a rank holds. No torch.

A stage is a run of layers; with several stages on a rank they are virtual stages. Loop schedules
deal them out in turn; V schedules walk down the ranks and back up, so that the first rank holds
both ends of the model.
"""

from __future__ import annotations

from itertools import accumulate

from koushi.config.schema import Parallelism
from koushi.layout import divide_layers

SINGLE_STAGE = frozenset({"GPipe", "1F1B"})
V_SHAPED = frozenset({"ZBVZeroBubble", "DualPipeV"})
ZERO_BUBBLE = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""Schedules that split backward into its input and weight halves."""


def stages_of_rank(schedule: str, pp: int, n_stages: int, index: int) -> tuple[int, ...]:
    """The stages held at pipeline coordinate ``index``, in the order of the model."""
    if schedule in V_SHAPED:
        assert n_stages == 2 * pp, f"{schedule} has two stages a rank, not {n_stages} over {pp} ranks"
        return (index, n_stages - 1 - index)
    return tuple(range(index, n_stages, pp))


def rank_of_stage(schedule: str, pp: int, n_stages: int, stage: int) -> int:
    """The pipeline coordinate that holds ``stage``."""
    if schedule in V_SHAPED and stage >= pp:
        return n_stages - 1 - stage
    return stage % pp


def stage_layers(n_layers: int, parallelism: Parallelism) -> tuple[range, ...]:
    """The layers of every stage, first to last, as a run file's parallelism section asks for."""
    pp = parallelism.pipeline_parallel_degree
    counts = parallelism.pipeline_parallel_layers_per_stage
    if counts is None:
        single = pp == 1 or parallelism.pipeline_parallel_schedule in SINGLE_STAGE
        per_rank = parallelism.pipeline_parallel_stages_per_rank or (1 if single else 2)
        counts = divide_layers(n_layers, pp * per_rank)
    stops = tuple(accumulate(counts))
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))
