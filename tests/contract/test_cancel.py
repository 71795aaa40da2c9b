"""Runs that operators ask to stop (S21a, S29)."""

from __future__ import annotations

import pytest

from anarchon_server.core.model import (
    CancelReason,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunState,
)
from anarchon_server.core.store import CancelRun, ClaimOutcome, ControlOutcome, TokenOutcome
from tests.contract.harness import JOB, LEASE, PERIOD, SECOND, T0, Cluster, Node, able

SLOT = T0 + PERIOD
GRACE = 5 * SECOND
RAISED = Outcome(failure=Failure("E"))
CANCELLED = (RunState.FAILED, Reason.CANCELLED)

pytestmark = pytest.mark.parametrize("backend", able(lambda can: can.control), indirect=True)


async def test_s21a_a_running_run_is_asked_to_stop_and_its_holder_learns_of_it(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    running = await first.win(SLOT)
    answer = await second.cancel(SLOT)
    assert answer.outcome is ControlOutcome.DONE
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.cancel) == (RunState.CLAIMED, CancelReason.REQUESTED)
    told = await first.renew(running)
    assert told.outcome is TokenOutcome.RENEWED
    assert told.run is not None
    assert told.run.run.cancel is CancelReason.REQUESTED
    answer_of_result = await first.complete(running, Outcome(stopped=CancelReason.REQUESTED))
    assert answer_of_result.outcome is TokenOutcome.RECORDED
    assert await first.ended(SLOT) == CANCELLED


@pytest.mark.parametrize(
    "outcome", [Outcome("done"), RAISED, Outcome(stopped=CancelReason.SHUTDOWN)]
)
async def test_s21a_a_cancelled_run_is_failed_whatever_its_handler_says_and_not_retried(
    cluster: Cluster, one: Node, outcome: Outcome
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=3)
    await one.cancel(SLOT)
    await one.complete(running, outcome, retry_in_ms=0)
    assert await one.ended(SLOT) == CANCELLED
    run = await one.run(SLOT)
    assert run is not None
    assert (run.attempts[0].state, run.attempts[0].failure) == (RunState.FAILED, outcome.failure)


async def test_s21a_from_the_first_cancel_on_the_lease_is_renewed_for_the_grace_only(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    await one.cancel(SLOT)
    cluster.advance(GRACE)
    assert (await one.cancel(SLOT)).outcome is ControlOutcome.DONE, "again: no new grace"
    assert (await one.renew(running)).outcome is TokenOutcome.RENEWED
    cluster.advance(1)
    assert (await one.renew(running)).outcome is TokenOutcome.FENCED
    assert (
        await one.complete(running, Outcome(stopped=CancelReason.REQUESTED))
    ).outcome == "recorded"


async def test_s21a_the_first_reason_stays(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    await one.renew(running, cancel=CancelReason.TIMEOUT)
    await one.cancel(SLOT)
    assert (await one.seen(SLOT)).run.cancel is CancelReason.TIMEOUT
    await one.complete(running, Outcome(stopped=CancelReason.TIMEOUT))
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s21a_the_first_requests_message_stays(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.win(SLOT)
    for message in ("the first", "another"):
        act = CancelRun(JOB, SLOT, message)
        assert (await one.control(act)).outcome is ControlOutcome.DONE
    assert (await one.seen(SLOT)).run.cancel_message == "the first"


async def test_s21a_nothing_follows_a_timeout_that_is_cancelled(
    cluster: Cluster, one: Node
) -> None:
    """S22 may follow a timeout, and must not where an operator asked for the run's end."""
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=3)
    await one.renew(running, cancel=CancelReason.TIMEOUT)
    cluster.advance(GRACE)
    await one.cancel(SLOT)
    cluster.advance(1)
    assert (await one.renew(running)).outcome is TokenOutcome.FENCED, "the grace is the first's"
    await one.complete(running, Outcome(stopped=CancelReason.TIMEOUT), retry_in_ms=0)
    assert await one.ended(SLOT) == CANCELLED


async def test_s21a_a_run_that_waits_is_skipped(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    made = await one.triggered()
    answer = await one.cancel(made.run.slot)
    assert answer.outcome is ControlOutcome.DONE
    assert await one.ended(made.run.slot) == (RunState.SKIPPED, Reason.CANCELLED)
    assert (await one.claim(made.run.slot)).outcome is ClaimOutcome.LOST


async def test_s21a_a_run_that_is_to_be_retried_ends_at_once(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT, retries=1)
    await one.complete(running, RAISED, retry_in_ms=0)
    answer = await one.cancel(SLOT)
    assert answer.run is not None
    assert (answer.run.run.state, answer.run.run.reason) == CANCELLED
    run = await one.run(SLOT)
    assert run is not None
    assert (run.attempts[0].state, run.attempts[0].reason) == (RunState.FAILED, "")
    assert (await one.take_over(running)).outcome is ClaimOutcome.LOST


async def test_s21a_a_run_that_was_handed_over_ends_at_once(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    await one.release(running)
    await one.cancel(SLOT)
    assert await one.ended(SLOT) == CANCELLED
    assert (await one.take_over(running)).outcome is ClaimOutcome.LOST


async def test_s21a_a_run_whose_lease_is_over_ends_with_the_cancel(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """At once where the clock cannot step; elsewhere by the first claim that vouches for it (S19)."""
    first, second = two
    cluster.advance_to(SLOT)
    running = await first.win(SLOT)
    cluster.advance(LEASE)
    await second.cancel(SLOT)
    if not first.store.capabilities.boot_leases:
        assert (await second.seen(SLOT)).run.cancel is CancelReason.REQUESTED
        assert (await second.take_over(running)).outcome is ClaimOutcome.LOST
    assert await first.ended(SLOT) == CANCELLED


async def test_s21a_a_cancelled_run_whose_runner_dies_is_not_started_to_be_cancelled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    running = await first.win(SLOT)
    await second.cancel(SLOT)
    cluster.advance(LEASE)
    assert (await second.take_over(running)).outcome is ClaimOutcome.LOST
    assert await first.ended(SLOT) == CANCELLED


@pytest.mark.parametrize("reason", [Reason.HANDED_OVER, Reason.RUNNER_LOST, Reason.NOT_ACCEPTED])
async def test_s21a_the_release_of_a_cancelled_run_ends_it(
    cluster: Cluster, one: Node, reason: str
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    await one.cancel(SLOT)
    assert (await one.release(running, reason)).outcome is TokenOutcome.RELEASED
    assert await one.ended(SLOT) == CANCELLED


async def test_s18_a_cancelled_run_blocks_until_its_handler_reported(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    await one.cancel(SLOT)
    cluster.advance_to(SLOT + PERIOD)
    queue = {"overlap": OverlapPolicy.QUEUE}
    assert (await one.claim(SLOT + PERIOD, **queue)).outcome is ClaimOutcome.QUEUED
    await one.complete(running, Outcome(stopped=CancelReason.REQUESTED))
    await one.win(SLOT + PERIOD, **queue)


async def test_s29_a_run_that_has_ended_is_not_cancelled(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT))
    answer = await one.cancel(SLOT)
    assert answer.outcome is ControlOutcome.FINAL
    assert answer.run is not None
    assert answer.run.run.state is RunState.SUCCESS


async def test_s29_a_run_that_is_not_there_is_not_cancelled(cluster: Cluster, one: Node) -> None:
    assert (await one.cancel(SLOT)).outcome is ControlOutcome.NOT_FOUND
    assert (await one.cancel(SLOT, job="other")).outcome is ControlOutcome.NOT_FOUND
    assert await one.history() == []


async def test_s21a_a_claim_that_is_repeated_after_a_cancel_learns_of_it(
    cluster: Cluster, one: Node
) -> None:
    """Its reply was lost (S11), and the run has been cancelled since."""
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    await one.ask(claim)
    await one.cancel(SLOT)
    answer = await one.ask(claim)
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run is not None
    assert answer.run.run.cancel is CancelReason.REQUESTED
