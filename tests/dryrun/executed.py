"""The same step predicted on meta and executed by gloo, rank by rank."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from koushi.data.batches import open_samples, train_batch
from koushi.dryrun.forks import in_forks
from koushi.dryrun.trace import RankTrace, trace, traced_step
from koushi.dryrun.world import BACKEND, as_gloo_does, shapes_are_known
from koushi.job import Job
from koushi.parallel.device_mesh import build_mesh, destroy_mesh, init_process_group, local_device, resolve_device
from koushi.parallel.ledger import Event
from koushi.train.launch import launch


def executed(jobs: Sequence[Job], folder: Path) -> list[list[RankTrace]]:
    """A step of each job under real ranks, all in one world; the traces of every rank, job by job."""
    launch(partial(_worker, jobs=tuple(jobs), folder=folder), jobs[0])
    return [
        [pickle.loads((folder / f"{index}-{rank}.pickle").read_bytes()) for rank in range(jobs[0].mesh.world_size)]
        for index in range(len(jobs))
    ]


def predicted(jobs: Sequence[Job]) -> list[list[RankTrace]]:
    """The same without processes that talk."""
    world = jobs[0].mesh.world_size
    found = in_forks(_predict, list(product(jobs, range(world))))
    return [found[start : start + world] for start in range(0, len(found), world)]


def computed(jobs: Sequence[Job]) -> list[list[RankTrace]]:
    """With real kernels on real memory, but nothing sent: what gloo keeps for as long as it likes plays no part."""
    world = jobs[0].mesh.world_size
    found = in_forks(_compute, list(product(jobs, range(world))))
    return [found[start : start + world] for start in range(0, len(found), world)]


def _compute(item: tuple[Job, int]) -> RankTrace:
    job, rank = item
    device = torch.device("cpu")
    dist.init_process_group(BACKEND, rank=rank, world_size=job.mesh.world_size, store=FakeStore())
    with (
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", shapes_are_known),  # ranks vote by a number
        as_gloo_does(),
    ):
        return traced_step(job, build_mesh(job.mesh, "cpu"), device, *_batch(job, rank))


def _batch(job: Job, rank: int) -> tuple[Tensor, Tensor]:
    data_index = job.mesh.index(rank, "dp_replicate", "dp_shard")
    return train_batch(open_samples(job), 0, job.local_batch_size, data_index)


def _predict(item: tuple[Job, int]) -> RankTrace:
    return trace(*item, "cpu")


def _worker(job: Job, *, jobs: Sequence[Job], folder: Path) -> None:
    device = local_device(resolve_device(job.config.run.device))
    init_process_group(device, job.config.run.timeout)
    rank = dist.get_rank()
    for index, one in enumerate(jobs):
        mesh = build_mesh(one.mesh, device.type)
        found = traced_step(one, mesh, device, *_batch(one, rank))
        (folder / f"{index}-{rank}.pickle").write_bytes(pickle.dumps(found))
        destroy_mesh(mesh)
    dist.destroy_process_group()


def differing(one: RankTrace, other: RankTrace) -> list[str]:
    """What is not the same in two traces, in words; what torch's pipeline does once in a run is left out."""
    found = []
    for name in ("shapes", "flops", "resting", "peak"):
        mine, others = getattr(one, name), getattr(other, name)
        if mine != others:
            found.append(f"{name}: {mine} is not {others}")
    events, others_events = _events(one), _events(other)
    if events != others_events:
        first = next((pair for pair in zip(events, others_events, strict=False) if pair[0] != pair[1]), None)
        found.append(f"events: {len(events)} and {len(others_events)}, the first that differ {first}")
    return found


def _events(trace: RankTrace) -> list[tuple[Event, int]]:
    """With the FLOPs done before each."""
    assert len(trace.ledger.events) == len(trace.flops_before), "an event was not noted"
    return [
        (replace(event, number=0), flops)
        for event, flops in zip(trace.ledger.events, trace.flops_before, strict=True)
        if not event.once
    ]
