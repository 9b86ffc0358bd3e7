"""Finding the newest whole checkpoint, and loading it on any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from koushi.checkpoint import dcp
from koushi.checkpoint.folders import published
from koushi.checkpoint.manifest import MANIFEST, Head, Manifest, read_manifest
from koushi.checkpoint.state import held
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.config.schema import RopeScaling
from koushi.errors import CheckpointError, DamagedCheckpoint
from koushi.models.llama.sizes import LlamaSize
from koushi.optim.adamw import AdamW
from koushi.parallel.shards import LocalParameter
from koushi.run_folder import CHECKPOINTS

Warn = Callable[[str], None]
T = TypeVar("T")


def candidates(path: Path) -> list[Path]:
    """The checkpoints that ``path`` stands for, newest first: itself, or those of a run folder.

    Raises CheckpointError where there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    found = published(path / CHECKPOINTS) or published(path)
    if not found:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run folder that holds one")
    return found


def newest(folders: Sequence[Path]) -> tuple[Path, Manifest]:
    """The first of ``folders`` whose manifest is whole and whose files have their full length.

    Raises CheckpointError where there is none.
    """
    problems = []
    for folder in folders:
        try:
            return folder, read_manifest(folder)
        except CheckpointError as error:
            problems.append(error)
    raise none_whole(problems)


def none_whole(problems: Sequence[Exception]) -> CheckpointError:
    assert problems, "no folders were looked at"
    many = f"none of {len(problems)} checkpoints is whole: " if len(problems) > 1 else ""
    return CheckpointError(f"{many}{problems[0]}; resume from another one, or begin anew with run.resume never")


def check_size(folder: Path, head: Head, size: LlamaSize) -> None:
    """Raises CheckpointError, naming what differs, where the checkpoint is of another model than ``size``."""
    theirs = head.config.get("model", {})
    differ = [
        f"{name} {_plain(theirs.get(name))} (here {_plain(getattr(size, name))})"
        for name in (field.name for field in fields(size))
        if _plain(theirs.get(name)) != _plain(getattr(size, name))
    ]
    if differ:
        raise CheckpointError(f"{folder} is a checkpoint of another model: it has {', '.join(differ)}")


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    return value.model_dump(mode="json") if isinstance(value, RopeScaling) else value


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
