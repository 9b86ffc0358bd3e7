"""The audit finds every seeded fault, and nothing where there is none."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from faults import FAULTS, PP2, PP4, REPLICATE2, SHARD2, TP2, Fault
from tiny import tiny_job

from koushi.dryrun import audited
from koushi.dryrun.audited import audit_job
from koushi.dryrun.findings import EXEMPTIONS, Finding
from koushi.dryrun.forks import in_forks
from koushi.dryrun.ranks import rank_classes

NO_SHARD_FOR_THE_LAST = (
    *("parallelism.data_parallel_shard_degree=8", "training.global_batch_size=32"),
    *("model.vocab_size=42", "data.source=synthetic"),
)
"""Eight pieces of six rows: the last rank has none."""
MANY_STAGES = (
    *("parallelism.pipeline_parallel_schedule=Interleaved1F1B", "parallelism.pipeline_parallel_stages_per_rank=4"),
    "parallelism.pipeline_parallel_layers_per_stage=[0, 1, 1, 1, 1, 1, 1, 0]",
)
"""More of a rank than torch's runtime keeps gathered at once."""

SOUND = (
    (),
    TP2,
    SHARD2,
    REPLICATE2,
    PP2,
    (*SHARD2, *TP2, "model.tie_embeddings=true"),
    (*REPLICATE2, *SHARD2, "training.recompute=full"),
    (*SHARD2, *TP2, "training.recompute=selective", "training.global_batch_size=8"),
    (*PP2, *TP2, "model.tie_embeddings=true"),
    PP4,
    (*SHARD2, *TP2),
    (*REPLICATE2, *SHARD2),
    (*PP2, *SHARD2, *TP2),
    (*PP2, *TP2, "model.tie_embeddings=true", "parallelism.pipeline_parallel_layers_per_stage=[2, 0]"),
    NO_SHARD_FOR_THE_LAST,
    (*TP2, *NO_SHARD_FOR_THE_LAST[:2], "model.vocab_size=84", "data.source=synthetic"),
    (*PP2, *NO_SHARD_FOR_THE_LAST, "model.n_layers=6", *MANY_STAGES),
)


def found(folder: Path, *overrides: str, every_rank: bool = False) -> list[Finding]:
    few = () if "model.n_layers=6" in overrides else ("model.n_layers=2",)
    return audit_job(tiny_job(folder, *few, *overrides), "cpu", every_rank=every_rank)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.install(monkeypatch)
    said = [one for one in found(tmp_path, *fault.overrides, every_rank=fault.every_rank) if one.rule == fault.rule]
    texts = "\n".join(map(str, said))
    assert said, "nothing was found"
    assert any(all(text in str(one) for text in fault.says) for one in said), texts


@pytest.mark.parametrize("overrides", SOUND, ids=" ".join)
def test_a_sound_layout_has_no_findings(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert [str(one) for one in found(tmp_path, *overrides)] == []


@pytest.mark.long
def test_what_is_made_again_for_a_backward_in_two_halves_is_gathered_once(tmp_path: Path) -> None:
    schedule = "parallelism.pipeline_parallel_schedule=ZBVZeroBubble"
    assert found(tmp_path, *PP2, *TP2, schedule, "training.recompute=full", "model.n_layers=4") == []


@pytest.mark.parametrize("overrides", (SOUND[0], *SOUND[-2:]), ids=" ".join)
def test_nor_as_it_runs_on_cuda(overrides: tuple[str, ...], tmp_path: Path) -> None:
    job = tiny_job(tmp_path, *overrides, "precision.compute=bfloat16", "training.recompute=selective")
    assert [str(one) for one in audit_job(job, "cuda")] == []


def test_every_fault_is_sound_without_its_patch() -> None:
    layouts = {fault.overrides for fault in FAULTS}
    assert len(FAULTS) >= 14
    assert layouts <= set(SOUND), "a fault's layout is not among the sound ones"


def test_every_exemption_has_a_reason() -> None:
    assert all(len(one.reason.split()) > 5 for one in EXEMPTIONS)


def test_ranks_along_tp_that_run_together_are_as_they_are_alone(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, *PP2, *SHARD2, *TP2, "model.n_layers=2")
    ranks = [one.representative for one in rank_classes(job, counting=True)]
    groups = audited.apart_along_tp(job, ranks)
    assert sorted(rank for group in groups for rank in group) == ranks
    assert [len(group) for group in groups] == [2, 2]
    together = in_forks(partial(audited.records, job, "cpu"), groups)
    alone = in_forks(partial(audited.record, job, "cpu"), ranks)
    for rank, one in zip(chain(*groups), chain(*together), strict=True):
        other = alone[ranks.index(rank)]
        assert one.ledger == other.ledger
        assert one.facts == other.facts
    counting = {rank: sum(each.counts_copies for each in one.facts) for rank, one in zip(ranks, alone, strict=True)}
    assert len(set(counting.values())) == 2, "they differ in what they count"


def test_a_ledger_moves_along_tp(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, *PP2, *SHARD2, *TP2, "model.n_layers=2")
    one, other = in_forks(partial(audited.record, job, "cpu"), [2, 3])
    assert audited.moved_along_tp(one.ledger, 3) == other.ledger
    assert audited.moved_along_tp(one.ledger, 2) is one.ledger
