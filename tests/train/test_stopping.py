"""What a process does with SIGTERM while its main thread cannot hear it, and once its run is over."""

from __future__ import annotations

import subprocess
import sys

from koushi.train.stopping import TERMINATED

BEGIN = """
import os, signal, threading, time
from datetime import timedelta
import torch.distributed as dist
from koushi.train.stopping import StopRequest

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
stop = StopRequest(dist.new_group(backend="gloo"), 0.5, lambda: "too late")
stop.begin_step()
"""
DEAF = """
signal.signal(signal.SIGTERM, lambda number, frame: print("heard", flush=True))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
store.wait(["never"], timedelta(seconds=60))
print("went on")
"""
OVER = """
os.kill(os.getpid(), signal.SIGTERM)
assert stop.agreed(), "the length of the first step is not known before it, so the ranks ask again after it"
stop.close()
time.sleep(1)
print("went on", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""
UNHEARD = """
stop.close()
signal.signal(signal.SIGTERM, lambda number, frame: print("heard by another"))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("went on")
"""


def run(script: str) -> tuple[int, str, str]:
    found = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=120)
    return found.returncode, found.stdout, found.stderr


def test_the_grace_time_runs_while_native_code_waits() -> None:
    """In which no Python handler runs."""
    assert run(DEAF) == (TERMINATED, "", "too late\n")


def test_a_run_that_ends_within_its_grace_time_leaves_the_process_to_go_on() -> None:
    assert run(OVER) == (0, "went on True -1\n", "")


def test_a_signal_after_the_run_is_left_to_others() -> None:
    assert run(UNHEARD) == (0, "heard by another\nwent on\n", "")
