"""Work done in forked processes: each starts from what this one has imported and keeps its world to itself."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from koushi.dryrun.progress import Progress
from koushi.errors import RankFailure
from koushi.train.forking import as_forked, forks

Item = TypeVar("Item")
Result = TypeVar("Result")


_watching: list[Progress] = []
"""Those that this process tells of its forks."""


@contextmanager
def watched(doing: str) -> Iterator[None]:
    """Show how many of the forks that are made inside are done."""
    progress = Progress(doing)
    _watching.append(progress)
    try:
        yield
    finally:
        _watching.remove(progress)
        progress.end()


def in_forks(work: Callable[[Item], Result], items: Sequence[Item], at_once: int | None = None) -> list[Result]:
    """``work`` of every item, in a process of its own; ``at_once`` at a time, as many as there are cores by default.

    Results must pickle. Raises RankFailure with the first traceback; no process outlives the call.
    """
    if not items:
        return []
    most = at_once or len(os.sched_getaffinity(0))
    results: dict[int, Result] = {}
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    waiting = list(enumerate(items))
    for progress in _watching:
        progress.add(len(items))
    with forks():
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    index, item = waiting.pop(0)
                    _start(work, index, item, running)
                for end in wait(list(running)):
                    assert isinstance(end, Connection)
                    index, process = running.pop(end)
                    results[index] = _receive(end, process)
                    for progress in _watching:
                        progress.step()
        finally:
            for end, (_, process) in running.items():
                if process.pid is not None:
                    process.kill()
                    process.join()
                end.close()
    return [results[index] for index in range(len(items))]


def _start(
    work: Callable[[Item], Result], index: int, item: Item, running: dict[Connection, tuple[int, BaseProcess]]
) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(work, item, theirs, os.getpid()))
    running[ours] = index, process  # known before it is there: a signal may come as it starts
    process.start()
    theirs.close()


def _receive(end: Connection, process: BaseProcess) -> Result:  # type: ignore[type-var]
    try:
        worked, value = end.recv()
    except EOFError:
        process.join()
        raise RankFailure(f"a dry run's process ended with exit code {process.exitcode} and said nothing") from None
    finally:
        end.close()
    process.join()
    if not worked:
        raise RankFailure(value)
    result: Result = value
    return result


def _child(work: Callable[[Item], Result], item: Item, end: Connection, parent: int) -> None:
    as_forked(parent)
    torch.set_num_threads(1)  # of the parent's pool no thread has come along
    _watching.clear()
    try:
        message = (True, work(item))
    except BaseException:
        message = (False, traceback.format_exc())  # type: ignore[assignment]
    end.send(message)
    end.close()
    os._exit(0)
