"""The tables, read and written as the machine's records.

Imports the machine, the model and the records of the port. The tables themselves are made in
`_file`.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from anarchon_server.core import machine, model
from anarchon_server.core import store as port

EVER = 1 << 62  # beyond every instant
_MANY = 100  # jobs from which on reading a whole table is cheaper
_JOB = (
    "SELECT job, floor, fence, definition_id, schedule_id, definition_at, paused_at, pause_reason"
    " FROM job WHERE namespace = ?"
)


class Rows:
    """The rows of one transaction: each is read once, changed in memory and written once."""

    def __init__(self, db: sqlite3.Connection, options: port.OpenOptions) -> None:
        clock = options.clock
        self.now = machine.Moment(clock.wall_us(), clock.boot_ms(), clock.boot_id, steady=True)
        self._db = db
        self._namespace = options.namespace
        self._jobs: dict[str, machine.JobRecord] = {}
        self._schedules: dict[tuple[str, str], machine.ScheduleRecord | None] = {}
        self._runs: dict[tuple[str, int], model.Run | None] = {}
        self._unfinished: dict[str, dict[int, model.Run]] = {}
        self._changed_jobs: set[str] = set()
        self._changed_schedules: set[tuple[str, str]] = set()
        self._saved: dict[str, dict[int, model.Run]] = {}
        self._is_news = False
        self._ended_a_run_of: set[str] = set()
        self._live: set[str] | None = None
        self._attempts: dict[tuple[str, int, int], model.Attempt] = {}

    def all(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """The rows of a query."""
        return self._db.execute(sql, values).fetchall()

    def one(self, sql: str, *values: object) -> sqlite3.Row | None:
        """The first row, if any."""
        found: sqlite3.Row | None = self._db.execute(sql, values).fetchone()
        return found

    # Jobs and schedules

    def job(self, name: str) -> machine.JobRecord:
        if name not in self._jobs:
            row = self.one(f"{_JOB} AND job = ?", self._namespace, name)
            self._jobs[name] = machine.JobRecord(*(row or (name,)))
        return self._jobs[name]

    def save_job(self, job: machine.JobRecord) -> None:
        if job != self._jobs[job.job]:
            self._jobs[job.job] = job
            self._changed_jobs.add(job.job)

    def job_names(self, after: str, limit: int) -> list[str]:
        sql = (
            "SELECT job FROM job WHERE namespace = ? AND job > ? AND definition_id <> ''"
            " ORDER BY job LIMIT ?"
        )
        return [name for (name,) in self.all(sql, self._namespace, after, limit)]

    def schedule(self, job: str, schedule_id: str) -> machine.ScheduleRecord | None:
        key = (job, schedule_id)
        if key not in self._schedules:
            row = self.one(
                "SELECT since, settled FROM schedule"
                " WHERE namespace = ? AND job = ? AND schedule_id = ?",
                self._namespace,
                *key,
            )
            self._schedules[key] = machine.ScheduleRecord(*row) if row else None
        return self._schedules[key]

    def save_schedule(self, job: str, schedule_id: str, record: machine.ScheduleRecord) -> None:
        if record != self._schedules[job, schedule_id]:
            self._schedules[job, schedule_id] = record
            self._changed_schedules.add((job, schedule_id))

    def settle(self, job: str, schedule_id: str, settled: int | None) -> None:
        record = self.schedule(job, schedule_id)
        if record is not None and settled is not None:
            self.save_schedule(job, schedule_id, dataclasses.replace(record, settled=settled))

    def all_settled(self, job: str) -> dict[str, int]:
        sql = "SELECT schedule_id, settled FROM schedule WHERE namespace = ? AND job = ?"
        return {row["schedule_id"]: row["settled"] for row in self.all(sql, self._namespace, job)}

    # Runs and attempts

    def run(self, job: str, slot: int) -> model.Run | None:
        if (job, slot) not in self._runs:
            row = self.one(
                "SELECT * FROM run WHERE namespace = ? AND job = ? AND slot = ?",
                self._namespace,
                job,
                slot,
            )
            self._runs[job, slot] = self._run_of(row) if row else None
        return self._runs[job, slot]

    def _run_of(self, row: sqlite3.Row) -> model.Run:
        current = None
        if row["attempt"]:
            (current,) = self.attempts(row["job"], row["slot"], row["attempt"])
        return _run_of(row, current)

    def others(self, job: str, slot: int) -> Iterator[model.Run]:
        """The job's unfinished runs at other slots, read when the first is asked for."""
        if job not in self._unfinished:
            sql = "SELECT * FROM run WHERE namespace = ? AND job = ? AND final = 0"
            stored = [self._run_of(row) for row in self.all(sql, self._namespace, job)]
            runs = {run.slot: run for run in stored} | self._saved.get(job, {})
            self._unfinished[job] = {each: r for each, r in runs.items() if not r.state.final}
        unfinished = self._unfinished[job]
        yield from (unfinished[each] for each in sorted(unfinished) if each != slot)

    def sweep(self, jobs: Collection[str], limit: int) -> tuple[model.RunView, ...]:
        """The unfinished runs of the jobs, those to be taken over first."""
        sql = """
            SELECT job, slot, freed <> '' OR lease_boot_id <> ? OR lease_until <= ? FROM run
            WHERE namespace = ? AND final = 0"""
        boot_id, lease_at = self.now.boot_id, self.now.lease_at
        stored = self.all(sql, boot_id, lease_at, self._namespace)
        over = {(job, slot): bool(is_over) for job, slot, is_over in stored if job in jobs}
        for job in self._saved.keys() & jobs:
            for slot, run in self._saved[job].items():
                over[job, slot] = machine.view(run, self.now).takeable
        ordered = sorted(over, key=lambda key: (not over[key], key[1], key[0]))
        runs = (self.run(job, slot) for job, slot in ordered)
        unfinished = (run for run in runs if run and not run.state.final)
        return tuple(machine.view(run, self.now) for run in islice(unfinished, limit))

    def due(self, job: str) -> model.Run | None:
        """The job's oldest run that waits."""
        sql = """
            SELECT slot FROM run WHERE namespace = ? AND job = ? AND final = 0 AND state = 'due'
            ORDER BY slot"""
        stored = (self.run(job, slot) for (slot,) in self._db.execute(sql, (self._namespace, job)))
        oldest = next((run for run in stored if run is not None and run.waits), None)
        saved = [run for run in self._saved.get(job, {}).values() if run.waits]
        waiting = saved if oldest is None else [*saved, oldest]
        return min(waiting, key=lambda run: run.slot, default=None)

    def caught_up(self, job: str) -> list[model.Run]:
        """The job's runs that wait since an earlier plan."""
        unfinished = self.others(job, -1)
        return [r for r in unfinished if r.waits and r.trigger is model.Trigger.CATCH_UP]

    def taken(self, job: str, first: int, last: int = EVER) -> set[int]:
        """The job's slots between these two that have a row."""
        sql = "SELECT slot FROM run WHERE namespace = ? AND job = ? AND slot BETWEEN ? AND ?"
        stored = {slot for (slot,) in self.all(sql, self._namespace, job, first, last)}
        return stored.union(s for s in self._saved.get(job, ()) if first <= s <= last)

    def requested(self, job: str, request_id: str) -> model.Run | None:
        """The run that the request triggered, if any."""
        for run in self._saved.get(job, {}).values():
            if run.request_id and run.request_id == request_id:
                return run
        sql = """
            SELECT slot FROM run WHERE namespace = ? AND job = ? AND request_id = ?
                AND request_id <> ''"""
        row = self.one(sql, self._namespace, job, request_id)
        return self.run(job, row["slot"]) if row else None

    def payload(self, job: str, slot: int) -> bytes:
        """What came with the call that triggered the run; empty where there was none."""
        sql = "SELECT payload FROM payload WHERE namespace = ? AND job = ? AND slot = ?"
        row = self.one(sql, self._namespace, job, slot)
        return bytes(row["payload"]) if row else b""

    def keep_payload(self, job: str, slot: int, payload: bytes) -> None:
        values = (self._namespace, job, slot, payload)
        self._db.execute("INSERT INTO payload VALUES (?, ?, ?, ?)", values)

    def newest_run(self, job: str) -> model.Run | None:
        sql = "SELECT * FROM run WHERE namespace = ? AND job = ? ORDER BY slot DESC LIMIT 1"
        row = self.one(sql, self._namespace, job)
        return self._run_of(row) if row else None

    def history(self, query: port.RunQuery) -> list[model.Run]:
        """A page of runs. The state that is asked for is the state as shown (`machine.view`)."""
        sql = """
            SELECT * FROM run WHERE namespace = :namespace /*job*/
                AND slot BETWEEN :from_slot AND :until_slot
                AND (slot, job) < (:after_slot, :after_job)
                AND (:states = '' OR instr(:states, CASE
                    WHEN state IN ('claimed', 'running')
                        AND (lease_boot_id <> :boot_id OR lease_until <= :lease_at)
                    THEN 'interrupted' ELSE state END))
                AND (:instance_id = '' OR EXISTS (
                    SELECT 1 FROM attempt WHERE attempt.namespace = run.namespace
                        AND attempt.job = run.job AND attempt.slot = run.slot
                        AND attempt.instance_id = :instance_id))
            ORDER BY slot DESC, job DESC LIMIT :limit"""
        after_slot, after_job = query.after or (EVER, "")
        until_slot = EVER if query.until_slot is None else query.until_slot - 1
        lowest = [s for s in (query.slot, query.from_slot) if s is not None]
        # `after_slot` too, by which an index finds the place: a late page is as quick as the first.
        highest = [after_slot, until_slot, *([] if query.slot is None else [query.slot])]
        values = {
            "namespace": self._namespace,
            "job": query.job,
            "from_slot": max(lowest, default=-EVER),
            "until_slot": min(highest),
            "after_slot": after_slot,
            "after_job": after_job,
            "states": ",".join(query.states),
            "boot_id": self.now.boot_id,
            "lease_at": self.now.lease_at,
            "instance_id": query.instance_id,
            "limit": query.limit,
        }
        if query.job:
            sql = sql.replace("/*job*/", "AND job = :job")
        return [self._run_of(row) for row in self._db.execute(sql, values).fetchall()]

    def attempts(self, job: str, slot: int, first: int) -> list[model.Attempt]:
        """The run's attempts from number `first` on."""
        sql = (
            "SELECT * FROM attempt WHERE namespace = ? AND job = ? AND slot = ? AND attempt >= ?"
            " ORDER BY attempt"
        )
        return [_attempt_of(row) for row in self.all(sql, self._namespace, job, slot, first)]

    def attempt_of(self, job: str, slot: int, token: str) -> model.Attempt | None:
        """The attempt that had the token."""
        sql = "SELECT * FROM attempt WHERE namespace = ? AND job = ? AND slot = ? AND token = ?"
        row = self.one(sql, self._namespace, job, slot, token)
        return _attempt_of(row) if row else None

    def save(self, saved: Iterable[machine.Saved]) -> None:
        for each in saved:
            run = each.run
            self._runs[run.job, run.slot] = run
            self._is_news |= each.is_news
            if each.ends_a_run:
                self._ended_a_run_of.add(run.job)
            self._saved.setdefault(run.job, {})[run.slot] = run
            for attempt in each.attempts:
                self._attempts[run.job, run.slot, attempt.attempt] = attempt
            unfinished = self._unfinished.get(run.job)
            if unfinished is not None:
                unfinished.pop(run.slot, None)
                if not run.state.final:
                    unfinished[run.slot] = run

    def prunable(self, job: str, bound: int, oldest: int, history_max: int, room: int) -> list[int]:
        """The slots of final runs up to `bound` that are too old or too many, oldest first."""
        sql = "SELECT slot FROM run WHERE namespace = ? AND job = ? ORDER BY slot DESC LIMIT 1 OFFSET ?"
        first_too_many = self.one(sql, self._namespace, job, history_max)
        beyond = first_too_many[0] if first_too_many else -1
        sql = (
            "SELECT slot FROM run WHERE namespace = ? AND job = ? AND slot <= ? AND final = 1"
            " AND (slot <= ? OR max(slot, coalesce(ended_at, 0)) < ?) ORDER BY slot LIMIT ?"
        )
        reach = min(bound, max(beyond, oldest - 1))
        found = self.all(sql, self._namespace, job, reach, beyond, oldest, room)
        return [slot for (slot,) in found]

    def delete_runs(self, job: str, slots: Iterable[int]) -> None:
        keys = [(self._namespace, job, slot) for slot in slots]
        self._db.executemany(
            "DELETE FROM attempt WHERE namespace = ? AND job = ? AND slot = ?", keys
        )
        self._db.executemany("DELETE FROM run WHERE namespace = ? AND job = ? AND slot = ?", keys)
        self._db.executemany(
            "DELETE FROM payload WHERE namespace = ? AND job = ? AND slot = ?", keys
        )

    def store_id(self) -> str:
        """The store's identity, drawn when the file was made."""
        ((store_id,),) = self.all("SELECT store_id FROM meta")
        return str(store_id)

    def news(self) -> int:
        """How often there was something for the instances of this namespace to look at."""
        row = self.one("SELECT times FROM news WHERE namespace = ?", self._namespace)
        return row[0] if row else 0

    # Definitions and instances

    def expect(self, jobs: Collection[str]) -> None:
        """Reads what is kept of many jobs at once rather than one by one."""
        if len(jobs) < _MANY:
            return
        for row in self.all(_JOB, self._namespace):
            self._jobs.setdefault(row["job"], machine.JobRecord(*row))
        sql = "SELECT job, schedule_id, since, settled FROM schedule WHERE namespace = ?"
        for job, schedule_id, since, settled in self.all(sql, self._namespace):
            self._schedules.setdefault((job, schedule_id), machine.ScheduleRecord(since, settled))

    def instances(self) -> list[model.Instance]:
        sql = "SELECT record FROM instance WHERE namespace = ?"
        return [model.Instance.from_json(text) for (text,) in self.all(sql, self._namespace)]

    def held(self, job: str) -> list[machine.HeldDefinition]:
        """What live instances hold of the job."""
        if self._live is None:
            instances = self.instances()
            self._live = {i.incarnation for i in instances if machine.is_live(i, self.now)}
        sql = (
            "SELECT incarnation, job, definition_id, schedule_id FROM hold"
            " WHERE namespace = ? AND job = ?"
        )
        holds = [machine.HeldDefinition(*row) for row in self.all(sql, self._namespace, job)]
        return [hold for hold in holds if hold.incarnation in self._live]

    def ever_held(self, job: str) -> set[str]:
        """The definitions of the job that instances hold, live or not."""
        sql = "SELECT DISTINCT definition_id FROM hold WHERE namespace = ? AND job = ?"
        return {definition_id for (definition_id,) in self.all(sql, self._namespace, job)}

    def definitions(self, job: str) -> list[machine.KeptDefinition]:
        sql = (
            "SELECT definition_id, schedule_id, window_ms, held_at FROM definition"
            " WHERE namespace = ? AND job = ?"
        )
        return [machine.KeptDefinition(*row) for row in self.all(sql, self._namespace, job)]

    def spec(self, job: str, definition_id: str) -> model.JobSpec:
        sql = "SELECT spec FROM definition WHERE namespace = ? AND job = ? AND definition_id = ?"
        row = self.one(sql, self._namespace, job, definition_id)
        assert row is not None, "a job's current definition is kept for as long as it is current"
        return model.JobSpec.from_json(row[0])

    def delete_definitions(self, job: str, gone: Iterable[machine.KeptDefinition]) -> None:
        """Deletes the definitions, and the schedules that no other definition has."""
        self._db.executemany(
            "DELETE FROM definition WHERE namespace = ? AND job = ? AND definition_id = ?",
            [(self._namespace, job, each.definition_id) for each in gone],
        )
        self._db.execute(
            "DELETE FROM schedule WHERE namespace = :namespace AND job = :job AND schedule_id NOT IN"
            " (SELECT schedule_id FROM definition WHERE namespace = :namespace AND job = :job)",
            {"namespace": self._namespace, "job": job},
        )

    def heard_of(self, instance: model.Instance, *, leaving: bool) -> bool:
        """Notes that the instance lives, or that it leaves; whether it is registered."""
        sql = "SELECT registered FROM instance WHERE namespace = ? AND incarnation = ?"
        row = self.one(sql, self._namespace, instance.incarnation)
        registered = bool(row and row[0])
        if leaving:
            self.forget_instance(instance.incarnation, self.now.at)
        else:
            self._put_instance(instance, registered=registered)
        return registered

    def replace_holds(
        self,
        instance: model.Instance,
        holds: Sequence[machine.HeldDefinition],
        definitions: Sequence[model.Definition],
        let_go: Iterable[str],
    ) -> None:
        """Writes what the instance holds now of these jobs, instead of what it held of them before."""
        self._let_go(instance.incarnation, {*(hold.job for hold in holds), *let_go})
        self._put_instance(instance, registered=True)
        self._db.executemany(
            "INSERT OR REPLACE INTO definition VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    self._namespace,
                    hold.job,
                    hold.definition_id,
                    hold.schedule_id,
                    each.window_ms,
                    self.now.at,
                    each.spec_json,
                )
                for hold, each in zip(holds, definitions, strict=True)
            ],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO hold VALUES (?, ?, ?, ?, ?)",
            [(self._namespace, *dataclasses.astuple(hold)) for hold in holds],
        )

    def _put_instance(self, instance: model.Instance, *, registered: bool) -> None:
        record = dataclasses.replace(instance, seen_at=self.now.at)
        self._db.execute(
            "INSERT OR REPLACE INTO instance VALUES (?, ?, ?, ?)",
            (
                self._namespace,
                instance.incarnation,
                registered,
                record.to_json(),
            ),
        )
        self._live = None

    def _let_go(self, incarnation: str, jobs: Iterable[str]) -> None:
        """Deletes what the instance holds of these jobs, and notes that it held that until now."""
        values = [
            {
                "namespace": self._namespace,
                "incarnation": incarnation,
                "job": job,
                "now": self.now.at,
            }
            for job in jobs
        ]
        self._db.executemany(
            "UPDATE definition SET held_at = max(held_at, :now)"
            " WHERE namespace = :namespace AND job = :job AND definition_id IN (SELECT definition_id"
            " FROM hold WHERE namespace = :namespace AND job = :job AND incarnation = :incarnation)",
            values,
        )
        self._db.executemany(
            "DELETE FROM hold WHERE namespace = :namespace AND job = :job"
            " AND incarnation = :incarnation",
            values,
        )

    def forget_instance(self, incarnation: str, held_until: int) -> None:
        """Deletes the instance with what it holds, and notes until when it held that."""
        values = {
            "namespace": self._namespace,
            "incarnation": incarnation,
            "held_until": held_until,
        }
        self._db.execute(
            "UPDATE definition SET held_at = max(held_at, :held_until)"
            " WHERE namespace = :namespace AND (job, definition_id) IN (SELECT job, definition_id"
            " FROM hold WHERE namespace = :namespace AND incarnation = :incarnation)",
            values,
        )
        self._db.execute(
            "DELETE FROM hold WHERE namespace = :namespace AND incarnation = :incarnation", values
        )
        self._db.execute(
            "DELETE FROM instance WHERE namespace = :namespace AND incarnation = :incarnation",
            values,
        )
        self._live = None

    # Writing

    def write(self) -> None:
        """Writes what changed."""
        runs = [run for saved in self._saved.values() for run in saved.values()]
        self._db.executemany(
            "INSERT OR REPLACE INTO job VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self._namespace, *dataclasses.astuple(self._jobs[j])) for j in self._changed_jobs],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO schedule VALUES (?, ?, ?, ?, ?)",
            [
                (self._namespace, *key, record.since, record.settled)
                for key in self._changed_schedules
                if (record := self._schedules[key])
            ],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO run VALUES"
            " (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(self._namespace, *_run_values(run)) for run in runs],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO attempt VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (self._namespace, *key[:2], *_attempt_values(attempt))
                for key, attempt in self._attempts.items()
            ],
        )
        if self._is_news or any(self.due(job) is not None for job in self._ended_a_run_of):
            self._db.execute(
                "INSERT INTO news VALUES (?, 1) ON CONFLICT DO UPDATE SET times = times + 1",
                (self._namespace,),
            )


def _run_values(run: model.Run) -> tuple[object, ...]:
    """The columns of `run`, but for the namespace."""
    lease = dataclasses.astuple(run.lease) if run.lease else (None, None, None, None)
    return (
        run.job,
        run.slot,
        run.trigger,
        run.state,
        run.state.final,
        run.reason,
        run.attempt,
        *lease,
        run.freed,
        run.lost,
        run.failed,
        run.max_attempts,
        run.window_ms,
        run.cancel,
        run.cancelled_at,
        run.cancel_grace_ms,
        run.blocking_slot,
        run.slots_covered,
        run.ended_at,
        run.retries,
        run.retry_at,
        run.retry_delay_ms,
        run.request_id,
        run.cancel_message,
    )


def _run_of(row: sqlite3.Row, current: model.Attempt | None) -> model.Run:
    lease = None
    if row["lease_until"] is not None:
        lease = model.Lease(
            row["lease_until"], row["lease_length_ms"], row["lease_end_at"], row["lease_boot_id"]
        )
    return model.Run(
        job=row["job"],
        slot=row["slot"],
        trigger=model.Trigger(row["trigger"]),
        state=model.RunState(row["state"]),
        reason=row["reason"],
        current=current,
        lease=lease,
        freed=row["freed"],
        lost=row["lost"],
        failed=row["failed"],
        max_attempts=row["max_attempts"],
        window_ms=row["window_ms"],
        cancel=model.CancelReason(row["cancel"]) if row["cancel"] else None,
        cancelled_at=row["cancelled_at"],
        cancel_grace_ms=row["cancel_grace_ms"],
        blocking_slot=row["blocking_slot"],
        slots_covered=row["slots_covered"],
        ended_at=row["ended_at"],
        retries=row["retries"],
        retry_at=row["retry_at"],
        retry_delay_ms=row["retry_delay_ms"],
        request_id=row["request_id"],
        cancel_message=row["cancel_message"],
    )


def _attempt_values(attempt: model.Attempt) -> tuple[object, ...]:
    """The columns of `attempt`, but for the run's."""
    failure = attempt.failure and json.dumps(dataclasses.asdict(attempt.failure))
    return (
        attempt.attempt,
        attempt.token,
        attempt.fence,
        attempt.instance_id,
        attempt.incarnation,
        attempt.cause,
        attempt.state,
        attempt.reason,
        attempt.claimed_at,
        attempt.started_at,
        attempt.ended_at,
        failure,
        attempt.result,
    )


def _attempt_of(row: sqlite3.Row) -> model.Attempt:
    failure = row["failure"]
    return model.Attempt(
        attempt=row["attempt"],
        token=row["token"],
        fence=row["fence"],
        instance_id=row["instance_id"],
        incarnation=row["incarnation"],
        cause=model.AttemptCause(row["cause"]),
        state=model.RunState(row["state"]),
        claimed_at=row["claimed_at"],
        reason=row["reason"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        failure=model.Failure(**json.loads(failure)) if failure else None,
        result=row["result"],
    )
