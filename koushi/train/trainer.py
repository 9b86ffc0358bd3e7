"""One rank of a training run, from joining the world to the last step."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from koushi.data.batches import open_samples, train_batch, validation_batches
from koushi.data.prefetch import Prefetch
from koushi.errors import TrainingError
from koushi.hardware.peaks import peak_flops
from koushi.job import Job
from koushi.models.llama.flops import training_flops_per_token
from koushi.optim.adamw import AdamW
from koushi.parallel import arrivals
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh, device_name, init_process_group, local_device, resolve_device
from koushi.parallel.ledger import Recorder
from koushi.train.audit import outcome
from koushi.train.checkpoints import Checkpoints, Start
from koushi.train.metrics import (
    JsonLines,
    Pace,
    Progress,
    Sink,
    StepMetrics,
    TensorBoard,
    forget_after,
    memory_word,
    peak_memory,
)
from koushi.train.outcome import Outcome
from koushi.train.resume import RunPlace
from koushi.train.step import StepResult, TrainStep


def train_rank(job: Job, *, place: RunPlace) -> None:
    """Worker: train ``job`` as this process's rank; the folder of ``place`` is rank 0's."""
    device = local_device(resolve_device(job.config.run.device))
    init_process_group(device, job.config.run.timeout)
    Trainer(job, device, place).run()
    dist.destroy_process_group()  # not after an error: leaving would look like the first failure to the others


@final
class Trainer:
    def __init__(self, job: Job, device: torch.device, place: RunPlace):
        self.job = job
        self.device = device
        self.rank = dist.get_rank()
        self.optimizer = AdamW(job.config.optimizer)
        self.samples = open_samples(job)
        before = peak_memory(device)
        mesh = build_mesh(job.mesh, device.type, job.config.run.timeout)
        self._agree_on_data()
        self.model = build(job, mesh, device)
        self.train_step = TrainStep(job, self.model, self.optimizer)
        self.data_index = job.mesh.index(self.rank, "dp_replicate", "dp_shard")
        self.checkpoints: Checkpoints | None = None
        self.start = Start()
        self.pace = Pace()
        self.sinks: list[Sink] = []
        self._peak: float | None = None
        with ExitStack() as opened:
            if job.config.checkpoint.every or place.found:
                self.checkpoints = Checkpoints(job, place, self.model, self.optimizer, self.samples.digest)
                opened.callback(self.checkpoints.close)
                place = self.checkpoints.place
                self.start = self.checkpoints.resume()
            if self.rank == 0:
                self.pace = Pace(self.start.step, forget_after(place.folder / "metrics.jsonl", self.start.step))
                for sink in self._sinks(place.folder):
                    opened.callback(sink.close)
                    self.sinks.append(sink)
                self._peak = peak_flops(device_name(device))
            self._outcome = Outcome(job, device, place.folder, before, self.start.step)
            self._opened = opened.pop_all()

    def run(self) -> None:
        """Train to ``training.steps``.

        Raises TrainingError on a loss or gradient norm that isn't finite, CheckpointError on a failed save, Stopped
        after SIGTERM.
        """
        config = self.job.config
        with self._opened, Prefetch(self._batch, self.start.step) as batches:
            for step in range(self.start.step, config.training.steps):
                arrivals.at_step(step + 1)
                if self.checkpoints is not None:
                    self.checkpoints.begin_step(step + 1)
                tokens, labels = batches.get(step)
                result = self._train(step, tokens.to(self.device), labels.to(self.device))
                self._check_finite(step + 1, result)
                if (step + 1) % config.metrics.every == 0 or step + 1 == config.training.steps:
                    self._report(step + 1, result)
                self._outcome.after_step(step + 1)
                if self.checkpoints is not None:  # first: what comes after may fail
                    self.checkpoints.after_step(step + 1, self._samples_before(step + 1))
                if config.validation.every and (step + 1) % config.validation.every == 0:
                    self._validate(step + 1)

    def _train(self, step: int, tokens: torch.Tensor, labels: torch.Tensor) -> StepResult:
        if not self.job.config.debug.audit or step > self.start.step:
            return self.train_step.run(tokens, labels)
        with Recorder(self.job.mesh, self.model.parts) as recorder:
            result = self.train_step.run(tokens, labels)
        ledger = recorder.ledger()
        self._outcome.executed(ledger.traffic())
        said = outcome(self.job, ledger, self.device)
        for sink in self.sinks:
            sink.audited(step + 1, said)
        return result

    def _agree_on_data(self) -> None:
        """Raise TrainingError where machines hold different data: Pythons or files of different versions, say."""
        number = int.from_bytes(hashlib.blake2b(self.samples.digest.encode(), digest_size=7).digest(), "little")
        extremes = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != -int(extremes[1]):
            raise TrainingError(
                f"the ranks do not read the same data; here it is {self.samples.digest}: use the same "
                "data.path, tokenizer and (for embedded data) Python version on every machine"
            )

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return train_batch(self.samples, self._samples_before(step), self.job.local_batch_size, self.data_index)

    def _samples_before(self, step: int) -> int:
        """Samples consumed when ``step`` steps are done."""
        return self.start.samples + (step - self.start.step) * self.job.config.training.global_batch_size

    def _sinks(self, folder: Path) -> Iterator[Sink]:
        config = self.job.config
        yield Progress(config.training.steps, memory_word(self.device), sys.stdout)
        yield JsonLines(folder / "metrics.jsonl")
        if config.metrics.tensorboard:
            yield TensorBoard(folder / "tensorboard")

    def _report(self, step: int, result: StepResult) -> None:
        training, world = self.job.config.training, self.job.mesh.world_size
        seconds, elapsed = self.pace.since_last(step)
        rate = training.global_batch_size * training.seq_len / seconds
        mfu = None
        if self._peak is not None:
            mfu = rate / world * training_flops_per_token(self.job.size, training.seq_len) / self._peak
        metrics = StepMetrics(
            step=step,
            loss=result.loss.item(),
            grad_norm=result.grad_norm.item(),
            lr=result.lr,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / world,
            mfu=mfu,
            memory_bytes=peak_memory(self.device),
            step_seconds=seconds,
            samples=self._samples_before(step),
            valid_tokens=int(result.tokens.item()),
            elapsed_seconds=elapsed,
            left_seconds=self.pace.left(training.steps - step),
        )
        for sink in self.sinks:
            sink.step(metrics)
        self._outcome.reported(seconds)

    def _validate(self, step: int) -> None:
        config = self.job.config
        batches = validation_batches(
            self.samples,
            config.training.global_batch_size,
            self.job.local_batch_size,
            self.data_index,
            config.validation.batches,
        )
        total, tokens = 0.0, 0
        for batch, labels in batches:
            loss = self.train_step.evaluate(batch.to(self.device), labels.to(self.device))
            count = int(self.model.loss.total.item())
            total, tokens = total + loss.item() * count, tokens + count
        if tokens == 0:
            raise TrainingError(
                "the held-out samples have no label that counts in the loss; set validation.every to 0, or another "
                "data.validation_fraction"
            )
        for sink in self.sinks:
            sink.validation(step, total / tokens)
        self.pace.skip()

    def _check_finite(self, step: int, result: StepResult) -> None:
        """Every rank raises the same error, naming the rank whose own loss went first."""
        scalars = {"loss": result.loss, "gradient norm": result.grad_norm}
        what = next((name for name, value in scalars.items() if not bool(value.isfinite())), None)
        if what is None:
            return
        culprit = torch.tensor(
            self.job.mesh.world_size if bool(result.local_loss.isfinite()) else self.rank, device=self.device
        )
        dist.all_reduce(culprit, op=dist.ReduceOp.MIN)
        where = ""
        if int(culprit) < self.job.mesh.world_size:
            where = f", from rank {int(culprit)} ({self.job.mesh.describe(int(culprit))})"
        raise TrainingError(
            f"the {what} of step {step} is {scalars[what].item()}{where}; a lower optimizer.lr, a longer "
            "lr_schedule.warmup_steps or a lower training.max_grad_norm often help; if it happens at once, look at "
            "the data"
        )
