"""One training step, the same on every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from koushi.job import Job
from koushi.loss import valid_tokens
from koushi.optim.adamw import AdamW
from koushi.optim.schedule import learning_rate
from koushi.parallel import gradients
from koushi.parallel.compose import ParallelModel
from koushi.parallel.data import reduce_replicas_now


@dataclass(frozen=True)
class StepResult:
    """Scalars of one step, the same on every rank."""

    loss: Tensor
    """Mean over the valid tokens of the global batch, before the update."""
    grad_norm: Tensor
    """Before clipping."""
    tokens: Tensor
    """Valid tokens of the global batch."""
    local_loss: Tensor
    """This rank's own share of the loss."""
    lr: float


class TrainStep:
    """Runs steps of a job on a parallel model; ``optimizer`` holds the only other state."""

    def __init__(self, job: Job, model: ParallelModel, optimizer: AdamW):
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._decayed = {parameter.name for parameter in model.parameters if parameter.description.decayed}

    def run(self, tokens: Tensor, labels: Tensor) -> StepResult:
        """Train on this rank's [local batch, T] of the step's samples."""
        loss, norm = self.compute(tokens, labels)
        return StepResult(loss, norm, self._model.loss.total, self._local_loss, self.update(norm))

    def compute(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of the global batch; finished, unclipped gradients stay on the parameters."""
        self.accumulate(tokens, labels)
        return self.scalars()

    def accumulate(self, tokens: Tensor, labels: Tensor) -> None:
        """Forward and backward of every microbatch, the first half of ``compute``."""
        self._model.loss.total = self._total_tokens(labels)
        self._local_loss = self.forward_backward(tokens, labels)

    def scalars(self) -> tuple[Tensor, Tensor]:
        """Finish the gradients and sum up loss and norm, the second half of ``compute``."""
        model = self._model
        gradients.finish(model.parameters, model.groups, model.tied_ends)
        loss, squared = gradients.sum_scalars(self._local_loss, gradients.squared_norm(model.parameters), model.groups)
        return loss, squared.sqrt()

    def update(self, norm: Tensor) -> float:
        """Clip, step the optimizer and drop the gradients; returns the learning rate used."""
        config, parameters = self._job.config, self._model.parameters
        if config.training.max_grad_norm is not None:
            gradients.clip(parameters, norm, config.training.max_grad_norm)
        lr = learning_rate(self._optimizer.steps, config.training.steps, config.optimizer.lr, config.lr_schedule)
        values = {parameter.name: parameter.value for parameter in parameters}
        slopes = {parameter.name: parameter.gradient for parameter in parameters}
        self._optimizer.step(values, slopes, self._decayed, lr)
        for parameter in parameters:
            parameter.tensor.grad = None
        return lr

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Leave gradients on the parameters; this rank's share of the loss (0 where the last stage is elsewhere)."""
        if self._model.schedule is not None:
            losses = self._model.schedule.step(tokens, labels)
        else:
            losses = [self._microbatch(*microbatch) for microbatch in self._microbatches(tokens, labels)]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=tokens.device)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a global batch, of which this rank has [local batch, T]; the same on every rank."""
        model = self._model
        model.loss.total = self._total_tokens(labels)
        if model.schedule is not None:
            losses = model.schedule.evaluate(tokens, labels)
        else:
            (part,) = model.parts.values()
            losses = [model.loss(part(batch), target) for batch, target, _ in self._microbatches(tokens, labels)]
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=tokens.device)
        return gradients.sum_scalars(loss, torch.zeros_like(loss), model.groups)[0]

    def _microbatches(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
        size, count = self._job.config.training.microbatch_size, self._job.microbatches
        pairs = zip(tokens.split(size), labels.split(size), strict=True)
        return [(batch, target, index == count - 1) for index, (batch, target) in enumerate(pairs)]

    def _microbatch(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        (part,) = self._model.parts.values()
        reduce_replicas_now(part, last)
        loss = self._model.loss(part(tokens), labels)
        loss.backward()
        return loss.detach()

    def _total_tokens(self, labels: Tensor) -> Tensor:
        """Valid tokens of the global batch."""
        total = valid_tokens(labels)
        for name in ("dp_replicate", "dp_shard"):
            if name in self._model.groups:
                dist.all_reduce(total, group=self._model.groups[name])
        return total
