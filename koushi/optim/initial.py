"""Initial weights: a function of (seed, parameter name, block of rows) alone.

A parameter is drawn in blocks of rows, each from a generator of its own, so that a rank draws only
the blocks its slice touches, and every layout gives the same full tensors, to the bit. Numbers are
drawn on the CPU in float32 whatever the device, and then cast.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from koushi.layout import Slices

BLOCK_NUMEL = 1 << 16


def draw(seed: int, name: str, shape: tuple[int, ...], std: float | None, part: Slices) -> Tensor:
    """``part`` of the initial value of parameter ``name`` of global ``shape``, float32 on the CPU.

    Normal with standard deviation ``std``, or ones for None.
    """
    rows = part[0]
    if std is None or rows.start == rows.stop:
        return torch.ones([piece.stop - piece.start for piece in part])
    per_row = 1
    for size in shape[1:]:
        per_row *= size
    block_rows = max(1, BLOCK_NUMEL // per_row)
    pieces = []
    for block in range(rows.start // block_rows, (rows.stop - 1) // block_rows + 1):
        first, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        values = torch.empty(stop - first, *shape[1:])
        values.normal_(std=std, generator=_generator(seed, name, block))
        kept = slice(max(rows.start, first) - first, min(rows.stop, stop) - first)
        pieces.append(values[(kept, *part[1:])])
    return torch.cat(pieces)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
