"""The ledger: every collective of a step, in order, as the rank that issues it sees it.

A Recorder is a dispatch mode: operators pass through it on their way, on meta tensors over a fake
process group as well as on real ones, and nothing they compute changes. A collective that an
operator of ours is made of is not a second event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from koushi.mesh import MeshSpec
from koushi.parallel.calls import Call, Operator, Reader, dtype_name, reader, tensor_bytes
from koushi.parallel.exchanges import Exchanges
from koushi.parallel.frames import Caller, Site, caller
from koushi.traffic import Collective, Phase, Traffic

Run = Callable[[Operator, tuple[Any, ...], Mapping[str, Any]], Any]

UNKNOWN_NODE = 2**63
"""Autograd numbers nodes that accumulate gradients from the top; they belong to no module's interval."""


@dataclass(frozen=True)
class Event:
    """One collective that this rank has issued."""

    number: int
    """Position in the rank's ledger."""
    collective: Collective
    """Where no dim or fold of the mesh has the group's ranks, the submesh is ``ranks`` and their numbers."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    peer: int | None
    """The other rank of a send or recv."""
    reduction: str
    """sum, avg, max, ...; empty where nothing is reduced."""
    elements: int
    module: str
    """Path in the unsharded model of the module that it serves; empty: the model, or none."""
    site: Site
    """In the caller's own code."""
    once: bool = False
    """Whether it belongs to a run's first step alone: pipeline stages that make each other's acquaintance."""


@dataclass(frozen=True)
class Taken:
    """That a pipeline stage has taken what it has received, and begins a microbatch with it."""

    number: int
    """Of the event that received it."""
    after: int
    """How many events there were."""


@dataclass(frozen=True)
class Ledger:
    """What one rank has issued."""

    rank: int
    mesh: MeshSpec
    events: tuple[Event, ...]
    taken: tuple[Taken, ...] = ()
    """In the order of the program."""

    def traffic(self) -> Traffic:
        """Of every step alike."""
        return Counter(event.collective for event in self.events if not event.once)


current_node: Callable[[], Node | None] = cast("Any", torch._C)._current_autograd_node
"""What autograd goes back through; private, and declared by torch as if it were always there."""


class Observer(ABC):
    """Sees every operator after it has run."""

    @abstractmethod
    def saw(
        self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, call: Call | None
    ) -> None:
        """``call`` is what the operator says where it is a collective; it then is the ledger's latest event."""


def submesh_name(mesh: MeshSpec, ranks: Sequence[int]) -> str | None:
    """The dim or fold whose group ``ranks`` are, by the dims along which they differ; None: no group of the mesh.

    A single rank is a group of no dim in particular, and has no name either.
    """
    if len(ranks) == 1:
        return None
    coordinates = [mesh.coordinate(rank) for rank in ranks]
    varying = [name for name in mesh.names if len({coordinate[name] for coordinate in coordinates}) > 1]
    return ",".join(varying) if mesh.group(ranks[0], *varying) == tuple(ranks) else None


def _run(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return operator(*args, **kwargs)


@final
class Recorder(TorchDispatchMode):
    """Records the step that runs inside ``with``; ``parts`` are this rank's stages.

    ``run`` runs operators, and may know a shorter way to their outputs.
    """

    def __init__(
        self, mesh: MeshSpec, parts: Mapping[int, nn.Module], observers: Sequence[Observer] = (), run: Run = _run
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._mesh = mesh
        self._rank = dist.get_rank()
        self._observers = tuple(observers)
        self._run = run
        self._events: list[Event] = []
        self._readers: dict[int, tuple[Operator, Reader | None]] = {}
        """By the identity of the operator: its hash is computed in Python."""
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._modules = _Modules(parts)
        self._exchanges = Exchanges(self._take)
        self.taken: list[Taken] = []
        """What stages have taken so far."""
        self._last_backward: int | None = None
        """How many events there were when an operator last ran in backward."""

    def __enter__(self) -> Recorder:
        self._modules.attach()
        self._exchanges.attach()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.detach()
        self._exchanges.detach()

    @property
    def events(self) -> Sequence[Event]:
        """So far; whether the last ones are the optimizer's is known when the step is over."""
        return self._events

    def place(self) -> tuple[Phase, str]:
        """Phase and module of the operator that just runs; until the step is over, forward is the optimizer's too."""
        node = current_node()
        if node is not None:
            return "backward", self._modules.serving(node)
        return "forward" if self._modules.entered else "start", self._modules.serving(None)

    def ledger(self) -> Ledger:
        """What was recorded; what followed the last backward is the optimizer's."""
        after = len(self._events) if self._last_backward is None else self._last_backward
        events = tuple(
            _in_phase(event, "optimizer") if event.number >= after and event.collective.phase == "forward" else event
            for event in self._events
        )
        return Ledger(self._rank, self._mesh, events, tuple(self.taken))

    def _take(self, number: int) -> None:
        self.taken.append(Taken(number, len(self._events)))

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types and any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again with its local tensors
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        node = current_node()
        if node is not None:
            self._last_backward = len(self._events)
        known = self._readers.get(id(func))
        if known is None:
            known = self._readers[id(func)] = (func, reader(func))
        read = known[1]
        call = None
        if read is not None:
            call = read(func, args, kwargs, out)
            self._record(call, node)
        for observer in self._observers:
            observer.saw(func, args, kwargs, out, call)
        return out

    def _record(self, call: Call, node: Node | None) -> None:
        called = caller()
        submesh, ranks = self._group(call.group)
        phase = self._phase(call, called, in_backward=node is not None)
        collective = Collective(
            submesh, call.operation, phase, dtype_name(call.tensors), sum(map(tensor_bytes, call.tensors))
        )
        number = len(self._events)
        if phase == "backward":
            self._last_backward = number + 1
        if call.operation == "recv" and called.in_pipeline and not called.greets:
            self._exchanges.received(call.tensors[0], number)
        self._events.append(
            Event(
                number=number,
                collective=collective,
                ranks=ranks,
                peer=call.peer,
                reduction=call.reduction,
                elements=sum(tensor.numel() for tensor in call.tensors),
                module=self._modules.of(called) or self._modules.serving(node),
                site=called.site,
                once=called.greets,
            )
        )

    def _phase(self, call: Call, called: Caller, *, in_backward: bool) -> Phase:
        if called.greets:
            return "start"
        if called.in_pipeline:
            exchanged = self._exchanges.phase(call.tensors[0])
            assert exchanged is not None, f"a {call.operation} of a pipeline which none of its stages has made"
            return exchanged
        if in_backward or called.reduces_gradients:
            return "backward"
        return "forward" if self._modules.entered or called.sharded is not None else "start"

    def _group(self, group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
        if group.group_name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            name = submesh_name(self._mesh, ranks) or "ranks " + ",".join(map(str, ranks))
            self._groups[group.group_name] = (name, ranks)
        return self._groups[group.group_name]


def _in_phase(event: Event, phase: Phase) -> Event:
    return replace(event, collective=replace(event.collective, phase=phase))


class _Modules:
    """Which module an operator serves: in forward the one that runs, in backward the one that ran."""

    def __init__(self, parts: Mapping[int, nn.Module]):
        self._paths = {module: path for part in parts.values() for path, module in part.named_modules()}
        self._handles: list[RemovableHandle] = []
        self._running: list[str] = []
        self._starts: list[int] = [0]
        self._serving: list[str] = [""]
        """From each autograd sequence number of ``_starts`` on, nodes are made by this module."""
        self.entered = False

    def attach(self) -> None:
        for module in self._paths:
            # First to come and last to go, so that what other hooks do is done for this module.
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def of(self, called: Caller) -> str:
        return "" if called.sharded is None else self._paths.get(called.sharded, "")

    def serving(self, node: Node | None) -> str:
        if self._running:
            return self._running[-1]
        number = UNKNOWN_NODE if node is None else node._sequence_nr()
        return self._serving[bisect_right(self._starts, number) - 1] if number < UNKNOWN_NODE else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.entered = True
        self._running.append(self._paths[module])
        self._note()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        if current_node() is None:  # what is recomputed makes no nodes that are gone back through
            self._starts.append(torch.autograd._get_sequence_nr())
            self._serving.append(self._running[-1] if self._running else "")
