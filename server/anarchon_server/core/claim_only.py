"""The life of a run on a backend without leases, which nobody ever takes over.

Imports `machine`, `control`, `limits`, `model` and the records of `store`. Each `judge_*` has the
duties of its namesake in `machine` or `control`. What differs: a slot is claimed once and for all, a
token is good until its attempt has ended, and whatever ends a lease elsewhere ends the run here.
Where an attempt failed and the job has retries left, the next is claimed by who reported it: no
other instance learns of it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from anarchon_server.core import control, machine
from anarchon_server.core.control import ControlVerdict
from anarchon_server.core.limits import ATTEMPTS_SHOWN, EARLY_MAX
from anarchon_server.core.machine import ClaimVerdict, JobRecord, Moment, Saved, TokenVerdict
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    Reason,
    Run,
    RunState,
    RunView,
    Trigger,
)
from anarchon_server.core.store import (
    CancelRun,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    ControlAnswer,
    ControlOutcome,
    PrunePolicy,
    Release,
    Renewal,
    Resume,
    TokenAnswer,
    TokenOutcome,
)

_LOST_AS = {Reason.NOT_ACCEPTED: Reason.NOT_ACCEPTED}
"""As what a run ends whose attempt was released; where nothing is said, `runner_lost`."""


def fence_of(slot: int, attempt: int = 1) -> int:
    """The fence of a slot's attempt: the slot in microseconds, and one more for each retry."""
    return slot * 1_000 + attempt - 1


def untimely(claim: Claim, at: int, floor: int = -1) -> ClaimOutcome | None:
    """Why a first claim may not be made at `at` by the store's time (S2); None: it may."""
    if claim.slot > at + EARLY_MAX:
        return ClaimOutcome.EARLY
    if claim.slot <= floor or claim.slot < at - claim.start_deadline_ms:
        return ClaimOutcome.LATE
    return None


def won_run(claim: Claim, at: int, before: Run | None = None) -> Run:
    """The run that a claim won at `at` makes, or goes on with where it waited or is retried."""
    run = before or Run(claim.job, claim.slot, Trigger.SCHEDULE, RunState.DUE)
    number = run.attempt + 1
    attempt = Attempt(
        attempt=number,
        token=claim.token,
        fence=fence_of(claim.slot, number),
        instance_id=claim.instance_id,
        incarnation=claim.incarnation,
        cause=AttemptCause.RETRY if run.current else AttemptCause.CLAIM,
        state=RunState.CLAIMED,
        claimed_at=at,
    )
    return replace(
        run,
        state=RunState.CLAIMED,
        current=attempt,
        earlier=(*run.earlier, run.current) if run.current else (),
        max_attempts=1,
        window_ms=claim.window_ms,
        cancel_grace_ms=claim.cancel_grace_ms,
        retries=claim.retries,
        retry_at=None,
        retry_delay_ms=0,
    )


def attempts_of(run: Run) -> tuple[Attempt, ...]:
    """All attempts of a run that is kept in one piece, oldest first; those that are shown (S30)."""
    return (*run.earlier, run.current)[-ATTEMPTS_SHOWN:] if run.current else ()


def is_won(claim: Claim, run: Run) -> bool:
    """Whether the claim made this run's attempt, and it has not ended: the repeat of a win (S11)."""
    held = run.state in (RunState.CLAIMED, RunState.RUNNING)
    return run.token == claim.token and held


def judge_claim(
    claim: Claim,
    now: Moment,
    job: JobRecord,
    settled: int | None,
    run: Run | None,
    others: Iterable[Run] = (),
) -> ClaimVerdict:
    """Decides a claim (S2, S10, S11, S29). Whatever else of the job runs is no matter (S18)."""
    del others
    if run is not None:
        return _claim_of_a_row(claim, now, job, settled, run)
    word = untimely(claim, now.at, job.floor)
    if claim.seen_attempt:  # the run that is retried has been pruned meanwhile
        word = ClaimOutcome.LATE
    if job.paused_at is not None and word is not ClaimOutcome.EARLY:
        word = ClaimOutcome.PAUSED
    if word is None and not claim.may_run:
        word = ClaimOutcome.UNCHANGED
    if word is not None:
        return ClaimVerdict(ClaimAnswer(word), job, settled)
    return _won(won_run(claim, now.at), now, job, settled)


def _claim_of_a_row(
    claim: Claim, now: Moment, job: JobRecord, settled: int | None, run: Run
) -> ClaimVerdict:
    """The repeat of a claim, the first attempt of a run that was triggered, or a retry (S22)."""
    seen = (claim.seen_attempt, claim.seen_token) == (run.attempt, run.token)
    if not run.waits and not (run.state is RunState.RETRYING and seen):
        word = ClaimOutcome.WON if is_won(claim, run) else ClaimOutcome.LOST
        return ClaimVerdict(ClaimAnswer(word, machine.view(run, now)), job, settled)
    too_soon = run.waits and run.slot > now.at + EARLY_MAX  # the clock was set back since
    if too_soon or machine.retry_left(run, now):
        answer = ClaimAnswer(ClaimOutcome.EARLY, machine.view(run, now))
        return ClaimVerdict(answer, job, settled)
    if reason := machine.why_no_other(run, now.at):
        state = RunState.SKIPPED if run.waits else RunState.FAILED
        ended = replace(run, state=state, reason=reason, ended_at=now.at)
        answer = ClaimAnswer(ClaimOutcome.LOST, machine.view(ended, now))
        return ClaimVerdict(answer, job, settled, (Saved(ended),))
    if not claim.may_run:
        answer = ClaimAnswer(ClaimOutcome.UNCHANGED, machine.view(run, now))
        return ClaimVerdict(answer, job, settled)
    return _won(won_run(claim, now.at, run), now, job, settled)


def _won(won: Run, now: Moment, job: JobRecord, settled: int | None) -> ClaimVerdict:
    assert won.current is not None
    answer = ClaimAnswer(ClaimOutcome.WON, machine.view(won, now))
    return ClaimVerdict(answer, job, settled, (Saved(won, (won.current,)),))


def judge_renewal(renewal: Renewal, now: Moment, run: Run | None) -> TokenVerdict:
    """Decides an adoption, or what a holder has to say of its run (S17, S26)."""
    verdict = machine.judge_renewal(renewal, now, run)
    if verdict.saved is None:
        return verdict
    unleased = replace(verdict.saved, run=replace(verdict.saved.run, lease=None))
    return TokenVerdict(
        TokenAnswer(verdict.answer.outcome, machine.view(unleased.run, now)), unleased
    )


def judge_completion(
    completion: Completion, now: Moment, run: Run | None, past: Attempt | None = None
) -> TokenVerdict:
    """Decides a result (S17). A handler that obeyed a stop leaves a run that nobody goes on with.

    `past` is an earlier attempt with this token, if any, where the run does not have them itself.
    """
    kept = run.earlier if run else ()
    past = next((each for each in kept if each.token == completion.token), past)
    return _ended(machine.judge_completion(completion, now, run, past), now)


def judge_release(release: Release, now: Moment, run: Run | None) -> TokenVerdict:
    """Decides what becomes of a run whose runner is gone: it ends with it (S23 to S25)."""
    if run is not None and _was_released(release, run):
        return TokenVerdict(TokenAnswer(TokenOutcome.RELEASED, machine.view(run, now)))
    if run is not None and run.state is RunState.RETRYING and _is_by_its_holder(release, run):
        ended = replace(
            run, state=RunState.FAILED, reason=Reason.RUNNER_LOST, retry_at=None, ended_at=now.at
        )
        answer = TokenAnswer(TokenOutcome.RELEASED, machine.view(ended, now))
        return TokenVerdict(answer, Saved(ended))
    last = replace(run, retries=0) if run is not None else None  # a lost attempt is not retried
    return _ended(machine.judge_release(release, now, last), now)


def _is_by_its_holder(release: Release, run: Run) -> bool:
    current = run.current
    return current is not None and (current.token, current.incarnation) == (
        release.token,
        release.incarnation,
    )


def _was_released(release: Release, run: Run) -> bool:
    current = run.current
    return (
        run.state is RunState.FAILED
        and current is not None
        and _is_by_its_holder(release, run)
        and (current.state, current.reason) == (RunState.INTERRUPTED, release.reason)
    )


def _ended(verdict: TokenVerdict, now: Moment) -> TokenVerdict:
    """The verdict, with what would leave the run to another attempt ending it instead."""
    saved = verdict.saved
    if saved is None:
        return verdict
    run = saved.run
    freed = run.freed or (
        run.current.reason
        if run.current is not None and run.reason == Reason.ATTEMPTS_EXHAUSTED
        else ""
    )
    if not freed:
        return verdict
    ended = replace(
        run,
        state=RunState.FAILED,
        reason=_LOST_AS.get(freed, Reason.RUNNER_LOST),
        freed="",
        ended_at=now.at,
    )
    answer = TokenAnswer(verdict.answer.outcome, machine.view(ended, now))
    return TokenVerdict(answer, replace(saved, run=ended))


def is_news(run: Run, incarnation: str) -> bool:
    """Whether a heartbeat shows the run to an instance that did not ask for it: it waits, or it is
    the instance's own and somebody asked it to stop.
    """
    asked = run.cancel is CancelReason.REQUESTED and not run.state.final
    return run.waits or (
        asked and run.current is not None and run.current.incarnation == incarnation
    )


def settled_at(since: int, job: JobRecord) -> int:
    """Up to where a schedule counts as settled that began at `since`, for a resumption: nothing is
    planned here, so that only what falls due during the pause is passed over.
    """
    return max(since, job.paused_at or 0)


def judge_resume(
    resume: Resume, now: Moment, job: JobRecord, since: Mapping[str, int], taken: Collection[int]
) -> ControlVerdict:
    """Ends a pause (S29). The floor rises to the end of the pause: what was passed over is claimed
    by nobody, and one row says how much that is. `since` is when each schedule in use began.
    """
    settled = {schedule_id: settled_at(began, job) for schedule_id, began in since.items()}
    verdict = control.judge_resume(resume, now, job, settled, taken, ())
    if verdict.job.paused_at == job.paused_at:
        return verdict
    floor = max(job.floor, now.at)
    return ControlVerdict(verdict.answer, replace(verdict.job, floor=floor), saved=verdict.saved)


def judge_cancel(
    cancel: CancelRun, now: Moment, job: JobRecord, run: Run | None, *, live: bool
) -> ControlVerdict:
    """Asks a run to stop (S21a). Its holder learns of it with the next heartbeat; where that is not
    `live`, as it was not heard of for its lease, the run ends at once.
    """
    if run is None or run.current is None or run.state.final or run.state is RunState.RETRYING:
        return control.judge_cancel(cancel, now, job, run)
    holder = run.current
    if run.cancel is None:
        run = replace(
            run,
            cancel=CancelReason.REQUESTED,
            cancelled_at=now.lease_at,
            cancel_message=cancel.message,
        )
    saved = Saved(run)
    if not live:
        lost = Release(run.job, run.slot, holder.token, holder.incarnation, Reason.RUNNER_LOST)
        saved = judge_release(lost, now, run).saved or saved
    answer = ControlAnswer(ControlOutcome.DONE, machine.view(saved.run, now))
    return ControlVerdict(answer, job, saved=(saved,))


def shown(run: Run, now: Moment, attempts: Sequence[Attempt] = (), *, live: bool) -> RunView:
    """The run for people. `live`: its instance was heard of lately; otherwise an unfinished
    run shows as INTERRUPTED, as its runner is gone for all that the store knows.
    """
    if live or run.state.final or run.current is None:
        return machine.view(run, now, attempts)
    lapsed = run.current
    if run.state is not RunState.RETRYING:  # else the attempt has ended
        lapsed = replace(lapsed, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST)
    run = replace(run, state=RunState.INTERRUPTED, reason=Reason.RUNNER_LOST, current=lapsed)
    return machine.view(run, now, (*attempts[:-1], lapsed) if attempts else ())


def prunable(
    runs: Sequence[Run], now: Moment, policy: PrunePolicy, known: Container[str]
) -> list[Run]:
    """Those of a job's runs, oldest first, that may go from history (S30).

    `known` are the incarnations of the instances that have not left and are not forgotten: such a one
    may yet end its run, however long that takes. The others' go by age though they have not ended:
    nobody will end them. That a slot was claimed is kept apart from history, or by the floor. A run
    that is retried is as old as its last attempt, or as the next will be.
    """
    beyond = len(runs) - policy.history_max
    oldest = now.at - policy.history_ms

    def may_go(place: int, run: Run) -> bool:
        if run.state.final and place < beyond:
            return True
        return _last_touched(run) < oldest and not _may_yet_end(run, known)

    return [run for place, run in enumerate(runs) if may_go(place, run)]


def _may_yet_end(run: Run, known: Container[str]) -> bool:
    return not run.state.final and run.current is not None and run.current.incarnation in known


def _last_touched(run: Run) -> int:
    claimed_at = run.current.claimed_at if run.current else 0
    return max(run.slot, run.ended_at or 0, run.retry_at or 0, claimed_at)
