"""The order of samples: a keyed permutation of a range that needs no table in memory."""

from __future__ import annotations

from hashlib import blake2b
from typing import final

ROUNDS = 8


def key_of(*parts: object) -> bytes:
    """16 bytes that depend on every part, the same on every platform."""
    return blake2b("\x1f".join(map(str, parts)).encode(), digest_size=16).digest()


@final
class Permutation:
    """A pseudo-random bijection of ``range(count)``, fixed by ``key``.

    A Feistel network over the smallest even number of bits that holds ``count`` (Luby and Rackoff
    1988); a result outside the range is sent through again until it falls inside (Black and Rogaway
    2002, "cycle walking"), which takes fewer than four passes on average.
    """

    def __init__(self, count: int, key: bytes):
        assert count >= 1, f"a permutation of {count} items"
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._width = (self._half + 7) // 8
        self._keyed = [blake2b(key=key, salt=bytes([number]), digest_size=8) for number in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"{index} is outside a permutation of {self.count}")
        while True:
            index = self._shuffle(index)
            if index < self.count:
                return index

    def _shuffle(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for keyed in self._keyed:
            hashed = keyed.copy()
            hashed.update(right.to_bytes(self._width, "little"))
            left, right = right, left ^ (int.from_bytes(hashed.digest(), "little") & self._mask)
        return left << self._half | right
