"""Whatever job ``koushi check`` accepts, the audit finds nothing and plan and dry run agree."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from random_jobs import random_jobs, wrong

from koushi.check.check import check
from koushi.config.load import load

ODD = {
    "a table with fewer rows than shards": ("--dp-shard", "3", "--tp", "2", "model.vocab_size=2"),
    "a tied table that not every rank has of": (
        *("--pp", "2", "--dp-shard", "4", "model.vocab_size=3", "model.tie_embeddings=true"),
        "training.global_batch_size=16",
    ),
    "norms that not every rank has of": ("--tp", "2", "--dp-shard", "7", "model.dim=16", "model.n_heads=2"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_jobs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    sizes = "n_layers: 2, dim: 32, n_heads: 4, n_kv_heads: 2, ffn_dim: 64"
    path.write_text(f"model: {{name: llama3-debug, {sizes}}}\ndata: {{source: synthetic}}\n", encoding="utf-8")
    degree = int(ODD[name][ODD[name].index("--dp-shard") + 1])
    batch = (f"training.global_batch_size={2 * degree}", "training.seq_len=16", "run.device=cpu")
    assert wrong(check(load(path, (*batch, *ODD[name])))) == []


def found_wrong(folder: Path, seed: int, count: int) -> dict[str, list[str]]:
    jobs = islice(random_jobs(folder, seed), count)
    return {" ".join(overrides): found for overrides, job in jobs if (found := wrong(job))}


def test_a_few_random_jobs(tmp_path: Path) -> None:
    assert found_wrong(tmp_path, seed=1, count=3) == {}


@pytest.mark.long
def test_many_random_jobs(tmp_path: Path) -> None:
    assert found_wrong(tmp_path, seed=2, count=30) == {}


def test_draws_are_the_same_for_a_seed_and_differ_between_seeds(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[tuple[str, ...]]:
        return [overrides for overrides, _ in islice(random_jobs(tmp_path, seed), 3)]

    assert drawn(3) == drawn(3) != drawn(4)
