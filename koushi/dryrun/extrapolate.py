"""Large jobs from few traces: what is alike isn't run twice, and what grows along a straight line is read off it.

Layers of a stage are alike: with each of them a rank holds, computes and sends as much more, as long as
the peak stays in the same place. Two traces with few layers tell how much. Ranks between the first and
the last stage of a pipeline differ in how many microbatches they hold at once; three of them tell
whether the others lie on a line. All microbatches and the whole schedule are always run, and the rank
that holds most is run in full, to confirm it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from koushi.dryrun.forks import in_forks
from koushi.dryrun.memory import Kind, Peak, Place
from koushi.dryrun.ranks import RankClass, held_stages
from koushi.dryrun.trace import RankTrace, trace
from koushi.dryrun.world import DeviceKind
from koushi.job import Job
from koushi.layout import local_shape
from koushi.models.llama.layout import block_parameters, canonical, parameters
from koushi.parallel.ledger import Ledger
from koushi.schedules import layer_ranges
from koushi.traffic import Collective, Traffic

FEW = (3, 4)
"""Layers of the smallest stage in the two traces: sharding prefetches two layers ahead, which smaller ones lack."""
WORTH = 2 * sum(FEW)
"""From how many layers on two small traces are worth more than the whole."""
MOST_WORK = 600
"""Layers times microbatches, over all the ranks to trace, up to which all are traced whole: about 20 s of CPU."""

MOST_AUDITED = 1
"""Layers of a stage that are enough for the audit of a large job, whose stages gather and free again and again."""

Key = TypeVar("Key")


def traces(job: Job, kind: DeviceKind, classes: Sequence[RankClass]) -> list[RankTrace]:
    """Of every class's representative, traced or extrapolated."""
    ranks = [one.representative for one in classes]
    if sum(work(job, rank) for rank in ranks) <= MOST_WORK:
        return whole(job, kind, ranks)
    grouped = families(job, ranks)
    found = _stacked(job, kind, sorted({rank for family in grouped for rank in _ends_and_middle(family)}))
    for family in grouped:
        found |= _between(job, family, found)
    found |= _stacked(job, kind, [rank for rank in ranks if rank not in found])
    return [found[rank] for rank in _confirmed(job, kind, ranks, found)]


def whole(job: Job, kind: DeviceKind, ranks: Sequence[int]) -> list[RankTrace]:
    return in_forks(partial(_trace, kind), [(job, rank) for rank in ranks])


def _trace(kind: DeviceKind, item: tuple[Job, int]) -> RankTrace:
    return trace(*item, kind)


def _confirmed(job: Job, kind: DeviceKind, ranks: list[int], found: dict[int, RankTrace]) -> list[int]:
    """Put the whole trace of the rank that holds most in the place of its extrapolation; where they differ, of all."""
    most = max(ranks, key=lambda rank: found[rank].peak.bytes)
    if found[most].extrapolated:
        expected = found[most].peak.bytes
        found |= {most: whole(job, kind, [most])[0]}
        if found[most].peak.bytes != expected:
            left = [rank for rank in ranks if found[rank].extrapolated]
            found |= dict(zip(left, whole(job, kind, left), strict=True))
    return ranks


def _stacked(job: Job, kind: DeviceKind, ranks: Sequence[int]) -> dict[int, RankTrace]:
    """Traces of ``ranks``, from few layers where that is worth it."""
    high = [rank for rank in ranks if smallest(job, rank) >= WORTH]
    small = in_forks(partial(_trace, kind), [(reduced(job, rank, layers), rank) for rank in high for layers in FEW])
    found = {}
    for index, rank in enumerate(high):
        one = extrapolated(job, *small[2 * index : 2 * index + 2])
        if one is not None:
            found[rank] = one
    left = [rank for rank in ranks if rank not in found]
    return found | dict(zip(left, whole(job, kind, left), strict=True))


def families(job: Job, ranks: Sequence[int]) -> list[list[int]]:
    """``ranks`` in groups, by pipeline coordinate: those alike but for it, and those that are like no other."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        held = held_stages(job, rank)
        ends = 0 in held or len(job.stages) - 1 in held
        counts = tuple(len(job.stages[stage]) for stage in held)
        shapes = tuple(sorted(set(_shapes(job, rank).values())))
        found.setdefault(rank if ends else (counts, shapes), []).append(rank)
    return list(found.values())


def _ends_and_middle(family: list[int]) -> set[int]:
    return {family[0], family[len(family) // 2], family[-1]}


def _between(job: Job, family: list[int], found: Mapping[int, RankTrace]) -> dict[int, RankTrace]:
    """Those of a family that lie between its traced ends; none where its middle does not lie on their line."""
    if all(rank in found for rank in family):
        return {}
    first, middle, last = family[0], family[len(family) // 2], family[-1]
    at = {rank: job.mesh.coordinate(rank)["pp"] for rank in family}

    def read_off(rank: int) -> RankTrace | None:
        return interpolated(job, rank, found[first], found[last], at[rank] - at[first], at[last] - at[first])

    expected = read_off(middle)
    if expected is None or not _alike(expected, found[middle]):
        return {}
    read = {rank: read_off(rank) for rank in family if rank not in found}
    return {rank: one for rank, one in read.items() if one is not None}


def _alike(one: RankTrace, other: RankTrace) -> bool:
    return (one.peak.kinds, one.resting, one.traffic, one.flops) == (
        other.peak.kinds, other.resting, other.traffic, other.flops
    )  # fmt: skip


def interpolated(job: Job, rank: int, first: RankTrace, last: RankTrace, part: int, of: int) -> RankTrace | None:
    """The trace of a rank that stands ``part`` of ``of`` steps from ``first`` to ``last``; None where no line leads."""
    if (first.traffic, first.flops, _pattern(first.peak)) != (last.traffic, last.flops, _pattern(last.peak)):
        return None
    line = Line(part, of)
    kinds, modules = line.each(first.peak.kinds, last.peak.kinds), line.each(_modules(first.peak), _modules(last.peak))
    resting = line.at(first.resting, last.resting)
    if not (line.exact(first.peak.kinds, last.peak.kinds) and line.exact({"": first.resting}, {"": last.resting})):
        return None
    return _read_off(job, rank, first, kinds, modules, resting)


def extrapolated(job: Job, few: RankTrace, more: RankTrace) -> RankTrace | None:
    """The trace of the whole job's rank from those of its ``reduced`` ones; None where the peak's place moves."""
    if _pattern(few.peak) != _pattern(more.peak):
        return None
    line = Line(smallest(job, few.rank) - FEW[0], FEW[1] - FEW[0])
    traffic = _traffic(line, few.traffic, more.traffic)
    if traffic is None:
        return None
    kinds, modules = line.each(few.peak.kinds, more.peak.kinds), line.each(_modules(few.peak), _modules(more.peak))
    found = _read_off(job, few.rank, more, kinds, modules, line.at(few.resting, more.resting))
    return replace(found, flops=dict(line.each(few.flops, more.flops)), traffic=traffic)


def _read_off(
    job: Job, rank: int, like: RankTrace, kinds: Counter[Kind], modules: Counter[str], resting: int
) -> RankTrace:
    """A trace that was not made, with FLOPs and traffic as in ``like``."""
    peak = Peak(sum(kinds.values()), _pattern(like.peak), kinds, modules)
    ledger = Ledger(rank, job.mesh, ())
    return replace(
        like, rank=rank, shapes=_shapes(job, rank), peak=peak, resting=resting, ledger=ledger, flops_before=(),
        works=(), extrapolated=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """Through values at 0 and ``of``, read off at ``part``."""

    part: int
    of: int

    def at(self, start: int, end: int) -> int:
        return start + (end - start) * self.part // self.of

    def each(self, start: Mapping[Key, int], end: Mapping[Key, int]) -> Counter[Key]:
        return Counter({key: self.at(start.get(key, 0), end.get(key, 0)) for key in {**start, **end}})

    def exact(self, start: Mapping[Key, int], end: Mapping[Key, int]) -> bool:
        """Whether steps along the line are whole bytes."""
        return all((end.get(key, 0) - start.get(key, 0)) % self.of == 0 for key in {**start, **end})


def work(job: Job, rank: int) -> int:
    """Layers times microbatches that a trace of ``rank`` runs."""
    return job.microbatches * sum(len(job.stages[stage]) for stage in held_stages(job, rank))


def for_audit(job: Job) -> Job:
    """The job itself, or one with at most one layer in a stage: what it does, the next do too."""
    counts = tuple(min(len(stage), MOST_AUDITED) for stage in job.stages)
    return job if sum(map(len, job.stages)) * job.microbatches <= MOST_WORK // 4 else with_layers(job, counts)


def smallest(job: Job, rank: int) -> int:
    """Layers of the smallest of the rank's stages that have any; 0 where none has."""
    return min((len(job.stages[stage]) for stage in held_stages(job, rank) if len(job.stages[stage])), default=0)


def reduced(job: Job, rank: int, layers: int) -> Job:
    """The job with so many layers in the smallest stage of ``rank``, its others as much larger as they were.

    Stages of other ranks are empty: only their shapes matter to this rank, and activations have those of the job.
    """
    fewer = smallest(job, rank) - layers
    held = held_stages(job, rank)
    counts = tuple(len(stage) - fewer if index in held and len(stage) else 0 for index, stage in enumerate(job.stages))
    return with_layers(job, counts)


def with_layers(job: Job, counts: tuple[int, ...]) -> Job:
    """The job with so many layers in its stages."""
    model = job.config.model.model_copy(update={"n_layers": sum(counts)})
    parallelism = job.config.parallelism
    if len(job.stages) > 1:
        parallelism = parallelism.model_copy(update={"pipeline_parallel_layers_per_stage": counts})
    config = job.config.model_copy(update={"model": model, "parallelism": parallelism})
    return replace(job, config=config, size=replace(job.size, n_layers=sum(counts)), stages=layer_ranges(counts))


def _any_layer(module: str) -> str:
    return re.sub(r"layers\.\d+", "layers.*", module)


def _pattern(peak: Peak) -> Place:
    return peak.place[0], _any_layer(peak.place[1])


def _modules(peak: Peak) -> Counter[str]:
    """Those of all layers together."""
    found: Counter[str] = Counter()
    for module, size in peak.modules.items():
        found[_any_layer(module)] += size
    return found


def _traffic(line: Line, few: Traffic, more: Traffic) -> Traffic | None:
    """Calls grow where the same goes out for every layer, bytes where one call carries something of each."""
    found = line.each({one: few[one] for one in few if one in more}, {one: more[one] for one in more if one in few})
    alone, others = _unmatched(few, more), _unmatched(more, few)
    if [(kind, calls) for kind, _, calls in alone] != [(kind, calls) for kind, _, calls in others]:
        return None
    for (kind, small, calls), (_, large, _) in zip(alone, others, strict=True):
        found[replace(kind, bytes=line.at(small, large))] += calls
    return found


def _unmatched(one: Traffic, other: Traffic) -> list[tuple[Collective, int, int]]:
    """What only ``one`` has: without its bytes, its bytes, its calls; in order."""
    return sorted((replace(kind, bytes=0), kind.bytes, calls) for kind, calls in one.items() if kind not in other)


def _shapes(job: Job, rank: int) -> dict[str, tuple[int, ...]]:
    """Local shapes of everything the rank holds, as the layout gives them."""
    tp = job.mesh.degree("tp")
    described = parameters(job.size, tp)
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))
    coordinate = job.mesh.coordinate(rank)
    names = []
    held = held_stages(job, rank)
    for stage in held:
        names += ["tok_embeddings.weight"] if stage == 0 else []
        names += [each.name for layer in job.stages[stage] for each in block_parameters(job.size, layer, tp)]
        names += ["norm.weight", "output.weight"] if stage == len(job.stages) - 1 else []
    if job.size.tie_embeddings and 0 in held and len(job.stages) == 1:
        names.remove("output.weight")
    found = {}
    for name in names:
        about = described[canonical(name, job.size)]
        found[name] = local_shape(about.shape, about.cuts, degrees, coordinate)
    return found
