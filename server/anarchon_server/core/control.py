"""What operators ask of a job (S29) as pure decisions, like those of `machine`.

Imports `machine`, `limits`, `model` and the records of `store`. A pause, a resumption, a triggered
run or a cancel is decided on the same rows as a claim and under the same lock, so that none of them
falls between a claim's reading and its writing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from anarchon_server.core.limits import MISSED_LISTED_MAX, TRIGGERED_WAITING_MAX
from anarchon_server.core.machine import (
    HeldDefinition,
    JobRecord,
    Moment,
    Saved,
    asked_to_stop,
    judge_plan,
    look_around,
    view,
)
from anarchon_server.core.model import (
    CancelReason,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    Trigger,
)
from anarchon_server.core.store import (
    CancelRun,
    ControlAnswer,
    ControlOutcome,
    Pause,
    Resume,
    TriggerRun,
)


def schedules_in_use(job: JobRecord, held: Iterable[HeldDefinition]) -> set[str]:
    """The schedules whose slots are slots of the job: the current one, and what live instances hold."""
    return {job.schedule_id, *(hold.schedule_id for hold in held)} - {""}


@dataclass(frozen=True, slots=True)
class ControlVerdict:
    """What is changed: the job, what its schedules have settled, runs; and the answer."""

    answer: ControlAnswer
    job: JobRecord
    settled: Mapping[str, int] | None = None
    saved: tuple[Saved, ...] = ()


def judge_pause(
    pause: Pause, now: Moment, job: JobRecord, waiting: Iterable[Run]
) -> ControlVerdict:
    """From now on no slot of the job is claimed; those that wait are Skipped, but for triggered
    runs. A second pause changes nothing.
    """
    done = ControlAnswer(ControlOutcome.DONE)
    if not job.definition_id:
        return _answer(ControlOutcome.NOT_FOUND, job)
    if job.paused_at is not None:
        return ControlVerdict(done, job)
    skipped = tuple(
        Saved(replace(run, state=RunState.SKIPPED, reason=Reason.PAUSED, ended_at=now.at))
        for run in waiting
        if run.waits and run.trigger is not Trigger.MANUAL
    )
    paused = replace(job, paused_at=now.at, pause_reason=pause.reason)
    return ControlVerdict(done, paused, saved=skipped)


def judge_resume(
    resume: Resume,
    now: Moment,
    job: JobRecord,
    in_use: Mapping[str, int],
    taken: Collection[int],
    caught_up: Iterable[Run],
) -> ControlVerdict:
    """First what was missed when the pause began is planned, then the slots that fell due since are
    passed over: one row for them all, and the schedules in use are settled up to now.

    `in_use` is what each schedule in use has settled, `taken` the slots named that have a row.
    """
    if not job.definition_id:
        return _answer(ControlOutcome.NOT_FOUND, job)
    if job.paused_at is None:
        return ControlVerdict(ControlAnswer(ControlOutcome.DONE), job)
    seen = {each.schedule_id: each.settled for each in resume.passed}
    if (resume.paused_at, seen) != (job.paused_at, dict(in_use)) or now.at > resume.until:
        return _answer(ControlOutcome.STALE, job)
    resumed = replace(job, paused_at=None, pause_reason="")
    began = min(job.paused_at, now.at)
    saved: list[Saved] = []
    settled = dict(in_use)
    waiting = list(caught_up)
    for plan in resume.plans:
        rows = {*taken, *(each.run.slot for each in saved)}
        verdict = judge_plan(
            plan, now, resumed, settled.get(plan.schedule_id), rows, waiting, missed_by=began
        )
        saved += verdict.saved
        waiting = _still_waiting([*waiting, *(each.run for each in verdict.saved)])
        if verdict.answer.settled is not None:
            settled[plan.schedule_id] = verdict.answer.settled
    saved += _paused_over(resume, now, job, settled, {*taken, *(each.run.slot for each in saved)})
    # Not back, where a schedule has settled what is to come by a clock that was set back since.
    upto = {schedule_id: max(now.at, mark) for schedule_id, mark in settled.items()}
    return ControlVerdict(ControlAnswer(ControlOutcome.DONE), resumed, upto, _last_of_each(saved))


def _still_waiting(runs: Iterable[Run]) -> list[Run]:
    """The caught-up runs that wait, as last written."""
    latest = {run.slot: run for run in runs}
    return [run for run in latest.values() if run.waits and run.trigger is Trigger.CATCH_UP]


def _last_of_each(saved: Iterable[Saved]) -> tuple[Saved, ...]:
    return tuple({each.run.slot: each for each in saved}.values())


def _paused_over(
    resume: Resume, now: Moment, job: JobRecord, settled: Mapping[str, int], taken: Collection[int]
) -> list[Saved]:
    """The row that stands for the slots that fell due during the pause and have none."""
    slots = {
        slot
        for each in resume.passed
        for slot in each.slots
        if max(settled[each.schedule_id], job.floor) < slot <= now.at and slot not in taken
    }
    if not slots:
        return []
    more = any(each.more for each in resume.passed) or len(slots) > MISSED_LISTED_MAX
    covered = MISSED_LISTED_MAX if more else len(slots)
    row = Run(
        resume.job,
        max(slots),
        Trigger.SCHEDULE,
        RunState.SKIPPED,
        Reason.PAUSED,
        slots_covered=covered,
        ended_at=now.at,
    )
    return [Saved(row)]


def judge_trigger(
    trigger: TriggerRun,
    now: Moment,
    job: JobRecord,
    before: Run | None,
    taken: Collection[int],
    others: Sequence[Run],
) -> ControlVerdict:
    """Makes a run that is due now. `before` is the run that the same request made, if any; `taken`
    are the job's slots that have a row, from now on; `others` its runs that are not final.
    """
    if before is not None:
        return ControlVerdict(ControlAnswer(ControlOutcome.DONE, view(before, now)), job)
    if not job.definition_id:
        return _answer(ControlOutcome.NOT_FOUND, job)
    slot = max(now.at, job.floor + 1)
    while slot in taken or slot in trigger.slots:
        slot += 1
    if slot > trigger.until:
        return _answer(ControlOutcome.STALE, job)
    if sum(run.waits and run.trigger is Trigger.MANUAL for run in others) >= TRIGGERED_WAITING_MAX:
        return _answer(ControlOutcome.FULL, job)
    made = Run(
        trigger.job,
        slot,
        Trigger.MANUAL,
        RunState.DUE,
        window_ms=trigger.window_ms,
        request_id=trigger.request_id,
    )
    also: list[Saved] = []
    if trigger.overlap is not OverlapPolicy.ALLOW:
        # Nobody vouches for the clock here: where it may step, leases live (S19).
        around = look_around(others, now, witnessed=now.steady)
        also, unfinished = list(around.ended), around.unfinished
        if trigger.overlap is OverlapPolicy.CANCEL:
            asked = [_asked(run, now, CancelReason.SUPERSEDED) for run in unfinished]
            also += [
                each for each, run in zip(asked, unfinished, strict=True) if each.run is not run
            ]
            unfinished = tuple(each.run for each in asked if not each.run.state.final)
        if unfinished:
            made = replace(made, blocking_slot=min(run.slot for run in unfinished))
            if trigger.overlap is OverlapPolicy.SKIP:
                made = replace(made, state=RunState.SKIPPED, reason=Reason.OVERLAP, ended_at=now.at)
    answer = ControlAnswer(ControlOutcome.DONE, view(made, now))
    return ControlVerdict(answer, job, saved=(*also, Saved(made)))


def judge_cancel(cancel: CancelRun, now: Moment, job: JobRecord, run: Run | None) -> ControlVerdict:
    """Asks a run to stop. One that waits, or that no attempt holds, ends at once (S21a)."""
    if run is None:
        return _answer(ControlOutcome.NOT_FOUND, job)
    if run.state.final:
        answer = ControlAnswer(ControlOutcome.FINAL, view(run, now))
        return ControlVerdict(answer, job)
    if run.waits:
        saved = Saved(
            replace(run, state=RunState.SKIPPED, reason=Reason.CANCELLED, ended_at=now.at)
        )
    else:
        saved = _asked(run, now, CancelReason.REQUESTED)
        if run.cancel is None and not saved.run.state.final:
            saved = replace(saved, run=replace(saved.run, cancel_message=cancel.message))
    return ControlVerdict(
        ControlAnswer(ControlOutcome.DONE, view(saved.run, now)),
        job,
        saved=(saved,) if saved.run is not run else (),
    )


def _asked(run: Run, now: Moment, reason: CancelReason) -> Saved:
    """Nobody vouches for the clock here: where it may step, a lease that seems over is left for a
    claim to find so (S19).
    """
    return asked_to_stop(run, now, reason, witnessed=now.steady)


def _answer(outcome: ControlOutcome, job: JobRecord) -> ControlVerdict:
    return ControlVerdict(ControlAnswer(outcome), job)
