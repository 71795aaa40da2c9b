"""The session as a state machine without I/O: the client specification in code.

`Session.handle(now_ms, fact)` takes what has happened and returns what is to be done; `wake_at_ms`
says when to call it again with `Tick()`. Time and chance come in as arguments, the messages are the
wire's own. Imports the standard library's pure parts, the wire's messages and the errors.

A session is DETACHED (no stream), SUBSCRIBING (one is being opened), ATTACHED, or CLOSED. Leaving
is a direction, not a state: a session that leaves keeps its stream and its trust for as long as a
handler runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Literal

from anarchon._context import NOT_ANSWERED, reason_of
from anarchon._duration import ms_to_wire, to_text, wire_to_ms
from anarchon._errors import (
    AnarchonError,
    CancelReason,
    CredentialsError,
    LeaseLost,
    NotConfirmedError,
    RefusedError,
    SessionNotFoundError,
    SessionReplacedError,
    SidecarError,
    lost_error,
)
from anarchon.v1 import run_pb2, session_pb2

BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 5_000
# Whatever a sidecar says, no more keep-alives than this.
KEEP_ALIVE_INTERVAL_MIN_MS = 200
KEEP_ALIVE_TIMEOUT_MAX_MS = 5_000
COMPLETE_TIMEOUT_MS = 10_000
# For this long at least; for the lease where it is longer, but not for longer than a lease can be.
COMPLETE_FOR_MS, COMPLETE_FOR_MAX_MS = 5 * 60_000, 60 * 60_000
CLOSE_TIMEOUT_MS = 5_000
CANCEL_GRACE_MS = 5_000
REMEMBERED_BEYOND_CONCURRENCY = 1_024
RESULTS_MAX, RESULTS_MAX_BYTES = 1_000, 2 * 1024 * 1024
MESSAGE_MAX_BYTES = 4 * 1024 * 1024

_NOT_KNOWN = "the sidecar no longer knows our session"
_NAMES_SHOWN = 5
_TRUST_OVER = (run_pb2.CANCEL_REASON_LEASE_LOST, run_pb2.CANCEL_REASON_FENCED)


# ── Facts: what has happened ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Start:
    """The client wants the session."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `wake_at_ms` has come."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event came on a stream."""

    stream: int
    event: session_pb2.SubscribeResponse


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream ended, or could not be opened."""

    stream: int
    error: SidecarError


@dataclass(frozen=True, slots=True)
class KeepAliveAnswered:
    """A keep-alive was answered."""

    number: int
    response: session_pb2.KeepAliveResponse


@dataclass(frozen=True, slots=True)
class KeepAliveFailed:
    """A keep-alive was not answered, or with an error."""

    number: int
    error: SidecarError


@dataclass(frozen=True, slots=True)
class HandlerEnded:
    """A handler has returned, raised or obeyed."""

    token: str
    outcome: run_pb2.Outcome


@dataclass(frozen=True, slots=True)
class ResultsAnswered:
    """Results got their receipts, one each, in the order in which they were sent."""

    tokens: tuple[str, ...]
    response: session_pb2.CompleteResponse


@dataclass(frozen=True, slots=True)
class ResultsFailed:
    """Results got no answer, or an error."""

    tokens: tuple[str, ...]
    error: SidecarError


@dataclass(frozen=True, slots=True)
class ConfirmAsked:
    """A handler wants its lease renewed now. `ticket` comes back with the answer."""

    token: str
    ticket: int


@dataclass(frozen=True, slots=True)
class TrustOver:
    """The watchdog has told these attempts that their trust is over."""

    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The client wants to leave: handlers may go on for `grace_ms`.

    `hint` says to people, where there is something to wait for, how not to.
    """

    grace_ms: int
    hint: str = ""


@dataclass(frozen=True, slots=True)
class CloseEnded:
    """CloseSession was answered, or was not."""


Fact = (
    Start
    | Tick
    | StreamEvent
    | StreamEnded
    | KeepAliveAnswered
    | KeepAliveFailed
    | HandlerEnded
    | ResultsAnswered
    | ResultsFailed
    | ConfirmAsked
    | TrustOver
    | StopAsked
    | CloseEnded
)


# ── Commands: what is to be done, in this order ─────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Call Subscribe, and end the stream before."""

    stream: int
    request: session_pb2.SubscribeRequest


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the present stream."""


@dataclass(frozen=True, slots=True)
class SendKeepAlive:
    """Call KeepAlive; it counts as sent now."""

    number: int
    request: session_pb2.KeepAliveRequest
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SendResults:
    """Call Complete."""

    tokens: tuple[str, ...]
    request: session_pb2.CompleteRequest
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SendClose:
    """Call CloseSession."""

    request: session_pb2.CloseSessionRequest
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StartHandler:
    """Run this attempt's handler."""

    assignment: session_pb2.Assignment


@dataclass(frozen=True, slots=True)
class CancelHandler:
    """Tell a handler to stop. `trusted`: it may still finish what it is at."""

    token: str
    reason: run_pb2.CancelReason
    message: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class SetTrust:
    """Trust the session until then."""

    end_ms: int


@dataclass(frozen=True, slots=True)
class AnswerConfirm:
    """Answer a handler's question. No error: the lease was just renewed."""

    ticket: int
    error: AnarchonError | None


@dataclass(frozen=True, slots=True)
class Ready:
    """The session is attached, and its first keep-alive answered."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Log:
    """Tell people."""

    level: Literal["info", "warning", "error"]
    message: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over."""

    error: AnarchonError | None


Command = (
    OpenStream
    | EndStream
    | SendKeepAlive
    | SendResults
    | SendClose
    | StartHandler
    | CancelHandler
    | SetTrust
    | AnswerConfirm
    | Ready
    | Log
    | Closed
)


# ── The machine ─────────────────────────────────────────────────────────────────────────────────


class State(Enum):
    """Where the session is in its life."""

    DETACHED = "detached"
    SUBSCRIBING = "subscribing"
    ATTACHED = "attached"
    CLOSED = "closed"


@dataclass(slots=True)
class _Running:
    """An attempt whose handler runs."""

    assignment: session_pb2.Assignment
    cancelled: bool = False
    lost_at_ms: int | None = None
    lost_because: run_pb2.CancelReason = run_pb2.CANCEL_REASON_LEASE_LOST


@dataclass(slots=True)
class _Finished:
    """An attempt whose handler has ended, and whose result has no receipt yet."""

    outcome: run_pb2.Outcome
    label: str
    ended_at_ms: int
    repeat_for_ms: int
    send_at_ms: int
    tries: int = 0
    # Its batch was refused: it goes alone, so that it spoils no other's.
    alone: bool = False

    @property
    def give_up_at_ms(self) -> int:
        return self.ended_at_ms + self.repeat_for_ms


@dataclass(slots=True)
class _KeepAlive:
    """A keep-alive that has not been answered yet."""

    sent_at_ms: int
    attached_stream: int
    tickets: list[tuple[int, str]] = field(default_factory=list)


class Session:
    """One client's attachment to its sidecar.

    `request` is the Subscribe request without what is in flight; `random` draws from [0, 1).
    """

    def __init__(self, request: session_pb2.SubscribeRequest, random: Callable[[], float]) -> None:
        self._request = request
        self._random = random
        self._specs = {spec.name: spec for spec in request.jobs}
        self._commands: list[Command] = []

        self.state = State.DETACHED
        self._stream = 0
        self._open_at_ms: int | None = None
        self._failures = 0
        self._told_lost = False
        self._was_attached = False
        self._is_ready = False
        self._instance_id = ""

        self.trust_end_ms = 0
        self._interval_ms = KEEP_ALIVE_INTERVAL_MIN_MS
        self._keep_alive_at_ms: int | None = None
        self._keep_alives = 0
        self._answered = 0
        self._unanswered: dict[int, _KeepAlive] = {}
        self._confirms: list[tuple[int, str]] = []

        self._held: dict[str, session_pb2.Assignment] = {}
        self._running: dict[str, _Running] = {}
        self._finished: dict[str, _Finished] = {}
        # None is given up before; later if the one it was taken from got its receipt.
        self._give_up_at_ms = 0
        self._is_sending = False
        self._remembered: deque[str] = deque(
            maxlen=request.max_concurrency + REMEMBERED_BEYOND_CONCURRENCY
        )
        # Membership in constant time; the deque says which to forget.
        self._known: set[str] = set()

        self._error: AnarchonError | None = None
        self._stop_at_ms: int | None = None
        self._grace_end_ms = 0
        self._leave_by_ms = 0
        self._is_closing = False

    def handle(self, now_ms: int, fact: Fact) -> list[Command]:
        """Take in what has happened, and return what is to be done."""
        if self.state is State.CLOSED:
            return []
        self._notice_standstill(now_ms)
        # Before anything else: trust that has ended is not revived by what comes late (S4).
        self._end_trust_if_over(now_ms)
        self._take_in(now_ms, fact)
        self._advance(now_ms)
        commands, self._commands = self._commands, []
        return commands

    @property
    def wake_at_ms(self) -> int | None:
        """When to call `handle` with `Tick()` if nothing happens before."""
        if self.state is State.CLOSED:
            return None
        times = [self._open_at_ms, self._keep_alive_at_ms]
        if any(run.lost_at_ms is None for run in self._running.values()):
            times.append(self.trust_end_ms)
        if self._finished:
            times.append(self._give_up_at_ms)
            if not self._is_sending:
                times.append(min(f.send_at_ms for f in self._finished.values()))
        if self.is_leaving and not self._is_closing:
            times.append(self._leave_by_ms)
            times += [
                self._cancel_at_ms(run) for run in self._running.values() if not run.cancelled
            ]
        return min((time for time in times if time is not None), default=None)

    @property
    def in_flight(self) -> list[str]:
        """The tokens of every attempt that runs, or has finished without a receipt yet."""
        return [*self._running, *self._finished]

    @property
    def running(self) -> Mapping[str, session_pb2.Assignment]:
        """The attempts whose handlers run, by token."""
        return {token: run.assignment for token, run in self._running.items()}

    @property
    def is_leaving(self) -> bool:
        """Whether the client wants to leave."""
        return self._stop_at_ms is not None

    @property
    def exit_at_ms(self) -> int | None:
        """When a process that is not to outlive a lost lease must be gone: one keep-alive interval,
        which is the margin of the session's shortest lease, after the trust of an attempt that
        still runs. `None` while nothing runs.
        """
        ends = [
            self.trust_end_ms if run.lost_at_ms is None else run.lost_at_ms
            for run in self._running.values()
        ]
        return min(ends) + self._interval_ms if ends else None

    # ── Facts ───────────────────────────────────────────────────────────────────────────────────

    def _take_in(self, now_ms: int, fact: Fact) -> None:
        match fact:
            case Start():
                self._open_at_ms = now_ms
            case StreamEvent(stream, event) if stream == self._stream:
                self._take_event(now_ms, event)
            case StreamEnded(stream, error) if stream == self._stream:
                self._stream_ended(now_ms, error)
            case KeepAliveAnswered(number, response):
                self._keep_alive_answered(now_ms, number, response)
            case KeepAliveFailed(number, error):
                self._keep_alive_failed(now_ms, number, error)
            case StopAsked(grace_ms, hint):
                is_news = not self.is_leaving
                self._leave(now_ms, grace_ms)
                if is_news:
                    self._say_what_is_waited_for(now_ms, hint)
            case CloseEnded():
                self._close()
            case _:  # events of a stream that is no longer ours end here, too
                self._take_in_attempts(now_ms, fact)

    def _take_in_attempts(self, now_ms: int, fact: Fact) -> None:
        match fact:
            case HandlerEnded(token, outcome):
                run = self._running.pop(token)
                self._report(now_ms, run.assignment, outcome)
            case ResultsAnswered(tokens, response):
                self._receipts(now_ms, tokens, response)
            case ResultsFailed(tokens, error):
                self._results_failed(now_ms, tokens, error)
            case ConfirmAsked(token, ticket):
                self._confirms.append((ticket, token))
            case TrustOver(tokens):
                for token in tokens:
                    self._cancel(now_ms, token, run_pb2.CANCEL_REASON_LEASE_LOST, trusted=False)
            case _:
                pass

    def _take_event(self, now_ms: int, event: session_pb2.SubscribeResponse) -> None:
        match event.WhichOneof("event"):
            case "attached":
                self._attached(now_ms, event.attached)
            case "runs" if self.state is State.ATTACHED:
                for assignment in event.runs.assignments:
                    self._assigned(assignment)
            case "cancel":
                cancel = event.cancel
                trusted = cancel.reason not in _TRUST_OVER
                self._cancel(
                    now_ms, cancel.token, cancel.reason, message=cancel.message, trusted=trusted
                )
            case "drain":
                self._say("info", "the sidecar is going away: no more runs until it is back")
            case _:
                pass  # a later version's

    def _attached(self, now_ms: int, attached: session_pb2.Attached) -> None:
        self.state = State.ATTACHED
        if self._told_lost:
            self._say("info", f"attached again, to instance {attached.instance_id}")
            self._told_lost = False
        elif not self._was_attached:
            self._say("info", f"attached to instance {attached.instance_id}")
        self._was_attached = True
        self._instance_id = attached.instance_id
        self._set_interval(wire_to_ms(attached.keep_alive_interval))
        self._take_lost(now_ms, attached.lost)
        for note in attached.notes:
            self._say("info", note)
        # It extends no trust, but shortens it: a sidecar that has come back may have shorter leases.
        self._shorten_trust(now_ms + wire_to_ms(attached.session_ttl))
        self._end_trust_if_over(now_ms)
        # Nothing is handed out before this.
        self._keep_alive_at_ms = now_ms

    def _assigned(self, assignment: session_pb2.Assignment) -> None:
        token = assignment.token
        if token in self._running or token in self._finished or token in self._known:
            return  # delivered again
        if assignment.job not in self._specs:
            self._say(
                "error", f"the sidecar sent a run of {assignment.job!r}, which we do not have"
            )
            return
        # Started by _advance, once there is trust and room.
        self._held[token] = assignment

    def _stream_ended(self, now_ms: int, error: SidecarError) -> None:
        self.state = State.DETACHED
        self._held.clear()
        if self._is_fatal(error):
            self._fail(now_ms, error)
        else:
            is_known = not isinstance(error, SessionNotFoundError)
            self._reopen(now_ms, str(error) if is_known else _NOT_KNOWN)

    def _reopen(self, now_ms: int, why: str) -> None:
        """Subscribe again after a pause."""
        if self.state in (State.SUBSCRIBING, State.ATTACHED):
            self._do(EndStream())
        self.state = State.DETACHED
        self._held.clear()
        # No event of the old stream counts from here on.
        self._stream += 1
        if self._error is not None or self._is_closing:
            return
        self._open_at_ms = now_ms + self._backoff_ms(self._failures)
        self._failures += 1
        if not self._told_lost and not self.is_leaving:
            self._told_lost = True
            self._say("warning", f"{why}; subscribing again until that succeeds")

    def _keep_alive_answered(
        self, now_ms: int, number: int, response: session_pb2.KeepAliveResponse
    ) -> None:
        sent = self._unanswered.pop(number)
        is_of_this_stream = sent.attached_stream == self._stream and self.state is State.ATTACHED
        if number > self._answered:
            self._answered = number
            # Counted from the sending: what the sidecar promised, it promised after that.
            end_ms = sent.sent_at_ms + wire_to_ms(response.session_ttl)
            if is_of_this_stream and response.stream_open:
                self._set_trust(end_ms)
            else:
                # Nobody we are attached to: one that was restarted may not even know yet what is
                # in flight, or whether the store still has it as ours.
                self._shorten_trust(end_ms)
            if response.HasField("keep_alive_interval"):
                self._set_interval(wire_to_ms(response.keep_alive_interval))
                due_at_ms = sent.sent_at_ms + self._interval_ms
                if self._keep_alive_at_ms is not None:
                    self._keep_alive_at_ms = min(self._keep_alive_at_ms, max(now_ms, due_at_ms))
        self._take_lost(now_ms, response.lost)
        for ticket, token in sent.tickets:
            self._answer_confirm(ticket, token, is_confirmed=token in response.confirmed)
        self._end_trust_if_over(now_ms)
        if is_of_this_stream and not response.stream_open:
            self._reopen(now_ms, "the sidecar has lost our stream")
        elif is_of_this_stream:
            self._failures = 0
            if not self._is_ready:
                self._is_ready = True
                self._do(Ready(self._instance_id))

    def _keep_alive_failed(self, now_ms: int, number: int, error: SidecarError) -> None:
        sent = self._unanswered.pop(number)
        self._held.clear()
        for ticket, _ in sent.tickets:
            self._do(AnswerConfirm(ticket, NotConfirmedError(f"the sidecar: {error}")))
        if self._is_fatal(error):
            self._fail(now_ms, error)
        elif isinstance(error, SessionNotFoundError) and sent.attached_stream == self._stream:
            # Trust goes on to its end: a sidecar that has come back adopts what we name.
            self._keep_alive_at_ms = None
            if self.state is State.ATTACHED:
                self._reopen(now_ms, _NOT_KNOWN)

    def _receipts(
        self, now_ms: int, tokens: tuple[str, ...], response: session_pb2.CompleteResponse
    ) -> None:
        self._is_sending = False
        receipts = list(response.receipts)
        for index, token in enumerate(tokens):
            finished = self._finished.get(token)
            if finished is None:
                continue  # given up meanwhile
            receipt = receipts[index] if index < len(receipts) else session_pb2.Receipt()
            if receipt.status == session_pb2.RECEIPT_STATUS_RECORDED:
                del self._finished[token]
            elif receipt.status in _RECEIPTS_THAT_REFUSE:
                del self._finished[token]
                why = receipt.message or _RECEIPTS_THAT_REFUSE[receipt.status]
                self._say("warning", f"the result of {finished.label} did not count: {why}")
            else:
                self._send_later(now_ms, finished)

    def _results_failed(self, now_ms: int, tokens: tuple[str, ...], error: SidecarError) -> None:
        self._is_sending = False
        for token in tokens:
            finished = self._finished.get(token)
            if finished is None:
                continue  # given up meanwhile
            if not isinstance(error, RefusedError):
                self._send_later(now_ms, finished)
            elif len(tokens) > 1:
                finished.alone = True
            else:
                del self._finished[token]
                self._say("error", f"the result of {finished.label} is refused: {error}")

    def _leave(self, now_ms: int, grace_ms: int) -> None:
        if not self.is_leaving:
            self._stop_at_ms = now_ms
            self._grace_end_ms = now_ms + grace_ms
            if self._keep_alive_at_ms is not None:
                self._keep_alive_at_ms = now_ms
        # A second request may shorten the grace, never lengthen it.
        self._grace_end_ms = min(self._grace_end_ms, now_ms + grace_ms)
        graces_ms = [self._cancel_grace_ms(run) for run in self._running.values()]
        self._leave_by_ms = self._grace_end_ms + max(graces_ms, default=CANCEL_GRACE_MS)

    def _fail(self, now_ms: int, error: AnarchonError) -> None:
        """Give the session up: handlers are stopped, their results still reported."""
        if self._error is None:
            self._error = error
        self._open_at_ms = self._keep_alive_at_ms = None
        self._leave(now_ms, 0)

    def _say_what_is_waited_for(self, now_ms: int, hint: str) -> None:
        if self._running:
            left_ms = max(self._cancel_at_ms(run) for run in self._running.values()) - now_ms
            what = _counted(len(self._running), "handler")
            names = _listed(sorted({run.assignment.job for run in self._running.values()}))
            how = f"waiting up to {_text_of(left_ms)} for" if left_ms > 0 else "cancelling"
            self._say("info", f"stopping: {how} {what} ({names}){hint and f'; {hint}'}")
        elif self._finished:
            left = _text_of(self._leave_by_ms - now_ms)
            what = _counted(len(self._finished), "result")
            self._say("info", f"stopping: waiting up to {left} for {what} to be reported")

    # ── What follows from the facts and the time ────────────────────────────────────────────────

    def _advance(self, now_ms: int) -> None:
        if self._open_at_ms is not None and now_ms >= self._open_at_ms:
            self._open_stream(now_ms)
        self._start_held(now_ms)
        self._cancel_when_leaving(now_ms)
        self._give_up_results(now_ms)
        self._send_results(now_ms)
        self._refuse_idle_confirms()
        is_confirming = any(sent.tickets for sent in self._unanswered.values())
        is_due = self._keep_alive_at_ms is not None and now_ms >= self._keep_alive_at_ms
        if is_due or (self._confirms and not is_confirming):
            self._send_keep_alive(now_ms)
        self._close_when_left(now_ms)

    def _start_held(self, now_ms: int) -> None:
        if now_ms >= self.trust_end_ms or self.is_leaving:
            return
        for token, assignment in list(self._held.items()):
            # A handler that ignores a cancellation keeps its place: the sidecar sends it again.
            del self._held[token]
            if len(self._running) >= self._request.max_concurrency:
                continue
            self._remember(token)
            self._running[token] = _Running(assignment)
            self._do(StartHandler(assignment))

    def _open_stream(self, now_ms: int) -> None:
        self._open_at_ms = None
        self._stream += 1
        request = session_pb2.SubscribeRequest()
        request.CopyFrom(self._request)
        request.in_flight.extend(self.in_flight)
        size_bytes = request.ByteSize()
        if size_bytes > MESSAGE_MAX_BYTES:
            self._fail(now_ms, too_large_error(size_bytes))
            return
        self.state = State.SUBSCRIBING
        self._do(OpenStream(self._stream, request))

    def _send_keep_alive(self, now_ms: int) -> None:
        self._keep_alives += 1
        tickets, self._confirms = self._confirms, []
        self._unanswered[self._keep_alives] = _KeepAlive(
            now_ms, self._stream if self.state is State.ATTACHED else 0, tickets
        )
        if self._keep_alive_at_ms is not None:
            self._keep_alive_at_ms = now_ms + self._interval_ms
        request = session_pb2.KeepAliveRequest(
            session_id=self._request.session_id,
            in_flight=self.in_flight,
            draining=self.is_leaving,
            confirm=list(dict.fromkeys(token for _, token in tickets)),
        )
        timeout_ms = min(self._interval_ms, KEEP_ALIVE_TIMEOUT_MAX_MS)
        self._do(SendKeepAlive(self._keep_alives, request, timeout_ms))

    def _send_results(self, now_ms: int) -> None:
        """Send what has no receipt, one batch at a time: what ends meanwhile goes with the next."""
        if self._is_sending:
            return
        request = session_pb2.CompleteRequest()
        size_bytes = 0
        for token, finished in self._finished.items():
            if now_ms < finished.send_at_ms or (finished.alone and request.results):
                continue
            result = session_pb2.Result(token=token, outcome=finished.outcome)
            # Key and length of a field take less than 16 bytes.
            size_bytes += result.ByteSize() + 16
            if request.results and size_bytes > RESULTS_MAX_BYTES:
                break
            request.results.append(result)
            if finished.alone or len(request.results) == RESULTS_MAX:
                break
        if request.results:
            self._is_sending = True
            tokens = tuple(result.token for result in request.results)
            self._do(SendResults(tokens, request, COMPLETE_TIMEOUT_MS))

    def _give_up_results(self, now_ms: int) -> None:
        if not self._finished or now_ms < self._give_up_at_ms:
            return
        for token, finished in list(self._finished.items()):
            if now_ms >= finished.give_up_at_ms:
                del self._finished[token]
                self._say(
                    "error",
                    f"the result of {finished.label} could not be reported for "
                    f"{finished.repeat_for_ms // 60_000} min, and is given up",
                )
        times = [finished.give_up_at_ms for finished in self._finished.values()]
        self._give_up_at_ms = min(times, default=0)

    def _cancel_when_leaving(self, now_ms: int) -> None:
        if not self.is_leaving:
            return
        for token, run in self._running.items():
            if not run.cancelled and now_ms >= self._cancel_at_ms(run):
                self._cancel(now_ms, token, run_pb2.CANCEL_REASON_SHUTDOWN, trusted=True)

    def _close_when_left(self, now_ms: int) -> None:
        if not self.is_leaving or self._is_closing:
            return
        if (self._running or self._finished) and now_ms < self._leave_by_ms:
            return
        if self._running:
            labels = ", ".join(_label(run.assignment) for run in self._running.values())
            self._say("error", f"handlers that did not stop are left to their leases: {labels}")
        # What came too late to be started has surely stopped.
        stopped = list(self._held)
        for token, finished in self._finished.items():
            if finished.outcome.WhichOneof("result") == "stopped":
                stopped.append(token)
            else:
                self._say("error", f"the result of {finished.label} could not be reported")
        # A session that another process uses is not ours to close.
        if not self._was_attached or isinstance(self._error, SessionReplacedError):
            self._close()
            return
        self._is_closing = True
        self._open_at_ms = self._keep_alive_at_ms = None
        request = session_pb2.CloseSessionRequest(
            session_id=self._request.session_id, stopped=stopped
        )
        self._do(SendClose(request, CLOSE_TIMEOUT_MS))

    def _close(self) -> None:
        asked = [self._confirms, *(sent.tickets for sent in self._unanswered.values())]
        for ticket, _ in (pair for tickets in asked for pair in tickets):
            self._do(AnswerConfirm(ticket, NotConfirmedError("the client has stopped")))
        self.state = State.CLOSED
        self._do(EndStream())
        self._do(Closed(self._error))

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def _notice_standstill(self, now_ms: int) -> None:
        """Tell people where our own keep-alive is late: what follows is not the sidecar's fault."""
        if self._keep_alive_at_ms is None:
            return
        late_ms = now_ms - self._keep_alive_at_ms
        if late_ms >= self._interval_ms:
            self._say(
                "warning",
                f"no keep-alive was sent for at least {late_ms / 1_000:.1f} s: the event loop was "
                "blocked, or the process stood still. Handlers that block must be plain functions "
                "(def, not async def), which run in threads",
            )

    def _set_trust(self, end_ms: int) -> None:
        self.trust_end_ms = end_ms
        self._do(SetTrust(end_ms))

    def _shorten_trust(self, end_ms: int) -> None:
        if end_ms < self.trust_end_ms:
            self._set_trust(end_ms)

    def _end_trust_if_over(self, now_ms: int) -> None:
        if now_ms < self.trust_end_ms:
            return
        for token, run in self._running.items():
            if run.lost_at_ms is None:
                self._cancel(
                    now_ms,
                    token,
                    run_pb2.CANCEL_REASON_LEASE_LOST,
                    message=NOT_ANSWERED,
                    trusted=False,
                )

    def _take_lost(self, now_ms: int, lost: Iterable[session_pb2.Cancellation]) -> None:
        for cancel in lost:
            self._cancel(now_ms, cancel.token, cancel.reason, message=cancel.message, trusted=False)

    def _cancel(
        self,
        now_ms: int,
        token: str,
        reason: run_pb2.CancelReason,
        *,
        message: str = "",
        trusted: bool,
    ) -> None:
        reason = reason or run_pb2.CANCEL_REASON_LEASE_LOST
        if token in self._held:
            # It surely never starts, and the sidecar may know it.
            assignment = self._held.pop(token)
            self._remember(token)
            outcome = run_pb2.Outcome(stopped=run_pb2.Stopped(reason=reason), elapsed=ms_to_wire(0))
            self._report(now_ms, assignment, outcome)
        run = self._running.get(token)
        if run is None:
            return  # it has ended
        is_news = not run.cancelled or (run.lost_at_ms is None and not trusted)
        run.cancelled = True
        if not trusted and run.lost_at_ms is None:
            run.lost_at_ms = now_ms
            run.lost_because = reason
        if is_news:
            self._do(CancelHandler(token, reason, message, trusted))

    def _report(
        self, now_ms: int, assignment: session_pb2.Assignment, outcome: run_pb2.Outcome
    ) -> None:
        finished = _Finished(
            outcome,
            _label(assignment),
            ended_at_ms=now_ms,
            repeat_for_ms=_repeat_for_ms(assignment),
            send_at_ms=now_ms,
        )
        give_up_at_ms = finished.give_up_at_ms
        if self._finished:
            give_up_at_ms = min(give_up_at_ms, self._give_up_at_ms)
        self._give_up_at_ms = give_up_at_ms
        self._finished[assignment.token] = finished

    def _send_later(self, now_ms: int, finished: _Finished) -> None:
        finished.send_at_ms = now_ms + self._backoff_ms(finished.tries)
        finished.tries += 1

    def _refuse_idle_confirms(self) -> None:
        """Answer at once what no keep-alive could."""
        kept = []
        for ticket, token in self._confirms:
            if (error := self._lost_error(token)) is not None:
                self._do(AnswerConfirm(ticket, error))
            elif self._keep_alive_at_ms is None:
                self._do(AnswerConfirm(ticket, NotConfirmedError("there is no sidecar now")))
            else:
                kept.append((ticket, token))
        self._confirms = kept

    def _answer_confirm(self, ticket: int, token: str, *, is_confirmed: bool) -> None:
        error: AnarchonError | None = self._lost_error(token)
        if error is None and not is_confirmed:
            error = NotConfirmedError("the store could not renew the lease now")
        self._do(AnswerConfirm(ticket, error))

    def _lost_error(self, token: str) -> LeaseLost | None:
        """Return the error of an attempt that is no longer ours."""
        run = self._running.get(token)
        if run is None:
            return LeaseLost(CancelReason.LEASE_LOST, "the attempt is over")
        if run.lost_at_ms is None:
            return None
        return lost_error(reason_of(run.lost_because))

    def _cancel_at_ms(self, run: _Running) -> int:
        """When a handler that still runs is cancelled because the client leaves."""
        spec = self._specs[run.assignment.job]
        if not spec.HasField("stop_grace"):
            return self._grace_end_ms
        own_end_ms = (self._stop_at_ms or 0) + wire_to_ms(spec.stop_grace)
        return min(self._grace_end_ms, own_end_ms)

    def _cancel_grace_ms(self, run: _Running) -> int:
        spec = self._specs[run.assignment.job]
        return wire_to_ms(spec.cancel_grace) if spec.HasField("cancel_grace") else CANCEL_GRACE_MS

    def _is_fatal(self, error: SidecarError) -> bool:
        # Call tokens are changed while sessions live: a wrong one is an error of the beginning.
        if isinstance(error, CredentialsError) and self._was_attached:
            return False
        return isinstance(error, SessionReplacedError | RefusedError)

    def _set_interval(self, interval_ms: int) -> None:
        self._interval_ms = max(interval_ms, KEEP_ALIVE_INTERVAL_MIN_MS)

    def _backoff_ms(self, failures: int) -> int:
        """Doubling from 100 ms to 5 s, and drawn from the upper half, so that clients spread."""
        longest_ms = min(BACKOFF_FIRST_MS << min(failures, 10), BACKOFF_MAX_MS)
        return round(longest_ms * (0.5 + 0.5 * self._random()))

    def _remember(self, token: str) -> None:
        if len(self._remembered) == self._remembered.maxlen:
            self._known.discard(self._remembered[0])
        self._remembered.append(token)
        self._known.add(token)

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    def _say(self, level: Literal["info", "warning", "error"], message: str) -> None:
        self._do(Log(level, message))


_RECEIPTS_THAT_REFUSE: Mapping[session_pb2.ReceiptStatus, str] = {
    session_pb2.RECEIPT_STATUS_FENCED: "its attempt no longer held the lease",
    session_pb2.RECEIPT_STATUS_UNKNOWN_TOKEN: "the sidecar knows no such attempt",
    session_pb2.RECEIPT_STATUS_ALREADY_COMPLETED: "another outcome is in the store",
}


def too_large_error(size_bytes: int) -> RefusedError:
    """Return the error for a Subscribe request that no sidecar would take."""
    return RefusedError(
        f"the Subscribe request has {size_bytes:,} bytes, and at most {MESSAGE_MAX_BYTES:,} may be "
        "sent: shorten labels, or split the jobs between clients",
        "LIMIT_EXCEEDED",
    )


def _text_of(duration_ms: int) -> str:
    return to_text(timedelta(milliseconds=duration_ms))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _label(assignment: session_pb2.Assignment) -> str:
    return f"{assignment.job} {assignment.slot} attempt {assignment.attempt}"


def _repeat_for_ms(assignment: session_pb2.Assignment) -> int:
    """How long to repeat the result: while the lease can last, the store may still take it.

    No clock is read. A slot is claimed when it is due, so that from the slot to the lease's end is
    the lease; for a later attempt it is more, which does no harm.
    """
    if not assignment.HasField("lease_end_time"):
        return COMPLETE_FOR_MS
    lease_ms = assignment.lease_end_time.ToMilliseconds() - assignment.slot
    return min(max(lease_ms, COMPLETE_FOR_MS), COMPLETE_FOR_MAX_MS)
