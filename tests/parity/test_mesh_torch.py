"""Every rank's every group of MeshSpec is that of torch's DeviceMesh.

One forked process per mesh takes all its ranks in turn, with torch's fake process group.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from koushi.mesh import MESH_DIMS, MeshSpec
from koushi.parallel.device_mesh import ParallelDims, build_mesh

PAIR = ("dp_replicate", "dp_shard")
FOUR = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Seen:
    """What torch says to one rank."""

    coordinate: dict[str, int]
    groups: dict[tuple[str, ...], tuple[int, ...]]
    indices: dict[str, int]


def _seen(mesh: DeviceMesh) -> Seen:
    names = mesh.mesh_dim_names
    assert names is not None
    place = mesh.get_coordinate()
    assert place is not None
    groups: dict[tuple[str, ...], tuple[int, ...]] = {}
    for name in names:
        groups[(name,)] = tuple(dist.get_process_group_ranks(mesh[name].get_group()))
    pair = mesh[PAIR]
    groups[PAIR] = tuple(pair.mesh.flatten().tolist())
    for name in PAIR:
        assert dist.get_process_group_ranks(pair[name].get_group()) == list(groups[(name,)])
    indices = {name: mesh[name].get_local_rank() for name in names}
    return Seen(dict(zip(names, place, strict=True)), groups, indices)


def _every_rank(make: Callable[[], DeviceMesh], world: int, answers: Connection) -> None:
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        answers.send(_seen(make()))
        dist.destroy_process_group()
    answers.close()


def seen_by_torch(make: Callable[[], DeviceMesh], world: int) -> list[Seen]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_every_rank, args=(make, world, sender))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        process.start()
    sender.close()
    try:
        return [receiver.recv() for _ in range(world)]
    finally:
        process.kill()
        process.join()


def compare(spec: MeshSpec, seen: list[Seen]) -> None:
    assert len(seen) == spec.world_size
    for rank, one in enumerate(seen):
        assert one.coordinate == {name: spec.coordinate(rank)[name] for name in one.coordinate}
        assert {name for names in one.groups for name in names} == set(one.coordinate)
        for names, ranks in one.groups.items():
            assert spec.group(rank, *names) == ranks, f"rank {rank}, {names}"
            assert ranks in spec.groups(*names)
        for name, index in one.indices.items():
            assert spec.index(rank, name) == index
        assert one.groups[PAIR].index(rank) == spec.index(rank, *PAIR)
        assert spec.rank(spec.coordinate(rank)) == rank


SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 1, 2, 1, 2),
    (1, 2, 2, 1, 2),
    (4, 1, 1, 1, 2),
    (1, 1, 8, 1, 1),
    (3, 2, 1, 1, 5),
    (2, 3, 4, 2, 1),
    (2, 2, 4, 1, 8),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_are_those_of_torch(shape: tuple[int, ...]) -> None:
    spec = MeshSpec(MESH_DIMS, shape)
    compare(spec, seen_by_torch(lambda: build_mesh(spec, "cpu"), spec.world_size))


def test_a_mesh_that_a_user_writes_has_the_groups_of_ours() -> None:
    def written() -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2, 4, 8), mesh_dim_names=FOUR)

    seen = seen_by_torch(written, 128)
    assert set(seen[0].groups) == {(name,) for name in FOUR} | {PAIR}
    compare(MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8), seen)
    assert seen[37].groups[("tp",)] == tuple(range(32, 40))


def test_the_public_entry_makes_the_same_mesh() -> None:
    dims = ParallelDims(pp=2, dp_replicate=1, dp_shard=3, tp=2)
    compare(dims.spec, seen_by_torch(lambda: dims.build_mesh("cpu"), 12))
