"""The predicted step over time: what each pipeline coordinate computes and sends when, for Perfetto.

One rank of every pipeline coordinate is followed through its ledger. Its compute is one lane, each
sub-mesh another. Collectives of tp hold up compute. Those of dp_shard run beside it: a gather may begin
when the compute before it does, as FSDP fetches one unit ahead, and what follows it waits for it; a
reduce-scatter or all-reduce is waited for by the optimizer alone. What is received is waited for by the
next compute, and arrives when its sender's lane has sent it.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from koushi.dryrun.trace import RankTrace
from koushi.mesh import MeshSpec
from koushi.output import Kind, write_text
from koushi.parallel.ledger import Event
from koushi.traffic import Collective

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
    arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    while any(not rank.done for rank in lanes.values()):
        moved = [rank.advance(arrivals) for rank in lanes.values()]
        if not any(moved):
            # Each waits for something that is sent later: received beforehand, needed by a later compute.
            min((rank for rank in lanes.values() if not rank.done), key=lambda rank: rank.clock).wait_later()
    return [one for rank in lanes.values() for one in rank.slices]


@dataclass
class _Rank:
    mesh: MeshSpec
    pp: int
    trace: RankTrace
    flops_per_second: float
    seconds: Seconds
    clock: float = 0.0
    """When compute is free."""
    done: bool = False
    slices: list[Slice] = field(default_factory=list)
    _next: int = 0
    _computed: int = 0
    """FLOPs done."""
    _began: float = 0.0
    """When the latest compute began."""
    _free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _awaited: deque[int] = field(default_factory=deque)
    """Pipeline coordinates that the next compute waits for something from."""
    _later: bool = False
    _gathered: float = 0.0
    """When the latest gather of parameters is through."""

    def advance(self, arrivals: dict[tuple[int, int], deque[float]]) -> bool:
        """Go on until something has to arrive first; whether there was anything to do."""
        events, before = self.trace.ledger.events, self.trace.flops_before
        first = self._next
        while self._next < len(events):
            event = events[self._next]
            if not self._compute(before[self._next], event, arrivals):
                return self._next > first
            self._issue(event, arrivals)
            self._next += 1
        total = sum(self.trace.flops.values())
        if not self.done and self._compute(total, None, arrivals):
            self.done = True
            return True
        return self._next > first

    def wait_later(self) -> None:
        """Leave what is awaited to a later compute."""
        assert self._awaited, "a rank that waits for nothing goes on by itself"
        self._later = True

    def _compute(self, flops: int, event: Event | None, arrivals: dict[tuple[int, int], deque[float]]) -> bool:
        """Compute up to so many FLOPs; False where something that it needs has not been sent yet."""
        if flops == self._computed:
            return True
        if not self._later:
            while self._awaited:
                sender = self._awaited[0]
                if not arrivals[sender, self.pp]:
                    return False
                self.clock = max(self.clock, arrivals[sender, self.pp].popleft())
                self._awaited.popleft()
        self._later = False
        self._began = max(self.clock, self._gathered)
        taken = (flops - self._computed) / self.flops_per_second
        name = f"{event.collective.phase} {event.module}".rstrip() if event else "compute"
        self.slices.append(Slice(self.pp, COMPUTE, name, self._began, taken))
        self.clock, self._computed = self._began + taken, flops
        return True

    def _issue(self, event: Event, arrivals: dict[tuple[int, int], deque[float]]) -> None:
        collective = event.collective
        if event.once:
            return
        if collective.operation == "recv":
            self._awaited.append(self._coordinate(event))
            return
        lane, taken = collective.submesh, self.seconds(collective)
        if collective.operation == "send":
            start = self._on_lane(lane, self.clock, event, taken)
            arrivals[self.pp, self._coordinate(event)].append(start + taken)
        elif lane == "dp_shard" and collective.operation == "all_gather":
            self._gathered = self._on_lane(lane, self._began, event, taken) + taken
        elif collective.phase == "backward" and lane in ("dp_shard", "dp_replicate"):
            self._on_lane(lane, self.clock, event, taken)
        else:
            if collective.phase == "optimizer":
                self.clock = max([self.clock, *self._free.values()])
            self.clock = self._on_lane(lane, self.clock, event, taken) + taken

    def _on_lane(self, lane: str, earliest: float, event: Event, taken: float) -> float:
        """When it starts; calls of a lane come one after another."""
        start = max(earliest, self._free[lane])
        self._free[lane] = start + taken
        collective = event.collective
        self.slices.append(Slice(self.pp, lane, f"{collective.operation} {event.module}".rstrip(), start, taken, event))
        return start

    def _coordinate(self, event: Event) -> int:
        assert event.peer is not None, "sends and receives have a peer"
        return self.mesh.coordinate(event.peer)["pp"]


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
    lanes = sorted({one.lane for one in slices}, key=lambda lane: order.index(lane.split(",")[0]))
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
