"""The client package's own session, driven in virtual time; its messages go through the wire's form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from anarchon import _session as session
from anarchon._errors import SidecarError, SidecarUnavailableError, error_from_status
from anarchon.v1 import run_pb2, session_pb2
from anarchon_server.core import messages as m
from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.model import AttemptCause, CancelReason, Client, Outcome, Trigger
from anarchon_server.rpc import conversion
from anarchon_server.rpc.status import status_of
from tests.simulation.client import SimClient, StreamEvent

_VERSION = "simulated"


@dataclass
class RealClient(SimClient):
    """A client whose session is `anarchon._session.Session`."""

    _wake_at: int | None = None
    _leaving: bool = False

    @cached_property
    def _session(self) -> session.Session:
        request = session_pb2.SubscribeRequest(
            session_id=self.session_id,
            client=conversion.client_out(Client("python", process_id=1)),
            jobs=[conversion.spec_out(spec) for spec in self.specs],
            max_concurrency=self.max_concurrency,
        )
        self._streams: dict[int, int] = {}
        return session.Session(request, self.app.rng.random)

    @property
    def leaving(self) -> bool:
        """Whether it is about to leave."""
        return self._leaving

    @property
    def in_flight(self) -> tuple[str, ...]:
        """What it runs, or has finished without a receipt."""
        return tuple(self._session.in_flight)

    # ── Facts ───────────────────────────────────────────────────────────────────────────────────

    def open_at(self, moment: int) -> None:
        """Begins its session then."""
        self.app.do_at(moment, lambda: self._handle(session.Start()))

    def stream_ended(self, stream: int, error: AnarchonError | None) -> None:
        """A stream is over."""
        number = self._streams.pop(stream, None)
        if number is not None:
            self.ready = False
            self._handle(session.StreamEnded(number, _as_client_sees(error)))

    def event_came(self, stream: int, event: StreamEvent) -> None:
        """An event on a stream."""
        number = self._streams.get(stream)
        if number is None:
            return
        instance_id = self.app.host.name
        match event:
            case m.Attached():
                attached = conversion.attached_out(event, instance_id, _VERSION)
                response = session_pb2.SubscribeResponse(attached=attached)
            case m.Assigned():
                runs = [conversion.assignment_out(a, instance_id) for a in event.assignments]
                batch = session_pb2.Assignments(assignments=runs if self.app.accepts else [])
                response = session_pb2.SubscribeResponse(runs=batch)
            case m.Cancelled():
                response = session_pb2.SubscribeResponse(cancel=conversion.cancellation_out(event))
            case m.Draining():
                response = session_pb2.SubscribeResponse(drain=session_pb2.Drain())
        self._handle(session.StreamEvent(number, response))

    def end_trust_if_over(self) -> None:
        """Whoever ran under a trust that is over is told, and never trusted again."""
        if self.running and self._now >= self._session.trust_end_ms:
            self._handle(session.Tick())

    def leave(self, grace_ms: int) -> None:
        """Finishes what runs, for the grace at most, and closes the session."""
        if not self.closed:
            self._leaving = True
            self.ready = False
            self._handle(session.StopAsked(grace_ms))

    def _report(self, token: str, outcome: Outcome) -> None:
        self._handle(session.HandlerEnded(token, _outcome_out(outcome)))

    def _handle(self, fact: session.Fact) -> None:
        for command in self._session.handle(self._now, fact):
            self._do(command)
        self._plan_tick()

    def _plan_tick(self) -> None:
        wake_at = self._session.wake_at_ms
        if wake_at is None or (self._wake_at is not None and self._wake_at <= wake_at):
            return
        moment = max(wake_at, self._now)
        self._wake_at = moment
        self.app.do_at(moment, lambda: self._ticked(moment))

    def _ticked(self, moment: int) -> None:
        if self._wake_at == moment:
            self._wake_at = None
        self._handle(session.Tick())

    # ── Commands ────────────────────────────────────────────────────────────────────────────────

    def _do(self, command: session.Command) -> None:
        match command:
            case session.OpenStream(number, request):
                self._open(number, request)
            case session.EndStream():
                self._end_streams()
            case session.StartHandler(assignment):
                self._start(_assignment_in(assignment))
            case session.CancelHandler(token, reason, _, trusted):
                word = run_pb2.CancelReason.Name(reason).removeprefix("CANCEL_REASON_").lower()
                self._tell(token, CancelReason(word), trusted=trusted)
            case session.SetTrust(end_ms):
                self.trust_until = end_ms
            case session.Ready():
                self.ready = True
            case session.Closed(error):
                assert error is None, f"nothing gives a client cause to give up: {error}"
                self.closed = True
                self.app.closed()
            case _:
                self._call(command)

    def _call(self, command: session.Command) -> None:
        number = self.app.host.world.next_number()
        match command:
            case session.SendKeepAlive(count, request, timeout_ms):
                in_flight = conversion.tokens_in("in_flight", request.in_flight)
                confirm = conversion.tokens_in("confirm", request.confirm)
                self._request(
                    m.KeepAlive(number, self.session_id, in_flight, request.draining, confirm),
                    partial(self._kept_alive, count),
                    lambda e: self._handle(session.KeepAliveFailed(count, _as_client_sees(e))),
                    timeout_ms,
                )
            case session.SendResults(tokens, request, timeout_ms):
                self._request(
                    m.Complete(number, conversion.results_in(request)),
                    partial(self._receipts, tokens),
                    lambda e: self._handle(session.ResultsFailed(tokens, _as_client_sees(e))),
                    timeout_ms,
                )
            case session.SendClose(request, timeout_ms):
                ended = session.CloseEnded()
                self._request(
                    m.CloseSession(number, self.session_id, tuple(request.stopped)),
                    lambda _: self._handle(ended),
                    lambda _: self._handle(ended),
                    timeout_ms,
                )
            case _:
                pass

    def _open(self, number: int, request: session_pb2.SubscribeRequest) -> None:
        world, sidecar = self.app.host.world, self.app.host.sidecar
        stream = world.next_number()
        self._streams[stream] = number
        self.ready = False
        if sidecar is None:
            self.app.comes(lambda: self.stream_ended(stream, None))
            return
        event = m.Subscribe(
            self.session_id,
            stream,
            conversion.client_in(request.client),
            conversion.specs_in(request.jobs),
            request.max_concurrency,
            conversion.tokens_in("in_flight", request.in_flight),
            self.app.host.clock.wall_ms(),
            watchable=world.plan.watchable,
        )

        def arrived() -> None:
            if sidecar.unreachable:
                self.app.comes(lambda: self.stream_ended(stream, None))
            else:
                sidecar.subscribe(self, event)

        self.app.goes(arrived)

    def _end_streams(self) -> None:
        sidecar = self.app.host.sidecar
        for stream in self._streams:
            if sidecar is not None:
                self.app.goes(partial(sidecar.leave_stream, self, stream))
        self._streams.clear()
        self.ready = False

    def _kept_alive(self, count: int, answer: Answered) -> None:
        assert isinstance(answer, m.KeepAliveAnswer)
        response = conversion.keep_alive_out(answer)
        self._handle(session.KeepAliveAnswered(count, response))
        if self._session.state is session.State.ATTACHED and answer.stream_open:
            self.ready = not self._leaving

    def _receipts(self, tokens: tuple[str, ...], answer: Answered) -> None:
        assert isinstance(answer, m.CompleteAnswer)
        for token, receipt in zip(tokens, answer.receipts, strict=True):
            if receipt.status is not m.ReceiptStatus.STORE_UNAVAILABLE:
                self._note_receipt(token, receipt)
        receipts = [conversion.receipt_out(receipt) for receipt in answer.receipts]
        response = session_pb2.CompleteResponse(receipts=receipts)
        self._handle(session.ResultsAnswered(tokens, response))


Answered = m.KeepAliveAnswer | m.CompleteAnswer | m.Closed


def _as_client_sees(error: AnarchonError | None) -> SidecarError:
    """What the client makes of a status, or of none."""
    if error is None:
        return SidecarUnavailableError("simulated")
    status = status_of(error)
    return error_from_status(status.code.name, status.reason, status.message)


def _outcome_out(outcome: Outcome) -> run_pb2.Outcome:
    message = run_pb2.Outcome(elapsed=conversion.duration(outcome.elapsed_ms))
    if outcome.failure is not None:
        message.failure.type = outcome.failure.type
        message.failure.permanent = outcome.failure.permanent
        if outcome.failure.retry_after_ms is not None:
            after = conversion.duration(outcome.failure.retry_after_ms)
            message.failure.retry_after.CopyFrom(after)
    elif outcome.stopped is not None:
        reason = conversion.enum_out(outcome.stopped, run_pb2.CancelReason, "CANCEL_REASON_")
        message.stopped.reason = reason
    else:
        message.success.result = outcome.result
    return message


def _assignment_in(assignment: session_pb2.Assignment) -> m.Assignment:
    """What a handler needs of it."""
    return m.Assignment(
        assignment.token,
        assignment.job,
        assignment.slot,
        assignment.attempt,
        assignment.fence,
        Trigger.SCHEDULE,
        AttemptCause.CLAIM,
        None,
        None,
    )
