"""Whatever a sidecar, a network and handlers do, and in whatever order, the session keeps its word."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anarchon import _session as s
from anarchon._errors import (
    RefusedError,
    SessionNotFoundError,
    SidecarError,
    SidecarUnavailableError,
)
from anarchon.v1 import run_pb2, session_pb2
from tests.unit.client.session_harness import SUCCESS, TTL_MS, Harness, stopped

MAX_CONCURRENCY = 3
REASONS = [reason for reason in run_pb2.CancelReason.values() if reason]
ERRORS: list[SidecarError] = [
    SidecarUnavailableError("away"),
    SessionNotFoundError("unknown", "SESSION_NOT_FOUND"),
]
STATUSES = list(map(session_pb2.ReceiptStatus.Name, session_pb2.ReceiptStatus.values()))
# Few, so that they repeat; the sidecar repeats them too.
TOKENS = st.sampled_from([f"t{number}" for number in range(12)])
MOMENTS = st.one_of(st.integers(0, 300), st.integers(0, 40_000))
TTLS = st.one_of(st.just(TTL_MS), st.integers(0, 20_000))


class SessionMachine(RuleBasedStateMachine):
    """A session, a model of what it may do, and chance in the place of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(max_concurrency=MAX_CONCURRENCY)
        self.started: set[str] = set()
        self.running: dict[str, bool] = {}  # token: is told that its trust is over
        # With when it was sent, and on which attached stream; 0 without one.
        self.keep_alives: dict[int, tuple[s.SendKeepAlive, int, int]] = {}
        self.attached_stream = 0
        self.answered = 0
        self.results: list[s.SendResults] = []
        self.tickets: set[int] = set()
        self.asked = 0
        self.promised_ms = 0  # until when the sidecar has promised to hold what runs
        self.stop_by_ms: int | None = None
        self.is_closing = False

    @initialize(attached=st.booleans())
    def begin(self, attached: bool) -> None:
        self.took_in()
        if attached:
            self.attached(TTL_MS)
            self.answer(max(self.keep_alives), TTL_MS, stream_open=True)

    def feed(self, fact: s.Fact) -> None:
        self.harness.feed(fact)
        self.took_in()

    def took_in(self) -> None:
        """Check every command against the model."""
        now_ms = self.harness.now_ms
        for command in self.harness.commands:
            match command:
                case s.StartHandler(assignment):
                    assert assignment.token not in self.started, "started twice"
                    assert now_ms < self.harness.session.trust_end_ms, "started without trust"
                    assert self.stop_by_ms is None, "started while leaving"
                    self.started.add(assignment.token)
                    self.running[assignment.token] = False
                case s.CancelHandler(token, _, _, trusted):
                    assert token in self.running
                    self.running[token] = self.running[token] or not trusted
                case s.SendKeepAlive(number, request, _):
                    assert set(request.in_flight) == self.in_flight
                    self.keep_alives[number] = (command, now_ms, self.attached_stream)
                case s.SendResults(tokens):
                    assert not set(tokens) & set(self.running), "a result of what still runs"
                    assert not self.results, "two calls at once"
                    self.results.append(command)
                case s.EndStream():
                    self.attached_stream = 0
                case s.OpenStream(_, request):
                    assert set(request.in_flight) == self.in_flight
                case s.SetTrust(end_ms):
                    assert end_ms <= self.promised_ms, "trusted for longer than was promised"
                case s.AnswerConfirm(ticket):
                    self.tickets.remove(ticket)
                case s.SendClose():
                    self.is_closing = True
                case s.Closed():
                    assert not self.tickets, "a question without an answer"
                case _:
                    pass
        self.harness.commands = []

    @property
    def in_flight(self) -> set[str]:
        return set(self.running) | set(self.harness.session._finished)

    # ── The world ───────────────────────────────────────────────────────────────────────────────

    @rule(for_ms=MOMENTS)
    def time_passes(self, for_ms: int) -> None:
        until_ms = self.harness.now_ms + for_ms
        session = self.harness.session
        while (wake_at_ms := session.wake_at_ms) is not None and wake_at_ms <= until_ms:
            self.harness.now_ms = wake_at_ms
            self.feed(s.Tick())
        self.harness.now_ms = until_ms

    @rule(for_ms=st.integers(0, 100_000))
    def the_process_is_frozen(self, for_ms: int) -> None:
        self.harness.now_ms += for_ms
        self.feed(s.Tick())

    @rule(ttl_ms=TTLS)
    def attached(self, ttl_ms: int) -> None:
        if self.harness.session.state in (s.State.SUBSCRIBING, s.State.ATTACHED):
            self.promised_ms = min(self.promised_ms, self.harness.now_ms + ttl_ms)
            self.attached_stream = self.harness.stream
            self.harness.attach(ttl_ms=ttl_ms)
            self.took_in()

    @rule(error=st.sampled_from([*ERRORS, RefusedError("no")]), luck=st.integers(0, 9))
    def the_stream_ends(self, error: SidecarError, luck: int) -> None:
        is_fatal = isinstance(error, RefusedError)
        if is_fatal and luck:
            return  # it would end most histories early
        if self.harness.session.state in (s.State.SUBSCRIBING, s.State.ATTACHED):
            if is_fatal:
                self.stop_by_ms = self.stop_by_ms or self.harness.now_ms + s.CANCEL_GRACE_MS
            self.attached_stream = 0
            self.harness.lose_stream(error)
            self.took_in()

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=5))
    def assigned(self, tokens: list[str]) -> None:
        self.harness.assign(*tokens)
        self.took_in()

    @rule(token=TOKENS, reason=st.sampled_from(REASONS))
    def cancelled(self, token: str, reason: run_pb2.CancelReason) -> None:
        self.harness.cancel(token, reason)
        self.took_in()

    @rule(
        data=st.data(),
        ttl_ms=TTLS,
        stream_open=st.booleans(),
        lost=st.dictionaries(TOKENS, st.sampled_from([0, *REASONS]), max_size=2),
        confirms=st.booleans(),
    )
    def a_keep_alive_is_answered(
        self,
        data: st.DataObject,
        ttl_ms: int,
        stream_open: bool,
        lost: dict[str, run_pb2.CancelReason],
        confirms: bool,
    ) -> None:
        if not self.keep_alives:
            return
        number = data.draw(st.sampled_from(sorted(self.keep_alives)))
        self.answer(number, ttl_ms, stream_open=stream_open, lost=lost, confirms=confirms)

    def answer(
        self,
        number: int,
        ttl_ms: int,
        *,
        stream_open: bool,
        lost: dict[str, run_pb2.CancelReason] | None = None,
        confirms: bool = False,
    ) -> None:
        sent, sent_at_ms, stream = self.keep_alives.pop(number)
        if number > self.answered:
            self.answered = number
            promised_ms = sent_at_ms + ttl_ms
            may_extend = stream_open and stream and stream == self.attached_stream
            self.promised_ms = promised_ms if may_extend else min(self.promised_ms, promised_ms)
        confirmed = tuple(sent.request.confirm) if confirms else ()
        self.harness.answer(
            sent, ttl_ms=ttl_ms, stream_open=stream_open, lost=lost, confirmed=confirmed
        )
        self.took_in()

    @rule(data=st.data(), error=st.sampled_from(ERRORS))
    def a_keep_alive_fails(self, data: st.DataObject, error: SidecarError) -> None:
        if self.keep_alives:
            number = data.draw(st.sampled_from(sorted(self.keep_alives)))
            del self.keep_alives[number]
            self.feed(s.KeepAliveFailed(number, error))

    @rule(data=st.data(), obeys=st.booleans())
    def a_handler_ends(self, data: st.DataObject, obeys: bool) -> None:
        if self.running:
            token = data.draw(st.sampled_from(sorted(self.running)))
            del self.running[token]
            outcome = stopped(run_pb2.CANCEL_REASON_SHUTDOWN) if obeys else SUCCESS
            self.feed(s.HandlerEnded(token, outcome))

    @rule(data=st.data())
    def results_are_answered(self, data: st.DataObject) -> None:
        if self.results:
            sent = self.results.pop()
            statuses = data.draw(
                st.lists(st.sampled_from(STATUSES), min_size=len(sent.tokens), max_size=9)
            )
            receipts = [session_pb2.Receipt(status=status) for status in statuses]
            response = session_pb2.CompleteResponse(receipts=receipts[: len(sent.tokens)])
            self.feed(s.ResultsAnswered(sent.tokens, response))

    @rule(error=st.sampled_from([*ERRORS, RefusedError("no")]))
    def results_fail(self, error: SidecarError) -> None:
        if self.results:
            self.feed(s.ResultsFailed(self.results.pop().tokens, error))

    @rule(token=TOKENS)
    def a_handler_asks(self, token: str) -> None:
        if token in self.running and self.harness.session.state is not s.State.CLOSED:
            self.asked += 1
            self.tickets.add(self.asked)
            self.feed(s.ConfirmAsked(token, self.asked))

    @rule(data=st.data())
    def the_watchdog_bites(self, data: st.DataObject) -> None:
        if self.running:
            token = data.draw(st.sampled_from(sorted(self.running)))
            self.feed(s.TrustOver((token,)))

    @rule(grace_ms=st.integers(0, 30_000), luck=st.integers(0, 9))
    def the_client_stops(self, grace_ms: int, luck: int) -> None:
        if luck == 0:
            by_ms = self.harness.now_ms + grace_ms + s.CANCEL_GRACE_MS
            self.stop_by_ms = min(self.stop_by_ms or by_ms, by_ms)
            self.feed(s.StopAsked(grace_ms))

    # ── What holds at any time ──────────────────────────────────────────────────────────────────

    @invariant()
    def nobody_trusts_after_the_end(self) -> None:
        session = self.harness.session
        if self.harness.now_ms < session.trust_end_ms or session.state is s.State.CLOSED:
            return
        self.feed(s.Tick())
        assert all(self.running.values()), "trust is over, and a handler was not told"

    @invariant()
    def trusts_for_just_as_long_as_was_promised(self) -> None:
        if self.harness.session.state is not s.State.CLOSED:
            assert self.harness.session.trust_end_ms == self.promised_ms

    @invariant()
    def no_more_handlers_than_agreed(self) -> None:
        assert len(self.running) <= MAX_CONCURRENCY

    @invariant()
    def leaving_comes_to_an_end(self) -> None:
        session = self.harness.session
        if self.stop_by_ms is not None and self.harness.now_ms >= self.stop_by_ms:
            self.feed(s.Tick())
            assert self.is_closing or session.state is s.State.CLOSED


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
