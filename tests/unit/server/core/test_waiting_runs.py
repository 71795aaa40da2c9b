"""Runs that wait: queued and superseding slots (S18), catch-up (S20), retries (S22), and what
operators ask for (S21a, S29), as an instance plays them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from anarchon_server.core.asking import resume_of, trigger_of
from anarchon_server.core.messages import Method, Suspended, Woken
from anarchon_server.core.missed import passed_slots
from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Failure,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
    RunState,
    Trigger,
)
from anarchon_server.core.policy import Job
from anarchon_server.core.store import (
    CancelRun,
    ClaimAnswer,
    ClaimOutcome,
    Control,
    ControlAnswer,
    Passed,
    Pause,
    PlanAnswer,
    Resume,
    TriggerRun,
)
from tests.unit.server.core.driver import (
    START,
    FakeClient,
    Sidecar,
    World,
    current,
    every,
    holder,
    ran,
)

DONE = (1, "success", "")
NEVER_RUN = (0, "skipped", "overlap")


def lone(*specs: JobSpec, **options: object) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    client = sidecar.ready_client(*specs, **options)
    return world, sidecar, client


def asked(world: World, act: Control) -> ControlAnswer:
    """An operator asks the store, and those who listen are told."""
    (answer,) = ran(world.store.control([act])).answers
    for sidecar in world.sidecars:
        sidecar.feed(Woken())
        sidecar.settle()
    return answer


def triggering(
    world: World, request: str = "r1", payload: bytes = b"", **values: object
) -> TriggerRun:
    usual = {"slots": (), "until": world.store_at + 5_000, "overlap": OverlapPolicy.SKIP}
    given = usual | values
    return TriggerRun("sync", request, payload, window_ms=86_400_000, **given)  # type: ignore[arg-type]


def trigger(
    world: World, request: str = "r1", payload: bytes = b"", **values: object
) -> ControlAnswer:
    return asked(world, triggering(world, request, payload, **values))


def states(world: World) -> dict[int, tuple[int, str, str]]:
    return {view.run.slot - START: current(view) for view in world.runs()}


# --- Overlap: queue (S18) ----------------------------------------------------------------


QUEUE = every(overlap=OverlapPolicy.QUEUE)


def test_s18_a_queued_slot_starts_when_the_run_in_its_way_has_ended() -> None:
    world, sidecar, client = lone(QUEUE)
    world.run_until(13_000)
    first = client.only()
    world.run_until(22_000)
    assert states(world)[20_000] == (0, "due", "")
    assert client.only() == first, "it waits"
    client.complete(first.token, result="done")
    world.run_for(1)
    assert client.only().slot == START + 20_000
    assert world.run(20_000).run.state is RunState.CLAIMED
    assert len(sidecar.logged("run_queued")) == 1


def test_s18_while_another_run_is_in_its_way_a_queued_slot_is_not_asked_for_again() -> None:
    job = every(300_000, overlap=OverlapPolicy.QUEUE, jitter_ms=0)
    world, sidecar, client = lone(job)
    other = Sidecar(world, "b").ready_client(job)
    world.run_until(610_000)
    assert len(client.running) + len(other.running) == 1
    assert states(world)[600_000] == (0, "due", "")
    asked_for = len(sidecar.claims) + len(other.sidecar.claims)
    world.run_until(800_000)
    assert len(sidecar.claims) + len(other.sidecar.claims) == asked_for


def test_s20_of_a_backlog_only_the_oldest_is_asked_for() -> None:
    policies = {"overlap": OverlapPolicy.SKIP, "catch_up": CatchUpPolicy.ALL}
    job = every(60_000, start_deadline_ms=5_000, **policies)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(310_000)
    other = Sidecar(world, "b").ready_client(job)
    world.run_until(355_000)
    assert other.only().slot == START + 60_000
    assert {claim.slot - START for claim in other.sidecar.claims} == {60_000}


def test_s18_a_newer_slot_replaces_the_queued_one() -> None:
    world, _, client = lone(QUEUE)
    world.run_until(45_000)
    assert states(world) == {
        10_000: (1, "running", ""),
        20_000: NEVER_RUN,
        30_000: NEVER_RUN,
        40_000: (0, "due", ""),
    }
    client.complete(result="done")
    world.run_until(49_000)
    assert client.only().slot == START + 40_000


def test_s18_a_queued_slot_is_never_missed() -> None:
    world, _, client = lone(every(overlap=OverlapPolicy.QUEUE, start_deadline_ms=3_000))
    world.run_until(29_000)
    client.complete(result="done")
    world.run_for(100)
    assert client.only().slot == START + 20_000


def test_s18_another_instance_takes_the_queued_slot_when_the_first_has_no_room() -> None:
    world, _, client = lone(QUEUE, max_concurrency=1)
    other = Sidecar(world, "b").ready_client(QUEUE, max_concurrency=1)
    world.run_until(22_000)
    busy, idle = (client, other) if client.running else (other, client)
    busy.sidecar.dead = True
    busy.silent = True
    world.run_for(40_000)
    assert current(world.run(10_000))[:2] == (2, "claimed") or idle.running
    idle.keep_alive()
    idle.complete(result="done")
    world.run_for(1_000)
    assert {a.slot - START for a in idle.running.values()} <= {
        20_000,
        30_000,
        40_000,
        50_000,
        60_000,
    }
    assert idle.running


def test_s18_while_a_claim_of_it_is_on_its_way_a_run_that_waits_is_not_asked_for_twice() -> None:
    """Nor put off: whether by a sweep that shows it free, or one that shows something in its way."""
    world, sidecar, client = lone(QUEUE)
    world.run_until(21_000)
    blocked = world.run(10_000)
    client.complete(result="done")
    sidecar.answer(Method.COMPLETE)
    assert sidecar.waits(Method.CLAIM)
    waiting = world.run(20_000)
    sidecar.engine._claiming.observe(waiting)
    sidecar.engine._claiming.observe_all((blocked, waiting))
    sidecar.tick()
    assert len(sidecar.calls) == 1
    sidecar.settle()
    assert client.only().slot == START + 20_000


def test_s18_a_takeover_that_is_behind_another_run_is_put_off() -> None:
    """As where the job allowed overlap until just now."""
    world, sidecar, client = lone(every(lease_ms=3_000))
    other = Sidecar(world, "b")
    theirs = other.ready_client(every(lease_ms=3_000))
    world.run_until(10_500)
    holder_client, backup = (client, other) if client.running else (theirs, sidecar)
    seen = world.run(10_000)
    holder_client.sidecar.die()
    world.run_until(12_900)
    backup.wait_for(Method.CLAIM)
    queued = ClaimAnswer(ClaimOutcome.QUEUED, replace(seen, lease_left_ms=0))
    backup.answer_by_hand(Method.CLAIM, queued)
    assert len(backup.logged("run_queued")) == 1
    world.run_for(5_000)
    assert world.run(10_000).run.attempt == 2, "the next look finds nothing in its way"


# --- Overlap: cancel ---------------------------------------------------------------------


CANCEL = every(overlap=OverlapPolicy.CANCEL)


def test_s18_a_newer_slot_makes_the_older_run_stop_and_starts_when_it_has() -> None:
    world, _, client = lone(CANCEL)
    world.run_until(19_000)
    first = client.only()
    world.run_until(20_300)
    assert client.reasons() == [CancelReason.SUPERSEDED]
    assert client.only() == first
    client.complete(first.token, stopped=CancelReason.SUPERSEDED)
    world.run_for(1)
    assert client.only().slot == START + 20_000
    assert current(world.run(10_000)) == (1, "failed", "superseded")


def test_s21a_a_handler_that_does_not_listen_is_renewed_for_the_grace_and_followed_after_its_lease() -> (
    None
):
    spec = every(overlap=OverlapPolicy.CANCEL, lease_ms=3_000, cancel_grace_ms=1_000)
    world, _, client = lone(spec)
    world.run_until(29_000)
    assert CancelReason.SUPERSEDED in client.reasons()
    assert current(world.run(10_000)) == (1, "failed", "superseded")
    assert {a.slot - START for a in client.running.values()} == {10_000, 20_000}
    claimed_at = world.run(20_000).run.current.claimed_at - START  # type: ignore[union-attr]
    assert 21_000 <= claimed_at <= 20_000 + 1_000 + 3_000 + 1_500


def test_s21a_a_cancel_whose_grace_was_over_before_it_was_heard_of_is_told_as_what_it_is() -> None:
    """So that the handler's report ends the run, and the next need not wait for its lease."""
    world, _, client = lone(every(overlap=OverlapPolicy.CANCEL, cancel_grace_ms=0))
    world.run_until(19_000)
    ran(world.store.control([CancelRun("sync", START + 10_000, "by hand")]))
    world.run_until(19_500)
    assert not client.cancelled, "nobody was notified"
    world.run_until(26_000)
    (told,) = client.cancelled
    assert (told.reason, told.message) == (CancelReason.REQUESTED, "by hand")
    assert world.run(20_000).run.state is RunState.DUE
    client.complete(stopped=CancelReason.REQUESTED)
    world.run_for(1)
    assert current(world.run(10_000)) == (1, "failed", "cancelled")
    assert client.only().slot == START + 20_000


def test_s18_a_superseded_run_that_waits_for_its_retry_makes_way_at_once() -> None:
    world, _, client = lone(
        every(overlap=OverlapPolicy.CANCEL, retry=RetrySpec(3, delay_ms=60_000))
    )
    world.run_until(11_000)
    client.complete(failure=Failure("E"))
    world.run_for(100)
    assert world.run(10_000).run.state is RunState.RETRYING
    world.run_until(20_100)
    assert current(world.run(10_000)) == (1, "failed", "superseded")
    assert client.only().slot == START + 20_000


# --- Catch-up (S20) ----------------------------------------------------------------------


def after_an_outage(spec: JobSpec, until: int = 75_000) -> tuple[World, Sidecar, FakeClient]:
    """Slots 20 s to 60 s had nobody to run them."""
    world, sidecar, client = lone(spec, lasts_ms=100)
    world.run_until(15_000)
    sidecar.die()
    world.run_until(62_000)
    successor = Sidecar(world, "b")
    client = successor.ready_client(spec, lasts_ms=100)
    world.run_until(until)
    return world, successor, client


def test_s20_latest_runs_the_newest_missed_slot() -> None:
    spec = every(catch_up=CatchUpPolicy.LATEST, start_deadline_ms=1_000)
    world, sidecar, _ = after_an_outage(spec)
    ended = states(world)
    assert ended[60_000] == DONE
    assert world.run(60_000).run.trigger is Trigger.CATCH_UP
    missed = (0, "skipped", "missed")
    assert [ended[slot] for slot in (20_000, 30_000, 40_000, 50_000)] == [missed] * 4
    assert ended[70_000] == DONE
    assert [log.fields["count"] for log in sidecar.logged("slots_caught_up")] == [1]


def test_s20_what_is_caught_up_does_not_wait_for_the_next_heartbeat() -> None:
    job = every(600_000, lease_ms=3_600_000, start_deadline_ms=5_000, catch_up=CatchUpPolicy.LATEST)
    world, sidecar, client = lone(job)
    world.run_until(590_000)
    sidecar.away = "the store is away"
    world.run_until(610_000)
    sidecar.away = None
    while not sidecar.logged("slots_caught_up"):
        world.run_for(1_000)
    world.run_for(1_000)
    assert client.only().slot == START + 600_000


def test_s20_all_runs_every_missed_slot_oldest_first() -> None:
    spec = every(catch_up=CatchUpPolicy.ALL, start_deadline_ms=1_000)
    world, _, client = after_an_outage(spec)
    assert set(states(world).values()) == {DONE}
    slots = [assignment.slot - START for assignment in client.assigned]
    assert slots == [20_000, 30_000, 40_000, 50_000, 60_000, 70_000]


def test_s20_all_is_bounded_by_limit_and_window() -> None:
    spec = every(
        catch_up=CatchUpPolicy.ALL,
        catch_up_limit=3,
        catch_up_window_ms=25_000,
        start_deadline_ms=1_000,
    )
    world, _, client = after_an_outage(spec)
    caught_up = [a.slot - START for a in client.assigned if a.trigger is Trigger.CATCH_UP]
    assert caught_up == [40_000, 50_000, 60_000]
    assert states(world)[20_000] == (0, "skipped", "missed")


def test_s20_latest_is_the_default() -> None:
    spec = JobSpec("sync", every().schedule, jitter_ms=0, start_deadline_ms=1_000)
    world, _, _ = after_an_outage(spec)
    assert world.run(60_000).run.trigger is Trigger.CATCH_UP


# --- Retries (S22) -----------------------------------------------------------------------


RETRIED = every(60_000, retry=RetrySpec(2, delay_ms=1_000, factor=2.0))


def retried(delays: tuple[int, ...] = (0, 0)) -> tuple[World, FakeClient]:
    world = World()
    client = Sidecar(world).ready_client(RETRIED)
    world.run_until(61_000)
    return world, client


def test_s22_a_failed_attempt_is_followed_by_another_after_its_pause() -> None:
    world, client = retried()
    client.complete(failure=Failure("E", "one"))
    world.run_for(1)
    assert world.run(60_000).run.state is RunState.RETRYING
    assert not client.running
    world.run_until(61_999)
    assert not client.running
    world.run_until(62_500)
    second = client.only()
    assert (second.attempt, second.cause) == (2, AttemptCause.RETRY)
    client.complete(failure=Failure("E", "two"))
    world.run_for(1_500)
    assert not client.running, "the second pause is twice as long"
    world.run_for(1_000)
    assert client.only().attempt == 3
    client.complete(failure=Failure("E", "three"))
    world.run_for(5_000)
    assert current(world.run(60_000)) == (3, "failed", "")
    assert [a.cause for a in world.run(60_000).attempts] == ["claim", "retry", "retry"]
    assert not client.running


def test_s22_the_pause_is_drawn_from_half_of_it_on() -> None:
    world = World()
    sidecar = Sidecar(world, draw=lambda most: most)
    client = sidecar.ready_client(RETRIED)
    world.run_until(62_500)
    client.complete(failure=Failure("E"))
    sidecar.settle()
    assert world.run(60_000).wait_ms == 500


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure("E", permanent=True), (1, "failed", "")),
        (Failure("E", retry_after_ms=3_000), (2, "running", "")),
    ],
)
def test_s22_a_handler_says_that_there_is_no_retry_or_when(
    failure: Failure, expected: tuple[int, str, str]
) -> None:
    world, client = retried()
    client.complete(failure=failure)
    world.run_for(2_900)
    assert not client.running
    world.run_for(7_000)
    assert current(world.run(60_000)) == expected


def test_s22_a_handler_puts_its_retry_off_by_seven_days_at_most() -> None:
    world, client = retried()
    client.complete(failure=Failure("E", retry_after_ms=30 * 86_400_000))
    client.sidecar.settle()
    assert world.run(60_000).wait_ms == 7 * 86_400_000


def test_s22_a_timed_out_attempt_is_retried() -> None:
    spec = every(60_000, timeout_ms=500, retry=RetrySpec(1, delay_ms=1_000))
    world, _, client = lone(spec)
    world.run_until(60_600)
    client.complete(stopped=CancelReason.TIMEOUT)
    world.run_for(1_500)
    assert client.only().cause is AttemptCause.RETRY
    first = world.run(60_000).attempts[0]
    assert (first.state, first.reason) == (RunState.FAILED, "timeout")


def test_s22_any_instance_may_make_the_retry() -> None:
    world, client = retried()
    other = Sidecar(world, "b").ready_client(RETRIED)
    client.complete(failure=Failure("E"))
    world.run_for(10)
    client.sidecar.die()
    world.run_for(5_000)
    assert other.only().attempt == 2
    assert holder(world.run(60_000).run) == "b"


def test_s22_retries_and_takeovers_are_counted_apart() -> None:
    spec = every(60_000, lease_ms=3_000, max_attempts=2, retry=RetrySpec(1, delay_ms=100))
    world, sidecar, client = lone(spec)
    world.run_until(61_000)
    client.complete(failure=Failure("E"))
    world.run_for(1_000)
    assert client.only().attempt == 2
    sidecar.die()
    other = Sidecar(world, "b").ready_client(spec)
    world.run_for(10_000)
    third = other.only()
    assert (third.attempt, third.cause) == (3, AttemptCause.TAKEOVER)
    run = world.run(60_000).run
    assert (run.failed, run.lost) == (1, 1)


# --- Control (S29) -----------------------------------------------------------------------


def test_s29_a_paused_job_runs_no_slot_and_what_runs_goes_on() -> None:
    world, sidecar, client = lone()
    world.run_until(11_000)
    asked(world, Pause("sync", "maintenance"))
    world.run_until(95_000)
    assert world.slots() == [10_000]
    assert client.only().slot == START + 10_000
    assert len(sidecar.logged("slot_paused")) == 8
    plans = sidecar.called(Method.SETTLE)
    assert len(plans) == 1, "it is found to be paused once, and not listed again"
    (view,) = ran(world.store.jobs(["sync"], "", 1)).answers
    assert (view.paused_at, view.pause_reason) == (START + 11_000, "maintenance")


def test_s29_after_a_resumption_the_slots_passed_over_are_one_row_and_the_next_is_run() -> None:
    world, _, client = lone(lasts_ms=100)
    world.run_until(11_000)
    asked(world, Pause("sync"))
    world.run_until(45_000)
    slots = tuple(START + n * 10_000 for n in range(2, 6))
    passed = Passed("every 10s", START + 10_000, slots)
    answer = asked(world, Resume("sync", START + 11_000, START + 50_000, (), (passed,)))
    assert answer.outcome == "done"
    row = world.run(40_000).run
    assert (row.state, row.reason, row.slots_covered) == (RunState.SKIPPED, "paused", 3)
    world.run_until(55_000)
    assert states(world) == {10_000: DONE, 40_000: (0, "skipped", "paused"), 50_000: DONE}
    assert len(client.assigned) == 2


def test_s29_a_triggered_run_is_run_at_once_with_its_payload() -> None:
    world, _, client = lone()
    world.run_until(3_000)
    answer = trigger(world, payload=b"seven")
    assert answer.run is not None
    assert answer.run.run.slot == START + 3_000
    assignment = client.only()
    assert (assignment.slot, assignment.payload) == (START + 3_000, b"seven")
    assert assignment.trigger is Trigger.MANUAL
    assert trigger(world, payload=b"again").run is not None
    assert len(client.assigned) == 1, "the same request is the same run"


@pytest.mark.parametrize("leases", [True, False], ids=["leases", "claim-only"])
def test_s29_a_job_without_a_schedule_runs_when_it_is_triggered_and_only_then(
    leases: bool,
) -> None:
    world = World(leases=leases)
    sidecar = Sidecar(world)
    overlap = OverlapPolicy.SKIP if leases else OverlapPolicy.ALLOW
    client = sidecar.ready_client(JobSpec("sync", None))
    registered = len(sidecar.called(Method.REGISTER))
    world.run_for(3_600_000)
    assert (world.slots(), sidecar.called(Method.SETTLE)) == ([], [])
    assert len(sidecar.called(Method.REGISTER)) == registered, (
        "that it has nothing settled is no surprise"
    )
    trigger(world, overlap=overlap)
    assert client.only().trigger is Trigger.MANUAL
    client.complete(result="done")
    world.run_for(100)
    assert states(world) == {3_600_000: DONE}
    world.store_step -= 20_000
    sidecar.feed(Suspended(5_000))
    world.run_for(1_000)
    trigger(world, "r2", overlap=overlap)
    world.run_for(6_000)
    assert len(client.assigned) == 2, "nothing was seeded that is not there"


def test_s29_a_triggered_run_waits_where_the_job_queues_and_is_skipped_where_it_skips() -> None:
    world, _, client = lone(QUEUE)
    world.run_until(12_000)
    first = client.only()
    skipped = trigger(world, "r1")
    assert skipped.run is not None
    assert current(skipped.run) == (0, "skipped", "overlap")
    trigger(world, "r2", overlap=OverlapPolicy.QUEUE)
    assert client.only() == first
    client.complete(result="done")
    world.run_for(100)
    assert client.only().trigger is Trigger.MANUAL


def test_s18_with_allow_triggered_runs_wait_neither_for_what_runs_nor_for_each_other() -> None:
    world, _, client = lone(every(overlap=OverlapPolicy.ALLOW))
    world.run_until(11_000)
    for request in ("r1", "r2"):
        ran(world.store.control([triggering(world, request, overlap=OverlapPolicy.ALLOW)]))
    world.run_until(18_000)
    assert len(client.running) == 3


def test_s29_a_triggered_run_of_a_paused_job_is_run() -> None:
    world, _, client = lone()
    world.run_until(3_000)
    asked(world, Pause("sync"))
    trigger(world)
    assert client.only().trigger is Trigger.MANUAL


def test_s21a_a_run_that_somebody_cancels_is_told_by_notification() -> None:
    world, _, client = lone()
    world.run_until(11_000)
    asked(world, CancelRun("sync", START + 10_000))
    assert client.reasons() == [CancelReason.REQUESTED]
    client.complete(stopped=CancelReason.REQUESTED)
    world.run_for(100)
    assert current(world.run(10_000)) == (1, "failed", "cancelled")


def test_s21a_without_a_notification_it_is_told_with_the_next_heartbeat() -> None:
    world, _, client = lone()
    world.run_until(11_000)
    ran(world.store.control([CancelRun("sync", START + 10_000)]))
    world.run_for(6_000)
    assert client.reasons() == [CancelReason.REQUESTED]


def test_s21a_a_cancel_is_repeated_with_its_message_on_the_next_stream() -> None:
    """What was sent on the stream before may not have come."""
    world, _, client = lone()
    world.run_until(11_000)
    client.lose_stream()
    asked(world, CancelRun("sync", START + 10_000, "by hand"))
    assert not client.cancelled
    client.subscribe()
    (told,) = client.cancelled
    assert (told.reason, told.message) == (CancelReason.REQUESTED, "by hand")


def test_s21a_a_run_that_is_cancelled_before_it_is_handed_over_is_given_back() -> None:
    world, sidecar, client = lone()
    world.run_until(9_999)
    world.now = 10_000
    sidecar.tick()
    assert sidecar.waits(Method.CLAIM)
    client.lose_stream()
    sidecar.settle()
    assert sidecar.engine.status(world.now).instance.running == 1
    asked(world, CancelRun("sync", START + 10_000))
    world.run_for(1_000)
    assert current(world.run(10_000)) == (1, "failed", "cancelled")
    assert sidecar.engine.status(world.now).instance.running == 0


def test_s21a_an_attempt_whose_grace_is_over_before_it_was_handed_over_is_given_back() -> None:
    world, sidecar, client = lone(every(cancel_grace_ms=0))
    world.run_until(9_999)
    world.now = 10_000
    sidecar.tick()
    client.lose_stream()
    sidecar.settle()
    ran(world.store.control([CancelRun("sync", START + 10_000)]))
    world.run_for(6_000)
    assert not client.assigned
    assert current(world.run(10_000)) == (1, "failed", "cancelled")
    assert sidecar.engine.status(world.now).instance.running == 0


def test_s29_a_plan_of_a_schedule_that_is_not_ours_any_more_says_nothing_of_a_pause() -> None:
    world, sidecar, client = lone(every(start_deadline_ms=1_000))
    world.run_until(11_000)
    asked(world, Pause("sync"))
    world.run_until(12_000)
    sidecar.wait_for(Method.SETTLE)
    plan = sidecar.pending(Method.SETTLE).arguments[0][0]
    client.close()
    sidecar.answer_by_hand(Method.SETTLE, PlanAnswer(False, plan.settled))
    assert sidecar.engine.status(world.now).ready


def test_s29_what_an_operator_asks_names_the_slots_that_the_store_cannot_compute() -> None:
    world, sidecar, _ = lone(every(start_deadline_ms=1_000), lasts_ms=100)
    world.run_until(11_000)
    asked(world, Pause("sync"))
    world.run_until(45_000)
    (view,) = ran(world.store.jobs(["sync"], "", 1)).answers

    def resolve(spec: JobSpec) -> Job:
        return sidecar.engine.resolve_stored(spec, world.store_at)

    act = resume_of(view, resolve, world.store_at)
    assert act.passed == (
        Passed("every 10s", START + 10_000, tuple(START + n * 10_000 for n in (2, 3, 4, 5))),
    )
    assert act.until == START + 50_000
    triggered = trigger_of(view, resolve, "r", b"x", world.store_at)
    assert (triggered.slots, triggered.until) == ((START + 50_000,), START + 50_000)
    assert asked(world, act).outcome == "done"
    assert world.run(40_000).run.reason == "paused"


def test_s29_what_was_missed_before_a_long_pause_is_planned_when_it_ends() -> None:
    """More slots fell due since than a plan may list."""
    world, sidecar, _ = lone(every(1_000, start_deadline_ms=1_000), lasts_ms=100)
    world.run_until(1_500)
    sidecar.die()
    world.run_until(6_500)
    asked(world, Pause("sync"))
    world.now += 20_000 * 1_000
    (view,) = ran(world.store.jobs(["sync"], "", 1)).answers
    other = Sidecar(world, "b")
    act = resume_of(
        view, lambda spec: other.engine.resolve_stored(spec, world.store_at), world.store_at
    )
    assert asked(world, act).outcome == "done"
    missed = [view.run.slot - START for view in world.runs() if view.run.reason == "missed"]
    assert missed == [2_000, 3_000, 4_000, 5_000]


def test_s29_a_triggered_run_keeps_clear_of_the_slots_of_every_schedule_in_use() -> None:
    world, sidecar, _ = lone(every(10_000))
    Sidecar(world, "b").ready_client(every(15_000))
    world.run_until(11_000)
    (view,) = ran(world.store.jobs(["sync"], "", 1)).answers
    asked_at = {18_000: [20_000], 26_000: [30_000], 43_000: [45_000]}
    for at, slots in asked_at.items():
        act = trigger_of(
            view, lambda spec: sidecar.engine.resolve_stored(spec, START), "r", b"", START + at
        )
        assert [slot - START for slot in act.slots] == slots


def test_s29_of_a_long_pause_the_newest_slots_are_named_and_that_there_are_older_ones() -> None:
    sidecar = Sidecar(World())
    job = sidecar.engine.resolve(every(100), START)
    passed = passed_slots(job, START, START + 100 * 10_001)
    assert (len(passed.slots), passed.more) == (10_000, True)
    assert passed.slots[-1] == START + 100 * 10_001
    assert not passed_slots(job, START, START + 100 * 10_000).more


def test_s21a_a_cancelled_attempt_is_not_retried() -> None:
    world, client = retried()
    asked(world, CancelRun("sync", START + 60_000))
    client.complete(failure=Failure("E"))
    world.run_for(5_000)
    assert current(world.run(60_000)) == (1, "failed", "cancelled")
    assert not client.running
