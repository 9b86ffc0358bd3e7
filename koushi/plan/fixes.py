"""What to change where a layout does not fit, or is slower than it could be: one thing, or two where none is enough;
each change is planned anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from koushi.check.rule import COMPILE, DP_SHARD, PER_STAGE, WORLD
from koushi.hardware.hardware import Hardware
from koushi.plan.layouts import (
    MODES,
    Layout,
    Pipeline,
    Question,
    beside,
    divisors,
    is_legal,
    layout_of,
    split_of,
    tensor_degrees,
    values_of,
)
from koushi.plan.memory import every_rank
from koushi.plan.plan import Plan
from koushi.plan.score import Costs
from koushi.plan.search import search
from koushi.plan.step_time import step_seconds
from koushi.plan.workload import Workload
from koushi.schedules import SCHEDULES

SHOWN = 5
WORTH = 0.01
"""Share of a step that a change has to save to be named."""
MARKED = 0.05
"""Share of a step that two changes have to save over the best single one to be named beside it."""
COMPUTE, REDUCE = "precision.compute", "precision.reduce"
MOST_TIMES = 64


@dataclass(frozen=True)
class Fix:
    """A change of the run file and what it leads to."""

    values: Mapping[str, object]
    """By dotted key, only what changes."""
    seconds: float
    """Of a step."""
    memory: float
    """Bytes that the device of the fullest rank reports as taken."""
    note: str = ""
    """What it costs besides."""


@dataclass(frozen=True)
class Wider:
    """The fewest devices that do where fewer do not, of those tried, and the layout of them to take."""

    devices: int
    layout: Layout
    seconds: float
    memory: float


@dataclass(frozen=True)
class Advice:
    """What would help, best first."""

    fixes: tuple[Fix, ...]
    wider: Wider | None = None
    """Where nothing on as many devices fits."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What the run file has to say differently on so many; dp_shard always."""


def advice(question: Question, before: Plan, *, divided: bool = False) -> Advice:
    """Changes that make ``before`` fit, the fastest first; if it fits, those that make it faster.

    Where it does not fit, two together as well, where they are markedly faster than any single one or none is
    enough; where no two are, the best layout of all. ``divided``: whether the run file says the layers of its stages.
    """
    tried = sorted(single_changes(question, before, divided=divided), key=lambda fix: (fix.seconds, fix.memory))
    if before.fits or (tried and tried[0].seconds * (1 - MARKED) <= before.time.seconds):
        return Advice(_distinct(tried))  # one that costs little will do: what is faster yet is told once it is made
    pair = cheapest_pair(question, before, *tried[:1], divided=divided)
    if tried:
        return Advice(_distinct([*([pair] if pair else []), *tried]))
    if pair is not None:
        return Advice((pair,))
    workload = before.workload
    found = search(question, workload, before.hardware).chosen
    if found:
        values = changed(workload, found.layout.of(workload), divided=divided)
        return Advice((Fix(values, found.seconds, found.memory),))
    wider = more_devices(question, workload, before.hardware)
    if wider is None:
        return Advice(())
    values = changed(workload, wider.layout.of(workload), divided=divided) | {DP_SHARD: wider.layout.dp_shard}
    return Advice((), wider, {key: value for key, value in values.items() if key != WORLD})


def _distinct(fixes: Iterable[Fix]) -> tuple[Fix, ...]:
    """The first few, one for each kind of change."""
    found: dict[frozenset[str], Fix] = {}
    for fix in fixes:
        found.setdefault(frozenset(fix.values), fix)
    return tuple(list(found.values())[:SHOWN])


def single_changes(question: Question, before: Plan, *, divided: bool = False) -> Iterator[Fix]:
    """Every legal change of one thing that leads to a plan that fits, and to a faster one where ``before`` fits;
    ``divided`` as for ``advice``."""
    workload, layout, hardware = before.workload, layout_of(before.workload), before.hardware
    slowest = before.time.seconds * (1 - WORTH) if before.fits else inf
    costs = Costs(workload, hardware)
    for other in dict.fromkeys(neighbours(question, layout)):
        if other == layout or not is_legal(question, other):
            continue
        if _floor(question, costs, layout, other, slowest) is not None:
            moved = _moved(workload, layout, other)
            yield from _judged(moved, hardware, slowest, changed(workload, moved, divided=divided))
    for one in _in_place(question, before):
        yield from _judged(one.workload, hardware, slowest, one.values, one.note)


class _Change(NamedTuple):
    """A change that leaves the layout as it is; its note says what it costs."""

    workload: Workload
    values: Mapping[str, object]
    note: str


def _in_place(question: Question, before: Plan) -> Iterator[_Change]:
    workload, chip = before.workload, before.hardware.chip
    if workload.compute == "float32" and chip.peak("bfloat16") > chip.peak("float32"):
        note = f"8 bits of precision in matmuls and activations; masters stay {workload.parameters}"
        yield _Change(replace(workload, compute="bfloat16"), {COMPUTE: "bfloat16"}, note)
    if workload.reduce == "float32" and workload.compute == "bfloat16":
        note = "gradients are added up with less precision"
        yield _Change(replace(workload, reduce="bfloat16"), {REDUCE: "bfloat16"}, note)
    if not question.compiled and not (layout_of(workload).pp > 1 and SCHEDULES[workload.schedule].splits_backward):
        fused = replace(workload, system=replace(workload.system, fused=True))
        yield _Change(fused, {COMPILE: True}, "the first step compiles")


def _floor(question: Question, costs: Costs, before: Layout, after: Layout, slowest: float) -> float | None:
    """Seconds that a step of ``after`` takes at least, as far as bounds know; None: above ``slowest``, or too large."""
    moved, split = _moved(costs.base, before, after), split_of(question, after)
    if moved.stage_layers != after.of(costs.base).stage_layers:
        return 0.0
    floor = costs.layout_floor(split, after)  # in this order: memory's bound takes longer
    return floor if floor <= slowest and costs.memory_floor(split, after) <= costs.capacity else None


def cheapest_pair(question: Question, before: Plan, single: Fix | None = None, *, divided: bool = False) -> Fix | None:
    """The two changes that together lead to the fastest plan that fits, of those where one changes the layout.

    Where ``single`` is enough by itself both change the layout, and are markedly faster; None: no two are.
    ``divided`` as for ``advice``.
    """
    workload, layout, hardware = before.workload, layout_of(before.workload), before.hardware
    once = dict.fromkeys(neighbours(question, layout))
    twice = dict.fromkeys(other for one in once for other in neighbours(question, one))
    as_it_is = (_Change(workload, {}, ""), tuple(twice))
    compiled = replace(question, compiled=True)
    waiting: list[tuple[float, int, _Change, Layout]] = []
    in_place = [] if single else [(one, tuple(once)) for one in _in_place(question, before)]
    slowest = single.seconds * (1 - MARKED) if single else inf
    for change, others in (as_it_is, *in_place):
        costs, asked = Costs(change.workload, hardware), compiled if change.workload.system.fused else question
        for other in others:
            if other != layout and is_legal(asked, other):
                floor = _floor(question, costs, layout, other, slowest)
                if floor is not None:
                    waiting.append((floor, len(waiting), change, other))
    best: Fix | None = None
    for floor, _, change, other in sorted(waiting):
        if best is not None and floor >= best.seconds:
            break
        moved = _moved(change.workload, layout, other)
        values = {**change.values, **changed(workload, moved, divided=divided)}
        for fix in _judged(moved, hardware, best.seconds if best else slowest, values, change.note):
            best = fix
    return best


def _judged(
    workload: Workload, hardware: Hardware, slowest: float, values: Mapping[str, object], note: str = ""
) -> Iterator[Fix]:
    """The change, where it fits and is fast enough."""
    seconds = step_seconds(workload, hardware)
    if seconds <= slowest:
        memory = max(one.device for one in every_rank(workload, hardware))
        if memory <= hardware.chip.memory_bytes:
            yield Fix(values, seconds, memory, note)


def _moved(workload: Workload, before: Layout, after: Layout) -> Workload:
    """Under ``after``; layers that the run file divides itself stay so where there are as many stages."""
    moved = after.of(workload)
    return replace(moved, stage_layers=workload.stage_layers) if _as_many_stages(before, after) else moved


def _as_many_stages(one: Layout, other: Layout) -> bool:
    return one.pipeline.stages_per_rank * one.pp == other.pipeline.stages_per_rank * other.pp


def neighbours(question: Question, layout: Layout) -> Iterator[Layout]:
    """Layouts that differ in one thing, legal or not."""
    for recompute in MODES:
        yield layout._replace(recompute=recompute)
    samples = question.global_batch_size // (layout.dp_replicate * layout.dp_shard)
    for size in dict.fromkeys((*beside(divisors(samples), layout.microbatch_size), 1)):
        yield layout._replace(microbatch_size=size)
    yield layout._replace(reshard_after_forward=not layout.reshard_after_forward)
    data_parallel = layout.dp_replicate * layout.dp_shard
    for shard in {*beside(divisors(data_parallel), layout.dp_shard), data_parallel}:
        yield layout._replace(dp_shard=shard, dp_replicate=data_parallel // shard)
    for tp in beside(tensor_degrees(question), layout.tp):
        yield from _with_shards(layout._replace(tp=tp), question)
    yield from _pipelines(question, layout)


def _pipelines(question: Question, layout: Layout) -> Iterator[Layout]:
    pipeline = layout.pipeline
    for pp in beside(divisors(question.devices // layout.tp), layout.pp):
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


def changed(before: Workload, after: Workload, *, divided: bool = False) -> dict[str, object]:
    """What the run file of ``before`` has to say differently for ``after``; None: nothing any more.

    ``divided``: whether it says the layers of its stages, as it has to where they are not those of its layout.
    """
    layout = layout_of(before)
    old, new = values_of(layout), values_of(layout_of(after))
    found = {key: value for key, value in new.items() if value != old.get(key)}
    divided = divided or before.stage_layers != layout.of(before).stage_layers
    if divided and before.stage_layers != after.stage_layers:
        found[PER_STAGE] = None
    return found


def more_devices(question: Question, workload: Workload, hardware: Hardware) -> Wider | None:
    """How many devices have a layout that fits: of the powers of two above, and of 2, 4, 8 ... times as many, the
    fewest; None where none up to 64 times does."""
    most = question.devices * MOST_TIMES
    doubled = {question.devices << power for power in range(1, MOST_TIMES.bit_length())}
    powers = {1 << power for power in range(question.devices.bit_length(), most.bit_length())}
    for devices in sorted(doubled | {one for one in powers if one <= most}):
        chosen = search(replace(question, devices=devices), workload, hardware).chosen
        if chosen:
            return Wider(devices, chosen.layout, chosen.seconds, chosen.memory)
    return None
