"""Accounts of bytes: peaks, repeats, streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from koushi.plan.spans import ACTIVATIONS, GATHERED, GRADIENTS, KINDS, LOGITS, STREAMS, Account, Span

moves = st.lists(st.tuples(st.sampled_from(range(len(KINDS))), st.integers(-50, 50)), max_size=12)


def go_through(account: Account, steps: list[tuple[int, int]]) -> None:
    for kind, count in steps:
        if count >= 0:
            account.hold(kind, count)
        else:
            account.drop(kind, -count)


def span_of(steps: list[tuple[int, int]]) -> Span:
    account = Account("there")
    go_through(account, steps)
    return account.close()


@given(moves, moves, st.integers(0, 4))
def test_many_times_is_one_after_the_other(
    before: list[tuple[int, int]], steps: list[tuple[int, int]], times: int
) -> None:
    at_once, each = Account(), Account()
    go_through(at_once, before)
    go_through(each, before)
    at_once.go(span_of(steps), times)
    for _ in range(times):
        each.go(span_of(steps))
    short, long = at_once.close(), each.close()
    assert short.after == long.after
    assert short.highest == long.highest == sum(short.peak)
    assert short.compute_highest == long.compute_highest
    assert short.stream_highest == long.stream_highest


@given(moves)
def test_no_moment_is_above_the_peak(steps: list[tuple[int, int]]) -> None:
    span = span_of(steps)
    total, highest = 0, 0
    for _, count in steps:
        total += count
        highest = max(highest, total)
    assert span.highest == highest
    assert span.growth == total == sum(span.after)
    assert span.highest <= span.compute_highest + sum(span.stream_highest)


def test_streams_peak_at_moments_of_their_own() -> None:
    account = Account()
    account.touch(GATHERED, 5)
    account.hold(ACTIVATIONS, 7)
    account.drop(ACTIVATIONS, 7)
    account.touch(GRADIENTS, 3)
    span = account.close()
    assert STREAMS == (GRADIENTS, GATHERED)
    assert (span.highest, span.compute_highest, span.stream_highest) == (7, 7, (3, 5))


def test_the_moment_is_that_of_the_peak() -> None:
    account = Account("first")
    account.touch(LOGITS, 4)
    account.where = "second"
    account.touch(LOGITS, 3)
    assert account.close().moment == "first"
