"""Bytes held over a stretch of a step: how they begin, peak and end, by kind. No torch.

A Span is a stretch told from outside: what it leaves behind and how far it rises above where it began.
Spans put one after the other are a Span again, and a stretch that is gone through many times need not
be gone through here: its first or its last time rises highest.

A caching allocator keeps a pool of memory for every stream, and pools peak at moments of their own. So
a Span also tells the peak of what the compute stream allocates, and those of the kinds that have
streams of their own.
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
    "gathered",
    "scattered",
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
    GATHERED,
    SCATTERED,
) = range(len(KINDS))
"""gathered: parameters before they are copied out of a collective's buffer; scattered: gradients in one's input."""

COPIES_ADDED = "as gradients of what tp copies are added up"
"""A moment at the end of a step."""

Bytes = tuple[int, ...]
"""By kind."""
NOTHING: Bytes = (0,) * len(KINDS)

STREAMS = (GRADIENTS, GATHERED)
"""Kinds that ``fully_shard`` allocates on streams of their own: what a reduce-scatter gives, what an all-gather
gives (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce`` and ``foreach_all_gather``)."""


@dataclass(frozen=True)
class Span:
    """Bytes relative to those at the start; no peak is below 0, as the start counts too."""

    after: Bytes = NOTHING
    peak: Bytes = NOTHING
    highest: int = 0
    """The sum of ``peak``."""
    moment: str = ""
    """Where the peak is, in words."""
    growth: int = 0
    """The sum of ``after``."""
    compute_highest: int = 0
    """The peak of all but STREAMS."""
    stream_highest: tuple[int, ...] = (0,) * len(STREAMS)
    """The peak of each of STREAMS."""

    @property
    def compute_growth(self) -> int:
        return self.growth - sum(self.after[kind] for kind in STREAMS)


class Account:
    """Bytes held as a stretch goes on."""

    def __init__(self, where: str = ""):
        self._now = [0] * len(KINDS)
        self._total = 0
        self._peak = NOTHING
        self._highest = 0
        self._moment = where
        self._compute_highest = 0
        self._stream_highest = [0] * len(STREAMS)
        self.where = where
        """The moment that is reported if the account peaks now."""

    def hold(self, kind: int, count: int) -> None:
        self._now[kind] += count
        self._total += count
        if self._total > self._highest:
            self._highest, self._peak, self._moment = self._total, tuple(self._now), self.where
        if kind in STREAMS:
            stream = STREAMS.index(kind)
            self._stream_highest[stream] = max(self._stream_highest[stream], self._now[kind])
        else:
            self._compute_highest = max(self._compute_highest, self._compute)

    @property
    def _compute(self) -> int:
        return self._total - self._now[GRADIENTS] - self._now[GATHERED]

    def drop(self, kind: int, count: int) -> None:
        self._now[kind] -= count
        self._total -= count

    def touch(self, kind: int, count: int) -> None:
        """Bytes that come and go."""
        if count:
            self.hold(kind, count)
            self.drop(kind, count)

    def go(self, span: Span, times: int = 1) -> None:
        """Through ``span``, so many times one after the other."""
        if not times:
            return
        repeats = times - 1
        highest = self._total + repeats * max(0, span.growth) + span.highest
        if highest > self._highest:
            before = repeats if span.growth > 0 else 0
            self._highest = highest
            self._peak = tuple(
                now + before * after + peak for now, after, peak in zip(self._now, span.after, span.peak, strict=True)
            )
            self._moment = self.where or span.moment
        compute = self._compute + repeats * max(0, span.compute_growth) + span.compute_highest
        self._compute_highest = max(self._compute_highest, compute)
        for stream, kind in enumerate(STREAMS):
            most = self._now[kind] + repeats * max(0, span.after[kind]) + span.stream_highest[stream]
            self._stream_highest[stream] = max(self._stream_highest[stream], most)
        for kind, after in enumerate(span.after):
            self._now[kind] += times * after
        self._total += times * span.growth

    def held(self, kind: int) -> int:
        return self._now[kind]

    def close(self) -> Span:
        return Span(
            tuple(self._now),
            self._peak,
            self._highest,
            self._moment,
            self._total,
            self._compute_highest,
            tuple(self._stream_highest),
        )
