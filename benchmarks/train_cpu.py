"""Training speed on this machine's CPU: Koushi on several layouts against a plain PyTorch loop.

    python benchmarks/train_cpu.py [--rounds 3] [--steps 8] [--only NAME ...]

Every round runs every case once, in turn, so that a machine that slows down slows all alike. Per
case: tokens/s (median over steps but the first two, then over rounds) and its ratio to the plain loop of the
same round, CPU seconds of a step, peak memory of all its processes (proportional set size, sampled), and the
time from the command to the end of the first step.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import torch

HERE = Path(__file__).parent
RUN_FILE = HERE.parent / "examples" / "debug.yaml"
COMMON = ["training.seq_len=512", "training.global_batch_size=8", "training.microbatch_size=1", "validation.every=0"]
RATE = re.compile(r"^step +(\d+)/.* ([\d,]+) tokens/s")


@dataclass(frozen=True)
class Case:
    name: str
    layout: dict[str, int] | None
    """Degrees by short flag; None: the plain loop."""

    def command(self, steps: int, folder: str) -> list[str]:
        common = [*COMMON, f"training.steps={steps}"]
        single = ["--pp=1", "--dp-shard=1", "--dp-replicate=1", "--tp=1"]
        if self.layout is None:
            return [sys.executable, str(HERE / "plain_loop.py"), str(RUN_FILE), *common, *single]
        flags = [f"--{flag}={self.layout.get(flag, 1)}" for flag in ("pp", "dp-shard", "dp-replicate", "tp")]
        return [sys.executable, "-m", "koushi", "train", str(RUN_FILE), *common, *flags, f"run.folder={folder}"]


CASES = (
    Case("plain loop", None),
    Case("1 process", {}),
    Case("dp_shard=2", {"dp-shard": 2}),
    Case("dp_replicate=2", {"dp-replicate": 2}),
    Case("tp=2", {"tp": 2}),
    Case("pp=2", {"pp": 2}),
    Case("tp=2 dp_shard=2", {"tp": 2, "dp-shard": 2}),
    Case("pp=2 dp_shard=2 tp=2", {"pp": 2, "dp-shard": 2, "tp": 2}),
)


@dataclass(frozen=True)
class Result:
    rate: float
    cpu_seconds: float
    memory: int
    first_step: float


class TreeMemory(threading.Thread):
    """Samples the proportional set size of a process and its children; ``peak`` is the largest seen."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.peak = 0
        self._root = psutil.Process(pid)
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(0.5):
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue  # one ended while being counted
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self._stop_event.set()
        self.join()


def run(case: Case, steps: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        began = time.perf_counter()
        process = subprocess.Popen(case.command(steps, folder), stdout=subprocess.PIPE, text=True)
        memory = TreeMemory(process.pid)
        memory.start()
        rates, first = [], 0.0
        assert process.stdout is not None
        for line in process.stdout:
            if match := RATE.match(line):
                first = first or time.perf_counter() - began
                rates.append(float(match[2].replace(",", "")))
        memory.stop()
        if process.wait():
            raise SystemExit(f"{case.name} ended with exit code {process.returncode}")
        after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Result(statistics.median(rates[2:]), cpu / steps, memory.peak, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="names of cases to run besides the plain loop")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.layout is None or not arguments.only or case.name in arguments.only]
    results: dict[str, list[Result]] = {case.name: [] for case in cases}
    for _ in range(arguments.rounds):
        for case in cases:
            results[case.name].append(run(case, arguments.steps))
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores\n")
    print("| layout | tokens/s | ratio to the plain loop | CPU s / step | peak MiB | first step s |")
    print("|---|---|---|---|---|---|")
    plain = results["plain loop"]
    for name, rows in results.items():
        ratio = statistics.median(row.rate / base.rate for row, base in zip(rows, plain, strict=True))
        rate, cpu, first = (
            statistics.median(getattr(row, figure) for row in rows) for figure in ("rate", "cpu_seconds", "first_step")
        )
        peak = max(row.memory for row in rows) / 2**20
        print(f"| {name} | {rate:,.0f} | {ratio:.2f} | {cpu:.2f} | {peak:,.0f} | {first:.1f} |")


if __name__ == "__main__":
    main()
