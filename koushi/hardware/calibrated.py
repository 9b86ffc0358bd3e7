"""From measurements to a hardware file of the form that ships. No torch.

Every constant is the one that makes ``koushi.hardware``'s own formulas meet the measurements; what was not
measured is taken from hardware that is given as the nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from koushi.hardware.collective import SMALL_SHARE, ring_passes, switch_passes
from koushi.hardware.hardware import Chip, Device, Hardware, Link
from koushi.hardware.matmul import attention_seconds
from koushi.hardware.ranges import RANGES
from koushi.traffic import Operation

WORTH_TWO = 0.5
"""Two protocols are believed where they leave so much, or less, of the squared errors that one leaves."""


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Attention:
    """Fused causal attention of one sample."""

    heads: int
    length: int
    head_dim: int
    dtype: str
    forward: float
    backward: float


@dataclass(frozen=True)
class Call:
    """A collective within a domain; ``bytes`` in the sense of ``koushi.traffic.Collective``."""

    operation: Operation
    bytes: int
    degree: int
    seconds: float


@dataclass(frozen=True)
class Measurements:
    device: str
    """The device's own name."""
    kind: Device
    devices: int
    """Of this machine."""
    memory_bytes: int
    matmuls: tuple[Matmul, ...]
    copy_bytes_per_second: float
    """Of a large copy, reads and writes counted."""
    attention: tuple[Attention, ...]
    kernel_seconds: float
    """Of the smallest operation, on the device."""
    launch_seconds: float
    """Of the same, on the host."""
    calls: tuple[Call, ...]


def calibrated(name: str, found: Measurements, nearest: Hardware) -> Hardware:
    """The hardware that was measured; its peaks are ``nearest``'s where that is a chip of units, else the best rate."""
    return replace(
        nearest,
        name=name,
        description=f"{found.device}, measured by koushi hardware --calibrate",
        aliases=(),
        device_names=(),
        device=found.kind,
        # A machine has room for more ranks than cores.
        devices_per_node=found.devices if found.kind == "gpu" else max(nearest.devices_per_node, found.devices),
        chip=_chip(found, nearest.chip),
        host=replace(nearest.host, launch_us=_round(found.launch_seconds * 1e6)),
        inside=_link(found, nearest.inside),
    )


def _chip(found: Measurements, nearest: Chip) -> Chip:
    dtypes = sorted({one.dtype for one in found.matmuls})
    best = {dtype: max(one.rate for one in found.matmuls if one.dtype == dtype) for dtype in dtypes}
    peaks = dict(nearest.peak_tflops)
    for dtype in dtypes:
        if nearest.units == 1 or best[dtype] > nearest.peak(dtype):
            peaks[dtype] = _round(best[dtype] / 1e12)
    own = replace(nearest, peak_tflops=peaks)
    shares = [one.rate / own.peak(one.dtype) for one in _largest(found.matmuls)]
    memory = max(nearest.memory_gb_s, _round(found.copy_bytes_per_second / 1e9)) if nearest.units > 1 else None
    peak_memory = memory or _round(found.copy_bytes_per_second / 1e9)
    own = replace(
        own,
        memory_gib=_round(found.memory_bytes / 2**30),
        memory_gb_s=peak_memory,
        streaming=min(1.0, _round(found.copy_bytes_per_second / 1e9 / peak_memory)),
        # A core has no power limit of its own; what is slower than the best was disturbed.
        sustained=min(0.99, _round(max(shares) if nearest.units == 1 else median(shares))),
        burst=min(0.995, _round(max(shares))),
        released=1.0,
        released_float8=1.0,
        kernel_us=_round(found.kernel_seconds * 1e6),
    )
    return _attention(found, own) if found.attention else own


def _largest(matmuls: Sequence[Matmul]) -> list[Matmul]:
    """The larger half of every dtype's."""
    found: list[Matmul] = []
    for dtype in {one.dtype for one in matmuls}:
        of_dtype = sorted((one for one in matmuls if one.dtype == dtype), key=lambda one: one.m * one.n * one.k)
        found.extend(of_dtype[len(of_dtype) // 2 :])
    return found


def _attention(found: Measurements, chip: Chip) -> Chip:
    """Shares of the peak scaled by how far the formula is from the longest sequence measured."""
    longest = max(found.attention, key=lambda one: one.length)
    scales = []
    for backward, seconds in ((False, longest.forward), (True, longest.backward)):
        shape = (1, longest.heads, longest.length, longest.length, longest.head_dim)
        scales.append(attention_seconds(chip, *shape, longest.dtype, backward) / seconds)
    return replace(
        chip,
        attention_forward=min(1.0, _round(chip.attention_forward * scales[0])),
        attention_backward=min(1.0, _round(chip.attention_backward * scales[1])),
        newest_attention=1.0,
    )


def _link(found: Measurements, nearest: Link) -> Link:
    """Two lines through the seconds of gathers and scatters by what a ring moves, of the largest group."""
    if not found.calls:
        return nearest
    degree = max(one.degree for one in found.calls)
    rings = [one for one in found.calls if one.degree == degree and one.operation != "all_reduce"]
    small, large, per_byte = _protocols([(one.bytes * (degree - 1) / degree, one.seconds) for one in rings])
    own = replace(nearest, devices=max(nearest.devices, found.devices))
    return replace(
        own,
        gb_s=_round(1e-9 / per_byte / own.share(degree)),
        reached=1.0,
        call_us=_round(small * 1e6),
        hop_us=0.0,
        large_start=_round(large / small) if small else 1.0,
        reduces=not nearest.direct and _reduces(found.calls, degree, large, per_byte, nearest.reduces),
    )


def _protocols(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Latencies of small and of large messages, and the seconds of a byte of the large ones, with the least relative
    errors: ``collective_seconds`` has the two lines. Where one does nearly as well, both latencies are its."""
    ordered = sorted(points)
    latency, per_byte = _line(ordered)
    found = [(WORTH_TWO * _error(ordered, latency, latency, per_byte), latency, latency, per_byte)]
    for split in range(1, len(ordered) - 1):
        if ordered[split - 1][0] == ordered[split][0] or ordered[split][0] == ordered[-1][0]:
            continue
        large, per_byte = _line(ordered[split:])
        left = [(seconds - moved * per_byte / SMALL_SHARE, seconds) for moved, seconds in ordered[:split]]
        small = sum(one / seconds**2 for one, seconds in left) / sum(1 / seconds**2 for _, seconds in left)
        if small > 0 and RANGES["large_start"].holds(large / small):
            found.append((_error(ordered, small, large, per_byte), small, large, per_byte))
    return min(found)[1:]


def _error(points: Sequence[tuple[float, float]], small: float, large: float, per_byte: float) -> float:
    """Mean square of the relative errors."""
    lines = ((min(small + x * per_byte / SMALL_SHARE, large + x * per_byte), y) for x, y in points)
    return sum((line / seconds - 1) ** 2 for line, seconds in lines) / len(points)


def _reduces(calls: Sequence[Call], degree: int, latency: float, per_byte: float, otherwise: bool) -> bool:
    """Whether the largest sums are nearer to a switch's than to a ring's; ``otherwise`` where the two are alike."""
    sums = [one for one in calls if one.degree == degree and one.operation == "all_reduce"]
    ring, switch = ring_passes(degree), switch_passes(degree)
    if not sums or switch >= ring:
        return otherwise
    large = max(one.bytes for one in sums)
    summed = median(one.seconds for one in sums if one.bytes == large)
    return (summed - latency) / (per_byte * large) < (ring + switch) / 2


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, with the least relative errors."""
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    both = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True))
    slope = both / spread if spread and both > 0 else y_mean / x_mean
    return max(0.0, y_mean - slope * x_mean), slope


def _round(value: float) -> float:
    """To four digits: no measurement holds more."""
    return float(f"{value:.4g}")


def figures_text(found: Measurements, hardware: Hardware) -> str:
    """The main figures of ``found``, which ``hardware`` was made of, for people."""
    best = {one.dtype: 0.0 for one in found.matmuls}
    for one in found.matmuls:
        best[one.dtype] = max(best[one.dtype], _round(one.rate / 1e12))
    rates = ", ".join(f"{rate:.3g} TFLOP/s in {dtype}" for dtype, rate in best.items())
    chip, inside, copied = hardware.chip, hardware.inside, _round(found.copy_bytes_per_second / 1e9)
    link = f"not measured, since one rank has none; {inside.gb_s:g} GB/s is assumed"
    if found.calls:
        degree = max(one.degree for one in found.calls)
        gb_s = inside.gb_s * inside.share(degree)
        link = f"{gb_s:.3g} GB/s each way among {degree} ranks, {inside.call_us:.3g} us for a small message"
    return "\n".join(
        (
            f"  matmul  {rates}: the best of {len(found.matmuls)} products",
            f"  memory  {copied:.3g} GB/s in a large copy; {chip.memory_gib:.3g} GiB a device",
            f"  kernel  {chip.kernel_us:.3g} us for the smallest, {hardware.host.launch_us:.3g} us to launch one",
            f"  link    {link}",
        )
    )


def yaml_text(hardware: Hardware, comments: dict[str, str]) -> str:
    """A hardware file; ``comments`` by dotted key, where a section's goes to all its values."""
    return "\n".join(_lines(hardware, "", comments)) + "\n"


def _lines(part: Any, prefix: str, comments: dict[str, str]) -> list[str]:
    indent, lines = "  " * prefix.count("."), []
    for field in dataclasses.fields(part):
        key, value = prefix + field.name, getattr(part, field.name)
        note = comments.get(key, comments.get(prefix.rstrip("."), ""))
        if dataclasses.is_dataclass(value):
            lines.append(f"{indent}{field.name}:")
            lines.extend(_lines(value, key + ".", comments))
        elif isinstance(value, tuple):
            lines.append(f"{indent}{field.name}: [{', '.join(value)}]")
        elif isinstance(value, str):
            lines.append(f"{indent}{field.name}: {_quoted(value)}")
        elif isinstance(value, bool):
            lines.append(_noted(f"{indent}{field.name}: {str(value).lower()}", note))
        elif isinstance(value, int):
            lines.append(_noted(f"{indent}{field.name}: {value}", note))
        elif isinstance(value, float):
            lines.append(_noted(f"{indent}{field.name}: {value:g}", note))
        else:
            lines.append(f"{indent}{field.name}:")
            for dtype, peak in value.items():
                lines.append(_noted(f"{indent}  {dtype}: {peak:g}", comments.get(f"{key}.{dtype}", note)))
    return lines


def _noted(line: str, note: str) -> str:
    return f"{line}  # {note}" if note else line


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
