"""Which slots and runs an instance asks for, when, and what it makes of the answers."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from anarchon_server.core.claiming import Sight, Sights
from anarchon_server.core.context import read_token
from anarchon_server.core.limits import CLAIM_BATCH
from anarchon_server.core.messages import Method, Suspended, Woken
from anarchon_server.core.model import (
    CancelReason,
    JobSpec,
    Outcome,
    OverlapPolicy,
    RunState,
    RunView,
)
from anarchon_server.core.store import ClaimAnswer, ClaimOutcome, Completion, RunQuery
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

FAST = every(lease_ms=3_000)


def lone(*specs: JobSpec, **options: object) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    client = sidecar.ready_client(*specs, **options)
    return world, sidecar, client


def due(world: World, sidecar: Sidecar, slot: int = 10_000) -> None:
    """Comes to a slot, and leaves the claim for it without an answer."""
    world.run_until(slot - 1)
    world.now = slot
    sidecar.tick()
    assert sidecar.waits(Method.CLAIM)


def rival(world: World, *specs: JobSpec, label: str = "b", **options: object) -> FakeClient:
    """The client of another instance."""
    return Sidecar(world, label).ready_client(*specs, **options)


# --- First claims ------------------------------------------------------------------------


def test_s10_every_slot_of_a_job_is_claimed_once_and_run() -> None:
    world, sidecar, _ = lone(lasts_ms=100)
    world.run_until(35_000)
    assert world.slots() == [10_000, 20_000, 30_000]
    assert [claim.slot - START for claim in sidecar.claims] == [10_000, 20_000, 30_000]
    assert {view.run.state for view in world.runs()} == {RunState.SUCCESS}


def test_s10_a_claim_says_all_that_the_store_decides_by() -> None:
    world, sidecar, _ = lone(
        every(lease_ms=6_000, max_attempts=5, cancel_grace_ms=70, catch_up_window_ms=9_000)
    )
    due(world, sidecar)
    (claim,) = sidecar.claims
    assert (claim.job, claim.slot, claim.previous_slot) == ("sync", START + 10_000, START)
    assert (claim.instance_id, claim.incarnation) == ("a", "incarnation-a")
    assert (claim.schedule_id, claim.overlap) == ("every 10s", OverlapPolicy.SKIP)
    assert (claim.start_deadline_ms, claim.lease_ms) == (10_000, 6_000)
    assert (claim.max_attempts, claim.cancel_grace_ms, claim.window_ms) == (5, 70, 9_000)
    assert (claim.expected_at, claim.may_run) == (START + 10_000, True)
    assert (claim.seen_attempt, claim.seen_token) == (0, "")
    assert read_token(claim.token) == ("sync", START + 10_000)


def test_s12_a_claim_waits_for_the_jitter_drawn_for_its_slot() -> None:
    world = World()
    drawn = iter([700, 2_000, 0])
    asked: list[int] = []

    def draw(most: int) -> int:
        if most != 2_000:
            return 0
        asked.append(most)
        return next(drawn, 0)

    sidecar = Sidecar(world, draw=draw)
    sidecar.ready_client(every(jitter_ms=None), lasts_ms=1)
    world.run_until(39_000)
    assert [run.run.slot - START for run in world.runs()] == [10_000, 20_000, 30_000]
    claimed = [view.run.current.claimed_at - START for view in world.runs() if view.run.current]
    assert claimed == [10_700, 22_000, 30_000]


def test_s12_of_three_equal_instances_each_wins_a_third_of_a_thousand_runs() -> None:
    world, chance = World(), random.Random(12)
    for label in "abc":
        sidecar = Sidecar(world, label, draw=lambda most: chance.randint(0, most))
        sidecar.ready_client(every(1_000, jitter_ms=None), lasts_ms=1)
    world.run_until(1_000 * 1_000 + 500)
    wins = Counter(holder(view.run) for view in world.runs())
    assert sum(wins.values()) == 1_000
    for label in "abc":
        assert 280 <= wins[label] <= 380, wins


def test_s1_an_instance_whose_clock_is_wrong_still_claims_on_time() -> None:
    world = World()
    sidecar = Sidecar(world)
    sidecar.host_offset = 29_000
    sidecar.ready_client(lasts_ms=1)
    world.run_until(15_000)
    (view,) = world.runs()
    assert view.run.current is not None
    assert view.run.current.claimed_at == START + 10_000


def test_s1_an_instance_whose_clock_is_too_wrong_claims_nothing_and_piles_nothing_up() -> None:
    world, sidecar, _ = lone(every(10_000))
    sidecar.host_offset = 30_001
    world.run_until(60_500)
    assert world.slots() == []
    assert not sidecar.claims
    assert len(sidecar.engine._claiming._wishes) <= 2
    sidecar.host_offset = 0
    world.run_until(70_500)
    assert world.run(60_000).run.state is RunState.RUNNING
    assert [current(world.run(slot)) for slot in (10_000, 50_000)] == [(0, "skipped", "missed")] * 2


def test_s2_a_claim_answered_early_is_made_again_when_the_slot_has_come() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    world.store_step = -3_000  # the store was read while its clock was behind
    sidecar.answer(Method.CLAIM)
    world.store_step = 0
    world.run_until(15_000)
    assert {claim.slot for claim in sidecar.claims} == {START + 10_000}
    assert client.only().slot == START + 10_000


def test_s2_a_slot_blocked_before_its_time_is_asked_for_again_at_its_time() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.EARLY))
    assert not sidecar.waits(Method.CLAIM)
    assert sidecar.engine.wake_at == 10_050
    world.run_until(10_050)
    assert client.only().slot == START + 10_000


def test_s14_slots_due_at_one_moment_go_as_one_batch() -> None:
    jobs = [every(name=f"job-{n}", overlap=OverlapPolicy.ALLOW) for n in range(20)]
    world, sidecar, client = lone(*jobs, max_concurrency=100)
    due(world, sidecar)
    assert len(sidecar.called(Method.CLAIM)) == 1
    assert len(sidecar.claims) == 20
    sidecar.settle()
    assert len(client.running) == 20


def test_s14_what_becomes_due_meanwhile_waits_for_the_call_that_is_out() -> None:
    world, sidecar, client = lone(every(), every(12_000, "other"))
    world.run_until(9_999)
    world.now = 10_000
    sidecar.tick()
    world.now = 12_000
    client.keep_alive()
    assert len(sidecar.called(Method.CLAIM)) == 1
    sidecar.answer(Method.CLAIM)
    first, second = sidecar.called(Method.CLAIM)
    assert [claim.job for claim in first] == ["sync"]
    assert [claim.job for claim in second] == ["other"]
    sidecar.settle()
    assert len(client.running) == 2


def test_s14_a_batch_has_at_most_500_claims_and_the_rest_follows() -> None:
    jobs = [every(name=f"job-{n}") for n in range(CLAIM_BATCH + 1)]
    world, sidecar, client = lone(*jobs, max_concurrency=1_000)
    due(world, sidecar)
    sidecar.settle()
    assert [len(batch) for batch in sidecar.called(Method.CLAIM)] == [500, 1]
    assert len(client.running) == 501


# --- Room --------------------------------------------------------------------------------


def test_s13_nothing_is_claimed_before_the_client_has_said_that_it_lives() -> None:
    world = World()
    sidecar = Sidecar(world)
    client = FakeClient(sidecar, "client", (every(),))
    sidecar.tick()
    client.subscribe()
    sidecar.settle()
    due(world, sidecar)
    assert [claim.may_run for claim in sidecar.claims] == [False]
    sidecar.settle()
    client.keep_alive()
    sidecar.settle()
    assert [claim.may_run for claim in sidecar.claims] == [False, True]
    assert client.only().slot == START + 10_000


def test_s13_a_full_instance_settles_without_room_and_claims_as_soon_as_it_has_some() -> None:
    world, sidecar, client = lone(
        every(overlap=OverlapPolicy.ALLOW, start_deadline_ms=9_000), max_concurrency=1
    )
    world.run_until(21_000)
    assert world.slots() == [10_000]
    assert [claim.may_run for claim in sidecar.claims] == [True, False]
    client.complete()
    sidecar.settle()
    assert client.only().slot == START + 20_000
    assert [claim.may_run for claim in sidecar.claims] == [True, False, True]


def test_s13_what_waits_for_room_draws_no_token_meanwhile() -> None:
    world, sidecar, _ = lone(
        every(overlap=OverlapPolicy.ALLOW, start_deadline_ms=9_000), max_concurrency=1
    )
    world.run_until(21_000)
    drawn = sidecar._nonces
    for _ in range(5):
        sidecar.tick()
    assert sidecar._nonces == drawn


def test_s13_a_full_instance_leaves_its_slots_to_others() -> None:
    world, _, client = lone(every(overlap=OverlapPolicy.ALLOW), max_concurrency=1)
    other = rival(world, every(overlap=OverlapPolicy.ALLOW))
    world.run_until(25_000)
    assert client.only().slot == START + 10_000
    assert other.only().slot == START + 20_000


def test_s13_a_full_instance_still_records_what_another_run_blocks() -> None:
    world, _, _ = lone(max_concurrency=1)
    world.run_until(25_000)
    skipped = world.run(20_000).run
    assert (skipped.state, skipped.reason) == ("skipped", "overlap")
    assert skipped.blocking_slot == START + 10_000


def test_s13_a_slot_nobody_had_room_for_is_given_up_at_its_deadline() -> None:
    job = every(overlap=OverlapPolicy.ALLOW, start_deadline_ms=3_000)
    world, sidecar, client = lone(job, max_concurrency=1)
    world.run_until(23_001)
    client.complete()
    sidecar.settle()
    assert client.running == {}
    world.run_until(29_000)
    assert current(world.run(20_000)) == (0, "skipped", "missed")


def test_s13_where_room_is_short_the_oldest_slot_goes_first() -> None:
    periods = (("c", 20_000), ("a", 6_000), ("b", 8_000))
    policies = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": 60_000}
    jobs = [every(period, name, **policies) for name, period in periods]
    world, sidecar, client = lone(*jobs, max_concurrency=1)
    world.run_until(20_500)
    order = []
    for _ in range(6):
        order.append((client.only().slot - START, client.only().job))
        client.complete()
        sidecar.settle()
    assert [slot for slot, _ in order] == [6_000, 8_000, 12_000, 16_000, 18_000, 20_000]
    assert [job for _, job in order] == list("ababac")


def test_s13_an_old_takeover_goes_before_a_fresh_slot() -> None:
    job = every(lease_ms=3_000, overlap=OverlapPolicy.ALLOW, start_deadline_ms=30_000)
    world, sidecar, client = lone(job, max_concurrency=1)
    other = rival(world, job)
    other.sidecar.die()
    world.run_until(10_500)
    assert client.only().slot == START + 10_000
    # Another instance dies with slot 20: its lease is over when a place becomes free at 31.
    late = rival(world, job, label="c")
    world.run_until(20_500)
    assert late.only().slot == START + 20_000
    late.sidecar.die()
    world.run_until(31_000)
    client.complete()
    sidecar.settle()
    assert (client.only().slot - START, client.only().attempt) == (20_000, 2)
    client.complete()
    sidecar.settle()
    assert (client.only().slot - START, client.only().attempt) == (30_000, 1)


def test_s13_an_old_takeover_goes_before_a_fresh_slot_that_was_wished_for_earlier() -> None:
    job = every(lease_ms=3_000, overlap=OverlapPolicy.ALLOW, start_deadline_ms=30_000)
    world, _, first = lone(job)
    second = rival(world, job, max_concurrency=1)
    world.run_until(15_000)
    first.keep_alive(draining=True)
    world.run_until(30_500)
    assert (first.only().slot, second.only().slot) == (START + 10_000, START + 20_000)
    first.sidecar.die()  # slot 30 waits for room at the second
    world.run_until(39_000)
    second.complete()
    second.sidecar.settle()
    assert (second.only().slot - START, second.only().attempt) == (10_000, 2)


def test_s13_a_jobs_concurrency_on_one_instance_holds_over_its_clients() -> None:
    job = every(overlap=OverlapPolicy.ALLOW, concurrency=1, start_deadline_ms=60_000)
    world, sidecar, client = lone(job)
    second = sidecar.client(job, name="second")
    world.run_until(25_000)
    assert len(client.running) + len(second.running) == 1
    client.complete()
    second.complete()
    sidecar.settle()
    assert len(client.running) + len(second.running) == 1


# --- Answers -----------------------------------------------------------------------------


def test_s11_a_claim_of_unknown_outcome_is_asked_again_with_its_token() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))  # done, but the reply is lost
    sidecar.fail(Method.CLAIM, unknown=True)
    assert sidecar.logged("claim_unknown")[0].fields == {"count": 1}
    world.run_until(11_000)
    first, again = sidecar.claims
    assert first.token == again.token == client.only().token
    assert current(world.run(10_000)) == (1, "claimed", "")


def test_s11_a_claim_that_surely_failed_is_made_anew() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.fail(Method.CLAIM)
    assert not sidecar.logged("claim_unknown")
    world.run_until(11_000)
    first, again = sidecar.claims
    assert first.token != again.token == client.only().token


def test_s11_what_was_unknown_once_stays_so_until_the_store_has_answered() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.fail(Method.CLAIM, unknown=True)
    world.now += 100
    sidecar.tick()
    sidecar.fail(Method.CLAIM)
    world.run_until(11_000)
    assert len({claim.token for claim in sidecar.claims}) == 1
    assert len(client.running) == 1


def test_s11_an_unknown_claim_is_asked_again_also_after_its_slot_is_missed() -> None:
    world, sidecar, client = lone(every(60_000, start_deadline_ms=1_000))
    due(world, sidecar, 60_000)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    client.silent = True
    world.jump(5_000)
    client.keep_alive()
    world.run_for(100)
    assert (client.only().slot, client.only().attempt) == (START + 60_000, 1)
    assert sidecar.called(Method.RELEASE) == []


def test_s11_an_answer_may_say_that_one_outcome_of_a_batch_is_unknown() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNKNOWN))
    world.run_until(10_049)
    assert len(sidecar.claims) == 1
    world.run_until(10_050)
    first, again = sidecar.claims
    assert first.token == again.token
    assert len(client.running) == 1


def test_s11_an_unknown_claim_that_turns_out_won_without_room_is_given_back() -> None:
    world, sidecar, client = lone(every(overlap=OverlapPolicy.ALLOW), max_concurrency=1)
    world.run_until(10_500)
    client.complete()
    sidecar.settle()
    due(world, sidecar, 20_000)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    client.max_concurrency = 0
    client.sidecar.clients["client"].max_concurrency = 1
    client.keep_alive(draining=True)  # no more room when it is asked again
    world.run_until(21_000)
    assert sidecar.claims[-1].may_run is False
    assert client.running == {}
    assert current(world.run(20_000)) == (1, "interrupted", "not_accepted")


def test_s11_an_unknown_claim_is_released_when_the_instance_stops() -> None:
    world, sidecar, _ = lone()
    due(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    sidecar.stop()
    sidecar.settle()
    assert sidecar.stopped
    assert current(world.run(10_000)) == (1, "interrupted", "not_accepted")


def test_s11_an_unknown_claim_is_released_when_nobody_has_the_job_any_more() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    client.close()
    world.run_until(11_000)
    assert current(world.run(10_000)) == (1, "interrupted", "not_accepted")


def test_s13_a_claim_that_cannot_be_sent_is_forgotten_with_its_job() -> None:
    world, sidecar, client = lone(max_concurrency=1)
    other = rival(world, every(name="other"))
    client.keep_alive(draining=True)
    world.run_until(10_500)
    assert world.slots() == []
    client.close()
    sidecar.client(every(name="other"), name="second")
    world.run_until(11_000)
    assert [claim.may_run for claim in sidecar.claims if claim.job == "sync"] == [False]
    assert other.only().job == "other"


def test_s18_a_slot_that_is_skipped_is_logged_with_what_was_in_its_way() -> None:
    world, sidecar, _ = lone()
    world.run_until(25_000)
    (line,) = sidecar.logged("slot_skipped")
    assert line.fields == {
        "job": "sync",
        "slot": START + 20_000,
        "blocking_slot": START + 10_000,
    }


def test_s28_a_job_the_store_does_not_know_any_more_is_registered_again() -> None:
    world, sidecar, client = lone(lasts_ms=1)
    due(world, sidecar)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNREGISTERED))
    world.run_until(10_500)
    idle, first, again = sidecar.called(Method.REGISTER)
    assert idle.incarnation == first.incarnation == again.incarnation
    assert world.slots() == [10_000], "and its slot, which is still in time, is claimed"
    assert client.assigned[0].slot == START + 10_000


def test_s28_that_the_store_does_not_know_a_job_that_is_gone_here_too_matters_to_nobody() -> None:
    world, sidecar, client = lone(lasts_ms=1)
    due(world, sidecar)
    client.close()
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNREGISTERED))
    world.run_until(60_000)
    assert len(sidecar.called(Method.REGISTER)) == 3, "nothing, the job, and that it was let go"


# --- Takeover ----------------------------------------------------------------------------


def test_s19_a_dead_instances_run_is_taken_over_within_a_second_of_its_leases_end() -> None:
    world, sidecar, client = lone(FAST)
    world.run_until(10_500)
    others = [rival(world, FAST, label=label) for label in "bc"]
    world.run_until(11_000)
    sidecar.die()
    lease = world.run(10_000).run.lease
    assert lease is not None
    world.run_until(lease.end_at - START - 1)
    assert all(other.running == {} for other in others)
    world.run_for(1_000)
    (taken,) = [a for other in others for a in other.running.values()]
    assert (taken.slot, taken.attempt, taken.cause) == (START + 10_000, 2, "takeover")
    assert client.assigned[0].fence < taken.fence
    view = ran(world.store.runs(RunQuery(slot=START + 10_000))).answers[0]
    assert [a.state for a in view.attempts] == ["interrupted", "running"]


def test_s19_a_claim_finds_what_is_watched_of_its_own_job_without_a_look_at_the_others() -> None:
    sights, sight, other = Sights(), Sight(1, 2), Sight(3, 4)
    sights["sync", 10] = sights["sync", 20] = sight
    sights["other", 10] = other
    assert len(sights) == 3
    assert sights.of("sync") == {10: sight, 20: sight}
    assert list(sights.keys_of({"other", "third"})) == [("other", 10)]
    assert (sights["other", 10], sights.get(("other", 20))) == (other, None)
    for key in (("other", 10), ("other", 10), ("sync", 10)):
        sights.discard(key)
    assert (sights.of("other"), sights.of("sync")) == ({}, {20: sight})
    assert len(sights) == 1


def test_s19_a_run_is_watched_by_who_lost_the_claim_and_by_who_only_saw_it() -> None:
    world, sidecar, _ = lone(FAST)
    world.run_until(10_500)
    newcomer = rival(world, FAST)
    seen = newcomer.sidecar.beats
    assert any(beat.sweep for beat in seen)
    sidecar.die()
    world.run_until(15_000)
    assert newcomer.only().attempt == 2


def test_s19_the_look_at_the_end_of_a_lease_finds_a_living_runner() -> None:
    world, _, client = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    other.sidecar.away = "refused"  # it sees no renewal until the lease it knows of is over
    world.run_until(14_500)
    other.sidecar.away = None
    world.run_until(19_000)
    assert any(beat.looks for beat in other.sidecar.beats)
    assert other.running == {}
    assert all(not claim.seen_attempt for claim in other.sidecar.claims)
    assert client.only().attempt == 1


def test_s19_a_backup_that_never_heard_of_a_runs_end_finds_it_gone() -> None:
    world, _, client = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    client.complete()
    world.run_until(19_000)
    assert current(world.run(10_000)) == (1, "success", "")
    assert other.running == {}


def test_s19_a_look_at_a_run_that_was_pruned_ends_the_watch() -> None:
    world, sidecar, client = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    world.run_until(12_000)
    world.restore()
    world.run_until(30_000)
    assert all(not beat.looks for beat in other.sidecar.beats[-3:])
    assert client.only().attempt == 1


def test_s19_without_a_steady_clock_a_takeover_waits_for_the_second_witness() -> None:
    world = World(boot_leases=False)
    sidecar = Sidecar(world)
    client = sidecar.ready_client(FAST)
    world.run_until(10_500)
    sidecar.die()
    world.run_until(12_900)
    other = rival(world, FAST)
    world.run_until(15_899)
    assert other.running == {}, "it has watched the store's clock for less than a lease"
    assert not [claim for claim in other.sidecar.claims if claim.seen_attempt]
    assert world.run(10_000).takeable
    world.run_until(16_500)
    assert other.only().attempt == 2
    assert client.only().attempt == 1


def test_s19_a_store_whose_clock_steps_refuses_takeovers_until_it_was_watched_again() -> None:
    world = World(boot_leases=False)
    sidecar = Sidecar(world)
    sidecar.ready_client(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    world.run_until(12_000)
    backup = other.sidecar
    claim = backup.wait_for(Method.CLAIM).arguments[0][0]
    assert (claim.seen_attempt, claim.vouched) == (1, True)
    world.store_step = 600  # more than the margin, between the look and the claim
    backup.answer(Method.CLAIM)
    assert backup.logged("store_clock_step")
    stepped_at = world.now
    world.run_until(stepped_at + 2_999)
    assert other.running == {}
    world.run_until(stepped_at + 4_000)
    assert other.only().attempt == 2


def test_s19_a_lease_that_shows_as_over_at_first_sight_must_stay_so_for_its_length() -> None:
    world = World(boot_leases=False)
    sidecar = Sidecar(world)
    client = sidecar.ready_client(FAST)
    other = rival(world, every(name="other", lease_ms=3_000))
    world.run_until(10_500)
    beat = sidecar.wait_for(Method.BEAT)
    assert beat.arguments[0].renewals
    world.store_step = 3_600_000  # for one heartbeat, whose answer nobody hears
    sidecar.execute(beat)
    world.store_step = 0
    sidecar.fail(Method.BEAT, unknown=True)
    assert world.run(10_000).takeable
    other.subscribe(specs=(*other.specs, FAST))
    other.keep_alive()
    world.run_until(15_000)
    assert client.cancelled == []
    assert current(world.run(10_000)) == (1, "running", "")
    assert all(not claim.seen_attempt for claim in other.sidecar.claims)


def test_s19_what_is_left_of_a_freed_runs_lease_raises_no_doubt_of_the_clock() -> None:
    """A slot that finds it needs both witnesses for the other runs of its job (S18)."""
    job = every(lease_ms=9_000)
    world = World(boot_leases=False)
    first = Sidecar(world).ready_client(job)
    second = rival(world, job, every(5_000, "busy", jitter_ms=0), max_concurrency=1)
    world.run_until(18_500)
    (token,) = first.running
    first.close(token)
    world.run_until(20_500)
    assert world.run(10_000).run.freed
    claims = second.sidecar.claims
    (claim,) = [each for each in claims if (each.job, each.slot) == ("sync", START + 20_000)]
    assert claim.vouched


def test_s18_a_slot_does_not_pass_by_a_run_whose_lease_shows_as_over_at_first_sight() -> None:
    """Its runner lives, and would have a second one beside it (I4)."""
    job = every(lease_ms=3_000, max_attempts=1)
    world = World(boot_leases=False)
    sidecar = Sidecar(world)
    client = sidecar.ready_client(job)
    world.run_until(10_500)
    other = rival(world, job)
    world.run_until(19_400)
    beat = sidecar.wait_for(Method.BEAT)
    world.store_step = 3_600_000  # for one heartbeat, whose answer nobody hears
    sidecar.execute(beat)
    world.store_step = 0
    sidecar.fail(Method.BEAT, unknown=True)
    sidecar.away = "refused"
    world.run_until(20_100)
    assert world.run(10_000).takeable
    (claim,) = [claim for claim in other.sidecar.claims if claim.slot == START + 20_000]
    assert not claim.vouched
    assert current(world.run(20_000)) == (0, "skipped", "overlap")
    assert client.only().slot == START + 10_000
    assert client.cancelled == []


def test_s19_an_exhausted_run_is_ended_by_an_instance_without_room() -> None:
    job = every(60_000, lease_ms=3_000, max_attempts=1)
    world, sidecar, _ = lone(job)
    world.run_until(60_500)
    other = rival(world, job)
    other.keep_alive(draining=True)
    sidecar.die()
    world.run_until(66_000)
    assert current(world.run(60_000)) == (1, "failed", "attempts_exhausted")
    assert other.running == {}


def test_s19_a_run_of_a_thousand_attempts_is_ended_without_room() -> None:
    world, sidecar, client = lone(FAST)
    world.run_until(10_500)
    view = world.run(10_000)
    assert view.run.current is not None
    many = replace(
        view.run,
        current=replace(view.run.current, attempt=1_000, token="strange"),
        freed="not_accepted",
        state=RunState.INTERRUPTED,
    )
    client.keep_alive(draining=True)
    sidecar.engine._claiming.observe(RunView(many))
    sidecar.tick()
    claim = sidecar.pending(Method.CLAIM).arguments[0][0]
    assert (claim.seen_attempt, claim.may_run) == (1_000, False)
    sidecar.answer_by_hand(Method.CLAIM, ClaimAnswer(ClaimOutcome.UNCHANGED))
    assert not sidecar.waits(Method.CLAIM), "an answer ends the wish; the sweep looks again"


def test_s19_a_takeover_without_room_waits_for_some() -> None:
    world, sidecar, _ = lone(FAST)
    world.run_until(10_500)
    job = every(lease_ms=3_000, name="busy")
    other = rival(world, FAST, job, max_concurrency=1)
    world.run_until(11_000)
    sidecar.die()
    world.run_until(20_500)
    assert other.only().job == "sync"
    assert other.only().attempt == 2


def test_s19_a_lost_takeover_is_not_repeated_at_once() -> None:
    world, sidecar, _ = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    world.run_until(12_500)
    other.sidecar.wait_for(Method.CLAIM)
    lost_at = world.now
    still_over = ClaimAnswer(ClaimOutcome.LOST, world.run(10_000))
    other.sidecar.answer_by_hand(Method.CLAIM, still_over)
    world.run_until(lost_at + 249)
    assert other.running == {}
    world.run_until(lost_at + 250)
    assert other.only().attempt == 2


def test_s11_a_takeover_of_unknown_outcome_is_asked_again_whatever_a_look_shows() -> None:
    world, sidecar, _ = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    world.run_until(12_500)
    before = world.run(10_000)
    other.sidecar.wait_for(Method.CLAIM)
    other.sidecar.fail(Method.CLAIM, unknown=True)
    first = other.sidecar.claims[-1]
    other.sidecar.feed(Woken())
    other.sidecar.answer(Method.BEAT)
    assert not before.takeable
    again = other.sidecar.wait_for(Method.CLAIM).arguments[0][0]
    assert replace(again, expected_at=first.expected_at) == first
    other.sidecar.settle()
    assert other.only().attempt == 2


def test_s17_a_takeover_that_waits_for_room_is_dropped_when_a_late_result_ends_the_run() -> None:
    world, sidecar, client = lone(FAST)
    world.run_until(10_500)
    other = rival(world, FAST, every(name="busy", lease_ms=3_000))
    token = client.only().token
    other.keep_alive(draining=True)
    sidecar.die()
    world.run_until(15_000)
    result = Completion("sync", START + 10_000, token, Outcome("late"))
    ran(world.store.complete([result]))
    world.run_until(16_000)
    other.subscribe()
    other.keep_alive()
    world.run_until(17_000)
    assert not [claim for claim in other.sidecar.claims if claim.seen_attempt]
    assert current(world.run(10_000)) == (1, "success", "")


def test_s19_a_handed_over_run_is_taken_over_as_soon_as_it_is_seen() -> None:
    world, sidecar, client = lone()
    world.run_until(10_500)
    other = rival(world)
    client.close(client.only().token)
    sidecar.settle()
    other.sidecar.tick()
    world.run_until(15_600)
    assert (other.only().attempt, other.only().cause) == (2, "takeover")


def test_s27a_after_the_store_went_back_expired_runs_wait_and_freed_ones_do_not() -> None:
    world, sidecar, client = lone(FAST, every(name="freed", lease_ms=3_000))
    world.run_until(10_500)
    other = rival(world, FAST, every(name="freed", lease_ms=3_000))
    world.run_until(11_000)
    token = next(a.token for a in client.running.values() if a.job == "freed")
    sidecar.world.database.store_id = "another"
    client.complete(token, stopped=CancelReason.SHUTDOWN)
    sidecar.answer(Method.COMPLETE)
    sidecar.die()
    world.run_until(12_500)
    assert other.sidecar.logged("store_went_back")
    assert [a.job for a in other.running.values()] == ["freed"]
    quarantined_until = other.sidecar.engine._context.quarantined_until
    world.run_until(quarantined_until - 1)
    assert len(other.running) == 1
    world.run_until(20_000)
    assert {a.job for a in other.running.values()} == {"freed", "sync"}


def test_s27a_a_takeover_that_waited_for_room_waits_for_the_quarantine_too() -> None:
    world, sidecar, _ = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    other.keep_alive(draining=True)
    world.run_until(15_000)
    other.subscribe(specs=(FAST, every(name="more", lease_ms=3_000)))
    world.database.store_id = "another"
    other.sidecar.answer(Method.REGISTER)
    assert other.sidecar.logged("store_went_back")
    other.keep_alive()
    assert not other.sidecar.waits(Method.CLAIM)
    world.run_until(17_900)
    assert other.running == {}
    world.run_until(19_000)
    assert other.only().attempt == 2


def test_s4_claims_that_were_queued_before_a_suspension_are_thrown_away() -> None:
    world, sidecar, client = lone(
        every(overlap=OverlapPolicy.ALLOW, start_deadline_ms=3_000), max_concurrency=1
    )
    world.run_until(20_500)  # slot 20 waits for room
    assert client.only().slot == START + 10_000
    world.jump(5_000)
    sidecar.feed(Suspended(5_000))
    sidecar.settle()
    client.complete()
    sidecar.settle()
    assert client.running == {}
    world.run_until(31_000)
    assert current(world.run(20_000)) == (0, "skipped", "missed")
    assert client.only().slot == START + 30_000


def test_s4_a_slot_that_waited_for_room_and_is_still_in_time_is_claimed_after_a_suspension() -> (
    None
):
    world, sidecar, client = lone(
        every(overlap=OverlapPolicy.ALLOW, start_deadline_ms=8_000), max_concurrency=1
    )
    world.run_until(20_500)
    assert client.only().slot == START + 10_000
    world.jump(2_000)
    sidecar.feed(Suspended(2_000))
    client.complete()
    world.run_for(100)
    assert client.only().slot == START + 20_000


def test_s4_a_takeover_that_was_queued_waits_for_a_new_look_after_a_suspension() -> None:
    world, sidecar, _ = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    other.keep_alive(draining=True)
    world.run_until(15_000)
    other.sidecar.feed(Suspended(100))
    other.subscribe()
    other.keep_alive()
    assert not other.sidecar.waits(Method.CLAIM)
    other.sidecar.settle()
    assert other.only().attempt == 2


def test_s4_a_claim_that_was_out_when_the_process_stopped_keeps_its_answer() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    world.jump(3_000)
    sidecar.feed(Suspended(3_000))
    sidecar.settle()
    assert len({claim.token for claim in sidecar.claims if claim.slot == START + 10_000}) == 1
    assert client.only().attempt == 1


def test_s4_a_claim_that_may_be_won_is_asked_for_again_after_a_suspension() -> None:
    world, sidecar, client = lone()
    due(world, sidecar)
    client.keep_alive()
    sidecar.execute(sidecar.pending(Method.CLAIM))
    sidecar.fail(Method.CLAIM, unknown=True)
    world.jump(2_000)
    sidecar.feed(Suspended(2_000))
    world.run_for(500)
    assert len({claim.token for claim in sidecar.claims}) == 1
    assert client.only().attempt == 1


def test_s4_a_slot_that_passed_in_a_short_suspension_is_still_claimed() -> None:
    world, sidecar, client = lone()
    world.run_until(9_000)
    world.jump(3_000)
    sidecar.feed(Suspended(3_000))
    client.keep_alive()
    world.run_for(10)
    assert client.only().slot == START + 10_000


def test_s1_a_slot_that_a_step_back_put_ahead_again_is_not_waited_for_a_second_time() -> None:
    """Its run was begun when it had come, and is taken over at once."""
    world, sidecar, _ = lone(FAST)
    other = rival(world, FAST)
    world.run_until(10_500)
    sidecar.die()
    world.store_step = other.sidecar.host_offset = -20_000
    world.run_until(20_000)
    assert world.store_at < START + 10_000
    assert (other.only().slot, other.only().attempt) == (START + 10_000, 2)


def test_s20_a_slot_whose_timer_comes_too_late_is_left_to_the_plan() -> None:
    world, sidecar, client = lone(every(start_deadline_ms=2_000))
    world.run_until(9_000)
    world.jump(4_000)  # nobody says that time was lost
    sidecar.tick()
    sidecar.settle()
    assert all(claim.slot != START + 10_000 for claim in sidecar.claims)
    client.keep_alive()
    world.run_until(21_000)
    assert current(world.run(10_000)) == (0, "skipped", "missed")
    assert client.only().slot == START + 20_000


def test_s1_a_timer_that_fires_before_the_slot_by_the_stores_clock_waits_on() -> None:
    world, _, client = lone(every(60_000))
    world.store_step = -200  # less than a step: the estimate follows it within 8 answers
    world.run_until(60_100)
    assert world.slots() == []
    world.run_until(60_200)
    assert client.only().slot == START + 60_000
    claimed = world.run(60_000).run.current
    assert claimed is not None
    assert claimed.claimed_at == START + 60_000
