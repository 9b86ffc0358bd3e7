"""A Hugging Face ``tokenizer.json``: text to token ids, and which id ends a document. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import final

import numpy as np
from tokenizers import Tokenizer

from koushi.data.end_names import END_NAMES
from koushi.errors import DataError

EMBEDDED = Path(__file__).with_name("tokenizer.json")
BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"


def tokenizer_path(name: str, base: Path) -> Path:
    """Where the ``tokenizer.json`` lies that a run file names. Raises DataError if it isn't there."""
    if name == "embedded":
        return EMBEDDED
    path = base / Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"data.tokenizer: there is no file {path}; give the path of a Hugging Face tokenizer.json")
    return path


def file_digest(path: Path) -> str:
    """A hash of a tokenizer's content. Raises DataError if it can't be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise DataError(f"data.tokenizer: {path} cannot be read: {error.strerror}") from error


@final
class Encoder:
    """Turns documents into token ids, each ended by ``end_id``.

    ``vocab_size`` is the highest id plus one. Raises DataError for a file that is no tokenizer, or
    that names no token to end a document with and ``end_id`` isn't given.
    """

    def __init__(self, path: Path, end_id: int | None = None):
        self.path = path
        self.tokenizer = _load(path)
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise DataError(f"data.tokenizer: {path} has an empty vocabulary")
        self.end_id = _end_id(self.tokenizer, path) if end_id is None else end_id

    def encode(self, texts: Sequence[str], ends: Sequence[bool]) -> np.ndarray:
        """Ids (uint32) of several pieces in a row; ``end_id`` follows those that end their document."""
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception for a text it has no tokens for
            raise DataError(
                f"data.tokenizer: {self.path} cannot encode the text: {error}; give a tokenizer that covers it"
            ) from error
        ids = chain.from_iterable(
            chain(encoding.ids, (self.end_id,)) if end else encoding.ids
            for encoding, end in zip(encodings, ends, strict=True)
        )
        return np.fromiter(ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens written out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _load(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything wrong with a file
        raise DataError(f"data.tokenizer: {path} is not a Hugging Face tokenizer.json: {error}") from error
    # Files often keep the settings of inference: cutting documents off and padding them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that spells a special token must not end there.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _end_id(tokenizer: Tokenizer, path: Path) -> int:
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    for name in END_NAMES:
        if name in added:
            return int(added[name])
    raise DataError(
        f"data.tokenizer: {path} has no added token that ends a document, such as {', '.join(END_NAMES)}; "
        "set data.end_of_document_id, or give another tokenizer"
    )
