"""Costs of layouts as a search asks for them: bounds first, exact at the end, whatever repeats remembered. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from koushi.hardware.hardware import Hardware
from koushi.plan.edges import OVERLAPPED, SLOWED, edges, gather_seconds
from koushi.plan.layouts import Layout, Pipeline, Split, divisors, layers_of, mesh_of
from koushi.plan.memory import memory
from koushi.plan.moments import Family
from koushi.plan.room import Room
from koushi.plan.schedule import StageSeconds
from koushi.plan.stage_time import pipeline as run_pipeline
from koushi.plan.stage_time import send_seconds, stage_costs
from koushi.plan.step_time import step_seconds, stragglers
from koushi.plan.unshard import MOST_UNSHARDED, unshards_of_rank
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES, rank_of_stage, stages_of_rank

IN_TWO_PHASES = ("GPipe", "LoopedBFS")
"""Schedules in which the last stage has seen all microbatches before any goes up."""
BELOW = 1 - 1e-9
"""Bounds are this much lower than they are computed, so that rounding never puts one above what it bounds."""


class Scored(NamedTuple):
    """A layout with its figures."""

    layout: Layout
    seconds: float
    """Of a step."""
    memory: float
    """Bytes that the device of the fullest rank reports as taken."""

    @property
    def rank(self) -> tuple[float, float, Layout]:
        """Faster first, then smaller."""
        return self.seconds, self.memory, self.layout


class _Seconds(NamedTuple):
    """Of one microbatch: forward; the whole work; the part of backward that the stage before waits for."""

    forward: float
    work: float
    up: float


class _Stages(NamedTuple):
    """Seconds of a stage with so many layers: those of each layer, and of the first and the last stage besides."""

    layer: _Seconds
    first: _Seconds
    last: _Seconds


class _Run(NamedTuple):
    """Seconds of a simulated pipeline: all of it, and every rank's work."""

    makespan: float
    busy: tuple[float, ...]


class _Shares(NamedTuple):
    """How layers lie over the ranks of a pipeline."""

    held: tuple[int, ...]
    """Of every rank."""
    before: tuple[int, ...]
    """Of the stages that come before the first of every rank."""
    end: int
    """The rank of the last stage."""
    last: int
    """Layers of the last stage."""
    before_last: int
    """Layers of the stage before it."""
    most: int
    """Layers of the largest stage that is not an end."""
    hops: int
    """Messages from the first stage to the last and back."""
    longest: tuple[int, ...]
    """Ranks among which is the one whose work and the way to it take longest, or one that is close to it."""


@cache
def shares(n_layers: int, pp: int, per_rank: int, v_shaped: bool) -> _Shares:
    n_stages = pp * per_rank
    layers = layers_of(n_layers, n_stages)
    schedule = "ZBVZeroBubble" if v_shaped else "LoopedBFS"
    held = tuple(sum(layers[stage] for stage in stages_of_rank(schedule, pp, n_stages, rank)) for rank in range(pp))
    before = (0, *accumulate(layers[: pp - 1]))
    hops = 2 * (n_stages - (2 if v_shaped else 1)) if pp > 1 else 0
    fullest = pp - 1 - held[::-1].index(max(held))
    longest = tuple({0, min(1, pp - 1), fullest, pp - 1})
    end = rank_of_stage(schedule, pp, n_stages, n_stages - 1)
    most = max(layers[1:-1], default=0)
    return _Shares(held, before, end, layers[-1], layers[-2] if n_stages > 2 else 0, most, hops, longest)


@cache
def fewest_of_any(n_layers: int, pp: int) -> int:
    """Layers of the rank with the fewest, of any number of virtual stages."""
    every = [shares(n_layers, pp, per_rank, False) for per_rank in range(1, n_layers // pp + 1)]
    if 2 * pp <= n_layers:
        every.append(shares(n_layers, pp, 2, True))
    return min(min(one.held) for one in every)


class _Repeats(NamedTuple):
    """How often a rank gathers again what it has freed."""

    layers: int
    """Of all its stages, each as often as it is gathered again."""
    most: int
    """Of one stage, the most often."""
    first: tuple[int, int]
    """How often the first stage, and its layers; of other ranks none."""
    last: tuple[int, int]


@cache
def repeats(n_layers: int, pipeline: Pipeline, microbatches: int) -> tuple[_Repeats, ...]:
    """Of every rank."""
    pp, n_stages = pipeline.pp, pipeline.pp * pipeline.stages_per_rank
    layers = layers_of(n_layers, n_stages)
    found = []
    for rank in range(pp):
        counts = unshards_of_rank(pipeline.schedule, pp, n_stages, microbatches, rank)
        again = {stage: count - 1 for stage, count in counts.items()}
        ends = ((again.get(stage, 0), layers[stage]) for stage in (0, n_stages - 1))
        total = sum(times * layers[stage] for stage, times in again.items())
        found.append(_Repeats(total, max(again.values()), *ends))
    return tuple(found)


class Costs:
    """Of layouts of one run on one kind of hardware."""

    def __init__(self, base: Workload, hardware: Hardware):
        self.base = base
        self.hardware = hardware
        self.capacity = hardware.chip.memory_bytes
        self.room = Room(base, hardware)
        self._slower: dict[int, float] = {}
        self._alone: dict[tuple[object, ...], StageSeconds] = {}
        self._stages: dict[tuple[object, ...], _Stages] = {}
        self._runs: dict[tuple[Split, Recompute, Pipeline], _Run] = {}
        self._makespans: dict[tuple[Split, Recompute, Pipeline], float] = {}
        self._sends: dict[tuple[int, int, int], float] = {}
        self._gathers: dict[tuple[int, int, int], tuple[float, float, float]] = {}
        self._edges: dict[tuple[object, ...], float] = {}
        self._least_edges: dict[tuple[int, int, int], float] = {}
        self._all_edges: dict[tuple[object, ...], tuple[float, ...]] = {}

    def split_floor(self, split: Split) -> float:
        """No step of any pipeline is shorter than an even share of the work, nothing recomputed."""
        return self._step(split, self._even_share(split, "none")) * BELOW

    def group_floor(self, split: Split, recompute: Recompute) -> float:
        """With what is recomputed, and what any rank does besides."""
        return self._step(split, self._even_share(split, recompute) + self._least_edge(split)) * BELOW

    def _even_share(self, split: Split, recompute: Recompute) -> float:
        one = self._whole(split, recompute)
        return split.microbatches * (one.forward + one.backward) / split.pp

    def pipeline_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> float:
        """No step is shorter than what its ranks' work and the way down and up the stages take, and then what any rank
        does besides."""
        return self._step(split, self._makespan_floor(split, recompute, pipeline) + self._least_edge(split)) * BELOW

    def layout_floor(self, split: Split, layout: Layout) -> float:
        """With what ranks do besides; which of them is the slowest is not known where backwards are split."""
        pipeline = layout.pipeline
        makespan, every = self._makespan_floor(split, layout.recompute, pipeline), self._every_edge(layout)
        if pipeline.stages_per_rank > MOST_UNSHARDED or splits_backward(pipeline):
            return self._step(split, makespan + min(every)) * BELOW
        few, most = self._busy(split, layout, deep=True), self._busy(split, layout, deep=False)
        highest = max(map(sum, zip(few, every, strict=True))) * BELOW
        least = min(edge for work, edge in zip(most, every, strict=True) if work + edge >= highest)
        return self._step(split, makespan + least) * BELOW

    def _busy(self, split: Split, layout: Layout, *, deep: bool) -> list[float]:
        """A bound of every rank's work in a step: from below where ends are taken to be ``deep``, else from above."""
        return [split.microbatches * one for one in self._work(split, layout.recompute, layout.pipeline, deep=deep)]

    def has_run(self, split: Split, layout: Layout) -> bool:
        """Whether the layout's pipeline has been simulated, for it or for others."""
        return (split, layout.recompute, layout.pipeline) in self._runs

    def simulated_floor(self, split: Split, layout: Layout) -> float:
        """All but gathers that repeat because many virtual stages take turns."""
        run, every = self._run(split, layout.recompute, layout.pipeline), self._every_edge(layout)
        if layout.pipeline.stages_per_rank > MOST_UNSHARDED:
            return self._step(split, run.makespan + min(every)) * BELOW
        return self._step(split, run.makespan + _of_slowest(run.busy, every)) * BELOW

    def seconds(self, split: Split, layout: Layout) -> float:
        """Of a step, exactly."""
        run, every = self._run(split, layout.recompute, layout.pipeline), self._every_edge(layout)
        if layout.pipeline.stages_per_rank > MOST_UNSHARDED and layout.dp_shard > 1:
            every = self._with_gathers(split, layout, every)
        return self._step(split, run.makespan + _of_slowest(run.busy, every))

    def _with_gathers(self, split: Split, layout: Layout, every: Sequence[float]) -> list[float]:
        """Seconds of every rank besides its pipeline's actions, with gathers that repeat.

        Where a stage's work hides them by far, they only slow it; such a rank need not be computed anew.
        """
        pipeline, (first, block, last) = layout.pipeline, self._gathers_of(layout)
        hiding = 0.5 * OVERLAPPED * split.microbatches * self._stages_of(split, layout.recompute, pipeline).layer.work
        found = []
        repeated = repeats(self.base.model.n_layers, pipeline, split.microbatches)
        for rank, (edge, (layers, most, at_first, at_last)) in enumerate(zip(every, repeated, strict=True)):
            again, hidden = layers * block, most * block <= hiding
            for (times, held), end in ((at_first, first), (at_last, last)):
                again += times * end
                hidden = hidden and times * (held * block + end) <= hiding * held
            if not hidden:
                edge, again = edges(layout.of(self.base), self.hardware, rank).seconds, 0.0
            found.append(edge + SLOWED * again)
        return found

    def _gathers_of(self, layout: Layout) -> tuple[float, float, float]:
        """Seconds of gathering what the first stage has besides blocks; a block; what the last stage has besides."""
        key = (layout.tp, layout.dp_replicate, layout.dp_shard)
        found = self._gathers.get(key)
        if found is None:
            mesh = mesh_of(3, layout.dp_replicate, layout.dp_shard, layout.tp)
            workload = replace(layout.of(self.base), stage_layers=(1, 1, 1), mesh=mesh)
            first, block, last = (gather_seconds(workload, self.hardware, stage) for stage in range(3))
            found = self._gathers[key] = (first - block, block, last - block)
        return found

    def step_seconds(self, layout: Layout) -> float:
        """The same, nothing remembered."""
        return step_seconds(layout.of(self.base), self.hardware)

    @property
    def simulated(self) -> int:
        """Pipelines run so far."""
        return sum(1 for _, _, pipeline in self._runs if pipeline.pp > 1)

    def family_memory_floor(self, split: Split, recompute: Recompute, family: Family) -> float:
        """``memory_floor`` of no layout of the family is less."""
        return self.room.family_floor(split, recompute, family) * BELOW

    def memory_floor(self, split: Split, layout: Layout) -> float:
        """No rank's device reports less than this for the fullest."""
        return self.room.floor(split, layout) * BELOW

    def memory_so_far(self, layout: Layout) -> Iterator[float]:
        """Of the fullest rank among those looked at so far; the last is exact.

        Most in flight has the second rank, and where backward is split one of the last two.
        """
        workload, most, pp = layout.of(self.base), 0.0, layout.pp
        late = (pp - 2, pp - 1) if pp > 2 and splits_backward(layout.pipeline) else ()
        for rank in dict.fromkeys((*late, *range(1, pp), 0)):
            most = max(most, memory(workload, rank, self.hardware).device)
            yield most

    def memory(self, layout: Layout) -> float:
        """Of the fullest rank, exactly."""
        return max(self.memory_so_far(layout))

    def _step(self, split: Split, seconds: float) -> float:
        devices = split.tp * split.pp * split.data_parallel
        slower = self._slower.get(devices)
        if slower is None:
            slower = self._slower[devices] = 1 + stragglers(self.hardware, devices)
        return (seconds + self.hardware.host.step_ms * 1e-3) * slower

    # Stages.

    def _whole(self, split: Split, recompute: Recompute) -> StageSeconds:
        """The whole model as one stage."""
        key = (split.tp, split.microbatch_size, recompute)
        found = self._alone.get(key)
        if found is None:
            workload = self._like(split, recompute, (self.base.model.n_layers,), "1F1B", pp=1)
            (found,) = stage_costs(workload, self.hardware)
            self._alone[key] = found
        return found

    def _like(self, split: Split, recompute: Recompute, layers: tuple[int, ...], schedule: str, pp: int) -> Workload:
        return replace(
            self.base,
            mesh=mesh_of(pp, 1, split.data_parallel, split.tp),
            stage_layers=layers,
            schedule=schedule,
            microbatch_size=split.microbatch_size,
            microbatches=min(split.microbatches, 2),
            recompute=recompute,
        )

    def _stages_of(self, split: Split, recompute: Recompute, pipeline: Pipeline, *, deep: bool = True) -> _Stages:
        """Of a pipeline's stages; with DualPipeV without what its few split backwards recompute besides.

        A stage takes the longer of device and host, each a sum over its layers, so that what an end adds is the
        least where there are most layers, as where ends are ``deep``, and the most where there is one.
        """
        divided, mixed = splits_backward(pipeline), pipeline.schedule == "DualPipeV"
        key = (split.tp, split.microbatch_size, recompute, split.microbatches > 1, divided, mixed, deep)
        found = self._stages.get(key)
        if found is None:
            schedule, pp = ("ZBVZeroBubble", 2) if divided and not mixed else ("1F1B", 4)
            many = self.base.model.n_layers if deep else 1
            costs = stage_costs(self._like(split, recompute, (many, 1, 1, many), schedule, pp), self.hardware)
            first, layer, _, last = (seconds_of(cost, divided, mixed) for cost in costs)
            found = self._stages[key] = _Stages(layer, _beyond(first, layer, many), _beyond(last, layer, many))
        return found

    def _work(self, split: Split, recompute: Recompute, pipeline: Pipeline, *, deep: bool) -> list[float]:
        """Seconds of every rank for one microbatch, ends as in ``_stages_of``."""
        if pipeline.pp == 1:
            one = self._whole(split, recompute)
            return [one.forward + one.backward]
        stages, over = self._stages_of(split, recompute, pipeline, deep=deep), self._shares(pipeline)
        layer = stages.layer.work
        work = [layers * layer for layers in over.held]
        work[0] += stages.first.work
        work[over.end] += stages.last.work
        return work

    def _shares(self, pipeline: Pipeline) -> _Shares:
        v_shaped = SCHEDULES[pipeline.schedule].v_shaped
        return shares(self.base.model.n_layers, pipeline.pp, pipeline.stages_per_rank, v_shaped)

    def _makespan_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> float:
        """Seconds that no run of the schedule can be below.

        A rank cannot begin before its first stage's input has come down to it. Where backward is whole, the last
        thing that it does is followed by the backwards of all stages before. Any stage has to see every microbatch,
        going down or going up, between the first one's way to it and the last one's way from it; the last stage in
        both directions, the one before it too, but for what the last does; any stage where all go down first.
        """
        key = (split, recompute, pipeline)
        found = self._makespans.get(key)
        if found is None:
            if pipeline.pp == 1:
                one = self._whole(split, recompute)
                found = split.microbatches * (one.forward + one.backward)
            else:
                found = self._pipelined_floor(split, recompute, pipeline)
            self._makespans[key] = found
        return found

    def _pipelined_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> float:
        over, send = self._shares(pipeline), self._send(split)
        layer, first, last = self._stages_of(split, recompute, pipeline)
        many, count = self.base.model.n_layers, split.microbatches
        both_ways = layer.forward + layer.up
        through = many * both_ways + first.forward + first.up + last.forward + last.up + over.hops * send
        ending = over.last * both_ways + last.forward + last.up
        largest = over.most * (both_ways if pipeline.schedule in IN_TWO_PHASES else max(layer.forward, layer.up))
        most = max(
            through + (count - 1) * max(ending, largest),
            through - ending - 2 * send + (count - 1) * over.before_last * both_ways,
        )
        both = 0.0 if splits_backward(pipeline) else 1.0
        each, away = layer.forward + both * layer.up, (1 + both) * send
        beginning = first.forward + both * first.up
        for rank in over.longest:
            work = over.held[rank] * layer.work + (first.work if rank == 0 else 0.0)
            work += last.work if rank == over.end else 0.0
            around = over.before[rank] * each + beginning + rank * away if rank else 0.0
            most = max(most, count * work + around)
        return most

    def _run(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> _Run:
        """The simulated pipeline, which is the same however data parallel shards."""
        key = (split, recompute, pipeline)
        found = self._runs.get(key)
        if found is None:
            if pipeline.pp == 1:
                makespan = self._makespan_floor(split, recompute, pipeline)
                found = _Run(makespan, (makespan,))
            else:
                layout = Layout(split.tp, pipeline, 1, split.data_parallel, split.microbatch_size, recompute, False)
                timeline = run_pipeline(layout.of(self.base), self.hardware)
                found = _Run(timeline.makespan, timeline.busy)
            self._runs[key] = found
        return found

    def _send(self, split: Split) -> float:
        key = (split.tp, split.pp, split.microbatch_size)
        found = self._sends.get(key)
        if found is None:
            mesh = mesh_of(split.pp, 1, split.data_parallel, split.tp)
            workload = replace(self.base, mesh=mesh, microbatch_size=split.microbatch_size)
            found = self._sends[key] = send_seconds(workload, self.hardware)
        return found

    # What ranks do besides.

    def _every_edge(self, layout: Layout) -> Sequence[float]:
        """Seconds of every rank besides its pipeline's actions, as if each stage were gathered once."""
        pipeline = layout.pipeline
        if pipeline.pp == 1:
            return (self._edge(layout, (self.base.model.n_layers,), 0),)
        v_shaped = SCHEDULES[pipeline.schedule].v_shaped
        key = (layout.tp, layout.dp_replicate, layout.dp_shard, pipeline.pp, pipeline.stages_per_rank, v_shaped)
        found = self._all_edges.get(key)
        if found is None:
            layers = layers_of(self.base.model.n_layers, pipeline.pp * pipeline.stages_per_rank)
            if not v_shaped:
                # A rank's stages cost together what one stage with all their layers does.
                layers, layout = self._shares(pipeline).held, layout._replace(pipeline=Pipeline(pipeline.pp))
            found = self._all_edges[key] = tuple(self._edge(layout, layers, rank) for rank in range(pipeline.pp))
        return found

    def _least_edge(self, split: Split) -> float:
        """Of any pipeline and however sharded: a rank in the middle with the fewest layers that one may hold."""
        pp, degrees = split.pp, (split.tp, split.pp, split.data_parallel)
        if pp == 1:
            return 0.0
        found = self._least_edges.get(degrees)
        if found is None:
            layers = fewest_of_any(self.base.model.n_layers, pp)
            # Of two ranks both are ends, but where stages go down and back up.
            pipeline, held = Pipeline(pp), (layers,) * pp
            if pp == 2:
                pipeline, held = Pipeline(2, "ZBVZeroBubble", 2), (0, layers, 0, 0)
            found = self._least_edges[degrees] = min(
                self._edge(Layout(split.tp, pipeline, split.data_parallel // shard, shard, 1, "none", False), held, 1)
                for shard in divisors(split.data_parallel)
            )
        return found

    def _edge(self, layout: Layout, layers: tuple[int, ...], rank: int) -> float:
        pp = layout.pp
        two = len(layers) > pp
        held = (layers[rank], layers[-1 - rank]) if two else (layers[rank],)
        first, last = rank == 0, rank == (0 if two else pp - 1)
        key: tuple[object, ...] = (layout.tp, pp, layout.dp_replicate, layout.dp_shard, held, first, last)
        if pp == 1:
            key = (*key, layout.microbatch_size, layout.recompute, layout.reshard_after_forward)
        found = self._edges.get(key)
        if found is None:
            workload = replace(layout.of(self.base), stage_layers=layers)
            found = self._edges[key] = edges(workload, self.hardware, rank).seconds
        return found


def _of_slowest(busy: Sequence[float], every: Sequence[float]) -> float:
    """What the rank does besides whose work and edges take longest together; the first of several."""
    totals = [work + edge for work, edge in zip(busy, every, strict=True)]
    return every[totals.index(max(totals))]


def splits_backward(pipeline: Pipeline) -> bool:
    return pipeline.pp > 1 and SCHEDULES[pipeline.schedule].splits_backward


def seconds_of(cost: StageSeconds, divided: bool, mixed: bool) -> _Seconds:
    """``mixed``: backward is split for some microbatches only."""
    split = cost.inputs + cost.weights
    backward = min(split, cost.backward) if mixed else split if divided else cost.backward
    return _Seconds(cost.forward, cost.forward + backward, cost.inputs if divided else cost.backward)


def _beyond(end: _Seconds, layer: _Seconds, layers: int) -> _Seconds:
    return _Seconds(*(whole - layers * each for whole, each in zip(end, layer, strict=True)))
