"""Collectives and their gradients on two ranks, against one process that holds what both hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import Check, on_two_ranks
from torch import Tensor

from koushi.parallel import collectives
from koushi.parallel.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    all_gather,
    gather,
    reduce_scatter,
    scatter_sum,
    sum_over,
)

SHAPE = (2, 4, 6)
DTYPES = (torch.float32, torch.float64)


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What rank 0 and rank 1 hold; every rank can draw both."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gather_joins_and_sums_gradients() -> None:
    rank, found, expected = dist.get_rank(), [], []
    for dtype in DTYPES:
        for dim in range(3):
            held = drawn(dim, SHAPE, dtype)
            whole = list(SHAPE)
            whole[dim] *= 2
            weights = drawn(9, tuple(whole), dtype)
            x = held[rank].clone().requires_grad_()
            gathered = gather(x, dim, world())
            (gathered * weights[rank]).sum().backward()
            found += [gathered.detach(), x.grad]
            expected += [torch.cat(held, dim), (weights[0] + weights[1]).chunk(2, dim)[rank]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def scatter_sum_adds_and_gathers_gradients() -> None:
    rank, found, expected = dist.get_rank(), [], []
    for dtype in DTYPES:
        for dim in range(3):
            held = drawn(dim, SHAPE, dtype)
            part = list(SHAPE)
            part[dim] //= 2
            weights = drawn(9, tuple(part), dtype)
            x = held[rank].clone().requires_grad_()
            piece = scatter_sum(x, dim, world())
            (piece * weights[rank]).sum().backward()
            found += [piece.detach(), x.grad]
            expected += [(held[0] + held[1]).chunk(2, dim)[rank], torch.cat(weights, dim)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def memory_order_does_not_matter() -> None:
    """Raw collectives read memory as it lies; these read tensors."""
    rank = dist.get_rank()
    held = drawn(0, (6, 4, 2))
    turned = [one.permute(2, 1, 0) for one in held]
    assert not turned[0].is_contiguous()
    gathered = [all_gather(turned[rank], dim, world()) for dim in range(3)]
    pieces = [reduce_scatter(turned[rank], dim, world()) for dim in range(3)]
    every_other = all_gather(held[rank][::2], 0, world())
    x = held[rank].clone().requires_grad_()
    gather(x, 1, world()).permute(2, 0, 1)[1].sum().backward()
    for dim in range(3):
        assert torch.equal(gathered[dim], torch.cat(turned, dim))
        torch.testing.assert_close(pieces[dim], (turned[0] + turned[1]).chunk(2, dim)[rank])
    assert torch.equal(every_other, torch.cat([one[::2] for one in held]))
    expected = torch.zeros(6, 4, 2, dtype=torch.float64)
    expected[:, :, 1] = 2
    assert torch.equal(x.grad, expected)


def what_nccl_carries_out_is_what_gloo_does() -> None:
    """The two ways of moving the same numbers, both over gloo."""
    x, name = drawn(0, SHAPE)[dist.get_rank()], world().group_name
    found = [
        (carry(x, dim, 2, name), other(x, dim, 2, name))
        for dim in range(3)
        for carry, other in (
            (collectives._all_gather_cpu, collectives._all_gather_cuda),
            (collectives._reduce_scatter_cpu, collectives._reduce_scatter_cuda),
        )
    ]
    for one, other in found:
        torch.testing.assert_close(one, other)


def each_undoes_the_other() -> None:
    """A piece gathered and scattered comes back as often as there are ranks."""
    x = drawn(0, SHAPE)[dist.get_rank()]
    back = scatter_sum(gather(x, 1, world()), 1, world())
    torch.testing.assert_close(back, 2 * x)


def bfloat16_passes_through() -> None:
    held = [one.bfloat16() for one in drawn(0, SHAPE)]
    x = held[dist.get_rank()].clone().requires_grad_()
    gathered = gather(x, 1, world())
    piece = scatter_sum(gathered, 1, world())
    piece.sum().backward()
    assert torch.equal(gathered, torch.cat(held, 1))
    assert piece.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.full_like(x, 2))


def second_use_of_the_same_input() -> None:
    """A gradient that arrives twice is added up."""
    x = drawn(0, SHAPE)[dist.get_rank()].clone().requires_grad_()
    gathered = gather(x, 0, world())
    (gathered.sum() + 3 * gathered.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 8))


def sums_of_mixed_dtypes_in_place() -> None:
    rank = dist.get_rank()
    pair = drawn(0, (3, 4))
    tensors = [
        torch.full((2, 2), 1.0 + rank),
        pair[rank].clone(),
        torch.full((), 10 * rank, dtype=torch.int64),
        torch.zeros(4, 4)[:, 1],
        torch.full((3,), 2.0 - rank),
        torch.empty(0),
    ]
    tensors[3].fill_(rank + 5)
    before = [one.data_ptr() for one in tensors]
    sum_over(tensors, world())
    assert [one.data_ptr() for one in tensors] == before
    assert torch.equal(tensors[0], torch.full((2, 2), 3.0))
    torch.testing.assert_close(tensors[1], pair[0] + pair[1])
    assert tensors[2].item() == 10
    assert torch.equal(tensors[3], torch.full((4,), 11.0))
    assert torch.equal(tensors[4], torch.full((3,), 3.0))


def sum_over_nothing_is_nothing() -> None:
    sum_over([], world())


CHECKS: tuple[Check, ...] = (
    gather_joins_and_sums_gradients,
    scatter_sum_adds_and_gathers_gradients,
    memory_order_does_not_matter,
    what_nccl_carries_out_is_what_gloo_does,
    each_undoes_the_other,
    bfloat16_passes_through,
    second_use_of_the_same_input,
    sums_of_mixed_dtypes_in_place,
    sum_over_nothing_is_nothing,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])


def test_shapes_are_known_without_numbers() -> None:
    x = torch.empty(2, 6, 4, device="meta", dtype=torch.bfloat16)
    for dim in range(3):
        longer, shorter = ALL_GATHER(x, dim, 2, "any"), REDUCE_SCATTER(x, dim, 2, "any")
        assert [longer.shape[dim], shorter.shape[dim]] == [x.shape[dim] * 2, x.shape[dim] // 2]
        assert longer.numel() == 4 * shorter.numel() == 2 * x.numel()
        assert {one.dtype for one in (longer, shorter)} == {torch.bfloat16}
        assert {one.device.type for one in (longer, shorter)} == {"meta"}


def test_a_failing_check_is_told(tmp_path: Path) -> None:
    def fails_on_rank_1() -> None:
        assert dist.get_rank() == 0, "as it should be"

    (text,) = on_two_ranks((fails_on_rank_1, each_undoes_the_other), tmp_path)["fails_on_rank_1"]
    assert "as it should be" in text
