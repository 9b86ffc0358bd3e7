"""The command line: a table of commands that only call. Each imports what it runs when it runs.

Every command takes a run file and overrides of its values, in any order.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NoReturn

import click

from koushi import __version__
from koushi.config.overrides import split_run_path
from koushi.errors import KoushiError

OVERRIDES = """
    Values of the run file can be given here: section.key=value, --section.key value,
    --tp, --pp, --dp-shard, --dp-replicate.
"""

_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": True}


class Commands(click.Group):
    """A group that suggests the nearest command for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = get_close_matches(name, self.commands, n=1, cutoff=0.5)
            guess = f"did you mean {close[0]}? " if close else ""
            ctx.fail(f"no such command: {name}; {guess}The commands are {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="koushi")
def commands() -> None:
    """Train large language models on an N-dimensional lattice of devices.

    \b
    Example:
      koushi check examples/debug.yaml
      koushi train examples/debug.yaml
    """


@commands.command(context_settings=_ARGUMENTS)
@click.option("--world", type=click.IntRange(min=1), metavar="N", help="Devices in all, where the launcher fixes them.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def check(world: int | None, arguments: tuple[str, ...]) -> None:
    """Report every problem of a run file at once, or what it describes.

    Starts nothing. Exit code 2 means problems, each on a line of its own.

    \b
    Example:
      koushi check examples/debug.yaml --tp 4 training.steps=10
      koushi check examples/llama_128.yaml --world 128
    """
    from koushi.check.check import check as checked
    from koushi.check.summary import summary
    from koushi.config.load import load

    run_path, overrides = _split(arguments)
    click.echo(summary(checked(load(run_path, overrides), world)))


@commands.command(context_settings=_ARGUMENTS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def train(arguments: tuple[str, ...]) -> None:
    """Train as a run file says, one process per device.

    \b
    Example:
      koushi train examples/debug.yaml --tp 1 training.steps=10
      torchrun --nproc-per-node 8 -m koushi train examples/debug.yaml
    """
    from koushi.train.command import train as run

    run_path, overrides = _split(arguments)
    run(run_path, overrides)


@commands.command(context_settings=_ARGUMENTS)
@click.option(
    "--precision",
    type=click.Choice(["float32", "float64"]),
    default="float32",
    show_default=True,
    help="Of everything; float64 finds silent errors, float32 the paths that float64 hides.",
)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Training steps to compare.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def verify(steps: int, precision: Literal["float32", "float64"], arguments: tuple[str, ...]) -> None:
    """Show that the run's layout trains as one process does.

    \b
    Example:
      koushi verify examples/debug.yaml --steps 2 --tp 4 --dp-shard 1
    """
    from koushi.verify.command import verify as run

    run_path, overrides = _split(arguments)
    run(run_path, overrides, steps, precision)


for _command in (check, train, verify):
    _command.epilog = " ".join(OVERRIDES.split())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code."""
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = commands.main(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        return int(code or 0)
    except KoushiError as error:
        # Wrong input is wrong for every rank of a node: one of those that torchrun started says so.
        if error.exit_code != 2 or os.environ.get("LOCAL_RANK", "0") == "0":
            click.echo(str(error), err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code


def _split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    run_path, overrides = split_run_path(arguments)
    if run_path is None:
        raise click.UsageError("no run file was named, such as examples/debug.yaml")
    return Path(run_path), overrides
