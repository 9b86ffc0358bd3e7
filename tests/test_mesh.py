"""MeshSpec: ranks, coordinates and groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.mesh import FOLDS, MESH_DIMS, MeshSpec

SHAPES = st.lists(st.integers(1, 3), min_size=len(MESH_DIMS), max_size=len(MESH_DIMS)).map(tuple)
SPECS = SHAPES.map(lambda shape: MeshSpec(MESH_DIMS, shape))
SOME_DIMS = st.sets(st.sampled_from(MESH_DIMS)).map(tuple)

LATTICE = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8)


@given(spec=SPECS, data=st.data())
def test_rank_and_coordinate_are_inverse(spec: MeshSpec, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    coordinate = spec.coordinate(rank)
    assert tuple(coordinate) == spec.names
    assert all(0 <= coordinate[name] < spec.degree(name) for name in spec.names)
    assert spec.rank(coordinate) == rank


@given(spec=SPECS)
def test_the_last_dim_changes_fastest(spec: MeshSpec) -> None:
    ordered = [tuple(spec.coordinate(rank).values()) for rank in range(spec.world_size)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == spec.world_size


@given(spec=SPECS, names=SOME_DIMS)
def test_the_groups_of_a_fold_partition_the_world(spec: MeshSpec, names: tuple[str, ...]) -> None:
    groups = spec.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(spec.world_size))
    assert all(len(group) == spec.degree(*names) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert all(spec.group(rank, *names) == group for rank in group)


@given(spec=SPECS, names=SOME_DIMS, data=st.data())
def test_a_group_shares_every_other_coordinate(spec: MeshSpec, names: tuple[str, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    own = spec.coordinate(rank)
    for peer in spec.group(rank, *names):
        assert all(index == own[name] for name, index in spec.coordinate(peer).items() if name not in names)


@given(spec=SPECS, names=SOME_DIMS, data=st.data())
def test_the_index_in_a_fold_is_the_place_in_its_group(
    spec: MeshSpec, names: tuple[str, ...], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    place = spec.group(rank, *names).index(rank)
    assert spec.index(rank, *names) == place
    assert spec.index(rank, *reversed(names)) == place, "a fold is read in mesh order, however it is written"


def test_the_example_of_128_devices() -> None:
    assert LATTICE.world_size == 128
    assert LATTICE.strides == (64, 32, 8, 8, 1)
    assert LATTICE.coordinate(127) == {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "cp": 0, "tp": 7}
    assert LATTICE.group(37, "tp") == tuple(range(32, 40))
    assert LATTICE.group(37, "dp_shard") == (37, 45, 53, 61)
    assert LATTICE.group(37, "dp_replicate") == (5, 37)
    assert LATTICE.group(37, "pp") == (37, 101)
    assert LATTICE.group(37, "cp") == (37,)
    assert LATTICE.group(37, *FOLDS["data"]) == (5, 13, 21, 29, 37, 45, 53, 61)
    assert LATTICE.index(37, *FOLDS["data"]) == 4
    assert len(LATTICE.groups("tp")) == 16
    assert LATTICE.groups() == tuple((rank,) for rank in range(128))


def test_dims_left_out_of_a_coordinate_count_as_0() -> None:
    assert LATTICE.rank({}) == 0
    assert LATTICE.rank({"dp_replicate": 1, "tp": 5}) == 37


def test_what_people_read() -> None:
    assert str(LATTICE) == "[pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=8]"
    assert LATTICE.describe(37) == "pp=0 dp_replicate=1 dp_shard=0 tp=5"
    assert MeshSpec.of().describe(0) == "the only rank"


def test_equal_meshes_are_equal_and_can_be_keys() -> None:
    assert MeshSpec.of(tp=2) == MeshSpec(MESH_DIMS, (1, 1, 1, 1, 2))
    assert len({MeshSpec.of(tp=2), MeshSpec.of(tp=2), MeshSpec.of(pp=2)}) == 2


def test_the_folds_are_of_dims_in_mesh_order() -> None:
    assert set(FOLDS) == {"data", "loss", "parameter_shard"}
    for dims in FOLDS.values():
        assert [MESH_DIMS.index(name) for name in dims] == sorted(MESH_DIMS.index(name) for name in dims)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="the degree of tp is 0; it must be at least 1"):
        MeshSpec.of(tp=0)
    with pytest.raises(ValueError, match="no such mesh dim: dp; the dims are pp, dp_replicate, dp_shard, cp, tp"):
        MeshSpec.of(dp=2)
    with pytest.raises(ValueError, match="2 names for 1 degrees"):
        MeshSpec(("pp", "tp"), (2,))
    with pytest.raises(ValueError, match="named twice: tp, tp"):
        MeshSpec(("tp", "tp"), (2, 2))


def test_what_is_outside_the_mesh_is_refused() -> None:
    for rank in (-1, 128):
        with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 128"):
            LATTICE.coordinate(rank)
    for index in (-1, 8):
        with pytest.raises(ValueError, match=f"tp={index} is outside its degree 8"):
            LATTICE.rank({"tp": index})
    for asking in (LATTICE.degree, LATTICE.groups, lambda name: LATTICE.index(0, name)):
        with pytest.raises(ValueError, match="no mesh dim 'ep'; the dims are pp"):
            asking("ep")
