"""A Hugging Face model folder as it lies on disk: config.json, safetensors files and their index. No torch.

Only JSON is read here, and the headers of safetensors files (https://huggingface.co/docs/safetensors:
eight bytes of length, little-endian, then a JSON object). Nothing in the folder is executed, and pickled
weights are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from koushi.errors import WeightsError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the dtype names of safetensors; others are quantised or no weights."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder, as the header of its file tells."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Survey:
    """What the files of a folder hold."""

    tensors: Mapping[str, Stored]
    wrong: tuple[str, ...]
    """What is wrong with the files themselves, for people."""
    unread: frozenset[str] | None
    """Tensors that only a file that cannot be read would hold; None: it would hold any."""


def is_hf_folder(folder: Path) -> bool:
    """Whether ``folder`` looks like a Hugging Face model, whole or not."""
    return (folder / CONFIG).is_file() and "model_type" in read_object(folder / CONFIG)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises WeightsError with the place of what is wrong."""
    try:
        return parse_object(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise WeightsError([f"{path}: there is no such file; a Hugging Face model folder has one"]) from None
    except OSError as error:
        raise WeightsError([f"{path}: cannot be read: {error.strerror}"]) from error


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """Strict JSON: NaN and the infinities, which Python would take, are none."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"holds {name}, which is no JSON number")

    try:
        found = json.loads(content.decode("utf-8"), parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise WeightsError([f"{where}:{error.lineno}:{error.colno}: broken JSON ({error.msg})"]) from error
    except UnicodeDecodeError as error:
        raise WeightsError([f"{where}: is not UTF-8, so no JSON"]) from error
    except RecursionError as error:
        raise WeightsError([f"{where}: JSON nested too deep to read"]) from error
    except ValueError as error:
        raise WeightsError([f"{where}: {error}"]) from error
    if not isinstance(found, dict):
        raise WeightsError([f"{where}: is no JSON object"])
    return found


def survey(folder: Path) -> Survey:
    """Every tensor of the folder, and what is wrong with its files."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            return Survey({}, (f"{folder}: holds neither {SINGLE} nor {INDEX}{_pickled(folder)}",), None)
        try:
            return Survey(read_header(folder / SINGLE), (), frozenset())
        except WeightsError as error:
            return Survey({}, error.reasons, None)
    try:
        weight_map = _weight_map(index)
    except WeightsError as error:
        return Survey({}, error.reasons, None)
    found: dict[str, Stored] = {}
    wrong: list[str] = []
    unread: set[str] = set()
    for file in sorted(set(weight_map.values())):
        named = [name for name, holder in weight_map.items() if holder == file]
        try:
            held = read_header(folder / file)
        except WeightsError as error:
            wrong.extend(error.reasons)
            unread.update(named)
            continue
        found |= {name: held[name] for name in held if weight_map.get(name, file) == file}
        absent = [name for name in named if name not in held]
        if absent:
            wrong.append(f"{folder / file}: lacks {listed(absent)}, which {INDEX} places there")
            unread.update(absent)
    return Survey(found, tuple(wrong), frozenset(unread))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError([f"{index}: has no weight_map from tensor names to files"])
    wrong = [
        f"{index}: places {name} in {file!r}, which is no file of this folder"
        for name, file in weight_map.items()
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors")
    ]
    if wrong:
        raise WeightsError(wrong)
    return weight_map


def _pickled(folder: Path) -> str:
    names = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if not names:
        return ""
    return f"; {names[0]} is pickled and could run code, so it is not read: save the model as safetensors"


def read_header(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds. Raises WeightsError where it is missing, truncated or no such file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise WeightsError([f"{file}: is truncated, or no safetensors file ({size} bytes)"])
            header = parse_object(stream.read(length), f"{file}: its header")
    except FileNotFoundError:
        raise WeightsError([f"{file}: there is no such file"]) from None
    except OSError as error:
        raise WeightsError([f"{file}: cannot be read: {error.strerror}"]) from error
    header.pop("__metadata__", None)
    found, end = {}, 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
                if not all(isinstance(one, int) and one >= 0 for one in shape) or not 0 <= start <= stop:
                    raise WeightsError([f"{file}: its header describes {name} with impossible numbers"])
            case _:
                raise WeightsError([f"{file}: its header does not describe {name} as safetensors do"])
        if dtype in WIDTHS and stop - start != prod(shape) * WIDTHS[dtype]:
            raise WeightsError([f"{file}: its header gives {name} {stop - start} bytes, not those of {dtype} {shape}"])
        found[name] = Stored(file, dtype, tuple(shape))
        end = max(end, stop)
    if size != 8 + length + end:
        what = "is truncated" if size < 8 + length + end else "goes on after its last tensor"
        raise WeightsError([f"{file}: {what}: {size} bytes, {8 + length + end} by its header"])
    return found


def differences(
    folder: Path, found: Survey, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
) -> list[str]:
    """What a folder's tensors lack, have too many of, or have in another shape or dtype than ``expected``."""
    wrong = []
    if found.unread is not None:
        known = found.tensors.keys() | found.unread | optional
        absent = [name for name in expected if name not in known]
        if absent:
            wrong.append(f"{folder}: lacks {listed(absent)}")
    extra = [name for name in found.tensors if name not in expected]
    if extra:
        wrong.append(f"{folder}: holds {listed(extra)}, which the model of its {CONFIG} does not have")
    for name, held in found.tensors.items():
        shape = expected.get(name, held.shape)
        if held.shape != shape:
            wrong.append(f"{held.file}: {name} is {list(held.shape)}, by {CONFIG} it must be {list(shape)}")
        if held.dtype not in WIDTHS and name in expected:
            wrong.append(f"{held.file}: {name} is {held.dtype}, and only {', '.join(WIDTHS)} are read")
    return wrong


def listed(names: list[str], most: int = 4) -> str:
    """``a, b and 3 more``."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
