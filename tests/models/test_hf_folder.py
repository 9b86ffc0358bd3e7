"""Folders that are damaged, incomplete or of another kind are told apart, everything at once and before torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_models import change_config, make
from safetensors.torch import load_file, save_file

from koushi.errors import WeightsError
from koushi.models.hf_folder import is_hf_folder, read_header
from koushi.models.llama.hf import check_folder

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make(folder / "single", num_hidden_layers=1)
    make(folder / "sharded", num_hidden_layers=1, shard="15KB")
    return folder


@pytest.fixture
def models(sound: Path, tmp_path: Path) -> Path:
    """Copies that a test may break: ``single`` and ``sharded``."""
    for name in ("single", "sharded"):
        shutil.copytree(sound / name, tmp_path / name)
    return tmp_path


def reasons(folder: Path) -> list[str]:
    with pytest.raises(WeightsError) as raised:
        check_folder(folder)
    return [reason.replace(f"{folder}", "DIR") for reason in raised.value.reasons]


def test_sound_folders_pass(models: Path) -> None:
    for name in ("single", "sharded"):
        size, found = check_folder(models / name)
        assert size.n_layers == 1
        assert len(found.tensors) == 12
        assert is_hf_folder(models / name)
    assert not is_hf_folder(models)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    held = load_file(folder / ONE)
    change(held)
    save_file(held, folder / ONE, {"format": "pt"})


def test_missing_extra_and_misshapen_tensors_come_together(models: Path) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        del held["model.norm.weight"]
        held["model.layers.1.mlp.up_proj.weight"] = torch.ones(2)
        held["lm_head.weight"] = torch.ones(95, 32)
        held["model.embed_tokens.weight"] = torch.ones(96, 32, dtype=torch.int8)

    rewrite(models / "single", change)
    assert sorted(reasons(models / "single")) == [
        "DIR/model.safetensors: lm_head.weight is [95, 32], by config.json it must be [96, 32]",
        "DIR/model.safetensors: model.embed_tokens.weight is I8, and only F64, F32, F16, BF16 are read",
        "DIR: holds model.layers.1.mlp.up_proj.weight, which the model of its config.json does not have",
        "DIR: lacks model.norm.weight",
    ]


def test_a_bias_is_not_dropped_silently(models: Path) -> None:
    rewrite(models / "single", lambda held: held.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    (reason,) = reasons(models / "single")
    assert "holds model.layers.0.self_attn.q_proj.bias" in reason


def test_long_lists_are_cut(models: Path) -> None:
    change_config(models / "single", num_hidden_layers=2)
    (reason,) = reasons(models / "single")
    assert reason.startswith("DIR: lacks model.layers.1.input_layernorm.weight, ")
    assert reason.endswith(" and 5 more")


def test_a_missing_shard_is_named_once(models: Path) -> None:
    shards = sorted((models / "sharded").glob("model-*"))
    assert len(shards) > 2
    shards[1].unlink()
    assert reasons(models / "sharded") == [f"DIR/{shards[1].name}: there is no such file"]


def test_a_truncated_file_is_told(models: Path) -> None:
    for name, size in (("single", 20_000), ("sharded", 11)):
        file = sorted((models / name).glob("model*.safetensors"))[0]
        os.truncate(file, size)
        (reason,) = reasons(models / name)
        assert reason.startswith(f"DIR/{file.name}: is truncated")
        assert f"{size} bytes" in reason
    (models / "single" / ONE).write_bytes(b"")
    assert reasons(models / "single") == [f"DIR/{ONE}: is truncated, or no safetensors file (0 bytes)"]


def test_bytes_after_the_end_are_told(models: Path) -> None:
    with (models / "single" / ONE).open("ab") as file:
        file.write(b"more")
    (reason,) = reasons(models / "single")
    assert "goes on after its last tensor" in reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "DIR/config.json: holds NaN, which is no JSON number"),
        ('{"model_type": "llama",\n}', "DIR/config.json:2:1: broken JSON"),
        ("[]", "DIR/config.json: is no JSON object"),
        ("[" * 100_000, "DIR/config.json: JSON nested too deep to read"),
        (b"\xff", "DIR/config.json: is not UTF-8"),
        (None, "DIR/config.json: there is no such file"),
    ],
)
def test_a_config_that_cannot_be_read(models: Path, text: str | bytes | None, reason: str) -> None:
    path = models / "single" / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    (found,) = reasons(models / "single")
    assert found.startswith(reason)


def test_what_is_wrong_with_config_and_files_comes_together(models: Path) -> None:
    change_config(models / "single", mlp_bias=True)
    (models / "single" / ONE).unlink()
    (models / "single" / "pytorch_model.bin").touch()
    assert reasons(models / "single") == [
        "DIR/config.json: mlp_bias is True; only False is computed",
        f"DIR: holds neither {ONE} nor {INDEX}; pytorch_model.bin is pickled and could run code, so it is not read: "
        "save the model as safetensors",
    ]


def test_no_folder(tmp_path: Path) -> None:
    (reason,) = reasons(tmp_path / "none")
    assert reason.startswith("DIR: there is no such folder")


def index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def test_an_index_that_leads_out_of_the_folder_is_refused(models: Path) -> None:
    index(models / "sharded", lambda places: places.update({"model.norm.weight": "../single/model.safetensors"}))
    (reason,) = reasons(models / "sharded")
    assert reason.startswith(
        f"DIR/{INDEX}: places model.norm.weight in '../single/model.safetensors', which is no file"
    )


def test_an_index_that_its_files_do_not_follow(models: Path) -> None:
    first = sorted((models / "sharded").glob("model-*"))[0].name
    index(models / "sharded", lambda places: places.update({"model.norm.weight": first}))
    assert reasons(models / "sharded") == [f"DIR/{first}: lacks model.norm.weight, which {INDEX} places there"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "its header gives a 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "impossible numbers"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "its header does not describe a"),
        ({"a": 1}, "its header does not describe a"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, header: dict[str, object], reason: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / ONE).write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with pytest.raises(WeightsError, match=reason):
        read_header(tmp_path / ONE)
