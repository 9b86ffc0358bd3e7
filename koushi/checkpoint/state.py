"""What a rank saves and loads: slices of the parameters and of the optimizer's moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from koushi.checkpoint.manifest import EXP_AVG, EXP_AVG_SQ, PARAMETER
from koushi.checkpoint.tensors import Part
from koushi.optim.adamw import AdamW, Moments
from koushi.parallel.shards import LocalParameter


@dataclass(frozen=True)
class Piece:
    """A slice of one tensor of the unsharded model, in a tensor of this rank."""

    kind: str
    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    part: Part
    tensor: Tensor
    """The live values."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


def owned(parameters: Sequence[LocalParameter], optimizer: AdamW, coordinate: Mapping[str, int]) -> list[Piece]:
    """What the rank at ``coordinate`` saves: over all ranks every element once."""
    if coordinate["dp_replicate"] > 0:
        return []
    return list(_pieces([one for one in parameters if one.counted], optimizer))


def held(parameters: Sequence[LocalParameter], optimizer: AdamW, optimizer_steps: int) -> list[Piece]:
    """What this rank loads. Gives every parameter moments, yet to be filled, where ``optimizer_steps`` says that there
    are some."""
    optimizer.steps = optimizer_steps
    optimizer.moments.clear()
    for one in parameters if optimizer_steps else ():
        if one.value.numel():
            optimizer.moments[one.name] = Moments(torch.empty_like(one.value), torch.empty_like(one.value))
    return list(_pieces(parameters, optimizer))


def _pieces(parameters: Sequence[LocalParameter], optimizer: AdamW) -> Iterator[Piece]:
    for one in parameters:
        if not one.value.numel():
            continue
        tensors = {PARAMETER: one.value}
        moments = optimizer.moments.get(one.name)
        if moments is not None:
            tensors |= {EXP_AVG: moments.exp_avg, EXP_AVG_SQ: moments.exp_avg_sq}
        for kind, tensor in tensors.items():
            yield Piece(kind, one.description.name, one.description.shape, Part.of(one.part), tensor)
