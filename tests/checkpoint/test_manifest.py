"""The manifest is read back as it was written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koushi.checkpoint.manifest import BLOCK, Chunk, FileEntry, Head, Manifest, TensorEntry, from_text, to_text
from koushi.checkpoint.newest import none_whole
from koushi.errors import CheckpointError, DamagedCheckpoint, WrongCheckpoint

HEAD = Head(50, 800, 50, 7, "d1", {"model": {"dim": 16}}, {"pp": 2, "tp": 1}, "2.13", "0.1")
FILES = (FileEntry("rank-00000.safetensors", 300, (1,)), FileEntry("rank-00001.safetensors", BLOCK + 1, (2, 3)))
HALVES = (Chunk((0, 0), (2, 3), FILES[0].name, 100), Chunk((2, 0), (1, 3), FILES[1].name, 64))
TENSOR = TensorEntry("exp_avg", "layers.0.attention.wq.weight", "float32", (3, 3), HALVES)
MANIFEST = Manifest(HEAD, (TENSOR,), FILES)


def test_there_and_back() -> None:
    assert from_text(to_text(MANIFEST)) == MANIFEST
    assert MANIFEST.by_key["exp_avg/layers.0.attention.wq.weight"].nbytes == 36
    assert MANIFEST.nbytes == 300 + BLOCK + 1


@settings(max_examples=200)
@given(st.integers(0, len(to_text(MANIFEST)) - 1), st.characters(codec="ascii"))
def test_any_change_is_seen(position: int, character: str) -> None:
    text = to_text(MANIFEST)
    changed = text[:position] + character + text[position + 1 :]
    if json_of(changed) == json.loads(text):
        return  # another way to write the same, such as more white space
    with pytest.raises(CheckpointError):
        from_text(changed)


def json_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@settings(max_examples=100)
@given(st.integers(0, len(to_text(MANIFEST)) - 1))
def test_any_cut_is_seen(length: int) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        from_text(to_text(MANIFEST)[:length])


def chunks(*found: Chunk) -> Manifest:
    return replace(MANIFEST, tensors=(replace(TENSOR, chunks=found),))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (chunks(HALVES[0]), "has 6 of 9 elements"),
        (chunks(*HALVES, HALVES[1]), "has 12 of 9 elements"),
        (chunks(HALVES[0], replace(HALVES[1], offsets=(3, 0))), "outside its shape"),
        (chunks(HALVES[0], replace(HALVES[1], offsets=(-1, 0))), "outside its shape"),
        (chunks(replace(HALVES[0], position=277), HALVES[1]), r"outside of rank-00000\.safetensors"),
        (chunks(replace(HALVES[0], file="other"), HALVES[1]), "outside of other"),
        (replace(MANIFEST, tensors=(replace(TENSOR, dtype="object"),)), "the dtype object"),
        (replace(MANIFEST, tensors=(replace(TENSOR, kind="code"),)), "code/"),
        (replace(MANIFEST, files=(replace(FILES[0], name="../secret"), FILES[1])), r"file '\.\./secret'"),
        (replace(MANIFEST, files=(FILES[0], replace(FILES[1], checksums=(2,)))), "with 1 checksums"),
    ],
)
def test_what_makes_no_sense_is_refused(manifest: Manifest, message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        from_text(to_text(manifest))


def test_another_format_is_not_damage() -> None:
    text = to_text(MANIFEST).replace('{"format": 1', '{"format": 2', 1)
    with pytest.raises(CheckpointError, match=r"format 2; this version of koushi reads format 1") as caught:
        from_text(text)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_checkpoints_of_another_version_are_wrong_input_and_a_damaged_one_among_them_is_not() -> None:
    other, damaged = WrongCheckpoint("has format 2"), DamagedCheckpoint("cannot be read")
    assert (none_whole([other, other]).exit_code, none_whole([other, damaged]).exit_code) == (2, 1)
