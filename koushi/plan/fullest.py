"""The fullest moment of a pipelined rank: what its stages keep at every action of the schedule, added up. No torch.

What is counted of a rank's situations is the same however data parallel shards: only what is reduced and what is
gathered differ. So a schedule is added up once for all shards (``most_of_rank``), which a search asks for by the
hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, mul
from typing import NamedTuple

from koushi.hardware.hardware import Device
from koushi.plan.communication import exchanges_table, table_shard
from koushi.plan.lifetimes import Half
from koushi.plan.pipelined import adds_late, backward, buffer_bytes, forward, gathering_forward, reduction
from koushi.plan.schedule import order_of_rank
from koushi.plan.situations import ACTION, COUNTED, Habits, Situation, fullest_situations
from koushi.plan.spans import (
    ACTIVATIONS,
    COPIES_ADDED,
    GRADIENTS,
    NOTHING,
    PIPELINE_BUFFERS,
    STREAMS,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Bytes,
    Span,
)
from koushi.plan.stages import Stage, splits_backward, stage_of, turn
from koushi.plan.units import held_elsewhere
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Workload
from koushi.schedules import stages_of_rank


def sum_of(kind: int, count: int) -> Bytes:
    return tuple(count if one == kind else 0 for one in range(len(NOTHING)))


def whole_gradients(stage: Stage) -> Bytes:
    """While they are added up over microbatches."""
    if stage.fsdp:
        return sum_of(UNSHARDED_GRADIENTS, stage.whole * stage.reduce)
    return sum_of(GRADIENTS, stage.whole * stage.master) if stage.shape.holder == "parameters" else NOTHING


class Sent(NamedTuple):
    """Bytes that stay of what a stage has sent on of a microbatch."""

    gradient: int
    output: int
    of_every: bool
    """Whether of every microbatch that is done; else of one."""


@lru_cache(maxsize=4096)
def counted_bytes(stage: Stage, sent: Sent) -> tuple[Bytes, ...]:
    """What a stage adds for each that is counted in a situation."""
    kept = forward(stage).after
    half = backward(stage, False, half="inputs").after if stage.shape.splits else NOTHING
    twice = sum_of(ACTIVATIONS, -sent.output)  # what has been sent of it counts with what is kept for the other half
    return (
        kept,
        tuple(map(sum, zip(kept, half, twice, strict=True))),
        sum_of(ACTIVATIONS, sent.gradient + sent.output),
        whole_gradients(stage),
        sum_of(UNSHARDED_GRADIENTS, stage.whole * stage.compute),
    )


OWN_STREAM = STREAMS.index(GRADIENTS)
"""Of gradients' shards among a span's streams."""
_HALVES: dict[str, Half | None] = {"B": None, "I": "inputs", "W": "weights"}


def action_span(stage: Stage, situation: Situation) -> Span:
    """Of the forward or backward that ``situation`` begins."""
    if situation.step == "F":
        return forward(stage, situation.first)
    return backward(stage, situation.first, situation.late, _HALVES[situation.step])


def sent_of(workload: Workload, index: int, stage: Stage) -> Sent:
    """What stays of what the stage at ``index`` sends.

    gloo holds what it sends as long as somebody holds the send: GPipe and torch's runtime of several stages do
    until the end of the step, 1F1B one of each direction. NCCL lets go, but a list of sends stays until the next of
    messages takes its place, which under GPipe comes before the next backward; and the first half of a split
    backward, unlike a whole one, leaves its gradient on the input.
    """
    gradient, output = (stage.stream * held_elsewhere(workload, index, index + step) for step in (-1, 1))
    gloo = stage.shape.block.device == "cpu"
    if workload.schedule == "1F1B":
        return Sent(gradient, output * gloo, False)
    if gloo:
        return Sent(gradient, output, True)
    if workload.schedule == "GPipe":
        return Sent(gradient, 0, False)
    return Sent(gradient * stage.shape.splits, 0, stage.shape.splits)


def pipelined_span(workload: Workload, pp: int, stages: Sequence[Alike]) -> Span:
    """From the start of a step to its end, on the rank at pipeline coordinate ``pp`` with its ``stages``."""
    mesh = workload.mesh
    sent = [sent_of(workload, one.index, one.stage) for one in stages]
    most = most_of_rank(
        (workload.schedule, mesh.degree("pp"), len(workload.stage_layers), workload.microbatches),
        pp,
        habits_of(workload, stages),
        own_kinds(workload, pp)[0],
        tuple((one.stage, stays) for one, stays in zip(stages, sent, strict=True)),
    )
    rank = _Rank(stages, sent, mesh.degree("dp_shard"), mesh.degree("dp_replicate"))
    buffers = sum(one.count * buffer_bytes(workload, one.stage) for one in stages)
    fullest = rank.fullest(most, buffers)
    if stages[0].stage.shape.keeps_output and stages[0].stage.fsdp:
        fullest = rank.gather(fullest, stages[0], buffers)
    fullest = rank.end(fullest, sum_of(PIPELINE_BUFFERS, buffers), rank.copied, COPIES_ADDED)
    if not exchanges_table(workload, pp):
        return fullest
    buffers += table_shard(workload) * stages[0].stage.master  # the tied table's other gradient
    return rank.end(fullest, sum_of(PIPELINE_BUFFERS, buffers), 0, "as a tied embedding's gradients are added up")


def habits_of(workload: Workload, stages: Sequence[Alike]) -> Habits:
    gloo = stages[0].stage.shape.block.device == "cpu"
    last = workload.microbatches
    if any(sent_of(workload, one.index, one.stage).of_every for one in stages):
        stays = range(1, last + 1)
    else:
        stays = range(last, last + 1) if workload.schedule == "GPipe" else range(1, 2)
    return Habits(stays, gloo or not splits_backward(workload), adds_late(stages[0].stage))


@dataclass(frozen=True)
class Alike:
    """Those of a rank's stages that are alike."""

    index: int
    """Of the first of them."""
    stage: Stage
    count: int


def alike_stages(workload: Workload, pp: int, device: Device) -> tuple[Alike, ...]:
    """The stages of the rank at pipeline coordinate ``pp``, by kind."""
    _, held = own_kinds(workload, pp)
    return tuple(Alike(index, stage_of(workload, index, device), count) for index, count in held)


def own_kinds(workload: Workload, pp: int) -> _OwnKinds:
    """Of the rank at pipeline coordinate ``pp``."""
    kinds = _kinds(workload.stage_layers, turn(workload))
    return _own_kinds(workload.schedule, workload.mesh.degree("pp"), kinds, pp)


class _OwnKinds(NamedTuple):
    """The kinds of stages that a rank holds."""

    by_stage: tuple[int, ...]
    """Of every stage of the model, numbered from 0 as they come; -1 where others hold it."""
    held: tuple[tuple[int, int], ...]
    """Of every kind: the first index, and how many the rank holds."""


@lru_cache(maxsize=65536)
def _own_kinds(schedule: str, degree: int, kinds: tuple[int, ...], pp: int) -> _OwnKinds:
    held = stages_of_rank(schedule, degree, len(kinds), pp)
    counts = Counter(kinds[index] for index in held)
    numbers = {kind: number for number, kind in enumerate(counts)}
    by_stage = [-1] * len(kinds)
    for index in held:
        by_stage[index] = numbers[kinds[index]]
    return _OwnKinds(tuple(by_stage), tuple((by_stage.index(numbers[kind]), count) for kind, count in counts.items()))


@lru_cache(maxsize=4096)
def _kinds(stage_layers: tuple[int, ...], turn: int | None) -> tuple[int, ...]:
    """A number for every stage, the same for stages that are alike; none is like that where a V turns."""
    last = len(stage_layers) - 1
    numbers: dict[tuple[int, bool, bool, bool], int] = {}
    return tuple(
        numbers.setdefault((layers, index == 0, index == last, index == turn), len(numbers))
        for index, layers in enumerate(stage_layers)
    )


class Most(NamedTuple):
    """Bytes of the fullest of several situations in which as many stages are done with their gradients.

    Without what these stages hold, gathered parameters and, as a reduction begins, what that makes.
    """

    highest: int
    compute: int
    """All but gradients' shards."""
    shards: int
    """Of these alone."""
    situation: Situation
    """The one with the highest, the first of several."""
    place: int
    """Of that one among all."""


@lru_cache(maxsize=4096)
def most_of_rank(
    shape: tuple[str, int, int, int],
    coordinate: int,
    habits: Habits,
    kinds: tuple[int, ...],
    stages: tuple[tuple[Stage, Sent], ...],
) -> tuple[Most, ...]:
    """Of the situations of the rank at ``coordinate``: one for every reduction, and one for all other actions while
    as many stages are done.

    ``shape``: schedule, pp, stages and microbatches. ``stages``: of each of the rank's ``kinds`` an example, and what
    stays of a microbatch that it sends on.
    """
    by_kind = [counted_bytes(*one) for one in stages]
    counted = [one[what] for what in COUNTED for one in by_kind]
    sizes, of_shards = [sum(one) for one in counted], [one[GRADIENTS] for one in counted]
    any_shards = any(of_shards)
    order = order_of_rank(*shape, coordinate)
    situations = fullest_situations(order, shape[3], habits, kinds, sizes)
    if any_shards:  # each of these may be at its most elsewhere
        others = [size - own for size, own in zip(sizes, of_shards, strict=True)]
        situations += fullest_situations(order, shape[3], habits, kinds, others)
        situations += fullest_situations(order, shape[3], habits, kinds, of_shards)
    spans: dict[tuple[object, ...], tuple[int, int, int]] = {}
    found: dict[tuple[object, ...], Most] = {}
    for place, one in enumerate(sorted(situations, key=lambda one: -sum(one.counts))):
        action = one[:ACTION]
        if action not in spans:
            spans[action] = _at_most(stages[one.kind][0], one)
        highest, compute, shards = spans[action]
        total = sum(map(mul, one.counts, sizes))
        own = sum(map(mul, one.counts, of_shards)) if any_shards else 0
        highest, compute, shards = highest + total, compute + total - own, shards + own
        key = (one.reduced, place) if one.step == "R" else one.reduced
        most = found.get(key)
        if most is None:
            found[key] = Most(highest, compute, shards, one, place)
        elif highest > most.highest:
            found[key] = Most(highest, max(compute, most.compute), max(shards, most.shards), one, place)
        elif compute > most.compute or shards > most.shards:
            found[key] = most._replace(compute=max(compute, most.compute), shards=max(shards, most.shards))
    return tuple(sorted(found.values(), key=lambda most: most.situation.reduced))


def _at_most(stage: Stage, situation: Situation) -> tuple[int, int, int]:
    """Bytes that the action makes: at the highest, of all but gradients' shards, of these."""
    if situation.step == "R":
        return 0, 0, 0
    span = action_span(stage, situation)
    return span.highest, span.compute_highest, span.stream_highest[OWN_STREAM]


class _Rank:
    """A rank's stages by kind, and what data parallel's degrees decide of what they hold."""

    def __init__(self, stages: Sequence[Alike], sent: Sequence[Sent], shards: int, replicas: int):
        self._stages, self._sent = stages, sent
        self._shards, self._replicas = shards, replicas
        self._gathered: list[int] = []
        """Bytes of a stage's parameters as they are gathered."""
        self._reduced: list[int] = []
        """Bytes of its gradients once they are reduced."""
        for one in stages:
            stage, padded = one.stage, one.stage.units(shards).total.padded
            self._gathered.append(padded * stage.compute if stage.fsdp else 0)
            own = padded // shards * stage.master
            self._reduced.append(own if stage.fsdp else whole_gradients(stage)[GRADIENTS])

    def fullest(self, every: Sequence[Most], buffers: int) -> Span:
        """A span with the peak of the fullest situation, and the peaks of the streams over all of them."""
        best: tuple[int, int, Situation] | None = None
        compute_highest = shards_highest = 0
        stages_done: tuple[int, ...] | None = None
        for highest, compute, shards, situation, place in every:
            if situation.reduced != stages_done:
                stages_done = situation.reduced
                done, gathered = self._done_with(stages_done), self._unsharded(stages_done)
            if situation.step == "R":
                span = self._span(situation)
                highest, compute = highest + span.highest, compute + span.compute_highest
                shards += span.stream_highest[OWN_STREAM]
            compute_highest = max(compute_highest, compute + gathered)
            shards_highest = max(shards_highest, shards + done)
            highest += done + gathered
            if best is None or (highest, -place) > best[:2]:
                best = highest, -place, situation
        assert best is not None, "a schedule has actions"
        highest, _, situation = best
        streams = (shards_highest, self._gathering())
        flying = f"{situation.in_flight} microbatch{'' if situation.in_flight == 1 else 'es'} in flight"
        where = f"stage {situation.stage} {self._span(situation).moment}, with {flying}"
        peak = self._peak(situation, buffers)
        return Span(NOTHING, peak, highest + buffers, where, 0, compute_highest + buffers, streams)

    def _span(self, situation: Situation) -> Span:
        """Of the action that ``situation`` begins."""
        stage = self._stages[situation.kind].stage
        if situation.step == "R":
            return reduction(stage, self._shards, self._replicas, situation.first, situation.late)
        return action_span(stage, situation)

    def _peak(self, situation: Situation, buffers: int) -> Bytes:
        """By kind, as the action is at its fullest."""
        peak = list(self._span(situation).peak)
        peak[PIPELINE_BUFFERS] += buffers
        peak[UNSHARDED_PARAMETERS] += self._unsharded(situation.reduced)
        peak[GRADIENTS] += self._done_with(situation.reduced)
        by_kind = [counted_bytes(one.stage, sent) for one, sent in zip(self._stages, self._sent, strict=True)]
        counted = (one[what] for what in COUNTED for one in by_kind)
        for each, count in zip(counted, situation.counts, strict=True):
            if count:
                peak = [there + count * more for there, more in zip(peak, each, strict=True)]
        return tuple(peak)

    def gather(self, before: Span, only: Alike, buffers: int) -> Span:
        """``before``, or the first forward of the rank's ``only`` stage if that is fuller."""
        span = gathering_forward(only.stage, self._shards, self._replicas)
        highest = span.highest + buffers
        if highest <= before.highest:
            return before
        peak = list(span.peak)
        peak[PIPELINE_BUFFERS] += buffers
        compute = max(before.compute_highest, span.compute_highest + buffers)
        where = f"stage {only.index} {span.moment}"
        return replace(before, peak=tuple(peak), highest=highest, moment=where, compute_highest=compute)

    @property
    def copied(self) -> int:
        """Bytes of a second gradient of all that every tp rank holds alike."""
        return sum(one.count * one.stage.copied(self._shards) for one in self._stages)

    def end(self, before: Span, buffers: Bytes, more: int, where: str) -> Span:
        """``before``, or if that is fuller the end of the step: with ``more`` bytes of gradients, and ``buffers``."""
        gradients = self._done_with([one.count for one in self._stages]) + more
        highest = gradients + sum(buffers)
        if highest <= before.highest:
            return before
        peak = tuple(map(add, sum_of(GRADIENTS, gradients), buffers))
        compute = max(before.compute_highest, sum(buffers) + more)
        return replace(before, peak=peak, highest=highest, moment=where, compute_highest=compute)

    def _done_with(self, reduced: Sequence[int]) -> int:
        """Bytes of the gradients of so many stages of each kind, once they are reduced."""
        return sum(map(mul, reduced, self._reduced))

    def _unsharded(self, reduced: Sequence[int]) -> int:
        """Bytes of gathered parameters: of the stages that are not done, and of no more than torch's runtime keeps."""
        sizes: list[int] = []
        for size, one, done in zip(self._gathered, self._stages, reduced, strict=True):
            sizes += [size] * min(one.count - done, MOST_UNSHARDED)
        return sum(sorted(sizes)[-MOST_UNSHARDED:])

    def _gathering(self) -> int:
        """Bytes of the buffers that the largest units are gathered in, one after the other."""
        sizes = (
            2 * unit.padded * one.stage.compute
            for one in self._stages
            if one.stage.fsdp and self._shards > 1
            for unit, _ in one.stage.units(self._shards).all
        )
        # A stage may hold nothing at all.
        return max(sizes, default=0)
