"""``koushi init``: a first run file, commented with the schema's own words. No torch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from koushi.check.check import check
from koushi.check.rule import DP_SHARD
from koushi.config.describe import Key, keys
from koushi.config.edit import write_edited
from koushi.config.load import load
from koushi.config.spelling import nearest
from koushi.config.write import value_text
from koushi.errors import ConfigError, Problem
from koushi.hardware.hardware import ASSUMED
from koushi.hardware.hardware import load as load_hardware
from koushi.job import Job
from koushi.mesh import MOST_DEVICES, MeshSpec
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.sizes import PRESETS
from koushi.output import write_new
from koushi.plan.command import hardware_of
from koushi.plan.fixes import Advice, advice
from koushi.plan.layouts import question_of
from koushi.plan.plan import Plan, plan
from koushi.plan.text import advice_text, argument, verdict
from koushi.plan.workload import of_job
from koushi.setup.degrees import NODE, ChooseDegrees, fewest_devices, rule_of_thumb
from koushi.train.room import state_bytes
from koushi.units import bytes_text, count_text, counted

DEBUG = "llama3-debug"
DEFAULT = object()
"""The schema's own value."""
COLUMN = 44
WIDEST = 118


@dataclass(frozen=True)
class Example:
    """What a key may be set to; it is written as a comment."""

    value: str


Values = Mapping[str, object]


class Written(NamedTuple):
    """A run file that was written."""

    said: str
    """What it is, and what to do next."""
    fits: bool
    """Whether it fits the hardware that was named or assumed."""


def init(
    path: Path,
    model: str,
    devices: int | None,
    hardware: str | None = None,
    choose: ChooseDegrees = rule_of_thumb,
) -> Written:
    """Write a run file for ``model`` on ``devices`` (None: as few as hold it well) of ``hardware`` to ``path``.

    ``choose`` gives the mesh; where that does not fit and another layout does, that is written. Raises ConfigError for
    an unknown model or hardware, too many devices and a path that is taken, WrongTarget for one that cannot be written.
    Nothing is left behind then.
    """
    if model not in PRESETS:
        meant = nearest(model, PRESETS)
        legal = f"{f'did you mean {meant}? ' if meant else ''}The models are {', '.join(PRESETS)}"
        raise ConfigError([Problem(f"command line (--model {model})", "", "there is no such model", legal)])
    memory = load_hardware(hardware or ASSUMED).chip.memory_bytes
    if devices is None:
        devices = fewest_devices(PRESETS[model], memory)
    if devices > MOST_DEVICES:
        legal = f"at most {MOST_DEVICES} are planned for"
        raise ConfigError([Problem(f"command line (--gpus {devices})", "", "is more devices than any cluster", legal)])
    mesh = choose(PRESETS[model], devices)
    assert mesh.world_size == devices, f"{mesh} was chosen for {devices} devices"
    _write_new(path, run_file_text(path, model, mesh, hardware))
    try:
        return _made_to_fit(path)
    except ConfigError:
        path.unlink()  # such as a sequence that this mesh cannot split: no file is better than one that is refused
        raise


def run_file_text(path: Path, model: str, mesh: MeshSpec, hardware: str | None = None) -> str:
    """A run file for the preset ``model`` on ``mesh``; ``path`` is what its commands name."""
    lines = [*_header(path, model, mesh)]
    values = dict(_values(model, mesh))
    if hardware is not None:
        values["run.hardware"] = hardware
    for key in keys():
        if key.is_section and any(name.startswith(f"{key.name}.") for name in values):
            lines += ["", *textwrap.wrap(key.meaning, WIDEST, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"{key.name}:")
        elif key.name in values:
            lines += _key_lines(key, values[key.name])
    return "\n".join(lines) + "\n"


def _values(model: str, mesh: MeshSpec) -> Values:
    """Every key that the file shows."""
    training = _debug_values(mesh) if model == DEBUG else _large_values(model, mesh)
    shards = {"parallelism.data_parallel_shard_degree": mesh.degree("dp_shard")}
    if model != DEBUG:  # other degrees then leave the cluster as large as it is
        shards = {"parallelism.data_parallel_shard_degree": -1, "parallelism.world_size": mesh.world_size}
    schedule = DEFAULT if mesh.degree("pp") > 1 else Example("1F1B")
    return {
        "model.name": model,
        "model.hf": Example("models/llama"),
        "parallelism.pipeline_parallel_degree": mesh.degree("pp"),
        "parallelism.data_parallel_replicate_degree": mesh.degree("dp_replicate"),
        **shards,
        "parallelism.tensor_parallel_degree": mesh.degree("tp"),
        "parallelism.pipeline_parallel_schedule": schedule,
        "training.seed": DEFAULT,
        "training.max_grad_norm": DEFAULT,
        "training.compile": DEFAULT,
        "precision.parameters": DEFAULT,
        "precision.reduce": DEFAULT,
        "optimizer.beta1": DEFAULT,
        "optimizer.beta2": DEFAULT,
        "optimizer.weight_decay": DEFAULT,
        "lr_schedule.decay": DEFAULT,
        "lr_schedule.decay_fraction": DEFAULT,
        "lr_schedule.min_lr_ratio": DEFAULT,
        "data.source": DEFAULT,
        "data.path": Example("corpus/*.jsonl"),
        "data.tokenizer": Example("tokenizer.json"),
        "data.validation_fraction": DEFAULT,
        "validation.batches": DEFAULT,
        "metrics.every": DEFAULT,
        "metrics.tensorboard": DEFAULT,
        "checkpoint.keep_last": DEFAULT,
        "checkpoint.keep_every": DEFAULT,
        "run.hardware": Example("h100-sxm-80gb"),
        "debug.audit": DEFAULT,
        "run.folder": Example("runs/mine"),
        "run.resume": DEFAULT,
        "run.grace": DEFAULT,
        "run.device": DEFAULT,
        **training,
    }


def _debug_values(mesh: MeshSpec) -> Values:
    """As examples/debug.yaml trains."""
    return {
        "training.seq_len": 256,
        **_batch(mesh, samples=16, microbatch=2),
        "training.steps": 50,
        "training.recompute": DEFAULT,
        "precision.compute": "float32",
        "optimizer.lr": 2e-3,
        "lr_schedule.warmup_steps": 5,
        "validation.every": 25,
        "checkpoint.every": 25,
    }


def _large_values(model: str, mesh: MeshSpec) -> Values:
    """A million tokens a step, as far as the lattice allows.

    Peak learning rates of the Llama 3 paper (arXiv 2407.21783, table 3), which has them for 8B, 70B and 405B.
    """
    count = parameter_count(PRESETS[model])
    return {
        "training.seq_len": 8192,
        **_batch(mesh, samples=128, microbatch=1),
        "training.steps": 1000,
        "training.recompute": "full" if count >= 20e9 else "selective",
        "precision.compute": "bfloat16",
        "optimizer.lr": 3e-4 if count < 20e9 else 1.5e-4 if count < 200e9 else 8e-5,
        "lr_schedule.warmup_steps": 100,
        "validation.every": 100,
        "checkpoint.every": 100,
    }


def _batch(mesh: MeshSpec, samples: int, microbatch: int) -> Values:
    """About ``samples``, as many on every rank, and enough microbatches to keep a pipeline busy."""
    split, pp = mesh.degree("dp_replicate", "dp_shard"), mesh.degree("pp")
    microbatches = max(-(-samples // (split * microbatch)), 4 * pp if pp > 1 else 1)
    return {
        "training.global_batch_size": split * microbatch * microbatches,
        "training.microbatch_size": microbatch,
    }


def _header(path: Path, model: str, mesh: MeshSpec) -> Iterator[str]:
    name = shlex.quote(str(path)) if str(path).isprintable() else "RUN.yaml"
    devices = counted(mesh.world_size, "device")
    yield f"# {model}, as koushi init wrote it for {devices}. Change what you like."
    yield "#"
    start, starts = _start(name, mesh)
    commands = {
        f"koushi check {name}": "what this describes, or every mistake in it at once",
        f"koushi plan {name}": "what it costs, and whether it fits the hardware you name",
        f"koushi plan {name} --search": "every other layout of as many devices, ranked",
        f"koushi mesh {name}": "the lattice of devices",
        start: starts,
        "koushi config --schema": "every key, also those that are not here",
    }
    width = max(len(command) for command in commands)
    for command, what in commands.items():
        yield f"#   {command:<{width}}  {what}"
    yield "#"
    yield "# Any value can be changed on the command line as well, such as training.steps=100."
    if model != DEBUG:
        yield "# The embedded text only shows that everything works; for yours set data.source, path and tokenizer."


def _start(name: str, mesh: MeshSpec) -> tuple[str, str]:
    """The command that starts the run, with what it does: on this machine, or the script for several."""
    nodes, left = divmod(mesh.world_size, NODE)
    if nodes > 1 and left == 0:
        return f"koushi launch {name} --nodes {nodes} --backend slurm", f"a script that trains it on {nodes} nodes"
    return f"koushi train {name}", "trains it, one process per device"


def _key_lines(key: Key, value: object) -> Iterator[str]:
    name = key.name.rpartition(".")[2]
    if isinstance(value, Example):
        text = f"  # {name}: {value.value}"
    else:
        text = f"  {name}: {value_text(key.default if value is DEFAULT else value)}"
    first, *more = textwrap.wrap(_comment(key), WIDEST - COLUMN - 2) or [""]
    yield f"{text:<{COLUMN}}# {first}"
    for line in more:
        yield f"{'':<{COLUMN}}# {line}"


def _comment(key: Key) -> str:
    """The meaning, and the choices where it does not name them."""
    choices = key.kind.removeprefix("one of ").removesuffix(", or empty").split(", ")
    if key.kind.startswith("one of ") and not all(one in key.meaning for one in choices):
        return f"{key.meaning} One of {', '.join(choices)}."
    return key.meaning


def _write_new(path: Path, text: str) -> None:
    """Raises ConfigError for a file that is there already, WrongTarget where none can be made."""
    try:
        write_new(path, text, "run.yaml")
    except FileExistsError:
        raise ConfigError([Problem(str(path), "", "is there already", "name a new file, or remove it")]) from None


def _made_to_fit(path: Path) -> Written:
    """Of the run file at ``path``, in another layout where it does not fit as it is and that does."""
    run_file = load(path)
    job = check(run_file)
    found, helps, changes = plan(of_job(job), hardware_of(job)), None, ""
    if not found.fits:
        helps = advice(question_of(job), found)
        fix = next((one for one in helps.fixes if not one.note), None)  # what changes more than the layout has a note
        if fix is not None:
            follows = run_file.config.parallelism.data_parallel_shard_degree == -1
            values = {key: value for key, value in fix.values.items() if key != DP_SHARD or not follows}
            write_edited(path, path, values)
            changes = " ".join(argument(*one) for one in values.items())
            job = check(load(path))
            found = plan(of_job(job), hardware_of(job))
    return Written(_next_steps(path, job, found, _outlook(job, found, changes, helps)), found.fits)


def _next_steps(path: Path, job: Job, found: Plan, outlook: str) -> str:
    each = bytes_text(state_bytes(job) / job.mesh.world_size)
    name = shlex.quote(str(path))
    steps = f"koushi check {name}, koushi plan {name} --search, koushi mesh {name}, {_start(name, job.mesh)[0]}"
    if not found.fits:
        steps = f"more or larger devices, here or in a new file, for koushi plan {name} to say whether it fits"
    return (
        f"wrote {path}: {job.model_name}, {count_text(parameter_count(job.size))} parameters, on "
        f"{counted(job.mesh.world_size, 'device')} {job.mesh}\n"
        f"parameters, gradients and AdamW's state take {each} of each device; activations come on top\n"
        f"{outlook}"
        f"next: {steps}"
    )


def _outlook(job: Job, found: Plan, changes: str, helps: Advice | None) -> str:
    """Lines where the job does not fit its hardware, fits tightly, or had to be changed for that."""
    lines = []
    assumed = "" if job.config.run.hardware else ", which is assumed where --hardware names none,"
    if changes:
        lines.append(f"so that it fits, it has {changes}")
    if not found.fits or found.tight:
        lines.append(f"on {found.hardware.name}{assumed} it {verdict(found)}")
    if not found.fits and helps is not None:
        lines.append(advice_text(found, helps))
    return "".join(f"{line}\n" for line in lines)
