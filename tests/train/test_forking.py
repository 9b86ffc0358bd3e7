"""A forked process goes with the one that forked it, whatever happens to either."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BY_WATCHING = "forking._killed_by_kernel = lambda: False"
"""As where the kernel cannot be asked to."""
WAYS = pytest.mark.parametrize("way", ["", BY_WATCHING], ids=["by the kernel", "by watching"])


def run(way: str, code: str) -> subprocess.CompletedProcess[str]:
    script = f"import os, signal, sys, time\nfrom koushi.train import forking\n{way}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@WAYS
def test_a_process_whose_parent_was_gone_before_it_could_ask_ends(way: str) -> None:
    done = run(way, "forking.as_forked(os.getpid())\ntime.sleep(600)")
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


FORK = """
parent = os.getpid()
if not os.fork():
    forking.as_forked(parent)
    {child}
    print("still there", flush=True)
    os._exit(0)
{parent}
os.kill(os.getpid(), signal.SIGKILL)
"""


@WAYS
def test_a_process_is_left_alone_while_its_parent_is_there(way: str) -> None:
    assert run(way, FORK.format(child="time.sleep(0.2)", parent="os.wait()")).stdout == "still there\n"


@WAYS
def test_a_process_ends_when_its_parent_is_killed(way: str) -> None:
    """The output is at its end when neither holds it open any more."""
    assert run(way, FORK.format(child="time.sleep(600)", parent="time.sleep(0.2)")).stdout == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel does so")
def test_even_a_stopped_process_ends_when_its_parent_is_killed() -> None:
    stopped = "os.waitid(os.P_ALL, 0, os.WSTOPPED)"
    assert run("", FORK.format(child="os.kill(os.getpid(), signal.SIGSTOP)", parent=stopped)).stdout == ""
