"""Changing values in a run file that a person wrote: all else stays as it is, to the byte."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from koushi.config.source import plain, read, read_text, root_of, scalar
from koushi.errors import ConfigError, Problem

_SIMPLE = re.compile(r"[A-Za-z0-9_./~-]+")


def write_edited(source: Path, target: Path, values: Mapping[str, object]) -> None:
    """Copy the run file ``source`` to ``target`` with ``values`` by dotted key, comments and order kept.

    ``target`` may be ``source`` itself, but no other file that is there already: raises ConfigError.
    It is whole at every moment: written beside, then renamed.
    """
    source, target = source.resolve(), target.resolve()
    if target != source and target.exists():
        raise _refused(target, "is there already", f"a new name, or {source} itself to change it")
    text = edited(read_text(source), values)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _refused(target, f"cannot be written: {error.strerror}", "a file in a folder that is there") from None
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _prove(beside, source, values)
        shutil.copymode(source, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def edited(text: str, values: Mapping[str, object]) -> str:
    """The run file ``text`` with ``values`` by dotted key. A key set to None that is not there stays away."""
    for key, value in values.items():
        text = _with_value(text, key.split("."), value)
    return text


def _with_value(text: str, path: list[str], value: object) -> str:
    node = root_of(text)
    for depth, name in enumerate(path):
        assert isinstance(node, MappingNode), f"{'.'.join(path[:depth])} is no section of a valid run file"
        found = [pair for pair in node.value if pair[0].value == name]
        last = depth == len(path) - 1
        if not found or (not last and not isinstance(found[0][1], MappingNode)):
            if value is None:
                return text
            for inner in reversed(path[depth + 1 :]):
                value = {inner: value}
            if not found:
                return _inserted(text, node, name, value)
            return _replaced(text, found[0][1], value)  # a section written without any key
        if last:
            return _replaced(text, found[0][1], value)
        node = found[0][1]
    raise AssertionError("unreachable: the last name returns")


def _replaced(text: str, node: Node, value: object) -> str:
    start, end = node.start_mark.index, _end(node)
    new = shown(value)
    if start == end:  # an empty value stands where the next token begins, or at the end of its own key
        colon = text.rindex(":", 0, start) + 1
        return f"{text[:colon]} {new}{text[colon:]}"
    rest = text[end:]
    comment = re.match(r"( +)#", rest)
    if comment:
        # A comment keeps its column where there is room.
        spaces = max(1, len(comment[1]) + (end - start) - len(new))
        rest = " " * spaces + rest[len(comment[1]) :]
    return text[:start] + new + rest


def _inserted(text: str, section: MappingNode, name: str, value: object) -> str:
    """With a new key at the end of ``section``."""
    if section.flow_style:
        brace = _end(section) - 1
        before = text[:brace].rstrip()
        comma = "" if before.endswith(("{", ",")) else ","
        space = "" if before.endswith("{") else " "
        return f"{before}{comma}{space}{name}: {shown(value)}{text[brace:]}"
    column = section.start_mark.column
    if isinstance(value, dict):
        lines = [f"{name}:", *(f"  {key}: {shown(one)}" for key, one in value.items())]
    else:
        lines = [f"{name}: {shown(value)}"]
    block = "".join(" " * column + line + "\n" for line in lines)
    at_the_top = column == 0
    end = len(text) if at_the_top else text.find("\n", _end(section))
    if end == -1:
        end = len(text)
    elif not at_the_top:
        end += 1
    before = text[:end] if not text[:end] or text[:end].endswith("\n") else text[:end] + "\n"
    return before + ("\n" if at_the_top else "") + block + text[end:]


def _end(node: Node) -> int:
    """Where the last thing written in ``node`` ends; a block's own mark is where the next one begins."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, MappingNode) else last)
    return int(node.end_mark.index)


def shown(value: object) -> str:
    """As YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(one) for one in value) + "]"
    if isinstance(value, str):
        return value if _SIMPLE.fullmatch(value) and scalar(value) == value else json.dumps(value, ensure_ascii=False)
    return repr(value)


def _prove(written: Path, source: Path, values: Mapping[str, object]) -> None:
    """Raises ConfigError unless ``written`` reads as ``source`` does with ``values`` in it."""
    wanted: dict[str, Any] = _read(source)
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = wanted
        for section in sections:
            if value is None and not isinstance(branch.get(section), dict):
                break
            if not isinstance(branch.get(section), dict):
                branch[section] = {}
            branch = branch[section]
        else:
            if value is not None or name in branch:
                branch[name] = tuple(value) if isinstance(value, list) else value
    if _read(written) != wanted:
        what = "has values that cannot be changed one by one, such as a section used twice through an alias"
        raise _refused(source, what, "write such values out")


def _read(path: Path) -> dict[str, Any]:
    return {key: plain(entry) for key, entry in read(path).branch.items()}


def _refused(path: Path, what: str, legal: str) -> ConfigError:
    return ConfigError([Problem(str(path), "", what, legal)])
