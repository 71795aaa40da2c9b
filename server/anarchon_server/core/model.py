"""The records every part of the sidecar speaks in: frozen values, no behaviour beyond reading them.

Imports the standard library's value types only. Every number is whole milliseconds unless its
name says otherwise; a name that ends in `_at` is an instant by the store's clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any


class Trigger(StrEnum):
    """What caused a run."""

    SCHEDULE = "schedule"
    MANUAL = "manual"
    CATCH_UP = "catch_up"


class AttemptCause(StrEnum):
    """Why an attempt was made."""

    CLAIM = "claim"
    TAKEOVER = "takeover"
    RETRY = "retry"


class RunState(StrEnum):
    """Where a run, or one of its attempts, is in its life."""

    DUE = "due"
    CLAIMED = "claimed"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    RETRYING = "retrying"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"

    @property
    def final(self) -> bool:
        """Whether nothing follows: a final state never changes (I3)."""
        return self in (RunState.SUCCESS, RunState.FAILED, RunState.SKIPPED)


class CancelReason(StrEnum):
    """Why an attempt is asked to stop."""

    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"
    FENCED = "fenced"
    SHUTDOWN = "shutdown"
    SUPERSEDED = "superseded"
    REQUESTED = "requested"


class OverlapPolicy(StrEnum):
    """What a due slot does while another run of its job is unfinished (S18)."""

    SKIP = "skip"
    ALLOW = "allow"
    QUEUE = "queue"
    CANCEL = "cancel"


class CatchUpPolicy(StrEnum):
    """Which missed slots are run (S20)."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"


class Reason:
    """The reasons a run or an attempt can carry, where its state alone does not say why."""

    TIMEOUT = "timeout"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    OVERLAP = "overlap"
    MISSED = "missed"
    ABANDONED = "abandoned"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    HANDED_OVER = "handed_over"
    RUNNER_LOST = "runner_lost"
    NOT_ACCEPTED = "not_accepted"


@dataclass(frozen=True, slots=True)
class EverySchedule:
    """Due at `offset_ms` + n * `period_ms` since the Unix epoch (S6)."""

    period_ms: int
    offset_ms: int = 0


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """Due whenever the wall clock of `time_zone` (empty: UTC) matches `expression` (S7)."""

    expression: str
    time_zone: str = ""


@dataclass(frozen=True, slots=True)
class RetrySpec:
    """What follows a failed attempt (S22)."""

    retries: int
    delay_ms: int | None = None
    factor: float = 0.0
    max_delay_ms: int | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as a client states it: what is `None` (or 0, or empty) was not set.

    `policy.resolve` turns it into a `Job` with every value decided.
    """

    name: str
    schedule: EverySchedule | CronSchedule | None = None
    jitter_ms: int | None = None
    timeout_ms: int | None = None
    heartbeat_ms: int | None = None
    lease_ms: int | None = None
    overlap: OverlapPolicy | None = None
    catch_up: CatchUpPolicy | None = None
    catch_up_window_ms: int | None = None
    catch_up_limit: int = 0
    start_deadline_ms: int | None = None
    max_attempts: int = 0
    retry: RetrySpec | None = None
    concurrency: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    by_name: bool = False
    cancel_grace_ms: int | None = None
    stop_grace_ms: int | None = None

    def to_json(self) -> str:
        """The spec as canonical JSON: equal specs give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """The spec that `to_json` wrote. Fields of later versions are ignored."""
        values = _known_of(cls, json.loads(text))
        schedule = values.get("schedule")
        if schedule is not None:
            kind = EverySchedule if "period_ms" in schedule else CronSchedule
            values["schedule"] = kind(**_known_of(kind, schedule))
        if values.get("retry") is not None:
            values["retry"] = RetrySpec(**_known_of(RetrySpec, values["retry"]))
        if values.get("overlap") is not None:
            values["overlap"] = OverlapPolicy(values["overlap"])
        if values.get("catch_up") is not None:
            values["catch_up"] = CatchUpPolicy(values["catch_up"])
        values["labels"] = tuple((k, v) for k, v in values.get("labels", ()))
        return cls(**values)


def _known_of(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(kind)}
    return {name: value for name, value in raw.items() if name in known}


@dataclass(frozen=True)
class Definition:
    """One version of a job, as the store keeps it (S28).

    `schedule_id` is the schedule's canonical identity (empty: the job has no schedule);
    `window_ms` is the job's `catch_up_window`, below which pruning may not raise the floor. The
    texts are made once, as an instance registers ten thousand definitions again and again.
    """

    spec: JobSpec
    schedule_id: str
    window_ms: int

    @property
    def job(self) -> str:
        """The job's name."""
        return self.spec.name

    @cached_property
    def spec_json(self) -> str:
        """The spec as canonical JSON, as the store keeps it."""
        return self.spec.to_json()

    @cached_property
    def definition_id(self) -> str:
        """A digest of the spec: two instances hold one definition exactly if these are equal."""
        return hashlib.sha256(self.spec_json.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error raised by a handler, cut to the limits of S30."""

    type: str
    message: str = ""
    stack_trace: str = ""
    permanent: bool = False
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended, in the application's words: exactly one of three.

    A return (`failure` and `stopped` are None; `result` is what it returned), an error
    (`failure`), or obedience to a cancellation (`stopped`).
    """

    result: str = ""
    failure: Failure | None = None
    stopped: CancelReason | None = None
    elapsed_ms: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Until when the holder of an attempt is believed to be alive.

    `until` is on the store's lease clock, which belongs to the boot `boot_id` (empty where
    the lease clock is the store's wall clock and outlives boots). `end_at` is the same
    moment by the store's wall clock, for people.
    """

    until: int
    length_ms: int
    end_at: int
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a run by one instance."""

    attempt: int
    token: str
    fence: int
    instance_id: str
    incarnation: str
    cause: AttemptCause
    state: RunState
    claimed_at: int
    reason: str = ""
    started_at: int | None = None
    ended_at: int | None = None
    failure: Failure | None = None
    result: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One slot of a job, as the store keeps it.

    `current` is its newest attempt. `lost` counts the earlier attempts whose runner died,
    froze or was cut off; `freed` is the reason for which the present attempt was handed
    over or released (empty: it was not). `cancel` and `cancelled_at` (on the lease clock)
    are a request to stop, `cancel_message` what it said. The limits are those of the definition that claimed the attempt.

    A RETRYING run may be claimed from `retry_at` (store's time) on, `retry_delay_ms` after the
    attempt that failed. `request_id` is that of the call that triggered it. `earlier` are the
    attempts before the newest, oldest first, where a backend keeps a run in one piece (claim-only).
    """

    job: str
    slot: int
    trigger: Trigger
    state: RunState
    reason: str = ""
    current: Attempt | None = None
    lease: Lease | None = None
    freed: str = ""
    lost: int = 0
    failed: int = 0
    max_attempts: int = 0
    window_ms: int = 0
    cancel: CancelReason | None = None
    cancelled_at: int = 0
    cancel_message: str = ""
    cancel_grace_ms: int = 0
    blocking_slot: int = 0
    slots_covered: int = 0
    ended_at: int | None = None
    retries: int = 0
    retry_at: int | None = None
    retry_delay_ms: int = 0
    request_id: str = ""
    earlier: tuple[Attempt, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it waits for its first attempt: queued, caught up or triggered."""
        return self.state is RunState.DUE

    @property
    def unfinished(self) -> bool:
        """Whether an attempt was made and the run has not ended: what S18 is about."""
        return not self.state.final and not self.waits

    @property
    def attempt(self) -> int:
        """The number of the newest attempt; 0 where there was none."""
        return self.current.attempt if self.current else 0

    @property
    def token(self) -> str:
        """The newest attempt's token; empty where there was none."""
        return self.current.token if self.current else ""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as the store shows it at one moment.

    An attempt whose lease is over shows as INTERRUPTED here, though nothing was written
    (S19). `lease_left_ms` is what is left of the lease by the store's clock: at most 0 when
    it is over, None where there is none. `wait_ms` is how long a RETRYING run still waits (None:
    it is none). `attempts` is filled by `runs` only, oldest first, at most the newest 100.
    """

    run: Run
    lease_left_ms: int | None = None
    attempts: tuple[Attempt, ...] = ()
    wait_ms: int | None = None

    @property
    def takeable(self) -> bool:
        """Whether the present attempt is over, so that another may be claimed."""
        return bool(self.run.freed) or (self.lease_left_ms is not None and self.lease_left_ms <= 0)


@dataclass(frozen=True, slots=True)
class Client:
    """What a session's client says of itself."""

    language: str = ""
    version: str = ""
    host: str = ""
    process_id: int = 0
    features: tuple[str, ...] = ()
    process_start_ticks: int = 0
    pid_namespace: int = 0


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    IDLE = "idle"
    ACTIVE = "active"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Instance:
    """One sidecar, as it reports itself to the store with every heartbeat.

    `lease_ms` is its longest lease: an instance not heard of for longer is LOST, and what
    it holds no longer counts as held by a live instance (S28). `outlook` has a text for each
    zone of its jobs: what its zone database has of it from `outlook_at` on (S5).
    """

    instance_id: str
    incarnation: str
    state: InstanceState = InstanceState.IDLE
    version: str = ""
    backend: str = ""
    tzdata_version: str = ""
    started_at: int = 0
    seen_at: int = 0
    clock_offset_ms: int = 0
    lease_ms: int = 30_000
    running: int = 0
    ready: bool = False
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = field(default=())
    outlook_at: int = 0
    outlook: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Instance:
        """The record that `to_json` wrote. Fields of later versions are ignored."""
        values = _known_of(cls, json.loads(text))
        values["state"] = InstanceState(values["state"])
        for name in ("reasons", "doubts", "outlook"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ScheduleInUse:
    """A schedule whose slots are slots of its job: the current one, or one a live instance holds.

    `settled` is what the store has settled of it (S20), `spec` a definition that has it.
    """

    schedule_id: str
    settled: int
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the store shows it: the current definition and what the cluster knows of it."""

    name: str
    spec: JobSpec
    definition_at: int
    definitions_differ: bool
    instance_ids: tuple[str, ...]
    last_run: RunView | None
    paused_at: int | None = None
    pause_reason: str = ""
    schedules: tuple[ScheduleInUse, ...] = ()


def labels_of(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels in the order in which a spec keeps them."""
    return tuple(sorted(labels.items()))
