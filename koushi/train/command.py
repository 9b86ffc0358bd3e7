"""``koushi train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import torch

from koushi.check.check import check
from koushi.config.load import RunFile, load
from koushi.config.write import write_resolved
from koushi.data.batches import open_samples
from koushi.data.samples import Samples
from koushi.errors import TrainingError
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.parallel.device_mesh import agents_store, resolve_device
from koushi.run_folder import RESOLVED, contents
from koushi.train.claim import claimed
from koushi.train.launch import launch
from koushi.train.resume import RunPlace, begin_anew, check_data, finished, run_place, without_hf_folder
from koushi.train.room import refuse_too_large
from koushi.train.trainer import train_rank
from koushi.units import count_text, counted

BEGUN = "koushi/folder"
"""Under which the store of torchrun's agents keeps the folder of the run. A restart count would not tell a restart:
an agent counts only those for which a rank of its own is to blame."""


def train(path: Path, overrides: Sequence[str] = (), max_restarts: int = 0) -> None:
    """Train the run file at ``path`` on its mesh, from its newest checkpoint. Raises KoushiError."""
    leads = int(os.environ.get("RANK", "0")) == 0
    run_file = load(path, overrides)
    store = agents_store(run_file.config.run.timeout)
    begun = Path(store.get(BEGUN).decode()) if store is not None and store.check([BEGUN]) else None
    run_file, mended = without_hf_folder(run_file, begun)
    job = check(run_file, started_world(run_file))
    if mended and leads:
        print(mended, file=sys.stderr)
    place = run_place(job, begun)
    step = finished(job, place)
    if step is None and "WORLD_SIZE" not in os.environ and resolve_device(job.config.run.device) == "cpu":
        refuse_too_large(job)
    if leads:  # what is wrong with the data is told before any process starts
        samples = open_samples(job)
    if step is not None:
        if leads:
            check_data(job, place, samples, begun)
            click.echo(
                f"{place.folder} is finished, with a checkpoint of step {step} of {job.config.training.steps}; "
                f"a higher training.steps goes on from there, {begin_anew(job)}"
            )
        return
    with ExitStack() as held:
        if leads:
            place = _claim(job, begun, samples, held)
            prepare(job, place)
            if store is not None:
                store.set(BEGUN, str(place.folder))
            click.echo(headline(job))
        launch(partial(train_rank, place=place), job, max_restarts)
    if leads:
        lost = "" if job.config.checkpoint.every else "; checkpoint.every=N would have kept the weights"
        click.echo(f"done; wrote {place.folder / 'metrics.jsonl'} and {place.folder / RESOLVED}{lost}")


def _claim(job: Job, begun: Path | None, samples: Samples, held: ExitStack) -> RunPlace:
    """Where ``job`` writes, held for it: chosen again where, since it was chosen, another run has begun or saved there.

    Raises as ``run_place`` and ``claimed`` do.
    """
    while True:
        place = run_place(job, begun)
        check_data(job, place, samples, begun)
        before = contents(place.folder)
        with ExitStack() as trying:
            trying.enter_context(claimed(place.folder))
            if contents(place.folder) == before:
                held.push(trying.pop_all())
                return place


def prepare(job: Job, place: RunPlace) -> None:
    """Fill the claimed folder of a run. Raises TrainingError where it cannot be written."""
    try:
        if job.config.checkpoint.every:
            place.checkpoints.mkdir(exist_ok=True)
        run, source = job.config.run, place.source
        if source is not None:  # to be found again from any folder, should this run end before it has saved
            run = run.model_copy(update={"resume": str(source.absolute())})
        write_resolved(job.config.model_copy(update={"run": run}), place.folder / RESOLVED)
    except OSError as error:
        raise TrainingError(f"cannot write into the run's folder: {error}; choose another run.folder") from None


def started_world(run_file: RunFile) -> int | None:
    """How many processes a launcher started; else, where a degree is left open, this machine's GPUs."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if run_file.config.parallelism.data_parallel_shard_degree == -1 and torch.cuda.is_available():
        return torch.cuda.device_count()
    return None


def headline(job: Job) -> str:
    dims = ", ".join(f"{name}={degree}" for name, degree in zip(job.mesh.names, job.mesh.shape, strict=True))
    training = job.config.training
    processes, microbatches = counted(job.mesh.world_size, "process"), counted(job.microbatches, "microbatch")
    return (
        f"{job.model_name}, {count_text(parameter_count(job.size))} parameters, on {processes} [{dims}]; "
        f"{training.global_batch_size} x {training.seq_len} tokens a step, {microbatches} a rank"
    )
