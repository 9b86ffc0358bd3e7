"""From the bytes of tensors to what the caching allocator reserves and the device reports. No torch."""

from __future__ import annotations

from koushi.plan.operations import Device
from koushi.plan.workload import Workload

CONTEXT = 600 << 20
COMMUNICATOR = 300 << 20


def fragmentation_bytes(active: int, device: Device) -> int:
    return 0 if device == "cpu" else active * 4 // 100


def runtime_bytes(workload: Workload, device: Device) -> int:
    if device == "cpu":
        return 0
    return CONTEXT + COMMUNICATOR * sum(1 for degree in workload.mesh.shape if degree > 1)
