"""How published systems divide layers over pipeline stages. No torch."""

from __future__ import annotations

import re

from koushi.accuracy.rows import Row
from koushi.plan.workload import Transformer

SCHEDULES = {
    "": "1F1B",
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "afab": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
TWO_STAGES = ("LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B")
"""Schedules that have two stages a rank where nothing else is said."""


def schedule_of(row: Row) -> tuple[str, int] | None:
    """Schedule and stages per rank; None where the source leaves the number of stages open."""
    named = re.fullmatch(r"vp=(\d+)", row.schedule.lower())
    # Some recipes list no virtual stages and state them in a later version.
    later = re.search(r"VP listed NA here \((\d+) in later versions\)", row.notes)
    stages = int((named or later)[1]) if named or later else 0  # type: ignore[index]
    if stages > 1:
        return "Interleaved1F1B", stages
    schedule = "1F1B" if stages == 1 else SCHEDULES.get(row.schedule.lower())
    return (schedule, 2 if schedule in TWO_STAGES else 1) if schedule else None


def stage_layers(row: Row, model: Transformer, system: str, n_stages: int) -> tuple[int, ...] | None:
    """Layers of every stage, first to last; None where they cannot be divided."""
    if n_stages == 1:
        return (model.n_layers,)
    if system == "nanotron":
        return by_cost(model, n_stages)
    layers = model.n_layers
    if "uneven stages" in row.notes:
        each = -(-layers // n_stages)
        return tuple(max(0, min(each, layers - each * stage)) for stage in range(n_stages))
    if "type:transformer|embed" in row.notes or layers % n_stages:
        # The embedding and the output take the place of a layer each.
        if (layers + 2) % n_stages == 0:
            each = (layers + 2) // n_stages
            return (each - 1, *[each] * (n_stages - 2), each - 1)
        if layers < n_stages:
            return None
    base, extra = divmod(layers, n_stages)
    return tuple(base + (stage < extra) for stage in range(n_stages))


def by_cost(model: Transformer, n_stages: int) -> tuple[int, ...]:
    """As nanotron's ``build_model`` does: a rank takes blocks until its share of the multiplications is met.

    The output projection counts, the embedding does not. Ranks past the last block have no layers.
    """
    layer = 4 * model.dim * model.n_heads * model.head_dim + 3 * model.dim * model.ffn_dim
    total = layer * model.n_layers + model.vocab_size * model.dim
    counts = [0] * n_stages
    stage, cost = 0, 0
    for _ in range(model.n_layers):
        counts[stage] += 1
        cost += layer
        if cost * n_stages >= total * (stage + 1):
            stage += 1
    return tuple(counts)
