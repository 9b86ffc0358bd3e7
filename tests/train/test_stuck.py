"""From what each rank noted to who holds the others up."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from koushi.mesh import MeshSpec
from koushi.parallel.arrivals import ALL_RANKS
from koushi.train.inquiry import record_from
from koushi.train.records import Call, Channel, Record
from koushi.train.stuck import diagnose

SQUARE = MeshSpec.of(dp_shard=2, tp=2)
LINE = MeshSpec.of(pp=4)
NAMES = {"dp_shard": "1", "tp": "2", "pp": "3", ALL_RANKS: "0"}


def call(count: int, age: float, operation: str = "all_reduce", size: int = 8, step: int = 5) -> Call:
    return Call(count, operation, size, age, step)


def channel(submesh: str, *, started: Call, finished: Call | None = None, waits: bool = False) -> Channel:
    """A group's collectives, the last of which a rank that ``waits`` is in."""
    return Channel(submesh, NAMES[submesh], None, False, started, finished, started if waits else None)


def message(peer: int, *, outward: bool, started: Call, waits: bool = False) -> Channel:
    return Channel("pp", NAMES["pp"], peer, outward, started, None if waits else started, started if waits else None)


def record(rank: int, *channels: Channel, state: str = "there") -> Record:
    return Record(rank, 100 + rank, 5, state, channels)


def at(rank: int, on: str, count: int, *, age: float = 9.0, waits: bool = True, **more: object) -> Record:
    """A rank whose last call is number ``count`` of its group."""
    last = call(count, age, **more)  # type: ignore[arg-type]
    return record(rank, channel(on, started=last, finished=None if waits else last, waits=waits))


def by_rank(*records: Record) -> dict[int, Record]:
    return {one.rank: one for one in records}


def test_a_rank_that_has_not_come_is_named_with_what_it_last_did() -> None:
    absent = record(3, channel("tp", started=call(2, 34), finished=call(2, 34, "all_gather", 2048)))
    found = diagnose(SQUARE, by_rank(at(1, "dp_shard", 7, age=30, size=1572864), absent))
    assert found is not None
    assert found.headline == (
        "an all_reduce of 1.50 MiB on dp_shard (ranks 1 3, tp=1) waited 30.0 s in step 5: rank 3 (dp_shard=1 tp=1) has "
        "not arrived; it last finished an all_gather of 2.00 KiB on tp, 34.0 s ago, in step 5"
    )
    assert found.culprits == (3,)
    assert found.lines == (
        "rank 1 (dp_shard=0 tp=1) waits in an all_reduce of 1.50 MiB on dp_shard for 30.0 s",
        "rank 3 (dp_shard=1 tp=1) last finished an all_gather of 2.00 KiB on tp, 34.0 s ago, in step 5",
    )


def test_the_end_of_a_chain_is_at_fault_and_not_who_waits_for_it() -> None:
    """Rank 0 waits on tp for rank 1, which has waited for less long on dp_shard for rank 3."""
    records = by_rank(at(0, "tp", 4, age=20), at(1, "dp_shard", 7, age=10), at(3, "dp_shard", 6, waits=False))
    found = diagnose(SQUARE, records)
    assert found is not None
    assert found.culprits == (3,)
    assert "on dp_shard (ranks 1 3, tp=1) waited 10.0 s" in found.headline
    assert found.lines[-1] == "waiting too, for these or for one another: rank 0"


def test_a_stopped_rank_is_at_fault_even_where_it_has_come() -> None:
    records = by_rank(at(0, "tp", 4), replace(at(1, "tp", 4), state="stopped"), at(3, "tp", 4))
    found = diagnose(SQUARE, records)
    assert found is not None
    assert found.culprits == (1,)
    assert "rank 1 (dp_shard=0 tp=1) has come to it but takes no part; its process is stopped" in found.headline


def test_messages_are_matched_by_their_ends() -> None:
    """Stage 1 has sent its second message to stage 2, which never sent its first gradient back."""
    one = record(
        1,
        message(2, outward=True, started=call(2, 9, "send")),
        message(2, outward=False, started=call(1, 8, "recv", 4096), waits=True),
    )
    two = record(2, message(1, outward=False, started=call(2, 9, "recv")))
    three = record(3, message(2, outward=False, started=call(1, 9, "recv"), waits=True))
    found = diagnose(LINE, by_rank(one, two, three))
    assert found is not None
    assert found.culprits == (2,)
    assert "a recv of 8 B from rank 2 on pp (ranks 2 3) waited 9.0 s in step 5: rank 2 (pp=2) has not" in found.headline
    assert found.lines[-1] == "waiting too, for these or for one another: rank 1"
    came = record(2, message(1, outward=True, started=call(1, 7, "send")))
    alone = diagnose(LINE, by_rank(one, came))
    assert alone is not None and "all its ranks have come to it" in alone.headline


def test_ranks_in_different_collectives_of_one_group_have_gone_apart() -> None:
    records = by_rank(
        at(0, "tp", 4, age=9, operation="reduce_scatter", size=64), at(1, "tp", 4, operation="all_gather", age=8)
    )
    found = diagnose(SQUARE, records)
    assert found is not None
    assert found.culprits == ()
    assert found.headline == (
        "the ranks on tp (ranks 0 1, dp_shard=0) have gone apart: as call 4 of the group rank 0 (dp_shard=0 tp=0) has "
        "a reduce_scatter of 64 B, rank 1 (dp_shard=0 tp=1) has an all_gather of 8 B; one of them has left out a "
        "collective, or made one too many"
    )


def test_ranks_that_wait_for_each_other_on_different_groups_are_told() -> None:
    square = [at(0, "tp", 4, age=9), at(1, "dp_shard", 4), at(2, "dp_shard", 4), at(3, "tp", 4)]
    found = diagnose(SQUARE, by_rank(*square))
    assert found is not None
    assert found.culprits == ()
    assert "rank 1 (dp_shard=0 tp=1) has not arrived" in found.headline
    assert found.headline.endswith(
        "the ranks wait for each other, each in another collective: their programs have gone apart"
    )


def test_a_rank_of_which_nothing_is_known_is_told_as_such() -> None:
    found = diagnose(SQUARE, by_rank(at(0, ALL_RANKS, 4), at(1, ALL_RANKS, 4)))
    assert found is not None
    assert found.culprits == (2, 3)
    assert found.headline == (
        "an all_reduce of 8 B on all ranks waited 9.0 s in step 5: rank 2 (dp_shard=1 tp=0) and rank 3 (dp_shard=1 "
        "tp=1) have not arrived"
    )
    assert found.lines[2] == "rank 2 (dp_shard=1 tp=0) told nothing"


def test_without_waits_as_on_cuda_what_some_have_issued_and_others_not_counts() -> None:
    records = by_rank(at(0, "tp", 4, waits=False), at(1, "tp", 3, waits=False, age=12.0))
    found = diagnose(SQUARE, records)
    assert found is not None
    assert found.culprits == (1,)
    assert "rank 1 (dp_shard=0 tp=1) has not arrived" in found.headline


def test_nothing_is_said_where_nobody_waits() -> None:
    assert diagnose(SQUARE, by_rank(*(at(rank, ALL_RANKS, 4, waits=False) for rank in range(4)))) is None


def test_a_record_survives_the_way_through_the_store() -> None:
    one = at(0, "tp", 4)
    assert record_from(json.loads(json.dumps(asdict(one)))) == one
