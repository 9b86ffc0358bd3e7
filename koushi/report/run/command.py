"""``koushi report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from koushi.errors import DataError
from koushi.report.run.measured import read_run
from koushi.report.run.page import run_page
from koushi.units import seconds_text


def report(folder: Path, html: Path | None, show: bool) -> None:
    """Write the page of the run in ``folder``, into it unless ``html`` says where. Raises KoushiError."""
    run = read_run(folder)
    path = html or folder / "report.html"
    try:
        path.write_text(run_page(run), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; --html FILE puts the page elsewhere") from None
    last = run.steps[-1]
    print(
        f"{run.name}: step {last['step']}, loss {last['loss']:.4f}, {seconds_text(run.step_seconds)} a step, "
        f"{run.rate:,.0f} tokens/s; wrote {path}"
    )
    if show:
        webbrowser.open(path.resolve().as_uri())
