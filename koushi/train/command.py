"""``koushi train``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from koushi.check.check import check
from koushi.config.load import RunFile, load
from koushi.config.write import write_resolved
from koushi.data.batches import open_samples
from koushi.errors import TrainingError
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.train.launch import launch
from koushi.train.trainer import train_rank
from koushi.units import count_text


def train(path: Path, overrides: Sequence[str] = ()) -> None:
    """Train the run file at ``path`` on its mesh. Raises KoushiError."""
    run_file = load(path, overrides)
    job = check(run_file, started_world(run_file))
    folder = run_folder(job)
    leads = int(os.environ.get("RANK", "0")) == 0
    if leads:
        open_samples(job)  # data that cannot be used is told before any process starts
        folder.mkdir(parents=True, exist_ok=True)
        write_resolved(job.config, folder / "config.yaml")
        print(headline(job), flush=True)
    launch(partial(train_rank, folder=folder), job)
    if leads:
        print(f"done; wrote {folder / 'metrics.jsonl'} and {folder / 'config.yaml'}")


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
    return (
        f"{job.model_name}, {count_text(parameter_count(job.size))} parameters, on {job.mesh.world_size} "
        f"processes [{dims}]; {training.global_batch_size} x {training.seq_len} tokens a step, "
        f"{job.microbatches} microbatches a rank"
    )


def run_folder(job: Job) -> Path:
    """Where the run writes: as the run file says, else the first free name under ``runs``.

    Raises TrainingError for a folder that already holds a run.
    """
    if job.config.run.folder is None:
        names = (job.name if count == 1 else f"{job.name}-{count}" for count in itertools.count(1))
        return next(folder for folder in map(Path("runs").joinpath, names) if not holds_run(folder))
    folder = Path(job.config.run.folder)
    if holds_run(folder):
        raise TrainingError(f"run.folder {folder} already holds a run; name another folder, or remove it")
    return folder


def holds_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()
