"""Data parallel on torch's ``fully_shard``: sharded, hybrid and replicated, by the mesh it is given.

``mesh["dp_shard"]`` is fully sharded data parallel: parameters are gathered per block, gradients
reduce-scattered. ``mesh["dp_replicate", "dp_shard"]`` is hybrid: the shards' gradients are then
all-reduced over the replicas. With dp_shard of degree 1 that is replicated data parallel: torch
skips collectives of a group of one, so all that is left is an all-reduce per block.

Gradients are summed, never averaged: the loss is already divided by the global token count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class DataParallel:
    compute: torch.dtype
    """Parameters are gathered in this dtype."""
    reduce: torch.dtype
    """Gradients are reduced in this dtype."""
    reshard_after_forward: bool


def apply(module: nn.Module, submesh: DeviceMesh, options: DataParallel, units: list[nn.Module]) -> nn.Module:
    """Shard ``module`` over ``submesh``; each of ``units`` is gathered on its own, the rest together.

    The last gathered group of forward is the first of backward, so what is not in a unit stays gathered.
    """
    policy = MixedPrecisionPolicy(param_dtype=options.compute, reduce_dtype=options.reduce, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=submesh, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    fully_shard(module, mesh=submesh, mp_policy=policy, reshard_after_forward=False)
    for sharded in module.modules():
        if isinstance(sharded, FSDPModule):
            sharded.set_gradient_divide_factor(1.0)
            # One convention for NCCL and gloo, which has no pre-multiplied sum.
            sharded.set_force_sum_reduction_for_comms(True)
    return module


def reduce_replicas_now(module: nn.Module, now: bool) -> None:
    """Whether the coming backward adds gradients over the replicas, or keeps this rank's sum for a later one."""
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(now)
