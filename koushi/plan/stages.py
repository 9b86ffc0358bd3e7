"""One pipeline stage as spans of bytes: its operations, and what data parallel holds around them. No torch.

Data parallel follows torch's ``fully_shard`` (torch/distributed/fsdp/_fully_shard, 2.11 to 2.13): in forward a
gathered buffer lives until the next unit has been copied out of its own; in backward the next unit is gathered
while one computes, and the input of a reduce-scatter lives until the next unit's backward is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from koushi.plan.ends import EndShape, embedding_operations, logits_bytes, loss_operations, output_operations
from koushi.plan.lifetimes import Stretch, Weights, backward_span, forward_span
from koushi.plan.operations import BlockShape, Device, Op, block_operations, block_shape, stream_sizes
from koushi.plan.spans import (
    COMMUNICATION_BUFFERS,
    GRADIENTS,
    LOGITS,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Account,
    Span,
)
from koushi.plan.units import StageUnits, Unit, units_of
from koushi.plan.workload import Recompute, Workload
from koushi.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class Stage:
    """What a rank holds and does for one stage."""

    workload: Workload
    index: int
    device: Device

    @cached_property
    def units(self) -> StageUnits:
        return units_of(self.workload, self.index)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == len(self.workload.stage_layers) - 1

    @cached_property
    def fsdp(self) -> bool:
        """Whether torch's fully_shard is at work."""
        workload = self.workload
        return workload.system.sharding == "fsdp" and workload.mesh.degree("dp_replicate", "dp_shard") > 1

    @cached_property
    def widths(self) -> tuple[int, int, int]:
        """Bytes of an element of masters, in compute, in reductions."""
        workload = self.workload
        return tuple(DTYPE_BYTES[name] for name in (workload.parameters, workload.compute, workload.reduce))  # type: ignore[return-value]

    @cached_property
    def block(self) -> BlockShape:
        return block_shape(self.workload, self.device)

    @cached_property
    def ends(self) -> EndShape:
        workload = self.workload
        cast = not self.fsdp and not workload.system.separate_masters
        return EndShape(
            self.block,
            workload.model.vocab_size,
            workload.model.learned_positions,
            workload.parameters if cast else workload.compute,
            workload.system.loss_parallel,
            workload.system.loss_chunks,
        )

    @property
    def stream(self) -> int:
        """Bytes that go from stage to stage."""
        return stream_sizes(self.block).stream

    @property
    def logits(self) -> int:
        return logits_bytes(self.ends)

    def _weights(self, stay: bool) -> Weights:
        master, compute, _ = self.widths
        system = self.workload.system
        if self.fsdp:
            return Weights(UNSHARDED_GRADIENTS, compute, stay=stay)
        if system.sharding != "fsdp" or system.separate_masters:
            return Weights(UNSHARDED_GRADIENTS, compute, stay=not system.gradients_at_once)
        return Weights(GRADIENTS, master, compute if compute != master else 0, stay)

    def _block(self, stay: bool, recompute: Recompute) -> Stretch:
        ops = block_operations(self.block)
        kept = _kept(ops, self.workload.system.kept_matmuls) if recompute == "selective" else frozenset()
        return Stretch(ops, self._weights(stay), self.stream, recompute=recompute, kept=kept)

    def blocks(self, stay: bool) -> list[tuple[Stretch, int]]:
        """Kinds of blocks with how many there are: those that recompute, those that don't."""
        recompute, count = self.workload.recompute, self.units.blocks
        again = count if recompute == "none" else round(count * self.workload.system.recompute_share)
        found = [(self._block(stay, recompute), again)]
        if again < count:
            found.append((self._block(stay, "none"), count - again))
        return found

    def embedding(self, stay: bool) -> Stretch:
        weights = self._weights(stay)
        table = DTYPE_BYTES[self.ends.table]
        return Stretch(embedding_operations(self.ends), replace(weights, width=table, cast=0))

    def output(self, stay: bool) -> Stretch:
        return Stretch(output_operations(self.ends), self._weights(stay), self.stream)

    def loss(self) -> Stretch:
        held = frozenset({"x"}) if self.workload.mesh.degree("pp") > 1 else frozenset()
        return Stretch(loss_operations(self.ends), self._weights(True), self.logits, LOGITS, held=held)


def _kept(ops: tuple[Op, ...], share: float) -> frozenset[str]:
    """Attention, scatters, and every so many matmuls, the first of them."""
    matmuls = [op.makes for op in ops if op.kept and op.weight]
    some = [name for index, name in enumerate(matmuls, 1) if ceil(index * share) > ceil((index - 1) * share)]
    return frozenset(some) | {op.makes for op in ops if op.kept and not op.weight}


class Sharded:
    """What fully_shard holds as units are gathered, freed and reduced. Does nothing where it is not at work."""

    def __init__(self, account: Account, stage: Stage, *, first: bool, last: bool):
        self.account, self.stage = account, stage
        self.first, self.last = first, last
        """Whether the step's gradients begin here, and end here."""
        mesh = stage.workload.mesh
        self.shards, self.replicas = mesh.degree("dp_shard"), mesh.degree("dp_replicate")
        self.gathered_before = 0
        self.scattered_before = 0
        self.all_reduced = 0

    def buffer(self, unit: Unit) -> int:
        """Bytes of the buffer that a unit is gathered in; in a group of one there is none."""
        return unit.padded * self.stage.widths[1] if self.stage.fsdp and self.shards > 1 else 0

    def gather(self, unit: Unit) -> None:
        master, compute, _ = self.stage.widths
        cast = self.buffer(unit) // self.shards if master != compute else 0
        self.account.hold(COMMUNICATION_BUFFERS, cast)
        self.account.hold(COMMUNICATION_BUFFERS, self.buffer(unit))
        self.account.drop(COMMUNICATION_BUFFERS, cast)

    def unshard_forward(self, unit: Unit) -> None:
        if self.stage.fsdp and unit.whole:
            self.gather(unit)
            self.account.drop(COMMUNICATION_BUFFERS, self.gathered_before)
            self.account.hold(UNSHARDED_PARAMETERS, unit.padded * self.stage.widths[1])
            self.gathered_before = self.buffer(unit)

    def end_forward(self) -> None:
        self.account.drop(COMMUNICATION_BUFFERS, self.gathered_before)
        self.gathered_before = 0

    def unshard_backward(self, unit: Unit, coming: Unit | None) -> None:
        """``unit`` has been gathered already; ``coming`` is next."""
        if self.stage.fsdp:
            self.account.hold(UNSHARDED_PARAMETERS, unit.padded * self.stage.widths[1])
            self.account.drop(COMMUNICATION_BUFFERS, self.buffer(unit))
            if coming is not None:
                self.gather(coming)

    def reshard(self, unit: Unit) -> None:
        if self.stage.fsdp:
            self.account.drop(UNSHARDED_PARAMETERS, unit.padded * self.stage.widths[1])

    def reduce(self, unit: Unit, width: int) -> None:
        """After a unit's backward: its gradients, of ``width`` bytes an element, to this rank's shard of their sum."""
        if not self.stage.fsdp or not unit.whole:
            return
        account = self.account
        self.reshard(unit)
        account.drop(COMMUNICATION_BUFFERS, self.scattered_before)
        self.scattered_before = unit.padded * self.stage.widths[2]
        account.hold(COMMUNICATION_BUFFERS, self.scattered_before)
        # A loop's variable in torch's foreach_reduce keeps the last gradient until the function is done.
        late = unit.tensors[-1] * width if self.shards > 1 else 0
        account.drop(UNSHARDED_GRADIENTS, unit.whole * width - late)
        self._reduced(unit)
        account.drop(UNSHARDED_GRADIENTS, late)

    def _reduced(self, unit: Unit) -> None:
        """From the input of a reduce-scatter to the gradients of this rank's shard."""
        account, (master, _, reduce) = self.account, self.stage.widths
        shard = unit.padded // self.shards
        account.hold(GRADIENTS, shard * reduce)
        if self.shards == 1 or self.stage.device == "cpu":
            # A group of one divides by the gradient divide factor, out of place; gloo adds up in a copy.
            account.touch(COMMUNICATION_BUFFERS, unit.padded * reduce)
        if self.replicas > 1 and not self.last:
            account.drop(GRADIENTS, 0 if self.first else shard * reduce)
            return
        if reduce != master:
            account.hold(GRADIENTS, shard * master)
            if self.replicas > 1:
                self.all_reduced += shard * reduce
            else:
                account.drop(GRADIENTS, shard * reduce)
        if not self.first:
            account.drop(GRADIENTS, shard * (reduce if self.replicas > 1 else master))

    def end_backward(self) -> None:
        self.account.drop(COMMUNICATION_BUFFERS, self.scattered_before)
        self.account.drop(GRADIENTS, self.all_reduced)


def microbatch_span(stage: Stage, *, first: bool, last: bool) -> Span:
    """Forward and backward of one microbatch without pipelining."""
    account = Account()
    sharded = Sharded(account, stage, first=first, last=last)
    _forward(stage, account, sharded)
    _backward(stage, account, sharded)
    return account.close()


def _forward(stage: Stage, account: Account, sharded: Sharded) -> None:
    units, frees = stage.units, stage.workload.reshard_after_forward
    account.where = "in forward, at the embedding"
    sharded.unshard_forward(units.root)
    if units.embedding is not None:
        sharded.unshard_forward(units.embedding)
    account.go(forward_span(stage.embedding(True)))
    if units.embedding is not None and frees:
        sharded.reshard(units.embedding)
    account.where = "in forward, in the last block"
    for stretch, count in stage.blocks(True):
        for times in (1, count - 1)[: min(2, count)]:
            one = Account()
            around = Sharded(one, stage, first=True, last=True)
            around.gathered_before = sharded.gathered_before
            around.unshard_forward(units.block)
            one.go(forward_span(stretch))
            if frees:
                around.reshard(units.block)
            sharded.gathered_before = around.gathered_before
            account.go(one.close(), times)
    account.where = "in forward, at the output projection"
    account.go(forward_span(stage.output(True)))
    sharded.end_forward()
    account.where = "in forward, at the loss"
    account.go(forward_span(stage.loss()))


def _backward(stage: Stage, account: Account, sharded: Sharded) -> None:
    units, frees, compute = stage.units, stage.workload.reshard_after_forward, stage.widths[1]
    tied = stage.workload.model.tie_embeddings
    stay = sharded.first or stage.fsdp
    account.where = "in backward, at the loss"
    account.go(backward_span(stage.loss()))
    coming = [units.block] * units.blocks + ([units.embedding] if units.embedding is not None else [])
    if stage.fsdp and frees and coming:
        sharded.gather(coming[0])
    account.where = "in backward, at the output projection"
    account.go(backward_span(stage.output(stay or tied)))
    account.where = "in backward, in the last block"
    left = units.blocks
    for stretch, count in reversed(stage.blocks(stay)):
        # The first and the last one, unlike those between, follow and come before units of another size.
        for times in (n for n in (min(1, count), max(0, count - 2), 1 if count > 1 else 0) if n):
            left -= times
            following = units.block if left else units.embedding
            one = Account()
            around = Sharded(one, stage, first=sharded.first, last=sharded.last)
            around.scattered_before = sharded.scattered_before
            if frees:
                around.unshard_backward(units.block, following)
            one.go(backward_span(stretch))
            around.reduce(units.block, compute)
            sharded.scattered_before = around.scattered_before
            sharded.all_reduced += around.all_reduced * times
            account.go(one.close(), times)
            account.where = "in backward, in the first block"
    account.where = "at the end of backward, at the embedding"
    if units.embedding is not None and frees:
        sharded.unshard_backward(units.embedding, None)
    account.go(backward_span(stage.embedding(stay and not tied)))
    if tied and not stay:
        account.drop(
            GRADIENTS, stage.workload.model.vocab_size // stage.block.tp * stage.block.model.dim * stage.widths[0]
        )
    account.where = "at the end of backward, as the ends' gradients are reduced"
    sharded.reduce(units.root, compute)
    if units.embedding is not None:
        sharded.reduce(units.embedding, compute)
    sharded.end_backward()
    account.drop(UNSHARDED_GRADIENTS, account.held(UNSHARDED_GRADIENTS))
