"""Pausing, resuming and triggering a job (S29), atomic with its claims."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.limits import MISSED_LISTED_MAX, TRIGGERED_WAITING_MAX
from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Failure,
    JobView,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
    Trigger,
)
from anarchon_server.core.store import (
    ClaimOutcome,
    ControlOutcome,
    MissedSlot,
    Passed,
    Pause,
    Plan,
    Resume,
    TriggerRun,
)
from tests.contract.harness import (
    DAY,
    JOB,
    LEASE,
    PERIOD,
    SCHEDULE,
    SECOND,
    T0,
    Cluster,
    Node,
    able,
    definition,
    slots_of,
)

SLOT = T0 + PERIOD
MISSED = (RunState.SKIPPED, Reason.MISSED)
PAUSED = (RunState.SKIPPED, Reason.PAUSED)
OVERLAPPED = (RunState.SKIPPED, Reason.OVERLAP)
QUEUE: dict[str, Any] = {"overlap": OverlapPolicy.QUEUE}
ALL: dict[str, Any] = {"catch_up": CatchUpPolicy.ALL, "window_ms": DAY}

pytestmark = pytest.mark.parametrize("backend", able(lambda can: can.control), indirect=True)


async def shown(node: Node, job: str = JOB) -> JobView:
    (view,) = (await node.store.jobs([job], "", 1)).answers
    return view


def plan_of(settled: int, *slots: int, **given: Any) -> Plan:
    return Plan(JOB, SCHEDULE, settled, tuple(MissedSlot(s, PERIOD) for s in slots), **given)


async def test_s29_a_job_without_a_schedule_is_triggered_run_and_pruned_like_any_other(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    bare = definition(period=0)
    await first.register(bare)
    (answer,) = await second.register(bare)
    assert (answer.settled, answer.definitions_differ) == (None, False)
    cluster.advance_to(SLOT + 3)
    run = (await first.triggered(slots=())).run
    assert (run.slot, run.state, run.trigger) == (SLOT + 3, RunState.DUE, Trigger.MANUAL)
    beat = await second.beat(sweep=((JOB, ""),))
    assert beat.known
    assert (beat.settled, [view.run.slot for view in beat.unfinished]) == ((None,), [run.slot])
    assert (await first.pause("by hand only")).outcome is ControlOutcome.DONE
    won = await second.win(run.slot, schedule_id="", previous_slot=None)
    await second.complete(won)
    assert await first.ended(run.slot) == (RunState.SUCCESS, "")
    view = await shown(first)
    assert (view.schedules, view.spec.schedule) == ((), None)
    resumed = Resume(JOB, view.paused_at or 0, cluster.now + SECOND)
    assert (await first.control(resumed)).outcome is ControlOutcome.DONE
    cluster.advance(3 * DAY)
    await second.beat()
    assert await second.prune(history_ms=DAY) == 1
    assert await first.history() == []
    assert (await first.triggered("r-2", slots=())).run.state is RunState.DUE


async def test_s28_a_job_may_lose_its_schedule_and_get_it_back(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    (without,) = await first.register(definition(period=0))
    assert (without.settled, without.definitions_differ) == (None, True)
    assert (await shown(first)).spec.schedule is None
    assert (await second.claim(SLOT)).outcome is ClaimOutcome.WON, "who holds it goes on"
    await second.register(definition(period=0))
    cluster.advance_to(SLOT + 10 * PERIOD)
    (again,) = await first.register(definition())
    assert again.settled == cluster.now, "nothing is caught up of a schedule that nobody had"


# Pause


async def test_s29_after_a_pause_no_claim_of_the_jobs_slots_wins(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    assert (await first.pause("maintenance")).outcome is ControlOutcome.DONE
    view = await shown(second)
    assert (view.paused_at, view.pause_reason) == (SLOT, "maintenance")
    for may_run in (True, False):
        answer = await second.claim(SLOT, may_run=may_run)
        assert (answer.outcome, answer.run) == (ClaimOutcome.PAUSED, None)
    assert await first.settled() == T0
    assert await first.history() == []


async def test_s29_a_second_pause_changes_nothing(cluster: Cluster, one: Node) -> None:
    await one.pause("first")
    cluster.advance(SECOND)
    assert (await one.pause("second")).outcome is ControlOutcome.DONE
    view = await shown(one)
    assert (view.paused_at, view.pause_reason) == (T0, "first")


async def test_s29_other_jobs_go_on(cluster: Cluster, one: Node) -> None:
    await one.register(definition(), definition("other"))
    await one.pause()
    cluster.advance_to(SLOT)
    await one.win(SLOT, job="other")


async def test_s29_a_job_that_is_not_there_is_not_found(cluster: Cluster, one: Node) -> None:
    assert (await one.pause(job="other")).outcome is ControlOutcome.NOT_FOUND
    answer = await one.resume(job="job", schedules=())
    assert answer.outcome is ControlOutcome.DONE
    assert (await one.trigger(job="other")).outcome is ControlOutcome.NOT_FOUND
    assert [view.name for view in (await one.store.jobs([], "", 10)).answers] == ["job"]


async def test_s02_a_claim_that_won_before_the_pause_is_told_so_again(
    cluster: Cluster, one: Node
) -> None:
    """Its reply was lost; it is repeated after PauseJob."""
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    assert (await one.ask(claim)).outcome is ClaimOutcome.WON
    await one.pause()
    cluster.advance(4 * SECOND)
    assert (await one.ask(claim)).outcome is ClaimOutcome.WON


async def test_s02_a_claim_before_its_slot_waits_also_in_a_pause(
    cluster: Cluster, one: Node
) -> None:
    await one.pause()
    cluster.advance_to(SLOT - SECOND - 1)
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.EARLY
    cluster.advance(1)
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.PAUSED


async def test_s29_takeovers_and_retries_go_on_in_a_pause(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    running = await first.win(SLOT, retries=1)
    await first.pause()
    await first.release(running, Reason.RUNNER_LOST)
    taken = (await second.take_over(running, retries=1)).run
    assert taken is not None
    await second.complete(taken, Outcome(failure=Failure("E")), retry_in_ms=0)
    again = (await first.take_over(taken, retries=1)).run
    assert again is not None
    assert again.run.current is not None
    assert (again.run.attempt, again.run.current.cause) == (3, AttemptCause.RETRY)
    await first.complete(again)
    assert await first.states() == {10: RunState.SUCCESS}


async def test_s29_slots_that_wait_are_skipped_on_pause_and_triggered_runs_are_not(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 4 * PERIOD + 1)
    await first.plan([SLOT, T0 + 2 * PERIOD], **ALL)
    made = await first.triggered(**QUEUE)
    running = await first.win(SLOT, **QUEUE)
    await first.claim(T0 + 4 * PERIOD, **QUEUE)
    await first.pause()
    states = await first.states()
    assert (states[10], states[20]) == (RunState.CLAIMED, PAUSED)
    assert await first.ended(T0 + 4 * PERIOD) == PAUSED
    assert (await first.seen(made.run.slot)).run.state is RunState.DUE
    await first.complete(running)
    await second.win(made.run.slot, **QUEUE)


async def test_s29_nothing_is_planned_in_a_pause(cluster: Cluster, one: Node) -> None:
    """Slots that got PAUSED must not be missed instead."""
    await one.pause()
    cluster.advance_to(T0 + 5 * PERIOD)
    answer = await one.plan([SLOT, T0 + 2 * PERIOD], **ALL)
    assert (answer.done, answer.settled, answer.missed, answer.due) == (False, T0, 0, 0)
    assert await one.history() == []


async def test_s29_a_pause_outlives_its_instances_and_their_definitions(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.pause("why")
    await first.beat(leaving=True)
    await second.register(definition(labels=(("v", "2"),)))
    cluster.advance_to(SLOT)
    assert (await second.claim(SLOT)).outcome is ClaimOutcome.PAUSED
    assert (await shown(second)).pause_reason == "why"


# Resume


async def test_s29_a_resumed_job_goes_on_with_its_next_slot(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 15 * SECOND)
    await one.pause("why")
    cluster.advance_to(T0 + 17 * SECOND)
    assert (await one.resume()).outcome is ControlOutcome.DONE
    view = await shown(one)
    assert (view.paused_at, view.pause_reason) == (None, "")
    cluster.advance_to(T0 + 20 * SECOND)
    await one.win(T0 + 20 * SECOND)


async def test_s29_resume_leaves_one_row_for_the_slots_passed_over(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT))
    cluster.advance(5 * SECOND)
    await one.pause()
    cluster.advance_to(T0 + 55 * SECOND)
    await one.resume()
    assert await one.states() == {10: RunState.SUCCESS, 50: PAUSED}
    row = await one.run(T0 + 50 * SECOND)
    assert row is not None
    assert (row.run.slots_covered, row.run.ended_at) == (4, cluster.now)
    assert (row.run.trigger, row.attempts) == (Trigger.SCHEDULE, ())
    assert await one.settled() == cluster.now


async def test_s29_a_slot_that_was_counted_as_paused_is_not_claimed_again(
    cluster: Cluster, one: Node
) -> None:
    """Paused at 57, slot 60 answered PAUSED, resumed at 61, the instance claims 60 again."""
    cluster.advance_to(T0 + 50 * SECOND)
    await one.complete(await one.win(T0 + 50 * SECOND, previous_slot=None))
    cluster.advance_to(T0 + 57 * SECOND)
    await one.pause()
    cluster.advance_to(T0 + 60 * SECOND)
    claim = one.wish(T0 + 60 * SECOND)
    assert (await one.ask(claim)).outcome is ClaimOutcome.PAUSED
    cluster.advance_to(T0 + 61 * SECOND)
    await one.resume()
    assert (await one.ask(claim)).outcome is ClaimOutcome.LOST
    assert await one.states() == {50: RunState.SUCCESS, 60: PAUSED}


async def test_s29_slots_passed_over_without_a_row_of_their_own_are_settled(
    cluster: Cluster, one: Node
) -> None:
    await one.pause()
    cluster.advance_to(T0 + 31 * SECOND)
    await one.resume()
    answer = await one.claim(T0 + 20 * SECOND, start_deadline_ms=DAY)
    assert answer.outcome is ClaimOutcome.LATE


async def test_s29_what_was_missed_before_the_pause_is_planned_first(
    cluster: Cluster, one: Node
) -> None:
    """Slots missed, or due and not yet claimed, before the pause: resume must not jump over them."""
    cluster.advance_to(T0 + 35 * SECOND)
    await one.pause()
    cluster.advance_to(T0 + 65 * SECOND)
    slots = slots_of(SCHEDULE, T0, T0 + 35 * SECOND)
    await one.resume(plans=[plan_of(T0, *slots, **ALL)])
    assert await one.states() == {10: RunState.DUE, 20: RunState.DUE, 60: PAUSED}
    row = await one.run(T0 + 60 * SECOND)
    assert row is not None
    assert row.run.slots_covered == 4, "30 could still have been claimed when the pause began"
    assert await one.settled() == cluster.now
    await one.win(SLOT)


async def test_s20_what_is_too_old_when_the_job_resumes_is_not_caught_up(
    cluster: Cluster, one: Node
) -> None:
    """Its window is over by then, however young it was when the pause began."""
    cluster.advance_to(T0 + 35 * SECOND)
    await one.pause()
    cluster.advance(2 * DAY)
    until = cluster.now + SECOND
    passed = Passed(SCHEDULE, T0, slots_of(SCHEDULE, until - DAY, until), more=True)
    plan = plan_of(T0, *slots_of(SCHEDULE, T0, T0 + 35 * SECOND), **ALL)
    await one.resume(plans=[plan], passed=(passed,), until=until)
    states = await one.states()
    assert (states[10], states[20]) == (MISSED, MISSED)
    assert list(states.values())[2:] == [PAUSED]


async def test_s29_more_than_can_be_listed_counts_as_at_least_ten_thousand(
    cluster: Cluster, one: Node
) -> None:
    await one.pause()
    cluster.advance(30 * DAY)
    until = cluster.now + SECOND
    newest = slots_of(SCHEDULE, until - DAY, until)
    await one.resume(passed=(Passed(SCHEDULE, T0, newest, more=True),), until=until)
    (row,) = await one.history()
    assert (row.run.slot, row.run.slots_covered) == (newest[-1], MISSED_LISTED_MAX)


async def test_s29_slots_that_have_a_row_are_not_passed_over(cluster: Cluster, one: Node) -> None:
    """A run that was won out of order before the pause, and a schedule beside it."""
    cluster.advance_to(T0 + 20 * SECOND)
    await one.complete(await one.win(T0 + 20 * SECOND))
    await one.pause()
    cluster.advance_to(T0 + 25 * SECOND)
    await one.resume()
    row = await one.run(SLOT)
    assert row is not None
    assert (row.run.reason, row.run.slots_covered) == (Reason.PAUSED, 1)
    assert await one.states() == {10: PAUSED, 20: RunState.SUCCESS}


async def test_s29_every_schedule_in_use_is_settled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    tens, fives = two
    await fives.register(definition(period=5 * SECOND))
    await tens.pause()
    cluster.advance_to(T0 + 27 * SECOND)
    assert (await tens.resume()).outcome is ControlOutcome.STALE, "two schedules are in use"
    answer = await fives.resume(schedules=(SCHEDULE, "every:5s"))
    assert answer.outcome is ControlOutcome.DONE
    for schedule in (SCHEDULE, "every:5s"):
        assert await tens.settled(schedule=schedule) == cluster.now
    row = await tens.run(T0 + 25 * SECOND)
    assert row is not None
    assert row.run.slots_covered == 5, "10 and 20 are one slot each"


async def test_s29_a_schedule_that_only_lost_instances_hold_is_not_in_use(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Its version is gone: nobody computes its slots, and nobody who resumes has to know it."""
    _, newer = two
    fives = "every:5s"
    await newer.register(definition(period=5 * SECOND))
    await newer.pause()
    cluster.advance(LEASE)
    await newer.beat()
    cluster.advance(SECOND)
    assert (await newer.resume(schedules=(fives,))).outcome is ControlOutcome.DONE
    assert await newer.settled(schedule=fives) == cluster.now
    assert await newer.settled() == T0


@pytest.mark.parametrize("what", ["paused_at", "settled", "schedules", "until"])
async def test_s29_a_resumption_that_saw_something_else_changes_nothing(
    cluster: Cluster, one: Node, what: str
) -> None:
    cluster.advance_to(SLOT)
    await one.pause("why")
    cluster.advance(PERIOD)
    wrong: dict[str, dict[str, Any]] = {
        "paused_at": {"paused_at": SLOT - 1},
        "settled": {"passed": (Passed(SCHEDULE, T0 - 1, ()),)},
        "schedules": {"passed": (Passed(SCHEDULE, T0, ()), Passed("every:7s", T0, ()))},
        "until": {"until": cluster.now - 1},
    }
    answer = await one.resume(**wrong[what])
    assert answer.outcome is ControlOutcome.STALE
    assert (await shown(one)).paused_at == SLOT
    assert await one.settled() == T0
    assert await one.history() == []


async def test_s29_resuming_what_is_not_paused_changes_nothing(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 25 * SECOND)
    assert (await one.resume()).outcome is ControlOutcome.DONE
    assert (await one.settled(), await one.history()) == (T0, [])


async def test_s29_a_resumption_does_not_move_settled_back(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 30 * SECOND)
    await one.complete(await one.win(T0 + 30 * SECOND, previous_slot=None))
    await one.pause()
    cluster.step(-20 * SECOND)
    await one.resume()
    assert await one.settled() == T0 + 30 * SECOND
    assert (await shown(one)).paused_at is None


async def test_s29_of_a_pause_that_a_clock_set_back_puts_ahead_only_what_is_missed_by_now_is_planned(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 60 * SECOND)
    await one.pause()
    cluster.step(-35 * SECOND)
    slots = [T0 + at * SECOND for at in (10, 20, 30, 40)]
    assert (await one.resume(plans=[plan_of(T0, *slots)])).outcome is ControlOutcome.DONE
    assert await one.states() == {
        10: (RunState.SKIPPED, Reason.MISSED),
        20: (RunState.SKIPPED, Reason.PAUSED),
    }
    cluster.advance_to(T0 + 30 * SECOND)
    await one.win(T0 + 30 * SECOND)


async def test_s29_of_two_resumptions_one_counts(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    await first.pause()
    cluster.advance_to(T0 + 25 * SECOND)
    for node in (first, second):
        assert (await node.resume()).outcome is ControlOutcome.DONE
    assert await first.states() == {20: PAUSED}


async def test_s29_acts_of_one_batch_see_each_other(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    trigger = TriggerRun(JOB, "r-1", b"", (), SLOT + SECOND, OverlapPolicy.SKIP, DAY)
    again = TriggerRun(JOB, "r-2", b"", (), SLOT + SECOND, OverlapPolicy.SKIP, DAY)
    answers = (await one.store.control([trigger, trigger, again, Pause(JOB)])).answers
    slots = [answer.run.run.slot for answer in answers if answer.run]
    assert slots == [SLOT, SLOT, SLOT + 1]
    assert (await shown(one)).paused_at == SLOT


# Trigger


async def test_s29_a_triggered_run_is_due_now_with_its_payload(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 5 * SECOND)
    made = await first.triggered("r-1", payload=b"\x00\xff data")
    run = made.run
    assert (run.slot, run.state, run.trigger) == (cluster.now, RunState.DUE, Trigger.MANUAL)
    assert (run.request_id, run.window_ms, run.blocking_slot) == ("r-1", DAY, 0)
    answer = await second.claim(run.slot, previous_slot=None)
    assert (answer.outcome, answer.payload) == (ClaimOutcome.WON, b"\x00\xff data")
    assert answer.run is not None
    await second.release(answer.run)
    taken = await first.take_over(answer.run)
    assert (taken.outcome, taken.payload) == (ClaimOutcome.WON, b"\x00\xff data")
    assert await first.settled() == T0, "triggered runs settle nothing"
    assert (await first.claim(run.slot)).payload == b"", "only for who won"


async def test_s29_its_slot_is_the_first_that_is_neither_the_jobs_nor_taken(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    made = [await one.triggered(f"r-{n}", overlap=OverlapPolicy.ALLOW) for n in range(3)]
    assert [seen.run.slot - SLOT for seen in made] == [1, 2, 3], "10 is a slot of the job"
    await one.win(SLOT, overlap=OverlapPolicy.ALLOW)


async def test_s29_where_the_callers_list_of_slots_ends_it_looks_again(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance(1)
    answer = await one.trigger(until=cluster.now - 1)
    assert (answer.outcome, answer.run) == (ControlOutcome.STALE, None)
    assert (await one.trigger(until=cluster.now)).outcome is ControlOutcome.DONE
    answer = await one.trigger("r-2", until=cluster.now)
    assert answer.outcome is ControlOutcome.STALE, "that millisecond is taken"
    assert len(await one.history()) == 1


async def test_s29_a_request_that_is_repeated_gives_the_same_run(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    made = await first.triggered("r-1", payload=b"first")
    cluster.advance(SECOND)
    again = await second.triggered("r-1", payload=b"second", until=0)
    assert again.run == made.run
    won = await first.claim(made.run.slot)
    assert won.payload == b"first"
    assert won.run is not None
    await first.complete(won.run)
    ended = await second.triggered("r-1")
    assert ended.run.state is RunState.SUCCESS, "also when it has ended"
    assert len(await first.history()) == 1


async def test_s29_a_request_is_one_jobs(cluster: Cluster, one: Node) -> None:
    await one.register(definition(), definition("other"))
    first = await one.triggered("r-1")
    second = await one.triggered("r-1", job="other")
    assert (first.run.job, second.run.job) == ("job", "other")


async def test_s29_with_skip_a_triggered_run_is_skipped_and_the_answer_says_so(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    await one.win(SLOT)
    cluster.advance(SECOND)
    made = await one.triggered()
    assert (made.run.state, made.run.reason, made.run.blocking_slot) == (*OVERLAPPED, SLOT)
    again = await one.triggered()
    assert again.run == made.run


async def test_s29_with_queue_it_waits(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    cluster.advance(SECOND)
    made = await one.triggered(**QUEUE)
    assert (made.run.state, made.run.blocking_slot) == (RunState.DUE, SLOT)
    assert (await one.claim(made.run.slot, **QUEUE)).outcome is ClaimOutcome.QUEUED
    ending = await one.complete(running)
    assert ending.due is not None
    assert ending.due.run.slot == made.run.slot
    await one.win(made.run.slot, **QUEUE)


async def test_s29_with_cancel_the_other_is_asked_to_stop(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    cluster.advance(SECOND)
    made = await one.triggered(overlap=OverlapPolicy.CANCEL)
    assert (made.run.state, made.run.blocking_slot) == (RunState.DUE, SLOT)
    assert (await one.seen(SLOT)).run.cancel is CancelReason.SUPERSEDED
    await one.complete(running, Outcome(stopped=CancelReason.SUPERSEDED))
    await one.win(made.run.slot, overlap=OverlapPolicy.CANCEL)


async def test_s18_with_cancel_what_starts_from_the_queue_is_not_superseded_by_what_waited_with_it(
    cluster: Cluster, one: Node
) -> None:
    """Each asks to stop what it finds when it comes; runs that wait are not in one another's way."""
    policy: dict[str, Any] = {"overlap": OverlapPolicy.CANCEL}
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    cluster.advance(SECOND)
    older, newer = [await one.triggered(f"r-{n}", **policy) for n in range(2)]
    assert (newer.run.state, newer.run.blocking_slot) == (RunState.DUE, SLOT)
    await one.complete(running, Outcome(stopped=CancelReason.SUPERSEDED))
    started = await one.win(older.run.slot, **policy)
    assert (await one.claim(newer.run.slot, **policy)).outcome is ClaimOutcome.QUEUED
    assert (await one.seen(older.run.slot)).run.cancel is None
    ending = await one.complete(started)
    assert ending.due is not None
    assert ending.due.run.slot == newer.run.slot
    await one.win(newer.run.slot, **policy)
    await one.triggered("r-2", **policy)
    assert (await one.seen(newer.run.slot)).run.cancel is CancelReason.SUPERSEDED, "what comes does"


async def test_s29_with_cancel_what_nobody_holds_ends_at_once(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.release(await one.win(SLOT))
    made = await one.triggered(overlap=OverlapPolicy.CANCEL)
    assert made.run.blocking_slot == 0
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.SUPERSEDED)


async def test_s29_with_allow_it_does_not_look_around(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.win(SLOT)
    made = await one.triggered(overlap=OverlapPolicy.ALLOW)
    assert (made.run.state, made.run.blocking_slot) == (RunState.DUE, 0)


async def test_s18_what_is_over_for_good_does_not_block_a_triggered_run(
    cluster: Cluster, one: Node
) -> None:
    """It ends in the same step, where the clock cannot step; elsewhere nobody vouches for it."""
    cluster.advance_to(SLOT)
    await one.win(SLOT, max_attempts=1)
    cluster.advance(LEASE)
    made = await one.triggered()
    if one.store.capabilities.boot_leases:
        assert made.run.state is RunState.DUE
        assert await one.ended(SLOT) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)
    else:
        assert (made.run.state, made.run.reason) == OVERLAPPED


async def test_s29_what_waits_does_not_block_a_triggered_run(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 3 * PERIOD)
    await one.plan([SLOT], **ALL)
    made = await one.triggered()
    assert made.run.state is RunState.DUE
    assert (await one.claim(made.run.slot)).outcome is ClaimOutcome.QUEUED, "the older goes first"


async def test_s29_a_paused_job_can_be_triggered(cluster: Cluster, one: Node) -> None:
    await one.pause()
    made = await one.triggered()
    await one.complete(await one.win(made.run.slot))
    assert await one.states() == {0: RunState.SUCCESS}


async def test_s29_a_job_without_a_schedule_can_be_triggered(cluster: Cluster, one: Node) -> None:
    await one.register(definition("manual", 0))
    made = await one.triggered(job="manual", slots=())
    won = await one.win(made.run.slot, job="manual", schedule_id="", previous_slot=None)
    assert won.run.trigger is Trigger.MANUAL


async def test_s29_at_most_a_hundred_triggered_runs_wait(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 21 * SECOND)
    assert (await one.plan([SLOT], catch_up=CatchUpPolicy.LATEST, window_ms=DAY)).due == 1
    until = cluster.now + SECOND
    trigger = [
        TriggerRun(JOB, f"r-{n}", b"", (), until, OverlapPolicy.QUEUE, DAY)
        for n in range(TRIGGERED_WAITING_MAX + 1)
    ]
    answers = (await one.store.control(trigger)).answers
    assert [a.outcome for a in answers[:-1]] == [ControlOutcome.DONE] * TRIGGERED_WAITING_MAX
    assert (answers[-1].outcome, answers[-1].run) == (ControlOutcome.FULL, None)
    assert (await one.control(trigger[0])).outcome is ControlOutcome.DONE, "a repeat is no more"
    await one.complete(await one.win(SLOT, **QUEUE))
    assert (await one.control(trigger[-1])).outcome is ControlOutcome.FULL, "that was caught up"
    await one.win(T0 + 21 * SECOND, **QUEUE)
    assert (await one.control(trigger[-1])).outcome is ControlOutcome.DONE


async def test_s29_a_triggered_run_is_never_missed(cluster: Cluster, one: Node) -> None:
    cluster.advance(1)
    made = await one.triggered()
    cluster.advance(DAY // 2)
    slots = slots_of(SCHEDULE, T0, T0 + 100 * PERIOD)
    await one.plan(slots, window_ms=DAY)
    await one.win(made.run.slot, start_deadline_ms=SECOND)


async def test_s02_a_triggered_run_older_than_the_window_is_taken_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    made = await first.triggered()
    won = await first.win(made.run.slot, lease_ms=3_600 * SECOND)
    for _ in range(26):
        cluster.advance(3_500 * SECOND)
        await first.renew(won, lease_ms=3_600 * SECOND)
    await second.register()
    await second.prune(history_ms=0, history_max=0)
    await first.release(won, Reason.RUNNER_LOST)
    assert (await second.take_over(won)).outcome is ClaimOutcome.WON


async def test_s29_above_the_floor_also_where_the_clock_was_set_back(
    cluster: Cluster, one: Node
) -> None:
    await one.register(definition(window=SECOND))
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT))
    cluster.advance(2 * PERIOD)
    await one.register(definition(window=SECOND))
    assert await one.prune(history_ms=0, history_max=0) == 1
    cluster.step(-3 * PERIOD)
    made = await one.triggered(until=SLOT + SECOND)
    assert made.run.slot == SLOT + 1


async def test_s30_a_request_is_forgotten_with_its_run(cluster: Cluster, one: Node) -> None:
    await one.register(definition(window=SECOND))
    made = await one.triggered("r-1", payload=b"old")
    await one.complete(await one.win(made.run.slot))
    cluster.advance(3 * PERIOD)
    await one.plan(slots_of(SCHEDULE, T0, T0 + PERIOD))
    await one.register(definition(window=SECOND))
    assert await one.prune(history_ms=0, history_max=0) >= 1
    again = await one.triggered("r-1", payload=b"new")
    assert again.run.slot == cluster.now + 1, "30 is a slot of the job"
    assert (await one.claim(again.run.slot)).payload == b"new"


async def test_s31_a_job_of_another_namespace_is_another(cluster: Cluster, one: Node) -> None:
    stranger = await cluster.node(namespace="stranger")
    await stranger.register()
    await one.pause()
    await one.triggered("r-1", payload=b"ours")
    cluster.advance_to(SLOT)
    await stranger.win(SLOT)
    made = await stranger.triggered("r-1", **QUEUE)
    assert made.run.slot != T0
