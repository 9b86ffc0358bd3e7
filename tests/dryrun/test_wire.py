"""Predicted is sent: what the dry run records is what gloo puts on the wire, to the byte.

The kernel counts what sockets have sent. Less the bytes that were predicted, nothing but gloo's own
headers may be left, which are all of one size.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from tiny import tiny_job
from wire import HEADER, payload, sent

from koushi.dryrun.audited import record
from koushi.dryrun.forks import in_forks
from koushi.job import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's count of bytes")

TIED = "model.tie_embeddings=true"
V = "parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
ONE_BY_TWO = (
    ("--tp", "2", TIED),
    ("--dp-shard", "2", "training.recompute=full"),
    ("--dp-replicate", "2"),
    ("--pp", "2", TIED),
)
OTHERS = (
    (("--dp-shard", "2", "--tp", "2", "training.recompute=selective"), ("--dp-replicate", "2", "--dp-shard", "2")),
    (("--pp", "2", "--dp-shard", "2", V, "model.n_layers=5", TIED), ("--dp-shard", "4"), ("--tp", "4")),
    (
        ("--pp", "2", "--dp-shard", "2", "--tp", "2", TIED, "training.recompute=full"),
        ("--pp", "2", "--dp-replicate", "2", "--tp", "2", "precision.compute=bfloat16"),
    ),
)


def predicted(job: Job) -> float:
    """Bytes that all ranks together send."""
    records = in_forks(partial(record, job, "cpu"), range(job.mesh.world_size))
    return sum(payload(event) for one in records for event in one.ledger.events if not event.once)


def check(layouts: tuple[tuple[str, ...], ...], folder: Path) -> None:
    jobs = [tiny_job(folder, *layout) for layout in layouts]
    for layout, job, total in zip(layouts, jobs, sent(jobs, folder), strict=True):
        expected = predicted(job)
        headers, rest = divmod(total - expected, HEADER)
        assert rest == 0, f"{layout}: {total} bytes were sent, {expected} predicted"
        assert headers > 0, f"{layout}: less was sent than was predicted"


def test_what_is_predicted_is_sent(tmp_path: Path) -> None:
    check(ONE_BY_TWO, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layouts", OTHERS, ids=lambda layouts: "; ".join(" ".join(one) for one in layouts))
def test_what_is_predicted_is_sent_on_more_ranks(layouts: tuple[tuple[str, ...], ...], tmp_path: Path) -> None:
    check(layouts, tmp_path)
