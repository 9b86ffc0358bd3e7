"""A published run in the planner's words, or why it is left out. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from koushi.accuracy.models import transformer
from koushi.accuracy.nanotron import launched_ahead, untimely
from koushi.accuracy.rows import Row
from koushi.accuracy.stages import schedule_of, stage_layers
from koushi.accuracy.systems import MeasuredMemory, describe, measured_first, measured_memory, name_of
from koushi.errors import ConfigError
from koushi.hardware.hardware import Hardware, load, names
from koushi.mesh import MeshSpec
from koushi.plan.workload import Transformer, Workload
from koushi.schedules import microbatches_fit

SLOW_TWIN = 2.0
"""Repeats differ by 5 to 25%, says the data's README."""
SLOW = "time only: likes were more than twice as fast"
LOW_MFU = 2.0
"""Percent. Runs below say nothing about physics: the data's README."""

UNPLANNED = {
    "cpu param offload": "state offloaded to the host",
    "ckpt-in-cpu": "activations offloaded to the host",
    "gpus=tp and dp=": "its number of devices is a guess",
    "source inconsistent": "inconsistent, says the transcriber",
    "lists mp=2 for some": "two versions of its tensor parallel degree",
    "mamba": "no plain transformer",
}
"""Words of the notes that leave nothing to plan."""

SPOILED = {
    "pathological": "pathologically slow, says the transcriber",
    "mutually inconsistent": "inconsistent, says the transcriber",
    "for the same throughputs": "two versions of its microbatch",
}
"""Words of the notes that make measurements worthless; that the run ran still counts."""

CLUSTERS: Mapping[str, float] = {
    # Jean Zay has four 100 Gb/s Omni-Path adapters per node, of one of which NCCL had 40.5 Gb/s (bigscience,
    # experiments/bandwidth/all_reduce_bench-a100-n4.txt: two channels, both through it); here over the share that the
    # hardware file reckons with.
    "bigscience": 4 * 40.5 / 0.85,
    # AWS p4d, EFA (pytorch.org, 14 March 2022).
    "fsdp-blog": 400.0,
}
"""Gb/s of network per node where the notes don't say, by how the source's name begins."""


@dataclass(frozen=True)
class Run:
    """A row that the planner can say something about."""

    row: Row
    workload: Workload
    hardware: Hardware
    memory: MeasuredMemory
    memory_of_first: bool
    """Whether the memory is rank 0's, not the fullest's."""
    stated_seconds: float | None
    """Of a step, as the row states or implies; None where it doesn't."""
    step_seconds: float | None
    """The same, None where ``spoiled``."""
    memory_gib: float | None
    """Measured; None where there is none, or ``spoiled``."""
    spoiled: str | None
    """Why its measurements say nothing; that it ran still does."""


@dataclass(frozen=True)
class LeftOut:
    row: Row
    reason: str


def described(rows: Iterable[Row]) -> tuple[tuple[Run, ...], tuple[LeftOut, ...]]:
    """Every row, as one or the other, in order."""
    rows = tuple(rows)
    heads = _usual_heads(rows)
    found = [_run(row, heads) for row in rows]
    return (
        _without_slow_twins([one for one in found if isinstance(one, Run)]),
        tuple(one for one in found if isinstance(one, LeftOut)),
    )


def _without_slow_twins(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs that took more than ``SLOW_TWIN`` times as long as their likes say nothing.

    A like differs in its ZeRO stage, and has as many replicas or more: each microbatch then takes no less, and what
    replicas send no less, so that the step is at most longer by how many more microbatches it has.
    """
    likes: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if run.step_seconds is not None:
            likes.setdefault(_alike(run), []).append(run)
    return tuple(
        replace(run, step_seconds=None, spoiled=SLOW)
        if run.step_seconds is not None and run.step_seconds > SLOW_TWIN * _longest(run, likes[_alike(run)])
        else run
        for run in runs
    )


def _alike(run: Run) -> tuple[object, ...]:
    """What likes have in common."""
    workload = run.workload
    degrees = {name: workload.mesh.degree(name) for name in workload.mesh.names}
    return (
        run.row.source,
        run.hardware.name,
        replace(
            workload,
            mesh=MeshSpec.of(**(degrees | {"dp_replicate": 1})),
            microbatches=1,
            system=replace(workload.system, sharding="none", overlap_data_parallel=True, blocks_ahead=0),
        ),
    )


def _longest(run: Run, likes: Sequence[Run]) -> float:
    """Seconds that ``run`` may take by those of its likes, itself among them."""
    replicas, microbatches = run.workload.mesh.degree("dp_replicate"), run.workload.microbatches
    return min(
        (like.step_seconds or 0.0) * max(1.0, microbatches / like.workload.microbatches)
        for like in likes
        if like.workload.mesh.degree("dp_replicate") >= replicas
    )


def _usual_heads(rows: Iterable[Row]) -> dict[tuple[str, int], int]:
    """The heads that a source mostly uses at a width, for its rows that don't say."""
    seen: dict[tuple[str, int], Counter[int]] = {}
    for row in rows:
        if row.heads and row.dim:
            seen.setdefault((row.source, row.dim), Counter())[row.heads] += 1
    return {key: counts.most_common(1)[0][0] for key, counts in seen.items()}


def _run(row: Row, heads: Mapping[tuple[str, int], int]) -> Run | LeftOut:
    if reason := _unplanned(row):
        return LeftOut(row, reason)
    model = transformer(row, heads)
    if isinstance(model, str):
        return LeftOut(row, model)
    hardware = _hardware(row)
    if hardware is None:
        return LeftOut(row, f"no hardware file for {row.gpu or 'an unnamed device'}")
    workload = _workload(row, model)
    if isinstance(workload, str):
        return LeftOut(row, workload)
    spoiled, stalled = _spoiled(row), None
    if name_of(row) == "nanotron":
        workload = launched_ahead(workload, hardware)
        stalled = untimely(row, workload, hardware)
    doubted = spoiled is not None or "looks like a source typo" in row.notes
    stated = _step_seconds(row, workload)
    return Run(
        row=row,
        workload=workload,
        hardware=hardware,
        memory=measured_memory(row),
        memory_of_first=measured_first(row),
        stated_seconds=stated,
        step_seconds=None if spoiled or stalled else stated,
        memory_gib=None if doubted else row.memory_gib,
        spoiled=spoiled or stalled,
    )


def _unplanned(row: Row) -> str | None:
    if row.moe or (row.ep or 1) > 1:
        return "mixture of experts"
    if row.gpu.startswith("tpu"):
        return "TPU"
    if row.model.endswith(("-lora", "-sft")):
        return "fine-tuning on packed samples"
    notes = row.notes.lower()
    return next((reason for words, reason in UNPLANNED.items() if words in notes), None)


def _spoiled(row: Row) -> str | None:
    notes = row.notes.lower()
    if reason := next((reason for words, reason in SPOILED.items() if words in notes), None):
        return reason
    return "below 2% MFU" if row.mfu_pct is not None and row.mfu_pct < LOW_MFU else None


def _hardware(row: Row) -> Hardware | None:
    name = row.gpu
    if "EFA" in row.notes and f"{name}-efa" in names():
        name += "-efa"
    try:
        hardware = load(name)
    except ConfigError:
        return None
    per_node = row.gpus_per_node or hardware.devices_per_node
    gbit = _network_gbit(row)
    if gbit is not None:
        # 8 bits to a byte.
        hardware = hardware.with_network(gbit / 8 / per_node)
    return hardware if per_node == hardware.devices_per_node else replace(hardware, devices_per_node=per_node)


def _network_gbit(row: Row) -> float | None:
    """Gb/s of one node's network, where the notes or the cluster tell."""
    if adapters := re.search(r"(\d+)x(\d+) ?Gb", row.notes):
        return float(adapters[1]) * float(adapters[2])
    if whole := re.search(r"(\d+) ?Gbps(?:/node| inter-node)", row.notes):
        return float(whole[1])
    if whole := re.search(r"([\d.]+) ?Tbps", row.notes):
        return float(whole[1]) * 1000
    return next((gbit for start, gbit in CLUSTERS.items() if row.source.startswith(start)), None)


def _workload(row: Row, model: Transformer) -> Workload | str:
    mesh = _mesh(row)
    if isinstance(mesh, str):
        return mesh
    replicas = mesh.degree("dp_replicate", "dp_shard")
    micro_batch = row.micro_batch
    if micro_batch is None and row.zero_stage in (2, 3) and mesh.degree("pp") == 1:
        # Trainers built on FSDP take the local batch at once where nothing else is said.
        micro_batch = (row.global_batch or 0) // replicas
    if row.seq_len is None or not micro_batch:
        return "sequence length or microbatch is not stated"
    if row.global_batch is None and (row.zero_stage not in (2, 3) or mesh.degree("pp") > 1):
        return "the global batch is not stated"
    global_batch = row.global_batch or replicas * micro_batch
    microbatches, rest = divmod(global_batch, replicas * micro_batch)
    if rest or not microbatches:
        return "the global batch is no whole number of microbatches"
    pp, told = mesh.degree("pp"), schedule_of(row)
    if pp > 1 and told is None:
        return "how many virtual stages the pipeline has is not stated"
    schedule, per_rank = told if pp > 1 and told else ("1F1B", 1)
    layers = stage_layers(row, model, name_of(row), pp * per_rank)
    # torch's 1F1B asks for a microbatch per stage; others' run with fewer.
    if layers is None or (schedule != "1F1B" and not microbatches_fit(schedule, pp, pp * per_rank, microbatches)):
        return "torch's schedule cannot run so few layers or microbatches"
    system = describe(row)
    return Workload(
        model=model,
        mesh=mesh,
        stage_layers=layers,
        schedule=schedule,
        seq_len=row.seq_len,
        microbatch_size=micro_batch,
        microbatches=microbatches,
        recompute=system.recompute,
        reshard_after_forward=system.reshard_after_forward,
        compute=system.compute,
        reduce=system.reduce,
        system=system.system,
    )


def _mesh(row: Row) -> MeshSpec | str:
    """Degrees that are not stated are 1; the devices that are left then go to data parallel."""
    tp, pp, cp = row.tp or 1, row.pp or 1, row.cp or 1
    if row.gpus is None:
        return "the number of devices is not stated"
    left, rest = divmod(row.gpus, tp * pp * cp)
    if rest:
        return "the degrees do not multiply to the number of devices"
    replicate, shard = row.dp_replicate, row.dp_shard
    if replicate is None and shard is None:
        replicate, shard = (1, left) if row.zero_stage in (2, 3) else (left, 1)
    elif shard is None:
        shard = left // (replicate or 1)
    elif replicate is None:
        replicate = left // shard
    if (replicate or 1) * shard != left:
        return "the degrees do not multiply to the number of devices"
    group = re.search(r"zero1 group=(\d+)", row.notes)
    if group and shard == 1 and left % int(group[1]) == 0:
        replicate, shard = left // int(group[1]), int(group[1])
    return MeshSpec.of(pp=pp, dp_replicate=replicate or 1, dp_shard=shard, cp=cp, tp=tp)


def _step_seconds(row: Row, workload: Workload) -> float | None:
    devices = workload.mesh.world_size
    if row.step_seconds is not None:
        return row.step_seconds
    if row.tokens_per_s is not None:
        return workload.tokens / (row.tokens_per_s * devices)
    if row.tflops is not None and row.source == "megatron-sc21":
        return megatron_flops(workload) / (row.tflops * 1e12 * devices)
    return None


def megatron_flops(workload: Workload) -> float:
    """FLOPs of a step as arXiv 2104.04473, equation 3, counts them: with a recomputed forward, without causality."""
    model, seq_len = workload.model, workload.seq_len
    factor = 1 + seq_len / (6 * model.dim) + model.vocab_size / (16 * model.n_layers * model.dim)
    return 96 * workload.tokens * model.n_layers * model.dim**2 * factor
