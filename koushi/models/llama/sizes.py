"""Llama's sizes: the presets, and a run file's own changes to one. No torch.

Published sizes: Llama 3 (arXiv 2407.21783, table 3) and the model cards of Llama 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from koushi.config.schema import Model, RopeScaling


@dataclass(frozen=True)
class LlamaSize:
    """Everything that fixes the shapes and the maths of a Llama."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def is_shaped_like(self, other: LlamaSize) -> bool:
        """Whether all but what no parameter's shape tells is the same: norms and rotation may differ."""
        same = replace(other, norm_eps=self.norm_eps, rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)
        return self == same


PRESETS: dict[str, LlamaSize] = {
    "llama3-debug": LlamaSize(
        vocab_size=2048, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, rope_theta=10_000.0
    ),
    "llama3-1b": LlamaSize(
        vocab_size=128_256,
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=8192,
        tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama3-3b": LlamaSize(
        vocab_size=128_256,
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        ffn_dim=8192,
        tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama3-8b": LlamaSize(
        vocab_size=128_256,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim=14_336,
        rope_scaling=RopeScaling(),
    ),
    "llama3-70b": LlamaSize(
        vocab_size=128_256,
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim=28_672,
        rope_scaling=RopeScaling(),
    ),
    "llama3-405b": LlamaSize(
        vocab_size=128_256,
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim=53_248,
        rope_scaling=RopeScaling(),
    ),
}


def llama_size(model: Model) -> LlamaSize:
    """The preset that ``model`` names, with the sizes the run file sets itself.

    With ``hf`` the model must be of a resolved config, whose sizes are those of the folder. Raises KeyError
    for an unknown name.
    """
    assert model.hf is None or model.dim is not None, "the sizes of a Hugging Face folder have not been read"
    given = {key: value for key, value in model if key not in ("name", "hf") and value is not None}
    if model.hf is not None:
        given["rope_scaling"] = model.rope_scaling
    return replace(PRESETS[model.name], **given)
