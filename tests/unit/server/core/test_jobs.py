"""The jobs an instance handles: registering them, the slots to come, the slots that were missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core import limits
from anarchon_server.core.limits import (
    CATCH_UP_LIMIT,
    DAY,
    MISSED_LISTED_MAX,
    PLAN_BATCH,
    PLANNED_ALONG,
)
from anarchon_server.core.messages import CallStore, Method, Suspended, Woken
from anarchon_server.core.model import (
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
)
from anarchon_server.core.slots import Cron, Every
from anarchon_server.core.slots.cron import HORIZON_S
from anarchon_server.core.store import BeatAnswer, Plan, PlanAnswer
from tests.unit.server.core.driver import START, FakeClient, Sidecar, World, current, every, ran

HORIZON_MS = HORIZON_S * 1_000
"""The end of 2199: there are no cron slots later."""


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


def registrations(sidecar: Sidecar) -> list[tuple[list[str], list[str]]]:
    """The jobs of each registration, and those that were let go of with it."""
    calls = [c for c in sidecar.said if isinstance(c, CallStore) and c.method is Method.REGISTER]
    return [([each.job for each in c.arguments[1]], list(c.arguments[2])) for c in calls]


def registered(sidecar: Sidecar) -> list[list[str]]:
    """The jobs of each registration."""
    return [jobs for jobs, _ in registrations(sidecar)]


def held(world: World) -> dict[str, tuple[str, ...]]:
    """Who holds each job, as the store shows it."""
    return {view.name: view.instance_ids for view in ran(world.store.jobs((), "", 10_000)).answers}


@pytest.fixture
def parts_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than two jobs go with one call."""
    monkeypatch.setattr(limits, "REGISTER_BATCH", 2)


# --- Registration ------------------------------------------------------------------------


def test_s28_a_client_that_subscribes_has_its_jobs_registered_once() -> None:
    world, sidecar, _ = lone(every(name="a"), every(name="b"))
    world.run_until(60_000)
    assert registered(sidecar) == [[], ["a", "b"]]


def test_s28_the_store_is_told_at_first_that_this_instance_holds_nothing() -> None:
    world = World()
    sidecar = Sidecar(world)
    world.run_until(30_000)
    assert registered(sidecar) == [[]]
    assert not sidecar.claims


def test_s28_a_client_that_leaves_takes_its_jobs_out_of_the_registration() -> None:
    world, sidecar, client = lone(every(name="a"), every(name="b"))
    sidecar.client(every(name="b"), name="second")
    client.close()
    world.run_until(11_000)
    assert registrations(sidecar) == [([], []), (["a", "b"], []), ([], ["a"])]
    assert held(world) == {"a": (), "b": ("a",)}
    assert all(claim.job == "b" for claim in sidecar.claims)


def test_s28_the_newest_subscribes_spec_makes_the_slots_and_any_client_may_run_them() -> None:
    world, sidecar, client = lone(every(60_000), max_concurrency=2)
    newer = sidecar.client(every(20_000), name="newer", max_concurrency=1)
    world.run_until(25_000)
    assert world.slots() == [20_000]
    assert len(client.running) + len(newer.running) == 1
    assert client.only().slot == START + 20_000, "the client with most room has it"


def test_s28_where_the_newest_subscribe_leaves_the_one_before_makes_the_slots_again() -> None:
    """A new version was tried beside the old one on this sidecar, and is gone."""
    world, sidecar, _ = lone(every(20_000), lasts_ms=100)
    newer = sidecar.client(every(15_000), name="newer")
    world.run_until(16_000)
    newer.close()
    world.run_until(35_000)
    assert world.slots() == [15_000, 20_000]


def test_s28_where_the_newest_subscribe_drops_a_job_another_clients_spec_makes_the_slots() -> None:
    world, sidecar, _ = lone(every(20_000))
    newer = sidecar.client(every(15_000), every(name="other"), name="newer")
    newer.specs = (every(name="other"),)
    newer.subscribe()
    newer.keep_alive()
    world.run_until(25_000)
    assert world.slots() == [20_000]


def test_s28_subscribing_again_with_the_same_jobs_registers_nothing() -> None:
    world, sidecar, client = lone()
    client.subscribe()
    client.keep_alive()
    world.run_until(11_000)
    assert len(registered(sidecar)) == 2
    assert client.only().slot == START + 10_000


def test_s28_differing_definitions_are_reported() -> None:
    world, _, _ = lone(every(timeout_ms=1_000))
    other = Sidecar(world, "b")
    other.ready_client(every(timeout_ms=2_000))
    assert [line.fields for line in other.logged("definitions_differ")] == [{"job": "sync"}]


def test_s28_many_jobs_are_registered_in_parts_each_within_the_time_of_a_call() -> None:
    most = limits.REGISTER_BATCH
    names = [f"job-{n:04}" for n in range(2 * most + 1)]
    world, sidecar, client = lone(*(every(name=name) for name in names))
    calls = [c for c in sidecar.said if isinstance(c, CallStore) and c.method is Method.REGISTER]
    assert {call.timeout_ms for call in calls} == {limits.OP_TIMEOUT}
    assert [len(jobs) for jobs in registered(sidecar)] == [0, most, most, 1]
    assert held(world) == dict.fromkeys(names, ("a",))
    client.close()
    sidecar.settle()
    assert [len(gone) for _, gone in registrations(sidecar)[4:]] == [most, most, 1]
    assert held(world) == dict.fromkeys(names, ())


def test_s28_a_job_that_comes_is_registered_alone_and_one_that_changes_too() -> None:
    world, sidecar, client = lone(every(name="a"), every(name="b"))
    client.subscribe(specs=(every(name="a"), every(20_000, name="b"), every(name="c")))
    client.keep_alive()
    world.run_until(30_000)
    assert registrations(sidecar)[2:] == [(["b", "c"], [])]
    assert held(world) == dict.fromkeys("abc", ("a",))


@pytest.mark.usefixtures("parts_of_two")
def test_s28_what_is_registered_is_claimed_while_other_parts_are_on_their_way() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    client = sidecar.client(*(every(name=name) for name in "abc"), max_concurrency=3)
    sidecar.answer(Method.REGISTER)
    assert registered(sidecar)[1:] == [["a", "b"], ["c"]]
    world.now = 10_000
    client.keep_alive()
    sidecar.tick()
    assert sidecar.waits(Method.REGISTER), "it is answered when it is answered"
    sidecar.answer(Method.CLAIM)
    assert sorted(each.job for each in client.assigned) == ["a", "b"]


@pytest.mark.usefixtures("parts_of_two")
@pytest.mark.parametrize(("took_ms", "pause_ms"), [(80, 80), (400, limits.REGISTER_PAUSE_MAX)])
def test_s28_between_two_parts_others_have_their_turn(took_ms: int, pause_ms: int) -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    sidecar.client(*(every(name=name) for name in "abc"))
    world.now += took_ms
    sidecar.answer(Method.REGISTER)
    sidecar.settle()
    world.now += pause_ms - 1
    sidecar.tick()
    assert not sidecar.waits(Method.REGISTER)
    world.now += 1
    sidecar.tick()
    assert sidecar.waits(Method.REGISTER)
    assert registered(sidecar)[1:] == [["a", "b"], ["c"]]


@pytest.mark.usefixtures("parts_of_two")
def test_s28_a_part_that_fails_is_repeated_after_the_others_and_first_they_are_smaller() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    sidecar.client(*(every(name=name) for name in "abcd"))
    sidecar.fail(Method.REGISTER, unknown=True)
    world.run_until(1_000)
    assert registered(sidecar)[1:] == [["a", "b"], ["c"], ["d", "a"], ["b"]]
    assert held(world) == dict.fromkeys("abcd", ("a",))


@pytest.mark.parametrize("bad", ["job-00", "job-13", "job-29"])
def test_s28_a_job_that_the_store_cannot_register_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Somebody spoilt its record, say."""
    monkeypatch.setattr(limits, "REGISTER_BATCH", 16)
    names = [f"job-{n:02}" for n in range(30)]
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    sidecar.client(*(every(name=name) for name in names))
    for _ in range(30):
        call = sidecar.wait_for(Method.REGISTER)
        if bad in [each.job for each in call.arguments[1]]:
            sidecar.fail(Method.REGISTER, unknown=True)
        else:
            sidecar.answer(Method.REGISTER)
    assert held(world) == {name: ("a",) for name in names if name != bad}
    assert registered(sidecar)[-1] == [bad], "it is tried on and on"


def test_s28_a_job_that_the_store_cannot_let_go_of_keeps_no_other_from_being_registered() -> None:
    world, sidecar, client = lone(every(name="bad"))
    sidecar.client(every(name="a"), every(name="b"), name="other")
    client.close()
    sidecar.client(every(name="c"), name="third")
    for _ in range(10):
        if "bad" in sidecar.wait_for(Method.REGISTER).arguments[2]:
            sidecar.fail(Method.REGISTER)
        else:
            sidecar.answer(Method.REGISTER)
    assert held(world) == dict.fromkeys(("a", "b", "bad", "c"), ("a",))
    assert registrations(sidecar)[-1] == ([], ["bad"])


def test_s28_a_job_that_goes_while_its_registration_is_on_its_way_is_let_go() -> None:
    for unknown in (None, True):
        world = World()
        sidecar = Sidecar(world)
        sidecar.tick()
        sidecar.settle()
        client = sidecar.client(every(name="a"))
        call = sidecar.pending(Method.REGISTER)
        client.close()
        done = sidecar.execute(call)
        if unknown is None:
            sidecar.reply(call, done)
        else:
            sidecar.fail(Method.REGISTER, unknown=unknown)
        world.run_until(1_000)
        assert registrations(sidecar)[1:] == [(["a"], []), ([], ["a"])]
        assert held(world) == {"a": ()}


def test_s28_a_job_that_is_offered_again_while_it_is_let_go_is_registered_again() -> None:
    for unknown in (None, True):
        world, sidecar, client = lone(every(name="a"))
        client.close()
        call = sidecar.pending(Method.REGISTER)
        sidecar.client(every(name="a"), name="again")
        done = sidecar.execute(call)
        if unknown is None:
            sidecar.reply(call, done)
        else:
            sidecar.fail(Method.REGISTER, unknown=unknown)
        world.run_until(1_000)
        assert registrations(sidecar)[2:] == [([], ["a"]), (["a"], [])]
        assert held(world) == {"a": ("a",)}


def test_s28_what_the_store_may_still_hold_of_this_instance_is_let_go_until_it_surely_was() -> None:
    world, sidecar, client = lone(every(name="a"))
    client.close()
    sidecar.fail(Method.REGISTER)
    world.run_until(1_000)
    assert registrations(sidecar)[2:] == [([], ["a"])] * 2
    assert held(world) == {"a": ()}


def test_s28_a_job_that_went_before_it_was_registered_is_nothing_to_tell() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.answer(Method.BEAT)
    assert registered(sidecar) == [[]]
    client = sidecar.client(every(name="a"))
    client.close()
    world.run_until(1_000)
    assert registrations(sidecar) == [([], [])]
    assert held(world) == {}


def test_s28_a_job_that_is_offered_again_before_it_was_let_go_stays_held() -> None:
    world, sidecar, client = lone(every(name="a"))
    sidecar.client(every(name="b"), name="other")
    client.close()
    sidecar.client(every(name="a"), name="again")
    world.run_until(1_000)
    assert registrations(sidecar)[2:] == [(["b"], []), (["a"], [])]
    assert held(world) == {"a": ("a",), "b": ("a",)}


@pytest.mark.usefixtures("parts_of_two")
def test_s28_a_store_that_lost_an_instance_between_its_parts_has_all_of_them_again() -> None:
    """Also the part that was on its way, which it may have taken in before it lost all."""
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    sidecar.client(*(every(name=name) for name in "abcd"))
    sidecar.answer(Method.REGISTER)
    world.now = 1
    late = sidecar.execute(sidecar.pending(Method.REGISTER))
    world.restore()
    world.database.store_id = "database"
    sidecar.feed(Woken())
    sidecar.answer(Method.BEAT)
    sidecar.reply(sidecar.pending(Method.REGISTER), late)
    world.run_until(5_000)
    assert registered(sidecar)[1:] == [["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"]]
    assert held(world) == dict.fromkeys("abcd", ("a",))


def test_s27a_when_the_store_went_back_it_is_told_anew_what_is_held_and_what_is_not() -> None:
    """And what is known to it is claimed meanwhile."""
    world, sidecar, client = lone(every(name="a"), every(name="b"), lasts_ms=1)
    client.subscribe(specs=(every(name="b"),))
    client.keep_alive()
    sidecar.settle()
    earlier = lone(every(name="a"), every(name="b"))[0]
    assert held(earlier) == {"a": ("a",), "b": ("a",)}
    world.database, world.store = earlier.database, earlier.store
    world.database.store_id = "restored"
    world.run_until(5_000)
    assert sidecar.logged("store_went_back")
    assert registrations(sidecar)[-1] == (["b"], ["a"])
    assert held(world) == {"a": (), "b": ("a",)}
    assert [state.registered for state in sidecar.engine._jobs] == [True]


@pytest.mark.usefixtures("parts_of_two")
def test_s15_leases_of_the_first_part_are_renewed_in_time_though_others_hang() -> None:
    world = World()
    sidecar = Sidecar(world)
    world.run_until(100)  # the first beat is out: the next would come in 5 s
    client = sidecar.client(*(every(1_000, name=name, lease_ms=3_000) for name in "abc"))
    sidecar.answer(Method.REGISTER)
    hanging = sidecar.pending(Method.REGISTER)
    while world.now < 5_900:
        for call in [c for c in sidecar.calls.values() if c is not hanging]:
            sidecar.reply(call, sidecar.execute(call))
        world.now += 50
        client.play()
        sidecar.tick()
    assert sidecar.waits(Method.REGISTER)
    slots = [(each.job, each.slot - START) for each in client.running.values()]
    assert sorted(slots) == [("a", 1_000), ("b", 1_000)]
    assert client.cancelled == []


def test_s28_a_registration_that_fails_is_repeated() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    client = sidecar.client()
    sidecar.fail(Method.REGISTER)
    world.run_until(11_000)
    assert registered(sidecar)[-2:] == [["sync"], ["sync"]]
    assert client.only().slot == START + 10_000


def test_s28_an_answer_for_a_definition_that_was_replaced_meanwhile_counts_no_more() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.settle()
    client = sidecar.client(every(10_000))
    client.specs = (every(20_000),)
    client.subscribe()
    client.keep_alive()
    sidecar.answer(Method.REGISTER)
    assert sidecar.waits(Method.REGISTER), "the newer one follows"
    world.now = 10_000
    sidecar.tick()
    assert not sidecar.waits(Method.CLAIM)
    world.run_until(25_000)
    assert world.slots() == [20_000]


def test_s28_an_instance_the_store_has_forgotten_registers_again() -> None:
    world, sidecar, client = lone(lasts_ms=1)
    world.run_until(15_000)
    world.restore()
    world.run_until(31_000)
    assert registered(sidecar)[-1] == ["sync"]
    assert world.slots() == [20_000, 30_000]
    assert client.assigned[-1].slot == START + 30_000


def test_s28_a_beat_from_before_the_registration_does_not_undo_it() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.tick()
    sidecar.answer(Method.BEAT)
    assert sidecar.waits(Method.REGISTER)
    sidecar.feed(Woken())
    early = sidecar.execute(sidecar.pending(Method.BEAT))
    assert early.answers[0].known is False
    world.now = 1
    sidecar.answer(Method.REGISTER)
    sidecar.reply(sidecar.pending(Method.BEAT), early)
    sidecar.settle()
    assert registered(sidecar) == [[]]


def test_s28_a_schedule_the_store_has_lost_is_registered_again() -> None:
    world, sidecar, _ = lone(every(), every(name="other"))
    world.run_until(4_000)
    beat = sidecar.wait_for(Method.BEAT)
    answer = sidecar.execute(beat)
    (parts,) = answer.answers
    assert isinstance(parts, BeatAnswer)
    sidecar.reply(beat, replace(answer, answers=(replace(parts, settled=(None, START)),)))
    assert registered(sidecar)[-1] == ["sync"]
    assert [state.registered for state in sidecar.engine._jobs] == [False, True]
    sidecar.settle()
    world.run_until(11_000)
    assert world.slots() == [10_000]


def test_s28_what_a_beat_says_of_an_old_schedule_is_not_believed_of_the_new() -> None:
    world, sidecar, client = lone(every(20_000))
    beat = sidecar.wait_for(Method.BEAT)
    answer = sidecar.execute(beat)
    client.specs = (every(10_000),)
    client.subscribe()
    client.keep_alive()
    sidecar.answer(Method.REGISTER)
    (parts,) = answer.answers
    sidecar.reply(beat, replace(answer, answers=(replace(parts, settled=(None,)),)))
    assert not sidecar.waits(Method.REGISTER)
    assert world.slots() == []


def test_s1_nothing_is_registered_while_the_hosts_clock_is_too_wrong() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.host_offset = -30_001
    sidecar.ready_client()
    world.run_until(30_000)
    assert registered(sidecar) == []
    sidecar.host_offset = 0
    world.run_until(45_000)
    assert registered(sidecar)[-1] == ["sync"]


def test_s15_leases_shorter_than_the_default_are_renewed_in_time_from_the_first_on() -> None:
    world = World()
    sidecar = Sidecar(world)
    world.run_until(100)  # the first beat is out: the next would come in 5 s
    client = sidecar.client(every(1_000, lease_ms=3_000))
    world.run_until(5_900)
    assert client.only().slot == START + 1_000
    assert client.cancelled == []
    assert current(world.run(1_000)) == (1, "running", "")


def test_s19_unfinished_runs_are_looked_at_as_soon_as_the_jobs_are_registered() -> None:
    world, sidecar, client = lone()
    world.run_until(10_500)
    client.close(client.only().token)
    sidecar.settle()
    sidecar.die()
    world.run_until(12_000)
    other = Sidecar(world, "b").ready_client()
    world.run_until(12_001)
    assert other.only().attempt == 2


# --- Slots to come -----------------------------------------------------------------------


def test_s5_the_first_slot_is_the_next_one_whenever_the_client_came() -> None:
    world = World()
    sidecar = Sidecar(world)
    world.run_until(13_337)
    sidecar.client(lasts_ms=1)
    world.run_until(45_000)
    assert world.slots() == [20_000, 30_000, 40_000]


def test_s20_a_newcomer_claims_what_is_still_in_time_and_plans_the_rest() -> None:
    world, sidecar, _ = lone(every(start_deadline_ms=5_000))
    sidecar.die()
    world.run_until(33_000)
    other = Sidecar(world, "b").ready_client(every(start_deadline_ms=5_000))
    world.run_until(34_000)
    assert other.only().slot == START + 30_000
    assert [current(world.run(slot)) for slot in (10_000, 20_000)] == [(0, "skipped", "missed")] * 2


def test_s20_a_newcomer_claims_all_that_a_long_deadline_leaves_in_time() -> None:
    job = every(30_000, start_deadline_ms=120_000, overlap=OverlapPolicy.ALLOW)
    world, sidecar, _ = lone(job)
    world.run_until(1_000)
    sidecar.die()
    world.run_until(125_000)
    other = Sidecar(world, "b").ready_client(job)
    slots = sorted(assignment.slot - START for assignment in other.running.values())
    assert slots == [30_000, 60_000, 90_000, 120_000]


def test_s1_after_a_step_of_the_stores_clock_the_coming_slots_are_judged_anew() -> None:
    world, sidecar, _ = lone(every(60_000), lasts_ms=1)
    world.run_until(6_000)
    world.store_step = 20_000  # within max_clock_offset of the host's
    world.run_until(39_900)
    assert world.slots() == []
    world.run_until(41_000)
    assert world.slots() == [60_000]
    assert sidecar.logged("store_clock_step")
    world.store_step = 0
    world.run_until(121_000)
    assert world.slots() == [60_000, 120_000]


def test_s1_a_step_leaves_jobs_alone_that_are_not_registered_yet() -> None:
    world, sidecar, client = lone()
    client.specs = (every(20_000),)
    client.subscribe()
    world.store_step = 10_000
    sidecar.answer(Method.REGISTER)
    client.keep_alive()
    sidecar.settle()
    world.run_until(11_000)
    assert world.slots() == [20_000]


def near_the_horizon(before_ms: int) -> World:
    """A world whose store's time is so long before the end of 2199."""
    world = World()
    world.store_step = HORIZON_MS - before_ms - START
    return world


def test_s7_a_schedule_without_a_slot_left_is_at_rest() -> None:
    world = near_the_horizon(60_000)
    sidecar = Sidecar(world)
    sidecar.host_offset = world.store_step
    sidecar.ready_client(JobSpec("last", CronSchedule("30 59 23 * * *"), jitter_ms=0), lasts_ms=1)
    world.run_until(20_000)
    assert world.slots("last") == []
    world.run_until(59_000)
    assert [slot + START for slot in world.slots("last")] == [HORIZON_MS - 30_000]
    assert len(sidecar.claims) == 1


def test_s7_a_suspension_after_the_last_slot_finds_nothing_to_come() -> None:
    world = near_the_horizon(60_000)
    sidecar = Sidecar(world)
    sidecar.host_offset = world.store_step
    sidecar.ready_client(JobSpec("last", CronSchedule("30 59 23 * * *"), jitter_ms=0), lasts_ms=1)
    world.run_until(40_000)
    assert len(sidecar.claims) == 1
    sidecar.feed(Suspended(100))
    world.run_until(59_000)
    assert len(sidecar.claims) == 1
    assert len(world.slots("last")) == 1


def test_s12_the_jitter_of_a_slot_is_drawn_once_whatever_is_registered_meanwhile() -> None:
    world = World()
    drawn: list[int] = []

    def draw(most: int) -> int:
        if most == 2_000:
            drawn.append(most)
        return 0

    sidecar = Sidecar(world, draw=draw)
    client = sidecar.ready_client(every(60_000, jitter_ms=None))
    assert len(drawn) == 1
    client.specs = (*client.specs, every(name="other"))
    client.subscribe()
    client.keep_alive()
    sidecar.settle()
    assert len(registered(sidecar)) == 3
    assert len(drawn) == 1


# --- Missed slots ------------------------------------------------------------------------


def plans(sidecar: Sidecar) -> list[Plan]:
    return [plan for batch in sidecar.called(Method.SETTLE) for plan in batch]


def newcomer(world: World, *specs: JobSpec) -> Sidecar:
    """Another instance, whose client's jobs are not registered yet."""
    sidecar = Sidecar(world, f"i{len(world.sidecars)}")
    sidecar.tick()
    sidecar.settle()
    sidecar.client(*specs)
    return sidecar


def outage(job: JobSpec, until: int) -> tuple[World, FakeClient]:
    """A job that nobody handled from 1 s until `until`, and then somebody does."""
    world, sidecar, _ = lone(job)
    world.run_until(1_000)
    sidecar.die()
    world.run_until(until)
    return world, Sidecar(world, "b").ready_client(job, lasts_ms=1)


def test_s20_what_was_missed_while_nobody_was_there_is_recorded_and_not_run() -> None:
    world, client = outage(every(start_deadline_ms=5_000), 58_000)
    sidecar = client.sidecar
    world.run_until(58_001)
    assert world.slots() == [10_000, 20_000, 30_000, 40_000, 50_000]
    assert {current(view) for view in world.runs()} == {(0, "skipped", "missed")}
    assert [line.fields["count"] for line in sidecar.logged("slots_missed")] == [5]
    (plan,) = plans(sidecar)
    assert (plan.settled, plan.limit, plan.more) == (START, 100, False)
    assert [missed.slot - START for missed in plan.slots] == world.slots()
    assert {missed.start_deadline_ms for missed in plan.slots} == {5_000}
    assert client.assigned == []


def test_s20_past_the_limit_one_row_counts_the_rest() -> None:
    world, _ = outage(every(1_000, start_deadline_ms=1_000, catch_up_limit=3), 31_500)
    world.run_until(31_600)
    rows = {view.run.slot - START: view.run.slots_covered for view in world.runs()}
    assert rows[30_000] == rows[29_000] == rows[28_000] == 0
    assert rows[27_000] == 26
    assert sorted(slot for slot in rows if slot <= 30_000) == [1_000, *range(27_000, 31_000, 1_000)]


def test_s20_more_than_ten_thousand_missed_slots_are_listed_no_further() -> None:
    listed = CATCH_UP_LIMIT + MISSED_LISTED_MAX
    missed = listed + 50
    world, client = outage(every(100, start_deadline_ms=1_000), missed * 100 + 1_050)
    world.run_for(10)
    (plan, *_) = plans(client.sidecar)
    late = [each for each in plan.slots if each.slot < world.store_at - each.start_deadline_ms]
    assert (len(late), plan.more) == (listed, True)
    assert len(plan.slots) <= listed + PLANNED_ALONG
    covered = [view.run.slots_covered for view in world.runs() if view.run.slots_covered]
    assert covered == [MISSED_LISTED_MAX]
    assert len(plans(client.sidecar)) <= 2, "settled has moved on"


def test_s20_a_step_lists_no_more_than_it_may_afford() -> None:
    jobs = [every(100, f"job-{number}", start_deadline_ms=1_000) for number in range(4)]
    world, sidecar, _ = lone(*jobs)
    world.run_until(1_000)
    sidecar.die()
    world.run_until(700_000)
    other = Sidecar(world, "b").ready_client(*jobs, lasts_ms=1).sidecar
    world.run_for(1_000)
    batches = other.called(Method.SETTLE)
    assert [len(batch) for batch in batches[:2]] == [2, 2]
    assert {plan.job for batch in batches[:2] for plan in batch} == {job.name for job in jobs}


def test_s20_a_long_deadline_is_not_walked_slot_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    job = every(100, start_deadline_ms=600_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.jump(600_000 + 5_000)
    other = newcomer(world, job)
    asked: list[int] = []
    previous_upto = Every.previous_upto

    def counting(schedule: Every, upto_ms: int) -> int:
        asked.append(upto_ms)
        return previous_upto(schedule, upto_ms)

    monkeypatch.setattr(Every, "previous_upto", counting)
    other.wait_for(Method.SETTLE)
    (plan,) = plans(other)
    assert len(plan.slots) == 49 + PLANNED_ALONG
    assert len(asked) < 100


def test_s20_settled_moves_with_the_claims_and_nothing_is_planned_for_days() -> None:
    world, sidecar, _ = lone(every(3_600_000, lease_ms=3_600_000), lasts_ms=1)
    world.run_until(2 * 86_400_000)
    assert len(world.slots()) == 48
    assert plans(sidecar) == []


@pytest.mark.parametrize("period", [1_000, 10_000, 60_000])
def test_s20_after_an_outage_of_the_store_a_job_is_planned_once(period: int) -> None:
    """The slots still in time are claimed before the plan goes: it settles them, too."""
    world, sidecar, _ = lone(every(period), lasts_ms=1)
    world.run_for(3 * period)
    sidecar.away = "the store is away"
    world.run_for(10 * period + 300)
    sidecar.away = None
    world.run_for(3 * period)
    planned = len(plans(sidecar))
    assert planned
    world.run_for(40 * period)
    assert len(plans(sidecar)) == planned
    assert len(world.slots()) == 56


def test_s20_schedules_side_by_side_have_each_their_own_settled() -> None:
    world, first, _ = lone(every(4_000, start_deadline_ms=1_000))
    second = Sidecar(world, "b")
    second.ready_client(every(5_000, start_deadline_ms=1_000))
    for sidecar in (first, second):
        for client in sidecar.clients.values():
            client.keep_alive(draining=True)
    world.run_until(24_500)
    slots = set(world.slots())
    assert {4_000, 8_000, 12_000, 16_000, 20_000} <= slots
    assert {5_000, 10_000, 15_000, 20_000} <= slots
    assert {view.run.reason for view in world.runs()} == {"missed"}


def test_s20_of_two_planners_one_plans_and_the_other_learns_settled() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(58_000)
    one, other = newcomer(world, job), newcomer(world, job)
    for each in (one, other):
        each.wait_for(Method.SETTLE)
    one.answer(Method.SETTLE)
    other.answer(Method.SETTLE)
    assert [len(plans(each)) for each in (one, other)] == [1, 1]
    assert one.logged("slots_missed")
    assert not other.logged("slots_missed")
    assert len(world.slots()) == 5


def test_s20_a_plan_that_fails_is_made_again() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(58_000)
    other = newcomer(world, job)
    other.wait_for(Method.SETTLE)
    other.fail(Method.SETTLE, unknown=True)
    world.run_until(58_500)
    assert len(plans(other)) == 2
    assert len(world.slots()) == 5


def test_s20_plans_go_in_batches() -> None:
    jobs = [every(name=f"job-{n:02}", start_deadline_ms=5_000) for n in range(PLAN_BATCH + 1)]
    world, sidecar, _ = lone(*jobs)
    sidecar.die()
    world.run_until(58_000)
    other = Sidecar(world, "b")
    other.ready_client(*jobs)
    assert [len(batch) for batch in other.called(Method.SETTLE)] == [PLAN_BATCH, 1]


def test_s20_a_job_that_left_before_its_plan_went_is_not_planned() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(58_000)
    other = newcomer(world, job)
    client = other.clients["client"]
    other.wait_for(Method.SETTLE)
    other.fail(Method.SETTLE)
    client.close()
    world.run_until(59_000)
    assert len(plans(other)) == 1
    assert world.slots() == []


def test_s20_a_plan_for_a_schedule_the_store_has_lost_sends_the_job_to_register() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(58_000)
    other = newcomer(world, job)
    other.wait_for(Method.SETTLE)
    other.answer_by_hand(Method.SETTLE, PlanAnswer(False, None))
    assert registered(other)[-1] == ["sync"]
    assert len(registered(other)) == 3


def test_s1_nothing_is_planned_while_the_hosts_clock_is_too_wrong() -> None:
    job = every(start_deadline_ms=5_000)
    world, sidecar, _ = lone(job)
    sidecar.die()
    world.run_until(28_000)
    other = newcomer(world, job)
    other.host_offset = 40_000
    other.settle()
    world.run_until(29_000)
    assert plans(other) == []
    other.host_offset = 0
    world.run_until(39_000)
    assert current(world.run(10_000)) == (0, "skipped", "missed")


def test_s20_an_instance_whose_estimate_is_ahead_plans_nothing_and_does_not_insist() -> None:
    world, sidecar, client = lone(every(start_deadline_ms=3_000))
    client.keep_alive(draining=True)
    world.run_until(13_400)
    world.store_step = -2_000  # less than proves a step
    sidecar.wait_for(Method.SETTLE)
    sidecar.answer(Method.SETTLE)
    assert world.slots() == []
    assert not sidecar.waits(Method.SETTLE)
    world.run_until(21_000)
    assert current(world.run(10_000)) == (0, "skipped", "missed")
    assert len(plans(sidecar)) <= 3


@pytest.mark.parametrize(
    "schedule",
    [EverySchedule(1_000), CronSchedule("* * * * * *", "Europe/Athens")],
    ids=["every", "cron"],
)
def test_s20_clocks_ten_years_ahead_cost_a_one_second_job_one_bounded_listing(
    monkeypatch: pytest.MonkeyPatch, schedule: EverySchedule | CronSchedule
) -> None:
    """The store's and the host's: what each slot in between would cost is a day of computing."""
    world, sidecar, _ = lone(JobSpec("sync", schedule), lasts_ms=1)
    world.run_until(10_500)
    slots = len(world.slots())
    steps: list[int] = []
    for kind in (Every, Cron):
        for name in ("next_after", "previous_upto"):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name), steps))
    sidecar.host_offset = world.store_step = 10 * 365 * DAY
    world.run_for(11_000)
    listed = [len(plan.slots) for plan in plans(sidecar)]
    assert 0 <= listed[0] - CATCH_UP_LIMIT - MISSED_LISTED_MAX < 10, "those that follow"
    assert sum(listed[1:]) < 20, "what fell due while that was planned"
    assert len(steps) < 3 * MISSED_LISTED_MAX
    assert len(world.slots()) - slots < 2 * CATCH_UP_LIMIT
    before = len(steps)
    world.run_for(60_000)
    assert len(plans(sidecar)) == len(listed)
    assert len(steps) - before < 300, "it goes on from slot to slot"


def counted(step: Any, steps: list[int]) -> Any:
    """The step from slot to slot, each of which is noted."""

    def counting(schedule: Every | Cron, at_ms: int) -> int | None:
        steps.append(at_ms)
        found: int | None = step(schedule, at_ms)
        return found

    return counting
