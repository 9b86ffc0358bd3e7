"""Predicted collectives are those of real steps: every call, with its sub-mesh, operation, phase, dtype and bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from plan_recorder import record_steps

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job
from koushi.plan.communication import pieces, traffic
from koushi.plan.workload import of_job
from koushi.traffic import Traffic

# Rows that shards of 2, 4 and 8 ranks cut unevenly; KV heads cut at tp 2 and copied at tp 4; gradients above the norm.
BASE = """
model: {name: llama3-debug, vocab_size: 72, dim: 24, n_layers: 5, n_heads: 12, n_kv_heads: 2, ffn_dim: 36}
training: {seq_len: 16, global_batch_size: 16, microbatch_size: 2, steps: 5, max_grad_norm: 0.3}
data: {source: synthetic, masked_fraction: 0.4}
run: {device: cpu, timeout: 120}
"""


def job(folder: Path, *overrides: str) -> Job:
    path = folder / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    return check(load(path, overrides))


def degrees(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> tuple[str, ...]:
    return (
        f"parallelism.pipeline_parallel_degree={pp}",
        f"parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"parallelism.data_parallel_shard_degree={dp_shard}",
        f"parallelism.tensor_parallel_degree={tp}",
    )


def schedule(name: str, stages_per_rank: int = 1) -> tuple[str, ...]:
    return (
        f"parallelism.pipeline_parallel_schedule={name}",
        f"parallelism.pipeline_parallel_stages_per_rank={stages_per_rank}",
    )


TIED = "model.tie_embeddings=true"
NEVER = "parallelism.reshard_after_forward=never"
ALL_IN_ONE = "training.microbatch_size=4"
MIXED = ("precision.compute=bfloat16",)
NARROW = (*MIXED, "precision.reduce=bfloat16")
WIDE = tuple(f"precision.{what}=float64" for what in ("parameters", "compute", "reduce"))


def recompute(mode: str) -> str:
    return f"training.recompute={mode}"


ON_TWO = {
    "fsdp": degrees(1, 1, 2, 1),
    "tp": (*degrees(1, 1, 1, 2), *MIXED),
    "tp full tied": (*degrees(1, 1, 1, 2), recompute("full"), TIED),
    "1f1b tied": (*degrees(2, 1, 1, 1), *schedule("1F1B"), TIED),
}
ON_FOUR = {
    "fsdp": degrees(1, 1, 4, 1),
    "fsdp tied mixed never": (*degrees(1, 1, 4, 1), TIED, NEVER, *MIXED),
    "fsdp one microbatch": (*degrees(1, 1, 4, 1), ALL_IN_ONE, *NARROW),
    "fsdp few words": (*degrees(1, 1, 4, 1), "model.vocab_size=2"),
    "hsdp full": (*degrees(1, 2, 2, 1), recompute("full"), *NARROW),
    "replicated": (*degrees(1, 4, 1, 1), *WIDE),
    "fsdp tp full": (*degrees(1, 1, 2, 2), recompute("full"), *MIXED),
    "replicated tp selective tied": (*degrees(1, 2, 1, 2), recompute("selective"), TIED),
    "tp copied heads": (*degrees(1, 1, 1, 4), *NARROW),
    "1f1b fsdp tied": (*degrees(2, 1, 2, 1), *schedule("1F1B"), TIED, *MIXED),
    "gpipe tp full": (*degrees(2, 1, 1, 2), *schedule("GPipe"), recompute("full")),
    "an embedding alone": (
        *degrees(2, 1, 1, 2),
        *schedule("1F1B"),
        "parallelism.pipeline_parallel_layers_per_stage=[0,5]",
    ),
    "1f1b four stages": (*degrees(4, 1, 1, 1), *schedule("1F1B"), recompute("selective")),
    "loops hsdp tied": (*degrees(2, 2, 1, 1), *schedule("Interleaved1F1B", 2), TIED),
    "loops of four stages fsdp": (*degrees(2, 1, 2, 1), *schedule("LoopedBFS", 4), "model.n_layers=8"),
    "rounds of five stages fsdp": (*degrees(2, 1, 2, 1), *schedule("Interleaved1F1B", 5), "model.n_layers=10"),
    "zero bubble tp full": (*degrees(2, 1, 1, 2), *schedule("InterleavedZeroBubble", 2), recompute("full")),
    "v tp full tied": (*degrees(2, 1, 1, 2), *schedule("ZBVZeroBubble", 2), recompute("full"), TIED),
    "dual v fsdp": (*degrees(2, 1, 2, 1), *schedule("DualPipeV", 2), "training.microbatch_size=1"),
}
THREE_DIMS = (*degrees(2, 1, 2, 2), *schedule("1F1B"), recompute("full"), TIED, *MIXED)


def differences(cases: dict[str, tuple[str, ...]], folder: Path) -> list[str]:
    """What no rank should have: records that were sent and not predicted, or the other way round."""
    jobs = [job(folder, *overrides) for overrides in cases.values()]
    found = []
    for name, one, steps in zip(cases, jobs, record_steps(jobs, folder), strict=True):
        for rank, step in enumerate(steps):
            coordinate = one.mesh.coordinate(rank)
            predicted = traffic(of_job(one), coordinate["pp"], coordinate["dp_shard"])
            assert step.traffic.total() > 0, "a rank of several sends something"
            found += [
                f"{name}, {one.mesh.describe(rank)}: {step.traffic[record]} not {predicted[record]} of {record}"
                for record in sorted(step.traffic.keys() | predicted.keys())
                if step.traffic[record] != predicted[record]
            ]
    return found


def test_two_ranks_send_what_is_predicted(tmp_path: Path) -> None:
    assert differences(ON_TWO, tmp_path) == []


@pytest.mark.long
def test_four_ranks_send_what_is_predicted(tmp_path: Path) -> None:
    assert differences(ON_FOUR, tmp_path) == []


def test_pieces_make_the_whole(tmp_path: Path) -> None:
    """What is told apart for the time of a step adds up to what is told for the rank."""
    workload = of_job(job(tmp_path, *THREE_DIMS))
    total: Traffic = Counter()
    for stage in (0, 1):
        part = pieces(workload, stage)
        for calls in (part.block_forward, part.block_backward):
            for record, count in calls.items():
                total[record] += count * part.units.blocks * workload.microbatches
        ends = (part.embedding_forward, part.embedding_backward) if stage == 0 else ()
        ends += (part.output_forward, part.output_backward) if stage == 1 else ()
        for calls in ends:
            for record, count in calls.items():
                total[record] += count * workload.microbatches
    predicted = traffic(workload, 0) + traffic(workload, 1)
    on_tp = {
        record: count for record, count in predicted.items() if record.submesh == "tp" and record.phase != "optimizer"
    }
    assert total == on_tp


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    assert traffic(of_job(job(tmp_path)), 0).total() == 0
