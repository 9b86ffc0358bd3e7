"""The peak bf16 rate of the device that a run finds itself on, for model FLOPs utilisation. No torch."""

from __future__ import annotations

from koushi.hardware.hardware import load, names


def peak_flops(device_name: str) -> float | None:
    """Dense FLOP/s of the part that torch calls ``device_name``; None where no hardware file knows it.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    if not device_name:
        return None
    matches = {
        word: hardware
        for hardware in map(load, names())
        for word in hardware.device_names
        if all(piece in device_name for piece in word.split())
    }
    return matches[max(matches, key=len)].chip.peak("bfloat16") if matches else None
