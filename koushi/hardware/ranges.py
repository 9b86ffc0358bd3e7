"""What the numbers of a hardware file may be: wide enough for any device, narrow enough that times stay finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from koushi.mesh import MOST_DEVICES


@dataclass(frozen=True)
class Range:
    """Both ends are legal."""

    low: float
    high: float
    meaning: str
    """With the unit, such as ``a rate in TFLOP/s``."""
    whole: bool = False

    def holds(self, value: object) -> bool:
        kinds = int if self.whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        return isfinite(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        ends = [str(int(end)) if end.is_integer() and end < 1e7 else f"{end:g}" for end in (self.low, self.high)]
        return f"{self.meaning} from {ends[0]} to {ends[1]} is needed"


def _rate(unit: str) -> Range:
    return Range(1e-6, 1e9, f"a rate in {unit}")


def _time(unit: str) -> Range:
    return Range(0.0, 1e6, f"a time in {unit}")


SHARE = Range(1e-6, 1.0, "a share")
PEAK = _rate("TFLOP/s")
DTYPES = ("float8", "bfloat16", "float16", "float32", "float64")
"""Of ``chip.peak_tflops``."""
ANY_OF = ("float16", "float32")
"""Of which one is needed: they stand in for dtypes that are left out."""

RANGES: Mapping[str, Range] = {
    "devices_per_node": Range(1.0, float(MOST_DEVICES), "a number of devices", whole=True),
    "variation": Range(0.0, 1.0, "a standard deviation as a share"),
    "memory_gib": Range(1e-6, 1e6, "an amount in GiB"),
    "memory_gb_s": _rate("GB/s"),
    "units": Range(1.0, 1e6, "a number of processors", whole=True),
    "sustained": SHARE,
    "burst": SHARE,
    "streaming": SHARE,
    "released": SHARE,
    "released_float8": SHARE,
    "attention_forward": SHARE,
    "attention_backward": SHARE,
    "newest_attention": Range(0.01, 100.0, "a factor"),
    "kernel_us": _time("microseconds"),
    "launch_us": _time("microseconds"),
    "step_ms": _time("milliseconds"),
    "devices": Range(0.0, float(MOST_DEVICES), "a number of devices (0: any number)", whole=True),
    "gb_s": _rate("GB/s"),
    "reached": SHARE,
    "call_us": _time("microseconds"),
    "hop_us": _time("microseconds"),
    "large_start": Range(1.0, 100.0, "a factor"),
    "crowding": Range(0.0, 1000.0, "a factor"),
}
"""By the name of the field, which means the same wherever it stands."""
