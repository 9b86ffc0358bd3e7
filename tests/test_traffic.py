"""Traffic: what a call puts on the wire, and how two counts differ."""

from __future__ import annotations

import pytest

from koushi.mesh import MESH_DIMS
from koushi.traffic import ALLOWED, Collective, Traffic, differences

GATHER = Collective("dp_shard", "all_gather", "forward", "float32", 4096)
SUM = Collective("tp", "all_reduce", "optimizer", "float32", 4)


@pytest.mark.parametrize(
    ("operation", "share"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("all_reduce", 1.5)]
)
def test_a_group_of_four_sends_its_share(operation, share) -> None:  # type: ignore[no-untyped-def]
    assert Collective("dp_shard", operation, "forward", "float32", 4096).wire_bytes(4) == share * 4096


def test_only_one_end_of_a_message_sends() -> None:
    sent = Collective("pp", "send", "forward", "bfloat16", 100)
    assert sent.wire_bytes(2) == 100
    assert Collective("pp", "recv", "forward", "bfloat16", 100).wire_bytes(2) == 0


def test_equal_traffic_has_no_differences() -> None:
    assert differences(Traffic({GATHER: 2, SUM: 1}), Traffic({SUM: 1, GATHER: 2})) == []


def test_differences_give_both_counts() -> None:
    assert differences(Traffic({GATHER: 2, SUM: 1}), Traffic({GATHER: 3})) == [
        "dp_shard: all_gather of 4.00 KiB (float32, forward): 2 predicted, 3 ran",
        "tp: all_reduce of 4 B (float32, optimizer): 1 predicted, 0 ran",
    ]


def test_what_is_allowed_is_said_of_dims_of_the_mesh() -> None:
    assert ALLOWED.keys() < set(MESH_DIMS)
