"""How long `koushi dry-run` takes for two large jobs, and how much memory it needs.

    .venv/bin/python benchmarks/dry_run.py

One run of each command, in a process of its own. Memory is the most that its processes held together,
pages that forks share counted once, looked at ten times a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from koushi.units import bytes_text

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = (
    (str(EXAMPLES / "llama_128.yaml"), "model.name=llama3-70b"),
    (str(EXAMPLES / "llama3_405b.yaml"),),
)
PERIOD = 0.1


def held(process: psutil.Process) -> int:
    """Bytes of the process and its children now; of those that have just ended none."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def measure(arguments: tuple[str, ...]) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak bytes of one dry run. Exits where it fails."""
    command = [sys.executable, "-m", "koushi", "dry-run", *arguments, "--json"]
    before, began, most = os.times(), time.perf_counter(), 0
    with psutil.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, held(process))
            time.sleep(PERIOD)
    seconds, after = time.perf_counter() - began, os.times()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu, most


def main() -> None:
    print("| dry run of | wall s | CPU s | peak memory |\n|---|---|---|---|", flush=True)
    for path, *overrides in COMMANDS:
        seconds, cpu, most = measure((path, *overrides))
        what = " ".join((f"examples/{Path(path).name}", *overrides))
        print(f"| {what} | {seconds:.1f} | {cpu:.1f} | {bytes_text(most)} |", flush=True)


if __name__ == "__main__":
    main()
