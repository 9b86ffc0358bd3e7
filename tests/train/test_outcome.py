"""A run leaves what was predicted of it beside what it measured, and both name the same bytes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_file, tiny_job

from koushi.hardware.hardware import load
from koushi.train.outcome import MemoryUse, assumed_hardware, compared, predicted
from koushi.units import bytes_text


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
    began, row = (json.loads(line) for line in (folder / "ranks.jsonl").read_text(encoding="utf-8").splitlines())
    assert began == {"step": 0, "layout": "[pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1]"}
    assert said["hardware"] == "cpu" and said["step_seconds"] > 0 and said["memory_bytes"] > 0
    assert row["step"] == 3 and row["bytes"] == said["bytes"] and set(said["bytes"]) == {"dp_shard"}
    assert row["coordinates"] == ["dp_shard=0", "dp_shard=1"]
    assert all(0 < waited < 60 for waited in row["waited_seconds"]), "both ranks waited for each other"
    assert all(memory > 0 for memory in row["memory_bytes"])
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["predicted", "measured", "for", "cpu,", "memory", "of", "the", "fullest", "rank"] in lines
    step, tensors, grown, resident = lines[-5:-1]
    assert step[:2] == ["step", f"{said['step_seconds']:.1f}s"]
    assert tensors[:3] == ["tensors", *bytes_text(said["device_bytes"]).split()]
    assert grown[:3] == ["grown", *bytes_text(max(row["memory_bytes"])).split()]
    assert resident[0] == "resident" and float(resident[1]) > float(grown[1])
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


def test_a_gpu_is_told_in_the_three_figures_of_a_plan(tmp_path: Path) -> None:
    said = predicted(tiny_job(tmp_path), load("h100"))
    assert 0 < said["active_bytes"] <= said["memory_bytes"] < said["device_bytes"]
    ranks = [MemoryUse(active=3 << 30, reserved=4 << 30, device=5 << 30), MemoryUse(active=2 << 30, reserved=6 << 30)]
    lines = compared(said, 2.0, MemoryUse.most(ranks)).splitlines()
    assert [line.split()[0] for line in lines] == ["predicted", "step", "active", "reserved", "device"]
    for line, key, measured in zip(lines[2:], ("active_bytes", "memory_bytes", "device_bytes"), (3, 6, 5), strict=True):
        assert line.split()[1:5] == [*bytes_text(said[key]).split(), f"{measured}.00", "GiB"]


def test_a_cpu_is_told_what_the_process_took(tmp_path: Path) -> None:
    found = MemoryUse.of(torch.device("cpu"), before=1000)
    assert found.resident - found.grown == 1000 and not (found.active or found.reserved or found.device)
    said = predicted(tiny_job(tmp_path), load("cpu"))
    lines = compared(said, 2.0, found).splitlines()
    assert [line.split()[0] for line in lines] == ["predicted", "step", "tensors", "grown", "resident"]
    for line, size in zip(lines[2:], (said["device_bytes"], found.grown, found.resident), strict=True):
        assert re.findall(r"[\d.]+ \w?i?B", line) == [bytes_text(size)], "predicted or measured, not both"
