"""The accuracy report for people and for programs. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from koushi.accuracy.held_out import MEMORY, TIME, HeldOut, held_out
from koushi.accuracy.published import LeftOut
from koushi.accuracy.score import Errors, Fit, Scored, SourceScore, layout_of, over_sources
from koushi.units import counted

Cells = Sequence[str]


def table(scores: Sequence[SourceScore]) -> str:
    """By source, and the mean of the sources."""
    head = (
        *("source", "runs", "time p50", "p90", "bias", "runs", "memory p50", "p90", "bias"),
        *("sweeps", "rank corr.", "at best", "regret p50", "mean"),
    )
    lines = [_line(one.source, one) for one in scores if one.time or one.memory]
    every = [one for one in scores if one.time or one.memory]
    return columns([head, *lines, _mean_line(every)])


def _line(name: str, one: SourceScore) -> Cells:
    return (
        name,
        *_errors(one.time),
        *_errors(one.memory),
        str(len(one.sweeps) or ""),
        _number(one.rank_correlation),
        _number(one.ceiling),
        percent(one.regret),
        percent(one.mean_regret),
    )


def _mean_line(scores: Sequence[SourceScore]) -> Cells:
    def over(figure: Callable[[SourceScore], float | None]) -> float | None:
        return over_sources(scores, figure)

    time = [
        over(lambda one: one.time.median if one.time else None),
        over(lambda one: one.time.p90 if one.time else None),
        over(lambda one: one.time.bias if one.time else None),
    ]
    memory = [
        over(lambda one: one.memory.median if one.memory else None),
        over(lambda one: one.memory.p90 if one.memory else None),
        over(lambda one: one.memory.bias if one.memory else None),
    ]
    return (
        "mean of sources",
        "",
        *(percent(value, signed=place == 2) for place, value in enumerate(time)),
        "",
        *(percent(value, signed=place == 2) for place, value in enumerate(memory)),
        "",
        _number(over(lambda one: one.rank_correlation)),
        _number(over(lambda one: (one.ceiling or 1.0) if one.sweeps else None)),
        percent(over(lambda one: one.regret)),
        percent(over(lambda one: one.mean_regret)),
    )


def _errors(errors: Errors | None) -> Cells:
    if errors is None:
        return ("", "", "", "")
    return (str(errors.runs), percent(errors.median), percent(errors.p90), percent(errors.bias, signed=True))


def fits_table(scores: Iterable[SourceScore]) -> str:
    """Does it fit: of sources with runs that failed."""
    head = ("source", "ran", "failed", "precision", "recall", "failures caught")
    return columns([head, *(_fit_line(one.source, one.fit) for one in scores if one.fit)])


def _fit_line(name: str, fit: Fit) -> Cells:
    ran, failed = fit.ran_said_fits + fit.ran_said_not, fit.failed_said_fits + fit.failed_said_not
    return (name, str(ran), str(failed), _number(fit.precision), _number(fit.recall), _number(fit.caught))


def left_out_table(ran: Sequence[Scored], left_out: Sequence[LeftOut]) -> str:
    """How many rows of which source are not scored, why, and how far off they would be."""
    counts = Counter((one.row.source, one.reason) for one in left_out)
    errors: dict[tuple[str, str], list[float]] = {}
    for one in ran:
        if one.run.spoiled is not None:
            key = (one.source, one.run.spoiled)
            counts[key] += 1
            if one.run.stated_seconds:
                errors.setdefault(key, []).append(one.step_seconds / one.run.stated_seconds - 1)
    if not counts:
        return "no row is left out"
    lines = []
    for (source, reason), count in sorted(counts.items()):
        found = Errors.of(errors.get((source, reason), ()))
        figures = (percent(found.median), percent(found.bias, signed=True)) if found else ("", "")
        lines.append((str(count), source, reason, *figures))
    return columns([("rows", "source", "left out because", "time p50", "bias"), *lines])


def held_out_table(time: Sequence[HeldOut], memory: Sequence[HeldOut]) -> str:
    """Errors as they are, and scaled by what centres the other sources."""
    head = (
        *("source", "runs", "time p50", "scaled", "p90", "scaled"),
        *("runs", "memory p50", "scaled", "p90", "scaled"),
    )
    sides = [{one.source: one for one in side} for side in (time, memory)]
    names = sorted({one.source for one in (*time, *memory)})
    lines = [(name, *(cell for side in sides for cell in _held_out(side.get(name)))) for name in names]
    means = ("mean of sources", *(cell for side in (time, memory) for cell in ("", *_held_out_mean(side))))
    return columns([head, *lines, means])


def _held_out(one: HeldOut | None) -> Cells:
    if one is None:
        return ("", "", "", "", "")
    figures = (one.as_is.median, one.scaled.median, one.as_is.p90, one.scaled.p90)
    return (str(one.as_is.runs), *(percent(figure) for figure in figures))


def _held_out_mean(side: Sequence[HeldOut]) -> Cells:
    if not side:
        return ("", "", "", "")
    columns = zip(*((one.as_is.median, one.scaled.median, one.as_is.p90, one.scaled.p90) for one in side), strict=True)
    return tuple(percent(mean(column)) for column in columns)


def rows_table(scored: Iterable[Scored]) -> str:
    """Every run, measured and predicted."""
    head = ("run", "seconds", "predicted", "error", "GiB", "predicted", "error", "fits", "model", "layout")
    return columns([head, *(_row_line(one) for one in scored)])


def _row_line(one: Scored) -> Cells:
    run = one.run
    return (
        run.row.id,
        f"{run.step_seconds:.3f}" if run.step_seconds else "",
        f"{one.step_seconds:.3f}",
        percent(one.time_error, signed=True),
        f"{run.memory_gib:.2f}" if run.memory_gib else "",
        f"{one.memory_gib:.2f}",
        percent(one.memory_error, signed=True),
        "yes" if one.fits else "no",
        run.row.model,
        layout_of(run),
    )


def sweeps_table(scores: Iterable[SourceScore]) -> str:
    head = ("source", "sweep", "layouts", "rank corr.", "regret")
    return columns(
        [
            head,
            *(
                (
                    one.source,
                    sweep.name,
                    str(len(sweep.layouts)),
                    _number(sweep.rank_correlation),
                    percent(sweep.regret),
                )
                for one in scores
                for sweep in one.sweeps
            ),
        ]
    )


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def columns(lines: Sequence[Cells]) -> str:
    """Columns of even width; words left, figures right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    right = [all(not line[i] or line[i][0] in "+-0123456789" for line in lines[1:]) for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def report(
    scores: Sequence[SourceScore], ran: Sequence[Scored], left_out: Sequence[LeftOut], failed: Sequence[Scored]
) -> str:
    """The whole report."""
    spoiled = sum(one.run.spoiled is not None for one in ran)
    partly = f" ({spoiled} of them not scored for time: the last table)" if spoiled else ""
    pieces = [
        f"{counted(len(ran), 'run')} planned{partly}, {counted(len(left_out), 'row')} left out, "
        f"{counted(len(failed), 'failed run')} planned",
        table(scores),
    ]
    time, memory = held_out(ran, TIME), held_out(ran, MEMORY)
    if time or memory:
        pieces += ["Each source scaled by what centres the others", held_out_table(time, memory)]
    if any(one.fit for one in scores):
        pieces += ["Does it fit?", fits_table(scores)]
    return "\n\n".join([*pieces, left_out_table(ran, left_out)])


def error_bars(scores: Sequence[SourceScore], ran: Sequence[Scored]) -> dict[str, dict[str, object]]:
    """Of step time and memory: the means over sources that the table ends with, the largest p90 of a source, how many
    sources and runs they stand on, and the hardware of those."""
    found: dict[str, dict[str, object]] = {}
    for name in ("time", "memory"):
        errors = [known for one in scores if (known := getattr(one, name)) is not None]
        found["step_time" if name == "time" else name] = {
            "median": round(mean(known.median for known in errors), 4),
            "p90": round(mean(known.p90 for known in errors), 4),
            "worst_p90": round(max(known.p90 for known in errors), 4),
            "sources": len(errors),
            "runs": sum(known.runs for known in errors),
            "hardware": sorted({one.run.hardware.name for one in ran if getattr(one, f"{name}_error") is not None}),
        }
    return found


def as_json(scores: Iterable[SourceScore]) -> dict[str, object]:
    """Figures by source, fractions."""

    def errors(one: Errors | None) -> dict[str, float] | None:
        return {"runs": one.runs, "median": one.median, "p90": one.p90, "bias": one.bias} if one else None

    return {
        one.source: {
            "step_time": errors(one.time),
            "memory": errors(one.memory),
            "sweeps": len(one.sweeps),
            "rank_correlation": one.rank_correlation,
            "rank_correlation_at_best": one.ceiling,
            "regret": {"median": one.regret, "mean": one.mean_regret},
            "fit": one.fit
            and {"precision": one.fit.precision, "recall": one.fit.recall, "failures_caught": one.fit.caught},
        }
        for one in scores
    }
