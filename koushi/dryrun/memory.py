"""Memory of one rank, followed storage by storage: when each is made and freed, what for and by whom.

What a kernel uses inside itself isn't seen, but for the backward of CUDA's fused attention, of which it is known; nor
how an allocator rounds: the sum is what torch calls allocated.

Autograd adds a second gradient to the first in place where nobody else holds that and it is neither a view nor a
DTensor, but never under a dispatch mode (torch/csrc/autograd/input_buffer.cpp, 2.11 to 2.13), which is how a log sees
what it sees. A log takes such a sum for what it is without a mode: no tensor more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from koushi.dryrun.world import current_stream
from koushi.parallel.calls import Call, Operator, tensors_in
from koushi.parallel.ledger import Observer, current_node
from koushi.plan.operations import fused_backward_bytes
from koushi.traffic import Phase

Kind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "unsharded parameters",
    "unsharded gradients",
    "activations",
    "logits",
    "pipeline buffers",
    "communication buffers",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Place = tuple[Phase, str]
"""Where the program is: the phase of the step and the module."""

_GIVES_DTENSOR = "_ToTorchTensorBackward"
"""The node of ``to_local``: what autograd adds after it are DTensors."""

_aten, _c10d = torch.ops.aten, torch.ops.c10d


@dataclass
class Block:
    """One storage."""

    place: Place
    shape: tuple[int, ...]
    """Of the first tensor on it."""
    kind: Kind | None = None
    """None: not told yet; an activation in the end."""
    stream: object = None
    """That it was made on."""
    node: int | None = None
    """Of the graph, that autograd was going back through."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held."""

    bytes: int
    place: Place
    kinds: Mapping[Kind, int]
    """Bytes by what they are for; the kinds that hold anything."""
    modules: Mapping[str, int]
    """Bytes by the module that made them; those of the step itself under an empty name."""
    pools: tuple[int, ...] = field(default=(), compare=False)
    """The most that was held of each stream's making, whenever that was; none where it isn't known."""


class MemoryLog(Observer):
    """Every change of every storage, in order; kinds may be told at any time, also after the storage has gone."""

    place: Callable[[], Place]

    def __init__(self, device_type: str, logits: tuple[int, int]):
        """``logits``: the rank's share of the vocabulary, and the numbers in the logits of a microbatch."""
        self._device_type = device_type
        self._logits = logits
        self.place = lambda: ("start", "")
        self.blocks: list[Block] = []
        self.changes: list[tuple[int, int]] = []
        """Block and the bytes it grew by."""
        self._live: dict[int, tuple[int, int]] = {}
        """Block and size by the address of the storage."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._into: list[tuple[int, int]] = []
        """Pairs of blocks: what flowed into what during backward."""
        self._first_term: tuple[int, int] | None = None
        """Of a sum that is the latest change and may be autograd's: the block, and how many changes there were."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also see storages that change size in place, which no operator tells of."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._change(storage._cdata, size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def hold(self, tensors: Iterable[Tensor], kind: Kind, module: str) -> None:
        """Begin with ``tensors`` in memory."""
        for tensor in tensors:
            self._see(tensor)
            self.tell([tensor], kind, module)

    def saw(
        self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, call: Call | None
    ) -> None:
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._see(tensor)
        rule = _BY_IDENTITY.get(id(operator))
        if rule is not None:
            rule(self, args, kwargs, out)

    def tell(self, tensors: Iterable[Tensor], kind: Kind, module: str | None = None, *, again: bool = False) -> None:
        """Say what the storages of ``tensors`` are for, and of which module; what was said first holds.

        ``again`` overrules what was said.
        """
        for tensor in tensors:
            block = self.block(tensor)
            if block is not None and (again or self.blocks[block].kind is None):
                self.blocks[block].kind = kind
                if module is not None:
                    self.blocks[block].place = (self.blocks[block].place[0], module)

    def block(self, tensor: Tensor) -> int | None:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def flow(self, source: Tensor, target: Tensor) -> None:
        one, other = self.block(source), self.block(target)
        if one is not None and other is not None and self.blocks[one].kind is None:
            self._into.append((one, other))

    def peak(self, first: int = 0, stop: int | None = None) -> Peak:
        """Of the changes from ``first`` up to ``stop``; what came before ``first`` counts as held."""
        total = sum(size for _, size in self.changes[:first])
        highest, at = -1, first
        for index in range(first, len(self.changes) if stop is None else stop):
            total += self.changes[index][1]
            if total > highest:
                highest, at = total, index
        held: Counter[int] = Counter()
        for block, size in self.changes[: at + 1]:
            held[block] += size
        kinds: Counter[Kind] = Counter()
        modules: Counter[str] = Counter()
        for block, size in held.items():
            if size:
                kinds[self._kind(self.blocks[block])] += size
                modules[self.blocks[block].place[1]] += size
        place = self.blocks[self.changes[at][0]].place
        return Peak(sum(held.values()), place, kinds, modules, self._pools(first, stop))

    def _pools(self, first: int, stop: int | None) -> tuple[int, ...]:
        """The peak of each stream's blocks over the same changes, the largest first."""
        now: Counter[object] = Counter()
        for block, size in self.changes[:first]:
            now[self.blocks[block].stream] += size
        most = now.copy()
        for block, size in self.changes[first:stop]:
            stream = self.blocks[block].stream
            now[stream] += size
            most[stream] = max(most[stream], now[stream])
        return tuple(sorted(most.values(), reverse=True))

    def touch(self, size: int) -> None:
        """Bytes that come and go inside the operator which has just run."""
        block = len(self.blocks)
        self.blocks.append(Block(self.place(), (), stream=current_stream(), node=_node()))
        self.changes += [(block, size), (block, -size)]

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(size for _, size in self._live.values())

    def sums(self, first: Tensor, out: Tensor) -> None:
        """``out`` is ``first`` and something else. That autograd itself adds up is known by three things: there is no
        grad mode; ``first`` was made by another node of the graph than was at work last, so is nothing that this node
        computes with; and it goes at once, before anything else happens."""
        node, block = current_node(), self.block(first)
        if node is None or block is None or torch.is_grad_enabled():
            return
        if self.blocks[block].node in (None, node._sequence_nr()) or node.name() == _GIVES_DTENSOR:
            return
        # A view holds what it is a view of; what is expanded is less than it looks.
        if not first._is_view() and first.nbytes == first.untyped_storage().nbytes() == out.nbytes:
            self._first_term = (block, len(self.changes))

    def settle(self) -> None:
        """Give kinds to what flowed into gradients, once these have been told."""
        for source, target in self._into:
            kind = self.blocks[target].kind
            if kind in ("gradients", "unsharded gradients") and self.blocks[source].kind is None:
                self.blocks[source].kind = kind

    def _kind(self, block: Block) -> Kind:
        if block.kind is not None:
            return block.kind
        share, numel = self._logits
        of_loss = block.place[1] in ("", "output")
        is_logits = of_loss and block.shape[-1:] == (share,) and torch.Size(block.shape).numel() == numel
        return "logits" if is_logits else "activations"

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live or tensor.device.type != self._device_type or isinstance(tensor, FakeTensor):
            return  # fake ones are what DTensor asks about global shapes with
        self._live[address] = (len(self.blocks), 0)
        self._references[address] = weakref.ref(storage, partial(self._gone, address))
        self.blocks.append(Block(self.place(), tuple(tensor.shape), stream=current_stream(), node=_node()))
        self._change(address, storage.nbytes())

    def _change(self, address: int, size: int) -> None:
        block, before = self._live[address]
        self._live[address] = (block, size)
        if size == before:
            return
        in_place = size == 0 and self._first_term == (block, len(self.changes))
        self.changes.insert(len(self.changes) - in_place, (block, size - before))

    def _gone(self, address: int, _: object) -> None:
        self._change(address, 0)
        del self._live[address], self._references[address]


def _node() -> int | None:
    node = current_node()
    return None if node is None else node._sequence_nr()


Rule = Callable[[MemoryLog, tuple[Any, ...], Mapping[str, Any], Any], None]


def _gather_copy_in(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    log.tell((*args[0], args[1]), "communication buffers")


def _gather_copy_out(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    log.tell(kwargs["out"], "unsharded parameters")


def _scatter_copy_in(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    log.tell(args[0], "unsharded gradients")
    log.tell([kwargs["out"]], "communication buffers")


def _received(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    log.tell(args[0], "pipeline buffers")


def _added(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    if isinstance(args[1], Tensor):
        log.flow(args[1], args[0])


def _sum(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    if all(isinstance(term, Tensor) for term in args):
        log.sums(args[0], out)


def _fused_backward(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    query, key = args[1], args[2]
    *rows, head_dim = query.shape
    log.touch(fused_backward_bytes(prod(rows), head_dim, query.nbytes, key.nbytes < query.nbytes))


def _cast(log: MemoryLog, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
    log.flow(args[0], out)


_RULES: dict[Any, Rule] = {
    torch.ops.fsdp.all_gather_copy_in.default: _gather_copy_in,
    torch.ops.fsdp.split_with_sizes_copy.default: _gather_copy_out,
    torch.ops.fsdp.chunk_cat.default: _scatter_copy_in,
    _c10d.recv_.default: _received,
    _aten.add.Tensor: _sum,
    _aten.add_.Tensor: _added,
    _aten.copy_.default: _added,
    _aten._to_copy.default: _cast,
    _aten._scaled_dot_product_flash_attention_backward.default: _fused_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _fused_backward,
}
_BY_IDENTITY = {id(operator): rule for operator, rule in _RULES.items()}
"""An operator's hash is computed in Python."""
