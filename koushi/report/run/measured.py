"""What a run's folder holds of its course: steps, validations, what was predicted, what each rank measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from koushi.errors import DataError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """A run as its folder tells it."""

    name: str
    steps: tuple[Row, ...]
    """Rows of ``metrics.jsonl`` with a loss, in order of steps."""
    validations: tuple[Row, ...]
    ranks: Row | None
    """The last row of ``ranks.jsonl``: figures of every rank, by rank."""
    predicted: Row | None
    """``predicted.json``: what the plan expected when the run started."""

    @property
    def step_seconds(self) -> float:
        """Median over the rows but the first, which includes what is made only once."""
        return float(median(row["step_seconds"] for row in self.steps[1:] or self.steps))

    @property
    def rate(self) -> float:
        """Tokens per second of all devices, by the same rows."""
        return float(median(row["tokens_per_second"] for row in self.steps[1:] or self.steps))


def read_run(folder: Path) -> Measured:
    """The run in ``folder``. Raises DataError where there is none, or nothing was measured yet."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{folder} has no metrics.jsonl; give the folder of a run, such as runs/debug")
    rows = _rows(path)
    steps = tuple(sorted((row for row in rows if "loss" in row), key=lambda row: row["step"]))
    if not steps:
        raise DataError(f"{path} has no step yet; a run writes one every metrics.every steps")
    ranks = _rows(folder / "ranks.jsonl")
    predicted = _rows(folder / "predicted.json")
    return Measured(
        name=folder.resolve().name,
        steps=steps,
        validations=tuple(row for row in rows if "validation_loss" in row),
        ranks=ranks[-1] if ranks else None,
        predicted=predicted[-1] if predicted else None,
    )


def _rows(path: Path) -> list[Row]:
    """The JSON objects of a file, one a line; a last line that a killed process left unfinished is no row."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise DataError(f"{path}:{number}: is not a line of JSON; the file was changed or damaged") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: is not a JSON object; the file was changed or damaged")
        found.append(row)
    return found
