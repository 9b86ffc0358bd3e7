"""Numbers for people."""

from __future__ import annotations

import pytest

from koushi.units import bytes_text, count_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (-2048, "-2.00 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (2**52, "4096.00 TiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (5_800_000, "5.80M"),
        (8_030_261_248, "8.03B"),
        (405_853_388_800, "405.85B"),
        (1_230_000_000_000, "1.23T"),
        (1_000_000_000_000_000, "1000.00T"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.04, "0.0s"),
        (59.9, "59.9s"),
        (60, "1m00s"),
        (61.6, "1m02s"),
        (3599.6, "1h00m00s"),
        (3725, "1h02m05s"),
        (100 * 3600, "100h00m00s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
