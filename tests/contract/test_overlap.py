"""A due slot that finds another run of its job unfinished (S18: skip and allow; S13)."""

from __future__ import annotations

import pytest

from anarchon_server.core.model import CancelReason, OverlapPolicy, Reason, RunState
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import DAY, LEASE, PERIOD, SECOND, T0, Cluster, Node

FIRST, SECOND_SLOT = T0 + PERIOD, T0 + 2 * PERIOD


async def test_s18_skip_records_the_slot_as_skipped_with_the_run_in_its_way(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(FIRST)
    await first.win(FIRST)
    cluster.advance_to(SECOND_SLOT)
    answer = await second.claim(SECOND_SLOT)
    assert answer.outcome is ClaimOutcome.SKIPPED
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason, run.blocking_slot) == (RunState.SKIPPED, Reason.OVERLAP, FIRST)
    assert (await first.claim(SECOND_SLOT)).outcome is ClaimOutcome.LOST
    assert await first.settled() == SECOND_SLOT


async def test_s13_a_full_instance_records_the_overlap(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST)
    cluster.advance_to(SECOND_SLOT)
    answer = await one.claim(SECOND_SLOT, may_run=False)
    assert answer.outcome is ClaimOutcome.SKIPPED
    assert await one.settled() == SECOND_SLOT


async def test_s18_a_claim_before_its_slot_waits_rather_than_being_skipped(
    cluster: Cluster, one: Node
) -> None:
    """Run 10 ends at 19.5; the claim of 20 arrives at 19.2."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST)
    cluster.advance_to(SECOND_SLOT - 800)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.EARLY
    assert await one.run(SECOND_SLOT) is None
    cluster.advance_to(SECOND_SLOT - 500)
    await one.complete(running)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.WON


async def test_s18_a_finished_run_does_not_block(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.complete(await one.win(FIRST))
    cluster.advance_to(SECOND_SLOT)
    await one.win(SECOND_SLOT)


async def test_s18_an_interrupted_run_with_attempts_left_blocks(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, lease_ms=3 * SECOND)
    cluster.advance_to(SECOND_SLOT)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.SKIPPED


async def test_s18_a_handed_over_run_blocks(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.release(await one.win(FIRST))
    cluster.advance_to(SECOND_SLOT)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.SKIPPED


async def test_s18_an_exhausted_run_whose_lease_is_over_is_ended_by_the_claim_that_finds_it(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, lease_ms=3 * SECOND, max_attempts=1)
    cluster.advance_to(SECOND_SLOT)
    await one.win(SECOND_SLOT)
    ended = await one.run(FIRST)
    assert ended is not None
    assert (ended.run.state, ended.run.reason) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)
    assert ended.attempts[0].state is RunState.INTERRUPTED


async def test_s18_an_exhausted_run_whose_lease_lives_blocks(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, max_attempts=1)
    cluster.advance_to(SECOND_SLOT)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.SKIPPED


@pytest.mark.parametrize("backend", ["memory-wall"], indirect=True)
@pytest.mark.parametrize("vouched", [True, False])
async def test_s18_an_exhausted_run_lives_on_when_the_clock_that_ends_it_has_jumped(
    cluster: Cluster, one: Node, *, vouched: bool
) -> None:
    """The store's clock jumps an hour; the last attempt lives; the next slot's claim comes."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, max_attempts=1)
    expected = cluster.now + PERIOD
    cluster.step(3_600 * SECOND)
    slot = FIRST + 3_600 * SECOND
    answer = await one.claim(
        slot, expected_at=expected if vouched else cluster.now, vouched=vouched
    )
    assert answer.outcome is ClaimOutcome.SKIPPED
    assert (await one.complete(running)).outcome == "recorded"


async def test_s18_a_cancelled_run_blocks_while_its_lease_lives_and_then_no_longer(
    cluster: Cluster, one: Node
) -> None:
    """`timeout` 5, the handler ignores it; the next slot is due."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST)
    cluster.advance(5 * SECOND)
    await one.renew(running, cancel=CancelReason.TIMEOUT)
    cluster.advance_to(SECOND_SLOT)
    assert (await one.claim(SECOND_SLOT)).outcome is ClaimOutcome.SKIPPED
    cluster.advance_to(T0 + 5 * PERIOD)
    await one.win(T0 + 5 * PERIOD)
    ended = await one.run(FIRST)
    assert ended is not None
    assert (ended.run.state, ended.run.reason) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s18_an_abandoned_run_does_not_block(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, window_ms=3_600 * SECOND)
    cluster.advance_to(FIRST + LEASE + 3_600 * SECOND)
    slot = cluster.now // PERIOD * PERIOD
    assert (await one.claim(slot, previous_slot=None)).outcome is ClaimOutcome.SKIPPED
    cluster.advance(PERIOD)
    await one.win(slot + PERIOD, previous_slot=None)
    ended = await one.run(FIRST)
    assert ended is not None
    assert (ended.run.state, ended.run.reason) == (RunState.FAILED, Reason.ABANDONED)


async def test_s02_a_run_of_25_hours_is_kept_and_taken_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """A row is never refused for its age: not by a deadline, `settled`, the floor or S19."""
    first, second = two
    cluster.advance_to(FIRST)
    running = await first.win(FIRST, lease_ms=3_600 * SECOND)
    for _ in range(26):
        cluster.advance(3_500 * SECOND)
        await first.renew(running, lease_ms=3_600 * SECOND)
    await second.register()
    await second.prune(history_ms=0, history_max=0)
    cluster.advance(3_601 * SECOND)
    assert cluster.now - FIRST > 25 * 3_600 * SECOND
    seen = await second.look(FIRST)
    assert seen is not None
    assert (await second.take_over(seen)).outcome is ClaimOutcome.WON


async def test_s18_allow_lets_runs_be_independent(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(SECOND_SLOT)
    allow = {"overlap": OverlapPolicy.ALLOW}
    await first.win(FIRST, **allow)
    await second.win(SECOND_SLOT, **allow)
    assert await first.states() == {10: RunState.CLAIMED, 20: RunState.CLAIMED}


async def test_s18_allow_does_not_end_other_runs(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, lease_ms=3 * SECOND, max_attempts=1)
    cluster.advance_to(SECOND_SLOT)
    await one.win(SECOND_SLOT, overlap=OverlapPolicy.ALLOW)
    seen = await one.look(FIRST)
    assert seen is not None
    assert seen.run.state is RunState.INTERRUPTED


async def test_s18_the_oldest_run_in_the_way_is_named(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + 3 * PERIOD)
    late = {"start_deadline_ms": DAY, "overlap": OverlapPolicy.ALLOW}
    await one.win(SECOND_SLOT, **late)
    await one.win(FIRST, **late)
    answer = await one.claim(T0 + 3 * PERIOD)
    assert answer.run is not None
    assert answer.run.run.blocking_slot == FIRST


async def test_s18_claims_of_one_batch_see_each_other(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SECOND_SLOT)
    reply = await one.store.claim([one.wish(FIRST, start_deadline_ms=DAY), one.wish(SECOND_SLOT)])
    assert [a.outcome for a in reply.answers] == [ClaimOutcome.WON, ClaimOutcome.SKIPPED]
