"""The heartbeat: when it goes, what it carries, what its answers mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anarchon_server.core import limits
from anarchon_server.core.errors import StoreUnavailable
from anarchon_server.core.messages import Method, ReceiptStatus, Woken
from anarchon_server.core.model import CancelReason, JobSpec, RunView
from anarchon_server.core.store import (
    BeatAnswer,
    TokenAnswer,
    TokenOutcome,
)
from tests.unit.server.core.driver import START, FakeClient, Sidecar, World, current, every

LONG = every(60_000)


def lone(*specs: JobSpec, **options: Any) -> tuple[World, Sidecar, FakeClient]:
    """One instance with one client, its jobs registered."""
    world = World()
    sidecar = Sidecar(world)
    return world, sidecar, sidecar.ready_client(*specs, **options)


def sweeps(sidecar: Sidecar, until: int) -> list[int]:
    """When heartbeats that look at all unfinished runs went, from now until then."""
    world, times, seen = sidecar.world, [], len(sidecar.beats)
    while world.now < until:
        sidecar.wait_for(Method.BEAT, until)
        times += [world.now for beat in sidecar.beats[seen:] if beat.sweep]
        seen = len(sidecar.beats)
        sidecar.answer(Method.BEAT)
    return times


def test_s15_a_heartbeat_comes_as_often_as_the_job_wants_it_most() -> None:
    _, sidecar, _ = lone(LONG, every(60_000, "brisk", lease_ms=30_000, heartbeat_ms=1_000))
    gaps = {later - earlier for earlier, later in pairwise(sweeps(sidecar, 14_000))}
    assert gaps == {900}, "a tenth early, by the least that chance gives"


@pytest.mark.parametrize(
    ("lease_ms", "timeout_ms"), [(3_000, 1_000), (9_000, 1_500), (30_000, 2_000)]
)
def test_s16_a_heartbeat_that_hangs_leaves_time_for_another(lease_ms: int, timeout_ms: int) -> None:
    _, sidecar, _ = lone(every(60_000, lease_ms=lease_ms))
    assert sidecar.wait_for(Method.BEAT).timeout_ms == timeout_ms


def test_s15_heartbeats_are_spread_by_a_tenth_either_way() -> None:
    world = World()
    late = Sidecar(world, draw=lambda most: most)
    late.ready_client(LONG)
    gaps = {later - earlier for earlier, later in pairwise(sweeps(late, 14_000))}
    assert gaps == {5_500}


def test_s19_every_heartbeat_looks_at_all_unfinished_runs_of_its_registered_jobs() -> None:
    world, sidecar, _ = lone(LONG, every(60_000, "other"))
    world.run_until(12_000)
    beat = sidecar.beats[-1]
    assert beat.sweep == (("sync", "every 1m"), ("other", "every 1m"))
    assert beat.sweep_limit == limits.LOOKS_MAX
    assert beat.instance.instance_id == "a"
    assert beat.leaving is False


def test_s14_renewals_looks_and_the_sweep_travel_together() -> None:
    world, sidecar, _ = lone(LONG, every(60_000, "other"))
    world.run_until(60_000)
    before = len(sidecar.beats)
    world.run_until(66_000)
    (beat,) = sidecar.beats[before + 0 : before + 1]
    assert len(beat.renewals) == 2
    assert beat.sweep


def test_s19_a_notification_of_the_store_is_followed_by_a_look_at_once() -> None:
    world, _, client = lone(LONG)
    other = Sidecar(world, "b")
    other_client = other.ready_client(LONG)
    world.run_until(60_000)
    holder, backup = (client, other) if client.running else (other_client, client.sidecar)
    holder.close(holder.only().token)
    holder.sidecar.settle()
    freed_at = world.now
    backup.feed(Woken())
    backup.settle()
    assert world.now == freed_at
    assert current(world.run(60_000)) == (2, "claimed", "")


def test_s14_while_a_beat_is_out_the_next_waits() -> None:
    _, sidecar, _ = lone(LONG)
    sidecar.wait_for(Method.BEAT)
    count = len(sidecar.beats)
    sidecar.feed(Woken())
    assert len(sidecar.beats) == count
    sidecar.answer(Method.BEAT)
    assert len(sidecar.beats) == count + 1


def test_s27_a_sweep_that_failed_is_made_again() -> None:
    world, sidecar, _ = lone(LONG)
    sidecar.wait_for(Method.BEAT)
    sidecar.fail(Method.BEAT, unknown=True)
    failed_at = world.now
    beat = sidecar.wait_for(Method.BEAT).arguments[0]
    assert beat.sweep
    assert world.now <= failed_at + 50


def test_s19_a_sweep_that_could_not_show_all_forgets_nothing() -> None:
    world, sidecar, _ = lone(LONG)
    other = Sidecar(world, "b")
    other.ready_client(LONG)
    world.run_until(60_500)
    backup = other if sidecar.engine.status(world.now).instance.running else sidecar
    view = world.run(60_000)
    full = tuple(
        replace(view, run=replace(view.run, slot=START + 120_000 + n))
        for n in range(limits.LOOKS_MAX)
    )
    assert watched_after(backup, full) >= 1 + limits.LOOKS_MAX
    assert watched_after(backup, full[:5]) == 5


def watched_after(sidecar: Sidecar, unfinished: tuple[RunView, ...]) -> int:
    """How many runs a sidecar watches after a sweep that showed these."""
    beat = sidecar.wait_for(Method.BEAT)
    answer = sidecar.execute(beat)
    (parts,) = answer.answers
    assert isinstance(parts, BeatAnswer)
    sidecar.reply(beat, replace(answer, answers=(replace(parts, unfinished=unfinished),)))
    return len(sidecar.engine._claiming._watched)


def test_s19_a_look_at_many_runs_is_taken_in_batches() -> None:
    world, sidecar, _ = lone(LONG)
    for n in range(limits.LOOKS_MAX + 1):
        sidecar.engine._claiming.look_due(("sync", START + n))
    sidecar.tick()
    sidecar.settle()
    looks = [len(beat.looks) for beat in sidecar.beats if beat.looks]
    assert looks == [limits.LOOKS_MAX, 1]
    assert world.slots() == []


def test_s19_a_look_whose_heartbeat_failed_is_taken_again_at_once() -> None:
    world, sidecar, _ = lone(LONG)
    world.run_until(1_000)
    sidecar.engine._claiming.look_due(("sync", START))
    sidecar.tick()
    assert sidecar.beats[-1].sweep == ()
    sidecar.fail(Method.BEAT)
    sidecar.wait_for(Method.BEAT)
    assert world.now <= 1_050
    assert sidecar.beats[-1].looks == (("sync", START),)


def test_s32_two_live_instances_of_one_label_are_told_apart_and_reported_once() -> None:
    world, sidecar, _ = lone(LONG)
    twin = Sidecar(world, "a", draw=lambda most: 0)
    twin.engine._context.settings = replace(twin.engine._context.settings, incarnation="another")
    twin.ready_client(LONG)
    world.run_until(30_000)
    (line,) = sidecar.logged("instance_id_not_unique")
    assert line.fields == {"instance_id": "a", "incarnations": ("another",)}
    assert len(twin.logged("instance_id_not_unique")) == 1


def test_s32_a_twin_that_comes_back_is_reported_again() -> None:
    world, sidecar, _ = lone(LONG)
    for incarnation in ("second", "third"):
        twin = Sidecar(world, "a")
        twin.engine._context.settings = replace(
            twin.engine._context.settings, incarnation=incarnation
        )
        twin.ready_client(LONG)
        world.run_for(10_000)
        twin.die()
        world.run_for(45_000)
    lines = sidecar.logged("instance_id_not_unique")
    assert [line.fields["incarnations"] for line in lines] == [("second",), ("third",)]


# --- A part of the store is away (S11) ---------------------------------------------------

UNKNOWN = TokenAnswer(TokenOutcome.UNKNOWN)


def unheard(sidecar: Sidecar, *jobs: str) -> None:
    """The waiting heartbeat is answered, but for what these jobs are."""
    call = sidecar.pending(Method.BEAT)
    (beat,) = call.arguments
    said = sidecar.execute(call)
    (answer,) = said.answers
    partly = replace(
        answer,
        renewals=tuple(
            UNKNOWN if renewal.job in jobs else told
            for renewal, told in zip(beat.renewals, answer.renewals, strict=True)
        ),
        looks=tuple(
            None if job in jobs else view
            for (job, _), view in zip(beat.looks, answer.looks, strict=True)
        ),
        settled=tuple(
            None if job in jobs else told
            for (job, _), told in zip(beat.sweep, answer.settled, strict=True)
        ),
        unfinished=tuple(view for view in answer.unfinished if view.run.job not in jobs),
        unheard=frozenset(jobs),
    )
    sidecar.reply(call, replace(said, answers=(partly,)))


def test_s11_what_a_part_of_the_store_did_not_renew_is_asked_again_within_a_second() -> None:
    world, sidecar, client = lone(every(), every(name="other"), lasts_ms=None)
    world.run_until(11_000)
    ours = {each.job: each.token for each in client.assigned}
    sidecar.wait_for(Method.BEAT)
    while not sidecar.beats[-1].renewals:
        sidecar.answer(Method.BEAT)
        sidecar.wait_for(Method.BEAT)
    at = world.now
    unheard(sidecar, "sync")
    assert not sidecar.waits(Method.BEAT), "not at once"
    sidecar.wait_for(Method.BEAT)
    assert at < world.now <= at + limits.RETRY_MAX
    assert [each.token for each in sidecar.beats[-1].renewals] == [ours["sync"]]
    sidecar.answer(Method.BEAT)
    world.run_for(60_000)
    assert client.reasons() == []


def test_s16_trust_runs_down_in_a_lease_whose_part_of_the_store_stays_away() -> None:
    world, sidecar, client = lone(every(), every(name="other"), lasts_ms=None)
    world.run_until(11_000)
    ours = {each.job: each.token for each in client.assigned}
    while not client.cancelled:
        sidecar.wait_for(Method.BEAT)
        unheard(sidecar, "sync")
        client.keep_alive()
        assert world.now < 60_000
    assert [each.token for each in client.cancelled] == [ours["sync"]]
    assert client.reasons() == [CancelReason.LEASE_LOST]
    assert ours["other"] in client.running, "it is renewed"


def test_s28_a_job_that_was_not_heard_of_is_neither_unregistered_nor_forgotten() -> None:
    world, sidecar, _ = lone(lasts_ms=None)
    backup = Sidecar(world, "b")
    backup.ready_client()
    world.run_until(11_000)
    sidecar.die()
    before = len(backup.called(Method.REGISTER))
    for _ in range(3):
        backup.wait_for(Method.BEAT)
        unheard(backup, "sync")
    assert len(backup.called(Method.REGISTER)) == before
    world.run_for(60_000)
    assert world.run(10_000).run.attempt == 2, "it was watched on"


def test_s19_a_look_that_was_not_answered_is_taken_again_but_not_at_once() -> None:
    world, sidecar, _ = lone(lasts_ms=None)
    backup = Sidecar(world, "b")
    backup.ready_client()
    world.run_until(11_000)
    sidecar.die()
    backup.wait_for(Method.BEAT)
    while not backup.beats[-1].looks:
        backup.answer(Method.BEAT)
        backup.wait_for(Method.BEAT)
    looks, at = backup.beats[-1].looks, world.now
    unheard(backup, "sync")
    assert not backup.waits(Method.BEAT)
    backup.wait_for(Method.BEAT)
    while backup.beats[-1].looks != looks:
        backup.answer(Method.BEAT)
        backup.wait_for(Method.BEAT)
    assert at < world.now <= at + limits.RETRY_MAX


def test_s26_an_adoption_that_was_not_answered_in_part_is_asked_for_again() -> None:
    world, sidecar, client = lone(lasts_ms=None)
    world.run_until(11_000)
    token = client.only().token
    sidecar.die()
    successor = Sidecar(world, "a2")
    late = successor.client(every(), in_flight=(token,))
    successor.wait_for(Method.BEAT)
    while not any(each.adopt for each in successor.beats[-1].renewals):
        successor.answer(Method.BEAT)
        successor.wait_for(Method.BEAT)
    unheard(successor, "sync")
    assert isinstance(late.error, StoreUnavailable)
    late.subscribe()
    world.run_for(100)
    assert late.attached is not None
    assert late.attached.lost == ()


def test_s27_results_and_releases_that_were_not_answered_are_sent_again() -> None:
    world, sidecar, client = lone(lasts_ms=None)
    world.run_until(11_000)
    number = client.complete(client.only().token)
    at = world.now
    sidecar.answer_by_hand(Method.COMPLETE, UNKNOWN)
    assert not sidecar.waits(Method.COMPLETE)
    sidecar.wait_for(Method.COMPLETE)
    assert at < world.now <= at + limits.RETRY_MAX
    sidecar.answer(Method.COMPLETE)
    assert [receipt.status for receipt in client.receipts(number)] == [ReceiptStatus.RECORDED]
    world.run_until(21_000)
    client.exit()
    sidecar.answer_by_hand(Method.RELEASE, UNKNOWN)
    assert not sidecar.waits(Method.RELEASE)
    sidecar.wait_for(Method.RELEASE)
    sidecar.answer(Method.RELEASE)
    assert sidecar.logged("run_released")


def test_s23_a_stop_waits_for_a_release_that_was_not_answered() -> None:
    world, sidecar, client = lone(lasts_ms=None)
    world.run_until(11_000)
    sidecar.stop()
    client.close(client.only().token)
    sidecar.answer_by_hand(Method.RELEASE, UNKNOWN)
    sidecar.settle()
    before = sidecar.stopped
    world.run_for(limits.RETRY_MAX)
    assert (before, sidecar.stopped) == (False, True)
    assert world.run(10_000).run.freed == "handed_over"


def test_s27_a_result_that_is_never_answered_is_given_up_in_the_end() -> None:
    world, sidecar, client = lone(LONG, lasts_ms=None)
    world.run_until(61_000)
    number = client.complete(client.only().token)
    since = world.now
    while world.now <= since + limits.RESULTS_KEPT:
        sidecar.wait_for(Method.COMPLETE)
        sidecar.answer_by_hand(Method.COMPLETE, UNKNOWN)
    assert sidecar.logged("result_given_up")
    receipts = client.receipts(number)
    assert [receipt.status for receipt in receipts] == [ReceiptStatus.STORE_UNAVAILABLE]
