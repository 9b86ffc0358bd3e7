"""Costs of layouts as a search asks for them: bounds first, exact at the end, whatever repeats remembered. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from koushi.hardware.hardware import Hardware
from koushi.plan.edges import edges
from koushi.plan.layouts import Layout, Pipeline, Split, layers_of, mesh_of
from koushi.plan.memory import every_rank
from koushi.plan.room import Room
from koushi.plan.schedule import StageSeconds
from koushi.plan.stage_time import send_seconds, stage_costs
from koushi.plan.step_time import step_seconds, stragglers
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES, stages_of_rank

BELOW = 1 - 1e-9
"""Bounds are this much lower than they are computed, so that rounding never puts one above what it bounds."""


@dataclass(frozen=True)
class Scored:
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


@dataclass(frozen=True)
class _Ranks:
    """What the ranks of a pipeline do with one microbatch."""

    work: tuple[float, ...]
    """Seconds of every rank."""
    around: tuple[float, ...]
    """Of every rank: seconds of other ranks that come before its first action or after its last, without messages."""
    messages: int
    """That each rank further down adds to that."""
    through: float
    """Seconds of one microbatch down all stages and up again, without messages."""
    last: float
    """Seconds of one microbatch on the last stage, which sees them one after the other."""
    hops: int
    """Messages on the way down and up."""

    def makespan_floor(self, microbatches: int, send: float) -> float:
        """Seconds that no run of the schedule can be below."""
        most, away = self.through + (microbatches - 1) * self.last + self.hops * send, self.messages * send
        for rank, (work, around) in enumerate(zip(self.work, self.around, strict=True)):
            most = max(most, microbatches * work + around + rank * away)
        return most


class Costs:
    """Of layouts of one run on one kind of hardware."""

    def __init__(self, base: Workload, hardware: Hardware):
        self.base = base
        self.hardware = hardware
        self.capacity = hardware.chip.memory_bytes
        self.room = Room(base, hardware)
        self._stages: dict[tuple[object, ...], tuple[StageSeconds, ...]] = {}
        self._ranks: dict[tuple[object, ...], _Ranks] = {}
        self._sends: dict[tuple[int, int, int], float] = {}
        self._edges: dict[tuple[object, ...], float] = {}

    def split_floor(self, split: Split, recompute: Recompute) -> float:
        """No step of any pipeline is shorter than an even share of the work."""
        (one,) = self._costs(split, Pipeline(), recompute)
        return self._step(split, split.microbatches * (one.forward + one.backward) / split.pp) * BELOW

    def pipeline_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> float:
        """No step is shorter than what its ranks' work and the way down and up the stages take."""
        return self._step(split, self._makespan_floor(split, recompute, pipeline)) * BELOW

    def layout_floor(self, split: Split, layout: Layout) -> float:
        """All but the simulated pipeline is exact; without a pipeline nothing is left open."""
        makespan = self._makespan_floor(split, layout.recompute, layout.pipeline)
        every = self._every_edge(layout)
        least = min(every)
        pipeline = layout.pipeline
        if pipeline.stages_per_rank <= MOST_UNSHARDED and not _splits(pipeline):
            # Which rank is the slowest is known: it depends neither on split backwards nor on gathers that repeat.
            work = self._ranks_of(split, layout.recompute, pipeline).work
            totals = [split.microbatches * one + edge for one, edge in zip(work, every, strict=True)]
            least = every[totals.index(max(totals))]
        return self._step(split, makespan + least) * BELOW

    def seconds(self, layout: Layout) -> float:
        """Of a step, exactly."""
        return step_seconds(layout.of(self.base), self.hardware)

    def memory_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline, dp_shard: int) -> float:
        """No rank's device reports less than this for the fullest."""
        return self.room.floor(split, recompute, pipeline, dp_shard) * BELOW

    def memory(self, layout: Layout) -> float:
        """Of the fullest rank, exactly."""
        return max(one.device for one in every_rank(layout.of(self.base), self.hardware))

    def _step(self, split: Split, seconds: float) -> float:
        devices = split.tp * split.pp * split.data_parallel
        return (seconds + self.hardware.host.step_ms * 1e-3) * (1 + stragglers(self.hardware, devices))

    def _costs(self, split: Split, pipeline: Pipeline, recompute: Recompute) -> tuple[StageSeconds, ...]:
        """Of every stage; with DualPipeV without what its few split backwards recompute besides."""
        n_stages = pipeline.pp * pipeline.stages_per_rank
        kind = "1F1B" if pipeline.schedule == "DualPipeV" or not _splits(pipeline) else "ZBVZeroBubble"
        several = split.microbatches > 1
        key = (split.tp, n_stages, pipeline.pp > 1, split.microbatch_size, recompute, several, kind)
        found = self._stages.get(key)
        if found is None:
            layers = layers_of(self.base.model.n_layers, n_stages)
            found = self._stages[key] = self._computed(split, pipeline.pp > 1, recompute, layers, kind)
        return found

    def _computed(
        self, split: Split, pipelined: bool, recompute: Recompute, layers: tuple[int, ...], schedule: str
    ) -> tuple[StageSeconds, ...]:
        """Stages between the ends differ by a layer at most, so that one of each kind is enough."""
        middle = sorted(set(layers[1:-1]))
        few = layers if len(layers) < 4 else (layers[0], middle[0], middle[-1], layers[-1])
        ranks = len(few) if schedule == "1F1B" else len(few) // 2
        workload = replace(
            self.base,
            mesh=mesh_of(ranks if pipelined else 1, 1, split.data_parallel, split.tp),
            stage_layers=few,
            schedule=schedule,
            microbatch_size=split.microbatch_size,
            microbatches=min(split.microbatches, 2),
            recompute=recompute,
        )
        costs = stage_costs(workload, self.hardware)
        if few is layers:
            return costs
        by_layers = {middle[0]: costs[1], middle[-1]: costs[2]}
        return (costs[0], *(by_layers[count] for count in layers[1:-1]), costs[-1])

    def _makespan_floor(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> float:
        ranks = self._ranks_of(split, recompute, pipeline)
        return ranks.makespan_floor(split.microbatches, self._send(split) if pipeline.pp > 1 else 0.0)

    def _ranks_of(self, split: Split, recompute: Recompute, pipeline: Pipeline) -> _Ranks:
        costs = self._costs(split, pipeline, recompute)
        mixed = pipeline.schedule == "DualPipeV"
        key = (id(costs), pipeline.pp, SCHEDULES[pipeline.schedule].v_shaped, _splits(pipeline), mixed)
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = ranks_of(pipeline, costs)
        return found

    def _send(self, split: Split) -> float:
        key = (split.tp, split.pp, split.microbatch_size)
        found = self._sends.get(key)
        if found is None:
            mesh = mesh_of(split.pp, 1, split.data_parallel, split.tp)
            workload = replace(self.base, mesh=mesh, microbatch_size=split.microbatch_size)
            found = self._sends[key] = send_seconds(workload, self.hardware)
        return found

    def _every_edge(self, layout: Layout) -> list[float]:
        """Seconds of every rank besides its pipeline's actions, as if each stage were gathered once."""
        pipeline = layout.pipeline
        layers = layers_of(self.base.model.n_layers, pipeline.pp * pipeline.stages_per_rank)
        if pipeline.stages_per_rank > MOST_UNSHARDED:
            layers = tuple(sum(layers[rank :: pipeline.pp]) for rank in range(pipeline.pp))
            layout = replace(layout, pipeline=Pipeline(pipeline.pp))
        return [self._edge(layout, layers, rank) for rank in range(pipeline.pp)]

    def _edge(self, layout: Layout, layers: tuple[int, ...], rank: int) -> float:
        pp = layout.pp
        held = stages_of_rank(layout.pipeline.schedule, pp, len(layers), rank) if pp > 1 else (0,)
        kind = tuple((layers[stage], stage == 0, stage == len(layers) - 1) for stage in held)
        key: tuple[object, ...] = (layout.tp, pp, layout.dp_replicate, layout.dp_shard, kind)
        if pp == 1:
            key = (*key, layout.microbatch_size, layout.recompute, layout.reshard_after_forward)
        found = self._edges.get(key)
        if found is None:
            workload = replace(layout.of(self.base), stage_layers=layers)
            found = self._edges[key] = edges(workload, self.hardware, rank).seconds
        return found


def _splits(pipeline: Pipeline) -> bool:
    return pipeline.pp > 1 and SCHEDULES[pipeline.schedule].splits_backward


def ranks_of(pipeline: Pipeline, costs: Sequence[StageSeconds]) -> _Ranks:
    """A rank cannot begin before its first stage's input has come down to it. Where backward is whole, the last
    thing that it does is followed by the backwards of all stages before. The last stage has to see every
    microbatch between the first one's way down and the last one's way up."""
    divided, pp = _splits(pipeline), pipeline.pp
    v_shaped = pp > 1 and SCHEDULES[pipeline.schedule].v_shaped
    mixed = pipeline.schedule == "DualPipeV"
    split = [one.inputs + one.weights for one in costs]
    whole = [one.backward for one in costs]
    backward = [min(pair) for pair in zip(split, whole, strict=True)] if mixed else split if divided else whole
    work = [one.forward + seconds for one, seconds in zip(costs, backward, strict=True)]
    up = [one.inputs for one in costs] if divided else whole
    around, so_far = [], 0.0
    for rank in range(pp):
        around.append(so_far)
        so_far += costs[rank].forward + (0.0 if divided else up[rank])
    if v_shaped:
        each = [work[rank] + work[-1 - rank] for rank in range(pp)]
    else:
        each = [sum(work[rank::pp]) for rank in range(pp)]
    through = sum(one.forward for one in costs) + sum(up)
    hops = 2 * (len(costs) - (2 if v_shaped else 1)) if pp > 1 else 0
    last = costs[-1].forward + up[-1]
    return _Ranks(tuple(each), tuple(around), 1 if divided else 2, through, last, hops)
