"""A run that starts from a Hugging Face folder: the same weights and losses on every layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_models import LLAMA3, load, make

from koushi.check.check import check
from koushi.checkpoint.folders import step_folder
from koushi.checkpoint.hf import HfWeights
from koushi.config.load import load as load_run
from koushi.data.batches import open_samples, train_batch
from koushi.data.samples import IGNORE_INDEX
from koushi.errors import CheckpointError, ConfigError, RunRefused
from koushi.job import Job
from koushi.run_folder import CHECKPOINTS
from koushi.train.command import train
from koushi.verify.command import run_recorded
from koushi.verify.compare import TOLERANCES, compare
from koushi.verify.record import RankRecord
from koushi.verify.scale import scale_down, single_process

RUN = """
model: {hf: model}
training: {seq_len: 16, global_batch_size: 4, microbatch_size: 1, steps: 3}
data: {source: synthetic, masked_fraction: 0.3}
run: {device: cpu, timeout: 60}
"""
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file and the model it names: tied, with scaled rotary angles, in several files."""
    folder = tmp_path_factory.mktemp("hf")
    make(folder / "model", shard="20KB", tie_word_embeddings=True, rope_parameters=LLAMA3)
    (folder / "run.yaml").write_text(RUN)
    return folder


def job_of(folder: Path, *overrides: str) -> Job:
    return check(load_run(folder / "run.yaml", overrides))


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[RankRecord]:
    job = job_of(folder)
    return run_recorded(job, [job], STEPS, tmp_path_factory.mktemp("reference") / "records")[0]


def test_the_first_loss_is_that_of_transformers(folder: Path, reference: list[RankRecord]) -> None:
    tokens, labels = train_batch(open_samples(job_of(folder)), 0, 4, 0)
    assert (labels == IGNORE_INDEX).any()
    with torch.no_grad():
        logits = load(folder / "model")(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
    assert reference[0].losses[0] == pytest.approx(expected.item(), rel=1e-5)


def test_one_process_starts_from_the_folders_weights(folder: Path, reference: list[RankRecord]) -> None:
    with HfWeights(folder / "model") as weights:
        whole = dict(weights.whole())
    initial = {piece.name: piece.values for piece in reference[0].pieces if piece.kind == "initial"}
    assert initial.keys() == whole.keys()
    assert all(torch.equal(values, whole[name]) for name, values in initial.items())


@pytest.mark.parametrize(
    "overrides",
    [
        ("--tp", "2", "--dp-shard", "2"),
        ("--tp", "4"),
        ("--pp", "2", "--dp-replicate", "2"),
        pytest.param(("--pp", "2", "--dp-shard", "2", "--tp", "2"), marks=pytest.mark.long),
        pytest.param(("--dp-shard", "4", "--dp-replicate", "1"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_layouts_start_from_the_same_weights_and_train_alike(
    overrides: tuple[str, ...], folder: Path, tmp_path: Path, reference: list[RankRecord]
) -> None:
    job = job_of(folder, *overrides)
    records = run_recorded(job, [job], STEPS, tmp_path / "records")[0]
    differences, wrong = compare(reference, records, TOLERANCES["float32"])
    assert not wrong
    assert {"initial", "loss", "gradient", "parameter"} <= {one.kind for one in differences}
    assert [one for one in differences if not one.within] == []
    assert records[0].losses[0] == pytest.approx(reference[0].losses[0], rel=1e-5)


def test_verify_keeps_the_weights_of_a_small_model_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(folder, "--tp", "2")
    small, notes = scale_down(job, "float32")
    assert small.config.model.hf == job.config.model.hf
    assert not any(note.startswith("weights") for note in notes)
    monkeypatch.setattr("koushi.verify.scale.MOST_PARAMETERS", 20_000)
    scaled, notes = scale_down(job, "float32")
    assert scaled.size != job.size
    assert scaled.config.model.hf is None
    assert f"weights {job.config.model.hf} -> random" in notes
    assert single_process(small).config.model.hf == job.config.model.hf


def rows(folder: Path) -> dict[int, float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in found}


def test_a_run_goes_on_without_the_folder_it_began_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model", rope_parameters=LLAMA3)
    run = tmp_path / "run.yaml"
    run.write_text(RUN + "checkpoint: {every: 1, keep_last: 9}\n")
    folder = tmp_path / "runs" / "run"
    train(run)
    losses = rows(folder)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    other = rf"what differs: model\.hf {re.escape(str(tmp_path))}/model -> {re.escape(str(tmp_path))}/other\n"
    with pytest.raises(RunRefused, match=other):
        train(run, ["model.hf=other"])
    with pytest.raises(ConfigError, match=r"model\.hf: .*missing: "):
        train(run, ["model.hf=missing"])
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.hf: .*model: "):
        train(run, ["run.resume=never"])
    shutil.rmtree(tmp_path / "model")
    for step in (1, 2):  # the second time from a checkpoint that was saved without the folder
        for later in range(step + 1, 4):
            shutil.rmtree(step_folder(folder / CHECKPOINTS, later))
        capsys.readouterr()
        train(run)
        said = capsys.readouterr().err
        assert "model: there is no such folder" in said
        assert f"going on without it, with the model of runs/run/checkpoints/step-0000000{step}\n" in said
        assert "changed since" not in said
        assert rows(folder) == losses
    with pytest.raises(CheckpointError, match=r"another model: it has dim 32 \(here 64\)"):
        train(run, ["training.steps=5", "model.dim=64"])
