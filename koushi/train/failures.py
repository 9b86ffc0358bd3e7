"""What each rank leaves behind when it fails, and which failure came first.

A rank whose worker raised writes a report into a folder the parent made. A rank that died in native
code or by a signal leaves none, only its exit code. When one rank dies, its peers soon fail too, for
want of a connection: those are consequences, and are counted but not shown.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError

from koushi.errors import KoushiError
from koushi.mesh import MeshSpec
from koushi.output import reader_gone
from koushi.train.inquiry import Finding
from koushi.train.open_files import out_of_files

LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "connection closed",
    "pair closure",
    "remote process exited",
    "timed out",
)
"""What gloo, NCCL and the store say when a rank they talk to has gone; compared in lower case."""

FIRST_END = "first-end.json"

SIGNALS_IN_WORDS = {
    "SIGKILL": "killed from outside, or by the system for want of memory",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or shared memory ran out",
    "SIGABRT": "native code gave up; its reason is above",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "an instruction this processor does not have",
    "SIGTERM": "asked to end from outside",
}


@dataclass(frozen=True)
class Report:
    """One rank's own account of its failure."""

    rank: int
    time: float
    """Of the machine's monotonic clock, which its processes share."""
    headline: str
    details: str
    """The traceback; empty where the headline says it all."""
    consequence: bool
    """Whether it failed because another rank had gone."""
    of_all: bool = False
    """Whether it tells of the whole world, not of this rank alone: what a collective that timed out waited for."""


def lost_peer(error: BaseException) -> bool:
    """Whether ``error``, or one that led to it, says that another rank has gone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (DistNetworkError, DistStoreError)):
            return True
        if isinstance(cause, RuntimeError) and any(words in str(cause).lower() for words in LOST_PEER):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def report(rank: int, error: BaseException) -> Report:
    """The account of ``error``, caught one frame below the worker."""
    if isinstance(error, KoushiError):
        headline, details = str(error), ""
    elif isinstance(error, BrokenPipeError) and reader_gone():
        headline, details = "nothing reads the run's output any more", ""
    elif out := out_of_files(error):
        headline, details = out, ""
    else:
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        details = "".join(traceback.format_exception(error.with_traceback(inner))).rstrip()
        headline = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Report(rank, time.monotonic(), headline, details, lost_peer(error))


def stuck_report(rank: int, finding: Finding) -> Report:
    """The account of a collective that timed out on ``rank``."""
    return Report(rank, time.monotonic(), finding.headline, finding.details, consequence=False, of_all=True)


def write_report(folder: Path, account: Report) -> None:
    """Leave ``account`` in ``folder``, whole or not at all."""
    folder.mkdir(exist_ok=True)
    draft = folder / f"{account.rank}.draft"
    draft.write_text(json.dumps(asdict(account)), encoding="utf-8")
    os.replace(draft, folder / f"{account.rank}.json")


def read_reports(folder: Path) -> list[Report]:
    """Every report in ``folder``, earliest first."""
    found = [Report(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda account: account.time)


def write_first_end(folder: Path, rank: int, code: int) -> None:
    """Leave in ``folder``, which is a world's, that ``rank`` has ended with ``code`` before any other of this start.

    Where there is no room, the restart's line lacks it; the failure itself is told from elsewhere.
    """
    draft = folder / f"{FIRST_END}.draft"
    with suppress(OSError):
        draft.write_text(json.dumps([rank, code]), encoding="utf-8")
        os.replace(draft, folder / FIRST_END)


def restart_reason(mesh: MeshSpec, folder: Path, attempt: int) -> str:
    """The first failure of start ``attempt`` of the world of ``folder``, in one line; for its successor to ask once."""
    path = folder / FIRST_END
    if not path.exists():
        return "no rank was seen to end"
    rank, code = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()  # were the next start to end unseen, this one must not be told again
    return failure_text(mesh, read_reports(folder / str(attempt)), rank, code).splitlines()[0]


def _first_line(mesh: MeshSpec, account: Report) -> str:
    if account.of_all:
        return account.headline
    return f"rank {account.rank} ({mesh.describe(account.rank)}) failed: {account.headline}"


def exit_text(code: int) -> str:
    """An exit code as ``multiprocessing`` gives it, in words: negative is a signal."""
    if code >= 0:
        return f"exited with code {code} without an exception"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"died by signal {-code}"
    words = SIGNALS_IN_WORDS.get(name)
    return f"died by {name} ({words})" if words else f"died by {name}"


def failure_text(mesh: MeshSpec, reports: Sequence[Report], noticed_rank: int, noticed_code: int) -> str:
    """The first failure in full, then how many others there were.

    ``noticed_rank`` ended with ``noticed_code`` before any other was told to end. Without a report of its
    own it is the first failure unless a report tells of one that no lost peer explains.
    """
    causes = [account for account in reports if not account.consequence]
    reported = {account.rank for account in reports}
    if causes or noticed_rank in reported:
        first = (causes or list(reports))[0]
        if first.of_all:
            return f"{first.headline}\n{first.details}"
        rank, headline, details = first.rank, _first_line(mesh, first), first.details
    else:
        rank, details = noticed_rank, ""
        headline = f"rank {rank} ({mesh.describe(rank)}) {exit_text(noticed_code)}"
    lines = [headline]
    if details:
        lines.append(details)
    others = len((reported | {noticed_rank}) - {rank})
    if others:
        lines.append(f"{others} other {'rank' if others == 1 else 'ranks'} failed after it")
    return "\n".join(lines)
