"""What the pictures and texts call things, and characters that any terminal has. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FLOWS: Mapping[str, str] = {
    "pp": "activations forward and their gradients back between neighbouring stages: send, recv",
    "dp_replicate": "gradients of whole copies of the model, added up: all_reduce",
    "dp_shard": "parameters gathered before use: all_gather; gradients added up and cut: reduce_scatter",
    "cp": "keys and values of other parts of a sequence",
    "tp": "activations inside every layer: all_gather, reduce_scatter, all_reduce",
}
"""What runs on the sub-mesh of every mesh dim."""

FOLD_USES: Mapping[str, str] = {
    "data": "each rank has other samples",
    "loss": "token counts and losses are summed",
    "parameter_shard": "each rank has other parameters",
}

_ASCII = str.maketrans(
    {"─": "-", "│": "|", "⋮": ":", "…": "...", "×": "x", "→": "->"} | dict.fromkeys("┌┐└┘├┤┬┴┼", "+")
)


def encodable(text: str, encoding: str | None) -> str:
    """``text`` itself where ``encoding`` has its characters, else with lines drawn in ASCII."""
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
    return text


def ranks_text(ranks: tuple[int, ...], most: int = 8) -> str:
    """``0 8 16 24``; a long group is cut short, its last rank stays: ``0 8 16 24 32 40 48 … 504``."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: most - 1]))} … {ranks[-1]}"


def span_text(first: int, stop: int) -> str:
    """``3`` or ``3-5`` for the numbers from ``first`` up to and without ``stop``."""
    return f"{first}-{stop - 1}" if stop - first > 1 else f"{first}"


def columns(rows: Iterable[tuple[str, ...]], indent: str = "  ", gap: str = "  ") -> list[str]:
    """Rows of a table as lines, every column as wide as its widest cell, the last one ragged."""
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))] if table else []
    return [
        (indent + gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in table
    ]
