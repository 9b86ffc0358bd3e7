"""The page of a run: what its folder holds, and folders that hold less or nothing sound."""

from __future__ import annotations

import json
import re
from math import inf, nan
from pathlib import Path

import pytest
from browsing import Watched
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser

from koushi.cli import commands
from koushi.errors import DataError
from koushi.report.run.measured import read_run
from koushi.report.run.page import run_page
from koushi.report.run.svg import MOST_POINTS, Series, line_chart, round_ticks, thinned


def row(step: int, **changed: object) -> dict[str, object]:
    made = {
        "step": step,
        "loss": 8.0 / step + 1,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 1000.0 + step,
        "step_seconds": 2.0,
        "memory_bytes": 1 << 30,
        "elapsed_seconds": 2.0 * step,
        "samples": 4 * step,
        "mfu": None,
    }
    return made | changed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three steps with a validation, two ranks' figures and a prediction."""
    write(tmp_path / "metrics.jsonl", row(1, step_seconds=9.0), row(2), {"step": 2, "validation_loss": 5.5}, row(3))
    places = ["dp_shard=0", "dp_shard=1"]
    old = {"step": 2, "waited_seconds": [9.0, 9.0], "memory_bytes": [1, 1], "coordinates": places}
    new = {"step": 3, "waited_seconds": [0.5, 0.1], "memory_bytes": [3 << 20, 5 << 20], "coordinates": places}
    write(tmp_path / "ranks.jsonl", old, new)
    write(
        tmp_path / "predicted.json",
        {"hardware": "cpu", "step_seconds": 1.0, "memory_bytes": 4 << 20, "bytes": {"dp_shard": 2048}},
    )
    return tmp_path


def write(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def test_the_page_shows_what_was_predicted_against_what_was_measured(browser: Browser, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(run_page(read_run(folder)), encoding="utf-8")
    opened = Watched(browser, path)
    text = opened.page.inner_text("body")
    assert "2.0s\na step (median)" in text, "the first step, which makes what is made once, does not count"
    assert "1.0s\t2.0s\t2.00" in text
    assert "4.00 MiB\t5.00 MiB\t\n" in text, "tensors, and a process"
    assert "not measured: debug.audit was off" in text
    ranks = opened.page.locator("section").last.inner_text()
    assert ranks.index("dp_shard=1") < ranks.index("dp_shard=0"), "the rank that waited least comes first"
    assert opened.page.locator("polyline").count() == 5
    opened.page.click("#language")
    assert "予測" in opened.page.inner_text("body") and "predicted" not in opened.page.inner_text("body")
    assert opened.problems == [] and opened.requests == [path.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 1280
    opened.page.close()


def test_memory_of_a_gpu_is_told_as_a_share_of_what_was_predicted(folder: Path) -> None:
    path = folder / "predicted.json"
    write(path, json.loads(path.read_text(encoding="utf-8")) | {"hardware": "h100-sxm-80gb", "device": "gpu"})
    assert '<td class="n">4.00 MiB</td><td class="n">5.00 MiB</td><td class="n">1.25</td>' in run_page(read_run(folder))


def test_a_run_with_metrics_alone_has_a_page(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", row(1))
    text = run_page(read_run(tmp_path))
    assert "<circle" in text and "Predicted" not in text and "Every rank" not in text


def test_bytes_that_were_audited_are_compared(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "ranks.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[-1]["bytes"] = {"dp_shard": 2048}
    write(folder / "ranks.jsonl", *rows)
    text = run_page(read_run(folder))
    assert "not measured" not in text and "1.00" in text


def ranks_at(step: int, *memory: int) -> dict[str, object]:
    places = [f"tp={rank}" for rank in range(len(memory))]
    return {"step": step, "waited_seconds": [0.5] * len(memory), "memory_bytes": memory, "coordinates": places}


def test_a_layout_that_a_run_went_on_with_is_marked(browser: Browser, folder: Path) -> None:
    steps = [row(step, step_seconds=9.0 if step < 5 else 3.0, tokens_per_second=50.0 + step) for step in range(1, 9)]
    write(folder / "metrics.jsonl", *steps)
    write(
        folder / "ranks.jsonl",
        {"step": 0, "layout": "[tp=1]"},
        ranks_at(2, 7 << 20),
        {"step": 2, "layout": "[tp=1]"},  # stopped, and as before
        {"step": 6, "layout": "[tp=8]"},  # and back to an earlier checkpoint
        {"step": 4, "layout": "[tp=<2>]"},
        ranks_at(8, 1 << 20, 2 << 20),
    )
    run = read_run(folder)
    assert run.layouts == ((0, "[tp=1]"), (4, "[tp=<2>]"))
    assert run.step_seconds == 3.0 and run.rate == 57.0
    assert run.ranks is not None and run.ranks["memory_bytes"] == (1 << 20, 2 << 20)
    path = folder / "page.html"
    path.write_text(run_page(run), encoding="utf-8")
    opened = Watched(browser, path)
    text = opened.page.inner_text("body")
    assert "steps 1 to 4\t[tp=1]\nfrom step 5 on\t[tp=<2>]" in text
    assert opened.page.locator("path.mark").count() == 4
    assert opened.problems == []
    opened.page.close()


def test_ranks_of_the_layout_before_are_not_shown_as_the_last_ones(folder: Path) -> None:
    began = {"step": 2, "layout": "[tp=2]"}
    write(folder / "ranks.jsonl", {"step": 0, "layout": "[tp=1]"}, ranks_at(2, 7 << 20), began)
    run = read_run(folder)
    assert run.ranks is None and run.step_seconds == 2.0
    write(folder / "ranks.jsonl", {"step": 0, "layout": "[tp=1]"}, ranks_at(2, 7 << 20), began | {"layout": "[tp=1]"})
    run = read_run(folder)
    assert run.ranks is not None and len(run.layouts) == 1
    assert "path class" not in run_page(run).replace('path class="grid"', "")


def test_the_command_writes_into_the_folder_or_elsewhere(folder: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(commands, ["report", str(folder)])
    assert found.exit_code == 0, found.output
    assert f"step 3, loss {8 / 3 + 1:.4f}" in found.output
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    elsewhere = tmp_path / "elsewhere.html"
    assert CliRunner().invoke(commands, ["report", str(folder), "--html", str(elsewhere)]).exit_code == 0
    assert elsewhere.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "has no metrics.jsonl"),
        ("", "has no step yet"),
        ('{"step": 1, "validation_loss": 2.0}\n', "has no step yet"),
        ('not json\n{"step": 1}\n', r"metrics\.jsonl:1: is not a line of JSON"),
        ('{"step": 1, "loss": 2.0}\n{"step": 2}\n', r"metrics\.jsonl:1: has no samples"),
        ("[1]\n", r"metrics\.jsonl:1: is not a JSON object"),
    ],
)
def test_a_folder_without_a_run_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=told):
        read_run(tmp_path)


def test_half_a_last_line_is_left_out(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    assert [one["step"] for one in read_run(folder).steps] == [1, 2, 3]


def test_names_from_a_run_cannot_become_markup(folder: Path) -> None:
    write(
        folder / "predicted.json",
        {"hardware": "<script>alert(1)</script>", "step_seconds": 1, "memory_bytes": 1, "bytes": {"<b>": 1}},
    )
    text = run_page(read_run(folder))
    assert "<script>alert" not in text and "<b>:" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens_per_second", "fast"), ("step_seconds", nan), ("step", None), ("loss", []), ("samples", 1.5)],
)
def test_a_field_of_another_kind_is_told_with_its_line(folder: Path, name: str, value: object) -> None:
    write(folder / "metrics.jsonl", row(1), row(2) | {name: value}, row(3))
    with pytest.raises(DataError, match=rf"metrics\.jsonl:2: {name} is "):
        read_run(folder)


def test_a_last_row_without_its_fields_is_unfinished(folder: Path) -> None:
    write(folder / "metrics.jsonl", row(1), {"step": 2, "loss": 1.0})
    assert [one["step"] for one in read_run(folder).steps] == [1]


def test_bytes_that_are_no_text_are_damage(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b'{"step": "\xff"}\n' + json.dumps(row(1)).encode() + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: is not UTF-8"):
        read_run(folder)


def test_a_loss_that_is_not_finite_is_a_gap(folder: Path) -> None:
    write(folder / "metrics.jsonl", row(1), row(2, grad_norm=inf), row(3, loss=nan))
    text = run_page(read_run(folder))
    assert "not finite" in text and not NO_FIGURE.search(text)
    found = CliRunner().invoke(commands, ["report", str(folder)])
    assert found.exit_code == 0 and "loss not finite" in found.output


def test_ranks_of_different_numbers_are_damage(folder: Path) -> None:
    write(folder / "ranks.jsonl", {"waited_seconds": [1.0], "memory_bytes": [1, 2], "coordinates": ["a", "b"]})
    with pytest.raises(DataError, match=r"ranks\.jsonl:1: .* not of the same ranks"):
        read_run(folder)


NO_FIGURE = re.compile(r"\b(nan|inf)\b", re.IGNORECASE)
NUMBERS = st.floats() | st.integers() | st.sampled_from([1e30, -1e30, 5e-324, 0, 2**70])
VALUES = NUMBERS | st.none() | st.booleans() | st.sampled_from(["", "a"])
VALUES = VALUES | st.lists(NUMBERS, max_size=3) | st.dictionaries(st.sampled_from(["tp", "pp"]), NUMBERS, max_size=2)


def damaged(sound: dict[str, object]) -> st.SearchStrategy[dict[str, object]]:
    """A sound row with up to two fields of any value, and perhaps one that is missing."""
    names = st.sampled_from(sorted(sound))
    return st.builds(
        lambda changed, gone: {key: value for key, value in (sound | changed).items() if key not in gone},
        st.dictionaries(names, VALUES, max_size=2),
        st.sets(names, max_size=1),
    )


RANKS: dict[str, object] = {"waited_seconds": [0.5], "memory_bytes": [3], "coordinates": ["tp=0"], "bytes": {"tp": 1}}
PREDICTED: dict[str, object] = {"hardware": "cpu", "step_seconds": 1.0, "memory_bytes": 4, "bytes": {"tp": 2048}}


@given(
    st.lists(damaged(row(1)) | damaged({"step": 2, "validation_loss": 5.5}), max_size=4),
    damaged(RANKS),
    damaged(PREDICTED),
)
@settings(deadline=None)
def test_whatever_the_rows_hold_there_is_a_page_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object], ranks: object, predicted: object
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any_run"
    folder.mkdir(exist_ok=True)
    for name, written in (("metrics.jsonl", rows), ("ranks.jsonl", [ranks]), ("predicted.json", [predicted])):
        write(folder / name, *written)
    try:
        run = read_run(folder)
    except DataError as error:
        assert str(folder) in str(error)
    else:
        assert not NO_FIGURE.search(run_page(run))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned([(float(x), y) for x, y in points])
    assert len(kept) <= max(MOST_POINTS, 1)
    assert min(y for _, y in kept) == min(values) and max(y for _, y in kept) == max(values)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@given(st.floats(-1e9, 1e9, allow_subnormal=False), st.floats(0, 1e9, allow_subnormal=False))
def test_ticks_enclose_the_values(low: float, span: float) -> None:
    ticks = round_ticks(low, low + span)
    assert ticks[0] <= low and ticks[-1] >= low + span
    assert 2 <= len(ticks) <= 8


def test_a_chart_leaves_out_what_is_not_finite() -> None:
    assert line_chart("loss", [Series("loss", [(1, nan), (2, inf)], "blue")]) == ""
    text = line_chart("loss", [Series("loss", [(1, nan), (2, 1.0), (3, 2.0)], "blue")])
    assert "nan" not in text and text.count("<polyline") == 1
