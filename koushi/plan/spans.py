"""Bytes held over a stretch of a step: how they begin, peak and end, by kind. No torch.

A Span is a stretch told from outside: what it leaves behind and how far it rises above where it began.
Spans put one after the other are a Span again, and a stretch that is gone through many times need not
be gone through here: its first or its last time rises highest.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded_parameters",
    "unsharded_gradients",
    "activations",
    "logits",
    "pipeline_buffers",
    "communication_buffers",
)
(
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    UNSHARDED_PARAMETERS,
    UNSHARDED_GRADIENTS,
    ACTIVATIONS,
    LOGITS,
    PIPELINE_BUFFERS,
    COMMUNICATION_BUFFERS,
) = range(len(KINDS))

Bytes = tuple[int, ...]
"""By kind."""
NOTHING: Bytes = (0,) * len(KINDS)


@dataclass(frozen=True)
class Span:
    """Bytes relative to those at the start."""

    after: Bytes = NOTHING
    peak: Bytes = NOTHING
    highest: int = 0
    """The sum of ``peak``: never below 0, as the start counts too."""
    moment: str = ""
    """Where the peak is, in words."""


class Account:
    """Bytes held as a stretch goes on."""

    def __init__(self, where: str = ""):
        self._now = [0] * len(KINDS)
        self._total = 0
        self._peak = NOTHING
        self._highest = 0
        self._moment = where
        self.where = where
        """The moment that is reported if the account peaks now."""

    def hold(self, kind: int, count: int) -> None:
        self._now[kind] += count
        self._total += count
        if self._total > self._highest:
            self._highest, self._peak, self._moment = self._total, tuple(self._now), self.where

    def drop(self, kind: int, count: int) -> None:
        self._now[kind] -= count
        self._total -= count

    def turn(self, before: int, after: int, count: int) -> None:
        """What was of one kind is now of another."""
        self.drop(before, count)
        self.hold(after, count)

    def touch(self, kind: int, count: int) -> None:
        """Bytes that come and go."""
        self.hold(kind, count)
        self.drop(kind, count)

    def go(self, span: Span, times: int = 1) -> None:
        """Through ``span``, so many times one after the other."""
        if not times:
            return
        growth = sum(span.after)
        before = (times - 1) * growth if growth > 0 else 0
        if self._total + before + span.highest > self._highest:
            repeats = times - 1 if growth > 0 else 0
            self._highest = self._total + before + span.highest
            self._peak = tuple(
                now + repeats * after + peak for now, after, peak in zip(self._now, span.after, span.peak, strict=True)
            )
            self._moment = self.where or span.moment
        for kind, after in enumerate(span.after):
            self._now[kind] += times * after
        self._total += times * growth

    def held(self, kind: int) -> int:
        return self._now[kind]

    def close(self) -> Span:
        return Span(tuple(self._now), self._peak, self._highest, self._moment)
