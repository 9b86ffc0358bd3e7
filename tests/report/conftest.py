"""Jobs of any lattice, with a model small enough to be cut over it; a browser for their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import chromium
from playwright.sync_api import Browser

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job

WIDE = "model: {name: llama3-debug, n_layers: 16, n_heads: 16, n_kv_heads: 8, vocab_size: 2048, ffn_dim: 768}\n"
Jobs = Callable[..., Job]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """``jobs(*overrides, pp=1, dp_replicate=1, dp_shard=1, tp=1, text=...)``: a checked job, 2 microbatches a rank."""

    def make(
        *overrides: str, pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1, text: str = WIDE
    ) -> Job:
        path = tmp_path / "small.yaml"
        path.write_text(text, encoding="utf-8")
        degrees = [f"--pp={pp}", f"--dp-replicate={dp_replicate}", f"--dp-shard={dp_shard}", f"--tp={tp}"]
        batch = f"training.global_batch_size={dp_replicate * dp_shard * 2 * pp}"
        return check(load(path, [batch, "training.seq_len=96", *degrees, *overrides]))

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
