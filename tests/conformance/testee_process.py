"""A testee that runs: what it prints, what it is told, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conformance.registry import Language

Line = dict[str, Any]
TO_BE_EXPECTED = {"ready", "started", "context", "confirm", "cancelled", "closed"}
"""Lines that a scenario has to name: one that it does not is one too many."""


class Testee:
    """One process, its lines in the order in which they came."""

    __test__ = False  # no class of tests

    def __init__(self, language: Language, log: Path, changed: asyncio.Event) -> None:
        self.lines: list[Line] = []
        self.log = log
        self._language = language
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, config: Mapping[str, Any], env: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._language.run,
                cwd=self._language.folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 20,
                env={**_environment(), **env, "ANARCHON_TESTEE": json.dumps(config)},
            )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None, "not started"
        assert self._process.stdout is not None, "piped"
        async for line in self._process.stdout:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"what": "no JSON", "line": line.decode(errors="replace")})
            self._changed.set()
        await self._process.wait()
        self._changed.set()

    @property
    def status(self) -> int | None:
        """How it ended, once that has happened and all its lines are here."""
        done = self._reading is not None and self._reading.done()
        return self._process.returncode if self._process is not None and done else None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process is not None, "not started"
        assert self._process.stdin is not None, "piped"
        self._process.stdin.write(f"{line}\n".encode())

    def signal(self, name: str) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.Signals[name])

    async def destroy(self) -> None:
        """End it, whatever it does."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
        if self._reading is not None:
            await self._reading
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.wait_closed()


def _environment() -> dict[str, str]:
    """What surrounds the suite, but for what would change what a client does."""
    return {key: value for key, value in os.environ.items() if not key.startswith("ANARCHON_")}
