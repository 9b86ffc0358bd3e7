"""Token ids on disk, read through memory maps: files of little-endian uint16 or uint32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import numpy as np

from koushi.data.files import unreadable
from koushi.errors import DataError

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@final
class TokenFiles:
    """Several files read as one run of tokens. Raises DataError for a file that isn't whole tokens."""

    def __init__(self, files: Sequence[Path], dtype: str):
        self.files = tuple(files)
        self._maps = [_map(file, dtype) for file in files]
        self._starts = [0, *accumulate(len(part) for part in self._maps)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` as int64 [stop - start]."""
        assert 0 <= start <= stop <= len(self), f"tokens {start} to {stop} of {len(self)}"
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            until = min(stop, self._starts[number + 1])
            offset = self._starts[number]
            parts.append(self._maps[number][start - offset : until - offset])
            start = until
            number += 1
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)

    def place(self, index: int) -> str:
        """Where a token lies, for people."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{self.files[number]}: token {index - self._starts[number]}"


def _map(file: Path, dtype: str) -> np.ndarray:
    width = DTYPES[dtype].itemsize
    try:
        size = file.stat().st_size
        if size % width:
            raise DataError(
                f"{file}: {size} bytes are not a whole number of {dtype} tokens of {width} bytes; "
                f"the file is cut short, or data.token_dtype is not {dtype}"
            )
        if size == 0:  # which can't be mapped
            return np.empty(0, dtype=DTYPES[dtype])
        return np.memmap(file, dtype=DTYPES[dtype], mode="r")
    except OSError as error:
        raise unreadable(file, error) from error
