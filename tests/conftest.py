"""For every test: one thread for each process, and no deadline for an example on a busy machine.

Ranks are forked from this process, and OpenMP's threads do not survive a fork: a rank that wanted several after
a test has computed here would wait for ever.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("koushi", deadline=None)
settings.load_profile("koushi")
