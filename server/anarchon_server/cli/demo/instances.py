"""The demo's processes: a sidecar and an application an instance, started, killed, stopped.

Imports the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STOP_SECONDS = 20.0


class DemoFailed(Exception):  # noqa: N818 - it is what the user reads
    """The demo cannot go on; the message says why."""


class Instance:
    """One instance of the demo's service."""

    def __init__(self, name: str, store: str, folder: Path) -> None:
        self.name = name
        self.address = f"127.0.0.1:{_free_port()}"
        self.alive = True
        self._store = store
        self._log = folder / f"{name}.log"
        self._sidecar: asyncio.subprocess.Process | None = None
        self._application: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(
        self, tell: Callable[[Instance, dict[str, Any]], None], flags: list[str]
    ) -> None:
        """Starts both processes; what the application prints goes to `tell`."""
        with self._log.open("wb") as log:
            self._sidecar = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "anarchon_server", "serve"),
                *("--listen", self.address, "--instance-id", self.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A store's URL may hold a password: never in a command line.
                env={**os.environ, "ANARCHON_STORE": self._store},
                start_new_session=True,
            )
            self._application = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "anarchon_server.cli.demo.application"),
                *(self.address, *flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read(tell))

    async def _read(self, tell: Callable[[Instance, dict[str, Any]], None]) -> None:
        assert self._application is not None
        assert self._application.stdout is not None
        async for line in self._application.stdout:
            tell(self, json.loads(line))

    @property
    def pids(self) -> tuple[int, int]:
        """The sidecar's and the application's."""
        assert self._sidecar is not None
        assert self._application is not None
        return self._sidecar.pid, self._application.pid

    def check(self) -> None:
        """Raises `DemoFailed` if a process has ended that should be there.

        What the application said that was no line of ours is raised too.
        """
        for what, process in (("sidecar", self._sidecar), ("application", self._application)):
            if self.alive and process is not None and process.returncode is not None:
                raise DemoFailed(
                    f"the {what} of {self.name} ended with status {process.returncode}:\n"
                    + self._log.read_text("utf-8", "replace")[-2_000:]
                )
        if self.alive and self._reader is not None and self._reader.done():
            self._reader.result()

    def kill(self) -> None:
        """SIGKILL to both, without a word."""
        self.alive = False
        for process in (self._sidecar, self._application):
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)

    async def stop_application(self) -> None:
        """SIGTERM, and its end."""
        await self._end(self._application)

    async def stop(self) -> None:
        """Politely: the application, then its sidecar."""
        self.alive = False
        await self._end(self._application)
        await self._end(self._sidecar)
        if self._reader is not None:
            await self._reader

    async def _end(self, process: asyncio.subprocess.Process | None) -> None:
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            raise DemoFailed(f"{self.name} did not stop within {_STOP_SECONDS:.0f} s") from None

    async def reap(self) -> None:
        """Waits for what was killed."""
        for process in (self._sidecar, self._application):
            if process is not None:
                await process.wait()
        if self._reader is not None:
            await self._reader


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
