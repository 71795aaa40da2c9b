"""What the schema's functions are given, and what their answers mean.

Imports the machine, the model and the records of the port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anarchon_backends.postgres._rows import (
    Document,
    failure_text,
    instance_text,
    run_document,
    run_of,
    said_of,
    said_text,
)
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

CLAIM_TYPES = (
    "text text[] int8[] text[] text[] text[] text[] int8[] int8[] int8[] int8[] int8[] int8[]"
    " int8[] bool[] bool[]"
)
BEAT_TYPES = (
    "text text text int8 text bool text[] int8[] text[] text[] int8[] int8[] bool[]"
    " text[] int8[] text[] text[] int8"
)
COMPLETE_TYPES = "text text[] int8[] text[] text[] text[] text[] int8[] text"
WRITE_TYPES = "text json json json json json bool text"
REGISTER_TYPES = "text int8 text text int8 text text[] text[] text[] json json json"
PRUNE_TYPES = "text text[] int8[] int8[] int8[] bool[] json json int8 int8"


def claim_values(claim: port.Claim) -> tuple[object, ...]:
    return (
        claim.job,
        claim.slot,
        claim.token,
        claim.instance_id,
        claim.incarnation,
        claim.schedule_id,
        claim.previous_slot,
        claim.start_deadline_ms,
        claim.lease_ms,
        claim.cancel_grace_ms,
        claim.max_attempts,
        claim.window_ms,
        claim.retries,
    )


def answer_to_win(claim: port.Claim, fence: int, now: machine.Moment) -> port.ClaimAnswer:
    """The answer to a first claim that the database let win, as the database wrote its row."""
    attempt = model.Attempt(
        attempt=1,
        token=claim.token,
        fence=fence,
        instance_id=claim.instance_id,
        incarnation=claim.incarnation,
        cause=model.AttemptCause.CLAIM,
        state=model.RunState.CLAIMED,
        claimed_at=now.at,
    )
    until = now.at + claim.lease_ms
    run = model.Run(
        job=claim.job,
        slot=claim.slot,
        trigger=model.Trigger.SCHEDULE,
        state=model.RunState.CLAIMED,
        current=attempt,
        lease=model.Lease(until, claim.lease_ms, until),
        max_attempts=claim.max_attempts,
        window_ms=claim.window_ms,
        cancel_grace_ms=claim.cancel_grace_ms,
        retries=claim.retries,
    )
    return port.ClaimAnswer(port.ClaimOutcome.WON, machine.view(run, now))


def beat_values(beat: port.Beat) -> tuple[object, ...]:
    """The parameters of `beat`, but for the namespace."""
    instance, renewals = beat.instance, beat.renewals
    seen: set[tuple[str, int]] = set()
    plain = [
        is_first((each.job, each.slot), seen) and not each.adopt and each.cancel is None
        for each in renewals
    ]
    return (
        instance.incarnation,
        instance.instance_id,
        instance.lease_ms,
        instance_text(instance),
        beat.leaving,
        [each.job for each in renewals],
        [each.slot for each in renewals],
        [each.token for each in renewals],
        [each.incarnation for each in renewals],
        [each.lease_ms for each in renewals],
        [each.started_at for each in renewals],
        plain,
        [job for job, _ in beat.looks],
        [slot for _, slot in beat.looks],
        [job for job, _ in beat.sweep],
        [schedule_id for _, schedule_id in beat.sweep],
        beat.sweep_limit,
    )


def answer_to_beat(
    beat: port.Beat,
    document: Document,
    renewals: tuple[port.TokenAnswer, ...],
    changed: Mapping[tuple[str, int], model.Run],
    now: machine.Moment,
) -> port.BeatAnswer:
    """The answer: what was read before the last renewals were written shows as `changed`."""
    looks = runs_by_key(document["looks"])
    looks |= {key: run for key, run in changed.items() if key in looks}
    unfinished = runs_by_key(document["unfinished"])
    unfinished |= {key: run for key, run in changed.items() if key in unfinished}
    return port.BeatAnswer(
        renewals=renewals,
        looks=tuple(machine.view(looks[key], now) if key in looks else None for key in beat.looks),
        unfinished=in_order(unfinished.values(), now),
        settled=tuple(document["settled"] or ()),
        known=document["known"],
        twins=tuple(document["twins"] or ()),
    )


def fences_of_beat(beat: port.Beat, document: Document) -> dict[str, int]:
    """The highest fences of all jobs that a heartbeat touched."""
    touched = [*(each.job for each in beat.renewals), *(job for job, _ in beat.looks)]
    fences: dict[str, int] = dict.fromkeys(touched, 0) | (document["fences"] or {})
    swept = zip(beat.sweep, document["swept"] or (), strict=True)
    return fences | {job: fence or 0 for (job, _), fence in swept}


def complete_values(completions: Sequence[port.Completion]) -> tuple[object, ...]:
    """The parameters of `complete`, but for the namespace and the news."""
    seen: set[tuple[str, int]] = set()
    return (
        [each.job for each in completions],
        [each.slot for each in completions],
        [each.token for each in completions],
        [plain_state(each, seen) for each in completions],
        [failure_text(each.outcome.failure) for each in completions],
        [kept_result(each.outcome) for each in completions],
        [each.outcome.elapsed_ms for each in completions],
    )


def runs_by_key(found: Iterable[Sequence[Any]] | None) -> dict[tuple[str, int], model.Run]:
    """The runs that a function gave, by job and slot."""
    runs = [run_of(run_document(values)) for values in found or ()]
    return {(run.job, run.slot): run for run in runs}


def is_first(key: tuple[str, int], seen: set[tuple[str, int]]) -> bool:
    """Whether the batch has said nothing of this run before."""
    before = len(seen)
    seen.add(key)
    return len(seen) > before


def plain_state(completion: port.Completion, seen: set[tuple[str, int]]) -> str:
    """What the database may make of the run; empty where the machine must decide."""
    first = is_first((completion.job, completion.slot), seen)
    if not first or completion.outcome.stopped is not None:
        return ""
    failed = completion.outcome.failure is not None
    if failed and completion.retry_in_ms is not None:
        return ""
    return model.RunState.FAILED if failed else model.RunState.SUCCESS


def kept_result(outcome: model.Outcome) -> str:
    """What is kept of a result: nothing of an attempt that failed."""
    return "" if outcome.failure is not None else said_text(outcome.result)


def with_outcome(run: model.Run, outcome: model.Outcome) -> model.Run:
    """A run that was just completed, with what its handler said, as it is kept."""
    assert run.current is not None
    result = "" if outcome.failure is not None else outcome.result
    return replace(run, current=replace(run.current, failure=outcome.failure, result=result))


def with_due(
    answer: port.TokenAnswer, due: model.Run | None, now: machine.Moment
) -> port.TokenAnswer:
    """The answer to a result, with the run that waits for the end of the one it ended."""
    return replace(answer, due=machine.view(due, now)) if due else answer


def in_order(runs: Iterable[model.Run], now: machine.Moment) -> tuple[model.RunView, ...]:
    """The unfinished runs as they show, those to be taken over first."""
    views = [machine.view(run, now) for run in runs if not run.state.final]
    views.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
    return tuple(views)


def by_job(rows: Iterable[Document]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = {}
    for row in rows:
        groups.setdefault(row["job"], []).append(row)
    return groups


def holds_by_job(rows: Iterable[Document]) -> dict[str, list[machine.HeldDefinition]]:
    return {job: [hold_of(row) for row in group] for job, group in by_job(rows).items()}


def hold_of(row: Document) -> machine.HeldDefinition:
    return machine.HeldDefinition(
        row["incarnation"], row["job"], row["definition_id"], row["schedule_id"]
    )


def definition_row(hold: machine.HeldDefinition, definition: model.Definition) -> dict[str, object]:
    return {
        "job": hold.job,
        "definition_id": hold.definition_id,
        "schedule_id": hold.schedule_id,
        "window_ms": definition.window_ms,
        "spec": definition.spec_json,
    }


def job_view(row: Document, now: machine.Moment) -> model.JobView:
    held = row["held"] or ()
    last = run_of(row["last"]) if row["last"] else None
    return model.JobView(
        name=row["job"],
        spec=model.JobSpec.from_json(row["spec"]),
        definition_at=row["definition_at"],
        definitions_differ=len({definition_id for definition_id, _ in held}) > 1,
        instance_ids=tuple(sorted({label for _, label in held})),
        last_run=machine.without_traces(machine.view(last, now)) if last else None,
        paused_at=row["paused_at"],
        pause_reason=said_of(row["pause_reason"]),
        schedules=tuple(
            model.ScheduleInUse(schedule_id, settled, model.JobSpec.from_json(spec))
            for schedule_id, settled, spec in sorted(row["in_use"] or ())
        ),
    )
