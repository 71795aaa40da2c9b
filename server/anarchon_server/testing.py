"""`LocalSidecar`: a real sidecar in the test's own process, on a store in memory, in virtual time.

Imports the client, `loop`, `rpc` and the memory store. Where `anarchon.testing.FakeSidecar` is a
puppet that does what the test says, this one computes slots, claims, renews and records by itself;
the test only moves time. Needs `pip install "anarchon[server]"`.

    with LocalSidecar() as sidecar, AnarchonClient(transport=sidecar).subscribe([sync]):
        run = sidecar.run_next("sync").result()
        assert run.state == "success"
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version as installed_version
from types import TracebackType
from typing import Any, Self, TypeVar

from anarchon._client import Waiter
from anarchon._duration import Duration, to_ms, to_timedelta
from anarchon._errors import SidecarError, error_from_status
from anarchon.v1 import session_pb2
from anarchon_backends.memory import open_store
from anarchon_server.core import limits
from anarchon_server.core.engine import Engine
from anarchon_server.core.errors import AnarchonError, InvalidError, NotFoundError
from anarchon_server.core.model import Attempt, RunState, RunView
from anarchon_server.core.policy import read_schedule
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import OpenOptions, RunQuery
from anarchon_server.loop import Loop, Stream
from anarchon_server.rpc.operating import Operator
from anarchon_server.rpc.sessions import SessionCalls
from anarchon_server.rpc.status import status_of

__all__ = ["LocalRun", "LocalSidecar", "VirtualClock"]

DEFAULT_NOW = datetime(2026, 10, 10, 12, tzinfo=UTC)
PATIENCE = timedelta(seconds=10)

# Virtual time has no pauses to be noticed, and every pulse costs.
_PULSE_MS = limits.MINUTE
_START_TIMEOUT_S = 10

T = TypeVar("T")


# ── Virtual time ────────────────────────────────────────────────────────────────────────────────


class VirtualTimer:
    """A call that is to come in virtual time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def cancelled(self) -> bool:
        """Whether it will not come."""
        return self._callback is None

    def cancel(self) -> None:
        """Make it not come."""
        self._callback = None

    def fire(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._callback is not None:
            self._callback()


class VirtualClock:
    """A `Clock` that stands still until it is moved. `wall_at` is where it begins, in milliseconds.

    Boot time and the host's clock move together; `step_wall` sets the latter apart.
    """

    def __init__(self, wall_at: int) -> None:
        self._boot_ms = 1_000_000
        self._wall_minus_boot_us = (wall_at - self._boot_ms) * 1_000
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._numbers = itertools.count()

    def wall_us(self) -> int:
        """Return the host's clock in microseconds since the epoch."""
        return self._boot_ms * 1_000 + self._wall_minus_boot_us

    def boot_ms(self) -> int:
        """Return milliseconds since the virtual machine started."""
        return self._boot_ms

    @property
    def boot_id(self) -> str:
        """The one boot there is."""
        return "virtual"

    def step_wall(self, by_ms: int) -> None:
        """Set the host's clock forward or back."""
        self._wall_minus_boot_us += by_ms * 1_000

    def call_at(self, boot_at: int, callback: Callable[[], None]) -> VirtualTimer:
        """Call `callback` when time has been moved to `boot_at`."""
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (boot_at, next(self._numbers), timer))
        return timer

    @property
    def next_at(self) -> int | None:
        """When the next timer is due; None: there is none."""
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def move_to(self, boot_at: int) -> None:
        """Move time on, past no timer, and fire those that are due."""
        self._boot_ms = max(self._boot_ms, boot_at)
        while (due_at := self.next_at) is not None and due_at <= self._boot_ms:
            heapq.heappop(self._timers)[2].fire()


# ── The sidecar ─────────────────────────────────────────────────────────────────────────────────


class LocalRun:
    """A run as the store has it: one slot of a job, with its attempts."""

    def __init__(self, view: RunView) -> None:
        self.job: str = view.run.job
        """The job's name."""
        self.slot: int = view.run.slot
        """The slot, in milliseconds since the epoch."""
        self.state: RunState = view.run.state
        """Where it is in its life: a text such as "success" or "failed"."""
        self.reason: str = view.run.reason
        """Why it is there, where the state alone does not say."""
        self.attempts: tuple[Attempt, ...] = view.attempts
        """Its attempts, oldest first; each with `result` and `failure`."""

    @property
    def scheduled_at(self) -> datetime:
        """The slot as a time in UTC."""
        return datetime.fromtimestamp(self.slot / 1_000, UTC)

    def __repr__(self) -> str:
        return f"LocalRun({self.job!r}, {self.scheduled_at.isoformat()}, {self.state}, {self.reason!r})"


class _Seat:
    """What a session has in hand, so that it can be kept alive in virtual time."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self.every_ms = 0
        self.stream: Stream | None = None


class LocalSidecar:
    """A sidecar for tests of handlers: give it to `AnarchonClient(transport=...)` and move time.

    * `now`: where virtual time begins.
    * `lease`: for jobs that do not say.
    * `patience`: how long, in real time, handlers may take before time moves on without them.

    To be used as a context manager, `with` or `async with`. It has a thread of its own, and every
    method may be called from any thread; what takes time returns a `Waiter`: `await` it on a loop,
    ask for its `result()` elsewhere.

    Time stands still while handlers run, so a job that is due every second never finds the run
    before it unfinished, however slow the machine. While time moves, the client is kept alive by
    the sidecar itself. Draws (jitter) are always zero.
    """

    def __init__(
        self,
        *,
        now: datetime = DEFAULT_NOW,
        lease: Duration = timedelta(milliseconds=limits.LEASE_DEFAULT),
        instance_id: str = "local:1",
        patience: Duration = PATIENCE,
    ) -> None:
        if now.tzinfo is None:
            raise ValueError("now: give a time with its zone, as in datetime(..., tzinfo=UTC)")
        self._clock = VirtualClock(round(now.timestamp() * 1_000))
        self._patience_s = to_timedelta(patience).total_seconds()
        self._instance_id = instance_id
        self._version = installed_version("anarchon")
        self._lease_ms = to_ms(to_timedelta(lease))
        self._seats: dict[str, _Seat] = {}
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._events.run_forever, name="anarchon-local-sidecar", daemon=True
        )
        self._idle: asyncio.Event
        self._store = open_store("memory:", OpenOptions("default", self._clock))
        self._loop: Loop
        self._calls: SessionCalls

    # ── For tests ───────────────────────────────────────────────────────────────────────────────

    @property
    def now(self) -> datetime:
        """Virtual time."""
        return datetime.fromtimestamp(self._clock.wall_us() / 1e6, UTC)

    def advance(self, duration: Duration, *, wait: bool = True) -> Waiter[None]:
        """Move time on, slot by slot, each handled before the next.

        `wait=False`: time goes on while handlers run, as it does in life; for timeouts and overlaps.
        Raises `TimeoutError` where a handler takes longer than the patience.
        """
        length_ms = to_ms(to_timedelta(duration))
        return self._do(self._advance(length_ms, wait=wait), f"{duration} to pass")

    def run_next(self, job: str) -> Waiter[LocalRun]:
        """Move time on to the job's next slot, and give its run once the handler has ended.

        Raises `NotFoundError` where no client has subscribed with the job.
        """
        return self._do(self._run_next(job), f"the next run of {job}")

    def trigger(self, job: str, payload: bytes = b"") -> Waiter[LocalRun]:
        """Trigger a run of the job, and give it once its handler has ended; time stands still.

        One that the job's overlap makes wait, or that waits for a retry, is given as it then is. Raises
        `NotFoundError` where no client has subscribed with the job.
        """
        return self._do(self._trigger(job, payload), f"the triggered run of {job}")

    def runs(self, job: str = "") -> Waiter[Sequence[LocalRun]]:
        """Give the runs of a job, or all, newest slot first, at most 500."""
        return self._do(self._runs(job), "the runs")

    # ── What a client calls ─────────────────────────────────────────────────────────────────────

    async def subscribe(
        self, request: session_pb2.SubscribeRequest
    ) -> AsyncGenerator[session_pb2.SubscribeResponse, None]:
        """Be a transport: open the stream."""
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[session_pb2.SubscribeResponse | SidecarError | None]
        received = asyncio.Queue()

        def deliver(item: session_pb2.SubscribeResponse | SidecarError | None) -> None:
            with suppress(RuntimeError):  # the client's loop has ended
                loop.call_soon_threadsafe(received.put_nowait, item)

        pump = asyncio.run_coroutine_threadsafe(self._pump(request, deliver), self._events)
        try:
            while (item := await received.get()) is not None:
                if isinstance(item, SidecarError):
                    raise item
                yield item
        finally:
            pump.cancel()

    async def keep_alive(
        self, request: session_pb2.KeepAliveRequest, timeout_s: float
    ) -> session_pb2.KeepAliveResponse:
        """Be a transport: answer a keep-alive."""
        return await self._answer(self._keep_alive(request), timeout_s)

    async def complete(
        self, request: session_pb2.CompleteRequest, timeout_s: float
    ) -> session_pb2.CompleteResponse:
        """Be a transport: record results."""
        return await self._answer(self._complete(request), timeout_s)

    async def close_session(
        self, request: session_pb2.CloseSessionRequest, timeout_s: float
    ) -> session_pb2.CloseSessionResponse:
        """Be a transport: end a session."""
        return await self._answer(self._close_session(request), timeout_s)

    async def close(self) -> None:
        """Be a transport: let go."""

    # ── Life ────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start(), "the sidecar to start").future.result(_START_TIMEOUT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._do(self._stop(), "the sidecar to stop").future.result(_START_TIMEOUT_S)
        self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join()
        self._events.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    # ── On its own thread ───────────────────────────────────────────────────────────────────────

    def _do(self, work: Coroutine[Any, Any, T], what: str) -> Waiter[T]:
        return Waiter(asyncio.run_coroutine_threadsafe(work, self._events), what)

    async def _answer(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future: concurrent.futures.Future[T]
        future = asyncio.run_coroutine_threadsafe(work, self._events)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except AnarchonError as error:
            raise _as_a_client_sees_it(error) from None
        except TimeoutError:
            late = "the sidecar did not answer in time"
            raise error_from_status("DEADLINE_EXCEEDED", "", late) from None

    async def _start(self) -> None:
        await self._store.open()
        numbers = itertools.count(1)
        engine = Engine(
            Settings(self._instance_id, "0" * 32, version=self._version, lease_ms=self._lease_ms),
            self._store.capabilities,
            draw=lambda _: 0,
            new_nonce=lambda: f"{next(numbers):032x}",
        )
        self._loop = Loop(engine, self._store, self._clock, pulse_ms=_PULSE_MS)
        self._calls = SessionCalls(self._loop, self._instance_id, self._version)
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop.start()
        await self._loop.settled()

    async def _stop(self) -> None:
        await self._loop.close()
        await self._store.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _pump(
        self,
        request: session_pb2.SubscribeRequest,
        deliver: Callable[[session_pb2.SubscribeResponse | SidecarError | None], None],
    ) -> None:
        try:
            stream = self._calls.subscribe(request)
        except AnarchonError as error:
            deliver(_as_a_client_sees_it(error))
            return
        seat = self._seats.setdefault(request.session_id, _Seat())
        seat.stream = stream
        try:
            async for response in self._calls.events(stream):
                for assignment in response.runs.assignments:
                    seat.tokens[assignment.token] = assignment.job
                self._look_whether_idle()
                deliver(response)
            deliver(_as_a_client_sees_it(stream.error) if stream.error else None)
        finally:
            self._calls.leave(stream)
            if seat.stream is stream:
                seat.stream = None

    async def _keep_alive(
        self, request: session_pb2.KeepAliveRequest
    ) -> session_pb2.KeepAliveResponse:
        response = await self._calls.keep_alive(request)
        seat = self._seats.get(request.session_id)
        if seat is not None:
            self._left(seat, [lost.token for lost in response.lost])
            first = not seat.every_ms
            seat.every_ms = response.keep_alive_interval.ToMilliseconds()
            if first:
                self._keep_alive_later(request.session_id, seat)
        await self._loop.settled()
        return response

    def _keep_alive_later(self, session_id: str, seat: _Seat) -> None:
        """While time moves, nobody but the sidecar knows that the client lives."""

        def keep_alive() -> None:
            if self._seats.get(session_id) is seat:
                if seat.stream is not None:
                    _ = self._events.create_task(self._keep_alive_for(session_id, seat))
                self._keep_alive_later(session_id, seat)

        self._clock.call_at(self._clock.boot_ms() + seat.every_ms, keep_alive)

    async def _keep_alive_for(self, session_id: str, seat: _Seat) -> None:
        with suppress(NotFoundError):  # the client hears of it from its own keep-alive
            answer = await self._loop.keep_alive(session_id, tuple(seat.tokens))
            self._left(seat, [lost.token for lost in answer.lost])

    async def _complete(self, request: session_pb2.CompleteRequest) -> session_pb2.CompleteResponse:
        response = await self._calls.complete(request, None)
        for seat in self._seats.values():
            self._left(seat, [result.token for result in request.results])
        return response

    async def _close_session(
        self, request: session_pb2.CloseSessionRequest
    ) -> session_pb2.CloseSessionResponse:
        response = await self._calls.close_session(request)
        seat = self._seats.pop(request.session_id, None)
        if seat is not None:
            self._left(seat, list(seat.tokens))
        return response

    def _left(self, seat: _Seat, tokens: Sequence[str]) -> None:
        for token in tokens:
            seat.tokens.pop(token, None)
        self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if any(seat.tokens for seat in self._seats.values()):
            self._idle.clear()
        else:
            self._idle.set()

    # ── Moving time ─────────────────────────────────────────────────────────────────────────────

    async def _advance(self, length_ms: int, *, wait: bool) -> None:
        end_at = self._clock.boot_ms() + length_ms
        await self._quiet(wait=wait)
        while (next_at := self._clock.next_at) is not None and next_at <= end_at:
            self._clock.move_to(next_at)
            await self._quiet(wait=wait)
        self._clock.move_to(end_at)
        await self._quiet(wait=wait)

    async def _quiet(self, *, wait: bool) -> None:
        """Wait until nothing is under way that could be done without time moving on."""
        await self._settled()
        while wait and not self._idle.is_set():
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._idle.wait()
            except TimeoutError:
                busy = {job for seat in self._seats.values() for job in seat.tokens.values()}
                raise TimeoutError(
                    f"handlers of {', '.join(sorted(busy))} have run for {self._patience_s:g} s: "
                    "give a longer patience, or let time go on with wait=False"
                ) from None
            await self._settled()

    async def _settled(self) -> None:
        """Until the store has answered and every event is with its client."""
        await asyncio.sleep(0)
        await self._loop.settled()
        while any(seat.stream and seat.stream.unread for seat in self._seats.values()):
            await asyncio.sleep(0)
            await self._loop.settled()

    # ── The store ───────────────────────────────────────────────────────────────────────────────

    async def _run_next(self, job: str) -> LocalRun:
        await self._quiet(wait=True)
        found = await self._store.jobs((job,), "", 1)
        if not found.answers:
            raise NotFoundError("job", job, "is a client subscribed with it, and ready?")
        schedule = read_schedule(found.answers[0].spec)
        slot = schedule.next_after(self._loop.wall_ms())
        if slot is None:
            raise InvalidError("job", job, "it has no schedule: see LocalSidecar.trigger")
        await self._advance(slot - self._loop.wall_ms(), wait=True)
        query = RunQuery(job=job, slot=slot, limit=1, traces=True)
        views = (await self._store.runs(query)).answers
        if not views:
            raise NotFoundError("run", f"{job} {slot}", "no client had room for it")
        return LocalRun(views[0])

    async def _trigger(self, job: str, payload: bytes) -> LocalRun:
        await self._quiet(wait=True)
        made = await Operator(self._loop).trigger(job, "", payload)
        await self._advance(0, wait=True)
        query = RunQuery(job=job, slot=made.run.slot, limit=1, traces=True)
        return LocalRun((await self._store.runs(query)).answers[0])

    async def _runs(self, job: str) -> Sequence[LocalRun]:
        await self._settled()
        query = RunQuery(job=job, limit=limits.PAGE_MAX, traces=True)
        return tuple(LocalRun(view) for view in (await self._store.runs(query)).answers)


def _as_a_client_sees_it(error: AnarchonError) -> SidecarError:
    status = status_of(error)
    return error_from_status(status.code.name, status.reason, status.message)
