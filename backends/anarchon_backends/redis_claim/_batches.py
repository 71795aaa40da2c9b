"""Batches as the scripts read them, and their answers as the port's records.

Imports the port, the rules, the model, the limits, the errors and the standard library.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Any

from anarchon_backends.redis_claim._rows import Unreadable, failure_text, kept_definition, run_of
from anarchon_server.core import limits, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown

ITEMS = limits.CLAIM_BATCH  # a script blocks the server while it runs: at most so many items ...
BYTES = 1 << 20  # ... and about so much text

Item = Mapping[str, Any]  # what is asked about one job: `act`, `job`, and what belongs to it


def parts_of(items: Sequence[Item]) -> list[list[Item]]:
    """The items in runs that one script may carry out."""
    parts: list[list[Item]] = []
    count = size = 0
    for item in items:
        weight = len(item.get("wanted", "."))
        length = _length(item)
        if not parts or count + weight > ITEMS or size + length > BYTES:
            parts.append([])
            count = size = 0
        parts[-1].append(item)
        count += weight
        size += length
    return parts


def _length(value: object) -> int:
    """About how many bytes of JSON a value takes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_length, value.values())) + 20 * len(value)
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    return 16


def claim_item(claim: port.Claim) -> Item:
    """A claim as the script reads it."""
    item: dict[str, Any] = {
        "act": "claim",
        "job": claim.job,
        "slot": claim.slot,
        "token": claim.token,
        "instance_id": claim.instance_id,
        "incarnation": claim.incarnation,
        "start_deadline_ms": claim.start_deadline_ms,
        "cancel_grace_ms": claim.cancel_grace_ms,
        "window_ms": claim.window_ms,
        "retries": claim.retries,
        "may_run": claim.may_run,
    }
    if claim.seen_attempt:
        item |= {"seen_attempt": claim.seen_attempt, "seen_token": claim.seen_token}
    return item


def renewal_item(renewal: port.Renewal) -> Item:
    """A renewal as the script reads it."""
    item: dict[str, Any] = {
        "act": "renew",
        "job": renewal.job,
        "slot": renewal.slot,
        "token": renewal.token,
        "instance_id": renewal.instance_id,
        "incarnation": renewal.incarnation,
        "adopt": renewal.adopt,
    }
    if renewal.started_at is not None:
        item["started_at"] = renewal.started_at
    if renewal.cancel is not None:
        item["cancel"] = renewal.cancel.value
    return item


def look_item(job: str, slot: int) -> Item:
    """A look at a run as the script reads it."""
    return {"act": "look", "job": job, "slot": slot}


def sweep_item(job: str, schedule_id: str) -> Item:
    """A look at a job as the script reads it: when its schedule began, which runs are news."""
    return {"act": "sweep", "job": job, "schedule_id": schedule_id}


def completion_item(completion: port.Completion) -> Item:
    """A result as the script reads it."""
    outcome = completion.outcome
    item: dict[str, Any] = {
        "act": "complete",
        "job": completion.job,
        "slot": completion.slot,
        "token": completion.token,
        "result": outcome.result,
        "elapsed_ms": outcome.elapsed_ms,
    }
    if outcome.failure is not None:
        item["failure"] = failure_text(outcome.failure)
    permanent = outcome.failure is not None and outcome.failure.permanent
    if completion.retry_in_ms is not None and not permanent:
        item["retry_in_ms"] = completion.retry_in_ms
    if outcome.stopped is not None:
        item["stopped"] = outcome.stopped.value
    return item


def release_item(release: port.Release) -> Item:
    """A release as the script reads it."""
    return {
        "act": "release",
        "job": release.job,
        "slot": release.slot,
        "token": release.token,
        "incarnation": release.incarnation,
        "reason": release.reason,
    }


def control_item(act: port.Control) -> Item:
    """What operators ask, as the script reads it."""
    match act:
        case port.Pause():
            return {"act": "pause", "job": act.job, "reason": act.reason}
        case port.Resume():
            assert not act.plans, "a claim-only backend plans nothing"
            return {
                "act": "resume",
                "job": act.job,
                "paused_at": act.paused_at,
                "latest_at": act.until,
                "passed": [dataclasses.asdict(each) for each in act.passed],
            }
        case port.TriggerRun():
            return {
                "act": "trigger",
                "job": act.job,
                "request_id": act.request_id,
                "payload": base64.b64encode(act.payload).decode(),
                "slots": act.slots,
                "latest_at": act.until,
                "window_ms": act.window_ms,
            }
        case port.CancelRun():
            return {"act": "cancel", "job": act.job, "slot": act.slot, "message": act.message}


def registration_items(definitions: Sequence[model.Definition]) -> list[Item]:
    """An item a job, with all definitions of it and, in `places`, where each stands in the batch."""
    by_job = sorted(enumerate(definitions), key=lambda each: each[1].job)
    items: list[Item] = []
    for job, group in groupby(by_job, key=lambda each: each[1].job):
        places, wanted = zip(*group, strict=True)
        kept = [_wanted(each) for each in wanted]
        items.append({"act": "register", "job": job, "wanted": kept, "places": list(places)})
    return items


@lru_cache(2 * limits.JOBS_MAX)  # an instance registers the same definitions again and again
def _wanted(definition: model.Definition) -> dict[str, str]:
    return {
        "definition_id": definition.definition_id,
        "schedule_id": definition.schedule_id,
        "kept": kept_definition(definition),
    }


# Answers -----------------------------------------------------------------------------------


def _view_of(answer: Item, now: machine.Moment) -> model.RunView | None:
    """The run in an answer, as it shows now. Raises `Unreadable`."""
    fields = answer.get("run")
    return machine.view(run_of(fields), now) if fields else None


def look_answer(answer: Item, now: machine.Moment) -> model.RunView | None:
    """The run that was looked at; none where it cannot be read."""
    with suppress(Unreadable):
        return _view_of(answer, now)
    return None


def since_answer(answer: Item) -> int | None:
    """When the schedule that was swept began; None: it is not known."""
    since = answer.get("since")
    return int(since) if since else None


def news_answer(answer: Item, now: machine.Moment) -> list[model.RunView]:
    """The runs of the job that was swept that wait, or were asked to stop."""
    seen = [look_answer({"run": each}, now) for each in answer.get("runs") or ()]
    return [each for each in seen if each is not None]


def claim_answer(answer: Item, now: machine.Moment) -> port.ClaimAnswer:
    """What became of a claim; a record that cannot be read leaves it open."""
    if answer["outcome"] != "broken":
        with suppress(Unreadable):
            payload = base64.b64decode(answer.get("payload", ""), validate=True)
            outcome = port.ClaimOutcome(answer["outcome"])
            return port.ClaimAnswer(outcome, _view_of(answer, now), payload)
    return port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)


def token_answer(answer: Item, now: machine.Moment) -> port.TokenAnswer:
    """Whether a token counted; nobody can hold what nobody can read."""
    if answer["outcome"] != "broken":
        with suppress(Unreadable):
            return port.TokenAnswer(port.TokenOutcome(answer["outcome"]), _view_of(answer, now))
    return port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)


def control_answer(answer: Item, now: machine.Moment) -> port.ControlAnswer:
    """What became of what an operator asked. Raises `OutcomeUnknown` for what somebody spoilt."""
    if answer["outcome"] == "broken":
        raise OutcomeUnknown(
            f"{answer['broken']}: not as Anarchon writes it; this was not done, and the rest was"
        )
    return port.ControlAnswer(port.ControlOutcome(answer["outcome"]), _view_of(answer, now))


def registrations(item: Item, answer: Item) -> dict[int, port.Registration]:
    """What became of the definitions of one job, by where each stood in the batch.

    Raises `OutcomeUnknown` for a job that somebody spoilt.
    """
    if "broken" in answer:
        raise OutcomeUnknown(
            f"{answer['broken']}: not as Anarchon writes it; the rest was registered"
        )
    found: dict[int, port.Registration] = {}
    for place, wanted, each in zip(item["places"], item["wanted"], answer["wanted"], strict=True):
        since = each.get("since")
        found[place] = port.Registration(
            job=item["job"],
            current=answer["definition_id"] == wanted["definition_id"],
            since=int(since or answer["definition_at"]),
            settled=int(since) if since else None,
            definitions_differ=answer["differ"],
        )
    return found
