"""Real processes for the integration tests: sidecars and applications, and what they tell.

Everything a test waits for is a line that an application printed, a process that ended or a
record in the store's history; nothing is waited for by the clock alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anarchon import SidecarUnavailableError
from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from tests.servers.ports import free_port

APPLICATION = Path(__file__).with_name("application.py")
WAIT_S = 30.0
ASK_AGAIN_S = 0.1
Event = dict[str, Any]


class Process:
    """One child, with its output in a file, stopped by pid at the end."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        piped: bool = False,
        program: str = sys.executable,
    ) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                program,
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=log,
                env={**os.environ, **(env or {})},
            )

    @property
    def child(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "not started"
        return self._process

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.child.wait()

    async def destroy(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


def _is_locked(database: Path) -> bool:
    """Whether a writer has kept the SQLite file for a second."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=1)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


class Instance:
    """A sidecar and an application beside it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.sidecar = Process(cluster.folder / f"{name}.sidecar.log")
        self.application = Process(cluster.folder / f"{name}.application.log")
        self._cluster = cluster
        self._reader: asyncio.Task[None] | None = None
        self._started_with: tuple[list[dict[str, Any]], dict[str, Any]] = ([], {})

    async def start_sidecar(self) -> None:
        await self.sidecar.spawn(
            *("-m", "anarchon_server", "serve", "--listen", self.address),
            *("--instance-id", self.name),
            env={
                "ANARCHON_STORE": self._cluster.store,
                "ANARCHON_NAMESPACE": self._cluster.namespace,
            },
        )

    async def start_application(self, jobs: list[dict[str, Any]], **told: Any) -> None:
        self._started_with = (jobs, told)
        argument = {"address": self.address, "jobs": jobs, "release": str(self._cluster.release)}
        await self.application.spawn(str(APPLICATION), json.dumps({**argument, **told}), piped=True)
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> tuple[int, int]:
        """SIGTERM as a pod gets it: the application, and its sidecar once that is gone.

        Returns how they ended, when all that the application told has been read.
        """
        self.application.signal(signal.SIGTERM)
        application = await self.application.ended()
        if self._reader is not None:
            await self._reader
        self.sidecar.signal(signal.SIGTERM)
        return application, await self.sidecar.ended()

    async def start_again(self) -> None:
        """The same instance at the same address, until its application has been accepted."""
        jobs, told = self._started_with
        before = sum(self._is_ready(event) for event in self._cluster.events)
        await self.start_sidecar()
        await self.start_application(jobs, **told)
        await self._cluster.wait_for(self._is_ready, count=before + 1)

    def _is_ready(self, event: Event) -> bool:
        return bool(event["what"] == "ready" and event["who"] == self.name)

    async def freeze_sidecar(self) -> None:
        """SIGSTOP between two transactions: in one, it would keep everybody from the file."""
        database = self._cluster.folder / "store.db"
        self.sidecar.signal(signal.SIGSTOP)
        while await asyncio.to_thread(_is_locked, database):
            self.sidecar.signal(signal.SIGCONT)
            await asyncio.to_thread(_is_locked, database)  # until it has let go
            self.sidecar.signal(signal.SIGSTOP)

    async def _read(self) -> None:
        stdout = self.application.child.stdout
        assert stdout is not None
        async for line in stdout:
            self._cluster.told({**json.loads(line), "who": self.name})

    async def destroy(self) -> None:
        await self.sidecar.destroy()
        await self.application.destroy()
        if self._reader is not None:
            await self._reader


class Cluster:
    """Instances on one store, by default a SQLite file, and everything their applications told."""

    def __init__(self, folder: Path, store: str = "", namespace: str = "default") -> None:
        self.folder = folder
        self.store = store or f"sqlite://{folder / 'store.db'}"
        self.namespace = namespace
        self.release = folder / "release"
        self.events: list[Event] = []
        self.instances: dict[str, Instance] = {}
        self._changed = asyncio.Condition()

    async def start(self, name: str, jobs: list[dict[str, Any]], **told: Any) -> Instance:
        """An instance whose application has been accepted."""
        instance = self.instances[name] = Instance(self, name)
        await instance.start_sidecar()
        await instance.start_application(jobs, **told)
        await self.wait_for(lambda e: e["what"] == "ready" and e["who"] == name)
        return instance

    def told(self, event: Event) -> None:
        self.events.append(event)
        _background(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, wanted: Callable[[Event], bool], count: int = 1) -> Event:
        """The `count`th event that is wanted, once there is one."""
        try:
            async with asyncio.timeout(WAIT_S), self._changed:
                while True:
                    found = [event for event in self.events if wanted(event)]
                    if len(found) >= count:
                        return found[count - 1]
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"it did not happen within {WAIT_S} s:\n{self.report()}") from None

    async def runs(self, via: Instance, job: str = "") -> list[run_pb2.Run]:
        """The history, newest slot first."""

        def read() -> list[run_pb2.Run]:
            with AdminClient(via.address) as admin:
                return list(admin.list_runs(job=job))

        return await asyncio.to_thread(read)

    async def runs_when(
        self,
        via: Instance,
        wanted: Callable[[list[run_pb2.Run]], bool],
        *,
        within_s: float = WAIT_S,
        ask_again_s: float = ASK_AGAIN_S,
    ) -> list[run_pb2.Run]:
        """The history once it is as wanted, or as it is after so long: the caller judges it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + within_s
        # Nothing here is told when another process writes.
        while not wanted(runs := await self.runs(via)) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(ask_again_s)
        return runs

    async def run_when(
        self, via: Instance, job: str, slot: int, wanted: Callable[[run_pb2.Run], bool]
    ) -> run_pb2.Run:
        """The run, once it is as wanted; asked for ten times a second."""
        run: run_pb2.Run | None = None
        try:
            async with asyncio.timeout(WAIT_S):
                # Nothing here is told when another process writes.
                while (run := await self._run(via, job, slot)) is None or not wanted(run):  # noqa: ASYNC110
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise AssertionError(f"the run stayed as it is:\n{run}\n{self.report()}") from None
        return run

    async def _run(self, via: Instance, job: str, slot: int) -> run_pb2.Run | None:
        try:
            runs = await self.runs(via, job)
        except SidecarUnavailableError:  # it is just starting
            return None
        return next((run for run in runs if run.slot == slot), None)

    def let_go(self) -> None:
        """Lets the `working` and `stubborn` handlers end."""
        self.release.touch()

    def report(self) -> str:
        """What there is to see when something went wrong."""
        lines = [json.dumps(event) for event in self.events if event["what"] != "step"][-40:]
        for log in sorted(self.folder.glob("*.log")):
            lines += [f"--- {log.name}", *log.read_text("utf-8", "replace").splitlines()[-25:]]
        return "\n".join(lines)

    async def destroy(self) -> None:
        for instance in self.instances.values():
            await instance.destroy()


_tasks: set[asyncio.Task[None]] = set()


def _background(coroutine: Any) -> None:
    task = asyncio.ensure_future(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
