"""A dry run of many microbatches says so, and the batch that it names holds as much."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import tiny_file, tiny_job

from koushi.cli import main
from koushi.dryrun import smaller
from koushi.dryrun.extrapolate import MOST_WORK, whole
from koushi.dryrun.smaller import ALIKE, hint, smaller_batch
from koushi.job import Job
from koushi.plan.command import hardware_of
from koushi.plan.plan import Plan, plan
from koushi.plan.workload import of_job

MANY = "training.global_batch_size=48"
WIDE = "model.dim=96"
"""Such that the samples of all microbatches are little of what a rank holds."""


def planned(job: Job) -> Plan:
    return plan(of_job(job), hardware_of(job))


@pytest.mark.parametrize(
    "layout", [[], ["--dp-shard", "2"], ["--dp-shard", "2", "--tp", "2", "training.recompute=full"]]
)
def test_the_smaller_batch_holds_as_much(tmp_path: Path, layout: list[str]) -> None:
    job = tiny_job(tmp_path, WIDE, MANY, *layout)
    found = smaller_batch(job, planned(job))
    assert found is not None
    other = tiny_job(tmp_path, WIDE, f"training.global_batch_size={found.global_batch_size}", *layout)
    assert found.microbatches == other.microbatches <= job.microbatches / 2
    assert found.memory == planned(other).memory.device
    (whole_batch,), (part,) = (whole(one, "cpu", [0]) for one in (job, other))
    assert part.peak.bytes == pytest.approx(whole_batch.peak.bytes, rel=ALIKE)


def test_few_microbatches_need_no_hint(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, MANY)
    assert job.microbatches * job.size.n_layers < MOST_WORK
    assert hint(job) is None


def test_stages_hold_more_with_every_microbatch(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "training.global_batch_size=512", "--pp", "2")
    assert smaller_batch(job, planned(job)) is None
    assert hint(job) == f"all {job.microbatches} microbatches are run, and the time grows with them"


def test_it_is_said_at_the_start_though_stderr_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smaller, "MOST_WORK", 10)
    with pytest.raises(SystemExit) as ended:
        main(["dry-run", str(tiny_file(tmp_path)), WIDE, MANY, "--dp-shard", "2"])
    assert ended.value.code == 0
    said = r"note: all \d+ microbatches are run, and the time grows with them; with training.global_batch_size=\d+, "
    assert re.match(said, capsys.readouterr().err)
