"""One rank explained."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.config.load import load
from koushi.errors import ConfigError
from koushi.job import Job
from koushi.layout import local_shape
from koushi.models.llama.layout import EMBEDDING, OUTPUT, parameters
from koushi.report.rank_text import RankView, rank_text
from koushi.schedules import SCHEDULES

Jobs = Callable[..., Job]
EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_128.yaml"

LAYOUTS = [
    {"pp": 1},
    {"tp": 2},
    {"dp_shard": 3},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 5},
    {"dp_shard": 6, "tp": 16},
]


def test_rank_37_of_the_example() -> None:
    text = rank_text(check(load(EXAMPLE)), 37)
    assert "rank 37 of 128, device 5 of node 4\n" in text
    assert "pp=0, dp_replicate=1, dp_shard=0, cp=0, tp=5\n" in text
    assert re.search(r"^dp_shard +0 +4 +across 4 nodes +37 45 53 61$", text, re.M)
    assert re.search(r"^tp +5 +8 +inside a node +32 33 34 35 36 37 38 39$", text, re.M)
    assert re.search(r"^data \(dp_replicate × dp_shard\) +4 +8 +across 8 nodes +5 13 21 29 37 45 53 61$", text, re.M)
    assert "activations to stage 1 on rank 101, their gradients from it" in text
    assert "samples     8-9 of the 16 of every step, in 2 microbatches of 1 (index 4 of 8" in text
    assert "keeps tokens 40-47 of each sample's 64" in text
    # The embedding's 2048 rows: tp 5 of 8 has 1280 to 1535, of which dp_shard 0 of 4 has the first 64.
    assert re.search(r"tok_embeddings.weight +\[2048, 64\] +\[64, 64\] +rows 1280-1343 +5$", text, re.M)
    # 4 KV heads over 8 tp ranks are copied; dp_shard cuts their 32 rows in 4.
    assert re.search(r"attention.wk.weight +\[32, 64\] +\[8, 64\] +rows 0-7 +0 1 2 3 4 5 6 … 39$", text, re.M)
    assert "and so on for 1 more layer" in text


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_row_of_a_parameter_is_held(degrees: dict[str, int], jobs: Jobs) -> None:
    job = jobs("model.n_layers=5", **degrees)
    views = [RankView(job, rank) for rank in range(job.mesh.world_size)]
    for name, parameter in parameters(job.size, job.mesh.degree("tp")).items():
        holders = [view for view in views if view.holds(name)]
        held = sum(prod(part.stop - part.start for part in view.slices(parameter)) for view in holders)
        copies = {len(view.copies(parameter)) for view in holders}
        assert len(copies) == 1
        stages = 2 if name == EMBEDDING and job.size.tie_embeddings and len(job.stages) > 1 else 1
        assert held == prod(parameter.shape) * copies.pop() * stages
        slices = {view.rank: view.slices(parameter) for view in holders}
        assert all(slices[other] == slices[view.rank] for view in holders for other in view.copies(parameter))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_stages_and_their_neighbours(schedule: str, tied: str, jobs: Jobs) -> None:
    overrides = (f"parallelism.pipeline_parallel_schedule={schedule}", f"model.tie_embeddings={tied}")
    job = jobs(*overrides, "training.global_batch_size=48", pp=3, dp_shard=2, tp=2)
    texts = {rank: rank_text(job, rank) for rank in range(job.mesh.world_size)}
    held = {rank: [int(one) for one in re.findall(r"^  stage (\d+)", text, re.M)] for rank, text in texts.items()}
    for rank, text in texts.items():
        same_place = job.mesh.group(rank, "pp")
        assert sorted(stage for other in same_place for stage in held[other]) == list(range(len(job.stages)))
        named = re.findall(r"activations (to|from) stage (\d+) on rank (\d+)", text)
        assert named
        for _, stage, other in named:
            assert int(stage) in held[int(other)]
            assert int(other) in same_place and int(other) != rank
        for stage in re.findall(r"stage (\d+), on this rank", text):
            assert int(stage) in held[rank]
        assert ("the embedding, " in text) is (0 in held[rank])
        assert ("the last norm and the output" in text) is (len(job.stages) - 1 in held[rank])
        ends = {0, len(job.stages) - 1} & set(held[rank])
        assert ("tied across stages" in text) is (tied == "true" and len(ends) == 1)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_sample_is_read_by_one_data_index(degrees: dict[str, int], jobs: Jobs) -> None:
    job = jobs("training.steps=9", **degrees)
    seen: dict[tuple[int, int], int] = {}
    for rank in range(job.mesh.world_size):
        text = rank_text(job, rank, step=4)
        found = re.search(r"in step 4 samples (\d+)(?:-(\d+))? of the run", text)
        assert found
        first, last = int(found[1]), int(found[2] or found[1])
        seen[first, last] = seen.get((first, last), 0) + 1
    batch = job.config.training.global_batch_size
    samples = [sample for first, last in sorted(seen) for sample in range(first, last + 1)]
    assert samples == list(range(3 * batch, 4 * batch))
    assert set(seen.values()) == {job.mesh.world_size // job.data_parallel_degree}


def test_a_named_parameter_with_and_without_its_ending(jobs: Jobs) -> None:
    job = jobs(pp=2, dp_shard=2, tp=2)
    tp = job.mesh.degree("tp")
    for name in ("layers.0.feed_forward.w2", "layers.0.feed_forward.w2.weight"):
        text = rank_text(job, 3, names=[name])
        parameter = parameters(job.size, tp)["layers.0.feed_forward.w2.weight"]
        here = local_shape(parameter.shape, parameter.cuts, {"tp": 2, "dp_shard": 2}, {"tp": 1, "dp_shard": 1})
        assert f"[256, 768]  [{here[0]}, {here[1]}]  rows 128-255, columns 384-767" in text
        assert "more layer" not in text
    elsewhere = rank_text(job, 3, names=["layers.15.ffn_norm", OUTPUT])
    assert "layers.15.ffn_norm.weight is on stage 1: rank 7 holds what this rank would" in elsewhere
    assert "output.weight is on stage 1: rank 7" in elsewhere


def test_a_tied_output_is_the_embedding(jobs: Jobs) -> None:
    text = rank_text(jobs("model.tie_embeddings=true", pp=2), 1, names=[OUTPUT])
    assert re.search(r"^  tok_embeddings.weight +\[2048, 256\] +\[2048, 256\] +all ", text, re.M)


def test_a_rank_without_a_part_of_a_small_parameter(jobs: Jobs) -> None:
    job = jobs("model.n_heads=2", "model.n_kv_heads=2", "model.dim=4", "model.ffn_dim=8", dp_shard=6)
    assert re.search(r"layers.0.ffn_norm.weight +\[4\] +\[0\] +nothing: fewer rows than ranks", rank_text(job, 5))


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("layers.0.atention.wq", "did you mean layers.0.attention.wq.weight?"),
        ("wo", "did you mean layers.0.attention.wo.weight?"),
        ("layers.16.ffn_norm.weight", "layers 0 to 15"),
        ("tok_embedding", "did you mean tok_embeddings.weight?"),
        ("zzzz", "such as tok_embeddings.weight or layers.0.attention.wq.weight"),
        ("", "such as"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest(name: str, legal: str, jobs: Jobs) -> None:
    with pytest.raises(ConfigError) as raised:
        rank_text(jobs(), 0, names=[name])
    assert str(raised.value).startswith(f"command line (--parameter {name}): the model has no such parameter; {legal}")


def test_ranks_and_steps_that_are_not_there(jobs: Jobs) -> None:
    with pytest.raises(ConfigError) as raised:
        rank_text(jobs("training.steps=5", dp_shard=3), -1, step=6)
    assert str(raised.value).splitlines() == [
        "command line (--rank -1): there is no such rank in a world of 3; 0 to 2",
        "command line (--step 6): the run has no such step; 1 to 5",
    ]
    with pytest.raises(ConfigError, match=r"there is no such rank in a world of 1; 0$"):
        rank_text(jobs(), 1)


def test_a_rank_of_the_largest_lattice(jobs: Jobs) -> None:
    job = jobs(pp=16, dp_shard=128, tp=8)
    text = rank_text(job, 16383)
    assert "rank 16383 of 16384, device 7 of node 2047\n" in text
    assert max(map(len, text.splitlines())) < 160
