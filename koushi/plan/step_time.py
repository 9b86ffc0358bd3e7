"""How long a training step takes: a waterfall from ideal compute to what is expected. No torch.

A step is the pipeline (simulated by ``koushi.plan.schedule``), what precedes its first forward and what
follows its last backward. Each part's costs depend on few of a layout's numbers and are remembered by those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

from koushi.hardware.collective import collective_seconds, span
from koushi.hardware.hardware import Hardware
from koushi.hardware.matmul import streaming_seconds
from koushi.plan.communication import end_of_step, reduction, replicas, unshard
from koushi.plan.schedule import StageSeconds, Timeline, simulate
from koushi.plan.units import Unit, held_stages, units_of
from koushi.plan.work import Phases, block, ends, key_of
from koushi.plan.workload import Workload
from koushi.schedules import SCHEDULES
from koushi.traffic import DTYPE_BYTES, Collective, Traffic

PARTS = (
    "ideal compute",
    "matmul shapes",
    "attention",
    "memory-bound operations",
    "recompute",
    "launch overhead",
    "exposed tp",
    "exposed dp_shard",
    "exposed dp_replicate",
    "exposed pp",
    "slowed by communication",
    "bubble",
    "optimizer",
    "host",
    "slowest of many",
)
"""Of the waterfall, in its order."""

OVERLAPPED = 0.9
"""Share of the compute beside a collective that can hide it."""
SLOWED = 0.12
"""Share of a chip's speed that a collective running beside its kernels takes: units and memory bandwidth."""


@dataclass(frozen=True)
class StepTime:
    """One training step as expected, of the rank whose pipeline coordinate works longest."""

    parts: Mapping[str, float]
    """Seconds by name of ``PARTS``; they add up to the step."""
    tokens_per_second_per_device: float
    mfu: float
    """Model FLOPs utilisation in PaLM's convention (arXiv 2204.02311, appendix B): 6 FLOPs per parameter that
    multiplies and 12 x layers x heads x head_dim x seq_len per token, against the peak of the compute dtype."""
    bubble: float
    """Share of all ranks' pipeline time that is idle."""
    pp: int
    """The pipeline coordinate that the parts are of."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class CollectiveTime:
    """One kind of call in a step."""

    collective: Collective
    calls: int
    seconds: float
    """Of each, alone on its links."""
    exposed: float
    """Of all calls, what nothing hides."""


@dataclass(frozen=True)
class Edges:
    """What a rank does besides its pipeline's actions, in seconds."""

    exposed: Mapping[str, float]
    """Communication that nothing hides, by part of the waterfall."""
    slowed: float
    """Compute lost to collectives beside it."""
    optimizer: float

    @property
    def seconds(self) -> float:
        return sum(self.exposed.values()) + self.slowed + self.optimizer


def step_time(workload: Workload, hardware: Hardware) -> StepTime:
    """The step of ``workload`` on ``hardware``."""
    mesh, n_stages = workload.mesh, len(workload.stage_layers)
    pp = mesh.degree("pp")
    coordinates = [_rank(workload, hardware, coordinate) for coordinate in range(pp)]
    if pp == 1:
        busy = [sum(parts.values()) for parts, _ in coordinates]
        makespan, bubble = busy[0], 0.0
    else:
        timeline = pipeline(workload, hardware)
        busy, makespan, bubble = list(timeline.busy), timeline.makespan, timeline.bubble
    totals = [time + edges.seconds for time, (_, edges) in zip(busy, coordinates, strict=True)]
    slowest = max(range(pp), key=lambda coordinate: totals[coordinate])
    parts, edges = coordinates[slowest]
    parts = {name: 0.0 for name in PARTS} | parts
    sending = _sending(workload, hardware) if pp > 1 else 0.0
    waiting = makespan - busy[slowest]
    parts["exposed pp"] = min(waiting, sending)
    parts["bubble"] = waiting - parts["exposed pp"]
    for name, seconds in edges.exposed.items():
        parts[name] += seconds
    parts["slowed by communication"] += edges.slowed
    parts["optimizer"] += edges.optimizer
    parts["host"] += hardware.host.step_ms * 1e-3
    parts["slowest of many"] = _stragglers(hardware, mesh.world_size) * sum(parts.values())
    seconds = sum(parts.values())
    per_device = workload.tokens / seconds / mesh.world_size
    mfu = per_device * flops_per_token(workload) / hardware.chip.peak(workload.compute)
    assert n_stages == pp * workload.stages_per_rank, f"{n_stages} stages over {pp} ranks"
    return StepTime(parts, per_device, mfu, bubble, slowest)


def step_seconds(hardware: Hardware, devices: int, seconds: float) -> float:
    """The whole step, from the ``seconds`` of the pipeline's makespan and the edges of its slowest rank."""
    return (seconds + hardware.host.step_ms * 1e-3) * (1 + _stragglers(hardware, devices))


def flops_per_token(workload: Workload) -> float:
    """Forward and backward FLOPs of one token as PaLM counts them (arXiv 2204.02311, appendix B)."""
    model = workload.model
    per_layer = model.dim * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    per_layer += model.dim * model.ffn_dim * (3 if model.gated else 2)
    multiplying = model.n_layers * per_layer + model.dim * model.vocab_size
    return 6.0 * multiplying + 12.0 * model.n_layers * model.n_heads * model.head_dim * workload.seq_len


# Compute.


@lru_cache(maxsize=16384)
def _stage(hardware: Hardware, key: Workload, layers: int, first: bool, last: bool) -> Phases:
    """One microbatch through a stage."""
    phases = block(hardware, key)
    forward, inputs, weights = phases.forward * layers, phases.inputs * layers, phases.weights * layers
    again = phases.again * layers
    embedding, output = ends(hardware, key)
    for present, end in ((first, embedding), (last, output)):
        if present:
            forward, inputs, weights = forward + end.forward, inputs + end.inputs, weights + end.weights
    return Phases(forward, inputs, weights, again)


def stage_phases(workload: Workload, hardware: Hardware) -> tuple[Phases, ...]:
    """One microbatch's work of every stage."""
    key = key_of(workload)
    final = len(workload.stage_layers) - 1
    return tuple(
        _stage(hardware, key, layers, index == 0, index == final) for index, layers in enumerate(workload.stage_layers)
    )


def stage_costs(workload: Workload, hardware: Hardware) -> tuple[StageSeconds, ...]:
    """What the actions of every stage take.

    Where backward is split, full recompute runs a block again for the inputs and once more for each of its
    parameters: torch asks autograd for their gradients one by one.
    """
    split = SCHEDULES[workload.schedule].splits_backward if workload.mesh.degree("pp") > 1 else False
    found = []
    extra = accumulation(workload, hardware)
    for index, phases in enumerate(stage_phases(workload, hardware)):
        again = phases.again.seconds
        repeated = again * PARAMETERS_OF_BLOCK if split and workload.recompute == "full" else 0.0
        found.append(
            StageSeconds(
                phases.forward.seconds,
                phases.inputs.seconds + again,
                phases.weights.seconds + repeated + extra[index],
                phases.backward.seconds + extra[index],
            )
        )
    return tuple(found)


PARAMETERS_OF_BLOCK = 9


def accumulation(workload: Workload, hardware: Hardware) -> tuple[float, ...]:
    """Of every stage: adding a microbatch's gradients to those before, where they are kept whole."""
    kept_whole = workload.system.sharding != "fsdp" or workload.mesh.degree("pp") > 1
    if workload.microbatches == 1 or not kept_whole:
        return (0.0,) * len(workload.stage_layers)
    moved = DTYPE_BYTES[workload.compute] + 2 * DTYPE_BYTES[workload.reduce]
    return tuple(
        streaming_seconds(hardware.chip, units_of(workload, stage).total.whole * moved, 0)
        for stage in range(len(workload.stage_layers))
    )


def _work_parts(phases: Phases, microbatches: int) -> dict[str, float]:
    """A stage's work by part of the waterfall, over all its microbatches."""
    once = phases.forward + phases.inputs + phases.weights
    seconds = phases.forward.seconds + phases.backward.seconds
    device = once.device + phases.again.device
    return {
        "ideal compute": once.ideal * microbatches,
        "matmul shapes": once.matmul * microbatches,
        "attention": once.attention * microbatches,
        "memory-bound operations": once.memory * microbatches,
        "recompute": phases.again.device * microbatches,
        "exposed tp": once.communication * microbatches,
        "launch overhead": (seconds - device) * microbatches,
    }


def _rank(workload: Workload, hardware: Hardware, pp: int) -> tuple[dict[str, float], Edges]:
    """The compute of a rank by part, and its edges."""
    parts: dict[str, float] = {}
    phases, extra = stage_phases(workload, hardware), accumulation(workload, hardware)
    for stage in held_stages(workload, pp):
        for name, seconds in _work_parts(phases[stage], workload.microbatches).items():
            parts[name] = parts.get(name, 0.0) + seconds
        parts["memory-bound operations"] += extra[stage] * workload.microbatches
    return parts, edges(workload, hardware, pp)


# The pipeline.


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
    """A microbatch's activations to the next rank, by the slowest link that two neighbours have between them."""
    tokens = workload.microbatch_size * workload.seq_len // workload.mesh.degree("cp")
    size = tokens * workload.model.dim * DTYPE_BYTES[workload.compute]
    if workload.system.sequence_parallel:
        size //= workload.mesh.degree("tp")
    return collective_seconds(hardware, "send", size, span(workload.mesh, "pp", hardware.inside.devices))


def _sending(workload: Workload, hardware: Hardware) -> float:
    """Messages on the way of the first microbatch down and of its gradient up."""
    return 2 * (len(workload.stage_layers) - 1) * send_seconds(workload, hardware)


# Data parallel and the end of the step.


def edges(workload: Workload, hardware: Hardware, pp: int) -> Edges:
    """What the rank at pipeline coordinate ``pp`` does besides forward and backward."""
    if workload.system.sharding == "fsdp":
        exposed, slowed = _fully_sharded(workload, hardware, pp)
    else:
        exposed, slowed = _replicated(workload, hardware, pp)
    for name, seconds in _sums(workload, hardware, end_of_step(workload, pp)).items():
        exposed[name] = exposed.get(name, 0.0) + seconds
    return Edges(exposed, slowed, _optimizer(workload, hardware, pp))


def _sums(workload: Workload, hardware: Hardware, traffic: Traffic) -> dict[str, float]:
    """Seconds of collectives one after the other, by the part they belong to."""
    found: dict[str, float] = {}
    for collective, calls in traffic.items():
        group = span(workload.mesh, collective.submesh, hardware.inside.devices)
        seconds = calls * collective_seconds(hardware, collective.operation, collective.bytes, group)
        name = part_of(collective)
        found[name] = found.get(name, 0.0) + seconds
    return found


def part_of(collective: Collective) -> str:
    """The part of the waterfall that a collective's exposed time belongs to."""
    return f"exposed {collective.submesh.split(',')[0]}" if collective.submesh != "cp" else "exposed tp"


def _hidden(seconds: float, beside: float) -> tuple[float, float]:
    """Of communication next to compute: what is exposed, and the compute lost to the rest."""
    hidden = min(seconds, OVERLAPPED * beside)
    return seconds - hidden, SLOWED * hidden


def _unit_seconds(workload: Workload, hardware: Hardware, unit: Unit) -> tuple[float, float, float]:
    """Of a unit: its gather, the reduction of its gradients, their sum over replicas."""
    return (
        sum(_sums(workload, hardware, unshard(workload, unit, "forward")).values()),
        sum(_sums(workload, hardware, reduction(workload, unit)).values()),
        sum(_sums(workload, hardware, replicas(workload, unit)).values()),
    )


def _fully_sharded(workload: Workload, hardware: Hardware, pp: int) -> tuple[dict[str, float], float]:
    """Gathers and reductions of FSDP units beside their neighbours' compute; the first gather and the last
    reduction have none. Under pipelining both happen once a step, with nothing beside them."""
    key = key_of(workload)
    phases = block(hardware, key)
    forward, backward = phases.forward.seconds, phases.backward.seconds
    sharded = copied = slowed = 0.0
    pipelined = workload.mesh.degree("pp") > 1
    times = 1 if pipelined else workload.microbatches
    for stage in held_stages(workload, pp):
        units = units_of(workload, stage)
        gather, reduce, replica = _unit_seconds(workload, hardware, units.block)
        ends_gather, ends_reduce, ends_replica = _ends_seconds(workload, hardware, units.all)
        staging = _staging(workload, hardware, units.total)
        if pipelined:
            sharded += units.blocks * (gather + reduce) + ends_gather + ends_reduce
            copied += units.blocks * replica + ends_replica
            slowed += staging
            continue
        again = gather if workload.reshard_after_forward else 0.0
        exposed, lost = _hidden(units.blocks * gather, units.blocks * forward)
        more, lost_more = _hidden(units.blocks * (again + reduce), units.blocks * backward)
        sharded += times * (exposed + more + ends_gather + ends_reduce)
        slowed += times * (lost + lost_more + staging)
        exposed, lost = _hidden(units.blocks * replica, max(0.0, units.blocks * (backward - again - reduce)))
        copied += exposed + ends_replica
        slowed += lost
    return {"exposed dp_shard": sharded, "exposed dp_replicate": copied}, slowed


def _ends_seconds(
    workload: Workload, hardware: Hardware, units: tuple[tuple[Unit, int], ...]
) -> tuple[float, float, float]:
    """Of the units beside the blocks: gathered first and reduced last, so that little hides them."""
    found = [_unit_seconds(workload, hardware, unit) for unit, count in units if count == 1]
    gather, reduce, replica = (sum(each) for each in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0)
    return gather, reduce, replica


def _staging(workload: Workload, hardware: Hardware, unit: Unit) -> float:
    """Copies into and out of the buffers of gathers and reductions, on the compute stream."""
    if workload.mesh.degree("dp_shard") == 1:
        return 0.0
    compute, reduce = DTYPE_BYTES[workload.compute], DTYPE_BYTES[workload.reduce]
    gathers = 2 if workload.reshard_after_forward and workload.mesh.degree("pp") == 1 else 1
    return streaming_seconds(hardware.chip, unit.whole * (gathers * 2 * compute + compute + reduce), 0)


def _replicated(workload: Workload, hardware: Hardware, pp: int) -> tuple[dict[str, float], float]:
    """Gradients summed beside the last microbatch's backward; ZeRO-1 gathers parameters after the update."""
    phases, slowed = stage_phases(workload, hardware), 0.0
    exposed: dict[str, float] = {}
    for stage in held_stages(workload, pp):
        for unit, count in units_of(workload, stage).all:
            for collective, calls in replicas(workload, unit).items():
                group = span(workload.mesh, collective.submesh, hardware.inside.devices)
                seconds = calls * count * collective_seconds(hardware, collective.operation, collective.bytes, group)
                name = part_of(collective)
                if workload.system.overlap_data_parallel and collective.phase == "backward":
                    share = count * unit.whole / max(1, units_of(workload, stage).total.whole)
                    seconds, lost = _hidden(seconds, share * phases[stage].backward.seconds)
                    slowed += lost
                exposed[name] = exposed.get(name, 0.0) + seconds
    return exposed, slowed


def _optimizer(workload: Workload, hardware: Hardware, pp: int) -> float:
    """Norm, clipping and AdamW over what the rank updates: reads and writes of gradients, moments and masters."""
    mesh, system = workload.mesh, workload.system
    total = sum(units_of(workload, stage).total.whole for stage in held_stages(workload, pp))
    degree = mesh.degree("dp_shard")
    if system.sharding != "fsdp":
        degree = mesh.degree("dp_replicate", "dp_shard") if system.sharding == "optimizer" else 1
    owned = total / degree
    size = DTYPE_BYTES[workload.parameters]
    norm = 3 * (owned if system.sharding == "fsdp" else total) * DTYPE_BYTES[workload.reduce]
    update = 7 * owned * size + (2 * owned if system.separate_masters else 0)
    return streaming_seconds(hardware.chip, norm + update, 20)


def _stragglers(hardware: Hardware, world: int) -> float:
    """How much slower the slowest of many alike devices is: the expected maximum of normal variables grows as
    sqrt(2 ln n)."""
    return hardware.variation * sqrt(2 * log(world)) if world > 1 else 0.0
