"""What a run tells: a progress line, ``metrics.jsonl``, and TensorBoard where asked for. On one rank only."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, final

import torch

from koushi.errors import TrainingError
from koushi.units import bytes_text, seconds_text


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. Rates are over the steps since the line before."""

    step: int
    """From 1."""
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    """Of the whole world."""
    tokens_per_second_per_device: float
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1, in PaLM's convention; None where the device's peak isn't known."""
    memory_bytes: int
    """Peak of this rank: reserved by torch on a GPU, resident on a CPU."""
    step_seconds: float
    samples: int
    """Consumed so far."""
    valid_tokens: int
    """Of this step's global batch."""
    elapsed_seconds: float
    """Since training began."""
    left_seconds: float
    """Expected until the last step, at the pace since the first report."""

    def line(self, steps: int, memory: str) -> str:
        """``memory``: what memory_bytes are."""
        width = len(str(steps))
        mfu = f"  mfu {self.mfu:.1%}" if self.mfu is not None else ""
        left = seconds_text(self.left_seconds)
        return (
            f"step {self.step:>{width}}/{steps}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2e}  {self.tokens_per_second:,.0f} tokens/s{mfu}  "
            f"{memory} {bytes_text(self.memory_bytes)}  left {left}"
        )


def memory_word(device: torch.device) -> str:
    """What peak_memory gives, as ``koushi plan`` calls it where it plans it."""
    return "reserved" if device.type == "cuda" else "resident"


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: reserved by torch's allocator on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Sink(ABC):
    """Takes a run's figures."""

    @abstractmethod
    def step(self, metrics: StepMetrics) -> None: ...

    @abstractmethod
    def validation(self, step: int, loss: float) -> None: ...

    def audited(self, step: int, outcome: str) -> None:  # noqa: B027 - nothing to draw
        """What ``debug.audit`` has to say of a step."""

    def close(self) -> None:  # noqa: B027 - most sinks hold nothing open
        """Flush and let go of files."""


@final
class Progress(Sink):
    """Lines for people."""

    def __init__(self, steps: int, memory: str, out: TextIO):
        self._steps = steps
        self._memory = memory
        self._out = out

    def step(self, metrics: StepMetrics) -> None:
        print(metrics.line(self._steps, self._memory), file=self._out, flush=True)

    def validation(self, step: int, loss: float) -> None:
        print(f"step {step}  validation loss {loss:.4f}", file=self._out, flush=True)

    def audited(self, step: int, outcome: str) -> None:
        print(outcome, file=self._out, flush=True)


@final
class JsonLines(Sink):
    """One JSON object a line, each flushed, so that a killed run keeps what it had."""

    def __init__(self, path: Path):
        """Raises TrainingError, as do ``step`` and ``validation``, where ``path`` cannot be written."""
        self._path = path
        try:
            # Without a buffer: what could not be written would fail a second time when the file is closed.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from None

    def step(self, metrics: StepMetrics) -> None:
        self._write(asdict(metrics))

    def validation(self, step: int, loss: float) -> None:
        self._write({"step": step, "validation_loss": loss})

    def audited(self, step: int, outcome: str) -> None:
        self._write({"step": step, "audit": outcome})

    def close(self) -> None:
        self._file.close()

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise unwritable(self._path, error) from None


def unwritable(path: Path, error: OSError) -> TrainingError:
    """What to say of a file of the run's folder."""
    return TrainingError(
        f"cannot write {path}: {error.strerror or error}; make room there, and the run goes on from its last "
        "checkpoint, if it has one"
    )


def forget_after(path: Path, step: int) -> float:
    """Drop from a ``metrics.jsonl`` the rows after ``step``, and what a killed process left of a line.

    Returns ``elapsed_seconds`` of the last row that has one, else 0. The file is whole at any moment. Raises
    TrainingError where it cannot be read or written.
    """
    if not path.exists():
        return 0.0
    kept, elapsed = [], 0.0
    try:
        before = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror or error}") from None
    for line in before.splitlines():
        try:
            row = json.loads(line)
            if row["step"] > step:
                continue
            elapsed = row.get("elapsed_seconds", elapsed)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        kept.append(line + "\n")
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text("".join(kept), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise unwritable(path, error) from None
    return elapsed


@final
class TensorBoard(Sink):
    def __init__(self, folder: Path):
        try:  # an extra, and slow to import
            tensorboard = import_module("torch.utils.tensorboard")
        except ImportError:
            raise TrainingError(
                "metrics.tensorboard is on, but tensorboard is not installed: pip install 'koushi[tensorboard]'"
            ) from None
        self._writer = tensorboard.SummaryWriter(str(folder))

    def step(self, metrics: StepMetrics) -> None:
        for name, value in asdict(metrics).items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, metrics.step)

    def validation(self, step: int, loss: float) -> None:
        self._writer.add_scalar("validation/loss", loss, step)

    def close(self) -> None:
        self._writer.close()


@final
class Pace:
    """Time per step since it was last asked."""

    def __init__(self, step: int = 0, elapsed: float = 0.0) -> None:
        """``step`` steps were done before, in ``elapsed`` seconds."""
        self._last = time.perf_counter()
        self._began = self._last - elapsed
        self._step = step
        self._steady = 0.0
        self._steady_steps = 0
        self._latest: float | None = None

    def since_last(self, step: int) -> tuple[float, float]:
        """Seconds per step up to ``step``, and seconds since the beginning."""
        now = time.perf_counter()
        seconds = (now - self._last) / max(1, step - self._step)
        if self._latest is not None:  # the steps up to the first report include what is made only once
            self._steady += now - self._last
            self._steady_steps += step - self._step
        self._last, self._step, self._latest = now, step, seconds
        return seconds, now - self._began

    def left(self, steps: int) -> float:
        """Seconds that ``steps`` more will take, by all those since the first report."""
        assert self._latest is not None, "asked before the first report"
        return steps * (self._steady / self._steady_steps if self._steady_steps else self._latest)

    def skip(self) -> None:
        """Leave out what has passed since the last step (a validation)."""
        self._last = time.perf_counter()
