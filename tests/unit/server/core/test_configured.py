"""Jobs of the sidecar's configuration, laid over what clients state."""

from __future__ import annotations

import pytest

from anarchon_server.core.configured import NO_LIMIT, laid_over
from anarchon_server.core.errors import InvalidError, InvalidJobsError
from anarchon_server.core.messages import Attached, Reload
from anarchon_server.core.model import (
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
)
from tests.unit.server.core.driver import FakeClient, Sidecar, World, every

BY_NAME = JobSpec("sync", by_name=True)
CONFIGURED = {"sync": JobSpec("sync", EverySchedule(10_000), jitter_ms=0, lease_ms=6_000)}


def test_a_job_that_the_configuration_does_not_have_is_as_it_was_stated() -> None:
    assert laid_over(every(), {}) == (every(), ())


def test_a_job_offered_by_name_is_what_the_configuration_says() -> None:
    spec, notes = laid_over(BY_NAME, CONFIGURED)
    assert spec == CONFIGURED["sync"]
    assert not spec.by_name
    assert notes == ()


def test_s29_a_schedule_for_a_job_that_was_only_triggered_is_said() -> None:
    stated = JobSpec("sync", None)
    job, notes = laid_over(stated, {"sync": JobSpec("sync", EverySchedule(10_000))})
    assert job == JobSpec("sync", EverySchedule(10_000))
    assert notes == ("sync: schedule is every 10s by the sidecar's configuration, not none",)


def test_s22_pauses_before_retries_that_the_configuration_leaves_out_are_the_clients() -> None:
    stated = every(retry=RetrySpec(2, delay_ms=60_000, factor=3.0, max_delay_ms=600_000))
    given = JobSpec(stated.name, retry=RetrySpec(5, delay_ms=5_000))
    spec, (note,) = laid_over(stated, {stated.name: given})
    assert spec.retry == RetrySpec(5, delay_ms=5_000, factor=3.0, max_delay_ms=600_000)
    assert note.endswith(
        "retry is 5 times, delay 5s, factor 3, max_delay 10m by the sidecar's configuration, "
        "not 2 times, delay 1m, factor 3, max_delay 10m"
    )


def test_the_configuration_wins_field_by_field_and_says_so() -> None:
    stated = JobSpec(
        "sync",
        EverySchedule(60_000, 1_000),
        timeout_ms=5_000,
        lease_ms=30_000,
        overlap=OverlapPolicy.SKIP,
        concurrency=3,
        retry=RetrySpec(2),
        cancel_grace_ms=0,
    )
    configured = JobSpec(
        "sync",
        CronSchedule("0 3 * * *", "Europe/Athens"),
        lease_ms=30_000,
        overlap=OverlapPolicy.QUEUE,
        retry=RetrySpec(5),
        cancel_grace_ms=2_000,
    )
    spec, notes = laid_over(stated, {"sync": configured})
    assert spec.schedule == configured.schedule
    assert (spec.timeout_ms, spec.concurrency) == (5_000, 3), "of which it says nothing"
    assert (spec.overlap, spec.retry, spec.cancel_grace_ms) == ("queue", RetrySpec(5), 2_000)
    assert notes == (
        (
            "sync: schedule is cron '0 3 * * *' in Europe/Athens by the sidecar's configuration, "
            "not every 1m offset 1s"
        ),
        "sync: overlap is queue by the sidecar's configuration, not skip",
        "sync: retry is 5 times by the sidecar's configuration, not 2 times",
        "sync: cancel_grace is 2s by the sidecar's configuration, not 0s",
    )


def test_a_duration_of_nothing_is_said_and_a_count_of_nothing_is_not() -> None:
    spec, _ = laid_over(
        every(jitter_ms=2_000, concurrency=4), {"sync": JobSpec("sync", jitter_ms=0)}
    )
    assert (spec.jitter_ms, spec.concurrency) == (0, 4)


OFF = JobSpec("sync", retry=RetrySpec(0), timeout_ms=0, concurrency=NO_LIMIT)


def test_what_the_configuration_switches_off_is_not_set_and_a_note_says_so() -> None:
    stated = every(retry=RetrySpec(2, delay_ms=1_000), timeout_ms=5_000, concurrency=3)
    spec, notes = laid_over(stated, {"sync": OFF})
    assert (spec.retry, spec.timeout_ms, spec.concurrency) == (None, None, 0)
    assert sorted(notes) == [
        "sync: concurrency is none by the sidecar's configuration, not 3",
        "sync: retry is none by the sidecar's configuration, not 2 times, delay 1s",
        "sync: timeout is none by the sidecar's configuration, not 5s",
    ]


@pytest.mark.parametrize("stated", [every(), BY_NAME])
def test_what_nobody_asked_for_may_be_switched_off_too(stated: JobSpec) -> None:
    spec, notes = laid_over(stated, {"sync": OFF})
    assert (spec.retry, spec.timeout_ms, spec.concurrency) == (None, None, 0)
    assert notes == ()


def test_s22_a_failure_is_final_where_the_configuration_switches_retries_off() -> None:
    stated = every(retry=RetrySpec(2), jitter_ms=0)
    _, sidecar, client = started({"sync": JobSpec("sync", retry=RetrySpec(0))}, stated)
    assert client.attached is not None
    assert sidecar.engine.resolve(stated, 0).retries == 0


def started(configured: dict[str, JobSpec], *specs: JobSpec) -> tuple[World, Sidecar, FakeClient]:
    world = World()
    sidecar = Sidecar(world, jobs=configured)
    sidecar.tick()
    sidecar.settle()
    client = sidecar.client(*specs, lasts_ms=100)
    sidecar.settle()
    return world, sidecar, client


def test_a_job_offered_by_name_is_run_by_the_configurations_schedule() -> None:
    world, _, client = started(CONFIGURED, BY_NAME)
    assert client.attached is not None
    assert client.attached.session_ttl_ms == 3_000
    world.run_until(25_000)
    assert world.slots() == [10_000, 20_000]


def test_a_job_offered_by_name_that_is_not_configured_is_refused_by_its_name() -> None:
    _, _, client = started({}, BY_NAME)
    assert isinstance(client.error, InvalidJobsError)
    assert "set every or cron in [jobs.sync] of its file" in str(client.error)


def test_a_job_offered_by_name_whose_configuration_has_no_schedule_is_told_what_is_missing() -> (
    None
):
    _, _, client = started({"sync": JobSpec("sync", lease_ms=6_000)}, BY_NAME)
    assert isinstance(client.error, InvalidJobsError)
    ((_, _, problem),) = client.error.problems
    assert isinstance(problem, InvalidError)
    assert problem.field == "schedule"
    assert "set every or cron in [jobs.sync]" in problem.expected


def test_what_both_say_differently_is_in_the_first_notes_of_the_session() -> None:
    _, _, client = started(CONFIGURED, every(lease_ms=30_000))
    assert client.attached is not None
    (note,) = client.attached.notes
    assert note == "sync: lease is 6s by the sidecar's configuration, not 30s"


def test_a_reload_changes_schedules_and_policies() -> None:
    world, sidecar, client = started(CONFIGURED, BY_NAME)
    world.run_until(12_000)
    sidecar.feed(Reload({"sync": JobSpec("sync", EverySchedule(3_000), jitter_ms=0)}))
    sidecar.settle()
    world.run_until(19_000)
    assert world.slots() == [10_000, 15_000, 18_000]
    assert len(sidecar.logged("reloaded")) == 1
    assert len([e for e in client.events if isinstance(e, Attached)]) == 1, "the session goes on"


def test_what_a_reload_says_otherwise_than_an_attached_client_is_logged_once() -> None:
    _, sidecar, _ = started({}, every(lease_ms=30_000))
    sooner = {"sync": JobSpec("sync", lease_ms=6_000)}
    for jobs in (sooner, sooner, {"sync": JobSpec("sync", lease_ms=9_000)}):
        sidecar.feed(Reload(jobs))
    assert [line.fields["note"] for line in sidecar.logged("job_overridden")] == [
        "sync: lease is 6s by the sidecar's configuration, not 30s",
        "sync: lease is 9s by the sidecar's configuration, not 30s",
    ]


def test_s28_after_a_reload_the_newest_subscribe_makes_the_slots_as_before() -> None:
    world, sidecar, client = started({}, every(20_000))
    sidecar.client(every(15_000), name="second")
    client.subscribe()
    client.keep_alive()
    sidecar.feed(Reload({"sync": JobSpec("sync", timeout_ms=60_000)}))
    sidecar.settle()
    world.run_until(25_000)
    assert world.slots() == [20_000]


def test_s15_a_shorter_lease_counts_once_every_client_was_answered_with_it() -> None:
    world, sidecar, _ = started({}, every(lease_ms=30_000))
    world.run_until(10_500)
    shorter = every(lease_ms=30_000)
    sidecar.feed(Reload({"sync": JobSpec("sync", lease_ms=3_000)}))
    world.run_until(20_500)
    assert world.slots() == [10_000], "the client may still believe in its session for 15 s"
    assert shorter.lease_ms == 30_000
    world.run_until(40_500)
    claims = [claim for claim in sidecar.claims if claim.lease_ms == 3_000]
    assert claims
    assert 30_000 in world.slots()


@pytest.mark.parametrize(
    "jobs",
    [{}, {"sync": JobSpec("sync", EverySchedule(10_000), jitter_ms=10_000)}],
)
def test_a_reload_that_a_job_does_not_survive_changes_nothing(jobs: dict[str, JobSpec]) -> None:
    world, sidecar, client = started(CONFIGURED, BY_NAME)
    sidecar.feed(Reload(jobs, "jobs.toml"))
    (refused,) = sidecar.logged("reload_refused")
    assert refused.fields["file"] == "jobs.toml"
    world.run_until(25_000)
    assert world.slots() == [10_000, 20_000]
    assert client.error is None


def test_what_is_previewed_is_what_would_be_registered() -> None:
    _, sidecar, _ = started(CONFIGURED, BY_NAME)
    job = sidecar.engine.resolve(BY_NAME, 0)
    assert (job.lease_ms, job.schedule_id) == (6_000, "every 10s")
