"""Rules on the batch, precision, the learning rate, validation and the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from koushi.check.rule import (
    DP_REPLICATE,
    DP_SHARD,
    GLOBAL_BATCH,
    MICROBATCH,
    TO_TRAIN,
    Facts,
    Finding,
    Rule,
    divisors,
    listed,
    multiples_near,
)
from koushi.errors import ConfigError
from koushi.hardware.hardware import load
from koushi.units import counted

MOST_SAMPLES = 1_000_000
"""Of a step: a schedule has a line for each microbatch, which a plan goes through."""
_PRECISION = ("precision.parameters", "precision.compute", "precision.reduce")


def _global_batch(facts: Facts) -> Iterator[Finding]:
    training, split = facts.config.training, facts.data_parallel
    if training.global_batch_size > MOST_SAMPLES:
        yield Finding((GLOBAL_BATCH,), f"is {training.global_batch_size}", f"at most {MOST_SAMPLES} samples")
    elif training.global_batch_size % split:
        replicate = facts.config.parallelism.data_parallel_replicate_degree
        near = multiples_near(training.global_batch_size, split * training.microbatch_size)
        yield Finding(
            (GLOBAL_BATCH, DP_SHARD, DP_REPLICATE),
            f"{training.global_batch_size} samples do not divide over {counted(split, 'data-parallel rank')} "
            f"(dp_replicate {replicate} x dp_shard {facts.dp_shard})",
            f"a global_batch_size of {listed(near)}",
        )


def _microbatch(facts: Facts) -> Iterator[Finding]:
    training, split = facts.config.training, facts.data_parallel
    local, left = divmod(training.global_batch_size, split)
    if left == 0 and local % training.microbatch_size:
        near = multiples_near(training.global_batch_size, split * training.microbatch_size)
        yield Finding(
            (MICROBATCH, GLOBAL_BATCH),
            f"microbatches of {training.microbatch_size} do not divide the local batch of {local} samples "
            f"({training.global_batch_size} over {counted(split, 'data-parallel rank')})",
            f"a microbatch_size of {listed(divisors(local))}, or a global_batch_size of {listed(near)}",
        )


def _precision(facts: Facts) -> Iterator[Finding]:
    precision = facts.config.precision
    parameters, compute, reduce = _PRECISION
    if precision.parameters == "float64":
        for key, value in ((compute, precision.compute), (reduce, precision.reduce)):
            if value != "float64":
                yield Finding((key, parameters), f"is {value} with float64 parameters", "float64")
    elif precision.compute == "float64":
        what = f"is float64 with {precision.parameters} parameters"
        yield Finding((compute, parameters), what, f"float32 or bfloat16, or {parameters} float64")


def _validation(facts: Facts) -> Iterator[Finding]:
    if facts.config.validation.every > 0 and facts.config.data.validation_fraction == 0:
        yield Finding(
            ("data.validation_fraction", "validation.every"),
            f"is 0, but validation.every is {facts.config.validation.every}",
            "a validation_fraction above 0, or validation.every 0",
        )


def _keep_every(facts: Facts) -> Iterator[Finding]:
    options = facts.config.checkpoint
    if not options.keep_every:
        return
    if not options.every:
        yield Finding(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"is {options.keep_every}, but checkpoint.every is 0, so there are no checkpoints",
            "a checkpoint.every above 0, or checkpoint.keep_every 0",
        )
    elif options.keep_every % options.every:
        near = multiples_near(options.keep_every, options.every)
        yield Finding(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"is {options.keep_every}, and no checkpoint of every {options.every} steps may fall on it",
            f"a multiple of checkpoint.every, such as {listed(near)}",
        )


def _resume(facts: Facts) -> Iterator[Finding]:
    run = facts.config.run
    if run.resume in ("auto", "never"):
        return
    try:
        there = bool(run.resume.strip()) and Path(run.resume).is_dir()
    except (OSError, ValueError):
        there = False
    if not there:
        yield Finding(
            ("run.resume",),
            f"is {run.resume!r}, and there is no such folder",
            "auto, never, or the folder of a checkpoint or of a run",
            elsewhere=TO_TRAIN if run.resume.strip() else "",
        )


def _tensorboard(facts: Facts) -> Iterator[Finding]:
    if facts.config.metrics.tensorboard and find_spec("tensorboard") is None:
        what, legal = "is true, but tensorboard is not installed", "pip install koushi[tensorboard]"
        yield Finding(("metrics.tensorboard",), what, legal, elsewhere=TO_TRAIN)


def _hardware(facts: Facts) -> Iterator[Finding]:
    name = facts.config.run.hardware
    if name is None:
        return
    try:
        load(hardware_place(name, facts.base))
    except ConfigError as error:
        for problem in error.problems:
            if problem.key == "hardware":
                yield Finding(("run.hardware",), f"is {name!r}, and no hardware is called that", problem.legal)
            else:
                inside = f"{problem.key}: " if problem.key else ""
                yield Finding(("run.hardware",), f"{problem.where}: {inside}{problem.what}", problem.legal)


def hardware_place(name: str, base: Path) -> str:
    """The name of hardware as it is, a file's path from the run file's folder ``base``."""
    try:
        path = base / Path(name).expanduser()
    except RuntimeError:  # the home of a user that there isn't
        return name
    return str(path.absolute()) if path.suffix in (".yaml", ".yml") or path.is_file() else name


def _folder(facts: Facts) -> Iterator[Finding]:
    folder = facts.config.run.folder
    if folder is None:
        return
    try:
        taken = Path(folder).is_file()
    except (OSError, ValueError):
        taken = True
    if taken or not folder.strip():
        yield Finding(("run.folder",), f"is {folder!r}, which cannot be a folder", "a folder, there or not")


RULES = (
    Rule((GLOBAL_BATCH, MICROBATCH, DP_REPLICATE, DP_SHARD), _global_batch),
    Rule((GLOBAL_BATCH, MICROBATCH, DP_REPLICATE, DP_SHARD), _microbatch),
    Rule(_PRECISION, _precision),
    Rule(("validation.every", "data.validation_fraction"), _validation),
    Rule(("checkpoint.keep_every", "checkpoint.every"), _keep_every),
    Rule(("run.resume",), _resume),
    Rule(("metrics.tensorboard",), _tensorboard),
    Rule(("run.folder",), _folder),
    Rule(("run.hardware",), _hardware),
)
