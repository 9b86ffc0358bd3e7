"""Whole runs through ``koushi train``'s own function: what they write, where, and how they end."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import alone, tiny_file, tiny_job
from torch import Tensor

from koushi.check.check import check
from koushi.config.load import load
from koushi.data.batches import open_samples
from koushi.data.samples import IGNORE_INDEX, Samples
from koushi.errors import CheckpointError, ConfigError, DataError, RankFailure, TrainingError
from koushi.job import Job
from koushi.parallel import compose
from koushi.parallel.device_mesh import build_mesh
from koushi.schedules import SCHEDULES
from koushi.train import command
from koushi.train.checkpoints import Checkpoints
from koushi.train.command import headline, started_world, train
from koushi.train.metrics import StepMetrics
from koushi.train.resume import run_place
from koushi.units import counted

VALIDATING = ("validation.every=2", "validation.batches=2")
SHARDED, REPLICATED, CUT, PIPELINED = ("--dp-shard", "2"), ("--dp-replicate", "2"), ("--tp", "2"), ("--pp", "2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Ran:
    folder: Path
    rows: list[dict[str, Any]]
    output: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "loss" in row]

    @property
    def validations(self) -> list[tuple[int, float]]:
        return [(row["step"], row["validation_loss"]) for row in self.rows if "validation_loss" in row]


@pytest.fixture
def ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """``ran(*overrides)``: what a run of the tiny file left in ``runs/<name>``."""

    def run(*overrides: str, name: str = "tiny") -> Ran:
        train(tiny_file(tmp_path), overrides)
        folder = Path("runs") / name
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return Ran(folder, rows, capfd.readouterr().out)

    return run


@pytest.mark.parametrize("layout", ((), SHARDED, CUT, PIPELINED), ids=("1 rank", "dp_shard", "tp", "pp"))
def test_a_run_writes_its_metrics_and_its_config(layout: tuple[str, ...], ran: Callable[..., Ran]) -> None:
    one = ran(*layout)
    world = 2 if layout else 1
    assert [row["step"] for row in one.rows] == [1, 2, 3]
    for row in one.steps:
        assert set(row) == {field.name for field in fields(StepMetrics)}
        assert all(isinstance(row[name], float) and row[name] > 0 for name in ("loss", "grad_norm", "lr"))
        assert row["tokens_per_second"] == pytest.approx(world * row["tokens_per_second_per_device"])
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(4 * 8)
        assert (row["samples"], row["valid_tokens"]) == (4 * row["step"], 32)
        assert row["mfu"] is None or 0 < row["mfu"] < 1
        assert row["memory_bytes"] > 2**20
    assert [row["elapsed_seconds"] for row in one.steps] == sorted(row["elapsed_seconds"] for row in one.steps)
    resolved = check(load(one.folder / "config.yaml"))
    given = check(load("tiny.yaml", layout))
    assert (resolved.config, resolved.size, resolved.mesh, resolved.stages) == (
        given.config,
        given.size,
        given.mesh,
        given.stages,
    )
    assert f"on {counted(world, 'process')} [" in one.output.splitlines()[0]
    assert len([line for line in one.output.splitlines() if line.startswith("step ")]) == 3
    assert one.output.splitlines()[-1] == (
        "done; wrote runs/tiny/metrics.jsonl and runs/tiny/config.yaml; checkpoint.every=N would have kept the weights"
    )


def test_a_resolved_config_trains_the_same(ran: Callable[..., Ran], tmp_path: Path) -> None:
    first = ran()
    train(first.folder / "config.yaml", ["run.folder=again"])
    again = [json.loads(line) for line in Path("again/metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row["grad_norm"]) for row in again] == [(row["loss"], row["grad_norm"]) for row in first.rows]


def test_validation_does_not_depend_on_the_layout(ran: Callable[..., Ran]) -> None:
    """Nor does it change what is trained."""
    alone = ran(*VALIDATING, "training.steps=4")
    assert [step for step, _ in alone.validations] == [2, 4]
    assert [row.get("step") for row in alone.rows] == [1, 2, 2, 3, 4, 4]
    assert alone.validations[0][1] != alone.steps[1]["loss"]
    without = ran("training.steps=4", name="tiny-2")
    assert [row["loss"] for row in without.steps] == [row["loss"] for row in alone.steps]
    for count, layout in enumerate((SHARDED, REPLICATED, CUT, PIPELINED), start=3):
        other = ran(*VALIDATING, "training.steps=4", *layout, name=f"tiny-{count}")
        for (step, loss), (other_step, other_loss) in zip(alone.validations, other.validations, strict=True):
            assert step == other_step
            assert other_loss == pytest.approx(loss, rel=1e-5), layout
        for row, other_row in zip(alone.steps, other.steps, strict=True):
            assert other_row["loss"] == pytest.approx(row["loss"], rel=1e-5), layout


@pytest.mark.parametrize("schedule", [name for name, needs in SCHEDULES.items() if needs.fewest_stages_per_rank > 1])
def test_validation_under_a_schedule_of_several_stages(schedule: str, ran: Callable[..., Ran]) -> None:
    tall = ("model.n_layers=4", "validation.every=1", "training.steps=2", "validation.batches=1")
    alone = ran(*tall)
    piped = ran(*tall, *PIPELINED, f"parallelism.pipeline_parallel_schedule={schedule}", name="tiny-2")
    assert [step for step, _ in piped.validations] == [1, 2]
    for (_, one), (_, other) in zip(alone.validations, piped.validations, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert [row["loss"] for row in piped.steps] == pytest.approx([row["loss"] for row in alone.steps], rel=1e-5)


def test_validation_is_the_mean_over_valid_tokens_of_all_its_batches(ran: Callable[..., Ran], tmp_path: Path) -> None:
    """At a learning rate too small to change a weight, so that the initial ones are what it sees."""
    overrides = (*VALIDATING, "data.masked_fraction=0.8", "optimizer.lr=1e-30", "training.steps=2")
    ((step, found),) = ran(*overrides).validations
    expected = []

    def worker() -> None:
        job = tiny_job(tmp_path, *overrides)
        model = compose.build(job, build_mesh(job.mesh, "cpu"), torch.device("cpu")).parts[0]
        samples = open_samples(job)
        pairs = [samples.validation(index) for index in range(2 * 4)]
        tokens, labels = (torch.stack([torch.from_numpy(pair[side]) for pair in pairs]) for side in (0, 1))
        counts = (labels != IGNORE_INDEX).sum(1)
        assert counts[:4].sum() != counts[4:].sum(), "batches of unequal weight"
        with torch.no_grad():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        expected.append(loss.item())

    alone(worker, tmp_path)
    assert (step, found) == (2, pytest.approx(expected[0], rel=1e-6))


def test_steps_between_lines_and_the_last_one(ran: Callable[..., Ran]) -> None:
    one = ran("metrics.every=3", "training.steps=7")
    assert [row["step"] for row in one.rows] == [3, 6, 7]


def test_a_second_run_takes_the_next_name(ran: Callable[..., Ran]) -> None:
    first = ran("training.steps=1")
    assert len(first.rows) == 1
    second = ran("training.steps=2", name="tiny-2")
    assert len(second.rows) == 2
    assert len((first.folder / "metrics.jsonl").read_text().splitlines()) == 1, "the first is as it was"
    job = check(load("tiny.yaml"))
    assert run_place(job).folder == Path("runs/tiny-3")


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    train(tiny_file(tmp_path), ["run.folder=mine", "training.steps=1"])
    before = Path("mine/metrics.jsonl").read_text()
    with pytest.raises(
        TrainingError,
        match=r"run\.folder mine already holds a run without checkpoints; name another folder, or remove it",
    ):
        train(tiny_file(tmp_path), ["run.folder=mine", "training.steps=1"])
    assert Path("mine/metrics.jsonl").read_text() == before
    assert not Path("runs").exists()
    Path("empty").mkdir()
    train(tiny_file(tmp_path), ["run.folder=empty", "training.steps=1"])
    assert Path("empty/metrics.jsonl").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e30", "lr_schedule.decay=none", "training.steps=9"]
    with pytest.raises(
        TrainingError, match=r"the (loss|gradient norm) of step [23] is (nan|inf).*a lower optimizer\.lr"
    ):
        train(tiny_file(tmp_path), overrides)
    rows = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert 1 <= len(rows) <= 2, "what was finite is there"
    assert all(math.isfinite(row["loss"]) for row in rows)


def spoil(patch: pytest.MonkeyPatch, rank: int, step: int) -> None:
    """The loss of one rank becomes nan at ``step``, which has 2 microbatches."""
    original, calls = compose.GlobalLoss.__call__, []

    def loss(self: compose.GlobalLoss, logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(None)
        share = original(self, logits, labels)
        return share * math.nan if dist.get_rank() == rank and len(calls) > 2 * (step - 1) else share

    patch.setattr(compose.GlobalLoss, "__call__", loss)


def test_the_culprit_of_a_loss_that_is_not_finite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, rank=1, step=2)
    with pytest.raises(RankFailure, match=r"the loss of step 2 is nan, from rank 1 \(dp_shard=1\);"):
        train(tiny_file(tmp_path), SHARDED)
    assert len(Path("runs/tiny/metrics.jsonl").read_text().splitlines()) == 1


def test_a_gradient_norm_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss that is finite no rank is the culprit."""
    monkeypatch.setattr(
        "koushi.parallel.gradients.squared_norm", lambda parameters: torch.tensor(math.inf, dtype=torch.float32)
    )
    with pytest.raises(TrainingError, match="the gradient norm of step 1 is inf; a lower"):
        train(tiny_file(tmp_path), [])


def test_a_run_that_fails_before_it_begins_leaves_sigterm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts down its grace time would else end the process at somebody else's SIGTERM."""

    def resume(checkpoints: Checkpoints) -> None:
        assert signal.getsignal(signal.SIGTERM) != before
        raise CheckpointError("not readable")

    monkeypatch.setattr(Checkpoints, "resume", resume)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(CheckpointError, match="not readable"):
        train(tiny_file(tmp_path), ["checkpoint.every=1"])
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    for error, overrides in (
        (ConfigError, ["--tp", "3"]),
        (DataError, ["data.source=text", "data.path=tiny.yaml", "model.vocab_size=2048", "training.seq_len=100000"]),
    ):
        with pytest.raises(error):
            train(tiny_file(tmp_path), overrides)
    assert not Path("runs").exists()


def test_tensorboard_that_is_missing_is_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koushi.check.training_rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics\.tensorboard: is true, but tensorboard is not installed"):
        train(tiny_file(tmp_path), ["metrics.tensorboard=true"])


def test_the_world_is_that_of_a_launcher_or_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_degree = load(tiny_file(tmp_path), ["--dp-shard", "-1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert started_world(open_degree) == 4
    assert started_world(load("tiny.yaml")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert started_world(open_degree) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert started_world(open_degree) == 8


def test_only_the_first_rank_of_a_launcher_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Job] = []
    monkeypatch.setattr(command, "launch", lambda worker, job, restarts: launched.append(job))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    train(tiny_file(tmp_path), SHARDED)
    assert len(launched) == 1
    assert not Path("runs").exists()
    monkeypatch.setenv("RANK", "0")
    train(tiny_file(tmp_path), SHARDED)
    assert Path("runs/tiny/config.yaml").exists()


def test_the_headline_names_model_mesh_and_batch(tmp_path: Path) -> None:
    job = check(load(tiny_file(tmp_path), ["--dp-shard", "2"]))
    assert headline(job) == (
        "own sizes (from llama3-debug), 6.90K parameters, on 2 processes "
        "[pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1]; 4 x 8 tokens a step, 2 microbatches a rank"
    )


def test_ranks_with_different_data_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "digest", property(lambda self: f"data of rank {os.environ['RANK']}"))
    with pytest.raises(RankFailure, match="the ranks do not read the same data; here it is data of rank"):
        train(tiny_file(tmp_path), ["--dp-shard", "2", "data.source=synthetic"])
