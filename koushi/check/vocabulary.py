"""How many ids a Hugging Face ``tokenizer.json`` needs, read as plain JSON: quicker than loading it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).parent.parent / "data" / "tokenizer.json"


def tokenizer_file(name: str, base: Path) -> Path:
    """The file that ``data.tokenizer`` names: embedded, a file, or a folder with a tokenizer.json."""
    if name == "embedded":
        return EMBEDDED
    path = base / Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def ids_needed(path: Path) -> int:
    """The largest id, added tokens too, plus one.

    Raises OSError where the file cannot be read and ValueError where it is no tokenizer.
    """
    content = _content(path)
    match content:
        case {"model": {"vocab": dict(vocab)}}:
            ids = list(vocab.values())
        case {"model": {"vocab": list(pieces)}}:
            # Unigram models list their pieces, whose places are the ids.
            ids = list(range(len(pieces)))
        case _:
            raise ValueError("holds no model with a vocabulary")
    return _largest([*ids, *_added(content)]) + 1


@lru_cache(maxsize=2)
def _content(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise ValueError("is not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON (line {error.lineno}: {error.msg})") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError("is not JSON") from error


def added_tokens(path: Path) -> list[str]:
    """What the added tokens are called. Raises as ``ids_needed`` does."""
    content = _content(path)
    tokens = content.get("added_tokens") if isinstance(content, dict) else None
    return [str(token.get("content")) for token in tokens or [] if isinstance(token, dict)]


def _added(content: dict[str, Any]) -> list[Any]:
    tokens = content.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        raise ValueError("has added_tokens that are not a list of tokens")
    return [token.get("id") for token in tokens]


def _largest(ids: list[Any]) -> int:
    if not ids:
        raise ValueError("has an empty vocabulary")
    if not all(isinstance(one, int) for one in ids):
        raise ValueError("has ids that are not integers")
    return int(max(ids))
