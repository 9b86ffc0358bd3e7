"""A smaller batch whose step a dry run gets through sooner, and whose fullest rank holds as much. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from koushi.check.rule import GLOBAL_BATCH
from koushi.dryrun.extrapolate import MOST_WORK
from koushi.job import Job
from koushi.plan.command import hardware_of
from koushi.plan.layouts import is_legal, layout_of, question_of
from koushi.plan.memory import every_rank
from koushi.plan.plan import Plan, plan
from koushi.plan.workload import of_job
from koushi.units import bytes_text

ALIKE = 0.01
"""Share of the fullest rank's memory by which a smaller batch may differ."""


@dataclass(frozen=True)
class Smaller:
    """A batch in place of a job's own."""

    global_batch_size: int
    microbatches: int
    memory: float
    """Bytes that the fullest rank is planned to hold."""


def smaller_batch(job: Job, planned: Plan) -> Smaller | None:
    """The smallest, of at most half the microbatches, that is planned to hold as much; None: there is none.

    Tried are 2, 4, 8 ... microbatches, and as many times the pipeline's ranks.
    """
    question, workload = question_of(job), planned.workload
    layout, own = layout_of(workload), job.microbatches
    powers = [2**power for power in range(own.bit_length())]
    for count in sorted({*powers[1:], *(job.mesh.degree("pp") * one for one in powers)} - {1}):
        if 2 * count > own:
            return None
        batch = job.data_parallel_degree * job.config.training.microbatch_size * count
        if is_legal(replace(question, global_batch_size=batch), layout):
            ranks = every_rank(replace(workload, microbatches=count), planned.hardware)
            memory = max(one.device for one in ranks)
            if abs(memory - planned.memory.device) <= ALIKE * planned.memory.device:
                return Smaller(batch, count, memory)
    return None


def hint(job: Job) -> str | None:
    """Where a dry run of ``job`` takes long because of its many microbatches, what to do about it; else None."""
    if job.microbatches * job.size.n_layers <= MOST_WORK:
        return None
    text = f"all {job.microbatches} microbatches are run, and the time grows with them"
    planned = plan(of_job(job), hardware_of(job))
    found = smaller_batch(job, planned)
    if found is None:
        return text
    held = f"{bytes_text(found.memory)} in place of {bytes_text(planned.memory.device)}"
    batch = f"{GLOBAL_BATCH}={found.global_batch_size}, {found.microbatches} microbatches"
    return f"{text}; with {batch}, the fullest rank is planned to hold {held}"
