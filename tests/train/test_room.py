"""A world that cannot have room is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_file, tiny_job

from koushi.errors import DoesNotFit
from koushi.models.llama.flops import parameter_count
from koushi.train.command import train
from koushi.train.room import refuse_too_large, state_bytes


def test_every_replica_holds_a_copy(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    assert state_bytes(job) == parameter_count(job.size) * 16
    degrees = ("parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2")
    assert state_bytes(tiny_job(tmp_path, *degrees)) == parameter_count(job.size) * 32
    double = ("precision.parameters=float64", "precision.compute=float64", "precision.reduce=float64")
    assert state_bytes(tiny_job(tmp_path, *double)) == parameter_count(job.size) * 32
    refuse_too_large(job)


def test_a_large_model_starts_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("koushi.train.room.os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 1))
    with pytest.raises(DoesNotFit, match=r"AdamW alone, and this machine has 4\.00 KiB") as refused:
        train(tiny_file(tmp_path))
    assert refused.value.exit_code == 3
    assert not (tmp_path / "runs").exists()
