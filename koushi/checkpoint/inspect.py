"""``koushi inspect``: what a checkpoint holds, and whether it is whole. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from koushi.checkpoint.files import verify_files
from koushi.checkpoint.manifest import KINDS, PARAMETER, Manifest, TensorEntry, read_manifest
from koushi.checkpoint.newest import candidates
from koushi.errors import CheckpointError, DamagedCheckpoint
from koushi.units import bytes_text, count_text


def inspect(path: Path, show_tensors: bool = False) -> None:
    """Print what ``path`` holds, a checkpoint or a run folder whose checkpoints are told one by one.

    Every byte is read. Raises CheckpointError for a path without a checkpoint, DamagedCheckpoint when one is damaged.
    """
    damaged = []
    for folder in candidates(path):
        try:
            manifest = read_manifest(folder)
            print("\n".join([str(folder), *_lines(manifest, show_tensors)]))
            verify_files(folder, manifest)
            print("  whole      every checksum is right")
        except CheckpointError as error:
            print(f"  DAMAGED    {error}")
            damaged.append(folder)
    if damaged:
        raise DamagedCheckpoint(f"damaged: {', '.join(map(str, damaged))}")


def _lines(manifest: Manifest, show_tensors: bool) -> Iterator[str]:
    head = manifest.head
    world = prod(head.mesh.values())
    layout = ", ".join(f"{name}={degree}" for name, degree in head.mesh.items())
    yield f"  step       {head.step}; {head.samples} samples, {head.optimizer_steps} optimizer steps, seed {head.seed}"
    yield f"  saved by   {world} {'process' if world == 1 else 'processes'} [{layout}]; torch {head.torch}"
    for kind in KINDS:
        tensors = [tensor for tensor in manifest.tensors if tensor.kind == kind]
        if tensors:
            yield f"  {kind:<10} {_sizes(tensors)}"
    if show_tensors:
        for tensor in manifest.tensors:
            if tensor.kind == PARAMETER:
                chunks = f"{len(tensor.chunks)} {'chunk' if len(tensor.chunks) == 1 else 'chunks'}"
                yield f"    {tensor.name:<40} {'x'.join(map(str, tensor.shape)):>14} {tensor.dtype}, {chunks}"
    yield f"  files      {len(manifest.files)}, {bytes_text(manifest.nbytes)}"


def _sizes(tensors: list[TensorEntry]) -> str:
    elements = sum(prod(tensor.shape) for tensor in tensors)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors}))
    return (
        f"{len(tensors)} tensors, {count_text(elements)} numbers in {dtypes}, "
        f"{bytes_text(sum(tensor.nbytes for tensor in tensors))}"
    )
