"""``koushi verify`` on two ranks, sound and with a fault seeded into the implementation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny import TINY, tiny_file

from koushi.cli import main
from koushi.errors import VerifyError
from koushi.optim.adamw import AdamW
from koushi.parallel import gradients
from koushi.verify.command import PlainConsole, verify
from koushi.verify.compare import KINDS

VERDICT = "the layout does not change the maths"


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_pipe_that_nobody_reads_is_left_to_the_command_line() -> None:
    with pytest.raises(BrokenPipeError):
        PlainConsole(file=Unread()).print("a line")


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(("--dp-shard", "2"), "float32"), (("--tp", "2"), "float64"), (("--pp", "2"), "float32")],
    ids=("dp_shard", "tp", "pp"),
)
def test_a_sound_layout_is_ok(
    layout: tuple[str, ...], precision: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verify(tiny_file(tmp_path), layout, steps=2, precision=precision)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("2 processes [pp=") and lines[0].endswith(f" against 1, 2 steps in {precision}")
    table = [line for line in lines if line.startswith("│")]
    assert len(table) == len(KINDS)
    for kind, line in zip(KINDS, table, strict=True):
        assert line.split("│")[1].strip() == kind
        assert line.split("│")[4].strip() == "ok"
    assert lines[-1] == VERDICT


def test_a_large_job_is_scaled_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "model: {name: llama3-1b}\ntraining: {seq_len: 4096}\nrun: {device: cpu}\n"
    verify(tiny_file(tmp_path, text), ["--dp-replicate", "2"], steps=1)
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("changed to run here: layers 16 -> 2, dim 2048 -> 16")
    assert lines[-1] == VERDICT


def test_what_the_run_reads_need_not_be_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_file(tmp_path, TINY.replace("{source: synthetic}", "{source: text, path: none, tokenizer: none.json}"))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(path), "--steps", "1"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    assert [line.split(": ")[:3:2] for line in err.splitlines()] == [
        ["note", key] for key in ("data.path", "data.tokenizer")
    ]
    assert "data text -> synthetic" in out and out.splitlines()[-1] == VERDICT


def doubled(patch: pytest.MonkeyPatch) -> None:
    """Gradients come out twice as large on every rank of a lattice."""
    original = gradients.finish

    def finish(parameters: Any, groups: Any, ends: Any) -> None:
        original(parameters, groups, ends)
        for parameter in parameters:
            parameter.gradient.mul_(len(groups) + 1)

    patch.setattr(gradients, "finish", finish)


def drifting(patch: pytest.MonkeyPatch) -> None:
    """One replica's norm weight drifts by less than any tolerance."""
    original = AdamW.step

    def step(self: AdamW, values: Any, *rest: Any) -> None:
        original(self, values, *rest)
        if dist.get_rank() == 1:
            values["norm.weight"] *= 1 + 2e-7

    patch.setattr(AdamW, "step", step)


def test_a_wrong_layout_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    doubled(monkeypatch)
    with pytest.raises(VerifyError, match="does not train as one process does: gradient norm, gradient"):
        verify(tiny_file(tmp_path), ["--dp-shard", "2"], steps=2)
    output = capfd.readouterr().out
    assert "DIFFERS" in output
    assert VERDICT not in output


def test_replicas_that_part_are_told_although_within_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drifting(monkeypatch)
    with pytest.raises(VerifyError, match="rank 1 holds other numbers than a rank before it"):
        verify(tiny_file(tmp_path), ["--dp-replicate", "2"], steps=1)
    output = capfd.readouterr().out
    assert "DIFFERS" not in output
    assert "parameter norm.weight 1: rank 1 holds other numbers" in output
    assert VERDICT not in output


def idle(patch: pytest.MonkeyPatch) -> None:
    """One rank of a lattice never updates its parameters."""
    original = AdamW.step

    def step(self: AdamW, values: Any, *rest: Any) -> None:
        before = {name: value.clone() for name, value in values.items()}
        original(self, values, *rest)
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            for name, value in values.items():
                value.copy_(before[name])

    patch.setattr(AdamW, "step", step)


SLOW = ["optimizer.lr=8e-5", "lr_schedule.warmup_steps=2000", "training.steps=5000"]


def test_an_update_that_is_never_made_is_seen_in_warm_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    idle(monkeypatch)
    with pytest.raises(VerifyError, match=r"does not train as one process does: .*parameter"):
        verify(tiny_file(tmp_path), ["--pp", "2", *SLOW], steps=1)
    assert "learning rate 4e-08 at the least -> 0.001 throughout" in capfd.readouterr().out


def test_steps_that_move_nothing_prove_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(VerifyError, match=r"nothing shows that parameters are updated alike: \S+ moves by 0e\+00"):
        verify(tiny_file(tmp_path), ["optimizer.eps=1e12", "optimizer.weight_decay=0"], steps=1)
    output = capfd.readouterr().out
    assert "DIFFERS" not in output and VERDICT not in output


def test_the_command_ends_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(tiny_file(tmp_path)), "--steps", "1", "--dp-shard", "2"]
    with pytest.raises(SystemExit) as sound:
        main(arguments)
    assert sound.value.code == 0
    assert capfd.readouterr().out.splitlines()[-1] == VERDICT
    doubled(monkeypatch)
    with pytest.raises(SystemExit) as wrong:
        main(arguments)
    assert wrong.value.code == 1
    output = capfd.readouterr()
    assert output.err.startswith("this layout does not train as one process does: ")
    assert VERDICT not in output.out
