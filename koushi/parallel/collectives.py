"""Differentiable collectives on local tensors. Each has the other as its backward.

Both run on contiguous tensors, since raw collectives read memory as it lies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Private: the functional collectives. Only these give selective recompute an output it can keep (the
# public ones write into a buffer, which a replayed forward would leave empty) and compile a graph.
_functional = torch.ops._c10d_functional


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' ``x`` joined along ``dim``, in rank order."""
    flat: Tensor = _functional.all_gather_into_tensor(x.contiguous().view(-1), group.size(), group.group_name)
    gathered: Tensor = _functional.wait_tensor(flat).view(group.size(), *x.shape)
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along ``dim`` of the sum of the ranks' ``x``."""
    pieces = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    flat: Tensor = _functional.reduce_scatter_tensor(pieces.view(-1), "sum", group.size(), group.group_name)
    piece: Tensor = _functional.wait_tensor(flat)
    return piece.view(pieces.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_gather(gradients[0], ctx.dim, ctx.group), None, None


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Pieces along ``dim`` to the whole, for a computation whose input gradient is a partial sum."""
    gathered: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Partial sums to this rank's piece of their total along ``dim``."""
    piece: Tensor = _ScatterSum.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return piece


def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its sum over the group, in place, with one collective per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
