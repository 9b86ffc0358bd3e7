"""Hardware for people: all that ships, or one with where each value comes from. No torch."""

from __future__ import annotations

from pathlib import Path

from koushi.hardware.hardware import DATA, Hardware, load, names

HEADINGS = ("name", "also", "memory", "bf16 peak", "in a domain", "between")


def table() -> str:
    """Everything that ships, a line each."""
    rows = [HEADINGS, *(_row(load(name)) for name in names())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(hardware: Hardware) -> tuple[str, ...]:
    chip, inside, network = hardware.chip, hardware.inside, hardware.network
    peak = chip.peak("bfloat16") / 1e12
    return (
        hardware.name,
        ", ".join(hardware.aliases) or "-",
        f"{chip.memory_gib:g} GiB",
        f"{peak:g} TFLOP/s",
        f"{inside.devices} x {inside.name}, {inside.gb_s:g} GB/s",
        f"{network.name}, {network.gb_s:g} GB/s",
    )


def shown(name_or_path: str) -> str:
    """The file of one hardware, with its comments; raises ConfigError where there is none or it is wrong."""
    hardware = load(name_or_path)
    shipped = DATA / f"{hardware.name}.yaml"
    path = shipped if hardware.name in names() and not Path(name_or_path).exists() else Path(name_or_path)
    return path.read_text(encoding="utf-8").rstrip()
