"""One rank's training step, run for real on a device that holds nothing, and what it did."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from koushi.dryrun.flops import FlopLog, Work
from koushi.dryrun.memory import MemoryLog, Peak
from koushi.dryrun.shapes import KnownShapes
from koushi.dryrun.world import DeviceKind, gathered, world
from koushi.job import Job
from koushi.optim.adamw import AdamW, Moments
from koushi.parallel.compose import ParallelModel, build
from koushi.parallel.device_mesh import build_mesh
from koushi.parallel.ledger import Ledger, Recorder
from koushi.traffic import Phase, Traffic
from koushi.train.step import TrainStep


@dataclass(frozen=True)
class RankTrace:
    """What one rank did in one step."""

    rank: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters' local parts; a tied output that another stage shares has a name of its own."""
    peak: Peak
    resting: int
    """Bytes held between steps: parameters, optimizer state, buffers that stay."""
    flops: Mapping[Phase, int]
    traffic: Traffic
    """Collectives of the step by kind."""
    ledger: Ledger
    flops_before: tuple[int, ...]
    """FLOPs done when each event of the ledger was issued."""
    works: tuple[Work, ...]
    """All FLOPs, in order and by block."""
    extrapolated: bool = False
    """Whether shapes, peak, FLOPs and traffic are those of more layers than ran."""


def trace(job: Job, rank: int, kind: DeviceKind) -> RankTrace:
    """Run one step as ``rank``, in this process, which can then be no other rank."""
    with world(job.mesh, rank, kind) as device:
        shape = (job.local_batch_size, job.config.training.seq_len)
        batch = torch.empty(shape, dtype=torch.int64, device=device)
        return traced_step(job, build_mesh(job.mesh, device.type), device, batch, batch.clone())


def traced_step(job: Job, world_mesh: DeviceMesh, device: torch.device, tokens: Tensor, labels: Tensor) -> RankTrace:
    """Build the job's model on ``world_mesh`` as this process's rank, then run a step under observation.

    The optimizer's state is there from the start, as it is in every step but a run's first.
    """
    training = job.config.training
    share = job.size.vocab_size // job.mesh.degree("tp")
    memory = MemoryLog(device.type, (share, training.microbatch_size * training.seq_len * share))
    flops = FlopLog()
    model = build(job, world_mesh, device)
    optimizer = AdamW(job.config.optimizer)
    for parameter in model.parameters:
        zeros = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
        optimizer.moments[parameter.name] = Moments(*zeros)
    step = _ObservedStep(job, model, optimizer)
    recorder = Recorder(job.mesh, model.parts, (memory, flops), KnownShapes())
    memory.place = flops.place = lambda: ("optimizer", "") if step.is_backward_done else recorder.place()
    flops.taken = lambda: len(recorder.taken)
    with memory.watching(), _no_collection():
        _begin(memory, model, optimizer, (tokens, labels))
        with recorder:
            norm = step.compute(tokens, labels)[1]
            for parameter in model.parameters:
                memory.tell([parameter.gradient], "gradients", _module(parameter.name))
            step.update(norm)
        del norm
    for parameter in model.parameters:  # sharding pads some of them anew before the first forward
        memory.tell([parameter.value], "parameters", _module(parameter.name), again=True)
    for part in model.parts.values():
        for unit, buffer in gathered(part):
            memory.tell([buffer], "unsharded parameters", unit)
    memory.settle()
    ledger = recorder.ledger()
    return RankTrace(
        rank=dist.get_rank(),
        shapes={parameter.name: tuple(parameter.value.shape) for parameter in model.parameters},
        peak=memory.peak(),
        resting=memory.held,
        flops=dict(flops.phases),
        traffic=ledger.traffic(),
        ledger=ledger,
        flops_before=tuple(flops.before),
        works=tuple(flops.works),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Storages that only a cycle holds on to stay until the end, instead of until Python happens to look."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@final
class _ObservedStep(TrainStep):
    """Tells when the last backward is over."""

    is_backward_done = False

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward_backward(tokens, labels)
        self.is_backward_done = True
        return loss


def _begin(memory: MemoryLog, model: ParallelModel, optimizer: AdamW, batch: Sequence[Tensor]) -> None:
    """What is held before the step. Building leaves nothing else; it makes the whole model, but on meta."""
    for parameter in model.parameters:
        memory.hold([parameter.value], "parameters", _module(parameter.name))
    for name, moments in optimizer.moments.items():
        memory.hold((moments.exp_avg, moments.exp_avg_sq), "optimizer", _module(name))
    memory.hold(batch, "activations", "")


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
