"""Differentiable collectives on local tensors. Each has the other as its backward.

They are operators of their own (``torch.ops.koushi``), so that selective recompute can keep an
output, compile can trace them, and whoever watches operators sees one all-gather or reduce-scatter
whatever carries it out. NCCL has both; gloo goes around a ring, one hop after the other, so on CPU an
all-to-all moves the same bytes in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from koushi.parallel import arrivals

# Private: the functional collectives. The public ones write into a buffer, which a replayed forward
# would leave empty where selective recompute has kept the operator's output.
_functional = torch.ops._c10d_functional

_library = torch.library.Library("koushi", "DEF")
_library.define("all_gather(Tensor x, int dim, int degree, str group) -> Tensor")
_library.define("reduce_scatter(Tensor x, int dim, int degree, str group) -> Tensor")
ALL_GATHER = torch.ops.koushi.all_gather.default
REDUCE_SCATTER = torch.ops.koushi.reduce_scatter.default


def _join(pieces: Tensor, dim: int) -> Tensor:
    """[degree, *shape] to the pieces side by side along ``dim``."""
    joined: Tensor = pieces.movedim(0, dim).flatten(dim, dim + 1)
    return joined


def _cut(x: Tensor, dim: int, degree: int) -> Tensor:
    """The contiguous inverse of ``_join``."""
    pieces: Tensor = x.unflatten(dim, (degree, -1)).movedim(dim, 0).contiguous()
    return pieces


def _exchange(blocks: Tensor, degree: int, group: str) -> Tensor:
    """Block i of [degree, ...] to rank i; what came from each rank in its place."""
    rows = [1] * degree
    received: Tensor = _functional.wait_tensor(_functional.all_to_all_single(blocks, rows, rows, group))
    return received


def _all_gather_cpu(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    return _join(_exchange(x.expand(degree, *x.shape).contiguous(), degree, group), dim)


def _reduce_scatter_cpu(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    return _exchange(_cut(x, dim, degree), degree, group).sum(0)


def _all_gather_cuda(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    gathered: Tensor = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), degree, group))
    return _join(gathered.view(degree, *x.shape), dim)


def _reduce_scatter_cuda(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    pieces = _cut(x, dim, degree)
    piece: Tensor = _functional.wait_tensor(
        _functional.reduce_scatter_tensor(pieces.flatten(0, 1), "sum", degree, group)
    )
    return piece.view(pieces.shape[1:])


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_empty(*x.shape[:dim], size, *x.shape[dim + 1 :])


_Run = Callable[[Tensor, int, int, str], Tensor]


def _noted(operation: str, run: _Run) -> _Run:
    """``run``, which the book sees: these calls do not go through a ProcessGroup's own methods."""

    def call(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
        mark = arrivals.begin(group, operation, x.nbytes * (degree if operation == "all_gather" else 1))
        result = run(x, dim, degree, group)
        arrivals.end(mark)
        return result

    return call


_library.impl("all_gather", _noted("all_gather", _all_gather_cpu), "CPU")
_library.impl("all_gather", _noted("all_gather", _all_gather_cuda), "CUDA")
_library.impl("all_gather", lambda x, dim, degree, group: _resized(x, dim, x.shape[dim] * degree), "Meta")
_library.impl("reduce_scatter", _noted("reduce_scatter", _reduce_scatter_cpu), "CPU")
_library.impl("reduce_scatter", _noted("reduce_scatter", _reduce_scatter_cuda), "CUDA")
_library.impl("reduce_scatter", lambda x, dim, degree, group: _resized(x, dim, x.shape[dim] // degree), "Meta")


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' ``x`` joined along ``dim``, in rank order."""
    gathered: Tensor = ALL_GATHER(x, dim, group.size(), group.group_name)
    return gathered


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece along ``dim`` of the sum of the ranks' ``x``."""
    piece: Tensor = REDUCE_SCATTER(x, dim, group.size(), group.group_name)
    return piece


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
    """Replace each tensor by its sum over the group, in place, with one collective per dtype.

    The tensors are as large on every rank of the group; where there is nothing in them, nothing is sent.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
