"""``koushi init``: a first run file, commented with the schema's own words. No torch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from koushi.check.check import check
from koushi.check.rule import PER_RANK, RESHARD, SCHEDULE
from koushi.config.describe import Key, keys
from koushi.config.load import load
from koushi.config.spelling import nearest
from koushi.config.write import value_text
from koushi.errors import ConfigError, Problem
from koushi.hardware.hardware import ASSUMED, Hardware
from koushi.hardware.hardware import load as load_hardware
from koushi.job import Job
from koushi.mesh import MOST_DEVICES, MeshSpec
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.sizes import PRESETS
from koushi.output import write_new, written_beside
from koushi.plan.layouts import Layout, values_of
from koushi.plan.plan import Plan, plan
from koushi.plan.text import advice_text, short, verdict
from koushi.plan.workload import of_job
from koushi.schedules import SCHEDULES
from koushi.setup.degrees import NODE, ChooseDegrees, fewest_devices, rule_of_thumb
from koushi.setup.first_layout import Choice, choose_layout
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
AS_IT_IS = Choice()


class Draft(NamedTuple):
    """What a run file is written from."""

    path: Path
    """What its commands name."""
    model: str
    """A preset."""
    mesh: MeshSpec
    """The simple one."""
    hardware: str | None
    """As it was named."""
    on: Hardware
    """What is planned for: that, or what is assumed."""


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
    choose: ChooseDegrees | None = None,
) -> Written:
    """Write a run file for ``model`` on ``devices`` (None: as few as hold it well) of ``hardware`` to ``path``.

    ``choose`` gives the mesh, which stays where it fits; None: a simple one, or what is clearly faster. Raises
    ConfigError for an unknown model or hardware, too many devices and a path that is taken, WrongTarget for one that
    cannot be written. Nothing is left behind then.
    """
    if model not in PRESETS:
        meant = nearest(model, PRESETS)
        legal = f"{f'did you mean {meant}? ' if meant else ''}The models are {', '.join(PRESETS)}"
        raise ConfigError([Problem(f"command line (--model {model})", "", "there is no such model", legal)])
    on = load_hardware(hardware or ASSUMED)
    if devices is None:
        devices = fewest_devices(PRESETS[model], on.chip.memory_bytes)
    if devices > MOST_DEVICES:
        legal = f"at most {MOST_DEVICES} are planned for"
        raise ConfigError([Problem(f"command line (--gpus {devices})", "", "is more devices than any cluster", legal)])
    if choose is None:
        mesh = rule_of_thumb(PRESETS[model], devices, min(NODE, on.inside.devices or NODE))
    else:
        mesh = choose(PRESETS[model], devices)
    assert mesh.world_size == devices, f"{mesh} was chosen for {devices} devices"
    draft = Draft(path, model, mesh, hardware, on)
    _write_new(path, run_file_text(draft))
    try:
        # The smallest model shows on any machine that everything works, so its layout is that of no hardware.
        return _planned(draft, may_search=choose is None and (model != DEBUG or hardware is not None))
    except BaseException:  # such as a sequence that this mesh cannot split, or Ctrl-C in the search
        path.unlink(missing_ok=True)  # no file is better than one that is refused, or than the draft of another
        raise


def run_file_text(draft: Draft, choice: Choice = AS_IT_IS) -> str:
    """The run file of ``draft``, in another layout where ``choice`` has one."""
    values = dict(_values(draft.model, draft.mesh))
    if choice.layout is not None:
        values.update(_layout_values(choice.layout, values))
    if draft.hardware is not None:
        values["run.hardware"] = draft.hardware
    lines = [*_header(draft, choice.searched)]
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


def _layout_values(layout: Layout, shown: Values) -> Values:
    """What differs in a file that has the keys ``shown`` otherwise; no key is added for a default."""
    found = {key: value for key, value in values_of(layout).items() if key in shown and shown[key] != -1}
    if layout.pp == 1:
        found[SCHEDULE] = Example("1F1B")
        if layout.dp_shard > 1 and not layout.reshard_after_forward:
            found[RESHARD] = "never"
    elif layout.pipeline.stages_per_rank != SCHEDULES[layout.pipeline.schedule].fewest_stages_per_rank:
        found[PER_RANK] = layout.pipeline.stages_per_rank
    return found


def _header(draft: Draft, searched: bool) -> Iterator[str]:
    path, model, world = draft.path, draft.model, draft.mesh.world_size
    name = shlex.quote(str(path)) if str(path).isprintable() else "RUN.yaml"
    yield f"# {model}, as koushi init wrote it for {counted(world, 'device')}. Change what you like."
    if searched:
        on = draft.on.name if draft.on.name.isprintable() else "its hardware"
        yield f"# The layout is what koushi plan --search found for {on}; search again after larger changes."
    yield "#"
    start, starts = _start(name, world, draft.on)
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


def _start(name: str, world: int, on: Hardware) -> tuple[str, str]:
    """The command that starts the run, with what it does: on this machine, or the script for several."""
    nodes, left = divmod(world, on.devices_per_node)
    if nodes > 1 and left == 0:
        return f"koushi launch {name} --nodes {nodes} --backend slurm", f"a script that trains it on {nodes} nodes"
    return f"koushi train {name}", "trains it, one process per device"


def _key_lines(key: Key, value: object) -> Iterator[str]:
    name = key.name.rpartition(".")[2]
    if isinstance(value, Example):
        text = f"  # {name}: {value.value}"
    else:
        text = f"  {name}: {value_text(key.default if value is DEFAULT else value)}"
    over = " " * max(0, len(text) + 1 - COLUMN)  # a long value takes the place of the comment's first words
    first, *more = textwrap.wrap(_comment(key), WIDEST - COLUMN - 2, initial_indent=over) or [""]
    yield f"{text:<{COLUMN + len(over)}}# {first.lstrip()}"
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


def _planned(draft: Draft, may_search: bool) -> Written:
    """Of the run file of ``draft`` that was just written; written anew where another layout is to be taken."""
    path = draft.path
    job = check(load(path))
    found = plan(of_job(job), draft.on)
    choice = choose_layout(path, job, found, may_search)
    if choice.layout is not None:
        with written_beside(path, run_file_text(draft, choice), "run.yaml") as (beside, target):
            beside.replace(target)
        job = check(load(path))
        found = plan(of_job(job), draft.on)
    return Written(_next_steps(draft, job, found, choice), found.fits)


def _next_steps(draft: Draft, job: Job, found: Plan, choice: Choice) -> str:
    path, world = draft.path, job.mesh.world_size
    each = bytes_text(state_bytes(job) / world)
    name = shlex.quote(str(path))
    steps = f"koushi check {name}, koushi plan {name} --search, koushi mesh {name}, {_start(name, world, draft.on)[0]}"
    if not found.fits:
        steps = f"more or larger devices, here or in a new file, for koushi plan {name} to say whether it fits"
    assumed = "" if draft.hardware else ", which is assumed where --hardware names none,"
    takes = f"; a step takes {short(found.time.seconds)}" if found.fits else ""
    lines = [
        f"wrote {path}: {job.model_name}, {count_text(parameter_count(job.size))} parameters, on "
        f"{counted(world, 'device')} {job.mesh}",
        f"parameters, gradients and AdamW's state take {each} of each device; activations come on top",
        *([choice.why] if choice.why else []),
        f"on {found.hardware.name}{assumed} it {verdict(found)}{takes}",
        *([advice_text(found, choice.helps)] if choice.helps is not None else []),
        f"next: {steps}",
    ]
    return "\n".join(lines)
