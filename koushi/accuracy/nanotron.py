"""How far nanotron's host runs ahead of its devices, what memory that takes, which of its times say nothing. No torch.

Its tensor parallel gathers again in backward and keeps nothing that was gathered. But NCCL's operations run on a stream
of their own, and torch's allocator gives what they have used to nobody else before that stream is through with it
(``record_stream``; torch's pull request 76861, torchtitan's ``docs/composability.md``). Where the host launches faster
than the device works, whole sequences that have been added up pile up: two for every block launched ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from koushi.accuracy.rows import Row
from koushi.hardware.hardware import Hardware
from koushi.plan.memory import memory
from koushi.plan.work import block, key_of
from koushi.plan.workload import Workload

LAUNCHES_AHEAD = 1024
"""So many launches CUDA takes before the host has to wait (measured: stackoverflow.com/questions/53970187)."""
LAUNCHES_PER_BLOCK = 40
"""About, of a block's forward in nanotron's ``models/llama.py``: 32 kernels and collectives, and what orders them."""
STALLED: Mapping[int, float] = {2: 7.7e-3, 4: 12.5e-3, 8: 20.8e-3, 16: 46e-3, 32: 115e-3}
"""Seconds of the host per block and microbatch by tp where a pipeline crosses nodes, whatever the model.

docs/accuracy.md has them beside those of other runs."""

NEARLY_FULL = 0.9
TOLD_APART = 0.12
"""Share of its memory by which two ways must differ to be told apart by it."""


def launched_ahead(workload: Workload, hardware: Hardware) -> Workload:
    """``workload`` with the blocks that the host is ahead of the first stage's device at its fullest moment."""
    blocks = min(LAUNCHES_AHEAD // LAUNCHES_PER_BLOCK, _queued(workload, hardware))
    ahead = blocks if workload.mesh.degree("tp") > 1 else 0
    return replace(workload, system=replace(workload.system, blocks_ahead=ahead))


def _queued(workload: Workload, hardware: Hardware) -> int:
    """Forwards of blocks that there are to be ahead with.

    Without a pipeline, those of a microbatch and of the one before it, if there is one. In a pipeline, those of the
    microbatches in flight. Where its host is the slower, the device keeps step, but for the forwards that a stage
    launches while what it sends is waited for: of all in flight but the first, which is sent at once, and the second,
    which it works on meanwhile. That it is these two was read off the rows.
    """
    layers, pp = workload.stage_layers[0], workload.mesh.degree("pp")
    if pp == 1:
        return layers * min(2, workload.microbatches)
    in_flight = min(pp, workload.microbatches)
    return layers * (max(0, in_flight - 2) if _host_is_slower(workload, hardware) else in_flight)


def _host_is_slower(workload: Workload, hardware: Hardware) -> bool:
    if not _crosses(workload, hardware):
        return False
    one = block(hardware, key_of(replace(workload, system=replace(workload.system, host_operations=0.0))))
    return one.forward.seconds + one.backward.seconds < STALLED.get(workload.mesh.degree("tp"), 0.0)


def _crosses(workload: Workload, hardware: Hardware) -> bool:
    """Whether there is tp, and a pipeline between nodes."""
    mesh = workload.mesh
    return mesh.world_size > hardware.devices_per_node and mesh.degree("pp") > 1 and mesh.degree("tp") > 1


def untimely(row: Row, workload: Workload, hardware: Hardware) -> str | None:
    """Why the time of a run is none of hardware and layout.

    With tp and a pipeline that crosses nodes, each block and microbatch took as long as ``STALLED`` says, whatever the
    model's size from 1B to 80B, where runs within a node or without a pipeline took 4.4 ms (8 and 15 at tp 16 and 32):
    a defect. Runs without a pipeline whose memory shows that their host was never ahead took up to five times as long
    as their likes: the same. Runs that came within a tenth of the device's memory took 3 to 10 times as long: the
    allocator gave back and asked again in every step.
    """
    if _crosses(workload, hardware):
        return "time only: its pipeline between nodes stalls tensor parallel"
    if (row.memory_gib or 0.0) > NEARLY_FULL * hardware.chip.memory_gib:
        return "time only: nearly out of memory"
    if workload.mesh.degree("pp") == 1 and _never_ahead(row, workload, hardware):
        return "time only: by its memory of the version that stalls tensor parallel"
    return None


def _never_ahead(row: Row, workload: Workload, hardware: Hardware) -> bool:
    """Whether a run's memory is nearer to that of a host that never was ahead, or is all that the device had."""
    if workload.mesh.degree("tp") == 1 or row.memory_gib is None:
        return False
    ahead, beside = (
        memory(replace(workload, system=replace(workload.system, blocks_ahead=blocks)), 0, hardware)
        for blocks in (workload.system.blocks_ahead, 0)
    )
    if ahead.reserved - beside.reserved < TOLD_APART * ahead.reserved:
        return False
    full = ahead.device > hardware.chip.memory_bytes
    return full or row.memory_gib * 2**30 < (ahead.reserved + beside.reserved) / 2
