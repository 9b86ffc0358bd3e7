"""The data of a page: the mesh, its layouts and what the plan says of each, from one run file."""

from __future__ import annotations

from typing import Any

from koushi.config.load import RunFile
from koushi.errors import KoushiError
from koushi.hardware.hardware import Hardware
from koushi.job import Job
from koushi.mesh import FOLDS, MESH_DIMS
from koushi.models.llama.flops import parameter_count
from koushi.report.page.figures import KINDS, MOST_ACTIONS, MOST_ACTIONS_ELSEWHERE, TICKS, figures
from koushi.report.page.layouts import choices, reach
from koushi.report.page.parameters import shown_parameters
from koushi.units import count_text

MOST_RANKS = 16_384

YAML_KEYS = (
    ("pipeline_parallel_degree", "pp"),
    ("data_parallel_replicate_degree", "dp_replicate"),
    ("data_parallel_shard_degree", "dp_shard"),
    ("tensor_parallel_degree", "tp"),
)


def page_data(run_file: RunFile, job: Job, hardware: Hardware) -> dict[str, Any]:
    """What the page of ``job``, which ``run_file`` describes, is drawn from.

    Raises KoushiError for a lattice that no page can draw smoothly.
    """
    world = job.mesh.world_size
    if world > MOST_RANKS:
        raise KoushiError(f"a page draws at most {MOST_RANKS:,} ranks, this lattice has {world:,}; see koushi mesh")
    reached = list(reach(run_file, job))
    of = choices(job)
    base = next(one.key for one in reached if one.job is job)
    layouts = {
        one.key: figures(one.job, hardware, MOST_ACTIONS if one.job is job else MOST_ACTIONS_ELSEWHERE)
        for one in reached
        if one.job is not None
    }
    return {
        "name": job.name,
        "about": f"{job.model_name}, {count_text(parameter_count(job.size))} parameters, {world:,} devices",
        "hardware": hardware.description,
        "nodeSize": min(hardware.devices_per_node, world),
        "world": world,
        "dims": MESH_DIMS,
        "folds": FOLDS,
        "base": base,
        "layouts": layouts,
        "problems": {one.key: one.problem for one in reached if one.problem},
        "choices": of,
        "ticks": TICKS,
        "kinds": [kind.replace("_", " ") for kind in KINDS],
        "parameters": shown_parameters(job, of["tp"]),
        "yaml": YAML_KEYS,
    }
