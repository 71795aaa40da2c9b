"""A due slot that finds another run of its job unfinished (S18: skip and allow; S13)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
    Trigger,
)
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import DAY, LEASE, PERIOD, SECOND, T0, Cluster, Node, able

FIRST, SECOND_SLOT, THIRD = T0 + PERIOD, T0 + 2 * PERIOD, T0 + 3 * PERIOD
RAISED = Outcome(failure=Failure("E"))
OVERLAPPED = (RunState.SKIPPED, Reason.OVERLAP)
QUEUE: dict[str, Any] = {"overlap": OverlapPolicy.QUEUE}
CANCEL: dict[str, Any] = {"overlap": OverlapPolicy.CANCEL}
ALLOW: dict[str, Any] = {"overlap": OverlapPolicy.ALLOW}

queues = pytest.mark.parametrize(
    "backend", able(lambda can: OverlapPolicy.QUEUE in can.overlap), indirect=True
)
retries = pytest.mark.parametrize("backend", able(lambda can: can.retries), indirect=True)
controls = pytest.mark.parametrize("backend", able(lambda can: can.control), indirect=True)


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


# Queue


@queues
async def test_s18_queue_waits_and_is_claimed_when_the_other_has_ended(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(FIRST)
    running = await first.win(FIRST, **QUEUE)
    cluster.advance_to(SECOND_SLOT)
    answer = await second.claim(SECOND_SLOT, **QUEUE)
    assert answer.outcome is ClaimOutcome.QUEUED
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.trigger, run.blocking_slot) == (RunState.DUE, Trigger.SCHEDULE, FIRST)
    assert (run.attempt, run.window_ms, answer.run.lease_left_ms) == (0, DAY, None)
    assert await first.settled() == SECOND_SLOT
    assert (await first.claim(SECOND_SLOT, **QUEUE)).outcome is ClaimOutcome.QUEUED
    ending = await first.complete(running)
    assert ending.due is not None
    assert ending.due.run.slot == SECOND_SLOT, "the answer to the result carries the oldest"
    won = await first.win(SECOND_SLOT, **QUEUE)
    assert won.run.current is not None
    assert (won.run.attempt, won.run.current.cause) == (1, AttemptCause.CLAIM)
    assert (await first.complete(won)).due is None
    assert (await second.claim(SECOND_SLOT, **QUEUE)).outcome is ClaimOutcome.LOST
    assert await first.states() == {10: RunState.SUCCESS, 20: RunState.SUCCESS}


@queues
async def test_s18_a_result_that_does_not_end_its_run_carries_no_due_run(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **QUEUE)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **QUEUE)
    stopped = Outcome(stopped=CancelReason.SHUTDOWN)
    assert (await one.complete(running, stopped)).due is None, "handed over: it goes on"
    assert (await one.complete(running)).due is not None
    assert (await one.complete(running)).due is None, "a repeat ends nothing"


@queues
async def test_s18_a_result_carries_the_oldest_of_the_runs_that_wait(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(THIRD)
    running = await one.win(THIRD, **QUEUE)
    cluster.advance(SECOND)
    caught_up = await one.plan([FIRST], catch_up=CatchUpPolicy.ALL, window_ms=DAY)
    assert caught_up.due == 1
    assert (await one.triggered(overlap=OverlapPolicy.QUEUE)).run.slot > THIRD
    answer = await one.complete(running)
    assert answer.due is not None
    assert answer.due.run.slot == FIRST


@queues
async def test_s18_a_newer_slot_replaces_the_queued_one(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, **QUEUE)
    for slot in (SECOND_SLOT, THIRD):
        cluster.advance_to(slot)
        assert (await one.claim(slot, **QUEUE)).outcome is ClaimOutcome.QUEUED
    assert await one.states() == {10: RunState.CLAIMED, 20: OVERLAPPED, 30: RunState.DUE}
    replaced = await one.run(SECOND_SLOT)
    assert replaced is not None
    assert (replaced.run.blocking_slot, replaced.run.ended_at) == (FIRST, THIRD)


@queues
async def test_s18_an_older_slot_does_not_replace_the_queued_one(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, **QUEUE)
    cluster.advance_to(THIRD)
    late = {"start_deadline_ms": DAY}
    assert (await one.claim(THIRD, **QUEUE)).outcome is ClaimOutcome.QUEUED
    answer = await one.claim(SECOND_SLOT, **QUEUE, **late)
    assert answer.outcome is ClaimOutcome.SKIPPED
    assert answer.run is not None
    assert answer.run.run.blocking_slot == FIRST, "not the newer one, which waits for the same run"
    assert await one.states() == {10: RunState.CLAIMED, 20: OVERLAPPED, 30: RunState.DUE}


@queues
async def test_s02_a_queued_slot_has_no_deadline(cluster: Cluster, one: Node) -> None:
    """10 holds, 15 is queued, 10 ends at 20; claim of 15 with `start_deadline` 3."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **QUEUE)
    slot = FIRST + 5 * SECOND
    soon = {"start_deadline_ms": 3 * SECOND, "previous_slot": FIRST}
    cluster.advance_to(slot)
    assert (await one.claim(slot, **QUEUE, **soon)).outcome is ClaimOutcome.QUEUED
    cluster.advance_to(SECOND_SLOT)
    assert (await one.plan([slot], settled=slot)).missed == 0
    await one.complete(running)
    await one.win(slot, **QUEUE, **soon)


@queues
async def test_s18_a_fresh_slot_goes_behind_the_queued_one_also_when_nothing_runs(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It falls due between the end of a run and the claim of what was caught up or triggered."""
    first, second = two
    cluster.advance_to(THIRD + PERIOD + 1)
    await first.plan([FIRST, SECOND_SLOT, THIRD], catch_up=CatchUpPolicy.ALL, window_ms=DAY)
    fresh = THIRD + PERIOD
    answer = await second.claim(fresh, **QUEUE)
    assert answer.outcome is ClaimOutcome.QUEUED
    assert answer.run is not None
    assert answer.run.run.blocking_slot == FIRST
    assert (await second.claim(fresh, **QUEUE)).outcome is ClaimOutcome.QUEUED
    for slot in (FIRST, SECOND_SLOT, THIRD, fresh):
        await first.complete(await first.win(slot, **QUEUE))


@queues
async def test_s18_a_queued_slot_that_nobody_claimed_yet_is_replaced_and_the_newer_one_runs(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **QUEUE)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **QUEUE)
    cluster.advance(SECOND)
    await one.complete(running)
    cluster.advance_to(THIRD)
    answer = await one.claim(THIRD, **QUEUE)
    assert answer.outcome is ClaimOutcome.QUEUED
    assert answer.run is not None
    assert answer.run.run.blocking_slot == 0, "nothing is in its way any more"
    replaced = await one.run(SECOND_SLOT)
    assert replaced is not None
    assert replaced.run.blocking_slot == FIRST
    await one.win(THIRD, **QUEUE)
    assert await one.states() == {10: RunState.SUCCESS, 20: OVERLAPPED, 30: RunState.CLAIMED}


@queues
async def test_s20_an_outages_backlog_is_not_replaced_by_a_queued_slot(
    cluster: Cluster, one: Node
) -> None:
    """`queue` and `all`: ten Due rows, and a fresh slot is queued."""
    cluster.advance_to(T0 + 12 * PERIOD)
    slots = [T0 + n * PERIOD for n in range(1, 11)]
    answer = await one.plan(slots, catch_up=CatchUpPolicy.ALL, window_ms=DAY)
    assert (answer.missed, answer.due) == (0, 10)
    for slot in (T0 + 11 * PERIOD, T0 + 12 * PERIOD):
        await one.claim(slot, **QUEUE)
    states = await one.states()
    assert [states[n * 10] for n in range(1, 11)] == [RunState.DUE] * 10
    assert (states[110], states[120]) == (OVERLAPPED, RunState.DUE)


@controls
async def test_s18_a_scheduled_slot_does_not_replace_a_triggered_run_that_waits(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **QUEUE)
    cluster.advance(SECOND)
    made = await one.triggered(payload=b"kept", **QUEUE)
    for slot in (SECOND_SLOT, THIRD):
        cluster.advance_to(slot)
        answer = await one.claim(slot, **QUEUE)
        assert answer.outcome is ClaimOutcome.QUEUED
    await one.complete(running)
    assert (await one.claim(THIRD, **QUEUE)).outcome is ClaimOutcome.QUEUED, "the older goes first"
    won = await one.claim(made.run.slot, **QUEUE)
    assert (won.outcome, won.payload) == (ClaimOutcome.WON, b"kept")


@queues
async def test_s13_a_full_instance_queues_the_slot(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    full, free = two
    cluster.advance_to(FIRST)
    running = await full.win(FIRST, **QUEUE)
    cluster.advance_to(SECOND_SLOT)
    answer = await full.claim(SECOND_SLOT, **QUEUE, may_run=False)
    assert answer.outcome is ClaimOutcome.QUEUED
    await full.complete(running)
    answer = await full.claim(SECOND_SLOT, **QUEUE, may_run=False)
    assert answer.outcome is ClaimOutcome.UNCHANGED
    await free.win(SECOND_SLOT, **QUEUE)


@queues
@pytest.mark.parametrize("policy", [OverlapPolicy.QUEUE, OverlapPolicy.CANCEL])
async def test_s18_a_claim_before_its_slot_neither_queues_nor_cancels(
    cluster: Cluster, one: Node, policy: OverlapPolicy
) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST)
    cluster.advance_to(SECOND_SLOT - 500)
    answer = await one.claim(SECOND_SLOT, overlap=policy)
    assert answer.outcome is ClaimOutcome.EARLY
    assert await one.states() == {10: RunState.CLAIMED}
    assert (await one.seen(FIRST)).run.cancel is None


@queues
async def test_s18_a_due_run_waits_also_for_an_interrupted_one(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(FIRST)
    running = await first.win(FIRST, **QUEUE)
    cluster.advance_to(SECOND_SLOT)
    await first.claim(SECOND_SLOT, **QUEUE)
    await first.release(running, Reason.RUNNER_LOST)
    assert (await second.claim(SECOND_SLOT, **QUEUE)).outcome is ClaimOutcome.QUEUED
    taken = await second.take_over(running, **QUEUE)
    assert taken.outcome is ClaimOutcome.WON, "what was begun does not wait for what was not"


@queues
async def test_s18_a_takeover_does_not_wait_for_an_older_run_that_waits(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The older slot was caught up while the newer one ran."""
    first, second = two
    cluster.advance_to(SECOND_SLOT + SECOND)
    running = await first.win(SECOND_SLOT, **QUEUE)
    caught_up = await first.plan([FIRST], catch_up=CatchUpPolicy.LATEST, window_ms=DAY)
    assert caught_up.due == 1
    await first.release(running, Reason.RUNNER_LOST)
    assert (await second.claim(FIRST, **QUEUE)).outcome is ClaimOutcome.QUEUED
    assert (await second.take_over(running, **QUEUE)).outcome is ClaimOutcome.WON


@queues
async def test_s18_a_claim_before_its_slot_waits_also_where_an_older_run_waits(
    cluster: Cluster, one: Node
) -> None:
    """Until then the older one may have been run."""
    cluster.advance_to(THIRD - 500)
    assert (await one.plan([FIRST], catch_up=CatchUpPolicy.LATEST, window_ms=DAY)).due == 1
    assert (await one.claim(THIRD, **QUEUE)).outcome is ClaimOutcome.EARLY
    assert await one.run(THIRD) is None
    cluster.advance_to(THIRD)
    assert (await one.claim(THIRD, **QUEUE)).outcome is ClaimOutcome.QUEUED


@queues
async def test_s18_the_claim_of_a_due_run_ends_what_is_over_for_good(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    await one.win(FIRST, **QUEUE, max_attempts=1)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **QUEUE)
    cluster.advance_to(FIRST + LEASE)
    await one.win(SECOND_SLOT, **QUEUE)
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)


@queues
async def test_i4_a_takeover_waits_for_another_run_in_progress(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Two runs that were begun: the policy was `allow` then, and is not now."""
    first, second = two
    cluster.advance_to(SECOND_SLOT)
    older = await first.win(FIRST, **ALLOW)
    newer = await first.win(SECOND_SLOT, **ALLOW)
    await first.release(older)
    assert (await second.take_over(older, **QUEUE)).outcome is ClaimOutcome.QUEUED
    assert (await second.take_over(older)).outcome is ClaimOutcome.QUEUED, "skip is no other"
    await first.release(newer)
    assert (await second.take_over(newer, **QUEUE)).outcome is ClaimOutcome.QUEUED
    assert (await second.take_over(older, **QUEUE)).outcome is ClaimOutcome.WON, "the older first"
    assert (await second.take_over(newer, **ALLOW)).outcome is ClaimOutcome.WON


@queues
async def test_s19_a_due_run_that_nobody_claimed_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    """Never while something is in its way; by the first look; without room."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **QUEUE, lease_ms=3_600 * SECOND)
    cluster.advance_to(SECOND_SLOT)
    hour = {"window_ms": 1_800 * SECOND}
    await one.claim(SECOND_SLOT, **QUEUE, **hour)
    cluster.advance(1_801 * SECOND)
    look = {"may_run": False, **QUEUE, **hour}
    assert (await one.claim(SECOND_SLOT, **look)).outcome is ClaimOutcome.QUEUED
    await one.complete(running)
    assert (await one.claim(SECOND_SLOT, **look)).outcome is ClaimOutcome.LOST
    assert await one.ended(SECOND_SLOT) == (RunState.SKIPPED, Reason.ABANDONED)


@queues
async def test_s19_nothing_is_abandoned_beside_a_run_in_progress(
    cluster: Cluster, one: Node
) -> None:
    """It could not go on, and the next slot's claim must not end it for that."""
    cluster.advance_to(SECOND_SLOT)
    long = {"lease_ms": 3_600 * SECOND, "window_ms": 60 * SECOND}
    released = await one.win(FIRST, **ALLOW, **long)
    await one.win(SECOND_SLOT, **ALLOW, **long)
    await one.release(released)
    cluster.advance_to(THIRD + 60 * SECOND)
    assert (await one.claim(cluster.now)).outcome is ClaimOutcome.SKIPPED
    assert (await one.seen(FIRST)).run.state is RunState.INTERRUPTED


# Cancel


@queues
async def test_s18_cancel_asks_the_other_run_to_stop_and_waits_for_it(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(FIRST)
    running = await first.win(FIRST, **CANCEL)
    cluster.advance_to(SECOND_SLOT)
    answer = await second.claim(SECOND_SLOT, **CANCEL)
    assert answer.outcome is ClaimOutcome.QUEUED
    told = await first.renew(running)
    assert told.run is not None
    assert told.run.run.cancel is CancelReason.SUPERSEDED, "its holder learns of it"
    assert (await second.claim(SECOND_SLOT, **CANCEL)).outcome is ClaimOutcome.QUEUED
    ending = await first.complete(running, Outcome(stopped=CancelReason.SUPERSEDED))
    assert ending.outcome == "recorded"
    assert ending.due is not None
    await second.win(SECOND_SLOT, **CANCEL)
    assert await first.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)


@queues
@pytest.mark.parametrize("outcome", [Outcome("done"), RAISED])
async def test_s21a_a_superseded_run_is_failed_whatever_its_handler_says(
    cluster: Cluster, one: Node, outcome: Outcome
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL, retries=3)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **CANCEL)
    await one.complete(running, outcome, retry_in_ms=0)
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)


@queues
async def test_s21a_a_handler_that_ignores_cancels_is_renewed_for_one_grace_only(
    cluster: Cluster, one: Node
) -> None:
    """Period 3, `cancel_grace` 5: every new cancel starts the grace again, and it lives for ever."""
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL)
    until = FIRST + 3 * SECOND + 5 * SECOND
    for slot in range(FIRST + 3 * SECOND, until + 1, 3 * SECOND):
        cluster.advance_to(slot)
        await one.claim(slot, **CANCEL, previous_slot=slot - 3 * SECOND)
        assert (await one.renew(running)).outcome == "renewed"
    cluster.advance_to(until)
    assert (await one.renew(running)).outcome == "renewed"
    cluster.advance(1)
    assert (await one.renew(running)).outcome == "fenced"
    newest = FIRST + 6 * SECOND
    assert (await one.claim(newest, **CANCEL)).outcome is ClaimOutcome.QUEUED, "its lease is left"
    cluster.advance_to(until + LEASE)
    await one.win(newest, **CANCEL)
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)


@queues
async def test_s21a_a_superseded_run_whose_runner_died_is_not_taken_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(FIRST)
    running = await first.win(FIRST, **CANCEL)
    cluster.advance_to(SECOND_SLOT)
    await second.claim(SECOND_SLOT, **CANCEL)
    cluster.advance_to(FIRST + LEASE)
    assert (await second.take_over(running, **CANCEL)).outcome is ClaimOutcome.LOST
    assert await first.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)


@queues
async def test_s21a_the_release_of_a_superseded_run_ends_it(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **CANCEL)
    await one.release(running, Reason.HANDED_OVER)
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)
    await one.win(SECOND_SLOT, **CANCEL)


@queues
@pytest.mark.parametrize("how", ["handed over", "lapsed"])
async def test_s18_where_the_cancel_ends_the_other_run_at_once_the_slot_is_claimed_in_the_same_step(
    cluster: Cluster, one: Node, how: str
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL, lease_ms=LEASE if how == "handed over" else 9_000)
    if how == "handed over":
        await one.release(running)
    cluster.advance_to(SECOND_SLOT)
    await one.win(SECOND_SLOT, **CANCEL)
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)
    assert await one.settled() == SECOND_SLOT


@retries
async def test_s18_a_run_that_is_to_be_retried_is_superseded_at_once(
    cluster: Cluster, one: Node
) -> None:
    """`cancel`, the run in the way is Retrying: the slot must not be left Due."""
    cluster.advance_to(FIRST)
    await one.complete(await one.win(FIRST, **CANCEL, retries=1), RAISED, retry_in_ms=DAY)
    cluster.advance_to(SECOND_SLOT)
    await one.win(SECOND_SLOT, **CANCEL)
    ended = await one.run(FIRST)
    assert ended is not None
    assert (ended.run.state, ended.run.reason) == (RunState.FAILED, Reason.SUPERSEDED)
    assert (ended.attempts[0].state, ended.attempts[0].reason) == (RunState.FAILED, "")


@retries
async def test_s21a_a_timeout_that_would_be_retried_is_not_when_a_newer_slot_supersedes_it(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL, retries=1)
    await one.renew(running, cancel=CancelReason.TIMEOUT)
    cluster.advance_to(SECOND_SLOT)
    await one.claim(SECOND_SLOT, **CANCEL)
    await one.complete(running, Outcome(stopped=CancelReason.TIMEOUT), retry_in_ms=0)
    assert (await one.ended(FIRST))[0] is RunState.FAILED
    await one.win(SECOND_SLOT, **CANCEL)


@queues
async def test_s13_a_full_instance_leaves_the_superseding_slot_due_for_others(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    full, free = two
    cluster.advance_to(FIRST)
    await full.release(await full.win(FIRST, **CANCEL))
    cluster.advance_to(SECOND_SLOT)
    answer = await full.claim(SECOND_SLOT, **CANCEL, may_run=False)
    assert answer.outcome is ClaimOutcome.QUEUED
    assert await full.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)
    assert await full.settled() == SECOND_SLOT
    await free.win(SECOND_SLOT, **CANCEL)


@queues
async def test_s13_a_full_instance_with_nothing_in_the_way_leaves_no_row(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    for policy in (QUEUE, CANCEL):
        answer = await one.claim(FIRST, **policy, may_run=False)
        assert answer.outcome is ClaimOutcome.UNCHANGED
    assert await one.history() == []


@pytest.mark.parametrize("backend", ["memory-wall"], indirect=True)
async def test_s19_without_a_second_witness_what_is_superseded_counts_as_running(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(FIRST)
    running = await one.win(FIRST, **CANCEL)
    cluster.step(3_600 * SECOND)
    slot = FIRST + 3_600 * SECOND
    answer = await one.claim(slot, **CANCEL, vouched=False)
    assert answer.outcome is ClaimOutcome.QUEUED
    assert (await one.complete(running)).outcome == "already_completed"
    assert await one.ended(FIRST) == (RunState.FAILED, Reason.SUPERSEDED)
