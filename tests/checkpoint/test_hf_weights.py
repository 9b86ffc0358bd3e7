"""Hugging Face folders as weights: the same logits as transformers, the same bits there and back."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from hf_models import CASES, LLAMA3, change_config, load, make, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from koushi.checkpoint import hf
from koushi.checkpoint.hf import About, HfWeights, export
from koushi.checkpoint.weights import whole_model
from koushi.errors import WeightsError
from koushi.layout import Slices, local_slices
from koushi.models.llama.layout import parameters

ABOUT = About(max_seq_len=128, begin_id=1, end_id=2)
WHOLE = 10**9
CPU = torch.device("cpu")
case = pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())


@torch.no_grad()
def our_logits(folder: Path) -> Tensor:
    with HfWeights(folder) as weights:
        logits: Tensor = whole_model(weights, 60, CPU, torch.float32)(tokens())
    return logits


@torch.no_grad()
def their_logits(folder: Path) -> Tensor:
    logits: Tensor = load(folder)(tokens()).logits
    return logits


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


@case
def test_logits_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path, **changes)
    theirs = their_logits(tmp_path)
    assert theirs.std() > 0.1
    assert (our_logits(tmp_path) - theirs).abs().max() < 1e-4


@case
def test_an_export_is_what_transformers_would_save(changes: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path / "in", **changes)
    with HfWeights(tmp_path / "in") as weights:
        export(weights, tmp_path / "out", torch.float32, ABOUT, WHOLE)
    assert same_bits(stored(tmp_path / "in"), stored(tmp_path / "out"))
    assert torch.equal(their_logits(tmp_path / "in"), their_logits(tmp_path / "out"))
    with HfWeights(tmp_path / "in") as before, HfWeights(tmp_path / "out") as after:
        assert before.size == after.size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype_goes_there_and_back_in_shards(dtype: torch.dtype, tmp_path: Path) -> None:
    make(tmp_path / "in", dtype, shard="20KB")
    assert len(list((tmp_path / "in").glob("model-*.safetensors"))) > 2
    with HfWeights(tmp_path / "in") as weights:
        export(weights, tmp_path / "out", dtype, ABOUT, 25_000)
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 25_000 + 2_000
    assert same_bits(stored(tmp_path / "in"), stored(tmp_path / "out"))
    assert load(tmp_path / "out", dtype).dtype == dtype


def test_the_dtype_can_be_chosen(tmp_path: Path) -> None:
    make(tmp_path / "in")
    with HfWeights(tmp_path / "in") as weights:
        export(weights, tmp_path / "out", torch.bfloat16, ABOUT, WHOLE)
    cast = {name: value.bfloat16() for name, value in stored(tmp_path / "in").items()}
    assert same_bits(cast, stored(tmp_path / "out"))


class Counting:
    """Stands in for the reading of stored tensors, and counts the numbers that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        inner = HfWeights._stored

        def read(weights: HfWeights, name: str, part: Slices) -> Tensor:
            found = inner(weights, name, part)
            self.count += found.numel()
            return found

        monkeypatch.setattr(HfWeights, "_stored", read)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_rank_reads_its_slices_and_no_more(kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, shard="20KB", num_key_value_heads=kv_heads, num_hidden_layers=1)
    with HfWeights(tmp_path) as weights:
        whole = dict(weights.whole())
        counting = Counting(monkeypatch)
        read = 0
        for tp, dp_shard in itertools.product((1, 2, 4), (1, 2, 3, 5)):
            degrees = {"tp": tp, "dp_shard": dp_shard}
            for about in parameters(weights.size, tp).values():
                for index in itertools.product(range(tp), range(dp_shard)):
                    coordinate = dict(zip(degrees, index, strict=True))
                    part = local_slices(about.shape, about.cuts, degrees, coordinate)
                    counting.count = 0
                    found = weights.read(about.name, part)
                    assert torch.equal(found, whole[about.name][part]), (about.name, part)
                    assert counting.count == found.numel()
                    read += 1
    assert read == 12 * (1 + 2 + 4) * (1 + 2 + 3 + 5)


def test_rows_of_part_of_a_head_are_found(tmp_path: Path) -> None:
    make(tmp_path, num_hidden_layers=1)
    name = "layers.0.attention.wq.weight"
    with HfWeights(tmp_path) as weights:
        whole = dict(weights.whole())[name]
        for start, stop in itertools.combinations(range(33), 2):
            part = (slice(start, stop), slice(3, 7))
            assert torch.equal(weights.read(name, part), whole[part])


def test_a_tied_file_may_repeat_its_embedding(tmp_path: Path) -> None:
    make(tmp_path, tie_word_embeddings=True)
    expected = our_logits(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    embedding = held["model.embed_tokens.weight"]
    save_file({**held, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(our_logits(tmp_path), expected)
    save_file({**held, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"lm_head\.weight: config\.json ties it"):
        our_logits(tmp_path)


def test_files_of_transformers_4_are_read(tmp_path: Path) -> None:
    make(tmp_path, rope_parameters=LLAMA3)
    expected = our_logits(tmp_path)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    older = {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": scaling, "torch_dtype": "float32"}
    change_config(tmp_path, drop=("rope_parameters", "dtype", "head_dim"), **older)
    held = load_file(tmp_path / "model.safetensors")
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**held, table: torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(our_logits(tmp_path), expected)


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with HfWeights(tmp_path / "in") as weights:
        export(weights, tmp_path / "out", torch.float32, ABOUT, WHOLE)
        before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
        for place in (tmp_path / "out", tmp_path / "out" / "config.json"):
            with pytest.raises(WeightsError, match="is there already"):
                export(weights, place, torch.float32, ABOUT, WHOLE)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir()) == before


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    make(tmp_path / "in")
    monkeypatch.setattr(hf, "write_tensor_file", full)
    with (
        HfWeights(tmp_path / "in") as weights,
        pytest.raises(WeightsError, match=r"out: cannot be written: No space left on device"),
    ):
        export(weights, tmp_path / "out", torch.float32, ABOUT, WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
