"""The wire's messages to records and back: nothing is lost, and what has no right form is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from anarchon.v1 import admin_pb2, job_pb2, run_pb2, session_pb2
from anarchon_server.core import limits, messages, model
from anarchon_server.core.errors import InvalidError, InvalidJobsError
from anarchon_server.rpc import conversion as wire

FULL = model.JobSpec(
    name="sync",
    schedule=model.EverySchedule(10_000, 250),
    jitter_ms=0,
    timeout_ms=1,
    heartbeat_ms=2_000,
    lease_ms=12_345,
    overlap=model.OverlapPolicy.QUEUE,
    catch_up=model.CatchUpPolicy.ALL,
    catch_up_window_ms=3_600_000,
    catch_up_limit=7,
    start_deadline_ms=61_001,
    max_attempts=5,
    retry=model.RetrySpec(3, 1_500, 2.5, 60_000),
    concurrency=2,
    labels=(("team", "shop"), ("tier", "1")),
    by_name=True,
    cancel_grace_ms=4_000,
    stop_grace_ms=0,
)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        model.JobSpec("bare"),
        model.JobSpec("cron", model.CronSchedule("0 8 * * *", "Europe/Athens")),
        model.JobSpec("retry", retry=model.RetrySpec(1)),
        model.JobSpec("week", model.EverySchedule(604_800_000)),
    ],
    ids=lambda spec: spec.name,
)
def test_a_spec_comes_back_as_it_was_and_unset_stays_unset(spec: model.JobSpec) -> None:
    assert wire.spec_in(wire.spec_out(spec)) == spec


def test_every_field_of_a_spec_is_carried() -> None:
    message = wire.spec_out(FULL)
    stated = {field.name for field, _ in message.ListFields()}
    unset = [f.name for f in message.DESCRIPTOR.fields if f.name not in stated]
    assert unset == ["cron"]


def problems(*jobs: job_pb2.JobSpec) -> list[tuple[int, str]]:
    with pytest.raises(InvalidJobsError) as caught:
        wire.specs_in(jobs)
    return [(index, str(error)) for index, _, error in caught.value.problems]


def test_parts_of_a_millisecond_are_refused_where_somebody_set_them() -> None:
    job = job_pb2.JobSpec(name="a", jitter=Duration(nanos=1))
    assert problems(job_pb2.JobSpec(name="ok"), job) == [
        (1, "jitter is '0.000000001s': use whole milliseconds")
    ]


def test_an_unknown_value_of_an_enumeration_is_refused_with_the_known_ones() -> None:
    overlap = job_pb2.JobSpec(name="a")
    overlap.MergeFromString(b"\x40\x63")  # field 8, value 99: of a later version
    catch_up = job_pb2.JobSpec(name="b")
    catch_up.catch_up.MergeFromString(b"\x08\x63")
    assert problems(overlap, catch_up) == [
        (0, "overlap is 99: this sidecar knows: SKIP, ALLOW, QUEUE, CANCEL"),
        (1, "catch_up.policy is 99: this sidecar knows: NONE, LATEST, ALL"),
    ]


def test_too_many_jobs_are_refused_before_any_is_read() -> None:
    with pytest.raises(InvalidError, match="at most 10000"):
        wire.specs_in([job_pb2.JobSpec()] * (limits.JOBS_MAX + 1))


# ── What clients send ───────────────────────────────────────────────────────────────────────────


def test_what_a_client_says_of_itself_is_cut_and_comes_back() -> None:
    said = session_pb2.ClientInfo(
        language="python" * 100,
        version="0.1.0",
        host="host",
        process_id=-1,
        features=["x"] * 1_000,
        process_start_ticks=5,
        pid_namespace=6,
    )
    client = wire.client_in(said)
    assert len(client.language) == limits.NAME_MAX
    assert len(client.features) == 32
    assert client.process_id == 0
    assert wire.client_in(wire.client_out(client)) == client


@pytest.mark.parametrize("token", ["", "é" * 129])
def test_what_cannot_be_a_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(InvalidError, match=f"a token of {len(token.encode())} bytes") as caught:
        wire.tokens_in("in_flight", ["ok", token])
    assert "é" not in str(caught.value)


def test_tokens_count_once_and_have_a_bound() -> None:
    assert wire.tokens_in("in_flight", ["b", "a", "b"]) == ("b", "a")
    with pytest.raises(InvalidError, match="at most"):
        wire.tokens_in("in_flight", ["a"] * 11_001)


def report(**outcome: Any) -> model.Outcome:
    result = session_pb2.Result(token="t", outcome=run_pb2.Outcome(**outcome))
    ((token, found),) = wire.results_in(session_pb2.CompleteRequest(results=[result]))
    assert token == "t"
    return found


def test_s30_results_are_cut_to_the_limits_of_history() -> None:
    kept = report(success=run_pb2.Success(result="é" * 16_384))
    assert len(kept.result.encode()) == limits.RESULT_MAX_BYTES
    failure = run_pb2.Failure(type="E", message="m" * 9_999, stack_trace="x" * 20_000 + "end")
    failed = report(failure=failure).failure
    assert failed is not None
    assert len(failed.message) == limits.MESSAGE_MAX_BYTES
    assert len(failed.stack_trace) == limits.TRACE_MAX_BYTES
    assert failed.stack_trace.endswith("end")


def test_a_cut_never_falls_within_a_character() -> None:
    assert wire.cut_start("aé", 2) == "a"
    assert wire.cut_end("éa", 2) == "a"
    assert wire.cut_end("", 2) == ""


def test_outcomes_are_read() -> None:
    elapsed = Duration(seconds=1, nanos=999_999_999)
    assert report(success=run_pb2.Success(), elapsed=elapsed).elapsed_ms == 1_999
    stopped = run_pb2.Stopped(reason=run_pb2.CANCEL_REASON_SHUTDOWN)
    assert report(stopped=stopped).stopped is model.CancelReason.SHUTDOWN
    failure = run_pb2.Failure(type="E", permanent=True, retry_after=Duration(seconds=2))
    assert report(failure=failure).failure == model.Failure(
        "E", permanent=True, retry_after_ms=2_000
    )


def test_a_report_that_says_nothing_is_refused_by_its_place() -> None:
    def refused(*results: session_pb2.Result) -> str:
        with pytest.raises(InvalidError) as caught:
            wire.results_in(session_pb2.CompleteRequest(results=results))
        return str(caught.value)

    good = session_pb2.Result(token="t", outcome=run_pb2.Outcome(success=run_pb2.Success()))
    empty = session_pb2.Result(token="t")
    unset = session_pb2.Result(token="t", outcome=run_pb2.Outcome(stopped=run_pb2.Stopped()))
    assert refused(good, empty).startswith("results[1].outcome is 'empty'")
    assert refused(unset).startswith("results[0].outcome.stopped.reason is 'unset'")
    assert "1 to 1000 results" in refused()
    assert "1 to 1000 results" in refused(*[good] * 1_001)


# ── What clients and people are sent ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "enumeration", "prefix"),
    [
        (model.RunState, run_pb2.RunState, "RUN_STATE_"),
        (model.Trigger, run_pb2.Trigger, "TRIGGER_"),
        (model.AttemptCause, run_pb2.AttemptCause, "ATTEMPT_CAUSE_"),
        (model.CancelReason, run_pb2.CancelReason, "CANCEL_REASON_"),
        (model.OverlapPolicy, job_pb2.OverlapPolicy, "OVERLAP_POLICY_"),
        (model.CatchUpPolicy, job_pb2.CatchUpPolicy, "CATCH_UP_POLICY_"),
        (model.InstanceState, admin_pb2.InstanceState, "INSTANCE_STATE_"),
        (messages.ReceiptStatus, session_pb2.ReceiptStatus, "RECEIPT_STATUS_"),
    ],
)
def test_the_core_and_the_wire_have_the_same_words(
    words: Any, enumeration: Any, prefix: str
) -> None:
    there = [name for name, value in enumeration.items() if value != 0]
    assert sorted(f"{prefix}{word.value.upper()}" for word in words) == sorted(there)
    for word in words:
        value = wire.enum_out(word, enumeration, prefix)
        assert wire.enum_in("field", value, enumeration, prefix, words) is word


@pytest.mark.parametrize("value_ms", [0, 1, 999, 1_000, 1_791_633_610_123, -1, -1_500])
def test_times_and_durations_are_exact(value_ms: int) -> None:
    assert wire.timestamp_to_ms("field", wire.timestamp(value_ms)) == value_ms
    assert wire.measured_ms(wire.duration(abs(value_ms))) == abs(value_ms)
    assert wire.exact_ms("field", wire.duration(value_ms)) == value_ms
    assert wire.timestamp(value_ms).ToMilliseconds() == value_ms
    assert wire.duration(value_ms).ToMilliseconds() == value_ms
    assert wire.duration(value_ms).ToJsonString(), "it has a text form"


@pytest.mark.parametrize(
    ("seconds", "nanos", "right"),
    [
        (2**62, 0, "at most 10,000 years"),
        (-(2**62), 0, "at most 10,000 years"),
        (315_576_000_001, 1, "at most 10,000 years"),
        (1, -1, "the sign of seconds"),
        (-1, 1_000_000, "the sign of seconds"),
        (1, 2_000_000_000, "less than a second"),
        (1, 1, "use whole milliseconds"),
    ],
)
def test_what_is_no_duration_is_refused_by_its_field(seconds: int, nanos: int, right: str) -> None:
    job = job_pb2.JobSpec(name="a", timeout=Duration(seconds=seconds, nanos=nanos))
    ((_, problem),) = problems(job)
    assert problem.startswith("timeout is ")
    assert right in problem


@pytest.mark.parametrize(("seconds", "nanos"), [(2**62, 0), (-(2**62), 0), (0, -1), (0, 2**31 - 1)])
def test_whatever_stands_beside_a_result_it_is_kept_and_can_be_shown(
    seconds: int, nanos: int
) -> None:
    bad = Duration(seconds=seconds, nanos=nanos)
    outcome = report(failure=run_pb2.Failure(type="E", retry_after=bad), elapsed=bad)
    assert outcome.failure is not None
    for kept_ms in (outcome.elapsed_ms, outcome.failure.retry_after_ms):
        assert kept_ms is not None
        assert 0 <= kept_ms <= 315_576_000_000_000
        assert wire.duration(kept_ms).ToJsonString()


def test_a_run_shows_its_lease_only_while_it_is_not_final() -> None:
    lease = model.Lease(until=5, length_ms=30_000, end_at=1_000)
    running = model.Run("a", 1, model.Trigger.SCHEDULE, model.RunState.RUNNING, lease=lease)
    ended = model.Run("a", 1, model.Trigger.SCHEDULE, model.RunState.SUCCESS, lease=lease)
    assert wire.run_out(model.RunView(running)).lease_end_time.seconds == 1
    assert not wire.run_out(model.RunView(ended)).HasField("lease_end_time")


def test_an_attempt_is_shown_whole() -> None:
    attempt = model.Attempt(
        attempt=2,
        token="secret",
        fence=9,
        instance_id="b:2",
        incarnation="i",
        cause=model.AttemptCause.TAKEOVER,
        state=model.RunState.FAILED,
        claimed_at=1_000,
        reason="timeout",
        started_at=2_000,
        ended_at=3_000,
        failure=model.Failure("E", "m", "s", permanent=True, retry_after_ms=4_000),
        result="r",
    )
    shown = wire.attempt_out(attempt)
    assert (shown.attempt, shown.instance_id, shown.fence) == (2, "b:2", 9)
    assert shown.cause == run_pb2.ATTEMPT_CAUSE_TAKEOVER
    assert shown.state == run_pb2.RUN_STATE_FAILED
    times = [shown.claim_time.seconds, shown.start_time.seconds, shown.end_time.seconds]
    assert times == [1, 2, 3]
    assert shown.failure.retry_after.seconds == 4
    assert (shown.failure.type, shown.failure.stack_trace) == ("E", "s")
    assert (shown.reason, shown.result) == ("timeout", "r")
    assert b"secret" not in shown.SerializeToString()


def test_what_has_no_limit_and_no_lease_says_nothing_of_them() -> None:
    assignment = messages.Assignment(
        "t", "a", 1, 1, 1, model.Trigger.SCHEDULE, model.AttemptCause.CLAIM, None, None
    )
    shown = wire.assignment_out(assignment, "b:2")
    assert not shown.HasField("lease_end_time")
    assert not shown.HasField("timeout")
    assert shown.instance_id == "b:2"


def test_an_instance_that_is_lost_is_not_ready_whatever_it_last_said() -> None:
    instance = model.Instance("a:1", "f" * 32, state=model.InstanceState.ACTIVE, ready=True)
    assert wire.instance_out(instance, "default").ready
    lost = dataclasses.replace(instance, state=model.InstanceState.LOST)
    assert not wire.instance_out(lost, "default").ready
