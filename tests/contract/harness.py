"""What the contract suite is written in: a cluster of instances on one store, with its time.

A backend joins the suite by one entry in `BACKENDS`, or in `CLAIM_ONLY` where it has no leases.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from anarchon_backends import sqlite
from anarchon_backends.memory import MemoryDatabase, MemoryStore
from anarchon_server.core.model import (
    Definition,
    EverySchedule,
    Instance,
    JobSpec,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import (
    Beat,
    BeatAnswer,
    CancelRun,
    Capabilities,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    Control,
    ControlAnswer,
    ControlOutcome,
    MissedSlot,
    OpenOptions,
    Passed,
    Pause,
    Plan,
    PlanAnswer,
    PrunePolicy,
    Registration,
    Release,
    Renewal,
    Reply,
    Resume,
    RunQuery,
    Store,
    TokenAnswer,
    TriggerRun,
)
from anarchon_server.opening import open_store
from tests.servers import nats, postgres, rabbitmq, redis, redis_cluster

T0 = 1_800_000_000_000  # when a cluster's time begins, and where its jobs are settled to
SECOND = 1_000
DAY = 24 * 3_600 * SECOND
PERIOD = 10 * SECOND
LEASE = 30 * SECOND
JOB = "job"
SCHEDULE = "every:10s"


@dataclass
class FakeClock:
    """The machine's clocks, moved by hand."""

    wall: int = T0 * 1_000
    boot: int = 5_000
    boot_id: str = "boot-1"

    def wall_us(self) -> int:
        return self.wall

    def boot_ms(self) -> int:
        return self.boot


class Database(Protocol):
    """One store's data, to which each instance of a cluster connects.

    `url` is what another process opens it by (empty: no other process can).
    """

    url: str

    def store(self, options: OpenOptions) -> Store:
        """A connection, not open yet."""
        ...


class _Memory:
    url = ""

    def __init__(self, directory: Path, *, boot_leases: bool = True, leases: bool = True) -> None:
        self._database = MemoryDatabase()
        self._boot_leases = boot_leases
        self._leases = leases

    def store(self, options: OpenOptions) -> Store:
        kind = replace(options, boot_leases=self._boot_leases, leases=self._leases)
        return MemoryStore(self._database, kind)


class _Sqlite:
    def __init__(self, directory: Path) -> None:
        self.url = f"sqlite://{directory}/anarchon.db"

    def store(self, options: OpenOptions) -> Store:
        return sqlite.open_store(self.url, options)


class _Postgres:
    def __init__(self, directory: Path) -> None:
        self.url = postgres.new_schema()

    def store(self, options: OpenOptions) -> Store:
        return postgres.open_virtual(self.url, options)


class _Redis:
    kind = "redis"

    def __init__(self, directory: Path, strategy: str = "lease") -> None:
        self.url = redis.fresh_url(self.kind, strategy)

    def store(self, options: OpenOptions) -> Store:
        return redis.open_virtual(self.url, options)


class _Redis8(_Redis):
    kind = "redis8"


class _Valkey(_Redis):
    kind = "valkey"


class _RedisCluster(_Redis):
    def __init__(self, directory: Path, strategy: str = "lease") -> None:
        self.url = redis_cluster.fresh_url(self.kind, strategy)


class _Rabbitmq:
    def __init__(self, kind: str, options: str = "") -> None:
        self.url = rabbitmq.fresh_url(kind, options)

    def store(self, options: OpenOptions) -> Store:
        return rabbitmq.open_virtual(self.url, options)


class _NatsLease:
    def __init__(self, directory: Path) -> None:
        self.url = nats.fresh_url("lease")

    def store(self, options: OpenOptions) -> Store:
        return nats.open_virtual(self.url, options)


class _NatsClaim:
    def __init__(self, directory: Path) -> None:
        self.url = nats.fresh_url()

    def store(self, options: OpenOptions) -> Store:
        return nats.open_virtual(self.url, options)


class _NatsClaimCluster(_NatsClaim):
    def __init__(self, directory: Path) -> None:
        self.url = nats.fresh_cluster_url()


BACKENDS: dict[str, Callable[[Path], Database]] = {
    "memory": _Memory,
    "memory-wall": lambda directory: _Memory(directory, boot_leases=False),
    "sqlite": _Sqlite,
    "postgres": _Postgres,
    "redis": _Redis,
    "redis-cluster": _RedisCluster,
    "valkey": _Valkey,
    "nats-lease": _NatsLease,
}


_URLS = {
    "memory": "memory:",
    "sqlite": "sqlite:anarchon.db",
    "postgres": "postgresql://localhost/anarchon",
    "redis": "redis://localhost",
    "valkey": "redis://localhost",
    "nats": "nats://localhost?strategy=lease",
}


def able(can: Callable[[Capabilities], bool]) -> list[str]:
    """The backends that can do something, by what they say of themselves before they are opened."""
    options = OpenOptions("default", FakeClock())
    kinds = {name: name.partition("-")[0] for name in BACKENDS}
    return [name for name in BACKENDS if can(open_store(_URLS[kinds[name]], options).capabilities)]


CLAIM_ONLY: dict[str, Callable[[Path], Database]] = {
    "memory-claim": lambda directory: _Memory(directory, leases=False),
    "nats": _NatsClaim,
    "nats-cluster": _NatsClaimCluster,
    "redis-script": lambda directory: _Redis(directory, "script"),
    "redis-stream-id": lambda directory: _Redis(directory, "stream-id"),
    "redis-idmp": lambda directory: _Redis8(directory, "idmp"),
    "redis-cluster-script": lambda directory: _RedisCluster(directory, "script"),
    "valkey-script": lambda directory: _Valkey(directory, "script"),
    "rabbitmq": lambda directory: _Rabbitmq("rabbitmq"),
    "rabbitmq4": lambda directory: _Rabbitmq("rabbitmq4"),
    "rabbitmq-new": lambda directory: _Rabbitmq("rabbitmq-new", "?queue_type=quorum"),
}
"""The backends without leases, which run the suite in `claim_only`."""


def definition(
    job: str = JOB,
    period: int = PERIOD,
    *,
    schedule: str = "",
    window: int = DAY,
    **spec: Any,
) -> Definition:
    """A definition of `job`, due every `period` (0: it has no schedule)."""
    every = EverySchedule(period) if period else None
    schedule_id = schedule or (f"every:{period // SECOND}s" if period else "")
    return Definition(JobSpec(job, every, **spec), schedule_id, window)


def slots_of(schedule: str, after: int, until: int) -> tuple[int, ...]:
    """The slots of `every:Ns` after one moment and up to another."""
    period = int(schedule.removeprefix("every:").removesuffix("s")) * SECOND
    return tuple(range((after // period + 1) * period, until + 1, period))


class Node:
    """One instance: its connection, and what it asks of the store, with usual values."""

    def __init__(self, cluster: Cluster, store: Store, name: str, incarnation: str) -> None:
        self.cluster = cluster
        self.store = store
        self.instance = Instance(name, incarnation, lease_ms=LEASE)
        self._tokens = (f"{incarnation}-{n}" for n in itertools.count(1))

    async def register(self, *definitions: Definition) -> list[Registration]:
        reply = await self.store.register(self.instance, definitions or (definition(),), ())
        return list(reply.answers)

    async def let_go(self, *jobs: str) -> None:
        """Hold nothing of these jobs any more."""
        await self.store.register(self.instance, (), jobs)

    def wish(self, slot: int, **given: Any) -> Claim:
        """A claim of a first attempt."""
        values: dict[str, Any] = {
            "job": JOB,
            "slot": slot,
            "token": given.get("token") or next(self._tokens),
            "instance_id": self.instance.instance_id,
            "incarnation": self.instance.incarnation,
            "schedule_id": SCHEDULE,
            "previous_slot": slot - PERIOD,
            "overlap": OverlapPolicy.SKIP,
            "start_deadline_ms": PERIOD,
            "lease_ms": LEASE,
            "cancel_grace_ms": 5 * SECOND,
            "max_attempts": 3,
            "window_ms": DAY,
            "expected_at": self.cluster.now,
            "vouched": True,
        }
        return Claim(**(values | given))

    async def claim(self, slot: int, **given: Any) -> ClaimAnswer:
        return await self.ask(self.wish(slot, **given))

    async def ask(self, claim: Claim) -> ClaimAnswer:
        (answer,) = (await self.store.claim([claim])).answers
        return answer

    async def win(self, slot: int, **given: Any) -> RunView:
        """Claims, and wins."""
        answer = await self.claim(slot, **given)
        assert answer.outcome is ClaimOutcome.WON, answer
        assert answer.run is not None
        return answer.run

    async def take_over(self, seen: RunView, **given: Any) -> ClaimAnswer:
        """Claims the attempt after the one that was seen."""
        run = seen.run
        before = {"job": run.job, "seen_attempt": run.attempt, "seen_token": run.token}
        return await self.claim(run.slot, **(before | given))

    def renewal(self, seen: RunView, **given: Any) -> Renewal:
        values: dict[str, Any] = {
            "job": seen.run.job,
            "slot": seen.run.slot,
            "token": seen.run.token,
            "instance_id": self.instance.instance_id,
            "incarnation": self.instance.incarnation,
            "lease_ms": LEASE,
        }
        return Renewal(**(values | given))

    async def renew(self, seen: RunView, **given: Any) -> TokenAnswer:
        answer = await self.beat(renewals=(self.renewal(seen, **given),))
        return answer.renewals[0]

    async def beat(self, **given: Any) -> BeatAnswer:
        (answer,) = (await self.beat_reply(**given)).answers
        return answer

    async def beat_reply(self, **given: Any) -> Reply[BeatAnswer]:
        return await self.store.beat(Beat(self.instance, **given))

    async def look(self, slot: int, job: str = JOB) -> RunView | None:
        return (await self.beat(looks=((job, slot),))).looks[0]

    async def settled(self, job: str = JOB, schedule: str = SCHEDULE) -> int | None:
        return (await self.beat(sweep=((job, schedule),))).settled[0]

    async def unfinished(self, job: str = JOB) -> list[RunView]:
        return list((await self.beat(sweep=((job, SCHEDULE),))).unfinished)

    async def complete(
        self,
        seen: RunView,
        outcome: Outcome | None = None,
        *,
        token: str = "",
        retry_in_ms: int | None = None,
    ) -> TokenAnswer:
        run, result = seen.run, outcome or Outcome(result="done")
        completion = Completion(run.job, run.slot, token or run.token, result, retry_in_ms)
        (answer,) = (await self.store.complete([completion])).answers
        return answer

    async def release(self, seen: RunView, reason: str = Reason.HANDED_OVER) -> TokenAnswer:
        run = seen.run
        release = Release(run.job, run.slot, run.token, self.instance.incarnation, reason)
        (answer,) = (await self.store.release([release])).answers
        return answer

    async def plan(
        self,
        slots: Sequence[int],
        *,
        settled: int = T0,
        deadline: int = PERIOD,
        job: str = JOB,
        schedule: str = SCHEDULE,
        **given: Any,
    ) -> PlanAnswer:
        missed = tuple(MissedSlot(slot, deadline) for slot in slots)
        (answer,) = (
            await self.store.settle([Plan(job, schedule, settled, missed, **given)])
        ).answers
        return answer

    async def control(self, act: Control) -> ControlAnswer:
        (answer,) = (await self.store.control([act])).answers
        return answer

    async def pause(self, reason: str = "", job: str = JOB) -> ControlAnswer:
        return await self.control(Pause(job, reason))

    async def resume(
        self,
        *,
        plans: Sequence[Plan] = (),
        schedules: Sequence[str] = (SCHEDULE,),
        job: str = JOB,
        **given: Any,
    ) -> ControlAnswer:
        """Resumes as the one who has just looked: what each schedule has settled is as it is."""
        (shown,) = (await self.store.jobs([job], "", 1)).answers
        until = self.cluster.now + SECOND
        passed: list[Passed] = []
        for schedule in schedules:
            settled = await self.settled(job, schedule)
            assert settled is not None
            passed.append(Passed(schedule, settled, slots_of(schedule, settled, until)))
        values: dict[str, Any] = {"job": job, "paused_at": shown.paused_at or 0, "until": until}
        values |= {"plans": tuple(plans), "passed": tuple(passed)}
        return await self.control(Resume(**(values | given)))

    async def trigger(self, request_id: str = "r-1", **given: Any) -> ControlAnswer:
        """Triggers the usual job, of whose slots none is near but those on the grid."""
        now = self.cluster.now
        values: dict[str, Any] = {
            "job": JOB,
            "request_id": request_id,
            "payload": b"",
            "slots": slots_of(SCHEDULE, now - 1, now + 10 * SECOND),
            "until": now + 10 * SECOND,
            "overlap": OverlapPolicy.SKIP,
            "window_ms": DAY,
        }
        return await self.control(TriggerRun(**(values | given)))

    async def triggered(self, request_id: str = "r-1", **given: Any) -> RunView:
        """The run that is made."""
        answer = await self.trigger(request_id, **given)
        assert answer.outcome is ControlOutcome.DONE
        assert answer.run is not None
        return answer.run

    async def cancel(self, slot: int, job: str = JOB) -> ControlAnswer:
        return await self.control(CancelRun(job, slot))

    async def seen(self, slot: int) -> RunView:
        """The run as a look shows it; it has a row."""
        seen = await self.look(slot)
        assert seen is not None
        return seen

    async def ended(self, slot: int) -> tuple[RunState, str]:
        """The run's state and reason, as history shows them."""
        seen = await self.run(slot)
        assert seen is not None
        return seen.run.state, seen.run.reason

    async def history(self, **query: Any) -> list[RunView]:
        return list((await self.store.runs(RunQuery(**query))).answers)

    async def paged(self, **query: Any) -> tuple[list[tuple[str, int]], int]:
        """All runs that are wanted, page after page, as (job, seconds after T0); and how many pages."""
        found: list[tuple[str, int]] = []
        pages, wish = 0, RunQuery(**query)
        while True:
            reply = await self.store.runs(wish)
            found += [(each.run.job, (each.run.slot - T0) // SECOND) for each in reply.answers]
            pages += 1
            after = reply.looked_to
            if len(reply.answers) == wish.limit:
                after = (reply.answers[-1].run.slot, reply.answers[-1].run.job)
            if after is None:
                return found, pages
            wish = replace(wish, after=after)

    async def run(self, slot: int, job: str = JOB) -> RunView | None:
        """The run with its attempts, as history shows it."""
        found = await self.history(job=job, slot=slot)
        return found[0] if found else None

    async def states(self, job: str = JOB) -> dict[int, RunState | tuple[RunState, str]]:
        """What became of each slot, in seconds after T0: its state, with its reason if any."""
        return {
            (seen.run.slot - T0) // SECOND: (
                (seen.run.state, seen.run.reason) if seen.run.reason else seen.run.state
            )
            for seen in reversed(await self.history(job=job, limit=500))
        }

    async def prune(
        self, history_ms: int = 14 * DAY, history_max: int = 1_000, batch: int = 200
    ) -> int:
        (gone,) = (await self.store.prune(PrunePolicy(history_ms, history_max, batch))).answers
        return gone


class ClaimOnlyNode(Node):
    """An instance on a store without leases. Its tokens are as the engine makes them."""

    def wish(self, slot: int, **given: Any) -> Claim:
        job = given.get("job", JOB)
        nonce = hashlib.sha256(next(self._tokens).encode()).hexdigest()[:32]
        usual = {"token": f"{slot}.{nonce}.{job}", "overlap": OverlapPolicy.ALLOW}
        return super().wish(slot, **(usual | given))


@dataclass
class Cluster:
    """Several instances on one store, and the time they share."""

    database: Database
    clock: FakeClock = field(default_factory=FakeClock)
    node_type: type[Node] = Node
    nodes: list[Node] = field(default_factory=list)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def now(self) -> int:
        """The store's time, in milliseconds."""
        return self.clock.wall // 1_000

    def advance(self, ms: int) -> None:
        """Time passes."""
        self.clock.wall += ms * 1_000
        self.clock.boot += ms

    def advance_to(self, at: int) -> None:
        self.advance(at - self.now)

    def step(self, ms: int) -> None:
        """The wall clock is set, and no time passes."""
        self.clock.wall += ms * 1_000

    def reboot(self, boot: int = 0) -> None:
        """The machine starts anew, and its boot-time clock at `boot`."""
        self.clock.boot_id += "x"
        self.clock.boot = boot

    async def node(
        self, name: str = "", *, namespace: str = "default", op_timeout_ms: int = 10_000
    ) -> Node:
        """Another instance, which has registered nothing yet."""
        number = len(self.nodes) + 1
        options = OpenOptions(namespace, self.clock, op_timeout_ms=op_timeout_ms)
        store = self.database.store(options)
        await store.open()
        self.stack.push_async_callback(store.close)
        node = self.node_type(self, store, name or f"host:{number}", f"inc-{number}")
        self.nodes.append(node)
        return node

    async def nodes_of(self, count: int) -> list[Node]:
        """Several instances that have registered the usual job."""
        nodes = [await self.node() for _ in range(count)]
        for node in nodes:
            await node.register()
        return nodes
