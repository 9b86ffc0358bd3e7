"""What the planner says of published runs, and how far that is from what they measured. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from statistics import mean, median, variance

from koushi.accuracy.published import Run
from koushi.plan.memory import every_rank
from koushi.plan.step_time import step_time

GIB = 2**30
SMALLEST_SWEEP = 3
"""Layouts that a sweep needs to have an order worth speaking of."""


@dataclass(frozen=True)
class Scored:
    """A run with what the planner says of it."""

    run: Run
    step_seconds: float
    memory_gib: float
    """Of the rank and the kind that the source measured; the fullest rank's where it doesn't say."""
    fits: bool
    """Whether the fullest rank's device memory is within the device's."""

    @property
    def source(self) -> str:
        return self.run.row.source

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less 1."""
        measured = self.run.step_seconds
        return self.step_seconds / measured - 1 if measured else None

    @property
    def memory_error(self) -> float | None:
        measured = self.run.memory_gib
        return self.memory_gib / measured - 1 if measured else None


def score(run: Run) -> Scored:
    ranks = every_rank(run.workload, run.hardware)
    measured = ranks[:1] if run.memory_of_first else ranks
    return Scored(
        run=run,
        step_seconds=step_time(run.workload, run.hardware).seconds,
        memory_gib=max(getattr(rank, run.memory) for rank in measured) / GIB,
        fits=max(rank.device for rank in ranks) <= run.hardware.chip.memory_bytes,
    )


@dataclass(frozen=True)
class Errors:
    """Of one quantity over several runs, as fractions."""

    runs: int
    median: float
    """Of the absolute errors."""
    p90: float
    """90th percentile of the absolute errors."""
    bias: float
    """Median of the signed errors; above 0: predicted too much."""

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Errors | None:
        known = [error for error in errors if error is not None]
        if not known:
            return None
        sizes = [abs(error) for error in known]
        return cls(len(known), median(sizes), quantile(sizes, 0.9), median(known))


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest in order, in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model on the same devices and batch, the measured and the predicted speed of each."""

    name: str
    source: str
    layouts: tuple[str, ...]
    measured: tuple[float, ...]
    """Step seconds; the median where a layout was run several times."""
    predicted: tuple[float, ...]

    @property
    def rank_correlation(self) -> float:
        """Spearman's: 1 where the order is right throughout."""
        return correlation(ranks(self.measured), ranks(self.predicted))

    @property
    def regret(self) -> float:
        """How much longer the layout predicted to be the fastest took than the fastest, as a fraction."""
        chosen = min(range(len(self.predicted)), key=lambda i: self.predicted[i])
        return self.measured[chosen] / min(self.measured) - 1


def sweeps(scored: Iterable[Scored]) -> tuple[Sweep, ...]:
    """Runs that differ in layout alone: published together, of the same model, devices, sequence, global batch,
    precision and compiler."""
    groups: dict[tuple[object, ...], dict[str, list[Scored]]] = {}
    for one in scored:
        if one.run.step_seconds is None:
            continue
        row, workload = one.run.row, one.run.workload
        same = (row.source, row.origin, row.gpu, row.gpus, row.seq_len, row.precision, workload.system.fused)
        key = (*same, workload.model, workload.global_batch_size)
        groups.setdefault(key, {}).setdefault(layout_of(one.run), []).append(one)
    found = []
    for layouts in groups.values():
        first = next(iter(layouts.values()))[0].run
        if len(layouts) < SMALLEST_SWEEP:
            continue
        found.append(
            Sweep(
                name=f"{first.row.model} on {first.row.gpus} {first.row.gpu}, batch {first.workload.global_batch_size}",
                source=first.row.source,
                layouts=tuple(layouts),
                measured=tuple(median(one.run.step_seconds or 0.0 for one in same) for same in layouts.values()),
                predicted=tuple(median(one.step_seconds for one in same) for same in layouts.values()),
            )
        )
    return tuple(found)


def layout_of(run: Run) -> str:
    """What may differ within a sweep, for people."""
    workload = run.workload
    degrees = " ".join(
        f"{name}={degree}" for name, degree in zip(workload.mesh.names, workload.mesh.shape, strict=True) if degree > 1
    )
    pipeline = f" {workload.schedule}x{workload.stages_per_rank}" if workload.mesh.degree("pp") > 1 else ""
    sharding = workload.system.sharding if workload.system.sharding != "fsdp" else f"{workload.reshard_after_forward=}"
    return (
        f"{degrees or 'one device'}{pipeline} {sharding} microbatch {workload.microbatch_size} {workload.recompute}"
    ).replace("workload.reshard_after_forward=", "fsdp, reshard ")


def ranks(values: Sequence[float]) -> list[float]:
    """Place of every value in order; equal ones share the middle of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            places[i] = (start + stop - 1) / 2
        start = stop
    return places


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's; 0 where either does not vary."""
    a, b = mean(left), mean(right)
    spread = sum((x - a) ** 2 for x in left) * sum((y - b) ** 2 for y in right)
    return sum((x - a) * (y - b) for x, y in zip(left, right, strict=True)) / spread**0.5 if spread else 0.0


DRAWS = 500
"""Of every sweep, from a seed of its own: the figure is the same every time."""


def spread(scored: Iterable[Scored]) -> float | None:
    """Standard deviation of the logarithm of step time between runs of the same workload; None without repeats.

    A figure printed twice is one measurement.
    """
    repeats: dict[tuple[object, ...], set[float]] = {}
    for one in scored:
        if one.run.step_seconds is not None:
            key = (one.source, one.run.row.precision, one.run.hardware.name, one.run.workload)
            repeats.setdefault(key, set()).add(one.run.step_seconds)
    squares = [variance([log(seconds) for seconds in times]) for times in repeats.values() if len(times) > 1]
    return sqrt(mean(squares)) if squares else None


def attainable(sweep: Sweep, deviation: float) -> float:
    """The rank correlation that a second run of the same layouts would have with the first, on average.

    The measured times stand for the true ones, so where the noise is large this is too hopeful.
    """
    chance, measured = Random(0), ranks(sweep.measured)
    return mean(
        correlation(measured, ranks([seconds * exp(chance.gauss(0.0, deviation)) for seconds in sweep.measured]))
        for _ in range(DRAWS)
    )


@dataclass(frozen=True)
class Fit:
    """How often "fits" was said of runs that ran and of runs that did not."""

    ran_said_fits: int
    ran_said_not: int
    failed_said_fits: int
    failed_said_not: int

    @property
    def precision(self) -> float | None:
        """Of the runs said to fit, the share that ran."""
        said = self.ran_said_fits + self.failed_said_fits
        return self.ran_said_fits / said if said else None

    @property
    def recall(self) -> float | None:
        """Of the runs that ran, the share said to fit."""
        ran = self.ran_said_fits + self.ran_said_not
        return self.ran_said_fits / ran if ran else None

    @property
    def caught(self) -> float | None:
        """Of the runs that failed, the share said not to fit."""
        failed = self.failed_said_fits + self.failed_said_not
        return self.failed_said_not / failed if failed else None

    @classmethod
    def of(cls, ran: Sequence[bool], failed: Sequence[bool]) -> Fit:
        return cls(sum(ran), len(ran) - sum(ran), sum(failed), len(failed) - sum(failed))


@dataclass(frozen=True)
class SourceScore:
    """Everything of one source."""

    source: str
    time: Errors | None
    memory: Errors | None
    sweeps: tuple[Sweep, ...]
    ceiling: float | None
    """The rank correlation that its own repeats would reach; None where there are no repeats or no sweeps."""
    fit: Fit | None
    """None where no failed run is known."""

    @property
    def rank_correlation(self) -> float | None:
        return mean(sweep.rank_correlation for sweep in self.sweeps) if self.sweeps else None

    @property
    def regret(self) -> float | None:
        """Of the sweep in the middle."""
        return median(sweep.regret for sweep in self.sweeps) if self.sweeps else None

    @property
    def mean_regret(self) -> float | None:
        return mean(sweep.regret for sweep in self.sweeps) if self.sweeps else None


def by_source(ran: Sequence[Scored], failed: Sequence[Scored]) -> tuple[SourceScore, ...]:
    sources = sorted({one.source for one in (*ran, *failed)})
    found = []
    for source in sources:
        here = [one for one in ran if one.source == source]
        lost = [one for one in failed if one.source == source]
        swept, deviation = sweeps(here), spread(here)
        found.append(
            SourceScore(
                source=source,
                time=Errors.of(one.time_error for one in here),
                memory=Errors.of(one.memory_error for one in here),
                sweeps=swept,
                ceiling=mean(attainable(sweep, deviation) for sweep in swept) if swept and deviation else None,
                fit=Fit.of([one.fits for one in here], [one.fits for one in lost]) if lost else None,
            )
        )
    return tuple(found)


def over_sources(scores: Iterable[SourceScore], figure: Callable[[SourceScore], float | None]) -> float | None:
    """The mean of a figure over the sources that have it, each counting the same."""
    known = [value for value in map(figure, scores) if value is not None]
    return mean(known) if known else None
