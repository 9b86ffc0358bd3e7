"""From a run file to a Job: every problem at once, or proof that the parts fit. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path

from koushi.check import data_rules, mesh_rules, model_rules, pipeline_rules, training_rules
from koushi.check.rule import DP_REPLICATE, DP_SHARD, HF, NAME, PP, TP, WORLD, Facts, Finding, Rule
from koushi.config.load import RunFile
from koushi.config.schema import PATHS, JobConfig
from koushi.config.source import Found, Place, raise_if_any
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.schedules import stage_layers

RULES: tuple[Rule, ...] = (
    *model_rules.RULES,
    *mesh_rules.RULES,
    *pipeline_rules.RULES,
    *training_rules.RULES,
    *data_rules.RULES,
)


def check(run_file: RunFile, world_size: int | None = None, world: str = "") -> Job:
    """The job that ``run_file`` describes, on ``world_size`` processes where a launcher has fixed them; ``world``: what
    they are made up of, for messages.

    Raises ConfigError with every problem of the file, its overrides and the way its parts fit
    together. A rule is left out only where a key that it reads is itself wrong.
    """
    facts = _facts(run_file, world_size, world)
    raise_if_any([*run_file.found, *(_placed(run_file, finding) for finding in _findings(facts))])
    return _job(facts)


def check_here(run_file: RunFile, world_size: int | None = None) -> Job:
    """As ``check``, for a look at what the run lacks here: its errors name commands that go on without it."""
    facts = _facts(run_file, world_size, "")
    raise_if_any([*run_file.found, *(_placed(run_file, _named_elsewhere(one)) for one in _findings(facts))])
    return _job(facts)


def _named_elsewhere(finding: Finding) -> Finding:
    others = "koushi plan and koushi verify go on without it"
    return replace(finding, legal=f"{finding.legal}; {others}") if finding.elsewhere else finding


def check_afar(run_file: RunFile, world_size: int | None = None, world: str = "") -> tuple[Job, tuple[str, ...]]:
    """As ``check`` for a command that reads neither data nor tokenizer: what may be missing only on this machine is no
    problem, but a note."""
    facts = _facts(run_file, world_size, world)
    findings = list(_findings(facts))
    raise_if_any([*run_file.found, *(_placed(run_file, one) for one in findings if not one.elsewhere)])
    notes = [replace(_placed(run_file, one), legal=one.elsewhere) for one in findings if one.elsewhere]
    return _job(facts), tuple(str(one.problem) for one in sorted(notes, key=lambda one: one.place))


def _facts(run_file: RunFile, world_size: int | None, world: str) -> Facts:
    return Facts(run_file, world_size, f" ({world})" if world else "")


def _job(facts: Facts) -> Job:
    """Of facts without a finding."""
    run_file = facts.run_file
    config = _resolved(facts)
    parallelism = config.parallelism
    mesh = MeshSpec.of(
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        tp=parallelism.tensor_parallel_degree,
    )
    return Job(
        config=config,
        size=facts.size,
        mesh=mesh,
        stages=stage_layers(facts.size.n_layers, facts.pp, parallelism),
        name=run_file.path.stem,
        base=run_file.path.parent,
    )


def _findings(facts: Facts) -> Iterator[Finding]:
    spoilt: set[str] = set()
    sound = facts.run_file.is_sound
    others = (PP, DP_REPLICATE, TP, WORLD)
    if facts.shard_follows and not all(sound(key) for key in others):
        spoilt.add(DP_SHARD)
    if not sound(HF):
        spoilt.add(NAME)  # whose sizes every rule on the model reads
    for rule in RULES:
        if all(sound(key) and key not in spoilt for key in rule.reads):
            for finding in rule.find(facts):
                spoilt.update(finding.spoils)
                yield finding


def _placed(run_file: RunFile, finding: Finding) -> Found:
    key, place = run_file.place(*finding.keys)
    what = finding.what
    if key != finding.keys[0] and what.startswith("is "):
        # "is 4" is said of the first key; at another key's place it has to name the first.
        what = f"{finding.keys[0]} {what}"
    legal = [one for one in (finding.legal, _how_taken(run_file, key, place)) if one]
    return Found(place, key, what, "; ".join(legal))


def _how_taken(run_file: RunFile, key: str, place: Place) -> str:
    """Of a path on the command line that would be another one in the current folder; empty for all else."""
    section, _, name = key.partition(".")
    value = getattr(getattr(run_file.config, section), name) if key in PATHS and place.on_command_line else None
    if value is None or os.path.isabs(value) or value.startswith("~") or not glob(value):
        return ""
    base = run_file.path.parent
    if os.path.realpath(base) == os.path.realpath("."):
        return ""
    there = os.path.relpath(value, base)
    return f"paths start from the run file's folder, from which that in the current folder is {there}"


def _resolved(facts: Facts) -> JobConfig:
    """The config with every -1 and every empty value that follows from others filled in."""
    config = facts.config
    stages_per_rank, shard = facts.stages_per_rank, facts.dp_shard
    reshard = config.parallelism.reshard_after_forward
    parallelism = config.parallelism.model_copy(
        update={
            "data_parallel_shard_degree": shard,
            "world_size": facts.degrees_but_shard * shard,
            "pipeline_parallel_stages_per_rank": stages_per_rank,
            "reshard_after_forward": ("never" if facts.pp > 1 else "always") if reshard == "auto" else reshard,
        }
    )
    if facts.pp > 1:
        layers = tuple(len(stage) for stage in stage_layers(facts.size.n_layers, facts.pp, parallelism))
        parallelism = parallelism.model_copy(update={"pipeline_parallel_layers_per_stage": layers})
    size = facts.size
    sizes = {name: getattr(size, name) for name in type(size).__dataclass_fields__}
    model = config.model.model_copy(update={**sizes, "hf": _from_anywhere(facts.base, config.model.hf)})
    data = config.data.model_copy(
        update={
            "path": _from_anywhere(facts.base, config.data.path),
            "tokenizer": facts.tokenizer
            if facts.tokenizer == "embedded"
            else _from_anywhere(facts.base, facts.tokenizer),
        }
    )
    run = config.run
    if run.hardware is not None:
        run = run.model_copy(update={"hardware": training_rules.hardware_place(run.hardware, facts.base)})
    return config.model_copy(update={"parallelism": parallelism, "model": model, "data": data, "run": run})


def _from_anywhere(base: Path, path: str | None) -> str | None:
    """A path of the run file that still holds when the resolved config lies in another folder."""
    return path and str((base / Path(path).expanduser()).absolute())
