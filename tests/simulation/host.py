"""One host of the service: a sidecar and an application side by side, as processes come and go."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from anarchon_server.core.limits import CLOCK_OFFSET_MAX
from tests.checker.events import AbleFrom, ServedFrom, ServedUntil, UnableFrom
from tests.simulation.client import App
from tests.simulation.sidecar import Sidecar
from tests.simulation.timeline import SimClock

if TYPE_CHECKING:
    from tests.simulation.world import World

SETTLES_MS = 3_000
"""For how long after a disturbance nothing is expected of a host."""


class Host:
    """A place for one sidecar and one application. `version` is that of the deploy it has."""

    def __init__(self, world: World, number: int, clock: SimClock, rng: random.Random) -> None:
        self.world = world
        self.name = f"host{number}"
        self.clock = clock
        self.rng = rng
        self.version = 0
        self.sidecar: Sidecar | None = None
        self.zombies: list[Sidecar] = []
        self.app: App | None = None
        self._processes = 0
        self._undisturbed_from = 0
        self._served_from = 0
        self._able: dict[str, str] = {}
        self._served: frozenset[str] = frozenset()
        self._ghosts: list[tuple[int, App]] = []
        self._restart_sidecar_after: int | None = None
        self._restart_app_after: int | None = None

    # ── Processes ───────────────────────────────────────────────────────────────────────────────

    def start_sidecar(self) -> None:
        """Starts a sidecar, if none is there."""
        if self.sidecar is None:
            self._processes += 1
            self.sidecar = Sidecar(self, f"{self.name}.{self._processes}", self.rng)

    def start_app(self) -> None:
        """Starts an application, if none is there."""
        if self.app is None:
            self._processes += 1
            self.app = App(self, f"{self.name}.app{self._processes}", self.rng)

    def start(self) -> None:
        """Starts what is not there."""
        self.start_sidecar()
        self.start_app()

    def recover(self) -> None:
        """Starts what is not there, and from now on at once what still is about to stop."""
        self.start()
        if self._restart_sidecar_after is not None:
            self._restart_sidecar_after = 0
        if self._restart_app_after is not None:
            self._restart_app_after = 0

    def kill_sidecar(self, back_after_ms: int | None) -> None:
        """SIGKILL of the sidecar; None: it does not come back by itself."""
        if self.sidecar is not None:
            sidecar, self.sidecar = self.sidecar, None
            sidecar.die()
            self.disturb(0)
        if back_after_ms is not None:
            self.world.timeline.after(back_after_ms, self.start_sidecar)

    def replace_sidecar(self, zombie_for_ms: int) -> None:
        """The application is served by a new sidecar, while the old one lives on for a while, cut
        off from it, and does not know.
        """
        if self.sidecar is not None:
            zombie, self.sidecar = self.sidecar, None
            zombie.unreachable = True
            zombie.lose_clients()
            self.zombies.append(zombie)
            self.world.timeline.after(zombie_for_ms, zombie.die)
            self.disturb(0)
        self.start_sidecar()

    def kill_app(self, back_after_ms: int | None, *, seen: bool) -> None:
        """SIGKILL of the application. `seen`: the sidecar has its pid."""
        if self.app is not None:
            app, self.app = self.app, None
            app.die(seen=seen)
            # Until the sessions it had are lost, the sidecar counts what ran in them.
            self._ghosts.append((self.world.timeline.now + self.world.longest_lease_ms, app))
        if back_after_ms is not None:
            self.world.timeline.after(back_after_ms, self.start_app)

    def stop_sidecar(self, back_after_ms: int) -> None:
        """SIGTERM of the sidecar, and its restart `back_after_ms` after it has stopped."""
        if self.sidecar is not None:
            self._restart_sidecar_after = back_after_ms
            self.sidecar.stop()
            self.look()

    def sidecar_stopped(self, sidecar: Sidecar) -> None:
        """A sidecar said that it has stopped: its process ends."""
        if sidecar is not self.sidecar:
            sidecar.die()
            return
        after = self._restart_sidecar_after
        self._restart_sidecar_after = None
        self.kill_sidecar(after)

    def stop_app(self, grace_ms: int, back_after_ms: int) -> None:
        """SIGTERM of the application, and its restart `back_after_ms` after it has left."""
        if self.app is not None:
            self._restart_app_after = back_after_ms
            self.app.leave(grace_ms)

    def app_left(self, app: App) -> None:
        """The application has left politely."""
        if self.app is app:
            self.app = None
            if self._restart_app_after is not None:
                self.world.timeline.after(self._restart_app_after, self.start_app)

    # ── What it could do ────────────────────────────────────────────────────────────────────────

    def disturb(self, for_ms: int, *, store: bool = False) -> None:
        """Something goes wrong here for a while; nothing is expected until it has settled. `store`:
        only on the way to the store.
        """
        end = self.world.timeline.now + for_ms + SETTLES_MS
        self._undisturbed_from = max(self._undisturbed_from, end)
        if not store:
            self._served_from = max(self._served_from, end)
        self.look()
        self.world.timeline.at(self._undisturbed_from, self.look)

    def look(self) -> None:
        """Notes for each job whether this host could run it from now on."""
        now, record = self.world.timeline.now, self.world.record
        able = self._able_now()
        for job, schedule_id in list(self._able.items()):
            if able.get(job) != schedule_id:
                del self._able[job]
                record(UnableFrom(now, self.name, job, schedule_id))
        for job, schedule_id in able.items():
            if job not in self._able:
                self._able[job] = schedule_id
                record(AbleFrom(now, self.name, job, schedule_id))
        served, before = self._served_now(), self._served
        self._served = served
        for job in sorted(before - served):
            record(ServedUntil(now, self.name, job))
        for job in sorted(served - before):
            record(ServedFrom(now, self.name, job))

    def _served_now(self) -> frozenset[str]:
        sidecar, app = self.sidecar, self.app
        if sidecar is None or app is None or not sidecar.up or sidecar.stopping:
            return frozenset()
        if self.world.timeline.now < self._served_from:
            return frozenset()
        able = (client for client in app.clients if client.able)
        return frozenset(spec.name for client in able for spec in client.specs)

    def _able_now(self) -> dict[str, str]:
        sidecar, app = self.sidecar, self.app
        if sidecar is None or app is None or not sidecar.up or sidecar.stopping or not app.up:
            return {}
        if self.world.timeline.now < self._undisturbed_from:
            return {}
        off = self.clock.wrong_by_ms - self.world.storage.clock.wrong_by_ms
        if abs(off) > CLOCK_OFFSET_MAX - 1_000:
            return {}
        open_jobs = {
            spec.name
            for client in app.clients
            if client.able and client.room > 0
            for spec in client.specs
        }
        return {
            job: schedule_id
            for job, schedule_id in sidecar.registered.items()
            if job in open_jobs and self._below_concurrency(app, job)
        }

    def _below_concurrency(self, app: App, job: str) -> bool:
        most = self.world.job(job).spec.concurrency
        now = self.world.timeline.now
        ghosts = (ghost for until, ghost in self._ghosts if now < until)
        clients = (client for each in (app, *ghosts) for client in each.clients)
        taken = (*(token for client in clients for token in client.in_flight),)
        return not most or sum(token.endswith(f".{job}") for token in taken) < most
