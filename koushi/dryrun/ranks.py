"""Which ranks run alike, so that one of each kind is enough to run. No torch.

A rank's program follows from its pipeline coordinate and from the shapes of what it holds; those follow
from its indices along tp and dp_shard, and differ there only where something doesn't divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from koushi.job import Job
from koushi.layout import local_shape
from koushi.models.llama.layout import EMBEDDING, OUTPUT, Parameter, block_parameters, parameters
from koushi.schedules import stages_of_rank

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankClass:
    """Ranks that run alike."""

    representative: int
    """The lowest of them."""
    ranks: tuple[int, ...]


def rank_classes(job: Job, *, counting: bool = False) -> tuple[RankClass, ...]:
    """Every rank of the job's mesh in one class, by their lowest rank.

    With ``counting``, also apart by whether they count the parameters copied over tp in the gradient norm.
    """
    found: dict[object, list[int]] = {}
    shapes = _Shapes(job)
    strides = dict(zip(job.mesh.names, job.mesh.strides, strict=True))
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))

    def index(rank: int, name: str) -> int:
        return rank // strides[name] % degrees[name]

    for rank in range(job.mesh.world_size):
        pp = index(rank, "pp")
        tp = index(rank, "tp")
        key = (pp, shapes.held(pp, index(rank, "dp_shard"), tp), counting and tp == 0)
        found.setdefault(key, []).append(rank)
    return tuple(RankClass(ranks[0], tuple(ranks)) for ranks in found.values())


def held_stages(job: Job, rank: int) -> tuple[int, ...]:
    """The stages of ``rank``, in the order of the model."""
    pp = job.mesh.degree("pp")
    schedule = job.config.parallelism.pipeline_parallel_schedule
    return stages_of_rank(schedule, pp, len(job.stages), job.mesh.coordinate(rank)["pp"])


class _Shapes:
    """Local shapes by coordinate; those of all blocks are those of the first."""

    def __init__(self, job: Job):
        self._job = job
        self._degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))
        tp = self._degrees["tp"]
        described = parameters(job.size, tp)
        output = OUTPUT if OUTPUT in described else EMBEDDING
        self._first = (described[EMBEDDING],)
        self._block = tuple(block_parameters(job.size, 0, tp))
        self._last = (described["norm.weight"], described[output])
        self.held = cache(self._held)
        self._local = cache(self._local_shapes)

    def _held(self, pp: int, dp_shard: int, tp: int) -> tuple[Shapes, ...]:
        """Of what the rank's stages hold: the embedding, a block, the head; empty where they hold none."""
        job = self._job
        stages = held_stages(job, job.mesh.rank({"pp": pp}))
        return (
            self._local("_first", dp_shard, tp) if 0 in stages else (),
            self._local("_block", dp_shard, tp) if any(len(job.stages[stage]) for stage in stages) else (),
            self._local("_last", dp_shard, tp) if len(job.stages) - 1 in stages else (),
        )

    def _local_shapes(self, which: str, dp_shard: int, tp: int) -> Shapes:
        held: tuple[Parameter, ...] = getattr(self, which)
        coordinate = {"dp_shard": dp_shard, "tp": tp}
        return tuple(local_shape(one.shape, one.cuts, self._degrees, coordinate) for one in held)
