"""A fleet of applications in several languages, each beside a sidecar of its own, on one store.

The applications are the testees of `tests/conformance`: what they print is what a handler's own
process saw. Their jobs get their schedules from the sidecars' file of settings. `linger` goes on
until its process is released; the others are over at once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from tests.conformance.registry import Language
from tests.conformance.testee_process import Line, Testee
from tests.integration.account import Grid, has_ended
from tests.integration.fleet_account import Kill, Life
from tests.integration.harness import ASK_AGAIN_S, Process

WAIT_S = 90.0
"""For what a whole fleet on a busy machine is to do."""

LONG = "linger"
JOBS = {
    "context": Grid(150),
    "succeed": Grid(200),
    "json": Grid(250),
    "confirm": Grid(1_000),
    LONG: Grid(300),
}
# A lease that no stall of a busy machine outlasts: what is taken over was released, not lapsed.
POLICIES = {"lease": "20s", "start_deadline": "1m", "max_attempts": 20}

_T = TypeVar("_T")


class Member:
    """A sidecar, and an application beside it that may be killed and started again."""

    def __init__(self, fleet: Fleet, language: Language) -> None:
        self.name = language.key
        self.language = language
        self.address = f"unix:{fleet.sockets / language.key}"
        self.sidecar = Process(fleet.folder / f"{self.name}.sidecar.log")
        self.lives: list[Testee] = []
        self._fleet = fleet

    @property
    def application(self) -> Testee:
        """The one that was started last."""
        return self.lives[-1]

    @property
    def lines(self) -> list[Line]:
        """All that its applications told."""
        return [line for life in self.lives for line in life.lines]

    async def start_sidecar(self) -> None:
        await self.sidecar.spawn(
            *("-m", "anarchon_server", "serve", "--listen", self.address),
            *("--instance-id", self.name, "--config", str(self._fleet.settings)),
            env={"ANARCHON_STORE": self._fleet.store},
        )

    async def start_application(self) -> None:
        log = self._fleet.folder / f"{self.name}.application.log"
        self.lives.append(Testee(self.language, log, self._fleet.changed))
        await self.application.start({"jobs": list(JOBS)}, {"ANARCHON_ADDRESS": self.address})

    def is_ready(self) -> bool:
        return any(line["what"] == "ready" for line in self.application.lines)

    def running(self) -> list[Line]:
        """The starts of what the present application has begun, and is to go on with."""
        lines = self.application.lines
        over = {line["token"] for line in lines if line["what"] in ("ended", "cancelled")}
        return [each for each in lines if each["what"] == "started" and each["token"] not in over]

    def firsts(self) -> int:
        """How many first attempts its applications have begun."""
        return sum(line["what"] == "started" and line["attempt"] == 1 for line in self.lines)

    async def kill_application(self) -> Kill:
        """SIGKILL; all that it told before is here then."""
        kill = Kill(self.name, len(self.lives) - 1, time.monotonic_ns() // 1_000_000)
        self.application.signal("SIGKILL")
        await self._ended()
        return kill

    async def stop_application(self) -> None:
        """SIGTERM: it leaves politely."""
        self.application.signal("SIGTERM")
        await self._ended()

    async def _ended(self) -> None:
        await self._fleet.until(lambda: self.application.status is not None, f"{self.name}'s end")

    async def stop_sidecar(self) -> int:
        self.sidecar.signal(signal.SIGTERM)
        return await self.sidecar.ended()

    async def destroy(self) -> None:
        for life in self.lives:
            await life.destroy()
        await self.sidecar.destroy()


class Fleet:
    """One member a language, on one store."""

    def __init__(self, folder: Path, store: str, languages: Sequence[Language]) -> None:
        self.folder = folder
        self.store = store
        self.sockets = Path(mkdtemp(prefix="anarchon-"))  # their paths must be short
        self.settings = folder / "anarchon.toml"
        self.settings.write_text(_settings(), "utf-8")
        self.changed = asyncio.Event()
        self.members = {each.key: Member(self, each) for each in languages}
        self.kills: list[Kill] = []

    async def start(self) -> None:
        """All at once, until each application has been accepted."""
        for member in self.members.values():
            await member.start_sidecar()
        for member in self.members.values():
            await member.start_application()
        await self.until(lambda: all(m.is_ready() for m in self.members.values()), "all are ready")

    async def until(self, found: Callable[[], _T], what: str) -> _T:
        """What is found, once that is something: looked for whenever an application told a line."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not (this := found()):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {WAIT_S} s: {what}\n{self.told()}") from None
        return this

    def firsts(self) -> Counter[str]:
        """How many first attempts the applications of each have begun."""
        return Counter({name: member.firsts() for name, member in self.members.items()})

    def lives(self) -> list[Life]:
        """What each process of an application told."""
        kills = {(kill.who, kill.life): kill for kill in self.kills}
        return [
            Life(name, life.lines, kills.get((name, number)))
            for name, member in self.members.items()
            for number, life in enumerate(member.lives)
        ]

    def starts(self) -> Iterator[tuple[str, Line]]:
        """Who began what."""
        for name, member in self.members.items():
            yield from ((name, line) for line in member.lines if line["what"] == "started")

    async def kill_in_mid_run(self, among: set[str]) -> str:
        """Kill the first of them that runs the long job, and see it taken over. Returns its name."""

        def runs_it() -> tuple[Member, Line] | None:
            running = ((m, line) for m in self.members.values() for line in m.running())
            return next(((m, s) for m, s in running if m.name in among and s["job"] == LONG), None)

        found = await self.until(runs_it, f"one of {', '.join(sorted(among))} runs {LONG}")
        assert found is not None
        victim, start = found
        self.kills.append(await victim.kill_application())
        await self.until(
            lambda: any(
                (line["job"], line["slot"], line["attempt"])
                == (LONG, start["slot"], start["attempt"] + 1)
                for _, line in self.starts()
            ),
            f"another goes on with {start['slot']}, which {victim.name} ran",
        )
        return victim.name

    async def start_again(self, name: str) -> None:
        """The application, which lets the long job end from now on; until it has been accepted."""
        member = self.members[name]
        await member.start_application()
        member.application.say("release")
        await self.until(member.is_ready, f"{name} is ready again")

    async def runs(self) -> list[run_pb2.Run]:
        """The history, as the first of the sidecars shows it."""
        address = next(iter(self.members.values())).address

        def read() -> list[run_pb2.Run]:
            with AdminClient(address) as admin:
                return list(admin.list_runs())

        return await asyncio.to_thread(read)

    async def settled(self, until: int) -> None:
        """Every slot up to this one has ended."""
        try:
            async with asyncio.timeout(WAIT_S):
                # Nothing here is told when another process writes.
                while not has_ended(JOBS, await self.runs(), until):  # noqa: ASYNC110
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise AssertionError(f"slots up to {until} go on\n{self.told()}") from None

    async def stop_applications(self) -> list[tuple[str, int | None, str]]:
        """One after another, politely. Returns how each ended: status and error."""
        ends = []
        for name, member in self.members.items():
            await member.stop_application()
            closed = [line for line in member.application.lines if line["what"] == "closed"]
            error = str(closed[-1]["error"]) if closed else "never closed"
            ends.append((name, member.application.status, error))
        return ends

    async def stop_sidecars(self) -> list[int]:
        return [await member.stop_sidecar() for member in self.members.values()]

    def told(self) -> str:
        """What there is to see when something went wrong."""
        lines = [json.dumps({"who": who, **line}) for who, line in self.starts()][-40:]
        for log in sorted(self.folder.glob("*.log")):
            lines += [f"--- {log.name}", *log.read_text("utf-8", "replace").splitlines()[-15:]]
        return "\n".join(lines)

    async def destroy(self) -> None:
        for member in self.members.values():
            await member.destroy()
        shutil.rmtree(self.sockets)


def _settings() -> str:
    """The sidecars' file, the same for all: it wins over what the applications say of their jobs."""
    policies = "".join(f"{name} = {json.dumps(value)}\n" for name, value in POLICIES.items())
    return "\n".join(
        f'[jobs.{job}]\nevery = "{grid.every_ms}ms"\n{policies}' for job, grid in JOBS.items()
    )
