"""All-reduces inside a node against published tables of NCCL by size."""

from __future__ import annotations

from statistics import mean, median

import pytest

from koushi.hardware.collective import Span, collective_seconds
from koushi.hardware.hardware import load

MIB = 1 << 20
TABLES = {
    # nccl-tests on 8 A100 of 40 GB: PKU-DAIR/Hetu-Galvatron, tests of its hardware profiler.
    "a100-40gb": {
        **{1: 78.77, 2: 108.8, 4: 131.1, 8: 183.4, 16: 293.6, 32: 415.7},
        **{64: 657.2, 128: 1256.7, 256: 2338.9, 512: 4651.2, 1024: 8139.9},
    },
    # torch on 8 H200: stas00/ml-engineering, network/benchmarks/results/all-reduce-8xH200.md.
    "h200": {
        **{0.25: 39.07, 0.5: 38.33, 1: 45.95, 2: 56.88, 4: 68.5, 8: 94.39, 16: 133.5, 32: 212.9},
        **{64: 338.9, 128: 584.4, 256: 1077.0, 512: 2086.0, 1024: 4053.0},
    },
}
"""Microseconds by MiB."""


@pytest.mark.parametrize("name", TABLES)
def test_an_all_reduce_is_met_at_every_size(name: str) -> None:
    hardware = load(name)
    errors = {
        size: 1e6 * collective_seconds(hardware, "all_reduce", size * MIB, Span(1, 8)) / measured - 1
        for size, measured in TABLES[name].items()
    }
    assert max(map(abs, errors.values())) < 0.35, errors
    assert mean(map(abs, errors.values())) < 0.15, errors
    assert abs(median(errors[size] for size in errors if size >= 64)) < 0.1, errors


def test_a_gather_on_hopper_reaches_what_nccls_authors_say() -> None:
    """370 GB/s on the link, and 275 of an all-reduce by switches: NVIDIA/nccl-tests issue 212."""
    h100, size = load("h100"), 1 << 36
    assert size * 7 / 8 / collective_seconds(h100, "all_gather", size, Span(1, 8)) == pytest.approx(370e9, rel=0.05)
    assert size / collective_seconds(h100, "all_reduce", size, Span(1, 8)) == pytest.approx(275e9, rel=0.05)
