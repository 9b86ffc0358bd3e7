"""Every key of a run file with its type, default and meaning, read from the schema's own source. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import get_args

from pydantic import BaseModel

from koushi.config import schema
from koushi.config.schema import JobConfig, Section
from koushi.config.spelling import nearest_key
from koushi.config.validate import legal_keys, needed, schema_at
from koushi.config.write import value_text
from koushi.errors import ConfigError, Problem


@dataclass(frozen=True)
class Key:
    """One key; of a section ``default`` is None and ``kind`` empty."""

    name: str
    """Dotted."""
    kind: str
    """What its value may be, in words."""
    default: object
    meaning: str
    is_section: bool = False


@cache
def keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema, each section before what it holds."""
    return tuple(_keys(JobConfig, ""))


def schema_text(names: Sequence[str] = ()) -> str:
    """Keys with default, meaning and type for people: all, or those that ``names`` name, a section with what it holds.

    Raises ConfigError for a name that is no key, with the nearest.
    """
    unknown = [name for name in names if name not in legal_keys()]
    if unknown:
        what = "is not a key of a run file"
        raise ConfigError([Problem("command line", name, what, _meant(name)) for name in unknown])
    lines: list[str] = []
    for key in keys():
        if names and not any(f"{key.name}.".startswith(f"{name}.") for name in names):
            continue
        if key.is_section:
            lines += ["", f"{key.name}: {key.meaning}"] if lines else [f"{key.name}: {key.meaning}"]
        else:
            lines += [f"  {key.name}: {value_text(key.default)}", f"      {key.meaning} {_sentence(key.kind)}"]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _meant(name: str) -> str:
    meant = nearest_key(name, legal_keys())
    return f"did you mean {meant}?" if meant else f"the sections are {', '.join(JobConfig.model_fields)}"


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    meanings = _docstrings()
    for name, field in section.model_fields.items():
        dotted = prefix + name
        inner = _section(field.annotation)
        may_be_empty = NoneType in get_args(field.annotation)
        if inner is None:
            yield Key(dotted, _kind(dotted, may_be_empty), field.default, meanings[section.__name__, name])
        else:
            yield Key(dotted, "", None, meanings[inner.__name__, ""], is_section=True)
            yield from _keys(inner, dotted + ".")


def _section(annotation: object) -> type[Section] | None:
    """The section that a field holds, also where it may be empty."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


def _kind(dotted: str, may_be_empty: bool) -> str:
    about = schema_at(tuple(dotted.split(".")))
    choices = about.get("enum") or ([about["const"]] if "const" in about else None)
    text = f"one of {', '.join(choices)}" if choices else needed(about).removesuffix(",")
    return f"{text}, or empty" if may_be_empty else text


@cache
def _docstrings() -> dict[tuple[str, str], str]:
    """What stands under every field of the schema, by class and field; of a class itself under no field."""
    assert schema.__file__ is not None, "the schema is a file"
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(Path(schema.__file__).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        if about := ast.get_docstring(node):
            found[node.name, ""] = " ".join(about.split())
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[node.name, name] = " ".join(text.split())
    return found
