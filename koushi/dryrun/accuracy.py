"""``python -m koushi.dryrun.accuracy``: how far the dry run's memory is from published runs of FSDP."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from koushi.accuracy.document import renew
from koushi.accuracy.published import LeftOut, Run, described
from koushi.accuracy.rows import MEASURED, Row, read
from koushi.accuracy.score import GIB, Errors, layout_of, score
from koushi.accuracy.text import columns, percent
from koushi.dryrun.forks import in_forks
from koushi.dryrun.memory import Peak
from koushi.dryrun.published import Likeness, is_fsdp, likeness, peak_of
from koushi.errors import KoushiError
from koushi.plan.allocator import pooled_bytes, runtime_bytes
from koushi.units import counted

DRY_RUNS = "dry runs"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True)
class DryRunScore:
    """A published run beside its dry run and its plan; GiB."""

    run: Run
    measured: float
    active: float
    """Of tensors at the peak of the dry run."""
    predicted: float
    """What follows from it of the kind that the source measured."""
    planned: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def planned_error(self) -> float:
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class Figures:
    """All that the command has to tell."""

    scores: tuple[DryRunScore, ...]
    left_out: tuple[LeftOut, ...]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=FILE, help="A CSV file of runs that finished, instead of the shipped one.")
@click.option("--source", multiple=True, help="Only this source.")
@click.option("--json", "json_wanted", is_flag=True, help="Print figures as JSON.")
@click.option("--write", is_flag=True, help="Renew the document.")
def main(runs: Path | None, source: tuple[str, ...], json_wanted: bool, write: bool) -> None:
    """Run published runs of FSDP dry, and hold the memory of the fullest rank against what they measured.

    Takes a minute or two. The published runs, and how the planner does on all of them: python -m koushi.accuracy.
    """
    try:
        rows = read(runs or MEASURED)
    except KoushiError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    found = figures(row for row in rows if not source or row.source in source)
    text = report(found)
    if write:
        renew(DRY_RUNS, text)
    click.echo(json.dumps(as_json(found), indent=2) if json_wanted else text)


def figures(rows: Iterable[Row]) -> Figures:
    """Of the rows that are of the FSDP family and state their memory; equal jobs are run once."""
    torch.set_num_threads(1)
    runs, left_out = described(row for row in rows if is_fsdp(row))
    found = [(run, likeness(run)) for run in runs]
    likes = list(dict.fromkeys(like for _, like in found if isinstance(like, Likeness)))
    peaks = dict(zip(likes, in_forks(peak_of, likes), strict=True))
    return Figures(
        tuple(_scored(run, peaks[like]) for run, like in found if isinstance(like, Likeness)),
        (*left_out, *(LeftOut(run.row, reason) for run, reason in found if isinstance(reason, str))),
    )


def _scored(run: Run, peak: Peak) -> DryRunScore:
    assert run.memory_gib is not None, "a run without a measurement has no job"
    grows = run.workload.system.expandable_segments
    predicted = peak.bytes if run.memory == "active" else pooled_bytes(peak.pools, grows)
    if run.memory == "device":
        predicted += runtime_bytes(run.workload, "gpu")
    return DryRunScore(run, run.memory_gib, peak.bytes / GIB, predicted / GIB, score(run).memory_gib)


def report(found: Figures) -> str:
    """For people."""
    pieces = [
        f"{counted(len(found.scores), 'run')} of FSDP run dry, {counted(len(found.left_out), 'row')} left out",
        sources_table(found.scores),
        columns([HEAD, *map(row_line, found.scores)]),
        _left_out_table(found.left_out),
    ]
    return "\n\n".join(pieces)


def sources_table(scores: Sequence[DryRunScore]) -> str:
    """Errors by source and over all runs, the dry run's and beside them the planner's on the same rows."""
    head = ("source", "runs", "dry run p50", "p90", "bias", "plan p50", "p90", "bias")
    names = sorted({one.run.row.source for one in scores})
    lines = [_source_line(name, [one for one in scores if one.run.row.source == name]) for name in names]
    return columns([head, *lines, _source_line("all", scores)])


def _source_line(name: str, scores: Sequence[DryRunScore]) -> tuple[str, ...]:
    dry_run, plan = errors(scores)
    figures_of = [
        (percent(one.median), percent(one.p90), percent(one.bias, signed=True)) if one else ("", "", "")
        for one in (dry_run, plan)
    ]
    return (name, str(len(scores)), *figures_of[0], *figures_of[1])


def errors(scores: Iterable[DryRunScore]) -> tuple[Errors | None, Errors | None]:
    """The dry run's and the planner's."""
    scores = tuple(scores)
    return Errors.of(one.error for one in scores), Errors.of(one.planned_error for one in scores)


HEAD = ("run", "GiB", "tensors", "dry run", "error", "plan", "error", "model", "layout")


def row_line(one: DryRunScore) -> tuple[str, ...]:
    """Measured; tensors at the dry run's peak; what they make reserved; the planner's."""
    return (
        one.run.row.id,
        f"{one.measured:.2f}",
        f"{one.active:.2f}",
        f"{one.predicted:.2f}",
        percent(one.error, signed=True),
        f"{one.planned:.2f}",
        percent(one.planned_error, signed=True),
        one.run.row.model,
        layout_of(one.run),
    )


def _left_out_table(left_out: Iterable[LeftOut]) -> str:
    counts = Counter((one.row.source, one.reason) for one in left_out)
    if not counts:
        return "no row is left out"
    lines = [(str(count), source, reason) for (source, reason), count in sorted(counts.items())]
    return columns([("rows", "source", "left out because"), *lines])


def as_json(found: Figures) -> dict[str, object]:
    """GiB and, of errors, fractions."""
    return {
        "runs": [
            {
                "run": one.run.row.id,
                "source": one.run.row.source,
                "measured": one.measured,
                "tensors": one.active,
                "dry_run": one.predicted,
                "plan": one.planned,
            }
            for one in found.scores
        ],
        "left_out": [{"run": one.row.id, "source": one.row.source, "reason": one.reason} for one in found.left_out],
    }


if __name__ == "__main__":
    main()
