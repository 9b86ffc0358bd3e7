from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.dryrun.memory import MemoryLog, Peak
from koushi.dryrun.world import patched


class Watched(TorchDispatchMode):
    def __init__(self, log: MemoryLog):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.log.saw(func, args, kwargs or {}, out, None)
        return out


def log() -> MemoryLog:
    """Logits are two tokens times 5 words."""
    return MemoryLog("meta", (5, 10))


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_the_peak_is_the_moment_when_most_is_held() -> None:
    memory = log()
    with memory.watching(), Watched(memory):
        first = floats(10)
        second = floats(20)
        del first
        third = floats(5)
        del second
    assert memory.peak().bytes == 4 * 30
    assert memory.held == 4 * 5
    assert memory.peak(first=3).bytes == 4 * 25
    assert third.numel() == 5


def test_views_and_what_is_done_in_place_take_nothing() -> None:
    memory = log()
    with Watched(memory):
        x = floats(4, 4)
        y = x.view(16)
        y.add_(1)
        z = x.t()[1:]
    assert memory.peak().bytes == 64 and z.shape == (3, 4)
    assert len(memory.blocks) == 1


def test_resizing_a_storage_is_seen() -> None:
    memory = log()
    with memory.watching(), Watched(memory):
        x = floats(10)
        x.untyped_storage().resize_(0)
        assert memory.held == 0
        x.untyped_storage().resize_(40)
    assert memory.held == 40 and memory.peak().bytes == 40


def test_tensors_on_other_devices_do_not_count() -> None:
    memory = log()
    with Watched(memory):
        x = torch.ones(10)
    assert memory.held == 0 and x.numel() == 10


def test_kinds_by_what_operators_do() -> None:
    memory = log()
    with Watched(memory):
        shard, whole = floats(4), floats(8)
        torch.ops.fsdp.all_gather_copy_in([shard], whole, [4], 4, 0)
        parts = [floats(4), floats(4)]
        torch.ops.fsdp.split_with_sizes_copy(whole, [4, 4], out=parts)
        gradient, buffer = floats(4, 2), floats(2, 4)
        torch.ops.fsdp.chunk_cat([gradient], 0, 2, out=buffer)
        fresh = floats(4, 2)
        gradient.add_(fresh)
        logits = floats(2, 5)
        activation = floats(10)
    memory.tell([shard], "parameters", "layers.0", again=True)
    memory.settle()
    peak = memory.peak()
    assert peak.kinds == {
        "parameters": 16, "communication buffers": 64, "unsharded parameters": 32, "unsharded gradients": 64,
        "logits": 40, "activations": 40,
    }  # fmt: skip
    assert peak.modules["layers.0"] == 16
    assert logits.numel() == activation.numel()


def test_what_has_the_shape_of_logits_inside_a_block_is_none() -> None:
    memory = log()
    memory.place = lambda: ("forward", "layers.0.feed_forward")
    with Watched(memory):
        x = floats(2, 5)
    assert memory.peak() == Peak(
        40, ("forward", "layers.0.feed_forward"), {"activations": 40}, {"layers.0.feed_forward": 40}
    )
    assert x.numel() == 10


def test_the_first_kind_told_holds() -> None:
    memory = log()
    with Watched(memory):
        x = floats(1)
    memory.tell([x], "optimizer")
    memory.tell([x], "gradients")
    assert memory.peak().kinds == {"optimizer": 4}
    memory.tell([x], "parameters", again=True)
    assert memory.peak().kinds == {"parameters": 4}


def test_what_was_there_before_counts() -> None:
    memory = log()
    x = floats(7)
    memory.hold([x], "parameters", "norm")
    assert memory.peak() == Peak(28, ("start", "norm"), {"parameters": 28}, {"norm": 28})


def test_every_stream_has_a_pool_that_is_as_large_as_it_ever_was() -> None:
    memory = log()
    with patched("cuda"), Watched(memory):
        other = torch.meta.Stream()
        first = floats(10)
        del first
        with torch.meta.stream(other):
            second = floats(8)
        third = floats(6)
        fourth = floats(3)
    assert memory.peak().bytes == 4 * 17
    assert memory.peak().pools == (4 * 10, 4 * 8)
    assert memory.peak(first=3).pools == (4 * 9, 4 * 8)
    assert second.numel() + third.numel() + fourth.numel() == 17


def backward(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> int:
    """Tensors of 16 bytes at the peak of backward through two functions of the same tensor, ``second`` before."""
    memory = log()
    x = floats(2, 2).requires_grad_()
    with Watched(memory):
        middle = x * 1
        loss = (first(middle) + second(middle)).sum()
        del middle
        start = len(memory.changes)
        held = memory.held
        loss.backward()
    return (memory.peak(start).bytes - held - 4) // 16


def test_a_sum_of_autograds_own_takes_no_memory_where_it_is_in_place() -> None:
    assert backward(lambda x: x * 2, lambda x: x * 3) == 2
    # A gradient that is a view holds what it is a view of, and the sum is a third.
    assert backward(lambda x: x * 2, lambda x: (x.view(4) * 3).view(2, 2)) == 3
    assert backward(lambda x: (x.view(4) * 2).view(2, 2), lambda x: x * 3) == 2
