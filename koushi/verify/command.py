"""``koushi verify``: the run's layout and one process train alike, or where they part."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from koushi.check.check import check_afar
from koushi.config.load import load
from koushi.config.schema import MasterDtype
from koushi.errors import VerifyError
from koushi.job import Job
from koushi.output import tell
from koushi.train.launch import launch
from koushi.units import counted
from koushi.verify.compare import TOLERANCES, Difference, compare, unmoved
from koushi.verify.record import RankRecord, read_records, record_jobs
from koushi.verify.scale import scale_down, single_process, with_updates

WIDTH = 110
"""Columns where the output is no terminal."""


class PlainConsole(Console):
    """What it cannot write is for the command line to judge."""

    def on_broken_pipe(self) -> None:
        raise


def verify(path: Path, overrides: Sequence[str] = (), steps: int = 3, precision: MasterDtype = "float32") -> None:
    """Train ``steps`` of the run file both ways in ``precision`` and print the largest differences.

    Raises VerifyError above tolerance.
    """
    job, missing = check_afar(load(path, overrides))
    tell(missing)
    job, notes = scale_down(job, precision)
    job, updates = with_updates(job, steps)
    notes += updates
    console = PlainConsole()
    if not console.is_terminal:
        console = PlainConsole(width=WIDTH)
    console.print(
        f"{counted(job.mesh.world_size, 'process')} {job.mesh} against 1, {counted(steps, 'step')} in {precision}",
        markup=False,
    )
    if notes:
        console.print("changed to run here: " + ", ".join(notes), markup=False)
    with tempfile.TemporaryDirectory() as folder:
        records = run_recorded(job, [job], steps, Path(folder) / "layout")[0]
        alone = single_process(job)
        reference = run_recorded(alone, [alone], steps, Path(folder) / "single")[0]
    differences, wrong = compare(reference, records, TOLERANCES[precision])
    console.print(table(differences))
    for text in wrong:
        console.print(text, markup=False)
    if wrong or not all(difference.within for difference in differences):
        beyond = [difference.kind for difference in differences if not difference.within]
        raise VerifyError(f"this layout does not train as one process does: {', '.join(beyond) or wrong[0]}")
    if still := unmoved(reference, TOLERANCES[precision]):
        name, share = min(still.items(), key=lambda item: item[1])
        raise VerifyError(
            f"nothing shows that parameters are updated alike: {name} moves by {share:.0e} of its size, less than is "
            "allowed for rounding; a smaller optimizer.eps, more --steps, or --precision float64 would show it"
        )
    console.print("the layout does not change the maths")


def run_recorded(job: Job, jobs: Sequence[Job], steps: int, folder: Path) -> list[list[RankRecord]]:
    """Run ``jobs`` in one world of ``job``'s size; the records of every rank, job by job."""
    folder.mkdir()
    launch(partial(record_jobs, jobs=tuple(jobs), steps=steps, folder=folder), job)
    return [read_records(folder, index, job.mesh.world_size) for index in range(len(jobs))]


def table(differences: Sequence[Difference]) -> Table:
    shown = Table()
    for heading in ("what", "largest difference", "allowed", "", "where"):
        shown.add_column(heading, no_wrap=True)
    for one in differences:
        verdict = "ok" if one.within else "DIFFERS"
        shown.add_row(one.kind, f"{one.relative:.1e}", f"{one.tolerance:.0e}", verdict, one.where)
    return shown
