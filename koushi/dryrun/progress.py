"""How far a dry run is, on a terminal: one line, written over again and again, and gone when the work is done."""

from __future__ import annotations

import sys
import time
from typing import final

from koushi.units import seconds_text

_CLEAR = "\r\x1b[K"


@final
class Progress:
    """Of ``doing`` in steps, of which there may turn out to be more; silent where stderr is no terminal."""

    def __init__(self, doing: str):
        self._doing = doing
        self._began = time.monotonic()
        self._steps = self._done = 0
        self._shown = sys.stderr.isatty()

    def add(self, steps: int) -> None:
        self._steps += steps
        self._show()

    def step(self) -> None:
        self._done += 1
        self._show()

    def end(self) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def _show(self) -> None:
        if self._shown:
            passed = seconds_text(time.monotonic() - self._began)
            text = f"{self._doing}: {self._done} of {self._steps} runs, {passed}"
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)
