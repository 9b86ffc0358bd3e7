"""docs/accuracy.md: what commands print stands there between marks, renewed by them and kept by tests. No torch."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "accuracy.md"
"""Not there where the package is installed without its repository."""


def shown(name: str) -> str:
    """What the document shows between the marks of ``name``."""
    begin, end = _marks(name)
    return DOCUMENT.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


def renew(name: str, text: str) -> None:
    """Put ``text`` between the marks of ``name``, where there is a document."""
    if not DOCUMENT.exists():
        return
    begin, end = _marks(name)
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    DOCUMENT.write_text(f"{before}{begin}\n{fenced(text)}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def fenced(text: str) -> str:
    """As the document shows it."""
    return f"```text\n{text}\n```"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->"
