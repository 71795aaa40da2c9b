"""Claims on stores without leases (S2, S10, S11, S17, S18)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anarchon_server.core.errors import UnsupportedError
from anarchon_server.core.model import Outcome, OverlapPolicy, RunState
from anarchon_server.core.store import ClaimOutcome
from tests.contract.claim_only.traits import in_any_order, no_way_back, shared_history
from tests.contract.harness import JOB, PERIOD, SECOND, T0, Cluster, Node, definition

SLOT = T0 + PERIOD


async def test_what_it_cannot_do_it_says(one: Node) -> None:
    can = one.store.capabilities
    assert not can.leases
    assert not can.notifies
    assert can.overlap == {OverlapPolicy.ALLOW}
    with pytest.raises(UnsupportedError, match="catch_up is not supported by"):
        await one.plan([SLOT])


async def test_s10_a_slot_has_one_winner(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    won = await first.win(SLOT)
    assert (won.run.state, won.run.attempt, won.lease_left_ms) == (RunState.CLAIMED, 1, None)
    assert won.run.current is not None
    assert won.run.current.instance_id == "host:1"
    assert won.run.current.claimed_at == cluster.now
    wish = second.wish(SLOT)
    lost = await second.ask(wish)
    assert lost.outcome is ClaimOutcome.LOST
    assert lost.run is not None
    assert (lost.run.run.job, lost.run.run.slot) == (JOB, SLOT)
    assert lost.run.run.token != wish.token
    assert (await first.claim(SLOT)).outcome is ClaimOutcome.LOST


@shared_history
async def test_s10_a_loser_is_shown_the_winner(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    won = await first.win(SLOT)
    assert (await second.claim(SLOT)).run == won


async def test_s10_a_batch_with_two_claims_of_a_slot_has_one_winner(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    reply = await one.store.claim([one.wish(SLOT), one.wish(SLOT)])
    assert sorted(answer.outcome for answer in reply.answers) == ["lost", "won"]


async def test_s11_a_repeat_with_the_same_token_has_won(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    wish = one.wish(SLOT)
    assert (await one.ask(wish)).outcome is ClaimOutcome.WON
    for _ in range(3):
        again = await one.ask(wish)
        assert again.outcome is ClaimOutcome.WON
        assert again.run is not None
        assert again.run.run.token == wish.token


async def test_s11_a_repeat_over_another_connection_has_won(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    wish = first.wish(SLOT)
    await first.ask(wish)
    assert (await second.ask(wish)).outcome is ClaimOutcome.WON


async def test_s11_a_repeat_wins_even_after_its_deadline_and_without_room(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    wish = one.wish(SLOT)
    await one.ask(wish)
    cluster.advance(PERIOD + 60 * SECOND)
    assert (await one.ask(wish)).outcome is ClaimOutcome.WON
    assert (await one.ask(replace(wish, may_run=False))).outcome is ClaimOutcome.WON


async def test_s11_a_delayed_duplicate_of_a_finished_run_does_not_win(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    wish = one.wish(SLOT)
    won = await one.ask(wish)
    assert won.run is not None
    await one.complete(won.run)
    assert (await one.ask(wish)).outcome is ClaimOutcome.LOST


async def test_s02_a_claim_is_early_more_than_a_second_before_its_slot(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT - SECOND - 1)
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.EARLY
    cluster.advance(1)
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.WON


async def test_s02_a_claim_is_late_after_its_start_deadline(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT + PERIOD + 1)
    assert (await one.claim(SLOT)).outcome is ClaimOutcome.LATE
    assert (await one.claim(SLOT, start_deadline_ms=PERIOD + 1)).outcome is ClaimOutcome.WON


async def test_s02_a_late_claim_still_loses_to_the_winner_rather_than_being_late(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    await first.win(SLOT)
    cluster.advance(10 * PERIOD)
    assert (await second.claim(SLOT)).outcome is ClaimOutcome.LOST


async def test_s13_a_claim_without_room_changes_nothing(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    answer = await first.claim(SLOT, may_run=False)
    assert (answer.outcome, answer.run) == (ClaimOutcome.UNCHANGED, None)
    assert await first.history() == []
    await second.win(SLOT)
    assert (await first.claim(SLOT, may_run=False)).outcome is ClaimOutcome.LOST


async def test_s17_the_fence_is_the_slot_in_microseconds(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    won = await one.win(SLOT)
    assert won.run.current is not None
    assert won.run.current.fence == SLOT * 1_000


async def test_s18_runs_of_a_job_may_overlap(cluster: Cluster, one: Node) -> None:
    for n in (1, 2, 3):
        cluster.advance_to(T0 + n * PERIOD)
        await one.win(T0 + n * PERIOD)
    assert await one.states() == dict.fromkeys((10, 20, 30), RunState.CLAIMED)


@in_any_order
async def test_an_older_slot_is_claimed_after_a_newer_one(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 2 * PERIOD)
    await first.win(T0 + 2 * PERIOD)
    await second.win(T0 + PERIOD)


@no_way_back
async def test_i6_an_older_slot_is_missed_when_a_newer_one_was_claimed_and_is_said_to_be(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + 2 * PERIOD)
    await first.win(T0 + 2 * PERIOD)
    for node in (second, first, second):
        answer = await node.claim(T0 + PERIOD)
        assert answer.outcome is ClaimOutcome.OLD
        assert answer.run is not None
        assert (answer.run.run.state, answer.run.run.reason) == (RunState.SKIPPED, "missed")
    assert await first.states() == {10: (RunState.SKIPPED, "missed"), 20: RunState.CLAIMED}


async def test_every_reply_has_the_stores_time(cluster: Cluster, two: tuple[Node, Node]) -> None:
    """S1. Without a lease there is no fence that could fall (S27a)."""
    first, second = two
    cluster.advance_to(SLOT)
    claimed = await first.store.claim([first.wish(SLOT)])
    beat = await second.beat_reply()
    assert claimed.store_at == beat.store_at == SLOT
    assert claimed.store_id == beat.store_id
    assert claimed.fences == beat.fences == {}


async def test_s31_namespaces_do_not_see_each_other(cluster: Cluster, one: Node) -> None:
    other = await cluster.node(namespace="other")
    await other.register()
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT), Outcome("mine"))
    await other.win(SLOT)
    assert len(await one.history()) == len(await other.history()) == 1


async def test_s14_a_batch_of_a_thousand_claims(cluster: Cluster, one: Node) -> None:
    jobs = [f"job-{n}" for n in range(1_000)]
    await one.register(*(definition(job) for job in jobs))
    cluster.advance_to(SLOT)
    reply = await one.store.claim([one.wish(SLOT, job=job) for job in jobs])
    assert {a.outcome for a in reply.answers} == {ClaimOutcome.WON}
    assert [a.run.run.job for a in reply.answers if a.run] == jobs, "in the batch's order"
    assert [a.run.run.slot for a in reply.answers if a.run] == [SLOT] * 1_000


async def test_a_batch_of_nothing_is_answered_with_nothing(one: Node) -> None:
    assert (await one.store.claim([])).answers == ()
    assert (await one.store.complete([])).answers == ()
    assert (await one.store.release([])).answers == ()
