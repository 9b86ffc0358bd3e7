"""Changing values in a run file that a person wrote: all else stays as it is, to the byte."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from koushi.config.schema import PATHS
from koushi.config.source import plain, read, read_text, root_of
from koushi.config.write import value_text
from koushi.errors import ConfigError, Problem
from koushi.output import check_folder, written_beside


def write_edited(source: Path, target: Path, values: Mapping[str, object]) -> None:
    """Copy the run file ``source`` to ``target`` with ``values`` by dotted key, comments and order kept.

    ``target`` may be ``source`` itself, but no other file that is there already. In another folder the paths that
    are relative to the run file's folder lead to where they did. It is whole at every moment: written beside, then
    renamed. Raises ConfigError, also for a value that cannot be changed and has to be written by hand, and
    KoushiError as koushi.output does.
    """
    check_edit_target(source, target)
    source, target = source.resolve(), target.resolve()
    values = _from_elsewhere(source, target, values)
    before = _read(source)
    try:
        text = edited(read_text(source), {key: one for key, one in values.items() if _value_at(before, key) != one})
    except _Refused as error:
        problems = [Problem(str(source), one.key, one.what, one.legal) for one in error.refused]
        raise ConfigError(problems) from None
    with written_beside(target, text, source.name) as (beside, _):
        _prove(beside, source, values)
        shutil.copymode(source, beside)
        beside.replace(target)


def check_edit_target(source: Path, target: Path) -> None:
    """Raises ConfigError or WrongTarget where ``write_edited`` would refuse ``target``."""
    check_folder(target, source.name)
    if target.resolve() != source.resolve() and os.path.lexists(target):
        raise _refused(target, "is there already", f"a new name, or {source} itself to change it")


def _from_elsewhere(source: Path, target: Path, values: Mapping[str, object]) -> dict[str, object]:
    """``values`` and the relative paths of ``source``, as they read from the folder of ``target``."""
    found, tree = dict(values), _read(source)
    if source.parent == target.parent:
        return found
    for key in PATHS:
        section, name = key.split(".")
        branch = tree.get(section)
        path = found.get(key, branch.get(name) if isinstance(branch, dict) else None)
        if not isinstance(path, str) or not path or path.startswith("~") or os.path.isabs(path):
            continue
        plain_name = key in ("run.hardware", "data.tokenizer")  # may be the name of what ships
        if plain_name and not (source.parent / path).is_file():
            continue
        there = os.path.relpath(source.parent / path, target.parent)
        found[key] = there if "/" in there else f"./{there}"
    return found


_COMMENT = re.compile(r"([ \t]*)#[^\n]*(\n|$)")


class _ByHand(Exception):
    """A value that stands in a way that cannot be changed without touching what is around it."""

    def __init__(self, key: str, what: str, value: object):
        self.key, self.what = key, what
        self.legal = f"write {key.rpartition('.')[2]}: {value_text(value)} there by hand"


class _Refused(Exception):
    """Every value of an edit that has to be written by hand."""

    def __init__(self, refused: Sequence[_ByHand]):
        self.refused = tuple(refused)


def edited(text: str, values: Mapping[str, object]) -> str:
    """The run file ``text`` with ``values`` by dotted key. A key set to None that is not there stays away."""
    refused = []
    for key, value in values.items():
        try:
            text = _edited(text, key, value)
        except _ByHand as error:
            refused.append(error)
    if refused:
        raise _Refused(refused)
    return text


def _edited(text: str, key: str, value: object) -> str:
    """Raises _ByHand."""
    try:
        after = _with_value(text, key.split("."), value)
        root_of(after)
    except (YAMLError, AssertionError):
        raise _ByHand(key, "stands where no value can be put in", value) from None
    if _comments(text) - _comments(after):
        raise _ByHand(key, "has a comment inside, which would be lost", value)
    return after


def _comments(text: str) -> Counter[str]:
    """What is behind number signs, with how often."""
    return Counter(re.findall(r"(?:^|(?<=\s))#[^\r\n]*", text, re.MULTILINE))


def _with_value(text: str, path: list[str], value: object) -> str:
    """Raises _ByHand where that takes more than putting in a line or replacing a value."""
    key, wanted = ".".join(path), value
    node = root_of(text)
    for depth, name in enumerate(path):
        assert isinstance(node, MappingNode), f"{'.'.join(path[:depth])} is no section of a valid run file"
        if depth and node.anchor:
            raise _ByHand(key, "is in a section with an anchor or an alias", wanted)
        found = [pair for pair in node.value if pair[0].value == name]
        last = depth == len(path) - 1
        if not found or (not last and not isinstance(found[0][1], MappingNode)):
            if value is None:
                return text
            for inner in reversed(path[depth + 1 :]):
                value = {inner: value}
            if not found:
                if node.flow_style and "#" in text[node.start_mark.index : _end(node)]:
                    raise _ByHand(key, "is in a section in braces that has comments", wanted)
                return _inserted(text, node, name, value)
            if re.search(r":[ \t]*[&!*]", text[found[0][0].end_mark.index : found[0][1].end_mark.index + 1]):
                raise _ByHand(key, "is in a section with an anchor or an alias", wanted)
            return _replaced(text, found[0][1], value)  # a section written without any key
        if last:
            # An alias's node is the anchor's, which stands before its key.
            between = text[found[0][0].end_mark.index : found[0][1].start_mark.index]
            own = found[0][1].start_mark.index >= found[0][0].end_mark.index
            if not own or found[0][1].anchor or not re.fullmatch(r"\s*:(\s|#[^\n]*)*", between):
                raise _ByHand(key, "is written with an anchor, an alias or a tag", wanted)
            return _replaced(text, found[0][1], value)
        node = found[0][1]
    raise AssertionError("unreachable: the last name returns")


def _replaced(text: str, node: Node, value: object) -> str:
    start, end = node.start_mark.index, _end(node)
    new = value_text(value)
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
        return f"{before}{comma}{space}{name}: {value_text(value)}{text[brace:]}"
    column = section.start_mark.column
    if isinstance(value, dict):
        lines = [f"{name}:", *(f"  {key}: {value_text(one)}" for key, one in value.items())]
    else:
        lines = [f"{name}: {value_text(value)}"]
    newline = "\r\n" if "\r\n" in text else "\n"
    block = "".join(" " * column + line + newline for line in lines)
    at_the_top = column == 0
    end = len(text) if at_the_top else text.find("\n", _end(section))
    if end == -1:
        end = len(text)
    elif not at_the_top:
        end = _after_comments(text, end + 1, column)
    before = text[:end] if not text[:end] or text[:end].endswith("\n") else text[:end] + newline
    return before + (newline if at_the_top else "") + block + text[end:]


def _after_comments(text: str, end: int, column: int) -> int:
    """Where the lines end, from ``end`` on, of nothing but a comment further right than ``column``: they go on with
    what is said of the line before. In a section's own column stands what is about the key that follows."""
    while (line := _COMMENT.match(text, end)) and len(line[1]) > column:
        end = line.end()
    return end


def _end(node: Node) -> int:
    """Where the last thing written in ``node`` ends; a block's own mark is where the next one begins."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, MappingNode) else last)
    return int(node.end_mark.index)


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


def _value_at(values: Mapping[str, Any], key: str) -> object:
    """Lists as edits have them; None where the key is not there."""
    value: object = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return list(value) if isinstance(value, tuple) else value


def _read(path: Path) -> dict[str, Any]:
    return {key: plain(entry) for key, entry in read(path).branch.items()}


def _refused(path: Path, what: str, legal: str, key: str = "") -> ConfigError:
    return ConfigError([Problem(str(path), key, what, legal)])
