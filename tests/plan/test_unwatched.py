"""Predicted peaks against those of ordinary steps, which nothing watches but the allocator.

On a CPU, whose kernels and whose norm are not a GPU's; collectives that bring data are measured in
``test_memory.py``, under a dispatch mode.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_memory import CPU, LONG, MIXED, PIPELINE, SHARD, TENSOR, TIED, WITHIN, job, schedule
from unwatched import most_bytes

from koushi.plan.memory import memory
from koushi.plan.workload import of_job

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


def too_far(cases: dict[str, tuple[str, ...]], folder: Path, *, collectives: bool = True) -> list[str]:
    """Cases whose predicted peak is not within 2% of what the allocator gave."""
    jobs = [job(folder, *overrides) for overrides in cases.values()]
    found = []
    for name, one, ranks in zip(cases, jobs, most_bytes(jobs, folder, collectives=collectives), strict=True):
        for pp in range(one.mesh.degree("pp")):
            predicted, measured = memory(of_job(one), pp, CPU), ranks[one.mesh.rank({"pp": pp})]
            error = predicted.active / measured - 1
            if abs(error) > WITHIN:
                found.append(f"{name}, pp={pp}: {measured:,} bytes, {error:+.1%} predicted {predicted.moment}")
    return found


@pytest.mark.long
def test_sums_of_gradients_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(SUMS, tmp_path) == []


@pytest.mark.long
def test_one_process_takes_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(ALONE, tmp_path) == []


@pytest.mark.long
def test_two_stages_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(PIPELINED, tmp_path) == []


@pytest.mark.long
def test_shares_take_what_is_predicted(tmp_path: Path) -> None:
    assert too_far(CUT, tmp_path, collectives=False) == []
