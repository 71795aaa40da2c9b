"""Which slots of a schedule nobody claimed in time, listed within a bound (S20). Pure.

Imports `limits`, `policy` and the records of `store`.
"""

from __future__ import annotations

from anarchon_server.core import limits
from anarchon_server.core.policy import Job
from anarchon_server.core.store import MissedSlot, Passed, Plan


def plan_of(job: Job, settled: int, at: int) -> Plan:
    """The plan for the newest slots after `settled` that are missed at `at` by the store's time.

    It lists those that may be run or shown and 10,000 more, which one row stands for (S20); and
    some that follow, which may have been claimed meanwhile.
    """
    schedule = job.schedule
    missed: list[MissedSlot] = []
    following: int | None = None
    # None younger is missed; where the job does not say, it is at most seconds' worth of slots.
    slot = schedule.previous_upto(at - (job.spec.start_deadline_ms or 0))
    most = job.catch_up_limit + limits.MISSED_LISTED_MAX
    while slot is not None and slot > settled and len(missed) < most:
        after = schedule.next_after(slot) if following is None else following
        deadline = job.start_deadline(slot, after)
        if slot < at - deadline:
            missed.append(MissedSlot(slot, deadline))
        following, slot = slot, schedule.previous_upto(slot - 1)
    missed.reverse()
    missed += _followers(job, missed[-1].slot, at) if missed else ()
    return Plan(
        job.name,
        job.schedule_id,
        settled,
        tuple(missed),
        slot is not None and slot > settled,
        job.catch_up_limit,
        job.catch_up,
        job.definition.window_ms,
    )


def _followers(job: Job, newest_missed: int, at: int) -> list[MissedSlot]:
    """The first slots that are not missed yet at `at`, of those that may have been claimed."""
    found: list[MissedSlot] = []
    slot = job.schedule.next_after(newest_missed)
    while slot is not None and slot <= at + limits.EARLY_MAX and len(found) < limits.PLANNED_ALONG:
        after = job.schedule.next_after(slot)
        found.append(MissedSlot(slot, job.start_deadline(slot, after)))
        slot = after
    return found


def passed_slots(job: Job, settled: int, until: int) -> Passed:
    """The newest 10,000 slots of the job's schedule after `settled` and up to `until`."""
    slots: list[int] = []
    slot = job.schedule.previous_upto(until)
    while slot is not None and slot > settled and len(slots) < limits.MISSED_LISTED_MAX:
        slots.append(slot)
        slot = job.schedule.previous_upto(slot - 1)
    more = slot is not None and slot > settled
    return Passed(job.schedule_id, settled, tuple(reversed(slots)), more)
