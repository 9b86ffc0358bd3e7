"""Links: the same as counting the nodes of every group one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.check.check import check
from koushi.config.load import load
from koushi.hardware.hardware import ASSUMED
from koushi.hardware.hardware import load as load_hardware
from koushi.mesh import FOLDS, MESH_DIMS, MeshSpec
from koushi.report.nodes import Nodes, devices_per_node

DEGREES = st.integers(1, 5)


@given(st.tuples(*(DEGREES for _ in MESH_DIMS)), st.integers(1, 80), st.sets(st.sampled_from(MESH_DIMS), min_size=1))
def test_reach_counts_the_nodes_of_every_group(shape: tuple[int, ...], size: int, names: set[str]) -> None:
    mesh = MeshSpec(MESH_DIMS, shape)
    expected = Counter(len({rank // size for rank in group}) for group in mesh.groups(*names))
    assert Nodes(mesh, size).reach(*names) == expected


@pytest.mark.parametrize(
    ("degrees", "size", "dim", "words"),
    [
        ({"tp": 8, "pp": 2}, 8, "tp", "inside a node"),
        ({"tp": 8, "pp": 2}, 8, "pp", "across 2 nodes"),
        ({"tp": 8, "pp": 2}, 4, "tp", "across 2 nodes"),
        ({"tp": 8, "pp": 2}, 8, "dp_shard", "none"),
        ({"dp_shard": 4, "tp": 3}, 8, "tp", "3 inside a node, 1 across 2 nodes"),
        ({"dp_shard": 5, "tp": 5}, 3, "tp", "3 across 2 nodes, 2 across 3 nodes"),
        ({"tp": 5}, 1, "tp", "across 5 nodes"),
    ],
)
def test_links_in_words(degrees: dict[str, int], size: int, dim: str, words: str) -> None:
    assert Nodes(MeshSpec.of(**degrees), size).link(dim) == words


@pytest.mark.parametrize(
    ("override", "hardware"),
    [("run.device=cpu", "cpu"), ("run.device=cuda", ASSUMED), ("--hardware=gb200", "gb200")],
)
def test_nodes_are_those_of_what_is_planned_for(override: str, hardware: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: llama3-debug}\ndata: {source: synthetic}\n", encoding="utf-8")
    assert devices_per_node(check(load(path, (override,)))) == load_hardware(hardware).devices_per_node


def test_ranks_fill_nodes_in_order() -> None:
    nodes = Nodes(MeshSpec.of(dp_shard=11), 4)
    assert nodes.count == 3
    assert [list(nodes.ranks(node)) for node in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_the_largest_lattice_is_counted_without_listing_it() -> None:
    mesh = MeshSpec.of(pp=16, dp_replicate=16, dp_shard=512, tp=8)
    nodes = Nodes(mesh, 8)
    assert nodes.reach("tp") == {1: mesh.world_size // 8}
    assert nodes.reach(*FOLDS["loss"]) == {16 * 512: 16 * 8}
    assert nodes.reach("pp") == {16: mesh.world_size // 16}
