"""SessionService on a real gRPC server, with the real engine on the memory store."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from anarchon.v1 import job_pb2, run_pb2, session_pb2
from anarchon_server.core import limits, messages, model
from anarchon_server.core.errors import RefusedError
from anarchon_server.loop import Stream
from anarchon_server.rpc import sessions as rpc_sessions
from tests.unit.server.sidecars import (
    Sidecar,
    error_of,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
    trailer,
)


async def attached(sidecar: Sidecar, request: session_pb2.SubscribeRequest) -> tuple[Any, Any]:
    stream = sidecar.sessions.Subscribe(request)
    event = await stream.read()
    assert event.WhichOneof("event") == "attached"
    return stream, event.attached


async def refusal(sidecar: Sidecar, request: session_pb2.SubscribeRequest) -> Any:
    return await error_of(sidecar.sessions.Subscribe(request).read())


async def keep_alive(sidecar: Sidecar, session_id: str, *in_flight: str) -> Any:
    return await sidecar.sessions.KeepAlive(
        session_pb2.KeepAliveRequest(session_id=session_id, in_flight=in_flight)
    )


async def assigned(stream: Any) -> session_pb2.Assignment:
    event = await stream.read()
    assert event.WhichOneof("event") == "runs"
    return event.runs.assignments[0]  # type: ignore[no-any-return]


def result(token: str, text: str = "done") -> session_pb2.CompleteRequest:
    outcome = run_pb2.Outcome(success=run_pb2.Success(result=text))
    return session_pb2.CompleteRequest(results=[session_pb2.Result(token=token, outcome=outcome)])


@pytest.fixture
def left(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the loop was told that a stream is over."""
    told = asyncio.Event()
    real = sidecar.loop.unsubscribe

    def unsubscribe(stream: Stream) -> None:
        real(stream)
        told.set()

    monkeypatch.setattr(sidecar.loop, "unsubscribe", unsubscribe)
    return told


# ── A session's life ────────────────────────────────────────────────────────────────────────────


async def test_the_first_event_is_attached_with_the_session_times(sidecar: Sidecar) -> None:
    _, event = await attached(sidecar, subscribe_request(every("a")))
    assert event.instance_id == "test:1"
    assert event.server_version == "0.1.0"
    assert event.session_ttl == Duration(seconds=15)
    assert event.keep_alive_interval == Duration(seconds=5)


async def test_a_slot_is_handed_out_run_and_recorded(sidecar: Sidecar) -> None:
    request = subscribe_request(every("fast", 100))
    stream, _ = await attached(sidecar, request)
    answer = await keep_alive(sidecar, request.session_id)
    assert answer.stream_open
    assignment = await assigned(stream)
    assert (assignment.job, assignment.attempt) == ("fast", 1)
    assert assignment.slot % 100 == 0
    assert assignment.trigger == run_pb2.TRIGGER_SCHEDULE
    assert assignment.lease_end_time.ToMilliseconds() > assignment.slot
    await keep_alive(sidecar, request.session_id, assignment.token)
    receipts = (await sidecar.sessions.Complete(result(assignment.token))).receipts
    assert [r.status for r in receipts] == [session_pb2.RECEIPT_STATUS_RECORDED]
    assert receipts[0].state == run_pb2.RUN_STATE_SUCCESS
    again = (await sidecar.sessions.Complete(result(assignment.token))).receipts
    assert again[0].status == session_pb2.RECEIPT_STATUS_RECORDED
    other = (await sidecar.sessions.Complete(result(assignment.token, "else"))).receipts
    assert other[0].status == session_pb2.RECEIPT_STATUS_ALREADY_COMPLETED


async def test_a_keep_alive_of_an_unknown_session_says_subscribe_again(sidecar: Sidecar) -> None:
    error = await error_of(keep_alive(sidecar, str(uuid.uuid4())))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert trailer(error) == "SESSION_NOT_FOUND"


async def test_a_second_stream_replaces_the_first(sidecar: Sidecar) -> None:
    request = subscribe_request(every("a"))
    first, _ = await attached(sidecar, request)
    second, _ = await attached(sidecar, request)
    error = await error_of(first.read())
    assert error.code() is grpc.StatusCode.ABORTED
    assert trailer(error) == "SESSION_REPLACED"
    assert (await keep_alive(sidecar, request.session_id)).stream_open
    second.cancel()


async def test_s24_a_broken_stream_alone_ends_no_session(
    sidecar: Sidecar, left: asyncio.Event
) -> None:
    request = subscribe_request(every("a"))
    stream, _ = await attached(sidecar, request)
    await keep_alive(sidecar, request.session_id)
    stream.cancel()
    await left.wait()
    assert not (await keep_alive(sidecar, request.session_id)).stream_open
    _, _ = await attached(sidecar, request)
    assert (await keep_alive(sidecar, request.session_id)).stream_open


async def test_a_closed_session_is_gone(sidecar: Sidecar) -> None:
    request = subscribe_request(every("a"))
    stream, _ = await attached(sidecar, request)
    await keep_alive(sidecar, request.session_id)
    await sidecar.sessions.CloseSession(
        session_pb2.CloseSessionRequest(session_id=request.session_id)
    )
    await stream.code()
    assert (await error_of(keep_alive(sidecar, request.session_id))).code() is (
        grpc.StatusCode.NOT_FOUND
    )


async def test_results_the_store_does_not_take_are_answered_before_the_deadline(
    sidecar: Sidecar,
) -> None:
    request = subscribe_request(every("fast", 100))
    stream, _ = await attached(sidecar, request)
    await keep_alive(sidecar, request.session_id)
    token = (await assigned(stream)).token
    sidecar.loop.store_open = False
    answer = await sidecar.sessions.Complete(result(token), timeout=0.5)
    assert [r.status for r in answer.receipts] == [session_pb2.RECEIPT_STATUS_STORE_UNAVAILABLE]
    sidecar.loop.store_open = True
    answer = await sidecar.sessions.Complete(result(token), timeout=10)
    assert [r.status for r in answer.receipts] == [session_pb2.RECEIPT_STATUS_RECORDED]


async def test_s27_tokens_that_cannot_be_judged_are_unavailable(sidecar: Sidecar) -> None:
    sidecar.loop.store_open = False
    token = f"1791633610000.{'a' * 32}.a"
    call = sidecar.sessions.Subscribe(subscribe_request(every("a"), in_flight=(token,)))
    reading = asyncio.create_task(call.read())
    error = await error_of(reading)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert trailer(error) == "STORE_UNAVAILABLE"


# ── Bad input ───────────────────────────────────────────────────────────────────────────────────


async def test_a_bad_job_name_is_refused_s32(sidecar: Sidecar) -> None:
    error = await refusal(sidecar, subscribe_request(every("ok"), every("not ok")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailer(error) == "INVALID_FIELD"
    assert "job 'not ok': name is 'not ok': use 1 to 128 characters" in error.details()


async def test_every_bad_job_of_a_subscribe_is_named(sidecar: Sidecar) -> None:
    jitter = every("jitter", 10_000)
    jitter.jitter.seconds = 10
    heartbeat = every("heartbeat")
    heartbeat.heartbeat.seconds = 11
    cron = job_pb2.JobSpec(name="cron", cron=job_pb2.CronSchedule(expression="61 * * * *"))
    error = await refusal(
        sidecar, subscribe_request(every("good"), jitter, heartbeat, cron, every("good"))
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for part in (
        "job 'jitter': jitter is '10s'",
        "shorter than the shortest gap",
        "job 'heartbeat': heartbeat is '11s'",
        "job 'cron': minute is '61'",
        "job 'good': name is 'good': two jobs have this name",
    ):
        assert part in error.details()


async def test_a_bad_schedule_alone_is_told_as_such(sidecar: Sidecar) -> None:
    cron = job_pb2.JobSpec(
        name="cron", cron=job_pb2.CronSchedule(expression="0 8 * * *", time_zone="Mars/Base")
    )
    assert trailer(await refusal(sidecar, subscribe_request(cron))) == "INVALID_SCHEDULE"


async def test_what_the_backend_cannot_do_is_refused_not_ignored() -> None:
    sidecar = await start_sidecar(leases=False)
    queue = every("a")
    queue.overlap = job_pb2.OVERLAP_POLICY_QUEUE
    error = await refusal(sidecar, subscribe_request(queue))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert trailer(error) == "UNSUPPORTED"
    assert "overlap=queue is not supported by memory:claim; backends that can: " in error.details()
    await stop_sidecar(sidecar)


@pytest.mark.parametrize("version", ["0.3.0", "1.0.0", "", "new"])
async def test_a_client_too_far_away_is_refused(sidecar: Sidecar, version: str) -> None:
    error = await refusal(sidecar, subscribe_request(every("a"), version=version))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert trailer(error) == "VERSION"


@pytest.mark.parametrize("session_id", ["mine", "6f1e7f0e2f0f4f559d55111111111111", "x" * 99])
async def test_a_session_id_that_is_no_uuid_is_refused(sidecar: Sidecar, session_id: str) -> None:
    error = await refusal(sidecar, subscribe_request(every("a"), session_id=session_id))
    assert "session_id is" in error.details()
    assert "a UUID" in (await error_of(keep_alive(sidecar, session_id))).details()
    close = session_pb2.CloseSessionRequest(session_id=session_id)
    assert "a UUID" in (await error_of(sidecar.sessions.CloseSession(close))).details()


@pytest.mark.parametrize("count", [0, -1, 10_001])
async def test_a_concurrency_out_of_bounds_is_refused(sidecar: Sidecar, count: int) -> None:
    error = await refusal(sidecar, subscribe_request(every("a"), max_concurrency=count))
    assert "1 to 10000" in error.details()


async def test_a_message_over_the_limit_is_refused(sidecar: Sidecar) -> None:
    jobs = [every(f"{'x' * 100}{n}") for n in range(40_000)]
    error = await refusal(sidecar, subscribe_request(*jobs))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4194304" in error.details()


async def test_a_report_without_results_is_refused(sidecar: Sidecar) -> None:
    error = await error_of(sidecar.sessions.Complete(session_pb2.CompleteRequest()))
    assert "1 to 1000 results" in error.details()


async def test_a_result_with_an_unknown_token_changes_nothing(sidecar: Sidecar) -> None:
    answer = await sidecar.sessions.Complete(result("whatever"))
    assert answer.receipts[0].status == session_pb2.RECEIPT_STATUS_UNKNOWN_TOKEN


# ── Streams ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_client_that_does_not_read_is_cut_off_and_holds_nobody_up(
    sidecar: Sidecar, left: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_sessions, "FLUSH_S", 0.05)
    streams: list[Stream] = []
    real = sidecar.loop.subscribe

    def noted(**arguments: Any) -> Stream:
        streams.append(real(**arguments))
        return streams[-1]

    monkeypatch.setattr(sidecar.loop, "subscribe", noted)
    frozen = subscribe_request(every("a"))
    call, _ = await attached(sidecar, frozen)
    # More than the transport's buffers hold, so that the writer waits for the client.
    big = messages.Cancelled("t", model.CancelReason.REQUESTED, "x" * 200_000)
    for _ in range(100):
        streams[0].put(big)
    streams[0].end(RefusedError("LIMIT_EXCEEDED", "unread"))
    await left.wait()
    assert streams[0]._events, "the writer waited for the client"
    other, _ = await attached(sidecar, subscribe_request(every("b")))
    other.cancel()
    error = await error_of(_read_all(call))
    assert trailer(error) == "LIMIT_EXCEEDED"


async def _read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_big_batch_of_assignments_is_split(sidecar: Sidecar) -> None:
    calls = rpc_sessions.SessionCalls(sidecar.loop, "test:1", "0.1.0")
    one = messages.Assignment(
        token="t" * 200,
        job="j" * 100,
        slot=1,
        attempt=1,
        fence=1,
        trigger=model.Trigger.SCHEDULE,
        cause=model.AttemptCause.CLAIM,
        lease_end_at=1,
        timeout_ms=1,
    )
    stream = Stream("s", 1)
    stream.put(messages.Assigned((one,) * 1_201))
    stream.end(None)
    sizes = [len(event.runs.assignments) async for event in calls.events(stream)]
    assert sizes == [500, 500, 201]
    assert sum(sizes) == 1_201
    huge = [session_pb2.Assignment(payload=b"x" * 900_000)] * 5
    assert [len(b.assignments) for b in rpc_sessions._batches(huge)] == [2, 2, 1]
    assert limits.ASSIGNMENTS_MAX == 500


async def test_draining_and_cancelling_reach_the_client(sidecar: Sidecar) -> None:
    calls = rpc_sessions.SessionCalls(sidecar.loop, "test:1", "0.1.0")
    stream = Stream("s", 1)
    stream.put(messages.Draining(20_000))
    stream.put(messages.Cancelled("t", model.CancelReason.TIMEOUT, "why"))
    stream.end(None)
    drain, cancel = [event async for event in calls.events(stream)]
    assert drain.drain.grace.seconds == 20
    assert (cancel.cancel.token, cancel.cancel.message) == ("t", "why")
    assert cancel.cancel.reason == run_pb2.CANCEL_REASON_TIMEOUT


async def test_s23_a_stop_drains_clients_and_ends_their_streams(sidecar: Sidecar) -> None:
    request = subscribe_request(every("a"))
    stream, _ = await attached(sidecar, request)
    await keep_alive(sidecar, request.session_id)
    sidecar.loop.stop()
    assert (await stream.read()).WhichOneof("event") == "drain"
    await sidecar.loop.stopped()
    error = await refusal(sidecar, subscribe_request(every("b")))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
