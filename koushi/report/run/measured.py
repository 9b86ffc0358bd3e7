"""What a run's folder holds of its course: steps, validations, what was predicted, what each rank measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from koushi.errors import DataError
from koushi.report.run.rows import Line, MissingField, read_lines

Row = Mapping[str, Any]


class Began(NamedTuple):
    """A layout that a run was started or went on with."""

    step: int
    """How many were done before."""
    layout: str


@dataclass(frozen=True)
class Measured:
    """A run as its folder tells it."""

    name: str
    steps: tuple[Row, ...]
    """Rows of ``metrics.jsonl`` with a loss, in order of steps; a figure that was NaN or infinite is None."""
    validations: tuple[Row, ...]
    ranks: Row | None
    """The last row of ``ranks.jsonl`` in the last layout: figures of every rank, by rank."""
    predicted: Row | None
    """``predicted.json``: what the plan expected when the run started."""
    layouts: tuple[Began, ...] = ()
    """In order of steps, each other than the one before; none where the run did not say."""

    @property
    def step_seconds(self) -> float:
        """Median over the last layout's rows but the first, which includes what is made only once."""
        return float(median(row["step_seconds"] for row in self._of_last_layout))

    @property
    def rate(self) -> float:
        """Tokens per second of all devices, by the same rows."""
        return float(median(row["tokens_per_second"] for row in self._of_last_layout))

    @property
    def _of_last_layout(self) -> Sequence[Row]:
        began = self.layouts[-1].step if self.layouts else 0
        rows = [row for row in self.steps if row["step"] > began] or self.steps
        return rows[1:] or rows


def read_run(folder: Path) -> Measured:
    """The run in ``folder``. Raises DataError where there is none, or nothing was measured yet."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{folder} has no metrics.jsonl; give the folder of a run, such as runs/debug")
    lines = read_lines(path)
    steps = sorted(_whole(lines, "loss", _step), key=lambda row: row["step"])
    if not steps:
        raise DataError(f"{path} has no step yet; a run writes one every metrics.every steps")
    ranks, layouts = _by_layout(read_lines(folder / "ranks.jsonl"))
    predicted = _whole(read_lines(folder / "predicted.json"), "", _predicted)
    return Measured(
        name=folder.resolve().name,
        steps=tuple(steps),
        validations=tuple(_whole(lines, "validation_loss", _validation)),
        ranks=ranks,
        predicted=predicted[-1] if predicted else None,
        layouts=layouts,
    )


def _by_layout(lines: Sequence[Line]) -> tuple[Row | None, tuple[Began, ...]]:
    """The last figures of every rank in the last layout, and the layouts."""
    layouts: list[Began] = []
    since = 0
    for index, line in enumerate(lines):
        if "layout" in line:
            began = Began(line.count_of("step"), line.text_of("layout"))
            layouts = [one for one in layouts if one.step < began.step]  # the run went back to before the others
            if not layouts or layouts[-1].layout != began.layout:
                layouts.append(began)
                since = index
    ranks = _whole(lines[since:], "waited_seconds", _ranks)
    return ranks[-1] if ranks else None, tuple(layouts)


def _whole(lines: Sequence[Line], having: str, read: Callable[[Line], Row]) -> list[Row]:
    """Rows with the field ``having``; a last line that lacks fields is of a run that was killed, and is no row."""
    found = []
    for index, line in enumerate(lines):
        if having and having not in line:
            continue
        try:
            found.append(read(line))
        except MissingField:
            if index < len(lines) - 1:
                raise
    return found


def _step(line: Line) -> Row:
    amounts = ("tokens_per_second", "step_seconds", "elapsed_seconds")
    gaps = ("loss", "grad_norm", "lr")
    return {
        "step": line.count_of("step"),
        "samples": line.count_of("samples"),
        **{name: line.number_of(name) for name in amounts},
        **{name: line.gap_or_number(name) for name in gaps},
        **{name: line.gap_or_number(name) if name in line else None for name in ("memory_bytes", "mfu")},
    }


def _validation(line: Line) -> Row:
    return {"step": line.count_of("step"), "validation_loss": line.gap_or_number("validation_loss")}


def _ranks(line: Line) -> Row:
    found = {
        "waited_seconds": line.numbers_of("waited_seconds"),
        "memory_bytes": line.numbers_of("memory_bytes"),
        "coordinates": line.texts_of("coordinates"),
        "bytes": line.bytes_of("bytes"),
    }
    if not len(found["waited_seconds"]) == len(found["memory_bytes"]) == len(found["coordinates"]):
        line.damaged("waited_seconds, memory_bytes and coordinates are not of the same ranks")
    return found


def _predicted(line: Line) -> Row:
    return {
        "hardware": line.text_of("hardware"),
        "device": line.text_of("device" if "device" in line else "hardware"),  # earlier runs named no CPU but ``cpu``
        "step_seconds": line.number_of("step_seconds"),
        "memory_bytes": line.number_of("memory_bytes"),
        "bytes": line.bytes_of("bytes"),
    }
