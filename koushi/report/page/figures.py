"""What the plan says of one layout, as a page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from koushi.hardware.hardware import Hardware
from koushi.job import Job
from koushi.plan.memory import Memory
from koushi.plan.plan import Plan, SubmeshUse, plan
from koushi.plan.schedule import actions
from koushi.plan.stage_time import pipeline
from koushi.plan.workload import of_job

KINDS = tuple(field.name for field in fields(Memory) if field.name != "moment")
"""Of memory, in the order of a bar."""

COMPUTE = ("ideal compute", "attention beyond ideal", "recompute", "optimizer")

MOST_STAGES = 32
"""Memory bars of one layout; with more stages the first, the last and the fullest stand for all."""
MOST_ACTIONS = 6000
"""Of a timeline that is drawn for the run file's own layout."""
MOST_ACTIONS_ELSEWHERE = 600
"""For the others, of which there are many."""
TICKS = 4000
"""Of a timeline: what its times are counted in."""


def figures(job: Job, hardware: Hardware, most_actions: int) -> dict[str, Any]:
    """Of ``job`` on ``hardware``; with its timeline where that has at most so many actions."""
    planned = plan(of_job(job), hardware)
    time, mesh = planned.time, job.mesh
    return {
        "shape": mesh.shape,
        "strides": mesh.strides,
        "fits": planned.fits,
        "limit": round(hardware.chip.memory_bytes),
        "step": _short(time.seconds),
        "rate": _short(time.tokens_per_second_per_device),
        "mfu": _short(time.mfu),
        "bubble": _short(time.bubble),
        "schedule": planned.workload.schedule,
        "microbatches": planned.workload.microbatches,
        "memory": [_memory(planned, pp) for pp in _shown(planned)],
        "waterfall": [[name, _short(seconds), _shade(name)] for name, seconds in time.parts.items() if seconds > 0],
        "submeshes": {use.name: _submesh(use) for use in planned.submeshes},
        "timeline": _timeline(planned, most_actions) if mesh.degree("pp") > 1 else None,
    }


def _short(number: float) -> float:
    """To five digits: a page holds hundreds of layouts."""
    return float(f"{number:.5g}")


def _shown(planned: Plan) -> list[int]:
    stages = len(planned.memories)
    return list(range(stages)) if stages <= MOST_STAGES else sorted({0, planned.fullest, stages - 1})


def _memory(planned: Plan, pp: int) -> dict[str, Any]:
    memory = planned.memories[pp]
    kinds = [round(getattr(memory, kind)) for kind in KINDS]
    return {"pp": pp, "kinds": kinds, "device": round(memory.device), "moment": memory.moment}


def _shade(part: str) -> str:
    """What colours a part of the waterfall: a mesh dim, compute or waste."""
    if part.startswith("exposed "):
        return part.removeprefix("exposed ")
    return "compute" if part in COMPUTE else "waste"


def _submesh(use: SubmeshUse) -> Mapping[str, Any]:
    rows = [
        [one.collective.operation, one.collective.phase, one.collective.dtype, one.collective.bytes, one.calls]
        for one in use.calls
    ]
    return {
        "crosses": use.nodes > 1,
        "link": use.link,
        "bytes": round(sum(one.collective.wire_bytes(use.degree) * one.calls for one in use.calls)),
        "seconds": _short(use.seconds),
        "exposed": _short(use.exposed),
        "rows": rows,
    }


def _timeline(planned: Plan, most_actions: int) -> list[str] | None:
    """A row for every pipeline coordinate: kind, microbatch, start and length of each action, in TICKS of the whole."""
    workload = planned.workload
    orders = actions(workload.schedule, workload.mesh.degree("pp"), len(workload.stage_layers), workload.microbatches)
    if sum(map(len, orders)) > most_actions:
        return None
    simulated = pipeline(workload, planned.hardware)
    tick = simulated.makespan / TICKS
    return [
        " ".join(
            f"{action.kind}{action.microbatch}@{round(start / tick)}+{round((end - start) / tick)}"
            for action, start, end in row
        )
        for row in simulated.by_rank
    ]
