"""What was predicted of a run against what it measures: ``predicted.json``, ``ranks.jsonl``, a few lines at the end."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, final

import torch
import torch.distributed as dist

from koushi.hardware.hardware import Hardware, load
from koushi.hardware.peaks import of_device
from koushi.job import Job
from koushi.parallel import arrivals
from koushi.parallel.device_mesh import device_name
from koushi.plan.plan import plan
from koushi.plan.workload import of_job
from koushi.traffic import Traffic
from koushi.train.audit import planned
from koushi.train.metrics import peak_memory, unwritable
from koushi.units import bytes_text, seconds_text

EVERY = 50
"""Steps between two rows of every rank's figures; the last step has one too."""


def assumed_hardware(job: Job, part: str) -> Hardware | None:
    """What the run file names; else what the device is, ``cpu`` where the name of its ``part`` is empty."""
    if job.config.run.hardware is not None:
        return load(job.config.run.hardware)
    return of_device(part) if part else load("cpu")


def predicted(job: Job, hardware: Hardware, crowding: float = 1.0) -> dict[str, Any]:
    """The plan's figures that a run can be held against; bytes are what rank 0 sends in a step.

    ``crowding``: how many ranks share what the plan takes for one device.
    """
    found = plan(of_job(job), hardware)
    return {
        "hardware": hardware.name,
        "device": hardware.device,
        "step_seconds": found.time.seconds * crowding,
        "memory_bytes": found.memory.reserved,
        "active_bytes": found.memory.active,
        "device_bytes": found.memory.device,
        "bytes": sent_bytes(job, planned(job, 0)),
    }


def layout_text(job: Job) -> str:
    """What a run may go on with another of."""
    schedule = job.config.parallelism.pipeline_parallel_schedule
    return f"{job.mesh} {schedule}" if job.mesh.degree("pp") > 1 else str(job.mesh)


def sent_bytes(job: Job, sent: Traffic) -> dict[str, float]:
    """What one rank puts on the wire in a step, by sub-mesh."""
    found: dict[str, float] = defaultdict(float)
    for one, calls in sent.items():
        found[one.submesh] += calls * one.wire_bytes(job.mesh.degree(*one.submesh.split(",")))
    return dict(found)


def crowding(device: torch.device) -> float:
    """Ranks of this machine for each of its cores, where a core is a device; at least 1."""
    if device.type == "cuda":
        return 1.0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return max(1.0, here / (os.cpu_count() or 1))


def write_line(path: Path, row: dict[str, Any], mode: Literal["a", "w"]) -> None:
    """Raises TrainingError where ``path`` cannot be written."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise unwritable(path, error) from None


@dataclass(frozen=True)
class MemoryUse:
    """Peaks of one rank, in bytes; on a CPU only ``resident`` is known."""

    resident: float = 0.0
    """On a CPU, what the process holds at most, Python and gloo too."""
    grown: float = 0.0
    """On a CPU, how much of it came since just before the model was built."""
    active: float = 0.0
    reserved: float = 0.0
    device: float = 0.0
    """On a GPU, all that is taken of it, whoever took it; not the peak, but torch seldom gives memory back."""

    @classmethod
    def of(cls, device: torch.device, before: int) -> MemoryUse:
        """This process's; ``before``: resident before the model was built."""
        peak = peak_memory(device)
        if device.type != "cuda":
            return cls(resident=peak, grown=peak - before)
        free, total = torch.cuda.mem_get_info(device)
        return cls(active=torch.cuda.max_memory_allocated(device), reserved=peak, device=total - free)

    @classmethod
    def most(cls, ranks: Sequence[MemoryUse]) -> MemoryUse:
        """The largest of each."""
        return cls(*(max(one) for one in zip(*map(astuple, ranks), strict=True)))


def compared(predicted: dict[str, Any], step_seconds: float, found: MemoryUse) -> str:
    """For people: a step and the fullest rank's memory in the words of ``koushi plan``."""
    step = (seconds_text(predicted["step_seconds"]), seconds_text(step_seconds), "the median, without the first")
    memory: list[tuple[str, float | None, float | None, str]] = [
        ("active", predicted["active_bytes"], found.active, "tensors in use"),
        ("reserved", predicted["memory_bytes"], found.reserved, "with what torch's allocator cannot hand out"),
        ("device", predicted["device_bytes"], found.device, "with the driver and communicators: what nvidia-smi shows"),
    ]
    if found.resident:  # two things, of which neither is told of the other
        memory = [
            ("tensors", predicted["device_bytes"], None, "which nothing counts on a CPU"),
            ("grown", None, found.grown, "all that the process took after its start: Python's and gloo's too"),
            ("resident", None, found.resident, "the whole process, as the lines of the steps say"),
        ]
    sizes = [(name, *("" if one is None else bytes_text(one) for one in pair), what) for name, *pair, what in memory]
    rows = [("step", *step), *sizes]
    head = f"{'':<11} {'predicted':>11} {'measured':>11}  for {predicted['hardware']}, memory of the fullest rank"
    return "\n".join([head, *(f"  {name:<9} {was:>11} {one:>11}  {what}" for name, was, one, what in rows)])


@final
class Outcome:
    """Gathers every rank's figures now and then; rank 0 keeps them beside what was predicted."""

    def __init__(self, job: Job, device: torch.device, folder: Path, before: int, step: int):
        """``before``: the process's memory before the model was built, which on a CPU is Python's and torch's own.
        ``step``: how many steps were done before."""
        self._job = job
        self._device = device
        self._folder = folder
        self._before = before
        self._waited, self._step = arrivals.waited_seconds(), step
        self._seconds: list[float] = []
        self._sent: dict[str, float] = {}
        self._predicted: dict[str, Any] | None = None
        if dist.get_rank() == 0:
            write_line(folder / "ranks.jsonl", {"step": step, "layout": layout_text(job)}, "a")
        if dist.get_rank() == 0 and (hardware := assumed_hardware(job, device_name(device))) is not None:
            self._predicted = predicted(job, hardware, crowding(device))
            write_line(folder / "predicted.json", self._predicted, "w")

    def executed(self, sent: Traffic) -> None:
        """What this rank sent in a step that was audited."""
        self._sent = sent_bytes(self._job, sent)

    def reported(self, step_seconds: float) -> None:
        self._seconds.append(step_seconds)

    def after_step(self, step: int) -> None:
        """Called by every rank after each step, from 1."""
        last = step == self._job.config.training.steps
        if step % EVERY and not last:
            return
        waited = arrivals.waited_seconds()
        memory = MemoryUse.of(self._device, self._before)
        mine = ((waited - self._waited) / max(1, step - self._step), *map(float, astuple(memory)))
        self._waited, self._step = waited, step
        row = torch.tensor(mine, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(every, row)
        if dist.get_rank() == 0:
            figures: list[list[float]] = torch.stack(every).tolist()
            memory_of = [MemoryUse(*one[1:]) for one in figures]
            self._write(step, [one[0] for one in figures], memory_of)
            if last and self._predicted is not None:
                seconds = median(self._seconds[1:] or self._seconds) if self._seconds else float("nan")
                print(compared(self._predicted, seconds, MemoryUse.most(memory_of)), flush=True)

    def _write(self, step: int, waited: list[float], memory: list[MemoryUse]) -> None:
        mesh = self._job.mesh
        row = {
            "step": step,
            "waited_seconds": waited,
            "memory_bytes": [one.reserved or one.grown for one in memory],
            "coordinates": [mesh.describe(rank) for rank in range(mesh.world_size)],
            "bytes": self._sent,
        }
        write_line(self._folder / "ranks.jsonl", row, "a")
