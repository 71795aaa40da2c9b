"""Slots that nobody claimed in time (S20 with catch-up none; S2, I6)."""

from __future__ import annotations

from anarchon_server.core.model import OverlapPolicy, Reason, RunState, Trigger
from anarchon_server.core.store import ClaimOutcome, MissedSlot, Plan
from tests.contract.harness import DAY, PERIOD, SECOND, T0, Cluster, Node, definition

MISSED = (RunState.SKIPPED, Reason.MISSED)


def grid(first: int, last: int, period: int = PERIOD) -> list[int]:
    """The slots from `first` to `last`, both in seconds after T0."""
    return list(range(T0 + first * SECOND, T0 + last * SECOND + 1, period))


async def test_s20_missed_slots_are_recorded_and_settled(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 35 * SECOND)
    answer = await one.plan(grid(10, 20))
    assert (answer.done, answer.settled, answer.missed) == (True, T0 + 20 * SECOND, 2)
    assert await one.states() == {10: MISSED, 20: MISSED}
    run = await one.run(T0 + 10 * SECOND)
    assert run is not None
    assert (run.run.trigger, run.run.attempt, run.run.slots_covered) == (Trigger.SCHEDULE, 0, 0)
    assert run.attempts == ()
    assert (await one.claim(T0 + 10 * SECOND, start_deadline_ms=DAY)).outcome == "lost"
    cluster.advance_to(T0 + 35 * SECOND)
    assert (await one.claim(T0 + 30 * SECOND)).outcome is ClaimOutcome.WON
    assert await one.settled() == T0 + 30 * SECOND, "the chain goes on after a plan"


async def test_s20_a_slot_that_others_may_still_claim_in_time_is_not_missed(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """An instance 5 s fast plans: the store's clock decides."""
    fast, able = two
    cluster.advance_to(T0 + 20 * SECOND)
    answer = await fast.plan(grid(10, 20))
    assert (answer.done, answer.settled, answer.missed) == (True, T0, 0)
    assert (await able.claim(T0 + 10 * SECOND)).outcome is ClaimOutcome.WON


async def test_s20_a_plan_that_names_an_old_settled_changes_nothing(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 50 * SECOND)
    await first.plan(grid(10, 20))
    answer = await second.plan(grid(10, 30))
    assert (answer.done, answer.settled) == (False, T0 + 20 * SECOND)
    assert await first.states() == {10: MISSED, 20: MISSED}


async def test_s20_a_plan_of_an_unknown_schedule_changes_nothing(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 50 * SECOND)
    answer = await one.plan(grid(10, 20), schedule="every:7s")
    assert (answer.done, answer.settled) == (False, None)
    assert await one.history() == []


async def test_s20_settled_moves_over_slots_that_have_rows(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 20 * SECOND)
    await one.complete(await one.win(T0 + 20 * SECOND))
    cluster.advance_to(T0 + 50 * SECOND)
    answer = await one.plan(grid(10, 30))
    assert (answer.settled, answer.missed) == (T0 + 30 * SECOND, 2)
    assert await one.states() == {10: MISSED, 20: RunState.SUCCESS, 30: MISSED}


async def test_s20_a_plan_settles_what_was_claimed_before_it_came_too(
    cluster: Cluster, one: Node
) -> None:
    """After an outage: else each slot to come would find the one before its own unsettled."""
    cluster.advance_to(T0 + 30 * SECOND)
    assert (await one.claim(T0 + 20 * SECOND, overlap=OverlapPolicy.ALLOW)).outcome == "won"
    assert (await one.claim(T0 + 30 * SECOND, overlap=OverlapPolicy.ALLOW)).outcome == "won"
    assert await one.settled() == T0
    answer = await one.plan(grid(10, 40), deadline=15 * SECOND)
    assert (answer.done, answer.settled, answer.missed) == (True, T0 + 30 * SECOND, 1)
    assert await one.settled() == T0 + 30 * SECOND
    cluster.advance_to(T0 + 40 * SECOND)
    assert (await one.claim(T0 + 40 * SECOND, overlap=OverlapPolicy.ALLOW)).outcome == "won"
    assert await one.settled() == T0 + 40 * SECOND, "the chain goes on"


async def test_s20_a_plan_does_not_settle_past_a_slot_that_may_still_be_claimed(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + 40 * SECOND)
    assert (await one.claim(T0 + 40 * SECOND)).outcome == "won"
    answer = await one.plan(grid(10, 40), deadline=15 * SECOND)
    assert (answer.settled, answer.missed) == (T0 + 20 * SECOND, 2)
    assert (await one.claim(T0 + 30 * SECOND, overlap=OverlapPolicy.ALLOW)).outcome == "won"


async def test_s20_each_schedule_settles_by_itself(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Every 4 and every 5 side by side; a plan for the first moves no shared `settled` to 24."""
    fours, fives = two
    await fours.register(definition(period=4 * SECOND))
    await fives.register(definition(period=5 * SECOND))
    cluster.advance_to(T0 + 60 * SECOND)
    await fours.plan(grid(4, 24, 4 * SECOND), schedule="every:4s")
    assert await fours.settled(schedule="every:4s") == T0 + 24 * SECOND
    assert await fives.settled(schedule="every:5s") == T0
    answer = await fives.plan(grid(5, 25, 5 * SECOND), schedule="every:5s")
    assert (answer.done, answer.missed) == (True, 4), "20 has a row of the other schedule"
    assert sorted(await fours.states()) == [4, 5, 8, 10, 12, 15, 16, 20, 24, 25]


async def test_s20_a_missed_slot_is_told_from_one_that_is_still_in_time_by_its_own_deadline(
    cluster: Cluster, one: Node
) -> None:
    """What stands before a slot that is not missed yet stays unsettled with it (I6)."""
    cluster.advance_to(T0 + 40 * SECOND)
    slots = (
        MissedSlot(T0 + 10 * SECOND, 10 * SECOND),
        MissedSlot(T0 + 20 * SECOND, 60 * SECOND),
        MissedSlot(T0 + 30 * SECOND, 5 * SECOND),
    )
    plan = Plan("job", "every:10s", T0, slots)
    (answer,) = (await one.store.settle([plan])).answers
    assert (answer.settled, answer.missed) == (T0 + 10 * SECOND, 1)
    assert (await one.claim(T0 + 20 * SECOND, start_deadline_ms=60 * SECOND)).outcome == "won"


async def test_s20_past_the_limit_one_row_stands_for_the_rest(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 2_000 * SECOND)
    answer = await one.plan(grid(10, 1_500))
    assert answer.missed == 150
    rows = await one.history(limit=500)
    assert len(rows) == 101
    assert [seen.run.slots_covered for seen in rows] == [0] * 100 + [50]
    assert rows[-1].run.slot == T0 + 500 * SECOND, "the newest of the rest"
    assert rows[-2].run.slot == T0 + 510 * SECOND


async def test_s20_more_than_can_be_listed_counts_as_at_least_ten_thousand(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + DAY)
    answer = await one.plan(grid(3_600, 4_600), more=True, limit=10)
    assert answer.missed == 101
    rows = await one.history(limit=500)
    assert [seen.run.slots_covered for seen in rows] == [0] * 10 + [10_000]
    assert await one.settled() == T0 + 4_600 * SECOND


async def test_s20_where_there_were_older_slots_than_listed_a_row_says_so_however_few_are_left(
    cluster: Cluster, one: Node
) -> None:
    """The others that were listed have rows."""
    cluster.advance_to(T0 + 35 * SECOND)
    assert (await one.plan(grid(10, 20), more=True)).missed == 2
    covered = [(await one.seen(slot)).run.slots_covered for slot in grid(10, 20)]
    assert covered == [10_000, 0]


async def test_s20_every_slot_claimed_in_time_leaves_nothing_to_plan(
    cluster: Cluster, one: Node
) -> None:
    """For days: `settled` moves with the claims, so a look lists no old slots."""
    for n in range(1, 50):
        cluster.advance_to(T0 + n * PERIOD)
        await one.complete(await one.win(T0 + n * PERIOD))
    assert await one.settled() == T0 + 49 * PERIOD


async def test_i6_a_slot_lost_while_all_were_down_is_counted_after_pruning(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """All down for two days; on restart one instance prunes before another plans (S2)."""
    first, second = two
    cluster.advance_to(T0 + PERIOD)
    await first.complete(await first.win(T0 + PERIOD))
    cluster.advance(2 * DAY)
    await first.register()
    await second.register()
    await first.prune(history_ms=DAY)
    settled = await second.settled()
    assert settled == T0 + PERIOD, "the schedule is still the same stretch"
    slots = list(range(settled + PERIOD, settled + 300 * PERIOD, PERIOD))
    answer = await second.plan(slots, settled=settled)
    assert (answer.done, answer.missed) == (True, 299)


async def test_s02_what_was_pruned_is_not_planned_by_who_was_away_meanwhile(
    cluster: Cluster,
) -> None:
    """Its schedule was in nobody's use when the floor was raised above what it has settled."""
    away, other = await cluster.node(), await cluster.node()
    await away.register(definition(window=SECOND))
    fives = definition(period=5 * SECOND, window=SECOND)
    await other.register(fives)
    slot = T0 + 6 * PERIOD
    cluster.advance_to(slot)
    await other.register(fives)
    won = await other.win(slot, schedule_id="every:5s", previous_slot=None)
    await other.complete(won)
    cluster.advance(2 * PERIOD)
    await other.register(fives)
    assert await other.prune(history_ms=0, history_max=0) == 1
    answer = await away.plan(grid(10, 70))
    assert (answer.missed, answer.due, answer.settled) == (0, 0, slot)
    assert await other.history() == []


async def test_s20_a_plan_at_the_store_of_an_overlapping_claim(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The claim of a slot that has just been planned as missed loses; both ways round."""
    first, second = two
    cluster.advance_to(T0 + 21 * SECOND)
    await first.plan([T0 + PERIOD])
    assert (await second.claim(T0 + PERIOD, start_deadline_ms=DAY)).outcome == "lost"
    await second.win(T0 + 2 * PERIOD)
    cluster.advance_to(T0 + 31 * SECOND)
    answer = await first.plan(grid(20, 20), settled=T0 + 2 * PERIOD)
    assert answer.missed == 0
    assert (await first.states())[20] is RunState.CLAIMED
