"""The layouts that a page's sliders reach: each a checked job, or what ``koushi check`` says against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from koushi.check.check import check_afar
from koushi.check.rule import DP_REPLICATE, DP_SHARD, PER_STAGE, PP, TP, WORLD
from koushi.config.load import RunFile
from koushi.config.source import Place
from koushi.errors import ConfigError
from koushi.job import Job
from koushi.layout import divide_layers
from koushi.plan.layouts import divisors

SLIDERS = ("pp", "dp_replicate", "tp")
"""dp_shard is what is left of the world."""


@dataclass(frozen=True)
class Reached:
    """One position of the sliders."""

    degrees: tuple[int, ...]
    """In the order of SLIDERS."""
    job: Job | None
    problem: str = ""
    """Why there is no job."""

    @property
    def key(self) -> str:
        return "-".join(str(degree) for degree in self.degrees)


def choices(job: Job) -> Mapping[str, tuple[int, ...]]:
    """The degrees of every slider: divisors of the world, as far as the model could ever be cut, and one beyond."""
    world = job.mesh.world_size

    def up_to(most: int) -> tuple[int, ...]:
        possible = divisors(world)
        return possible[: sum(1 for one in possible if one <= most) + 1]

    return {"pp": up_to(job.size.n_layers), "dp_replicate": divisors(world), "tp": up_to(job.size.n_heads)}


def reach(run_file: RunFile, job: Job) -> Iterator[Reached]:
    """Every position of the sliders of ``job``, which ``run_file`` describes; its own is among them."""
    of = choices(job)
    own = tuple(job.mesh.degree(name) for name in SLIDERS)
    for pp in of["pp"]:
        for dp_replicate in of["dp_replicate"]:
            for tp in of["tp"]:
                degrees = (pp, dp_replicate, tp)
                if degrees == own:
                    yield Reached(degrees, job)
                    continue
                try:
                    yield Reached(degrees, check_afar(_moved(run_file, degrees, job))[0])
                except ConfigError as error:
                    text = "\n".join(f"{one.key}: {one.what}; {one.legal}" for one in error.problems)
                    yield Reached(degrees, None, text)


def _moved(run_file: RunFile, degrees: tuple[int, ...], job: Job) -> RunFile:
    """``run_file`` with the sliders' degrees, said as if on the command line."""
    pp, dp_replicate, tp = degrees
    values: dict[str, int | None] = {
        PP: pp,
        DP_REPLICATE: dp_replicate,
        DP_SHARD: -1,
        TP: tp,
        WORLD: job.mesh.world_size,
    }
    set_by_hand = run_file.config.parallelism.pipeline_parallel_layers_per_stage
    if set_by_hand is not None and pp != job.mesh.degree("pp") and set_by_hand == _even(job):
        values[PER_STAGE] = None  # that they are even can be kept with other stages
    section = {key.rpartition(".")[2]: value for key, value in values.items()}
    config = run_file.config.model_copy(update={"parallelism": run_file.config.parallelism.model_copy(update=section)})
    places = {key: Place.in_arguments(number, key) for number, key in enumerate(values)}
    return replace(run_file, config=config, places={**run_file.places, **places})


def _even(job: Job) -> tuple[int, ...]:
    return divide_layers(job.size.n_layers, len(job.stages))
