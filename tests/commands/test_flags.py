"""Options: one meaning has one name and one sentence in every command, and the examples of every help text work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from koushi.check.check import check
from koushi.cli import commands, main
from koushi.commands.group import RENAMED, RunFileCommand, split
from koushi.config.load import load
from koushi.config.overrides import SHORT

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "examples" / "debug.yaml")
SMALL = ["--gpus=1", "--pp=1", "--tp=1", "model.dim=32", "model.ffn_dim=32", "model.n_layers=2", "model.n_heads=4"]
SMALL += ["model.n_kv_heads=2", "training.seq_len=32", "training.global_batch_size=2"]
SLOW = ("train", "verify")
SECONDS = ("--search", "--html", "dry-run", "env --gpu", "generate", "convert", "inspect", "report", "--calibrate")


def all_commands(group: click.Group = commands, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{above}{name}", command
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{name} ")


def options() -> Iterator[tuple[str, click.Option]]:
    for name, command in all_commands():
        yield from ((name, one) for one in command.params if isinstance(one, click.Option))


def sentence(option: click.Option) -> str:
    """Its help without the default, which may be another in every command."""
    return (option.help or "").partition("  [")[0]


def examples(command: click.Command) -> list[str]:
    _, _, shown = (command.help or "").partition("Example:\n")
    return [line.strip() for line in shown.splitlines() if line.strip()]


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert isinstance(raised.value.code, int)
    return raised.value.code


def test_an_option_has_one_sentence_and_a_sentence_one_option() -> None:
    said, named = defaultdict(set), defaultdict(set)
    for command, option in options():
        assert sentence(option) or "[default" in (option.help or ""), f"{command} {option.opts} has no help"
        assert len(option.opts) == 1, f"{command} {option.opts}: one spelling is shown"
        said[option.opts[0]].add(sentence(option))
        named[sentence(option)].add(option.opts[0])
    assert len(said) > 20
    assert {name: texts for name, texts in said.items() if len(texts) > 1} == {}
    assert {text: names for text, names in named.items() if len(names) > 1} == {}


def test_what_every_run_file_takes_is_declared_once() -> None:
    """No command has an option of its own for it; init, which reads no run file, says the same of two."""
    own = [(command, option) for command, option in options() if option.opts[0] in SHORT]
    assert {(command, option.opts[0]) for command, option in own} == {("init", "--gpus"), ("init", "--hardware")}
    assert all(sentence(option) == SHORT[option.opts[0]].meaning for _, option in own)
    reading = {name for name, one in all_commands() if any(option.name == "arguments" for option in one.params)}
    assert reading == {name for name, one in all_commands() if isinstance(one, RunFileCommand)}
    assert reading == {"check", "train", "verify", "plan", "dry-run", "mesh", "config", "launch"}


@pytest.mark.parametrize("name", [name for name, one in all_commands() if isinstance(one, RunFileCommand)])
def test_its_help_tells_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{option} {short.takes} {short.meaning}" in out for option, short in SHORT.items())


def test_old_names_work_and_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {option.opts[0] for _, option in options() if not option.hidden}
    for old, new in RENAMED.items():
        assert old not in shown and new in shown
    for size in (["--node-size", "4"], ["--node-size=4"], ["--gpus-per-node", "4"]):
        assert ended("mesh", DEBUG, *size) == 0
        assert "on 2 nodes of 4 devices" in capsys.readouterr().out
    for name in ("mesh", "config"):
        assert ended(name, DEBUG, "--world", "16") == 2
        assert "the degrees multiply to 8" in capsys.readouterr().err


def test_gpus_means_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = "[pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2]"
    for name in ("check", "plan", "mesh"):
        assert ended(name, "--gpus", "16", DEBUG) == 0
        assert mesh in capsys.readouterr().out
    assert ended("config", DEBUG, "--gpus=16", "--explain") == 0
    assert re.search(r"data_parallel_shard_degree: 4 +# command line \(--gpus=16\)\n", capsys.readouterr().out)
    assert ended("launch", DEBUG, "--gpus", "16", "--nodes", "2", "--backend", "slurm") == 0
    assert "world=16" in capsys.readouterr().out
    assert ended("check", DEBUG, "--gpus", "16", "--world", "8") == 2
    assert "is 16, but the world has 8 processes" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "command"), list(all_commands()), ids=lambda one: one if isinstance(one, str) else "")
def test_examples_are_accepted(name: str, command: click.Command) -> None:
    shown = examples(command)
    assert shown and all(line.startswith(("koushi ", "torchrun ")) for line in shown)
    assert any(line.startswith(f"koushi {name}") for line in shown)
    for line in shown:
        words = shlex.split(line.partition(" > ")[0].partition("koushi ")[2])
        one: click.Command = commands
        while isinstance(one, click.Group):
            one = one.commands[words.pop(0)]
        context = one.make_context(name, words)
        if isinstance(one, RunFileCommand) and not context.params.get("schema"):
            path, overrides = split(context.params["arguments"])
            if (ROOT / path).is_file():
                check(load(ROOT / path, overrides))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    return tmp_path


def run_example(line: str) -> None:
    arguments = shlex.split(line.partition(" > ")[0])[1:]
    assert ended(*arguments) == 0, line


QUICK = [
    line
    for name, command in all_commands()
    for line in examples(command)
    if not line.startswith("torchrun")
    and not isinstance(command, click.Group)
    and name not in SLOW
    and not any(word in line for word in SECONDS)
]


@pytest.mark.parametrize("line", QUICK)
def test_quick_examples_run(line: str, here: Path) -> None:
    run_example(line)


@pytest.mark.long
def test_the_other_examples_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training itself with a smaller model and on one process; what follows on its run folder, as it stands."""
    assert ended("train", DEBUG, *SMALL, "checkpoint.every=50") == 0
    assert ended("verify", DEBUG, *SMALL, "--steps", "1") == 0
    assert ended("convert", "to-hf", "runs/debug", "models/tiny") == 0
    rest = [line for name, command in all_commands() for line in examples(command) if line not in QUICK]
    rest = [line for line in rest if line.startswith("koushi ") and line.split()[1] not in SLOW]
    rest = [line for line in dict.fromkeys(rest) if line not in examples(commands)]
    assert {line.split()[1] for line in rest} == {
        "convert", "generate", "inspect", "plan", "mesh", "dry-run", "hardware", "report", "env"
    }  # fmt: skip
    for line in rest:
        if "--calibrate" in line:  # forks ranks, which this process is no longer fit for
            python = [sys.executable, "-m", "koushi", *shlex.split(line)[1:]]
            assert subprocess.run(python, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode == 0
        else:
            run_example(line)
