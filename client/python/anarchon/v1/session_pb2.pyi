from anarchon.v1 import job_pb2 as _job_pb2
from anarchon.v1 import run_pb2 as _run_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReceiptStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECEIPT_STATUS_UNSPECIFIED: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_RECORDED: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_FENCED: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_STORE_UNAVAILABLE: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_UNKNOWN_TOKEN: _ClassVar[ReceiptStatus]
    RECEIPT_STATUS_ALREADY_COMPLETED: _ClassVar[ReceiptStatus]
RECEIPT_STATUS_UNSPECIFIED: ReceiptStatus
RECEIPT_STATUS_RECORDED: ReceiptStatus
RECEIPT_STATUS_FENCED: ReceiptStatus
RECEIPT_STATUS_STORE_UNAVAILABLE: ReceiptStatus
RECEIPT_STATUS_UNKNOWN_TOKEN: ReceiptStatus
RECEIPT_STATUS_ALREADY_COMPLETED: ReceiptStatus

class SubscribeRequest(_message.Message):
    __slots__ = ("session_id", "client", "jobs", "max_concurrency", "in_flight")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    client: ClientInfo
    jobs: _containers.RepeatedCompositeFieldContainer[_job_pb2.JobSpec]
    max_concurrency: int
    in_flight: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., client: _Optional[_Union[ClientInfo, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[_job_pb2.JobSpec, _Mapping]]] = ..., max_concurrency: _Optional[int] = ..., in_flight: _Optional[_Iterable[str]] = ...) -> None: ...

class ClientInfo(_message.Message):
    __slots__ = ("language", "version", "host", "process_id", "features", "process_start_ticks", "pid_namespace")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_START_TICKS_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    language: str
    version: str
    host: str
    process_id: int
    features: _containers.RepeatedScalarFieldContainer[str]
    process_start_ticks: int
    pid_namespace: int
    def __init__(self, language: _Optional[str] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., process_id: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., process_start_ticks: _Optional[int] = ..., pid_namespace: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("attached", "runs", "cancel", "drain")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    runs: Assignments
    cancel: Cancellation
    drain: Drain
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., runs: _Optional[_Union[Assignments, _Mapping]] = ..., cancel: _Optional[_Union[Cancellation, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("instance_id", "server_version", "features", "keep_alive_interval", "session_ttl", "lost", "notes")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    server_version: str
    features: _containers.RepeatedScalarFieldContainer[str]
    keep_alive_interval: _duration_pb2.Duration
    session_ttl: _duration_pb2.Duration
    lost: _containers.RepeatedCompositeFieldContainer[Cancellation]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, instance_id: _Optional[str] = ..., server_version: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., keep_alive_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., session_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lost: _Optional[_Iterable[_Union[Cancellation, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Assignments(_message.Message):
    __slots__ = ("assignments",)
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    def __init__(self, assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("token", "job", "slot", "attempt", "fence", "trigger", "instance_id", "lease_end_time", "timeout", "payload", "traceparent", "tracestate", "cause")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_TIME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    token: str
    job: str
    slot: int
    attempt: int
    fence: int
    trigger: _run_pb2.Trigger
    instance_id: str
    lease_end_time: _timestamp_pb2.Timestamp
    timeout: _duration_pb2.Duration
    payload: bytes
    traceparent: str
    tracestate: str
    cause: _run_pb2.AttemptCause
    def __init__(self, token: _Optional[str] = ..., job: _Optional[str] = ..., slot: _Optional[int] = ..., attempt: _Optional[int] = ..., fence: _Optional[int] = ..., trigger: _Optional[_Union[_run_pb2.Trigger, str]] = ..., instance_id: _Optional[str] = ..., lease_end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., payload: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., cause: _Optional[_Union[_run_pb2.AttemptCause, str]] = ...) -> None: ...

class Cancellation(_message.Message):
    __slots__ = ("token", "reason", "message")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    token: str
    reason: _run_pb2.CancelReason
    message: str
    def __init__(self, token: _Optional[str] = ..., reason: _Optional[_Union[_run_pb2.CancelReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session_id", "in_flight", "draining", "confirm")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    in_flight: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    confirm: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., in_flight: _Optional[_Iterable[str]] = ..., draining: bool = ..., confirm: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("session_ttl", "stream_open", "lost", "keep_alive_interval", "confirmed")
    SESSION_TTL_FIELD_NUMBER: _ClassVar[int]
    STREAM_OPEN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    session_ttl: _duration_pb2.Duration
    stream_open: bool
    lost: _containers.RepeatedCompositeFieldContainer[Cancellation]
    keep_alive_interval: _duration_pb2.Duration
    confirmed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., stream_open: bool = ..., lost: _Optional[_Iterable[_Union[Cancellation, _Mapping]]] = ..., keep_alive_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., confirmed: _Optional[_Iterable[str]] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("token", "outcome")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    token: str
    outcome: _run_pb2.Outcome
    def __init__(self, token: _Optional[str] = ..., outcome: _Optional[_Union[_run_pb2.Outcome, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("receipts",)
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("status", "state", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: ReceiptStatus
    state: _run_pb2.RunState
    message: str
    def __init__(self, status: _Optional[_Union[ReceiptStatus, str]] = ..., state: _Optional[_Union[_run_pb2.RunState, str]] = ..., message: _Optional[str] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "stopped")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    stopped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., stopped: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
