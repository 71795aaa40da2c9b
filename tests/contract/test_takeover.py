"""The next attempt of a run whose attempt is over (S1, S19, I2, I5)."""

from __future__ import annotations

import pytest

from anarchon_server.core.limits import lease_margin
from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    Outcome,
    Reason,
    RunState,
    RunView,
)
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import BACKENDS, LEASE, PERIOD, SECOND, T0, Cluster, Node

SLOT = T0 + PERIOD

BOOT_LEASES = ["memory", "sqlite"]
WALL_LEASES = [name for name in BACKENDS if name not in BOOT_LEASES]
only_wall_leases = pytest.mark.parametrize("backend", WALL_LEASES, indirect=True)
only_boot_leases = pytest.mark.parametrize("backend", BOOT_LEASES, indirect=True)


async def won_by(node: Node, **given: object) -> RunView:
    node.cluster.advance_to(SLOT)
    return await node.win(SLOT, **given)


async def test_s19_a_lapsed_claim_is_taken_over_once(cluster: Cluster) -> None:
    first, second, third = await cluster.nodes_of(3)
    seen = await won_by(first)
    cluster.advance(LEASE + SECOND)
    taken = await second.take_over(seen)
    assert taken.outcome is ClaimOutcome.WON
    assert taken.run is not None
    assert taken.run.run.attempt == 2
    assert taken.run.run.current is not None
    assert taken.run.run.current.cause is AttemptCause.TAKEOVER
    assert (await third.take_over(seen)).outcome is ClaimOutcome.LOST
    run = await third.run(SLOT)
    assert run is not None
    states = [(a.attempt, a.state, a.reason, a.instance_id) for a in run.attempts]
    assert states == [
        (1, RunState.INTERRUPTED, Reason.RUNNER_LOST, "host:1"),
        (2, RunState.CLAIMED, "", "host:2"),
    ]
    assert run.attempts[0].ended_at == SLOT + LEASE, "with its lease, whenever that was seen"
    assert run.attempts[0].fence < run.attempts[1].fence
    assert run.attempts[0].token != run.attempts[1].token


async def test_s19_a_live_lease_is_not_taken_over(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE - 1)
    assert (await second.take_over(seen)).outcome is ClaimOutcome.LOST
    await first.renew(seen)
    cluster.advance(LEASE - 1)
    assert (await second.take_over(seen)).outcome is ClaimOutcome.LOST
    cluster.advance(1)
    assert (await second.take_over(seen)).outcome is ClaimOutcome.WON


async def test_s19_a_takeover_names_the_attempt_and_token_it_saw(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    for wrong in ({"seen_attempt": 2}, {"seen_token": "x"}, {"seen_attempt": 0}):
        assert (await second.take_over(seen, **wrong)).outcome is ClaimOutcome.LOST
    assert (await second.take_over(seen)).outcome is ClaimOutcome.WON


async def test_s13_a_takeover_needs_room(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    answer = await second.take_over(seen, may_run=False)
    assert answer.outcome is ClaimOutcome.UNCHANGED
    assert (await second.take_over(seen)).outcome is ClaimOutcome.WON


@pytest.mark.parametrize("reason", [Reason.HANDED_OVER, Reason.RUNNER_LOST, Reason.NOT_ACCEPTED])
async def test_s19_a_freed_run_is_taken_over_at_once_without_a_second_witness(
    cluster: Cluster, two: tuple[Node, Node], reason: str
) -> None:
    first, second = two
    await first.release(await won_by(first), reason)
    seen = await second.look(SLOT)
    assert seen is not None
    assert seen.takeable
    assert (seen.run.state, seen.run.reason) == (RunState.INTERRUPTED, reason)
    assert (await second.take_over(seen, vouched=False)).outcome is ClaimOutcome.WON


async def test_s19_a_takeover_repeated_with_its_token_has_won(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    run = seen.run
    claim = second.wish(SLOT, seen_attempt=run.attempt, seen_token=run.token)
    assert (await second.ask(claim)).outcome is ClaimOutcome.WON
    again = await second.ask(claim)
    assert again.outcome is ClaimOutcome.WON
    assert again.run is not None
    assert again.run.run.attempt == 2


async def test_s19_attempts_whose_runner_died_count_up_to_max_attempts(
    cluster: Cluster, one: Node
) -> None:
    seen = await won_by(one)
    for attempt in (2, 3):
        cluster.advance(LEASE)
        answer = await one.take_over(seen)
        assert answer.outcome is ClaimOutcome.WON
        assert answer.run is not None
        seen = answer.run
        assert seen.run.attempt == attempt
    cluster.advance(LEASE)
    answer = await one.take_over(seen, may_run=False)
    assert answer.outcome is ClaimOutcome.LOST, "ending it needs no room"
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)
    assert run.lost == 3


async def test_s19_the_release_of_the_last_attempt_ends_the_run(
    cluster: Cluster, one: Node
) -> None:
    """A monthly job: nobody would look again until next month."""
    seen = await won_by(one, max_attempts=1)
    answer = await one.release(seen, Reason.RUNNER_LOST)
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.ATTEMPTS_EXHAUSTED)
    assert await one.unfinished() == []


@pytest.mark.parametrize("reason", [Reason.HANDED_OVER, Reason.NOT_ACCEPTED])
async def test_s19_attempts_that_were_handed_over_or_never_accepted_do_not_count(
    cluster: Cluster, one: Node, reason: str
) -> None:
    seen = await won_by(one, max_attempts=2)
    for _ in range(5):
        await one.release(seen, reason)
        answer = await one.take_over(seen, max_attempts=2)
        assert answer.outcome is ClaimOutcome.WON
        assert answer.run is not None
        seen = answer.run
    assert (seen.run.attempt, seen.run.lost) == (6, 0)
    cluster.advance(LEASE)
    answer = await one.take_over(seen, max_attempts=2)
    assert answer.run is not None
    assert answer.outcome is ClaimOutcome.WON
    assert answer.run.run.lost == 1
    await one.release(answer.run, reason)
    answer = await one.take_over(answer.run, max_attempts=2)
    assert answer.outcome is ClaimOutcome.WON, "also where one more that died would be the last"


async def test_s19_no_run_has_more_than_a_thousand_attempts(cluster: Cluster, one: Node) -> None:
    """A client never accepts what it is sent."""
    seen = await won_by(one)
    for _ in range(999):
        await one.release(seen, Reason.NOT_ACCEPTED)
        answer = await one.take_over(seen)
        assert answer.run is not None
        seen = answer.run
    assert seen.run.attempt == 1_000
    ended = await one.release(seen, Reason.NOT_ACCEPTED)
    assert ended.run is not None
    assert ended.run.run.state is RunState.FAILED
    shown = await one.run(SLOT)
    assert shown is not None
    assert [a.attempt for a in shown.attempts] == list(range(901, 1_001)), "S30: the newest 100"


async def test_s19_a_run_nobody_wanted_for_its_window_is_abandoned(
    cluster: Cluster, one: Node
) -> None:
    seen = await won_by(one, window_ms=60 * SECOND)
    cluster.advance(LEASE + 60 * SECOND + 1)
    answer = await one.take_over(seen)
    assert answer.outcome is ClaimOutcome.LOST
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.ABANDONED)


async def test_s19_a_freed_run_is_abandoned_when_nobody_wanted_it_since_it_was_freed(
    cluster: Cluster, one: Node
) -> None:
    seen = await won_by(one, window_ms=60 * SECOND)
    cluster.advance(SECOND)
    await one.release(seen, Reason.HANDED_OVER)
    cluster.advance(60 * SECOND + 1)
    assert (await one.take_over(seen)).outcome is ClaimOutcome.LOST
    assert await one.ended(SLOT) == (RunState.FAILED, Reason.ABANDONED)


async def test_s21a_a_cancelled_run_that_loses_its_runner_is_not_taken_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """No instance starts a run only to cancel it."""
    first, second = two
    seen = await won_by(first)
    await first.renew(seen, cancel=CancelReason.REQUESTED)
    cluster.advance(LEASE)
    answer = await second.take_over(seen)
    assert answer.outcome is ClaimOutcome.LOST
    assert answer.run is not None
    run = answer.run.run
    assert (run.state, run.reason) == (RunState.FAILED, Reason.CANCELLED)
    assert run.current is not None
    assert (run.current.state, run.current.reason) == (RunState.FAILED, Reason.CANCELLED)


async def test_s21a_the_release_of_a_cancelled_run_ends_it(cluster: Cluster, one: Node) -> None:
    seen = await won_by(one)
    await one.renew(seen, cancel=CancelReason.TIMEOUT)
    answer = await one.release(seen, Reason.RUNNER_LOST)
    assert answer.run is not None
    assert (answer.run.run.state, answer.run.run.reason) == (RunState.FAILED, Reason.TIMEOUT)


async def test_s19_a_pruned_run_is_not_taken_over(cluster: Cluster, one: Node) -> None:
    seen = await won_by(one)
    await one.complete(seen)
    cluster.advance(2 * 24 * 3_600 * SECOND)
    await one.register()
    assert await one.prune(history_ms=SECOND) == 1
    assert (await one.take_over(seen)).outcome is ClaimOutcome.LATE


async def test_s27a_a_takeover_of_a_run_the_store_has_lost_starts_nothing(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    answer = await one.claim(SLOT, seen_attempt=1, seen_token="lost")
    assert (answer.outcome, answer.run) == (ClaimOutcome.LATE, None)
    assert await one.history() == []


async def test_s19_a_lapsed_run_shows_as_interrupted_though_nothing_was_written(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    running = await won_by(first)
    await first.renew(running, started_at=SLOT)
    cluster.advance(LEASE)
    seen = await second.look(SLOT)
    assert seen is not None
    assert seen.takeable
    assert (seen.run.state, seen.run.reason) == (RunState.INTERRUPTED, Reason.RUNNER_LOST)
    assert (await first.renew(running)).outcome == "renewed"
    mended = await second.look(SLOT)
    assert mended is not None
    assert (mended.run.state, mended.lease_left_ms) == (RunState.RUNNING, LEASE)


# The second witness: leases on a clock that can step


@only_wall_leases
async def test_s19_without_a_second_witness_no_lease_counts_as_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    assert (await second.take_over(seen, vouched=False)).outcome is ClaimOutcome.LOST
    assert (await second.take_over(seen)).outcome is ClaimOutcome.WON


@only_wall_leases
async def test_s21a_a_cancel_does_not_believe_the_clock_that_a_lease_is_over(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Nobody vouches for it: a claim with both witnesses finds the end (S19)."""
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    asked = await second.cancel(SLOT)
    assert asked.run is not None
    run = asked.run.run
    assert (run.state, run.cancel) == (RunState.INTERRUPTED, CancelReason.REQUESTED)
    assert run.lease is not None, "which is how it shows, and not how it ended"
    assert (await second.take_over(seen, vouched=False)).outcome is ClaimOutcome.LOST
    assert (await first.seen(SLOT)).run.ended_at is None
    assert (await second.take_over(seen)).outcome is ClaimOutcome.LOST
    assert await first.ended(SLOT) == (RunState.FAILED, Reason.CANCELLED)


@only_wall_leases
@pytest.mark.parametrize("step", [3_600 * SECOND, -3_600 * SECOND])
async def test_s19_a_takeover_under_a_clock_that_has_stepped_is_refused(
    cluster: Cluster, two: tuple[Node, Node], step: int
) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.advance(LEASE)
    expected = cluster.now
    cluster.step(step)
    answer = await second.take_over(seen, expected_at=expected)
    assert answer.outcome is ClaimOutcome.CLOCK_STEP
    margin = LEASE // 6
    assert (
        await second.take_over(seen, expected_at=cluster.now - margin - 1)
    ).outcome == "clock_step"
    assert (await second.take_over(seen, expected_at=cluster.now - margin)).outcome == "won"


@only_wall_leases
async def test_s19_a_step_forward_does_not_free_a_live_run(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await won_by(first)
    expected = cluster.now
    cluster.step(LEASE)
    assert (await second.take_over(seen, expected_at=expected)).outcome == "clock_step"
    assert (await first.renew(seen)).outcome == "renewed"


@only_wall_leases
async def test_s01_a_lease_written_before_a_step_back_is_over_with_both_witnesses(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Clock an hour ahead, then back: the dead lease lies an hour ahead and blocks nothing."""
    first, second = two
    cluster.step(3_600 * SECOND)
    await first.register()
    slot = cluster.now
    seen = await first.win(
        slot, previous_slot=None, start_deadline_ms=SECOND, schedule_id="every:10s"
    )
    cluster.step(-3_600 * SECOND)
    assert (await second.take_over(seen, vouched=False)).outcome == "lost"
    shown = await second.look(slot)
    assert shown is not None
    assert shown.takeable
    assert (await second.take_over(seen)).outcome == "won"


@only_wall_leases
async def test_s01_a_lease_no_further_ahead_than_its_margin_is_not_taken_for_one_from_before_a_step(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    seen = await won_by(first)
    cluster.step(-lease_margin(LEASE))
    assert (await second.take_over(seen)).outcome == "lost"
    cluster.step(-1)
    assert (await second.take_over(seen)).outcome == "won"


@only_wall_leases
async def test_s01_a_renewal_sets_such_a_lease_anew(cluster: Cluster, one: Node) -> None:
    seen = await won_by(one)
    cluster.step(-3_600 * SECOND)
    answer = await one.renew(seen)
    assert answer.outcome == "renewed"
    assert answer.run is not None
    assert answer.run.lease_left_ms == LEASE


@only_wall_leases
async def test_s21a_a_clock_that_is_set_back_does_not_make_the_grace_of_a_cancel_longer(
    cluster: Cluster, one: Node
) -> None:
    seen = await won_by(one)
    await one.renew(seen, cancel=CancelReason.TIMEOUT)
    cluster.step(-6 * SECOND)
    assert (await one.renew(seen)).outcome == "fenced"


@only_wall_leases
async def test_s19_a_release_is_a_flag_and_no_lease_end(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The store's clock steps back 10 s after the release; the takeover does not wait."""
    first, second = two
    seen = await won_by(first)
    cluster.advance(SECOND)
    await first.release(seen)
    cluster.step(-10 * SECOND)
    assert (await second.take_over(seen, vouched=False)).outcome == "won"


# Leases on the boot-time clock, which cannot step


@only_boot_leases
@pytest.mark.parametrize("step", [3_600 * SECOND, -3_600 * SECOND])
async def test_s01_a_stepped_wall_clock_neither_ends_nor_prolongs_a_lease(
    cluster: Cluster, two: tuple[Node, Node], step: int
) -> None:
    first, second = two
    assert first.store.capabilities.boot_leases
    seen = await won_by(first)
    cluster.step(step)
    cluster.advance(LEASE - 1)
    assert (await second.take_over(seen, vouched=False)).outcome == "lost"
    cluster.advance(1)
    assert (await second.take_over(seen, vouched=False)).outcome == "won"


@only_boot_leases
@pytest.mark.parametrize("boot", [0, 5_000, 10_000, 30_000])
async def test_s01_a_new_boot_ends_all_leases(
    cluster: Cluster, two: tuple[Node, Node], boot: int
) -> None:
    """Also where its clock happens to read as the old one did."""
    first, second = two
    seen = await won_by(first)
    cluster.reboot(boot)
    shown = await second.look(SLOT)
    assert shown is not None
    assert shown.takeable
    assert shown.run.state is RunState.INTERRUPTED
    taken = await second.take_over(seen, vouched=False)
    assert taken.outcome == "won"
    assert taken.run is not None
    assert taken.run.lease_left_ms == LEASE
    assert (await first.complete(seen, Outcome("late"))).outcome == "fenced"
