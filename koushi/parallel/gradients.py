"""What is left to do with gradients after backward: finish partial sums, then one norm for every layout.

Groups are this rank's process groups by mesh dim, only of dims with a degree above 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from koushi.parallel.collectives import sum_over
from koushi.parallel.shards import LocalParameter

Groups = Mapping[str, dist.ProcessGroup]


def finish(parameters: list[LocalParameter], groups: Groups, tied_ends: tuple[int, int] | None) -> None:
    """Add up, in place, what backward left in several places.

    Over tp: gradients of parameters copied there, of which each rank saw its part of the sequence or of
    the heads. Over pp: the two gradients of a tied embedding, held at the pipeline coordinates ``tied_ends``.
    """
    if "tp" in groups:
        sum_over([parameter.gradient for parameter in parameters if parameter.copied_over_tp], groups["tp"])
    if tied_ends is not None:
        _add_tied(parameters, groups["pp"], tied_ends)


def _add_tied(parameters: list[LocalParameter], group: dist.ProcessGroup, ends: tuple[int, int]) -> None:
    if group.rank() not in ends:
        return
    tied = {"tok_embeddings.weight", "output.weight"}
    held = [parameter.gradient for parameter in parameters if parameter.name in tied]
    if ends[0] == ends[1]:
        held[0].add_(held[1])
        held[1].copy_(held[0])
        return
    peer = dist.get_global_rank(group, ends[1] if group.rank() == ends[0] else ends[0])
    mine = held[0].contiguous()
    theirs = torch.empty_like(mine)
    exchange = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    held[0].add_(theirs)


def squared_norm(parameters: list[LocalParameter]) -> Tensor:
    """This rank's share of the squared gradient norm, a scalar; shares add up over dp_shard, tp and pp."""
    counted = [parameter.gradient for parameter in parameters if parameter.counted]
    if not counted:
        return torch.zeros((), dtype=parameters[0].value.dtype, device=parameters[0].value.device)
    return torch.nn.utils.get_total_norm(counted) ** 2


def sum_scalars(loss: Tensor, squared: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The loss over all data and the squared norm over all shards, the same on every rank.

    The loss is the same over tp already, and the shards over dp_replicate, so each leaves out one dim.
    """
    both = torch.stack((loss.to(squared.dtype), squared))
    for name, values in (("dp_replicate", both[:1]), ("dp_shard", both), ("tp", both[1:]), ("pp", both)):
        if name in groups:
            dist.all_reduce(values, group=groups[name])
    return both[0], both[1]


def clip(parameters: list[LocalParameter], norm: Tensor, highest: float) -> None:
    """Scale every gradient by ``highest / norm`` where that is below 1, in place."""
    gradients = [parameter.gradient for parameter in parameters]
    torch._foreach_mul_(gradients, (highest / (norm + 1e-6)).clamp(max=1.0))
