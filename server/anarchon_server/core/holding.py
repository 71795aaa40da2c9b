"""The attempts this instance holds: handing over, renewing, cancelling, ending, releasing.

Imports the core's leaves and `jobs`. A hold lives from a won claim, or an adoption, until its result
is recorded, it is released, or its token no longer counts. What a client runs that is not held
any more keeps its place in the session until the client reports it (S21a).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from anarchon_server.core import limits
from anarchon_server.core.context import Context, read_token
from anarchon_server.core.errors import InvalidError
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.lanes import Call, Lane
from anarchon_server.core.lease import trust_end
from anarchon_server.core.messages import (
    Answer,
    Assigned,
    Assignment,
    Cancelled,
    Complete,
    CompleteAnswer,
    Level,
    Lost,
    Method,
    Receipt,
    ReceiptStatus,
)
from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    JobSpec,
    JobView,
    Outcome,
    Reason,
    RunView,
    Trigger,
)
from anarchon_server.core.policy import Job, Retry, retry_of
from anarchon_server.core.sessions import Session
from anarchon_server.core.store import (
    Claim,
    Completion,
    Release,
    Renewal,
    Reply,
    TokenAnswer,
    TokenOutcome,
)


@dataclass(slots=True)
class Hold:
    """An attempt whose token this instance keeps alive. Moments are its own.

    `confirmed` is false after a suspension, at `doubted_at`, until the store has renewed the lease
    by a request sent since (S4);
    `handed_over` once it was sent to its session, `accepted` once the client named it;
    `silences` counts the KeepAlives in a row that did not, `sent_at` is when it was sent last,
    `resent` the times it was sent again. `finished`: its result waits for the store.
    `lapsing`: it is renewed no more. `cancel_stored`: the store has the request to cancel it.
    `cancel_message` is what the request says to the handler.
    """

    token: str
    job: str
    slot: int
    attempt: int
    fence: int
    trigger: Trigger
    cause: AttemptCause
    lease_ms: int
    heartbeat_ms: int
    cancel_grace_ms: int
    stop_grace_ms: int
    timeout_ms: int | None
    lease_end_at: int | None
    trust_end: int
    renew_at: int
    confirmed: bool = True
    doubted_at: int = 0
    cancel_stored: bool = False
    handed_over: bool = False
    accepted: bool = False
    finished: bool = False
    lapsing: bool = False
    silences: int = 0
    sent_at: int = 0
    resent: int = 0
    timeout_at: int | None = None
    started_at: int | None = None
    cancel: CancelReason | None = None
    cancel_message: str = ""
    failed: int = 0
    retry: Retry | None = None
    payload: bytes = b""

    @classmethod
    def of(cls, job: Job, view: RunView, lease_ms: int, sent_at: int, payload: bytes = b"") -> Hold:
        """The hold of a run whose lease was set by a request sent at `sent_at`.

        Where the run has no lease (a claim-only backend) nobody can take it over: its token is
        trusted until the run has ended, and renewed only when there is something to say.
        """
        run = view.run
        assert run.current is not None
        heartbeat = min(job.heartbeat_ms, lease_ms // limits.HEARTBEAT_SHARE_MIN)
        return cls(
            token=run.token,
            job=run.job,
            slot=run.slot,
            attempt=run.attempt,
            fence=run.current.fence,
            trigger=run.trigger,
            cause=run.current.cause,
            lease_ms=lease_ms,
            heartbeat_ms=heartbeat,
            cancel_grace_ms=job.cancel_grace_ms,
            stop_grace_ms=job.stop_grace_ms,
            timeout_ms=job.spec.timeout_ms,
            lease_end_at=run.lease.end_at if run.lease else None,
            trust_end=trust_end(sent_at, lease_ms) if run.lease else limits.NEVER,
            renew_at=sent_at + heartbeat if run.lease else limits.NEVER,
            failed=run.failed,
            retry=job.retry,
            payload=payload,
        )

    @property
    def leased(self) -> bool:
        """Whether a lease keeps it, which can be lost, and after which another may follow."""
        return self.lease_end_at is not None


@dataclass(frozen=True, slots=True)
class _Terms:
    """What a result is judged by: the timeout (S21), and whether a failure is retried (S22)."""

    timeout_ms: int | None
    retry: Retry | None

    @classmethod
    def of(cls, spec: JobSpec) -> _Terms:
        """Those of a definition that the store has. Raises `InvalidError`."""
        return cls(spec.timeout_ms, retry_of(spec))


@dataclass(slots=True)
class _Result:
    """A result on its way to the store, with those who wait for its receipt.

    It is kept for `kept_ms`: 5 minutes, or as long as its lease, if that is longer (S27).
    `told` is what the client said, `completion` what that counts as; until `judge_by` the latter
    waits for the job to be known. `terms` is what the store says of it, once it `was_asked`.
    """

    told: Outcome
    completion: Completion
    since: int
    kept_ms: int
    judge_by: int | None = None
    was_asked: bool = False
    terms: _Terms | None = None
    not_before: int = 0
    waiters: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Release:
    """A release on its way to the store, not before its moment.

    `again_at` (store's time): when to ask anew whose claim the store does not know. `unheard`: the
    part of the store that has the run did not answer.
    """

    release: Release
    since: int
    again_at: tuple[int, ...] = ()
    not_before: int = 0
    unheard: bool = False


@dataclass(slots=True)
class _Request:
    """A Complete whose receipts are not all there yet."""

    receipts: list[Receipt | None]

    @property
    def done(self) -> bool:
        return None not in self.receipts


class Holding:
    """Every hold of this instance, and the results and releases on their way to the store.

    `want_beat` is called when something should reach the store sooner than the next
    heartbeat; `observe` is told of what follows a result: the retry, or the run that waited.
    """

    def __init__(
        self,
        context: Context,
        jobs: Jobs,
        want_beat: Callable[[], None],
        observe: Callable[[RunView], None],
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._want_beat = want_beat
        self._observe = observe
        self._holds: dict[str, Hold] = {}
        self._waiting: dict[str, Hold] = {}
        self._results: dict[str, _Result] = {}
        self._unjudged: dict[str, _Result] = {}
        self._terms_failed_at = -limits.NEVER
        self._recorded_lately: dict[str, None] = {}
        self._requests: dict[int, _Request] = {}
        self._releases: dict[str, _Release] = {}

    # --- Reading -------------------------------------------------------------------------

    def holds(self, token: str) -> bool:
        """Whether this instance keeps the token alive, or has its result on the way."""
        return token in self._holds or token in self._results or token in self._releases

    def held(self, token: str) -> Hold | None:
        """The hold of a token."""
        return self._holds.get(token)

    def of_session(self, session: Session) -> list[Hold]:
        """The holds that have a place in the session."""
        return [h for token in session.places if (h := self._holds.get(token)) is not None]

    def has_result(self, token: str) -> bool:
        """Whether the token's result is on its way to the store, or was answered there lately."""
        return token in self._results or token in self._recorded_lately

    def __iter__(self) -> Iterator[Hold]:
        return iter(tuple(self._holds.values()))

    @property
    def running(self) -> int:
        """How many attempts this instance holds."""
        return len(self._holds)

    @property
    def settled_down(self) -> bool:
        """Whether nothing is held, and nothing is on its way to the store."""
        unheard = any(each.unheard for each in self._releases.values())
        return not (self._holds or self._results or self._releases_due() or unheard)

    # --- Winning and handing over --------------------------------------------------------

    def won(
        self, claim: Claim, view: RunView, sent_at: int, job: Job | None, payload: bytes = b""
    ) -> None:
        """A claim was won. Without a job or a client with room left for it, it is given back."""
        if job is None or self._context.stopping or not self._has_place(job, claim.token):
            self.release(claim.job, claim.slot, claim.token, Reason.NOT_ACCEPTED)
            self._context.sessions.leave(claim.token)
            return
        hold = Hold.of(job, view, claim.lease_ms, sent_at, payload)
        self._context.log(
            Level.INFO,
            "run_won",
            job=hold.job,
            slot=hold.slot,
            attempt=hold.attempt,
            fence=hold.fence,
            cause=hold.cause,
        )
        self._add(hold)
        self._waiting[hold.token] = hold

    def _has_place(self, job: Job, token: str) -> bool:
        """Whether a client has room for it, also where its session ended since the claim, or
        where it was asked for again without room and turns out to have been won before (S11).
        """
        sessions = self._context.sessions
        placed = sessions.place_of(token) or sessions.take(job, token, self._context.now)
        return placed is not None

    def adopted(self, session: Session, job: Job, view: RunView, sent_at: int) -> None:
        """A client brought an attempt along that its last sidecar held (S26)."""
        hold = Hold.of(job, view, job.lease_ms, sent_at)
        hold.handed_over = hold.accepted = True
        assert view.run.current is not None
        if view.run.current.started_at is None:  # the last sidecar died before it could say so
            self._has_started(hold)
        since = view.run.current.started_at or view.run.current.claimed_at
        if hold.timeout_ms is not None:
            left = hold.timeout_ms - max(0, self._context.store_now - since)
            # It may have ended in its time, with nobody to report that to.
            self._time_out_at(hold, self._context.now + max(limits.REPORT_AWAITED, left))
        self._context.sessions.enter(session, hold.token, hold.job)
        self._add(hold)
        if view.run.cancel is not None:
            hold.cancel_stored = True
            self.cancel(hold, view.run.cancel, view.run.cancel_message)
        self._context.log(
            Level.INFO, "run_adopted", job=hold.job, slot=hold.slot, attempt=hold.attempt
        )

    def _add(self, hold: Hold) -> None:
        self._holds[hold.token] = hold
        self._trust_until(hold, hold.trust_end)

    def pump_assignments(self) -> None:
        """Hands over what waits and may go: each client gets one batch."""
        batches: dict[str, list[Assignment]] = {}
        for hold in tuple(self._waiting.values()):
            session = self._receiver(hold)
            if session is not None:
                del self._waiting[hold.token]
                batches.setdefault(session.session_id, []).append(self._assignment(hold))
        for session_id, batch in batches.items():
            session = self._context.sessions.get(session_id)
            assert session is not None
            for start in range(0, len(batch), limits.ASSIGNMENTS_MAX):
                part = tuple(batch[start : start + limits.ASSIGNMENTS_MAX])
                self._context.send(session, Assigned(part))

    def _receiver(self, hold: Hold) -> Session | None:
        """The session that may have this attempt now, if all that S2, S4 and S16 ask is so."""
        context = self._context
        # Won early: not before its time (I7). What is further ahead had its time before the store's
        # clock was set back (S1), and is not kept waiting for another.
        if 0 < hold.slot - context.store_now <= 2 * limits.EARLY_MAX:
            context.timers.set(("hand", hold.token), context.store_time.when(hold.slot))
            return None
        session = context.sessions.place_of(hold.token)
        assert session is not None, "what waits to be handed over has a place"
        if not self._suits(session, hold):
            self.give_back(hold, Reason.NOT_ACCEPTED)
            context.sessions.leave(hold.token)
            return None
        if session.stream_id is None:
            return None
        if not hold.confirmed or hold.trust_end - context.now < session.ttl_ms:
            hold.renew_at = context.now
            self._want_beat()
            return None
        return session

    def _suits(self, session: Session, hold: Hold) -> bool:
        """Whether the client still takes runs of this job, and trusts for less than its lease."""
        offered = self._context.sessions.has_job(session, hold.job) and not session.draining
        return offered and session.fits(hold.lease_ms, hold.heartbeat_ms)

    def _assignment(self, hold: Hold) -> Assignment:
        context = self._context
        hold.sent_at = context.now
        if not hold.handed_over:
            hold.handed_over = True
            if hold.timeout_ms is not None:
                self._time_out_at(hold, context.now + hold.timeout_ms)
        timeout_ms = None if hold.timeout_at is None else max(1, hold.timeout_at - context.now)
        return Assignment(
            hold.token,
            hold.job,
            hold.slot,
            hold.attempt,
            hold.fence,
            hold.trigger,
            hold.cause,
            hold.lease_end_at,
            timeout_ms,
            hold.payload,
        )

    def _time_out_at(self, hold: Hold, at: int) -> None:
        hold.timeout_at = at
        self._context.timers.set(("timeout", hold.token), at)

    # --- What a client says of its attempts ----------------------------------------------

    def named(self, session: Session, in_flight: Iterable[str]) -> tuple[Lost, ...]:
        """Takes in a KeepAlive's set; which of its tokens the session does not own."""
        tokens = frozenset(in_flight)
        lost = tuple(
            gone for token in tokens if (gone := self._judge_named(session, token)) is not None
        )
        place_of = self._context.sessions.place_of
        session.strangers = sum(place_of(gone.token) is not session for gone in lost)
        if self._context.now >= session.blocked_until:
            session.blocked = False
        for token in tuple(session.places):
            hold = self._holds.get(token)
            if token in tokens:
                session.unblock()
            elif hold is None:
                if token not in self._results and token in session.ended:
                    self._context.sessions.leave(token)  # stopped at last, without a report
            elif hold.handed_over:
                self._not_named(session, hold)
        return tuple(sorted(lost, key=lambda gone: gone.token))

    def _judge_named(self, session: Session, token: str) -> Lost | None:
        hold = self._holds.get(token)
        if hold is not None and self._context.sessions.place_of(token) is session:
            if not hold.accepted:
                hold.accepted = True
                self._has_started(hold)
            hold.silences = 0
            return None
        if self.has_result(token):
            return None
        return Lost(token, session.ended.get(token, CancelReason.FENCED))

    def _not_named(self, session: Session, hold: Hold) -> None:
        """Protocol: twice in a row unnamed, it is sent again; after two such, given back.

        Not before two sessions' times after it was sent last: by then a client that got it late has
        either named it, or lost the trust in which it could have started it (I4).
        """
        if hold.cancel is not None:  # sent after its cancel it would be started all the same
            return
        hold.silences += 1
        if hold.silences < limits.SILENCES_BEFORE_RESEND:
            return
        if hold.resent < limits.RESEND_ROUNDS:
            hold.silences = 0
            hold.resent += 1
            self._context.send(session, Assigned((self._assignment(hold),)))
            return
        if self._context.now < hold.sent_at + 2 * session.ttl_ms:
            return
        reason = Reason.RUNNER_LOST if hold.accepted else Reason.NOT_ACCEPTED
        if not hold.accepted:
            session.block(self._context.now)
        self._context.log(
            Level.WARNING, "run_not_accepted", job=hold.job, slot=hold.slot, attempt=hold.attempt
        )
        self.give_back(hold, reason)
        self._context.sessions.leave(hold.token)

    # --- Renewing ------------------------------------------------------------------------

    def renewals(self, within_ms: int) -> tuple[Renewal, ...]:
        """What to renew with the heartbeat that goes now: all due within `within_ms`."""
        horizon = self._context.now + within_ms
        due = [h for h in self._holds.values() if h.renew_at <= horizon and not h.lapsing]
        for hold in due:  # now, not on the answer: what is asked for meanwhile must stand
            hold.renew_at = self._context.now + hold.heartbeat_ms if hold.leased else limits.NEVER
        return tuple(self._renewal(hold) for hold in due)

    def _renewal(self, hold: Hold) -> Renewal:
        settings = self._context.settings
        return Renewal(
            hold.job,
            hold.slot,
            hold.token,
            settings.instance_id,
            settings.incarnation,
            hold.lease_ms,
            started_at=hold.started_at,
            cancel=hold.cancel if hold.cancel is CancelReason.TIMEOUT else None,
        )

    def renewed(self, renewal: Renewal, answer: TokenAnswer, sent_at: int) -> None:
        """The store's answer to a renewal."""
        hold = self._holds.get(renewal.token)
        if hold is None:
            return
        if answer.outcome is TokenOutcome.UNKNOWN:
            self.not_renewed([renewal])
            return
        if answer.outcome is not TokenOutcome.RENEWED:
            self._not_good(hold, answer.run)
            return
        assert answer.run is not None
        hold.confirmed = hold.confirmed or sent_at >= hold.doubted_at
        self.seen(answer.run)
        if hold.token not in self._holds:
            return  # given back: somebody asked it to stop before it was handed over
        if renewal.started_at is not None:
            hold.started_at = None  # the store has it
        if answer.run.run.lease is not None:
            hold.lease_end_at = answer.run.run.lease.end_at
            self._trust_until(hold, max(hold.trust_end, trust_end(sent_at, renewal.lease_ms)))

    def _not_good(self, hold: Hold, view: RunView | None) -> None:
        """The store renews the token no more: another attempt has begun, or the grace of a cancel
        was over before this instance heard of it. Then what the handler reports still ends the run.
        """
        run = view.run if view is not None else None
        ours = run is not None and run.token == hold.token and not run.freed
        if run is None or run.cancel is None or run.state.final or not ours:
            self._lose(hold, CancelReason.FENCED, _who(view))
            return
        if not hold.handed_over:
            self.give_back(hold, Reason.NOT_ACCEPTED)
            self._context.sessions.leave(hold.token)
            return
        if hold.cancel is None and not hold.finished:
            self.cancel(hold, run.cancel, run.cancel_message)
        self._end(hold, run.cancel)
        if not hold.leased and not hold.finished:  # nobody else will ever find it to be over
            self.release(hold.job, hold.slot, hold.token, Reason.RUNNER_LOST)

    def _trust_until(self, hold: Hold, end: int) -> None:
        hold.trust_end = end
        if hold.leased:
            self._context.timers.set(("trust", hold.token), end)

    def _has_started(self, hold: Hold) -> None:
        """History is told with the next renewal, or, without a lease, with the next heartbeat."""
        hold.started_at = self._context.store_now
        if not hold.leased:
            hold.renew_at = self._context.now

    def not_renewed(self, renewals: Iterable[Renewal]) -> None:
        """The heartbeat that carried these failed: again within a second (S27)."""
        for renewal in renewals:
            hold = self._holds.get(renewal.token)
            if hold is not None:
                hold.renew_at = self._context.now

    def doubt_all(self) -> None:
        """S4. Nothing is done on behalf of a lease until the store has confirmed it."""
        for hold in self._holds.values():
            if not hold.leased:
                continue
            hold.confirmed = False
            hold.doubted_at = self._context.now
            hold.renew_at = self._context.now

    def seen(self, view: RunView) -> None:
        """The store shows a run that may be held here: whether somebody asks it to stop (S21a)."""
        hold = self._holds.get(view.run.token)
        if hold is None:
            return
        asked = view.run.cancel
        hold.cancel_stored = asked is not None
        if asked is None or hold.cancel is not None or hold.finished:
            return
        if hold.handed_over:
            self.cancel(hold, asked, view.run.cancel_message)
        else:
            self.give_back(hold, Reason.NOT_ACCEPTED)
            self._context.sessions.leave(hold.token)

    # --- Cancelling ----------------------------------------------------------------------

    def trust_over(self, token: str) -> None:
        """S16. The lease could not be renewed in time: the runner stops before it ends."""
        hold = self._holds[token]
        assert hold.trust_end <= self._context.now, "its timer moves with it"
        self._lose(hold, CancelReason.LEASE_LOST, "the lease could not be renewed in time")
        if not hold.handed_over:  # a lapse would count as an attempt that died
            self.release(hold.job, hold.slot, token, Reason.NOT_ACCEPTED)

    def timed_out(self, token: str) -> None:
        """S21. The attempt has outlived its timeout."""
        hold = self._holds[token]
        assert not hold.finished, "a finished attempt has no timer"
        if hold.cancel is not CancelReason.TIMEOUT:  # an adopted one may have it already
            self.cancel(hold, CancelReason.TIMEOUT)

    def cancel(self, hold: Hold, reason: CancelReason, message: str = "") -> None:
        """Asks the client to stop. From the first cancel on, the lease is renewed for
        `cancel_grace` at most (S21a).
        """
        if hold.cancel is None:
            self._context.timers.set(
                ("grace", hold.token), self._context.now + hold.cancel_grace_ms
            )
        hold.cancel, hold.cancel_message = reason, message
        session = self._context.sessions.place_of(hold.token)
        if session is not None and session.attached:
            self._context.send(session, Cancelled(hold.token, reason, message))
        if reason is CancelReason.TIMEOUT:
            hold.renew_at = self._context.now
            self._want_beat()
        self._context.log(Level.INFO, "run_cancelled", job=hold.job, slot=hold.slot, reason=reason)

    def repeat_cancels(self, session: Session) -> None:
        """Its stream is another: what was sent on the last one may not have come."""
        for hold in self.of_session(session):
            if hold.cancel is not None:
                self._context.send(session, Cancelled(hold.token, hold.cancel, hold.cancel_message))

    def grace_over(self, token: str) -> None:
        """The handler has not obeyed in its grace: renewed no longer, its place is taken."""
        hold = self._holds[token]
        if hold.finished:
            return
        assert hold.cancel is not None
        if hold.cancel is CancelReason.TIMEOUT and not hold.cancel_stored:
            # Until the store knows, a lapse would be taken for a death, and the run started anew.
            self._context.timers.set(("grace", token), self._context.now + limits.RETRY_MAX)
            return
        self._end(hold, hold.cancel)
        if not hold.leased and hold.cancel is not CancelReason.SHUTDOWN:
            # Nobody else will ever find it to be over; after a shutdown a successor may adopt it.
            self.release(hold.job, hold.slot, token, Reason.RUNNER_LOST)
        self._context.log(Level.WARNING, "cancel_ignored", job=hold.job, slot=hold.slot)

    def _lose(self, hold: Hold, reason: CancelReason, message: str) -> None:
        """The token no longer counts, or may not: the client is told, the hold is gone."""
        session = self._context.sessions.place_of(hold.token)
        if session is not None and hold.handed_over and not hold.finished:
            self._context.send(session, Cancelled(hold.token, reason, message))
        self._end(hold, reason)
        self._context.log(
            Level.WARNING,
            "lease_lost" if reason is CancelReason.LEASE_LOST else "run_fenced",
            job=hold.job,
            slot=hold.slot,
            attempt=hold.attempt,
        )

    def _end(self, hold: Hold, reason: CancelReason) -> None:
        """Drops the hold; its place stays taken while the client may still run it."""
        self._drop(hold.token)
        session = self._context.sessions.place_of(hold.token)
        if session is None:
            return
        if hold.handed_over and not hold.finished:
            session.ended[hold.token] = reason
        else:
            self._context.sessions.leave(hold.token)

    def _drop(self, token: str) -> None:
        self._holds.pop(token, None)
        self._waiting.pop(token, None)
        for kind in ("trust", "timeout", "grace", "hand", "give_back", "stop"):
            self._context.timers.clear((kind, token))

    # --- Results -------------------------------------------------------------------------

    def complete(self, request: Complete) -> None:
        """Takes results in. They wait here until the store has them (S27)."""
        entry = _Request([None] * len(request.results))
        self._requests[request.request_id] = entry
        for index, (token, told) in enumerate(request.results):
            named = read_token(token)
            if named is None:
                entry.receipts[index] = Receipt(ReceiptStatus.UNKNOWN_TOKEN)
                continue
            outcome = self._by_its_timeout(token, named[0], told)
            self._finish(token)
            if outcome.stopped in (CancelReason.LEASE_LOST, CancelReason.FENCED):
                self._drop(token)  # such a stop changes nothing (S21a)
                if not self._context.capabilities.leases:  # but nobody else will go on with it
                    self.release(*named, token, Reason.RUNNER_LOST)
                entry.receipts[index] = Receipt(ReceiptStatus.FENCED)
                continue
            known = self._results.get(token)
            if known is None:
                if len(self._results) >= limits.RESULTS_WAITING_MAX:
                    entry.receipts[index] = Receipt(ReceiptStatus.STORE_UNAVAILABLE)
                    continue
                known = self._results[token] = self._result_of(*named, token, told)
            elif not _same(known.told, told):
                entry.receipts[index] = Receipt(
                    ReceiptStatus.ALREADY_COMPLETED, message="another outcome is on its way"
                )
                continue
            known.waiters.append((request.request_id, index))
        self._answer_if_done(request.request_id)

    def _result_of(self, job: str, slot: int, token: str, told: Outcome) -> _Result:
        """A result as it came. A client whose sidecar was restarted may report before it has
        subscribed again: then the store is asked for the job, which says what its timeout is and
        whether it is retried (S21, S22). Nothing of that matters to one that obeyed another stop.
        """
        hold, now = self._holds.get(token), self._context.now
        completion = self._completion_of(job, slot, token, told)
        kept_ms = max(limits.RESULTS_KEPT, hold.lease_ms if hold else 0)
        result = _Result(told, completion, now, kept_ms)
        counts = told.stopped in (None, CancelReason.TIMEOUT)
        if counts and hold is None and self._jobs.latest(job) is None:
            self._unjudged[token] = result
            self._judge_by(result, now + limits.JOB_AWAITED)
        return result

    def _judge_by(self, result: _Result, at: int) -> None:
        result.judge_by = at
        self._context.timers.set(("result", result.completion.token), at)

    def _completion_of(
        self, job: str, slot: int, token: str, told: Outcome, stored: _Terms | None = None
    ) -> Completion:
        outcome = self._by_its_timeout(token, job, told, stored)
        return Completion(job, slot, token, outcome, self._retry_in(token, job, outcome, stored))

    def _is_judged(self, result: _Result) -> bool:
        """Whether a result may go to the store: its job is known, or was waited for long enough.

        Without leases only a client that offers the job makes a retry possible (S22), and nobody
        takes the run over meanwhile: the client is waited for.
        """
        if result.judge_by is None:
            return True
        done, context = result.completion, self._context
        known = self._jobs.latest(done.job) is not None
        known = known or (context.capabilities.leases and result.terms is not None)
        leaving = context.stopping and result.was_asked
        if not (known or leaving or result.judge_by <= context.now):
            return False
        result.judge_by = None
        del self._unjudged[done.token]
        result.completion = self._completion_of(
            done.job, done.slot, done.token, result.told, result.terms
        )
        return True

    def pump_terms(self) -> None:
        """Asks the store for the jobs of results that came before a client offered them."""
        context = self._context
        if not self._unjudged or not context.lanes.free(Lane.JOBS, context.now):
            return
        jobs = (each.completion.job for each in self._unjudged.values() if not each.was_asked)
        names = tuple(islice(dict.fromkeys(jobs), limits.PAGE_MAX))
        if not names:
            return
        of_these = [each for each in self._unjudged.values() if each.completion.job in names]

        def replied(_: Call, reply: Reply[JobView]) -> None:
            found = {view.name: view.spec for view in reply.answers}
            for result in of_these:
                result.was_asked = True
                # What a later version allows may make no sense here.
                with suppress(KeyError, InvalidError):
                    result.terms = _Terms.of(found[result.completion.job])

        def failed(_: bool) -> None:
            """A store that is away takes no result either: that time does not count. It is not away
            where it answers a beat, while the lease goes on running down.
            """
            is_away = context.answered_at < self._terms_failed_at
            self._terms_failed_at = context.now
            self._want_beat()
            if not is_away:
                return
            for result in of_these:
                if result.judge_by is not None:
                    until = min(context.now + limits.JOB_AWAITED, result.since + result.kept_ms)
                    self._judge_by(result, max(result.judge_by, until))

        context.out.append(
            context.lanes.call(
                Lane.JOBS, Method.JOBS, (names, "", len(names)), context.now, replied, failed
            )
        )

    def _terms_of(self, token: str, job: str, stored: _Terms | None = None) -> _Terms | None:
        """What a result of the job is judged by, as far as it is known; at last, as it is `stored`."""
        hold, job_now = self._holds.get(token), self._jobs.latest(job)
        if hold is not None:
            return _Terms(hold.timeout_ms, hold.retry)
        if job_now is not None:
            return _Terms(job_now.spec.timeout_ms, job_now.retry)
        return stored

    def _by_its_timeout(
        self, token: str, job: str, outcome: Outcome, stored: _Terms | None = None
    ) -> Outcome:
        """S21. An attempt that has outlived its timeout is that, whatever its handler made of it;
        also where the store was away when it should have learned so, or its session is lost.
        """
        terms = self._terms_of(token, job, stored)
        timeout_ms = terms.timeout_ms if terms is not None else None
        if timeout_ms is None or outcome.elapsed_ms <= timeout_ms:
            return outcome
        return replace(outcome, result="", stopped=CancelReason.TIMEOUT)

    def _retry_in(
        self, token: str, job: str, outcome: Outcome, stored: _Terms | None
    ) -> int | None:
        """S22. How long after this attempt another may be made, should it be a failure that is
        followed by one; whether it is, the store decides.
        """
        terms = self._terms_of(token, job, stored)
        if terms is None or terms.retry is None:
            return None
        failure, hold = outcome.failure, self._holds.get(token)
        # What was told to stop then has timed out, also where it was a moment quicker than that.
        told = hold.cancel if hold is not None else None
        if failure is None and CancelReason.TIMEOUT not in (outcome.stopped, told):
            return None
        if failure is not None and failure.permanent:
            return None
        if not self._context.capabilities.leases and (
            self._context.stopping or self._jobs.get(job) is None
        ):
            return None  # nobody would make it
        if failure is not None and failure.retry_after_ms is not None:
            return min(failure.retry_after_ms, limits.RETRY_AFTER_MAX)
        return terms.retry.pause(hold.failed if hold else 0, self._context.draw)

    def _finish(self, token: str) -> None:
        """The handler has ended: its place is free, its lease renewed until it is recorded."""
        hold = self._holds.get(token)
        if hold is not None:
            hold.finished = True
            self._waiting.pop(token, None)
            self._context.timers.clear(("timeout", token))
            self._context.timers.clear(("give_back", token))
        self._context.sessions.leave(token)

    def pump_results(self) -> None:
        """Sends the next batch of results."""
        context = self._context
        if not self._results or not context.lanes.free(Lane.COMPLETE, context.now):
            return
        due = [
            each
            for each in self._results.values()
            if each.not_before <= context.now and self._is_judged(each)
        ]
        batch = tuple(due[: limits.RESULTS_MAX])
        if not batch:
            return

        def replied(_: Call, reply: Reply[TokenAnswer]) -> None:
            for result, answer in zip(batch, reply.answers, strict=True):
                if answer.outcome is not TokenOutcome.UNKNOWN:
                    self._recorded(result, answer)
                elif not self._is_over(result):
                    result.not_before = self._ask_again_at("result", result.completion.token)

        def failed(_: bool) -> None:
            for result in batch:
                self._is_over(result)

        completions = tuple(result.completion for result in batch)
        context.out.append(
            context.lanes.call(
                Lane.COMPLETE, Method.COMPLETE, (completions,), context.now, replied, failed
            )
        )

    def _is_over(self, result: _Result) -> bool:
        """Gives up a result that the store has not taken for as long as it is kept."""
        if result.since + result.kept_ms >= self._context.now:
            return False
        self._give_up_result(result)
        return True

    def _ask_again_at(self, kind: str, token: str) -> int:
        """When to send again what a part of the store has not answered, while others have (S27)."""
        again_at = self._context.now + limits.RETRY_MAX
        self._context.timers.set((kind, token), again_at)
        return again_at

    def _recorded(self, result: _Result, answer: TokenAnswer) -> None:
        token = result.completion.token
        del self._results[token]
        self._remember(token)
        self._drop(token)
        receipt = _receipt(answer)
        retried = answer.run is not None and answer.run.wait_ms is not None
        for view in (answer.run if retried else None, answer.due):
            if view is not None:
                self._observe(view)
        done = result.completion
        if receipt.status is ReceiptStatus.RECORDED:
            self._context.log(
                Level.INFO,
                "run_ended",
                job=done.job,
                slot=done.slot,
                state=receipt.state,
                elapsed_ms=done.outcome.elapsed_ms,
            )
        else:
            self._context.log(
                Level.WARNING,
                "result_not_recorded",
                job=done.job,
                slot=done.slot,
                status=receipt.status,
            )
        self._hand_out(result, receipt)

    def _remember(self, token: str) -> None:
        """A KeepAlive made before the receipt came may still name it: it is neither lost nor
        does it take room.
        """
        self._recorded_lately[token] = None
        if len(self._recorded_lately) > limits.RECORDED_REMEMBERED:
            del self._recorded_lately[next(iter(self._recorded_lately))]

    def _give_up_result(self, result: _Result) -> None:
        del self._results[result.completion.token]
        self._drop(result.completion.token)
        self._context.log(
            Level.ERROR,
            "result_given_up",
            job=result.completion.job,
            slot=result.completion.slot,
        )
        self._hand_out(result, Receipt(ReceiptStatus.STORE_UNAVAILABLE))

    def _hand_out(self, result: _Result, receipt: Receipt) -> None:
        for request_id, index in result.waiters:
            self._requests[request_id].receipts[index] = receipt
            self._answer_if_done(request_id)

    def _answer_if_done(self, request_id: int) -> None:
        request = self._requests[request_id]
        if request.done:
            del self._requests[request_id]
            receipts = tuple(r for r in request.receipts if r is not None)
            self._context.out.append(Answer(request_id, CompleteAnswer(receipts)))

    # --- Releasing -----------------------------------------------------------------------

    def give_back(self, hold: Hold, reason: str) -> None:
        """Ends the hold's lease now: its runner has surely stopped, or never started."""
        self._drop(hold.token)
        self.release(hold.job, hold.slot, hold.token, reason)

    def give_back_waiting(self) -> None:
        """The instance stops: what was won and not handed over goes back at once."""
        for hold in tuple(self._waiting.values()):
            self.give_back(hold, Reason.NOT_ACCEPTED)
            self._context.sessions.leave(hold.token)

    def give_back_later(self, hold: Hold) -> None:
        """S25. Its session is lost: not renewed, and released when its client has stopped."""
        hold.lapsing = True
        margin = limits.lease_margin(hold.lease_ms)
        self._context.timers.set(("give_back", hold.token), self._context.now + margin)

    def give_back_due(self, token: str) -> None:
        """The margin after a lost session is over."""
        self.give_back(self._holds[token], Reason.RUNNER_LOST)

    def leave_to_lease(self, hold: Hold) -> None:
        """Its handler may still run and nobody answers for it: it lapses (S23).

        Where there is no lease to lapse, the run is lost with its client.
        """
        self._drop(hold.token)
        if not hold.leased:
            self.release(hold.job, hold.slot, hold.token, Reason.RUNNER_LOST)

    def leave_all_to_leases(self) -> None:
        """The instance ends: whatever is left lapses, or is adopted by its successor (S26)."""
        for token in tuple(self._holds):
            self._drop(token)

    def release(self, job: str, slot: int, token: str, reason: str) -> None:
        """Puts a release on its way; it is repeated until the store has answered."""
        release = Release(job, slot, token, self._context.settings.incarnation, reason)
        self._releases[token] = _Release(release, self._context.now)

    def release_unknown(self, job: str, slot: int, token: str, deadline_at: int) -> None:
        """Gives back what may have been won by a claim that is given up (S11).

        That claim may be on its way still. Where no lease ends what it then wins, it is given back
        once more when the slot is missed, and when nothing that was sent in time can come any more.
        """
        self.release(job, slot, token, Reason.NOT_ACCEPTED)
        if not self._context.capabilities.leases:
            again_at = (deadline_at + 1, deadline_at + limits.UNKNOWN_ASKED_FOR)
            self._releases[token].again_at = again_at

    def _releases_due(self) -> list[Release]:
        now = self._context.now
        return [each.release for each in self._releases.values() if each.not_before <= now]

    def _may_be_on_its_way(self, pending: _Release) -> bool:
        """Whether the claim of what the store does not know is to be given back once more."""
        context = self._context
        moments = [at for at in pending.again_at if at > context.store_now]
        if not moments or context.stopping:
            return False
        pending.not_before = context.store_time.when(moments[0])
        context.timers.set(("release", pending.release.token), pending.not_before)
        return True

    def pump_releases(self) -> None:
        """Sends the next batch of releases."""
        context = self._context
        if not self._releases or not context.lanes.free(Lane.RELEASE, context.now):
            return
        batch = tuple(self._releases_due()[: limits.RESULTS_MAX])
        if not batch:
            return

        def replied(_: Call, reply: Reply[TokenAnswer]) -> None:
            for release, answer in zip(batch, reply.answers, strict=True):
                pending = self._releases[release.token]
                pending.unheard = answer.outcome is TokenOutcome.UNKNOWN
                if pending.unheard:
                    pending.not_before = self._ask_again_at("release", release.token)
                    continue
                unknown = answer.outcome is TokenOutcome.UNKNOWN_TOKEN
                if unknown and self._may_be_on_its_way(pending):
                    continue
                del self._releases[release.token]
                if answer.outcome is TokenOutcome.RELEASED:
                    context.log(
                        Level.INFO,
                        "run_released",
                        job=release.job,
                        slot=release.slot,
                        reason=release.reason,
                    )

        def failed(_: bool) -> None:
            for release in batch if context.capabilities.leases else ():
                since = self._releases[release.token].since
                if since + limits.LEASE_MAX < context.now:  # the lease has ended by itself
                    del self._releases[release.token]

        context.out.append(
            context.lanes.call(Lane.RELEASE, Method.RELEASE, (batch,), context.now, replied, failed)
        )


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether two reports of one attempt say the same; a repeat may count its time anew."""
    return replace(one, elapsed_ms=0) == replace(other, elapsed_ms=0)


def _who(view: RunView | None) -> str:
    if view is None or view.run.current is None:
        return "the run is gone from the store"
    current = view.run.current
    return f"attempt {current.attempt} is {view.run.state} on {current.instance_id}"


def _receipt(answer: TokenAnswer) -> Receipt:
    state = answer.run.run.state if answer.run else None
    if answer.outcome is TokenOutcome.RECORDED:
        return Receipt(ReceiptStatus.RECORDED, state)
    words = {
        TokenOutcome.ALREADY_COMPLETED: ReceiptStatus.ALREADY_COMPLETED,
        TokenOutcome.FENCED: ReceiptStatus.FENCED,
        TokenOutcome.UNKNOWN_TOKEN: ReceiptStatus.UNKNOWN_TOKEN,
    }
    return Receipt(words[answer.outcome], state, _who(answer.run))
