"""Seconds of a device's kernels by shape. No torch.

A matmul is cut into tiles that the device's units work off in waves, so that its time goes in steps;
a large one is held back by power, a thin one by memory. Attention is one fused kernel whose rate
depends on the head and the length. All else moves bytes.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Literal

from koushi.hardware.hardware import Chip
from koushi.traffic import DTYPE_BYTES

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
"""Rows and columns of the output that one unit works on at a time; libraries choose by shape."""
TILE_START = 128
"""Filling and draining a tile costs as much as so many steps of k."""
REUSE = 30.0
"""A tile of r rows and c columns multiplies r x c / (r + c) times per value it loads; with so many, half of its
time goes in loading."""

ALIGNED = 16
"""Bytes at whose multiples rows must begin for a chip's matrix units to be used at all."""


@lru_cache(maxsize=65536)
def matmul_seconds(chip: Chip, m: int, n: int, k: int, dtype: str, batch: int = 1, newest: bool = False) -> float:
    """Of ``batch`` products of [m, k] and [k, n], on the tile shape that suits it best.

    ``newest``: with the vendor's newest libraries.

    Tiles and waves: NVIDIA, Matrix Multiplication Background (2020). Power: the sustained rate of ``chip``.
    """
    released = chip.released_float8 if dtype == "float8" else chip.released
    peak = chip.peak(dtype) * (1.0 if newest else released)
    flops = 2.0 * m * n * k * batch
    moved = (m * k + k * n) * DTYPE_BYTES[dtype] + m * n * max(2, DTYPE_BYTES[dtype])
    memory = moved * batch / (chip.memory_bandwidth * chip.streaming)
    if chip.units == 1:
        return max(flops / (peak * chip.sustained), memory) + chip.kernel_us * 1e-6
    if (n * DTYPE_BYTES[dtype]) % ALIGNED or (k * DTYPE_BYTES[dtype]) % ALIGNED:
        peak = min(peak, chip.peak("float32"))
    waves = min(_in_waves(chip.units, m, n, k, batch, tile) for tile in TILES) / (peak * chip.burst)
    return max(waves, flops / (peak * chip.sustained), memory) + chip.kernel_us * 1e-6


def _in_waves(units: int, m: int, n: int, k: int, batch: int, tile: tuple[int, int]) -> float:
    """FLOPs that a device with full tiles could do meanwhile. Few tiles of a deep product share out k."""
    rows, columns = tile
    tiles = ceil(m / rows) * ceil(n / columns) * batch
    parts = max(1, min(units // tiles, k / 1024)) if tiles < units else 1
    reuse = rows * columns / (rows + columns)
    best = TILES[0][0] * TILES[0][1] / (TILES[0][0] + TILES[0][1])
    loading = (1 + REUSE / reuse) / (1 + REUSE / best)
    return ceil(tiles * parts / units) * units * rows * columns * 2.0 * (k / parts + TILE_START) * loading


Generation = Literal["flash1", "flash2", "flash3"]
EARLIER = 0.6
"""What fused attention before FlashAttention-2 reaches of it (arXiv 2307.08691, figures 4 to 6)."""
ATTENTION_TILE = 128
HEAD_POWER = 0.2
"""Heads below 128 run at (head_dim / 128) to this power."""


@lru_cache(maxsize=16384)
def attention_seconds(
    chip: Chip,
    batch: int,
    heads: int,
    length: int,
    others: int,
    head_dim: int,
    dtype: str,
    backward: bool = False,
    generation: Generation = "flash2",
) -> float:
    """Of fused causal attention of ``length`` queries on ``others`` keys (the same number, or all of a longer
    sequence of which the queries are an even part).

    FlashAttention-2 (arXiv 2307.08691): forward is two products, backward five; half of the tiles are skipped,
    those on the diagonal are not.
    """
    flops = 4.0 * batch * heads * length * others * head_dim * (2.5 if backward else 1.0) / 2
    flops *= 1 + ATTENTION_TILE / others
    rate = chip.peak(dtype) * (chip.attention_backward if backward else chip.attention_forward)
    rate *= min(1.0, head_dim / 128) ** HEAD_POWER * _generation(chip, generation)
    pieces = batch * heads * ceil(length / ATTENTION_TILE)
    filled = pieces / (ceil(pieces / chip.units) * chip.units)
    seconds: float = flops / (rate * filled) + chip.kernel_us * 1e-6
    return seconds


def _generation(chip: Chip, generation: Generation) -> float:
    return {"flash1": EARLIER, "flash2": 1.0, "flash3": chip.newest_attention}[generation]


def streaming_seconds(chip: Chip, moved: float, kernels: float) -> float:
    """Of ``kernels`` that read and write ``moved`` bytes in all."""
    return moved / (chip.memory_bandwidth * chip.streaming) + kernels * chip.kernel_us * 1e-6
