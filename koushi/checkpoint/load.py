"""Loading the newest whole checkpoint on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from koushi.checkpoint import dcp
from koushi.checkpoint.manifest import Manifest, read_manifest
from koushi.checkpoint.newest import check_size, none_whole
from koushi.checkpoint.state import held
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.errors import CheckpointError, DamagedCheckpoint
from koushi.models.llama.sizes import LlamaSize
from koushi.optim.adamw import AdamW
from koushi.parallel.shards import LocalParameter

Warn = Callable[[str], None]
T = TypeVar("T")


def load_newest(
    folders: Sequence[Path],
    size: LlamaSize,
    parameters: Sequence[LocalParameter],
    optimizer: AdamW,
    group: dist.ProcessGroup,
    warn: Warn,
) -> tuple[Path, Manifest]:
    """Load the newest whole one of ``folders`` (those of rank 0 count) into this rank's part of the model.

    A damaged one is passed over with a warning. Collective over ``group``. Raises CheckpointError.
    """
    problems: list[Exception] = []
    for folder in _of_first_rank(list(folders), group):
        found = _of_first_rank(_attempt(folder), group)
        if isinstance(found, Manifest):
            check_size(folder, found.head, size)
            try:
                load_checkpoint(folder, found, parameters, optimizer, group)
                return folder, found
            except DamagedCheckpoint as error:
                found = error
        problems.append(found)
        warn(f"warning: {found}; looking for a checkpoint before it")
    raise none_whole(problems)


def load_checkpoint(
    folder: Path,
    manifest: Manifest,
    parameters: Sequence[LocalParameter],
    optimizer: AdamW,
    group: dist.ProcessGroup,
) -> None:
    """Load ``folder``: every rank reads the slices that it holds. Raises DamagedCheckpoint on all ranks alike."""
    pieces = held(parameters, optimizer, manifest.head.optimizer_steps)
    with CheckpointFiles(folder, manifest) as files:
        dcp.load(files, pieces, group)


def _attempt(folder: Path) -> Manifest | CheckpointError:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return error


def _of_first_rank(value: T, group: dist.ProcessGroup) -> T:
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]
