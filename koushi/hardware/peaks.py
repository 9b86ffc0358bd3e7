"""The hardware that a run finds itself on, by what torch calls its device. No torch."""

from __future__ import annotations

from functools import cache

from koushi.hardware.hardware import Hardware, load, names


@cache
def of_device(device_name: str) -> Hardware | None:
    """The shipped hardware whose part torch calls ``device_name``; None where no file knows it."""
    if not device_name:
        return None
    matches = {
        word: hardware
        for hardware in map(load, names())
        for word in hardware.device_names
        if all(piece in device_name for piece in word.split())
    }
    return matches[max(matches, key=len)] if matches else None


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the part that torch calls ``device_name``, for model FLOPs utilisation.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    hardware = of_device(device_name)
    return None if hardware is None else hardware.chip.peak("bfloat16")
