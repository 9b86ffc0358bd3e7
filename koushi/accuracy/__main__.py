"""``python -m koushi.accuracy``: how far the planner is from published runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from koushi.accuracy.document import renew
from koushi.accuracy.published import described
from koushi.accuracy.rows import FAILED, MEASURED, read
from koushi.accuracy.score import by_source, score
from koushi.accuracy.text import as_json, error_bars, report, rows_table, sweeps_table
from koushi.errors import KoushiError
from koushi.plan.plan import ACCURACY

TABLES = "tables"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=FILE, multiple=True, help="A CSV file of runs that finished, instead of the shipped one.")
@click.option("--failed", type=FILE, multiple=True, help="A CSV file of runs that failed, instead of the shipped one.")
@click.option("--source", multiple=True, help="Only this source.")
@click.option("--json", "json_wanted", is_flag=True, help="Print figures as JSON.")
@click.option("--rows", is_flag=True, help="Print every run and sweep too.")
@click.option("--write", is_flag=True, help="Renew the error bars of `koushi plan`, and the document.")
def main(
    runs: tuple[Path, ...],
    failed: tuple[Path, ...],
    source: tuple[str, ...],
    json_wanted: bool,
    rows: bool,
    write: bool,
) -> None:
    """Hold the planner against published runs: error by source, order of layouts, and what fits."""
    try:
        measured = [row for path in runs or (MEASURED,) for row in read(path)]
        lost = [row for path in failed or (() if runs else (FAILED,)) for row in read(path)]
    except KoushiError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    known = sorted({row.source for row in (*measured, *lost)})
    if unknown := [one for one in source if one not in known]:
        print(f"no source is called {unknown[0]!r}; they are {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    wanted, left_out = described(row for row in measured if not source or row.source in source)
    wanted_lost, left_out_lost = described(row for row in lost if not source or row.source in source)
    ran = [score(run) for run in wanted]
    not_run = [score(run) for run in wanted_lost]
    scores = by_source(ran, not_run)
    text = report(scores, ran, (*left_out, *left_out_lost), not_run)
    if write:
        ACCURACY.write_text(json.dumps(error_bars(scores, ran), indent=2) + "\n", encoding="utf-8")
        renew(TABLES, text)
    if json_wanted:
        print(json.dumps(as_json(scores), indent=2))
        return
    if rows:
        print(rows_table(ran), sweeps_table(scores), sep="\n\n", end="\n\n")
    print(text)


if __name__ == "__main__":
    main()
