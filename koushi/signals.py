"""Signals that ask this process to end. The first may raise; what a later one raised could strike while the first is
being handled, be told with a traceback, and leave threads that are waited for and that nobody tells to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_came: list[int] = []
"""Since the innermost ``heard`` began."""


def not_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """``numbers`` without the SIGHUP that ``nohup`` has this process ignore."""
    return [one for one in numbers if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


@contextmanager
def heard(
    numbers: Sequence[signal.Signals], first: Callable[[signal.Signals], None], again: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Inside, the first of ``numbers`` that comes calls ``first``, which may raise, and each that comes later calls
    ``again``, which must not. What came inside has come outside too.

    Outside the main thread, in which alone Python hears signals, nothing is heard.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        _came.append(number)
        (first if len(_came) == 1 else again)(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in not_ignored(numbers)}
    _came.clear()
    try:
        for number in before:
            signal.signal(number, hear)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def no_longer_raised() -> None:
    """Inside ``heard``: whatever comes from here on calls ``again``."""
    _came.append(0)
