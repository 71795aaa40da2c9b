"""The loop carries out what an engine decides. The engine here is a script; the store is a real
one, or a script where it has to fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from anarchon_server import failpoints
from anarchon_server.clock import PAUSE_MS, PULSE_MS
from anarchon_server.core import limits, messages
from anarchon_server.core.engine import Status
from anarchon_server.core.errors import (
    InvalidError,
    NotFoundError,
    OutcomeUnknown,
    RefusedError,
    StoreUnavailable,
)
from anarchon_server.core.messages import Command, Input, Method
from anarchon_server.core.model import Client, Instance, JobSpec, Outcome
from anarchon_server.core.policy import Job
from anarchon_server.core.store import OpenOptions, Reply, Store
from anarchon_server.loop import Loop
from anarchon_server.opening import open_store
from anarchon_server.testing import VirtualClock

WALL_AT = 1_791_633_610_000
SESSION = "6f1e7f0e-2f0f-4f55-9d55-111111111111"
INSTANCE = Instance("local:1", "aa")


class Script:
    """An engine that answers each kind of input with what a test says, and keeps what it was fed."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.answers: dict[type, Callable[[Any], list[Command]]] = {}
        self.wake_at: int | None = None
        self.ready = True

    def on(self, kind: type, answer: Callable[[Any], list[Command]]) -> None:
        self.answers[kind] = answer

    def step(self, now: int, event: Input) -> list[Command]:
        self.inputs.append(event)
        if self.wake_at is not None and self.wake_at <= now:
            self.wake_at = None
        return self.answers.get(type(event), lambda _: [])(event)

    def status(self, now: int) -> Status:
        return Status(self.ready, True, () if self.ready else ("because",), INSTANCE, ())

    def check_spec(self, spec: JobSpec, wall_at: int) -> None:
        if wall_at != WALL_AT:
            raise InvalidError("wall_at", wall_at, "the host's clock")

    def resolve_stored(self, spec: JobSpec, wall_at: int) -> Job:
        raise NotImplementedError

    def got(self, kind: type) -> list[Any]:
        return [event for event in self.inputs if isinstance(event, kind)]


class BrokenStore:
    """A store whose every call does what a test says."""

    def __init__(self) -> None:
        self.outcome: BaseException | None = None
        self.hangs = False
        self.wakes: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def prune(self, _: object) -> Reply[int]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.outcome is not None:
            raise self.outcome
        return Reply(WALL_AT, (7,))

    async def watch(self) -> AsyncIterator[None]:
        while True:
            error = await self.wakes.get()
            if error is not None:
                raise error
            yield


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(WALL_AT)


@pytest.fixture
def engine() -> Script:
    return Script()


@pytest.fixture
def store() -> BrokenStore:
    return BrokenStore()


@pytest.fixture
async def loop(engine: Script, store: BrokenStore, clock: VirtualClock) -> AsyncIterator[Loop]:
    made = Loop(engine, cast("Store", store), clock, op_timeout_ms=50)
    made.start()
    engine.inputs.clear()
    yield made
    await made.close()


def prune(call_id: int = 1, timeout_ms: int = 10_000) -> list[Command]:
    return [messages.CallStore(call_id, Method.PRUNE, (None,), timeout_ms)]


def subscribed(loop: Loop, client: Client | None = None) -> Any:
    return loop.subscribe(SESSION, client or Client(), (), 1, ())


async def call_fails(loop: Loop, engine: Script, timeout_ms: int = 10_000) -> messages.StoreFailed:
    engine.on(messages.Woken, lambda _: prune(timeout_ms=timeout_ms))
    loop.feed(messages.Woken())
    await loop.settled()
    (failed,) = engine.got(messages.StoreFailed)
    assert isinstance(failed, messages.StoreFailed)
    return failed


# ── The store ───────────────────────────────────────────────────────────────────────────────────


async def test_a_call_to_the_store_brings_its_reply_and_the_hosts_time(
    loop: Loop, engine: Script
) -> None:
    engine.on(messages.Woken, lambda _: prune())
    loop.feed(messages.Woken())
    await loop.settled()
    assert engine.got(messages.StoreReplied) == [
        messages.StoreReplied(1, Reply(WALL_AT, (7,)), WALL_AT)
    ]


@pytest.mark.parametrize(
    ("error", "unknown"),
    [
        (StoreUnavailable("not connected"), False),
        (OutcomeUnknown("reset"), True),
        (RuntimeError("a driver's bug"), True),
    ],
)
async def test_s11_a_failed_call_says_whether_it_may_have_been_done(
    loop: Loop, engine: Script, store: BrokenStore, error: Exception, *, unknown: bool
) -> None:
    store.outcome = error
    failed = await call_fails(loop, engine)
    assert failed.unknown is unknown
    assert str(error) in failed.message


async def test_s11_a_call_that_is_not_answered_within_its_own_time_limit_is_unknown(
    loop: Loop, engine: Script, store: BrokenStore
) -> None:
    store.hangs = True
    failed = await call_fails(loop, engine, timeout_ms=20)
    assert failed.unknown
    assert failed.message == "prune: no answer within 20 ms"


async def test_an_unexpected_error_is_logged_with_its_traceback_once(
    loop: Loop, engine: Script, store: BrokenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.outcome = RuntimeError("a driver's bug")
    engine.on(messages.Woken, lambda _: prune())
    for _ in range(3):
        loop.feed(messages.Woken())
        await loop.settled()
    (line,) = [r for r in caplog.records if r.getMessage() == "store_call_broke"]
    assert line.exc_info


async def test_s27_while_the_store_is_not_open_no_call_reaches_it(
    loop: Loop, engine: Script
) -> None:
    loop.store_open = False
    failed = await call_fails(loop, engine)
    assert not failed.unknown
    with pytest.raises(StoreUnavailable):
        await loop.read(lambda: loop.store.prune(cast("Any", None)))


async def test_a_read_has_a_time_limit(loop: Loop, store: BrokenStore) -> None:
    assert (await loop.read(lambda: loop.store.prune(cast("Any", None)))).answers == (7,)
    store.hangs = True
    with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
        await loop.read(lambda: loop.store.prune(cast("Any", None)))


async def test_failpoints_stand_before_and_after_a_call(loop: Loop, engine: Script) -> None:
    reached: list[str] = []

    def note(name: str) -> failpoints.Action:
        async def action() -> None:
            reached.append(name)

        return action

    engine.on(messages.Woken, lambda _: prune())
    with (
        failpoints.arm("store.prune.before", note("before")),
        failpoints.arm("store.prune.after", note("after")),
    ):
        loop.feed(messages.Woken())
        await loop.settled()
    assert reached == ["before", "after"]


async def test_a_notification_of_the_store_wakes_the_engine(
    loop: Loop, engine: Script, store: BrokenStore, clock: VirtualClock
) -> None:
    store.wakes.put_nowait(None)
    await turns()
    assert engine.got(messages.Woken) == [messages.Woken()]
    # A store that is away, and one that breaks, are watched again a second later.
    for error in (StoreUnavailable("gone"), RuntimeError("bug")):
        store.wakes.put_nowait(error)
        await turns()
        clock.move_to(clock.boot_ms() + limits.SECOND)
        await turns()
        engine.inputs.clear()
        store.wakes.put_nowait(None)
        await turns()
        assert engine.got(messages.Woken) == [messages.Woken()]


# ── Time ────────────────────────────────────────────────────────────────────────────────────────


async def test_the_engine_is_ticked_when_it_asked_to_be(
    loop: Loop, engine: Script, clock: VirtualClock
) -> None:
    engine.wake_at = clock.boot_ms() + 100
    loop.feed(messages.Woken())
    clock.move_to(clock.boot_ms() + 99)
    assert engine.got(messages.Tick) == []
    clock.move_to(clock.boot_ms() + 1)
    assert engine.got(messages.Tick) == [messages.Tick()]


async def test_the_engine_may_move_its_timer(
    loop: Loop, engine: Script, clock: VirtualClock
) -> None:
    engine.wake_at = clock.boot_ms() + 100
    loop.feed(messages.Woken())
    engine.wake_at = clock.boot_ms() + 200
    loop.feed(messages.Woken())
    clock.move_to(clock.boot_ms() + 150)
    assert engine.got(messages.Tick) == []
    engine.wake_at = None
    loop.feed(messages.Woken())
    clock.move_to(clock.boot_ms() + 90)
    assert engine.got(messages.Tick) == []


async def test_s04_after_a_pause_the_engine_hears_of_it_before_anything_else(
    loop: Loop, engine: Script, clock: VirtualClock
) -> None:
    clock._boot_ms += PULSE_MS + PAUSE_MS + 1  # no timer had a chance
    loop.feed(messages.Woken())
    assert engine.inputs == [messages.Suspended(PULSE_MS + PAUSE_MS + 1), messages.Woken()]


async def test_s04_a_pause_is_noticed_also_when_nothing_else_happens(
    loop: Loop, engine: Script, clock: VirtualClock
) -> None:
    clock.move_to(clock.boot_ms() + 60_000)
    assert engine.got(messages.Suspended) == [messages.Suspended(60_000)]


async def test_without_a_pause_the_engine_hears_of_none(
    loop: Loop, engine: Script, clock: VirtualClock
) -> None:
    for _ in range(20):
        clock.move_to(clock.boot_ms() + PULSE_MS)
    assert engine.got(messages.Suspended) == []


async def test_readiness_is_looked_at_with_every_pulse(
    engine: Script, store: BrokenStore, clock: VirtualClock
) -> None:
    seen: list[bool] = []
    loop = Loop(
        engine, cast("Store", store), clock, on_status=lambda status: seen.append(status.ready)
    )
    loop.start()
    engine.ready = False
    clock.move_to(clock.boot_ms() + PULSE_MS)
    assert seen == [True, False]
    await loop.close()


# ── Clients ─────────────────────────────────────────────────────────────────────────────────────


async def test_events_reach_the_stream_they_are_sent_to(loop: Loop, engine: Script) -> None:
    engine.on(
        messages.Subscribe,
        lambda s: [messages.Send(SESSION, s.stream_id, messages.Draining(s.stream_id))],
    )
    engine.on(messages.Woken, lambda _: [messages.EndStream(SESSION, first.stream_id, None)])
    first, second = subscribed(loop), subscribed(loop)
    assert first.stream_id != second.stream_id
    loop.feed(messages.Woken())
    assert [event async for event in first] == [messages.Draining(first.stream_id)]
    assert not second.is_ended


async def test_a_stream_ended_by_the_engine_is_not_reported_back(
    loop: Loop, engine: Script
) -> None:
    refusal = NotFoundError("session", SESSION)
    engine.on(messages.Subscribe, lambda s: [messages.EndStream(SESSION, s.stream_id, refusal)])
    stream = subscribed(loop)
    assert stream.error is refusal
    loop.unsubscribe(stream)
    assert engine.got(messages.StreamEnded) == []


async def test_a_stream_that_its_client_left_is_reported_once(loop: Loop, engine: Script) -> None:
    stream = subscribed(loop)
    loop.unsubscribe(stream)
    loop.unsubscribe(stream)
    assert engine.got(messages.StreamEnded) == [messages.StreamEnded(SESSION, stream.stream_id)]
    engine.on(messages.Woken, lambda _: [messages.Send(SESSION, 1, messages.Draining(0))])
    loop.feed(messages.Woken())  # to a stream that is gone: nothing


async def test_a_client_that_does_not_read_loses_its_stream_and_nothing_waits(
    loop: Loop, engine: Script
) -> None:
    stream = subscribed(loop)
    event = messages.Send(SESSION, stream.stream_id, messages.Draining(0))
    engine.on(messages.Woken, lambda _: [event] * (limits.EVENT_QUEUE_MAX + 2))
    loop.feed(messages.Woken())
    assert isinstance(stream.error, RefusedError)
    assert stream.error.reason == "LIMIT_EXCEEDED"
    assert engine.got(messages.StreamEnded) == [messages.StreamEnded(SESSION, stream.stream_id)]


async def test_a_request_waits_for_its_own_answer(loop: Loop, engine: Script) -> None:
    answer = messages.KeepAliveAnswer(15_000, 5_000, stream_open=True, lost=(), confirmed=())
    requests: list[messages.KeepAlive] = []

    def note(request: messages.KeepAlive) -> list[Command]:
        requests.append(request)
        return []

    engine.on(messages.KeepAlive, note)
    first = asyncio.create_task(loop.keep_alive(SESSION, ("a",)))
    second = asyncio.create_task(loop.keep_alive(SESSION, ("b",), draining=True, confirm=("b",)))
    await turns()
    assert [request.in_flight for request in requests] == [("a",), ("b",)]
    engine.on(messages.Woken, lambda _: [messages.Answer(requests[1].request_id, answer)])
    loop.feed(messages.Woken())
    assert await second == answer
    assert not first.done()
    first.cancel()
    await turns()
    engine.on(messages.Woken, lambda _: [messages.Answer(requests[0].request_id, answer)])
    loop.feed(messages.Woken())  # to somebody who has gone: nothing


async def test_an_answer_that_is_an_error_is_raised(loop: Loop, engine: Script) -> None:
    def refused(request: messages.CloseSession) -> list[Command]:
        return [messages.Answer(request.request_id, NotFoundError("session", SESSION))]

    engine.on(messages.CloseSession, refused)
    with pytest.raises(NotFoundError):
        await loop.close_session(SESSION, ())


async def test_results_are_answered_with_receipts(loop: Loop, engine: Script) -> None:
    answer = messages.CompleteAnswer((messages.Receipt(messages.ReceiptStatus.RECORDED),))
    engine.on(messages.Complete, lambda request: [messages.Answer(request.request_id, answer)])
    assert await loop.complete((("t", Outcome()),)) == answer


async def test_a_spec_is_checked_at_the_hosts_time(loop: Loop) -> None:
    loop.check_spec(JobSpec("sync"))


async def test_s24_a_process_that_cannot_be_watched_is_logged(
    loop: Loop, engine: Script, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr("anarchon_server.loop.watchable", lambda _: True)
    monkeypatch.setattr("anarchon_server.loop.processes.ProcessWatch.watch", broken)
    engine.on(
        messages.Subscribe,
        lambda s: [messages.WatchClient(SESSION, 7), messages.UnwatchClient(SESSION)],
    )
    subscribed(loop, Client(process_id=7))
    assert engine.got(messages.Subscribe)[0].watchable
    assert [r.getMessage() for r in caplog.records] == ["client_not_watched"]


async def test_a_log_command_becomes_a_line_with_fields(
    loop: Loop, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anarchon")
    line = messages.Log(messages.Level.INFO, "session_attached", {"jobs": 3})
    quiet = messages.Log(messages.Level.DEBUG, "unheard")
    engine.on(messages.Woken, lambda _: [line, quiet])
    loop.feed(messages.Woken())
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["fields"]) == ("session_attached", {"jobs": 3})


# ── The end ─────────────────────────────────────────────────────────────────────────────────────


async def test_s23_the_loop_has_stopped_when_the_engine_says_so(loop: Loop, engine: Script) -> None:
    waiting = asyncio.create_task(loop.stopped())
    loop.stop()
    loop.stop()
    assert engine.got(messages.Stop) == [messages.Stop(), messages.Stop()]
    await turns()
    assert not waiting.done()
    engine.on(messages.Woken, lambda _: [messages.Stopped()])
    loop.feed(messages.Woken())
    await waiting


async def test_a_mistake_of_the_engine_stops_everything_dead(
    loop: Loop, engine: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> list[Command]:
        raise AssertionError("impossible")

    engine.on(messages.Woken, broken)
    loop.feed(messages.Woken())
    with pytest.raises(AssertionError, match="impossible"):
        await loop.stopped()
    engine.inputs.clear()
    loop.feed(messages.Tick())
    assert engine.inputs == []
    assert [r.getMessage() for r in caplog.records] == ["engine_failed"]


async def test_closing_ends_streams_and_answers_requests(loop: Loop, store: BrokenStore) -> None:
    stream = subscribed(loop)
    request = asyncio.create_task(loop.keep_alive(SESSION, ()))
    await turns()
    await loop.close()
    assert isinstance(stream.error, RefusedError)
    with pytest.raises(RefusedError, match="going away"):
        await request
    with pytest.raises(RefusedError, match="going away"):
        await loop.keep_alive(SESSION, ())
    assert subscribed(loop).is_ended


async def test_a_store_that_does_not_notify_is_not_asked_again(
    engine: Script, clock: VirtualClock
) -> None:
    store = open_store("memory:", OpenOptions("default", clock))
    await store.open()

    async def nothing() -> AsyncIterator[None]:
        return
        yield

    store.watch = nothing  # type: ignore[method-assign]
    loop = Loop(engine, store, clock)
    loop.start()
    await turns()
    assert loop._watch is not None
    assert loop._watch.done()
    await loop.close()
    await store.close()


async def turns() -> None:
    """Let everything that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)
