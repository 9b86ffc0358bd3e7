"""Large jobs from small traces: two with few layers in every stage, and a straight line through them.

Layers of a stage are alike, so what a rank holds, computes and sends grows by the same with each of
them, as long as the peak stays in the same place. All microbatches and the whole schedule are run.
The rank that holds most is run in full besides, to confirm it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from koushi.dryrun.memory import Peak
from koushi.dryrun.trace import RankTrace
from koushi.job import Job
from koushi.layout import local_shape
from koushi.models.llama.layout import canonical, parameters
from koushi.schedules import layer_ranges, stages_of_rank
from koushi.traffic import Collective, Traffic

FEW = (3, 4)
"""Layers of the smallest stage in the two traces."""
MOST_WORK = 600
"""Layers times microbatches, over all the ranks to trace, up to which all are traced whole: about 20 s of CPU."""

Key = TypeVar("Key")


def held_stages(job: Job, rank: int) -> tuple[int, ...]:
    pp = job.mesh.degree("pp")
    if pp == 1:
        return (0,)
    schedule = job.config.parallelism.pipeline_parallel_schedule
    return stages_of_rank(schedule, pp, len(job.stages), job.mesh.coordinate(rank)["pp"])


def work(job: Job, rank: int) -> int:
    """Layers times microbatches that a trace of ``rank`` runs."""
    return job.microbatches * sum(len(job.stages[stage]) for stage in held_stages(job, rank))


def smallest(job: Job, rank: int) -> int:
    """Layers of the smallest of the rank's stages that have any; 0 where none has."""
    return min((len(job.stages[stage]) for stage in held_stages(job, rank) if len(job.stages[stage])), default=0)


def reduced(job: Job, rank: int, layers: int) -> Job:
    """The job with so many layers in the smallest stage of ``rank``, its others as much larger as they were.

    Stages of other ranks are empty: only their shapes matter to this rank, and activations have those of the job.
    """
    fewer = smallest(job, rank) - layers
    held = held_stages(job, rank)
    counts = tuple(
        len(stage) - fewer if index in held and len(stage) else 0 for index, stage in enumerate(job.stages)
    )
    model = job.config.model.model_copy(update={"n_layers": sum(counts)})
    parallelism = job.config.parallelism
    if len(job.stages) > 1:
        parallelism = parallelism.model_copy(update={"pipeline_parallel_layers_per_stage": counts})
    config = job.config.model_copy(update={"model": model, "parallelism": parallelism})
    return replace(job, config=config, size=replace(job.size, n_layers=sum(counts)), stages=layer_ranges(counts))


@dataclass(frozen=True)
class Line:
    """Through values at the two small numbers of layers, read off at ``layers``."""

    layers: int

    def at(self, few: int, more: int) -> int:
        assert FEW[1] == FEW[0] + 1, "the slope is per layer"
        return few + (more - few) * (self.layers - FEW[0])

    def each(self, few: Mapping[Key, int], more: Mapping[Key, int]) -> Counter[Key]:
        return Counter({key: self.at(few.get(key, 0), more.get(key, 0)) for key in {**few, **more}})


def extrapolated(job: Job, few: RankTrace, more: RankTrace) -> RankTrace | None:
    """The trace of the whole job's rank from those of its ``reduced`` ones; None where the peak's place moves.

    Ledger, facts and FLOPs before each event stay those of the larger of the two.
    """
    if _pattern(few.peak) != _pattern(more.peak):
        return None
    line = Line(smallest(job, few.rank))
    traffic = _traffic(line, few.traffic, more.traffic)
    if traffic is None:
        return None
    kinds = line.each(few.peak.kinds, more.peak.kinds)
    peak = Peak(
        sum(kinds.values()),
        (more.peak.place[0], _any_layer(more.peak.place[1])),
        kinds,
        line.each(_modules(few.peak), _modules(more.peak)),
    )
    return replace(
        more,
        shapes=_shapes(job, few.rank),
        peak=peak,
        resting=line.at(few.resting, more.resting),
        flops=dict(line.each(few.flops, more.flops)),
        traffic=traffic,
        extrapolated=True,
    )


def _any_layer(module: str) -> str:
    return re.sub(r"layers\.\d+", "layers.*", module)


def _pattern(peak: Peak) -> tuple[str, str]:
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
    described = parameters(job.size, job.mesh.degree("tp"))
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))
    coordinate = job.mesh.coordinate(rank)
    names = []
    held = held_stages(job, rank)
    for stage in held:
        names += ["tok_embeddings.weight"] if stage == 0 else []
        names += [name for layer in job.stages[stage] for name in described if name.startswith(f"layers.{layer}.")]
        names += ["norm.weight", "output.weight"] if stage == len(job.stages) - 1 else []
    if job.size.tie_embeddings and 0 in held and len(job.stages) == 1:
        names.remove("output.weight")
    found = {}
    for name in names:
        about = described[canonical(name, job.size)]
        found[name] = local_shape(about.shape, about.cuts, degrees, coordinate)
    return found

