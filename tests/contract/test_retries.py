"""What follows a failed attempt (S22, and S21 and S21a where they meet it)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import ClaimOutcome, TokenOutcome
from tests.contract.harness import DAY, LEASE, PERIOD, SECOND, T0, Cluster, Node, able

SLOT = T0 + PERIOD
DELAY = 3 * SECOND
RAISED = Outcome(failure=Failure("E", "first"))
PERMANENT = Outcome(failure=Failure("E", permanent=True))
TIMED_OUT = Outcome(stopped=CancelReason.TIMEOUT)

pytestmark = pytest.mark.parametrize("backend", able(lambda can: can.retries), indirect=True)


async def begun(cluster: Cluster, node: Node, retries: int = 1, **given: Any) -> RunView:
    cluster.advance_to(SLOT)
    return await node.win(SLOT, retries=retries, **given)


async def failed(cluster: Cluster, node: Node, retries: int = 1, **given: Any) -> RunView:
    """A run that is to be retried in `DELAY`."""
    running = await begun(cluster, node, retries, **given)
    answer = await node.complete(running, RAISED, retry_in_ms=DELAY)
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    assert answer.run.run.state is RunState.RETRYING
    return answer.run


def last(seen: RunView) -> Attempt:
    assert seen.run.current is not None
    return seen.run.current


async def test_s22_a_failed_attempt_is_followed_by_another_that_any_instance_may_claim(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await failed(cluster, first)
    assert (seen.wait_ms, seen.lease_left_ms, seen.takeable) == (DELAY, None, False)
    assert (seen.run.retry_at, seen.run.retry_delay_ms) == (cluster.now + DELAY, DELAY)
    assert (seen.run.failed, seen.run.ended_at, seen.run.reason) == (1, None, "")
    assert (last(seen).state, last(seen).failure) == (RunState.FAILED, RAISED.failure)
    cluster.advance(DELAY - 1)
    answer = await second.take_over(seen, retries=1)
    assert answer.outcome is ClaimOutcome.EARLY
    assert answer.run is not None
    assert answer.run.wait_ms == 1
    cluster.advance(1)
    answer = await second.take_over(seen, retries=1)
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run is not None
    won = answer.run
    assert (won.run.attempt, last(won).cause, won.wait_ms) == (2, AttemptCause.RETRY, None)
    assert (won.run.failed, won.run.lost, won.run.retry_at) == (1, 0, None)
    assert last(won).fence > last(seen).fence
    await second.complete(won)
    assert await first.states() == {10: RunState.SUCCESS}


async def test_s22_as_many_attempts_follow_as_there_are_retries(
    cluster: Cluster, one: Node
) -> None:
    seen = await begun(cluster, one, retries=2)
    for expected in (RunState.RETRYING, RunState.RETRYING, RunState.FAILED):
        answer = await one.complete(seen, RAISED, retry_in_ms=0)
        assert answer.run is not None
        assert answer.run.run.state is expected
        if expected is RunState.RETRYING:
            again = await one.take_over(answer.run, retries=2)
            assert again.run is not None
            seen = again.run
    assert await one.ended(SLOT) == (RunState.FAILED, "")
    run = await one.run(SLOT)
    assert run is not None
    assert [a.cause for a in run.attempts] == ["claim", "retry", "retry"]


@pytest.mark.parametrize(
    ("outcome", "given"),
    [
        (RAISED, {"retry_in_ms": None}),
        (PERMANENT, {"retry_in_ms": 0}),
        (Outcome("done"), {"retry_in_ms": 0}),
        (Outcome(stopped=CancelReason.REQUESTED), {"retry_in_ms": 0}),
        (Outcome(stopped=CancelReason.SUPERSEDED), {"retry_in_ms": 0}),
    ],
)
async def test_s22_what_is_not_to_be_retried_ends(
    cluster: Cluster, one: Node, outcome: Outcome, given: dict[str, Any]
) -> None:
    seen = await begun(cluster, one)
    answer = await one.complete(seen, outcome, **given)
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    assert answer.run.run.state.final


async def test_s22_without_retries_failed_is_final(cluster: Cluster, one: Node) -> None:
    await one.complete(await begun(cluster, one, retries=0), RAISED, retry_in_ms=0)
    assert await one.ended(SLOT) == (RunState.FAILED, "")


async def test_s21_an_attempt_that_timed_out_is_retried(cluster: Cluster, one: Node) -> None:
    seen = await begun(cluster, one)
    await one.renew(seen, cancel=CancelReason.TIMEOUT)
    answer = await one.complete(seen, TIMED_OUT, retry_in_ms=DELAY)
    assert answer.run is not None
    assert (answer.run.run.state, answer.run.run.cancel) == (RunState.RETRYING, None)
    assert (last(answer.run).state, last(answer.run).reason) == (RunState.FAILED, Reason.TIMEOUT)
    cluster.advance(DELAY)
    again = await one.take_over(answer.run)
    assert again.outcome is ClaimOutcome.WON
    assert again.run is not None
    assert last(again.run).cause is AttemptCause.RETRY
    assert (await one.renew(again.run)).outcome is TokenOutcome.RENEWED


async def test_s21_a_result_after_the_timeout_is_a_timeout_and_is_retried(
    cluster: Cluster, one: Node
) -> None:
    seen = await begun(cluster, one)
    await one.renew(seen, cancel=CancelReason.TIMEOUT)
    answer = await one.complete(seen, Outcome("late"), retry_in_ms=DELAY)
    assert answer.outcome is TokenOutcome.ALREADY_COMPLETED
    assert answer.run is not None
    assert (answer.run.run.state, last(answer.run).reason) == (RunState.RETRYING, Reason.TIMEOUT)


async def test_s21_a_timed_out_attempt_whose_runner_died_is_retried_when_its_lease_is_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It failed by its timeout: it counts against `retries`, not against `max_attempts`."""
    first, second = two
    seen = await begun(cluster, first, max_attempts=1)
    await first.renew(seen, cancel=CancelReason.TIMEOUT)
    cluster.advance(LEASE - 1)
    assert (await second.take_over(seen)).outcome is ClaimOutcome.LOST
    cluster.advance(1)
    answer = await second.take_over(seen, retries=1, max_attempts=1)
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run is not None
    assert (answer.run.run.failed, answer.run.run.lost) == (1, 0)
    assert last(answer.run).cause is AttemptCause.RETRY
    run = await first.run(SLOT)
    assert run is not None
    assert (run.attempts[0].state, run.attempts[0].reason) == (RunState.FAILED, Reason.TIMEOUT)
    await second.renew(answer.run, cancel=CancelReason.TIMEOUT)
    cluster.advance(LEASE)
    assert (await first.take_over(answer.run)).outcome is ClaimOutcome.LOST
    assert await first.ended(SLOT) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s21_a_timed_out_attempt_that_is_released_is_retried_at_once(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await begun(cluster, first, max_attempts=1)
    await first.renew(seen, cancel=CancelReason.TIMEOUT)
    await first.release(seen, Reason.RUNNER_LOST)
    free = await first.run(SLOT)
    assert free is not None
    assert (free.run.state, free.run.freed) == (RunState.INTERRUPTED, Reason.RUNNER_LOST)
    assert (last(free).state, last(free).reason) == (RunState.FAILED, Reason.TIMEOUT)
    answer = await second.take_over(seen, retries=1, max_attempts=1)
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run is not None
    assert (answer.run.run.failed, answer.run.run.lost) == (1, 0)
    assert last(answer.run).cause is AttemptCause.RETRY
    assert answer.run.run.cancel is None, "that was the attempt's before it"
    cluster.advance(LEASE - 1)
    assert (await second.renew(answer.run)).outcome is TokenOutcome.RENEWED


async def test_s22_retries_and_takeovers_are_told_apart_and_counted_apart(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await begun(cluster, first, retries=1, max_attempts=2)
    await first.release(seen, Reason.RUNNER_LOST)
    given = {"retries": 1, "max_attempts": 2}
    taken = (await second.take_over(seen, **given)).run
    assert taken is not None
    await second.complete(taken, RAISED, retry_in_ms=0)
    again = (await first.take_over(taken, **given)).run
    assert again is not None
    await first.release(again, Reason.RUNNER_LOST)
    assert await first.ended(SLOT) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)
    run = await first.run(SLOT)
    assert run is not None
    assert [a.cause for a in run.attempts] == ["claim", "takeover", "retry"]
    assert [a.state for a in run.attempts] == ["interrupted", "failed", "interrupted"]
    assert (run.run.lost, run.run.failed) == (2, 1)


async def test_s18_a_run_that_is_to_be_retried_blocks(cluster: Cluster, one: Node) -> None:
    await failed(cluster, one, lease_ms=LEASE)
    cluster.advance_to(SLOT + PERIOD)
    answer = await one.claim(SLOT + PERIOD)
    assert answer.outcome is ClaimOutcome.SKIPPED
    assert answer.run is not None
    assert answer.run.run.blocking_slot == SLOT


async def test_s18_a_retry_behind_another_run_is_queued(cluster: Cluster, one: Node) -> None:
    seen = await failed(cluster, one)
    cluster.advance_to(SLOT + PERIOD)
    await one.win(SLOT + PERIOD, overlap=OverlapPolicy.ALLOW)
    assert (await one.take_over(seen)).outcome is ClaimOutcome.QUEUED
    assert (await one.take_over(seen, overlap=OverlapPolicy.ALLOW)).outcome is ClaimOutcome.WON


async def test_s13_a_retry_without_room_changes_nothing(cluster: Cluster, one: Node) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY)
    assert (await one.take_over(seen, may_run=False)).outcome is ClaimOutcome.UNCHANGED
    assert (await one.seen(SLOT)).run == seen.run


async def test_s17_the_token_of_a_failed_attempt_is_good_for_nothing(
    cluster: Cluster, one: Node
) -> None:
    seen = await begun(cluster, one)
    await one.complete(seen, RAISED, retry_in_ms=DELAY)
    assert (await one.renew(seen)).outcome is TokenOutcome.FENCED
    assert (await one.release(seen)).outcome is TokenOutcome.FENCED
    assert (await one.complete(seen, Outcome("x"))).outcome is TokenOutcome.ALREADY_COMPLETED
    assert (await one.complete(seen, RAISED)).outcome is TokenOutcome.RECORDED, "a repeat"
    assert (await one.ask(one.wish(SLOT, token=seen.run.token))).outcome is ClaimOutcome.LOST
    assert (await one.seen(SLOT)).run.state is RunState.RETRYING


async def test_s17_the_repeat_of_a_failure_that_was_retried_is_recorded(
    cluster: Cluster, one: Node
) -> None:
    running = await begun(cluster, one)
    await one.complete(running, RAISED, retry_in_ms=0)
    await one.take_over(running)
    assert (await one.complete(running, RAISED)).outcome is TokenOutcome.RECORDED
    assert (await one.complete(running, Outcome("x"))).outcome is TokenOutcome.FENCED


async def test_s17_the_repeat_of_a_result_is_recorded_however_many_attempts_came_after(
    cluster: Cluster, one: Node
) -> None:
    first = await begun(cluster, one, retries=3)
    before = first
    for _ in range(3):
        await one.complete(before, RAISED, retry_in_ms=0)
        answer = await one.take_over(before, retries=3)
        assert answer.run is not None
        before = answer.run
    assert before.run.attempt == 4
    assert (await one.complete(first, RAISED)).outcome is TokenOutcome.RECORDED
    assert (await one.complete(first, Outcome("x"))).outcome is TokenOutcome.FENCED


async def test_s10_of_two_that_claim_the_retry_one_wins(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await failed(cluster, first)
    cluster.advance(DELAY)
    outcomes = [(await node.take_over(seen)).outcome for node in (first, second)]
    assert outcomes == [ClaimOutcome.WON, ClaimOutcome.LOST]


async def test_s02_a_run_with_a_long_retry_is_kept(cluster: Cluster, one: Node) -> None:
    """A long retry, older than `catch_up_window`, the floor above it."""
    running = await begun(cluster, one)
    answer = await one.complete(running, RAISED, retry_in_ms=25 * 3_600 * SECOND)
    assert answer.run is not None
    cluster.advance(25 * 3_600 * SECOND)
    await one.register()
    assert await one.prune(history_ms=0, history_max=0) == 0
    assert (await one.take_over(answer.run)).outcome is ClaimOutcome.WON


async def test_s19_a_retry_nobody_claimed_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY + DAY)
    assert (await one.take_over(seen, may_run=False)).outcome is ClaimOutcome.UNCHANGED
    cluster.advance(1)
    assert (await one.take_over(seen, may_run=False)).outcome is ClaimOutcome.LOST
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.ABANDONED)
    run = await one.run(SLOT)
    assert run is not None
    assert (run.attempts[0].state, run.attempts[0].failure) == (RunState.FAILED, RAISED.failure)


async def test_s01_a_retry_time_from_before_a_step_back_is_taken_as_over(
    cluster: Cluster, one: Node
) -> None:
    """Clock an hour ahead, then back: the run must not wait an hour and block."""
    seen = await failed(cluster, one)
    cluster.step(-3_600 * SECOND)
    assert (await one.seen(SLOT)).wait_ms == 0
    assert (await one.take_over(seen)).outcome is ClaimOutcome.WON


async def test_s01_a_small_step_back_only_makes_the_wait_longer(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.step(-SECOND)
    assert (await one.take_over(seen)).outcome is ClaimOutcome.EARLY
    assert (await one.seen(SLOT)).wait_ms == DELAY + SECOND
    cluster.step(-1)
    assert (await one.seen(SLOT)).wait_ms == 0


async def test_s22_a_retry_shows_in_the_sweep_with_its_wait(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await failed(cluster, first)
    cluster.advance(SECOND)
    (shown,) = await second.unfinished()
    assert (shown.run.state, shown.wait_ms) == (RunState.RETRYING, DELAY - SECOND)
    found = await first.history(states=frozenset({RunState.RETRYING}))
    assert [seen.run.slot for seen in found] == [SLOT]


async def test_s01_a_retry_time_is_taken_as_over_only_by_a_clock_that_is_vouched_for(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.step(-3_600 * SECOND)
    if not one.store.capabilities.boot_leases:
        assert (await one.take_over(seen, vouched=False)).outcome is ClaimOutcome.EARLY
        off = cluster.now + 3_600 * SECOND
        assert (await one.take_over(seen, expected_at=off)).outcome is ClaimOutcome.EARLY
    assert (await one.take_over(seen)).outcome is ClaimOutcome.WON


async def test_s19_a_retry_whose_time_has_come_needs_no_second_witness(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY)
    assert (await one.take_over(seen, vouched=False)).outcome is ClaimOutcome.WON
