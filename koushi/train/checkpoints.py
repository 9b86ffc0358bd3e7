"""A training run's checkpoints: what it goes on from, when it saves, how it stops."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from koushi import __version__
from koushi.checkpoint.folders import published, step_of
from koushi.checkpoint.load import load_newest
from koushi.checkpoint.manifest import Head, Manifest
from koushi.checkpoint.save import Saver
from koushi.checkpoint.state import owned
from koushi.errors import Stopped
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import ParallelModel
from koushi.run_folder import holds_run
from koushi.train.changes import DATA, changes
from koushi.train.resume import RunPlace
from koushi.train.stopping import StopRequest


@dataclass(frozen=True)
class Start:
    """Where training begins."""

    step: int = 0
    samples: int = 0


@final
class Checkpoints:
    """One rank's part in saving and loading; every method is called by all ranks alike."""

    def __init__(self, job: Job, place: RunPlace, model: ParallelModel, optimizer: AdamW, data: str):
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._data = data
        self._leads = dist.get_rank() == 0
        self._group = self._gloo()
        self.place = self._of_first_rank(place)
        self._start = Start()
        self._step, self._at = 0, "the start of the run"
        self._saver: Saver | None = None
        self._stop: StopRequest | None = None
        if job.config.checkpoint.every:
            self._saver = Saver(self.place.checkpoints, job.config.checkpoint, self._group)
            self._stop = StopRequest(self._gloo(), job.config.run.grace, self._too_late)

    def _gloo(self) -> dist.ProcessGroup:
        """A group of all ranks for one user only: collectives of two threads must not mix."""
        timeout = timedelta(seconds=self._job.config.run.timeout)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group

    def _of_first_rank(self, place: RunPlace) -> RunPlace:
        places = [place]
        dist.broadcast_object_list(places, group=self._group)
        return places[0]

    def resume(self) -> Start:
        """Load the newest whole checkpoint into the model and the optimizer, if there is one."""
        found = self.place.found if self._leads else []
        there = [bool(found)]
        dist.broadcast_object_list(there, group=self._group)
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not there[0]:
            if attempt or (self._leads and holds_run(self.place.folder)):
                self._say("no checkpoint yet: beginning again at step 1")
            return Start()
        folder, manifest = load_newest(
            found, self._job.size, self._model.parameters, self._optimizer, self._group, self._say
        )
        head = manifest.head
        self._say(self._resumed(folder, manifest))
        self._start = Start(head.step, head.samples)
        return self._start

    def _resumed(self, folder: Path, manifest: Manifest) -> str:
        head, elsewhere = manifest.head, folder.parent != self.place.checkpoints
        world = 1
        for degree in head.mesh.values():
            world *= degree
        layout = ", ".join(f"{name}={degree}" for name, degree in head.mesh.items())
        lines = [
            f"resuming from {folder}: step {head.step} of {self._job.config.training.steps}, {head.samples} samples, "
            f"saved by {world} {'process' if world == 1 else 'processes'} [{layout}]"
            + (f"; writing into {self.place.folder}" if elsewhere else "")
        ]
        changed = [str(one) for one in changes(head.config, self._job.config.model_dump(mode="json"))]
        if head.data and head.data != self._data:
            changed.append(DATA)
        if changed:
            lines.append(f"changed since: {', '.join(changed)}")
        return "\n".join(lines)

    def begin_step(self, step: int) -> None:
        """``step`` counts from 1."""
        self._step, self._at = step, f"step {step}"
        if self._stop is not None:
            self._stop.begin_step()

    def after_step(self, step: int, samples: int) -> None:
        """Save if it is time. Raises CheckpointError for a failed save, Stopped after SIGTERM."""
        if self._saver is None or self._stop is None:
            return
        self._saver.raise_if_failed()
        options, last = self._job.config.checkpoint, step == self._job.config.training.steps
        stopping = self._stop.agreed()
        if step % options.every == 0 or last or stopping:
            self._at = f"the save of step {step}"
            pieces = owned(self._model.parameters, self._optimizer, self._job.mesh.coordinate(dist.get_rank()))
            self._saver.save(self._head(step, samples), pieces, now=last or stopping)
        if stopping:
            without = "" if self._job.config.run.resume == "auto" else " without run.resume"
            self._say(f"SIGTERM: saved step {step}; the same command{without} goes on from there")
            raise Stopped(signal.SIGTERM, "SIGTERM")
        self._at = f"what follows step {step}"

    def _too_late(self) -> str:
        """What rank 0 says where the grace time after SIGTERM was too short."""
        if not self._leads:
            return ""
        found = (step_of(folder) for folder in published(self.place.checkpoints))
        newest = max([self._start.step, *(step for step in found if step is not None and step <= self._step)])
        lost = f"nothing is saved after step {newest}" if newest else "nothing is saved at all"
        return (
            f"SIGTERM: run.grace ({self._job.config.run.grace:g} s) ended within {self._at}: {lost}; "
            "set run.grace above the time of a step and a save"
        )

    def _head(self, step: int, samples: int) -> Head:
        return Head(
            step=step,
            samples=samples,
            optimizer_steps=self._optimizer.steps,
            seed=self._job.config.training.seed,
            data=self._data,
            config=self._job.config.model_dump(mode="json"),
            mesh=dict(zip(self._job.mesh.names, self._job.mesh.shape, strict=True)),
            torch=torch.__version__,
            koushi=__version__,
        )

    def close(self) -> None:
        """Begin no more saves, and leave SIGTERM to others."""
        try:
            if self._saver is not None:
                self._saver.close()
        finally:
            if self._stop is not None:
                self._stop.close()

    def _say(self, text: str) -> None:
        if self._leads:
            print(text, file=sys.stderr, flush=True)
