"""``koushi dry-run``: every rank that differs, run without its devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from koushi.check.check import check_afar
from koushi.config.load import load
from koushi.dryrun import timeline
from koushi.dryrun.agreement import AGREES, disagreement_text, disagreements
from koushi.dryrun.audited import audit_job
from koushi.dryrun.extrapolate import for_audit, traces, whole
from koushi.dryrun.findings import Finding
from koushi.dryrun.forks import watched
from koushi.dryrun.ranks import RankClass, rank_classes
from koushi.dryrun.report import as_json, reading, reading_json, text
from koushi.dryrun.smaller import hint
from koushi.dryrun.trace import RankTrace
from koushi.dryrun.world import DeviceKind
from koushi.errors import AuditFailed, NotAsPlanned
from koushi.job import Job
from koushi.output import check_target, tell
from koushi.parallel.compile import load_compiler
from koushi.plan.command import hardware_of
from koushi.plan.edges import seconds_of
from koushi.plan.plan import Plan, plan
from koushi.plan.workload import of_job
from koushi.train.command import started_world
from koushi.units import counted

SOUND = "audit: each collective is on the sub-mesh that owns it, none is needless, and none waits for ever"


@dataclass(frozen=True)
class DryRun:
    """What every kind of rank of a job does in one step."""

    job: Job
    kind: DeviceKind
    classes: tuple[RankClass, ...]
    traces: list[RankTrace]
    """Of the classes' representatives, in the same order."""
    findings: list[Finding]
    disagreements: list[str]
    """Where the planner expects something else."""

    @property
    def plan(self) -> Plan:
        """Of the same job, on the hardware that its devices are taken to be."""
        return plan(of_job(self.job), hardware_of(self.job))


def dry_run(path: Path, overrides: Sequence[str] = (), *, as_data: bool = False, trace: Path | None = None) -> None:
    """Run the run file's step as each kind of rank and print what it does; write its timeline to ``trace``.

    Raises AuditFailed with the findings of the audit, else NotAsPlanned with what the planner expects otherwise.
    """
    run_file = load(path, overrides)
    if trace is not None:
        check_target(trace, timeline.TRACE, path)
    job, notes = check_afar(run_file, started_world(run_file))
    shorter = hint(job)
    tell((*notes, *([shorter] if shorter else [])))
    found = run_dry(job, every_event=trace is not None)
    parts = (found.job, found.kind, found.classes, found.traces)
    findings = [str(one) for one in found.findings]
    if as_data:
        said = {"plan": reading_json(found.plan), "findings": findings, "disagreements": found.disagreements}
        click.echo(json.dumps({**as_json(*parts), **said}))
    else:
        click.echo(text(*parts) + "\n")
        click.echo(reading(found.plan))
        if not found.disagreements:
            click.echo(AGREES)
        if not findings:
            click.echo(SOUND)
    if trace is not None:
        _write_timeline(trace, found)
    _raise_for(findings, found.disagreements)


def _raise_for(findings: Sequence[str], disagreements: Sequence[str]) -> None:
    parts = disagreement_text(disagreements) if disagreements else ""
    if findings:
        lines = [f"the audit has {counted(len(findings), 'finding')}", *findings]
        raise AuditFailed("\n".join([*lines, parts] if parts else lines))
    if parts:
        raise NotAsPlanned(parts)


def run_dry(job: Job, *, every_event: bool = False) -> DryRun:
    """Trace one rank of every kind, each in a process of its own, and audit them all.

    With ``every_event`` no trace is extrapolated, however large the job.
    """
    torch.set_num_threads(1)
    if job.config.training.compile:
        load_compiler()
    kind = device_kind(job)
    classes = rank_classes(job)
    if sys.stderr.isatty():
        many = counted(len(classes), "rank")
        click.echo(f"running {many}, all that differ, twice: for what they hold, and for the audit", err=True)
    ranks = [one.representative for one in classes]
    with watched("memory and collectives"):
        found = whole(job, kind, ranks) if every_event else traces(job, kind, classes)
    audited = for_audit(job)
    with watched("audit"):
        findings = audit_job(audited, kind, together=audited is not job)
    return DryRun(job, kind, classes, found, findings, disagreements(job, kind, found))


def device_kind(job: Job) -> DeviceKind:
    """What is predicted for: what the run file asks for; else what it is planned on, whatever this machine has."""
    if job.config.run.device != "auto":
        return job.config.run.device
    return "cpu" if hardware_of(job).device == "cpu" else "cuda"


def _write_timeline(path: Path, found: DryRun) -> None:
    mesh = found.job.mesh
    chosen = hardware_of(found.job)
    rate = chosen.chip.peak(found.job.config.precision.compute) * chosen.chip.sustained
    slices = timeline.timeline(mesh, found.traces, rate, partial(seconds_of, mesh, chosen))
    timeline.write(path, mesh, slices)
