"""Where every value of a resolved run file comes from. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from koushi.config.describe import keys
from koushi.config.load import RunFile
from koushi.config.schema import JobConfig, Section
from koushi.config.write import value_text
from koushi.job import Job

Rule = Callable[[RunFile, Job], str]


def _stages_per_rank(run_file: RunFile, job: Job) -> str:
    if len(job.stages) == 1:
        return "no pipeline, so one stage"
    return f"the fewest that {job.config.parallelism.pipeline_parallel_schedule} works with"


def _layers_per_stage(run_file: RunFile, job: Job) -> str:
    return f"{job.size.n_layers} layers over {len(job.stages)} stages, as even as possible with lighter ends"


def _reshard(run_file: RunFile, job: Job) -> str:
    return "auto with a pipeline" if len(job.stages) > 1 else "auto without a pipeline"


def _tokenizer(run_file: RunFile, job: Job) -> str:
    return "relative to the run file" if run_file.is_set("data.tokenizer") else "the one in the folder model.hf"


def _relative(run_file: RunFile, job: Job) -> str:
    return "relative to the run file"


DERIVED: Mapping[str, Rule] = {
    "parallelism.data_parallel_shard_degree": lambda run_file, job: (
        f"what the other degrees leave of a world of {job.mesh.world_size}"
    ),
    "parallelism.world_size": lambda run_file, job: "the product of the degrees",
    "parallelism.pipeline_parallel_stages_per_rank": _stages_per_rank,
    "parallelism.pipeline_parallel_layers_per_stage": _layers_per_stage,
    "parallelism.reshard_after_forward": _reshard,
    "model.hf": _relative,
    "data.path": _relative,
    "data.tokenizer": _tokenizer,
}
"""How ``koushi.check.check`` fills in what a run file leaves open, by key."""


def sources(run_file: RunFile, job: Job) -> dict[str, str]:
    """Where every value of ``job`` comes from, by key: default, place, command line, preset, or a rule."""
    found = {}
    for key in keys():
        value = _value_at(job.config, key.name)
        if not isinstance(value, Section):
            found[key.name] = _source(run_file, job, key.name, value)
    return found


def _value_at(config: JobConfig, key: str) -> object:
    """The value at a dotted key; None inside a section that is empty."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def _source(run_file: RunFile, job: Job, key: str, value: object) -> str:
    given = _value_at(run_file.config, key)
    place = run_file.places[key].text if run_file.is_set(key) else ""
    if value == given:
        return place or "default"
    if key in DERIVED:
        rule = DERIVED[key](run_file, job)
    else:
        assert key.startswith("model."), f"no word of how {key} was filled in"
        hf = run_file.config.model.hf
        rule = f"preset {job.config.model.name}" if hf is None else f"{hf}/config.json"
    return f"{rule}, for {value_text(given)} at {place}" if place else rule
