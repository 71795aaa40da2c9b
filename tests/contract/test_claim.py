"""First claims: one winner a slot, neither early nor late (S2, S10, S11, S13)."""

from __future__ import annotations

import pytest

from anarchon_server.core.model import AttemptCause, Outcome, OverlapPolicy, RunState, Trigger
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import DAY, JOB, LEASE, PERIOD, SECOND, T0, Cluster, Node, definition

SLOT = T0 + PERIOD


async def test_s10_a_slot_has_one_winner(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    won = await first.claim(SLOT)
    lost = await second.claim(SLOT)
    assert (won.outcome, lost.outcome) == (ClaimOutcome.WON, ClaimOutcome.LOST)
    assert won.run is not None
    assert lost.run is not None
    assert won.run.run == lost.run.run, "the loser sees who holds it"
    run = won.run.run
    assert (run.state, run.trigger, run.attempt) == (RunState.CLAIMED, Trigger.SCHEDULE, 1)
    assert run.current is not None
    assert run.current.instance_id == first.instance.instance_id
    assert run.current.cause is AttemptCause.CLAIM
    assert run.current.claimed_at == SLOT
    assert won.run.lease_left_ms == LEASE


async def test_s10_a_slot_has_one_winner_also_where_one_before_it_is_not_settled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    allow = {"overlap": OverlapPolicy.ALLOW}
    cluster.advance_to(SLOT + PERIOD)
    await first.win(SLOT + PERIOD, **allow)
    assert await first.settled() == T0
    for node in two:
        assert (await node.claim(SLOT + PERIOD, **allow)).outcome is ClaimOutcome.LOST
    await second.win(SLOT, **allow)


async def test_s10_a_batch_with_two_claims_of_a_slot_has_one_winner(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    reply = await one.store.claim([one.wish(SLOT), one.wish(SLOT)])
    assert [a.outcome for a in reply.answers] == [ClaimOutcome.WON, ClaimOutcome.LOST]


async def test_s11_a_repeat_with_the_same_token_has_won_and_refreshes_the_lease(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    await one.ask(claim)
    cluster.advance(7 * SECOND)
    again = await one.ask(claim)
    assert again.outcome is ClaimOutcome.WON
    assert again.run is not None
    assert again.run.lease_left_ms == LEASE
    assert again.run.run.attempt == 1


async def test_s11_a_repeat_wins_even_after_its_deadline(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT, start_deadline_ms=3 * SECOND)
    await one.ask(claim)
    cluster.advance(4 * SECOND)
    assert (await one.ask(claim)).outcome is ClaimOutcome.WON


async def test_s11_a_repeat_wins_even_when_its_lease_is_over_and_nobody_took_it(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    await one.ask(claim)
    cluster.advance(LEASE + SECOND)
    again = await one.ask(claim)
    assert again.outcome is ClaimOutcome.WON
    assert again.run is not None
    assert again.run.lease_left_ms == LEASE


async def test_s11_a_delayed_duplicate_of_a_finished_run_does_not_win(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    won = await one.ask(claim)
    assert won.run is not None
    await one.complete(won.run)
    late = await one.ask(claim)
    assert late.outcome is ClaimOutcome.LOST
    assert late.run is not None
    assert late.run.run.state is RunState.SUCCESS


async def test_s11_a_delayed_duplicate_does_not_win_back_what_was_taken_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    claim = first.wish(SLOT)
    won = await first.ask(claim)
    cluster.advance(LEASE)
    assert won.run is not None
    assert (await second.take_over(won.run)).outcome is ClaimOutcome.WON
    late = await first.ask(claim)
    assert late.outcome is ClaimOutcome.LOST
    assert late.run is not None
    assert late.run.run.attempt == 2


async def test_s11_a_delayed_duplicate_does_not_win_back_what_was_handed_over(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    won = await one.ask(claim)
    assert won.run is not None
    await one.release(won.run)
    assert (await one.ask(claim)).outcome is ClaimOutcome.LOST


@pytest.mark.parametrize(("before_ms", "outcome"), [(1_001, "early"), (1_000, "won"), (0, "won")])
async def test_s02_a_claim_is_early_more_than_a_second_before_its_slot(
    cluster: Cluster, one: Node, before_ms: int, outcome: str
) -> None:
    cluster.advance_to(SLOT - before_ms)
    answer = await one.claim(SLOT)
    assert answer.outcome == outcome
    cluster.advance_to(SLOT)
    assert (await one.claim(SLOT)).outcome == ("won" if outcome == "early" else "lost")


@pytest.mark.parametrize(("after_ms", "outcome"), [(5_000, "won"), (5_001, "late")])
async def test_s02_a_claim_is_late_after_its_start_deadline(
    cluster: Cluster, one: Node, after_ms: int, outcome: str
) -> None:
    cluster.advance_to(SLOT + after_ms)
    answer = await one.claim(SLOT, start_deadline_ms=5_000)
    assert answer.outcome == outcome
    assert (await one.run(SLOT) is None) == (outcome == "late"), "a late claim leaves no row"


async def test_s02_a_late_claim_still_loses_to_a_row_rather_than_being_late(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    await first.win(SLOT)
    cluster.advance(20 * SECOND)
    assert (await second.claim(SLOT)).outcome is ClaimOutcome.LOST


async def test_s20_a_settled_slot_without_a_row_is_late(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    assert (await one.claim(T0, start_deadline_ms=DAY)).outcome is ClaimOutcome.LATE
    cluster.advance_to(SLOT + 2 * PERIOD)
    won = await one.win(SLOT + PERIOD, previous_slot=None)
    await one.complete(won)
    assert (await one.claim(SLOT, start_deadline_ms=DAY)).outcome is ClaimOutcome.LATE


async def test_s20_a_chain_of_claims_moves_settled_along(cluster: Cluster, one: Node) -> None:
    for n in range(1, 6):
        cluster.advance_to(T0 + n * PERIOD)
        await one.complete(await one.win(T0 + n * PERIOD))
        assert await one.settled() == T0 + n * PERIOD


async def test_s20_a_claim_that_jumps_over_a_slot_leaves_settled_until_a_plan_repairs_it(
    cluster: Cluster, one: Node
) -> None:
    """20 won before 10, then 10, then 30."""
    ten, twenty, thirty = (T0 + n * SECOND for n in (10, 20, 30))
    cluster.advance_to(twenty)
    await one.complete(await one.win(twenty))
    assert await one.settled() == T0
    await one.complete(await one.win(ten))
    assert await one.settled() == ten
    cluster.advance_to(thirty)
    await one.complete(await one.win(thirty))
    assert await one.settled() == ten, "20 is not known to be settled by this chain"
    cluster.advance(PERIOD + 1)
    answer = await one.plan([twenty, thirty], settled=ten)
    assert (answer.done, answer.settled, answer.missed) == (True, thirty, 0)
    cluster.advance_to(T0 + 40 * SECOND)
    await one.win(T0 + 40 * SECOND, start_deadline_ms=DAY)
    assert await one.settled() == T0 + 40 * SECOND


async def test_s13_a_full_instance_settles_nothing_where_nothing_is_in_the_way(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    full, other = two
    cluster.advance_to(SLOT)
    answer = await full.claim(SLOT, may_run=False)
    assert answer.outcome is ClaimOutcome.UNCHANGED
    assert await full.run(SLOT) is None
    assert await full.settled() == T0
    assert (await other.claim(SLOT)).outcome is ClaimOutcome.WON


async def test_s28_a_claim_of_a_schedule_the_store_does_not_know_is_unregistered(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    for wrong in ({"schedule_id": "every:7s"}, {"job": "other"}):
        assert (await one.claim(SLOT, **wrong)).outcome is ClaimOutcome.UNREGISTERED
    assert await one.history() == []


async def test_s17_the_fence_grows_with_every_claim_of_a_job(cluster: Cluster, one: Node) -> None:
    """Also for older slots, several in one batch, and when the clock has been set back."""
    await one.register(definition(), definition("b"))
    cluster.advance_to(T0 + 3 * PERIOD)
    wishes = [
        one.wish(
            T0 + n * PERIOD,
            overlap=OverlapPolicy.ALLOW,
            previous_slot=T0 + n * PERIOD - 1,
            start_deadline_ms=DAY,
        )
        for n in (3, 1, 2)
    ]
    reply = await one.store.claim(wishes)
    fences = [a.run.run.current.fence for a in reply.answers if a.run and a.run.run.current]
    assert len(fences) == 3
    assert fences == sorted(set(fences))
    assert fences[0] >= cluster.now * 1_000, "whole microseconds of the store's time"
    assert reply.fences == {JOB: fences[-1]}
    cluster.step(-PERIOD)
    won = await one.win(T0 + 2 * PERIOD + 500, overlap=OverlapPolicy.ALLOW, previous_slot=None)
    assert won.run.current is not None
    assert won.run.current.fence > fences[-1]


async def test_every_reply_has_the_stores_time_identity_and_fences(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """S1, S27a."""
    first, second = two
    cluster.advance_to(SLOT)
    claimed = await first.store.claim([first.wish(SLOT)])
    beat = await second.beat_reply(looks=((JOB, SLOT),))
    assert claimed.store_at == beat.store_at == SLOT
    assert claimed.store_id == beat.store_id != ""
    assert claimed.fences == beat.fences != {}


async def test_s31_namespaces_do_not_see_each_other(cluster: Cluster, one: Node) -> None:
    other = await cluster.node(namespace="other")
    await other.register()
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT), Outcome("mine"))
    theirs = await other.win(SLOT)
    assert theirs.run.attempt == 1
    assert len(await one.history()) == len(await other.history()) == 1
    assert [i.incarnation for i in (await other.store.instances()).answers] == ["inc-2"]


async def test_s14_a_batch_of_a_thousand_claims(cluster: Cluster, one: Node) -> None:
    jobs = [f"job-{n}" for n in range(1_000)]
    await one.register(*(definition(job) for job in jobs))
    cluster.advance_to(SLOT)
    reply = await one.store.claim([one.wish(SLOT, job=job) for job in jobs])
    assert {a.outcome for a in reply.answers} == {ClaimOutcome.WON}
    assert [a.run.run.job for a in reply.answers if a.run] == jobs, "in the batch's order"
    assert set(reply.fences) == set(jobs)
    assert len(await one.unfinished(jobs[7])) == 1
