"""One run at a time in a folder: a lock that goes with the process that holds it, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from koushi.errors import TrainingError
from koushi.run_folder import LOCK


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make ``folder`` if need be and hold it for this process and those it forks.

    Raises TrainingError where another run holds it or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise TrainingError(f"cannot write into the run's folder: {error}; choose another run.folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(
                f"another run is writing into {folder}; wait for it, or name another run.folder"
            ) from None
        yield
