"""The planner's prediction and the dry run's record of the same rank, and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from koushi.dryrun.memory import KINDS
from koushi.dryrun.trace import RankTrace
from koushi.dryrun.world import DeviceKind
from koushi.hardware.hardware import load
from koushi.job import Job
from koushi.plan.memory import memory
from koushi.plan.workload import of_job
from koushi.traffic import differences
from koushi.train.audit import planned
from koushi.units import bytes_text, counted

ALLOWED = 0.02
"""By how much the peak may be off."""
SLACK = 2 << 20
"""Bytes that it may always be off: a block of CUDA's allocator."""


def disagreements(job: Job, kind: DeviceKind, traces: Sequence[RankTrace]) -> list[str]:
    """In words, with both sides: traffic that is not equal, memory that is more than ``ALLOWED`` apart."""
    return [text for trace in traces for text in (*_traffic(job, trace), *_memory(job, kind, trace))]


AGREES = f"plan: every collective as planned, peak memory within {ALLOWED:.0%}"


def disagreement_text(found: Sequence[str]) -> str:
    """What ``disagreements`` found, as an error."""
    reason = "a mistake of koushi's, or a case that its plans do not know"
    please = "please report it with the run file and the output of koushi env"
    return "\n".join([f"plan and dry run part in {counted(len(found), 'place')}: {reason}; {please}", *found])


def _traffic(job: Job, trace: RankTrace) -> Iterator[str]:
    yield from (f"rank {trace.rank}: {text}" for text in differences(planned(job, trace.rank), trace.traffic))


def _memory(job: Job, kind: DeviceKind, trace: RankTrace) -> Iterator[str]:
    """Only the ranks with the largest shards: those are planned for. Not where blocks are compiled: a dry run runs them
    operation by operation, and holds what compiled ones do not."""
    if job.config.training.compile:
        return
    if any(index for name, index in job.mesh.coordinate(trace.rank).items() if name != "pp"):
        return
    pp = job.mesh.coordinate(trace.rank)["pp"]
    expected = memory(of_job(job), pp, load("cpu") if kind == "cpu" else None)
    if abs(expected.active - trace.peak.bytes) <= max(SLACK, ALLOWED * trace.peak.bytes):
        return
    both = [(name, getattr(expected, name.replace(" ", "_")), trace.peak.kinds.get(name, 0)) for name in KINDS]
    parts = ", ".join(
        f"{name} {bytes_text(before)} and {bytes_text(found)}" for name, before, found in both if before != found
    )
    totals = f"planned {bytes_text(expected.active)}, ran {bytes_text(trace.peak.bytes)}"
    yield f"rank {trace.rank}: peak memory {totals}: {parts}"
