"""What every rank is in, in a file that others can read even when the rank itself no longer answers.

Each rank maps a few KiB of its own file and notes in it every collective that it starts, waits in and
finishes: about a microsecond each. When a collective times out, whoever noticed reads the files of its
machine's ranks, also that of a rank which is stopped.

A channel is what must match between ranks: a group's collectives in their order, or the messages from
one rank to another. A collective has finished for a rank when its wait has returned; on CUDA that only
says that it was issued.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import functools
import mmap
import os
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, final

import torch.distributed as dist
from torch import Tensor

OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "send",
    "recv",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
)
SEND, RECV = OPERATIONS.index("send"), OPERATIONS.index("recv")
ALL_RANKS = "all ranks"
"""The name of a group that is the whole world and no mesh dim."""
ASK = signal.SIGUSR2
"""Makes a rank write where it is in Python."""

ARRIVALS = "KOUSHI_ARRIVALS"
"""Environment variable: the folder of the books of this machine's ranks."""
START = "KOUSHI_START"
"""Environment variable, set by the process itself: which start of the world it belongs to."""

HEAD = struct.Struct("=qqqq")
"""Process id, rank, training step (from 1; 0 before the first), channels in use."""
_STEP_AT, _USED_AT = 16, 24
_COUNT = struct.Struct("=q")
NAME = struct.Struct("=40s24sqq")
"""Sub-mesh, group, peer (-1 for collectives), whether messages go out to it."""
CALL = struct.Struct("=qqqdq")
"""How many so far on the channel, index in OPERATIONS, bytes, monotonic time, training step."""
STARTED, FINISHED = NAME.size, NAME.size + CALL.size
WAITING = FINISHED + CALL.size
"""Where in a channel its three calls stand: the last that started, the last that finished, the one waited in, whose
count is 0 where there is none."""
CHANNEL_SIZE = 256
CHANNELS = 64
"""More than any rank needs; calls on channels beyond are not noted."""
FILE_SIZE = CHANNEL_SIZE * (CHANNELS + 1)

Mark = tuple["_Channel", int, int, int]
"""A call that has started: channel, how many so far, index of its operation, bytes."""


@final
class _Channel:
    """The part of the file of one channel that this rank takes part in."""

    __slots__ = ("_book", "_file", "_offset", "_since", "count")

    def __init__(self, book: Book, file: mmap.mmap, offset: int):
        self._book = book
        self._file = file
        self._offset = offset
        self._since: float | None = None
        self.count = 0

    def name(self, submesh: str, group: str, peer: int, outward: bool) -> None:
        NAME.pack_into(self._file, self._offset, submesh.encode()[:40], group.encode()[:24], peer, outward)

    def start(self, operation: int, size: int) -> Mark:
        self.count += 1
        self._note(STARTED, self.count, operation, size)
        self._since = self._note(WAITING, self.count, operation, size)
        return self, self.count, operation, size

    def wait(self, count: int, operation: int, size: int) -> None:
        self._since = self._note(WAITING, count, operation, size)

    def leave(self) -> None:
        """Not waiting, whether or not it has finished."""
        self._since = None
        _COUNT.pack_into(self._file, self._offset + WAITING, 0)

    def finish(self, count: int, operation: int, size: int) -> None:
        now = self._note(FINISHED, count, operation, size)
        if self._since is not None:
            self._book.waited += now - self._since
        self.leave()

    def _note(self, place: int, count: int, operation: int, size: int) -> float:
        now = time.monotonic()
        CALL.pack_into(self._file, self._offset + place, count, operation, size, now, self._book.step)
        return now


@final
class Book:
    """This process's own file, ``<folder>/<rank>``."""

    def __init__(self, folder: Path, rank: int):
        self.folder = _own(folder)
        self.step = 0
        self.waited = 0.0
        """Seconds in all that this rank has waited in collectives."""
        self.works: dict[int, Mark] = {}
        """Calls not yet waited for, by the identity of torch's handle."""
        self._names: dict[str, str] = {}
        self._channels: dict[tuple[str, int, bool], _Channel | None] = {}
        self._lock = threading.Lock()
        self._path = folder / str(rank)
        self._path.unlink(missing_ok=True)
        with self._path.open("xb+") as file:
            file.write(bytes(FILE_SIZE))  # with room on the disk: a write into a hole would end the process
            file.flush()
            self._file = mmap.mmap(file.fileno(), FILE_SIZE)
        HEAD.pack_into(self._file, 0, os.getpid(), rank, 0, 0)
        self._stack = _answer_with_stack(folder / f"{rank}.stack")

    def at_step(self, step: int) -> None:
        self.step = step
        _COUNT.pack_into(self._file, _STEP_AT, step)

    def name(self, group: str, submesh: str) -> None:
        """From now on the torch group ``group`` is told of as ``submesh``."""
        self._names[group] = submesh
        for (known, peer, outward), channel in self._channels.items():
            if known == group and channel is not None:
                channel.name(submesh, known, peer, outward)

    def channel(self, group: str, peer: int = -1, outward: bool = False) -> _Channel | None:
        """The channel of a group's collectives, or of messages to or from the rank ``peer`` of the world."""
        key = group, peer, outward
        if key in self._channels:
            return self._channels[key]
        with self._lock:
            used = len(self._channels)
            made = None
            if used < CHANNELS:
                made = _Channel(self, self._file, CHANNEL_SIZE * (used + 1))
                made.name(self._names.get(group, ALL_RANKS), *key)
                _COUNT.pack_into(self._file, _USED_AT, used + 1)
            self._channels[key] = made
        return made

    def remove(self) -> None:
        """Delete the file and, where it was the last, the folder."""
        faulthandler.unregister(ASK)
        self._stack.close()
        for path in (self._path, Path(self._stack.name)):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def _own(folder: Path) -> Path:
    """Make ``folder`` if need be. Raises OSError where it is someone else's: its name can be guessed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "not a folder of this user", str(folder))
    return folder


def _answer_with_stack(path: Path) -> TextIO:
    """Have ``ASK`` write this process's Python stack into ``path``, whatever the process is doing."""
    file = path.open("w", encoding="utf-8")
    faulthandler.register(ASK, file=file, all_threads=False)
    return file


_book: list[Book] = []
"""The open book of this process, if there is one."""


def books_here() -> Path:
    """Where the ranks of this machine and this start keep their books: their launcher's choice, else the same for
    all children of one torchrun."""
    chosen = os.environ.get(ARRIVALS)
    if chosen:
        return Path(chosen)
    names = (str(os.getppid()), os.environ.get("MASTER_PORT", ""), os.environ.get(START, "0"))
    return Path(tempfile.gettempdir()) / f"koushi-{os.getuid()}-{'-'.join(names)}"


def open_book(rank: int) -> None:
    """Note from now on what this process's groups do.

    Without a book, where its file cannot be written, a run is as good but for what it tells when it is stuck.
    """
    if _book:
        return
    try:
        _book.append(Book(books_here(), rank))
    except OSError as error:
        print(f"warning: a stuck run will not tell why: {error}", file=sys.stderr)
        return
    atexit.register(close_book)
    for name, (operation, size) in _CALLS.items():
        if name in vars(dist.ProcessGroup):
            setattr(dist.ProcessGroup, name, _noted(name, operation, size))
    dist.Work.wait = _noted_wait(dist.Work.wait)  # type: ignore[method-assign]


def close_book() -> None:
    """Remove this process's file, after a run that went well."""
    while _book:
        _book.pop().remove()


def book_folder() -> Path | None:
    """Where this process and its machine's other ranks keep their files, if they do."""
    return _book[0].folder if _book else None


def name_groups(groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Tell of this rank's groups by the names of their mesh dims."""
    for book in _book:
        for submesh, group in groups.items():
            book.name(group.group_name, submesh)


def at_step(step: int) -> None:
    """The training step, from 1, that begins now."""
    if _book:
        _book[0].at_step(step)


def waited_seconds() -> float:
    """How long this rank has waited in collectives so far; 0 without a book."""
    return _book[0].waited if _book else 0.0


def begin(group: str, operation: str, size: int) -> Mark | None:
    """Note that this rank starts a collective of ``size`` bytes on the torch group ``group`` and waits in it."""
    if not _book:
        return None
    channel = _book[0].channel(group)
    return channel.start(OPERATIONS.index(operation), size) if channel is not None else None


def end(mark: Mark | None) -> None:
    """Note that what ``begin`` noted has finished."""
    if mark is not None:
        mark[0].finish(*mark[1:])


def _whole(arguments: tuple[Any, ...]) -> int:
    """Bytes of the larger of what goes in and what comes out."""
    return max((_bytes(one) for one in arguments[:2]), default=0)


def _one(arguments: tuple[Any, ...]) -> int:
    return _bytes(arguments[0]) if arguments else 0


def _bytes(argument: Any) -> int:
    if isinstance(argument, (list, tuple)):
        return sum(_bytes(one) for one in argument)
    return int(argument.nbytes) if isinstance(argument, Tensor) else 0


# Private in part: the methods of ProcessGroup that torch's own functions, FSDP2 and the pipeline call. 2.11 has
# the names with "base", 2.13 those with "single" as well.
_CALLS: Mapping[str, tuple[str, Callable[[tuple[Any, ...]], int]]] = {
    "all_gather_single": ("all_gather", _whole),
    "_allgather_base": ("all_gather", _whole),
    "allgather": ("all_gather", _whole),
    "allgather_coalesced": ("all_gather", _whole),
    "reduce_scatter_single": ("reduce_scatter", _whole),
    "_reduce_scatter_base": ("reduce_scatter", _whole),
    "reduce_scatter": ("reduce_scatter", _whole),
    "allreduce": ("all_reduce", _one),
    "allreduce_coalesced": ("all_reduce", _one),
    "all_to_all_single": ("all_to_all", _whole),
    "alltoall_base": ("all_to_all", _whole),
    "alltoall": ("all_to_all", _whole),
    "broadcast": ("broadcast", _one),
    "barrier": ("barrier", _one),
    "gather": ("gather", _whole),
    "scatter": ("scatter", _whole),
    "reduce": ("reduce", _one),
    "send": ("send", _one),
    "recv": ("recv", _one),
}


def _noted(name: str, operation: str, size: Callable[[tuple[Any, ...]], int]) -> Callable[..., Any]:
    """The method ``name`` of ProcessGroup, which notes each call before it is made."""
    method, index = getattr(dist.ProcessGroup, name), OPERATIONS.index(operation)
    message, outward = index in (SEND, RECV), index == SEND

    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        if not _book:
            return method(group, *arguments, **named)
        book = _book[0]
        if message:
            channel = book.channel(group.group_name, dist.get_global_rank(group, arguments[1]), outward)
        else:
            channel = book.channel(group.group_name)
        if channel is None:
            return method(group, *arguments, **named)
        mark = channel.start(index, size(arguments))
        work = method(group, *arguments, **named)
        channel.leave()
        if work is not None:
            book.works[id(work)] = mark
        return work

    return call


def _noted_wait(method: Callable[..., bool]) -> Callable[..., bool]:
    """Work.wait, which notes that this rank waits, and then that it no longer does."""

    @functools.wraps(method)
    def wait(work: dist.Work, *arguments: Any, **named: Any) -> bool:
        mark = _book[0].works.pop(id(work), None) if _book else None
        if mark is None:
            return method(work, *arguments, **named)
        channel, *call = mark
        channel.wait(*call)
        done = method(work, *arguments, **named)
        channel.finish(*call)
        return done

    return wait
