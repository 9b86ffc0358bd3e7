"""For every test: one thread for each process.

Ranks are forked from this process, and OpenMP's threads do not survive a fork: a rank that wanted several after
a test has computed here would wait for ever.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
