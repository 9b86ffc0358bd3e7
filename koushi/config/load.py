"""Loading a run file: read, overridden, validated, with every problem kept for ``koushi.check``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koushi.config import overrides as command_line
from koushi.config.schema import JobConfig
from koushi.config.source import Found, Place, Tree, plain, raise_if_any, read, walk
from koushi.config.validate import validate
from koushi.errors import ConfigError


@dataclass(frozen=True)
class RunFile:
    """A run file with its overrides. ``config`` is whole only where ``found`` is empty."""

    path: Path
    values: Mapping[str, Any]
    """What the file and the command line set, as nested plain values."""
    places: Mapping[str, Place]
    """Where the value of every dotted key that is set stands; of a section: its name."""
    config: JobConfig
    """With the default in place of what is wrong."""
    found: tuple[Found, ...]
    """What is wrong with single keys and values."""
    spoilt: frozenset[str]
    """Keys whose value in ``config`` is not what was meant."""
    follows: bool = False
    """Whether dp_shard is not the file's, but what --gpus makes of it."""

    def is_set(self, key: str) -> bool:
        return key in self.places

    def is_sound(self, key: str) -> bool:
        """Whether the value of ``key`` in ``config`` is what was meant."""
        parts = key.split(".")
        return not any(".".join(parts[:end]) in self.spoilt for end in range(1, len(parts) + 1))

    def place(self, *keys: str) -> tuple[str, Place]:
        """The most telling of ``keys`` and where it stands.

        A key from the command line tells more than one of the file; else the first one that is set
        counts. Where none is set: the section of the first, or the file's first line.
        """
        present = [key for key in keys if key in self.places]
        for key in sorted(present, key=lambda one: not self.places[one].on_command_line):
            return key, self.places[key]
        section = keys[0].rpartition(".")[0]
        return keys[0], self.places.get(section, Place.in_file(self.path))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """The run file at ``path`` under ``overrides`` (command line arguments, a later one wins).

    Raises ConfigError only where nothing can be read; what is wrong with single keys stands in
    ``found``, and ``koushi.check.check.check`` reports it together with all else.
    """
    path = Path(path)
    try:
        tree = read(path)
    except ConfigError as error:
        raise _with_overrides(error, overrides) from None
    follows = command_line.apply(tree, overrides)
    config = validate(tree)
    return RunFile(
        path=path,
        values={key: plain(entry) for key, entry in tree.branch.items()},
        places={
            key: entry.key_place if isinstance(entry.value, dict) else entry.place for key, entry in walk(tree.branch)
        },
        config=config,
        found=tuple(tree.found),
        spoilt=frozenset(tree.spoilt),
        follows=follows,
    )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Only the config; raises ConfigError for anything wrong with single keys and values."""
    run_file = load(path, overrides)
    raise_if_any(list(run_file.found))
    return run_file.config


def _with_overrides(error: ConfigError, overrides: Sequence[str]) -> ConfigError:
    """What is wrong with the file together with what is wrong with the overrides alone."""
    tree = Tree()
    command_line.apply(tree, overrides)
    validate(tree)
    found = sorted(tree.found, key=lambda one: one.place)
    return ConfigError([*error.problems, *(one.problem for one in found)])
