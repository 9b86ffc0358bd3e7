"""From the bytes of tensors to what the caching allocator reserves and the device reports. No torch.

torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) never gives back what it has reserved, and keeps a
pool for every stream: reserved memory is the sum of the pools' peaks, whenever each was, and what rounding to blocks
and segments leaves unused.
"""

from __future__ import annotations

from collections.abc import Iterable

from koushi.hardware.hardware import Device
from koushi.plan.spans import STREAMS, Span
from koushi.plan.workload import Workload

UNUSED = 0.08
"""Share of a pool that blocks and segments leave unused: what one size has freed serves another badly, since free
blocks of different segments never join. As published runs show it."""
UNUSED_EXPANDABLE = 0.05
"""The same where segments grow, so that all that is free lies side by side."""
CONTEXT = 600 << 20
"""Bytes of a CUDA context with its kernels: 0.5 to 0.9 GiB by driver and architecture."""
COMMUNICATOR = 300 << 20
"""Bytes of an NCCL communicator's channels, by default: some hundred MiB."""


def fragmentation_bytes(active: int, device: Device, expandable: bool = False) -> int:
    """The least that is reserved besides ``active`` bytes; ``expandable``: with segments that grow."""
    return 0 if device == "cpu" else int(active * (UNUSED_EXPANDABLE if expandable else UNUSED))


def other_peaks_bytes(span: Span, streams: bool, device: Device) -> int:
    """What a step's pools hold together at their fullest, beyond its fullest moment; ``streams``: whether pools of
    their own serve gradients' shards and gathers."""
    if device == "cpu" or not streams:
        return 0
    assert len(span.stream_highest) == len(STREAMS), "one peak for each stream"
    return max(0, span.compute_highest + sum(span.stream_highest) - span.highest)


def pooled_bytes(pools: Iterable[int], expandable: bool = False) -> int:
    """What a GPU reserves for pools that hold so many bytes of tensors at their fullest."""
    held = sum(pools)
    return held + fragmentation_bytes(held, "gpu", expandable)


def runtime_bytes(workload: Workload, device: Device) -> int:
    """What the device holds besides the allocator's memory."""
    if device == "cpu":
        return 0
    return CONTEXT + COMMUNICATOR * sum(1 for degree in workload.mesh.shape if degree > 1)
