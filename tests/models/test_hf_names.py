"""Llama's names and config.json in Hugging Face's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koushi.config.schema import RopeScaling
from koushi.errors import WeightsError
from koushi.models.llama.hf import config_of, hf_name, hf_shapes, runs, size_of
from koushi.models.llama.layout import parameters
from koushi.models.llama.sizes import PRESETS, LlamaSize

WHERE = Path("config.json")
SIZE = PRESETS["llama3-debug"]
CONFIG = config_of(SIZE, dtype="float32", max_seq_len=512, begin_id=None, end_id=1)
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def wrong(config: dict[str, Any]) -> list[str]:
    with pytest.raises(WeightsError) as raised:
        size_of(config, WHERE)
    assert all(reason.startswith("config.json: ") for reason in raised.value.reasons)
    return [reason.removeprefix("config.json: ") for reason in raised.value.reasons]


def test_every_parameter_has_a_name_of_its_own() -> None:
    names = [hf_name(name) for name in parameters(SIZE)]
    assert len(set(names)) == len(names) == 3 + 9 * SIZE.n_layers
    assert hf_name("layers.11.attention.wq.weight") == "model.layers.11.self_attn.q_proj.weight"
    assert hf_shapes(SIZE)["model.layers.5.mlp.down_proj.weight"] == (SIZE.dim, SIZE.ffn_dim)
    assert "lm_head.weight" not in hf_shapes(replace(SIZE, tie_embeddings=True))


@pytest.mark.parametrize("head_dim", [2, 6, 8])
def test_rows_of_a_head_stand_in_halves(head_dim: int) -> None:
    there = [head * head_dim + side * head_dim // 2 + pair
             for head in range(3) for pair in range(head_dim // 2) for side in (0, 1)]  # fmt: skip
    for start in range(3 * head_dim):
        for stop in range(start + 1, 3 * head_dim + 1):
            rows: list[int] = [-1] * (stop - start)
            for run in runs(slice(start, stop), head_dim):
                rows[run.into] = list(range(run.source.start, run.source.stop))
            assert rows == there[start:stop]


@pytest.mark.parametrize("name", PRESETS)
def test_a_size_comes_back_from_its_config(name: str) -> None:
    size = PRESETS[name]
    assert size_of(config_of(size, dtype="bfloat16", max_seq_len=8, begin_id=None, end_id=[1, 2]), WHERE) == size


def test_transformers_own_defaults_are_used() -> None:
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    least = {"model_type": "llama", **{key: CONFIG[key] for key in needed}}
    expected = replace(SIZE, n_kv_heads=SIZE.n_heads, norm_eps=1e-6, rope_theta=10_000.0)
    assert size_of(least, WHERE) == expected
    assert wrong({"model_type": "llama"}) == [f"{key} is missing" for key in (
        "num_attention_heads", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"
    )]  # fmt: skip


def test_rope_is_read_as_either_version_writes_it() -> None:
    scaled = replace(SIZE, rope_theta=500_000.0, rope_scaling=RopeScaling())
    older = {**CONFIG, "rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", **FACTORS}}
    assert size_of(older, WHERE) == scaled
    newer = {**CONFIG, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **FACTORS}}
    del newer["rope_theta"]
    assert size_of(newer, WHERE) == scaled
    plain = {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert size_of(plain, WHERE) == replace(SIZE, rope_theta=5.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "attention_bias is True; only False is computed"),
        ({"mlp_bias": True}, "mlp_bias is True; only False is computed"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0 is computed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is computed"),
        ({"sliding_window": 4096}, "sliding_window is 4096; it must be left out"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set; it must be left out"),
        ({"head_dim": 16}, "head_dim is 16; only hidden_size / num_attention_heads, here 32, is computed"),
        ({"num_attention_heads": 7}, "7 num_attention_heads do not divide hidden_size 256 into even parts"),
        ({"num_key_value_heads": 3}, "3 num_key_value_heads do not divide 8 num_attention_heads"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; a count is needed"),
        ({"vocab_size": True}, "vocab_size is True; a count is needed"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; a number above 0 is needed"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; true or false is needed"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'; only default and"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; an object is needed"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1 is computed"),
        ({"rope_scaling": {"rope_type": "llama3", **FACTORS, "factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **FACTORS, "high_freq_factor": 1.0}}, "is not above low_freq_factor"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], reason: str) -> None:
    (found,) = wrong({**CONFIG, **changes})
    assert reason in found


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768},
            "architectures is ['GPT2LMHeadModel'] and model_type 'gpt2'",
        ),
        ({**CONFIG, "model_type": "mistral", "sliding_window": 4096}, "and model_type 'mistral'"),
        ({**CONFIG, "architectures": ["LlamaForSequenceClassification"]}, "is ['LlamaForSequenceClassification'] and"),
        ({**CONFIG, "architectures": 3}, "architectures is 3 and model_type 'llama'"),
        ({}, "architectures is None and model_type None"),
    ],
)
def test_of_another_architecture_nothing_else_is_told(config: dict[str, Any], found: str) -> None:
    (told,) = wrong(config)
    assert found in told
    assert told.endswith("; only LlamaForCausalLM of llama is read")


def test_all_reasons_come_at_once() -> None:
    found = wrong({**CONFIG, "mlp_bias": True, "vocab_size": 0, "rope_theta": -1, "num_key_value_heads": 3})
    assert len(found) == 3  # the heads are not judged beside sizes that are wrong


def test_a_size_that_no_preset_has() -> None:
    size = LlamaSize(vocab_size=5, dim=6, n_layers=1, n_heads=3, n_kv_heads=1, ffn_dim=2, norm_eps=1e-3, rope_theta=7.0)
    config = config_of(size, dtype="float32", max_seq_len=9, begin_id=None, end_id=None)
    assert size_of(config, WHERE) == size
    assert (config["head_dim"], config["max_position_embeddings"], config["torch_dtype"]) == (2, 9, "float32")
