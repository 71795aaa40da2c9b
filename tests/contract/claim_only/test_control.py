"""Pausing, resuming, triggering and cancelling on stores without leases (S29), atomic with claims."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from anarchon_server.core.errors import UnsupportedError
from anarchon_server.core.limits import MISSED_LISTED_MAX, TRIGGERED_WAITING_MAX
from anarchon_server.core.model import (
    CancelReason,
    JobView,
    OverlapPolicy,
    Reason,
    RunState,
    RunView,
    ScheduleInUse,
    Trigger,
)
from anarchon_server.core.store import (
    ClaimOutcome,
    ControlOutcome,
    Passed,
    Pause,
    Resume,
    TokenOutcome,
    TriggerRun,
)
from tests.contract.claim_only.traits import controlled, not_controlled
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
    definition,
    slots_of,
)

SLOT = T0 + PERIOD
PAUSED = (RunState.SKIPPED, Reason.PAUSED)
CANCELLED = (RunState.SKIPPED, Reason.CANCELLED)


async def shown(node: Node, job: str = JOB) -> JobView:
    (view,) = (await node.store.jobs([job], "", 1)).answers
    return view


async def resume(node: Node, **given: Any) -> ControlOutcome:
    """As the one who has just looked at the job."""
    view = await shown(node)
    until = node.cluster.now + SECOND
    values: dict[str, Any] = {
        "job": JOB,
        "paused_at": view.paused_at or 0,
        "until": until,
        "passed": tuple(
            Passed(each.schedule_id, each.settled, slots_of(each.schedule_id, each.settled, until))
            for each in view.schedules
        ),
    }
    return (await node.control(Resume(**(values | given)))).outcome


async def triggered(node: Node, request_id: str = "r-1", **given: Any) -> RunView:
    return await node.triggered(request_id, **({"overlap": OverlapPolicy.ALLOW} | given))


@not_controlled
async def test_s29_what_the_backend_has_not_names_the_backends_that_have_it(one: Node) -> None:
    assert not one.store.capabilities.control
    with pytest.raises(UnsupportedError, match="control is not supported by") as refused:
        await one.pause()
    assert "postgres" in str(refused.value)
    assert "redis:script" in str(refused.value)


@controlled
async def test_s29_a_job_without_a_schedule_is_triggered_run_and_pruned_like_any_other(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    bare = definition(period=0)
    await first.register(bare)
    (answer,) = await second.register(bare)
    assert (answer.settled, answer.definitions_differ) == (None, False)
    cluster.advance_to(SLOT + 3)
    run = (await triggered(first, slots=())).run
    assert (run.slot, run.state, run.trigger) == (SLOT + 3, RunState.DUE, Trigger.MANUAL)
    beat = await second.beat(sweep=((JOB, ""),))
    assert (beat.settled, [view.run.slot for view in beat.unfinished]) == ((None,), [run.slot])
    await first.pause("by hand only")
    won = await second.win(run.slot, schedule_id="", previous_slot=None)
    await second.complete(won)
    assert await first.ended(run.slot) == (RunState.SUCCESS, "")
    view = await shown(first)
    assert (view.schedules, view.spec.schedule) == ((), None)
    assert await resume(first) is ControlOutcome.DONE
    assert len(await first.history()) == 1, "nothing was passed over"
    cluster.advance(3 * DAY)
    await second.beat()
    assert await second.prune(history_ms=DAY) == 1
    assert (await triggered(first, "r-2", slots=())).run.state is RunState.DUE


@controlled
async def test_s28_a_job_may_lose_its_schedule_and_get_it_back(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    (without,) = await first.register(definition(period=0))
    assert (without.settled, without.definitions_differ) == (None, True)
    assert (await second.claim(SLOT)).outcome is ClaimOutcome.WON, "who holds it goes on"
    await second.register(definition(period=0))
    cluster.advance_to(SLOT + 10 * PERIOD)
    (again,) = await first.register(definition())
    assert again.settled == cluster.now, "a schedule that nobody had begins anew"


# Pause and resume


@controlled
async def test_s29_after_a_pause_no_claim_of_the_jobs_slots_wins(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    assert first.store.capabilities.control
    cluster.advance_to(SLOT)
    assert (await first.pause("maintenance")).outcome is ControlOutcome.DONE
    view = await shown(second)
    assert (view.paused_at, view.pause_reason) == (SLOT, "maintenance")
    for may_run in (True, False):
        answer = await second.claim(SLOT, may_run=may_run)
        assert (answer.outcome, answer.run) == (ClaimOutcome.PAUSED, None)
    assert await first.history() == []


@controlled
async def test_s29_a_pause_is_one_step_with_the_claims_of_its_job(cluster: Cluster) -> None:
    """Each claim that races with it has won before it, or is told of it."""
    nodes = [await cluster.node(f"host:{n}") for n in range(8)]
    await nodes[0].register()
    for round_ in range(1, 11):
        slot = T0 + round_ * PERIOD
        cluster.advance_to(slot)
        claims = asyncio.gather(*(node.claim(slot) for node in nodes[1:]))
        paused, answers = await asyncio.gather(nodes[0].pause(), claims)
        assert paused.outcome is ControlOutcome.DONE
        words = [answer.outcome for answer in answers]
        won = words.count(ClaimOutcome.WON)
        assert won <= 1
        assert set(words) <= {ClaimOutcome.WON, ClaimOutcome.LOST, ClaimOutcome.PAUSED}
        assert len(await nodes[0].history(slot=slot)) == won
        again = await nodes[1].claim(slot)
        assert again.outcome is (ClaimOutcome.LOST if won else ClaimOutcome.PAUSED)
        assert await resume(nodes[0]) is ControlOutcome.DONE


@controlled
async def test_s29_a_second_pause_changes_nothing(cluster: Cluster, one: Node) -> None:
    await one.pause("first")
    cluster.advance(SECOND)
    assert (await one.pause("second")).outcome is ControlOutcome.DONE
    view = await shown(one)
    assert (view.paused_at, view.pause_reason) == (T0, "first")


@controlled
async def test_s29_other_jobs_go_on(cluster: Cluster, one: Node) -> None:
    await one.register(definition(), definition("other"))
    await one.pause()
    cluster.advance_to(SLOT)
    await one.win(SLOT, job="other")


@controlled
async def test_s29_a_job_or_run_that_is_not_there_is_not_found(one: Node) -> None:
    assert (await one.pause(job="other")).outcome is ControlOutcome.NOT_FOUND
    there_is_none = Resume("other", T0, T0 + SECOND)
    assert (await one.control(there_is_none)).outcome is ControlOutcome.NOT_FOUND
    assert (await one.trigger(job="other")).outcome is ControlOutcome.NOT_FOUND
    assert (await one.cancel(SLOT)).outcome is ControlOutcome.NOT_FOUND
    assert [view.name for view in (await one.store.jobs([], "", 10)).answers] == [JOB]


@controlled
async def test_s02_a_claim_that_won_before_the_pause_goes_on(cluster: Cluster, one: Node) -> None:
    """Its reply was lost; it is repeated after PauseJob."""
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    assert (await one.ask(claim)).outcome is ClaimOutcome.WON
    await one.pause()
    again = await one.ask(claim)
    assert again.outcome is ClaimOutcome.WON
    assert again.run is not None
    assert (await one.complete(again.run)).outcome is TokenOutcome.RECORDED


@controlled
async def test_s02_a_claim_before_its_slot_waits_also_in_a_pause(one: Node) -> None:
    await one.pause()
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.EARLY


@controlled
async def test_s29_a_resumed_job_goes_on_with_its_next_slot(cluster: Cluster, one: Node) -> None:
    await one.pause("maintenance")
    cluster.advance(25 * SECOND)
    assert await resume(one) is ControlOutcome.DONE
    view = await shown(one)
    assert (view.paused_at, view.pause_reason) == (None, "")
    cluster.advance_to(T0 + 3 * PERIOD)
    await one.win(T0 + 3 * PERIOD)


@controlled
async def test_s29_resume_leaves_one_row_for_the_slots_passed_over(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT))
    cluster.advance(SECOND)
    await one.pause()
    cluster.advance_to(T0 + 4 * PERIOD)
    assert await resume(one) is ControlOutcome.DONE
    assert await one.states() == {10: RunState.SUCCESS, 40: PAUSED}
    (row,) = await one.history(slot=T0 + 4 * PERIOD)
    assert (row.run.slots_covered, row.run.ended_at) == (3, cluster.now)


@controlled
async def test_s29_a_slot_that_was_passed_over_is_claimed_by_nobody(
    cluster: Cluster, one: Node
) -> None:
    """Also where its start deadline is not over."""
    await one.pause()
    cluster.advance_to(T0 + 2 * PERIOD)
    assert await resume(one) is ControlOutcome.DONE
    late = await one.claim(SLOT, start_deadline_ms=60 * SECOND)
    assert late.outcome is ClaimOutcome.LATE
    assert (await one.claim(T0 + 2 * PERIOD)).outcome is ClaimOutcome.LOST  # it is the row


@controlled
async def test_s29_more_than_can_be_listed_counts_as_at_least_ten_thousand(
    cluster: Cluster, one: Node
) -> None:
    await one.pause()
    cluster.advance_to(SLOT)
    passed = Passed(SCHEDULE, T0, (SLOT,), more=True)
    assert await resume(one, passed=(passed,)) is ControlOutcome.DONE
    (row,) = await one.history()
    assert row.run.slots_covered == MISSED_LISTED_MAX


@controlled
async def test_s29_every_schedule_in_use_is_passed_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition(period=15 * SECOND))
    await first.pause()
    cluster.advance_to(SLOT)
    for node in two:
        await node.beat()
    cluster.advance_to(T0 + 31 * SECOND)
    view = await shown(first)
    assert view.schedules == tuple(
        ScheduleInUse(f"every:{n}s", T0, definition(period=n * SECOND).spec) for n in (10, 15)
    )
    assert await resume(first) is ControlOutcome.DONE
    (row,) = await first.history()
    assert (row.run.slot, row.run.slots_covered) == (T0 + 30 * SECOND, 4)


@controlled
async def test_s29_a_resumption_that_saw_something_else_changes_nothing(
    cluster: Cluster, one: Node
) -> None:
    await one.pause()
    cluster.advance(SECOND)
    other_schedule = Passed("every:15s", T0, ())
    other_mark = Passed(SCHEDULE, T0 - 1, ())
    usual = Passed(SCHEDULE, T0, ())
    for given in (
        {"paused_at": T0 + 1},
        {"until": T0},
        {"passed": ()},
        {"passed": (other_mark,)},
        {"passed": (usual, other_schedule)},
    ):
        assert await resume(one, **given) is ControlOutcome.STALE
    assert (await shown(one)).paused_at == T0
    assert await resume(one) is ControlOutcome.DONE
    assert await resume(one) is ControlOutcome.DONE


@controlled
async def test_s29_a_pause_outlives_its_instances(cluster: Cluster, one: Node) -> None:
    await one.pause()
    cluster.advance(2 * DAY)
    later = await cluster.node("host:2")
    await later.register()
    await later.prune()
    assert (await shown(later)).paused_at == T0
    assert (await later.claim(T0 + 2 * DAY)).outcome is ClaimOutcome.PAUSED


@controlled
async def test_s29_acts_of_one_batch_see_each_other(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    act = TriggerRun(JOB, "r", b"", (), cluster.now + SECOND, OverlapPolicy.ALLOW, DAY)
    reply = await one.store.control([Pause(JOB, "one"), act, act, Pause(JOB, "two")])
    assert [answer.outcome for answer in reply.answers] == [ControlOutcome.DONE] * 4
    assert reply.answers[1].run == reply.answers[2].run
    assert (await shown(one)).pause_reason == "one"


# Triggered runs


@controlled
@pytest.mark.parametrize("paused", [False, True])
async def test_s29_a_triggered_run_is_claimed_once_with_its_payload(
    cluster: Cluster, two: tuple[Node, Node], paused: bool
) -> None:
    first, second = two
    if paused:
        await first.pause()
    cluster.advance(SECOND)
    made = await triggered(first, payload=b"\x00\xff")
    run = made.run
    assert (run.slot, run.trigger, run.state) == (cluster.now, Trigger.MANUAL, RunState.DUE)
    for node in two:
        assert await node.unfinished() == [made]
    given: dict[str, Any] = {"start_deadline_ms": 0, "previous_slot": None}
    cluster.advance(60 * SECOND)  # it is never missed
    without_room = await second.claim(run.slot, may_run=False, **given)
    assert (without_room.outcome, without_room.run) == (ClaimOutcome.UNCHANGED, made)
    wish = second.wish(run.slot, **given)
    for answer in (await second.ask(wish), await second.ask(wish)):
        assert (answer.outcome, answer.payload) == (ClaimOutcome.WON, b"\x00\xff")
        assert answer.run is not None
        assert answer.run.run.current is not None
        assert answer.run.run.current.instance_id == "host:2"
        won = answer.run
    lost = await first.claim(run.slot, **given)
    assert (lost.outcome, lost.payload) == (ClaimOutcome.LOST, b"")
    assert await first.unfinished() == []
    await second.complete(won)
    seen = await first.seen(run.slot)
    assert (seen.run.state, seen.run.trigger) == (RunState.SUCCESS, Trigger.MANUAL)


@controlled
async def test_s29_connections_that_claim_a_triggered_run_at_once_have_one_winner(
    cluster: Cluster,
) -> None:
    nodes = [await cluster.node(f"host:{n}") for n in range(8)]
    await nodes[0].register()
    for round_ in range(5):
        cluster.advance(SECOND)
        made = await triggered(nodes[0], f"r-{round_}")
        answers = await asyncio.gather(*(node.claim(made.run.slot) for node in nodes))
        words = sorted(answer.outcome for answer in answers)
        assert words == [ClaimOutcome.LOST] * 7 + [ClaimOutcome.WON]


@controlled
async def test_s29_its_slot_is_the_first_that_is_neither_the_jobs_nor_taken(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    assert (await triggered(one, "a")).run.slot == SLOT + 1
    assert (await triggered(one, "b")).run.slot == SLOT + 2
    full = await one.trigger("c", slots=(SLOT, SLOT + 3), until=SLOT + 3)
    assert full.outcome is ControlOutcome.STALE
    await one.win(SLOT)  # a slot of the schedule is not in its way


@controlled
async def test_s29_a_request_that_is_repeated_gives_the_same_run(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance(SECOND)
    made = await triggered(first)
    cluster.advance(SECOND)
    assert await triggered(second) == made
    won = await second.win(made.run.slot)
    await second.complete(won)
    assert (await triggered(first)).run.state is RunState.SUCCESS
    assert (await triggered(first, "r-2")).run.slot == cluster.now
    assert (await first.trigger(job="other")).outcome is ControlOutcome.NOT_FOUND


@controlled
async def test_s29_at_most_a_hundred_triggered_runs_wait(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    acts = [
        TriggerRun(JOB, f"r-{n}", b"", (), cluster.now + SECOND, OverlapPolicy.ALLOW, DAY)
        for n in range(TRIGGERED_WAITING_MAX + 1)
    ]
    words = [answer.outcome for answer in (await one.store.control(acts)).answers]
    assert words == [ControlOutcome.DONE] * TRIGGERED_WAITING_MAX + [ControlOutcome.FULL]
    assert len(await one.unfinished()) == TRIGGERED_WAITING_MAX
    await one.win(cluster.now)
    await triggered(one, "one more")


@controlled
async def test_s19_a_triggered_run_that_nobody_wanted_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance(SECOND)
    made = await triggered(one, window_ms=60 * SECOND)
    cluster.advance(61 * SECOND)
    assert (await one.claim(made.run.slot)).outcome is ClaimOutcome.LOST
    assert await one.ended(made.run.slot) == (RunState.SKIPPED, Reason.ABANDONED)
    assert await one.unfinished() == []


@controlled
async def test_s02_a_triggered_run_waits_where_the_clock_was_set_back(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance(60 * SECOND)
    made = await triggered(one)
    cluster.step(-30 * SECOND)
    early = await one.claim(made.run.slot)
    assert early.outcome is ClaimOutcome.EARLY
    assert early.run is not None
    assert early.run.run.slot == made.run.slot


@controlled
async def test_s30_a_request_is_forgotten_with_its_run(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    made = await triggered(one, payload=b"x")
    await one.complete(await one.win(made.run.slot))
    cluster.advance(2 * DAY)
    await one.register()
    assert await one.prune(history_ms=DAY) == 1
    assert (await triggered(one)).run.slot == cluster.now


# Cancelling


@controlled
async def test_s21a_a_run_that_waits_is_cancelled_at_once(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    made = await triggered(one)
    assert (await one.cancel(made.run.slot)).outcome is ControlOutcome.DONE
    assert await one.ended(made.run.slot) == CANCELLED
    assert await one.unfinished() == []
    assert (await one.claim(made.run.slot)).outcome is ClaimOutcome.LOST
    assert (await one.cancel(made.run.slot)).outcome is ControlOutcome.FINAL


@controlled
async def test_s21a_the_holder_learns_of_a_cancel_with_its_next_heartbeat(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    won = await first.win(SLOT)
    assert await first.unfinished() == []
    assert (await second.cancel(SLOT)).outcome is ControlOutcome.DONE
    (seen,) = await first.unfinished()
    assert (seen.run.token, seen.run.cancel) == (won.run.token, CancelReason.REQUESTED)
    assert await second.unfinished() == []  # it is none of its own
    await first.complete(won)
    assert await first.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)
    assert await first.unfinished() == []


@controlled
async def test_s21a_a_run_whose_holder_is_gone_is_cancelled_at_once(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    won = await first.win(SLOT)
    cluster.advance(2 * LEASE)
    await second.beat()
    cancelled = await second.cancel(SLOT)
    assert cancelled.outcome is ControlOutcome.DONE
    assert await second.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)
    assert (await first.complete(won)).outcome is TokenOutcome.ALREADY_COMPLETED


@controlled
async def test_s21a_a_second_cancel_changes_nothing(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    won = await one.win(SLOT)
    await one.cancel(SLOT)
    before = await one.seen(SLOT)
    cluster.advance(SECOND)
    assert (await one.cancel(SLOT)).outcome is ControlOutcome.DONE
    assert (await one.seen(SLOT)).run.cancelled_at == before.run.cancelled_at
    cluster.advance(LEASE // 2)
    await one.beat()
    assert (await one.renew(won)).outcome is TokenOutcome.FENCED  # the grace is over
