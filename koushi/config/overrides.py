"""Values of a run file given on the command line: ``a.b=v``, ``--a.b v``, ``--a.b=v``, ``--tp 2``, ``--gpus 8``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from koushi.config.schema import JobConfig
from koushi.config.source import LARGEST, Branch, Entry, Found, Place, Tree, flow, scalar, shown_text

_SECTION = "parallelism"
_WORLD, _SHARD = f"{_SECTION}.world_size", f"{_SECTION}.data_parallel_shard_degree"
_OTHER_DEGREES = ("pipeline_parallel_degree", "data_parallel_replicate_degree", "tensor_parallel_degree")


@dataclass(frozen=True)
class Short:
    """An option of every command that reads a run file."""

    key: str
    takes: str
    meaning: str


SHORT = {
    "--gpus": Short(_WORLD, "N", "On N devices in all: dp_shard follows."),
    "--hardware": Short("run.hardware", "NAME|FILE", "On such devices; koushi hardware lists them."),
    "--pp": Short(f"{_SECTION}.{_OTHER_DEGREES[0]}", "N", "Pipeline parallel degree."),
    "--dp-replicate": Short(f"{_SECTION}.{_OTHER_DEGREES[1]}", "N", "Copies of the model, or of its shards."),
    "--dp-shard": Short(_SHARD, "N", "Ranks that share out the parameters; -1: what is left of the devices."),
    "--tp": Short(f"{_SECTION}.{_OTHER_DEGREES[2]}", "N", "Tensor parallel degree."),
}
_EMPTY = "write a value, null where none is meant, or leave it out"
_FORMS = "write section.key=value, or --section.key value"


@dataclass(frozen=True)
class Argument:
    """One override as written: ``text`` whole, ``name`` before its value, ``value`` not yet read (None: missing)."""

    number: int
    text: str
    name: str
    value: str | None

    @property
    def key(self) -> str:
        """Dotted."""
        return SHORT[self.name].key if self.name in SHORT else self.name.removeprefix("--")

    @property
    def place(self) -> Place:
        return Place.in_arguments(self.number, self.text, self.name in SHORT)

    @property
    def may_be_option(self) -> bool:
        """Whether it is written as an option and names neither a section nor a key in one."""
        return self.name.startswith("--") and "." not in self.key and self.key not in JobConfig.model_fields


def split_run_path(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The first argument that can be a run file, and the overrides that are left.

    One with an equals sign is the run file where it is there and names no section, or where there is no other.
    """
    standing = list(_standing(arguments))
    chosen = next(
        (index for can_be in (_is_path, _is_file, _is_yaml) for index in standing if can_be(arguments[index])),
        None,
    )
    if chosen is None:
        return None, list(arguments)
    return arguments[chosen], [*arguments[:chosen], *arguments[chosen + 1 :]]


def _standing(arguments: Sequence[str]) -> Iterator[int]:
    """Where an argument is neither an option nor the value of one."""
    takes_value = False
    for index, argument in enumerate(arguments):
        if not takes_value and not argument.startswith("-"):
            yield index
        takes_value = not takes_value and _takes_value(argument)


def _takes_value(argument: str) -> bool:
    """Whether the next argument is its value; that of ``-tp`` is, so that the message is about one mistake."""
    return "=" not in argument and (argument.startswith("--") or f"-{argument}" in SHORT)


def _is_path(argument: str) -> bool:
    return "=" not in argument or (not _names_section(argument) and _is_file(argument))


def _is_file(argument: str) -> bool:
    return os.path.isfile(argument)


def _is_yaml(argument: str) -> bool:
    return argument.endswith((".yaml", ".yml")) and not _names_section(argument)


def _names_section(argument: str) -> bool:
    return argument.partition("=")[0].partition(".")[0] in JobConfig.model_fields


def parse(arguments: Sequence[str]) -> list[Argument]:
    """Each override among ``arguments``; nothing is judged yet."""
    parsed: list[Argument] = []
    waiting = list(arguments)
    number = 0
    while waiting:
        number += 1
        text = waiting.pop(0)
        name, equals, value = text.partition("=")
        given: str | None = value if equals else None
        if _takes_value(text) and waiting and not waiting[0].startswith("--"):
            given = waiting.pop(0)
            text = f"{text} {given or shlex.quote(given)}"
        if name == "--hardware" and given is not None and os.path.isfile(given):
            given = os.path.abspath(given)  # a path in the run file would be relative to that
        parsed.append(Argument(number, text, name, given))
    return parsed


def apply(tree: Tree, arguments: Sequence[str]) -> bool:
    """Writes overrides into ``tree``, a later one over an earlier one; what cannot be read goes to ``tree.found``.

    Returns whether dp_shard was changed to follow --gpus.
    """
    parsed = parse(arguments)
    for argument in parsed:
        if not argument.key or not all(argument.key.split(".")):
            tree.found.append(Found(argument.place, "", "names no key", _FORMS))
        elif f"-{argument.name}" in SHORT:
            tree.found.append(Found(argument.place, "", "is not an option", f"did you mean -{argument.name}?"))
        elif not argument.value and argument.may_be_option and argument.name not in SHORT:
            _write(tree, argument.key, Entry(True, argument.place, argument.place))  # no key: for validate to say so
        elif not argument.value or not argument.value.strip():
            tree.found.append(_without_value(argument))
            tree.spoilt.add(argument.key)
        else:
            _write(tree, argument.key, _read(tree, argument, argument.value))
    devices = [argument.place for argument in parsed if argument.name == "--gpus"]
    if not devices or any(argument.key == _SHARD for argument in parsed):
        return False
    return _follow(tree, devices[-1])


def _follow(tree: Tree, place: Place) -> bool:
    """Where the other degrees do not divide the devices, what the run file says stays, for the check to refuse."""
    section = tree.branch[_SECTION].value if _SECTION in tree.branch else {}
    values = {key: entry.value for key, entry in section.items()} if isinstance(section, dict) else {}
    world = values.get("world_size")
    rest = 1
    for name in _OTHER_DEGREES:
        degree = values.get(name, 1)
        if not isinstance(degree, int) or degree < 1:
            return False
        rest *= degree
    if not isinstance(world, int) or not 1 <= world <= LARGEST or world % rest:
        return False
    if values.get("data_parallel_shard_degree", 1) in (-1, world // rest):
        return False
    _write(tree, _SHARD, Entry(world // rest, place, place))
    return True


def _without_value(argument: Argument) -> Found:
    if argument.value is not None:
        short = SHORT.get(argument.name)
        legal = f"write {argument.name} {short.takes}, or leave it out" if short else _EMPTY
        return Found(argument.place, argument.key, "is given no value", legal)
    if argument.text.startswith("--"):
        return Found(argument.place, argument.key, "has no value", f"write {argument.text}=value")
    if _is_yaml(argument.text) or _is_file(argument.text):
        return Found(argument.place, "", "is a second run file", "name one")
    return Found(argument.place, "", f"{shown_text(argument.text)} is not an override", _FORMS)


def _read(tree: Tree, argument: Argument, text: str) -> Entry:
    place = argument.place
    text = text.strip()
    if not text or text[0] not in "[{\"'":
        # Not through the YAML parser: `*.txt` would be an alias and `a #b` a comment.
        return Entry(scalar(text), place, place)
    try:
        inner = flow(text)
    except ValueError as error:
        tree.found.append(Found(place, argument.key, f"is not valid YAML: {error}", "check quotes and brackets"))
        tree.spoilt.add(argument.key)
        return Entry(None, place, place)
    if inner.found:
        tree.found.extend(Found(place, argument.key, one.what, one.legal) for one in inner.found)
        tree.spoilt.add(argument.key)
    return _moved(inner.branch["value"], place)


def _moved(entry: Entry, place: Place) -> Entry:
    value = entry.value
    if isinstance(value, dict):
        value = {key: _moved(child, place) for key, child in value.items()}
    elif isinstance(value, tuple):
        value = tuple(_moved(child, place) for child in value)
    return Entry(value, place, place)


def _write(tree: Tree, key: str, entry: Entry) -> None:
    *sections, name = key.split(".")
    branch: Branch = tree.branch
    for depth, section in enumerate(sections):
        above = branch.get(section)
        if above is None or not isinstance(above.value, dict):
            if above is not None and above.value is not None:
                wrong = ".".join(sections[: depth + 1])
                tree.found.append(Found(above.place, wrong, "is not a section", "a section of keys is needed"))
            # The place of an empty section in the file stays, a new one has the override's.
            place, key_place = (above.place, above.key_place) if above else (entry.place, entry.place)
            above = Entry({}, place, key_place)
            branch[section] = above
        assert isinstance(above.value, dict), "the section was made just now"
        branch = above.value
    branch[name] = entry
    if key not in {one.key for one in tree.found if one.place == entry.place}:
        tree.spoilt.discard(key)
