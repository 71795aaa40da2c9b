"""The life of a run: every legal move, and what is answered to the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core.machine import (
    ClaimVerdict,
    HeldDefinition,
    JobRecord,
    KeptDefinition,
    Moment,
    PlanVerdict,
    Saved,
    ScheduleRecord,
    TokenVerdict,
    asked_to_stop,
    definitions_differ,
    first_attempt_shown,
    forgotten,
    hold_of,
    is_forgotten,
    is_live,
    judge_claim,
    judge_completion,
    judge_definitions,
    judge_plan,
    judge_registration,
    judge_release,
    judge_renewal,
    lease_left,
    prune_bound,
    shown_instance,
    view,
    without_traces,
)
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Definition,
    EverySchedule,
    Failure,
    Instance,
    InstanceState,
    JobSpec,
    Lease,
    Outcome,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    Trigger,
)
from anarchon_server.core.store import (
    Claim,
    ClaimOutcome,
    Completion,
    MissedSlot,
    Plan,
    Release,
    Renewal,
    TokenOutcome,
)

T = 1_800_000_000_000
LEASE = 30_000
JOB = JobRecord("sync")
RETURNED = Outcome(result="42", elapsed_ms=700)
RAISED = Outcome(failure=Failure("ValueError", "no", "trace"))


def at(ms: int = T, *, steady: bool = True, boot: str = "boot", lease_at: int | None = None) -> Any:
    """A moment: `ms` by the wall clock, and by the lease clock where that is not told apart."""
    return Moment(ms * 1_000, ms if lease_at is None else lease_at, boot, steady)


def claim(slot: int = T, token: str = "t1", **changes: Any) -> Claim:
    values: dict[str, Any] = {
        "job": "sync",
        "slot": slot,
        "token": token,
        "instance_id": "a",
        "incarnation": "A",
        "schedule_id": "every 10s",
        "previous_slot": slot - 10_000,
        "overlap": OverlapPolicy.SKIP,
        "start_deadline_ms": 10_000,
        "lease_ms": LEASE,
        "cancel_grace_ms": 5_000,
        "max_attempts": 3,
        "window_ms": 86_400_000,
        "expected_at": slot,
        "vouched": True,
        **changes,
    }
    return Claim(**values)


def judged(
    wish: Claim,
    now: Moment,
    run: Run | None = None,
    *others: Run,
    job: JobRecord = JOB,
    settled: int | None = T - 10_000,
) -> ClaimVerdict:
    return judge_claim(wish, now, job, settled, run, others)


def won(now: Moment | None = None, **changes: Any) -> Run:
    """A run whose first attempt, token t1, was just claimed by A."""
    verdict = judged(claim(**changes), now or at(), settled=T - 100_000)
    assert verdict.answer.outcome is ClaimOutcome.WON
    return verdict.saved[-1].run


def takeover(run: Run, token: str = "t2", **changes: Any) -> Claim:
    return claim(
        run.slot,
        token,
        **{
            "seen_attempt": run.attempt,
            "seen_token": run.token,
            "instance_id": "b",
            "incarnation": "B",
            **changes,
        },
    )


def renewal(**changes: Any) -> Renewal:
    values: dict[str, Any] = {
        "job": "sync",
        "slot": T,
        "token": "t1",
        "instance_id": "a",
        "incarnation": "A",
        "lease_ms": LEASE,
        **changes,
    }
    return Renewal(**values)


def renewed(run: Run, now: Moment, **changes: Any) -> Run:
    verdict = judge_renewal(renewal(**changes), now, run)
    assert verdict.answer.outcome is TokenOutcome.RENEWED
    assert verdict.saved is not None
    return verdict.saved.run


def released(run: Run, now: Moment, reason: str, **changes: Any) -> Run:
    values: dict[str, Any] = {"token": run.token, "incarnation": "A", **changes}
    verdict = judge_release(Release("sync", run.slot, reason=reason, **values), now, run)
    assert verdict.answer.outcome is TokenOutcome.RELEASED
    assert verdict.saved is not None
    return verdict.saved.run


def completed(
    run: Run | None,
    outcome: Outcome,
    now: Moment | None = None,
    token: str = "t1",
    past: Attempt | None = None,
) -> TokenVerdict:
    return judge_completion(Completion("sync", T, token, outcome), now or at(T + 900), run, past)


def ended(run: Run, outcome: Outcome, now: Moment | None = None) -> Run:
    verdict = completed(run, outcome, now)
    assert verdict.saved is not None
    return verdict.saved.run


def attempt_of(run: Run) -> Attempt:
    assert run.current is not None
    return run.current


# --- First claims ------------------------------------------------------------------------


def test_s10_a_first_claim_wins_an_attempt_with_its_token_and_lease() -> None:
    verdict = judged(claim(), at(T + 5))
    (saved,) = verdict.saved
    run, attempt = saved.run, attempt_of(saved.run)
    assert (run.state, run.attempt, run.token) == (RunState.CLAIMED, 1, "t1")
    assert (run.trigger, run.reason, run.lost) == (Trigger.SCHEDULE, "", 0)
    assert (attempt.cause, attempt.instance_id, attempt.incarnation) == ("claim", "a", "A")
    assert (attempt.claimed_at, attempt.started_at, attempt.ended_at) == (T + 5, None, None)
    assert run.lease == Lease(T + 5 + LEASE, LEASE, T + 5 + LEASE, "boot")
    assert saved.attempts == (attempt,)
    assert verdict.answer.run == view(run, at(T + 5))


def test_s10_the_slot_has_one_winner() -> None:
    run = won()
    verdict = judged(claim(token="t2", incarnation="B"), at(), run)
    assert verdict.answer.outcome is ClaimOutcome.LOST
    assert verdict.saved == ()
    assert verdict.answer.run is not None
    assert verdict.answer.run.run.token == "t1"


def test_s17_a_fence_grows_with_every_claim_and_not_below_the_stores_time() -> None:
    assert judged(claim(), at()).job.fence == T * 1_000
    ahead = JobRecord("sync", fence=9 * T * 1_000)
    verdict = judged(claim(), at(), job=ahead)
    assert verdict.job.fence == ahead.fence + 1
    assert attempt_of(verdict.saved[0].run).fence == ahead.fence + 1


def test_s11_a_repeated_claim_knows_its_own_token_whatever_its_deadline() -> None:
    run = won()
    late = at(T + 25_000)
    for may_run in (True, False):
        verdict = judged(claim(may_run=may_run), late, run, settled=T)
        assert verdict.answer.outcome is ClaimOutcome.WON
        (saved,) = verdict.saved
        assert saved.run.attempt == 1
        assert saved.run.lease == Lease(T + 25_000 + LEASE, LEASE, T + 25_000 + LEASE, "boot")


def test_s11_a_delayed_duplicate_of_a_claim_whose_run_has_ended_is_lost() -> None:
    run = ended(won(), RETURNED)
    assert judged(claim(), at(T + 5_000), run).answer.outcome is ClaimOutcome.LOST
    freed = released(won(), at(), Reason.HANDED_OVER)
    assert judged(claim(), at(T + 5_000), freed).answer.outcome is ClaimOutcome.LOST


def test_s2_a_claim_more_than_a_second_early_waits() -> None:
    assert judged(claim(), at(T - 1_001)).answer.outcome is ClaimOutcome.EARLY
    assert judged(claim(), at(T - 1_000)).answer.outcome is ClaimOutcome.WON


def test_s2_a_claim_past_its_deadline_is_late_and_not_recorded() -> None:
    verdict = judged(claim(), at(T + 10_001))
    assert (verdict.answer.outcome, verdict.saved) == (ClaimOutcome.LATE, ())
    assert judged(claim(), at(T + 10_000)).answer.outcome is ClaimOutcome.WON


def test_s2_nothing_at_or_below_the_floor_is_claimed() -> None:
    for floor, outcome in ((T, ClaimOutcome.LATE), (T - 1, ClaimOutcome.WON)):
        verdict = judged(claim(), at(), job=JobRecord("sync", floor=floor))
        assert verdict.answer.outcome is outcome


def test_s20_nothing_at_or_below_settled_is_claimed() -> None:
    for settled, outcome in ((T, ClaimOutcome.LATE), (T - 1, ClaimOutcome.WON)):
        assert judged(claim(), at(), settled=settled).answer.outcome is outcome


def test_s2_a_row_is_never_refused_for_its_age() -> None:
    run = won()
    lapsed = at(T + 3_600_000)
    verdict = judged(takeover(run), lapsed, run, settled=T + 7_200_000, job=JobRecord("sync", T))
    assert verdict.answer.outcome is ClaimOutcome.WON


def test_s28_a_claim_under_a_schedule_the_store_does_not_know_is_sent_to_register() -> None:
    assert judged(claim(), at(), settled=None).answer.outcome is ClaimOutcome.UNREGISTERED


def test_s20_settled_moves_with_claims_that_follow_each_other() -> None:
    assert judged(claim(), at()).settled == T
    assert judged(claim(previous_slot=None), at()).settled == T
    gap = judged(claim(), at(), settled=T - 20_000)
    assert (gap.answer.outcome, gap.settled) == (ClaimOutcome.WON, T - 20_000)


def test_s13_a_claim_without_room_settles_and_otherwise_changes_nothing() -> None:
    free = judged(claim(may_run=False), at())
    assert (free.answer.outcome, free.saved) == (ClaimOutcome.UNCHANGED, ())
    assert free.settled == T - 10_000
    busy = judged(claim(T, "t2", may_run=False), at(), None, won(slot=T - 5_000))
    assert busy.answer.outcome is ClaimOutcome.SKIPPED
    assert busy.settled == T


# --- Overlap -----------------------------------------------------------------------------


def test_s18_a_slot_is_skipped_for_the_oldest_run_in_its_way() -> None:
    newer, oldest, old = (won(slot=T - slot) for slot in (5_000, 9_000, 7_000))
    verdict = judged(claim(), at(), None, newer, oldest, old)
    assert verdict.answer.outcome is ClaimOutcome.SKIPPED
    (saved,) = verdict.saved
    run = saved.run
    assert (run.state, run.reason, run.blocking_slot) == (RunState.SKIPPED, "overlap", T - 9_000)
    assert (run.current, run.lease, run.ended_at) == (None, None, T)


def test_s18_allowed_runs_are_independent() -> None:
    wish = claim(overlap=OverlapPolicy.ALLOW)
    assert judged(wish, at(), None, won(slot=T - 5_000)).answer.outcome is ClaimOutcome.WON


def test_s18_a_claim_before_its_time_that_is_blocked_waits_instead_of_being_skipped() -> None:
    other = won(slot=T - 5_000)
    verdict = judged(claim(), at(T - 500), None, other)
    assert (verdict.answer.outcome, verdict.saved) == (ClaimOutcome.EARLY, ())
    assert judged(claim(), at(T), None, other).answer.outcome is ClaimOutcome.SKIPPED


def test_s18_a_freed_run_with_attempts_left_blocks() -> None:
    other = released(won(slot=T - 5_000), at(), Reason.HANDED_OVER)
    assert judged(claim(), at(), None, other).answer.outcome is ClaimOutcome.SKIPPED


def exhausted(slot: int = T - 50_000) -> Run:
    """A run whose third and last attempt is running, on a lease until `slot` + 30 s."""
    return replace(won(slot=slot, now=at(slot)), lost=2)


def test_s18_an_exhausted_run_whose_lease_is_over_is_ended_and_does_not_block() -> None:
    verdict = judged(claim(), at(), None, exhausted())
    assert verdict.answer.outcome is ClaimOutcome.WON
    other, mine = (saved.run for saved in verdict.saved)
    assert (other.state, other.reason) == (RunState.FAILED, "attempts_exhausted")
    assert mine.token == "t1"


@pytest.mark.parametrize(
    ("now", "outcome"),
    [(T - 500, ClaimOutcome.EARLY), (T, ClaimOutcome.SKIPPED), (T, ClaimOutcome.UNCHANGED)],
)
def test_s18_what_a_claim_finds_over_is_ended_whatever_becomes_of_the_claim(
    now: int, outcome: ClaimOutcome
) -> None:
    others = [exhausted()]
    if outcome is not ClaimOutcome.UNCHANGED:
        others.append(won(slot=T - 5_000))
    wish = claim(may_run=outcome is not ClaimOutcome.UNCHANGED)
    verdict = judged(wish, at(now), None, *others)
    assert verdict.answer.outcome is outcome
    assert verdict.saved[0].run.reason == "attempts_exhausted"


def test_s18_a_living_last_attempt_is_not_found_dead_by_a_clock_nobody_vouches_for() -> None:
    running = exhausted()
    for vouched, expected_at, outcome in (
        (True, T, ClaimOutcome.WON),
        (False, T, ClaimOutcome.SKIPPED),
        (True, T - 5_001, ClaimOutcome.SKIPPED),
        (True, T - 5_000, ClaimOutcome.WON),
    ):
        wish = claim(vouched=vouched, expected_at=expected_at)
        assert judged(wish, at(steady=False), None, running).answer.outcome is outcome


# --- Queue and cancel --------------------------------------------------------------------

QUEUE: dict[str, Any] = {"overlap": OverlapPolicy.QUEUE}
CANCEL: dict[str, Any] = {"overlap": OverlapPolicy.CANCEL}


def waiting(slot: int, trigger: Trigger = Trigger.SCHEDULE, **changes: Any) -> Run:
    return Run("sync", slot, trigger, RunState.DUE, **{"window_ms": 86_400_000, **changes})


def states(verdict: ClaimVerdict) -> list[tuple[int, RunState, str]]:
    """What is saved, in seconds before T."""
    return [((s.run.slot - T) // 1_000, s.run.state, s.run.reason) for s in verdict.saved]


def test_s18_a_queued_slot_waits_and_settles() -> None:
    verdict = judged(claim(**QUEUE), at(), None, won(slot=T - 5_000))
    assert verdict.answer.outcome is ClaimOutcome.QUEUED
    assert states(verdict) == [(0, RunState.DUE, "")]
    due = verdict.saved[0].run
    assert (due.blocking_slot, due.window_ms, verdict.settled) == (T - 5_000, 86_400_000, T)


def test_s18_a_newer_slot_replaces_only_what_waits_by_the_schedule() -> None:
    others = [
        won(slot=T - 9_000),
        waiting(T - 8_000, Trigger.CATCH_UP),
        waiting(T - 7_000, Trigger.MANUAL),
        waiting(T - 6_000, blocking_slot=T - 9_000),
    ]
    verdict = judged(claim(**QUEUE), at(), None, *others)
    assert states(verdict) == [(-6, RunState.SKIPPED, Reason.OVERLAP), (0, RunState.DUE, "")]
    assert verdict.saved[0].run.blocking_slot == T - 9_000


def test_s18_an_older_slot_gives_way_to_the_queued_one() -> None:
    running, newer = won(slot=T - 5_000), waiting(T + 10_000)
    verdict = judged(claim(**QUEUE), at(T + 10_000), None, running, newer)
    assert verdict.answer.outcome is ClaimOutcome.SKIPPED
    assert verdict.saved[-1].run.blocking_slot == T - 5_000


def test_s18_a_slot_before_the_one_that_waits_goes_first_when_nothing_runs() -> None:
    verdict = judged(claim(**QUEUE), at(T + 10_000), None, waiting(T + 10_000))
    assert verdict.answer.outcome is ClaimOutcome.WON


def test_s18_a_slot_waits_behind_an_older_one_that_waits() -> None:
    verdict = judged(claim(**QUEUE), at(), None, waiting(T - 5_000, Trigger.MANUAL))
    assert verdict.answer.outcome is ClaimOutcome.QUEUED
    assert verdict.saved[-1].run.blocking_slot == T - 5_000
    early = judged(claim(**QUEUE), at(T - 500), None, waiting(T - 5_000, Trigger.MANUAL))
    assert (early.answer.outcome, early.saved) == (ClaimOutcome.EARLY, ())


def test_s18_with_skip_what_waits_is_not_in_the_way() -> None:
    verdict = judged(claim(), at(), None, waiting(T - 5_000, Trigger.CATCH_UP))
    assert verdict.answer.outcome is ClaimOutcome.WON


def test_s18_cancel_asks_what_runs_to_stop_and_waits() -> None:
    verdict = judged(claim(**CANCEL), at(), None, won(slot=T - 5_000))
    assert verdict.answer.outcome is ClaimOutcome.QUEUED
    assert states(verdict) == [(-5, RunState.CLAIMED, ""), (0, RunState.DUE, "")]
    assert verdict.saved[0].run.cancel is CancelReason.SUPERSEDED


@pytest.mark.parametrize("may_run", [True, False])
def test_s18_where_the_cancel_ends_the_other_at_once_nothing_is_in_the_way(may_run: bool) -> None:
    """Without room the slot is left due for others (S13)."""
    free = released(won(slot=T - 5_000), at(T - 4_000), Reason.HANDED_OVER)
    verdict = judged(claim(**CANCEL, may_run=may_run), at(), None, free)
    ended_run, own = verdict.saved
    assert (ended_run.run.state, ended_run.run.reason) == (RunState.FAILED, Reason.SUPERSEDED)
    assert own.run.state is (RunState.CLAIMED if may_run else RunState.DUE)
    assert (own.run.blocking_slot, verdict.settled) == (0, T)
    assert own.is_news is not may_run


def test_s18_a_claim_before_its_slot_cancels_nothing() -> None:
    verdict = judged(claim(**CANCEL), at(T - 500), None, won(slot=T - 5_000))
    assert (verdict.answer.outcome, verdict.saved) == (ClaimOutcome.EARLY, ())


def test_s19_nothing_is_abandoned_beside_a_run_in_progress() -> None:
    long = {"window_ms": 1_000, "overlap": OverlapPolicy.ALLOW}
    free = released(won(at(T - 20_000), slot=T - 20_000, **long), at(T - 19_000), "handed_over")
    running = won(at(T - 15_000), slot=T - 15_000, **long)
    verdict = judged(claim(), at(), None, free, running)
    assert states(verdict) == [(0, RunState.SKIPPED, Reason.OVERLAP)]
    gone = released(running, at(T - 14_000), "handed_over")
    verdict = judged(claim(), at(), None, free, gone)
    assert states(verdict)[:2] == [
        (-20, RunState.FAILED, "abandoned"),
        (-15, RunState.FAILED, "abandoned"),
    ]
    assert verdict.answer.outcome is ClaimOutcome.WON


# --- Runs that wait ----------------------------------------------------------------------


def test_s18_a_due_run_is_claimed_by_its_first_attempt() -> None:
    verdict = judged(claim(), at(T + 60_000), waiting(T), settled=T + 50_000)
    assert verdict.answer.outcome is ClaimOutcome.WON
    run = verdict.saved[-1].run
    assert (run.attempt, attempt_of(run).cause) == (1, AttemptCause.CLAIM)


def test_i7_a_due_run_is_not_claimed_before_its_slot() -> None:
    assert judged(claim(), at(T - 1_001), waiting(T)).answer.outcome is ClaimOutcome.EARLY
    assert judged(claim(), at(T - 1_000), waiting(T)).answer.outcome is ClaimOutcome.WON


@pytest.mark.parametrize(
    ("other", "outcome"),
    [
        (won(slot=T - 5_000), ClaimOutcome.QUEUED),
        (won(at(T + 5_000), slot=T + 5_000), ClaimOutcome.QUEUED),
        (waiting(T - 5_000), ClaimOutcome.QUEUED),
        (waiting(T + 5_000), ClaimOutcome.WON),
    ],
)
def test_s18_a_due_run_goes_after_what_was_begun_and_after_what_waits_longer(
    other: Run, outcome: ClaimOutcome
) -> None:
    assert judged(claim(), at(T + 6_000), waiting(T), other).answer.outcome is outcome
    allowed = judged(claim(overlap=OverlapPolicy.ALLOW), at(T + 6_000), waiting(T), other)
    assert allowed.answer.outcome is ClaimOutcome.WON


def test_s13_a_due_run_is_not_claimed_without_room() -> None:
    verdict = judged(claim(may_run=False), at(), waiting(T))
    assert (verdict.answer.outcome, verdict.saved) == (ClaimOutcome.UNCHANGED, ())


@pytest.mark.parametrize("may_run", [True, False])
def test_s19_a_due_run_that_nobody_wanted_is_abandoned_unless_something_is_in_its_way(
    may_run: bool,
) -> None:
    due, now = waiting(T, window_ms=1_000), at(T + 1_001)
    blocked = judged(claim(may_run=may_run), now, due, won(slot=T - 5_000))
    assert (blocked.answer.outcome, blocked.saved) == (ClaimOutcome.QUEUED, ())
    verdict = judged(claim(may_run=may_run), now, due)
    assert verdict.answer.outcome is ClaimOutcome.LOST
    assert states(verdict) == [(0, RunState.SKIPPED, Reason.ABANDONED)]


def test_s18_the_claim_of_a_due_run_ends_what_is_over_for_good() -> None:
    dead = won(at(T - 50_000), slot=T - 50_000, max_attempts=1)
    verdict = judged(claim(), at(), waiting(T), dead)
    assert verdict.answer.outcome is ClaimOutcome.WON
    assert states(verdict)[0] == (-50, RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)


@pytest.mark.parametrize("freed_too", [False, True])
def test_i4_a_takeover_goes_after_what_is_in_progress_and_after_what_is_older(
    freed_too: bool,
) -> None:
    run, other = won(), won(at(T + 100), slot=T - 5_000 if freed_too else T + 100)
    free = released(run, at(T + 200), Reason.HANDED_OVER)
    if freed_too:
        other = released(other, at(T + 200), Reason.HANDED_OVER)
    verdict = judged(takeover(free), at(T + 300), free, other)
    assert verdict.answer.outcome is ClaimOutcome.QUEUED
    newer = released(won(at(T + 100), slot=T + 100), at(T + 200), Reason.HANDED_OVER)
    assert judged(takeover(free), at(T + 300), free, newer).answer.outcome is ClaimOutcome.WON
    due = waiting(T - 5_000, Trigger.MANUAL)
    assert judged(takeover(free), at(T + 300), free, due).answer.outcome is ClaimOutcome.WON


# --- Pauses ------------------------------------------------------------------------------


def test_s29_a_paused_jobs_slots_are_not_claimed_and_its_rows_are() -> None:
    paused = replace(JOB, paused_at=T - 5_000)
    assert judged(claim(), at(), job=paused).answer.outcome is ClaimOutcome.PAUSED
    assert judged(claim(), at(T - 1_001), job=paused).answer.outcome is ClaimOutcome.EARLY
    assert judged(claim(), at(T + 60_000), job=paused).answer.outcome is ClaimOutcome.PAUSED
    run = won()
    assert judged(claim(), at(), run, job=paused).answer.outcome is ClaimOutcome.WON, "its own"
    due = waiting(T, Trigger.MANUAL)
    assert judged(claim(), at(), due, job=paused).answer.outcome is ClaimOutcome.WON


# --- Retries -----------------------------------------------------------------------------


def tried(outcome: Outcome, run: Run, retry_in_ms: int | None = 3_000) -> Run:
    wish = Completion("sync", run.slot, run.token, outcome, retry_in_ms)
    verdict = judge_completion(wish, at(T + 900), run, None)
    assert verdict.saved is not None
    return verdict.saved.run


def test_s22_a_failed_attempt_with_retries_left_is_retried() -> None:
    run = tried(RAISED, won(retries=1))
    assert (run.state, run.reason, run.failed, run.ended_at) == (RunState.RETRYING, "", 1, None)
    assert (run.retry_at, run.retry_delay_ms, run.lease) == (T + 3_900, 3_000, None)
    assert attempt_of(run).state is RunState.FAILED
    assert view(run, at(T + 1_000)).wait_ms == 2_900
    early = judged(takeover(run), at(T + 3_899), run)
    assert (early.answer.outcome, early.saved) == (ClaimOutcome.EARLY, ())
    verdict = judged(takeover(run), at(T + 3_900), run)
    assert verdict.answer.outcome is ClaimOutcome.WON
    again = verdict.saved[-1].run
    assert (attempt_of(again).cause, again.failed, again.lost) == (AttemptCause.RETRY, 1, 0)
    assert verdict.saved[-1].attempts == (again.current,), "the failed one is closed already"


@pytest.mark.parametrize(
    ("outcome", "retry_in_ms", "retries"),
    [
        (RAISED, None, 1),
        (RAISED, 0, 0),
        (Outcome(failure=Failure("E", permanent=True)), 0, 1),
        (Outcome(stopped=CancelReason.REQUESTED), 0, 1),
        (RETURNED, 0, 1),
    ],
)
def test_s22_what_is_not_to_be_retried_is_final(
    outcome: Outcome, retry_in_ms: int | None, retries: int
) -> None:
    assert tried(outcome, won(retries=retries), retry_in_ms).state.final


def test_s19_the_thousandth_attempt_is_not_retried() -> None:
    run = won(retries=1)
    last = replace(run, current=replace(attempt_of(run), attempt=1_000))
    assert tried(RAISED, last).state is RunState.FAILED


def test_s21_a_timeout_is_retried() -> None:
    run = tried(Outcome(stopped=CancelReason.TIMEOUT), won(retries=1))
    assert (run.state, attempt_of(run).reason) == (RunState.RETRYING, Reason.TIMEOUT)
    timed_out = renewed(won(retries=1), at(), cancel=CancelReason.TIMEOUT)
    run = tried(RAISED, timed_out)
    assert (run.state, run.cancel, run.cancelled_at) == (RunState.RETRYING, None, 0)


def test_s21_a_timed_out_attempt_that_lapsed_is_retried_and_counts_as_failed() -> None:
    run = renewed(won(retries=1, max_attempts=1), at(), cancel=CancelReason.TIMEOUT)
    verdict = judged(takeover(run, retries=1), at(T + LEASE), run)
    assert verdict.answer.outcome is ClaimOutcome.WON
    again, (closed, _) = verdict.saved[-1].run, verdict.saved[-1].attempts
    assert (again.failed, again.lost, attempt_of(again).cause) == (1, 0, AttemptCause.RETRY)
    assert (closed.state, closed.reason) == (RunState.FAILED, Reason.TIMEOUT)


@pytest.mark.parametrize("retries", [0, 1])
def test_s21_a_timed_out_attempt_that_is_released_failed(retries: int) -> None:
    run = renewed(won(retries=retries), at(), cancel=CancelReason.TIMEOUT)
    free = released(run, at(T + 100), Reason.HANDED_OVER)
    assert (attempt_of(free).state, attempt_of(free).reason) == (RunState.FAILED, Reason.TIMEOUT)
    assert free.state is (RunState.INTERRUPTED if retries else RunState.FAILED)
    if retries:
        verdict = judged(takeover(free), at(T + 200), free)
        again = verdict.saved[-1].run
        assert (again.failed, again.lost) == (1, 0)


def test_s17_a_failed_attempt_that_is_retried_is_held_by_nobody() -> None:
    run = tried(RAISED, won(retries=1))
    assert judge_renewal(renewal(), at(T + 1_000), run).answer.outcome is TokenOutcome.FENCED
    release = Release("sync", T, "t1", "A", Reason.HANDED_OVER)
    assert judge_release(release, at(T + 1_000), run).answer.outcome is TokenOutcome.FENCED
    assert completed(run, RAISED).answer.outcome is TokenOutcome.RECORDED
    assert completed(run, RETURNED).answer.outcome is TokenOutcome.ALREADY_COMPLETED


def test_s01_a_retry_time_from_before_a_step_back_is_over_for_two_witnesses() -> None:
    run, back = tried(RAISED, won(retries=1)), T - 3_600_000
    assert view(run, at(back)).wait_ms == 0
    doubted = judged(takeover(run, vouched=False), at(back, steady=False), run)
    assert doubted.answer.outcome is ClaimOutcome.EARLY
    sure = judged(takeover(run, expected_at=back), at(back, steady=False), run)
    assert sure.answer.outcome is ClaimOutcome.WON


def test_s19_a_retry_that_nobody_wanted_is_abandoned() -> None:
    run = tried(RAISED, won(retries=1, window_ms=1_000))
    verdict = judged(takeover(run), at(T + 3_900 + 1_001), run)
    assert states(verdict) == [(0, RunState.FAILED, Reason.ABANDONED)]
    assert verdict.saved[0].attempts == (), "its failed attempt stays as it was"


def test_s21a_a_retry_that_is_superseded_ends_and_its_failed_attempt_stays_as_it_was() -> None:
    run = tried(RAISED, won(slot=T - 5_000, retries=1))
    verdict = judged(claim(**CANCEL), at(T + 900), None, run)
    gone = verdict.saved[0]
    assert (gone.run.state, gone.run.reason) == (RunState.FAILED, Reason.SUPERSEDED)
    assert (attempt_of(gone.run).reason, gone.attempts) == ("", ())
    assert gone.ends_a_run


def test_s21a_a_request_to_stop_takes_the_place_of_a_timeout_that_would_be_retried() -> None:
    timed_out = renewed(won(retries=1), at(), cancel=CancelReason.TIMEOUT)
    asked = asked_to_stop(timed_out, at(T + 100), CancelReason.REQUESTED, witnessed=True).run
    assert (asked.cancel, asked.cancelled_at) == (CancelReason.REQUESTED, T)
    timed_out = renewed(won(retries=0), at(), cancel=CancelReason.TIMEOUT)
    asked = asked_to_stop(timed_out, at(T + 100), CancelReason.REQUESTED, witnessed=True).run
    assert asked.cancel is CancelReason.TIMEOUT


def test_what_others_should_look_at_is_news() -> None:
    run = won()
    assert not Saved(run).is_news
    assert Saved(released(run, at(), Reason.HANDED_OVER)).is_news
    assert Saved(replace(run, cancel=CancelReason.REQUESTED)).is_news
    assert not Saved(replace(run, cancel=CancelReason.TIMEOUT)).is_news
    assert not Saved(ended(replace(run, cancel=CancelReason.REQUESTED), RETURNED)).is_news
    assert Saved(waiting(T)).is_news
    assert not Saved(waiting(T, blocking_slot=T - 5_000)).is_news
    assert not Saved(replace(waiting(T), state=RunState.SKIPPED)).ends_a_run


# --- Takeover ----------------------------------------------------------------------------


def test_s19_a_lapsed_lease_is_taken_over_with_the_next_attempt() -> None:
    run = renewed(won(), at(T + 1_000), started_at=T + 20)
    over_at = T + 1_000 + LEASE
    early = judged(takeover(run), at(over_at - 1), run)
    assert (early.answer.outcome, early.saved) == (ClaimOutcome.LOST, ())
    verdict = judged(takeover(run), at(over_at), run)
    assert verdict.answer.outcome is ClaimOutcome.WON
    (saved,) = verdict.saved
    first, second = saved.attempts
    assert (first.attempt, first.state, first.reason) == (1, "interrupted", "runner_lost")
    assert first.ended_at == over_at
    assert (second.attempt, second.token, second.cause) == (2, "t2", AttemptCause.TAKEOVER)
    assert (saved.run.lost, saved.run.token) == (1, "t2")
    assert second.fence > first.fence
    later = judged(takeover(run), at(over_at + 700), run).saved[0].attempts[0]
    assert later.ended_at == over_at, "whenever that is found"


def test_s19_a_takeover_that_saw_another_attempt_is_lost() -> None:
    run = won()
    lapsed = at(T + 40_000)
    for seen in ({"seen_attempt": 2}, {"seen_token": "other"}, {"seen_attempt": 0}):
        assert judged(takeover(run, **seen), lapsed, run).answer.outcome is ClaimOutcome.LOST
    final = ended(run, RETURNED)
    assert judged(takeover(run), lapsed, final).answer.outcome is ClaimOutcome.LOST


def test_s19_a_takeover_of_a_run_that_was_pruned_meanwhile_is_late() -> None:
    assert judged(takeover(won()), at(T + 1_000)).answer.outcome is ClaimOutcome.LATE


@pytest.mark.parametrize(
    ("vouched", "off", "outcome"),
    [
        (True, 0, ClaimOutcome.WON),
        (True, 5_000, ClaimOutcome.WON),
        (True, -5_000, ClaimOutcome.WON),
        (True, 5_001, ClaimOutcome.CLOCK_STEP),
        (True, -5_001, ClaimOutcome.CLOCK_STEP),
        (False, 0, ClaimOutcome.LOST),
    ],
)
def test_s19_a_lease_is_over_only_where_two_witnesses_agree(
    vouched: bool, off: int, outcome: ClaimOutcome
) -> None:
    run, now = won(), at(T + LEASE, steady=False)
    wish = takeover(run, vouched=vouched, expected_at=now.at + off)
    assert judged(wish, now, run).answer.outcome is outcome
    assert judged(wish, replace(now, steady=True), run).answer.outcome is ClaimOutcome.WON


def test_s19_a_step_is_not_blamed_where_the_lease_runs_by_either_clock() -> None:
    run, now = won(), at(T + LEASE - 1, steady=False)
    wish = takeover(run, expected_at=now.at + 99_000)
    assert judged(wish, now, run).answer.outcome is ClaimOutcome.LOST


def test_s1_a_new_boot_ends_all_leases() -> None:
    run = won()
    rebooted = at(T + 5_000, boot="next boot", lease_at=3, steady=False)
    verdict = judged(takeover(run, vouched=False), rebooted, run)
    assert verdict.answer.outcome is ClaimOutcome.WON
    assert attempt_of(verdict.saved[0].run).attempt == 2
    assert verdict.saved[0].attempts[0].ended_at == T + 5_000, "not after the next began"


def test_s1_a_lease_from_before_a_step_back_is_over_for_two_witnesses() -> None:
    run = won(at(T + 3_600_000), slot=T + 3_600_000)
    now = at(T + 60_000, steady=False)
    assert view(run, now).run.state is RunState.INTERRUPTED
    for vouched, outcome in ((True, ClaimOutcome.WON), (False, ClaimOutcome.LOST)):
        wish = takeover(run, vouched=vouched, expected_at=now.at)
        assert judged(wish, now, run).answer.outcome is outcome


@pytest.mark.parametrize(
    ("reason", "lost"),
    [(Reason.HANDED_OVER, 0), (Reason.NOT_ACCEPTED, 0), (Reason.RUNNER_LOST, 1)],
)
def test_s19_a_freed_run_needs_no_second_witness_and_counts_only_where_its_runner_died(
    reason: str, lost: int
) -> None:
    run = released(won(), at(T + 100), reason)
    now = at(T + 200, steady=False)
    verdict = judged(takeover(run, vouched=False, expected_at=0), now, run)
    assert verdict.answer.outcome is ClaimOutcome.WON
    (saved,) = verdict.saved
    assert (saved.run.lost, saved.run.freed, saved.run.reason) == (lost, "", "")
    assert [attempt.attempt for attempt in saved.attempts] == [2], "the first was closed before"


def test_s19_a_freed_run_stays_free_when_the_clock_steps_back() -> None:
    run = released(won(), at(T + 100), Reason.RUNNER_LOST)
    stepped = at(T - 10_000, steady=False)
    assert view(run, stepped).takeable
    assert judged(takeover(run), stepped, run).answer.outcome is ClaimOutcome.WON


def test_s19_a_takeover_without_room_changes_nothing() -> None:
    run = won()
    verdict = judged(takeover(run, may_run=False), at(T + LEASE), run)
    assert (verdict.answer.outcome, verdict.saved) == (ClaimOutcome.UNCHANGED, ())


@pytest.mark.parametrize("may_run", [True, False])
def test_s19_the_first_look_that_finds_the_last_attempt_over_ends_the_run(may_run: bool) -> None:
    run = replace(won(), lost=2)
    verdict = judged(takeover(run, may_run=may_run), at(T + LEASE), run)
    assert verdict.answer.outcome is ClaimOutcome.LOST
    (saved,) = verdict.saved
    assert (saved.run.state, saved.run.reason) == (RunState.FAILED, "attempts_exhausted")
    assert (saved.run.lost, saved.run.lease, saved.run.ended_at) == (3, None, T + LEASE)
    assert saved.attempts[0].state is RunState.INTERRUPTED


def test_s19_the_release_that_ends_the_last_attempt_ends_the_run() -> None:
    run = released(replace(won(), lost=2), at(T + 100), Reason.RUNNER_LOST)
    assert (run.state, run.reason, run.freed) == (RunState.FAILED, "attempts_exhausted", "")
    kept = released(replace(won(), lost=2), at(T + 100), Reason.HANDED_OVER)
    assert (kept.state, kept.freed) == (RunState.INTERRUPTED, "handed_over")


def test_s19_no_run_has_more_than_a_thousand_attempts() -> None:
    run = won()
    for number, state in ((999, RunState.INTERRUPTED), (1_000, RunState.FAILED)):
        many = replace(run, current=replace(attempt_of(run), attempt=number))
        assert released(many, at(), Reason.NOT_ACCEPTED).state is state


def test_s19_a_run_nobody_claimed_for_its_window_is_abandoned() -> None:
    run = won()
    window = 86_400_000
    for over_for, reason in ((window, ""), (window + 1, "abandoned")):
        verdict = judged(takeover(run), at(T + LEASE + over_for), run)
        assert verdict.saved[0].run.reason == reason
    freed = released(run, at(T + 100), Reason.HANDED_OVER)
    verdict = judged(takeover(freed), at(T + 101 + window), freed)
    assert verdict.saved[0].run.reason == "abandoned"
    assert verdict.answer.outcome is ClaimOutcome.LOST


# --- Renewals ----------------------------------------------------------------------------


def test_s15_a_renewal_moves_the_end_of_the_lease() -> None:
    run = renewed(won(), at(T + 5_000))
    assert run.lease == Lease(T + 5_000 + LEASE, LEASE, T + 5_000 + LEASE, "boot")
    assert run.state is RunState.CLAIMED


def test_s15_a_renewal_for_less_time_leaves_the_lease_as_it_was() -> None:
    run = renewed(won(), at(T + 1_000), lease_ms=3_000)
    assert run.lease == Lease(T + LEASE, LEASE, T + LEASE, "boot")


def test_s15_a_lease_shows_its_end_by_the_wall_clock_of_its_last_renewal() -> None:
    run = renewed(won(), at(T + 1_000 + 60_000, lease_at=T + 1_000), lease_ms=3_000)
    assert run.lease == Lease(T + LEASE, LEASE, T + LEASE + 60_000, "boot")


def test_s1_a_renewal_sets_a_lease_anew_that_was_written_before_a_step_back() -> None:
    run = won(at(T + 3_600_000), slot=T + 3_600_000)
    mended = renewed(run, at(T))
    assert mended.lease is not None
    assert mended.lease.until == T + LEASE


def test_s1_a_renewal_after_a_reboot_is_counted_by_the_new_boots_clock() -> None:
    run = renewed(won(), at(T + 5_000, boot="next boot", lease_at=70))
    assert run.lease == Lease(70 + LEASE, LEASE, T + 5_000 + LEASE, "next boot")


def test_s17_a_late_renewal_mends_a_lapsed_lease() -> None:
    run = renewed(won(), at(T + 99_000))
    assert lease_left(run, at(T + 99_000)) == LEASE


def test_s30_the_first_renewal_that_names_a_start_makes_the_run_running() -> None:
    run = renewed(won(), at(T + 5_000), started_at=T + 80)
    attempt = attempt_of(run)
    assert (run.state, attempt.state, attempt.started_at) == ("running", "running", T + 80)
    again = renewed(run, at(T + 6_000), started_at=T + 900)
    assert attempt_of(again).started_at == T + 80


def test_i7_a_start_before_the_slot_is_recorded_as_the_slot() -> None:
    run = renewed(won(), at(T + 5_000), started_at=T - 30)
    assert attempt_of(run).started_at == T


def test_s17_a_renewal_that_changes_no_attempt_writes_none() -> None:
    verdict = judge_renewal(renewal(), at(T + 1), won())
    assert verdict.saved is not None
    assert verdict.saved.attempts == ()


@pytest.mark.parametrize(
    "changes", [{"token": "t2"}, {"incarnation": "B"}, {"token": "t2", "adopt": True}]
)
def test_s17_a_renewal_by_another_token_or_process_is_fenced(changes: dict[str, Any]) -> None:
    run = won()
    verdict = judge_renewal(renewal(**changes), at(T + 1), run)
    assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.FENCED, None)
    assert verdict.answer.run is not None
    assert verdict.answer.run.run == run


def test_s17_what_has_ended_or_was_freed_is_renewed_by_nobody() -> None:
    for run in (ended(won(), RETURNED), released(won(), at(), Reason.HANDED_OVER)):
        for adopt in (True, False):
            verdict = judge_renewal(renewal(adopt=adopt), at(T + 1_000), run)
            assert verdict.answer.outcome is TokenOutcome.FENCED


def test_s17_a_slot_without_a_row_knows_no_token() -> None:
    assert judge_renewal(renewal(), at(), None).answer.outcome is TokenOutcome.UNKNOWN_TOKEN
    assert completed(None, RETURNED).answer.outcome is TokenOutcome.UNKNOWN_TOKEN
    release = Release("sync", T, "t1", "A", Reason.HANDED_OVER)
    assert judge_release(release, at(), None).answer.outcome is TokenOutcome.UNKNOWN_TOKEN


def test_s17_a_skipped_slot_has_no_attempt_to_act_on() -> None:
    skipped = judged(claim(), at(), None, won(slot=T - 5_000)).saved[0].run
    release = Release("sync", T, "", "A", Reason.HANDED_OVER)
    assert judge_release(release, at(), skipped).answer.outcome is TokenOutcome.UNKNOWN_TOKEN
    assert completed(skipped, RETURNED).answer.outcome is TokenOutcome.UNKNOWN_TOKEN


def test_s26_an_adoption_changes_the_holder_and_nothing_else() -> None:
    run = renewed(won(), at(T + 1_000), started_at=T + 10)
    adopted = renewed(run, at(T + 2_000), adopt=True, instance_id="b", incarnation="B")
    before, after = attempt_of(run), attempt_of(adopted)
    assert after == replace(before, instance_id="b", incarnation="B")
    assert adopted.token == run.token
    old = judge_renewal(renewal(), at(T + 3_000), adopted)
    assert old.answer.outcome is TokenOutcome.FENCED
    release = Release("sync", T, "t1", "A", Reason.RUNNER_LOST)
    assert judge_release(release, at(), adopted).answer.outcome is TokenOutcome.FENCED


# --- Cancelling --------------------------------------------------------------------------


def cancelled(now: int = T + 1_000) -> Run:
    return renewed(won(), at(now), cancel=CancelReason.TIMEOUT)


def test_s21a_the_first_cancel_is_kept_and_its_grace_runs_from_it() -> None:
    run = cancelled()
    assert (run.cancel, run.cancelled_at) == (CancelReason.TIMEOUT, T + 1_000)
    again = renewed(run, at(T + 5_000), cancel=CancelReason.TIMEOUT)
    assert again.cancelled_at == T + 1_000
    last = renewed(again, at(T + 6_000))
    verdict = judge_renewal(renewal(), at(T + 6_001), last)
    assert verdict.answer.outcome is TokenOutcome.FENCED


def test_s21a_a_repeated_claim_does_not_renew_past_the_grace() -> None:
    run = cancelled()
    assert judged(claim(), at(T + 6_000), run).answer.outcome is ClaimOutcome.WON
    assert judged(claim(), at(T + 6_001), run).answer.outcome is ClaimOutcome.LOST


def test_s21_a_timed_out_run_is_failed_whatever_its_handler_says() -> None:
    verdict = completed(cancelled(), RETURNED)
    assert verdict.answer.outcome is TokenOutcome.ALREADY_COMPLETED
    assert verdict.saved is not None
    run = verdict.saved.run
    assert (run.state, run.reason, run.failed) == (RunState.FAILED, "timeout", 1)
    assert attempt_of(run).result == ""


def test_s21_a_handler_that_obeys_a_timeout_is_recorded() -> None:
    for run in (cancelled(), won()):
        verdict = completed(run, Outcome(stopped=CancelReason.TIMEOUT))
        assert verdict.answer.outcome is TokenOutcome.RECORDED
        assert verdict.saved is not None
        assert (verdict.saved.run.state, verdict.saved.run.reason) == ("failed", "timeout")


def test_s21a_a_cancelled_run_is_never_started_again() -> None:
    run = cancelled()
    verdict = judged(takeover(run), at(T + 99_000), run)
    assert verdict.answer.outcome is ClaimOutcome.LOST
    (saved,) = verdict.saved
    assert (saved.run.state, saved.run.reason) == (RunState.FAILED, "timeout")
    assert (saved.attempts[0].state, saved.attempts[0].reason) == ("failed", "timeout")
    freed = released(run, at(T + 2_000), Reason.RUNNER_LOST)
    assert (freed.state, freed.reason) == (RunState.FAILED, "timeout")


def test_s18_a_timed_out_run_blocks_until_its_lease_is_over() -> None:
    run = replace(cancelled(), slot=T - 5_000)
    over_at = T + 1_000 + LEASE
    wish = claim(slot=over_at, previous_slot=None)
    assert judged(wish, at(over_at - 1), None, run).answer.outcome is ClaimOutcome.EARLY
    assert judged(wish, at(over_at), None, run).answer.outcome is ClaimOutcome.WON


@pytest.mark.parametrize("reason", [CancelReason.LEASE_LOST, CancelReason.FENCED])
def test_s21a_stopping_for_a_lost_lease_changes_nothing(reason: CancelReason) -> None:
    verdict = completed(won(), Outcome(stopped=reason))
    assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.FENCED, None)


def test_s23_stopping_for_a_shutdown_hands_the_run_over() -> None:
    verdict = completed(won(), Outcome(stopped=CancelReason.SHUTDOWN))
    assert verdict.answer.outcome is TokenOutcome.RECORDED
    assert verdict.saved is not None
    run = verdict.saved.run
    assert (run.state, run.reason, run.freed) == ("interrupted", "handed_over", "handed_over")
    assert attempt_of(run).ended_at == T + 900
    repeat = completed(run, Outcome(stopped=CancelReason.SHUTDOWN))
    assert (repeat.answer.outcome, repeat.saved) == (TokenOutcome.RECORDED, None)


def test_s21a_a_shutdown_after_a_timeout_does_not_save_the_run() -> None:
    run = ended(cancelled(), Outcome(stopped=CancelReason.SHUTDOWN))
    assert (run.state, run.reason) == (RunState.FAILED, "timeout")


# --- Results -----------------------------------------------------------------------------


def test_s17_a_result_ends_the_run() -> None:
    verdict = completed(won(), RETURNED)
    assert verdict.answer.outcome is TokenOutcome.RECORDED
    assert verdict.saved is not None
    run, attempt = verdict.saved.run, attempt_of(verdict.saved.run)
    assert (run.state, run.reason, run.lease, run.ended_at) == ("success", "", None, T + 900)
    assert (attempt.result, attempt.failure) == ("42", None)
    assert (attempt.started_at, attempt.ended_at) == (T + 200, T + 900)
    assert verdict.saved.attempts == (attempt,)


def test_s22_a_failure_is_final_without_retries() -> None:
    run = ended(won(), RAISED)
    assert (run.state, run.reason, run.failed) == (RunState.FAILED, "", 1)
    assert attempt_of(run).failure == RAISED.failure


def test_s30_a_recorded_start_stays_and_a_reckoned_one_is_not_before_the_claim() -> None:
    started = renewed(won(), at(T + 500), started_at=T + 30)
    assert attempt_of(ended(started, RETURNED)).started_at == T + 30
    slow = ended(won(at(T + 600)), RETURNED, at(T + 900))
    assert attempt_of(slow).started_at == T + 600


def test_s17_a_late_result_counts_until_another_attempt_is_claimed() -> None:
    lapsed = at(T + 99_000)
    assert ended(won(), RETURNED, lapsed).state is RunState.SUCCESS
    freed = released(won(), at(T + 50), Reason.RUNNER_LOST)
    late = completed(freed, RETURNED, lapsed)
    assert late.answer.outcome is TokenOutcome.RECORDED
    assert late.saved is not None
    assert (late.saved.run.state, late.saved.run.freed) == (RunState.SUCCESS, "")


def test_s17_a_stop_of_a_freed_attempt_adds_nothing() -> None:
    freed = released(won(), at(T + 50), Reason.RUNNER_LOST)
    verdict = completed(freed, Outcome(stopped=CancelReason.TIMEOUT))
    assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.ALREADY_COMPLETED, None)


@pytest.mark.parametrize("outcome", [RETURNED, RAISED, Outcome(stopped=CancelReason.TIMEOUT)])
def test_s17_the_repeat_of_a_recorded_result_is_recorded(outcome: Outcome) -> None:
    run = ended(won(), outcome)
    repeat = completed(run, replace(outcome, elapsed_ms=9_999), at(T + 9_000))
    assert (repeat.answer.outcome, repeat.saved) == (TokenOutcome.RECORDED, None)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RETURNED, RAISED),
        (RAISED, RETURNED),
        (RETURNED, Outcome(result="43")),
        (RAISED, Outcome(failure=Failure("KeyError"))),
        (RETURNED, Outcome(stopped=CancelReason.TIMEOUT)),
        (RETURNED, Outcome(stopped=CancelReason.SHUTDOWN)),
    ],
)
def test_i3_a_final_state_never_changes(first: Outcome, second: Outcome) -> None:
    run = ended(won(), first)
    verdict = completed(run, second, at(T + 9_000))
    assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.ALREADY_COMPLETED, None)


def test_s17_the_result_of_a_past_attempt_is_fenced_unless_it_repeats_what_was_recorded() -> None:
    first = ended(won(), Outcome(stopped=CancelReason.SHUTDOWN))
    past = attempt_of(first)
    second = judged(takeover(first), at(T + 2_000), first).saved[0].run
    handed_over = Outcome(stopped=CancelReason.SHUTDOWN)
    for outcome, known, word in (
        (handed_over, past, TokenOutcome.RECORDED),
        (RETURNED, past, TokenOutcome.FENCED),
        (RETURNED, None, TokenOutcome.FENCED),
    ):
        verdict = completed(second, outcome, token="t1", past=known)
        assert (verdict.answer.outcome, verdict.saved) == (word, None)


# --- Releases ----------------------------------------------------------------------------


def test_s23_a_release_ends_the_lease_at_once() -> None:
    run = released(won(), at(T + 100), Reason.HANDED_OVER)
    attempt = attempt_of(run)
    assert (run.state, run.freed) == (RunState.INTERRUPTED, "handed_over")
    assert (attempt.state, attempt.reason, attempt.ended_at) == (
        "interrupted",
        "handed_over",
        T + 100,
    )
    assert view(run, at(T + 100)).takeable


def test_s23_a_repeated_release_is_answered_as_the_first_and_changes_nothing() -> None:
    run = released(won(), at(T + 100), Reason.HANDED_OVER)
    verdict = judge_release(Release("sync", T, "t1", "A", Reason.RUNNER_LOST), at(T + 200), run)
    assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.RELEASED, None)


def test_s17_a_release_by_another_token_or_process_or_after_the_end_is_fenced() -> None:
    for release, run in (
        (Release("sync", T, "t2", "A", Reason.RUNNER_LOST), won()),
        (Release("sync", T, "t1", "B", Reason.RUNNER_LOST), won()),
        (Release("sync", T, "t1", "A", Reason.RUNNER_LOST), ended(won(), RETURNED)),
    ):
        verdict = judge_release(release, at(T + 1), run)
        assert (verdict.answer.outcome, verdict.saved) == (TokenOutcome.FENCED, None)


# --- Reading -----------------------------------------------------------------------------


def test_s19_expiry_is_read_from_the_lease_and_shown_in_the_attempt_too() -> None:
    run = won()
    alive, over = at(T + LEASE - 1), at(T + LEASE)
    assert view(run, alive, [attempt_of(run)]).attempts == (attempt_of(run),)
    assert view(run, alive).run.state is RunState.CLAIMED
    earlier = replace(attempt_of(run), attempt=0, reason="earlier")
    seen = view(run, over, [earlier, attempt_of(run)])
    assert (seen.run.state, seen.run.reason) == (RunState.INTERRUPTED, "runner_lost")
    assert [attempt.reason for attempt in seen.attempts] == ["earlier", "runner_lost"]
    assert (seen.lease_left_ms, seen.takeable) == (0, True)


def test_a_final_run_has_no_lease_left() -> None:
    assert lease_left(replace(won(), state=RunState.FAILED), at()) is None
    assert lease_left(ended(won(), RETURNED), at()) is None


def test_s1_leases_of_another_boot_or_too_far_ahead_are_over() -> None:
    run = won()
    assert lease_left(run, at(T, boot="other")) == 0
    assert lease_left(run, at(T - 5_000)) == LEASE + 5_000
    assert lease_left(run, at(T - 5_001)) == 0


def test_s30_at_most_the_newest_hundred_attempts_are_shown() -> None:
    run = won()
    for number, first in ((1, 1), (100, 1), (101, 2), (1_000, 901)):
        many = replace(run, current=replace(attempt_of(run), attempt=number))
        assert first_attempt_shown(many) == first
    assert first_attempt_shown(Run("sync", T, Trigger.SCHEDULE, RunState.SKIPPED)) == 1


def test_s30_stack_traces_are_left_out_of_lists() -> None:
    run = ended(won(), RAISED)
    seen = without_traces(view(run, at(), [attempt_of(run)]))
    for attempt in (attempt_of(seen.run), *seen.attempts):
        assert attempt.failure == Failure("ValueError", "no")
    running = view(won(), at(), [attempt_of(won())])
    assert without_traces(running) == running
    skipped = view(Run("sync", T, Trigger.SCHEDULE, RunState.SKIPPED), at())
    assert without_traces(skipped) == skipped


# --- Missed slots ------------------------------------------------------------------------

SETTLED = T - 100_000


def plan(*slots: int, deadline: int = 10_000, **changes: Any) -> Plan:
    """A plan for slots counted from `SETTLED`."""
    values: dict[str, Any] = {"settled": SETTLED, **changes}
    missed = tuple(MissedSlot(SETTLED + slot, deadline) for slot in slots)
    return Plan("sync", "every 10s", slots=missed, **values)


def rows(verdict: Any) -> list[tuple[int, int]]:
    """(slot counted from `SETTLED`, slots covered) of each row that a plan leaves."""
    for saved in verdict.saved:
        run = saved.run
        assert (run.state, run.reason, run.trigger) == ("skipped", "missed", "schedule")
        assert run.ended_at == T
    return [(saved.run.slot - SETTLED, saved.run.slots_covered) for saved in verdict.saved]


def planned(wish: Plan, *taken: int, now: int = T, floor: int = -1) -> Any:
    job = JobRecord("sync", floor=floor)
    return judge_plan(wish, at(now), job, SETTLED, frozenset(SETTLED + slot for slot in taken))


def test_s20_missed_slots_become_skipped_rows_and_settled_moves_to_the_newest() -> None:
    verdict = planned(plan(10_000, 20_000, 30_000), 20_000)
    assert rows(verdict) == [(10_000, 0), (30_000, 0)]
    answer = verdict.answer
    assert (answer.done, answer.settled, answer.missed) == (True, SETTLED + 30_000, 2)


def test_s20_settled_moves_also_where_every_slot_has_a_row() -> None:
    verdict = planned(plan(10_000, 20_000), 10_000, 20_000)
    assert (rows(verdict), verdict.answer.settled) == ([], SETTLED + 20_000)
    assert verdict.answer.missed == 0


def test_s20_slots_not_yet_missed_by_the_stores_clock_are_dropped() -> None:
    verdict = planned(plan(80_000, 89_999, 90_000, 100_000))
    assert rows(verdict) == [(80_000, 0), (89_999, 0)]
    assert verdict.answer.settled == SETTLED + 89_999
    nothing = planned(plan(90_000, 100_000))
    assert (nothing.saved, nothing.answer.done, nothing.answer.settled) == ((), True, SETTLED)


def test_i6_a_plan_stops_at_the_first_slot_still_in_time() -> None:
    early, late = plan(10_000), plan(20_000, deadline=90_000)
    both = replace(early, slots=early.slots + late.slots + plan(30_000).slots)
    verdict = planned(both)
    assert (rows(verdict), verdict.answer.settled) == ([(10_000, 0)], SETTLED + 10_000)


def test_s20_a_plan_that_saw_an_old_settled_changes_nothing() -> None:
    for settled in (SETTLED + 1, None):
        verdict = judge_plan(plan(10_000), at(), JOB, settled, frozenset())
        assert (verdict.saved, verdict.answer.done) == ((), False)
        assert verdict.answer.settled == settled


def test_s2_what_was_pruned_is_not_planned_again() -> None:
    verdict = planned(plan(10_000, 20_000), floor=SETTLED + 10_000)
    assert (rows(verdict), verdict.answer.settled) == ([(20_000, 0)], SETTLED + 20_000)


def test_s20_past_the_limit_one_row_counts_the_rest() -> None:
    verdict = planned(plan(*range(10_000, 60_000, 10_000), limit=2))
    assert sorted(rows(verdict)) == [(30_000, 3), (40_000, 0), (50_000, 0)]
    assert verdict.answer.missed == 5


ALL, LATEST = CatchUpPolicy.ALL, CatchUpPolicy.LATEST


def caught_up(
    wish: CatchUpPolicy, *ago: int, row: int = 0, before: Iterable[Run] = (), **changes: Any
) -> PlanVerdict:
    """What becomes of slots so many ms before T, of which `row` has a row."""
    missed = tuple(MissedSlot(T - each, 5) for each in ago)
    values: dict[str, Any] = {"window_ms": 100, **changes}
    by = values.pop("missed_by", None)
    wanted = Plan("sync", "every 10s", SETTLED, missed, catch_up=wish, **values)
    return judge_plan(wanted, at(), JobRecord("sync"), SETTLED, {T - row}, before, by)


def due(verdict: PlanVerdict) -> list[int]:
    """What is to be run, in ms before T."""
    return [T - saved.run.slot for saved in verdict.saved if saved.run.waits]


def test_s20_latest_runs_the_newest_missed_slot() -> None:
    verdict = caught_up(LATEST, 40, 30, 20, row=20)
    assert due(verdict) == [30], "the newest without a row"
    assert (verdict.answer.missed, verdict.answer.due) == (1, 1)
    run = next(saved.run for saved in verdict.saved if saved.run.waits)
    assert (run.trigger, run.window_ms) == (Trigger.CATCH_UP, 100)


def test_s20_all_runs_the_newest_within_window_and_limit() -> None:
    ago = range(90, 0, -10)
    verdict = caught_up(ALL, *ago, window_ms=65, limit=4)
    assert due(verdict) == [40, 30, 20, 10]
    assert (verdict.answer.missed, verdict.answer.due) == (5, 4)
    assert due(caught_up(ALL, *ago, window_ms=65)) == [60, 50, 40, 30, 20, 10]
    assert due(caught_up(CatchUpPolicy.NONE, *ago)) == []


def test_s20_the_oldest_above_the_limit_are_missed_after_all() -> None:
    old = [waiting(T - 40, Trigger.CATCH_UP), waiting(T - 30, Trigger.CATCH_UP)]
    verdict = caught_up(ALL, 20, limit=2, before=old)
    assert due(verdict) == [20]
    gone = [saved.run for saved in verdict.saved if saved.run.state.final]
    assert [(run.slot - T, run.reason, run.ended_at) for run in gone] == [(-40, "missed", T)]
    assert (verdict.answer.missed, verdict.answer.due) == (1, 1)
    verdict = caught_up(LATEST, 20, before=[waiting(T - 10, Trigger.CATCH_UP)])
    assert (due(verdict), verdict.answer.missed, verdict.answer.due) == ([], 1, 0)
    assert len(verdict.saved) == 1


def test_s29_while_paused_nothing_is_planned() -> None:
    wish = plan(10_000)
    verdict = judge_plan(wish, at(), replace(JOB, paused_at=T), SETTLED, ())
    assert (verdict.answer.done, verdict.saved) == (False, ())


def test_s29_what_was_missed_by_an_earlier_moment_is_planned_as_of_then() -> None:
    answer = caught_up(ALL, 40, 20, missed_by=T - 25).answer
    assert (answer.settled, answer.due) == (T - 40, 1)


def test_s20_beyond_ten_thousand_the_number_is_at_least() -> None:
    verdict = planned(plan(*range(10_000, 60_000, 10_000), limit=2, more=True))
    assert (30_000, 10_000) in rows(verdict)
    few = planned(plan(10_000, 20_000, limit=2, more=True))
    assert sorted(rows(few)) == [(10_000, 10_000), (20_000, 0)]
    none = planned(plan(10_000, more=True), 10_000)
    assert rows(none) == []


# --- Definitions and instances -----------------------------------------------------------


def instance(seen_at: int = T, lease_ms: int = LEASE) -> Instance:
    return Instance("a", "A", InstanceState.ACTIVE, seen_at=seen_at, lease_ms=lease_ms)


def test_s28_an_instance_is_live_for_its_lease_and_shown_as_lost_for_a_day_more() -> None:
    seen = instance()
    for now, live, gone in (
        (T + LEASE, True, False),
        (T + LEASE + 1, False, False),
        (T + LEASE + 86_400_000, False, False),
        (T + LEASE + 86_400_001, False, True),
    ):
        assert is_live(seen, at(now)) is live
        assert is_forgotten(seen, at(now)) is gone
        state = InstanceState.ACTIVE if live else InstanceState.LOST
        assert shown_instance(seen, at(now)).state is state


def test_s28_a_hold_is_an_instances_of_a_definition() -> None:
    definition = Definition(JobSpec("sync", EverySchedule(10_000)), "every 10s", 5)
    assert hold_of(instance(), definition) == HeldDefinition(
        "A", "sync", definition.definition_id, "every 10s"
    )


def hold(definition: str, schedule: str = "every 10s", of: str = "A") -> HeldDefinition:
    return HeldDefinition(of, "sync", definition, schedule)


KNOWN = JobRecord("sync", 7, 8, "d1", "every 10s", definition_at=5)
RUNNING = ScheduleRecord(since=1, settled=2)


def test_s28_a_new_job_has_nothing_to_catch_up() -> None:
    verdict = judge_registration(hold("d1"), at(), JOB, None, ())
    assert (verdict.job.definition_id, verdict.job.definition_at) == ("d1", T)
    assert verdict.schedule == ScheduleRecord(since=T, settled=T)


def test_s28_registering_what_is_current_changes_nothing() -> None:
    verdict = judge_registration(hold("d1"), at(), KNOWN, RUNNING, ())
    assert (verdict.job, verdict.schedule) == (KNOWN, RUNNING)


def test_s28_registering_what_a_live_instance_still_holds_changes_nothing() -> None:
    held = (hold("d1", of="B"), hold("d2", of="C"))
    current = replace(KNOWN, definition_id="d2")
    verdict = judge_registration(hold("d1"), at(), current, RUNNING, held)
    assert (verdict.job, verdict.schedule) == (current, RUNNING)


def test_s28_a_new_definition_becomes_current_and_its_new_schedule_begins_now() -> None:
    verdict = judge_registration(hold("d2", "every 5s"), at(), KNOWN, None, (hold("d1"),))
    expected = replace(KNOWN, definition_id="d2", schedule_id="every 5s", definition_at=T)
    assert verdict.job == expected
    assert verdict.schedule == ScheduleRecord(since=T, settled=T)


def test_s28_a_new_definition_of_the_same_schedule_goes_on_where_the_old_one_was() -> None:
    verdict = judge_registration(hold("d2"), at(), KNOWN, RUNNING, ())
    assert (verdict.job.definition_id, verdict.schedule) == ("d2", RUNNING)


def test_s28_a_schedule_that_comes_back_begins_a_new_stretch() -> None:
    current = replace(KNOWN, definition_id="d2", schedule_id="every 5s")
    verdict = judge_registration(hold("d1"), at(), current, RUNNING, (hold("d2", "every 5s"),))
    assert verdict.schedule == ScheduleRecord(since=T, settled=T)
    still = judge_registration(hold("d1"), at(), current, RUNNING, (hold("d3", of="B"),))
    assert still.schedule == RUNNING


def test_s28_a_job_without_a_schedule_has_none_to_keep() -> None:
    assert judge_registration(hold("d1", ""), at(), JOB, None, ()).schedule is None


def test_s28_definitions_differ_where_live_instances_hold_different_ones() -> None:
    assert not definitions_differ([])
    assert not definitions_differ([hold("d1"), hold("d1", of="B")])
    assert definitions_differ([hold("d1"), hold("d2", of="B")])


# --- Pruning -----------------------------------------------------------------------------


def kept(name: str, held_at: int, schedule: str = "every 10s", window: int = 50) -> KeptDefinition:
    return KeptDefinition(name, schedule, window, held_at)


def test_s28_definitions_nobody_has_held_for_long_go() -> None:
    old, held, fresh = kept("old", T - 1_001), kept("held", T - 9_000), kept("d1", T - 1_000)
    job, gone = judge_definitions(KNOWN, [old, held, fresh], {"held"}, at(), 1_000)
    assert (job, gone) == (KNOWN, (old,))


def test_s28_the_definition_held_last_follows_a_current_one_that_goes() -> None:
    gone_one = kept("d1", T - 5_000)
    heirs = [kept("d2", T - 10, "every 5s"), kept("d3", T - 20)]
    job, gone = judge_definitions(KNOWN, [gone_one, *heirs], (), at(), 1_000)
    assert gone == (gone_one,)
    assert (job.definition_id, job.schedule_id) == ("d2", "every 5s")


def test_s28_where_all_definitions_may_go_so_may_the_job() -> None:
    job, gone = judge_definitions(KNOWN, [kept("d1", 0)], (), at(), 1_000)
    assert (job, len(gone)) == (KNOWN, 1)
    assert forgotten(KNOWN) == JobRecord("sync", floor=7, fence=8)


def test_s2_pruning_stays_below_every_window_and_settled_in_use() -> None:
    used = [kept("a", 0, "s1", 1_000), kept("b", 0, "s2", 50)]
    assert prune_bound(at(), [], {}) == T
    assert prune_bound(at(), used, {}) == T - 1_000
    assert prune_bound(at(), used, {"s2": T - 9_000, "unused": 5}) == T - 9_000
