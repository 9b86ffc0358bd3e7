"""What a run tells, line by line."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_job

from koushi.errors import RankFailure, TrainingError
from koushi.train import metrics, trainer
from koushi.train.launch import launch
from koushi.train.metrics import JsonLines, Pace, Progress, StepMetrics, TensorBoard, forget_after, peak_memory
from koushi.train.resume import RunPlace
from koushi.train.trainer import train_rank

ROW = StepMetrics(
    step=7,
    loss=2.34567,
    grad_norm=0.5,
    lr=1.5e-3,
    tokens_per_second=12345.6,
    tokens_per_second_per_device=6172.8,
    mfu=None,
    memory_bytes=3 * 2**20,
    step_seconds=2.0,
    samples=56,
    valid_tokens=1000,
    elapsed_seconds=14.0,
    left_seconds=86.0,
)


def test_a_progress_line() -> None:
    assert ROW.line(50, "resident") == (
        "step  7/50  loss 2.3457  grad norm 0.500  lr 1.50e-03  12,346 tokens/s  resident 3.00 MiB  left 1m26s"
    )


def test_utilisation_is_shown_where_it_is_known() -> None:
    assert "tokens/s  mfu 41.2%  reserved" in replace(ROW, mfu=0.412).line(50, "reserved")


def test_the_last_line_has_nothing_left() -> None:
    last = replace(ROW, step=50, left_seconds=0.0).line(50, "resident")
    assert last.startswith("step 50/50  ")
    assert last.endswith("left 0.0s")


def test_what_is_left_goes_by_all_steps_after_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 12.0, 16.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    pace = Pace()
    assert pace.since_last(1) == (10.0, 10.0)
    assert pace.left(5) == 50.0
    assert pace.since_last(2) == (2.0, 12.0)
    assert pace.left(5) == 10.0
    assert pace.since_last(4) == (2.0, 16.0)
    assert pace.left(3) == 6.0


def test_progress_goes_out_line_by_line() -> None:
    class Out(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    out = Out()
    progress = Progress(50, "resident", out)
    progress.step(ROW)
    progress.validation(7, 1.98766)
    assert out.getvalue().splitlines() == [ROW.line(50, "resident"), "step 7  validation loss 1.9877"]
    assert out.flushed >= 2


def test_every_row_is_in_the_file_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.step(ROW)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [asdict(ROW)]
    sink.validation(7, 1.5)
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {"step": 7, "validation_loss": 1.5}
    sink.close()
    again = JsonLines(path)
    again.step(ROW)
    again.close()
    assert len(path.read_text().splitlines()) == 3, "a file is added to, never cut"


FULL = Path("/dev/full")
"""Takes nothing, as a full disk does."""


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    sink = JsonLines(FULL)
    for write in (lambda: sink.step(ROW), lambda: sink.validation(3, 1.0)):
        with pytest.raises(TrainingError, match="cannot write /dev/full: No space left on device; make room there"):
            write()
    sink.close()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("degree", [1, 2])
def test_a_run_whose_figures_cannot_be_written_ends_with_that_alone(
    degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "forget_after", lambda path, step: 0.0)  # it would read without end
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    job = tiny_job(tmp_path, "--dp-shard", str(degree))
    with pytest.raises((TrainingError, RankFailure)) as caught:
        launch(partial(train_rank, place=RunPlace(tmp_path)), job)
    assert f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_figures_that_cannot_be_opened_are_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(TrainingError, match=r"cannot read .*metrics\.jsonl: Is a directory"):
        forget_after(tmp_path / "metrics.jsonl", 3)


def test_tensorboard_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(metrics, "import_module", missing)
    with pytest.raises(TrainingError, match=r"tensorboard is not installed: pip install 'koushi\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_tensorboard_gets_every_figure_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str):
            written.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append("closed")

    monkeypatch.setattr(metrics, "import_module", lambda name: SimpleNamespace(SummaryWriter=Writer))
    sink = TensorBoard(tmp_path)
    sink.step(ROW)
    sink.validation(7, 1.5)
    sink.close()
    assert (written[0], written[-1]) == (str(tmp_path), "closed")
    assert ("train/loss", 2.34567, 7) in written
    assert ("validation/loss", 1.5, 7) in written
    names = {row[0] for row in written[1:-1]}
    assert names == {f"train/{name}" for name in asdict(ROW) if name not in ("step", "mfu")} | {"validation/loss"}


def test_peak_memory_is_that_of_this_process() -> None:
    before = peak_memory(torch.device("cpu"))
    assert before > 2**20
    more = torch.ones(8 * 2**20)
    assert peak_memory(torch.device("cpu")) >= before
    assert more.nbytes == 32 * 2**20


def test_pace_is_per_step_and_leaves_out_what_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 104.0, 110.0, 112.0, 113.0))
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pace = Pace()
    assert pace.since_last(2) == (2.0, 4.0)
    pace.skip()
    assert pace.since_last(3) == (2.0, 12.0)
    assert pace.since_last(3) == (1.0, 13.0), "no step since: nothing is divided by 0"
