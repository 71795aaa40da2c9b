"""What backends with leases promise besides: leases, takeovers, overlap, catch-up (I4 to I6, I8).

Pure: imports the events, the history, what is common and the standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from tests.checker.common import (
    Order,
    idle_since,
    missed_needlessly,
    not_told_of_their_timeout,
    outlived_their_timeout,
    patience,
    results_without_receipt,
    retried_unasked,
)
from tests.checker.events import HandlerStarted, HandlerStepped, LeasesEnded, RunSaved
from tests.checker.history import FOREVER, History, Key, Violation

COUNTED_MAX = 10_000
"""So many slots a row counts exactly; it stands for more, where there are more (S20)."""


def judge(history: History) -> Iterable[Violation]:
    """What the history breaks of all that backends with leases promise."""
    yield from _LeasedOrder(history).judge()
    yield from missed_needlessly(history)
    yield from _not_accounted_for(history)
    yield from _taken_over_late(history)
    yield from _lapsed_needlessly(history)
    yield from _not_told_in_time(history)
    yield from _kept_alive_by_nobody(history)
    yield from _left_waiting(history)
    yield from results_without_receipt(history)
    yield from outlived_their_timeout(history)
    yield from retried_unasked(history)
    yield from not_told_of_their_timeout(history)


@dataclass(slots=True)
class _LeasedOrder(Order):
    """Walks through the history. The rules besides: I4, I5, F2, F4 to F8, S18 to S21a."""

    granted: dict[str, int] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    lost: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    cancelled_at: dict[str, int] = field(default_factory=dict)
    furthest: dict[str, HandlerStarted | HandlerStepped] = field(default_factory=dict)

    def _leases_ended(self, event: LeasesEnded) -> None:
        self.granted = {t: min(end, event.at) for t, end in self.granted.items()}

    def _saved(self, run: RunSaved) -> None:
        Order._saved(self, run)
        if run.token and not run.final and not run.freed and run.lease_until is not None:
            self.granted[run.token] = run.lease_until

    def _new_attempt(self, run: RunSaved, before: RunSaved | None) -> None:
        Order._new_attempt(self, run, before)
        if run.fence <= self.fences.get(run.job, 0):
            text = f"fence {run.fence} is not above {self.fences[run.job]}"
            self._say("F4", run, (run.job, run.slot), text)
        self.fences[run.job] = max(run.fence, self.fences.get(run.job, 0))
        if before is not None and before.token:
            self._follows(run, before)

    def _follows(self, run: RunSaved, before: RunSaved) -> None:
        """I5, S19: the earlier attempt was over, and another was allowed."""
        key = (run.job, run.slot)
        if not self._over(run, before):
            left = self.history.lease_end(before) - run.at
            self._say("I5", run, key, f"taken over {left} ms before the end of the lease")
        self.lost[key] += self._counts_as_lost(run, before)
        most = self.history.jobs[run.job].max_attempts
        if self.lost[key] >= most:
            self._say(
                "S19", run, key, f"attempt {run.attempt} after {self.lost[key]} lost of {most}"
            )

    def _counts_as_lost(self, run: RunSaved, before: RunSaved) -> bool:
        """S19, S22: failed attempts count against the retries, and not as lost."""
        if before.state == "retrying" or run.failed > before.failed:
            return False
        return before.freed in ("", "runner_lost")

    def _over(self, run: RunSaved, before: RunSaved) -> bool:
        """Whether the attempt in `before` was over when `run` was saved. The store's clock may have
        moved within the margin since the lease was set.
        """
        if before.state == "retrying":
            return True
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
        Order._same_attempt(self, run, before)
        if before.token and run.final and run.reason == "attempts_exhausted":
            now_lost = self.lost[key] + self._counts_as_lost(run, before)
            if now_lost < self.history.jobs[run.job].max_attempts:
                self._say("S19", run, key, f"exhausted after {now_lost} lost attempts")
        if run.cancel and not run.final and run.lease_until is not None:
            since = self.cancelled_at.setdefault(run.token, run.at)
            if run.lease_until > since + self.history.jobs[run.job].cancel_ms:
                self._say("S21a", run, key, f"renewed for too long after its cancel at {since}")

    def _ends_what_is_over(self, run: RunSaved, before: RunSaved) -> bool:
        """A claim ends what is over, and one that supersedes, like an operator, asks it to stop."""
        asked = run.cancel in ("superseded", "requested") and run.cancel != before.cancel
        if run.by in ("claim", "control") and asked and not run.final:
            return run.state == before.state
        return run.by in ("claim", "control") and run.final and self._over(run, before)

    def _skipped(self, run: RunSaved) -> None:
        key = (run.job, run.slot)
        if run.reason == "missed":
            deadlines = self.history.deadlines.get(key)
            if deadlines and run.store_at <= run.slot + min(deadlines):
                self._say("S20", run, key, "planned as missed before its deadline")
        if run.reason == "overlap":
            blocking = self.runs.get((run.job, run.blocking_slot))
            waited = key in self.runs  # it was replaced; what it waited for may have ended
            if not waited and (blocking is None or blocking.final):
                self._say(
                    "S18", run, key, f"skipped for {run.blocking_slot}, which is not unfinished"
                )
            if run.store_at < run.slot:
                self._say("S18", run, key, "skipped before its time")
            if self.history.jobs[run.job].overlap:
                self._say("S18", run, key, "skipped though overlap is allowed")

    def _step(self, step: HandlerStarted | HandlerStepped) -> None:
        Order._step(self, step)
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
        beyond = step.trust_until - (self.granted.get(step.token, 0) - job.margin_ms)
        if beyond > 0:
            self._say("F6", step, key, f"trusted {beyond} ms longer than the lease allows")
        if not job.overlap:
            ahead = self.furthest.get(step.job)
            if ahead is not None and ahead.fence > step.fence:
                self._say(
                    "F2", step, key, f"a step after a step of slot {ahead.slot}, which came later"
                )
            else:
                self.furthest[step.job] = step


# ── The whole ───────────────────────────────────────────────────────────────────────────────────


def _not_accounted_for(history: History) -> Iterable[Violation]:
    """I6, F14: every slot has a row or is counted in one, and none is counted twice. What is more than
    can be counted is "at least" so many (S20).
    """
    counted: dict[str, int] = defaultdict(int)
    newest_count: dict[str, int] = defaultdict(int)
    at_least: set[str] = set()
    for (job, slot), rows in history.saved.items():
        if rows[-1].covered:
            counted[job] += rows[-1].covered - 1
            newest_count[job] = max(newest_count[job], slot)
        if rows[-1].covered >= COUNTED_MAX:
            at_least.add(job)
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
        more = job in at_least and counted[job] < uncounted[job]
        if exact[job] and counted[job] != uncounted[job] and not more:
            text = f"{counted[job]} slots are counted in rows, and {uncounted[job]} have none"
            yield Violation("F14", history.end_at, job, newest_count[job], text)


def _taken_over_late(history: History) -> Iterable[Violation]:
    """F11, F12: an attempt that is over is followed soon, if anybody can."""
    for key, states in history.saved.items():
        job = history.jobs[key[0]]
        for place, run in enumerate(states):
            if run.final or not run.token:
                continue
            next_at = states[place + 1].at if place + 1 < len(states) else FOREVER
            if run.state == "retrying":
                assert run.retry_at is not None
                over_at, bound, witness = run.retry_at, job.waiting_ms, 0
            elif run.freed:
                over_at, bound, witness = run.at, job.handover_ms, 0
            else:
                over_at, bound, witness = history.lease_end(run), job.takeover_ms, job.witness_ms
            if next_at <= over_at + bound or over_at + bound > history.end_at:
                continue
            if history.goes_first(key, over_at, over_at + bound):
                continue
            able = history.able.throughout(key[0], over_at - witness, over_at + bound)
            if able is not None:
                rule = "F12" if run.freed else "F11"
                text = f"attempt {run.attempt} is over since {over_at}, and {able} could go on"
                yield Violation(rule, over_at + bound, *key, text)


def _lapsed_needlessly(history: History) -> Iterable[Violation]:
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


def _not_told_in_time(history: History) -> Iterable[Violation]:
    """I8: a handler whose lease is lost is told before the lease ends, or when its process thaws."""
    for token, handler in history.handlers.items():
        key = (handler.start.job, handler.start.slot)
        leases = [run for run in history.saved[key] if run.token == token and not run.freed]
        held = [run for run in leases if not run.final and run.lease_until is not None]
        if not held or leases[-1].final:
            continue
        end = history.lease_end(held[-1])
        end = history.thawed(handler.start.app, end)
        if end >= min(history.stopped_at(handler), history.end_at):
            continue
        if handler.told_at is None or handler.told_at > end:
            yield Violation(
                "I8", end, *key, f"attempt {handler.start.attempt} was not told in time"
            )


def _kept_alive_by_nobody(history: History) -> Iterable[Violation]:
    """S19: what no handler runs does not keep its lease for long."""
    for key, states in history.saved.items():
        last = states[-1]
        if last.final or not last.token or last.freed or last.state == "retrying":
            continue
        if history.lease_end(last) < history.end_at:
            continue
        since = idle_since(history, key)
        if since + patience(history.jobs[key[0]]) < history.end_at:
            text = f"attempt {last.attempt} is renewed though nobody runs it since {since}"
            yield Violation("S19", history.end_at, *key, text)


def _left_waiting(history: History) -> Iterable[Violation]:
    """S18, S20, S29: what waits is run once nothing is in its way, if anybody can."""
    for key, states in history.saved.items():
        last = states[-1]
        if last.state != "due":
            continue
        job = history.jobs[key[0]]
        # A slot that fell due by a clock which was ahead comes again.
        since = max(last.at, history.free_since(key), history.comes_at(last.slot))
        if since + job.waiting_ms > history.end_at:
            continue
        able = history.able.throughout(key[0], since, since + job.waiting_ms)
        if able is not None:
            text = f"waits with nothing in its way since {since}, and {able} could run it"
            yield Violation("S18", since + job.waiting_ms, *key, text)
