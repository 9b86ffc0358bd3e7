"""Tensors in and out of checkpoint files, for one process; nothing in a file is executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from koushi.checkpoint.files import Bytes, Content, VerifiedFile, begin, publish, write_tensor_file
from koushi.checkpoint.manifest import ELEMENT_BYTES, Chunk, Head, Manifest, TensorEntry, read_manifest
from koushi.layout import Slices

TORCH_DTYPES = {name: getattr(torch, name) for name in ELEMENT_BYTES}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A slice of a stored tensor: ``offsets`` in the global tensor, ``sizes`` along each of its dims."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, slices: Slices) -> Part:
        return cls(tuple(part.start for part in slices), tuple(part.stop - part.start for part in slices))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def overlap(self, other: Part) -> Part | None:
        starts = tuple(map(max, self.offsets, other.offsets))
        spans = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        stops = tuple(min(mine + size, theirs + their_size) for mine, size, theirs, their_size in spans)
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Part(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Part) -> Slices:
        """Slices of a tensor that holds ``outer``."""
        starts = (mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def as_bytes(tensor: Tensor) -> Bytes:
    """The numbers of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@final
class CheckpointFiles:
    """Reads slices of a checkpoint's tensors, verifying every block that it reads.

    Raises CheckpointError for a folder that is no checkpoint, DamagedCheckpoint for a damaged one.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None):
        self.folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self._open: dict[str, VerifiedFile] = {}

    def read(self, key: str, slices: Slices | None = None) -> Tensor:
        """The tensor ``key`` (``kind/name``), or a slice of it; KeyError where there is none."""
        entry = self.manifest.by_key[key]
        wanted = Part.of(slices) if slices is not None else Part((0,) * len(entry.shape), entry.shape)
        result = torch.empty(wanted.sizes, dtype=TORCH_DTYPES[entry.dtype])
        for chunk in entry.chunks:
            shared = wanted.overlap(Part(chunk.offsets, chunk.sizes))
            if shared is not None:
                result[shared.within(wanted)] = self.read_chunk(entry, chunk, shared)
        return result

    def read_chunk(self, entry: TensorEntry, chunk: Chunk, part: Part) -> Tensor:
        """The ``part`` of ``entry`` that lies within ``chunk``; its memory is valid until the next read."""
        held = Part(chunk.offsets, chunk.sizes)
        inner = part.within(held)
        # Only rows that are wanted, whole.
        rows = inner[0] if inner else slice(0, 1)
        row_bytes = prod(chunk.sizes[1:]) * ELEMENT_BYTES[entry.dtype]
        position = chunk.position + rows.start * row_bytes
        data = self._file(chunk.file).read(position, (rows.stop - rows.start) * row_bytes)
        values = torch.frombuffer(data, dtype=TORCH_DTYPES[entry.dtype])
        if not inner:
            return values.reshape(())
        return values.view(-1, *chunk.sizes[1:])[(slice(None), *inner[1:])]

    def _file(self, name: str) -> VerifiedFile:
        if name not in self._open:
            self._open[name] = VerifiedFile(self.folder, self.manifest.file_by_name[name])
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Described:
    """A whole tensor that is going to be written."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def content(self) -> Content:
        return Content(f"{self.kind}/{self.name}", DTYPE_NAMES[self.dtype], self.shape)


def write_checkpoint(folder: Path, head: Head, described: Sequence[Described], tensors: Iterable[Tensor]) -> None:
    """Write a checkpoint of whole tensors from one process, into one file.

    ``tensors`` come in the order of ``described`` and may be a generator: one is held at a time. Raises OSError.
    """
    partial = begin(folder)
    file, positions = write_tensor_file(
        partial / "rank-00000.safetensors", [one.content for one in described], _bytes(described, tensors)
    )
    entries = tuple(
        TensorEntry(
            one.kind,
            one.name,
            DTYPE_NAMES[one.dtype],
            one.shape,
            (Chunk((0,) * len(one.shape), one.shape, file.name, position),),
        )
        for one, position in zip(described, positions, strict=True)
    )
    manifest = Manifest(head, entries, (file,))
    manifest.check()
    publish(folder, manifest)


def _bytes(described: Sequence[Described], tensors: Iterable[Tensor]) -> Iterator[Bytes]:
    for one, tensor in zip(described, tensors, strict=True):
        assert tuple(tensor.shape) == one.shape, f"{one.name}: {tuple(tensor.shape)}, not {one.shape}"
        yield as_bytes(tensor.to(one.dtype).contiguous())
