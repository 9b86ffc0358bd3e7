"""Asking, when a collective has timed out, what all ranks are in: those of this machine by their books, the
others through the store that brought the ranks together.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from koushi.mesh import MeshSpec
from koushi.parallel.arrivals import START, book_folder
from koushi.train.records import Call, Channel, Record, python_stack, read_books
from koushi.train.stuck import Diagnosis, diagnose

PATIENCE = 3.0
"""Seconds to wait for what the ranks of other machines have to say; their collectives time out at about the same
time as ours."""
STACK_LINES = 4
"""Innermost frames of Python that are told of a rank."""


@dataclass(frozen=True)
class Finding:
    """A diagnosis in words, and the processes of this machine that are at fault."""

    headline: str
    details: str
    processes: tuple[int, ...]


def timed_out(error: BaseException) -> bool:
    """Whether ``error``, or one that led to it, says that a collective took too long."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, RuntimeError) and ("timed out" in text or "timeout" in text):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def inquire(mesh: MeshSpec) -> Finding | None:
    """Find out what holds the ranks up; None where this process keeps no book or no rank waits for another."""
    folder = book_folder()
    if folder is None:
        return None
    here = read_books(folder)
    records = here if len(here) == mesh.world_size else here | _from_other_machines(here, mesh.world_size)
    found = diagnose(mesh, records)
    return _finding(found, here, folder) if found is not None else None


def _finding(found: Diagnosis, here: dict[int, Record], folder: Path) -> Finding:
    lines = [f"  {line}" for line in found.lines]
    local = [here[rank] for rank in found.culprits if rank in here]
    for record in local:
        stack = python_stack(folder, record)
        if stack:
            lines += [f"  rank {record.rank} is in Python at", *(f"    {line}" for line in stack[:STACK_LINES])]
    return Finding(
        found.headline, "\n".join(lines), tuple(record.process for record in local if record.state != "gone")
    )


def inquest(mesh: MeshSpec, folder: Path) -> Finding | None:
    """As ``inquire``, of ranks that have all ended, from the books they left in ``folder``."""
    if not folder.is_dir():
        return None
    found = diagnose(mesh, {rank: replace(record, state="") for rank, record in read_books(folder).items()})
    return Finding(found.headline, "\n".join(f"  {line}" for line in found.lines), ()) if found is not None else None


def end_processes(finding: Finding) -> None:
    """Kill the processes at fault, which would not hear a polite signal, so that the run need not wait for them."""
    for process in finding.processes:
        os.kill(process, signal.SIGKILL)


def _from_other_machines(here: dict[int, Record], world: int) -> dict[int, Record]:
    """What the other machines' ranks have told, after telling them of ``here``."""
    start = os.environ.get(START, "0")

    def key(rank: int) -> str:
        return f"koushi-stuck/{start}/{rank}"

    found = {}
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=PATIENCE),
        )
        for rank, record in here.items():
            store.set(key(rank), json.dumps(asdict(record)))
        left = set(range(world)) - set(here)
        end = time.monotonic() + PATIENCE
        while left and time.monotonic() < end:
            for rank in [rank for rank in left if store.check([key(rank)])]:
                found[rank] = record_from(json.loads(store.get(key(rank))))
                left.remove(rank)
            time.sleep(0.1)
    except (dist.DistStoreError, dist.DistNetworkError):
        return found  # the store is out of reach: those ranks are told as unknown
    return found


def record_from(fields: dict[str, Any]) -> Record:
    def call(one: dict[str, Any] | None) -> Any:
        return Call(**one) if one is not None else None

    channels = [
        Channel(**channel | {name: call(channel[name]) for name in ("started", "finished", "waiting")})
        for channel in fields["channels"]
    ]
    return Record(**fields | {"channels": tuple(channels)})
