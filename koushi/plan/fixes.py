"""What to change where a layout does not fit, or is slower than it could be: single changes, each planned anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from koushi.check.rule import COMPILE
from koushi.hardware.hardware import Hardware
from koushi.plan.layouts import (
    MODES,
    Layout,
    Pipeline,
    Question,
    divisors,
    is_legal,
    layout_of,
    tensor_degrees,
    values_of,
)
from koushi.plan.plan import Plan, plan
from koushi.plan.search import search
from koushi.plan.workload import Workload
from koushi.schedules import SCHEDULES

SHOWN = 5
WORTH = 0.01
"""Share of a step that a change has to save to be named."""
REDUCE = "precision.reduce"
MOST_TIMES = 64


@dataclass(frozen=True)
class Fix:
    """A change of the run file and what it leads to."""

    values: Mapping[str, object]
    """By dotted key, only what changes."""
    plan: Plan
    note: str = ""
    """What it costs besides."""


@dataclass(frozen=True)
class Advice:
    """What would help, best first."""

    fixes: tuple[Fix, ...]
    devices: int | None = None
    """Where nothing on as many devices fits: how many of them do, with more shards."""


def advice(question: Question, before: Plan) -> Advice:
    """The cheapest changes that make ``before`` fit, the fastest first; if it fits, those that make it faster."""
    tried = [fix for fix in single_changes(question, before.workload, before.hardware) if fix.plan.fits]
    tried.sort(key=lambda fix: fix.plan.time.seconds)
    if before.fits:
        limit = before.time.seconds * (1 - WORTH)
        return Advice(_distinct(fix for fix in tried if fix.plan.time.seconds < limit))
    if tried:
        return Advice(_distinct(iter(tried)))
    found = search(question, before.workload, before.hardware).best
    if found:
        layout = found[0].layout
        after = plan(layout.of(before.workload), before.hardware)
        return Advice((Fix(changed(layout_of(before.workload), layout), after),))
    return Advice((), _more_devices(question, before))


def _distinct(fixes: Iterator[Fix]) -> tuple[Fix, ...]:
    """The first few, one for each kind of change."""
    found: dict[frozenset[str], Fix] = {}
    for fix in fixes:
        found.setdefault(frozenset(fix.values), fix)
    return tuple(list(found.values())[:SHOWN])


def single_changes(question: Question, workload: Workload, hardware: Hardware) -> Iterator[Fix]:
    """Every legal change of one thing, planned."""
    layout = layout_of(workload)
    for other in dict.fromkeys(neighbours(question, layout)):
        if other != layout and is_legal(question, other):
            yield Fix(changed(layout, other), plan(_moved(workload, layout, other), hardware))
    if workload.reduce == "float32" and workload.compute == "bfloat16":
        after = plan(replace(workload, reduce="bfloat16"), hardware)
        yield Fix({REDUCE: "bfloat16"}, after, "gradients are added up with less precision")
    if not question.compiled and not (layout.pp > 1 and SCHEDULES[workload.schedule].splits_backward):
        after = plan(replace(workload, system=replace(workload.system, fused=True)), hardware)
        yield Fix({COMPILE: True}, after, "the first step compiles")


def _moved(workload: Workload, before: Layout, after: Layout) -> Workload:
    """Under ``after``; layers that the run file divides itself stay so where there are as many stages."""
    moved = after.of(workload)
    same = before.pipeline.stages_per_rank * before.pp == after.pipeline.stages_per_rank * after.pp
    return replace(moved, stage_layers=workload.stage_layers) if same else moved


def neighbours(question: Question, layout: Layout) -> Iterator[Layout]:
    """Layouts that differ in one thing, legal or not."""
    for recompute in MODES:
        yield layout._replace(recompute=recompute)
    samples = question.global_batch_size // (layout.dp_replicate * layout.dp_shard)
    for size in _beside(divisors(samples), layout.microbatch_size):
        yield layout._replace(microbatch_size=size)
    yield layout._replace(reshard_after_forward=not layout.reshard_after_forward)
    data_parallel = layout.dp_replicate * layout.dp_shard
    for shard in {*_beside(divisors(data_parallel), layout.dp_shard), data_parallel}:
        yield layout._replace(dp_shard=shard, dp_replicate=data_parallel // shard)
    for tp in _beside(tensor_degrees(question), layout.tp):
        yield from _with_shards(layout._replace(tp=tp), question)
    yield from _pipelines(question, layout)


def _pipelines(question: Question, layout: Layout) -> Iterator[Layout]:
    pipeline = layout.pipeline
    for pp in _beside(divisors(question.devices // layout.tp), layout.pp):
        reshard = pp == 1 and layout.reshard_after_forward
        for schedule, needs in SCHEDULES.items():
            same = pipeline.pp > 1 and schedule == pipeline.schedule
            stages = pipeline.stages_per_rank if same else needs.fewest_stages_per_rank
            other = Pipeline(pp, schedule, stages) if pp > 1 else Pipeline()
            yield from _with_shards(layout._replace(pipeline=other, reshard_after_forward=reshard), question)
    if layout.pp > 1:
        for schedule, needs in SCHEDULES.items():
            few = needs.fewest_stages_per_rank
            counts = {few, 2 * few, pipeline.stages_per_rank}
            if schedule == pipeline.schedule:
                counts |= {pipeline.stages_per_rank + 1, pipeline.stages_per_rank - 1, 2 * pipeline.stages_per_rank}
            for stages in sorted(counts):
                yield layout._replace(pipeline=Pipeline(layout.pp, schedule, stages))


def _with_shards(layout: Layout, question: Question) -> Iterator[Layout]:
    """With dp_shard taking up what is left of the devices."""
    shard, left = divmod(question.devices, layout.tp * layout.pp * layout.dp_replicate)
    if left == 0:
        yield layout._replace(dp_shard=shard)


def _beside(choices: tuple[int, ...], value: int) -> tuple[int, ...]:
    """The nearest choices below and above."""
    below = [one for one in choices if one < value]
    above = [one for one in choices if one > value]
    return (*below[-1:], *above[:1])


def changed(before: Layout, after: Layout) -> dict[str, object]:
    """What a run file has to say differently."""
    old = values_of(before)
    return {key: value for key, value in values_of(after).items() if value is not None and value != old.get(key)}


def _more_devices(question: Question, before: Plan) -> int | None:
    layout, times = layout_of(before.workload), 2
    while times <= MOST_TIMES:
        wider = layout._replace(dp_shard=layout.dp_shard * times)
        if not is_legal(replace(question, devices=question.devices * times), wider):
            return None
        if plan(_moved(before.workload, layout, wider), before.hardware).fits:
            return question.devices * times
        times *= 2
    return None
