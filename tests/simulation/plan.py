"""What a seed stands for: the cluster, its jobs, and which faults befall it. Drawn, never chosen."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from anarchon_server.core.limits import (
    HEARTBEAT_SHARE_MIN,
    LEASE_MIN,
    UNKNOWN_ASKED_FOR,
    default_heartbeat,
    lease_margin,
)
from anarchon_server.core.model import (
    CatchUpPolicy,
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
)

NEED_A_CLOCK = ("pause_job", "trigger_run", "cancel_run")
"""What operators cannot do on a claim-only store whose claim cannot look at a clock."""

STARTED_BY = 4_000
"""By when a cluster is expected to be up, before the first fault."""
SHORTEST_GAP = 1_500
"""Of the schedules that jobs have after a deploy; a jitter is shorter."""
WITHOUT_LEASES = 0.2
"""The share of all seeds whose store keeps no leases."""
WITHOUT_A_CLOCK = 0.4
"""The share of those whose store's claim cannot look at a clock."""
ASKED_FOR_MS, RECORD_OVER_MS = 9_000, 20_000
"""Of those, shorter by as much as a simulation is than an outage: for how long after its deadline an
unknown claim is asked again, and for how long after it the record of its winner is kept at least (S10).
Between them lies whatever comes late.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's handlers do. Durations in milliseconds, drawn for each between two bounds.

    A share `fails` raises, of which a share `permanent` forbids a retry, and a share `asks` asks for a
    pause of its own before it; a share `ignores` does not listen to cancellations.
    """

    duration_ms: tuple[int, int] = (10, 300)
    step_ms: tuple[int, int] = (40, 250)
    obeys_within_ms: int = 100
    fails: float = 0.0
    permanent: float = 0.0
    asks: float = 0.0
    ignores: float = 0.0


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job, and what its handlers do. `later` is its schedule after a deploy (None: the same).

    `default_lease_ms` is the sidecar's, for jobs that set none, as all must on claim-only stores.
    """

    spec: JobSpec
    work: Work = Work()
    later: EverySchedule | CronSchedule | None = None
    default_lease_ms: int = LEASE_MIN

    def of_version(self, version: int) -> JobSpec:
        """The spec as a deploy of that version has it."""
        if version == 0 or self.later is None:
            return self.spec
        return replace(self.spec, schedule=self.later)

    @property
    def lease_ms(self) -> int:
        """The lease; without leases, that of which the session's time is made."""
        return self.spec.lease_ms or self.default_lease_ms

    @property
    def heartbeat_ms(self) -> int:
        """The heartbeat."""
        return self.spec.heartbeat_ms or default_heartbeat(self.lease_ms)


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulation.

    `boot_leases`: the store is the machine's own, and all instances are on that machine.
    `leases` false: it is claim-only; `kept_ms`: its claim cannot look at a clock, and it knows for
    so long who won (None: it can, and knows). `asked_for_ms` is S10's bound of the engine's asking.
    `hop_ms` bounds a message's way between store and sidecar, or sidecar and client, while
    nothing disturbs it; a request that was given up may come to the store late by `late_max_ms`.
    `faults` names the kinds that may happen, `fault_count` of them between
    `STARTED_BY` and `calm_at`; from then on nothing goes wrong until `end_at`.
    """

    seed: int
    jobs: tuple[SimJob, ...]
    hosts: int = 3
    boot_leases: bool = True
    leases: bool = True
    kept_ms: int | None = None
    asked_for_ms: int = UNKNOWN_ASKED_FOR
    sessions: int = 1
    max_concurrency: int = 10
    hop_ms: int = 3
    op_timeout_ms: int = 2_000
    late_max_ms: int = 8_000
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
    leases: bool | None = None,
) -> Plan:
    """The simulation of a seed, with faults of these kinds. `machine_kinds` only befall a store
    that is the machine's own, `network_kinds` only one that is not. `leases`: whether the store
    keeps them (None: the seed says).
    """
    rng = random.Random(seed)
    leases = has_leases(seed) if leases is None else leases
    boot_leases = rng.random() < 0.5 and leases
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
    plan = Plan(
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
        end_at=calm_at + 6_000 + 3 * longest_lease + longest_deadline(jobs),
        clock_error_ms=3 * hop_ms,
        real_clients=rng.random() < 0.5,
    )
    return plan if leases else without_leases(plan, random.Random(f"without leases {seed}"))


def has_leases(seed: int) -> bool:
    """Whether the store of a seed keeps leases."""
    return random.Random(f"leases {seed}").random() >= WITHOUT_LEASES


def without_leases(plan: Plan, rng: random.Random) -> Plan:
    """The plan on a claim-only store: its jobs set nothing that needs a lease."""
    clockless = rng.random() < WITHOUT_A_CLOCK
    lease_ms = min(job.lease_ms for job in plan.jobs)
    return replace(
        plan,
        leases=False,
        jobs=tuple(_claim_only(job, lease_ms, rng) for job in plan.jobs),
        kept_ms=longest_deadline(plan.jobs) + RECORD_OVER_MS if clockless else None,
        asked_for_ms=ASKED_FOR_MS if clockless else UNKNOWN_ASKED_FOR,
        faults=tuple(each for each in plan.faults if not (clockless and each in NEED_A_CLOCK)),
        end_at=plan.end_at + (2 * ASKED_FOR_MS if clockless else 0),
        # By age also what has not ended goes (S30), so that it is never shorter than a run.
        history_ms=max(plan.history_ms, 86_400_000),
    )


def _claim_only(job: SimJob, lease_ms: int, rng: random.Random) -> SimJob:
    spec = replace(
        job.spec,
        lease_ms=None,
        heartbeat_ms=None,
        max_attempts=0,
        overlap=rng.choice((None, OverlapPolicy.ALLOW)),
        catch_up=rng.choice((None, CatchUpPolicy.NONE)),
        catch_up_window_ms=None,
        catch_up_limit=0,
    )
    return replace(job, spec=spec, default_lease_ms=lease_ms)


def _draw_job(rng: random.Random, name: str) -> SimJob:
    lease = rng.choice((3_000, 3_000, 3_000, 5_000))
    heartbeat = rng.choice((None, lease // HEARTBEAT_SHARE_MIN, rng.randint(300, lease // 3)))
    period = rng.choice((700, 1_000, 2_000, 3_000, 5_000, 7_000))
    schedule: EverySchedule | CronSchedule = EverySchedule(period, rng.choice((0, 0, period // 3)))
    if rng.random() < 0.1:
        period, schedule = 5_000, CronSchedule("*/5 * * * * *")
    jitter = rng.choice((None, 0, min(rng.randint(1, min(period - 1, 1_500)), SHORTEST_GAP - 1)))
    longest_jitter = min(2_000, period // 4) if jitter is None else jitter
    deadline = rng.choice((None, longest_jitter + 1_000 + rng.randint(0, 2_000)))
    work = Work(
        duration_ms=rng.choice(((5, 200), (100, 2_000), (period // 2, 2 * period), (500, 9_000))),
        step_ms=rng.choice(((20, 100), (50, 400))),
        obeys_within_ms=rng.choice((0, 50, lease_margin(lease) - 100)),
        fails=rng.choice((0.0, 0.2)),
        permanent=0.15,
        asks=0.15,
        ignores=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )
    overlap = rng.choice((None, *OverlapPolicy, OverlapPolicy.QUEUE, OverlapPolicy.CANCEL))
    catch_ups = [None, CatchUpPolicy.NONE, CatchUpPolicy.LATEST, CatchUpPolicy.ALL]
    if overlap is OverlapPolicy.CANCEL:
        catch_ups.pop()
    later = EverySchedule(rng.choice((SHORTEST_GAP, 2_500, 4_000))) if rng.random() < 0.7 else None
    spec = JobSpec(
        name,
        schedule,
        jitter_ms=jitter,
        timeout_ms=rng.choice((None, None, rng.randint(300, 5_000))),
        heartbeat_ms=heartbeat,
        lease_ms=lease,
        overlap=overlap,
        catch_up=rng.choice(catch_ups),
        catch_up_window_ms=rng.choice((None, 5_000, 20_000)),
        catch_up_limit=rng.choice((0, 1, 3)),
        start_deadline_ms=deadline,
        max_attempts=rng.choice((0, 1, 2, 4)),
        retry=rng.choice((None, RetrySpec(rng.randint(1, 3), rng.randint(0, 1_500), 1.5, 2_000))),
        concurrency=rng.choice((0, 0, 1, 2)),
        cancel_grace_ms=rng.choice((None, 0, 500)),
        stop_grace_ms=rng.choice((None, 0, 1_000)),
    )
    return SimJob(spec, work, later)


def longest_deadline(jobs: tuple[SimJob, ...]) -> int:
    """The longest time within which a slot of these jobs must start, or nearly so."""
    deadlines = (job.spec.start_deadline_ms for job in jobs)
    return max(7_000 if deadline is None else deadline for deadline in deadlines)
