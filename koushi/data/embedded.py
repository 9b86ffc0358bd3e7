"""The embedded corpus: English text that every user's Python already holds.

Python's own help topics, and the docstrings of the standard library, read from its source without
importing it. Nothing is downloaded and nothing is redistributed; so the corpus follows the Python
version. It is the same for every process of one installation.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from koushi.data.text import is_unicode
from koushi.errors import DataError

LEFT_OUT = frozenset({"idlelib", "lib2to3", "distutils", "ensurepip", "turtledemo", "test", "encodings", "pydoc_data"})
LEFT_OUT_FOLDERS = frozenset({"test", "tests", "__pycache__"})
SHORTEST_DOCUMENT = 200
LEAST_TEXT = 50_000


def source_files(stdlib: Path | None = None) -> list[Path]:
    """The standard library's source files, in a fixed order; empty where there are none."""
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    wanted = sys.stdlib_module_names - LEFT_OUT
    found = []
    for folder, subfolders, names in os.walk(root):
        if Path(folder) == root:
            subfolders[:] = [name for name in subfolders if name in wanted]
            names = [name for name in names if name.removesuffix(".py") in wanted]
        else:
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def help_topics() -> list[str]:
    """What Python's ``help()`` knows; empty where that is left out of an installation."""
    try:
        return list(import_module("pydoc_data.topics").topics.values())
    except ImportError:
        return []


def signature() -> list[str]:
    """What the corpus depends on, cheap to find: the version of Python and the names and sizes of its files."""
    root = Path(sysconfig.get_path("stdlib"))
    return [sys.version, *(f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in source_files())]


def documents() -> Iterator[str]:
    """Every help topic and every module's docstrings.

    Sorted by a hash of the text, so that what is held out at the end is a fair part of the whole.
    Raises DataError where this Python holds hardly any text.
    """
    found = [*help_topics(), *map(module_text, source_files())]
    texts = [text for text in found if len(text) >= SHORTEST_DOCUMENT]
    size = sum(map(len, texts))
    if size < LEAST_TEXT:
        raise DataError(
            f"data.source: embedded: this Python holds only {size} characters of documentation (no pydoc_data, no "
            f"standard library source in {sysconfig.get_path('stdlib')}); set data.source: text and data.path to "
            "text of your own, or use a full installation of Python"
        )
    yield from sorted(texts, key=lambda text: blake2b(text.encode(), digest_size=16).digest())


def module_text(path: Path) -> str:
    """The docstrings of a source file, each under its dotted name; empty if it can't be read."""
    try:
        # An old escape in some module must not be lost, or reported, by how the user's warnings are set.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    return "\n\n".join(f"{name}\n\n{text}" for name, text in _docstrings(tree, path.stem))


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and is_unicode(text):
            yield name, text
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")
