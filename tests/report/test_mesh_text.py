"""The lattice drawn with characters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job
from koushi.mesh import FOLDS, MESH_DIMS
from koushi.report.mesh_text import landmarks, mesh_text
from koushi.report.nodes import Nodes
from koushi.report.words import FLOWS, FOLD_USES, encodable
from koushi.traffic import ALLOWED

Jobs = Callable[..., Job]
EXAMPLES = Path(__file__).parents[2] / "examples"

SHAPES = [
    {"dp_shard": 1},
    {"dp_shard": 3},
    {"dp_shard": 5},
    {"pp": 3, "tp": 2},
    {"dp_shard": 2, "tp": 2, "pp": 2},
    {"pp": 3, "dp_shard": 5},
    {"dp_shard": 9, "tp": 4},
    {"pp": 4, "dp_replicate": 8, "dp_shard": 32, "tp": 4},
    {"pp": 16, "dp_replicate": 1, "dp_shard": 128, "tp": 8},
]


def boxes(text: str) -> dict[int, list[int]]:
    """The ranks drawn in every node's box."""
    rows = re.findall(r"^node (\d+) +│(.*)│", text, re.M)
    return {int(node): [int(one) for one in re.findall(r"\d+", cells)] for node, cells in rows}


@pytest.mark.parametrize("size", [1, 3, 8, 72])
@pytest.mark.parametrize("degrees", SHAPES, ids=str)
def test_what_is_drawn_is_where_it_is(degrees: dict[str, int], size: int, jobs: Jobs) -> None:
    job = jobs(**degrees)
    nodes, text = Nodes(job.mesh, size), mesh_text(job, size)
    drawn = boxes(text)
    assert {0, nodes.count - 1} <= set(drawn)
    for node, ranks in drawn.items():
        assert set(ranks) <= set(nodes.ranks(node))
        assert ranks[0] == nodes.ranks(node)[0]
    left_out = sum(int(count) for count in re.findall(r"⋮ +(\d+) more node", text))
    assert len(drawn) + left_out == nodes.count
    if nodes.count <= 16 and size <= 8:
        assert sorted(rank for ranks in drawn.values() for rank in ranks) == list(range(job.mesh.world_size))


@pytest.mark.parametrize("degrees", SHAPES, ids=str)
def test_the_header_and_the_labels_give_every_coordinate(degrees: dict[str, int], jobs: Jobs) -> None:
    job = jobs(**degrees)
    text = mesh_text(job)
    heads = {name: cells.split() for name, cells in re.findall(r"^ *([a-z_]+)   +([\d ]+)$", text, re.M)}
    for node, label in re.findall(r"^node (\d+) .*│(.*)$", text, re.M):
        said = dict(part.split("=") for part in label.split())
        for place, rank in enumerate(Nodes(job.mesh, 8).ranks(int(node))):
            for name, index in job.mesh.coordinate(rank).items():
                if job.mesh.degree(name) == 1:
                    assert name not in said
                elif name in heads:
                    assert heads[name][place] == str(index)
                else:
                    low, _, high = said[name].partition("-")
                    assert int(low) <= index <= int(high or low), (rank, name)


@pytest.mark.parametrize("degrees", SHAPES, ids=str)
def test_lines_are_straight_and_short(degrees: dict[str, int], jobs: Jobs) -> None:
    text = mesh_text(jobs(**degrees))
    ends = {line.rindex(one) for line in text.splitlines() for one in "┐┤┘│" if one in line}
    assert len(ends) == 1, "the right edges of the boxes are not in one column"
    assert max(len(line) for line in text.splitlines()) <= 130
    assert all(line == line.rstrip() for line in text.splitlines())
    assert len(text.splitlines()) < 60


def test_the_groups_of_the_example(jobs: Jobs) -> None:
    text = mesh_text(check(load(EXAMPLES / "llama_128.yaml")))
    assert "128 ranks [pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=8] on 16 nodes of 8 devices\n" in text
    assert re.search(r"^pp +64 of 2 +across 2 nodes +\[0 64\] … \[63 127\]$", text, re.M)
    assert re.search(r"^dp_shard +32 of 4 +across 4 nodes +\[0 8 16 24\] … \[103 111 119 127\]$", text, re.M)
    assert re.search(r"^tp +16 of 8 +inside a node ", text, re.M)
    assert re.search(r"^cp +degree 1 +none ", text, re.M)
    assert re.search(r"^data +dp_replicate × dp_shard +16 of 8 +across 8 nodes ", text, re.M)
    assert "note" not in text
    assert "note: tp runs in every layer, and here it is across 2 nodes" in mesh_text(
        check(load(EXAMPLES / "llama_128.yaml")), 4
    )


def test_nodes_in_part(jobs: Jobs) -> None:
    assert "6 ranks [pp=3, dp_replicate=1, dp_shard=2, cp=1, tp=1] on 1 node of 8 devices, 6 of them used" in mesh_text(
        jobs(pp=3, dp_shard=2)
    )
    assert "on 2 nodes of 8 devices, 3 of them used on the last" in mesh_text(jobs(dp_shard=11))
    assert "1 rank [" in mesh_text(jobs()) and "on 1 node of 1 device\n" in mesh_text(jobs(), 1)


def test_landmarks_stand_around_strides_and_fill_single_gaps() -> None:
    assert landmarks(100, [10]) == [0, 1, 9, 10, 99]
    assert landmarks(9, [5]) == [0, 1, 4, 5, 8]
    assert landmarks(7, [4]) == [0, 1, 2, 3, 4, 5, 6]
    assert landmarks(4, []) == [0, 1, 2, 3]
    assert landmarks(1, [1, 5]) == [0]


def test_every_dim_has_words_and_no_collective_that_it_may_not_use() -> None:
    assert set(FLOWS) == set(MESH_DIMS)
    assert set(FOLD_USES) == set(FOLDS)
    operations = {one for allowed in ALLOWED.values() for one in allowed} | {"all_to_all"}
    for name, allowed in ALLOWED.items():
        assert set(re.findall(r"[a-z_]+", FLOWS[name])) & operations == allowed


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_without_line_characters_gets_ascii(encoding: str, jobs: Jobs) -> None:
    text = mesh_text(jobs(pp=4, dp_shard=32, tp=2))
    plain = encodable(text, encoding)
    plain.encode(encoding)
    assert "node 0  | " in plain and "+---" in plain and "│" not in plain
    assert plain.count("\n") == text.count("\n")
    assert encodable(text, "utf-8") is text
    assert encodable(text, None) is text
