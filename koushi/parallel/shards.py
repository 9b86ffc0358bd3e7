"""What a rank holds of the unsharded model: each parameter's name, its slice, and who counts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from koushi.job import Job
from koushi.layout import Slices, local_slices
from koushi.models.llama import layout as llama
from koushi.models.llama.model import Llama
from koushi.optim.initial import draw


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of a part, as this rank holds it."""

    name: str
    """In the part. Tied weights that pipeline stages hold twice have two names and one description."""
    description: llama.Parameter
    """Of the unsharded model, under its canonical name."""
    tensor: nn.Parameter
    part: Slices
    """Which part of the global tensor is here; may be empty."""
    counted: bool
    """Whether this rank, among those that hold the same numbers within a data-parallel replica, counts them."""

    @property
    def value(self) -> Tensor:
        """The local shard, sharing memory with the parameter."""
        return local_part(self.tensor)

    @property
    def gradient(self) -> Tensor:
        """The local shard of the gradient, sharing memory with it."""
        assert self.tensor.grad is not None, f"{self.name} has no gradient"
        return local_part(self.tensor.grad)

    @property
    def copied_over_tp(self) -> bool:
        return self.description.copied_over_tp


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_parameters(parts: Mapping[int, Llama], job: Job, coordinate: Mapping[str, int]) -> list[LocalParameter]:
    """Every parameter that the rank at ``coordinate`` holds, in the order of the model."""
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))
    described = llama.parameters(job.size, degrees["tp"])
    found = []
    for part in parts.values():
        for name, tensor in part.named_parameters():
            canonical = llama.canonical(name, job.size)
            description = described[canonical]
            found.append(
                LocalParameter(
                    name=name,
                    description=description,
                    tensor=tensor,
                    part=local_slices(description.shape, description.cuts, degrees, coordinate),
                    counted=name == canonical and not (description.copied_over_tp and coordinate["tp"] > 0),
                )
            )
    return found


@torch.no_grad()
def fill(parameters: list[LocalParameter], seed: int) -> None:
    """Set every local shard to its initial value."""
    for parameter in parameters:
        about = parameter.description
        value = parameter.value
        drawn = draw(seed, about.name, about.shape, about.std, parameter.part)
        assert drawn.shape == value.shape, (
            f"{parameter.name}: the layout gives {tuple(drawn.shape)}, torch holds {tuple(value.shape)}"
        )
        value.copy_(drawn)
