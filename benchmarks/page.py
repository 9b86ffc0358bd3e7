"""How large a lattice's page is, how long it takes to make, and when a browser first paints it.

    .venv/bin/python benchmarks/page.py

Needs Chromium. First paint is the browser's own figure, of a fresh tab each time.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from koushi.check.check import check
from koushi.config.load import load
from koushi.report.page.command import write_page
from koushi.units import bytes_text

RUN = Path(__file__).parents[1] / "examples" / "llama_128.yaml"
# Batches large enough for most layouts that the sliders reach to be legal.
LATTICES = {
    128: ("training.global_batch_size=1024",),
    4096: ("parallelism.world_size=4096", "--dp-shard=128", "training.global_batch_size=4096"),
}
ROUNDS = 5


def first_paint(browser: Browser, path: Path) -> float:
    """Milliseconds after the navigation."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(path.as_uri())
    entries: list[float] = []
    while not entries:  # the page allows no evaluation of text within it, so waiting is done here
        tab.wait_for_timeout(50)
        entries = tab.evaluate("performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)")
    tab.close()
    return entries[0]


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("there is no Chromium here; Debian's package is chromium")
    print("| ranks | size | made in | first paint, median of 5 |\n|---|---|---|---|")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for ranks, overrides in LATTICES.items():
            run_file = load(RUN, overrides)
            page = Path(folder) / f"{ranks}.html"
            began = time.perf_counter()
            write_page(run_file, check(run_file), "h100", page, show=False)
            made = time.perf_counter() - began
            painted = median(first_paint(browser, page) for _ in range(ROUNDS))
            print(f"| {ranks:,} | {bytes_text(page.stat().st_size)} | {made:.1f} s | {painted:.0f} ms |")
        browser.close()


if __name__ == "__main__":
    main()
