"""Results, releases and adoptions on stores without leases (S17, S21a, S23 to S26)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anarchon_server.core.model import (
    CancelReason,
    Failure,
    Outcome,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import Completion, TokenOutcome
from tests.contract.claim_only.traits import shared_history
from tests.contract.harness import JOB, PERIOD, SECOND, T0, Cluster, Node

SLOT = T0 + PERIOD


@pytest.fixture
async def seen(cluster: Cluster, one: Node) -> RunView:
    """A run that the one instance has just won."""
    cluster.advance_to(SLOT)
    return await one.win(SLOT)


def ended(view: RunView | None) -> tuple[RunState, str, RunState, str]:
    """The state and reason of a run and of its attempt."""
    assert view is not None
    (attempt,) = view.attempts
    assert view.run.current == attempt
    return view.run.state, view.run.reason, attempt.state, attempt.reason


async def test_s17_a_result_ends_the_run_and_its_repeat_is_recorded_too(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    cluster.advance(5 * SECOND)
    for _ in range(2):
        answer = await one.complete(seen, Outcome("it", elapsed_ms=4_000))
        assert answer.outcome is TokenOutcome.RECORDED
        assert answer.run is not None
        assert answer.run.run.state is RunState.SUCCESS
    run = await one.run(SLOT)
    assert ended(run) == (RunState.SUCCESS, "", RunState.SUCCESS, "")
    assert run is not None
    (attempt,) = run.attempts
    assert (attempt.result, attempt.fence) == ("it", SLOT * 1_000)
    times = (attempt.claimed_at, attempt.started_at, attempt.ended_at)
    assert times == (SLOT, SLOT + SECOND, SLOT + 5 * SECOND)


async def test_s17_a_failure_is_final(one: Node, seen: RunView) -> None:
    failure = Failure("ValueError", "no such thing", "line 1\nline 2")
    answer = await one.complete(seen, Outcome(failure=failure))
    assert answer.outcome is TokenOutcome.RECORDED
    (run,) = await one.history(traces=True)
    assert ended(run) == (RunState.FAILED, "", RunState.FAILED, "")
    assert run.attempts[0].failure == failure
    (run,) = await one.history()
    assert run.attempts[0].failure == replace(failure, stack_trace="")


async def test_i3_a_final_state_never_changes(one: Node, seen: RunView) -> None:
    await one.complete(seen, Outcome("first"))
    for other in (
        Outcome("second"),
        Outcome(failure=Failure("E")),
        Outcome(stopped=CancelReason.SHUTDOWN),
    ):
        assert (await one.complete(seen, other)).outcome is TokenOutcome.ALREADY_COMPLETED
    assert (await one.release(seen)).outcome is TokenOutcome.FENCED
    assert ended(await one.run(SLOT)) == (RunState.SUCCESS, "", RunState.SUCCESS, "")


async def test_s17_a_result_counts_from_any_process(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    """As when a client brings it to the sidecar that came after."""
    other = await cluster.node()
    await other.register()
    assert (await other.complete(seen, Outcome("it"))).outcome is TokenOutcome.RECORDED
    run = await other.run(SLOT)
    assert run is not None
    assert run.run.state is RunState.SUCCESS


async def test_s17_a_wrong_token_changes_nothing(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    strange = second.wish(SLOT).token
    assert (await second.complete(seen, token=strange)).outcome is TokenOutcome.FENCED
    wrong = replace(seen, run=replace(seen.run, current=replace(seen.run.current, token=strange)))  # type: ignore[type-var]
    assert (await second.release(wrong)).outcome is TokenOutcome.FENCED
    adopted = await second.renew(wrong, adopt=True)
    assert adopted.outcome is TokenOutcome.FENCED
    run = await first.run(SLOT)
    assert run is not None
    assert run.run.state is RunState.CLAIMED


async def test_what_was_never_claimed_has_no_token(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    token = one.wish(SLOT).token
    (answer,) = (await one.store.complete([Completion(JOB, SLOT, token, Outcome("x"))])).answers
    assert answer.outcome is TokenOutcome.UNKNOWN_TOKEN
    won = await one.win(SLOT)
    other = replace(won, run=replace(won.run, slot=SLOT + PERIOD))
    assert (await one.renew(other, adopt=True)).outcome is TokenOutcome.UNKNOWN_TOKEN
    cluster.advance(PERIOD)
    assert (await one.claim(SLOT + PERIOD)).outcome == "won", "asking for it has not claimed it"


@pytest.mark.parametrize(
    ("reason", "as_reason"),
    [
        (Reason.RUNNER_LOST, Reason.RUNNER_LOST),
        (Reason.HANDED_OVER, Reason.RUNNER_LOST),
        (Reason.NOT_ACCEPTED, Reason.NOT_ACCEPTED),
    ],
)
async def test_a_run_whose_runner_is_gone_has_failed(
    one: Node, seen: RunView, reason: str, as_reason: str
) -> None:
    """S24, S25: nobody can take it over."""
    for _ in range(2):
        assert (await one.release(seen, reason)).outcome is TokenOutcome.RELEASED
    expected = (RunState.FAILED, as_reason, RunState.INTERRUPTED, reason)
    assert ended(await one.run(SLOT)) == expected
    late = await one.complete(seen, Outcome("late"))
    assert late.outcome is TokenOutcome.ALREADY_COMPLETED
    assert (await one.claim(SLOT)).outcome == "lost"


async def test_s17_a_release_by_another_process_is_fenced(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    other = await cluster.node()
    await other.register()
    assert (await other.release(seen)).outcome is TokenOutcome.FENCED


async def test_s23_obeying_a_shutdown_ends_the_run(one: Node, seen: RunView) -> None:
    stopped = Outcome(stopped=CancelReason.SHUTDOWN)
    for _ in range(2):
        assert (await one.complete(seen, stopped)).outcome is TokenOutcome.RECORDED
    expected = (RunState.FAILED, Reason.RUNNER_LOST, RunState.INTERRUPTED, Reason.HANDED_OVER)
    assert ended(await one.run(SLOT)) == expected


@pytest.mark.parametrize("reason", [CancelReason.LEASE_LOST, CancelReason.FENCED])
async def test_s21a_having_lost_trust_is_no_result(
    one: Node, seen: RunView, reason: CancelReason
) -> None:
    assert (await one.complete(seen, Outcome(stopped=reason))).outcome is TokenOutcome.FENCED
    assert (await one.complete(seen, Outcome("real"))).outcome is TokenOutcome.RECORDED


async def test_s21_obeying_a_timeout_has_failed(one: Node, seen: RunView) -> None:
    stopped = Outcome(stopped=CancelReason.TIMEOUT)
    assert (await one.complete(seen, stopped)).outcome is TokenOutcome.RECORDED
    assert ended(await one.run(SLOT)) == (RunState.FAILED, "timeout", RunState.FAILED, "timeout")


async def test_s21_a_handler_that_ignores_its_timeout_has_failed(one: Node, seen: RunView) -> None:
    told = await one.renew(seen, cancel=CancelReason.TIMEOUT)
    assert told.outcome is TokenOutcome.RENEWED
    assert told.run is not None
    assert told.run.run.cancel is CancelReason.TIMEOUT
    assert (await one.release(seen, Reason.RUNNER_LOST)).outcome is TokenOutcome.RELEASED
    run = await one.run(SLOT)
    assert run is not None
    assert (run.run.state, run.run.reason) == (RunState.FAILED, "timeout")


async def test_a_run_that_has_started_is_running(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    cluster.advance(700)
    answer = await one.renew(seen, started_at=cluster.now)
    assert answer.outcome is TokenOutcome.RENEWED
    assert answer.run is not None
    assert answer.run.lease_left_ms is None
    run = await one.run(SLOT)
    assert run is not None
    assert (run.run.state, run.attempts[0].started_at) == (RunState.RUNNING, SLOT + 700)


async def test_s26_an_adoption_changes_the_holder(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    """By the token, also where the sidecar that won it left nothing behind."""
    other = await cluster.node()
    await other.register()
    answer = await other.renew(seen, adopt=True)
    assert answer.outcome is TokenOutcome.RENEWED
    assert answer.run is not None
    current = answer.run.run.current
    assert current is not None
    assert (current.attempt, current.token, current.fence) == (1, seen.run.token, SLOT * 1_000)
    assert (current.instance_id, current.incarnation) == ("host:2", "inc-2")
    assert (await other.release(seen)).outcome is TokenOutcome.RELEASED


@shared_history
async def test_s26_the_old_holder_cannot_release_what_another_adopted(
    cluster: Cluster, one: Node, seen: RunView
) -> None:
    other = await cluster.node()
    await other.register()
    await other.renew(seen, adopt=True)
    assert (await one.release(seen)).outcome is TokenOutcome.FENCED
    assert (await one.renew(seen)).outcome is TokenOutcome.FENCED


async def test_s26_an_attempt_that_has_ended_is_not_adopted(one: Node, seen: RunView) -> None:
    await one.complete(seen)
    assert (await one.renew(seen, adopt=True)).outcome is TokenOutcome.FENCED


async def test_s14_a_batch_of_results_is_answered_in_its_order(cluster: Cluster, one: Node) -> None:
    won = []
    for n in range(1, 6):
        cluster.advance_to(T0 + n * PERIOD)
        won.append(await one.win(T0 + n * PERIOD))
    results = [Completion(JOB, v.run.slot, v.run.token, Outcome(f"r{v.run.slot}")) for v in won]
    strange = replace(results[2], token=one.wish(results[2].slot).token)
    answers = (await one.store.complete([*results[:2], strange, *results[3:]])).answers
    words = ["recorded", "recorded", "fenced", "recorded", "recorded"]
    assert [answer.outcome for answer in answers] == words
    assert [a.run.run.slot for a in answers if a.run] == [v.run.slot for v in won]
