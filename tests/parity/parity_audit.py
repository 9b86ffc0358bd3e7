"""The audit of layouts as they really run: the first step of every job, recorded by one rank of each kind."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from koushi.dryrun.audit import audit
from koushi.dryrun.findings import Record
from koushi.dryrun.flow import Flow
from koushi.dryrun.ranks import rank_classes
from koushi.job import Job
from koushi.parallel.ledger import Recorder
from koushi.traffic import differences
from koushi.train.audit import planned
from koushi.train.step import TrainStep


@contextmanager
def recorded(jobs: Sequence[Job], folder: Path) -> Iterator[None]:
    """Ranks are forked, so the step that is patched here is theirs."""
    folder.mkdir()
    recording = {_name(job): {one.representative for one in rank_classes(job, counting=True)} for job in jobs}
    original = TrainStep.compute

    def compute(self: TrainStep, tokens: Any, labels: Any) -> Any:
        job, rank = self._job, dist.get_rank()
        path = _path(folder, job, rank)
        if path.exists() or rank not in recording.get(_name(job), ()):
            return original(self, tokens, labels)
        flow = Flow(job.mesh, self._model.parameters, (tokens, labels))
        with Recorder(job.mesh, self._model.parts, (flow,)) as recorder:
            result = original(self, tokens, labels)
            facts = flow.finish()
        path.write_bytes(pickle.dumps(Record(recorder.ledger(), facts)))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "compute", compute)
        yield


def audited(job: Job, folder: Path) -> list[str]:
    """What the audit has to say of a recorded job, and where its traffic is not what was planned."""
    classes = rank_classes(job, counting=True)
    records = {one.representative: pickle.loads(_path(folder, job, one.representative).read_bytes()) for one in classes}
    found = [str(finding) for finding in audit(job, classes, records)]
    for rank, record in records.items():
        apart = differences(planned(job, rank), record.ledger.traffic())
        found += [f"rank {rank}: {text}" for text in apart]
    return found


def _path(folder: Path, job: Job, rank: int) -> Path:
    return folder / f"{_name(job)}-{rank}"


def _name(job: Job) -> str:
    return hashlib.sha256(job.config.model_dump_json().encode()).hexdigest()
