"""How long a program that tests start may live: no longer than they do."""

from __future__ import annotations

import ctypes
import signal
import sys

_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a new process: so that it does not outlive a test run that was killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
