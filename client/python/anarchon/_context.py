"""What a handler sees: its attempt, whether it may still go on, and the clock that decides it.
Imports the standard library and the wire's messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from anarchon._duration import Duration, to_timedelta, wire_to_ms
from anarchon._errors import Cancelled, CancelReason, JobError, NotConfirmedError, lost_error
from anarchon.v1 import run_pb2, session_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A keep-alive takes 5 s at most, and another may be under way before it.
_CONFIRM_S = 10.0
NOT_ANSWERED = "no keep-alive was answered in time"
_log = logging.getLogger("anarchon.job")


class Clock(Protocol):
    """Milliseconds that only go forward and go on while the machine sleeps (S3)."""

    def now_ms(self) -> int:
        """Return the time now, rounded down, from an origin that means nothing."""
        ...


class BootClock:
    """The system's own: CLOCK_BOOTTIME on Linux, CLOCK_MONOTONIC on macOS, which counts sleep too."""

    _ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def now_ms(self) -> int:
        """Return the milliseconds since the machine started."""
        return time.clock_gettime_ns(self._ID) // 1_000_000


class Trust:
    """Until when the session is to be trusted. Written by the session's loop, read by any thread."""

    __slots__ = ("end_ms",)

    def __init__(self, end_ms: int = 0) -> None:
        self.end_ms = end_ms


class Orders:
    """What one attempt has been told, by the sidecar or by the clock. Safe to use in any thread.

    Trust that has ended stays ended for the attempt, also when the session regains it: in between
    another instance may have begun.
    """

    def __init__(self, clock: Clock, trust: Trust) -> None:
        self._clock = clock
        self._trust = trust
        self._lock = threading.Lock()
        self.event = threading.Event()
        self.trusted = True
        self.reason: CancelReason | None = None
        self.wire_reason = run_pb2.CANCEL_REASON_UNSPECIFIED
        self.message = ""

    def cancel(
        self, wire_reason: run_pb2.CancelReason, message: str = "", *, trusted: bool
    ) -> bool:
        """Tell the attempt to stop, and return whether that is news. The first reason stays."""
        with self._lock:
            is_news = self.reason is None or (self.trusted and not trusted)
            if self.reason is None:
                self.reason = reason_of(wire_reason)
                self.wire_reason = wire_reason
                self.message = message
            self.trusted = self.trusted and trusted
        self.event.set()
        return is_news

    def look(self) -> None:
        """Let the clock have its word: end the attempt's trust if its time is over."""
        if self.trusted and self._clock.now_ms() >= self._trust.end_ms:
            self.cancel(
                run_pb2.CANCEL_REASON_LEASE_LOST,
                NOT_ANSWERED,
                trusted=False,
            )

    def check(self) -> None:
        """Raise `Cancelled`, or its subclass that fits, if the attempt is to stop."""
        self.look()
        if self.reason is not None:
            kind = Cancelled if self.trusted else lost_error
            raise kind(self.reason, self.message)


def reason_of(wire_reason: run_pb2.CancelReason) -> CancelReason:
    """Return the word for a reason received; one that is not known is OTHER."""
    try:
        name = run_pb2.CancelReason.Name(wire_reason)
    except ValueError:
        return CancelReason.OTHER
    return CancelReason.__members__.get(name.removeprefix("CANCEL_REASON_"), CancelReason.OTHER)


class Trigger(StrEnum):
    """What caused a run."""

    SCHEDULE = "schedule"
    """The schedule."""
    MANUAL = "manual"
    """Somebody triggered it."""
    CATCH_UP = "catch_up"
    """It was missed, and is caught up."""
    OTHER = "other"
    """A cause that this version of the client does not know."""


def _trigger_of(wire: run_pb2.Trigger) -> Trigger:
    try:
        name = run_pb2.Trigger.Name(wire)
    except ValueError:
        return Trigger.OTHER
    return Trigger.__members__.get(name.removeprefix("TRIGGER_"), Trigger.OTHER)


class _Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that says of which attempt it speaks."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        own = self.extra or {}
        kwargs["extra"] = {**own, **(kwargs.get("extra") or {})}
        # A name holds no "%", so it may become part of a format.
        prefix = f"{own['job']} {own['slot']} attempt {own['attempt']}: "
        return (f"{prefix}{msg}" if isinstance(msg, str) else msg), kwargs


class AttemptContext:
    """One attempt at one run, as its handler sees it: what both kinds of handler share."""

    def __init__(
        self,
        assignment: session_pb2.Assignment,
        orders: Orders,
        clock: Clock,
        confirm: Callable[[], Awaitable[None]],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.job: str = assignment.job
        """The job's name."""
        self.slot: int = assignment.slot
        """The slot: milliseconds since 1970-01-01T00:00:00Z."""
        self.attempt: int = assignment.attempt
        """1 at first, 2 or more after a takeover or a failure."""
        self.token: str = assignment.token
        """Names this attempt. Opaque."""
        self.fence: int = assignment.fence
        """Grows with every claim of the job: for systems downstream that must refuse a late writer."""
        self.instance_id: str = assignment.instance_id
        """The instance that holds the claim, as history shows it."""
        self.trigger: Trigger = _trigger_of(assignment.trigger)
        """What caused the run."""
        self.payload: bytes = assignment.payload
        """What was given when the run was triggered; empty for scheduled runs."""
        self.log: logging.LoggerAdapter[logging.Logger] = _Log(
            _log, {"job": self.job, "slot": self.slot, "attempt": self.attempt}
        )
        """A logger (`anarchon.job`) whose messages say of which attempt they speak."""
        self._orders = orders
        self._clock = clock
        self._confirm = confirm
        self._loop = loop
        self._deadline_ms: int | None = None
        self._deadline: datetime | None = None
        if assignment.HasField("timeout"):
            timeout_ms = wire_to_ms(assignment.timeout)
            self._deadline_ms = clock.now_ms() + timeout_ms
            self._deadline = datetime.now(UTC) + timedelta(milliseconds=timeout_ms)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job} {self.slot} attempt {self.attempt}>"

    @property
    def scheduled_at(self) -> datetime:
        """The slot as a time, in UTC."""
        return _EPOCH + timedelta(milliseconds=self.slot)

    @property
    def deadline(self) -> datetime | None:
        """When the attempt's `timeout` is over, in UTC by this machine's clock. `None`: never."""
        return self._deadline

    @property
    def remaining(self) -> timedelta | None:
        """What is left of the attempt's `timeout`, never less than zero. `None`: no limit."""
        if self._deadline_ms is None:
            return None
        return timedelta(milliseconds=max(0, self._deadline_ms - self._clock.now_ms()))

    @property
    def cancelled(self) -> bool:
        """Whether the attempt is to stop."""
        self._orders.look()
        return self._orders.reason is not None

    @property
    def cancel_event(self) -> threading.Event:
        """Set when the attempt is to stop: for threads to wait on."""
        return self._orders.event

    def check(self) -> None:
        """Raise if the attempt is to stop, or if its lease can no longer be trusted.

        Cheap: no call is made. Raises `Cancelled`; where the attempt is no longer ours, its
        subclass `LeaseLost` or `Fenced`.
        """
        self._orders.check()


class Context(AttemptContext):
    """What an async handler is given. Cancellation reaches it as `asyncio.CancelledError`."""

    async def confirm(self) -> None:
        """Have the lease renewed at the store now: the thing to do just before what cannot be undone.

        Raises `LeaseLost` or `Fenced` if the attempt is no longer ours, `NotConfirmedError` if that
        cannot be told now, and `Cancelled` if it is to stop. Takes one round trip to the store.
        """
        self.check()
        await self._confirm()
        self.check()

    async def sleep(self, duration: Duration) -> None:
        """Wait for `duration`. Raises as `check()` does, once the time is over."""
        await asyncio.sleep(_length(duration).total_seconds())
        self.check()


class SyncContext(AttemptContext):
    """What a handler that is no coroutine is given. It runs in a thread of its own: it learns of a
    cancellation by `check()`, `sleep()`, `cancelled` or `cancel_event`.
    """

    def confirm(self) -> None:
        """Have the lease renewed at the store now, as `Context.confirm` does, and wait for it."""
        self.check()
        if self._loop is not None:
            answer = asyncio.run_coroutine_threadsafe(self._confirmed(), self._loop)
            try:
                answer.result(_CONFIRM_S)
            except TimeoutError:
                answer.cancel()
                raise NotConfirmedError("the client's loop is blocked") from None
        self.check()

    async def _confirmed(self) -> None:
        await self._confirm()

    def sleep(self, duration: Duration) -> None:
        """Wait for `duration`, but no longer than until a cancellation; then raise as `check()`."""
        self._orders.event.wait(_length(duration).total_seconds())
        self.check()


def _length(duration: Duration) -> timedelta:
    try:
        return to_timedelta(duration)
    except ValueError as error:
        raise JobError(f"sleep({duration!r:.80}): {error}") from None
