"""The cache of prepared data: made once by whoever comes first, read by every other process.

An entry is ``<key>.json`` with, if the source is text, ``<key>.bin`` beside it. Both are written
under other names and renamed once on the disk, the json last: an entry is there as a whole or not at
all. A ``.bin`` that isn't as long as its json says is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from koushi.data.tokens import DTYPES
from koushi.errors import DataError


@dataclass(frozen=True)
class Record:
    """What is known of prepared tokens."""

    count: int
    dtype: str
    """Of the token file: uint16 or uint32."""
    digest: str
    """A hash of all the tokens: equal on two machines only if they hold the same ones."""
    max_id: int
    max_index: int
    """Where the highest id was met first."""
    vocab_size: int | None
    """The tokenizer's highest id plus one; None for token files."""
    end_of_document_id: int | None
    """What the tokenizer ends documents with; None for token files."""


def cache_folder() -> Path:
    """``KOUSHI_CACHE``, else ``koushi`` in the user's cache folder of the platform."""
    given = os.environ.get("KOUSHI_CACHE")
    if given:
        return Path(given).expanduser()
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "koushi"
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache") / "koushi"
    except RuntimeError as error:
        raise DataError("there is no home folder for a cache; set KOUSHI_CACHE to a folder of your own") from error


def token_file(folder: Path, key: str) -> Path:
    return folder / f"{key}.bin"


def load(folder: Path, key: str, has_tokens: bool) -> Record | None:
    """The entry, or None if it is missing or damaged."""
    try:
        record = Record(**json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
        if has_tokens and token_file(folder, key).stat().st_size != record.count * DTYPES[record.dtype].itemsize:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record


def publish(folder: Path, key: str, record: Record) -> None:
    """Makes the entry visible; its tokens must already be in place."""
    part = folder / f"{key}.json.part"
    with part.open("w", encoding="utf-8") as stream:
        json.dump(asdict(record), stream)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(folder / f"{key}.json")


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Only one process at a time is inside, for one key; the system frees the lock if it dies.

    Raises DataError if the folder can't be written or locked in.
    """
    with cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f"{key}.lock").open("w")
    with stream:
        with cache_errors(folder):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    """Turns the system's errors into one that says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be used ({error.strerror or error}); "
            "set KOUSHI_CACHE to a folder on a local disk that can be written, with room"
        ) from error
