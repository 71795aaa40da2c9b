"""Attempts that are held: handed over, renewed, cancelled, ended, released."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anarchon_server.core import limits
from anarchon_server.core.errors import NotFoundError
from anarchon_server.core.limits import ASSIGNMENTS_MAX, LEASE_MAX, RESULTS_KEPT, RESULTS_MAX
from anarchon_server.core.messages import (
    Assigned,
    ClientExited,
    Lost,
    Method,
    Receipt,
    ReceiptStatus,
    Suspended,
)
from anarchon_server.core.model import (
    CancelReason,
    JobSpec,
    JobView,
    Outcome,
    OverlapPolicy,
    RetrySpec,
    RunState,
)
from anarchon_server.core.store import (
    CancelRun,
    Completion,
    Renewal,
    TokenAnswer,
    TokenOutcome,
)
from tests.unit.server.core.driver import (
    FAILED,
    START,
    FakeClient,
    Sidecar,
    World,
    current,
    every,
    ran,
    warnings,
)

LONG = every(60_000)
ALLOWED = OverlapPolicy.ALLOW


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


def running(spec: JobSpec = LONG, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """The same, with the run of slot 60 handed over, and said to be running."""
    world, sidecar, client = lone(spec, **options)
    world.run_until(60_000)
    client.keep_alive()
    assert client.only().attempt == 1
    return world, sidecar, client


def until_claimed(sidecar: Sidecar) -> None:
    """Comes to slot 60, whose claim alone waits for its answer."""
    sidecar.world.run_until(59_999)
    sidecar.wait_for(Method.CLAIM)
    while sidecar.waits(Method.BEAT):
        sidecar.answer(Method.BEAT)


def renewals(sidecar: Sidecar) -> list[Renewal]:
    return [renewal for beat in sidecar.beats for renewal in beat.renewals]


# --- Handing over ------------------------------------------------------------------------


def test_s10_what_was_won_is_handed_over_with_all_a_handler_needs() -> None:
    world, _, client = running(every(60_000, timeout_ms=9_000))
    assignment = client.only()
    run = world.run(60_000).run
    assert run.current is not None
    assert (assignment.token, assignment.job, assignment.slot) == (run.token, "sync", run.slot)
    assert (assignment.attempt, assignment.fence) == (1, run.current.fence)
    assert (assignment.trigger, assignment.cause) == ("schedule", "claim")
    assert (assignment.lease_end_at, assignment.timeout_ms) == (START + 90_000, 9_000)


def test_i7_what_was_won_early_is_not_handed_over_before_its_slot() -> None:
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    claim = sidecar.pending(Method.CLAIM)
    world.store_step = -700
    reply = sidecar.execute(claim)
    for _ in range(8):  # the sidecar learns that the store's clock is behind
        sidecar.engine._context.store_time.sample(60_000, 60_000, START + 59_300)
    sidecar.reply(claim, reply)
    assert current(world.run(60_000)) == (1, "claimed", "")
    world.run_until(60_699)
    assert client.running == {}
    world.run_until(60_700)
    assert client.only().slot == START + 60_000


def test_s14_runs_won_together_are_handed_over_together_in_parts_of_500() -> None:
    jobs = [every(60_000, f"job-{n}") for n in range(ASSIGNMENTS_MAX + 1)]
    _, sidecar, client = lone(*jobs, max_concurrency=1_000)
    until_claimed(sidecar)
    first = sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.reply(sidecar.pending(Method.CLAIM), first)
    sidecar.settle()
    sizes = [len(event.assignments) for event in client.events if isinstance(event, Assigned)]
    assert sizes == [500, 1]


def test_s14_one_claim_batch_larger_than_a_message_may_be_is_split() -> None:
    world, _, client = lone(*[every(60_000, f"job-{n}") for n in range(5)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "ASSIGNMENTS_MAX", 2)
        world.run_until(60_000)
    sizes = [len(event.assignments) for event in client.events if isinstance(event, Assigned)]
    assert sizes == [2, 2, 1]


def test_s24_what_was_won_while_the_stream_is_broken_waits_for_the_next_one() -> None:
    _, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    assert client.running == {}
    client.subscribe()
    assert client.only().slot == START + 60_000


def test_s16_what_was_won_by_a_slow_claim_is_renewed_before_it_is_handed_over() -> None:
    world, sidecar, client = lone(every(60_000, lease_ms=3_000))
    until_claimed(sidecar)
    world.now = 61_100  # trust ends at 62.5; a session of 1.5 s would outlive it
    client.keep_alive()
    sidecar.answer(Method.CLAIM)
    assert client.running == {}
    sidecar.answer(Method.BEAT)  # the one that was out
    assert client.running == {}
    (renewal,) = renewals(sidecar)
    sidecar.answer(Method.BEAT)
    assert client.only().token == renewal.token


def test_s13_a_client_that_drains_gives_back_what_it_was_not_handed_yet() -> None:
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.ask_to_live(draining=True)
    sidecar.settle()
    assert client.running == {}
    assert current(world.run(60_000)) == (1, "interrupted", "not_accepted")


def test_s13_a_job_that_the_client_offers_no_more_is_given_back() -> None:
    world, sidecar, client = lone(LONG, every(name="other"))
    sidecar.client(LONG, name="second", max_concurrency=1)
    until_claimed(sidecar)
    client.specs = (every(name="other"),)
    client.subscribe()
    sidecar.settle()
    run = world.run(60_000)
    assert "sync" not in {assignment.job for assignment in client.running.values()}
    assert current(run) == (1, "interrupted", "not_accepted")


def test_s15_a_session_that_now_trusts_for_longer_is_not_handed_a_shorter_lease() -> None:
    world, sidecar, client = lone(every(60_000, lease_ms=6_000))
    until_claimed(sidecar)
    client.specs = (every(60_000, lease_ms=60_000),)
    client.subscribe()
    client.keep_alive()
    beats = len(sidecar.beats)
    sidecar.settle()
    assert len(sidecar.beats) <= beats + 5, "nothing is renewed in vain"
    view = world.run(60_000)
    assert [attempt.reason for attempt in view.attempts] == ["not_accepted", ""]
    assert client.only().attempt == 2
    assert (view.run.lease is not None, view.lease_left_ms) == (True, 60_000)


def test_s11_a_run_won_for_a_client_that_left_goes_to_another_or_back() -> None:
    for second in (True, False):
        world, sidecar, client = lone(LONG, max_concurrency=2)
        other = sidecar.client(LONG, name="other", max_concurrency=1) if second else None
        until_claimed(sidecar)
        client.close()
        sidecar.settle()
        if other is not None:
            assert other.only().attempt == 1
        else:
            assert current(world.run(60_000)) == (1, "interrupted", "not_accepted")


def test_s24_what_waits_for_a_client_that_dies_goes_to_another_or_back() -> None:
    for second in (True, False):
        world, sidecar, client = lone(LONG, max_concurrency=2)
        until_claimed(sidecar)
        client.lose_stream()
        other = sidecar.client(LONG, name="other", max_concurrency=1) if second else None
        sidecar.answer(Method.CLAIM)
        client.exit()
        sidecar.settle()
        if other is not None:
            assert other.only().attempt == 1
        else:
            assert current(world.run(60_000)) == (1, "interrupted", "not_accepted")


# --- What a client says ------------------------------------------------------------------


def test_s30_a_run_is_running_once_a_keep_alive_names_it() -> None:
    world, _, client = lone(LONG)
    world.run_until(60_000)
    assert world.run(60_000).run.state is RunState.CLAIMED
    world.now = 60_400
    client.keep_alive()
    world.run_until(66_000)
    run = world.run(60_000).run
    assert run.current is not None
    assert (run.state, run.current.started_at) == (RunState.RUNNING, START + 60_400)


def test_s30_a_start_is_said_once_and_again_only_if_the_beat_failed() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(60_000)
    client.keep_alive()
    sidecar.wait_for(Method.BEAT)
    sidecar.fail(Method.BEAT)
    world.run_until(80_000)
    starts = [renewal.started_at for renewal in renewals(sidecar)]
    assert starts[:2] == [START + 60_000] * 2
    assert set(starts[2:]) == {None}


def silent_rounds(client: FakeClient, rounds: int, pause_ms: int = 5_000) -> None:
    """KeepAlives that name nothing."""
    for _ in range(rounds):
        client.sidecar.world.now += pause_ms
        client.sidecar.tick()
        client.ask_to_live("none.of.ours")
        client.sidecar.settle()


def sent(client: FakeClient) -> int:
    """How often the attempt was put on the stream."""
    return sum(isinstance(event, Assigned) for event in client.events)


def test_protocol_what_is_not_named_twice_in_a_row_is_sent_again() -> None:
    world, _, client = lone(LONG, deaf=True)
    world.run_until(60_000)
    assert sent(client) == 1
    silent_rounds(client, 1)
    assert sent(client) == 1
    silent_rounds(client, 1)
    assert sent(client) == 2


def test_s21_what_is_sent_again_has_what_is_left_of_its_timeout() -> None:
    world, _, client = lone(every(60_000, timeout_ms=50_000), deaf=True)
    world.run_until(60_000)
    silent_rounds(client, 2)
    first, again = (
        assignment.timeout_ms
        for event in client.events
        if isinstance(event, Assigned)
        for assignment in event.assignments
    )
    assert first == 50_000
    assert again == 50_000 - (world.now - 60_000)
    silent_rounds(client, 7)
    assert client.reasons() == []
    silent_rounds(client, 1)
    assert world.now == 110_000
    assert client.reasons() == [CancelReason.TIMEOUT]


def test_s21a_what_was_cancelled_before_the_client_named_it_is_not_sent_again() -> None:
    world, sidecar, client = lone(
        every(60_000, timeout_ms=7_000, cancel_grace_ms=60_000), deaf=True
    )
    world.run_until(60_000)
    silent_rounds(client, 12)
    assert client.reasons() == [CancelReason.TIMEOUT]
    assert sent(client) == 1
    assert not sidecar.logged("run_not_accepted")
    assert world.run(60_000).run.cancel is CancelReason.TIMEOUT


def test_protocol_one_silence_between_two_names_is_forgotten() -> None:
    world, _, client = running()
    token = client.only().token
    for _ in range(5):
        silent_rounds(client, 1)
        client.keep_alive(token)
    assert sent(client) == 1
    assert current(world.run(60_000)) == (1, "running", "")


def test_s19_what_a_client_never_accepts_is_given_back_and_counts_no_attempt() -> None:
    world, sidecar, client = lone(LONG, deaf=True)
    world.run_until(60_000)
    silent_rounds(client, 12)
    assert sent(client) == 3
    assert sidecar.logged("run_not_accepted")
    run = world.run(60_000).run
    assert (run.attempt, run.state, run.freed, run.lost) == (1, "interrupted", "not_accepted", 0)


def test_s19_a_client_that_leaves_attempts_unaccepted_has_no_room_until_it_comes_again() -> None:
    world, sidecar, client = lone(LONG, deaf=True)
    world.run_until(60_000)
    silent_rounds(client, 10)
    while not sidecar.logged("run_not_accepted"):
        silent_rounds(client, 1)
    client.ask_to_live()
    sidecar.settle()
    assert not [claim for claim in sidecar.claims if claim.seen_attempt and claim.may_run]
    client.deaf = False
    client.subscribe()
    client.keep_alive()
    world.run_for(6_000)
    assert client.only().attempt == 2


def test_s19_a_client_that_leaves_attempts_unaccepted_is_tried_again_later_and_later() -> None:
    world, sidecar, client = lone(LONG, deaf=True)
    world.run_until(60_000)
    given_back: list[int] = []
    for _ in range(200):
        silent_rounds(client, 1)
        lines = sidecar.logged("run_not_accepted")
        given_back += [world.now] * (len(lines) - len(given_back))
    gaps = [later - earlier for earlier, later in pairwise(given_back)]
    assert len(gaps) >= 3
    assert gaps == sorted(gaps)
    assert gaps[-1] > 2 * gaps[0]


def test_s19_a_client_that_names_an_attempt_has_room_again() -> None:
    world, sidecar, client = lone(every(60_000), every(60_000, "other"), deaf=True)
    world.run_until(60_000)
    first, second = sidecar.claims[-2:]
    for _ in range(12):
        world.now += 5_000
        sidecar.tick()
        client.ask_to_live("x")
        sidecar.settle()
    assert len(sidecar.logged("run_not_accepted")) == 2
    session = sidecar.engine._context.sessions.get("client")
    assert session is not None
    assert session.blocked
    assert first.token != second.token


def test_s19_an_accepted_attempt_that_a_client_names_no_more_counts_as_lost() -> None:
    world, _, client = running()
    silent_rounds(client, 12)
    view = world.run(60_000)
    assert view.attempts[0].reason == "runner_lost"
    assert view.run.lost == 1


def test_protocol_what_a_client_names_and_does_not_own_is_named_in_lost() -> None:
    _, sidecar, client = running()
    second = sidecar.client(LONG, name="second")
    token = client.only().token
    answer = second.keep_alive(token, "1.a.b", "no token")
    assert answer.lost == tuple(
        Lost(each, CancelReason.FENCED) for each in sorted([token, "1.a.b", "no token"])
    )
    assert client.keep_alive().lost == ()


def test_s13_what_a_client_runs_and_should_not_takes_room() -> None:
    world, sidecar, client = lone(every(overlap=ALLOWED), max_concurrency=1)
    world.run_until(9_000)
    client.keep_alive("1.a.b")
    world.run_until(10_000)
    assert not [claim for claim in sidecar.claims if claim.may_run]
    client.keep_alive()
    client.ask_to_live()
    sidecar.settle()
    assert client.only().slot == START + 10_000


# --- Renewing ----------------------------------------------------------------------------


def test_s15_a_lease_is_renewed_every_heartbeat() -> None:
    world, sidecar, client = running()
    world.run_until(120_000)
    ends = {world.run(60_000).run.lease}
    assert len(renewals(sidecar)) in range(11, 15)
    assert client.cancelled == []
    (lease,) = ends
    assert lease is not None
    assert lease.end_at - START > 144_000


def test_s15_a_lease_is_renewed_in_time_though_its_job_is_not_offered_any_more() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=3_000))
    client.specs = (every(name="other"),)
    client.subscribe()
    client.keep_alive()
    world.run_until(75_000)
    assert client.cancelled == []
    assert world.run(60_000).run.state is RunState.RUNNING
    assert len(renewals(sidecar)) > 20


def test_s16_a_handler_is_cancelled_a_margin_before_its_lease_ends() -> None:
    world, sidecar, client = running()
    world.run_until(61_000)
    lease = world.run(60_000).run.lease
    assert lease is not None
    sidecar.away = "refused"
    last_sent = max(s for s in [60_000, lease.end_at - START - 30_000])
    world.run_until(last_sent + 24_999)
    assert client.cancelled == []
    world.run_until(last_sent + 25_000)
    assert client.reasons() == [CancelReason.LEASE_LOST]
    assert lease.end_at - START == world.now + 5_000
    assert sidecar.logged("lease_lost")


def test_i8_trust_is_counted_from_the_sending_of_the_claim() -> None:
    world, sidecar, client = lone(every(60_000, heartbeat_ms=10_000))
    until_claimed(sidecar)
    world.now = 61_500
    sidecar.answer(Method.CLAIM)  # the store's lease ends at 91.5
    sidecar.away = "refused"
    world.run_until(84_999)
    assert client.cancelled == []
    world.run_until(85_000)
    assert client.reasons() == [CancelReason.LEASE_LOST]


def test_i8_trust_is_counted_from_the_sending_of_the_heartbeat() -> None:
    world, sidecar, client = running()
    beat = sidecar.wait_for(Method.BEAT)
    sent_at = world.now
    assert beat.arguments[0].renewals
    world.now += 1_900
    sidecar.answer(Method.BEAT)  # the store's lease is 30 s from here
    sidecar.away = "refused"
    world.run_until(sent_at + 24_999)
    assert client.cancelled == []
    world.run_until(sent_at + 25_000)
    assert client.reasons() == [CancelReason.LEASE_LOST]


def test_s17_a_token_that_counts_no_more_cancels_its_handler_as_fenced() -> None:
    world, sidecar, client = running()
    world.run_until(66_000)
    reply = TokenAnswer(TokenOutcome.FENCED, world.run(60_000))
    beat = sidecar.wait_for(Method.BEAT)
    answered = sidecar.execute(beat)
    parts = replace(answered.answers[0], renewals=(reply,))
    sidecar.reply(beat, replace(answered, answers=(parts,)))
    assert client.reasons() == [CancelReason.FENCED]
    assert client.cancelled[0].message == "attempt 1 is running on a"
    assert sidecar.logged("run_fenced")
    assert client.keep_alive().lost == (Lost(client.only().token, CancelReason.FENCED),)


def test_s17_a_run_that_is_gone_from_the_store_is_fenced() -> None:
    world, sidecar, client = running()
    world.restore()
    world.run_until(66_000)
    assert client.reasons() == [CancelReason.FENCED]
    assert client.cancelled[0].message == "the run is gone from the store"
    assert "run_fenced" in warnings(sidecar)


def test_s17_what_was_won_and_lost_before_it_was_handed_over_is_told_to_nobody() -> None:
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    world.restore()
    beat = sidecar.wait_for(Method.BEAT)
    sidecar.reply(beat, sidecar.execute(beat))
    client.subscribe()
    assert (client.running, client.cancelled) == ({}, [])
    assert sidecar.logged("run_fenced")


def test_s21a_what_is_cancelled_before_it_was_handed_over_ends_and_nothing_of_it_is_left() -> None:
    """Its renewal's answer shows the cancel: with the attempt, the trust in its lease is over."""
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    ran(world.store.control([CancelRun("sync", START + 60_000)]))
    world.run_for(120_000)
    client.subscribe()
    world.run_for(1_000)
    assert (client.running, client.cancelled) == ({}, [])
    assert current(world.run(60_000)) == (1, "failed", "cancelled")


def test_s19_a_lease_that_lapsed_before_it_was_handed_over_is_released_uncounted() -> None:
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    session = sidecar.engine._context.sessions.get("client")
    assert session is not None
    sidecar.away = "refused"
    for _ in range(6):
        world.run_for(4_500)
        client.ask_to_live()
    sidecar.away = None
    world.run_for(2_000)
    assert client.running == {}
    run = world.run(60_000).run
    assert (run.freed, run.lost) == ("not_accepted", 0)


def test_s4_after_a_suspension_nothing_is_handed_over_before_the_store_has_confirmed_it() -> None:
    _, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    sidecar.feed(Suspended(2_000))
    client.subscribe()
    assert client.running == {}
    sidecar.answer(Method.BEAT)
    assert client.only().slot == START + 60_000


def test_s4_after_a_suspension_a_keep_alive_is_answered_once_the_store_has_confirmed() -> None:
    world, sidecar, client = running()
    world.jump(4_000)
    sidecar.feed(Suspended(4_000))
    number = client.ask_to_live()
    assert sidecar.answer_to(number) is None
    sidecar.settle()
    assert sidecar.answer_to(number).session_ttl_ms == 15_000


def test_s4_after_a_suspension_longer_than_all_trust_nothing_is_renewed() -> None:
    world, sidecar, client = running()
    world.jump(40_000)
    sidecar.feed(Suspended(40_000))
    assert isinstance(client.error, NotFoundError)
    assert sidecar.logged("lease_lost")
    sidecar.settle()
    assert renewals(sidecar) == []
    assert current(world.run(60_000)) == (1, "interrupted", "runner_lost")


def test_s27_a_beat_that_failed_is_repeated_within_a_second() -> None:
    world, sidecar, client = running()
    sidecar.wait_for(Method.BEAT)
    sidecar.fail(Method.BEAT)
    failed_at = world.now
    sidecar.wait_for(Method.BEAT)
    assert world.now <= failed_at + 1_000
    assert [renewal.token for renewal in sidecar.beats[-1].renewals] == [client.only().token]


def test_s27_the_failure_of_a_beat_means_nothing_to_what_ended_meanwhile() -> None:
    world, sidecar, client = running()
    sidecar.wait_for(Method.BEAT)
    client.complete()
    sidecar.answer(Method.COMPLETE)
    sidecar.fail(Method.BEAT)
    world.run_until(70_000)
    assert current(world.run(60_000)) == (1, "success", "")


def test_s27_the_answer_to_a_beat_means_nothing_to_what_ended_meanwhile() -> None:
    _, sidecar, client = running()
    beat = sidecar.wait_for(Method.BEAT)
    reply = sidecar.execute(beat)
    client.complete()
    sidecar.answer(Method.COMPLETE)
    sidecar.reply(beat, reply)
    assert client.cancelled == []


# --- Timeouts and cancels ----------------------------------------------------------------

TIMED = every(60_000, timeout_ms=7_000)


def test_s21_an_attempt_that_outlives_its_timeout_is_cancelled_and_failed() -> None:
    world, _, client = running(TIMED)
    world.run_until(66_999)
    assert client.cancelled == []
    world.run_until(67_000)
    assert client.reasons() == [CancelReason.TIMEOUT]
    number = client.complete(stopped=CancelReason.TIMEOUT)
    client.sidecar.settle()
    assert client.receipts(number) == (Receipt(ReceiptStatus.RECORDED, RunState.FAILED),)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s21_a_handler_that_returns_after_all_is_failed_too() -> None:
    world, sidecar, client = running(TIMED)
    world.run_until(68_000)
    number = client.complete(result="too late")
    sidecar.settle()
    (receipt,) = client.receipts(number)
    assert (receipt.status, receipt.state) == (ReceiptStatus.ALREADY_COMPLETED, RunState.FAILED)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s22_a_handler_that_returns_while_it_is_told_of_its_timeout_is_retried() -> None:
    """By its client's measure, which begins later than the sidecar's, it was in time."""
    world, sidecar, client = running(every(60_000, timeout_ms=7_000, retry=RetrySpec(1)))
    world.run_until(68_000)
    client.complete(result="at the same time", elapsed_ms=6_999)
    sidecar.settle()
    assert world.run(60_000).run.state is RunState.RETRYING


def test_s21_a_result_in_time_is_not_timed_out() -> None:
    world, _, client = running(TIMED)
    client.complete(result="in time")
    world.run_until(80_000)
    assert client.cancelled == []
    assert current(world.run(60_000)) == (1, "success", "")


def test_s21a_a_handler_that_ignores_its_cancel_is_renewed_for_its_grace_and_no_longer() -> None:
    world, sidecar, _ = running(TIMED)
    world.run_until(72_000)
    assert sidecar.logged("cancel_ignored")
    lease = world.run(60_000).run.lease
    assert lease is not None
    over_at = lease.end_at - START
    assert over_at <= 72_000 + 30_000
    world.run_until(over_at - 1)
    assert current(world.run(60_000)) == (1, "running", "")
    world.run_until(over_at + 1_000)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s21a_its_place_is_taken_until_the_client_reports() -> None:
    world, sidecar, client = running(
        every(60_000, timeout_ms=7_000, overlap=ALLOWED), max_concurrency=1
    )
    world.run_until(121_000)
    assert [claim.may_run for claim in sidecar.claims if claim.slot == START + 120_000] == [False]
    assert client.reasons() == [CancelReason.TIMEOUT]
    assert client.keep_alive().lost[0].reason is CancelReason.TIMEOUT
    client.complete(result="at last")
    sidecar.settle()
    assert client.only().slot == START + 120_000


def test_s21a_its_place_is_free_once_the_client_names_it_no_more() -> None:
    world, _, client = running(every(60_000, timeout_ms=7_000, overlap=ALLOWED), max_concurrency=1)
    world.run_until(121_000)
    client.running.clear()
    world.run_until(127_000)
    assert client.only().slot == START + 120_000


@pytest.mark.parametrize("grace", [0, 5_000])
def test_s21_the_store_knows_of_a_timeout_before_the_run_is_left_to_its_lease(grace: int) -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=7_000, cancel_grace_ms=grace))
    world.run_until(66_500)
    sidecar.away = "refused"
    world.run_until(67_000 + grace + 3_000)
    assert not sidecar.logged("cancel_ignored")
    sidecar.away = None
    world.run_for(2_000)
    assert sidecar.logged("cancel_ignored")
    assert world.run(60_000).run.cancel is CancelReason.TIMEOUT
    world.run_until(119_000)
    assert client.reasons() == [CancelReason.TIMEOUT]
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s25_a_timeout_after_the_session_was_lost_has_nobody_to_tell() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=17_000))
    client.next_at = None
    world.run_until(78_000)
    assert sidecar.logged("session_lost")
    assert sidecar.logged("run_cancelled")
    assert client.cancelled == []
    world.run_until(81_000)
    assert current(world.run(60_000)) == (1, "interrupted", "runner_lost")


def test_s21a_a_second_cancel_does_not_begin_the_grace_again() -> None:
    job = every(60_000, timeout_ms=4_000, stop_grace_ms=3_000, cancel_grace_ms=9_000)
    world, sidecar, client = running(job)
    sidecar.stop()
    world.run_until(64_000)
    assert client.reasons() == [CancelReason.SHUTDOWN, CancelReason.TIMEOUT]
    world.run_until(71_999)
    assert not sidecar.logged("cancel_ignored")
    world.run_until(72_000)
    assert sidecar.logged("cancel_ignored")


def test_s21a_a_cancel_that_is_heard_of_after_its_grace_reaches_the_handler_all_the_same() -> None:
    """The token is renewed no more; what the handler reports still ends the run."""
    world, sidecar, client = running(every(60_000, cancel_grace_ms=500))
    sidecar.away = "refused"
    ran(world.store.control([CancelRun("sync", START + 60_000)]))
    world.run_for(6_000)
    assert client.reasons() == []
    sidecar.away = None
    world.run_for(6_000)
    assert client.reasons() == [CancelReason.REQUESTED]
    client.complete(client.only().token, stopped=CancelReason.REQUESTED)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "cancelled")


def test_s21a_a_result_within_the_grace_ends_it() -> None:
    world, sidecar, client = running(TIMED)
    world.run_until(67_500)
    client.complete(stopped=CancelReason.TIMEOUT)
    world.run_until(80_000)
    assert not sidecar.logged("cancel_ignored")


def test_s21a_the_end_of_a_grace_means_nothing_to_a_result_on_its_way() -> None:
    world, sidecar, client = running(TIMED)
    world.run_until(67_500)
    client.complete(stopped=CancelReason.TIMEOUT)
    sidecar.away = "refused"
    world.run_until(73_000)
    assert not sidecar.logged("cancel_ignored")
    sidecar.away = None
    world.run_until(75_000)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s18_the_next_slot_does_not_run_beside_a_handler_that_ignores_its_timeout() -> None:
    world, _, client = lone(every(timeout_ms=5_000))
    world.run_until(20_500)
    assert client.reasons() == [CancelReason.TIMEOUT]
    assert current(world.run(20_000)) == (0, "skipped", "overlap")
    assert client.only().slot == START + 10_000


# --- Results -----------------------------------------------------------------------------


def test_s17_results_are_recorded_and_answered_in_the_order_of_the_request() -> None:
    world, sidecar, client = lone(every(60_000), every(60_000, "other"))
    world.run_until(60_000)
    good, bad = client.running
    number = client.complete(good, result="42")
    assert sidecar.answer_to(number) is None, "not before the store has it"
    other = client.complete(bad, "no token", **FAILED)
    sidecar.settle()
    assert client.receipts(number) == (Receipt(ReceiptStatus.RECORDED, RunState.SUCCESS),)
    assert client.receipts(other) == (
        Receipt(ReceiptStatus.RECORDED, RunState.FAILED),
        Receipt(ReceiptStatus.UNKNOWN_TOKEN),
    )


def test_s14_results_that_fall_together_go_together() -> None:
    jobs = [every(60_000, f"job-{n}") for n in range(3)]
    world, sidecar, client = lone(*jobs)
    world.run_until(60_000)
    first, *rest = client.running
    client.complete(first)
    for token in rest:
        client.complete(token)
    sidecar.settle()
    assert [len(batch) for batch in sidecar.called(Method.COMPLETE)] == [1, 2]


def test_s14_a_batch_of_results_has_a_limit() -> None:
    _, sidecar, client = lone(LONG)
    client.complete("1.a.sync")
    client.complete(*[f"{n}.a.sync" for n in range(2, RESULTS_MAX + 3)])
    sidecar.settle()
    assert [len(batch) for batch in sidecar.called(Method.COMPLETE)] == [1, 1_000, 1]


def test_a_request_without_results_is_answered_at_once() -> None:
    _, sidecar, client = lone(LONG)
    assert client.receipts(client.complete()) == ()
    assert not sidecar.waits(Method.COMPLETE)


def test_s27_results_wait_in_memory_until_the_store_is_back() -> None:
    world, sidecar, client = running()
    sidecar.away = "unknown"
    world.run_until(62_000)
    number = client.complete(result="done")
    world.run_until(80_000)
    assert sidecar.answer_to(number) is None
    sidecar.away = None
    world.run_until(81_500)
    assert client.receipts(number)[0].status is ReceiptStatus.RECORDED
    assert current(world.run(60_000)) == (1, "success", "")


def test_s27_what_has_finished_is_renewed_until_its_result_is_recorded() -> None:
    world, sidecar, client = running()
    client.complete(result="done")
    call = sidecar.pending(Method.COMPLETE)
    world.now = 84_000
    sidecar.tick()
    while sidecar.waits(Method.BEAT):
        sidecar.answer(Method.BEAT)
    assert world.run(60_000).lease_left_ms == 30_000
    sidecar.reply(call, sidecar.execute(call))
    assert current(world.run(60_000)) == (1, "success", "")


def test_s27_a_result_is_given_up_after_five_minutes_and_its_caller_told() -> None:
    world, sidecar, client = running()
    sidecar.away = "refused"
    number = client.complete(result="done")
    world.run_for(RESULTS_KEPT)
    assert sidecar.answer_to(number) is None
    world.run_for(2_000)
    assert client.receipts(number) == (Receipt(ReceiptStatus.STORE_UNAVAILABLE),)
    assert sidecar.logged("result_given_up")


@pytest.mark.parametrize(
    "outcome",
    [
        {"result": "late"},
        {"stopped": CancelReason.LEASE_LOST},
        {"stopped": CancelReason.SHUTDOWN},
        FAILED,
    ],
)
def test_s21_what_outlived_its_timeout_is_that_though_the_store_was_away(
    outcome: dict[str, Any],
) -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=4_000, cancel_grace_ms=1_000))
    token = client.only().token
    sidecar.away = "refused"
    world.run_for(40_000)
    assert client.reasons() == [CancelReason.TIMEOUT, CancelReason.LEASE_LOST]
    client.complete(token, elapsed_ms=4_001, **outcome)
    sidecar.away = None
    world.run_for(2_000)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s21_what_ended_in_its_time_counts_as_it_ended() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=4_000))
    client.complete(result="done", elapsed_ms=4_000)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "success", "")


def restarted(spec: JobSpec) -> tuple[World, Sidecar, FakeClient, str]:
    """A sidecar that was restarted while slot 60 ran; its client has not subscribed yet."""
    world, sidecar, client = running(spec)
    sidecar.die()
    new = Sidecar(world, "b")
    again = FakeClient(new, "again", (spec,))
    return world, new, again, client.only().token


@pytest.mark.parametrize("who", ["the store", "its client", "the store, though the sidecar stops"])
def test_s21_what_outlived_its_timeout_is_that_though_it_came_before_its_client_subscribed(
    who: str,
) -> None:
    """The sidecar was away when it should have told so, and its successor does not know the job."""
    world, sidecar, client, token = restarted(every(60_000, timeout_ms=4_000))
    number = client.complete(token, result="late", elapsed_ms=4_001)
    again = client.complete(token, result="late", elapsed_ms=4_002)
    assert sidecar.called(Method.JOBS) == [("sync",)]
    if who == "its client":
        client.subscribe()
    elif who != "the store":
        sidecar.stop()
    assert sidecar.called(Method.COMPLETE) == [] or who == "its client"
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "timeout")
    recorded = (Receipt(ReceiptStatus.RECORDED, RunState.FAILED),)
    assert client.receipts(number) == client.receipts(again) == recorded


def test_s21_what_outlived_its_timeout_is_that_though_the_store_was_away_when_it_was_asked() -> (
    None
):
    """The client went, and the store was away for longer than either is waited for."""
    world, sidecar, client, token = restarted(every(60_000, timeout_ms=4_000))
    sidecar.away = "refused"
    client.complete(token, result="late", elapsed_ms=4_001)
    world.run_for(3 * limits.JOB_AWAITED)
    sidecar.away = None
    world.run_for(2_000)
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s19_a_result_waits_no_longer_for_a_job_that_the_store_cannot_show_while_it_does_all_else() -> (
    None
):
    """A reading of jobs may fail by itself; waited for on and on, the run would be taken over."""
    world, sidecar, client, token = restarted(LONG)
    backup = Sidecar(world, "c")
    backup.ready_client(LONG)
    sidecar.failing = frozenset({Method.JOBS})
    client.complete(token, result="done")
    sidecar.settle()
    world.run_for(limits.JOB_AWAITED - 1)
    assert current(world.run(60_000)) == (1, "claimed", "")
    world.run_for(1_000)
    assert current(world.run(60_000)) == (1, "success", "")


def test_s21_a_client_that_subscribes_makes_up_for_a_store_that_did_not_answer() -> None:
    world, sidecar, client, token = restarted(every(60_000, timeout_ms=4_000))
    client.complete(token, result="late", elapsed_ms=4_001)
    sidecar.fail(Method.JOBS)
    world.now += limits.RETRY_MAX
    sidecar.tick()
    client.subscribe()
    sidecar.fail(Method.JOBS)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s19_a_result_that_came_before_its_client_subscribed_is_recorded_while_its_lease_lives() -> (
    None
):
    """The longest that a client is waited for is twice such a lease."""
    world, sidecar, client, token = restarted(every(60_000, lease_ms=limits.LEASE_MIN))
    backup = Sidecar(world, "c")
    backup.ready_client(every(60_000, lease_ms=limits.LEASE_MIN))
    client.complete(token, result="done")
    sidecar.settle()
    world.run_for(2 * limits.LEASE_MIN)
    assert current(world.run(60_000)) == (1, "success", "")


def test_s21_what_outlived_its_timeout_is_that_though_its_session_is_gone_and_the_sidecar_stops() -> (
    None
):
    """Both were frozen past the lease: the job is offered by nobody, and will not be again."""
    world, sidecar, client = running(every(60_000, timeout_ms=4_000))
    token = client.only().token
    client.lose_stream()
    client.silent = True
    sidecar.away = "refused"
    world.run_for(60_000)
    sidecar.away = None
    client.complete(token, result="late", elapsed_ms=60_000)
    sidecar.stop()
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "timeout")


@pytest.mark.parametrize(("remembered", "asks"), [(2, False), (1, True)])
def test_s21_what_jobs_were_like_is_remembered_of_so_many(
    monkeypatch: pytest.MonkeyPatch, remembered: int, asks: bool
) -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=4_000))
    token = client.only().token
    second = sidecar.client(every(60_000, name="other"), name="second")
    monkeypatch.setattr(limits, "JOBS_MAX", remembered)
    for each in (client, second):
        each.lose_stream()
        each.silent = True
        sidecar.away = "refused"
        world.run_for(60_000)
    sidecar.away = None
    world.run_for(2_000)
    client.complete(token, result="late", elapsed_ms=60_000)
    sidecar.settle()
    assert bool(sidecar.called(Method.JOBS)) is asks


def test_s22_a_failure_that_came_before_its_client_subscribed_is_retried() -> None:
    world, sidecar, client, token = restarted(every(60_000, retry=RetrySpec(1)))
    client.complete(token, **FAILED)
    sidecar.settle()
    assert world.run(60_000).run.state is RunState.RETRYING


OF_A_LATER_VERSION = JobView("sync", every(retry=RetrySpec(10_000)), 0, False, (), None)


@pytest.mark.parametrize("answers", [(), (OF_A_LATER_VERSION,)])
@pytest.mark.parametrize("how", ["nobody offers the job", "the sidecar stops"])
def test_s27_a_result_whose_job_the_store_does_not_know_waits_only_so_long(
    how: str, answers: tuple[JobView, ...]
) -> None:
    world, sidecar, client, token = restarted(LONG)
    sidecar.settle()
    number = client.complete(token, result="done")
    sidecar.answer_by_hand(Method.JOBS, *answers)
    world.run_for(limits.JOB_AWAITED - 1)
    assert sidecar.answer_to(number) is None
    if how == "the sidecar stops":
        sidecar.stop()
        sidecar.settle()
    else:
        world.run_for(1_000)
    assert client.receipts(number) == (Receipt(ReceiptStatus.RECORDED, RunState.SUCCESS),)
    assert len(sidecar.called(Method.JOBS)) == 1


def test_s27_the_store_is_asked_for_a_page_of_jobs_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PAGE_MAX", 1)
    world = World()
    sidecar = Sidecar(world)
    client = FakeClient(sidecar, "client", (LONG,))
    for job in ("one", "two", "three"):
        client.complete(f"{START}.a.{job}", result="done")
    sidecar.settle()
    assert sidecar.called(Method.JOBS) == [("one",), ("two",), ("three",)]


def test_s23_what_obeyed_a_stop_waits_for_no_job() -> None:
    world, sidecar, client, token = restarted(LONG)
    client.complete(token, stopped=CancelReason.SHUTDOWN)
    sidecar.settle()
    assert current(world.run(60_000))[1] == "interrupted"


def test_s27_a_result_is_kept_as_long_as_its_lease() -> None:
    world, sidecar, client = lone(every(1_000_000, lease_ms=LEASE_MAX))
    world.run_until(1_000_000)
    sidecar.away = "refused"
    number = client.complete(result="done")
    world.run_for(2 * RESULTS_KEPT)
    assert sidecar.answer_to(number) is None
    sidecar.away = None
    world.run_for(2_000)
    assert client.receipts(number) == (Receipt(ReceiptStatus.RECORDED, RunState.SUCCESS),)


def test_s27_no_more_results_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sidecar, client = running()
    monkeypatch.setattr(limits, "RESULTS_WAITING_MAX", 1)
    sidecar.away = "refused"
    first, second = (f"{START}.{nonce}.sync" for nonce in "ab")
    assert sidecar.answer_to(client.complete(first)) is None
    assert client.receipts(client.complete(second)) == (Receipt(ReceiptStatus.STORE_UNAVAILABLE),)


def test_protocol_a_token_named_just_before_its_receipt_came_takes_no_room() -> None:
    _, sidecar, client = running(max_concurrency=1)
    token = client.only().token
    client.complete(token, result="done")
    sidecar.settle()
    assert client.keep_alive(token).lost == ()
    session = sidecar.engine._context.sessions.get("client")
    assert session is not None
    assert session.room == 1


def test_protocol_tokens_recorded_lately_are_remembered_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, sidecar, client = running()
    monkeypatch.setattr(limits, "RECORDED_REMEMBERED", 1)
    first = client.only().token
    client.complete(first, result="done")
    world.run_until(120_000)
    client.complete(result="done")
    sidecar.settle()
    assert [gone.token for gone in client.keep_alive(first).lost] == [first]


def test_protocol_confirm_is_answered_by_a_renewal_that_was_asked_for_after_it() -> None:
    _, sidecar, client = running()
    token = client.only().token
    sidecar.wait_for(Method.BEAT)
    while not sidecar.beats[-1].renewals:
        sidecar.answer(Method.BEAT)
        sidecar.wait_for(Method.BEAT)
    asked = client.ask_to_live(token, confirm=(token,))
    sidecar.settle()
    assert sidecar.answer_to(asked).confirmed == (token,)


def test_s4_a_renewal_sent_before_the_suspension_confirms_nothing() -> None:
    world, sidecar, client = running()
    sidecar.wait_for(Method.BEAT)
    while not sidecar.beats[-1].renewals:
        sidecar.answer(Method.BEAT)
        sidecar.wait_for(Method.BEAT)
    world.now += 2_000
    sidecar.feed(Suspended(2_000))
    sidecar.answer(Method.BEAT)
    hold = sidecar.engine._holding.held(client.only().token)
    assert hold is not None
    assert not hold.confirmed
    sidecar.settle()
    assert hold.confirmed


def test_s15_a_lease_won_under_an_older_definition_is_renewed_in_its_own_time() -> None:
    _, sidecar, _ = lone(every(60_000, lease_ms=3_000), name="short")
    until_claimed(sidecar)
    sidecar.client(every(60_000, lease_ms=LEASE_MAX), name="long")
    sidecar.answer(Method.CLAIM)
    (hold,) = sidecar.engine._holding
    assert (hold.lease_ms, hold.heartbeat_ms) == (3_000, 1_000)
    assert hold.renew_at <= sidecar.world.now + 1_000


def test_s17_a_result_that_is_repeated_while_it_is_on_its_way_is_answered_with_it() -> None:
    world, sidecar, client = running()
    token = client.only().token
    first = client.complete(token, result="done", elapsed_ms=5)
    again = client.complete(token, result="done", elapsed_ms=900)
    sidecar.settle()
    assert client.receipts(first) == client.receipts(again)
    assert client.receipts(again)[0].status is ReceiptStatus.RECORDED
    assert len(sidecar.called(Method.COMPLETE)) == 1
    late = client.complete(token, result="done")
    sidecar.settle()
    assert client.receipts(late)[0].status is ReceiptStatus.RECORDED
    assert current(world.run(60_000)) == (1, "success", "")


def test_i3_a_second_outcome_does_not_replace_one_that_is_on_its_way() -> None:
    world, sidecar, client = running()
    token = client.only().token
    first = client.complete(token, result="done")
    second = client.complete(token, **FAILED)
    assert client.receipts(second)[0].status is ReceiptStatus.ALREADY_COMPLETED
    sidecar.settle()
    assert client.receipts(first)[0].status is ReceiptStatus.RECORDED
    assert current(world.run(60_000)) == (1, "success", "")


def test_s17_a_result_counts_from_any_process_and_a_strange_one_is_answered() -> None:
    _, sidecar, client = running()
    other = Sidecar(sidecar.world, "b").ready_client()
    token = client.only().token
    number = other.complete(token, f"{START}.x.sync", result="elsewhere")
    other.sidecar.settle()
    recorded, unknown = other.receipts(number)
    assert recorded.status is ReceiptStatus.RECORDED
    assert unknown.status is ReceiptStatus.UNKNOWN_TOKEN
    assert other.sidecar.logged("result_not_recorded")


def test_s17_the_result_of_an_attempt_that_was_taken_over_is_fenced() -> None:
    world, sidecar, client = running(every(60_000, lease_ms=3_000))
    other = Sidecar(world, "b").ready_client(every(60_000, lease_ms=3_000))
    sidecar.away = "refused"
    world.run_until(66_000)
    assert other.only().attempt == 2
    sidecar.away = None
    number = client.complete(result="too late")
    sidecar.settle()
    (receipt,) = client.receipts(number)
    assert (receipt.status, receipt.message) == (
        ReceiptStatus.FENCED,
        "attempt 2 is running on b",
    )


@pytest.mark.parametrize("reason", [CancelReason.LEASE_LOST, CancelReason.FENCED])
def test_s21a_a_stop_for_a_lost_lease_changes_nothing_in_the_store(reason: CancelReason) -> None:
    world, sidecar, client = running()
    number = client.complete(stopped=reason)
    assert client.receipts(number) == (Receipt(ReceiptStatus.FENCED),)
    sidecar.settle()
    assert sidecar.called(Method.COMPLETE) == []
    assert sidecar.engine._holding.running == 0
    world.run_until(80_000)
    assert renewals(sidecar) == [] or world.run(60_000).run.lease is not None


def test_s23_a_result_for_what_was_not_handed_over_yet_is_taken() -> None:
    world, sidecar, client = lone(LONG)
    until_claimed(sidecar)
    client.lose_stream()
    sidecar.settle()
    (claim,) = sidecar.claims
    client.complete(claim.token, result="psychic")
    client.subscribe()
    sidecar.settle()
    assert client.running == {}
    assert current(world.run(60_000)) == (1, "success", "")


def test_s25_the_result_of_a_lost_session_still_counts() -> None:
    world, sidecar, client = running()
    client.silent = True
    world.run_until(76_000)
    assert sidecar.logged("session_lost")
    client.complete(result="done")
    sidecar.settle()
    world.run_until(90_000)
    assert current(world.run(60_000)) == (1, "success", "")
    assert sidecar.called(Method.RELEASE) == []


# --- Releases ----------------------------------------------------------------------------


def test_s24_a_release_that_failed_is_repeated_until_the_store_has_answered() -> None:
    world, sidecar, client = running()
    sidecar.away = "unknown"
    client.exit()
    world.run_until(75_000)
    assert current(world.run(60_000))[1] == "claimed"
    sidecar.away = None
    world.run_until(76_500)
    assert current(world.run(60_000)) == (1, "interrupted", "runner_lost")
    assert [line.fields["reason"] for line in sidecar.logged("run_released")] == ["runner_lost"]


def test_s24_a_release_is_given_up_when_the_longest_lease_has_ended_by_itself() -> None:
    world, sidecar, client = running()
    sidecar.away = "refused"
    client.exit()
    world.run_for(LEASE_MAX + 5_000)
    sidecar.away = None
    world.run_for(5_000)
    assert not sidecar.logged("run_released")
    assert current(world.run(60_000))[2] == "runner_lost", "read from the lease"
    assert world.run(60_000).run.freed == ""


def test_s17_a_release_that_comes_too_late_is_not_logged_as_one() -> None:
    world, sidecar, client = running()
    token = client.only().token
    sidecar.feed(ClientExited("client"))
    done = Completion("sync", START + 60_000, token, Outcome("elsewhere"))
    ran(world.store.complete([done]))
    sidecar.settle()
    assert not sidecar.logged("run_released")
    assert current(world.run(60_000)) == (1, "success", "")
