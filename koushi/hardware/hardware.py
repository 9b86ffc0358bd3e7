"""Hardware as data: chips, hosts and links, read from YAML files. No torch.

The shipped files stand in ``data/``; a user's own file has the same form, and may leave out the fields that have a
default here. A domain is the set of devices that the inner link joins: a node, or a rack where the link leaves the
node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from koushi.config.source import Branch, Entry, Kind, Place, plain, read
from koushi.config.spelling import nearest
from koushi.errors import ConfigError, Problem
from koushi.hardware.ranges import ANY_OF, DTYPES, PEAK, RANGES, Range

DATA = Path(__file__).parent / "data"
HARDWARE_FILE = Kind("a hardware file", "keys are needed, such as `name: my-device`; the shipped files are examples")
MISSING_KEY = "is missing"
MUCH = 5
"""Keys that are missing, from which on a file is told what to begin with."""

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, eq=False)
class Chip:
    """One device: what it could do at most, and the shares of that which kernels reach."""

    memory_gib: float
    """What programs can use, in 2^30 bytes."""
    memory_gb_s: float
    """Peak memory bandwidth, in 10^9 bytes per second."""
    peak_tflops: Mapping[str, float]
    """Dense matmul peak by dtype."""
    units: int
    """Processors that work on tiles of a matmul side by side: SMs, CUs, or 1."""
    sustained: float
    """Share of the peak that large matmuls hold over a whole step, within the power limit."""
    burst: float
    """Share of the peak that full tiles reach while power does not limit them."""
    streaming: float
    """Share of the memory bandwidth that elementwise kernels reach."""
    released: float
    """What matmuls reach of that with the libraries of a torch release, not the vendor's newest."""
    released_float8: float
    """The same of matmuls in float8, whose kernels in torch are younger."""
    attention_forward: float
    """Share of the peak that FlashAttention-2 reaches on long sequences with heads of 128."""
    attention_backward: float
    newest_attention: float
    """How much faster the attention made for this chip is than FlashAttention-2."""
    kernel_us: float
    """The least time of a kernel on the device, with the gap to the next."""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    @property
    def memory_bandwidth(self) -> float:
        """In bytes per second."""
        return self.memory_gb_s * 1e9

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense matmuls; a dtype that the file leaves out goes at the rate of a wider one."""
        for name in (dtype, "bfloat16" if dtype == "float8" else dtype, "float16", "float32"):
            if name in self.peak_tflops:
                return self.peak_tflops[name] * 1e12
        raise AssertionError("a hardware file always has float32 or float16")


@dataclass(frozen=True, eq=False)
class Host:
    """What the processor that feeds a device costs."""

    launch_us: float
    """Host time of one eager operation: Python, dispatch and launch. Autograd's backward takes about half."""
    step_ms: float
    """Host time of a step that nothing hides: data, logging, the wait for the loss."""


@dataclass(frozen=True, eq=False)
class Link:
    """What joins devices: inside a domain, or between domains."""

    name: str
    devices: int
    """Devices of one domain; 0: any number."""
    gb_s: float
    """Per device and direction, in 10^9 bytes per second."""
    reached: float
    """Share of it that large collectives reach."""
    call_us: float
    """Cost of a collective, however small and few its ranks."""
    hop_us: float
    """Latency of one hop from rank to rank."""
    large_start: float = field(default=1.0, kw_only=True)
    """How many times the latency of a small message a large one takes to start. 1: all are sent alike."""
    crowding: float
    """How much an all-reduce's bandwidth falls with every further domain: 1 / (1 + crowding x (domains - 1)) where all
    devices of a domain take part, less where fewer do, in proportion."""
    reduces: bool
    """Whether the switch adds up what passes through it, so that an all-reduce crosses a link once."""
    direct: bool = field(default=False, kw_only=True)
    """Whether there is no switch, but a link between every two devices of a domain, each with an even share of
    ``gb_s``: a group of 2 has one of them, a group of 4 three."""

    @property
    def bandwidth(self) -> float:
        """What large collectives get, in bytes per second and direction."""
        return self.gb_s * self.reached * 1e9

    def share(self, ranks: int) -> float:
        """Of the bandwidth, what so many devices of a domain can use among themselves."""
        return (ranks - 1) / (self.devices - 1) if self.direct and 1 < ranks < self.devices else 1.0


@dataclass(frozen=True, eq=False)
class Hardware:
    """A cluster of alike devices."""

    name: str
    description: str
    aliases: tuple[str, ...] = field(default=(), kw_only=True)
    device_names: tuple[str, ...]
    """Words that torch's name of the device holds, by which a running job finds its peak."""
    device: Device = field(default="gpu", kw_only=True)
    """Whose kernels, allocator and communication library a job on it has: a CPU's with gloo, or a GPU's with NCCL."""
    devices_per_node: int
    chip: Chip
    host: Host
    inside: Link
    """Within a domain."""
    network: Link
    """Between domains."""
    variation: float
    """Standard deviation of a device's speed over its like; the slowest of many sets the pace."""

    def with_network(self, gb_s: float) -> Hardware:
        """The same devices with another network bandwidth per device and direction."""
        return dataclasses.replace(self, network=dataclasses.replace(self.network, gb_s=gb_s))

    @property
    def is_shipped(self) -> bool:
        """Whether it is what ships under its name, unchanged."""
        return self.name in names() and self is _shipped(self.name)


ASSUMED = "h100-sxm-80gb"
"""Where nobody names hardware, nor asks for the CPU."""


def load(name_or_path: str) -> Hardware:
    """The shipped hardware of that name or alias, or that of the user's file.

    Raises ConfigError, naming what is known, for anything else.
    """
    known = _names()
    if name_or_path.casefold() in known:
        return _shipped(known[name_or_path.casefold()])
    path = Path(name_or_path)
    if name_or_path and (path.suffix in (".yaml", ".yml") or _is_there(path)):
        return read_file(path)
    meant = nearest(name_or_path, known) if name_or_path else None
    guess = f"did you mean {meant}? The" if meant else "the"
    legal = f"{guess} names are {', '.join(names())}; or give the path of a hardware file (.yaml)"
    raise ConfigError([Problem("command line", "hardware", f"no hardware is called {name_or_path!r}", legal)])


@cache
def names() -> tuple[str, ...]:
    """The shipped hardware."""
    return tuple(sorted(path.stem for path in DATA.glob("*.yaml")))


def read_file(path: Path) -> Hardware:
    """The hardware that a file describes; raises ConfigError with everything that is wrong with it."""
    tree = read(path, HARDWARE_FILE)
    problems = [one.problem for one in tree.found]
    hardware = _made(Hardware, tree.branch, "", Place.in_file(path), problems)
    if isinstance(hardware, Hardware):
        problems += _of_links(hardware, tree.branch)
    if sum(one.what == MISSING_KEY for one in problems) >= MUCH:
        start = "begin with `koushi hardware h100 > mine.yaml`, and change what differs; docs/hardware.md has every key"
        problems.append(Problem(str(path), "", "leaves out much of a hardware file", start))
    if problems:
        raise ConfigError(problems)
    assert isinstance(hardware, Hardware), "a file without problems describes a whole"
    return hardware


def _of_links(hardware: Hardware, branch: Branch) -> Iterator[Problem]:
    """What cannot be of links without a switch."""
    for name, link in (("inside", hardware.inside), ("network", hardware.network)):
        section = branch[name].value
        if not link.direct or not isinstance(section, dict):
            continue
        what, legal = "is true", ""
        if name == "network":
            legal = "false is needed: between domains there are always switches"
        elif link.devices < 2:
            what, legal = f"is true, but {name}.devices is {link.devices}", "at least 2 are needed for a link between"
        elif link.reduces:
            what, legal = f"is true, and {name}.reduces too", "one of the two: only a switch adds up"
        if legal:
            yield Problem(section["direct"].place.text, f"{name}.direct", what, legal)


@cache
def _shipped(name: str) -> Hardware:
    return read_file(DATA / f"{name}.yaml")


@cache
def _names() -> Mapping[str, str]:
    """Names and aliases, to the name of the file; aliases are in the file's second line, to spare reading all."""
    found = {name: name for name in names()}
    for name in names():
        line = (DATA / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[1]
        assert line.startswith("aliases: ["), f"{name}.yaml has its aliases in its second line"
        found |= {alias.strip(): name for alias in line[10:].partition("]")[0].split(",") if alias.strip()}
    return found


def _made(kind: Any, branch: Branch, prefix: str, place: Place, problems: list[Problem]) -> object:
    """An instance of the dataclass ``kind``; None, and more in ``problems``, where that cannot be."""
    hints = get_type_hints(kind)
    for key, entry in branch.items():
        if key not in hints:
            meant = nearest(key, hints)
            legal = f"did you mean {meant}?" if meant else f"the keys are {', '.join(hints)}"
            problems.append(Problem(entry.key_place.text, prefix + key, "is not a key of a hardware file", legal))
    values = {}
    optional = {one.name for one in dataclasses.fields(kind) if one.default is not MISSING}
    for key, hint in hints.items():
        if key in branch:
            values[key] = _value(hint, branch[key], prefix + key, problems)
        elif key not in optional:
            problems.append(Problem(place.text, prefix + key, MISSING_KEY, _needed(hint, prefix + key)))
    return None if problems else kind(**values)


def _value(hint: Any, entry: Entry, key: str, problems: list[Problem]) -> object:
    value = entry.value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return _made(hint, value, key + ".", entry.key_place, problems)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif get_origin(hint) is Literal:
        if isinstance(value, str) and value in get_args(hint):
            return value
    elif hint is str:
        if isinstance(value, str) and (value or key != "name"):
            return value
    elif hint in (int, float):
        if _range(key).holds(value):
            return hint(value)
    elif hint == tuple[str, ...]:
        if isinstance(value, tuple) and all(isinstance(one.value, str) for one in value):
            return plain(entry)
    elif isinstance(value, dict):
        return _peaks(value, entry.key_place, key, problems)
    problems.append(Problem(entry.place.text, key, f"is {_shown(entry)}", _needed(hint, key)))
    return None


def _peaks(branch: Branch, place: Place, key: str, problems: list[Problem]) -> Mapping[str, float]:
    """Of every dtype."""
    for name, entry in branch.items():
        dotted = f"{key}.{name}"
        if name not in DTYPES:
            problems.append(Problem(entry.key_place.text, dotted, "is no dtype", f"they are {', '.join(DTYPES)}"))
        elif not PEAK.holds(entry.value):
            problems.append(Problem(entry.place.text, dotted, f"is {_shown(entry)}", str(PEAK)))
    if not any(name in branch for name in ANY_OF):
        what = f"has neither {' nor '.join(ANY_OF)}"
        problems.append(Problem(place.text, key, what, "one of the two is needed, for dtypes that are left out"))
    return {name: float(one.value) for name, one in branch.items() if PEAK.holds(one.value)}  # type: ignore[arg-type]


def _range(key: str) -> Range:
    return RANGES[key.rpartition(".")[2]]


def _shown(entry: Entry) -> str:
    """The value, cut when long."""
    if isinstance(entry.value, dict):
        return "a section"
    text = repr(plain(entry))
    return text if len(text) <= 60 else text[:60] + "..."


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # such as a name that is too long, or that holds a null character
        return False


def _needed(hint: Any, key: str) -> str:
    if dataclasses.is_dataclass(hint):
        return "a section of keys is needed"
    if hint in (int, float):
        return str(_range(key))
    if get_origin(hint) is Literal:
        return f"{' or '.join(get_args(hint))} is needed"
    words = {bool: "true or false", str: "a string that is not empty", tuple[str, ...]: "a list of strings"}
    return f"{words.get(hint, 'a section of numbers by dtype')} is needed"
