"""A store in one SQLite file, for the instances of one host.

Atomic here: each batch is one `BEGIN IMMEDIATE` transaction, run as a whole in the connection's
own thread; the write lock makes read, decide and write one step against every other process.
Whose clock decides: this machine's. Slots go by its wall clock, leases by its boot-time clock,
which cannot step; a lease of an earlier boot is over. What it cannot do: serve several hosts,
or stand on a file system that is shared between them. What it can lose: nothing acknowledged
at the death of a process; at a power cut, what the disk acknowledged and did not write.
Imports the port, the rules, the model, the standard library and aiosqlite.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from anarchon_backends.sqlite._connection import Call, Connection
from anarchon_backends.sqlite._file import File, Library
from anarchon_backends.sqlite._rows import EVER, Rows
from anarchon_server.core import control, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import OutcomeUnknown, StoreRefused, StoreUnavailable

_T = TypeVar("_T")

_POLL_S = 0.25  # how soon a freed run is noticed (S19)
_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store in the file that `sqlite:///absolute/path.db` or `sqlite:relative.db` names.

    Nothing is touched before `open`. Another form of URL is refused with `StoreRefused`; it is
    not repeated in the message, as it may hold a password meant for another store.
    """
    scheme, _, rest = url.partition(":")
    if rest.startswith("//"):
        rest = rest[2:] if rest.startswith("///") else ""
    no_file = not rest or rest.startswith(":") or rest.endswith("/")
    if scheme != "sqlite" or no_file or set("?#\0") & set(rest):
        raise StoreRefused(
            "a SQLite store is sqlite:///absolute/path.db or sqlite:relative.db, a file on this "
            "host without options after it (for a store in memory: memory:)"
        )
    return SqliteStore(Path(rest), options)


class SqliteStore:
    """One instance's connection to a SQLite file.

    `library` and `mountinfo` stand in for the SQLite library's version and for the text of
    `/proc/self/mountinfo`.
    """

    def __init__(
        self,
        path: Path,
        options: port.OpenOptions,
        *,
        library: Library = sqlite3.sqlite_version_info,
        mountinfo: str | None = None,
    ) -> None:
        # Both end before the caller's own limit does: who gives up first is the one that still
        # knows whether the call had begun, and a locked file is told from a slow one.
        self._limit_ms = options.op_timeout_ms * 7 // 8
        self._file = File(path, library, mountinfo, options.op_timeout_ms * 3 // 4)
        self._options = options
        self._capabilities = port.Capabilities(
            backend="sqlite",
            boot_leases=True,
            notifies=True,
            overlap=frozenset(model.OverlapPolicy),
            catch_up=frozenset(model.CatchUpPolicy),
            retries=True,
            control=True,
        )
        self._connections: list[Connection] = []
        self._store_id = ""
        self._news_before = 0
        self._pruned_to = ""

    def __str__(self) -> str:
        return f"sqlite file {self._file}"

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    async def open(self) -> port.StoreReport:
        """Makes the file and its tables where they are missing, and checks what it stands on."""
        connection = await self._connect(self._file.open)
        read = self._call(self._identity, "BEGIN")
        try:
            self._store_id, self._news_before = await connection.run(read)
        except StoreUnavailable as error:
            await self.close()
            raise StoreRefused(str(error)) from error
        return self._file.report

    async def close(self) -> None:
        """Ends what runs within the call's bound, then the connections and their threads."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.shut(self._options.op_timeout_ms / 1_000)

    async def _connect(self, connector: Callable[[], sqlite3.Connection]) -> Connection:
        connection = Connection(connector)
        await connection.opened()
        self._connections.append(connection)
        return connection

    async def _act(self, work: Callable[[Rows], _T], begin: str = "BEGIN IMMEDIATE") -> _T:
        """Carries out one transaction, a little within `op_timeout_ms`."""
        if not self._connections:
            raise StoreUnavailable(f"{self._file}: not open")
        call = self._call(work, begin)
        try:
            async with asyncio.timeout(self._limit_ms / 1_000):
                return await self._connections[0].run(call)
        except TimeoutError:
            within = f"within {self._limit_ms} ms"
            if call.withdraw():
                raise StoreUnavailable(f"{self._file}: not begun {within}") from None
            raise OutcomeUnknown(f"{self._file}: not done {within}") from None
        except asyncio.CancelledError:
            call.withdraw()
            raise

    def _call(self, work: Callable[[Rows], _T], begin: str) -> Call[_T]:
        return Call(partial(self._transaction, work), partial(self._begin, begin))

    def _begin(self, begin: str, db: sqlite3.Connection) -> None:
        try:
            db.execute(begin)
        except sqlite3.DatabaseError as error:
            raise StoreUnavailable(f"{self._file}: {error}") from error

    def _transaction(self, work: Callable[[Rows], _T], db: sqlite3.Connection) -> _T:
        try:
            self._file.check_in_place()
            rows = Rows(db, self._options)
            answer = work(rows)
            rows.write()
        except sqlite3.DatabaseError as error:
            _roll_back(db)
            raise StoreUnavailable(f"{self._file}: {error}") from error
        except BaseException:
            _roll_back(db)
            raise
        try:
            db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            _roll_back(db)
            failure = StoreUnavailable if _surely_undone(error) else OutcomeUnknown
            raise failure(f"{self._file}: {error}, while it committed") from error
        return answer

    def _reply(self, rows: Rows, answers: Iterable[_T], jobs: Iterable[str] = ()) -> port.Reply[_T]:
        fences = {job: rows.job(job).fence for job in jobs}
        return port.Reply(rows.now.at, tuple(answers), fences, self._store_id)

    @staticmethod
    def _identity(rows: Rows) -> tuple[str, int]:
        return rows.store_id(), rows.news()

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""

        def work(rows: Rows) -> port.Reply[port.ClaimAnswer]:
            answers: list[port.ClaimAnswer] = []
            for claim in claims:
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
                rows.save_job(verdict.job)
                rows.settle(claim.job, claim.schedule_id, verdict.settled)
                answers.append(_with_payload(rows, verdict.answer))
            return self._reply(rows, answers, (claim.job for claim in claims))

        return await self._act(work)

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""

        def work(rows: Rows) -> port.Reply[port.PlanAnswer]:
            answers: list[port.PlanAnswer] = []
            for plan in plans:
                schedule = rows.schedule(plan.job, plan.schedule_id)
                verdict = machine.judge_plan(
                    plan,
                    rows.now,
                    rows.job(plan.job),
                    schedule.settled if schedule else None,
                    _taken(rows, plan),
                    rows.caught_up(plan.job),
                )
                rows.save(verdict.saved)
                rows.settle(plan.job, plan.schedule_id, verdict.answer.settled)
                answers.append(verdict.answer)
            return self._reply(rows, answers, (plan.job for plan in plans))

        return await self._act(work)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels."""

        def work(rows: Rows) -> port.Reply[port.ControlAnswer]:
            answers: list[port.ControlAnswer] = []
            for act in acts:
                verdict = _judge(rows, act)
                rows.save(verdict.saved)
                rows.save_job(verdict.job)
                for schedule_id, settled in (verdict.settled or {}).items():
                    rows.settle(act.job, schedule_id, settled)
                answers.append(verdict.answer)
            return self._reply(rows, answers, (act.job for act in acts))

        return await self._act(work)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat."""

        touched = {renewal.job for renewal in beat.renewals}
        touched.update(job for job, _ in (*beat.looks, *beat.sweep))

        def work(rows: Rows) -> port.Reply[port.BeatAnswer]:
            rows.expect(touched)
            renewals: list[port.TokenAnswer] = []
            for renewal in beat.renewals:
                verdict = machine.judge_renewal(
                    renewal, rows.now, rows.run(renewal.job, renewal.slot)
                )
                rows.save([verdict.saved] if verdict.saved else [])
                renewals.append(verdict.answer)
            looked = [rows.run(job, slot) for job, slot in beat.looks]
            schedules = [rows.schedule(job, schedule_id) for job, schedule_id in beat.sweep]
            answer = port.BeatAnswer(
                renewals=tuple(renewals),
                looks=tuple(machine.view(run, rows.now) if run else None for run in looked),
                unfinished=rows.sweep({job for job, _ in beat.sweep}, beat.sweep_limit),
                settled=tuple(schedule.settled if schedule else None for schedule in schedules),
                twins=tuple(
                    each.incarnation
                    for each in rows.instances()
                    if each.instance_id == beat.instance.instance_id
                    and each.incarnation != beat.instance.incarnation
                    and machine.is_live(each, rows.now)
                ),
                known=rows.heard_of(beat.instance, leaving=beat.leaving),
            )
            return self._reply(rows, [answer], touched)

        return await self._act(work)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""

        def work(rows: Rows) -> port.Reply[port.TokenAnswer]:
            answers: list[port.TokenAnswer] = []
            for each in completions:
                run = rows.run(each.job, each.slot)
                past = None
                if run is not None and run.token != each.token:
                    past = rows.attempt_of(each.job, each.slot, each.token)
                verdict = machine.judge_completion(each, rows.now, run, past)
                rows.save([verdict.saved] if verdict.saved else [])
                ended = verdict.saved is not None and verdict.saved.ends_a_run
                due = rows.due(each.job) if ended else None
                seen = machine.view(due, rows.now) if due else None
                answers.append(dataclasses.replace(verdict.answer, due=seen))
            return self._reply(rows, answers, (each.job for each in completions))

        return await self._act(work)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""

        def work(rows: Rows) -> port.Reply[port.TokenAnswer]:
            answers: list[port.TokenAnswer] = []
            for each in releases:
                verdict = machine.judge_release(each, rows.now, rows.run(each.job, each.slot))
                rows.save([verdict.saved] if verdict.saved else [])
                answers.append(verdict.answer)
            return self._reply(rows, answers, (each.job for each in releases))

        return await self._act(work)

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now."""

        def work(rows: Rows) -> port.Reply[port.Registration]:
            wanted = [machine.hold_of(instance, each) for each in definitions]
            held_before = {hold.job: rows.held(hold.job) for hold in wanted}
            for hold in wanted:
                verdict = machine.judge_registration(
                    hold,
                    rows.now,
                    rows.job(hold.job),
                    rows.schedule(hold.job, hold.schedule_id),
                    held_before[hold.job],
                )
                rows.save_job(verdict.job)
                if verdict.schedule:
                    rows.save_schedule(hold.job, hold.schedule_id, verdict.schedule)
            rows.replace_holds(instance, wanted, definitions, let_go)
            answers = [self._registration(rows, hold) for hold in wanted]
            return self._reply(rows, answers, (hold.job for hold in wanted))

        return await self._act(work)

    @staticmethod
    def _registration(rows: Rows, hold: machine.HeldDefinition) -> port.Registration:
        job = rows.job(hold.job)
        schedule = rows.schedule(hold.job, hold.schedule_id)
        return port.Registration(
            job=hold.job,
            current=job.definition_id == hold.definition_id,
            since=schedule.since if schedule else job.definition_at,
            settled=schedule.settled if schedule else None,
            definitions_differ=machine.definitions_differ(rows.held(hold.job)),
        )

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""

        def work(rows: Rows) -> port.Reply[model.RunView]:
            page: list[model.RunView] = []
            for run in rows.history(query):
                attempts = rows.attempts(run.job, run.slot, machine.first_attempt_shown(run))
                seen = machine.view(run, rows.now, attempts)
                page.append(seen if query.traces else machine.without_traces(seen))
            return self._reply(rows, page, {seen.run.job for seen in page})

        return await self._act(work, "BEGIN")

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""

        def work(rows: Rows) -> port.Reply[model.JobView]:
            wanted = names or rows.job_names(after, limit)
            views = [
                _job_view(rows, job) for name in wanted if (job := rows.job(name)).definition_id
            ]
            return self._reply(rows, views, (seen.name for seen in views))

        return await self._act(work, "BEGIN")

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""

        def work(rows: Rows) -> port.Reply[model.Instance]:
            lately = [
                machine.shown_instance(each, rows.now)
                for each in rows.instances()
                if not machine.is_forgotten(each, rows.now)
            ]
            lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
            return self._reply(rows, lately)

        return await self._act(work, "BEGIN")

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended.
        """

        def work(rows: Rows) -> port.Reply[int]:
            for each in rows.instances():
                if machine.is_forgotten(each, rows.now):
                    rows.forget_instance(each.incarnation, each.seen_at)
            gone = 0
            names = rows.job_names(self._pruned_to, _PRUNE_JOBS)
            for name in names:
                if gone == policy.batch:
                    break
                gone += _prune_job(rows, name, policy, policy.batch - gone)
                self._pruned_to = name
            else:
                if len(names) < _PRUNE_JOBS:
                    self._pruned_to = ""
            return self._reply(rows, [gone])

        return await self._act(work)

    async def watch(self) -> AsyncIterator[None]:
        """Yields within 250 ms of news (`machine.Saved`), counted from `open`."""
        connection = await self._connect(self._file.connect_again)
        version, news = -1, self._news_before
        try:
            while connection in self._connections:
                changed = await connection.run(Call(self._file.data_version))
                if changed != version:
                    version, before = changed, news
                    news = await self._act(Rows.news, "BEGIN")
                    if news != before:
                        yield
                await asyncio.sleep(_POLL_S)
        finally:
            if connection in self._connections:
                self._connections.remove(connection)
                await connection.shut(self._options.op_timeout_ms / 1_000)


def _surely_undone(error: sqlite3.Error) -> bool:
    """Whether a failed COMMIT left nothing: it could not begin, or could not write its pages.

    What fails after that (the journal's end, a sync) may leave it done.
    """
    busy_or_full = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL)
    return busy_or_full or error.sqlite_errorcode == sqlite3.SQLITE_IOERR_WRITE


def _roll_back(db: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


def _with_payload(rows: Rows, answer: port.ClaimAnswer) -> port.ClaimAnswer:
    """The answer with what came with the call that triggered the run, if it was won."""
    run = answer.run.run if answer.run else None
    won = answer.outcome is port.ClaimOutcome.WON
    if run is None or not won or run.trigger is not model.Trigger.MANUAL:
        return answer
    return dataclasses.replace(answer, payload=rows.payload(run.job, run.slot))


def _taken(rows: Rows, plan: port.Plan) -> set[int]:
    """Those of the plan's slots that have a row (and others of the job)."""
    if not plan.slots:
        return set()
    return rows.taken(plan.job, plan.slots[0].slot, plan.slots[-1].slot)


def _judge(rows: Rows, act: port.Control) -> control.ControlVerdict:
    now, job = rows.now, rows.job(act.job)
    match act:
        case port.Pause():
            return control.judge_pause(act, now, job, rows.others(act.job, -1))
        case port.Resume():
            in_use = control.schedules_in_use(job, rows.held(act.job))
            schedules = {each: rows.schedule(act.job, each) for each in in_use}
            settled = {each: record.settled for each, record in schedules.items() if record}
            since = min(settled.values(), default=now.at)
            taken = rows.taken(act.job, since)
            return control.judge_resume(act, now, job, settled, taken, rows.caught_up(act.job))
        case port.TriggerRun():
            before = rows.requested(act.job, act.request_id)
            others, taken = list(rows.others(act.job, -1)), rows.taken(act.job, now.at)
            verdict = control.judge_trigger(act, now, job, before, taken, others)
            made = verdict.answer.run
            if before is None and made is not None:
                rows.keep_payload(act.job, made.run.slot, act.payload)
            return verdict
        case port.CancelRun():
            return control.judge_cancel(act, now, job, rows.run(act.job, act.slot))


def _job_view(rows: Rows, job: machine.JobRecord) -> model.JobView:
    held = rows.held(job.job)
    labels = {each.incarnation: each.instance_id for each in rows.instances()}
    last = rows.newest_run(job.job)
    return model.JobView(
        name=job.job,
        spec=rows.spec(job.job, job.definition_id),
        definition_at=job.definition_at,
        definitions_differ=machine.definitions_differ(held),
        instance_ids=tuple(sorted({labels[hold.incarnation] for hold in held})),
        last_run=machine.without_traces(machine.view(last, rows.now)) if last else None,
        paused_at=job.paused_at,
        pause_reason=job.pause_reason,
        schedules=_in_use(rows, job, held),
    )


def _in_use(
    rows: Rows, job: machine.JobRecord, held: Sequence[machine.HeldDefinition]
) -> tuple[model.ScheduleInUse, ...]:
    """The schedules whose slots are slots of the job, each with a definition that has it."""
    ids = {hold.schedule_id: hold.definition_id for hold in held}
    ids[job.schedule_id] = job.definition_id
    settled = rows.all_settled(job.job)
    return tuple(
        model.ScheduleInUse(each, settled[each], rows.spec(job.job, ids[each]))
        for each in sorted(control.schedules_in_use(job, held))
        if each in settled
    )


def _prune_job(rows: Rows, name: str, policy: port.PrunePolicy, room: int) -> int:
    """Prunes one job by at most `room` runs; how many went."""
    kept = rows.definitions(name)
    job, gone = machine.judge_definitions(
        rows.job(name), kept, rows.ever_held(name), rows.now, policy.history_ms
    )
    unused = len(gone) == len(kept)
    if unused:
        bound = oldest = EVER
    else:
        rows.save_job(job)
        rows.delete_definitions(name, gone)
        live = {hold.definition_id for hold in rows.held(name)}
        used = machine.in_use(job, kept, live)
        bound = machine.prune_bound(rows.now, used, rows.all_settled(name))
        oldest = rows.now.at - policy.history_ms
    slots = rows.prunable(name, bound, oldest, policy.history_max, room)
    job = dataclasses.replace(rows.job(name), floor=max([rows.job(name).floor, *slots]))
    rows.delete_runs(name, slots)
    if unused and rows.newest_run(name) is None:
        rows.delete_definitions(name, gone)
        job = machine.forgotten(job)
    rows.save_job(job)
    return len(slots)
