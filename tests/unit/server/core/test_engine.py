"""The whole instance: what every answer of the store means, readiness, pruning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core.errors import InvalidError, UnsupportedError
from anarchon_server.core.messages import Level, Method, Suspended, Tick
from anarchon_server.core.model import InstanceState, JobSpec, OverlapPolicy
from anarchon_server.core.store import PrunePolicy
from tests.unit.server.core.driver import (
    START,
    FakeClient,
    Sidecar,
    World,
    current,
    every,
    warnings,
)

LONG = every(60_000)


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


# --- Steps -------------------------------------------------------------------------------


def test_s3_the_engines_clock_never_goes_back() -> None:
    sidecar = Sidecar(World())
    sidecar.world.now = 10
    sidecar.tick()
    with pytest.raises(AssertionError, match="the clock went back"):
        sidecar.engine.step(9, Tick())


def test_s3_an_engine_that_was_not_woken_for_long_catches_up_in_one_step() -> None:
    world, sidecar, client = lone(every(overlap=OverlapPolicy.ALLOW))
    world.jump(12_000)
    client.keep_alive()
    sidecar.settle()
    assert client.only().slot == START + 10_000


def test_one_engine_with_the_same_chance_and_inputs_does_the_same() -> None:
    histories = []
    for _ in range(2):
        world, sidecar, _ = lone(every(lease_ms=3_000), every(7_000, "other"), lasts_ms=900)
        world.run_until(60_000)
        histories.append((sidecar.said, world.runs()))
    assert histories[0] == histories[1]


def test_a_wish_to_be_woken_is_the_earliest_timer_and_never_in_the_past() -> None:
    world, sidecar, _ = lone()
    for _ in range(200):
        wake_at = sidecar.engine.wake_at
        assert wake_at is not None
        assert wake_at > world.now
        world.now = wake_at
        sidecar.tick()
        sidecar.settle()


# --- Readiness ---------------------------------------------------------------------------


def test_s27_before_the_first_answer_the_instance_is_starting() -> None:
    world = World()
    sidecar = Sidecar(world)
    status = sidecar.engine.status(0)
    assert (status.ready, status.store_reachable, status.reasons) == (False, False, ("starting",))
    assert (status.instance.seen_at, status.instance.started_at) == (0, 0)
    world.run_until(10)
    status = sidecar.engine.status(world.now)
    assert (status.ready, status.store_reachable, status.reasons) == (True, True, ())
    assert (status.instance.started_at, status.instance.ready) == (START, True)


def test_s27_a_store_that_goes_away_and_comes_back_is_said_once_each() -> None:
    world, sidecar, _ = lone()
    world.run_until(12_000)
    sidecar.away = "refused"
    world.run_until(30_000)
    status = sidecar.engine.status(world.now)
    assert (status.ready, status.reasons) == (False, ("the store does not answer",))
    (line,) = sidecar.logged("store_away")
    assert (line.level, line.fields["error"]) == (Level.WARNING, "the store is away")
    assert not sidecar.logged("store_back")
    sidecar.away = None
    world.run_until(35_000)
    assert len(sidecar.logged("store_back")) == 1
    assert sidecar.engine.status(world.now).ready


def test_s27_a_store_that_was_never_there_is_said_to_be_away() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.away = "refused"
    world.run_until(10_000)
    assert len(sidecar.logged("store_away")) == 1


@pytest.mark.parametrize("offset", [30_001, -30_001])
def test_s1_a_host_clock_too_far_off_is_not_ready_and_says_why(offset: int) -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.host_offset = offset
    world.run_until(6_000)
    status = sidecar.engine.status(world.now)
    sign = "-" if offset < 0 else ""
    reason = f"the host's clock is {sign}30s1ms off the store's; at most 30s"
    assert (status.ready, status.reasons) == (False, (reason,))
    assert status.instance.clock_offset_ms == offset
    (line,) = sidecar.logged("clock_offset")
    assert (line.level, line.fields) == (Level.ERROR, {"offset_ms": offset})
    sidecar.host_offset = 0
    world.run_until(12_000)
    assert [line.level for line in sidecar.logged("clock_offset")] == [Level.ERROR, Level.INFO]
    assert sidecar.engine.status(world.now).ready


def test_s1_how_far_the_clock_may_be_off_can_be_set() -> None:
    world = World()
    sidecar = Sidecar(world, max_clock_offset_ms=60_000)
    sidecar.host_offset = 59_999
    world.run_until(6_000)
    assert sidecar.engine.status(world.now).ready


def test_s1_renewals_and_results_go_on_while_the_clock_is_too_far_off() -> None:
    world, sidecar, client = lone(LONG)
    world.run_until(60_500)
    sidecar.host_offset = 90_000
    world.run_until(150_000)
    assert current(world.run(60_000)) == (1, "running", "")
    assert client.cancelled == []
    client.complete(result="done")
    sidecar.settle()
    assert current(world.run(60_000)) == (1, "success", "")


def test_s1_a_slow_answer_does_not_judge_the_hosts_clock() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    call = sidecar.pending(Method.BEAT)
    reply = sidecar.execute(call)
    world.now = 1_001
    sidecar.host_offset = 90_000
    sidecar.reply(call, reply)
    assert sidecar.engine.status(world.now).instance.clock_offset_ms == 0
    sidecar.settle()
    sidecar.wait_for(Method.BEAT)
    sidecar.answer(Method.BEAT)
    assert sidecar.engine.status(world.now).instance.clock_offset_ms == 90_000


def test_s1_the_offset_is_judged_at_the_middle_of_the_request() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    call = sidecar.pending(Method.BEAT)
    world.now = 200
    reply = sidecar.execute(call)
    world.now = 400
    sidecar.reply(call, reply)
    assert sidecar.engine.status(world.now).instance.clock_offset_ms == 0


def test_an_instance_reports_what_it_is_and_has() -> None:
    world = World()
    sidecar = Sidecar(
        world, version="1.2", tzdata_version="2026a", doubts=("it may lose a second",)
    )
    idle = sidecar.engine.status(0).instance
    assert (idle.state, idle.backend, idle.version) == (InstanceState.IDLE, "memory", "1.2")
    sidecar.ready_client(every(60_000, lease_ms=45_000), LONG.__class__("b", LONG.schedule))
    world.run_until(60_500)
    busy = sidecar.engine.status(world.now).instance
    assert (busy.state, busy.lease_ms) == (InstanceState.ACTIVE, 45_000)
    assert (busy.tzdata_version, busy.doubts) == ("2026a", ("it may lose a second",))
    assert busy.running >= 1
    assert busy.seen_at == START + 60_500


def test_a_spec_can_be_resolved_without_being_registered() -> None:
    sidecar = Sidecar(World())
    sidecar.engine.resolve(every(), START)
    with pytest.raises(InvalidError, match="jitter"):
        sidecar.engine.resolve(every(1_000, jitter_ms=1_000), START)
    without_leases = Sidecar(World(leases=False))
    with pytest.raises(UnsupportedError):
        without_leases.engine.resolve(every(overlap=OverlapPolicy.QUEUE), START)
    assert sidecar.calls == without_leases.calls == {}


# --- A store that goes back --------------------------------------------------------------


def test_s27a_another_store_is_noticed_and_quarantined_for_a_lease() -> None:
    world, sidecar, _ = lone(every(lease_ms=6_000), lasts_ms=1)
    world.run_until(12_000)
    world.restore()
    world.run_until(14_000)
    (line,) = sidecar.logged("store_went_back")
    assert (line.level, line.fields) == (Level.ERROR, {"quarantine_ms": 6_000})
    world.run_until(60_000)
    assert len(sidecar.logged("store_went_back")) == 1
    assert world.slots()[-1] == 50_000 or world.slots()[-1] == 60_000


def lower_fences(sidecar: Sidecar, fence: int) -> None:
    """The next heartbeat shows this fence for the job."""
    call = sidecar.wait_for(Method.BEAT)
    reply = sidecar.execute(call)
    sidecar.reply(call, replace(reply, fences={"sync": fence}))


def test_s27a_a_lower_fence_is_noticed_and_remembered_from_then_on() -> None:
    world, sidecar, _ = lone(every(60_000), lasts_ms=1)
    world.run_until(60_500)
    known = sidecar.engine._fences["sync"][0]
    lower_fences(sidecar, known - 1)
    assert len(sidecar.logged("store_went_back")) == 1
    lower_fences(sidecar, known - 1)
    assert len(sidecar.logged("store_went_back")) == 1, "the lower one is remembered"
    lower_fences(sidecar, known)
    lower_fences(sidecar, known)
    assert len(sidecar.logged("store_went_back")) == 1


def test_s27a_an_answer_to_an_earlier_request_proves_nothing() -> None:
    world, sidecar, _ = lone(LONG, lasts_ms=1)
    world.run_until(57_000)
    beat = sidecar.wait_for(Method.BEAT)
    assert world.now < 60_000
    early = sidecar.execute(beat)
    world.now = 60_000
    sidecar.tick()
    sidecar.answer(Method.CLAIM)
    world.now += 1
    sidecar.reply(beat, early)
    assert not sidecar.logged("store_went_back")
    assert sidecar.engine._fences["sync"][0] > 0


def test_s27a_nothing_is_planned_during_the_quarantine() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, client = lone(job)
    world.run_until(8_000)
    client.keep_alive(draining=True)
    world.database.store_id = "another"
    world.run_until(37_000)
    assert sidecar.called(Method.SETTLE) == []
    world.run_until(40_000)
    assert current(world.run(10_000)) == (0, "skipped", "missed")


# --- The store's clock -------------------------------------------------------------------


def test_s19_a_step_of_the_stores_clock_is_logged_once() -> None:
    world, sidecar, _ = lone()
    world.run_until(12_000)
    world.store_step = 9_000
    world.run_until(30_000)
    assert len(sidecar.logged("store_clock_step")) == 1
    assert "store_clock_step" in warnings(sidecar)


def test_s3_a_clock_stepped_back_neither_repeats_nor_floods_runs() -> None:
    world, _, client = lone(every(1_000), lasts_ms=1)
    world.run_until(20_500)
    world.store_step = -10_000
    world.run_until(45_500)
    slots = [assignment.slot for assignment in client.assigned]
    assert len(slots) == len(set(slots))
    assert world.slots() == [*range(1_000, 36_000, 1_000)]


def test_s4_a_suspension_is_logged_and_every_lease_confirmed() -> None:
    world, sidecar, _ = lone(LONG)
    world.run_until(60_500)
    world.jump(3_000)
    sidecar.feed(Suspended(3_000))
    (line,) = sidecar.logged("suspended")
    assert line.fields == {"gap_ms": 3_000}
    assert len(sidecar.pending(Method.BEAT).arguments[0].renewals) == 1


# --- Pruning -----------------------------------------------------------------------------


def prunings(sidecar: Sidecar) -> list[PrunePolicy]:
    policies: list[PrunePolicy] = sidecar.called(Method.PRUNE)
    return policies


def test_s30_every_instance_prunes_a_small_batch_now_and_then() -> None:
    world = World()
    sidecar = Sidecar(world, history_ms=1_000, history_max=5, prune_every_ms=40_000)
    world.run_until(100)
    assert prunings(sidecar) == [PrunePolicy(1_000, 5, 200)], "the first after a drawn while"
    world.run_until(100_000)
    assert len(prunings(sidecar)) in (5, 6), "half the time, by the least that chance gives"


def test_s30_a_full_batch_is_followed_by_another_after_a_second() -> None:
    world, sidecar, _ = lone()
    world.run_until(29_000)
    sidecar.wait_for(Method.PRUNE)
    sidecar.answer_by_hand(Method.PRUNE, 200)
    pruned_at = world.now
    sidecar.wait_for(Method.PRUNE)
    assert world.now == pruned_at + 1_000
    sidecar.answer_by_hand(Method.PRUNE, 199)
    pruned_at = world.now
    sidecar.wait_for(Method.PRUNE)
    assert world.now >= pruned_at + 25_000


def test_s30_a_pruning_that_fails_is_left_to_the_next_time() -> None:
    world, sidecar, _ = lone()
    sidecar.wait_for(Method.PRUNE)
    sidecar.fail(Method.PRUNE)
    failed_at = world.now
    sidecar.wait_for(Method.PRUNE)
    assert world.now >= failed_at + 25_000


def test_s30_a_pruning_that_is_out_is_not_asked_for_twice() -> None:
    world = World()
    sidecar = Sidecar(world, prune_every_ms=1_000)
    sidecar.tick()
    sidecar.wait_for(Method.PRUNE)
    for _ in range(5):
        world.now += 1_000
        sidecar.tick()
    assert len(prunings(sidecar)) == 1


def test_s1_nothing_is_pruned_while_the_clock_is_too_wrong_or_the_instance_stops() -> None:
    world = World()
    sidecar = Sidecar(world, prune_every_ms=1_000)
    sidecar.host_offset = 40_000
    world.run_until(10_000)
    assert prunings(sidecar) == []
    stopping, other, client = lone(LONG)
    stopping.run_until(61_000)
    done = len(prunings(other))
    other.stop()
    stopping.run_until(80_000)
    assert len(prunings(other)) == done
    assert client.running
