"""What the store keeps, read as the machine's records. It is input: nothing in it is trusted.

Imports the machine, the model, the errors and the standard library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from anarchon_server.core import machine, model
from anarchon_server.core.errors import StoreUnavailable

_T = TypeVar("_T")

# The fields of a run's hash, with their kinds: text, a count (empty: 0), a number (empty: none).
# Those from `attempt` on are the newest attempt's; earlier ones are JSON in `past:<number>`.
RUN_FIELDS: Mapping[str, str] = {
    "state": "text",
    "trigger": "text",
    "reason": "text",
    "freed": "text",
    "lost": "count",
    "failed": "count",
    "max_attempts": "count",
    "window_ms": "count",
    "cancel": "text",
    "cancelled_at": "count",
    "cancel_message": "text",
    "cancel_grace_ms": "count",
    "blocking_slot": "count",
    "slots_covered": "count",
    "ended_at": "number",
    "retries": "count",
    "retry_at": "number",
    "retry_delay_ms": "count",
    "request_id": "text",
    "lease_until": "number",
    "lease_length_ms": "number",
    "lease_end_at": "number",
    "attempt": "count",
    "token": "text",
    "fence": "count",
    "instance_id": "text",
    "incarnation": "text",
    "cause": "text",
    "attempt_state": "text",
    "attempt_reason": "text",
    "claimed_at": "count",
    "started_at": "number",
    "attempt_ended_at": "number",
    "failure": "text",
    "result": "text",
}

Fields = Mapping[str, str]


def moment(now_us: int) -> machine.Moment:
    """The store's time: leases go by the same clock, which may be stepped."""
    return machine.Moment(now_us, now_us // 1_000, "", steady=False)


class Unreadable(StoreUnavailable):
    """A record is not as Anarchon writes it: somebody else wrote or changed it."""


def _checked(what: str, make: Callable[[], _T]) -> _T:
    """Reads a record. One that is none of ours is said, not guessed at."""
    try:
        return make()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(
            f"{what} in the store is not as Anarchon writes it ({type(error).__name__}: {error}): "
            "somebody else wrote or changed it"
        ) from error


def run_of(fields: Fields) -> model.Run:
    """The run that a script shows, or that HGETALL found (with `job` and `slot` added)."""
    return _checked(
        f"the run of {fields.get('job')!r} at {fields.get('slot')}", lambda: _run_of(fields)
    )


def _run_of(fields: Fields) -> model.Run:
    lease = None
    if fields.get("lease_until"):
        lease = model.Lease(
            int(fields["lease_until"]), int(fields["lease_length_ms"]), int(fields["lease_end_at"])
        )
    return model.Run(
        job=fields["job"],
        slot=int(fields["slot"]),
        trigger=model.Trigger(fields["trigger"]),
        state=model.RunState(fields["state"]),
        reason=fields.get("reason", ""),
        current=_current_of(fields) if _count(fields, "attempt") else None,
        lease=lease,
        freed=fields.get("freed", ""),
        lost=_count(fields, "lost"),
        failed=_count(fields, "failed"),
        max_attempts=_count(fields, "max_attempts"),
        window_ms=_count(fields, "window_ms"),
        cancel=model.CancelReason(fields["cancel"]) if fields.get("cancel") else None,
        cancelled_at=_count(fields, "cancelled_at"),
        cancel_message=fields.get("cancel_message", ""),
        cancel_grace_ms=_count(fields, "cancel_grace_ms"),
        blocking_slot=_count(fields, "blocking_slot"),
        slots_covered=_count(fields, "slots_covered"),
        ended_at=_number(fields, "ended_at"),
        retries=_count(fields, "retries"),
        retry_at=_number(fields, "retry_at"),
        retry_delay_ms=_count(fields, "retry_delay_ms"),
        request_id=fields.get("request_id", ""),
    )


def _count(fields: Fields, name: str) -> int:
    return int(fields.get(name) or 0)


def _number(fields: Fields, name: str) -> int | None:
    text = fields.get(name)
    return int(text) if text else None


def _current_of(fields: Fields) -> model.Attempt:
    present = {name.removeprefix("attempt_"): text for name, text in fields.items()}
    present |= {"state": fields["attempt_state"], "reason": fields.get("attempt_reason", "")}
    present["ended_at"] = fields.get("attempt_ended_at", "")
    return _attempt_of(present)


def _attempt_of(fields: Fields) -> model.Attempt:
    failure = fields.get("failure")
    return model.Attempt(
        attempt=int(fields["attempt"]),
        token=fields["token"],
        fence=int(fields["fence"]),
        instance_id=fields["instance_id"],
        incarnation=fields["incarnation"],
        cause=model.AttemptCause(fields["cause"]),
        state=model.RunState(fields["state"]),
        claimed_at=int(fields["claimed_at"]),
        reason=fields.get("reason", ""),
        started_at=_number(fields, "started_at"),
        ended_at=_number(fields, "ended_at"),
        failure=model.Failure(**json.loads(failure)) if failure else None,
        result=fields.get("result", ""),
    )


def attempts_of(run: model.Run, fields: Fields) -> list[model.Attempt]:
    """The run's attempts that history shows, oldest first."""
    return _attempts(run, fields, machine.first_attempt_shown(run))


def all_attempts_of(run: model.Run, fields: Fields) -> list[model.Attempt]:
    """All of the run's attempts, also those too old to be shown."""
    return _attempts(run, fields, 1)


def _attempts(run: model.Run, fields: Fields, first: int) -> list[model.Attempt]:
    if run.current is None:
        return []
    past = [fields.get(f"past:{number}") for number in range(first, run.attempt)]
    what = f"an attempt of {run.job!r} at {run.slot}"
    earlier = _checked(what, lambda: [_attempt_of(json.loads(each)) for each in past if each])
    return [*earlier, run.current]


def job_of(name: str, fields: Fields) -> machine.JobRecord:
    """The job of this name, as its hash has it."""
    return _checked(
        f"the job {name!r}",
        lambda: machine.JobRecord(
            name,
            definition_id=fields.get("definition_id", ""),
            schedule_id=fields.get("schedule_id", ""),
            definition_at=_count(fields, "definition_at"),
            fence=_count(fields, "fence"),
            paused_at=_number(fields, "paused_at"),
            pause_reason=fields.get("pause_reason", ""),
        ),
    )


def settled_of(name: str, fields: Fields, schedule_id: str) -> int | None:
    """What a schedule of the job has settled (None: the store does not know it)."""
    return _checked(f"the job {name!r}", lambda: _number(fields, f"settled:{schedule_id}"))


def instance_of(incarnation: str, record: str) -> model.Instance:
    """The instance that a script noted."""
    return _checked(f"the instance {incarnation!r}", lambda: _instance_of(json.loads(record)))


def _instance_of(noted: Mapping[str, Any]) -> model.Instance:
    values: dict[str, Any] = json.loads(noted["record"])
    known = {each.name for each in dataclasses.fields(model.Instance)}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name in known
    }
    values["state"] = model.InstanceState(values["state"])
    values["seen_at"] = int(noted["seen_at"])
    return model.Instance(**values)


def noted_instance(instance: model.Instance) -> dict[str, object]:
    """What the scripts are told of an instance."""
    return {
        "incarnation": instance.incarnation,
        "label": instance.instance_id,
        "lease_ms": instance.lease_ms,
        "record": json.dumps(dataclasses.asdict(instance)),
    }


def failure_text(failure: model.Failure) -> str:
    """A failure as the store keeps it: equal failures give equal text."""
    return json.dumps(dataclasses.asdict(failure), sort_keys=True)


def kept_definition(definition: model.Definition) -> str:
    """A definition as the store keeps it."""
    return json.dumps(
        {
            "schedule_id": definition.schedule_id,
            "window_ms": definition.window_ms,
            "spec": definition.spec_json,
        },
        ensure_ascii=False,
    )


def spec_of(job: str, kept: str) -> model.JobSpec:
    """The spec of a kept definition."""
    return _checked(
        f"the definition of {job!r}", lambda: model.JobSpec.from_json(json.loads(kept)["spec"])
    )


def holds_of(job: str, incarnation: str, held: str) -> list[machine.HeldDefinition]:
    """What an instance holds of a job, as the script of a registration noted it."""
    return _checked(
        f"what {incarnation!r} holds of {job!r}",
        lambda: [
            machine.HeldDefinition(incarnation, job, str(definition_id), str(schedule_id))
            for definition_id, schedule_id in json.loads(held)["held"]
        ],
    )
