"""The fullest moment of a pipelined rank: what its stages keep at every action of the schedule, added up. No torch.

What is counted of a rank's situations is the same however data parallel shards: only what is reduced and what is
gathered differ. So a schedule is added up once for all shards (``most_of_rank``), which a search asks for by the
hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, groupby
from operator import add, itemgetter, mul, sub
from typing import NamedTuple

from koushi.plan.communication import exchanges_table, table_shard
from koushi.plan.lifetimes import Half
from koushi.plan.operations import Device
from koushi.plan.pipelined import adds_late, backward, buffer_bytes, forward, reduction
from koushi.plan.situations import ALIKE, COUNTED, Habits, Situation, situations_of_rank
from koushi.plan.spans import (
    ACTIVATIONS,
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


@lru_cache(maxsize=4096)
def counted_bytes(stage: Stage, sent: int) -> tuple[Bytes, ...]:
    """What a stage adds for each that is counted in a situation; ``sent``: what stays of a microbatch sent on."""
    kept = forward(stage).after
    half = backward(stage, False, half="inputs").after if stage.shape.splits else NOTHING
    return (
        kept,
        tuple(map(sum, zip(kept, half, strict=True))),
        sum_of(ACTIVATIONS, sent),
        whole_gradients(stage),
        sum_of(UNSHARDED_GRADIENTS, stage.whole * stage.compute),
    )


_HALVES: dict[str, Half | None] = {"B": None, "I": "inputs", "W": "weights"}


def action_span(stage: Stage, situation: Situation) -> Span:
    """Of the forward or backward that ``situation`` begins."""
    if situation.step == "F":
        return forward(stage)
    return backward(stage, situation.first, situation.late, _HALVES[situation.step])


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
    kept = [sent_bytes(workload, one.index, one.stage) for one in stages]
    most_sent = workload.microbatches if any(every for every, _ in kept) else 1
    sent = [max(several) for several in kept]
    gloo = stages[0].stage.shape.block.device == "cpu"
    most = most_of_rank(
        (workload.schedule, mesh.degree("pp"), len(workload.stage_layers), workload.microbatches),
        pp,
        Habits(most_sent, gloo or not splits_backward(workload), adds_late(stages[0].stage)),
        _kinds(workload.stage_layers, turn(workload)),
        tuple((one.kind, one.stage, stays) for one, stays in zip(stages, sent, strict=True)),
    )
    rank = _Rank(stages, sent, mesh.degree("dp_shard"), mesh.degree("dp_replicate"))
    buffers = sum(one.count * buffer_bytes(workload, one.stage) for one in stages)
    fullest = rank.fullest(most, buffers)
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

    def begun(self, span: Span) -> Most:
        """With what an action makes."""
        return self._replace(
            highest=self.highest + span.highest,
            compute=self.compute + span.compute_highest,
            shards=self.shards + span.stream_highest[STREAMS.index(GRADIENTS)],
        )

    def __or__(self, later: Most) -> Most:
        """Of situations that come ``later`` too."""
        higher = later if later.highest > self.highest else self
        return higher._replace(compute=max(self.compute, later.compute), shards=max(self.shards, later.shards))


@lru_cache(maxsize=4096)
def most_of_rank(
    shape: tuple[str, int, int, int],
    coordinate: int,
    habits: Habits,
    kinds: tuple[int, ...],
    stages: tuple[tuple[int, Stage, int], ...],
) -> tuple[Most, ...]:
    """Of the situations of the rank at ``coordinate``: one for every reduction, and one for all other actions while
    as many stages are done.

    ``shape``: schedule, pp, stages and microbatches. ``stages``: the rank's kinds of stages, an example of each and
    what stays of a microbatch that it sends on.
    """
    examples = {kind: stage for kind, stage, _ in stages}
    sizes = _Sizes({kind: counted_bytes(stage, sent) for kind, stage, sent in stages}, max(kinds) + 1)
    found: dict[tuple[object, ...], Most] = {}
    every = situations_of_rank(*shape, coordinate, habits, kinds)
    for place, (_, alike) in enumerate(groupby(every, key=itemgetter(*range(ALIKE)))):
        most = sizes.most(list(alike), place)
        one = most.situation
        if one.step == "R":
            found[one.reduced, place] = most
        else:
            most, before = most.begun(action_span(examples[one.kind], one)), found.get(one.reduced)
            found[one.reduced] = before | most if before else most
    return tuple(found.values())


class _Sizes:
    """Bytes of each that is counted in a situation."""

    def __init__(self, by_kind: Mapping[int, tuple[Bytes, ...]], kinds: int):
        nothing = (NOTHING,) * len(COUNTED)
        each = [by_kind.get(kind, nothing)[what] for what in COUNTED for kind in range(kinds)]
        totals = [sum(one) for one in each]
        self._held = [bool(total) for total in totals]  # most columns are of kinds that others hold
        self._totals = list(compress(totals, self._held))
        self._shards = [one[GRADIENTS] for one in compress(each, self._held)]

    def most(self, alike: Sequence[Situation], place: int) -> Most:
        """Of situations that differ in counts only."""
        counts = [tuple(compress(one.counts, self._held)) for one in alike]
        totals = [sum(map(mul, each, self._totals)) for each in counts]
        highest = compute = max(totals)
        shards = 0
        if any(self._shards):
            of_shards = [sum(map(mul, each, self._shards)) for each in counts]
            compute, shards = max(map(sub, totals, of_shards)), max(of_shards)
        return Most(highest, compute, shards, alike[totals.index(highest)], place)


class _Rank:
    """A rank's stages by kind, and what data parallel's degrees decide of what they hold."""

    def __init__(self, stages: Sequence[Alike], sent: Sequence[int], shards: int, replicas: int):
        self._sent = dict(zip(stages, sent, strict=True))
        self._by_kind = {one.kind: one for one in stages}
        self._shards, self._replicas = shards, replicas
        self._gathered: dict[int, int] = {}
        """Bytes of a stage's parameters as they are gathered."""
        self._reduced: dict[int, int] = {}
        """Bytes of its gradients once they are reduced."""
        for one in stages:
            stage, padded = one.stage, one.stage.units(shards).total.padded
            self._gathered[one.kind] = padded * stage.compute if stage.fsdp else 0
            own = padded // shards * stage.master
            self._reduced[one.kind] = own if stage.fsdp else whole_gradients(stage)[GRADIENTS]

    def fullest(self, every: Sequence[Most], buffers: int) -> Span:
        """A span with the peak of the fullest situation, and the peaks of the streams over all of them."""
        best: tuple[int, int, Most] | None = None
        compute_highest = shards_highest = 0
        done_with: dict[tuple[int, ...], tuple[int, int]] = {}
        for most in every:
            reduced = most.situation.reduced
            if reduced not in done_with:
                done_with[reduced] = self._done_with(reduced), self._unsharded(reduced)
            done, unsharded = done_with[reduced]
            begun = most.begun(self._span(most.situation)) if most.situation.step == "R" else most
            compute_highest = max(compute_highest, begun.compute + unsharded)
            shards_highest = max(shards_highest, begun.shards + done)
            rank = (begun.highest + done + unsharded, -most.place)
            if best is None or rank > best[:2]:
                best = (*rank, most)
        assert best is not None, "a schedule has actions"
        highest, _, most = best
        situation, streams = most.situation, (shards_highest, self._gathering())
        flying = f"{situation.in_flight} microbatch{'' if situation.in_flight == 1 else 'es'} in flight"
        where = f"stage {situation.stage} {self._span(situation).moment}, with {flying}"
        peak = self._peak(situation, buffers)
        return Span(NOTHING, peak, highest + buffers, where, 0, compute_highest + buffers, streams)

    def _span(self, situation: Situation) -> Span:
        """Of the action that ``situation`` begins."""
        stage = self._by_kind[situation.kind].stage
        if situation.step == "R":
            return reduction(stage, self._shards, self._replicas, situation.first, situation.late)
        return action_span(stage, situation)

    def _peak(self, situation: Situation, buffers: int) -> Bytes:
        """By kind, as the action is at its fullest."""
        peak = list(self._span(situation).peak)
        peak[PIPELINE_BUFFERS] += buffers
        peak[UNSHARDED_PARAMETERS] += self._unsharded(situation.reduced)
        peak[GRADIENTS] += self._done_with(situation.reduced)
        many = len(situation.reduced)
        for one, sent in self._sent.items():
            for what, each in enumerate(counted_bytes(one.stage, sent)):
                count = situation.counts[what * many + one.kind]
                peak = [there + count * more for there, more in zip(peak, each, strict=True)]
        return tuple(peak)

    def exchange(self, before: Span, buffers: int) -> Span:
        """``before``, or the end of the step if that is fuller; ``buffers``: with the tied table's other gradient."""
        gradients = sum(self._reduced[kind] * one.count for kind, one in self._by_kind.items())
        highest = gradients + buffers
        if highest <= before.highest:
            return before
        peak = tuple(map(add, sum_of(GRADIENTS, gradients), sum_of(PIPELINE_BUFFERS, buffers)))
        compute = max(before.compute_highest, buffers)
        where = "as a tied embedding's gradients are added up"
        return replace(before, peak=peak, highest=highest, moment=where, compute_highest=compute)

    def _done_with(self, reduced: Sequence[int]) -> int:
        """Bytes of the gradients of so many stages of each kind, once they are reduced."""
        return sum(reduced[kind] * own for kind, own in self._reduced.items())

    def _unsharded(self, reduced: Sequence[int]) -> int:
        """Bytes of gathered parameters: of the stages that are not done, and of no more than torch's runtime keeps."""
        there = [(self._gathered[kind], one.count - reduced[kind]) for kind, one in self._by_kind.items()]
        sizes = sorted(size for size, count in there for _ in range(min(count, MOST_UNSHARDED)))
        return sum(sizes[-MOST_UNSHARDED:])

    def _gathering(self) -> int:
        """Bytes of the buffers that the largest units are gathered in, one after the other."""
        sizes = (
            2 * unit.padded * one.stage.compute
            for one in self._by_kind.values()
            if one.stage.fsdp and self._shards > 1
            for unit, _ in one.stage.units(self._shards).all
        )
        # A stage may hold nothing at all.
        return max(sizes, default=0)
