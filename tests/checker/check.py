"""Judges a history: `check(events)` lists what breaks I1 to I8 of the semantics, refined by F1 to F16.

Pure: imports the events and the standard library only. Two kinds of rule: `_Order` walks through the
history once and judges each event by what came before it; the others look at the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.checker.events import (
    AbleFrom,
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
    HistoryEnded,
    InstanceDied,
    JobKnown,
    LeasesEnded,
    ResultReceipt,
    RunSaved,
    SlotDue,
    UnableFrom,
)

Key = tuple[str, int]
"""A job and a slot: one run."""

FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: which (by its number), when, for which run, and how."""

    rule: str
    at: int
    job: str
    slot: int
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text} (job {self.job}, slot {self.slot}, at {self.at} ms)"


def check(events: Iterable[Event]) -> list[Violation]:
    """What the history breaks, in the order of the moments at which it shows."""
    history = _History(list(events))
    found = [
        *_Order(history).judge(),
        *_missed_needlessly(history),
        *_not_accounted_for(history),
        *_taken_over_late(history),
        *_lapsed_needlessly(history),
        *_not_told_in_time(history),
        *_kept_alive_by_nobody(history),
        *_results_without_receipt(history),
        *_outlived_their_timeout(history),
    ]
    return sorted(found, key=lambda violation: violation.at)


# ── The history, indexed ────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Handler:
    """What is known of one handler's life."""

    start: HandlerStarted
    told_at: int | None = None
    ended_at: int | None = None
    receipt_at: int | None = None


class _History:
    """The events, with what several rules look up in them."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.jobs = {e.job: e for e in events if isinstance(e, JobKnown)}
        self.slots = [e for e in events if isinstance(e, SlotDue)]
        self.end_at = max((e.at for e in events if isinstance(e, HistoryEnded)), default=0)
        self.boots = [e.at for e in events if isinstance(e, LeasesEnded)]
        self.saved: dict[Key, list[RunSaved]] = defaultdict(list)
        self.handlers: dict[str, _Handler] = {}
        self.died_at: dict[str, int] = {}
        self.frozen: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.deaths = [e for e in events if isinstance(e, AppDied)]
        self.processes = [e for e in events if isinstance(e, InstanceDied)]
        for event in events:
            self._take_in(event)
        self.deadlines: dict[Key, list[int]] = defaultdict(list)
        for due in self.slots:
            self.deadlines[due.job, due.slot].append(due.deadline_ms)
        self.able = _Able(events, self.end_at)

    def _take_in(self, event: Event) -> None:
        match event:
            case RunSaved():
                self.saved[event.job, event.slot].append(event)
            case HandlerStarted():
                self.handlers.setdefault(event.token, _Handler(event))
            case HandlerTold() if event.token in self.handlers:
                handler = self.handlers[event.token]
                handler.told_at = event.at if handler.told_at is None else handler.told_at
            case HandlerEnded() if event.token in self.handlers:
                self.handlers[event.token].ended_at = event.at
            case ResultReceipt() if event.token in self.handlers:
                self.handlers[event.token].receipt_at = event.at
            case AppDied():
                self.died_at.setdefault(event.app, event.at)
            case AppFroze():
                self.frozen[event.app].append((event.at, FOREVER))
            case AppThawed() if self.frozen[event.app]:
                self.frozen[event.app][-1] = (self.frozen[event.app][-1][0], event.at)
            case _:
                pass

    def lease_end(self, run: RunSaved) -> int:
        """When the lease that this state shows is over; the earliest of its end and a new boot."""
        if run.lease_until is None:
            return FOREVER
        boot = next((at for at in self.boots if at >= run.at), FOREVER)
        return min(run.lease_until, boot)

    def gone_by(self, moment: int) -> set[str]:
        """The instances' processes that were gone by then, as their successors show."""
        return {e.incarnation for e in self.processes if e.at <= moment}

    def lost_an_app(self, instance: str, start: int, end: int) -> bool:
        """Whether an application of the instance died in this time."""
        return any(e.instance == instance and start <= e.at <= end for e in self.deaths)

    def stopped_at(self, handler: _Handler) -> int:
        """When the handler surely ran no more."""
        ends = (handler.ended_at, self.died_at.get(handler.start.app))
        return min((at for at in ends if at is not None), default=FOREVER)


class _Able:
    """When which instance could have run what."""

    def __init__(self, events: Iterable[Event], end_at: int) -> None:
        self._spans: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
        since: dict[tuple[str, str, str], int] = {}
        for event in events:
            match event:
                case AbleFrom():
                    since.setdefault((event.instance, event.job, event.schedule_id), event.at)
                case UnableFrom():
                    key = (event.instance, event.job, event.schedule_id)
                    if key in since:
                        self._spans[key].append((since.pop(key), event.at))
                case _:
                    pass
        for key, start in since.items():
            self._spans[key].append((start, end_at))

    def throughout(self, job: str, start: int, end: int, schedule_id: str = "") -> str | None:
        """An instance that was able from `start` to `end` without a break; None: none was."""
        for key in self._spans:
            if key[1] == job and schedule_id in ("", key[2]) and self._covers(key, start, end):
                return key[0]
        return None

    def spans(self, instance: str, job: str, start: int, end: int) -> bool:
        """Whether this instance was able from `start` to `end` without a break."""
        return any(
            key[:2] == (instance, job) and self._covers(key, start, end) for key in self._spans
        )

    def _covers(self, key: tuple[str, str, str], start: int, end: int) -> bool:
        spans = self._spans[key]
        place = bisect_right(spans, (start, FOREVER)) - 1
        return place >= 0 and spans[place][0] <= start and end <= spans[place][1]


# ── Each event by what came before ──────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Order:
    """Walks through the history. The rules: I1 to I5, I7, F1, F2, F4 to F10, F13, F16."""

    history: _History
    found: list[Violation] = field(default_factory=list)
    runs: dict[Key, RunSaved] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    winners: dict[tuple[str, int, int], str] = field(default_factory=dict)
    claimed_at: dict[str, int] = field(default_factory=dict)
    lost: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    cancelled_at: dict[str, int] = field(default_factory=dict)
    running: dict[str, dict[str, HandlerStarted]] = field(default_factory=lambda: defaultdict(dict))
    out_of_reach: set[str] = field(default_factory=set)
    furthest: dict[str, HandlerStarted | HandlerStepped] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
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
                    self.granted = {t: min(end, event.at) for t, end in self.granted.items()}
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
            case HandlerEnded():
                self._ended(event.token)
            case AssignmentRefused():
                self._say("S13", event, (event.job, event.slot), "sent to a client without room")
            case AppDied() | AppFroze():
                self.out_of_reach.add(event.app)
            case AppThawed():
                self.out_of_reach.discard(event.app)
            case ResultReceipt():
                self._receipt(event)
            case _:
                pass

    def _say(self, rule: str, event: Event, key: Key, text: str) -> None:
        self.found.append(Violation(rule, event.at, *key, text))

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
        if run.token and not run.final and not run.freed and run.lease_until is not None:
            self.granted[run.token] = run.lease_until
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
        if run.fence <= self.fences.get(run.job, 0):
            self._say("F4", run, key, f"fence {run.fence} is not above {self.fences[run.job]}")
        self.fences[run.job] = max(run.fence, self.fences.get(run.job, 0))
        self.claimed_at[run.token] = run.at
        if before is not None and before.token:
            self._follows(run, before)
        elif run.attempt == 1 and not before:
            deadlines = self.history.deadlines.get(key)
            if deadlines and run.store_at > run.slot + max(deadlines):
                self._say("F10", run, key, f"claimed {run.store_at - run.slot} ms after its time")

    def _follows(self, run: RunSaved, before: RunSaved) -> None:
        """I5, S19: the earlier attempt was over, and another was allowed."""
        key = (run.job, run.slot)
        if not self._over(run, before):
            left = self.history.lease_end(before) - run.at
            self._say("I5", run, key, f"taken over {left} ms before the end of the lease")
        self.lost[key] += before.freed in ("", "runner_lost")
        most = self.history.jobs[run.job].max_attempts
        if self.lost[key] >= most:
            self._say(
                "S19", run, key, f"attempt {run.attempt} after {self.lost[key]} lost of {most}"
            )

    def _over(self, run: RunSaved, before: RunSaved) -> bool:
        """Whether the attempt in `before` was over when `run` was saved. The store's clock may have
        moved within the margin since the lease was set.
        """
        margin = self.history.jobs[run.job].margin_ms
        return bool(before.freed) or self.history.lease_end(before) - margin <= run.at

    def _same_attempt(self, run: RunSaved, before: RunSaved) -> None:
        key = (run.job, run.slot)
        both = run.lease_until is not None and before.lease_until is not None
        if both and not run.final and not run.freed:
            assert run.lease_until is not None
            assert before.lease_until is not None
            if run.lease_until < self.history.lease_end(before):
                self._say("F8", run, key, "the lease shrank")
        if before.token:
            self._by_whom(run, before)
        if run.cancel and not run.final and run.lease_until is not None:
            since = self.cancelled_at.setdefault(run.token, run.at)
            if run.lease_until > since + self.history.jobs[run.job].cancel_ms:
                self._say("S21a", run, key, f"renewed for too long after its cancel at {since}")

    def _by_whom(self, run: RunSaved, before: RunSaved) -> None:
        """F7, I3: only the holder of the current token changes the run; others when it is over."""
        key = (run.job, run.slot)
        ours = run.by_token == before.token
        if run.by in ("beat", "release"):
            ours = ours and (run.adopt or run.by_incarnation == before.incarnation)
        elif run.by == "claim" and not ours:
            ours = run.final and self._over(run, before)
        if not ours:
            self._say(
                "F7", run, key, f"changed to {run.state} by {run.by} of another than its holder"
            )
        if run.final and run.reason == "attempts_exhausted":
            now_lost = self.lost[key] + (before.freed in ("", "runner_lost"))
            if now_lost < self.history.jobs[run.job].max_attempts:
                self._say("S19", run, key, f"exhausted after {now_lost} lost attempts")

    def _skipped(self, run: RunSaved) -> None:
        key = (run.job, run.slot)
        if run.reason == "missed":
            deadlines = self.history.deadlines.get(key)
            if deadlines and run.store_at <= run.slot + min(deadlines):
                self._say("S20", run, key, "planned as missed before its deadline")
        if run.reason == "overlap":
            blocking = self.runs.get((run.job, run.blocking_slot))
            if blocking is None or blocking.final:
                self._say(
                    "S18", run, key, f"skipped for {run.blocking_slot}, which is not unfinished"
                )
            if run.store_at < run.slot:
                self._say("S18", run, key, "skipped before its time")
            if self.history.jobs[run.job].overlap:
                self._say("S18", run, key, "skipped though overlap is allowed")

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
        known = start.at - self.set_back_at > job.clock_learned_ms
        if early > 0 and known and self.latest_store_at < start.slot:
            self._say("I7", start, key, f"started {early} ms before its slot")

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
            text = f"started beside attempt {other.attempt} of slot {other.slot}, which obeys"
            self._say("F16", start, (start.job, start.slot), text)

    def _step(self, step: HandlerStarted | HandlerStepped) -> None:
        key = (step.job, step.slot)
        job = self.history.jobs[step.job]
        run = self.runs.get(key)
        if run is None or run.token != step.token or run.freed or run.final:
            seen = (
                f"attempt {run.attempt}, {run.state} {run.reason or run.freed}"
                if run
                else "nothing"
            )
            self._say("I4", step, key, f"a trusted step, while the store has {seen}")
        if step.at >= step.trust_until:
            self._say("F16", step, key, "a step after the end of its trust")
        beyond = step.trust_until - (self.granted.get(step.token, 0) - job.margin_ms)
        if beyond > 0:
            self._say("F6", step, key, f"trusted {beyond} ms longer than the lease allows")
        if step.token in self.ended:
            self._say("F16", step, key, "a step of a handler that has ended")
        if not job.overlap:
            ahead = self.furthest.get(step.job)
            if ahead is not None and ahead.fence > step.fence:
                self._say(
                    "F2", step, key, f"a step after a step of slot {ahead.slot}, which came later"
                )
            else:
                self.furthest[step.job] = step

    def _receipt(self, receipt: ResultReceipt) -> None:
        known = self.tokens.get(receipt.token)
        if receipt.status != "recorded" or known is None:
            return
        key = (known[0], known[1])
        kept = any(
            run.token == receipt.token and (run.final or run.freed == "handed_over")
            for run in self.history.saved[key]
            if run.at <= receipt.at
        )
        if not kept:
            self._say("S17", receipt, key, "a result that was RECORDED is not in the store")


# ── The whole ───────────────────────────────────────────────────────────────────────────────────


def _missed_needlessly(history: _History) -> Iterable[Violation]:
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
        able = history.able.throughout(due.job, due.at, due.missed_at, due.schedule_id)
        if able is not None:
            yield Violation("F3", due.missed_at, *key, f"missed, though {able} could have run it")


def _not_accounted_for(history: _History) -> Iterable[Violation]:
    """I6, F14: every slot has a row or is counted in one, and none is counted twice."""
    counted: dict[str, int] = defaultdict(int)
    newest_count: dict[str, int] = defaultdict(int)
    for (job, slot), rows in history.saved.items():
        if rows[-1].covered:
            counted[job] += rows[-1].covered - 1
            newest_count[job] = max(newest_count[job], slot)
    uncounted: dict[str, int] = defaultdict(int)
    exact: dict[str, bool] = defaultdict(lambda: True)
    for due in history.slots:
        key = (due.job, due.slot)
        exact[due.job] &= due.exact
        if not due.required or key in history.saved:
            continue
        if due.slot <= newest_count[due.job]:
            uncounted[due.job] += 1
        else:
            yield Violation("F14", due.missed_at, *key, "neither a row nor counted in one")
    for job in history.jobs:
        if exact[job] and counted[job] != uncounted[job]:
            text = f"{counted[job]} slots are counted in rows, and {uncounted[job]} have none"
            yield Violation("F14", history.end_at, job, newest_count[job], text)


def _taken_over_late(history: _History) -> Iterable[Violation]:
    """F11, F12: an attempt that is over is followed soon, if anybody can."""
    for key, states in history.saved.items():
        job = history.jobs[key[0]]
        for place, run in enumerate(states):
            if run.final or not run.token:
                continue
            next_at = states[place + 1].at if place + 1 < len(states) else FOREVER
            if run.freed:
                over_at, bound, witness = run.at, job.handover_ms, 0
            else:
                over_at, bound, witness = history.lease_end(run), job.takeover_ms, job.witness_ms
            if next_at <= over_at + bound or over_at + bound > history.end_at:
                continue
            able = history.able.throughout(key[0], over_at - witness, over_at + bound)
            if able is not None:
                rule = "F12" if run.freed else "F11"
                text = f"attempt {run.attempt} is over since {over_at}, and {able} could go on"
                yield Violation(rule, over_at + bound, *key, text)


def _lapsed_needlessly(history: _History) -> Iterable[Violation]:
    """S11, S15: who is well keeps its leases, also those of claims it had no answer to."""
    for key, states in history.saved.items():
        job = history.jobs[key[0]]
        for run, after in pairwise(states):
            end = history.lease_end(run)
            if run.final or run.freed or run.cancel or not run.token or end > after.at:
                continue
            if after.token == run.token and not after.final:
                continue  # a late renewal mended it
            handler = history.handlers.get(run.token)
            if handler is not None and handler.told_at is not None:
                continue  # it lost its trust and stopped, which changes nothing (S21a)
            if history.lost_an_app(run.instance, run.at, end):
                continue  # what it was sent may have been left to its lease (S23)
            able = history.able.spans(run.instance, key[0], end - job.keeps_ms, end)
            if able and run.incarnation not in history.gone_by(end):
                text = f"attempt {run.attempt} lapsed, though {run.instance} was well"
                yield Violation("S15", end, *key, text)


def _not_told_in_time(history: _History) -> Iterable[Violation]:
    """I8: a handler whose lease is lost is told before the lease ends, or when its process thaws."""
    for token, handler in history.handlers.items():
        key = (handler.start.job, handler.start.slot)
        leases = [run for run in history.saved[key] if run.token == token and not run.freed]
        held = [run for run in leases if not run.final and run.lease_until is not None]
        if not held or leases[-1].final:
            continue
        end = history.lease_end(held[-1])
        for froze_at, thawed_at in history.frozen[handler.start.app]:
            if froze_at <= end < thawed_at:
                end = thawed_at
        if end >= min(history.stopped_at(handler), history.end_at):
            continue
        if handler.told_at is None or handler.told_at > end:
            yield Violation(
                "I8", end, *key, f"attempt {handler.start.attempt} was not told in time"
            )


def _kept_alive_by_nobody(history: _History) -> Iterable[Violation]:
    """S19: what no handler runs does not keep its lease for long."""
    for key, states in history.saved.items():
        last = states[-1]
        if last.final or not last.token or last.freed or history.lease_end(last) < history.end_at:
            continue
        job = history.jobs[key[0]]
        patience = 2 * (job.witness_ms + job.takeover_ms)
        handler = history.handlers.get(last.token)
        if handler is None:
            idle_since = next(run.at for run in states if run.token == last.token)
        else:
            idle_since = history.stopped_at(handler)
        if idle_since + patience < history.end_at:
            text = f"attempt {last.attempt} is renewed though nobody runs it since {idle_since}"
            yield Violation("S19", history.end_at, *key, text)


def _results_without_receipt(history: _History) -> Iterable[Violation]:
    """S27: whoever lives gets a receipt for its result."""
    for handler in history.handlers.values():
        key = (handler.start.job, handler.start.slot)
        job = history.jobs[handler.start.job]
        patience = 2 * (job.witness_ms + job.takeover_ms)
        if handler.ended_at is None or handler.receipt_at is not None:
            continue
        if handler.start.app in history.died_at or handler.ended_at + patience > history.end_at:
            continue
        yield Violation("S27", history.end_at, *key, "a result without a receipt")


def _outlived_their_timeout(history: _History) -> Iterable[Violation]:
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


def about(events: Sequence[Event], violation: Violation, most: int = 60) -> list[Event]:
    """The shortest useful history of a violation: what concerns its run, its job's neighbours and
    the whole cluster, the newest `most` events up to it.
    """
    tokens = {
        e.token for e in events if isinstance(e, RunSaved) and (e.job, e.slot) == _key(violation)
    }
    wanted = [e for e in events if e.at <= violation.at and _concerns(e, violation, tokens)]
    return wanted[-most:]


def _key(violation: Violation) -> Key:
    return violation.job, violation.slot


def _concerns(event: Event, violation: Violation, tokens: set[str]) -> bool:
    match event:
        case RunSaved() | ClaimWon() | HandlerStarted() | HandlerStepped() | AssignmentRefused():
            return (event.job, event.slot) == _key(violation)
        case HandlerTold() | HandlerEnded() | ResultReceipt():
            return event.token in tokens
        case SlotDue():
            return (event.job, event.slot) == _key(violation)
        case JobKnown() | AbleFrom() | UnableFrom():
            return event.job == violation.job
        case _:
            return True
