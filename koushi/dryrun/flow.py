"""Where the tensors of collectives come from and what becomes of them.

An observer that interprets the step abstractly: of every tensor it keeps, not the numbers, but along
which mesh dims they are the same on each rank, what they were computed from, and which collectives'
results they are. A sum over a dim along which its terms are the same counts them several times; a
tensor gathered again while the first copy is still held was gathered in vain. Types that say how a
value varies over mesh axes are an old idea of sharded array languages.

Offsets and masks that differ by rank reach operators as plain numbers, and are taken to be alike;
what they are used with, shards of parameters, differs anyway.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_, or_
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from koushi.dryrun.values import Effect, Kind, Place, Value, effect, flat, number_among, plain
from koushi.layout import replicated_over
from koushi.mesh import MeshSpec
from koushi.parallel.calls import Call, Operator, tensors_in
from koushi.parallel.ledger import Observer, current_node, submesh_name
from koushi.parallel.shards import LocalParameter, local_part


@dataclass(frozen=True)
class Facts:
    """Of one event, what its rank can tell."""

    complete: bool = False
    """Adds up what is already the same on every rank of the group."""
    counts_copies: bool = False
    """Adds up terms of which some are already the same on every rank of the group."""
    again: int | None = None
    """The event that gathered the same, whose result is still held, or was let go within forward."""
    undone: bool = False
    """Of the gathered whole no more is used than what was put in, or it is scattered back at once."""
    unused: bool = False
    """Nothing that is left after the step, or that others are sent, was computed from the result."""
    scaled: float | None = None
    """By what plain number the summands or the sum are scaled."""
    padding: bool = False
    """No more is handed in than zeros that fill up: the rank has no part of what the others hand in."""
    parameters: tuple[str, ...] = ()
    """Whose values are handed in."""
    gradients: tuple[str, ...] = ()
    """Parameters whose finished gradients are handed in."""


@dataclass(slots=True)
class _Storage:
    weak: StorageWeakRef
    elements: int
    parts: list[tuple[int, Value]]
    """From which element on there is what, in order; the first begins at 0."""

    @property
    def held(self) -> bool:
        """Whether it still has memory."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return storage is not None and storage.nbytes() > 0

    def within(self, start: int, stop: int) -> list[tuple[int, int, Value]]:
        """What stands in a range, in order: start, stop and value of each part."""
        if len(self.parts) == 1:
            return [(start, stop, self.parts[0][1])]
        first = bisect_right(self.parts, start, key=_begin) - 1
        last = max(first + 1, bisect_left(self.parts, stop, key=_begin))
        ends = [*(begin for begin, _ in self.parts[first + 1 : last]), stop]
        begins = [start, *ends[:-1]]
        values = [value for _, value in self.parts[first:last]]
        return list(zip(begins, ends, values, strict=True))

    def put(self, start: int, stop: int, value: Value) -> None:
        first = bisect_left(self.parts, start, key=_begin)
        last = bisect_left(self.parts, stop, key=_begin)
        after = [] if stop >= self.elements else [(stop, self.parts[bisect_right(self.parts, stop, key=_begin) - 1][1])]
        rest = self.parts[last + 1 :] if last < len(self.parts) and self.parts[last][0] == stop else self.parts[last:]
        self.parts = [*self.parts[:first], (start, value), *after, *rest]


def _begin(part: tuple[int, Value]) -> int:
    return part[0]


@dataclass(slots=True)
class _Gathered:
    elements: int
    degree: int
    group: str
    read: bool = False
    """Otherwise than one piece at a time."""
    pieces: set[int] = field(default_factory=set)
    """Where the pieces that were read begin."""


@final
class Flow(Observer):
    """Watches a step of ``parameters`` on ``batch``; ask it to ``finish`` while the step's results are held."""

    def __init__(self, mesh: MeshSpec, parameters: Sequence[LocalParameter], batch: Sequence[Tensor]):
        self._mesh = mesh
        self._parameters = parameters
        self._all = (1 << len(mesh.names)) - 1
        self._groups: dict[str, int] = {}
        self._storages: dict[int, _Storage] = {}
        self._names: dict[Place, str] = {}
        self._inputs: list[tuple[int, ...]] = [()]
        """By number of a value, the numbers that it was computed from."""
        self._needed: set[int] = set()
        self._facts: list[Facts] = []
        self._results: dict[int, int] = {}
        self._gathers: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._in_forward: set[int] = set()
        """Gathers outside backward, where nothing is computed again."""
        self._wholes: dict[int, _Gathered] = {}
        self._holders: dict[int, list[_Storage]] = defaultdict(list)
        for parameter in parameters:
            copied = {"dp_replicate", *replicated_over(parameter.description.cuts)}
            self._know(parameter.value, copied, parameter.name)
        for index, tensor in enumerate(batch):
            self._know(tensor, {"tp"}, f"batch {index}")

    def finish(self) -> tuple[Facts, ...]:
        """Of every event, in order."""
        needed = self._reachable()
        found = []
        for event, facts in enumerate(self._facts):
            whole = self._wholes.get(event)
            undone = whole is not None and not whole.read and len(whole.pieces) == 1
            unused = event in self._results and self._results[event] not in needed
            found.append(replace(facts, undone=facts.undone or undone, unused=unused))
        return tuple(found)

    def _reachable(self) -> set[int]:
        waiting = list(self._needed)
        for storage in self._storages.values():
            if storage.held:
                waiting += [value.number for _, value in storage.parts]
        found: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._inputs[number]
        return found

    # What is known of tensors.

    def _bits(self, names: Iterable[str]) -> int:
        return reduce(or_, (1 << self._mesh.names.index(name) for name in names), 0)

    def _know(self, tensor: Tensor, same_over: Iterable[str], name: str) -> None:
        every = self._bits(same_over)
        storage = self._storage(tensor)
        storage.parts = [(0, Value(self._computed(()), hash(name), every, every))]
        self._names[_place(tensor)] = name

    def _computed(self, inputs: tuple[int, ...]) -> int:
        self._inputs.append(inputs)
        return len(self._inputs) - 1

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            elements = storage.nbytes() // tensor.element_size()
            # While it is held weakly its address is not given to another. Nobody saw it made: no two are alike.
            known = _Storage(StorageWeakRef(storage), elements, [(0, Value(0, hash((key, len(self._storages)))))])
            self._storages[key] = known
        return known

    def _read(self, tensor: Tensor) -> Value:
        storage = self._storage(tensor)
        if len(storage.parts) == 1:
            value = storage.parts[0][1]
        else:
            value = self._together([value for *_, value in storage.within(*_span(tensor))])
        if tensor.numel() == storage.elements:
            return value
        region = (value.content, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return value._replace(content=hash(region))

    def _together(self, values: Sequence[Value]) -> Value:
        """Of elements side by side."""
        first = values[0] if values else Value(0, 0, self._all, zero=True)
        if all(value is first for value in values):
            return first
        counted = [value for value in values if not value.zero]
        return Value(
            number=self._computed(tuple({value.number for value in values})),
            content=hash(tuple(value.content for value in values)),
            every=reduce(and_, (value.every for value in values)),
            some=reduce(or_, (value.some for value in counted), 0),
            zero=not counted,
            gathered=frozenset.intersection(*(value.gathered for value in values)),
            reduced=frozenset.intersection(*(value.reduced for value in values)),
            scale=next((value.scale for value in values if value.scale != 1), 1.0),
            origins=frozenset().union(*(value.origins for value in values)),
        )

    def _write(self, tensor: Tensor, value: Value) -> None:
        storage, (start, stop) = self._storage(tensor), _span(tensor)
        if stop - start != tensor.numel():
            value = self._together([*(each for *_, each in storage.within(start, stop)), value])
        if start < stop:
            storage.put(start, stop, value)
        for event in value.gathered:
            self._holders[event].append(storage)

    # Operators.

    def saw(
        self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, call: Call | None
    ) -> None:
        if call is not None:
            self._collective(call)
            return
        does = effect(operator)
        if does.kind is Kind.VIEW:
            return
        given = (*args, *kwargs.values())
        reads, kept = tensors_in(given), given
        written: tuple[Tensor, ...] = ()
        if does.writes:
            by_name = {**dict(zip(does.names, args, strict=False)), **kwargs}
            reads = tensors_in([each for name, each in by_name.items() if name not in does.overwritten])
            written = tensors_in([by_name.get(name) for name in does.writes])
            kept = tuple(each for name, each in by_name.items() if name not in does.writes)
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *written)}
        made = tuple([tensor for tensor in tensors_in(out) if tensor.untyped_storage()._cdata not in known])
        if not made and not written:
            if not tensors_in(out):
                self._needed.update(self._read(tensor).number for tensor in reads)  # for Python to act on
            return
        rest = plain(kept)
        targets = written or made
        if does.one_by_one and len(reads) >= len(targets):
            shared = len(reads) % len(targets)
            for index, target in enumerate(targets):
                mine = (*reads[index : len(reads) - shared : len(targets)], *reads[len(reads) - shared :])
                self._compute(does, mine, (target,), rest)
        else:
            self._compute(does, reads, (*written, *made), rest)

    def _compute(self, does: Effect, reads: Sequence[Tensor], targets: Sequence[Tensor], rest: Any) -> None:
        values = [self._read(tensor) for tensor in reads]
        for tensor, value in zip(reads, values, strict=True):
            for event in value.gathered:
                self._note_reading(event, tensor, moved=does.kind is Kind.MOVE)
        if does.overwritten and values and not any(value.number for value in values) and self._arrived(targets):
            return  # gloo puts what it has received, which nobody saw it make, where it was to go
        result = self._result(does, reads, values, rest)
        if does.joins and targets[0].is_contiguous() and all(each.dim() < 2 for each in reads):
            self._join(targets[0], reads, values)
            return
        for index, target in enumerate(targets):
            each = result._replace(content=hash((result.content, index))) if index else result
            self._write(target, each)

    def _arrived(self, targets: Sequence[Tensor]) -> bool:
        """Whether they hold a collective's results, as was noted when it was issued."""
        results = set(self._results.values())
        return all(self._read(tensor).number in results for tensor in targets)

    def _join(self, target: Tensor, reads: Sequence[Tensor], values: Sequence[Value]) -> None:
        """Put tensors one after the other, each as it was."""
        storage, start = self._storage(target), int(target.storage_offset())
        for tensor, value in zip(reads, values, strict=True):
            if tensor.numel():
                origins = self._origins([tensor], [value])
                storage.put(start, start + tensor.numel(), value._replace(gathered=frozenset(), origins=origins))
                start += tensor.numel()

    def _result(self, does: Effect, reads: Sequence[Tensor], values: Sequence[Value], rest: Any) -> Value:
        number = self._computed(tuple(value.number for value in values))
        content = hash((does.name, tuple(value.content for value in values), rest))
        every = reduce(and_, (value.every for value in values), self._all)
        if does.kind is Kind.ZERO:
            return Value(number, content, every, zero=True)
        if not values:
            return Value(number, content, every, zero=does.fills and 0.0 in flat(rest))
        if does.kind is Kind.MOVE:
            whole = all(tensor.numel() == self._storage(tensor).elements for tensor in reads)
            joined = self._together(values)
            gathered = joined.gathered if whole else frozenset[int]()
            origins = self._origins(reads, values)
            return joined._replace(number=number, content=content, gathered=gathered, origins=origins)
        if does.kind is Kind.SCALE:
            main = values[max(range(len(reads)), key=lambda index: reads[index].numel())]
            by = number_among(flat(rest))
            if by and does.divides:
                by = 1 / by
            if by is not None:
                for event in main.reduced:
                    self._facts[event] = replace(self._facts[event], scaled=by)
            scale = main.scale if by is None else by
            return main._replace(number=number, content=content, every=every, gathered=frozenset(), scale=scale)
        if does.kind is Kind.ADD:
            if number_among(flat(rest)) is not None and not any(tensor.is_floating_point() for tensor in reads):
                return Value(number, content)  # an index less an offset: how a rank finds its own part
            counted = [value for value in values if not value.zero]
            some = reduce(or_, (value.some for value in counted), 0)
            return Value(number, content, every, some, zero=not counted)
        return Value(number, content, every, every)

    def _origins(self, reads: Sequence[Tensor], values: Sequence[Value]) -> frozenset[Place]:
        own = frozenset(map(_place, reads))
        return own.union(*(value.origins for value in values))

    def _note_reading(self, event: int, tensor: Tensor, *, moved: bool) -> None:
        storage, whole = self._storage(tensor), self._wholes[event]
        if moved and tensor.numel() == storage.elements:
            return
        if storage.elements == whole.elements and tensor.numel() * whole.degree == whole.elements:
            whole.pieces.add(int(tensor.storage_offset()))
        else:
            whole.read = True

    # Collectives.

    def _collective(self, call: Call) -> None:
        event = len(self._facts)
        group = call.group.group_name
        bits = self._group_bits(call)
        values = [self._read(tensor) for tensor in call.reads]
        operand = self._together(values)
        sums = call.reduction in ("sum", "avg")
        parameters, gradients = self._named(self._origins(call.reads, values))
        facts = Facts(
            complete=sums and bits > 0 and operand.every & bits == bits and not operand.zero,
            counts_copies=sums and operand.some & bits > 0,
            scaled=operand.scale if sums and operand.scale != 1 else None,
            padding=operand.zero,
            parameters=parameters,
            gradients=gradients,
        )
        self._needed.update(value.number for value in values)
        if call.operation == "all_gather":
            facts = replace(
                facts, again=self._gathered_before((group, operand.content), event, activation=not parameters)
            )
            elements = sum(tensor.numel() for tensor in call.writes)
            self._wholes[event] = _Gathered(elements, call.group.size(), group)
        for tensor, value in zip(call.reads, values, strict=True):
            for earlier in value.gathered:
                if call.operation == "reduce_scatter" and self._wholes[earlier].group == group:
                    self._facts[earlier] = replace(self._facts[earlier], undone=True)
                self._note_reading(earlier, tensor, moved=False)
        self._facts.append(facts)
        if call.writes:
            result = _received(call, operand, bits, self._computed((operand.number,)), event)
            if call.operation != "recv":
                self._results[event] = result.number
            for index, tensor in enumerate(call.writes):
                each = result._replace(content=hash((result.content, index)))
                if call.operation == "all_reduce" and call.reads == call.writes:
                    self._reduce_in_place(tensor, each, bits)
                else:
                    self._write(tensor, each)

    def _reduce_in_place(self, tensor: Tensor, result: Value, bits: int) -> None:
        """Scalars that travel together stay what each of them is."""
        storage, (start, stop) = self._storage(tensor), _span(tensor)
        for first, last, value in storage.within(start, stop):
            every = value.every | bits
            some = 0 if value.zero else value.some | every  # ranks of one group hand in a zero for the same reason
            storage.put(first, last, result._replace(every=every, some=some, zero=value.zero))

    def _group_bits(self, call: Call) -> int:
        name = call.group.group_name
        if name not in self._groups:
            submesh = submesh_name(self._mesh, dist.get_process_group_ranks(call.group))
            self._groups[name] = self._bits(submesh.split(",")) if submesh else 0
        return self._groups[name]

    def _gathered_before(self, key: tuple[str, int], event: int, *, activation: bool) -> int | None:
        """The latest event that gathered the same, and whose result should still be there."""
        in_forward = current_node() is None
        earlier = next(
            (
                each
                for each in reversed(self._gathers[key])
                if (in_forward and activation and each in self._in_forward)
                or any(storage.held and each in storage.parts[0][1].gathered for storage in self._holders[each])
            ),
            None,
        )
        self._gathers[key].append(event)
        if in_forward:
            self._in_forward.add(event)
        return earlier

    def _named(self, origins: frozenset[Place]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parameters, and the finished gradients, among storages."""
        values = tuple(sorted(self._names[each] for each in origins & self._names.keys()))
        if current_node() is not None:
            return values, ()
        finished = {
            _place(local_part(parameter.tensor.grad)): parameter.name
            for parameter in self._parameters
            if parameter.tensor.grad is not None
        }
        return values, tuple(sorted(finished[each] for each in origins & finished.keys()))


def _received(call: Call, operand: Value, bits: int, number: int, event: int) -> Value:
    """What a collective leaves with this rank."""
    content = hash(("event", event))
    if call.operation == "all_gather":
        every = operand.every | bits
        return Value(number, content, every, every, gathered=frozenset({event}))
    if call.operation in ("all_reduce", "broadcast"):
        every = operand.every | bits
        return Value(number, content, every, every | operand.some, reduced=frozenset({event}))
    if call.operation == "reduce_scatter":
        every = operand.every & ~bits
        return Value(number, content, every, every, reduced=frozenset({event}))
    return Value(number, content)


def _place(tensor: Tensor) -> Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage a tensor's elements lie: first, and after the last."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.numel()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int(reach) + 1
