"""When torch's pipeline runtime gathers and frees a stage's parameters. No torch."""

from __future__ import annotations

from koushi.plan.workload import Workload


def unshards(workload: Workload, stage: int) -> int:
    """How often ``stage`` is gathered in one pipelined step."""
    return 1
