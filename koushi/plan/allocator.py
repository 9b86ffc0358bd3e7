"""From the bytes of tensors to what the caching allocator reserves and the device reports. No torch.

torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) never gives back what it has reserved, and keeps a
pool for every stream: reserved memory is the sum of the pools' peaks, whenever each was, and what rounding to blocks
and segments leaves unused.
"""

from __future__ import annotations

from collections.abc import Iterable

from koushi.plan.operations import Device
from koushi.plan.spans import STREAMS, Span
from koushi.plan.workload import Workload

UNUSED = 0.03
"""Share of a pool that blocks and segments leave unused."""
CONTEXT = 600 << 20
"""Bytes of a CUDA context with its kernels: 0.5 to 0.9 GiB by driver and architecture."""
COMMUNICATOR = 300 << 20
"""Bytes of an NCCL communicator's channels, by default: some hundred MiB."""


def fragmentation_bytes(active: int, device: Device) -> int:
    """The least that is reserved besides ``active`` bytes."""
    return 0 if device == "cpu" else int(active * UNUSED)


def reserved_bytes(states: int, span: Span, streams: bool, device: Device) -> int:
    """What is reserved for ``states``, which stay, and a step's ``span``; ``streams``: whether pools of their own
    serve gradients' shards and gathers."""
    if device == "cpu":
        return states + span.highest
    pools = span.highest
    if streams:
        assert len(span.stream_highest) == len(STREAMS), "one peak for each stream"
        pools = max(pools, span.compute_highest + sum(span.stream_highest))
    return pooled_bytes((states + pools,))


def pooled_bytes(pools: Iterable[int]) -> int:
    """What a GPU reserves for pools that hold so many bytes of tensors at their fullest."""
    held = sum(pools)
    return held + fragmentation_bytes(held, "gpu")


def runtime_bytes(workload: Workload, device: Device) -> int:
    """What the device holds besides the allocator's memory."""
    if device == "cpu":
        return 0
    return CONTEXT + COMMUNICATOR * sum(1 for degree in workload.mesh.shape if degree > 1)
