"""What only a NATS server can do to a sidecar, on real ones (S1, S10, S11, S27)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends import nats as dispatch
from anarchon_backends.nats import jetstream, streams
from anarchon_backends.nats.address import Address, address_of
from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.time import StoreTime
from anarchon_backends.nats_claim import RETENTION_MS, NatsClaimStore
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.clock import SystemClock
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreRefused, StoreUnavailable
from anarchon_server.core.model import Outcome, RunState
from anarchon_server.core.store import Claim, ClaimOutcome, OpenOptions, Store
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
from tests.servers.proxy import Proxy

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
        with pytest.raises(StoreUnavailable, match="exceeded|insufficient"):
            for n in range(1, 2_000):
                await node.win(T0 + n * PERIOD, **LONG)
                won.append(n)
        assert await claimed(node, T0 + (len(won) + 1) * PERIOD) is None, "it was surely not done"
        for n in (won[0], won[-1]):
            assert (await node.claim(T0 + n * PERIOD, **LONG)).outcome == "lost"
        with pytest.raises(StoreRefused, match="storage is full .*: raise its limit max_file"):
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
        await compete(cluster, kill, slots=400)


async def compete(cluster: Cluster, kill: Callable[[], None], slots: int) -> None:
    """Six instances claim all slots, while servers die three times."""
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
    for share in (0.2, 0.5, 0.8):
        await until(lambda share=share: len(won) >= share * len(places))  # type: ignore[misc]
        await asyncio.to_thread(kill)
    await asyncio.gather(*working)
    assert failures, "they have noticed"
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
    assert set(codes) == {jetstream.WRONG_SEQUENCE, jetstream.PERHAPS_WRONG_SEQUENCE}


def count_codes(connection: Connection, codes: Counter[int]) -> None:
    ask = connection.ask

    async def counted(subject: str, *given: Any, **named: Any) -> bytes:
        answer = await ask(subject, *given, **named)
        code = json.loads(answer).get("error", {}).get("err_code")
        if code is not None and subject.startswith("an.claim."):
            codes[code] += 1
        return answer

    connection.ask = counted  # type: ignore[method-assign]
