"""A session in a test's hands: facts in, commands out, time as a number."""

from __future__ import annotations

from typing import TypeVar

from anarchon import _session as s
from anarchon._duration import ms_to_wire
from anarchon._errors import SidecarError, SidecarUnavailableError
from anarchon.v1 import job_pb2, run_pb2, session_pb2

TTL_MS, INTERVAL_MS = 15_000, 5_000
SUCCESS = run_pb2.Outcome(success=run_pb2.Success(result="done"))
AWAY = SidecarUnavailableError("no sidecar: the test says so")
_C = TypeVar("_C", bound=s.Command)


class Harness:
    """Keeps the time and the last commands; `spread` is what chance draws."""

    def __init__(
        self,
        *jobs: job_pb2.JobSpec,
        max_concurrency: int = 10,
        spread: float = 0.0,
    ) -> None:
        request = session_pb2.SubscribeRequest(
            session_id="session",
            jobs=jobs or (job_pb2.JobSpec(name="sync"),),
            max_concurrency=max_concurrency,
        )
        self.session = s.Session(request, lambda: spread)
        self.now_ms = 1_000_000
        self.commands: list[s.Command] = []
        self.tokens = 0
        self.feed(s.Start())

    def feed(self, fact: s.Fact) -> None:
        self.commands = self.session.handle(self.now_ms, fact)
        wake_at_ms = self.session.wake_at_ms
        assert wake_at_ms is None or wake_at_ms > self.now_ms, "a loop that never rests"

    def all(self, kind: type[_C]) -> list[_C]:
        return [command for command in self.commands if isinstance(command, kind)]

    def one(self, kind: type[_C]) -> _C:
        (command,) = self.all(kind)
        return command

    def wait(self, for_ms: int) -> list[s.Command]:
        """Let time pass, waking the session whenever it wants; return all that it did."""
        until_ms, done = self.now_ms + for_ms, []
        while (wake_at_ms := self.session.wake_at_ms) is not None and wake_at_ms <= until_ms:
            self.now_ms = wake_at_ms
            self.feed(s.Tick())
            done += self.commands
        self.now_ms = until_ms
        self.commands = done
        return done

    # ── What a sidecar does ─────────────────────────────────────────────────────────────────────

    def attach(self, *lost: session_pb2.Cancellation, ttl_ms: int = TTL_MS) -> None:
        """Answer the Subscribe that was last sent, and leave the keep-alive that follows open."""
        attached = session_pb2.Attached(
            instance_id="one",
            keep_alive_interval=ms_to_wire(INTERVAL_MS),
            session_ttl=ms_to_wire(ttl_ms),
            lost=lost,
        )
        self.event(session_pb2.SubscribeResponse(attached=attached))

    def attach_and_trust(self) -> None:
        self.attach()
        self.answer(self.one(s.SendKeepAlive))

    def event(self, event: session_pb2.SubscribeResponse) -> None:
        self.feed(s.StreamEvent(self.stream, event))

    @property
    def stream(self) -> int:
        return self.session._stream

    def assign(self, *tokens: str, job: str = "sync", lease_ms: int | None = None) -> None:
        """Hand out runs of slot 1, without a lease's end unless there is a lease."""
        batch = session_pb2.Assignments(
            assignments=[
                session_pb2.Assignment(token=token, job=job, slot=1, attempt=1, fence=1)
                for token in tokens
            ]
        )
        if lease_ms is not None:
            for assignment in batch.assignments:
                assignment.lease_end_time.FromMilliseconds(assignment.slot + lease_ms)
        self.event(session_pb2.SubscribeResponse(runs=batch))

    def cancel(self, token: str, reason: run_pb2.CancelReason) -> None:
        cancel = session_pb2.Cancellation(token=token, reason=reason)
        self.event(session_pb2.SubscribeResponse(cancel=cancel))

    def answer(
        self,
        sent: s.SendKeepAlive,
        *,
        ttl_ms: int = TTL_MS,
        stream_open: bool = True,
        lost: dict[str, run_pb2.CancelReason] | None = None,
        confirmed: tuple[str, ...] = (),
        interval_ms: int | None = None,
    ) -> None:
        response = session_pb2.KeepAliveResponse(
            session_ttl=ms_to_wire(ttl_ms),
            stream_open=stream_open,
            lost=[
                session_pb2.Cancellation(token=token, reason=reason)
                for token, reason in (lost or {}).items()
            ],
            confirmed=confirmed,
        )
        if interval_ms is not None:
            response.keep_alive_interval.CopyFrom(ms_to_wire(interval_ms))
        self.feed(s.KeepAliveAnswered(sent.number, response))

    def lose_stream(self, error: SidecarError = AWAY) -> None:
        self.feed(s.StreamEnded(self.stream, error))

    def next_keep_alive(self) -> s.SendKeepAlive:
        """Wait for the keep-alive that is due next."""
        self.wait(INTERVAL_MS)
        return self.one(s.SendKeepAlive)

    def end(self, token: str, outcome: run_pb2.Outcome = SUCCESS) -> None:
        self.feed(s.HandlerEnded(token, outcome))

    def receive(self, sent: s.SendResults, *statuses: session_pb2.ReceiptStatus) -> None:
        """Answer results; by default all are recorded."""
        statuses = statuses or (session_pb2.RECEIPT_STATUS_RECORDED,) * len(sent.tokens)
        receipts = [session_pb2.Receipt(status=status) for status in statuses]
        self.feed(s.ResultsAnswered(sent.tokens, session_pb2.CompleteResponse(receipts=receipts)))


def stopped(reason: run_pb2.CancelReason) -> run_pb2.Outcome:
    return run_pb2.Outcome(stopped=run_pb2.Stopped(reason=reason))
