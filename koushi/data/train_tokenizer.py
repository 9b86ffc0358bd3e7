"""Trains the embedded tokenizer: ``python -m koushi.data.train_tokenizer`` writes it anew.

A byte-level BPE of 2048 tokens, learnt from the embedded corpus alone. With ``--check`` nothing is
written: it is trained again and compared, which can only agree on the Python named below, because
the corpus follows the Python version.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable
from hashlib import blake2b

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from koushi.data import embedded
from koushi.data.tokenizer import BEGIN_OF_TEXT, EMBEDDED, END_OF_TEXT

VOCAB_SIZE = 2048
TRAINED_ON = "Python 3.11.7"
CORPUS_DIGEST = "9f1eecf7dc115ef0411ad63dda16da3b"


def train(documents: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens: two special ones, 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN_OF_TEXT, END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def as_json(tokenizer: Tokenizer) -> str:
    return str(tokenizer.to_str(pretty=False)) + "\n"


def corpus_digest(documents: Iterable[str]) -> str:
    digest = blake2b(digest_size=16)
    for document in documents:
        digest.update(document.encode() + b"\0")
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or with ``--check`` 1 if the tokenizer came out another one, 2 if this Python can't tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="train again and compare; write nothing")
    check = parser.parse_args(arguments).check

    documents = list(embedded.documents())
    digest = corpus_digest(documents)
    if check and digest != CORPUS_DIGEST:
        print(f"the corpus of Python {platform.python_version()} is not that of {TRAINED_ON}: nothing to compare")
        return 2
    text = as_json(train(documents))
    if check:
        same = text == EMBEDDED.read_text(encoding="utf-8")
        print(f"{EMBEDDED.name}: {'the same, byte for byte' if same else 'came out different'}")
        return 0 if same else 1
    EMBEDDED.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote {EMBEDDED.name} ({len(text)} characters); corpus of Python {platform.python_version()}: {digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
