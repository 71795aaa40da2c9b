"""Pause, resume, trigger and cancel as decisions (S29, S21a)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core.control import (
    judge_cancel,
    judge_pause,
    judge_resume,
    judge_trigger,
    schedules_in_use,
)
from anarchon_server.core.limits import MISSED_LISTED_MAX, TRIGGERED_WAITING_MAX
from anarchon_server.core.machine import HeldDefinition, JobRecord, Moment
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Lease,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    Trigger,
)
from anarchon_server.core.store import (
    CancelRun,
    ControlOutcome,
    MissedSlot,
    Passed,
    Pause,
    Plan,
    Resume,
    TriggerRun,
)

T = 1_800_000_000_000
JOB = JobRecord("sync", definition_id="d", schedule_id="every 10s")
UNKNOWN = JobRecord("sync")
LEASE = 30_000


def at(ms: int = T, *, steady: bool = True) -> Moment:
    return Moment(ms * 1_000, ms, "boot", steady)


def waiting(slot: int, trigger: Trigger = Trigger.SCHEDULE, **changes: Any) -> Run:
    return Run("sync", slot, trigger, RunState.DUE, **changes)


def running(slot: int, claimed_at: int = T - 1_000, **changes: Any) -> Run:
    attempt = Attempt(
        1, "t1", 1, "a", "A", AttemptCause.CLAIM, RunState.CLAIMED, claimed_at=claimed_at
    )
    lease = Lease(claimed_at + LEASE, LEASE, claimed_at + LEASE, "boot")
    values: dict[str, Any] = {"current": attempt, "lease": lease, "max_attempts": 3, **changes}
    return Run("sync", slot, Trigger.SCHEDULE, RunState.CLAIMED, **values)


def retrying(slot: int) -> Run:
    run = running(slot)
    assert run.current is not None
    failed = replace(run.current, state=RunState.FAILED)
    return replace(run, state=RunState.RETRYING, current=failed, lease=None, retry_at=T + 1_000)


# --- Pause -------------------------------------------------------------------------------


def test_s29_a_pause_skips_what_waits_but_for_triggered_runs() -> None:
    others = [waiting(1), waiting(2, Trigger.CATCH_UP), waiting(3, Trigger.MANUAL), running(4)]
    verdict = judge_pause(Pause("sync", "why"), at(), JOB, others)
    assert verdict.answer.outcome is ControlOutcome.DONE
    assert (verdict.job.paused_at, verdict.job.pause_reason) == (T, "why")
    assert [(s.run.slot, s.run.state, s.run.reason, s.run.ended_at) for s in verdict.saved] == [
        (1, RunState.SKIPPED, Reason.PAUSED, T),
        (2, RunState.SKIPPED, Reason.PAUSED, T),
    ]


def test_s29_a_second_pause_changes_nothing() -> None:
    paused = replace(JOB, paused_at=T - 1, pause_reason="first")
    verdict = judge_pause(Pause("sync", "second"), at(), paused, [waiting(1)])
    assert (verdict.answer.outcome, verdict.job, verdict.saved) == ("done", paused, ())


def test_s29_what_is_not_a_job_is_not_found() -> None:
    assert judge_pause(Pause("sync"), at(), UNKNOWN, []).answer.outcome == "not_found"
    assert (
        judge_resume(Resume("sync", 0, T), at(), UNKNOWN, {}, (), []).answer.outcome == "not_found"
    )
    assert judge_trigger(trigger(), at(), UNKNOWN, None, (), []).answer.outcome == "not_found"


# --- Resume ------------------------------------------------------------------------------

BEGAN = T - 50_000
PAUSED = replace(JOB, paused_at=BEGAN, pause_reason="why")
TENS = "every 10s"


def resume(*plans: Plan, settled: int = T - 100_000, slots: Any = (), **changes: Any) -> Resume:
    passed = (Passed(TENS, settled, tuple(slots), more=changes.pop("more", False)),)
    values: dict[str, Any] = {"paused_at": BEGAN, "until": T + 1_000, **changes}
    return Resume("sync", plans=plans, passed=passed, **values)


def resumed(
    wish: Resume,
    *taken: int,
    now: Moment | None = None,
    job: JobRecord = PAUSED,
    settled: int = T - 100_000,
) -> Any:
    return judge_resume(wish, now or at(), job, {TENS: settled}, set(taken), [])


def rows(verdict: Any) -> list[tuple[int, str, str, int]]:
    """What is saved: ms before T, state, reason, slots covered."""
    return [(T - s.run.slot, s.run.state, s.run.reason, s.run.slots_covered) for s in verdict.saved]


def test_s29_slots_passed_over_are_counted_in_one_row_and_settled() -> None:
    verdict = resumed(resume(slots=range(T - 40_000, T + 5_000, 10_000)), T - 20_000)
    assert verdict.answer.outcome is ControlOutcome.DONE
    assert (verdict.job.paused_at, verdict.job.pause_reason) == (None, "")
    assert rows(verdict) == [(0, "skipped", "paused", 4)]
    assert verdict.settled == {TENS: T}


def test_s29_where_nothing_was_passed_over_there_is_no_row() -> None:
    verdict = resumed(resume(slots=[T + 500]))
    assert (rows(verdict), verdict.settled) == ([], {TENS: T})


def test_s29_what_was_pruned_is_not_passed_over() -> None:
    job = replace(PAUSED, floor=T - 10_000)
    verdict = resumed(resume(slots=range(T - 40_000, T, 10_000)), job=job)
    assert rows(verdict) == []


def test_s29_beyond_ten_thousand_the_number_is_at_least() -> None:
    assert rows(resumed(resume(slots=[T - 10, T], more=True))) == [
        (0, "skipped", "paused", MISSED_LISTED_MAX)
    ]


def missed(*slots: int, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "settled": T - 100_000,
        "catch_up": CatchUpPolicy.LATEST,
        "window_ms": 86_400_000,
        **changes,
    }
    return Plan("sync", TENS, slots=tuple(MissedSlot(s, 10_000) for s in slots), **values)


def test_s29_what_was_missed_when_the_pause_began_is_planned_first() -> None:
    slots = range(T - 90_000, T + 1, 10_000)
    verdict = resumed(resume(missed(*slots), slots=slots))
    assert rows(verdict) == [
        (90_000, "skipped", "missed", 0),
        (80_000, "skipped", "missed", 0),
        (70_000, "due", "", 0),
        (0, "skipped", "paused", 7),
    ]


def test_s20_what_is_too_old_now_is_not_run_however_young_it_was_then() -> None:
    verdict = resumed(resume(missed(T - 70_000, window_ms=60_000)))
    assert rows(verdict) == [(70_000, "skipped", "missed", 0)]
    assert verdict.saved[0].run.ended_at == T


def test_s29_by_a_clock_that_was_set_back_only_what_is_missed_now_is_planned() -> None:
    verdict = resumed(resume(missed(T - 75_000, T - 65_000)), now=at(T - 60_000))
    assert rows(verdict) == [(75_000, "due", "", 0)]
    assert verdict.settled == {TENS: T - 60_000}


def test_s29_settled_is_not_moved_back() -> None:
    verdict = resumed(resume(settled=T + 500), settled=T + 500)
    assert verdict.settled == {TENS: T + 500}


def test_s20_the_plans_of_two_schedules_know_each_others_rows_and_the_limit() -> None:
    wish = Resume(
        "sync",
        BEGAN,
        T,
        plans=(missed(T - 80_000), replace(missed(T - 80_000, T - 75_000), schedule_id="every 5s")),
        passed=(Passed(TENS, T - 100_000, ()), Passed("every 5s", T - 100_000, ())),
    )
    settled = {TENS: T - 100_000, "every 5s": T - 100_000}
    verdict = judge_resume(
        wish, at(), PAUSED, settled, set(), [waiting(T - 85_000, Trigger.CATCH_UP)]
    )
    assert sorted(rows(verdict), reverse=True) == [
        (85_000, "skipped", "missed", 0),
        (80_000, "skipped", "missed", 0),
        (75_000, "due", "", 0),
    ]


@pytest.mark.parametrize(
    ("wish", "now"),
    [
        (resume(paused_at=BEGAN - 1), at()),
        (resume(settled=T - 99_999), at()),
        (resume(), at(T + 1_001)),
        (Resume("sync", BEGAN, T + 1_000), at()),
    ],
)
def test_s29_a_resumption_that_saw_something_else_is_stale(wish: Resume, now: Moment) -> None:
    verdict = resumed(wish, now=now)
    assert (verdict.answer.outcome, verdict.job) == (ControlOutcome.STALE, PAUSED)
    assert (verdict.settled, verdict.saved) == (None, ())


def test_s29_what_is_not_paused_is_resumed_already() -> None:
    verdict = resumed(resume(missed(T - 70_000)), job=JOB)
    assert (verdict.answer.outcome, verdict.settled, verdict.saved) == ("done", None, ())


def test_s29_the_schedules_in_use_are_the_current_one_and_those_that_live_instances_hold() -> None:
    held = [HeldDefinition("A", "sync", "old", "every 5s"), HeldDefinition("B", "sync", "n", "")]
    assert schedules_in_use(JOB, held) == {TENS, "every 5s"}
    assert schedules_in_use(UNKNOWN, []) == set()


# --- Trigger -----------------------------------------------------------------------------


def trigger(**changes: Any) -> TriggerRun:
    values: dict[str, Any] = {
        "job": "sync",
        "request_id": "r",
        "payload": b"",
        "slots": (T, T + 2),
        "until": T + 1_000,
        "overlap": OverlapPolicy.SKIP,
        "window_ms": 60_000,
        **changes,
    }
    return TriggerRun(**values)


def triggered(
    wish: TriggerRun, *others: Run, taken: tuple[int, ...] = (), now: Moment | None = None
) -> Any:
    return judge_trigger(wish, now or at(), JOB, None, taken, others)


def test_s29_a_triggered_run_is_due_at_the_first_free_millisecond() -> None:
    verdict = triggered(trigger(), taken=(T + 1,))
    run = verdict.saved[0].run
    assert (run.slot, run.state, run.trigger) == (T + 3, RunState.DUE, Trigger.MANUAL)
    assert (run.request_id, run.window_ms, run.blocking_slot) == ("r", 60_000, 0)
    assert verdict.answer.run.run == run


def test_s29_it_is_above_the_floor() -> None:
    job = replace(JOB, floor=T + 10)
    verdict = judge_trigger(trigger(), at(), job, None, (), [])
    assert verdict.saved[0].run.slot == T + 11


def test_s29_beyond_what_the_caller_listed_it_is_stale() -> None:
    assert triggered(trigger(until=T)).answer.outcome is ControlOutcome.STALE


def test_s29_a_repeat_gives_the_run_that_was_made() -> None:
    made = waiting(T - 500, Trigger.MANUAL)
    for job in (JOB, UNKNOWN):
        verdict = judge_trigger(trigger(), at(), job, made, (), [])
        assert (verdict.answer.outcome, verdict.saved) == (ControlOutcome.DONE, ())
        assert verdict.answer.run is not None
        assert verdict.answer.run.run == made


def test_s29_at_most_a_hundred_triggered_runs_wait() -> None:
    others = [waiting(n, Trigger.MANUAL) for n in range(TRIGGERED_WAITING_MAX)]
    assert triggered(trigger(), *others).answer.outcome is ControlOutcome.FULL
    others[0] = waiting(0, Trigger.CATCH_UP)
    assert triggered(trigger(), *others).answer.outcome is ControlOutcome.DONE


@pytest.mark.parametrize("other", [running(T - 5_000), retrying(T - 5_000)])
def test_s29_it_obeys_overlap(other: Run) -> None:
    def made(policy: OverlapPolicy) -> Run:
        run: Run = triggered(trigger(overlap=policy), waiting(T - 9_000), other).saved[-1].run
        return run

    skipped = made(OverlapPolicy.SKIP)
    assert (skipped.state, skipped.reason, skipped.ended_at) == ("skipped", "overlap", T)
    assert skipped.blocking_slot == T - 5_000
    queued = made(OverlapPolicy.QUEUE)
    assert (queued.state, queued.blocking_slot) == (RunState.DUE, T - 5_000)
    assert made(OverlapPolicy.ALLOW).blocking_slot == 0


def test_s29_with_cancel_what_runs_is_asked_to_stop_and_what_nobody_holds_ends() -> None:
    wish = trigger(overlap=OverlapPolicy.CANCEL)
    asked, made = triggered(wish, running(T - 5_000)).saved
    assert asked.run.cancel is CancelReason.SUPERSEDED
    assert made.run.blocking_slot == T - 5_000
    ended, made = triggered(wish, retrying(T - 5_000)).saved
    assert (ended.run.state, ended.run.reason) == (RunState.FAILED, Reason.SUPERSEDED)
    assert made.run.blocking_slot == 0


@pytest.mark.parametrize("steady", [True, False])
def test_s18_what_is_over_for_good_does_not_block_where_the_clock_cannot_step(steady: bool) -> None:
    dead = running(T - 50_000, T - 50_000, max_attempts=1)
    saved = triggered(trigger(), dead, now=at(steady=steady)).saved
    assert [s.run.state for s in saved] == (
        [RunState.FAILED, RunState.DUE] if steady else [RunState.SKIPPED]
    )


# --- Cancel ------------------------------------------------------------------------------


def cancelled(run: Run | None, now: Moment | None = None) -> Any:
    return judge_cancel(CancelRun("sync", T), now or at(), JOB, run)


def test_s29_there_must_be_a_run_that_has_not_ended() -> None:
    assert cancelled(None).answer.outcome is ControlOutcome.NOT_FOUND
    done = replace(running(T), state=RunState.SUCCESS, lease=None)
    verdict = cancelled(done)
    assert (verdict.answer.outcome, verdict.saved) == (ControlOutcome.FINAL, ())


def test_s21a_a_run_that_never_started_is_skipped() -> None:
    run = cancelled(waiting(T)).saved[0].run
    assert (run.state, run.reason, run.ended_at) == (RunState.SKIPPED, Reason.CANCELLED, T)


def test_s21a_a_run_in_progress_is_asked() -> None:
    verdict = cancelled(running(T))
    run = verdict.saved[0].run
    assert (run.state, run.cancel, run.cancelled_at) == (RunState.CLAIMED, "requested", T)
    again = cancelled(run, at(T + 1_000))
    assert (again.answer.outcome, again.saved) == (ControlOutcome.DONE, ()), "one grace, not two"


def test_s21a_the_first_requests_message_stays() -> None:
    def asked(run: Run, message: str) -> Run:
        verdict = judge_cancel(CancelRun("sync", T, message), at(), JOB, run)
        return verdict.saved[0].run if verdict.saved else run

    first = asked(running(T), "first")
    assert first.cancel_message == "first"
    assert asked(first, "second").cancel_message == "first"
    assert asked(retrying(T), "too late for its handler").cancel_message == ""


def test_s29_a_plan_for_a_schedule_that_is_not_in_use_changes_nothing() -> None:
    verdict = resumed(resume(replace(missed(T - 80_000), schedule_id="every 7s")))
    assert (rows(verdict), verdict.settled) == ([], {TENS: T})


@pytest.mark.parametrize("steady", [True, False])
def test_s21a_a_run_whose_lease_is_over_ends_where_the_clock_cannot_step(steady: bool) -> None:
    run = cancelled(running(T, T - LEASE), at(steady=steady)).saved[0].run
    assert run.state is (RunState.FAILED if steady else RunState.CLAIMED)
    assert run.cancel is CancelReason.REQUESTED


def test_s21a_a_run_that_is_to_be_retried_ends() -> None:
    run = cancelled(retrying(T)).saved[0].run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.CANCELLED)
