"""Memory of a rank at the fullest moment of a step, by kind. No torch.

Model states are counted as ZeRO does (arXiv 1910.02054, section 3.1) from what a rank's shards hold; what comes
and goes is followed operation by operation (``operations``, ``ends``, ``lifetimes``), unit by unit (``sharded``) and,
under pipelining, action by action (``pipelined``). The figures are of steps after the first, when the optimizer
has its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from koushi.hardware.hardware import Device, Hardware
from koushi.plan.allocator import fragmentation_bytes, other_peaks_bytes, runtime_bytes
from koushi.plan.ends import TOKEN
from koushi.plan.fullest import Alike, alike_stages, pipelined_span
from koushi.plan.operations import stream_sizes
from koushi.plan.sharded import step_span
from koushi.plan.spans import ACTIVATIONS, GRADIENTS, KINDS, NOTHING, OPTIMIZER, PARAMETERS
from koushi.plan.stages import Stage
from koushi.plan.workload import Workload
from koushi.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at ``moment``, the fullest of a step."""

    parameters: int
    """Masters, as this rank's shard."""
    gradients: int
    """Of this rank's shard."""
    optimizer: int
    unsharded_parameters: int
    unsharded_gradients: int
    activations: int
    logits: int
    """With what the loss makes of them."""
    pipeline_buffers: int
    communication_buffers: int
    """Gathered parameters before they are copied out, gradients before they are scattered."""
    moment: str
    """A phrase for people: where in the step."""
    pools: int = 0
    """What gradients' shards and gathers take at other moments: their streams' pools serve nothing else."""
    fragmentation: int = 0
    """What the caching allocator holds besides."""
    runtime: int = 0
    """The device's own: the CUDA context and the communicators' buffers."""

    @property
    def active(self) -> int:
        """Bytes of tensors."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.unsharded_parameters
            + self.unsharded_gradients
            + self.activations
            + self.logits
            + self.pipeline_buffers
            + self.communication_buffers
        )

    @property
    def reserved(self) -> int:
        """What the caching allocator holds."""
        return self.active + self.pools + self.fragmentation

    @property
    def device(self) -> int:
        """What the device reports as taken."""
        return self.reserved + self.runtime


def memory(workload: Workload, pp: int, hardware: Hardware | None = None) -> Memory:
    """Of the rank at pipeline coordinate ``pp``, at index 0 of the other dims, which hold the largest shards.

    Without ``hardware`` a GPU's kernels are assumed.
    """
    return _memory(workload, pp, hardware)


def every_rank(workload: Workload, hardware: Hardware | None = None) -> tuple[Memory, ...]:
    """Of every pipeline coordinate, at index 0 of the other dims."""
    return tuple(memory(workload, pp, hardware) for pp in range(workload.mesh.degree("pp")))


@lru_cache(maxsize=65536)
def _memory(workload: Workload, pp: int, hardware: Hardware | None) -> Memory:
    device: Device = "gpu" if hardware is None else hardware.device
    stages = alike_stages(workload, pp, device)
    mesh = workload.mesh
    if mesh.degree("pp") > 1:
        span = pipelined_span(workload, pp, stages)
    else:
        span = step_span(stages[0].stage, mesh.degree("dp_shard"), mesh.degree("dp_replicate"), workload.microbatches)
    constant = list(NOTHING)
    for one in stages:
        for kind, size in states(workload, one.stage):
            constant[kind] += one.count * size
        constant[ACTIVATIONS] += one.count * _rotary(workload)
    constant[ACTIVATIONS] += _batch(workload)
    total = sum(constant)
    streams, expandable = stages[0].stage.fsdp and workload.system.own_streams, workload.system.expandable_segments
    others = other_peaks_bytes(span, streams, device)
    unused = fragmentation_bytes(total + span.highest + others, device, expandable)
    peak = [there + more for there, more in zip(constant, span.peak, strict=True)]
    by_kind = dict(zip(KINDS, peak, strict=True))
    buffers = by_kind.pop("gathered") + by_kind.pop("scattered")
    return Memory(
        **by_kind,
        communication_buffers=buffers,
        moment=span.moment,
        pools=others,
        fragmentation=unused + (_besides(workload, stages) if device == "gpu" else 0),
        runtime=runtime_bytes(workload, device),
    )


def states(workload: Workload, stage: Stage) -> list[tuple[int, int]]:
    """Bytes by kind of masters and optimizer state, and of gradients that stay from step to step.

    In Koushi gradients do not; where others have buffers for them, they do.
    """
    mesh, system = workload.mesh, workload.system
    if stage.shape.holder != "buffers":
        total = stage.units(mesh.degree("dp_shard") if stage.fsdp else 1).total
        shard = total.padded // (mesh.degree("dp_shard") if stage.fsdp else 1)
        return [(PARAMETERS, shard * stage.master), (OPTIMIZER, 2 * total.shard * stage.master)]
    owners = mesh.degree(*workload.owners, "cp") if workload.owners else 1
    copies = 3 if system.separate_masters else 2
    return [
        (PARAMETERS, stage.whole * (stage.compute if system.separate_masters else stage.master)),
        (GRADIENTS, int(stage.whole * (stage.reduce + system.copies))),
        (OPTIMIZER, copies * -(-stage.whole * stage.master // owners)),
    ]


def _besides(workload: Workload, stages: Sequence[Alike]) -> int:
    """Bytes of other systems' flat buffers, of what their collectives aren't through with, and of all they hold
    throughout."""
    mesh, system = workload.mesh, workload.system
    owners = mesh.degree(*workload.owners, "cp") if workload.owners else 1
    updated = sum(one.count * one.stage.whole for one in stages) / owners
    waited_for = 2 * system.blocks_ahead * stream_sizes(stages[0].stage.shape.block).region
    return int(updated * system.flat_update) + system.other_bytes + waited_for


def _batch(workload: Workload) -> int:
    """Token ids and labels of a rank's local batch."""
    return 2 * TOKEN * workload.microbatches * workload.microbatch_size * workload.seq_len


def _rotary(workload: Workload) -> int:
    model, width = workload.model, DTYPE_BYTES[workload.compute]
    return 0 if model.learned_positions else workload.seq_len * model.head_dim * width
