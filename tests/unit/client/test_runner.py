"""Handlers on the loop and in threads: what becomes of their values, errors and cancellations."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import pytest

import anarchon
from anarchon import _runner
from anarchon._context import BootClock, Trust
from anarchon._errors import ForeignError
from anarchon._runner import Watchdog
from anarchon.testing import FakeSidecar
from anarchon.v1 import run_pb2

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="none")


@pytest.fixture
async def sidecar() -> FakeSidecar:
    return FakeSidecar()


async def outcome_of(sidecar: FakeSidecar, handler: Callable[..., object]) -> run_pb2.Outcome:
    """Run `handler` once, through a client of its own."""
    job = anarchon.Job(handler, anarchon.Every("1s"), name="job")
    async with anarchon.AnarchonClient(transport=sidecar).subscribe([job]) as subscription:
        await subscription.ready()
        return await sidecar.assign("job").outcome


# ── Values ──────────────────────────────────────────────────────────────────────────────────────


class Odd:
    def __str__(self) -> str:
        raise ZeroDivisionError


class Text(str):  # noqa: SLOT000
    def encode(self, *_: object) -> bytes:
        raise ZeroDivisionError


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, ""),
        ("as it is", "as it is"),
        (0, "0"),
        ({"rows": 3, "ü": [1.5, None]}, '{"rows": 3, "ü": [1.5, null]}'),
        (b"x", "b'x'"),
        (CYCLE, "[[...]]"),
        (Odd(), "<Odd that cannot be shown>"),
        ("\udc80", "\\udc80"),
        (Text("abc"), "abc"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_a_handler_returns_is_kept_as_text(
    sidecar: FakeSidecar, value: object, result: str
) -> None:
    async def on_the_loop() -> object:
        return value

    def in_a_thread() -> object:
        return value

    assert (await outcome_of(sidecar, on_the_loop)).success.result == result
    assert (await outcome_of(sidecar, in_a_thread)).success.result == result


class Exits:
    def __repr__(self) -> str:
        raise SystemExit(3)


class Rows(dict[str, int]):
    def items(self) -> NoReturn:
        raise RuntimeError("dictionary changed size during iteration")


class Lines(list[int]):
    def __iter__(self) -> NoReturn:
        raise KeyError("line 1")


class ExitsAsItems(dict[str, int]):
    def items(self) -> NoReturn:
        sys.exit(3)


async def both_outcomes_of(
    sidecar: FakeSidecar, body: Callable[[], object]
) -> tuple[run_pb2.Outcome, run_pb2.Outcome]:
    """The outcomes of `body` on the loop and in a thread."""

    async def on_the_loop() -> object:
        return body()

    return await outcome_of(sidecar, on_the_loop), await outcome_of(sidecar, body)


@pytest.mark.parametrize(
    ("value", "type_name", "message"),
    [
        (Rows(a=1), "RuntimeError", "dictionary changed size during iteration"),
        (Lines([1]), "KeyError", "'line 1'"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_value_that_cannot_be_made_text_of_fails_its_attempt_at_once(
    sidecar: FakeSidecar, value: object, type_name: str, message: str
) -> None:
    for outcome in await both_outcomes_of(sidecar, lambda: value):
        assert (outcome.failure.type, outcome.failure.message) == (type_name, message)


async def test_a_value_that_exits_fails_its_attempt_and_takes_nobody_with_it(
    sidecar: FakeSidecar,
) -> None:
    on_the_loop, in_a_thread = await both_outcomes_of(sidecar, lambda: ExitsAsItems(a=1))
    assert on_the_loop.failure.message == "the handler called sys.exit(3)"
    assert in_a_thread.failure.type == "SystemExit"
    for outcome in await both_outcomes_of(sidecar, Exits):
        assert outcome.success.result == "<Exits that cannot be shown>"


async def test_s30_a_result_is_cut_at_16_kib_and_between_characters(sidecar: FakeSidecar) -> None:
    outcome = await outcome_of(sidecar, lambda: "x" + "ü" * 20_000)
    assert outcome.success.result == "x" + "ü" * 8_191


async def test_the_elapsed_time_is_reported(sidecar: FakeSidecar) -> None:
    outcome = await outcome_of(sidecar, lambda: None)
    assert outcome.HasField("elapsed")
    assert 0 <= outcome.elapsed.ToMilliseconds() < 5_000


# ── Errors ──────────────────────────────────────────────────────────────────────────────────────


async def test_an_error_is_reported_with_its_type_message_and_trace(sidecar: FakeSidecar) -> None:
    async def on_the_loop() -> None:
        raise ValueError("no rows")

    def in_a_thread() -> None:
        raise anarchon.JobError("no job")

    failure = (await outcome_of(sidecar, on_the_loop)).failure
    assert (failure.type, failure.message, failure.permanent) == ("ValueError", "no rows", False)
    assert "in on_the_loop" in failure.stack_trace
    assert not failure.HasField("retry_after")
    failure = (await outcome_of(sidecar, in_a_thread)).failure
    assert failure.type == "anarchon.JobError"
    assert "in in_a_thread" in failure.stack_trace


async def test_s30_of_a_message_the_first_4_kib_and_of_a_trace_the_last_16_are_kept(
    sidecar: FakeSidecar,
) -> None:
    def fail() -> None:
        raise ValueError("a" * 5_000 + "z" * 20_000)

    failure = (await outcome_of(sidecar, fail)).failure
    assert failure.message == "a" * 4_096
    assert len(failure.stack_trace) == 16_384
    assert failure.stack_trace.endswith("zz\n")


async def test_s22_retry_and_permanent_say_what_is_to_follow(sidecar: FakeSidecar) -> None:
    async def later() -> None:
        try:
            raise OSError("no network")
        except OSError as error:
            raise anarchon.Retry(after="90s") from error

    async def never() -> None:
        raise anarchon.Permanent("the account is closed")

    failure = (await outcome_of(sidecar, later)).failure
    assert (failure.type, failure.message) == ("OSError", "no network")
    assert failure.retry_after.seconds == 90
    assert not failure.permanent
    failure = (await outcome_of(sidecar, never)).failure
    assert failure.permanent
    assert (failure.type, failure.message) == (
        "anarchon.Permanent",
        "the account is closed",
    )


async def test_a_handler_that_exits_fails_and_takes_nobody_with_it(sidecar: FakeSidecar) -> None:
    async def on_the_loop() -> None:
        sys.exit(3)

    failure = (await outcome_of(sidecar, on_the_loop)).failure
    assert failure.message == "the handler called sys.exit(3)"
    failure = (await outcome_of(sidecar, lambda: sys.exit(4))).failure
    assert failure.type == "SystemExit"


class NoText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ZeroDivisionError


class ExitsAsText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(3)


class OwnText(Exception):  # noqa: N818
    def __str__(self) -> str:
        return Text("own")


class EmptyError(OSError):
    def __len__(self) -> int:
        return 0


class NoAfter(anarchon.Retry):
    def __init__(self) -> None:
        pass


def error_of_a_type_named(qualname: str) -> Exception:
    kind = type("Named", (Exception,), {"__module__": "builtins", "__qualname__": qualname})
    error: Exception = kind("x")
    return error


def wrapped() -> Exception:
    error = anarchon.Permanent()
    error.__cause__ = EmptyError("no network")
    return error


@pytest.mark.parametrize(
    ("make_error", "type_name", "message"),
    [
        (NoText, "NoText", "<NoText that cannot be shown>"),
        (ExitsAsText, "ExitsAsText", "<ExitsAsText that cannot be shown>"),
        (OwnText, "OwnText", "own"),
        (lambda: error_of_a_type_named("Bad\udc80"), "Bad\\udc80", "x"),
        (lambda: error_of_a_type_named("N" * 5_000), "N" * 4_096, "x"),
        (wrapped, "EmptyError", "no network"),
        (
            NoAfter,
            "NoAfter",
            "its error cannot be read: AttributeError: 'NoAfter' object has no attribute 'after'",
        ),
    ],
    ids=["text", "exit", "own text", "name", "long name", "cause", "after"],
)
async def test_whatever_an_error_is_its_attempt_fails_at_once_and_takes_nobody_with_it(
    sidecar: FakeSidecar, make_error: Callable[[], Exception], type_name: str, message: str
) -> None:
    def fail() -> NoReturn:
        raise make_error()

    for outcome in await both_outcomes_of(sidecar, fail):
        assert outcome.failure.type.removeprefix(f"{__name__}.") == type_name
        assert outcome.failure.message == message
        assert "in fail" in outcome.failure.stack_trace


class ExitingKind(type):
    def __getattribute__(cls, name: str) -> object:
        return sys.exit(3) if name == "__qualname__" else super().__getattribute__(name)


class ExitsAsName(Exception, metaclass=ExitingKind):  # noqa: N818
    pass


class ExitsAsClass(Exception):  # noqa: N818
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise SystemExit(3)


class Traces(logging.Handler):
    """Writes records with their traces, as applications do."""

    def __init__(self) -> None:
        super().__init__()
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.put(self.format(record))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    handler = Traces()
    monkeypatch.setattr(logging.getLogger("anarchon.job"), "handlers", [handler])
    return handler


@pytest.mark.parametrize(
    ("make_error", "type_name", "message"),
    [
        (lambda: ExitsAsName("x"), "<a type without a name>", "x"),
        (ExitsAsClass, f"{__name__}.ExitsAsClass", "its error cannot be read: SystemExit: 3"),
    ],
    ids=["name", "class"],
)
async def test_an_error_whose_trace_cannot_be_made_is_reported_and_logged_without(
    sidecar: FakeSidecar,
    traces: Traces,
    make_error: Callable[[], Exception],
    type_name: str,
    message: str,
) -> None:
    def fail() -> NoReturn:
        raise make_error()

    for outcome in await both_outcomes_of(sidecar, fail):
        assert (outcome.failure.type, outcome.failure.message) == (type_name, message)
        assert outcome.failure.stack_trace == "<cannot be shown>"
        # In a thread it is said after the report.
        said = await asyncio.to_thread(traces.said.get, timeout=10)
        assert said == f"job 1791633610000 attempt 1: failed: {type_name}: {message}"


async def test_sys_exit_with_a_code_that_cannot_be_shown_is_a_failure(
    sidecar: FakeSidecar,
) -> None:
    async def on_the_loop() -> None:
        sys.exit(Exits())  # type: ignore[arg-type]

    failure = (await outcome_of(sidecar, on_the_loop)).failure
    assert failure.message == "the handler called sys.exit(...)"


async def test_a_handler_that_cancels_itself_has_failed(sidecar: FakeSidecar) -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    assert (await outcome_of(sidecar, cancels)).failure.type == "asyncio.exceptions.CancelledError"


async def test_a_plain_function_that_gives_a_coroutine_is_told_so(sidecar: FakeSidecar) -> None:
    async def inner() -> None: ...

    failure = (await outcome_of(sidecar, lambda: inner())).failure
    assert "make it async def" in failure.message


def said_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, bool]]:
    """What was logged of attempts: level, message, whether with a trace."""
    records = [record for record in caplog.records if record.name == "anarchon.job"]
    return [(r.levelname, r.getMessage(), r.exc_info is not None) for r in records]


async def said_in_time(caplog: pytest.LogCaptureFixture, count: int) -> list[tuple[str, str, bool]]:
    """The same, once so much was said: a thread says it after it has reported."""
    async with asyncio.timeout(10):
        # The text is written last. Another thread does it, and cannot set an event of this loop.
        while caplog.text.count("attempt 1: ") < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return said_of(caplog)


async def test_a_failure_is_in_the_applications_log_with_its_trace(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_the_loop() -> None:
        raise ValueError("no such invoice: 42")

    def in_a_thread() -> None:
        raise ValueError("no such invoice: 43")

    caplog.set_level(logging.INFO)
    for handler in (on_the_loop, in_a_thread):
        await outcome_of(sidecar, handler)
    said = await said_in_time(caplog, 2)
    assert said == [("ERROR", "job 1791633610000 attempt 1: failed", True)] * 2
    assert "ValueError: no such invoice: 42" in caplog.text
    assert "in in_a_thread" in caplog.text


async def test_a_trace_begins_with_the_handlers_own_code(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_the_loop() -> None:
        raise ValueError("no such invoice: 42")

    def exits() -> NoReturn:
        try:
            raise KeyError(7)
        except KeyError as error:
            raise SystemExit(3) from error

    async def exits_on_the_loop() -> None:
        exits()

    for handler in (on_the_loop, exits, exits_on_the_loop):
        trace = (await outcome_of(sidecar, handler)).failure.stack_trace
        assert _runner.__file__ not in trace
        assert f"in {handler.__name__}" in trace
    assert "KeyError: 7" in trace, "of causes too"
    await said_in_time(caplog, 3)
    first = caplog.text.split("no such invoice")[0]
    assert f'File "{__file__}"' in first
    assert _runner.__file__ not in first


async def test_a_retry_is_said_in_one_line(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    async def busy() -> None:
        raise anarchon.Retry("the bank is closed", after="90m")

    def without_words() -> None:
        try:
            raise OSError("no network")
        except OSError as error:
            raise anarchon.Retry from error

    for handler in (busy, without_words):
        await outcome_of(sidecar, handler)
    asks = "job 1791633610000 attempt 1: failed, and asks for a retry"
    assert await said_in_time(caplog, 2) == [
        ("WARNING", f"{asks} after 1h30m: the bank is closed", False),
        ("WARNING", f"{asks}: OSError: no network", False),
    ]


async def test_what_failed_outside_of_python_has_details_in_place_of_a_trace(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ForeignError("exit status 3", "no such invoice\n")

    failure = (await outcome_of(sidecar, fail)).failure
    assert (failure.message, failure.stack_trace) == ("exit status 3", "no such invoice\n")
    said = await said_in_time(caplog, 1)
    assert said == [("ERROR", "job 1791633610000 attempt 1: failed: exit status 3", False)]


@pytest.mark.parametrize(
    ("reason", "level", "why"),
    [
        (anarchon.CancelReason.TIMEOUT, "WARNING", "timeout"),
        (anarchon.CancelReason.FENCED, "WARNING", "fenced"),
        (anarchon.CancelReason.SUPERSEDED, "INFO", "superseded"),
    ],
)
async def test_an_attempt_that_stops_is_one_line_in_the_applications_log(
    sidecar: FakeSidecar,
    caplog: pytest.LogCaptureFixture,
    reason: anarchon.CancelReason,
    level: str,
    why: str,
) -> None:
    started = asyncio.Event()

    async def handler() -> None:
        started.set()
        await asyncio.Event().wait()

    caplog.set_level(logging.INFO)
    job = anarchon.Job(handler, anarchon.Every("1s"), name="job")
    async with anarchon.AnarchonClient(transport=sidecar).subscribe([job]) as subscription:
        await subscription.ready()
        run = sidecar.assign("job")
        await started.wait()
        sidecar.cancel(run, reason)
        await run.outcome
    ((said_level, message, has_trace),) = await said_in_time(caplog, 1)
    assert (said_level, has_trace) == (level, False)
    assert re.fullmatch(rf"job \d+ attempt 1: stopped \({why}(: .*)?\)", message)


async def test_a_success_is_not_logged(
    sidecar: FakeSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await outcome_of(sidecar, lambda: None)
    assert said_of(caplog) == []


# ── Threads ─────────────────────────────────────────────────────────────────────────────────────


async def test_plain_functions_run_in_threads_with_the_callers_context(
    sidecar: FakeSidecar,
) -> None:
    request_id.set("mine")
    threads: list[threading.Thread] = []

    def handler(ctx: anarchon.SyncContext) -> str:
        threads.append(threading.current_thread())
        ctx.confirm()
        return request_id.get()

    assert (await outcome_of(sidecar, handler)).success.result == "mine"
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon
    assert list(sidecar.keep_alives[1].confirm) == ["token-1"]


async def test_confirm_in_a_thread_raises_what_the_sidecar_says(sidecar: FakeSidecar) -> None:
    sidecar.can_confirm = False

    def handler(ctx: anarchon.SyncContext) -> None:
        ctx.confirm()

    failure = (await outcome_of(sidecar, handler)).failure
    assert failure.type == "anarchon.NotConfirmedError"


async def test_as_many_threads_run_as_there_are_handlers_and_they_are_used_again(
    sidecar: FakeSidecar,
) -> None:
    together = threading.Barrier(4)
    used: set[str] = set()

    def handler() -> None:
        used.add(threading.current_thread().name)
        together.wait(10)

    job = anarchon.Job(handler, anarchon.Every("1s"), name="job")
    async with anarchon.AnarchonClient(transport=sidecar).subscribe([job]) as subscription:
        await subscription.ready()
        for _ in range(3):
            runs = [sidecar.assign("job") for _ in range(4)]
            for run in runs:
                assert (await run.outcome).HasField("success")
    assert 4 <= len(used) <= 12


async def test_a_cancellation_wakes_a_thread_and_its_answer_says_stopped(
    sidecar: FakeSidecar,
) -> None:
    started = threading.Event()

    def handler(ctx: anarchon.SyncContext) -> None:
        started.set()
        ctx.sleep("1h")

    job = anarchon.Job(handler, anarchon.Every("1s"), name="job")
    async with anarchon.AnarchonClient(transport=sidecar).subscribe([job]) as subscription:
        await subscription.ready()
        run = sidecar.assign("job")
        await asyncio.to_thread(started.wait, 10)
        sidecar.cancel(run, anarchon.CancelReason.SUPERSEDED)
        assert (await run.outcome).stopped.reason == run_pb2.CANCEL_REASON_SUPERSEDED


async def test_s25_a_blocked_loop_does_not_keep_threads_from_being_told() -> None:
    sidecar = FakeSidecar(session_ttl="600ms", keep_alive_interval="200ms")
    both = threading.Barrier(2)
    told = threading.Event()
    errors: list[BaseException] = []

    def in_a_thread(ctx: anarchon.SyncContext) -> None:
        both.wait(10)
        try:
            ctx.sleep("1h")
        except anarchon.Cancelled as error:
            errors.append(error)
            raise
        finally:
            told.set()

    async def blocks_the_loop() -> bool:
        both.wait(10)
        return told.wait(10)

    jobs = [
        anarchon.Job(in_a_thread, anarchon.Every("1s")),
        anarchon.Job(blocks_the_loop, anarchon.Every("1s")),
    ]
    async with anarchon.AnarchonClient(transport=sidecar).subscribe(jobs) as subscription:
        await subscription.ready()
        run, blocked = sidecar.assign("in_a_thread"), sidecar.assign("blocks_the_loop")
        outcome = await run.outcome
        assert outcome.stopped.reason == run_pb2.CANCEL_REASON_LEASE_LOST
        assert (await blocked.outcome).success.result == "true"
    assert isinstance(errors[0], anarchon.LeaseLost)


# ── The watchdog ────────────────────────────────────────────────────────────────────────────────


class HandClock:
    def __init__(self) -> None:
        self.time_ms = 0

    def now_ms(self) -> int:
        return self.time_ms


@pytest.fixture
async def watched() -> AsyncIterator[tuple[HandClock, Trust, Watchdog, threading.Semaphore]]:
    clock, trust, bites = HandClock(), Trust(1_000), threading.Semaphore(0)
    watchdog = Watchdog(clock, trust, bites.release)
    yield clock, trust, watchdog, bites
    watchdog.stop()


def test_the_watchdog_bites_when_trust_is_over(
    watched: tuple[HandClock, Trust, Watchdog, threading.Semaphore],
) -> None:
    clock, _, watchdog, bites = watched
    watchdog.arm(on=True)
    assert not bites.acquire(blocking=False)
    clock.time_ms = 1_000
    watchdog.arm(on=True)
    assert bites.acquire(timeout=10)


def test_the_watchdog_looks_at_the_clock_though_nobody_wakes_it(
    watched: tuple[HandClock, Trust, Watchdog, threading.Semaphore], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, trust, watchdog, bites = watched
    monkeypatch.setattr(_runner, "_WATCH_EVERY_S", 0.01)
    trust.end_ms = 3_600_000
    watchdog.arm(on=True)
    clock.time_ms = 3_600_000  # as after a sleep of the machine
    assert bites.acquire(timeout=10)


def test_an_unarmed_watchdog_does_not_bite(
    watched: tuple[HandClock, Trust, Watchdog, threading.Semaphore],
) -> None:
    clock, _, watchdog, bites = watched
    clock.time_ms = 5_000
    watchdog.arm(on=False)
    watchdog.stop()
    assert not bites.acquire(blocking=False)


def test_the_real_clock_and_the_real_thread_are_on_time() -> None:
    clock, bitten = BootClock(), threading.Event()
    end_ms = clock.now_ms() + 50
    watchdog = Watchdog(clock, Trust(end_ms), bitten.set)
    watchdog.arm(on=True)
    assert bitten.wait(10)
    assert clock.now_ms() >= end_ms
    watchdog.stop()
