"""The wire's messages to the core's records and back; the one place that knows both.

Imports the stubs and core. What comes in is checked here for form (sizes, enumerations, whole
milliseconds); what it means is for the core to judge. Raises `InvalidError` and its kin.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from anarchon.v1 import admin_pb2, job_pb2, run_pb2, session_pb2
from anarchon_server.core import limits, messages, model
from anarchon_server.core.errors import InvalidError, InvalidJobsError, UnsupportedError

E = TypeVar("E", bound=StrEnum)

_SHOWN_NAME = 80

# So that all sessions of an instance fit into one message, whatever their clients say.
_FEATURES_MAX = 32

# The bounds that the protocol's own types have: 10,000 years either way, the years 1 to 9999.
_DURATION_MAX_S = 315_576_000_000
_TIMESTAMP_MIN_S, _TIMESTAMP_MAX_S = -62_135_596_800, 253_402_300_799
_NANOS = 1_000_000_000


# ── Small parts ─────────────────────────────────────────────────────────────────────────────────


def duration(value_ms: int) -> Duration:
    """Return the wire's form of milliseconds: its two parts have the same sign."""
    sign = -1 if value_ms < 0 else 1
    seconds, rest_ms = divmod(abs(value_ms), 1_000)
    return Duration(seconds=sign * seconds, nanos=sign * rest_ms * 1_000_000)


def slot_text(slot: int) -> str:
    """Return a slot as people read it, in UTC; one that no calendar has as it is."""
    try:
        text = datetime.fromtimestamp(slot / 1_000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(slot)
    return text.replace(".000", "").replace("+00:00", "Z")


def timestamp(at_ms: int) -> Timestamp:
    """Return the wire's form of milliseconds since the epoch."""
    seconds, rest_ms = divmod(at_ms, 1_000)
    return Timestamp(seconds=seconds, nanos=rest_ms * 1_000_000)


def timestamp_to_ms(field: str, value: Timestamp) -> int:
    """Return milliseconds since the epoch, rounded down. Raises `InvalidError`."""
    in_range = _TIMESTAMP_MIN_S <= value.seconds <= _TIMESTAMP_MAX_S
    if not in_range or not 0 <= value.nanos < _NANOS:
        raise InvalidError(field, _parts(value), "a time in the years 1 to 9999")
    return value.seconds * 1_000 + value.nanos // 1_000_000


def measured_ms(value: Duration) -> int:
    """Return the whole milliseconds of a duration that an application reports.

    It is cut to 0 to 10,000 years: a result is recorded whatever stands beside it, and no store
    and no reader of history is given a number that it cannot hold.
    """
    value_ms = value.seconds * 1_000 + value.nanos // 1_000_000
    return min(max(0, value_ms), _DURATION_MAX_S * 1_000)


def exact_ms(field: str, value: Duration) -> int:
    """Return the milliseconds of a duration that somebody set.

    Raises `InvalidError` where it is not whole ones, or is no duration by the protocol: longer than
    10,000 years, with parts of different signs, or with a second or more of nanoseconds.
    """
    if abs(value.seconds) > _DURATION_MAX_S:
        raise InvalidError(field, _parts(value), "at most 10,000 years")
    if abs(value.nanos) >= _NANOS or value.seconds * value.nanos < 0:
        expected = "nanos has the sign of seconds, and is less than a second"
        raise InvalidError(field, _parts(value), expected)
    if value.nanos % 1_000_000:
        raise InvalidError(field, value.ToJsonString(), "use whole milliseconds")
    return value.seconds * 1_000 + value.nanos // 1_000_000


def _parts(value: Duration | Timestamp) -> str:
    """Show a value that may have no text form."""
    return f"seconds {value.seconds}, nanos {value.nanos}"


def enum_in(field: str, value: int, wire: Any, prefix: str, kind: type[E]) -> E | None:
    """Return the core's word for an enumeration's value; None where it was not set."""
    if value == 0:
        return None
    if value not in wire.values():
        known = ", ".join(name.removeprefix(prefix) for name in wire.keys()[1:])
        raise InvalidError(field, value, f"this sidecar knows: {known}")
    return kind(wire.Name(value).removeprefix(prefix).lower())


def enum_out(word: StrEnum, wire: Any, prefix: str) -> Any:
    """Return the wire's value for one of the core's words."""
    return wire.Value(prefix + word.value.upper())


def cut_start(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, at most so many bytes of UTF-8."""
    return text.encode()[:most_bytes].decode(errors="ignore")


def cut_end(text: str, most_bytes: int) -> str:
    """Return the end of a text, at most so many bytes of UTF-8."""
    return text.encode()[-most_bytes:].decode(errors="ignore")


def _optional_ms(message: Message, field: str, path: str = "") -> int | None:
    if not message.HasField(field):
        return None
    return exact_ms(path or field, getattr(message, field))


# ── Jobs ────────────────────────────────────────────────────────────────────────────────────────


def specs_in(jobs: Sequence[job_pb2.JobSpec]) -> tuple[model.JobSpec, ...]:
    """Return the specs of a Subscribe; `InvalidJobsError` names every one that has no right form."""
    if len(jobs) > limits.JOBS_MAX:
        raise InvalidError("jobs", len(jobs), f"at most {limits.JOBS_MAX} jobs a session")
    specs: list[model.JobSpec] = []
    problems: list[tuple[int, str, InvalidError | UnsupportedError]] = []
    for index, job in enumerate(jobs):
        try:
            specs.append(spec_in(job))
        except InvalidError as error:
            problems.append((index, job.name[:_SHOWN_NAME], error))
    if problems:
        raise InvalidJobsError(problems)
    return tuple(specs)


def spec_in(job: job_pb2.JobSpec) -> model.JobSpec:
    """Return the spec that a message states."""
    catch_up = job.catch_up
    return model.JobSpec(
        name=job.name,
        schedule=_schedule_in(job),
        jitter_ms=_optional_ms(job, "jitter"),
        timeout_ms=_optional_ms(job, "timeout"),
        heartbeat_ms=_optional_ms(job, "heartbeat"),
        lease_ms=_optional_ms(job, "lease"),
        overlap=enum_in(
            "overlap", job.overlap, job_pb2.OverlapPolicy, "OVERLAP_POLICY_", model.OverlapPolicy
        ),
        catch_up=enum_in(
            "catch_up.policy",
            catch_up.policy,
            job_pb2.CatchUpPolicy,
            "CATCH_UP_POLICY_",
            model.CatchUpPolicy,
        ),
        catch_up_window_ms=_optional_ms(catch_up, "window", "catch_up.window"),
        catch_up_limit=catch_up.limit,
        start_deadline_ms=_optional_ms(catch_up, "start_deadline", "catch_up.start_deadline"),
        max_attempts=job.max_attempts,
        retry=_retry_in(job),
        concurrency=job.concurrency,
        labels=model.labels_of(job.labels),
        by_name=job.by_name,
        cancel_grace_ms=_optional_ms(job, "cancel_grace"),
        stop_grace_ms=_optional_ms(job, "stop_grace"),
    )


def _schedule_in(job: job_pb2.JobSpec) -> model.EverySchedule | model.CronSchedule | None:
    match job.WhichOneof("schedule"):
        case "every":
            return model.EverySchedule(
                exact_ms("every.period", job.every.period),
                exact_ms("every.offset", job.every.offset),
            )
        case "cron":
            return model.CronSchedule(job.cron.expression, job.cron.time_zone)
        case _:
            return None


def _retry_in(job: job_pb2.JobSpec) -> model.RetrySpec | None:
    if not job.HasField("retry"):
        return None
    return model.RetrySpec(
        retries=job.retry.retries,
        delay_ms=_optional_ms(job.retry, "delay", "retry.delay"),
        factor=job.retry.factor,
        max_delay_ms=_optional_ms(job.retry, "max_delay", "retry.max_delay"),
    )


def spec_out(spec: model.JobSpec) -> job_pb2.JobSpec:
    """Return the message that states a spec: what was not set stays unset."""
    job = job_pb2.JobSpec(
        name=spec.name,
        max_attempts=spec.max_attempts,
        concurrency=spec.concurrency,
        labels=dict(spec.labels),
        by_name=spec.by_name,
    )
    match spec.schedule:
        case model.EverySchedule(period_ms, offset_ms):
            job.every.period.CopyFrom(duration(period_ms))
            if offset_ms:
                job.every.offset.CopyFrom(duration(offset_ms))
        case model.CronSchedule(expression, time_zone):
            job.cron.expression, job.cron.time_zone = expression, time_zone
    for field in ("jitter", "timeout", "heartbeat", "lease", "cancel_grace", "stop_grace"):
        value_ms = getattr(spec, f"{field}_ms")
        if value_ms is not None:
            getattr(job, field).CopyFrom(duration(value_ms))
    if spec.overlap is not None:
        job.overlap = enum_out(spec.overlap, job_pb2.OverlapPolicy, "OVERLAP_POLICY_")
    _catch_up_out(spec, job)
    if spec.retry is not None:
        job.retry.retries, job.retry.factor = spec.retry.retries, spec.retry.factor
        if spec.retry.delay_ms is not None:
            job.retry.delay.CopyFrom(duration(spec.retry.delay_ms))
        if spec.retry.max_delay_ms is not None:
            job.retry.max_delay.CopyFrom(duration(spec.retry.max_delay_ms))
    return job


def _catch_up_out(spec: model.JobSpec, job: job_pb2.JobSpec) -> None:
    if spec.catch_up is not None:
        job.catch_up.policy = enum_out(spec.catch_up, job_pb2.CatchUpPolicy, "CATCH_UP_POLICY_")
    if spec.catch_up_limit:
        job.catch_up.limit = spec.catch_up_limit
    if spec.catch_up_window_ms is not None:
        job.catch_up.window.CopyFrom(duration(spec.catch_up_window_ms))
    if spec.start_deadline_ms is not None:
        job.catch_up.start_deadline.CopyFrom(duration(spec.start_deadline_ms))


# ── Sessions ────────────────────────────────────────────────────────────────────────────────────


def client_in(client: session_pb2.ClientInfo) -> model.Client:
    """Return what a client says of itself, cut to what is worth keeping."""
    return model.Client(
        language=client.language[: limits.NAME_MAX],
        version=client.version[: limits.NAME_MAX],
        host=client.host[: limits.NAME_MAX],
        process_id=max(0, client.process_id),
        features=tuple(f[: limits.NAME_MAX] for f in client.features[:_FEATURES_MAX]),
        process_start_ticks=max(0, client.process_start_ticks),
        pid_namespace=client.pid_namespace,
    )


def client_out(client: model.Client) -> session_pb2.ClientInfo:
    """Return a client as people see it."""
    return session_pb2.ClientInfo(
        language=client.language,
        version=client.version,
        host=client.host,
        process_id=client.process_id,
        features=client.features,
        process_start_ticks=client.process_start_ticks,
        pid_namespace=client.pid_namespace,
    )


def tokens_in(field: str, tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of a request, each once, each of a size that a token can have."""
    most = limits.CONCURRENCY_MAX + limits.RESULTS_MAX
    if len(tokens) > most:
        raise InvalidError(field, len(tokens), f"at most {most} tokens")
    for token in tokens:
        token_in(field, token)
    return tuple(dict.fromkeys(tokens))


def token_in(field: str, token: str) -> str:
    """Return a token of a size that a token can have."""
    size = len(token.encode())
    if not 0 < size <= limits.TOKEN_MAX_BYTES:
        shown = f"a token of {size} bytes"
        raise InvalidError(field, shown, f"a token has 1 to {limits.TOKEN_MAX_BYTES} bytes")
    return token


def results_in(request: session_pb2.CompleteRequest) -> tuple[tuple[str, model.Outcome], ...]:
    """Return the results of a report, cut to the limits of history (S30)."""
    count = len(request.results)
    if not 1 <= count <= limits.RESULTS_MAX:
        raise InvalidError("results", count, f"1 to {limits.RESULTS_MAX} results a report")
    return tuple(
        (
            token_in(f"results[{index}].token", result.token),
            _outcome_in(f"results[{index}].outcome", result.outcome),
        )
        for index, result in enumerate(request.results)
    )


def _outcome_in(path: str, outcome: run_pb2.Outcome) -> model.Outcome:
    elapsed_ms = measured_ms(outcome.elapsed)
    match outcome.WhichOneof("result"):
        case "success":
            result = cut_start(outcome.success.result, limits.RESULT_MAX_BYTES)
            return model.Outcome(result=result, elapsed_ms=elapsed_ms)
        case "failure":
            return model.Outcome(failure=_failure_in(outcome.failure), elapsed_ms=elapsed_ms)
        case "stopped":
            field = f"{path}.stopped.reason"
            reason = _cancel_reason_in(field, outcome.stopped.reason)
            return model.Outcome(stopped=reason, elapsed_ms=elapsed_ms)
        case _:
            raise InvalidError(path, "empty", "set one of success, failure and stopped")


def _cancel_reason_in(field: str, value: int) -> model.CancelReason:
    reason = enum_in(field, value, run_pb2.CancelReason, "CANCEL_REASON_", model.CancelReason)
    if reason is None:
        raise InvalidError(field, "unset", "send back the reason that came with the cancellation")
    return reason


def _failure_in(failure: run_pb2.Failure) -> model.Failure:
    retry_after = failure.retry_after if failure.HasField("retry_after") else None
    return model.Failure(
        type=cut_start(failure.type, limits.TOKEN_MAX_BYTES),
        message=cut_start(failure.message, limits.MESSAGE_MAX_BYTES),
        stack_trace=cut_end(failure.stack_trace, limits.TRACE_MAX_BYTES),
        permanent=failure.permanent,
        retry_after_ms=None if retry_after is None else measured_ms(retry_after),
    )


def attached_out(event: messages.Attached, instance_id: str, version: str) -> session_pb2.Attached:
    """Return the first event of a stream."""
    return session_pb2.Attached(
        instance_id=instance_id,
        server_version=version,
        keep_alive_interval=duration(event.keep_alive_ms),
        session_ttl=duration(event.session_ttl_ms),
        lost=[cancellation_out(lost) for lost in event.lost],
        notes=event.notes,
    )


def assignment_out(assignment: messages.Assignment, instance_id: str) -> session_pb2.Assignment:
    """Return an attempt as a client is handed it."""
    message = session_pb2.Assignment(
        token=assignment.token,
        job=assignment.job,
        slot=assignment.slot,
        attempt=assignment.attempt,
        fence=assignment.fence,
        trigger=enum_out(assignment.trigger, run_pb2.Trigger, "TRIGGER_"),
        instance_id=instance_id,
        cause=enum_out(assignment.cause, run_pb2.AttemptCause, "ATTEMPT_CAUSE_"),
        payload=assignment.payload,
    )
    if assignment.lease_end_at is not None:
        message.lease_end_time.CopyFrom(timestamp(assignment.lease_end_at))
    if assignment.timeout_ms is not None:
        message.timeout.CopyFrom(duration(assignment.timeout_ms))
    return message


def cancellation_out(order: messages.Lost | messages.Cancelled) -> session_pb2.Cancellation:
    """Return an order to stop, or the news that a token is not the session's own."""
    return session_pb2.Cancellation(
        token=order.token,
        reason=enum_out(order.reason, run_pb2.CancelReason, "CANCEL_REASON_"),
        message=order.message,
    )


def keep_alive_out(answer: messages.KeepAliveAnswer) -> session_pb2.KeepAliveResponse:
    """Return what a client may still believe."""
    return session_pb2.KeepAliveResponse(
        session_ttl=duration(answer.session_ttl_ms),
        stream_open=answer.stream_open,
        lost=[cancellation_out(lost) for lost in answer.lost],
        keep_alive_interval=duration(answer.keep_alive_ms),
        confirmed=answer.confirmed,
    )


def receipt_out(receipt: messages.Receipt) -> session_pb2.Receipt:
    """Return what became of one result."""
    message = session_pb2.Receipt(
        status=enum_out(receipt.status, session_pb2.ReceiptStatus, "RECEIPT_STATUS_"),
        message=receipt.message,
    )
    if receipt.state is not None:
        message.state = state_out(receipt.state)
    return message


# ── History ─────────────────────────────────────────────────────────────────────────────────────


def state_out(state: model.RunState) -> Any:
    """Return the wire's word for a state."""
    return enum_out(state, run_pb2.RunState, "RUN_STATE_")


def run_out(view: model.RunView) -> run_pb2.Run:
    """Return a run as the store shows it; of a run that was not read whole the newest attempt only."""
    run = view.run
    newest = () if run.current is None else (run.current,)
    message = run_pb2.Run(
        job=run.job,
        slot=run.slot,
        trigger=enum_out(run.trigger, run_pb2.Trigger, "TRIGGER_"),
        state=state_out(run.state),
        reason=run.reason,
        attempts=[attempt_out(attempt) for attempt in view.attempts or newest],
        blocking_slot=run.blocking_slot,
        slots_covered=run.slots_covered,
        cancel_requested=run.cancel is not None,
        cancel_message=run.cancel_message,
        request_id=run.request_id,
    )
    if run.retry_at is not None and run.state is model.RunState.RETRYING:
        message.next_attempt_time.CopyFrom(timestamp(run.retry_at))
    if run.lease is not None and not run.state.final:
        message.lease_end_time.CopyFrom(timestamp(run.lease.end_at))
    return message


def attempt_out(attempt: model.Attempt) -> run_pb2.Attempt:
    """Return one attempt of a run."""
    message = run_pb2.Attempt(
        attempt=attempt.attempt,
        instance_id=attempt.instance_id,
        fence=attempt.fence,
        state=state_out(attempt.state),
        reason=attempt.reason,
        cause=enum_out(attempt.cause, run_pb2.AttemptCause, "ATTEMPT_CAUSE_"),
        claim_time=timestamp(attempt.claimed_at),
        result=attempt.result,
    )
    if attempt.started_at is not None:
        message.start_time.CopyFrom(timestamp(attempt.started_at))
    if attempt.ended_at is not None:
        message.end_time.CopyFrom(timestamp(attempt.ended_at))
    if attempt.failure is not None:
        message.failure.CopyFrom(_failure_out(attempt.failure))
    return message


def _failure_out(failure: model.Failure) -> run_pb2.Failure:
    message = run_pb2.Failure(
        type=failure.type,
        message=failure.message,
        stack_trace=failure.stack_trace,
        permanent=failure.permanent,
    )
    if failure.retry_after_ms is not None:
        message.retry_after.CopyFrom(duration(failure.retry_after_ms))
    return message


def instance_out(instance: model.Instance, namespace: str) -> admin_pb2.Instance:
    """Return one sidecar as it reported itself."""
    return admin_pb2.Instance(
        instance_id=instance.instance_id,
        state=enum_out(instance.state, admin_pb2.InstanceState, "INSTANCE_STATE_"),
        version=instance.version,
        backend=instance.backend,
        tzdata_version=instance.tzdata_version,
        start_time=timestamp(instance.started_at),
        seen_time=timestamp(instance.seen_at),
        clock_offset=duration(instance.clock_offset_ms),
        running=instance.running,
        ready=instance.ready and instance.state is not model.InstanceState.LOST,
        reasons=instance.reasons,
        doubts=instance.doubts,
        incarnation=instance.incarnation,
        namespace=namespace,
    )
