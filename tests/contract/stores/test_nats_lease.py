"""What NATS servers can do to a sidecar that keeps its leases there (S10, S11, S19, S27, S27a)."""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.streams import SCHEMA as SCHEMA_KEY
from anarchon_backends.nats_lease import SCHEMA, NatsLeaseStore, _jobs, _reading
from anarchon_backends.nats_lease._judging import UNFINISHED_MAX
from anarchon_backends.nats_lease._state import LAYOUT, state_from
from anarchon_backends.nats_lease._subjects import Subjects
from anarchon_server.core import limits
from anarchon_server.core.errors import OutcomeUnknown, StoreError, StoreRefused, StoreUnavailable
from anarchon_server.core.model import (
    CancelReason,
    Failure,
    JobView,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import (
    CancelRun,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    ControlOutcome,
    OpenOptions,
    Store,
    TriggerRun,
)
from anarchon_server.opening import open_store
from tests.contract.harness import (
    DAY,
    JOB,
    LEASE,
    PERIOD,
    SECOND,
    T0,
    Cluster,
    FakeClock,
    Node,
    definition,
)
from tests.servers import nats
from tests.servers.proxy import Proxy

SLOT = T0 + PERIOD
FREE: dict[str, Any] = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY}
QUEUE: dict[str, Any] = {"overlap": OverlapPolicy.QUEUE}
ALLOW = OverlapPolicy.ALLOW
LONG = Failure("E", "m" * limits.MESSAGE_MAX_BYTES, "t" * limits.TRACE_MAX_BYTES)
SHORT_WINDOW = definition(window=60 * SECOND)
STREAM = "an-lease"
PAGE = Path(__file__).parents[3] / "docs/stores/nats-lease.md"


class Database:
    """Servers, as the harness's cluster uses them. Their time is moved by hand."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self, options: OpenOptions) -> Store:
        return nats.open_virtual(self.url, options)


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(Database(url))
    async with cluster.stack:
        yield cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with cluster_on(nats.fresh_url("lease")) as made:
        yield made


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
    with nats.Cluster() as made:
        yield made


def lease_url(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}strategy=lease"


def store_of(node: Node) -> NatsLeaseStore:
    assert isinstance(node.store, NatsLeaseStore)
    return node.store


def jetstream_of(node: Node) -> JetStream:
    return store_of(node)._jetstream


def subjects_of(node: Node) -> Subjects:
    return store_of(node)._subjects


def before_publish(
    node: Node, kind: str, act: Callable[[], object], *, job: str = "", after: int = 0
) -> None:
    """Does `act` when the node is about to publish to a subject of this kind (and job): once, and
    not before it has published `after` others.
    """
    jetstream, real = jetstream_of(node), jetstream_of(node).publish
    left = after

    async def publish(subject: str, *given: Any, **named: Any) -> int | None:
        nonlocal left
        if kind_of(subject) == kind and subject.endswith(job):
            left -= 1
            if left < 0:
                jetstream.publish = real  # type: ignore[method-assign]
                act()
        return await real(subject, *given, **named)

    jetstream.publish = publish  # type: ignore[method-assign]


def kind_of(subject: str) -> str:
    """What a subject of the stream is about."""
    return subject.split(".")[3]


class Crash(BaseException):
    """The process ends here."""


def crash() -> None:
    raise Crash


async def kept(node: Node, pattern: str) -> list[str]:
    """The subjects that have a message."""
    jetstream = jetstream_of(node)
    return sorted(await jetstream.subjects(STREAM, pattern, jetstream.connection.until()))


async def truth(node: Node, job: str = JOB) -> dict[str, Any]:
    """What the job's subject holds."""
    jetstream = jetstream_of(node)
    subject = subjects_of(node).job(job)
    entry = await jetstream.last(STREAM, subject, jetstream.connection.until())
    assert entry is not None
    shown: dict[str, Any] = json.loads(entry.payload)
    return shown


async def rows_of(node: Node, job: str = JOB) -> list[int]:
    """The slots of the runs that the job's subject holds."""
    return sorted(state_from(job, json.dumps(await truth(node, job)).encode()).runs)


async def payloads(node: Node, job: str = JOB) -> list[str]:
    """The subjects of the payloads that are kept."""
    return await kept(node, subjects_of(node).payloads(job))


async def until(true: Callable[[], bool]) -> None:
    """Waits for what a server or a task gives no other signal of."""
    while not true():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.005)


@asynccontextmanager
async def behind_a_proxy(
    timeout_ms: int = 300,
) -> AsyncIterator[tuple[Proxy, Cluster, Node, Node]]:
    """A node that speaks through a proxy, and one that does not; both registered, at the slot."""
    url = nats.fresh_url("lease")
    port = int(re.findall(r":(\d+)", url)[0])
    async with Proxy(port) as proxy, cluster_on(url) as cluster:
        direct = await cluster.node()
        assert isinstance(cluster.database, Database)
        cluster.database.url = url.replace(f":{port}", f":{proxy.port}")
        through = await cluster.node(op_timeout_ms=timeout_ms)
        for node in (direct, through):
            await node.register(definition(), definition("other"))
        cluster.advance_to(SLOT)
        yield proxy, cluster, through, direct


# --- Unknown outcomes: S11 -----------------------------------------------------------------------


async def test_s11_a_lost_reply_to_the_write_is_unknown_and_the_repeat_has_won() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        before_publish(through, "job", proxy.drop_replies)
        with pytest.raises(OutcomeUnknown, match="no answer in time"):
            await through.ask(claim)
        assert (await direct.claim(SLOT)).outcome == "lost", "it was done"
        proxy.resume()
        answer = await through.ask(claim)
        assert answer.outcome is ClaimOutcome.WON
        assert answer.run is not None
        assert (answer.run.run.token, answer.run.run.attempt) == (claim.token, 1)


async def test_s11_a_connection_reset_after_the_write_was_sent_is_unknown_at_once() -> None:
    async with behind_a_proxy(timeout_ms=20_000) as (proxy, _, through, _):
        claim = through.wish(SLOT)
        before_publish(through, "job", proxy.cut_after_requests)
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        assert (await through.ask(claim)).outcome is ClaimOutcome.WON


async def test_s11_what_was_only_read_is_surely_not_done() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        proxy.drop_replies()
        with pytest.raises(StoreUnavailable):
            await through.claim(SLOT)
        assert await direct.run(SLOT) is None
        proxy.resume()
        await through.win(SLOT)


async def test_s10_a_write_that_lingers_on_its_way_does_not_undo_what_came_between() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        before_publish(through, "job", proxy.hold_requests)
        with pytest.raises(OutcomeUnknown):
            await through.claim(SLOT)
        won = await direct.win(SLOT)
        proxy.resume()
        assert (await through.claim(SLOT)).outcome == "lost"
        shown = await direct.run(SLOT)
        assert shown is not None
        assert shown.run.token == won.run.token


async def test_s11_a_write_that_lingers_and_arrives_is_known_by_its_token() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        claim = through.wish(SLOT)
        before_publish(through, "job", proxy.hold_requests)
        with pytest.raises(OutcomeUnknown):
            await through.ask(claim)
        proxy.resume()
        answer = await through.ask(claim)
        assert answer.outcome is ClaimOutcome.WON
        shown = await direct.run(SLOT)
        assert shown is not None
        assert (shown.run.token, shown.run.attempt) == (claim.token, 1)


async def test_s11_a_batch_of_which_a_part_is_done_is_unknown_as_a_whole() -> None:
    """Though of the part that failed it is known that it was not done."""
    async with behind_a_proxy() as (_, _, through, direct):
        claims = [through.wish(SLOT), through.wish(SLOT, job="other")]

        def fail() -> None:
            raise StoreUnavailable("it is away")

        before_publish(through, "job", fail, job="other")
        with pytest.raises(OutcomeUnknown, match="a part of the call was done before"):
            await through.store.claim(claims)
        assert await direct.run(SLOT) is not None
        assert await direct.run(SLOT, "other") is None
        reply = await through.store.claim(claims)
        assert [each.outcome for each in reply.answers] == ["won", "won"]


async def test_s11_a_result_without_an_answer_is_unknown_and_its_repeat_is_recorded() -> None:
    async with behind_a_proxy() as (proxy, _, through, _):
        won = await through.win(SLOT)
        before_publish(through, "job", proxy.drop_replies)
        with pytest.raises(OutcomeUnknown):
            await through.complete(won)
        proxy.resume()
        assert (await through.complete(won)).outcome == "recorded"
        assert (await through.complete(won, Outcome("other"))).outcome == "already_completed"


async def test_s11_a_registration_without_an_answer_is_repeated_and_changes_nothing() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        other = definition(labels=(("v", "2"),))
        before_publish(through, "instance", proxy.drop_replies)
        with pytest.raises(OutcomeUnknown):
            await through.register(other)
        proxy.resume()
        (answer,) = await through.register(other)
        assert (answer.current, answer.since) == (True, T0)
        (answer,) = await direct.register(other)
        assert not answer.definitions_differ


@pytest.mark.parametrize("held", ["hold_requests", "hold_replies"])
async def test_every_call_is_bounded_in_time(held: str) -> None:
    async with behind_a_proxy() as (proxy, _, through, _):
        getattr(proxy, held)()
        for call in (
            through.claim(SLOT),
            through.beat(sweep=((JOB, "every:10s"),)),
            through.register(),
            through.history(),
            through.prune(),
        ):
            async with asyncio.timeout(5):
                with pytest.raises(StoreError):
                    await call
        proxy.resume()
        await through.win(SLOT)


async def test_a_call_that_was_cancelled_leaves_the_store_usable() -> None:
    async with behind_a_proxy(timeout_ms=20_000) as (proxy, _, through, direct):
        proxy.hold_replies()
        calling = asyncio.create_task(through.claim(SLOT))
        await proxy.held.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        proxy.resume()
        assert (await through.claim(SLOT)).outcome == "won"
        assert (await direct.claim(SLOT)).outcome == "lost"


# --- Two subjects: what stands in the job and what in the history ---------------------------------


async def test_s30_a_run_that_ended_goes_to_the_history_with_the_next_write(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    await first.complete(await first.win(SLOT))
    assert await rows_of(first) == [SLOT]
    assert await kept(first, subjects_of(first).ended_runs(JOB)) == []
    assert (await first.states()) == {10: RunState.SUCCESS}, "it is visible at once"
    cluster.advance(PERIOD)
    await second.win(SLOT + PERIOD)
    assert await rows_of(first) == [SLOT + PERIOD]
    assert len(await kept(first, subjects_of(first).ended_runs(JOB))) == 1
    assert (await first.states()) == {10: RunState.SUCCESS, 20: RunState.CLAIMED}


async def test_s10_a_crash_after_the_job_was_written_leaves_the_copy_to_others(
    cluster: Cluster,
) -> None:
    """The run has ended in its job and stands nowhere else; its instance is gone for good."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    before = await first.run(SLOT)
    await first.complete(await first.win(SLOT))
    await first.store.close()
    assert before is None
    assert (await second.claim(SLOT)).outcome == "lost"
    cluster.advance(PERIOD)
    await second.complete(await second.win(SLOT + PERIOD))
    cluster.advance(PERIOD)
    await second.win(SLOT + 2 * PERIOD)
    assert (await second.claim(SLOT, **FREE)).outcome == "lost"
    assert len(await second.states()) == 3


async def test_s10_a_crash_between_the_copy_and_the_write_of_the_job_changes_nothing(
    cluster: Cluster,
) -> None:
    """The run stands in both, and is shown and known once."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    await first.complete(await first.win(SLOT))
    cluster.advance(PERIOD)
    before_publish(first, "job", crash)
    with pytest.raises(Crash):
        await first.claim(SLOT + PERIOD)
    assert await rows_of(second) == [SLOT]
    assert len(await kept(second, subjects_of(second).ended_runs(JOB))) == 1
    assert await second.states() == {10: RunState.SUCCESS}
    assert (await second.claim(SLOT, **FREE)).outcome == "lost"
    await second.win(SLOT + PERIOD)
    assert await rows_of(second) == [SLOT + PERIOD]
    assert await second.states() == {10: RunState.SUCCESS, 20: RunState.CLAIMED}


async def test_s30_a_crash_in_the_midst_of_the_copies_is_mended_by_the_next_write(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(T0 + 5 * PERIOD)
    assert (await first.plan([T0 + n * PERIOD for n in range(1, 4)])).missed == 3
    before_publish(first, "run", crash, after=1)
    with pytest.raises(Crash):
        await first.claim(T0 + 5 * PERIOD)
    assert len(await kept(second, subjects_of(second).ended_runs(JOB))) in (1, 2)
    await second.win(T0 + 5 * PERIOD)
    assert len(await kept(second, subjects_of(second).ended_runs(JOB))) == 3
    assert sorted(await second.states()) == [10, 20, 30, 50]


async def test_s17_the_repeat_of_what_an_earlier_attempt_said_is_known_from_the_history(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    stopped = Outcome(stopped=CancelReason.SHUTDOWN)
    assert (await first.complete(seen, stopped)).outcome == "recorded"
    answer = await second.take_over(seen)
    assert answer.run is not None
    await second.renew(answer.run)
    assert "past" not in await truth(first), "it was copied"
    assert (await first.complete(seen, stopped)).outcome == "recorded"
    assert (await first.complete(seen)).outcome == "fenced"
    await second.complete(answer.run)
    cluster.advance(PERIOD)
    await second.win(SLOT + PERIOD)
    assert (await first.complete(seen, stopped)).outcome == "recorded"
    shown = await first.run(SLOT)
    assert shown is not None
    assert [each.attempt for each in shown.attempts] == [1, 2]


async def test_s30_a_page_of_many_jobs_lists_the_history_of_few(cluster: Cluster) -> None:
    (node,) = await cluster.nodes_of(1)
    jobs = [f"job-{n:03}" for n in range(200)]
    await node.register(*(definition(job) for job in jobs))
    for n in range(1, 4):
        cluster.advance_to(T0 + n * PERIOD)
        reply = await node.store.claim([node.wish(cluster.now, job=job, **FREE) for job in jobs])
        results = [
            Completion(each.run.run.job, each.run.run.slot, each.run.run.token, Outcome())
            for each in reply.answers
            if each.run is not None
        ]
        await node.store.complete(results)
    listings = count_listings(node)
    whole: list[tuple[int, str]] = []
    after = None
    while page := await node.history(limit=50, after=after):
        whole += [(each.run.slot, each.run.job) for each in page]
        after = whole[-1]
        if len(whole) == 250:
            assert 50 <= len(listings) <= 128, (
                "of 200; four pages of these come from the jobs themselves"
            )
    assert whole == sorted(
        ((T0 + n * PERIOD, job) for n in (1, 2, 3) for job in jobs), reverse=True
    )


def count_listings(node: Node) -> list[str]:
    """Grows by what is asked, whenever the node has a job's history listed."""
    jetstream, info, listings = jetstream_of(node), jetstream_of(node).info, list[str]()

    async def counted(stream: str, until: float, asked: Any = None) -> dict[str, Any]:
        if ".run." in str(asked):
            listings.append(str(asked))
        return await info(stream, until, asked)

    jetstream.info = counted  # type: ignore[method-assign]
    return listings


async def test_s30_a_history_is_listed_anew_only_where_its_job_was_written_since(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = await cluster.nodes_of(2)
    for each in (node, other):
        await each.register(definition("a"), definition("b"))
    slots = [T0 + n * PERIOD for n in range(1, 5)]
    for slot in slots:
        cluster.advance_to(slot)
        for job in ("a", "b"):
            await other.complete(await other.win(slot, job=job))
    listings = count_listings(node)
    everything, _ = await node.paged(limit=2)
    assert len(everything) == 2 * len(slots)
    assert len(listings) == 2, "one of each job, though there were four pages of their histories"
    for n in (5, 6):
        cluster.advance_to(T0 + n * PERIOD)
        await other.complete(await other.win(cluster.now, job="a"))
    later, _ = await node.paged(limit=2)
    assert later == [("a", 60), ("a", 50), *everything]
    assert len(listings) == 3, "that of the job which was written"
    monkeypatch.setattr(_reading, "_LISTED_MAX", 0)
    assert (await node.paged(limit=2))[0] == later


async def test_s10_a_slot_above_settled_whose_run_is_in_the_history_alone_is_never_won_again(
    cluster: Cluster,
) -> None:
    """20 is won and done before 10 has come to anything, and nothing in the job tells of it."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(T0 + 3 * PERIOD)
    done = await first.win(T0 + 2 * PERIOD, **FREE)
    await first.complete(done)
    await first.win(T0 + 3 * PERIOD, **FREE)
    state = await truth(first)
    assert state["schedules"]["every:10s"] == [T0, T0], "nothing is settled"
    assert await rows_of(first) == [T0 + 3 * PERIOD]
    answer = await second.claim(T0 + 2 * PERIOD, **FREE)
    assert answer.outcome == "lost"
    assert answer.run is not None
    assert (answer.run.run.state, answer.run.run.token) == (RunState.SUCCESS, done.run.token)
    assert (await first.complete(done)).outcome == "recorded", "the repeat of what it is"
    assert (await second.claim(SLOT, **FREE)).outcome == "won", "an older slot that has no row"
    cluster.advance(DAY)
    plan = await second.plan([SLOT, T0 + 2 * PERIOD], settled=SLOT)
    assert (plan.done, plan.missed) == (True, 0)


async def test_s10_a_deposed_leader_that_does_not_know_the_history_is_not_believed(
    cluster: Cluster,
) -> None:
    """It still answers, and what it answers is from before the run was copied."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(T0 + 3 * PERIOD)
    await first.complete(await first.win(T0 + 2 * PERIOD, **FREE))
    await first.win(T0 + 3 * PERIOD, **FREE)
    jetstream = jetstream_of(second)
    last, info = jetstream.last, jetstream.info
    asked: Counter[str] = Counter()

    async def old_last(stream: str, subject: str, until: float) -> Any:
        asked["last"] += ".run." in subject
        return (
            None if ".run." in subject and asked["last"] < 3 else await last(stream, subject, until)
        )

    async def old_info(stream: str, until: float, asked_for: Any = None) -> dict[str, Any]:
        answer = await info(stream, until, asked_for)
        if ".run." in str(asked_for):
            asked["info"] += 1
            if asked["info"] < 3:
                answer["state"] = {"last_seq": 1}
        return answer

    jetstream.last = old_last  # type: ignore[method-assign]
    jetstream.info = old_info  # type: ignore[assignment,method-assign]
    assert (await second.claim(T0 + 2 * PERIOD, **FREE)).outcome == "lost"
    assert asked["info"] >= 3


async def test_s11_a_deposed_leader_that_does_not_know_the_job_is_not_believed(
    cluster: Cluster,
) -> None:
    """A renewal right after the win would be told that its token is unknown."""
    (node,) = await cluster.nodes_of(1)
    jetstream = jetstream_of(node)
    last = jetstream.last
    subject = subjects_of(node).job(JOB)
    old = await last(STREAM, subject, jetstream.connection.until())
    cluster.advance_to(SLOT)
    won = await node.win(SLOT)
    asked = 0

    async def old_last(stream: str, wanted: str, until: float) -> Any:
        nonlocal asked
        asked += wanted == subject
        return old if wanted == subject and asked < 4 else await last(stream, wanted, until)

    jetstream.last = old_last  # type: ignore[assignment,method-assign]
    assert (await node.renew(won)).outcome == "renewed"
    assert asked == 4


async def test_s27a_a_store_that_went_back_is_believed_after_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older copy of the stream was restored: what it has is all there is."""
    node = await cluster.node(op_timeout_ms=300)
    await node.register()
    jetstream = jetstream_of(node)
    last = jetstream.last
    subject = subjects_of(node).job(JOB)
    old = await last(STREAM, subject, jetstream.connection.until())
    cluster.advance_to(SLOT)
    won = await node.win(SLOT)

    async def old_last(stream: str, wanted: str, until: float) -> Any:
        return old if wanted == subject else await last(stream, wanted, until)

    jetstream.last = old_last  # type: ignore[assignment,method-assign]
    with pytest.raises(StoreError, match="does not know"):
        await node.renew(won)
    monkeypatch.setattr(_jobs, "_DISTRUST_S", 0.0)
    assert (await node.renew(won)).outcome == "unknown_token"


# --- What operators ask: S29 ----------------------------------------------------------------------


async def test_s29_a_crash_between_the_payload_and_the_run_leaves_what_pruning_removes(
    cluster: Cluster,
) -> None:
    """The payload of the run that is made then is another, and stays as long as it is needed."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    before_publish(first, "job", crash)
    with pytest.raises(Crash):
        await first.trigger("r-1", payload=b"first")
    assert (await second.history(), len(await payloads(second))) == ([], 1)
    made = await second.triggered("r-1", payload=b"second")
    assert len(await payloads(second)) == 2, "of the same run"
    assert await second.prune() == 0
    assert len(await payloads(second)) == 1
    answer = await second.claim(made.run.slot)
    assert (answer.outcome, answer.payload) == (ClaimOutcome.WON, b"second")
    assert answer.run is not None
    await second.complete(answer.run)
    cluster.advance(PERIOD)
    await second.win(SLOT + PERIOD)
    await second.prune()
    assert await payloads(second) == [], "nobody can win the run any more"
    assert (await second.run(made.run.slot)) is not None


async def test_s29_a_crash_after_the_run_was_written_and_the_request_repeated_is_one_run(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    made = await first.triggered("r-1", payload=b"first")
    await first.store.close()
    cluster.advance(SECOND)
    again = await second.triggered("r-1", payload=b"second")
    assert again.run == made.run
    assert len(await payloads(second)) == 1, "the repeat writes none"
    assert (await second.claim(made.run.slot)).payload == b"first"


async def test_s29_a_trigger_without_an_answer_is_unknown_and_its_repeat_is_the_same_run() -> None:
    async with behind_a_proxy() as (proxy, _, through, direct):
        before_publish(through, "job", proxy.drop_replies)
        with pytest.raises(OutcomeUnknown):
            await through.trigger("r-1", payload=b"data")
        proxy.resume()
        made = await through.triggered("r-1", payload=b"data")
        assert len(await direct.history()) == 1
        assert (await direct.claim(made.run.slot)).payload == b"data"


async def test_s29_a_payload_that_is_pruned_before_its_run_is_written_is_written_anew(
    cluster: Cluster,
) -> None:
    """Whoever prunes sees a payload without a run, and writes the job before it goes."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    jetstream, real = jetstream_of(first), jetstream_of(first).publish

    async def publish(subject: str, *given: Any, **named: Any) -> int | None:
        if kind_of(subject) == "job":
            jetstream.publish = real  # type: ignore[method-assign]
            assert len(await payloads(second)) == 1
            await second.prune()
            assert await payloads(second) == []
        return await real(subject, *given, **named)

    jetstream.publish = publish  # type: ignore[method-assign]
    made = await first.triggered("r-1", payload=b"data")
    assert jetstream.publish == real
    assert (await second.claim(made.run.slot)).payload == b"data"


async def test_s29_of_one_request_at_many_instances_at_once_comes_one_run(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(8)
    cluster.advance_to(SLOT)
    made = await asyncio.gather(
        *(node.triggered("r-1", payload=str(n).encode()) for n, node in enumerate(nodes))
    )
    assert len({each.run.slot for each in made}) == 1
    others = await asyncio.gather(
        *(
            node.triggered(f"q-{n}", payload=str(n).encode(), overlap=OverlapPolicy.ALLOW)
            for n, node in enumerate(nodes)
        )
    )
    assert len({each.run.slot for each in (*made, *others)}) == 9
    for n, each in enumerate(others):
        answer = await nodes[0].claim(each.run.slot, **FREE)
        assert answer.payload == str(n).encode(), "each has its own"


async def test_s29_a_request_is_known_while_its_run_is_kept_wherever_it_stands(
    cluster: Cluster,
) -> None:
    """In the job; in both, after a crash; in the history alone. And then no more."""
    first, second = await cluster.nodes_of(2)
    await second.register(SHORT_WINDOW)
    made = await first.triggered("r.1 *", payload=b"old")
    await first.complete(await first.win(made.run.slot))
    cluster.advance_to(SLOT)
    before_publish(first, "job", crash)
    with pytest.raises(Crash):
        await first.claim(SLOT)
    assert len(await kept(second, subjects_of(second).requests(JOB, "r.1 *"))) == 1
    assert (await second.triggered("r.1 *")).run.slot == made.run.slot
    await second.complete(await second.win(SLOT))
    assert made.run.slot not in await rows_of(second)
    again = await second.triggered("r.1 *", payload=b"new")
    assert (again.run.slot, again.run.state) == (made.run.slot, RunState.SUCCESS)
    assert (await second.triggered("r-1")).run.slot != made.run.slot
    await first.beat(leaving=True)
    cluster.advance(DAY)
    await second.register(SHORT_WINDOW)
    await second.plan([SLOT + PERIOD], settled=SLOT)
    assert await second.prune(history_max=0) >= 1
    assert await kept(second, subjects_of(second).requests(JOB, "r.1 *")) == []
    renewed = await second.triggered("r.1 *", payload=b"new")
    assert renewed.run.slot >= cluster.now


async def test_s29_a_deposed_leader_that_does_not_know_request_or_payload_is_not_believed(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    made = await first.triggered("r-1")
    await first.complete(await first.win(made.run.slot))
    cluster.advance_to(SLOT)
    other = await first.triggered("r-2", payload=b"data")
    assert made.run.slot not in await rows_of(first)
    jetstream = jetstream_of(second)
    last, info = jetstream.last, jetstream.info
    asked: Counter[str] = Counter()

    async def old_last(stream: str, subject: str, until: float) -> Any:
        old = ".payload." in subject and asked["info"] < 5
        return None if old else await last(stream, subject, until)

    async def old_info(stream: str, until: float, asked_for: Any = None) -> dict[str, Any]:
        answer = await info(stream, until, asked_for)
        if ".run." in str(asked_for):
            asked["info"] += 1
            if asked["info"] in (1, 2, 4):
                answer["state"] = {"last_seq": 1}
        return answer

    jetstream.last = old_last  # type: ignore[method-assign]
    jetstream.info = old_info  # type: ignore[assignment,method-assign]
    assert (await second.triggered("r-1")).run.slot == made.run.slot
    assert asked["info"] == 3
    assert (await second.claim(other.run.slot)).payload == b"data"
    assert asked["info"] == 5


async def test_s29_a_payload_that_somebody_removed_is_not_taken_for_none(
    cluster: Cluster,
) -> None:
    """The run is not begun without it. It can be cancelled, and its job goes on."""
    (node,) = await cluster.nodes_of(1)
    made = await node.triggered("r-1", payload=b"data")
    (subject,) = await payloads(node)
    jetstream = jetstream_of(node)
    await jetstream.purge(STREAM, subject, jetstream.connection.until())
    assert (await node.claim(made.run.slot)).outcome == "unknown"
    assert (await node.cancel(made.run.slot)).outcome is ControlOutcome.DONE
    cluster.advance_to(SLOT)
    await node.win(SLOT)


@pytest.mark.timeout(120)
async def test_s29_a_hundred_of_the_largest_payloads_wait_without_filling_the_job(
    cluster: Cluster,
) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    sizes = payloads_of(node)
    for number in range(limits.TRIGGERED_WAITING_MAX):
        payload = bytes([number]) * limits.PAYLOAD_MAX_BYTES
        request_id = f"{number:{limits.NAME_MAX}}"
        await node.triggered(request_id, payload=payload, **QUEUE)
    assert (await node.trigger("more", **QUEUE)).outcome is ControlOutcome.FULL
    assert max(sizes) < 64 * 1024
    waiting = sorted(each.run.slot for each in await node.unfinished())
    for number, slot in enumerate(waiting[:3]):
        answer = await node.claim(slot, **QUEUE)
        assert answer.payload == bytes([number]) * limits.PAYLOAD_MAX_BYTES
        assert answer.run is not None
        await node.complete(answer.run)


async def test_s29_a_batch_of_acts_of_several_jobs(cluster: Cluster) -> None:
    (node,) = await cluster.nodes_of(1)
    await node.register(definition(), definition("other"))
    cluster.advance_to(SLOT)
    acts = [
        TriggerRun(job, f"r-{n}", b"p" * n, (), SLOT + SECOND, OverlapPolicy.ALLOW, DAY)
        for n in range(4)
        for job in (JOB, "other")
    ]
    reply = await node.store.control([*acts, CancelRun("other", SLOT)])
    slots = [each.run.run.slot - SLOT for each in reply.answers if each.run]
    assert slots == [0, 0, 1, 1, 2, 2, 3, 3, 0]
    assert set(reply.fences) == {JOB, "other"}
    for job in (JOB, "other"):
        assert len(await payloads(node, job)) == 3, "an empty one is none"


# --- Long failures that are to be retried: S22 ----------------------------------------------------


@pytest.mark.timeout(120)
async def test_s22_many_long_failures_wait_for_their_retries_without_filling_the_job(
    cluster: Cluster,
) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(T0 + 81 * PERIOD)
    sizes = payloads_of(node)
    wishes = [node.wish(T0 + n * PERIOD, retries=3, **FREE) for n in range(1, 81)]
    await node.store.claim(wishes)
    results = [
        Completion(JOB, wish.slot, wish.token, Outcome(failure=LONG), retry_in_ms=SECOND)
        for wish in wishes
    ]
    for _ in range(2):
        reply = await node.store.complete(results)
        assert {each.outcome for each in reply.answers} == {"recorded"}, "and so is the repeat"
    assert max(sizes) < 300_000, "together they are 1.6 MB"
    await node.win(T0 + 81 * PERIOD, **FREE)
    shown = await node.history(limit=500, traces=True)
    assert Counter(each.run.state for each in shown)[RunState.RETRYING] == 80
    assert {each.attempts[0].failure for each in shown[1:]} == {LONG}
    cluster.advance(SECOND)
    assert (await node.take_over(shown[1], **FREE)).outcome is ClaimOutcome.WON
    again = await node.run(shown[1].run.slot)
    assert again is not None
    assert [(each.attempt, each.state) for each in again.attempts] == [
        (1, RunState.FAILED),
        (2, RunState.CLAIMED),
    ]


@pytest.mark.parametrize("how", ["cancelled", "superseded"])
async def test_s21a_one_that_ends_while_it_waits_keeps_its_failure(
    cluster: Cluster, how: str
) -> None:
    """Which stands beside the job by then, and moves to the history with the run."""
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT, retries=3)
    await first.complete(seen, Outcome(failure=LONG), retry_in_ms=DAY)
    await second.triggered("r-1", **QUEUE)
    assert (await truth(second))["aside"] == [SLOT]
    assert (await last_of(second)).last_run is not None
    cluster.advance(PERIOD)
    if how == "cancelled":
        await second.cancel(SLOT)
    else:
        await second.claim(SLOT + PERIOD, overlap=OverlapPolicy.CANCEL)
    for _ in range(2):
        (shown,) = await second.history(slot=SLOT, traces=True)
        assert (shown.run.state, shown.run.reason) == (RunState.FAILED, how)
        assert shown.attempts[0].failure == LONG
        await second.triggered("r-2", **QUEUE)
    assert SLOT not in await rows_of(second)
    answer = await first.complete(seen, Outcome(failure=LONG), retry_in_ms=DAY)
    assert answer.outcome == "recorded"


async def last_of(node: Node, job: str = JOB) -> JobView:
    (view,) = (await node.store.jobs([job], "", 1)).answers
    return view


# --- Layouts --------------------------------------------------------------------------------------


async def layout_1(node: Node) -> None:
    """Writes the job as the version before would, with what it did not know left out."""
    shown = await truth(node)
    runs = {str(slots[0]): run for slots, run in shown["runs"]}
    del shown["layout"]
    await put(node, subjects_of(node).job(JOB), json.dumps(shown | {"runs": runs}).encode())


async def test_a_job_of_layout_1_is_read_and_brought_forward_by_its_next_write(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance_to(SLOT)
    won = await first.win(SLOT)
    await layout_1(first)
    assert "layout" not in await truth(first)
    assert [each.run.token for each in await second.unfinished()] == [won.run.token]
    assert (await second.claim(SLOT)).outcome == "lost"
    assert "layout" not in await truth(first), "nothing was written"
    assert (await first.renew(won)).outcome == "renewed"
    assert (await truth(first))["layout"] == LAYOUT
    await layout_1(first)
    await second.pause("why")
    assert (await first.complete(won)).outcome == "recorded"
    view = await last_of(first)
    assert (view.pause_reason, view.last_run and view.last_run.run.state) == ("why", "success")


async def test_a_job_of_a_later_layout_is_refused_and_left_as_it_is(cluster: Cluster) -> None:
    (node,) = await cluster.nodes_of(1)
    await node.register(definition(), definition("other"))
    later = await truth(node) | {"layout": LAYOUT + 1, "more": {}}
    await put(node, subjects_of(node).job(JOB), json.dumps(later).encode())
    cluster.advance_to(SLOT)
    reply = await node.store.claim([node.wish(SLOT), node.wish(SLOT, job="other")])
    assert [each.outcome for each in reply.answers] == ["unknown", "won"]
    for call in (node.history(job=JOB), node.pause(), node.trigger(), node.cancel(SLOT)):
        with pytest.raises(StoreUnavailable, match="has the layout 3, and this version"):
            await call
    assert await truth(node) == later


# --- Everything at once ---------------------------------------------------------------------------


class Trouble:
    """A network that loses what a node writes, before or after it has arrived, and its answers to
    what it reads.
    """

    def __init__(self, node: Node, chance: random.Random) -> None:
        self._jetstream = jetstream_of(node)
        self._chance = chance
        self._publish, self._last = self._jetstream.publish, self._jetstream.last
        self._jetstream.publish = self.publish  # type: ignore[method-assign]
        self._jetstream.last = self.last  # type: ignore[method-assign]

    async def publish(self, *given: Any, **named: Any) -> int | None:
        fate = self._chance.random()
        if fate < 0.04:
            raise StoreUnavailable("it never left")
        answer = await self._publish(*given, **named)
        if fate < 0.1:
            raise OutcomeUnknown("its answer was lost")
        if fate < 0.13:
            return None if answer is None else await self._publish(*given, **named)  # seen twice
        return answer

    async def last(self, *given: Any, **named: Any) -> Any:
        if self._chance.random() < 0.03:
            raise StoreUnavailable("no answer")
        return await self._last(*given, **named)

    def end(self) -> None:
        self._jetstream.publish, self._jetstream.last = self._publish, self._last  # type: ignore[method-assign]


class Melee:
    """Instances that claim, end, hand over, take over and prune, each call until it is sure."""

    slots = tuple(T0 + n * PERIOD for n in range(1, 41))

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.won: dict[tuple[int, int], set[str]] = {}  # by slot and attempt
        self.ended: dict[int, str] = {}  # by which token
        self.made: dict[int, set[int]] = {}  # the slots of what was triggered, by request

    async def work(self, node: Node) -> None:
        for slot in self.chance.sample(self.slots, len(self.slots)):
            answer = await surely(node.ask, self.wish(node, slot))
            while (run := answer.run) is not None and not run.run.state.final:
                if answer.outcome is ClaimOutcome.WON:
                    self.won.setdefault((slot, run.run.attempt), set()).add(run.run.token)
                    await self.end_or_free(node, run)
                seen = await surely(node.look, slot)
                if seen is None or not seen.takeable:
                    break
                before = {"seen_attempt": seen.run.attempt, "seen_token": seen.run.token}
                answer = await surely(node.ask, self.wish(node, slot, **before))
            if self.chance.random() < 0.1:
                await surely(node.prune, DAY, 30)
            if self.chance.random() < 0.3:
                await self.operate(node, self.chance.randrange(12))

    async def operate(self, node: Node, number: int) -> None:
        """Triggers a run, perhaps not for the first time, and claims it."""
        payload = str(number).encode() * 100
        answer = await surely(
            partial(node.trigger, f"r-{number}", payload=payload, overlap=OverlapPolicy.ALLOW)
        )
        assert answer.outcome is ControlOutcome.DONE
        slot = answer.run.run.slot
        self.made.setdefault(number, set()).add(slot)
        if answer.run.run.waits:
            claimed = await surely(node.ask, self.wish(node, slot))
            if claimed.outcome is ClaimOutcome.WON:
                assert claimed.payload == payload
                self.won.setdefault((slot, claimed.run.run.attempt), set()).add(
                    claimed.run.run.token
                )
                await self.end_or_free(node, claimed.run)

    def wish(self, node: Node, slot: int, **given: Any) -> Claim:
        return node.wish(slot, max_attempts=100, **FREE, **given)

    async def end_or_free(self, node: Node, seen: RunView) -> None:
        if self.chance.random() < 0.3:
            answer = await surely(node.release, seen)
            assert answer.outcome in ("released", "fenced"), "others may have taken over by then"
        else:
            answer = await surely(node.complete, seen, Outcome(seen.run.token))
            assert answer.outcome == "recorded"
            self.ended[seen.run.slot] = seen.run.token

    def check(self, rows: Iterable[RunView], floor: int) -> None:
        """I1 to I3, and that nothing which was won is missing (S2: but what was pruned)."""
        shown = {each.run.slot: each for each in rows}
        assert {len(tokens) for tokens in self.won.values()} == {1}, "an attempt has one winner"
        assert {len(slots) for slots in self.made.values()} == {1}, "a request makes one run"
        for slot, seen in shown.items():
            assert [each.attempt for each in seen.attempts] == list(range(1, seen.run.attempt + 1))
            for each in seen.attempts:
                assert self.won.get((slot, each.attempt), {each.token}) == {each.token}
            if slot in self.ended:
                assert (seen.run.state, seen.run.token) == (RunState.SUCCESS, self.ended[slot])
        fences = [each.fence for seen in shown.values() for each in seen.attempts]
        assert len(set(fences)) == len(fences)
        pruned = {slot for slot in self.slots if slot <= floor}
        assert {slot for slot, _ in self.won} <= shown.keys() | pruned
        assert len(self.won) > len(self.slots) / 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(4))
async def test_i1_to_i3_hold_whatever_gets_lost_while_all_is_done_at_once(seed: int) -> None:
    chance = random.Random(seed)
    melee = Melee(chance)
    async with cluster_on(nats.fresh_url("lease")) as cluster:
        nodes = [await cluster.node() for _ in range(5)]
        for node in nodes:
            await node.register(SHORT_WINDOW)
        cluster.advance_to(melee.slots[-1])
        troubles = [Trouble(node, chance) for node in nodes]
        await asyncio.gather(*(melee.work(node) for node in nodes))
        for trouble in troubles:
            trouble.end()
        rows = await nodes[0].history(job=JOB, limit=500)
        melee.check(rows, (await truth(nodes[0]))["record"].get("floor", -1))


async def surely(call: Callable[..., Awaitable[Any]], *given: Any) -> Any:
    """The call's answer, asked for as often as it takes."""
    while True:
        try:
            answer = await call(*given)
        except StoreError:
            await asyncio.sleep(0)
            continue
        if not isinstance(answer, ClaimAnswer) or answer.outcome is not ClaimOutcome.UNKNOWN:
            return answer


# --- The size of messages ------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_s30_a_batch_of_large_results_of_one_job_goes_in_several_writes(
    cluster: Cluster,
) -> None:
    """None of which comes near to what a message may have."""
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(T0 + (UNFINISHED_MAX + 1) * PERIOD)
    wishes = [node.wish(T0 + n * PERIOD, **FREE) for n in range(1, UNFINISHED_MAX + 2)]
    outcomes = [each.outcome for each in (await node.store.claim(wishes)).answers]
    assert outcomes == ["won"] * UNFINISHED_MAX + ["unknown"], "no more at once"
    sizes = payloads_of(node)
    results = [Completion(JOB, w.slot, w.token, Outcome("r" * 16_384)) for w in wishes[:-1]]
    reply = await node.store.complete(results)
    assert {each.outcome for each in reply.answers} == {"recorded"}
    assert len(sizes) > 10
    assert max(sizes) < 400_000
    assert Counter((await node.states()).values()) == {RunState.SUCCESS: UNFINISHED_MAX}
    assert (await node.ask(wishes[-1])).outcome == "won", "there is room again"


async def test_s30_the_longest_failure_is_kept(cluster: Cluster) -> None:
    (node,) = await cluster.nodes_of(1)
    cluster.advance_to(SLOT)
    failure = Failure("E" * 256, "\x00\ud800" * 1_365, "\x01" * 16_384)
    await node.complete(await node.win(SLOT), Outcome(failure=failure))
    cluster.advance(PERIOD)
    await node.win(SLOT + PERIOD)
    (_, shown) = await node.history(traces=True)
    assert shown.attempts[0].failure == failure


def payloads_of(node: Node) -> list[int]:
    """The sizes of what the node publishes to jobs, from now on."""
    jetstream, real = jetstream_of(node), jetstream_of(node).publish
    sizes: list[int] = []

    async def publish(subject: str, payload: bytes, **named: Any) -> int | None:
        if kind_of(subject) == "job":
            sizes.append(len(payload))
        return await real(subject, payload, **named)

    jetstream.publish = publish  # type: ignore[method-assign]
    return sizes


async def test_a_server_whose_messages_are_too_small_is_refused(
    start: Callable[..., nats.Server],
) -> None:
    server = start("max_payload: 512KB")
    store = open_store(lease_url(server.url), OpenOptions("default", FakeClock()))
    with pytest.raises(StoreRefused, match="max_payload is 524288 bytes: a job may need"):
        await store.open()


# --- Opening -------------------------------------------------------------------------------------


async def test_twenty_instances_that_open_a_new_store_at_once_make_one() -> None:
    url = f"{lease_url(nats.session_url())}&prefix=t{secrets.token_hex(6)}"
    stores = [open_store(url, OpenOptions("default", FakeClock())) for _ in range(20)]
    reports = await asyncio.gather(*(store.open() for store in stores))
    assert all("is kept in files" in " ".join(report.verified) for report in reports)
    replies = await asyncio.gather(*(store.claim([]) for store in stores))
    assert len({reply.store_id for reply in replies}) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_an_unknown_layout_is_refused() -> None:
    prefix = f"t{secrets.token_hex(6)}"
    url = f"{lease_url(nats.session_url())}&prefix={prefix}"
    store = open_store(url, OpenOptions("default", FakeClock()))
    await store.open()
    assert isinstance(store, NatsLeaseStore)
    jetstream, name = store._jetstream, f"{prefix}-lease"
    until = jetstream.connection.until()
    config = (await jetstream.info(name, until))["config"]
    assert config["metadata"][SCHEMA_KEY] == SCHEMA
    config["metadata"] = {**config["metadata"], SCHEMA_KEY: "99"}
    await jetstream.api(f"STREAM.UPDATE.{name}", until, config, writes=True)
    await store.close()
    with pytest.raises(StoreRefused, match=r"schema '99'.*knows 1: use the version"):
        await open_store(url, OpenOptions("default", FakeClock())).open()


async def test_a_stream_made_anew_is_another_store(cluster: Cluster) -> None:
    """S27a."""
    prefix = f"t{secrets.token_hex(6)}"
    url = f"{lease_url(nats.session_url())}&prefix={prefix}"
    seen = set()
    for _ in range(2):
        store = open_store(url, OpenOptions("default", FakeClock()))
        await store.open()
        assert isinstance(store, NatsLeaseStore)
        seen.add((await store.claim([])).store_id)
        until = store._jetstream.connection.until()
        await store._jetstream.api(f"STREAM.DELETE.{prefix}-lease", until, writes=True)
        await store.close()
    assert len(seen) == 2


async def test_s01_the_stores_time_decides() -> None:
    """The machine's wall clock is not asked: here it is years off."""
    clock = FakeClock(wall=1)
    store = open_store(lease_url(nats.session_url()), OpenOptions("time", clock))
    await store.open()
    node = Node(Cluster(None, clock), store, "host:1", f"inc-{secrets.token_hex(4)}")  # type: ignore[arg-type]
    await node.register(definition("timely"))
    now = (await store.claim([])).store_at
    assert abs(now - time.time() * 1_000) < 10 * SECOND
    given = FREE | {"job": "timely", "previous_slot": None}
    for slot, outcome in ((now + 5_000, "early"), (now - DAY - 1, "late"), (now + 500, "won")):
        assert (await node.claim(slot, **given)).outcome == outcome
    await node.beat(leaving=True)
    await store.close()


async def test_a_full_account_refuses_writes_and_loses_none(
    start: Callable[..., nats.Server],
) -> None:
    server = start(
        "accounts { A { jetstream: { max_file: 300KB }, users: [ { user: u, password: p } ] } }",
        userinfo="u:p@",
    )
    async with cluster_on(lease_url(server.url)) as cluster:
        (node,) = await cluster.nodes_of(1)
        cluster.advance_to(T0 + 1_000 * PERIOD)
        done: list[int] = []
        with pytest.raises(StoreUnavailable, match=r"exceeded|insufficient"):
            await run_on(node, done)
        begun = done[-1] + PERIOD
        shown = {each.run.slot for each in await node.history(limit=1_000)}
        assert set(done) <= shown <= {*done, begun}, "each acknowledged run is there"
        assert (await node.claim(done[0], **FREE)).outcome == "lost"


async def run_on(node: Node, done: list[int]) -> None:
    """One run after the other, until one cannot be written."""
    for n in range(1, 1_000):
        await node.complete(await node.win(T0 + n * PERIOD, **FREE))
        done.append(T0 + n * PERIOD)


# --- Least privileges ------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_the_least_privileges_in_the_docs_are_enough_and_each_is_needed(
    start: Callable[..., nats.Server],
) -> None:
    (config,) = re.findall(
        r"```\n(# permissions of a sidecar with leases\n.*?)```", PAGE.read_text(), re.DOTALL
    )
    given = {"userinfo": "anarchon:change-me@"}
    await everything(lease_url(start(config, **given).url) + "&inbox=_INBOX_anarchon")
    allowed = re.findall(r'"(\S+)"', config)
    assert len(allowed) == 10
    for place, subject in enumerate(allowed):
        without = re.sub(rf'\n\s*"{re.escape(subject)}",?', "", config, count=1)
        if place == len(allowed) - 1:  # it stands in both lists
            without = re.sub(rf'(.*)\n\s*"{re.escape(subject)}",?', r"\1", config, flags=re.DOTALL)
        assert without.count('"') == config.count('"') - 2
        server = start(without, **given)
        with pytest.raises((StoreError, TimeoutError)):
            await everything(lease_url(server.url) + "&inbox=_INBOX_anarchon")
        server.stop()


async def everything(url: str) -> None:
    """Whatever a sidecar may ask of its store."""
    async with cluster_on(url) as cluster:
        (node,) = await cluster.nodes_of(1)
        await node.register(SHORT_WINDOW)
        watch = node.store.watch()
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        cluster.advance_to(SLOT)
        seen = await node.win(SLOT)
        await node.renew(seen, started_at=cluster.now)
        await node.release(seen)
        async with asyncio.timeout(1):
            await waiting
        answer = await node.take_over(seen)
        assert answer.run is not None
        await node.complete(answer.run)
        cluster.advance(PERIOD)
        await node.complete(await node.win(SLOT + PERIOD))
        assert (await node.claim(SLOT)).outcome == "lost"
        assert len(await node.history()) == 2
        await node.pause()
        made = await node.triggered("r-1", payload=b"data")
        assert (await node.claim(made.run.slot)).payload == b"data"
        await node.cancel(made.run.slot)
        await node.release(await node.seen(made.run.slot))
        cluster.advance(SECOND)
        assert (await node.resume()).outcome is ControlOutcome.DONE
        assert len((await node.store.jobs((), "", 10)).answers) == 1
        assert len((await node.store.instances()).answers) == 1
        cluster.advance(DAY)
        await node.register(definition(window=60 * SECOND, labels=(("v", "2"),)))
        assert await node.prune(history_max=0) == 3
        await node.beat(leaving=True)
        cluster.advance(2 * DAY)
        await node.prune(history_ms=DAY)
        assert (await node.store.jobs((), "", 10)).answers == ()


# --- What somebody spoilt ------------------------------------------------------------------------


async def put(node: Node, subject: str, payload: bytes) -> None:
    jetstream = jetstream_of(node)
    until = jetstream.connection.until()
    await jetstream.publish(subject, payload, stream=STREAM, expected=None, until=until)


async def test_a_job_that_somebody_spoilt_spoils_no_other(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    for node in (first, second):
        await node.register(definition(), definition("other"))
    cluster.advance_to(SLOT)
    spoilt, good = await first.win(SLOT), await first.win(SLOT, job="other")
    await put(first, subjects_of(first).job(JOB), b'{"runs":[]}')
    beat = await first.beat(
        renewals=(first.renewal(spoilt), first.renewal(good)),
        looks=((JOB, SLOT), ("other", SLOT)),
        sweep=((JOB, "every:10s"), ("other", "every:10s")),
    )
    assert [each.outcome for each in beat.renewals] == ["unknown_token", "renewed"]
    assert [bool(each) for each in beat.looks] == [False, True]
    assert [each.run.job for each in beat.unfinished] == ["other"]
    wishes = [second.wish(SLOT, job=job) for job in (JOB, "other")]
    reply = await second.store.claim(wishes)
    assert [each.outcome for each in reply.answers] == ["unknown", "lost"]
    assert (await first.complete(good)).outcome == "recorded"
    assert (await first.complete(spoilt)).outcome == "unknown_token"
    assert not (await first.plan([SLOT])).done
    with pytest.raises(StoreUnavailable, match="'job' in the store is not as Anarchon writes it"):
        await first.history(job=JOB)
    cluster.advance(2 * DAY)
    await first.beat(leaving=True)
    await second.beat()
    assert await second.prune(history_ms=DAY) == 1, "the run of the other"


async def test_an_instance_that_somebody_spoilt_does_not_count_and_goes(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    subject = subjects_of(first).instance("host:2", second.instance.incarnation)
    await put(first, subject, b"[]")
    (answer,) = await first.register(definition(labels=(("v", "2"),)))
    assert not answer.definitions_differ
    with pytest.raises(StoreUnavailable, match="the instance 'host:2' in the store is not as"):
        await first.store.instances()
    assert not (await second.beat()).known, "it says anew that it lives, and is to register"
    await put(first, subject, b"[]")
    assert await first.prune() == 0
    assert [each.instance_id for each in (await first.store.instances()).answers] == ["host:1"]


# --- Instances and what they hold -----------------------------------------------------------------


async def test_s28_what_an_instance_held_goes_when_the_jobs_know_it(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    holds = f"{subjects_of(first)._of('holds')}.>"
    assert len(await kept(first, holds)) == 2
    await first.register(definition("more"))
    assert len(await kept(first, holds)) == 2, "of the generation before nothing was let go"
    await first.let_go("more")
    assert len(await kept(first, holds)) == 3
    await first.let_go("more")
    assert len(await kept(first, holds)) == 3, "the same again is no generation of its own"
    await second.prune()
    assert len(await kept(first, holds)) == 2


async def test_s28_a_generation_that_was_outgrown_and_left_behind_goes_without_a_job_being_read(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    holds = f"{subjects_of(first)._of('holds')}.>"
    members = store_of(first)._members

    async def crashes(*_: object) -> None:
        crash()

    remove, members.delete_holds = members.delete_holds, crashes  # type: ignore[assignment, method-assign]
    with pytest.raises(Crash):
        await first.register(definition("more"))
    members.delete_holds = remove  # type: ignore[method-assign]
    await first.register(definition("more"))
    assert len(await kept(first, holds)) == 3
    before = await truth(first)
    cluster.advance(DAY)
    await second.beat()
    await second.prune()
    assert len(await kept(first, holds)) == 2
    assert await truth(first) == before, "its jobs are held on"
    (view,) = (await second.store.jobs(["more"], "", 9)).answers
    assert view.instance_ids == ()


async def test_s28_a_generation_held_by_one_that_left_goes(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    holds = f"{subjects_of(first)._of('holds')}.>"
    await second.beat(leaving=True)
    assert [each.instance_id for each in (await first.store.instances()).answers] == ["host:1"]
    await first.prune()
    assert len(await kept(first, holds)) == 1
    assert len(await kept(first, subjects_of(first).instances())) == 1


async def test_s28_a_crash_while_what_was_held_is_noted_is_mended(cluster: Cluster) -> None:
    first, second = await cluster.nodes_of(2)
    cluster.advance(DAY)
    await second.beat(leaving=True)
    before_publish(first, "job", crash)
    with pytest.raises(Crash):
        await first.prune()
    cluster.advance(SECOND)
    await first.prune()
    kept_definitions = (await truth(first))["definitions"]
    assert [each[2] for each in kept_definitions.values()] == [T0 + DAY]


@pytest.mark.parametrize("leaves", [True, False])
async def test_s28_an_instance_that_comes_back_while_it_is_pruned_stays(
    cluster: Cluster, leaves: bool
) -> None:
    first, second = await cluster.nodes_of(2)
    if leaves:
        await second.beat(leaving=True)
    cluster.advance(DAY + LEASE + 1)

    async def back() -> None:
        await second.register()

    jetstream = jetstream_of(first)
    api = jetstream.api

    async def while_deleting(call: str, *given: Any, **named: Any) -> dict[str, Any]:
        if "MSG.DELETE" in call:
            jetstream.api = api  # type: ignore[method-assign]
            await back()
        return await api(call, *given, **named)

    jetstream.api = while_deleting  # type: ignore[method-assign]
    await first.prune()
    assert jetstream.api == api
    assert (await second.beat()).known
    (view,) = (await second.store.jobs([JOB], "", 1)).answers
    assert view.instance_ids == ("host:2",), "the first has not been heard of"


async def test_s28_a_definition_registered_anew_while_it_is_pruned_keeps_its_spec(
    cluster: Cluster,
) -> None:
    """Its spec is removed by revision: the one that was written meanwhile stays."""
    first, second = await cluster.nodes_of(2)
    await second.register(definition("stays"))
    await second.let_go(JOB)
    old = definition(labels=(("v", "old"),))
    await first.register(old)
    await first.register(definition())
    cluster.advance(2 * DAY)
    await first.beat()
    await second.beat()
    jetstream = jetstream_of(second)
    api = jetstream.api

    async def while_deleting(call: str, *given: Any, **named: Any) -> dict[str, Any]:
        if "MSG.DELETE" in call:
            jetstream.api = api  # type: ignore[method-assign]
            await first.register(old)
        return await api(call, *given, **named)

    jetstream.api = while_deleting  # type: ignore[method-assign]
    await second.prune(history_ms=DAY)
    assert jetstream.api == api, "the definition was dropped"
    (view,) = (await second.store.jobs([JOB], "", 1)).answers
    assert view.spec == old.spec


async def test_s28_a_definition_held_anew_while_it_is_about_to_be_dropped_stays(
    cluster: Cluster,
) -> None:
    """Whoever prunes has read who holds what before, and reads the job after it was registered."""
    first, second = await cluster.nodes_of(2)
    await second.register(definition("stays"))
    await second.let_go(JOB)
    old = definition(labels=(("v", "old"),))
    await first.register(old)
    await first.register(definition())
    cluster.advance(2 * DAY)
    await first.beat()
    members = store_of(second)._members
    roll = members.roll

    async def roll_and_then(call: Any) -> Any:
        seen = await roll(call)
        await first.register(old)
        return seen

    members.roll = roll_and_then  # type: ignore[method-assign]
    await second.prune(history_ms=DAY)
    assert old.definition_id in (await truth(second))["definitions"]


async def test_s28_a_job_that_is_forgotten_leaves_its_floor_and_fence_alone(
    cluster: Cluster,
) -> None:
    first, second = await cluster.nodes_of(2)
    await second.register(definition("stays"))
    await second.let_go(JOB)
    cluster.advance_to(SLOT)
    await first.complete(await first.win(SLOT))
    await first.beat(leaving=True)
    cluster.advance(30 * DAY)
    await second.beat()
    assert await second.prune() == 1
    state = await truth(second)
    assert set(state) == {"layout", "record", "moved", "runs"}
    assert state["runs"] == []
    assert set(state["record"]) == {"floor", "fence"}
    assert await kept(second, f"{subjects_of(second)._of('definition')}.{JOB}.*") == []
    assert await kept(second, subjects_of(second).ended_runs(JOB)) == []


# --- The death of servers: S10, S27 --------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_s10_kill_9_under_load_loses_no_run_and_gives_none_twice(
    start: Callable[..., nats.Server],
) -> None:
    """The instances are back by themselves."""
    server = start()

    def kill() -> None:
        server.kill()
        server.start()

    async with cluster_on(lease_url(server.url)) as cluster:
        await compete(cluster, kill, slots=200)


@pytest.mark.timeout(180)
async def test_s10_the_leaders_death_under_load_loses_no_run_and_gives_none_twice(
    three: nats.Cluster,
) -> None:
    def kill() -> None:
        """The stream's leader; and it comes back, as a follower."""
        leader = three.leader_of(STREAM)
        leader.kill()
        assert three.leader_of(STREAM) is not leader
        leader.start()
        three.wait()

    async with cluster_on(lease_url(three.url)) as cluster:
        await compete(cluster, kill, slots=120)


async def compete(cluster: Cluster, kill: Callable[[], None], slots: int) -> None:
    """Six instances claim all slots and end what they won, and each asks for the same runs of another
    job, while servers die twice.
    """
    places = range(T0 + PERIOD, T0 + (slots + 1) * PERIOD, PERIOD)
    won: list[tuple[int, str]] = []
    failures: Counter[str] = Counter()
    nodes = [await cluster.node(op_timeout_ms=1_000) for _ in range(6)]
    for node in nodes:
        await node.register(definition(), definition("other"))
    cluster.advance_to(places[-1])
    made: dict[str, set[int]] = {f"r-{n}": set() for n in range(slots // 10)}

    async def ask(node: Node, request_id: str) -> None:
        payload = request_id.encode() * 100
        asked = partial(node.trigger, request_id, payload=payload, job="other", overlap=ALLOW)
        answer = await surely(asked)
        made[request_id].add(answer.run.run.slot)

    async def surely(call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except StoreError as error:
                failures[type(error).__name__] += 1
                await asyncio.sleep(0.02)  # the loop's back-off

    async def work(node: Node) -> None:
        for slot in places:
            claim: Claim = node.wish(slot, **FREE)
            answer = await surely(lambda claim=claim: node.ask(claim))  # type: ignore[misc]
            if answer.outcome is not ClaimOutcome.WON:
                assert answer.outcome is ClaimOutcome.LOST
                continue
            won.append((slot, claim.token))
            told = await surely(lambda answer=answer: node.complete(answer.run))  # type: ignore[misc]
            assert told.outcome == "recorded"
            await ask(node, f"r-{len(won) % len(made)}")

    working = [asyncio.create_task(work(node)) for node in nodes]
    for share in (0.3, 0.7):
        await until(lambda share=share: len(won) >= share * len(places))  # type: ignore[misc]
        await asyncio.to_thread(kill)
    await asyncio.gather(*working)
    assert failures, "they have noticed"
    for request_id, where in made.items():
        if where:
            (slot,) = where
            answer = await nodes[0].claim(slot, job="other", **FREE)
            assert answer.payload == request_id.encode() * 100
    assert sum(map(bool, made.values())) == len(await nodes[0].history(job="other", limit=500))
    assert sorted(slot for slot, _ in won) == list(places), "each slot has one winner"
    shown = {each.run.slot: each for each in await nodes[0].history(job=JOB, limit=1_000)}
    assert {slot: each.run.token for slot, each in shown.items()} == dict(won)
    assert {each.run.state for each in shown.values()} == {RunState.SUCCESS}
    assert {each.run.attempt for each in shown.values()} == {1}
    assert len({each.attempts[0].fence for each in shown.values()}) == slots


@pytest.mark.timeout(180)
async def test_s27_without_a_quorum_nothing_is_won_and_with_it_the_same_token_wins(
    three: nats.Cluster,
) -> None:
    async with cluster_on(lease_url(three.url)) as cluster:
        node = await cluster.node(op_timeout_ms=500)
        await node.register()
        cluster.advance_to(SLOT)
        held = await node.win(SLOT, **FREE)
        others = [each for each in three.nodes if each is not three.leader_of(STREAM)]
        for each in others:
            each.kill()
        cluster.advance(PERIOD)
        claim = node.wish(SLOT + PERIOD, **FREE)
        for _ in range(3):
            with pytest.raises(StoreError):
                assert await node.ask(claim) is None
        with pytest.raises(StoreError):
            assert await node.complete(held) is None
        for each in others:
            each.start(wait=False)
        while True:
            try:
                answer = await node.ask(claim)
                told = await node.complete(held)
            except StoreError:
                await asyncio.sleep(0.05)
                continue
            break
        assert (answer.outcome, told.outcome) == ("won", "recorded")
        assert await node.states() == {10: RunState.SUCCESS, 20: RunState.CLAIMED}


@pytest.mark.timeout(120)
async def test_s19_takeovers_race_on_replicas_and_have_one_winner(three: nats.Cluster) -> None:
    async with cluster_on(lease_url(three.url)) as cluster:
        nodes = await cluster.nodes_of(8)
        for n in range(1, 20):
            cluster.advance_to(T0 + n * 10 * PERIOD)
            seen = await nodes[n % 8].win(cluster.now)
            cluster.advance(LEASE)
            answers = await asyncio.gather(*(node.take_over(seen) for node in nodes))
            assert Counter(a.outcome for a in answers) == {"won": 1, "lost": 7}
            (winner,) = [a.run for a in answers if a.outcome is ClaimOutcome.WON]
            assert winner is not None
            await nodes[0].complete(winner)


# --- News: S19 -----------------------------------------------------------------------------------


async def test_s19_after_a_reconnect_the_watch_wakes_since_news_may_have_been_missed() -> None:
    async with behind_a_proxy(timeout_ms=2_000) as (proxy, _, through, direct):
        watch = through.store.watch()
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        proxy.refuse()
        proxy.cut()
        link = store_of(through)._connection._link
        await until(lambda: link is None or not link.usable)
        await direct.release(await direct.win(SLOT), Reason.RUNNER_LOST)
        proxy.resume()
        assert not waiting.done()
        await through.beat()
        async with asyncio.timeout(5):
            await waiting
        await watch.aclose()  # type: ignore[attr-defined]
