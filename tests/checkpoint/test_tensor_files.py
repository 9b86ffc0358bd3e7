"""Tensor files are safetensors, and every byte that is read is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_runs import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from koushi.checkpoint import files
from koushi.checkpoint.files import Content, VerifiedFile, verify_files, write_tensor_file
from koushi.checkpoint.folders import keep, published, step_folder, step_of, to_remove
from koushi.checkpoint.manifest import PARAMETER, Head
from koushi.checkpoint.tensors import CheckpointFiles, Described, Part, as_bytes, write_checkpoint
from koushi.errors import DamagedCheckpoint

VALUES = {
    "a": torch.arange(400 * 30, dtype=torch.float32).view(400, 30),
    "b": torch.arange(7).bfloat16(),
    "c": torch.tensor(2.5, dtype=torch.float64),
    "d": torch.empty(0, 4),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small file has many."""
    monkeypatch.setattr(files, "BLOCK", 1000)
    monkeypatch.setattr("koushi.checkpoint.manifest.BLOCK", 1000)


def write(folder: Path) -> Path:
    described = [Described(PARAMETER, name, value.dtype, tuple(value.shape)) for name, value in VALUES.items()]
    write_checkpoint(folder, Head(1, 0, 0, 0, "", {}, {}, "", ""), described, iter(VALUES.values()))
    return folder


def test_other_programs_can_read_them(tmp_path: Path) -> None:
    found = load_file(write(tmp_path / "one") / "rank-00000.safetensors")
    assert found.keys() == {f"parameter/{name}" for name in VALUES}
    for name, value in VALUES.items():
        assert torch.equal(found[f"parameter/{name}"], value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK", 1000)
        patch.setattr("koushi.checkpoint.manifest.BLOCK", 1000)
        return write(tmp_path_factory.mktemp("written") / "one")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 30), st.integers(0, 30))
def test_any_slice(written: Path, first: int, second: int, left: int, right: int) -> None:
    rows, columns = sorted((first, second)), sorted((left, right))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK", 1000)
        patch.setattr("koushi.checkpoint.manifest.BLOCK", 1000)
        with CheckpointFiles(written) as found:
            slices = (slice(*rows), slice(*columns))
            assert torch.equal(found.read("parameter/a", slices), VALUES["a"][slices])


def test_whole_tensors(written: Path) -> None:
    with CheckpointFiles(written) as found:
        verify_files(written, found.manifest)
        for name, value in VALUES.items():
            read = found.read(f"parameter/{name}")
            assert torch.equal(read, value)
            assert read.dtype == value.dtype


def test_a_change_is_seen_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = Content("x", "float32", (2500,))
    entry, (position,) = write_tensor_file(path, [content], [as_bytes(torch.rand(2500))])
    assert len(entry.checksums) == -(-entry.size // 1000) > 10
    flip(path, 5500)
    with VerifiedFile(tmp_path, entry) as file:
        assert len(file.read(position, 4000)) == 4000
        assert len(file.read(6000, 2000)) == 2000
        for start, length in ((5999, 1), (4000, 1001), (5000, 1000), (0, entry.size)):
            with pytest.raises(DamagedCheckpoint, match="bytes from 5000 have another checksum"):
                file.read(start, length)
        with pytest.raises(DamagedCheckpoint, match="bytes from 5000"):
            file.verify()
        assert len(file.read(6000, 2000)) == 2000


def test_parts_overlap_where_both_are() -> None:
    left = Part((0, 2), (3, 3))
    assert left.overlap(Part((2, 0), (5, 4))) == Part((2, 2), (1, 2))
    assert left.overlap(Part((3, 2), (1, 1))) is None
    assert Part((2, 2), (1, 2)).within(left) == (slice(2, 3), slice(0, 2))


def test_which_are_kept(tmp_path: Path) -> None:
    assert to_remove([10, 20, 30, 40, 50], 2, 0) == [10, 20, 30]
    assert to_remove([10, 20, 30, 40, 50], 2, 20) == [10, 30]
    assert to_remove([10], 3, 0) == []
    for step in (5, 10, 15, 123456789):
        step_folder(tmp_path, step).mkdir()
    for other in (".step-00000003.partial", "step-00000007.damaged", "notes"):
        (tmp_path / other).mkdir()
    assert [step_of(path) for path in published(tmp_path)] == [123456789, 15, 10, 5]
    keep(tmp_path, 15, 1, 10)  # the one after step 15 is damaged: it counts for nothing
    assert [step_of(path) for path in published(tmp_path)] == [123456789, 15, 10]
    keep(tmp_path, 123456789, 1, 0)
    assert [step_of(path) for path in published(tmp_path)] == [123456789]
    assert published(tmp_path / "nowhere") == []
