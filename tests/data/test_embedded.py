from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from koushi.data import embedded, train_tokenizer
from koushi.errors import DataError


def test_is_english_prose(embedded_documents: list[str]) -> None:
    text = "\n".join(embedded_documents)
    assert len(embedded_documents) > 100
    assert len(text) > 700_000
    plain = sum(character.isalpha() or character.isspace() for character in text)
    assert plain / len(text) > 0.8
    words = text.split()
    assert sum(word in {"the", "a", "of", "to", "is", "and", "in", "if"} for word in words) / len(words) > 0.1


def test_another_process_finds_the_same(embedded_documents: list[str]) -> None:
    code = (
        "from koushi.data import embedded, train_tokenizer\n"
        "print(train_tokenizer.corpus_digest(embedded.documents()))\n"
    )
    # Without docstrings, with warnings as errors and another hash seed: the corpus may depend on none of these.
    command = [sys.executable, "-OO", "-W", "error::SyntaxWarning", "-c", code]
    done = subprocess.run(command, env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, cwd=_root(), check=True)
    assert done.stdout.strip() == train_tokenizer.corpus_digest(embedded_documents)


def test_signature_is_stable_and_names_the_version() -> None:
    assert embedded.signature() == embedded.signature()
    assert embedded.signature()[0] == sys.version


def test_docstrings_of_a_module(tmp_path: Path) -> None:
    file = tmp_path / "shop.py"
    file.write_text(
        '"""Sells."""\n'
        "class Till:\n"
        '    """Counts."""\n'
        "    async def ring(self):\n"
        '        """Rings."""\n'
        '        "not one"\n'
        "    def bad(self):\n"
        '        """\\ud800"""\n'
        "def bare(): pass\n"
    )
    assert embedded.module_text(file) == "shop\n\nSells.\n\nshop.Till\n\nCounts.\n\nshop.Till.ring\n\nRings."


def test_broken_modules_give_nothing(tmp_path: Path) -> None:
    for content in (b"def (", b"\xff\xfe", b"a\0b"):
        file = tmp_path / "broken.py"
        file.write_bytes(content)
        assert embedded.module_text(file) == ""
    assert embedded.module_text(tmp_path / "missing.py") == ""


def test_old_escapes_are_read_whatever_the_warnings(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text('"""A \\d digit."""')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert embedded.module_text(file) == "old\n\nA \\d digit."


def test_source_files_leave_out_tests_and_strangers(tmp_path: Path) -> None:
    for name in ("ast.py", "json/tool.py", "json/tests/x.py", "site-packages/torch.py", "stranger.py", "test/y.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    found = [path.relative_to(tmp_path).as_posix() for path in embedded.source_files(tmp_path)]
    assert found == ["ast.py", "json/tool.py"]
    assert embedded.source_files(tmp_path / "nowhere") == []


def test_help_topics_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "source_files", list)
    assert sum(map(len, embedded.documents())) > embedded.LEAST_TEXT


def test_docstrings_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "help_topics", list)
    assert sum(map(len, embedded.documents())) > 500_000


def test_missing_help_topics_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert embedded.help_topics() == []


def test_hardly_any_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "source_files", list)
    monkeypatch.setattr(embedded, "help_topics", lambda: ["short"] * 3 + ["x" * 300])
    with pytest.raises(DataError, match=r"holds only 300 characters.*set data.source: text"):
        list(embedded.documents())


def _root() -> Path:
    return Path(__file__).parents[2]
