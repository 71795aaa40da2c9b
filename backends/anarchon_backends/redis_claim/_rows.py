"""What the store keeps, read as the model's records. It is input: nothing in it is trusted.

Imports the rules, the model, the port's records, the errors and the standard library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from anarchon_server.core import claim_only, machine, model
from anarchon_server.core.errors import StoreUnavailable

_T = TypeVar("_T")

# The fields of an attempt, with their kinds: text, a count (empty: 0), a number (empty: none).
ATTEMPT_FIELDS: Mapping[str, str] = {
    "attempt": "count",  # empty: 1
    "token": "text",
    "instance_id": "text",
    "incarnation": "text",
    "attempt_state": "text",
    "attempt_reason": "text",
    "claimed_at": "count",
    "started_at": "number",
    "attempt_ended_at": "number",
    "failure": "text",
    "result": "text",
}

# The fields of a run's hash; those of an attempt are its newest one's. Of the `earlier` ones each is a
# line of JSON.
RUN_FIELDS: Mapping[str, str] = {
    "state": "text",
    "trigger": "text",
    "reason": "text",
    "ended_at": "number",
    "slots_covered": "count",
    "request_id": "text",
    "window_ms": "count",
    "lost": "count",
    "failed": "count",
    "cancel": "text",
    "cancelled_at": "count",
    "cancel_message": "text",
    "cancel_grace_ms": "count",
    "retries": "count",
    "retry_at": "number",
    "retry_delay_ms": "count",
    "earlier": "text",
    **ATTEMPT_FIELDS,
}

Fields = Mapping[str, str]


def moment(now_us: int) -> machine.Moment:
    """The store's time."""
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
    what = f"the run of {fields.get('job')!r} at {fields.get('slot')}"
    return _checked(what, lambda: _run_of(fields))


def _run_of(fields: Fields) -> model.Run:
    slot = int(fields["slot"])
    current = _attempt_of(slot, fields) if fields.get("token") else None
    return model.Run(
        job=fields["job"],
        slot=slot,
        trigger=model.Trigger(fields["trigger"]),
        state=model.RunState(fields["state"]),
        reason=fields.get("reason", ""),
        current=current,
        lost=_count(fields, "lost"),
        failed=_count(fields, "failed"),
        max_attempts=1 if current else 0,
        window_ms=_count(fields, "window_ms"),
        cancel=model.CancelReason(fields["cancel"]) if fields.get("cancel") else None,
        cancelled_at=_count(fields, "cancelled_at"),
        cancel_message=fields.get("cancel_message", ""),
        cancel_grace_ms=_count(fields, "cancel_grace_ms"),
        slots_covered=_count(fields, "slots_covered"),
        ended_at=_number(fields, "ended_at"),
        retries=_count(fields, "retries"),
        retry_at=_number(fields, "retry_at"),
        retry_delay_ms=_count(fields, "retry_delay_ms"),
        request_id=fields.get("request_id", ""),
        earlier=tuple(
            _attempt_of(slot, json.loads(line))
            for line in fields.get("earlier", "").split("\n")
            if line
        ),
    )


def _attempt_of(slot: int, fields: Fields) -> model.Attempt:
    failure = fields.get("failure")
    number = _count(fields, "attempt") or 1
    return model.Attempt(
        attempt=number,
        token=fields["token"],
        fence=claim_only.fence_of(slot, number),
        instance_id=fields.get("instance_id", ""),
        incarnation=fields.get("incarnation", ""),
        cause=model.AttemptCause.RETRY if number > 1 else model.AttemptCause.CLAIM,
        state=model.RunState(fields["attempt_state"]),
        claimed_at=_count(fields, "claimed_at"),
        reason=fields.get("attempt_reason", ""),
        started_at=_number(fields, "started_at"),
        ended_at=_number(fields, "attempt_ended_at"),
        failure=model.Failure(**json.loads(failure)) if failure else None,
        result=fields.get("result", ""),
    )


def _count(fields: Fields, name: str) -> int:
    return int(fields.get(name) or 0)


def _number(fields: Fields, name: str) -> int | None:
    text = fields.get(name)
    return int(text) if text else None


def instance_of(incarnation: str, record: str) -> model.Instance:
    """The instance that a script noted."""
    return _checked(f"the instance {incarnation!r}", lambda: _instance_of(json.loads(record)))


def _instance_of(noted: Mapping[str, Any]) -> model.Instance:
    instance = model.Instance.from_json(noted["record"])
    return dataclasses.replace(instance, seen_at=int(noted["seen_at"]))


def noted_instance(instance: model.Instance) -> dict[str, object]:
    """What the scripts are told of an instance."""
    return {
        "incarnation": instance.incarnation,
        "label": instance.instance_id,
        "lease_ms": instance.lease_ms,
        "record": instance.to_json(),
    }


def failure_text(failure: model.Failure) -> str:
    """A failure as the store keeps it: equal failures give equal text."""
    return json.dumps(dataclasses.asdict(failure), sort_keys=True)


def kept_definition(definition: model.Definition) -> str:
    """A definition as the store keeps it."""
    kept = {"schedule_id": definition.schedule_id, "spec": definition.spec_json}
    return json.dumps(kept, ensure_ascii=False)


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
            for definition_id, schedule_id in json.loads(held)
        ],
    )
