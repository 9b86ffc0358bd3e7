"""A pipeline stage's actions as spans of bytes. No torch.

torch's stages keep a microbatch from its forward to its backward, receive into buffers made for every microbatch,
which stay as long as the stage does, and, with ``fully_shard``, leave parameters gathered and gradients whole, in the
dtype of the reduction, until the stage's last backward is done (torch/distributed/pipelining/stage.py, 2.11 to 2.13).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from koushi.plan.lifetimes import Half, Stretch, backward_span, forward_span, left_over
from koushi.plan.sharded import Sharded
from koushi.plan.spans import (
    ACTIVATIONS,
    LOGITS,
    PIPELINE_BUFFERS,
    UNSHARDED_GRADIENTS,
    Account,
    Span,
)
from koushi.plan.stages import Stage
from koushi.plan.units import Unit
from koushi.plan.workload import Workload


@lru_cache(maxsize=4096)
def forward(stage: Stage, first: bool = True) -> Span:
    """Of one microbatch; ``first``: before any has been backward."""
    account = Account("in forward")
    logits = stage.logits if stage.shape.last and stage.shape.keeps_output and not first else 0
    account.hold(LOGITS, logits)
    _forward(stage, account, None, logits)
    return account.close()


@lru_cache(maxsize=4096)
def gathering_forward(stage: Stage, shards: int, replicas: int) -> Span:
    """Of the first microbatch of a rank's only stage, whose units are gathered as they are come to."""
    account = Account("in the first forward")
    _forward(stage, account, Sharded(account, stage, shards, replicas), 0)
    return account.close()


def _forward(stage: Stage, account: Account, sharded: Sharded | None, logits: int) -> None:
    """``logits``: bytes of an earlier microbatch's, which go when these are there."""
    where = account.where
    if sharded is not None:
        sharded.unshard_forward(sharded.units.root)
        if sharded.units.embedding is not None:
            sharded.unshard_forward(sharded.units.embedding)
    if stage.shape.first:
        account.go(forward_span(_embedding(stage, True)))
    else:
        account.hold(ACTIVATIONS, _arrived(stage))
    for stretch, count in _blocks(stage, True):
        if sharded is None:
            account.go(forward_span(stretch), count)
            continue
        for times in (1, count - 1):
            one = Account(where)
            around = sharded.again(one)
            around.unshard_forward(sharded.units.block)
            one.go(forward_span(stretch))
            if times:
                sharded.then(around, one.close(), times)
    if stage.shape.last:
        account.go(forward_span(_output(stage, True)))
        account.drop(LOGITS, logits)
        if sharded is not None:
            sharded.end_forward()
        account.where = where + ", at the loss"
        account.go(forward_span(stage.loss()))
    if stage.shape.hands_on:  # the output takes the place of the next stage's receive buffer
        account.drop(PIPELINE_BUFFERS, _received(stage))


def _received(stage: Stage) -> int:
    """Bytes of a receive buffer that a microbatch's input lies in, if it has one of its own."""
    return stage.stream if stage.shape.system.buffers_every_microbatch else 0


def _arrived(stage: Stage) -> int:
    """Bytes of what a stage is given where no buffer of a microbatch's own has it."""
    return stage.stream - _received(stage)


def _blocks(stage: Stage, stay: bool) -> list[tuple[Stretch, int]]:
    """``stage.blocks``, of which the first may find its input in a receive buffer, the last its output's gradient."""
    parts, buffers = stage.blocks(stay), stage.shape.system.buffers_every_microbatch
    if not parts or not buffers:
        return parts
    (first, count), *others = parts
    if not stage.shape.first:
        parts = [(replace(first, input_bytes=0), 1), (first, count - 1), *others]
    *others, (last, count) = [part for part in parts if part[1]]
    if stage.shape.last:
        return [*others, (last, count)]
    return [one for one in (*others, (last, count - 1), (replace(last, handed=True), 1)) if one[1]]


def _output(stage: Stage, stay: bool) -> Stretch:
    """``stage.output``, whose input lies in a receive buffer where the stage has no blocks."""
    received = not stage.shape.layers and not stage.shape.first
    stretch = stage.output(stay)
    return replace(stretch, input_bytes=_arrived(stage)) if received else stretch


def _embedding(stage: Stage, stay: bool) -> Stretch:
    """``stage.embedding``, whose output's gradient lies in a receive buffer where the stage has no blocks."""
    received = not stage.shape.layers and not stage.shape.last and stage.shape.system.buffers_every_microbatch
    return replace(stage.embedding(stay), handed=received)


@lru_cache(maxsize=4096)
def backward(stage: Stage, first: bool, late: bool = False, half: Half | None = None) -> Span:
    """Of one microbatch, whose gradients begin the stage's sum if they are the ``first``.

    ``late``: those of a microbatch before are there, in the compute dtype, and are added to the sum as well.
    """
    shape = stage.shape
    # With another dtype for the reduction, a block's gradients stay as they are made until the block is done.
    stay = not late and (first or casts(stage))
    tail = "" if half is None else ", for the inputs" if half == "inputs" else ", for the weights"
    if half == "inputs" and shape.first:
        return Span()
    takes, gives = half != "weights", half != "inputs"
    if shape.first:
        half = None  # the first stage goes backward once, for the weights
    account = Account("in backward, at the loss" + tail)
    loss_half: Half | None = "inputs" if half == "inputs" else None
    if takes and shape.last:
        account.go(backward_span(stage.loss(), loss_half))
    elif takes:
        account.hold(ACTIVATIONS, _arrived(stage))
    account.where = "in backward" + tail
    units = stage.units(1)
    adds = half is None or (late and half == "inputs")
    ends = [(_output(stage, stay), units.root, 1)] if shape.last else []
    parts = ends + [(stretch, units.block, count) for stretch, count in reversed(_blocks(stage, stay))]
    for stretch, unit, count in parts if half != "weights" else reversed(parts):
        one = Account()
        one.go(backward_span(stretch, half))
        if adds and unit is not units.root:
            _accumulate(stage, one, unit, first)
        account.go(one.close(), count)
    if adds and shape.last:  # fully_shard is told as the gradient of the stage's input is there
        _accumulate(stage, account, units.root, first)
    for stretch, _, count in parts if half == "weights" else ():
        for kind, size in enumerate(left_over(stretch)):
            account.drop(kind, count * size)
    if shape.first:
        account.where = "at the end of backward, at the embedding" + tail
        account.go(backward_span(_embedding(stage, stay)))
        if units.embedding is not None:
            _accumulate(stage, account, units.embedding, first)
    elif takes:
        account.drop(ACTIVATIONS, stage.stream)  # the gradient of the input is sent
    if shape.last:
        account.drop(LOGITS, stage.logits if takes else 0)
        if loss_half is not None:  # what the loss has saved stays until the whole half is done
            account.drop(LOGITS, backward_span(stage.loss(), loss_half).growth - backward_span(stage.loss()).growth)
    else:
        # The output is kept for the second half.
        account.drop(ACTIVATIONS, stage.stream if gives else 0)
        account.hold(PIPELINE_BUFFERS, _received(stage) if gives and shape.hands_on else 0)
    if shape.holder == "buffers":
        account.drop(UNSHARDED_GRADIENTS, account.held(UNSHARDED_GRADIENTS))
    return account.close()


def adds_late(stage: Stage) -> bool:
    """Whether the second half of a backward leaves its gradients in the compute dtype, until the stage's next
    backward has ``fully_shard`` add them to their sum."""
    return stage.shape.splits and casts(stage)


def casts(stage: Stage) -> bool:
    """Whether gradients are added up and reduced in another dtype than they are made in."""
    return stage.fsdp and stage.compute != stage.reduce


def _accumulate(stage: Stage, account: Account, unit: Unit, first: bool) -> None:
    """A unit's gradients into the dtype of the reduction, tensor by tensor, or to those that are there."""
    compute, reduce = stage.compute, stage.reduce
    if not casts(stage):
        return
    if not first:
        account.drop(UNSHARDED_GRADIENTS, unit.whole * compute)
        return
    for tensor in unit.tensors:
        account.hold(UNSHARDED_GRADIENTS, tensor * reduce)
        account.drop(UNSHARDED_GRADIENTS, tensor * compute)


@lru_cache(maxsize=65536)
def reduction(stage: Stage, shards: int, replicas: int, first: bool, late: bool) -> Span:
    """From whole gradients to this rank's shards of their sums. ``first`` and ``late`` as for ``backward``."""
    account = Account("as gradients are reduced after the last backward")
    logits = stage.logits if stage.shape.last and stage.shape.keeps_output else 0
    account.hold(LOGITS, logits)
    sharded = Sharded(account, stage, shards, replicas)
    units, width = sharded.units, stage.compute if first and late else stage.reduce

    def reduce(around: Sharded, unit: Unit) -> None:
        around.account.drop(UNSHARDED_GRADIENTS, unit.whole * stage.compute if late and not first else 0)
        around.reduce(unit, width)

    reduce(sharded, units.root)
    for times in (min(1, units.blocks), units.blocks - 1):
        one = Account(account.where)
        around = sharded.again(one)
        reduce(around, units.block)
        if times > 0:
            sharded.then(around, one.close(), times)
    if units.embedding is not None:  # a part of the model gets it after its blocks
        reduce(sharded, units.embedding)
    sharded.end_backward()
    account.drop(LOGITS, logits)
    return account.close()


def buffer_bytes(workload: Workload, stage: Stage) -> int:
    """Of the buffers that a stage receives into."""
    ends = (not stage.shape.first) + (not stage.shape.last)
    every = workload.microbatches if workload.system.buffers_every_microbatch else 1
    return every * ends * stage.stream
