"""The planner stays as near to published runs as it has come."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from koushi.accuracy.__main__ import TABLES, main
from koushi.accuracy.document import fenced, shown
from koushi.accuracy.published import LeftOut, described
from koushi.accuracy.rows import FAILED, MEASURED, read
from koushi.accuracy.score import Errors, Scored, SourceScore, by_source, score
from koushi.accuracy.text import error_bars, report
from koushi.plan.plan import ACCURACY

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Held:
    ran: tuple[Scored, ...]
    left_out: tuple[LeftOut, ...]
    failed: tuple[Scored, ...]
    scores: tuple[SourceScore, ...]

    def of(self, source: str) -> SourceScore:
        return next(one for one in self.scores if one.source == source)


@pytest.fixture(scope="module")
def held() -> Held:
    """Every shipped run, planned once."""
    runs, left_out = described(read(MEASURED))
    lost, left_out_lost = described(read(FAILED))
    ran, failed = tuple(score(run) for run in runs), tuple(score(run) for run in lost)
    return Held(ran, (*left_out, *left_out_lost), failed, by_source(ran, failed))


TIME = {
    "bigscience-bloom": 0.05,
    "dgxc-benchmarking": 0.035,
    "hf-ultrascale": 0.055,
    "ibm-fsdp-blog-2403": 0.09,
    "internevo": 0.035,
    "llm-foundry": 0.04,
    "megatron-bridge": 0.035,
    "megatron-sc21": 0.05,
    "nemo-2407": 0.085,
    "torchao": 0.095,
    "torchtitan-perf-2024": 0.04,
    "torchtitan-prs": 0.105,
}
MEMORY = {"bigscience-bloom": 0.045, "hf-ultrascale": 0.05, "torchao": 0.02, "torchtitan-prs": 0.05}
RANKS = {"bigscience-bloom": 0.59, "hf-ultrascale": 0.8, "internevo": 0.88}
"""Figures reached, with a little slack."""


@pytest.mark.parametrize("source", TIME)
def test_median_error_of_step_time(held: Held, source: str) -> None:
    found = held.of(source).time
    assert found is not None and found.median <= TIME[source]


@pytest.mark.parametrize("source", MEMORY)
def test_median_error_of_memory(held: Held, source: str) -> None:
    found = held.of(source).memory
    assert found is not None and found.median <= MEMORY[source]


@pytest.mark.parametrize("source", RANKS)
def test_order_of_layouts(held: Held, source: str) -> None:
    found = held.of(source)
    assert found.rank_correlation is not None and found.rank_correlation >= RANKS[source]
    assert found.regret is not None and found.regret <= 0.02
    assert found.mean_regret is not None and found.mean_regret <= 0.09
    assert found.ceiling is None or found.ceiling > found.rank_correlation


def test_mean_rank_correlation_over_sources(held: Held) -> None:
    known = [one.rank_correlation for one in held.scores if one.rank_correlation is not None]
    assert sum(known) / len(known) >= 0.83


def test_what_fits(held: Held) -> None:
    for source in ("bigscience-bloom", "torchtitan-perf-2024", "torchtitan-prs"):
        fit = held.of(source).fit
        assert fit is not None and fit.precision is not None and fit.recall is not None and fit.caught is not None
        assert fit.precision >= 0.97 and fit.recall >= 0.97 and fit.caught >= 0.8, source
    soft = held.of("hf-ultrascale").fit
    assert soft is not None and soft.recall is not None and soft.caught is not None
    assert soft.recall >= 0.97 and soft.caught >= 0.83


@pytest.mark.parametrize(
    ("quantity", "figure", "most"),
    [("time", "median", 0.052), ("time", "p90", 0.112), ("memory", "median", 0.037), ("memory", "p90", 0.09)],
)
def test_mean_over_sources(held: Held, quantity: str, figure: str, most: float) -> None:
    errors = [known for one in held.scores if (known := getattr(one, quantity)) is not None]
    assert sum(getattr(known, figure) for known in errors) / len(errors) <= most
    assert abs(sum(known.bias for known in errors) / len(errors)) <= 0.025


def test_the_document_shows_what_the_command_prints(held: Held) -> None:
    assert shown(TABLES) == fenced(report(held.scores, held.ran, held.left_out, held.failed))


def test_the_error_bars_of_the_plan_are_these(held: Held) -> None:
    assert json.loads(ACCURACY.read_text(encoding="utf-8")) == error_bars(held.scores, held.ran)


def test_error_bars_tell_of_the_worst_source() -> None:
    def source(name: str, p90: float, runs: int) -> SourceScore:
        return SourceScore(name, Errors(runs, p90 / 2, p90, 0.0), None, (), None, None)

    scores = [source("one run", 0.02, 1), source("many", 0.2, 99), source("some", 0.08, 10)]
    alone = SourceScore("memory alone", None, Errors(4, 0.1, 0.3, 0.0), (), None, None)
    assert error_bars([*scores, alone], []) == {
        "step_time": {"median": 0.05, "p90": 0.1, "worst_p90": 0.2, "sources": 3, "runs": 110, "hardware": []},
        "memory": {"median": 0.1, "p90": 0.3, "worst_p90": 0.3, "sources": 1, "runs": 4, "hardware": []},
    }


def test_the_command_prints_figures_for_programs() -> None:
    found = CliRunner().invoke(main, ["--source", "torchao", "--json"])
    assert found.exit_code == 0
    assert set(json.loads(found.output)) == {"torchao"}
    rows = CliRunner().invoke(main, ["--source", "tinyllama", "--rows"])
    assert "tinyllama-0001" in rows.output
