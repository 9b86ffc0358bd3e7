"""A plan: what one layout costs on one kind of hardware, before anyone pays for it. No torch."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from koushi.hardware.collective import Span, span
from koushi.hardware.hardware import Hardware
from koushi.plan.memory import Memory, every_rank
from koushi.plan.step_time import CollectiveTime, StepTime, collective_times, step_time
from koushi.plan.units import held_stages
from koushi.plan.workload import Workload

ACCURACY = Path(__file__).parent / "accuracy.json"
TIGHT = 0.9
"""Share of a device's memory above which a layout fits tightly: predictions are that far off at times."""


@dataclass(frozen=True)
class ErrorBar:
    """How far predictions were from published runs, as shares of what was measured."""

    median: float
    """Of a source's runs; the mean over sources."""
    p90: float
    """90th percentile of a source's runs; the mean over sources, each of which counts the same."""
    worst_p90: float
    """Of the source with the largest."""
    sources: int
    runs: int
    hardware: tuple[str, ...]
    """What those runs ran on."""

    def stands_behind(self, hardware: Hardware) -> bool:
        """Whether any of those runs ran on such devices: a user's own file is other hardware, whatever its name."""
        return hardware.is_shipped and hardware.name in self.hardware

    def around(self, predicted: float) -> tuple[float, float]:
        """What would be measured with an error of ``p90`` to either side."""
        return predicted / (1 + self.p90), predicted / (1 - self.p90)


@dataclass(frozen=True)
class SubmeshUse:
    """One sub-mesh and what a rank sends over it in a step."""

    name: str
    """A mesh dim, or several joined by a comma."""
    groups: int
    degree: int
    ranks: tuple[int, ...]
    """Of the group that the rank is in."""
    span: Span
    link: str
    """The narrowest link inside a group."""
    calls: tuple[CollectiveTime, ...]

    @property
    def nodes(self) -> int:
        """Domains of fast links that a group spans."""
        return self.span.domains

    @property
    def seconds(self) -> float:
        return sum(one.seconds * one.calls for one in self.calls)

    @property
    def exposed(self) -> float:
        return sum(one.exposed for one in self.calls)


@dataclass(frozen=True)
class Plan:
    """Memory of every rank, time and communication of a step."""

    workload: Workload
    hardware: Hardware
    time: StepTime
    memories: tuple[Memory, ...]
    """By pipeline coordinate."""

    @property
    def devices(self) -> int:
        return self.workload.mesh.world_size

    @property
    def fullest(self) -> int:
        """The pipeline coordinate whose ranks hold most."""
        return max(range(len(self.memories)), key=lambda pp: self.memories[pp].device)

    @property
    def memory(self) -> Memory:
        """Of the fullest rank."""
        return self.memories[self.fullest]

    @property
    def room(self) -> float:
        """Bytes left on the fullest rank; below 0: how much it lacks."""
        return self.hardware.chip.memory_bytes - self.memory.device

    @property
    def fits(self) -> bool:
        return self.room >= 0

    @property
    def tight(self) -> bool:
        """Whether it fits with little room."""
        return self.fits and is_tight(self.memory.device, self.hardware)

    def ranks(self, pp: int) -> tuple[int, int]:
        """First and last rank at a pipeline coordinate."""
        along = self.devices // self.workload.mesh.degree("pp")
        return pp * along, (pp + 1) * along - 1

    def stages(self, pp: int) -> tuple[int, ...]:
        return held_stages(self.workload, pp)

    @cached_property
    def submeshes(self) -> tuple[SubmeshUse, ...]:
        """As the first rank of the pipeline coordinate that works longest uses them, innermost first."""
        found: dict[str, list[CollectiveTime]] = defaultdict(list)
        for one in collective_times(self.workload, self.hardware, self.time.pp):
            found[one.collective.submesh].append(one)
        order = {name: index for index, name in enumerate(reversed(self.workload.mesh.names))}
        names = sorted(found, key=lambda name: min(order[dim] for dim in name.split(",")))
        return tuple(self._use(name, tuple(found[name])) for name in names)

    def _use(self, name: str, calls: tuple[CollectiveTime, ...]) -> SubmeshUse:
        mesh, dims = self.workload.mesh, name.split(",")
        group = span(mesh, name, self.hardware.inside.devices)
        link = self.hardware.inside if group.domains == 1 else self.hardware.network
        degree = mesh.degree(*dims)
        ranks = mesh.group(self.ranks(self.time.pp)[0], *dims)
        return SubmeshUse(name, self.devices // degree, degree, ranks, group, link.name, calls)


def plan(workload: Workload, hardware: Hardware) -> Plan:
    """What a step of ``workload`` on ``hardware`` takes in time and in memory."""
    return Plan(workload, hardware, step_time(workload, hardware), every_rank(workload, hardware))


def is_tight(memory: float, hardware: Hardware) -> bool:
    """Whether ``memory`` bytes leave little of a device's."""
    return memory > TIGHT * hardware.chip.memory_bytes


@cache
def error_bars() -> tuple[ErrorBar, ErrorBar]:
    """Of step time and of memory, as ``python -m koushi.accuracy --write`` has measured them."""
    found = json.loads(ACCURACY.read_text(encoding="utf-8"))
    step_time, memory = (
        ErrorBar(**found[name] | {"hardware": tuple(found[name]["hardware"])}) for name in ("step_time", "memory")
    )
    return step_time, memory
