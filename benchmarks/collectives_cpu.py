"""What tensor parallel's collectives cost over gloo on this machine, against torch's own ring.

    python benchmarks/collectives_cpu.py [--ranks 2 4] [--rounds 5]

Activations of 512 tokens × 256 channels in float32. The two sides of each row take turns, 20 calls at a time;
printed is the median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from koushi.config.schema import JobConfig
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import llama_size
from koushi.parallel.collectives import all_gather, reduce_scatter
from koushi.train.launch import launch

CALLS = 20
SHAPE = (1, 512, 256)


def milliseconds(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1000


def measure(job: Job, *, rounds: int) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None, "the process group was just made"
    degree = group.size()
    whole = torch.randn(SHAPE)
    piece = whole[:, : SHAPE[1] // degree].contiguous()
    functional = torch.ops._c10d_functional

    def ring_gather() -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_into_tensor(piece.view(-1), degree, group.group_name))

    def ring_scatter() -> torch.Tensor:
        return functional.wait_tensor(functional.reduce_scatter_tensor(whole.view(-1), "sum", degree, group.group_name))

    rows = {
        "all-gather": (lambda: all_gather(piece, 1, group), ring_gather),
        "reduce-scatter": (lambda: reduce_scatter(whole, 1, group), ring_scatter),
    }
    for name, (ours, ring) in rows.items():
        pairs = [(milliseconds(ours), milliseconds(ring)) for _ in range(rounds + 1)][1:]
        exchange, around = (statistics.median(side) for side in zip(*pairs, strict=True))
        if dist.get_rank() == 0:
            print(f"| {degree} | {name} | {exchange:.2f} | {around:.2f} | {exchange / around:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| ranks | collective | all-to-all ms | ring ms | ratio |\n|---|---|---|---|---|", flush=True)
    for ranks in arguments.ranks:
        config = JobConfig()
        size = llama_size(config.model)
        job = Job(config, size, MeshSpec.of(tp=ranks), (range(size.n_layers),), "collectives", Path("."))
        launch(partial(measure, rounds=arguments.rounds), job)


if __name__ == "__main__":
    main()
