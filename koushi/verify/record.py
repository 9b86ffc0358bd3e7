"""Train a few steps and keep what each rank holds, so that layouts can be compared.

Ranks write what they hold to files of their own and share nothing: the comparison does not depend
on the collectives it is there to check.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from koushi.data.batches import open_samples, train_batch
from koushi.job import Job
from koushi.layout import Slices
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import ParallelModel, build
from koushi.parallel.device_mesh import (
    build_mesh,
    destroy_mesh,
    init_process_group,
    local_device,
    resolve_device,
)
from koushi.train.step import TrainStep


@dataclass(frozen=True)
class Piece:
    """A slice of one tensor of the unsharded model, as one rank holds it."""

    kind: str
    """initial, gradient, parameter, exp_avg or exp_avg_sq."""
    name: str
    step: int
    shape: tuple[int, ...]
    part: Slices
    values: Tensor

    def __getstate__(self) -> dict[str, Any]:
        """As numpy's arrays, which are written and read in a fraction of the time of small tensors."""
        return self.__dict__ | {"values": self.values.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, values=torch.from_numpy(state["values"]))


@dataclass(frozen=True)
class RankRecord:
    """What one rank saw of a run."""

    losses: list[float]
    grad_norms: list[float]
    pieces: list[Piece]


def record_jobs(job: Job, *, jobs: Sequence[Job], steps: int, folder: Path) -> None:
    """Worker: run every one of ``jobs``, all of ``job``'s world size, in this world, one after another.

    The record of rank r of the i-th goes to ``folder/i-r``.
    """
    device = local_device(resolve_device(job.config.run.device))
    init_process_group(device, job.config.run.timeout)
    mesh = None
    for index, one in enumerate(jobs):
        if index == 0 or one.mesh != jobs[index - 1].mesh:
            if mesh is not None:
                destroy_mesh(mesh)
            mesh = build_mesh(one.mesh, device.type, job.config.run.timeout)
        assert mesh is not None, "the first job has built one"
        kept = record(one, steps, mesh, device)
        (folder / f"{index}-{dist.get_rank()}").write_bytes(pickle.dumps(kept, pickle.HIGHEST_PROTOCOL))
    dist.destroy_process_group()


def read_records(folder: Path, index: int, world_size: int) -> list[RankRecord]:
    """What ``record_jobs`` wrote for its ``index``-th job: this program's own temporary files."""
    return [pickle.loads((folder / f"{index}-{rank}").read_bytes()) for rank in range(world_size)]


def record(job: Job, steps: int, world_mesh: DeviceMesh, device: torch.device) -> RankRecord:
    """Run ``steps`` of ``job`` as this rank of ``world_mesh``."""
    rank = dist.get_rank()
    model = build(job, world_mesh, device)
    optimizer = AdamW(job.config.optimizer)
    train_step = TrainStep(job, model, optimizer)
    samples = open_samples(job)
    data_index = job.mesh.index(rank, "dp_replicate", "dp_shard")
    losses, norms = [], []
    pieces = list(_pieces(model, "initial", 0))
    for step in range(steps):
        first = step * job.config.training.global_batch_size
        tokens, labels = train_batch(samples, first, job.local_batch_size, data_index)
        loss, norm = train_step.compute(tokens.to(device), labels.to(device))
        pieces.extend(_pieces(model, "gradient", step))
        train_step.update(norm)
        losses.append(loss.item())
        norms.append(norm.item())
    pieces.extend(_pieces(model, "parameter", steps))
    pieces.extend(_moments(model, optimizer, steps))
    return RankRecord(losses, norms, pieces)


def _pieces(model: ParallelModel, kind: str, step: int) -> Iterator[Piece]:
    for parameter in model.parameters:
        about = parameter.description
        values = parameter.gradient if kind == "gradient" else parameter.value
        yield Piece(kind, about.name, step, about.shape, parameter.part, values.detach().cpu().clone())


def _moments(model: ParallelModel, optimizer: AdamW, step: int) -> Iterator[Piece]:
    for parameter in model.parameters:
        about = parameter.description
        moments = optimizer.moments.get(parameter.name)
        if moments is not None:
            for kind, values in (("exp_avg", moments.exp_avg), ("exp_avg_sq", moments.exp_avg_sq)):
                yield Piece(kind, about.name, step, about.shape, parameter.part, values.cpu().clone())
