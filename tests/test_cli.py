"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from koushi import __version__
from koushi.checkpoint.manifest import PARAMETER, Head
from koushi.checkpoint.tensors import Described, write_checkpoint
from koushi.cli import commands, main
from koushi.config.schema import JobConfig
from koushi.errors import TrainingError
from koushi.generate.sample import Sampling

ROOT = Path(__file__).parents[1]
DEBUG = str(ROOT / "examples" / "debug.yaml")


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert isinstance(raised.value.code, int)
    return raised.value.code


Calls = list[tuple[object, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stands in for the commands that train; what they were called with is kept."""
    made: Calls = []
    for name in ("train", "verify"):
        module = ModuleType(f"koushi.{name}.command")
        module.__dict__[name] = lambda *arguments: made.append(arguments)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_check_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("check", DEBUG) == 0
    out, err = capsys.readouterr()
    assert out.startswith("debug: no problems found\n")
    assert "[pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2], 8 devices" in out
    assert err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [DEBUG, "--tp", "1", "--world", "4", "training.steps=9"],
        ["--world", "4", DEBUG, "--tp", "1", "training.steps=9"],
        ["training.steps=9", "--tp=1", DEBUG, "--world=4"],
        ["--training.steps", "9", "--tp=1", DEBUG, "--world", "4"],
        ["--dp-shard", "-1", "--tp", "1", "--world", "4", "--training.steps=9", DEBUG],
    ],
)
def test_options_and_overrides_go_in_any_order(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("check", *arguments) == 0
    out = capsys.readouterr().out
    assert "dp_shard=2, cp=1, tp=1], 4 devices" in out
    assert "9 steps" in out


def test_problems_go_to_stderr_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("check", DEBUG, "--tp", "eight", "optimizer.lr=-1", "training.stepz=3") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "--tp eight (parallelism.tensor_parallel_degree): is 'eight', a string; an integer of at least 1 is needed",
        "command line (optimizer.lr=-1): optimizer.lr: is -1, an integer; a finite number above 0 is needed",
        "command line (training.stepz=3): training.stepz: is not a key of training; did you mean training.steps?",
    ]


@pytest.mark.parametrize("world", ["0", "x"])
def test_a_wrong_world_is_a_usage_error(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("check", DEBUG, "--world", world) == 2
    assert "--world" in capsys.readouterr().err


def test_a_run_file_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("check", "--tp", "2") == 2
    assert "no run file was named" in capsys.readouterr().err


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("chekc", DEBUG) == 2
    err = capsys.readouterr().err
    assert "no such command: chekc; did you mean check? The commands are check, train, verify" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"koushi, version {__version__}\n"


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, "--help") == 0
    out = capsys.readouterr().out
    reads_run_files = any(parameter.name == "arguments" for parameter in commands.commands[name].params)
    assert f"Example:\n    koushi {name}{' examples/' if reads_run_files else ''}" in out
    assert ("--tp" in out) is reads_run_files


def test_the_list_of_commands_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    listed = " ".join(capsys.readouterr().out.partition("Commands:\n")[2].split())
    assert "..." not in listed
    for name, command in commands.commands.items():
        first = " ".join((command.help or "").split()).partition(". ")[0].rstrip(".")
        assert f"{name} {first}." in listed


@pytest.mark.parametrize("name", ["from-hf", "to-hf"])
def test_both_ways_of_convert_have_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("convert", name, "--help") == 0
    assert f"Example:\n    koushi convert {name} " in capsys.readouterr().out


def test_convert_and_generate_are_called_with_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Calls = []
    convert, generate = ModuleType("koushi.checkpoint.convert"), ModuleType("koushi.generate.command")
    for module, name in ((convert, "from_hf"), (convert, "to_hf"), (generate, "generate")):
        module.__dict__[name] = lambda *arguments, name=name: made.append((name, *arguments))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for looks in ("koushi.checkpoint.newest.candidates", "koushi.models.llama.hf.check_folder"):
        monkeypatch.setattr(looks, lambda path: None)  # the folders are not there
    assert ended("convert", "from-hf", "models/tiny", "checkpoint") == 0
    assert ended("convert", "to-hf", "runs/debug", "--dtype", "bfloat16", "out", "--shard-gb", "2") == 0
    assert ended("convert", "to-hf", "runs/debug", "out", "--dtype", "float8") == 2
    assert ended("generate", "runs/debug", "--prompt", "A list", "--temperature", "0", "--top-k", "3") == 0
    assert ended("generate", "runs/debug") == 2
    sampling = Sampling(max_tokens=100, temperature=0.0, top_k=3, seed=0)
    assert made == [
        ("from_hf", Path("models/tiny"), Path("checkpoint"), "float32"),
        ("to_hf", Path("runs/debug"), Path("out"), "bfloat16", 2.0),
        ("generate", Path("runs/debug"), "A list", sampling, None),
    ]


def test_train_and_verify_are_called_with_what_was_given(calls: Calls) -> None:
    assert ended("train", "--tp", "2", DEBUG, "training.steps=3") == 0
    assert ended("train", DEBUG, "--resume", "never", "--max-restarts", "3") == 0
    assert ended("verify", DEBUG, "--steps", "7", "--tp=2") == 0
    assert ended("verify", DEBUG, "--precision=float64") == 0
    assert calls == [
        (Path(DEBUG), ["--tp", "2", "training.steps=3"], 0),
        (Path(DEBUG), ["run.resume=never"], 3),
        (Path(DEBUG), ["--tp=2"], 7, "float32"),
        (Path(DEBUG), [], 3, "float64"),
    ]


def stop(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(path: Path, overrides: Sequence[str], max_restarts: int) -> None:
        raise error

    module = ModuleType("koushi.train.command")
    module.__dict__["train"] = run
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_error_of_ours_is_a_message_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(monkeypatch, TrainingError("the loss is not finite"))
    assert ended("train", DEBUG) == 1
    assert capsys.readouterr().err == "the loss is not finite\n"


def test_ctrl_c_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(monkeypatch, KeyboardInterrupt())
    assert ended("train", DEBUG) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_sigterm_before_training_ends_with_143_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(path: Path, overrides: Sequence[str], max_restarts: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    module = ModuleType("koushi.train.command")
    module.__dict__["train"] = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = signal.getsignal(signal.SIGTERM)
    assert ended("train", DEBUG) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    stop(monkeypatch, AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        main(["train", DEBUG])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("overrides", [[], ["training.steps=x", "--tp", "3"]])
def test_check_imports_no_torch(overrides: list[str]) -> None:
    code = f"""
import sys
from koushi.cli import main
try:
    main(["check", {DEBUG!r}, *{overrides!r}])
except SystemExit as ended:
    heavy = [name for name in ("torch", "numpy", "tokenizers", "rich") if name in sys.modules]
    assert not heavy, heavy
    print("ended", ended.code)
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1] == f"ended {2 if overrides else 0}", done.stderr


WRONG: list[list[str]] = [
    ["train", DEBUG, "--tp", "3"],
    ["train", DEBUG, "training.hf=none", "--dp-shard", "-1", "--gpus", "6"],
    ["verify", DEBUG, "--gpus", "0"],
    ["dry-run", DEBUG, "--tp", "3"],
    ["generate", "nothing/here", "--prompt", "x"],
    ["convert", "to-hf", "nothing/here", "there"],
    ["convert", "from-hf", "nothing/here", "there"],
    ["inspect", "nothing/here"],
    ["report", "nothing/here"],
]


def test_mistakes_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    """Torch takes seconds; nor does it come in for what can be said without it."""
    write_checkpoint(
        tmp_path / "step-00000001",
        Head(1, 1, 1, 0, "", JobConfig().model_dump(mode="json"), {"pp": 1}, "", ""),
        [Described(PARAMETER, "norm.weight", torch.float32, (2,))],
        [torch.zeros(2)],
    )
    right = [["inspect", str(tmp_path)], ["env"], ["config", DEBUG]]
    code = f"""
import sys
from koushi.cli import main
for arguments in {[*WRONG, *right]!r}:
    try:
        main(arguments)
    except SystemExit as ended:
        assert bool(ended.code) is (arguments in {WRONG!r}), arguments
    heavy = [name for name in ("torch", "tokenizers", "rich", "transformers") if name in sys.modules]
    assert not heavy, (arguments, heavy)
print("told")
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1:] == ["told"], done.stderr


def broken(*lines: list[str]) -> subprocess.CompletedProcess[str]:
    """Each command line with a standard output that nobody reads, and after "2" standard error too; the codes that they
    end with are on standard error."""
    code = f"""
import os, sys
from koushi.cli import main
reader, writer = os.pipe()
os.close(reader)
told = os.dup(2)
for line in {list(lines)!r}:
    os.dup2(writer, 1)
    os.dup2(writer if line[0] == "2" else told, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    try:
        main(line[line[0] == "2" :])
    except SystemExit as ended:
        os.write(told, f"{{ended.code}}\\n".encode())
"""
    return run_python(code)


def test_a_pipe_that_nobody_reads_ends_every_command_quietly() -> None:
    lines = [[name, "--help"] for name in commands.commands]
    lines += [["check", DEBUG], ["plan", DEBUG], ["plan", DEBUG, "--json"], ["mesh", DEBUG], ["hardware"], ["env"]]
    lines += [["2", "check", DEBUG, "--tp", "3"], ["2", "chekc"], ["2", "plan", DEBUG, "--jsn"]]
    done = broken(*lines)
    assert done.stderr.split() == ["141"] * len(lines)


def test_what_is_wrong_is_told_although_nobody_reads_the_rest() -> None:
    assert broken(["check", DEBUG, "--tp", "3"]).stderr.splitlines()[-1] == "2"


def test_a_broken_pipe_to_something_else_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    stop(monkeypatch, BrokenPipeError(errno.EPIPE, "a store that has gone"))
    with pytest.raises(RuntimeError, match="a pipe broke that is not the output"):
        main(["train", DEBUG])


def test_python_m_koushi_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "koushi", "check", DEBUG, "--world", "3"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the degrees multiply to 8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [["check", DEBUG], ["config", "--schema"], ["--help"], ["plan", DEBUG, "--json"]])
def test_a_full_standard_output_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "koushi", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert found.returncode == 1
    assert found.stderr == "cannot write to standard output: No space left on device\n"


def test_torchrun_is_told_why_a_rank_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert ended("check", DEBUG) == 0
    assert not file.exists()
    for rank in (0, 1):  # only one of a node prints it
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert ended("check", DEBUG, "--world", "3") == 2
        assert ("the world has 3, which pp 2 and tp 2 do not divide; " in capsys.readouterr().err) is (rank == 0)
        failure = ProcessFailure(rank, 1, 2, str(file))
        lines = str(ChildFailedError("koushi", {rank: failure})).splitlines()
        assert lines[-2].startswith("  traceback : ") and lines[-2].endswith("or a world of 8")
        file.unlink()
    file.write_text("a traceback")
    assert ended("check", DEBUG, "--world", "3") == 2
    assert file.read_text() == "a traceback"
    file.unlink()
    assert ended("check", DEBUG, "--world", "three") == 2
    assert "Invalid value for '--world'" in str(ChildFailedError("koushi", {0: ProcessFailure(0, 1, 2, str(file))}))


def test_a_full_disk_elsewhere_is_not_taken_for_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    stop(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        main(["train", DEBUG])
