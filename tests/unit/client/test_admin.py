"""`AdminClient` against a real server that keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Event
from typing import Any

import grpc
import pytest

import anarchon
from anarchon.admin import AdminClient
from anarchon.v1 import admin_pb2, admin_pb2_grpc, run_pb2

RUNS = [run_pb2.Run(job="sync", slot=slot) for slot in range(1_200, 0, -1)]


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers as a sidecar with 1,200 runs, 3 jobs and 2 instances would."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.gone = Event()

    def ListJobs(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        jobs = [admin_pb2.Job(description=f"job {number}") for number in range(3)]
        if not request.page_token:
            return admin_pb2.ListJobsResponse(jobs=jobs[:2], next_page_token="2")
        return admin_pb2.ListJobsResponse(jobs=jobs[2:])

    def GetJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.set_trailing_metadata((("anarchon-reason", "JOB_NOT_FOUND"),))
        context.abort(grpc.StatusCode.NOT_FOUND, f"no job {request.job!r}")

    def ListRuns(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(admin_pb2.ListRunsRequest.FromString(request.SerializeToString()))
        start = int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(RUNS) else ""
        return admin_pb2.ListRunsResponse(runs=RUNS[start:end], next_page_token=token)

    def WatchRuns(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        if request.job == "nowhere":
            context.set_trailing_metadata((("anarchon-reason", "STORE_UNAVAILABLE"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the store does not answer now")
        context.add_callback(self.gone.set)
        if request.job == "slow":
            self.gone.wait()
            return
        context.send_initial_metadata(())
        for slot in (1, 2):
            yield admin_pb2.WatchRunsResponse(run=run_pb2.Run(job="sync", slot=slot))
        if request.job == "stopping":
            context.set_trailing_metadata((("anarchon-reason", "DRAINING"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "the sidecar is going away")
        self.gone.wait()

    def GetRun(self, request: Any, context: Any) -> Any:  # noqa: N802
        return admin_pb2.GetRunResponse(run=run_pb2.Run(job=request.job, slot=request.slot))

    def PreviewSlots(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return admin_pb2.PreviewSlotsResponse(slots=range(request.count))

    def ListInstances(self, request: Any, context: Any) -> Any:  # noqa: N802
        instance = admin_pb2.Instance(instance_id=request.page_token or "one")
        token = "" if request.page_token else "two"
        return admin_pb2.ListInstancesResponse(instances=[instance], next_page_token=token)

    def GetInstance(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not request.instance_id:
            context.set_trailing_metadata((("anarchon-scope", "instance=an%20swering:1"),))
        instance = admin_pb2.Instance(instance_id=request.instance_id or "answering")
        return admin_pb2.GetInstanceResponse(instance=instance)


@pytest.fixture
def service() -> Admin:
    return Admin()  # type: ignore[abstract] # what is not asked for here is not answered


@pytest.fixture
def admin(service: Admin) -> Iterator[AdminClient]:
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with AdminClient(f"127.0.0.1:{port}") as admin:
        yield admin
    service.gone.set()
    server.stop(None).wait(10)


def test_jobs_come_from_all_pages(admin: AdminClient) -> None:
    assert [job.description for job in admin.list_jobs()] == ["job 0", "job 1", "job 2"]


def test_a_job_that_there_is_not_is_not_found(admin: AdminClient) -> None:
    with pytest.raises(anarchon.NotFoundError, match="no job 'none'") as raised:
        admin.get_job("none")
    assert raised.value.reason == "JOB_NOT_FOUND"


def test_runs_come_from_all_pages_newest_first(admin: AdminClient, service: Admin) -> None:
    runs = list(admin.list_runs(job="sync", states=[run_pb2.RUN_STATE_FAILED], from_slot=7))
    assert runs == RUNS
    assert [asked.page_token for asked in service.asked] == ["", "500", "1000"]
    assert service.asked[0].job == "sync"
    assert list(service.asked[0].states) == [run_pb2.RUN_STATE_FAILED]
    assert service.asked[0].from_slot == 7


@pytest.mark.parametrize(("limit", "calls"), [(1, 1), (500, 1), (501, 2), (2_000, 3)])
def test_a_limit_ends_the_pages(admin: AdminClient, service: Admin, limit: int, calls: int) -> None:
    assert list(admin.list_runs(limit=limit)) == RUNS[:limit]
    assert len(service.asked) == calls


def test_a_limit_of_nothing_is_refused(admin: AdminClient) -> None:
    with pytest.raises(anarchon.ClientError, match="limit 0: must be at least 1"):
        list(admin.list_runs(limit=0))


def test_one_run_and_one_instance_can_be_had(admin: AdminClient) -> None:
    assert admin.get_run("sync", 5) == run_pb2.Run(job="sync", slot=5)
    assert [found.instance_id for found in admin.list_instances()] == ["one", "two"]
    assert admin.get_instance().instance_id == "answering"
    assert admin.get_instance("two").instance_id == "two"


def test_an_answer_that_covers_one_instance_says_so(admin: AdminClient) -> None:
    assert admin.scope == ""
    admin.get_instance()
    assert admin.scope == "instance=an swering:1"
    admin.get_instance("two")
    assert admin.scope == ""


def test_it_is_among_the_public_names() -> None:
    assert anarchon.AdminClient is AdminClient


def test_slots_of_a_name_or_of_any_job_can_be_seen(admin: AdminClient, service: Admin) -> None:
    assert admin.preview_slots("sync", count=3) == [0, 1, 2]
    assert service.asked[0].job == "sync"
    job = anarchon.Job(lambda: None, anarchon.Every("10s"), name="other")
    admin.preview_slots(job, after=datetime(2026, 10, 10, tzinfo=UTC))
    assert service.asked[1].spec == job.spec
    assert service.asked[1].after_time.ToDatetime(UTC) == datetime(2026, 10, 10, tzinfo=UTC)
    with pytest.raises(anarchon.ClientError, match="must have a time zone"):
        admin.preview_slots("sync", after=datetime(2026, 10, 10))  # noqa: DTZ001


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: list(admin.list_jobs()),
        lambda admin: admin.get_run("sync", 5),
    ],
)
def test_no_sidecar_is_told_with_its_address(call: Callable[[AdminClient], object]) -> None:
    with (
        AdminClient("127.0.0.1:1") as admin,
        pytest.raises(
            anarchon.SidecarUnavailableError, match=r"no sidecar answers at 127\.0\.0\.1:1"
        ),
    ):
        call(admin)
    assert admin.address == "127.0.0.1:1"


# ── Watching ────────────────────────────────────────────────────────────────────────────────────


def test_watched_runs_come_as_they_change(admin: AdminClient, service: Admin) -> None:
    with admin.watch_runs(job="sync", from_slot=7, until_slot=9) as changes:
        assert [next(changes).slot, next(changes).slot] == [1, 2]
    asked = service.asked[-1]
    assert (asked.job, asked.from_slot, asked.until_slot) == ("sync", 7, 9)
    assert list(changes) == [], "closed"
    assert service.gone.wait(10), "the sidecar is told"


def test_a_watch_that_the_sidecar_ends_says_why(admin: AdminClient) -> None:
    changes = admin.watch_runs(job="stopping")
    with pytest.raises(anarchon.SidecarUnavailableError, match="going away") as raised:
        list(changes)
    assert raised.value.reason == "DRAINING"


def test_a_watch_that_cannot_begin_is_refused_at_once(
    admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(anarchon.SidecarUnavailableError, match="the store does not answer"):
        admin.watch_runs(job="nowhere")
    with pytest.raises(anarchon.ClientError, match="cannot be sent"):
        admin.watch_runs(from_slot=2**70)
    monkeypatch.setattr(anarchon.admin, "TIMEOUT_S", 0.1)
    with pytest.raises(
        anarchon.SidecarUnavailableError, match=r"did not begin to watch within 0\.1 s"
    ):
        admin.watch_runs(job="slow")


def test_no_sidecar_to_watch_at_is_told_with_its_address() -> None:
    with (
        AdminClient("127.0.0.1:1") as admin,
        pytest.raises(anarchon.SidecarUnavailableError, match="no sidecar answers"),
    ):
        admin.watch_runs()


# ── Triggering ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda admin: admin.trigger_run("sync", payload=bytes(9 * 1024 * 1024)),
            "payload of 9437184 bytes: must be at most 65536 bytes",
        ),
        (
            lambda admin: admin.trigger_run("sync", payload=bytes(64 * 1024 + 1)),
            "payload of 65537 bytes: must be at most 65536 bytes",
        ),
        (
            lambda admin: admin.trigger_run("sync", request_id="é" * 65),
            "request_id of 130 bytes: must be at most 128 bytes",
        ),
        (
            lambda admin: admin.pause_job("sync", reason="x" * 1_025),
            "reason of 1025 bytes: must be at most 1024 bytes",
        ),
        (
            lambda admin: admin.cancel_run("sync", 1, reason="x" * 9_000_000),
            "reason of 9000000 bytes: must be at most 1024 bytes",
        ),
        (lambda admin: admin.get_job("x" * 9_000_000), "a request of 9000005 bytes: must be"),
    ],
)
def test_what_is_too_long_is_named_and_not_sent(
    admin: AdminClient, service: Admin, call: Callable[[AdminClient], object], said: str
) -> None:
    with pytest.raises(anarchon.ClientError, match=said):
        call(admin)
    assert service.asked == []
