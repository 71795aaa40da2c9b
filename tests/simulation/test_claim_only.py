"""The life of a run on a claim-only store, under each fault: what its kind of backend promises, and what
it does not. Named by rule; the checker judges each, and the test says what besides.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from anarchon_server.core.limits import MINUTE
from anarchon_server.core.messages import Method
from anarchon_server.core.model import CatchUpPolicy, EverySchedule, JobSpec, OverlapPolicy
from tests.checker.events import HandlerTold
from tests.simulation.host import Host
from tests.simulation.mutants import asked_again_for_ever
from tests.simulation.plan import SimJob, Work, longest_deadline
from tests.simulation.storage import Weather
from tests.simulation.story import (
    NEVER,
    QUICK,
    Story,
    cut_off,
    everywhere,
    freeze_app,
    kill_for_good,
    last_starts,
    lasting,
    set_weather,
)

HOUR = 60 * MINUTE
LOST = ("failed", "runner_lost", 1)
DONE = ("success", "", 1)


def job(period_ms: int, work: Work = QUICK, offset_ms: int = 0, **spec: Any) -> SimJob:
    """A job on a grid without jitter, which sets nothing that needs a lease."""
    policies = {"jitter_ms": 0, **spec}
    return SimJob(JobSpec("job", EverySchedule(period_ms, offset_ms), **policies), work)


def once(at_ms: int, work: Work, **spec: Any) -> SimJob:
    """A job with one slot in the hour that a scenario lasts."""
    return job(HOUR, work, at_ms, **spec)


def tale(*jobs: SimJob, clockless: bool = False, **plan: Any) -> Story:
    """A story on a claim-only store; `clockless`: its claim cannot look at a clock."""
    kept_ms = longest_deadline(jobs) + 10 * MINUTE if clockless else None
    return Story(*jobs, leases=False, boot_leases=False, kept_ms=kept_ms, **plan)


either = pytest.mark.parametrize("clockless", [False, True], ids=["clock", "no clock"])


def told(story: Story) -> list[str]:
    """What handlers were told, in order."""
    return [e.reason for e in story.world.events if isinstance(e, HandlerTold)]


# ── What it promises ────────────────────────────────────────────────────────────────────────────


@either
def test_s10_every_slot_has_one_winner_and_wins_are_shared(clockless: bool) -> None:
    story = tale(job(1_000, jitter_ms=500), clockless=clockless, hosts=3, end_at=300_000)
    story.play()
    wins = [story.saved(slot)[0].instance for slot in range(1_000, 298_000, 1_000)]
    assert min(wins.count(name) for name in ("host0", "host1", "host2")) > 297 * 0.25


@either
def test_s2_delayed_duplicates_of_every_request_change_nothing(clockless: bool) -> None:
    story = tale(job(1_000, lasting(300)), clockless=clockless, hosts=3, end_at=40_000)
    story.at(4_000, lambda: everywhere(story, lambda h: set_weather(h, Weather(doubled=1.0))))
    story.play()
    assert {story.end_of(slot) for slot in range(2_000, 38_000, 1_000)} == {DONE}


@either
def test_s11_a_claim_whose_reply_was_lost_is_won_by_its_token_after_the_deadline(
    clockless: bool,
) -> None:
    story = tale(once(10_000, QUICK, start_deadline_ms=1_000), clockless=clockless, hosts=1)
    story.at(9_900, lambda: set_weather(story.hosts[0], Weather(reply_lost=1.0)))
    story.at(10_100, lambda: set_weather(story.hosts[0], Weather()))
    story.play()
    assert story.end_of(10_000) == DONE
    (start,) = story.starts(10_000)
    assert start.at > 11_000, "when the claim was asked again"


def test_s11_what_an_unknown_claim_won_finds_its_place() -> None:
    """Though slots of a job with room for one alone fall due meanwhile."""
    story = tale(job(2_000, lasting(1_500)), hosts=1, max_concurrency=1)
    story.at(9_900, lambda: set_weather(story.hosts[0], Weather(reply_lost=1.0)))
    story.at(12_100, lambda: set_weather(story.hosts[0], Weather()))
    story.play()
    assert story.end_of(10_000) == DONE
    assert {story.end_of(slot) for slot in range(14_000, 26_000, 2_000)} == {DONE}


@pytest.mark.parametrize("bound", [True, False], ids=["as it is", "asked for ever"])
def test_s10_an_unknown_claim_is_not_asked_when_the_record_of_its_winner_may_be_gone(
    bound: bool,
) -> None:
    """Where the claim cannot look at a clock: it looks, is held up, and finds the slot free again."""
    kept_ms = MINUTE + 10 * MINUTE
    story = tale(
        once(10_000, QUICK, start_deadline_ms=MINUTE),
        clockless=True,
        end_at=15 * MINUTE,
        starts=(0, 0),
    )
    weather(story, 9_900, silent=True)
    weather(story, kept_ms + 8_000, done_late=1.0)
    weather(story, kept_ms + 14_000)
    mistake: AbstractContextManager[object] = nullcontext() if bound else asked_again_for_ever()
    with mistake:
        story.play(judged=False)
    rules = {violation.rule for violation in story.world.violations()}
    assert story.saved(10_000)[0].instance == "host1"
    assert rules == set() if bound else "F1" in rules


def weather(story: Story, moment: int, **shares: Any) -> None:
    """From that moment on, on the first host's way to the store."""
    story.at(moment, lambda: set_weather(story.hosts[0], Weather(**shares), NEVER))


@either
def test_s18_runs_of_a_job_go_side_by_side(clockless: bool) -> None:
    story = tale(
        job(2_000, lasting(4_500), overlap=OverlapPolicy.ALLOW, catch_up=CatchUpPolicy.NONE),
        clockless=clockless,
    )
    story.play()
    assert {story.end_of(slot) for slot in range(2_000, 24_000, 2_000)} == {DONE}


def test_s27_a_run_goes_on_while_the_store_is_away_and_its_result_waits() -> None:
    """Nobody can take it over, so that there is no lease to lose."""
    story = tale(once(5_000, lasting(10_000)), hosts=1, end_at=60_000)
    weather(story, 7_000, silent=True)
    weather(story, 40_000)
    story.play()
    assert story.end_of(5_000) == DONE
    assert told(story) == []


def test_s26_a_sidecar_that_comes_back_in_time_adopts_what_its_client_runs() -> None:
    story = tale(once(5_000, lasting(6_000)), hosts=1)
    story.at(7_000, lambda: story.hosts[0].kill_sidecar(400))
    story.play()
    assert story.end_of(5_000) == DONE
    assert len(story.starts(5_000)) == 1
    assert len({run.incarnation for run in story.saved(5_000)}) == 2
    assert told(story) == []


# ── What it does not: a run whose runner dies is lost ───────────────────────────────────────────


def test_s19_nobody_takes_over_the_run_of_a_host_that_is_gone() -> None:
    story = tale(job(10_000, lasting(8_000)), end_at=60_000)
    story.at(11_000, lambda: kill_for_good(story.holder(10_000)))
    story.play()
    assert [run.attempt for run in story.saved(10_000)] == [1] * len(story.saved(10_000))
    assert not story.saved(10_000)[-1].final, "nobody is there who could say so"
    assert {story.end_of(slot) for slot in range(20_000, 50_000, 10_000)} == {DONE}
    assert not story.world.storage.calls[Method.SETTLE]


@either
def test_row_24_an_application_that_dies_before_it_has_its_run_loses_it(clockless: bool) -> None:
    """The process is seen to be gone when the run has been sent to it and not yet accepted."""
    story = tale(once(10_000, lasting(500)), clockless=clockless, hosts=1)
    story.at(9_990, lambda: kill_app(story.hosts[0], delivered=False))
    story.play()
    assert story.end_of(10_000) == LOST
    assert not story.starts(10_000)


def test_row_24_a_run_that_was_won_for_an_application_that_is_gone_is_given_back() -> None:
    """It died while the claim was on its way, so that the run was not handed over to anybody."""
    story = tale(once(10_000, lasting(500)), hosts=1, hop_ms=1)
    weather(story, 9_990, reply_late=1.0)
    story.at(10_001, lambda: kill_app(story.hosts[0]))
    story.play()
    assert story.end_of(10_000) == ("failed", "not_accepted", 1)
    assert not story.starts(10_000)


def kill_app(host: Host, *, delivered: bool = True) -> None:
    """SIGKILL, which the sidecar sees; `delivered` false: once nothing more reaches it."""
    if delivered:
        host.kill_app(2_000, seen=True)
        return
    assert host.app is not None
    host.app.freeze()
    host.world.timeline.after(200, lambda: host.kill_app(2_000, seen=True))


def test_s24_the_run_of_a_process_that_is_seen_to_die_has_failed_at_once() -> None:
    story = tale(once(5_000, lasting(9_000)))
    story.at(7_000, lambda: story.holder(5_000).kill_app(2_000, seen=True))
    story.play()
    assert story.end_of(5_000) == LOST
    assert story.saved(5_000)[-1].at <= 7_020


def test_s25_a_frozen_client_is_told_when_it_thaws_and_its_run_has_failed() -> None:
    story = tale(once(5_000, lasting(9_000)), watchable=False)
    story.at(7_000, lambda: freeze_app(story.holder(5_000), 6_000))
    story.play()
    assert story.end_of(5_000) == LOST
    assert 8_000 <= story.saved(5_000)[-1].at <= 7_000 + 1_500 + 500 + 100
    assert told(story) == ["lease_lost"]


def test_s26_a_handler_whose_sidecar_stays_away_is_told_when_its_sessions_time_is_over() -> None:
    story = tale(once(5_000, lasting(9_000)), hosts=1, end_at=40_000)
    story.at(7_000, lambda: story.hosts[0].kill_sidecar(10_000))
    story.play()
    assert told(story) == ["lease_lost"]
    (start,) = story.starts(5_000)
    assert story.ended_at(start.token) <= 7_000 + 1_500 + 100
    assert story.end_of(5_000) == LOST, "its client says so to the next sidecar"


def test_s23_a_handler_that_obeys_a_stop_leaves_a_run_that_has_failed() -> None:
    story = tale(once(5_000, lasting(20_000)), stop_grace_ms=500)
    story.at(7_000, lambda: story.holder(5_000).stop_sidecar(NEVER))
    story.play()
    assert told(story) == ["shutdown"]
    assert story.end_of(5_000) == LOST
    assert story.saved(5_000)[-1].at <= 7_000 + 500 + 200


def test_s23_a_polite_stop_lets_a_short_handler_finish() -> None:
    story = tale(once(5_000, lasting(3_000)), stop_grace_ms=2_000)
    story.at(7_000, lambda: story.holder(5_000).stop_sidecar(NEVER))
    story.play()
    assert story.end_of(5_000) == DONE


def test_s20_slots_of_an_outage_are_missed_and_not_caught_up() -> None:
    story = tale(job(2_000), end_at=60_000)
    story.at(9_000, lambda: everywhere(story, kill_for_good))
    story.at(30_500, lambda: everywhere(story, Host.start))
    story.play()
    ends = story.ends()
    assert not [slot for slot in range(10_000, 24_000, 2_000) if slot in ends]
    assert all(ends[slot] == "success" for slot in range(32_000, 56_000, 2_000))
    assert set(ends.values()) == {"success"}
    assert not story.world.storage.calls[Method.SETTLE]


def test_s1_a_store_clock_set_an_hour_ahead_and_back_neither_repeats_nor_floods() -> None:
    story = tale(job(10_000), end_at=120_000)
    story.at(15_000, lambda: story.world.set_store_clock(HOUR))
    story.at(45_000, lambda: story.world.set_store_clock(-HOUR))
    story.play()
    assert all(len(story.starts(slot)) <= 1 for slot in story.ends())
    assert len(last_starts(story)) <= 120_000 // 10_000 + 1
    assert all(story.ends()[slot] == "success" for slot in range(60_000, 110_000, 10_000))


def test_s12_an_instance_that_is_cut_off_leaves_the_slots_to_the_others() -> None:
    story = tale(job(2_000), end_at=40_000)
    story.at(9_000, lambda: cut_off(story.hosts[0]))
    story.play()
    wins = [story.saved(slot)[0].instance for slot in range(10_000, 36_000, 2_000)]
    assert set(wins) == {"host1"}
