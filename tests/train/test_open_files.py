from __future__ import annotations

import errno
import os
import resource

import pytest

from koushi.errors import TrainingError
from koushi.train.failures import report
from koushi.train.open_files import fewest, raise_limit

GLOO = "[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The soft and the hard limit, and below it what they are set to."""
    kept = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: kept[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: kept.append(pair))
    return kept


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((256, 4096), (1152, 4096)),
        ((256, resource.RLIM_INFINITY), (1152, resource.RLIM_INFINITY)),
        ((256, 1000), (1000, 1000)),
        ((2000, 4096), (2000, 4096)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_as_many_files_as_ranks_need_are_allowed(
    limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits[:] = [before]
    raise_limit(8)
    assert limits[-1] == after


@pytest.mark.parametrize("world", [1, 4, 128])
def test_too_few_for_the_start_are_refused_with_how_many_would_do(limits: list[tuple[int, int]], world: int) -> None:
    limits[:] = [(20, fewest(world))]
    raise_limit(world)
    less = fewest(world) - 1
    limits[:] = [(20, less)]
    with pytest.raises(TrainingError, match=rf"may open {less} files here.* {1024 + 16 * world} are enough"):
        raise_limit(world)


@pytest.mark.parametrize("error", [RuntimeError(GLOO), OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x.jsonl")])
def test_a_rank_that_runs_out_says_what_to_do(limits: list[tuple[int, int]], error: Exception) -> None:
    wrapped = TypeError("what it led to")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        told = report(3, one)
        assert told.headline.startswith("too many open files: a process may open 256 here; allow more")
        assert told.details == ""
