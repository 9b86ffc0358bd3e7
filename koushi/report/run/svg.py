"""Charts as SVG text: lines over steps, bars of what was predicted against what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 26
MOST_POINTS = 500


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    """CSS."""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A step at which something changed, drawn through the whole chart."""

    x: float
    what: str


def line_chart(label: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Lines over a common x, which is a step; points that aren't finite are left out, and marks outside of all."""
    kept = [(one, [(x, y) for x, y in one.points if isfinite(y)]) for one in series]
    everything = [point for _, points in kept for point in points]
    if not everything:
        return ""
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    ticks = round_ticks(min(y for _, y in everything), max(y for _, y in everything))
    low, high = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for tick in ticks:
        _, y = at(left, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for x, anchor in ((left, "start"), (right, "end")):
        parts.append(f'<text x="{at(x, low)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{x:g}</text>')
    for mark in marks:
        if left <= mark.x <= right:
            line = f"M{at(mark.x, low)[0]:.1f} {_TOP}V{HEIGHT - _BOTTOM}"
            parts.append(f'<path class="mark" d="{line}"><title>{escape(mark.what)}</title></path>')
    for one, points in kept:
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in thinned(points)))
        dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
        name = escape(one.name)
        if len(points) == 1:
            across, up = at(*points[0])
            parts.append(
                f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{one.colour}"><title>{name}</title></circle>'
            )
        parts.append(f'<polyline points="{path}" style="stroke:{one.colour}"{dashes}><title>{name}</title></polyline>')
    return "".join(parts) + "</svg>"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them; of neighbours the lowest and the highest stay, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    bucket = -(-len(points) * 2 // MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), bucket):
        some = points[start : start + bucket]
        extremes = {min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}
        kept.extend(sorted(extremes))
    return kept


def round_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers from at or below ``low`` to at or above ``high``."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):  # too close for numbers between them
        pad = abs(low) * 0.1 if abs(low) > 1e-100 else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / 4
    power = 10.0 ** floor(log10(rough))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= rough)
    first = floor(low / step)
    ticks = [first * step]
    while ticks[-1] < high:
        ticks.append((first + len(ticks)) * step)
    return ticks


def tick_text(value: float) -> str:
    """A tick's number, short."""
    size = abs(value)
    if size >= 1e6 or (size and size < 1e-3):
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
