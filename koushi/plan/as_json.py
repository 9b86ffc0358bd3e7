"""A plan and a search as JSON: names and units stay from version to version; times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from koushi.job import Job
from koushi.plan.fixes import Advice
from koushi.plan.layouts import Layout, Question, layout_of, left_out, values_of
from koushi.plan.memory import Memory
from koushi.plan.plan import ErrorBar, Plan, SubmeshUse, error_bars
from koushi.plan.score import Scored
from koushi.plan.search import SearchResult
from koushi.plan.text import KINDS

VERSION = 1

Json = dict[str, Any]


def plan_json(job: Job, plan: Plan, advice: Advice) -> Json:
    """Everything that ``koushi plan`` prints, and every rank's part of it."""
    return {
        "version": VERSION,
        "run": job.name,
        "hardware": plan.hardware.name,
        "devices": plan.devices,
        "layout": layout_json(layout_of(plan.workload), plan),
        "fits": plan.fits,
        "tight": plan.tight,
        "memory": _memory(plan),
        "step": _step(job, plan),
        "submeshes": [_submesh(use) for use in plan.submeshes],
        "advice": {
            "changes": [
                {"values": dict(fix.values), "seconds": fix.seconds, "memory": fix.memory, "note": fix.note}
                for fix in advice.fixes
            ],
            "devices_that_fit": advice.wider.devices if advice.wider else None,
            "dp_shard_that_fits": advice.wider.layout.dp_shard if advice.wider else None,
            "layout_that_fits": layout_json(advice.wider.layout) if advice.wider else None,
        },
    }


def search_json(question: Question, result: SearchResult) -> Json:
    barred = left_out(question)
    return {
        "version": VERSION,
        "fixed": question.fixed.values(),
        "legal": result.legal,
        "simulated": result.judged,
        "chosen": _scored(result, [result.chosen] if result.chosen else []),
        "best": _scored(result, result.best),
        "front": _scored(result, result.front),
        "too_large": _scored(result, result.misses),
        "global_batch_sizes_that_leave_out_fewer": list(barred.batches) if barred else [],
    }


def layout_json(layout: Layout, plan: Plan | None = None) -> Json:
    """As a run file's keys."""
    values = {key: value for key, value in values_of(layout).items() if value is not None}
    if plan is not None and layout.pp > 1:
        values["parallelism.pipeline_parallel_layers_per_stage"] = list(plan.workload.stage_layers)
    return values


def _scored(result: SearchResult, found: Iterable[Scored]) -> list[Json]:
    return [
        {
            "layout": layout_json(one.layout),
            "seconds": one.seconds,
            "memory": one.memory,
            "tight": result.is_tight(one),
        }
        for one in found
    ]


def _error(plan: Plan, bar: ErrorBar) -> Json | None:
    """None where no published run stands behind the figures."""
    return asdict(bar) if bar.stands_behind(plan.hardware) else None


def _memory(plan: Plan) -> Json:
    return {
        "capacity": plan.hardware.chip.memory_bytes,
        "room": plan.room,
        "fullest": plan.fullest,
        "error": _error(plan, error_bars()[1]),
        "by_pp": [
            _rank_memory(one) | {"ranks": list(plan.ranks(pp)), "stages": list(plan.stages(pp))}
            for pp, one in enumerate(plan.memories)
        ],
    }


def _rank_memory(memory: Memory) -> Json:
    kinds = {key: getattr(memory, key) for key, _ in KINDS}
    totals = {"active": memory.active, "pools": memory.pools, "reserved": memory.reserved, "device": memory.device}
    return kinds | totals | {"moment": memory.moment}


def _step(job: Job, plan: Plan) -> Json:
    time = plan.time
    steps = job.config.training.steps
    return {
        "seconds": time.seconds,
        "error": _error(plan, error_bars()[0]),
        "parts": dict(time.parts),
        "of_pp": time.pp,
        "bubble": time.bubble,
        "tokens": plan.workload.tokens,
        "tokens_per_second_per_device": time.tokens_per_second_per_device,
        "mfu": time.mfu,
        "mfu_convention": "PaLM",
        "steps": steps,
        "run_seconds": time.seconds * steps,
        "device_hours": time.seconds * steps * plan.devices / 3600,
    }


def _submesh(use: SubmeshUse) -> Json:
    return {
        "name": use.name,
        "groups": use.groups,
        "degree": use.degree,
        "ranks": list(use.ranks),
        "nodes": use.nodes,
        "link": use.link,
        "collectives": [
            {
                "operation": one.collective.operation,
                "phase": one.collective.phase,
                "dtype": one.collective.dtype,
                "bytes": one.collective.bytes,
                "calls": one.calls,
                "seconds": one.seconds,
                "exposed": one.exposed,
            }
            for one in use.calls
        ],
    }
