"""``koushi mesh --html``."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from koushi.config.load import RunFile
from koushi.hardware.hardware import load
from koushi.job import Job
from koushi.output import PAGE, check_target, write_text
from koushi.report.page.assemble import assemble
from koushi.report.page.data import page_data
from koushi.units import bytes_text


def write_page(run_file: RunFile, job: Job, path: Path, show: bool) -> str:
    """Write the page of ``job`` to ``path``; a sentence on what was written. Raises KoushiError."""
    check_target(path, PAGE, run_file.path)
    name = job.hardware
    text = assemble(job.name, page_data(run_file, job, load(name)))
    write_text(path, text, PAGE, run_file.path)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return f"wrote {path} ({bytes_text(len(text.encode()))}), planned for {name}"
