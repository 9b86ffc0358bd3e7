"""Lines of a run's files, with what a page needs of them checked. A number is finite; NaN is a gap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from koushi.errors import DataError

LARGEST = 1e30
"""Of a number: sums and differences of such are still numbers."""


class MissingField(DataError):
    """A row that lacks a field: damaged, or unfinished where it is the last."""


@dataclass(frozen=True)
class Line:
    """One JSON object, and where it stands. Every reader raises DataError that names place and field."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def number_of(self, name: str) -> float:
        """A finite number of at least 0."""
        value = self._value(name)
        if not _is_number(value) or value < 0:
            self._refuse(name, value, "a number of at least 0")
        return float(value)

    def count_of(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            self._refuse(name, value, "a whole number of at least 0")
        return int(value)

    def gap_or_number(self, name: str) -> float | None:
        """Any number; None where it is null, NaN or infinite, as a loss may become."""
        value = self._value(name)
        if value is None or (isinstance(value, float) and not isfinite(value)):
            return None
        if not _is_number(value):
            self._refuse(name, value, "a number")
        return float(value)

    def text_of(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            self._refuse(name, value, "a string")
        return value

    def numbers_of(self, name: str) -> tuple[float, ...]:
        """Finite numbers of every rank, at least one."""
        value = self._value(name)
        if not isinstance(value, list) or not value or not all(_is_number(one) for one in value):
            self._refuse(name, value, "a list of numbers, one of every rank,")
        return tuple(float(one) for one in value)

    def texts_of(self, name: str) -> tuple[str, ...]:
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self._refuse(name, value, "a list of strings, one of every rank,")
        return tuple(value)

    def bytes_of(self, name: str) -> Mapping[str, float]:
        """By submesh; empty where the field is missing."""
        value = self.fields.get(name, {})
        if not isinstance(value, dict) or not all(_is_number(one) and one >= 0 for one in value.values()):
            self._refuse(name, value, "a section of numbers by submesh")
        return {key: float(one) for key, one in value.items()}

    def damaged(self, what: str) -> NoReturn:
        raise DataError(f"{self.path}:{self.number}: {what}; the file was changed or damaged")

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise MissingField(f"{self.path}:{self.number}: has no {name}; the file was changed or damaged")
        return self.fields[name]

    def _refuse(self, name: str, value: object, legal: str) -> NoReturn:
        text = repr(value)
        shown = text if len(text) <= 60 else text[:60] + "..."
        self.damaged(f"{name} is {shown}, where {legal} is needed")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def read_lines(path: Path) -> list[Line]:
    """The JSON objects of a file, one a line; none where there is no file. What a killed process left unfinished
    of the last line is no row. Raises DataError."""
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    found: list[Line] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            what = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not a line of JSON"
            raise DataError(f"{path}:{number}: {what}; the file was changed or damaged") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: is not a JSON object; the file was changed or damaged")
        found.append(Line(path, number, row))
    return found
