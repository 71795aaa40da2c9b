"""A store in a PostgreSQL database, 12 or newer, also behind a pooler in transaction mode.

Atomic here: each batch is one statement, or two: the plain cases of claims, heartbeats and results
are decided in the database by one function a method, under locks of the jobs' or the runs' rows;
what is not plain it reads, the machine decides it, and a second statement writes it if the rows
still have the versions it was decided on. Where they have not, and where definitions change, the
same is done once more in one transaction under locks. Whose clock decides: the server's
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import asyncpg

from anarchon_backends.postgres._connection import (
    Address,
    Pool,
    Session,
    address_of,
    answer_of,
    end,
)
from anarchon_backends.postgres._rows import (
    EVER,
    Document,
    Rows,
    attempt_of,
    failure_text,
    instance_of,
    instance_text,
    moment,
    result_text,
    run_of,
)
from anarchon_backends.postgres._sql import INSTANCES, JOBS, RUNS, in_schema
from anarchon_backends.postgres._start import NUMBERS, REMEDIES, Start, check_again
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_T = TypeVar("_T")
_A = TypeVar("_A")

_OPEN_S = 10.0  # how long opening may wait for others that make the schema
_SILENCE_S = 30.0  # after which a listener makes sure that its connection still is one
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
        self._capabilities = port.Capabilities(backend="postgres", notifies=not address.pooled)
        self._pool = Pool(address, options.op_timeout_ms, self._check_connection)
        self._store_id = ""
        name = f"{address.schema}\0{options.namespace}".encode()
        self._channel = f"anarchon_{hashlib.sha256(name).hexdigest()[:32]}"
        self._freed = _Counter()
        self._listener: asyncpg.Connection = None
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
        async with asyncio.timeout(max(_OPEN_S, self._options.op_timeout_ms / 1_000)):
            connection = await self._pool.connect()
            try:
                await start.run(connection, self._options.clock)
            finally:
                await end(connection)
            self._store_id = start.store_id
            if not self._address.pooled:
                await self._listen()
            self._pool.start()

    async def _check_connection(self, connection: asyncpg.Connection) -> None:
        schema, location = self._address.schema, self._address.location
        self._store_id = await check_again(connection, schema, location)

    async def close(self) -> None:
        """Lets go of everything, with at most a second for each connection's farewell."""
        await self._pool.close()
        self._freed.close()

    # --- Deciding ------------------------------------------------------------------------

    def _call(self, name: str, types: str) -> str:
        """The SQL that calls a function of the schema, whose parameters have these types."""
        values = ", ".join(f"${n}::{each}" for n, each in enumerate(types.split(), 1))
        return in_schema(f"SELECT anarchon.{name}({values})", self._address.schema)

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

    async def _write(self, session: Session, rows: Rows, *, inside: bool) -> set[str]:
        """Writes what changed; the jobs of which nothing was written, as they had changed."""
        changes = rows.changes()
        if changes is None:
            return set()
        sql = self._call("write", "text json json json json text")
        send = session.read if inside else session.write
        return set(await send(sql, self._namespace, *changes, self._channel))

    async def _decide(
        self,
        session: Session,
        items: Sequence[tuple[int, _T]],
        judge: Callable[[Rows, _T], _A],
        rows: Rows | None,
        reread: Callable[[Session, Sequence[_T], bool], Any],
    ) -> tuple[dict[int, _A], Rows]:
        """Judges the items (with their number) on the rows, and writes what was decided.

        Those that were decided on rows that have changed meanwhile are read and judged once more,
        under locks.
        """
        rows = rows or await reread(session, [item for _, item in items], False)
        assert rows is not None
        answers = {number: judge(rows, item) for number, item in items}
        stale = await self._write(session, rows, inside=False)
        if stale:
            again = [(number, item) for number, item in items if item.job in stale]  # type: ignore[attr-defined]
            async with session.transaction():
                rows = await reread(session, [item for _, item in again], True)
                answers |= {number: judge(rows, item) for number, item in again}
                left = await self._write(session, rows, inside=True)
            assert not left, "what is locked does not change"
        return answers, rows

    def _reply(self, now_us: int, answers: Iterable[_T], fences: dict[str, int]) -> port.Reply[_T]:
        return port.Reply(now_us // 1_000, tuple(answers), fences, self._store_id)

    # --- The port ------------------------------------------------------------------------

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""
        of_job = Counter(claim.job for claim in claims)
        plain = [
            not claim.seen_attempt and claim.may_run and of_job[claim.job] == 1 for claim in claims
        ]
        sql = self._call("claim", _CLAIM_TYPES)
        values = [*zip(*map(_claim_values, claims), strict=True)] or [()] * 12

        async def work(session: Session) -> port.Reply[port.ClaimAnswer]:
            alone = [claim.overlap is not model.OverlapPolicy.ALLOW for claim in claims]
            text = await session.write(sql, self._namespace, *values, plain, alone)
            document = json.loads(text)
            now_us = document["now_us"]
            answers: dict[int, port.ClaimAnswer] = {}
            fences: dict[str, int] = {claim.job: 0 for claim in claims} | (document["fences"] or {})
            won = zip(document["wins"] or (), document["won"] or (), strict=True)
            for number, fence in won:
                answers[number - 1] = _won(claims[number - 1], fence, moment(now_us))
            rest = [(n, claim) for n, claim in enumerate(claims) if n not in answers]
            if rest:
                rows = Rows(document["rest"])
                decided, rows = await self._decide(
                    session, rest, _judge_claim, rows, self._reread_claims
                )
                answers |= decided
                now_us = rows.now.at_us
                fences |= rows.fences(claim.job for _, claim in rest if rows.knows(claim.job))
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

        async def reread(session: Session, asked: Sequence[port.Plan], lock: bool) -> Rows:
            return await self._read(
                session,
                jobs=(plan.job for plan in asked),
                runs=[(plan.job, missed.slot, "") for plan in asked for missed in plan.slots],
                lock=lock,
            )

        async def work(session: Session) -> port.Reply[port.PlanAnswer]:
            numbered = list(enumerate(plans))
            answers, rows = await self._decide(session, numbered, _judge_plan, None, reread)
            fences = rows.fences(plan.job for plan in plans)
            return self._reply(rows.now.at_us, (answers[n] for n, _ in numbered), fences)

        return await self._act(work)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat."""
        sql = self._call("beat", _BEAT_TYPES)
        instance, renewals = beat.instance, beat.renewals
        touched = [each.job for each in renewals] + [job for job, _ in beat.looks]
        seen: set[tuple[str, int]] = set()
        values = (
            self._namespace,
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
            [
                _first((each.job, each.slot), seen) and not each.adopt and each.cancel is None
                for each in renewals
            ],
            [job for job, _ in beat.looks],
            [slot for _, slot in beat.looks],
            [job for job, _ in beat.sweep],
            [schedule_id for _, schedule_id in beat.sweep],
            beat.sweep_limit,
        )

        async def work(session: Session) -> port.Reply[port.BeatAnswer]:
            document = json.loads(await session.write(sql, *values))
            now = moment(document["now_us"])
            changed = {(r["job"], r["slot"]): run_of(r) for r in document["renewed"] or ()}
            answers = {
                n - 1: port.TokenAnswer(
                    port.TokenOutcome.RENEWED,
                    machine.view(changed[renewals[n - 1].job, renewals[n - 1].slot], now),
                )
                for n in document["numbers"] or ()
            }
            rest = [(n, each) for n, each in enumerate(renewals) if n not in answers]
            if rest:
                rows = Rows(document["rest"])
                decided, rows = await self._decide(
                    session, rest, _judge_renewal, rows, self._reread_tokens
                )
                answers |= decided
                changed |= rows.saved
            fences = dict.fromkeys(touched, 0) | (document["fences"] or {})
            swept = zip(beat.sweep, document["swept"] or (), strict=True)
            fences |= {job: fence or 0 for (job, _), fence in swept}
            looks = {(r["job"], r["slot"]): run_of(r) for r in document["looks"] or ()}
            looks |= {key: run for key, run in changed.items() if key in looks}
            unfinished = {(r["job"], r["slot"]): run_of(r) for r in document["unfinished"] or ()}
            unfinished |= {key: run for key, run in changed.items() if key in unfinished}
            answer = port.BeatAnswer(
                renewals=tuple(answers[n] for n in range(len(renewals))),
                looks=tuple(
                    machine.view(looks[key], now) if key in looks else None for key in beat.looks
                ),
                unfinished=_in_order(unfinished.values(), now),
                settled=tuple(document["settled"] or ()),
                known=document["known"],
                twins=tuple(document["twins"] or ()),
            )
            return self._reply(now.at_us, [answer], fences)

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
        sql = self._call("complete", _COMPLETE_TYPES)
        seen: set[tuple[str, int]] = set()
        values = (
            self._namespace,
            [each.job for each in completions],
            [each.slot for each in completions],
            [each.token for each in completions],
            [_plain_state(each, seen) for each in completions],
            [failure_text(each.outcome.failure) for each in completions],
            [_kept_result(each.outcome) for each in completions],
            [each.outcome.elapsed_ms for each in completions],
        )

        async def work(session: Session) -> port.Reply[port.TokenAnswer]:
            document = json.loads(await session.write(sql, *values))
            now = moment(document["now_us"])
            done = {(r["job"], r["slot"]): r for r in document["done"] or ()}
            answers: dict[int, port.TokenAnswer] = {}
            for number in document["numbers"] or ():
                each = completions[number - 1]
                said = {
                    "failure": failure_text(each.outcome.failure),
                    "result": _kept_result(each.outcome),
                }
                run = run_of(done[each.job, each.slot] | said)
                view = machine.view(run, now)
                answers[number - 1] = port.TokenAnswer(port.TokenOutcome.RECORDED, view)
            rest = [(n, each) for n, each in enumerate(completions) if n not in answers]
            if rest:
                decided, rows = await self._decide(
                    session,
                    rest,
                    _judge_completion,
                    Rows(document["rest"]),
                    self._reread_tokens,
                )
                answers |= decided
                now = rows.now
            ordered = (answers[n] for n in range(len(completions)))
            fences = {each.job: 0 for each in completions} | (document["fences"] or {})
            return self._reply(now.at_us, ordered, fences)

        return await self._act(work)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""

        async def work(session: Session) -> port.Reply[port.TokenAnswer]:
            numbered = list(enumerate(releases))
            answers, rows = await self._decide(
                session, numbered, _judge_release, None, self._reread_tokens
            )
            fences = rows.fences(each.job for each in releases)
            return self._reply(rows.now.at_us, (answers[n] for n, _ in numbered), fences)

        return await self._act(work)

    async def register(
        self, instance: model.Instance, definitions: Sequence[model.Definition]
    ) -> port.Reply[port.Registration]:
        """Records all that the instance holds now, under locks of its jobs' rows."""
        wanted = [machine.hold_of(instance, each) for each in definitions]
        told = dict(zip(wanted, definitions, strict=True))
        names = [hold.job for hold in wanted]
        read = self._call("register_read", "text text text[]")
        write = self._call("register_write", _REGISTER_TYPES)

        async def work(session: Session) -> port.Reply[port.Registration]:
            async with session.transaction():
                text = await session.read(read, self._namespace, instance.incarnation, names)
                document = json.loads(text)
                rows, held = Rows(document["rows"]), _by_job(document["held"] or ())
                windows = {_hold_of(row): row["window_ms"] for row in document["held"] or ()}
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
                    names,
                    [hold.definition_id for hold in wanted],
                    rows.job_rows(_changed_jobs(rows, before, new)),
                    rows.changed_schedules(),
                    json.dumps([_definition_row(hold, told[hold]) for hold in new]),
                )
            for job, holds in held.items():
                held[job] = [h for h in holds if h.incarnation != instance.incarnation]
            for hold in wanted:
                held.setdefault(hold.job, []).append(hold)
            answers = [_registration(rows, hold, held[hold.job]) for hold in wanted]
            return self._reply(rows.now.at_us, answers, rows.fences(names))

        return await self._act(work)

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        of_job = "job = $2" if query.job else "$2 = ''"
        sql = in_schema(RUNS.format(of_job=of_job, **NUMBERS), self._address.schema)
        lowest = [s for s in (query.slot, query.from_slot) if s is not None]
        highest = [
            s for s in (query.slot, query.until_slot and query.until_slot - 1) if s is not None
        ]
        after_slot, after_job = query.after or (EVER, "")
        values = (
            self._namespace,
            query.job,
            max(lowest, default=-EVER),
            min(highest, default=EVER),
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
        sql = in_schema(JOBS, self._address.schema)
        wanted = list(names)

        async def work(session: Session) -> port.Reply[model.JobView]:
            most = len(wanted) or limit
            text = await session.read(sql, self._namespace, wanted, after, most)
            document = json.loads(text)
            now = moment(document["now"] * 1_000)
            found = {row["job"]: row for row in document["jobs"] or ()}
            page = [found[name] for name in wanted or found if name in found]
            fences = {row["job"]: row["fence"] for row in page}
            return self._reply(now.at_us, (_job_view(row, now) for row in page), fences)

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
        write = self._call("prune_write", _PRUNE_TYPES)

        async def work(session: Session) -> port.Reply[int]:
            text = await session.write(read, self._namespace, self._pruned_to, _PRUNE_JOBS)
            document = json.loads(text)
            rows = Rows(document["rows"])
            names: list[str] = document["names"]
            columns = _what_may_go(document, rows, policy)
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

    # --- News ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Counts news from now on; the connection's end is news too, as some may be missed."""
        connection = await self._pool.connect()
        try:
            await connection.add_listener(self._channel, lambda *_: self._freed.add())
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: self._freed.add())
        self._listener = connection

    async def watch(self) -> AsyncIterator[None]:
        """Yields when a run was freed, counted from `open`; ends at once behind a pooler."""
        while not self._address.pooled and not self._freed.is_closed():
            if self._listener is None or self._listener.is_closed():
                await answer_of(self._listen(), self._address.location, ())
                yield  # what was freed meanwhile was not heard of
                continue
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._freed.wait()
            except TimeoutError:
                await self._ask_listener()
                continue
            if not self._freed.is_closed() and not self._listener.is_closed():
                yield

    async def _ask_listener(self) -> None:
        """Cuts a connection that only looks as if it were there: a listener hears nothing of it."""
        try:
            await self._listener.fetchval("SELECT 1", timeout=self._options.op_timeout_ms / 1_000)
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._listener.terminate()


class _Counter:
    """Whether there was news since it was last waited for."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._closed = False

    def add(self) -> None:
        self._news.set()

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()
        if not self._closed:
            self._news.clear()


# --- What the machine decides ------------------------------------------------------------


def _judge_claim(rows: Rows, claim: port.Claim) -> port.ClaimAnswer:
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


def _judge_plan(rows: Rows, plan: port.Plan) -> port.PlanAnswer:
    schedule = rows.schedule(plan.job, plan.schedule_id)
    taken = frozenset(m.slot for m in plan.slots if rows.run(plan.job, m.slot) is not None)
    settled = schedule.settled if schedule else None
    job = rows.job(plan.job)
    verdict = machine.judge_plan(plan, rows.now, job, settled, taken)
    rows.save(verdict.saved)
    rows.save_job(job)
    rows.settle(plan.job, plan.schedule_id, verdict.answer.settled)
    return verdict.answer


def _judge_renewal(rows: Rows, renewal: port.Renewal) -> port.TokenAnswer:
    verdict = machine.judge_renewal(renewal, rows.now, rows.run(renewal.job, renewal.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def _judge_completion(rows: Rows, completion: port.Completion) -> port.TokenAnswer:
    job, slot = completion.job, completion.slot
    past = rows.attempt_of(job, slot, completion.token)
    verdict = machine.judge_completion(completion, rows.now, rows.run(job, slot), past)
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def _judge_release(rows: Rows, release: port.Release) -> port.TokenAnswer:
    verdict = machine.judge_release(release, rows.now, rows.run(release.job, release.slot))
    rows.save([verdict.saved] if verdict.saved else [])
    return verdict.answer


def _what_may_go(
    document: Document, rows: Rows, policy: port.PrunePolicy
) -> tuple[list[int], list[int], list[int], list[bool], str, str]:
    """What pruning may do to each job: its version, bound, oldest, whether it is unused.

    Then, as JSON by job: its current definition and schedule, and the definitions that go.
    """
    definitions = _grouped(document["definitions"] or ())
    held = _grouped(document["held"] or ())
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


# --- Values ------------------------------------------------------------------------------

_CLAIM_TYPES = (
    "text text[] int8[] text[] text[] text[] text[] int8[] int8[] int8[] int8[] int8[] int8[]"
    " bool[] bool[]"
)
_BEAT_TYPES = (
    "text text text int8 text bool text[] int8[] text[] text[] int8[] int8[] bool[]"
    " text[] int8[] text[] text[] int8"
)
_COMPLETE_TYPES = "text text[] int8[] text[] text[] text[] text[] int8[]"
_REGISTER_TYPES = "text int8 text text int8 text text[] text[] json json json"
_PRUNE_TYPES = "text text[] int8[] int8[] int8[] bool[] json json int8 int8"


def _claim_values(claim: port.Claim) -> tuple[object, ...]:
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
    )


def _won(claim: port.Claim, fence: int, now: machine.Moment) -> port.ClaimAnswer:
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
    )
    return port.ClaimAnswer(port.ClaimOutcome.WON, machine.view(run, now))


def _first(key: tuple[str, int], seen: set[tuple[str, int]]) -> bool:
    """Whether the batch has said nothing of this run before."""
    before = len(seen)
    seen.add(key)
    return len(seen) > before


def _plain_state(completion: port.Completion, seen: set[tuple[str, int]]) -> str:
    """What the database may make of the run; empty where the machine must decide."""
    first = _first((completion.job, completion.slot), seen)
    if not first or completion.outcome.stopped is not None:
        return ""
    failed = completion.outcome.failure is not None
    return model.RunState.FAILED if failed else model.RunState.SUCCESS


def _kept_result(outcome: model.Outcome) -> str:
    """What is kept of a result: nothing of an attempt that failed."""
    return "" if outcome.failure is not None else result_text(outcome.result)


def _in_order(runs: Iterable[model.Run], now: machine.Moment) -> tuple[model.RunView, ...]:
    """The unfinished runs as they show, those to be taken over first."""
    views = [machine.view(run, now) for run in runs if not run.state.final]
    views.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
    return tuple(views)


def _grouped(rows: Iterable[Document]) -> dict[str, list[Document]]:
    groups: dict[str, list[Document]] = {}
    for row in rows:
        groups.setdefault(row["job"], []).append(row)
    return groups


def _by_job(rows: Iterable[Document]) -> dict[str, list[machine.Hold]]:
    return {job: [_hold_of(row) for row in group] for job, group in _grouped(rows).items()}


def _hold_of(row: Document) -> machine.Hold:
    return machine.Hold(row["incarnation"], row["job"], row["definition_id"], row["schedule_id"])


def _changed_jobs(
    rows: Rows, before: Mapping[str, machine.JobRecord], new: Iterable[machine.Hold]
) -> set[str]:
    """The jobs whose rows a registration writes: what they are or what is in use has changed."""
    changed = {name for name, job in before.items() if rows.job(name) != job}
    return changed | {hold.job for hold in new} | {job for job, _ in rows.moved}


def _definition_row(hold: machine.Hold, definition: model.Definition) -> dict[str, object]:
    return {
        "job": hold.job,
        "definition_id": hold.definition_id,
        "schedule_id": hold.schedule_id,
        "window_ms": definition.window_ms,
        "spec": definition.spec.to_json(),
    }


def _registration(
    rows: Rows, hold: machine.Hold, held: Iterable[machine.Hold]
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


def _job_view(row: Document, now: machine.Moment) -> model.JobView:
    held = row["held"] or ()
    last = run_of(row["last"]) if row["last"] else None
    return model.JobView(
        name=row["job"],
        spec=model.JobSpec.from_json(row["spec"]),
        definition_at=row["definition_at"],
        definitions_differ=len({definition_id for definition_id, _ in held}) > 1,
        instance_ids=tuple(sorted({label for _, label in held})),
        last_run=machine.without_traces(machine.view(last, now)) if last else None,
    )
