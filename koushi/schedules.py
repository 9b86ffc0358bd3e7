"""Pipeline schedules: what each asks of stages and microbatches, and which stages a rank holds. No torch.

A stage is a run of layers; with several stages on a rank they are virtual stages. Loop schedules
deal them out in turn; V schedules walk down the ranks and back up, so that the first rank holds
both ends of the model. The requirements are those of ``torch.distributed.pipelining.schedules``
(2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from koushi.config.schema import Parallelism
from koushi.layout import divide_layers


@dataclass(frozen=True)
class ScheduleNeeds:
    """What a schedule asks of stages and microbatches."""

    fewest_stages_per_rank: int = 1
    most_stages_per_rank: int | None = None
    microbatches_per_stage: int = 0
    """At least this many microbatches for every stage of the pipeline."""
    in_rounds: bool = False
    """Whether microbatches must divide evenly into rounds of about pp microbatches."""
    splits_backward: bool = False
    """Zero bubble: gradients of inputs and of weights are computed apart."""
    v_shaped: bool = False
    """Whether stages go down the ranks and back up."""


SCHEDULES = {
    "GPipe": ScheduleNeeds(most_stages_per_rank=1),
    "1F1B": ScheduleNeeds(most_stages_per_rank=1, microbatches_per_stage=1),
    "Interleaved1F1B": ScheduleNeeds(fewest_stages_per_rank=2, in_rounds=True),
    "LoopedBFS": ScheduleNeeds(fewest_stages_per_rank=2),
    "InterleavedZeroBubble": ScheduleNeeds(fewest_stages_per_rank=2, in_rounds=True, splits_backward=True),
    "ZBVZeroBubble": ScheduleNeeds(
        fewest_stages_per_rank=2, most_stages_per_rank=2, splits_backward=True, v_shaped=True
    ),
    "DualPipeV": ScheduleNeeds(
        fewest_stages_per_rank=2, most_stages_per_rank=2, microbatches_per_stage=1, splits_backward=True, v_shaped=True
    ),
}


def microbatches_fit(schedule: str, pp: int, n_stages: int, microbatches: int) -> bool:
    """Whether ``schedule`` can run this many microbatches."""
    needs = SCHEDULES[schedule]
    if microbatches < max(1, needs.microbatches_per_stage * n_stages):
        return False
    return not needs.in_rounds or microbatches % max(1, microbatches // pp) == 0


def nearest_microbatches(schedule: str, pp: int, n_stages: int, microbatches: int) -> tuple[int, ...]:
    """The nearest counts below and above that ``schedule`` can run, itself if it can."""
    if microbatches_fit(schedule, pp, n_stages, microbatches):
        return (microbatches,)
    least = max(1, SCHEDULES[schedule].microbatches_per_stage * n_stages)
    if microbatches < least:
        return (least,)
    below = next(m for m in range(microbatches - 1, 0, -1) if microbatches_fit(schedule, pp, n_stages, m))
    # A multiple of pp always fits.
    above = next(
        m for m in range(microbatches + 1, microbatches + pp + 1) if microbatches_fit(schedule, pp, n_stages, m)
    )
    return below, above


def stages_of_rank(schedule: str, pp: int, n_stages: int, index: int) -> tuple[int, ...]:
    """The stages held at pipeline coordinate ``index``, in the order of the model; without a pipeline all of them."""
    if pp == 1:
        return tuple(range(n_stages))
    if SCHEDULES[schedule].v_shaped:
        assert n_stages == 2 * pp, f"{schedule} has two stages a rank, not {n_stages} over {pp} ranks"
        return (index, n_stages - 1 - index)
    return tuple(range(index, n_stages, pp))


def rank_of_stage(schedule: str, pp: int, n_stages: int, stage: int) -> int:
    """The pipeline coordinate that holds ``stage``; 0 without a pipeline."""
    if pp > 1 and SCHEDULES[schedule].v_shaped and stage >= pp:
        return n_stages - 1 - stage
    return stage % pp


def tied_ends(schedule: str, pp: int, n_stages: int, *, tied: bool) -> tuple[int, int] | None:
    """Pipeline coordinates of a ``tied`` embedding's two copies, at the model's ends; None where it has but one."""
    return (0, rank_of_stage(schedule, pp, n_stages, n_stages - 1)) if tied and n_stages > 1 else None


def stage_layers(n_layers: int, pp: int, parallelism: Parallelism) -> tuple[range, ...]:
    """The layers of every stage over ``pp`` ranks, first to last, as a run file's parallelism section asks for."""
    counts = parallelism.pipeline_parallel_layers_per_stage
    if counts is None:
        fewest = 1 if pp == 1 else SCHEDULES[parallelism.pipeline_parallel_schedule].fewest_stages_per_rank
        counts = divide_layers(n_layers, pp * (parallelism.pipeline_parallel_stages_per_rank or fewest))
    return layer_ranges(counts)


def layer_ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The layers of stages that hold so many each, first to last."""
    stops = tuple(accumulate(counts))
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))
