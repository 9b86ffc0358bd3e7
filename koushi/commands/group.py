"""What command lines share: a group that guesses, options of one meaning, a run file and its overrides, output."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

import click

from koushi.config.overrides import SHORT, parse, split_run_path
from koushi.config.spelling import nearest
from koushi.errors import ReaderGone, Stopped
from koushi.output import reader_gone
from koushi.report.words import encodable

Function = TypeVar("Function", bound=Callable[..., Any])

RENAMED = {"--node-size": "--gpus-per-node"}
"""Options that had another name, which still works."""
MAY_BE_EMPTY = frozenset({"--prompt"})
"""Options that mean something without a word: of some models a text that has not begun."""
WHOLE = 1000
"""Characters that no first sentence of a command's help reaches."""


@contextmanager
def importing() -> Iterator[None]:
    """Import what makes very many objects, none of which goes: Python would look through all of them time and again,
    and once more as it ends, which is a third of the time of a command that does little but import torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def piped() -> Iterator[None]:
    """Raises ReaderGone for a pipe that broke because nothing reads the output any more. click would end with 1 for any
    pipe, without a word."""
    try:
        yield
    except BrokenPipeError as error:
        if reader_gone():
            raise ReaderGone from None
        raise RuntimeError("a pipe broke that is not the output") from error


class Whole(click.IntRange):
    """An integer of at least ``least``."""

    def __init__(self, least: int):
        super().__init__(min=least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value} is not an integer of at least {self.min}", param, ctx)


class Choice(click.Choice[str]):
    """One of some words, with a guess for another."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            meant = nearest(value, self.choices)
            guess = f"; did you mean {meant}? The" if meant else "; the"
            self.fail(f"there is no {value}{guess} choices are {', '.join(self.choices)}", param, ctx)


class Command(click.Command):
    """A command that takes an empty word for a mistake, such as a shell's variable that is not set."""

    has_overrides = False
    """Whether what is no option of its own is judged with a run file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option) and not one.is_flag)
        valued = {name: one for one in options for name in one.opts}
        for before, argument in pairwise(["", *args]):
            name, equals, value = argument.partition("=")
            if argument and (value or not equals):
                continue
            option = valued.get(name if argument else before)
            if option is None and not argument and not self.has_overrides:
                raise click.UsageError("an argument is empty; write what is meant", ctx)
            if option is not None and not MAY_BE_EMPTY.intersection(option.opts):
                raise click.BadParameter("is empty; write a value, or leave it out", ctx, option)
        return super().parse_args(ctx, args)


class RunFileCommand(Command):
    """A command whose ``arguments`` are a run file and overrides of its values, in any order.

    What may be an override is judged with the run file, but a slip in an option of the command's own is told here.
    """

    has_overrides = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = True
        rest = super().parse_args(ctx, [_renamed(argument) for argument in args])
        own = [
            name
            for one in self.get_params(ctx)
            if isinstance(one, click.Option) and not one.hidden
            for name in one.opts
        ]
        for argument in parse(ctx.params["arguments"]):
            if argument.may_be_option and argument.name not in SHORT:
                meant = nearest(argument.name, own, cutoff=0.8)
                if meant is not None:
                    raise click.NoSuchOption(argument.name, possibilities=[meant], ctx=ctx)
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Values of the run file"):
            rows = [(f"{name} {short.takes}", short.meaning) for name, short in SHORT.items()]
            formatter.write_dl([*rows, ("section.key=value", "Any other; also as --section.key value.")])


def _renamed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{RENAMED.get(name, name)}{equals}{value}"


json_option = click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object, for programs.")
html_option = click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Where to write the page.")
open_option = click.option("--open", "show_page", is_flag=True, help="Show the page in the browser.")


def gpus_per_node_option(said: str) -> Callable[[Function], Function]:
    """``said``: the default in words."""
    return click.option(
        "--gpus-per-node",
        type=Whole(1),
        metavar="N",
        help=f"Devices of one node, or on CPU its ranks.  [default: {said}]",
    )


def world_option(hidden: bool) -> Callable[[Function], Function]:
    return click.option(
        "--world",
        type=Whole(1),
        metavar="N",
        hidden=hidden,
        help="Refuse what is not for the N processes that a launcher will start.",
    )


class Commands(click.Group):
    """A group that suggests the nearest command for an unknown one, and takes ``help COMMAND`` too."""

    command_class = Command

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with piped():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C is told as any signal is: click would answer it with an empty line."""
        try:
            with piped():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped(SIGINT, "SIGINT") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every command with the whole of its first sentence, which click cuts to what one line has room for."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.commands[name].get_short_help_str(WHOLE)) for name in sorted(self.commands)]
            )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name == "help":
            if not args[1:]:
                click.echo(ctx.get_help())
                ctx.exit()
            return self.resolve_command(ctx, [args[1], "--help"])
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = get_close_matches(name, self.commands, n=1, cutoff=0.5)
            guess = f"did you mean {close[0]}? " if close else ""
            ctx.fail(f"no such command: {name}; {guess}The commands are {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


def split(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The run file and the overrides. Raises UsageError where no file is named."""
    run_path, overrides = split_run_path(arguments)
    if not run_path:
        raise click.UsageError("no run file was named, such as examples/debug.yaml")
    return Path(run_path), overrides


def show(text: str, newline: bool = True) -> None:
    """Print ``text`` with characters that standard output has."""
    encoding = sys.stdout.encoding if sys.stdout is not None else None
    click.echo(encodable(text, encoding), nl=newline)
