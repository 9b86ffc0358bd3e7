"""Run pytest in two processes at once: ``python tests/in_halves.py -m long``.

Most tests keep one core busy, or wait. What the second process prints comes when both have ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
FIRST = ("dryrun", "parity")
"""Folders that take about as long as all the others."""


def commands(arguments: Sequence[str]) -> list[list[str]]:
    """Together they run every test once."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    folders = [str(TESTS / name) for name in FIRST]
    return [[*pytest, *folders], [*pytest, str(TESTS), *(f"--ignore={folder}" for folder in folders)]]


def run(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether both ended well. An interrupt reaches both, and is theirs to answer."""
    with tempfile.TemporaryFile() as kept:
        processes = (subprocess.Popen(first), subprocess.Popen(second, stdout=kept, stderr=subprocess.STDOUT))
        for process in processes:
            while process.returncode is None:
                try:
                    process.wait()
                except KeyboardInterrupt:
                    continue
        kept.seek(0)
        sys.stdout.write(kept.read().decode(errors="replace"))
        sys.stdout.flush()
    return all(process.returncode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(not run(*commands(sys.argv[1:])))
