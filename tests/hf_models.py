"""Tiny random Llamas that transformers makes and saves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10_000.0,
}
CASES: dict[str, dict[str, Any]] = {
    "untied, grouped queries": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own keys": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "one KV head": {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "llama3 scaling, tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
}


def make(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any) -> LlamaForCausalLM:
    """A model of ``SIZES`` with ``changes``, every parameter random, saved in ``folder``."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return model.eval()


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tokens(count: int = 60) -> torch.Tensor:
    """Ids [2, count], long enough that every rotary channel turns."""
    return torch.randint(0, SIZES["vocab_size"], (2, count), generator=torch.Generator().manual_seed(1))


def change_config(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Edit ``folder``'s config.json."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
