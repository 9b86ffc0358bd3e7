"""Killed, stopped, out of room, altered: the run goes on from its newest whole checkpoint, or says why not."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from checkpoint_runs import (
    ONE,
    Layout,
    assert_same,
    checkpoint,
    flip,
    job_of,
    layout,
    losses,
    run_file,
    tensors,
    train,
)

from koushi.checkpoint import dcp
from koushi.checkpoint.files import verify_files
from koushi.checkpoint.folders import published
from koushi.checkpoint.inspect import inspect
from koushi.checkpoint.manifest import MANIFEST, read_manifest
from koushi.cli import main
from koushi.errors import CheckpointError, DamagedCheckpoint, KoushiError, RankFailure, WrongCheckpoint
from koushi.train.resume import RunPlace, finished, run_place

PATIENCE = 240
TWO = layout(1, 1, 2, 1)
STEPS = 40


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``koushi train`` of the base run in ``folder``, on two ranks unless ``arguments`` say otherwise."""
    command = [sys.executable, "-m", "koushi", "train", str(run_file(folder)), f"run.folder={folder / 'run'}"]
    return subprocess.Popen(
        [*command, *TWO, f"training.steps={STEPS}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_true(run: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"in {PATIENCE} s not: {what}"
        assert run.poll() is None, f"ended before {what}: {run.communicate()[0]}"
        time.sleep(0.01)


def rows_written(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def ranks(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(run.pid).children() if not gone(child) and not tracks_resources(child)]


def tracks_resources(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("undisturbed"), *TWO, f"training.steps={STEPS}")


def kill_one(run: subprocess.Popen[str], folder: Path, world: int, choice: random.Random, at_once: bool) -> None:
    """Kill a random rank at a random moment, unless ``at_once`` some steps after the last restart."""
    await_true(run, lambda: len(ranks(run)) == world, f"{world} ranks")
    before = ranks(run)
    for _ in range(0 if at_once else choice.randint(1, 6)):
        await_change(run, folder)
    time.sleep(choice.uniform(0, 0.5 if at_once else 0.05))
    choice.choice(before).kill()
    await_true(run, lambda: all(gone(one) for one in before), "the end of its peers")


def whole_ones(checkpoints: Path) -> int:
    """How many of the published checkpoints are whole, which all have to be that the run does not remove just now."""
    whole = 0
    for path in published(checkpoints):
        try:
            verify_files(path, read_manifest(path))
            whole += 1
        except CheckpointError:
            assert not path.exists(), f"{path} is damaged"
    return whole


def await_change(run: subprocess.Popen[str], folder: Path) -> None:
    """Until a row is written, or the rows after a checkpoint are dropped."""
    seen = rows_written(folder)
    await_true(run, lambda: rows_written(folder) != seen, "a step")


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def survives(kills: int, steps: int, seed: int, folder: Path, undisturbed: Path, degrees: Layout, world: int) -> None:
    """Kill a random rank ``kills`` times, each at a random moment after the run has gone on."""
    choice = random.Random(seed)
    run = start(folder, *degrees, "--max-restarts", str(kills), "checkpoint.every=2", f"training.steps={steps}")
    checkpoints, whole = folder / "run" / "checkpoints", []
    try:
        for kill in range(kills):
            if kill == 1:  # what is killed before the first checkpoint begins again, which takes longest
                await_true(run, lambda: bool(published(checkpoints)), "a checkpoint")
            kill_one(run, folder, world, choice, at_once=kill == 0)
            whole.append(whole_ones(checkpoints))
        output, _ = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, output
    assert len(re.findall(r"^restart \d+: rank \d+ \(.*\) ", output, re.MULTILINE)) == kills, output
    assert all(count >= 1 for count in whole[1:]), whole
    assert losses(folder / "run") == losses(undisturbed)
    assert whole_ones(checkpoints) == 3
    assert_same(published(checkpoints)[0], checkpoint(undisturbed, steps))


def test_a_run_survives_killed_ranks(tmp_path: Path, undisturbed: Path) -> None:
    survives(3, STEPS, 0, tmp_path, undisturbed, TWO, 2)


@pytest.mark.long
def test_a_run_on_a_lattice_survives_25_killed_ranks(tmp_path: Path) -> None:
    four = layout(2, 1, 2, 1)
    undisturbed = train(tmp_path / "undisturbed", *four, "training.steps=240")
    survives(25, 240, 1, tmp_path, undisturbed, four, 4)


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    run = start(tmp_path, "checkpoint.every=1000")
    await_true(run, lambda: rows_written(tmp_path) > 3, "some steps")
    run.terminate()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, output
    (saved,) = published(tmp_path / "run" / "checkpoints")
    step = int(saved.name[-8:])
    assert 3 < step < STEPS
    assert f"SIGTERM: saved step {step}" in output
    run = start(tmp_path, "checkpoint.every=1000")
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, output
    assert f"resuming from {saved}: step {step} of {STEPS}" in output
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_sigterm_of_a_single_process_saves_too(tmp_path: Path) -> None:
    run = start(tmp_path, *ONE, "checkpoint.every=1000", "training.steps=2000", "--resume", "never")
    await_true(run, lambda: rows_written(tmp_path) > 3, "some steps")
    run.terminate()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, output
    assert len(published(tmp_path / "run" / "checkpoints")) == 1
    assert output.endswith("; the same command without run.resume goes on from there\nstopped by SIGTERM\n")


def test_sigterm_of_a_single_process_without_checkpoints_is_told(tmp_path: Path) -> None:
    run = start(tmp_path, *ONE, "checkpoint.every=0", "training.steps=2000")
    await_true(run, lambda: rows_written(tmp_path) > 0, "a step")
    run.terminate()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("stopped by SIGTERM\n")


@pytest.mark.parametrize(
    ("degrees", "saved", "kept"),
    [(ONE, 0, "nothing is saved at all"), (TWO, 3, "nothing is saved after step 3")],
    ids=["one process", "two that go on"],
)
def test_a_grace_time_that_ends_within_a_step_is_told(degrees: Layout, saved: int, kept: str, tmp_path: Path) -> None:
    """A step takes far longer than anyone waits for it."""
    before = [f"run.resume={train(tmp_path / 'before', *degrees, f'training.steps={saved}')}"] if saved else []
    run = start(tmp_path, *degrees, *before, "training.global_batch_size=65536", "run.grace=1.5")
    await_true(run, (tmp_path / "run" / "predicted.json").exists, "its first step")
    run.terminate()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, output
    where = rf"(step {saved + 1}|the start of the run)"
    said = rf"^SIGTERM: run.grace \(1.5 s\) ended within {where}: {kept}; set run.grace above the time of a step "
    assert len(re.findall(said, output, re.MULTILINE)) == 1, output
    assert "Traceback" not in output


def test_a_long_step_is_the_last_after_sigterm(tmp_path: Path) -> None:
    """Not the one after it, which the ranks had agreed on before the signal."""
    run = start(tmp_path, *ONE, "checkpoint.every=1000", "training.global_batch_size=1024", "training.steps=5")
    await_true(run, (tmp_path / "run" / "predicted.json").exists, "its first step")
    run.terminate()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM: saved step 1;" in output


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A run of 10 steps with checkpoints of steps 5 and 10."""
    return train(tmp_path / "whole", *ONE)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rank-00000.safetensors", flip),
        ("rank-00000.safetensors", truncate),
        ("rank-00000.safetensors", Path.unlink),
        (MANIFEST, lambda path: flip(path, 200)),
        (MANIFEST, truncate),
        (MANIFEST, Path.unlink),
    ],
    ids=["flipped", "truncated", "missing", "manifest flipped", "manifest truncated", "manifest missing"],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    whole: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = shutil.copytree(checkpoint(whole, 10), whole / "kept")
    damage(checkpoint(whole, 10) / name)
    if (checkpoint(whole, 10) / MANIFEST).exists():
        with pytest.raises(DamagedCheckpoint, match="step-00000010"):
            inspect(whole)
    capsys.readouterr()
    train(whole, *ONE)
    said = capsys.readouterr().err
    assert "warning: " in said
    assert "step-00000010" in said.splitlines()[0]
    assert f"resuming from {checkpoint(whole, 5)}: step 5 of 10, 80 samples" in said
    assert_same(checkpoint(whole, 10), kept)
    assert sorted(losses(whole)) == list(range(1, 11))


def test_a_run_without_a_whole_checkpoint_says_so(whole: Path) -> None:
    for step in (5, 10):
        flip(checkpoint(whole, step) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"none of 2 checkpoints .*another checksum.*another run.folder"):
        train(whole, *ONE)


def test_a_checkpoint_of_another_model_is_refused(whole: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path / "new", *ONE, "model.dim=32", "model.n_kv_heads=4", f"run.resume={checkpoint(whole, 5)}")
    with pytest.raises(WrongCheckpoint, match=r"another model: it has dim 24 \(here 32\), n_kv_heads 2 \(here 4\)$"):
        run_place(job)
    with pytest.raises(CheckpointError, match="another model"):
        train(tmp_path / "new", *ONE, "model.dim=32", source=checkpoint(whole, 5))


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The disk is full from the checkpoint of the given step on."""
    steps: list[int] = []
    real = dcp.write_tensor_file

    def write(path: Path, *arguments: object) -> object:
        if steps and int(path.parent.name.split("-")[1].split(".")[0]) >= steps[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp, "write_tensor_file", write)
    yield steps


@pytest.mark.parametrize(("mode", "degrees"), [("async", ONE), ("sync", ONE), ("async", TWO)], ids=str)
def test_a_full_disk_stops_the_run_and_leaves_what_is_there(
    mode: str, degrees: tuple[str, ...], tmp_path: Path, full_after: list[int]
) -> None:
    full_after.append(6)
    with pytest.raises((CheckpointError, RankFailure)) as caught:
        train(tmp_path, *degrees, f"checkpoint.mode={mode}", "checkpoint.every=3")
    text = str(caught.value)
    assert "the checkpoint of step 6 could not be written (on rank 0): [Errno 28] No space left on device" in text
    assert "the checkpoint of step 3 before it is untouched" in text
    assert "Traceback" not in text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    tensors(checkpoint(tmp_path, 3))
    full_after.clear()
    train(tmp_path, *degrees, "checkpoint.every=3")
    assert sorted(losses(tmp_path)) == list(range(1, 11))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", small], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(small / "run", *ONE, "checkpoint.every=2", "checkpoint.keep_last=9")
        steps = published(small / "run" / "checkpoints")
        assert steps
        for path in steps:
            tensors(path)
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_folder_that_cannot_be_written_is_told_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file(tmp_path)), *ONE, f"run.folder={tmp_path / 'file' / 'run'}"])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("cannot write into the run's folder: ")
    assert error.endswith("choose another run.folder\n")


def test_where_a_run_goes_on(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")

    def place(*overrides: str) -> RunPlace:
        return run_place(job_of(tmp_path, *ONE, *overrides))

    assert place() == RunPlace(runs / "run")
    shutil.copytree(whole, runs / "run")
    assert place() == RunPlace(runs / "run")
    assert finished(job_of(tmp_path, *ONE), place()) == 10
    assert finished(job_of(tmp_path, *ONE, "training.steps=11"), place()) is None
    assert place("run.resume=never") == RunPlace(runs / "run-2")
    five = checkpoint(runs / "run", 5)
    assert place(f"run.resume={five}") == RunPlace(runs / "run-2", five)
    assert place(f"run.resume={five}").found == [five]
    assert place("run.resume=runs/run", "training.steps=11").found[0] == checkpoint(runs / "run", 10)
    with pytest.raises(KoushiError, match="nothing is left to train"):
        place("run.resume=runs/run")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        place("run.resume=.")
    with pytest.raises(KoushiError, match=r"which only run\.resume auto goes on with"):
        place("run.folder=runs/run", "run.resume=never")
    # The newest of the run's folders counts: one that keeps no checkpoints is left alone.
    (runs / "run-2").mkdir()
    (runs / "run-2" / "metrics.jsonl").touch()
    assert place() == RunPlace(runs / "run-3")
    with pytest.raises(KoushiError, match="already holds a run without checkpoints"):
        place("run.folder=runs/run-2")
    # A world that was restarted goes on with what it began, whatever it was told to begin from.
    shutil.copytree(whole, runs / "run-3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert place("run.resume=never") == RunPlace(runs / "run-3")
    assert place(f"run.resume={five}").found[0] == checkpoint(runs / "run-3", 10)
    # Where its first folder is known, that counts, whether or not it has come far enough to hold a run.
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    for resume, source in (("auto", None), ("never", None), (str(five), five)):
        job = job_of(tmp_path, *ONE, f"run.resume={resume}", "run.folder=elsewhere")
        assert run_place(job, runs / "run-4") == RunPlace(runs / "run-4", source)
        assert run_place(job, runs / "run").found[0] == checkpoint(runs / "run", 10)


def test_a_finished_run_is_not_begun_again(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = losses(whole)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(whole / "run.yaml"), *ONE, f"run.folder={whole}"])
    assert ended.value.code == 0
    assert "is finished, with a checkpoint of step 10 of 10" in capsys.readouterr().out
    assert losses(whole) == before
