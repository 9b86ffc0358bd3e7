"""Seconds that a rank spends besides its forwards and backwards: data parallel, sums, the optimizer. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from koushi.hardware.collective import collective_seconds, span
from koushi.hardware.hardware import Hardware
from koushi.hardware.matmul import streaming_seconds
from koushi.mesh import MeshSpec
from koushi.plan.communication import end_of_step, reduction, replicas, start_of_step, unshard
from koushi.plan.stage_time import stage_work, stages_work
from koushi.plan.units import StageUnits, Unit, held_stages, units_of
from koushi.plan.unshard import unshards
from koushi.plan.work import block, key_of
from koushi.plan.workload import Workload
from koushi.traffic import DTYPE_BYTES, Collective, Traffic

OVERLAPPED = 0.9
"""Share of the compute beside a collective that can hide it."""
SLOWED = 0.12
"""Share of a chip's speed that a collective running beside its kernels takes: units and memory bandwidth."""


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


def edges(workload: Workload, hardware: Hardware, pp: int) -> Edges:
    """Of the rank at pipeline coordinate ``pp``."""
    if workload.system.sharding == "fsdp":
        exposed, slowed = _fully_sharded(workload, hardware, pp)
    else:
        exposed, slowed = _replicated(workload, hardware, pp)
    for traffic in (start_of_step(workload), end_of_step(workload, pp)):
        for collective, calls in traffic.items():
            name = part_of(collective)
            exposed[name] = exposed.get(name, 0.0) + calls * seconds_of(workload.mesh, hardware, collective)
    return Edges(exposed, slowed, _optimizer(workload, hardware, pp))


def part_of(collective: Collective) -> str:
    """The part of the waterfall that a collective's exposed time belongs to."""
    return "exposed tp" if collective.submesh == "cp" else f"exposed {collective.submesh.split(',')[0]}"


@lru_cache(maxsize=65536)
def seconds_of(mesh: MeshSpec, hardware: Hardware, collective: Collective) -> float:
    """Of one call, alone on its links."""
    group = span(mesh, collective.submesh, hardware.inside.devices)
    return collective_seconds(hardware, collective.operation, collective.bytes, group)


def _total(workload: Workload, hardware: Hardware, traffic: Traffic) -> float:
    return sum(calls * seconds_of(workload.mesh, hardware, collective) for collective, calls in traffic.items())


def gather_seconds(workload: Workload, hardware: Hardware, stage: int) -> float:
    """Of all units of a stage, one after the other."""
    units = units_of(workload, stage)
    return sum(count * _total(workload, hardware, unshard(workload, unit, "forward")) for unit, count in units.all)


def _hidden(seconds: float, beside: float) -> tuple[float, float]:
    """Of communication next to compute: what is exposed, and the compute lost to the rest."""
    hidden = min(seconds, OVERLAPPED * max(0.0, beside))
    return seconds - hidden, SLOWED * hidden


@dataclass(frozen=True)
class _Calls:
    """Seconds of a unit's gather, of its gradients' reduction, of their sum over replicas."""

    gather: float
    reduce: float
    replica: float


def _calls(workload: Workload, hardware: Hardware, units: StageUnits) -> tuple[_Calls, _Calls]:
    """Of a block; of the units beside the blocks, together."""

    def of(unit: Unit) -> _Calls:
        return _Calls(
            _total(workload, hardware, unshard(workload, unit, "forward")),
            _total(workload, hardware, reduction(workload, unit)),
            _total(workload, hardware, replicas(workload, unit)),
        )

    others = [of(unit) for unit in (units.embedding, units.root) if unit is not None and unit.whole]
    return of(units.block), _Calls(
        sum(one.gather for one in others), sum(one.reduce for one in others), sum(one.replica for one in others)
    )


def _fully_sharded(workload: Workload, hardware: Hardware, pp: int) -> tuple[dict[str, float], float]:
    """Gathers and reductions of FSDP units, and the compute that they slow down."""
    sharded = copied = slowed = 0.0
    last, pipelined = len(workload.stage_layers) - 1, workload.mesh.degree("pp") > 1
    made: dict[tuple[int, bool, bool, int], tuple[float, float, float]] = {}
    for stage in held_stages(workload, pp):
        gathers = unshards(workload, stage) if pipelined else 1
        kind = (workload.stage_layers[stage], stage == 0, stage == last, gathers)
        if kind not in made:
            made[kind] = _of_stage(workload, hardware, stage)
        exposed, replicas_exposed, lost = made[kind]
        sharded += exposed
        copied += replicas_exposed
        slowed += lost
    return {"exposed dp_shard": sharded, "exposed dp_replicate": copied}, slowed


def _of_stage(workload: Workload, hardware: Hardware, stage: int) -> tuple[float, float, float]:
    """Of a stage: what dp_shard exposes, what dp_replicate does, and the compute that they slow down."""
    units = units_of(workload, stage)
    once = _pipelined if workload.mesh.degree("pp") > 1 else _alone
    exposed, replicas_exposed, lost = once(workload, hardware, stage, units.blocks, *_calls(workload, hardware, units))
    return exposed, replicas_exposed, lost + _staging(workload, hardware, units.total)


def _alone(
    workload: Workload, hardware: Hardware, stage: int, blocks: int, calls: _Calls, ends: _Calls
) -> tuple[float, float, float]:
    """Every block's collectives run beside its neighbours' compute; those of the ends, the first and the last, beside
    nothing. Replicas are summed with the last microbatch."""
    one = block(hardware, key_of(workload))
    forward, backward = one.forward.seconds, one.backward.seconds
    again = calls.gather if workload.reshard_after_forward else 0.0
    exposed, lost = _hidden(blocks * calls.gather, blocks * forward)
    more, more_lost = _hidden(blocks * (again + calls.reduce), blocks * backward)
    copied, last_lost = _hidden(blocks * calls.replica, blocks * (backward - again - calls.reduce))
    times = workload.microbatches
    exposed = times * (exposed + more + ends.gather + ends.reduce)
    return exposed, copied + ends.replica, times * (lost + more_lost) + last_lost


def _pipelined(
    workload: Workload, hardware: Hardware, stage: int, blocks: int, calls: _Calls, ends: _Calls
) -> tuple[float, float, float]:
    """A stage is gathered before its first forward and reduced after its last backward; gathers that follow because
    too many stages take turns run beside the others' compute."""
    gather, again = blocks * calls.gather + ends.gather, unshards(workload, stage) - 1
    exposed = lost = 0.0
    if again:
        work = stage_work(workload, hardware, stage)
        beside = workload.microbatches * (work.forward + work.inputs + work.weights)
        exposed, lost = _hidden(again * gather, beside)
    exposed += gather + blocks * calls.reduce + ends.reduce
    return exposed, blocks * calls.replica + ends.replica, lost


def _staging(workload: Workload, hardware: Hardware, unit: Unit) -> float:
    """Copies into and out of the buffers of gathers and reductions, on the compute stream."""
    if workload.mesh.degree("dp_shard") == 1:
        return 0.0
    compute, reduce = DTYPE_BYTES[workload.compute], DTYPE_BYTES[workload.reduce]
    alone = workload.mesh.degree("pp") == 1
    gathers = 2 if workload.reshard_after_forward and alone else 1
    moved = unit.whole * (gathers * 2 * compute + compute + reduce)
    return streaming_seconds(hardware.chip, moved * (workload.microbatches if alone else 1), 0)


def _replicated(workload: Workload, hardware: Hardware, pp: int) -> tuple[dict[str, float], float]:
    """Gradients summed beside the last microbatch's backward; ZeRO-1 gathers parameters after the update."""
    work, slowed = stages_work(workload, hardware), 0.0
    exposed: dict[str, float] = {}
    at_once = workload.owners and workload.system.gathers_update == "at_once"
    for stage in held_stages(workload, pp):
        units = units_of(workload, stage)
        for unit, count in ((units.total, 1),) if at_once else units.all:
            beside = count * unit.whole / max(1, units.total.whole) * (work[stage].inputs + work[stage].weights)
            for collective, calls in replicas(workload, unit).items():
                if collective.phase != "backward" and workload.system.gathers_update != "by_unit":
                    continue
                seconds = calls * count * seconds_of(workload.mesh, hardware, collective)
                if workload.system.overlap_data_parallel and collective.phase == "backward":
                    seconds, lost = _hidden(seconds, beside)
                    slowed += lost
                name = part_of(collective)
                exposed[name] = exposed.get(name, 0.0) + seconds
        for name, seconds in _update_gathered(workload, hardware, units).items():
            exposed[name] = exposed.get(name, 0.0) + seconds
    return exposed, slowed


def _update_gathered(workload: Workload, hardware: Hardware, units: StageUnits) -> dict[str, float]:
    """ZeRO-1's gather of a stage's parameters where it is not unit by unit, by part of the waterfall.

    One broadcast for each owner, or one gather after which the host copies every owner's piece of every tensor.
    """
    found: dict[str, float] = {}
    if workload.system.gathers_update == "by_unit":
        return found
    owners = workload.mesh.degree(*workload.owners)
    tensors = sum(count * len(unit.tensors) for unit, count in units.all)
    if workload.system.fused_projections:
        tensors -= units.blocks * (3 if workload.model.gated else 2)
    for collective in replicas(workload, units.total):
        if collective.phase == "backward":
            continue
        if workload.system.gathers_update == "by_owner":
            part = replace(collective, bytes=collective.bytes // owners)
            seconds = owners * seconds_of(workload.mesh, hardware, part)
        else:
            seconds = seconds_of(workload.mesh, hardware, collective)
            seconds += owners * tensors * hardware.host.launch_us * 1e-6
        found[part_of(collective)] = seconds
    return found


def _optimizer(workload: Workload, hardware: Hardware, pp: int) -> float:
    """Norm, clipping and AdamW over what the rank updates: reads and writes of gradients, moments and masters."""
    mesh, system = workload.mesh, workload.system
    total = sum(units_of(workload, stage).total.whole for stage in held_stages(workload, pp))
    degree = mesh.degree("dp_shard")
    if system.sharding != "fsdp":
        degree = mesh.degree(*workload.owners)
    owned = total / degree
    norm = 3 * (owned if system.sharding == "fsdp" else total) * DTYPE_BYTES[workload.reduce]
    update = 7 * owned * DTYPE_BYTES[workload.parameters] + (2 * owned if system.separate_masters else 0)
    return streaming_seconds(hardware.chip, norm + update, 20)
