"""Measures matmuls, copies, attention and collectives on the machine at hand.

Every time is the median of several runs on a GPU, whose power limit is part of what is measured, and the
shortest on a CPU, which others may be using too; one run before is not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from koushi.hardware.calibrated import Attention, Call, Matmul, Measurements
from koushi.traffic import Operation

# Private: the functional collectives, as koushi.parallel.collectives has them.
_functional = torch.ops._c10d_functional

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """What is measured; a CPU core does less than a GPU in the same time."""

    matmuls: tuple[tuple[int, int, int], ...]
    """m, n, k"""
    copy_bytes: int
    attention: tuple[tuple[int, int, int], ...]
    """heads, length, head_dim"""
    messages: tuple[int, ...]
    """Bytes."""
    repeats: int


ON_CPU = Sizes(
    matmuls=((256, 512, 512), (512, 1024, 512), (512, 2048, 512), (1024, 1024, 1024)),
    copy_bytes=1 << 26,
    attention=((4, 256, 64), (4, 512, 64)),
    messages=(1 << 12, 1 << 16, 1 << 20, 1 << 23),
    repeats=5,
)
ON_GPU = Sizes(
    matmuls=(
        (2048, 2048, 4096),
        (4096, 1024, 8192),
        (4096, 4096, 4096),
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (16384, 8192, 8192),
    ),
    copy_bytes=1 << 31,
    attention=((32, 2048, 128), (32, 8192, 128)),
    messages=(1 << 12, 1 << 20, 1 << 24, 1 << 27, 1 << 29),
    repeats=10,
)


def measure(device: torch.device, sizes: Sizes) -> Measurements:
    """Everything, of this rank's device; collectives among all ranks of the world, if there are several."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    kernel, launch = _smallest_operation(device, sizes.repeats)
    return Measurements(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        kind="gpu" if device.type == "cuda" else "cpu",
        devices=max(world, torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1),
        memory_bytes=_memory(device, world),
        matmuls=tuple(_matmuls(device, sizes)),
        copy_bytes_per_second=_copy(device, sizes),
        attention=tuple(_attention(device, sizes, shape) for shape in sizes.attention),
        kernel_seconds=kernel,
        launch_seconds=launch,
        calls=tuple(_calls(device, sizes, world)) if world > 1 else (),
    )


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of ``run``, done on the device when they end."""
    run()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times) if device.type == "cuda" else min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, world: int) -> int:
    """Of the device; of this machine's, an even share for every rank."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world


def _matmuls(device: torch.device, sizes: Sizes) -> Iterator[Matmul]:
    for name, dtype in DTYPES.items():
        for m, n, k in sizes.matmuls:
            left = torch.randn(m, k, device=device, dtype=dtype)
            right = torch.randn(n, k, device=device, dtype=dtype)
            yield Matmul(m, n, k, name, seconds_of(partial(F.linear, left, right), device, sizes.repeats))


def _copy(device: torch.device, sizes: Sizes) -> float:
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / seconds_of(lambda: target.copy_(source), device, sizes.repeats)


def _smallest_operation(device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds on the device and on the host, many in a row so that clocks do not count."""
    many = 1000
    one = torch.ones(8, device=device)

    def issue() -> None:
        for _ in range(many):
            one.add_(1)

    whole = seconds_of(issue, device, repeats) / many
    if device.type == "cpu":
        return whole, whole
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    return seconds_of(graph.replay, device, repeats) / many, whole


def _attention(device: torch.device, sizes: Sizes, shape: tuple[int, int, int]) -> Attention:
    heads, length, head_dim = shape
    size = (1, heads, length, head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(size, device=device, dtype=torch.bfloat16)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    with torch.no_grad():
        forward = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, sizes.repeats)
    whole = seconds_of(both, device, sizes.repeats)
    return Attention(heads, length, head_dim, "bfloat16", forward, max(whole - forward, 1e-9))


def _calls(device: torch.device, sizes: Sizes, world: int) -> Iterator[Call]:
    group = dist.group.WORLD
    assert group is not None, "the world has been joined"
    name = group.group_name
    for size in sizes.messages:
        whole = torch.ones(size // 4 // world * world, device=device)
        piece = torch.ones(whole.numel() // world, device=device)
        runs: dict[Operation, Callable[[], object]] = {
            "all_gather": partial(_functional.all_gather_into_tensor, piece, world, name),
            "reduce_scatter": partial(_functional.reduce_scatter_tensor, whole, "sum", world, name),
            "all_reduce": partial(_functional.all_reduce, whole, "sum", name),
        }
        for operation, run in runs.items():
            dist.barrier()
            seconds = seconds_of(partial(_finished, run), device, sizes.repeats)
            yield Call(operation, whole.numel() * 4, world, seconds)


def _finished(run: Callable[[], object]) -> None:
    _functional.wait_tensor(run())
