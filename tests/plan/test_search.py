"""The search passes over most layouts and loses nothing: the same answers as judging every one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from searched import base_of

from koushi.hardware.hardware import Hardware, load
from koushi.models.llama.sizes import LlamaSize
from koushi.plan.layouts import Fixed, Layout, Pipeline, Question, Split, is_legal, layers_of, layouts, split_of
from koushi.plan.memory import every_rank
from koushi.plan.moments import (
    FAMILIES,
    Counts,
    fewest_in_flight,
    fewest_layers,
    moments,
    per_round,
    share,
    v_moments,
)
from koushi.plan.plan import TIGHT
from koushi.plan.schedule import actions
from koushi.plan.score import Costs, Scored
from koushi.plan.search import BEST, SLOWEST, SearchResult, degrees_of, search
from koushi.plan.step_time import step_time
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Workload
from koushi.schedules import SCHEDULES, microbatches_fit, stages_of_rank

SIZE = LlamaSize(vocab_size=32_000, dim=4096, n_layers=7, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
WORLDS = {
    "roomy": (Question(SIZE, 4, 8, 4096, False), 80.0),
    "tight": (Question(SIZE, 8, 8, 4096, False), 24.0),
    "odd": (Question(replace(SIZE, n_layers=5, tie_embeddings=True), 6, 12, 2048, False), 17.0),
    "deep": (Question(replace(SIZE, n_layers=13), 4, 8, 4096, False), 60.0),
    "wide": (Question(replace(SIZE, n_layers=18), 32, 32, 4096, False), 30.0),
    "compiled": (Question(SIZE, 16, 8, 4096, True), 10.0),
}


worlds = pytest.mark.parametrize(
    "world", [pytest.param(name, marks=pytest.mark.long) if name == "wide" else name for name in WORLDS]
)


def hardware(gib: float) -> Hardware:
    shipped = load("h100-sxm-80gb")
    return replace(shipped, devices_per_node=4, chip=replace(shipped.chip, memory_gib=gib))


@cache
def judged(world: str) -> tuple[Scored, ...]:
    """Every legal layout, each judged in full."""
    question, gib = WORLDS[world]
    return tuple(every_layout(question, base_of(question), hardware(gib)))


def every_layout(question: Question, base: Workload, on: Hardware) -> Iterator[Scored]:
    for layout in layouts(question):
        workload = layout.of(base)
        memory = max(one.device for one in every_rank(workload, on))
        yield Scored(layout, step_time(workload, on).seconds, memory)


def front_of(fitting: Sequence[Scored]) -> set[tuple[float, float]]:
    """Seconds and memory of what no other beats; what differs by rounding alone takes as long."""
    fastest = min(one.seconds for one in fitting)
    found = {(round(one.seconds, 9), one.memory) for one in fitting if one.seconds <= SLOWEST * fastest}
    return {
        (seconds, memory)
        for seconds, memory in found
        if not any(
            other <= seconds and least <= memory and (other, least) != (seconds, memory) for other, least in found
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
    assert result.judged < len(every) / 2
    loses_nothing(result, every, gib)


def loses_nothing(result: SearchResult, every: Sequence[Scored], gib: float) -> None:
    """Against ``every`` layout of a question, of which some fit."""
    fitting = [one for one in every if one.memory <= gib * 2**30]
    assert result.legal == len(every)
    by_degrees: dict[tuple[int, ...], tuple[float, float]] = {}
    for one in fitting:
        degrees = degrees_of(one.layout)
        by_degrees[degrees] = min(by_degrees.get(degrees, (one.seconds, one.memory)), (one.seconds, one.memory))
    wanted = sorted(by_degrees.values())[:BEST]
    assert [one.seconds for one in result.best] == pytest.approx([seconds for seconds, _ in wanted])
    assert [one.memory for one in result.best] == [memory for _, memory in wanted]
    assert front_of(result.front) == front_of(fitting)
    assert all(one.memory > gib * 2**30 and one.seconds < result.best[0].seconds for one in result.misses)
    assert bool(result.misses) is any(one.memory > gib * 2**30 and one.seconds < wanted[0][0] for one in every)
    roomy = [one.seconds for one in fitting if one.memory <= TIGHT * gib * 2**30]
    fastest = min(roomy) if roomy and min(roomy) <= SLOWEST * wanted[0][0] else wanted[0][0]
    assert result.chosen is not None
    assert result.chosen.seconds == pytest.approx(fastest)
    assert {result.is_tight(one) for one in result.misses} <= {False}


def fixed_fields(layout: Layout) -> dict[str, object]:
    """All that can be fixed of it: without a pipeline no schedule, without shards no resharding."""
    found = {name: value for name, value in layout._asdict().items() if name != "pipeline"} | {"pp": layout.pp}
    if layout.pp > 1:
        found |= {name: getattr(layout.pipeline, name) for name in ("schedule", "stages_per_rank")}
    if layout.pp > 1 or layout.dp_replicate * layout.dp_shard == 1:
        del found["reshard_after_forward"]
    return found


def has(layout: Layout, wanted: Mapping[str, object]) -> bool:
    found = fixed_fields(layout)
    return all(found.get(name, value) == value for name, value in wanted.items())


@pytest.mark.parametrize("world", ["roomy", "tight", "odd", "deep"])
def test_nothing_is_lost_of_what_is_fixed(world: str) -> None:
    """Each field by each of its values, and fields of layouts drawn at random together."""
    question, gib = WORLDS[world]
    every, random = judged(world), Random(world)
    single = {(name, value) for one in every for name, value in fixed_fields(one.layout).items()}
    wishes = [{name: value} for name, value in sorted(single, key=str)]
    for one in random.sample(every, 12):
        fields = fixed_fields(one.layout)
        wishes.append({name: fields[name] for name in random.sample(sorted(fields), random.randint(2, len(fields)))})
    for wanted in wishes:
        fixed = Fixed(**wanted)  # type: ignore[arg-type]
        left = [one for one in every if has(one.layout, wanted)]
        asked = replace(question, fixed=fixed)
        assert [one for one in every if is_legal(asked, one.layout)] == left, wanted
        assert Fixed.of(fixed.values()) == fixed
        result = search(asked, base_of(question), hardware(gib))
        if any(one.memory <= gib * 2**30 for one in left):
            loses_nothing(result, left, gib)
        else:
            assert (result.best, result.chosen, result.legal) == ((), None, len(left)), wanted


@worlds
def test_bounds_are_below_what_they_bound(world: str) -> None:
    question, gib = WORLDS[world]
    bounds_hold(question, Costs(base_of(question), hardware(gib)), judged(world))


def bounds_hold(question: Question, costs: Costs, every: Sequence[Scored]) -> None:
    for one in every:
        layout, split = one.layout, split_of(question, one.layout)
        floors = (
            costs.split_floor(split),
            costs.group_floor(split, layout.recompute),
            costs.pipeline_floor(split, layout.recompute, layout.pipeline),
            costs.layout_floor(split, layout),
            costs.simulated_floor(split, layout),
        )
        assert max(floors) <= one.seconds, layout
        assert costs.memory_floor(split, layout) <= one.memory, layout
        assert costs.room.split_floor(split, layout.dp_shard) <= one.memory, layout
        family = FAMILIES[layout.pipeline.schedule]
        assert costs.family_memory_floor(split, layout.recompute, family) <= costs.memory_floor(split, layout), layout
        assert costs.seconds(split, layout) == pytest.approx(one.seconds)
        if layout.pipeline.stages_per_rank <= MOST_UNSHARDED:
            assert floors[-1] == pytest.approx(one.seconds)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_of_jobs_made_up_at_random(seed: int) -> None:
    random = Random(seed)
    question = Question(
        size=LlamaSize(
            vocab_size=random.choice((512, 32_000, 128_256)),
            dim=random.choice((512, 2048, 8192)),
            n_layers=random.randint(2, 6),
            n_heads=8,
            n_kv_heads=random.choice((2, 8)),
            ffn_dim=random.choice((1024, 16_384)),
            tie_embeddings=random.random() < 0.3,
        ),
        devices=random.choice((6, 8, 12)),
        global_batch_size=24,
        seq_len=random.choice((128, 4096)),
        compiled=random.random() < 0.3,
    )
    kinds = {name: random.choice(("float32", "bfloat16")) for name in ("parameters", "compute", "reduce")}
    base = replace(base_of(question), **kinds)
    every = list(every_layout(question, base, hardware(80.0)))
    gib = sorted(one.memory for one in every)[random.randrange(len(every))] / 2**30
    bounds_hold(question, Costs(base, hardware(gib)), every)
    loses_nothing(search(question, base, hardware(gib)), every, gib)


SMALL = {
    # Where the host is behind: which rank is the slowest depends on what ends add, the more the fewer layers they have.
    "ends": (replace(SIZE, vocab_size=128_256, dim=384, n_heads=3, n_kv_heads=1, ffn_dim=4096), (4, 4, 6, True), 80.0),
    # Where what has fewer shards than a layout that is too large already is faster than all that fits.
    "shards": (
        LlamaSize(vocab_size=32_000, dim=8, n_layers=6, n_heads=4, n_kv_heads=1, ffn_dim=48, tie_embeddings=True),
        (4, 8, 12, False),
        1.1817,
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_lost_of_jobs_too_small_for_their_devices(name: str) -> None:
    size, (devices, batch, seq_len, compiled), gib = SMALL[name]
    question = Question(size, devices, batch, seq_len, compiled)
    on = load("b200" if compiled else "h100-sxm-80gb")
    on = replace(on, chip=replace(on.chip, memory_gib=gib))
    base = replace(base_of(question), compute="float32" if compiled else "bfloat16")
    every = list(every_layout(question, base, on))
    bounds_hold(question, Costs(base, on), every)
    loses_nothing(search(question, base, on), every, gib)


InFlight = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Forwards, then by stage: forwards, backwards begun, microbatches done with."""


def counted(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> list[InFlight]:
    """As each action of a rank begins, from the table of actions."""
    held = stages_of_rank(schedule, pp, pp * per_rank, rank)
    counts = {kind: dict.fromkeys(held, 0) for kind in ("F", "I", "W")}
    found = []
    for kind, stage, _ in actions(schedule, pp, pp * per_rank, microbatches)[rank]:
        by_kind = [tuple(each.values()) for each in counts.values()]
        found.append((sum(by_kind[0]), *by_kind))
        for one in "IW" if kind == "B" else kind:
            counts[one][stage] += 1
    return found


def in_turns(actions: int, per_rank: int, each: int) -> list[int]:
    """By stage: how many of a rank's first actions it has, where a stage has so many at a turn."""
    turns = [index // each % per_rank for index in range(actions)]
    return [turns.count(stage) for stage in range(per_rank)]


def test_moments_are_those_of_the_schedules() -> None:
    tried = 0
    for schedule, pp, per_rank, microbatches in schedule_cases():
        for rank in range(pp):
            seen = counted(schedule, pp, per_rank, microbatches, rank)
            if SCHEDULES[schedule].v_shaped:
                kept = [(made[0] - gone[0], made[1] - gone[1]) for _, made, _, gone in seen]
                for down, up, _ in v_moments(pp, microbatches, rank):
                    assert any(down <= one and up <= other for one, other in kept), (schedule, pp, microbatches, rank)
                    tried += 1
                continue
            each = per_round(schedule, pp, per_rank, microbatches)
            for forwards, backwards, freed in moments(schedule, pp, per_rank, microbatches, rank):
                there = (
                    forwards,
                    tuple(in_turns(forwards, per_rank, each)),
                    tuple(in_turns(backwards, per_rank, each)[::-1]),
                    tuple(in_turns(freed, per_rank, each)[::-1]),
                )
                assert there in seen, (schedule, pp, per_rank, microbatches, rank)
                tried += 1
    assert tried > 1000


def test_no_second_rank_has_less_in_flight_than_its_family() -> None:
    """With as many layers as there are stages and more, so that stages are uneven in every way."""
    tried: Counter[str] = Counter()
    for schedule, pp, per_rank, microbatches in schedule_cases():
        family = FAMILIES[schedule]
        for n_layers in range(pp * per_rank, 3 * pp * per_rank + 2):
            found = share(n_layers, Pipeline(pp, schedule, per_rank), microbatches, 1)
            kept, halves, adding, *_ = found.moments[0]
            assert halves == adding == Counts()
            tried[family] += 1
            if family == "v-shaped":
                assert kept == share(n_layers, Pipeline(pp, "ZBVZeroBubble", 2), microbatches, 1).moments[0][0]
                continue
            layers = fewest_layers(n_layers, pp)
            assert found.stages.layers >= layers
            assert kept.layers >= fewest_in_flight(family, pp, microbatches) * layers, (schedule, pp, per_rank)
            gathered = sorted(one.layers for one in found.moments[0].gathered)[-MOST_UNSHARDED:]
            assert sum(gathered) >= min(layers, MOST_UNSHARDED)
    assert len(tried) == 3
    assert min(tried.values()) > 500


def test_what_a_rank_keeps_is_what_its_stages_keep() -> None:
    """Counts by closed forms, held against stages counted one by one."""
    tried = 0
    for schedule, pp, per_rank, microbatches in schedule_cases():
        if SCHEDULES[schedule].v_shaped:
            continue
        each, n_layers = per_round(schedule, pp, per_rank, microbatches), 2 * pp * per_rank + 1
        for rank in range(pp):
            held = stages_of_rank(schedule, pp, pp * per_rank, rank)
            layers = [layers_of(n_layers, pp * per_rank)[stage] for stage in held]
            ends = [(stage == 0, stage == pp * per_rank - 1) for stage in held]
            found = share(n_layers, Pipeline(pp, schedule, per_rank), microbatches, rank).moments
            times = moments(schedule, pp, per_rank, microbatches, rank)
            for (kept, halves, adding, added_up, *_), (forwards, backwards, freed) in zip(found, times, strict=True):
                down = in_turns(forwards, per_rank, each)
                up, gone = (in_turns(done, per_rank, each)[::-1] for done in (backwards, freed))
                there = [one - other for one, other in zip(down, up, strict=True)]
                blocks = sum((one - other) * many for one, other, many in zip(down, gone, layers, strict=True))
                summed = [one > 0 and other < microbatches for one, other in zip(gone, up, strict=True)]
                assert kept == Counts(blocks, *by_end(there, ends))
                half = [one - other for one, other in zip(up, gone, strict=True)]
                besides = sum(one * many for one, many, (first, _) in zip(half, layers, ends, strict=True) if not first)
                assert halves == Counts(besides, *by_end(half, ends))
                assert adding == Counts(
                    sum(many for many, adds in zip(layers, summed, strict=True) if adds), *by_end(summed, ends)
                )
                # Of these a sum: all where backward is whole, no more than begun where it is split.
                assert all(one <= other for one, other in zip(added_up, adding, strict=True))
                assert added_up == adding or freed < backwards
                tried += 1
    assert tried > 1000


def test_no_more_gradients_are_summed_than_a_second_backward_has_begun_after() -> None:
    tried = 0
    for schedule, pp, per_rank, microbatches in schedule_cases():
        if schedule != "InterleavedZeroBubble":
            continue
        n_stages, n_layers = pp * per_rank, 2 * pp * per_rank + 1
        layers = layers_of(n_layers, n_stages)
        for rank in range(pp):
            waiting, summed, most = set[int](), set[int](), dict[tuple[int, int], int]()
            forwards = backwards = 0
            for kind, stage, _ in actions(schedule, pp, n_stages, microbatches)[rank]:
                most[forwards, backwards] = sum(layers[one] for one in summed)
                forwards, backwards = forwards + (kind == "F"), backwards + (kind == "I")
                if kind == "W":
                    (waiting if stage else summed).add(stage)
                elif kind == "I" and stage in waiting:
                    waiting.discard(stage)
                    summed.add(stage)
            share_of = share(n_layers, Pipeline(pp, schedule, per_rank), microbatches, rank)
            for one, moment in zip(share_of.moments, moments(schedule, pp, per_rank, microbatches, rank), strict=True):
                assert one[3].layers <= most[moment.forwards, moment.backwards], (pp, per_rank, microbatches, rank)
                tried += one[3].layers > 0
    assert tried > 100


def by_end(counts: Sequence[int], ends: Sequence[tuple[bool, bool]]) -> tuple[int, int, int]:
    """Of first, middle and last stages."""
    first, last = (sum(n for n, end in zip(counts, ends, strict=True) if end[which]) for which in (0, 1))
    return first, sum(counts) - first - last, last


def schedule_cases() -> Iterator[tuple[str, int, int, int]]:
    for schedule, needs in SCHEDULES.items():
        for pp in (2, 3, 4):
            for per_rank in range(needs.fewest_stages_per_rank, (needs.most_stages_per_rank or 4) + 1):
                for microbatches in range(1, 14):
                    if microbatches_fit(schedule, pp, pp * per_rank, microbatches):
                        yield schedule, pp, per_rank, microbatches


def test_what_nothing_fits_into() -> None:
    question, _ = WORLDS["tight"]
    result = search(question, base_of(question), hardware(2.0))
    assert (result.best, result.front, result.chosen) == ((), (), None)
    assert result.legal > 500
    assert result.misses[0].memory == min(one.memory for one in judged("tight"))
    assert [one.memory for one in result.misses] == sorted(one.memory for one in result.misses)


def test_the_fastest_with_room_is_preferred() -> None:
    question, _ = WORLDS["roomy"]
    fastest = search(question, base_of(question), hardware(80.0)).best[0]
    result = search(question, base_of(question), hardware(fastest.memory / 2**30 / 0.95))
    assert result.best[0].layout == fastest.layout
    assert result.is_tight(result.best[0])
    assert result.chosen is not None
    assert not result.is_tight(result.chosen)
    assert result.chosen.seconds > fastest.seconds


def test_layers_of_stages_are_divided_as_check_does() -> None:
    layout = Layout(1, Pipeline(4, "Interleaved1F1B", 2), 1, 1, 1, "none", False)
    base = base_of(replace(WORLDS["roomy"][0], size=replace(SIZE, n_layers=11)))
    assert layout.of(base).stage_layers == layers_of(11, 8)


def test_what_gathers_nothing_may_be_smaller_than_fewer_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gathers in float64 take more room than shards of bfloat16 spare."""
    size = replace(SIZE, vocab_size=512, n_layers=2, n_heads=8)
    question = Question(size, 8, 16, 1024, False)
    base = replace(base_of(question), parameters="bfloat16", reduce="bfloat16", compute="float64")
    split = Split(tp=1, pp=2, data_parallel=4, microbatch_size=2, microbatches=2)
    every = {
        layout: max(one.device for one in every_rank(layout.of(base), hardware(80.0)))
        for layout in layouts(question)
        if split_of(question, layout) == split
    }
    whole = next(one for one in every if one.dp_shard == 1 and one.recompute == "none")
    on = hardware(every[whole] / 2**30)
    costs = Costs(base, on)
    assert costs.memory_floor(split, whole._replace(dp_replicate=2, dp_shard=2)) > every[whole]
    monkeypatch.setattr("koushi.plan.search.splits", lambda _: [split])
    fitting = [
        Scored(layout, step_time(layout.of(base), on).seconds, memory)
        for layout, memory in every.items()
        if memory <= every[whole]
    ]
    found = search(question, base, on)
    assert found.best == (min(fitting, key=lambda one: one.rank),)
    assert found.best[0].layout.dp_shard == 1


def test_the_bound_of_memory_leaves_out_gathers_of_stages_that_are_done() -> None:
    """As the last stage to do so adds up its gradients, where the batch goes through each stage at one turn."""
    size = replace(SIZE, vocab_size=512, dim=1024, n_layers=8, n_heads=8, ffn_dim=4096)
    question = Question(size, 8, 16, 128, False)
    layout = Layout(1, Pipeline(2, "Interleaved1F1B", 4), 1, 4, 2, "full", False)
    for parameters in ("bfloat16", "float32"):
        base = replace(base_of(question), parameters=parameters)
        exact = max(one.device for one in every_rank(layout.of(base), hardware(80.0)))
        assert 0.9 * exact < Costs(base, hardware(80.0)).memory_floor(split_of(question, layout), layout) <= exact
