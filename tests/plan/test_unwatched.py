"""Predicted peaks against those of ordinary steps, which nothing watches but the allocator.

On a CPU, whose kernels and whose norm are not a GPU's; collectives that bring data are measured in
``test_memory.py``, under a dispatch mode.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from test_memory import LONG, MIXED, PIPELINE, SHARD, TENSOR, TIED, schedule, too_far
from unwatched import most_bytes

TABLE = (TIED, "model.vocab_size=8192", "model.n_layers=1", "training.seq_len=16", "training.microbatch_size=1")
"""The sum of the tied table's two gradients is the peak."""
SUMS = {
    "tied": TABLE,
    "tied mixed": (*TABLE, *MIXED),
}
ALONE = {
    "selective": (*LONG, "training.recompute=selective"),
}
PIPELINED = {
    "1f1b": (PIPELINE, schedule("1F1B"), *LONG),
}
CUT = {
    "tp": (TENSOR, *LONG),
    "tied tp mixed": (TENSOR, *TABLE, *MIXED),
    "fsdp": (SHARD, *LONG),
}


UNWATCHED = partial(most_bytes, collectives=True)


@pytest.mark.long
def test_sums_of_gradients_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(SUMS, tmp_path, UNWATCHED) == []


@pytest.mark.long
def test_one_process_takes_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(ALONE, tmp_path, UNWATCHED) == []


@pytest.mark.long
def test_two_stages_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(PIPELINED, tmp_path, UNWATCHED) == []


@pytest.mark.long
def test_shares_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(CUT, tmp_path, partial(most_bytes, collectives=False)) == []
