"""Shapes of published models, with what their tables leave out filled in by family. No torch.

What a family's papers and configurations say: Llama (arXiv 2302.13971, 2407.21783); GPT-3 as Megatron trains it
(arXiv 2104.04473); BLOOM (arXiv 2211.05100, section 3.2: ALiBi, embeddings tied); MPT (llm-foundry's benchmarks:
no biases, tied, and by their parameter counts learned positions); Nemotron-4 (arXiv 2402.16819: squared ReLU, no
biases, untied); Qwen3 (arXiv 2505.09388: heads of 128 whatever the width).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from koushi.accuracy.rows import Row
from koushi.plan.workload import Transformer

DEFAULT_VOCAB = 51_200
"""GPT-2's 50,257 padded to a multiple of 128 times 8, as Megatron does."""
CLOSE = 0.25
"""How far the parameters that follow from the sizes may be from what the source says; names are often nominal."""


@dataclass(frozen=True)
class Family:
    """What all models of a name have in common."""

    gated: bool = True
    biases: bool = False
    layer_norm: bool = False
    tied: bool = False
    learned_positions: bool = False
    vocab: int = DEFAULT_VOCAB
    head_dim: int | None = None


LLAMA = Family(vocab=32_000)
GPT = Family(gated=False, biases=True, layer_norm=True, tied=True, learned_positions=True)
ALIBI = Family(gated=False, biases=True, layer_norm=True, tied=True, vocab=250_880)

FAMILIES: Mapping[str, Family] = {
    "nanotron": LLAMA,
    "llama3": Family(vocab=128_256),
    "llama-3": Family(vocab=128_256),
    "llama": LLAMA,
    "tinyllama": LLAMA,
    "mistral": LLAMA,
    "internlm": Family(vocab=103_168),
    "qwen3": Family(vocab=151_936, head_dim=128),
    "qwen": Family(vocab=151_936),
    "mpt": Family(gated=False, layer_norm=True, tied=True, learned_positions=True, vocab=50_368),
    "nemotron": Family(gated=False, layer_norm=True, vocab=256_000),
    "bloom": ALIBI,
    "gpt": GPT,
    "opt": GPT,
    "falcon": Family(gated=False, layer_norm=True, tied=True, vocab=65_024),
}
"""By how a model's name begins; the longest that matches holds."""

SMALL_AND_TIED = ("llama3.2", "llama-3.2", "qwen", "nanotron")
"""Families whose small models, feed-forward below 10,000 wide, share embedding and output (the Ultra-Scale
Playbook's scaling_benchmarks.py draws the line there; Llama 3.2's and Qwen's cards agree)."""


def family_of(row: Row) -> Family:
    name = row.model.lower()
    known = [start for start in FAMILIES if name.startswith(start)]
    family = FAMILIES[max(known, key=len)] if known else None
    if row.source.startswith("bigscience") and family is GPT:
        return ALIBI
    if family is None:
        wide = row.ffn is not None and row.dim is not None and row.ffn == 4 * row.dim
        return GPT if wide else LLAMA
    return family


def transformer(row: Row, heads_by_dim: Mapping[tuple[str, int], int]) -> Transformer | str:
    """The row's model, or why it cannot be told."""
    if row.layers is None or row.dim is None:
        return "the model's sizes are not stated"
    family = family_of(row)
    heads = row.heads or heads_by_dim.get((row.source, row.dim)) or _likely_heads(row.dim)
    kv_heads = row.kv_heads or heads
    if row.dim % heads or heads % kv_heads:
        return "the heads do not divide the model's width"
    tied = family.tied or (row.model.lower().startswith(SMALL_AND_TIED) and (row.ffn or 0) < 10_000)
    model = Transformer(
        n_layers=row.layers,
        dim=row.dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=family.head_dim or row.dim // heads,
        ffn_dim=row.ffn or _likely_ffn(row.dim, family.gated),
        vocab_size=row.vocab or family.vocab,
        tie_embeddings=tied,
        gated=family.gated,
        biases=family.biases,
        layer_norm=family.layer_norm,
        learned_positions=(row.seq_len or 0) if family.learned_positions else 0,
    )
    if row.params_b and abs(parameters(model) / (row.params_b * 1e9) - 1) > CLOSE:
        return "the sizes and the stated number of parameters disagree"
    return model


def _likely_heads(dim: int) -> int:
    """Heads of about 128."""
    return min((n for n in range(1, dim + 1) if dim % n == 0), key=lambda n: (abs(dim // n - 128), n))


def _likely_ffn(dim: int, gated: bool) -> int:
    """4 x the width; where gated 8/3 of it, up to a multiple of 256 (arXiv 2302.13971)."""
    return ceil(dim * 8 / 3 / 256) * 256 if gated else 4 * dim


def parameters(model: Transformer) -> int:
    """Without norms and biases."""
    attention = 2 * model.dim * model.head_dim * (model.n_heads + model.n_kv_heads)
    feed_forward = (3 if model.gated else 2) * model.dim * model.ffn_dim
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim + model.learned_positions * model.dim
    return model.n_layers * (attention + feed_forward) + tables
