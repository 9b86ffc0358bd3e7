"""SIGTERM, from Slurm, Kubernetes or a spot machine: finish the step, save, exit within a grace time."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import final

import torch
import torch.distributed as dist

TERMINATED = 128 + signal.SIGTERM
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

    ``begin_step`` asks the others while the step computes, ``agreed`` has their answer at its end. ``group`` is used
    for nothing else. A process that is still there ``grace`` seconds after its signal ends at once.
    """

    def __init__(self, group: dist.ProcessGroup, grace: float):
        self._group = group
        self._grace = grace
        self._work: dist.Work | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._main = threading.current_thread() is threading.main_thread()
        _requested[0] = False
        if self._main:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def begin_step(self) -> None:
        self._flag.fill_(int(_requested[0]))
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def agreed(self) -> bool:
        """Whether every rank stops after this step."""
        assert self._work is not None, "the step has not begun"
        self._work.wait()
        return bool(self._flag.item())

    def close(self) -> None:
        """Leave SIGTERM to whatever handled it before."""
        if self._main:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not _requested[0]:
            _requested[0] = True
            timer = threading.Timer(self._grace, os._exit, (TERMINATED,))
            timer.daemon = True
            timer.start()
