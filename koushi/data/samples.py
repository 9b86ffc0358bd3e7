"""Samples: what step i of a run trains on, as a function of the seed and i alone.

T is the sequence length. Sample j of a corpus of N tokens is tokens [j*T, j*T + T), its labels are
the tokens one further; so there are (N - 1) // T samples. The last ``validation_fraction`` of them is
held out; the others are gone through in another order every epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from hashlib import blake2b
from typing import final

import numpy as np

from koushi.data.order import Permutation, key_of
from koushi.data.tokens import TokenFiles
from koushi.errors import DataError

IGNORE_INDEX = -100
"""The label that counts in no loss."""

Sample = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64 [T] each."""

SYNTHETIC_SAMPLES = 1 << 20


class Samples(ABC):
    """``count`` samples of a corpus, some for training and some held out."""

    def __init__(self, count: int, seq_len: int, seed: int, validation_fraction: float):
        assert count >= 1, "a corpus without samples"
        held_out = round(count * validation_fraction)
        if validation_fraction > 0:
            held_out = min(max(held_out, 1), count - 1)
        self.seq_len = seq_len
        self.seed = seed
        self.validation_count = held_out
        """Samples held out."""
        self.train_count = count - held_out
        """Samples of one epoch, at least 1."""

    @property
    def digest(self) -> str:
        """Tells this data from other data: by how much there is, what it is made of, and its first and last sample."""
        about = f"{self.train_count} {self.validation_count} {self.seq_len} {self.seed} {self.content}"
        found = blake2b(about.encode(), digest_size=8)
        for index in (0, self.train_count + self.validation_count - 1):
            for ids in self.sample(index):
                found.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
        return found.hexdigest()

    @property
    @abstractmethod
    def content(self) -> str:
        """Tells what the samples are cut from; from their first and last, what is between would not be known."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Sample ``index`` of the corpus, in corpus order."""

    def train(self, i: int) -> Sample:
        """Sample ``i`` of the run, counted from its start through all epochs."""
        epoch, place = divmod(i, self.train_count)
        return self.sample(_epoch_order(self.train_count, self.seed, epoch)[place])

    def validation(self, i: int) -> Sample:
        """The ``i``-th held-out sample, i < validation_count, always in the same order."""
        assert 0 <= i < self.validation_count, f"held-out sample {i} of {self.validation_count}"
        return self.sample(self.train_count + i)


@lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> Permutation:
    return Permutation(count, key_of("order of training samples", seed, epoch))


@final
class Packed(Samples):
    """Documents packed end to end, each ended by ``end_of_document_id``.

    The label where the next token begins another document is IGNORE_INDEX, unless
    ``predict_across_documents``; with ``end_of_document_id`` None there are no boundaries.
    Raises DataError for fewer tokens than one sample needs.
    """

    def __init__(
        self,
        tokens: TokenFiles,
        *,
        seq_len: int,
        seed: int = 0,
        validation_fraction: float = 0.0,
        end_of_document_id: int | None = None,
        predict_across_documents: bool = False,
        content: str = "",
    ):
        """``content``: a hash of all the tokens."""
        count = max(0, len(tokens) - 1) // seq_len
        if count == 0:
            shorter = f", or a seq_len of at most {len(tokens) - 1}" if len(tokens) > 1 else ""
            raise DataError(
                f"the data holds {len(tokens)} tokens, fewer than one sample of training.seq_len {seq_len} and the "
                f"token after it; give more text{shorter}"
            )
        super().__init__(count, seq_len, seed, validation_fraction)
        self._tokens = tokens
        self._boundary = None if predict_across_documents else end_of_document_id
        self._content = content

    @property
    def content(self) -> str:
        return f"{self._content} {self._boundary}"

    def sample(self, index: int) -> Sample:
        start = index * self.seq_len
        window = self._tokens.read(start, start + self.seq_len + 1)
        tokens, labels = window[:-1], window[1:].copy()
        if self._boundary is not None:
            labels[tokens == self._boundary] = IGNORE_INDEX
        return tokens, labels


@final
class Synthetic(Samples):
    """Random ids below ``vocab_size``, with ``masked_fraction`` of the labels left out of the loss.

    Unequally: up to a half, a sample's own share is uniform in [0, 2 * masked_fraction]; above, some
    samples are left out whole and the others' share is uniform in [0, 1].
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        seed: int = 0,
        validation_fraction: float = 0.0,
        masked_fraction: float = 0.0,
    ):
        super().__init__(SYNTHETIC_SAMPLES, seq_len, seed, validation_fraction)
        self._vocab_size = vocab_size
        self._masked_fraction = masked_fraction

    @property
    def content(self) -> str:
        return f"synthetic {self._vocab_size} {self._masked_fraction}"

    def sample(self, index: int) -> Sample:
        # Only a bit generator's raw numbers are promised to stay the same in every version of NumPy.
        random = np.random.Philox(key=int.from_bytes(key_of("synthetic sample", self.seed, index), "little"))
        ids = (random.random_raw(self.seq_len + 1) % np.uint64(self._vocab_size)).astype(np.int64)
        tokens, labels = ids[:-1], ids[1:].copy()
        whole, share = _unit(random.random_raw(2))
        if whole < 2 * self._masked_fraction - 1:
            labels[:] = IGNORE_INDEX
        else:
            share *= min(1.0, 2 * self._masked_fraction)
            labels[_unit(random.random_raw(self.seq_len)) < share] = IGNORE_INDEX
        return tokens, labels


def _unit(raw: np.ndarray) -> np.ndarray:
    """64 random bits to float64 in [0, 1)."""
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
