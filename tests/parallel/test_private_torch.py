"""What Koushi uses of torch that torch does not promise, or promises only in words.

When one of these fails after an upgrade, the message says which file relies on it.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import Check
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.parallel import recompute
from koushi.parallel.collectives import REDUCE_SCATTER


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def functional_all_gather_joins_flat_tensors_in_rank_order() -> None:
    x = torch.arange(3.0) + 10 * dist.get_rank()
    functional = torch.ops._c10d_functional
    out = functional.wait_tensor(functional.all_gather_into_tensor(x, 2, world().group_name))
    assert out.tolist() == [0, 1, 2, 10, 11, 12], "parallel/collectives.py: all_gather_into_tensor has changed"


def functional_reduce_scatter_gives_each_rank_its_part_of_the_sum() -> None:
    rank = dist.get_rank()
    x = torch.arange(4.0) + 10 * rank
    functional = torch.ops._c10d_functional
    out = functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 2, world().group_name))
    expected = [[10, 12], [14, 16]][rank]
    assert out.tolist() == expected, "parallel/collectives.py: reduce_scatter_tensor has changed"


def functional_all_to_all_sends_rows_to_their_ranks() -> None:
    rank = dist.get_rank()
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    functional = torch.ops._c10d_functional
    out = functional.wait_tensor(functional.all_to_all_single(x, [1, 1], [1, 1], world().group_name))
    expected = torch.stack([torch.arange(3.0) + 3 * rank + 10 * sender for sender in range(2)])
    assert torch.equal(out, expected), "parallel/collectives.py: all_to_all_single has changed"


def functional_collectives_leave_their_input_alone() -> None:
    x = torch.arange(4.0)
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 2, world().group_name))
    functional.wait_tensor(functional.all_gather_into_tensor(x, 2, world().group_name))
    functional.wait_tensor(functional.all_to_all_single(x, [2, 2], [2, 2], world().group_name))
    assert x.tolist() == [0, 1, 2, 3], "parallel/collectives.py: a functional collective wrote into its input"


def from_local_keeps_the_memory_and_communicates_nothing() -> None:
    """run_check=False and a given shape: on rank 0 alone it would wait for ever if it communicated."""
    pair = mesh()
    piece = torch.ones(2 + dist.get_rank(), 3)
    wrapped = DTensor.from_local(piece, pair, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1))
    assert wrapped.shape == (5, 3), "parallel/tensor.py: from_local no longer takes the global shape"
    assert wrapped.to_local().data_ptr() == piece.data_ptr(), "parallel/tensor.py: from_local copies"


def to_local_without_gradients_shares_memory() -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh(), [Shard(0)], run_check=False))
    with torch.no_grad():
        parameter.to_local().fill_(7)
    assert (parameter.to_local() == 7).all(), "parallel/shards.py: to_local copies, so updates would be lost"


def the_gradient_of_to_local_has_the_placement_of_the_parameter() -> None:
    """Also of a copied one: its gradient stays this rank's own, which finish() adds up."""
    pair, rank = mesh(), dist.get_rank()
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        parameter = nn.Parameter(DTensor.from_local(torch.ones(2, 2), pair, [placement], run_check=False))
        (parameter.to_local() * (rank + 1)).sum().backward()
        gradient = parameter.grad
        found.append((gradient.placements, gradient.shape == parameter.shape, gradient.to_local().tolist()))
    for placement, one in zip((Shard(0), Shard(1), Replicate()), found, strict=True):
        expected = ((placement,), True, [[rank + 1.0] * 2] * 2)
        assert one == expected, "parallel/tensor.py: the gradient of to_local() no longer lies as the parameter does"


def fully_shard_cuts_what_tensor_parallel_has_cut() -> None:
    """A parameter that is a DTensor on one mesh dim becomes one on two, whose local part is cut again."""
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "tp"))
    linear = nn.Linear(3, 4, bias=False)
    wrapped = DTensor.from_local(torch.arange(12.0).view(4, 3), both["tp"], [Shard(0)], run_check=False)
    linear.register_parameter("weight", nn.Parameter(wrapped))
    fully_shard(linear, mesh=both["dp_shard"])
    rows = slice(0, 2) if dist.get_rank() == 0 else slice(2, 4)
    expected = torch.arange(12.0).view(4, 3)[rows]
    assert torch.equal(linear.weight.to_local(), expected), "parallel/shards.py: FSDP2 cuts a DTensor otherwise"


def fully_shard_can_be_made_to_sum() -> None:
    """gloo has no pre-multiplied sum, which a divide factor of 1 alone would need in float32."""
    linear = nn.Linear(2, 2, bias=False)
    fully_shard(linear, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(linear, FSDPModule)
    linear.set_gradient_divide_factor(1.0)
    linear.set_force_sum_reduction_for_comms(True)
    linear(torch.ones(1, 2)).sum().backward()
    total = linear.weight.grad.to_local()
    assert (total == 2).all(), f"parallel/data.py: FSDP2's gradients are no longer the sum over ranks: {total}"


CHECKS: tuple[Check, ...] = (
    functional_all_gather_joins_flat_tensors_in_rank_order,
    functional_reduce_scatter_gives_each_rank_its_part_of_the_sum,
    functional_all_to_all_sends_rows_to_their_ranks,
    functional_collectives_leave_their_input_alone,
    from_local_keeps_the_memory_and_communicates_nothing,
    to_local_without_gradients_shares_memory,
    the_gradient_of_to_local_has_the_placement_of_the_parameter,
    fully_shard_cuts_what_tensor_parallel_has_cut,
    fully_shard_can_be_made_to_sum,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_attention_on_this_machine_is_an_operation_that_selective_recompute_keeps() -> None:
    q, k = torch.randn(1, 4, 8, 16, requires_grad=True), torch.randn(1, 2, 8, 16, requires_grad=True)
    for arguments in ((q, q, q, False), (q, k, k, True)):
        *tensors, grouped = arguments
        with Names() as names:
            F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=grouped)
        attentions = [one for one in names.seen if "attention" in str(one)]
        assert len(attentions) == 1, f"attention is now made of {names.seen}"
        assert attentions[0] in recompute.KEPT, f"parallel/recompute.py: KEPT lacks {attentions[0]}"


def test_a_projection_is_a_matmul_that_selective_recompute_keeps() -> None:
    with Names() as names:
        F.linear(torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True))
    assert recompute.KEPT & set(names.seen), f"parallel/recompute.py: KEPT has none of {names.seen}"


def test_what_selective_recompute_keeps_is_there() -> None:
    """An unknown name would have failed at import; these are the operations, not something of the same name."""
    assert REDUCE_SCATTER in recompute.KEPT
    assert all(isinstance(one, torch._ops.OpOverload) for one in recompute.KEPT)
    for kind in ("flash", "efficient", "cudnn"):
        assert any(kind in str(one) for one in recompute.KEPT)


def test_foreach_mul_scales_in_place_by_a_tensor() -> None:
    tensors = [torch.ones(2), torch.ones(3, 1)]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert all((one == 0.5).all() for one in tensors), "parallel/gradients.py: _foreach_mul_ no longer takes a tensor"


def test_the_functional_adamw_takes_what_is_given_to_it() -> None:
    expected = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "fused"}
    expected |= {"amsgrad", "beta1", "beta2", "lr", "weight_decay", "eps", "maximize"}
    found = set(inspect.signature(adamw).parameters)
    assert expected <= found, f"optim/adamw.py: torch's adamw no longer takes {expected - found}"
    counts = [torch.tensor(4.0)]
    adamw(
        [torch.ones(2)],
        [torch.ones(2)],
        [torch.zeros(2)],
        [torch.zeros(2)],
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.9,
        lr=0.1,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
    assert counts[0].item() == 5, "optim/adamw.py: the kernel no longer counts the step itself"
