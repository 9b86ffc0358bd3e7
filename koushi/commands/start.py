"""Commands for a beginning: a first run file, and scripts that start one on several nodes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from koushi.commands.group import Choice, Command, RunFileCommand, Whole, gpus_per_node_option, show, split
from koushi.config.overrides import SHORT
from koushi.errors import DoesNotFit
from koushi.output import tell


@click.command(cls=Command)
@click.option("--model", default="llama3-debug", show_default=True, metavar="NAME", help="A preset of model.name.")
@click.option(
    "--gpus",
    type=Whole(1),
    metavar="N",
    help=f"{SHORT['--gpus'].meaning}  [default: as few as hold the model well]",
)
@click.option("--hardware", metavar="NAME|FILE", help=SHORT["--hardware"].meaning)
@click.argument("path", type=click.Path(path_type=Path), metavar="RUN.yaml")
def init(path: Path, model: str, gpus: int | None, hardware: str | None) -> None:
    """Write a new run file that works as it is.

    Every value stands with what it means. The layout is a simple one; on several GPUs, where that is tight or
    another saves 5% of a step, it is what koushi plan --search chooses. A file that is there already is left
    alone. llama3-debug trains on a laptop. Exit code 3 means that the file was written, but fits on so few devices
    in no layout.

    \b
    Example:
      koushi init run.yaml
      koushi init 70b.yaml --model llama3-70b --gpus 128 --hardware h200
    """
    from koushi.setup.run_file import init as run

    if hardware is not None and os.path.isfile(hardware):
        hardware = os.path.abspath(hardware)  # a path in the run file would be relative to that
    written = run(path, model, gpus, hardware)
    show(written.said)
    if not written.fits:
        raise DoesNotFit("")


@click.command(cls=RunFileCommand)
@click.option("--nodes", type=Whole(1), metavar="N", help="Machines.  [required]")
@click.option(
    "--backend",
    type=Choice(["slurm", "kubernetes", "torchrun"]),
    help="What starts it: sbatch, kubectl apply, or you, on every node.  [required]",
)
@gpus_per_node_option("those of the hardware; on CPU 8")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN.yaml [KEY=VALUE]...")
def launch(nodes: int | None, backend: str | None, gpus_per_node: int | None, arguments: tuple[str, ...]) -> None:
    """Print a script that trains a run file on several nodes.

    It checks at start that it was given as many devices as the mesh has, and goes on from the newest
    checkpoint when it is started again.

    \b
    Example:
      koushi launch examples/llama_128.yaml --nodes 16 --backend slurm > run.sh
      koushi launch examples/llama_128.yaml --nodes 16 --backend kubernetes > job.yaml
    """
    from koushi.setup.launch_script import BACKENDS, notes
    from koushi.setup.launch_script import launch as made

    if nodes is None or backend is None:
        missing = ["--nodes N"] * (nodes is None) + [f"--backend {'|'.join(BACKENDS)}"] * (backend is None)
        raise click.UsageError(f"add {' and '.join(missing)}")
    run_path, overrides = split(arguments)
    described = made(run_path, overrides, nodes, gpus_per_node)
    show(BACKENDS[backend](described), newline=False)
    tell(notes(described))
