"""Applications: processes with one or more clients that keep to the protocol, and their handlers.

A client counts its trust from the sending of its last answered KeepAlive, believes nothing longer,
and names all that it runs or has not got a receipt for. Its handlers take steps, which are recorded
while they are trusted; some do not listen to cancellations.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from anarchon_server.core import messages as m
from anarchon_server.core.errors import AnarchonError, NotFoundError
from anarchon_server.core.model import CancelReason, Client, Failure, JobSpec, Outcome
from tests.checker.events import (
    AppDied,
    AppFroze,
    AppThawed,
    AssignmentRefused,
    HandlerEnded,
    HandlerStarted,
    HandlerStepped,
    HandlerTold,
    ResultReceipt,
)
from tests.simulation.timeline import Action

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.plan import Work

StreamEvent = m.Attached | m.Assigned | m.Cancelled | m.Draining

BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 5_000
COMPLETE_TIMEOUT_MS = 10_000
KEEP_ALIVE_TIMEOUT_MAX_MS = 5_000


class App:
    """One application process, with its clients."""

    def __init__(self, host: Host, name: str, rng: random.Random) -> None:
        world = host.world
        self.host = host
        self.name = name
        self.rng = rng
        self.dead = False
        self.frozen = False
        self.stalled_until = 0
        self.accepts = True
        self._comes_at = self._goes_at = 0
        self.answers_lost_until = 0
        self._timeline = world.timeline
        self._queue: deque[Action] = deque()
        specs = tuple(job.of_version(host.version) for job in world.plan.jobs)
        shares = _shares(specs, world.plan.sessions, rng)
        client_kind = real_client() if world.plan.real_clients else SpecClient
        self.clients: list[SimClient] = [
            client_kind(self, f"{name}.s{n}", share, world.plan.max_concurrency)
            for n, share in enumerate(shares)
        ]
        for client in self.clients:
            client.open_at(world.timeline.now + rng.randint(0, 50))

    # ── Life ────────────────────────────────────────────────────────────────────────────────────

    def die(self, *, seen: bool) -> None:
        """The process is gone, with its handlers."""
        if self.dead:
            return
        self.dead = True
        self._queue.clear()
        self.host.world.record(AppDied(self._timeline.now, self.name, self.host.name))
        sidecar, sessions = self.host.sidecar, tuple(c.session_id for c in self.clients)
        for witness in (sidecar, *self.host.zombies):
            if witness is not None:
                self._timeline.after(self.hop(), partial(witness.app_exited, sessions, seen=seen))
        self.host.look()

    def freeze(self) -> None:
        """The process is stopped; what comes for it waits."""
        if not self.dead and not self.frozen:
            self.frozen = True
            self.host.world.record(AppFroze(self._timeline.now, self.name))
            self.host.look()

    def thaw(self) -> None:
        """It goes on, and the first thing that runs is the check of its trust."""
        if self.dead or not self.frozen:
            return
        self.frozen = False
        for client in self.clients:
            client.end_trust_if_over()
        self.host.world.record(AppThawed(self._timeline.now, self.name))
        while self._queue and self.up:
            self._queue.popleft()()
        self.host.look()

    def leave(self, grace_ms: int) -> None:
        """A polite stop: each client leaves, then the process ends."""
        for client in self.clients:
            client.leave(grace_ms)

    def closed(self) -> None:
        """One of its clients has left."""
        if all(client.closed for client in self.clients):
            self.die(seen=True)
            self.host.app_left(self)

    # ── Time and messages ───────────────────────────────────────────────────────────────────────

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return not self.dead and not self.frozen

    @property
    def answers_are_lost(self) -> bool:
        """Whether answers to its requests get lost at present."""
        return self._timeline.now < self.answers_lost_until

    def hop(self) -> int:
        """How long a message takes between this process and its sidecar."""
        delay = self.rng.randint(0, self.host.world.plan.hop_ms)
        if self._timeline.now < self.stalled_until:
            delay += self.rng.randint(0, 1_500)
        return delay

    def comes(self, action: Action) -> None:
        """A message comes from the sidecar. They share one connection: none overtakes another."""
        self._comes_at = max(self._timeline.now + self.hop(), self._comes_at)
        self.do_at(self._comes_at, action)

    def goes(self, action: Action) -> None:
        """A message goes to the sidecar, likewise."""
        self._goes_at = max(self._timeline.now + self.hop(), self._goes_at)
        self._timeline.at(self._goes_at, action)

    def after(self, delay_ms: int, action: Action, *, look: bool = True) -> None:
        """A timer of this process. `look`: it may change what the host is able to do."""
        self.do_at(self._timeline.now + delay_ms, action, look=look)

    def do_at(self, moment: int, action: Action, *, look: bool = True) -> None:
        """Something this process does then, or once it thaws."""
        self._timeline.at(moment, lambda: self._do(action, look=look))

    def _do(self, action: Action, *, look: bool) -> None:
        if self.dead:
            return
        if self.frozen:
            self._queue.append(action)
            return
        for client in self.clients:
            client.end_trust_if_over()
        action()
        if look:
            self.host.look()


def real_client() -> type[SimClient]:
    """The client of the package itself."""
    from tests.simulation.real_client import RealClient

    return RealClient


def _shares(
    specs: tuple[JobSpec, ...], sessions: int, rng: random.Random
) -> list[tuple[JobSpec, ...]]:
    """Which client offers what: all of them everything, or each a part."""
    if sessions == 1 or rng.random() < 0.5 or len(specs) < sessions:
        return [specs] * sessions
    return [specs[n::sessions] for n in range(sessions)]


def _failure(work: Work, source: str) -> Failure:
    """What a handler raises: an error, which may say something of retries (S22)."""
    rng = random.Random(f"failure {source}")
    kind = rng.random()
    if kind < work.permanent:
        return Failure("Boom", permanent=True)
    asks = kind < work.permanent + work.asks
    return Failure("Boom", retry_after_ms=rng.randint(0, 4_000) if asks else None)


@dataclass(slots=True)
class _Handler:
    """A handler that runs."""

    assignment: m.Assignment
    since: int
    duration_ms: int
    step_ms: int
    listens: bool
    lost: bool = False
    told: CancelReason | None = None


@dataclass(slots=True)
class _Result:
    """A result without a receipt."""

    outcome: Outcome
    send_at: int
    tries: int = 0


@dataclass
class SimClient(ABC):
    """One client of an application: its session, and the handlers it has started."""

    app: App
    session_id: str
    specs: tuple[JobSpec, ...]
    max_concurrency: int
    ready: bool = False
    closed: bool = False
    trust_until: int = 0
    running: dict[str, _Handler] = field(default_factory=dict)

    @abstractmethod
    def open_at(self, moment: int) -> None:
        """Begins its session then."""

    @abstractmethod
    def stream_ended(self, stream: int, error: AnarchonError | None) -> None:
        """A stream is over."""

    @abstractmethod
    def event_came(self, stream: int, event: StreamEvent) -> None:
        """An event on a stream."""

    @abstractmethod
    def end_trust_if_over(self) -> None:
        """Whoever ran under a trust that is over is told, and never trusted again."""

    @abstractmethod
    def leave(self, grace_ms: int) -> None:
        """Finishes what runs, for the grace at most, and closes the session."""

    @property
    @abstractmethod
    def leaving(self) -> bool:
        """Whether it is about to leave."""

    @property
    @abstractmethod
    def in_flight(self) -> tuple[str, ...]:
        """What it runs, or has finished without a receipt."""

    @abstractmethod
    def _report(self, token: str, outcome: Outcome) -> None:
        """A handler has ended."""

    @property
    def job_names(self) -> frozenset[str]:
        """The jobs it offers."""
        return frozenset(spec.name for spec in self.specs)

    @property
    def room(self) -> int:
        """How many more attempts it can run."""
        return self.max_concurrency - len(self.in_flight)

    @property
    def able(self) -> bool:
        """Whether it can be given an attempt: attached, answered and not leaving."""
        return self.app.up and self.ready and not self.leaving and self._now < self.trust_until

    @property
    def _now(self) -> int:
        return self.app.host.world.timeline.now

    # ── Handlers ────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, assignment: m.Assignment) -> None:
        record, now = self.app.host.world.record, self._now
        record(
            AssignmentRefused(now, assignment.job, assignment.slot, assignment.token, self.app.name)
        )

    def _start(self, assignment: m.Assignment) -> None:
        world, rng = self.app.host.world, self.app.rng
        work = next(job.work for job in world.plan.jobs if job.spec.name == assignment.job)
        handler = _Handler(
            assignment,
            self._now,
            rng.randint(*work.duration_ms),
            rng.randint(*work.step_ms),
            listens=rng.random() >= work.ignores,
        )
        token = assignment.token
        self.running[token] = handler
        world.record(
            HandlerStarted(
                self._now,
                world.storage.clock.wall_ms(),
                assignment.job,
                assignment.slot,
                assignment.attempt,
                token,
                assignment.fence,
                self.app.name,
                self.trust_until,
                handler.listens,
            )
        )
        self.app.after(handler.step_ms, lambda: self._step(token), look=False)
        raises = rng.random() < work.fails
        failure = _failure(work, f"{world.plan.seed} {token}") if raises else None
        outcome = Outcome(failure=failure) if failure else Outcome(result="done")
        self.app.after(handler.duration_ms, lambda: self._end(token, outcome))

    def _step(self, token: str) -> None:
        handler = self.running.get(token)
        if handler is None:
            return
        world, assignment = self.app.host.world, handler.assignment
        if not handler.lost and self._now < self.trust_until:
            world.record(
                HandlerStepped(
                    self._now,
                    assignment.job,
                    assignment.slot,
                    token,
                    assignment.fence,
                    self.app.name,
                    self.trust_until,
                )
            )
        self.app.after(handler.step_ms, lambda: self._step(token), look=False)

    def _end(self, token: str, outcome: Outcome) -> None:
        handler = self.running.pop(token, None)
        if handler is None:
            return
        told = outcome.failure or Failure("")
        self.app.host.world.record(
            HandlerEnded(self._now, token, self.app.name, told.permanent, told.retry_after_ms)
        )
        elapsed = self._now - handler.since
        self._report(
            token, Outcome(outcome.result, outcome.failure, outcome.stopped, elapsed_ms=elapsed)
        )

    def _tell(self, token: str, reason: CancelReason, *, trusted: bool) -> None:
        """A handler is told to stop; one that does not listen goes on."""
        handler = self.running.get(token)
        if handler is None:
            return
        news = handler.told is None or (not handler.lost and not trusted)
        handler.lost = handler.lost or not trusted
        if not news:
            return
        handler.told = reason
        self.app.host.world.record(HandlerTold(self._now, token, reason))
        if handler.listens:
            work = self.app.host.world.work_of(handler.assignment.job)
            delay = self.app.rng.randint(0, work.obeys_within_ms)
            self.app.after(delay, lambda: self._end(token, Outcome(stopped=reason)))

    def _note_receipt(self, token: str, receipt: m.Receipt) -> None:
        self.app.host.world.record(ResultReceipt(self._now, token, receipt.status))

    # ── Requests ────────────────────────────────────────────────────────────────────────────────

    def _request(
        self,
        event: m.KeepAlive | m.Complete | m.CloseSession,
        answered: AnsweredBy,
        refused: RefusedBy,
        timeout_ms: int,
    ) -> None:
        """One unary call: exactly one of the two is told, once."""
        sidecar = self.app.host.sidecar
        over = [False]

        def once_answered(answer: m.KeepAliveAnswer | m.CompleteAnswer | m.Closed) -> None:
            if not over[0]:
                over[0] = True
                answered(answer)

        def once_refused(error: AnarchonError | None) -> None:
            if not over[0]:
                over[0] = True
                refused(error)

        self.app.after(timeout_ms, lambda: once_refused(None))
        if sidecar is None:
            self.app.comes(lambda: once_refused(None))
            return

        def arrived() -> None:
            if sidecar.unreachable:
                self.app.comes(lambda: once_refused(None))
            else:
                sidecar.ask(self, event, once_answered, once_refused)

        self.app.goes(arrived)


@dataclass
class SpecClient(SimClient):
    """A client as the specification has it, in the fewest words."""

    stream: int = 0
    state: str = "detached"
    finished: dict[str, _Result] = field(default_factory=dict)
    _held: dict[str, m.Assignment] = field(default_factory=dict)
    _remembered: set[str] = field(default_factory=set)
    _interval_ms: int = 500
    _keep_alives: int = 0
    _answered: int = 0
    _keep_alive_timer: int = 0
    _unanswered: dict[int, tuple[int, int]] = field(default_factory=dict)
    _failures: int = 0
    _sending: bool = False
    _leave_by: int | None = None
    _keeps_alive: bool = False

    @property
    def leaving(self) -> bool:
        """Whether it is about to leave."""
        return self._leave_by is not None

    @property
    def in_flight(self) -> tuple[str, ...]:
        """What it runs, or has finished without a receipt."""
        return (*self.running, *self.finished)

    # ── The stream ──────────────────────────────────────────────────────────────────────────────

    def open_at(self, moment: int) -> None:
        """Opens a stream then."""
        self.stream += 1
        number = self.stream
        self.app.do_at(moment, lambda: self._open(number))

    def _open(self, number: int) -> None:
        if number != self.stream or self.closed:
            return
        world, sidecar = self.app.host.world, self.app.host.sidecar
        if sidecar is None:
            self._reopen()
            return
        self.state = "subscribing"
        self.stream = world.next_number()
        event = m.Subscribe(
            self.session_id,
            self.stream,
            Client("simulated", process_id=1),
            self.specs,
            self.max_concurrency,
            self.in_flight,
            self.app.host.clock.wall_ms(),
            watchable=world.plan.watchable,
        )
        stream = self.stream

        def arrived() -> None:
            if sidecar.unreachable:
                self.app.comes(lambda: self.stream_ended(stream, None))
            else:
                sidecar.subscribe(self, event)

        self.app.goes(arrived)

    def _reopen(self) -> None:
        """Subscribes again after a pause."""
        self.state = "detached"
        self.ready = False
        self._held.clear()
        self.open_at(self._now + self._backoff(self._failures))
        self._failures += 1

    def stream_ended(self, stream: int, error: AnarchonError | None) -> None:
        """A stream is over."""
        if stream == self.stream and not self.closed:
            assert error is None or isinstance(error, AnarchonError)
            self._reopen()

    def event_came(self, stream: int, event: StreamEvent) -> None:
        """An event on a stream."""
        if stream != self.stream or self.closed:
            return
        match event:
            case m.Attached():
                self.state = "attached"
                self._keeps_alive = True
                self._interval_ms = event.keep_alive_ms
                self._take_lost(event.lost)
                self._keep_alive()
            case m.Assigned() if self.state == "attached":
                for assignment in event.assignments if self.app.accepts else ():
                    if assignment.token not in self._remembered:
                        self._held[assignment.token] = assignment
                self._start_held()
            case m.Cancelled():
                gone = event.reason in (CancelReason.LEASE_LOST, CancelReason.FENCED)
                self._cancel(event.token, event.reason, trusted=not gone)
            case _:
                pass

    # ── Trust ───────────────────────────────────────────────────────────────────────────────────

    def _keep_alive(self) -> None:
        """Sends one, and plans the next."""
        if not self._keeps_alive or self.closed:
            return
        self._keep_alives += 1
        number = self._keep_alives
        self._unanswered[number] = (self._now, self.stream if self.state == "attached" else 0)
        world = self.app.host.world
        event = m.KeepAlive(
            world.next_number(),
            self.session_id,
            self.in_flight,
            draining=self._leave_by is not None,
            confirm=self.in_flight if self.app.rng.random() < 0.02 else (),
        )
        timeout = min(self._interval_ms, KEEP_ALIVE_TIMEOUT_MAX_MS)
        self._request(
            event,
            lambda answer: self._keep_alive_answered(number, answer),
            lambda error: self._keep_alive_failed(number, error),
            timeout,
        )
        self._keep_alive_timer += 1
        timer = self._keep_alive_timer
        self.app.after(self._interval_ms, lambda: self._keep_alive_due(timer))

    def _keep_alive_due(self, timer: int) -> None:
        if timer == self._keep_alive_timer:
            self._keep_alive()

    def _keep_alive_answered(
        self, number: int, answer: m.KeepAliveAnswer | m.CompleteAnswer | m.Closed
    ) -> None:
        assert isinstance(answer, m.KeepAliveAnswer)
        if number not in self._unanswered:
            return
        sent_at, stream = self._unanswered.pop(number)
        if number > self._answered:
            self._answered = number
            self._trust(sent_at, answer)
            self._interval_ms = answer.keep_alive_ms
        self._take_lost(answer.lost)
        self.end_trust_if_over()
        if stream == self.stream and self.state == "attached":
            if not answer.stream_open:
                self._reopen()
                return
            self._failures = 0
            self.ready = True
        self._start_held()

    def _trust(self, since: int, answer: m.KeepAliveAnswer) -> None:
        """Counted from the sending: what the sidecar promised, it promised after that."""
        self.trust_until = since + answer.session_ttl_ms
        self.app.do_at(self.trust_until, self.end_trust_if_over)

    def _keep_alive_failed(self, number: int, error: AnarchonError | None) -> None:
        if number not in self._unanswered:
            return
        _, stream = self._unanswered.pop(number)
        self._held.clear()
        if isinstance(error, NotFoundError) and stream == self.stream:
            self._keeps_alive = False
            if self.state == "attached":
                self._reopen()

    def end_trust_if_over(self) -> None:
        """Whoever ran under a trust that is over is told, and never trusted again."""
        if self._now < self.trust_until or self.closed:
            return
        for token, handler in list(self.running.items()):
            if not handler.lost:
                self._cancel(token, CancelReason.LEASE_LOST, trusted=False)

    def _take_lost(self, lost: tuple[m.Lost, ...]) -> None:
        for gone in lost:
            self._cancel(gone.token, gone.reason, trusted=False)

    # ── Handlers ────────────────────────────────────────────────────────────────────────────────

    def _start_held(self) -> None:
        if self._now >= self.trust_until or self._leave_by is not None:
            return
        for token, assignment in list(self._held.items()):
            del self._held[token]
            if len(self.running) < self.max_concurrency:
                self._remembered.add(token)
                self._start(assignment)
            else:  # the sidecar sends it again
                self._refuse(assignment)

    def _cancel(self, token: str, reason: CancelReason, *, trusted: bool) -> None:
        held = self._held.pop(token, None)
        if held is not None:  # it surely never starts
            self._remembered.add(token)
            self._report(token, Outcome(stopped=reason))
        self._tell(token, reason, trusted=trusted)

    # ── Results ─────────────────────────────────────────────────────────────────────────────────

    def _report(self, token: str, outcome: Outcome) -> None:
        self.finished[token] = _Result(outcome, self._now)
        self._send_results()

    def _send_results(self) -> None:
        if self._sending or self.closed:
            return
        due = {t: r for t, r in self.finished.items() if r.send_at <= self._now}
        if not due:
            return
        self._sending = True
        tokens = tuple(due)
        event = m.Complete(
            self.app.host.world.next_number(), tuple((t, r.outcome) for t, r in due.items())
        )
        self._request(
            event,
            lambda answer: self._receipts(tokens, answer),
            lambda _: self._results_failed(tokens),
            COMPLETE_TIMEOUT_MS if self.app.rng.random() < 0.8 else 300,
        )

    def _receipts(
        self, tokens: tuple[str, ...], answer: m.KeepAliveAnswer | m.CompleteAnswer | m.Closed
    ) -> None:
        assert isinstance(answer, m.CompleteAnswer)
        self._sending = False
        for token, receipt in zip(tokens, answer.receipts, strict=True):
            if receipt.status is m.ReceiptStatus.STORE_UNAVAILABLE:
                self._again_later(token)
            else:
                del self.finished[token]
                self._note_receipt(token, receipt)
        self._send_results()
        self._close_when_left()

    def _results_failed(self, tokens: tuple[str, ...]) -> None:
        self._sending = False
        for token in tokens:
            self._again_later(token)

    def _again_later(self, token: str) -> None:
        result = self.finished[token]
        result.send_at = self._now + self._backoff(result.tries)
        result.tries += 1
        self.app.do_at(result.send_at, self._send_results)

    # ── Leaving ─────────────────────────────────────────────────────────────────────────────────

    def leave(self, grace_ms: int) -> None:
        """Finishes what runs, for the grace at most, and closes the session."""
        if self._leave_by is not None or self.closed:
            return
        self._leave_by = self._now + grace_ms + 1_000
        self.ready = False
        self._keep_alive()
        for token in list(self.running):
            self.app.after(grace_ms, partial(self._shut_down, token))
        self.app.do_at(self._leave_by, self._close_when_left)
        self._close_when_left()

    def _shut_down(self, token: str) -> None:
        self._cancel(token, CancelReason.SHUTDOWN, trusted=True)

    def _close_when_left(self) -> None:
        if self._leave_by is None or self.closed:
            return
        if (self.running or self.finished) and self._now < self._leave_by:
            return
        self.closed = True
        stopped = [t for t, r in self.finished.items() if r.outcome.stopped is not None]
        event = m.CloseSession(
            self.app.host.world.next_number(), self.session_id, (*stopped, *self._held)
        )
        self._request(event, lambda _: self.app.closed(), lambda _: self.app.closed(), 5_000)

    def _backoff(self, failures: int) -> int:
        longest = min(BACKOFF_FIRST_MS << min(failures, 10), BACKOFF_MAX_MS)
        return self.app.rng.randint(longest // 2, longest)


if TYPE_CHECKING:
    from tests.simulation.sidecar import Answered as AnsweredBy
    from tests.simulation.sidecar import Refused as RefusedBy
