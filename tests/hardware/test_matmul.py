"""Kernels by shape: limits that no kernel passes, steps that tiles make."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koushi.hardware.hardware import load
from koushi.hardware.matmul import attention_seconds, matmul_seconds, streaming_seconds

CHIPS = [load(name).chip for name in ("v100", "a100", "h100", "gb200", "mi300x", "cpu")]
sizes = st.integers(min_value=1, max_value=512).map(lambda n: 64 * n)
chips = st.sampled_from(CHIPS)


@given(chip=chips, m=sizes, n=sizes, k=sizes)
def test_no_matmul_beats_the_peak_the_sustained_rate_or_the_memory(chip, m: int, n: int, k: int) -> None:
    seconds = matmul_seconds(chip, m, n, k, "float16", newest=True)
    assert seconds > 2 * m * n * k / (chip.peak("float16") * chip.sustained)
    assert seconds > 2 * (m * k + k * n + m * n) / chip.memory_bandwidth
    assert matmul_seconds(chip, m, n, k, "float16") >= seconds


@given(chip=chips, m=sizes, n=sizes, k=sizes)
@example(chip=CHIPS[1], m=64, n=64, k=1536)  # too short to share out twice
def test_twice_the_work_never_takes_less(chip, m: int, n: int, k: int) -> None:
    once = matmul_seconds(chip, m, n, k, "bfloat16")
    assert matmul_seconds(chip, 2 * m, n, k, "bfloat16") >= once
    assert matmul_seconds(chip, m, 2 * n, k, "bfloat16") >= once
    assert matmul_seconds(chip, m, n, 2 * k, "bfloat16") >= once


def test_large_matmuls_run_at_the_sustained_rate() -> None:
    for chip in CHIPS:
        seconds = matmul_seconds(chip, 65536, 16384, 16384, "float16", newest=True)
        rate = 2 * 65536 * 16384 * 16384 / seconds
        assert rate == pytest.approx(chip.peak("float16") * chip.sustained, rel=0.01)


def test_one_tile_more_than_units_costs_another_wave() -> None:
    chip = load("a100").chip
    full = matmul_seconds(chip, 256 * chip.units, 128, 8192, "float16")
    more = matmul_seconds(chip, 256 * (chip.units + 1), 128, 8192, "float16")
    assert more > 1.1 * full
    assert more > full * (chip.units + 1) / chip.units


def test_rows_that_are_not_aligned_lose_the_matrix_units() -> None:
    chip = load("a100").chip
    aligned = matmul_seconds(chip, 2048, 2048, 152, "float16", batch=32)
    off = matmul_seconds(chip, 2048, 2048, 150, "float16", batch=32)
    assert off > 3 * aligned
    assert 2 * 32 * 2048 * 2048 * 150 / off < chip.peak("float32")


def test_a_thin_matmul_is_bound_by_memory() -> None:
    chip = load("h100").chip
    seconds = matmul_seconds(chip, 8, 65536, 65536, "bfloat16")
    assert seconds == pytest.approx(2 * 65536 * 65536 / (chip.memory_bandwidth * chip.streaming), rel=0.05)


@given(chip=chips, heads=st.integers(1, 64), length=st.integers(1, 64).map(lambda n: 128 * n))
def test_attention_by_generation_length_and_direction(chip, heads: int, length: int) -> None:
    def seconds(generation: str = "flash2", *, queries: int = length, head_dim: int = 128, backward: bool = False):
        return attention_seconds(chip, 1, heads, queries, length, head_dim, "float16", backward, generation)

    causal = 2 * heads * length * length * 128
    assert seconds() > causal / (chip.peak("float16") * chip.attention_forward)
    assert seconds("flash1") > seconds("flash2") >= seconds("flash3")
    assert seconds(backward=True) > 2 * (seconds() - chip.kernel_us * 1e-6)
    assert 0.5 * seconds() < seconds(head_dim=64) < seconds()


def test_bytes_and_kernels_add_up() -> None:
    chip = load("h100").chip
    assert streaming_seconds(chip, 0, 10) == pytest.approx(10e-6 * chip.kernel_us)
    assert streaming_seconds(chip, chip.memory_bandwidth * chip.streaming, 0) == pytest.approx(1)
