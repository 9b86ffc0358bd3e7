"""Says on stderr how long work goes on; silent where it is short."""

from __future__ import annotations

import sys
import time
from typing import final

from koushi.units import count_text, seconds_text

SILENT_SECONDS = 2.0


@final
class Progress:
    """Prints a line after two seconds, then each time twice as many have gone by, up to one a minute."""

    def __init__(self, doing: str):
        self._doing = doing
        self._began = time.monotonic()
        self._wait = SILENT_SECONDS
        self._due = self._began + self._wait

    def update(self, tokens: int, where: str) -> None:
        now = time.monotonic()
        if now >= self._due:
            passed = seconds_text(now - self._began)
            print(
                f"koushi: {self._doing}: {count_text(tokens)} tokens after {passed}, now at {where}",
                file=sys.stderr,
                flush=True,
            )
            self._wait = min(2 * self._wait, 60.0)
            self._due = now + self._wait
