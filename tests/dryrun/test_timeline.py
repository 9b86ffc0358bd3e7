from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from tiny import tiny_job

from koushi.dryrun.extrapolate import whole
from koushi.dryrun.ranks import rank_classes
from koushi.dryrun.timeline import COMPUTE, Slice, timeline, write
from koushi.job import Job
from koushi.traffic import Collective

RATE = 1e9
SECOND_PER_BYTE = 1e-9


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
    assert set(lanes) == {(pp, lane) for pp in (0, 1) for lane in (COMPUTE, "dp_shard", "pp")}
    for held in lanes.values():
        ordered = sorted(held, key=lambda one: one.start)
        assert all(first.start + first.seconds <= then.start + 1e-12 for first, then in pairwise(ordered))
    # The last stage's first rank cannot compute before it has been sent something.
    sends = [one for one in lanes[0, "pp"] if one.event is not None and one.event.collective.operation == "send"]
    assert sends and min(one.start for one in lanes[1, COMPUTE]) >= min(one.start + one.seconds for one in sends)


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
    assert beside("dp_shard")


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
