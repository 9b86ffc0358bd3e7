"""What ``koushi check`` prints for a legal run file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from koushi.check.summary import summary
from koushi.job import Job
from koushi.train.claim import claimed


def test_one_screen(checked: Callable[..., Job]) -> None:
    job = checked(
        "model: {n_layers: 7}\nparallelism: {pipeline_parallel_degree: 2, tensor_parallel_degree: 4}\n"
        "training: {seq_len: 128, global_batch_size: 8, microbatch_size: 2, steps: 10, "
        "recompute: full}\nprecision: {compute: bfloat16}\n"
    )
    text = summary(job)
    assert text.splitlines()[2:] == [
        "mesh     [pp=2, dp_replicate=1, dp_shard=1, cp=1, tp=4], 8 devices; the groups of rank 0:",
        "           pp                2   0 4",
        "           dp_replicate      1   0",
        "           dp_shard          1   0",
        "           cp                1   0",
        "           tp                4   0 1 2 3",
        "           both dp           1   0",
        "stages   2, 1F1B, 1 per rank; layers 0-3 | 4-6",
        "batch    8 samples = 1 data-parallel rank x 4 microbatches x 2; 1.02K tokens a step",
        "dtypes   float32 parameters, bfloat16 compute, float32 gradient reductions; recompute full",
        "run      10 steps, 10.24K tokens, into runs/run",
    ]


def test_the_folder_is_the_one_that_training_would_take(
    checked: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(run: str = "{}") -> str:
        return summary(checked(f"run: {run}\n")).partition(" tokens, ")[2]

    assert said() == "into runs/run"
    assert not (tmp_path / "runs").exists()
    first = Path("runs/run")
    first.mkdir(parents=True)
    (first / "metrics.jsonl").touch()
    assert said() == "into runs/run-2"
    assert "which would not start: run.folder runs/run already holds a run without" in said("{folder: runs/run}")
    (first / "checkpoints").mkdir()
    assert said() == "into runs/run, with what is there already"
    assert said("{resume: never}") == "into runs/run-2"
    with claimed(Path("runs/run-2")):
        assert said("{resume: never}") == "into runs/run-3"


def test_parameters_are_counted_as_published(checked: Callable[..., Job]) -> None:
    for name, count in (("llama3-8b", "8.03B"), ("llama3-70b", "70.55B"), ("llama3-405b", "405.85B")):
        text = summary(checked(f"model: {{name: {name}}}\ndata: {{source: synthetic}}\n"))
        assert f"{name}, {count} parameters" in text


@pytest.mark.parametrize("own", ["", "norm_eps: 1.0e-6", "rope_theta: 20000.0", "rope_scaling: {factor: 4.0}"])
def test_a_preset_keeps_its_name_where_every_size_is_its_own(checked: Callable[..., Job], own: str) -> None:
    named = summary(checked(f"model: {{name: llama3-debug, dim: 256, {own}}}\n")).splitlines()[1]
    assert named.startswith("model    llama3-debug, 5.77M parameters: ")


@pytest.mark.parametrize("own", ["n_layers: 7", "tie_embeddings: true", "vocab_size: 4096", "ffn_dim: 800"])
def test_sizes_of_the_run_files_own_are_not_called_a_preset(checked: Callable[..., Job], own: str) -> None:
    named = summary(checked(f"model: {{{own}}}\n")).splitlines()[1]
    assert named.startswith("model    own sizes (from llama3-debug), ")


def test_a_large_lattice_still_fits_a_screen(checked: Callable[..., Job]) -> None:
    job = checked(
        "model: {name: llama3-405b}\ndata: {source: synthetic}\n"
        "parallelism: {pipeline_parallel_degree: 16, data_parallel_shard_degree: 128, tensor_parallel_degree: 8}\n"
        "training: {seq_len: 8192, global_batch_size: 2048}\n"
    )
    lines = summary(job).splitlines()
    assert len(lines) < 24
    assert max(len(line) for line in lines) < 132
    assert "layers 0-6 | 7-14" in summary(job)
