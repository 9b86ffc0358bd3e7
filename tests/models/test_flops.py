"""FLOPs of a token, counted by hand for a small size."""

from __future__ import annotations

from dataclasses import replace

from koushi.models.llama.flops import parameter_count, training_flops_per_token
from koushi.models.llama.sizes import PRESETS, LlamaSize

SIZE = LlamaSize(vocab_size=10, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=12)

NORMS = 2 * 8
QUERY_AND_OUT, KEY_AND_VALUE = 2 * 8 * 8, 2 * 8 * 4
FEED_FORWARD = 3 * 8 * 12
BLOCK = NORMS + QUERY_AND_OUT + KEY_AND_VALUE + FEED_FORWARD
TABLE = 10 * 8


def test_parameters_by_hand() -> None:
    assert BLOCK == 496
    assert parameter_count(SIZE) == 2 * BLOCK + 8 + 2 * TABLE == 1160
    assert parameter_count(replace(SIZE, tie_embeddings=True)) == 2 * BLOCK + 8 + TABLE


def test_flops_by_hand() -> None:
    """Looking a token up multiplies nothing, so one of the two tables is left out; a tied one is the output."""
    multiplying = 2 * BLOCK + 8 + TABLE
    attention = 12 * 2 * 8 * 5
    assert training_flops_per_token(SIZE, 5) == 6 * multiplying + attention == 7440
    assert training_flops_per_token(replace(SIZE, tie_embeddings=True), 5) == 7440


def test_attention_grows_with_the_sequence_alone() -> None:
    size = PRESETS["llama3-8b"]
    more = training_flops_per_token(size, 8192) - training_flops_per_token(size, 4096)
    assert more == 12 * 32 * 4096 * 4096
