"""For tests of handlers and of applications: `make_context`, `run_handler`, and `FakeSidecar`, a
sidecar's puppet in the same process. Imports the standard library, the wire's messages and the
client; no server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, overload

from anarchon._client import Waiter
from anarchon._context import AttemptContext, BootClock, Context, Orders, SyncContext, Trust
from anarchon._duration import Duration, to_timedelta, to_wire
from anarchon._errors import (
    CancelReason,
    NotConfirmedError,
    SessionNotFoundError,
    SessionReplacedError,
    SidecarError,
    SidecarUnavailableError,
)
from anarchon._jobs import Every, Handler, Job
from anarchon.v1 import run_pb2, session_pb2

_SLOT = 1_791_633_610_000  # 2026-10-10T12:00:10Z
_FOR_EVER_MS = 1 << 62
_M = TypeVar("_M")


# ── One handler ─────────────────────────────────────────────────────────────────────────────────


@overload
def make_context(
    job: str = ...,
    *,
    sync: Literal[False] = ...,
    slot: int = ...,
    attempt: int = ...,
    fence: int = ...,
    payload: bytes = ...,
    timeout: Duration | None = ...,
    confirmed: bool = ...,
) -> Context: ...


@overload
def make_context(
    job: str = ...,
    *,
    sync: Literal[True],
    slot: int = ...,
    attempt: int = ...,
    fence: int = ...,
    payload: bytes = ...,
    timeout: Duration | None = ...,
    confirmed: bool = ...,
) -> SyncContext: ...


def make_context(
    job: str = "test",
    *,
    sync: bool = False,
    slot: int = _SLOT,
    attempt: int = 1,
    fence: int = 1,
    payload: bytes = b"",
    timeout: Duration | None = None,
    confirmed: bool = True,
) -> Context | SyncContext:
    """Return a context as a handler is given one, trusted until `cancel` is called on it.

    `sync`: for a handler that is no coroutine. `confirmed=False`: `confirm()` raises
    `NotConfirmedError`.
    """
    assignment = session_pb2.Assignment(
        token=f"test-token-{attempt}",
        job=job,
        slot=slot,
        attempt=attempt,
        fence=fence,
        trigger=run_pb2.TRIGGER_SCHEDULE,
        instance_id="test:1",
        payload=payload,
    )
    if timeout is not None:
        assignment.timeout.CopyFrom(to_wire(to_timedelta(timeout)))
    clock = BootClock()
    orders = Orders(clock, Trust(_FOR_EVER_MS))

    async def confirm() -> None:
        if not confirmed:
            raise NotConfirmedError("the test says so")

    if not sync:
        return Context(assignment, orders, clock, confirm)
    context = SyncContext(assignment, orders, clock, confirm)
    if not confirmed:
        # Without a loop nobody is asked, so the answer is put in place of the question.
        def refuse() -> None:
            raise NotConfirmedError("the test says so")

        context.confirm = refuse  # type: ignore[method-assign]
    return context


def cancel(context: AttemptContext, reason: CancelReason = CancelReason.REQUESTED) -> None:
    """Cancel the attempt of a context that `make_context` made.

    An async handler gets its `asyncio.CancelledError` only from `run_handler(cancel_after=)`.
    """
    trusted = reason not in (CancelReason.LEASE_LOST, CancelReason.FENCED)
    context._orders.cancel(_wire_reason(reason), "cancelled by the test", trusted=trusted)


async def run_handler(
    handler: Handler,
    context: Context | SyncContext | None = None,
    *,
    cancel_after: Duration | None = None,
    reason: CancelReason = CancelReason.REQUESTED,
) -> object:
    """Run `handler` as the client would, on the loop or in a thread, and return what it returns.

    `context` is by default a new one of the right kind. Raises what the handler raises; where it
    obeys the cancellation that comes after `cancel_after`, `Cancelled` (or `LeaseLost`, `Fenced`).
    """
    job = Job(handler, Every("1s"), name="test")
    if context is None:
        context = make_context(sync=False) if job.is_async else make_context(sync=True)
    arguments = (context,) if job.takes_context else ()
    call: asyncio.Future[object]
    if job.is_async:
        call = asyncio.ensure_future(cast("Awaitable[object]", handler(*arguments)))
    else:
        call = asyncio.ensure_future(asyncio.to_thread(handler, *arguments))
    if cancel_after is not None:
        await asyncio.wait([call], timeout=to_timedelta(cancel_after).total_seconds())
        cancel(context, reason)
        if job.is_async:
            call.cancel()
    try:
        return await call
    except asyncio.CancelledError:
        context.check()
        raise


# ── A sidecar ───────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class FakeRun:
    """An attempt that a `FakeSidecar` has handed out."""

    assignment: session_pb2.Assignment
    _outcome: concurrent.futures.Future[run_pb2.Outcome] = field(
        default_factory=concurrent.futures.Future
    )

    @property
    def token(self) -> str:
        """Names the attempt."""
        return self.assignment.token

    @property
    def outcome(self) -> Waiter[run_pb2.Outcome]:
        """How the attempt ended, once the client has reported it."""
        return Waiter(self._outcome, f"the outcome of {self.assignment.job}")


class FakeSidecar:
    """A sidecar's puppet: give it to `AnarchonClient(transport=...)` and pull its strings.

    It hands out what `assign` says, answers every keep-alive and records every result; it keeps
    what it was sent in `subscribes`, `keep_alives`, `results` and `closes`. All methods may be
    called from any thread. One client at a time.
    """

    def __init__(
        self, *, session_ttl: Duration = "15s", keep_alive_interval: Duration = "5s"
    ) -> None:
        self.session_ttl = to_timedelta(session_ttl)
        """What it answers to keep-alives; may be changed."""
        self.keep_alive_interval = to_timedelta(keep_alive_interval)
        """How often the client is to call KeepAlive; may be changed."""
        self.instance_id = "fake:1"
        """Its name."""
        self.notes: list[str] = []
        """What it has to say of the jobs."""
        self.receipt = session_pb2.RECEIPT_STATUS_RECORDED
        """What it answers to results; may be changed."""
        self.is_away = False
        """Whether it answers at all."""
        self.is_silent = False
        """Whether keep-alives get no answer, although it is there."""
        self.can_confirm = True
        """Whether its store can renew leases now."""
        self.subscribes: list[session_pb2.SubscribeRequest] = []
        self.keep_alives: list[session_pb2.KeepAliveRequest] = []
        self.results: list[session_pb2.Result] = []
        self.closes: list[session_pb2.CloseSessionRequest] = []
        self._runs: dict[str, FakeRun] = {}
        self._lost: dict[str, run_pb2.CancelReason] = {}
        self._refusal: SidecarError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: asyncio.Queue[session_pb2.SubscribeResponse | SidecarError] | None = None
        self._knows_session = False
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], object], concurrent.futures.Future[None]]] = []

    # ── Strings to pull ─────────────────────────────────────────────────────────────────────────

    def assign(
        self,
        job: str,
        *,
        slot: int = _SLOT,
        attempt: int = 1,
        payload: bytes = b"",
        timeout: Duration | None = None,
    ) -> FakeRun:
        """Hand out an attempt at a run of `job`."""
        number = next(self._numbers)
        assignment = session_pb2.Assignment(
            token=f"token-{number}",
            job=job,
            slot=slot,
            attempt=attempt,
            fence=number,
            trigger=run_pb2.TRIGGER_SCHEDULE,
            instance_id=self.instance_id,
            payload=payload,
        )
        if timeout is not None:
            assignment.timeout.CopyFrom(to_wire(to_timedelta(timeout)))
        run = self._runs[assignment.token] = FakeRun(assignment)
        self.deliver(run)
        return run

    def deliver(self, *runs: FakeRun) -> None:
        """Send attempts, for the first time or again, as one batch."""
        batch = session_pb2.Assignments(assignments=[run.assignment for run in runs])
        self._send(session_pb2.SubscribeResponse(runs=batch))

    def cancel(self, run: FakeRun, reason: CancelReason = CancelReason.REQUESTED) -> None:
        """Ask for an attempt to stop."""
        event = session_pb2.Cancellation(token=run.token, reason=_wire_reason(reason))
        self._send(session_pb2.SubscribeResponse(cancel=event))

    def lose(self, run: FakeRun, reason: CancelReason = CancelReason.FENCED) -> None:
        """Have another instance take the run over: the next answer that can names it as lost."""
        self._lost[run.token] = _wire_reason(reason)

    def drain(self, grace: Duration = "20s") -> None:
        """Announce that the sidecar is going away."""
        event = session_pb2.Drain(grace=to_wire(to_timedelta(grace)))
        self._send(session_pb2.SubscribeResponse(drain=event))

    def break_stream(self) -> None:
        """End the stream, as a network would."""
        self._send(SidecarUnavailableError("the stream was broken by the test"))

    def replace_session(self) -> None:
        """Have another process take the session over."""
        self._send(SessionReplacedError("another stream took over", "SESSION_REPLACED"))

    def forget_session(self) -> None:
        """Forget the session, as a restarted sidecar does; the stream stays open."""
        self._knows_session = False

    def go_away(self) -> None:
        """Be gone: the stream breaks, and no call is answered until `come_back`."""
        self.is_away = True
        self._knows_session = False
        if self._events is not None:
            self.break_stream()

    def come_back(self) -> None:
        """Be there again, as a new process that knows no session."""
        self.is_away = False

    def refuse(self, error: SidecarError | None) -> None:
        """Answer every Subscribe with `error` from now on; `None`: no more."""
        self._refusal = error

    def wait_for(self, condition: Callable[[], object]) -> Waiter[None]:
        """Done once `condition` holds; it is looked at whenever the client has called."""
        waiting: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            if condition():
                waiting.set_result(None)
            else:
                self._waiting.append((condition, waiting))
        return Waiter(waiting, "what the test waits for")

    # ── What a client calls ─────────────────────────────────────────────────────────────────────

    async def subscribe(
        self, request: session_pb2.SubscribeRequest
    ) -> AsyncGenerator[session_pb2.SubscribeResponse, None]:
        """Be a transport: open the stream."""
        self._called(self.subscribes, request)
        self._check_away()
        if self._refusal is not None:
            raise self._refusal
        self._loop = asyncio.get_running_loop()
        events = self._events = asyncio.Queue()
        self._knows_session = True
        attached = session_pb2.Attached(
            instance_id=self.instance_id,
            keep_alive_interval=to_wire(self.keep_alive_interval),
            session_ttl=to_wire(self.session_ttl),
            lost=self._lost_of(request.in_flight),
            notes=self.notes,
        )
        yield session_pb2.SubscribeResponse(attached=attached)
        try:
            while True:
                event = await events.get()
                if isinstance(event, SidecarError):
                    raise event
                yield event
        finally:
            if self._events is events:
                self._events = None

    async def keep_alive(
        self, request: session_pb2.KeepAliveRequest, timeout_s: float
    ) -> session_pb2.KeepAliveResponse:
        """Be a transport: answer a keep-alive."""
        self._called(self.keep_alives, request)
        self._check_away()
        if self.is_silent:
            await asyncio.sleep(timeout_s)
            raise SidecarUnavailableError("the keep-alive was not answered in time")
        if not self._knows_session:
            raise SessionNotFoundError("no such session", "SESSION_NOT_FOUND")
        return session_pb2.KeepAliveResponse(
            session_ttl=to_wire(self.session_ttl),
            stream_open=self._events is not None,
            lost=self._lost_of(request.in_flight),
            keep_alive_interval=to_wire(self.keep_alive_interval),
            confirmed=request.confirm if self.can_confirm else (),
        )

    async def complete(
        self,
        request: session_pb2.CompleteRequest,
        timeout_s: float,  # noqa: ARG002
    ) -> session_pb2.CompleteResponse:
        """Be a transport: take results."""
        self._check_away()
        self._called(self.results, *request.results)
        if self.receipt == session_pb2.RECEIPT_STATUS_RECORDED:
            for result in request.results:
                run = self._runs.get(result.token)
                if run is not None and not run._outcome.done():
                    run._outcome.set_result(result.outcome)
        receipts = [session_pb2.Receipt(status=self.receipt) for _ in request.results]
        return session_pb2.CompleteResponse(receipts=receipts)

    async def close_session(
        self,
        request: session_pb2.CloseSessionRequest,
        timeout_s: float,  # noqa: ARG002
    ) -> session_pb2.CloseSessionResponse:
        """Be a transport: end the session."""
        self._check_away()
        self._called(self.closes, request)
        self._knows_session = False
        return session_pb2.CloseSessionResponse()

    async def close(self) -> None:
        """Be a transport: let go."""

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def _send(self, event: session_pb2.SubscribeResponse | SidecarError) -> None:
        if self._events is None or self._loop is None:
            raise RuntimeError("no client is subscribed: wait for its subscription to be ready()")
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _called(self, kept: list[_M], *messages: _M) -> None:
        with self._lock:
            kept.extend(messages)
            done = [pair for pair in self._waiting if pair[0]()]
            self._waiting = [pair for pair in self._waiting if pair not in done]
        for _, waiting in done:
            waiting.set_result(None)

    def _check_away(self) -> None:
        if self.is_away:
            raise SidecarUnavailableError("no sidecar: the test says so")

    def _lost_of(self, tokens: Container[str]) -> list[session_pb2.Cancellation]:
        return [
            session_pb2.Cancellation(token=token, reason=reason)
            for token, reason in self._lost.items()
            if token in tokens
        ]


def _wire_reason(reason: CancelReason) -> run_pb2.CancelReason:
    return cast("run_pb2.CancelReason", run_pb2.CancelReason.Value(f"CANCEL_REASON_{reason.name}"))
