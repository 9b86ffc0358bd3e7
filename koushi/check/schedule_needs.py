"""What each pipeline schedule asks of stages and microbatches.

The requirements are those of ``torch.distributed.pipelining.schedules`` (2.11 to 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass


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


SCHEDULES = {
    "GPipe": ScheduleNeeds(most_stages_per_rank=1),
    "1F1B": ScheduleNeeds(most_stages_per_rank=1, microbatches_per_stage=1),
    "Interleaved1F1B": ScheduleNeeds(fewest_stages_per_rank=2, in_rounds=True),
    "LoopedBFS": ScheduleNeeds(fewest_stages_per_rank=2),
    "InterleavedZeroBubble": ScheduleNeeds(fewest_stages_per_rank=2, in_rounds=True, splits_backward=True),
    "ZBVZeroBubble": ScheduleNeeds(fewest_stages_per_rank=2, most_stages_per_rank=2, splits_backward=True),
    "DualPipeV": ScheduleNeeds(
        fewest_stages_per_rank=2, most_stages_per_rank=2, microbatches_per_stage=1, splits_backward=True
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
    # A multiple of pp always fits, so neither search goes far.
    below = next(m for m in range(microbatches - 1, 0, -1) if microbatches_fit(schedule, pp, n_stages, m))
    rising = range(microbatches + 1, microbatches + pp + 1)
    return below, next(m for m in rising if microbatches_fit(schedule, pp, n_stages, m))
