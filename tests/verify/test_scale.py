"""A job scaled down is legal, small, and of the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny import tiny_job

from koushi.check.check import check
from koushi.check.model_rules import legal_tensor_degrees
from koushi.config.load import load
from koushi.config.write import write_resolved
from koushi.errors import ConfigError
from koushi.job import Job
from koushi.layout import Shard
from koushi.mesh import MeshSpec
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.layout import kv_placement
from koushi.models.llama.sizes import PRESETS
from koushi.optim.schedule import learning_rate
from koushi.schedules import SCHEDULES
from koushi.verify.scale import (
    LEAST_RATE,
    MOST_PARAMETERS,
    MOST_RANKS,
    MOST_STEP_TOKENS,
    scale_down,
    single_process,
    with_updates,
)

Degrees = tuple[int, int, int, int]
"""pp, dp_replicate, dp_shard, tp."""


def job_of(preset: str, degrees: Degrees, *overrides: str, folder: str) -> Job:
    path = Path(folder) / "given.yaml"
    path.write_text(f"model: {{name: {preset}}}\nrun: {{device: cpu}}\n")
    names = ("--pp", "--dp-replicate", "--dp-shard", "--tp")
    flags = [text for name, degree in zip(names, degrees, strict=True) for text in (name, str(degree))]
    return check(load(path, [*flags, *overrides]))


def scaled(job: Job, folder: str) -> Job:
    """The scaled job, after every check on it that holds for all."""
    small, _ = scale_down(job, "float64")
    path = Path(folder) / f"{job.name}.yaml"
    write_resolved(small.config, path)
    again = check(load(path))
    assert (again.config, again.size, again.mesh, again.stages) == (small.config, small.size, small.mesh, small.stages)
    assert small.mesh.world_size <= MOST_RANKS
    if job.mesh.world_size <= MOST_RANKS:
        assert small.mesh == job.mesh
    assert all(1 <= new <= old for new, old in zip(small.mesh.shape, job.mesh.shape, strict=True))
    # A technique that is on stays on.
    assert all((new > 1) == (old > 1) for new, old in zip(small.mesh.shape, job.mesh.shape, strict=True))
    assert isinstance(kv_placement(small.size, small.mesh.degree("tp")), Shard) == isinstance(
        kv_placement(job.size, job.mesh.degree("tp")), Shard
    ), "KV heads are cut or copied as before"
    assert (small.size.n_heads == small.size.n_kv_heads) == (job.size.n_heads == job.size.n_kv_heads)
    assert small.size.tie_embeddings == job.size.tie_embeddings
    assert small.size.rope_scaling == job.size.rope_scaling
    assert small.stages_per_rank == job.stages_per_rank
    kept = ("pipeline_parallel_schedule", "reshard_after_forward")
    for name in kept:
        assert getattr(small.config.parallelism, name) == getattr(job.config.parallelism, name)
    assert small.config.training.recompute == job.config.training.recompute
    assert set(dict(small.config.precision).values()) == {"float64"}
    assert small.config.data.source == "synthetic"
    assert 0 < small.config.data.masked_fraction < 1
    return small


@st.composite
def described(draw: st.DrawFn) -> tuple[str, Degrees, tuple[str, ...]]:
    """A preset, degrees and overrides; most are legal."""
    preset = draw(st.sampled_from(sorted(PRESETS)))
    size = PRESETS[preset]
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    per_rank = draw(st.integers(1, 3))
    needs = SCHEDULES[schedule]
    per_rank = max(needs.fewest_stages_per_rank, min(per_rank, needs.most_stages_per_rank or per_rank))
    most_stages = max(1, size.n_layers // per_rank)
    degrees = (
        draw(st.sampled_from([pp for pp in (1, 2, 3, 4, 6, 8, 16) if pp <= most_stages])),
        draw(st.sampled_from((1, 2, 3, 4, 16))),
        draw(st.sampled_from((1, 2, 4, 7, 8, 64))),
        draw(st.sampled_from([tp for tp in legal_tensor_degrees(size) if tp <= 32])),
    )
    microbatch = draw(st.sampled_from((1, 2, 4)))
    count = draw(st.sampled_from((1, 2, 3, 8, 32)))
    if degrees[0] > 1:
        count = max(count, needs.microbatches_per_stage * degrees[0] * per_rank)
    overrides = [
        f"parallelism.pipeline_parallel_schedule={schedule}",
        f"training.microbatch_size={microbatch}",
        f"training.global_batch_size={microbatch * count * degrees[1] * degrees[2]}",
        f"training.seq_len={draw(st.sampled_from((1, 3, 16, 48, 1024))) * degrees[3]}",
        f"model.tie_embeddings={draw(st.sampled_from(('true', 'false')))}",
    ]
    if degrees[0] > 1:
        overrides.append(f"parallelism.pipeline_parallel_stages_per_rank={per_rank}")
    return preset, degrees, tuple(overrides)


# A tp of 24 with 8 KV heads is legal, its half is not.
TWENTY_FOUR = ("training.seq_len=240", "model.ffn_dim=9600")


EXAMPLES: tuple[tuple[str, Degrees, tuple[str, ...]], ...] = (
    ("llama3-405b", (16, 1, 64, 8), ("training.global_batch_size=1024",)),
    ("llama3-3b", (8, 1, 1, 24), (*TWENTY_FOUR, "training.global_batch_size=8")),
    ("llama3-8b", (4, 2, 2, 16), ("training.global_batch_size=16",)),
    ("llama3-8b", (4, 1, 1, 32), ("training.global_batch_size=16",)),
    ("llama3-8b", (1, 1, 1, 32), ("training.global_batch_size=4096", "training.microbatch_size=1024")),
)


@settings(max_examples=60)
@given(described())
@example(EXAMPLES[0])
@example(EXAMPLES[1])
@example(EXAMPLES[2])
@example(EXAMPLES[3])
@example(EXAMPLES[4])
def test_a_scaled_job_is_legal_and_of_the_same_layout(case: tuple[str, Degrees, tuple[str, ...]]) -> None:
    preset, degrees, overrides = case
    with TemporaryDirectory() as folder:
        try:
            job = job_of(preset, degrees, *overrides, folder=folder)
        except ConfigError:
            assume(False)
        small = scaled(job, folder)
    assert parameter_count(small.size) <= MOST_PARAMETERS
    training, given_training = small.config.training, job.config.training
    if given_training.seq_len * given_training.global_batch_size > MOST_STEP_TOKENS:
        assert training.microbatch_size == 1
        assert training.seq_len <= max(64, small.mesh.degree("tp"))
        assert small.microbatches <= 4 * len(small.stages)


def test_the_examples_are_legal_as_they_are(tmp_path: Path) -> None:
    """Else the test above would pass over them."""
    for preset, degrees, overrides in EXAMPLES:
        assert job_of(preset, degrees, *overrides, folder=str(tmp_path)).mesh.shape == (*degrees[:3], 1, degrees[3])


def test_a_small_job_keeps_its_model(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "parallelism.pipeline_parallel_layers_per_stage=[0,3]", "--tp", "2")
    small, notes = scale_down(job, "float32")
    assert (small.size, small.mesh, small.stages) == (job.size, job.mesh, job.stages)
    assert small.config.training == job.config.training
    assert notes == [], "nothing to tell: the data was synthetic already"


def counts(job: Job) -> list[int]:
    return [len(stage) for stage in job.stages]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8, 8, 8, 8), [2, 2, 2, 2]),
        ((7, 9, 9, 7), [1, 2, 2, 1]),
        ((0, 16, 16, 0), [0, 2, 2, 0]),
        ((1, 13, 17, 1), [1, 1, 2, 1]),
        ((1, 1, 1, 1), [1, 1, 1, 1]),
        ((0, 1, 1, 0), [0, 1, 1, 0]),
    ],
)
def test_uneven_stages_stay_uneven(given: Sequence[int], expected: list[int], tmp_path: Path) -> None:
    listed = ",".join(map(str, given))
    overrides = (
        f"model.n_layers={sum(given)}",
        f"parallelism.pipeline_parallel_layers_per_stage=[{listed}]",
        "training.global_batch_size=8",
    )
    job = job_of("llama3-8b", (4, 1, 1, 2), *overrides, folder=str(tmp_path))
    assert counts(job) == list(given)
    assert counts(scaled(job, str(tmp_path))) == expected


def test_one_stage_keeps_at_most_two_layers(tmp_path: Path) -> None:
    for layers, kept in ((1, 1), (2, 2), (32, 2)):
        job = job_of("llama3-8b", (1, 1, 1, 1), f"model.n_layers={layers}", folder=str(tmp_path))
        assert counts(scaled(job, str(tmp_path))) == [kept]


def test_fewer_pipeline_ranks_keep_both_ends(tmp_path: Path) -> None:
    overrides = (
        "training.global_batch_size=64",
        "parallelism.pipeline_parallel_layers_per_stage=[0,2,2,2,2,2,2,2,2,2,2,2,2,2,3,1]",
    )
    job = job_of("llama3-8b", (16, 1, 1, 16), *overrides, "model.n_layers=30", folder=str(tmp_path))
    small = scaled(job, str(tmp_path))
    assert (small.mesh.degree("pp"), small.mesh.degree("tp")) == (8, 16)
    assert counts(small) == [0, 1, 1, 1, 1, 1, 2, 1]


def test_data_parallel_shrinks_first(tmp_path: Path) -> None:
    job = job_of("llama3-8b", (4, 8, 64, 8), "training.global_batch_size=4096", folder=str(tmp_path))
    small, notes = scale_down(job, "float32")
    assert small.mesh == MeshSpec.of(pp=4, dp_replicate=2, dp_shard=2, tp=8)
    assert f"processes {job.mesh.world_size} -> 128" in notes
    assert f"mesh {job.mesh} -> {small.mesh}" in notes
    assert any(note.startswith("vocabulary 128256 -> ") for note in notes)


def test_data_of_its_own_does_not_matter(tmp_path: Path) -> None:
    """Ids, files and validation that fit the given model but not the small one."""
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 4096)
    overrides = (
        "data.source=tokens",
        "data.path=tokens.bin",
        "data.token_dtype=uint32",
        "data.end_of_document_id=128001",
        "validation.every=5",
    )
    job = job_of("llama3-8b", (1, 1, 2, 1), *overrides, folder=str(tmp_path))
    scaled(job, str(tmp_path))


def test_one_process_trains_the_same_model_on_the_same_samples(tmp_path: Path) -> None:
    job = job_of("llama3-1b", (2, 2, 2, 4), "training.global_batch_size=16", folder=str(tmp_path))
    small, _ = scale_down(job, "float32")
    alone = single_process(small)
    assert alone.mesh == MeshSpec.of()
    assert alone.size == small.size
    assert alone.stages == (range(small.size.n_layers),)
    assert alone.config.training == small.config.training
    assert alone.config.data == small.config.data
    path = tmp_path / "alone.yaml"
    write_resolved(alone.config, path)
    assert check(load(path)).mesh == MeshSpec.of()


@pytest.mark.parametrize(
    ("overrides", "steps", "least"),
    [
        (("optimizer.lr=1e-3", "training.steps=500"), 3, None),
        (("optimizer.lr=8e-5", "training.steps=5000"), 1, "8e-05"),
        (("optimizer.lr=1e-3", "lr_schedule.warmup_steps=2", "training.steps=5"), 1, None),
        (("optimizer.lr=1e-3", "lr_schedule.warmup_steps=100", "training.steps=500"), 3, "1e-05"),
        (("optimizer.lr=1e-3", "lr_schedule.min_lr_ratio=0.0", "training.steps=2"), 3, "0"),
    ],
)
def test_every_step_updates_enough_to_be_seen(
    overrides: tuple[str, ...], steps: int, least: str | None, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, "lr_schedule.decay=cosine", *overrides)
    moving, notes = with_updates(job, steps)
    config = moving.config
    rates = [
        learning_rate(step, config.training.steps, config.optimizer.lr, config.lr_schedule) for step in range(steps)
    ]
    assert min(rates) >= LEAST_RATE
    assert notes == ([] if least is None else [f"learning rate {least} at the least -> 0.001 throughout"])
    assert least is not None or moving == job
