"""`AnarchonClient` and `Subscription`: they carry out what the session decides, on the running loop
or on one of their own. Imports the standard library, grpc's types and the rest of the client.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random as random_module
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import aclosing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import grpc

from anarchon import _session as session_
from anarchon._context import BootClock, Clock, Trust
from anarchon._duration import Duration, to_ms, to_text, to_timedelta
from anarchon._errors import (
    AnarchonError,
    ClientError,
    ForkedError,
    NotConfirmedError,
    SidecarError,
    SidecarUnavailableError,
)
from anarchon._jobs import Handlers, Job, collect
from anarchon._runner import ExitTimer, Runner, Watchdog
from anarchon._session import Session
from anarchon._transport import CallToken, Endpoint, GrpcTransport, Transport
from anarchon.v1 import run_pb2, session_pb2

STOP_GRACE = timedelta(seconds=20)
MAX_CONCURRENCY_DEFAULT, MAX_CONCURRENCY_MAX = 100, 10_000
_T = TypeVar("_T")
_log = logging.getLogger("anarchon")


class Waiter(Generic[_T]):
    """What a call will come to. `await` it on a loop, or ask for its `result()` in a thread.

    The call has begun in any case; nobody has to wait for it.
    """

    def __init__(self, future: concurrent.futures.Future[_T], what: str) -> None:
        self.future = future
        self._what = what

    def __await__(self) -> Generator[Any, None, _T]:
        # Not wrapped by asyncio: whoever gives up waiting does not undo the thing itself, and is
        # not told of an error for which nobody waits any more.
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def tell(_: concurrent.futures.Future[_T]) -> None:
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(arrive)

        self.future.add_done_callback(tell)
        yield from arrived
        return self.future.result()

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self.future.done()

    def result(self, timeout: Duration | None = None) -> _T:
        """Wait in this thread, and return the result or raise the error.

        Raises `TimeoutError` when `timeout` is over first, and `RuntimeError` on a loop, which
        would be blocked: `await` it there.
        """
        if not self.done() and _is_on_a_loop():
            raise RuntimeError("result() would block the running event loop: await it instead")
        if timeout is None:
            return self.future.result()
        limit = _duration("timeout", timeout)
        try:
            return self.future.result(limit.total_seconds())
        except TimeoutError:
            if self.done():
                raise  # it is the result
            raise TimeoutError(f"waited {to_text(limit)} for {self._what}") from None


class AnarchonClient:
    """An application's side of Anarchon.

    Nothing is connected before `subscribe` or `run`. After a fork make a new client in the new
    process.

    * `address`: the sidecar's, "host:port" or "unix:/path". Default: the environment's
      `ANARCHON_ADDRESS`, else `127.0.0.1:7420`.
    * `max_concurrency`: the most handlers that run at once, 1 to 10,000.
    * `stop_grace`: how long handlers may go on when the client stops.
    * `on_lease_lost`: "cancel" tells the handler; "exit" also ends the process where the handler
      has not stopped when the lease ends, be it after `stop()`. Only one subscription of a process
      may say "exit", and it needs `faulthandler`'s timer.
    * `token_file`: holds the call token. Default: the environment's `ANARCHON_TOKEN_FILE`.
    * `credentials`: for a sidecar on another machine, `grpc.ssl_channel_credentials(...)`.
    * `watched`: whether the sidecar, where it can see this process, takes its end for the end of its
      handlers, and hands their runs on at once. Not where what they started may outlive it.
    * `transport`, `clock`, `random`: for tests; see `anarchon.testing`.

    Raises `ClientError` for what is set up wrongly.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        max_concurrency: int = MAX_CONCURRENCY_DEFAULT,
        stop_grace: Duration = STOP_GRACE,
        on_lease_lost: Literal["cancel", "exit"] = "cancel",
        token_file: str | os.PathLike[str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        watched: bool = True,
        transport: Transport | None = None,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
    ) -> None:
        _check_concurrency(max_concurrency)
        if on_lease_lost not in ("cancel", "exit"):
            raise ClientError(f'on_lease_lost {on_lease_lost!r}: must be "cancel" or "exit"')
        self._max_concurrency = max_concurrency
        self._stop_grace = _duration("stop_grace", stop_grace)
        self._exits = on_lease_lost == "exit"
        self._watched = watched
        self._endpoint = Endpoint.of(address, credentials, token_file)
        self._transport = transport
        self._clock = clock or BootClock()
        self._random = random or random_module.SystemRandom().random
        self._subscriptions: list[Subscription] = []

    def subscribe(self, handlers: Handlers) -> Subscription:
        """Start running `handlers`, at once, and return the subscription.

        `handlers` are functions decorated with `@every` or `@cron`, and `Job`s. With a running
        event loop everything happens on that loop, otherwise on one in a thread of its own.

        A sidecar that is not there is no error: it is looked for until there is one. Raises
        `JobError` for what is wrong with a handler, `ClientError` for what is set up wrongly, and
        `ForkedError`. What the sidecar refuses is raised by `Subscription.ready` and `closed`.
        """
        _check_process()
        jobs = collect(handlers)
        # An error of the beginning should be raised here, not on the loop.
        CallToken(self._endpoint.token_file)
        self._endpoint.check_socket()
        request = session_pb2.SubscribeRequest(
            session_id=str(uuid.uuid4()),
            client=_client_info(watched=self._watched),
            jobs=[job.spec for job in jobs.values()],
            max_concurrency=self._max_concurrency,
        )
        if (size_bytes := request.ByteSize()) > session_.MESSAGE_MAX_BYTES:
            raise session_.too_large_error(size_bytes)
        driver = _Driver(
            jobs=jobs,
            session=Session(request, self._random),
            make_transport=lambda: self._transport or GrpcTransport(self._endpoint),
            clock=self._clock,
            exit_timer=ExitTimer() if self._exits else None,
        )
        subscription = Subscription(driver, request.session_id, self._stop_grace, self._endpoint)
        self._subscriptions = [s for s in self._subscriptions if not s._driver.closed.done()]
        self._subscriptions.append(subscription)
        return subscription

    def run(self, handlers: Handlers) -> None:
        """Run `handlers` until SIGINT or SIGTERM, then stop as `stop()` does.

        What it waits for is logged (level INFO); a second signal skips the grace, and cancels the
        handlers that still run. Blocks. To be called in the main thread, which alone receives signals; raises what
        `subscribe` and `Subscription.closed` raise, and `RuntimeError` with a running event loop.
        """
        if _is_on_a_loop():
            raise RuntimeError("run() blocks the event loop: `await client.subscribe(...).closed`")
        try:
            asyncio.run(self._run(handlers))
        except AnarchonError as error:
            # The message says what to do; the way it came through asyncio and gRPC does not help.
            raise error.with_traceback(None) from None

    async def _run(self, handlers: Handlers) -> None:
        subscription = self.subscribe(handlers)

        def stop() -> None:
            grace = timedelta(0) if subscription.is_stopping else None
            _ = subscription._stop(grace, "once more to cancel them")

        with _on_signals(stop):
            await subscription.closed

    def stop(self, grace: Duration | None = None) -> Waiter[None]:
        """Stop all subscriptions; see `Subscription.stop`."""
        _check_process()
        waiters = [subscription.stop(grace) for subscription in self._subscriptions]
        return Waiter(_all_of([waiter.future for waiter in waiters]), "the handlers to stop")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _left(self.stop(), error)


class Subscription:
    """Handlers that are running. Made by `AnarchonClient.subscribe`; safe to use in any thread.

    As a context manager, `with` or `async with`, it stops on leaving.
    """

    def __init__(
        self, driver: _Driver, session_id: str, stop_grace: timedelta, endpoint: Endpoint
    ) -> None:
        self.session_id = session_id
        """Names the session in the sidecar's list of clients."""
        self._driver = driver
        self._stop_grace = stop_grace
        self._endpoint = endpoint
        self._is_stopping = False
        driver.start()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._is_stopping

    @property
    def closed(self) -> Waiter[None]:
        """Done when the subscription is over: after `stop`, or with the error that ended it.

        That error is a `RefusedError` (also of its kinds) where the sidecar does not accept a job
        or the client, and a `SessionReplacedError`. It is logged where nobody has asked for it.
        """
        _check_process()
        self._driver.is_asked_for = True
        return Waiter(self._driver.closed, "the handlers to stop")

    def ready(self) -> Waiter[str]:
        """Done when the sidecar has accepted the jobs and answers: gives its instance's name.

        `await subscription.ready()`, or `subscription.ready().result("10s")` in a thread. Raises
        what `closed` raises.
        """
        _check_process()
        self._driver.is_ready_asked_for = True
        return Waiter(
            self._driver.ready, f"the sidecar at {self._endpoint.address} to accept the jobs"
        )

    def stop(self, grace: Duration | None = None) -> Waiter[None]:
        """Stop: no more runs are taken; handlers may go on for `grace`, then they are cancelled.

        `grace` is by default the client's `stop_grace`, and never longer than a job's own. Runs
        that were cancelled are handed over to other instances at once. Called again, it can shorten
        the grace. The waiter gives what `closed` gives.
        """
        return self._stop(grace)

    def _stop(self, grace: Duration | None, hint: str = "") -> Waiter[None]:
        _check_process()
        length = self._stop_grace if grace is None else _duration("grace", grace)
        self._is_stopping = True
        self._driver.post(session_.StopAsked(to_ms(length), hint))
        return Waiter(self._driver.closed, "the handlers to stop")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        waiter = self.stop()
        try:
            waiter.result()
        except AnarchonError:
            if error is None:
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await _left(self.stop(), error)


# ── The driver ──────────────────────────────────────────────────────────────────────────────────


class _Driver:
    """Feeds the session with facts and carries out its commands, all on one loop."""

    def __init__(
        self,
        *,
        jobs: dict[str, Job],
        session: Session,
        make_transport: Callable[[], Transport],
        clock: Clock,
        exit_timer: ExitTimer | None,
    ) -> None:
        self.ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self.closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Whether somebody holds `closed`, or `ready`, and so is told of an error.
        self.is_asked_for = False
        self.is_ready_asked_for = False
        self._jobs = jobs
        self._session = session
        self._make_transport = make_transport
        self._clock = clock
        self._exit_timer = exit_timer
        self._trust = Trust()
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._stream: asyncio.Task[None] | None = None
        self._confirms: dict[int, asyncio.Future[None]] = {}
        self._tickets = 0
        # Set by start() and run(), before anything is carried out.
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Future[None]
        self._transport: Transport
        self._runner: Runner
        self._watchdog: Watchdog

    def start(self) -> None:
        """Begin: on the running loop, or on one in a thread of its own."""
        if _is_on_a_loop():
            self._loop = asyncio.get_running_loop()
            self._main = self._loop.create_task(self._run(), name="anarchon-client")
            return
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_in_thread, name="anarchon-client", daemon=True).start()

    def _run_in_thread(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    def post(self, fact: session_.Fact) -> None:
        """Take in a fact, from any thread. After the end it means nothing."""
        if not self.closed.done():
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._feed, fact)

    async def _run(self) -> None:
        error: BaseException | None = None
        try:
            await self._carry_on()
        except AnarchonError as refused:
            error = refused.with_traceback(None)  # raised again where somebody waits
        except asyncio.CancelledError:
            error = AnarchonError("the event loop ended before the client was stopped: stop() it")
            raise
        except BaseException as ours:
            error = ours
            _log.exception("the client has failed, which is an error of Anarchon's own")
            raise
        finally:
            self._settle(error)

    async def _carry_on(self) -> None:
        self._over = self._loop.create_future()
        self._runner = Runner(
            self._jobs,
            self._clock,
            self._trust,
            on_end=self._handler_ended,
            on_late_end=self._let_live,
            confirm=self._confirm,
        )
        self._transport = self._make_transport()
        self._watchdog = Watchdog(self._clock, self._trust, self._trust_over)
        try:
            self._feed(session_.Start())
            await self._over
        finally:
            # Nobody renews from here on: what still runs is told so.
            self._runner.abandon()
            self._watchdog.stop()
            if self._timer is not None:
                self._timer.cancel()
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            await self._transport.close()

    def _settle(self, error: BaseException | None) -> None:
        self._let_live()
        for waiting in self._confirms.values():
            if not waiting.done():
                waiting.set_exception(NotConfirmedError("the client has stopped"))
        if not self.ready.done():
            self.ready.set_exception(error or AnarchonError("stopped before it was ready"))
        if error is not None:
            self.closed.set_exception(error)
        else:
            self.closed.set_result(None)

    # ── Facts ───────────────────────────────────────────────────────────────────────────────────

    def _feed(self, fact: session_.Fact) -> None:
        if self._over.done():
            return
        for command in self._session.handle(self._clock.now_ms(), fact):
            self._carry_out(command)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at_ms = self._session.wake_at_ms
        if wake_at_ms is not None:
            delay_ms = max(0, wake_at_ms - self._clock.now_ms())
            self._timer = self._loop.call_later(delay_ms / 1_000, self._feed, session_.Tick())
        self._watchdog.arm(on=self._runner.is_running)
        if self._exit_timer is not None:
            self._exit_timer.set(self._session.exit_at_ms, self._clock.now_ms())

    def _handler_ended(self, token: str, outcome: run_pb2.Outcome) -> None:
        self._feed(session_.HandlerEnded(token, outcome))

    def _let_live(self) -> None:
        """After the end, from any thread: let go of the exit timer once no handler runs any more."""
        if self._exit_timer is not None and not self._runner.is_running:
            self._exit_timer.close()

    def _trust_over(self) -> None:
        """In the watchdog's thread: tell the handlers at once, the loop when it comes round."""
        lost = self._runner.expire()
        with suppress(RuntimeError):  # the loop is gone, and its handlers with it
            self._loop.call_soon_threadsafe(self._feed, session_.TrustOver(lost))

    async def _confirm(self, token: str) -> None:
        self._tickets += 1
        ticket = self._tickets
        waiting = self._confirms[ticket] = self._loop.create_future()
        self._feed(session_.ConfirmAsked(token, ticket))
        try:
            await waiting
        finally:
            del self._confirms[ticket]

    # ── Commands ────────────────────────────────────────────────────────────────────────────────

    def _carry_out(self, command: session_.Command) -> None:
        match command:
            case session_.OpenStream():
                self._stream = self._spawn(self._read_stream(command))
            case session_.EndStream():
                if self._stream is not None:
                    self._stream.cancel()
            case session_.SendKeepAlive():
                _ = self._spawn(self._send_keep_alive(command))
            case session_.SendResults():
                _ = self._spawn(self._send_results(command))
            case session_.SendClose():
                _ = self._spawn(self._send_close(command))
            case session_.Log(level, message):
                _LOG[level](message)
            case session_.Closed(error):
                self._end(error)
            case _:
                self._carry_out_attempts(command)

    def _end(self, error: AnarchonError | None) -> None:
        if error is None:
            self._over.set_result(None)
            return
        is_raised = self.is_asked_for or (self.is_ready_asked_for and not self.ready.done())
        if not is_raised:
            _log.error("the client stops: %s", error)
        self._over.set_exception(error)

    def _carry_out_attempts(self, command: session_.Command) -> None:
        match command:
            case session_.StartHandler(assignment):
                self._runner.start(assignment)
            case session_.CancelHandler(token, reason, message, trusted):
                self._runner.cancel(token, reason, message, trusted=trusted)
            case session_.SetTrust(end_ms):
                self._trust.end_ms = end_ms
            case session_.Ready(instance_id):
                self.ready.set_result(instance_id)
            case session_.AnswerConfirm(ticket, error):
                waiting = self._confirms.get(ticket)
                if waiting is None or waiting.done():
                    return  # the handler has ended meanwhile
                if error is None:
                    waiting.set_result(None)
                else:
                    waiting.set_exception(error)
            case _:
                raise AssertionError(command)

    async def _read_stream(self, command: session_.OpenStream) -> None:
        error: SidecarError = SidecarUnavailableError("the sidecar ended the stream")
        try:
            async with aclosing(self._transport.subscribe(command.request)) as events:
                async for event in events:
                    self._feed(session_.StreamEvent(command.stream, event))
        except SidecarError as ended:
            error = ended
        self._feed(session_.StreamEnded(command.stream, error))

    async def _send_keep_alive(self, command: session_.SendKeepAlive) -> None:
        try:
            response = await self._transport.keep_alive(command.request, command.timeout_ms / 1_000)
        except SidecarError as error:
            self._feed(session_.KeepAliveFailed(command.number, error))
        else:
            self._feed(session_.KeepAliveAnswered(command.number, response))

    async def _send_results(self, command: session_.SendResults) -> None:
        try:
            response = await self._transport.complete(command.request, command.timeout_ms / 1_000)
        except SidecarError as error:
            self._feed(session_.ResultsFailed(command.tokens, error))
        else:
            self._feed(session_.ResultsAnswered(command.tokens, response))

    async def _send_close(self, command: session_.SendClose) -> None:
        try:
            await self._transport.close_session(command.request, command.timeout_ms / 1_000)
        except SidecarError as error:
            _log.warning("the session could not be closed, and ends by time-out: %s", error)
        self._feed(session_.CloseEnded())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        call = self._loop.create_task(coroutine)
        self._calls.add(call)
        call.add_done_callback(self._call_ended)
        return call

    def _call_ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) and not self._over.done():
            self._over.set_exception(error)


_LOG: dict[str, Callable[[str], None]] = {
    level: partial(getattr(_log, level), "%s") for level in ("info", "warning", "error")
}


# ── Parts ───────────────────────────────────────────────────────────────────────────────────────


async def _left(waiter: Waiter[None], error: BaseException | None) -> None:
    """Wait for a stop on leaving a context; an error already on its way comes first."""
    try:
        await waiter
    except AnarchonError:
        if error is None:
            raise


def _all_of(futures: list[concurrent.futures.Future[None]]) -> concurrent.futures.Future[None]:
    """Done when all are; with the first error, if there is one."""
    whole: concurrent.futures.Future[None] = concurrent.futures.Future()
    left = len(futures)
    lock = threading.Lock()

    def one_is_done(_: concurrent.futures.Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left > 0:
                return
        error = next((e for future in futures if (e := future.exception())), None)
        if error is None:
            whole.set_result(None)
        else:
            whole.set_exception(error)

    for future in futures:
        future.add_done_callback(one_is_done)
    if not futures:
        whole.set_result(None)
    return whole


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the running loop at SIGINT and SIGTERM; put back what was there before."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


# The process in which a client of this module has connected first.
_process_id: int | None = None


def _check_process() -> None:
    """Raise `ForkedError` in the child of a process that has connected: gRPC does not survive it."""
    global _process_id  # noqa: PLW0603 - it is a fact about the process
    if _process_id is None:
        _process_id = os.getpid()
    if _process_id != os.getpid():
        raise ForkedError(
            f"Anarchon was connected in process {_process_id}, of which this one, {os.getpid()}, "
            "is a fork: subscribe after forking (in the worker's start-up hook), or start "
            'processes with "spawn"'
        )


def _client_info(*, watched: bool) -> session_pb2.ClientInfo:
    start_ticks, pid_namespace = _process_identity() if watched else (0, 0)
    return session_pb2.ClientInfo(
        language="python",
        version=metadata.version("anarchon"),
        host=socket.gethostname(),
        process_id=os.getpid(),
        process_start_ticks=start_ticks,
        pid_namespace=pid_namespace,
    )


def _process_identity() -> tuple[int, int]:
    """What tells this process from a later one with its number; zeros where there is no /proc."""
    try:
        # The command's name, in brackets, may hold anything; the fields are counted after it.
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return int(fields[22 - 3]), Path("/proc/self/ns/pid").stat().st_ino
    except (OSError, ValueError, IndexError):
        return 0, 0


def _check_concurrency(value: object) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 1 <= value <= MAX_CONCURRENCY_MAX
    ):
        raise ClientError(
            f"max_concurrency {value!r}: must be a whole number from 1 to {MAX_CONCURRENCY_MAX:,}"
        )


def _duration(field: str, value: Duration) -> timedelta:
    try:
        return to_timedelta(value)
    except ValueError as error:
        raise ClientError(f"{field} {value!r:.80}: {error}") from None
