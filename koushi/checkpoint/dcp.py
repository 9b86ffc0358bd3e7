"""Torch's distributed checkpoint with plans and storage of our own.

torch.distributed.checkpoint runs the protocol: every rank plans, writes or reads, and an error of one rank
reaches all. What is planned comes straight from our slices. What is stored is described by our manifest
instead of torch's pickled metadata, so that nothing is unpickled on load. Plans stay with their rank: only what
the manifest needs goes to rank 0.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from koushi.checkpoint.files import Content, begin, partial_of, publish, write_tensor_file
from koushi.checkpoint.manifest import Chunk, FileEntry, Head, Manifest, TensorEntry
from koushi.checkpoint.state import Piece
from koushi.checkpoint.tensors import DTYPE_NAMES, CheckpointFiles, Part, as_bytes
from koushi.errors import CheckpointError

Pieces = Mapping[str, Mapping[str, Piece]]
"""A state dict, with all pieces under one name: torch logs every name of a state dict, at some cost."""
_PIECES = "pieces"


@dataclass(frozen=True)
class Stored:
    """Where a chunk went."""

    file: str
    position: int


def save(folder: Path, head: Head, pieces: Sequence[Piece], group: dist.ProcessGroup) -> None:
    """Write a checkpoint from all ranks of ``group``, each its own ``pieces``, contiguous CPU tensors.

    Raises the error of the first rank that had one, on every rank.
    """
    try:
        dcp.save(
            {_PIECES: {piece.key: piece for piece in pieces}},
            storage_writer=Writer(folder, head, dist.get_rank(group)),
            planner=PieceSavePlanner(),
            process_group=group,
        )
    except CheckpointException as error:
        _raise_first(error)


def load(files: CheckpointFiles, pieces: Sequence[Piece], group: dist.ProcessGroup) -> None:
    """Fill ``pieces`` from a checkpoint, on every rank of ``group``.

    Raises the error of the first rank that had one, on every rank; pieces are then in no known state.
    """
    try:
        dcp.load(
            {_PIECES: {str(index): piece for index, piece in enumerate(pieces)}},
            storage_reader=Reader(files),
            planner=PieceLoadPlanner(files.manifest),
            process_group=group,
        )
    except CheckpointException as error:
        _raise_first(error)


def _raise_first(error: CheckpointException) -> NoReturn:
    rank = min(error.failures)
    cause = error.failures[rank][0]
    cause.add_note(f"on rank {rank}")
    raise cause from None


@final
class PieceSavePlanner(SavePlanner):
    """Plans to write every piece of the state dict."""

    def set_up_planner(self, state_dict: Pieces, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._pieces = state_dict[_PIECES]

    def create_local_plan(self) -> SavePlan:
        self._plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data = item.tensor_data
                assert data is not None, "only tensors are planned"
                entry = found.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
                entry.chunks.append(data.chunk)
        return [SavePlan([]) for _ in all_plans], Metadata(dict(found))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index.fqn].tensor


def _write_item(piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.part.offsets), torch.Size(piece.part.sizes)
    return WriteItem(
        index=MetadataIndex(piece.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.shape)
        ),
    )


@final
class Writer(StorageWriter):
    """One tensor file a rank; rank 0 writes the manifest and publishes."""

    def __init__(self, folder: Path, head: Head, rank: int):
        self._folder = folder
        self._partial = folder
        self._head = head
        self._rank = rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the folder is the writer's own"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._partial = partial_of(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        begin(self._folder)  # by rank 0, before any rank writes
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        path = self._partial / f"rank-{self._rank:05d}.safetensors"
        contents = [_content(item) for item in items]

        def values() -> Iterator[memoryview | bytes]:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "only tensors are planned"
                yield as_bytes(tensor)

        file, positions = write_tensor_file(path, contents, values())
        results = [
            WriteResult(item.index, content.nbytes, Stored(file.name, position))
            for item, content, position in zip(items, contents, positions, strict=True)
        ]
        return [*results, WriteResult(MetadataIndex(file.name), file.size, file)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: list[FileEntry] = []
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        for result in (one for of_rank in results for one in of_rank):
            stored = result.storage_data
            if isinstance(stored, FileEntry):
                files.append(stored)
                continue
            key, offset = result.index.fqn, result.index.offset
            entry = metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata) and offset is not None, "only tensors are planned"
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == offset)
            chunks[key].append(Chunk(tuple(offset), tuple(sizes), stored.file, stored.position))
        manifest = Manifest(self._head, tuple(_entries(metadata, chunks)), tuple(files))
        manifest.check()
        publish(self._folder, manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _content(item: WriteItem) -> Content:
    data = item.tensor_data
    assert data is not None, "only tensors are planned"
    whole = data.chunk.sizes == data.size
    label = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
    return Content(label, DTYPE_NAMES[data.properties.dtype], tuple(data.chunk.sizes))


def _entries(metadata: Metadata, chunks: Mapping[str, list[Chunk]]) -> Iterator[TensorEntry]:
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "only tensors are planned"
        kind, _, name = key.partition("/")
        dtype = DTYPE_NAMES[entry.properties.dtype]
        yield TensorEntry(kind, name, dtype, tuple(entry.size), tuple(chunks[key]))


@final
class PieceLoadPlanner(LoadPlanner):
    """Plans to read what overlaps with every piece of the state dict, in the order in which it is stored."""

    def __init__(self, manifest: Manifest):
        self._manifest = manifest

    def set_up_planner(
        self, state_dict: Pieces, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._pieces = state_dict[_PIECES]

    def create_local_plan(self) -> LoadPlan:
        items = [item for number, piece in self._pieces.items() for item in self._reads(number, piece)]
        self._plan = LoadPlan(items)
        return LoadPlan([])

    def _reads(self, number: str, piece: Piece) -> Iterator[ReadItem]:
        entry = self._manifest.by_key.get(piece.key)
        if entry is None or entry.shape != piece.shape:
            there = "it lacks" if entry is None else f"it has the shape {list(entry.shape)} of"
            raise CheckpointError(f"{there} {piece.key}, which here has the shape {list(piece.shape)}")
        for chunk in entry.chunks:
            stored = Part(chunk.offsets, chunk.sizes)
            shared = piece.part.overlap(stored)
            if shared is not None:
                yield ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(number),
                    dest_offsets=torch.Size(part.start for part in shared.within(piece.part)),
                    storage_index=MetadataIndex(piece.key, chunk.offsets),
                    storage_offsets=torch.Size(part.start for part in shared.within(stored)),
                    lengths=torch.Size(shared.sizes),
                )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._pieces[read_item.dest_index.fqn].tensor[tuple(slice(at, at + size) for at, size in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # resolve_tensor gave a view of the piece itself

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("only tensors are planned")


@final
class Reader(StorageReader):
    """Reads slices of a checkpoint's tensor files, verifying what it reads."""

    def __init__(self, files: CheckpointFiles):
        self._files = files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        assert checkpoint_id is None, "the files are the reader's own"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({})  # the planner reads the manifest

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        manifest = self._files.manifest
        found = []
        for item in plan.items:
            entry = manifest.by_key[item.storage_index.fqn]
            chunk = next(one for one in entry.chunks if one.offsets == item.storage_index.offset)
            found.append((chunk.file, chunk.position, entry, chunk, item))
        for _, _, entry, chunk, item in sorted(found, key=lambda one: one[:2]):
            starts = zip(chunk.offsets, item.storage_offsets, strict=True)
            part = Part(tuple(at + inner for at, inner in starts), tuple(item.lengths))
            target = planner.resolve_tensor(item)
            target.copy_(self._files.read_chunk(entry, chunk, part))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False
