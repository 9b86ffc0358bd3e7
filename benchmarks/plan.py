"""How long whole ``koushi plan`` commands take, from the shell and back.

    .venv/bin/python benchmarks/plan.py --rounds 9
    .venv/bin/python benchmarks/plan.py --rounds 9 --base ../before

``--base``: another checkout, such as a ``git worktree`` of the commit before, whose runs alternate with those of this
one. Both run with this Python and its packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parents[1]
COMMANDS = (
    "examples/llama3_8b.yaml",
    "examples/llama3_405b.yaml --search --gpus 16384",
    "examples/llama3_405b.yaml --search --gpus 98304",
)


class Taken(NamedTuple):
    """Seconds of one command."""

    wall: float
    cpu: float
    """User and system."""


def run(tree: Path, command: str) -> Taken:
    # Bytecode is kept, as for whoever uses the command; the current folder comes first on Python's path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(tree)
    before, began = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "koushi", "plan", *command.split()],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    wall, after = time.perf_counter() - began, getrusage(RUSAGE_CHILDREN)
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each command, after one that is not counted")
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    options = parser.parse_args()
    trees = [HERE] if options.base is None else [HERE, options.base.resolve()]
    heads = ["koushi plan", "seconds", "CPU s"]
    if len(trees) > 1:
        heads += ["base seconds", "base CPU s", "CPU ratio"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for command in COMMANDS:
        taken: list[list[Taken]] = [[] for _ in trees]
        for number in range(options.rounds + 1):
            for tree, runs in zip(trees, taken, strict=True):
                one = run(tree, command)
                if number > 0:
                    runs.append(one)
        medians = [(median(one.wall for one in runs), median(one.cpu for one in runs)) for runs in taken]
        cells = [f"{seconds:.2f}" for pair in medians for seconds in pair]
        if len(trees) > 1:
            cells.append(f"{medians[0][1] / medians[1][1]:.2f}")
        print(f"| `{command}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
