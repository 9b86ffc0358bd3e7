"""``model.hf``: the sizes come from the folder, and what is wrong with it is told with everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from koushi.config.schema import RopeScaling
from koushi.errors import Problem
from koushi.job import Job
from koushi.models.llama.hf import config_of, hf_shapes
from koushi.models.llama.sizes import LlamaSize

Checked = Callable[..., Job]
Problems = Callable[..., tuple[Problem, ...]]

SIZE = LlamaSize(
    vocab_size=64,
    dim=16,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=24,
    tie_embeddings=True,
    norm_eps=1e-6,
    rope_theta=5e5,
    rope_scaling=RopeScaling(factor=4.0),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``models/tiny`` beside the run file, with a tokenizer."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    config = config_of(SIZE, dtype="float32", max_seq_len=32, begin_id=None, end_id=1)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes(SIZE).items()}, folder / "model.safetensors")
    added = [{"id": 63, "content": "<|end_of_text|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    return folder


def test_sizes_and_tokenizer_come_from_the_folder(checked: Checked, folder: Path) -> None:
    job = checked("model: {hf: models/tiny}\n")
    assert job.size == SIZE
    assert job.model_name == "tiny"
    assert job.config.model.hf == str(folder)
    assert (job.config.model.dim, job.config.model.rope_scaling) == (16, SIZE.rope_scaling)
    assert job.config.data.tokenizer == str(folder / "tokenizer.json")
    assert checked("model: {hf: models/tiny}\ndata: {source: synthetic, tokenizer: embedded}\n").size == SIZE


def test_without_a_tokenizer_in_the_folder_the_default_stays(checked: Checked, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert checked("model: {hf: models/tiny}\ndata: {source: synthetic}\n").config.data.tokenizer == "embedded"


@pytest.mark.usefixtures("folder")
def test_a_resolved_config_is_a_run_file_of_the_same_job(checked: Checked) -> None:
    job = checked("model: {hf: models/tiny}\n")
    assert checked(json.dumps(job.config.model_dump(mode="json"))) == job


@pytest.mark.usefixtures("folder")
def test_sizes_beside_the_folder_are_refused(problems: Problems) -> None:
    text = "model: {hf: models/tiny, name: llama3-8b, dim: 32, rope_scaling: {factor: 8.0}, n_heads: 4}\n"
    assert [(one.where, one.key, one.what, one.legal) for one in problems(text)] == [
        ("run.yaml:1:32", "model.name", "is 'llama3-8b' beside model.hf, which says the model", "leave it out"),
        ("run.yaml:1:48", "model.dim", "is 32, but the model of model.hf has 16", "leave it out"),
        ("run.yaml:1:52", "model.rope_scaling", problems(text)[2].what, "leave it out"),
    ]


@pytest.mark.usefixtures("folder")
def test_rules_read_the_sizes_of_the_folder(problems: Problems) -> None:
    text = "model: {hf: models/tiny}\nparallelism: {tensor_parallel_degree: 3}\ndata: {source: synthetic}\n"
    found = problems(text, "training.seq_len=48")
    assert any(one.what == "4 heads do not divide over tp 3" for one in found)
    assert all(one.where == "run.yaml:2:39" for one in found)
    (found_one,) = problems("model: {hf: models/tiny}\ndata: {tokenizer: embedded}\n")
    assert "the tokenizer is larger than the model's vocabulary" in found_one.what


def test_everything_wrong_with_the_folder_is_told_once(problems: Problems, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mlp_bias": True, "hidden_act": "gelu"}))
    (folder / "model.safetensors").write_bytes(b"12345678901234567890")
    found = problems("model: {hf: models/tiny}\ntraining: {steps: no}\n")
    assert [(one.where, one.key) for one in found] == [("run.yaml:1:13", "model.hf")] * 3 + [
        ("run.yaml:2:19", "training.steps")
    ]
    assert [one.what.partition(": ")[2].split(";")[0] for one in found[:3]] == [
        "hidden_act is 'gelu'",
        "mlp_bias is True",
        "is truncated, or no safetensors file (20 bytes)",
    ]


def test_of_another_architecture_nothing_else_is_told(problems: Problems, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    (found,) = problems("model: {hf: models/tiny}\n")
    assert "architectures is ['GPT2LMHeadModel'] and model_type 'gpt2'; only LlamaForCausalLM" in str(found)


def test_a_folder_that_is_not_there(problems: Problems, folder: Path) -> None:
    shutil.rmtree(folder)
    (found,) = problems("model: {hf: models/tiny}\nparallelism: {tensor_parallel_degree: 16}\n")
    assert "there is no such folder" in found.what
    (found,) = problems("model: {hf: 3}\nparallelism: {tensor_parallel_degree: 16}\n")
    assert (found.key, found.legal) == ("model.hf", "a string is needed")
