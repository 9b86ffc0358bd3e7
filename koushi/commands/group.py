"""What every command line shares: a group that guesses, how a run file and its overrides are told apart, output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from koushi.config.overrides import split_run_path
from koushi.report.words import encodable

OVERRIDES = """
    Values of the run file can be given here: section.key=value, --section.key value,
    --tp, --pp, --dp-shard, --dp-replicate.
"""

RUN_FILE_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""Of a command whose ``arguments`` are a run file and overrides, in any order."""


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


def explain_overrides(commands: click.Group) -> None:
    """Tells, at the end of the help of every command that reads a run file, how its values are changed."""
    for command in commands.commands.values():
        if any(parameter.name == "arguments" for parameter in command.params):
            command.epilog = " ".join(OVERRIDES.split())


def split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The run file and the overrides. Raises UsageError where no file is named."""
    run_path, overrides = split_run_path(arguments)
    if run_path is None:
        raise click.UsageError("no run file was named, such as examples/debug.yaml")
    return Path(run_path), overrides


def show(text: str, newline: bool = True) -> None:
    """Print ``text`` with characters that standard output has."""
    encoding = sys.stdout.encoding if sys.stdout is not None else None
    click.echo(encodable(text, encoding), nl=newline)
