"""Ports of the loopback for the servers that tests start.

A port that the system picks is in its ephemeral range, where between the pick and the server's start
any outgoing connection, or another server told to pick, may get it. So these come from below that
range (49152 by IANA, 32768 on Linux), and none is given twice in a process.
"""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 10_000, 32_000
_untried = list(range(_FIRST, _LAST))
# A process that tests at the same time has another order.
random.SystemRandom().shuffle(_untried)


def free_port() -> int:
    """A port that nobody listens on, and that nobody else in this process was given."""
    while _untried:
        port = _untried.pop()
        if _is_free(port):
            return port
    raise RuntimeError(f"no port from {_FIRST} to {_LAST} is left")


def free_ports(count: int) -> list[int]:
    """Different ports, each as from `free_port`."""
    return [free_port() for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection of an earlier one that is still closing is in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
