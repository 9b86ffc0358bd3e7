"""Llama's parameters: names, shapes, how each is cut, how each begins. No torch.

The one place that says so; tensor parallel, initial weights, checkpoints, the planner and the
pictures read it. Shape letters: V vocabulary, D dim, F ffn_dim, H heads x head_dim, K kv heads x
head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from koushi.layout import Cut, Placement, Replicate, Shard, replicated_over
from koushi.models.llama.sizes import LlamaSize

EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"


class Shapes(Protocol):
    """What shapes the parameters."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class Parameter:
    """One parameter of the unsharded model."""

    name: str
    shape: tuple[int, ...]
    tp: Placement
    """How tensor parallel cuts it."""
    std: float | None
    """Initial standard deviation; None: ones."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut, in the order they are made."""
        return (Cut("tp", self.tp), Cut("dp_shard", Shard(0)))

    @property
    def copied_over_tp(self) -> bool:
        """Whether every tp rank holds all of it."""
        return "tp" in replicated_over(self.cuts)

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms."""
        return len(self.shape) > 1


def kv_placement(size: Shapes, tp: int) -> Placement:
    """Key and value projections are cut by head, or copied where tp has more ranks than there are heads."""
    return Shard(0) if size.n_kv_heads % tp == 0 else Replicate()


def block_parameters(size: Shapes, layer: int, tp: int) -> Iterator[Parameter]:
    """The parameters of block ``layer``.

    Standard deviations follow GPT-2's rule of shrinking what writes to the residual stream with
    depth, per layer as in torchtitan 0.1: 0.02 / sqrt(2 (layer + 1)).
    """
    kv = size.n_kv_heads * size.head_dim
    residual = 0.02 / (2 * (layer + 1)) ** 0.5
    prefix = f"layers.{layer}."
    yield Parameter(prefix + "attention_norm.weight", (size.dim,), Replicate(), None)
    yield Parameter(prefix + "attention.wq.weight", (size.n_heads * size.head_dim, size.dim), Shard(0), 0.02)
    yield Parameter(prefix + "attention.wk.weight", (kv, size.dim), kv_placement(size, tp), 0.02)
    yield Parameter(prefix + "attention.wv.weight", (kv, size.dim), kv_placement(size, tp), 0.02)
    yield Parameter(prefix + "attention.wo.weight", (size.dim, size.n_heads * size.head_dim), Shard(1), residual)
    yield Parameter(prefix + "ffn_norm.weight", (size.dim,), Replicate(), None)
    yield Parameter(prefix + "feed_forward.w1.weight", (size.ffn_dim, size.dim), Shard(0), 0.02)
    yield Parameter(prefix + "feed_forward.w2.weight", (size.dim, size.ffn_dim), Shard(1), residual)
    yield Parameter(prefix + "feed_forward.w3.weight", (size.ffn_dim, size.dim), Shard(0), 0.02)


def parameters(size: Shapes, tp: int = 1) -> dict[str, Parameter]:
    """Every parameter by name, in the order of the model; a tied output has no entry of its own."""
    found = [Parameter(EMBEDDING, (size.vocab_size, size.dim), Shard(0), 0.02)]
    for layer in range(size.n_layers):
        found.extend(block_parameters(size, layer, tp))
    found.append(Parameter("norm.weight", (size.dim,), Replicate(), None))
    if not size.tie_embeddings:
        found.append(Parameter(OUTPUT, (size.vocab_size, size.dim), Shard(0), size.dim**-0.5))
    return {parameter.name: parameter for parameter in found}


def canonical(name: str, size: LlamaSize) -> str:
    """The name a parameter is stored under: a tied output is the embedding."""
    return EMBEDDING if size.tie_embeddings and name == OUTPUT else name


@dataclass(frozen=True)
class Region:
    """A module that tensor parallel computes on whole sequences, between parts cut along the sequence."""

    module: str
    """Its name; ``*`` stands for a layer number."""
    scatters: bool
    """Whether its output is a partial sum, to be added up and cut along the sequence again."""


REGIONS = (
    Region("layers.*.attention", scatters=True),
    Region("layers.*.feed_forward", scatters=True),
    Region("output", scatters=False),
)
