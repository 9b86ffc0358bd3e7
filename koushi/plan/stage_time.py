"""Seconds of the actions of a pipeline: what one microbatch's forward and backward take on each stage. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from koushi.hardware.collective import collective_seconds, span
from koushi.hardware.hardware import Hardware
from koushi.hardware.matmul import streaming_seconds
from koushi.plan.communication import gathers_received, pieces_sent
from koushi.plan.schedule import StageSeconds, Timeline, simulate
from koushi.plan.units import units_of
from koushi.plan.work import Phases, block, ends, key_of
from koushi.plan.workload import Workload
from koushi.traffic import DTYPE_BYTES

T = TypeVar("T")


@dataclass(frozen=True)
class StageWork:
    """One microbatch's work of a stage, without what depends on the schedule."""

    forward: float
    inputs: float
    """With what is recomputed."""
    weights: float
    phases: Phases

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Forward and backward together, by part of the waterfall."""
        return _parts(self.phases)


@lru_cache(maxsize=16384)
def _stage(hardware: Hardware, key: Workload, layers: int, first: bool, last: bool) -> StageWork:
    one = block(hardware, key)
    forward, inputs, weights, again = (phase * layers for phase in (one.forward, one.inputs, one.weights, one.again))
    for present, end in zip((first, last), ends(hardware, key), strict=True):
        if present:
            forward, inputs, weights = forward + end.forward, inputs + end.inputs, weights + end.weights
    phases = Phases(forward, inputs, weights, again)
    return StageWork(forward.seconds, (inputs + again).seconds, weights.seconds, phases)


def _parts(phases: Phases) -> Mapping[str, float]:
    once = phases.forward + phases.inputs + phases.weights
    backward = (phases.inputs + phases.again).seconds + phases.weights.seconds
    device = once.device + phases.again.device
    return {
        "ideal compute": once.ideal,
        "matmul shapes": once.matmul,
        "attention beyond ideal": once.attention,
        "memory-bound operations": once.memory,
        "recompute": phases.again.device,
        "launch overhead": max(0.0, phases.forward.seconds + backward - device),
        "exposed tp": once.communication,
    }


def stage_work(workload: Workload, hardware: Hardware, stage: int) -> StageWork:
    """Of one stage."""
    final = len(workload.stage_layers) - 1
    return _stage(hardware, key_of(workload), workload.stage_layers[stage], stage == 0, stage == final)


def _of_every_stage(workload: Workload, of: Callable[[int], T]) -> tuple[T, ...]:
    """What ``of`` gives, asked once for stages that are alike."""
    final = len(workload.stage_layers) - 1
    made: dict[tuple[int, bool, bool], T] = {}
    found = []
    for index, layers in enumerate(workload.stage_layers):
        kind = (layers, index == 0, index == final)
        if kind not in made:
            made[kind] = of(index)
        found.append(made[kind])
    return tuple(found)


@lru_cache(maxsize=4096)
def stages_work(workload: Workload, hardware: Hardware) -> tuple[StageWork, ...]:
    """Of every stage."""
    return _of_every_stage(workload, lambda index: stage_work(workload, hardware, index))


@lru_cache(maxsize=4096)
def stage_costs(workload: Workload, hardware: Hardware) -> tuple[StageSeconds, ...]:
    """What the actions of every stage take."""

    def of(index: int) -> StageSeconds:
        work, more = stage_work(workload, hardware, index), _adding(workload, hardware, index)
        return StageSeconds(work.forward, work.inputs, work.weights + more, work.inputs + work.weights + more)

    return _of_every_stage(workload, of)


def accumulation(workload: Workload, hardware: Hardware) -> tuple[float, ...]:
    """Of every stage: adding a microbatch's gradients to those before, where they are kept whole."""
    return _of_every_stage(workload, lambda index: _adding(workload, hardware, index))


def _adding(workload: Workload, hardware: Hardware, index: int) -> float:
    kept_whole = workload.system.sharding != "fsdp" or workload.mesh.degree("pp") > 1
    if workload.microbatches == 1 or not kept_whole:
        return 0.0
    moved = DTYPE_BYTES[workload.compute] + 2 * DTYPE_BYTES[workload.reduce]
    return streaming_seconds(hardware.chip, units_of(workload, index).total.whole * moved, 0)


def pipeline(workload: Workload, hardware: Hardware, *, sending: bool = True) -> Timeline:
    """The simulated pipeline of ``workload``, whose pp is above 1; without ``sending`` messages take no time."""
    return simulate(
        workload.schedule,
        workload.mesh.degree("pp"),
        len(workload.stage_layers),
        workload.microbatches,
        stage_costs(workload, hardware),
        send_seconds(workload, hardware) if sending else 0.0,
        blocking=workload.system.blocking_sends,
    )


def send_seconds(workload: Workload, hardware: Hardware) -> float:
    """A microbatch's activations to the next rank, by the slowest link that two neighbours have between them, with the
    gather of what comes in pieces."""
    tokens, domain = workload.microbatch_size * workload.seq_len // workload.mesh.degree("cp"), hardware.inside.devices
    whole = tokens * workload.model.dim * DTYPE_BYTES[workload.compute]
    size = whole // pieces_sent(workload)
    seconds = collective_seconds(hardware, "send", size, span(workload.mesh, "pp", domain))
    if gathers_received(workload):
        seconds += collective_seconds(hardware, "all_gather", whole, span(workload.mesh, "tp", domain))
    return seconds
