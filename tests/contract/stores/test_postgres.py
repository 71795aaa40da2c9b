"""PostgreSQL alone: unknown outcomes, its death, what its start refuses, and a pooler before it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from anarchon_backends.postgres import PostgresStore, open_store
from anarchon_backends.postgres._connection import Session
from anarchon_backends.postgres._sql import SCHEMA_VERSION, later_sql, schema_sql
from anarchon_backends.postgres._start import NUMBERS
from anarchon_backends.postgres._values import REGISTER_TYPES
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable
from anarchon_server.core.model import (
    CatchUpPolicy,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
)
from anarchon_server.core.store import (
    Beat,
    CancelRun,
    ClaimOutcome,
    Completion,
    OpenOptions,
    Release,
    Store,
)
from tests.contract.harness import (
    DAY,
    LEASE,
    PERIOD,
    T0,
    Cluster,
    FakeClock,
    Node,
    definition,
)
from tests.servers import postgres
from tests.servers.ports import free_port
from tests.servers.proxy import Proxy

SLOT = T0 + PERIOD
SHORT_MS = 1_000
SOON_S = 10


@dataclass
class Database:
    """A schema, which `store` opens by `open_by` (with the tests' clock, or the server's)."""

    url: str
    open_by: Callable[[str, OpenOptions], Store] = postgres.open_virtual

    def store(self, options: OpenOptions) -> Store:
        return self.open_by(self.url, options)


class RealClock(FakeClock):
    """This machine's clocks."""

    def wall_us(self) -> int:
        return time.time_ns() // 1_000

    def boot_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def through(url: str, port: int) -> str:
    """The URL by way of a proxy."""
    parts = urlsplit(url)
    return url.replace(f":{parts.port}/", f":{port}/", 1)


async def run_sql(url: str, *statements: str) -> Any:
    """Runs statements as the superuser, outside the store; gives the last one's first value."""
    connection = await asyncpg.connect(url.partition("?")[0])
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


def schema_of(url: str) -> str:
    return url.rpartition("schema=")[2]


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with Proxy(urlsplit(postgres.shared_url()).port or 0) as made:
        yield made


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(Database(postgres.new_schema()))
    async with made.stack:
        yield made


@pytest.fixture
async def far(cluster: Cluster, proxy: Proxy) -> Node:
    """An instance that reaches the store through the proxy, and has a second for a call."""
    near = cluster.database
    cluster.database = Database(through(near.url, proxy.port))
    node = await cluster.node(op_timeout_ms=SHORT_MS)
    cluster.database = near
    await node.register()
    cluster.advance_to(SLOT)
    return node


# Unknown outcomes (S11)


@pytest.fixture
def when_it_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something happen just before the next statement, or commit, that changes something."""

    def prepare(act: Callable[[], None]) -> None:
        acts = [act]

        def write(session: Any, value: bool) -> None:
            vars(session)["writing"] = value
            if value and acts:
                acts.pop()()

        setter = property(lambda session: vars(session)["writing"], write)
        monkeypatch.setattr(Session, "writing", setter, raising=False)

    return prepare


WhenItWrites = Callable[[Callable[[], None]], None]


async def test_s11_a_claim_whose_reply_was_cut_off_is_unknown_and_was_won(
    cluster: Cluster, far: Node, proxy: Proxy, when_it_writes: WhenItWrites
) -> None:
    other = await cluster.node()
    claim = far.wish(SLOT)
    await far.store.claim([])
    when_it_writes(proxy.cut_after_requests)
    with pytest.raises(OutcomeUnknown):
        await far.store.claim([claim])
    assert await asked_until_known(far, claim) is ClaimOutcome.WON
    again = await far.ask(claim)
    assert again.run is not None
    assert again.run.run.attempt == 1
    assert (await other.claim(SLOT)).outcome is ClaimOutcome.LOST


@pytest.mark.parametrize(
    "what", ["claim", "beat", "complete", "release", "register", "control", "prune"]
)
async def test_s11_a_call_whose_reply_does_not_come_is_unknown_in_time(
    far: Node, proxy: Proxy, what: str, when_it_writes: WhenItWrites
) -> None:
    run = (await far.win(SLOT)).run
    completion = Completion(run.job, run.slot, run.token, Outcome("done"))
    release = Release(run.job, run.slot, run.token, far.instance.incarnation, "handed_over")
    calls: dict[str, Callable[[], Any]] = {
        "claim": lambda: far.claim(SLOT),
        "beat": lambda: far.beat(),
        "complete": lambda: far.store.complete([completion]),
        "release": lambda: far.store.release([release]),
        "register": lambda: far.register(),
        "control": lambda: far.pause(),
        "prune": lambda: far.prune(),
    }
    when_it_writes(proxy.drop_replies)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        await calls[what]()
    assert time.monotonic() - began < 5 * SHORT_MS / 1_000
    proxy.resume()
    assert (await far.look(SLOT)) is not None, "on a new connection it goes on"


async def test_a_read_whose_reply_does_not_come_did_nothing(far: Node, proxy: Proxy) -> None:
    await far.beat()
    proxy.drop_replies()
    with pytest.raises(StoreUnavailable):
        await far.history()


async def test_a_server_that_is_not_there_did_nothing(far: Node, proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        await far.claim(SLOT)
    with pytest.raises(StoreUnavailable):
        await far.claim(SLOT)
    proxy.resume()
    assert (await far.claim(SLOT)).outcome is ClaimOutcome.WON, "it is back by itself"


async def test_s11_a_cancelled_calls_connection_is_thrown_away(far: Node, proxy: Proxy) -> None:
    claim = far.wish(SLOT)
    await far.beat()
    proxy.hold_replies()
    call = asyncio.create_task(far.ask(claim))
    async with asyncio.timeout(SOON_S):
        await proxy.held.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    proxy.resume()
    assert (await far.ask(claim)).outcome is ClaimOutcome.WON
    assert (await far.look(SLOT)) is not None


@pytest.mark.parametrize("cancelled", [True, False])
async def test_s11_a_claim_that_no_standby_confirmed_is_unknown_and_not_lost(
    cancelled: bool,
) -> None:
    """R3: cancelled while it waits, it is committed here, perhaps nowhere else, and answered."""
    server = postgres.start_server()
    try:
        postgres.prepare(server.url)
        cluster = Cluster(Database(postgres.new_schema(server.url)))
        async with cluster.stack:
            node = await cluster.node(op_timeout_ms=10_000 if cancelled else 1_000)
            await node.register()
            cluster.advance_to(SLOT)
            waits = "ALTER SYSTEM SET synchronous_standby_names = 'nobody'"
            await run_sql(server.url, waits, "SELECT pg_reload_conf()")
            claim = node.wish(SLOT)
            asking = asyncio.create_task(asked_until_it_waits(node, claim))
            if cancelled:
                await asyncio.to_thread(cancel_what_waits, server.url)
            with pytest.raises(OutcomeUnknown, match="canceling" if cancelled else "no answer"):
                await asking
            nobody = "ALTER SYSTEM RESET synchronous_standby_names"
            await run_sql(server.url, nobody, "SELECT pg_reload_conf()")
            async with asyncio.timeout(SOON_S):
                assert await asked_until_known(node, claim) is ClaimOutcome.WON
            answer = await node.ask(claim)
            assert answer.run is not None
            assert answer.run.run.attempt == 1
    finally:
        server.stop()


async def asked_until_it_waits(node: Node, claim: Any) -> None:
    """A setting is in force some moments after it was reloaded."""
    for _ in range(1_000):
        assert (await node.ask(claim)).outcome is ClaimOutcome.WON


def cancel_what_waits(url: str) -> None:
    waiting = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    while not postgres.run_sql(url, f"SELECT count(pg_cancel_backend(pid)) {waiting}"):
        pass


# Many at once


async def test_a_lock_that_others_hold_is_waited_for_a_second(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.register()
    cluster.advance_to(SLOT)
    url, schema = cluster.database.url, schema_of(cluster.database.url)
    stranger = await asyncpg.connect(url.partition("?")[0])
    try:
        async with stranger.transaction():
            await stranger.execute(f"SELECT FROM {schema}.job FOR UPDATE")
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                await node.claim(SLOT)
        assert (await node.claim(SLOT)).outcome is ClaimOutcome.WON
    finally:
        await stranger.close()


async def test_a_deadlock_with_strangers_is_repeated_by_itself(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.register(definition("a"), definition("b"))
    cluster.advance_to(SLOT)
    store = node.store
    assert isinstance(store, PostgresStore)
    (connection,) = store._pool._idle
    await connection.execute("SET deadlock_timeout = '700ms'")
    row = f"SELECT FROM {schema_of(cluster.database.url)}.job WHERE job = $1 FOR UPDATE"
    url = cluster.database.url.partition("?")[0]
    stranger, watcher = [await asyncpg.connect(url) for _ in range(2)]
    try:
        await stranger.execute("SET deadlock_timeout = '1min'")
        async with stranger.transaction():
            await stranger.fetch(row, "b")
            claiming = asyncio.create_task(
                node.store.claim([node.wish(SLOT, job="b"), node.wish(SLOT, job="a")])
            )
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            async with asyncio.timeout(SOON_S):
                while not await watcher.fetchval(waits):
                    pass
                await stranger.fetch(row, "a")  # given only when the claims were rolled back
        reply = await claiming
        assert [answer.outcome for answer in reply.answers] == ["won", "won"]
    finally:
        await stranger.close()
        await watcher.close()


def before_it_writes(node: Node, act: Callable[[], Awaitable[Any]]) -> None:
    """Has something happen once, after what the node's next call decides by was read."""
    store = node.store
    assert isinstance(store, PostgresStore)
    write = store._write

    async def after_the_act(*given: Any, **named: Any) -> Any:
        store._write = write  # type: ignore[method-assign]
        await act()
        return await write(*given, **named)

    store._write = after_the_act  # type: ignore[method-assign]


async def test_what_changed_between_reading_and_writing_is_decided_again(cluster: Cluster) -> None:
    """I3: a release is decided on a run that is completed before it is written."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)

    async def completes() -> None:
        assert (await second.complete(seen)).outcome == "recorded"

    before_it_writes(first, completes)
    assert (await first.release(seen)).outcome == "fenced"
    shown = await first.run(SLOT)
    assert shown is not None
    assert (shown.run.state, shown.run.current and shown.run.current.reason) == ("success", "")


async def test_a_takeover_that_was_decided_before_a_renewal_is_decided_again(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    cluster.advance(LEASE)

    async def renews() -> None:
        assert (await first.renew(seen)).outcome == "renewed"

    before_it_writes(second, renews)
    assert (await second.take_over(seen)).outcome is ClaimOutcome.LOST


async def test_s27a_a_batch_that_was_partly_decided_again_tells_all_fences(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    await first.register(definition("a"), definition("b"))
    cluster.advance_to(SLOT)
    a, b = [await first.win(SLOT, job=name) for name in ("a", "b")]
    cluster.advance(LEASE)

    async def renews() -> None:
        assert (await first.renew(b)).outcome == "renewed"

    before_it_writes(second, renews)
    seen = {"seen_attempt": 1, "start_deadline_ms": 10 * PERIOD}
    claims = [second.wish(SLOT, job=s.run.job, seen_token=s.run.token, **seen) for s in (a, b)]
    reply = await second.store.claim(claims)
    won, lost = reply.answers
    assert (won.outcome, lost.outcome) == ("won", "lost")
    assert won.run is not None
    assert won.run.run.current is not None
    assert b.run.current is not None
    assert reply.fences == {"a": won.run.run.current.fence, "b": b.run.current.fence}


async def test_i4_a_takeover_is_decided_by_the_jobs_other_runs_as_they_are_when_it_is_written(
    cluster: Cluster,
) -> None:
    """Both leases are over when it looks; the other run is renewed before it writes."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    older = await first.win(SLOT, overlap=OverlapPolicy.ALLOW)
    cluster.advance_to(SLOT + PERIOD)
    other = await first.win(SLOT + PERIOD, overlap=OverlapPolicy.ALLOW)
    cluster.advance(LEASE)

    async def renews() -> None:
        assert (await first.renew(other)).outcome == "renewed"

    before_it_writes(second, renews)
    assert (await second.take_over(older)).outcome is ClaimOutcome.QUEUED


async def test_s18_a_slot_is_not_queued_behind_a_run_that_has_ended_meanwhile(
    cluster: Cluster,
) -> None:
    """Nobody would be told that it waits: neither by the answer to the result nor as news."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    cluster.advance_to(SLOT + PERIOD)

    async def completes() -> None:
        answer = await first.complete(seen)
        assert (answer.outcome, answer.due) == ("recorded", None)

    before_it_writes(second, completes)
    answer = await second.claim(SLOT + PERIOD, overlap=OverlapPolicy.QUEUE)
    assert answer.outcome is ClaimOutcome.WON


async def test_s18_a_result_that_was_decided_before_a_slot_was_queued_tells_of_it(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT, retries=1)
    cluster.advance_to(SLOT + PERIOD)

    async def queues() -> None:
        answer = await second.claim(SLOT + PERIOD, overlap=OverlapPolicy.QUEUE)
        assert answer.outcome is ClaimOutcome.QUEUED

    before_it_writes(first, queues)
    gave_up = Outcome(failure=Failure("E", permanent=True))
    answer = await first.complete(seen, gave_up, retry_in_ms=1_000)
    assert answer.due is not None
    assert answer.due.run.slot == SLOT + PERIOD


@pytest.mark.parametrize("overlap", [OverlapPolicy.SKIP, OverlapPolicy.ALLOW])
async def test_s29_a_claim_that_was_decided_before_a_pause_does_not_win(
    cluster: Cluster, overlap: OverlapPolicy
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    before_it_writes(second, first.pause)
    two_of_a_job = [second.wish(slot, overlap=overlap) for slot in (SLOT, SLOT + 1)]
    reply = await second.store.claim(two_of_a_job)
    assert [answer.outcome for answer in reply.answers] == ["paused", "paused"]
    assert await first.states() == {}


async def test_s29_a_pause_skips_what_was_queued_after_it_looked(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    await first.win(SLOT)
    cluster.advance_to(SLOT + PERIOD)

    async def queues() -> None:
        answer = await second.claim(SLOT + PERIOD, overlap=OverlapPolicy.QUEUE)
        assert answer.outcome is ClaimOutcome.QUEUED

    before_it_writes(first, queues)
    await first.pause()
    assert await first.ended(SLOT + PERIOD) == (RunState.SKIPPED, Reason.PAUSED)


async def test_s29_a_request_that_was_made_elsewhere_meanwhile_gives_the_same_run(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    made: list[int] = []

    async def triggers() -> None:
        made.append((await second.triggered("r-1")).run.slot)

    before_it_writes(first, triggers)
    assert [(await first.triggered("r-1")).run.slot] == made
    assert len(await first.states()) == 1


async def test_s20_a_plan_that_was_decided_before_a_pause_changes_nothing(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT + 5 * PERIOD)
    before_it_writes(first, second.pause)
    answer = await first.plan([SLOT], catch_up=CatchUpPolicy.LATEST, window_ms=DAY)
    assert not answer.done
    assert await first.states() == {}


# Races

RACERS = 16


async def test_s29_sixteen_that_claim_one_run_that_is_due_have_one_winner(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(RACERS)
    cluster.advance_to(SLOT)
    for n in range(10):
        payload = f"payload {n}".encode()
        made = await nodes[n].triggered(f"r-{n}", payload=payload)
        answers = await asyncio.gather(*(node.claim(made.run.slot) for node in nodes))
        assert sorted(a.outcome for a in answers) == ["lost"] * (RACERS - 1) + ["won"]
        (won,) = [a for a in answers if a.outcome is ClaimOutcome.WON]
        assert (won.payload, won.run and won.run.run.attempt) == (payload, 1)
        assert won.run is not None
        await nodes[0].complete(won.run)


async def test_s29_no_claim_wins_that_began_after_a_pause_returned(cluster: Cluster) -> None:
    """Claims of the short way (one of a job) and of the long one, while the job is paused."""
    nodes = await cluster.nodes_of(RACERS)
    cluster.advance_to(T0 + 100 * PERIOD)
    wins, paused, under_load = 0, False, asyncio.Event()

    async def work(number: int) -> None:
        nonlocal wins
        given = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY}
        for turn in itertools.count():
            slot = T0 + 2 * (turn * RACERS + number) + 1
            slots = [slot, slot + 1][: 1 + number % 2]
            claims = [nodes[number].wish(s, previous_slot=s - 1, **given) for s in slots]
            too_late = paused
            outcomes = {a.outcome for a in (await nodes[number].store.claim(claims)).answers}
            if outcomes == {ClaimOutcome.PAUSED}:
                return
            assert outcomes == {ClaimOutcome.WON}
            assert not too_late
            wins += len(slots)
            if wins > 5 * RACERS:
                under_load.set()

    working = [asyncio.create_task(work(number)) for number in range(RACERS)]
    await under_load.wait()
    await (await cluster.node()).pause()
    paused = True
    await asyncio.gather(*working)
    rows = await nodes[0].history(limit=10_000)
    assert len(rows) == wins
    assert {seen.run.state for seen in rows} == {RunState.CLAIMED}


async def test_s29_a_request_of_sixteen_at_once_makes_one_run(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(RACERS)
    cluster.advance_to(SLOT)
    for n in range(5):
        one = {"overlap": OverlapPolicy.ALLOW, "payload": b"p"}
        made = await asyncio.gather(*(node.triggered(f"r-{n}", **one) for node in nodes))
        assert len({seen.run.slot for seen in made}) == 1
    different = await asyncio.gather(
        *(node.triggered(node.instance.instance_id, **one) for node in nodes)
    )
    assert len({seen.run.slot for seen in different}) == RACERS
    assert len(await nodes[0].states()) <= 5 + RACERS
    assert len(await nodes[0].history(limit=500)) == 5 + RACERS


# What the database says in words of its own


async def test_s19_a_sweep_that_shows_few_shows_what_can_be_taken_over_and_then_the_oldest(
    cluster: Cluster,
) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    due = await node.triggered(overlap=OverlapPolicy.ALLOW)
    cluster.advance_to(SLOT + PERIOD)
    held = await node.win(SLOT + PERIOD, overlap=OverlapPolicy.ALLOW)
    cluster.advance_to(SLOT + 2 * PERIOD)
    freed = await node.win(SLOT + 2 * PERIOD, overlap=OverlapPolicy.ALLOW)
    await node.release(freed)
    for limit, expected in ((1, [freed]), (2, [freed, due]), (3, [freed, due, held])):
        beat = await node.beat(sweep=(("job", "every:10s"),), sweep_limit=limit)
        slots = [seen.run.slot for seen in beat.unfinished]
        assert slots == [seen.run.slot for seen in expected]


async def test_s29_a_job_that_was_forgotten_is_not_paused_when_it_is_back(
    cluster: Cluster,
) -> None:
    (node,) = await cluster.nodes_of(1)
    await node.pause("why")
    await node.beat(leaving=True)
    cluster.advance(15 * DAY)
    await node.prune()
    assert (await node.store.jobs(["job"], "", 1)).answers == ()
    await node.register()
    (job,) = (await node.store.jobs(["job"], "", 1)).answers
    assert (job.paused_at, job.pause_reason) == (None, "")


# News


@pytest.fixture
async def heard(cluster: Cluster) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """How often there was news since the last look."""
    (node,) = await cluster.nodes_of(1)
    store = node.store
    assert isinstance(store, PostgresStore)
    channel = store._news.channel
    told: asyncio.Queue[str] = asyncio.Queue()
    connection = await asyncpg.connect(cluster.database.url.partition("?")[0])
    await connection.add_listener(channel, lambda *given: told.put_nowait(given[-1]))

    async def count() -> int:
        await connection.execute(f"NOTIFY {channel}, 'so far'")  # told in the order of commits
        times = 0
        async with asyncio.timeout(SOON_S):
            while await told.get() != "so far":
                times += 1
        return times

    yield count
    await connection.close()


async def test_s18_what_others_should_look_at_is_told_once_and_nothing_else(
    cluster: Cluster, heard: Callable[[], Awaitable[int]]
) -> None:
    node = cluster.nodes[0]
    cluster.advance_to(SLOT)
    await node.register()
    await node.triggered("r-1", overlap=OverlapPolicy.ALLOW)
    assert await heard() == 1, "it may be claimed"
    await node.triggered("r-1", overlap=OverlapPolicy.ALLOW)
    assert await heard() == 0, "it has been told of"
    seen = await node.win(SLOT + 1, overlap=OverlapPolicy.QUEUE)
    await node.renew(seen)
    assert await heard() == 0
    made = await node.triggered("r-2", overlap=OverlapPolicy.QUEUE)
    assert await heard() == 0, "it waits for another"
    await node.complete(seen)
    assert await heard() == 1, "it may be claimed now"
    won = await node.win(made.run.slot)
    assert await heard() == 0
    failed = await node.complete(won, Outcome(failure=Failure("E")))
    assert failed.due is None
    assert await heard() == 0, "nothing waits"
    cluster.advance_to(SLOT + PERIOD)
    await node.win(SLOT + PERIOD, overlap=OverlapPolicy.ALLOW)
    await node.cancel(SLOT + PERIOD)
    assert await heard() == 1, "it is to stop"


async def test_batches_in_opposite_orders_do_not_deadlock(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anarchon_backends.postgres._connection._REPEATS", 1)
    nodes = await cluster.nodes_of(4)
    names = [f"job-{n:02d}" for n in range(50)]
    for node in nodes:
        await node.register(*(definition(name) for name in names))
    for turn in range(1, 6):
        slot = T0 + turn * PERIOD
        cluster.advance_to(slot)
        replies = await asyncio.gather(
            *(
                node.store.claim([node.wish(slot, job=name) for name in order])
                for node, order in zip(nodes, [names, names[::-1]] * 2, strict=True)
            )
        )
        won = [a.run for r in replies for a in r.answers if a.outcome is ClaimOutcome.WON and a.run]
        assert sorted(seen.run.job for seen in won) == names
        halves = won[::2] + won[1::2], won[1::2] + won[::2]
        done = [
            [Completion(s.run.job, slot, s.run.token, Outcome("x")) for s in half]
            for half in halves
        ]
        answers = await asyncio.gather(*(n.store.complete(d) for n, d in zip(nodes, done)))  # noqa: B905
        assert {a.outcome for reply in answers for a in reply.answers} == {"recorded"}


async def test_plans_that_are_made_on_empty_tables_go_through_the_indexes(
    cluster: Cluster,
) -> None:
    """No sequential scan, whatever the tables hold and though they were never analysed."""
    node = await cluster.node()
    names = [f"job-{n:03d}" for n in range(200)]
    await node.register(*(definition(name) for name in names))
    sweep = tuple((name, "every:10s") for name in names)
    for turn in range(1, 6):
        slot = T0 + turn * PERIOD
        cluster.advance_to(slot)
        reply = await node.store.claim([node.wish(slot, job=name) for name in names])
        runs = [answer.run for answer in reply.answers if answer.run]
        await node.store.claim([node.wish(slot, job=name) for name in names])
        await node.beat(renewals=tuple(node.renewal(run) for run in runs), sweep=sweep)
        done = [Completion(r.run.job, slot, r.run.token, Outcome("x")) for r in runs]
        await node.store.complete(done)
    await node.pause(job=names[0])
    await node.resume(job=names[0])
    await node.triggered(job=names[0])
    await node.plan([slot + PERIOD], settled=slot, job=names[1])
    await node.store.close()  # statistics are sent at the end of a session
    url, schema = cluster.database.url, schema_of(cluster.database.url)
    sql = (
        "SELECT json_object_agg(relname, seq_tup_read) FROM pg_stat_user_tables"
        f" WHERE schemaname = '{schema}' AND relname IN ('run', 'job', 'schedule', 'attempt')"
        " AND seq_tup_read > 0"
    )
    assert await run_sql(url, sql) is None


async def test_a_heartbeat_a_claim_and_a_result_are_one_round_trip_each(
    cluster: Cluster, far: Node, proxy: Proxy
) -> None:
    async def trips(call: Any) -> int:
        before = proxy.requests
        await call
        return proxy.requests - before

    await far.register(*(definition(f"job-{n}") for n in range(10)))
    for turn in range(2, 4):  # the first prepares the statements
        slot = T0 + turn * PERIOD
        cluster.advance_to(slot)
        await far.beat()  # tells the server the tests' time
        claims = [far.wish(slot, job=f"job-{n}") for n in range(10)]
        claimed = await trips(far.store.claim(claims))
        lost = await trips(far.store.claim([replace(c, token="x") for c in claims]))
        reply = await far.store.claim(claims)
        runs = [answer.run for answer in reply.answers if answer.run]
        renewed = await trips(far.beat(renewals=tuple(far.renewal(run) for run in runs)))
        done = [Completion(r.run.job, slot, r.run.token, Outcome("x")) for r in runs]
        completed = await trips(far.store.complete(done))
    assert (claimed, lost, renewed, completed) == (1, 1, 1, 1)


# The server dies


async def test_kill_9_of_the_server_under_load_loses_nothing_acknowledged() -> None:
    """No slot is won twice, none is lost that was acknowledged, and the stores are back."""
    server = postgres.start_server()
    try:
        postgres.prepare(server.url)
        cluster = Cluster(Database(postgres.new_schema(server.url)))
        async with cluster.stack:
            nodes = await cluster.nodes_of(3)
            wins: dict[int, list[str]] = {}
            slots = range(1, 400)
            cluster.advance_to(T0 + len(slots) * PERIOD)
            under_load = asyncio.Event()

            async def work(node: Node) -> None:
                for n in slots:
                    claim = node.wish(
                        T0 + n * PERIOD,
                        overlap=OverlapPolicy.ALLOW,
                        start_deadline_ms=len(slots) * PERIOD,
                    )
                    if await asked_until_known(node, claim) is ClaimOutcome.WON:
                        wins.setdefault(n, []).append(claim.token)
                    if n == 60:
                        under_load.set()

            working = [asyncio.create_task(work(node)) for node in nodes]
            await under_load.wait()
            server.kill()
            await asyncio.to_thread(server.start)
            await asyncio.gather(*working)
            assert sorted(wins) == list(slots)
            assert {len(tokens) for tokens in wins.values()} == {1}
            reader = nodes[0]
            rows = [seen for n in (0, 200) for seen in await page(reader, n, 200)]
            held = {(seen.run.slot - T0) // PERIOD: seen.run.token for seen in rows}
            assert held == {n: tokens[0] for n, tokens in wins.items()}
    finally:
        server.stop()


async def page(node: Node, first: int, count: int) -> list[Any]:
    from_slot = T0 + first * PERIOD
    return await node.history(limit=500, from_slot=from_slot, until_slot=from_slot + count * PERIOD)


async def asked_until_known(node: Node, claim: Any) -> ClaimOutcome:
    """As the sidecar does: again with the same token until the store says what became of it."""
    while True:
        try:
            return (await node.ask(claim)).outcome
        except (OutcomeUnknown, StoreUnavailable):
            await asyncio.sleep(0.02)


async def a_standby_streams_from(url: str) -> None:
    """It may answer before it has connected with its primary."""
    connected = "SELECT count(*) FROM pg_stat_replication"
    while not await run_sql(url, "SELECT pg_sleep(0.02)", connected):
        pass


async def test_the_store_follows_a_fail_over_and_a_synchronous_standby_has_every_claim() -> None:
    """The URL names both hosts; the primary is killed under load, and the standby promoted."""
    primary = postgres.start_server()
    standby: postgres.Server | None = None
    try:
        postgres.prepare(primary.url)
        standby = postgres.start_server(standby_of=primary)
        await a_standby_streams_from(primary.url)
        both = (
            f"postgresql://{postgres.USER}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
            "/postgres?target_session_attrs=read-write"
        )
        report = await opened(postgres.with_options(both, schema="other"))
        assert [doubt.fix for doubt in report.doubts] == ["set synchronous_standby_names"]
        waits = "ALTER SYSTEM SET synchronous_standby_names = 'two'"
        await run_sql(primary.url, waits, "SELECT pg_reload_conf()")
        cluster = Cluster(Database(postgres.new_schema(both)))
        async with cluster.stack:
            nodes = await cluster.nodes_of(2)
            report = await opened(cluster.database.url)
            assert any("synchronous standbys (two)" in each for each in report.verified)
            slots = range(1, 120)
            cluster.advance_to(T0 + len(slots) * PERIOD)
            wins: dict[int, set[str]] = {n: set() for n in slots}
            under_load = asyncio.Event()

            async def work(node: Node) -> None:
                for n in slots:
                    claim = node.wish(
                        T0 + n * PERIOD,
                        overlap=OverlapPolicy.ALLOW,
                        start_deadline_ms=len(slots) * PERIOD,
                    )
                    if await asked_until_known(node, claim) is ClaimOutcome.WON:
                        wins[n].add(claim.token)
                    if n == 40:
                        under_load.set()

            working = [asyncio.create_task(work(node)) for node in nodes]
            await under_load.wait()
            primary.kill()
            alone = "ALTER SYSTEM RESET synchronous_standby_names"
            await run_sql(standby.url, "SELECT pg_promote()")
            await run_sql(standby.url, alone, "SELECT pg_reload_conf()")
            await asyncio.gather(*working)
            assert {len(tokens) for tokens in wins.values()} == {1}
            rows = await page(nodes[0], 0, 121)
            held = {(seen.run.slot - T0) // PERIOD: {seen.run.token} for seen in rows}
            assert held == wins
    finally:
        primary.stop()
        if standby is not None:
            standby.stop()


async def test_news_goes_on_after_its_connection_broke(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    watch = second.store.watch()
    url = cluster.database.url
    ends = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE query ILIKE 'LISTEN %' AND pid <> pg_backend_pid()"
    )
    assert await run_sql(url, ends) >= 2
    async with asyncio.timeout(SOON_S):
        await anext(watch)  # something may have been missed
    waiting = asyncio.ensure_future(anext(watch))
    cluster.advance_to(SLOT)
    await first.release(await first.win(SLOT), Reason.RUNNER_LOST)
    async with asyncio.timeout(SOON_S):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]


async def test_news_goes_on_after_its_connection_went_silent(
    cluster: Cluster, far: Node, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that forgot it: nothing tells the listener that nothing will come."""
    monkeypatch.setattr("anarchon_backends.postgres._news.SILENCE_S", 0.05)
    near = await cluster.node()
    proxy.drop_replies()
    watch = far.store.watch()
    waiting = asyncio.ensure_future(anext(watch))
    async with asyncio.timeout(SOON_S):
        await proxy.dropped.wait()
        proxy.resume()
        await waiting  # it has connected anew
    waiting = asyncio.ensure_future(anext(watch))
    await near.release(await near.win(SLOT), Reason.RUNNER_LOST)
    async with asyncio.timeout(SOON_S):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]


# The schema


def test_the_schema_of_version_2_is_what_it_was() -> None:
    """What is installed is not replaced: another text needs another version, and a migration.

    But for a function that came later, which is made where it is missing.
    """
    assert SCHEMA_VERSION == 2
    text, later = schema_sql("anarchon", NUMBERS), later_sql("anarchon", NUMBERS)
    assert hashlib.sha256(text.replace(later, "").encode()).hexdigest()[:16] == "c16d91b33b6bafc4"
    assert hashlib.sha256(later.encode()).hexdigest()[:16] == "30644a3d5663040d"


async def test_an_old_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anarchon_backends.postgres._start._SERVER_MIN", 990_000)
    with pytest.raises(StoreRefused, match="Anarchon needs 12 or newer"):
        await opened(postgres.new_schema())


# Values


@pytest.mark.parametrize("text", ["\0", "a\0b", "ü — ✓ 🐘", "\\u0000", "'\"\\", "{}", "x" * 16_384])
async def test_what_handlers_say_is_kept_to_the_last_character(cluster: Cluster, text: str) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    answer = await node.complete(await node.win(SLOT), Outcome(text))
    assert answer.run is not None
    assert answer.run.run.current is not None
    assert answer.run.run.current.result == text
    failure = Failure("E", text, text)
    cluster.advance(PERIOD)
    seen = await node.win(SLOT + PERIOD)
    for _ in range(2):
        answer = await node.complete(seen, Outcome(failure=failure))
        assert answer.outcome == "recorded"
    newest, oldest = await node.history(traces=True)
    assert newest.run.current is not None
    assert oldest.run.current is not None
    assert (newest.run.current.failure, oldest.run.current.result) == (failure, text)


@pytest.mark.parametrize("text", ["\0", "a\0b", "ü — ✓ 🐘", "\\u0000", "'\"\\", "{}", "x" * 1_024])
async def test_what_operators_say_is_kept_to_the_last_character(
    cluster: Cluster, text: str
) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    await node.win(SLOT)
    await node.control(CancelRun("job", SLOT, text))
    seen = await node.seen(SLOT)
    assert seen.run.cancel_message == text
    await node.pause(text)
    (job,) = (await node.store.jobs(["job"], "", 1)).answers
    assert job.pause_reason == text
    made = await node.triggered(text, overlap=OverlapPolicy.ALLOW)
    assert made.run.request_id == text
    assert (await node.triggered(text)).run.slot == made.run.slot


async def test_a_payload_is_kept_to_the_last_byte(cluster: Cluster) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    payload = bytes(range(256)) * 256
    made = await node.triggered(payload=payload)
    for _ in range(2):  # S11: it is told again where the reply was lost
        won = await node.claim(made.run.slot, token="t")
        assert (won.outcome, won.payload == payload) == (ClaimOutcome.WON, True)
    assert won.run is not None
    await node.release(won.run)
    again = await node.take_over(won.run)
    assert (again.outcome, again.payload == payload) == (ClaimOutcome.WON, True)


# The URL


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql:db", "postgresql://user"),
        ("postgresql://u:secret@h/db?scheme=x", "'scheme' is not known"),
        ("postgresql://u:secret@h/db?schema=a&schema=b", "'schema' stands twice"),
        ("postgresql://u:secret@h/db?schema=", "schema is ''"),
        ("postgresql://u:secret@h/db?schema=pg_x", "schema is 'pg_x'"),
        ("postgresql://u:secret@h/db?schema=" + "x" * 64, "1 to 63 bytes"),
        ("postgresql://u:secret@h/db?pooler=session", "pooler is 'session'"),
        ("postgresql://u:secret@h/db#x", "%23"),
        ("postgresql://u:secret@[h/db", "cannot be read"),
        ("postgresql://u:secret@h:port/db", "cannot be read"),
        ("postgresql://u:secret@h/db?pooler", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str, says: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        open_store(url, OpenOptions("default", RealClock()))
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


async def test_a_wrong_password_is_refused_and_not_shown() -> None:
    url = postgres.shared_url()
    await run_sql(url, "DROP ROLE IF EXISTS nobody", "SELECT 1")
    wrong = url.replace(f"{postgres.USER}@", "nobody:secret@")
    store = open_store(wrong, OpenOptions("default", RealClock()))
    with pytest.raises(StoreRefused, match="does not exist") as refused:
        await store.open()
    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def secure() -> Iterator[postgres.Server]:
    """A server with TLS, by a certificate of its own, and a role that has to show its password."""
    server = postgres.start_server()
    try:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=store"),
                *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", "server.key", "-out", "server.crt"),
            ],
            cwd=server.data,
            check=True,
            capture_output=True,
        )
        owner = server.data.stat()
        for name in ("server.key", "server.crt"):
            os.chown(server.data / name, owner.st_uid, owner.st_gid)
        admits = f"hostssl all guest all scram-sha-256\nhost all {postgres.USER} all trust\n"
        (server.data / "pg_hba.conf").write_text(admits)
        server.end()
        try:
            server.start("ssl=on")
        except AssertionError:
            if any("SSL is not supported by this build" in line for line in server.log):
                postgres.missing("this build of the server has no TLS")
            raise
        postgres.run_sql(server.url, "CREATE ROLE guest LOGIN PASSWORD 'secr@t/'")
        postgres.run_sql(server.url, "GRANT CREATE ON DATABASE postgres TO guest")
        yield server
    finally:
        server.stop()


async def test_tls_is_verified_and_the_password_comes_from_url_environment_or_file(
    secure: postgres.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"127.0.0.1:{secure.port}/postgres"
    tls = f"?sslmode=verify-full&sslrootcert={secure.data / 'server.crt'}"
    await opened(f"postgresql://guest:secr%40t%2F@{at}{tls}")
    with monkeypatch.context() as environment:
        environment.setenv("PGPASSWORD", "secr@t/")
        await opened(f"postgresql://guest@{at}{tls}")
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:{secure.port}:*:guest:secr@t/\n")
    passfile.chmod(0o600)
    await opened(f"postgresql://guest@{at}{tls}&passfile={passfile}")


@pytest.mark.parametrize(
    ("user", "options", "says"),
    [
        ("guest:secr%40t%2F", "sslmode=verify-full", "sslrootcert"),
        ("guest:wrong-one", "sslmode=require", "correct the user or the password"),
        ("guest:secr%40t%2F", "sslmode=disable", "pg_hba.conf"),
    ],
)
async def test_a_connection_that_is_not_trusted_is_refused_with_what_to_change(
    secure: postgres.Server, user: str, options: str, says: str
) -> None:
    with pytest.raises(StoreRefused, match=says) as refused:
        await opened(f"postgresql://{user}@127.0.0.1:{secure.port}/postgres?{options}")
    for secret in ("secr@t/", "secr%40", "wrong-one"):
        assert secret not in str(refused.value)


async def test_a_server_without_tls_is_refused_where_the_url_wants_it() -> None:
    with pytest.raises(StoreRefused, match="has no TLS"):
        await opened(postgres.with_options(postgres.new_schema(), sslmode="require"))


async def test_a_server_that_is_not_up_yet_is_unavailable_and_not_refused() -> None:
    url = f"postgresql://u:secret@127.0.0.1:{free_port()}/db"
    with pytest.raises(StoreUnavailable) as unavailable:
        await open_store(url, OpenOptions("default", RealClock())).open()
    assert "secret" not in str(unavailable.value)


# What the start refuses, and doubts


async def opened(url: str, clock: Any = None) -> Any:
    """The report of opening."""
    store = open_store(url, OpenOptions("default", clock or RealClock()))
    try:
        return await store.open()
    finally:
        await store.close()


async def test_a_good_server_is_verified_and_gives_no_doubts() -> None:
    report = await opened(postgres.new_schema())
    assert report.doubts == ()
    said = " ".join(report.verified)
    for each in ("primary", "fsync on", "synchronous_commit on", "version 2", "its clock is"):
        assert each in said
    assert "127.0.0.1" in report.location


async def test_twenty_that_start_at_once_make_one_schema() -> None:
    url = postgres.new_schema()
    reports = await asyncio.gather(*(opened(url) for _ in range(20)))
    assert len(reports) == 20
    assert await run_sql(url, f"SELECT count(*) FROM {schema_of(url)}.meta") == 1


@pytest.mark.parametrize("version", [0, 3])
async def test_an_unknown_schema_version_is_refused(version: int) -> None:
    url = postgres.new_schema()
    await opened(url)
    await run_sql(url, f"UPDATE {schema_of(url)}.meta SET version = {version}", "SELECT 1")
    with pytest.raises(StoreRefused, match=f"has version {version}.*run the version that wrote it"):
        await opened(url)


@pytest.mark.parametrize("theirs", ["meta (id int)", "run (id int)"])
async def test_another_programs_schema_is_refused(theirs: str) -> None:
    url = postgres.new_schema()
    schema = schema_of(url)
    await run_sql(url, f"CREATE SCHEMA {schema}", f"CREATE TABLE {schema}.{theirs}", "SELECT 1")
    with pytest.raises(StoreRefused, match="name another schema with"):
        await opened(url)


async def test_unlogged_tables_are_refused() -> None:
    url = postgres.new_schema()
    await opened(url)
    await run_sql(url, f"ALTER TABLE {schema_of(url)}.run SET UNLOGGED", "SELECT 1")
    with pytest.raises(StoreRefused, match=r"\(run\).*SET LOGGED"):
        await opened(url)


async def test_a_clock_that_is_off_is_doubted() -> None:
    clock = RealClock()
    clock.wall_us = lambda: time.time_ns() // 1_000 - 7_000_000  # type: ignore[method-assign]
    report = await opened(postgres.new_schema(), clock)
    (doubt,) = report.doubts
    assert "its clock is +7" in doubt or "its clock is +6" in doubt


@pytest.fixture
def role() -> Iterator[str]:
    """A role that may do nothing, and goes with what it was granted."""
    url = postgres.shared_url()
    postgres.run_sql(url, "CREATE ROLE worker LOGIN")
    yield "worker"
    postgres.run_sql(url, "DROP OWNED BY worker; DROP ROLE worker")


def as_role(url: str, role: str) -> str:
    return url.replace(f"{postgres.USER}@", f"{role}@")


async def test_the_least_privileges_are_enough_and_less_is_refused(role: str) -> None:
    """The example of the docs."""
    url = postgres.new_schema()
    schema = schema_of(url)
    with pytest.raises(StoreRefused, match="GRANT CREATE on the database"):
        await opened(as_role(url, role))
    await opened(url)
    with pytest.raises(StoreRefused, match=f'GRANT USAGE ON SCHEMA "{schema}"'):
        await opened(as_role(url, role))
    for grant in (
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {schema} TO {role}",
    ):
        await run_sql(url, grant, "SELECT 1")
    with pytest.raises(StoreRefused, match="lacks DELETE on"):
        await opened(as_role(url, role))
    await run_sql(url, f"GRANT DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}", "SELECT 1")
    cluster = Cluster(Database(as_role(url, role), open_store), RealClock())
    async with cluster.stack:
        await a_whole_life(cluster)


async def a_whole_life(cluster: Cluster) -> None:
    """Every method of the port, on the real clock."""
    first, second = [await cluster.node() for _ in range(2)]
    period = 100
    jobs = [definition(f"job-{n}", period, schedule="fast") for n in range(3)]
    for node in (first, second):
        await node.register(*jobs)
    slot = (cluster.clock.wall_us() // 1_000 // period + 5) * period
    given = {"schedule_id": "fast", "previous_slot": slot - period}
    claims = [first.wish(slot, job=job.job, **given) for job in jobs]
    reply = await first.store.claim(claims)
    assert {answer.outcome for answer in reply.answers} == {"won"}
    lost = await second.store.claim([second.wish(slot, job=job.job, **given) for job in jobs])
    assert {answer.outcome for answer in lost.answers} == {"lost"}
    a, b, c = [answer.run for answer in reply.answers if answer.run]
    beat = await first.store.beat(Beat(first.instance, (first.renewal(a),), (("job-1", slot),)))
    assert beat.answers[0].renewals[0].outcome == "renewed"
    assert (await first.complete(a)).outcome == "recorded"
    assert (await first.release(b)).outcome == "released"
    taken = await second.take_over(b, **given)
    assert taken.outcome is ClaimOutcome.WON
    assert taken.run is not None
    assert (await second.complete(taken.run)).outcome == "recorded"
    assert (await second.complete(b)).outcome == "fenced"
    assert (await first.renew(c, cancel="requested")).outcome == "renewed"
    settled = await first.settled("job-0", "fast")
    assert settled is not None
    plan = await first.plan([settled + period], settled=settled, job="job-0", schedule="fast")
    assert plan.done
    assert {seen.run.state for seen in await first.history()} == {"success", "claimed"}
    assert (await first.pause("for now", "job-1")).outcome == "done"
    assert (await first.claim(slot + period, job="job-1", **given)).outcome == "paused"
    made = await first.triggered(job="job-1", payload=b"p", window_ms=DAY)
    assert (await second.claim(made.run.slot, job="job-1", **given)).payload == b"p"
    assert (await first.cancel(made.run.slot, "job-1")).outcome == "done"
    assert len((await first.store.jobs((), "", 10)).answers) == 3
    assert len((await first.store.instances()).answers) == 2
    assert await first.prune() == 0
    await second.beat(leaving=True)


async def test_a_standby_is_refused_and_so_is_fsync_off() -> None:
    server = postgres.start_server("full_page_writes=off", "synchronous_standby_names=")
    try:
        url = postgres.with_options(server.url, schema="x")
        report = await opened(url)
        (doubt,) = report.doubts
        assert doubt.in_full.startswith("full_page_writes is off")
        assert doubt.fix == "set full_page_writes = on"
        server.end()
        server.start("fsync=off")
        with pytest.raises(StoreRefused, match="fsync is off"):
            await opened(url)
        server.end()
        (server.data / "standby.signal").touch()
        server.start()
        with pytest.raises(StoreRefused, match="it is a standby"):
            await opened(url)
    finally:
        server.stop()


async def test_a_connection_that_leads_to_a_standby_later_is_not_used(cluster: Cluster) -> None:
    """After a fail-over the same address may be a server that cannot write."""
    (node,) = await cluster.nodes_of(1)
    schema = schema_of(cluster.database.url)
    await run_sql(cluster.database.url, f"UPDATE {schema}.meta SET version = 9", "SELECT 1")
    await node.history()  # on a connection that is known
    store = node.store
    assert isinstance(store, PostgresStore)
    for connection in list(store._pool._idle):
        connection.terminate()
    with pytest.raises(StoreUnavailable, match="another schema version"):
        await node.history()


# A pooler in transaction mode


@pytest.fixture
def pooler() -> Iterator[postgres.Pooler]:
    made = postgres.Pooler(postgres.shared_url())
    yield made
    made.stop()


async def test_a_pooler_is_named_where_the_url_does_not_name_it(pooler: postgres.Pooler) -> None:
    with pytest.raises(StoreRefused, match="pooler=transaction"):
        await opened(postgres.with_options(pooler.url, schema="x"))


async def test_all_works_behind_a_pooler_in_transaction_mode(pooler: postgres.Pooler) -> None:
    url = postgres.with_options(postgres.new_schema(pooler.url), pooler="transaction")
    report = await opened(url)
    assert any("no news" in doubt and "session mode" in doubt.fix for doubt in report.doubts)
    cluster = Cluster(Database(url, open_store), RealClock())
    async with cluster.stack:
        await a_whole_life(cluster)
        assert not cluster.nodes[0].store.capabilities.notifies
        assert [news async for news in cluster.nodes[0].store.watch()] == []


async def test_s10_behind_a_pooler_a_slot_has_one_winner(pooler: postgres.Pooler) -> None:
    """More connections than the pooler has to the server."""
    url = postgres.with_options(postgres.new_schema(pooler.url), pooler="transaction")
    cluster = Cluster(Database(url, open_store), RealClock())
    async with cluster.stack:
        nodes = [await cluster.node() for _ in range(6)]
        for node in nodes:
            await node.register(definition("job", 100, schedule="fast"))
        for _ in range(10):
            slot = cluster.clock.wall_us() // 1_000 + 50
            given = {"schedule_id": "fast", "previous_slot": None, "overlap": OverlapPolicy.ALLOW}
            answers = await asyncio.gather(*(node.claim(slot, **given) for node in nodes))
            assert sorted(a.outcome for a in answers) == ["lost"] * 5 + ["won"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("default_transaction_isolation = 'serializable'", "transactions are serializable"),
        ("synchronous_commit = off", "synchronous_commit is off"),
        ("default_transaction_read_only = on", "read-only"),
    ],
)
async def test_what_sessions_cannot_set_behind_a_pooler_is_refused(
    role: str, setting: str, says: str
) -> None:
    """Without one the sessions set it themselves."""
    url = postgres.new_schema()
    await opened(url)
    schema = schema_of(url)
    await run_sql(
        url,
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
        f"ALTER ROLE {role} SET {setting}",
        "SELECT 1",
    )
    report = await opened(as_role(url, role))
    assert report.doubts == ()
    with pytest.raises(StoreRefused, match=says):
        await opened(postgres.with_options(as_role(url, role), pooler="transaction"))


async def test_s28_a_part_of_a_registration_reads_nothing_of_what_else_is_held(
    cluster: Cluster,
) -> None:
    """Also by a plan that was made while nothing was held."""
    node = await cluster.node()
    schema = schema_of(cluster.database.url)
    connection = await asyncpg.connect(cluster.database.url.partition("?")[0])
    types = ", ".join(f"${n}::{each}" for n, each in enumerate(REGISTER_TYPES.split(), 1))
    sql = f"SELECT {schema}.register_part_{SCHEMA_VERSION}({types})"
    about_us = ("default", cluster.now, node.instance.incarnation, "host:1", LEASE, "{}")
    part: tuple[Any, ...] = (*about_us, ["job-1", "job-2"], [], [], "[]", "[]", "[]")
    read = f"""
        SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index
        WHERE indrelid = '{schema}.hold'::regclass"""
    try:
        await connection.fetchval(sql, *part)
        await node.register(*(definition(f"job-{n}") for n in range(200)))
        async with connection.transaction():
            await connection.fetchval(sql, *part)
            assert await connection.fetchval(read) <= 10
    finally:
        await connection.close()
    views = (await node.store.jobs(["job-1", "job-3"], "", 9)).answers
    assert [view.instance_ids for view in views] == [(), ("host:1",)]
