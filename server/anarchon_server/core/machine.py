"""The life of a run: the only place that knows the legal moves, as pure decisions.

Imports `limits`, `model` and the records of `store`. Each `judge_*` is given what the store
holds and the store's own moment, and returns what is to be saved and answered. Whoever calls
one must hold the job's rows from reading to saving: that is the store's atomic step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from anarchon_server.core.limits import (
    ATTEMPTS_MAX,
    ATTEMPTS_SHOWN,
    EARLY_MAX,
    LOST_SHOWN,
    MISSED_LISTED_MAX,
    lease_margin,
)
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Definition,
    Instance,
    InstanceState,
    Lease,
    Outcome,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    RunView,
    Trigger,
)
from anarchon_server.core.store import (
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    Plan,
    PlanAnswer,
    Release,
    Renewal,
    TokenAnswer,
    TokenOutcome,
)

_CANCELLED_AS = {
    CancelReason.TIMEOUT: Reason.TIMEOUT,
    CancelReason.REQUESTED: Reason.CANCELLED,
    CancelReason.SUPERSEDED: Reason.SUPERSEDED,
}


@dataclass(frozen=True, slots=True)
class Moment:
    """The store's time, read inside its atomic step (S1).

    `at_us` is its wall clock in microseconds; `lease_at` (ms) is the clock that leases are
    judged by, of boot `boot_id`. `steady`: that clock cannot step.
    """

    at_us: int
    lease_at: int
    boot_id: str
    steady: bool

    @property
    def at(self) -> int:
        """The wall clock in milliseconds, as slots are."""
        return self.at_us // 1_000


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What the store keeps per job for its decisions.

    No slot at or below `floor` that has no row is ever claimed or planned (S2); `fence` is
    the highest ever given. `definition_id` and its `schedule_id` are the current definition's
    (empty: there is none), current since `definition_at` (S28). `paused_at` is when the pause
    began (None: it is not paused, S29).
    """

    job: str
    floor: int = -1
    fence: int = 0
    definition_id: str = ""
    schedule_id: str = ""
    definition_at: int = 0
    paused_at: int | None = None
    pause_reason: str = ""


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """What the store keeps per job and schedule.

    The schedule's present stretch began at `since` (S28); every slot of it up to `settled`
    has a row or is counted in one (S20).
    """

    since: int
    settled: int


@dataclass(frozen=True, slots=True)
class HeldDefinition:
    """That the instance `incarnation` holds one definition of a job."""

    incarnation: str
    job: str
    definition_id: str
    schedule_id: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A run to be written, with those of its attempts that changed."""

    run: Run
    attempts: tuple[Attempt, ...] = ()

    @property
    def ends_a_run(self) -> bool:
        """Whether a run that was begun has ended: what waited for it may go on (S18)."""
        return self.run.state.final and self.run.current is not None

    @property
    def is_news(self) -> bool:
        """Whether other instances should look soon: it may be claimed, or is to stop."""
        run = self.run
        free = bool(run.freed) or (run.waits and not run.blocking_slot)
        to_stop = run.cancel in (CancelReason.REQUESTED, CancelReason.SUPERSEDED)
        return free or (to_stop and not run.state.final)


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """What a claim changes: the job, its schedule's `settled`, runs; and the answer."""

    answer: ClaimAnswer
    job: JobRecord
    settled: int | None
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenVerdict:
    """What a renewal, result or release changes, and the answer."""

    answer: TokenAnswer
    saved: Saved | None = None


@dataclass(frozen=True, slots=True)
class PlanVerdict:
    """What a plan changes, and the answer."""

    answer: PlanAnswer
    saved: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class RegistrationVerdict:
    """What a registration changes: the job, and its schedule (None: it has none)."""

    job: JobRecord
    schedule: ScheduleRecord | None


# --- Reading -----------------------------------------------------------------------------


def lease_left(run: Run, now: Moment) -> int | None:
    """What is left of the run's lease (ms), at most 0 when it is over; None: it has none.

    A lease of another boot is over (S1). So is one whose end lies further ahead than its
    length and the margin allow: it was written before the clock stepped back.
    """
    if run.lease is None or run.state.final:
        return None
    if run.lease.boot_id != now.boot_id:
        return 0
    left = run.lease.until - now.lease_at
    written_before_a_step = left > run.lease.length_ms + lease_margin(run.lease.length_ms)
    return 0 if written_before_a_step else left


def retry_left(run: Run, now: Moment, *, witnessed: bool = True) -> int | None:
    """How long a RETRYING run still waits (ms), at least 0; None: it is none.

    A time further ahead than its delay and a second was written before a step back, if the clock
    that says so is vouched for (S1).
    """
    if run.state is not RunState.RETRYING:
        return None
    assert run.retry_at is not None, "a run that is retried has a time for it"
    left = run.retry_at - now.at
    written_before_a_step = left > run.retry_delay_ms + EARLY_MAX
    return 0 if witnessed and written_before_a_step else max(0, left)


def view(run: Run, now: Moment, attempts: Sequence[Attempt] = ()) -> RunView:
    """The run as it shows at this moment: an attempt whose lease is over is INTERRUPTED."""
    left = lease_left(run, now)
    if left is not None and left <= 0 and run.state in (RunState.CLAIMED, RunState.RUNNING):
        assert run.current is not None
        lapsed = replace(run.current, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST)
        shown = tuple(lapsed if a.attempt == lapsed.attempt else a for a in attempts)
        run = replace(run, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST, current=lapsed)
        return RunView(run, left, shown)
    return RunView(run, left, tuple(attempts), retry_left(run, now))


def first_attempt_shown(run: Run) -> int:
    """The number of the oldest attempt that history shows (S30)."""
    return max(1, run.attempt - ATTEMPTS_SHOWN + 1)


def without_traces(seen: RunView) -> RunView:
    """The run without its stack traces, which may be long."""
    run = seen.run
    if run.current is not None:
        earlier = tuple(without_trace(attempt) for attempt in run.earlier)
        run = replace(run, current=without_trace(run.current), earlier=earlier)
    attempts = tuple(without_trace(attempt) for attempt in seen.attempts)
    return replace(seen, run=run, attempts=attempts)


def without_trace(attempt: Attempt) -> Attempt:
    """The attempt without its stack trace."""
    if attempt.failure is None:
        return attempt
    return replace(attempt, failure=replace(attempt.failure, stack_trace=""))


# --- Claiming ----------------------------------------------------------------------------


def judge_claim(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    run: Run | None,
    others: Iterable[Run],
) -> ClaimVerdict:
    """Decides a claim, in the order of S2.

    `settled` is that of the claim's schedule (None: the store does not know it), `run` the
    slot's row, `others` the runs of the job at other slots that are not final (not looked at where
    overlap is allowed).
    """
    if run is not None:
        return _claim_of_a_row(claim, now, job, settled, run, others)
    if settled is None:
        return _unchanged(ClaimOutcome.UNREGISTERED, job, settled)
    if claim.slot > now.at + EARLY_MAX:
        return _unchanged(ClaimOutcome.EARLY, job, settled)
    if job.paused_at is not None:
        return _unchanged(ClaimOutcome.PAUSED, job, settled)
    if claim.slot <= max(job.floor, settled) or claim.slot < now.at - claim.start_deadline_ms:
        return _unchanged(ClaimOutcome.LATE, job, settled)
    if claim.seen_attempt:  # the run it saw has been pruned meanwhile
        return _unchanged(ClaimOutcome.LATE, job, settled)
    return _first_claim(claim, now, job, settled, others)


def _claim_of_a_row(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    run: Run,
    others: Iterable[Run],
) -> ClaimVerdict:
    if run.token == claim.token and _is_good(run, now):
        renewed = replace(run, lease=_renewed(run.lease, claim.lease_ms, now))
        answer = ClaimAnswer(ClaimOutcome.WON, view(renewed, now))
        return ClaimVerdict(answer, job, settled, (Saved(renewed),))
    saw_the_present = (claim.seen_attempt, claim.seen_token) == (run.attempt, run.token)
    if run.state.final or not saw_the_present:
        return _lost(run, now, job, settled)
    too_soon = run.waits and run.slot > now.at + EARLY_MAX
    if too_soon or retry_left(run, now, witnessed=_witnessed(claim, now)):
        return ClaimVerdict(ClaimAnswer(ClaimOutcome.EARLY, view(run, now)), job, settled)
    if run.waits or run.state is RunState.RETRYING:
        return _go_on(claim, now, job, settled, run, others)
    return _take_over(claim, now, job, settled, run, others)


def _take_over(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    run: Run,
    others: Iterable[Run],
) -> ClaimVerdict:
    """S19. The run's present attempt is over if two witnesses agree, or it was freed."""
    if not _over(run, now, _witnessed(claim, now)):
        stepped = not now.steady and claim.vouched and not _as_expected(claim, now)
        if stepped and _over(run, now, witnessed=True):
            return _unchanged(ClaimOutcome.CLOCK_STEP, job, settled)
        return _lost(run, now, job, settled)
    return _go_on(claim, now, job, settled, run, others)


def _go_on(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    run: Run,
    others: Iterable[Run],
) -> ClaimVerdict:
    """The next attempt of a run that has a row and no attempt in progress, if nothing forbids it."""
    ended = _ended_instead(run, now)
    between, ahead = _ahead(claim, now, run, others)
    if ended is not None and not (ahead is not None and ended.run.reason == Reason.ABANDONED):
        return _lost(ended.run, now, job, settled, (*between, ended))
    if ahead is not None:
        return ClaimVerdict(ClaimAnswer(ClaimOutcome.QUEUED, view(run, now)), job, settled, between)
    if not claim.may_run:
        answer = ClaimAnswer(ClaimOutcome.UNCHANGED, view(run, now))
        return ClaimVerdict(answer, job, settled, between)
    verdict = _won(claim, now, job, settled, _interrupted(run, now), _cause_after(run))
    return replace(verdict, saved=(*between, *verdict.saved))


def _cause_after(run: Run) -> AttemptCause:
    if run.waits:
        return AttemptCause.CLAIM
    return AttemptCause.RETRY if _is_retried(run) else AttemptCause.TAKEOVER


def _ahead(
    claim: Claim, now: Moment, run: Run, others: Iterable[Run]
) -> tuple[tuple[Saved, ...], Run | None]:
    """What goes before a run that has a row: what this finds to be over for good, and the first.

    A run that waits goes after every unfinished one and after those that wait longer (S18, S20).
    One that was begun goes after what is in progress; of several that were, after the older.
    """
    if claim.overlap is OverlapPolicy.ALLOW:
        return (), None
    witnessed = _witnessed(claim, now)
    found = look_around(others, now, witnessed)
    before = [
        other
        for other in found.unfinished
        if run.waits or other.slot < run.slot or not _over(other, now, witnessed)
    ]
    before += [other for other in found.waiting if run.waits and other.slot < run.slot]
    return found.ended, min(before, key=_by_slot, default=None)


def _first_claim(
    claim: Claim, now: Moment, job: JobRecord, settled: int, others: Iterable[Run]
) -> ClaimVerdict:
    """S18. What a due slot does, by what else there is of its job."""
    witnessed = _witnessed(claim, now)
    allowed = claim.overlap is OverlapPolicy.ALLOW
    found = Around() if allowed else look_around(others, now, witnessed)
    ended, unfinished = list(found.ended), found.unfinished
    queues = claim.overlap in (OverlapPolicy.QUEUE, OverlapPolicy.CANCEL)
    older = tuple(run for run in found.waiting if queues and run.slot < claim.slot)
    if (unfinished or older) and claim.slot > now.at:
        return replace(_unchanged(ClaimOutcome.EARLY, job, settled), saved=tuple(ended))
    superseding = claim.overlap is OverlapPolicy.CANCEL and bool(unfinished)
    if superseding:
        asked = [asked_to_stop(run, now, CancelReason.SUPERSEDED, witnessed) for run in unfinished]
        ended += [each for each, run in zip(asked, unfinished, strict=True) if each.run is not run]
        unfinished = tuple(saved.run for saved in asked if not saved.run.state.final)
    if unfinished or older or (superseding and not claim.may_run):
        own = (
            _queued(claim, now, unfinished, found.waiting)
            if queues
            else (_skipped(claim, now, min(unfinished, key=_by_slot)),)
        )
        word = ClaimOutcome.SKIPPED if own[-1].run.state.final else ClaimOutcome.QUEUED
        answer = ClaimAnswer(word, view(own[-1].run, now))
        return ClaimVerdict(answer, job, _settled_after(claim, settled), (*ended, *own))
    if not claim.may_run:
        verdict = _unchanged(ClaimOutcome.UNCHANGED, job, settled)
        return replace(verdict, saved=tuple(ended))
    fresh = Run(claim.job, claim.slot, Trigger.SCHEDULE, RunState.DUE)
    verdict = _won(
        claim, now, job, _settled_after(claim, settled), Saved(fresh), AttemptCause.CLAIM
    )
    return replace(verdict, saved=(*ended, *verdict.saved))


@dataclass(frozen=True, slots=True)
class Around:
    """The other runs of a job, as a claim finds them: those that are over for good and ended with
    it, those that are unfinished, those that wait.
    """

    ended: tuple[Saved, ...] = ()
    unfinished: tuple[Run, ...] = ()
    waiting: tuple[Run, ...] = ()


def look_around(others: Iterable[Run], now: Moment, witnessed: bool) -> Around:
    """Tells a job's runs that are not final apart (S18). Nothing is abandoned (S19) while another
    run is in progress.
    """
    ended: list[Saved] = []
    unfinished: list[Run] = []
    waiting: list[Run] = []
    given_up: list[Saved] = []
    for other in others:
        end = None
        if not other.waits and _over(other, now, witnessed):
            end = _ended_instead(other, now)
        if other.waits:
            waiting.append(other)
        elif end is None:
            unfinished.append(other)
        elif end.run.reason == Reason.ABANDONED:
            given_up.append(end)
            unfinished.append(other)
        else:
            ended.append(end)
    if all(_over(run, now, witnessed) for run in unfinished):
        ended += given_up
        gone = {saved.run.slot for saved in given_up}
        unfinished = [run for run in unfinished if run.slot not in gone]
    return Around(tuple(ended), tuple(unfinished), tuple(waiting))


def _by_slot(run: Run) -> int:
    return run.slot


def _skipped(claim: Claim, now: Moment, blocking: Run) -> Saved:
    skipped = Run(claim.job, claim.slot, Trigger.SCHEDULE, RunState.SKIPPED, Reason.OVERLAP)
    return Saved(replace(skipped, blocking_slot=blocking.slot, ended_at=now.at))


def _queued(
    claim: Claim, now: Moment, unfinished: Sequence[Run], waiting: Sequence[Run]
) -> tuple[Saved, ...]:
    """The slot waits, and replaces what waits by the schedule, or is Skipped where a newer one
    does. The claimed one comes last. One that was replaced goes on to name the run it waited for.
    """
    queued = [run for run in waiting if run.trigger is Trigger.SCHEDULE]
    kept = [run for run in waiting if run.trigger is not Trigger.SCHEDULE]
    newer = [run for run in queued if run.slot > claim.slot]
    before = [*unfinished, *(run for run in kept if run.slot < claim.slot)]
    if newer:
        return (_skipped(claim, now, min(before or newer, key=_by_slot)),)
    due = Run(claim.job, claim.slot, Trigger.SCHEDULE, RunState.DUE, window_ms=claim.window_ms)
    if before:
        due = replace(due, blocking_slot=min(before, key=_by_slot).slot)
    replaced = (
        replace(run, state=RunState.SKIPPED, reason=Reason.OVERLAP, ended_at=now.at)
        for run in queued
    )
    return (*(Saved(run) for run in replaced), Saved(due))


def asked_to_stop(run: Run, now: Moment, reason: CancelReason, witnessed: bool) -> Saved:
    """An unfinished run with a request to stop in it; ended where no attempt holds it (S21a).

    The first request stays, but for a timeout after which there would be a retry: nothing follows
    what is cancelled.
    """
    if run.cancel is None:
        run = replace(run, cancel=reason, cancelled_at=now.lease_at)
    elif _is_retried(run):
        run = replace(run, cancel=reason)
    ended = _ended_instead(run, now) if _over(run, now, witnessed) else None
    return ended or Saved(run)


def _won(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    before: Saved,
    cause: AttemptCause,
) -> ClaimVerdict:
    """The next attempt of `before.run`, whose earlier attempts are closed."""
    fence = max(job.fence + 1, now.at_us)
    attempt = Attempt(
        attempt=before.run.attempt + 1,
        token=claim.token,
        fence=fence,
        instance_id=claim.instance_id,
        incarnation=claim.incarnation,
        cause=cause,
        state=RunState.CLAIMED,
        claimed_at=now.at,
    )
    run = replace(
        before.run,
        state=RunState.CLAIMED,
        reason="",
        current=attempt,
        lease=_renewed(None, claim.lease_ms, now),
        freed="",
        max_attempts=claim.max_attempts,
        window_ms=claim.window_ms,
        cancel=None,
        cancelled_at=0,
        cancel_message="",
        cancel_grace_ms=claim.cancel_grace_ms,
        retries=claim.retries,
        retry_at=None,
        retry_delay_ms=0,
    )
    answer = ClaimAnswer(ClaimOutcome.WON, view(run, now))
    saved = Saved(run, (*before.attempts, attempt))
    return ClaimVerdict(answer, replace(job, fence=fence), settled, (saved,))


def _lost(
    run: Run, now: Moment, job: JobRecord, settled: int | None, saved: tuple[Saved, ...] = ()
) -> ClaimVerdict:
    return ClaimVerdict(ClaimAnswer(ClaimOutcome.LOST, view(run, now)), job, settled, saved)


def _unchanged(outcome: ClaimOutcome, job: JobRecord, settled: int | None) -> ClaimVerdict:
    return ClaimVerdict(ClaimAnswer(outcome), job, settled)


def _settled_after(claim: Claim, settled: int) -> int:
    """S20: `settled` moves to the claimed slot unless a slot between is still unsettled."""
    chained = claim.previous_slot is None or claim.previous_slot <= settled
    return claim.slot if chained else settled


def _as_expected(claim: Claim, now: Moment) -> bool:
    return abs(claim.expected_at - now.at) <= lease_margin(claim.lease_ms)


def _witnessed(claim: Claim, now: Moment) -> bool:
    """Whether the lease clock is vouched for: the second witness of S19."""
    return now.steady or (claim.vouched and _as_expected(claim, now))


def _over(run: Run, now: Moment, witnessed: bool) -> bool:
    """Whether no attempt of the run is in progress, so that another may follow."""
    if run.freed or run.state is RunState.RETRYING:
        return True
    assert run.lease is not None, "a run that was begun and has no lease is final"
    if run.lease.boot_id != now.boot_id:
        return True
    left = lease_left(run, now)
    return witnessed and left is not None and left <= 0


# --- How attempts and runs end -----------------------------------------------------------


def _interrupted(run: Run, now: Moment) -> Saved:
    """The run between two attempts: its present one closed, and counted where it counts."""
    if run.waits or run.state is RunState.RETRYING:
        return Saved(run)
    assert run.current is not None
    timed_out = _is_retried(run)
    if run.freed:  # closed when it was freed
        counts = run.freed == Reason.RUNNER_LOST and not timed_out
        return Saved(replace(run, lost=run.lost + counts, failed=run.failed + timed_out))
    closed = replace(
        run.current,
        state=RunState.FAILED if timed_out else RunState.INTERRUPTED,
        reason=Reason.TIMEOUT if timed_out else Reason.RUNNER_LOST,
        ended_at=min(now.at, run.lease.end_at) if run.lease else now.at,
    )
    lost, failed = run.lost + (not timed_out), run.failed + timed_out
    return Saved(replace(run, lost=lost, failed=failed, current=closed), (closed,))


def _is_retried(run: Run) -> bool:
    """S22. Whether what follows the run's present attempt is a retry: it failed, or timed out."""
    if run.cancel is None:
        return run.state is RunState.RETRYING
    return run.cancel is CancelReason.TIMEOUT and run.failed < run.retries


def why_no_other(run: Run, at: int) -> str:
    """Why a run without an attempt in progress at `at` may have no other; empty: it may.

    A cancelled run is neither taken over nor retried (S21a), but for one that timed out and has
    retries left (S22); one whose runners died too often is exhausted; one that nobody wanted for
    its window is abandoned (S19).
    """
    retried = _is_retried(run)
    if run.cancel is not None and not retried:
        return _CANCELLED_AS[run.cancel]
    if run.attempt >= ATTEMPTS_MAX:
        return Reason.ATTEMPTS_EXHAUSTED
    if not run.waits and not retried:
        lost = run.lost + (not run.freed or run.freed == Reason.RUNNER_LOST)
        if lost >= run.max_attempts:
            return Reason.ATTEMPTS_EXHAUSTED
    since = _unwanted_since(run)
    if since is not None and run.window_ms and since < at - run.window_ms:
        return Reason.ABANDONED
    return ""


def _unwanted_since(run: Run) -> int | None:
    """From when on the run could have had its next attempt."""
    if run.waits:
        return run.slot
    if run.state is RunState.RETRYING:
        return run.retry_at
    assert run.current is not None
    return run.current.ended_at if run.freed or run.lease is None else run.lease.end_at


def _ended_instead(run: Run, now: Moment) -> Saved | None:
    """The end of a run without an attempt in progress that may have no other; else None."""
    reason = why_no_other(run, now.at)
    if not reason:
        return None
    if run.waits:
        ended = replace(run, state=RunState.SKIPPED, reason=reason, ended_at=now.at)
        return Saved(ended)
    return _finished(run, now, RunState.FAILED, reason)


def _finished(run: Run, now: Moment, state: RunState, reason: str) -> Saved:
    """A run ended from outside: its attempt ends as FAILED, or stays INTERRUPTED if lost."""
    between = _interrupted(run, now)
    assert between.run.current is not None
    current = between.run.current
    in_progress = run.state is not RunState.RETRYING
    if run.cancel is not None and in_progress:
        current = replace(current, state=state, reason=reason)
    ended = replace(
        between.run,
        state=state,
        reason=reason,
        current=current,
        lease=None,
        freed="",
        ended_at=now.at,
    )
    return Saved(ended, (current,) if in_progress else ())


# --- Tokens: renewals, results, releases -------------------------------------------------


def judge_renewal(renewal: Renewal, now: Moment, run: Run | None) -> TokenVerdict:
    """Decides a heartbeat, or an adoption (S15, S17, S21a, S26).

    The token is good until another attempt is claimed or the run is final, also when the
    lease is over; a freed attempt is not held by anybody and is renewed by nobody.
    """
    if run is None:
        return _token_answer(TokenOutcome.UNKNOWN_TOKEN, None, now)
    if run.token != renewal.token or not _is_good(run, now):
        return _token_answer(TokenOutcome.FENCED, run, now)
    assert run.current is not None
    current = run.current
    if current.incarnation != renewal.incarnation and not renewal.adopt:
        return _token_answer(TokenOutcome.FENCED, run, now)
    if renewal.adopt:
        current = replace(current, instance_id=renewal.instance_id, incarnation=renewal.incarnation)
    if renewal.started_at is not None and current.started_at is None:
        started_at = max(renewal.started_at, run.slot)
        current = replace(current, state=RunState.RUNNING, started_at=started_at)
    renewed = replace(
        run,
        state=current.state,
        current=current,
        lease=_renewed(run.lease, renewal.lease_ms, now),
    )
    if renewal.cancel is not None and run.cancel is None:
        renewed = replace(renewed, cancel=renewal.cancel, cancelled_at=now.lease_at)
    changed = (current,) if current is not run.current else ()
    answer = TokenAnswer(TokenOutcome.RENEWED, view(renewed, now))
    return TokenVerdict(answer, Saved(renewed, changed))


def _is_good(run: Run, now: Moment) -> bool:
    """Whether the lease of the present attempt may still be renewed by its token.

    From its first cancel on it may for the grace alone (S21a), on a clock that may have been
    set back meanwhile.
    """
    held = run.state in (RunState.CLAIMED, RunState.RUNNING) and not run.freed
    if not held:
        return False
    return run.cancel is None or abs(now.lease_at - run.cancelled_at) <= run.cancel_grace_ms


def judge_completion(
    completion: Completion, now: Moment, run: Run | None, past: Attempt | None
) -> TokenVerdict:
    """Decides a result (S17, S21a). `past` is an earlier attempt with this token, if any."""
    if run is None or run.current is None:
        return _token_answer(TokenOutcome.UNKNOWN_TOKEN, run, now)
    outcome = completion.outcome
    if run.token != completion.token:
        repeated = past is not None and _agrees(outcome, past)
        return _token_answer(TokenOutcome.RECORDED if repeated else TokenOutcome.FENCED, run, now)
    if run.state.final or run.freed or run.state is RunState.RETRYING:
        return _repeat_or_late(completion, now, run)
    if outcome.stopped in (CancelReason.LEASE_LOST, CancelReason.FENCED):
        return _token_answer(TokenOutcome.FENCED, run, now)
    if outcome.stopped is CancelReason.SHUTDOWN and run.cancel is None:
        return _freed(run, now, Reason.HANDED_OVER, TokenOutcome.RECORDED)
    return _record(completion, now, run)


def _repeat_or_late(completion: Completion, now: Moment, run: Run) -> TokenVerdict:
    """A result for an attempt that is over: a repeat, a contradiction, or just late.

    A freed attempt's token is still good (S17): a real result of it counts.
    """
    assert run.current is not None
    outcome = completion.outcome
    if _agrees(outcome, run.current):
        return _token_answer(TokenOutcome.RECORDED, run, now)
    if run.freed and outcome.stopped is None:
        return _record(completion, now, run)
    return _token_answer(TokenOutcome.ALREADY_COMPLETED, run, now)


def _record(completion: Completion, now: Moment, run: Run) -> TokenVerdict:
    assert run.current is not None
    outcome = completion.outcome
    cancel = run.cancel or outcome.stopped
    failed = cancel is not None or outcome.failure is not None
    state = RunState.FAILED if failed else RunState.SUCCESS
    reason = _CANCELLED_AS[cancel] if cancel is not None else ""
    # The client's own measure is finer than the KeepAlive that first named the attempt, unless
    # the result had to wait for the store.
    started_at = max(run.current.claimed_at, now.at - outcome.elapsed_ms)
    if run.current.started_at is not None:
        started_at = min(started_at, run.current.started_at)
    current = replace(
        run.current,
        state=state,
        reason=reason,
        started_at=started_at,
        ended_at=now.at,
        failure=outcome.failure,
        result="" if failed else outcome.result,
    )
    ended = replace(
        run,
        state=state,
        reason=reason,
        current=current,
        lease=None,
        freed="",
        failed=run.failed + failed,
        ended_at=now.at,
    )
    if failed and _may_retry(completion, run, cancel):
        assert completion.retry_in_ms is not None
        ended = replace(
            ended,
            state=RunState.RETRYING,
            reason="",
            cancel=None,
            cancelled_at=0,
            ended_at=None,
            retry_at=now.at + completion.retry_in_ms,
            retry_delay_ms=completion.retry_in_ms,
        )
    agreed = _agrees(outcome, current)
    word = TokenOutcome.RECORDED if agreed else TokenOutcome.ALREADY_COMPLETED
    return TokenVerdict(TokenAnswer(word, view(ended, now)), Saved(ended, (current,)))


def _may_retry(completion: Completion, run: Run, cancel: CancelReason | None) -> bool:
    """S22. Whether a failed attempt is followed by another."""
    failure = completion.outcome.failure
    return (
        completion.retry_in_ms is not None
        and cancel in (None, CancelReason.TIMEOUT)
        and not (failure is not None and failure.permanent)
        and run.failed < run.retries
        and run.attempt < ATTEMPTS_MAX
    )


def judge_release(release: Release, now: Moment, run: Run | None) -> TokenVerdict:
    """Decides the early end of a lease (S17, S19, S23 to S25)."""
    if run is None or run.current is None:
        return _token_answer(TokenOutcome.UNKNOWN_TOKEN, run, now)
    ours = run.token == release.token and run.current.incarnation == release.incarnation
    if not ours or run.state.final or run.state is RunState.RETRYING:
        return _token_answer(TokenOutcome.FENCED, run, now)
    if run.freed:
        return _token_answer(TokenOutcome.RELEASED, run, now)
    return _freed(run, now, release.reason, TokenOutcome.RELEASED)


def _freed(run: Run, now: Moment, reason: str, word: TokenOutcome) -> TokenVerdict:
    """The present attempt is over now, and the run open for the next, or ended with it."""
    assert run.current is not None
    timed_out = run.cancel is CancelReason.TIMEOUT
    current = replace(
        run.current,
        state=RunState.FAILED if timed_out else RunState.INTERRUPTED,
        reason=Reason.TIMEOUT if timed_out else reason,
        ended_at=now.at,
    )
    freed = replace(run, state=RunState.INTERRUPTED, reason=reason, current=current, freed=reason)
    saved = _ended_instead(freed, now) or Saved(freed, (current,))
    return TokenVerdict(TokenAnswer(word, view(saved.run, now)), saved)


def _agrees(outcome: Outcome, attempt: Attempt) -> bool:
    """Whether the attempt ended as the outcome says."""
    if outcome.stopped is CancelReason.SHUTDOWN:
        return attempt.reason == Reason.HANDED_OVER
    if outcome.stopped is not None:
        return attempt.state is RunState.FAILED and attempt.reason != ""
    if outcome.failure is not None:
        return attempt.state is RunState.FAILED and attempt.failure == outcome.failure
    return attempt.state is RunState.SUCCESS and attempt.result == outcome.result


def _token_answer(word: TokenOutcome, run: Run | None, now: Moment) -> TokenVerdict:
    return TokenVerdict(TokenAnswer(word, view(run, now) if run is not None else None))


def _renewed(lease: Lease | None, length_ms: int, now: Moment) -> Lease:
    """A lease from now on. It never shrinks, unless its end makes no sense any more (F8)."""
    if lease is not None and lease.boot_id == now.boot_id:
        ahead = lease.until - now.lease_at
        makes_sense = ahead <= lease.length_ms + lease_margin(lease.length_ms)
        if makes_sense and ahead > length_ms:
            return replace(lease, end_at=now.at + ahead)
    return Lease(now.lease_at + length_ms, length_ms, now.at + length_ms, now.boot_id)


# --- Missed slots ------------------------------------------------------------------------


def judge_plan(
    plan: Plan,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    taken: Collection[int],
    caught_up: Iterable[Run] = (),
    missed_by: int | None = None,
) -> PlanVerdict:
    """Decides what becomes of slots nobody claimed in time (S20).

    `taken` are those of the plan's slots that have a row, `caught_up` the job's runs that wait
    since an earlier plan; `missed_by` is when their time must have been over (None: by now, by
    the store's clock). `settled` moves to the newest slot that is missed by the store's clock,
    whether it had a row or not, and on over those that follow and have one; never past one that is
    not missed and has none, which could not be claimed any more (I6). While the job is paused
    nothing is planned (S29).
    """
    if settled is None or plan.settled != settled or job.paused_at is not None:
        return PlanVerdict(PlanAnswer(False, settled))
    by = now.at if missed_by is None else missed_by
    missed = takewhile(lambda m: m.slot < by - m.start_deadline_ms, plan.slots)
    over = [m.slot for m in missed]
    if not over:
        return PlanVerdict(PlanAnswer(True, settled))
    lost = [slot for slot in over if slot not in taken and slot > job.floor]
    # Their claims found a slot before them unsettled: left behind, it would be so for all to come.
    settled_too = [m.slot for m in takewhile(lambda m: m.slot in taken, plan.slots[len(over) :])]
    run = _to_be_run(plan, now, lost)
    due = [
        Run(plan.job, slot, Trigger.CATCH_UP, RunState.DUE, window_ms=plan.window_ms)
        for slot in run
    ]
    given_up = _beyond_the_limit(plan, now, [*caught_up, *due])
    dropped = {each.slot for each in given_up}
    due = [each for each in due if each.slot not in dropped]
    saved = _passed_over(plan.job, lost[: len(lost) - len(run)], now, plan)
    saved += [Saved(each) for each in (*due, *given_up)]
    skipped = len(lost) - len(run) + len(given_up)
    answer = PlanAnswer(True, [*over, *settled_too][-1], skipped, len(due))
    return PlanVerdict(answer, tuple(saved))


def _to_be_run(plan: Plan, now: Moment, lost: Sequence[int]) -> list[int]:
    """Which of the missed slots are run after all: the newest, and none that is too old."""
    if plan.catch_up is CatchUpPolicy.NONE:
        return []
    return [slot for slot in lost if slot >= now.at - plan.window_ms][-_most_waiting(plan) :]


def _most_waiting(plan: Plan) -> int:
    """How many caught-up runs of the job may wait."""
    return 1 if plan.catch_up is CatchUpPolicy.LATEST else plan.limit


def _beyond_the_limit(plan: Plan, now: Moment, caught_up: Sequence[Run]) -> list[Run]:
    """The oldest of more caught-up runs than may wait, which are missed after all."""
    ordered = sorted(caught_up, key=_by_slot)
    return [
        replace(run, state=RunState.SKIPPED, reason=Reason.MISSED, ended_at=now.at)
        for run in ordered[: max(0, len(ordered) - _most_waiting(plan))]
    ]


def _passed_over(job: str, slots: Sequence[int], now: Moment, plan: Plan) -> list[Saved]:
    """The rows of missed slots that are not run: one each, past the limit one for the rest."""
    shown, rest = slots[-plan.limit :], slots[: -plan.limit]
    saved = [_missed(job, slot, now, 0) for slot in shown]
    if rest or (plan.more and shown):
        covered = MISSED_LISTED_MAX if plan.more else len(rest)
        newest = rest[-1] if rest else shown[0]
        row = _missed(job, newest, now, covered)
        saved = [s for s in saved if s.run.slot != newest] + [row]
    return saved


def _missed(job: str, slot: int, now: Moment, covered: int) -> Saved:
    missed = Run(job, slot, Trigger.SCHEDULE, RunState.SKIPPED, Reason.MISSED)
    return Saved(replace(missed, slots_covered=covered, ended_at=now.at))


# --- Definitions and instances -----------------------------------------------------------


def is_live(instance: Instance, now: Moment) -> bool:
    """Whether the instance was heard of within its lease: what it holds counts (S28)."""
    return now.at - instance.seen_at <= instance.lease_ms


def is_forgotten(instance: Instance, now: Moment) -> bool:
    """Whether the instance was LOST for so long that nobody is shown it any more."""
    return now.at - instance.seen_at > instance.lease_ms + LOST_SHOWN


def shown_instance(instance: Instance, now: Moment) -> Instance:
    """The instance as it shows at this moment: LOST when it is not live."""
    return instance if is_live(instance, now) else replace(instance, state=InstanceState.LOST)


def hold_of(instance: Instance, definition: Definition) -> HeldDefinition:
    """That the instance holds the definition."""
    return HeldDefinition(
        instance.incarnation, definition.job, definition.definition_id, definition.schedule_id
    )


def judge_registration(
    wanted: HeldDefinition,
    now: Moment,
    job: JobRecord,
    schedule: ScheduleRecord | None,
    held: Collection[HeldDefinition],
) -> RegistrationVerdict:
    """Decides what becomes of the registration of one definition (S28).

    `held` is what live instances hold of the job, this one included, from before the
    registration; `schedule` is the record of the wanted definition's schedule.
    """
    in_use = {job.schedule_id, *(hold.schedule_id for hold in held)}
    known = {job.definition_id, *(hold.definition_id for hold in held)}
    if wanted.definition_id not in known:
        job = replace(
            job,
            definition_id=wanted.definition_id,
            schedule_id=wanted.schedule_id,
            definition_at=now.at,
        )
    if not wanted.schedule_id:
        return RegistrationVerdict(job, None)
    if schedule is None or wanted.schedule_id not in in_use:
        schedule = ScheduleRecord(since=now.at, settled=now.at)
    return RegistrationVerdict(job, schedule)


def definitions_differ(held: Iterable[HeldDefinition]) -> bool:
    """Whether live instances, which hold `held` of one job, hold different definitions."""
    return len({hold.definition_id for hold in held}) > 1


# --- Pruning -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptDefinition:
    """A definition as the store keeps it; `held_at`: when an instance last held it for sure."""

    definition_id: str
    schedule_id: str
    window_ms: int
    held_at: int


def judge_definitions(
    job: JobRecord,
    kept: Collection[KeptDefinition],
    held: Collection[str],
    now: Moment,
    history_ms: int,
) -> tuple[JobRecord, tuple[KeptDefinition, ...]]:
    """Which definitions of a job may go, as nobody has held them for so long (S28).

    `held` are the ids that instances hold, live or not. Where a definition that stays has to
    follow a current one that goes, it is the one that was held last. Where all may go, so may
    the whole job.
    """
    gone = tuple(
        each
        for each in kept
        if each.definition_id not in held and each.held_at < now.at - history_ms
    )
    stay = [each for each in kept if each not in gone]
    if stay and job.definition_id not in {each.definition_id for each in stay}:
        heir = max(stay, key=lambda each: (each.held_at, each.definition_id))
        job = replace(job, definition_id=heir.definition_id, schedule_id=heir.schedule_id)
    return job, gone


def in_use(
    job: JobRecord, kept: Iterable[KeptDefinition], live: Collection[str]
) -> list[KeptDefinition]:
    """The definitions whose slots pruning may not pass by, of those `kept`.

    They are what live instances hold (`live`, by id). Where none holds any it is the current one,
    whose slots are planned when an instance is back; one that was tried and rolled back while others
    went on has none to plan (S20), and would keep all history until it goes itself.
    """
    used = live or {job.definition_id}
    return [each for each in kept if each.definition_id in used]


def prune_bound(now: Moment, used: Iterable[KeptDefinition], settled: Mapping[str, int]) -> int:
    """The newest slot up to which pruning may raise a job's floor (S2).

    `settled` is what each schedule has settled. Where nothing is in use nothing can be claimed or
    planned.
    """
    bound = now.at
    for each in used:
        bound = min(bound, now.at - each.window_ms, settled.get(each.schedule_id, bound))
    return bound


def forgotten(job: JobRecord) -> JobRecord:
    """A job that nobody has any more: its floor and fence stay, for they must never fall."""
    return JobRecord(job.job, job.floor, job.fence)
