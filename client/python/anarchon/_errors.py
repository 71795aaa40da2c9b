"""The exceptions of the client, and what a gRPC status becomes. Imports the standard library only.

AnarchonError
├── JobError (ValueError)         a job, a handler or a policy is wrong; raised where it is written
├── ClientError (ValueError)      the client is set up wrongly: address, token file, limits
├── ForkedError                   used in another process than the one that connected
├── SidecarError                  what the sidecar answered, or that it did not
│   ├── SidecarUnavailableError   not there, or not now: tried again by itself
│   ├── RefusedError              this request will never be accepted: change it
│   │   ├── UnsupportedError      the sidecar's backend or version cannot do it
│   │   ├── VersionError          client and sidecar are too far apart
│   │   └── CredentialsError      the call token is missing or wrong
│   ├── NotFoundError             no such job, run or instance
│   ├── SessionNotFoundError      the sidecar does not know the session: subscribed again by itself
│   └── SessionReplacedError      another process uses this session
├── Cancelled                     raised by `ctx.check()`: the attempt is to stop
│   └── LeaseLost                 ... and no longer ours: no further step may be taken
│       └── Fenced                ... because another attempt has begun
├── NotConfirmedError             raised by `ctx.confirm()`: could not be confirmed now
├── Retry                         raise it in a handler: failed, try again after that long
└── Permanent                     raise it in a handler: failed, do not try again
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum

from anarchon._duration import Duration, to_timedelta


class AnarchonError(Exception):
    """Everything that Anarchon raises."""


class JobError(AnarchonError, ValueError):
    """A job, its handler or one of its policies is wrong. The message says what would be right.

    `field` is the argument that is wrong, as in "retry_delay", and `expected` what would be right;
    both are empty where no single argument is.
    """

    def __init__(self, message: str, *, field: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.expected = expected


class ClientError(AnarchonError, ValueError):
    """The client is set up wrongly: its address, token file or limits."""


class ForkedError(AnarchonError):
    """The client is used in another process than the one in which it connected."""


# ── The sidecar's answers ───────────────────────────────────────────────────────────────────────


class SidecarError(AnarchonError):
    """What the sidecar answered. `reason` is a word of the protocol's ErrorReason, or empty."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class SidecarUnavailableError(SidecarError):
    """The sidecar is not there, is going away, or cannot reach its store. It may be soon."""


class RefusedError(SidecarError):
    """The sidecar will never accept this request. The message is its own."""


class UnsupportedError(RefusedError):
    """The backend behind the sidecar cannot do what was asked, or this version cannot.

    The message says which backends can.
    """


class VersionError(RefusedError):
    """Client and sidecar are too far apart in version."""


class CredentialsError(RefusedError):
    """The call token is missing or wrong."""


class NotFoundError(SidecarError):
    """There is no such job, run or instance."""


class SessionNotFoundError(SidecarError):
    """The sidecar does not know the session. The client subscribes again by itself."""


class SessionReplacedError(SidecarError):
    """Another stream took the session over: two processes use one session identifier."""


_BY_REASON: Mapping[str, type[SidecarError]] = {
    "SESSION_NOT_FOUND": SessionNotFoundError,
    "SESSION_REPLACED": SessionReplacedError,
    "JOB_NOT_FOUND": NotFoundError,
    "RUN_NOT_FOUND": NotFoundError,
    "INSTANCE_NOT_FOUND": NotFoundError,
    "LIMIT_EXCEEDED": RefusedError,
    "UNSUPPORTED": UnsupportedError,
    "VERSION": VersionError,
    "BAD_CREDENTIALS": CredentialsError,
}

_BY_CODE: Mapping[str, type[SidecarError]] = {
    "INVALID_ARGUMENT": RefusedError,
    "FAILED_PRECONDITION": RefusedError,
    "UNIMPLEMENTED": VersionError,
    "UNAUTHENTICATED": CredentialsError,
    "PERMISSION_DENIED": CredentialsError,
    "NOT_FOUND": NotFoundError,
}


def error_from_status(code: str, reason: str, message: str) -> SidecarError:
    """Return the exception for a gRPC status: its code's name and the trailer `anarchon-reason`.

    The reason decides where it is known, else the code; any other code is taken as "not now".
    """
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, SidecarUnavailableError)
    return kind(message or code, reason)


# ── Cancellation ────────────────────────────────────────────────────────────────────────────────


class CancelReason(StrEnum):
    """Why an attempt is to stop."""

    TIMEOUT = "timeout"
    """The attempt outlived its timeout."""
    LEASE_LOST = "lease_lost"
    """The lease could not be renewed in time."""
    FENCED = "fenced"
    """Another attempt has begun."""
    SHUTDOWN = "shutdown"
    """The instance is stopping and its grace is used up."""
    SUPERSEDED = "superseded"
    """A newer slot of the job replaces this run."""
    REQUESTED = "requested"
    """Somebody cancelled the run."""
    OTHER = "other"
    """A reason that this version of the client does not know."""


class Cancelled(AnarchonError):  # noqa: N818 - it is no error, it is an order
    """The attempt has been asked to stop: finish quickly, or just let this through."""

    def __init__(self, reason: CancelReason, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else str(reason))
        self.reason = reason


class LeaseLost(Cancelled):
    """The attempt can no longer be trusted to be the only one: take no further step."""


class Fenced(LeaseLost):
    """Another attempt of the run has begun: take no further step."""


def lost_error(reason: CancelReason, message: str = "") -> LeaseLost:
    """Return the error of an attempt that is no longer ours, for `reason`."""
    kind = Fenced if reason is CancelReason.FENCED else LeaseLost
    return kind(reason, message)


class NotConfirmedError(AnarchonError):
    """The attempt could not be confirmed at the store now. Do not take the step; try again."""


# ── For handlers to raise ───────────────────────────────────────────────────────────────────────


class Retry(AnarchonError):  # noqa: N818 - a handler says what it wants
    """Raised by a handler: the attempt failed; try again after `after`.

    `after` replaces the policy's pause before the next retry, and must be more than zero; `None`
    leaves it to the policy. Whether there is a next retry is the policy's to say: `retries`, by
    default none. Raises `JobError` for a bad duration.
    """

    def __init__(self, message: str = "", *, after: Duration | None = None) -> None:
        super().__init__(message)
        self.after: timedelta | None = None
        if after is not None:
            try:
                self.after = to_timedelta(after)
            except ValueError as error:
                raise JobError(f"Retry(after={after!r}): {error}") from None
            if self.after <= timedelta(0):
                raise JobError(f"Retry(after={after!r}): must be more than zero")


class Permanent(AnarchonError):  # noqa: N818 - a handler says what it wants
    """Raised by a handler: the attempt failed, and trying again is of no use.

    The run has failed, whatever `retries` says.
    """


class ForeignError(Exception):
    """Raised by a handler for what has failed outside of Python, such as a command.

    `details`, which may have many lines, is kept with the run in place of a stack trace.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


# In traces and in history people see the names that they import.
for _kind in list(globals().values()):
    if isinstance(_kind, type) and issubclass(_kind, AnarchonError):
        _kind.__module__ = "anarchon"
