"""Directed plays: a small cluster in which only happens what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anarchon_server.core.limits import HOUR
from anarchon_server.core.model import CatchUpPolicy, EverySchedule, JobSpec
from tests.checker.events import HandlerEnded, HandlerStarted, RunSaved
from tests.simulation.__main__ import explained
from tests.simulation.host import Host
from tests.simulation.plan import Plan, SimJob, Work
from tests.simulation.storage import Weather
from tests.simulation.timeline import EPOCH_MS
from tests.simulation.world import World

LEASE = 3_000
HEARTBEAT = 500
QUICK = Work(duration_ms=(50, 50))
NEVER = 10**8


def lasting(duration_ms: int, **work: Any) -> Work:
    """Handlers that take so long, and a step every 50 ms."""
    return Work(duration_ms=(duration_ms, duration_ms), step_ms=(50, 50), **work)


def job(period_ms: int, work: Work = QUICK, offset_ms: int = 0, **spec: Any) -> SimJob:
    """A job on a grid without jitter, with a lease of 3 s."""
    policies = {"jitter_ms": 0, "lease_ms": LEASE, "heartbeat_ms": HEARTBEAT, **spec}
    usual = {"catch_up": CatchUpPolicy.NONE}
    return SimJob(JobSpec("job", EverySchedule(period_ms, offset_ms), **(usual | policies)), work)


def once(at_ms: int, work: Work, **spec: Any) -> SimJob:
    """A job with one slot in the hour that a scenario lasts."""
    return job(HOUR, work, at_ms, **spec)


class Story:
    """A cluster in which only happens what the test says. Moments are milliseconds from its start."""

    def __init__(self, *jobs: SimJob, hosts: int = 2, end_at: int = 30_000, **plan: Any) -> None:
        plan = {"seed": 7, "real_clients": True, "hosts": hosts, "end_at": end_at, **plan}
        self.world = World(Plan(jobs=jobs, **plan))

    @property
    def hosts(self) -> list[Host]:
        """The hosts, by number."""
        return self.world.hosts

    def at(self, moment: int, action: Callable[[], object]) -> None:
        """Lets something happen then."""

        def act() -> None:
            action()

        self.world.timeline.at(moment, act)

    def play(self, *, judged: bool = True) -> None:
        """Plays it to its end. Nothing may be broken that the checker knows of."""
        self.world.run()
        found = self.world.violations() if judged else []
        assert not found, explained(self.world, found[0])

    def holder(self, slot_ms: int, name: str = "job") -> Host:
        """The host that has the present attempt of the slot's run."""
        instance = self.saved(slot_ms, name)[-1].instance
        return next(host for host in self.hosts if host.name == instance)

    def saved(self, slot_ms: int, name: str = "job") -> list[RunSaved]:
        """Every state of the slot's run that the store has had."""
        slot = EPOCH_MS + slot_ms
        return [
            e
            for e in self.world.events
            if isinstance(e, RunSaved) and (e.job, e.slot) == (name, slot)
        ]

    def end_of(self, slot_ms: int, name: str = "job") -> tuple[str, str, int]:
        """The run's last state, reason and attempt."""
        last = self.saved(slot_ms, name)[-1]
        return str(last.state), last.reason, last.attempt

    def claimed_at(self, slot_ms: int, attempt: int, name: str = "job") -> int:
        """When an attempt was won."""
        return next(run.at for run in self.saved(slot_ms, name) if run.attempt == attempt)

    def starts(self, slot_ms: int) -> list[HandlerStarted]:
        """The handlers that were started for the slot."""
        slot = EPOCH_MS + slot_ms
        return [e for e in self.world.events if isinstance(e, HandlerStarted) and e.slot == slot]

    def ended_at(self, token: str) -> int:
        """When a handler ended."""
        return next(
            e.at for e in self.world.events if isinstance(e, HandlerEnded) and e.token == token
        )

    def ends(self) -> dict[int, str]:
        """The last state of every run, by its slot."""
        states = {e.slot: str(e.state) for e in self.world.events if isinstance(e, RunSaved)}
        return {slot - EPOCH_MS: state for slot, state in sorted(states.items())}

    def logged(self, event: str) -> int:
        """How often the sidecars that are there have logged it."""
        return sum(
            line.event == event
            for host in self.hosts
            if host.sidecar is not None
            for _, line in host.sidecar.log
        )


def everywhere(story: Story, action: Callable[[Host], None]) -> None:
    """The same on every host."""
    for host in story.hosts:
        action(host)


def cut_off(host: Host) -> None:
    """From now on this host does not reach the store."""
    assert host.sidecar is not None
    host.disturb(NEVER)
    host.sidecar.link.weather = Weather(silent=True)


def kill_for_good(host: Host) -> None:
    """The host's two processes are gone and do not come back."""
    host.kill_app(None, seen=False)
    host.kill_sidecar(None)


def set_weather(host: Host, weather: Weather, for_ms: int = 2_000) -> None:
    """What goes wrong between this host and the store, for about so long."""
    assert host.sidecar is not None
    host.disturb(for_ms)
    host.sidecar.link.weather = weather


def freeze_app(host: Host, for_ms: int) -> None:
    """SIGSTOP, and SIGCONT later."""
    assert host.app is not None
    host.app.freeze()
    host.world.timeline.after(for_ms, host.app.thaw)


def last_starts(story: Story) -> list[HandlerStarted]:
    """Every handler that was started."""
    return [e for e in story.world.events if isinstance(e, HandlerStarted)]
