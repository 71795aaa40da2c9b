"""What a seed stands for: the cluster, its jobs, and which faults befall it. Drawn, never chosen."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from anarchon_server.core.limits import HEARTBEAT_SHARE_MIN, default_heartbeat, lease_margin
from anarchon_server.core.model import CronSchedule, EverySchedule, JobSpec, OverlapPolicy

STARTED_BY = 4_000
"""By when a cluster is expected to be up, before the first fault."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's handlers do. Durations in milliseconds, drawn for each between two bounds.

    A share `fails` raises; a share `ignores` does not listen to cancellations.
    """

    duration_ms: tuple[int, int] = (10, 300)
    step_ms: tuple[int, int] = (40, 250)
    obeys_within_ms: int = 100
    fails: float = 0.0
    ignores: float = 0.0


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job, and what its handlers do. `later` is its schedule after a deploy (None: the same)."""

    spec: JobSpec
    work: Work = Work()
    later: EverySchedule | CronSchedule | None = None

    def of_version(self, version: int) -> JobSpec:
        """The spec as a deploy of that version has it."""
        if version == 0 or self.later is None:
            return self.spec
        return replace(self.spec, schedule=self.later)

    @property
    def lease_ms(self) -> int:
        """The lease, which simulated jobs always set."""
        assert self.spec.lease_ms is not None
        return self.spec.lease_ms

    @property
    def heartbeat_ms(self) -> int:
        """The heartbeat."""
        return self.spec.heartbeat_ms or default_heartbeat(self.lease_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation.

    `boot_leases`: the store is the machine's own, and all instances are on that machine.
    `hop_ms` bounds a message's way between store and sidecar, or sidecar and client, while
    nothing disturbs it. `faults` names the kinds that may happen, `fault_count` of them between
    `STARTED_BY` and `calm_at`; from then on nothing goes wrong until `end_at`.
    """

    seed: int
    jobs: tuple[SimJob, ...]
    hosts: int = 3
    boot_leases: bool = True
    sessions: int = 1
    max_concurrency: int = 10
    hop_ms: int = 3
    op_timeout_ms: int = 2_000
    notifies: bool = True
    stop_grace_ms: int = 2_000
    prune_every_ms: int = 60_000
    history_ms: int = 14 * 86_400_000
    history_max: int = 1_000
    watchable: bool = True
    faults: tuple[str, ...] = ()
    fault_count: int = 0
    calm_at: int = 25_000
    end_at: int = 45_000
    clock_error_ms: int = 50
    real_clients: bool = False
    """Whether the sessions are those of the client package, or in the fewest words."""
    starts: tuple[int, ...] = ()
    """When each host starts; the others within half a second."""


def draw_plan(
    seed: int,
    kinds: tuple[str, ...],
    machine_kinds: tuple[str, ...],
    network_kinds: tuple[str, ...],
) -> Plan:
    """The simulation of a seed, with faults of these kinds. `machine_kinds` only befall a store
    that is the machine's own, `network_kinds` only one that is not.
    """
    rng = random.Random(seed)
    boot_leases = rng.random() < 0.5
    jobs = tuple(_draw_job(rng, f"job{n}") for n in range(rng.choice((1, 2, 2, 3))))
    elsewhere = network_kinds if boot_leases else machine_kinds
    prunes = rng.random() < 0.3
    possible = [k for k in kinds if k not in elsewhere]
    if boot_leases and prunes:
        # Pruning under a machine's clock that is ahead raises the floor (S2) above what is to come.
        possible.remove("store_clock")
    enabled = tuple(rng.sample(possible, rng.randint(1, min(6, len(possible)))))
    hop_ms = rng.choice((1, 3, 10, 20))
    calm_at = rng.randint(15_000, 30_000)
    longest_lease = max(job.lease_ms for job in jobs)
    longest_deadline = max(_longest_deadline(job.spec) for job in jobs)
    return Plan(
        seed=seed,
        jobs=jobs,
        hosts=rng.choice((2, 3, 3, 4)),
        boot_leases=boot_leases,
        sessions=rng.choice((1, 1, 2)),
        max_concurrency=rng.choice((1, 2, 5)),
        hop_ms=hop_ms,
        op_timeout_ms=rng.choice((500, 2_000)),
        notifies=rng.random() < 0.5,
        stop_grace_ms=rng.choice((0, 500, 2_000)),
        prune_every_ms=rng.choice((1_000, 3_000)) if prunes else 60_000,
        history_ms=rng.choice((1_000, 8_000)) if prunes else 86_400_000,
        history_max=rng.choice((3, 20)) if prunes else 1_000,
        watchable=rng.random() < 0.5,
        faults=enabled,
        fault_count=rng.choice((0, 1, 2, 4, 8)),
        calm_at=calm_at,
        end_at=calm_at + 6_000 + 3 * longest_lease + longest_deadline,
        clock_error_ms=3 * hop_ms,
        real_clients=rng.random() < 0.5,
    )


def _draw_job(rng: random.Random, name: str) -> SimJob:
    lease = rng.choice((3_000, 3_000, 3_000, 5_000))
    heartbeat = rng.choice((None, lease // HEARTBEAT_SHARE_MIN, rng.randint(300, lease // 3)))
    period = rng.choice((700, 1_000, 2_000, 3_000, 5_000, 7_000))
    schedule: EverySchedule | CronSchedule = EverySchedule(period, rng.choice((0, 0, period // 3)))
    if rng.random() < 0.1:
        period, schedule = 5_000, CronSchedule("*/5 * * * * *")
    jitter = rng.choice((None, 0, rng.randint(1, min(period - 1, 1_500))))
    longest_jitter = min(2_000, period // 4) if jitter is None else jitter
    deadline = rng.choice((None, longest_jitter + 1_000 + rng.randint(0, 2_000)))
    work = Work(
        duration_ms=rng.choice(((5, 200), (100, 2_000), (period // 2, 2 * period), (500, 9_000))),
        step_ms=rng.choice(((20, 100), (50, 400))),
        obeys_within_ms=rng.choice((0, 50, lease_margin(lease) - 100)),
        fails=rng.choice((0.0, 0.2)),
        ignores=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )
    later = EverySchedule(rng.choice((1_500, 2_500, 4_000))) if rng.random() < 0.7 else None
    spec = JobSpec(
        name,
        schedule,
        jitter_ms=jitter,
        timeout_ms=rng.choice((None, None, rng.randint(300, 5_000))),
        heartbeat_ms=heartbeat,
        lease_ms=lease,
        overlap=rng.choice((None, OverlapPolicy.SKIP, OverlapPolicy.ALLOW)),
        catch_up_window_ms=rng.choice((None, 5_000, 20_000)),
        catch_up_limit=rng.choice((0, 1, 3)),
        start_deadline_ms=deadline,
        max_attempts=rng.choice((0, 1, 2, 4)),
        concurrency=rng.choice((0, 0, 1, 2)),
        cancel_grace_ms=rng.choice((None, 0, 500)),
        stop_grace_ms=rng.choice((None, 0, 1_000)),
    )
    return SimJob(spec, work, later)


def _longest_deadline(spec: JobSpec) -> int:
    return 7_000 if spec.start_deadline_ms is None else spec.start_deadline_ms
