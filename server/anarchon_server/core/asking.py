"""What an operator asks, as the store must be asked: with the slots it cannot compute (S29). Pure.

Imports `limits`, `missed`, `policy` and the records of `model` and `store`.
"""

from __future__ import annotations

from collections.abc import Callable

from anarchon_server.core import limits
from anarchon_server.core.missed import passed_slots, plan_of
from anarchon_server.core.model import JobSpec, JobView
from anarchon_server.core.policy import Job
from anarchon_server.core.store import Resume, TriggerRun

Resolve = Callable[[JobSpec], Job]
"""A spec to the job it makes here. Raises `InvalidError` or `UnsupportedError`."""


def resume_of(view: JobView, resolve: Resolve, at: int) -> Resume:
    """Resumes the job as `view` shows it, by the store's time `at`, or soon after."""
    assert view.paused_at is not None, "a job that is not paused is not resumed"
    until = at + limits.ASKED_WITHIN
    began = min(view.paused_at, at)
    jobs = [(resolve(each.spec), each.settled) for each in view.schedules]
    plans = [plan_of(job, settled, began) for job, settled in jobs]
    return Resume(
        view.name,
        view.paused_at,
        until,
        tuple(plan for plan in plans if plan.slots),
        tuple(passed_slots(job, settled, until) for job, settled in jobs),
    )


def trigger_of(
    view: JobView, resolve: Resolve, request_id: str, payload: bytes, at: int
) -> TriggerRun:
    """A run of the job that is due now, by the store's time `at`, or soon after."""
    until = at + limits.ASKED_WITHIN
    now = resolve(view.spec)
    jobs = [resolve(each.spec) for each in view.schedules]
    slots = {slot for job in jobs for slot in passed_slots(job, at - 1, until).slots}
    return TriggerRun(
        view.name,
        request_id,
        payload,
        tuple(sorted(slots)),
        until,
        now.overlap,
        now.definition.window_ms,
    )
