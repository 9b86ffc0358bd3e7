"""The model's two ends as operations: the embedding; the last norm, the output projection and the loss. No torch.

They follow ``models/llama/model.py``, ``loss.py`` and ``parallel/tensor.py``. Letters as in ``operations.py``; V is
the vocabulary on this rank, w the 4 bytes of float32 (8 where the compute dtype is float64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from koushi.plan.operations import BlockShape, Op, norm, stream_sizes
from koushi.plan.spans import LOGITS
from koushi.traffic import DTYPE_BYTES

TOKEN = 8
"""Bytes of a token id."""


@dataclass(frozen=True)
class EndShape:
    """What decides the bytes of the ends, besides what decides those of a block."""

    block: BlockShape
    vocab_size: int
    learned_positions: int
    table: str
    """The dtype the embedding's table is looked up in."""
    loss_parallel: bool
    loss_chunks: int
    whole_logits: bool
    distributed_loss: bool
    compiled_loss: bool
    softmax_loss: bool


@cache
def embedding_operations(shape: EndShape) -> tuple[Op, ...]:
    """From token ids to ``x0``, the input of the first block."""
    block, width = shape.block, DTYPE_BYTES[shape.table]
    size = stream_sizes(block)
    tokens = block.samples * block.seq_len
    rows = shape.vocab_size // block.tp + shape.learned_positions
    found = tokens * block.model.dim * width
    look_up = Op("found", found, ("tokens",), weight=rows * block.model.dim)
    ops = [look_up]
    if block.tp > 1:
        # Ids of this rank's rows, which the look-up keeps, and a mask of those that are elsewhere.
        mask = Op("rows", tokens * TOKEN, ("tokens",), hidden=tokens, work=2 * tokens * TOKEN)
        ops = [mask, replace(look_up, reads=("rows",), saves=("rows",))]
    looked_up = "found"
    if shape.table != block.compute:
        looked_up = "cast"
        ops.append(Op("cast", size.region, ("found",), gives=(("found", found),)))
    if block.tp > 1:
        ops.append(Op("masked", size.region, (looked_up,), gives=((looked_up, size.region),)))
        ops.append(Op("x0", size.stream, ("masked", looked_up), gives=(("masked", size.region),)))
    return tuple(ops)


@cache
def output_operations(shape: EndShape) -> tuple[Op, ...]:
    """From ``x``, the last block's output, to ``logits``."""
    block = shape.block
    size = stream_sizes(block)
    reads, saves, again = "last_normed", "last_normed", 0
    ops = [norm(block, "x", "last_normed")]
    if block.tp > 1 and block.sequence_parallel:
        ops.append(Op("last_gathered", size.region, ("last_normed",), gives=(("last_normed", size.stream),)))
        reads = "last_gathered"
        saves, again = ("last_gathered", 0) if block.keeps_gathered else ("last_normed", size.region)
    weight = shape.vocab_size // block.tp * block.model.dim
    held = (reads, "last_normed")
    gives = ((reads, size.region),)
    logits = Op("logits", logits_bytes(shape), held, (saves,), gives=gives, back_work=again, weight=weight, kind=LOGITS)
    return (*ops, logits)


def logits_bytes(shape: EndShape) -> int:
    """Of what the output projection gives at a time."""
    return _tokens_at_a_time(shape) * (shape.vocab_size // shape.block.tp) * DTYPE_BYTES[shape.block.compute]


def _tokens_at_a_time(shape: EndShape) -> int:
    return -(-shape.block.samples * shape.block.seq_len // (1 if shape.whole_logits else shape.loss_chunks))


@cache
def loss_operations(shape: EndShape) -> tuple[Op, ...]:
    """From ``x``, the logits, to ``loss``, which has no size."""
    tokens, width = _tokens_at_a_time(shape), DTYPE_BYTES[shape.block.compute]
    logits = logits_bytes(shape)
    if shape.compiled_loss:
        return (Op("loss", 0, ("x",), ("x",), hidden=tokens * TOKEN, gives=(("x", logits),), kind=LOGITS),)
    if shape.softmax_loss:
        return _softmax_loss(tokens, logits, logits * max(4, width) // width)
    if shape.block.tp > 1 and shape.loss_parallel and shape.distributed_loss:
        return _distributed_loss(logits, logits * max(4, width) // width)
    if shape.block.tp > 1 and shape.loss_parallel:
        return (_vocabulary_loss(tokens, logits, logits * max(4, width) // width),)
    whole = tokens * shape.vocab_size * width
    wide = whole * max(4, width) // width
    if shape.whole_logits and shape.loss_chunks > 1:
        return (_loss_in_pieces(logits, wide, shape.loss_chunks),)
    return _plain_loss(logits, whole, wide)


def _plain_loss(logits: int, whole: int, wide: int) -> tuple[Op, ...]:
    """torch's cross_entropy: logits in w, and their log-softmax, which is kept; backward a gradient of each."""
    ops: tuple[Op, ...] = ()
    flat = "x"
    if whole != logits:
        flat = "whole"
        ops += (Op(flat, whole, ("x",), gives=(("x", logits),), kind=LOGITS),)
    if wide != whole:
        ops += (Op("wide", wide, (flat,), gives=((flat, whole),), kind=LOGITS),)
        flat = "wide"
    log_softmax = Op("log_probabilities", wide, (flat,), ("log_probabilities",), gives=((flat, wide),), kind=LOGITS)
    loss = Op("loss", 0, ("log_probabilities", flat, "x"), gives=(("log_probabilities", wide),), kind=LOGITS)
    return (*ops, log_softmax, replace(loss, saves=("log_probabilities",)))


def _loss_in_pieces(logits: int, wide: int, pieces: int) -> Op:
    """cross_entropy of whole logits, piece by piece: the log-softmax of all is kept, all else is a piece's."""
    return Op("loss", 0, ("x",), hidden=wide, work=wide // pieces, gives=(("x", logits),), kind=LOGITS)


def _softmax_loss(tokens: int, logits: int, wide: int) -> tuple[Op, ...]:
    """nanotron's ``sharded_cross_entropy``: the logits go once they are cast to w; their softmax is kept, and backward
    makes it their gradient in place."""
    cast = Op("wide", wide, ("x",), gives=(("x", logits),), kind=LOGITS)
    kept = wide + tokens * (TOKEN + 1)
    return (cast, Op("loss", 0, ("wide",), hidden=kept, gives=(("wide", wide),), kind=LOGITS))


def _vocabulary_loss(tokens: int, logits: int, wide: int) -> Op:
    """``parallel.tensor._VocabularyLoss``: keeps the logits and a few numbers a token.

    Forward and backward each have two arrays of w at a time, or one where the logits are in w already.
    """
    cast = wide if wide != logits else 0
    kept = tokens * (TOKEN + 4 + 1 + 1)
    gives = (("x", logits),)
    return Op(
        "loss",
        0,
        ("x",),
        ("x",),
        hidden=kept,
        work=cast + wide,
        gives=gives,
        back_work=cast + wide - logits,
        kind=LOGITS,
    )


def _distributed_loss(logits: int, wide: int) -> tuple[Op, ...]:
    """torch's ``loss_parallel`` (torch/distributed/tensor/parallel/loss.py): cross_entropy's arrays, and forward the
    shifted logits, backward the gradient's parts side by side."""
    ops = list(_plain_loss(logits, logits, wide))
    ops[-2] = replace(ops[-2], work=wide)
    ops[-1] = replace(ops[-1], back_work=2 * wide)
    return tuple(ops)
