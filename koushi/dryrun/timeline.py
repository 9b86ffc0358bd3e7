"""The predicted step over time: what each pipeline coordinate computes and sends when, for Perfetto.

One rank of every pipeline coordinate is followed through its ledger. Its compute is one lane, named by the block that
computes. Collectives of tp hold up compute. Those of fully sharded data parallel run on the streams that torch gives
them, a lane for each, and hold up compute where torch has it wait (``_Sharding``). What is received is waited for as
its stage begins the microbatch, and arrives when its sender's lane has sent it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koushi.dryrun.flops import Work
from koushi.dryrun.trace import RankTrace
from koushi.mesh import MeshSpec
from koushi.output import Kind, write_text
from koushi.parallel.ledger import Event, Taken
from koushi.traffic import Collective, Phase

Seconds = Callable[[Collective], float]
COMPUTE = "compute"


@dataclass(frozen=True)
class Slice:
    """Something that takes time on a lane of a pipeline coordinate."""

    pp: int
    lane: str
    name: str
    start: float
    """Seconds from the start of the step."""
    seconds: float
    event: Event | None = None


def timeline(mesh: MeshSpec, traces: Sequence[RankTrace], flops_per_second: float, seconds: Seconds) -> list[Slice]:
    """Of one rank of every pipeline coordinate; ``traces`` has a whole one of each."""
    chosen: dict[int, RankTrace] = {}
    for trace in traces:
        assert not trace.extrapolated, "a timeline needs every event"
        chosen.setdefault(mesh.coordinate(trace.rank)["pp"], trace)
    missing = set(range(mesh.degree("pp"))) - set(chosen)
    assert not missing, f"no rank of the pipeline coordinates {sorted(missing)} was traced"
    lanes = {pp: _Rank(mesh, pp, trace, flops_per_second, seconds) for pp, trace in chosen.items()}
    arrivals: Arrivals = defaultdict(list)
    while any(not rank.done for rank in lanes.values()):
        moved = [rank.advance(arrivals) for rank in lanes.values()]
        assert any(moved), "each rank waits for what another sends later"
    return [one for rank in lanes.values() for one in rank.slices]


Route = tuple[int, int, Phase]
"""From one pipeline coordinate to another; activations and gradients apart."""
Arrivals = dict[Route, list[float]]
"""When what is sent arrives, in the order of sending, which is that of receiving."""


@dataclass
class _Lanes:
    """Everything that one pipeline coordinate does."""

    pp: int
    slices: list[Slice] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When a lane is."""
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When those of a sub-mesh are: its calls come one after another in the order of their issue, whatever their lane,
    as those of one communicator do."""

    def add(self, lane: str, earliest: float, event: Event, taken: float) -> float:
        """Issue a call; when it is through."""
        collective = event.collective
        start = max(earliest, self.free[lane], self.links[collective.submesh])
        name = f"{collective.operation} {event.module}".rstrip()
        self.slices.append(Slice(self.pp, lane, name, start, taken, event))
        self.free[lane] = self.links[collective.submesh] = start + taken
        return start + taken


@dataclass
class _Sharding:
    """The streams of fully sharded data parallel and what waits for what (torch's _fsdp_param_group.py, 2.13).

    In forward a unit's gather is issued before its compute, which waits for it; it may run from when the unit two
    before it begins. In backward it is issued when the unit that computes before it begins, and may run from then.
    Under pipelining it is issued beforehand, and may run from then. A reduction begins after its unit's backward, once
    the reduction before it is through, which compute waits for as well; at the end of backward compute waits for all.
    """

    lanes: _Lanes
    pipelined: bool
    _pending: dict[str, float] = field(default_factory=dict)
    """By unit: when its gather is through, if nothing has waited for it yet."""
    _units: set[str] = field(default_factory=set)
    _gate: float = 0.0
    """Gathers that are yet to be issued run from then on."""
    _begun: float = 0.0
    """When the latest unit of forward was copied out."""
    _reduced: float = 0.0
    """When the latest reduce-scatter is through."""
    _last: float = 0.0
    """When the latest reduction, over replicas too, is through."""
    _phase: Phase = "start"

    def gather(self, event: Event, clock: float, taken: float) -> float:
        """Issue it at ``clock``; when compute goes on."""
        lane, phase = _lane(event), event.collective.phase
        if self.pipelined:
            self._issue(lane, event, clock, taken)
            return clock
        if phase == "forward":
            if self._phase != "forward":
                clock = self._gate = self._begun = self.finish(clock)
            self._phase = phase
            self._issue(lane, event, self._gate, taken)
            self._gate, self._begun = max(self._gate, self._begun), self.wait(event.module, clock)
            return self._begun
        if self._phase != "backward":
            self._gate = clock
        self._phase = phase
        if self._pending:
            clock = self._gate = max(clock, *self._pending.values())
            self._pending.clear()
        self._issue(lane, event, self._gate, taken)
        return clock

    def reduce(self, event: Event, clock: float, taken: float) -> float:
        """Sum gradients over the shards or over the replicas; when compute goes on."""
        self._phase = "backward"
        lane, clock = _lane(event), self.wait(event.module, clock)
        if event.collective.submesh == "dp_replicate":
            self._last = self.lanes.add(lane, max(clock, self._reduced), event, taken)
            return clock
        clock = max(clock, self._reduced)
        self._reduced = self.lanes.add(lane, clock, event, taken)
        self._last = max(self._last, self._reduced)
        return clock

    def wait(self, module: str, clock: float) -> float:
        """When the parameters of ``module`` are there."""
        return max(clock, self._pending.pop(self._unit(module), 0.0))

    def finish(self, clock: float) -> float:
        """When every reduction is through."""
        return max(clock, self._last)

    def _issue(self, lane: str, event: Event, earliest: float, taken: float) -> None:
        self._units.add(event.module)
        self._pending[event.module] = self.lanes.add(lane, earliest, event, taken)

    def _unit(self, module: str) -> str:
        """The innermost unit that has ``module``; the model is one."""
        while module and module not in self._units:
            module = module.rpartition(".")[0]
        return module


def _lane(event: Event) -> str:
    return f"{event.collective.submesh} {event.collective.operation}"


def _is_sharding(event: Event) -> bool:
    collective = event.collective
    if collective.phase not in ("forward", "backward"):
        return False
    reduces = collective.operation in ("reduce_scatter", "all_reduce") and collective.phase == "backward"
    return (collective.submesh == "dp_shard" and (reduces or collective.operation == "all_gather")) or (
        collective.submesh == "dp_replicate" and reduces
    )


class _Rank:
    def __init__(self, mesh: MeshSpec, pp: int, trace: RankTrace, flops_per_second: float, seconds: Seconds):
        self.pp = pp
        self.clock = 0.0
        """When compute is free."""
        self._mesh, self._rate, self._seconds = mesh, flops_per_second, seconds
        self._steps = _steps(trace)
        self._next = 0
        self._lanes = _Lanes(pp)
        self._sharding = _Sharding(self._lanes, mesh.degree("pp") > 1)
        self._routes: Counter[Route] = Counter()
        """How many messages of each have been received."""
        self._received: dict[int, tuple[Route, int]] = {}
        """By the number of the event: how many came before on its route."""

    @property
    def done(self) -> bool:
        return self._next == len(self._steps)

    @property
    def slices(self) -> list[Slice]:
        return self._lanes.slices

    def advance(self, arrivals: Arrivals) -> bool:
        """Go on until something has to arrive first; whether there was anything to do."""
        first = self._next
        while not self.done:
            step = self._steps[self._next]
            if isinstance(step, Taken):
                route, place = self._received[step.number]
                if place >= len(arrivals[route]):
                    break
                self.clock = max(self.clock, arrivals[route][place])
            elif isinstance(step, Work):
                self._compute(step)
            else:
                self._issue(step, arrivals)
            self._next += 1
        return self._next > first

    def _compute(self, work: Work) -> None:
        start = self._sharding.wait(work.block, self.clock)
        taken = work.flops / self._rate
        self.slices.append(Slice(self.pp, COMPUTE, f"{work.phase} {work.block}".rstrip(), start, taken))
        self.clock = start + taken

    def _issue(self, event: Event, arrivals: Arrivals) -> None:
        collective = event.collective
        phase, taken = collective.phase, self._seconds(collective)
        if collective.operation == "recv":
            route = self._coordinate(event), self.pp, phase
            self._received[event.number] = route, self._routes[route]
            self._routes[route] += 1
        elif collective.operation == "send":
            through = self._lanes.add(collective.submesh, self.clock, event, taken)
            arrivals[self.pp, self._coordinate(event), phase].append(through)
        elif _is_sharding(event):
            take = self._sharding.gather if collective.operation == "all_gather" else self._sharding.reduce
            self.clock = take(event, self.clock, taken)
        else:
            if phase == "optimizer":
                self.clock = self._sharding.finish(self.clock)
            start = self._sharding.wait(event.module, self.clock)
            self.clock = self._lanes.add(collective.submesh, start, event, taken)

    def _coordinate(self, event: Event) -> int:
        assert event.peer is not None, "sends and receives have a peer"
        return self._mesh.coordinate(event.peer)["pp"]


def _steps(trace: RankTrace) -> list[Event | Work | Taken]:
    """All that a rank does, in the order of its program."""
    works, taken, found = deque(trace.works), deque(trace.ledger.taken), list[Event | Work | Taken]()
    many = len(taken)

    def before(index: int) -> None:
        """What comes before the event of that number."""
        while works and works[0].after <= index:
            while many - len(taken) < works[0].taken:
                found.append(taken.popleft())
            found.append(works.popleft())
        while taken and taken[0].after <= index:
            found.append(taken.popleft())

    for index, event in enumerate(trace.ledger.events):
        before(index)
        if not event.once:
            found.append(event)
    before(len(trace.ledger.events))
    return found


def _is_trace(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix.lower() == ".json" and file.read(len(_BEGINNING)) == _BEGINNING


_BEGINNING = b'{"traceEvents"'
TRACE = Kind("a timeline that koushi wrote", "trace.json", _is_trace)


def write(path: Path, mesh: MeshSpec, slices: Sequence[Slice]) -> None:
    """As a Chrome trace, which Perfetto and chrome://tracing open; times are microseconds.

    Raises KoushiError where ``path`` cannot be written.
    """
    records = {"traceEvents": list(_records(mesh, slices)), "displayTimeUnit": "ms"}
    write_text(path, json.dumps(records), TRACE)


def _records(mesh: MeshSpec, slices: Sequence[Slice]) -> Iterator[Mapping[str, Any]]:
    order = (COMPUTE, *reversed(mesh.names))
    lanes = sorted({one.lane for one in slices}, key=lambda lane: (order.index(re.split("[, ]", lane)[0]), lane))
    for pp in sorted({one.pp for one in slices}):
        yield {"ph": "M", "name": "process_name", "pid": pp, "args": {"name": f"pp={pp}"}}
        for number, lane in enumerate(lanes):
            yield {"ph": "M", "name": "thread_name", "pid": pp, "tid": number, "args": {"name": lane}}
    for one in slices:
        record: dict[str, Any] = {
            "ph": "X", "name": one.name, "cat": one.lane, "pid": one.pp, "tid": lanes.index(one.lane),
            "ts": one.start * 1e6, "dur": one.seconds * 1e6,
        }  # fmt: skip
        if one.event is not None:
            collective = one.event.collective
            record["args"] = {
                "bytes": collective.bytes, "dtype": collective.dtype, "phase": collective.phase,
                "line": str(one.event.site),
            }  # fmt: skip
        yield record
