"""What goes into the engine and what comes out of it: inputs and commands, as frozen values.

Imports `model`, `store` and `errors` only. The shell turns the world into inputs and carries
commands out; the simulator does the same with a world of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.model import (
    AttemptCause,
    CancelReason,
    Client,
    JobSpec,
    Outcome,
    RunState,
    Trigger,
)
from anarchon_server.core.store import Reply

# --- Inputs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """The time the engine asked to be woken at has come."""


@dataclass(frozen=True, slots=True)
class StoreReplied:
    """The store answered call `call_id`; `wall_at` is the host's clock on receipt (ms)."""

    call_id: int
    reply: Reply[Any]
    wall_at: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Call `call_id` failed. `unknown`: it may have been done (S11)."""

    call_id: int
    message: str
    unknown: bool


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A client opened stream `stream_id` (chosen by the shell, never reused).

    `watchable`: the client's process is in the sidecar's own pid namespace and started when
    it says, so that its end will be seen (`ClientExited`). `wall_at` is the host's clock.
    """

    session_id: str
    stream_id: int
    client: Client
    specs: tuple[JobSpec, ...]
    max_concurrency: int
    in_flight: tuple[str, ...]
    wall_at: int
    watchable: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The stream is gone. That alone is not a death (S24)."""

    session_id: str
    stream_id: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """A client says that it lives; answered by a `KeepAliveAnswer` or an error."""

    request_id: int
    session_id: str
    in_flight: tuple[str, ...]
    draining: bool = False
    confirm: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Complete:
    """A client reports results, in order; answered by a `CompleteAnswer`."""

    request_id: int
    results: tuple[tuple[str, Outcome], ...]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """A client leaves; `stopped` are attempts that surely stopped. Answered by `Closed`."""

    request_id: int
    session_id: str
    stopped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientExited:
    """The client's process is gone for certain (pidfd): S24."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Woken:
    """The store's `watch` yielded: a run may have been freed."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """The process did not run for `gap_ms` (stopped, or the machine slept): S4."""

    gap_ms: int


@dataclass(frozen=True, slots=True)
class Reload:
    """The configuration's jobs are these from now on. `file` is where they stand, for the log."""

    jobs: Mapping[str, JobSpec]
    file: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """The instance is to stop (S23). A second one skips the grace."""


Input = (
    Tick
    | StoreReplied
    | StoreFailed
    | Subscribe
    | StreamEnded
    | KeepAlive
    | Complete
    | CloseSession
    | ClientExited
    | Woken
    | Suspended
    | Reload
    | Stop
)

# --- Commands ----------------------------------------------------------------------------


class Method(StrEnum):
    """The store's methods that the engine calls, by their names in the port."""

    CLAIM = "claim"
    SETTLE = "settle"
    BEAT = "beat"
    COMPLETE = "complete"
    RELEASE = "release"
    REGISTER = "register"
    PRUNE = "prune"
    INSTANCES = "instances"
    JOBS = "jobs"


@dataclass(frozen=True, slots=True)
class CallStore:
    """Call `store.<method>(*arguments)` and bring back `StoreReplied` or `StoreFailed`.

    After `timeout_ms` the call is given up, its outcome unknown.
    """

    call_id: int
    method: Method
    arguments: tuple[Any, ...]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A token that the session does not own, and why."""

    token: str
    reason: CancelReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class Attached:
    """The first event of every stream."""

    keep_alive_ms: int
    session_ttl_ms: int
    lost: tuple[Lost, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt handed to a client. `lease_end_at` is a time by the store's clock (None: there
    is no lease); `timeout_ms` counts from now.
    """

    token: str
    job: str
    slot: int
    attempt: int
    fence: int
    trigger: Trigger
    cause: AttemptCause
    lease_end_at: int | None
    timeout_ms: int | None
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Assigned:
    """Run these."""

    assignments: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Stop this."""

    token: str
    reason: CancelReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class Draining:
    """Nothing more comes on this stream; what runs after `grace_ms` will be cancelled."""

    grace_ms: int


@dataclass(frozen=True, slots=True)
class Send:
    """Put an event on a session's stream. The shell never waits for a client (a full queue
    ends the stream).
    """

    session_id: str
    stream_id: int
    event: Attached | Assigned | Cancelled | Draining


@dataclass(frozen=True, slots=True)
class EndStream:
    """End a stream; with `error` as its status, or normally."""

    session_id: str
    stream_id: int
    error: AnarchonError | None


@dataclass(frozen=True, slots=True)
class KeepAliveAnswer:
    """What a client may still believe; `session_ttl_ms` counts from when it sent."""

    session_ttl_ms: int
    keep_alive_ms: int
    stream_open: bool
    lost: tuple[Lost, ...]
    confirmed: tuple[str, ...]


class ReceiptStatus(StrEnum):
    """Whether a result counted; the words of the protocol."""

    RECORDED = "recorded"
    FENCED = "fenced"
    STORE_UNAVAILABLE = "store_unavailable"
    UNKNOWN_TOKEN = "unknown_token"
    ALREADY_COMPLETED = "already_completed"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one result."""

    status: ReceiptStatus
    state: RunState | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """One receipt a result, in the request's order."""

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is gone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a unary request; an error is raised to the caller."""

    request_id: int
    answer: KeepAliveAnswer | CompleteAnswer | Closed | AnarchonError


@dataclass(frozen=True, slots=True)
class WatchClient:
    """Watch the client's process and bring `ClientExited` when it ends."""

    session_id: str
    process_id: int


@dataclass(frozen=True, slots=True)
class UnwatchClient:
    """The session is over; stop watching."""

    session_id: str


class Level(StrEnum):
    """How loud a log line is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Log:
    """One structured log line: what happened (a constant), and the facts."""

    level: Level
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Everything is handed over or left to its lease: the process may end."""


Command = CallStore | Send | EndStream | Answer | WatchClient | UnwatchClient | Log | Stopped
