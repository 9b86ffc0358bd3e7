"""A Hugging Face folder as weights: read slice by slice, and written tensor by tensor.

Reading maps safetensors files into memory and copies only what a slice needs. Writing holds one tensor
at a time, beside the place that is wanted, and renames once everything is durable.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from koushi.checkpoint.files import Content, begin, make_durable, partial_of, write_durably, write_tensor_file
from koushi.checkpoint.tensors import DTYPE_NAMES, as_bytes
from koushi.checkpoint.weights import Weights
from koushi.errors import WeightsError
from koushi.layout import Slices
from koushi.models.hf_folder import CONFIG, INDEX, SINGLE
from koushi.models.llama.hf import LM_HEAD, check_folder, config_of, hf_name, hf_shapes, rotary, runs
from koushi.models.llama.layout import EMBEDDING, parameters
from koushi.models.llama.sizes import LlamaSize


@final
class HfWeights(Weights):
    """The weights of a folder. Raises WeightsError with everything that is wrong with it."""

    def __init__(self, folder: Path):
        self.size, self._survey = check_folder(folder)
        self._opened = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._files.clear()

    def read(self, name: str, part: Slices) -> Tensor:
        if any(piece.start == piece.stop for piece in part):
            return torch.empty([piece.stop - piece.start for piece in part])
        if not rotary(name):
            found = self._stored(hf_name(name), part)
            if name == EMBEDDING and self.size.tie_embeddings and LM_HEAD in self._survey.tensors:
                self._compare(found, self._stored(LM_HEAD, part))
            return found
        rows = None
        for run in runs(part[0], self.size.head_dim):
            piece = self._stored(hf_name(name), (run.source, *part[1:]))
            if rows is None:
                rows = piece.new_empty([one.stop - one.start for one in part])
            rows[run.into] = piece
        assert rows is not None, f"{name}: no rows in {part}"
        return rows

    def _stored(self, name: str, part: Slices) -> Tensor:
        file = self._survey.tensors[name].file
        try:
            if file not in self._files:
                self._files[file] = self._opened.enter_context(safe_open(file, framework="pt", device="cpu"))
            found: Tensor = self._files[file].get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise WeightsError([f"{file}: {name} cannot be read: {error}"]) from error
        return found

    def _compare(self, embedding: Tensor, output: Tensor) -> None:
        if not torch.equal(embedding, output):
            file = self._survey.tensors[LM_HEAD].file
            what = f"{CONFIG} ties it to the embedding, and it holds other numbers; take it out, or untie them"
            raise WeightsError([f"{file}: {LM_HEAD}: {what}"])


@dataclass(frozen=True)
class About:
    """What a folder says of a model besides its weights."""

    max_seq_len: int
    begin_id: int | None
    end_id: int | list[int] | None
    files: tuple[tuple[Path, str], ...] = ()
    """Files to copy, and the names they get."""
    written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON files to write besides, by name."""


def export(weights: Weights, folder: Path, dtype: torch.dtype, about: About, max_shard_bytes: int) -> None:
    """Write ``folder``, which must not be there or be empty. Raises WeightsError."""
    config = config_of(
        weights.size,
        dtype=DTYPE_NAMES[dtype],
        max_seq_len=about.max_seq_len,
        begin_id=about.begin_id,
        end_id=about.end_id,
    )
    refuse_taken(folder)
    folder = folder.absolute()
    partial = partial_of(folder)
    try:
        begin(folder)
        _write_weights(weights, partial, dtype, max_shard_bytes)
        for name, content in {**about.written, CONFIG: config}.items():
            write_durably(partial / name, json.dumps(content, indent=2) + "\n")
        for source, name in about.files:
            shutil.copyfile(source, partial / name)
        make_durable(partial)
        os.rename(partial, folder)
        make_durable(folder.parent)
    except OSError as error:
        raise WeightsError([f"{folder}: cannot be written: {error.strerror or error}"]) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_taken(folder: Path) -> None:
    """Raises WeightsError where something stands at ``folder``, unless it is an empty folder."""
    try:
        taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise WeightsError([f"{folder}: cannot be read: {error.strerror}"]) from error
    if taken:
        raise WeightsError([f"{folder}: is there already; name a new or an empty folder"])


def _write_weights(weights: Weights, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    shards = _shards(weights.size, dtype.itemsize, max_shard_bytes)
    shapes = hf_shapes(weights.size)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        contents = [Content(hf_name(name), DTYPE_NAMES[dtype], shapes[hf_name(name)]) for name in names]
        values = (as_bytes(_hf_tensor(weights, name, shapes[hf_name(name)], dtype)) for name in names)
        write_tensor_file(folder / file, contents, values)
        weight_map |= {hf_name(name): file for name in names}
    if len(shards) > 1:
        total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        index_of = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(folder / INDEX, json.dumps(index_of, indent=2) + "\n")


def _hf_tensor(weights: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    value = weights.read(name, tuple(slice(0, extent) for extent in shape)).to(dtype)
    return (hf_rows(value, weights.size.head_dim) if rotary(name) else value).contiguous()


def hf_rows(value: Tensor, head_dim: int) -> Tensor:
    """The rows of a whole query or key projection in Hugging Face's order."""
    rows: Tensor = value.unflatten(0, (-1, head_dim // 2, 2))
    return rows.transpose(1, 2).flatten(0, 2)


def _shards(size: LlamaSize, itemsize: int, most: int) -> list[list[str]]:
    """Parameters in the order of the model, as many to a file as ``most`` bytes hold, at least one."""
    shards: list[list[str]] = []
    room = 0
    for name, parameter in parameters(size).items():
        needed = prod(parameter.shape) * itemsize
        if not shards or needed > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= needed
    return shards
