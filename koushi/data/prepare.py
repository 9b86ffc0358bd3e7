"""Prepares the data of a run once for all its processes: tokenises text, looks through token files."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import final

import numpy as np
import tokenizers

from koushi.data import embedded
from koushi.data.cache import (
    Record,
    cache_errors,
    cache_folder,
    load,
    locked,
    publish,
    token_file,
)
from koushi.data.files import files_signature, source_files
from koushi.data.progress import Progress
from koushi.data.sources import read_documents
from koushi.data.text import Piece
from koushi.data.tokenizer import Encoder, file_digest, tokenizer_path
from koushi.data.tokens import DTYPES, TokenFiles
from koushi.errors import DataError
from koushi.job import Job

FORMAT = 1
"""Raised when the same source would give other tokens than before."""

GROUP_CHARACTERS = 1 << 20
MOST_THREADS = 16
SCAN = 1 << 24


@dataclass(frozen=True)
class Corpus:
    """All the tokens of a run, ready to be read."""

    tokens: TokenFiles
    end_of_document_id: int | None
    """None: nothing marks where documents end."""
    digest: str
    """A hash of the tokens: two machines of a run must agree on it."""


def prepare(job: Job) -> Corpus:
    """The tokens of ``job``'s data, from the cache or made now; many processes may ask at once.

    Raises DataError for anything wrong with the data, the tokenizer or the cache folder.
    """
    data = job.config.data
    assert data.source != "synthetic", "synthetic data needs no preparing"
    corpus = _prepare_tokens(job) if data.source == "tokens" else _prepare_text(job)
    end, vocab_size = corpus.end_of_document_id, job.size.vocab_size
    if end is not None and end >= vocab_size:
        raise DataError(
            f"data.end_of_document_id: {end} is outside the model's vocabulary; it must be below {vocab_size}"
        )
    return corpus


def _prepare_tokens(job: Job) -> Corpus:
    data = job.config.data
    files = source_files(data, job.base)
    tokens = TokenFiles(files, data.token_dtype)
    key = _key("tokens", files_signature(files), data.token_dtype)
    record = _once(key, False, lambda folder: _scan(tokens, data.token_dtype))
    if record.max_id >= job.size.vocab_size:
        raise DataError(
            f"{tokens.place(record.max_index)}: id {record.max_id} is outside the model's vocabulary; ids must be "
            f"below model.vocab_size {job.size.vocab_size} (or data.token_dtype is not {data.token_dtype})"
        )
    return Corpus(tokens, data.end_of_document_id, record.digest)


def _prepare_text(job: Job) -> Corpus:
    data = job.config.data
    files = [] if data.source == "embedded" else source_files(data, job.base)
    signature = embedded.signature() if data.source == "embedded" else files_signature(files)
    path = tokenizer_path(data.tokenizer, job.base)
    key = _key(
        data.source, signature, data.text_key, file_digest(path), tokenizers.__version__, data.end_of_document_id
    )

    def make(folder: Path) -> Record:
        encoder = Encoder(path, data.end_of_document_id)
        _check_vocabulary(encoder.vocab_size, path, job)  # before hours of work, not after
        return _tokenise(read_documents(data, files), encoder, token_file(folder, key))

    record = _once(key, True, make)
    assert record.vocab_size is not None, "a record of text names the tokenizer's vocabulary"
    _check_vocabulary(record.vocab_size, path, job)
    tokens = TokenFiles([token_file(cache_folder(), key)], record.dtype)
    return Corpus(tokens, record.end_of_document_id, record.digest)


def _check_vocabulary(vocab_size: int, path: Path, job: Job) -> None:
    if vocab_size > job.size.vocab_size:
        raise DataError(
            f"data.tokenizer: {path} has ids up to {vocab_size - 1}; model.vocab_size is {job.size.vocab_size} "
            f"and must be at least {vocab_size}"
        )


def _key(*parts: object) -> str:
    text = json.dumps([FORMAT, *parts])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _once(key: str, has_tokens: bool, make: Callable[[Path], Record]) -> Record:
    folder = cache_folder()
    record = load(folder, key, has_tokens)
    if record is None:
        with locked(folder, key):
            # Another process may have made it while this one waited.
            record = load(folder, key, has_tokens)
            if record is None:
                with cache_errors(folder):
                    record = make(folder)
                    publish(folder, key, record)
    return record


def _scan(tokens: TokenFiles, dtype: str) -> Record:
    """Reads all of the token files once, for their highest id and their digest."""
    tally = _Tally("looking through token files")
    for start in range(0, len(tokens), SCAN):
        tally.add(tokens.read(start, min(start + SCAN, len(tokens))).astype(DTYPES[dtype]), tokens.place(start))
    return tally.record(dtype, None, None)


def _tokenise(documents: Iterable[Piece], encoder: Encoder, target: Path) -> Record:
    """Writes the tokens of all documents to ``target``, a group at a time."""
    dtype = "uint16" if max(encoder.vocab_size, encoder.end_id + 1) <= 1 << 16 else "uint32"
    part = target.with_name(target.name + ".part")
    tally = _Tally("tokenising")
    try:
        with part.open("wb") as stream:
            for ids, where in _encoded(documents, encoder):
                ids = ids.astype(DTYPES[dtype])
                stream.write(ids.data)
                tally.add(ids, where)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return tally.record(dtype, encoder.vocab_size, encoder.end_id)


@final
class _Tally:
    """What a Record says of tokens, summed up while they go by."""

    def __init__(self, doing: str):
        self._progress = Progress(doing)
        self._digest = blake2b(digest_size=16)
        self._count = 0
        self._max_id = -1
        self._max_index = 0

    def add(self, ids: np.ndarray, where: str) -> None:
        self._digest.update(ids.astype("<u4").data)
        if len(ids) and int(ids.max()) > self._max_id:
            place = int(ids.argmax())
            self._max_id, self._max_index = int(ids[place]), self._count + place
        self._count += len(ids)
        self._progress.update(self._count, where)

    def record(self, dtype: str, vocab_size: int | None, end_id: int | None) -> Record:
        return Record(
            count=self._count,
            dtype=dtype,
            digest=self._digest.hexdigest(),
            max_id=self._max_id,
            max_index=self._max_index,
            vocab_size=vocab_size,
            end_of_document_id=end_id,
        )


def _groups(documents: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    characters = 0
    for piece in documents:
        if piece.text:  # an empty document is no document
            group.append(piece)
            characters += len(piece.text)
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _encoded(documents: Iterable[Piece], encoder: Encoder) -> Iterator[tuple[np.ndarray, str]]:
    """The ids of groups of pieces, in order, with the place each group ends at."""

    def encode(group: list[Piece]) -> tuple[np.ndarray, str]:
        ids = encoder.encode([piece.text for piece in group], [piece.ends for piece in group])
        return ids, group[-1].where

    threads = min(MOST_THREADS, os.cpu_count() or 1)
    waiting: deque[Future[tuple[np.ndarray, str]]] = deque()
    with _no_threads_of_the_library(), ThreadPoolExecutor(threads) as pool:
        for group in _groups(documents):
            waiting.append(pool.submit(encode, group))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _no_threads_of_the_library() -> Iterator[None]:
    """The tokenizers library's own threads would outlive the work, and the launcher forks after it."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
