"""Forking processes of this one, which share its memory: what they must not inherit, and must wait for."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
START_POLL = 0.0005
"""Seconds between a rank's looks whether all have started, for each rank of the world: as many in all for a large
world as for a small one."""


@contextmanager
def forks() -> Iterator[None]:
    """Inside, processes may be forked; each calls ``as_forked`` first."""
    with _garbage_frozen(), _signals_held():
        yield


def as_forked() -> None:
    """The parent's Python handlers would never run while a collective waits: signals end this process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def _garbage_frozen() -> Iterator[None]:
    """Keep forked processes from collecting what this one left: ending a process group whose threads fork did not
    copy crashes or hangs. It also keeps their memory shared."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals wait while a process is being started. What a handler raises in the functions that Python runs around
    a fork, such as logging's, is printed and forgotten, and the run would go on. Blocking signals is not enough: any
    thread may receive one, and the main thread then runs the handler wherever it is."""
    start = ForkProcess.start

    def started(process: BaseProcess) -> None:
        if threading.current_thread() is not threading.main_thread():
            start(process)  # handlers run elsewhere
            return
        came: list[int] = []
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: came.append(number))
        try:
            start(process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for late in came:
                signal.raise_signal(late)

    ForkProcess.start = started  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ForkProcess.start = start  # type: ignore[method-assign]


def await_all(folder: Path, rank: int, world: int) -> None:
    """Return once all ranks of this start exist; one that dies before is elastic's to notice, which then ends the
    others. ``folder`` is new in every start."""
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    everyone = folder / "all"
    if len(os.listdir(folder)) >= world:  # the last to come sees the whole world, and with "all" there more than it
        everyone.touch()
    while not everyone.exists():
        time.sleep(START_POLL * world)
