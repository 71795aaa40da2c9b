"""From what a client states of a job to what is decided about it: defaults, relations, refusals.

Imports `limits`, `model`, `errors`, `slots` and the capabilities of `store`. What the backend
cannot do, or this version does not have yet, is refused here, before anything is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from anarchon_server.core import limits
from anarchon_server.core.errors import (
    InvalidError,
    InvalidJobsError,
    InvalidScheduleError,
    UnsupportedError,
)
from anarchon_server.core.model import (
    CatchUpPolicy,
    CronSchedule,
    Definition,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
)
from anarchon_server.core.slots import (
    Cron,
    Every,
    Schedule,
    ScheduleError,
    Unscheduled,
    format_duration,
)
from anarchon_server.core.store import CONTROL_BACKENDS, LEASE_BACKENDS, Capabilities

Draw = Callable[[int], int]
"""A uniform integer in [0, n], from an injected random source."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class Retry:
    """What follows a failed attempt, with every value decided (S22)."""

    retries: int
    delay_ms: int
    factor: float
    max_delay_ms: int

    def longest_pause(self, failed: int) -> int:
        """The most that is waited when `failed` attempts have failed before this one."""
        grown = self.delay_ms * self.factor ** min(failed, limits.RETRIES_MAX)
        return int(min(grown, self.max_delay_ms))

    def pause(self, failed: int, draw: Draw) -> int:
        """How long to wait: 50 % to 100 % of it, drawn."""
        longest = self.longest_pause(failed)
        return longest - draw(longest // 2)


@dataclass(frozen=True, slots=True)
class Job:
    """A job with every value decided. Durations in milliseconds; None: no limit, or by slot."""

    spec: JobSpec
    definition: Definition
    schedule: Schedule
    lease_ms: int
    heartbeat_ms: int
    overlap: OverlapPolicy
    catch_up: CatchUpPolicy
    catch_up_limit: int
    max_attempts: int
    cancel_grace_ms: int
    stop_grace_ms: int
    retry: Retry | None = None

    @property
    def retries(self) -> int:
        """How many failed attempts are followed by another (S22)."""
        return self.retry.retries if self.retry else 0

    @property
    def name(self) -> str:
        """The job's name."""
        return self.spec.name

    @property
    def schedule_id(self) -> str:
        """The schedule's canonical identity; empty: the job has no schedule."""
        return self.definition.schedule_id

    @property
    def margin_ms(self) -> int:
        """By how much trust in the job's leases ends before they do."""
        return limits.lease_margin(self.lease_ms)

    def longest_jitter(self, slot: int, following: int | None) -> int:
        """S12. The most that an instance waits before it claims `slot`."""
        if self.spec.jitter_ms is not None:
            return self.spec.jitter_ms
        longest = limits.JITTER_DEFAULT
        if following is not None:
            longest = min(longest, (following - slot) // limits.JITTER_GAP_SHARE)
        if self.spec.start_deadline_ms is not None:  # by which the claim must have come
            longest = min(longest, self.spec.start_deadline_ms // 2)
        return longest

    def start_deadline(self, slot: int, following: int | None) -> int:
        """S20. After how long a slot that nobody claimed is missed."""
        if self.spec.start_deadline_ms is not None:
            return self.spec.start_deadline_ms
        gap = limits.START_DEADLINE_MAX_DEFAULT if following is None else following - slot
        least = self.longest_jitter(slot, following) + limits.START_DEADLINE_OVER_JITTER
        return max(least, min(gap, limits.START_DEADLINE_MAX_DEFAULT))


def is_name(text: str) -> bool:
    """Whether it is a job name, namespace or instance id by S32."""
    return _NAME.fullmatch(text) is not None


def check_name(field: str, value: str) -> str:
    """A job name, namespace or instance id by S32; `InvalidError` otherwise."""
    if not is_name(value):
        raise InvalidError(
            field,
            value,
            f"use 1 to {limits.NAME_MAX} characters of letters, digits, '.', '_', '-', ':' "
            "and '/', starting with a letter or digit",
        )
    return value


def resolve_all(
    specs: Sequence[JobSpec], capabilities: Capabilities, lease_ms: int, near_ms: int
) -> tuple[Job, ...]:
    """Every job of a registration, or one `InvalidJobsError` that names every bad one."""
    if len(specs) > limits.JOBS_MAX:
        raise InvalidError("jobs", len(specs), f"at most {limits.JOBS_MAX} jobs a session")
    problems: list[tuple[int, str, InvalidError | UnsupportedError]] = []
    jobs: list[Job] = []
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        try:
            if spec.name in seen:
                raise InvalidError("name", spec.name, "two jobs have this name; give each its own")
            seen.add(spec.name)
            jobs.append(resolve(spec, capabilities, lease_ms, near_ms))
        except (InvalidError, UnsupportedError) as error:
            problems.append((index, spec.name, error))
    if problems:
        raise InvalidJobsError(problems)
    return tuple(jobs)


def resolve(spec: JobSpec, capabilities: Capabilities, lease_ms: int, near_ms: int) -> Job:
    """Decides every value of a job; `lease_ms` is the sidecar's default lease.

    `near_ms` is the present, after which there must be a slot (S9), and near which the shortest
    gap is looked for (S12). Raises `InvalidError` (also `InvalidScheduleError`) and
    `UnsupportedError`.
    """
    check_name("name", spec.name)
    if not capabilities.leases:
        _refuse_what_needs_a_lease(spec, capabilities.backend)
    _refuse_what_the_backend_has_not(spec, capabilities)
    schedule = read_schedule(spec)
    if isinstance(schedule, Unscheduled):
        _refuse_what_needs_a_schedule(spec)
    else:
        _refuse_what_is_over(spec, schedule, near_ms)
    lease = _lease(spec, lease_ms)
    heartbeat = _heartbeat(spec, lease)
    _check_numbers(spec)
    if not isinstance(schedule, Unscheduled):
        _check_jitter(spec, schedule, near_ms)
        if not capabilities.leases:
            _check_records(spec, schedule, capabilities, near_ms)
    window = spec.catch_up_window_ms or limits.CATCH_UP_WINDOW
    return Job(
        spec=spec,
        definition=Definition(spec, schedule.identity, window),
        schedule=schedule,
        lease_ms=lease,
        heartbeat_ms=heartbeat,
        overlap=spec.overlap
        or (OverlapPolicy.SKIP if capabilities.leases else OverlapPolicy.ALLOW),
        catch_up=_catch_up(spec, capabilities),
        catch_up_limit=spec.catch_up_limit or limits.CATCH_UP_LIMIT,
        max_attempts=spec.max_attempts or (limits.MAX_ATTEMPTS if capabilities.leases else 1),
        cancel_grace_ms=_or(spec.cancel_grace_ms, limits.CANCEL_GRACE),
        stop_grace_ms=_or(spec.stop_grace_ms, limits.STOP_GRACE),
        retry=retry_of(spec),
    )


def read_schedule(spec: JobSpec) -> Schedule:
    """The schedule of a spec. Raises `InvalidScheduleError`."""
    if spec.schedule is None:
        return Unscheduled()
    key = spec.name if isinstance(spec.schedule, CronSchedule) else ""
    return _parsed(spec.schedule, key)


@lru_cache(maxsize=2 * limits.JOBS_MAX)
def _parsed(schedule: EverySchedule | CronSchedule, job: str) -> Every | Cron:
    try:
        if isinstance(schedule, EverySchedule):
            return Every(schedule.period_ms, schedule.offset_ms)
        return Cron(schedule.expression, schedule.time_zone, job)
    except ScheduleError as error:
        raise InvalidScheduleError(error.field, error.value, error.expected) from error


def _refuse_what_needs_a_lease(spec: JobSpec, backend: str) -> None:
    """What a job sets that a claim-only backend has not; what it leaves unset is the default."""
    for feature, wanted in (
        ("lease", spec.lease_ms is not None),
        ("heartbeat", spec.heartbeat_ms is not None),
        ("max_attempts", spec.max_attempts > 0),
        (f"overlap={spec.overlap}", spec.overlap not in (None, OverlapPolicy.ALLOW)),
        (f"catch_up={spec.catch_up}", spec.catch_up not in (None, CatchUpPolicy.NONE)),
    ):
        if wanted:
            raise UnsupportedError(feature, backend, LEASE_BACKENDS)


def _check_records(
    spec: JobSpec, schedule: Every | Cron, capabilities: Capabilities, near_ms: int
) -> None:
    """S10. A claim-only backend must know who won a slot for as long as anybody may claim it."""
    backend, gap = capabilities.backend, _shortest_gap(schedule, near_ms // limits.DAY * limits.DAY)
    if gap < capabilities.least_gap_ms:
        raise InvalidError(
            "schedule",
            shown(gap),
            f"the shortest gap between two slots is at least {shown(capabilities.least_gap_ms)} "
            f"on {backend}",
        )
    if capabilities.kept_ms is None:
        return
    longest_ms = _longest_deadline(spec)
    most = capabilities.kept_ms - limits.RECORD_OVER_DEADLINE
    if longest_ms > most:
        given = "start_deadline" if spec.start_deadline_ms is not None else "jitter"
        over = 0 if spec.start_deadline_ms is not None else limits.START_DEADLINE_OVER_JITTER
        raise InvalidError(
            given,
            shown(longest_ms - over),
            f"at most {shown(most - over)} on {backend}, which knows for "
            f"{shown(capabilities.kept_ms)} who claimed a slot",
        )
    kept, needed_ms = capabilities.kept_slots, longest_ms + limits.RECORD_OVER_DEADLINE
    if kept is not None and gap * kept < needed_ms:
        raise InvalidError(
            "schedule",
            shown(gap),
            f"{backend} knows who claimed a job's newest {kept} slots, and must for "
            f"{shown(needed_ms)}: the shortest gap is at least {shown(-(-needed_ms // kept))}",
        )


def _longest_deadline(spec: JobSpec) -> int:
    """S20. The longest that a slot of the job may be claimed; a jitter may make it long."""
    if spec.start_deadline_ms is not None:
        return spec.start_deadline_ms
    after_jitter = (spec.jitter_ms or 0) + limits.START_DEADLINE_OVER_JITTER
    return max(limits.START_DEADLINE_MAX_DEFAULT, after_jitter)


def _refuse_what_the_backend_has_not(spec: JobSpec, capabilities: Capabilities) -> None:
    backend = capabilities.backend
    if spec.by_name:
        raise InvalidError(
            "schedule",
            "unset",
            "it is offered by name only, and the sidecar's configuration has no schedule for it: "
            f"set every or cron in [jobs.{spec.name}] of its file, or give it one in code",
        )
    if spec.schedule is None and not capabilities.control:
        hint = "set every or cron: no run can be triggered there"
        raise UnsupportedError("a job without a schedule", backend, CONTROL_BACKENDS, hint)
    if spec.overlap is not None and spec.overlap not in capabilities.overlap:
        have = ", ".join(sorted(capabilities.overlap))
        feature = f"overlap={spec.overlap}"
        raise UnsupportedError(feature, backend, LEASE_BACKENDS, f"it has: {have}")
    if spec.catch_up is not None and spec.catch_up not in capabilities.catch_up:
        have = ", ".join(sorted(capabilities.catch_up))
        feature = f"catch_up={spec.catch_up}"
        raise UnsupportedError(feature, backend, LEASE_BACKENDS, f"it has: {have}")
    if spec.retry is not None and not capabilities.retries:
        hint = "leave it unset: a failed run is final"
        raise UnsupportedError("retry", backend, LEASE_BACKENDS, hint)


def _refuse_what_needs_a_schedule(spec: JobSpec) -> None:
    """What says how slots are claimed or caught up: a triggered run is due at once, and never missed."""
    for field, given in (
        ("jitter", _shown_if_set(spec.jitter_ms)),
        ("start_deadline", _shown_if_set(spec.start_deadline_ms)),
        ("catch_up", str(spec.catch_up or "")),
        ("catch_up.limit", spec.catch_up_limit),
    ):
        if given:
            raise InvalidError(
                field, given, "it is for slots of a schedule: set every or cron, or leave it unset"
            )


def _refuse_what_is_over(spec: JobSpec, schedule: Every | Cron, near_ms: int) -> None:
    if isinstance(spec.schedule, CronSchedule) and schedule.next_after(near_ms) is None:
        raise InvalidScheduleError(
            "expression",
            spec.schedule.expression,
            "it never fires again: slots are computed until the end of 2199",
        )


def _catch_up(spec: JobSpec, capabilities: Capabilities) -> CatchUpPolicy:
    """S20. The newest missed slot, where the backend can."""
    usual = CatchUpPolicy.LATEST
    wanted = spec.catch_up or (usual if usual in capabilities.catch_up else CatchUpPolicy.NONE)
    if wanted is CatchUpPolicy.ALL and spec.overlap is OverlapPolicy.CANCEL:
        raise InvalidError(
            "catch_up",
            wanted.value,
            "with overlap=cancel each slot would end the one before: use latest or none",
        )
    return wanted


def retry_of(spec: JobSpec) -> Retry | None:
    """Whether and how failed attempts are followed by others. Raises `InvalidError`."""
    given = spec.retry
    if given is None:
        return None
    if not 1 <= given.retries <= limits.RETRIES_MAX:
        raise InvalidError("retries", given.retries, f"1 to {limits.RETRIES_MAX}")
    if given.factor and not 1 <= given.factor <= limits.RETRY_FACTOR_MAX:
        raise InvalidError(
            "retry.factor", given.factor, f"1 (each pause is the same) to {limits.RETRY_FACTOR_MAX}"
        )
    _within("retry.delay", given.delay_ms, 0, limits.DAY)
    _within("retry.max_delay", given.max_delay_ms, 0, limits.DAY)
    delay = _or(given.delay_ms, limits.RETRY_DELAY)
    most = _or(given.max_delay_ms, max(delay, limits.RETRY_DELAY_MAX))
    if most < delay:
        raise InvalidError(
            "retry.max_delay", shown(most), f"it is at least the delay, {shown(delay)}"
        )
    return Retry(given.retries, delay, given.factor or limits.RETRY_FACTOR, most)


def _lease(spec: JobSpec, default_ms: int) -> int:
    lease = _or(spec.lease_ms, default_ms)
    _within("lease", lease, limits.LEASE_MIN, limits.LEASE_MAX)
    return lease


def _heartbeat(spec: JobSpec, lease_ms: int) -> int:
    heartbeat = _or(spec.heartbeat_ms, limits.default_heartbeat(lease_ms))
    most = lease_ms // limits.HEARTBEAT_SHARE_MIN
    if not limits.HEARTBEAT_MIN <= heartbeat <= most:
        raise InvalidError(
            "heartbeat",
            shown(heartbeat),
            f"with a lease of {shown(lease_ms)} it is {shown(limits.HEARTBEAT_MIN)} to "
            f"{shown(most)}, a third of the lease; leave it unset for a sixth",
        )
    return heartbeat


def _check_numbers(spec: JobSpec) -> None:
    _within("timeout", spec.timeout_ms, 1, limits.TIMEOUT_MAX)
    _within("catch_up.window", spec.catch_up_window_ms, 1, limits.CATCH_UP_WINDOW_MAX)
    _within("start_deadline", spec.start_deadline_ms, limits.START_DEADLINE_MIN, limits.DAY)
    _within("cancel_grace", spec.cancel_grace_ms, 0, limits.HOUR)
    _within("stop_grace", spec.stop_grace_ms, 0, limits.HOUR)
    for field, count, most in (
        ("catch_up.limit", spec.catch_up_limit, limits.CATCH_UP_LIMIT_MAX),
        ("max_attempts", spec.max_attempts, limits.ATTEMPTS_MAX),
        ("concurrency", spec.concurrency, limits.CONCURRENCY_MAX),
    ):
        if not 0 <= count <= most:
            raise InvalidError(field, count, f"0 (the default) to {most}")
    if len(spec.labels) > limits.LABELS_MAX:
        raise InvalidError("labels", len(spec.labels), f"at most {limits.LABELS_MAX} entries")
    for text in (part for label in spec.labels for part in label):
        if len(text.encode()) > limits.LABEL_MAX_BYTES:
            raise InvalidError(
                "labels", text, f"keys and values have at most {limits.LABEL_MAX_BYTES} bytes"
            )


def _check_jitter(spec: JobSpec, schedule: Every | Cron, near_ms: int) -> None:
    if not spec.jitter_ms:
        return
    gap = _shortest_gap(schedule, near_ms // limits.DAY * limits.DAY)
    if not 0 < spec.jitter_ms < gap:
        raise InvalidError(
            "jitter",
            shown(spec.jitter_ms),
            f"it must be shorter than the shortest gap between two slots, {shown(gap)}",
        )
    if spec.start_deadline_ms is not None and spec.start_deadline_ms <= spec.jitter_ms:
        raise InvalidError(
            "start_deadline",
            shown(spec.start_deadline_ms),
            f"it must be longer than the jitter, {shown(spec.jitter_ms)}",
        )


@lru_cache(maxsize=2 * limits.JOBS_MAX)
def _shortest_gap(schedule: Every | Cron, near_ms: int) -> int:
    return schedule.shortest_gap_ms(near_ms, limits.GAP_SAMPLE)


def _within(field: str, value_ms: int | None, least: int, most: int) -> None:
    if value_ms is not None and not least <= value_ms <= most:
        raise InvalidError(field, shown(value_ms), f"{shown(least)} to {shown(most)}")


def _shown_if_set(duration_ms: int | None) -> str:
    return "" if duration_ms is None else shown(duration_ms)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def shown(duration_ms: int) -> str:
    """A duration as people write it, also a negative one: "1h30m", "-250ms"."""
    return ("-" if duration_ms < 0 else "") + format_duration(abs(duration_ms))
