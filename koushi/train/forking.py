"""Forking processes of this one, which share its memory: what they must not inherit, and must wait for."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

from koushi.signals import not_ignored

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl (https://man7.org/linux/man-pages/man2/pr_set_pdeathsig.2const.html)."""
START_POLL = 0.0005
"""Seconds between a rank's looks whether all have started, for each rank of the world: as many in all for a large
world as for a small one."""


@contextmanager
def forks() -> Iterator[None]:
    """Inside, processes may be forked; each calls ``as_forked`` first. The thread that forks them outlives them."""
    with _garbage_frozen(), _signals_held():
        yield


def as_forked(parent: int) -> None:
    """The parent's Python handlers would never run while a collective waits: signals end this process, and so does the
    end of ``parent``, however it comes."""
    for number in not_ignored(SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    if not _killed_by_kernel():
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    elif os.getppid() != parent:  # gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_by_kernel() -> bool:
    """Whether the kernel kills this process as soon as the thread that started it is gone, even one that is stopped."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


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
        before = {number: signal.getsignal(number) for number in not_ignored(SIGNALS)}
        for number in before:
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
