"""The rows of one call: the store's JSON read as the machine's records, and written back.

Imports the machine, the model and the standard library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from anarchon_backends.postgres._sql import RUN_VALUES
from anarchon_server.core import machine, model

EVER = 1 << 62  # beyond every instant

Document = Mapping[str, Any]


def moment(now_us: int) -> machine.Moment:
    """The store's time: leases go by the same clock, which may be stepped."""
    return machine.Moment(now_us, now_us // 1_000, "", steady=False)


class Rows:
    """What one call has read, and what it changes: each row is read once and written once.

    `is_news`: other instances should look soon at what is saved.
    """

    def __init__(self, document: Document) -> None:
        self.now = moment(document["now_us"])
        self._versions: dict[str, int] = {}
        self._jobs: dict[str, machine.JobRecord] = {}
        self._schedules: dict[tuple[str, str], machine.ScheduleRecord] = {}
        self._runs: dict[str, dict[int, model.Run]] = {}
        self._run_versions: dict[tuple[str, int], int] = {}
        self._read: dict[tuple[str, int], model.Run] = {}
        self._attempts: dict[tuple[str, int, str], model.Attempt] = {}
        self._taken: dict[str, set[int]] = {}
        self._held: dict[str, list[machine.HeldDefinition]] = {}
        self._payloads: dict[tuple[str, int], bytes] = {}
        self._locked: set[str] = set()
        self._looked_around: set[str] = set()
        self._changed_jobs: set[str] = set()
        self._changed_schedules: set[tuple[str, str]] = set()
        self._saved: dict[tuple[str, int], model.Run] = {}
        self._saved_attempts: dict[tuple[str, int, int], model.Attempt] = {}
        self._saved_payloads: dict[tuple[str, int], bytes] = {}
        self.is_news = False
        self._load(document)

    def _load(self, document: Document) -> None:
        for row in document.get("jobs") or ():
            values = dict(row) | {"pause_reason": said_of(row["pause_reason"])}
            self._versions[row["job"]] = values.pop("version")
            self._jobs[row["job"]] = machine.JobRecord(**values)
        for row in document.get("schedules") or ():
            record = machine.ScheduleRecord(row["since"], row["settled"])
            self._schedules[row["job"], row["schedule_id"]] = record
        self._load_runs((*(document.get("runs") or ()), *(document.get("unfinished") or ())))
        for row in document.get("attempts") or ():
            self._attempts[row["job"], row["slot"], row["token"]] = attempt_of(row)

    def _load_runs(self, found: Iterable[Sequence[Any]]) -> None:
        for values in found:
            row = run_document(values)
            key = row["job"], row["slot"]
            self._read[key] = run_of(row)
            self._put(self._read[key])
            self._run_versions[key] = row["version"]
            payload = values[len(RUN_VALUES) :]
            if payload and payload[0]:
                self._payloads[key] = bytes.fromhex(payload[0])

    def _put(self, run: model.Run) -> None:
        self._runs.setdefault(run.job, {})[run.slot] = run

    def job(self, name: str) -> machine.JobRecord:
        return self._jobs.get(name) or machine.JobRecord(name)

    def knows(self, name: str) -> bool:
        """Whether the job's row was read."""
        return name in self._versions

    def known_fences(self) -> dict[str, int]:
        """The highest fences of the jobs whose rows were read, as they are now."""
        return {name: self.job(name).fence for name in self._versions}

    def fences(self, jobs: Iterable[str]) -> dict[str, int]:
        return {job: self.job(job).fence for job in jobs}

    def schedule(self, job: str, schedule_id: str) -> machine.ScheduleRecord | None:
        return self._schedules.get((job, schedule_id))

    def all_settled(self, job: str) -> dict[str, int]:
        return {
            schedule_id: record.settled
            for (name, schedule_id), record in self._schedules.items()
            if name == job
        }

    def run(self, job: str, slot: int) -> model.Run | None:
        return self._runs.get(job, {}).get(slot)

    def add_taken(self, found: Iterable[tuple[str, Iterable[int]]]) -> None:
        """Adds slots that have a row, by job, of which nothing else was read."""
        for job, slots in found:
            self._taken.setdefault(job, set()).update(slots)

    def taken(self, job: str) -> Collection[int]:
        """The job's slots that have a row, as far as was read."""
        return self._taken.get(job, set()) | self._runs.get(job, {}).keys()

    def add_control(self, document: Document) -> None:
        """Adds what operators' acts need: slots, runs that were triggered, what instances hold."""
        self.add_taken(document["taken"] or ())
        # Those that are not final were read, with the version that is decided on.
        requested = [v for v in document["requested"] or () if tuple(v[:2]) not in self._read]
        self._load_runs(requested)
        for row in document["held"] or ():
            self._held.setdefault(row["job"], []).append(machine.HeldDefinition(**row))

    def held(self, job: str) -> Sequence[machine.HeldDefinition]:
        """What live instances hold of the job."""
        return self._held.get(job, [])

    def requested(self, job: str, request_id: str) -> model.Run | None:
        """The run that the request triggered, if any."""
        runs = self._runs.get(job, {}).values()
        return next((run for run in runs if run.request_id and run.request_id == request_id), None)

    def payload(self, job: str, slot: int) -> bytes:
        """What came with the call that triggered the run; empty where there was none."""
        return self._payloads.get((job, slot), b"")

    def keep_payload(self, job: str, slot: int, payload: bytes) -> None:
        """Notes what is written with the run that a call has triggered."""
        self._saved_payloads[job, slot] = payload

    def caught_up(self, job: str) -> list[model.Run]:
        """The job's runs that wait since an earlier plan, of those that were read."""
        return [r for r in self.others(job, -1) if r.waits and r.trigger is model.Trigger.CATCH_UP]

    def others(self, job: str, slot: int) -> Iterator[model.Run]:
        """The job's runs at other slots that are not final, of those that were read.

        What is then decided of the job is written only where they are still what they were.
        """
        self._looked_around.add(job)
        runs = self._runs.get(job, {})
        for each in sorted(runs):
            if each != slot and not runs[each].state.final:
                yield runs[each]

    def attempt_of(self, job: str, slot: int, token: str) -> model.Attempt | None:
        """The attempt before the newest that had the token."""
        return self._attempts.get((job, slot, token))

    def version(self, job: str) -> int:
        return self._versions.get(job, 0)

    def save_job(self, job: machine.JobRecord) -> None:
        """Notes the job's row, which is written if it or whatever else of the job has changed."""
        if job != self.job(job.job):
            self._changed_jobs.add(job.job)
        self._jobs[job.job] = job
        self._locked.add(job.job)

    def save_schedule(self, job: str, schedule_id: str, record: machine.ScheduleRecord) -> None:
        if record != self._schedules.get((job, schedule_id)):
            self._schedules[job, schedule_id] = record
            self._changed_schedules.add((job, schedule_id))

    def settle(self, job: str, schedule_id: str, settled: int | None) -> None:
        record = self.schedule(job, schedule_id)
        if record is not None and settled is not None:
            self.save_schedule(job, schedule_id, dataclasses.replace(record, settled=settled))

    def save(self, saved: Iterable[machine.Saved]) -> None:
        for each in saved:
            key = each.run.job, each.run.slot
            self._saved[key] = each.run
            self._put(each.run)
            self.is_news |= each.is_news
            for attempt in each.attempts:
                self._saved_attempts[(*key, attempt.attempt)] = attempt

    @property
    def saved(self) -> Mapping[tuple[str, int], model.Run]:
        """The runs that were changed, by job and slot."""
        return self._saved

    @property
    def moved(self) -> Collection[tuple[str, str]]:
        """The schedules that were changed, by job and identity."""
        return self._changed_schedules

    def job_rows(self, names: Iterable[str]) -> str:
        """The jobs' rows as they are now, with the versions they had, as JSON."""
        rows = [
            {
                "version": self.version(job.job),
                **dataclasses.asdict(job),
                "pause_reason": said_text(job.pause_reason),
            }
            for job in map(self.job, names)
        ]
        return json.dumps(rows)

    def changes(self) -> tuple[str, str, str, str, str] | None:
        """What is to be written: jobs, schedules, runs, attempts, and the versions of runs that must
        still be there, as JSON (None: nothing).

        A job is written, and its version with it, where its row was decided on.
        """
        changed = {job for job, _ in (*self._saved, *self._changed_schedules)} | self._changed_jobs
        if not changed:
            return None
        past = [row for key in self._saved for row in self._past_attempts(key)]
        return (
            self.job_rows(sorted(changed & self._locked)),
            self.changed_schedules(),
            json.dumps([self._run_row(key) for key in self._saved]),
            json.dumps(past),
            json.dumps(list(self._seen(changed))),
        )

    def _run_row(self, key: tuple[str, int]) -> dict[str, object]:
        row = run_row(self._saved[key], self._run_versions.get(key, 0))
        payload = self._saved_payloads.get(key)
        return row | ({"payload": f"\\x{payload.hex()}"} if payload else {})

    def _seen(self, changed: Collection[str]) -> Iterator[dict[str, object]]:
        """The runs that were looked at, are not final, and stay as they are."""
        for key, run in self._read.items():
            job, slot = key
            decided_on = job in changed and job in self._looked_around
            if decided_on and not run.state.final and key not in self._saved:
                yield {"job": job, "slot": slot, "version": self._run_versions[key]}

    def changed_schedules(self) -> str:
        """The schedules to be written, as JSON."""
        return json.dumps(
            [
                {"job": job, "schedule_id": schedule_id, **dataclasses.asdict(record)}
                for job, schedule_id in self._changed_schedules
                for record in [self._schedules[job, schedule_id]]
            ]
        )

    def _past_attempts(self, key: tuple[str, int]) -> Iterator[dict[str, object]]:
        """The attempts that stop being the run's newest with what is saved."""
        before, newest = self._read.get(key), self._saved[key].attempt
        first = before.attempt if before and before.attempt else 1
        for number in range(first, newest):
            attempt = self._saved_attempts.get((*key, number))
            if attempt is None and before is not None and before.attempt == number:
                attempt = before.current
            assert attempt is not None, "an attempt that was followed by another is known"
            yield {"job": key[0], "slot": key[1], **attempt_row(attempt)}


def run_document(values: Sequence[Any]) -> Document:
    """The row of a run, of which a function gave the values."""
    return dict(zip(RUN_VALUES, values, strict=False))


def run_of(row: Document) -> model.Run:
    """The run in a row, with its newest attempt."""
    lease = None
    if row["lease_until"] is not None:
        lease = model.Lease(row["lease_until"], row["lease_length_ms"], row["lease_until"])
    return model.Run(
        job=row["job"],
        slot=row["slot"],
        trigger=model.Trigger(row["trigger"]),
        state=model.RunState(row["state"]),
        reason=row["reason"],
        current=attempt_of(row) if row["attempt"] else None,
        lease=lease,
        freed=row["freed"],
        lost=row["lost"],
        failed=row["failed"],
        max_attempts=row["max_attempts"],
        window_ms=row["window_ms"],
        cancel=model.CancelReason(row["cancel"]) if row["cancel"] else None,
        cancelled_at=row["cancelled_at"],
        cancel_message=said_of(row["cancel_message"]),
        cancel_grace_ms=row["cancel_grace_ms"],
        blocking_slot=row["blocking_slot"],
        slots_covered=row["slots_covered"],
        ended_at=row["ended_at"],
        retries=row["retries"],
        retry_at=row["retry_at"],
        retry_delay_ms=row["retry_delay_ms"],
        request_id=said_of(row["request_id"]),
    )


def run_row(run: model.Run, version: int) -> dict[str, object]:
    """The row of a run, which had `version` when it was read (0: there was none)."""
    return {
        "job": run.job,
        "slot": run.slot,
        "version": version,
        "final": run.state.final,
        "trigger": run.trigger,
        "state": run.state,
        "reason": run.reason,
        "lease_until": run.lease and run.lease.until,
        "lease_length_ms": run.lease and run.lease.length_ms,
        "freed": run.freed,
        "lost": run.lost,
        "failed": run.failed,
        "max_attempts": run.max_attempts,
        "window_ms": run.window_ms,
        "cancel": run.cancel,
        "cancelled_at": run.cancelled_at,
        "cancel_message": said_text(run.cancel_message),
        "cancel_grace_ms": run.cancel_grace_ms,
        "blocking_slot": run.blocking_slot,
        "slots_covered": run.slots_covered,
        "ended_at": run.ended_at,
        "retries": run.retries,
        "retry_at": run.retry_at,
        "retry_delay_ms": run.retry_delay_ms,
        "request_id": said_text(run.request_id),
        "attempt": 0,
        **(attempt_row(run.current) if run.current else {}),
    }


def attempt_of(row: Document) -> model.Attempt:
    """The attempt in a row of `run` or of `attempt`."""
    return model.Attempt(
        attempt=row["attempt"],
        token=row["token"],
        fence=row["fence"],
        instance_id=row["instance_id"],
        incarnation=row["incarnation"],
        cause=model.AttemptCause(row["cause"]),
        state=model.RunState(row["attempt_state"]),
        reason=row["attempt_reason"],
        claimed_at=row["claimed_at"],
        started_at=row["started_at"],
        ended_at=row["attempt_ended_at"],
        failure=failure_of(row.get("failure")),
        result=said_of(row.get("result")),
    )


def attempt_row(attempt: model.Attempt) -> dict[str, object]:
    """The columns of an attempt."""
    return {
        "attempt": attempt.attempt,
        "token": attempt.token,
        "fence": attempt.fence,
        "instance_id": attempt.instance_id,
        "incarnation": attempt.incarnation,
        "cause": attempt.cause,
        "attempt_state": attempt.state,
        "attempt_reason": attempt.reason,
        "claimed_at": attempt.claimed_at,
        "started_at": attempt.started_at,
        "attempt_ended_at": attempt.ended_at,
        "failure": failure_text(attempt.failure),
        "result": said_text(attempt.result),
    }


# What handlers and callers say is kept as JSON: PostgreSQL's texts hold neither every character (NUL)
# nor, in a database of another encoding, every other.


def failure_text(failure: model.Failure | None) -> str | None:
    return json.dumps(dataclasses.asdict(failure)) if failure else None


def failure_of(text: str | None) -> model.Failure | None:
    return model.Failure(**json.loads(text)) if text else None


def said_text(said: str) -> str:
    return json.dumps(said) if said else ""


def said_of(text: str | None) -> str:
    return json.loads(text) if text else ""


def instance_text(instance: model.Instance) -> str:
    """The instance as it reports itself, but for when it was last heard of."""
    return json.dumps(dataclasses.asdict(instance))


def instance_of(text: str, seen_at: int) -> model.Instance:
    """The instance as it reported itself, perhaps by a version that says more of itself."""
    known = {field.name for field in dataclasses.fields(model.Instance)}
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(text).items()
        if name in known
    }
    state = model.InstanceState(told["state"])
    return model.Instance(**(told | {"state": state, "seen_at": seen_at}))
