"""The commands that come before a run: what they print where, how they end, and that they need no torch."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.cli import main
from koushi.commands.group import importing
from koushi.config.load import load, load_config

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "examples" / "debug.yaml")
LARGE = str(ROOT / "examples" / "llama_128.yaml")


def test_imports_are_not_looked_through() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert isinstance(raised.value.code, int)
    return raised.value.code


Printed = pytest.CaptureFixture[str]


def test_mesh_draws_all_or_explains_one(capsys: Printed) -> None:
    assert ended("mesh", LARGE) == 0
    out, err = capsys.readouterr()
    assert out.startswith("llama_128: 128 ranks ") and "node 15 │" in out and err == ""
    assert ended("mesh", LARGE, "--node-size", "16", "training.steps=3") == 0
    assert "on 8 nodes of 16 devices" in capsys.readouterr().out
    assert ended("mesh", "--rank", "37", LARGE, "--parameter", "output", "--parameter=norm", "--step=2") == 0
    out = capsys.readouterr().out
    assert "rank 37 of 128" in out and "in step 2 samples 24-25 of the run" in out
    assert "output.weight is on stage 1" in out and "norm.weight is on stage 1" in out


def test_mesh_with_the_world_of_a_launcher(capsys: Printed) -> None:
    assert ended("mesh", DEBUG, "--dp-shard", "-1", "--world", "12", "training.global_batch_size=24") == 0
    assert "12 ranks [pp=2, dp_replicate=1, dp_shard=3, cp=1, tp=2]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mesh", DEBUG, "--rank", "8"], "command line (--rank 8): there is no such rank in a world of 8; 0 to 7"),
        (["mesh", DEBUG, "--rank", "-1"], "command line (--rank -1): there is no such rank in a world of 8; 0 to 7"),
        (["mesh", DEBUG, "--rank", "x"], "Invalid value for '--rank'"),
        (["mesh", DEBUG, "--rank", "0", "--parameter", "tok_embedings.weight"], "did you mean tok_embeddings.weight?"),
        (["mesh", DEBUG, "--parameter", "output"], "--parameter and --step explain one rank: add --rank R"),
        (["mesh", DEBUG, "--step", "2"], "--parameter and --step explain one rank: add --rank R"),
        (["mesh", DEBUG, "--gpus-per-node", "0"], "Invalid value for '--gpus-per-node'"),
        (["mesh", DEBUG, "--tp", "3"], "8 heads do not divide over tp 3"),
        (["mesh", "nowhere.yaml"], "nowhere.yaml:1:1: no such file"),
        (["mesh"], "no run file was named"),
        (["config", str(ROOT)], "is a folder; name a run file"),
        (["config", "--schema", "steps"], "did you mean training.steps?"),
        (["init"], "Missing argument 'RUN.yaml'"),
        (["init", DEBUG], f"{DEBUG}: is there already; name a new file, or remove it"),
        (["init", "nowhere/x.yaml"], "nowhere; make it, or name another file"),
        (["init", "x.yaml", "--model", "llama3-9b"], "did you mean llama3-8b?"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is neither a checkpoint nor a run folder"),
        (["inspect", "nowhere"], "nowhere is neither a checkpoint nor a run folder"),
        (["report", "nowhere"], "nowhere has no metrics.jsonl"),
        (["convert", "to-hf", "nowhere", "model"], "nowhere is neither a checkpoint nor a run folder"),
        (["convert", "from-hf", "nowhere", "checkpoint"], "nowhere: there is no such folder"),
        (["train", DEBUG, "--resume", "."], ". is neither a checkpoint nor a run folder"),
        (["launch", DEBUG, "--nodes", "2"], "add --backend slurm|kubernetes|torchrun"),
        (
            ["launch", DEBUG, "--nodes", "2", "--backend", "lsf"],
            "there is no lsf; the choices are slurm, kubernetes, torchrun",
        ),
        (["launch", DEBUG, "--nodes", "2", "--dp-shard", "2", "--backend", "slurm"], "the degrees multiply to 8"),
    ],
    ids=lambda value: " ".join(value[:3]).replace(str(ROOT), "") if isinstance(value, list) else "",
)
def test_wrong_input_ends_with_2_and_says_what_is_legal(
    arguments: list[str], said: str, capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", ["metrics.jsonl", "config.yaml"])
def test_a_run_that_saved_nothing_is_told_from_what_is_no_run(
    left: str, capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).touch()
    for arguments in (["generate", "run", "--prompt", "x"], ["inspect", "run"], ["convert", "to-hf", "run", "model"]):
        assert ended(*arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("run is a run that has saved no checkpoint; with checkpoint.every=N one is saved ")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_config_prints_a_run_file(capsys: Printed, tmp_path: Path) -> None:
    assert ended("config", DEBUG, "--tp", "1", "--world", "4") == 0
    out = capsys.readouterr().out
    path = tmp_path / "debug.yaml"
    path.write_text(out, encoding="utf-8")
    assert load_config(path) == check(load(DEBUG, ["--tp", "1"])).config
    assert "#" not in out
    assert ended("config", "--explain", DEBUG, "--tp", "1") == 0
    explained = capsys.readouterr().out
    assert [line.partition("  # ")[0].rstrip() for line in explained.splitlines()] == out.splitlines()
    assert f"  # {DEBUG}:23:12\n" in explained and "  # command line (--tp 1)\n" in explained


def test_config_prints_the_schema(capsys: Printed) -> None:
    assert ended("config", "--schema") == 0
    whole = capsys.readouterr().out
    assert whole.startswith("model: ") and "  run.timeout: 600.0\n" in whole
    assert ended("config", "optimizer.lr", "--schema") == 0
    assert capsys.readouterr().out.startswith("  optimizer.lr: 0.001\n")


def test_init_writes_what_check_accepts(capsys: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended("init", "run.yaml", "--model", "llama3-70b", "--gpus", "48") == 0
    out = capsys.readouterr().out
    assert "wrote run.yaml: llama3-70b, 70.55B parameters, on 48 devices" in out
    assert out.endswith("koushi launch run.yaml --nodes 6 --backend slurm\n")
    assert ended("check", "run.yaml") == 0
    assert "48 devices" in capsys.readouterr().out


def test_launch_prints_a_script_and_notes_apart(capsys: Printed) -> None:
    assert ended("launch", LARGE, "--nodes", "16", "--backend", "slurm", "checkpoint.every=10") == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n") and f"arguments=({LARGE} checkpoint.every=10)" in out and err == ""
    assert ended("launch", LARGE, "--nodes", "32", "--backend", "torchrun", "--gpus-per-node", "4") == 0
    err = capsys.readouterr().err
    assert [line.split(" ")[:2] for line in err.splitlines()] == [["note:", "checkpoint.every"], ["note:", "tp"]]


def test_env(capsys: Printed) -> None:
    assert ended("env") == 0
    assert capsys.readouterr().out.startswith("koushi ")
    assert ended("env", "--gpu") == 0
    assert "torch says" in capsys.readouterr().out


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    code = f"""
import sys
from koushi.cli import main
try:
    main({list(arguments)!r})
finally:
    heavy = [name for name in ("torch", "numpy", "tokenizers", "rich", "safetensors") if name in sys.modules]
    if heavy:
        print("imported", heavy, file=sys.stderr)
"""
    environment = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["mesh", LARGE],
        ["mesh", LARGE, "--rank", "5"],
        ["config", LARGE, "--explain"],
        ["config", "--schema"],
        ["launch", LARGE, "--nodes", "16", "--backend", "kubernetes", "checkpoint.every=5"],
        ["env"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[2:3]),
)
def test_no_torch_and_no_line_characters_where_the_terminal_has_none(arguments: list[str]) -> None:
    done = run(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.isascii() and len(done.stdout) > 200
    assert b"\x1b" not in done.stdout


def test_names_that_the_terminal_has_no_characters_for(tmp_path: Path) -> None:
    path = tmp_path / "格子.yaml"
    path.write_text("data: {text_key: 本文}\n", encoding="utf-8")
    done = run("config", str(path), "--explain", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    resolved = tmp_path / "resolved.yaml"
    resolved.write_bytes(done.stdout)
    assert load_config(resolved).data.text_key == "本文"


def test_a_page_is_never_written_over_a_run_file_or_data(capsys: Printed, tmp_path: Path) -> None:
    run, data = tmp_path / "run.yaml", tmp_path / "metrics.jsonl"
    run.write_text(Path(DEBUG).read_text(encoding="utf-8"), encoding="utf-8")
    data.write_text("{}\n", encoding="utf-8")
    for target, words in ((run, "is what this command reads"), (data, "is not a page")):
        assert ended("mesh", str(run), "--html", str(target)) == 2
        assert words in capsys.readouterr().err
    assert run.read_bytes() == Path(DEBUG).read_bytes()
    assert data.read_text(encoding="utf-8") == "{}\n"


@pytest.mark.parametrize("gpus", ["1048577", "99999999999999"])
def test_init_of_too_many_devices_leaves_no_file(gpus: str, capsys: Printed, tmp_path: Path) -> None:
    assert ended("init", str(tmp_path / "x.yaml"), "--model", "llama3-8b", "--gpus", gpus) == 2
    assert "at most 1048576" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "--json"],
        ["plan", "--search", "--json"],
        ["mesh"],
        ["mesh", "--rank", "0"],
        ["mesh", "--html", "page.html"],
        ["launch", "--nodes", "1", "--gpus-per-node", "2", "--backend", "slurm"],
        ["config", "--explain"],
    ],
    ids=" ".join,
)
def test_a_run_can_be_planned_where_its_data_is_not(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("data: {source: text, path: /data/*.txt, tokenizer: /models/none.json}\n")
    assert ended(*arguments, "run.yaml", "--gpus", "2") == 0
    out, err = capsys.readouterr()
    notes = [line for line in err.splitlines() if line.startswith("note: run.yaml:1:")]
    assert ["data.path" in line for line in notes] == [True, False] and "data.tokenizer" in notes[1]
    if "--json" in arguments:
        json.loads(out)
    if "--html" in arguments:
        assert "/data/*.txt" not in Path("page.html").read_text(encoding="utf-8")  # every layout of the page is judged
    if "config" in arguments:
        assert "path: /data/*.txt" in out


def test_what_reads_the_data_is_refused_where_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("data: {source: text, path: /data/*.txt, tokenizer: /models/none.json}\n")
    for strict in ("check", "train"):
        assert ended(strict, "run.yaml") == 2
        err = capsys.readouterr().err.splitlines()
        assert "no file matches /data/*.txt; give a file" in err[0] and "there is no such file" in err[1]
        others = [line.endswith("; koushi plan and koushi verify go on without it") for line in err]
        assert others == [strict == "check"] * 2


def test_init_of_what_fits_nowhere_writes_it_and_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended("init", "run.yaml", "--model", "llama3-70b", "--gpus", "8", "--hardware", "h200") == 3
    out, err = capsys.readouterr()
    assert err == "" and "on h200 it does not fit: " in out and "no layout of 8 devices fits; 16 would do" in out
    assert ended("plan", "run.yaml") == 3
