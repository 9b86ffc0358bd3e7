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
from koushi.dryrun import timeline
from koushi.dryrun.audited import audit_job
from koushi.dryrun.extrapolate import for_audit, traces, whole
from koushi.dryrun.findings import Finding
from koushi.dryrun.ranks import RankClass, rank_classes
from koushi.dryrun.report import as_json, text
from koushi.dryrun.trace import RankTrace
from koushi.dryrun.world import DeviceKind
from koushi.errors import AuditFailed, TrainingError
from koushi.hardware.peaks import PEAK_BF16_FLOPS
from koushi.job import Job
from koushi.train.command import started_world
from koushi.units import counted


@dataclass(frozen=True)
class DryRun:
    """What every kind of rank of a job does in one step."""

    job: Job
    kind: DeviceKind
    classes: tuple[RankClass, ...]
    traces: list[RankTrace]
    """Of the classes' representatives, in the same order."""
    findings: list[Finding]


def dry_run(path: Path, overrides: Sequence[str] = (), *, as_data: bool = False, trace: Path | None = None) -> None:
    """Run the run file's step as each kind of rank and print what it does; write its timeline to ``trace``.

    Raises AuditFailed with the findings of the audit, if there are any.
    """
    run_file = load(path, overrides)
    found = run_dry(check(run_file, started_world(run_file)), every_event=trace is not None)
    parts = (found.job, found.kind, found.classes, found.traces)
    findings = [str(one) for one in found.findings]
    print(json.dumps({**as_json(*parts), "findings": findings}) if as_data else text(*parts))
    if trace is not None:
        _write_timeline(trace, found)
    if findings:
        raise AuditFailed("\n".join([f"the audit has {counted(len(findings), 'finding')}", *findings]))
    if not as_data:
        print(
            "\naudit: each collective is on the sub-mesh that owns it, none is needless, no ranks wait for each other"
        )


def run_dry(job: Job, *, every_event: bool = False) -> DryRun:
    """Trace one rank of every kind, each in a process of its own, and audit them all.

    With ``every_event`` no trace is extrapolated, however large the job.
    """
    torch.set_num_threads(1)
    kind = device_kind(job)
    classes = rank_classes(job)
    ranks = [one.representative for one in classes]
    found = whole(job, kind, ranks) if every_event else traces(job, kind, classes)
    return DryRun(job, kind, classes, found, audit_job(for_audit(job), kind))


def device_kind(job: Job) -> DeviceKind:
    """What is predicted for: CUDA, unless the run file asks for the CPU."""
    return "cpu" if job.config.run.device == "cpu" else "cuda"


def _write_timeline(path: Path, found: DryRun) -> None:
    mesh = found.job.mesh
    slices = timeline.timeline(
        mesh, found.traces, timeline.MATMUL_SHARE * PEAK_BF16_FLOPS["H100"], partial(timeline.plain_seconds, mesh)
    )
    try:
        timeline.write(path, mesh, slices)
    except OSError as error:
        raise TrainingError(f"cannot write the timeline to {path}: {error}") from None
