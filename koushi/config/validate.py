"""From a tree of values to a JobConfig, and what pydantic refuses said in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from math import inf, isfinite
from typing import Any

from pydantic import ValidationError

from koushi.config.overrides import SHORT
from koushi.config.schema import JobConfig
from koushi.config.source import LARGEST, Branch, Entry, Found, Place, Tree, plain, scalar, shown_text
from koushi.config.spelling import ELSEWHERE, absent, nearest, nearest_key

Schema = Mapping[str, Any]


def validate(tree: Tree) -> JobConfig:
    """The config with what is wrong left at its default; the problems go to ``tree``.

    Keys that had to be left out, or that an unknown key most likely meant, are added to
    ``tree.spoilt``: rules that read them cannot be judged.
    """
    _rename_sections(tree)
    empty = {key for key, entry in tree.branch.items() if entry.value is None and key in JobConfig.model_fields}
    values = {key: _held(plain(entry)) for key, entry in tree.branch.items() if key not in empty}
    try:
        return JobConfig.model_validate(values, strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    for one in errors:
        location = tuple(one["loc"])
        if one["type"] == "extra_forbidden":
            _unknown(tree, ".".join(str(part) for part in location), location)
        else:
            _wrong(tree, location)
        _remove(values, location)
    return JobConfig.model_validate(values, strict=True)


def _held(value: object) -> object:
    """``value`` with numbers in place of integers that are too large to be any."""
    if isinstance(value, dict):
        return {key: _held(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_held(one) for one in value)
    return float(value) if isinstance(value, int) and abs(value) > LARGEST else value


@cache
def legal_keys() -> tuple[str, ...]:
    """Every dotted key of a run file, sections too."""
    return tuple(_keys(_whole(), ""))


def explain(value: object) -> str:
    """A value and its kind: ``'eight', a string``."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"{str(value).lower()}, a truth value"
    if isinstance(value, int):
        return f"{value}, an integer"
    if isinstance(value, float):
        return f"{value}, a number" if isfinite(value) else f"{value}"
    if isinstance(value, str):
        return f"{shown_text(value)}, a string"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    return "a section"


def _rename_sections(tree: Tree) -> None:
    """Reads a misspelled section as the one it means, so that what it holds is checked as well."""
    for name, entry in list(tree.branch.items()):
        if name in JobConfig.model_fields or not isinstance(entry.value, dict):
            continue
        close = get_close_matches(name, JobConfig.model_fields, n=1, cutoff=0.6)
        what = "is not a section of a run file"
        if missing := absent(name):
            tree.found.append(Found(entry.key_place, name, what, missing))
            del tree.branch[name]
        elif name in ELSEWHERE:  # a section of another tool, and here a key
            tree.found.append(Found(entry.key_place, name, what, f"did you mean {ELSEWHERE[name]}?"))
            del tree.branch[name]
        elif close and close[0] not in tree.branch:
            tree.found.append(Found(entry.key_place, name, what, f"did you mean {close[0]}?"))
            tree.branch[close[0]] = tree.branch.pop(name)


def _unknown(tree: Tree, key: str, location: tuple[int | str, ...]) -> None:
    entry = _entry(tree.branch, location)
    section = ".".join(str(part) for part in location[:-1])
    if not section and entry.key_place.on_command_line:
        _unknown_word(tree, key, entry.key_place)
        return
    siblings = [one[len(section) + 1 if section else 0 :] for one in legal_keys() if _parent(one) == section]
    meant = key if key in legal_keys() else nearest_key(key, legal_keys())
    what = "is not a key of a run file" if not section else f"is not a key of {section}"
    legal = f"did you mean {meant}?" if meant else f"the keys are {', '.join(siblings)}"
    if meant == key:
        legal = f"write it as a key {key.rpartition('.')[2]} under {_parent(key)}:"
    if missing := absent(key):
        legal, meant = missing, None
    tree.found.append(Found(entry.key_place, key, what, legal))
    if meant and not _is_set(tree.branch, meant):
        tree.spoilt.add(meant)


def _unknown_word(tree: Tree, name: str, place: Place) -> None:
    """``--tpp 2`` or ``tpp=2``: of a key that has a short option, that is named."""
    dashes = "--" if place.argument.startswith("--") else ""
    key = nearest_key(name, legal_keys())
    by_key = {short.key: option for option, short in SHORT.items()}
    option = by_key.get(key or "") or nearest(f"--{name}", SHORT, cutoff=0.75)
    if option is not None:
        key = SHORT[option].key
        legal = f"did you mean {option} ({key})?"
    elif key is not None:
        legal = f"did you mean {dashes}{key}?"
    else:
        sections = ", ".join(JobConfig.model_fields)
        legal = f"the options are {', '.join(SHORT)}, and --section.key value for the sections {sections}"
    what = "is not an option" if dashes else "is not a key of a run file"
    if missing := absent(name):
        legal, key = missing, None
    tree.found.append(Found(place, dashes + name, what, legal))
    if key is not None and not _is_set(tree.branch, key):
        tree.spoilt.add(key)


def _wrong(tree: Tree, location: tuple[int | str, ...]) -> None:
    names = tuple(part for part in location if isinstance(part, str))
    key = ".".join(names)
    tree.spoilt.add(key)
    entry = _entry(tree.branch, location)
    schema = schema_at(names)
    if len(names) < len(location):
        schema = schema["items"]
        item = location[-1]
        assert isinstance(item, int), "only lists have parts that are not names"
        key = f"{key}[{item}]"
    value = plain(entry)
    if any(one.key == key and one.place == entry.place for one in tree.found):
        return
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if choices:
        meant = nearest(value, choices) if isinstance(value, str) else None
        guess = f"did you mean {meant}? " if meant else ""
        listed = ", ".join(choices)
        what = f"is {shown_text(value)}" if isinstance(value, str) else f"is {explain(value)}"
        legal = f"{guess}The choices are {listed}" if guess else f"the choices are {listed}"
        tree.found.append(Found(entry.place, key, what, legal))
        return
    if isinstance(value, int | float) and LARGEST < value < inf and schema.get("type") == "integer":
        tree.found.append(Found(entry.place, key, f"is {value}, too large", f"at most {LARGEST}"))
        return
    legal = f"{needed(schema)} is needed"
    if isinstance(value, str) and schema.get("type") in ("integer", "number") and _is_number(value):
        legal += ", without quotes"
    elif isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and schema.get("type") == "integer":
        legal += f", such as {value:.0f}"
    tree.found.append(Found(entry.place, key, f"is {explain(value)}", legal))


def _is_number(text: str) -> bool:
    value = scalar(text)
    return isinstance(value, int | float) and not isinstance(value, bool)


def needed(schema: Schema) -> str:
    if "needed" in schema:
        return str(schema["needed"])
    kind = schema.get("type")
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return "a string"
    if kind == "array":
        return f"a list, each item {needed(schema['items'])},"
    if kind == "object":
        return "a section of keys"
    word = "an integer" if kind == "integer" else "a finite number"
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{word} from {low:g} to {high:g}"
    parts = [
        f"of at least {low:g}" if low is not None else "",
        f"above {above:g}" if above is not None else "",
        f"of at most {high:g}" if high is not None else "",
        f"below {below:g}" if below is not None else "",
    ]
    return " ".join([word, " and ".join(part for part in parts if part)]).strip()


def _entry(branch: Branch, location: tuple[int | str, ...]) -> Entry:
    first, *rest = location
    assert isinstance(first, str), "a location starts with a section"
    entry = branch[first]
    for part in rest:
        value = entry.value
        match value, part:
            case dict(), str():
                entry = value[part]
            case tuple(), int():
                entry = value[part]
    return entry


def _is_set(branch: Branch, key: str) -> bool:
    *sections, name = key.split(".")
    for section in sections:
        inner = branch[section].value if section in branch else None
        if not isinstance(inner, dict):
            return False
        branch = inner
    return name in branch


def _remove(values: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Takes the named key out; an item's whole list goes."""
    *sections, name = (part for part in location if isinstance(part, str))
    for section in sections:
        values = values.get(section, {})
    values.pop(name, None)


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


@cache
def _whole() -> Schema:
    return JobConfig.model_json_schema()


def _resolved(schema: Schema) -> Schema:
    """References followed, and "or empty" left away."""
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            return _resolved(choice)
    if "$ref" in schema:
        target: Schema = _whole()["$defs"][schema["$ref"].rpartition("/")[2]]
        return target
    return schema


def schema_at(names: tuple[str, ...]) -> Schema:
    schema = _whole()
    for name in names:
        schema = _resolved(schema["properties"][name])
    return schema


def _keys(schema: Schema, prefix: str) -> list[str]:
    keys: list[str] = []
    for name, child in schema["properties"].items():
        keys.append(prefix + name)
        inner = _resolved(child)
        if "properties" in inner:
            keys.extend(_keys(inner, f"{prefix}{name}."))
    return keys
