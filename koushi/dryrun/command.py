"""``koushi dry-run``: every rank that differs, run without its devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from koushi.check.check import check
from koushi.config.load import load
from koushi.dryrun.forks import in_forks
from koushi.dryrun.ranks import RankClass, rank_classes
from koushi.dryrun.report import as_json, text
from koushi.dryrun.trace import RankTrace, trace
from koushi.dryrun.world import DeviceKind
from koushi.job import Job
from koushi.train.command import started_world


@dataclass(frozen=True)
class DryRun:
    """What every kind of rank of a job does in one step."""

    job: Job
    kind: DeviceKind
    classes: tuple[RankClass, ...]
    traces: list[RankTrace]
    """Of the classes' representatives, in the same order."""


def dry_run(path: Path, overrides: Sequence[str] = (), *, as_data: bool = False) -> None:
    """Run the run file's step as each kind of rank and print what it does. Raises KoushiError."""
    run_file = load(path, overrides)
    found = run_dry(check(run_file, started_world(run_file)))
    parts = (found.job, found.kind, found.classes, found.traces)
    print(json.dumps(as_json(*parts)) if as_data else text(*parts))


def run_dry(job: Job) -> DryRun:
    """Trace one rank of every kind, each in a process of its own."""
    torch.set_num_threads(1)
    kind = device_kind(job)
    classes = rank_classes(job)
    traces = in_forks(partial(_traced, job, kind), [one.representative for one in classes])
    return DryRun(job, kind, classes, traces)


def device_kind(job: Job) -> DeviceKind:
    """What is predicted for: CUDA, unless the run file asks for the CPU."""
    return "cpu" if job.config.run.device == "cpu" else "cuda"


def _traced(job: Job, kind: DeviceKind, rank: int) -> RankTrace:
    return trace(job, rank, kind)
