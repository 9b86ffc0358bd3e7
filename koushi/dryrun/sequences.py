"""Whether the ranks of every group issue the same collectives in the same order: what else would hang."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from koushi.dryrun.findings import Finding, Record, described
from koushi.mesh import MeshSpec
from koushi.parallel.ledger import Event

SIMULATED = 256
"""Ranks at most for which the order over all groups is played through; groups by themselves are always compared."""
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Members:
    """A group's ranks and the events that they take part in together."""

    submesh: str
    ranks: tuple[int, ...]
    records: tuple[Record, ...]

    @cached_property
    def sequences(self) -> list[list[Event]]:
        """What all join in, by rank."""
        return self._of_each(_joins)

    @cached_property
    def messages(self) -> list[list[Event]]:
        """By rank."""
        return self._of_each(lambda event: not event.once and not _joins(event))

    def _of_each(self, chosen: Callable[[Event], bool]) -> list[list[Event]]:
        """By rank; ranks that run alike have one list."""
        found = {
            id(record): [
                event for event in record.ledger.events if event.collective.submesh == self.submesh and chosen(event)
            ]
            for record in {id(record): record for record in self.records}.values()
        }
        return [found[id(record)] for record in self.records]

    @property
    def places(self) -> Iterator[list[tuple[Record, int]]]:
        """Event by event, what each rank says of it; as far as the ranks agree on how many there are."""
        for events in zip(*self.sequences, strict=False):
            yield [(record, event.number) for record, event in zip(self.records, events, strict=True)]


def _joins(event: Event) -> bool:
    """Whether all ranks of the group take part."""
    return event.collective.operation not in _MESSAGES and not event.once


def members(mesh: MeshSpec, everyone: Mapping[int, Record]) -> list[Members]:
    """Every group of every sub-mesh in the ledgers, of groups whose ranks run alike only one."""
    distinct = {id(record): record for record in everyone.values()}
    names = {
        event.collective.submesh: event.ranks
        for record in distinct.values()
        for event in record.ledger.events
        if len(event.ranks) > 1
    }
    found: dict[tuple[str, tuple[int, ...]], Members] = {}
    for name, ranks in names.items():
        groups = (ranks,) if name.startswith("ranks") else mesh.groups(*name.split(","))
        for group in groups:
            held = tuple(everyone[rank] for rank in group)
            found.setdefault((name, tuple(map(id, held))), Members(name, group, held))
    return list(found.values())


def hangs(mesh: MeshSpec, everyone: Mapping[int, Record], groups: Sequence[Members]) -> list[Finding]:
    """Where ranks of a group would wait for each other for ever, or take each other's data for their own."""
    found = [finding for group in groups for finding in (*_apart(group), *_unmatched(mesh, group))]
    if not found and mesh.world_size <= SIMULATED:
        found += _stuck(mesh, everyone)
    return found


def _kind(event: Event) -> tuple[object, ...]:
    one = event.collective
    return one.operation, one.dtype, one.bytes, event.reduction


def _said(event: Event | None) -> str:
    return "nothing more" if event is None else described(event)


def _apart(group: Members) -> Iterator[Finding]:
    """The first place at which a rank issues another collective than the group's first rank."""
    first, *others = group.sequences
    for rank, sequence in zip(group.ranks[1:], others, strict=True):
        if sequence is first:
            continue
        for index, (here, there) in enumerate(zip_longest(first, sequence)):
            if here is not None and there is not None and _kind(here) == _kind(there):
                continue
            event = here or there
            assert event is not None, "one of the two sequences goes on"
            what = f"as number {index + 1} rank {group.ranks[0]} issues {_said(here)}, but rank {rank} {_said(there)}"
            yield Finding("different order", event, group.ranks, what, "Ranks of a group must issue the same.")
            break


def _unmatched(mesh: MeshSpec, group: Members) -> Iterator[Finding]:
    """Messages that are sent and not received, or otherwise."""
    if group.submesh.startswith("ranks"):
        return
    dims = group.submesh.split(",")
    sent: dict[tuple[int, int], list[Event]] = defaultdict(list)
    received: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for rank, messages in zip(group.ranks, group.messages, strict=True):
        for event in messages:
            assert event.peer is not None, "a message has two ends"
            peer = group.ranks[mesh.index(event.peer, *dims)]
            if event.collective.operation == "send":
                sent[rank, peer].append(event)
            else:
                received[peer, rank].append(event)
    for source, target in sorted(sent.keys() | received.keys()):
        for index, (out, back) in enumerate(zip_longest(sent[source, target], received[source, target])):
            if out is not None and back is not None and _kind(out)[1:] == _kind(back)[1:]:
                continue
            event = out or back
            assert event is not None, "one of the two sequences goes on"
            what = f"of message {index + 1} from rank {source} to {target} sent is {_said(out)}, awaited {_said(back)}"
            yield Finding("unmatched message", event, (source, target), what, "Both ends must agree on every message.")
            break


def _stuck(mesh: MeshSpec, everyone: Mapping[int, Record]) -> Iterator[Finding]:
    """Play the step through: a collective waits for its whole group, messages between two of them for all that
    are awaited there; sending waits for nobody."""
    waiting = {rank: deque(_steps(mesh, rank, record)) for rank, record in everyone.items()}
    posted: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    begun: dict[int, bool] = dict.fromkeys(waiting, False)
    moved = True
    while moved:
        moved = False
        for rank, steps in waiting.items():
            while steps:
                step = steps[0]
                if not begun[rank]:
                    posted.update(step.sends)
                    begun[rank] = moved = True
                if step.group is None:
                    if any(taken[pair] + count > posted[pair] for pair, count in step.awaits.items()):
                        break
                    taken.update(step.awaits)
                    _advance([rank], waiting, begun)
                elif all(waiting[peer] and waiting[peer][0].group == step.group for peer in step.group[1]):
                    _advance(step.group[1], waiting, begun)
                else:
                    break
                moved = True
    stuck = {rank: steps[0].event for rank, steps in waiting.items() if steps}
    if stuck:
        rank, event = next(iter(stuck.items()))
        others = "; ".join(f"rank {other} at {described(at)}" for other, at in list(stuck.items())[1:4])
        yield Finding("stuck", event, tuple(stuck), f"ranks wait for each other for ever: {others}", "Use one order.")


@dataclass(frozen=True)
class _Step:
    """A collective, or the messages between two collectives."""

    event: Event
    group: tuple[str, tuple[int, ...]] | None
    sends: Counter[tuple[int, int]]
    awaits: Counter[tuple[int, int]]


def _steps(mesh: MeshSpec, rank: int, record: Record) -> Iterator[_Step]:
    """Of ``rank``, for which another may have been recorded."""
    messages: list[Event] = []
    for event in record.ledger.events:
        if event.once or len(event.ranks) == 1:
            continue
        if not _joins(event):
            messages.append(event)
            continue
        if messages:
            yield _exchange(mesh, rank, messages)
            messages = []
        name = event.collective.submesh
        group = event.ranks if name.startswith("ranks") else mesh.group(rank, *name.split(","))
        yield _Step(event, (name, group), Counter(), Counter())
    if messages:
        yield _exchange(mesh, rank, messages)


def _exchange(mesh: MeshSpec, rank: int, messages: Sequence[Event]) -> _Step:
    sends: Counter[tuple[int, int]] = Counter()
    awaits: Counter[tuple[int, int]] = Counter()
    for event in messages:
        assert event.peer is not None, "a message has two ends"
        dims = event.collective.submesh.split(",")
        peer = mesh.group(rank, *dims)[mesh.index(event.peer, *dims)]
        if event.collective.operation == "send":
            sends[rank, peer] += 1
        else:
            awaits[peer, rank] += 1
    return _Step(messages[0], None, sends, awaits)


def _advance(ranks: Sequence[int], waiting: Mapping[int, deque[_Step]], begun: dict[int, bool]) -> None:
    for rank in ranks:
        waiting[rank].popleft()
        begun[rank] = False
