"""Which folder a run takes. No torch."""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Iterator
from pathlib import Path

from koushi.config.schema import Run
from koushi.errors import RunRefused

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
RESOLVED = "config.yaml"
"""The run file with every value filled in."""


def run_folder(run: Run, name: str, continues: bool) -> Path:
    """What ``run.folder`` names; else of ``runs/<name>``, ``runs/<name>-2`` and so on the first free one or, where the
    run ``continues`` and it keeps checkpoints, the last taken one.

    Nothing is made. Raises RunRefused for a named folder whose run this one does not go on with.
    """
    if run.folder is not None:
        folder = Path(run.folder)
        if holds_run(folder) and not (continues and (folder / CHECKPOINTS).is_dir()):
            raise RunRefused(
                f"run.folder {folder} already holds a run{_why_not(folder)}; name another folder, or remove it"
            )
        return folder
    last: Path | None = None
    for folder in folders_of(name):
        if not holds_run(folder) and not is_claimed(folder):
            return last if continues and last is not None and (last / CHECKPOINTS).is_dir() else folder
        last = folder
    raise AssertionError("unreachable: there is always a next number")


def folders_of(name: str) -> Iterator[Path]:
    """``runs/<name>``, ``runs/<name>-2`` and so on without end."""
    for count in itertools.count(1):
        yield RUNS / (name if count == 1 else f"{name}-{count}")


def holds_run(folder: Path) -> bool:
    """Whether a run has written into ``folder``, be it that only its checkpoints were copied there."""
    return contents(folder) != ()


def contents(folder: Path) -> tuple[str, ...]:
    """What a run has left in ``folder``, so far as another run's choice of it hangs on that."""
    checkpoints = (folder / CHECKPOINTS).glob("step-*")
    return (*sorted(one.name for one in checkpoints), *(("metrics",) if (folder / "metrics.jsonl").exists() else ()))


def is_claimed(folder: Path) -> bool:
    """Whether a run is writing into ``folder`` now."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _why_not(folder: Path) -> str:
    if (folder / CHECKPOINTS).is_dir():
        return ", which only run.resume auto goes on with"
    return " without checkpoints"
