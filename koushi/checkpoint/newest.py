"""Which checkpoint a path stands for, and the newest that is whole. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from koushi.checkpoint.folders import published
from koushi.checkpoint.manifest import MANIFEST, Head, Manifest, read_manifest
from koushi.config.schema import RopeScaling
from koushi.errors import CheckpointError, WrongCheckpoint
from koushi.models.llama.sizes import LlamaSize
from koushi.run_folder import CHECKPOINTS, RESOLVED, holds_run


def candidates(path: Path) -> list[Path]:
    """The checkpoints that ``path`` stands for, newest first: itself, or those of a run folder.

    Raises WrongCheckpoint where there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    found = published(path / CHECKPOINTS) or published(path)
    if not found and (holds_run(path) or (path / RESOLVED).exists()):
        raise WrongCheckpoint(
            f"{path} is a run that has saved no checkpoint; with checkpoint.every=N one is saved every N steps and "
            "after the last"
        )
    if not found:
        raise WrongCheckpoint(f"{path} is neither a checkpoint nor a run folder that holds one")
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
    kind = WrongCheckpoint if all(isinstance(one, WrongCheckpoint) for one in problems) else CheckpointError
    return kind(f"{many}{problems[0]}; resume from another one, or begin anew in another run.folder")


def check_size(folder: Path, head: Head, size: LlamaSize, legal: str = "") -> None:
    """Raises WrongCheckpoint, naming what differs and what is ``legal``, where the checkpoint is of another model."""
    differ = size_differences(head.config.get("model", {}), size)
    if differ:
        text = f"{folder} is a checkpoint of another model: it has {', '.join(differ)}"
        raise WrongCheckpoint(f"{text}; {legal}" if legal else text)


def size_differences(theirs: Mapping[str, Any], size: LlamaSize) -> list[str]:
    """Of a resolved run file's model from ``size``."""
    return [
        f"{name} {_plain(theirs.get(name))} (here {_plain(getattr(size, name))})"
        for name in (field.name for field in fields(size))
        if _plain(theirs.get(name)) != _plain(getattr(size, name))
    ]


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    return value.model_dump(mode="json") if isinstance(value, RopeScaling) else value
