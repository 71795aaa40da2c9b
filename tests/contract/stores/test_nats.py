"""What only a NATS server can do to a sidecar, on real ones (S1, S10, S11, S27)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends import nats as dispatch
from anarchon_backends.nats import jetstream, streams
from anarchon_backends.nats.address import address_of
from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.time import StoreTime
from anarchon_backends.nats_claim import RETENTION_MS, NatsClaimStore, _registry
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreRefused, StoreUnavailable
from anarchon_server.core.model import EverySchedule, Outcome, RunState
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
from tests.servers import nats
from tests.servers.ports import free_port
from tests.servers.proxy import Proxy
from tests.servers.tools import openssl

SLOT = T0 + PERIOD
LONG = {"start_deadline_ms": DAY}
PAGE = Path(__file__).parents[3] / "docs/stores/nats.md"


class Database:
    """Servers, as the harness's cluster uses them. Their time is moved by hand."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return nats.open_virtual(self.url, options)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url), node_type=ClaimOnlyNode)
    async with cluster.stack:
        yield cluster


@pytest.fixture
def start() -> Iterator[Callable[..., nats.Server]]:
    """Starts servers of the test's own, and stops them after it."""
    servers: list[nats.Server] = []

    def started(config: str = "", **given: Any) -> nats.Server:
        server = nats.private(config, **given)
        servers.append(server)
        return server.start()

    yield started
    for server in servers:
        server.stop()


@pytest.fixture
def three() -> Iterator[nats.Cluster]:
    """A cluster of the test's own."""
    with nats.skipped_where_missing():
        nats.executable()
    with nats.Cluster() as cluster:
        yield cluster


@asynccontextmanager
async def behind_a_proxy(
    timeout_ms: int = 300,
) -> AsyncIterator[tuple[Proxy, Cluster, Node, Node]]:
    """A node that speaks through a proxy, and one that does not; both registered, at the slot."""
    url = nats.fresh_url()
    port = int(re.findall(r":(\d+)", url)[0])
    async with Proxy(port) as proxy, cluster_on(url) as cluster:
        direct = await cluster.node()
        assert isinstance(cluster.database, Database)
        cluster.database.url = url.replace(f":{port}", f":{proxy.port}")
        through = await cluster.node(op_timeout_ms=timeout_ms)
        for node in (direct, through):
            await node.register()
        cluster.advance_to(SLOT)
        yield proxy, cluster, through, direct


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a server or a task gives no other signal of."""
    while not true():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


def connection_of(node: Node) -> Connection:
    assert isinstance(node.store, NatsClaimStore)
    return node.store._connection


def has_ended(node: Node) -> bool:
    """Whether the node's event loop has seen the end of its connection."""
    link = connection_of(node)._link
    return link is None or not link.usable


# --- Unknown outcomes: S11 -----------------------------------------------------------------------


async def test_s11_a_lost_reply_is_unknown_and_the_repeat_has_won() -> None:
    """And the driver has not sent it again by itself."""
    async with behind_a_proxy() as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        before = proxy.requests
        proxy.drop_replies()
        with pytest.raises(OutcomeUnknown, match="no answer in time"):
            await through.ask(claim)
        assert proxy.requests == before + 1
        proxy.resume()
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        answer = await through.ask(claim)
        assert answer.outcome == "won"
        assert answer.run is not None
        assert answer.run.run.token == claim.token
        seen = await direct.run(SLOT)
        assert seen is not None
        assert seen.run.token == claim.token, "the repeat has written what the first could not"


async def test_s11_a_connection_reset_after_sending_is_unknown_at_once() -> None:
    async with behind_a_proxy(timeout_ms=20_000) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.cut_after_requests()
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        assert time.monotonic() - began < 10, "nobody waits for an answer that cannot come"
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won", "it has connected again by itself"


async def test_s11_what_could_not_be_sent_was_surely_not_done_and_never_arrives_later() -> None:
    """nats-py would keep it, and send it after its reconnect."""
    async with behind_a_proxy() as (proxy, _, through, direct):
        proxy.refuse()
        proxy.cut()
        await until(lambda: has_ended(through))
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await through.claim(SLOT)
        proxy.resume()
        await through.beat()
        assert await claimed(direct, SLOT) is None
        assert (await through.claim(SLOT)).outcome == "won"


async def claimed(node: Node, slot: int) -> str | None:
    """The token of whoever has claimed the slot, as the stream has it."""
    store = node.store
    assert isinstance(store, NatsClaimStore)
    run = await store._history.claimed(JOB, slot, connection_of(node).until())
    return run.token if run else None


async def test_s11_a_claim_that_lingers_on_its_way_is_made_and_the_repeat_has_won() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.hold_requests()
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.resume()
        answer = await through.ask(claim)
        assert answer.outcome == "won"
        assert (await direct.claim(SLOT)).outcome == "lost"


async def test_s11_in_a_batch_what_has_no_answer_is_unknown_and_the_rest_is_answered() -> None:
    """An answer that is lost concerns nobody else."""
    async with behind_a_proxy() as (_, _, through, direct):
        store = through.store
        assert isinstance(store, NatsClaimStore)
        await direct.win(SLOT - PERIOD)
        ask = store._connection.ask

        async def loses_one(subject: str, *given: Any, **named: Any) -> bytes:
            answer = await ask(subject, *given, **named)
            if subject.endswith(f"claim.{subject.split('.')[2]}.{JOB}.{SLOT}"):
                raise OutcomeUnknown("lost")
            return answer

        store._connection.ask = loses_one  # type: ignore[method-assign]
        slots = (SLOT - PERIOD, SLOT, SLOT + SECOND)
        wishes = [through.wish(slot, **LONG) for slot in slots]
        answers = (await store.claim(wishes)).answers
        assert [answer.outcome for answer in answers] == ["lost", "unknown", "won"]
        del store._connection.ask
        assert (await through.ask(wishes[1])).outcome == "won"


async def test_s11_a_batch_without_answers_is_unknown_though_some_of_it_was_not_sent() -> None:
    """What was looked up only, as it is too late to claim it, was surely not done; the rest may be."""
    async with behind_a_proxy() as (proxy, _, through, direct):
        late, claim = through.wish(SLOT - 10 * PERIOD), through.wish(SLOT)
        proxy.drop_replies()
        with pytest.raises(OutcomeUnknown):
            await through.store.claim([late, claim])
        proxy.resume()
        assert (await through.ask(claim)).outcome == "won"
        assert (await direct.claim(SLOT)).outcome == "lost"


async def test_s11_an_idle_connection_that_was_closed_is_not_used() -> None:
    """A server that restarted while nothing was asked leaves no outcome unknown."""
    async with behind_a_proxy() as (proxy, _, through, _):
        await through.beat()
        proxy.cut()
        await until(lambda: has_ended(through))
        assert (await through.claim(SLOT)).outcome == "won"


async def test_s11_a_result_without_an_answer_is_unknown_and_its_repeat_is_recorded() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        seen = await through.win(SLOT)
        proxy.cut_after_requests()
        with pytest.raises(StoreError):
            await through.complete(seen, Outcome("it"))
        assert (await through.complete(seen, Outcome("it"))).outcome == "recorded"
        run = await direct.run(SLOT)
        assert run is not None
        assert run.attempts[0].result == "it"


async def test_a_call_is_bounded_in_time_and_its_late_answer_is_nobodys() -> None:
    async with behind_a_proxy() as (proxy, _, through, _):
        proxy.hold_replies()
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            await through.claim(SLOT)
        assert time.monotonic() - began < 2
        proxy.resume()
        reply = await through.store.instances()
        assert {each.instance_id for each in reply.answers} == {"host:1", "host:2"}


async def test_a_connection_whose_call_was_cancelled_is_thrown_away() -> None:
    async with behind_a_proxy(timeout_ms=10_000) as (proxy, _, through, _):
        before = connection_of(through).generation
        for _ in range(3):
            proxy.hold_replies()
            call = asyncio.create_task(through.claim(SLOT))
            await proxy.held.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            proxy.resume()
            assert (await through.beat()).known, "an answer of its own, on a connection of its own"
        assert connection_of(through).generation == before + 3


async def test_a_server_that_does_not_answer_is_left_for_another() -> None:
    """It may be cut off from the other servers, and let us in all the same."""
    url = nats.fresh_url()
    port = int(re.findall(r":(\d+)", url)[0])
    async with Proxy(port) as proxy, cluster_on(url) as cluster:
        assert isinstance(cluster.database, Database)
        cluster.database.url = url.replace(f":{port}", f":{proxy.port},127.0.0.1:{port}")
        node = await cluster.node(op_timeout_ms=400)
        cluster.advance_to(SLOT)
        connection = connection_of(node)
        assert connection._link is not None
        connection._retire(connection._link)
        connection._hosts.sort(key=lambda host: host[1] != proxy.port)
        await node.store.instances()
        proxy.hold_replies()
        claim = node.wish(SLOT)
        with pytest.raises(StoreError):
            await node.ask(claim)
        assert (await node.ask(claim)).outcome == "won"
        assert connection._link.host[1] == port


async def test_a_server_that_says_nothing_is_given_up_in_time() -> None:
    """It accepts connections, and does not even greet."""
    async with behind_a_proxy() as (proxy, _, through, _):
        proxy.hold_replies()
        proxy.cut()
        await until(lambda: has_ended(through))
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT)
        assert time.monotonic() - began < 2
        proxy.resume()
        assert (await through.claim(SLOT)).outcome == "won"


# --- Answers of JetStream ------------------------------------------------------------------------


def jetstream_of(node: Node) -> JetStream:
    assert isinstance(node.store, NatsClaimStore)
    return node.store._jetstream


@asynccontextmanager
async def answering_once(node: Node, error: Mapping[str, object]) -> AsyncIterator[list[str]]:
    """The node's next publish is answered with an error, and not sent. Yields its publishes."""
    connection = connection_of(node)
    ask, asked = connection.ask, []

    async def answer(subject: str, *given: Any, **named: Any) -> bytes:
        if not subject.startswith("$JS"):
            asked.append(subject)
            if len(asked) == 1:
                return json.dumps({"error": error, "stream": "an-claims"}).encode()
        return await ask(subject, *given, **named)

    connection.ask = answer  # type: ignore[method-assign]
    yield asked
    del connection.ask


@pytest.fixture
async def one_node() -> AsyncIterator[Node]:
    async with cluster_on(nats.fresh_url()) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        yield node


@pytest.mark.parametrize("code", [jetstream.WRONG_SEQUENCE, jetstream.PERHAPS_WRONG_SEQUENCE])
async def test_s10_lost_to_nobody_means_to_claim_again(one_node: Node, code: int) -> None:
    """10164 may refer to what is never committed; the subject says who has won, if anybody."""
    error = {"code": 400, "err_code": code, "description": "wrong last sequence"}
    async with answering_once(one_node, error) as asked:
        assert (await one_node.claim(SLOT)).outcome == "won"
    assert [subject.split(".")[1] for subject in asked] == ["claim", "claim", "run"]


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (10_047, "insufficient storage resources available", StoreUnavailable),
        (10_077, "maximum bytes exceeded", StoreUnavailable),
        (10_008, "JetStream system temporarily unavailable", StoreUnavailable),
        (10_077, "disk write failed", OutcomeUnknown),
        (12_345, "an error of tomorrow", OutcomeUnknown),
    ],
)
async def test_s11_an_error_that_the_server_answers_is_surely_not_done_only_where_it_is_known(
    one_node: Node, code: int, text: str, kind: type[StoreError]
) -> None:
    error = {"code": 503, "err_code": code, "description": text}
    async with answering_once(one_node, error):
        with pytest.raises(kind, match=f"{text} .{code}.$"):
            await one_node.claim(SLOT)
        assert (await one_node.claim(SLOT)).outcome == "won"


async def test_s10_a_full_account_refuses_claims_and_loses_none(
    start: Callable[..., nats.Server],
) -> None:
    server = start(
        "accounts { A { jetstream: { max_file: 200KB }, users: [ { user: u, password: p } ] } }",
        userinfo="u:p@",
    )
    won: list[int] = []
    async with cluster_on(server.url) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(T0 + 2_000 * PERIOD)

        async def fill() -> None:
            for n in range(1, 2_000):
                await node.win(T0 + n * PERIOD, **LONG)
                won.append(n)

        with pytest.raises(StoreUnavailable, match=r"exceeded|insufficient"):
            await fill()
        assert await claimed(node, T0 + (len(won) + 1) * PERIOD) is None, "it was surely not done"
        for n in (won[0], won[-1]):
            assert (await node.claim(T0 + n * PERIOD, **LONG)).outcome == "lost"
        with pytest.raises(StoreRefused, match=r"storage is full .*: raise its limit max_file"):
            await cluster.node()


async def test_s01_the_stores_time_decides_what_is_early_and_late(one_node: Node) -> None:
    """The machine's wall clock is not asked: here it is years off."""
    clock = FakeClock(wall=1)
    store = open_store(nats.session_url(), OpenOptions("time", clock))
    await store.open()
    node = ClaimOnlyNode(Cluster(None, clock), store, "host:1", "inc-1")  # type: ignore[arg-type]
    now = (await store.claim([])).store_at
    assert abs(now - time.time() * 1_000) < 10 * SECOND
    for slot, outcome in ((now + 5_000, "early"), (now - 20_000, "late"), (now - 100, "won")):
        assert (await node.claim(slot, start_deadline_ms=10_000)).outcome == outcome
    await store.close()


# --- The death of servers: S10, S27 --------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_s10_kill_9_under_load_loses_no_claim_and_gives_none_twice(
    start: Callable[..., nats.Server],
) -> None:
    """The instances are back by themselves."""
    server = start()

    def kill() -> None:
        server.kill()
        server.start()

    async with cluster_on(server.url) as cluster:
        await compete(cluster, kill, slots=600)


@pytest.mark.timeout(180)
async def test_s10_the_leaders_death_under_load_loses_no_claim_and_gives_none_twice(
    three: nats.Cluster,
) -> None:
    def kill() -> None:
        """The leader of the claims; and it comes back, as a follower."""
        leader = three.leader_of("an-claims")
        leader.kill()
        assert three.leader_of("an-claims") is not leader
        leader.start()
        three.wait()

    async with cluster_on(three.url) as cluster:
        await compete(cluster, kill, slots=300, times=2)


async def compete(cluster: Cluster, kill: Callable[[], None], slots: int, times: int = 3) -> None:
    """Six instances claim all slots, while a server dies several times."""
    places = range(T0 + PERIOD, T0 + (slots + 1) * PERIOD, PERIOD)
    won: list[tuple[int, str]] = []
    failures: Counter[str] = Counter()
    nodes = [await cluster.node(op_timeout_ms=1_000) for _ in range(6)]
    for node in nodes:
        await node.register()
    cluster.advance_to(places[-1])

    async def work(node: Node) -> None:
        for slot in places:
            claim: Claim = node.wish(slot, **LONG)
            while True:
                try:
                    answer = await node.ask(claim)
                except StoreError as error:
                    failures[type(error).__name__] += 1
                    await asyncio.sleep(0.02)  # the loop's back-off
                    continue
                if answer.outcome is not ClaimOutcome.UNKNOWN:
                    break
            if answer.outcome is ClaimOutcome.WON:
                won.append((slot, claim.token))

    working = [asyncio.create_task(work(node)) for node in nodes]
    for share in (0.2, 0.5, 0.8)[:times]:
        await until(lambda share=share: len(won) >= share * len(places))  # type: ignore[misc]
        await asyncio.to_thread(kill)
    await asyncio.gather(*working)
    reconnected = [connection_of(node).generation > 1 for node in nodes]
    assert failures or any(reconnected), "they have noticed"
    assert sorted(slot for slot, _ in won) == list(places), "each slot has one winner"
    kept = [await claimed(nodes[0], slot) for slot in places]
    assert kept == [token for _, token in sorted(won)], "each acknowledged claim is there"


@pytest.mark.timeout(180)
async def test_s11_without_a_quorum_nothing_is_won_and_with_it_the_same_token_wins(
    three: nats.Cluster,
) -> None:
    async with cluster_on(three.url) as cluster:
        node = await cluster.node(op_timeout_ms=500)
        await node.register()
        cluster.advance_to(SLOT)
        others = [each for each in three.nodes if each is not three.leader_of("an-claims")]
        for each in others:
            each.kill()
        claim = node.wish(SLOT, **LONG)
        for _ in range(3):
            with pytest.raises(StoreError):
                assert await node.ask(claim) is None
        for each in others:
            each.start(wait=False)
        while True:
            try:
                answer = await node.ask(claim)
            except StoreError:
                await asyncio.sleep(0.05)
                continue
            break
        assert answer.outcome is ClaimOutcome.WON
        assert await claimed(node, SLOT) == claim.token


@pytest.mark.timeout(120)
async def test_s10_on_replicas_the_code_of_what_is_under_way_is_a_loss_too(
    three: nats.Cluster,
) -> None:
    """10164 is seen on the wire, and every slot has one winner."""
    codes: Counter[int] = Counter()
    async with cluster_on(three.url) as cluster:
        nodes = await cluster.nodes_of(8)
        for node in nodes:
            count_codes(connection_of(node), codes)
        for n in range(1, 200):
            slot = T0 + n * PERIOD
            cluster.advance_to(slot)
            wishes = [[node.wish(slot) for _ in range(6)] for node in nodes]
            replies = await asyncio.gather(
                *(node.store.claim(some) for node, some in zip(nodes, wishes, strict=True))
            )
            outcomes = Counter(a.outcome for reply in replies for a in reply.answers)
            assert outcomes == {"won": 1, "lost": 47}
            if codes[jetstream.PERHAPS_WRONG_SEQUENCE]:
                break
    assert codes[jetstream.PERHAPS_WRONG_SEQUENCE]
    assert set(codes) <= {jetstream.WRONG_SEQUENCE, jetstream.PERHAPS_WRONG_SEQUENCE}


def count_codes(connection: Connection, codes: Counter[int]) -> None:
    ask = connection.ask

    async def counted(subject: str, *given: Any, **named: Any) -> bytes:
        answer = await ask(subject, *given, **named)
        code = json.loads(answer).get("error", {}).get("err_code")
        if code is not None and subject.startswith("an.claim."):
            codes[code] += 1
        return answer

    connection.ask = counted  # type: ignore[method-assign]


# --- Start checks, each made to fail once --------------------------------------------------------


async def report_of(
    url: str, namespace: str = "checks", timeout_ms: int = 2_000
) -> tuple[str, str]:
    """What a start verifies and what it doubts."""
    store = open_store(url, OpenOptions(namespace, SystemClock(), timeout_ms))
    try:
        report = await store.open()
        return "; ".join(report.verified), "; ".join(report.doubts)
    finally:
        await store.close()


async def made_otherwise(server: nats.Server, **config: object) -> str:
    """Makes the stream of claims as it must not be; why a store on it is refused."""
    plan, _ = Subjects("an", "checks").plans(RETENTION_MS)
    address = address_of(server.url)
    connection = Connection(address, 5_000)
    jetstream_ = JetStream(connection, StoreTime(SystemClock()))
    await connection.open()
    wanted = plan.config(1) | config
    wanted = {key: value for key, value in wanted.items() if value is not None}
    await jetstream_.api(f"STREAM.CREATE.{wanted['name']}", connection.until(), wanted)
    await connection.close()
    with pytest.raises(StoreRefused) as caught:
        await report_of(server.url)
    return str(caught.value)


async def test_a_start_says_what_holds_and_what_could_be_lost() -> None:
    verified, doubts = await report_of(nats.session_url())
    assert "NATS 2." in verified
    assert "the stream an-claims is kept in files on 1 server, and read from its leader" in verified
    assert "the stream an-history is on 1 server: what is on its disk is all there is" in doubts
    assert "sync_interval is not shown to clients" in doubts


async def test_a_start_on_a_cluster_finds_three_replicas_and_who_is_away(
    three: nats.Cluster,
) -> None:
    verified, doubts = await report_of(three.url)
    assert "the stream an-claims is kept in files on 3 servers" in verified
    assert "what is on its disk" not in doubts
    leader = three.leader_of("an-claims")
    leader.kill()
    while f"servers that keep the stream an-claims are away: {leader.name}" not in doubts:
        try:
            _, doubts = await report_of(three.url)
        except StoreUnavailable:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"storage": "memory"},
            "has storage 'memory' and not 'file': what is kept in memory is gone",
        ),
        ({"allow_direct": True}, "has allow_direct True and not False: a replica that lags"),
        ({"max_age": 60 * 10**9, "duplicate_window": 10**9}, "has max_age 60000000000 and not"),
        ({"max_msgs": 1_000}, "has max_msgs 1000 and not -1"),
        ({"max_bytes": 1_000_000}, "has max_bytes 1000000 and not -1"),
        ({"deny_delete": False}, "has deny_delete False and not True"),
        ({"deny_purge": False}, "has deny_purge False and not True"),
        ({"discard": "old", "discard_new_per_subject": False}, "has discard 'old' and not 'new'"),
        ({"retention": "interest"}, "has retention 'interest' and not 'limits'"),
        ({"subjects": ["an.claim.*.*.*"]}, "has the subjects"),
        (
            {"subject_transform": {"src": "an.claim.>", "dest": "an.claim.x.>"}},
            "renames subjects (subject_transform)",
        ),
        ({"persist_mode": "async"}, "has persist_mode 'async': it acknowledges what it has not"),
        ({"metadata": {}}, "is not Anarchon's: remove it, or choose other names"),
        ({"metadata": {streams.SCHEMA: "99"}}, "has the schema '99', and this version of"),
        ({"name": "theirs"}, "another stream has subjects of an.claim.>"),
    ],
)
async def test_a_stream_that_would_lose_claims_is_refused(
    start: Callable[..., nats.Server], config: dict[str, object], said: str
) -> None:
    assert said in await made_otherwise(start(), **config)


async def test_a_stream_that_copies_another_is_refused(start: Callable[..., nats.Server]) -> None:
    server = start()
    mirror = {"discard": None, "discard_new_per_subject": None, "max_msgs_per_subject": None}
    said = await made_otherwise(
        server, subjects=None, mirror={"name": "elsewhere"}, **(mirror | {"deny_purge": None})
    )
    assert "the stream an-claims" in said


async def test_claims_that_are_kept_for_longer_than_asked_are_as_good(
    start: Callable[..., nats.Server],
) -> None:
    server = start()
    await report_of(f"{server.url}?retention=2h")
    await report_of(server.url)
    with pytest.raises(StoreRefused, match="has max_age 7200000000000 and not 10800000000000"):
        await report_of(f"{server.url}?retention=3h")


@pytest.mark.parametrize("retention", ["1", "1h30m", "14m", "367d", "0s", ""])
def test_a_retention_that_keeps_claims_too_shortly_or_is_none_is_refused(retention: str) -> None:
    with pytest.raises(StoreRefused, match=r"option retention is .*from 15m to 366d"):
        open_store(f"nats://host?retention={retention}", OpenOptions("x", SystemClock()))


def test_how_long_claims_are_kept_is_known_before_the_store_is_opened() -> None:
    options = OpenOptions("x", SystemClock())
    assert open_store("nats://host", options).capabilities.kept_ms == 3_600_000
    assert open_store("tls://host?retention=20m", options).capabilities.kept_ms == 1_200_000


async def test_servers_without_jetstream_are_refused(start: Callable[..., nats.Server]) -> None:
    with pytest.raises(StoreRefused, match="nobody answers for JetStream: start the server with"):
        await report_of(start(jetstream=False).url)
    without = start("accounts { A { users: [ { user: u, password: p } ] } }", userinfo="u:p@")
    with pytest.raises(StoreRefused, match=r"JetStream is not enabled for this account"):
        await report_of(without.url)
    with pytest.raises(StoreRefused, match=r"nobody answers for JetStream.*option domain"):
        await report_of(f"{nats.session_url()}?domain=elsewhere")


async def test_a_domain_of_jetstream_is_named_by_the_url(start: Callable[..., nats.Server]) -> None:
    server = start(jetstream_options="domain: hub")
    await report_of(f"{server.url}?domain=hub")


async def test_when_servers_write_to_disk_is_read_from_their_monitoring(
    start: Callable[..., nats.Server],
) -> None:
    always = start(jetstream_options="sync_interval: always")
    monitor = f"http://127.0.0.1:{always.monitor_port}"
    verified, doubts = await report_of(f"{always.url}?monitor={monitor}")
    assert f"the server at {monitor} has on disk what it acknowledges" in verified
    assert "sync_interval" not in doubts
    assert "to disk" not in doubts
    second = start(jetstream_options="sync_interval: 90s")
    monitor = f"http://127.0.0.1:{second.monitor_port}"
    _, doubts = await report_of(f"{second.url}?monitor={monitor}/")
    assert f"the server at {monitor} writes to disk every 90 s" in doubts
    nobody = f"http://127.0.0.1:{free_port()}"
    _, doubts = await report_of(f"{second.url}?monitor={nobody}")
    assert f"the monitoring at {nobody} does not say when" in doubts
    _, doubts = await report_of(f"{second.url},127.0.0.1:1?monitor={monitor}")
    assert "sync_interval is not shown to clients" in doubts, "one of two has not been asked"


async def test_more_replicas_than_there_are_servers_are_refused() -> None:
    with pytest.raises(StoreRefused, match=r"replicas > 1 not supported .*option replicas is 3"):
        await report_of(f"{nats.session_url()}?replicas=3&prefix=three")


async def test_a_server_that_takes_small_messages_only_is_refused(
    start: Callable[..., nats.Server],
) -> None:
    with pytest.raises(StoreRefused, match="max_payload is 65536 bytes: at least 262144"):
        await report_of(start("max_payload: 65536").url)


def test_a_server_that_is_too_old_is_refused() -> None:
    info = {"version": "2.10.29", "max_payload": 1_048_576}
    with pytest.raises(StoreRefused, match=r"the server is NATS 2.10.29: 2.11 or newer is needed"):
        streams._check_server(info, address_of("nats://h"), streams.Findings())


async def test_twenty_may_open_a_new_store_at_once(start: Callable[..., nats.Server]) -> None:
    server = start()
    reports = await asyncio.gather(*(report_of(server.url) for _ in range(20)))
    assert len(set(reports)) == 1


async def test_ten_may_open_a_new_store_of_a_cluster_at_once(three: nats.Cluster) -> None:
    """A cluster answers one of those who ask it to make a stream, and nobody before it has a leader."""
    reports = await asyncio.gather(*(report_of(three.url, timeout_ms=20_000) for _ in range(10)))
    assert all("on 3 servers" in verified for verified, _ in reports)


# --- Who is let in: credentials, permissions, TLS ------------------------------------------------


async def lets_in(url: str) -> bool:
    try:
        await report_of(url)
    except StoreRefused as error:
        if "the user and the password, the token or the key come from" not in str(error):
            raise
        return False
    return True


async def test_a_user_and_a_password(
    start: Callable[..., nats.Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start('authorization { user: "who ever", password: "p:@/w" }').url.removeprefix(
        "nats://"
    )
    file = tmp_path / "password"
    file.write_text("p:@/w\n")
    assert await lets_in(f"nats://who%20ever:p%3A%40%2Fw@{host}")
    assert await lets_in(f"nats://who%20ever@{host}?password_file={file}")
    assert not await lets_in(f"nats://{host}")
    assert not await lets_in(f"nats://who%20ever:wrong@{host}")
    monkeypatch.setenv("NATS_USER", "who ever")
    monkeypatch.setenv("NATS_PASSWORD", "p:@/w")
    assert await lets_in(f"nats://{host}")


async def test_a_token(
    start: Callable[..., nats.Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start('authorization { token: "s3cret" }').url.removeprefix("nats://")
    file = tmp_path / "token"
    file.write_text("s3cret")
    assert await lets_in(f"nats://s3cret@{host}")
    assert await lets_in(f"nats://{host}?token_file={file}")
    assert not await lets_in(f"nats://{host}")
    monkeypatch.setenv("NATS_TOKEN", "s3cret")
    assert await lets_in(f"nats://{host}")


def nkey(kind: int) -> tuple[str, str]:
    """A new key: its seed, and its public half."""
    import nkeys

    seed = nkeys.encode_seed(os.urandom(32), kind)
    return seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode()


async def test_a_key(
    start: Callable[..., nats.Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nkeys

    seed, public = nkey(nkeys.PREFIX_BYTE_USER)
    other, _ = nkey(nkeys.PREFIX_BYTE_USER)
    url = start(f"authorization {{ users: [ {{ nkey: {public} }} ] }}").url
    for name, text in (("ours", seed), ("other", other)):
        (tmp_path / name).write_text(text)
    assert await lets_in(f"{url}?nkey_file={tmp_path}/ours")
    assert not await lets_in(f"{url}?nkey_file={tmp_path}/other")
    assert not await lets_in(url)
    monkeypatch.setenv("NATS_NKEY", f"{tmp_path}/ours")
    assert await lets_in(url)


def jwt(claims: Mapping[str, object], issuer_seed: str) -> str:
    """A token of NATS, signed by an operator or an account."""
    import base64

    import nkeys

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    issuer = nkeys.from_seed(bytearray(issuer_seed.encode()))
    body = {"iss": issuer.public_key.decode(), "iat": 1, "jti": "x", **claims}
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = f"{part(json.dumps(head).encode())}.{part(json.dumps(body).encode())}"
    return f"{signed}.{part(issuer.sign(signed.encode()))}"


async def test_a_file_of_credentials(
    start: Callable[..., nats.Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `nsc` makes them for accounts that an operator signs."""
    import nkeys

    operator, operator_key = nkey(nkeys.PREFIX_BYTE_OPERATOR)
    account, account_key = nkey(nkeys.PREFIX_BYTE_ACCOUNT)
    _, system_key = nkey(nkeys.PREFIX_BYTE_ACCOUNT)
    user, user_key = nkey(nkeys.PREFIX_BYTE_USER)
    of_operator = jwt(
        {"sub": operator_key, "name": "O", "nats": {"type": "operator", "version": 2}}, operator
    )
    of_any = {"type": "account", "version": 2}
    limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1}
    unlimited = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    accounts = {
        key: jwt({"sub": key, "name": name, "nats": of_any | {"limits": limits}}, operator)
        for key, name, limits in ((account_key, "A", limits | unlimited), (system_key, "S", limits))
    }
    of_user = jwt(
        {
            "sub": user_key,
            "name": "U",
            "nats": {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1},
        },
        account,
    )
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user}\n------END USER NKEY SEED------\n"
    )
    preload = ", ".join(f"{key}: {of_account}" for key, of_account in accounts.items())
    server = start(
        f"operator: {of_operator}\nsystem_account: {system_key}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {preload} }}"
    )
    assert await lets_in(f"{server.url}?creds_file={file}")
    assert not await lets_in(server.url)
    monkeypatch.setenv("NATS_CREDS", str(file))
    assert await lets_in(server.url)


def page_block(marker: str) -> str:
    """The block of the docs' page that begins with a line which holds `marker`."""
    blocks = re.findall(r"(?ms)^```\w*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    (found,) = [block for block in blocks if marker in block]
    return str(found)


async def test_the_permissions_in_the_docs_are_enough_and_each_is_needed(
    start: Callable[..., nats.Server],
) -> None:
    config = page_block("# permissions of a claim-only sidecar")
    url = start(config, userinfo="anarchon:change-me@").url + "?inbox=_INBOX_anarchon"
    await everything(url)
    allowed = re.findall(r'"(\S+)"', config)
    assert len(allowed) == 13
    for subject in allowed:
        without = config.replace(f'"{subject}"', '"nothing.of.the.kind"')
        server = start(without, userinfo="anarchon:change-me@")
        with pytest.raises(StoreError, match=r"(?i)permissions violation"):
            await everything(f"{server.url}?inbox=_INBOX_anarchon")
        server.stop()


async def everything(url: str) -> None:
    """Whatever a sidecar may ask of its store."""
    async with cluster_on(url) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        seen = await node.win(SLOT)
        await node.renew(seen, started_at=cluster.now)
        await node.complete(seen)
        assert (await node.claim(SLOT)).outcome == "lost"
        assert len(await node.history()) == 1
        assert len((await node.store.jobs((), "", 10)).answers) == 1
        assert len((await node.store.instances()).answers) == 1
        assert await node.prune(history_max=0) == 1


async def test_streams_that_an_operator_made_need_no_permission_to_make_them(
    start: Callable[..., nats.Server],
) -> None:
    admin = "{ user: admin, password: p }"
    denied = '{ publish: { deny: "$JS.API.STREAM.CREATE.*" } }'
    user = f"{{ user: u, password: p, permissions: {denied} }}"
    server = start(f"accounts {{ A {{ jetstream: enabled, users: [ {admin}, {user} ] }} }}")
    host = server.url.removeprefix("nats://")
    with pytest.raises(StoreRefused, match=r"(?i)violation .*docs/stores/nats.md lists the perm"):
        await report_of(f"nats://u:p@{host}")
    await report_of(f"nats://admin:p@{host}")
    await everything(f"nats://u:p@{host}")


async def test_a_permission_that_is_withdrawn_says_nothing_of_tokens(
    start: Callable[..., nats.Server],
) -> None:
    """And is known at once: nobody waits for an answer that does not come."""
    deny = "permissions: { publish: { deny: %s } }"
    user = "accounts { A { jetstream: enabled, users: [ { user: u, password: p %s } ] } }"
    server = start(user % "", userinfo="u:p@")
    async with cluster_on(server.url) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        seen = await node.win(SLOT)
        server.config = user % (", " + deny % '"an.run.>"')
        server.reload()
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"(?i)permissions violation"):
            await until_it_is_denied(node)
        assert time.monotonic() - began < 5
        server.config = user % ""
        server.reload()
        while True:
            try:
                answer = await node.complete(seen, Outcome("it"))
            except StoreError:
                continue
            break
        assert answer.outcome == "recorded"


async def until_it_is_denied(node: Node) -> None:
    """A reload takes effect some time after its signal, and for a moment nobody answers."""
    for n in range(1, 1_000):
        try:
            (seen,) = await node.history()
            await node.renew(seen, started_at=T0 + n, adopt=True)
        except StoreError as error:
            if "nobody answers" not in str(error):
                raise


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority of the test's own, and a server's certificate for 127.0.0.1."""
    common = [openssl(), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    for name, subject in (("server", "127.0.0.1"), ("stranger", "127.0.0.1"), ("me", "anarchon")):
        subprocess.run(
            [
                *(*common, "-nodes", "-days", "2", "-subj", f"/CN={subject}"),
                *("-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.crt")),
            ],
            check=True,
            capture_output=True,
        )
    return tmp_path


async def test_tls_is_verified_and_never_left_out(
    start: Callable[..., nats.Server], certificates: Path
) -> None:
    files = f'cert_file: "{certificates}/server.crt", key_file: "{certificates}/server.key"'
    server = start(f"tls {{ {files} }}")
    url = server.url.replace("nats:", "tls:")
    await report_of(f"{url}?tls_ca={certificates}/server.crt")
    await report_of(f"{url}?tls_verify=none")
    for wrong in ("", f"?tls_ca={certificates}/stranger.crt"):
        with pytest.raises(StoreRefused, match=r"(?i)certificate.*; the URL's option tls_ca"):
            await report_of(url + wrong)
    with pytest.raises(StoreRefused, match="cannot be used"):
        await report_of(f"{url}?tls_ca={certificates}/server.key")


async def test_no_credentials_are_sent_in_the_clear_where_tls_is_asked_for() -> None:
    """A server without TLS, or somebody between who says that it has none, learns nothing."""
    port = int(re.findall(r":(\d+)", nats.session_url())[0])
    async with Proxy(port) as proxy:
        with pytest.raises(StoreUnavailable, match="has no TLS, and the URL asks for it"):
            await report_of(f"tls://u:hunter2@127.0.0.1:{proxy.port}")
        assert proxy.bytes_sent == 0


async def test_a_server_that_takes_either_is_spoken_to_in_tls(
    start: Callable[..., nats.Server], certificates: Path
) -> None:
    files = f'cert_file: "{certificates}/server.crt", key_file: "{certificates}/server.key"'
    server = start(f"allow_non_tls: true\ntls {{ {files} }}")
    await report_of(server.url)
    with pytest.raises(StoreRefused, match=r"(?i)certificate"):
        await report_of(server.url.replace("nats:", "tls:"))


async def test_tls_first_and_with_a_certificate_of_our_own(
    start: Callable[..., nats.Server], certificates: Path
) -> None:
    files = f'cert_file: "{certificates}/server.crt", key_file: "{certificates}/server.key"'
    server = start(
        f'tls {{ {files}, ca_file: "{certificates}/me.crt", verify: true, handshake_first: true }}'
    )
    url = f"{server.url.replace('nats:', 'tls:')}?tls_ca={certificates}/server.crt&tls_first=yes"
    ours = f"&tls_cert={certificates}/me.crt&tls_key={certificates}/me.key"
    await report_of(url + ours)
    with pytest.raises(StoreError):
        await report_of(url)


# --- What is kept, and beside whom ---------------------------------------------------------------


async def test_a_claim_stands_against_whoever_writes_without_looking(one_node: Node) -> None:
    """A publisher that expects nothing is refused by the stream, and nobody removes a claim."""
    seen = await one_node.win(SLOT)
    store = one_node.store
    assert isinstance(store, NatsClaimStore)
    stream, subject = "an-claims", store._subjects.claim(JOB, SLOT)
    connection, jetstream_ = connection_of(one_node), jetstream_of(one_node)
    until_ = connection.until()
    assert (
        await jetstream_.publish(subject, b"x", stream=stream, expected=None, until=until_) is None
    )
    with pytest.raises(StoreUnavailable, match="not permitted"):
        await jetstream_.purge(stream, subject, until_)
    entry = await jetstream_.last(stream, subject, until_)
    assert entry is not None
    with pytest.raises(StoreUnavailable, match="not permitted"):
        await jetstream_.api(f"STREAM.MSG.DELETE.{stream}", until_, {"seq": entry.revision})
    assert await claimed(one_node, SLOT) == seen.run.token


async def test_a_run_whose_row_could_not_be_written_runs_and_is_recorded(one_node: Node) -> None:
    """The claim is what counts; its row is made by whatever is written next."""
    connection = connection_of(one_node)
    ask = connection.ask

    async def without_history(subject: str, *given: Any, **named: Any) -> bytes:
        if subject.startswith("an.run."):
            raise StoreUnavailable("away")
        return await ask(subject, *given, **named)

    connection.ask = without_history  # type: ignore[method-assign]
    seen = await one_node.win(SLOT)
    del connection.ask
    assert await one_node.run(SLOT) is None
    assert (await one_node.complete(seen, Outcome("it"))).outcome == "recorded"
    run = await one_node.run(SLOT)
    assert run is not None
    assert run.run.state is RunState.SUCCESS


async def test_stores_of_different_prefixes_share_servers_and_nothing_else() -> None:
    url = nats.session_url()
    nodes: list[Node] = []
    for prefix in ("one", "two"):
        async with cluster_on(f"{url}?prefix={prefix}") as cluster:
            (node,) = await cluster.nodes_of(1)
            cluster.advance_to(SLOT)
            await node.win(SLOT)
            nodes.append(node)
    assert len(nodes) == 2


async def test_definitions_of_many_jobs_are_held_in_parts() -> None:
    """What an instance holds is larger than a message may be."""
    async with cluster_on(nats.fresh_url()) as cluster:
        node = await cluster.node()
        names = [f"{'j' * 120}-{n:04}" for n in range(1_000)]
        await node.register(*(definition(name) for name in names))
        views = (await node.store.jobs([names[0], names[-1]], "", 10)).answers
        assert [view.instance_ids for view in views] == [("host:1",)] * 2
        await node.let_go(*names[1:])
        views = (await node.store.jobs([names[0], names[-1]], "", 10)).answers
        assert [view.instance_ids for view in views] == [("host:1",), ()]


async def test_a_heartbeat_is_two_round_trips_whether_or_not_the_time_is_fresh(
    one_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a twin; the second says that the instance lives, and at what time."""
    connection, jetstream = connection_of(one_node), jetstream_of(one_node)
    rounds, under_way = list[list[str]](), set[str]()
    plain = connection.ask

    async def ask(subject: str, *given: Any, **more: Any) -> bytes:
        if not under_way:
            rounds.append([])
        rounds[-1].append(subject)
        under_way.add(subject)
        try:
            return await plain(subject, *given, **more)
        finally:
            under_way.discard(subject)

    sweep = ((JOB, "every:10s"),)
    await one_node.beat(sweep=sweep)  # which reads what was registered
    monkeypatch.setattr(connection, "ask", ask)
    look = ["$JS.API.STREAM.INFO.an-history", "$JS.API.STREAM.MSG.GET.an-history"]
    for fresh, reads in ((True, look), (False, ["$JS.API.STREAM.INFO.an-claims", *look])):
        monkeypatch.setattr(type(jetstream.time), "fresh", fresh)
        rounds.clear()
        assert (await one_node.beat(sweep=sweep)).known
        first, second = rounds
        assert sorted(first) == sorted(reads)
        assert [each.rsplit(".", 1)[1] for each in second] == ["seen"]


async def test_s28_a_registration_that_is_cut_off_takes_nothing_from_other_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is held stands in several records, which are written one after the other."""
    monkeypatch.setattr(_registry, "_HOLDS_PER_PART", 2)
    async with cluster_on(nats.fresh_url()) as cluster:
        node, other = await cluster.node(), await cluster.node()
        await node.register(*(definition(name) for name in "abcd"))
        changed = [definition(name, period=5 * SECOND) for name in "adef"]
        for writes in range(4):
            with cut_off_after(node, writes), pytest.raises(StoreUnavailable):
                await node.store.register(node.instance, changed, "c")
            views = (await other.store.jobs((), "", 9)).answers
            held = {view.name: view.instance_ids for view in views}
            assert held["b"] == ("host:1",), f"after {writes} writes"
        await node.store.register(node.instance, changed, "c")
        views = (await other.store.jobs((), "", 9)).answers
        assert {view.name: view.instance_ids for view in views} == {
            "a": ("host:1",),
            "b": ("host:1",),
            "c": (),
            "d": ("host:1",),
            "e": ("host:1",),
            "f": ("host:1",),
        }
        assert not any(view.definitions_differ for view in views)


@contextmanager
def cut_off_after(node: Node, writes: int) -> Iterator[None]:
    """The store is away for the registry once it has written so much about the instance."""
    assert isinstance(node.store, NatsClaimStore)
    registry = node.store._registry
    put, left = registry._put, writes

    async def cut_off(*given: Any) -> None:
        nonlocal left
        if not left:
            raise StoreUnavailable("cut off")
        left -= 1
        await put(*given)

    registry._put = cut_off  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        registry._put = put  # type: ignore[method-assign]


async def test_s30_definitions_and_instances_that_are_long_gone_go(one_node: Node) -> None:
    cluster = one_node.cluster
    other = await cluster.node()
    await other.register(definition("others"), definition())
    assert [view.name for view in (await one_node.store.jobs((), "", 9)).answers] == [JOB, "others"]
    await other.beat(leaving=True)
    await one_node.prune()
    assert [i.instance_id for i in (await one_node.store.instances()).answers] == ["host:1"]
    cluster.advance(14 * DAY)
    await one_node.beat()
    await one_node.prune()
    assert len((await one_node.store.jobs((), "", 9)).answers) == 2, "held until 14 days ago"
    cluster.advance(1)
    await one_node.beat()
    await one_node.prune()
    assert [view.name for view in (await one_node.store.jobs((), "", 9)).answers] == [JOB]
    cluster.advance(2 * DAY)
    last = await cluster.node()
    await last.register()
    await last.prune()
    assert [i.instance_id for i in (await last.store.instances()).answers] == ["host:3"]


async def test_s28_a_definition_that_comes_while_others_are_dropped_stays_the_current_one(
    one_node: Node,
) -> None:
    """What goes is judged on the job as it is when that is written."""
    cluster = one_node.cluster
    other = await cluster.node()
    await other.register(definition(period=20 * SECOND))
    await other.beat(leaving=True)
    await one_node.register()
    cluster.advance(15 * DAY)
    await one_node.register()
    pruner = one_node.store
    assert isinstance(pruner, NatsClaimStore)
    change = pruner._registry._change
    newest = await cluster.node()
    changes = 0

    async def overtaken(*given: Any) -> Any:
        nonlocal changes
        changes += 1
        if changes == 2:  # the first notes until when the instance that has left held it
            await newest.register(definition(period=30 * SECOND))
        return await change(*given)

    pruner._registry._change = overtaken  # type: ignore[assignment, method-assign]
    await one_node.prune()
    assert changes == 2
    (view,) = (await newest.store.jobs((), "", 9)).answers
    assert view.spec.schedule == EverySchedule(30 * SECOND)


async def test_a_record_that_somebody_spoilt_spoils_no_other(one_node: Node) -> None:
    """Whatever of it is read in one call with others: results, heartbeats, history, pruning."""
    cluster = one_node.cluster
    other = await cluster.node()
    await other.register(definition("others"))
    cluster.advance_to(SLOT)
    spoilt, kept = await one_node.win(SLOT), await one_node.win(SLOT + 1)
    store = one_node.store
    assert isinstance(store, NatsClaimStore)
    subjects = store._subjects
    mine = other.instance
    for subject in (
        subjects.run(JOB, SLOT),
        subjects.job("others"),
        subjects.seen(mine.instance_id, mine.incarnation),
        subjects.holds(mine.instance_id, mine.incarnation, 0),
    ):
        await store._jetstream.publish(
            subject, b"x", stream=subjects.history, expected=None, until=store._connection.until()
        )
    store._history._written.clear()  # what a sidecar after this one does not know
    results = [
        Completion(JOB, seen.run.slot, seen.run.token, Outcome("it")) for seen in (spoilt, kept)
    ]
    answers = (await store.complete(results)).answers
    assert [answer.outcome for answer in answers] == ["unknown_token", "recorded"]
    assert (await one_node.beat(sweep=((JOB, "every:10s"),))).known
    assert [seen.run.slot for seen in await one_node.history()] == [SLOT + 1]
    assert [view.name for view in (await store.jobs((), "", 9)).answers] == [JOB]
    assert (await other.claim(SLOT)).outcome == "lost", "the claim itself stands"
    cluster.advance(30 * DAY)
    await one_node.register()
    assert await one_node.prune() == 2


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("no", name="nats.errors")

    monkeypatch.setattr(dispatch, "import_module", missing)
    with pytest.raises(StoreRefused, match=r'pip install "anarchon\[nats\]"'):
        dispatch.open_store("nats://host", OpenOptions("x", SystemClock()))


def test_a_strategy_that_is_not_known_is_refused() -> None:
    with pytest.raises(StoreRefused, match="option strategy is 'kv': use one of: claim, lease"):
        open_store("nats://host?strategy=kv", OpenOptions("x", SystemClock()))
