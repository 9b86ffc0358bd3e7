"""Documents out of files, and the faults in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from koushi.config.schema import Data
from koushi.data import embedded, files, sources, text
from koushi.data.files import files_signature, source_files
from koushi.data.sources import read_documents
from koushi.data.text import pieces
from koushi.data.tokenizer import EMBEDDED, Encoder
from koushi.errors import DataError


def read(base: Path, **options: Any) -> list[str]:
    data = Data(**options)
    found = list(read_documents(data, source_files(data, base)))
    assert all(piece.ends for piece in found)
    return [piece.text for piece in found]


def write_parquet(file: Path, **columns: list[Any]) -> None:
    parquet.write_table(pyarrow.table(columns), file)


def test_text_file_folder_and_glob(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.TXT", "sub/d.py", ".hidden/e.txt"):
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(f"this is {name}\r\n", newline="")
    assert read(tmp_path, source="text", path="docs/sub/d.py") == ["this is sub/d.py\r\n"]
    in_folder = [f"this is {name}\r\n" for name in ("a.md", "b.txt", "sub/c.TXT")]
    assert read(tmp_path, source="text", path="docs") == in_folder
    assert read(tmp_path, source="text", path="docs/**/*.py") == ["this is sub/d.py\r\n"]
    assert read(tmp_path / "elsewhere", source="text", path=str(tmp_path / "docs" / "b.txt")) == ["this is b.txt\r\n"]


def test_a_path_that_leads_to_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 14)
    for name in ("a.txt", *(f"deep/{number}/b.txt" for number in range(6))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "deep" / "0" / "around").symlink_to(tmp_path)
    for path in (".", "**/*.txt", "*/*/*.txt"):
        with pytest.raises(DataError, match=r"data\.path: more than 14 files and folders to look through below "):
            read(tmp_path, source="text", path=path)
    assert read(tmp_path, source="text", path="*.txt") == ["a.txt"]
    assert read(tmp_path, source="text", path="deep/*/b.txt") == [f"deep/{number}/b.txt" for number in range(6)]
    assert read(tmp_path, source="text", path="deep/1") == ["deep/1/b.txt"]


def test_a_name_with_brackets_is_no_glob(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    assert read(tmp_path, source="text", path="a[1].txt") == ["brackets"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data.path: empty; data.source: text needs a file, a folder or a glob"),
        ("nowhere.txt", "data.path: no file matches .*nowhere.txt"),
        ("*.txt", r"data.path: no file matches .*\*.txt"),
        (".", "data.path: the folder .* holds no .txt or .md file"),
    ],
)
def test_no_files(tmp_path: Path, path: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, source="text", path=path)


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "text"}', encoding="utf-8-sig")
    assert read(tmp_path, source="text", path="a.txt") == ["text"]
    assert read(tmp_path, source="jsonl", path="a.jsonl") == ["text"]


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_text_that_is_not_utf8_is_named_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(sources, "BLOCK", block)
    (tmp_path / "a.txt").write_bytes("é\n格子\n".encode() + b"caf\xe9 \n")
    with pytest.raises(DataError, match=r"a\.txt:3: not UTF-8 \(byte 0xe9.*convert"):
        read(tmp_path, source="text", path="a.txt")
    (tmp_path / "a.txt").write_bytes("é\n格子\n".encode())
    assert read(tmp_path, source="text", path="a.txt") == ["é\n格子\n"]
    (tmp_path / "a.txt").write_bytes("é\n格".encode()[:-1])
    with pytest.raises(DataError, match=r"a\.txt:2: not UTF-8"):
        read(tmp_path, source="text", path="a.txt")


def test_jsonl_rows(tmp_path: Path) -> None:
    rows = ["plain", "two\nlines", "格子 🙂", ""]
    lines = [json.dumps({"body": row, "id": 1}) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n  \n")
    assert read(tmp_path, source="jsonl", path="a.jsonl", text_key="body") == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl:3:\d+: broken JSON .*every line must be one object"),
        (b"[1]", r"a\.jsonl:3: the line holds a list; an object such as"),
        (b"12", r"a\.jsonl:3: the line holds a number"),
        (b'{"txt": "a", "id": 3}', r"a\.jsonl:3: no field 'text' .*the fields are txt, id; did you mean 'txt'"),
        (b"{}", r"a\.jsonl:3: no field 'text' .*the fields are none"),
        (b'{"text": null}', r"a\.jsonl:3: the field 'text' holds null; text is needed"),
        (b'{"text": 5}', r"a\.jsonl:3: the field 'text' holds a number"),
        (b'{"text": {"a": 1}}', r"a\.jsonl:3: the field 'text' holds an object"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:3: the field 'text' holds half of a surrogate pair"),
        (b'{"text": "caf\xe9"}', r"a\.jsonl:3: not UTF-8 \(byte 0xe9"),
        (b'{"text": ' + b"[" * 200_000, r"a\.jsonl:3: JSON that cannot be read"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"a\.jsonl:3: JSON that cannot be read"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_jsonl_is_named_by_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(DataError, match=message):
        read(tmp_path, source="jsonl", path="a.jsonl")


def test_parquet_rows(tmp_path: Path) -> None:
    rows = [f"row {number} 格子" for number in range(3000)]
    write_parquet(tmp_path / "a.parquet", text=rows, other=list(range(3000)))
    assert read(tmp_path, source="parquet", path="a.parquet") == rows


def test_bad_parquet_is_named_by_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "null.parquet", text=["x"] * 2000 + [None])
    with pytest.raises(DataError, match=r"null\.parquet: row 2001: the field 'text' holds null"):
        read(tmp_path, source="parquet", path="null.parquet")
    write_parquet(tmp_path / "number.parquet", text=[1, 2])
    with pytest.raises(DataError, match=r"number\.parquet: row 1: the field 'text' holds a number"):
        read(tmp_path, source="parquet", path="number.parquet")
    write_parquet(tmp_path / "names.parquet", content=["x"], Text=["x"])
    with pytest.raises(DataError, match=r"names\.parquet: no field 'text' .*content, Text; did you mean 'Text'"):
        read(tmp_path, source="parquet", path="names.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"broken\.parquet: not a parquet file"):
        read(tmp_path, source="parquet", path="broken.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(sources, "import_module", missing)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"pip install koushi\[parquet\]; or use jsonl"):
        read(tmp_path, source="parquet", path="a.parquet")


def test_embedded_needs_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "documents", lambda: iter(["one", "two"]))
    assert [(piece.text, piece.ends) for piece in read_documents(Data(), [])] == [("one", True), ("two", True)]


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 30), st.integers(1, 50))
def test_pieces_are_the_document_however_it_comes(document: str, longest: int, block: int) -> None:
    whole = list(pieces([document], "here", longest))
    assert "".join(piece.text for piece in whole) == document
    assert [piece.ends for piece in whole] == [False] * (len(whole) - 1) + [True]
    assert all(0 < len(piece.text) <= longest for piece in whole[:-1])
    blocks = [document[start : start + block] for start in range(0, len(document), block)]
    assert list(pieces(blocks, "here", longest)) == whole


def test_cutting_a_document_leaves_its_tokens_alone() -> None:
    document = "".join(f"Line {number}: the words of a text.\n" + "\n" * (number % 7 == 0) for number in range(400))
    encoder = Encoder(EMBEDDED)
    cut = list(pieces([document], "here", longest=1000))
    assert len(cut) > 10
    whole = encoder.encode([document], [True]).tolist()
    assert encoder.encode([piece.text for piece in cut], [piece.ends for piece in cut]).tolist() == whole


def test_a_huge_document_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 100_000)
    monkeypatch.setattr(text.pieces, "__defaults__", (50_000,))
    data = Data(source="text", path="a.txt")
    found = list(read_documents(data, source_files(data, tmp_path)))
    assert len(found) == 23
    assert max(len(piece.text) for piece in found) <= 50_000
    assert found[0].where.endswith("a.txt")


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("other"),
        lambda file: file.write_text("longer text"),
    ],
)
def test_signature_follows_content(tmp_path: Path, change: Callable[[Path], object]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("fi\nve")
    before = files_signature([file])
    file.touch()
    assert files_signature([file]) == before
    change(file)
    assert files_signature([file]) != before


def test_signature_of_large_files_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koushi.data.files.READ_WHOLE", 3)
    file = tmp_path / "a.txt"
    file.write_text("five!")
    [line] = files_signature([file])
    assert line.startswith(f"{file} 5 ")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: No such file"):
        files_signature([file, tmp_path / "b.txt"])
