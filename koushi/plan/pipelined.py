"""A pipeline stage's actions as spans of bytes, and the fullest moment of a rank that holds several. No torch.

torch's stages keep a microbatch from its forward to its backward, receive into buffers made for every
microbatch, and, with ``fully_shard``, leave parameters gathered and gradients whole, in the dtype of the
reduction, until the stage's last backward is done (torch/distributed/pipelining/stage.py, 2.11 to 2.13).
"""

from __future__ import annotations

from functools import lru_cache

from koushi.plan.lifetimes import Half, backward_span, forward_span, keeps_input
from koushi.plan.sharded import Sharded
from koushi.plan.situations import BEFORE, REDUCED, Situation, situations
from koushi.plan.spans import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    NOTHING,
    PIPELINE_BUFFERS,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Account,
    Bytes,
    Span,
)
from koushi.plan.stages import Stage
from koushi.plan.units import Unit, held_elsewhere, held_stages
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Workload


def input_in_flight(stage: Stage) -> bool:
    """Whether the received input counts as an activation until backward."""
    if stage.shape.first:
        return True
    blocks = stage.blocks(True)
    if blocks:
        return keeps_input(blocks[0][0])
    return not stage.shape.last or keeps_input(stage.output(True))


@lru_cache(maxsize=4096)
def forward(stage: Stage) -> Span:
    """Of one microbatch."""
    account = Account("in forward")
    if stage.shape.first:
        account.go(forward_span(stage.embedding(True)))
    else:
        account.drop(PIPELINE_BUFFERS, _received(stage))
        account.hold(ACTIVATIONS, stage.stream)
    for stretch, count in stage.blocks(True):
        account.go(forward_span(stretch), count)
    if not input_in_flight(stage):
        account.hold(PIPELINE_BUFFERS, _received(stage))
    if stage.shape.last:
        account.go(forward_span(stage.output(True)))
        account.where = "in forward, at the loss"
        account.go(forward_span(stage.loss()))
    return account.close()


def _received(stage: Stage) -> int:
    """Bytes of a receive buffer that a microbatch's input lies in, if it has one of its own."""
    return stage.stream if stage.shape.system.buffers_every_microbatch else 0


@lru_cache(maxsize=4096)
def backward(stage: Stage, first: bool, half: Half | None = None) -> Span:
    """Of one microbatch, whose gradients are the stage's ``first`` or are added to those that are there."""
    shape = stage.shape
    # With another dtype for the reduction, a block's gradients stay as they are made until the block is done.
    stay = first or (stage.fsdp and stage.compute != stage.reduce)
    tail = "" if half is None else ", for the inputs" if half == "inputs" else ", for the weights"
    if half == "inputs" and shape.first:
        return Span()
    takes, gives = half != "weights", half != "inputs"
    if shape.first:
        half = None  # the first stage goes backward once, for the weights
    account = Account("in backward, at the loss" + tail)
    if takes and shape.last:
        account.go(backward_span(stage.loss()))
    elif takes:
        account.drop(PIPELINE_BUFFERS, _received(stage))
        account.hold(ACTIVATIONS, stage.stream)
    account.where = "in backward" + tail
    units = stage.units(1)
    if shape.last:
        account.go(backward_span(stage.output(stay), half))
        _accumulate(stage, account, units.root, first, half)
    for stretch, count in reversed(stage.blocks(stay)):
        one = Account()
        one.go(backward_span(stretch, half))
        _accumulate(stage, one, units.block, first, half)
        account.go(one.close(), count)
    if shape.first:
        account.where = "at the end of backward, at the embedding" + tail
        account.go(backward_span(stage.embedding(stay)))
        if units.embedding is not None:
            _accumulate(stage, account, units.embedding, first, half)
    elif takes:
        # The gradient of the input is sent, and the buffers are there for the next step.
        account.drop(ACTIVATIONS, stage.stream)
        account.hold(PIPELINE_BUFFERS, _received(stage) if input_in_flight(stage) else 0)
    if shape.last:
        account.drop(LOGITS, stage.logits if takes else 0)
    else:
        # The output is kept for the second half.
        account.drop(ACTIVATIONS, stage.stream if gives else 0)
        account.hold(PIPELINE_BUFFERS, _received(stage) if takes else 0)
    if shape.holder == "buffers":
        account.drop(UNSHARDED_GRADIENTS, account.held(UNSHARDED_GRADIENTS))
    return account.close()


def _accumulate(stage: Stage, account: Account, unit: Unit, first: bool, half: Half | None) -> None:
    """A unit's gradients into the dtype of the reduction, tensor by tensor, or to those that are there."""
    compute, reduce = stage.compute, stage.reduce
    if not stage.fsdp or compute == reduce or half == "inputs":
        return
    if not first:
        account.drop(UNSHARDED_GRADIENTS, unit.whole * compute)
        return
    for tensor in unit.tensors:
        account.hold(UNSHARDED_GRADIENTS, tensor * reduce)
        account.drop(UNSHARDED_GRADIENTS, tensor * compute)


@lru_cache(maxsize=65536)
def reduction(stage: Stage, shards: int, replicas: int) -> Span:
    """From whole gradients to this rank's shards of their sums."""
    account = Account("as gradients are reduced after the last backward")
    sharded = Sharded(account, stage, shards, replicas)
    units, width = sharded.units, stage.reduce
    sharded.reduce(units.root, width)
    if units.embedding is not None:
        sharded.reduce(units.embedding, width)
    for times in (1, units.blocks - 1):
        one = Account(account.where)
        around = sharded.again(one)
        around.reduce(units.block, width)
        if times > 0:
            sharded.then(around, one.close(), times)
    sharded.end_backward()
    return account.close()


def sum_of(kind: int, count: int) -> Bytes:
    return tuple(count if one == kind else 0 for one in range(len(NOTHING)))


def whole_gradients(stage: Stage) -> Bytes:
    """While they are added up over microbatches."""
    if stage.fsdp:
        # The second half of a backward leaves gradients in the compute dtype until the next action.
        late = stage.compute if stage.shape.splits and stage.reduce != stage.compute else 0
        return sum_of(UNSHARDED_GRADIENTS, stage.whole * (stage.reduce + late))
    return sum_of(GRADIENTS, stage.whole * stage.master) if stage.shape.holder == "parameters" else NOTHING


class Held:
    """What one of a rank's stages adds to what is held, in each of its ways: a vector and its sums."""

    def __init__(self, stage: Stage, shards: int, replicas: int, every_sent: int, last_sent: int):
        self.stage, self.shards, self.replicas = stage, shards, replicas
        kept = forward(stage).after
        half = backward(stage, False, "inputs").after if stage.shape.splits else NOTHING
        padded = stage.units(shards).total.padded
        whole = whole_gradients(stage)
        reduced = sum_of(GRADIENTS, padded // shards * stage.master) if stage.fsdp else whole
        self.unsharded = padded * stage.compute if stage.fsdp else 0
        self.per_count = (kept, tuple(map(sum, zip(kept, half, strict=True))), sum_of(ACTIVATIONS, every_sent))
        self.last_sent = last_sent
        self.gradients = (NOTHING, whole, reduced)
        self.count_totals = tuple(sum(one) for one in self.per_count)
        self.gradient_totals = tuple(sum(one) for one in self.gradients)
        self.count_streams = tuple(one[GRADIENTS] for one in self.per_count)
        self.gradient_streams = tuple(one[GRADIENTS] for one in self.gradients)

    def span(self, situation: Situation) -> Span:
        """Of the action that ``situation`` begins."""
        if situation.step == "F":
            return forward(self.stage)
        if situation.step == "R":
            return reduction(self.stage, self.shards, self.replicas)
        first = situation.gradients[situation.stage] == BEFORE
        return backward(self.stage, first, _HALVES[situation.step])


_HALVES: dict[str, Half | None] = {"B": None, "I": "inputs", "W": "weights"}


def buffer_bytes(workload: Workload, stage: Stage) -> int:
    """Of the buffers that a stage receives into."""
    ends = (not stage.shape.first) + (not stage.shape.last)
    every = workload.microbatches if workload.system.buffers_every_microbatch else 1
    return every * ends * stage.stream


def sent_bytes(workload: Workload, index: int, stage: Stage) -> tuple[int, int]:
    """Bytes that stay of what has been sent on: of every microbatch that is done, and of the last one alone.

    gloo holds what it sends as long as somebody holds the send: GPipe and torch's runtime of several stages do
    until the end of the step, 1F1B one of each direction. NCCL lets go, but a list of sends stays, and the first
    half of a split backward leaves its gradient on the input.
    """
    before, after = (held_elsewhere(workload, index, index + step) for step in (-1, 1))
    gloo = stage.shape.block.device == "cpu"
    if workload.schedule == "1F1B":
        return 0, stage.stream * (before + (after and gloo))
    if gloo:
        return stage.stream * (before + after), 0
    return (stage.stream * before, 0) if stage.shape.splits else (0, stage.stream * before)


def pipelined_span(workload: Workload, pp: int, stages: tuple[Stage, ...]) -> Span:
    """From the start of a step to its end, on the rank at pipeline coordinate ``pp`` with its ``stages``."""
    mesh = workload.mesh
    shards, replicas = mesh.degree("dp_shard"), mesh.degree("dp_replicate")
    indices = held_stages(workload, pp)
    held = [
        Held(stage, shards, replicas, *sent_bytes(workload, index, stage))
        for index, stage in zip(indices, stages, strict=True)
    ]
    degree, n_stages = mesh.degree("pp"), len(workload.stage_layers)
    buffers = sum(buffer_bytes(workload, stage) for stage in stages)
    found = situations(workload.schedule, degree, n_stages, workload.microbatches)[pp]
    best: tuple[int, Situation, Span] | None = None
    compute_highest, streams = 0, [0, 0]
    for situation in found:
        total, gradients = _totals(held, situation)
        span = held[situation.stage].span(situation)
        compute_highest = max(compute_highest, total - gradients + span.compute_highest)
        streams[0] = max(streams[0], gradients + span.stream_highest[0])
        if best is None or total + span.highest > best[0]:
            best = total + span.highest, situation, span
    assert best is not None, "a schedule has actions"
    highest, situation, span = best
    peak = tuple(map(sum, zip(_vector(held, situation), span.peak, sum_of(PIPELINE_BUFFERS, buffers), strict=True)))
    in_flight = sum(situation.counts[: 2 * len(held)])
    where = f"stage {indices[situation.stage]} {span.moment}, with {in_flight} microbatch{_es(in_flight)} in flight"
    streams[1] = max(2 * unit.padded * stage.compute for stage in stages for unit, _ in stage.units(shards).all)
    if shards == 1 or not stages[0].fsdp:
        streams[1] = 0
    return Span(NOTHING, peak, highest + buffers, where, 0, compute_highest + buffers, tuple(streams))


def _es(count: int) -> str:
    return "" if count == 1 else "es"


def _totals(held: list[Held], situation: Situation) -> tuple[int, int]:
    """Bytes there as an action begins, besides states and buffers; and how many of them are gradients' shards."""
    total, streams, unsharded = 0, 0, []
    counts, many = situation.counts, len(held)
    for place, one in enumerate(held):
        state = situation.gradients[place]
        total += one.gradient_totals[state] + (one.last_sent if counts[2 * many + place] else 0)
        streams += one.gradient_streams[state]
        for which in range(3):
            count = counts[which * many + place]
            total += count * one.count_totals[which]
            streams += count * one.count_streams[which]
        if state != REDUCED:
            unsharded.append(one.unsharded)
    if len(unsharded) > MOST_UNSHARDED:
        unsharded = sorted(unsharded)[-MOST_UNSHARDED:]
    return total + sum(unsharded), streams


def _vector(held: list[Held], situation: Situation) -> Bytes:
    """The same by kind."""
    account = Account()
    unsharded = []
    counts, many = situation.counts, len(held)
    for place, one in enumerate(held):
        state = situation.gradients[place]
        parts = [
            (one.gradients[state], 1),
            *((one.per_count[which], counts[which * many + place]) for which in range(3)),
        ]
        for part, times in parts:
            for kind, count in enumerate(part):
                account.hold(kind, count * times)
        account.hold(ACTIVATIONS, one.last_sent if counts[2 * many + place] else 0)
        if state != REDUCED:
            unsharded.append(one.unsharded)
    account.hold(UNSHARDED_PARAMETERS, sum(sorted(unsharded)[-MOST_UNSHARDED:]))
    return account.close().after
