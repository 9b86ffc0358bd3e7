"""Whether a world that is about to start on this machine can have room on it."""

from __future__ import annotations

import os

from koushi.errors import DoesNotFit
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.units import bytes_text

TENSORS_PER_PARAMETER = 4
"""The parameter, its gradient and AdamW's two moments (ZeRO, arXiv 1910.02054)."""


def state_bytes(job: Job) -> int:
    """Bytes that parameters, gradients and optimizer state need over all ranks; activations come on top.

    Every replica over dp_replicate holds one whole copy, cut over the other dims.
    """
    width = 8 if job.config.precision.parameters == "float64" else 4
    return parameter_count(job.size) * width * TENSORS_PER_PARAMETER * job.mesh.degree("dp_replicate")


def refuse_too_large(job: Job) -> None:
    """Raise DoesNotFit where this machine's memory cannot even hold the model state of all ranks."""
    needed, memory = state_bytes(job), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise DoesNotFit(
            f"{job.mesh.world_size} processes {job.mesh} need {bytes_text(needed)} for parameters, gradients and AdamW "
            f"alone, and this machine has {bytes_text(memory)}: start it with torchrun on machines that hold it, or "
            "see that the layout is right with koushi verify, which scales the model down"
        )
