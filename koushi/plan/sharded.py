"""What torch's ``fully_shard`` holds around a stage's operations, and a step without pipelining. No torch.

After torch/distributed/fsdp/_fully_shard (2.11 to 2.13): in forward a gathered buffer lives until the next unit has
been copied out of its own; in backward the next unit is gathered while one computes, and the input of a
reduce-scatter lives until the next unit's backward is done.
"""

from __future__ import annotations

from functools import lru_cache

from koushi.plan.lifetimes import backward_span, forward_span
from koushi.plan.spans import (
    COPIES_ADDED,
    GATHERED,
    GRADIENTS,
    SCATTERED,
    UNSHARDED_GRADIENTS,
    UNSHARDED_PARAMETERS,
    Account,
    Span,
)
from koushi.plan.stages import Stage
from koushi.plan.units import StageUnits, Unit


class Sharded:
    """Bytes as units are gathered, freed and reduced. Does nothing where ``fully_shard`` is not at work."""

    def __init__(
        self, account: Account, stage: Stage, shards: int, replicas: int, *, first: bool = True, last: bool = True
    ):
        self.account, self.stage = account, stage
        self.shards, self.replicas = shards, replicas
        self.first, self.last = first, last
        """Whether the step's gradients begin here, and end here."""
        self.units: StageUnits = stage.units(shards)
        self.gathered_before = 0
        self.scattered_before = 0
        self.all_reduced = 0

    def again(self, account: Account) -> Sharded:
        """The same, going on with another account."""
        other = Sharded(account, self.stage, self.shards, self.replicas, first=self.first, last=self.last)
        other.gathered_before, other.scattered_before = self.gathered_before, self.scattered_before
        return other

    def then(self, other: Sharded, span: Span, times: int) -> None:
        """Go ``times`` through what ``other`` went through once."""
        self.account.go(span, times)
        self.gathered_before, self.scattered_before = other.gathered_before, other.scattered_before
        self.all_reduced += other.all_reduced * times

    def _gathered(self, unit: Unit) -> int:
        """Bytes of a unit's parameters as they are gathered."""
        float8 = self.stage.shape.system.gathers_float8 and unit is self.units.block
        return unit.padded * (1 if float8 else self.stage.compute)

    def buffer(self, unit: Unit) -> int:
        """Bytes of the buffer that a unit is gathered in; in a group of one there is none."""
        return self._gathered(unit) if self.stage.fsdp and self.shards > 1 else 0

    def gather(self, unit: Unit) -> None:
        cast = self.buffer(unit) // self.shards if self.stage.master != self.stage.compute else 0
        self.account.hold(GATHERED, cast)
        self.account.hold(GATHERED, self.buffer(unit))
        self.account.drop(GATHERED, cast)

    def unshard_forward(self, unit: Unit) -> None:
        if self.stage.fsdp and unit.whole:
            self.gather(unit)
            self.account.hold(UNSHARDED_PARAMETERS, self._gathered(unit))
            self.account.drop(GATHERED, self.gathered_before)
            self.gathered_before = self.buffer(unit)

    def end_forward(self) -> None:
        self.account.drop(GATHERED, self.gathered_before)
        self.gathered_before = 0

    def unshard_backward(self, unit: Unit, coming: Unit | None) -> None:
        """``unit`` has been gathered already; ``coming`` is next."""
        if self.stage.fsdp:
            self.account.hold(UNSHARDED_PARAMETERS, self._gathered(unit))
            self.account.drop(GATHERED, self.buffer(unit))
            if coming is not None:
                self.gather(coming)

    def reshard(self, unit: Unit) -> None:
        if self.stage.fsdp:
            self.account.drop(UNSHARDED_PARAMETERS, self._gathered(unit))

    def reduce(self, unit: Unit, width: int) -> None:
        """After a unit's backward: its gradients, of ``width`` bytes an element, to this rank's shard of their sum."""
        if not self.stage.fsdp or not unit.whole:
            return
        account = self.account
        self.reshard(unit)
        account.drop(SCATTERED, self.scattered_before)
        self.scattered_before = unit.padded * self.stage.reduce
        account.hold(SCATTERED, self.scattered_before)
        # A loop's variable in torch's foreach_reduce keeps the last gradient until the function is done.
        late = unit.tensors[-1] * width if self.shards > 1 else 0
        account.drop(UNSHARDED_GRADIENTS, unit.whole * width - late)
        self._reduced(unit)
        account.drop(UNSHARDED_GRADIENTS, late)

    def _reduced(self, unit: Unit) -> None:
        """From the input of a reduce-scatter to the gradients of this rank's shard."""
        account, master, reduce = self.account, self.stage.master, self.stage.reduce
        shard = unit.padded // self.shards
        account.hold(GRADIENTS, shard * reduce)
        if self.shards == 1 or self.stage.shape.block.device == "cpu":
            # A group of one divides by the gradient divide factor, out of place; gloo adds up in a copy.
            account.touch(GRADIENTS if self.shards == 1 else SCATTERED, unit.padded * reduce)
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
        self.account.drop(SCATTERED, self.scattered_before)
        self.account.drop(GRADIENTS, self.all_reduced)


@lru_cache(maxsize=65536)
def step_span(stage: Stage, shards: int, replicas: int, microbatches: int) -> Span:
    """All microbatches of a step without pipelining, one after the other."""
    account = Account()
    account.go(_microbatch(stage, shards, replicas, True, microbatches == 1))
    if microbatches > 2:
        account.go(_microbatch(stage, shards, replicas, False, False), microbatches - 2)
    if microbatches > 1:
        account.go(_microbatch(stage, shards, replicas, False, True))
    account.where = COPIES_ADDED
    account.touch(GRADIENTS, stage.copied(shards))
    return account.close()


@lru_cache(maxsize=65536)
def _microbatch(stage: Stage, shards: int, replicas: int, first: bool, last: bool) -> Span:
    account = Account()
    sharded = Sharded(account, stage, shards, replicas, first=first, last=last)
    _forward(stage, account, sharded)
    _backward(stage, account, sharded)
    return account.close()


def _forward(stage: Stage, account: Account, sharded: Sharded) -> None:
    units, frees = sharded.units, stage.shape.reshards
    account.where = "in forward, at the embedding"
    sharded.unshard_forward(units.root)
    if units.embedding is not None:
        sharded.unshard_forward(units.embedding)
    account.go(forward_span(stage.embedding(True)))
    if units.embedding is not None and frees:
        sharded.reshard(units.embedding)
    account.where = "in forward, in the last block"
    for stretch, count in stage.blocks(True):
        for times in (1, count - 1):
            one = Account()
            around = sharded.again(one)
            around.unshard_forward(units.block)
            one.go(forward_span(stretch))
            if frees:
                around.reshard(units.block)
            if times:
                sharded.then(around, one.close(), times)
    account.where = "in forward, at the output projection"
    account.go(forward_span(stage.output(True)))
    sharded.end_forward()
    account.where = "in forward, at the loss"
    account.go(forward_span(stage.loss()))


def _backward(stage: Stage, account: Account, sharded: Sharded) -> None:
    units, frees, tied = sharded.units, stage.shape.reshards, stage.shape.tied
    stay = sharded.first or stage.fsdp
    account.where = "in backward, at the loss"
    account.go(backward_span(stage.loss()))
    coming = units.block if units.blocks else units.embedding
    if stage.fsdp and frees and coming is not None:
        sharded.gather(coming)
    account.where = "in backward, at the output projection"
    account.go(backward_span(stage.output(stay or tied)))
    account.where = "in backward, in the last block"
    left = units.blocks
    for stretch, count in reversed(stage.blocks(stay)):
        # The first and the last one, unlike those between, follow and come before units of another size.
        for times in (n for n in (min(1, count), max(0, count - 2), 1 if count > 1 else 0) if n):
            left -= times
            one = Account()
            around = sharded.again(one)
            if frees:
                around.unshard_backward(units.block, units.block if left else units.embedding)
            one.go(backward_span(stretch))
            around.reduce(units.block, stage.compute)
            sharded.then(around, one.close(), times)
            account.where = "in backward, in the first block"
    account.where = "at the end of backward, at the embedding"
    if units.embedding is not None and frees:
        sharded.unshard_backward(units.embedding, None)
    account.go(backward_span(stage.embedding(stay or tied)))
    if tied:
        weights = stage.embedding(True).weights
        size = stage.output(True).ops[-1].weight * weights.width
        # The two gradients of the one table are added up in a third, unless the first is a cast's: else it is a view,
        # or, with tensor parallel, a DTensor, neither of which autograd writes into.
        account.touch(weights.kind, 0 if stage.output(True).weights.cast and stage.shape.block.tp == 1 else size)
        account.drop(weights.kind, size if stay else 2 * size)
    account.where = "at the end of backward, as the ends' gradients are reduced"
    sharded.reduce(units.root, stage.compute)
    if units.embedding is not None:
        sharded.reduce(units.embedding, stage.compute)
    sharded.end_backward()
    account.drop(UNSHARDED_GRADIENTS, account.held(UNSHARDED_GRADIENTS))
