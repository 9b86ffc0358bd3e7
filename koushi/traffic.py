"""Collectives as records: what the planner predicts, the dry run sees and a real run sends. No torch.

One record stands for calls that are alike; a Traffic counts them. A record says what travels, not
how a backend carries it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from koushi.units import bytes_text

Operation = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv",
    "broadcast", "reduce", "gather", "scatter", "barrier",
]  # fmt: skip
"""Those of the second line Koushi never uses in a step; the audit has to name them where it finds one."""
Phase = Literal["start", "forward", "backward", "optimizer"]
"""start: before the first forward of a step. backward: with what is recomputed in it. optimizer: what follows
the last backward: sums of copied and tied gradients, norm, update."""

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, order=True)
class Collective:
    """One kind of call that a rank takes part in during a step."""

    submesh: str
    """The mesh dim whose group it runs on; a fold is its dims joined by a comma."""
    operation: Operation
    phase: Phase
    dtype: str
    """torch's name without the prefix, such as ``bfloat16``."""
    bytes: int
    """Of the larger of what a rank puts in and what it gets: the gathered whole, the whole before it is
    scattered, the reduced tensor, the message."""

    def wire_bytes(self, degree: int) -> float:
        """What one rank sends when a group of ``degree`` goes about it in the cheapest way.

        A ring moves (n - 1) / n of the whole, an all-reduce twice that (Patarasuk and Yuan 2009,
        doi:10.1016/j.jpdc.2008.09.002); a recv sends nothing.
        """
        share = (degree - 1) / degree
        if self.operation in ("send", "recv"):
            return float(self.bytes if self.operation == "send" else 0)
        return self.bytes * share * (2 if self.operation == "all_reduce" else 1)


Traffic = Counter[Collective]
"""Calls of each kind by one rank in one training step."""


def differences(predicted: Traffic, ran: Traffic) -> list[str]:
    """Every kind of call of which there are not as many as predicted, with both counts, sub-mesh by sub-mesh."""
    return [
        f"{one.submesh}: {one.operation} of {bytes_text(one.bytes)} ({one.dtype}, {one.phase}): "
        f"{predicted[one]} predicted, {ran[one]} ran"
        for one in sorted(predicted.keys() | ran.keys())
        if predicted[one] != ran[one]
    ]


ALLOWED: Mapping[str, frozenset[Operation]] = {
    "tp": frozenset({"all_gather", "reduce_scatter", "all_reduce"}),
    "pp": frozenset({"send", "recv"}),
    "dp_replicate": frozenset({"all_reduce"}),
    "dp_shard": frozenset({"all_gather", "reduce_scatter"}),
}
"""What may move tensors on each sub-mesh. Besides these, scalars (loss, gradient norm, token count) are summed
by all-reduces on every sub-mesh that they are split over."""
