"""Commands that say what a run will cost, before it runs."""

from __future__ import annotations

import gc
from pathlib import Path

import click

from koushi.commands.group import Command, RunFileCommand, Whole, importing, json_option, show, split

SEARCH = "Rank every legal layout of the devices instead; what is typed of the layout, such as --tp 8, stays."


@click.command(cls=RunFileCommand)
@click.option("--search", is_flag=True, help=SEARCH)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --search: a copy of the run file with the fastest that is not tight.",
)
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def plan(search: bool, write: Path | None, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Say what a run file costs in memory, communication and time, before it runs.

    Needs no GPU. Exit code 3 means that it does not fit. docs/plan.md explains every word that is printed.

    \b
    Example:
      koushi plan examples/llama3_70b.yaml
      koushi plan examples/llama3_8b.yaml --gpus 64 training.recompute=full
      koushi plan examples/llama3_70b.yaml --search --write fastest.yaml
    """
    gc.disable()  # what is made from here on is small, and most of it stays until the answer is there
    try:
        from koushi.plan.command import show_plan, show_search

        run_path, overrides = split(arguments)
        if search:
            show_search(run_path, overrides, as_json, write)
        elif write is not None:
            raise click.UsageError("--write is for what --search finds")
        else:
            show_plan(run_path, overrides, as_json)
    finally:
        gc.freeze()  # or Python would look through all of it as it ends
        gc.enable()


@click.command("dry-run", cls=RunFileCommand)
@json_option
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write the predicted step's timeline for Perfetto."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def dry_run(as_json: bool, trace: Path | None, arguments: tuple[str, ...]) -> None:
    """Run one step as every rank that differs, without devices: memory, collectives, FLOPs.

    The real program on tensors that hold nothing, for as many ranks as the run file asks. Exit code 1 means
    that a collective breaks the rules of the lattice, or that koushi plan expects something else.

    \b
    Example:
      koushi dry-run examples/debug.yaml
      koushi dry-run examples/llama_128.yaml --json
    """
    from koushi.check.early import check_early

    run_path, overrides = split(arguments)
    check_early(run_path, overrides, launched=True, afar=True)
    with importing():
        from koushi.dryrun.command import dry_run as run

    run(run_path, overrides, as_data=as_json, trace=trace)


@click.command(cls=Command)
@click.option(
    "--calibrate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure this machine and write a hardware file.",
)
@click.option("--processes", type=Whole(1), metavar="N", help="Ranks that measure.  [default: all GPUs]")
@click.argument("name", required=False, metavar="[NAME|FILE]")
def hardware(name: str | None, calibrate: Path | None, processes: int | None) -> None:
    """List the hardware that koushi plan knows, show one, or measure the machine at hand.

    With --calibrate, NAME is the hardware to take what is not measured from.

    \b
    Example:
      koushi hardware
      koushi hardware h100
      koushi hardware --calibrate mine.yaml
    """
    if calibrate is not None:
        from koushi.calibrate.command import calibrate as run

        show(run(calibrate, "auto", processes, name)[1])
        return
    if processes is not None:
        raise click.UsageError("--processes are those that measure: add --calibrate FILE")
    from koushi.hardware.text import shown, table

    show(table() if name is None else shown(name))
