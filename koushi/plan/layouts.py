"""Every layout that a run could have on so many devices, by the same rules as ``koushi check``. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from koushi.check.model_rules import legal_tensor_degrees
from koushi.check.rule import (
    DP_REPLICATE,
    DP_SHARD,
    MICROBATCH,
    PER_RANK,
    PER_STAGE,
    PP,
    RECOMPUTE,
    RESHARD,
    SCHEDULE,
    TP,
    WORLD,
)
from koushi.job import Job
from koushi.layout import divide_layers
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import LlamaSize
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES, microbatches_fit

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


NEARBY = 256
"""How far from a number of devices another one is still worth naming."""


@dataclass(frozen=True)
class Question:
    """What a search keeps as it is: the model, the batch and how many devices there are."""

    size: LlamaSize
    devices: int
    global_batch_size: int
    seq_len: int
    compiled: bool
    """Whether blocks are compiled; then backward cannot be split."""


def question_of(job: Job, devices: int | None = None) -> Question:
    """The run of ``job`` on any layout of as many devices, or of ``devices``."""
    training = job.config.training
    world = job.mesh.world_size if devices is None else devices
    return Question(job.size, world, training.global_batch_size, training.seq_len, training.compile)


class Pipeline(NamedTuple):
    """How layers and microbatches go through the stages; at pp 1 the schedule has no meaning."""

    pp: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1


class Layout(NamedTuple):
    """One choice of all that a search may choose."""

    tp: int
    pipeline: Pipeline
    dp_replicate: int
    dp_shard: int
    microbatch_size: int
    recompute: Recompute
    reshard_after_forward: bool

    @property
    def pp(self) -> int:
        return self.pipeline.pp

    def of(self, base: Workload) -> Workload:
        """``base`` under this layout, its global batch kept."""
        samples = base.global_batch_size // (self.dp_replicate * self.dp_shard)
        return replace(
            base,
            mesh=mesh_of(self.pp, self.dp_replicate, self.dp_shard, self.tp),
            stage_layers=layers_of(base.model.n_layers, self.pp * self.pipeline.stages_per_rank),
            schedule=self.pipeline.schedule,
            microbatch_size=self.microbatch_size,
            microbatches=samples // self.microbatch_size,
            recompute=self.recompute,
            reshard_after_forward=self.reshard_after_forward,
        )


def layout_of(workload: Workload) -> Layout:
    """The layout of a workload, layers by stage left out."""
    mesh = workload.mesh
    pp = mesh.degree("pp")
    return Layout(
        tp=mesh.degree("tp"),
        pipeline=Pipeline(pp, workload.schedule, workload.stages_per_rank) if pp > 1 else Pipeline(),
        dp_replicate=mesh.degree("dp_replicate"),
        dp_shard=mesh.degree("dp_shard"),
        microbatch_size=workload.microbatch_size,
        recompute=workload.recompute,
        reshard_after_forward=workload.reshard_after_forward,
    )


@cache
def mesh_of(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> MeshSpec:
    return MeshSpec.of(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)


@cache
def layers_of(n_layers: int, n_stages: int) -> tuple[int, ...]:
    return divide_layers(n_layers, n_stages)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All of them, smallest first."""
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*low, *(number // one for one in low)}))


def beside(choices: Sequence[int], value: int) -> tuple[int, ...]:
    """The nearest below and above, of ``choices`` in order."""
    below = [one for one in choices if one < value]
    above = [one for one in choices if one > value]
    return (*below[-1:], *above[:1])


def tensor_degrees(question: Question) -> tuple[int, ...]:
    """Of a tp that divides the model, the sequence and the devices."""
    return tuple(
        tp for tp in legal_tensor_degrees(question.size) if question.seq_len % tp == 0 and question.devices % tp == 0
    )


def pipelines(question: Question, pp: int, microbatches: int) -> tuple[Pipeline, ...]:
    """Every schedule and number of virtual stages for ``pp`` ranks and so many microbatches."""
    return _pipelines(question.size.n_layers, question.compiled, pp, microbatches)


@cache
def _pipelines(n_layers: int, compiled: bool, pp: int, microbatches: int) -> tuple[Pipeline, ...]:
    if pp == 1:
        return (Pipeline(),)
    found, most_stages = [], n_layers // pp
    for schedule, needs in SCHEDULES.items():
        if needs.splits_backward and compiled:
            continue
        most = min(most_stages, needs.most_stages_per_rank or most_stages)
        for stages in range(needs.fewest_stages_per_rank, most + 1):
            if microbatches_fit(schedule, pp, pp * stages, microbatches):
                found.append(Pipeline(pp, schedule, stages))
    return tuple(found)


class Split(NamedTuple):
    """How the devices divide into tensor, pipeline and data parallel, and the batch into microbatches."""

    tp: int
    pp: int
    data_parallel: int
    microbatch_size: int
    microbatches: int


def reshard_choices(split: Split) -> tuple[bool, ...]:
    """Under pipelining gathered parameters stay; else they may be freed after forward, where any are gathered."""
    if split.pp > 1:
        return (False,)
    return (True, False) if split.data_parallel > 1 else (True,)


def _degrees(question: Question) -> Iterator[tuple[int, int, int]]:
    """Every tp, pp and data parallel, whatever the batch."""
    for tp in tensor_degrees(question):
        for pp in divisors(question.devices // tp):
            if pp > max(1, question.size.n_layers):
                break
            yield tp, pp, question.devices // tp // pp


def splits(question: Question) -> Iterator[Split]:
    """Every legal one."""
    for tp, pp, data_parallel in _degrees(question):
        samples, left = divmod(question.global_batch_size, data_parallel)
        if left == 0:
            for microbatch_size in divisors(samples):
                yield Split(tp, pp, data_parallel, microbatch_size, samples // microbatch_size)


class LeftOut(NamedTuple):
    """What the batch leaves out because its samples do not divide over the data-parallel ranks."""

    pairs: int
    """Of tp and pp."""
    of: int
    """Pairs, were it not for the batch."""
    batches: tuple[int, ...]
    """The nearest batches below and above that leave out the fewest."""
    fewest: int
    """Pairs that those leave out."""


def left_out(question: Question) -> LeftOut | None:
    """What other batches, at most an eighth smaller or larger, would let in; None: nothing."""
    degrees, own = [data_parallel for _, _, data_parallel in _degrees(question)], question.global_batch_size

    def lost(batch: int) -> int:
        return sum(1 for one in degrees if batch % one)

    near = {batch for one in degrees for batch in (own - own % one, own - own % one + one)}
    by_loss = sorted((lost(batch), batch) for batch in near if 0 < 8 * abs(batch - own) <= own)
    if not by_loss or by_loss[0][0] >= lost(own):
        return None
    fewest = by_loss[0][0]
    return LeftOut(lost(own), len(degrees), beside([batch for loss, batch in by_loss if loss == fewest], own), fewest)


def legal_devices(question: Question) -> list[int]:
    """The next numbers of devices below and above those of ``question`` that have a legal layout, if any is near."""
    own = question.devices
    nearby = (range(own - 1, max(0, own - NEARBY), -1), range(own + 1, own + NEARBY))
    found = (next((one for one in numbers if any(layouts(replace(question, devices=one)))), None) for numbers in nearby)
    return [one for one in found if one is not None]


def layouts(question: Question) -> Iterator[Layout]:
    """Every legal layout, without judging any."""
    for split in splits(question):
        for pipeline in pipelines(question, split.pp, split.microbatches):
            for recompute in MODES:
                for shard in divisors(split.data_parallel):
                    for reshard in reshard_choices(split):
                        replicas = split.data_parallel // shard
                        yield Layout(split.tp, pipeline, replicas, shard, split.microbatch_size, recompute, reshard)


def split_of(question: Question, layout: Layout) -> Split:
    """How a legal layout divides devices and batch."""
    data_parallel = layout.dp_replicate * layout.dp_shard
    samples = question.global_batch_size // data_parallel
    return Split(layout.tp, layout.pp, data_parallel, layout.microbatch_size, samples // layout.microbatch_size)


def is_legal(question: Question, layout: Layout) -> bool:
    """Whether ``layouts`` has it."""
    if layout.tp not in tensor_degrees(question):
        return False
    data_parallel = layout.dp_replicate * layout.dp_shard
    if layout.tp * layout.pp * data_parallel != question.devices:
        return False
    samples, left = divmod(question.global_batch_size, data_parallel)
    if left or samples % layout.microbatch_size:
        return False
    microbatches = samples // layout.microbatch_size
    split = Split(layout.tp, layout.pp, data_parallel, layout.microbatch_size, microbatches)
    return layout.pipeline in pipelines(
        question, layout.pp, microbatches
    ) and layout.reshard_after_forward in reshard_choices(split)


def values_of(layout: Layout) -> dict[str, object]:
    """What a run file says of it, by dotted key; None: nothing."""
    alone = layout.pp == 1
    reshard = "always" if layout.reshard_after_forward else "never"
    schedule: dict[str, object] = {} if alone else {SCHEDULE: layout.pipeline.schedule}
    return {
        PP: layout.pp,
        DP_REPLICATE: layout.dp_replicate,
        DP_SHARD: layout.dp_shard,
        TP: layout.tp,
        WORLD: layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp,
        **schedule,
        PER_RANK: None if alone else layout.pipeline.stages_per_rank,
        PER_STAGE: None,
        RESHARD: reshard if alone else "auto",
        MICROBATCH: layout.microbatch_size,
        RECOMPUTE: layout.recompute,
    }
