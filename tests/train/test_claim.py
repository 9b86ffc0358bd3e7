"""Two runs that start together do not share a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tiny import tiny_file, tiny_job

from koushi.errors import TrainingError
from koushi.run_folder import is_claimed
from koushi.train.claim import claimed
from koushi.train.command import train
from koushi.train.resume import run_place


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    assert not is_claimed(folder)
    with claimed(folder):
        assert is_claimed(folder)
        with pytest.raises(TrainingError, match="another run is writing into"), claimed(folder):
            pass
    assert not is_claimed(folder)
    with claimed(folder):
        assert is_claimed(folder)


def test_the_second_of_two_runs_takes_the_next_name(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    first = run_place(job).folder
    with claimed(first):
        assert run_place(job).folder == first.with_name(first.name + "-2")
    assert run_place(job).folder == first


def test_a_named_folder_in_use_is_refused(tmp_path: Path) -> None:
    with claimed(Path("mine")), pytest.raises(TrainingError, match="another run is writing into mine"):
        train(tiny_file(tmp_path), ["run.folder=mine"])


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    if (child := os.fork()) == 0:
        with claimed(tmp_path / "mine"):
            os.write(tell, b"1")
            signal.pause()
    os.read(ready, 1)
    assert is_claimed(tmp_path / "mine")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not is_claimed(tmp_path / "mine")


def test_a_place_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    for folder in (f"{path}/inside", "/proc/nope"):
        with pytest.raises(TrainingError, match=r"cannot write into the run's folder: .*; choose another run\.folder"):
            train(path, [f"run.folder={folder}"])
