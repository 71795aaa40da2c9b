"""The order in which an instance stops (S23)."""

from __future__ import annotations

from typing import Any

from anarchon_server.core.messages import Draining, Method, Stop, Stopped
from anarchon_server.core.model import CancelReason, InstanceState, JobSpec, OverlapPolicy
from tests.unit.server.core.driver import START, FakeClient, Sidecar, World, current, every, ran

LONG = every(60_000)
SHUTDOWN = CancelReason.SHUTDOWN


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


def running(spec: JobSpec = LONG, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """The same, with the run of slot 60 handed over."""
    world, sidecar, client = lone(spec, **options)
    world.run_until(60_000)
    client.keep_alive()
    return world, sidecar, client


def test_s23_an_instance_that_runs_nothing_stops_at_once() -> None:
    world, sidecar, client = lone()
    world.run_until(5_000)
    sidecar.stop()
    sidecar.settle()
    assert sidecar.stopped
    assert client.events[-1] == Draining(20_000)
    assert sidecar.beats[-1].leaving
    assert ran(world.store.instances()).answers == ()


def test_s23_an_instance_that_stops_claims_and_registers_no_more() -> None:
    world, sidecar, client = lone(every(1_000, overlap=OverlapPolicy.ALLOW))
    world.run_until(3_000)
    claims = len(sidecar.claims)
    sidecar.stop()
    world.run_until(13_000)
    assert len(sidecar.claims) == claims
    assert len(client.running) == 3


def test_s23_running_handlers_have_a_grace_in_which_they_are_renewed() -> None:
    world, sidecar, client = running()
    sidecar.stop()
    world.run_until(79_999)
    assert client.cancelled == []
    assert world.run(60_000).run.state == "running"
    assert sum(len(beat.renewals) for beat in sidecar.beats) >= 3
    client.complete(result="done")
    sidecar.settle()
    assert sidecar.stopped
    assert current(world.run(60_000)) == (1, "success", "")


def test_s23_after_the_grace_handlers_are_cancelled_and_hand_over() -> None:
    world, sidecar, client = running()
    sidecar.stop()
    world.run_until(80_000)
    assert client.reasons() == [SHUTDOWN]
    client.complete(stopped=SHUTDOWN)
    sidecar.settle()
    assert sidecar.stopped
    assert current(world.run(60_000)) == (1, "interrupted", "handed_over")


def test_s23_a_handed_over_run_is_taken_over_at_once_and_not_counted() -> None:
    world, sidecar, client = running()
    other = Sidecar(world, "b").ready_client(LONG)
    sidecar.stop()
    world.run_until(80_000)
    client.complete(stopped=SHUTDOWN)
    sidecar.settle()
    world.run_until(85_500)
    assert other.only().attempt == 2
    assert world.run(60_000).run.lost == 0


def test_s23_a_job_may_have_a_shorter_grace_of_its_own() -> None:
    world, sidecar, client = running(every(60_000, stop_grace_ms=3_000))
    sidecar.stop()
    world.run_until(62_999)
    assert client.cancelled == []
    world.run_until(63_000)
    assert client.reasons() == [SHUTDOWN]


def test_s23_the_instances_grace_bounds_the_jobs() -> None:
    world = World()
    sidecar = Sidecar(world, stop_grace_ms=2_000)
    client = sidecar.ready_client(every(60_000, stop_grace_ms=9_000))
    world.run_until(60_500)
    sidecar.stop()
    world.run_until(62_500)
    assert client.events[-2] == Draining(2_000)
    assert client.reasons() == [SHUTDOWN]


def test_s23_whoever_does_not_stop_is_left_to_its_lease() -> None:
    world, sidecar, client = running()
    sidecar.stop()
    world.run_until(84_999)
    waiting = not sidecar.stopped
    world.run_until(85_000)
    assert (waiting, sidecar.stopped) == (True, True)
    assert sidecar.called(Method.RELEASE) == []
    assert current(world.run(60_000)) == (1, "running", "")
    assert client.reasons() == [SHUTDOWN]


def test_s23_a_second_stop_skips_the_grace_and_a_third_changes_nothing() -> None:
    world, sidecar, client = running()
    sidecar.stop()
    world.run_until(62_000)
    sidecar.stop()
    assert client.reasons() == [SHUTDOWN]
    world.run_until(64_000)
    sidecar.stop()
    world.run_until(66_999)
    waiting = not sidecar.stopped
    world.run_until(67_000)
    assert (waiting, sidecar.stopped) == (True, True)


def test_s23_a_process_that_is_gone_hands_over() -> None:
    world, sidecar, client = running(watchable=True)
    sidecar.stop()
    world.run_until(61_000)
    client.exit()
    sidecar.settle()
    assert sidecar.stopped
    assert current(world.run(60_000)) == (1, "interrupted", "handed_over")


def test_s23_what_was_won_and_not_handed_over_goes_back_at_once() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(59_999)
    sidecar.wait_for(Method.CLAIM)
    client.lose_stream()
    sidecar.settle()
    sidecar.stop()
    sidecar.settle()
    assert sidecar.stopped
    assert current(world.run(60_000)) == (1, "interrupted", "not_accepted")


def test_s23_what_is_won_after_the_stop_goes_back_too() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(59_999)
    sidecar.wait_for(Method.CLAIM)
    sidecar.stop()
    while sidecar.waits(Method.BEAT):
        sidecar.answer(Method.BEAT)
    assert not any(beat.leaving for beat in sidecar.beats), "the claim is still out"
    sidecar.settle()
    assert sidecar.stopped
    assert client.running == {}
    assert current(world.run(60_000)) == (1, "interrupted", "not_accepted")


def test_s23_the_first_cancel_of_an_attempt_stands() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=7_000, cancel_grace_ms=60_000))
    sidecar.stop()
    world.run_until(85_000)
    assert client.reasons() == [CancelReason.TIMEOUT]
    client.complete(stopped=CancelReason.TIMEOUT)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s23_a_timeout_during_the_cancel_counts() -> None:
    world, sidecar, client = running(every(60_000, timeout_ms=21_000, cancel_grace_ms=9_000))
    sidecar.stop()
    world.run_until(81_500)
    assert client.reasons() == [SHUTDOWN, CancelReason.TIMEOUT]
    client.complete(stopped=SHUTDOWN)
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "failed", "timeout")


def test_s23_a_result_that_waits_for_the_store_is_not_cancelled_and_keeps_the_instance() -> None:
    world, sidecar, client = running()
    sidecar.away = "refused"
    client.complete(result="done")
    sidecar.stop()
    world.run_until(81_000)
    waiting = not sidecar.stopped
    assert client.cancelled == []
    sidecar.away = None
    world.run_until(83_000)
    assert (waiting, sidecar.stopped) == (True, True)
    assert current(world.run(60_000)) == (1, "success", "")


def test_s23_an_instance_stops_also_while_the_store_is_away() -> None:
    world, sidecar, client = running()
    world.run_until(61_000)
    sidecar.away = "refused"
    world.run_until(64_000)
    sidecar.stop()
    world.run_until(80_000)
    waiting = not sidecar.stopped  # its handler has time
    client.silent = True
    world.run_until(92_000)
    assert (waiting, sidecar.stopped) == (True, True)


def test_s23_a_second_stop_ends_the_instance_after_the_cancel_also_while_the_store_is_away() -> (
    None
):
    world, sidecar, client = running()
    sidecar.away = "refused"
    client.complete(result="nobody takes it")
    sidecar.stop()
    world.run_until(62_000)
    sidecar.stop()
    world.run_until(69_000)
    assert sidecar.stopped


def test_s23_an_instance_that_runs_nothing_stops_also_while_the_store_is_away() -> None:
    for moment in range(5_000, 8_000, 100):
        world, sidecar, _ = lone()
        world.run_until(4_000)
        sidecar.away = "refused"
        world.run_until(moment)
        sidecar.stop()
        world.run_for(1_500)
        assert sidecar.stopped, moment


def test_s23_releases_that_cannot_be_sent_do_not_keep_the_instance_for_ever() -> None:
    world, sidecar, client = running(watchable=True)
    sidecar.away = "unknown"
    sidecar.stop()
    client.exit()
    world.run_until(87_000)
    assert sidecar.stopped
    sidecar.away = None
    sidecar.settle()


def test_s23_an_answer_after_the_end_is_taken_in_and_nothing_follows() -> None:
    world, sidecar, client = running(watchable=True)
    sidecar.stop()
    client.exit()
    call = sidecar.pending(Method.RELEASE)
    world.now = 90_000
    sidecar.tick()
    while not sidecar.stopped:
        sidecar.answer(Method.BEAT)
    sidecar.fail(Method.RELEASE, unknown=True)
    assert call.call_id not in sidecar.calls
    assert not sidecar.calls
    sidecar.feed(Stop())
    assert sum(isinstance(command, Stopped) for command in sidecar.said) == 1


def test_s23_an_instance_that_stops_says_so() -> None:
    world, sidecar, _ = running()
    sidecar.stop()
    status = sidecar.engine.status(world.now)
    assert (status.ready, status.reasons) == (False, ("stopping",))
    assert status.instance.state is InstanceState.DRAINING
    world.run_until(66_000)
    (seen,) = ran(world.store.instances()).answers
    assert seen.state is InstanceState.DRAINING
    assert [line.fields for line in sidecar.logged("stopping")] == [{"running": 1}]


def test_s23_killed_instead_nothing_is_lost() -> None:
    world, sidecar, _ = running(every(60_000, lease_ms=3_000))
    other = Sidecar(world, "b").ready_client(every(60_000, lease_ms=3_000))
    sidecar.stop()
    sidecar.die()
    world.run_until(64_500)
    assert other.only().slot == START + 60_000
    assert other.only().attempt == 2
