from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tiny import tiny_job

from koushi.dryrun import extrapolate
from koushi.dryrun.extrapolate import (
    FEW,
    Line,
    extrapolated,
    families,
    for_audit,
    held_stages,
    interpolated,
    reduced,
    smallest,
    traces,
    whole,
    with_layers,
)
from koushi.dryrun.forks import in_forks
from koushi.dryrun.ranks import rank_classes
from koushi.dryrun.trace import RankTrace, trace
from koushi.job import Job

ALL = ("precision.compute=bfloat16",)


def traced(item: tuple[Job, int]) -> RankTrace:
    return trace(*item, "cuda")


def same(one: RankTrace, other: RankTrace) -> bool:
    return (one.peak.bytes, one.peak.kinds, one.resting, one.flops, one.traffic, one.shapes) == (
        other.peak.bytes, other.peak.kinds, other.resting, other.flops, other.traffic, other.shapes
    )  # fmt: skip


LAYOUTS = (
    ("model.n_layers=9", "--dp-shard", "2", "training.recompute=full"),
    ("model.n_layers=12", "--pp", "2", "--tp", "2", "model.tie_embeddings=true"),
    (
        "model.n_layers=24",
        "--pp",
        "2",
        "parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        "parallelism.pipeline_parallel_layers_per_stage=[5,6,6,7]",
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("overrides", LAYOUTS, ids=lambda overrides: overrides[0])
def test_a_line_through_few_layers_meets_the_whole(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    job = tiny_job(tmp_path, *overrides, *ALL)
    for rank in (one.representative for one in rank_classes(job)):
        assert smallest(job, rank) > FEW[1]
        full, few, more = in_forks(traced, [(job, rank), *((reduced(job, rank, layers), rank) for layers in FEW)])
        read = extrapolated(job, few, more)
        assert read is not None and read.extrapolated
        assert same(read, full), f"rank {rank}: {read.peak} {full.peak}"


def test_reduced_stages_keep_their_differences(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, *LAYOUTS[2])
    assert [held_stages(job, rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert smallest(job, 0) == 5 and smallest(job, 1) == 6
    assert [len(stage) for stage in reduced(job, 0, 3).stages] == [3, 0, 0, 5]
    assert [len(stage) for stage in reduced(job, 1, 3).stages] == [0, 3, 3, 0]


def test_a_peak_that_moves_is_not_extrapolated(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "model.n_layers=9")
    few, more = in_forks(traced, [(reduced(job, 0, layers), 0) for layers in FEW])
    object.__setattr__(more.peak, "place", ("optimizer", ""))
    assert extrapolated(job, few, more) is None


@pytest.mark.long
def test_stages_between_the_ends_lie_on_a_line(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "model.n_layers=10", "--pp", "6", "training.global_batch_size=8", *ALL)
    assert [len(stage) for stage in job.stages] == [1, 2, 2, 2, 2, 1]
    found = whole(job, "cuda", range(6))
    assert families(job, list(range(6))) == [[0], [1, 2, 3, 4], [5]]
    for rank in (2, 3):
        read = interpolated(job, rank, found[1], found[4], rank - 1, 3)
        assert read is not None and same(read, found[rank])
    assert interpolated(job, 1, found[0], found[4], 1, 4) is None, "the first stage is of another kind"


@pytest.mark.long
def test_a_large_job_is_traced_in_part_and_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, "model.n_layers=14", "--pp", "8", "training.global_batch_size=8", *ALL)
    ranks = []

    def counting(kind: str, item: tuple[Job, int]) -> RankTrace:
        return trace(*item, "cuda")

    def noted(job: Job, kind: str, chosen: list[int]) -> list[RankTrace]:
        ranks.extend(chosen)
        return in_forks(partial(counting, kind), [(job, rank) for rank in chosen])

    monkeypatch.setattr(extrapolate, "MOST_WORK", 10)
    monkeypatch.setattr(extrapolate, "whole", noted)
    found = traces(job, "cuda", rank_classes(job))
    assert sorted(ranks) == [0, 1, 4, 6, 7], "the ends, and three of the six between them"
    assert [one.extrapolated for one in found] == [rank not in ranks for rank in range(8)]
    assert [one.rank for one in found] == list(range(8))
    for one, other in zip(found, whole(job, "cuda", range(8)), strict=True):
        assert same(one, other), one.rank


@pytest.mark.long
def test_a_wrong_extrapolation_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, "model.n_layers=15", *ALL)
    monkeypatch.setattr(extrapolate, "MOST_WORK", 10)
    monkeypatch.setattr(extrapolate, "extrapolated", lambda job, few, more: few.__class__(**{
        **vars(few), "extrapolated": True,
    }))  # fmt: skip
    (found,) = traces(job, "cuda", rank_classes(job))
    assert not found.extrapolated and len(found.shapes) == 9 * 15 + 3


def test_the_audit_of_a_large_job_has_one_layer_a_stage(tmp_path: Path) -> None:
    small = tiny_job(tmp_path, "--pp", "2")
    assert for_audit(small) is small
    large = tiny_job(tmp_path, "model.n_layers=64", "--pp", "2", "training.global_batch_size=8")
    assert [len(stage) for stage in for_audit(large).stages] == [1, 1]
    assert for_audit(large).config.parallelism.pipeline_parallel_layers_per_stage == (1, 1)
    assert with_layers(large, (2, 0)).size.n_layers == 2


def test_a_line_is_read_off_in_whole_bytes() -> None:
    line = Line(2, 3)
    assert line.at(10, 40) == 30
    assert line.each({"a": 3}, {"a": 3, "b": 6}) == {"a": 3, "b": 4}
    assert line.exact({"a": 0}, {"a": 6}) and not line.exact({"a": 0}, {"a": 7})
