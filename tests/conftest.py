"""What all tests share: one thread per process, and hypothesis without time limits.

The suite runs in two processes (pytest-xdist). OpenMP teams of two such processes on two cores would wait for each
other most of the time, so each gets one thread, the commands that tests start included.
"""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from hypothesis import settings

# A shell that starts the tests in the background tells them, and by inheritance their children, to ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("llm42", deadline=None, print_blob=True)
settings.load_profile("llm42")
