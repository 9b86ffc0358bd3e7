"""Llama's arithmetic per token. No torch."""

from __future__ import annotations

from functools import cache
from math import prod

from koushi.models.llama.layout import EMBEDDING, parameters
from koushi.models.llama.sizes import LlamaSize


@cache
def parameter_count(size: LlamaSize) -> int:
    return sum(prod(parameter.shape) for parameter in parameters(size).values())


def training_flops_per_token(size: LlamaSize, seq_len: int) -> int:
    """Forward and backward FLOPs of one token, as utilisation counts them.

    PaLM's convention (arXiv 2204.02311, appendix B): 6 per parameter that multiplies, so without the
    embedding look-up, and 12 x layers x heads x head_dim x seq_len for attention, the causal half not
    taken off; recompute is not counted.
    """
    multiplying = parameter_count(size)
    if not size.tie_embeddings:
        multiplying -= prod(parameters(size)[EMBEDDING].shape)
    return 6 * multiplying + 12 * size.n_layers * size.n_heads * size.head_dim * seq_len
