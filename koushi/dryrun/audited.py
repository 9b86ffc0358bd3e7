"""Recording what the audit needs of a job, one rank of every kind, each in a process of its own."""

from __future__ import annotations

from functools import partial

import torch

from koushi.dryrun.audit import audit
from koushi.dryrun.findings import Finding, Record
from koushi.dryrun.flow import Flow
from koushi.dryrun.forks import in_forks
from koushi.dryrun.ranks import RankClass, rank_classes
from koushi.dryrun.world import DeviceKind, world
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh
from koushi.parallel.ledger import Recorder
from koushi.train.step import TrainStep


def audit_job(job: Job, kind: DeviceKind, *, every_rank: bool = False) -> list[Finding]:
    """Run one step as each kind of rank, or as every rank, and audit it."""
    classes = rank_classes(job, counting=True)
    if every_rank:
        classes = tuple(RankClass(rank, (rank,)) for rank in range(job.mesh.world_size))
    ranks = [one.representative for one in classes]
    records = in_forks(partial(record, job, kind), ranks)
    return audit(job, classes, dict(zip(ranks, records, strict=True)))


def record(job: Job, kind: DeviceKind, rank: int) -> Record:
    """What ``rank`` does in one step; in this process, which can then be no other rank."""
    with world(job.mesh, rank, kind) as device:
        model = build(job, build_mesh(job.mesh, device.type), device)
        step = TrainStep(job, model, AdamW(job.config.optimizer))
        tokens = torch.empty((job.local_batch_size, job.config.training.seq_len), dtype=torch.int64, device=device)
        labels = tokens.clone()
        flow = Flow(job.mesh, model.parameters, (tokens, labels))
        with Recorder(job.mesh, model.parts, (flow,)) as recorder:
            result = step.run(tokens, labels)
            facts = flow.finish()
            del result  # was held until here: what the step gives its caller is used
        return Record(recorder.ledger(), facts)
