"""What backends without leases promise: nobody's backup, nothing planned; another attempt only where
the one before has failed.

Overlap is allowed (no F2), nothing is taken over or handed over (no I5, F11, F12), nothing is caught
up, and the runs of sidecars that are gone may stay unfinished. Pure: imports the events, the history
and what is common only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
from tests.checker.events import HandlerStarted, HandlerStepped, ResultReceipt, RunSaved
from tests.checker.history import History, Violation

_GONE = frozenset({"lease_lost", "fenced"})
"""What a handler is told whose result does not count."""
_GIVEN_UP = frozenset({"runner_lost", "not_accepted", "timeout", "cancelled"})
"""As what a run has failed whose runner is gone, or does not stop."""


def judge(history: History) -> Iterable[Violation]:
    """What the history breaks of all that claim-only backends promise."""
    yield from _ClaimedOrder(history).judge()
    yield from missed_needlessly(history)
    yield from _not_told_in_time(history)
    yield from _left_unended(history)
    yield from _given_back_needlessly(history)
    yield from results_without_receipt(history)
    yield from outlived_their_timeout(history)
    yield from retried_unasked(history)
    yield from not_told_of_their_timeout(history)


@dataclass(slots=True)
class _ClaimedOrder(Order):
    """Walks through the history. The rules besides: I2, I4, F4, F8, S17, S20."""

    def _new_attempt(self, run: RunSaved, before: RunSaved | None) -> None:
        Order._new_attempt(self, run, before)
        key = (run.job, run.slot)
        if before is not None and before.token and before.state != "retrying":
            self._say("I2", run, key, f"attempt {run.attempt}, where nobody takes over")
        if run.fence != run.slot * 1_000 + run.attempt - 1:
            self._say("F4", run, key, f"fence {run.fence} is not that of the slot's attempt")

    def _same_attempt(self, run: RunSaved, before: RunSaved) -> None:
        Order._same_attempt(self, run, before)
        if run.by == "claim":
            self._say("F8", run, (run.job, run.slot), "the repeat of a claim changed the run")
        if run.by == "release" and (run.state != "failed" or run.reason not in _GIVEN_UP):
            text = f"given up, and now {run.state} {run.reason}"
            self._say("S24", run, (run.job, run.slot), text)

    def _ends_what_is_over(self, run: RunSaved, before: RunSaved) -> bool:
        """S29, S21a: an operator cancels any run. What somebody runs is not ended by that (I4)."""
        return run.by == "control" and run.cancel in ("requested", "timeout")

    def _skipped(self, run: RunSaved) -> None:
        if run.reason in ("paused", "cancelled") and run.by == "control":
            return
        self._say("S20", run, (run.job, run.slot), f"skipped as {run.reason}: nothing is planned")

    def _step(self, step: HandlerStarted | HandlerStepped) -> None:
        """I4. The run has not ended, but by its timeout; who was told to stop, and does not listen,
        may go on. Where the cancel has no grace, its word and the run's end are under way at once.
        """
        Order._step(self, step)
        run = self.runs.get((step.job, step.slot))
        key = (step.job, step.slot)
        if run is None or run.token != step.token:
            self._say("I4", step, key, "a trusted step for a run that is another's")
        elif run.final and run.reason != "timeout" and step.token not in self.told:
            reached_from = max(run.at, self.thawed_at.get(step.app, 0))
            on_its_way = step.at - reached_from <= self.history.jobs[step.job].clock_error_ms
            if run.cancel and run.by == "release" and on_its_way:
                return
            seen = f"{run.state} {run.reason}"
            self._say("I4", step, key, f"a trusted step, while the store has {seen}")

    def _receipt(self, receipt: ResultReceipt) -> None:
        """S17. A result counts, unless the run had ended before, its handler was told so, or the
        store had it that its timeout was over (S21), after which another attempt may follow.
        """
        Order._receipt(self, receipt)
        handler = self.history.handlers.get(receipt.token)
        if receipt.status == "recorded" or handler is None:
            return
        key = (handler.start.job, handler.start.slot)
        states = [run for run in self.history.saved[key] if run.token == receipt.token]
        if any(run.cancel == "timeout" and run.at <= receipt.at for run in states):
            return
        if self.told.get(receipt.token) not in _GONE and not self.runs[key].final:
            self._say("S17", receipt, key, f"a result was {receipt.status} for a run in progress")


def _not_told_in_time(history: History) -> Iterable[Violation]:
    """I8, S25: a handler whose run is given up is told before that, or when its process thaws.

    Of its timeout it is told as soon as can be (S21), and so of a cancel that grants no grace, where
    the run ends at the same moment (S21a).
    """
    for token, handler in history.handlers.items():
        key = (handler.start.job, handler.start.slot)
        last = history.saved[key][-1]
        if last.token != token or last.by != "release" or last.reason == "timeout":
            continue
        end = history.thawed(handler.start.app, last.at)
        if last.reason == "cancelled":
            end += history.jobs[handler.start.job].takeover_ms
        if end >= min(history.stopped_at(handler), history.end_at):
            continue
        if handler.told_at is None or handler.told_at > end:
            yield Violation("I8", end, *key, "given up, and its handler was not told before")


def _left_unended(history: History) -> Iterable[Violation]:
    """F14: a run that nobody runs any more ends, as long as the sidecar that has it lives."""
    gone = history.gone_by(history.end_at)
    for key, states in history.saved.items():
        last = states[-1]
        if last.final or last.incarnation in gone:
            continue
        job, since = history.jobs[key[0]], idle_since(history, key)
        # A claim that came late is given back when nothing that was sent in time comes any more.
        late_ms = max(history.deadlines.get(key, [0])) + 2 * job.late_ms
        if since + late_ms + patience(job) < history.end_at:
            text = f"{last.state}, though nobody runs it since {since}"
            yield Violation("F14", history.end_at, *key, text)


def _given_back_needlessly(history: History) -> Iterable[Violation]:
    """I6, S11: what was won in time goes to a client, if one was there all the time."""
    for key, states in history.saved.items():
        first, last = states[0], states[-1]
        if last.reason != "not_accepted" or last.token in history.handlers:
            continue
        # Later it may be given up, as nobody knew for so long that it was won (S10).
        in_time = last.store_at <= last.slot + max(history.deadlines.get(key, [0]))
        # What ends at this moment, as its sidecar stops, does not count as there.
        if in_time and history.served.spans(last.instance, last.job, first.at, last.at + 1):
            text = f"given back, though a client of {last.instance} was there for it"
            yield Violation("S11", last.at, *key, text)
