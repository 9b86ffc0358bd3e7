"""What would help: every change that is named does what is said, applied as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.config.load import load
from koushi.job import Job
from koushi.plan.command import hardware_of
from koushi.plan.fixes import (
    MARKED,
    WORTH,
    Advice,
    Fix,
    advice,
    cheapest_pair,
    more_devices,
    neighbours,
    single_changes,
)
from koushi.plan.layouts import is_legal, layout_of, question_of
from koushi.plan.plan import Plan, plan
from koushi.plan.search import search
from koushi.plan.text import advice_text, short
from koushi.plan.workload import of_job

RUN = """\
model: {name: llama3-8b}
parallelism: {data_parallel_shard_degree: 8}
training: {seq_len: 8192, global_batch_size: 64, microbatch_size: 1}
precision: {compute: bfloat16}
data: {source: synthetic}
run: {hardware: h100-sxm-80gb}
"""


LAYERS = "parallelism.pipeline_parallel_layers_per_stage="
INTERLEAVED = "parallelism.pipeline_parallel_schedule=Interleaved1F1B"


def job_of(folder: Path, *overrides: str) -> Job:
    path = folder / "run.yaml"
    path.write_text(RUN, encoding="utf-8")
    return check(load(path, overrides))


def advised(job: Job, overrides: Sequence[str] = ()) -> tuple[Plan, Advice]:
    before = plan(of_job(job), hardware_of(job))
    divided = any(one.startswith(LAYERS) for one in overrides)
    return before, advice(question_of(job), before, divided=divided)


def arguments(text: str) -> list[list[str]]:
    """What stands before the figures of every change; a long one has its figures in a line of their own."""
    lines = text.splitlines()[1:-1]  # the last is on the search
    return [line.split("   ")[0].split() for line in lines if not line.startswith("   ")]


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.recompute=full"],
        ["--pp", "4", "--dp-shard", "2", "--tp", "1", "training.recompute=full"],
        ["--tp", "8", "--dp-shard", "1", "training.recompute=selective"],
        ["--pp", "2", "--dp-shard", "4", "training.recompute=full", LAYERS + "[17, 15]"],
        ["--pp", "2", "--dp-shard", "4", "training.recompute=full", LAYERS + "[16, 16]"],
        ["--pp", "4", "--dp-shard", "2", "training.recompute=full", INTERLEAVED, LAYERS + "[3, 4, 4, 5, 4, 4, 4, 4]"],
    ],
)
def test_faster_changes_are_as_fast_as_they_say(tmp_path: Path, overrides: list[str]) -> None:
    before, found = advised(job_of(tmp_path, *overrides), overrides)
    assert before.fits
    assert found.fixes
    assert [fix.seconds for fix in found.fixes] == sorted(fix.seconds for fix in found.fixes)
    text = advice_text(before, found)
    assert text.startswith("what would make it faster\n")
    for written, fix in zip(arguments(text), found.fixes, strict=True):
        job = job_of(tmp_path, *overrides, *written)
        after = plan(of_job(job), hardware_of(job))
        assert after.fits
        assert after.time.seconds == pytest.approx(fix.seconds)
        assert after.memory.device == fix.memory
        assert fix.seconds <= before.time.seconds * (1 - WORTH)


def test_changes_that_make_it_fit(tmp_path: Path) -> None:
    overrides = ["training.microbatch_size=4", "parallelism.reshard_after_forward=never"]
    before, found = advised(job_of(tmp_path, *overrides))
    assert not before.fits
    text = advice_text(before, found)
    assert text.startswith("what would make it fit\n")
    for written, fix in zip(arguments(text), found.fixes, strict=True):
        job = job_of(tmp_path, *overrides, *written)
        after = plan(of_job(job), hardware_of(job))
        assert after.fits
        assert after.time.seconds == pytest.approx(fix.seconds)


FITS_BUT_SLOWLY = ["--dp-shard", "64", "model.dim=5120", "model.n_layers=40", "model.n_heads=40", "model.ffn_dim=13824"]
FITS_BUT_SLOWLY += ["training.seq_len=16384", "training.global_batch_size=256", "--hardware", "a100-sxm-80gb"]


@pytest.mark.parametrize("also", [[], ["precision.reduce=bfloat16"]])
def test_two_changes_stand_beside_a_single_one_that_they_are_markedly_faster_than(
    tmp_path: Path, also: list[str]
) -> None:
    overrides = [*FITS_BUT_SLOWLY, *also]
    job = job_of(tmp_path, *overrides)
    before, found = advised(job)
    assert not before.fits
    pair, *others = found.fixes
    singles = list(single_changes(question_of(job), before))
    assert others
    assert all(fix in singles for fix in others)
    assert pair not in singles
    assert pair.seconds <= (1 - MARKED) * min(fix.seconds for fix in singles)
    written = arguments(advice_text(before, found))[0]
    after = plan(of_job(job_of(tmp_path, *overrides, *written)), hardware_of(job))
    assert after.fits
    assert after.time.seconds == pytest.approx(pair.seconds)
    assert after.memory.device == pair.memory


def test_two_changes_that_are_hardly_faster_than_one_are_not_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, "training.microbatch_size=4")
    before, found = advised(job)
    singles = sorted(single_changes(question_of(job), before), key=lambda fix: fix.seconds)
    assert not before.fits
    assert found.fixes
    assert all(fix in singles for fix in found.fixes)
    assert cheapest_pair(question_of(job), before, singles[0]) is None


def test_figures_stand_in_columns_however_long_a_change_is(tmp_path: Path) -> None:
    before, _ = advised(job_of(tmp_path))
    seconds, size = before.time.seconds / 2, before.memory.device
    long = {LAYERS[:-1]: 4, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}
    fixes = tuple(Fix(values, seconds, size) for values in ({"training.recompute": "none"}, long))
    first, above, figures = advice_text(before, Advice(fixes)).splitlines()[1:-1]
    assert above.split() == [f"{LAYERS}4", INTERLEAVED]
    assert figures.split() == first.split()[1:]
    assert len(figures) == len(first)


IN_TWO = (
    ["training.microbatch_size=8", "--dp-shard", "1", "--dp-replicate", "8"],
    ["precision.compute=float32", "training.microbatch_size=4"],
    ["model.name=llama3-70b", "--dp-shard", "8", "--tp", "4", "--pp", "2", "training.microbatch_size=4"],
    ["--pp", "2", "--dp-shard", "4", "training.microbatch_size=8", LAYERS + "[17, 15]"],
)


@pytest.mark.parametrize("overrides", IN_TWO)
def test_where_no_single_change_is_enough_two_are_named(tmp_path: Path, overrides: list[str]) -> None:
    job = job_of(tmp_path, *overrides)
    before, found = advised(job)
    assert not before.fits
    assert list(single_changes(question_of(job), before)) == []
    (fix,) = found.fixes
    assert fix == cheapest_pair(question_of(job), before)
    assert len(fix.values) > 1
    text = advice_text(before, found)
    assert text.endswith(f"\n--search weighs every layout of {before.devices} devices")
    (written,) = arguments(text)
    after = plan(of_job(job_of(tmp_path, *overrides, *written)), hardware_of(job))
    assert after.fits
    assert after.time.seconds == pytest.approx(fix.seconds)
    assert after.memory.device == fix.memory


@pytest.mark.parametrize("overrides", IN_TWO[:3])
def test_no_two_changes_are_faster(tmp_path: Path, overrides: list[str]) -> None:
    job = job_of(tmp_path, *overrides)
    before, question, on = plan(of_job(job), hardware_of(job)), question_of(job), hardware_of(job)
    best = cheapest_pair(question, before)
    assert best is not None
    own = layout_of(before.workload)
    twice = {two for one in neighbours(question, own) for two in neighbours(question, one)}
    legal = sorted(one for one in twice if is_legal(question, one))[::3]  # a third will do
    assert len(legal) > 10
    for layout in legal:
        after = plan(layout.of(before.workload), on)
        assert not after.fits or after.time.seconds >= best.seconds * (1 - 1e-9)


@pytest.mark.parametrize("layers", [[], [LAYERS + "[41, 39]"]])
def test_where_no_two_changes_are_enough_the_best_layout_is_named(tmp_path: Path, layers: list[str]) -> None:
    overrides = ["model.name=llama3-70b", "--dp-shard", "16", "--pp", "2", "training.recompute=none", *layers]
    job = job_of(tmp_path, *overrides)
    before, found = advised(job, overrides)
    assert not before.fits
    assert cheapest_pair(question_of(job), before) is None
    (fix,) = found.fixes
    (written,) = arguments(advice_text(before, found))
    job = job_of(tmp_path, *overrides, *written)
    after = plan(of_job(job), hardware_of(job))
    assert after.fits
    assert after.time.seconds == pytest.approx(fix.seconds)


@pytest.mark.parametrize("overrides", [[], ["training.recompute=full"]])
def test_a_quicker_dtype_is_named_with_what_it_costs(tmp_path: Path, overrides: list[str]) -> None:
    slow = ["precision.compute=float32", *overrides]
    before, found = advised(job_of(tmp_path, *slow))
    assert before.fits is bool(overrides)
    first = found.fixes[0]
    assert dict(first.values) == {"precision.compute": "bfloat16"}
    assert "masters stay float32" in first.note
    job = job_of(tmp_path, *overrides, "precision.compute=bfloat16")
    after = plan(of_job(job), hardware_of(job))
    assert first.seconds == pytest.approx(after.time.seconds)
    assert first.seconds < before.time.seconds / 5
    assert first.memory == after.memory.device < before.memory.device
    assert f"precision.compute=bfloat16  {short(first.seconds):>8}" in advice_text(before, found)


def test_a_dtype_that_is_no_quicker_is_not_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, "precision.compute=float32", "training.recompute=full")
    before = plan(of_job(job), hardware_of(job))
    chip = before.hardware.chip
    even = replace(chip, peak_tflops={**chip.peak_tflops, "bfloat16": chip.peak_tflops["float32"]})
    found = advice(question_of(job), plan(before.workload, replace(before.hardware, chip=even)))
    assert not any("precision.compute" in fix.values for fix in found.fixes)
    assert not any("precision.compute" in fix.values for fix in advised(job_of(tmp_path))[1].fixes)


@pytest.mark.parametrize("pipeline", [[], ["--pp", "2", "--dp-shard", "4", LAYERS + "[41, 39]"]])
def test_where_nothing_fits_more_devices_are_named(tmp_path: Path, pipeline: list[str]) -> None:
    overrides = ["model.name=llama3-70b", "training.recompute=full", *pipeline]
    job = job_of(tmp_path, *overrides)
    before, found = advised(job, overrides)
    assert found.fixes == ()
    assert found.wider is not None
    said, _, flags = advice_text(before, found).partition(": --gpus ")
    devices, *written = flags.split()
    assert f"no layout of 8 devices fits; {devices} would do" in said
    wider = job_of(tmp_path, *overrides, f"parallelism.world_size={devices}", *written)
    after = plan(of_job(wider), hardware_of(wider))
    assert after.fits
    assert after.tight is ("tightly" in said)
    assert after.time.seconds == pytest.approx(found.wider.seconds)
    assert after.memory.device == found.wider.memory
    half = search(question_of(job, int(devices) // 2), of_job(job), hardware_of(job))
    assert half.best == ()


@pytest.mark.parametrize(("devices", "more"), [(61, 64), (24, 32), (33, 64)])
def test_the_next_power_of_two_may_do_where_the_devices_are_none(tmp_path: Path, devices: int, more: int) -> None:
    overrides = ["model.name=llama3-70b", f"--dp-shard={devices}", f"training.global_batch_size={devices * more}"]
    question, workload = question_of(job := job_of(tmp_path, *overrides)), of_job(job)
    small = replace(hardware_of(job).chip, memory_gib=2300 / more)
    found = more_devices(question, workload, replace(hardware_of(job), chip=small))
    assert found is not None and found.devices == more


def test_where_nothing_helps_it_says_so(tmp_path: Path) -> None:
    before, found = advised(job_of(tmp_path, "model.name=llama3-405b", "--dp-shard=1"))
    assert found == Advice(())
    assert advice_text(before, found) == "no layout of 1 device fits, nor of up to 64 times as many"
