"""Rules on data: files that must be there, and token ids that must fit the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from koushi.check.rule import NAME, TO_TRAIN, TP, VOCAB, Facts, Finding, Rule
from koushi.check.vocabulary import added_tokens, ids_needed, tokenizer_file
from koushi.config.source import shown_text
from koushi.data.end_names import END_NAMES
from koushi.data.files import SUFFIXES, source_files
from koushi.errors import DataError

PATH = "data.path"
SOURCE = "data.source"
TOKENIZER = "data.tokenizer"
TOKEN_DTYPE = "data.token_dtype"
MASKED = "data.masked_fraction"
END_ID = "data.end_of_document_id"

_WIDTHS = {"uint16": 2, "uint32": 4}


def _path(facts: Facts) -> Iterator[Finding]:
    data = facts.config.data
    if data.source not in SUFFIXES:
        if data.path is not None:
            what = f"is {shown_text(data.path)}, but the source {data.source} reads no files"
            yield Finding((PATH, SOURCE), what, f"leave it empty, or a {SOURCE} of {', '.join(SUFFIXES)}")
        return
    if not data.path:
        what = f"is empty, but the source {data.source} reads files"
        yield Finding((PATH, SOURCE), what, "a file, a folder or a glob, relative to the run file")
        return
    try:
        files = source_files(data, facts.base)
        empty = all(file.stat().st_size == 0 for file in files)
    except DataError as error:
        what, _, legal = str(error).removeprefix(f"{PATH}: ").partition("; ")
        yield Finding((PATH, SOURCE), f"is {shown_text(data.path)}: {what}", legal, elsewhere=TO_TRAIN)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"is {shown_text(data.path)}, which cannot be read: {error}"
        yield Finding((PATH, SOURCE), what, "check the path", elsewhere=TO_TRAIN)
    else:
        if empty:
            yield Finding((PATH, SOURCE), f"is {shown_text(data.path)}, which holds nothing", "files with data in them")
        elif data.source == "tokens":
            yield from _whole_tokens(files, data.token_dtype)


def _whole_tokens(files: list[Path], dtype: str) -> Iterator[Finding]:
    for file in files:
        if (size := file.stat().st_size) % _WIDTHS[dtype]:
            what = f"{file} has {size} bytes, not a whole number of {dtype} tokens"
            yield Finding((PATH, TOKEN_DTYPE), what, f"a file of whole tokens, {_WIDTHS[dtype]} bytes each")


def _masked(facts: Facts) -> Iterator[Finding]:
    data = facts.config.data
    if data.masked_fraction > 0 and data.source != "synthetic":
        what = f"is {data.masked_fraction}, but the source is {data.source}"
        yield Finding((MASKED, SOURCE), what, f"0, or a {SOURCE} of synthetic")
    elif data.masked_fraction == 1:
        yield Finding((MASKED,), "is 1, which leaves no label for the loss", "a fraction below 1")


def _tokenizer(facts: Facts) -> Iterator[Finding]:
    data, vocab_size = facts.config.data, facts.size.vocab_size
    tokenizer = facts.tokenizer
    if data.source == "synthetic" or (data.source == "tokens" and tokenizer == "embedded"):
        return
    try:
        path = tokenizer_file(tokenizer, facts.base)
        needed = ids_needed(path)
    except FileNotFoundError:
        what = f"is {shown_text(tokenizer)}, and there is no such file"
        legal = "embedded, or the path of a tokenizer.json, relative to the run file"
        unknown = f"whether its ids fit vocab_size {vocab_size} is left to the machine that trains"
        yield Finding((TOKENIZER,), what, legal, elsewhere=unknown)
        return
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror or "cannot be read" if isinstance(error, OSError) else str(error)
        what = f"is {shown_text(tokenizer)}, which is not a tokenizer: {reason}"
        yield Finding((TOKENIZER,), what, "embedded, or the path of a Hugging Face tokenizer.json")
        return
    if needed > vocab_size:
        tp = facts.config.parallelism.tensor_parallel_degree
        least = -(-needed // tp) * tp
        multiple = f" that is a multiple of tp {tp}" if tp > 1 else ""
        yield Finding(
            (VOCAB, TOKENIZER, NAME),
            f"the tokenizer is larger than the model's vocabulary: {tokenizer} has ids up to {needed - 1}, "
            f"vocab_size is {vocab_size}",
            f"a vocab_size of at least {least}{multiple}",
        )


def _end_token(facts: Facts) -> Iterator[Finding]:
    data = facts.config.data
    if data.source in ("synthetic", "tokens") or data.end_of_document_id is not None:
        return
    try:
        names = added_tokens(tokenizer_file(data.tokenizer, facts.base))
    except (OSError, ValueError, RuntimeError):
        return  # told by the rule on the tokenizer
    if not any(name in END_NAMES for name in names):
        what = f"is {shown_text(data.tokenizer)}, which has no added token that ends a document, such as {END_NAMES[0]}"
        yield Finding((TOKENIZER,), what, f"a tokenizer with one, or set {END_ID} to the id that ends a document")


def _parquet(facts: Facts) -> Iterator[Finding]:
    if facts.config.data.source == "parquet" and find_spec("pyarrow") is None:
        what, legal = "is parquet, but pyarrow is not installed", "pip install 'koushi[parquet]', or jsonl"
        yield Finding((SOURCE,), what, legal, elsewhere=TO_TRAIN)


def _token_dtype(facts: Facts) -> Iterator[Finding]:
    data, vocab_size = facts.config.data, facts.size.vocab_size
    if data.source == "tokens" and data.token_dtype == "uint16" and vocab_size > 2**16:
        what = f"is uint16, which ends at {2**16 - 1}, but vocab_size is {vocab_size}"
        yield Finding((TOKEN_DTYPE, SOURCE, VOCAB), what, f"uint32, or a vocab_size of at most {2**16}")


def _end_of_document(facts: Facts) -> Iterator[Finding]:
    end, vocab_size = facts.config.data.end_of_document_id, facts.size.vocab_size
    if end is not None and end >= vocab_size:
        what = f"is {end}, outside the vocabulary of {vocab_size}"
        yield Finding((END_ID, VOCAB), what, f"an id from 0 to {vocab_size - 1}")


RULES = (
    Rule((SOURCE, PATH, TOKEN_DTYPE), _path),
    Rule((SOURCE, MASKED), _masked),
    Rule((SOURCE, TOKENIZER, NAME, VOCAB, TP), _tokenizer),
    Rule((SOURCE, TOKEN_DTYPE, NAME, VOCAB), _token_dtype),
    Rule((END_ID, NAME, VOCAB), _end_of_document),
    Rule((SOURCE, TOKENIZER, END_ID), _end_token),
    Rule((SOURCE,), _parquet),
)
