"""Other processes, as tests wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE = 60


def gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"in {PATIENCE} s not: {what}"
        time.sleep(0.05)
