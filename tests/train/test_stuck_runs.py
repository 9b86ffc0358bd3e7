"""A rank that is stopped, hangs or leaves out a collective is named, with what the others wait for."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import tiny_job

from koushi.errors import RankFailure
from koushi.job import Job
from koushi.parallel.device_mesh import init_process_group
from koushi.run_folder import CHECKPOINTS
from koushi.train.launch import launch
from koushi.train.resume import RunPlace
from koushi.train.step import TrainStep
from koushi.train.trainer import train_rank
from koushi.verify.record import record_jobs

AT_STEP = 2

Fault = Callable[[TrainStep], None]


def faulty(job: Job, *, place: RunPlace, culprit: int, fault: Fault) -> None:
    """Worker: train, but ``fault`` befalls the rank ``culprit`` before it computes step ``AT_STEP``."""
    real, steps = TrainStep.compute, [0]

    def compute(self: TrainStep, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps[0] += 1
        if int(os.environ["RANK"]) == culprit and steps[0] == AT_STEP:
            fault(self)
        return real(self, tokens, labels)

    TrainStep.compute = compute  # type: ignore[method-assign]  # in this forked rank only
    train_rank(job, place=place)


def stop(step: TrainStep) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(step: TrainStep) -> None:
    time.sleep(600)


def leave_out(step: TrainStep) -> None:
    """Count this rank's tokens without asking the others."""
    step._total_tokens = lambda labels: torch.tensor(32)  # type: ignore[method-assign]


def stop_soon(seconds: float, step: TrainStep) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def failure(folder: Path, culprit: int, fault: Fault, *degrees: str) -> str:
    # A launcher that gave a stopped rank its grace would never come back.
    job = tiny_job(folder, "run.timeout=2", "run.grace=36000", "checkpoint.every=500", "training.steps=1000", *degrees)
    (folder / CHECKPOINTS).mkdir()
    worker = partial(faulty, place=RunPlace(folder), culprit=culprit, fault=fault)
    with pytest.raises(RankFailure) as caught:
        launch(worker, job)
    return str(caught.value)


# Where two sub-meshes wait for the same rank, the one whose wait began first is told; that may be either.
STOPPED = [
    (("--tp", "2"), 1, ["tp (ranks 0 1)"], "rank 1 (tp=1)"),
    (("--dp-shard", "2"), 0, ["dp_shard (ranks 0 1)"], "rank 0 (dp_shard=0)"),
    (("--dp-replicate", "2"), 1, ["dp_replicate (ranks 0 1)"], "rank 1 (dp_replicate=1)"),
    (("--pp", "3"), 1, ["pp (ranks 0 1)", "pp (ranks 1 2)"], "rank 1 (pp=1)"),
    (
        ("--dp-shard", "2", "--tp", "2"),
        2,
        ["dp_shard (ranks 0 2, tp=0)", "tp (ranks 2 3, dp_shard=1)"],
        "rank 2 (dp_shard=1 tp=0)",
    ),
    (("--pp", "2", "--tp", "2"), 0, ["pp (ranks 0 2, tp=0)", "tp (ranks 0 1, pp=0)"], "rank 0 (pp=0 tp=0)"),
]


@pytest.mark.long
@pytest.mark.parametrize(("degrees", "culprit", "places", "who"), STOPPED, ids=lambda value: str(value))
def test_a_stopped_rank_is_named_with_its_sub_mesh(
    degrees: tuple[str, ...], culprit: int, places: list[str], who: str, tmp_path: Path
) -> None:
    headline, *lines = failure(tmp_path, culprit, stop, *degrees).splitlines()
    where = "|".join(re.escape(place) for place in places)
    told = re.match(
        rf"an? \w+ of [\d.]+ \w+( from rank \d)? on ({where}) waited \d+\.\d s in step {AT_STEP}: {re.escape(who)} has "
        r"not arrived; its process is stopped \(SIGSTOP, or a debugger\); it last finished an? .* ago, in step [12]$",
        headline,
    )
    assert told is not None, headline
    members = told.group(2).split("(ranks ")[1].split(",")[0].rstrip(")").split()
    assert len(members) == 2
    for member, line in zip(members, lines, strict=False):
        assert line.startswith(f"  rank {member} ("), lines


def late(job: Job, folder: Path) -> None:
    """Worker: verify's, but rank 1 does not come to build the mesh."""
    if os.environ["RANK"] == "1":
        init_process_group(torch.device("cpu"), job.config.run.timeout)
        time.sleep(600)
    record_jobs(job, jobs=[job], steps=1, folder=folder)


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(3))
def test_a_rank_that_does_not_come_to_build_the_mesh_is_named_at_the_limit(attempt: int, tmp_path: Path) -> None:
    """Whichever of two ranks gloo has the other wait for, which the ports that they happen to get decide."""
    with pytest.raises(RankFailure) as failed:
        launch(partial(late, folder=tmp_path), tiny_job(tmp_path, "run.timeout=4", "--dp-shard", "2"))
    told = re.search(r"on all ranks waited (\d+\.\d) s: rank 1 \(dp_shard=1\) has not arrived", str(failed.value))
    assert told is not None, failed.value
    assert 4 <= float(told.group(1)) < 20, "gloo's own limit is five times run.timeout"


@pytest.mark.long
def test_a_rank_that_hangs_in_python_is_named_with_its_stack(tmp_path: Path) -> None:
    text = failure(tmp_path, 1, hang, "--dp-replicate", "2", "--pp", "2")
    told = re.search(r"\(ranks (0 1, pp=0|1 3, dp_replicate=1)\) waited ", text)
    assert told is not None, text
    others = "2 3" if told.group(1).startswith("0 1") else "0 2"
    assert ": rank 1 (pp=0 dp_replicate=1) has not arrived; it last finished a" in text
    assert f"waiting too, for these or for one another: ranks {others}" in text
    stack = text[text.index("rank 1 is in Python at") :].splitlines()
    assert re.search(r"test_stuck_runs\.py\", line \d+ in hang$", stack[1])


@pytest.mark.long
@pytest.mark.parametrize(("degrees", "where"), [(("--dp-shard", "2", "--tp", "2"), "dp_shard (ranks 1 3, tp=1)")])
def test_a_rank_that_leaves_out_a_collective_is_named(degrees: tuple[str, ...], where: str, tmp_path: Path) -> None:
    text = failure(tmp_path, 3, leave_out, *degrees)
    apart = re.search(rf"the ranks on {re.escape(where)} have gone apart: as call \d+ of the group rank (\d) .*", text)
    assert apart is not None, text
    assert "rank 1 (dp_shard=0 tp=1) has an all_reduce of 8 B" in apart.group()
    assert "rank 3 (dp_shard=1 tp=1) has an all_gather of " in apart.group()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_random_rank_stopped_at_a_random_moment_is_named(seed: int, tmp_path: Path) -> None:
    choice = random.Random(seed)
    culprit = choice.randrange(4)
    text = failure(tmp_path, culprit, partial(stop_soon, choice.uniform(0, 0.1)), "--dp-shard", "2", "--tp", "2")
    who = f"rank {culprit} (dp_shard={culprit // 2} tp={culprit % 2})"
    assert re.search(rf"waited \d+\.\d s in step \d+: {re.escape(who)} has .*its process is stopped", text), text
