"""A whole simulated cluster: hosts, the store, what goes wrong, and the history it leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import zip_longest
from unittest.mock import patch

from anarchon_server.core import limits
from anarchon_server.core.asking import resume_of, trigger_of
from anarchon_server.core.model import JobSpec
from anarchon_server.core.policy import Job, read_schedule, resolve
from anarchon_server.core.store import CancelRun, ControlOutcome, Pause
from tests.checker.check import Violation, check
from tests.checker.events import (
    ClockStepped,
    Event,
    HistoryEnded,
    JobKnown,
    JobPaused,
    JobResumed,
    LeasesEnded,
    Note,
    SlotDue,
)
from tests.simulation.host import SETTLES_MS, Host
from tests.simulation.plan import Plan, SimJob, Work
from tests.simulation.storage import Storage, Stretch
from tests.simulation.timeline import SimClock, Timeline

RESUMES_WITHIN_MS = 20_000
"""A sidecar whose host's clock is further from the store's neither resumes nor triggers (S1)."""

SLOTS_MOST = 20_000
"""Of one stretch of a schedule; a clock that jumps ahead makes many slots due."""


@dataclass
class World:
    """One simulation: `run` lets it happen, `violations` judges it."""

    plan: Plan

    def __post_init__(self) -> None:
        plan = self.plan
        self.rng = random.Random(plan.seed + 1)
        self.timeline = Timeline()
        self.events: list[Event] = []
        self._numbers = 0
        machine = SimClock(self.timeline)
        self.storage = Storage(
            self.timeline,
            machine,
            plan.boot_leases,
            self.record,
            self._freed,
            leases=plan.leases,
            kept_ms=plan.kept_ms,
        )
        self.hosts = [
            Host(self, n, self._host_clock(machine), self._rng()) for n in range(plan.hosts)
        ]
        for host, start in zip_longest(self.hosts, plan.starts[: plan.hosts]):
            self.timeline.at(self.rng.randint(0, 500) if start is None else start, host.start)

    def _host_clock(self, machine: SimClock) -> SimClock:
        """The machine's own where all share it, else one that runs by itself."""
        if self.plan.boot_leases:
            return machine
        booted_at = -self.rng.randint(0, 10**9)
        return SimClock(self.timeline, booted_at, wrong_by_ms=self.rng.randint(-5_000, 5_000))

    def _rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    # ── For those who take part ─────────────────────────────────────────────────────────────────

    def record(self, event: Event) -> None:
        """Adds to the history."""
        self.events.append(event)

    def note(self, text: str) -> None:
        """Adds a remark to the history."""
        self.record(Note(self.timeline.now, text))

    def next_number(self) -> int:
        """A number that was not used before."""
        self._numbers += 1
        return self._numbers

    def job(self, name: str) -> SimJob:
        """A job by its name."""
        return next(job for job in self.plan.jobs if job.spec.name == name)

    def work_of(self, name: str) -> Work:
        """What the job's handlers do."""
        return self.job(name).work

    @property
    def longest_lease_ms(self) -> int:
        """The longest lease of all jobs."""
        return max(job.lease_ms for job in self.plan.jobs)

    def set_store_clock(self, by_ms: int) -> None:
        """Moves the store's wall clock: the machine's, where it has none of its own."""
        clock = self.storage.clock
        clock.set_wall(clock.wrong_by_ms + by_ms)
        self.record(ClockStepped(self.timeline.now, by_ms))
        for host in self.hosts:
            host.disturb(0)

    # ── What operators do ───────────────────────────────────────────────────────────────────────

    def pause(self, job: str) -> None:
        """An operator pauses a job, unless it is paused."""
        view = self.storage.job(job)
        if view is not None and view.paused_at is None:
            self.storage.control(Pause(job))
            self.record(JobPaused(self.timeline.now, job))

    def resume(self, job: str) -> None:
        """An operator resumes it, as soon as the store's clock is right (S1)."""
        view, clock = self.storage.job(job), self.storage.clock
        if view is None or view.paused_at is None:
            return
        done = False
        if abs(clock.wrong_by_ms) <= RESUMES_WITHIN_MS:
            act = resume_of(view, self._resolve, clock.wall_ms())
            done = self.storage.control(act).outcome is ControlOutcome.DONE
        if done:
            self.record(JobResumed(self.timeline.now, job))
        else:
            self.timeline.after(50, lambda: self.resume(job))

    def trigger(self, job: str, request_id: str) -> None:
        """An operator triggers a run."""
        view, clock = self.storage.job(job), self.storage.clock
        if view is not None and abs(clock.wrong_by_ms) <= RESUMES_WITHIN_MS:
            self.storage.control(trigger_of(view, self._resolve, request_id, b"", clock.wall_ms()))

    def cancel(self, job: str, slot: int) -> None:
        """An operator cancels a run."""
        self.storage.control(CancelRun(job, slot, "cancelled by hand"))

    def _resolve(self, spec: JobSpec) -> Job:
        capabilities = self.storage.connect().capabilities
        return resolve(spec, capabilities, self._default_lease_ms, self.storage.clock.wall_ms())

    @property
    def _default_lease_ms(self) -> int:
        return min(job.lease_ms for job in self.plan.jobs)

    def reboot(self) -> None:
        """The machine of all boots anew: no process survives, and no lease."""
        for host in self.hosts:
            host.kill_app(None, seen=False)
            host.kill_sidecar(None)
            for zombie in host.zombies:
                zombie.die()
        self.storage.clock.reboot()
        self.record(LeasesEnded(self.timeline.now))

    def _freed(self) -> None:
        """A run was freed, and the store tells those who listen."""
        if not self.plan.notifies:
            return
        for host in self.hosts:
            if host.sidecar is not None and not host.sidecar.weather.silent:
                sidecar = host.sidecar
                self.timeline.after(self.rng.randint(0, self.plan.hop_ms), sidecar.woken)

    # ── The run ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Lets everything happen, then completes the history with the facts to judge it by.

        With few jobs a registration has parts only where a part is one job.
        """
        with (
            patch.object(limits, "UNKNOWN_ASKED_FOR", self.plan.asked_for_ms),
            patch.object(limits, "REGISTER_BATCH", 1),
        ):
            self.timeline.run_until(self.plan.end_at)
        self.events[:0] = [*self._jobs_known(), *self._slots_due()]
        self.record(HistoryEnded(self.timeline.now))

    def violations(self) -> list[Violation]:
        """What the history breaks."""
        return check(self.events)

    def _jobs_known(self) -> list[JobKnown]:
        plan = self.plan
        slack = 10 * plan.hop_ms + 50
        heartbeat = max(job.heartbeat_ms for job in plan.jobs)
        known = []
        for sim_job in plan.jobs:
            job = self._resolved(sim_job, 0)
            witness = job.lease_ms + 2 * heartbeat
            known.append(
                JobKnown(
                    at=0,
                    job=job.name,
                    overlap=job.overlap == "allow",
                    max_attempts=job.max_attempts,
                    margin_ms=job.margin_ms,
                    takeover_ms=1_000 + slack,
                    handover_ms=slack + (1_000 if plan.notifies else heartbeat * 11 // 10),
                    witness_ms=2 * heartbeat if plan.boot_leases else witness,
                    keeps_ms=2 * heartbeat + slack,
                    cancel_ms=job.cancel_grace_ms + job.lease_ms + slack,
                    clock_error_ms=plan.clock_error_ms,
                    clock_learned_ms=(limits.CLOCK_SAMPLES + 1) * heartbeat * 11 // 10,
                    waiting_ms=slack + 1_000 + 2 * heartbeat * 11 // 10,
                    timeout_ms=job.spec.timeout_ms or 0,
                    leases=plan.leases,
                    late_ms=0 if plan.kept_ms is None else plan.late_max_ms + slack,
                )
            )
        return known

    def _resolved(self, job: SimJob, version: int) -> Job:
        capabilities = self.storage.connect().capabilities
        return resolve(
            job.of_version(version), capabilities, job.lease_ms, self.storage.clock.wall_ms()
        )

    def _slots_due(self) -> list[SlotDue]:
        due: list[SlotDue] = []
        for sim_job in self.plan.jobs:
            jobs = [self._resolved(sim_job, version) for version in (0, 1)]
            versions = {job.schedule_id: job for job in jobs}
            stretches = [s for s in self.storage.stretches if s.job == sim_job.spec.name]
            for stretch in stretches:
                due += self._slots_of(stretch, versions[stretch.schedule_id], len(stretches) == 1)
        return due

    def _slots_of(self, stretch: Stretch, job: Job, exact: bool) -> list[SlotDue]:
        clock, now = self.storage.clock, self.timeline.now
        schedule = read_schedule(job.spec)
        held = not stretch.ended and any(
            host.sidecar is not None
            and host.sidecar.registered.get(stretch.job) == stretch.schedule_id
            for host in self.hosts
        )
        planned_by = now - SETTLES_MS
        slots: list[SlotDue] = []
        slot = schedule.next_after(stretch.since)
        newest = max(clock.wall_ms(), stretch.settled)
        while slot is not None and slot <= newest and len(slots) < SLOTS_MOST:
            following = schedule.next_after(slot)
            deadline = job.start_deadline(slot, following)
            at = clock.first_showed(slot, stretch.begun_at)
            missed_at = clock.first_showed(slot + deadline + 1, at)
            past_since = clock.showing_since(slot + deadline + 1)
            past = past_since is not None and past_since <= planned_by
            required = slot <= stretch.settled or (held and past)
            required = required and not stretch.is_passed(slot)
            slots.append(
                SlotDue(
                    at, stretch.job, stretch.schedule_id, slot, deadline, missed_at, required, exact
                )
            )
            slot = following
        return slots
