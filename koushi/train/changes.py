"""What differs between the run file that a checkpoint was saved under and the one that would go on. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koushi.config.schema import JobConfig

DATA = "the training data itself"

_COMPARED = ("training", "precision", "optimizer", "lr_schedule", "data")
"""Sections of the run file that say what is computed; the sizes under ``model`` are compared elsewhere."""
_LAYOUT = ("training.microbatch_size", "training.recompute", "training.compile")
"""Keys of theirs that change how it is computed alone."""
_LENGTH = "training.steps"
_DATA = "data."
"""Keys that begin so say how samples come about, and the samples themselves are compared."""


@dataclass(frozen=True)
class Change:
    key: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"

    @property
    def is_another_run(self) -> bool:
        """Whether a run does not go on with it by itself, whatever its data is."""
        return not self.is_of_length and not self.is_of_data

    @property
    def is_of_length(self) -> bool:
        """A run may get longer."""
        return self.key == _LENGTH

    @property
    def is_of_data(self) -> bool:
        return self.key.startswith(_DATA)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """What differs between two resolved run files in what is computed, whatever the layout.

    A key that the file of an older version lacks had its default.
    """
    if is_another_folder(before["model"].get("hf"), now["model"]["hf"]):
        yield Change("model.hf", before["model"]["hf"], now["model"]["hf"])
    defaults = JobConfig().model_dump(mode="json")
    for section in _COMPARED:
        older = defaults[section] | before.get(section, {})
        for key, value in now[section].items():
            name = f"{section}.{key}"
            if name not in _LAYOUT and older[key] != value:
                yield Change(name, older[key], value)


def is_another_folder(before: str | None, now: str | None) -> bool:
    """Whether a run that began from the weights in ``before`` is told to begin from others: not where there are none,
    which it goes on without, nor where the same folder was moved."""
    if now is None:
        return False
    new = Path(now)
    if before is None:
        return new.is_dir()
    old = Path(before)
    if old.is_dir():
        return not (new.is_dir() and old.samefile(new))
    return old.name != new.name
