"""The torch mesh of a world, and this process's device."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import alone

from koushi.errors import TrainingError
from koushi.mesh import MeshSpec
from koushi.parallel.device_mesh import (
    ParallelDims,
    agree_on_start,
    build_mesh,
    let_segments_grow,
    local_device,
    resolve_device,
)


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    def worker() -> None:
        with pytest.raises(TrainingError, match=r"dp_shard=2, cp=1, tp=1\] needs 2 processes, but 1 were started"):
            build_mesh(MeshSpec.of(dp_shard=2), "cpu")
        with pytest.raises(TrainingError, match="start 4, or change the degrees"):
            ParallelDims(tp=4).build_mesh("cpu")

    alone(worker, tmp_path)


def test_dims_of_degree_1_exist(tmp_path: Path) -> None:
    def worker() -> None:
        mesh = build_mesh(MeshSpec.of(), "cpu")
        assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert [mesh[name].size() for name in mesh.mesh_dim_names] == [1] * 5
        assert mesh["dp_replicate", "dp_shard"].shape == (1, 1)

    alone(worker, tmp_path)


def test_degrees_and_mesh_say_the_same() -> None:
    dims = ParallelDims(pp=2, dp_replicate=3, dp_shard=4, tp=5)
    assert dims.spec == MeshSpec.of(pp=2, dp_replicate=3, dp_shard=4, tp=5)
    assert dims.world_size == 120
    assert ParallelDims.of(dims.spec) == dims
    assert ParallelDims().world_size == 1


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (resolve_device("auto"), resolve_device("cpu")) == ("cpu", "cpu")
    with pytest.raises(TrainingError, match=r"run\.device is cuda, but .* use run\.device=cpu"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [resolve_device(choice) for choice in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_segments_grow_unless_the_user_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    let_segments_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    let_segments_grow()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"


def test_a_process_has_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == torch.device("cuda", 3)
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device("cuda") == torch.device("cuda", 0)


def test_ranks_of_several_nodes_agree_on_a_start_whatever_the_starts_before_left() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    store.set("asked/1", "a rank that is gone")  # it asked, was answered, and never heard
    store.set("answer/a rank that is gone", "a start that is over")
    seen = []
    for _ in range(2):
        with ThreadPoolExecutor(3) as ranks:
            names = list(ranks.map(lambda rank: agree_on_start(store, rank, 3, 20), range(3)))
        assert len(set(names)) == 1
        seen.append(names[0])
    assert len({*seen, "a start that is over"}) == 3


def test_ranks_that_do_not_come_are_told() -> None:
    with pytest.raises(TrainingError, match=r"after 0 s \(run\.timeout\) 2 of 3 ranks have not joined: 1, 2; see"):
        agree_on_start(dist.HashStore(), 0, 3, 0)
