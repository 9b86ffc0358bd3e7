"""Peak dense bf16 rates of accelerators, for model FLOPs utilisation. No torch.

Vendors' datasheets, dense (no sparsity). A part whose rate is not here has no utilisation printed.
"""

from __future__ import annotations

PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str) -> float | None:
    """The peak of the part that torch calls ``device_name``, in FLOP/s; None where it isn't known.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    matches = [name for name in PEAK_BF16_FLOPS if all(word in device_name for word in name.split())]
    return PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None
