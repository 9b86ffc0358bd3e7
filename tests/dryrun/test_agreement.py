"""Plan and dry run hold the same, under every pipeline schedule and on both kinds of device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.pipelining import PipelineStage

from koushi.check.check import check
from koushi.config.load import load
from koushi.dryrun import agreement
from koushi.dryrun.agreement import disagreements
from koushi.dryrun.forks import in_forks
from koushi.dryrun.trace import RankTrace, trace
from koushi.dryrun.world import DeviceKind
from koushi.job import Job
from koushi.plan.fullest import alike_stages
from koushi.plan.sharded import step_span
from koushi.plan.spans import GRADIENTS, STREAMS
from koushi.plan.workload import of_job
from koushi.schedules import SCHEDULES

BASE = """
model: {name: llama3-debug, vocab_size: 256, dim: 128, n_layers: 4, n_heads: 8, n_kv_heads: 4, ffn_dim: 384}
training: {seq_len: 128, global_batch_size: 8, microbatch_size: 1}
data: {source: synthetic}
"""
SHAPES = {
    "activations": ("training.seq_len=512",),
    "parameters": ("training.seq_len=16", "model.dim=256", "model.ffn_dim=768"),
    "words": ("training.seq_len=64", "model.vocab_size=8192"),
}
"""By what there is most of."""
SCHEDULE = "parallelism.pipeline_parallel_schedule="


PARTED = {
    "a tied table": ("--dp-shard", "2", "model.tie_embeddings=true", *SHAPES["words"]),
    "gloo's sums": ("--dp-shard", "2", "training.recompute=full", *SHAPES["words"]),
    "tied ends": ("--pp", "2", f"{SCHEDULE}Interleaved1F1B", "model.tie_embeddings=true", *SHAPES["words"]),
    "made again in two halves": (
        "--pp",
        "2",
        f"{SCHEDULE}ZBVZeroBubble",
        "training.recompute=full",
        *SHAPES["activations"],
    ),
    "kept for two halves": (
        "--pp",
        "2",
        f"{SCHEDULE}ZBVZeroBubble",
        "training.recompute=selective",
        *SHAPES["activations"],
    ),
    "sums that come late": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}InterleavedZeroBubble", "precision.compute=bfloat16"),
        *SHAPES["parameters"],
    ),
    "gradients that meet once their operation is through": (
        *("--tp", "4", "model.n_kv_heads=1", "model.n_layers=1", "training.recompute=full", *SHAPES["activations"]),
    ),
    "gathers in the one forward": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}GPipe", "training.global_batch_size=2", *SHAPES["activations"]),
        *("model.dim=256", "model.ffn_dim=1024"),
    ),
    "a cast at the end of backward": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}1F1B", "precision.reduce=bfloat16", "training.recompute=full"),
        *("model.n_layers=2", "model.ffn_dim=2048", "training.seq_len=512", "model.vocab_size=4096"),
    ),
    "a gradient that is received into a buffer which stays": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}GPipe", "training.recompute=full", "training.seq_len=512"),
        "model.ffn_dim=16",
    ),
    "a gradient that has been sent": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}GPipe", "training.recompute=full", "training.seq_len=160"),
        *("training.global_batch_size=4", "model.vocab_size=16", "model.dim=256", "model.ffn_dim=256"),
        "parallelism.pipeline_parallel_layers_per_stage=[3,1]",
    ),
    "a last stage without layers": (
        *("--pp", "2", f"{SCHEDULE}1F1B", "training.seq_len=512", "model.vocab_size=16"),
        "parallelism.pipeline_parallel_layers_per_stage=[4,0]",
    ),
    "an output that is sent and kept for the other half": (
        *("--pp", "2", f"{SCHEDULE}InterleavedZeroBubble", "training.seq_len=512", "training.global_batch_size=2"),
        *("model.vocab_size=16", "model.ffn_dim=8", "parallelism.pipeline_parallel_layers_per_stage=[2,1,1,0]"),
    ),
    "norms in two parts, each with tensor parallel": (
        *("--pp", "2", "--tp", "2", f"{SCHEDULE}ZBVZeroBubble", "training.seq_len=512", "model.vocab_size=16"),
        *("model.ffn_dim=8", "training.recompute=full"),
    ),
    "a norm whose gradient is the first of its input": (
        *("training.seq_len=512", "model.vocab_size=16", "model.ffn_dim=8", "training.global_batch_size=1"),
        "model.n_layers=1",
    ),
    "what fused attention holds inside": (
        *("--pp", "2", f"{SCHEDULE}1F1B", "precision.compute=bfloat16", "training.seq_len=512", "model.ffn_dim=6"),
        *("training.recompute=full", "model.vocab_size=16"),
    ),
    "what a stage's last block lets go between its weights": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}InterleavedZeroBubble", "training.global_batch_size=2"),
        *("model.vocab_size=16", "model.dim=256", "model.ffn_dim=1024"),
    ),
    "a second half that still holds the inputs of what was made again": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}InterleavedZeroBubble", "training.global_batch_size=2"),
        *("model.vocab_size=16", "model.dim=256", "model.ffn_dim=1024", "model.n_layers=6"),
        "training.recompute=selective",
    ),
    "a cast of a weight's gradient while its operation's is there": (
        *("--pp", "2", f"{SCHEDULE}InterleavedZeroBubble", "training.global_batch_size=1", "training.seq_len=256"),
        *("model.vocab_size=16", "model.dim=256", "model.ffn_dim=1024", "model.n_layers=6"),
        "precision.compute=bfloat16",
    ),
    "a norm that is asked for one of its gradients": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}ZBVZeroBubble", "training.global_batch_size=2"),
        *("model.vocab_size=16", "model.dim=256", "model.n_layers=2", "training.seq_len=256"),
        "parallelism.pipeline_parallel_layers_per_stage=[0,1,1,0]",
    ),
    "a last output that stays": (
        *("--pp", "2", "--dp-shard", "2", f"{SCHEDULE}GPipe", "training.global_batch_size=2", *SHAPES["words"]),
        "training.seq_len=256",
    ),
    "KV heads fewer than tp: gradients of every head's rows, added up in one flat tensor": (
        *("--tp", "4", "model.n_heads=4", "model.n_kv_heads=2", "model.dim=256", "model.vocab_size=16"),
        "training.seq_len=16",
    ),
    "the same in a pipeline": (
        *("--pp", "2", "--tp", "4", "model.n_heads=4", "model.n_kv_heads=2", "model.dim=256", "model.vocab_size=16"),
        *("training.seq_len=16", "training.global_batch_size=2"),
    ),
    "the same in bfloat16, with data parallel": (
        *("--tp", "4", "--dp-replicate", "2", "model.n_heads=4", "model.n_kv_heads=2", "model.dim=256"),
        *("model.vocab_size=16", "training.seq_len=16", "precision.compute=bfloat16"),
    ),
}
"""Where they parted once."""


@pytest.fixture(autouse=True)
def to_the_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """These jobs are small; and mechanisms that are known leave next to nothing."""
    monkeypatch.setattr(agreement, "SLACK", 0)
    monkeypatch.setattr(agreement, "ALLOWED", 0.002)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_where_they_parted_once(kind: DeviceKind, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    jobs = {name: check(load(path, (*overrides, f"run.device={kind}"))) for name, overrides in PARTED.items()}
    assert apart(jobs, kind) == []


@pytest.mark.parametrize("sharing", ["--dp-replicate", "--dp-shard"])
def test_reductions_have_the_pool_that_is_planned(sharing: str, tmp_path: Path) -> None:
    """torch makes what they give, and a group of one its copy, on a stream of their own."""
    path = tmp_path / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    mixed = ("precision.compute=bfloat16", "run.device=cuda", *SHAPES["parameters"])
    one = check(load(path, (sharing, "2", *mixed)))
    (stage,) = alike_stages(of_job(one), 0, "gpu")
    degrees = (one.mesh.degree(name) for name in ("dp_shard", "dp_replicate"))
    planned = step_span(stage.stage, *degrees, one.microbatches).stream_highest[STREAMS.index(GRADIENTS)]
    (found,) = in_forks(_traced, [(one, 0, "cuda")])
    assert planned > 0 and planned in found.peak.pools


def test_messages_keep_their_direction_whoever_else_watches_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        monkeypatch.setattr(PipelineStage, name, getattr(PipelineStage, name))
    wraps_around = job(tmp_path, "Interleaved1F1B", "parameters", "cpu")
    assert apart({"watched": wraps_around}, "cpu") == []


def job(folder: Path, schedule: str, shape: str, kind: DeviceKind, *overrides: str) -> Job:
    path = folder / "run.yaml"
    path.write_text(BASE, encoding="utf-8")
    pipeline = ("--pp", "2", f"parallelism.pipeline_parallel_schedule={schedule}", f"run.device={kind}")
    return check(load(path, (*pipeline, *SHAPES[shape], *overrides)))


def apart(jobs: dict[str, Job], kind: DeviceKind) -> list[str]:
    """Where the two part, by the names of the jobs."""
    ranks = [
        (name, one, one.mesh.rank({"pp": pp})) for name, one in jobs.items() for pp in range(one.mesh.degree("pp"))
    ]
    traces = in_forks(_traced, [(one, rank, kind) for _, one, rank in ranks])
    return [
        f"{name}: {text}"
        for (name, one, _), found in zip(ranks, traces, strict=True)
        for text in disagreements(one, kind, [found])
    ]


def _traced(item: tuple[Job, int, DeviceKind]) -> RankTrace:
    return trace(*item)


@pytest.mark.parametrize(
    ("schedule", "shape", "kind"), [("Interleaved1F1B", "activations", "cpu"), ("ZBVZeroBubble", "parameters", "cuda")]
)
def test_under_one_schedule(schedule: str, shape: str, kind: DeviceKind, tmp_path: Path) -> None:
    assert apart({shape: job(tmp_path, schedule, shape, kind)}, kind) == []


def cases(folder: Path, kind: DeviceKind) -> Iterator[tuple[str, Job]]:
    for schedule, needs in SCHEDULES.items():
        for shape in SHAPES:
            yield f"{schedule}, {shape}", job(folder, schedule, shape, kind)
        if needs.splits_backward:
            yield f"{schedule}, mixed", job(folder, schedule, "activations", kind, "precision.compute=bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_they_agree(kind: DeviceKind, tmp_path: Path) -> None:
    assert apart(dict(cases(tmp_path, kind)), kind) == []
