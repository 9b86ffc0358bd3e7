"""Files that are whole or not there: durable writing, verified reading. No torch.

A tensor file has safetensors' format, so that other programs can open it; this one finds its chunks by
the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np

from koushi.checkpoint.manifest import BLOCK, ELEMENT_BYTES, MANIFEST, FileEntry, Manifest, to_text
from koushi.errors import DamagedCheckpoint

SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16"}
Bytes = memoryview | bytes
_ALIGNMENT = 8


@dataclass(frozen=True)
class Content:
    """One entry of a tensor file."""

    label: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


def write_tensor_file(path: Path, contents: Sequence[Content], values: Iterable[Bytes]) -> tuple[FileEntry, list[int]]:
    """Write ``values``, in the order of ``contents``, and make them durable.

    Returns the file's entry and the byte position of every content. ``values`` may be a generator: only
    one is held at a time. Raises OSError.
    """
    header, positions = _header(contents)
    with open(path, "wb", buffering=0) as file:
        sums = _Checksums()
        _write(file.fileno(), header, sums)
        for content, value in zip(contents, values, strict=True):
            view = memoryview(value).cast("B")
            assert len(view) == content.nbytes, f"{content.label}: {len(view)} bytes for {content.nbytes}"
            _write(file.fileno(), view, sums)
        os.fsync(file.fileno())
    return FileEntry(path.name, sums.size, sums.finish()), positions


def _header(contents: Sequence[Content]) -> tuple[bytes, list[int]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # as transformers wants it
    end = 0
    ends = [0]
    for content in contents:
        end += content.nbytes
        entries[content.label] = {
            "dtype": SAFETENSORS_DTYPES[content.dtype],
            "shape": content.shape,
            "data_offsets": [ends[-1], end],
        }
        ends.append(end)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in ends[:-1]]


def _write(descriptor: int, data: Bytes, sums: _Checksums) -> None:
    left = memoryview(data)
    while len(left):
        # A block at a time, so that the checksum finds it in the processor's cache.
        done = os.write(descriptor, left[: BLOCK - sums.size % BLOCK])
        sums.add(left[:done])
        left = left[done:]


@final
class _Checksums:
    """CRC-32 of every block of what is written; no ``add`` goes over the end of one."""

    def __init__(self) -> None:
        self.size = 0
        self._open = 0
        self._done: list[int] = []

    def add(self, data: memoryview) -> None:
        self._open = zlib.crc32(data, self._open)
        self.size += len(data)
        if len(data) and self.size % BLOCK == 0:
            self._done.append(self._open)
            self._open = 0

    def finish(self) -> tuple[int, ...]:
        return (*self._done, self._open) if self.size % BLOCK else tuple(self._done)


@final
class VerifiedFile:
    """A file that is read by byte ranges, every block of which is checked against its checksum once it is read."""

    def __init__(self, folder: Path, entry: FileEntry):
        self._path = folder / entry.name
        self._entry = entry
        self._held = range(0)
        self._data = np.empty(0, dtype=np.uint8)
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder}: {entry.name} cannot be read: {error.strerror}") from None

    def read(self, position: int, length: int) -> memoryview:
        """Bytes ``position`` to ``position + length``, valid until the next read. Raises DamagedCheckpoint."""
        wanted = range(position // BLOCK, -(-(position + length) // BLOCK))
        if wanted and not (wanted[0] in self._held and wanted[-1] in self._held):
            self._load(wanted)
        start = position - self._held.start * BLOCK
        return self._data.data[start : start + length]

    def verify(self) -> None:
        """Read the whole file. Raises DamagedCheckpoint."""
        for block in range(len(self._entry.checksums)):
            self._load(range(block, block + 1))

    def _load(self, blocks: range) -> None:
        start = blocks.start * BLOCK
        length = min(blocks.stop * BLOCK, self._entry.size) - start
        self._held = range(0)
        if len(self._data) < length:
            self._data = np.empty(length, dtype=np.uint8)
        view = self._data.data[:length]
        for index, block in enumerate(blocks):
            # Checked a block at a time, while the processor's cache holds it.
            part = view[index * BLOCK : (index + 1) * BLOCK]
            self._fill(part, block * BLOCK)
            if zlib.crc32(part) != self._entry.checksums[block]:
                raise self._damaged(f"is not as it was written: bytes from {block * BLOCK} have another checksum")
        self._held = blocks

    def _fill(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], position + done)
            except OSError as error:
                raise self._damaged(f"cannot be read: {error.strerror}") from None
            if count == 0:
                raise self._damaged(f"has {position + done} bytes, {self._entry.size} were written")
            done += count

    def _damaged(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._path.parent}: {self._path.name} {what}")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Read every byte of the checkpoint ``folder``. Raises DamagedCheckpoint."""
    for entry in manifest.files:
        with VerifiedFile(folder, entry) as file:
            file.verify()


def make_durable(folder: Path) -> None:
    """Make the names in ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, whole or not at all."""
    draft = path.with_name(f".{path.name}.partial")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    make_durable(path.parent)


def begin(folder: Path) -> Path:
    """An empty folder beside ``folder`` to write its files into."""
    partial = partial_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def publish(folder: Path, manifest: Manifest) -> None:
    """Turn the files that ``begin(folder)`` made room for, all written and durable, into ``folder`` in one move.

    What stands at ``folder`` (a damaged checkpoint of the same step) is set aside. Raises OSError.
    """
    partial = partial_of(folder)
    write_durably(partial / MANIFEST, to_text(manifest))
    if folder.exists():
        set_aside(folder)
    os.rename(partial, folder)
    make_durable(folder.parent)


def set_aside(folder: Path) -> Path:
    """Give ``folder`` a name that is no checkpoint's."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(folder, aside)
    return aside
