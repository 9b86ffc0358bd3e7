"""``koushi plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from koushi.check.check import check_afar
from koushi.check.rule import (
    DP_REPLICATE,
    DP_SHARD,
    MICROBATCH,
    PER_RANK,
    PER_STAGE,
    PP,
    RECOMPUTE,
    RESHARD,
    TP,
    WORLD,
    listed,
)
from koushi.config.edit import check_edit_target, write_edited
from koushi.config.load import RunFile, load
from koushi.config.source import Found
from koushi.errors import ConfigError, DoesNotFit, Problem
from koushi.hardware.hardware import Hardware
from koushi.hardware.hardware import load as load_hardware
from koushi.job import Job
from koushi.mesh import MOST_DEVICES
from koushi.output import tell
from koushi.plan.as_json import plan_json, search_json
from koushi.plan.fixes import advice, more_devices
from koushi.plan.layouts import FIXED, Fixed, Layout, legal_devices, question_of, values_of
from koushi.plan.plan import plan
from koushi.plan.search import search
from koushi.plan.search_text import asked, fixed_text, search_text
from koushi.plan.text import advice_text, late_saves, plan_text, verdict
from koushi.plan.workload import of_job


def show_plan(path: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Print what the run file at ``path`` costs as it stands; raises DoesNotFit where it does."""
    run_file = load(path, overrides)
    job, notes = check_afar(run_file)
    tell(notes)
    found = plan(of_job(job), hardware_of(job))
    tell(late_saves(job, found))
    divided = run_file.config.parallelism.pipeline_parallel_layers_per_stage is not None
    helps = advice(question_of(job), found, divided=divided)
    if as_json:
        click.echo(json.dumps(plan_json(job, found, helps), indent=1))
    else:
        click.echo(plan_text(job, found, job.config.run.hardware is not None, run_file.follows))
        if text := advice_text(found, helps):
            click.echo("\n" + text)
    if not found.fits:
        raise DoesNotFit(f"{job.name} {verdict(found)}" if as_json else "")


def show_search(path: Path, overrides: Sequence[str], as_json: bool, write: Path | None) -> None:
    """Print the best layouts for the run file's devices; write the winner's degrees to ``write``."""
    if write is not None:
        check_edit_target(path, write)
    run_file = load(path, overrides)
    own, wrong = _as_it_stands(run_file)
    devices = own.mesh.world_size if own else run_file.config.parallelism.world_size
    if devices is None or devices > MOST_DEVICES:
        own, _ = check_afar(run_file)  # says what is wrong with the number of devices
        devices = own.mesh.world_size
    job, notes = check_afar(load(path, [*overrides, *_ALONE]))
    tell(notes)
    question = replace(question_of(job, devices), fixed=_fixed(run_file))
    base, on = of_job(own or job), hardware_of(job)
    result = search(question, base, on)
    if not result.legal:
        # The run file's own may be, where its ends have no layers.
        even, besides = (" with even stages", "; the run file's own is planned without --search") if own else ("", "")
        what = f"no layout of {asked(question)}{even} is legal for this model and batch"
        near = listed(legal_devices(question)) or "another number"
        if fixed := fixed_text(question.fixed):
            besides = f", or without {fixed}{besides}"
        key, place = run_file.place(WORLD, DP_SHARD)
        raise ConfigError([Found(place, key, what, f"{near} of them, or another global batch{besides}").problem])
    if as_json:
        click.echo(json.dumps(search_json(question, result), indent=1))
    else:
        chosen = [result.chosen] if result.chosen else []
        shown = dict.fromkeys(one.layout for one in (*chosen, *result.best, *result.misses))
        plans = {layout: plan(layout.of(base), on) for layout in shown}
        wider = None if result.chosen else more_devices(question, base, on)
        click.echo(search_text(question, on, result, plans, wrong or plan(base, on), wider))
    if result.chosen is None:
        raise DoesNotFit(f"{job.name}: no layout of {asked(question)} fits {on.name}" if as_json else "")
    if write is not None:
        _write(path, write, run_file, result.chosen.layout)
        roomy = "" if result.chosen == result.best[0] else " that is not tight"
        click.echo(f"\nwrote the fastest layout{roomy} to {write}", err=as_json)


_ALONE = (
    *(f"{key}=1" for key in (PP, DP_REPLICATE, DP_SHARD, TP, WORLD, MICROBATCH)),
    *(f"{key}=null" for key in (PER_RANK, PER_STAGE)),
    f"{RESHARD}=auto",
    f"{RECOMPUTE}=none",
)
"""A layout that any run can have, for checking what does not depend on the layout."""


def hardware_of(job: Job) -> Hardware:
    """What the job is planned for."""
    return load_hardware(job.hardware)


def _fixed(run_file: RunFile) -> Fixed:
    """What the command line says of the layout: a search keeps it, where it goes beyond what the run file says.

    Raises ConfigError where that is no value.
    """
    typed = [key for key, place in run_file.places.items() if place.on_command_line and key in FIXED]
    if not all(run_file.is_sound(key) for key in typed):
        check_afar(run_file)  # says what is wrong
    return Fixed.of({key: value_at(run_file, key) for key in typed if key != DP_SHARD or not run_file.follows})


def _as_it_stands(run_file: RunFile) -> tuple[Job | None, Problem | None]:
    """The job of the run file's own layout, where that is legal; else the first thing that is wrong with it."""
    try:
        return check_afar(run_file)[0], None
    except ConfigError as error:
        return None, error.problems[0]


def _write(source: Path, target: Path, run_file: RunFile, layout: Layout) -> None:
    """The run file with the overrides that were given and the degrees of ``layout``."""
    chosen = values_of(layout)
    given = {
        key: _without_unset(key, value_at(run_file, key), chosen)
        for key, place in run_file.places.items()
        if place.on_command_line
    }
    write_edited(source, target, {**given, **chosen})


def _without_unset(key: str, value: object, chosen: Mapping[str, object]) -> object:
    """A section that the command line has begun, without what ``chosen`` leaves empty; else the value as it is."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if chosen.get(f"{key}.{name}", one) is not None}


def value_at(run_file: RunFile, key: str) -> object:
    value: object = run_file.values
    for name in key.split("."):
        assert isinstance(value, dict), f"{key} is set, so that its sections are there"
        value = value[name]
    return value
