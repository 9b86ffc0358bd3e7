"""Pieces of documents: what a source hands to the tokenizer, so that a huge document needs little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

LONGEST_PIECE = 1 << 20
"""Characters. A longer document is cut at the start of a line, else anywhere."""


class Piece(NamedTuple):
    """A part of a document, in order; almost always the whole of it."""

    text: str
    ends: bool
    """Whether the document ends here."""
    where: str
    """Where it began, for people: ``file:line``."""


def is_unicode(text: str) -> bool:
    """False if ``text`` holds half of a surrogate pair, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces(blocks: Iterable[str], where: str, longest: int = LONGEST_PIECE) -> Iterator[Piece]:
    """One document, given in blocks of any size; where it is cut doesn't depend on those."""
    text = ""
    for block in blocks:
        for start in range(0, len(block), longest):
            text += block[start : start + longest]
            while len(text) > longest:
                cut = _cut(text, longest)
                yield Piece(text[:cut], False, where)
                text = text[cut:]
    yield Piece(text, True, where)


def _cut(text: str, longest: int) -> int:
    """After the last newline that no blank stands beside: pre-tokenizers don't join across it."""
    newline = text.rfind("\n", 0, longest)
    while newline > 0 and (text[newline - 1].isspace() or text[newline + 1].isspace()):
        newline = text.rfind("\n", 0, newline)
    return newline + 1 if newline > 0 else longest
