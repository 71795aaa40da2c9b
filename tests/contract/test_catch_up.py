"""Which missed slots are run after all (S20: latest and all; none is in `test_settle`)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.model import (
    AttemptCause,
    CatchUpPolicy,
    OverlapPolicy,
    Reason,
    RunState,
    RunView,
    Trigger,
)
from anarchon_server.core.store import ClaimOutcome, MissedSlot, Plan
from tests.contract.harness import DAY, PERIOD, SECOND, T0, Cluster, Node, able, definition

MISSED = (RunState.SKIPPED, Reason.MISSED)
LATEST: dict[str, Any] = {"catch_up": CatchUpPolicy.LATEST, "window_ms": DAY}
ALL: dict[str, Any] = {"catch_up": CatchUpPolicy.ALL, "window_ms": DAY}

pytestmark = pytest.mark.parametrize(
    "backend", able(lambda can: CatchUpPolicy.ALL in can.catch_up), indirect=True
)


def slots(*numbers: int) -> list[int]:
    """The n-th slots after T0."""
    return [T0 + n * PERIOD for n in numbers]


async def numbers_of(node: Node, state: RunState) -> list[int]:
    """The numbers of the slots whose run is in a state."""
    found = await node.history(states=frozenset({state}), limit=500)
    return sorted((seen.run.slot - T0) // PERIOD for seen in found)


async def row(node: Node, number: int) -> RunView:
    seen = await node.run(T0 + number * PERIOD)
    assert seen is not None
    return seen


async def test_s20_latest_runs_the_newest_missed_slot_only(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 4 * PERIOD + 1)
    answer = await one.plan(slots(1, 2, 3), **LATEST)
    assert (answer.done, answer.settled, answer.missed, answer.due) == (True, *slots(3), 2, 1)
    assert await one.states() == {10: MISSED, 20: MISSED, 30: RunState.DUE}
    due = (await row(one, 3)).run
    assert (due.trigger, due.attempt, due.window_ms, due.ended_at) == (
        Trigger.CATCH_UP,
        0,
        DAY,
        None,
    )
    won = await one.win(*slots(3), start_deadline_ms=SECOND)
    assert won.run.current is not None
    assert (won.run.trigger, won.run.current.cause) == (Trigger.CATCH_UP, AttemptCause.CLAIM)
    await one.complete(won)
    assert await one.states() == {10: MISSED, 20: MISSED, 30: RunState.SUCCESS}


async def test_s20_the_newest_missed_slot_is_the_newest_that_has_no_row(
    cluster: Cluster, one: Node
) -> None:
    """20 was won before 10; 10 was nobody's."""
    cluster.advance_to(T0 + 2 * PERIOD)
    await one.complete(await one.win(*slots(2)))
    cluster.advance_to(T0 + 3 * PERIOD + 1)
    answer = await one.plan(slots(1, 2), **LATEST)
    assert (answer.settled, answer.missed, answer.due) == (*slots(2), 0, 1)
    assert await one.states() == {10: RunState.DUE, 20: RunState.SUCCESS}


async def test_s20_all_runs_the_newest_up_to_the_limit_and_counts_the_rest(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 12 * PERIOD)
    answer = await one.plan(slots(*range(1, 11)), **ALL, limit=3)
    assert (answer.missed, answer.due) == (7, 3)
    assert await numbers_of(one, RunState.DUE) == [8, 9, 10]
    assert await numbers_of(one, RunState.SKIPPED) == [4, 5, 6, 7]
    assert [(await row(one, n)).run.slots_covered for n in (4, 5, 6, 7)] == [4, 0, 0, 0]


async def test_s20_none_older_than_the_window_is_run(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 10 * PERIOD)
    recent = ALL | {"window_ms": 7 * PERIOD}
    answer = await one.plan(slots(*range(1, 9)), **recent)
    assert (answer.missed, answer.due) == (2, 6)
    assert await numbers_of(one, RunState.DUE) == [3, 4, 5, 6, 7, 8]


async def test_s20_latest_runs_nothing_where_all_is_too_old(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 10 * PERIOD)
    answer = await one.plan(slots(1, 2), **LATEST | {"window_ms": PERIOD})
    assert (answer.missed, answer.due) == (2, 0)


async def test_s20_slots_still_in_time_are_neither_missed_nor_due(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """An instance 5 s fast plans: the store's clock decides."""
    fast, able_one = two
    cluster.advance_to(T0 + 25 * SECOND)
    answer = await fast.plan(slots(1, 2), **ALL)
    assert (answer.settled, answer.due) == (*slots(1), 1)
    await able_one.win(*slots(2), overlap=OverlapPolicy.ALLOW)


@pytest.mark.parametrize("policy", [LATEST, ALL])
async def test_s20_of_two_plans_one_is_carried_out(
    cluster: Cluster, two: tuple[Node, Node], policy: dict[str, Any]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 4 * PERIOD)
    plan = Plan("job", "every:10s", T0, tuple(MissedSlot(s, PERIOD) for s in slots(1, 2)), **policy)
    answers = [(await node.store.settle([plan])).answers[0] for node in (first, second)]
    assert [answer.done for answer in answers] == [True, False]
    (answer,) = (await second.store.settle([plan])).answers
    assert (answer.done, answer.settled, answer.due) == (False, *slots(2), 0)


async def test_s20_two_plans_of_one_batch_see_each_other(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 5 * PERIOD)
    plans = [
        Plan("job", "every:10s", settled, (MissedSlot(slot, PERIOD),), **LATEST)
        for settled, slot in ((T0, T0 + PERIOD), (T0 + PERIOD, T0 + 2 * PERIOD))
    ]
    answers = (await one.store.settle(plans)).answers
    assert [(a.done, a.missed, a.due) for a in answers] == [(True, 0, 1), (True, 1, 1)]
    assert await one.states() == {10: MISSED, 20: RunState.DUE}


async def test_s20_due_rows_are_run_oldest_first(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(T0 + 4 * PERIOD + 1)
    await first.plan(slots(1, 2, 3), **ALL)
    assert (await second.claim(*slots(2))).outcome is ClaimOutcome.QUEUED
    running = await first.win(*slots(1))
    for number in (2, 3):
        assert (await second.claim(*slots(number))).outcome is ClaimOutcome.QUEUED
    await first.complete(running)
    assert (await second.claim(*slots(3))).outcome is ClaimOutcome.QUEUED
    answer = await first.complete(await second.win(*slots(2)))
    assert answer.due is not None
    assert [answer.due.run.slot] == slots(3)
    await second.win(*slots(3))


async def test_s20_with_allow_due_rows_do_not_wait(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 4 * PERIOD + 1)
    await one.plan(slots(1, 2, 3), **ALL)
    for number in (3, 1, 2):
        await one.win(*slots(number), overlap=OverlapPolicy.ALLOW)


async def test_s20_with_skip_fresh_slots_are_skipped_while_the_backlog_runs(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 4 * PERIOD)
    await one.plan(slots(1, 2), **ALL)
    running = await one.win(*slots(1))
    fresh = T0 + 4 * PERIOD
    assert (await one.claim(fresh)).outcome is ClaimOutcome.SKIPPED
    await one.complete(running)
    cluster.advance(PERIOD)
    await one.win(fresh + PERIOD)
    answer = await one.claim(*slots(2))
    assert answer.outcome is ClaimOutcome.QUEUED, "it waits for an unfinished run"


async def test_s20_the_backlog_does_not_grow_beyond_the_limit(cluster: Cluster, one: Node) -> None:
    """`all`, handlers slower than the period, or a full fleet, for long."""
    settled = T0
    for n in range(1, 8):
        cluster.advance_to(T0 + (n + 1) * PERIOD + 1)
        answer = await one.plan(slots(n), settled=settled, **ALL, limit=3)
        assert (answer.missed, answer.due) == (int(n > 3), 1)
        settled += PERIOD
    assert await numbers_of(one, RunState.DUE) == [5, 6, 7]
    assert await numbers_of(one, RunState.SKIPPED) == [1, 2, 3, 4]
    dropped = (await row(one, 4)).run
    assert (dropped.trigger, dropped.reason) == (Trigger.CATCH_UP, Reason.MISSED)
    assert dropped.ended_at == cluster.now


async def test_s20_of_latest_at_most_one_waits(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 4 * PERIOD + 1)
    await one.plan(slots(1), **LATEST)
    answer = await one.plan(slots(2, 3), settled=T0 + PERIOD, **LATEST)
    assert (answer.missed, answer.due) == (2, 1)
    assert await one.states() == {10: MISSED, 20: MISSED, 30: RunState.DUE}


async def test_s20_a_newer_caught_up_slot_stays_where_another_schedules_plan_adds_an_older_one(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    tens, fives = two
    await fives.register(definition(period=5 * SECOND))
    cluster.advance_to(T0 + 60 * SECOND)
    await tens.plan(slots(1, 2, 3), **LATEST)
    fifteen = [T0 + n * SECOND for n in (5, 10, 15)]
    answer = await fives.plan(fifteen, schedule="every:5s", **LATEST)
    assert (answer.missed, answer.due) == (2, 0), "10 has a row of the other schedule"
    assert await numbers_of(tens, RunState.DUE) == [3]


async def test_s20_runs_in_progress_and_triggered_ones_do_not_count_as_caught_up(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 3 * PERIOD + 1)
    await one.plan(slots(1), **LATEST)
    await one.win(*slots(1))
    await one.plan(slots(2), settled=T0 + PERIOD, **LATEST)
    assert await one.states() == {10: RunState.CLAIMED, 20: RunState.DUE}


async def test_s20_a_caught_up_run_is_taken_over_like_any_other(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 2 * PERIOD + 1)
    await first.plan(slots(1), **ALL)
    running = await first.win(*slots(1))
    await first.release(running, Reason.RUNNER_LOST)
    answer = await second.take_over(running)
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run is not None
    assert answer.run.run.current is not None
    assert answer.run.run.current.cause is AttemptCause.TAKEOVER


async def test_s20_an_instance_that_does_not_know_the_row_claims_it_as_a_fresh_slot(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 2 * PERIOD + 1)
    await first.plan(slots(1), **ALL)
    await second.win(*slots(1), previous_slot=None, schedule_id="every:3s")


async def test_s02_a_due_row_is_not_refused_for_its_age_nor_pruned(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 3 * PERIOD)
    await one.plan(slots(1), **ALL)
    cluster.advance(DAY // 2)
    await one.register()
    assert await one.prune(history_ms=0, history_max=0) == 0
    await one.win(*slots(1))


async def test_s19_a_caught_up_run_nobody_claimed_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 3 * PERIOD)
    await one.plan(slots(1), **ALL)
    cluster.advance_to(T0 + PERIOD + DAY)
    assert (await one.claim(*slots(1), may_run=False)).outcome is ClaimOutcome.UNCHANGED
    cluster.advance(1)
    assert (await one.claim(*slots(1), may_run=False)).outcome is ClaimOutcome.LOST
    assert await one.ended(*slots(1)) == (RunState.SKIPPED, Reason.ABANDONED)


async def test_s20_a_due_row_stays_before_a_clock_that_was_set_back(
    cluster: Cluster, one: Node
) -> None:
    """I7: it is not handed out before its slot."""
    cluster.advance_to(T0 + 3 * PERIOD)
    await one.plan(slots(1), **ALL)
    cluster.step(-25 * SECOND)
    answer = await one.claim(*slots(1))
    assert answer.outcome is ClaimOutcome.EARLY
    assert answer.run is not None
    cluster.step(25 * SECOND)
    await one.win(*slots(1))


async def test_s20_the_sweep_shows_what_waits(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(T0 + 3 * PERIOD + 1)
    await first.plan(slots(1, 2), **ALL)
    running = await first.win(*slots(1))
    await first.release(running)
    shown = await second.unfinished()
    assert [(s.run.slot, s.run.state, s.takeable) for s in shown] == [
        (*slots(1), RunState.INTERRUPTED, True),
        (*slots(2), RunState.DUE, False),
    ]
    (look,) = (await second.beat(looks=(("job", *slots(2)),))).looks
    assert look == shown[1]


async def test_s20_a_long_outage_is_planned_in_one_step_with_bounded_rows(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 5_000 * PERIOD)
    plan = slots(*range(1, 4_001))
    answer = await one.plan(plan, **ALL, limit=10)
    assert (answer.missed, answer.due, answer.settled) == (3_990, 10, plan[-1])
    rows = await one.history(limit=500)
    assert len(rows) == 10 + 10 + 1
    assert rows[-1].run.slots_covered == 3_980
