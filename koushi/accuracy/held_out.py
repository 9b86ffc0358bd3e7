"""Errors of a source when the constants are centred on the other sources alone. No torch.

Leaving a source out of a fit mostly moves a level: its predictions are scaled by what centres the others, for step
time those on the same chip, for memory those whose allocator works alike, each source counting the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from koushi.accuracy.score import Errors, Scored


@dataclass(frozen=True)
class Quantity:
    """Something measured, and which runs share its constants."""

    error: Callable[[Scored], float | None]
    kind: Callable[[Scored], object]


def _chip(one: Scored) -> object:
    return one.run.hardware.name.removesuffix("-efa")


def _allocator(one: Scored) -> object:
    return one.run.workload.system.expandable_segments


TIME = Quantity(lambda one: one.time_error, _chip)
MEMORY = Quantity(lambda one: one.memory_error, _allocator)


@dataclass(frozen=True)
class HeldOut:
    """Of one source: over the runs whose constants another source shares."""

    source: str
    as_is: Errors
    scaled: Errors


def held_out(scored: Sequence[Scored], quantity: Quantity) -> tuple[HeldOut, ...]:
    """Of every source that shares constants with another."""
    found = []
    for source in sorted({one.source for one in scored}):
        others = _levels((one for one in scored if one.source != source), quantity)
        here = [one for one in scored if one.source == source and quantity.kind(one) in others]
        as_is = Errors.of(quantity.error(one) for one in here)
        scaled = Errors.of(_scaled(quantity.error(one), others[quantity.kind(one)]) for one in here)
        if as_is is not None and scaled is not None:
            found.append(HeldOut(source, as_is, scaled))
    return tuple(found)


def _scaled(error: float | None, level: float) -> float | None:
    return None if error is None else (1 + error) / (1 + level) - 1


def _levels(scored: Iterable[Scored], quantity: Quantity) -> dict[object, float]:
    """The mean over sources of their biases, by kind."""
    errors: dict[object, dict[str, list[float]]] = {}
    for one in scored:
        error = quantity.error(one)
        if error is not None:
            errors.setdefault(quantity.kind(one), {}).setdefault(one.source, []).append(error)
    return {kind: mean(median(known) for known in sources.values()) for kind, sources in errors.items()}
