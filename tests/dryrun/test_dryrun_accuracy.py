"""The dry run's memory stays as near to published runs as it has come."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from published_rows import LLAMA_8B

from koushi.accuracy.document import fenced, shown
from koushi.accuracy.rows import MEASURED, read
from koushi.dryrun.accuracy import DRY_RUNS, Figures, errors, figures, main, report
from koushi.dryrun.agreement import ALLOWED

SMALL = {
    "layers": "2", "hidden": "64", "ffn": "128", "heads": "4", "kv_heads": "2", "vocab": "256", "seq_len": "32",
    "params_b": "",
}  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, sorted({name for each in rows for name in each}))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_command_runs_a_table_of_its_own(tmp_path: Path) -> None:
    small = LLAMA_8B | SMALL
    path = table(
        tmp_path / "runs.csv", small, small | {"row_id": "two", "precision": "fp8-rowwise"}, small | {"source": "other"}
    )
    found = CliRunner().invoke(main, ["--runs", str(path), "--source", "torchtitan-example"])
    assert found.exit_code == 0, found.output
    assert "1 run of FSDP run dry, 1 row left out" in found.output and "float8" in found.output
    told = json.loads(CliRunner().invoke(main, ["--runs", str(path), "--json"]).output)
    assert [one["run"] for one in told["runs"]] == ["one", "one"]
    first = told["runs"][0]
    assert first["measured"] == 47.5
    assert first["tensors"] < first["dry_run"] == pytest.approx(first["plan"], rel=ALLOWED)
    assert told["left_out"] == [{"run": "two", "source": "torchtitan-example", "reason": "float8"}]


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["--runs", str(table(tmp_path / "other.csv", {"a": "1"}))])
    assert found.exit_code == 2 and "has no column" in found.output


@pytest.fixture(scope="module")
def held() -> Figures:
    """Every shipped run of FSDP that Koushi can run: half a minute."""
    return figures(read(MEASURED))


@pytest.mark.long
def test_errors(held: Figures) -> None:
    found, _ = errors(held.scores)
    assert found is not None and found.runs >= 16
    assert found.median <= 0.06 and found.p90 <= 0.075 and abs(found.bias) <= 0.055


@pytest.mark.long
def test_plan_and_dry_run_are_the_same(held: Figures) -> None:
    for one in held.scores:
        assert one.predicted == pytest.approx(one.planned, rel=ALLOWED), one.run.row.id


@pytest.mark.long
def test_the_document_shows_what_the_command_prints(held: Figures) -> None:
    assert shown(DRY_RUNS) == fenced(report(held))
