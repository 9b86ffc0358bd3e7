"""Who holds and who counts which element, over the ranks of many meshes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny import tiny_job

from koushi.job import Job
from koushi.models.llama.layout import parameters
from koushi.models.llama.model import Llama
from koushi.parallel.shards import fill, local_parameters
from koushi.schedules import SCHEDULES, stages_of_rank

# KV heads are cut at tp 2 and copied at tp 4; 20 rows over 3 and 8 ranks leave uneven and empty shards.
SIZES = ("model.dim=20", "model.n_heads=10", "model.n_kv_heads=2", "model.ffn_dim=40", "training.global_batch_size=48")
HEADS_FOR_FOUR = ("model.dim=16", "model.n_heads=8", "model.n_kv_heads=2", "model.ffn_dim=8")
SHAPES = (*product((1, 2), (1, 3), (1, 2, 4)), (1, 8, 1), (1, 5, 2))
"""dp_replicate, dp_shard, tp."""
PIPELINES = (("1F1B", 1), *((name, 2) for name in SCHEDULES), ("ZBVZeroBubble", 3), ("1F1B", 3))


def jobs(folder: Path, schedule: str, pp: int) -> list[Job]:
    made = []
    for (replicas, shards, tp), tied in product(SHAPES, (False, True)):
        degrees = ("--pp", str(pp), "--dp-replicate", str(replicas), "--dp-shard", str(shards), "--tp", str(tp))
        batch = 6 * replicas * shards
        made.append(
            tiny_job(
                folder,
                *SIZES,
                *(HEADS_FOR_FOUR if tp == 4 else ()),
                *degrees,
                f"training.global_batch_size={batch}",
                f"parallelism.pipeline_parallel_schedule={schedule}",
                f"model.tie_embeddings={str(tied).lower()}",
                f"model.n_layers={max(4, 2 * pp)}",
            )
        )
    return made


def parts_of(model: Llama, job: Job, index: int) -> dict[int, Llama]:
    """What ``parallelize_llama`` leaves at a pipeline coordinate, uncut."""
    pp, n_stages = job.mesh.degree("pp"), len(job.stages)
    if pp == 1:
        return {0: model}
    held = stages_of_rank(job.config.parallelism.pipeline_parallel_schedule, pp, n_stages, index)
    return {stage: model.part(job.stages[stage], first=stage == 0, last=stage == n_stages - 1) for stage in held}


@pytest.mark.parametrize(("schedule", "pp"), PIPELINES)
def test_every_element_is_counted_once_in_every_replica(schedule: str, pp: int, tmp_path: Path) -> None:
    for job in jobs(tmp_path, schedule, pp):
        with torch.device("meta"):
            model = Llama(job.size, job.config.training.seq_len)
        parts = [parts_of(model, job, index) for index in range(pp)]
        described = parameters(job.size, job.mesh.degree("tp"))
        replicas = job.mesh.degree("dp_replicate")
        counts = [
            {name: torch.zeros(one.shape, dtype=torch.int8) for name, one in described.items()} for _ in range(replicas)
        ]
        for rank in range(job.mesh.world_size):
            coordinate = job.mesh.coordinate(rank)
            for held in local_parameters(parts[coordinate["pp"]], job, coordinate):
                if held.counted:
                    counts[coordinate["dp_replicate"]][held.description.name][held.part] += 1
        for replica in counts:
            for name, count in replica.items():
                assert (count == 1).all(), f"{name} under {job.mesh} with {schedule}"


def test_ends_of_a_tied_embedding_are_described_alike_and_counted_once(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "model.tie_embeddings=true")
    model = Llama(job.size, 8)
    ends = [local_parameters(parts_of(model, job, index), job, job.mesh.coordinate(index)) for index in range(2)]
    tied = [one for held in ends for one in held if one.description.name == "tok_embeddings.weight"]
    assert [(one.name, one.counted) for one in tied] == [("tok_embeddings.weight", True), ("output.weight", False)]
    assert tied[0].description == tied[1].description


def test_local_values_share_memory_and_begin_alike(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    with torch.device("meta"):
        model = Llama(job.size, 8)
    model.to_empty(device="cpu")
    held = local_parameters({0: model}, job, job.mesh.coordinate(0))
    assert [one.name for one in held] == [name for name, _ in model.named_parameters()]
    fill(held, seed=4)
    for one in held:
        assert one.value.data_ptr() == one.tensor.data_ptr()
        assert not one.value.requires_grad
        assert (one.description.std is None) == bool((one.value == 1).all())
    first = {one.name: one.value.clone() for one in held}
    fill(held, seed=4)
    assert all(torch.equal(one.value, first[one.name]) for one in held)
    fill(held, seed=5)
    assert not torch.equal(held[0].value, first[held[0].name])


def test_a_missing_gradient_and_a_wrong_shape_are_our_own_fault(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    held = local_parameters({0: Llama(job.size, 8)}, job, job.mesh.coordinate(0))
    with pytest.raises(AssertionError, match=r"tok_embeddings\.weight has no gradient"):
        held[0].gradient.abs()
    cut = replace(held[0], part=(slice(0, 3), slice(0, 16)))
    with pytest.raises(AssertionError, match=r"the layout gives \(3, 16\), torch holds \(32, 16\)"):
        fill([cut], seed=0)


def test_what_is_copied_over_tp(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--tp", "4", "training.global_batch_size=4")
    held = local_parameters({0: Llama(job.size, 8)}, job, job.mesh.coordinate(1))
    copied = {one.name.split(".", 2)[-1] for one in held if one.copied_over_tp}
    assert copied == {
        "weight",
        "attention_norm.weight",
        "ffn_norm.weight",
        "attention.wk.weight",
        "attention.wv.weight",
    }
    assert not any(one.counted for one in held if one.copied_over_tp), "tp coordinate 0 counts them"
