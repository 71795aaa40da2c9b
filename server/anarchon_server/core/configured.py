"""Jobs as a sidecar's configuration has them, laid over what clients state. Pure.

What a configuration switches off has a value of its own in its spec, as what it leaves out is the
client's: 0 retries, a timeout of 0 ms, `NO_LIMIT` for the concurrency. Such a value is never in the
job that comes out.

Imports `model` and `slots`' way to write durations only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from anarchon_server.core.model import CronSchedule, EverySchedule, JobSpec, RetrySpec
from anarchon_server.core.slots import format_duration

NO_LIMIT = -1
"""In a configuration's spec: the job has no concurrency of its own, whatever its client says."""

_OF_THE_CLIENT = ("name", "by_name")


def laid_over(
    stated: JobSpec, configured: Mapping[str, JobSpec]
) -> tuple[JobSpec, tuple[str, ...]]:
    """The job as it counts, and a note for each field that both say differently.

    The configuration wins, field by field. A job that is offered by name, and has a schedule in the
    configuration, is from here on like one that was stated in full.
    """
    given = configured.get(stated.name)
    if given is None:
        return stated, ()
    notes: list[str] = []
    has_schedule = bool(given.schedule or stated.schedule)
    changes: dict[str, Any] = {"by_name": stated.by_name and not has_schedule}
    for field in dataclasses.fields(JobSpec):
        value, was = getattr(given, field.name), getattr(stated, field.name)
        if field.name in _OF_THE_CLIENT or not _is_set(field.name, value):
            continue
        if isinstance(value, RetrySpec) and isinstance(was, RetrySpec):
            value = _retry_over(was, value)
        value = _unset_if_off(field.name, value)
        changes[field.name] = value
        only_triggered = field.name == "schedule" and not stated.by_name
        if (_is_set(field.name, was) or only_triggered) and was != value:
            notes.append(
                f"{stated.name}: {_named(field.name)} is {_shown(field.name, value)} by the "
                f"sidecar's configuration, not {_shown(field.name, was)}"
            )
    return dataclasses.replace(stated, **changes), tuple(notes)


def _retry_over(stated: RetrySpec, given: RetrySpec) -> RetrySpec:
    """The pauses that the configuration leaves out are as the client says, like every field."""
    return RetrySpec(
        given.retries,
        stated.delay_ms if given.delay_ms is None else given.delay_ms,
        given.factor or stated.factor,
        stated.max_delay_ms if given.max_delay_ms is None else given.max_delay_ms,
    )


def _unset_if_off(field: str, value: Any) -> Any:
    """The value as a client's spec has it, where a policy that is switched off is not set."""
    match field, value:
        case "retry", RetrySpec(retries=0):
            return None
        case "timeout_ms", 0:
            return None
        case "concurrency", int() if value == NO_LIMIT:
            return 0
        case _:
            return value


def _is_set(field: str, value: object) -> bool:
    """Whether a field says something: a duration of 0 does, a count of 0 and no labels do not."""
    return value is not None if field.endswith("_ms") else bool(value)


def _named(field: str) -> str:
    return field.removesuffix("_ms")


def _shown(field: str, value: object) -> str:
    match value:
        case _ if not _is_set(field, value):
            return "none"
        case EverySchedule():
            offset = f" offset {format_duration(value.offset_ms)}" if value.offset_ms else ""
            return f"every {format_duration(value.period_ms)}{offset}"
        case CronSchedule():
            return f"cron {value.expression!r} in {value.time_zone or 'UTC'}"
        case RetrySpec():
            pauses = (
                ("delay", value.delay_ms is not None and format_duration(value.delay_ms)),
                ("factor", f"{value.factor:g}" if value.factor else ""),
                (
                    "max_delay",
                    value.max_delay_ms is not None and format_duration(value.max_delay_ms),
                ),
            )
            said = (f"{name} {text}" for name, text in pauses if text)
            return ", ".join([f"{value.retries} times", *said])
        case int() if field.endswith("_ms"):
            return format_duration(value)
        case _:
            return str(value)
