"""How long a training step takes: a waterfall from ideal compute to what is expected. No torch.

A step is the pipeline (simulated by ``koushi.plan.schedule``), what precedes its first forward and what
follows its last backward. Each part's costs depend on few of a layout's numbers and are remembered by those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt

from koushi.hardware.hardware import Hardware
from koushi.plan.communication import traffic
from koushi.plan.edges import Edges, edges, part_of, seconds_of
from koushi.plan.stage_time import accumulation, pipeline, send_seconds, stage_costs, stages_work
from koushi.plan.units import held_stages
from koushi.plan.unshard import unshards
from koushi.plan.workload import Workload
from koushi.traffic import Collective

__all__ = [
    "PARTS",
    "CollectiveTime",
    "Edges",
    "StepTime",
    "collective_times",
    "edges",
    "flops_per_token",
    "pipeline",
    "send_seconds",
    "stage_costs",
    "step_seconds",
    "step_time",
    "stragglers",
]

PARTS = (
    "ideal compute",
    "matmul shapes",
    "attention beyond ideal",
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


@dataclass(frozen=True)
class StepTime:
    """One training step as expected, and where the time of one pipeline coordinate goes."""

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
class _Core:
    """A step without what all ranks wait for together."""

    seconds: float
    busy: tuple[float, ...]
    edges: tuple[Edges, ...]
    slowest: int
    """The pipeline coordinate whose work and edges take longest."""
    bubble: float


def _core(workload: Workload, hardware: Hardware) -> _Core:
    pp = workload.mesh.degree("pp")
    found = _all_edges(workload, hardware)
    if pp == 1:
        (cost,) = stage_costs(workload, hardware)
        busy: tuple[float, ...] = (workload.microbatches * (cost.forward + cost.backward),)
        makespan, bubble = busy[0], 0.0
    else:
        timeline = pipeline(workload, hardware)
        busy, makespan, bubble = timeline.busy, timeline.makespan, timeline.bubble
    totals = [work + one.seconds for work, one in zip(busy, found, strict=True)]
    slowest = totals.index(max(totals))
    return _Core(makespan + found[slowest].seconds, busy, found, slowest, bubble)


def _all_edges(workload: Workload, hardware: Hardware) -> tuple[Edges, ...]:
    """Of every pipeline coordinate; those with stages alike are computed once."""
    made: dict[tuple[object, ...], Edges] = {}
    found, last = [], len(workload.stage_layers) - 1
    for coordinate in range(workload.mesh.degree("pp")):
        held = held_stages(workload, coordinate)
        kind = tuple((workload.stage_layers[one], one == 0, one == last, unshards(workload, one)) for one in held)
        if kind not in made:
            made[kind] = edges(workload, hardware, coordinate)
        found.append(made[kind])
    return tuple(found)


def step_seconds(workload: Workload, hardware: Hardware) -> float:
    """The seconds of ``step_time``, without saying where they go."""
    return _expected(_core(workload, hardware).seconds, workload, hardware)


def _expected(seconds: float, workload: Workload, hardware: Hardware) -> float:
    return (seconds + hardware.host.step_ms * 1e-3) * (1 + stragglers(hardware, workload.mesh.world_size))


def step_time(workload: Workload, hardware: Hardware, pp: int | None = None) -> StepTime:
    """The step of ``workload`` on ``hardware``, and where its time goes at pipeline coordinate ``pp``.

    Without ``pp``: at the one that works longest.
    """
    core = _core(workload, hardware)
    coordinate = core.slowest if pp is None else pp
    own = core.edges[coordinate]
    parts = dict.fromkeys(PARTS, 0.0)
    _add_work(parts, workload, hardware, coordinate)
    # Blocks whose weights' part recomputes, as only a split backward does.
    parts["recompute"] += max(0.0, core.busy[coordinate] - sum(parts.values()))
    waiting = core.seconds - core.busy[coordinate] - own.seconds
    if workload.mesh.degree("pp") > 1:
        sent = core.seconds - core.edges[core.slowest].seconds - pipeline(workload, hardware, sending=False).makespan
        parts["exposed pp"] = min(max(0.0, sent), waiting)
        parts["bubble"] = waiting - parts["exposed pp"]
    for name, seconds in own.exposed.items():
        parts[name] += seconds
    parts["slowed by communication"] = own.slowed
    parts["optimizer"] = own.optimizer
    parts["host"] = hardware.host.step_ms * 1e-3
    seconds = _expected(core.seconds, workload, hardware)
    parts["slowest of many"] = (core.seconds + parts["host"]) * stragglers(hardware, workload.mesh.world_size)
    per_device = workload.tokens / seconds / workload.mesh.world_size
    mfu = per_device * flops_per_token(workload) / hardware.chip.peak(workload.compute)
    return StepTime(parts, per_device, mfu, core.bubble, coordinate)


def _add_work(parts: dict[str, float], workload: Workload, hardware: Hardware, pp: int) -> None:
    """A rank's forwards and backwards by part."""
    work, extra = stages_work(workload, hardware), accumulation(workload, hardware)
    for stage in held_stages(workload, pp):
        for name, seconds in work[stage].parts.items():
            parts[name] += seconds * workload.microbatches
        parts["memory-bound operations"] += extra[stage] * workload.microbatches


def collective_times(workload: Workload, hardware: Hardware, pp: int) -> tuple[CollectiveTime, ...]:
    """Every kind of call by the rank at pipeline coordinate ``pp``; what is exposed adds up to the waterfall's parts.

    Within a part the exposed time is shared out by how long the calls take.
    """
    parts, found = step_time(workload, hardware, pp).parts, traffic(workload, pp)
    seconds = {one: seconds_of(workload.mesh, hardware, one) for one in found}
    totals: dict[str, float] = {}
    for one, calls in found.items():
        totals[part_of(one)] = totals.get(part_of(one), 0.0) + calls * seconds[one]
    return tuple(
        CollectiveTime(one, calls, seconds[one], calls * seconds[one] * _share(parts, totals, part_of(one)))
        for one, calls in sorted(found.items())
    )


def _share(parts: Mapping[str, float], totals: Mapping[str, float], name: str) -> float:
    return parts[name] / totals[name] if totals[name] else 0.0


def flops_per_token(workload: Workload) -> float:
    """Forward and backward FLOPs of one token as PaLM counts them (arXiv 2204.02311, appendix B)."""
    model = workload.model
    per_layer = model.dim * model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    per_layer += model.dim * model.ffn_dim * (3 if model.gated else 2)
    multiplying = model.n_layers * per_layer + model.dim * model.vocab_size
    return 6.0 * multiplying + 12.0 * model.n_layers * model.n_heads * model.head_dim * workload.seq_len


def stragglers(hardware: Hardware, world: int) -> float:
    """How much slower than the usual the slowest of many alike devices is: the expected maximum of n normal variables
    is about sqrt(2 ln n) standard deviations."""
    return hardware.variation * sqrt(2 * log(world)) if world > 1 else 0.0
