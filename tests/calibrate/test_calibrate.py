"""The machine at hand is measured by ranks of its own and described by a file like those that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from koushi.calibrate import command
from koushi.calibrate.command import calibrate
from koushi.calibrate.measure import Sizes
from koushi.errors import TrainingError, WrongTarget
from koushi.hardware.hardware import load

SMALL = Sizes(
    matmuls=((64, 64, 64), (128, 128, 128)),
    copy_bytes=1 << 20,
    attention=((2, 64, 32),),
    messages=(1 << 10, 1 << 16),
    repeats=2,
)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_machine_is_measured_and_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(command, "ON_CPU", SMALL)
    path = tmp_path / "mine.yaml"
    made, said = calibrate(path, "cpu", processes, None)
    assert (made.name, load(str(path)).name) == ("mine", "mine")
    assert (made.device, load(str(path)).device) == ("cpu", "cpu")
    assert made.devices_per_node == made.inside.devices == 1024, "any number of ranks, as of the shipped CPU"
    like, chip = load("cpu"), made.chip
    assert set(chip.peak_tflops) == set(like.chip.peak_tflops)
    assert 1e6 < chip.peak("float32") < 1e14
    assert 0 < chip.sustained <= chip.burst < 1
    assert chip.memory_bandwidth > 1e7
    assert 0 < made.host.launch_us < 1e5
    best = (f"{chip.peak(dtype) / 1e12:.3g} TFLOP/s in {dtype}" for dtype in ("float32", "bfloat16"))
    assert said.splitlines()[:2] == [
        f"{path}: CPU, measured by koushi hardware --calibrate",
        f"  matmul  {', '.join(best)}: the best of 4 products",
    ]
    assert f"  memory  {chip.memory_gb_s:.3g} GB/s in a large copy; {chip.memory_gib:.3g} GiB a device" in said
    text = path.read_text(encoding="utf-8")
    assert f"bfloat16: {chip.peak_tflops['bfloat16']:g}  # measured: the best rate\n" in text
    assert f"float64: {like.chip.peak_tflops['float64']:g}  # not measured: that of cpu\n" in text
    assert f"gb_s: {made.network.gb_s:g}  # not measured: that of cpu" in text
    if processes == 1:
        assert made.inside.gb_s == like.inside.gb_s
        assert f"  link    not measured, since one rank has none; {like.inside.gb_s:g} GB/s is assumed" in said
    else:
        assert f"gb_s: {made.inside.gb_s:g}  # measured among 2 ranks" in text
        assert f"  link    {made.inside.gb_s:.3g} GB/s each way among 2 ranks, {made.inside.call_us:.3g} us for" in said
        assert made.inside.gb_s != like.inside.gb_s


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(TrainingError, match="cuda"):
        calibrate(tmp_path / "mine.yaml", "cuda", 1, None)
    assert not (tmp_path / "mine.yaml").exists()


def test_a_wrong_target_is_told_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_measured", lambda kind, count: pytest.fail("it measured"))
    run = tmp_path / "run.yaml"
    run.write_text("model: {name: llama3-debug}\n", encoding="utf-8")
    with pytest.raises(WrongTarget, match=r"run.yaml is there already and is not a hardware file"):
        calibrate(run, "cpu", 1, None)
    assert run.read_text(encoding="utf-8") == "model: {name: llama3-debug}\n"
    with pytest.raises(WrongTarget, match="there is no folder"):
        calibrate(tmp_path / "none" / "x.yaml", "cpu", 1, None)
