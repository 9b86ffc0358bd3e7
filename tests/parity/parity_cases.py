"""Layouts to train alike: every factorisation of a world, under every schedule, tied and untied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job

Degrees = tuple[int, int, int, int]
"""pp, dp_replicate, dp_shard, tp."""

WORLDS = (1, 2, 4, 8)
SINGLE_STAGE = ("GPipe", "1F1B")
MULTI_STAGE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*SINGLE_STAGE, *MULTI_STAGE)
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
GLOBAL_BATCH = 16

# As few layers as two stages can share unevenly. KV heads are cut at tp 2 and copied at tp 4 and 8. The gradient norm
# lies above max_grad_norm, so that clipping takes part. A larger eps than usual: AdamW divides a gradient by its own
# size, and in float32 some of these small gradients are rounding error.
BASE = """
model: {name: llama3-debug, vocab_size: 64, dim: 32, n_layers: 3, n_heads: 8, n_kv_heads: 2, ffn_dim: 64,
        rope_scaling: {factor: 4.0, original_max_seq_len: 16}}
training: {seq_len: 16, global_batch_size: 16, microbatch_size: 2, steps: 5, seed: 7, max_grad_norm: 0.3}
optimizer: {lr: 3.0e-3, eps: 1.0e-6}
lr_schedule: {warmup_steps: 2}
data: {source: synthetic, masked_fraction: 0.4}
run: {device: cpu, timeout: 120}
"""


@dataclass(frozen=True)
class Case:
    """One run file: the base and its overrides, each ``key=value``."""

    name: str
    world: int
    overrides: tuple[str, ...]

    def job(self, folder: Path, *more: str) -> Job:
        """The job as ``check`` accepts it; ``more`` are further overrides."""
        path = folder / "parity.yaml"
        if not path.exists():
            path.write_text(BASE, encoding="utf-8")
        return check(load(path, [*self.overrides, *more]))

    def with_(self, name: str, *overrides: str) -> Case:
        return replace(self, name=f"{self.name} {name}", overrides=self.overrides + overrides)


def case(name: str, degrees: Degrees, *overrides: str) -> Case:
    """``name`` comes after the degrees in the case's own name. Unless overridden there are two microbatches, or two for
    every pipeline stage, with which any schedule runs."""
    pp, dp_replicate, dp_shard, tp = degrees
    text = f"pp{pp} rep{dp_replicate} shard{dp_shard} tp{tp} {name}".strip()
    degree = (
        f"parallelism.pipeline_parallel_degree={pp}",
        f"parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"parallelism.data_parallel_shard_degree={dp_shard}",
        f"parallelism.tensor_parallel_degree={tp}",
        f"training.microbatch_size={_largest(GLOBAL_BATCH // (dp_replicate * dp_shard), 2 * pp)}",
    )
    return Case(text, prod(degrees), degree + overrides)


def schedule(name: str, *layers: int) -> tuple[str, ...]:
    """Overrides for a schedule, with as many layers in each stage where ``layers`` are given, and else enough for two
    ranks, unevenly."""
    chosen = (f"parallelism.pipeline_parallel_schedule={name}",)
    if not layers:
        return (*chosen, "model.n_layers=5") if name in MULTI_STAGE else chosen
    counts = ",".join(map(str, layers))
    return (*chosen, f"parallelism.pipeline_parallel_layers_per_stage=[{counts}]", f"model.n_layers={sum(layers)}")


def batch(microbatches: int, microbatch_size: int, data_parallel: int = 1) -> tuple[str, ...]:
    """Overrides for so many microbatches on every data-parallel rank."""
    return (
        f"training.microbatch_size={microbatch_size}",
        f"training.global_batch_size={microbatches * microbatch_size * data_parallel}",
    )


def tied(yes: bool) -> str:
    return f"model.tie_embeddings={str(yes).lower()}"


def factorisations(world: int) -> list[Degrees]:
    return [
        (pp, dp_replicate, dp_shard, tp)
        for pp, dp_replicate, dp_shard, tp in product(range(1, world + 1), repeat=4)
        if pp * dp_replicate * dp_shard * tp == world
    ]


def _layers(pp: int, name: str) -> tuple[str, ...]:
    """Stages that are uneven; those of the default division where there are layers enough."""
    n_stages = pp * (2 if name in MULTI_STAGE else 1)
    if n_stages == 16:
        return schedule(name, 0, *[1] * 13, 2, 0)
    return (*schedule(name), f"model.n_layers={n_stages + 1}")


def _microbatch_size(degrees: Degrees, name: str) -> int:
    """The largest with which the schedule has microbatches enough, and two at least."""
    pp, dp_replicate, dp_shard, _ = degrees
    least = max(2, 2 * pp if name == "DualPipeV" else pp)
    return _largest(GLOBAL_BATCH // (dp_replicate * dp_shard), least)


def _largest(local_batch: int, microbatches: int) -> int:
    """Microbatch of which the local batch has ``microbatches`` or more; 1 where it has too few samples."""
    sizes = range(1, local_batch + 1)
    return max((size for size in sizes if local_batch % size == 0 and local_batch // size >= microbatches), default=1)


def enumerated(world: int) -> Iterator[Case]:
    """Every factorisation of ``world``, times every schedule where pp > 1, times untied and tied.

    Every other one has so few labels that some data-parallel ranks have none.
    """
    for degrees in factorisations(world):
        for index, name in enumerate(SCHEDULES if degrees[0] > 1 else ("",)):
            layers = _layers(degrees[0], name) if name else ()
            size = f"training.microbatch_size={_microbatch_size(degrees, name)}"
            for ties in (False, True):
                masked = "data.masked_fraction=" + ("0.8" if (index + ties) % 2 else "0.4")
                label = f"{name} {'tied' if ties else 'untied'}".strip()
                yield case(label, degrees, *layers, size, tied(ties), masked)
