from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_job

from koushi.dryrun.ranks import held_stages, rank_classes
from koushi.layout import local_shape
from koushi.models.llama.layout import parameters

UNEVEN = ("model.dim=20", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=26", "model.vocab_size=34")


def test_even_shards_differ_by_pipeline_coordinate_alone(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "--dp-shard", "2", "--tp", "2", "training.global_batch_size=4")
    assert [one.ranks for one in rank_classes(job)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [one.representative for one in rank_classes(job)] == [0, 4]


def test_those_that_count_copies_can_be_told_apart(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "--dp-shard", "2", "--tp", "2", "training.global_batch_size=4")
    assert [one.ranks for one in rank_classes(job, counting=True)] == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_replicas_are_alike_and_uneven_shards_are_not(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--dp-replicate", "2", "--dp-shard", "4", "training.global_batch_size=8", *UNEVEN)
    classes = rank_classes(job)
    # 20 rows are 5 each, 26 are 7, 7, 7, 5, and 10 are 3, 3, 3, 1.
    assert [one.ranks for one in classes] == [(0, 1, 2, 4, 5, 6), (3, 7)]


@pytest.mark.parametrize(
    "overrides",
    (
        ("--dp-shard", "8", "training.global_batch_size=8", *UNEVEN),
        ("--dp-shard", "4", "--tp", "2", "training.global_batch_size=4", *UNEVEN),
        ("--pp", "2", "--dp-shard", "4", "training.global_batch_size=8", *UNEVEN),
        ("--pp", "2", "parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "model.n_layers=5"),
    ),
    ids=str,
)
def test_every_rank_is_in_one_class_of_ranks_with_its_shapes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    job = tiny_job(tmp_path, *overrides)
    described = parameters(job.size, job.mesh.degree("tp"))
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))

    def shapes(rank: int) -> list[tuple[int, ...]]:
        coordinate = job.mesh.coordinate(rank)
        return [local_shape(one.shape, one.cuts, degrees, coordinate) for one in described.values()]

    classes = rank_classes(job)
    assert sorted(rank for one in classes for rank in one.ranks) == list(range(job.mesh.world_size))
    for one in classes:
        assert one.representative == min(one.ranks)
        for rank in one.ranks:
            assert shapes(rank) == shapes(one.representative)
            assert held_stages(job, rank) == held_stages(job, one.representative)


def test_a_stage_without_layers_does_not_differ_by_their_shards(tmp_path: Path) -> None:
    layers = "parallelism.pipeline_parallel_layers_per_stage=[0,3]"
    job = tiny_job(tmp_path, "--pp", "2", "--dp-shard", "4", "training.global_batch_size=8", *UNEVEN[:-1], layers)
    first = [one.ranks for one in rank_classes(job) if one.representative < 4]
    assert first == [(0, 1, 2, 3)]  # 32 rows of the vocabulary are 8 each


def test_the_classes_of_a_large_world_are_few(tmp_path: Path) -> None:
    large = ("model.name=llama3-405b", "model.dim=null", "model.n_layers=null", "model.n_heads=null")
    large += ("model.n_kv_heads=null", "model.ffn_dim=null", "model.vocab_size=null")
    job = tiny_job(
        tmp_path, *large, "--pp", "16", "--dp-shard", "128", "--tp", "8", "training.global_batch_size=2048"
    )  # fmt: skip
    classes = rank_classes(job)
    # The 16,032 rows of the vocabulary on a tp rank are 126 on most dp_shard ranks, and 30 on the last.
    assert [len(one.ranks) for one in classes] == [1016, 8, *[1024] * 14, 1016, 8]
