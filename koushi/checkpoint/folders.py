"""Where a run keeps its checkpoints: ``RUN_FOLDER/checkpoints/step-00000050``. No torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def published(checkpoints: Path) -> list[Path]:
    """The checkpoints in a folder, whole or damaged, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [(step, folder) for folder in checkpoints.iterdir() if (step := step_of(folder)) is not None]
    return [folder for _, folder in sorted(found, reverse=True)]


def to_remove(steps: Iterable[int], keep_last: int, keep_every: int) -> list[int]:
    """The steps whose checkpoints are no longer kept: all but the last ``keep_last`` and multiples of ``keep_every``.

    >>> to_remove([10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    [10, 30]
    """
    ordered = sorted(steps)
    older = ordered[:-keep_last] if keep_last else ordered
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def keep(checkpoints: Path, newest: int, keep_last: int, keep_every: int) -> None:
    """Remove what is no longer kept of the checkpoints up to step ``newest``, which is whole.

    Later ones do not count: they are damaged, and the run has gone back before them. Each is renamed first, so that a
    half-removed one is never taken for whole. Raises OSError.
    """
    found = ((step_of(folder), folder) for folder in published(checkpoints))
    folders = {step: folder for step, folder in found if step is not None and step <= newest}
    for step in to_remove(folders, keep_last, keep_every):
        doomed = folders[step].with_name(f".{folders[step].name}.removed")
        folders[step].rename(doomed)
        shutil.rmtree(doomed)


def clear_leftovers(checkpoints: Path) -> None:
    """Remove what an earlier process left half written or half removed."""
    for suffix in ("partial", "removed"):
        for left in checkpoints.glob(f".step-*.{suffix}"):
            shutil.rmtree(left, ignore_errors=True)
