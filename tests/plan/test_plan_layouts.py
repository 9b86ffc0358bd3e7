"""The search's layouts are those that ``koushi check`` accepts, no more and no fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from koushi.check.check import check
from koushi.config.load import load
from koushi.config.schema import ScheduleName
from koushi.errors import ConfigError
from koushi.job import Job
from koushi.plan.layouts import MODES, Layout, Question, layout_of, layouts, left_out, question_of
from koushi.plan.workload import of_job

Combination = tuple[dict[str, Any], dict[str, Any]]
"""Values of the sections parallelism and training."""

MODELS = (
    ("{dim: 32, n_layers: 5, n_heads: 4, n_kv_heads: 2, ffn_dim: 64}", 4, 4, False),
    ("{dim: 32, n_layers: 5, n_heads: 4, n_kv_heads: 2, ffn_dim: 64}", 6, 3, True),
    ("{dim: 48, n_layers: 3, n_heads: 6, n_kv_heads: 6, ffn_dim: 36, vocab_size: 2052}", 6, 6, False),
    ("{dim: 32, n_layers: 4, n_heads: 8, n_kv_heads: 2, ffn_dim: 64, tie_embeddings: true}", 8, 2, False),
)


def combinations(devices: int, batch: int) -> Iterator[Combination]:
    """Legal or not; only the degrees multiply to the devices."""
    degrees = range(1, devices + 1)
    for tp, pp, replicas, shard in product(degrees, repeat=4):
        if tp * pp * replicas * shard != devices:
            continue
        schedules = product(get_args(ScheduleName), (1, 2, 3)) if pp > 1 else [("1F1B", 1)]
        for schedule, stages in schedules:
            for size, recompute, reshard in product(range(1, batch + 1), MODES, ("always", "never")):
                parallelism = {
                    "tensor_parallel_degree": tp,
                    "pipeline_parallel_degree": pp,
                    "data_parallel_replicate_degree": replicas,
                    "data_parallel_shard_degree": shard,
                    "pipeline_parallel_schedule": schedule,
                    "pipeline_parallel_stages_per_rank": stages,
                    "reshard_after_forward": reshard,
                }
                yield parallelism, {"microbatch_size": size, "recompute": recompute}


@pytest.fixture
def judge(tmp_path: Path) -> Callable[[str], Callable[[Combination], Job | None]]:
    """``koushi check`` on a run file with a combination's values; None where it refuses."""

    def of(text: str) -> Callable[[Combination], Job | None]:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        run_file = load(path)

        def judged(combination: Combination) -> Job | None:
            config = run_file.config
            sections = {
                "parallelism": config.parallelism.model_copy(update=combination[0]),
                "training": config.training.model_copy(update=combination[1]),
            }
            try:
                return check(replace(run_file, config=config.model_copy(update=sections)))
            except ConfigError:
                return None

        return judged

    return of


@pytest.mark.parametrize(("model", "devices", "batch", "compiled"), MODELS)
def test_legal_is_what_check_accepts(
    judge: Callable[[str], Callable[[Combination], Job | None]], model: str, devices: int, batch: int, compiled: bool
) -> None:
    text = f"model: {model}\ntraining: {{seq_len: 12, global_batch_size: {batch}, compile: {str(compiled).lower()}}}\n"
    judged = judge(text)
    tried = list(combinations(devices, batch))
    jobs = [job for job in map(judged, tried) if job is not None]
    assert 20 < len(jobs) < len(tried)
    known = {layout_of(of_job(job)) for job in jobs}
    found = list(layouts(question_of(jobs[0])))
    assert len(found) == len(set(found))
    # Only up to three stages a rank were tried; with one data-parallel rank there is nothing to reshard.
    assert {one for one in found if one.pipeline.stages_per_rank <= 3} == {_without_choice(one) for one in known}


def _without_choice(layout: Layout) -> Layout:
    alone = layout.dp_replicate * layout.dp_shard == 1 and layout.pp == 1
    return layout._replace(reshard_after_forward=True) if alone else layout


def test_a_layout_goes_in_and_out_of_a_workload(judge: Callable[[str], Callable[[Combination], Job | None]]) -> None:
    judged = judge("model: {n_layers: 5}\ntraining: {seq_len: 16, global_batch_size: 4}\n")
    for combination in list(combinations(4, 4))[::7]:
        job = judged(combination)
        if job is not None:
            workload = of_job(job)
            assert layout_of(workload).of(workload) == workload


def test_more_devices_than_samples_leave_tensor_and_pipeline_parallel(
    judge: Callable[[str], Callable[[Combination], Job | None]],
) -> None:
    job = judge("model: {n_layers: 5}\ntraining: {seq_len: 16, global_batch_size: 4}\n")(({}, {}))
    assert job is not None
    question = Question(job.size, 64, 4, 16, False)
    found = list(layouts(question))
    assert {(one.tp, one.pp) for one in found} == {(8, 2), (4, 4), (8, 4)}
    assert not list(layouts(replace(question, devices=7 * 11 * 13)))


@pytest.mark.parametrize("devices", [1, 6, 7, 12, 24, 40])
def test_batches_that_are_named_leave_out_the_fewest_layouts(tmp_path: Path, devices: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {n_heads: 12, n_kv_heads: 12, dim: 96}\n", encoding="utf-8")
    asked = question_of(check(load(path)), devices)

    def pairs(batch: int) -> int:
        return len({(one.tp, one.pp) for one in layouts(replace(asked, global_batch_size=batch))})

    named = 0
    for own in range(8, 73, 4):
        near = range(own - own // 8, own + own // 8 + 1)
        found = left_out(replace(asked, global_batch_size=own))
        if found is None:
            assert max(map(pairs, near)) == pairs(own)
            continue
        named += 1
        assert pairs(own) == found.of - found.pairs
        assert found.batches
        assert all(batch in near and pairs(batch) == found.of - found.fewest for batch in found.batches)
        assert found.of - found.fewest > pairs(own)
    assert named > 0 or devices == 1
