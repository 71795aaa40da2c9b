"""What the machine decides, on rows that were read, and what it says of them.

Imports the machine, the model and the records of the port.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from anarchon_backends.postgres._rows import EVER, Document, Rows, said_text
from anarchon_backends.postgres._values import by_job
from anarchon_server.core import control, machine, model
from anarchon_server.core import store as port

_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class Decided(Generic[_A]):
    """What was decided on one batch: answers by number, highest fences, runs as written, and the
    oldest run that waits of each job in which a run has ended.
    """

    answers: dict[int, _A]
    now: machine.Moment
    fences: dict[str, int]
    saved: dict[tuple[str, int], model.Run]
    due: dict[str, model.Run]

    def in_order(self) -> list[_A]:
        """The answers by number."""
        return [self.answers[number] for number in sorted(self.answers)]


def judge_claim(rows: Rows, claim: port.Claim) -> port.ClaimAnswer:
    schedule = rows.schedule(claim.job, claim.schedule_id)
    verdict = machine.judge_claim(
        claim,
        rows.now,
        rows.job(claim.job),
        schedule.settled if schedule else None,
        rows.run(claim.job, claim.slot),
        rows.others(claim.job, claim.slot),
    )
    rows.save(verdict.saved)
    if rows.knows(claim.job):
        rows.save_job(verdict.job)
    rows.settle(claim.job, claim.schedule_id, verdict.settled)
    if verdict.answer.outcome is not port.ClaimOutcome.WON:
        return verdict.answer
    return replace(verdict.answer, payload=rows.payload(claim.job, claim.slot))


def judge_plan(rows: Rows, plan: port.Plan) -> port.PlanAnswer:
    schedule = rows.schedule(plan.job, plan.schedule_id)
    settled = schedule.settled if schedule else None
    job = rows.job(plan.job)
    verdict = machine.judge_plan(
        plan, rows.now, job, settled, rows.taken(plan.job), rows.caught_up(plan.job)
    )
    rows.save(verdict.saved)
    rows.save_job(job)
    rows.settle(plan.job, plan.schedule_id, verdict.answer.settled)
    return verdict.answer


def judge_renewal(rows: Rows, renewal: port.Renewal) -> port.TokenAnswer:
    verdict = machine.judge_renewal(renewal, rows.now, rows.run(renewal.job, renewal.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def judge_completion(rows: Rows, completion: port.Completion) -> tuple[port.TokenAnswer, bool]:
    """The answer, and whether the result ended its run."""
    job, slot = completion.job, completion.slot
    past = rows.attempt_of(job, slot, completion.token)
    verdict = machine.judge_completion(completion, rows.now, rows.run(job, slot), past)
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer, verdict.saved is not None and verdict.saved.ends_a_run


def judge_release(rows: Rows, release: port.Release) -> port.TokenAnswer:
    verdict = machine.judge_release(release, rows.now, rows.run(release.job, release.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def judge_control(rows: Rows, act: port.Control) -> port.ControlAnswer:
    verdict = _judge_act(rows, act)
    rows.save(verdict.saved)
    if rows.knows(act.job):
        rows.save_job(verdict.job)
    for schedule_id, settled in (verdict.settled or {}).items():
        rows.settle(act.job, schedule_id, settled)
    return verdict.answer


def _judge_act(rows: Rows, act: port.Control) -> control.ControlVerdict:
    name, now, job = act.job, rows.now, rows.job(act.job)
    match act:
        case port.Pause():
            return control.judge_pause(act, now, job, rows.others(name, -1))
        case port.Resume():
            in_use = control.schedules_in_use(job, rows.held(name))
            settled = {id_: at for id_, at in rows.all_settled(name).items() if id_ in in_use}
            return control.judge_resume(
                act, now, job, settled, rows.taken(name), rows.caught_up(name)
            )
        case port.TriggerRun():
            before = rows.requested(name, act.request_id)
            others = list(rows.others(name, -1))
            verdict = control.judge_trigger(act, now, job, before, rows.taken(name), others)
            made = verdict.answer.run
            if before is None and made is not None:
                rows.keep_payload(name, made.run.slot, act.payload)
            return verdict
        case port.CancelRun():
            return control.judge_cancel(act, now, job, rows.run(name, act.slot))


def control_values(
    acts: Iterable[port.Control], now: machine.Moment
) -> tuple[list[str], list[int], list[str]]:
    """What is to be read for acts besides the rows: of which job the slots from when on, and which
    request's run.
    """
    wanted: list[tuple[str, int, str]] = []
    for act in acts:
        if isinstance(act, port.TriggerRun):
            wanted.append((act.job, now.at, said_text(act.request_id)))
        elif isinstance(act, port.Resume):
            since = min((each.settled for each in act.passed), default=now.at)
            wanted.append((act.job, since, ""))
    return (
        [job for job, _, _ in wanted],
        [since for _, since, _ in wanted],
        [request_id for _, _, request_id in wanted],
    )


def what_may_go(
    document: Document, rows: Rows, policy: port.PrunePolicy
) -> tuple[list[int], list[int], list[int], list[bool], str, str]:
    """What pruning may do to each job: its version, bound, oldest, whether it is unused.

    Then, as JSON by job: its current definition and schedule, and the definitions that go.
    """
    definitions = by_job(document["definitions"] or ())
    held = by_job(document["held"] or ())
    versions: list[int] = []
    bounds: list[int] = []
    oldest: list[int] = []
    unused: list[bool] = []
    currents: dict[str, tuple[str, str]] = {}
    going: dict[str, list[str]] = {}
    for name in document["names"]:
        kept = [
            machine.KeptDefinition(
                row["definition_id"], row["schedule_id"], row["window_ms"], row["held_at"]
            )
            for row in definitions.get(name, [])
        ]
        holds = held.get(name, [])
        ever = {row["definition_id"] for row in holds}
        job, gone = machine.judge_definitions(
            rows.job(name), kept, ever, rows.now, policy.history_ms
        )
        live = {row["definition_id"] for row in holds if row["live"]}
        all_go = len(gone) == len(kept)
        used = machine.in_use(job, kept, live)
        bound = machine.prune_bound(rows.now, used, rows.all_settled(name))
        versions.append(rows.version(name))
        bounds.append(EVER if all_go else bound)
        oldest.append(EVER if all_go else rows.now.at - policy.history_ms)
        unused.append(all_go)
        currents[name] = job.definition_id, job.schedule_id
        going[name] = [each.definition_id for each in gone]
    return versions, bounds, oldest, unused, json.dumps(currents), json.dumps(going)


def changed_jobs(
    rows: Rows, before: Mapping[str, machine.JobRecord], new: Iterable[machine.HeldDefinition]
) -> set[str]:
    """The jobs whose rows a registration writes: what they are or what is in use has changed."""
    changed = {name for name, job in before.items() if rows.job(name) != job}
    return changed | {hold.job for hold in new} | {job for job, _ in rows.moved}


def registration_of(
    rows: Rows, hold: machine.HeldDefinition, held: Iterable[machine.HeldDefinition]
) -> port.Registration:
    job = rows.job(hold.job)
    schedule = rows.schedule(hold.job, hold.schedule_id)
    return port.Registration(
        job=hold.job,
        current=job.definition_id == hold.definition_id,
        since=schedule.since if schedule else job.definition_at,
        settled=schedule.settled if schedule else None,
        definitions_differ=machine.definitions_differ(held),
    )
