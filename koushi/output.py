"""What commands write: files where a user says, whole or not at all and never over something else; standard output."""

from __future__ import annotations

import errno
import os
import select
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import click

from koushi.errors import KoushiError, WrongTarget

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True)
class Kind:
    """What a command writes, and which files that are there already it may replace."""

    name: str
    """With its article: ``a page``."""
    example: str
    """A new file's name."""
    is_one: Callable[[Path], bool]
    """Whether the file at a path is one of these."""


def tell(notes: Iterable[str]) -> None:
    """Say beside a command's output what its user should know."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


def reader_gone() -> bool:
    """Whether standard output or error is a pipe that nobody reads any more, as after ``| head``."""
    poll = select.poll()
    for descriptor in (_STDOUT, _STDERR):
        poll.register(descriptor, 0)  # such an end is told without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


PAGE = Kind("a page", "page.html", lambda path: path.suffix.lower() in (".html", ".htm"))


def check_target(path: Path, kind: Kind, *inputs: Path) -> None:
    """Raises WrongTarget unless ``path`` can be written: new, or of ``kind`` and none of ``inputs``."""
    check_folder(path, kind.example)
    with _told(path, kind.example):
        if not path.exists():
            return
        if any(one.exists() and path.samefile(one) for one in inputs):
            raise WrongTarget(f"{path} is what this command reads; name another file, such as {kind.example}")
        if path.is_dir():
            raise WrongTarget(f"{path} is a folder; name a file in it, such as {path / kind.example}")
        if not path.is_file():
            raise WrongTarget(f"{path} is not a regular file; name a new one, such as {kind.example}")
        if not kind.is_one(path):
            raise WrongTarget(f"{path} is there already and is not {kind.name}; name a new file, or remove it")
        if not os.access(path, os.W_OK):
            raise WrongTarget(f"{path} is read-only; name another file, such as {kind.example}")


def check_folder(path: Path, example: str) -> None:
    """Raises WrongTarget unless a file can be made where ``path`` is."""
    with _told(path, example):
        folder = path.resolve().parent
        if not folder.exists():
            raise WrongTarget(f"cannot write {path}: there is no folder {folder}; make it, or name another file")
        if not folder.is_dir():
            raise WrongTarget(f"cannot write {path}: {folder} is not a folder; name another file, such as {example}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise WrongTarget(f"cannot write {path}: the folder {folder} is read-only; name a file in another")


def write_text(path: Path, text: str, kind: Kind, *inputs: Path) -> None:
    """Write the file ``path`` of ``kind``: beside it, then renamed, so that what was there stays until then.

    Raises WrongTarget as check_target does, KoushiError for a full disk.
    """
    check_target(path, kind, *inputs)
    with written_beside(path, text, kind.example) as (beside, target):
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)


def write_new(path: Path, text: str, example: str) -> None:
    """Write ``path``, which must not be there yet. Raises FileExistsError, WrongTarget and KoushiError."""
    check_folder(path, example)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with written_beside(path, text, example) as (beside, target):
        try:
            os.link(beside, target)  # unlike a rename it never replaces what another process just wrote
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            beside.replace(target)


@contextmanager
def written_beside(path: Path, text: str, example: str) -> Iterator[tuple[Path, Path]]:
    """A file with ``text`` in the folder of ``path``, and the file behind ``path`` that it is to replace.

    It is gone afterwards, unless it was renamed. Raises WrongTarget and KoushiError.
    """
    with _told(path, example):
        target = path.resolve()
        beside = target.parent / f".koushi-{token_hex(6)}"
        try:
            with beside.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            yield beside, target
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def _told(path: Path, example: str) -> Iterator[None]:
    """Errors of the operating system as what a user can do about them."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror or error}"
        if error.errno in _NO_ROOM:
            raise KoushiError(f"{reason}; make room, or name a file on another disk") from None
        raise WrongTarget(f"{reason}; name another file, such as {example}") from None
    except ValueError as error:  # a path with a null byte
        raise WrongTarget(f"cannot write {str(path)!r}: {error}; name another file, such as {example}") from None
