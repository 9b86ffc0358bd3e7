"""Tensor parallel with sequence parallel and loss parallel, on ``mesh["tp"]``.

Parameters are stored as DTensors on the tp mesh, so that sharding and checkpoints see how they are
cut; the computation takes their local part and moves activations with explicit collectives. Between
the regions (attention, feed-forward, output) activations are cut along the sequence; a region
gathers them, computes with its share of heads, channels or vocabulary, and scatters the sum
(arXiv 1909.08053, 2205.05198).

A parameter copied over tp sees only this rank's part of the sequence or of the heads, so its
gradient is a partial sum; ``finish_gradients`` of the training step adds those up once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from koushi.data.samples import IGNORE_INDEX
from koushi.layout import Placement, Shard, chunk
from koushi.loss import at_least_float32
from koushi.models.layers import Embedding, Linear, RMSNorm
from koushi.models.llama.layout import Region
from koushi.parallel.collectives import gather, scatter_sum

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class TensorParallel:
    """What tensor parallel needs to know of a model."""

    placements: Mapping[str, Placement]
    """Of every parameter, by the name it has in the module."""
    regions: Sequence[Region]
    copied_rows: Mapping[str, slice]
    """Rows that this rank computes with, of projections copied because tp exceeds the KV heads."""


def local(parameter: Tensor) -> Tensor:
    """The local part of a parameter; its gradient returns to the parameter as it lies."""
    assert isinstance(parameter, DTensor), "tensor parallel has made every parameter a DTensor"
    return parameter.to_local()


class LocalLinear(Linear):
    """This rank's rows (a share of the outputs) or columns (a partial sum of the outputs)."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight).to(input.dtype))


class CopiedLinear(Linear):
    """A projection stored whole, of which this rank computes ``rows``."""

    rows: slice

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight)[self.rows].to(input.dtype))


class LocalRMSNorm(RMSNorm):
    """A norm of this rank's part of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, local(self.weight).to(x.dtype), self.eps)


class VocabularyEmbedding(Embedding):
    """Token vectors from a table cut by vocabulary: zeros for other ranks' tokens, then the sum, cut by sequence."""

    first_token: int
    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        table = local(self.weight)
        row = input - self.first_token
        elsewhere = (row < 0) | (row >= table.shape[0])
        found = F.embedding(row.masked_fill(elsewhere, 0), table).to(self.compute_dtype or table.dtype)
        return scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), SEQUENCE_DIM, self.group)


def torch_placement(placement: Placement) -> TorchPlacement:
    return TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()


def distribute(parameter: Tensor, placement: Placement, submesh: DeviceMesh) -> nn.Parameter:
    """The DTensor of a full parameter that every rank of ``submesh`` holds alike; no communication."""
    full = parameter.detach()
    piece = full
    if isinstance(placement, Shard):
        start, stop = chunk(full.shape[placement.dim], submesh.size(), submesh.get_local_rank())
        piece = full.narrow(placement.dim, start, stop - start).clone()
    wrapped = DTensor.from_local(
        piece, submesh, [torch_placement(placement)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return nn.Parameter(wrapped)


def apply(module: nn.Module, submesh: DeviceMesh, options: TensorParallel) -> nn.Module:
    """Cut ``module``'s parameters over ``submesh`` and make it compute on its share; in place.

    The module then takes token ids, or activations cut along the sequence, and gives activations cut
    along the sequence, or logits cut along the vocabulary.
    """
    group = submesh.get_group()
    made: dict[int, nn.Parameter] = {}
    for name, leaf in module.named_modules():
        for attribute, parameter in leaf.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:  # a tied parameter stays tied
                made[id(parameter)] = distribute(parameter, options.placements[f"{name}.{attribute}"], submesh)
            leaf.register_parameter(attribute, made[id(parameter)])
        _localise(name, leaf, submesh, options)
        for region in options.regions:
            if fnmatchcase(name, region.module):
                leaf.register_forward_pre_hook(lambda _, args: (gather(args[0], SEQUENCE_DIM, group), *args[1:]))
                if region.scatters:
                    leaf.register_forward_hook(lambda _, args, out: scatter_sum(out, SEQUENCE_DIM, group))
    return module


def _localise(name: str, leaf: nn.Module, submesh: DeviceMesh, options: TensorParallel) -> None:
    rows = options.copied_rows.get(f"{name}.weight")
    if isinstance(leaf, Linear) and rows is not None:
        leaf.__class__ = CopiedLinear
        leaf.rows = rows  # type: ignore[assignment]
    elif isinstance(leaf, Linear):
        leaf.__class__ = LocalLinear
    elif isinstance(leaf, RMSNorm):
        leaf.__class__ = LocalRMSNorm
    elif isinstance(leaf, Embedding):
        leaf.__class__ = VocabularyEmbedding
        leaf.first_token = chunk(leaf.num_embeddings, submesh.size(), submesh.get_local_rank())[0]  # type: ignore[assignment]
        leaf.group = submesh.get_group()  # type: ignore[assignment]
    else:
        owned = [attribute for attribute, _ in leaf.named_parameters(recurse=False)]
        assert not owned, f"{name} ({type(leaf).__name__}) owns {owned}, which tensor parallel cannot localise"


class _VocabularyLoss(torch.autograd.Function):
    """Sum of token cross entropies of logits cut by vocabulary.

    Shape letters: N tokens, W this rank's share of the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first_token: int, group: dist.ProcessGroup) -> Tensor:
        wide = at_least_float32(logits)
        highest = wide.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        row = labels - first_token
        here = (row >= 0) & (row < wide.shape[-1])
        row = row.masked_fill(~here, 0)
        exponentials = (wide - highest.unsqueeze(-1)).exp_().sum(-1)
        target = wide.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        sums = torch.stack((exponentials, target))
        dist.all_reduce(sums, group=group)
        normaliser = highest + sums[0].log()
        valid = labels != IGNORE_INDEX
        ctx.save_for_backward(logits, normaliser, row, here, valid)
        return (normaliser - sums[1]).masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, normaliser, row, here, valid = ctx.saved_tensors
        slope = (at_least_float32(logits) - normaliser.unsqueeze(-1)).exp_()
        slope.scatter_add_(-1, row.unsqueeze(-1), -here.to(slope.dtype).unsqueeze(-1))
        slope.mul_((valid * gradients[0]).to(slope.dtype).unsqueeze(-1))
        return slope.to(logits.dtype), None, None, None


def token_loss_sum(logits: Tensor, labels: Tensor, submesh: DeviceMesh) -> Tensor:
    """As ``koushi.loss.token_loss_sum``, of logits [B, T, V / tp] cut by vocabulary; the same on every rank."""
    first_token = logits.shape[-1] * submesh.get_local_rank()
    arguments = (logits.flatten(0, 1), labels.flatten(), first_token, submesh.get_group())
    loss: Tensor = _VocabularyLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss
