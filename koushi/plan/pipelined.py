"""What a pipelined rank holds as it goes through its schedule's actions. No torch.

torch's stages keep a microbatch from its forward to its backward, receive into buffers made for every
microbatch, and, with ``fully_shard``, leave parameters gathered and gradients whole, in the dtype of the
reduction, until the stage's last backward is done. Which microbatches are in flight is read from the
schedule's table of actions; of all moments only those are looked at that no other outdoes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from koushi.plan.lifetimes import Half, backward_span, forward_span, keeps_input
from koushi.plan.schedule import actions
from koushi.plan.spans import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    PIPELINE_BUFFERS,
    UNSHARDED_GRADIENTS,
    Account,
    Bytes,
    Span,
)
from koushi.plan.stages import Sharded, Stage
from koushi.plan.units import Unit, held_elsewhere
from koushi.schedules import SCHEDULES

Step = Literal["F", "B", "I", "W", "R"]
"""Actions of a schedule; R: a stage's gradients are reduced, after its last backward."""

BEFORE, WHOLE, REDUCED = range(3)
"""A stage's gradients: none yet, being added up, done."""


@dataclass(frozen=True)
class Situation:
    """What a rank has going on as it begins an action."""

    step: Step
    stage: int
    """Its place among the rank's stages."""
    forwards: tuple[int, ...]
    """By stage: microbatches whose backward has not begun."""
    halves: tuple[int, ...]
    """By stage: microbatches whose backward is half done."""
    done: tuple[int, ...]
    """By stage: microbatches whose gradients have been sent on."""
    gradients: tuple[int, ...]
    """By stage: BEFORE, WHOLE or REDUCED."""

    def outdoes(self, other: Situation) -> bool:
        """Whether at least as much is held as in ``other``, at the same action."""
        return (
            (self.step, self.stage) == (other.step, other.stage)
            and all(mine >= others for mine, others in zip(self.forwards, other.forwards, strict=True))
            and all(mine >= others for mine, others in zip(self.halves, other.halves, strict=True))
            and all(mine >= others for mine, others in zip(self.done, other.done, strict=True))
            and all(mine in (others, WHOLE) for mine, others in zip(self.gradients, other.gradients, strict=True))
            and (self.gradients[self.stage] == BEFORE) == (other.gradients[self.stage] == BEFORE)
        )


@lru_cache(maxsize=4096)
def situations(schedule: str, pp: int, n_stages: int, microbatches: int, coordinate: int) -> tuple[Situation, ...]:
    """Those of one rank's step that no other outdoes."""
    order = actions(schedule, pp, n_stages, microbatches)[coordinate]
    place = {stage: index for index, stage in enumerate(sorted({action.stage for action in order}))}
    forwards, halves, gradients = [0] * len(place), [0] * len(place), [BEFORE] * len(place)
    sent, done = [0] * len(place), [0] * len(place)
    found: dict[Situation, None] = {}

    def note(step: Step, index: int) -> None:
        found.setdefault(Situation(step, index, tuple(forwards), tuple(halves), tuple(sent), tuple(gradients)))

    for kind, stage, _ in order:
        index = place[stage]
        note(kind, index)
        if kind == "F":
            forwards[index] += 1
            continue
        if kind != "W":
            forwards[index] -= 1
            sent[index] += 1
        if kind == "I":
            halves[index] += 1
            continue
        if kind == "W":
            halves[index] -= 1
        gradients[index] = WHOLE
        done[index] += 1
        if done[index] == microbatches:
            note("R", index)
            gradients[index] = REDUCED
    return tuple(_outstanding(found))


def _outstanding(found: Iterable[Situation]) -> list[Situation]:
    kept: list[Situation] = []
    for one in found:
        if not any(other.outdoes(one) for other in kept):
            kept = [other for other in kept if not one.outdoes(other)] + [one]
    return kept


@dataclass(frozen=True)
class PipelinedStage(Stage):
    """A stage's actions as spans."""

    @cached_property
    def buffers(self) -> int:
        """Bytes of the buffers to receive into, of all microbatches."""
        ends = (not self.first) + (not self.last)
        return self.workload.microbatches * ends * self.stream

    @cached_property
    def sent(self) -> tuple[int, int]:
        """Bytes that stay of what has been sent on: of every microbatch that is done, and of the last one alone.

        gloo holds what it sends as long as somebody holds the send: GPipe and torch's runtime of several stages do
        until the end of the step, 1F1B one of each direction. NCCL lets go, but a list of sends stays, and the first
        half of a split backward leaves its gradient on the input.
        """
        name, gloo = self.workload.schedule, self.device == "cpu"
        before, after = (held_elsewhere(self.workload, self.index, self.index + step) for step in (-1, 1))
        if name == "1F1B":
            return 0, self.stream * (before + (after and gloo))
        if gloo:
            return self.stream * (before + after), 0
        return (self.stream * before, 0) if self.splits else (0, self.stream * before)

    @cached_property
    def unsharded(self) -> int:
        """Bytes of the parameters while they are gathered."""
        return self.units.total.padded * self.widths[1] if self.fsdp else 0

    @cached_property
    def whole_gradients(self) -> Bytes:
        """While they are added up over microbatches."""
        account = Account()
        total, (master, compute, reduce) = self.units.total.whole, self.widths
        if self.fsdp:
            # A weight's own half of backward leaves its gradient in the compute dtype until the next action.
            late = compute if self.splits and reduce != compute else 0
            account.hold(UNSHARDED_GRADIENTS, total * (reduce + late))
        elif self.workload.system.sharding == "fsdp" and not self.workload.system.separate_masters:
            account.hold(GRADIENTS, total * master)
        return account.close().after

    @cached_property
    def reduced_gradients(self) -> Bytes:
        account = Account()
        if not self.fsdp:
            return self.whole_gradients
        shard = self.units.total.padded // self.workload.mesh.degree("dp_shard")
        account.hold(GRADIENTS, shard * self.widths[0])
        return account.close().after

    @property
    def splits(self) -> bool:
        return SCHEDULES[self.workload.schedule].splits_backward

    @cached_property
    def forward(self) -> Span:
        account = Account("in forward")
        if self.first:
            account.go(forward_span(self.embedding(True)))
        else:
            account.drop(PIPELINE_BUFFERS, self.stream)
            account.hold(ACTIVATIONS, self.stream)
        blocks = [(stretch, count) for stretch, count in self.blocks(True) if count]
        for stretch, count in blocks:
            account.go(forward_span(stretch), count)
        if not self._input_in_flight:
            account.hold(PIPELINE_BUFFERS, self.stream)
        if self.last:
            account.go(forward_span(self.output(True)))
            account.where = "in forward, at the loss"
            account.go(forward_span(self.loss()))
        return account.close()

    @cached_property
    def _input_in_flight(self) -> bool:
        """Whether the received input counts as an activation until backward."""
        blocks = [stretch for stretch, count in self.blocks(True) if count]
        if self.first or (not blocks and not self.last):
            return True
        return keeps_input(blocks[0] if blocks else self.output(True))

    def _stay(self, first: bool) -> bool:
        """Whether a block's gradients stay as autograd makes them until the block is done."""
        return first or (self.fsdp and self.widths[1] != self.widths[2])

    def backward(self, first: bool, half: Half | None = None) -> Span:
        """Of one microbatch, whose gradients are the stage's ``first`` or are added to those that are there."""
        return _backward(self, first, half)

    @cached_property
    def reduction(self) -> Span:
        """From whole gradients to this rank's shards of their sums."""
        account = Account("as gradients are reduced after the last backward")
        sharded = Sharded(account, self, first=True, last=True)
        units, width = self.units, self.widths[2]
        sharded.reduce(units.root, width)
        if units.embedding is not None:
            sharded.reduce(units.embedding, width)
        for times in (1, units.blocks - 1)[: min(2, units.blocks)]:
            one = Account(account.where)
            around = Sharded(one, self, first=True, last=True)
            around.scattered_before = sharded.scattered_before
            around.reduce(units.block, width)
            sharded.scattered_before = around.scattered_before
            sharded.all_reduced += around.all_reduced * times
            account.go(one.close(), times)
        sharded.end_backward()
        return account.close()

    @cached_property
    def gathering(self) -> int:
        """Bytes that come and go as the largest unit is gathered."""
        account = Account()
        sharded = Sharded(account, self, first=True, last=True)
        largest = max((unit for unit, _ in self.units.all), key=lambda unit: unit.padded, default=Unit())
        sharded.gather(largest)
        return account.close().highest


@lru_cache(maxsize=4096)
def _backward(stage: PipelinedStage, first: bool, half: Half | None) -> Span:
    account = Account("in backward")
    stay = stage._stay(first)
    tail = "" if half is None else ", for the inputs" if half == "inputs" else ", for the weights"
    if half == "weights" and stage.first:
        half = None  # the first stage goes backward once, for the weights
    elif half == "inputs" and stage.first:
        return Span()
    if half != "weights":
        if stage.last:
            account.where = "in backward, at the loss" + tail
            account.go(backward_span(stage.loss()))
        else:
            account.drop(PIPELINE_BUFFERS, stage.stream)
            account.hold(ACTIVATIONS, stage.stream)
    account.where = "in backward" + tail
    if stage.last:
        account.go(backward_span(stage.output(stay), half))
        _accumulate(stage, account, stage.units.root, first, half)
    for stretch, count in reversed(stage.blocks(stay)):
        one = Account()
        one.go(backward_span(stretch, half))
        _accumulate(stage, one, stage.units.block, first, half)
        account.go(one.close(), count)
    if stage.first:
        account.where = "at the end of backward, at the embedding" + tail
        account.go(backward_span(stage.embedding(stay)))
        if stage.units.embedding is not None:
            _accumulate(stage, account, stage.units.embedding, first, half)
    elif half != "weights":
        # The gradient of the input is sent, and the buffers are there for the next step.
        account.drop(ACTIVATIONS, stage.stream)
        account.hold(PIPELINE_BUFFERS, stage.stream if stage._input_in_flight else 0)
    if stage.last:
        account.drop(LOGITS, 0 if half == "weights" else stage.logits)
    else:
        # The output is kept for the second half.
        account.drop(ACTIVATIONS, 0 if half == "inputs" else stage.stream)
        account.hold(PIPELINE_BUFFERS, 0 if half == "weights" else stage.stream)
    return account.close()


def _accumulate(stage: PipelinedStage, account: Account, unit: Unit, first: bool, half: Half | None) -> None:
    """A unit's gradients into the dtype of the reduction, tensor by tensor, or to those that are there."""
    _, compute, reduce = stage.widths
    if not stage.fsdp or compute == reduce or half == "inputs":
        return
    if not first:
        account.drop(UNSHARDED_GRADIENTS, unit.whole * compute)
        return
    for tensor in unit.tensors:
        account.hold(UNSHARDED_GRADIENTS, tensor * reduce)
        account.drop(UNSHARDED_GRADIENTS, tensor * compute)
