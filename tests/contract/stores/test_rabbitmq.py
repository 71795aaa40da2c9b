"""What only a RabbitMQ broker can do to a sidecar, on real ones (S10, S11, S17, S26)."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends.rabbitmq import RabbitmqStore, _management, _own
from anarchon_backends.rabbitmq._address import Address, address_of
from anarchon_backends.rabbitmq._claims import (
    Claims,
    Holder,
    exchange_of,
    number_of,
    passing_of,
    queue_of,
)
from anarchon_backends.rabbitmq._connection import AccessDenied, Link, Refused
from anarchon_backends.rabbitmq._restarts import HELD_MS, Restarts
from anarchon_server.core.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from anarchon_server.core.machine import Moment
from anarchon_server.core.model import (
    Outcome,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    RunView,
    Trigger,
)
from anarchon_server.core.store import Claim, ClaimOutcome, OpenOptions, PrunePolicy
from anarchon_server.opening import open_store
from tests.contract.harness import DAY, PERIOD, T0, ClaimOnlyNode, Cluster, FakeClock, Node
from tests.servers import rabbitmq
from tests.servers.ports import free_port
from tests.servers.proxy import Proxy
from tests.servers.tools import openssl

SLOT = T0 + PERIOD
ANY_TIME = {"start_deadline_ms": DAY, "overlap": OverlapPolicy.ALLOW}
PAGE = Path(__file__).parents[3] / "docs/stores/rabbitmq.md"
MNESIA = ("rabbitmq", "rabbitmq4")
VERSIONS = {"rabbitmq": "3.10.", "rabbitmq4": "4.0.", "rabbitmq-new": "4."}
OLDER = {"3.10.": "3.09.", "4.0.": "2.0.", "4.": "2."}


class Database:
    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> RabbitmqStore:
        return rabbitmq.open_virtual(self.url, options)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url), node_type=ClaimOnlyNode)
    async with cluster.stack:
        yield cluster


@pytest.fixture(params=rabbitmq.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., rabbitmq.Broker]]:
    """Starts brokers of the test's own, and stops them after it."""
    brokers: list[rabbitmq.Broker] = []

    def started(kind: str, *settings: str, **given: Any) -> rabbitmq.Broker:
        broker = replace(rabbitmq.private(kind, *settings), **given)
        brokers.append(broker)
        return broker.start()

    yield started
    for broker in brokers:
        broker.stop()


def through_port(url: str, port: int) -> str:
    return re.sub(r":\d+/", f":{port}/", url)


@asynccontextmanager
async def behind_a_proxy(
    kind: str, timeout_ms: int = 20_000
) -> AsyncIterator[tuple[Proxy, Cluster, Node, Node]]:
    """A node that speaks through a proxy, and one that does not; both registered, at the slot.

    Both are patient, as the machine may be busy; for what is to time out, see `impatient`.
    """
    url = rabbitmq.fresh_url(kind)
    async with Proxy(port_of(url)) as proxy, cluster_on(url) as cluster:
        direct = await cluster.node()
        assert isinstance(cluster.database, Database)
        cluster.database.url = through_port(url, proxy.port)
        through = await cluster.node(op_timeout_ms=timeout_ms)
        await mute(direct)
        for node in (direct, through):
            await node.register()
        cluster.advance_to(SLOT)
        yield proxy, cluster, through, direct


@contextmanager
def impatient(node: Node) -> Iterator[None]:
    """While a call of this node is to time out."""
    store = node.store
    assert isinstance(store, RabbitmqStore)
    link = store._link
    usual, link._timeout_s = link._timeout_s, 0.5
    yield
    link._timeout_s = usual


async def mute(node: Node) -> None:
    """Has it tell nobody what it wins, so that all must ask the broker."""
    store = node.store
    assert isinstance(store, RabbitmqStore)
    await store._news.close()


def port_of(url: str) -> int:
    return int(re.findall(r":(\d+)/", url)[0])


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a broker or a task gives no other signal of."""
    async with asyncio.timeout(90):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def answer_of(node: Node, claim: Claim) -> ClaimOutcome:
    """Asks until it is answered, as the engine does."""
    while True:
        try:
            outcome = (await node.ask(claim)).outcome
        except StoreError:
            outcome = ClaimOutcome.UNKNOWN
        if outcome is not ClaimOutcome.UNKNOWN:
            return outcome
        await asyncio.sleep(0.02)  # the loop's back-off


@asynccontextmanager
async def linked(url: str, timeout_ms: int = 5_000) -> AsyncIterator[Link]:
    link = Link(address_of(url.partition("#")[0]), "test", timeout_ms)
    link.start()
    try:
        yield link
    finally:
        await link.close()


# Names and numbers


def test_names_say_what_they_are_and_fit_the_brokers_answer() -> None:
    assert queue_of("default", "a:b/c_d-e", SLOT) == f"an.default.a:b/c_d-e.{SLOT}"
    assert queue_of("a.b", "c.d", 1) == "an.a,b.c,d.1"
    long = queue_of("n" * 128, "j" * 128, SLOT)
    assert re.fullmatch(r"an\.[0-9a-f]{64}", long)
    assert exchange_of("a.b") == "an.a,b"
    names = {"a", "b", "a.b", "b.a", "a:b", "a/b", "ab", "n" * 128, "n" * 127 + "m"}
    pairs = [(one, other, slot) for one in names for other in names for slot in (1, 11)]
    assert len({queue_of(*pair) for pair in pairs}) == len(pairs)
    assert re.fullmatch(r"an\.a\.\.news\.[0-9a-f]{16}", passing_of("a", "news"))


def test_a_token_gives_always_the_same_number_of_62_bits() -> None:
    token = f"{SLOT}.{'0123456789abcdef' * 2}.job"
    assert number_of(token) == number_of(token)
    numbers = {number_of(f"{token}{n}") for n in range(1_000)}
    assert len(numbers) == 1_000
    assert 2**61 < max(numbers) < 2**62


# One winner


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_s10_of_fifty_at_once_one_wins(kind: str, queue_type: str) -> None:
    url = rabbitmq.fresh_url(kind)
    links = [Link(address_of(url.partition("#")[0]), "race", 10_000) for _ in range(50)]
    for link in links:
        link.start()
    try:
        for n in range(10):
            queue = queue_of(url.partition("#")[2], "race", n)
            holders = await asyncio.gather(
                *(
                    Claims(link, queue_type, 600_000).declare(queue, number, link.deadline())
                    for number, link in enumerate(links, 1)
                )
            )
            (winner,) = [each.number for each in holders if each and each.mine]
            assert {each.number for each in holders if each} == {winner}, "every loser is told"
    finally:
        for link in links:
            await link.close()


async def test_s10_a_batch_that_loses_throughout_is_answered_on_one_connection(kind: str) -> None:
    """Each loser's channel is closed by the broker, and each has another."""
    async with behind_a_proxy(kind, timeout_ms=10_000) as (_, cluster, through, direct):
        cluster.advance(300 * PERIOD)
        wishes = [direct.wish(SLOT + n * PERIOD, **ANY_TIME) for n in range(300)]
        assert {a.outcome for a in (await direct.store.claim(wishes)).answers} == {"won"}
        store = through.store
        assert isinstance(store, RabbitmqStore)
        before = store._link._connection
        wishes = [through.wish(SLOT + n * PERIOD, **ANY_TIME) for n in range(300)]
        answers = (await store.claim(wishes)).answers
        assert {answer.outcome for answer in answers} == {"lost"}
        assert store._link._connection is before
        assert (await through.claim(SLOT + 300 * PERIOD)).outcome == "won"


async def test_s10_instances_with_other_settings_do_not_win_a_slot_again(kind: str) -> None:
    """Retention and the kind of queue are compared before the token is."""
    url = rabbitmq.fresh_url(kind)
    base, _, prefix = url.partition("#")
    ways = ["", "?retention=2h", "?queue_type=quorum", "?queue_type=quorum&retention=2h"]
    async with cluster_on(url) as cluster:
        nodes = []
        for way in ways:
            cluster.database = Database(f"{base}{way}#{prefix}")
            nodes.append(await cluster.node())
            await mute(nodes[-1])
        cluster.advance_to(SLOT)
        for n, winner in enumerate(nodes):
            slot = SLOT - n
            won = await winner.win(slot)
            for other in nodes:
                assert (await other.claim(slot)).outcome == "lost"
            for other in nodes:
                assert (await other.complete(won, Outcome("it"))).outcome == "recorded"


async def test_what_may_not_run_is_not_declared(kind: str) -> None:
    url = rabbitmq.fresh_url(kind)
    async with cluster_on(url) as cluster, linked(url) as link:
        node = await cluster.node()
        cluster.advance_to(SLOT)
        assert (await node.claim(SLOT, may_run=False)).outcome == "unchanged"
        assert (await node.claim(SLOT + PERIOD)).outcome == "early"
        assert (await node.claim(SLOT - 2 * PERIOD)).outcome == "late"
        claims = Claims(link, "classic", 600_000)
        for slot in (SLOT, SLOT + PERIOD, SLOT - 2 * PERIOD):
            queue = queue_of(url.partition("#")[2] + "default", "job", slot)
            assert not await claims.exists(queue, link.deadline())
        assert (await node.claim(SLOT)).outcome == "won"


async def test_s02_a_claim_that_had_to_wait_to_be_sent_is_judged_when_it_can_be(kind: str) -> None:
    async with behind_a_proxy(kind, timeout_ms=5_000) as (proxy, cluster, through, direct):
        proxy.cut()
        await has_noticed(through)
        proxy.hold_replies()
        asking = asyncio.create_task(through.claim(SLOT))
        await proxy.held.wait()
        cluster.advance(PERIOD + 1)
        proxy.resume()
        assert (await asking).outcome == "late"
        assert (await direct.claim(SLOT, start_deadline_ms=DAY)).outcome == "won"


async def test_a_claim_goes_when_it_was_kept_for_long_enough(kind: str) -> None:
    """Losers do not hold it any longer."""
    url = rabbitmq.fresh_url(kind)
    async with linked(url) as link:
        claims = Claims(link, "classic", 300)
        queue = passing_of(url.partition("#")[2], "short")
        assert await claims.declare(queue, 1, link.deadline()) == Holder(True, 1)
        assert await claims.declare(queue, 2, link.deadline()) == Holder(False, 1)
        holder: Holder | None = None
        while holder != Holder(True, 2):
            holder = await claims.declare(queue, 2, link.deadline())


async def test_s10_a_queue_that_is_only_being_made_is_asked_for_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RabbitMQ 4.3 answers who comes while another's quorum queue begins, now and then."""
    url = rabbitmq.fresh_url(kind)
    async with linked(url) as link:
        queue = passing_of(url.partition("#")[2], "begun")
        claims = Claims(link, "classic", 600_000)
        await claims.declare(queue, 1, link.deadline())
        begun = "NOT_FOUND - home node 'n@h' of durable queue 'q' in vhost 'v' is down or inaccess"
        times, ask = 0, link.ask

        async def stutter(*given: Any) -> Any:
            nonlocal times
            times += 1
            if times % 4:
                raise Refused(404, begun)
            return await ask(*given)

        monkeypatch.setattr(link, "ask", stutter)
        assert await claims.declare(queue, 2, link.deadline()) == Holder(False, 1)
        assert await claims.exists(queue, link.deadline())
        assert times == 8


# Unknown outcomes


async def test_s11_a_claim_whose_reply_is_lost_is_unknown_and_its_repeat_wins(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.drop_replies()
        with impatient(through), pytest.raises(OutcomeUnknown, match="no answer within 500 ms"):
            await through.ask(claim)
        proxy.resume()
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won"
        assert len(await through.history()) == 1


async def test_s11_a_lost_claim_whose_reply_is_lost_is_unknown_and_its_repeat_loses(
    kind: str,
) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        await direct.win(SLOT)
        claim = through.wish(SLOT)
        proxy.drop_replies()
        with impatient(through), pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.resume()
        assert (await through.ask(claim)).outcome == "lost"


async def test_s11_a_connection_reset_after_sending_is_unknown(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        await through.beat()
        claim = through.wish(SLOT)
        proxy.cut_after_requests()
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        assert (await through.ask(claim)).outcome == "won", "it has connected again by itself"


async def test_s11_a_claim_that_is_delivered_late_is_the_same_claim(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.hold_requests()
        with impatient(through), pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.resume()
        assert await answer_of(through, claim) is ClaimOutcome.WON
        assert (await direct.claim(SLOT)).outcome == "lost"


async def test_s11_what_could_not_be_sent_was_surely_not_done_and_does_not_arrive_later(
    kind: str,
) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        proxy.refuse()
        proxy.cut()
        await has_noticed(through)
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT)
        with pytest.raises(StoreUnavailable):
            await through.beat()
        proxy.resume()
        await until_beating(through)
        assert (await direct.claim(SLOT)).outcome == "won"
        assert (await through.claim(SLOT)).outcome == "lost"


async def has_noticed(node: Node) -> None:
    """Waits until the instance knows that it has no connection."""
    store = node.store
    assert isinstance(store, RabbitmqStore)
    link = store._link
    await until(lambda: link._connection is None or not link._connection.is_opened)


async def until_beating(node: Node) -> None:
    while True:
        try:
            await node.beat()
        except StoreError:
            await asyncio.sleep(0.02)  # the loop's back-off
        else:
            return


async def test_s11_a_host_that_does_not_answer_is_given_up_in_time(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, _direct):
        proxy.cut()
        await has_noticed(through)
        proxy.hold_replies()
        problem = r"in time|no answer within"
        with impatient(through), pytest.raises(StoreUnavailable, match=problem):
            await through.claim(SLOT)
        proxy.resume()
        assert await answer_of(through, through.wish(SLOT)) is ClaimOutcome.WON


async def test_s11_a_batch_that_is_cut_off_is_unknown_in_part_and_its_repeat_wins_all(
    kind: str,
) -> None:
    async with behind_a_proxy(kind, timeout_ms=10_000) as (proxy, cluster, through, direct):
        slots = range(SLOT, SLOT + 200 * PERIOD, PERIOD)
        cluster.advance_to(slots[-1])
        wishes = [through.wish(slot, **ANY_TIME) for slot in slots]
        before = proxy.bytes_received
        asking = asyncio.create_task(through.store.claim(wishes))
        await until(lambda: proxy.bytes_received > before + 1_000)
        proxy.cut()
        outcomes = Counter(answer.outcome for answer in (await asking).answers)
        assert set(outcomes) == {"won", "unknown"}
        assert outcomes[ClaimOutcome.WON] < 200
        again = (await through.store.claim(wishes)).answers
        assert {answer.outcome for answer in again} == {"won"}
        rivals = [direct.wish(slot, **ANY_TIME) for slot in slots]
        assert {a.outcome for a in (await direct.store.claim(rivals)).answers} == {"lost"}


async def test_s11_a_cancelled_claim_leaves_no_half_used_connection(kind: str) -> None:
    async with behind_a_proxy(kind, timeout_ms=10_000) as (proxy, _, through, _direct):
        store = through.store
        assert isinstance(store, RabbitmqStore)
        before = store._link._connection
        claim = through.wish(SLOT)
        proxy.hold_replies()
        asking = asyncio.create_task(through.ask(claim))
        await proxy.held.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        proxy.resume()
        assert (await through.ask(claim)).outcome == "won"
        assert store._link._connection is not before


async def test_a_release_of_what_may_have_been_won_ends_it(kind: str) -> None:
    """S11, S24: the claim was given up before its answer was known."""
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.drop_replies()
        with impatient(through), pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.resume()
        seen = run_of(claim)
        assert (await through.release(seen, Reason.NOT_ACCEPTED)).outcome == "released"
        (shown,) = await through.history()
        assert (shown.run.state, shown.run.reason) == (RunState.FAILED, Reason.NOT_ACCEPTED)
        assert (await direct.claim(SLOT)).outcome == "lost"


async def test_a_release_of_what_was_not_won_claims_nothing(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        proxy.hold_requests()
        with impatient(through), pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.cut()
        proxy.resume()
        won = await direct.claim(SLOT)
        assert won.outcome == "won"
        assert (await through.release(run_of(claim))).outcome == "fenced"
        assert await through.history() == []


def run_of(claim: Claim) -> RunView:
    """What the holder of the claim's token says of its run."""
    from anarchon_server.core.claim_only import won_run

    return RunView(won_run(claim, claim.slot))


# The broker dies


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "queue_type"),
    [("rabbitmq", "classic"), ("rabbitmq4", "classic"), ("rabbitmq-new", "quorum")],
)
async def test_s10_kill_9_under_load_loses_no_claim_and_gives_none_twice(
    kind: str, queue_type: str, start: Callable[..., rabbitmq.Broker]
) -> None:
    """The instances are back by themselves. The kill meets calls under way: the broker is stopped
    before it, until one of them has gone without an answer.
    """
    broker = await asyncio.to_thread(start, kind)
    slots = range(T0 + PERIOD, T0 + 151 * PERIOD, PERIOD)
    won: list[tuple[int, str]] = []
    unknown = 0
    dying, back, released = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with cluster_on(f"{broker.url}?queue_type={queue_type}#") as cluster:
        nodes = [await cluster.node(op_timeout_ms=1_000) for _ in range(4)]
        for node in nodes:
            await node.register()
        cluster.advance_to(slots[-1])

        async def answered(node: Node, claim: Claim) -> ClaimOutcome:
            nonlocal unknown
            while True:
                try:
                    outcome = (await node.ask(claim)).outcome
                except StoreError as error:
                    unknown += isinstance(error, OutcomeUnknown)
                    if dying.is_set():
                        await back.wait()
                    continue
                if outcome is not ClaimOutcome.UNKNOWN:
                    return outcome
                await released.wait()  # it is held back

        async def work(node: Node) -> None:
            for slot in slots:
                claim: Claim = node.wish(slot, **ANY_TIME)
                if await answered(node, claim) is ClaimOutcome.WON:
                    won.append((slot, claim.token))

        working = [asyncio.create_task(work(node)) for node in nodes]
        await until(lambda: len(won) >= len(slots) // 2)
        unknown = 0
        dying.set()
        broker.freeze()
        await until(lambda: unknown > 0)
        broker.kill()
        await asyncio.to_thread(broker.start)
        back.set()
        for node in nodes:
            await has_put_back(node)
        cluster.advance(HELD_MS)
        released.set()
        await asyncio.gather(*working)
        assert sorted(slot for slot, _ in won) == list(slots), "each slot has one winner"
        late = await cluster.node(op_timeout_ms=10_000)
        wishes = [late.wish(slot, **ANY_TIME) for slot in slots]
        answers = (await late.store.claim(wishes)).answers
        shown = [a.run.run.token for a in answers if a.run]
        assert {answer.outcome for answer in answers} == {"lost"}
        assert shown == [f"#{number_of(token)}" for _, token in sorted(won)], "and it is kept"


async def has_put_back(node: Node) -> None:
    """Waits until the broker knows again what this instance won last."""
    while not await restarts_of(node)._put_back():
        pass


def restarts_of(node: Node) -> Restarts:
    assert isinstance(node.store, RabbitmqStore)
    return node.store._restarts


@asynccontextmanager
async def forgotten_by(
    broker: rabbitmq.Broker,
) -> AsyncIterator[tuple[Cluster, Node, RunView, Node]]:
    """A slot, its winner, and another instance that has not heard of it, after a kill that made
    Mnesia forget the claim. The winner does nothing about that before its `_restarts` is started.

    Mnesia forgets a transaction whose commit it has written down and whose outcome it has not,
    which is up to a process that nobody waits for. It is kept from its work here; on a busy
    machine it may be late by itself.
    """
    async with cluster_on(f"{broker.url}#") as cluster:
        winner, rival = await cluster.nodes_of(2)
        await mute(winner)
        cluster.advance_to(SLOT)
        await asyncio.to_thread(broker.ctl, "eval", "sys:suspend(mnesia_recover).")
        won = await winner.win(SLOT)
        await restarts_of(winner).close()
        broker.kill()
        await asyncio.to_thread(broker.start)
        assert await reached(rival, SLOT) is ClaimOutcome.UNKNOWN, "nobody has it, nobody may"
        yield cluster, winner, won, rival


async def reached(node: Node, slot: int) -> ClaimOutcome:
    """The broker's first answer. That its last connection is lost an instance notices once."""
    while True:
        try:
            return (await node.claim(slot, **ANY_TIME)).outcome
        except StoreError:
            pass


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", MNESIA)
async def test_s10_a_claim_that_the_killed_broker_has_forgotten_is_put_back(
    kind: str, start: Callable[..., rabbitmq.Broker]
) -> None:
    """The broker acknowledged it. Its winner lives, and declares it again before others may."""
    broker = await asyncio.to_thread(start, kind)
    async with forgotten_by(broker) as (cluster, winner, won, rival):
        restarts_of(winner).start()
        while (outcome := await reached(rival, SLOT)) is ClaimOutcome.UNKNOWN:
            pass
        assert outcome is ClaimOutcome.LOST
        cluster.advance(HELD_MS)
        (late,) = await cluster.nodes_of(1)
        for other in (rival, late):
            assert await reached(other, SLOT) is ClaimOutcome.LOST
        assert (await winner.complete(won)).outcome == "recorded"


@pytest.mark.timeout(180)
async def test_s10_slots_due_before_a_restart_are_held_back_and_later_ones_are_not(
    start: Callable[..., rabbitmq.Broker], caplog: pytest.LogCaptureFixture
) -> None:
    """A winner that is back later than that finds its slot taken, and says so."""
    broker = await asyncio.to_thread(start, "rabbitmq4")
    async with forgotten_by(broker) as (cluster, winner, _, rival):
        (late,) = await cluster.nodes_of(1)
        cluster.advance(3_000)
        assert await reached(late, SLOT) is ClaimOutcome.UNKNOWN
        assert await reached(late, cluster.now) is ClaimOutcome.WON
        cluster.advance(HELD_MS - 3_001)
        assert await reached(rival, SLOT) is ClaimOutcome.UNKNOWN
        cluster.advance(1)
        assert await reached(rival, SLOT) is ClaimOutcome.WON
        await has_put_back(winner)
        (record,) = (each for each in caplog.records if each.message == "claim_forgotten")
        assert record.fields == {"job": "job", "slot": SLOT}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", MNESIA)
async def test_s10_what_was_won_with_the_last_answer_of_a_connection_is_put_back(kind: str) -> None:
    async with behind_a_proxy(kind) as (proxy, cluster, through, _):
        proxy.cut()
        await has_noticed(through)
        queue = passing_of("default", "last")
        restarts_of(through).won("job", SLOT, queue, 7)
        assert isinstance(cluster.database, Database)
        async with linked(cluster.database.url) as link:
            claims = Claims(link, "classic", 600_000)
            while not await claims.exists(queue, link.deadline()):
                pass
            assert await claims.declare(queue, 8, link.deadline()) == Holder(False, 7)
            await claims.delete(queue, link.deadline())


@pytest.mark.parametrize("kind", MNESIA)
async def test_without_permission_to_see_a_restart_every_connection_counts_as_one(
    kind: str,
) -> None:
    broker = rabbitmq.session_broker(kind)
    if "blind\t" not in broker.ctl("list_users"):
        broker.ctl("add_user", "blind", "blind")
    broker.ctl("set_permissions", "-p", rabbitmq.VHOST, "blind", "^an[.][^.]", ".*", ".*")
    url = rabbitmq.fresh_url(kind).replace("guest:guest", "blind:blind")
    async with cluster_on(url) as cluster:
        cluster.advance_to(SLOT)
        (node,) = await cluster.nodes_of(1)
        assert await reached(node, SLOT) is ClaimOutcome.UNKNOWN
        cluster.advance(HELD_MS)
        assert await reached(node, SLOT) is ClaimOutcome.WON


async def test_connections_that_an_operator_closes_are_opened_again(kind: str) -> None:
    url = rabbitmq.fresh_url(kind)
    async with cluster_on(url) as cluster:
        node, other = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        broker = rabbitmq.session_broker(kind)
        await asyncio.to_thread(broker.ctl, "close_all_connections", "--global", "maintenance")
        assert await answer_of(node, node.wish(SLOT)) is ClaimOutcome.WON
        assert await answer_of(other, other.wish(SLOT)) is ClaimOutcome.LOST
        store = other.store
        assert isinstance(store, RabbitmqStore)
        slot = SLOT
        while not store._news.winner("job", slot - 1):  # it listens again before long
            slot += 1
            await node.win(slot, **ANY_TIME)
            cluster.advance(1)


@pytest.mark.timeout(120)
async def test_claims_go_on_while_the_broker_lets_nobody_publish(
    kind: str, start: Callable[..., rabbitmq.Broker]
) -> None:
    """A broker short of memory stops reading from connections that publish."""
    broker = await asyncio.to_thread(start, kind)
    async with cluster_on(f"{broker.url}#") as cluster:
        node, other = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        await node.win(SLOT)
        mark = "set_vm_memory_high_watermark"
        await asyncio.to_thread(broker.ctl, mark, "0.000001")
        for n in range(1, 20):
            cluster.advance(PERIOD)
            await node.win(SLOT + n * PERIOD)
            assert (await other.claim(SLOT + n * PERIOD)).outcome == "lost"
        await node.beat()


# Clusters


@asynccontextmanager
async def cluster_of_three(
    kind: str, start: Callable[..., rabbitmq.Broker]
) -> AsyncIterator[list[rabbitmq.Broker]]:
    first = await asyncio.to_thread(start, kind)
    others = await asyncio.gather(*(asyncio.to_thread(start, kind, beside=first) for _ in range(2)))
    for each in others:
        await asyncio.to_thread(each.join)
    yield [first, *others]


def url_of(*brokers: rabbitmq.Broker) -> str:
    hosts = ",".join(f"127.0.0.1:{broker.port}" for broker in brokers)
    return f"amqp://guest:guest@{hosts}/{rabbitmq.VHOST}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq-new"])
async def test_s10_a_cluster_that_loses_nodes_gives_no_slot_twice(
    kind: str, start: Callable[..., rabbitmq.Broker]
) -> None:
    """Of three nodes one dies, then another, and one comes back; the claims are quorum queues."""
    async with cluster_of_three(kind, start) as brokers:
        first, second, third = brokers
        kept = await claimed_on_a_node_that_dies(kind, first, third)
        won: list[int] = []
        asked = 0
        async with cluster_on("") as cluster:
            nodes = []
            for way in ((first, second), (second, first), (first, third)):
                cluster.database = Database(f"{url_of(*way)}?queue_type=quorum&retention=31d#")
                nodes.append(await cluster.node(op_timeout_ms=1_000))
            cluster.advance_to(T0 + 10_000 * PERIOD)
            stop = asyncio.Event()

            async def work(node: Node) -> None:
                nonlocal asked
                for n in range(1, 10_000):
                    slot = T0 + n * PERIOD
                    claim = node.wish(slot, start_deadline_ms=10 * DAY)
                    asked = max(asked, n)
                    if await answer_of(node, claim) is ClaimOutcome.WON:
                        won.append(slot)
                    if stop.is_set() and n >= asked:
                        return

            working = [asyncio.create_task(work(node)) for node in nodes]
            await until(lambda: len(won) > 20)
            third.kill()
            seen = len(won)
            await until(lambda: len(won) > seen + 20)  # with two of three it goes on
            second.kill()
            await until_no_quorum(nodes[0])
            await asyncio.to_thread(second.start)
            seen = len(won)
            await until(lambda: len(won) > seen + 20)
            stop.set()
            await asyncio.gather(*working)
        assert sorted(won) == list(range(T0 + PERIOD, T0 + (len(won) + 1) * PERIOD, PERIOD))
        await asyncio.to_thread(third.start)
        async with cluster_on(f"{url_of(first)}#{kept}") as cluster:
            late = await cluster.node()
            stranger = f"{SLOT}.{'f' * 32}.job"
            cluster.advance_to(SLOT)
            assert await answer_of(late, late.wish(SLOT, token=stranger)) is ClaimOutcome.LOST


async def claimed_on_a_node_that_dies(
    kind: str, first: rabbitmq.Broker, other: rabbitmq.Broker
) -> str:
    """A classic queue is on one node. While that is down, 3.x does not know who won, and newer ones
    do; the winner itself has no answer from either. Returns the namespace's prefix.
    """
    prefix = "classic."
    async with cluster_on(f"{url_of(other)}#{prefix}") as cluster:
        winner = await cluster.node()
        cluster.database = Database(f"{url_of(first)}#{prefix}")
        rival = await cluster.node(op_timeout_ms=1_000)
        await mute(winner)
        cluster.advance_to(SLOT)
        won = await winner.win(SLOT)
        assert (await rival.claim(SLOT)).outcome == "lost"
        other.kill()
        with pytest.raises(OutcomeUnknown):
            await completing_on(rival, won)
        if kind == "rabbitmq":
            with pytest.raises(OutcomeUnknown, match="down"):
                await rival.claim(SLOT)
        else:
            assert (await rival.claim(SLOT)).outcome == "lost"
        await asyncio.to_thread(other.start)
        assert await answer_of(rival, rival.wish(SLOT)) is ClaimOutcome.LOST
    return prefix


async def completing_on(node: Node, won: RunView) -> None:
    """Brings a result to a sidecar that does not know it, until the node's death is noticed."""
    for n in range(1_000):
        assert isinstance(node.store, RabbitmqStore)
        node.store._own._runs.clear()
        assert (await node.complete(won, Outcome(str(n)))).outcome == "recorded"


async def until_no_quorum(node: Node) -> None:
    """Waits for a claim without an answer, which comes in time."""
    for slot in range(node.cluster.now - 1_000, node.cluster.now):
        try:
            async with asyncio.timeout(5):
                answer = await node.claim(slot, **ANY_TIME)
        except StoreError:
            return
        assert answer.outcome in ("won", "unknown")
    raise AssertionError("one of three nodes goes on by itself")


# What others say


async def test_a_loser_that_has_heard_of_the_winner_does_not_ask(kind: str) -> None:
    async with behind_a_proxy(kind) as (_, cluster, through, _direct):
        telling = await cluster.node()
        won = await telling.win(SLOT)
        store = through.store
        assert isinstance(store, RabbitmqStore)
        await until(lambda: store._news.winner("job", SLOT) is not None)
        assert isinstance(store._link, Link)
        await store._link.close()
        lost = await through.claim(SLOT)
        assert lost.outcome == "lost"
        assert lost.run is not None
        assert lost.run.run.current is not None
        assert lost.run.run.current.instance_id == "host:3"
        assert lost.run.run.token == f"#{number_of(won.run.token)}"
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT + 1)


async def test_what_is_announced_is_input(kind: str) -> None:
    url = rabbitmq.fresh_url(kind)
    async with cluster_on(url) as cluster, linked(url) as link:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(SLOT)
        store = node.store
        assert isinstance(store, RabbitmqStore)
        good = {"sender": "s", "instance": "i", "at": cluster.now, "retention_ms": 3_600_000}
        good["won"] = [["job", SLOT, 7]]
        bad: list[object] = [
            {},
            [],
            7,
            "x",
            {**good, "won": [["job", SLOT]]},
            {**good, "won": [["job", "x", 7]]},
            {**good, "won": [["job", SLOT, -1]]},
            {**good, "won": [["job", SLOT, 2**62]]},
            {**good, "won": [["j" * 129, SLOT, 7]]},
            {**good, "won": 7},
            {**good, "at": "soon"},
            {**good, "retention_ms": "long"},
        ]
        bodies = [json.dumps(each).encode() for each in bad]
        bodies += [b"", b"\xff", b"[" * 10_000, b"{", b"x" * 1_100_000]
        exchange = exchange_of(url.partition("#")[2] + "default")
        last = json.dumps({**good, "won": [["job", SLOT + 1, 7]]}).encode()
        for body in (*bodies, last):
            await link.ask(
                lambda channel, body=body: channel.basic_publish(body, exchange=exchange),  # type: ignore[misc]
                link.deadline(),
            )
        await until(lambda: store._news.winner("job", SLOT + 1) is not None)
        assert list(store._news._heard) == [("job", SLOT + 1)]
        assert (await node.claim(SLOT)).outcome == "won"


async def test_s01_clocks_that_differ_are_warned_of_once_an_hour(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """RabbitMQ has no clock: an instance's is compared with those of the winners."""
    caplog.set_level(logging.WARNING, "anarchon")
    async with cluster_on(rabbitmq.fresh_url(kind)) as cluster:
        node, slow, fast = await cluster.nodes_of(3)
        store = node.store
        assert isinstance(store, RabbitmqStore)
        slots = itertools.count(T0 + PERIOD, PERIOD)
        for each in (slow, fast):  # what they hear of each other is no matter
            assert isinstance(each.store, RabbitmqStore)
            each.store._news._compare_clocks = lambda *_: None  # type: ignore[method-assign]

        async def hears_of(other: Node, ahead_ms: int, after_s: int) -> list[tuple[str, int]]:
            """What is warned of when the other wins, some time later, by a clock that is ahead."""
            caplog.clear()
            cluster.advance(after_s * 1_000)
            assert isinstance(other.store, RabbitmqStore)
            other.store._news._clock = FakeClock((cluster.now + ahead_ms) * 1_000)
            slot = next(slots)
            await other.win(slot, **ANY_TIME)
            await until(lambda: store._news.winner("job", slot) is not None)
            records = [each for each in caplog.records if each.message == "clocks_differ"]
            ours = [each.fields for each in records]  # type: ignore[attr-defined]
            return [(each["instance"], each["ahead_ms"]) for each in ours]

        cluster.advance(DAY // 2)
        assert await hears_of(fast, 2_000, 0) == []
        assert await hears_of(fast, 2_001, 1) == [("host:3", 2_001)]
        assert await hears_of(fast, 2_001, 3_600) == []
        assert await hears_of(fast, 2_001, 1) == [("host:3", 2_001)]
        assert await hears_of(slow, -2_000, 0) == []
        assert await hears_of(slow, -2_001, 1) == [], "it may have been on its way for long"
        assert await hears_of(slow, -2_001, 59) == []
        assert await hears_of(slow, 0, 1) == [], "and was"
        assert await hears_of(slow, -2_001, 1) == []
        assert await hears_of(slow, -2_001, 60) == [("host:2", -2_001)]
        assert await hears_of(slow, -2_001, 60) == []


async def test_s10_a_clock_that_is_behind_by_the_retention_wins_nothing_again(kind: str) -> None:
    """What is forgotten by the clock of another instance is late here too, for as long as that was
    heard of lately.
    """
    async with cluster_on(rabbitmq.fresh_url(kind)) as cluster:
        node, ahead = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        for each in (node, ahead):
            assert isinstance(each.store, RabbitmqStore)
        hour_ms = 3_600_000
        ahead.store._news._clock = FakeClock((SLOT + hour_ms) * 1_000)  # type: ignore[attr-defined]
        await ahead.win(SLOT - 1, **ANY_TIME)
        news = node.store._news  # type: ignore[attr-defined]
        await until(lambda: news.winner("job", SLOT - 1) is not None)
        assert (await node.claim(SLOT, **ANY_TIME)).outcome == "late"
        assert (await node.claim(SLOT + 59_999, **ANY_TIME)).outcome == "late"
        cluster.advance(60_000)
        assert (await node.claim(SLOT + 119_999, **ANY_TIME)).outcome == "late"
        assert (await node.claim(SLOT + 120_000, **ANY_TIME)).outcome == "early"
        cluster.advance(540_001)
        assert (await node.claim(SLOT, **ANY_TIME)).outcome == "won"


async def test_a_retention_that_differs_is_warned_of(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = rabbitmq.fresh_url(kind)
    async with cluster_on(url) as cluster:
        node = await cluster.node()
        cluster.database = Database(url.replace("#", "?retention=2h#"))
        other = await cluster.node()
        store = node.store
        assert isinstance(store, RabbitmqStore)
        cluster.advance_to(SLOT)
        for slot in (SLOT, SLOT - 1):
            await other.win(slot)
            await until(lambda slot=slot: store._news.winner("job", slot) is not None)  # type: ignore[misc]
        (record,) = (each for each in caplog.records if each.message == "retention_differs")
        said = {"instance": "host:2", "ours_ms": 3_600_000, "theirs_ms": 7_200_000}
        assert record.fields == said  # type: ignore[attr-defined]


async def test_s26_an_attempt_that_outlives_the_retention_is_its_own_sidecars_alone(
    kind: str,
) -> None:
    """Which tells how it ended, from its memory; a restarted one finds nobody's claim to adopt."""
    async with cluster_on(rabbitmq.fresh_url(kind)) as cluster:
        node, restarted = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        won = await node.win(SLOT)
        store = node.store
        assert isinstance(store, RabbitmqStore)
        queue = store._queue("job", SLOT)
        await store._link.ask(lambda c: c.queue_delete(queue), store._link.deadline())
        assert (await restarted.renew(won, adopt=True)).outcome == "unknown_token"
        assert (await restarted.complete(won)).outcome == "unknown_token"
        assert (await node.renew(won)).outcome == "renewed"
        assert (await node.complete(won)).outcome == "recorded"


def test_what_an_instance_remembers_of_runs_that_history_has_dropped_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_own, "DECIDED_MAX", 2)
    own = _own.Own(kept_ms=DAY)
    now = Moment(T0 * 1_000, 0, "boot", steady=True)
    for slot in (T0 - 3, T0 - 2, T0 - 1):
        run = Run("job", slot, Trigger.SCHEDULE, RunState.SUCCESS, max_attempts=1, ended_at=slot)
        own.save(run)
    assert own.prune(PrunePolicy(history_ms=DAY, history_max=0, batch=10), now) == 3
    assert own.run("job", T0 - 3) is None
    assert own.run("job", T0 - 2) is not None
    assert own.run("job", T0 - 1) is not None


# Checks at start, each made to fail once


async def report_of(url: str, namespace: str = "default") -> tuple[str, str]:
    """What a start verifies and doubts, as text."""
    store = open_store(url, OpenOptions(namespace, FakeClock()))
    try:
        report = await store.open()
        return "\n".join(report.verified), "\n".join(report.doubts)
    finally:
        await store.close()


async def test_a_start_says_what_it_has_verified(kind: str) -> None:
    verified, doubts = await report_of(rabbitmq.session_url(kind))
    assert f"RabbitMQ {VERSIONS[kind]}" in verified
    assert "a claim has one winner" in verified
    assert "x-queue-type is heeded: claims are classic queues" in verified
    assert "the virtual host 'anarchon' is not everybody's" in verified
    assert "winners are announced" in verified
    verified, _ = await report_of(rabbitmq.session_url(kind) + "?queue_type=quorum")
    assert "claims are quorum queues" in verified
    assert doubts.count("\n") == 0
    names = rabbitmq.session_broker(kind).ctl("list_queues", "-p", rabbitmq.VHOST, "name")
    assert "probe" not in names, "nothing of the trial is left"


async def test_heartbeats_are_agreed_on(kind: str) -> None:
    async with cluster_on(rabbitmq.fresh_url(kind)) as cluster:
        await cluster.node()
        said = rabbitmq.session_broker(kind).ctl("list_connections", "client_properties", "timeout")
    ours = [line.split()[-1] for line in said.splitlines() if "anarchon" in line]
    assert ours
    assert set(ours) == {"10"}


async def rewritten(kind: str, old: bytes, new: bytes) -> tuple[str, str]:
    """What a start finds where something on its way to the broker or back is another."""
    url = rabbitmq.session_url(kind)
    async with Proxy(port_of(url)) as proxy:
        proxy.rewrites[old] = new
        return await report_of(through_port(url, proxy.port))


async def test_a_broker_that_is_too_old_is_refused(kind: str) -> None:
    with pytest.raises(StoreRefused, match=r"3\.10 or newer is needed"):
        await rewritten(kind, VERSIONS[kind].encode(), OLDER[VERSIONS[kind]].encode())


async def test_a_broker_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(StoreRefused, match="calls itself 'LavinMQQ'"):
        await rewritten(kind, b"RabbitMQ", b"LavinMQQ")


async def test_a_broker_that_does_not_heed_the_number_is_refused(kind: str) -> None:
    """It ignores arguments that it does not know: every claim of a slot would win."""
    with pytest.raises(StoreRefused, match="slots would run twice"):
        await rewritten(kind, b"x-max-length-bytes", b"y-max-length-bytes")


async def test_a_broker_that_does_not_heed_the_type_of_queue_is_doubted(kind: str) -> None:
    _, doubts = await rewritten(kind, b"x-queue-type", b"y-queue-type")
    assert "whether claims are classic queues could not be verified" in doubts


@pytest.mark.timeout(120)
async def test_a_broker_with_relaxed_checks_is_doubted_and_still_has_one_winner(
    start: Callable[..., rabbitmq.Broker],
) -> None:
    relaxed = "quorum_queue.property_equivalence.relaxed_checks_on_redeclaration = true"
    broker = await asyncio.to_thread(start, "rabbitmq4", relaxed)
    verified, doubts = await report_of(f"{broker.url}?queue_type=quorum")
    assert "relaxed_checks" not in verified
    assert "whether claims are quorum queues could not be verified" in doubts
    async with cluster_on(f"{broker.url}?queue_type=quorum#") as cluster:
        first, second = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        await first.win(SLOT)
        assert (await second.claim(SLOT)).outcome == "lost"


async def test_the_virtual_host_of_everybody_is_doubted(kind: str) -> None:
    broker = rabbitmq.session_broker(kind)
    if "/\n" not in broker.ctl("list_vhosts"):
        broker.ctl("add_vhost", "/")
    broker.ctl("set_permissions", "-p", "/", "guest", ".*", ".*", ".*")
    for path in ("", "/", "/%2F"):
        _, doubts = await report_of(broker.url.replace(f"/{rabbitmq.VHOST}", path))
        assert "the virtual host is '/'" in doubts


async def test_a_virtual_host_that_is_not_there_is_refused(kind: str) -> None:
    url = rabbitmq.session_url(kind).replace(f"/{rabbitmq.VHOST}", "/nowhere")
    with pytest.raises(StoreRefused, match=r"vhost nowhere not found.*rabbitmqctl add_vhost"):
        await report_of(url)


async def test_a_wrong_password_is_refused_and_not_shown(kind: str) -> None:
    url = rabbitmq.session_url(kind).replace("guest:guest", "guest:topsecret")
    with pytest.raises(StoreRefused, match="RABBITMQ_PASSWORD") as refused:
        await report_of(url)
    assert "topsecret" not in str(refused.value)


async def test_credentials_come_from_files_and_the_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = rabbitmq.session_broker(kind)
    secret = "p/w:@#%"
    if "somebody" not in broker.ctl("list_users"):
        broker.ctl("add_user", "somebody", secret)
        broker.ctl("set_permissions", "-p", rabbitmq.VHOST, "somebody", ".*", ".*", ".*")
    url = broker.url
    file = tmp_path / "password"
    file.write_text(secret + "\n")
    await report_of(url.replace("guest:guest", "somebody") + f"?password_file={file}")
    await report_of(url.replace("guest:guest", "somebody:p%2Fw%3A%40%23%25"))
    monkeypatch.setenv("RABBITMQ_USERNAME", "somebody")
    monkeypatch.setenv("RABBITMQ_PASSWORD", secret)
    await report_of(url.replace("guest:guest@", ""))


async def test_a_second_host_is_tried_where_the_first_is_not_there(kind: str) -> None:
    url = rabbitmq.session_url(kind)
    nobody = free_port()
    both = url.replace("127.0.0.1", f"127.0.0.1:{nobody},127.0.0.1")
    verified, _ = await report_of(both)
    assert "a claim has one winner" in verified
    with pytest.raises(StoreUnavailable):
        await report_of(re.sub(r"@.*/", f"@127.0.0.1:{nobody},localhost:{nobody}/", url))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("amqp:", "amqp://"),
        ("amqp:///v", "names no host"),
        ("amqp://h:x/v", "cannot be read"),
        ("amqp://h/a/b", "one virtual host"),
        ("amqp://h/v#f", "%23"),
        ("amqp://h/v?color=red", "'color' is not known"),
        ("amqp://h/v?retention=1h&retention=2h", "stands twice"),
        ("amqp://h/v?retention=5m", "from 10m to 31d"),
        ("amqp://h/v?retention=90d", "from 10m to 31d"),
        ("amqp://h/v?retention=soon", "from 10m to 31d"),
        ("amqp://h/v?retention=", "from 10m to 31d"),
        ("amqp://h/v?queue_type=stream", "'classic'"),
        ("amqp://h/v?tls_ca=/etc/hosts", "amqps: only"),
        ("amqps://h/v?tls_ca=/no/such", "no such file"),
        ("amqps://h/v?tls_ca=/etc/hosts", "no such file in PEM"),
        ("amqps://h/v?tls_verify=maybe", "'full'"),
        ("amqps://h/v?tls_key=/etc/hosts", "needs tls_cert"),
        ("amqp://u:p@h/v?password_file=/x", "use one of them"),
        ("amqp://u@h/v?password_file=/no/such", "No such file"),
        ("amqp://h/v?management=h:15672", "http://host:15672"),
        ("amqp://h/v?management=http://u:p@h", "neither user nor password"),
    ],
)
def test_a_url_that_cannot_be_right_is_refused(url: str, says: str) -> None:
    with pytest.raises(StoreRefused, match=re.escape(says)):
        open_store(url, OpenOptions("default", FakeClock()))


def test_a_url_says_where_and_how() -> None:
    address = address_of("amqps://u:p@h1,[::1]:5/a%2Fb?retention=1h30m&queue_type=quorum")
    assert (address.hosts, address.virtual_host) == ((("h1", 5671), ("::1", 5)), "a/b")
    assert (address.retention_ms, address.queue_type) == (5_400_000, "quorum")
    assert "p" not in repr(address).replace("amqps", "").partition("hosts")[0].split("location")[0]
    assert isinstance(address, Address)
    assert replace(address, password="").password == ""
    can = open_store("amqp://h?retention=30m", OpenOptions("n", FakeClock())).capabilities
    assert (can.kept_ms, can.least_gap_ms, can.leases, can.history) == (
        1_800_000,
        5_000,
        False,
        False,
    )


# What operators alone are told


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq-new"])
async def test_the_management_api_is_asked_for_policies_and_nodes(
    kind: str, start: Callable[..., rabbitmq.Broker]
) -> None:
    port = free_port()
    broker = await asyncio.to_thread(
        start,
        kind,
        "management.tcp.ip = 127.0.0.1",
        f"management.tcp.port = {port}",
        plugins=("rabbitmq_management",),
    )
    await until(lambda: rabbitmq.is_listening(port))
    base = broker.url
    broker.ctl("add_user", "seer", "seer")
    broker.ctl("set_permissions", "-p", rabbitmq.VHOST, "seer", "^an[.]", "^an[.]", "^an[.]")
    url = f"{base.replace('guest:guest', 'seer:seer')}?management=http://127.0.0.1:{port}"

    _, doubts = await report_of(url)
    assert "did not answer as it should (HTTP 401)" in doubts
    broker.ctl("set_user_tags", "seer", "monitoring")
    verified, doubts = await report_of(url)
    assert doubts == "", "nothing is left in doubt"
    assert "no policy makes the broker forget claims" in verified
    assert ("kept by Khepri" if kind == "rabbitmq-new" else "is one node") in verified

    policy = ("set_policy", "-p", rabbitmq.VHOST, "--apply-to", "queues", "short")
    broker.ctl(*policy, "^an[.]", '{"expires": 300}')
    with pytest.raises(
        StoreRefused, match=r"policy 'short'.*after 300 ms, and slots would run twi"
    ):
        await report_of(url)
    async with cluster_on(f"{base}#") as cluster:  # which is what it is refused for
        first, second = await cluster.nodes_of(2)
        await mute(first)
        cluster.advance_to(SLOT)
        await first.win(SLOT)
        while (await second.claim(SLOT)).outcome != "won":
            pass
    broker.ctl(*policy, "^an[.]default[.]other", '{"expires": 300}')
    _, doubts = await report_of(url)
    assert "the policy 'short' has queues deleted after 300 ms" in doubts
    broker.ctl(*policy, r"^an\p{P}", '{"expires": 300}')
    with pytest.raises(StoreRefused, match="policy 'short'"):
        await report_of(url)
    broker.ctl(*policy, "^an[.]", '{"expires": 3600000}')
    operators = ("set_operator_policy", *policy[1:], "^an[.]", '{"expires": 1000}')
    assert (await report_of(url))[1] == ""
    broker.ctl(*operators)
    with pytest.raises(StoreRefused, match=r"policy 'short'.*after 1000 ms"):
        await report_of(url)


def test_what_a_cluster_leaves_in_doubt() -> None:
    nodes: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    classic = address_of("amqp://h/v?management=http://h:15672")
    quorum = replace(classic, queue_type="quorum")
    on, off = ({"name": "khepri_db", "state": state} for state in ("enabled", "disabled"))
    in_mnesia, on_one_node = _management.of_nodes(nodes, [off], classic, khepri=False)[1]
    assert "both sides may give a slot a winner" in in_mnesia
    assert "pause_minority" in in_mnesia.fix
    assert "a classic queue is on one of them" in on_one_node
    assert "queue_type=quorum" in on_one_node.fix
    verified, doubts = _management.of_nodes(nodes, [on], quorum, khepri=False)
    assert (len(verified), doubts) == (1, [])
    assert _management.of_nodes(nodes, [], quorum, khepri=True)[1] == []


async def test_a_management_api_that_is_not_there_is_a_doubt(kind: str) -> None:
    port = free_port()
    url = f"{rabbitmq.session_url(kind)}?management=http://127.0.0.1:{port}"
    _, doubts = await report_of(url)
    assert "did not answer as it should" in doubts
    _, doubts = await report_of(rabbitmq.session_url(kind))
    assert "could not be looked for" in doubts
    assert ("partitions" in doubts) == (kind != "rabbitmq-new")


@asynccontextmanager
async def http_server(answer: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """One that gives everybody this answer, and where it is; and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(f"HTTP/1.1 {answer}\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
async def test_a_management_api_that_points_elsewhere_is_not_followed(status: str) -> None:
    """The password would be sent along."""
    async with (
        http_server("200 OK\r\nContent-Length: 2\r\n\r\n[]") as (elsewhere, asked_there),
        http_server(f"{status}\r\nLocation: {elsewhere}/api/nodes") as (here, asked),
    ):
        _, doubts = await report_of(f"{rabbitmq.session_url('rabbitmq')}?management={here}")
    assert f"did not answer as it should (HTTP {status[:3]})" in doubts
    assert len(asked) == 1
    assert asked_there == []


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for the loopback, and a client's."""
    program = openssl()
    made = tmp_path_factory.mktemp("tls")

    def run(*words: str) -> None:
        subprocess.run([program, *words], cwd=made, check=True, capture_output=True)

    new = ["req", "-newkey", "rsa:2048", "-nodes"]

    run(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (made / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return made


@pytest.mark.timeout(120)
async def test_tls_with_an_authority_and_a_certificate_of_our_own(
    kind: str, start: Callable[..., rabbitmq.Broker], certificates: Path
) -> None:
    port, management_port = free_port(), free_port()
    broker = await asyncio.to_thread(
        start,
        kind,
        "management.ssl.ip = 127.0.0.1",
        f"management.ssl.port = {management_port}",
        f"management.ssl.cacertfile = {certificates}/ca.pem",
        f"management.ssl.certfile = {certificates}/server.pem",
        f"management.ssl.keyfile = {certificates}/server.key",
        f"listeners.ssl.1 = 127.0.0.1:{port}",
        f"ssl_options.cacertfile = {certificates}/ca.pem",
        f"ssl_options.certfile = {certificates}/server.pem",
        f"ssl_options.keyfile = {certificates}/server.key",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
        plugins=("rabbitmq_management",),
    )
    for each in (port, management_port):
        await until(lambda each=each: rabbitmq.is_listening(each))  # type: ignore[misc]
    url = through_port(broker.url, port).replace("amqp:", "amqps:")
    known = f"tls_ca={certificates}/ca.pem"
    ours = f"tls_cert={certificates}/client.pem&tls_key={certificates}/client.key"
    verified, _ = await report_of(f"{url}?{known}&{ours}")
    assert "a claim has one winner" in verified
    managed = f"management=https://127.0.0.1:{management_port}"
    assert (await report_of(f"{url}?{known}&{ours}&{managed}"))[1] == ""
    plain = f"{broker.url}?{managed}"
    assert "CERTIFICATE_VERIFY_FAILED" in (await report_of(plain))[1], "it is not the system's"
    await report_of(f"{url}?tls_verify=none&{ours}")
    with pytest.raises(StoreRefused, match="tls_ca names a file with the authorities"):
        await report_of(f"{url}?{ours}")
    with pytest.raises(StoreUnavailable):
        await report_of(f"{url}?{known}")
    with pytest.raises(StoreUnavailable):
        await report_of(broker.url.replace("amqp:", "amqps:") + f"?{known}")


# Permissions


@pytest.mark.timeout(120)
async def test_the_permissions_on_the_page_are_enough_and_reach_no_further(kind: str) -> None:
    """The commands are those of the page, which the user there runs with a secret of its own."""
    broker = rabbitmq.session_broker(kind)
    lines = re.findall(r"^rabbitmqctl (.+)$", PAGE.read_text(), re.MULTILINE)
    commands = [shlex.split(line) for line in lines if "add_user" in line or "permissions" in line]
    assert len(commands) == 2
    if "anarchon\t" not in broker.ctl("list_users"):
        for command in commands:
            await asyncio.to_thread(broker.ctl, *command)
    url = broker.url.replace("guest:guest", "anarchon:a-secret")
    verified, doubts = await report_of(url)
    assert "winners are announced" in verified
    assert doubts.count("\n") == 0
    async with cluster_on(f"{url}#") as cluster:
        node, other = await cluster.nodes_of(2)
        cluster.advance_to(SLOT)
        won = await node.win(SLOT)
        assert (await other.claim(SLOT)).outcome == "lost"
        assert (await other.renew(won, adopt=True)).outcome == "renewed"
        assert (await node.complete(won)).outcome == "recorded"
        long = await cluster.node(namespace="n" * 128)
        assert (await long.claim(SLOT)).outcome == "won"
    async with linked(url) as link:
        with pytest.raises(AccessDenied, match="ACCESS_REFUSED"):
            await Claims(link, "classic", 600_000).declare("orders", 1, link.deadline())


@pytest.mark.parametrize(("write", "read"), [("^$", ".*"), (".*", "^$")])
async def test_without_permission_to_announce_claims_are_made_all_the_same(
    write: str, read: str
) -> None:
    broker = rabbitmq.session_broker("rabbitmq")
    if "mute\t" not in broker.ctl("list_users"):
        broker.ctl("add_user", "mute", "mute")
    broker.ctl("set_permissions", "-p", rabbitmq.VHOST, "mute", ".*", write, read)
    url = broker.url.replace("guest:guest", "mute:mute")
    _, doubts = await report_of(url)
    assert "every loser asks the broker" in doubts
    async with cluster_on(rabbitmq.fresh_url("rabbitmq").replace("guest:guest", "mute:mute")) as c:
        node, other = await c.nodes_of(2)
        c.advance_to(SLOT)
        await node.win(SLOT)
        assert (await other.claim(SLOT)).outcome == "lost"


async def test_without_permission_to_declare_it_is_refused() -> None:
    broker = rabbitmq.session_broker("rabbitmq")
    if "idle\t" not in broker.ctl("list_users"):
        broker.ctl("add_user", "idle", "idle")
    broker.ctl("set_permissions", "-p", rabbitmq.VHOST, "idle", "^$", ".*", ".*")
    with pytest.raises(StoreRefused, match=r"ACCESS_REFUSED.*lists the permissions"):
        await report_of(broker.url.replace("guest:guest", "idle:idle"))
