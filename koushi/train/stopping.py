"""SIGTERM, from Slurm, Kubernetes or a spot machine: finish the step, save, exit within a grace time."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import final

import torch
import torch.distributed as dist

TERMINATED = 128 + signal.SIGTERM
LONG_STEP = 1.0
"""Seconds, beside which asking every rank once more is nothing."""
LAST_WORDS = 0.25
"""Seconds before the end of the grace time in which a process says that it ends: its peers fail as soon as it has gone,
and a launcher kills it."""
_requested = [False]
"""Whether this process has received SIGTERM. Not a threading.Event: a handler that sets one which the main thread
is just waiting for would wait for itself."""


def requested() -> bool:
    """Whether this process has been asked to end, since it last began to listen."""
    return _requested[0]


def sleep_unless_requested(seconds: float) -> None:
    """Sleep, but not on once this process is asked to end."""
    end = time.monotonic() + seconds
    while not _requested[0] and time.monotonic() < end:
        time.sleep(0.05)


@final
class StopRequest:
    """Whether SIGTERM has reached any rank of ``group``: all agree on the step after which they stop.

    ``begin_step`` asks the others while the step computes, ``agreed`` has their answer at its end; where steps are long
    it asks again, so that no other step follows. ``group`` is used for nothing else. A process that is still there
    ``grace`` seconds after its signal ends, having said what ``too_late`` returns, if that is anything.
    """

    def __init__(self, group: dist.ProcessGroup, grace: float, too_late: Callable[[], str]):
        self._group = group
        self._grace = grace
        self._too_late = too_late
        self._work: dist.Work | None = None
        self._asked = torch.zeros(2, dtype=torch.float64)
        """Of the rank that has most: whether it has the signal, and how many seconds its last step took."""
        self._begun, self._seconds = 0.0, math.inf
        self._main = threading.current_thread() is threading.main_thread()
        self._closed = threading.Event()
        _requested[0] = False
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._note)
            ear, self._bell = os.pipe()
            os.set_blocking(self._bell, False)
            self._bell_before = signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
            threading.Thread(target=self._count_down, args=(ear,), daemon=True).start()

    def begin_step(self) -> None:
        self._begun = time.monotonic()
        self._work = self._ask()

    def agreed(self) -> bool:
        """Whether every rank stops after this step."""
        assert self._work is not None, "the step has not begun"
        self._work.wait()
        asked, longest = self._asked.tolist()
        self._seconds = time.monotonic() - self._begun
        if not asked and longest > LONG_STEP:
            self._ask().wait()
        return bool(self._asked[0].item())

    def close(self) -> None:
        """Leave SIGTERM to whatever handled it before; a countdown that runs is stopped."""
        if self._main and not self._closed.is_set():
            self._closed.set()
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(self._bell_before)
            os.close(self._bell)

    def _ask(self) -> dist.Work:
        self._asked[0], self._asked[1] = float(_requested[0]), self._seconds
        work: dist.Work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return work

    def _note(self, number: int, frame: FrameType | None) -> None:
        _requested[0] = True

    def _count_down(self, ear: int) -> None:
        """From the moment of the signal, on a thread: ``_note`` waits for native code of the main thread to return."""
        with os.fdopen(ear, "rb", buffering=0) as bell:
            heard = bell.read(1)
            while heard and heard[0] != signal.SIGTERM:
                heard = bell.read(1)
            if not heard:  # closed
                return
            _requested[0] = True
            last_words = min(LAST_WORDS, self._grace / 4)
            if self._closed.wait(self._grace - last_words):
                return
            threading.Thread(target=self._end, args=(last_words,), daemon=True).start()
            if text := self._too_late():
                print(text, file=sys.stderr, flush=True)
            self._closed.wait()

    def _end(self, seconds: float) -> None:
        """End this process in ``seconds``, whatever it is in by then."""
        if not self._closed.wait(seconds):
            os._exit(TERMINATED)
