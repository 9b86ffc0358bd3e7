"""Errors, order of layouts and regret are counted as their names say."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest
from published_rows import row

from koushi.accuracy.held_out import MEMORY, TIME, held_out
from koushi.accuracy.published import described
from koushi.accuracy.score import (
    Errors,
    Fit,
    Scored,
    SourceScore,
    Sweep,
    attainable,
    by_source,
    correlation,
    over_sources,
    quantile,
    ranks,
    spread,
    sweeps,
)
from koushi.accuracy.text import error_bars, fits_table, held_out_table, left_out_table, table


def scored(measured: float, predicted: float, fits: bool = True, **cells: str) -> Scored:
    runs, left_out = described([row(step_time_s=str(measured), **cells)])
    assert not left_out
    return Scored(runs[0], predicted, memory_gib=50.0, fits=fits)


def test_errors_are_shares_of_what_was_measured() -> None:
    assert scored(2.0, 2.5).time_error == pytest.approx(0.25)
    assert scored(2.0, 2.5).memory_error == pytest.approx(50.0 / 47.5 - 1)
    assert Errors.of([]) is None and Errors.of([None]) is None
    found = Errors.of([0.1, -0.3, None, 0.2])
    assert found == Errors(runs=3, median=0.2, p90=pytest.approx(0.28), bias=0.1)


def test_quantile_lies_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([4.0], 0.9) == 4.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_equal_values_share_a_rank() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]


def test_correlation() -> None:
    assert correlation([0, 1, 2], [5, 6, 9]) == pytest.approx(0.9608, abs=1e-4)
    assert correlation([0, 1, 2], [3, 2, 1]) == pytest.approx(-1.0)
    assert correlation([0, 1, 2], [1, 1, 1]) == 0.0


def test_a_sweep_knows_its_order_and_what_a_wrong_choice_costs() -> None:
    right = Sweep("a", "s", ("x", "y", "z"), measured=(1.0, 2.0, 3.0), predicted=(10.0, 20.0, 30.0))
    assert right.rank_correlation == pytest.approx(1.0) and right.regret == 0.0
    wrong = replace(right, predicted=(30.0, 10.0, 20.0))
    assert wrong.rank_correlation == pytest.approx(-0.5)
    assert wrong.regret == pytest.approx(1.0)


def test_a_sweep_is_one_model_on_the_same_devices_and_batch() -> None:
    one = scored(1.0, 1.0)
    again = scored(3.0, 1.0)
    other_layout = scored(4.0, 2.0, tp="2", dp_shard="4", micro_batch="2")
    third = scored(5.0, 3.0, activation_ckpt="full")
    other_batch = scored(9.0, 9.0, global_batch="16")
    assert sweeps([one, again, other_layout, other_batch]) == ()
    (found,) = sweeps([one, again, other_layout, third, other_batch])
    assert len(found.layouts) == 3
    # The same layout twice counts once, with the median.
    assert sorted(found.measured) == [2.0, 4.0, 5.0]


def test_fit_counts() -> None:
    found = Fit.of(ran=[True, True, True, False], failed=[True, False, False])
    assert found.precision == pytest.approx(3 / 4)
    assert found.recall == pytest.approx(3 / 4)
    assert found.caught == pytest.approx(2 / 3)
    assert Fit.of([], [False]).precision is None and Fit.of([], [False]).recall is None
    assert Fit.of([True], []).caught is None


def test_sources_count_the_same_however_many_rows_they_have() -> None:
    many = [scored(1.0, 1.1, source="torchtitan-a") for _ in range(9)]
    ran = [*many, scored(1.0, 1.5, source="torchtitan-b")]
    scores = by_source(ran, [])
    assert [one.source for one in scores] == ["torchtitan-a", "torchtitan-b"]
    assert over_sources(scores, lambda one: one.time.median if one.time else None) == pytest.approx(0.3)
    bars = error_bars(scores, ran)
    on = {"hardware": ["h100-sxm-80gb"]}
    assert bars["step_time"] == {"median": 0.3, "p90": 0.3, "worst_p90": 0.5, "sources": 2, "runs": 10} | on
    assert bars["memory"]["runs"] == 10


def test_repeats_say_how_well_layouts_can_be_ordered() -> None:
    assert spread([scored(1.0, 1.0), scored(1.0, 1.0), scored(2.0, 1.0, activation_ckpt="full")]) is None
    assert spread([scored(1.0, 1.0), scored(1.1, 1.0)]) == pytest.approx(log(1.1) / sqrt(2))
    sweep = Sweep("a", "s", ("x", "y", "z"), measured=(1.0, 1.1, 1.2), predicted=(1.0, 1.0, 1.0))
    best = [attainable(sweep, deviation) for deviation in (1e-6, 0.05, 0.5, 50.0)]
    assert best[0] == pytest.approx(1.0)
    assert best == sorted(best, reverse=True) and abs(best[-1]) < 0.1
    assert attainable(sweep, 0.05) == best[1]


def test_a_source_is_scaled_by_what_centres_the_others() -> None:
    here = [scored(1.0, predicted, source="torchtitan-a") for predicted in (1.1, 1.2, 1.3)]
    others = [scored(1.0, 1.0, source="torchtitan-b"), scored(1.0, 1.5, source="llm-foundry")]
    elsewhere = scored(1.0, 3.0, source="llm-foundry", gpu="b200")
    found = {one.source: one for one in held_out([*here, *others, elsewhere], TIME)}
    # The others are 0% and 50% off: 25%.
    assert found["torchtitan-a"].as_is.median == pytest.approx(0.2)
    assert found["torchtitan-a"].scaled.median == pytest.approx(1 - 1.2 / 1.25)
    assert found["llm-foundry"].as_is.runs == 1, "alone on its other chip"
    # llm-foundry's allocator is another: its memory has no other source.
    assert {one.source for one in held_out([*here, *others], MEMORY)} == {"torchtitan-a", "torchtitan-b"}
    assert held_out(here, TIME) == ()
    lines = held_out_table(held_out([*here, *others], TIME), held_out([*here, *others], MEMORY)).splitlines()
    assert lines[1].split()[:6] == ["llm-foundry", "1", "50.0%", "36.4%", "50.0%", "36.4%"]
    assert lines[-1].startswith("mean of sources")


def test_rows_left_out_are_shown_with_how_far_off_they_would_be() -> None:
    runs, left_out = described([row(mfu_pct="1.4", step_time_s="4.0"), row(moe="True")])
    shown = left_out_table([Scored(runs[0], 3.0, 50.0, fits=True)], left_out).splitlines()
    assert shown[1].split() == ["1", "torchtitan-example", "below", "2%", "MFU", "25.0%", "-25.0%"]
    assert shown[2].split() == ["1", "torchtitan-example", "mixture", "of", "experts"]
    assert left_out_table([scored(1.0, 1.0)], []) == "no row is left out"


def test_the_table_shows_what_there_is() -> None:
    lost = scored(1.0, 1.0, fits=False)
    scores = by_source([scored(1.0, 1.1)], [lost])
    shown = table(scores).splitlines()
    assert shown[1].split() == ["torchtitan-example", "1", "10.0%", "10.0%", "+10.0%", "1", "5.3%", "5.3%", "+5.3%"]
    assert shown[2].startswith("mean of sources")
    assert fits_table(scores).splitlines()[1].split() == ["torchtitan-example", "1", "1", "1.000", "1.000", "1.000"]
    assert isinstance(scores[0], SourceScore) and scores[0].rank_correlation is None
