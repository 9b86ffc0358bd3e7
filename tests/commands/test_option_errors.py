"""A mistake in any option of any command is named as it was typed, with what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from koushi.cli import commands, main
from koushi.commands.group import MAY_BE_EMPTY, Choice, RunFileCommand, Whole
from koushi.config.overrides import SHORT
from koushi.config.validate import legal_keys
from koushi.models.llama.sizes import PRESETS

DEBUG = str(Path(__file__).parents[2] / "examples" / "debug.yaml")
NEEDED = {"launch": ["--nodes", "1", "--backend", "slurm"], "generate": ["--prompt", "x"]}
"""What a command cannot do without."""


def all_commands(
    group: click.Group = commands, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, (*above, name))
        else:
            yield (*above, name), command


ALL = list(all_commands())
READING = [name for name, command in ALL if isinstance(command, RunFileCommand)]
OWN = [
    (name, option)
    for name, command in ALL
    for option in command.params
    if isinstance(option, click.Option) and not option.hidden
]
every_own = pytest.mark.parametrize(
    ("name", "option"), OWN, ids=lambda one: one.name if isinstance(one, click.Option) else " ".join(one)
)
reading = pytest.mark.parametrize("name", READING, ids=" ".join)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2, arguments
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_there_is_something_to_walk_over() -> None:
    assert len(ALL) > 14 and len(READING) == 8 and len(OWN) > 25


@every_own
def test_a_misspelt_option_of_a_command(
    name: tuple[str, ...], option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    (spelling,) = option.opts
    for typed in (f"{spelling}{spelling[-1]}", f"{spelling[:-1]}"):
        if typed in option.opts or len(typed) < 5:
            continue
        for arguments in ([typed, "3", DEBUG], [DEBUG, f"{typed}=3"], [DEBUG, typed]):
            said = error_of(capsys, *name, *NEEDED.get(name[-1], ()), *arguments)
            assert f"No such option '{typed}'" in said and f"'{spelling}'" in said, said


@every_own
def test_a_wrong_value_of_an_option_of_a_command(
    name: tuple[str, ...], option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    (spelling,) = option.opts
    if option.is_flag or isinstance(option.type, click.Path) or option.type is click.STRING:
        return
    limit = option.type.min - 1 if isinstance(option.type, Whole) else None  # type: ignore[operator]
    for value in ("three", *([] if limit is None else [str(limit)])):
        said = error_of(capsys, *name, f"{spelling}={value}", DEBUG)
        assert f"'{spelling}'" in said and value in said, said
        if isinstance(option.type, Whole):
            assert f"{value} is not an integer of at least {option.type.min}" in said
        if isinstance(option.type, Choice):
            assert all(one in said for one in option.type.choices)


@every_own
def test_an_option_with_nothing_in_it_is_not_taken_for_one_that_was_not_given(
    name: tuple[str, ...], option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    (spelling,) = option.opts
    if option.is_flag or spelling in MAY_BE_EMPTY:
        return
    for words in ([spelling, ""], [f"{spelling}="]):
        assert f"Invalid value for '{spelling}': is empty; " in error_of(capsys, *name, *words, DEBUG)


@reading
def test_no_value_of_a_run_file_may_be_given_as_nothing(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    needed = NEEDED.get(name[-1], ())
    for option, short in SHORT.items():
        for words in ([option, ""], [f"{option}="]):
            said = error_of(capsys, *name, *needed, DEBUG, *words)
            assert said.startswith(f"{option}") and f"({short.key}): is given no value; write {option} " in said, said
    for words in (["--run.folder", ""], ["--run.folder="], ["run.folder="]):
        assert "run.folder: is given no value; write a value, null " in error_of(capsys, *name, *needed, DEBUG, *words)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", ""], "no run file was named"),
        (["inspect", ""], "an argument is empty"),
        (["convert", "from-hf", "", "x"], "an argument is empty"),
        (["init", "--model", "llama3-8b", ""], "an argument is empty"),
    ],
)
def test_an_argument_with_nothing_in_it(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, *arguments)


@reading
@pytest.mark.parametrize("option", SHORT)
def test_a_wrong_value_of_what_every_run_file_takes(
    name: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for typed in (f"{option} 0", f"{option}=none of these", f"{option} 3000000"):
        words = typed.split(" ", 1) if "=" not in typed else [typed]
        said = error_of(capsys, *name, *NEEDED.get(name[-1], ()), DEBUG, *words)
        assert f"{typed} ({SHORT[option].key}): " in said, said


@reading
@pytest.mark.parametrize("option", SHORT)
def test_a_slip_in_what_every_run_file_takes(
    name: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meant = f"did you mean {option} ({SHORT[option].key})?"
    for typed in (f"{option}{option[-1]}", option.replace("-", "_").replace("__", "--") + "s"):
        for words in ([typed, "2"], [f"{typed}=2"], [typed]):
            if typed in SHORT:
                continue
            said = error_of(capsys, *name, *NEEDED.get(name[-1], ()), DEBUG, *words)
            assert said == f"command line ({' '.join(words)}): {typed}: is not an option; {meant}\n"


@pytest.mark.parametrize(
    "key", [one for one in legal_keys() if not any(other.startswith(f"{one}.") for other in legal_keys())]
)
def test_a_wrong_value_and_a_slip_in_any_key(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for typed in (f"{key}={{a: 1}}", f"--{key} {{a: 1}}"):
        words = typed.split(" ", 1) if typed.startswith("--") else [typed]
        assert f"command line ({typed}): {key}: " in error_of(capsys, "check", DEBUG, *words)
    said = error_of(capsys, "check", DEBUG, f"--{key}z", "1")
    assert said.startswith(f"command line (--{key}z 1): {key}z: is not a key of ") and f"did you mean {key}?" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-tp", "2", DEBUG], "command line (-tp 2): is not an option; did you mean --tp?"),
        ([DEBUG, "-pp=2"], "command line (-pp=2): is not an option; did you mean --pp?"),
        ([DEBUG, "other.yaml"], "command line (other.yaml): is a second run file; name one"),
        ([DEBUG, "--tensor-model-parallel-size", "2"], "did you mean --tp (parallelism.tensor_parallel_degree)?"),
        (
            [DEBUG, "--steps", "2"],
            "command line (--steps 2): --steps: is not an option; did you mean --training.steps?",
        ),
        (
            [DEBUG, "--cp", "2"],
            "--cp: is not an option; context parallel does not exist yet: the mesh's cp has degree 1",
        ),
        (
            [DEBUG, "parallelism.expert_parallel_degree=2"],
            "is not a key of parallelism; expert parallel does not exist yet, nor do models with experts",
        ),
        (
            [DEBUG, "--activation_checkpoint.mode", "full"],
            "activation_checkpoint: is not a section of a run file; did you mean training.recompute?",
        ),
        ([DEBUG, "--zzz"], "--zzz: is not an option; the options are --gpus, --hardware, --pp, "),
        ([DEBUG, "tpp=2"], "tpp: is not a key of a run file; did you mean --tp (parallelism.tensor_parallel_degree)?"),
        ([DEBUG, "--gpus", "7"], "or a world of 4 or 8, for which dp_shard follows"),
        (
            [DEBUG, "--gpus", "7", "--dp-shard", "4"],
            "the world has 7, which pp 2 and tp 2 do not divide; a pp and a tp that divide 7, or a world of 16",
        ),
    ],
)
def test_what_people_type(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, "check", *arguments)


def test_launch_names_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    backends = "--backend slurm|kubernetes|torchrun"
    assert f"add --nodes N and {backends}\n" in error_of(capsys, "launch", DEBUG)
    assert f"add {backends}\n" in error_of(capsys, "launch", "--tp", "2", "--nodes", "1", DEBUG)
    assert "add --nodes N\n" in error_of(capsys, "launch", "--backend=slurm", DEBUG, "--tp", "2")
    said = error_of(capsys, "launch", "--nodes", "3", "--dp-shard", "2", DEBUG, "--backend", "slurm")
    assert "the world has 24 (3 nodes of 8); data_parallel_shard_degree 6" in said


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, wanted in ((["help"], "plan"), (["help", "plan"], "--search"), (["help", "convert"], "to-hf")):
        with pytest.raises(SystemExit) as raised:
            main(words)
        assert raised.value.code == 0 and wanted in capsys.readouterr().out


def test_processes_are_for_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --calibrate FILE" in error_of(capsys, "hardware", "--processes", "2")


def test_a_preset_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "init", str(tmp_path / "x.yaml"), "--model", "llama3-8")
    assert "did you mean llama3-8b?" in said and all(name in said for name in PRESETS)
