"""Jobs small enough for a unit test, and checks that run on the ranks of one small world."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job
from koushi.train.launch import launch

TINY = """
model: {name: llama3-debug, vocab_size: 32, dim: 16, n_layers: 3, n_heads: 4, n_kv_heads: 2, ffn_dim: 24}
training: {seq_len: 8, global_batch_size: 4, microbatch_size: 1, steps: 3}
optimizer: {lr: 1.0e-2}
data: {source: synthetic}
run: {device: cpu, timeout: 60}
"""

Check = Callable[[], None]


def tiny_file(folder: Path, text: str = TINY) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def tiny_job(folder: Path, *overrides: str) -> Job:
    """The tiny job under ``overrides``, each ``key=value``, as ``check`` accepts it."""
    return check(load(tiny_file(folder), overrides))


def alone(worker: Callable[[], None], folder: Path) -> None:
    """Run ``worker`` as the only rank of a world, in this process."""

    def joined(job: Job) -> None:
        dist.init_process_group("gloo")
        worker()

    launch(joined, tiny_job(folder))


def on_two_ranks(checks: Sequence[Check], folder: Path) -> dict[str, list[str]]:
    """Run ``checks`` one after another in one world of two; what each has to complain of, by its name.

    A check calls its collectives before it asserts, so that one that fails does not hold up its peer.
    """

    def worker(job: Job) -> None:
        torch.manual_seed(0)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        for one in checks:
            try:
                one()
            except Exception:
                path = folder / f"{one.__name__}-{os.environ['RANK']}.json"
                path.write_text(json.dumps(traceback.format_exc()))
        dist.destroy_process_group()

    assert checks, "no checks to run"
    launch(worker, tiny_job(folder, "--dp-shard", "2"))
    return {
        one.__name__: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{one.__name__}-?.json"))]
        for one in checks
    }
