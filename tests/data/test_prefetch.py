from __future__ import annotations

import threading

import pytest

from koushi.data.prefetch import Prefetch


def test_gives_every_step_in_order() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * step

    with Prefetch(make, 3) as prefetch:
        assert [prefetch.get(step) for step in range(3, 8)] == [9, 16, 25, 36, 49]
    assert made[:5] == [3, 4, 5, 6, 7]


def test_the_next_is_made_meanwhile() -> None:
    begun = threading.Event()

    def make(step: int) -> str:
        if step == 1:
            begun.set()
        return threading.current_thread().name

    with Prefetch(make, 0) as prefetch:
        name = prefetch.get(0)
        assert begun.wait(timeout=30)  # nobody has asked for step 1
        assert name == prefetch.get(1) != threading.current_thread().name


def test_any_step_may_be_asked_for() -> None:
    with Prefetch(lambda step: step, 0) as prefetch:
        assert [prefetch.get(step) for step in (0, 5, 6, 2, 3)] == [0, 5, 6, 2, 3]


def test_errors_come_out_where_they_belong() -> None:
    def make(step: int) -> int:
        if step == 1:
            raise ValueError("no batch 1")
        return step

    with Prefetch(make, 0) as prefetch:
        assert prefetch.get(0) == 0
        for _ in range(2):
            with pytest.raises(ValueError, match="no batch 1"):
                prefetch.get(1)
        assert prefetch.get(2) == 2


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    prefetch = Prefetch(lambda step: step, 0)
    assert prefetch.get(0) == 0
    prefetch.close()
    prefetch.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError):
        prefetch.get(7)


def test_with_closes_after_an_error() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Prefetch(lambda step: step, 0):
        raise KeyError("in the step")
    assert threading.active_count() == before
