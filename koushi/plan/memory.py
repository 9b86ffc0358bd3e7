"""Memory of a rank at the fullest moment of a step, by kind. No torch. (First version: to be made exact.)"""

from __future__ import annotations

from dataclasses import dataclass

from koushi.hardware.hardware import Hardware
from koushi.plan.units import held_stages, units_of
from koushi.plan.workload import Workload
from koushi.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at ``moment``, the fullest of a step."""

    parameters: int
    gradients: int
    optimizer: int
    unsharded_parameters: int
    unsharded_gradients: int
    activations: int
    logits: int
    pipeline_buffers: int
    communication_buffers: int
    moment: str
    """A phrase for people: where in the step."""
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
        return self.active + self.fragmentation

    @property
    def device(self) -> int:
        """What the device reports as taken."""
        return self.reserved + self.runtime


def memory(workload: Workload, pp: int, hardware: Hardware | None = None) -> Memory:
    """Of the rank at pipeline coordinate ``pp``, at index 0 of the other dims, which hold the largest shards."""
    model, tp, degrees = workload.model, workload.mesh.degree("tp"), workload.mesh.degree("pp")
    master, compute, reduce = (DTYPE_BYTES[name] for name in (workload.parameters, workload.compute, workload.reduce))
    tokens = workload.microbatch_size * workload.seq_len
    stream = tokens * model.dim * compute
    stages = held_stages(workload, pp)
    totals = [units_of(workload, stage).total for stage in stages]
    shard, whole = sum(one.shard for one in totals), sum(one.whole for one in totals)
    fsdp = workload.mesh.degree("dp_replicate", "dp_shard") > 1
    block = units_of(workload, 0).block.whole
    freed = workload.reshard_after_forward and degrees == 1
    wide = max(compute, 4)
    per_layer = {
        "none": (8 * stream + stream // tp * 6) + 4 * tokens * model.ffn_dim * compute // tp,
        "selective": 3 * stream // tp + 2 * stream // tp + 2 * tokens * model.ffn_dim * compute // tp,
        "full": stream // tp,
    }
    in_flight = max(1, min(workload.microbatches, degrees - pp)) if degrees > 1 else 1
    last = len(workload.stage_layers) - 1 in stages
    activations = per_layer[workload.recompute] * sum(workload.stage_layers[stage] for stage in stages) * in_flight
    activations += per_layer["none"] if workload.recompute != "none" else 0
    return Memory(
        parameters=shard * master,
        gradients=shard * master if degrees == 1 else 0,
        optimizer=2 * shard * master,
        unsharded_parameters=(2 * block if freed else whole) * compute if fsdp else 0,
        unsharded_gradients=(block * (compute + reduce) if degrees == 1 else whole * reduce) if fsdp else 0,
        activations=activations,
        logits=tokens * model.vocab_size // tp * (compute + 2 * wide) if last else 0,
        pipeline_buffers=2 * workload.microbatches * stream // tp * len(stages) if degrees > 1 else 0,
        communication_buffers=0,
        moment="in the first backward",
    )


def every_rank(workload: Workload, hardware: Hardware | None = None) -> tuple[Memory, ...]:
    """Of every pipeline coordinate, at index 0 of the other dims."""
    return tuple(memory(workload, pp, hardware) for pp in range(workload.mesh.degree("pp")))
