"""``koushi plan --search``: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commanded import SMALL, planned, run

from koushi.check.check import check
from koushi.config.load import load
from koushi.plan.layouts import MODES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


def test_search_ranks_and_writes_what_check_accepts(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "best.yaml"
    assert run(small, "--search", "--gpus", "8", "training.steps=7", "--write", str(target)) == 0
    out = capsys.readouterr().out
    assert "legal layouts of 8 devices" in out
    assert f"wrote the fastest layout to {target}" in out
    text = target.read_text(encoding="utf-8")
    assert "# A small model, with a comment to keep." in text
    job = check(load(target))
    assert job.mesh.world_size == 8
    assert job.config.training.steps == 7
    assert run(small, "--search", "--gpus", "8", "--json") == 0
    best = json.loads(capsys.readouterr().out)["best"]
    found = planned(target)
    assert found.time.seconds == pytest.approx(best[0]["seconds"])
    assert found.memory.device == best[0]["memory"]
    assert [one["seconds"] for one in best] == sorted(one["seconds"] for one in best)


def test_what_a_search_leaves_empty_is_not_written_though_it_was_given(tmp_path: Path) -> None:
    bare, target = tmp_path / "bare.yaml", tmp_path / "best.yaml"
    bare.write_text("model: {n_layers: 4}\n", encoding="utf-8")
    given = ["--gpus", "2", "parallelism.pipeline_parallel_stages_per_rank=1", "--hardware", "h100-sxm-80gb"]
    given.append("parallelism.pipeline_parallel_layers_per_stage=[3, 1]")
    assert run(str(bare), *given, "--search", "--write", str(target)) == 0
    written, stages = load(target), "pipeline_parallel_stages_per_rank"
    assert check(written).mesh.degree("pp") == 1  # or nothing would be left empty
    assert written.config.run.hardware == "h100-sxm-80gb"
    assert not {stages, "pipeline_parallel_layers_per_stage"} & set(written.values["parallelism"])


def test_a_search_writes_over_nothing_but_its_own_file(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("training: {}\n", encoding="utf-8")
    assert run(small, "--search", "--write", str(other)) == 2
    assert "is there already" in capsys.readouterr().err
    assert run(small, "--search", "--write", small) == 0
    assert "# of 4" in Path(small).read_text(encoding="utf-8")
    assert run(small) == 0


def test_a_search_where_nothing_fits_ends_with_3(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["model.name=llama3-405b", "model.n_layers=126", "data.source=synthetic"]
    assert run(small, "--search", *huge) == 3
    out, err = capsys.readouterr()
    assert "none fits\nthe nearest\n" in out
    assert re.search(r"lacks [\d.]+ GiB", out)
    assert re.search(r"\d+ would do(, tightly)? \([\d.]+ of 79.1 GiB\): --search --gpus \d+\n", out)
    assert "not searched: training.compile, precision, layers per stage" in out
    assert err == ""


def test_a_search_needs_a_legal_run_but_not_a_legal_layout(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(small).write_text(SMALL.replace("  data_par", "  tensor_parallel_degree: 3\n  data_par"), encoding="utf-8")
    assert run(small, "--search", "--gpus", "8") == 0
    assert "legal layouts of 8 devices, " in capsys.readouterr().out
    assert run(small, "--search", "training.seq_len=0") == 2


def test_a_search_keeps_what_is_typed_of_the_layout(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "best.yaml"
    typed = ["--gpus", "8", "--tp", "2", "training.recompute=full"]
    assert run(small, "--search", "--write", str(target), *typed) == 0
    assert " legal layouts of 8 devices with --tp 2 training.recompute=full, " in capsys.readouterr().out
    written = check(load(target))
    assert (written.mesh.degree("tp"), written.config.training.recompute) == (2, "full")
    assert run(small, "--search", "--json", *typed) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fixed"] == {"parallelism.tensor_parallel_degree": 2, "training.recompute": "full"}
    layouts = [one["layout"] for one in (*found["best"], *found["front"])]
    assert {one["parallelism.tensor_parallel_degree"] for one in layouts} == {2}
    assert run(small, "--search", "--gpus", "8", "--tp", "3") == 2
    assert "no layout of 8 devices with --tp 3 is legal" in (said := capsys.readouterr().err)
    assert said.endswith(", or another global batch, or without --tp 3\n")
    assert run(small, "--search", "--gpus", "8", "--tp", "two") == 2
    assert "--tp two (parallelism.tensor_parallel_degree): is 'two', a string" in capsys.readouterr().err


def test_a_search_tells_batches_that_leave_out_fewer_layouts(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--search", "--gpus", "6") == 0
    out = capsys.readouterr().out
    batch = "training.global_batch_size 32"
    assert (
        f"left out: 3 of 5 pairs of tp and pp, whose data-parallel ranks do not divide {batch}; with 30 or 36 none"
        in out
    )
    own = "parallelism.data_parallel_shard_degree: 32 samples do not divide over 6 data-parallel ranks"
    assert f"\nthe run file's own layout is not legal: {own}" in out
    assert run(small, "--search", "--gpus", "6", "--json") == 0
    assert json.loads(capsys.readouterr().out)["global_batch_sizes_that_leave_out_fewer"] == [30, 36]
    assert run(small, "--search") == 0
    out = capsys.readouterr().out
    assert "left out" not in out
    assert "\nthe run file's own layout: " in out


def test_nothing_reshards_where_nothing_is_gathered(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--search", "--gpus", "4") == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ +\d+ +\d+ +\d+ ", line)]
    shown = {(int(row[3]) > 1, "-" in row[row.index(next(one for one in MODES if one in row)) + 1]) for row in rows}
    assert shown == {(True, False), (False, True)}
    assert out.count("whether gathered parameters are freed after forward, - where none are gathered\n") == 1


def test_a_layout_that_a_search_does_not_try_is_not_called_illegal(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--dp-shard=1", "--pp=3", "model.n_layers=2", "training.global_batch_size=8"]
    given += ["training.microbatch_size=1", "parallelism.pipeline_parallel_layers_per_stage=[1, 1, 0]"]
    assert run(small, *given) == 0
    assert run(small, *given, "--search") == 2
    said = capsys.readouterr().err
    fixed = " with --pp 3 --dp-shard 1 training.microbatch_size=1"
    assert f"no layout of 3 devices{fixed} with even stages is legal for this model and batch; another number" in said
    assert "; the run file's own is planned without --search" in said


@pytest.mark.parametrize(
    ("devices", "near"),
    [("7", "6 or 8"), ("301", "256 or 320"), ("100003", "another number")],
)
def test_devices_without_a_legal_layout_are_told_with_the_nearest_that_have_one(
    devices: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(ROOT / "examples" / "debug.yaml"), "--search", "--gpus", devices) == 2
    assert capsys.readouterr().err == (
        f"--gpus {devices} (parallelism.world_size): no layout of {devices} devices is legal for this model and batch; "
        f"{near} of them, or another global batch\n"
    )
