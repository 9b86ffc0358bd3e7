"""Where nothing fits, a search names the smallest of all layouts, whatever makes it so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched import base_of

from koushi.hardware.hardware import load
from koushi.models.llama.sizes import LlamaSize
from koushi.plan.layouts import Question, layouts
from koushi.plan.memory import every_rank
from koushi.plan.search import MISSES, search

SIZE = LlamaSize(vocab_size=32_000, dim=1024, n_layers=3, n_heads=32, n_kv_heads=8, ffn_dim=3072)


@pytest.mark.parametrize(
    ("question", "compute", "alone"),
    [
        (Question(SIZE, 4, 8, 2048, False), "bfloat16", True),
        (Question(replace(SIZE, n_layers=8), 6, 12, 8192, True), "float32", True),
        # Samples so short that gradients which are not added up save more than several samples at a time take.
        (Question(replace(SIZE, vocab_size=128_000), 2, 4, 128, False), "float32", False),
        (Question(replace(SIZE, vocab_size=128_000, dim=4096), 3, 8, 128, False), "bfloat16", False),
        (Question(replace(SIZE, n_layers=1, vocab_size=50_257), 4, 8, 128, False), "bfloat16", False),
        (Question(replace(SIZE, n_layers=8, vocab_size=512, tie_embeddings=True), 6, 4, 128, False), "bfloat16", False),
    ],
)
def test_the_nearest_are_the_smallest_of_all(question: Question, compute: str, alone: bool) -> None:
    shipped = load("h100-sxm-80gb")
    on = replace(shipped, devices_per_node=4, chip=replace(shipped.chip, memory_gib=0.001))
    base = replace(base_of(question), compute=compute)
    every = [
        (max(one.device for one in every_rank(layout.of(base), on)), layout.microbatch_size)
        for layout in layouts(question)
    ]
    result = search(question, base, on)
    assert result.chosen is None
    assert [one.memory for one in result.misses] == [memory for memory, _ in sorted(every)[:MISSES]]
    assert (min(every)[1] == 1) is alone
