"""A first signal is heard; what follows it does no harm, in code that cleans up, that tells of the end, or after it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from koushi.signals import heard, no_longer_raised

INT, TERM, HANG_UP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Asked(Exception):
    """What a first signal raises here."""


@pytest.fixture
def later() -> list[signal.Signals]:
    return []


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (INT, TERM, HANG_UP)]
    yield
    assert [signal.getsignal(number) for number in (INT, TERM, HANG_UP)] == before


def asked(number: signal.Signals) -> None:
    raise Asked(number.name)


def test_only_the_first_signal_raises(later: list[signal.Signals]) -> None:
    with heard((INT, TERM), asked, later.append):
        with pytest.raises(Asked, match="SIGTERM"):
            signal.raise_signal(TERM)
        signal.raise_signal(INT)
        signal.raise_signal(TERM)
    assert later == [INT, TERM]


def test_what_came_inside_has_come_outside(later: list[signal.Signals]) -> None:
    with heard((INT,), asked, later.append):
        with pytest.raises(Asked), heard((INT, TERM), asked, no_call):
            signal.raise_signal(TERM)
        signal.raise_signal(INT)
    assert later == [INT]


def test_new_work_hears_a_first_signal_again(later: list[signal.Signals]) -> None:
    """Else one whose exception was lost would be the last to do anything."""
    with heard((INT,), asked, no_call):
        with pytest.raises(Asked):
            signal.raise_signal(INT)
        with pytest.raises(Asked), heard((INT,), asked, no_call):
            signal.raise_signal(INT)


def test_nothing_raises_where_that_is_over(later: list[signal.Signals]) -> None:
    with heard((INT,), asked, later.append):
        no_longer_raised()
        signal.raise_signal(INT)
    assert later == [INT]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(HANG_UP, signal.SIG_IGN)
    try:
        with heard((INT, HANG_UP), asked, no_call):
            signal.raise_signal(HANG_UP)
            with pytest.raises(Asked):
                signal.raise_signal(INT)
    finally:
        signal.signal(HANG_UP, before)


def test_another_thread_hears_nothing() -> None:
    found = []

    def run() -> None:
        with heard((INT,), asked, no_call):
            found.append(signal.getsignal(INT))

    before = signal.getsignal(INT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def no_call(number: signal.Signals) -> None:
    pytest.fail(f"{number.name} came to the wrong place")


PROBE = """
import atexit, signal, sys
from koushi.cli import commands, main

INT, TERM = signal.SIGINT, signal.SIGTERM

left = [INT]

def strike(*arguments):
    while left:
        signal.raise_signal(left.pop())

class Output:
    encoding = "utf-8"
    flush = strike

@commands.command()
def probe():
    {body}

sys.argv = ["koushi", "probe"]
main()
"""


def probe(body: str) -> tuple[int, str, str]:
    script = PROBE.format(body="\n    ".join(body.splitlines()))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [INT, TERM], ids=lambda number: number.name)
def test_a_command_that_is_asked_to_end_says_so(number: signal.Signals) -> None:
    assert probe(f"signal.raise_signal({number:d})") == (128 + number, "", f"stopped by {number.name}\n")


@pytest.mark.parametrize("number", [INT, TERM], ids=lambda number: number.name)
def test_a_second_signal_while_the_first_unwinds_is_no_traceback(number: signal.Signals) -> None:
    code, output, errors = probe(f"try: signal.raise_signal({number:d})\nfinally: signal.raise_signal(INT)")
    assert (code, output, errors) == (128 + INT, "", "stopped by SIGINT\n")


def test_a_signal_while_the_command_is_told_to_have_failed_is_no_traceback() -> None:
    code, output, errors = probe(
        "import koushi.cli as cli\ncli._tell_torchrun = strike\nraise cli.RankFailure('rank 1')"
    )
    assert (code, output, errors) == (128 + INT, "", "stopped by SIGINT\n")


def test_a_signal_while_output_is_written_out_is_no_traceback() -> None:
    assert probe("sys.stdout = Output()") == (128 + INT, "", "stopped by SIGINT\n")


@pytest.mark.parametrize("number", [INT, TERM], ids=lambda number: number.name)
def test_a_signal_while_python_ends_is_no_traceback(number: signal.Signals) -> None:
    """It ends the process as if there were no Python, for which a shell has the same exit code."""
    code, output, errors = probe(f"print('done', flush=True)\natexit.register(signal.raise_signal, {number:d})")
    assert (code, output, errors) == (-number, "done\n", "")
