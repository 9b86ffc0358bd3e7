"""For every test: one thread for each process, signals as a terminal has them, and no deadline for an example on a busy
machine.

Ranks are forked from this process, and OpenMP's threads do not survive a fork: a rank that wanted several after
a test has computed here would wait for ever.
"""

from __future__ import annotations

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell has what it starts in the background ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And what `nohup` has them ignore.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("koushi", deadline=None)
settings.load_profile("koushi")
