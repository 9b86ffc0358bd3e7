"""Writing a run file with nothing left open."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from koushi.config.schema import JobConfig, Section
from koushi.config.source import scalar

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./*+-]*")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
WIDEST = 60
"""Notes stand no further to the right than this, but for keys that are longer."""


def write_resolved(config: JobConfig, path: Path) -> None:
    """Write every key of ``config``, defaults included, as a run file that ``koushi`` reads again."""
    path.write_text(resolved_text(config), encoding="utf-8")


def resolved_text(config: JobConfig, notes: Mapping[str, str] | None = None) -> str:
    """Every key of ``config`` as a run file; ``notes``, by dotted key, stand behind the values as comments."""
    lines = list(_lines(config, ""))
    notes = {key: _UNPRINTABLE.sub("?", " ".join(note.split())) for key, note in (notes or {}).items()}
    noted = [len(line) for key, line in lines if key in notes and len(line) <= WIDEST]
    column = max(noted, default=0)
    return "".join(f"{line:<{column}}  # {notes[key]}\n" if key in notes else f"{line}\n" for key, line in lines)


def value_text(value: object) -> str:
    """A value as a run file writes it: ``null``, ``true``, ``1e-05``, ``1F1B``, ``"a: b"``, ``[1, 2]``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(one) for one in value) + "]"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and scalar(value) == value):
        quoted = json.dumps(value, ensure_ascii=False)
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
    return str(value) if isinstance(value, str) else json.dumps(value)


def _lines(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    """Every line with the dotted key that stands on it."""
    indent = "  " * prefix.count(".")
    for name, value in section:
        key = prefix + name
        if isinstance(value, Section):
            yield key, f"{indent}{name}:"
            yield from _lines(value, key + ".")
        else:
            yield key, f"{indent}{name}: {value_text(value)}"
