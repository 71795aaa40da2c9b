"""The jobs of the configuration's file: `[jobs.NAME]`, with the policies' names of the Python client.

Imports the standard library and core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from anarchon_server.core import limits
from anarchon_server.core.configured import NO_LIMIT
from anarchon_server.core.errors import InvalidError
from anarchon_server.core.model import (
    CatchUpPolicy,
    CronSchedule,
    EverySchedule,
    JobSpec,
    OverlapPolicy,
    RetrySpec,
    labels_of,
)
from anarchon_server.core.policy import check_name, read_schedule
from anarchon_server.core.slots import ScheduleError, parse_duration_ms

Read = Callable[[str, object], Any]
"""A key's name and its value in the file, to the value of the spec. Raises `InvalidError`."""


def _duration(field: str, raw: object) -> int:
    if not isinstance(raw, str):
        raise InvalidError(field, raw, 'write a duration as a text: "10s", "1h30m"')
    try:
        return parse_duration_ms(raw)
    except ScheduleError as error:
        raise InvalidError(field, raw, error.expected) from error


def _timeout(field: str, raw: object) -> int:
    """0 where the attempts of the job have no limit, whatever its client says."""
    if raw == "none":
        return 0
    timeout_ms = _duration(field, raw)
    if not timeout_ms:
        raise InvalidError(field, raw, 'at least 1ms; "none" for no limit')
    return timeout_ms


def _concurrency(field: str, raw: object) -> int:
    return _count(0, limits.CONCURRENCY_MAX)(field, raw) or NO_LIMIT


def _count(least: int, most: int) -> Read:
    def read(field: str, raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= most:
            raise InvalidError(field, raw, f"write a whole number, {least} to {most}")
        return raw

    return read


def _text(field: str, raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise InvalidError(field, raw, "write a text")
    return raw


def _factor(field: str, raw: object) -> float:
    # Not left to the offer's check: 0 would be taken for a factor that is not set, and say nothing.
    number = not isinstance(raw, bool) and isinstance(raw, int | float)
    if not number or not 1 <= cast("float", raw) <= limits.RETRY_FACTOR_MAX:
        raise InvalidError(field, raw, f"write a number, 1 to {limits.RETRY_FACTOR_MAX:g}")
    return float(cast("float", raw))


def _word(kind: type[OverlapPolicy | CatchUpPolicy]) -> Read:
    words = [each.value for each in kind]

    def read(field: str, raw: object) -> Any:
        if raw not in words:
            raise InvalidError(field, raw, f"one of: {', '.join(words)}")
        return kind(raw)

    return read


def _labels(field: str, raw: object) -> tuple[tuple[str, str], ...]:
    texts = isinstance(raw, dict) and raw and all(isinstance(value, str) for value in raw.values())
    if not texts:
        raise InvalidError(field, raw, 'write a table of texts: { team = "billing" }')
    return labels_of(cast("dict[str, str]", raw))


_POLICIES: Mapping[str, tuple[str, Read]] = {
    "jitter": ("jitter_ms", _duration),
    "timeout": ("timeout_ms", _timeout),
    "heartbeat": ("heartbeat_ms", _duration),
    "lease": ("lease_ms", _duration),
    "overlap": ("overlap", _word(OverlapPolicy)),
    "catch_up": ("catch_up", _word(CatchUpPolicy)),
    "catch_up_window": ("catch_up_window_ms", _duration),
    "catch_up_limit": ("catch_up_limit", _count(1, limits.CATCH_UP_LIMIT_MAX)),
    "start_deadline": ("start_deadline_ms", _duration),
    "max_attempts": ("max_attempts", _count(1, limits.ATTEMPTS_MAX)),
    "concurrency": ("concurrency", _concurrency),
    "labels": ("labels", _labels),
    "cancel_grace": ("cancel_grace_ms", _duration),
    "stop_grace": ("stop_grace_ms", _duration),
}
_SCHEDULE = ("every", "offset", "cron", "tz")
_RETRY: Mapping[str, tuple[str, Read]] = {
    "retry_delay": ("delay_ms", _duration),
    "retry_factor": ("factor", _factor),
    "retry_max_delay": ("max_delay_ms", _duration),
}
KEYS = (*_SCHEDULE, *_POLICIES, "retries", *_RETRY)
"""Every key that a job's table may have."""


def read_jobs(raw: object) -> Mapping[str, JobSpec]:
    """Return the jobs of the table `jobs`, by name. Raises `InvalidError`.

    What needs the store to be known, such as whether it can do what a job wants, is checked when a
    client offers the job.
    """
    if not isinstance(raw, dict):
        raise InvalidError("jobs", raw, "write a table for each job: [jobs.NAME]")
    if len(raw) > limits.JOBS_MAX:
        raise InvalidError("jobs", len(raw), f"at most {limits.JOBS_MAX} jobs")
    return {name: _job(name, table) for name, table in raw.items()}


def _job(name: str, table: object) -> JobSpec:
    path = f"jobs.{name}"
    check_name(path, name)
    if not isinstance(table, dict):
        raise InvalidError(path, table, f"write a table: [jobs.{name}]")
    for key in table:
        if key not in KEYS:
            close = get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidError(f"{path}.{key}", table[key], f"there is no such key{hint}")
    values: dict[str, Any] = {
        field: read(f"{path}.{key}", table[key])
        for key, (field, read) in _POLICIES.items()
        if key in table
    }
    spec = JobSpec(name, _schedule(path, table), retry=_retry(path, table), **values)
    if spec.schedule is not None:
        try:
            read_schedule(spec)
        except InvalidError as error:
            raise _in_the_file(path, table, error) from error
    return spec


def _in_the_file(path: str, table: Mapping[str, object], error: InvalidError) -> InvalidError:
    """What is wrong with a schedule, by the key and the value that the file has."""
    key = {"period": "every", "offset": "offset", "time zone": "tz"}.get(error.field, "cron")
    value, expected = table[key], error.expected
    if key == "cron" and value != error.value:
        expected = f"its {error.field} is {error.value!r}: {expected}"
    return InvalidError(f"{path}.{key}", value, expected)


def _schedule(path: str, table: Mapping[str, object]) -> EverySchedule | CronSchedule | None:
    if "every" in table and "cron" in table:
        raise InvalidError(f"{path}.cron", table["cron"], "set every or cron, not both")
    for key, needs in (("offset", "every"), ("tz", "cron")):
        if key in table and needs not in table:
            raise InvalidError(f"{path}.{key}", table[key], f"it goes with {needs}")
    if "every" in table:
        offset = _duration(f"{path}.offset", table["offset"]) if "offset" in table else 0
        return EverySchedule(_duration(f"{path}.every", table["every"]), offset)
    if "cron" in table:
        zone = _text(f"{path}.tz", table["tz"]) if "tz" in table else ""
        return CronSchedule(_text(f"{path}.cron", table["cron"]), zone)
    return None


def _retry(path: str, table: Mapping[str, object]) -> RetrySpec | None:
    spacing = [key for key in _RETRY if key in table]
    if "retries" not in table:
        if spacing:
            raise InvalidError(f"{path}.{spacing[0]}", table[spacing[0]], "it goes with retries")
        return None
    retries = _count(0, limits.RETRIES_MAX)(f"{path}.retries", table["retries"])
    if not retries and spacing:
        expected = "there is nothing to space: retries is 0"
        raise InvalidError(f"{path}.{spacing[0]}", table[spacing[0]], expected)
    values = {_RETRY[key][0]: _RETRY[key][1](f"{path}.{key}", table[key]) for key in spacing}
    return RetrySpec(retries, **values)
