"""One step in one process: masked batches, accumulation, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import alone, tiny_job
from torch import Tensor

from koushi.data.samples import IGNORE_INDEX
from koushi.job import Job
from koushi.models.llama.model import Llama
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import ParallelModel, build
from koushi.parallel.device_mesh import build_mesh
from koushi.train.step import StepResult, TrainStep

CPU = torch.device("cpu")
DOUBLE = ("precision.parameters=float64", "precision.compute=float64", "precision.reduce=float64")


@dataclass(frozen=True)
class Made:
    model: ParallelModel
    optimizer: AdamW
    step: TrainStep

    @property
    def plain(self) -> Llama:
        return self.model.parts[0]

    def values(self) -> dict[str, Tensor]:
        return {one.name: one.value.clone() for one in self.model.parameters}


def make(job: Job) -> Made:
    model = build(job, build_mesh(job.mesh, "cpu"), CPU)
    optimizer = AdamW(job.config.optimizer)
    return Made(model, optimizer, TrainStep(job, model, optimizer))


def batch(masked: bool = True) -> tuple[Tensor, Tensor]:
    """Four samples with unequally many labels, one of them with none."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    labels = torch.randint(0, 32, (4, 8), generator=generator)
    if masked:
        labels[0, 2:] = labels[1] = labels[3, :3] = IGNORE_INDEX
    return tokens, labels


def mean_loss(model: Llama, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def test_a_batch_without_labels_has_a_loss_of_0_and_moves_only_by_decay(tmp_path: Path) -> None:
    def worker() -> None:
        made = make(tiny_job(tmp_path))
        before = made.values()
        tokens, labels = batch()
        result = made.step.run(tokens, torch.full_like(labels, IGNORE_INDEX))
        assert (result.loss.item(), result.grad_norm.item(), result.local_loss.item()) == (0.0, 0.0, 0.0)
        assert result.tokens.item() == 0, "nothing is divided by 0"
        for one in made.model.parameters:
            kept = 1 - result.lr * 0.1 if one.description.decayed else 1.0
            torch.testing.assert_close(one.value, before[one.name] * kept)
        assert made.step.evaluate(tokens, torch.full_like(labels, IGNORE_INDEX)).item() == 0.0

    alone(worker, tmp_path)


def test_accumulated_gradients_are_those_of_one_large_batch(tmp_path: Path) -> None:
    def worker() -> None:
        results: list[StepResult] = []
        gradients: list[dict[str, Tensor]] = []
        for size in (1, 2, 4):
            made = make(tiny_job(tmp_path, *DOUBLE, f"training.microbatch_size={size}"))
            results.append(made.step.run(*batch()))
            made.step.compute(*batch())
            gradients.append({one.name: one.gradient for one in made.model.parameters})
        for result, found in zip(results[:2], gradients[:2], strict=True):
            assert result.loss.item() == pytest.approx(results[2].loss.item(), rel=1e-13)
            assert result.grad_norm.item() == pytest.approx(results[2].grad_norm.item(), rel=1e-12)
            assert result.tokens.item() == results[2].tokens.item() == 2 + 0 + 8 + 5
            for name, gradient in gradients[2].items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-14)

    alone(worker, tmp_path)


def test_loss_gradients_and_norm_are_those_of_plain_torch(tmp_path: Path) -> None:
    def worker() -> None:
        made = make(tiny_job(tmp_path, *DOUBLE))
        plain = Llama(made.plain.size, 8).double()
        plain.set_compute_dtype(torch.float64)
        plain.load_state_dict(made.values())
        loss, norm = made.step.compute(*batch())
        expected = mean_loss(plain, *batch())
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        references = dict(plain.named_parameters())
        for one in made.model.parameters:
            torch.testing.assert_close(one.gradient, references[one.name].grad)
        total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        assert norm.item() == pytest.approx(total.item(), rel=1e-13)

    alone(worker, tmp_path)


def test_evaluation_is_the_mean_loss_and_leaves_everything_alone(tmp_path: Path) -> None:
    def worker() -> None:
        made = make(tiny_job(tmp_path, *DOUBLE))
        with torch.no_grad():
            expected = mean_loss(made.plain, *batch())
        before = made.values()
        loss = made.step.evaluate(*batch())
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        assert not loss.requires_grad
        assert all(one.tensor.grad is None for one in made.model.parameters)
        assert all(torch.equal(one.value, before[one.name]) for one in made.model.parameters)
        assert made.optimizer.steps == 0
        made.step.compute(*batch())
        gradients = {one.name: one.gradient.clone() for one in made.model.parameters}
        made.step.evaluate(*batch(masked=False))
        assert all(torch.equal(one.gradient, gradients[one.name]) for one in made.model.parameters)

    alone(worker, tmp_path)


def test_a_step_trains_and_drops_its_gradients(tmp_path: Path) -> None:
    def worker() -> None:
        made = make(tiny_job(tmp_path, "training.steps=10", "lr_schedule.warmup_steps=2", "lr_schedule.decay=none"))
        losses, rates = [], []
        for step in range(10):
            result = made.step.run(*batch())
            losses.append(result.loss.item())
            rates.append(result.lr)
            assert made.optimizer.steps == step + 1
            assert all(one.tensor.grad is None for one in made.model.parameters)
        assert rates == [0.005] + [0.01] * 9
        assert losses[-1] < losses[0] - 0.5, losses

    alone(worker, tmp_path)


def test_clipping_is_of_the_whole_gradient_or_never(tmp_path: Path) -> None:
    """AdamW's first mean shows what gradient it was given."""

    def first_means(limit: str) -> tuple[dict[str, Tensor], float]:
        made = make(tiny_job(tmp_path, *DOUBLE, f"training.max_grad_norm={limit}"))
        norm = made.step.run(*batch()).grad_norm.item()
        return {name: moments.exp_avg for name, moments in made.optimizer.moments.items()}, norm

    def worker() -> None:
        never, norm = first_means("null")
        large, _ = first_means("1000")
        small, same_norm = first_means("0.01")
        assert norm > 0.01
        assert same_norm == norm, "the norm is told as it was before clipping"
        for name, mean in never.items():
            assert torch.equal(large[name], mean)
            torch.testing.assert_close(small[name], mean * (0.01 / (norm + 1e-6)))

    alone(worker, tmp_path)
