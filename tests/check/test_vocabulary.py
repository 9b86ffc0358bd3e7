"""How many ids a tokenizer needs, against the library that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from koushi.check.vocabulary import EMBEDDED, ids_needed, tokenizer_file
from koushi.data.tokenizer import tokenizer_path


def needed(folder: Path, content: object) -> int:
    path = folder / "tokenizer.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return ids_needed(path)


def test_the_embedded_tokenizer_is_counted_as_the_library_counts_it() -> None:
    vocabulary = Tokenizer.from_file(str(EMBEDDED)).get_vocab(with_added_tokens=True)
    assert ids_needed(EMBEDDED) == max(vocabulary.values()) + 1 <= 2048


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}}, 8),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 11}]}, 12),
        ({"model": {"vocab": {"a": 3}}, "added_tokens": None}, 4),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]]}, "added_tokens": [{"id": 1}]}, 2),
    ],
)
def test_vocabularies(tmp_path: Path, content: object, count: int) -> None:
    assert needed(tmp_path, content) == count


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "holds no model"),
        ({"model": 3}, "holds no model"),
        ({"model": {"vocab": 3}}, "holds no model"),
        ({"model": {"vocab": {}}}, "empty vocabulary"),
        ({"model": {"vocab": {"a": "b"}}}, "not integers"),
        ({"model": {"vocab": {"a": 1}}, "added_tokens": [3]}, "added_tokens"),
        ({"model": {"vocab": {"a": 1}}, "added_tokens": [{}]}, "not integers"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needed(tmp_path, content)


def test_a_tokenizer_is_looked_for_where_the_data_part_looks(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("own.json", "folder/tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for name in ("embedded", "own.json", "folder", str(tmp_path / "own.json")):
        assert tokenizer_file(name, tmp_path) == tokenizer_path(name, tmp_path)
