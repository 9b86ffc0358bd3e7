"""Telling a pipeline's activations from its gradients on their way between stages, and when a stage takes them.

A send says nothing of what it carries; the stage that makes it does. A stage takes what it has received as it begins
a microbatch, which may be long after the receive was issued.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from koushi.traffic import Phase

# Private: what asks a stage for the messages of one microbatch. They are the base class's, but are looked up where
# whatever else watches a stage would have put its own.
_MAKERS: tuple[tuple[str, Phase], ...] = (
    ("get_fwd_recv_ops", "forward"),
    ("get_fwd_send_ops", "forward"),
    ("get_bwd_recv_ops", "backward"),
    ("get_bwd_send_ops", "backward"),
)
# Private: what gives a stage the messages of one microbatch as it begins it, and where it has them.
_TAKERS: tuple[tuple[str, str], ...] = (
    ("_retrieve_recv_activations", "args_recv_info"),
    ("_retrieve_recv_grads", "grad_recv_info"),
)
_Maker = Callable[[PipelineStage, int], list[dist.P2POp]]


def _identity(tensor: Tensor) -> int:
    """Of the tensor itself: now and then torch hands a dispatch mode another Python object for it."""
    return int(tensor._cdata)


@final
class Exchanges:
    """While attached, knows of every message that a stage has made whether it is of forward or of backward, and calls
    ``taken`` with the number of every receive as its stage takes it."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._received: dict[int, int] = {}
        """Numbers of receives that are not taken yet, by their buffers."""
        self._phases: dict[int, tuple[Tensor, Phase]] = {}
        self._own: dict[str, Any] = {}
        """What the class itself had under a name, if not its base's."""

    def attach(self) -> None:
        for name, phase in _MAKERS:
            self._own[name] = vars(PipelineStage).get(name)
            setattr(PipelineStage, name, self._noting(getattr(PipelineStage, name), phase))
        for name, where in _TAKERS:
            self._own[name] = vars(PipelineStage).get(name)
            setattr(PipelineStage, name, self._telling(getattr(PipelineStage, name), where))

    def detach(self) -> None:
        for name, own in self._own.items():
            if own is None:
                delattr(PipelineStage, name)
            else:
                setattr(PipelineStage, name, own)
        self._own.clear()
        self._phases.clear()
        self._received.clear()

    def phase(self, tensor: Tensor) -> Phase | None:
        """Of a message that is now under way; None if no stage has made it."""
        _, phase = self._phases.pop(_identity(tensor), (None, None))
        return phase

    def received(self, tensor: Tensor, number: int) -> None:
        """That the message which ``tensor`` is to have is received by event ``number``."""
        self._received[_identity(tensor)] = number

    def _telling(self, original: Callable[..., Any], where: str) -> Callable[..., Any]:
        @wraps(original)
        def take(stage: PipelineStage, microbatch: int) -> Any:
            for message in getattr(stage, where)[microbatch]:
                number = None if message.buffer is None else self._received.pop(_identity(message.buffer), None)
                if number is not None:
                    self._taken(number)
            return original(stage, microbatch)

        return take

    def _noting(self, original: _Maker, phase: Phase) -> _Maker:
        @wraps(original)
        def make(stage: PipelineStage, microbatch: int) -> list[dist.P2POp]:
            made = original(stage, microbatch)
            self._phases.update({_identity(one.tensor): (one.tensor, phase) for one in made})
            return made

        return make
