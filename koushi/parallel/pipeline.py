"""Pipeline parallel on torch's stages and schedules, on ``mesh["pp"]``.

Every stage is told its shapes beforehand: torch would otherwise run the model once to find them, and
a wrong size between two stages ends a process without a Python error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from koushi.parallel.forward_only import forward_only

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pipeline:
    """What the pipeline needs to know.

    Shape letters: B samples of a microbatch, T tokens of a sample, U tokens that a stage's activations
    hold (T / tp under sequence parallel), D dim, W vocabulary share of the logits.
    """

    schedule: str
    n_stages: int
    microbatches: int
    tokens: tuple[int, int]
    """[B, T]"""
    activations: tuple[int, int, int]
    """[B, U, D]"""
    logits: tuple[int, int, int]
    """[B, T, W]"""
    compute: torch.dtype
    device: torch.device


def apply(parts: Mapping[int, nn.Module], submesh: DeviceMesh, options: Pipeline, loss: Loss) -> Schedule:
    """A schedule over ``parts``, this rank's stages by index. ``loss`` takes logits and labels of a microbatch."""
    stages = [_stage(module, index, submesh, options) for index, module in sorted(parts.items())]
    schedule_class = get_schedule_class(options.schedule)
    arguments: dict[str, Any] = {"n_microbatches": options.microbatches, "loss_fn": loss, "scale_grads": False}
    if issubclass(schedule_class, PipelineScheduleSingle):
        return Schedule(schedule_class(stages[0], **arguments), stages)
    return Schedule(schedule_class(stages, **arguments), stages)


def _stage(module: nn.Module, index: int, submesh: DeviceMesh, options: Pipeline) -> PipelineStage:
    def example(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    first, last = index == 0, index == options.n_stages - 1
    return PipelineStage(
        module,
        index,
        options.n_stages,
        options.device,
        input_args=example(options.tokens, torch.int64) if first else example(options.activations, options.compute),
        output_args=example(options.logits if last else options.activations, options.compute),
        group=submesh.get_group(),
    )


class Schedule:
    """One rank's part of a pipelined step."""

    def __init__(self, schedule: PipelineScheduleSingle | PipelineScheduleMulti, stages: list[PipelineStage]):
        self._schedule = schedule
        self._holds_first = any(stage.is_first for stage in stages)
        self._holds_last = any(stage.is_last for stage in stages)

    def step(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Forward and backward of all microbatches of [local batch, T]; the losses where the last stage is, else []."""
        return self._run(self._schedule.step, tokens, labels)

    def evaluate(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Forward only."""
        with forward_only(self._schedule):
            return self._run(self._schedule.eval, tokens, labels)

    def _run(self, run: Callable[..., Any], tokens: Tensor, labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        run(
            *((tokens,) if self._holds_first else ()),
            target=labels if self._holds_last else None,
            losses=losses if self._holds_last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]
