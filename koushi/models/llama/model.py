"""Llama 3 as plain single-device PyTorch (arXiv 2407.21783).

Nothing here knows of parallelism. Two habits make the model easy to cut: head counts are read from
the shapes that come out of the projections, and a part that a pipeline stage does not hold is None.

Shape letters: B samples, T tokens of one sample, D dim, H query heads, G key and value heads,
E head_dim, V vocabulary.

Parameters are stored in one dtype and used in that of the activations, which the embedding sets.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from koushi.models.layers import Embedding, Linear, RMSNorm
from koushi.models.llama.sizes import LlamaSize


def rotary_frequencies(size: LlamaSize) -> Tensor:
    """Angle per token of every pair of channels, [E / 2] in float64.

    RoFormer (arXiv 2104.09864); with ``rope_scaling``, long wavelengths are stretched by ``factor``,
    short ones kept, and those between blended, as Llama 3.1's model card describes.
    """
    exponents = torch.arange(0, size.head_dim, 2, dtype=torch.float64) / size.head_dim
    frequencies = size.rope_theta**-exponents
    scaling = size.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Rotary:
    """Cosines and sines of the positions 0 .. T-1, [T, E / 2]; made once per length, device and dtype."""

    def __init__(self, size: LlamaSize):
        self._size = size
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (seq_len, device, dtype)
        if key not in self._tables:
            angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), rotary_frequencies(self._size))
            self._tables[key] = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return self._tables[key]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring channel pairs of ``x`` [..., E] by their angles, which broadcast to [..., E / 2]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.head_dim = size.head_dim
        self.wq = Linear(size.dim, size.n_heads * size.head_dim)
        self.wk = Linear(size.dim, size.n_kv_heads * size.head_dim)
        self.wv = Linear(size.dim, size.n_kv_heads * size.head_dim)
        self.wo = Linear(size.n_heads * size.head_dim, size.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [B, T, heads, E] in memory: attention's output then has that order too, and flattens without a copy.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = (rotate(one, cos.unsqueeze(1), sin.unsqueeze(1)) for one in (q, k))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.w1 = Linear(size.dim, size.ffn_dim)
        self.w2 = Linear(size.ffn_dim, size.dim)
        self.w3 = Linear(size.dim, size.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.attention_norm = RMSNorm(size.dim, size.norm_eps)
        self.attention = Attention(size)
        self.ffn_norm = RMSNorm(size.dim, size.norm_eps)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """A whole model, or the ``layers`` of one pipeline stage with its ends.

    ``forward`` takes token ids [B, T] on the first stage, activations [B, T, D] on others, and gives
    logits [B, T, V] on the last stage, activations on others. ``seq_len`` is T of the whole sample,
    whatever part of it the activations hold.
    """

    def __init__(
        self, size: LlamaSize, seq_len: int, layers: range | None = None, *, first: bool = True, last: bool = True
    ):
        super().__init__()
        self.size = size
        self.seq_len = seq_len
        self.compute_dtype = torch.get_default_dtype()
        self.rotary = Rotary(size)
        self.tok_embeddings = Embedding(size.vocab_size, size.dim) if first else None
        held = range(size.n_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(layer): Block(size) for layer in held})
        self.norm = RMSNorm(size.dim, size.norm_eps) if last else None
        self.output = Linear(size.dim, size.vocab_size) if last else None
        self.tie()

    def tie(self) -> None:
        """Make the output projection the embedding, where the model says so and one part holds both."""
        if self.size.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        self.compute_dtype = dtype
        if self.tok_embeddings is not None:
            self.tok_embeddings.compute_dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        seq_len = x.shape[1] if self.tok_embeddings is not None else self.seq_len
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        cos, sin = self.rotary.tables(seq_len, x.device, self.compute_dtype)
        for block in self.layers.values():
            x = block(x, cos, sin)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x

    def part(self, layers: range, *, first: bool, last: bool) -> Llama:
        """One pipeline stage made of this model's own modules.

        A tied output that leaves its embedding behind gets a parameter of its own, since two parts
        are trained as two modules.
        """
        part = Llama(self.size, self.seq_len, range(0), first=False, last=False)
        part.compute_dtype = self.compute_dtype
        part.layers = nn.ModuleDict({str(layer): self.layers[str(layer)] for layer in layers})
        part.tok_embeddings = self.tok_embeddings if first else None
        part.norm = self.norm if last else None
        part.output = self.output if last else None
        if part.output is not None and self.size.tie_embeddings and not first:
            part.output.weight = nn.Parameter(part.output.weight.detach().clone())
        return part
