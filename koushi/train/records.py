"""Reading what the ranks of this machine have noted in their books."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from koushi.parallel.arrivals import (
    ASK,
    CALL,
    CHANNEL_SIZE,
    FILE_SIZE,
    FINISHED,
    HEAD,
    NAME,
    OPERATIONS,
    STARTED,
    WAITING,
)


@dataclass(frozen=True)
class Call:
    """One call on a channel."""

    count: int
    """From 1; ranks take part in the same call when they have the same count."""
    operation: str
    size: int
    """Bytes."""
    age: float
    """Seconds since it started, or finished."""
    step: int
    """Of training, from 1, in which it did; 0 before the first."""


@dataclass(frozen=True)
class Channel:
    """What a rank has done on one channel."""

    submesh: str
    group: str
    """torch's name of the group."""
    peer: int | None
    """The other rank of the world, for messages."""
    outward: bool
    """Whether messages go to ``peer``."""
    started: Call
    finished: Call | None
    waiting: Call | None
    """The call that the rank waits in, not always the last it started; its age is how long it has waited."""


@dataclass(frozen=True)
class Record:
    """What a rank was doing when its file was read."""

    rank: int
    process: int
    step: int
    """Of training, from 1; 0 before the first."""
    state: str
    """``stopped``, ``gone``, ``there``, or empty where this machine does not tell."""
    channels: tuple[Channel, ...]


def read_books(folder: Path) -> dict[int, Record]:
    """The records of this machine's ranks, by rank."""
    now = time.monotonic()
    found = {}
    for path in folder.iterdir():
        if path.name.isdigit() and path.stat().st_size == FILE_SIZE:
            with path.open("rb") as file:
                found[int(path.name)] = _record(file, now)
    return found


def _record(file: BinaryIO, now: float) -> Record:
    data = file.read(FILE_SIZE)
    process, rank, step, used = HEAD.unpack_from(data)
    channels = [_channel(data, CHANNEL_SIZE * (index + 1), now) for index in range(used)]
    return Record(rank, process, step, process_state(process), tuple(one for one in channels if one is not None))


def _channel(data: bytes, offset: int, now: float) -> Channel | None:
    submesh, group, peer, outward = NAME.unpack_from(data, offset)
    started, finished, waiting = (_call(data, offset + part, now) for part in (STARTED, FINISHED, WAITING))
    if started is None:
        return None
    names = [name.rstrip(b"\0").decode(errors="replace") for name in (submesh, group)]
    return Channel(names[0], names[1], peer if peer >= 0 else None, bool(outward), started, finished, waiting)


def _call(data: bytes, offset: int, now: float) -> Call | None:
    count, operation, size, at, step = CALL.unpack_from(data, offset)
    return Call(count, OPERATIONS[operation], size, now - at, step) if count else None


def process_state(process: int) -> str:
    """As ``Record.state`` has it; Linux tells."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    letter = text.rpartition(")")[2].split()[0]
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "there")


def python_stack(folder: Path, record: Record, patience: float = 1.0) -> list[str]:
    """Where a rank of this machine is in Python, innermost first, as lines for people; [] if it does not answer."""
    path = folder / f"{record.rank}.stack"
    before = path.stat().st_size if path.exists() else None
    if before is None or record.state != "there":
        return []
    os.kill(record.process, ASK)
    end_of_patience = time.monotonic() + patience
    text = ""
    while not text.endswith("\n") and time.monotonic() < end_of_patience:
        time.sleep(0.05)
        text = path.read_text(encoding="utf-8", errors="replace")[before:]
    return [line.strip() for line in text.splitlines() if line.startswith("  File ")]
