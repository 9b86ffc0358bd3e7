"""Values of a run file given on the command line: ``a.b=v``, ``--a.b v``, ``--a.b=v``, ``--tp 2``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from koushi.config.schema import JobConfig
from koushi.config.source import Branch, Entry, Found, Place, Tree, flow, scalar, shown_text

SHORT = {
    "--tp": "parallelism.tensor_parallel_degree",
    "--pp": "parallelism.pipeline_parallel_degree",
    "--dp-shard": "parallelism.data_parallel_shard_degree",
    "--dp-replicate": "parallelism.data_parallel_replicate_degree",
}
_FORMS = "write section.key=value, or --section.key value"


@dataclass(frozen=True)
class Argument:
    """One override as written: ``text`` whole, ``key`` dotted, ``value`` not yet read (None: missing)."""

    number: int
    text: str
    key: str
    value: str | None

    @property
    def place(self) -> Place:
        return Place.in_arguments(self.number, self.text)


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
        takes_value = not takes_value and argument.startswith("--") and "=" not in argument


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
        if name.startswith("--") and not equals and waiting and not waiting[0].startswith("--"):
            given = waiting.pop(0)
            text = f"{text} {given}"
        key = SHORT.get(name, name.removeprefix("--"))
        parsed.append(Argument(number, text, key, given))
    return parsed


def apply(tree: Tree, arguments: Sequence[str]) -> None:
    """Writes overrides into ``tree``, a later one over an earlier one; what cannot be read goes to ``tree.found``."""
    for argument in parse(arguments):
        if not argument.key or not all(argument.key.split(".")):
            tree.found.append(Found(argument.place, "", "names no key", _FORMS))
        elif argument.value is None:
            tree.found.append(_without_value(argument))
            tree.spoilt.add(argument.key)
        else:
            _write(tree, argument, _read(tree, argument, argument.value))


def _without_value(argument: Argument) -> Found:
    if argument.text.startswith("--"):
        return Found(argument.place, argument.key, "has no value", f"write {argument.text}=value")
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


def _write(tree: Tree, argument: Argument, entry: Entry) -> None:
    *sections, name = argument.key.split(".")
    branch: Branch = tree.branch
    for depth, section in enumerate(sections):
        above = branch.get(section)
        if above is None or not isinstance(above.value, dict):
            if above is not None and above.value is not None:
                key = ".".join(sections[: depth + 1])
                tree.found.append(Found(above.place, key, "is not a section", "a section of keys is needed"))
            # The place of an empty section in the file stays, a new one has the override's.
            place, key_place = (above.place, above.key_place) if above else (entry.place, entry.place)
            above = Entry({}, place, key_place)
            branch[section] = above
        assert isinstance(above.value, dict), "the section was made just now"
        branch = above.value
    branch[name] = entry
    if argument.key not in {one.key for one in tree.found if one.place == entry.place}:
        tree.spoilt.discard(argument.key)
