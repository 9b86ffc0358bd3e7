"""A run file as a tree whose every key and value knows where it stands. Nothing in it is executed.

YAML 1.2: ``no`` is a string, ``3e-4`` a number. Only plain values are read: null, true and false,
integers, numbers, strings, lists and sections.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, StreamMark, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from koushi.errors import ConfigError, Problem

Scalar = None | bool | int | float | str
Branch = dict[str, "Entry"]

MAX_VALUES = 100_000
"""What a file may hold once its aliases are written out."""
MAX_BYTES = 1 << 20
MAX_DEPTH = 20
LARGEST = 2**63 - 1
"""Of an integer in a run file."""
MAX_BITS = 128
"""Of an integer whose every digit is read; a larger one is a number."""

_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value", "map", "seq")}
_TRUE = ("true", "yes", "on")


@dataclass(frozen=True)
class Kind:
    """What a file is for, in the words of messages."""

    called: str
    """Such as ``a run file``."""
    needed: str
    """What such a file holds."""


RUN_FILE = Kind("a run file", "sections of keys are needed, such as `model: {name: llama3-debug}`")


@dataclass(frozen=True, order=True)
class Place:
    """Where something stands. Sorts by place in the file, the command line after it."""

    on_command_line: bool
    line: int
    """From 1; on the command line the number of the argument."""
    column: int
    text: str
    argument: str = ""
    """On the command line: as written, an option with its value."""
    is_short: bool = False
    """Whether the argument is an option that has another name than the key."""

    @classmethod
    def in_file(cls, path: Path, line: int = 1, column: int = 1) -> Place:
        return cls(False, line, column, f"{path}:{line}:{column}")

    @classmethod
    def in_arguments(cls, number: int, argument: str, is_short: bool = False) -> Place:
        return cls(True, number, 0, f"command line ({argument})", argument, is_short)


@dataclass(frozen=True)
class Entry:
    """A value, where it stands, and where its key stands (an item of a list: the value's own place)."""

    value: Scalar | tuple[Entry, ...] | Branch
    place: Place
    key_place: Place


@dataclass(frozen=True)
class Found:
    """A problem with a place to sort it by."""

    place: Place
    key: str
    what: str
    legal: str = ""

    @property
    def problem(self) -> Problem:
        option = self.place.argument if self.place.is_short else ""
        return Problem(self.place.text, self.key, self.what, self.legal, option)


def raise_if_any(found: list[Found]) -> None:
    """Raises ConfigError with every problem once, in the order of the file."""
    if found:
        ordered = sorted(found, key=lambda one: (one.place, one.key))
        raise ConfigError(list(dict.fromkeys(one.problem for one in ordered)))


def plain(entry: Entry) -> object:
    """The value without places; lists become tuples."""
    if isinstance(entry.value, dict):
        return {key: plain(child) for key, child in entry.value.items()}
    if isinstance(entry.value, tuple):
        return tuple(plain(child) for child in entry.value)
    return entry.value


def walk(branch: Branch, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every entry with its dotted key, sections before what they hold."""
    for key, entry in branch.items():
        yield prefix + key, entry
        if isinstance(entry.value, dict):
            yield from walk(entry.value, f"{prefix}{key}.")


@dataclass
class Tree:
    """What was read: the sections, what is wrong with them, and keys whose value is not to be trusted."""

    branch: Branch = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)


def read(path: Path, kind: Kind = RUN_FILE) -> Tree:
    """The tree of the file at ``path``.

    Duplicate keys and values that YAML has but a run file cannot hold are in ``found``; raises
    ConfigError when the file as a whole cannot be read.
    """
    text = read_text(path, kind)
    if path.suffix.lower() == ".toml":
        legal = "" if kind is not RUN_FILE else "[training] with steps = 10 is written `training: {steps: 10}`"
        raise _refusal(Place.in_file(path), f"is TOML, and {kind.called} is YAML", legal)
    try:
        node = root_of(text)
    except RecursionError:
        raise _refusal(Place.in_file(path), "is nested too deeply", f"at most {MAX_DEPTH} levels are read") from None
    except ReaderError as error:
        line, column = _line_and_column(text, error.position)
        shown = f"holds the unprintable character {error.character!r}"
        raise _refusal(Place.in_file(path, line, column), shown, "remove it") from None
    except MarkedYAMLError as error:
        raise _syntax_refusal(path, error) from None
    except (YAMLError, ValueError, AttributeError, IndexError, TypeError, NotImplementedError) as error:
        # ruamel.yaml meets some malformed files with an error of its own workings.
        raise _refusal(Place.in_file(path), f"is not valid YAML: {error}") from None
    if node is None or (isinstance(node, ScalarNode) and node.tag == _TAG + "null"):
        raise _refusal(Place.in_file(path), "is empty", kind.needed)
    if not isinstance(node, MappingNode):
        what = "holds a list" if isinstance(node, SequenceNode) else f"holds only {shown_text(str(node.value))}"
        raise _refusal(_place(path, node.start_mark), what, kind.needed)
    reader = _Reader(path)
    reader.tree.branch = reader.branch(node, "", ())
    return reader.tree


def scalar(text: str) -> Scalar:
    """An unquoted YAML 1.2 scalar: what ``text`` would mean in a run file."""
    tag = YAML(typ="safe", pure=True).resolver.resolve(ScalarNode, text, (True, False))
    return _convert(str(tag), text)


def flow(text: str) -> Tree:
    """A quoted or bracketed YAML value, under the key ``value``; raises ValueError when it is not valid YAML."""
    try:
        node = root_of(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except MarkedYAMLError as error:
        raise ValueError(str(error.problem or error.context)) from None
    except (YAMLError, AttributeError, IndexError, TypeError, NotImplementedError) as error:
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    if node is None:
        raise ValueError("no value")
    reader = _Reader(Path())
    reader.tree.branch = {"value": reader.entry(node, "", Place.in_file(Path()), ())}
    return reader.tree


def root_of(text: str) -> Node | None:
    """The YAML nodes of ``text``, None where it holds nothing; raises what ruamel.yaml raises."""
    with warnings.catch_warnings():
        # An anchor that is written twice is legal; the nearest one above counts.
        warnings.simplefilter("ignore", ReusedAnchorWarning)
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
        return node


def shown_text(text: str, limit: int = 60) -> str:
    """A string as a message shows it: quoted, and cut when long."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


class _Reader:
    """Turns YAML nodes into entries."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = Tree()
        self.count = 0

    def branch(self, node: MappingNode, key: str, above: tuple[int, ...]) -> Branch:
        branch: Branch = {}
        for key_node, value_node in node.value:
            name = self.name(key_node, key)
            if name is None:
                continue
            dotted = f"{key}.{name}" if key else name
            place = _place(self.path, key_node.start_mark)
            entry = self.entry(value_node, dotted, place, (*above, id(node)))
            if name in branch:
                self.duplicate(branch, name, dotted, entry)
            else:
                branch[name] = entry
        return branch

    def duplicate(self, branch: Branch, name: str, dotted: str, entry: Entry) -> None:
        first = branch[name]
        what = f"is written twice, first on line {first.key_place.line}"
        self.tree.found.append(Found(entry.key_place, dotted, what, "remove one of the two"))
        if isinstance(first.value, dict) and isinstance(entry.value, dict):
            # Two sections of one name are read as one, so that what both hold is checked.
            branch[name] = Entry(first.value | entry.value, first.place, first.key_place)
            twice = [f"{dotted}.{key}" for key in first.value if key in entry.value]
            self.tree.spoilt.update(twice)
        else:
            self.tree.spoilt.add(dotted)
            branch[name] = entry

    def name(self, node: Node, section: str) -> str | None:
        place = _place(self.path, node.start_mark)
        if isinstance(node, ScalarNode) and node.tag == _TAG + "merge":
            self.tree.found.append(Found(place, section, "merges another section with <<", "write its keys out"))
            return None
        if isinstance(node, ScalarNode) and (node.tag == _TAG + "str" or node.tag == _TAG + "value"):
            return str(node.value)
        shown = str(node.value)[:60] if isinstance(node, ScalarNode) else "a list or section"
        self.tree.found.append(Found(place, section, f"has a key that is not a name: {shown}", "keys are names"))
        return None

    def entry(self, node: Node, key: str, key_place: Place, above: tuple[int, ...]) -> Entry:
        place = _place(self.path, node.start_mark)
        tag = str(node.tag)
        if tag not in _TAGS:
            shown = tag.replace(_TAG, "!!")
            self.tree.found.append(Found(place, key, f"has the tag {shown}", "only plain values are read"))
            self.tree.spoilt.add(key)
        self.count += 1
        if id(node) in above or len(above) > MAX_DEPTH or self.count > MAX_VALUES:
            what, legal = "is nested too deeply", f"at most {MAX_DEPTH} levels are read"
            if id(node) in above:
                what, legal = "holds itself through an alias", "write the value out"
            elif self.count > MAX_VALUES:
                what, legal = "is too large once aliases are written out", f"at most {MAX_VALUES} values are read"
            raise _refusal(key_place, what, legal, key)
        if isinstance(node, MappingNode):
            return Entry(self.branch(node, key, above), place, key_place)
        if isinstance(node, SequenceNode):
            inside = (*above, id(node))
            items = (self.entry(item, key, _place(self.path, item.start_mark), inside) for item in node.value)
            return Entry(tuple(items), place, key_place)
        return Entry(_convert(tag, str(node.value)), place, key_place)


def _convert(tag: str, text: str) -> Scalar:
    kind = tag.removeprefix(_TAG)
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in _TRUE
        if kind == "int":
            base = 0 if text.lstrip("+-")[:2].lower() in ("0x", "0o", "0b") else 10
            value = int(text.replace("_", ""), base)
            return value if value.bit_length() <= MAX_BITS else float(value)
        if kind == "float":
            return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    except (ValueError, OverflowError):
        # Such as sexagesimal 1:30 under `%YAML 1.1`, or an integer beyond what Python reads.
        return text
    return text


def read_text(path: Path, kind: Kind = RUN_FILE) -> str:
    """The text of a run file, or of another ``kind``; raises ConfigError where it cannot be read."""
    place = Place.in_file(path)
    try:
        about = path.stat()
        if not (S_ISREG(about.st_mode) or S_ISDIR(about.st_mode)):
            raise _refusal(place, "is not a regular file, but a device, a pipe or a socket", f"name {kind.called}")
        if about.st_size > MAX_BYTES:
            raise _refusal(place, f"has {about.st_size} bytes", f"{kind.called} has at most {MAX_BYTES}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refusal(place, "no such file", _files_nearby(path)) from None
    except IsADirectoryError:
        raise _refusal(place, "is a folder", f"name {kind.called}" + _files_inside(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise _refusal(place, f"cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} (line {line})"
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise _refusal(Place.in_file(path, line, column), what, "save it as UTF-8") from None


def _files_inside(folder: Path) -> str:
    try:
        names = sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml"))[:5]
    except OSError:
        names = []
    return f" in it: {', '.join(names)}" if names else ""


def _files_nearby(path: Path) -> str:
    inside = _files_inside(path.parent)
    if not inside:
        return "check the path"
    return f".yaml files{inside.replace('in it', 'beside it')}"


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1) + 1


def _place(path: Path, mark: StreamMark) -> Place:
    return Place.in_file(path, mark.line + 1, mark.column + 1)


def _refusal(place: Place, what: str, legal: str = "", key: str = "") -> ConfigError:
    return ConfigError([Found(place, key, what, legal).problem])


def _syntax_refusal(path: Path, error: MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = _place(path, mark) if mark else Place.in_file(path)
    reason = str(error.problem or error.context or "cannot be read").strip()
    if error.context and error.problem:
        reason = f"{reason} ({str(error.context).strip()})"
    legal = "indent with spaces" if "\\t" in reason else ""
    return _refusal(place, f"is not valid YAML: {' '.join(reason.split())}", legal)
