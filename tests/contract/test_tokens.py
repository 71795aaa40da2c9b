"""What a token is good for: renewals, adoptions, results and releases (S15, S17, S21a, S23-S26)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anarchon_server.core.model import CancelReason, Failure, Outcome, Reason, RunState, RunView
from anarchon_server.core.store import TokenOutcome
from tests.contract.harness import JOB, LEASE, PERIOD, SECOND, T0, Cluster, Node, definition

SLOT = T0 + PERIOD
BROKEN = Outcome(failure=Failure("ValueError", "no", "Traceback ..."))


@pytest.fixture
async def seen(cluster: Cluster, two: tuple[Node, Node]) -> RunView:
    """A run that the first of two instances has won at its slot."""
    cluster.advance_to(SLOT)
    return await two[0].win(SLOT)


async def taken_over(cluster: Cluster, node: Node, seen: RunView) -> RunView:
    cluster.advance(LEASE)
    answer = await node.take_over(seen)
    assert answer.run is not None
    return answer.run


# Renewals


async def test_s15_a_renewal_runs_from_the_moment_the_store_handled_it(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance(5 * SECOND)
    answer = await two[0].renew(seen)
    assert answer.outcome is TokenOutcome.RENEWED
    assert answer.run is not None
    assert answer.run.lease_left_ms == LEASE
    assert answer.run.run.state is RunState.CLAIMED


async def test_s15_a_shorter_renewal_does_not_shrink_the_lease(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance(5 * SECOND)
    answer = await two[0].renew(seen, lease_ms=3 * SECOND)
    assert answer.run is not None
    assert answer.run.lease_left_ms == LEASE - 5 * SECOND


async def test_s30_the_first_start_is_kept_and_never_before_the_slot(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """I7."""
    node = two[0]
    cluster.advance_to(SLOT - 900)
    seen = await node.win(SLOT)
    first = await node.renew(seen, started_at=SLOT - 900)
    again = await node.renew(seen, started_at=SLOT + 5 * SECOND)
    assert first.run is not None
    assert again.run is not None
    assert first.run.run.state is again.run.run.state is RunState.RUNNING
    assert again.run.run.current is not None
    assert again.run.run.current.started_at == SLOT


async def test_s17_a_late_renewal_mends_the_lease(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance(LEASE + 5 * SECOND)
    answer = await two[0].renew(seen)
    assert answer.outcome is TokenOutcome.RENEWED
    assert (await two[1].take_over(seen)).outcome == "lost"


async def test_s17_a_renewal_is_fenced_when_another_attempt_was_claimed(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    await taken_over(cluster, second, seen)
    answer = await first.renew(seen)
    assert answer.outcome is TokenOutcome.FENCED
    assert answer.run is not None
    assert answer.run.run.current is not None
    assert answer.run.run.current.instance_id == second.instance.instance_id
    assert answer.run.run.attempt == 2


@pytest.mark.parametrize("reason", [Reason.HANDED_OVER, Reason.RUNNER_LOST])
async def test_s17_a_renewal_is_fenced_when_the_run_was_freed_or_is_final(
    two: tuple[Node, Node], seen: RunView, reason: str
) -> None:
    await two[0].release(seen, reason)
    assert (await two[0].renew(seen)).outcome is TokenOutcome.FENCED
    await two[0].complete(seen)
    assert (await two[0].renew(seen)).outcome is TokenOutcome.FENCED


async def test_s17_a_renewal_by_another_process_is_fenced(
    two: tuple[Node, Node], seen: RunView
) -> None:
    assert (await two[1].renew(seen)).outcome is TokenOutcome.FENCED


async def test_a_renewal_of_a_run_the_store_does_not_have_is_unknown(
    two: tuple[Node, Node], seen: RunView
) -> None:
    for wrong in ({"slot": SLOT + 1}, {"job": "other"}):
        answer = await two[0].renew(seen, **wrong)
        assert (answer.outcome, answer.run) == (TokenOutcome.UNKNOWN_TOKEN, None)


async def test_s26_an_adoption_changes_the_holder_and_nothing_else(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    answer = await second.renew(seen, adopt=True)
    assert answer.outcome is TokenOutcome.RENEWED
    assert answer.run is not None
    before, after = seen.run.current, answer.run.run.current
    assert before is not None
    assert after == replace(
        before,
        instance_id=second.instance.instance_id,
        incarnation=second.instance.incarnation,
    )
    assert (await first.renew(seen)).outcome is TokenOutcome.FENCED
    assert (await second.renew(seen)).outcome is TokenOutcome.RENEWED


async def test_s17_the_old_holder_cannot_release_what_another_adopted(
    two: tuple[Node, Node], seen: RunView
) -> None:
    """A client moves to another sidecar, which adopts; the old one times the session out."""
    first, second = two
    await second.renew(seen, adopt=True)
    assert (await first.release(seen, Reason.RUNNER_LOST)).outcome is TokenOutcome.FENCED
    assert (await second.renew(seen)).outcome is TokenOutcome.RENEWED


async def test_s26_an_attempt_whose_token_is_dead_is_not_adopted(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    taken = await taken_over(cluster, second, seen)
    assert (await first.renew(seen, adopt=True)).outcome is TokenOutcome.FENCED
    await second.complete(taken)
    assert (await first.renew(taken, adopt=True)).outcome is TokenOutcome.FENCED


async def test_s21a_from_the_first_cancel_on_the_lease_is_renewed_for_the_grace_at_most(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    """Later cancels, of whatever kind, do not start the grace again."""
    node = two[0]
    await node.renew(seen, cancel=CancelReason.TIMEOUT)
    cluster.advance(3 * SECOND)
    answer = await node.renew(seen, cancel=CancelReason.REQUESTED)
    assert answer.outcome is TokenOutcome.RENEWED
    assert answer.run is not None
    assert answer.run.run.cancel is CancelReason.TIMEOUT
    cluster.advance(2 * SECOND)
    assert (await node.renew(seen)).outcome is TokenOutcome.RENEWED
    cluster.advance(1)
    assert (await node.renew(seen)).outcome is TokenOutcome.FENCED


async def test_s11_a_repeated_claim_does_not_prolong_a_cancelled_run_beyond_its_grace(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    claim = one.wish(SLOT)
    won = await one.ask(claim)
    assert won.run is not None
    await one.renew(won.run, cancel=CancelReason.TIMEOUT)
    cluster.advance(5 * SECOND + 1)
    assert (await one.ask(claim)).outcome == "lost"


# Results


async def test_s17_a_result_ends_the_run_and_its_repeat_is_recorded_too(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance(2 * SECOND)
    outcome = Outcome(result='{"n": 1}', elapsed_ms=1_500)
    for _ in range(2):
        answer = await two[0].complete(seen, outcome)
        assert answer.outcome is TokenOutcome.RECORDED
        assert answer.run is not None
        run = answer.run.run
        assert (run.state, run.reason, run.ended_at) == (RunState.SUCCESS, "", SLOT + 2 * SECOND)
        assert run.current is not None
        assert run.current.result == '{"n": 1}'
        assert run.current.started_at == SLOT + 500
        assert answer.run.lease_left_ms is None
        cluster.advance(SECOND)


async def test_s17_a_failure_is_final(two: tuple[Node, Node], seen: RunView) -> None:
    assert (await two[0].complete(seen, BROKEN)).outcome is TokenOutcome.RECORDED
    run = await two[1].run(SLOT)
    assert run is not None
    assert (run.run.state, run.run.failed) == (RunState.FAILED, 1)
    failure = run.attempts[0].failure
    assert failure is not None
    assert (failure.type, failure.message) == ("ValueError", "no")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Outcome("a"), Outcome("b")),
        (Outcome("a"), BROKEN),
        (BROKEN, Outcome("a")),
        (BROKEN, Outcome(failure=Failure("ValueError", "another"))),
    ],
)
async def test_i3_a_final_state_never_changes(
    two: tuple[Node, Node], seen: RunView, first: Outcome, then: Outcome
) -> None:
    await two[0].complete(seen, first)
    before = await two[0].run(SLOT)
    assert (await two[0].complete(seen, then)).outcome is TokenOutcome.ALREADY_COMPLETED
    assert (await two[0].release(seen)).outcome is TokenOutcome.FENCED
    assert await two[0].run(SLOT) == before


async def test_s17_a_result_counts_from_any_process(two: tuple[Node, Node], seen: RunView) -> None:
    assert (await two[1].complete(seen)).outcome is TokenOutcome.RECORDED


async def test_s17_a_late_result_counts_until_another_attempt_is_claimed(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance(10 * LEASE)
    assert (await two[0].complete(seen)).outcome is TokenOutcome.RECORDED
    assert (await two[1].take_over(seen)).outcome == "lost"


@pytest.mark.parametrize("reason", [Reason.HANDED_OVER, Reason.RUNNER_LOST])
async def test_s17_the_result_of_a_freed_attempt_counts(
    two: tuple[Node, Node], seen: RunView, reason: str
) -> None:
    await two[0].release(seen, reason)
    answer = await two[0].complete(seen)
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    assert answer.run.run.state is RunState.SUCCESS
    assert await two[1].unfinished() == []


@pytest.mark.parametrize("stopped", list(CancelReason))
async def test_s17_having_stopped_is_no_result_of_an_attempt_that_was_released(
    two: tuple[Node, Node], seen: RunView, stopped: CancelReason
) -> None:
    """Whoever takes it over is not robbed of it by a handler that obeyed late."""
    await two[0].release(seen, Reason.RUNNER_LOST)
    answer = await two[0].complete(seen, Outcome(stopped=stopped))
    assert answer.outcome is TokenOutcome.ALREADY_COMPLETED
    assert (await two[1].take_over(seen)).outcome == "won"


async def test_s17_a_result_is_fenced_when_another_attempt_was_claimed(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    await taken_over(cluster, second, seen)
    assert (await first.complete(seen)).outcome is TokenOutcome.FENCED
    run = await first.run(SLOT)
    assert run is not None
    assert run.run.state is RunState.CLAIMED


async def test_s17_the_repeat_of_a_result_is_recorded_whatever_came_after(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    """The handed-over attempt's result is repeated after the takeover."""
    first, second = two
    stopped = Outcome(stopped=CancelReason.SHUTDOWN)
    assert (await first.complete(seen, stopped)).outcome is TokenOutcome.RECORDED
    answer = await second.take_over(seen)
    assert answer.outcome == "won"
    assert (await first.complete(seen, stopped)).outcome is TokenOutcome.RECORDED
    assert (await first.complete(seen, Outcome("done"))).outcome is TokenOutcome.FENCED


async def test_a_result_for_a_slot_without_attempts_is_unknown(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    cluster.advance_to(SLOT + PERIOD)
    assert (await two[1].claim(SLOT + PERIOD)).outcome == "skipped"
    skipped = replace(seen, run=replace(seen.run, slot=SLOT + PERIOD))
    missing = replace(seen, run=replace(seen.run, slot=SLOT + 1))
    for wrong in (skipped, missing):
        assert (await two[0].complete(wrong)).outcome is TokenOutcome.UNKNOWN_TOKEN
        assert (await two[0].release(wrong)).outcome is TokenOutcome.UNKNOWN_TOKEN


async def test_s17_a_wrong_token_changes_nothing(two: tuple[Node, Node], seen: RunView) -> None:
    before = await two[0].run(SLOT)
    wrong = replace(seen, run=replace(seen.run, current=replace(seen.run.current, token="x")))  # type: ignore[type-var]
    assert (await two[0].renew(wrong)).outcome is TokenOutcome.FENCED
    assert (await two[0].complete(wrong)).outcome is TokenOutcome.FENCED
    assert (await two[0].release(wrong)).outcome is TokenOutcome.FENCED
    assert await two[0].run(SLOT) == before


@pytest.mark.parametrize(
    ("cancel", "reason"),
    [
        (CancelReason.TIMEOUT, Reason.TIMEOUT),
        (CancelReason.REQUESTED, Reason.CANCELLED),
        (CancelReason.SUPERSEDED, Reason.SUPERSEDED),
    ],
)
@pytest.mark.parametrize("obeys", [True, False])
async def test_s21_a_cancelled_attempt_fails_whether_or_not_the_handler_obeys(
    two: tuple[Node, Node], seen: RunView, cancel: CancelReason, reason: str, *, obeys: bool
) -> None:
    await two[0].renew(seen, cancel=cancel)
    outcome = Outcome(stopped=cancel) if obeys else Outcome("done all the same")
    answer = await two[0].complete(seen, outcome)
    assert answer.outcome == ("recorded" if obeys else "already_completed")
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, reason)
    assert run.current is not None
    assert run.current.result == ""


@pytest.mark.parametrize("stopped", [CancelReason.LEASE_LOST, CancelReason.FENCED])
async def test_s21a_obeying_a_lost_lease_changes_nothing(
    two: tuple[Node, Node], seen: RunView, stopped: CancelReason
) -> None:
    assert (await two[0].complete(seen, Outcome(stopped=stopped))).outcome == "fenced"
    run = await two[0].run(SLOT)
    assert run is not None
    assert run.run.state is RunState.CLAIMED


async def test_s23_obeying_a_shutdown_hands_the_run_over(
    two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    answer = await first.complete(seen, Outcome(stopped=CancelReason.SHUTDOWN))
    assert answer.outcome is TokenOutcome.RECORDED
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.freed) == (RunState.INTERRUPTED, Reason.HANDED_OVER)
    assert (await second.take_over(seen)).outcome == "won"


async def test_s21a_a_shutdown_of_a_cancelled_attempt_does_not_hand_it_over(
    two: tuple[Node, Node], seen: RunView
) -> None:
    await two[0].renew(seen, cancel=CancelReason.REQUESTED)
    answer = await two[0].complete(seen, Outcome(stopped=CancelReason.SHUTDOWN))
    assert answer.outcome is TokenOutcome.ALREADY_COMPLETED
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.CANCELLED)


# Releases


async def test_s17_a_release_is_repeated_safely(two: tuple[Node, Node], seen: RunView) -> None:
    for _ in range(2):
        assert (await two[0].release(seen)).outcome is TokenOutcome.RELEASED
    assert (await two[0].renew(seen)).outcome is TokenOutcome.FENCED


async def test_s17_a_release_by_another_process_or_of_an_old_attempt_is_fenced(
    cluster: Cluster, two: tuple[Node, Node], seen: RunView
) -> None:
    first, second = two
    assert (await second.release(seen)).outcome is TokenOutcome.FENCED
    taken = await taken_over(cluster, second, seen)
    assert (await first.release(seen)).outcome is TokenOutcome.FENCED
    assert (await second.renew(taken)).outcome is TokenOutcome.RENEWED


# One heartbeat


async def test_s14_a_heartbeat_answers_each_part_in_its_order(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, _ = two
    jobs = ["a", "b", "c", "d"]
    await first.register(*(definition(job) for job in jobs))
    cluster.advance_to(SLOT)
    runs = {job: await first.win(SLOT, job=job) for job in jobs}
    cluster.advance(SECOND)
    await first.release(runs["c"])
    await first.complete(runs["d"])
    reply = await first.beat_reply(
        renewals=tuple(first.renewal(runs[job]) for job in ("b", "c", "a")),
        looks=(("d", SLOT), ("x", SLOT), ("a", SLOT)),
        sweep=(("b", "every:10s"), ("c", "every:10s"), ("a", "every:99s"), ("a", "every:10s")),
    )
    (answer,) = reply.answers
    assert [a.outcome for a in answer.renewals] == ["renewed", "fenced", "renewed"]
    assert [seen and seen.run.state for seen in answer.looks] == ["success", None, "claimed"]
    assert answer.looks[2] is not None
    assert answer.looks[2].lease_left_ms == LEASE, "renewals come before looks"
    assert answer.unfinished[0].run.job == "c", "those to be taken over first"
    assert sorted(seen.run.job for seen in answer.unfinished) == ["a", "b", "c"]
    assert answer.settled == (SLOT, SLOT, None, SLOT)
    assert set(reply.fences) == {"a", "b", "c", "d", "x"}
    assert reply.fences["x"] == 0


async def test_s19_a_sweep_is_limited_and_shows_first_what_can_be_taken_over(
    cluster: Cluster, one: Node
) -> None:
    jobs = [f"job-{n}" for n in range(150)]
    await one.register(*(definition(job) for job in jobs))
    cluster.advance_to(SLOT)
    lapsing = await one.win(SLOT, job=jobs[120], lease_ms=3 * SECOND)
    for job in jobs:
        if job != jobs[120]:
            await one.claim(SLOT, job=job)
    cluster.advance(3 * SECOND)
    sweep = tuple((job, "every:10s") for job in jobs)
    answer = await one.beat(sweep=sweep, sweep_limit=10)
    assert len(answer.unfinished) == 10
    assert answer.unfinished[0].run.job == lapsing.run.job
    assert answer.settled == (SLOT,) * 150
    assert len((await one.beat(sweep=sweep)).unfinished) == 150
    assert len((await one.beat(sweep=((JOB, "every:10s"),))).unfinished) == 0
