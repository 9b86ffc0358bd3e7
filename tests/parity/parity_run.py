"""Train cases in few worlds, each against one process, and say by name what differs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

from parity_audit import audited, recorded
from parity_cases import Case

from koushi.config.schema import Parallelism
from koushi.errors import KoushiError
from koushi.job import Job
from koushi.models.llama.layout import parameters
from koushi.verify.command import run_recorded
from koushi.verify.compare import KINDS, TOLERANCES, Assembled, Tolerance, assemble, compare_assembled, relative
from koushi.verify.record import RankRecord
from koushi.verify.scale import single_process

STEPS = {"float64": 2, "float32": 5, "bfloat16": 5}
"""The second step is the first that begins with moments and with weights that were updated; rounding needs more."""
MOST_IN_A_WORLD = 20
_folders = count()


def precision(dtype: str) -> tuple[str, ...]:
    """Overrides for ``dtype`` throughout; bfloat16 is that of the arithmetic alone."""
    stored = "float32" if dtype == "bfloat16" else dtype
    return (f"precision.parameters={stored}", f"precision.compute={dtype}", f"precision.reduce={stored}")


def twin(job: Job) -> Job:
    """The same training in one process, the whole batch at once and nothing recomputed."""
    alone = single_process(job)
    training = alone.config.training
    whole = training.model_copy(update={"microbatch_size": training.global_batch_size, "recompute": "none"})
    parallelism = Parallelism(world_size=1, reshard_after_forward="always", pipeline_parallel_stages_per_rank=1)
    config = alone.config.model_copy(update={"training": whole, "parallelism": parallelism})
    return Job(config, alone.size, alone.mesh, alone.stages, alone.name, alone.base)


def run(jobs: Sequence[Job], steps: int, folder: Path) -> list[list[RankRecord]]:
    return run_recorded(jobs[0], jobs, steps, folder / str(next(_folders)))


class References:
    """Records of one process, made once for all the layouts that share them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._records: dict[tuple[str, int], list[RankRecord]] = {}

    def of(self, job: Job, steps: int) -> list[RankRecord]:
        alone = twin(job)
        key = (alone.config.model_dump_json(), steps)
        if key not in self._records:
            self._records[key] = run([alone], steps, self.folder)[0]
        return self._records[key]


def differing(
    job: Job, steps: int, reference: list[RankRecord], records: list[RankRecord], tolerance: Tolerance, dtype: str
) -> list[str]:
    """What is wrong with ``records``, in words; nothing where the layout trains as one process does."""
    expected, held = assemble(reference), assemble(records)
    differences, found = compare_assembled(expected, held, tolerance)
    found += [f"{one.kind}: {one.relative:.1e} at {one.where}" for one in differences if not one.within]
    if {one.kind for one in differences} != set(KINDS):
        found.append(f"only {[one.kind for one in differences]} were compared")
    found += _incomplete(job, steps, held)
    if dtype == "float64":
        found += _parameters(expected, held, tolerance.tensors)
    return found


def _incomplete(job: Job, steps: int, held: Assembled) -> list[str]:
    """Every tensor of the model is there, in its unsharded shape, for every step."""
    names = parameters(job.size)
    expected = {("gradient", name, step) for name in names for step in range(steps)}
    for kind, step in (("initial", 0), ("parameter", steps), ("exp_avg", steps), ("exp_avg_sq", steps)):
        expected |= {(kind, name, step) for name in names}
    found, tensors = [], held.tensors
    if tensors.keys() != expected:
        found.append(f"recorded besides or not at all: {sorted(map(str, tensors.keys() ^ expected))[:5]}")
    found += [f"{key} has the shape {one.shape}" for key, one in tensors.items() if one.shape != names[key[1]].shape]
    if any(len(record.losses) != steps or len(record.grad_norms) != steps for record in held.records):
        found.append("a rank lacks losses or norms")
    return found


def _parameters(reference: Assembled, other: Assembled, allowed: float) -> list[str]:
    """In float64 the worst element of a parameter has no excuse either."""
    names = [key for key in reference.tensors.keys() & other.tensors.keys() if key[0] == "parameter"]
    apart = {key[1]: relative(reference.tensors[key], other.tensors[key]) for key in names}
    return [f"parameter {name}: worst element {value:.1e}" for name, value in apart.items() if not value <= allowed]


def failures(
    cases: Sequence[Case],
    dtype: str,
    references: References,
    tolerance: Tolerance | None = None,
) -> dict[str, list[str]]:
    """Name of each case that does not train as one process does, with what is wrong. Cases of one world size.

    In float64 every collective of the first step is audited too, and compared with the plan.
    """
    assert cases, "no cases to run"
    assert len({one.world for one in cases}) == 1, "the cases need worlds of different sizes"
    steps = STEPS[dtype]
    jobs = [one.job(references.folder, *precision(dtype)) for one in cases]
    ledgers = references.folder / f"ledgers-{next(_folders)}"
    with recorded(jobs if dtype == "float64" else (), ledgers):
        survived = _survived(jobs, steps, references.folder)
    found = {}
    for one, job, records in zip(cases, jobs, survived, strict=True):
        if isinstance(records, KoushiError):
            found[one.name] = ["failed: " + " | ".join(str(records).strip().splitlines()[-12:])]
            continue
        reference = references.of(job, steps)
        assert all(math.isfinite(value) and value > 0 for value in reference[0].losses), "a reference without a loss"
        wrong = differing(job, steps, reference, records, tolerance or TOLERANCES[dtype], dtype)
        if dtype == "float64":
            wrong += audited(job, ledgers)
        if wrong:
            found[one.name] = wrong
    return found


def _survived(jobs: list[Job], steps: int, folder: Path) -> list[list[RankRecord] | KoushiError]:
    """All in one world; where that fails, each in its own, to tell which one failed."""
    try:
        return list(run(jobs, steps, folder))
    except KoushiError as error:
        if len(jobs) == 1:
            return [error]
    return [_survived([job], steps, folder)[0] for job in jobs]


def in_words(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {'; '.join(wrong)}" for name, wrong in found.items())


def chunks(cases: Iterable[Case]) -> list[list[Case]]:
    """Grouped by world size, few enough in each to run in one world."""
    worlds: dict[int, list[Case]] = defaultdict(list)
    for one in cases:
        worlds[one.world].append(one)
    return [
        held[start : start + MOST_IN_A_WORLD]
        for _, held in sorted(worlds.items())
        for start in range(0, len(held), MOST_IN_A_WORLD)
    ]
