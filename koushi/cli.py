"""The command line: a table of commands that only call. Each imports what it runs when it runs.

Every command takes a run file and overrides of its values, in any order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Literal, NoReturn, TextIO

import click

from koushi import __version__
from koushi.commands import plans, see, start
from koushi.commands.group import Choice, Commands, RunFileCommand, Whole, importing, piped, split, world_option
from koushi.errors import KoushiError, RankFailure, ReaderGone, Stopped
from koushi.output import reader_gone
from koushi.signals import heard, no_longer_raised


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="koushi")
def commands() -> None:
    """Train large language models on an N-dimensional lattice of devices.

    \b
    Example:
      koushi init run.yaml
      koushi mesh run.yaml
      koushi train run.yaml
    """


@commands.command(cls=RunFileCommand)
@world_option(hidden=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def check(world: int | None, arguments: tuple[str, ...]) -> None:
    """Report every problem of a run file at once, or what it describes.

    Starts nothing. Exit code 2 means problems, each on a line of its own.

    \b
    Example:
      koushi check examples/debug.yaml --tp 4 training.steps=10
      koushi check examples/llama_128.yaml --gpus 64
    """
    from koushi.check.check import check_here
    from koushi.check.summary import summary
    from koushi.config.load import load

    run_path, overrides = split(arguments)
    run_file = load(run_path, overrides)
    click.echo(summary(check_here(run_file, world), run_file.follows))


@commands.command(cls=RunFileCommand)
@click.option(
    "--resume", metavar="auto|never|PATH", help="Go on from the run's newest checkpoint, begin anew, or from PATH."
)
@click.option(
    "--max-restarts",
    type=Whole(0),
    default=0,
    show_default=True,
    metavar="N",
    help="How often all ranks are started again, from the newest checkpoint, when one fails.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def train(resume: str | None, max_restarts: int, arguments: tuple[str, ...]) -> None:
    """Train as a run file says, one process per device.

    A run with checkpoints (checkpoint.every) goes on where it ended, on any layout; one that would compute something
    else is refused.

    \b
    Example:
      koushi train examples/debug.yaml --tp 1 training.steps=10
      koushi train examples/debug.yaml checkpoint.every=10 --max-restarts 3
      torchrun --nproc-per-node 8 -m koushi train examples/debug.yaml
    """
    from koushi.check.early import check_early

    run_path, overrides = split(arguments)
    overrides = overrides if resume is None else [*overrides, f"run.resume={resume}"]
    check_early(run_path, overrides, launched=True)
    with importing():
        from koushi.train.command import train as run

    run(run_path, overrides, max_restarts)


@commands.command(cls=RunFileCommand)
@click.option(
    "--precision",
    type=Choice(["float32", "float64"]),
    default="float32",
    show_default=True,
    help="Of everything; float64 finds silent errors, float32 the paths that float64 hides.",
)
@click.option("--steps", type=Whole(1), default=3, show_default=True, help="Training steps to compare.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def verify(steps: int, precision: Literal["float32", "float64"], arguments: tuple[str, ...]) -> None:
    """Show that the run's layout trains as one process does.

    \b
    Example:
      koushi verify examples/debug.yaml --steps 2 --tp 4 --dp-shard 1
    """
    from koushi.check.early import check_early

    run_path, overrides = split(arguments)
    check_early(run_path, overrides, launched=False, afar=True)
    with importing():
        from koushi.verify.command import verify as run

    run(run_path, overrides, steps, precision)


@commands.group(cls=Commands)
def convert() -> None:
    """Turn a Hugging Face folder into a checkpoint, or a checkpoint into such a folder.

    \b
    Example:
      koushi convert from-hf models/tiny checkpoints/tiny
      koushi convert to-hf runs/debug models/debug --dtype bfloat16
    """


dtype_option = click.option(
    "--dtype",
    type=Choice(["float32", "bfloat16", "float16", "float64"]),
    default="float32",
    show_default=True,
    help="Of the weights that are written.",
)


@convert.command("from-hf")
@dtype_option
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CKPT")
def from_hf(folder: Path, checkpoint: Path, dtype: str) -> None:
    """Write the weights of the Hugging Face folder DIR as a checkpoint of step 0.

    To train from DIR this is not needed: a run file may say model: {hf: DIR}.

    \b
    Example:
      koushi convert from-hf models/tiny checkpoints/tiny
    """
    from koushi.models.llama.hf import check_folder

    check_folder(folder)
    with importing():
        from koushi.checkpoint.convert import from_hf as run

    run(folder, checkpoint, dtype)


@convert.command("to-hf")
@dtype_option
@click.option(
    "--shard-gb",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Most that one file holds, in 10^9 bytes; a larger tensor has a file of its own.",
)
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CKPT")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def to_hf(checkpoint: Path, folder: Path, dtype: str, shard_gb: float) -> None:
    """Write CKPT, or the newest checkpoint of a run folder, as the Hugging Face folder DIR.

    \b
    Example:
      koushi convert to-hf runs/debug models/debug --dtype bfloat16
    """
    from koushi.checkpoint.newest import candidates

    candidates(checkpoint)
    with importing():
        from koushi.checkpoint.convert import to_hf as run

    run(checkpoint, folder, dtype, shard_gb)


@commands.command()
@click.option("--prompt", required=True, help="What the text begins with.")
@click.option("--max-tokens", type=Whole(1), default=100, show_default=True, help="Where it ends at the latest.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Lower is closer to the likeliest text; 0 always takes the likeliest token.",
)
@click.option("--top-k", type=Whole(1), help="Draw only from the K likeliest tokens.  [default: from all]")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Another one, another text.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json.  [default: the one it was trained with]"
)
@click.argument("path", type=click.Path(path_type=Path), metavar="CKPT_OR_DIR")
def generate(
    path: Path, prompt: str, max_tokens: int, temperature: float, top_k: int | None, seed: int, tokenizer: Path | None
) -> None:
    """Continue a text with the model of a checkpoint, a run folder or a Hugging Face folder.

    One process, in float32. The text goes to stdout as it comes.

    \b
    Example:
      koushi generate runs/debug --prompt "A list is" --max-tokens 60 --top-k 40
    """
    from koushi.checkpoint.newest import candidates
    from koushi.models.hf_folder import is_hf_folder

    if not is_hf_folder(path):
        candidates(path)
    with importing():
        from koushi.generate.command import generate as run
        from koushi.generate.sample import Sampling

    run(path, prompt, Sampling(max_tokens, temperature, top_k, seed), tokenizer)


@commands.command()
@click.option("--tensors", is_flag=True, help="Also name every parameter with its shape and dtype.")
@click.argument("path", type=click.Path(path_type=Path), metavar="CKPT")
def inspect(path: Path, tensors: bool) -> None:
    """Say what a checkpoint, or each of a run folder, holds, and whether it is whole.

    Reads every byte. Exit code 1 means that one is damaged.

    \b
    Example:
      koushi inspect runs/debug
      koushi inspect runs/debug/checkpoints/step-00000050 --tensors
    """
    from koushi.checkpoint.inspect import inspect as run

    run(path, tensors)


for _command in (
    plans.plan,
    plans.dry_run,
    plans.hardware,
    see.mesh,
    see.config,
    start.init,
    start.launch,
    see.report,
    see.env,
):
    commands.add_command(_command)


_said: list[str] = []
"""What the process has said of its end."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, by default the process's own, and end the process with its exit code."""
    _said.clear()
    with _listening(to_the_end=arguments is None):
        try:
            code = _flushed(arguments)
            no_longer_raised()
        except KeyboardInterrupt:
            code = _told(Stopped(signal.SIGINT, "SIGINT"))
        except Stopped as stopped:
            code = _told(stopped)
    sys.exit(code)


def _listening(to_the_end: bool) -> AbstractContextManager[None]:
    """Inside, the first SIGINT or SIGTERM is an exception. Outside, where Python would show its traceback as it ends,
    SIGINT ends the process if nothing else follows."""
    if "RANK" in os.environ:  # a rank of torchrun's may wait in native code, where no handler runs
        return nullcontext()
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        numbers.append(signal.SIGINT)
        if to_the_end:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    return heard(numbers, _stop, _end)


def _flushed(arguments: Sequence[str] | None) -> int:
    """The exit code, once all that the command printed is written."""
    try:
        with piped():
            code = _run(arguments)
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
            return code
    except ReaderGone as gone:
        # Python would complain once more when it flushes at exit.
        _leave(sys.stdout)
        _leave(sys.stderr)
        return gone.exit_code
    except OSError as error:
        if not _of_stdout(error):
            raise
        _leave(sys.stdout)
        click.echo(f"cannot write to standard output: {error.strerror}", err=True)
        return 1


def _leave(stream: TextIO | None) -> None:
    """What is still written to ``stream`` goes nowhere."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _of_stdout(error: OSError) -> bool:
    """Whether it is what was printed that could not be written, such as on a full disk."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1] in (click.echo.__code__, main.__code__):
        return True
    try:
        sys.stdout.flush()  # what could not be written is still waiting
    except OSError:
        return True
    return False


def _stop(number: signal.Signals) -> None:
    """A process that is asked to end says so."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(number, number.name)


def _end(number: signal.Signals) -> None:
    """A process that is asked once more ends where it is."""
    if not _said:
        with suppress(OSError):
            os.write(2, f"stopped by {number.name}\n".encode())
    os._exit(128 + number)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = commands.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        return int(code or 0)
    except ReaderGone:
        raise
    except KoushiError as error:
        return _told(error)
    except (click.Abort, KeyboardInterrupt):
        return _told(Stopped(signal.SIGINT, "SIGINT"))
    except click.ClickException as error:
        _tell_torchrun(error.format_message())
        error.show()
        return error.exit_code


def _told(error: KoushiError) -> int:
    """The exit code of ``error``, which is said."""
    text = str(error)
    _said.append(text)
    _tell_torchrun(text)
    # Wrong input is wrong for every rank of a node: one of those that torchrun started says so.
    if text and (error.exit_code != 2 or os.environ.get("LOCAL_RANK", "0") == "0"):
        click.echo(text, err=True)
    return ReaderGone.exit_code if isinstance(error, RankFailure) and reader_gone() else error.exit_code


def _tell_torchrun(text: str) -> None:
    """Leave ``text`` where torchrun's report of failed ranks, which ends its output, takes a rank's reason from; what a
    rank has left there already, with a traceback, stays."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not os.path.exists(file):
        about = {"timestamp": str(int(time.time())), "py_callstack": text}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": about}}), encoding="utf-8")
