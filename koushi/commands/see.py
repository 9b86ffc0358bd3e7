"""Commands that show what a run file means: the lattice, every value and where it comes from, the machine."""

from __future__ import annotations

from pathlib import Path

import click

from koushi.commands.group import (
    Command,
    RunFileCommand,
    gpus_per_node_option,
    html_option,
    open_option,
    show,
    split,
    world_option,
)
from koushi.output import tell


@click.command(cls=RunFileCommand)
@click.option("--rank", type=int, metavar="R", help="Explain this rank instead of drawing them all.")
@click.option("--parameter", "parameters", multiple=True, metavar="NAME", help="With --rank: its slice of NAME.")
@click.option("--step", type=int, metavar="N", help="With --rank: the samples it reads in step N.  [default: 1]")
@gpus_per_node_option("those of the hardware")
@html_option
@open_option
@world_option(hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def mesh(
    rank: int | None,
    parameters: tuple[str, ...],
    step: int | None,
    gpus_per_node: int | None,
    html: Path | None,
    show_page: bool,
    world: int | None,
    arguments: tuple[str, ...],
) -> None:
    """Draw the lattice: nodes, ranks, groups and links.

    Of many nodes that are alike the first and the last are drawn. With --rank: one rank's groups, stages,
    samples and parts of parameters. With --html: a page with all of them, what the layout costs, and sliders
    for the degrees.

    \b
    Example:
      koushi mesh examples/llama_128.yaml
      koushi mesh examples/llama_128.yaml --rank 37 --parameter output.weight
      koushi mesh examples/llama3_70b.yaml --html lattice.html --open
    """
    from koushi.check.check import check_afar
    from koushi.config.load import load
    from koushi.report.mesh_text import mesh_text
    from koushi.report.nodes import devices_per_node
    from koushi.report.rank_text import rank_text

    if rank is None and (parameters or step is not None):
        raise click.UsageError("--parameter and --step explain one rank: add --rank R")
    if html is None and show_page:
        raise click.UsageError("--open is of a page: add --html FILE")
    if html is not None and rank is not None:
        raise click.UsageError("--html writes a page with every rank: leave out --rank")
    run_path, overrides = split(arguments)
    run_file = load(run_path, overrides)
    job, notes = check_afar(run_file, world)
    tell(notes)
    if html is not None:
        from koushi.report.page.command import write_page

        show(write_page(run_file, job, html, show_page))
        return
    devices = gpus_per_node or devices_per_node(job)
    if rank is None:
        text = mesh_text(job, devices)
    else:
        text = rank_text(job, rank, devices, parameters, 1 if step is None else step)
    show(text)


@click.command(cls=RunFileCommand)
@click.option("--explain", is_flag=True, help="Say of every value where it comes from.")
@click.option("--schema", is_flag=True, help="Print every key with default, meaning and type; KEY... picks some.")
@world_option(hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def config(explain: bool, schema: bool, world: int | None, arguments: tuple[str, ...]) -> None:
    """Print a run file with nothing left open.

    Defaults, presets, overrides and what follows from them are filled in. What is printed is a run file
    itself; --explain adds comments.

    \b
    Example:
      koushi config examples/debug.yaml --tp 1 --explain
      koushi config --schema
      koushi config --schema optimizer training.seq_len
    """
    from koushi.check.check import check_afar
    from koushi.check.explain import sources
    from koushi.config.describe import schema_text
    from koushi.config.load import load
    from koushi.config.write import resolved_text

    if schema:
        show(schema_text(arguments))
        return
    run_path, overrides = split(arguments)
    run_file = load(run_path, overrides)
    job, notes = check_afar(run_file, world)
    tell(notes)
    show(resolved_text(job.config, sources(run_file, job) if explain else None), newline=False)


@click.command(cls=Command)
@click.option("--gpu", is_flag=True, help="Also ask torch, which takes seconds.")
def env(gpu: bool) -> None:
    """Print versions, machine and settings, for a bug report.

    Values of variables that could hold a secret are left out.

    \b
    Example:
      koushi env
      koushi env --gpu
    """
    from koushi.setup.environment import environment_text

    devices = None
    if gpu:
        from koushi.train.devices import devices_text

        devices = devices_text()
    show(environment_text(devices))


@click.command(cls=Command)
@html_option
@open_option
@click.argument("folder", type=click.Path(path_type=Path), metavar="RUN_FOLDER")
def report(folder: Path, html: Path | None, show_page: bool) -> None:
    """Write a page of what a run measured, against what was predicted.

    Loss and gradient norm, tokens/s, memory, bytes and step time, and the ranks that the others wait for.
    Without --html it is report.html in the folder.

    \b
    Example:
      koushi report runs/debug --open
    """
    from koushi.report.run.command import report as run

    show(run(folder, html, show_page))
