from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.data.order import Permutation, key_of


@given(st.integers(1, 700), st.binary(min_size=16, max_size=16))
def test_is_a_permutation(count: int, key: bytes) -> None:
    permutation = Permutation(count, key)
    assert sorted(permutation[i] for i in range(count)) == list(range(count))


@given(st.integers(2, 2**60), st.data())
def test_large_ranges_stay_inside_and_apart(count: int, data: st.DataObject) -> None:
    permutation = Permutation(count, key_of(count))
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    assert 0 <= permutation[one] < count
    assert permutation[one] != permutation[other]


def test_the_same_on_every_platform() -> None:
    permutation = Permutation(1000, key_of("a key", 7))
    assert [permutation[i] for i in range(6)] == [285, 234, 565, 206, 986, 426]


def test_keys_give_unlike_orders() -> None:
    orders = {tuple(Permutation(50, key_of(key))[i] for i in range(50)) for key in range(20)}
    assert len(orders) == 20


def test_every_place_is_reached_about_equally() -> None:
    count, keys = 8, 4000
    hits = [[0] * count for _ in range(count)]
    for key in range(keys):
        permutation = Permutation(count, key_of("uniform", key))
        for i in range(count):
            hits[i][permutation[i]] += 1
    # Binomial: 500 expected, standard deviation 21.
    assert all(400 < hit < 600 for row in hits for hit in row)


def test_neighbours_are_torn_apart() -> None:
    permutation = Permutation(10_000, key_of("scatter"))
    near = sum(abs(permutation[i] - permutation[i + 1]) < 100 for i in range(1000))
    assert near < 60  # 20 expected


def test_outside_the_range() -> None:
    with pytest.raises(IndexError, match="3 is outside a permutation of 3"):
        Permutation(3, key_of("x"))[3]
    with pytest.raises(IndexError):
        Permutation(3, key_of("x"))[-1]


def test_key_parts_do_not_run_together() -> None:
    assert key_of("a", 12) != key_of("a1", 2)
