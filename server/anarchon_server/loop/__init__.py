"""Drives the engine: feeds it what happens and carries out what it decides. Decides nothing itself.

Imports core, `clock` and `failpoints`. Everything runs on one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from anarchon_server import failpoints
from anarchon_server.clock import PULSE_MS, Clock, PauseDetector, Timer, sleep
from anarchon_server.core import limits, messages
from anarchon_server.core.errors import (
    AnarchonError,
    OutcomeUnknown,
    RefusedError,
    StoreError,
    StoreUnavailable,
)
from anarchon_server.core.model import Client, JobSpec, Outcome
from anarchon_server.core.policy import Job
from anarchon_server.core.store import Reply, Store
from anarchon_server.loop.processes import ProcessWatch, watchable
from anarchon_server.loop.streams import Event, Stream

if TYPE_CHECKING:
    from anarchon_server.core.engine import Status

__all__ = ["Event", "Loop", "Stream"]

_log = logging.getLogger("anarchon")

_WATCH_AGAIN_MS = limits.SECOND

T = TypeVar("T")
Request = messages.KeepAlive | messages.Complete | messages.CloseSession


class Steps(Protocol):
    """What is driven: the engine."""

    def step(self, now: int, event: messages.Input) -> list[messages.Command]:
        """Takes in what happened and decides what to do."""
        ...

    @property
    def wake_at(self) -> int | None:
        """When a Tick is wanted, on the boot-time clock."""
        ...

    def status(self, now: int) -> Status:
        """How the instance is."""
        ...

    def check_spec(self, spec: JobSpec, wall_at: int) -> None:
        """Raises `InvalidError` or `UnsupportedError` for a spec that would be refused."""
        ...

    def resolve_stored(self, spec: JobSpec, wall_at: int) -> Job:
        """The job of a definition that the store has, or what `check_spec` raises."""
        ...


class Loop:
    """One engine, its store, its clients and its timers.

    `start` needs a running event loop; `stop` asks the engine to stop and `stopped` tells when
    it has; `close` ends everything at once. While `store_open` is false no call reaches the store:
    each is answered as if it were away. `op_timeout_ms` bounds `read`; the engine's own calls bring
    their time limit with them.
    """

    def __init__(
        self,
        engine: Steps,
        store: Store,
        clock: Clock,
        *,
        op_timeout_ms: int = limits.OP_TIMEOUT,
        on_status: Callable[[Status], None] = lambda _: None,
        store_open: bool = True,
        pulse_ms: int = PULSE_MS,
    ) -> None:
        self.store = store
        self.store_open = store_open
        self.clock = clock
        self._engine = engine
        self._op_timeout_ms = op_timeout_ms
        self._on_status = on_status
        self._pulse_ms = pulse_ms
        self._detector = PauseDetector(clock.boot_ms(), pulse_ms)
        self._inputs: deque[messages.Input] = deque()
        self._stepping = False
        self._timer: Timer | None = None
        self._timer_at: int | None = None
        self._pulse_timer: Timer | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._streams: dict[int, Stream] = {}
        self._clients: dict[str, Client] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._processes = ProcessWatch(lambda s: self.feed(messages.ClientExited(s)))
        self._unexpected: set[tuple[str, str]] = set()
        self._closed = False
        self._listeners: set[asyncio.Event] = set()
        self._stopped: asyncio.Future[None] | None = None

    # ── Life ────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin: the engine's first tick, the pulse and the store's notifications."""
        self._stopped = asyncio.get_running_loop().create_future()
        self._detector.pulse(self.clock.boot_ms())
        self._watch = asyncio.create_task(self._watch_store())
        self.feed(messages.Tick())
        self._pulse()

    def stop(self) -> None:
        """Ask the engine to stop; a second time, to skip the grace (S23)."""
        self.feed(messages.Stop())

    async def stopped(self) -> None:
        """Wait until the engine has stopped. Raises what broke it, if something did."""
        assert self._stopped is not None, "started first"
        await asyncio.shield(self._stopped)

    def fail(self, error: Exception) -> None:
        """Go no further: `stopped` raises `error`."""
        self._closed = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_exception(error)

    async def close(self) -> None:
        """End every stream, request and call at once."""
        self._closed = True
        self.tell_news()
        for timer in (self._timer, self._pulse_timer):
            if timer is not None:
                timer.cancel()
        self._processes.close()
        gone = RefusedError("DRAINING", "the sidecar is going away")
        for stream in self._streams.values():
            stream.end(gone)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(gone)
        tasks = [*self._calls, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until no call to the store is under way: for clocks that stand still meanwhile."""
        while self._calls:
            await asyncio.wait(tuple(self._calls))

    def status(self) -> Status:
        """How the instance is now."""
        return self._engine.status(self.clock.boot_ms())

    def wall_ms(self) -> int:
        """Return the host's clock in milliseconds since the epoch."""
        return self.clock.wall_us() // 1_000

    def check_spec(self, spec: JobSpec) -> None:
        """Raise `InvalidError` or `UnsupportedError` for a spec that Subscribe would refuse."""
        self._engine.check_spec(spec, self.wall_ms())

    def resolve_stored(self, spec: JobSpec) -> Job:
        """Return the job of a definition that the store has. Raises as `check_spec` does."""
        return self._engine.resolve_stored(spec, self.wall_ms())

    # ── Clients ─────────────────────────────────────────────────────────────────────────────────

    def subscribe(
        self,
        session_id: str,
        client: Client,
        specs: tuple[JobSpec, ...],
        max_concurrency: int,
        in_flight: tuple[str, ...],
    ) -> Stream:
        """Open a stream for a session. Its owner calls `unsubscribe` when it is over."""
        self._count += 1
        stream = Stream(session_id, self._count)
        if self._closed:
            stream.end(RefusedError("DRAINING", "the sidecar is going away"))
            return stream
        self._streams[stream.stream_id] = stream
        can_watch = watchable(client)
        if can_watch:
            self._clients[session_id] = client
        self.feed(
            messages.Subscribe(
                session_id=session_id,
                stream_id=stream.stream_id,
                client=client,
                specs=specs,
                max_concurrency=max_concurrency,
                in_flight=in_flight,
                wall_at=self.wall_ms(),
                watchable=can_watch,
            )
        )
        return stream

    def unsubscribe(self, stream: Stream) -> None:
        """Let go of a stream; tells the engine unless the engine itself ended it."""
        known = self._streams.pop(stream.stream_id, None)
        if known is not None and not stream.is_ended:
            stream.end(None)
            self.feed(messages.StreamEnded(stream.session_id, stream.stream_id))
        if all(other.session_id != stream.session_id for other in self._streams.values()):
            self._clients.pop(stream.session_id, None)

    async def keep_alive(
        self,
        session_id: str,
        in_flight: tuple[str, ...],
        *,
        draining: bool = False,
        confirm: tuple[str, ...] = (),
    ) -> messages.KeepAliveAnswer:
        """Return what the client may still believe. Raises `NotFoundError`: subscribe again."""
        answer = await self._ask(
            lambda number: messages.KeepAlive(number, session_id, in_flight, draining, confirm)
        )
        assert isinstance(answer, messages.KeepAliveAnswer), f"a keep-alive was answered {answer}"
        return answer

    async def complete(self, results: tuple[tuple[str, Outcome], ...]) -> messages.CompleteAnswer:
        """Return one receipt a result, in their order, once the store has answered for each."""
        answer = await self._ask(lambda number: messages.Complete(number, results))
        assert isinstance(answer, messages.CompleteAnswer), f"results were answered {answer}"
        return answer

    async def close_session(self, session_id: str, stopped: tuple[str, ...]) -> None:
        """End a session at once; `stopped` are attempts that surely stopped without a result."""
        await self._ask(lambda number: messages.CloseSession(number, session_id, stopped))

    async def _ask(
        self, make: Callable[[int], Request]
    ) -> messages.KeepAliveAnswer | messages.CompleteAnswer | messages.Closed:
        self.check_running()
        self._count += 1
        number = self._count
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.feed(make(number))
            result: messages.KeepAliveAnswer | messages.CompleteAnswer | messages.Closed
            result = await answer
            return result
        finally:
            del self._answers[number]

    # ── Reading the store, for people ───────────────────────────────────────────────────────────

    async def read(self, call: Callable[[], Awaitable[Reply[T]]]) -> Reply[T]:
        """Return a read of the store, made within the time limit. Raises `StoreError`."""
        self._check_open()
        try:
            async with asyncio.timeout(self._op_timeout_ms / 1_000):
                return await call()
        except TimeoutError:
            limit_s = self._op_timeout_ms / 1_000
            raise StoreUnavailable(f"the store did not answer within {limit_s:g} s") from None

    @contextmanager
    def news(self) -> Iterator[asyncio.Event]:
        """Lend an event that is set when runs may have changed, and when the loop is closed.

        Most changes by this instance set it, few by others: never rely on it.
        """
        event = asyncio.Event()
        self._listeners.add(event)
        try:
            yield event
        finally:
            self._listeners.discard(event)

    def tell_news(self) -> None:
        """Say that runs may have changed."""
        for event in self._listeners:
            event.set()

    def check_running(self) -> None:
        """Raise `RefusedError` once the loop is closed."""
        if self._closed:
            raise RefusedError("DRAINING", "the sidecar is going away")

    def _check_open(self) -> None:
        if not self.store_open:
            raise StoreUnavailable("the store could not be opened yet")

    # ── Steps ───────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: messages.Input) -> None:
        """Give the engine an input and carry out what it decides. Never waits."""
        self._inputs.append(event)
        if self._stepping or self._closed:
            return
        self._stepping = True
        try:
            while self._inputs:
                self._step(self._inputs.popleft())
            self._set_timer()
        except Exception as error:  # noqa: BLE001
            # A mistake of ours. Going on with a state nobody foresaw could do harm; stopping
            # dead cannot: leases lapse and others take over.
            _log.critical("engine_failed", exc_info=True)
            self.fail(error)
        finally:
            self._stepping = False

    def _step(self, event: messages.Input) -> None:
        now = self.clock.boot_ms()
        if gap_ms := self._detector.gap_ms(now):
            self._carry_out(self._engine.step(now, messages.Suspended(gap_ms)))
        self._carry_out(self._engine.step(now, event))

    def _carry_out(self, commands: list[messages.Command]) -> None:
        for command in commands:
            match command:
                case messages.CallStore():
                    call = asyncio.create_task(self._call_store(command))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
                case messages.Send():
                    self._send(command)
                case messages.EndStream():
                    self._end_stream(command)
                case messages.Answer():
                    self._answer(command)
                case messages.Log():
                    _write_log(command)
                case messages.WatchClient():
                    self._watch_client(command)
                case messages.UnwatchClient():
                    self._processes.unwatch(command.session_id)
                case messages.Stopped():
                    self._finish()

    def _finish(self) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _set_timer(self) -> None:
        wake_at = self._engine.wake_at
        if wake_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        self._timer = None if wake_at is None else self.clock.call_at(wake_at, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.feed(messages.Tick())

    def _pulse(self) -> None:
        """With every pulse: see whether time was lost, and whether readiness has changed."""
        now = self.clock.boot_ms()
        if gap_ms := self._detector.gap_ms(now):
            self.feed(messages.Suspended(gap_ms))
        self._detector.pulse(now)
        # A timer set before the machine slept is late by that long: set it anew.
        self._timer_at = None
        self._set_timer()
        if not self._closed:
            self._pulse_timer = self.clock.call_at(now + self._pulse_ms, self._pulse)
            self._on_status(self._engine.status(now))

    # ── Commands ────────────────────────────────────────────────────────────────────────────────

    def _send(self, command: messages.Send) -> None:
        stream = self._streams.get(command.stream_id)
        if stream is None or stream.is_ended:
            return
        if stream.full:
            stream.end(
                RefusedError(
                    "LIMIT_EXCEEDED",
                    f"the client left {limits.EVENT_QUEUE_MAX} events unread: read the stream, "
                    "and subscribe again",
                )
            )
            self.feed(messages.StreamEnded(command.session_id, command.stream_id))
            return
        stream.put(command.event)

    def _end_stream(self, command: messages.EndStream) -> None:
        stream = self._streams.pop(command.stream_id, None)
        if stream is not None:
            stream.end(command.error)

    def _answer(self, command: messages.Answer) -> None:
        future = self._answers.get(command.request_id)
        if future is None or future.done():
            return
        if isinstance(command.answer, AnarchonError):
            future.set_exception(command.answer)
        else:
            future.set_result(command.answer)

    def _watch_client(self, command: messages.WatchClient) -> None:
        client = self._clients.get(command.session_id)
        if client is None or client.process_id != command.process_id:
            return
        try:
            self._processes.watch(command.session_id, client)
        except OSError as error:
            # Its end will show when its session's time is over instead.
            _log.warning("client_not_watched", extra={"fields": {"error": str(error)}})

    async def _call_store(self, command: messages.CallStore) -> None:
        method = command.method
        failure: messages.StoreFailed | None = None
        try:
            self._check_open()
            await failpoints.reached(f"store.{method}.before")
            async with asyncio.timeout(command.timeout_ms / 1_000):
                reply: Reply[Any] = await getattr(self.store, method)(*command.arguments)
            await failpoints.reached(f"store.{method}.after")
            self.tell_news()
        except TimeoutError:
            text = f"{method}: no answer within {command.timeout_ms} ms"
            failure = messages.StoreFailed(command.call_id, text, unknown=True)
        except OutcomeUnknown as error:
            failure = messages.StoreFailed(command.call_id, f"{method}: {error}", unknown=True)
        except StoreError as error:
            failure = messages.StoreFailed(command.call_id, f"{method}: {error}", unknown=False)
        except Exception as error:  # noqa: BLE001 - a backend's mistake is not the engine's end
            self._log_unexpected(method, error)
            text = f"{method}: {type(error).__name__}: {error}"
            failure = messages.StoreFailed(command.call_id, text, unknown=True)
        self.feed(failure or messages.StoreReplied(command.call_id, reply, self.wall_ms()))

    def _log_unexpected(self, what: str, error: Exception) -> None:
        """With its traceback the first time that this kind of error comes from there."""
        kind = (what, type(error).__name__)
        if kind not in self._unexpected:
            self._unexpected.add(kind)
            fields = {"method": what, "error": f"{kind[1]}: {error}"}
            _log.error("store_call_broke", exc_info=error, extra={"fields": fields})

    async def _watch_store(self) -> None:
        while True:
            try:
                self._check_open()
                async for _ in self.store.watch():
                    self.tell_news()
                    self.feed(messages.Woken())
                return  # a store that does not notify
            except StoreError:
                pass  # the heartbeats tell of it
            except Exception as error:  # noqa: BLE001 - as above
                self._log_unexpected("watch", error)
            await sleep(self.clock, _WATCH_AGAIN_MS)


_LEVELS = {
    messages.Level.DEBUG: logging.DEBUG,
    messages.Level.INFO: logging.INFO,
    messages.Level.WARNING: logging.WARNING,
    messages.Level.ERROR: logging.ERROR,
}


def _write_log(command: messages.Log) -> None:
    level = _LEVELS[command.level]
    if _log.isEnabledFor(level):
        _log.log(level, command.event, extra={"fields": dict(command.fields)})
