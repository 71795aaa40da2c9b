"""Retries by who reported the failure, on stores without leases (S22, S21 and S21a where they meet)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    Failure,
    Outcome,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import ClaimAnswer, ClaimOutcome, TokenOutcome
from tests.contract.claim_only.traits import controlled, shared_history
from tests.contract.harness import DAY, PERIOD, SECOND, T0, Cluster, Node

SLOT = T0 + PERIOD
DELAY = 3 * SECOND
RAISED = Outcome(failure=Failure("E", "first", "line 1\nline 2"))
AGAIN = Outcome(failure=Failure("E", "second"))
PERMANENT = Outcome(failure=Failure("E", permanent=True))
TIMED_OUT = Outcome(stopped=CancelReason.TIMEOUT)


async def failed(
    cluster: Cluster, node: Node, outcome: Outcome = RAISED, retries: int = 1, **given: Any
) -> RunView:
    """A run that is to be retried in `DELAY`."""
    cluster.advance_to(SLOT)
    running = await node.win(SLOT, retries=retries, **given)
    answer = await node.complete(running, outcome, retry_in_ms=DELAY)
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    assert answer.run.run.state is RunState.RETRYING
    return answer.run


async def retried(cluster: Cluster, node: Node, seen: RunView, **given: Any) -> RunView:
    """Its next attempt, when the pause is over."""
    cluster.advance(DELAY)
    answer = await node.take_over(seen, **given)
    assert answer.outcome is ClaimOutcome.WON
    return shown(answer)


def shown(answer: ClaimAnswer) -> RunView:
    assert answer.run is not None
    return answer.run


def last(seen: RunView) -> Attempt:
    assert seen.run.current is not None
    return seen.run.current


async def test_s22_a_failed_attempt_is_followed_by_another_once_its_pause_is_over(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    assert (seen.wait_ms, seen.lease_left_ms, seen.takeable) == (DELAY, None, False)
    assert (seen.run.retry_at, seen.run.retry_delay_ms) == (cluster.now + DELAY, DELAY)
    assert (seen.run.failed, seen.run.ended_at, seen.run.reason) == (1, None, "")
    assert (last(seen).state, last(seen).failure) == (RunState.FAILED, RAISED.failure)
    cluster.advance(DELAY - 1)
    answer = await one.take_over(seen, retries=1)
    assert answer.outcome is ClaimOutcome.EARLY
    assert shown(answer).wait_ms == 1
    cluster.advance(1)
    claim = one.wish(SLOT, retries=1, seen_attempt=1, seen_token=seen.run.token)
    for _ in range(2):  # asked again it has won, too (S11)
        answer = await one.ask(claim)
        assert answer.outcome is ClaimOutcome.WON
        won = shown(answer)
        assert (won.run.attempt, last(won).cause, won.wait_ms) == (2, AttemptCause.RETRY, None)
        assert (won.run.failed, won.run.lost, won.run.retry_at) == (1, 0, None)
        assert (last(won).state, last(won).failure) == (RunState.CLAIMED, None)
        assert last(won).fence == SLOT * 1_000 + 1
    started = await one.renew(won, started_at=cluster.now)
    assert started.run is not None
    assert started.run.run.state is RunState.RUNNING
    assert (await one.complete(won)).outcome is TokenOutcome.RECORDED
    run = await one.run(SLOT)
    assert run is not None
    assert (run.run.state, run.run.failed) == (RunState.SUCCESS, 1)


async def test_s30_history_shows_every_attempt_and_leaves_traces_to_who_asks_for_them(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one, retries=2)
    won = await retried(cluster, one, seen, retries=2)
    answer = await one.complete(won, AGAIN, retry_in_ms=DELAY)
    assert answer.run is not None
    cluster.advance(1)
    await one.complete(await retried(cluster, one, answer.run, retries=2), Outcome("it"))
    (run,) = await one.history(traces=True)
    states = [(a.attempt, a.cause, a.state, a.failure, a.result) for a in run.attempts]
    assert states == [
        (1, AttemptCause.CLAIM, RunState.FAILED, RAISED.failure, ""),
        (2, AttemptCause.RETRY, RunState.FAILED, AGAIN.failure, ""),
        (3, AttemptCause.RETRY, RunState.SUCCESS, None, "it"),
    ]
    assert [a.fence - SLOT * 1_000 for a in run.attempts] == [0, 1, 2]
    times = [(a.claimed_at - SLOT, (a.ended_at or 0) - SLOT) for a in run.attempts]
    assert times == [(0, 0), (DELAY, DELAY), (2 * DELAY + 1, 2 * DELAY + 1)]
    assert len({a.token for a in run.attempts}) == 3
    (run,) = await one.history()
    assert run.attempts[0].failure == Failure("E", "first")


async def test_s22_as_many_attempts_follow_as_there_are_retries(
    cluster: Cluster, one: Node
) -> None:
    won = await retried(cluster, one, await failed(cluster, one), retries=1)
    answer = await one.complete(won, AGAIN, retry_in_ms=DELAY)
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    assert (answer.run.run.state, answer.run.run.failed) == (RunState.FAILED, 2)
    assert await one.ended(SLOT) == (RunState.FAILED, "")


@pytest.mark.parametrize(
    ("outcome", "retry_in_ms", "retries", "reason"),
    [
        (PERMANENT, DELAY, 1, ""),
        (RAISED, None, 1, ""),
        (RAISED, DELAY, 0, ""),
        (Outcome(stopped=CancelReason.REQUESTED), DELAY, 1, "cancelled"),
        (Outcome(stopped=CancelReason.SHUTDOWN), DELAY, 1, "runner_lost"),
    ],
)
async def test_s22_what_is_final(
    cluster: Cluster,
    one: Node,
    outcome: Outcome,
    retry_in_ms: int | None,
    retries: int,
    reason: str,
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=retries)
    await one.complete(running, outcome, retry_in_ms=retry_in_ms)
    assert await one.ended(SLOT) == (RunState.FAILED, reason)


async def test_s21_what_timed_out_is_retried_if_its_handler_obeyed(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one, TIMED_OUT)
    assert (last(seen).state, last(seen).reason) == (RunState.FAILED, Reason.TIMEOUT)
    won = await retried(cluster, one, seen, retries=1)
    assert won.run.cancel is None
    await one.renew(won, cancel=CancelReason.TIMEOUT)
    await one.complete(won)
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s21_what_timed_out_and_was_released_is_not_retried(
    cluster: Cluster, one: Node
) -> None:
    """Its handler may run on."""
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=1)
    await one.renew(running, cancel=CancelReason.TIMEOUT)
    assert (await one.release(running, Reason.RUNNER_LOST)).outcome is TokenOutcome.RELEASED
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s17_between_two_attempts_no_token_counts_but_the_repeat_of_a_result_does(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    assert (await one.renew(seen)).outcome is TokenOutcome.FENCED
    assert (await one.renew(seen, adopt=True)).outcome is TokenOutcome.FENCED
    first = one.wish(SLOT, token=seen.run.token)
    assert (await one.ask(first)).outcome is ClaimOutcome.LOST
    assert (await one.complete(seen, RAISED)).outcome is TokenOutcome.RECORDED
    assert (await one.complete(seen)).outcome is TokenOutcome.ALREADY_COMPLETED
    won = await retried(cluster, one, seen, retries=1)
    assert (await one.complete(seen, RAISED)).outcome is TokenOutcome.RECORDED
    assert (await one.complete(seen)).outcome is TokenOutcome.FENCED
    assert (await one.renew(seen)).outcome is TokenOutcome.FENCED
    assert (await one.release(seen)).outcome is TokenOutcome.FENCED
    assert (await one.ask(first)).outcome is ClaimOutcome.LOST
    assert (await one.renew(won)).outcome is TokenOutcome.RENEWED


@pytest.mark.parametrize(
    "wrong", [{"seen_attempt": 2}, {"seen_token": "other"}, {"seen_attempt": 0, "seen_token": ""}]
)
async def test_s22_only_who_names_the_attempt_that_failed_makes_the_next(
    cluster: Cluster, one: Node, wrong: dict[str, Any]
) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY)
    assert (await one.take_over(seen, **wrong)).outcome is ClaimOutcome.LOST
    assert (await one.look(SLOT)) is not None
    assert (await one.take_over(seen, retries=1)).outcome is ClaimOutcome.WON


async def test_s13_without_room_a_retry_changes_nothing(cluster: Cluster, one: Node) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY)
    answer = await one.take_over(seen, retries=1, may_run=False)
    assert answer.outcome is ClaimOutcome.UNCHANGED
    assert (await one.take_over(seen, retries=1)).outcome is ClaimOutcome.WON


async def test_s1_a_pause_written_before_the_clock_was_set_back_is_over(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.step(-SECOND - 1)
    assert (await one.take_over(seen, retries=1)).outcome is ClaimOutcome.WON


async def test_s19_what_nobody_retried_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    cluster.advance(DELAY + DAY + 1)
    answer = await one.take_over(seen, retries=1)
    assert answer.outcome is ClaimOutcome.LOST
    assert (shown(answer).run.state, shown(answer).run.reason) == ("failed", Reason.ABANDONED)


async def test_s23_a_retry_that_is_given_up_ends_the_run(cluster: Cluster, one: Node) -> None:
    seen = await failed(cluster, one)
    assert (await one.release(seen, Reason.RUNNER_LOST)).outcome is TokenOutcome.RELEASED
    run = await one.run(SLOT)
    assert run is not None
    assert (run.run.state, run.run.reason) == (RunState.FAILED, Reason.RUNNER_LOST)
    assert (run.attempts[0].state, run.attempts[0].reason) == (RunState.FAILED, "")
    cluster.advance(DELAY)
    assert (await one.take_over(seen, retries=1)).outcome is ClaimOutcome.LOST


@shared_history
async def test_s22_what_was_pruned_meanwhile_is_not_retried(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    away, lives = two
    seen = await failed(cluster, away)
    cluster.advance(20 * DAY)
    assert await lives.prune() == 1
    answer = await away.take_over(seen, retries=1)
    assert answer.outcome in (ClaimOutcome.LATE, ClaimOutcome.LOST)


async def test_s30_a_run_whose_retry_is_to_come_or_just_began_is_not_pruned_for_its_slots_age(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=1)
    seen = await one.complete(running, RAISED, retry_in_ms=5 * DAY)
    assert seen.run is not None
    cluster.advance(5 * DAY)
    assert await one.prune(history_ms=DAY) == 0
    won = shown(await one.take_over(seen.run, retries=1))
    assert await one.prune(history_ms=DAY) == 0
    assert (await one.complete(won)).outcome is TokenOutcome.RECORDED
    assert await one.ended(SLOT) == (RunState.SUCCESS, "")
    cluster.advance(DAY + 1)
    assert await one.prune(history_ms=DAY) == 1


@shared_history
async def test_s22_another_process_does_not_give_it_up(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await failed(cluster, first)
    assert (await second.release(seen)).outcome is TokenOutcome.FENCED
    await retried(cluster, first, seen, retries=1)


@shared_history
async def test_s22_a_run_whose_instance_died_before_the_retry_shows_as_interrupted(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await failed(cluster, first)
    cluster.advance(DAY)
    await second.beat()
    run = await second.run(SLOT)
    assert run is not None
    assert (run.run.state, run.run.reason) == (RunState.INTERRUPTED, Reason.RUNNER_LOST)
    (attempt,) = run.attempts
    assert (attempt.state, attempt.failure) == (last(seen).state, Failure("E", "first"))


@controlled
async def test_s21a_a_run_whose_instance_died_before_the_retry_is_ended_by_a_cancel(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await failed(cluster, first)
    cluster.advance(DAY)
    await second.beat()
    await second.cancel(SLOT)
    assert await second.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)


@controlled
async def test_s29_a_pause_lets_retries_go_on(cluster: Cluster, one: Node) -> None:
    seen = await failed(cluster, one)
    await one.pause()
    await retried(cluster, one, seen, retries=1)


@controlled
async def test_s21a_a_run_between_two_attempts_that_is_cancelled_ends_at_once(
    cluster: Cluster, one: Node
) -> None:
    seen = await failed(cluster, one)
    await one.cancel(SLOT)
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)
    cluster.advance(DELAY)
    assert (await one.take_over(seen, retries=1)).outcome is ClaimOutcome.LOST


@controlled
async def test_s21a_a_cancelled_attempt_that_fails_is_not_retried(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=1)
    await one.cancel(SLOT)
    await one.complete(running, RAISED, retry_in_ms=DELAY)
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)


@controlled
async def test_s29_a_triggered_run_is_retried_with_its_payload(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT + SECOND)
    run = await one.triggered(payload=b"with")
    slot = run.run.slot
    won = await one.win(slot, retries=1)
    answer = await one.complete(won, RAISED, retry_in_ms=DELAY)
    assert answer.run is not None
    cluster.advance(DELAY)
    again = await one.take_over(answer.run, retries=1)
    assert (again.outcome, again.payload) == (ClaimOutcome.WON, b"with")
