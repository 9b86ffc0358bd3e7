"""A hardware file made of measurements gives the measured seconds back."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from koushi.hardware.calibrated import Attention, Call, Matmul, Measurements, calibrated, figures_text, yaml_text
from koushi.hardware.collective import Span, collective_seconds
from koushi.hardware.hardware import Hardware, load, names, read_file
from koushi.hardware.matmul import attention_seconds, matmul_seconds

SHAPES = ((2048, 4096, 4096), (4096, 4096, 8192), (8192, 8192, 8192), (16384, 8192, 8192))


def measured(true: Hardware, degree: int = 8) -> Measurements:
    """What a machine that is exactly ``true`` would show, with collectives among so many of its 8 devices."""
    chip = true.chip
    return Measurements(
        device="A device of ours",
        kind=true.device,
        devices=8,
        memory_bytes=int(chip.memory_bytes),
        matmuls=tuple(
            Matmul(m, n, k, dtype, matmul_seconds(chip, m, n, k, dtype))
            for dtype in ("float32", "bfloat16")
            for m, n, k in SHAPES
        ),
        copy_bytes_per_second=chip.memory_bandwidth * chip.streaming,
        attention=tuple(
            Attention(
                32,
                length,
                128,
                "bfloat16",
                attention_seconds(chip, 1, 32, length, length, 128, "bfloat16"),
                attention_seconds(chip, 1, 32, length, length, 128, "bfloat16", backward=True),
            )
            for length in (2048, 8192)
        ),
        kernel_seconds=chip.kernel_us * 1e-6,
        launch_seconds=true.host.launch_us * 1e-6,
        calls=tuple(
            Call(operation, size, degree, collective_seconds(true, operation, size, Span(1, degree)))
            for operation in ("all_gather", "reduce_scatter", "all_reduce")
            for size in (1 << 12, 1 << 20, 1 << 24, 1 << 28)
        ),
    )


@pytest.mark.parametrize("start", [1.0, 3.0])
@pytest.mark.parametrize("name", ["a100", "h100", "mi300x"])
def test_measurements_are_met(name: str, start: float) -> None:
    nearest = load(name)
    true = replace(
        nearest,
        chip=replace(nearest.chip, sustained=0.6, burst=0.65, streaming=0.7, attention_forward=0.3, kernel_us=6.0),
        host=replace(nearest.host, launch_us=11.0),
        inside=replace(nearest.inside, gb_s=200.0, call_us=31.0, large_start=start),
    )
    found = measured(true)
    made = calibrated("ours", found, nearest)
    assert made.host.launch_us == pytest.approx(11)
    assert made.inside.large_start == pytest.approx(start, rel=0.02)
    assert made.inside.reduces is true.inside.reduces
    assert made.chip.streaming == pytest.approx(0.7, rel=1e-3)
    for one in found.matmuls:
        assert matmul_seconds(made.chip, one.m, one.n, one.k, one.dtype) == pytest.approx(one.seconds, rel=0.12)
    for length in (2048, 8192):
        for backward in (False, True):
            shape = (1, 32, length, length, 128, "bfloat16", backward)
            assert attention_seconds(made.chip, *shape) == pytest.approx(attention_seconds(true.chip, *shape), rel=0.02)
    for call in found.calls:
        seconds = collective_seconds(made, call.operation, call.bytes, Span(1, 8))
        assert seconds == pytest.approx(call.seconds, rel=0.02)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_some_of_a_devices_direct_links_tell_of_all(degree: int) -> None:
    true = load("mi300x")
    found = measured(true, degree)
    made = calibrated("ours", found, true)
    used = made.inside.gb_s * (degree - 1) / 7
    assert f"  link    {used:.3g} GB/s each way among {degree} ranks, " in figures_text(found, made)
    assert made.inside.direct and not made.inside.reduces
    for group in (Span(1, 2), Span(1, 4), Span(1, 8)):
        seconds, expected = (collective_seconds(one, "all_gather", 1 << 30, group) for one in (made, true))
        assert seconds == pytest.approx(expected, rel=0.03)


def test_a_processor_without_units_has_its_best_rate_for_a_peak() -> None:
    true = replace(load("cpu"), chip=replace(load("cpu").chip, peak_tflops={"float32": 0.5, "bfloat16": 1.0}))
    made = calibrated("ours", measured(true), load("cpu"))
    assert made.chip.peak("float32") == pytest.approx(0.5e12 * true.chip.sustained, rel=0.01)
    assert made.chip.peak("bfloat16") == pytest.approx(1e12 * true.chip.sustained, rel=0.01)
    assert made.chip.sustained == pytest.approx(0.99, rel=0.02)


def test_what_was_not_measured_is_that_of_the_nearest() -> None:
    nearest = load("h100")
    made = calibrated("ours", replace(measured(nearest), calls=(), attention=()), nearest)
    assert made.inside is nearest.inside
    assert made.network is nearest.network
    assert made.chip.attention_forward == nearest.chip.attention_forward


@pytest.mark.parametrize("name", names())
def test_a_written_file_reads_as_what_was_written(tmp_path: Path, name: str) -> None:
    hardware = replace(load(name), description="It's ours: a 'test'")
    path = tmp_path / "ours.yaml"
    path.write_text(yaml_text(hardware, {"chip": "measured", "chip.units": "counted"}), encoding="utf-8")
    assert asdict(read_file(path)) == asdict(hardware)
    text = path.read_text(encoding="utf-8")
    assert f"  units: {hardware.chip.units}  # counted\n" in text
    assert f"  kernel_us: {hardware.chip.kernel_us:g}  # measured\n" in text
