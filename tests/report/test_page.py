"""The page of a lattice in a real browser: what it lights, says and lets one change is what koushi's functions say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Watched
from playwright.sync_api import Browser, Page

from koushi.check.check import check
from koushi.config.load import load
from koushi.errors import ConfigError, KoushiError
from koushi.hardware.hardware import load as load_hardware
from koushi.layout import local_slices
from koushi.mesh import FOLDS, MeshSpec
from koushi.models.llama.layout import parameters
from koushi.plan.plan import plan
from koushi.plan.workload import of_job
from koushi.report.page.assemble import assemble
from koushi.report.page.data import page_data

RUN = Path(__file__).parents[2] / "examples" / "llama_128.yaml"
HARDWARE = "h100"
BATCH = "training.global_batch_size=128"
"""Enough for the layouts that the sliders are moved to."""
DIMS = ("pp", "dp_replicate", "dp_shard", "tp")


def written(folder: Path, *overrides: str, run: Path = RUN) -> Path:
    run_file = load(run, [BATCH, *overrides])
    job = check(run_file)
    path = folder / "page.html"
    path.write_text(assemble(job.name, page_data(run_file, job, load_hardware(HARDWARE))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("page"))


@pytest.fixture
def watched(browser: Browser, path: Path) -> Iterator[Watched]:
    found = Watched(browser, path)
    yield found
    assert found.problems == []
    assert found.requests == [path.as_uri()]
    found.page.close()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def lit(page: Page) -> dict[str, set[int]]:
    """The ranks that are lit, by what they are lit as."""
    cells = page.eval_on_selector_all("[data-lit]", "cells => cells.map(cell => [cell.dataset.rank, cell.dataset.lit])")
    found: dict[str, set[int]] = {}
    for rank, names in cells:
        for name in names.split():
            found.setdefault(name, set()).add(int(rank))
    return found


def move(page: Page, dim: str, steps: int) -> None:
    page.focus(f"#slider-{dim}")
    for _ in range(abs(steps)):
        page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


@pytest.mark.parametrize("rank", [0, 37, 127])
def test_hovering_a_rank_lights_exactly_its_groups(page: Page, rank: int) -> None:
    page.hover(f'[data-rank="{rank}"]')
    mesh = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8)
    expected = {dim: set(mesh.group(rank, dim)) - {rank} for dim in DIMS}
    assert lit(page) == expected | {"here": {rank}}
    shown = page.inner_text('[data-group="dp_shard"]')
    assert [int(one) for one in shown.split()] == list(mesh.group(rank, "dp_shard"))


@pytest.mark.parametrize("fold", FOLDS)
def test_a_fold_lights_its_ranks_alone(page: Page, fold: str) -> None:
    page.click(f'[data-view="{fold}"]')
    page.hover('[data-rank="37"]')
    mesh = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8)
    assert lit(page) == {"fold": set(mesh.group(37, *FOLDS[fold])) - {37}, "here": {37}}


def strengths(page: Page, name: str) -> list[float]:
    """Of what is lit as ``name``, by rank."""
    script = "cells => cells.map(cell => [Number(cell.dataset.rank), Number(cell.style.fillOpacity)])"
    return [strength for _, strength in sorted(page.eval_on_selector_all(f'[data-lit~="{name}"]', script))]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_mesh_of_one_dim_is_not_one_colour(browser: Browser, tmp_path: Path, theme: str) -> None:
    path = written(tmp_path, "parallelism.world_size=null", "--pp=1", "--dp-replicate=1", "--tp=1", "--dp-shard=64")
    opened = Watched(browser, path, color_scheme=theme)
    page = opened.page
    page.hover('[data-rank="20"]')
    assert lit(page) == {"here": {20}, "dp_shard": set(range(64)) - {20}}
    found = strengths(page, "dp_shard")
    assert found == sorted(found) and len(set(found)) == 63 and found[-1] == 1 and found[0] >= 0.3
    assert page.inner_text("#scales").split() == ["dp_shard", "0", "63"]
    assert "one group of all 64" in page.inner_text("#submesh"), "the only sub-mesh need not be chosen"
    rows = page.eval_on_selector_all(".node", "boxes => boxes.map(box => box.getAttribute('y'))")
    assert {rows.count(one) for one in rows} == {2}, "eight nodes in full rows"
    opened.page.close()


def test_colours_grow_stronger_along_every_group(page: Page) -> None:
    page.hover('[data-rank="127"]')
    for dim in DIMS:
        found = strengths(page, dim)
        assert found == sorted(found) and len(set(found)) == len(found) == len(lit(page)[dim])
    scales = page.eval_on_selector_all("[data-scale]", "scales => scales.map(scale => scale.textContent)")
    assert scales == ["pp 01", "dp_replicate 01", "dp_shard 03", "tp 07"]
    used = page.eval_on_selector_all("#submesh [data-submesh]", "rows => rows.map(row => row.dataset.submesh)")
    assert used == list(DIMS)
    page.click('[data-view="tp"]')
    assert page.inner_text("#scales").split() == ["tp", "0", "7"]


def test_a_held_rank_stays_until_it_is_let_go(page: Page) -> None:
    page.click('[data-rank="37"]')
    page.hover('[data-rank="5"]')
    assert lit(page)["here"] == {37}
    page.click('[data-rank="37"]')
    page.hover('[data-rank="5"]')
    assert lit(page)["here"] == {5}


def test_arrow_keys_move_through_the_lattice(page: Page) -> None:
    page.focus("#board svg")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert lit(page)["here"] == {17}
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert lit(page)["here"] == {127}
    page.keyboard.press("Home")
    assert lit(page)["here"] == {0}
    assert page.eval_on_selector("#rank", "card => card.ariaLive") == "polite"


def test_a_submesh_shows_what_the_plan_says_travels_on_it(page: Page) -> None:
    planned = plan(of_job(check(load(RUN, [BATCH]))), load_hardware(HARDWARE))
    for use in planned.submeshes:
        page.click(f'[data-view="{use.name}"]')
        rows = page.eval_on_selector_all("#submesh tr", "rows => rows.slice(1).map(row => row.children[3].textContent)")
        assert [int(one) for one in rows] == [one.calls for one in use.calls]
        crosses = "across nodes" if use.nodes > 1 else "inside a node"
        assert f"{use.link} ({crosses})" in page.inner_text("#submesh")


@pytest.mark.parametrize("moves", [{"tp": -1}, {"pp": -1, "dp_replicate": 1}, {"tp": -3, "dp_replicate": -1}])
def test_sliders_show_the_plan_of_that_layout(page: Page, moves: dict[str, int]) -> None:
    degrees = {"pp": 2, "dp_replicate": 2, "tp": 8}
    for dim, steps in moves.items():
        move(page, dim, steps)
        degrees[dim] = int(degrees[dim] * 2.0**steps)
    shard = 128 // (degrees["pp"] * degrees["dp_replicate"] * degrees["tp"])
    job = check(load(RUN, [BATCH, *arguments(degrees, shard)]))
    planned = plan(of_job(job), load_hardware(HARDWARE))
    assert page.is_hidden("#problem")
    rate = page.inner_text('[data-figure="rate"] b').replace(",", "")
    assert float(rate) == pytest.approx(planned.time.tokens_per_second_per_device, rel=1e-3)
    assert f"data_parallel_shard_degree: {shard}" in page.inner_text("#yaml")
    assert page.locator("#memory-bars .bar").count() == degrees["pp"]
    page.hover('[data-rank="37"]')
    assert lit(page).get("tp", set()) == set(job.mesh.group(37, "tp")) - {37}


def arguments(degrees: dict[str, int], shard: int) -> list[str]:
    flags = {"pp": "--pp", "dp_replicate": "--dp-replicate", "tp": "--tp"}
    return [*(f"{flags[dim]}={degree}" for dim, degree in degrees.items()), f"--dp-shard={shard}"]


def test_an_illegal_layout_says_why_in_the_words_of_check(page: Page) -> None:
    before = page.inner_text("#yaml")
    move(page, "tp", 1)  # 16 over 8 heads
    with pytest.raises(ConfigError) as refused:
        check(load(RUN, [BATCH, *arguments({"pp": 2, "dp_replicate": 2, "tp": 16}, 2)]))
    shown = page.inner_text("#problem")
    assert shown.splitlines() == [f"{one.key}: {one.what}; {one.legal}" for one in refused.value.problems]
    assert page.inner_text("#yaml") == before
    move(page, "tp", -1)
    assert page.is_hidden("#problem")


def test_the_copied_yaml_is_the_layout(browser: Browser, path: Path) -> None:
    opened = Watched(browser, path)
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.click("#copy")
    opened.page.wait_for_function("document.getElementById('copy').textContent === 'Copied'")
    text = opened.page.evaluate("navigator.clipboard.readText()")
    assert re.findall(r"(\w+): (\d+)", text) == [
        ("pipeline_parallel_degree", "2"),
        ("data_parallel_replicate_degree", "2"),
        ("data_parallel_shard_degree", "4"),
        ("tensor_parallel_degree", "8"),
    ]
    opened.page.close()


@pytest.mark.parametrize("rank", [0, 37, 126])
def test_the_slice_of_a_parameter_is_that_of_the_layout(page: Page, rank: int) -> None:
    job = check(load(RUN, [BATCH]))
    degrees = dict(zip(job.mesh.names, job.mesh.shape, strict=True))
    page.click(f'[data-rank="{rank}"]')
    for name, parameter in parameters(job.size, 8).items():
        if name.startswith("layers.") and not name.startswith("layers.0."):
            continue
        page.select_option("#parameter-name", label=name)
        slices = local_slices(parameter.shape, parameter.cuts, degrees, job.mesh.coordinate(rank))
        text = f"[{', '.join(f'{one.start}:{one.stop}' for one in slices)}]"
        empty = any(one.start == one.stop for one in slices)
        assert page.inner_text("#piece").endswith("nothing: there are fewer rows than ranks" if empty else text), name


def test_the_scrubber_walks_through_a_step(page: Page) -> None:
    page.select_option("#parameter-name", label="layers.0.attention_norm.weight")
    page.focus("#scrubber")
    page.keyboard.press("End")
    assert "AdamW" in page.inner_text('[aria-current="step"]')
    texts = page.inner_text("#events")
    for word in ("all-gather over dp_shard", "reduce-scatter over dp_shard", "all-reduce over dp_replicate"):
        assert word in texts
    assert "all-reduce over tp" in texts, "a norm is copied over tp"


def test_japanese_and_dark(browser: Browser, path: Path) -> None:
    opened = Watched(browser, path, locale="ja-JP", color_scheme="dark")
    assert opened.page.inner_text("#lattice-title") == "格子"
    assert opened.page.get_attribute("html", "data-theme") == "dark"
    opened.page.click("#language")
    assert opened.page.inner_text("#lattice-title") == "The lattice"
    opened.page.click("#theme")
    assert opened.page.get_attribute("html", "data-theme") == "light"
    assert opened.problems == []
    opened.page.close()


def test_both_languages_have_every_word() -> None:
    words = (Path(__file__).parents[2] / "koushi/report/page/words.js").read_text(encoding="utf-8")
    english, japanese = words.split("  ja: {")
    keys = re.compile(r"(?:^|[,{])\s*(\w+):", re.MULTILINE)
    assert set(keys.findall(english.split("  en: {")[1])) == set(keys.findall(japanese.split("let language")[0]))


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_sideways(browser: Browser, path: Path, width: int) -> None:
    opened = Watched(browser, path, viewport={"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.close()


@pytest.mark.parametrize(("overrides", "most"), [((), 1 << 20), (("--dp-shard=128", "world_size=null"), 3 << 20)])
def test_a_page_is_small(tmp_path: Path, overrides: tuple[str, ...], most: int) -> None:
    overrides = tuple(one if "=" not in one or one.startswith("--") else f"parallelism.{one}" for one in overrides)
    if overrides:
        overrides += ("training.global_batch_size=512",)
    path = written(tmp_path, *overrides)
    assert path.stat().st_size < most
    data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])  # type: ignore[index]
    assert data["world"] == (4096 if overrides else 128)


def test_a_lattice_too_large_for_a_page_is_refused() -> None:
    run_file = load(RUN, ["parallelism.world_size=null", "--dp-shard=1024", "training.global_batch_size=4096"])
    with pytest.raises(KoushiError, match="at most 16,384 ranks, this lattice has 32,768"):
        page_data(run_file, check(run_file), load_hardware(HARDWARE))


def test_a_page_of_one_device_and_of_an_odd_world(browser: Browser, tmp_path: Path) -> None:
    small = ["parallelism.world_size=null", "--pp=1", "--dp-replicate=1", "--tp=1"]
    for shard in (1, 3):
        path = written(tmp_path, *small, f"--dp-shard={shard}", "training.global_batch_size=12")
        opened = Watched(browser, path)
        opened.page.hover(f'[data-rank="{shard - 1}"]')
        assert lit(opened.page)["here"] == {shard - 1}
        assert opened.problems == []
        opened.page.close()
