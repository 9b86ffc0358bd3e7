"""``koushi generate`` with Hugging Face folders, checkpoints and run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_models import change_config, load, make

from koushi.checkpoint.convert import from_hf
from koushi.data.tokenizer import EMBEDDED, Encoder
from koushi.errors import CheckpointError, DataError
from koushi.generate.command import generate
from koushi.generate.sample import Sampling
from koushi.train.command import train

GREEDY = Sampling(max_tokens=12, temperature=0.0, top_k=None, seed=0)
PROMPT = "import os"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder whose tokenizer is the embedded one."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    make(folder, vocab_size=2100)
    shutil.copy(EMBEDDED, folder / "tokenizer.json")
    change_config(folder, eos_token_id=[5, 1])
    return folder


def printed(path: Path, capfd: pytest.CaptureFixture[str], sampling: Sampling = GREEDY, prompt: str = PROMPT) -> str:
    generate(path, prompt, sampling)
    out, err = capfd.readouterr()
    assert "there is no key-value cache yet" in err
    return str(out)


@torch.no_grad()
def greedy_in_transformers(folder: Path, ids: list[int]) -> list[int]:
    model = load(folder)
    found: list[int] = []
    while len(found) < GREEDY.max_tokens:
        found.append(int(model(torch.tensor([ids + found])).logits[0, -1, :2048].argmax()))
    return found


def test_text_is_what_transformers_would_write(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    encoder = Encoder(EMBEDDED)
    ids = encoder.encode([PROMPT], [False]).tolist()
    expected = encoder.decode(ids + greedy_in_transformers(folder, ids))
    assert printed(folder, capfd) == expected + "\n"


def test_the_tokenizers_own_beginning_is_added(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    begin = {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin["id"]: begin},
    }
    path.write_text(json.dumps(content))
    encoder = Encoder(EMBEDDED)
    ids = [0, *encoder.encode([PROMPT], [False]).tolist()]
    expected = encoder.decode((ids + greedy_in_transformers(folder, ids))[1:])
    assert printed(tmp_path / "model", capfd) == expected + "\n"


def test_a_converted_checkpoint_writes_the_same(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = printed(folder, capfd)
    from_hf(folder, tmp_path / "checkpoint", "float32")
    capfd.readouterr()
    assert printed(tmp_path / "checkpoint", capfd) == expected


RUN = """
model: {dim: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 96}
training: {seq_len: 16, global_batch_size: 8, microbatch_size: 8, steps: 40}
optimizer: {lr: 2.0e-2, weight_decay: 0.0}
data: {source: jsonl, path: text.jsonl, validation_fraction: 0}
checkpoint: {every: 40}
run: {device: cpu, timeout: 60, folder: RUN}
"""
DOCUMENT = "one two three four five six seven"


def test_a_run_says_what_it_was_taught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.jsonl").write_text((json.dumps({"text": DOCUMENT}) + "\n") * 200)
    (tmp_path / "run.yaml").write_text(RUN.replace("RUN", str(tmp_path / "run")))
    train(tmp_path / "run.yaml")
    capfd.readouterr()
    long = Sampling(max_tokens=50, temperature=0.0, top_k=None, seed=0)
    assert printed(tmp_path / "run", capfd, long, prompt="one two") == DOCUMENT + "\n"
    assert printed(tmp_path / "run" / "checkpoints" / "step-00000040", capfd, long, prompt="one") == DOCUMENT + "\n"


def test_what_cannot_be_used_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is neither a checkpoint nor a run folder"):
        generate(tmp_path, PROMPT, GREEDY)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"holds no tokenizer\.json; name one with --tokenizer"):
        generate(tmp_path / "model", PROMPT, GREEDY)
    from_hf(tmp_path / "model", tmp_path / "checkpoint", "float32")
    with pytest.raises(DataError, match="was trained on token ids; name a tokenizer"):
        generate(tmp_path / "checkpoint", PROMPT, GREEDY)
    make(tmp_path / "small")
    with pytest.raises(DataError, match="and the model knows 96; name the tokenizer it was trained with"):
        generate(tmp_path / "small", PROMPT, GREEDY, EMBEDDED)


def test_a_tokenizer_can_be_named(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = printed(folder, capfd)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    generate(tmp_path / "model", PROMPT, GREEDY, EMBEDDED)
    assert capfd.readouterr().out == expected
