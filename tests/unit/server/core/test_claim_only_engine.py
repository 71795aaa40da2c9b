"""An instance on a store without leases: nobody takes over, and who reported a failure retries it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core import claim_only
from anarchon_server.core.errors import InvalidError, InvalidJobsError, UnsupportedError
from anarchon_server.core.limits import (
    ATTEMPTS_SHOWN,
    DAY,
    HOUR,
    JOB_AWAITED,
    MINUTE,
    UNKNOWN_ASKED_FOR,
)
from anarchon_server.core.messages import (
    Attached,
    CallStore,
    KeepAliveAnswer,
    Method,
    ReceiptStatus,
    Suspended,
)
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    Reason,
    RetrySpec,
    Run,
    RunState,
    Trigger,
)
from anarchon_server.core.policy import resolve
from anarchon_server.core.store import (
    CLAIM_ONLY_OVERLAP,
    CancelRun,
    Capabilities,
    ClaimAnswer,
    ClaimOutcome,
    Pause,
    TriggerRun,
)
from tests.unit.server.core.driver import (
    FAILED,
    START,
    FakeClient,
    Sidecar,
    World,
    current,
    every,
    holder,
    ran,
)

SLOT = 10_000
LOST = (1, "failed", "runner_lost")
DONE = (1, "success", "")


def lone(*specs: JobSpec, **options: object) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World(leases=False)
    sidecar = Sidecar(world)
    client = sidecar.ready_client(*specs, **options)
    return world, sidecar, client


def running(*specs: JobSpec, **options: object) -> tuple[World, Sidecar, FakeClient]:
    """Such an instance, with the first slot handed over and accepted."""
    world, sidecar, client = lone(*specs, **options)
    world.run_until(SLOT)
    client.keep_alive()
    world.run_for(6_000)
    assert world.run(SLOT).run.state is RunState.RUNNING
    return world, sidecar, client


def at_slot(world: World, sidecar: Sidecar, slot: int = SLOT) -> None:
    """Comes to a slot, and leaves the claim for it without an answer."""
    world.run_until(slot - 1)
    world.now = slot
    sidecar.tick()
    assert sidecar.waits(Method.CLAIM)


# --- Claiming ----------------------------------------------------------------------------


def test_s10_every_slot_is_run_once_by_two_instances() -> None:
    world, sidecar, _ = lone(lasts_ms=100)
    Sidecar(world, "b").ready_client(lasts_ms=100)
    world.run_until(65_000)
    assert world.slots() == [10_000, 20_000, 30_000, 40_000, 50_000, 60_000]
    assert {current(view) for view in world.runs()} == {DONE}
    assert not sidecar.logged("slots_missed")


def test_s19_a_loser_is_nobodys_backup() -> None:
    world, sidecar, _ = lone(lasts_ms=None)
    backup = Sidecar(world, "b")
    backup.ready_client()
    world.run_until(SLOT + 100)
    sidecar.die()
    world.run_until(SLOT + 5 * MINUTE)
    assert holder(world.run(SLOT).run) == "a"
    assert world.run(SLOT).run.attempt == 1
    assert all(claim.seen_attempt == 0 for claim in backup.claims)
    assert all(not beat.looks for beat in backup.beats)


# --- What operators ask (S29) -------------------------------------------------------------


def test_s29_a_triggered_run_is_run_with_the_next_heartbeat() -> None:
    world, _, client = lone(lasts_ms=100)
    Sidecar(world, "b").ready_client(lasts_ms=100)
    world.run_until(SLOT + 1_001)
    act = TriggerRun("sync", "r-1", b"x", (), world.store_at + 1_000, OverlapPolicy.ALLOW, DAY)
    (answer,) = ran(world.store.control([act])).answers
    assert answer.run is not None
    slot = answer.run.run.slot - START
    world.run_for(6_000)
    assert current(world.run(slot)) == DONE
    assert [each.payload for each in client.assigned if each.slot == slot + START] in ([], [b"x"])


def test_s21a_a_cancel_reaches_its_holder_with_the_next_heartbeat() -> None:
    world, sidecar, client = running(lasts_ms=None)
    ran(world.store.control([CancelRun("sync", START + SLOT, "by hand")]))
    world.run_for(6_000)
    assert client.reasons() == [CancelReason.REQUESTED]
    client.complete(client.assigned[0].token, stopped=CancelReason.REQUESTED)
    world.run_for(100)
    assert current(world.run(SLOT)) == (1, "failed", "cancelled")
    assert not sidecar.called(Method.SETTLE)


def test_s29_an_unknown_claim_that_meets_a_pause_is_given_back() -> None:
    """What was sent before may be on its way, and win when the job is resumed."""
    world, sidecar, _ = lone(lasts_ms=100)
    at_slot(world, sidecar)
    sidecar.fail(Method.CLAIM, unknown=True)
    ran(world.store.control([Pause("sync")]))
    world.run_for(5_000)
    assert sidecar.called(Method.RELEASE)
    assert world.slots() == []


def test_a_run_that_ended_while_the_heartbeat_was_on_its_way_is_nobodys_business() -> None:
    world, sidecar, client = running(lasts_ms=None)
    ran(world.store.control([CancelRun("sync", START + SLOT)]))
    beat = sidecar.wait_for(Method.BEAT)
    shown = sidecar.execute(beat)
    client.complete(client.assigned[0].token)
    sidecar.answer(Method.COMPLETE)
    sidecar.reply(beat, shown)
    world.run_for(6_000)
    assert client.reasons() == []
    assert current(world.run(SLOT)) == (1, "failed", "cancelled")


def test_s20_nothing_is_ever_planned() -> None:
    world, sidecar, _ = lone(lasts_ms=100)
    world.run_until(15_000)
    sidecar.away = "down"
    world.run_until(95_000)
    sidecar.away = None
    world.run_until(125_000)
    assert not sidecar.called(Method.SETTLE)
    assert 110_000 in world.slots()
    assert 40_000 not in world.slots()
    assert sidecar.logged("slot_not_claimed")


def test_s13_a_full_instance_claims_nothing_and_says_what_it_let_go() -> None:
    world, sidecar, client = lone(max_concurrency=1)
    world.run_until(SLOT)
    client.keep_alive()
    world.run_until(SLOT + 25_000)
    assert world.slots() == [SLOT]
    assert [claim.slot - START for claim in sidecar.claims] == [SLOT]
    assert [log.fields["slot"] - START for log in sidecar.logged("slot_not_claimed")] == [20_000]
    client.complete(result="done")
    world.run_for(1)
    assert 30_000 in world.slots(), "it is claimed when there is room, until it is missed"


def test_i6_a_slot_that_the_store_passed_over_is_counted_as_missed() -> None:
    world, sidecar, _ = lone()
    at_slot(world, sidecar)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.OLD))
    assert [log.fields for log in sidecar.logged("slots_missed")] == [{"job": "sync", "count": 1}]
    world.run_for(5_000)
    assert len(sidecar.claims) == 1


def test_s11_an_unknown_claim_is_asked_again_and_keeps_its_place() -> None:
    world, sidecar, client = lone(max_concurrency=1)
    at_slot(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    world.run_for(5_000)
    first, again = sidecar.claims[:2]
    assert (again.token, again.may_run) == (first.token, True)
    assert client.only().token == first.token


def test_s11_nothing_else_is_claimed_for_the_place_of_an_unknown_claim() -> None:
    """It may have been won: without a place at its client that run would be lost."""
    later = JobSpec("other", EverySchedule(20_000, SLOT + 20), jitter_ms=0)
    world, sidecar, client = lone(every(), later, max_concurrency=1)
    at_slot(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNKNOWN))
    world.run_for(1_000)
    assert client.only().job == "sync"
    assert world.slots("other") == []


@pytest.mark.parametrize("by_answer", [True, False])
def test_s11_an_unknown_claim_is_given_up_before_its_record_may_be_gone(by_answer: bool) -> None:
    """S10. Asked once more it could win a slot that somebody else has run."""
    world, sidecar, _ = lone()
    at_slot(world, sidecar)
    if by_answer:
        sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNKNOWN))
    else:
        sidecar.fail(Method.CLAIM, unknown=True)
    sidecar.away = "unknown"
    world.run_until(SLOT + 10_000 + UNKNOWN_ASKED_FOR)
    asked = [claim for claim in sidecar.claims if claim.slot == START + SLOT]
    assert asked[-1].slot > 0
    before = len(asked)
    assert before > 10
    world.run_for(MINUTE)
    sidecar.away = None
    world.run_for(MINUTE)
    assert sum(claim.slot == START + SLOT for claim in sidecar.claims) == before
    assert SLOT not in world.slots()


def test_s11_a_win_that_comes_to_light_after_the_job_is_gone_is_given_back() -> None:
    world, sidecar, client = lone()
    at_slot(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    client.close()
    world.run_for(2_000)
    assert current(world.run(SLOT)) == (1, "failed", Reason.NOT_ACCEPTED)


def give_up(world: World, sidecar: Sidecar, client: FakeClient) -> CallStore:
    """Loses a claim on its way to the store, then the client that it is for; the claim's request."""
    at_slot(world, sidecar)
    call = sidecar.pending(Method.CLAIM)
    sidecar.fail(Method.CLAIM, unknown=True)
    client.close()
    world.run_for(1_000)
    assert len(sidecar.called(Method.RELEASE)) == 1
    return call


@pytest.mark.parametrize("late_ms", [5_000, 10_000 + 4 * MINUTE])
def test_s11_a_claim_that_comes_to_the_store_after_it_was_given_up_is_given_back(
    late_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14. Nobody else would ever end what it wins. Some stores cannot refuse it for its age."""
    world, sidecar, client = lone(every(start_deadline_ms=10_000))
    call = give_up(world, sidecar, client)
    world.run_until(SLOT + late_ms)
    with monkeypatch.context() as clockless:
        clockless.setattr(claim_only, "untimely", lambda *_: None)
        sidecar.execute(call)
    assert world.run(SLOT).run.state is RunState.CLAIMED
    world.run_until(SLOT + 10_000 + UNKNOWN_ASKED_FOR)
    assert current(world.run(SLOT)) == (1, "failed", Reason.NOT_ACCEPTED)


def test_s11_what_never_comes_to_the_store_is_given_back_three_times_and_forgotten() -> None:
    world, sidecar, client = lone(every(start_deadline_ms=10_000))
    give_up(world, sidecar, client)
    world.run_for(HOUR)
    assert [release.slot - START for (release,) in sidecar.called(Method.RELEASE)] == [SLOT] * 3


def test_s23_a_stop_does_not_wait_for_claims_that_may_come_late() -> None:
    world, sidecar, client = lone(every(start_deadline_ms=10_000))
    give_up(world, sidecar, client)
    sidecar.stop()
    world.run_for(1_000)
    assert sidecar.stopped
    stopping, other, leaving = lone(every(start_deadline_ms=10_000))
    at_slot(stopping, other)
    other.fail(Method.CLAIM, unknown=True)
    other.stop()
    stopping.run_for(1_000)
    assert other.stopped
    assert leaving.running == {}


def test_s11_an_unknown_claim_that_turns_out_late_is_given_back_in_case_it_comes_yet() -> None:
    world, sidecar, _ = lone(every(start_deadline_ms=3_000))
    at_slot(world, sidecar)
    sidecar.fail(Method.CLAIM, unknown=True)
    sidecar.away = "refused"
    world.run_until(SLOT + 3_500)
    sidecar.away = None
    world.run_for(2_000)
    assert sidecar.claims[-1].slot == START + SLOT
    assert sidecar.called(Method.RELEASE)


def test_s11_an_unknown_claim_that_turns_out_early_is_asked_again_by_its_token() -> None:
    """What was sent before may win yet, and would be nobody's."""
    world, sidecar, client = lone(max_concurrency=1)
    at_slot(world, sidecar)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNKNOWN))
    first = sidecar.claims[-1]
    sidecar.wait_for(Method.CLAIM)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.EARLY))
    sidecar.wait_for(Method.CLAIM)
    assert [claim.token for claim in sidecar.claims] == [first.token] * 3
    sidecar.answer(Method.CLAIM)
    assert client.only().token == first.token


# --- Running -----------------------------------------------------------------------------


def test_s17_the_fence_is_the_slot_and_no_lease_is_shown() -> None:
    world, _, client = lone()
    world.run_until(SLOT)
    assignment = client.only()
    assert (assignment.fence, assignment.attempt) == ((START + SLOT) * 1_000, 1)
    assert assignment.lease_end_at is None


def test_s15_nothing_is_renewed_but_that_it_started_is_told() -> None:
    world, sidecar, client = running()
    world.run_for(5 * MINUTE)
    renewals = [
        r for beat in sidecar.beats for r in beat.renewals if r.token == client.assigned[0].token
    ]
    assert len(renewals) == 1
    assert renewals[0].started_at == START + SLOT
    assert client.assigned[0].token in client.running
    assert not client.cancelled


def test_s27_a_run_goes_on_while_the_store_is_away_and_its_result_waits() -> None:
    world, sidecar, client = running()
    sidecar.away = "down"
    world.run_for(2 * MINUTE)
    assert not client.cancelled
    number = client.complete(result="done")
    world.run_for(MINUTE)
    assert sidecar.answer_to(number) is None
    sidecar.away = None
    world.run_for(5_000)
    assert client.receipts(number)[0].status is ReceiptStatus.RECORDED
    assert current(world.run(SLOT)) == DONE


def test_s4_a_suspension_takes_nothing_away() -> None:
    world, sidecar, client = running()
    world.jump(9_000)
    sidecar.feed(Suspended(9_000))
    answer = sidecar.answer_to(client.ask_to_live())
    assert isinstance(answer, KeepAliveAnswer)
    assert answer.lost == ()
    client.complete(result="done")
    world.run_for(1_000)
    assert current(world.run(SLOT)) == DONE


def test_s22_a_failure_is_final() -> None:
    world, _, client = running()
    client.complete(stopped=CancelReason.TIMEOUT)
    world.run_for(1_000)
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def test_s21_a_handler_that_ignores_its_timeout_has_failed_and_keeps_its_place() -> None:
    world, _, client = running(every(timeout_ms=8_000, cancel_grace_ms=1_000), max_concurrency=1)
    world.run_until(SLOT + 9_100)
    assert client.reasons() == [CancelReason.TIMEOUT]
    world.run_for(1_000)
    assert current(world.run(SLOT)) == (1, "failed", "timeout")
    world.run_for(5_000)
    assert world.slots() == [SLOT], "its place is taken until it reports"


def test_s21a_a_run_whose_renewal_is_refused_after_its_cancel_has_failed() -> None:
    """Whoever asks for a renewal in its grace, it must not be left unended."""
    world, sidecar, client = running(every(timeout_ms=8_000, cancel_grace_ms=0))
    world.run_until(SLOT + 8_000)
    world.now += 100
    client.ask_to_live(client.only().token, confirm=(client.only().token,))
    sidecar.settle()
    assert not world.run(SLOT).run.unfinished
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def test_s27_a_result_on_its_way_is_not_given_up_when_a_renewal_is_refused() -> None:
    world, sidecar, client = running(every(timeout_ms=8_000, cancel_grace_ms=0))
    world.run_until(SLOT + 8_000)
    world.now += 100
    client.ask_to_live(client.only().token, confirm=(client.only().token,))
    client.complete(stopped=CancelReason.TIMEOUT)
    sidecar.answer(Method.BEAT)
    assert not sidecar.waits(Method.RELEASE)
    sidecar.settle()
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def test_s21_a_cancel_that_was_lost_with_its_stream_is_sent_again_on_the_next() -> None:
    """Else the handler would go on until it is given up, its grace later."""
    world, sidecar, client = running(every(timeout_ms=8_000))
    client.lose_stream()
    world.run_until(SLOT + 8_500)
    assert client.reasons() == []
    client.subscribe()
    assert isinstance(client.events[-2], Attached)
    assert client.reasons() == [CancelReason.TIMEOUT]
    client.complete(stopped=CancelReason.TIMEOUT)
    sidecar.settle()
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def test_s21_what_outlived_its_timeout_is_that_though_its_session_was_just_lost() -> None:
    """Nobody offers the job any more that says so."""
    world, sidecar, client = running(every(timeout_ms=17_000))
    token = client.only().token
    world.jump(30_000)
    sidecar.feed(Suspended(30_000))
    assert sidecar.logged("session_lost")
    client.complete(token, result="late", elapsed_ms=30_000)
    sidecar.answer(Method.COMPLETE)  # before the heartbeat that says so
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def restarted(spec: JobSpec) -> tuple[World, Sidecar, FakeClient, str]:
    """A sidecar that was restarted while the first slot ran; its client has not subscribed yet."""
    world, sidecar, client = running(spec)
    sidecar.die()
    new = Sidecar(world, "a2")
    return world, new, FakeClient(new, "again", (spec,)), client.only().token


@pytest.mark.parametrize("how", ["nobody offers the job", "the sidecar stops"])
def test_s21_what_outlived_its_timeout_is_that_though_its_client_never_subscribed(how: str) -> None:
    world, sidecar, client, token = restarted(every(timeout_ms=17_000))
    client.complete(token, result="late", elapsed_ms=17_001)
    sidecar.settle()
    assert not sidecar.called(Method.COMPLETE), "its client is waited for"
    if how == "the sidecar stops":
        sidecar.stop()
        sidecar.settle()
    else:
        world.run_for(JOB_AWAITED)
    assert current(world.run(SLOT)) == (1, "failed", "timeout")


def test_s22_a_failure_that_came_before_its_client_subscribed_is_retried() -> None:
    """Without it nobody here could make the next attempt."""
    world, sidecar, client, token = restarted(RETRIED)
    client.complete(token, **FAILED)
    sidecar.settle()
    client.subscribe()
    sidecar.settle()
    assert world.run(SLOT).run.state is RunState.RETRYING


# --- Retries (S22) -----------------------------------------------------------------------

RETRIED = every(retry=RetrySpec(1, delay_ms=2_000))


def failing(*specs: JobSpec, **options: object) -> tuple[World, Sidecar, FakeClient]:
    """A run whose first attempt has just failed, 6 s after its slot."""
    world, sidecar, client = running(*(specs or (RETRIED,)), **options)
    client.complete(client.only().token, **FAILED)
    sidecar.settle()
    assert world.run(SLOT).run.state is RunState.RETRYING
    return world, sidecar, client


def attempts(world: World) -> list[tuple[int, str, str]]:
    return [(a.attempt, a.state, a.instance_id) for a in world.run(SLOT).attempts]


def test_s22_a_failed_attempt_is_retried_by_the_instance_that_made_it() -> None:
    world, sidecar, client = failing()
    other = Sidecar(world, "b")
    other.ready_client(*client.specs)
    world.run_for(900)
    assert not client.running
    world.run_for(1_500)
    second = client.only()
    assert (second.attempt, second.cause) == (2, AttemptCause.RETRY)
    client.complete(result="at last")
    sidecar.settle()
    assert attempts(world) == [(1, "failed", "a"), (2, "success", "a")]
    assert all(claim.seen_attempt == 0 for claim in other.claims)


def test_s22_a_retry_waits_for_room() -> None:
    world, sidecar, client = lone(every(2_500, retry=RetrySpec(1, 4_000)), max_concurrency=1)
    world.run_until(2_500)
    client.complete(**FAILED)
    world.run_until(10_000)
    assert client.only().slot == START + 5_000
    client.complete()
    world.run_for(1_000)
    assert current(world.run(2_500))[0] == 2, "the oldest goes first"
    client.complete()
    sidecar.settle()
    assert current(world.run(2_500)) == (2, "success", "")


def test_s4_a_retry_is_made_after_a_suspension() -> None:
    """Nobody else would make it."""
    world, sidecar, _ = failing()
    sidecar.feed(Suspended(1))
    world.run_for(3_500)
    assert attempts(world)[1:] == [(2, "claimed", "a")]


def test_s22_a_retry_waits_for_its_job_to_be_registered_again() -> None:
    world, sidecar, client = failing()
    client.specs = (every(timeout_ms=60_000, retry=RetrySpec(1, 2_000)),)
    sidecar.away = "refused"
    client.subscribe()
    client.keep_alive()
    world.run_for(5_000)
    assert not sidecar.logged("run_released")
    sidecar.away = None
    world.run_for(3_000)
    assert attempts(world)[0] == (1, "failed", "a")
    assert len(attempts(world)) == 2


def test_s11_a_retry_whose_claim_has_no_answer_is_asked_for_again_with_its_token() -> None:
    world, sidecar, client = failing()
    sidecar.wait_for(Method.CLAIM)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    world.run_for(1_000)
    first, again = (claim.token for claim in sidecar.claims if claim.seen_attempt)
    assert first == again
    assert client.only().token == first


@pytest.mark.parametrize("unknown", [False, True])
def test_s23_an_instance_that_stops_gives_up_its_retries(unknown: bool) -> None:
    world, sidecar, _ = failing()
    if unknown:
        sidecar.wait_for(Method.CLAIM)
        sidecar.fail(Method.CLAIM, unknown=True)
    sidecar.stop()
    world.run_for(2_000)
    assert sidecar.stopped
    assert current(world.run(SLOT)) == (1, "failed", "runner_lost")
    assert attempts(world) == [(1, "failed", "a")]


def test_s23_what_fails_while_the_instance_stops_is_final() -> None:
    world, sidecar, client = running(RETRIED)
    sidecar.stop()
    client.complete(client.only().token, **FAILED)
    sidecar.settle()
    assert current(world.run(SLOT)) == (1, "failed", "")


def test_s22_the_retry_of_a_job_that_nobody_offers_any_more_is_given_up() -> None:
    world, sidecar, client = failing()
    client.specs = (every(name="other"),)
    client.subscribe()
    sidecar.settle()
    assert current(world.run(SLOT)) == (1, "failed", "runner_lost")


def test_s22_a_failure_of_a_job_that_nobody_offers_any_more_is_final() -> None:
    """It is reported after the client's last word: nobody would make the retry."""
    world, sidecar, client = running(RETRIED)
    token = client.only().token
    client.specs = (every(name="other"),)
    client.subscribe()
    client.complete(token, **FAILED)
    sidecar.settle()
    assert current(world.run(SLOT)) == (1, "failed", "")


def test_s21_what_timed_out_is_retried_if_its_handler_obeyed() -> None:
    world, _, client = running(every(timeout_ms=7_000, retry=RetrySpec(1, 1_000)))
    world.run_for(1_500)
    client.complete(client.only().token, stopped=CancelReason.TIMEOUT)
    world.run_for(1_500)
    first, second = world.run(SLOT).attempts
    assert (first.state, first.reason, second.cause) == ("failed", "timeout", AttemptCause.RETRY)


@pytest.mark.parametrize("stops", [False, True])
def test_s22_a_restarted_instance_that_claims_the_slot_of_what_it_adopted_retries_it(
    stops: bool,
) -> None:
    """Its claim is on the way when the attempt that it adopted fails."""
    world, sidecar, client = running(RETRIED)
    token = client.only().token
    sidecar.die()
    new = Sidecar(world, "b")
    new.tick()
    new.settle()
    again = new.client(RETRIED, in_flight=(token,))
    new.settle()
    again.keep_alive(token)
    claim = new.wait_for(Method.CLAIM)
    lost = new.execute(claim)
    again.complete(token, **FAILED)
    new.answer(Method.COMPLETE)
    if stops:
        new.fail(Method.CLAIM, unknown=True)
        new.stop()
        world.run_for(3_000)
        assert attempts(world) == [(1, "failed", "b")]
        assert current(world.run(SLOT)) == (1, "failed", "runner_lost")
    else:
        new.reply(claim, lost)
        world.run_for(3_000)
        assert [number for number, *_ in attempts(world)] == [1, 2]


@pytest.mark.parametrize("unknown", [False, True])
def test_s22_what_was_adopted_is_retried_though_the_claim_of_its_slot_had_no_answer(
    unknown: bool,
) -> None:
    """Nor is it forgotten with what was wanted before a suspension (S4)."""
    world, sidecar, client = running(RETRIED)
    token = client.only().token
    sidecar.die()
    new = Sidecar(world, "b")
    new.tick()
    new.settle()
    again = new.client(RETRIED, in_flight=(token,), max_concurrency=1)
    new.settle()
    again.keep_alive(token)
    again.max_concurrency = 2
    again.subscribe(in_flight=(token,))
    again.keep_alive(token)
    new.wait_for(Method.CLAIM)
    again.complete(token, **FAILED)
    new.answer(Method.COMPLETE)
    new.fail(Method.CLAIM, unknown=unknown)
    new.feed(Suspended(1))
    world.run_for(3_500)
    assert [number for number, *_ in attempts(world)] == [1, 2]
    assert len(again.running) == 1, "the claim that could not win has left its place"


def test_s22_a_result_that_is_repeated_while_its_retry_is_asked_for_makes_no_other() -> None:
    world, sidecar, client = failing()
    (first,) = client.assigned
    claim = sidecar.wait_for(Method.CLAIM)
    client.complete(first.token, **FAILED)
    sidecar.answer(Method.COMPLETE)
    sidecar.reply(claim, sidecar.execute(claim))
    world.run_for(3_500)
    assert attempts(world) == [(1, "failed", "a"), (2, "claimed", "a")]
    assert len([claim for claim in sidecar.claims if claim.seen_attempt]) == 1


def waiting_run(world: World) -> int:
    """A run that was just triggered; its slot, counted from `START`."""
    act = TriggerRun("sync", "r-1", b"", (), world.store_at + 1_000, OverlapPolicy.ALLOW, DAY)
    (answer,) = ran(world.store.control([act])).answers
    assert answer.run is not None
    return answer.run.run.slot - START


def seen_waiting(delay_ms: int) -> tuple[World, Sidecar, FakeClient, int, CallStore, Any]:
    """A triggered run that is just handed over; a heartbeat's answer, which shows it waiting yet,
    is on its way.
    """
    world, sidecar, client = lone(every(HOUR, retry=RetrySpec(1, delay_ms)))
    slot = waiting_run(world)
    sidecar.wait_for(Method.BEAT)
    while not sidecar.waits(Method.CLAIM):
        sidecar.answer(Method.BEAT)
        if not sidecar.waits(Method.CLAIM):
            sidecar.wait_for(Method.BEAT)
    while not sidecar.waits(Method.BEAT):
        assert sidecar.engine.wake_at is not None
        world.now = sidecar.engine.wake_at
        sidecar.tick()
    beat = sidecar.pending(Method.BEAT)
    shown = sidecar.execute(beat)
    sidecar.answer(Method.CLAIM)
    return world, sidecar, client, slot, beat, shown


def test_s22_a_retry_is_made_though_a_late_heartbeat_shows_the_run_as_it_waited() -> None:
    world, sidecar, client, slot, beat, shown = seen_waiting(2_000)
    client.complete(client.only().token, **FAILED)
    sidecar.answer(Method.COMPLETE)
    sidecar.reply(beat, shown)
    world.run_for(3_500)
    assert [each.attempt for each in world.run(slot).attempts] == [1, 2]


def test_s22_a_retry_is_made_though_sweeps_show_nothing_of_a_run_that_was_seen_to_wait() -> None:
    world, sidecar, client, slot, beat, shown = seen_waiting(60_000)
    sidecar.reply(beat, shown)
    sidecar.settle()
    client.complete(client.only().token, **FAILED)
    world.run_for(60_500)
    assert [each.attempt for each in world.run(slot).attempts] == [1, 2]


def test_s23_a_retry_that_is_given_up_is_ended_before_the_claim_for_it() -> None:
    """So that the claim, if it is on its way yet, wins no more."""
    _, sidecar, client = failing()
    (first,) = client.assigned
    sidecar.wait_for(Method.CLAIM)
    sidecar.fail(Method.CLAIM, unknown=True)
    sidecar.stop()
    (released,) = sidecar.called(Method.RELEASE)
    assert [each.token for each in released] == [first.token, sidecar.claims[-1].token]


def test_s30_of_many_attempts_the_newest_are_shown() -> None:
    assert claim_only.attempts_of(Run("sync", SLOT, Trigger.MANUAL, RunState.DUE)) == ()
    attempts = [
        Attempt(number, "t", number, "a", "a", AttemptCause.RETRY, RunState.FAILED, SLOT)
        for number in range(1, ATTEMPTS_SHOWN + 3)
    ]
    earlier, present = tuple(attempts[:-1]), attempts[-1]
    run = Run("sync", SLOT, Trigger.SCHEDULE, RunState.FAILED, current=present, earlier=earlier)
    assert claim_only.attempts_of(run) == tuple(attempts[2:])


def test_s22_what_was_pruned_meanwhile_is_not_retried() -> None:
    world, sidecar, _ = failing()
    sidecar.wait_for(Method.CLAIM)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.LATE))
    world.run_for(1_000)
    assert len([claim for claim in sidecar.claims if claim.seen_attempt]) == 1


# --- Clients and sidecars that go --------------------------------------------------------


def test_s24_the_run_of_a_client_that_is_gone_has_failed() -> None:
    world, _, client = running(watchable=True)
    client.exit()
    world.run_for(100)
    assert current(world.run(SLOT)) == LOST


def test_s25_the_run_of_a_client_that_is_frozen_has_failed_a_margin_after_its_session() -> None:
    world, _, client = running()
    client.silent = True
    world.run_for(15_000)
    assert world.run(SLOT).run.state is RunState.RUNNING
    world.run_for(10_000)
    assert current(world.run(SLOT)) == LOST


def test_s25_having_lost_trust_the_run_has_failed() -> None:
    """Nobody else goes on with it."""
    world, _, client = running()
    number = client.complete(stopped=CancelReason.LEASE_LOST)
    assert client.receipts(number)[0].status is ReceiptStatus.FENCED
    world.run_for(1_000)
    assert current(world.run(SLOT)) == LOST


def test_s25_a_client_that_leaves_with_a_handler_still_running_has_lost_the_run() -> None:
    world, _, client = running()
    client.close()
    world.run_for(1_000)
    assert current(world.run(SLOT)) == LOST


def test_s26_a_sidecar_that_comes_back_adopts_the_run() -> None:
    world, sidecar, client = running()
    assignment = client.only()
    sidecar.die()
    successor = Sidecar(world, "b")
    successor.tick()
    successor.settle()
    again = FakeClient(successor, "client", (every(),), in_flight=(assignment.token,))
    again.subscribe()
    successor.settle()
    assert again.attached is not None
    assert again.attached.lost == ()
    again.running[assignment.token] = assignment
    again.keep_alive()
    world.run_for(MINUTE)
    assert holder(world.run(SLOT).run) == "b"
    again.complete(assignment.token, result="done")
    world.run_for(1_000)
    assert current(world.run(SLOT)) == DONE


@pytest.mark.parametrize("lost", [False, True])
def test_s24_a_process_that_ends_while_it_is_adopted_has_failed(lost: bool) -> None:
    """Also where the store has adopted it, and the answer is lost."""
    world, sidecar, client = running()
    token = client.only().token
    sidecar.die()
    successor = Sidecar(world, "b")
    successor.tick()
    successor.settle()
    again = successor.client(in_flight=(token,), watchable=True)
    beat = successor.wait_for(Method.BEAT)
    adopted = successor.execute(beat)
    again.exit()
    if lost:
        successor.fail(Method.BEAT, unknown=True)
    else:
        successor.reply(beat, adopted)
    world.run_for(5_000)
    assert current(world.run(SLOT)) == LOST


def test_s26_a_token_that_lost_is_not_adopted() -> None:
    world, _, client = running()
    successor = Sidecar(world, "b")
    successor.tick()
    successor.settle()
    wrong = client.only().token.replace(".a", ".z", 1)
    again = FakeClient(successor, "other", (every(),), in_flight=(wrong,))
    again.subscribe()
    successor.settle()
    assert again.attached is not None
    assert [lost.token for lost in again.attached.lost] == [wrong]


def test_s27_a_run_that_lost_its_client_while_the_store_was_long_away_has_failed() -> None:
    """No lease ends it, so that it is given back however long that takes."""
    world, sidecar, client = running(watchable=True)
    sidecar.away = "refused"
    client.exit()
    world.run_for(HOUR + 5_000)
    sidecar.away = None
    world.run_for(5_000)
    assert current(world.run(SLOT)) == LOST


# --- Stopping ----------------------------------------------------------------------------


def test_s23_a_stop_waits_for_handlers_and_records_what_they_return() -> None:
    world, sidecar, client = running()
    sidecar.stop()
    world.run_for(3_000)
    client.complete(result="done")
    world.run_for(1_000)
    assert sidecar.stopped
    assert current(world.run(SLOT)) == DONE


def test_s23_a_handler_that_obeys_a_stop_leaves_a_run_that_has_failed() -> None:
    world, sidecar, client = running(every(stop_grace_ms=1_000))
    sidecar.stop()
    world.run_for(1_500)
    assert client.reasons() == [CancelReason.SHUTDOWN]
    client.complete(stopped=CancelReason.SHUTDOWN)
    world.run_for(1_000)
    assert sidecar.stopped
    assert current(world.run(SLOT)) == LOST


def test_s23_what_still_runs_when_the_sidecar_ends_is_left_for_its_successor_to_adopt() -> None:
    world, sidecar, client = running(every(stop_grace_ms=1_000, cancel_grace_ms=1_000))
    sidecar.stop()
    world.run_for(60_000)
    assert sidecar.stopped
    assert not world.run(SLOT).run.state.final
    assert client.running


# --- What is refused ---------------------------------------------------------------------


CLAIM = Capabilities("redis:script", leases=False, overlap=CLAIM_ONLY_OVERLAP)


@pytest.mark.parametrize(
    ("policies", "feature"),
    [
        ({"lease_ms": 30_000}, "lease"),
        ({"heartbeat_ms": 5_000}, "heartbeat"),
        ({"max_attempts": 1}, "max_attempts"),
        ({"overlap": OverlapPolicy.SKIP}, "overlap=skip"),
        ({"catch_up": CatchUpPolicy.LATEST}, "catch_up=latest"),
    ],
)
def test_s15_s18_s19_s20_what_needs_a_lease_is_refused_with_the_backends_that_have_it(
    policies: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        resolve(every(**policies), CLAIM, 30_000, START)
    assert (refused.value.feature, refused.value.backend) == (feature, "redis:script")
    assert "redis:lease" in refused.value.backends
    assert str(refused.value).startswith(
        f"{feature} is not supported by redis:script; backends that can: memory, "
    )


def test_what_is_not_set_takes_the_backends_default() -> None:
    job = resolve(every(), CLAIM, 12_000, START)
    assert (job.overlap, job.catch_up, job.max_attempts) == ("allow", "none", 1)
    assert (job.lease_ms, job.heartbeat_ms) == (12_000, 2_000), (
        "of which the session's time is made"
    )
    same = resolve(
        every(overlap=OverlapPolicy.ALLOW, catch_up=CatchUpPolicy.NONE), CLAIM, 12_000, START
    )
    assert (same.overlap, same.catch_up) == (job.overlap, job.catch_up)


def test_a_client_is_told_of_every_job_that_is_refused() -> None:
    world = World(leases=False)
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    client = sidecar.client(every(name="a", lease_ms=3_000), every(name="b", max_attempts=2))
    error = client.error
    assert isinstance(error, InvalidJobsError)
    assert [(name, problem.feature) for _, name, problem in error.problems] == [  # type: ignore[union-attr]
        ("a", "lease"),
        ("b", "max_attempts"),
    ]


def test_s10_jobs_whose_records_would_be_gone_too_soon_are_refused() -> None:
    kept = replace(CLAIM, kept_ms=HOUR)
    resolve(every(start_deadline_ms=50 * MINUTE), kept, 30_000, START)
    with pytest.raises(InvalidError, match=r"start_deadline is '50m1ms': at most 50m on redis"):
        resolve(every(start_deadline_ms=50 * MINUTE + 1), kept, 30_000, START)


def test_s10_jobs_with_more_slots_than_records_are_refused() -> None:
    kept = replace(CLAIM, backend="redis:idmp", kept_ms=DAY, kept_slots=10_000)
    resolve(every(100), kept, 30_000, START)
    with pytest.raises(InvalidError, match=r"newest 10000 slots, and must for 40m: .* least 240ms"):
        resolve(every(200, start_deadline_ms=30 * MINUTE), kept, 30_000, START)


def test_jobs_that_are_too_fast_for_the_backend_are_refused() -> None:
    slow = replace(CLAIM, backend="rabbitmq", least_gap_ms=5_000)
    resolve(every(5_000), slow, 30_000, START)
    with pytest.raises(InvalidError, match="between two slots is at least 5s on rabbitmq"):
        resolve(every(4_999), slow, 30_000, START)
