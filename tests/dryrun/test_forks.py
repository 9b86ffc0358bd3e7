from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import await_true, gone

from koushi.dryrun.forks import in_forks, watched
from koushi.errors import RankFailure


def tenfold(item: int) -> tuple[int, int]:
    return 10 * item, os.getpid()


def test_results_come_in_order_each_from_a_process_of_its_own() -> None:
    found = in_forks(tenfold, range(5), at_once=2)
    assert [value for value, _ in found] == [0, 10, 20, 30, 40]
    assert len({pid for _, pid in found} | {os.getpid()}) == 6


def test_nothing_to_do() -> None:
    assert in_forks(tenfold, []) == []


def failing(item: int) -> int:
    if item == 1:
        raise ValueError("the second cannot be done")
    return item


def test_a_failure_is_told_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match="the second cannot be done"):
        in_forks(failing, range(3), at_once=1)


def killed(item: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_killed_process_is_told() -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        in_forks(killed, [0])


def left_alone(file: Path) -> None:
    file.write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def leaving(file: Path) -> None:
    in_forks(left_alone, [file])


def test_none_outlives_a_killed_process_that_started_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code -9"):
        in_forks(leaving, [tmp_path / "pid"])
    left = int((tmp_path / "pid").read_text())
    await_true(lambda: gone(left), "its end")


def nested(item: int) -> int:
    return sum(value for value, _ in in_forks(tenfold, range(item)))


def test_on_a_terminal_it_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with watched("audit"):
        assert in_forks(nested, [3], at_once=1) == [30]
        in_forks(tenfold, [1, 2], at_once=1)
    in_forks(tenfold, [1])
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert [one.rpartition(",")[0] for one in shown] == [
        "", "audit: 0 of 1 runs", "audit: 1 of 1 runs", "audit: 1 of 3 runs", "audit: 2 of 3 runs",
        "audit: 3 of 3 runs", "",
    ]  # fmt: skip
    assert shown[-1] == ""


def test_elsewhere_it_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watched("audit"):
        in_forks(tenfold, [1])
    assert capsys.readouterr() == ("", "")
