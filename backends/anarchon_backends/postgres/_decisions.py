"""What the machine decides, on rows that were read, and what it says of them.

Imports the machine, the model and the records of the port.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from anarchon_backends.postgres._rows import EVER, Document, Rows
from anarchon_backends.postgres._values import by_job
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class Decided(Generic[_A]):
    """What was decided on one batch: answers by number, highest fences, and runs as written."""

    answers: dict[int, _A]
    now: machine.Moment
    fences: dict[str, int]
    saved: dict[tuple[str, int], model.Run]

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
    return verdict.answer


def judge_plan(rows: Rows, plan: port.Plan) -> port.PlanAnswer:
    schedule = rows.schedule(plan.job, plan.schedule_id)
    taken = rows.taken(plan.job, (missed.slot for missed in plan.slots))
    settled = schedule.settled if schedule else None
    job = rows.job(plan.job)
    verdict = machine.judge_plan(plan, rows.now, job, settled, taken)
    rows.save(verdict.saved)
    rows.save_job(job)
    rows.settle(plan.job, plan.schedule_id, verdict.answer.settled)
    return verdict.answer


def judge_renewal(rows: Rows, renewal: port.Renewal) -> port.TokenAnswer:
    verdict = machine.judge_renewal(renewal, rows.now, rows.run(renewal.job, renewal.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def judge_completion(rows: Rows, completion: port.Completion) -> port.TokenAnswer:
    job, slot = completion.job, completion.slot
    past = rows.attempt_of(job, slot, completion.token)
    verdict = machine.judge_completion(completion, rows.now, rows.run(job, slot), past)
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def judge_release(rows: Rows, release: port.Release) -> port.TokenAnswer:
    verdict = machine.judge_release(release, rows.now, rows.run(release.job, release.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


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
        used = {job.definition_id, *(row["definition_id"] for row in holds if row["live"])}
        in_use = [each for each in kept if each.definition_id in used]
        all_go = len(gone) == len(kept)
        bound = machine.prune_bound(rows.now, in_use, rows.all_settled(name))
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
