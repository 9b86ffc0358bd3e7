"""Documents out of text, JSONL and parquet files, in the order of the files and of their rows.

Every fault raises DataError with the file and the line or row it is in.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from koushi.config.schema import Data
from koushi.data import embedded
from koushi.data.files import unreadable
from koushi.data.text import Piece, is_unicode, pieces
from koushi.errors import DataError

BLOCK = 1 << 20
ROWS = 1024


def read_documents(data: Data, files: list[Path]) -> Iterator[Piece]:
    """The documents of every source but ``tokens`` and ``synthetic``."""
    if data.source == "embedded":
        for number, text in enumerate(embedded.documents(), 1):
            yield from pieces([text], f"embedded document {number}")
        return
    for file in files:
        try:
            match data.source:
                case "text":
                    yield from _text_file(file)
                case "jsonl":
                    yield from _jsonl_file(file, data.text_key)
                case "parquet":
                    yield from _parquet_file(file, data.text_key)
                case _:
                    raise AssertionError(f"{data.source} holds no text")
        except OSError as error:
            raise unreadable(file, error) from error


def _text_file(file: Path) -> Iterator[Piece]:
    with file.open("rb") as stream:
        yield from pieces(_decoded(stream, file), str(file))


def _decoded(stream: BinaryIO, file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    first = True
    while True:
        block = stream.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            raise _not_utf8(f"{file}:{line}", error) from error
        line += block.count(b"\n")
        yield text.removeprefix("\ufeff") if first else text
        first = False
        if not block:
            return


def _jsonl_file(file: Path, key: str) -> Iterator[Piece]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file}:{number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield from pieces([_row_text(line, key, where)], where)


def _row_text(line: bytes, key: str, where: str) -> str:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}:{error.colno}: broken JSON ({error.msg}); every line must be one object") from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number too long to read
        raise DataError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f'{where}: the line holds {_kind(row)}; an object such as {{"{key}": "..."}} is needed')
    if key not in row:
        raise DataError(f"{where}: {_no_field(key, row)}")
    return checked_text(row[key], key, where)


def checked_text(value: object, key: str, where: str) -> str:
    """``value`` if it is text that UTF-8 can hold, else DataError."""
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {key!r} holds {_kind(value)}; text is needed")
    if not is_unicode(value):
        raise DataError(f"{where}: the field {key!r} holds half of a surrogate pair, which is no Unicode text")
    return value


def _parquet_file(file: Path, key: str) -> Iterator[Piece]:
    parquet = _pyarrow_parquet()
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if key not in names:
                raise DataError(f"{file}: {_no_field(key, names)}")
            row = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[key], use_threads=False):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{file}: row {row}"
                    yield from pieces([checked_text(value, key, where)], where)
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise DataError(f"{file}: not a parquet file that can be read: {error}") from error


def _pyarrow_parquet() -> ModuleType:
    """pyarrow is an extra, and slow to import for the many runs without it."""
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"data.source: parquet needs pyarrow ({error}): pip install koushi[parquet]; or use jsonl"
        ) from error


def _no_field(key: str, names: Iterable[str]) -> str:
    names = list(map(str, names))
    near = get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no field {key!r} (data.text_key); the fields are {', '.join(names[:20]) or 'none'}{hint}"


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(f"{where}: not UTF-8 (byte 0x{byte:02x}: {error.reason}); convert the file to UTF-8")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    if value is None:
        return "null"
    return names.get(type(value), f"a {type(value).__name__}")
