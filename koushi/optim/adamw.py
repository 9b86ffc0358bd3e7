"""AdamW on local shards, with its state kept by parameter name (arXiv 1711.05101).

Works on plain tensors, whatever layout the parameters have: an elementwise update needs no other
rank. torch's fused kernel does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from koushi.config.schema import Optimizer


@dataclass(frozen=True)
class Moments:
    """Running means of the gradient and of its square, shaped like the local shard."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """State of every parameter that has been stepped; ``steps`` counts updates."""

    def __init__(self, options: Optimizer):
        self._options = options
        self.steps = 0
        self.moments: dict[str, Moments] = {}

    @torch.no_grad()
    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], decayed: set[str], lr: float
    ) -> None:
        """Update local shards in place; weight decay applies to the names in ``decayed``."""
        for group_decays in (True, False):
            names = [name for name in gradients if (name in decayed) is group_decays and parameters[name].numel()]
            self._update(
                [parameters[name] for name in names],
                [gradients[name] for name in names],
                [self._moments(name, parameters[name]) for name in names],
                lr,
                self._options.weight_decay if group_decays else 0.0,
            )
        self.steps += 1

    def _moments(self, name: str, parameter: Tensor) -> Moments:
        if name not in self.moments:
            self.moments[name] = Moments(torch.zeros_like(parameter), torch.zeros_like(parameter))
        return self.moments[name]

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], moments: list[Moments], lr: float, decay: float
    ) -> None:
        if not parameters:
            return
        # The kernel counts the step itself, in a tensor per parameter.
        counts = [torch.tensor(float(self.steps), device=parameter.device) for parameter in parameters]
        adamw(
            parameters,
            gradients,
            [moment.exp_avg for moment in moments],
            [moment.exp_avg_sq for moment in moments],
            [],
            counts,
            fused=True,
            amsgrad=False,
            beta1=self._options.beta1,
            beta2=self._options.beta2,
            lr=lr,
            weight_decay=decay,
            eps=self._options.eps,
            maximize=False,
        )
