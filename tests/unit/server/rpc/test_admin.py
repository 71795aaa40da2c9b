"""AdminService on a real gRPC server, with the real engine on the memory store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from anarchon.v1 import admin_pb2, job_pb2, run_pb2, session_pb2
from anarchon_server.core import limits
from anarchon_server.core.engine import SessionView
from anarchon_server.core.errors import StoreUnavailable
from anarchon_server.core.messages import Reload
from anarchon_server.core.model import (
    Definition,
    EverySchedule,
    Instance,
    JobSpec,
    JobView,
    RunView,
)
from anarchon_server.core.store import Capabilities, Reply, RunQuery
from anarchon_server.rpc import admin as rpc_admin
from anarchon_server.rpc import conversion as wire
from tests.unit.server.sidecars import (
    Sidecar,
    error_of,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
    trailer,
)


async def subscribe(sidecar: Sidecar, *jobs: job_pb2.JobSpec) -> Any:
    """A session that has been kept alive, its jobs in the store."""
    request = subscribe_request(*jobs)
    stream = sidecar.sessions.Subscribe(request)
    await stream.read()
    await sidecar.sessions.KeepAlive(session_pb2.KeepAliveRequest(session_id=request.session_id))
    await sidecar.loop.settled()
    return stream


async def run_one(sidecar: Sidecar, outcome: run_pb2.Outcome) -> session_pb2.Assignment:
    stream = await subscribe(sidecar, every("fast", 100))
    assignment: session_pb2.Assignment = (await stream.read()).runs.assignments[0]
    result = session_pb2.Result(token=assignment.token, outcome=outcome)
    await sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[result]))
    return assignment


# ── Jobs ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_is_shown_with_its_schedule_in_words_and_its_next_slots(
    sidecar: Sidecar,
) -> None:
    cron = job_pb2.JobSpec(
        name="report", cron=job_pb2.CronSchedule(expression="0 8 * * *", time_zone="Europe/Athens")
    )
    await subscribe(sidecar, every("sync", 10_000), cron)
    listed = (await sidecar.admin.ListJobs(admin_pb2.ListJobsRequest())).jobs
    assert [job.spec.name for job in listed] == ["report", "sync"]
    report, sync = listed
    assert report.spec == cron
    assert report.description
    assert sync.description == "every 10s"
    assert len(sync.next_slots) == limits.NEXT_SLOTS
    assert all(slot % 10_000 == 0 for slot in sync.next_slots)
    assert sync.instance_ids == ["test:1"]
    assert not sync.paused
    one = await sidecar.admin.GetJob(admin_pb2.GetJobRequest(job="sync"))
    assert one.job.spec == sync.spec


async def test_an_unknown_job_is_not_found(sidecar: Sidecar) -> None:
    error = await error_of(sidecar.admin.GetJob(admin_pb2.GetJobRequest(job="nope")))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert trailer(error) == "JOB_NOT_FOUND"
    error = await error_of(sidecar.admin.GetJob(admin_pb2.GetJobRequest(job="\0")))
    assert "no zero character" in error.details()


async def test_jobs_come_in_pages(sidecar: Sidecar) -> None:
    await subscribe(sidecar, *(every(f"job-{n}") for n in range(5)))
    names, token = [], ""
    while True:
        page = await sidecar.admin.ListJobs(
            admin_pb2.ListJobsRequest(page_size=2, page_token=token)
        )
        assert len(page.jobs) <= 2
        names += [job.spec.name for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert names == [f"job-{n}" for n in range(5)]


async def test_the_last_run_of_a_job_is_shown(sidecar: Sidecar) -> None:
    run = await run_one(sidecar, run_pb2.Outcome(success=run_pb2.Success(result="ok")))
    job = (await sidecar.admin.GetJob(admin_pb2.GetJobRequest(job="fast"))).job
    assert job.last_run.slot >= run.slot
    assert job.last_run.state == run_pb2.RUN_STATE_SUCCESS


async def test_a_paused_job_shows_no_next_slots(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(sidecar, every("sync"))
    reply = await sidecar.store.jobs((), "", 9)
    (view,) = reply.answers
    paused = JobView(
        view.name, view.spec, view.definition_at, True, (), None, paused_at=1, pause_reason="why"
    )

    async def jobs(*_: object) -> Reply[JobView]:
        return Reply(reply.store_at, (paused,))

    monkeypatch.setattr(sidecar.store, "jobs", jobs)
    job = (await sidecar.admin.GetJob(admin_pb2.GetJobRequest(job="sync"))).job
    assert (job.paused, job.pause_reason, job.definitions_differ) == (True, "why", True)
    assert not job.next_slots
    assert job.description


# ── Slots ───────────────────────────────────────────────────────────────────────────────────────


async def test_slots_of_any_definition_are_previewed(sidecar: Sidecar) -> None:
    after = Timestamp(seconds=1_791_633_600)
    request = admin_pb2.PreviewSlotsRequest(spec=every("x", 10_000), after_time=after, count=2)
    answer = await sidecar.admin.PreviewSlots(request)
    assert answer.slots == [1_791_633_610_000, 1_791_633_620_000]


async def test_slots_of_a_definition_are_previewed_as_the_configuration_makes_it(
    sidecar: Sidecar,
) -> None:
    """As they would be if a client of this sidecar offered it: also by its name alone."""
    sidecar.loop.feed(Reload({"x": JobSpec("x", EverySchedule(3_600_000))}))
    after = Timestamp(seconds=1_791_633_600)
    for spec in (every("x", 10_000), job_pb2.JobSpec(name="x", by_name=True)):
        request = admin_pb2.PreviewSlotsRequest(spec=spec, after_time=after, count=1)
        answer = await sidecar.admin.PreviewSlots(request)
        assert answer.slots == [1_791_637_200_000]


async def test_s9_previewed_slots_are_of_1970_to_2199(sidecar: Sidecar) -> None:
    async def slots_after(seconds: int) -> Any:
        request = admin_pb2.PreviewSlotsRequest(
            spec=every("x", 10_000), after_time=Timestamp(seconds=seconds), count=2
        )
        return (await sidecar.admin.PreviewSlots(request)).slots

    assert await slots_after(-62_135_596_800) == [0, 10_000]
    assert await slots_after(7_258_118_400 - 11) == [7_258_118_390_000]
    assert await slots_after(253_402_300_799) == []


async def test_slots_of_a_registered_job_are_previewed(sidecar: Sidecar) -> None:
    await subscribe(sidecar, every("sync", 10_000))
    answer = await sidecar.admin.PreviewSlots(admin_pb2.PreviewSlotsRequest(job="sync"))
    assert len(answer.slots) == 10


@pytest.mark.parametrize(
    ("request_", "right"),
    [
        (admin_pb2.PreviewSlotsRequest(), "set job or spec"),
        (admin_pb2.PreviewSlotsRequest(spec=every("x"), count=1_001), "1 to 1000"),
        (admin_pb2.PreviewSlotsRequest(spec=every("x"), count=-1), "1 to 1000"),
        (admin_pb2.PreviewSlotsRequest(spec=every("x", 50)), "at least 100ms"),
        (admin_pb2.PreviewSlotsRequest(job="nope"), "no job 'nope'"),
        (
            admin_pb2.PreviewSlotsRequest(
                spec=job_pb2.JobSpec(name="x", cron=job_pb2.CronSchedule(expression="0 0 30 2 *"))
            ),
            "expression",
        ),
        (
            admin_pb2.PreviewSlotsRequest(spec=every("x"), after_time=Timestamp(seconds=2**62)),
            "after_time is 'seconds 4611686018427387904, nanos 0': a time in the years 1 to 9999",
        ),
        (
            admin_pb2.PreviewSlotsRequest(spec=every("x"), after_time=Timestamp(seconds=-(2**62))),
            "a time in the years 1 to 9999",
        ),
        (
            admin_pb2.PreviewSlotsRequest(
                spec=job_pb2.JobSpec(name="x", jitter=Duration(seconds=1, nanos=-1))
            ),
            "jitter is ",
        ),
    ],
)
async def test_a_bad_preview_is_refused(sidecar: Sidecar, request_: Any, right: str) -> None:
    assert right in (await error_of(sidecar.admin.PreviewSlots(request_))).details()


# ── Runs ────────────────────────────────────────────────────────────────────────────────────────


async def test_runs_are_listed_without_traces_and_got_with_them(sidecar: Sidecar) -> None:
    failure = run_pb2.Failure(type="ValueError", message="no", stack_trace="line 1")
    run = await run_one(sidecar, run_pb2.Outcome(failure=failure))
    listed = await sidecar.admin.ListRuns(
        admin_pb2.ListRunsRequest(job="fast", states=[run_pb2.RUN_STATE_FAILED])
    )
    (found,) = [r for r in listed.runs if r.slot == run.slot]
    (attempt,) = found.attempts
    assert (attempt.instance_id, attempt.attempt) == ("test:1", 1)
    assert attempt.fence == run.fence
    assert attempt.failure.message == "no"
    assert not attempt.failure.stack_trace
    got = await sidecar.admin.GetRun(admin_pb2.GetRunRequest(job="fast", slot=run.slot))
    assert got.run.attempts[0].failure.stack_trace == "line 1"


async def test_runs_come_in_pages_newest_first_and_filtered(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[RunQuery] = []
    await run_one(sidecar, run_pb2.Outcome(success=run_pb2.Success()))
    real = sidecar.store.runs

    async def runs(query: RunQuery) -> Reply[RunView]:
        queries.append(query)
        return await real(query)

    monkeypatch.setattr(sidecar.store, "runs", runs)
    request = admin_pb2.ListRunsRequest(
        job="fast", instance_id="test:1", from_slot=5, until_slot=2**52, page_size=1
    )
    page = await sidecar.admin.ListRuns(request)
    (query,) = queries
    assert (query.job, query.instance_id) == ("fast", "test:1")
    assert (query.from_slot, query.until_slot) == (5, 2**52)
    request.page_token = rpc_admin._page_token(str(page.runs[0].slot), "fast")
    older = await sidecar.admin.ListRuns(request)
    assert all(run.slot < page.runs[0].slot for run in older.runs)


async def test_a_page_also_ends_at_two_mebibytes() -> None:
    def run(size: int) -> run_pb2.Run:
        return run_pb2.Run(reason="x" * size)

    page, more = rpc_admin._page_cut([run(900_000)] * 3, 50)
    assert (len(page), more) == (2, True)
    page, more = rpc_admin._page_cut([run(3_000_000)] * 2, 50)
    assert (len(page), more) == (1, True)
    page, more = rpc_admin._page_cut([run(1)] * 3, 3)
    assert (len(page), more) == (3, False)


@pytest.mark.parametrize(
    ("request_", "right"),
    [
        (admin_pb2.ListRunsRequest(page_size=501), "1 to 500"),
        (admin_pb2.ListRunsRequest(page_size=-1), "1 to 500"),
        (admin_pb2.ListRunsRequest(page_token="???"), "next_page_token of the page before"),
        (admin_pb2.ListRunsRequest(page_token="YQ=="), "next_page_token of the page before"),
        (admin_pb2.ListRunsRequest(page_token="YQpi"), "next_page_token of the page before"),
        (
            admin_pb2.ListRunsRequest(page_token=rpc_admin._page_token("1" * 30, "a")),
            "next_page_token of the page before",
        ),
        (admin_pb2.ListRunsRequest(states=[run_pb2.RUN_STATE_UNSPECIFIED]), "name a state"),
        (admin_pb2.ListRunsRequest(page_token=rpc_admin._page_token("1", "\0")), "next_page_token"),
        (admin_pb2.ListRunsRequest(job="a\0"), "job is 'a\\x00': a name has no zero character"),
        (admin_pb2.ListRunsRequest(instance_id="\0"), "instance_id is"),
        (admin_pb2.ListRunsRequest(from_slot=2**63 - 1), "from_slot is 9223372036854775807: mill"),
        (admin_pb2.ListRunsRequest(until_slot=-(2**63)), "until_slot is -9223372036854775808: m"),
    ],
)
async def test_a_bad_list_request_is_refused(sidecar: Sidecar, request_: Any, right: str) -> None:
    error = await error_of(sidecar.admin.ListRuns(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert right in error.details()


async def test_a_page_that_the_store_ended_early_goes_on_where_it_looked_to(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunQuery] = []

    async def runs(query: RunQuery) -> Reply[RunView]:
        asked.append(query)
        return Reply(1, (), looked_to=None if query.after else (7, "a"))

    monkeypatch.setattr(sidecar.store, "runs", runs)
    page = await sidecar.admin.ListRuns(admin_pb2.ListRunsRequest())
    assert not page.runs
    page = await sidecar.admin.ListRuns(admin_pb2.ListRunsRequest(page_token=page.next_page_token))
    assert page.next_page_token == ""
    assert [query.after for query in asked] == [None, (7, "a")]


async def test_an_unknown_run_is_not_found(sidecar: Sidecar) -> None:
    error = await error_of(sidecar.admin.GetRun(admin_pb2.GetRunRequest(job="a", slot=1)))
    assert trailer(error) == "RUN_NOT_FOUND"
    error = await error_of(sidecar.admin.GetRun(admin_pb2.GetRunRequest(job="\0")))
    assert "no zero character" in error.details()
    error = await error_of(sidecar.admin.GetRun(admin_pb2.GetRunRequest(job="a", slot=2**62)))
    assert "milliseconds since 1970" in error.details()
    error = await error_of(sidecar.admin.GetRun(admin_pb2.GetRunRequest()))
    assert "name the run's job" in error.details()


@pytest.fixture
def alone(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    """A sidecar on a backend that keeps no history of the namespace."""
    without = property(lambda _: Capabilities("rabbitmq", history=False))
    monkeypatch.setattr(type(sidecar.store), "capabilities", without)
    return sidecar


async def scope_of(call: Any) -> str | None:
    """Whose the answer is, as its trailing metadata says."""
    await call
    said = dict(await call.trailing_metadata())
    value = said.get(rpc_admin.SCOPE_KEY)
    assert value is None or isinstance(value, str)
    return value


def reads(sidecar: Sidecar) -> list[Any]:
    """A call of every method that reads from the store."""
    admin = sidecar.admin
    return [
        admin.ListJobs(admin_pb2.ListJobsRequest()),
        admin.GetJob(admin_pb2.GetJobRequest(job="a")),
        admin.ListRuns(admin_pb2.ListRunsRequest()),
        admin.ListInstances(admin_pb2.ListInstancesRequest()),
        admin.GetInstance(admin_pb2.GetInstanceRequest()),
    ]


async def test_s30_a_backend_without_history_answers_for_the_instance_and_says_so(
    alone: Sidecar,
) -> None:
    stream = await subscribe(alone, every("a"))
    assert [await scope_of(call) for call in reads(alone)] == ["instance=test:1"] * 5
    stream.cancel()


async def test_s30_a_backend_with_history_answers_for_the_namespace(sidecar: Sidecar) -> None:
    stream = await subscribe(sidecar, every("a"))
    assert [await scope_of(call) for call in reads(sidecar)] == [None] * 5
    stream.cancel()


async def test_what_another_instance_may_know_is_not_found_here_and_why(alone: Sidecar) -> None:
    admin = alone.admin
    for call, own in (
        (admin.GetRun(admin_pb2.GetRunRequest(job="a", slot=1)), "the runs that it won"),
        (admin.GetJob(admin_pb2.GetJobRequest(job="b")), "the jobs of its own sessions"),
        (admin.GetInstance(admin_pb2.GetInstanceRequest(instance_id="o")), "itself: ask that one"),
    ):
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        expected = f"rabbitmq keeps no history of the namespace: test:1 knows only {own}"
        assert error.details().endswith(expected)


# ── Instances ───────────────────────────────────────────────────────────────────────────────────


async def test_the_instance_that_answers_shows_its_sessions(sidecar: Sidecar) -> None:
    stream = await subscribe(sidecar, every("a"), every("b"))
    instance = (await sidecar.admin.GetInstance(admin_pb2.GetInstanceRequest())).instance
    assert instance.instance_id == "test:1"
    assert instance.incarnation == "f" * 32
    assert instance.namespace == "default"
    assert [session.jobs_total for session in instance.sessions] == [2]
    assert instance.backend == "memory"
    assert instance.ready
    (session,) = instance.sessions
    assert sorted(session.jobs) == ["a", "b"]
    assert session.client.language == "python"
    assert session.max_concurrency == 10
    assert session.HasField("keep_alive_time")
    stream.cancel()


@pytest.mark.parametrize(("count", "named"), [(1, 10_000), (4, 4_096), (64, 256)])
def test_sessions_with_very_many_jobs_fit_into_one_message(count: int, named: int) -> None:
    names = tuple(f"{number:05d}".ljust(125, "x") for number in range(10_000))
    talkative = session_pb2.ClientInfo(
        language="é" * 200, version="é" * 200, host="é" * 200, features=["é" * 200] * 200
    )
    view = SessionView("s" * 36, wire.client_in(talkative), names, 1, 0, None)
    instance = admin_pb2.Instance(sessions=rpc_admin._sessions_out([view] * count))
    assert instance.ByteSize() < limits.MESSAGE_BYTES
    assert len(instance.sessions) == count
    for session in instance.sessions:
        assert session.jobs_total == 10_000
        assert tuple(session.jobs) == names[:named]


async def test_instances_are_listed_and_others_are_found_in_the_store(sidecar: Sidecar) -> None:
    await subscribe(sidecar, every("a"))
    (listed,) = (await sidecar.admin.ListInstances(admin_pb2.ListInstancesRequest())).instances
    assert listed.instance_id == "test:1"
    after = rpc_admin._page_token(listed.instance_id, listed.incarnation)
    rest = await sidecar.admin.ListInstances(admin_pb2.ListInstancesRequest(page_token=after))
    assert not rest.instances
    error = await error_of(
        sidecar.admin.GetInstance(admin_pb2.GetInstanceRequest(instance_id="other:1"))
    )
    assert trailer(error) == "INSTANCE_NOT_FOUND"


# ── Refusals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("PauseJob", admin_pb2.PauseJobRequest(job="a")),
        ("ResumeJob", admin_pb2.ResumeJobRequest(job="a")),
        ("TriggerRun", admin_pb2.TriggerRunRequest(job="a")),
        ("CancelRun", admin_pb2.CancelRunRequest(job="a")),
    ],
)
async def test_what_the_backend_cannot_do_is_refused_by_name(
    method: str, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar(leases=False)
    less = replace(sidecar.store.capabilities, control=False)
    monkeypatch.setattr(type(sidecar.store), "capabilities", less)
    error = await error_of(getattr(sidecar.admin, method)(request_))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert trailer(error) == "UNSUPPORTED"
    feature = method.removesuffix("Job").removesuffix("Run").lower()
    assert f"{feature} is not supported by memory:claim; backends that can: " in error.details()
    await stop_sidecar(sidecar)


async def failed_twice(sidecar: Sidecar) -> run_pb2.Run:
    """A triggered run that waits for its third attempt."""
    job = every("a")
    job.retry.retries = 5
    stream = await subscribe(sidecar, job)
    made: run_pb2.Run = (await sidecar.admin.TriggerRun(admin_pb2.TriggerRunRequest(job="a"))).run
    for pause in (Duration(nanos=1_000_000), Duration(seconds=3_600)):
        token = (await stream.read()).runs.assignments[0].token
        failure = run_pb2.Failure(type="ValueError", retry_after=pause)
        result = session_pb2.Result(token=token, outcome=run_pb2.Outcome(failure=failure))
        await sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[result]))
    return made


async def test_s29_a_run_that_is_cancelled_is_answered_with_all_its_attempts(
    sidecar: Sidecar,
) -> None:
    made = await failed_twice(sidecar)
    request = admin_pb2.CancelRunRequest(job="a", slot=made.slot)
    ended = (await sidecar.admin.CancelRun(request)).run
    assert (ended.state, ended.reason) == (run_pb2.RUN_STATE_FAILED, "cancelled")
    assert [each.attempt for each in ended.attempts] == [1, 2]


async def test_s29_a_cancel_that_is_done_is_answered_though_the_run_cannot_be_read_then(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await failed_twice(sidecar)

    async def away(_: RunQuery) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(sidecar.store, "runs", away)
    request = admin_pb2.CancelRunRequest(job="a", slot=made.slot)
    ended = (await sidecar.admin.CancelRun(request)).run
    assert ended.state == run_pb2.RUN_STATE_FAILED
    assert [each.attempt for each in ended.attempts] == [2], "the newest is in the run itself"


async def test_s1_where_the_clock_is_too_far_off_jobs_are_neither_resumed_nor_triggered(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store's clock a year ahead would settle is never claimed. Pauses go on."""
    await subscribe(sidecar, every("a"))
    wrong = replace(sidecar.loop.status(), clock_usable=False, reasons=("a year ahead",))
    monkeypatch.setattr(sidecar.loop, "status", lambda: wrong)
    await sidecar.admin.PauseJob(admin_pb2.PauseJobRequest(job="a"))
    for call in (
        sidecar.admin.ResumeJob(admin_pb2.ResumeJobRequest(job="a")),
        sidecar.admin.TriggerRun(admin_pb2.TriggerRunRequest(job="a")),
    ):
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "a year ahead" in error.details()
    (view,) = (await sidecar.store.jobs(("a",), "", 1)).answers
    assert view.paused_at is not None
    assert not (await sidecar.admin.ListRuns(admin_pb2.ListRunsRequest())).runs


async def test_s29_what_is_configured_here_is_not_about_what_others_have_registered(
    sidecar: Sidecar,
) -> None:
    """This sidecar's file has changed since the one that runs the job has read it."""
    theirs = Definition(JobSpec("a", EverySchedule(60_000)), "every 1m", limits.CATCH_UP_WINDOW)
    await sidecar.store.register(Instance("other:1", "e" * 32), [theirs])
    sidecar.loop.feed(Reload({"a": JobSpec("a", EverySchedule(3_600_000))}))
    await sidecar.admin.PauseJob(admin_pb2.PauseJobRequest(job="a"))
    await sidecar.admin.ResumeJob(admin_pb2.ResumeJobRequest(job="a"))
    (view,) = (await sidecar.store.jobs(("a",), "", 1)).answers
    assert view.paused_at is None


async def test_s27_while_the_store_is_away_reads_are_unavailable(sidecar: Sidecar) -> None:
    sidecar.loop.store_open = False
    for call in (
        sidecar.admin.ListJobs(admin_pb2.ListJobsRequest()),
        sidecar.admin.ListRuns(admin_pb2.ListRunsRequest()),
        sidecar.admin.ListInstances(admin_pb2.ListInstancesRequest()),
    ):
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert trailer(error) == "STORE_UNAVAILABLE"
    assert (await sidecar.admin.GetInstance(admin_pb2.GetInstanceRequest())).instance.instance_id
