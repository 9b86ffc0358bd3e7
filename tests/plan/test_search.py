"""The search passes over most layouts and loses nothing: the same answers as judging every one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from koushi.hardware.hardware import Hardware, load
from koushi.models.llama.sizes import LlamaSize
from koushi.plan.layouts import Layout, Pipeline, Question, Split, layers_of, layouts, mesh_of
from koushi.plan.memory import every_rank
from koushi.plan.room import moments
from koushi.plan.schedule import actions
from koushi.plan.score import Costs, Scored
from koushi.plan.search import BEST, SLOWEST, search
from koushi.plan.search import mesh_of as mesh_degrees
from koushi.plan.step_time import step_time
from koushi.plan.workload import Transformer, Workload
from koushi.schedules import SCHEDULES, microbatches_fit, stages_of_rank

SIZE = LlamaSize(vocab_size=32_000, dim=4096, n_layers=7, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
WORLDS = {
    "roomy": (Question(SIZE, 4, 8, 4096, False), 80.0),
    "tight": (Question(SIZE, 8, 8, 4096, False), 24.0),
    "odd": (Question(replace(SIZE, n_layers=5, tie_embeddings=True), 6, 12, 2048, False), 17.0),
    "compiled": (Question(SIZE, 16, 8, 4096, True), 10.0),
}


worlds = pytest.mark.parametrize(
    "world", ["roomy", "compiled", *(pytest.param(name, marks=pytest.mark.long) for name in ("tight", "odd"))]
)


def hardware(gib: float) -> Hardware:
    shipped = load("h100-sxm-80gb")
    return replace(shipped, devices_per_node=4, chip=replace(shipped.chip, memory_gib=gib))


def base_of(question: Question) -> Workload:
    return Workload(
        model=Transformer.of(question.size),
        mesh=mesh_of(1, 1, 1, 1),
        stage_layers=(question.size.n_layers,),
        schedule="1F1B",
        seq_len=question.seq_len,
        microbatch_size=1,
        microbatches=question.global_batch_size,
    )


def split_of(question: Question, layout: Layout) -> Split:
    data_parallel = layout.dp_replicate * layout.dp_shard
    samples = question.global_batch_size // data_parallel
    return Split(layout.tp, layout.pp, data_parallel, layout.microbatch_size, samples // layout.microbatch_size)


@cache
def judged(world: str) -> tuple[Scored, ...]:
    """Every legal layout, each judged in full."""
    question, gib = WORLDS[world]
    base, on = base_of(question), hardware(gib)
    found = []
    for layout in layouts(question):
        workload = layout.of(base)
        memory = max(one.device for one in every_rank(workload, on))
        found.append(Scored(layout, step_time(workload, on).seconds, memory))
    return tuple(found)


def front_of(fitting: list[Scored]) -> set[tuple[float, float]]:
    fastest = min(one.seconds for one in fitting)
    return {
        (one.seconds, one.memory)
        for one in fitting
        if one.seconds <= SLOWEST * fastest
        and not any(
            other.seconds <= one.seconds
            and other.memory <= one.memory
            and (other.seconds, other.memory) != (one.seconds, one.memory)
            for other in fitting
        )
    }


@worlds
def test_nothing_is_lost(world: str) -> None:
    question, gib = WORLDS[world]
    every = judged(world)
    fitting = [one for one in every if one.memory <= gib * 2**30]
    assert len(fitting) > 0
    assert (len(fitting) < len(every)) is (world != "roomy")
    result = search(question, base_of(question), hardware(gib))
    assert result.legal == len(every)
    assert result.judged < len(every) / 2
    by_mesh: dict[tuple[int, ...], tuple[float, float]] = {}
    for one in fitting:
        mesh = mesh_degrees(one.layout)
        by_mesh[mesh] = min(by_mesh.get(mesh, (one.seconds, one.memory)), (one.seconds, one.memory))
    wanted = sorted(by_mesh.values())[:BEST]
    assert [one.seconds for one in result.best] == pytest.approx([seconds for seconds, _ in wanted])
    assert [one.memory for one in result.best] == [memory for _, memory in wanted]
    assert {(round(one.seconds, 9), one.memory) for one in result.front} == {
        (round(seconds, 9), memory) for seconds, memory in front_of(fitting)
    }
    assert all(one.memory > gib * 2**30 and one.seconds < result.best[0].seconds for one in result.misses)


@worlds
def test_bounds_are_below_what_they_bound(world: str) -> None:
    question, gib = WORLDS[world]
    costs = Costs(base_of(question), hardware(gib))
    for one in judged(world):
        layout, split = one.layout, split_of(question, one.layout)
        floors = (
            costs.split_floor(split, layout.recompute),
            costs.pipeline_floor(split, layout.recompute, layout.pipeline),
            costs.layout_floor(split, layout),
        )
        assert max(floors) <= one.seconds, layout
        assert costs.memory_floor(split, layout.recompute, layout.pipeline, layout.dp_shard) <= one.memory, layout
        assert costs.room.split_floor(split, layout.recompute, layout.dp_shard) <= one.memory, layout
        if layout.pp == 1:
            assert floors[2] == pytest.approx(one.seconds)


InFlight = tuple[tuple[int, ...], tuple[int, ...]]


def in_flight(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> list[InFlight]:
    """As each action begins, by stage: forwards whose backward has not begun, and backwards half done."""
    held = stages_of_rank(schedule, pp, pp * per_rank, rank)
    kept, halves = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
    found = []
    for kind, stage, _ in actions(schedule, pp, pp * per_rank, microbatches)[rank]:
        found.append((tuple(kept.values()), tuple(halves.values())))
        if kind == "F":
            kept[stage] += 1
        elif kind == "W":
            halves[stage] -= 1
        else:
            kept[stage] -= 1
            halves[stage] += kind == "I"
    return found


def test_moments_are_those_of_the_schedules() -> None:
    tried = 0
    for schedule, needs in SCHEDULES.items():
        for pp in (2, 3, 4):
            for per_rank in range(needs.fewest_stages_per_rank, (needs.most_stages_per_rank or 4) + 1):
                for microbatches in (m for m in range(1, 14) if microbatches_fit(schedule, pp, pp * per_rank, m)):
                    for rank in range(pp):
                        seen = in_flight(schedule, pp, per_rank, microbatches, rank)
                        for moment in moments(schedule, pp, per_rank, microbatches, rank):
                            assert any(
                                all(own <= there for own, there in zip(moment.kept, kept, strict=True))
                                and all(own <= there for own, there in zip(moment.halves, halves, strict=True))
                                for kept, halves in seen
                            ), (schedule, pp, per_rank, microbatches, rank, moment)
                            tried += 1
    assert tried > 1000


def test_what_nothing_fits_into() -> None:
    question, _ = WORLDS["tight"]
    result = search(question, base_of(question), hardware(2.0))
    assert (result.best, result.front) == ((), ())
    assert result.legal > 500


def test_layers_of_stages_are_divided_as_check_does() -> None:
    layout = Layout(1, Pipeline(4, "Interleaved1F1B", 2), 1, 1, 1, "none", False)
    base = base_of(replace(WORLDS["roomy"][0], size=replace(SIZE, n_layers=11)))
    assert layout.of(base).stage_layers == layers_of(11, 8)
