"""A block as the operations that autograd sees: what each makes, reads and keeps for backward. No torch.

This is the explicit list behind every figure on activations. It follows ``models/llama/model.py`` and
``parallel/tensor.py`` operation by operation; other systems' blocks (GPT-2's, attention with its scores in
memory, Megatron's tensor parallel without sequence parallel) are told with the same words, after
arXiv 1909.08053 and 2205.05198 (section 4.1 counts what such a block keeps).

Letters: N tokens of a microbatch (T of a sample, B samples), D dim, H heads and G key and value heads on this
rank, E head_dim, F ffn_dim on this rank, c bytes of the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from koushi.hardware.hardware import Device
from koushi.plan.spans import ACTIVATIONS
from koushi.plan.workload import Transformer, Workload
from koushi.traffic import DTYPE_BYTES

"""Kernels differ: on a GPU RMSNorm is fused; on a CPU it is made of elementary operations, each of which keeps its
input."""


@dataclass(frozen=True)
class Op:
    """One operation, with tensors by name and everything else in bytes."""

    makes: str
    size: int
    reads: tuple[str, ...]
    """Inputs, and what a Python variable holds until here."""
    saves: tuple[str, ...] = ()
    """Tensors kept for backward."""
    hidden: int = 0
    """Kept for backward besides, made inside."""
    work: int = 0
    """Alive only during the operation."""
    gives: tuple[tuple[str, int], ...] = ()
    """Gradients that backward makes, by input; 0 bytes: the very gradient that came in."""
    back_work: int = 0
    """Alive only during its backward."""
    half_work: int = 0
    """The same in the first half of a split backward, which frees nothing of what was saved; 0: as ``back_work``."""
    early: int = 0
    """Of the gradient that backward makes: added to what others have given before its work is at the highest."""
    half_keeps: int = 0
    """Of the gradient that the first half keeps for the weight, if that is not the one that came in."""
    half_frees: int = 0
    """Of ``hidden``, what the weight's gradient frees in the second half; 0: all, and what is saved."""
    weight: int = 0
    """Elements of its weight."""
    idle: int = 0
    """Of these, those that the rank does not compute with: other heads' rows of a projection that tp copies."""
    kept: bool = False
    """Whether selective recompute keeps the output if backward needs it: of matmuls, attention and scatters."""
    kind: int = ACTIVATIONS
    """Where everything but the weight's gradient counts."""

    @property
    def used(self) -> int:
        """Elements of its weight that it computes with."""
        return self.weight - self.idle


@dataclass(frozen=True)
class BlockShape:
    """All that decides the bytes of a block's activations."""

    model: Transformer
    """With n_layers and vocab_size 0, so that equal blocks are equal."""
    samples: int
    seq_len: int
    """Tokens of a sample on this rank's part of cp."""
    tp: int
    compute: str
    device: Device
    sequence_parallel: bool
    keeps_gathered: bool
    flash_attention: bool
    fused: bool


def block_shape(workload: Workload, device: Device) -> BlockShape:
    system = workload.system
    return BlockShape(
        replace(workload.model, n_layers=0, vocab_size=0, tie_embeddings=False, learned_positions=0),
        workload.microbatch_size,
        workload.seq_len // workload.mesh.degree("cp"),
        workload.mesh.degree("tp"),
        workload.compute,
        device,
        system.sequence_parallel,
        system.keeps_gathered,
        system.flash_attention,
        system.fused,
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes of the block's tensors on this rank."""

    stream: int
    """Of the residual stream: its part of the sequence under sequence parallel."""
    wide: int
    """Of the same in float32, or in float64 where that is the compute dtype."""
    region: int
    """Of what a tp region reads and of its partial sums: whole sequences, N x D."""
    query: int
    key: int
    inner: int
    """Of the feed-forward, N x F."""
    rows: int
    """Tokens of the stream."""


def stream_sizes(shape: BlockShape) -> Sizes:
    model, tp, width = shape.model, shape.tp, DTYPE_BYTES[shape.compute]
    tokens = shape.samples * shape.seq_len
    rows = tokens // tp if shape.sequence_parallel else tokens
    kv_heads = model.n_kv_heads // tp if model.n_kv_heads % tp == 0 else 1
    return Sizes(
        stream=rows * model.dim * width,
        wide=rows * model.dim * max(4, width),
        region=tokens * model.dim * width,
        query=tokens * model.n_heads // tp * model.head_dim * width,
        key=tokens * kv_heads * model.head_dim * width,
        inner=tokens * model.ffn_dim // tp * width,
        rows=rows,
    )


@cache
def block_operations(shape: BlockShape) -> tuple[Op, ...]:
    """The operations of one block, from ``x`` to ``out``."""
    size = stream_sizes(shape)
    return (*_attention_half(shape, size), *_feed_forward_half(shape, size))


def norm(shape: BlockShape, reads: str, makes: str) -> Op:
    """Fused: keeps its input and two floats a row at most. Decomposed: also the normalised input, all in float32."""
    dim, size = shape.model.dim, stream_sizes(shape)
    op = Op(makes, size.stream, (reads,), (reads,), gives=((reads, size.stream),), weight=dim)
    if shape.model.layer_norm:
        return replace(op, hidden=8 * size.rows, weight=2 * dim)
    if shape.device == "gpu" or shape.fused:
        return replace(op, hidden=4 * size.rows)
    if size.wide == size.stream:
        hidden, work = size.wide + size.wide // dim, 2 * size.wide
        return replace(op, hidden=hidden, back_work=work, half_work=2 * work, half_frees=size.wide, early=size.wide)
    hidden, back_work = 2 * size.wide + size.wide // dim, 3 * size.wide
    op = replace(op, half_work=4 * size.wide, half_keeps=size.wide, half_frees=size.wide)
    return replace(op, saves=(), hidden=hidden, work=size.wide, back_work=back_work)


def _gathered(shape: BlockShape, size: Sizes, reads: str, makes: str) -> tuple[tuple[Op, ...], str, str, int]:
    """The gather of a region's input, if there is one; then what the region reads, what its matmuls keep of it,
    and what their backward has to make again."""
    if shape.tp == 1 or not shape.sequence_parallel:
        return (), reads, reads, 0
    gather = Op(makes, size.region, (reads,), gives=((reads, size.stream),))
    if shape.keeps_gathered:
        return (gather,), makes, makes, 0
    return (gather,), makes, reads, size.region


def _scattered(shape: BlockShape, size: Sizes, reads: str, makes: str) -> tuple[tuple[Op, ...], str]:
    if shape.tp == 1:
        return (), reads
    return (Op(makes, size.stream, (reads,), gives=((reads, size.region),), kept=True),), makes


def _matmul(
    makes: str, size: int, reads: str, saves: str, into: int, weight: int, *holds: str, back_work: int = 0
) -> Op:
    return Op(
        makes, size, (reads, *holds), (saves,), gives=((reads, into),), back_work=back_work, weight=weight, kept=True
    )


def _attention_half(shape: BlockShape, size: Sizes) -> tuple[Op, ...]:
    model = shape.model
    per_query = model.dim * (model.n_heads // shape.tp * model.head_dim)
    per_key = per_query * size.key // size.query
    # Where it is copied, its gradient has the rows of every head.
    idle = model.dim * model.n_kv_heads * model.head_dim - per_key if model.n_kv_heads % shape.tp else 0
    bias = (model.n_heads // shape.tp * model.head_dim) if model.biases else 0
    gather, region, kept, again = _gathered(shape, size, "normed", "gathered")
    ops = [norm(shape, "x", "normed"), *gather]
    ops.append(_matmul("q", size.query, region, kept, size.region, per_query + bias, back_work=again))
    for name in ("k", "v"):
        op = _matmul(name, size.key, region, kept, size.region, per_key + bias + idle, back_work=again)
        ops.append(replace(op, idle=idle))
    turned = ("q", "k")
    if not model.learned_positions:
        turned = ("turned_q", "turned_k")
        for name, made in (("q", size.query), ("k", size.key)):
            work = 0 if shape.fused else made
            ops.append(Op(f"turned_{name}", made, (name,), gives=((name, made),), work=work, back_work=work // 2))
    grouped = size.key < size.query
    held = ("q", "k", "v")
    if shape.flash_attention and shape.device == "gpu" and not has_fused_attention(shape.compute, grouped):
        ops += _attention_by_parts(shape, size, *turned)
        held = (*turned, "v")
    else:
        ops.append(_attention(shape, size, *turned))
    weight = per_query + (model.dim if bias else 0)
    ops.append(_matmul("projected", size.region, "mixed", "mixed", size.query, weight, *held))
    scatter, attended = _scattered(shape, size, "projected", "attended")
    ops += [*scatter, Op("middle", size.stream, ("x", attended, "normed", region), gives=(("x", 0), (attended, 0)))]
    return tuple(ops)


def _attention(shape: BlockShape, size: Sizes, query: str, key: str) -> Op:
    """Fused: keeps inputs, output and one float a row and head (arXiv 2205.14135). Else also the softmax, dropout's
    mask and what it gives: 5 bytes a score in a dtype of 2 (arXiv 2205.05198, section 4.1)."""
    model, width = shape.model, DTYPE_BYTES[shape.compute]
    heads = model.n_heads // shape.tp
    rows = shape.samples * shape.seq_len * heads
    op = Op(
        "mixed",
        size.query,
        (query, key, "v"),
        (query, key, "v", "mixed"),
        hidden=max(4, width) * rows,
        gives=((query, size.query), (key, size.key), ("v", size.key)),
        kept=True,
    )
    if not shape.flash_attention:
        scores = rows * shape.seq_len
        saved = (query, key, "v")
        return replace(
            op,
            saves=saved,
            hidden=scores * (2 * width + 1),
            work=scores * width,
            back_work=2 * scores * width,
            kept=False,
        )
    if shape.device == "gpu":
        return replace(op, back_work=fused_backward_bytes(rows, model.head_dim, size.query, size.key < size.query))
    return op


def fused_backward_bytes(rows: int, head_dim: int, query: int, grouped: bool) -> int:
    """What CUDA's fused kernels hold inside backward, as FlashAttention 2 does (arXiv 2307.08691): the gradient of the
    query and a number for each of its ``rows`` in float32; with ``grouped`` heads the keys' and values' gradients,
    each of ``query`` bytes, before their sums."""
    return 4 * rows * (head_dim + 1) + (2 * query if grouped else 0)


def has_fused_attention(compute: str, grouped: bool) -> bool:
    """Whether CUDA has a kernel that leaves scores out of memory: flash takes half precision alone, the
    memory-efficient one float32 too, but no ``grouped`` key and value heads
    (aten/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.13)."""
    width = DTYPE_BYTES[compute]
    return width == 2 or (width == 4 and not grouped)


def _attention_by_parts(shape: BlockShape, size: Sizes, query: str, key: str) -> list[Op]:
    """Without a fused kernel (aten/native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``): the
    query and the key each scaled, grouped heads written out, scores, the same masked, their softmax, which is kept,
    and a result in another order than the projection reads."""
    width = DTYPE_BYTES[shape.compute]
    wide, grouped = size.query, size.key < size.query
    scores = wide // (shape.model.head_dim * width) * shape.seq_len * width
    ops = [
        Op("scaled_q", wide, (query,), gives=((query, wide),)),
        Op("mask", shape.seq_len**2 * width, (), work=shape.seq_len**2),
    ]
    q, k, v = "scaled_q", key, "v"
    if grouped:
        k, v = "expanded_k", "expanded_v"
        ops += [Op(wider, wide, (one,), gives=((one, size.key),)) for wider, one in ((k, key), (v, "v"))]
    ops.append(Op("scaled_k", wide, (k,), gives=((k, wide),)))
    if shape.samples > 1:  # samples and heads are one dim of a product, which the query's order does not allow
        q = "laid_q"
        ops.append(Op(q, wide, ("scaled_q",), gives=(("scaled_q", wide),)))
    products = ((q, wide), ("scaled_k", wide))
    ops += [
        Op("scores", scores, (q, "scaled_k"), (q, "scaled_k"), gives=products, kept=True),
        Op("masked", scores, ("scores", "mask"), gives=(("scores", 0),)),
        Op("softmax", scores, ("masked",), ("softmax",), gives=(("masked", scores),)),
        Op(
            "heads",
            wide,
            ("softmax", v, k, "scaled_q", "mask"),
            ("softmax", v),
            gives=(("softmax", scores), (v, wide)),
            kept=True,
        ),
    ]
    return [*ops, Op("mixed", wide, ("heads",), gives=(("heads", wide),))]


def _feed_forward_half(shape: BlockShape, size: Sizes) -> tuple[Op, ...]:
    model = shape.model
    weight = model.dim * model.ffn_dim // shape.tp
    bias = model.ffn_dim // shape.tp if model.biases else 0
    gather, region, kept, again = _gathered(shape, size, "ffn_normed", "ffn_gathered")
    inner = size.inner
    ops = [norm(shape, "middle", "ffn_normed"), *gather]
    ops.append(_matmul("gate", inner, region, kept, size.region, weight + bias, back_work=again))
    if not model.gated:
        ops.append(Op("product", inner, ("gate",), ("gate",), gives=(("gate", inner),)))
    elif shape.fused:
        ops.append(_matmul("up", inner, region, kept, size.region, weight + bias, back_work=again))
        gives = (("gate", inner), ("up", inner))
        ops.append(Op("product", inner, ("gate", "up"), ("gate", "up"), gives=gives))
    else:
        ops.append(Op("opened", inner, ("gate",), ("gate",), gives=(("gate", inner),)))
        ops.append(_matmul("up", inner, region, kept, size.region, weight + bias, back_work=again))
        gives = (("opened", inner), ("up", inner))
        ops.append(Op("product", inner, ("opened", "up"), ("opened", "up"), gives=gives))
    down = _matmul("down", size.region, "product", "product", inner, weight + (model.dim if bias else 0))
    if shape.fused:
        down = replace(down, saves=("gate",), back_work=inner)
    scatter, added = _scattered(shape, size, "down", "ffn_out")
    last = Op("out", size.stream, ("middle", added, "ffn_normed", region, "x"), gives=(("middle", 0), (added, 0)))
    return (*ops, down, *scatter, last)
