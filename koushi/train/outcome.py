"""What was predicted of a run against what it measures: ``predicted.json``, ``ranks.jsonl`` and one line at the end."""

from __future__ import annotations

import json
import os
from collections import defaultdict
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
        "step_seconds": found.time.seconds * crowding,
        "memory_bytes": found.memory.reserved,
        "bytes": sent_bytes(job, planned(job, 0)),
    }


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


@final
class Outcome:
    """Gathers every rank's figures now and then; rank 0 keeps them beside what was predicted."""

    def __init__(self, job: Job, device: torch.device, folder: Path, before: int, step: int):
        """``before``: the process's memory before the model was built, which on a CPU is Python's and torch's own.
        ``step``: how many steps were done before."""
        self._job = job
        self._device = device
        self._folder = folder
        self._before = 0 if device.type == "cuda" else before
        self._what = "reserved" if device.type == "cuda" else "resident, with what Python and gloo took meanwhile"
        self._waited, self._step = arrivals.waited_seconds(), step
        self._seconds: list[float] = []
        self._sent: dict[str, float] = {}
        self._predicted: dict[str, Any] | None = None
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
        mine = ((waited - self._waited) / max(1, step - self._step), float(peak_memory(self._device) - self._before))
        self._waited, self._step = waited, step
        row = torch.tensor(mine, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(every, row)
        if dist.get_rank() == 0:
            self._write(step, torch.stack(every).tolist())
            if last and self._predicted is not None:
                print(self._compared(max(float(one[1]) for one in every)), flush=True)

    def _write(self, step: int, figures: list[list[float]]) -> None:
        mesh = self._job.mesh
        row = {
            "step": step,
            "waited_seconds": [waited for waited, _ in figures],
            "memory_bytes": [memory for _, memory in figures],
            "coordinates": [mesh.describe(rank) for rank in range(mesh.world_size)],
            "bytes": self._sent,
        }
        write_line(self._folder / "ranks.jsonl", row, "a")

    def _compared(self, memory: float) -> str:
        """One line for people."""
        assert self._predicted is not None, "there is nothing to compare with"
        step = median(self._seconds[1:] or self._seconds) if self._seconds else float("nan")
        return (
            f"predicted for {self._predicted['hardware']}: {seconds_text(self._predicted['step_seconds'])} a step, "
            f"{bytes_text(self._predicted['memory_bytes'])} at most on a rank; "
            f"measured: {seconds_text(step)}, {bytes_text(memory)} {self._what}"
        )
