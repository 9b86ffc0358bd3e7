"""A pipeline stage's actions as spans of bytes, and the fullest moment of a rank that holds several. No torch.

torch's stages keep a microbatch from its forward to its backward, receive into buffers made for every
microbatch, and, with ``fully_shard``, leave parameters gathered and gradients whole, in the dtype of the
reduction, until the stage's last backward is done (torch/distributed/pipelining/stage.py, 2.11 to 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, groupby
from operator import itemgetter, mul, sub

from koushi.plan.communication import exchanges_table, table_shard
from koushi.plan.lifetimes import Half, backward_span, forward_span, keeps_input, left_over
from koushi.plan.operations import Device
from koushi.plan.sharded import Sharded
from koushi.plan.situations import ALIKE, COUNTED, Habits, Situation, situations_of_rank
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
from koushi.plan.stages import Stage, splits_backward, stage_of, turn
from koushi.plan.units import Unit, held_elsewhere
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Workload
from koushi.schedules import stages_of_rank


def input_in_flight(stage: Stage) -> bool:
    """Whether the received input counts as an activation until backward."""
    if stage.shape.first:
        return True
    blocks = stage.blocks(True)
    if blocks:
        return keeps_input(blocks[0][0])
    return not stage.shape.last or keeps_input(stage.output(True))


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
        account.go(forward_span(stage.embedding(True)))
    else:
        account.drop(PIPELINE_BUFFERS, _received(stage))
        account.hold(ACTIVATIONS, stage.stream)
    for stretch, count in stage.blocks(True):
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
    if not input_in_flight(stage):
        account.hold(PIPELINE_BUFFERS, _received(stage))
    if stage.shape.last:
        account.go(forward_span(stage.output(True)))
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
        account.drop(PIPELINE_BUFFERS, _received(stage))
        account.hold(ACTIVATIONS, stage.stream)
    account.where = "in backward" + tail
    units = stage.units(1)
    adds = half is None or (late and half == "inputs")
    ends = [(stage.output(stay), units.root, 1)] if shape.last else []
    parts = ends + [(stretch, units.block, count) for stretch, count in reversed(stage.blocks(stay))]
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
        account.go(backward_span(stage.embedding(stay)))
        if units.embedding is not None:
            _accumulate(stage, account, units.embedding, first)
    elif takes:
        # The gradient of the input is sent, and the buffers are there for the next step.
        account.drop(ACTIVATIONS, stage.stream)
        account.hold(PIPELINE_BUFFERS, _received(stage) if input_in_flight(stage) else 0)
    if shape.last:
        account.drop(LOGITS, stage.logits if takes else 0)
        if loss_half is not None:  # what the loss has saved stays until the whole half is done
            account.drop(LOGITS, backward_span(stage.loss(), loss_half).growth - backward_span(stage.loss()).growth)
    else:
        # The output is kept for the second half.
        account.drop(ACTIVATIONS, stage.stream if gives else 0)
        account.hold(PIPELINE_BUFFERS, _received(stage) if takes else 0)
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


def sum_of(kind: int, count: int) -> Bytes:
    return tuple(count if one == kind else 0 for one in range(len(NOTHING)))


def whole_gradients(stage: Stage) -> Bytes:
    """While they are added up over microbatches."""
    if stage.fsdp:
        return sum_of(UNSHARDED_GRADIENTS, stage.whole * stage.reduce)
    return sum_of(GRADIENTS, stage.whole * stage.master) if stage.shape.holder == "parameters" else NOTHING


class Held:
    """What each of a rank's stages of one kind adds to what is held, in each of its ways."""

    def __init__(self, stage: Stage, shards: int, replicas: int, sent: int):
        self.stage, self.shards, self.replicas = stage, shards, replicas
        kept = forward(stage).after
        half = backward(stage, False, half="inputs").after if stage.shape.splits else NOTHING
        padded = stage.units(shards).total.padded
        whole = whole_gradients(stage)
        self.unsharded = padded * stage.compute if stage.fsdp else 0
        self.counted: tuple[Bytes, ...] = (
            kept,
            tuple(map(sum, zip(kept, half, strict=True))),
            sum_of(ACTIVATIONS, sent),
            whole,
            sum_of(UNSHARDED_GRADIENTS, stage.whole * stage.compute),
        )
        """By what is counted in a situation."""
        self.reduced = sum_of(GRADIENTS, padded // shards * stage.master) if stage.fsdp else whole

    def span(self, situation: Situation) -> Span:
        """Of the action that ``situation`` begins."""
        if situation.step == "F":
            return forward(self.stage, situation.first)
        if situation.step == "R":
            return reduction(self.stage, self.shards, self.replicas, situation.first, situation.late)
        return backward(self.stage, situation.first, situation.late, _HALVES[situation.step])


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
    half of a split backward, unlike a whole one, leaves its gradient on the input.
    """
    before, after = (held_elsewhere(workload, index, index + step) for step in (-1, 1))
    gloo = stage.shape.block.device == "cpu"
    if workload.schedule == "1F1B":
        return 0, stage.stream * (before + (after and gloo))
    if gloo:
        return stage.stream * (before + after), 0
    if workload.schedule == "GPipe":
        return 0, stage.stream * before
    return stage.stream * before if stage.shape.splits else 0, 0


def pipelined_span(workload: Workload, pp: int, stages: Sequence[Alike]) -> Span:
    """From the start of a step to its end, on the rank at pipeline coordinate ``pp`` with its ``stages``."""
    mesh = workload.mesh
    sent = [sent_bytes(workload, one.index, one.stage) for one in stages]
    most_sent = workload.microbatches if any(every for every, _ in sent) else 1
    kinds = _kinds(workload.stage_layers, turn(workload))
    shards, replicas = mesh.degree("dp_shard"), mesh.degree("dp_replicate")
    held = {
        one.kind: Held(one.stage, shards, replicas, max(several)) for one, several in zip(stages, sent, strict=True)
    }
    rank = _Rank(held, {one.kind: one.count for one in stages}, max(kinds) + 1)
    shape = (workload.schedule, mesh.degree("pp"), len(workload.stage_layers), workload.microbatches)
    gloo = stages[0].stage.shape.block.device == "cpu"
    habits = Habits(most_sent, gloo or not splits_backward(workload), adds_late(stages[0].stage))
    found = situations_of_rank(*shape, pp, habits, kinds)
    buffers = sum(one.count * buffer_bytes(workload, one.stage) for one in stages)
    fullest = rank.fullest(found, buffers)
    if stages[0].stage.shape.keeps_output and stages[0].stage.fsdp:
        fullest = rank.gather(fullest, stages[0], buffers)
    if not exchanges_table(workload, pp):
        return fullest
    return rank.exchange(fullest, buffers + table_shard(workload) * stages[0].stage.master)


@dataclass(frozen=True)
class Alike:
    """Those of a rank's stages that are alike."""

    kind: int
    index: int
    """Of the first of them."""
    stage: Stage
    count: int


def alike_stages(workload: Workload, pp: int, device: Device) -> tuple[Alike, ...]:
    """The stages of the rank at pipeline coordinate ``pp``, by kind."""
    return tuple(
        Alike(kind, index, stage_of(workload, index, device), count)
        for kind, index, count in _held_kinds(
            workload.schedule, workload.mesh.degree("pp"), _kinds(workload.stage_layers, turn(workload)), pp
        )
    )


@lru_cache(maxsize=65536)
def _held_kinds(schedule: str, degree: int, kinds: tuple[int, ...], pp: int) -> tuple[tuple[int, int, int], ...]:
    """Kind, first index and count of the stages at pipeline coordinate ``pp``."""
    held = stages_of_rank(schedule, degree, len(kinds), pp) if degree > 1 else tuple(range(len(kinds)))
    counts = Counter(kinds[index] for index in held)
    first = {kinds[index]: index for index in reversed(held)}
    return tuple((kind, first[kind], count) for kind, count in counts.items())


@lru_cache(maxsize=4096)
def _kinds(stage_layers: tuple[int, ...], turn: int | None) -> tuple[int, ...]:
    """A number for every stage, the same for stages that are alike; none is like that where a V turns."""
    last = len(stage_layers) - 1
    numbers: dict[tuple[int, bool, bool, bool], int] = {}
    return tuple(
        numbers.setdefault((layers, index == 0, index == last, index == turn), len(numbers))
        for index, layers in enumerate(stage_layers)
    )


class _Rank:
    """A rank's stages by kind, and sums over what they hold."""

    def __init__(self, held: dict[int, Held], stages: dict[int, int], kinds: int):
        self.held, self.stages, self.kinds = held, stages, kinds
        self._done_by: dict[tuple[int, ...], tuple[int, int]] = {}
        nothing = Held.__new__(Held)
        nothing.counted, nothing.reduced, nothing.unsharded = (NOTHING,) * len(COUNTED), NOTHING, 0
        by_kind = [held.get(kind, nothing) for kind in range(kinds)]
        self.vectors = [one.counted[what] for what in COUNTED for one in by_kind]
        self.reduced = [one.reduced for one in by_kind]
        self.totals = [sum(vector) for vector in self.vectors]
        self.shards = [vector[GRADIENTS] for vector in self.vectors]
        self.reduced_totals = [sum(vector) for vector in self.reduced]
        self.reduced_shards = [vector[GRADIENTS] for vector in self.reduced]

    def fullest(self, found: Iterable[Situation], buffers: int) -> Span:
        """A span with the peak of the fullest of the situations, and the peaks of the streams over all of them."""
        best: tuple[int, Situation, Span] | None = None
        compute_highest = shards_highest = 0
        any_shards = any(self.shards)
        held = [bool(total) for total in self.totals]  # most columns are of kinds that others hold
        sizes = list(compress(self.totals, held))
        for _, several in groupby(found, key=itemgetter(*range(ALIKE))):
            alike = list(several)
            one = alike[0]
            done, shards = self._done_with(one.reduced)
            span = self.held[one.kind].span(one)
            totals = [sum(map(mul, compress(each.counts, held), sizes), done) for each in alike]
            total = most = max(totals)
            if any_shards:
                of_shards = [sum(map(mul, each.counts, self.shards), shards) for each in alike]
                most, shards = max(map(sub, totals, of_shards)), max(of_shards)
            else:
                most -= shards
            compute_highest = max(compute_highest, most + span.compute_highest)
            shards_highest = max(shards_highest, shards + span.stream_highest[0])
            if best is None or total + span.highest > best[0]:
                best = total + span.highest, alike[totals.index(total)], span
        assert best is not None, "a schedule has actions"
        highest, situation, span = best
        peak = list(span.peak)
        peak[PIPELINE_BUFFERS] += buffers
        peak[UNSHARDED_PARAMETERS] += self._unsharded(situation.reduced)
        for vector, count in zip((*self.vectors, *self.reduced), (*situation.counts, *situation.reduced), strict=True):
            if count:
                peak = [there + count * more for there, more in zip(peak, vector, strict=True)]
        flying = f"{situation.in_flight} microbatch{'' if situation.in_flight == 1 else 'es'} in flight"
        where = f"stage {situation.stage} {span.moment}, with {flying}"
        streams = (shards_highest, self._gathering())
        return Span(NOTHING, tuple(peak), highest + buffers, where, 0, compute_highest + buffers, streams)

    def gather(self, before: Span, only: Alike, buffers: int) -> Span:
        """``before``, or the first forward of the rank's ``only`` stage if that is fuller."""
        held = self.held[only.kind]
        span = gathering_forward(only.stage, held.shards, held.replicas)
        highest = span.highest + buffers
        if highest <= before.highest:
            return before
        peak = list(span.peak)
        peak[PIPELINE_BUFFERS] += buffers
        compute = max(before.compute_highest, span.compute_highest + buffers)
        where = f"stage {only.index} {span.moment}"
        return replace(before, peak=tuple(peak), highest=highest, moment=where, compute_highest=compute)

    def exchange(self, before: Span, buffers: int) -> Span:
        """``before``, or the end of the step if that is fuller; ``buffers``: with the tied table's other gradient."""
        peak = [
            sum(self.held[kind].reduced[one] * count for kind, count in self.stages.items())
            for one in range(len(NOTHING))
        ]
        peak[PIPELINE_BUFFERS] += buffers
        highest = sum(peak)
        if highest <= before.highest:
            return before
        compute = max(before.compute_highest, highest - peak[GRADIENTS])
        where = "as a tied embedding's gradients are added up"
        return replace(before, peak=tuple(peak), highest=highest, moment=where, compute_highest=compute)

    def _done_with(self, reduced: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of gradients that are reduced and of gathered parameters; of gradients' shards among them."""
        found = self._done_by.get(reduced)
        if found is None:
            total = _dot(reduced, self.reduced_totals) + self._unsharded(reduced)
            found = self._done_by[reduced] = total, _dot(reduced, self.reduced_shards)
        return found

    def _unsharded(self, reduced: tuple[int, ...]) -> int:
        """Bytes of gathered parameters: of the stages that are not done, and of no more than torch's runtime keeps."""
        there = [(self.held[kind].unsharded, count - reduced[kind]) for kind, count in self.stages.items()]
        sizes = sorted(size for size, count in there for _ in range(min(count, MOST_UNSHARDED)))
        return sum(sizes[-MOST_UNSHARDED:])

    def _gathering(self) -> int:
        """Bytes of the buffers that the largest units are gathered in, one after the other."""
        sizes = (
            2 * unit.padded * one.stage.compute if one.stage.fsdp and one.shards > 1 else 0
            for one in self.held.values()
            for unit, _ in one.stage.units(one.shards).all
        )
        # A stage may hold nothing at all.
        return max(sizes, default=0)


def _dot(counts: tuple[int, ...], sizes: list[int]) -> int:
    return sum(map(mul, counts, sizes))
