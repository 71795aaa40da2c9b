"""Scenarios that broke earlier drafts of the semantics, and the life of a run under each fault, each
played on a small cluster. Named by rule; the checker judges each, and the test says what besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anarchon_server.core.limits import DAY, HOUR
from anarchon_server.core.messages import Method
from anarchon_server.core.model import CatchUpPolicy, EverySchedule, OverlapPolicy, RetrySpec
from tests.checker.events import HandlerTold, RunSaved
from tests.simulation.host import Host
from tests.simulation.plan import SimJob, Work
from tests.simulation.storage import Weather
from tests.simulation.story import (
    LEASE,
    QUICK,
    Story,
    cut_off,
    everywhere,
    freeze_app,
    job,
    kill_for_good,
    last_starts,
    lasting,
    once,
    set_weather,
)
from tests.simulation.timeline import EPOCH_MS

# ── S1, S2: one clock; neither early nor late ───────────────────────────────────────────────────


def test_s1_an_instance_whose_clock_is_a_minute_wrong_claims_nothing_and_others_do() -> None:
    story = Story(job(2_000), boot_leases=False)
    story.hosts[0].clock.set_wall(60_000)
    story.hosts[1].clock.set_wall(0)
    story.play()
    holders = {run.instance for slot in range(2_000, 28_000, 2_000) for run in story.saved(slot)}
    assert holders == {"host1"}


def test_s1_an_instance_whose_clock_is_seconds_wrong_is_corrected() -> None:
    story = Story(job(2_000), hosts=1, boot_leases=False)
    story.hosts[0].clock.set_wall(20_000)
    story.play()
    late = [story.claimed_at(slot, 1) - slot for slot in range(2_000, 28_000, 2_000)]
    assert max(late) < 50


def test_s1_a_store_clock_a_year_ahead_for_a_while_does_not_kill_the_job() -> None:
    story = Story(job(2_000), hosts=2, end_at=60_000, boot_leases=False, prune_every_ms=1_000)
    story.at(9_000, lambda: story.world.set_store_clock(365 * DAY))
    story.at(12_000, lambda: story.hosts[0].kill_app(100, seen=True))
    story.at(15_000, lambda: story.hosts[1].kill_sidecar(100))
    story.at(30_000, lambda: story.world.set_store_clock(-365 * DAY))
    story.play()
    ends = story.ends()
    assert max(ends) < 60_000, "nothing was planned or claimed in the year to come"
    assert all(ends[slot] == "success" for slot in range(34_000, 56_000, 2_000))


def test_s1_a_lease_written_before_the_clock_stepped_back_does_not_last_an_hour() -> None:
    story = Story(once(5_000, lasting(60_000)), hosts=2, end_at=60_000, boot_leases=False)
    story.at(8_000, lambda: story.world.set_store_clock(HOUR))
    story.at(12_000, lambda: kill_for_good(story.holder(5_000)))
    story.at(12_100, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    assert 12_100 + LEASE <= story.claimed_at(5_000, 2) <= 12_100 + 2 * LEASE + 2_000


def test_s1_a_run_whose_slot_lies_ahead_since_the_clock_was_set_back_goes_on_at_once() -> None:
    story = Story(job(10_000, lasting(8_000)), end_at=60_000)
    slot = HOUR + 20_000
    story.at(15_000, lambda: story.world.set_store_clock(HOUR))
    story.at(22_000, lambda: kill_for_good(story.holder(slot)))
    story.at(22_500, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    first, second = story.starts(slot)
    assert first.at <= 20_100
    assert second.at <= 22_000 + LEASE + 1_000
    assert story.end_of(slot) == ("success", "", 2)


def test_s1_a_retry_whose_time_lies_ahead_since_the_clock_was_set_back_is_made_soon() -> None:
    failing = once(5_000, lasting(2_000, fails=1.0), retry=RetrySpec(1, delay_ms=2_000))
    story = Story(failing, boot_leases=False)
    story.at(6_000, lambda: story.world.set_store_clock(HOUR))
    story.at(8_000, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    failed = next(run for run in story.saved(5_000) if run.state == "retrying")
    assert failed.store_at > EPOCH_MS + HOUR, "while the clock was ahead"
    assert story.starts(5_000)[1].at <= 8_000 + LEASE + 2_000
    assert story.end_of(5_000) == ("failed", "", 2)


def test_s2_a_claim_whose_reply_was_lost_is_won_by_its_token_after_the_deadline() -> None:
    story = Story(once(10_000, QUICK, start_deadline_ms=1_000), hosts=1, op_timeout_ms=2_000)
    story.at(9_900, lambda: set_weather(story.hosts[0], Weather(reply_lost=1.0)))
    story.at(10_100, lambda: set_weather(story.hosts[0], Weather()))
    story.play()
    assert story.end_of(10_000) == ("success", "", 1)
    assert story.claimed_at(10_000, 1) < 10_010
    (start,) = story.starts(10_000)
    assert start.at > 11_000, "when the claim was asked again"


def test_s2_delayed_duplicates_of_every_request_change_nothing() -> None:
    story = Story(job(1_000, lasting(300)), hosts=3, end_at=40_000)
    story.at(4_000, lambda: everywhere(story, lambda h: set_weather(h, Weather(doubled=1.0))))
    story.play()
    assert {story.end_of(slot) for slot in range(2_000, 38_000, 1_000)} == {("success", "", 1)}


def test_s2_after_two_days_no_slot_is_lost_whoever_prunes_before_another_plans() -> None:
    hourly = job(HOUR, offset_ms=5_000, catch_up_window_ms=20_000, catch_up_limit=3)
    story = Story(
        hourly, end_at=2 * DAY + 90_000, prune_every_ms=1_000, history_ms=1_000, history_max=1
    )
    story.at(10_000, lambda: everywhere(story, kill_for_good))
    story.at(2 * DAY + 60_000, story.hosts[0].start)
    story.at(2 * DAY + 62_000, story.hosts[1].start)
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)
    missed = [run for run in last_states(story).values() if run.reason == "missed"]
    assert sum(max(run.covered, 1) for run in missed) == 47
    assert len(missed) == 4


def last_states(story: Story) -> dict[int, RunSaved]:
    """The last state of every run, by its slot."""
    return {e.slot - EPOCH_MS: e for e in story.world.events if isinstance(e, RunSaved)}


# ── S4, S13 ─────────────────────────────────────────────────────────────────────────────────────


def test_s4_a_sidecar_that_was_stopped_for_long_lets_go_and_goes_on() -> None:
    story = Story(job(2_000, lasting(500)), hosts=1, end_at=40_000)

    def freeze() -> None:
        sidecar = story.hosts[0].sidecar
        assert sidecar is not None
        story.hosts[0].disturb(10_000)
        sidecar.freeze()
        story.world.timeline.after(10_000, sidecar.thaw)

    story.at(8_100, freeze)
    story.play()
    ends = story.ends()
    assert ends[10_000] == "skipped"
    assert all(ends[slot] == "success" for slot in range(20_000, 38_000, 2_000))


def test_s13_an_interrupted_run_does_not_starve_behind_fresh_slots_of_a_full_instance() -> None:
    fresh = job(1_000, lasting(1_300), overlap=OverlapPolicy.ALLOW)
    fresh = replace(fresh, spec=replace(fresh.spec, name="fresh"))
    story = Story(once(5_000, lasting(4_000)), fresh, hosts=2, end_at=40_000, max_concurrency=1)
    story.at(6_000, lambda: kill_for_good(story.holder(5_000)))
    story.play()
    over_at = story.saved(5_000)[1].lease_until
    assert over_at is not None
    assert story.claimed_at(5_000, 2) <= over_at + 1_300 + 1_000
    assert story.end_of(5_000) == ("success", "", 2)


def test_s13_a_full_instance_claims_when_it_has_room_again() -> None:
    story = Story(
        job(2_000, lasting(2_900), overlap=OverlapPolicy.ALLOW, start_deadline_ms=20_000),
        hosts=1,
        max_concurrency=1,
        end_at=20_000,
    )
    story.play()
    starts = [story.starts(slot)[0].at for slot in range(2_000, 10_000, 2_000)]
    assert all(2_900 <= later - sooner <= 3_000 for sooner, later in pairwise(starts))


# ── S16, S17 ────────────────────────────────────────────────────────────────────────────────────


def test_s16_a_handler_whose_sidecar_is_cut_off_is_told_before_its_lease_ends() -> None:
    story = Story(once(5_000, lasting(20_000)))
    story.at(7_000, lambda: cut_off(story.holder(5_000)))
    story.play()
    first, second = story.starts(5_000)
    told = [e for e in story.world.events if isinstance(e, HandlerTold) and e.token == first.token]
    lease_end = max(r.lease_until or 0 for r in story.saved(5_000) if r.token == first.token)
    assert [e.reason for e in told] == ["lease_lost"]
    assert told[0].at <= lease_end - LEASE // 6
    assert lease_end <= story.claimed_at(5_000, 2) <= lease_end + 1_000
    assert second.fence > first.fence


def test_s17_an_old_sidecar_does_not_release_what_another_has_adopted() -> None:
    story = Story(once(5_000, lasting(12_000)), hosts=1, watchable=False)
    story.at(7_000, lambda: story.hosts[0].replace_sidecar(10_000))
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)
    assert len(story.starts(5_000)) == 1
    holders = [run.incarnation for run in story.saved(5_000)]
    assert len(set(holders)) == 2


# ── S18 ─────────────────────────────────────────────────────────────────────────────────────────


def test_s18_skip_leaves_out_the_slots_that_fall_due_while_a_run_is_unfinished() -> None:
    story = Story(job(2_000, lasting(4_500)))
    story.play()
    ends = story.ends()
    states = [ends[slot] for slot in range(2_000, 20_000, 2_000)]
    assert states == ["success", "skipped", "skipped"] * 3
    skipped = [run for run in last_states(story).values() if run.reason == "overlap"]
    assert all(run.blocking_slot < run.slot for run in skipped)


def test_s18_allow_lets_runs_of_a_job_go_side_by_side() -> None:
    story = Story(job(2_000, lasting(4_500), overlap=OverlapPolicy.ALLOW))
    story.play()
    ends = story.ends()
    assert all(ends[slot] == "success" for slot in range(2_000, 24_000, 2_000))


def test_s18_a_handler_that_ignores_its_timeout_never_runs_beside_the_next_slots() -> None:
    stubborn = lasting(9_000, ignores=1.0)
    story = Story(
        job(2_000, stubborn, timeout_ms=1_000, cancel_grace_ms=500), hosts=3, end_at=40_000
    )
    story.play()
    assert story.end_of(2_000)[:2] == ("failed", "timeout")
    first = story.saved(2_000)[-1]
    following = next(slot for slot in sorted(story.ends()) if slot > 2_000 and story.starts(slot))
    assert story.starts(following)[0].at >= first.at
    assert following <= 2_000 + 1_000 + 500 + LEASE + 2_000


def test_s18_a_claim_that_comes_early_is_not_skipped_for_a_run_that_ends_in_time() -> None:
    story = Story(job(3_000, lasting(2_900)), hosts=1, boot_leases=False, hop_ms=1)
    story.at(8_500, lambda: story.world.set_store_clock(-240))
    story.play()
    ends = story.ends()
    assert {ends[slot] for slot in range(3_000, 24_000, 3_000)} == {"success"}


def test_s18_a_clock_that_jumps_does_not_end_the_last_attempt_while_it_lives() -> None:
    story = Story(job(3_000, lasting(9_500), max_attempts=1), boot_leases=False, end_at=50_000)
    story.at(7_000, lambda: story.world.set_store_clock(HOUR))
    story.at(14_000, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    assert story.end_of(3_000) == ("success", "", 1)


# ── S19 ─────────────────────────────────────────────────────────────────────────────────────────


def test_s19_a_dead_runners_run_is_taken_over_once_within_a_second_of_its_leases_end() -> None:
    story = Story(once(5_000, lasting(4_000)), hosts=4)
    story.at(6_500, lambda: kill_for_good(story.holder(5_000)))
    story.play()
    lease_end = max(r.lease_until or 0 for r in story.saved(5_000) if r.attempt == 1)
    assert lease_end <= story.claimed_at(5_000, 2) <= lease_end + 1_000
    assert story.end_of(5_000) == ("success", "", 2)
    assert len(story.starts(5_000)) == 2


def test_s19_a_clock_that_goes_there_and_back_unseen_does_not_end_a_living_lease() -> None:
    story = Story(once(5_000, lasting(9_000)), boot_leases=False)

    def there_and_back() -> None:
        (other,) = (host for host in story.hosts if host is not story.holder(5_000))
        sidecar = other.sidecar
        assert sidecar is not None
        other.disturb(600)
        sidecar.freeze()
        story.world.set_store_clock(HOUR)
        story.at(7_600, lambda: story.world.set_store_clock(-HOUR))
        story.at(7_600, sidecar.thaw)

    story.at(7_000, there_and_back)
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)
    assert any(run.store_at > EPOCH_MS + HOUR for run in story.saved(5_000)), "renewed in between"


def test_s19_a_released_run_does_not_wait_where_the_clock_steps_back() -> None:
    story = Story(once(5_000, lasting(4_000)), boot_leases=False)
    story.at(9_000 - 500, lambda: story.holder(5_000).kill_app(None, seen=True))
    story.at(9_000 - 400, lambda: story.world.set_store_clock(-10_000))
    story.play()
    assert story.claimed_at(5_000, 2) <= 9_000 + 1_000


def test_s19_the_last_attempt_that_is_allowed_ends_the_run_when_it_is_released() -> None:
    story = Story(once(5_000, lasting(9_000), max_attempts=1))
    story.at(7_000, lambda: story.holder(5_000).kill_app(None, seen=True))
    story.play()
    assert story.end_of(5_000) == ("failed", "attempts_exhausted", 1)
    assert story.saved(5_000)[-1].at <= 7_100


def test_s19_a_job_that_kills_its_process_stops_after_its_attempts() -> None:
    story = Story(once(5_000, lasting(9_000), max_attempts=3), hosts=3, end_at=60_000)
    for moment in range(5_500, 40_000, 250):
        story.at(moment, lambda: kill_if_running(story))
    story.play()
    assert story.end_of(5_000) == ("failed", "attempts_exhausted", 3)
    assert len(story.starts(5_000)) == 3


def kill_if_running(story: Story) -> None:
    """The application in which the run is at present dies, and comes back."""
    for host in story.hosts:
        if host.app is not None and any(client.running for client in host.app.clients):
            host.kill_app(1_000, seen=False)


def test_s19_a_client_that_never_accepts_does_not_make_a_run_go_round() -> None:
    story = Story(once(5_000, QUICK), hosts=1, end_at=120_000)
    story.at(4_000, lambda: setattr(story.hosts[0].app, "accepts", False))
    story.play()
    assert not story.starts(5_000)
    assert story.saved(5_000)[-1].attempt <= 8, "each time it waits twice as long"


def test_s19_a_client_that_accepts_again_is_given_runs_again() -> None:
    story = Story(job(2_000), hosts=1, end_at=60_000)
    story.at(4_000, lambda: setattr(story.hosts[0].app, "accepts", False))
    story.at(20_000, lambda: setattr(story.hosts[0].app, "accepts", True))
    story.play()
    ends = story.ends()
    assert all(ends[slot] == "success" for slot in range(40_000, 58_000, 2_000))


def test_s13_what_a_client_still_runs_after_its_session_was_lost_takes_room() -> None:
    stubborn = lasting(15_000, ignores=1.0)
    story = Story(job(2_000, stubborn, max_attempts=1), hosts=1, max_concurrency=1, end_at=60_000)
    story.at(4_500, lambda: freeze_app(story.hosts[0], 3_000))
    story.play()
    assert story.logged("run_not_accepted") == 0
    assert len(last_starts(story)) >= 3


# ── S20, S28 ────────────────────────────────────────────────────────────────────────────────────


def test_s20_settled_moves_with_the_claims_so_that_nothing_is_ever_listed() -> None:
    story = Story(job(1_000), hosts=3, end_at=300_000)
    story.play()
    (stretch,) = story.world.storage.stretches
    assert stretch.settled >= EPOCH_MS + 299_000
    assert story.world.storage.calls[Method.SETTLE] == 0


def test_s20_slots_that_nobody_could_run_are_skipped_as_missed_and_none_is_caught_up() -> None:
    story = Story(job(2_000, start_deadline_ms=1_500), end_at=40_000)
    story.at(8_500, lambda: everywhere(story, kill_for_good))
    story.at(20_500, lambda: everywhere(story, Host.start))
    story.play()
    ends = last_states(story)
    missed = [slot for slot, run in ends.items() if run.reason == "missed"]
    assert missed == [10_000, 12_000, 14_000, 16_000, 18_000]
    assert ends[20_000].state == "success"


def test_s20_schedules_side_by_side_are_settled_each_by_itself() -> None:
    old = job(4_000, start_deadline_ms=1_500)
    story = Story(replace(old, later=EverySchedule(5_000)), end_at=70_000)
    story.hosts[1].version = 1
    story.at(
        21_000, lambda: everywhere(story, lambda h: set_weather(h, Weather(refused=True), 11_500))
    )
    story.at(32_500, lambda: everywhere(story, lambda h: set_weather(h, Weather())))
    story.play()
    ends = last_states(story)
    assert {ends[slot].reason for slot in (24_000, 25_000, 28_000, 30_000)} == {"missed"}
    assert {str(ends[slot].state) for slot in (36_000, 35_000, 40_000, 45_000)} == {"success"}


def test_s20_an_instance_whose_clock_is_fast_plans_nothing_that_is_still_in_time() -> None:
    late = job(2_000, jitter_ms=1_900, start_deadline_ms=2_900)
    story = Story(late, boot_leases=False, end_at=60_000)
    story.hosts[0].clock.set_wall(5_000)
    story.hosts[1].clock.set_wall(0)
    story.play()
    assert set(story.ends().values()) == {"success"}


# ── S18, S20: queue, cancel, all ────────────────────────────────────────────────────────────────


def queueing(period_ms: int, work: Work = QUICK, **spec: Any) -> SimJob:
    """A job whose slots wait for the run in their way."""
    return job(period_ms, work, overlap=OverlapPolicy.QUEUE, **spec)


def superseding(period_ms: int, work: Work = QUICK, **spec: Any) -> SimJob:
    """A job whose slots ask the run in their way to stop."""
    return job(period_ms, work, overlap=OverlapPolicy.CANCEL, **spec)


def all_down(story: Story, since: int, until: int) -> None:
    """No process of any host is there in between."""
    story.at(since, lambda: everywhere(story, kill_for_good))
    story.at(until, lambda: everywhere(story, Host.start))


def waiting(story: Story) -> dict[int, int]:
    """How many runs of the job waited after each moment in which the store wrote some."""
    due: set[int] = set()
    after: dict[int, int] = {}
    for event in story.world.events:
        if isinstance(event, RunSaved):
            (due.add if event.state == "due" else due.discard)(event.slot)
            after[event.at] = len(due)
    return after


def test_s2_a_queued_slot_runs_however_long_it_had_to_wait() -> None:
    story = Story(queueing(5_000, lasting(9_000), start_deadline_ms=1_000), end_at=60_000)
    story.play()
    (start,) = story.starts(10_000)
    assert start.at >= 14_000
    assert story.end_of(10_000) == ("success", "", 1)


def test_s20_what_an_outage_left_runs_oldest_first_and_no_fresh_slot_replaces_it() -> None:
    slow = queueing(2_000, lasting(900), catch_up=CatchUpPolicy.ALL, start_deadline_ms=1_000)
    story = Story(slow, end_at=110_000, hop_ms=300)
    all_down(story, 9_500, 59_500)
    story.play()
    starts = [start.slot - EPOCH_MS for start in last_starts(story)]
    assert starts == sorted(starts), "no fresh slot before one that waits"
    assert set(range(10_000, 60_000, 2_000)) <= set(starts)


def test_s20_of_a_full_fleet_no_more_wait_than_the_limit() -> None:
    slow = queueing(1_000, lasting(4_500), catch_up=CatchUpPolicy.ALL, catch_up_limit=4)
    story = Story(slow, max_concurrency=1, end_at=90_000)
    for outage in range(5_000, 80_000, 15_000):
        all_down(story, outage, outage + 6_000)
    story.play()
    assert max(waiting(story).values()) == 5, "four caught up and one queued"


def test_s18_a_triggered_run_that_waits_is_not_replaced_by_a_slot_nor_by_a_pause() -> None:
    story = Story(queueing(5_000, lasting(12_000)), end_at=60_000)
    story.at(6_000, lambda: story.world.trigger("job", "by hand"))
    story.at(16_000, lambda: story.world.pause("job"))
    story.at(40_000, lambda: story.world.resume("job"))
    story.play()
    ends = last_states(story)
    (triggered,) = (slot for slot in ends if slot % 5_000)
    assert ends[triggered].state == "success"
    assert ends[10_000].reason == "overlap"
    assert ends[15_000].reason == "paused"


def test_s21a_a_handler_that_ignores_one_slots_cancel_after_the_other_has_one_grace() -> None:
    stubborn = lasting(20_000, ignores=1.0)
    story = Story(superseding(3_000, stubborn, cancel_grace_ms=5_000), hosts=3, end_at=60_000)
    story.play()
    assert story.end_of(3_000)[:2] == ("failed", "superseded")
    assert story.saved(3_000)[-1].at <= 6_000 + 5_000 + LEASE + 3_000


def test_s21a_a_superseded_run_whose_runner_dies_is_not_started_to_be_cancelled() -> None:
    stubborn = lasting(20_000, ignores=1.0)
    story = Story(superseding(5_000, stubborn, cancel_grace_ms=5_000), hosts=3, end_at=40_000)
    story.at(11_000, lambda: kill_for_good(story.holder(5_000)))
    story.play()
    assert len(story.starts(5_000)) == 1
    assert story.end_of(5_000) == ("failed", "superseded", 1)


def test_s18_a_slot_whose_way_a_retry_blocks_supersedes_it_and_runs_at_once() -> None:
    failing = superseding(5_000, lasting(100, fails=1.0), retry=RetrySpec(1, delay_ms=60_000))
    story = Story(failing)
    story.play()
    for slot in range(10_000, 26_000, 5_000):
        assert story.end_of(slot - 5_000)[:2] == ("failed", "superseded")
        assert story.saved(slot)[0].state == "claimed", "nothing is left for it to wait for"


def test_s18_of_two_triggered_runs_that_waited_together_the_newer_lets_the_older_end() -> None:
    stubborn = lasting(8_000, ignores=1.0)
    story = Story(superseding(30_000, stubborn, cancel_grace_ms=5_000), hosts=3, end_at=58_000)
    story.at(31_000, lambda: story.world.trigger("job", "one"))
    story.at(32_000, lambda: story.world.trigger("job", "two"))
    story.play()
    assert story.end_of(30_000)[:2] == ("failed", "superseded")
    older, newer = (slot for slot in sorted(story.ends()) if slot % 30_000)
    assert [story.end_of(slot)[0] for slot in (older, newer)] == ["success"] * 2
    assert story.starts(newer)[0].at >= story.starts(older)[0].at + 8_000


# ── S29 ─────────────────────────────────────────────────────────────────────────────────────────


def test_s29_slots_of_a_pause_are_neither_missed_nor_run_and_those_before_it_are_planned() -> None:
    story = Story(job(2_000, start_deadline_ms=1_500, catch_up=CatchUpPolicy.ALL), end_at=60_000)
    all_down(story, 8_500, 30_000)
    story.at(17_000, lambda: story.world.pause("job"))
    story.at(45_000, lambda: story.world.resume("job"))
    story.play()
    ends = last_states(story)
    assert [slot for slot, run in ends.items() if run.reason == "missed"] == []
    assert [slot for slot, run in ends.items() if run.reason == "paused"] == [44_000]
    assert ends[44_000].covered == 15, "16 could still have been claimed when the pause began"
    caught_up = {10_000, 12_000, 14_000}
    assert {ends[slot].state for slot in caught_up} == {"success"}
    assert min(story.starts(slot)[0].at for slot in caught_up) >= 45_000


def test_s29_slots_that_were_counted_as_paused_are_not_run_after_the_resumption() -> None:
    story = Story(job(2_000, start_deadline_ms=9_000), hosts=3)
    away = Weather(refused=True)
    story.at(15_500, lambda: everywhere(story, lambda h: set_weather(h, away, 6_500)))
    story.at(15_700, lambda: story.world.pause("job"))
    story.at(21_000, lambda: story.world.resume("job"))
    story.at(22_000, lambda: everywhere(story, lambda h: set_weather(h, Weather())))
    story.play()
    assert story.end_of(20_000)[:2] == ("skipped", "paused")
    assert story.saved(20_000)[-1].covered == 3
    assert not any(story.starts(slot) for slot in (16_000, 18_000, 20_000))
    assert story.end_of(22_000) == ("success", "", 1)


# ── S21 to S27a ─────────────────────────────────────────────────────────────────────────────────


def test_s21_an_attempt_that_outlives_its_timeout_is_cancelled_and_failed() -> None:
    story = Story(once(5_000, lasting(9_000), timeout_ms=1_000))
    story.play()
    assert story.end_of(5_000) == ("failed", "timeout", 1)
    assert story.ended_at(story.starts(5_000)[0].token) <= 6_000 + 200


def test_s21_a_timeout_is_told_though_its_stream_was_broken() -> None:
    slow = once(5_000, lasting(20_000), timeout_ms=3_000, cancel_grace_ms=20_000)
    story = Story(slow)
    story.at(7_990, lambda: break_streams(story.holder(5_000)))
    story.play()
    (start,) = story.starts(5_000)
    told = [e for e in story.world.events if isinstance(e, HandlerTold) and e.token == start.token]
    assert [e.reason for e in told] == ["timeout"]
    assert 8_000 < told[0].at <= 8_500
    assert story.end_of(5_000) == ("failed", "timeout", 1)


def test_s21a_what_was_cancelled_is_not_sent_again() -> None:
    story = Story(once(5_000, QUICK, timeout_ms=1_000, cancel_grace_ms=5_000), hosts=1)
    story.at(4_000, lambda: setattr(story.hosts[0].app, "accepts", False))
    story.at(6_200, lambda: setattr(story.hosts[0].app, "accepts", True))
    story.play()
    assert not story.starts(5_000)
    assert story.end_of(5_000) == ("failed", "timeout", 1)


def test_s23_a_polite_stop_hands_over_when_the_handler_has_stopped() -> None:
    story = Story(once(5_000, lasting(9_000), max_attempts=1), stop_grace_ms=1_000)
    story.at(7_000, lambda: story.holder(5_000).stop_sidecar(60_000))
    story.play()
    first, second = story.starts(5_000)
    stopped_at = story.ended_at(first.token)
    assert 8_000 <= stopped_at <= second.at <= stopped_at + 1_000
    assert story.end_of(5_000) == ("success", "", 2), "it does not count against max_attempts"


def test_s23_a_polite_stop_lets_a_short_handler_finish() -> None:
    story = Story(once(5_000, lasting(2_500)), stop_grace_ms=2_000)
    story.at(6_000, lambda: story.holder(5_000).stop_sidecar(60_000))
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)


def test_s24_a_broken_stream_is_not_a_death() -> None:
    story = Story(once(5_000, lasting(6_000)))
    for moment in range(6_000, 10_000, 700):
        story.at(moment, lambda: break_streams(story.holder(5_000)))
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)
    assert len(story.starts(5_000)) == 1


def break_streams(host: Host) -> None:
    """Every stream of the host's application is reset."""
    assert host.app is not None
    assert host.sidecar is not None
    host.disturb(0)
    for client in host.app.clients:
        host.sidecar.break_stream(client)


def test_s24_the_runs_of_a_process_that_is_seen_to_die_are_released_at_once() -> None:
    story = Story(once(5_000, lasting(4_000)))
    story.at(7_000, lambda: story.holder(5_000).kill_app(None, seen=True))
    story.play()
    assert story.claimed_at(5_000, 2) <= 7_000 + 1_000


def test_s25_a_frozen_client_is_released_after_its_sessions_time_and_a_margin() -> None:
    story = Story(once(5_000, lasting(9_000)), watchable=False)
    story.at(7_000, lambda: freeze_app(story.holder(5_000), 60_000))
    story.play()
    session, margin = LEASE // 2, LEASE // 6
    assert story.claimed_at(5_000, 2) <= 7_000 + session + margin + 1_000


def test_s26_a_sidecar_that_comes_back_in_time_adopts_what_its_client_runs() -> None:
    story = Story(once(5_000, lasting(6_000)))
    story.at(7_000, lambda: story.holder(5_000).kill_sidecar(300))
    story.play()
    (start,) = story.starts(5_000)
    assert story.end_of(5_000) == ("success", "", 1)
    assert {run.fence for run in story.saved(5_000)} == {start.fence}
    assert len({run.incarnation for run in story.saved(5_000)}) == 2


def test_s26_a_handler_whose_sidecar_stays_away_is_told_when_its_sessions_time_is_over() -> None:
    story = Story(once(5_000, lasting(9_000)), end_at=45_000)
    story.at(7_000, lambda: story.holder(5_000).kill_sidecar(20_000))
    story.play()
    first = story.starts(5_000)[0]
    assert story.ended_at(first.token) <= 7_000 + LEASE // 2 + 200
    assert story.end_of(5_000) == ("success", "", 2)


@pytest.mark.parametrize("real_clients", [True, False])
def test_s26_a_restarted_sidecar_that_does_not_reach_the_store_extends_no_trust(
    real_clients: bool,
) -> None:
    story = Story(once(5_000, lasting(20_000)), real_clients=real_clients)
    hosts: list[Host] = []

    def restart() -> None:
        hosts.append(story.holder(5_000))
        hosts[0].kill_sidecar(300)

    story.at(7_000, restart)
    story.at(7_301, lambda: cut_off(hosts[0]))
    story.play()
    first, second = story.starts(5_000)
    told = [e for e in story.world.events if isinstance(e, HandlerTold) and e.token == first.token]
    assert [e.reason for e in told] == ["lease_lost"]
    assert told[0].at < story.claimed_at(5_000, 2)
    assert second.fence > first.fence


def test_s27_a_run_that_finishes_while_the_store_is_away_for_less_than_its_lease_is_a_success() -> (
    None
):
    story = Story(once(5_000, lasting(2_000)))
    story.at(6_500, lambda: everywhere(story, lambda h: set_weather(h, Weather(refused=True))))
    story.at(8_200, lambda: everywhere(story, lambda h: set_weather(h, Weather())))
    story.play()
    assert story.end_of(5_000) == ("success", "", 1)


def test_s27a_after_the_store_went_back_takeovers_wait_for_a_lease_and_not_for_ever() -> None:
    story = Story(job(2_000, lasting(1_500)), hosts=3, end_at=60_000)
    restores: list[Callable[[], None]] = []
    story.at(9_000, lambda: restores.append(story.world.storage.backup()))
    story.at(14_500, lambda: restores[0]())
    story.at(25_000, lambda: kill_for_good(story.hosts[0]))
    story.play(judged=False)
    assert story.logged("store_went_back") > 0
    assert all(story.ends()[slot] == "success" for slot in range(34_000, 56_000, 2_000))


def test_s10_every_slot_has_one_winner_and_wins_are_shared() -> None:
    story = Story(job(1_000, jitter_ms=500), hosts=3, end_at=300_000)
    story.play()
    wins = [story.saved(slot)[0].instance for slot in range(1_000, 298_000, 1_000)]
    assert min(wins.count(name) for name in ("host0", "host1", "host2")) > 297 * 0.25


def test_s3_a_machine_clock_set_an_hour_ahead_and_back_neither_repeats_nor_floods() -> None:
    story = Story(job(10_000), hosts=2, end_at=80_000)
    story.at(15_000, lambda: story.world.set_store_clock(HOUR))
    story.at(25_000, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    assert all(len(story.starts(slot)) <= 1 for slot in story.ends())
    assert len(last_starts(story)) <= 80_000 // 10_000 + 1


def test_s3_a_new_boot_of_the_machine_ends_all_leases() -> None:
    story = Story(once(5_000, lasting(4_000)))
    story.at(7_000, story.world.reboot)
    story.at(7_500, lambda: everywhere(story, Host.start))
    story.play()
    assert story.end_of(5_000) == ("success", "", 2)
    assert story.claimed_at(5_000, 2) <= 7_500 + 1_500
