"""`AdminClient`: what people and tools ask a running sidecar. Imports the standard library, grpc, the
wire's messages and the rest of the client.

Answers are the protocol's own messages (`anarchon.v1`). Calls block; each has 10 s, and a watch goes on
until it is closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import grpc
from google.protobuf.message import Message

from anarchon._errors import ClientError, SidecarUnavailableError
from anarchon._jobs import Job
from anarchon._session import MESSAGE_MAX_BYTES
from anarchon._transport import CallToken, Endpoint
from anarchon.v1 import admin_pb2, admin_pb2_grpc, run_pb2

TIMEOUT_S = 10.0
SCOPE_KEY = "anarchon-scope"
"""In the trailing metadata of an answer that covers less than the namespace: what it covers."""

PAYLOAD_MAX_BYTES = 64 * 1024
"""The most that can be handed to a handler by `AdminClient.trigger_run`."""

_REASON_MAX_BYTES = 1_024
_NAME_MAX_BYTES = 128
_PAGE_MAX = 500
_RequestT = TypeVar("_RequestT", bound=Message)
_ResponseT = TypeVar("_ResponseT")


class AdminClient:
    """Asks the sidecar at `address` about jobs, runs and instances of its whole namespace.

    `address`, `token_file` and `credentials` are those of `AnarchonClient`. Methods raise
    `SidecarUnavailableError` where no sidecar answers, `NotFoundError` for what there is not,
    `UnsupportedError` for what its backend cannot do, `RefusedError` for a bad argument, and
    `ClientError` for one that cannot even be sent.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._endpoint = Endpoint.of(address, credentials, token_file)
        self._token = CallToken(self._endpoint.token_file)
        self._endpoint.check_socket()
        self._channel = self._endpoint.sync_channel()
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._scope = ""

    @property
    def address(self) -> str:
        """Where the sidecar is."""
        return self._endpoint.address

    @property
    def scope(self) -> str:
        """What the last answer covers: empty for the whole namespace, "instance=ID" for what that
        instance knows of itself, as its store keeps no history.
        """
        return self._scope

    def list_jobs(self) -> Iterator[admin_pb2.Job]:
        """Yield all jobs, by name; pages are fetched as they are needed."""
        request = admin_pb2.ListJobsRequest(page_size=_PAGE_MAX)
        while True:
            page = self._call(self._stub.ListJobs, request)
            yield from page.jobs
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def get_job(self, job: str) -> admin_pb2.Job:
        """Return one job. Raises `NotFoundError`."""
        with _sendable():
            request = admin_pb2.GetJobRequest(job=job)
        return self._call(self._stub.GetJob, request).job

    def list_runs(
        self,
        *,
        job: str = "",
        states: Iterable[run_pb2.RunState] = (),
        instance_id: str = "",
        from_slot: int = 0,
        until_slot: int = 0,
        limit: int | None = None,
    ) -> Iterator[run_pb2.Run]:
        """Yield runs, newest slot first; pages are fetched as they are needed.

        Empty and 0 mean "all". `instance_id`: only runs with an attempt by this instance.
        `from_slot` (inclusive) and `until_slot` (exclusive) are milliseconds since the epoch.
        """
        if limit is not None and limit < 1:
            raise ClientError(f"limit {limit}: must be at least 1")
        left = limit
        with _sendable():
            request = admin_pb2.ListRunsRequest(
                page_size=min(limit or _PAGE_MAX, _PAGE_MAX),
                job=job,
                states=states,
                instance_id=instance_id,
                from_slot=from_slot,
                until_slot=until_slot,
            )
        while True:
            page = self._call(self._stub.ListRuns, request)
            runs = page.runs if left is None else page.runs[:left]
            yield from runs
            left = None if left is None else left - len(runs)
            request.page_token = page.next_page_token
            if not request.page_token or left == 0:
                return

    def watch_runs(self, *, job: str = "", from_slot: int = 0, until_slot: int = 0) -> RunWatch:
        """Begin to watch runs: an iterator over each that is unfinished now or changes from now on.

        The arguments are those of `list_runs`. A run comes as it is after a change; changes that follow
        one another closely may be merged, but the latest state always comes, and a renewed lease is no
        change. On return the watch has begun: list what there is after that, and nothing falls between.
        """
        with _sendable():
            request = admin_pb2.WatchRunsRequest(
                job=job, from_slot=from_slot, until_slot=until_slot
            )
        call = self._stub.WatchRuns(request, metadata=self._token.metadata())
        return RunWatch(call, self._endpoint)

    def get_run(self, job: str, slot: int) -> run_pb2.Run:
        """Return one run, with the stack traces of its attempts. Raises `NotFoundError`."""
        with _sendable():
            request = admin_pb2.GetRunRequest(job=job, slot=slot)
        return self._call(self._stub.GetRun, request).run

    def pause_job(self, job: str, *, reason: str = "") -> admin_pb2.Job:
        """Stop running the job's slots everywhere; return the job as it is now.

        Once this has returned no slot of the job is claimed. What runs goes on, and so do triggered
        runs. Pausing twice changes nothing. Raises `NotFoundError`.
        """
        with _sendable():
            _check_size("reason", reason.encode(), _REASON_MAX_BYTES)
            request = admin_pb2.PauseJobRequest(job=job, reason=reason)
        return self._call(self._stub.PauseJob, request).job

    def resume_job(self, job: str) -> admin_pb2.Job:
        """Run the job's slots again, from now on; return the job as it is now.

        Slots that fell due meanwhile are recorded as skipped, in one row. Raises `NotFoundError`.
        """
        with _sendable():
            request = admin_pb2.ResumeJobRequest(job=job)
        return self._call(self._stub.ResumeJob, request).job

    def trigger_run(self, job: str, *, payload: bytes = b"", request_id: str = "") -> run_pb2.Run:
        """Make a run of the job that is due now, outside the schedule; return it.

        `payload` (at most 64 KiB) is handed to the handler. The same `request_id` gives the same
        run, with the payload of the first call, whatever comes with a later one; by default an id is
        drawn for each call, and a call that failed may be repeated with its own id only. The run is skipped where the job's overlap policy is `skip` and another run is
        unfinished. Raises `NotFoundError`; `RefusedError` where 100 triggered runs wait already.
        """
        _check_size("payload", payload, PAYLOAD_MAX_BYTES)
        with _sendable():
            _check_size("request_id", request_id.encode(), _NAME_MAX_BYTES)
            request = admin_pb2.TriggerRunRequest(
                job=job, payload=payload, request_id=request_id or str(uuid4())
            )
        return self._call(self._stub.TriggerRun, request).run

    def cancel_run(self, job: str, slot: int, *, reason: str = "") -> run_pb2.Run:
        """Ask a run to stop; return it as it is now. One that no instance runs ends at once.

        Raises `NotFoundError`, and `RefusedError` for a run that has ended.
        """
        with _sendable():
            _check_size("reason", reason.encode(), _REASON_MAX_BYTES)
            request = admin_pb2.CancelRunRequest(job=job, slot=slot, reason=reason)
        return self._call(self._stub.CancelRun, request).run

    def preview_slots(
        self, job: str | Job, *, after: datetime | None = None, count: int = 10
    ) -> list[int]:
        """Return the next `count` slots (1 to 1,000) after `after`, in milliseconds since the epoch.

        `job` is the name of a registered job, or any `Job`. `after` needs a time zone; default: now.
        """
        with _sendable():
            request = admin_pb2.PreviewSlotsRequest(count=count)
            if isinstance(job, Job):
                request.spec.CopyFrom(job.spec)
            else:
                request.job = job
        if after is not None:
            if after.tzinfo is None:
                raise ClientError(f"after {after}: must have a time zone, such as datetime.UTC")
            request.after_time.FromDatetime(after.astimezone(UTC))
        return list(self._call(self._stub.PreviewSlots, request).slots)

    def list_instances(self) -> Iterator[admin_pb2.Instance]:
        """Yield the instances seen lately; pages are fetched as they are needed."""
        request = admin_pb2.ListInstancesRequest(page_size=_PAGE_MAX)
        while True:
            page = self._call(self._stub.ListInstances, request)
            yield from page.instances
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def get_instance(self, instance_id: str = "") -> admin_pb2.Instance:
        """Return one instance; by default the one that answers. Raises `NotFoundError`."""
        with _sendable():
            request = admin_pb2.GetInstanceRequest(instance_id=instance_id)
        return self._call(self._stub.GetInstance, request).instance

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
    ) -> _ResponseT:
        _check_size("a request", request.SerializeToString(), MESSAGE_MAX_BYTES)
        try:
            answer, call = method.with_call(
                request, timeout=TIMEOUT_S, metadata=self._token.metadata()
            )
        except grpc.RpcError as error:
            raise self._endpoint.error(error) from None
        trailers = dict(call.trailing_metadata() or ())
        self._scope = unquote(str(trailers.get(SCOPE_KEY, "")))
        return answer


class RunWatch(Iterator[run_pb2.Run]):
    """The runs that `AdminClient.watch_runs` watches, as they change.

    Iterating blocks until one does, and raises as the methods of `AdminClient` do:
    `SidecarUnavailableError` when the sidecar stops, or its store has been away for a minute. `close`,
    also from another thread, ends it.
    """

    def __init__(self, call: Any, endpoint: Endpoint) -> None:
        self._call = call  # the stubs have no type that is a call and an iterator
        self._endpoint = endpoint
        self._closed = False
        late = threading.Timer(TIMEOUT_S, call.cancel)
        late.daemon = True
        late.start()
        call.initial_metadata()  # comes when the watch has begun, or the call has ended
        late.cancel()
        if call.cancelled():
            late_s = f"{TIMEOUT_S:g} s"
            raise SidecarUnavailableError(
                f"the sidecar at {endpoint.address} did not begin to watch within {late_s}"
            )
        if call.done():
            self._raise(call)

    def __next__(self) -> run_pb2.Run:
        try:
            change: admin_pb2.WatchRunsResponse = next(self._call)
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from None
            self._raise(error)
        return change.run

    def _raise(self, ended: grpc.RpcError) -> NoReturn:
        raise self._endpoint.error(ended) from None

    def close(self) -> None:
        """Watch no longer: iterating ends."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_size(argument: str, value: bytes, most: int) -> None:
    if len(value) > most:
        raise ClientError(f"{argument} of {len(value)} bytes: must be at most {most} bytes")


@contextmanager
def _sendable() -> Iterator[None]:
    """A number that no message holds, and a text that is not Unicode, is a wrong argument."""
    try:
        yield
    except ValueError as error:
        raise ClientError(f"an argument cannot be sent: {error}") from None
