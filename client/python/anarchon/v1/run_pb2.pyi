from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Trigger(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRIGGER_UNSPECIFIED: _ClassVar[Trigger]
    TRIGGER_SCHEDULE: _ClassVar[Trigger]
    TRIGGER_MANUAL: _ClassVar[Trigger]
    TRIGGER_CATCH_UP: _ClassVar[Trigger]

class AttemptCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTEMPT_CAUSE_UNSPECIFIED: _ClassVar[AttemptCause]
    ATTEMPT_CAUSE_CLAIM: _ClassVar[AttemptCause]
    ATTEMPT_CAUSE_TAKEOVER: _ClassVar[AttemptCause]
    ATTEMPT_CAUSE_RETRY: _ClassVar[AttemptCause]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_DUE: _ClassVar[RunState]
    RUN_STATE_CLAIMED: _ClassVar[RunState]
    RUN_STATE_RUNNING: _ClassVar[RunState]
    RUN_STATE_INTERRUPTED: _ClassVar[RunState]
    RUN_STATE_RETRYING: _ClassVar[RunState]
    RUN_STATE_SUCCESS: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
    RUN_STATE_SKIPPED: _ClassVar[RunState]

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_TIMEOUT: _ClassVar[CancelReason]
    CANCEL_REASON_LEASE_LOST: _ClassVar[CancelReason]
    CANCEL_REASON_FENCED: _ClassVar[CancelReason]
    CANCEL_REASON_SHUTDOWN: _ClassVar[CancelReason]
    CANCEL_REASON_SUPERSEDED: _ClassVar[CancelReason]
    CANCEL_REASON_REQUESTED: _ClassVar[CancelReason]
TRIGGER_UNSPECIFIED: Trigger
TRIGGER_SCHEDULE: Trigger
TRIGGER_MANUAL: Trigger
TRIGGER_CATCH_UP: Trigger
ATTEMPT_CAUSE_UNSPECIFIED: AttemptCause
ATTEMPT_CAUSE_CLAIM: AttemptCause
ATTEMPT_CAUSE_TAKEOVER: AttemptCause
ATTEMPT_CAUSE_RETRY: AttemptCause
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_DUE: RunState
RUN_STATE_CLAIMED: RunState
RUN_STATE_RUNNING: RunState
RUN_STATE_INTERRUPTED: RunState
RUN_STATE_RETRYING: RunState
RUN_STATE_SUCCESS: RunState
RUN_STATE_FAILED: RunState
RUN_STATE_SKIPPED: RunState
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_TIMEOUT: CancelReason
CANCEL_REASON_LEASE_LOST: CancelReason
CANCEL_REASON_FENCED: CancelReason
CANCEL_REASON_SHUTDOWN: CancelReason
CANCEL_REASON_SUPERSEDED: CancelReason
CANCEL_REASON_REQUESTED: CancelReason

class Run(_message.Message):
    __slots__ = ("job", "slot", "trigger", "state", "reason", "attempts", "lease_end_time", "next_attempt_time", "blocking_slot", "slots_covered", "request_id", "cancel_requested", "cancel_message")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_END_TIME_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_TIME_FIELD_NUMBER: _ClassVar[int]
    BLOCKING_SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_COVERED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    slot: int
    trigger: Trigger
    state: RunState
    reason: str
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    lease_end_time: _timestamp_pb2.Timestamp
    next_attempt_time: _timestamp_pb2.Timestamp
    blocking_slot: int
    slots_covered: int
    request_id: str
    cancel_requested: bool
    cancel_message: str
    def __init__(self, job: _Optional[str] = ..., slot: _Optional[int] = ..., trigger: _Optional[_Union[Trigger, str]] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., lease_end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., next_attempt_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., blocking_slot: _Optional[int] = ..., slots_covered: _Optional[int] = ..., request_id: _Optional[str] = ..., cancel_requested: bool = ..., cancel_message: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("attempt", "instance_id", "fence", "state", "reason", "cause", "claim_time", "start_time", "end_time", "failure", "result")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    instance_id: str
    fence: int
    state: RunState
    reason: str
    cause: AttemptCause
    claim_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    failure: Failure
    result: str
    def __init__(self, attempt: _Optional[int] = ..., instance_id: _Optional[str] = ..., fence: _Optional[int] = ..., state: _Optional[_Union[RunState, str]] = ..., reason: _Optional[str] = ..., cause: _Optional[_Union[AttemptCause, str]] = ..., claim_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., result: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("success", "failure", "stopped", "elapsed")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    success: Success
    failure: Failure
    stopped: Stopped
    elapsed: _duration_pb2.Duration
    def __init__(self, success: _Optional[_Union[Success, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ..., elapsed: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Success(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: str
    def __init__(self, result: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("type", "message", "stack_trace", "permanent", "retry_after")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STACK_TRACE_FIELD_NUMBER: _ClassVar[int]
    PERMANENT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    stack_trace: str
    permanent: bool
    retry_after: _duration_pb2.Duration
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., stack_trace: _Optional[str] = ..., permanent: bool = ..., retry_after: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: CancelReason
    def __init__(self, reason: _Optional[_Union[CancelReason, str]] = ...) -> None: ...
