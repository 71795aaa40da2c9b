from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CatchUpPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CATCH_UP_POLICY_UNSPECIFIED: _ClassVar[CatchUpPolicy]
    CATCH_UP_POLICY_NONE: _ClassVar[CatchUpPolicy]
    CATCH_UP_POLICY_LATEST: _ClassVar[CatchUpPolicy]
    CATCH_UP_POLICY_ALL: _ClassVar[CatchUpPolicy]

class OverlapPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERLAP_POLICY_UNSPECIFIED: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_SKIP: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_ALLOW: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_QUEUE: _ClassVar[OverlapPolicy]
    OVERLAP_POLICY_CANCEL: _ClassVar[OverlapPolicy]
CATCH_UP_POLICY_UNSPECIFIED: CatchUpPolicy
CATCH_UP_POLICY_NONE: CatchUpPolicy
CATCH_UP_POLICY_LATEST: CatchUpPolicy
CATCH_UP_POLICY_ALL: CatchUpPolicy
OVERLAP_POLICY_UNSPECIFIED: OverlapPolicy
OVERLAP_POLICY_SKIP: OverlapPolicy
OVERLAP_POLICY_ALLOW: OverlapPolicy
OVERLAP_POLICY_QUEUE: OverlapPolicy
OVERLAP_POLICY_CANCEL: OverlapPolicy

class JobSpec(_message.Message):
    __slots__ = ("name", "every", "cron", "jitter", "timeout", "heartbeat", "lease", "overlap", "catch_up", "max_attempts", "retry", "concurrency", "labels", "by_name", "cancel_grace", "stop_grace")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    BY_NAME_FIELD_NUMBER: _ClassVar[int]
    CANCEL_GRACE_FIELD_NUMBER: _ClassVar[int]
    STOP_GRACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    every: EverySchedule
    cron: CronSchedule
    jitter: _duration_pb2.Duration
    timeout: _duration_pb2.Duration
    heartbeat: _duration_pb2.Duration
    lease: _duration_pb2.Duration
    overlap: OverlapPolicy
    catch_up: CatchUp
    max_attempts: int
    retry: RetryPolicy
    concurrency: int
    labels: _containers.ScalarMap[str, str]
    by_name: bool
    cancel_grace: _duration_pb2.Duration
    stop_grace: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., every: _Optional[_Union[EverySchedule, _Mapping]] = ..., cron: _Optional[_Union[CronSchedule, _Mapping]] = ..., jitter: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., timeout: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., heartbeat: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lease: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., overlap: _Optional[_Union[OverlapPolicy, str]] = ..., catch_up: _Optional[_Union[CatchUp, _Mapping]] = ..., max_attempts: _Optional[int] = ..., retry: _Optional[_Union[RetryPolicy, _Mapping]] = ..., concurrency: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., by_name: bool = ..., cancel_grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., stop_grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EverySchedule(_message.Message):
    __slots__ = ("period", "offset")
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    period: _duration_pb2.Duration
    offset: _duration_pb2.Duration
    def __init__(self, period: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., offset: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CronSchedule(_message.Message):
    __slots__ = ("expression", "time_zone")
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    expression: str
    time_zone: str
    def __init__(self, expression: _Optional[str] = ..., time_zone: _Optional[str] = ...) -> None: ...

class CatchUp(_message.Message):
    __slots__ = ("policy", "window", "limit", "start_deadline")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    START_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    policy: CatchUpPolicy
    window: _duration_pb2.Duration
    limit: int
    start_deadline: _duration_pb2.Duration
    def __init__(self, policy: _Optional[_Union[CatchUpPolicy, str]] = ..., window: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., limit: _Optional[int] = ..., start_deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RetryPolicy(_message.Message):
    __slots__ = ("retries", "delay", "factor", "max_delay")
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    MAX_DELAY_FIELD_NUMBER: _ClassVar[int]
    retries: int
    delay: _duration_pb2.Duration
    factor: float
    max_delay: _duration_pb2.Duration
    def __init__(self, retries: _Optional[int] = ..., delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., factor: _Optional[float] = ..., max_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
