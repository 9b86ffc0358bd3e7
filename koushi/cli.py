"""The command line: a table of commands that only call. Each imports what it runs when it runs.

Every command takes a run file and overrides of its values, in any order.
"""

from __future__ import annotations

import gc
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
@click.option(
    "--gpus", type=click.IntRange(min=1), metavar="N", help="Devices in all.  [default: as the run file says]"
)
@click.option("--hardware", metavar="NAME|FILE", help="What to plan for.  [default: run.hardware, else h100-sxm-80gb]")
@click.option("--search", is_flag=True, help="Rank every legal layout of the devices instead.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --search: a copy of the run file with the fastest.",
)
@click.option("--json", "as_json", is_flag=True, help="The same for programs, and for every rank.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def plan(
    gpus: int | None, hardware: str | None, search: bool, write: Path | None, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Say what a run file costs in memory, communication and time, before it runs.

    Needs no GPU. Exit code 3 means that it does not fit.

    \b
    Example:
      koushi plan examples/llama3_70b.yaml
      koushi plan examples/llama3_8b.yaml --gpus 64 training.recompute=full
      koushi plan examples/llama3_70b.yaml --search --write fastest.yaml
    """
    gc.disable()  # what is made from here on is small, and most of it stays until the answer is there
    try:
        from koushi.plan.command import show_plan, show_search

        run_path, overrides = _split(arguments)
        if search:
            show_search(run_path, overrides, gpus, hardware, as_json, write)
        elif write is not None:
            raise click.UsageError("--write is for what --search finds")
        else:
            show_plan(run_path, overrides, gpus, hardware, as_json)
    finally:
        gc.freeze()  # or the interpreter would go through all of it once more at its end
        gc.enable()


@commands.command(context_settings=_ARGUMENTS)
@click.option(
    "--resume", metavar="auto|never|PATH", help="Go on from the run's newest checkpoint, begin anew, or from PATH."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="How often all ranks are started again, from the newest checkpoint, when one fails.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def train(resume: str | None, max_restarts: int, arguments: tuple[str, ...]) -> None:
    """Train as a run file says, one process per device.

    A run with checkpoints (checkpoint.every) goes on where it ended.

    \b
    Example:
      koushi train examples/debug.yaml --tp 1 training.steps=10
      koushi train examples/debug.yaml checkpoint.every=10 --max-restarts 3
      torchrun --nproc-per-node 8 -m koushi train examples/debug.yaml
    """
    from koushi.train.command import train as run

    run_path, overrides = _split(arguments)
    run(run_path, overrides if resume is None else [*overrides, f"run.resume={resume}"], max_restarts)


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


@commands.group(cls=Commands)
def convert() -> None:
    """Turn a Hugging Face folder into a checkpoint, or a checkpoint into such a folder.

    \b
    Example:
      koushi convert from-hf models/tiny checkpoints/tiny
      koushi convert to-hf runs/debug models/debug --dtype bfloat16
    """


@convert.command("from-hf")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    default="float32",
    show_default=True,
    help="Of the weights in the checkpoint.",
)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CKPT")
def from_hf(folder: Path, checkpoint: Path, dtype: str) -> None:
    """Write the weights of the Hugging Face folder DIR as a checkpoint of step 0.

    To train from DIR this is not needed: a run file may say model: {hf: DIR}.

    \b
    Example:
      koushi convert from-hf models/tiny checkpoints/tiny
    """
    from koushi.checkpoint.convert import from_hf as run

    run(folder, checkpoint, dtype)


@convert.command("to-hf")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "float64"]),
    default="float32",
    show_default=True,
    help="Of the weights in the folder.",
)
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
    from koushi.checkpoint.convert import to_hf as run

    run(checkpoint, folder, dtype, shard_gb)


@commands.command()
@click.option("--prompt", required=True, help="What the text begins with.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Lower is closer to the likeliest text; 0 always takes the likeliest token.",
)
@click.option("--top-k", type=click.IntRange(min=1), help="Draw only from the K likeliest tokens.  [default: from all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
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


@commands.command()
@click.option(
    "--calibrate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure this machine and write a hardware file.",
)
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Ranks that measure.  [default: all GPUs]")
@click.argument("name", required=False, metavar="[NAME|FILE]")
def hardware(name: str | None, calibrate: Path | None, processes: int | None) -> None:
    """List the hardware that koushi plan knows, show one, or measure the machine at hand.

    With --calibrate, NAME is the hardware to take what is not measured from.

    \b
    Example:
      koushi hardware h100
      koushi hardware
      koushi hardware --calibrate mine.yaml
    """
    if calibrate is not None:
        from koushi.calibrate.command import calibrate as run

        click.echo(f"{calibrate}: {run(calibrate, 'auto', processes, name).description}")
        return
    from koushi.hardware.text import shown, table

    click.echo(table() if name is None else shown(name))


for _command in (check, plan, train, verify):
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
