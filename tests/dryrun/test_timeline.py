from __future__ import annotations

import json
from collections import Counter, defaultdict
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from tiny import tiny_job

from koushi.check.check import check
from koushi.config.load import load
from koushi.dryrun.extrapolate import whole
from koushi.dryrun.flops import block_of
from koushi.dryrun.ranks import rank_classes
from koushi.dryrun.timeline import COMPUTE, Slice, timeline, write
from koushi.job import Job
from koushi.plan.command import hardware_of
from koushi.plan.edges import edges, seconds_of
from koushi.plan.schedule import StageSeconds, simulate
from koushi.plan.workload import of_job
from koushi.schedules import SCHEDULES
from koushi.traffic import Collective

EXAMPLES = Path(__file__).parents[2] / "examples"
RATE = 1e9
SECOND_PER_BYTE = 1e-9
GATHERS, REDUCTIONS = "dp_shard all_gather", "dp_shard reduce_scatter"
LAYOUTS = {
    "alone": (),
    "sharded": ("--dp-shard", "2"),
    "kept gathered": ("--dp-shard", "2", "parallelism.reshard_after_forward=never"),
    "recomputed": ("--dp-shard", "2", "training.recompute=full"),
    "hybrid": ("--dp-shard", "2", "--dp-replicate", "2"),
    "tied": ("--dp-shard", "2", "--tp", "2", "model.tie_embeddings=true"),
    "cut": ("--dp-shard", "2", "--tp", "2"),
}


def seconds(collective: Collective) -> float:
    return collective.bytes * SECOND_PER_BYTE


def slices_of(job: Job) -> list[Slice]:
    traces = whole(job, "cuda", [one.representative for one in rank_classes(job)])
    return timeline(job.mesh, traces, RATE, seconds)


@pytest.mark.parametrize("schedule", ("1F1B", "ZBVZeroBubble"))
def test_a_pipelined_step(tmp_path: Path, schedule: str) -> None:
    job = tiny_job(
        tmp_path, "--pp", "2", "--dp-shard", "2", "training.global_batch_size=8", "model.tie_embeddings=true",
        f"parallelism.pipeline_parallel_schedule={schedule}", "model.n_layers=4",
    )  # fmt: skip
    slices = slices_of(job)
    lanes = defaultdict(list)
    for one in slices:
        lanes[one.pp, one.lane].append(one)
    assert set(lanes) == {(pp, lane) for pp in (0, 1) for lane in (COMPUTE, "pp", "dp_shard", GATHERS, REDUCTIONS)}
    for held in lanes.values():
        ordered = sorted(held, key=lambda one: one.start)
        assert all(first.start + first.seconds <= then.start + 1e-12 for first, then in pairwise(ordered))
    # The last stage's first rank cannot compute before it has been sent something.
    sends = [one for one in lanes[0, "pp"] if one.event is not None and one.event.collective.operation == "send"]
    assert sends and min(one.start for one in lanes[1, COMPUTE]) >= min(one.start + one.seconds for one in sends)


@pytest.mark.parametrize("tp", ("1", "2"))
def test_a_stage_begins_with_a_microbatch_when_it_has_come(tmp_path: Path, tp: str) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "--tp", tp, "training.global_batch_size=4", "model.n_layers=4")
    slices = slices_of(job)
    assert job.microbatches == 4

    def sent(pp: int) -> list[float]:
        mine = (one for one in slices if one.pp == pp and one.lane == "pp")
        return [one.start + one.seconds for one in mine if one.name.startswith("send")]

    def begun(pp: int, phase: str, block: str) -> list[float]:
        """When each of the turns begins in which the rank works on ``block``, with what its tp groups exchange."""
        mine = [one for one in slices if one.pp == pp and one.lane in (COMPUTE, "tp")]
        turns = groupby(mine, key=lambda one: (_phase(one), block_of(_module(one))))
        return [next(held).start for key, held in turns if key == (phase, block)]

    for pp, phase, block in ((1, "forward", "layers.2"), (0, "backward", "layers.1")):
        starts, ends = begun(pp, phase, block), sent(1 - pp)
        assert len(starts) == len(ends) == job.microbatches
        assert all(start >= end - 1e-12 for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize("name", [name for name, needs in SCHEDULES.items() if not needs.splits_backward])
@pytest.mark.parametrize("pp", [2, 3])
def test_a_step_takes_as_long_as_its_schedule_where_messages_take_nothing(tmp_path: Path, name: str, pp: int) -> None:
    """Every stage waits for its own microbatch's message, and for no other."""
    pipeline = (
        "--pp",
        str(pp),
        f"parallelism.pipeline_parallel_schedule={name}",
        f"training.global_batch_size={2 * pp}",
    )
    job = tiny_job(tmp_path, *pipeline, "model.n_layers=12", "model.vocab_size=64")
    traces = whole(job, "cuda", [one.representative for one in rank_classes(job)])
    slices = timeline(job.mesh, traces, RATE, lambda _: 0.0)
    spent: Counter[tuple[int, str]] = Counter()
    last = len(job.stages) - 1
    for one in (one for one in slices if one.lane == COMPUTE):
        phase, _, block = one.name.partition(" ")
        layer = int(block.partition(".")[2]) if block.startswith("layers.") else None
        stage = last if layer is None else next(at for at, layers in enumerate(job.stages) if layer in layers)
        spent[stage, phase] += one.seconds / job.microbatches
    stages = [StageSeconds(spent[at, "forward"], spent[at, "backward"], 0.0) for at in range(last + 1)]
    expected = simulate(name, pp, last + 1, job.microbatches, stages, 0.0).makespan
    assert max(one.start + one.seconds for one in slices) == pytest.approx(expected)


def _phase(one: Slice) -> str:
    return one.name.partition(" ")[0] if one.event is None else one.event.collective.phase


def _module(one: Slice) -> str:
    return one.name.partition(" ")[2] if one.event is None else one.event.module


def test_collectives_of_tp_hold_up_compute_and_gathers_run_beside_it(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--tp", "2", "--dp-shard", "2")
    slices = slices_of(job)
    compute = [one for one in slices if one.lane == COMPUTE]

    def beside(lane: str) -> list[Slice]:
        return [
            one
            for one in slices
            if one.lane == lane
            and any(
                one.start < work.start + work.seconds - 1e-15 and work.start < one.start + one.seconds - 1e-15
                for work in compute
            )
        ]

    assert not beside("tp")
    assert beside(GATHERS) and beside(REDUCTIONS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_compute_is_named_by_the_block_that_computes(tmp_path: Path, layout: tuple[str, ...]) -> None:
    job = tiny_job(tmp_path, *layout, "training.global_batch_size=4", "training.microbatch_size=1")
    slices = slices_of(job)
    names = [name for name, _ in groupby(one.name for one in slices if one.lane == COMPUTE)]
    forward = ["forward layers.0", "forward layers.1", "forward layers.2", "forward output"]
    backward = ["backward output", "backward layers.2", "backward layers.1", "backward layers.0"]
    assert names == (forward + backward) * job.microbatches


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("slowness", (0.01, 1.0, 100.0))
def test_nothing_begins_before_what_it_depends_on(tmp_path: Path, layout: tuple[str, ...], slowness: float) -> None:
    job = tiny_job(tmp_path, *layout)
    (trace,) = whole(job, "cuda", [0])
    slices = timeline(job.mesh, [trace], RATE, lambda collective: slowness * seconds(collective))
    through: dict[str, float] = {}
    computed = 0.0
    units = {one.event.module for one in slices if one.event is not None and one.lane == GATHERS}
    assert bool(units) == (job.mesh.degree("dp_shard") > 1)
    for one in slices:  # in the order of the program
        end = one.start + one.seconds
        module = _module(one)
        unit = max((unit for unit in units if f"{module}.".startswith(f"{unit}." if unit else "")), key=len, default="")
        if one.lane == GATHERS:
            through[module] = end
        elif one.lane in (COMPUTE, "tp"):
            assert one.start >= max(computed, through.get(unit, 0.0)) - 1e-12, one.name
            computed = end
        elif one.lane == REDUCTIONS:
            assert one.start >= max(computed, through[module]) - 1e-12, one.name
            through["reduced"] = end
        elif one.lane.startswith("dp_replicate ") or one.name == "all_reduce":
            assert one.start >= max(computed, through.get("reduced", 0.0)) - 1e-12, one.name
    for lanes in ((COMPUTE, "tp"), (GATHERS, REDUCTIONS, "dp_shard")):
        held = sorted((one for one in slices if one.lane in lanes), key=lambda one: one.start)
        assert all(first.start + first.seconds <= then.start + 1e-12 for first, then in pairwise(held))


def test_only_the_ends_of_sharding_are_exposed_where_compute_is_long(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--dp-shard", "2", "model.n_layers=4", "training.global_batch_size=2")
    (trace,) = whole(job, "cuda", [0])
    slices = timeline(job.mesh, [trace], RATE, lambda collective: 1e-3 * seconds(collective))
    hidden = sum(one.seconds for one in slices if one.lane == COMPUTE)
    ends = [one.seconds for one in slices if one.lane == "dp_shard"]
    gathers, reductions = ([one for one in slices if one.lane == lane] for lane in (GATHERS, REDUCTIONS))
    # Before the first block: its own, the embedding's and the model's; after it, the same backwards.
    ends += [one.seconds for one in gathers[:3]] + [one.seconds for one in reductions[-3:]]
    assert [one.name for one in gathers[:3]] == ["all_gather", "all_gather tok_embeddings", "all_gather layers.0"]
    assert len(gathers) == 6 + 5 and len(reductions) == 6
    assert max(one.start + one.seconds for one in slices) == pytest.approx(hidden + sum(ends))


@pytest.mark.parametrize("microbatches", (1, 2))
def test_dp_shard_exposes_what_the_plan_says_and_two_calls_more(microbatches: int) -> None:
    """The plan hides the first block's gather and the last one's reduction as it hides the others'."""
    overrides = ("model.n_layers=4", f"training.global_batch_size={8 * microbatches}")
    job = check(load(EXAMPLES / "llama3_8b.yaml", overrides))
    chosen = hardware_of(job)
    rate = chosen.chip.peak(job.config.precision.compute) * chosen.chip.sustained
    slices = timeline(job.mesh, whole(job, "cuda", [0]), rate, partial(seconds_of, job.mesh, chosen))
    exposed = max(one.start + one.seconds for one in slices)
    exposed -= sum(one.seconds for one in slices if one.lane == COMPUTE)
    gather = next(one.seconds for one in slices if one.name == "all_gather layers.0")
    reduction = next(one.seconds for one in slices if one.name == "reduce_scatter layers.0")
    planned = edges(of_job(job), chosen, 0).exposed["exposed dp_shard"]
    assert exposed == pytest.approx(planned + microbatches * (gather + reduction))


def test_compute_takes_as_long_as_its_flops(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    (trace,) = whole(job, "cuda", [0])
    total = sum(one.seconds for one in timeline(job.mesh, [trace], RATE, seconds))
    assert total == pytest.approx(sum(trace.flops.values()) / RATE)


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--tp", "2")
    slices = slices_of(job)
    write(tmp_path / "trace.json", job.mesh, slices)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {one["args"]["name"] for one in events if one["ph"] == "M"} == {"pp=0", COMPUTE, "tp"}
    shown = [one for one in events if one["ph"] == "X"]
    assert len(shown) == len(slices)
    assert sum(one["dur"] for one in shown) == pytest.approx(1e6 * sum(one.seconds for one in slices))
    gathers = [one for one in shown if one["name"].startswith("all_gather layers.0.attention")]
    assert gathers and gathers[0]["args"]["line"].startswith("koushi/") and gathers[0]["args"]["bytes"] > 0
