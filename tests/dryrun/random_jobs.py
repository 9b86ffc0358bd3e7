"""Jobs drawn at random, odd ones among them, and whether plan and dry run part over any.

``python tests/dryrun/random_jobs.py --seed 7 --seconds 600`` looks for more than the tests have time for, and prints
the overrides of every job that has a finding, with what is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from koushi.check.check import check
from koushi.config.load import load
from koushi.dryrun.command import run_dry
from koushi.dryrun.report import reading, text
from koushi.errors import KoushiError
from koushi.job import Job
from koushi.schedules import SCHEDULES

Overrides = tuple[str, ...]


def _model(random: Random) -> Iterator[tuple[str, object]]:
    """Real sizes, at which memory tells; and odd small ones."""
    real = random.random() < 0.6
    heads = random.choice([8, 16, 24, 32, 64] if real else [1, 2, 3, 4, 6, 8, 12])
    dim = heads * random.choice([64, 128] if real else [2, 8, 16, 64])
    yield "model.n_heads", heads
    yield "model.n_kv_heads", random.choice([count for count in range(1, heads + 1) if heads % count == 0])
    yield "model.dim", dim
    yield "model.ffn_dim", random.choice([2 * dim, 4 * dim] if real else [1, 6, 48, 97, 160, 512])
    yield "model.n_layers", random.choice([1, 2, 3, 4, 5])
    yield "model.vocab_size", random.choice([2, 3, 7, 60, 512, 2048, 32000, 128256, 151936, 256001])
    yield "model.tie_embeddings", random.choice(["true", "false"])
    tokens = [512, 2048, 4096, 8192, 1000, 777, 1023] if real else [1, 2, 7, 12, 13, 24, 96, 97, 240, 255]
    yield "training.seq_len", random.choice(tokens)


def _layout(random: Random, layers: int) -> Iterator[tuple[str, object]]:
    pp, per_rank = random.choice([1, 1, 2, 2, 3]), random.choice([1, 2, 3])
    replicate, shard = random.choice([1, 1, 2, 3]), random.choice([1, 2, 2, 3, 5, 7, 8])
    microbatch = random.choice([1, 1, 2, 3, 4])
    yield "parallelism.pipeline_parallel_degree", pp
    yield "parallelism.tensor_parallel_degree", random.choice([1, 1, 2, 2, 3, 4, 8])
    yield "parallelism.data_parallel_replicate_degree", replicate
    yield "parallelism.data_parallel_shard_degree", shard
    yield "parallelism.pipeline_parallel_schedule", random.choice(list(SCHEDULES))
    yield "parallelism.reshard_after_forward", random.choice(["auto", "always", "never"])
    yield "training.microbatch_size", microbatch
    yield "training.global_batch_size", microbatch * random.choice([1, 2, 3, 4, 5]) * replicate * shard
    if pp > 1 and random.random() < 0.4:
        yield "parallelism.pipeline_parallel_stages_per_rank", per_rank
        if random.random() < 0.6:
            holders = [random.randrange(pp * per_rank) for _ in range(layers)]
            counts = [holders.count(stage) for stage in range(pp * per_rank)]
            yield "parallelism.pipeline_parallel_layers_per_stage", counts


def _step(random: Random) -> Iterator[tuple[str, object]]:
    yield "training.recompute", random.choice(["none", "selective", "full"])
    yield "training.max_grad_norm", random.choice(["1.0", "1.0", "1.0", "null"])
    yield "precision.compute", random.choice(["float32", "bfloat16"])
    yield "precision.reduce", random.choice(["float32", "float32", "bfloat16"])
    yield "validation.every", random.choice([0, 0, 0, 1])
    yield "run.device", random.choice(["cpu", "cuda"])
    yield "data.source", "synthetic"


def drawn(random: Random) -> Overrides:
    """Overrides of a run file; ``koushi check`` refuses most of them."""
    model = dict(_model(random))
    layers = model["model.n_layers"]
    assert isinstance(layers, int), "a count"
    every = {**model, **dict(_layout(random, layers)), **dict(_step(random))}
    return tuple(f"{key}={value}" for key, value in every.items())


def random_jobs(folder: Path, seed: int) -> Iterator[tuple[Overrides, Job]]:
    """Without end, those that ``koushi check`` accepts; the same for the same ``seed``."""
    random, path = Random(seed), folder / "random.yaml"
    path.write_text("model: {name: llama3-debug}\n", encoding="utf-8")
    while True:
        overrides = drawn(random)
        try:
            job = check(load(path, overrides))
        except KoushiError:
            continue
        yield overrides, job


def wrong(job: Job) -> list[str]:
    """What the audit finds, and where plan and dry run part; all that the command prints is made besides."""
    found = run_dry(job)
    assert text(found.job, found.kind, found.classes, found.traces) and reading(found.plan), "nothing is said"
    return [*map(str, found.findings), *found.disagreements]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no other job is begun")
    asked = parser.parse_args()
    until, done, bad = time.monotonic() + asked.seconds, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for overrides, job in random_jobs(Path(folder), asked.seed):
            if time.monotonic() > until:
                break
            found = wrong(job)
            done, bad = done + 1, bad + bool(found)
            if found:
                print(" ".join(overrides), *found, "", sep="\n", flush=True)
    print(f"{done} jobs, {bad} with something wrong")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
