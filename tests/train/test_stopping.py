"""What a process does with SIGTERM while its main thread cannot hear it."""

from __future__ import annotations

import subprocess
import sys

from koushi.train.stopping import TERMINATED

DEAF = """
import os, signal, threading
from datetime import timedelta
import torch.distributed as dist
from koushi.train.stopping import StopRequest

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
stop = StopRequest(dist.new_group(backend="gloo"), 0.5, lambda: "too late")
stop.begin_step()
signal.signal(signal.SIGTERM, lambda number, frame: print("heard", flush=True))
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
store.wait(["never"], timedelta(seconds=60))
print("went on")
"""


def test_the_grace_time_runs_while_native_code_waits() -> None:
    """In which no Python handler runs."""
    found = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout, found.stderr) == (TERMINATED, "", "too late\n")
