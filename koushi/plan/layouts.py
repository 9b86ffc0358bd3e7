"""Every layout that a run could have on so many devices, by the same rules as ``koushi check``. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class Fixed(NamedTuple):
    """What all layouts of a question have in common; None: whatever is legal. A schedule and its stages are those of
    layouts with a pipeline."""

    tp: int | None = None
    pp: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    reshard_after_forward: bool | None = None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Fixed:
        """Of values of a run file by dotted key; what follows from others or is no layout's is not fixed."""
        found = {field: values[key] for key, field in FIXED.items() if values.get(key) is not None}
        if found.get("dp_shard") == -1:
            del found["dp_shard"]
        if "reshard_after_forward" in found:
            found["reshard_after_forward"] = {"always": True, "never": False}.get(str(found["reshard_after_forward"]))
        return cls(**found)  # type: ignore[arg-type]

    def values(self) -> dict[str, object]:
        """As a run file has them, by dotted key."""
        found = {key: one for key, field in FIXED.items() if (one := getattr(self, field)) is not None}
        if RESHARD in found:
            found[RESHARD] = "always" if found[RESHARD] else "never"
        return found

    def has_pipeline(self, pipeline: Pipeline) -> bool:
        if pipeline.pp == 1:
            return self.pp in (None, 1)
        wanted = (self.pp, self.schedule, self.stages_per_rank)
        return all(one is None or one == its for one, its in zip(wanted, pipeline, strict=True))


FIXED: Mapping[str, str] = {
    TP: "tp",
    PP: "pp",
    SCHEDULE: "schedule",
    PER_RANK: "stages_per_rank",
    DP_REPLICATE: "dp_replicate",
    DP_SHARD: "dp_shard",
    MICROBATCH: "microbatch_size",
    RECOMPUTE: "recompute",
    RESHARD: "reshard_after_forward",
}
"""Keys of a run file that a search chooses, to the fields of ``Fixed``."""


ANY = Fixed()


@dataclass(frozen=True)
class Question:
    """What a search keeps as it is: the model, the batch and how many devices there are."""

    size: LlamaSize
    devices: int
    global_batch_size: int
    seq_len: int
    compiled: bool
    """Whether blocks are compiled; then backward cannot be split."""
    fixed: Fixed = ANY


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
    legal = legal_tensor_degrees(question.size)
    return tuple(
        tp
        for tp in legal
        if question.seq_len % tp == 0 and question.devices % tp == 0 and question.fixed.tp in (None, tp)
    )


def pipelines(question: Question, pp: int, microbatches: int) -> tuple[Pipeline, ...]:
    """Every schedule and number of virtual stages for ``pp`` ranks and so many microbatches."""
    legal = _pipelines(question.size.n_layers, question.compiled, pp, microbatches)
    return legal if question.fixed == ANY else tuple(one for one in legal if question.fixed.has_pipeline(one))


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


def modes(question: Question) -> tuple[Recompute, ...]:
    """Of recompute."""
    return MODES if question.fixed.recompute is None else (question.fixed.recompute,)


def shards(question: Question, data_parallel: int) -> tuple[int, ...]:
    """Every degree of sharding, the rest being whole copies, smallest first."""
    fixed = question.fixed
    if fixed.dp_shard is None and fixed.dp_replicate is None:
        return divisors(data_parallel)
    return tuple(
        one
        for one in divisors(data_parallel)
        if fixed.dp_shard in (None, one) and fixed.dp_replicate in (None, data_parallel // one)
    )


def reshard_choices(question: Question, split: Split) -> tuple[bool, ...]:
    """Under pipelining gathered parameters stay; else they may be freed after forward, where any are gathered.

    Where nothing can be chosen nothing is fixed.
    """
    if split.pp > 1:
        return (False,)
    if split.data_parallel == 1:
        return (True,)
    fixed = question.fixed.reshard_after_forward
    return (True, False) if fixed is None else (fixed,)


def _degrees(question: Question) -> Iterator[tuple[int, int, int]]:
    """Every tp, pp and data parallel, whatever the batch."""
    for tp in tensor_degrees(question):
        for pp in divisors(question.devices // tp):
            if pp > max(1, question.size.n_layers):
                break
            data_parallel = question.devices // tp // pp
            if question.fixed.pp in (None, pp) and shards(question, data_parallel):
                yield tp, pp, data_parallel


def splits(question: Question) -> Iterator[Split]:
    """Every legal one."""
    for tp, pp, data_parallel in _degrees(question):
        samples, left = divmod(question.global_batch_size, data_parallel)
        if left == 0:
            for microbatch_size in divisors(samples):
                if question.fixed.microbatch_size in (None, microbatch_size):
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
            for recompute in modes(question):
                for shard in shards(question, split.data_parallel):
                    for reshard in reshard_choices(question, split):
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
    if layout.tp * layout.pp * data_parallel != question.devices or layout.dp_shard not in shards(
        question, data_parallel
    ):
        return False
    if layout.recompute not in modes(question) or question.fixed.microbatch_size not in (None, layout.microbatch_size):
        return False
    samples, left = divmod(question.global_batch_size, data_parallel)
    if left or samples % layout.microbatch_size:
        return False
    microbatches = samples // layout.microbatch_size
    split = Split(layout.tp, layout.pp, data_parallel, layout.microbatch_size, microbatches)
    return layout.pipeline in pipelines(
        question, layout.pp, microbatches
    ) and layout.reshard_after_forward in reshard_choices(question, split)


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
