"""What a checkpoint holds, as JSON: the only part of it that is parsed. No torch.

The manifest is written last, so a folder with a whole one is a whole checkpoint. Tensors have the names
and shapes of the unsharded model; a chunk is the slice of one that a rank wrote. Every file is checked in
blocks of ``BLOCK`` bytes, so that a reader of a slice verifies just what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from koushi.errors import CheckpointError, DamagedCheckpoint, WrongCheckpoint

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK = 4 * 1024 * 1024
"""Bytes of a file that one checksum covers."""

PARAMETER = "parameter"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
KINDS = (PARAMETER, EXP_AVG, EXP_AVG_SQ)

ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Of every dtype that a checkpoint may hold."""


@dataclass(frozen=True)
class Chunk:
    """A slice of a tensor, stored contiguously from byte ``position`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the unsharded model."""

    kind: str
    """parameter, exp_avg or exp_avg_sq."""
    name: str
    """Of the parameter, as the unsharded model calls it."""
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Together the whole tensor, no element twice."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    name: str
    size: int
    checksums: tuple[int, ...]
    """CRC-32 of every ``BLOCK`` bytes, the last ones fewer."""


@dataclass(frozen=True)
class Head:
    """What a checkpoint says besides its tensors."""

    step: int
    """Training steps done."""
    samples: int
    """Samples consumed."""
    optimizer_steps: int
    """Updates that the optimizer's moments have seen; 0: there are no moments."""
    seed: int
    data: str
    """A digest of the samples trained on; empty where there were none."""
    config: Mapping[str, Any]
    """The resolved run file."""
    mesh: Mapping[str, int]
    """Degrees of the mesh that wrote it."""
    torch: str
    koushi: str


@dataclass(frozen=True)
class Manifest:
    head: Head
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    @cached_property
    def by_key(self) -> dict[str, TensorEntry]:
        return {tensor.key: tensor for tensor in self.tensors}

    @cached_property
    def file_by_name(self) -> dict[str, FileEntry]:
        return {file.name: file for file in self.files}

    @property
    def nbytes(self) -> int:
        """Of all files, the manifest left out."""
        return sum(file.size for file in self.files)

    def check(self) -> None:
        """Raises DamagedCheckpoint where chunks do not make up their tensors or lie outside their files."""
        for tensor in self.tensors:
            _check_tensor(tensor, self.file_by_name)


def _check_tensor(tensor: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    if tensor.kind not in KINDS or tensor.dtype not in ELEMENT_BYTES:
        raise DamagedCheckpoint(f"{tensor.key} has the dtype {tensor.dtype}, or a kind that this version does not know")
    for chunk in tensor.chunks:
        spans = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in spans):
            raise DamagedCheckpoint(f"{tensor.key} has a chunk outside its shape {list(tensor.shape)}")
        end = chunk.position + prod(chunk.sizes) * ELEMENT_BYTES[tensor.dtype]
        if chunk.file not in files or chunk.position < 0 or end > files[chunk.file].size:
            raise DamagedCheckpoint(f"{tensor.key} has a chunk outside of {chunk.file}")
    held = sum(prod(chunk.sizes) for chunk in tensor.chunks)
    if held != prod(tensor.shape):
        raise DamagedCheckpoint(f"{tensor.key} has {held} of {prod(tensor.shape)} elements")


def to_text(manifest: Manifest) -> str:
    """As ``manifest.json`` holds it, with a checksum of the rest."""
    body = {
        "head": dict(manifest.head.__dict__),
        "tensors": [
            [
                tensor.kind,
                tensor.name,
                tensor.dtype,
                tensor.shape,
                [[chunk.offsets, chunk.sizes, chunk.file, chunk.position] for chunk in tensor.chunks],
            ]
            for tensor in manifest.tensors
        ],
        "files": [[file.name, file.size, file.checksums] for file in manifest.files],
    }
    return json.dumps({"format": FORMAT, "checksum": _checksum(body), "manifest": body})


def from_text(text: str) -> Manifest:
    """Raises DamagedCheckpoint for anything but an unaltered manifest, WrongCheckpoint for one of another version."""
    try:
        whole = json.loads(text)
        version, checksum, body = whole["format"], whole["checksum"], whole["manifest"]
        if version != FORMAT:
            raise WrongCheckpoint(f"{MANIFEST} has format {version}; this version of koushi reads format {FORMAT}")
        if checksum != _checksum(body):
            raise DamagedCheckpoint(f"{MANIFEST} is not as it was written: its checksum differs")
        manifest = Manifest(
            head=Head(**body["head"]),
            tensors=tuple(_tensor(*row) for row in body["tensors"]),
            files=tuple(_file(*row) for row in body["files"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
    manifest.check()
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``, whose files are there in their full length.

    Raises WrongCheckpoint for a folder without a manifest, DamagedCheckpoint for a damaged one.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = from_text(text)
    except (FileNotFoundError, NotADirectoryError):
        raise WrongCheckpoint(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (UnicodeDecodeError, OSError) as error:
        raise DamagedCheckpoint(f"{folder}: {MANIFEST} cannot be read: {error}") from None
    except CheckpointError as error:
        raise type(error)(f"{folder}: {error}") from None
    for file in manifest.files:
        try:
            size = (folder / file.name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {file.name} cannot be read: {error.strerror}") from None
        if size != file.size:
            raise DamagedCheckpoint(f"{folder}: {file.name} has {size} bytes, {file.size} were written")
    return manifest


def _checksum(body: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _tensor(kind: str, name: str, dtype: str, shape: list[int], chunks: list[list[Any]]) -> TensorEntry:
    return TensorEntry(kind, name, dtype, tuple(shape), tuple(_chunk(*row) for row in chunks))


def _chunk(offsets: list[int], sizes: list[int], file: str, position: int) -> Chunk:
    return Chunk(tuple(offsets), tuple(sizes), file, position)


def _file(name: str, size: int, checksums: list[int]) -> FileEntry:
    if Path(name).name != name or len(checksums) != -(-size // BLOCK):
        raise ValueError(f"file {name!r} of {size} bytes with {len(checksums)} checksums")
    return FileEntry(name, size, tuple(checksums))
