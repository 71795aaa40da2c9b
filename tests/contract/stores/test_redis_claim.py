"""What only a Redis or Valkey server can do to a store without leases, on real ones (S10, S11)."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends.redis._address import address_of
from anarchon_backends.redis_claim import RedisClaimStore, _scripts
from anarchon_backends.redis_claim._batches import parts_of
from anarchon_backends.redis_claim._strategies import STRATEGIES
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from anarchon_server.core.limits import CLAIM_BATCH
from anarchon_server.core.model import Failure, Outcome, RunState
from anarchon_server.core.store import Claim, ClaimOutcome, Completion, OpenOptions, Store
from anarchon_server.opening import open_store
from tests.contract.harness import (
    DAY,
    JOB,
    PERIOD,
    SECOND,
    T0,
    ClaimOnlyNode,
    Cluster,
    FakeClock,
    Node,
    definition,
)
from tests.contract.stores.test_redis_cluster import Moving
from tests.servers import proxy as proxies
from tests.servers import redis, redis_cluster

SLOT = T0 + PERIOD
HOUR = 3_600 * SECOND
PATIENT_MS, IMPATIENT_MS = 20_000, 500
PAGE = Path(__file__).parents[3] / "docs/stores/redis-claim.md"


@dataclass(frozen=True)
class On:
    """A strategy, and the kind of server that it is tried on."""

    kind: str
    strategy: str

    def __str__(self) -> str:
        """As the contract suite names it, where it has it."""
        kind = "redis" if self.strategy == "idmp" else self.kind
        return f"{kind}-{self.strategy}"


ALL = [
    On("redis", "script"),
    On("redis", "stream-id"),
    On("redis8", "idmp"),
    On("valkey", "script"),
    On("valkey", "stream-id"),
    On("redis8", "stream-id"),
]
each_strategy = pytest.mark.parametrize(
    "on", [On("redis", "script"), On("redis", "stream-id"), On("redis8", "idmp")], ids=str
)
Start = Callable[..., redis.Server]


@pytest.fixture(params=ALL, ids=str)
def on(request: pytest.FixtureRequest) -> On:
    """Where a test does not say otherwise, it runs on all."""
    chosen: On = request.param
    return chosen


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers of the test's own, and stops them after it."""
    servers: list[redis.Server] = []

    def started(kind: str, *settings: str) -> redis.Server:
        server = redis.private(kind, *settings)
        servers.append(server)
        return server.start()

    yield started
    for server in servers:
        server.stop()


class Proxy(proxies.Proxy):
    """Counts `turns`, too: how often a client began to say something, and so to wait."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.turns = 0
        self._asking = False

    def _pass_request(self, chunk: bytes) -> asyncio.Event:
        self.turns += not self._asking
        self._asking = True
        return super()._pass_request(chunk)

    def _pass_reply(self, chunk: bytes) -> asyncio.Event | None:
        self._asking = False
        return super()._pass_reply(chunk)


class Database:
    """A server, as the harness's cluster uses one. Its time is moved by hand."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return redis.open_virtual(self.url, options)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url), node_type=ClaimOnlyNode)
    async with cluster.stack:
        yield cluster


def url_of(server: redis.Server, strategy: str) -> str:
    return f"{server.url}?strategy={strategy}"


def store_of(node: Node) -> RedisClaimStore:
    assert isinstance(node.store, RedisClaimStore)
    return node.store


def key_of(node: Node, suffix: str = "", job: str = JOB) -> str:
    return store_of(node)._keys.job(job) + suffix


async def ask(node: Node, *command: str | int) -> Any:
    """One command, whose answer it gives. Any error is the test's."""
    (answer,) = await store_of(node)._server.ask(list(command))  # type: ignore[union-attr]
    assert not isinstance(answer, Exception), answer
    return answer


@asynccontextmanager
async def behind_a_proxy(on: On) -> AsyncIterator[tuple[Proxy, Cluster, Node, Node]]:
    """A node that speaks through a proxy, and one that does not; both registered, at the slot.

    Both are patient, as the machine may be busy; for what is to time out, see `impatient`.
    """
    url = redis.fresh_url(on.kind, on.strategy)
    port = int(re.findall(r":(\d+)/", url)[0])
    async with Proxy(port) as proxy, cluster_on(url) as cluster:
        direct = await cluster.node(op_timeout_ms=PATIENT_MS)
        assert isinstance(cluster.database, Database)
        cluster.database.url = url.replace(f":{port}/", f":{proxy.port}/")
        through = await cluster.node(op_timeout_ms=PATIENT_MS)
        for node in (direct, through):
            await node.register()
        cluster.advance_to(SLOT)
        yield proxy, cluster, through, direct


@contextmanager
def impatient(node: Node) -> Iterator[None]:
    """While a call of this node is to time out."""
    server = store_of(node)._server
    server._timeout_ms = IMPATIENT_MS
    yield
    server._timeout_ms = PATIENT_MS


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a server or a task gives no other signal of."""
    while not true():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


# Unknown outcomes: S11


async def test_s11_a_lost_reply_is_unknown_and_the_repeat_has_won(on: On) -> None:
    """And the driver has not asked again by itself: it would have been told that it lost."""
    async with behind_a_proxy(on) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        before = proxy.requests
        proxy.drop_replies()
        with impatient(through), pytest.raises(OutcomeUnknown, match="no answer within 500 ms"):
            await through.ask(claim)
        assert proxy.requests == before + 1
        proxy.resume()
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won"


async def test_s11_a_connection_reset_after_sending_is_unknown(on: On) -> None:
    async with behind_a_proxy(on) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.cut_after_requests()
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won", "it has connected again by itself"


async def test_s11_what_could_not_be_sent_was_surely_not_done(on: On) -> None:
    async with behind_a_proxy(on) as (proxy, _, through, direct):
        proxy.refuse()
        proxy.cut()
        with pytest.raises(StoreError):  # the idle connection may not have learned of it yet
            await through.ask(through.wish(SLOT, may_run=False))
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT)
        proxy.resume()
        await through.beat()
        assert await direct.run(SLOT) is None
        assert (await through.claim(SLOT)).outcome == "won"


async def test_a_call_is_bounded_in_time_and_its_late_answer_is_nobodys(on: On) -> None:
    async with behind_a_proxy(on) as (proxy, _, through, _):
        proxy.hold_replies()
        with impatient(through), pytest.raises(OutcomeUnknown):
            await through.claim(SLOT)
        proxy.resume()
        reply = await through.store.instances()
        assert {each.instance_id for each in reply.answers} == {"host:1", "host:2"}


async def test_s11_a_part_of_a_batch_that_is_not_answered_leaves_its_items_open(on: On) -> None:
    """Claims, renewals and results are open one by one, and a heartbeat says of which jobs."""
    async with cluster_on(redis.fresh_url(on.kind, on.strategy)) as cluster:
        node = await cluster.node()
        names = [f"job-{n}" for n in range(CLAIM_BATCH + 2)]
        await node.register(*(definition(name) for name in names))
        cluster.advance_to(SLOT)
        store = store_of(node)
        run_each = store._server.run_each

        async def cut_short(calls: Any, **given: Any) -> Any:
            answers = await run_each(calls[:-1], **given)
            return [*answers, StoreUnavailable("not sent")]

        store._server.run_each = cut_short  # type: ignore[method-assign]
        wishes = [node.wish(SLOT, job=name) for name in names]
        reply = await store.claim(wishes)
        words = Counter(each.outcome for each in reply.answers)
        assert words == {"won": CLAIM_BATCH, "unknown": 2}
        won = [each.run for each in reply.answers if each.run]
        beat = await node.beat(looks=tuple((seen.run.job, SLOT) for seen in won))
        assert (beat.looks, beat.unheard, beat.known) == (tuple(won), frozenset(), True)
        done = [
            Completion(name, SLOT, wish.token, Outcome())
            for name, wish in zip(names, wishes, strict=True)
        ]
        recorded = await store.complete(done[:CLAIM_BATCH] + done[-1:])
        assert Counter(each.outcome for each in recorded.answers) == {
            "recorded": CLAIM_BATCH,
            "unknown": 1,
        }
        with pytest.raises(StoreUnavailable):
            await store.claim(wishes[-1:])
        store._server.run_each = run_each  # type: ignore[method-assign]
        reply = await store.claim(wishes[CLAIM_BATCH:])
        assert {each.outcome for each in reply.answers} == {"won"}


# Answers that mean "not done": each is surely so, and the claim is free


async def refused_then_won(
    on: On, server: redis.Server, refuse: tuple[str, ...], allow: tuple[str, ...]
) -> str:
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        server.send(*refuse)
        with pytest.raises(StoreUnavailable) as caught:
            await node.claim(SLOT)
        server.send(*allow)
        assert (await node.claim(SLOT)).outcome == "won"
        return str(caught.value)


async def test_oom_a_full_server_refuses_whole_scripts(on: On, start: Start) -> None:
    server = start(on.kind, "--maxmemory-policy", "noeviction")
    full = ("CONFIG", "SET", "maxmemory", "1mb")
    said = await refused_then_won(on, server, full, ("CONFIG", "SET", "maxmemory", "0"))
    assert "used memory" in said


async def test_readonly_a_master_that_became_a_replica_does_nothing(on: On, start: Start) -> None:
    server = start(on.kind)
    demote = ("REPLICAOF", "127.0.0.1", "1")
    await refused_then_won(on, server, demote, ("REPLICAOF", "NO", "ONE"))


async def test_noreplicas_too_few_replicas_to_write(on: On, start: Start) -> None:
    server = start(on.kind)
    needs = ("CONFIG", "SET", "min-replicas-to-write")
    said = await refused_then_won(on, server, (*needs, "1"), (*needs, "0"))
    assert "replicas" in said


async def test_noscript_the_scripts_are_sent_again(on: On, start: Start) -> None:
    server = start(on.kind)
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        server.send("SCRIPT", "FLUSH")
        assert (await node.claim(SLOT)).outcome == "won"


# The death of the server


@pytest.mark.timeout(120)
async def test_s10_kill_9_under_load_loses_no_claim_and_gives_none_twice(
    on: On, start: Start
) -> None:
    """`appendonly yes`; the instances are back by themselves."""
    server = start(on.kind, "--appendonly", "yes", "--appendfsync", "everysec")
    slots = range(T0 + PERIOD, T0 + 301 * PERIOD, PERIOD)
    won: list[tuple[int, str]] = []
    words: Counter[str] = Counter()
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        nodes = [await cluster.node(op_timeout_ms=1_000) for _ in range(6)]
        for node in nodes:
            await node.register()
        cluster.advance_to(slots[-1])

        async def work(node: Node) -> None:
            for slot in slots:
                claim = node.wish(slot, start_deadline_ms=DAY)
                while True:
                    try:
                        outcome = (await node.ask(claim)).outcome
                    except StoreError as error:
                        words[type(error).__name__] += 1
                        await asyncio.sleep(0.02)  # the loop's back-off
                        continue
                    break
                words[outcome] += 1
                if outcome is ClaimOutcome.WON:
                    won.append((slot, claim.token))

        working = [asyncio.create_task(work(node)) for node in nodes]
        for share in (0.2, 0.5, 0.8):
            await until(lambda share=share: words["won"] + words["old"] / 6 >= share * len(slots))  # type: ignore[misc]
            server.kill()
            await asyncio.to_thread(server.start)
        await asyncio.gather(*working)
        rows = await nodes[0].history(limit=1_000)
    assert len(dict(won)) == len(won), "no slot has two winners"
    kept = {(seen.run.slot, seen.run.token) for seen in rows if seen.run.token}
    assert kept == set(won), "each acknowledged claim is there, and no other"
    if on.strategy == "stream-id":
        assert {seen.run.slot for seen in rows} == set(slots), "what was passed over is said"
    else:
        assert {slot for slot, _ in won} == set(slots), "each slot has a winner"
    assert words["OutcomeUnknown"] > 0, "the kills met calls under way"


@each_strategy
async def test_s10_the_record_of_a_claim_outlives_history_and_the_server(
    on: On, start: Start
) -> None:
    """History says who won; where it is gone, the claim itself does."""
    server = start(on.kind, "--appendonly", "yes", "--appendfsync", "always")
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        first, second = await cluster.nodes_of(2)
        for n in range(1, 4):
            cluster.advance_to(T0 + n * PERIOD)
            seen = await first.win(T0 + n * PERIOD)
            await first.complete(seen)
        for when in ("at once", "after a restart", "after a rewrite of its log"):
            assert await ask(
                first, "DEL", *(key_of(first, f":{T0 + n * PERIOD}") for n in (1, 2, 3))
            )
            answer = await second.claim(seen.run.slot)
            assert answer.outcome == "lost", when
            assert answer.run is not None
            assert answer.run.run.token == seen.run.token
            answer = await second.claim(T0 + 2 * PERIOD)
            assert answer.outcome == "lost", when
            if when == "at once":
                await ask(first, "SET", key_of(first, f":{T0 + PERIOD}"), "x")
            if when == "after a restart":
                server.send("BGREWRITEAOF")
                await until(
                    lambda: b"aof_rewrite_in_progress:0" in server.send("INFO", "persistence")
                )
            server.kill()
            await asyncio.to_thread(server.start)
            await ask(first, "SET", key_of(first, f":{T0 + 3 * PERIOD}"), "x")


# stream-id: what was passed over


@pytest.mark.parametrize("kind", ["redis", "redis8", "valkey"])
async def test_i6_neither_trimming_nor_deleting_entries_makes_an_old_slot_free(kind: str) -> None:
    """The stream's last id stays, and with it everything before it is passed over."""
    async with cluster_on(redis.fresh_url(kind, "stream-id")) as cluster:
        first, second = await cluster.nodes_of(2)
        cluster.advance_to(T0 + 3 * PERIOD)
        late = {"start_deadline_ms": HOUR}
        await first.win(T0 + 3 * PERIOD)
        stream = key_of(first, ":slots")
        assert await ask(first, "XDEL", stream, f"{T0 + 3 * PERIOD}-0") == 1
        assert (await second.claim(T0 + PERIOD, **late)).outcome == "old"
        await ask(first, "XADD", stream, f"{T0 + 4 * PERIOD}-0", "token", "another's")
        await ask(first, "XTRIM", stream, "MAXLEN", 0)
        assert (await second.claim(T0 + 2 * PERIOD, **late)).outcome == "old"
        assert (await second.claim(T0 + 3 * PERIOD, **late)).outcome == "lost"
        cluster.advance(2 * PERIOD)
        await second.win(T0 + 5 * PERIOD)
        assert await ask(first, "DEL", stream) == 1
        assert (await first.claim(T0 + 2 * PERIOD, **late)).outcome == "old", "it was said before"
        assert (await first.claim(T0 + 5 * PERIOD, **late)).outcome == "lost"


async def test_f8_a_clock_that_was_a_day_ahead_costs_that_day_and_it_is_said() -> None:
    """Documented: a slot that was claimed then is a mark that all others must pass."""
    async with cluster_on(redis.fresh_url("redis", "stream-id")) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        cluster.step(DAY)
        await node.win(SLOT + DAY)
        cluster.step(-DAY)
        assert (await node.claim(SLOT)).outcome == "old"
        cluster.advance(DAY + PERIOD)
        await node.win(SLOT + DAY + PERIOD)


async def test_s30_entries_of_slots_that_nobody_can_claim_go() -> None:
    async with cluster_on(redis.fresh_url("redis", "stream-id")) as cluster:
        (node,) = await cluster.nodes_of(1)
        for at in (SLOT, SLOT + 2 * PERIOD):
            cluster.advance_to(at)
            await node.complete(await node.win(at))
        cluster.advance_to(SLOT + _scripts.KEPT_MS + PERIOD)
        await node.prune()
        (entry,) = await ask(node, "XRANGE", key_of(node, ":slots"), "-", "+")
        assert entry[0].decode() == f"{SLOT + 2 * PERIOD}-0"
        assert len(await node.history()) == 2, "history is kept for longer"


# idmp: the window


async def window_of(node: Node) -> tuple[int, int]:
    about = await ask(node, "XINFO", "STREAM", key_of(node, ":ids"))
    told = dict(zip(about[::2], about[1::2], strict=True))
    return told[b"idmp-duration"], told[b"idmp-maxsize"]


async def test_the_window_is_set_once_with_the_stream_however_many_begin_at_once(
    start: Start,
) -> None:
    """Setting it again, to anything else, would empty it."""
    server = start("redis8", "--stream-idmp-duration", "50", "--stream-idmp-maxsize", "60")
    async with cluster_on(url_of(server, "idmp")) as cluster:
        nodes = await cluster.nodes_of(20)
        server.send("CONFIG", "RESETSTAT")
        for n in (1, 2):
            cluster.advance_to(T0 + n * PERIOD)
            answers = await asyncio.gather(*(node.claim(T0 + n * PERIOD) for node in nodes))
            assert Counter(each.outcome for each in answers) == {"won": 1, "lost": 19}
        assert b"cmdstat_xcfgset:calls=1," in server.send("INFO", "commandstats")
        assert await window_of(nodes[0]) == (86_400, 10_000)


async def test_a_window_that_somebody_else_set_is_said_at_the_next_registration() -> None:
    async with cluster_on(redis.fresh_url("redis8", "idmp")) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        await node.win(SLOT)
        await node.register()
        await ask(node, "XCFGSET", key_of(node, ":ids"), "IDMP-DURATION", 60)
        with pytest.raises(OutcomeUnknown, match="somebody else set its window, to 60 s"):
            await node.register(definition(), definition("other"))
        assert (await node.claim(SLOT, job="other")).outcome == "won"


async def test_a_stream_whose_window_could_not_be_set_does_not_stay(start: Start) -> None:
    """It would have the server's own window, 100 s, and no later claim would set another."""
    server = start("redis8")
    async with cluster_on(url_of(server, "idmp")) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        server.send("ACL", "SETUSER", "default", "-xcfgset")
        with pytest.raises(OutcomeUnknown, match="permission"):
            await node.claim(SLOT)
        server.send("ACL", "SETUSER", "default", "+xcfgset")
        assert (await node.claim(SLOT)).outcome == "won"
        assert await window_of(node) == (86_400, 10_000)


async def test_entries_are_not_trimmed_while_their_ids_are_known() -> None:
    async with cluster_on(redis.fresh_url("redis8", "idmp")) as cluster:
        first, second = await cluster.nodes_of(2)
        for n in range(1, 4):
            cluster.advance_to(T0 + n * PERIOD)
            await first.complete(await first.win(T0 + n * PERIOD))
        cluster.advance(30 * DAY)  # of the tests' time; the window is by the server's own
        await first.register()
        assert await first.prune() == 3
        stream = key_of(first, ":ids")
        assert await ask(first, "XLEN", stream) == 3, "the entry that began the stream has gone"
        await ask(first, "HDEL", key_of(first), "floor")
        answer = await second.claim(T0 + 2 * PERIOD, start_deadline_ms=40 * DAY)
        assert answer.outcome == "lost"
        assert answer.run is not None
        assert answer.run.run.token.startswith(f"{T0 + 2 * PERIOD}.")


async def test_an_entry_that_is_gone_tells_nobody_who_won() -> None:
    async with cluster_on(redis.fresh_url("redis8", "idmp")) as cluster:
        first, second = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        await first.win(SLOT)
        await ask(first, "DEL", key_of(first, f":{SLOT}"))
        await ask(first, "XTRIM", key_of(first, ":ids"), "MAXLEN", 0)
        assert (await second.claim(SLOT)).outcome == "unknown"


@pytest.mark.parametrize("kind", ["redis", "valkey"])
async def test_idmp_is_refused_where_the_server_does_not_have_it(kind: str) -> None:
    with pytest.raises(StoreRefused, match=r"needs Redis 8\.6\.2.*use strategy=script, or lease"):
        await report_of(f"{redis.session_url(kind)}?strategy=idmp")


# The expiry of `script`


async def test_a_claim_is_kept_for_an_hour_or_as_much_longer_as_its_deadline() -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        await node.win(SLOT)
        await node.win(SLOT + 1, start_deadline_ms=3 * HOUR)
        for slot, kept_ms in ((SLOT, HOUR), (SLOT + 1, 3 * HOUR + 600 * SECOND)):
            left_ms = await ask(node, "PTTL", key_of(node, f":claim:{slot}"))
            assert kept_ms - 30 * SECOND < left_ms <= kept_ms


# Replicas and clusters


async def answer_of(node: Node, claim: Claim) -> ClaimOutcome:
    """Asks, as the engine does, until it is known."""
    while True:
        try:
            return (await node.ask(claim)).outcome
        except OutcomeUnknown:
            await asyncio.sleep(0.02)


@each_strategy
async def test_s11_what_no_replica_has_is_unknown_also_when_it_is_asked_again(
    on: On, start: Start
) -> None:
    """R3: visible is not durable. A repeat has nothing to write, and is waited for all the same."""
    master = start(on.kind, "--repl-diskless-sync-delay", "0")
    replica = start(on.kind, "--replicaof", f"127.0.0.1 {master.port}")
    await until(lambda: b"state=online" in master.send("INFO", "replication"))
    url = f"{url_of(master, on.strategy)}&durability=replicas:1"
    async with cluster_on(url) as cluster:
        node = await cluster.node(op_timeout_ms=400)
        await node.register()
        cluster.advance_to(SLOT)
        assert replica.process is not None
        replica.process.send_signal(signal.SIGSTOP)
        claim = node.wish(SLOT)
        for _ in range(2):
            with pytest.raises(OutcomeUnknown, match="not acknowledged by 1 replicas"):
                await node.ask(claim)
        replica.process.send_signal(signal.SIGCONT)
        assert await answer_of(node, claim) == "won"


@pytest.mark.parametrize("first", ["the record", "the job"])
@each_strategy
async def test_s10_a_slot_on_its_way_in_a_cluster_is_won_by_nobody(on: On, first: str) -> None:
    """What tells who won may be on either node: history does not, here, as it was pruned."""
    servers = redis_cluster.session_cluster(on.kind)
    async with cluster_on(redis_cluster.fresh_url(on.kind, on.strategy)) as cluster:
        node, other = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        seen = await node.win(SLOT)
        await node.complete(seen)
        moving = Moving(servers, key_of(node))
        moving.source.send("DEL", key_of(node, f":{SLOT}"))
        moving.begin()
        keys = sorted(
            moving.keys(), key=lambda key: (key == key_of(node)) is (first == "the record")
        )
        records = [key for key in keys if re.search(r":(claim:\d+|slots|ids)$", key)]
        assert len(records) == 1
        for key in dict.fromkeys([*(records if first == "the record" else ()), *keys]):
            moving.move(key)
            for claim in (other.wish(SLOT), other.wish(SLOT + 1)):
                with pytest.raises(StoreError):
                    await other.ask(claim)
        moving.end()
        answer = await other.claim(SLOT)
        assert answer.outcome == "lost"
        assert answer.run is not None
        assert answer.run.run.token == seen.run.token
        await other.win(SLOT + 1)


@each_strategy
async def test_s10_in_a_cluster_each_job_is_claimed_on_the_node_that_has_it(on: On) -> None:
    """And what is read of all jobs is in one order."""
    async with cluster_on(redis_cluster.fresh_url(on.kind, on.strategy)) as cluster:
        first, second = await cluster.nodes_of(2)
        names = [f"job-{n}" for n in range(60)]
        for node in (first, second):
            await node.register(*(definition(name) for name in names))
        cluster.advance_to(SLOT)
        replies = await asyncio.gather(
            *(n.store.claim([n.wish(SLOT, job=name) for name in names]) for n in (first, second))
        )
        words = [[each.outcome for each in reply.answers] for reply in replies]
        assert [sorted(pair) for pair in zip(*words, strict=True)] == [["lost", "won"]] * 60
        listed = [seen.run.job for seen in await second.history(limit=100)]
        assert listed == sorted(names, reverse=True)
        keys = [key_of(first, job=name) for name in names]
        nodes = {redis_cluster.session_cluster(on.kind).master_of(key).port for key in keys}
        assert len(nodes) == 3, "the jobs are spread over all masters"
        for node, reply in zip((first, second), replies, strict=True):
            won = [a.run for a in reply.answers if a.outcome == "won" and a.run]
            for seen in won:
                assert (await node.complete(seen)).outcome == "recorded"
        cluster.advance(15 * DAY)
        await first.register()
        assert await first.prune() == 60


# Checks at start, each made to fail once


async def report_of(url: str, *, timeout_ms: int = 2_000) -> tuple[str, str]:
    """What a start verifies and doubts, as text."""
    store = open_store(url, OpenOptions("default", FakeClock(), op_timeout_ms=timeout_ms))
    try:
        report = await store.open()
    finally:
        await store.close()
    return " ".join(report.verified), " ".join(report.doubts)


@each_strategy
async def test_a_server_that_keeps_everything_leaves_no_doubt(on: On, start: Start) -> None:
    server = start(on.kind, "--appendonly", "yes", "--appendfsync", "always")
    verified, doubts = await report_of(url_of(server, on.strategy))
    assert "every command they use is permitted" in verified
    assert doubts == ""
    server.send("CONFIG", "SET", "appendfsync", "everysec")
    _, doubts = await report_of(url_of(server, on.strategy))
    assert "appendfsync is everysec" in doubts


@each_strategy
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl"])
async def test_a_server_that_would_throw_claims_away_is_refused(
    on: On, policy: str, start: Start
) -> None:
    """Those of `script` have an expiry, those of the others do not."""
    server = start(on.kind, "--maxmemory-policy", policy)
    if policy.startswith("allkeys") or on.strategy == "script":
        with pytest.raises(StoreRefused, match=f"maxmemory-policy is {policy}.*noeviction"):
            await report_of(url_of(server, on.strategy))
        return
    verified, _ = await report_of(url_of(server, on.strategy))
    assert f"maxmemory-policy is {policy}" in verified
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        await node.complete(await node.win(SLOT))
    keys = server.send("EVAL", "return redis.call('KEYS', '*')", "0").decode()
    for key in re.findall(r"anarchon:\S+", keys):
        assert server.send("TTL", key) == b":-1\r\n", key


async def test_two_strategies_do_not_share_a_namespace(start: Start) -> None:
    """They would not see each other's claims, and slots would run twice."""
    server = start("redis")
    for first, then in (("script", "stream-id"), ("lease", "script"), ("stream-id", "lease")):
        server.send("FLUSHALL")
        await report_of(url_of(server, first))
        with pytest.raises(StoreRefused, match=r"has the layout .*another namespace"):
            await report_of(url_of(server, then))


@each_strategy
async def test_an_unknown_layout_is_refused_with_what_to_do(on: On) -> None:
    async with cluster_on(redis.fresh_url(on.kind, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        future = f"{on.strategy} 7"
        await ask(node, "HSET", key_of(node), "schema", future)
        with pytest.raises(StoreUnavailable, match=f"ANARCHONSCHEMA {future}"):
            await node.claim(SLOT)
        await ask(node, "HSET", store_of(node)._keys.namespace, "schema", future)
        with pytest.raises(StoreUnavailable, match=f"ANARCHONSCHEMA {future}"):
            await node.beat()
        with pytest.raises(StoreRefused, match=rf"layout '{future}'.*knows '{on.strategy} 2'"):
            await cluster.node()


@each_strategy
async def test_the_layout_before_pauses_becomes_the_present_one_when_it_is_touched(on: On) -> None:
    async with cluster_on(redis.fresh_url(on.kind, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        won = await node.win(SLOT)
        before = f"{on.strategy} 1"
        namespace = store_of(node)._keys.namespace
        await ask(node, "HSET", key_of(node), "schema", before)
        await ask(node, "HSET", namespace, "schema", before)
        newer = await cluster.node()
        assert await ask(node, "HGET", namespace, "schema") == f"{on.strategy} 2".encode()
        assert (await newer.claim(SLOT)).outcome is ClaimOutcome.LOST
        await node.complete(won)
        assert await ask(node, "HGET", key_of(node), "schema") == before.encode()
        await newer.pause()
        assert await ask(node, "HGET", key_of(node), "schema") == f"{on.strategy} 2".encode()
        cluster.advance(PERIOD)
        assert (await node.claim(cluster.now)).outcome is ClaimOutcome.PAUSED
        assert await newer.ended(SLOT) == (RunState.SUCCESS, "")


async def test_s31_twenty_that_open_a_new_namespace_at_once_agree_on_the_store(on: On) -> None:
    url = redis.fresh_url(on.kind, on.strategy)
    stores = [redis.open_virtual(url, OpenOptions("new", FakeClock())) for _ in range(20)]
    await asyncio.gather(*(store.open() for store in stores))
    replies = await asyncio.gather(*(store.instances() for store in stores))
    assert len({reply.store_id for reply in replies}) == 1
    for store in stores:
        await store.close()


@each_strategy
async def test_s27a_a_flushed_server_is_another_store(on: On, start: Start) -> None:
    server = start(on.kind)
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        before = await node.beat_reply()
        server.send("FLUSHALL")
        after = await node.beat_reply(sweep=((JOB, "every:10s"),))
        assert not after.answers[0].known
        assert after.answers[0].settled == (None,)
        assert before.store_id
        assert after.store_id
        (registration,) = await node.register()
        assert registration.current


# Permissions


def least_privileges(strategy: str) -> list[str]:
    """The ACL rules of the page, for the namespace `default`."""
    (rules,) = re.findall(r"^ACL SETUSER anarchon (.*)$", PAGE.read_text(), re.MULTILINE)
    (more,) = re.findall(rf"^\| `{strategy}` \| `(\+[^`]*)` \|$", PAGE.read_text(), re.MULTILINE)
    return [*rules.split(), *more.split()]


async def restricted(
    server: redis.Server, strategy: str, rules: list[str], namespace: str = "default"
) -> RedisClaimStore:
    assert server.send("ACL", "SETUSER", "anarchon", *rules) == b"+OK\r\n"
    url = f"redis://anarchon:a-secret@127.0.0.1:{server.port}/0"
    clock = FakeClock()
    options = OpenOptions(namespace, clock)
    return RedisClaimStore(address_of(url), STRATEGIES[strategy], options, clock=clock)


async def test_the_least_privileges_of_the_page_are_enough(on: On, start: Start) -> None:
    """For all that a sidecar asks; and for no other namespace."""
    server = start(on.kind, "--appendonly", "yes", "--appendfsync", "always")
    store = await restricted(server, on.strategy, least_privileges(on.strategy))
    report = await store.open()
    assert any("could not be read" in doubt for doubt in report.doubts)
    assert "a-secret" not in repr(report)
    assert isinstance(store._clock, FakeClock)
    cluster = Cluster(None, store._clock)  # type: ignore[arg-type]
    node = ClaimOnlyNode(cluster, store, "host:1", "inc-1")
    await node.register(definition(), definition("other"))
    await node.register()
    cluster.advance_to(SLOT)
    seen = await node.win(SLOT)
    assert (await node.claim(SLOT)).outcome == "lost"
    await node.renew(seen, started_at=SLOT)
    await node.complete(seen)
    await node.release(await node.win(SLOT + 1))
    assert await node.look(SLOT) is not None
    assert len(await node.history()) == 2
    assert len((await store.jobs((), "", 10)).answers) == 2
    assert len((await store.instances()).answers) == 1
    await node.beat(sweep=((JOB, "every:10s"),), leaving=True)
    cluster.advance(30 * DAY)
    assert await node.prune() == 2
    assert (await store.jobs((), "", 10)).answers == ()
    await store.close()
    other = await restricted(server, on.strategy, [], namespace="others")
    with pytest.raises(StoreRefused, match=r"(?i)permissions.*docs/stores/redis-claim\.md"):
        await other.open()


@each_strategy
async def test_a_command_that_is_not_permitted_is_found_at_start(on: On, start: Start) -> None:
    """It would stop a script in the middle."""
    server = start(on.kind)
    rules = least_privileges(on.strategy)
    for rule in rules:
        if not rule.startswith("+"):
            continue
        store = await restricted(server, on.strategy, ["reset", *rules, f"-{rule[1:]}"])
        with pytest.raises(StoreRefused, match=r"docs/stores/redis-claim\.md lists") as caught:
            await store.open()
        assert "a-secret" not in str(caught.value), rule


# What is in the store


@each_strategy
async def test_every_key_of_a_job_is_in_one_hash_tag(on: On, start: Start) -> None:
    """So that a cluster keeps them on one node; those of the namespace are in another."""
    server = start(on.kind)
    async with cluster_on(url_of(server, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        await node.register(definition(), definition("a:b"))
        cluster.advance_to(SLOT)
        await node.complete(await node.win(SLOT, job="a:b"))
        await node.win(SLOT)
    listing = server.send("EVAL", "return table.concat(redis.call('KEYS', '*'), ' ')", "0")
    keys = listing.decode().split("\r\n")[1].split()
    tags = {re.sub(r"^anarchon:(\{.*?\}).*$", r"\1", key) for key in keys}
    assert tags == {"{7:default}", "{7:default:job}", "{7:default:a:b}"}


@each_strategy
async def test_s01_the_servers_clock_decides(on: On) -> None:
    """Not the instance's, which is far behind here."""
    url, _, prefix = redis.fresh_url(on.kind, on.strategy).partition("#")
    store = open_store(url, OpenOptions(prefix + "x", FakeClock(wall=1)))
    await store.open()
    before = time.time_ns() // 1_000_000
    node = ClaimOnlyNode(Cluster(None, FakeClock()), store, "host:1", "inc-1")  # type: ignore[arg-type]
    (answer,) = await node.register()
    assert abs(answer.since - before) < 5_000
    won = await node.win(answer.since + 500)
    assert won.run.current is not None
    assert won.run.current.fence == (answer.since + 500) * 1_000, "all 16 digits of it"
    assert (await node.claim(answer.since + 60_000)).outcome == "early"
    assert (await node.claim(answer.since - 60_000)).outcome == "late"
    await store.close()


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\U0001f600", '"\\/', "é" * 2_000, " "])
async def test_s30_what_a_handler_says_is_kept_as_it_is(text: str) -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        seen = await node.win(SLOT)
        failure = Failure(text, text, text, permanent=True, retry_after_ms=3)
        for _ in range(2):
            answer = await node.complete(seen, Outcome(failure=failure))
            assert answer.outcome == "recorded"
        (run,) = await node.history(traces=True)
        assert run.attempts[0].failure == failure
        other = await node.win(SLOT + 1)
        for _ in range(2):
            assert (await node.complete(other, Outcome(text))).outcome == "recorded"


BROKEN = {
    "state": ["HSET", "KEY", "state", "dancing"],
    "number": ["HSET", "KEY", "started_at", "soon"],
    "attempt": ["HSET", "KEY", "attempt_state", "asleep"],
    "token": ["HSET", "KEY", "token", ""],
    "claimed": ["HSET", "KEY", "claimed_at", "0"],
    "cancel": ["HSET", "KEY", "cancel", "maybe"],
    "trigger": ["HSET", "KEY", "trigger", "moon"],
    "kind": ["SET", "KEY", "x"],
}


@pytest.mark.parametrize("how", list(BROKEN))
async def test_a_record_that_somebody_spoilt_spoils_no_other(how: str) -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        first, second = await cluster.nodes_of(2)
        await first.register(definition(), definition("other"))
        cluster.advance_to(SLOT)
        spoilt, good = await first.win(SLOT), await first.win(SLOT, job="other")
        key = key_of(first, f":{SLOT}")
        if how == "kind":
            await ask(first, "DEL", key)
        await ask(first, *(key if word == "KEY" else word for word in BROKEN[how]))
        beat = await first.beat(
            renewals=(first.renewal(spoilt), first.renewal(good)),
            looks=((JOB, SLOT), ("other", SLOT)),
        )
        assert [each.outcome for each in beat.renewals] == ["unknown_token", "renewed"]
        assert [bool(each) for each in beat.looks] == [False, True]
        wishes = [second.wish(SLOT, job=job) for job in (JOB, "other")]
        reply = await second.store.claim(wishes)
        assert [each.outcome for each in reply.answers] == ["unknown", "lost"]
        assert (await first.complete(good)).outcome == "recorded"
        assert (await first.complete(spoilt)).outcome == "unknown_token"
        assert len(await first.history(job="other")) == 1
        assert await first.prune() == 0


@each_strategy
async def test_a_claim_record_of_another_kind_leaves_its_own_claims_open(on: On) -> None:
    async with cluster_on(redis.fresh_url(on.kind, on.strategy)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        record = {"script": f":claim:{SLOT}", "stream-id": ":slots", "idmp": ":ids"}[on.strategy]
        await ask(node, "SADD", key_of(node, record), "x")
        reply = await node.store.claim([node.wish(SLOT), node.wish(SLOT, job="other")])
        assert [each.outcome for each in reply.answers] == ["unknown", "won"]


async def test_what_somebody_spoilt_of_a_job_is_said_when_it_is_registered() -> None:
    """And keeps no other from being registered."""
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        (node,) = await cluster.nodes_of(1)
        await ask(node, "HSET", key_of(node), "floor", "deep")
        with pytest.raises(OutcomeUnknown, match=r"job.*not as Anarchon writes it"):
            await node.register(definition(), definition("other"))
        views = (await node.store.jobs(["other"], "", 1)).answers
        assert [view.name for view in views] == ["other"]
        await ask(node, "HSET", store_of(node)._keys.instances, "odd", "{nonsense")
        assert (await node.beat()).known
        with pytest.raises(StoreUnavailable, match="'odd' in the store is not as Anarchon writes"):
            await node.store.instances()


# Definitions and history beyond the suite


async def test_s28_jobs_that_an_instance_no_longer_holds_are_let_go_of() -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        first, second = await cluster.nodes_of(2)
        await first.register(definition("other"))
        await first.let_go(JOB)
        (view,) = (await first.store.jobs([JOB], "", 1)).answers
        assert view.instance_ids == ("host:2",)
        await second.beat(leaving=True)
        assert await ask(first, "HLEN", key_of(first, ":holds")) == 0
        cluster.advance(14 * DAY)
        await first.register(definition("other"))
        await first.prune()
        assert {v.name for v in (await first.store.jobs((), "", 9)).answers} == {JOB, "other"}
        cluster.advance(1)
        await first.prune()
        assert {v.name for v in (await first.store.jobs((), "", 9)).answers} == {"other"}


async def test_s28_an_instance_that_is_not_heard_of_again_is_forgotten_with_what_it_held() -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        gone, lives = await cluster.nodes_of(2)
        await gone.register(definition(), definition("other"))
        cluster.advance(DAY + 31 * SECOND)
        await lives.register()
        await lives.prune()
        assert [i.instance_id for i in (await lives.store.instances()).answers] == ["host:2"]
        assert await ask(lives, "HLEN", key_of(lives, ":holds", "other")) == 0
        cluster.advance_to(T0 + 14 * DAY + 1)
        await lives.register()
        await lives.prune()
        assert [v.name for v in (await lives.store.jobs((), "", 9)).answers] == [JOB]


async def test_s28_an_instance_that_comes_while_another_prunes_holds_what_it_has_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who prunes has looked who there is, and does not know it."""
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        old, new = await cluster.node(), await cluster.node()
        await old.register()
        cluster.advance(SECOND)
        assert isinstance(old.store, RedisClaimStore)
        reader, job_names = old.store._reader, old.store._reader.job_names

        async def names(after: str, limit: int) -> list[str]:
            await new.register()
            return await job_names(after, limit)

        monkeypatch.setattr(reader, "job_names", names)
        await old.prune()
        (view,) = (await old.store.jobs([JOB], "", 1)).answers
        assert view.instance_ids == ("host:1", "host:2")


async def test_s30_runs_of_many_jobs_are_merged_in_their_order() -> None:
    async with cluster_on(redis.fresh_url("redis", "script")) as cluster:
        node = await cluster.node()
        names = [f"job-{n}" for n in range(40)]
        await node.register(*(definition(name) for name in names))
        chance = random.Random(7)
        cluster.advance_to(T0 + HOUR)
        wanted = {
            (T0 + chance.randrange(300 if n % 2 else 3) * SECOND, name)
            for n, name in enumerate(names)
            for _ in range(3 * n)
        }
        wishes = [node.wish(s, job=job, start_deadline_ms=DAY) for s, job in sorted(wanted)]
        await node.store.claim(wishes)
        expected = sorted(wanted, reverse=True)
        everything = await node.history(limit=5_000)
        assert [(v.run.slot, v.run.job) for v in everything] == expected
        for limit in (1, 7, 60):
            found: list[tuple[int, str]] = []
            while page := await node.history(limit=limit, after=found[-1] if found else None):
                found += [(v.run.slot, v.run.job) for v in page]
                if len(found) > 300:
                    break
            assert found == expected[: len(found)]
        span = await node.history(from_slot=T0 + SECOND, until_slot=T0 + 9 * SECOND, limit=5_000)
        assert [(v.run.slot, v.run.job) for v in span] == [
            place for place in expected if T0 + SECOND <= place[0] < T0 + 9 * SECOND
        ]


# What it costs


@each_strategy
async def test_s14_a_batch_is_one_round_trip_also_where_it_is_several_scripts(on: On) -> None:
    async with behind_a_proxy(on) as (proxy, _, through, _):
        names = [f"job-{n}" for n in range(CLAIM_BATCH + 1)]
        await through.register(*(definition(name) for name in names))
        assert [len(part) for part in parts_of([{"job": n} for n in names])] == [CLAIM_BATCH, 1]
        cost = Cost(proxy)
        reply = await through.store.claim([through.wish(SLOT, job=name) for name in names])
        assert {answer.outcome for answer in reply.answers} == {"won"}
        assert cost.round_trips == 1
        beat = await through.beat(sweep=tuple((name, "every:10s") for name in names))
        assert set(beat.settled) == {SLOT}
        assert cost.round_trips == 2


class Cost:
    """What has passed a proxy since: how often the client waited, and how many bytes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._before = proxy.turns
        self._bytes = proxy.bytes_sent + proxy.bytes_received

    @property
    def round_trips(self) -> int:
        return self._proxy.turns - self._before

    @property
    def bytes(self) -> int:
        return self._proxy.bytes_sent + self._proxy.bytes_received - self._bytes


@each_strategy
async def test_what_a_run_costs(on: On) -> None:
    """As the page says."""
    async with behind_a_proxy(on) as (proxy, _, through, direct):
        assert (await through.claim(SLOT + 60 * SECOND)).outcome == "early"
        await through.beat()
        costs: dict[str, tuple[int, int]] = {}
        cost = Cost(proxy)

        def note(what: str) -> None:
            nonlocal cost
            costs[what] = cost.round_trips, cost.bytes
            cost = Cost(proxy)

        seen = await through.win(SLOT)
        note("claim, won")
        await through.complete(seen)
        note("result")
        await direct.win(SLOT + 1)
        await through.claim(SLOT + 1)
        note("claim, lost")
        await through.beat()
        note("heartbeat")
        page = dict(
            re.findall(r"^\| (\w[^|]*) \| 1 \| about ([\d,]+) \|", PAGE.read_text(), re.MULTILINE)
        )
        for what, (round_trips, size) in costs.items():
            assert round_trips == 1, what
            said = int(page[what].replace(",", ""))
            assert abs(size - said) < 200, (what, size)
