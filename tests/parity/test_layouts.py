"""Every layout of 1, 2, 4 and 8 ranks trains as one process does."""

from __future__ import annotations

import pytest
from parity_cases import SCHEDULES, WORLDS, Case, Degrees, batch, case, enumerated, factorisations, schedule, tied
from parity_run import TOLERANCES, References, chunks, differing, failures, in_words, precision, run

from koushi.data.batches import open_samples, train_batch
from koushi.data.samples import IGNORE_INDEX

ALL = {world: list(enumerated(world)) for world in WORLDS}
DTYPES = ("float64", "float32")

# A few of each world, in float32 for longer; the others are marked long.
QUICK = (
    "pp1 rep1 shard1 tp1 untied",
    "pp1 rep1 shard1 tp1 tied",
    "pp1 rep1 shard1 tp2 tied",
    "pp1 rep1 shard2 tp1 untied",
    "pp1 rep2 shard1 tp1 tied",
    "pp2 rep1 shard1 tp1 1F1B tied",
    "pp2 rep1 shard1 tp1 ZBVZeroBubble untied",
    "pp1 rep1 shard1 tp4 untied",
    "pp1 rep1 shard2 tp2 tied",
    "pp1 rep2 shard2 tp1 untied",
    "pp1 rep2 shard1 tp2 untied",
    "pp2 rep1 shard1 tp2 Interleaved1F1B tied",
    "pp2 rep1 shard2 tp1 InterleavedZeroBubble untied",
    "pp2 rep2 shard1 tp1 LoopedBFS tied",
    "pp4 rep1 shard1 tp1 GPipe tied",
    "pp1 rep2 shard2 tp2 tied",
    "pp2 rep1 shard2 tp2 DualPipeV tied",
    "pp2 rep2 shard2 tp1 1F1B untied",
)


def test_every_factorisation_is_there() -> None:
    counts = {world: len(factorisations(world)) for world in WORLDS}
    assert counts == {1: 1, 2: 4, 4: 10, 8: 20}
    assert sum(counts.values()) == 35
    assert {world: len(cases) for world, cases in ALL.items()} == {1: 2, 2: 20, 4: 68, 8: 160}
    names = [one.name for cases in ALL.values() for one in cases]
    assert len(set(names)) == len(names)
    assert all(sum(f" {name} " in one for one in names) == 2 * 15 for name in SCHEDULES)


def _quick() -> list[list[Case]]:
    chosen = [one for cases in ALL.values() for one in cases if one.name in QUICK]
    assert len(chosen) == len(QUICK), "a quick case is not among the enumerated"
    odd = case("three", (1, 1, 3, 1), "training.global_batch_size=6", tied(True))
    empty_ends = case("empty ends", (2, 1, 2, 1), *schedule("Interleaved1F1B", 0, 2, 3, 0), *batch(2, 2, 2), tied(True))
    return chunks([*chosen, odd, empty_ends])


def _others() -> list[list[Case]]:
    return chunks(one for cases in ALL.values() for one in cases if one.name not in QUICK)


def _label(cases: list[Case]) -> str:
    return f"world{cases[0].world} {cases[0].name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", _quick(), ids=lambda cases: f"world{cases[0].world}")
def test_a_few_layouts(cases: list[Case], dtype: str, references: References) -> None:
    found = failures(cases, dtype, references)
    assert not found, in_words(found)


@pytest.mark.parametrize("degrees", ((1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)), ids=str)
def test_a_step_without_any_label(degrees: Degrees, references: References) -> None:
    sparse = (*batch(2 // degrees[2], 1, degrees[2]), "data.masked_fraction=0.8", "training.seed=0", tied(True))
    job = case("", degrees, *sparse).job(references.folder, *precision("float64"))
    steps = 3
    samples = open_samples(job)
    counts = [int((train_batch(samples, 2 * step, 2, 0)[1] != IGNORE_INDEX).sum()) for step in range(steps)]
    assert 0 in counts and any(counts), f"the seed gives {counts} labels"
    reference = references.of(job, steps)
    records = run([job], steps, references.folder)[0]
    assert not differing(job, steps, reference, records, TOLERANCES["float64"], "float64")
    for record in records:
        assert [loss == 0.0 for loss in record.losses] == [count == 0 for count in counts]
        assert [norm == 0.0 for norm in record.grad_norms] == [count == 0 for count in counts]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cases", _others(), ids=_label)
def test_every_layout(cases: list[Case], dtype: str, references: References) -> None:
    found = failures(cases, dtype, references)
    assert not found, in_words(found)
