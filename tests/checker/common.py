"""What holds on every backend: `Order` walks through the history once and judges each event by what
came before it, the functions look at the whole. What a kind of backend adds is `leased`, `claim_only`.

Pure: imports the events, the history and the standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.checker.events import (
    AppDied,
    AppFroze,
    AppThawed,
    AssignmentRefused,
    ClaimWon,
    ClockStepped,
    Event,
    HandlerEnded,
    HandlerStarted,
    HandlerStepped,
    HandlerTold,
    JobKnown,
    LeasesEnded,
    ResultReceipt,
    RunSaved,
)
from tests.checker.history import FOREVER, History, Key, Violation


@dataclass(slots=True)
class Order:
    """Walks through the history. The rules: I1 to I3, I7, F1, F7, F9, F10, F13, F16, S13, S17."""

    history: History
    found: list[Violation] = field(default_factory=list)
    runs: dict[Key, RunSaved] = field(default_factory=dict)
    tokens: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    winners: dict[tuple[str, int, int], str] = field(default_factory=dict)
    running: dict[str, dict[str, HandlerStarted]] = field(default_factory=lambda: defaultdict(dict))
    out_of_reach: set[str] = field(default_factory=set)
    thawed_at: dict[str, int] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    set_back_at: int = -FOREVER
    latest_store_at: int = -FOREVER

    def judge(self) -> list[Violation]:
        """What the events break, each by what came before it."""
        for event in self.history.events:
            match event:
                case RunSaved():
                    self._saved(event)
                case ClaimWon():
                    self._won(event)
                case LeasesEnded():
                    self._leases_ended(event)
                case ClockStepped() if event.by_ms < 0:
                    self.set_back_at = event.at
                case _:
                    self._in_an_app(event)
        return self.found

    def _in_an_app(self, event: Event) -> None:
        match event:
            case HandlerStarted():
                self._handler_started(event)
                self._step(event)
            case HandlerStepped():
                self._step(event)
            case HandlerTold():
                self.told.setdefault(event.token, event.reason)
            case HandlerEnded():
                self._ended(event.token)
            case AssignmentRefused():
                self._say("S13", event, (event.job, event.slot), "sent to a client without room")
            case AppDied() | AppFroze():
                self.out_of_reach.add(event.app)
            case AppThawed():
                self.out_of_reach.discard(event.app)
                self.thawed_at[event.app] = event.at
            case ResultReceipt():
                self._receipt(event)
            case _:
                pass

    def _say(self, rule: str, event: Event, key: Key, text: str) -> None:
        self.found.append(Violation(rule, event.at, *key, text))

    def _leases_ended(self, event: LeasesEnded) -> None:
        """The machine has booted anew."""

    # A run's states

    def _saved(self, run: RunSaved) -> None:
        key = (run.job, run.slot)
        self.latest_store_at = max(self.latest_store_at, run.store_at)
        before = self.runs.get(key)
        if before is not None and before.final:
            self._say("I3", run, key, f"{before.state} became {run.state} by {run.by}")
        if run.token and (before is None or run.token != before.token):
            self._new_attempt(run, before)
        elif before is not None and not before.final:
            self._same_attempt(run, before)
        if run.state == "skipped":
            self._skipped(run)
        self.runs[key] = run

    def _new_attempt(self, run: RunSaved, before: RunSaved | None) -> None:
        key = (run.job, run.slot)
        number = before.attempt if before else 0
        if run.attempt != number + 1:
            self._say("I2", run, key, f"attempt {run.attempt} follows attempt {number}")
        if run.token in self.tokens:
            self._say("I2", run, key, f"token {run.token} was used for another attempt")
        self.tokens[run.token] = (run.job, run.slot, run.attempt)
        winner = self.winners.setdefault((run.job, run.slot, run.attempt), run.token)
        if winner != run.token:
            self._say("F1", run, key, f"attempt {run.attempt} was won twice")
        if before is None and run.attempt == 1:
            deadlines = self.history.deadlines.get(key)
            late_ms = self.history.jobs[run.job].late_ms
            if deadlines and run.store_at > run.slot + max(deadlines) + late_ms:
                self._say("F10", run, key, f"claimed {run.store_at - run.slot} ms after its time")

    def _same_attempt(self, run: RunSaved, before: RunSaved) -> None:
        """F7, I3: only the holder of the current token changes the run; others when it is over."""
        if not before.token:
            return
        ours = run.by_token == before.token
        if run.by in ("beat", "release"):
            ours = ours and (run.adopt or run.by_incarnation == before.incarnation)
        if not ours and not self._ends_what_is_over(run, before):
            text = f"changed to {run.state} by {run.by} of another than its holder"
            self._say("F7", run, (run.job, run.slot), text)

    def _ends_what_is_over(self, run: RunSaved, before: RunSaved) -> bool:
        """Whether another than the holder of `before` may have saved `run`."""
        del run, before
        return False

    def _skipped(self, run: RunSaved) -> None:
        """A slot was recorded as Skipped."""

    def _won(self, won: ClaimWon) -> None:
        key = (won.job, won.slot)
        if self.tokens.get(won.token) != (won.job, won.slot, won.attempt):
            self._say(
                "F1", won, key, f"told WON for attempt {won.attempt}, which the store has not"
            )

    # What handlers do

    def _handler_started(self, start: HandlerStarted) -> None:
        key = (start.job, start.slot)
        if start.token in self.started:
            self._say("I1", start, key, f"attempt {start.attempt} was started twice")
        self.started.add(start.token)
        self._next_to(start)
        self.running[start.job][start.token] = start
        job = self.history.jobs[start.job]
        early = start.slot - job.clock_error_ms - start.store_at
        if early > 0 and self._clock_is_known(start) and self.latest_store_at < start.slot:
            self._say("I7", start, key, f"started {early} ms before its slot")

    def _clock_is_known(self, start: HandlerStarted) -> bool:
        """Whether the instance has had time to learn that the clock was set back: what it was cut off
        for does not count.
        """
        run = self.runs.get((start.job, start.slot))
        if self.set_back_at == -FOREVER or run is None:
            return True
        spans = self.history.able.spans_of(run.instance, start.job)
        well = [max(begun, self.set_back_at) for begun, end in spans if end >= self.set_back_at]
        learned_ms = self.history.jobs[start.job].clock_learned_ms
        return any(start.at - since > learned_ms for since in well)

    def _ended(self, token: str) -> None:
        self.ended.add(token)
        for tokens in self.running.values():
            tokens.pop(token, None)

    def _next_to(self, start: HandlerStarted) -> None:
        """S16, S25: a handler that obeys, and can be reached, has ended before the next one starts.
        That holds for the attempts of a run, and where no overlap is allowed for those of a job.
        """
        overlap = self.history.jobs[start.job].overlap
        for other in self.running[start.job].values():
            beside = overlap and other.slot != start.slot
            if beside or not other.obeys or other.app in self.out_of_reach:
                continue
            thawed_for = start.at - self.thawed_at.get(other.app, -FOREVER)
            if thawed_for <= self.history.jobs[start.job].margin_ms:
                continue  # told just now, it has the margin to obey in
            text = f"started beside attempt {other.attempt} of slot {other.slot}, which obeys"
            self._say("F16", start, (start.job, start.slot), text)

    def _step(self, step: HandlerStarted | HandlerStepped) -> None:
        key = (step.job, step.slot)
        if step.at >= step.trust_until:
            self._say("F16", step, key, "a step after the end of its trust")
        if step.token in self.ended:
            self._say("F16", step, key, "a step of a handler that has ended")

    def _receipt(self, receipt: ResultReceipt) -> None:
        known = self.tokens.get(receipt.token)
        if receipt.status != "recorded" or known is None:
            return
        key = (known[0], known[1])
        states = self.history.saved[key]
        kept = _retried_for_its_timeout(receipt.token, states) or any(
            run.token == receipt.token
            and (
                run.final or run.freed == "handed_over" or run.state == "retrying" or timed_out(run)
            )
            for run in states
            if run.at <= receipt.at
        )
        if not kept:
            self._say("S17", receipt, key, "a result that was RECORDED is not in the store")


def _retried_for_its_timeout(token: str, states: Sequence[RunSaved]) -> bool:
    """Whether the attempt was followed by another because it had outlived its timeout (S22)."""
    return any(
        run.token == token and after.token != token and after.failed > run.failed
        for run, after in pairwise(states)
    )


def timed_out(run: RunSaved) -> bool:
    """Whether its attempt has failed for its timeout, though another may follow (S22)."""
    return bool(run.freed) and run.cancel == "timeout"


# ── The whole ───────────────────────────────────────────────────────────────────────────────────


def missed_needlessly(history: History) -> Iterable[Violation]:
    """I6, F3: no slot is missed while one instance could have run it all the time."""
    for due in history.slots:
        key = (due.job, due.slot)
        rows = history.saved.get(key)
        if due.missed_at > history.end_at or (rows and rows[-1].reason != "missed"):
            continue
        if rows and rows[-1].at < due.at:
            continue  # settled before: the store's clock was set back, and came to it again
        if due.missed_at - due.at < due.deadline_ms:
            continue  # the store's clock was set forward meanwhile
        if history.was_paused(due.job, due.at, due.missed_at):
            continue  # neither run nor missed (S29)
        able = history.able.throughout(due.job, due.at, due.missed_at, due.schedule_id)
        if able is not None:
            yield Violation("F3", due.missed_at, *key, f"missed, though {able} could have run it")


def results_without_receipt(history: History) -> Iterable[Violation]:
    """S27: whoever lives gets a receipt for its result."""
    for handler in history.handlers.values():
        key = (handler.start.job, handler.start.slot)
        if handler.ended_at is None or handler.receipt_at is not None:
            continue
        waited_until = handler.ended_at + patience(history.jobs[handler.start.job])
        if handler.start.app in history.died_at or waited_until > history.end_at:
            continue
        yield Violation("S27", history.end_at, *key, "a result without a receipt")


def outlived_their_timeout(history: History) -> Iterable[Violation]:
    """S21: whoever outlives the timeout is no success."""
    for token, handler in history.handlers.items():
        key = (handler.start.job, handler.start.slot)
        job = history.jobs[handler.start.job]
        if not job.timeout_ms or handler.ended_at is None:
            continue
        ran_for = handler.ended_at - handler.start.at
        if ran_for <= job.timeout_ms + job.witness_ms + job.takeover_ms:
            continue
        last = history.saved[key][-1]
        if last.token == token and last.state == "success":
            yield Violation("S21", last.at, *key, f"a success after {ran_for} ms")


def retried_unasked(history: History) -> Iterable[Violation]:
    """S22: what a handler says of retries is kept: none after a permanent failure, and none sooner
    than it asks for.
    """
    for key, states in history.saved.items():
        for run in states:
            handler = history.handlers.get(run.token)
            told = handler.ended if handler is not None else None
            if run.state != "retrying" or run.by != "complete" or told is None:
                continue
            assert run.retry_at is not None
            pause_ms, asked_ms = run.retry_at - run.at, told.retry_after_ms
            if told.permanent:
                yield Violation("S22", run.at, *key, "to be retried after a permanent failure")
            if asked_ms is not None and pause_ms != asked_ms:
                text = f"to be retried after {pause_ms} ms, though {asked_ms} ms were asked for"
                yield Violation("S22", run.at, *key, text)


def not_told_of_their_timeout(history: History) -> Iterable[Violation]:
    """S21: whoever outlives the timeout is told, as soon as a client can be."""
    for handler in history.handlers.values():
        start = handler.start
        job = history.jobs[start.job]
        if not job.timeout_ms:
            continue
        of_its_attempt = [
            run for run in history.saved[start.job, start.slot] if run.token == handler.start.token
        ]
        if not of_its_attempt:
            continue
        instance = of_its_attempt[-1].instance
        ends = (handler.told_at, history.stopped_at(handler), history.end_at)
        until = min(end for end in ends if end is not None)
        since = start.at + job.timeout_ms
        for served_from, served_until in history.served.spans_of(instance, start.job):
            waits_ms = min(until, served_until) - max(since, served_from)
            if waits_ms > job.takeover_ms:
                text = f"not told of its timeout for {waits_ms} ms"
                yield Violation("S21", until, start.job, start.slot, text)


def patience(job: JobKnown) -> int:
    """For how long nothing is said of what should come about by itself."""
    return 2 * (job.witness_ms + job.takeover_ms)


def idle_since(history: History, key: Key) -> int:
    """Since when no handler has run the present attempt of a run."""
    states = history.saved[key]
    token = states[-1].token
    handler = history.handlers.get(token)
    if handler is None:
        return next(run.at for run in states if run.token == token)
    return history.stopped_at(handler)
