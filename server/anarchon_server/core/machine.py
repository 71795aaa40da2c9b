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
    CancelReason,
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
    cause_of,
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
    (empty: there is none), current since `definition_at` (S28).
    """

    job: str
    floor: int = -1
    fence: int = 0
    definition_id: str = ""
    schedule_id: str = ""
    definition_at: int = 0


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


def view(run: Run, now: Moment, attempts: Sequence[Attempt] = ()) -> RunView:
    """The run as it shows at this moment: an attempt whose lease is over is INTERRUPTED."""
    left = lease_left(run, now)
    if left is not None and left <= 0 and run.state in (RunState.CLAIMED, RunState.RUNNING):
        assert run.current is not None
        lapsed = replace(run.current, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST)
        shown = tuple(lapsed if a.attempt == lapsed.attempt else a for a in attempts)
        run = replace(run, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST, current=lapsed)
        return RunView(run, left, shown)
    return RunView(run, left, tuple(attempts))


def first_attempt_shown(run: Run) -> int:
    """The number of the oldest attempt that history shows (S30)."""
    return max(1, run.attempt - ATTEMPTS_SHOWN + 1)


def without_traces(seen: RunView) -> RunView:
    """The run without its stack traces, which may be long."""
    run = seen.run
    if run.current is not None:
        run = replace(run, current=_without_trace(run.current))
    return RunView(run, seen.lease_left_ms, tuple(_without_trace(a) for a in seen.attempts))


def _without_trace(attempt: Attempt) -> Attempt:
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
    slot's row, `others` the unfinished runs of the job at other slots (not looked at where
    overlap is allowed).
    """
    if run is not None:
        return _claim_of_a_row(claim, now, job, settled, run)
    if settled is None:
        return _unchanged(ClaimOutcome.UNREGISTERED, job, settled)
    if claim.slot > now.at + EARLY_MAX:
        return _unchanged(ClaimOutcome.EARLY, job, settled)
    if claim.slot <= max(job.floor, settled) or claim.slot < now.at - claim.start_deadline_ms:
        return _unchanged(ClaimOutcome.LATE, job, settled)
    if claim.seen_attempt:  # the run it saw has been pruned meanwhile
        return _unchanged(ClaimOutcome.LATE, job, settled)
    return _first_claim(claim, now, job, settled, others)


def _claim_of_a_row(
    claim: Claim, now: Moment, job: JobRecord, settled: int | None, run: Run
) -> ClaimVerdict:
    if run.token == claim.token and _is_good(run, now):
        renewed = replace(run, lease=_renewed(run.lease, claim.lease_ms, now))
        answer = ClaimAnswer(ClaimOutcome.WON, view(renewed, now))
        return ClaimVerdict(answer, job, settled, (Saved(renewed),))
    saw_the_present = (claim.seen_attempt, claim.seen_token) == (run.attempt, run.token)
    if run.state.final or not claim.seen_attempt or not saw_the_present:
        return _lost(run, now, job, settled)
    return _take_over(claim, now, job, settled, run)


def _take_over(
    claim: Claim, now: Moment, job: JobRecord, settled: int | None, run: Run
) -> ClaimVerdict:
    """S19. The run's present attempt is over if two witnesses agree, or it was freed."""
    if not _over(run, now, _witnessed(claim, now)):
        stepped = not now.steady and claim.vouched and not _as_expected(claim, now)
        if stepped and _over(run, now, witnessed=True):
            return _unchanged(ClaimOutcome.CLOCK_STEP, job, settled)
        return _lost(run, now, job, settled)
    ended = _ended_instead(run, now)
    if ended is not None:
        return _lost(ended.run, now, job, settled, (ended,))
    if not claim.may_run:
        answer = ClaimAnswer(ClaimOutcome.UNCHANGED, view(run, now))
        return ClaimVerdict(answer, job, settled)
    return _won(claim, now, job, settled, _interrupted(run, now))


def _first_claim(
    claim: Claim, now: Moment, job: JobRecord, settled: int, others: Iterable[Run]
) -> ClaimVerdict:
    ended, blocking = _in_the_way(claim, now, others)
    if blocking is not None:
        if claim.slot > now.at:
            verdict = _unchanged(ClaimOutcome.EARLY, job, settled)
            return replace(verdict, saved=ended)
        skipped = Run(
            claim.job,
            claim.slot,
            Trigger.SCHEDULE,
            RunState.SKIPPED,
            Reason.OVERLAP,
            blocking_slot=blocking.slot,
            ended_at=now.at,
        )
        answer = ClaimAnswer(ClaimOutcome.SKIPPED, view(skipped, now))
        moved = _settled_after(claim, settled)
        return ClaimVerdict(answer, job, moved, (*ended, Saved(skipped)))
    if not claim.may_run:
        return replace(_unchanged(ClaimOutcome.UNCHANGED, job, settled), saved=ended)
    fresh = Run(claim.job, claim.slot, Trigger.SCHEDULE, RunState.DUE)
    verdict = _won(claim, now, job, _settled_after(claim, settled), Saved(fresh))
    return replace(verdict, saved=(*ended, *verdict.saved))


def _in_the_way(
    claim: Claim, now: Moment, others: Iterable[Run]
) -> tuple[tuple[Saved, ...], Run | None]:
    """The runs this claim finds to be over for good, and the oldest that blocks it (S18)."""
    if claim.overlap is OverlapPolicy.ALLOW:
        return (), None
    assert claim.overlap is OverlapPolicy.SKIP, "other policies are refused at registration"
    witnessed = _witnessed(claim, now)
    ended: list[Saved] = []
    blocking: Run | None = None
    for other in others:
        end = _ended_instead(other, now) if _over(other, now, witnessed) else None
        if end is not None:
            ended.append(end)
        elif blocking is None or other.slot < blocking.slot:
            blocking = other
    return tuple(ended), blocking


def _won(
    claim: Claim, now: Moment, job: JobRecord, settled: int | None, before: Saved
) -> ClaimVerdict:
    """The next attempt of `before.run`, whose earlier attempts are closed."""
    fence = max(job.fence + 1, now.at_us)
    attempt = Attempt(
        attempt=before.run.attempt + 1,
        token=claim.token,
        fence=fence,
        instance_id=claim.instance_id,
        incarnation=claim.incarnation,
        cause=cause_of(claim),
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
        cancel_grace_ms=claim.cancel_grace_ms,
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
    """Whether the present attempt is over, so that another may follow."""
    if run.freed:
        return True
    assert run.lease is not None, "a run that is neither freed nor leased is final"
    if run.lease.boot_id != now.boot_id:
        return True
    left = lease_left(run, now)
    return witnessed and left is not None and left <= 0


# --- How attempts and runs end -----------------------------------------------------------


def _interrupted(run: Run, now: Moment) -> Saved:
    """The run between two attempts: its present one closed, and counted where it counts."""
    assert run.current is not None
    if run.freed:  # closed when it was freed
        counts = run.freed == Reason.RUNNER_LOST
        return Saved(replace(run, lost=run.lost + counts))
    closed = replace(
        run.current,
        state=RunState.INTERRUPTED,
        reason=Reason.RUNNER_LOST,
        ended_at=min(now.at, run.lease.end_at) if run.lease else now.at,
    )
    return Saved(replace(run, lost=run.lost + 1, current=closed), (closed,))


def why_no_other(run: Run, at: int) -> str:
    """Why a run whose attempt is over at `at` may have no other; empty: it may.

    A cancelled run is neither taken over nor retried (S21a); one whose runners died too
    often is exhausted; one that nobody wanted for its window is abandoned (S19).
    """
    if run.cancel is not None:
        return _CANCELLED_AS[run.cancel]
    lost = run.lost + (not run.freed or run.freed == Reason.RUNNER_LOST)
    if lost >= run.max_attempts or run.attempt >= ATTEMPTS_MAX:
        return Reason.ATTEMPTS_EXHAUSTED
    assert run.current is not None
    over_since = run.current.ended_at if run.freed or run.lease is None else run.lease.end_at
    if over_since is not None and run.window_ms and over_since < at - run.window_ms:
        return Reason.ABANDONED
    return ""


def _ended_instead(run: Run, now: Moment) -> Saved | None:
    """The end of a run whose attempt is over and that may have no other; else None."""
    reason = why_no_other(run, now.at)
    return _finished(run, now, RunState.FAILED, reason) if reason else None


def _finished(run: Run, now: Moment, state: RunState, reason: str) -> Saved:
    """A run ended from outside: its attempt ends as FAILED, or stays INTERRUPTED if lost."""
    between = _interrupted(run, now)
    assert between.run.current is not None
    current = between.run.current
    if run.cancel is not None:
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
    return Saved(ended, (current,))


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
    if run.state.final or run.freed or run.current is None:
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
    if run.state.final or run.freed:
        return _repeat_or_late(completion, now, run)
    if outcome.stopped in (CancelReason.LEASE_LOST, CancelReason.FENCED):
        return _token_answer(TokenOutcome.FENCED, run, now)
    if outcome.stopped is CancelReason.SHUTDOWN and run.cancel is None:
        return _freed(run, now, Reason.HANDED_OVER, TokenOutcome.RECORDED)
    return _record(run, now, outcome)


def _repeat_or_late(completion: Completion, now: Moment, run: Run) -> TokenVerdict:
    """A result for an attempt that is over: a repeat, a contradiction, or just late.

    A freed attempt's token is still good (S17): a real result of it counts.
    """
    assert run.current is not None
    outcome = completion.outcome
    if _agrees(outcome, run.current):
        return _token_answer(TokenOutcome.RECORDED, run, now)
    if run.freed and outcome.stopped is None:
        return _record(run, now, outcome)
    return _token_answer(TokenOutcome.ALREADY_COMPLETED, run, now)


def _record(run: Run, now: Moment, outcome: Outcome) -> TokenVerdict:
    assert run.current is not None
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
    agreed = _agrees(outcome, current)
    word = TokenOutcome.RECORDED if agreed else TokenOutcome.ALREADY_COMPLETED
    return TokenVerdict(TokenAnswer(word, view(ended, now)), Saved(ended, (current,)))


def judge_release(release: Release, now: Moment, run: Run | None) -> TokenVerdict:
    """Decides the early end of a lease (S17, S19, S23 to S25)."""
    if run is None or run.current is None:
        return _token_answer(TokenOutcome.UNKNOWN_TOKEN, run, now)
    ours = run.token == release.token and run.current.incarnation == release.incarnation
    if not ours or run.state.final:
        return _token_answer(TokenOutcome.FENCED, run, now)
    if run.freed:
        return _token_answer(TokenOutcome.RELEASED, run, now)
    return _freed(run, now, release.reason, TokenOutcome.RELEASED)


def _freed(run: Run, now: Moment, reason: str, word: TokenOutcome) -> TokenVerdict:
    """The present attempt is over now, and the run open for the next, or ended with it."""
    assert run.current is not None
    current = replace(run.current, state=RunState.INTERRUPTED, reason=reason, ended_at=now.at)
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
    plan: Plan, now: Moment, job: JobRecord, settled: int | None, taken: frozenset[int]
) -> PlanVerdict:
    """Decides what becomes of slots nobody claimed in time (S20, `catch_up` none).

    `taken` are those of the plan's slots that have a row. `settled` moves to the newest
    slot that is missed by the store's clock, whether it had a row or not; never past one that
    is not, which could not be claimed any more (I6).
    """
    if settled is None or plan.settled != settled:
        return PlanVerdict(PlanAnswer(False, settled))
    missed = takewhile(lambda m: m.slot < now.at - m.start_deadline_ms, plan.slots)
    over = [m.slot for m in missed]
    if not over:
        return PlanVerdict(PlanAnswer(True, settled))
    lost = [slot for slot in over if slot not in taken and slot > job.floor]
    shown, rest = lost[-plan.limit :], lost[: -plan.limit]
    saved = [_missed(plan.job, slot, now, 0) for slot in shown]
    if rest or (plan.more and shown):
        covered = MISSED_LISTED_MAX if plan.more else len(rest)
        newest = rest[-1] if rest else shown[0]
        row = _missed(plan.job, newest, now, covered)
        saved = [s for s in saved if s.run.slot != newest] + [row]
    return PlanVerdict(PlanAnswer(True, over[-1], len(lost)), tuple(saved))


def _missed(job: str, slot: int, now: Moment, covered: int) -> Saved:
    return Saved(
        Run(
            job,
            slot,
            Trigger.SCHEDULE,
            RunState.SKIPPED,
            Reason.MISSED,
            slots_covered=covered,
            ended_at=now.at,
        )
    )


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


def prune_bound(now: Moment, in_use: Iterable[KeptDefinition], settled: Mapping[str, int]) -> int:
    """The newest slot up to which pruning may raise a job's floor (S2).

    `in_use` are the definitions that are current or held by a live instance, `settled` what
    each schedule has settled. Where nothing is in use nothing can be claimed or planned.
    """
    bound = now.at
    for each in in_use:
        bound = min(bound, now.at - each.window_ms, settled.get(each.schedule_id, bound))
    return bound


def forgotten(job: JobRecord) -> JobRecord:
    """A job that nobody has any more: its floor and fence stay, for they must never fall."""
    return JobRecord(job.job, job.floor, job.fence)
