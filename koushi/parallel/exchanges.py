"""Telling a pipeline's activations from its gradients on their way between stages.

A send says nothing of what it carries; the stage that makes it does.
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
_Maker = Callable[[PipelineStage, int], list[dist.P2POp]]


def _identity(tensor: Tensor) -> int:
    """Of the tensor itself: now and then torch hands a dispatch mode another Python object for it."""
    return int(tensor._cdata)


@final
class Exchanges:
    """While attached, knows of every message that a stage has made whether it is of forward or of backward."""

    def __init__(self) -> None:
        self._phases: dict[int, tuple[Tensor, Phase]] = {}
        self._own: dict[str, Any] = {}
        """What the class itself had under a name, if not its base's."""

    def attach(self) -> None:
        for name, phase in _MAKERS:
            self._own[name] = vars(PipelineStage).get(name)
            setattr(PipelineStage, name, self._noting(getattr(PipelineStage, name), phase))

    def detach(self) -> None:
        for name, own in self._own.items():
            if own is None:
                delattr(PipelineStage, name)
            else:
                setattr(PipelineStage, name, own)
        self._own.clear()
        self._phases.clear()

    def phase(self, tensor: Tensor) -> Phase | None:
        """Of a message that is now under way; None if no stage has made it."""
        _, phase = self._phases.pop(_identity(tensor), (None, None))
        return phase

    def _noting(self, original: _Maker, phase: Phase) -> _Maker:
        @wraps(original)
        def make(stage: PipelineStage, microbatch: int) -> list[dist.P2POp]:
            made = original(stage, microbatch)
            self._phases.update({_identity(one.tensor): (one.tensor, phase) for one in made})
            return made

        return make
