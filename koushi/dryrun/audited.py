"""Recording what the audit needs of a job, one rank of every kind, each in a process of its own."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from koushi.dryrun.audit import audit
from koushi.dryrun.findings import Finding, Record
from koushi.dryrun.flow import Flow
from koushi.dryrun.forks import in_forks
from koushi.dryrun.ranks import RankClass, rank_classes
from koushi.dryrun.shapes import KnownShapes
from koushi.dryrun.world import DeviceKind, world
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import ParallelModel, build
from koushi.parallel.device_mesh import build_mesh
from koushi.parallel.ledger import Event, Ledger, Recorder
from koushi.parallel.shards import local_parameters
from koushi.train.step import TrainStep


def audit_job(job: Job, kind: DeviceKind, *, every_rank: bool = False, together: bool = False) -> list[Finding]:
    """Run one step as each kind of rank, or as every rank, and audit it.

    With ``together``, ranks that only differ in whether they count what tp copies are one until backward is over.
    """
    classes = rank_classes(job, counting=True)
    if every_rank:
        classes = tuple(RankClass(rank, (rank,)) for rank in range(job.mesh.world_size))
    ranks = [one.representative for one in classes]
    groups = apart_along_tp(job, ranks) if together else [(rank,) for rank in ranks]
    found = in_forks(partial(records, job, kind), groups)
    return audit(job, classes, dict(zip(chain(*groups), chain(*found), strict=True)))


def apart_along_tp(job: Job, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """``ranks`` in groups that hold the same shapes, and lie apart along tp alone."""
    alike = {rank: one.representative for one in rank_classes(job) for rank in one.ranks}
    found: dict[object, list[int]] = {}
    for rank in ranks:
        elsewhere = {name: index for name, index in job.mesh.coordinate(rank).items() if name != "tp"}
        found.setdefault((alike[rank], *elsewhere.values()), []).append(rank)
    return [tuple(each) for each in found.values()]


def record(job: Job, kind: DeviceKind, rank: int) -> Record:
    """What ``rank`` does in one step; in this process, which can then be no other rank."""
    return records(job, kind, (rank,))[0]


def records(job: Job, kind: DeviceKind, ranks: Sequence[int]) -> list[Record]:
    """Of ``ranks``: until backward is over, of the first of them, which then forks for each of the others."""
    with world(job.mesh, ranks[0], kind) as device:
        model = build(job, build_mesh(job.mesh, device.type), device)
        gc.freeze()  # nothing of it goes, and looking through it again and again takes time
        step = TrainStep(job, model, AdamW(job.config.optimizer))
        tokens = torch.empty((job.local_batch_size, job.config.training.seq_len), dtype=torch.int64, device=device)
        labels = tokens.clone()
        flow = Flow(job.mesh, model.parameters, (tokens, labels))
        with Recorder(job.mesh, model.parts, (flow,), KnownShapes()) as recorder:
            step.accumulate(tokens, labels)
            end = partial(_end, job, model, step, flow, recorder)
            others = in_forks(end, ranks[1:], at_once=1) if len(ranks) > 1 else []
            return [end(ranks[0]), *others]


def _end(job: Job, model: ParallelModel, step: TrainStep, flow: Flow, recorder: Recorder, rank: int) -> Record:
    """Go on after backward as ``rank``, which may be another than until then."""
    if rank != dist.get_rank():
        model.parameters[:] = local_parameters(model.parts, job, job.mesh.coordinate(rank))
    norm = step.scalars()
    step.update(norm[1])
    facts = flow.finish()  # while what the step gives its caller is held, which counts as used
    del norm
    return Record(moved_along_tp(recorder.ledger(), rank), facts)


def moved_along_tp(ledger: Ledger, rank: int) -> Ledger:
    """The same as ``rank`` sees it, which only tp lies between."""
    by = rank - ledger.rank

    def moved(event: Event) -> Event:
        if ledger.rank in event.ranks and rank in event.ranks:
            return event
        peer = None if event.peer is None else event.peer + by
        return replace(event, ranks=tuple(each + by for each in event.ranks), peer=peer)

    return replace(ledger, rank=rank, events=tuple(map(moved, ledger.events))) if by else ledger
