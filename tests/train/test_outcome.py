"""A run leaves what was predicted of it beside what it measured, and both name the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_file, tiny_job

from koushi.hardware.hardware import load
from koushi.train.outcome import assumed_hardware, predicted


def test_a_run_is_held_against_its_plan(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "koushi", "train", str(tiny_file(tmp_path)), "--dp-shard=2", "debug.audit=true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    folder = tmp_path / "runs" / "tiny"
    said = json.loads((folder / "predicted.json").read_text(encoding="utf-8"))
    (row,) = (json.loads(line) for line in (folder / "ranks.jsonl").read_text(encoding="utf-8").splitlines())
    assert said["hardware"] == "cpu" and said["step_seconds"] > 0 and said["memory_bytes"] > 0
    assert row["step"] == 3 and row["bytes"] == said["bytes"] and set(said["bytes"]) == {"dp_shard"}
    assert row["coordinates"] == ["dp_shard=0", "dp_shard=1"]
    assert all(0 < waited < 60 for waited in row["waited_seconds"]), "both ranks waited for each other"
    assert all(memory > 0 for memory in row["memory_bytes"])
    assert f"predicted for cpu: {said['step_seconds']:.1f}s a step" in found.stdout
    assert "collectives" in found.stdout and "as predicted" in found.stdout


def test_hardware_is_what_the_run_file_names_else_what_the_device_is(tmp_path: Path) -> None:
    assert assumed_hardware(tiny_job(tmp_path, "run.hardware=h200"), "NVIDIA H100 80GB HBM3") is load("h200")
    assert assumed_hardware(tiny_job(tmp_path), "NVIDIA H100 80GB HBM3") is load("h100-sxm-80gb")
    assert assumed_hardware(tiny_job(tmp_path), "") is load("cpu")
    assert assumed_hardware(tiny_job(tmp_path), "an accelerator of next year") is None


def test_ranks_that_share_a_core_take_longer(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--dp-shard=2")
    once, twice = (predicted(job, load("cpu"), crowding) for crowding in (1.0, 2.0))
    assert twice["step_seconds"] == pytest.approx(2 * once["step_seconds"])
    assert twice["bytes"] == once["bytes"]
