"""Hugging Face folder to checkpoint to Hugging Face folder, and what a run has trained, in transformers' hands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import LLAMA3, SIZES, load, make, tokens
from safetensors.torch import load_file
from transformers import AutoTokenizer

from koushi.checkpoint.convert import from_hf, to_hf
from koushi.checkpoint.trained import CheckpointWeights
from koushi.checkpoint.weights import whole_model
from koushi.data.tokenizer import EMBEDDED, Encoder
from koushi.errors import CheckpointError, WeightsError
from koushi.models.hf_folder import read_object
from koushi.train.command import train

RUN = """
model: {vocab_size: 96, dim: 32, n_layers: 3, n_heads: 4, n_kv_heads: 2, ffn_dim: 48}
training: {seq_len: 16, global_batch_size: 4, microbatch_size: 1, steps: 2}
optimizer: {lr: 1.0e-2}
data: {source: synthetic}
checkpoint: {every: 2}
run: {device: cpu, timeout: 60}
"""
SCALING = "{factor: 8.0, original_max_seq_len: 16}"


def trained(folder: Path, *overrides: str, text: str = RUN) -> Path:
    """``folder``, after a run of two steps in it."""
    path = folder.with_suffix(".yaml")
    path.write_text(text)
    train(path, [*overrides, f"run.folder={folder}"])
    return folder


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "grad_norm" in row]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_to_the_bit(tied: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "in", torch.bfloat16, shard="20KB", tie_word_embeddings=tied, rope_parameters=LLAMA3)
    from_hf(tmp_path / "in", tmp_path / "checkpoint", "float32")
    to_hf(tmp_path / "checkpoint", tmp_path / "out", "bfloat16", 1e-5)
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    config = read_object(tmp_path / "out" / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"], config["max_position_embeddings"]) == (1, 2, 128)
    printed = capfd.readouterr().out.splitlines()
    assert printed[0].startswith(f"wrote {tmp_path / 'checkpoint'}: {len(before)} tensors, ")
    assert printed[1] == f"wrote {tmp_path / 'out'} in bfloat16"


@pytest.mark.parametrize(
    ("overrides", "tied"),
    [
        (("--tp", "2", "--dp-shard", "2"), False),
        (("--pp", "2", "model.tie_embeddings=true"), True),
        ((f"model.rope_scaling={SCALING}", "model.tie_embeddings=true", "model.norm_eps=1e-3"), True),
    ],
    ids=["tp and dp_shard", "pp, tied", "llama3 scaling, tied"],
)
def test_what_a_run_has_trained_computes_the_same_in_transformers(
    overrides: tuple[str, ...], tied: bool, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", *overrides)
    to_hf(run, tmp_path / "out", "float32", 5)
    with CheckpointWeights(run) as weights, torch.no_grad():
        ours = whole_model(weights, 60, torch.device("cpu"), torch.float32)(tokens())
    model = load(tmp_path / "out")
    assert model.config.tie_word_embeddings is tied
    with torch.no_grad():
        assert (model(tokens()).logits - ours).abs().max() < 1e-4
    assert ours.std() > 0.05


def test_a_run_goes_on_from_a_converted_checkpoint(tmp_path: Path) -> None:
    make(tmp_path / "in", rms_norm_eps=1e-5)
    from_hf(tmp_path / "in", tmp_path / "checkpoint", "float32")
    layout = ("--dp-shard", "2")
    resume = f"run.resume={tmp_path / 'checkpoint'}"
    resumed = trained(tmp_path / "resumed", *layout, "model.rope_theta=10000.0", resume)
    _, _, rest = RUN.partition("training:")
    direct = trained(tmp_path / "direct", *layout, text="model: {hf: in}\ntraining:" + rest)
    assert len(losses(direct)) == 2
    assert losses(resumed) == losses(direct)


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    """The embedded one gets the settings that transformers needs; a folder's own files are copied as they are."""
    make(tmp_path / "in", vocab_size=2048)
    shutil.copy(EMBEDDED, tmp_path / "in" / "tokenizer.json")
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    from_hf(tmp_path / "in", tmp_path / "checkpoint", "float32")
    to_hf(tmp_path / "checkpoint", tmp_path / "copied", "float32", 5)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()

    (tmp_path / "in" / "tokenizer.json").unlink()
    with CheckpointWeights(tmp_path / "checkpoint") as weights:
        assert weights.config.data.tokenizer == str(tmp_path / "in" / "tokenizer.json")
    to_hf(tmp_path / "checkpoint", tmp_path / "without", "float32", 5)
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def test_the_embedded_tokenizer_works_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("a text of some words, " * 200)
    run = trained(tmp_path / "run", "model.vocab_size=2048", "data.source=text", f"data.path={text}")
    to_hf(run, tmp_path / "out", "float32", 5)
    assert capfd.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'out'} in float32"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    encoder = Encoder(EMBEDDED)
    sentence = "import numpy as np\n"
    assert tokenizer(sentence)["input_ids"] == encoder.encode([sentence], [False]).tolist()
    assert tokenizer.eos_token_id == encoder.end_id == read_object(tmp_path / "out" / "config.json")["eos_token_id"]
    assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence


def test_a_run_on_token_ids_says_that_it_has_no_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    to_hf(run, tmp_path / "out", "float32", 5)
    said = "without a tokenizer: the run was trained on token ids"
    assert capfd.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'out'} in float32; {said}"
    assert load(tmp_path / "out").config.vocab_size == SIZES["vocab_size"]


def test_wrong_places_are_told(tmp_path: Path) -> None:
    make(tmp_path / "in")
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a run folder"):
        to_hf(tmp_path / "in", tmp_path / "out", "float32", 5)
    with pytest.raises(WeightsError, match="is there already"):
        from_hf(tmp_path / "in", tmp_path / "in", "float32")
    with pytest.raises(WeightsError, match="there is no such folder"):
        from_hf(tmp_path / "none", tmp_path / "checkpoint", "float32")
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot be written"):
        from_hf(tmp_path / "in", tmp_path / "file" / "checkpoint", "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "in"]
