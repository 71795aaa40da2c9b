"""Runs handlers, on the loop or in threads, and sees that they are told to stop: by the session, and
by a thread of its own when the loop is blocked. Imports the standard library, the wire's messages
and the client's own `_context`, `_errors`, `_jobs`.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import json
import logging
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import cast

from anarchon._context import Clock, Context, Orders, SyncContext, Trust
from anarchon._duration import ms_to_wire, to_text, to_wire
from anarchon._errors import (
    Cancelled,
    CancelReason,
    ClientError,
    ForeignError,
    Permanent,
    Retry,
)
from anarchon._jobs import Job
from anarchon.v1 import run_pb2, session_pb2

RESULT_MAX_BYTES = 16 * 1024
MESSAGE_MAX_BYTES = 4 * 1024
TRACE_MAX_BYTES = 16 * 1024
# The thread waits on a clock that stops while the machine sleeps, so it looks at least this often.
_WATCH_EVERY_S = 1.0
_STOPPED_AS_ASKED = (CancelReason.SHUTDOWN, CancelReason.SUPERSEDED, CancelReason.REQUESTED)


@dataclass(slots=True)
class _Attempt:
    """An attempt whose handler runs."""

    orders: Orders
    log: logging.LoggerAdapter[logging.Logger]
    started_at_ms: int
    task: asyncio.Task[str] | None = None
    # Which cancellations have reached the task: the polite one, the one that ends trust.
    delivered: set[bool] = field(default_factory=set)


class Runner:
    """Runs the handlers of one session, on the running loop.

    `on_end(token, outcome)` is called on the loop; `on_late_end()`, in any thread, when a handler
    has ended after `abandon()`; `confirm(token)` renews a lease or raises.
    """

    def __init__(
        self,
        jobs: Mapping[str, Job],
        clock: Clock,
        trust: Trust,
        *,
        on_end: Callable[[str, run_pb2.Outcome], None],
        on_late_end: Callable[[], None],
        confirm: Callable[[str], Awaitable[None]],
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._trust = trust
        self._on_end = on_end
        self._on_late_end = on_late_end
        self._confirm = confirm
        self._loop = asyncio.get_running_loop()
        self._threads = _Threads()
        self._attempts: dict[str, _Attempt] = {}
        self._is_abandoned = False
        # Held to tell the loop of an end: what comes before `abandon()` is heard there.
        self._telling = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether any handler runs."""
        return bool(self._attempts)

    def start(self, assignment: session_pb2.Assignment) -> None:
        """Run the handler of an attempt."""
        job, token = self._jobs[assignment.job], assignment.token
        orders = Orders(self._clock, self._trust)

        async def confirm() -> None:
            await self._confirm(token)

        if job.is_async:
            context = Context(assignment, orders, self._clock, confirm)
            attempt = self._attempts[token] = _Attempt(orders, context.log, self._clock.now_ms())
            attempt.task = self._loop.create_task(
                _called(job, context), name=f"{job.name} {assignment.slot}"
            )
            attempt.task.add_done_callback(lambda task: self._task_ended(token, task))
        else:
            sync_context = SyncContext(assignment, orders, self._clock, confirm, self._loop)
            self._attempts[token] = _Attempt(orders, sync_context.log, self._clock.now_ms())
            run_in = contextvars.copy_context()
            self._threads.run(lambda: self._run_in_thread(token, job, sync_context, run_in))

    def cancel(
        self, token: str, reason: run_pb2.CancelReason, message: str, *, trusted: bool
    ) -> None:
        """Tell a handler to stop. A second time only if its trust has ended since the first."""
        attempt = self._attempts.get(token)
        if attempt is None:
            return  # it has just ended
        attempt.orders.cancel(reason, message, trusted=trusted)
        if attempt.task is not None and trusted not in attempt.delivered:
            attempt.delivered |= {trusted, True}
            attempt.task.cancel()

    def expire(self) -> tuple[str, ...]:
        """Tell every handler whose trust is over, from any thread; return their tokens.

        Handlers on the loop learn it when the loop comes round to it, those in threads at once.
        """
        lost = []
        for token, attempt in list(self._attempts.items()):
            attempt.orders.look()
            if not attempt.orders.trusted:
                lost.append(token)
        return tuple(lost)

    def abandon(self) -> None:
        """Tell all that is left that nobody renews its lease any more. Its results are lost."""
        with self._telling:
            self._is_abandoned = True
        for token in list(self._attempts):
            reason = run_pb2.CANCEL_REASON_LEASE_LOST
            self.cancel(token, reason, "the client has stopped", trusted=False)

    def _task_ended(self, token: str, task: asyncio.Task[str]) -> None:
        attempt = self._attempts[token]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            outcome = _outcome_of_result(task.result())
        else:
            outcome = _outcome_of_error(error, attempt.orders)
        self._ended(token, outcome)
        _tell(attempt, outcome, error)

    def _run_in_thread(
        self, token: str, job: Job, context: SyncContext, run_in: contextvars.Context
    ) -> None:
        attempt, error = self._attempts[token], None
        try:
            outcome = _outcome_of_result(run_in.run(_call, job, context))
        except BaseException as raised:  # noqa: BLE001 - a handler's error is its result
            error = raised
            outcome = _outcome_of_error(error, attempt.orders)
        self._ended_in_thread(token, outcome)
        # After the report: what the application's logging does must not hold it up.
        _tell(attempt, outcome, error)
        error = None  # it refers to this frame

    def _ended_in_thread(self, token: str, outcome: run_pb2.Outcome) -> None:
        with self._telling, suppress(RuntimeError):  # raised where the loop was just closed
            if not self._is_abandoned:
                self._loop.call_soon_threadsafe(self._ended, token, outcome)
                return
        self._ended_late(token)

    def _ended(self, token: str, outcome: run_pb2.Outcome) -> None:
        if self._is_abandoned:
            self._ended_late(token)
            return
        attempt = self._attempts.pop(token)
        elapsed_ms = self._clock.now_ms() - attempt.started_at_ms
        outcome.elapsed.CopyFrom(ms_to_wire(elapsed_ms))
        self._on_end(token, outcome)

    def _ended_late(self, token: str) -> None:
        attempt = self._attempts.pop(token)
        self._on_late_end()
        attempt.log.warning("ended after its client had stopped: its result is lost")


def _tell(attempt: _Attempt, outcome: run_pb2.Outcome, error: BaseException | None) -> None:
    """Log how an attempt ended that has not succeeded: the application's people look there first."""
    orders = attempt.orders
    if outcome.HasField("failure"):
        assert error is not None, "it has failed"
        _tell_failure(attempt.log, outcome.failure, error)
    elif outcome.HasField("stopped"):
        level = logging.INFO if orders.reason in _STOPPED_AS_ASKED else logging.WARNING
        why = f"{orders.reason}: {orders.message}" if orders.message else orders.reason
        attempt.log.log(level, "stopped (%s)", why)


def _tell_failure(
    log: logging.LoggerAdapter[logging.Logger], failure: run_pb2.Failure, error: BaseException
) -> None:
    """One line for what a handler said on purpose, and for a command; else with the trace."""
    kind = type(error)
    if issubclass(kind, Retry):
        after = failure.retry_after.ToTimedelta()
        asks = f"a retry after {to_text(after)}" if after else "a retry"
        is_its_own = failure.type == _name_of(kind)
        said = filter(None, ("" if is_its_own else failure.type, failure.message))
        log.warning("%s", ": ".join((f"failed, and asks for {asks}", *said)))
    elif issubclass(kind, ForeignError):
        log.error("failed: %s", failure.message)
    else:
        try:
            log.error("failed", exc_info=(kind, error, _handlers_part(error)))
        except SystemExit:
            # By the error's own code, which ran when its trace was to be written. As in `_called`.
            log.error("failed: %s: %s", failure.type, failure.message)


async def _called(job: Job, context: Context) -> str:
    handler = cast("Callable[..., Awaitable[object]]", job.handler)
    try:
        # The value becomes text here, because that may run the handler's own code: where it raises,
        # the handler has failed.
        return _text_of(await (handler(context) if job.takes_context else handler()))
    except SystemExit as error:
        code = _safely(partial(repr, error.code), "...")
        # Let through, it would end the loop, and with it every other handler.
        raise RuntimeError(f"the handler called sys.exit({code})") from error


def _call(job: Job, context: SyncContext) -> str:
    value = job.handler(context) if job.takes_context else job.handler()
    if asyncio.iscoroutine(value):
        value.close()
        raise TypeError(f"job {job.name!r}: the handler gave a coroutine back: make it async def")
    return _text_of(value)


class _Threads:
    """Daemon threads for handlers that are no coroutines: one each, kept for the next.

    Daemons, because a handler that never ends must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def run(self, call: Callable[[], None]) -> None:
        with self._lock:
            is_free = self._idle > 0
            if is_free:
                self._idle -= 1
            else:
                self._count += 1
                name = f"anarchon-handler-{self._count}"
        self._calls.put(call)
        if not is_free:
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                self._idle += 1


# ── Outcomes ────────────────────────────────────────────────────────────────────────────────────


def _outcome_of_result(text: str) -> run_pb2.Outcome:
    return run_pb2.Outcome(success=run_pb2.Success(result=text))


def _text_of(value: object) -> str:
    """A text as it is, nothing as nothing, all else as JSON, or as Python shows it; cut.

    Raises what the value's own code raises while JSON is made of it.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return _cut(value, RESULT_MAX_BYTES)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = _shown(value)
    return _cut(text, RESULT_MAX_BYTES)


def _outcome_of_error(error: BaseException, orders: Orders) -> run_pb2.Outcome:
    """Never raises, whatever the error's own code does: the attempt would never end."""
    if orders.reason is not None and issubclass(type(error), Cancelled | asyncio.CancelledError):
        return run_pb2.Outcome(stopped=run_pb2.Stopped(reason=orders.wire_reason))
    try:
        failure = _failure_of(error)
    except BaseException as broken:  # noqa: BLE001 - as above
        why = f"{_name_of(type(broken))}: {_shown(broken)}"
        failure = run_pb2.Failure(
            type=_name_of(type(error)),
            message=_cut(f"its error cannot be read: {why}", MESSAGE_MAX_BYTES),
            stack_trace=_trace_of(error),
        )
    return run_pb2.Outcome(failure=failure)


def _failure_of(error: BaseException) -> run_pb2.Failure:
    # What a handler wants said of a failure it may wrap around the error itself.
    cause = error.__cause__ if isinstance(error, Retry | Permanent) else None
    message = _shown(error)
    if cause is not None and not message:
        message = _shown(cause)
    failure = run_pb2.Failure(
        type=_name_of(type(error if cause is None else cause)),
        message=_cut(message, MESSAGE_MAX_BYTES),
        stack_trace=_trace_of(error),
        permanent=isinstance(error, Permanent),
    )
    if isinstance(error, Retry) and error.after is not None:
        failure.retry_after.CopyFrom(to_wire(error.after))
    return failure


def _name_of(kind: type) -> str:
    def qualified() -> str:
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"{module}{kind.__qualname__}"

    return _cut(_safely(qualified, "<a type without a name>"), MESSAGE_MAX_BYTES)


def _trace_of(error: BaseException) -> str:
    if issubclass(type(error), ForeignError):
        return _cut_start(_safely(lambda: cast("ForeignError", error).details, ""), TRACE_MAX_BYTES)

    def text() -> str:
        shown = traceback.TracebackException.from_exception(error)
        _strip(shown)
        return "".join(shown.format())

    return _cut_start(_safely(text, "<cannot be shown>"), TRACE_MAX_BYTES)


_OURS = _called.__code__.co_filename


def _strip(shown: traceback.TracebackException) -> None:
    """Take from the beginning of every trace what is not the handler's, but of this module."""
    left = [shown]
    while left:
        one = left.pop()
        while one.stack and one.stack[0].filename == _OURS:
            del one.stack[0]
        left += [each for each in (one.__cause__, one.__context__) if each is not None]
        left += one.exceptions or ()


def _handlers_part(error: BaseException) -> TracebackType | None:
    """The error's traceback from where it leaves this module for the first time."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename == _OURS:
        part = part.tb_next
    return part


def _shown(value: object) -> str:
    instead = _safely(
        lambda: f"<{type(value).__qualname__} that cannot be shown>", "<cannot be shown>"
    )
    # Joined, because what str() gives may be of a subclass, with methods of its own.
    return _safely(lambda: "".join([str(value)]), instead)


def _safely(show: Callable[[], str], instead: str) -> str:
    """What `show` gives, which runs a stranger's code; `instead` where that raises anything.

    For what only people read. `SystemExit` must not get through either: it would end the loop.
    """
    try:
        return show()
    except BaseException:  # noqa: BLE001 - as above
        return instead


def _cut(text: str, max_bytes: int) -> str:
    """The beginning of a text, as Unicode that can be sent."""
    # str.encode, because a subclass may have an `encode` of its own.
    return str.encode(text, "utf-8", "backslashreplace")[:max_bytes].decode("utf-8", "ignore")


def _cut_start(text: str, max_bytes: int) -> str:
    """The end of a text, as Unicode that can be sent."""
    return str.encode(text, "utf-8", "backslashreplace")[-max_bytes:].decode("utf-8", "ignore")


# ── Trust that ends although the loop is blocked ────────────────────────────────────────────────


class Watchdog:
    """A thread that calls `on_over` when trust ends, whatever the loop is doing.

    `on_over` is called in that thread, once for each time it was armed.
    """

    def __init__(self, clock: Clock, trust: Trust, on_over: Callable[[], None]) -> None:
        self._clock = clock
        self._trust = trust
        self._on_over = on_over
        self._changed = threading.Condition()
        self._is_armed = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._watch, name="anarchon-trust", daemon=True)
        self._thread.start()

    def arm(self, *, on: bool) -> None:
        """Watch, or not: to be called when trust has changed and when handlers start and end."""
        with self._changed:
            self._is_armed = on
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, and wait for that."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        while self._wait_for_the_end():
            self._on_over()

    def _wait_for_the_end(self) -> bool:
        """Return True when trust has ended, False when there is nothing more to watch."""
        with self._changed:
            while not self._is_stopped:
                # In this order: an end that is moved on in between counts.
                now_ms = self._clock.now_ms()
                left_ms = self._trust.end_ms - now_ms
                if self._is_armed and left_ms <= 0:
                    self._is_armed = False
                    return True
                wait_s = min(left_ms / 1_000, _WATCH_EVERY_S) if self._is_armed else None
                self._changed.wait(wait_s)
        return False


class ExitTimer:
    """Ends the process at a given time, also with the interpreter's lock held by a handler.

    The system has one such timer a process (`faulthandler.dump_traceback_later`), which writes the
    stacks of all threads to standard error and exits with status 1. It does not count the time for
    which the machine sleeps. Raises `ClientError` where another session has it.
    """

    _owner: ExitTimer | None = None

    def __init__(self) -> None:
        if ExitTimer._owner is not None:
            raise ClientError(
                'on_lease_lost="exit" is in use by another subscription of this process: there is '
                "one such timer a process. Subscribe all handlers at once"
            )
        ExitTimer._owner = self
        self._at_ms: int | None = None

    def set(self, at_ms: int | None, now_ms: int) -> None:
        """End the process at `at_ms`; `None`: do not."""
        if at_ms == self._at_ms:
            return
        self._at_ms = at_ms
        if at_ms is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            left_s = max(at_ms - now_ms, 1) / 1_000
            faulthandler.dump_traceback_later(left_s, exit=True)

    def close(self) -> None:
        """Let the process live, and others use the timer. May be called again, from any thread."""
        if ExitTimer._owner is self:
            self.set(None, 0)
            ExitTimer._owner = None
