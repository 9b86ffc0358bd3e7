"""Which files a run file's ``data.path`` means, and what they depend on for the cache."""

from __future__ import annotations

import glob
import itertools
import os
from hashlib import blake2b
from pathlib import Path

from koushi.config.schema import Data
from koushi.errors import DataError

SUFFIXES = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tokens": (".bin",),
}
"""What is taken from a folder. A file named outright, or by a glob, may be called anything."""

MOST_ENTRIES = 100_000
"""Files and folders that are looked through for ``data.path``, which may be as wide as ``/**/*``."""

READ_WHOLE = 1 << 22
"""Bytes. Sources up to this size, all together, are told apart by content, larger ones by path, size and time."""


def source_files(data: Data, base: Path) -> list[Path]:
    """The files of ``data.path``, sorted by name. Raises DataError if there are none."""
    suffixes = SUFFIXES[data.source]
    usual = " or ".join(suffixes)
    if not data.path:
        raise DataError(f"data.path: empty; data.source: {data.source} needs a file, a folder or a glob")
    path = base / Path(data.path).expanduser()
    if path.is_dir():
        _refuse_endless(path)
        found = [file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in suffixes]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not found:
            raise DataError(f"data.path: the folder {path} holds no {usual} file; name others by a glob")
    elif path.exists():
        found = [path]
    else:
        _refuse_endless_glob(path)
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
        if not found:
            raise DataError(f"data.path: no file matches {path}; give a file, a folder with {usual} files, or a glob")
    return sorted(found, key=lambda file: file.as_posix())


def _refuse_endless_glob(pattern: Path) -> None:
    """As ``_refuse_endless`` for what a glob looks through: links too, and no deeper than it has parts."""
    plain = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    levels = None if "**" in pattern.parts else len(pattern.parts) - len(plain)
    _refuse_endless(Path(*plain), levels, links=True)


def _refuse_endless(folder: Path, levels: int | None = None, links: bool = False) -> None:
    """Raise DataError where too much lies below ``folder`` to look through."""
    count, above = 0, len(folder.parts)
    for here, folders, files in os.walk(folder, followlinks=links):
        count += len(folders) + len(files)
        if count > MOST_ENTRIES:
            raise DataError(
                f"data.path: more than {MOST_ENTRIES:,} files and folders to look through below {folder}; name a "
                "folder further down, or join the documents in fewer files"
            )
        deep = levels is not None and len(Path(here).parts) - above + 1 >= levels
        folders[:] = [] if deep else [name for name in folders if not name.startswith(".")]


def files_signature(files: list[Path]) -> list[str]:
    """What changes when the files do: cheap for large ones, sure for small ones."""
    try:
        stats = [file.stat() for file in files]
        if sum(stat.st_size for stat in stats) <= READ_WHOLE:
            return [blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in files]
    except OSError as error:
        raise unreadable(error.filename, error) from error
    return [f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in zip(files, stats, strict=True)]


def unreadable(file: object, error: OSError) -> DataError:
    return DataError(f"data.path: {file} cannot be read: {error.strerror or error}")
