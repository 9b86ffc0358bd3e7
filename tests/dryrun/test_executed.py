"""What is predicted is what is executed: collectives, FLOPs and memory of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from executed import computed, differing, executed, predicted
from executed_cases import quick, thorough
from parity_cases import Case
from parity_run import chunks

from koushi.dryrun.ranks import rank_classes
from koushi.dryrun.trace import RankTrace
from koushi.job import Job


def test_some_ranks_are_alike(tmp_path: Path) -> None:
    jobs = [one.job(tmp_path) for one in (*quick(), *thorough())]
    assert sum(len(rank_classes(job)) for job in jobs) < sum(job.mesh.world_size for job in jobs) / 2


def hold_against_each_other(cases: Sequence[Case], folder: Path) -> None:
    assert cases, "no cases to run"
    jobs = [one.job(folder) for one in cases]
    expected, real, sent = predicted(jobs), computed(jobs), executed(jobs, folder)
    for one, job, *ranks in zip(cases, jobs, expected, real, sent, strict=True):
        for prediction, with_kernels, with_gloo in zip(*ranks, strict=True):
            assert prediction.ledger.events, f"{one.name}: nothing was recorded"
            assert not differing(prediction, with_kernels), one.name
            # gloo keeps what it sends until it is through, so that the peak has a message more or less.
            wrong = [text for text in differing(prediction, with_gloo) if not text.startswith(("peak", "resting"))]
            assert not wrong, f"{one.name}, rank {prediction.rank}: {wrong}"
            messages = sum(event.collective.bytes for event in prediction.ledger.events)
            assert 0 <= with_gloo.peak.bytes - prediction.peak.bytes <= messages, one.name
        same_within_classes(job, ranks[0], one.name)


def same_within_classes(job: Job, traces: Sequence[RankTrace], name: str) -> None:
    """One rank of a class stands for all of it."""
    for one in rank_classes(job):
        first = traces[one.representative]
        for trace in (traces[rank] for rank in one.ranks[1:]):
            assert trace.shapes == first.shapes and trace.flops == first.flops, name
            assert trace.traffic == first.traffic and trace.flops_before == first.flops_before, name
            assert trace.resting == first.resting, name
            # Ranks that count parameters copied over tp hold a few norms more; no peak lies there.
            assert trace.peak.bytes == first.peak.bytes, name


@pytest.mark.parametrize("cases", chunks(quick()), ids=lambda cases: f"world{cases[0].world}")
def test_a_few_layouts(cases: list[Case], tmp_path: Path) -> None:
    hold_against_each_other(cases, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("cases", chunks(thorough()), ids=lambda cases: f"world{cases[0].world}")
def test_many_layouts(cases: list[Case], tmp_path: Path) -> None:
    hold_against_each_other(cases, tmp_path)
