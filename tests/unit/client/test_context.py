"""What a handler sees, and when it is told to stop."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest

import anarchon
from anarchon._context import BootClock, Context, Orders, Trust, reason_of
from anarchon._duration import ms_to_wire
from anarchon.testing import cancel, make_context
from anarchon.v1 import run_pb2, session_pb2


class HandClock:
    """A clock in a test's hand."""

    def __init__(self) -> None:
        self.time_ms = 1_000

    def now_ms(self) -> int:
        return self.time_ms


async def agreed() -> None:
    """The sidecar's yes."""


def make(clock: HandClock, trust: Trust, **fields: object) -> Context:
    assignment = session_pb2.Assignment(token="t", job="sync", slot=1_791_633_610_123, **fields)  # type: ignore[arg-type]
    return Context(assignment, Orders(clock, trust), clock, agreed)


def test_a_context_shows_the_attempt() -> None:
    context = make_context("sync", slot=1_791_633_610_123, attempt=2, fence=7, payload=b"x")
    assert (context.job, context.attempt, context.fence, context.payload) == ("sync", 2, 7, b"x")
    assert context.scheduled_at == datetime(2026, 10, 10, 12, 0, 10, 123_000, UTC)
    assert context.trigger is anarchon.Trigger.SCHEDULE
    assert str(context.trigger) == "schedule"
    assert context.instance_id == "test:1"
    assert context.token == "test-token-2"
    assert repr(context) == "<Context sync 1791633610123 attempt 2>"
    assert context.deadline is None
    assert context.remaining is None


def test_remaining_counts_on_the_clock_that_counts_sleep() -> None:
    clock = HandClock()
    context = make(clock, Trust(10_000), timeout=ms_to_wire(3_000))
    assert context.remaining == timedelta(seconds=3)
    assert context.deadline is not None
    assert context.deadline.tzinfo is UTC
    clock.time_ms += 2_500
    assert context.remaining == timedelta(milliseconds=500)
    clock.time_ms += 2_500
    assert context.remaining == timedelta(0)


def test_check_raises_from_the_very_moment_trust_is_over() -> None:
    clock, trust = HandClock(), Trust(5_000)
    context = make(clock, trust)
    clock.time_ms = 4_999
    context.check()
    assert not context.cancelled
    clock.time_ms = 5_000
    with pytest.raises(anarchon.LeaseLost):
        context.check()
    assert context.cancel_event.is_set()


def test_trust_once_over_stays_over_for_the_attempt() -> None:
    clock, trust = HandClock(), Trust(5_000)
    context = make(clock, trust)
    clock.time_ms = 5_000
    assert context.cancelled
    trust.end_ms = 50_000
    with pytest.raises(anarchon.LeaseLost):
        context.check()


def test_a_polite_cancellation_is_told_from_a_lost_lease() -> None:
    context = make_context()
    cancel(context, anarchon.CancelReason.TIMEOUT)
    with pytest.raises(anarchon.Cancelled) as raised:
        context.check()
    assert raised.value.reason is anarchon.CancelReason.TIMEOUT
    assert not isinstance(raised.value, anarchon.LeaseLost)
    cancel(context, anarchon.CancelReason.LEASE_LOST)
    with pytest.raises(anarchon.LeaseLost) as lost:
        context.check()
    assert lost.value.reason is anarchon.CancelReason.TIMEOUT, "the first reason stays"


@pytest.mark.parametrize("number", [99, 0])
def test_a_reason_of_a_later_version_is_other(number: run_pb2.CancelReason) -> None:
    assert reason_of(number) is anarchon.CancelReason.OTHER


@pytest.mark.parametrize("number", [99, 0])
def test_a_trigger_of_a_later_version_is_other(number: int) -> None:
    context = make(HandClock(), Trust(9_000), trigger=number)
    assert context.trigger is anarchon.Trigger.OTHER


async def test_sleep_ends_with_a_look_at_the_orders() -> None:
    context = make_context()
    await context.sleep("0s")
    cancel(context)
    with pytest.raises(anarchon.Cancelled):
        await context.sleep("0s")
    with pytest.raises(anarchon.JobError, match=r"sleep\('1'\)"):
        await context.sleep("1")


def test_a_thread_that_sleeps_is_woken_by_a_cancellation() -> None:
    context = make_context(sync=True)
    raised: list[BaseException] = []

    def sleep() -> None:
        try:
            context.sleep("1h")
        except anarchon.Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    cancel(context)
    thread.join(10)
    assert len(raised) == 1
    with pytest.raises(anarchon.Cancelled):
        context.confirm()


def test_the_log_says_of_which_attempt_it_speaks(caplog: pytest.LogCaptureFixture) -> None:
    context = make_context("sync", slot=5, attempt=2)
    with caplog.at_level(logging.INFO):
        context.log.info("%d rows, 100%% done", 3, extra={"rows": 3})
        context.log.info({"not": "text"})
    record = caplog.records[0]
    assert record.getMessage() == "sync 5 attempt 2: 3 rows, 100% done"
    assert (record.__dict__["job"], record.__dict__["rows"]) == ("sync", 3)


def test_the_boot_clock_goes_forward_in_whole_milliseconds() -> None:
    clock = BootClock()
    first = clock.now_ms()
    assert isinstance(first, int)
    assert clock.now_ms() >= first > 0


@pytest.mark.parametrize("after", ["0s", "-1s", 3])
def test_a_retry_after_nonsense_says_so(after: str) -> None:
    with pytest.raises(anarchon.JobError, match=r"Retry\(after="):
        anarchon.Retry(after=after)
