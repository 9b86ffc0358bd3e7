"""Why a collective does not end: which ranks have not come to it, and what they are in instead.

Works on the records of what each rank started, finished and waits in (``records.py``). A rank that waits
for one that waits itself is not at fault; the one at the end of the chain is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from koushi.mesh import MeshSpec
from koushi.parallel.arrivals import ALL_RANKS
from koushi.train.records import Call, Channel, Record
from koushi.units import bytes_text

Records = Mapping[int, Record]

SHOWN = 16
"""Of a longer list of ranks only so many are told."""


@dataclass(frozen=True)
class Diagnosis:
    headline: str
    lines: tuple[str, ...]
    """One for each rank of the group, and who else waits."""
    culprits: tuple[int, ...]
    """Ranks that others wait for and that wait for nobody themselves."""


@dataclass(frozen=True)
class Wait:
    """One rank's wait in one call."""

    rank: int
    channel: Channel
    call: Call
    members: tuple[int, ...]
    """All ranks that the call needs."""
    missing: tuple[int, ...]
    """Those that have not come to it, are stopped or gone, or of which nothing is known."""


def diagnose(mesh: MeshSpec, records: Records) -> Diagnosis | None:
    """What holds the ranks up; None where no rank waits for another."""
    waits = [wait for record in records.values() for wait in _waits(mesh, records, record)]
    waits.sort(key=lambda wait: -wait.call.age)
    stopped = [rank for rank, record in records.items() if record.state == "stopped"]
    if not stopped:
        for wait in waits:
            apart = _gone_apart(mesh, records, wait)
            if apart is not None:
                return Diagnosis(apart, _lines(mesh, records, wait, waits), ())
    waiting = {wait.rank for wait in waits if wait.missing and wait.rank not in stopped}
    for wait in waits:
        culprits = tuple(rank for rank in wait.missing if rank not in waiting)
        if culprits:
            headline = f"{_waited(mesh, wait)}: {_absent(mesh, records, culprits, wait)}"
            return Diagnosis(headline, _lines(mesh, records, wait, waits), culprits)
    for wait in waits:
        if wait.missing:
            headline = (
                f"{_waited(mesh, wait)}: {_absent(mesh, records, wait.missing, wait)}; the ranks wait for "
                "each other, each in another collective: their programs have gone apart"
            )
            return Diagnosis(headline, _lines(mesh, records, wait, waits), ())
    if waits:
        headline = f"{_waited(mesh, waits[0])}: all its ranks have come to it, but what they send does not arrive"
        return Diagnosis(headline, _lines(mesh, records, waits[0], waits), ())
    return None


def _waits(mesh: MeshSpec, records: Records, record: Record) -> Iterator[Wait]:
    """Every call that the rank of ``record`` waits in.

    On CUDA a rank does not wait for what it has issued: there, what some have issued and others have not.
    """
    anyone_waits = any(channel.waiting for other in records.values() for channel in other.channels)
    for channel in record.channels:
        call = channel.waiting if anyone_waits else channel.started
        if call is None:
            continue
        members = _members(mesh, records, record.rank, channel)
        missing = tuple(
            rank for rank in members if rank != record.rank and not _came(records.get(rank), record.rank, channel, call)
        )
        if missing or anyone_waits:
            yield Wait(record.rank, channel, call, members, missing)


def _members(mesh: MeshSpec, records: Records, rank: int, channel: Channel) -> tuple[int, ...]:
    if channel.peer is not None:
        return tuple(sorted((rank, channel.peer)))
    if channel.submesh == ALL_RANKS:
        return tuple(range(mesh.world_size))
    return mesh.group(rank, *channel.submesh.split(","))


def _came(record: Record | None, rank: int, channel: Channel, call: Call) -> bool:
    """Whether the rank of ``record`` has come to what ``rank`` has as ``call`` on ``channel``, and is alive."""
    if record is None or record.state in ("stopped", "gone"):
        return False
    theirs = _same_channel(record, rank, channel)
    return theirs is not None and theirs.started.count >= call.count


def _same_channel(record: Record, rank: int, channel: Channel) -> Channel | None:
    """The other end of a channel of ``rank``, as the rank of ``record`` has it."""
    for theirs in record.channels:
        if theirs.group != channel.group:
            continue
        if channel.peer is None and theirs.peer is None:
            return theirs
        if channel.peer == record.rank and theirs.peer == rank and theirs.outward != channel.outward:
            return theirs
    return None


def _gone_apart(mesh: MeshSpec, records: Records, wait: Wait) -> str | None:
    """Says so where another rank had something else as the very call that ``wait`` is about."""
    if wait.channel.peer is not None:
        return None
    for rank in wait.members:
        theirs = _same_channel(records[rank], wait.rank, wait.channel) if rank in records else None
        if rank == wait.rank or theirs is None:
            continue
        for other in (theirs.started, theirs.waiting, theirs.finished):
            if other is None or other.count != wait.call.count:
                continue
            if (other.operation, other.size) != (wait.call.operation, wait.call.size):
                return (
                    f"the ranks {_where(mesh, wait)} have gone apart: as call {other.count} of the group "
                    f"{_rank(mesh, wait.rank)} has {_call(wait.call)}, {_rank(mesh, rank)} has {_call(other)}; one of "
                    "them has left out a collective, or made one too many"
                )
    return None


def _waited(mesh: MeshSpec, wait: Wait) -> str:
    of = ""
    if wait.channel.peer is not None:
        of = f" {'to' if wait.channel.outward else 'from'} rank {wait.channel.peer}"
    when = f" in step {wait.call.step}" if wait.call.step else ""
    return f"{_call(wait.call)}{of} {_where(mesh, wait)} waited {_seconds(wait.call.age)}{when}"


def _absent(mesh: MeshSpec, records: Records, ranks: Sequence[int], wait: Wait) -> str:
    """Who has not come, and for a single rank, what it is in instead."""
    names = [_rank(mesh, rank) for rank in ranks[:SHOWN]]
    if len(ranks) > SHOWN:
        names.append(f"{len(ranks) - SHOWN} more")
    if len(ranks) > 1:
        return f"{', '.join(names[:-1])} and {names[-1]} have not arrived"
    record = records.get(ranks[0])
    if record is None:
        return f"{names[0]} has not arrived; of what it last did nothing reached the others"
    arrived = "has not arrived"
    theirs = _same_channel(record, wait.rank, wait.channel)
    if theirs is not None and theirs.started.count >= wait.call.count:
        arrived = "has come to it but takes no part"
    words = {"stopped": "; its process is stopped (SIGSTOP, or a debugger)", "gone": "; its process is gone"}
    return f"{names[0]} {arrived}{words.get(record.state, '')}; it {_doing(record)}"


def _lines(mesh: MeshSpec, records: Records, wait: Wait, waits: Sequence[Wait]) -> tuple[str, ...]:
    lines = []
    for rank in wait.members[:SHOWN]:
        record = records.get(rank)
        lines.append(f"{_rank(mesh, rank)} {_doing(record) if record else 'told nothing'}")
    if len(wait.members) > SHOWN:
        lines.append(f"and {len(wait.members) - SHOWN} more ranks")
    others = sorted({other.rank for other in waits if other.missing} - set(wait.members))
    if others:
        text = " ".join(map(str, others[:SHOWN])) + (" ..." if len(others) > SHOWN else "")
        lines.append(f"waiting too, for these or for one another: {'rank' if len(others) == 1 else 'ranks'} {text}")
    return tuple(lines)


def _doing(record: Record) -> str:
    """What a rank waits in and what it last finished."""
    waiting = [channel for channel in record.channels if channel.waiting]
    finished = [channel for channel in record.channels if channel.finished]
    parts = []
    if waiting:
        channel, call = max(((one, one.waiting) for one in waiting if one.waiting), key=lambda pair: pair[1].age)
        parts.append(f"waits in {_call(call)} on {channel.submesh}{_peer(channel)} for {_seconds(call.age)}")
    if finished:
        channel, call = min(((one, one.finished) for one in finished if one.finished), key=lambda pair: pair[1].age)
        step = f", in step {call.step}" if call.step else ""
        parts.append(
            f"last finished {_call(call)} on {channel.submesh}{_peer(channel)}, {_seconds(call.age)} ago{step}"
        )
    return "; it ".join(parts) or "has finished no collective yet"


def _peer(channel: Channel) -> str:
    if channel.peer is None:
        return ""
    return f" {'to' if channel.outward else 'from'} rank {channel.peer}"


def _where(mesh: MeshSpec, wait: Wait) -> str:
    """``on dp_shard (ranks 0 2, pp=0 tp=0)``: the group, and the coordinates its ranks share."""
    if wait.channel.submesh == ALL_RANKS:
        return "on all ranks"
    ranks = " ".join(map(str, wait.members[:SHOWN])) + (" ..." if len(wait.members) > SHOWN else "")
    along = wait.channel.submesh.split(",")
    coordinate = mesh.coordinate(wait.rank)
    shared = [f"{name}={coordinate[name]}" for name in mesh.names if name not in along and mesh.degree(name) > 1]
    return f"on {wait.channel.submesh} (ranks {ranks}{', ' + ' '.join(shared) if shared else ''})"


def _call(call: Call) -> str:
    article = "an" if call.operation[0] in "aeiou" else "a"
    return f"{article} {call.operation}{f' of {bytes_text(call.size)}' if call.size else ''}"


def _rank(mesh: MeshSpec, rank: int) -> str:
    return f"rank {rank} ({mesh.describe(rank)})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"
