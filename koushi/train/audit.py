"""``debug.audit``: a run's first step watched, and held against what was planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from koushi.job import Job
from koushi.parallel.ledger import Ledger
from koushi.plan.communication import traffic
from koushi.plan.workload import of_job
from koushi.traffic import Traffic, differences
from koushi.units import bytes_text, counted

SHOWN = 8


def planned(job: Job, rank: int) -> Traffic:
    """What ``rank`` is to send in every step."""
    return traffic(of_job(job), job.mesh.index(rank, "pp"), job.mesh.index(rank, "dp_shard"))


def outcome(job: Job, ledger: Ledger, device: torch.device) -> str:
    """For people, the same on every rank: how much ran over all ranks, and where it is not what was planned."""
    ran = ledger.traffic()
    found = differences(planned(job, ledger.rank), ran)
    volume = sum(one.bytes * calls for one, calls in ran.items())
    totals = torch.tensor([ran.total(), volume, int(bool(found))], device=device)
    dist.all_reduce(totals)
    calls, volume, differing = totals.tolist()
    if not (calls or differing):
        return "audit: nothing to audit: no collective was planned, and none ran"
    if not differing:
        return f"audit: {counted(calls, 'collective')}, {bytes_text(volume)} as predicted"
    first = torch.tensor(ledger.rank if found else job.mesh.world_size, device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN)
    said: list[Sequence[str]] = [found]
    dist.broadcast_object_list(said, src=int(first), device=device)
    rest = [f"and {len(said[0]) - SHOWN} more kinds of calls"] if len(said[0]) > SHOWN else []
    return "\n  ".join(
        (
            f"warning: audit: on {counted(differing, 'rank')} of {job.mesh.world_size} what ran is not what was "
            f"predicted; on rank {int(first)} ({job.mesh.describe(int(first))}):",
            *said[0][:SHOWN],
            *rest,
        )
    )
