"""Bytes, counts, rates and durations for people."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(count: float) -> str:
    """1536 becomes ``1.50 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``3 microbatches``."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {noun}{ending}"


def cut_short(numbers: Sequence[int], most: int) -> str:
    """The first ``most`` numbers, and of more the last one as well: ``0 8 16 24 ... 504``."""
    shown = " ".join(map(str, numbers[:most]))
    return f"{shown} ... {numbers[-1]}" if len(numbers) > most else shown


def count_text(count: float) -> str:
    """5800000 becomes ``5.80M``."""
    for unit in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f}T"


def seconds_text(seconds: float) -> str:
    """3725 becomes ``1h02m05s``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"
