"""``koushi report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from koushi.output import PAGE, write_text
from koushi.report.run.measured import read_run
from koushi.report.run.page import loss_text, run_page
from koushi.units import seconds_text


def report(folder: Path, html: Path | None, show: bool) -> str:
    """Write the page of the run in ``folder``, into it unless ``html`` says where; a sentence on the run.

    Raises KoushiError.
    """
    run = read_run(folder)
    path = html or folder / "report.html"
    write_text(path, run_page(run), PAGE)
    if show:
        webbrowser.open(path.resolve().as_uri())
    last = run.steps[-1]
    return (
        f"{run.name}: step {last['step']}, loss {loss_text(last)}, {seconds_text(run.step_seconds)} a step, "
        f"{run.rate:,.0f} tokens/s; wrote {path}"
    )
