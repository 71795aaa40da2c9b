"""Domain errors to what a caller gets: a gRPC code, a `google.rpc.Status`, the trailer.

Imports grpc, the googleapis messages and core's errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from anarchon_server.core.errors import (
    AnarchonError,
    InvalidError,
    InvalidJobsError,
    InvalidScheduleError,
    NotFoundError,
    RefusedError,
    StoreError,
    UnsupportedError,
)

DOMAIN = "anarchon"
REASON_TRAILER = "anarchon-reason"
DETAILS_TRAILER = "grpc-status-details-bin"

# A peer takes about 8 KiB of trailers in all, and a message's characters may grow threefold on
# the wire, and the details by a third.
_MESSAGE_MAX_BYTES = 1_024
_VIOLATIONS_MAX_BYTES = 2_048
_VIOLATION_TEXT_MAX = 300

_RETRY_AFTER_S = 1

_CODES = {
    "RUN_FINAL": grpc.StatusCode.FAILED_PRECONDITION,
    "VERSION": grpc.StatusCode.FAILED_PRECONDITION,
    "SESSION_REPLACED": grpc.StatusCode.ABORTED,
    "LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "STORE_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "BAD_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
}


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller gets. `violations` are (field, description); `metadata` goes with the reason."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    violations: tuple[tuple[str, str], ...] = ()

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the trailing metadata that says all of it."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        status.details.extend(map(_packed, self._details()))
        return (
            (REASON_TRAILER, self.reason),
            (DETAILS_TRAILER, status.SerializeToString()),
        )

    def _details(self) -> Iterator[Message]:
        yield error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        if self.violations:
            yield error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                    for name, text in self.violations
                ]
            )
        if self.code is grpc.StatusCode.UNAVAILABLE:
            yield error_details_pb2.RetryInfo(retry_delay=Duration(seconds=_RETRY_AFTER_S))
        if self.reason == "LIMIT_EXCEEDED":
            violation = error_details_pb2.QuotaFailure.Violation(description=self.message)
            yield error_details_pb2.QuotaFailure(violations=[violation])


def status_of(error: AnarchonError) -> Status:
    """Return what a caller gets for an error."""
    match error:
        case InvalidJobsError():
            return _of_bad_jobs(error)
        case InvalidError():
            return Status(
                grpc.StatusCode.INVALID_ARGUMENT,
                _reason_of_invalid(error),
                _one_line(str(error)),
                violations=((error.field, _one_line(str(error))[:_VIOLATION_TEXT_MAX]),),
            )
        case UnsupportedError():
            return Status(
                grpc.StatusCode.FAILED_PRECONDITION,
                "UNSUPPORTED",
                _one_line(str(error)),
                metadata=_unsupported(error),
            )
        case NotFoundError():
            reason = f"{error.kind.upper()}_NOT_FOUND"
            return Status(grpc.StatusCode.NOT_FOUND, reason, _one_line(str(error)))
        case RefusedError():
            return Status(_CODES[error.reason], error.reason, _one_line(str(error)))
        case StoreError():
            message = _one_line(f"the store does not answer now: {error}")
            return Status(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", message)
        case _:
            return Status(grpc.StatusCode.INTERNAL, "UNSPECIFIED", _one_line(str(error)))


def _of_bad_jobs(error: InvalidJobsError) -> Status:
    """One status for all bad jobs; those that no message could hold are counted."""
    invalid = [e for _, _, e in error.problems if isinstance(e, InvalidError)]
    unsupported = [e for _, _, e in error.problems if isinstance(e, UnsupportedError)]
    if invalid:
        code = grpc.StatusCode.INVALID_ARGUMENT
        reasons = {_reason_of_invalid(e) for e in invalid}
        reason = reasons.pop() if len(reasons) == 1 else "INVALID_FIELD"
    else:
        code, reason = grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED"
    violations = (
        (f"jobs[{index}]{_path(problem)}", _one_line(str(problem))[:_VIOLATION_TEXT_MAX])
        for index, _, problem in error.problems
    )
    return Status(
        code,
        reason,
        _all_in_one_line([f"job {name!a}: {problem}" for _, name, problem in error.problems]),
        metadata=_unsupported(unsupported[0]) if unsupported and not invalid else {},
        violations=tuple(_fitting(violations)),
    )


def _path(problem: InvalidError | UnsupportedError) -> str:
    return f".{problem.field}" if isinstance(problem, InvalidError) else ""


def _reason_of_invalid(error: InvalidError) -> str:
    return "INVALID_SCHEDULE" if isinstance(error, InvalidScheduleError) else "INVALID_FIELD"


def _unsupported(error: UnsupportedError) -> dict[str, str]:
    return {
        "feature": error.feature,
        "backend": error.backend,
        "backends": ",".join(error.backends),
    }


def _all_in_one_line(problems: list[str]) -> str:
    """Name as many as fit, and count the rest."""
    message = ""
    for done, problem in enumerate(problems):
        longer = f"{message}; {_one_line(problem)}" if message else _one_line(problem)
        rest = len(problems) - done
        if message and len(longer.encode()) > _MESSAGE_MAX_BYTES - 32:
            return f"{message}; and {rest} more"
        message = longer
    return _one_line(message)


def _fitting(violations: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    size = 0
    for name, text in violations:
        size += len(name.encode()) + len(text.encode())
        if size > _VIOLATIONS_MAX_BYTES:
            return
        yield name, text


def _one_line(text: str) -> str:
    """Return a text as one printable line that fits into a trailer."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return line.encode()[:_MESSAGE_MAX_BYTES].decode(errors="ignore")


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
