"""From what a client states to what is decided: defaults, relations, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core import limits
from anarchon_server.core.errors import (
    InvalidError,
    InvalidJobsError,
    InvalidScheduleError,
    UnsupportedError,
)
from anarchon_server.core.model import (
    CatchUpPolicy,
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
)
from anarchon_server.core.policy import Job, check_name, resolve, resolve_all, shown
from anarchon_server.core.store import Capabilities
from tests.unit.server.core.driver import START

SQLITE = Capabilities("sqlite")
BARE = JobSpec("sync", EverySchedule(10_000))


def resolved(spec: JobSpec = BARE, capabilities: Capabilities = SQLITE, **changes: Any) -> Job:
    return resolve(replace(spec, **changes), capabilities, limits.LEASE_DEFAULT, START)


def refused(**changes: Any) -> InvalidError:
    """The error for a spec with these changes."""
    with pytest.raises(InvalidError) as caught:
        resolved(**changes)
    return caught.value


# --- Defaults ----------------------------------------------------------------------------


def test_what_a_job_leaves_unset_takes_the_documented_defaults() -> None:
    job = resolved()
    assert (job.lease_ms, job.heartbeat_ms, job.margin_ms) == (30_000, 5_000, 5_000)
    assert (job.overlap, job.catch_up) == (OverlapPolicy.SKIP, CatchUpPolicy.NONE)
    assert (job.max_attempts, job.catch_up_limit) == (3, 100)
    assert (job.cancel_grace_ms, job.stop_grace_ms) == (5_000, 20_000)
    assert job.definition.window_ms == 24 * 3_600_000
    assert (job.name, job.schedule_id) == ("sync", "every 10s")


def test_what_a_job_sets_is_kept_also_where_it_is_zero() -> None:
    job = resolved(
        lease_ms=12_000,
        heartbeat_ms=4_000,
        overlap=OverlapPolicy.ALLOW,
        catch_up=CatchUpPolicy.NONE,
        catch_up_limit=7,
        catch_up_window_ms=60_000,
        max_attempts=9,
        cancel_grace_ms=0,
        stop_grace_ms=0,
        timeout_ms=1,
        labels=(("team", "billing"),),
        concurrency=2,
    )
    assert (job.lease_ms, job.heartbeat_ms, job.overlap) == (12_000, 4_000, OverlapPolicy.ALLOW)
    assert (job.max_attempts, job.catch_up_limit, job.definition.window_ms) == (9, 7, 60_000)
    assert (job.cancel_grace_ms, job.stop_grace_ms) == (0, 0)


def test_s15_the_heartbeat_is_a_sixth_of_the_jobs_own_lease() -> None:
    assert resolved(lease_ms=3_000).heartbeat_ms == 500
    assert resolved(lease_ms=3_600_000).heartbeat_ms == 600_000


def test_s15_a_sidecar_may_have_another_default_lease() -> None:
    assert resolve(BARE, SQLITE, 6_000, START).lease_ms == 6_000


# --- Jitter and deadlines ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "longest"), [(100, 25), (4_000, 1_000), (8_000, 2_000), (60_000, 2_000), (None, 2_000)]
)
def test_s12_jitter_is_the_smaller_of_two_seconds_and_a_quarter_of_the_gap(
    gap: int | None, longest: int
) -> None:
    following = None if gap is None else START + gap
    assert resolved().longest_jitter(START, following) == longest


@pytest.mark.parametrize("jitter", [0, 1, 9_999])
def test_s12_a_jitter_that_is_set_is_taken_whatever_the_gap(jitter: int) -> None:
    job = resolved(jitter_ms=jitter)
    assert job.longest_jitter(START, START + 100) == jitter
    assert job.longest_jitter(START, None) == jitter


@pytest.mark.parametrize("jitter", [10_000, 10_001, -1])
def test_s12_a_jitter_not_below_the_shortest_gap_is_refused(jitter: int) -> None:
    error = refused(jitter_ms=jitter)
    assert error.field == "jitter"
    assert error.expected == "it must be shorter than the shortest gap between two slots, 10s"


def test_s12_the_shortest_gap_counts_not_the_next_one() -> None:
    cron = CronSchedule("0,50 0 * * * *")
    assert resolved(schedule=cron, jitter_ms=49_999).spec.jitter_ms == 49_999
    assert refused(schedule=cron, jitter_ms=50_000).field == "jitter"


@pytest.mark.parametrize(
    ("gap", "deadline"),
    [(100, 5_025), (10_000, 10_000), (60_000, 60_000), (86_400_000, 60_000), (None, 60_000)],
)
def test_s20_a_slot_is_missed_after_the_gap_at_least_jitter_and_5_s_at_most_60_s(
    gap: int | None, deadline: int
) -> None:
    following = None if gap is None else START + gap
    assert resolved().start_deadline(START, following) == deadline


def test_s20_a_long_jitter_makes_the_deadline_longer_than_a_minute() -> None:
    job = resolved(schedule=EverySchedule(3_600_000), jitter_ms=600_000)
    assert job.start_deadline(START, START + 3_600_000) == 605_000


def test_s20_a_deadline_that_is_set_is_taken() -> None:
    assert resolved(start_deadline_ms=1_000).start_deadline(START, None) == 1_000


def test_i6_the_default_jitter_leaves_time_to_claim_before_a_short_deadline() -> None:
    job = resolved(schedule=EverySchedule(3_600_000), start_deadline_ms=1_000)
    assert job.longest_jitter(START, START + 3_600_000) == 500


def test_i6_a_deadline_within_the_jitter_is_refused() -> None:
    error = refused(jitter_ms=2_000, start_deadline_ms=2_000)
    assert (error.field, error.value) == ("start_deadline", "2s")
    assert error.expected == "it must be longer than the jitter, 2s"
    assert resolved(jitter_ms=2_000, start_deadline_ms=2_001).spec.jitter_ms == 2_000


# --- Refusals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("lease", {"lease_ms": 2_999}),
        ("lease", {"lease_ms": 3_600_001}),
        ("timeout", {"timeout_ms": 0}),
        ("timeout", {"timeout_ms": 366 * 86_400_000 + 1}),
        ("catch_up.window", {"catch_up_window_ms": -1}),
        ("start_deadline", {"start_deadline_ms": 999}),
        ("start_deadline", {"start_deadline_ms": 86_400_001}),
        ("cancel_grace", {"cancel_grace_ms": 3_600_001}),
        ("stop_grace", {"stop_grace_ms": -1}),
        ("catch_up.limit", {"catch_up_limit": 10_001}),
        ("catch_up.limit", {"catch_up_limit": -1}),
        ("max_attempts", {"max_attempts": 1_001}),
        ("concurrency", {"concurrency": 10_001}),
        ("labels", {"labels": tuple((f"k{n}", "v") for n in range(17))}),
        ("labels", {"labels": (("k", "v" * 129),)}),
        ("labels", {"labels": (("ключ" * 17, "v"),)}),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    assert refused(**changes).field == field


def test_s15_a_heartbeat_that_does_not_fit_the_lease_is_refused_with_what_would() -> None:
    for heartbeat in (99, 1_001):
        error = refused(lease_ms=3_000, heartbeat_ms=heartbeat)
        assert error.field == "heartbeat"
        assert error.expected.startswith("with a lease of 3s it is 100ms to 1s")
    assert resolved(lease_ms=3_000, heartbeat_ms=1_000).heartbeat_ms == 1_000


@pytest.mark.parametrize("schedule", [EverySchedule(99), CronSchedule("61 * * * *")])
def test_s7_a_bad_schedule_is_refused(schedule: EverySchedule | CronSchedule) -> None:
    with pytest.raises(InvalidScheduleError):
        resolved(schedule=schedule)


def test_s9_a_schedule_that_never_fires_is_refused() -> None:
    with pytest.raises(InvalidScheduleError, match="never fires"):
        resolved(schedule=CronSchedule("0 0 30 2 *"))


def test_s9_a_schedule_that_never_fires_again_is_refused() -> None:
    spec = replace(BARE, schedule=CronSchedule("0 0 29 2 *"))
    last = 7_139_318_400_000  # 2196-03-27: the 29th of February 2196 was the last before 2200
    with pytest.raises(InvalidScheduleError, match="never fires again"):
        resolve(spec, SQLITE, limits.LEASE_DEFAULT, last)
    resolve(spec, SQLITE, limits.LEASE_DEFAULT, last - 40 * limits.DAY)
    resolve(BARE, SQLITE, limits.LEASE_DEFAULT, 10 * last)


def test_s7_a_hash_is_of_the_jobs_own_name() -> None:
    one, other = (
        resolve(JobSpec(name, CronSchedule("H H * * *")), SQLITE, 30_000, START)
        for name in ("one", "other")
    )
    assert one.schedule_id != other.schedule_id


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"overlap": OverlapPolicy.QUEUE}, "overlap=queue"),
        ({"overlap": OverlapPolicy.CANCEL}, "overlap=cancel"),
        ({"catch_up": CatchUpPolicy.LATEST}, "catch_up=latest"),
        ({"catch_up": CatchUpPolicy.ALL}, "catch_up=all"),
        ({"retry": RetrySpec(1)}, "retry"),
    ],
)
def test_what_the_backend_has_not_is_refused_and_not_ignored(
    changes: dict[str, Any], feature: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(**changes)
    assert (caught.value.feature, caught.value.backend) == (feature, "sqlite")


def test_s29_a_job_without_a_schedule_is_for_backends_that_can_trigger_it() -> None:
    bare = JobSpec("sync", None)
    with pytest.raises(UnsupportedError, match=r"redis:script.*no run can be triggered") as caught:
        resolve(bare, SQLITE, 30_000, START)
    assert caught.value.feature == "a job without a schedule"
    job = resolve(bare, replace(SQLITE, control=True), 30_000, START)
    assert (job.schedule_id, job.schedule.description) == ("", "only when triggered")
    assert (job.schedule.next_after(START), job.schedule.previous_upto(START)) == (None, None)
    assert list(job.schedule.between(0, START)) == []


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("jitter", {"jitter_ms": 0}),
        ("start_deadline", {"start_deadline_ms": 5_000}),
        ("catch_up", {"catch_up": CatchUpPolicy.NONE}),
        ("catch_up.limit", {"catch_up_limit": 1}),
    ],
)
def test_s29_what_is_for_slots_of_a_schedule_is_refused_without_one(
    field: str, changes: dict[str, Any]
) -> None:
    able = replace(SQLITE, control=True)
    with pytest.raises(InvalidError, match="it is for slots of a schedule") as caught:
        resolve(JobSpec("sync", None, **changes), able, 30_000, START)
    assert caught.value.field == field
    assert "<" not in str(caught.value), "the value is shown as it was given"


def test_what_the_backend_has_is_taken() -> None:
    able = Capabilities(
        "later",
        overlap=frozenset({OverlapPolicy.QUEUE}),
        catch_up=frozenset({CatchUpPolicy.ALL}),
        retries=True,
    )
    job = resolved(
        capabilities=able,
        overlap=OverlapPolicy.QUEUE,
        catch_up=CatchUpPolicy.ALL,
        retry=RetrySpec(1),
    )
    assert (job.overlap, job.catch_up) == (OverlapPolicy.QUEUE, CatchUpPolicy.ALL)


# --- Names -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "7", "a.b_c-d:e/f", "x" * 128, "Z9/."])
def test_s32_names_of_the_right_shape_are_taken(name: str) -> None:
    assert check_name("name", name) == name


@pytest.mark.parametrize(
    "name", ["", ".a", "-a", "/a", "a b", "ä", "a\n", "x" * 129, "a\u0660", "a*", "a\x00"]
)
def test_s32_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="1 to 128 characters") as caught:
        check_name("namespace", name)
    assert caught.value.field == "namespace"


def test_s32_a_jobs_name_is_checked() -> None:
    assert refused(name="no spaces").field == "name"


# --- Registrations -----------------------------------------------------------------------


def test_every_bad_job_of_a_registration_is_reported_with_its_place() -> None:
    specs = [
        BARE,
        replace(BARE, name="bad name"),
        BARE,
        replace(BARE, name="later", schedule=None),
        replace(BARE, name="fine"),
    ]
    with pytest.raises(InvalidJobsError) as caught:
        resolve_all(specs, SQLITE, 30_000, START)
    problems = [(index, name, type(error)) for index, name, error in caught.value.problems]
    assert problems == [
        (1, "bad name", InvalidError),
        (2, "sync", InvalidError),
        (3, "later", UnsupportedError),
    ]
    assert "two jobs have this name" in str(caught.value)


def test_good_jobs_come_back_in_order() -> None:
    specs = [replace(BARE, name=name) for name in ("b", "a")]
    assert [job.name for job in resolve_all(specs, SQLITE, 30_000, START)] == ["b", "a"]


def test_too_many_jobs_are_refused_before_any_is_looked_at() -> None:
    with pytest.raises(InvalidError, match="at most 10000 jobs"):
        resolve_all([BARE] * 10_001, SQLITE, 30_000, START)


@pytest.mark.parametrize(("ms", "text"), [(0, "0s"), (5_400_000, "1h30m"), (-250, "-250ms")])
def test_durations_are_shown_as_people_write_them(ms: int, text: str) -> None:
    assert shown(ms) == text


def test_s10_a_jitter_that_outlasts_the_record_of_a_claim_is_refused() -> None:
    """Without a start deadline the jitter sets it: the last to claim must find the first's record."""
    kept = Capabilities("nats:claim", leases=False, kept_ms=3_600_000)
    daily = replace(BARE, schedule=EverySchedule(86_400_000))
    longest_ms = 3_000_000 - limits.START_DEADLINE_OVER_JITTER
    resolved(daily, kept, jitter_ms=longest_ms)
    with pytest.raises(InvalidError, match="jitter is '49m55s1ms': at most 49m55s on nats:claim"):
        resolved(daily, kept, jitter_ms=longest_ms + 1)
    resolved(daily, kept, jitter_ms=longest_ms + 1, start_deadline_ms=longest_ms + 2)


ABLE = Capabilities(
    "able",
    overlap=frozenset(OverlapPolicy),
    catch_up=frozenset(CatchUpPolicy),
    retries=True,
)


def test_a_job_by_name_that_is_not_configured_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidError, match=r"set every or cron in \[jobs\.sync\] of its file"):
        resolved(by_name=True, schedule=None)


def test_s20_the_newest_missed_slot_is_run_where_the_backend_can() -> None:
    assert resolved(capabilities=ABLE).catch_up is CatchUpPolicy.LATEST
    assert resolved().catch_up is CatchUpPolicy.NONE


def test_s18_each_slot_ending_the_one_before_leaves_nothing_to_catch_up() -> None:
    with pytest.raises(InvalidError, match="with overlap=cancel each slot would end the one"):
        resolved(capabilities=ABLE, overlap=OverlapPolicy.CANCEL, catch_up=CatchUpPolicy.ALL)


@pytest.mark.parametrize(
    ("retry", "field"),
    [
        (RetrySpec(0), "retries"),
        (RetrySpec(101), "retries"),
        (RetrySpec(1, factor=0.5), "retry.factor"),
        (RetrySpec(1, factor=101.0), "retry.factor"),
        (RetrySpec(1, delay_ms=-1), "retry.delay"),
        (RetrySpec(1, delay_ms=2_000, max_delay_ms=1_000), "retry.max_delay"),
    ],
)
def test_s22_what_no_pause_can_be_is_refused_by_name(retry: RetrySpec, field: str) -> None:
    with pytest.raises(InvalidError) as caught:
        resolved(capabilities=ABLE, retry=retry)
    assert caught.value.field == field


def test_s22_pauses_grow_to_their_most_and_are_drawn_from_half_on() -> None:
    retry = resolved(capabilities=ABLE, retry=RetrySpec(9, 1_000, 3.0, 20_000)).retry
    assert retry is not None
    assert [retry.longest_pause(n) for n in range(5)] == [1_000, 3_000, 9_000, 20_000, 20_000]
    assert (retry.pause(1, lambda most: 0), retry.pause(1, lambda most: most)) == (3_000, 1_500)


def test_s22_what_is_left_out_of_a_retry_is_decided() -> None:
    job = resolved(capabilities=ABLE, retry=RetrySpec(2))
    assert job.retry is not None
    assert (job.retry.delay_ms, job.retry.factor, job.retry.max_delay_ms) == (1_000, 2.0, 3_600_000)
    assert (job.retries, resolved().retries) == (2, 0)
    slow = resolved(capabilities=ABLE, retry=RetrySpec(1, delay_ms=2 * 3_600_000)).retry
    assert slow is not None
    assert slow.max_delay_ms == 2 * 3_600_000
