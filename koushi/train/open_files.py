"""How many files, sockets and pipes a process may open, and what to say where it is too few."""

from __future__ import annotations

import resource

from koushi.errors import TrainingError
from koushi.units import counted

MORE = "allow more (ulimit -n, the hard limit too)"


def fewest(world: int) -> int:
    """With which such a world starts."""
    return 40 if world == 1 else 56 + 8 * world


def raise_limit(world: int) -> None:
    """Let processes open enough: the parent a few per rank, a rank some per peer and group.

    Raises TrainingError where that is not allowed and even the start would fail.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, least = 1024 + 16 * world, fewest(world)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < least:
        ranks = counted(world, "rank")
        raise TrainingError(
            f"a process may open {allowed} files here, too few for {ranks}: {MORE}; {wanted} are enough"
        )


def out_of_files(error: BaseException) -> str:
    """What to do where ``error``, or one that led to it, says that a process may open no more; else nothing."""
    cause: BaseException | None = error
    while cause is not None:
        if "too many open files" in str(cause).lower():
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"too many open files: a process may open {soft} here; {MORE}"
        cause = cause.__cause__ or cause.__context__
    return ""
