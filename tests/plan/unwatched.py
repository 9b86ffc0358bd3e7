"""What an ordinary step takes: bytes that torch's CPU allocator gives and takes back, as torch.profiler reports them.

No dispatch mode takes part, under which autograd does not add gradients in place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from koushi.data.batches import open_samples, train_batch
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh, destroy_mesh, init_process_group
from koushi.train.launch import launch
from koushi.train.step import TrainStep


def most_bytes(jobs: Sequence[Job], folder: Path, *, collectives: bool) -> list[list[int]]:
    """Of every job on every rank, the peak of the third step. The jobs' worlds are of one size.

    Without ``collectives`` they are left out, and what they would bring is whatever is in memory: gloo's threads let
    tensors go, which the profiler doesn't see, so that only sends and reductions in place can be measured with them.
    """
    launch(partial(_work, jobs=list(jobs), folder=folder, collectives=collectives), jobs[0])
    return [
        [int((folder / f"{index}-{rank}").read_text()) for rank in range(job.mesh.world_size)]
        for index, job in enumerate(jobs)
    ]


def _work(job: Job, *, jobs: Sequence[Job], folder: Path, collectives: bool) -> None:
    init_process_group(torch.device("cpu"), job.config.run.timeout)
    if not collectives:
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.mesh.world_size)
    for index, one in enumerate(jobs):
        mesh = build_mesh(one.mesh, "cpu")
        gc.collect()  # what is left of the job before would go while this one is measured
        (folder / f"{index}-{dist.get_rank()}").write_text(str(_peak(one, mesh)))
        destroy_mesh(mesh)
    dist.destroy_process_group()


def _peak(job: Job, mesh: DeviceMesh) -> int:
    steps: list[TrainStep] = []
    samples = open_samples(job)
    data_index = job.mesh.index(dist.get_rank(), "dp_replicate", "dp_shard")

    def run(index: int) -> None:
        first = index * job.config.training.global_batch_size
        steps[0].run(*train_batch(samples, first, job.local_batch_size, data_index))

    def begin() -> None:
        model = build(job, mesh, torch.device("cpu"))
        steps.append(TrainStep(job, model, AdamW(job.config.optimizer)))
        run(0)
        run(1)

    held = _changes(begin)
    now = most = sum(held)
    for change in _changes(partial(run, 2)):
        now += change
        most = max(most, now)
    return most


def _changes(run: Callable[[], None]) -> list[int]:
    """Bytes that the allocator gave, or took back, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
