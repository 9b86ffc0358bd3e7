"""Small training runs that save, stop and go on, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from koushi.check.check import check
from koushi.checkpoint.files import verify_files
from koushi.checkpoint.folders import step_folder
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.config.load import load
from koushi.job import Job
from koushi.run_folder import CHECKPOINTS
from koushi.train.launch import launch
from koushi.train.resume import RunPlace
from koushi.train.trainer import train_rank

# Rows that no degree divides (uneven and empty FSDP shards), KV heads that are copied at tp 4, a gradient norm that
# is clipped, a learning rate that changes every step.
BASE = """
model: {name: llama3-debug, vocab_size: 40, dim: 24, n_layers: 5, n_heads: 4, n_kv_heads: 2, ffn_dim: 36}
training: {seq_len: 16, global_batch_size: 16, microbatch_size: 2, steps: 10, seed: 7, max_grad_norm: 0.3}
optimizer: {lr: 3.0e-3, eps: 1.0e-6}
lr_schedule: {warmup_steps: 2}
data: {source: synthetic, masked_fraction: 0.4}
checkpoint: {every: 5}
run: {device: cpu, timeout: 120}
"""

Layout = tuple[str, ...]


def layout(pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1, *more: str) -> Layout:
    return (
        f"parallelism.pipeline_parallel_degree={pp}",
        f"parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"parallelism.data_parallel_shard_degree={dp_shard}",
        f"parallelism.tensor_parallel_degree={tp}",
        *more,
    )


ONE = layout()


def run_file(folder: Path, text: str = BASE) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def job_of(folder: Path, *overrides: str) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    return check(load(run_file(folder), overrides))


def train(folder: Path, *overrides: str, source: Path | None = None, worker: Callable[..., None] = train_rank) -> Path:
    """Train the base run in ``folder``, from ``source`` unless it has a checkpoint of its own."""
    job = job_of(folder, *overrides)
    launch(partial(worker, place=RunPlace(folder, source)), job)
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """By step; a step that is told twice fails."""
    found: dict[int, float] = {}
    for row in rows(folder):
        if "loss" in row:
            assert int(row["step"]) not in found, f"step {row['step']} stands twice in {folder}"
            found[int(row["step"])] = row["loss"]
    return found


def checkpoint(folder: Path, step: int) -> Path:
    return step_folder(folder / CHECKPOINTS, step)


def tensors(path: Path) -> dict[str, Tensor]:
    """Every whole tensor of a checkpoint, which is verified on the way."""
    with CheckpointFiles(path) as files:
        verify_files(path, files.manifest)
        return {key: files.read(key) for key in files.manifest.by_key}


def assert_same(left: Path, right: Path) -> None:
    """Every bit of both checkpoints' tensors is the same."""
    mine, theirs = tensors(left), tensors(right)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 3
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key


def flip(path: Path, position: int = -1) -> None:
    """Change one byte of a file; the last one, unless ``position`` says another."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(bytes(data))
