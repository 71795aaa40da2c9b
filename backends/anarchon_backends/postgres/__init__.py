"""A store in a PostgreSQL database, 12 or newer, also behind a pooler in transaction mode.

Atomic here: each batch is one statement, or a few: the plain cases of claims, heartbeats and results
are decided in the database by one function a method, under locks of the jobs' or the runs' rows;
what is not plain it reads, the machine decides it, and a last statement writes it if the rows that
it was decided on still have the versions they had. Where they have not, and where definitions change,
the same is done once more in one transaction under locks. Whose clock decides: the server's
(`clock_timestamp`), for slots and for leases; it may be stepped, so takeovers need the second
witness (S19). What it cannot do: notify behind a pooler in transaction mode. What it can lose:
nothing acknowledged at a crash of the server (`fsync` and `synchronous_commit` are checked); the
last acknowledged moments when a standby is promoted that was not synchronous.
Imports the port, the machine, the model, the standard library and asyncpg.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

import asyncpg

from anarchon_backends.postgres._connection import (
    Address,
    Pool,
    Session,
    address_of,
    answer_of,
    end,
)
from anarchon_backends.postgres._decisions import (
    Decided,
    changed_jobs,
    control_values,
    judge_claim,
    judge_completion,
    judge_control,
    judge_plan,
    judge_release,
    judge_renewal,
    registration_of,
    what_may_go,
)
from anarchon_backends.postgres._news import News
from anarchon_backends.postgres._rows import (
    EVER,
    Rows,
    attempt_of,
    instance_of,
    instance_text,
    moment,
    run_of,
)
from anarchon_backends.postgres._sql import (
    CONTROLLED,
    INSTANCES,
    JOBS,
    RUNS,
    SCHEMA_VERSION,
    TAKEN,
    in_schema,
    parts,
)
from anarchon_backends.postgres._start import NUMBERS, REMEDIES, Start, check_again
from anarchon_backends.postgres._values import (
    BEAT_TYPES,
    CLAIM_TYPES,
    COMPLETE_TYPES,
    PRUNE_TYPES,
    REGISTER_TYPES,
    WRITE_TYPES,
    answer_to_beat,
    answer_to_win,
    beat_values,
    claim_values,
    complete_values,
    definition_row,
    fences_of_beat,
    hold_of,
    holds_by_job,
    job_view,
    runs_by_key,
    with_due,
    with_outcome,
)
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_T = TypeVar("_T")
_A = TypeVar("_A")
_Item = TypeVar(
    "_Item",
    port.Claim,
    port.Plan,
    port.Renewal,
    port.Completion,
    port.Release,
    port.Control,
)

_OPEN_S = 10.0  # how long opening may wait for others that make the schema
_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store that `postgresql://user:password@host:port/database` names.

    Options: `schema` (`anarchon`), `pooler` (`none`; `transaction`), and libpq's for TLS and
    credentials; what the URL leaves out comes from libpq's environment and files. Nothing is
    touched before `open`. A URL that cannot be read is refused with `StoreRefused`, and not
    repeated in the message.
    """
    return PostgresStore(address_of(url), options)


class PostgresStore:
    """One instance's connections to one namespace of a PostgreSQL schema."""

    def __init__(self, address: Address, options: port.OpenOptions) -> None:
        self._address = address
        self._options = options
        self._namespace = options.namespace
        self._capabilities = port.Capabilities(
            backend="postgres",
            notifies=not address.pooled,
            overlap=frozenset(model.OverlapPolicy),
            catch_up=frozenset(model.CatchUpPolicy),
            retries=True,
            control=True,
        )
        self._pool = Pool(address, options.op_timeout_ms, self._check_connection)
        self._store_id = ""
        name = f"{address.schema}\0{options.namespace}".encode()
        channel = f"anarchon_{hashlib.sha256(name).hexdigest()[:32]}"
        self._news = News(channel, lambda: self._pool.connect(), options.op_timeout_ms)
        self._pruned_to = ""

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    async def open(self) -> port.StoreReport:
        """Connects, makes the schema where it is missing, and checks what it stands on."""
        start = Start(self._address.schema, self._address.location, pooled=self._address.pooled)
        try:
            await answer_of(self._start(start), self._address.location, REMEDIES)
        except BaseException:
            await self.close()
            raise
        return start.report

    async def _start(self, start: Start) -> None:
        usual = max(_OPEN_S, self._options.op_timeout_ms / 1_000)
        async with asyncio.timeout(usual) as limit:
            connection = await self._pool.connect()
            try:
                await start.run(connection, self._options.clock, limit)
            finally:
                await end(connection)
            self._store_id = start.store_id
            if not self._address.pooled:
                await self._news.listen()
            self._pool.start()

    async def _check_connection(self, connection: asyncpg.Connection) -> None:
        schema, location = self._address.schema, self._address.location
        self._store_id = await check_again(connection, schema, location)

    async def close(self) -> None:
        """Lets go of everything, with at most a second for each connection's farewell."""
        await self._pool.close()
        self._news.close()

    # --- Deciding ------------------------------------------------------------------------

    def _call(self, name: str, types: str) -> str:
        """The SQL that calls a function of the schema, whose parameters have these types."""
        values = ", ".join(f"${n}::{each}" for n, each in enumerate(types.split(), 1))
        return in_schema(f"SELECT anarchon.{name}_{SCHEMA_VERSION}({values})", self._address.schema)

    def _query(self, sql: str, **named: str) -> str:
        """The SQL with what it names in braces."""
        return in_schema(sql.format(**parts(NUMBERS), **named), self._address.schema)

    async def _read(
        self,
        session: Session,
        *,
        jobs: Iterable[str] = (),
        runs: Sequence[tuple[str, int, str]] = (),
        unfinished: Iterable[str] = (),
        lock: bool = False,
    ) -> Rows:
        """Rows in one snapshot; `runs` are (job, slot, a token of an earlier attempt or "")."""
        text = await session.read(
            self._call("read", "text text[] text[] int8[] text[] text[] bool"),
            self._namespace,
            sorted(set(jobs)),
            [job for job, _, _ in runs],
            [slot for _, slot, _ in runs],
            [token for _, _, token in runs],
            sorted(set(unfinished)),
            lock,
        )
        return Rows(json.loads(text))

    async def _write(
        self, session: Session, rows: Rows, *, inside: bool
    ) -> tuple[set[str], dict[str, model.Run]]:
        """Writes what changed.

        The jobs of which nothing was written, as they had changed; and the oldest run that waits of
        each job in which a run has ended.
        """
        changes = rows.changes()
        if changes is None:
            return set(), {}
        sql = self._call("write", WRITE_TYPES)
        send = session.read if inside else session.write
        text = await send(sql, self._namespace, *changes, rows.is_news, self._news.channel)
        document = json.loads(text)
        due = runs_by_key(document["due"]).values()
        return set(document["stale"]), {run.job: run for run in due}

    async def _decide(
        self,
        session: Session,
        items: Sequence[tuple[int, _Item]],
        judge: Callable[[Rows, _Item], _A],
        rows: Rows | None,
        reread: Callable[[Session, Sequence[_Item], bool], Awaitable[Rows]],
    ) -> Decided[_A]:
        """Judges the items (with their number) on the rows, and writes what was decided.

        Those that were decided on rows that have changed meanwhile are read and judged once more,
        under locks.
        """
        if rows is None:
            rows = await reread(session, [item for _, item in items], False)
        answers = {number: judge(rows, item) for number, item in items}
        stale, due = await self._write(session, rows, inside=False)
        decided = Decided(answers, rows.now, rows.known_fences(), dict(rows.saved), due)
        if stale:
            again = [(number, item) for number, item in items if item.job in stale]
            async with session.transaction():
                rows = await reread(session, [item for _, item in again], True)
                answers |= {number: judge(rows, item) for number, item in again}
                left, due = await self._write(session, rows, inside=True)
            assert not left, "what is locked does not change"
            saved = {key: run for key, run in decided.saved.items() if key[0] not in stale}
            fences = decided.fences | rows.known_fences()
            due = decided.due | due
            decided = Decided(answers, rows.now, fences, saved | dict(rows.saved), due)
        return decided

    def _reply(self, now_us: int, answers: Iterable[_T], fences: dict[str, int]) -> port.Reply[_T]:
        return port.Reply(now_us // 1_000, tuple(answers), fences, self._store_id)

    # --- The port ------------------------------------------------------------------------

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""
        of_job = Counter(claim.job for claim in claims)
        plain = [
            not claim.seen_attempt and claim.may_run and of_job[claim.job] == 1 for claim in claims
        ]
        sql = self._call("claim", CLAIM_TYPES)
        values = [*zip(*map(claim_values, claims), strict=True)] or [()] * 13

        async def work(session: Session) -> port.Reply[port.ClaimAnswer]:
            alone = [claim.overlap is not model.OverlapPolicy.ALLOW for claim in claims]
            text = await session.write(sql, self._namespace, *values, plain, alone)
            document = json.loads(text)
            now_us = document["now_us"]
            answers: dict[int, port.ClaimAnswer] = {}
            fences: dict[str, int] = {claim.job: 0 for claim in claims} | (document["fences"] or {})
            wins = zip(document["wins"] or (), document["won"] or (), strict=True)
            for number, fence in wins:
                answers[number - 1] = answer_to_win(claims[number - 1], fence, moment(now_us))
            rest = [(n, claim) for n, claim in enumerate(claims) if n not in answers]
            if rest:
                decided = await self._decide(
                    session, rest, judge_claim, Rows(document["rest"]), self._reread_claims
                )
                answers |= decided.answers
                now_us = decided.now.at_us
                fences |= decided.fences
            return self._reply(now_us, (answers[n] for n in range(len(claims))), fences)

        return await self._act(work)

    async def _reread_claims(
        self, session: Session, claims: Sequence[port.Claim], lock: bool
    ) -> Rows:
        return await self._read(
            session,
            jobs=(claim.job for claim in claims),
            runs=[(claim.job, claim.slot, "") for claim in claims],
            unfinished=(c.job for c in claims if c.overlap is not model.OverlapPolicy.ALLOW),
            lock=lock,
        )

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""

        async def work(session: Session) -> port.Reply[port.PlanAnswer]:
            numbered = list(enumerate(plans))
            decided = await self._decide(session, numbered, judge_plan, None, self._reread_plans)
            fences = dict.fromkeys((plan.job for plan in plans), 0) | decided.fences
            return self._reply(decided.now.at_us, decided.in_order(), fences)

        return await self._act(work)

    async def _reread_plans(self, session: Session, plans: Sequence[port.Plan], lock: bool) -> Rows:
        """The jobs, and then the slots: whoever gives a slot a row raises its job's version."""
        names = [plan.job for plan in plans]
        rows = await self._read(session, jobs=names, unfinished=names, lock=lock)
        asked = [plan for plan in plans if plan.slots]
        text = await session.read(
            in_schema(TAKEN, self._address.schema),
            self._namespace,
            [plan.job for plan in asked],
            [plan.slots[0].slot for plan in asked],
            [plan.slots[-1].slot for plan in asked],
        )
        rows.add_taken(json.loads(text or "[]"))
        return rows

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels."""

        async def work(session: Session) -> port.Reply[port.ControlAnswer]:
            numbered = list(enumerate(acts))
            decided = await self._decide(
                session, numbered, judge_control, None, self._reread_controlled
            )
            fences = dict.fromkeys((act.job for act in acts), 0) | decided.fences
            return self._reply(decided.now.at_us, decided.in_order(), fences)

        return await self._act(work)

    async def _reread_controlled(
        self, session: Session, acts: Sequence[port.Control], lock: bool
    ) -> Rows:
        """The jobs, and then what is decided by besides: it changes only with a job's version."""
        names = [act.job for act in acts]
        asked = [(act.job, act.slot, "") for act in acts if isinstance(act, port.CancelRun)]
        rows = await self._read(session, jobs=names, runs=asked, unfinished=names, lock=lock)
        values = control_values(acts, rows.now)
        if any(values):
            text = await session.read(self._query(CONTROLLED), self._namespace, *values)
            rows.add_control(json.loads(text))
        return rows

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat."""
        sql = self._call("beat", BEAT_TYPES)
        values = beat_values(beat)

        async def work(session: Session) -> port.Reply[port.BeatAnswer]:
            document = json.loads(await session.write(sql, self._namespace, *values))
            now = moment(document["now_us"])
            changed = runs_by_key(document["renewed"])
            answers: dict[int, port.TokenAnswer] = {}
            for number in document["numbers"] or ():
                each = beat.renewals[number - 1]
                view = machine.view(changed[each.job, each.slot], now)
                answers[number - 1] = port.TokenAnswer(port.TokenOutcome.RENEWED, view)
            rest = [(n, each) for n, each in enumerate(beat.renewals) if n not in answers]
            if rest:
                decided = await self._decide(
                    session, rest, judge_renewal, Rows(document["rest"]), self._reread_tokens
                )
                answers |= decided.answers
                changed |= decided.saved
            renewals = tuple(answers[n] for n in range(len(beat.renewals)))
            answer = answer_to_beat(beat, document, renewals, changed, now)
            return self._reply(now.at_us, [answer], fences_of_beat(beat, document))

        return await self._act(work)

    async def _reread_tokens(
        self,
        session: Session,
        asked: Sequence[port.Renewal | port.Completion | port.Release],
        lock: bool,
    ) -> Rows:
        runs = [(each.job, each.slot, each.token) for each in asked]
        return await self._read(session, runs=runs, jobs=(job for job, _, _ in runs), lock=lock)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        sql = self._call("complete", COMPLETE_TYPES)
        values = complete_values(completions)

        async def work(session: Session) -> port.Reply[port.TokenAnswer]:
            text = await session.write(sql, self._namespace, *values, self._news.channel)
            document = json.loads(text)
            now = moment(document["now_us"])
            done = runs_by_key(document["done"])
            due = {run.job: run for run in runs_by_key(document["due"]).values()}
            answers: dict[int, port.TokenAnswer] = {}
            for number in document["numbers"] or ():
                each = completions[number - 1]
                run = with_outcome(done[each.job, each.slot], each.outcome)
                answer = port.TokenAnswer(port.TokenOutcome.RECORDED, machine.view(run, now))
                answers[number - 1] = with_due(answer, due.get(each.job), now)
            rest = [(n, each) for n, each in enumerate(completions) if n not in answers]
            if rest:
                decided = await self._decide(
                    session, rest, judge_completion, Rows(document["rest"]), self._reread_tokens
                )
                now = decided.now
                for number, (answer, ended) in decided.answers.items():
                    waits = decided.due.get(completions[number].job) if ended else None
                    answers[number] = with_due(answer, waits, now)
            ordered = (answers[n] for n in range(len(completions)))
            fences = {each.job: 0 for each in completions} | (document["fences"] or {})
            return self._reply(now.at_us, ordered, fences)

        return await self._act(work)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""

        async def work(session: Session) -> port.Reply[port.TokenAnswer]:
            numbered = list(enumerate(releases))
            decided = await self._decide(
                session, numbered, judge_release, None, self._reread_tokens
            )
            fences = dict.fromkeys((each.job for each in releases), 0) | decided.fences
            return self._reply(decided.now.at_us, decided.in_order(), fences)

        return await self._act(work)

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now, under locks of their rows."""
        wanted = [machine.hold_of(instance, each) for each in definitions]
        told = dict(zip(wanted, definitions, strict=True))
        names = [hold.job for hold in wanted]
        read = self._call("register_read", "text text text[]")
        write = self._call("register_part", REGISTER_TYPES)

        async def work(session: Session) -> port.Reply[port.Registration]:
            async with session.transaction(self._options.op_timeout_ms):
                text = await session.read(read, self._namespace, instance.incarnation, names)
                document = json.loads(text)
                rows, held = Rows(document["rows"]), holds_by_job(document["held"] or ())
                windows = {hold_of(row): row["window_ms"] for row in document["held"] or ()}
                new = [hold for hold in told if windows.get(hold) != told[hold].window_ms]
                before = {name: rows.job(name) for name in names}
                for hold in wanted:
                    verdict = machine.judge_registration(
                        hold,
                        rows.now,
                        rows.job(hold.job),
                        rows.schedule(hold.job, hold.schedule_id),
                        held.get(hold.job, []),
                    )
                    rows.save_job(verdict.job)
                    if verdict.schedule:
                        rows.save_schedule(hold.job, hold.schedule_id, verdict.schedule)
                await session.read(
                    write,
                    self._namespace,
                    rows.now.at,
                    instance.incarnation,
                    instance.instance_id,
                    instance.lease_ms,
                    instance_text(instance),
                    [*names, *let_go],
                    names,
                    [hold.definition_id for hold in wanted],
                    rows.job_rows(changed_jobs(rows, before, new)),
                    rows.changed_schedules(),
                    json.dumps([definition_row(hold, told[hold]) for hold in new]),
                )
            for job, holds in held.items():
                held[job] = [h for h in holds if h.incarnation != instance.incarnation]
            for hold in wanted:
                held.setdefault(hold.job, []).append(hold)
            answers = [registration_of(rows, hold, held[hold.job]) for hold in wanted]
            return self._reply(rows.now.at_us, answers, rows.fences(names))

        return await self._act(work)

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        of_job = "job = $2" if query.job else "$2 = ''"
        sql = self._query(RUNS, of_job=of_job)
        after_slot, after_job = query.after or (EVER, "")
        until_slot = EVER if query.until_slot is None else query.until_slot - 1
        lowest = [s for s in (query.slot, query.from_slot) if s is not None]
        # `after_slot` too, by which an index finds the place: a late page is as quick as the first.
        highest = [after_slot, until_slot, *([] if query.slot is None else [query.slot])]
        values = (
            self._namespace,
            query.job,
            max(lowest, default=-EVER),
            min(highest),
            after_slot,
            after_job,
            list(query.states),
            query.instance_id,
            query.limit,
        )

        async def work(session: Session) -> port.Reply[model.RunView]:
            document = json.loads(await session.read(sql, *values))
            now = moment(document["now_us"])
            before: dict[tuple[str, int], list[model.Attempt]] = {}
            for row in document["attempts"] or ():
                before.setdefault((row["job"], row["slot"]), []).append(attempt_of(row))
            page: list[model.RunView] = []
            for row in document["runs"] or ():
                run = run_of(row)
                attempts = before.get((run.job, run.slot), [])
                if run.current is not None:
                    attempts.append(run.current)
                shown = machine.view(run, now, attempts)
                page.append(shown if query.traces else machine.without_traces(shown))
            return self._reply(now.at_us, page, document["fences"] or {})

        return await self._act(work)

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""
        sql = self._query(JOBS)
        wanted = list(names)

        async def work(session: Session) -> port.Reply[model.JobView]:
            most = len(wanted) or limit
            text = await session.read(sql, self._namespace, wanted, after, most)
            document = json.loads(text)
            now = moment(document["now"] * 1_000)
            found = {row["job"]: row for row in document["jobs"] or ()}
            page = [found[name] for name in wanted or found if name in found]
            fences = {row["job"]: row["fence"] for row in page}
            return self._reply(now.at_us, (job_view(row, now) for row in page), fences)

        return await self._act(work)

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        sql = in_schema(INSTANCES, self._address.schema)

        async def work(session: Session) -> port.Reply[model.Instance]:
            document = json.loads(await session.read(sql, self._namespace))
            now = moment(document["now"] * 1_000)
            known = [instance_of(text, seen_at) for text, seen_at in document["records"] or ()]
            lately = [
                machine.shown_instance(each, now)
                for each in known
                if not machine.is_forgotten(each, now)
            ]
            lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
            return self._reply(now.at_us, lately, {})

        return await self._act(work)

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended.
        """
        read = self._call("prune_read", "text text int8")
        write = self._call("prune_write", PRUNE_TYPES)

        async def work(session: Session) -> port.Reply[int]:
            text = await session.write(read, self._namespace, self._pruned_to, _PRUNE_JOBS)
            document = json.loads(text)
            rows = Rows(document["rows"])
            names: list[str] = document["names"]
            columns = what_may_go(document, rows, policy)
            values = (*columns, policy.history_max, policy.batch)
            outcome = json.loads(await session.write(write, self._namespace, names, *values))
            seen = outcome["seen"]
            if seen < len(names):
                self._pruned_to = names[seen - 1] if seen else self._pruned_to
            else:
                self._pruned_to = names[-1] if len(names) == _PRUNE_JOBS else ""
            return self._reply(rows.now.at_us, [outcome["deleted"]], {})

        return await self._act(work)

    async def _act(self, work: Callable[[Session], Awaitable[_T]]) -> _T:
        return await self._pool.call(work)

    async def watch(self) -> AsyncIterator[None]:
        """Yields at news (`machine.Saved`), counted from `open`; ends at once behind a pooler."""
        if self._address.pooled:
            return
        ended = object()
        async with aclosing(self._news.watch()) as watch:
            while await answer_of(anext(watch, ended), self._address.location, ()) is not ended:
                yield
