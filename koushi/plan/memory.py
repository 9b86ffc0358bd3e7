"""Memory of a rank at the fullest moment of a step, by kind. No torch.

Model states are counted as ZeRO does (arXiv 1910.02054, section 3.1) from what a rank's shards hold; what comes
and goes is followed operation by operation (``operations``, ``ends``, ``lifetimes``), unit by unit (``stages``) and,
under pipelining, action by action (``pipelined``). The figures are of steps after the first, when the optimizer
has its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from koushi.hardware.hardware import Hardware
from koushi.plan.allocator import fragmentation_bytes, runtime_bytes
from koushi.plan.ends import TOKEN
from koushi.plan.operations import Device
from koushi.plan.pipelined import BEFORE, REDUCED, WHOLE, PipelinedStage, Situation, situations
from koushi.plan.spans import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    PIPELINE_BUFFERS,
    UNSHARDED_PARAMETERS,
    Account,
    Bytes,
    Span,
)
from koushi.plan.stages import Stage, microbatch_span
from koushi.plan.units import held_stages
from koushi.plan.unshard import MOST_UNSHARDED
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
    """Of the rank at pipeline coordinate ``pp``, at index 0 of the other dims, which hold the largest shards.

    Without ``hardware`` a GPU's kernels are assumed.
    """
    return _memory(workload, pp, hardware)


def every_rank(workload: Workload, hardware: Hardware | None = None) -> tuple[Memory, ...]:
    """Of every pipeline coordinate, at index 0 of the other dims."""
    return tuple(memory(workload, pp, hardware) for pp in range(workload.mesh.degree("pp")))


@lru_cache(maxsize=65536)
def _memory(workload: Workload, pp: int, hardware: Hardware | None) -> Memory:
    device: Device = "cpu" if hardware is not None and hardware.name == "cpu" else "gpu"
    account = Account()
    stages = tuple(PipelinedStage(workload, stage, device) for stage in held_stages(workload, pp))
    for stage in stages:
        account.go(_states(stage))
    account.hold(ACTIVATIONS, _batch(workload) + sum(_rotary(stage) for stage in stages))
    span = _through(stages, workload, pp) if workload.mesh.degree("pp") > 1 else _step(stages[0], workload)
    account.go(span)
    whole = account.close()
    return Memory(
        **dict(zip(KINDS, whole.peak, strict=True)),
        moment=span.moment,
        fragmentation=fragmentation_bytes(whole.highest, device),
        runtime=runtime_bytes(workload, device),
    )


@lru_cache(maxsize=4096)
def _states(stage: Stage) -> Span:
    """Masters and optimizer state; and what stays of gradients from step to step, which in Koushi is nothing."""
    workload, (master, compute, reduce) = stage.workload, stage.widths
    total = stage.units.total
    account = Account()
    system = workload.system
    if system.sharding == "fsdp" and not system.separate_masters:
        account.hold(PARAMETERS, total.padded // workload.mesh.degree("dp_shard") * master)
        account.hold(OPTIMIZER, 2 * total.shard * master)
        return account.close()
    owners = workload.mesh.degree("dp_replicate", "dp_shard") if system.sharding == "optimizer" else 1
    account.hold(PARAMETERS, total.whole * (compute if system.separate_masters else master))
    account.hold(GRADIENTS, total.whole * reduce)
    copies = 3 if system.separate_masters else 2
    account.hold(OPTIMIZER, copies * -(-total.whole * master // owners))
    return account.close()


def _batch(workload: Workload) -> int:
    """Token ids and labels of a rank's local batch."""
    return 2 * TOKEN * workload.microbatches * workload.microbatch_size * workload.seq_len


def _rotary(stage: Stage) -> int:
    model, width = stage.workload.model, DTYPE_BYTES[stage.workload.compute]
    return 0 if model.learned_positions else stage.workload.seq_len * model.head_dim * width


def _step(stage: Stage, workload: Workload) -> Span:
    """All microbatches of a step, one after the other."""
    account = Account()
    count = workload.microbatches
    account.go(microbatch_span(stage, first=True, last=count == 1))
    if count > 2:
        account.go(microbatch_span(stage, first=False, last=False), count - 2)
    if count > 1:
        account.go(microbatch_span(stage, first=False, last=True))
    return account.close()


def _through(stages: tuple[PipelinedStage, ...], workload: Workload, pp: int) -> Span:
    """The fullest of the situations that the schedule brings about."""
    account = Account()
    for stage in stages:
        account.hold(PIPELINE_BUFFERS, stage.buffers)
    degree, n_stages = workload.mesh.degree("pp"), len(workload.stage_layers)
    best: tuple[int, Situation, Span] | None = None
    for situation in situations(workload.schedule, degree, n_stages, workload.microbatches, pp):
        span = _action(stages, situation)
        total = sum(_held(stages, situation)) + span.highest
        if best is None or total > best[0]:
            best = total, situation, span
    assert best is not None, "a schedule has actions"
    _, situation, span = best
    for kind, count in enumerate(_held(stages, situation)):
        account.hold(kind, count)
    account.go(span)
    closed = account.close()
    return Span(closed.after, closed.peak, closed.highest, _where(stages, situation, span))


def _action(stages: tuple[PipelinedStage, ...], situation: Situation) -> Span:
    stage, first = stages[situation.stage], situation.gradients[situation.stage] == BEFORE
    if situation.step == "F":
        return stage.forward
    if situation.step == "R":
        return stage.reduction
    half = {"B": None, "I": "inputs", "W": "weights"}[situation.step]
    return stage.backward(first, half)  # type: ignore[arg-type]


def _held(stages: tuple[PipelinedStage, ...], situation: Situation) -> Bytes:
    """Bytes there as an action begins, besides states and buffers."""
    parts: list[Bytes] = []
    unsharded = []
    for stage, forwards, halves, done, gradients in zip(
        stages, situation.forwards, situation.halves, situation.done, situation.gradients, strict=True
    ):
        every, last = stage.sent
        sending = done * every + (last if done else 0)
        parts.append(tuple(sending if kind == ACTIVATIONS else 0 for kind in range(len(KINDS))))
        kept = stage.forward.after
        parts.append(tuple(forwards * one for one in kept))
        if halves:
            half = stage.backward(False, "inputs").after
            parts.append(tuple(halves * (one + other) for one, other in zip(kept, half, strict=True)))
        if gradients == WHOLE:
            parts.append(stage.whole_gradients)
        elif gradients == REDUCED:
            parts.append(stage.reduced_gradients)
        if gradients != REDUCED:
            unsharded.append(stage.unsharded)
    account = Account()
    account.hold(UNSHARDED_PARAMETERS, sum(sorted(unsharded)[-MOST_UNSHARDED:]))
    parts.append(account.close().after)
    return tuple(map(sum, zip(*parts, strict=True)))


def _where(stages: tuple[PipelinedStage, ...], situation: Situation, span: Span) -> str:
    stage = stages[situation.stage]
    in_flight = sum(situation.forwards) + sum(situation.halves)
    return f"stage {stage.index} {span.moment}, with {in_flight} microbatch{'es' if in_flight != 1 else ''} in flight"
