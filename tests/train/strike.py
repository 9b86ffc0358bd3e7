"""``python strike.py FOLDER``: runs of two ranks, each ended by Ctrl-C and again a number of Python lines later.

Says of each how many lines, its exit code and what it wrote to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from launch_cases import hang, make_job

import koushi.train.command
from koushi.check import early
from koushi.cli import main
from koushi.train.launch import launch

RANKS = 2
MOMENTS = range(150, 6000, 1000)
"""Lines after the first signal: while ranks are ended, temporary files removed, the end told, and while Python ends."""
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "debug.yaml")


def end_twice(folder: Path, lines: int) -> NoReturn:
    """The whole life of a process whose ``koushi train`` is ended by one signal, and by another after ``lines``."""
    passed = [-1]
    """Lines since the first signal."""

    def ask_to_end() -> None:
        while len(list(folder.glob("pid-*"))) < RANKS:
            time.sleep(0.01)
        passed[0] = 0
        os.kill(os.getpid(), signal.SIGINT)

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and passed[0] >= 0:
            passed[0] += 1
            if passed[0] == lines:
                os.close(os.open(folder / "struck", os.O_CREAT))
                os.kill(os.getpid(), signal.SIGINT)
        return count

    def train(path: Path, overrides: Sequence[str], max_restarts: int) -> None:
        threading.Thread(target=ask_to_end, daemon=True).start()
        launch(hang, make_job(folder, dp_shard=RANKS))

    koushi.train.command.train = train
    early.check_early = lambda *arguments, **options: None  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(folder / "errors", os.O_CREAT | os.O_WRONLY), 2)
    sys.argv[1:] = ["train", EXAMPLE]
    sys.settrace(count)
    main()


def try_moments(base: Path) -> None:
    for lines in MOMENTS:
        folder = base / str(lines)
        folder.mkdir()
        sys.stdout.flush()
        process = os.fork()
        if not process:
            end_twice(folder, lines)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert (folder / "struck").exists(), f"a run has ended within {lines} lines of its first signal"
        print(lines, code, " / ".join((folder / "errors").read_text().splitlines()))


if __name__ == "__main__":
    try_moments(Path(sys.argv[1]))
