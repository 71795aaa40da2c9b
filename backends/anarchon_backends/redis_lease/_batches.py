"""Batches as the scripts read them, and their answers as the port's records.

Imports the port, the machine, the model, the limits, the errors and the standard library.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

from anarchon_backends.redis_lease._rows import (
    Unreadable,
    failure_text,
    kept_definition,
    moment,
    run_of,
)
from anarchon_server.core import limits, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown

_T = TypeVar("_T")

ITEMS = 250  # a script blocks the server while it runs: at most so many items a call ...
BYTES = 1 << 20  # ... and about so much text

# Batches -----------------------------------------------------------------------------------


def parts_of(items: Sequence[_T]) -> list[list[_T]]:
    """The items in runs that one script may carry out. Lists of items stay whole."""
    parts: list[list[_T]] = []
    count = size = 0
    for item in items:
        weight = len(item) if isinstance(item, list) else 1
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
        return 16 * len(value) if value and isinstance(value[-1], int) else sum(map(_length, value))
    return 16


BEAT_KINDS = ("renewals", "looks", "sweep")


def beat_items(beat: port.Beat) -> list[dict[str, Any]]:
    """What a heartbeat asks about jobs, in the order of `BEAT_KINDS`."""
    return [
        *({"kind": "renewals", **renewal_item(each)} for each in beat.renewals),
        *({"kind": "looks", "job": job, "slot": slot} for job, slot in beat.looks),
        *({"kind": "sweep", "job": job, "schedule_id": name} for job, name in beat.sweep),
    ]


def beat_form(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of these as the script reads it."""
    return {
        kind: [
            {name: value for name, value in each.items() if name != "kind"}
            for each in items
            if each["kind"] == kind
        ]
        for kind in BEAT_KINDS
    }


def fences_of(jobs: Sequence[str], answers: Sequence[Mapping[str, Any]] | None) -> dict[str, int]:
    """The highest fence of each job of a batch."""
    return {job: int(answer["fence"]) for job, answer in zip(jobs, answers or (), strict=True)}


def reply(
    told: Sequence[Mapping[str, Any]], answers: Iterable[_T], fences: Mapping[str, int]
) -> port.Reply[_T]:
    """The reply, with what the scripts said of the store: of several clocks, the latest."""
    at = max(int(each["now_us"]) for each in told) // 1_000
    return port.Reply(at, tuple(answers), fences, told[-1]["store_id"])


def claim_item(claim: port.Claim) -> dict[str, Any]:
    """A claim as the script reads it."""
    item = {
        "job": claim.job,
        "slot": claim.slot,
        "token": claim.token,
        "instance_id": claim.instance_id,
        "incarnation": claim.incarnation,
        "schedule_id": claim.schedule_id,
        "overlap": claim.overlap.value,
        "start_deadline_ms": claim.start_deadline_ms,
        "lease_ms": claim.lease_ms,
        "cancel_grace_ms": claim.cancel_grace_ms,
        "max_attempts": claim.max_attempts,
        "window_ms": claim.window_ms,
        "retries": claim.retries,
        "expected_at": claim.expected_at,
        "vouched": claim.vouched,
        "may_run": claim.may_run,
        "seen_attempt": claim.seen_attempt,
        "seen_token": claim.seen_token,
    }
    if claim.previous_slot is not None:
        item["previous_slot"] = claim.previous_slot
    return item


def plan_item(plan: port.Plan) -> dict[str, Any]:
    """A plan as the script reads it."""
    return {
        "job": plan.job,
        "schedule_id": plan.schedule_id,
        "settled": plan.settled,
        "slots": [missed.slot for missed in plan.slots],
        "deadlines": [missed.start_deadline_ms for missed in plan.slots],
        "more": plan.more,
        "limit": plan.limit,
        "catch_up": plan.catch_up.value,
        "window_ms": plan.window_ms,
    }


def renewal_item(renewal: port.Renewal) -> dict[str, Any]:
    """A renewal as the script reads it."""
    item: dict[str, Any] = {
        "job": renewal.job,
        "slot": renewal.slot,
        "token": renewal.token,
        "instance_id": renewal.instance_id,
        "incarnation": renewal.incarnation,
        "lease_ms": renewal.lease_ms,
        "adopt": renewal.adopt,
    }
    if renewal.started_at is not None:
        item["started_at"] = renewal.started_at
    if renewal.cancel is not None:
        item["cancel"] = renewal.cancel.value
    return item


def completion_item(completion: port.Completion) -> dict[str, Any]:
    """A result as the script reads it."""
    outcome = completion.outcome
    item: dict[str, Any] = {
        "job": completion.job,
        "slot": completion.slot,
        "token": completion.token,
        "result": outcome.result,
        "elapsed_ms": outcome.elapsed_ms,
    }
    if outcome.failure is not None:
        item["failure"] = failure_text(outcome.failure)
        item["permanent"] = outcome.failure.permanent
    if outcome.stopped is not None:
        item["stopped"] = outcome.stopped.value
    if completion.retry_in_ms is not None:
        item["retry_in_ms"] = completion.retry_in_ms
    return item


def release_item(release: port.Release) -> dict[str, Any]:
    """A release as the script reads it."""
    return {
        "job": release.job,
        "slot": release.slot,
        "token": release.token,
        "incarnation": release.incarnation,
        "reason": release.reason,
    }


def control_item(act: port.Control) -> dict[str, Any]:
    """What operators ask, as the script reads it."""
    match act:
        case port.Pause():
            return {"kind": "pause", "job": act.job, "reason": act.reason}
        case port.Resume():
            return {
                "kind": "resume",
                "job": act.job,
                "paused_at": act.paused_at,
                "latest_at": act.until,
                "plans": [plan_item(plan) for plan in act.plans],
                "passed": [
                    {
                        "schedule_id": each.schedule_id,
                        "settled": each.settled,
                        "slots": each.slots,
                        "more": each.more,
                    }
                    for each in act.passed
                ],
            }
        case port.TriggerRun():
            return {
                "kind": "trigger",
                "job": act.job,
                "request_id": act.request_id,
                "payload": base64.b64encode(act.payload).decode(),
                "slots": act.slots,
                "latest_at": act.until,
                "overlap": act.overlap.value,
                "window_ms": act.window_ms,
            }
        case port.CancelRun():
            return {"kind": "cancel", "job": act.job, "slot": act.slot, "message": act.message}


@lru_cache(2 * limits.JOBS_MAX)  # an instance registers the same definitions again and again
def definition_item(definition: model.Definition) -> dict[str, Any]:
    """A definition as the script reads it."""
    return {
        "job": definition.job,
        "definition_id": definition.definition_id,
        "schedule_id": definition.schedule_id,
        "kept": kept_definition(definition),
    }


# Answers -----------------------------------------------------------------------------------


def number_of(text: str | None) -> int | None:
    """A number that may be missing."""
    return None if text is None else int(text)


def view_of(answer: Mapping[str, Any], now: machine.Moment) -> model.RunView | None:
    """The run in an answer, as it shows now. Raises `Unreadable`."""
    fields = answer.get("run")
    return machine.view(run_of(fields), now) if fields else None


def look_answer(answer: Mapping[str, Any], now: machine.Moment) -> model.RunView | None:
    """The run that was looked at; none where it cannot be read."""
    with suppress(Unreadable):
        return view_of(answer, now)
    return None


def claim_answer(answer: Mapping[str, Any], now: machine.Moment) -> port.ClaimAnswer:
    """What became of a claim; a record that cannot be read leaves it open."""
    if answer["outcome"] != "broken":
        with suppress(Unreadable):
            payload = base64.b64decode(answer.get("payload", ""), validate=True)
            outcome = port.ClaimOutcome(answer["outcome"])
            return port.ClaimAnswer(outcome, view_of(answer, now), payload)
    return port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)


def token_answer(answer: Mapping[str, Any], now: machine.Moment) -> port.TokenAnswer:
    """Whether a token counted; nobody can hold what nobody can read."""
    if answer["outcome"] != "broken":
        with suppress(Unreadable):
            outcome = port.TokenOutcome(answer["outcome"])
            due = look_answer({"run": answer.get("due")}, now)
            return port.TokenAnswer(outcome, view_of(answer, now), due)
    return port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)


def beat_said(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers of one part of a heartbeat, in the order of its items."""
    return [each for kind in BEAT_KINDS for each in told[kind] or ()]


def beat_answer(
    beat: port.Beat,
    items: Sequence[Mapping[str, Any]],
    parts: Iterable[tuple[Sequence[int], Mapping[str, Any] | None]],
    about_us: Mapping[str, Any] | None,
) -> port.BeatAnswer:
    """What became of a heartbeat of such items: its parts, with the places of their items, put
    together. Nothing is known of what a part without a reply was about, nor, without `about_us`, of
    the instance.
    """
    renewed, looked = len(beat.renewals), len(beat.renewals) + len(beat.looks)
    renewals = [port.TokenAnswer(port.TokenOutcome.UNKNOWN)] * renewed
    looks: list[model.RunView | None] = [None] * len(beat.looks)
    settled: list[int | None] = [None] * len(beat.sweep)
    unfinished: dict[tuple[str, str], model.RunView] = {}  # by job and slot
    unheard: set[str] = set()
    for places, told in parts:
        if told is None:
            unheard |= {items[place]["job"] for place in places}
            continue
        now = moment(int(told["now_us"]))
        for place, each in zip(places, beat_said(told), strict=True):
            if place < renewed:
                renewals[place] = token_answer(each, now)
            elif place < looked:
                looks[place - renewed] = look_answer(each, now)
            else:
                settled[place - looked] = number_of(each.get("settled"))
        for each in told["unfinished"] or ():
            if (seen := look_answer({"run": each}, now)) is not None:
                unfinished[each["job"], each["slot"]] = seen
    views = sorted(
        unfinished.values(), key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job)
    )
    return port.BeatAnswer(
        renewals=tuple(renewals),
        looks=tuple(looks),
        unfinished=tuple(views[: beat.sweep_limit]),
        settled=tuple(settled),
        known=about_us["known"] if about_us else True,
        twins=tuple(about_us["twins"] or ()) if about_us else (),
        unheard=frozenset(unheard),
    )


def plan_answer(answer: Mapping[str, Any]) -> port.PlanAnswer:
    """What became of a plan."""
    done = answer["outcome"] == "done"
    settled = number_of(answer.get("settled"))
    return port.PlanAnswer(done, settled, answer.get("missed", 0), answer.get("due", 0))


def control_answer(answer: Mapping[str, Any], now: machine.Moment) -> port.ControlAnswer:
    """What became of what an operator asked."""
    if answer["outcome"] == "broken":
        raise OutcomeUnknown(
            f"{answer['broken']}: not as Anarchon writes it; this was not done, and the rest was"
        )
    return port.ControlAnswer(port.ControlOutcome(answer["outcome"]), view_of(answer, now))


def registration(job: str, answer: Mapping[str, Any]) -> port.Registration:
    """What became of a definition."""
    if "broken" in answer:
        raise OutcomeUnknown(
            f"{answer['broken']}: not as Anarchon writes it; the rest was registered"
        )
    return port.Registration(
        job=job,
        current=answer["current"],
        since=int(answer["since"]),
        settled=number_of(answer.get("settled")),
        definitions_differ=answer["differ"],
    )
