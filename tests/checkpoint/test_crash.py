"""A crash or an error at any file operation of a save leaves the checkpoint before it whole."""

from __future__ import annotations

import builtins
import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import tensors
from torch import Tensor

from koushi.checkpoint.files import partial_of
from koushi.checkpoint.folders import clear_leftovers, keep, published, step_folder
from koushi.checkpoint.manifest import PARAMETER, Head
from koushi.checkpoint.tensors import CheckpointFiles, Described, write_checkpoint

OPERATIONS = ((os, "mkdir"), (builtins, "open"), (os, "open"), (os, "write"), (os, "fsync"), (os, "replace"),
              (os, "rename"), (os, "unlink"), (os, "rmdir"))  # fmt: skip
"""Every call by which a save changes the disk, or makes a change last."""
VALUES: dict[int, dict[str, Tensor]] = {
    step: {"a": torch.full((300, 7), float(step)), "b": torch.arange(5.0) + step} for step in (1, 2, 3)
}


def save(checkpoints: Path, step: int) -> None:
    """As a rank does: write beside, publish, remove what is no longer kept."""
    described = [Described(PARAMETER, name, torch.float32, tuple(value.shape)) for name, value in VALUES[step].items()]
    head = Head(step, 0, 0, 0, "", {}, {}, "", "")
    write_checkpoint(step_folder(checkpoints, step), head, described, iter(VALUES[step].values()))
    keep(checkpoints, step, keep_last=2, keep_every=0)


class Faults:
    """Counts the operations and, at the given one, does what ``strike`` does: before it, or after it."""

    def __init__(self, at: int | None, after: bool, strike: Callable[[str], None]):
        self.names: list[str] = []
        self._at = at
        self._after = after
        self._strike = strike

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for module, name in OPERATIONS:
            patch.setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            if name == "mkdir" and os.path.isdir(arguments[0]):
                return real(*arguments, **options)  # changes nothing
            self.names.append(name)
            strikes = len(self.names) - 1 == self._at
            if strikes and not self._after:
                self._strike(name)
            result = real(*arguments, **options)
            if strikes and self._after:
                self._strike(name)
            return result

        return operation


def operations(folder: Path) -> list[str]:
    """What a save of step 3 does, one after the other."""
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(None, False, lambda name: None)
        faults.install(patch)
        save(folder, 3)
    return faults.names


def prepare(folder: Path) -> None:
    """Checkpoints of steps 1 and 2."""
    shutil.rmtree(folder, ignore_errors=True)
    for step in (1, 2):
        save_quickly(folder, step)


def save_quickly(folder: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # slow on a busy disk
        save(folder, step)


def assert_whole(folder: Path, *expected: int) -> None:
    """Every published checkpoint is whole, and those of the steps ``expected`` are among them."""
    steps = []
    for path in published(folder):
        with CheckpointFiles(path) as files:
            step = files.manifest.head.step
        assert {key: value.tolist() for key, value in tensors(path).items()} == {
            f"parameter/{name}": value.tolist() for name, value in VALUES[step].items()
        }
        steps.append(step)
    assert set(expected) <= set(steps), (expected, steps)


def die(name: str) -> None:
    os._exit(9)


def saves_and_dies(folder: Path, at: int, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Faults(at, after, die).install(patch)
        save(folder, 3)


@pytest.fixture
def count(tmp_path: Path) -> Iterator[int]:
    names = operations(tmp_path / "count")
    assert {"mkdir", "open", "write", "fsync", "replace", "rename", "unlink", "rmdir"} <= set(names)
    assert names.count("rename") == 2
    yield len(names)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_operation(count: int, after: bool, tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    for at in range(count):
        prepare(folder)
        child = multiprocessing.get_context("fork").Process(target=saves_and_dies, args=(folder, at, after))
        child.start()
        child.join()
        assert child.exitcode == 9, at
        assert_whole(folder, 2)
        # The next process clears up and saves the step again.
        clear_leftovers(folder)
        if not step_folder(folder, 3).exists():
            save_quickly(folder, 3)
        assert_whole(folder, 2, 3)
        assert {path.name for path in folder.iterdir()} - {"step-00000001"} == {"step-00000002", "step-00000003"}, at


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_at_any_operation(count: int, number: int, tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise OSError(number, os.strerror(number))

    folder = tmp_path / "error"
    for at in range(count):
        prepare(folder)
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, False, fail).install(patch)
            with pytest.raises(OSError, match=os.strerror(number)):
                save(folder, 3)
        assert_whole(folder, 2)


def test_what_stands_in_the_way_is_set_aside(tmp_path: Path) -> None:
    prepare(tmp_path)
    broken = step_folder(tmp_path, 3)
    for _ in range(2):
        broken.mkdir(exist_ok=True)
        (broken / "manifest.json").write_text("{}")
        save(tmp_path, 3)
        assert_whole(tmp_path, 2, 3)
    assert (tmp_path / "step-00000003.damaged").is_dir()
    assert not partial_of(broken).exists()
