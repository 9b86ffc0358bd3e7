"""``debug.audit``: the first step's collectives against what was planned, at no change to the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_file, tiny_job

from koushi.job import Job
from koushi.traffic import Collective, Traffic
from koushi.train import audit
from koushi.train.command import train

LAYOUTS = (
    (),
    ("--tp", "2", "training.recompute=full"),
    ("--dp-shard", "2", "model.tie_embeddings=true"),
    ("--pp", "2", "training.microbatch_size=2"),
)
EXTRA = Collective("dp_shard", "all_gather", "forward", "float32", 1536)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_what_ran_is_what_was_planned_and_trains_alike(
    layout: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_file(tmp_path)
    train(path, layout)
    assert "audit" not in capfd.readouterr().out
    train(path, (*layout, "debug.audit=true", "run.resume=never"))
    lines = [line for line in capfd.readouterr().out.splitlines() if "audit" in line]
    plain, (first, *audited) = rows("tiny"), rows("tiny-2")
    world = tiny_job(tmp_path, *layout).mesh.world_size
    assert lines == [first["audit"]] and first["step"] == 1
    if world == 1:
        assert lines == ["audit: nothing to audit: no collective was planned, and none ran"]
    else:
        assert lines[0].endswith("as predicted") and not lines[0].startswith("audit: 0 "), lines
    for one, other in zip(plain, audited, strict=True):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]


def test_what_is_not_as_planned_is_told_with_both_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = audit.planned

    def planned(job: Job, rank: int) -> Traffic:
        return original(job, rank) + (Traffic({EXTRA: 2}) if rank == 1 else Traffic())

    monkeypatch.setattr(audit, "planned", planned)
    train(tiny_file(tmp_path), ("--dp-shard", "2", "debug.audit=true"))
    said = rows("tiny")[0]["audit"]
    assert said in capfd.readouterr().out
    first, second = said.splitlines()
    assert first == ("warning: audit: on 1 rank of 2 what ran is not what was predicted; on rank 1 (dp_shard=1):")
    assert second == "  dp_shard: all_gather of 1.50 KiB (float32, forward): 2 predicted, 0 ran"
    assert [row["step"] for row in rows("tiny")[1:]] == [1, 2, 3]


def test_a_run_that_goes_on_audits_the_step_it_begins_with(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    options = ("--dp-shard", "2", "debug.audit=true", "checkpoint.every=1", "checkpoint.mode=sync")
    train(path, (*options, "training.steps=1"))
    train(path, options)
    assert [row["step"] for row in rows("tiny") if "audit" in row] == [1, 2]
