"""A function that keeps nothing for backward but its inputs, and runs again when backward first asks.

What torch's non-reentrant checkpoint does, with one difference: what has been made again stays until the graph
lets it go. Torch makes everything again for each call of autograd, and pipeline schedules that split backward in
two call it once for the inputs and once for every parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What is entered around the first run, and around the second."""


@final
class _Place:
    """Stands in the graph for a tensor that backward needs; empty until the second run."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _AllThere(Exception):
    """Ends the second run at the last tensor that backward needs."""


@final
class _Run:
    """One call: its inputs, and the places of what it saved, in their order."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], again: AbstractContextManager[Any]):
        self._function, self._again = function, again
        self._inputs = tuple(_apart(one) for one in inputs)
        self._places: list[weakref.ref[_Place]] = []
        """Dead where the graph has let one go."""
        self._filled = 0

    def save(self, tensor: Tensor) -> _Place:
        place = _Place()
        self._places.append(weakref.ref(place))
        return place

    def give(self, place: _Place) -> Tensor:
        if place.tensor is None:
            self._run_again()
        assert place.tensor is not None, "the second run saved fewer tensors than the first: it took another way"
        return place.tensor

    def _run_again(self) -> None:
        assert self._filled == 0, "backward asks for what it has let go"
        try:
            with torch.enable_grad(), self._again, saved_tensors_hooks(self._fill, _refuse):
                self._function(*self._inputs)
        except _AllThere:
            pass

    def _fill(self, tensor: Tensor) -> None:
        place = self._places[self._filled]()
        if place is not None:
            place.tensor = tensor.detach()
        self._filled += 1
        if self._filled == len(self._places):
            raise _AllThere


def recomputed(function: Callable[..., Any], *inputs: Any, contexts: Contexts) -> Any:
    """``function`` of ``inputs``, of which backward keeps ``inputs`` alone. It must do the same both times."""
    first, again = contexts
    run = _Run(function, inputs, again)
    with first, saved_tensors_hooks(run.save, run.give):
        return function(*inputs)


def _apart(one: Any) -> Any:
    """The same tensor without the graph it comes from, which must not go forward from here twice."""
    return one.detach().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one


def _refuse(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through the second run")
