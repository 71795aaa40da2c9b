"""What only a Redis or Valkey server can do to a sidecar, on real ones.

S10, S11, S18 to S20, S22, S27, S27a, S29.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends import redis as dispatch
from anarchon_backends.redis import _checks, _connection, _sieve
from anarchon_backends.redis._address import address_of
from anarchon_backends.redis._connection import CONNECTIONS, Call, Command, Pool
from anarchon_backends.redis_lease import RedisLeaseStore, _batches
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from anarchon_server.core.model import (
    CancelReason,
    CatchUpPolicy,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
)
from anarchon_server.core.store import (
    CancelRun,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    ControlOutcome,
    OpenOptions,
    Reply,
    Store,
)
from anarchon_server.opening import open_store
from tests.contract.harness import (
    DAY,
    PERIOD,
    SECOND,
    T0,
    Cluster,
    FakeClock,
    Node,
    definition,
)
from tests.servers import redis
from tests.servers.patience import Patience
from tests.servers.ports import free_port
from tests.servers.proxy import Proxy
from tests.servers.tools import openssl

SLOT = T0 + PERIOD
FREE = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY, "previous_slot": None}
QUEUE: dict[str, Any] = {"overlap": OverlapPolicy.QUEUE}
ALL: dict[str, Any] = {"catch_up": CatchUpPolicy.ALL, "window_ms": DAY}
CONNECTED = 16  # instances at once
TIMEOUT_MS = 20_001  # of calls that a test lets be over (`Patience`), as no other is
PAGE = Path(__file__).parents[3] / "docs/stores/redis.md"
LAYOUT_2 = Path(__file__).with_name("redis_layout_2.jsonl")  # a namespace, as it was


class Database:
    """A server, as the harness's cluster uses one. Its time is moved by hand."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return redis.open_virtual(self.url, options)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url))
    async with cluster.stack:
        yield cluster


@pytest.fixture(params=["redis", "valkey"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., redis.Server]]:
    """Starts servers of the test's own, and stops them after it."""
    servers: list[redis.Server] = []

    def started(kind: str = "redis", *settings: str) -> redis.Server:
        server = redis.private(kind, *settings)
        servers.append(server)
        return server.start()

    yield started
    for server in servers:
        server.stop()


@asynccontextmanager
async def behind_a_proxy(
    kind: str,
) -> AsyncIterator[tuple[Proxy, Cluster, Node, Node]]:
    """A node that speaks through a proxy, and one that does not; both registered, at the slot."""
    url = redis.fresh_url(kind)
    port = int(re.findall(r":(\d+)/", url)[0])
    async with Proxy(port) as proxy, cluster_on(url) as cluster:
        direct = await cluster.node()
        assert isinstance(cluster.database, Database)
        cluster.database.url = url.replace(f":{port}/", f":{proxy.port}/")
        through = await cluster.node(op_timeout_ms=TIMEOUT_MS)
        for node in (direct, through):
            await node.register()
        await direct.store.claim([])  # so that the server knows the script
        cluster.advance_to(SLOT)
        yield proxy, cluster, through, direct


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a server or a task gives no other signal of."""
    while not true():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


def pool_of(store: Store) -> Pool:
    """The connections of a store on one server."""
    assert isinstance(store, RedisLeaseStore)
    assert isinstance(store._server, Pool)
    return store._server


def all_ended(node: Node) -> bool:
    """Whether the node's event loop has seen the end of all its connections."""
    idle = pool_of(node.store)._idle
    return all(each._writer is None or each._writer.is_closing() for each in idle)


# Unknown outcomes: S11


async def out_of_time(proxy: Proxy, call: Coroutine[Any, Any, Any]) -> None:
    """The call's time is over when its answer has been lost."""
    proxy.drop_replies()
    with Patience(TIMEOUT_MS) as patience:
        under_way = asyncio.create_task(call)
        await proxy.dropped.wait()
        patience.end()
        with pytest.raises(OutcomeUnknown, match=f"no answer within {TIMEOUT_MS} ms"):
            await under_way


async def test_s11_a_lost_reply_is_unknown_and_the_repeat_has_won(kind: str) -> None:
    """And the driver has not asked again by itself: it would have been told that it lost."""
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        before = proxy.requests
        await out_of_time(proxy, through.ask(claim))
        assert proxy.requests == before + 1
        proxy.resume()
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        answer = await through.ask(claim)
        assert answer.outcome == "won"
        assert answer.run is not None
        assert answer.run.run.attempt == 1


async def test_s11_a_connection_reset_after_sending_is_unknown(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.cut_after_requests()
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won", "it has connected again by itself"


async def test_s11_what_could_not_be_sent_was_surely_not_done_and_does_not_arrive_later(
    kind: str,
) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        proxy.refuse()
        proxy.cut()
        await until(lambda: all_ended(through))
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT)
        proxy.resume()
        await through.beat()
        assert await direct.run(SLOT) is None
        assert (await through.claim(SLOT)).outcome == "won"


async def test_s11_an_idle_connection_that_was_closed_is_not_used(kind: str) -> None:
    """A server that restarted while nothing was asked leaves no outcome unknown."""
    async with behind_a_proxy(kind) as (proxy, _, through, _):
        await through.beat()
        proxy.cut()
        await until(lambda: all_ended(through))
        assert (await through.claim(SLOT)).outcome == "won"


async def test_a_call_is_bounded_in_time_and_its_late_answer_is_nobodys(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, _):
        proxy.hold_replies()
        with Patience(TIMEOUT_MS) as patience:
            call = asyncio.create_task(through.claim(SLOT))
            await proxy.held.wait()
            patience.end()
            with pytest.raises(OutcomeUnknown, match="no answer within"):
                await call
        proxy.resume()
        reply = await through.store.instances()
        assert {each.instance_id for each in reply.answers} == {"host:1", "host:2"}


async def test_a_connection_whose_call_was_cancelled_is_thrown_away(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, _):
        for _ in range(CONNECTIONS + 1):
            proxy.hold_replies()
            call = asyncio.create_task(through.claim(SLOT))
            await proxy.held.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            proxy.resume()
        assert (await through.beat()).known, "an answer of its own, and a connection to have it by"


async def test_calls_wait_for_a_connection_no_longer_than_their_time(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, _):
        await asyncio.gather(*(through.store.instances() for _ in range(CONNECTIONS)))
        proxy.hold_replies()
        before = proxy.requests
        calls = [through.store.claim([through.wish(SLOT)]) for _ in range(CONNECTIONS + 3)]
        with Patience(TIMEOUT_MS) as patience:
            ended = asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: proxy.requests == before + CONNECTIONS)
            patience.end()
            errors = await ended
        kinds = sorted(type(each).__name__ for each in errors)
        assert kinds == ["OutcomeUnknown"] * CONNECTIONS + ["StoreUnavailable"] * 3
        proxy.resume()


async def test_s29_a_trigger_whose_reply_was_lost_is_repeated_and_has_made_one_run(
    kind: str,
) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        await direct.cancel(SLOT)  # so that the server knows the script
        await out_of_time(proxy, through.trigger("r-1", payload=b"once"))
        proxy.resume()
        (row,) = await direct.history()
        again = await through.triggered("r-1", payload=b"twice")
        assert again.run == row.run
        assert (await direct.claim(again.run.slot)).payload == b"once"


# Many at once: S10, S18, S20, S29


async def many(cluster: Cluster) -> list[Node]:
    """As many instances as race each other, at the slot, each with connections of its own."""
    nodes = await cluster.nodes_of(CONNECTED)
    cluster.advance_to(SLOT)
    return nodes


async def test_s20_connections_that_claim_a_due_row_at_once_have_one_winner(kind: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        nodes = await many(cluster)
        cluster.advance_to(T0 + 22 * PERIOD)
        slots = [T0 + n * PERIOD for n in range(1, 21)]
        assert (await nodes[0].plan(slots, **ALL)).due == len(slots)
        for slot in slots:
            answers = await asyncio.gather(*(node.claim(slot) for node in nodes))
            assert Counter(a.outcome for a in answers) == {"won": 1, "lost": CONNECTED - 1}
            (won,) = [a.run for a in answers if a.run and a.outcome is ClaimOutcome.WON]
            assert won.run.attempt == 1
            await nodes[-1].complete(won)
        assert set((await nodes[0].states()).values()) == {RunState.SUCCESS}


async def test_s18_connections_that_claim_what_was_queued_at_once_have_one_winner(
    kind: str,
) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        nodes = await many(cluster)
        running = await nodes[0].win(SLOT, **QUEUE)
        for n in range(2, 12):
            slot = T0 + n * PERIOD
            cluster.advance_to(slot)
            answers = await asyncio.gather(*(node.claim(slot, **QUEUE) for node in nodes))
            assert {a.outcome for a in answers} == {"queued"}
            ending = await nodes[0].complete(running)
            assert ending.due is not None
            assert ending.due.run.slot == slot
            answers = await asyncio.gather(*(node.claim(slot, **QUEUE) for node in nodes))
            assert Counter(a.outcome for a in answers) == {"won": 1, "lost": CONNECTED - 1}
            (running,) = [a.run for a in answers if a.run and a.outcome is ClaimOutcome.WON]


async def test_s29_of_claims_sent_before_and_after_a_pause_none_wins_that_was_sent_after(
    kind: str,
) -> None:
    """Sixteen claim slot after slot, each its own job's, while the jobs are paused one by one."""
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        nodes = await many(cluster)
        jobs = [f"job-{n}" for n in range(CONNECTED)]
        for node in nodes:
            await node.register(*(definition(job) for job in jobs))
        cluster.advance_to(T0 + 1_000 * PERIOD)
        paused: set[str] = set()
        after: Counter[str] = Counter()

        async def claims(node: Node, job: str) -> None:
            slot = T0
            while after[job] < 3:
                slot += PERIOD
                was_paused = job in paused
                answer = await node.claim(slot, job=job, **FREE)
                if was_paused:
                    after[job] += 1
                    assert (answer.outcome, answer.run) == (ClaimOutcome.PAUSED, None), job

        claiming = [
            asyncio.create_task(claims(node, job)) for node, job in zip(nodes, jobs, strict=True)
        ]
        for job in jobs:
            await nodes[0].pause(job=job)
            paused.add(job)
        await asyncio.gather(*claiming)
        assert set(after) == set(jobs)


async def test_s29_a_request_that_comes_on_many_connections_at_once_makes_one_run(
    kind: str,
) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        nodes = await many(cluster)
        for n in range(10):
            answers = await asyncio.gather(
                *(node.trigger(f"r-{n}", payload=f"{n}".encode(), **QUEUE) for node in nodes)
            )
            assert {a.outcome for a in answers} == {ControlOutcome.DONE}
            assert len({a.run.run.slot for a in answers if a.run}) == 1
            assert len(await nodes[0].history()) == n + 1
            cluster.advance(1)
        waiting = sorted(await nodes[0].unfinished(), key=lambda seen: seen.run.slot)
        for n, seen in enumerate(waiting):
            claims = (node.claim(seen.run.slot, **QUEUE) for node in nodes)
            claimed = await asyncio.gather(*claims)
            (won,) = [a for a in claimed if a.outcome is ClaimOutcome.WON]
            assert won.payload == f"{n}".encode()
            assert {a.payload for a in claimed if a is not won} == {b""}
            assert won.run is not None
            await nodes[0].complete(won.run)


# Answers that mean "not done": each is surely so, and the claim is free


async def refused_then_won(node: Node, refuse: Callable[[], Any], allow: Callable[[], Any]) -> str:
    refuse()
    with pytest.raises(StoreUnavailable) as caught:
        await node.claim(SLOT)
    allow()
    assert (await node.claim(SLOT)).outcome == "won"
    return str(caught.value)


async def one_node(cluster: Cluster) -> Node:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    return node


async def test_noscript_the_script_is_sent_again(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        assert server.send("SCRIPT", "FLUSH") == b"+OK\r\n"
        assert (await node.claim(SLOT)).outcome == "won"


async def test_oom_a_full_server_refuses_whole_scripts(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--maxmemory-policy", "noeviction")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        said = await refused_then_won(
            node,
            lambda: server.send("CONFIG", "SET", "maxmemory", "1mb"),
            lambda: server.send("CONFIG", "SET", "maxmemory", "0"),
        )
        assert "used memory" in said


async def test_readonly_a_master_that_became_a_replica_does_nothing(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        await refused_then_won(
            node,
            lambda: server.send("REPLICAOF", "127.0.0.1", "1"),
            lambda: server.send("REPLICAOF", "NO", "ONE"),
        )


async def test_masterdown_a_stale_replica_says_nothing_of_tokens(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """Its refusal to read is none of the record's fault: no handler is cancelled for it."""
    server = start(kind, "--replica-serve-stale-data", "no")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        seen = await node.win(SLOT)
        server.send("REPLICAOF", "127.0.0.1", "1")
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await node.renew(seen)
            with pytest.raises(StoreUnavailable):
                await node.complete(seen)
        server.send("REPLICAOF", "NO", "ONE")
        assert (await node.renew(seen)).outcome == "renewed"


async def test_a_permission_that_is_withdrawn_says_nothing_of_tokens(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        seen = await node.win(SLOT)
        for command in ("hmget", "hget"):
            server.send("ACL", "SETUSER", "default", f"-{command}")
            with pytest.raises(StoreError):
                await node.renew(seen)
            server.send("ACL", "SETUSER", "default", f"+{command}")
        assert (await node.renew(seen)).outcome == "renewed"


async def test_noreplicas_too_few_replicas_to_write(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        said = await refused_then_won(
            node,
            lambda: server.send("CONFIG", "SET", "min-replicas-to-write", "1"),
            lambda: server.send("CONFIG", "SET", "min-replicas-to-write", "0"),
        )
        assert "replicas" in said


async def test_misconf_a_disk_that_cannot_be_written(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--save", "3600 1")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)

        def break_the_disk() -> None:
            Path(server.directory, "dump.rdb").mkdir()
            Path(server.directory, "dump.rdb", "x").touch()
            server.send("SAVE")
            server.send("BGSAVE")
            while b"rdb_last_bgsave_status:err" not in server.send("INFO", "persistence"):
                pass

        said = await refused_then_won(
            node,
            break_the_disk,
            lambda: server.send("CONFIG", "SET", "stop-writes-on-bgsave-error", "no"),
        )
        assert "RDB" in said or "MISCONF" in said


async def test_busy_another_script_that_does_not_end(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--busy-reply-threshold", "50")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)

        endless = asyncio.to_thread(server.send, "EVAL", "while true do end", "0")
        spinning = asyncio.create_task(endless)
        while not await asyncio.to_thread(lambda: server.send("PING").startswith(b"-BUSY")):
            pass

        def stop() -> None:
            server.send("SCRIPT", "KILL")
            while server.send("PING").startswith(b"-BUSY"):
                pass

        await refused_then_won(node, lambda: None, stop)
        await spinning
        assert pool_of(node.store).watched, "it was busy, and hides nothing"


async def test_loading_a_server_that_reads_its_data(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(
        kind,
        *("--enable-debug-command", "yes", "--key-load-delay", "10000"),
        *("--loading-process-events-interval-bytes", "1024"),
    )
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        server.send("DEBUG", "POPULATE", "100", "filler", "2048")
        reload = asyncio.create_task(asyncio.to_thread(server.send, "DEBUG", "RELOAD"))
        while not await asyncio.to_thread(lambda: server.send("PING").startswith(b"-LOADING")):
            pass
        with pytest.raises(StoreUnavailable):
            await node.claim(SLOT)
        await reload
        assert (await node.claim(SLOT)).outcome == "won"


# The death of the server


@pytest.mark.timeout(120)
async def test_s10_kill_9_under_load_loses_no_claim_and_gives_none_twice(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """`appendonly yes`; the instances are back by themselves."""
    server = start(kind, "--appendonly", "yes", "--appendfsync", "everysec")
    slots = range(T0 + PERIOD, T0 + 601 * PERIOD, PERIOD)
    won: list[tuple[int, str]] = []
    unknown = 0
    async with cluster_on(server.url) as cluster:
        nodes = [await cluster.node(op_timeout_ms=1_000) for _ in range(6)]
        for node in nodes:
            await node.register()
        cluster.advance_to(slots[-1])

        async def work(node: Node) -> None:
            nonlocal unknown
            for slot in slots:
                claim: Claim = node.wish(slot, **FREE)
                while True:
                    try:
                        answer = await node.ask(claim)
                    except StoreError as error:
                        unknown += isinstance(error, OutcomeUnknown)
                        await asyncio.sleep(0.02)  # the loop's back-off
                        continue
                    break
                if answer.outcome is ClaimOutcome.WON:
                    won.append((slot, claim.token))

        working = [asyncio.create_task(work(node)) for node in nodes]
        for share in (0.2, 0.5, 0.8):
            await until(lambda share=share: len(won) >= share * len(slots))  # type: ignore[misc]
            server.kill()
            await asyncio.to_thread(server.start)
        await asyncio.gather(*working)
        rows = await nodes[0].history(limit=1_000)
    assert sorted(slot for slot, _ in won) == list(slots), "each slot has one winner"
    kept = {(seen.run.slot, seen.run.token) for seen in rows}
    assert kept == set(won), "each acknowledged claim is there, and no other"
    assert {seen.run.attempt for seen in rows} == {1}
    assert unknown > 0, "the kills met calls under way"


async def test_s27a_a_flushed_server_is_another_store(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        before = await node.beat_reply(sweep=(("job", "every:10s"),))
        await node.win(SLOT)
        server.send("FLUSHALL")
        after = await node.beat_reply(sweep=(("job", "every:10s"),))
        assert after.answers[0].settled == (None,)
        assert not after.answers[0].known
        assert after.fences == {"job": 0}
        assert after.store_id
        assert before.store_id
        assert (await node.claim(SLOT)).outcome == "unregistered"


async def test_s27a_a_server_that_was_restarted_may_be_another_store(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """What it lost cannot be told from outside, so that its start counts as a loss."""
    server = start(kind, "--appendonly", "yes")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        before = (await node.beat_reply()).store_id
        assert (await node.beat_reply()).store_id == before
        server.kill()
        await asyncio.to_thread(server.start)
        ids: set[str] = set()
        while len(ids) < 2:
            with contextlib.suppress(StoreError):
                ids |= {before, (await node.beat_reply()).store_id}
        assert (await node.beat_reply()).store_id in ids - {before}, "and then it is that one"


async def test_s27a_a_server_that_threw_keys_away_is_another_store(
    kind: str, start: Callable[..., redis.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody allows it after the start; evicted keys that could expire are none of ours."""
    monkeypatch.setattr(_connection, "_LOOK_S", 0.0)
    server = start(kind, "--maxmemory-policy", "volatile-lru")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        before = (await node.beat_reply()).store_id

        def evict() -> None:
            for number in range(200):
                server.send("SET", f"filler-{number}", "x" * 20_000, "EX", "1000")
            server.send("CONFIG", "SET", "maxmemory", "3mb")
            server.send("SET", "one-more", "x", "EX", "1000")
            assert b"evicted_keys:0" not in server.send("INFO", "stats")
            server.send("CONFIG", "SET", "maxmemory", "0")

        evict()
        assert (await node.beat_reply()).store_id == before
        server.send("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        evict()
        after = (await node.beat_reply()).store_id
        assert after != before
        assert (await node.beat_reply()).store_id == after


# Durability: R3, visible is not durable


async def test_r3_a_claim_that_no_replica_has_is_unknown_until_one_has_it(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """Also for whoever asks again, on a connection that has written nothing."""
    quick = ("--repl-diskless-sync-delay", "0")
    master = start(kind, *quick)
    replica = start(kind, *quick, "--replicaof", f"127.0.0.1 {master.port}")
    await until(lambda: b"master_link_status:up" in replica.send("INFO", "replication"))
    await until(lambda: b"state=online" in master.send("INFO", "replication"))
    assert replica.process is not None
    async with cluster_on(f"{master.url}?durability=replicas:1") as cluster:
        first, second = await cluster.node(op_timeout_ms=900), await cluster.node(op_timeout_ms=900)
        for node in (first, second):
            await node.register()
        cluster.advance_to(SLOT)
        claim = first.wish(SLOT)
        assert await answer_to(first, claim) is ClaimOutcome.WON, "when the replica has caught up"
        done = await first.win(SLOT, token=claim.token)
        replica.process.send_signal(signal.SIGSTOP)
        claim = first.wish(SLOT + 1, **FREE)
        with pytest.raises(OutcomeUnknown, match="not acknowledged by 1 replicas"):
            await second.trigger("r-1", **QUEUE)
        unknown = r"done, but not acknowledged by 1 replicas within 600 ms"
        for _ in range(2):
            with pytest.raises(OutcomeUnknown, match=unknown):
                await first.ask(claim)
        assert (await second.look(SLOT + 1)) is not None, "it is visible, and that proves nothing"
        for node in (first, second):
            with pytest.raises(OutcomeUnknown, match=unknown):
                await node.complete(done)
        assert (await first.renew(done)).outcome == "fenced", "what is renewed is not waited for"
        replica.process.send_signal(signal.SIGCONT)
        assert await answer_to(first, claim) is ClaimOutcome.WON
        seen = await first.run(SLOT + 1)
        assert seen is not None
        assert (seen.run.token, seen.run.attempt) == (claim.token, 1)
        assert (await second.complete(done)).outcome == "recorded"
        assert (await second.triggered("r-1")).run.request_id == "r-1"


async def test_r3_too_few_replicas_at_the_start_are_a_doubt(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    _, doubts = await report_of(f"{server.url}?durability=replicas:2")
    assert "it has 0 replicas, and durability=replicas:2" in doubts


@pytest.mark.parametrize("kind", ["valkey", "redis8"])
async def test_r3_a_claim_that_the_disk_does_not_have_is_unknown(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--appendonly", "yes", "--appendfsync", "everysec")
    url = f"{server.url}?durability=fsync"
    verified, doubts = await report_of(url)
    assert "durability=fsync: a claim or a result counts when it has arrived there" in verified
    assert doubts == ""
    async with cluster_on(url) as cluster:
        node = await one_node(cluster)
        assert (await node.claim(SLOT)).outcome == "won"
        server.send("CONFIG", "SET", "appendonly", "no")
        claim = node.wish(SLOT + 1, **FREE)
        with pytest.raises(OutcomeUnknown, match="not acknowledged by disk within"):
            await node.ask(claim)
        server.send("CONFIG", "SET", "appendonly", "yes")
        await until(lambda: b"aof_rewrite_in_progress:0" in server.send("INFO", "persistence"))
        assert (await node.ask(claim)).outcome == "won"
    server.send("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(StoreRefused, match=r"durability=fsync asks for: .*appendonly"):
        await report_of(url)


async def test_r3_a_server_that_cannot_tell_what_its_disk_has_is_refused(
    start: Callable[..., redis.Server],
) -> None:
    """Redis before 7.2."""
    server = start("redis", "--appendonly", "yes")
    if b"redis_version:7.0." not in server.send("INFO", "server"):
        pytest.skip("this Redis knows WAITAOF")
    with pytest.raises(StoreRefused, match=r"unknown command.* needs Redis 7\.2 or Valkey 7\.2"):
        await report_of(f"{server.url}?durability=fsync")


class Watched:
    """A master, its replica, and a Sentinel that promotes the one when the other is gone."""

    def __init__(self, kind: str, start: Callable[..., redis.Server]) -> None:
        quick = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
        self.master = start(kind, *quick)
        self.replica = start(kind, *quick, "--replicaof", f"127.0.0.1 {self.master.port}")
        self.sentinel = redis.private(kind)
        self.sentinel.config = (
            f"sentinel monitor m 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds m 300\n"
            "sentinel failover-timeout m 2000\n"
        )
        self.sentinel.start()

    @property
    def url(self) -> str:
        """Of two Sentinels, the first of which is not there."""
        return f"redis://127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}/0?sentinel=m"

    async def is_watched(self) -> None:
        await until(lambda: b"connected_slaves:1" in self.master.send("INFO", "replication"))
        await until(lambda: b"slaves=1" in self.sentinel.send("INFO", "sentinel"))


@pytest.fixture
def watched(kind: str, start: Callable[..., redis.Server]) -> Iterator[Watched]:
    made = Watched(kind, start)
    yield made
    made.sentinel.stop()


async def answer_to(node: Node, claim: Claim) -> ClaimOutcome:
    """Asks until it is answered."""
    while True:
        try:
            return (await node.ask(claim)).outcome
        except StoreError:
            await asyncio.sleep(0.05)  # the loop's back-off


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_s27_a_fail_over_that_a_sentinel_makes_is_followed(
    watched: Watched, how: str
) -> None:
    """Also where the old master does not say that it is gone."""
    await watched.is_watched()
    async with cluster_on(watched.url) as cluster:
        node = await cluster.node(op_timeout_ms=500)
        await node.register()
        cluster.advance_to(SLOT)
        await node.complete(await node.win(SLOT))
        before = (await node.beat_reply()).store_id
        watched.master.send("WAIT", "1", "1000")
        offsets = re.compile(rb"master_repl_offset:(\d+)")
        await until(
            lambda: (
                offsets.findall(watched.master.send("INFO", "replication"))
                == offsets.findall(watched.replica.send("INFO", "replication"))
            )
        )
        assert watched.master.process is not None
        watched.master.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        assert await answer_to(node, node.wish(SLOT + 1, **FREE)) is ClaimOutcome.WON
        assert [seen.run.state for seen in await node.history()] == ["claimed", "success"]
        assert b"role:master" in watched.replica.send("INFO", "replication")
        assert (await node.beat_reply()).store_id != before, "S27a"


async def test_a_master_that_no_sentinel_knows(watched: Watched) -> None:
    with pytest.raises(StoreUnavailable, match="knows no such master"):
        await report_of(watched.url.replace("sentinel=m", "sentinel=other"))
    verified, _ = await report_of(watched.url)
    assert "a master" in verified


# Checks at start, each made to fail once


async def report_of(url: str, *, timeout_ms: int = 2_000) -> tuple[str, str]:
    """What a start verifies and doubts, as text."""
    store = open_store(url, OpenOptions("default", FakeClock(), op_timeout_ms=timeout_ms))
    try:
        report = await store.open()
    finally:
        await store.close()
    return " ".join(report.verified), " ".join(doubt.in_full for doubt in report.doubts)


async def test_a_server_that_keeps_everything_leaves_no_doubt(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--appendonly", "yes", "--appendfsync", "always")
    verified, doubts = await report_of(server.url)
    assert f"{kind} " in verified
    assert "appendfsync is always" in verified
    assert doubts == ""


@pytest.mark.parametrize(
    ("settings", "doubt"),
    [
        (["--appendonly", "no"], "appendonly is no"),
        (["--appendonly", "yes", "--appendfsync", "everysec"], "appendfsync is everysec"),
        (["--appendonly", "yes", "--appendfsync", "no"], "appendfsync is no"),
    ],
)
async def test_what_may_be_lost_is_a_doubt(
    settings: list[str], doubt: str, start: Callable[..., redis.Server]
) -> None:
    _, doubts = await report_of(start("redis", *settings).url)
    assert doubt in doubts


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_a_server_that_throws_claims_away_is_refused(
    kind: str, policy: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--maxmemory-policy", policy)
    with pytest.raises(StoreRefused, match=f"maxmemory-policy is {policy}.*noeviction"):
        await report_of(server.url)


async def test_a_policy_that_spares_keys_without_expiry_is_fine(
    start: Callable[..., redis.Server],
) -> None:
    """Because no key of ours has one."""
    server = start("redis", "--maxmemory-policy", "volatile-lru")
    verified, _ = await report_of(server.url)
    assert "maxmemory-policy is volatile-lru" in verified
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        await node.complete(await node.win(SLOT))
    keys = server.send("EVAL", "return redis.call('KEYS', '*')", "0").decode()
    for key in re.findall(r"anarchon:\S+", keys):
        assert server.send("TTL", key) == b":-1\r\n", key


async def test_a_replica_and_its_master(kind: str, start: Callable[..., redis.Server]) -> None:
    master = start(kind, "--repl-diskless-sync-delay", "0")
    replica = start(kind, "--replicaof", f"127.0.0.1 {master.port}")
    with pytest.raises(StoreRefused, match="role is 'slave': give the address of the master"):
        await report_of(replica.url)
    await until(lambda: b"connected_slaves:1" in master.send("INFO", "replication"))
    _, doubts = await report_of(master.url)
    assert "it has 1 replicas" in doubts
    assert "durability=replicas:1 in the URL waits for them" in doubts
    assert "min-replicas-to-write 1 narrows it, too" in doubts
    verified, doubts = await report_of(f"{master.url}?durability=replicas:1")
    assert "counts when all connected replicas have it (1)" in verified
    assert "replicas" not in doubts
    master.send("CONFIG", "SET", "min-replicas-to-write", "1")
    await until(lambda: b"min_slaves_good_slaves:1" in master.send("INFO", "replication"))
    _, doubts = await report_of(master.url)
    assert "min-replicas-to-write is 1" in doubts


async def test_a_node_of_a_cluster_alone_is_refused_with_what_to_add(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind, "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with pytest.raises(StoreRefused, match="node of a cluster: add cluster=true to the URL"):
        await report_of(server.url)


@pytest.mark.parametrize(
    "info",
    [
        {"redis_version": "6.0.16", "role": "master"},
        {"redis_version": "7.2.4", "valkey_version": "7.0.0", "role": "master"},
    ],
)
def test_a_server_that_is_too_old_is_refused(info: dict[str, str]) -> None:
    with pytest.raises(StoreRefused, match="or newer is needed"):
        _checks.check_server(info, _checks.Findings(), cluster=False)


async def test_an_unknown_layout_is_refused_with_what_to_do(kind: str) -> None:
    url = redis.session_url(kind)
    options = OpenOptions("from-the-future", FakeClock())
    store = RedisLeaseStore(address_of(url), options)
    await store.open()
    await pool_of(store).ask(["HSET", "anarchon:{15:from-the-future}", "schema", "7"])
    other = RedisLeaseStore(address_of(url), options)
    with pytest.raises(StoreRefused, match=r"layout '7'.*knows 3: run the version"):
        await other.open()
    with pytest.raises(StoreUnavailable, match="ANARCHONSCHEMA 7"):
        await store.claim([])
    await pool_of(store).ask(["DEL", "anarchon:{15:from-the-future}"])
    await store.close()


def layout_2() -> list[list[str]]:
    """The commands that make a namespace as the layout 2 had it, 70 s after T0."""
    return [json.loads(line) for line in LAYOUT_2.read_text().splitlines()]


async def test_a_namespace_of_layout_2_is_carried_on_and_no_longer_the_older_versions(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    server = start(kind)
    for command in layout_2():
        server.send(*command)
    async with cluster_on(server.url) as cluster:
        cluster.advance_to(T0 + 70 * SECOND)
        node, other = await cluster.node(), await cluster.node()
        assert (await node.beat()).known, "it had registered"
        missed = (RunState.SKIPPED, Reason.MISSED)
        assert await node.states() == {
            10: RunState.FAILED,
            20: missed,
            30: missed,
            50: RunState.SUCCESS,
            51: (RunState.INTERRUPTED, Reason.RUNNER_LOST),
            60: RunState.RUNNING,
            70: (RunState.SKIPPED, Reason.OVERLAP),
        }
        failed = await node.run(T0 + 10 * SECOND)
        assert failed is not None
        assert [a.fence for a in failed.attempts] == [1_800_000_010_000_000, 1_800_000_040_000_000]
        running = await node.seen(T0 + 60 * SECOND)
        stopped = Outcome(stopped=CancelReason.REQUESTED)
        assert (await other.complete(running, stopped)).outcome == "recorded"
        freed = await node.seen(T0 + 51 * SECOND)
        taken = await other.take_over(freed, retries=1)
        assert taken.run is not None
        await other.complete(taken.run, Outcome(failure=Failure("E")), retry_in_ms=0)
        assert (await node.seen(T0 + 51 * SECOND)).run.state is RunState.RETRYING
        (view,) = (await node.store.jobs([], "", 10)).answers
        assert [each.settled for each in view.schedules] == [T0 + 70 * SECOND]
        await node.pause()
    said = server.send("HGETALL", "anarchon:{7:default}")
    assert b"schema\r\n$1\r\n3\r\n" in said, (
        "of which the older version says that it is none of its"
    )
    assert b"freed" not in said


async def test_a_server_that_is_away_is_no_reason_not_to_start(kind: str) -> None:
    redis.session_url(kind)
    with pytest.raises(StoreUnavailable):
        await report_of(f"redis://127.0.0.1:{free_port()}", timeout_ms=500)


async def test_s31_twenty_that_open_a_new_namespace_at_once_agree_on_the_store(kind: str) -> None:
    url = redis.fresh_url(kind)
    stores = [redis.open_virtual(url, OpenOptions("new", FakeClock())) for _ in range(20)]
    await asyncio.gather(*(store.open() for store in stores))
    replies = await asyncio.gather(*(store.instances() for store in stores))
    assert len({reply.store_id for reply in replies}) == 1
    for store in stores:
        await store.close()


# Permissions and credentials


def least_privileges() -> list[str]:
    """The ACL rules of the page, for the namespace `default`."""
    (rules,) = re.findall(r"^ACL SETUSER anarchon (.*)$", PAGE.read_text(), re.MULTILINE)
    return str(rules).split()


@asynccontextmanager
async def restricted(
    server: redis.Server, rules: list[str]
) -> AsyncIterator[Callable[[], RedisLeaseStore]]:
    assert server.send("ACL", "SETUSER", "anarchon", *rules) == b"+OK\r\n"
    url = f"redis://anarchon:a-secret@127.0.0.1:{server.port}/0"
    stores: list[RedisLeaseStore] = []

    def store() -> RedisLeaseStore:
        clock = FakeClock()
        stores.append(RedisLeaseStore(address_of(url), OpenOptions("default", clock), clock=clock))
        return stores[-1]

    yield store
    for each in stores:
        await each.close()


async def test_the_least_privileges_of_the_page_are_enough(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """For all that a sidecar asks; and for no other namespace."""
    server = start(kind, "--appendonly", "yes", "--appendfsync", "always")
    async with restricted(server, least_privileges()) as make:
        store = make()
        report = await store.open()
        assert any("could not be read" in doubt for doubt in report.doubts)
        assert any("evicted_keys cannot be watched" in doubt for doubt in report.doubts)
        assert "a-secret" not in repr(report)
        clock = store._options.clock
        assert isinstance(clock, FakeClock)
        cluster = Cluster(None, clock)  # type: ignore[arg-type]
        node = Node(cluster, store, "host:1", "inc-1")
        await node.register()
        cluster.advance_to(SLOT)
        watch = store.watch()
        seen = await node.win(SLOT)
        await node.renew(seen)
        await node.release(seen)
        await asyncio.wait_for(anext(watch), 5)
        await watch.aclose()  # type: ignore[attr-defined]
        await node.complete(seen)
        cluster.advance_to(SLOT + 4 * PERIOD)
        missed = [SLOT + PERIOD, SLOT + 2 * PERIOD]
        assert (await node.plan(missed, settled=SLOT, **ALL)).due == 2
        running = await node.win(SLOT + PERIOD, overlap=OverlapPolicy.CANCEL, retries=1)
        made = await node.triggered(payload=b"p", overlap=OverlapPolicy.CANCEL)
        await node.cancel(SLOT + PERIOD)
        await node.complete(running)
        await node.pause("why")
        await node.resume(passed=())
        await node.resume()
        await node.complete(await node.win(made.run.slot, **QUEUE))
        assert len(await node.history()) == 5
        assert len((await store.jobs((), "", 10)).answers) == 1
        assert len((await store.instances()).answers) == 1
        assert await node.prune() == 0
        await node.beat(leaving=True)
        cluster.advance(30 * DAY)
        assert await node.prune() == 5
        other = RedisLeaseStore(store._address, OpenOptions("others", clock))
        with pytest.raises(StoreRefused, match=r"(?i)permissions.*docs/stores/redis\.md"):
            await other.open()


@pytest.mark.parametrize("command", ["-zadd", "-hset", "-time", "-evalsha", "-zrevrank"])
async def test_a_command_that_is_not_permitted_is_found_at_start(
    command: str, start: Callable[..., redis.Server]
) -> None:
    """It would stop a script in the middle."""
    server = start("redis")
    async with restricted(server, [*least_privileges(), command]) as make:
        with pytest.raises(StoreRefused, match=r"docs/stores/redis\.md lists") as caught:
            await make().open()
        assert "a-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "doubt"),
    [("-publish", "publishing is not permitted"), ("-subscribe", "subscribing is not permitted")],
)
async def test_s19_where_news_are_not_permitted_it_starts_and_says_so(
    rule: str, doubt: str, start: Callable[..., redis.Server]
) -> None:
    server = start("redis")
    async with restricted(server, [*least_privileges(), rule]) as make:
        store = make()
        assert doubt in " ".join((await store.open()).doubts)


async def test_a_wrong_password_is_refused_and_not_shown(
    start: Callable[..., redis.Server],
) -> None:
    server = start("redis", "--requirepass", "right-secret")
    for user in ("", "nobody"):
        with pytest.raises(StoreRefused, match="REDISCLI_AUTH") as caught:
            await report_of(f"redis://{user}:wrong-secret@127.0.0.1:{server.port}")
        assert "secret" not in str(caught.value)
    with pytest.raises(StoreRefused, match=r"Authentication required"):
        await report_of(f"redis://127.0.0.1:{server.port}")


async def test_a_database_that_the_server_does_not_have_is_refused(kind: str) -> None:
    url = redis.session_url(kind).removesuffix("/0")
    with pytest.raises(StoreRefused, match="DB index is out of range; the URL's path"):
        await report_of(f"{url}/99")
    await report_of(f"{url}/3")


def test_a_sentinel_is_refused() -> None:
    info = {"redis_version": "7.0.15", "redis_mode": "sentinel"}
    with pytest.raises(StoreRefused, match=r"is a Sentinel.*\?sentinel=name"):
        _checks.check_server(info, _checks.Findings(), cluster=False)


async def test_the_password_comes_from_the_url_a_file_or_the_environment(
    start: Callable[..., redis.Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("redis", "--requirepass", "p%@/w")
    await report_of(f"redis://:p%25%40%2Fw@127.0.0.1:{server.port}")
    file = tmp_path / "password"
    file.write_text("p%@/w\n")
    await report_of(f"redis://127.0.0.1:{server.port}?password_file={file}")
    monkeypatch.setenv("REDISCLI_AUTH", "p%@/w")
    await report_of(f"redis://127.0.0.1:{server.port}")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority of the test's own, and a server's certificate for 127.0.0.1."""
    common = [openssl(), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    for name in ("server", "stranger"):
        subprocess.run(
            [
                *(*common, "-nodes", "-days", "2", "-subj", f"/CN={name}"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.crt"),
            ],
            check=True,
            capture_output=True,
        )
    return tmp_path


async def test_tls_to_a_server_that_is_known_and_to_no_other(
    start: Callable[..., redis.Server], certificates: Path
) -> None:
    port = free_port()
    start(
        "redis",
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificates / "server.crt")),
        *("--tls-key-file", str(certificates / "server.key")),
        *("--tls-ca-cert-file", str(certificates / "server.crt")),
    )
    url = f"rediss://127.0.0.1:{port}/0"
    verified, _ = await report_of(f"{url}?tls_ca={certificates}/server.crt")
    assert "redis" in verified
    for wrong in ("", f"?tls_ca={certificates}/stranger.crt"):
        with pytest.raises(StoreRefused, match=r"certificate.*; the URL's option tls_ca"):
            await report_of(url + wrong)
    await report_of(f"{url}?tls_verify=none")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "names no single host"),
        ("redis:///0", "names no single host"),
        ("redis:host", "a Redis store is"),
        ("redis://a,b:1/0", "Several hosts are Sentinels"),
        ("redis://a,,b/0?sentinel=m", "names no single host"),
        ("redis://a,b:x/0?sentinel=m", "cannot be read"),
        ("redis://a,b/0?sentinel=", "sentinel is empty"),
        ("redis://a/0?sentinel_username=u", "needs sentinel"),
        ("redis://a/0?sentinel=m&sentinel_password_file=/no/such", "No such file"),
        ("redis://h:port", "cannot be read"),
        ("redis://h:99999", "cannot be read"),
        ("redis://h/db", "number of a database"),
        ("redis://h/-1", "number of a database"),
        ("redis://h/0#f", "every # as %23"),
        ("redis://h/0?x=1", "option 'x' is not known"),
        ("redis://h/0?tls_ca=a&tls_ca=b", "stands twice"),
        ("redis://h/0?tls_ca=/x", "for rediss: and valkeys: only"),
        ("rediss://h/0?tls_verify=maybe", "'full' .* or 'none'"),
        ("rediss://h/0?tls_ca=/no/such", "there is no such file"),
        ("redis://h/0?password_file=/no/such", "No such file"),
        ("redis://u:s3cret@h/0?password_file=/x", "use one of them"),
        ("redis://u:s3cret@h:x/0", "cannot be read"),
        ("redis://h/0?strategy=magic", "strategy is 'magic': use one of: lease"),
        ("redis://a,b/1?cluster=true", "a cluster has the database 0 alone"),
        ("redis://a,b/?cluster=yes", "cluster is 'yes': it is 'true' or 'false'"),
        ("redis://a,b/?cluster=false", "names no single host"),
        ("redis://a,b/?cluster=true&sentinel=m", "both cluster and sentinel"),
        ("redis://a/?durability=replicas", "durability is 'replicas': it is 'replicas:1'"),
        ("redis://a/?durability=replicas:0", "it is 'replicas:1' to 'replicas:9'"),
        ("redis://a/?durability=always", "or 'fsync'"),
    ],
)
def test_a_url_that_is_wrong_is_refused_with_what_is_right(url: str, said: str) -> None:
    with pytest.raises(StoreRefused, match=said) as caught:
        open_store(url, OpenOptions("default", FakeClock()))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("redis://h", "redis://h:6379/0"),
        ("valkey://h:1/2?strategy=lease", "valkey://h:1/2"),
        ("rediss://u:p@h/3", "rediss://h:6379/3"),
        ("valkeys://[::1]:7/0", "valkeys://[::1]:7/0"),
        (
            "redis://u:p@a,b:7,[::1]/1?sentinel=m",
            "redis://a:26379,b:7,[::1]:26379/1, the master 'm'",
        ),
        ("redis://u:p@a,b:7/?cluster=true", "redis://a:6379,b:7/0, a cluster"),
    ],
)
def test_a_url_names_a_server(url: str, location: str) -> None:
    assert dispatch.strategy_of(url) == "lease"
    store = open_store(url, OpenOptions("default", FakeClock()))
    assert store.capabilities.backend == "redis:lease"
    assert not store.capabilities.boot_leases
    assert address_of(url).location == location
    assert "s3cret" not in repr(address_of("redis://:s3cret@h"))


def test_a_missing_driver_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("anarchon_backends.redis_lease")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [each for each in sys.modules if each == "redis" or each.startswith("redis.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreRefused, match=r"pip install \"anarchon\[redis\]\""):
        open_store("redis://h", OpenOptions("default", FakeClock()))


# The store's own time, and what is in it


async def test_s01_the_servers_clock_decides(kind: str) -> None:
    """Not the instance's, which is a year behind here."""
    url, _, prefix = redis.fresh_url(kind).partition("#")
    store = RedisLeaseStore(address_of(url), OpenOptions(prefix + "x", FakeClock(wall=1)))
    await store.open()
    before = time.time_ns() // 1_000
    node = Node(Cluster(None, FakeClock()), store, "host:1", "inc-1")  # type: ignore[arg-type]
    (answer,) = await node.register()
    assert abs(answer.since - before // 1_000) < 5_000
    slot = answer.since + 500
    won = await node.win(slot, previous_slot=None)
    assert won.run.current is not None
    assert won.run.current.fence >= before, "whole microseconds, all 16 digits of them"
    assert (await node.claim(answer.since + 60_000, previous_slot=None)).outcome == "early"
    step = await node.take_over(won, expected_at=0)
    assert step.outcome == "lost"
    await store.close()


async def test_every_key_of_a_job_is_in_one_hash_tag(
    start: Callable[..., redis.Server],
) -> None:
    """So that a cluster keeps them on one node; those of the namespace are in another."""
    server = start("redis")
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        await node.register(definition("a:b"))
        await node.complete(await node.win(SLOT + 1, job="a:b", **FREE))
        await node.win(SLOT + 2, job="a:b", **FREE)
        await node.release(await node.win(SLOT + 3, job="a:b", **FREE))
        await node.triggered(job="a:b", payload=b"p", overlap=OverlapPolicy.ALLOW)
    listing = server.send("EVAL", "return table.concat(redis.call('KEYS', '*'), ' ')", "0")
    keys = listing.decode().split("\r\n")[1].split()
    tags = {re.sub(r"^anarchon:(\{.*?\}).*$", r"\1", key) for key in keys}
    assert tags == {"{7:default}", "{7:default:job}", "{7:default:a:b}"}


async def test_s14_a_long_batch_goes_in_several_calls(kind: str) -> None:
    async with behind_a_proxy(kind) as (_, cluster, through, _):
        names = [f"job-{n}" for n in range(1_201)]
        await through.register(*(definition(name) for name in names))
        assert [len(part) for part in _batches.parts_of(names)] == [250, 250, 250, 250, 201]
        cluster.advance_to(SLOT + PERIOD)
        reply = await through.store.claim([through.wish(SLOT + PERIOD, job=name) for name in names])
        assert {answer.outcome for answer in reply.answers} == {"won"}
        assert set(reply.fences) == set(names)
        beat = await through.beat(
            sweep=tuple((name, "every:10s") for name in names),
            looks=tuple((name, SLOT + PERIOD) for name in names),
            sweep_limit=1_000,
        )
        assert len(beat.unfinished) == 1_000
        assert len(beat.settled) == len(beat.looks) == 1_201
        (view,) = (await through.store.jobs(["job-1200"], "", 1)).answers
        assert view.instance_ids == ("host:2",)


async def test_s11_a_call_of_which_a_part_was_done_is_unknown(
    kind: str, start: Callable[..., redis.Server]
) -> None:
    """The server becomes a replica between two parts: the second alone was surely not done."""
    server = start(kind)
    async with cluster_on(server.url) as cluster:
        node = await one_node(cluster)
        names = [f"job-{n}" for n in range(300)]
        await node.register(*(definition(name) for name in names))
        cluster.advance_to(SLOT + PERIOD)
        store = node.store
        assert isinstance(store, RedisLeaseStore)
        run = store._server.run_each
        calls = 0

        async def then_demoted(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            said = await run(*given, **more)
            if calls == 1:
                server.send("REPLICAOF", "127.0.0.1", "1")
            return said

        store._server.run_each = then_demoted  # type: ignore[method-assign]
        wishes = [node.wish(SLOT + PERIOD, job=name) for name in names]
        reply = await store.claim(wishes)
        outcomes = [answer.outcome for answer in reply.answers]
        assert outcomes == ["won"] * 250 + ["unknown"] * 50
        assert set(reply.fences) == set(names[:250])
        server.send("REPLICAOF", "NO", "ONE")
        reply = await store.claim(wishes)
        assert {answer.outcome for answer in reply.answers} == {"won"}
        calls = 0
        results = [
            Completion(claim.job, claim.slot, claim.token, Outcome("done")) for claim in wishes
        ]
        counted = [answer.outcome for answer in (await store.complete(results)).answers]
        assert counted == ["recorded"] * 250 + ["unknown"] * 50
        server.send("REPLICAOF", "NO", "ONE")
        told = await store.complete(results)
        assert {answer.outcome for answer in told.answers} == {"recorded"}


def test_a_batch_of_much_text_goes_in_small_calls() -> None:
    results = [{"job": "j", "failure": "x" * 40_000} for _ in range(100)]
    parts = _batches.parts_of(results)
    assert sum(map(len, parts)) == 100
    assert max(map(len, parts)) < 30


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\U0001f600", '"\\/', "é" * 2_000, " "])
async def test_s30_what_a_handler_says_is_kept_as_it_is(kind: str, text: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        seen = await node.win(SLOT)
        failure = Failure(text, text, text, permanent=True, retry_after_ms=3)
        for _ in range(2):
            answer = await node.complete(seen, Outcome(failure=failure))
            assert answer.outcome == "recorded"
        run = await node.history(traces=True)
        assert run[0].attempts[0].failure == failure
        other = await node.win(SLOT + 1, **FREE)
        for _ in range(2):
            assert (await node.complete(other, Outcome(text))).outcome == "recorded"


ODD = ["\x00", "\U0001f600", "'\"\\/", "é" * 500, "r:1 {2}", "-1"]


@pytest.mark.parametrize("text", ODD)
async def test_s29_what_an_operator_says_is_kept_as_it_is(kind: str, text: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        running = await node.win(SLOT)
        payload = bytes(range(256)) + text.encode()
        made = await node.triggered(text, payload=payload, **QUEUE)
        assert (await node.triggered(text)).run == made.run
        assert made.run.request_id == text
        await node.control(CancelRun("job", SLOT, text))
        assert (await node.seen(SLOT)).run.cancel_message == text
        await node.pause(text)
        (view,) = (await node.store.jobs(["job"], "", 1)).answers
        assert view.pause_reason == text
        await node.complete(running)
        assert (await node.claim(made.run.slot, **QUEUE)).payload == payload


async def rows_of(node: Node, name: str) -> list[bytes]:
    """The fields of one of the job's hashes."""
    store = node.store
    assert isinstance(store, RedisLeaseStore)
    (fields,) = await pool_of(store).ask(["HKEYS", f"{store._calls.key_of('job')}:{name}"])
    return list(fields)


async def test_s30_a_payload_goes_when_its_run_has_ended_and_the_request_with_the_row(
    kind: str,
) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        free = {"overlap": OverlapPolicy.ALLOW}
        made = [await node.triggered(f"r-{n}", payload=b"p", **free) for n in range(3)]
        slots = [str(seen.run.slot).encode() for seen in made]
        await node.cancel(made[0].run.slot)
        won = await node.win(made[1].run.slot, **free)
        assert await rows_of(node, "payloads") == slots[1:], "it may yet be taken over"
        await node.complete(won)
        await node.complete(await node.win(made[2].run.slot, **free))
        assert await rows_of(node, "payloads") == []
        assert len(await rows_of(node, "requests")) == 3
        await node.beat(leaving=True)
        cluster.advance(30 * DAY)
        assert await node.prune() == 3
        assert await rows_of(node, "requests") == []


async def test_s30_of_many_runs_those_that_are_not_wanted_are_not_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at in the server, a few at a time, since it serves nobody else meanwhile."""
    sent, looked = list[Command](), list[int]()

    async def read(self: Pool, *commands: Command) -> list[Any]:
        sent.extend(commands)
        return await plain_read(self, *commands)

    def said(answer: bytes) -> dict[str, Any]:
        looked.append(json.loads(answer)["looked"])
        return plain_said(answer)

    plain_read, plain_said = Pool.read, _sieve._said
    monkeypatch.setattr(Pool, "read", read)
    monkeypatch.setattr(_sieve, "_said", said)
    monkeypatch.setattr(_sieve, "STEP", 10)
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        slots = [SLOT + n for n in range(21)]
        seen = [answer.run for answer in (await claim_all(node, slots)).answers if answer.run]
        assert len(seen) == len(slots)
        done = [Completion("job", each.run.slot, each.run.token, Outcome()) for each in seen]
        await node.store.complete(done)
        for wish in ({}, {"job": "job"}):
            looked.clear()
            sent.clear()
            found, _ = await node.paged(**wish, states=frozenset({RunState.INTERRUPTED}))
            assert found == []
            assert [each for each in sent if each[0] == "HGETALL"] == []
            assert looked == [10, 10, 1]


@pytest.mark.parametrize("looked_max", [1, 100])
async def test_s30_a_run_is_shown_once_where_that_before_it_is_pruned_meanwhile(
    kind: str, looked_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_ask, ends = _sieve.Sieve._ask, list[str]()
    store: RedisLeaseStore

    async def ask(self: _sieve.Sieve, calls: Sequence[Call]) -> list[dict[str, Any]]:
        said = await plain_ask(self, calls)
        ends.append(said[0].get("last", ""))
        if len(ends) == 2:
            await pool_of(store).ask(["ZREM", f"{store._calls.namespace}:runs", ends[-1]])
        return said

    monkeypatch.setattr(_sieve, "STEP", 2)
    monkeypatch.setattr(_sieve, "LOOKED_MAX", looked_max)
    monkeypatch.setattr(_sieve.Sieve, "_ask", ask)
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        assert isinstance(node.store, RedisLeaseStore)
        store = node.store
        await node.register(*map(definition, "abcdef"))
        cluster.advance_to(SLOT + PERIOD)
        for job in "abcdef":
            await node.win(SLOT + PERIOD, job=job)
        found, _ = await node.paged(states=frozenset({RunState.CLAIMED}))
        assert ends[1] == f"{SLOT + PERIOD} c"
        assert found == [(job, 2 * PERIOD // SECOND) for job in "fedcba"]


async def claim_all(node: Node, slots: list[int]) -> Reply[ClaimAnswer]:
    return await node.store.claim([node.wish(slot, **FREE) for slot in slots])


# Records are input


BROKEN = {
    "state": ["HSET", "KEY", "state", "dancing"],
    "number": ["HSET", "KEY", "lease_until", "soon"],
    "lease": ["HSET", "KEY", "lease_until", ""],
    "attempt": ["HSET", "KEY", "attempt", "0"],
    "cancel": ["HSET", "KEY", "cancel", "maybe"],
    "trigger": ["HSET", "KEY", "trigger", "moon"],
    "cause": ["HSET", "KEY", "cause", "whim"],
    "attempt_state": ["HSET", "KEY", "attempt_state", "asleep"],
    "token": ["HSET", "KEY", "token", ""],
    "fence": ["HSET", "KEY", "fence", "-"],
    "failure": ["HSET", "KEY", "failure", "{nonsense"],
    "kind": ["SET", "KEY", "x"],
    "due": ["HSET", "KEY", "state", "due"],
    "retry": ["HSET", "KEY", "state", "retrying"],
}


@pytest.mark.parametrize("how", list(BROKEN))
async def test_a_record_that_somebody_spoilt_spoils_no_other(kind: str, how: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        first, second = await cluster.nodes_of(2)
        for node in (first, second):
            await node.register(definition(), definition("other"))
        cluster.advance_to(SLOT)
        spoilt, good = await first.win(SLOT), await first.win(SLOT, job="other")
        store = first.store
        assert isinstance(store, RedisLeaseStore)
        key = f"{store._calls.key_of('job')}:{SLOT}"
        if how == "kind":
            await pool_of(store).ask(["DEL", key])
        await pool_of(store).ask([key if word == "KEY" else word for word in BROKEN[how]])
        beat = await first.beat(
            renewals=(first.renewal(spoilt), first.renewal(good)),
            looks=(("job", SLOT), ("other", SLOT)),
            sweep=(("job", "every:10s"), ("other", "every:10s")),
        )
        assert [each.outcome for each in beat.renewals] == ["unknown_token", "renewed"]
        assert [bool(each) for each in beat.looks] == [False, True]
        assert [each.run.job for each in beat.unfinished] == ["other"]
        wishes = [second.wish(SLOT, job=job) for job in ("job", "other")]
        reply = await second.store.claim(wishes)
        assert [each.outcome for each in reply.answers] == ["unknown", "lost"]
        assert (await first.complete(good)).outcome == "recorded"
        if how != "failure":  # which a result mends
            assert (await first.complete(spoilt)).outcome == "unknown_token"
        assert len(await first.history(job="other")) == 1
        if how not in ("lease", "attempt", "token", "due", "retry"):
            with pytest.raises(StoreUnavailable):
                await first.history(job="job")


@pytest.mark.parametrize("how", ["state", "lease", "kind", "due", "retry"])
async def test_s29_operators_can_pause_a_job_of_which_somebody_spoilt_a_run(
    kind: str, how: str
) -> None:
    """What cannot be read is nobody's to claim; what is about it is said not to have been done."""
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        (node,) = await cluster.nodes_of(1)
        await node.register(definition(), definition("other"))
        cluster.advance_to(SLOT)
        await node.win(SLOT)
        store = node.store
        assert isinstance(store, RedisLeaseStore)
        key = f"{store._calls.key_of('job')}:{SLOT}"
        if how == "kind":
            await pool_of(store).ask(["DEL", key])
        await pool_of(store).ask([key if word == "KEY" else word for word in BROKEN[how]])
        with pytest.raises(OutcomeUnknown, match=r"not as Anarchon writes it"):
            await node.cancel(SLOT)
        with pytest.raises(OutcomeUnknown, match=r"not as Anarchon writes it"):
            await node.trigger()
        assert await rows_of(node, "requests") == []
        assert (await node.plan([SLOT - 1])).done is False
        assert (await node.pause()).outcome is ControlOutcome.DONE
        made = await node.triggered(job="other")
        assert made.run.state is RunState.DUE
        await node.complete(await node.win(SLOT, job="other", overlap=OverlapPolicy.ALLOW))


async def test_s29_no_payload_is_kept_of_a_triggered_run_that_is_skipped(kind: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        cluster.advance_to(SLOT)
        await node.win(SLOT)
        cluster.advance(SECOND)
        made = await node.triggered(payload=b"of no use")
        assert made.run.state is RunState.SKIPPED
        assert await rows_of(node, "payloads") == []


@pytest.mark.parametrize("name", ["requests", "payloads"])
async def test_a_key_of_another_kind_spoils_its_own_job_alone(kind: str, name: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        (node,) = await cluster.nodes_of(1)
        await node.register(definition(), definition("other"))
        cluster.advance_to(SLOT)
        free = {"overlap": OverlapPolicy.ALLOW}
        seen = await node.win(SLOT)
        other = await node.win(SLOT, job="other")
        store = node.store
        assert isinstance(store, RedisLeaseStore)
        key = f"{store._calls.key_of('job')}:{name}"
        await pool_of(store).ask(["DEL", key])
        await pool_of(store).ask(["SET", key, "x"])
        reply = await store.claim(
            [node.wish(SLOT + 1, job=job, **FREE) for job in ("job", "other")]
        )
        assert reply.answers[1].outcome == "won"
        assert (await node.complete(other)).outcome == "recorded"
        assert (await node.complete(seen)).outcome == "recorded"
        with pytest.raises(OutcomeUnknown):
            await node.trigger(payload=b"p", **free)
        assert (await node.triggered(job="other", payload=b"p", **free)).run.state is RunState.DUE


async def test_an_instance_or_definition_that_somebody_spoilt_is_said(kind: str) -> None:
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        store = node.store
        assert isinstance(store, RedisLeaseStore)
        await pool_of(store).ask(
            ["HSET", f"{store._calls.namespace}:instances", "odd", "{nonsense"]
        )
        assert (await node.beat()).known
        with pytest.raises(StoreUnavailable, match="'odd' in the store is not as Anarchon writes"):
            await store.instances()
        await pool_of(store).ask(["HDEL", f"{store._calls.namespace}:instances", "odd"])
        definitions = f"{store._calls.key_of('job')}:definitions"
        await pool_of(store).ask(
            ["HSET", definitions, definition().definition_id, json.dumps({"spec": "{}"})]
        )
        with pytest.raises(StoreUnavailable, match="the definition of 'job'"):
            await store.jobs(["job"], "", 1)
        assert await node.prune() == 0


async def test_a_job_that_somebody_spoilt_is_said_when_it_is_registered(kind: str) -> None:
    """And keeps no other from being registered."""
    async with cluster_on(redis.fresh_url(kind)) as cluster:
        node = await one_node(cluster)
        store = node.store
        assert isinstance(store, RedisLeaseStore)
        await pool_of(store).ask(["HSET", store._calls.key_of("job"), "floor", "deep"])
        with pytest.raises(OutcomeUnknown, match=r"job.*not as Anarchon writes it"):
            await node.register(definition(), definition("other"))
        cluster.advance_to(SLOT + PERIOD)
        assert (await node.claim(SLOT + PERIOD, job="other")).outcome == "won"
        assert (await node.claim(SLOT + PERIOD)).outcome == "unknown"


# News


async def news(watch: AsyncIterator[None]) -> None:
    await anext(watch)


async def test_s19_a_watch_that_lost_its_connection_says_so_and_the_next_tells_what_was_missed(
    kind: str,
) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        watch = through.store.watch()
        waiting = asyncio.create_task(news(watch))
        freed = await direct.win(SLOT)
        await direct.release(freed)
        await asyncio.wait_for(waiting, 5)
        waiting = asyncio.create_task(news(watch))
        await asyncio.sleep(0)
        proxy.cut()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(waiting, 5)
        await direct.release(await direct.win(SLOT + 1, **FREE))
        watch = through.store.watch()
        await asyncio.wait_for(anext(watch), 5)
        await watch.aclose()  # type: ignore[attr-defined]
