"""One rank's training step, run for real on a device that holds nothing, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.dryrun.flops import FlopLog
from koushi.dryrun.memory import MemoryLog, Peak
from koushi.dryrun.world import DeviceKind, gathered, world
from koushi.job import Job
from koushi.optim.adamw import AdamW, Moments
from koushi.parallel.compose import ParallelModel, build
from koushi.parallel.device_mesh import build_mesh
from koushi.parallel.ledger import Ledger, Recorder
from koushi.traffic import Phase
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
    ledger: Ledger
    flops_before: tuple[int, ...]
    """FLOPs done when each event of the ledger was issued."""


def trace(job: Job, rank: int, kind: DeviceKind) -> RankTrace:
    """Run one step as ``rank``, in this process, which can then be no other rank."""
    with world(job.mesh, rank, kind) as device:
        shape = (job.local_batch_size, job.config.training.seq_len)
        batch = torch.empty(shape, dtype=torch.int64, device=device)
        return traced_step(job, device, batch, batch.clone())


def traced_step(job: Job, device: torch.device, tokens: Tensor, labels: Tensor) -> RankTrace:
    """Build the job's model on ``device`` as this process's rank, then run a step under observation.

    The optimizer's state is there from the start, as it is in every step but a run's first.
    """
    training = job.config.training
    share = job.size.vocab_size // job.mesh.degree("tp")
    memory = MemoryLog(device.type, (share, training.microbatch_size * training.seq_len * share))
    flops = FlopLog()
    with memory.watching():
        with _Building(memory):
            model = build(job, build_mesh(job.mesh, device.type), device)
            optimizer = AdamW(job.config.optimizer)
            for parameter in model.parameters:
                zeros = torch.zeros_like(parameter.value), torch.zeros_like(parameter.value)
                optimizer.moments[parameter.name] = Moments(*zeros)
        step = TrainStep(job, model, optimizer)
        _tell_state(memory, model, optimizer)
        recorder = Recorder(job.mesh, model.parts, (memory, flops))
        memory.place = flops.place = recorder.place
        with recorder:
            norm = step.compute(tokens, labels)[1]
            for parameter in model.parameters:
                memory.tell([parameter.gradient], "gradients", _module(parameter.name))
            step.update(norm)
            del norm
    for part in model.parts.values():
        for unit, buffer in gathered(part):
            memory.tell([buffer], "unsharded parameters", unit)
    memory.settle()
    return RankTrace(
        rank=dist.get_rank(),
        shapes={parameter.name: tuple(parameter.value.shape) for parameter in model.parameters},
        peak=memory.peak(),
        resting=memory.held,
        flops=dict(flops.phases),
        ledger=recorder.ledger(),
        flops_before=tuple(flops.before),
    )


def _tell_state(memory: MemoryLog, model: ParallelModel, optimizer: AdamW) -> None:
    for parameter in model.parameters:
        memory.tell([parameter.value], "parameters", _module(parameter.name))
    for name, moments in optimizer.moments.items():
        memory.tell((moments.exp_avg, moments.exp_avg_sq), "optimizer", _module(name))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


@final
class _Building(TorchDispatchMode):
    """Shows the memory log what is made before the step."""

    def __init__(self, memory: MemoryLog):
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again with its local tensors
        out = func(*args, **(kwargs or {}))
        self._memory.saw(func, args, kwargs or {}, out, None)
        return out
