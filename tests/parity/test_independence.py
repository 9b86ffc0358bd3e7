"""Initial weights and the order of samples do not depend on the layout; what cannot be right is refused."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from parity_cases import SPLIT_BACKWARD, WORLDS, Case, batch, case, enumerated, factorisations, schedule
from parity_special import THREES

from koushi.data.batches import open_samples, train_batch
from koushi.data.samples import IGNORE_INDEX
from koushi.errors import ConfigError
from koushi.layout import local_slices
from koushi.mesh import MeshSpec
from koushi.models.llama.layout import parameters
from koushi.models.llama.sizes import LlamaSize
from koushi.optim.initial import draw

# More rows than one block of random numbers holds.
LARGE = LlamaSize(vocab_size=3000, dim=80, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=1000)


@pytest.mark.parametrize("degrees", factorisations(8), ids=str)
def test_initial_weights_do_not_depend_on_the_layout(degrees: tuple[int, int, int, int]) -> None:
    pp, dp_replicate, dp_shard, tp = degrees
    spec = MeshSpec.of(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    sizes = dict(zip(spec.names, spec.shape, strict=True))
    for name, about in parameters(LARGE, tp).items():
        whole = draw(7, name, about.shape, about.std, tuple(slice(0, size) for size in about.shape))
        assert whole.shape == about.shape
        held = torch.zeros(about.shape, dtype=torch.bool)
        for rank in range(spec.world_size):
            part = local_slices(about.shape, about.cuts, sizes, spec.coordinate(rank))
            assert torch.equal(draw(7, name, about.shape, about.std, part), whole[part]), f"{name} on rank {rank}"
            held[part] = True
        assert held.all(), f"no rank holds all of {name}"


def test_initial_weights_are_random_where_they_should_be() -> None:
    drawn = {
        name: draw(7, name, about.shape, about.std, tuple(slice(0, size) for size in about.shape))
        for name, about in parameters(LARGE).items()
        if about.std is not None
    }
    alike = [value.flatten()[:100].tolist() for value in drawn.values()]
    assert len({tuple(values) for values in alike}) == len(drawn) > 10, "two parameters begin alike"
    embedding = drawn["tok_embeddings.weight"]
    assert not torch.equal(embedding[:819], embedding[819:1638]), "two blocks of rows begin alike"
    for name, about in parameters(LARGE).items():
        if about.std is not None:
            assert drawn[name].std().item() == pytest.approx(about.std, rel=0.05), name


@pytest.mark.parametrize("world", (2, 3, 4, 6, 8))
def test_the_order_of_samples_does_not_depend_on_the_layout(world: int, tmp_path: Path) -> None:
    sizes = ("training.global_batch_size=24", "training.microbatch_size=1", "model.n_kv_heads=1", "model.n_layers=8")
    threes = THREES if world % 3 == 0 else ()
    batches: dict[int, torch.Tensor] = {}
    for degrees in factorisations(world):
        job = case("", degrees, *threes, *sizes, *schedule("GPipe")).job(tmp_path)
        samples = open_samples(job)
        for step in range(2):
            parts: dict[int, torch.Tensor] = {}
            for rank in range(world):
                index = job.mesh.index(rank, "dp_replicate", "dp_shard")
                read = torch.stack(train_batch(samples, step * 24, job.local_batch_size, index))
                assert torch.equal(parts.setdefault(index, read), read), "ranks of one data coordinate read differently"
            assert len(parts) == degrees[1] * degrees[2]
            together = torch.cat([parts[index] for index in sorted(parts)], dim=1)
            assert torch.equal(batches.setdefault(step, together), together), f"{degrees} reads other samples"
    assert batches[0].shape[1] == batches[1].shape[1] == 24
    assert not torch.equal(batches[0], batches[1])


def test_some_ranks_have_no_label_at_all(tmp_path: Path) -> None:
    """What the enumeration says of its cases: unequal counts everywhere, and in some none on a rank."""
    found = {"unequal": 0, "none": 0}
    for one in enumerated(8):
        if "pp1 rep2 shard4" in one.name or "pp1 rep1 shard8" in one.name:
            job = one.job(tmp_path)
            samples = open_samples(job)
            for step in range(2):
                counts = [
                    int((train_batch(samples, step * 16, job.local_batch_size, index)[1] != IGNORE_INDEX).sum())
                    for index in range(8)
                ]
                assert sum(counts) > 0
                found["unequal"] += len(set(counts)) > 4
                found["none"] += 0 in counts
    assert found["unequal"] >= 7 and found["none"] >= 2, found


def _refused() -> list[tuple[Case, str]]:
    reshard, per_rank = "parallelism.reshard_after_forward=always", "parallelism.pipeline_parallel_stages_per_rank="
    wrong = [
        (case(f"{name} resharding", (2, 1, 2, 1), *schedule(name), reshard), "reshard")
        for name in ("1F1B", *SPLIT_BACKWARD)
    ]
    wrong += [
        (case(f"{name} compiled", (2, 1, 1, 1), *schedule(name), "training.compile=true"), "compile")
        for name in SPLIT_BACKWARD
    ]
    wrong += [
        (case("heads", (1, 1, 1, 16)), "tensor_parallel_degree"),
        (case("KV heads", (1, 1, 1, 3), *THREES, "model.n_kv_heads=2"), "tensor_parallel_degree"),
        (case("ffn", (1, 1, 1, 8), "model.ffn_dim=68"), "ffn_dim"),
        (case("vocabulary", (1, 1, 1, 8), "model.vocab_size=65"), "vocab_size"),
        (case("sequence", (1, 1, 1, 8), "training.seq_len=20"), "seq_len"),
        (case("batch", (1, 1, 3, 1)), "global_batch_size"),
        (case("microbatch", (1, 1, 2, 1), "training.microbatch_size=3"), "microbatch_size"),
        (case("1F1B microbatches", (4, 1, 1, 1), *schedule("1F1B"), *batch(3, 1)), "global_batch_size"),
        (case("DualPipeV microbatches", (2, 1, 1, 1), *schedule("DualPipeV"), *batch(3, 1)), "global_batch_size"),
        (case("rounds", (2, 1, 1, 1), *schedule("Interleaved1F1B"), *batch(5, 1)), "global_batch_size"),
        (case("layers", (8, 1, 1, 1), *schedule("GPipe")), "pipeline_parallel_degree"),
        (case("empty middle", (4, 1, 1, 1), *schedule("1F1B", 2, 0, 2, 1)), "layers_per_stage"),
        (case("sum", (2, 1, 1, 1), *schedule("1F1B", 2, 3), "model.n_layers=6"), "layers_per_stage"),
        (case("entries", (2, 1, 1, 1), *schedule("Interleaved1F1B", 2, 3)), "layers_per_stage"),
        (case("three in a V", (2, 1, 1, 1), *schedule("ZBVZeroBubble"), per_rank + "3"), "stages_per_rank"),
        (case("two in 1F1B", (2, 1, 1, 1), *schedule("1F1B"), per_rank + "2"), "stages_per_rank"),
    ]
    return wrong


@pytest.mark.parametrize(("one", "key"), _refused(), ids=lambda value: value.name if isinstance(value, Case) else value)
def test_what_cannot_be_right_is_refused(one: Case, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        one.job(tmp_path)
    assert any(key in str(problem) and problem.legal for problem in raised.value.problems), str(raised.value)


def test_the_worlds_of_the_enumeration_are_what_they_say() -> None:
    for world in WORLDS:
        assert all(prod(degrees) == world for degrees in factorisations(world))
