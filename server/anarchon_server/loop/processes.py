"""Sees the end of client processes at once, through pidfds (S24). Imports the standard library and
the model.

Only a process of the sidecar's own pid namespace that started when it says can be watched: a number
alone may by now belong to somebody else. Where the system has no pidfds nothing is watched, and a
client's end shows when its session's time is over (S25).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from anarchon_server.core.model import Client

_START_TICKS_AFTER_NAME = 19
"""Field 22 of /proc/PID/stat, counted from the first one after the name in parentheses."""


class ProcessWatch:
    """The client processes being watched; `on_exit` is called with the session's identifier."""

    def __init__(self, on_exit: Callable[[str], None]) -> None:
        self._on_exit = on_exit
        self._descriptors: dict[str, int] = {}

    def watch(self, session_id: str, client: Client) -> None:
        """Begin to watch; a process that is gone already is reported at once.

        Raises `OSError` where it cannot be watched.
        """
        self.unwatch(session_id)
        try:
            descriptor = _pidfd(client.process_id)
        except ProcessLookupError:
            self._report_soon(session_id)
            return
        # Looked at after opening: what the descriptor stands for cannot change any more.
        if start_ticks(client.process_id) != client.process_start_ticks:
            os.close(descriptor)
            self._report_soon(session_id)
            return
        self._descriptors[session_id] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._exited, session_id)

    def unwatch(self, session_id: str) -> None:
        """Stop watching, if it is watched."""
        descriptor = self._descriptors.pop(session_id, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Stop watching everything."""
        for session_id in tuple(self._descriptors):
            self.unwatch(session_id)

    def _exited(self, session_id: str) -> None:
        self.unwatch(session_id)
        self._on_exit(session_id)

    def _report_soon(self, session_id: str) -> None:
        asyncio.get_running_loop().call_soon(self._on_exit, session_id)


def watchable(client: Client) -> bool:
    """Say whether the end of this client's process will be seen."""
    if sys.platform != "linux" or not (client.process_id and client.process_start_ticks):
        return False
    return (
        client.pid_namespace == own_pid_namespace()
        and start_ticks(client.process_id) == client.process_start_ticks
    )


def own_pid_namespace() -> int:
    """Return the inode of this process's pid namespace; 0 where there is no such thing."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def start_ticks(process_id: int) -> int:
    """Return when a process started, as the system counts; 0 if there is none, or none to be seen."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_TICKS_AFTER_NAME])
    except (OSError, IndexError, ValueError):
        return 0


def _pidfd(process_id: int) -> int:
    if sys.platform != "linux":
        raise OSError("only Linux has pidfds")
    return os.pidfd_open(process_id)
