"""The demo's story: who starts, what is shown, who is killed, who is stopped, what came of it.

Imports the siblings, the client's admin side, `opening` and `core.slots`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anarchon.admin import AdminClient
from anarchon_server.cli.demo.application import CHECKSUM_SECONDS
from anarchon_server.cli.demo.instances import DemoFailed, Instance
from anarchon_server.cli.demo.report import Start, counted, problems, table
from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.slots import Schedule, parse_schedule
from anarchon_server.core.store import LEASE_BACKENDS, OpenOptions
from anarchon_server.opening import known_schemes, open_store

SCHEDULES: dict[str, Schedule] = {
    "tick": parse_schedule("2s"),
    "report": parse_schedule("*/5 * * * * *"),
    "flaky": parse_schedule("3s"),
    "checksum": parse_schedule("10s"),
}
_READY_SECONDS = 30.0
_INTO_THE_RUN = 1.5
_SETTLED_MS = 4_000
"""Slots of the last seconds may still be waiting for their jitter."""
_CALM_SECONDS = 25.0
"""A checksum may be taken over once more before it ends."""
_CALM_AHEAD_MS = 1_500
"""No checksum falls due while the instances are stopped."""


def main(args: argparse.Namespace) -> int:
    """Run the demo. 0: it went well; 1: the self-check failed; 2: it could not be run."""
    try:
        _check(args)
        with tempfile.TemporaryDirectory(prefix="anarchon-demo-") as folder:
            return asyncio.run(Show(args, Path(folder)).run())
    except DemoFailed as error:
        print(f"anarchon demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.instances <= 20:
        raise DemoFailed(f"--instances is {args.instances}: 1 to 20")
    if not 10 <= args.seconds <= 3_600:
        raise DemoFailed(f"--seconds is {args.seconds}: 10 to 3600")
    if args.store is not None:
        _check_scheme(args.store.partition(":")[0])
        _check_leases(args.store)


def _check_scheme(scheme: str) -> None:
    """Refuse what `opening` would refuse too, but without advising what lives in one process."""
    shared = [each for each in known_schemes() if each != "memory"]
    if scheme not in shared:
        known = ", ".join(f"{each}:" for each in shared)
        what = "lives in one process" if scheme == "memory" else "has no backend in this version"
        raise DemoFailed(f"--store {scheme[:40]}: {what}; the demo runs on {known}")


def _check_leases(url: str) -> None:
    """Refuse a store on which nobody takes over: there would be nothing to see."""
    try:
        capabilities = open_store(url, OpenOptions("default", SystemClock())).capabilities
    except AnarchonError as error:
        raise DemoFailed(f"--store: {error}") from None
    if not capabilities.leases:
        able = ", ".join(name for name in LEASE_BACKENDS if name != "memory")
        raise DemoFailed(
            f"--store: {capabilities.backend} keeps no leases, and the demo shows a takeover; "
            f"stores that do: {able}"
        )


class Show:
    """One run of the demo."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        store = args.store or f"sqlite://{folder / 'demo.db'}"
        self._instances = [
            Instance(f"demo-{number + 1}", store, folder) for number in range(args.instances)
        ]
        self._seconds: int = args.seconds
        self._kills = not args.no_kill and args.instances > 1
        self._leases = _keeps_leases(store)
        self._began = time.monotonic()
        self._ready: asyncio.Queue[Instance] = asyncio.Queue()
        self._checksums: asyncio.Queue[tuple[Instance, Start]] = asyncio.Queue()
        self._starts: list[Start] = []
        self._succeeded: set[tuple[str, int]] = set()
        self._calmed = asyncio.Event()
        self._struck: dict[tuple[str, int], tuple[str, float]] = {}

    async def run(self) -> int:
        """The whole story."""
        try:
            return await self._run()
        finally:
            for instance in self._instances:
                instance.kill()
            for instance in self._instances:
                await instance.reap()

    async def _run(self) -> int:
        flags = [] if self._leases else ["--no-leases"]
        many = counted(len(self._instances), "instance")
        self._say("", f"starting {many}, each a sidecar and an application")
        for instance in self._instances:
            await instance.start(self._told, flags)
        await self._all_ready()
        since = _now_ms()
        end = time.monotonic() + self._seconds
        story = asyncio.create_task(self._story())
        try:
            await self._watch_processes(end, story)
        finally:
            story.cancel()
            await asyncio.gather(story, return_exceptions=True)
        await self._calm(since)
        return await self._finish(since)

    async def _calm(self, since: int) -> None:
        """Wait until no checksum runs: it would be handed on from one that stops to the next."""
        is_said = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALM_SECONDS):
                while any(
                    ("checksum", slot) not in self._succeeded
                    for slot in SCHEDULES["checksum"].between(since, _now_ms() + _CALM_AHEAD_MS)
                ):
                    if not is_said:
                        self._say("", "waiting for the checksum to end")
                        is_said = True
                    self._calmed.clear()
                    await self._calmed.wait()

    async def _all_ready(self) -> None:
        waiting = {i.name for i in self._instances}
        end = time.monotonic() + _READY_SECONDS
        while waiting:
            try:
                async with asyncio.timeout(0.5):
                    waiting.discard((await self._ready.get()).name)
            except TimeoutError:
                for instance in self._instances:
                    instance.check()
                if time.monotonic() > end:
                    raise DemoFailed(f"not ready in time: {', '.join(sorted(waiting))}") from None

    async def _watch_processes(self, end: float, story: asyncio.Task[None]) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(0.5, max(0.0, end - time.monotonic())))
            for instance in self._instances:
                instance.check()
            if story.done() and (error := story.exception()):
                raise error

    # --- The story -----------------------------------------------------------------------

    async def _story(self) -> None:
        """One instance is killed while it runs the long job, another is stopped politely."""
        if not (self._kills and self._leases):
            return
        victim, run = await self._runner_of_checksum()
        pids = victim.pids
        self._struck[(run.job, run.slot)] = ("kill", time.monotonic())
        victim.kill()
        self._say(
            victim.name, f"KILLED (SIGKILL, sidecar {pids[0]} and application {pids[1]}) in mid-run"
        )
        if sum(i.alive for i in self._instances) < 2:
            return
        leaver, run = await self._runner_of_checksum(after=run)
        self._struck[(run.job, run.slot)] = ("stop", time.monotonic())
        self._say(leaver.name, "is stopped politely (SIGTERM): it hands its run over")
        await leaver.stop()
        self._say(leaver.name, "has left")

    async def _runner_of_checksum(self, after: Start | None = None) -> tuple[Instance, Start]:
        """An instance that is now in the middle of a run of `checksum`."""
        while True:
            instance, run = await self._checksums.get()
            if not instance.alive or (after is not None and run.slot <= after.slot):
                continue
            await asyncio.sleep(_INTO_THE_RUN)
            if instance.alive:
                return instance, run

    # --- What is shown -------------------------------------------------------------------

    def _told(self, instance: Instance, line: dict[str, Any]) -> None:
        what = line["what"]
        if what == "ready":
            self._say(instance.name, "ready")
            self._ready.put_nowait(instance)
        elif what == "start":
            self._started(instance, line)
        elif what == "end":
            self._ended(instance, line)

    def _started(self, instance: Instance, line: dict[str, Any]) -> None:
        start = Start(instance.name, line["job"], line["slot"], line["attempt"], line["fence"])
        self._starts.append(start)
        if start.attempt > 1:
            how, at = self._struck.get((start.job, start.slot), ("", time.monotonic()))
            after = f" {time.monotonic() - at:.1f} s after the {how}" if how else ""
            self._say(instance.name, f"{_run(line)}  TAKES OVER{after}, fence {start.fence}")
        elif start.job == "checksum":
            self._say(instance.name, f"{_run(line)}  won, takes {CHECKSUM_SECONDS:.0f} s ...")
        if start.job == "checksum":
            self._checksums.put_nowait((instance, start))

    def _ended(self, instance: Instance, line: dict[str, Any]) -> None:
        if line["outcome"] == "success":
            self._succeeded.add((line["job"], line["slot"]))
            self._calmed.set()
        words = f"  ({line['words']})" if line["words"] else ""
        self._say(instance.name, f"{_run(line)}  {line['outcome']}{words}")

    def _say(self, who: str, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {who:<8}{what}", flush=True)

    # --- The end -------------------------------------------------------------------------

    async def _finish(self, since: int) -> int:
        alive = [i for i in self._instances if i.alive]
        until = _now_ms() - _SETTLED_MS
        self._say("", "stopping the rest")
        last = alive[-1]
        for instance in alive[:-1]:
            await instance.stop()
        last.alive = False
        await last.stop_application()
        runs = await asyncio.to_thread(_history, last.address, since)
        await last.stop()
        print("\nWhat the history says\n")
        print("\n".join(table(runs, [i.name for i in self._instances])))
        wrong = problems(runs, self._starts, SCHEDULES, since, until)
        print()
        if wrong:
            print("SELF-CHECK FAILED\n  " + "\n  ".join(wrong))
            return 1
        print("  self-check: every slot is accounted for, and none had two winners")
        return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _history(address: str, since: int) -> list[Any]:
    with AdminClient(address) as admin:
        return list(admin.list_runs(from_slot=since))


def _keeps_leases(store: str) -> bool:
    """Whether the backend can take runs over; `DemoFailed` where there is none for the URL."""
    try:
        opened = open_store(store, OpenOptions("default", SystemClock()))
    except AnarchonError as error:
        raise DemoFailed(f"--store: {error}") from None
    return opened.capabilities.leases


def _run(line: dict[str, Any]) -> str:
    slot = datetime.fromtimestamp(line["slot"] / 1_000, UTC)
    return f"{line['job']:<9} {slot:%H:%M:%S}  attempt {line['attempt']}"
