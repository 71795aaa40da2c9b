"""Errors become a code, a reason, details and one line, and always fit into trailers."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from anarchon_server.core.errors import (
    AnarchonError,
    InvalidError,
    InvalidJobsError,
    InvalidScheduleError,
    NotFoundError,
    OutcomeUnknown,
    RefusedError,
    StoreUnavailable,
    UnsupportedError,
)
from anarchon_server.rpc.status import status_of

UNSUPPORTED = UnsupportedError("overlap=queue", "nats", ("redis:lease", "sqlite"))


def details(error: AnarchonError) -> dict[str, Any]:
    trailers = dict(status_of(error).trailers())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    found: dict[str, Any] = {"status": status}
    for packed in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
            error_details_pb2.QuotaFailure,
        ):
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    assert found["ErrorInfo"].domain == "anarchon"
    assert found["ErrorInfo"].reason == trailers["anarchon-reason"]
    return found


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidError("count", 0, "1 to 9"), "INVALID_ARGUMENT", "INVALID_FIELD"),
        (InvalidScheduleError("minute", "61", "0 to 59"), "INVALID_ARGUMENT", "INVALID_SCHEDULE"),
        (UNSUPPORTED, "FAILED_PRECONDITION", "UNSUPPORTED"),
        (NotFoundError("session", "x"), "NOT_FOUND", "SESSION_NOT_FOUND"),
        (NotFoundError("job", "x"), "NOT_FOUND", "JOB_NOT_FOUND"),
        (NotFoundError("run", "x"), "NOT_FOUND", "RUN_NOT_FOUND"),
        (NotFoundError("instance", "x"), "NOT_FOUND", "INSTANCE_NOT_FOUND"),
        (RefusedError("SESSION_REPLACED", "x"), "ABORTED", "SESSION_REPLACED"),
        (RefusedError("LIMIT_EXCEEDED", "x"), "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"),
        (RefusedError("DRAINING", "x"), "UNAVAILABLE", "DRAINING"),
        (RefusedError("STORE_UNAVAILABLE", "x"), "UNAVAILABLE", "STORE_UNAVAILABLE"),
        (RefusedError("VERSION", "x"), "FAILED_PRECONDITION", "VERSION"),
        (RefusedError("BAD_CREDENTIALS", "x"), "UNAUTHENTICATED", "BAD_CREDENTIALS"),
        (RefusedError("RUN_FINAL", "x"), "FAILED_PRECONDITION", "RUN_FINAL"),
        (StoreUnavailable("down"), "UNAVAILABLE", "STORE_UNAVAILABLE"),
        (OutcomeUnknown("reset"), "UNAVAILABLE", "STORE_UNAVAILABLE"),
        (AnarchonError("x"), "INTERNAL", "UNSPECIFIED"),
    ],
)
def test_every_error_has_its_code_and_reason(error: AnarchonError, code: str, reason: str) -> None:
    status = status_of(error)
    assert (status.code.name, status.reason) == (code, reason)
    found = details(error)
    assert found["status"].code == grpc.StatusCode[code].value[0]
    assert found["status"].message == status.message


def test_a_wrong_field_is_named_in_a_bad_request() -> None:
    (violation,) = details(InvalidError("count", 0, "1 to 9"))["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("count", "count is 0: 1 to 9")


def test_what_the_backend_cannot_do_names_those_that_can() -> None:
    assert dict(details(UNSUPPORTED)["ErrorInfo"].metadata) == {
        "feature": "overlap=queue",
        "backend": "nats",
        "backends": "redis:lease,sqlite",
    }


def test_what_may_be_repeated_says_when() -> None:
    assert details(StoreUnavailable("down"))["RetryInfo"].retry_delay.seconds == 1
    assert "RetryInfo" not in details(InvalidError("a", 1, "b"))


def test_a_limit_is_told_as_a_quota() -> None:
    (violation,) = details(RefusedError("LIMIT_EXCEEDED", "64 at most"))["QuotaFailure"].violations
    assert violation.description == "64 at most"


def test_every_bad_job_is_named_with_its_field() -> None:
    error = InvalidJobsError(
        [(0, "a", InvalidError("jitter", "9s", "less")), (3, "b", UNSUPPORTED)]
    )
    assert status_of(error).reason == "INVALID_FIELD"
    assert "job 'a': jitter" in status_of(error).message
    assert "job 'b': overlap=queue" in status_of(error).message
    fields = [v.field for v in details(error)["BadRequest"].field_violations]
    assert fields == ["jobs[0].jitter", "jobs[3]"]


def test_jobs_that_are_all_unsupported_or_all_unreadable_have_that_reason() -> None:
    unsupported = status_of(InvalidJobsError([(0, "a", UNSUPPORTED), (1, "b", UNSUPPORTED)]))
    assert (unsupported.code.name, unsupported.reason) == ("FAILED_PRECONDITION", "UNSUPPORTED")
    assert unsupported.metadata["feature"] == "overlap=queue"
    bad = InvalidScheduleError("minute", "61", "0 to 59")
    assert status_of(InvalidJobsError([(0, "a", bad)])).reason == "INVALID_SCHEDULE"


def test_whatever_is_wrong_it_fits_into_trailers_and_onto_one_line() -> None:
    nasty = "\n\x1b[31m\u2028é" * 100
    error = InvalidJobsError(
        [(n, nasty, InvalidError(f"field{n}", nasty, "x" * 500)) for n in range(2_000)]
    )
    status = status_of(error)
    assert status.message.isprintable()
    assert status.message.endswith("more")
    wire = len(status.message.encode()) * 3
    wire += sum(len(value) * 4 // 3 for _, value in status.trailers())
    assert wire < 8 * 1024
