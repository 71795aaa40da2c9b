"""NATS JetStream as a claim-only store: a slot is a subject, and its first message the claim.

Atomic here: one publish, which a stream's leader accepts only where the subject has no message yet
(expected revision 0); the stream itself refuses a second one, and lets nobody remove the first
before its time. Whose clock decides: that of the leader of the claims' stream, read from it at least
every 5 s and whenever the connection is a new one; no step of NATS looks at it, so a claim that
lingers on its way may be made after its deadline. Runs, definitions and instances are kept in a
second stream and written after the claim. What it cannot do: leases, so that a run ends with its
runner; overlap other than allow; catch-up. What it can lose: with `sync_interval` at its default,
claims of the last 2 minutes when a majority of the servers lose power (docs/stores/nats.md).
Imports the port, the rules, the modules shared by the NATS backends and the standard library.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from anarchon_backends.nats.address import Address, address_of
from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.streams import prepare
from anarchon_backends.nats.time import StoreTime
from anarchon_backends.nats_claim._batch import of_the_whole, over, settled, together
from anarchon_backends.nats_claim._history import History, chunks, tries
from anarchon_backends.nats_claim._registry import Registry
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.core import claim_only, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreError, StoreRefused, UnsupportedError

_T = TypeVar("_T")

BACKEND = "nats:claim"
RETENTION_MS = 3_600_000
_RETENTION = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RETENTION_LEAST_MS = 15 * 60_000
_RETENTION_MOST_MS = 366 * 86_400_000
LOOKED_MAX = 500  # runs read for one page, where few of them are wanted ...
_CHUNK = 64  # ... and at once
_PER_CALL = 1_000  # items for which a call has its usual time; more have more


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store that the URL names. Its option `retention` is how long a claim is kept."""
    return NatsClaimStore(address_of(url, ("retention",)), options)


class NatsClaimStore:
    """One namespace. With `clock` the store's time is that clock's: for tests."""

    def __init__(
        self,
        address: Address,
        options: port.OpenOptions,
        *,
        clock: port.StoreClock | None = None,
    ) -> None:
        self._address = address
        self._kept_ms = _retention_of(address)
        subjects = Subjects(address.prefix, options.namespace)
        self._subjects = subjects
        self._connection = Connection(address, options.op_timeout_ms)
        time = StoreTime(clock or options.clock, virtual=clock is not None)
        self._jetstream = JetStream(self._connection, time, address.domain, time_of=subjects.claims)
        self._history = History(self._jetstream, subjects)
        self._registry = Registry(self._jetstream, subjects)
        self._closed = asyncio.Event()
        self._store_id = ""

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return port.Capabilities(
            backend=BACKEND,
            leases=False,
            retries=True,
            overlap=port.CLAIM_ONLY_OVERLAP,
            kept_ms=self._kept_ms,
        )

    async def open(self) -> port.StoreReport:
        """Connects, makes both streams where they are missing, and checks them and the server."""
        plans = self._subjects.plans(self._kept_ms)
        found = await prepare(self._connection, self._jetstream, self._address, plans)
        claims = await self._jetstream.info(self._subjects.claims, self._connection.until())
        self._store_id = str(claims.get("created", ""))
        return port.StoreReport(self._address.location, tuple(found.verified), tuple(found.doubts))

    async def close(self) -> None:
        """Lets go of the connection."""
        self._closed.set()
        await self._connection.close()

    # --- Claims and tokens ---------------------------------------------------------------

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts, all at once. Where some have no answer theirs is UNKNOWN."""
        until = self._until(len(claims))
        now = await self._now(until)
        found = await settled(self._claim(claim, until) for claim in claims)
        errors = [each for each in found if isinstance(each, StoreError)]
        if errors and len(errors) == len(found):
            raise of_the_whole(errors, partly=False)
        unknown = port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)
        return self._reply(now, [unknown if isinstance(e, StoreError) else e for e in found])

    async def _claim(self, claim: port.Claim, until: float) -> port.ClaimAnswer:
        """One claim: sent if it is in time, and otherwise, or if the slot is taken, looked up."""
        job = machine.JobRecord(claim.job)
        if claim.seen_attempt:
            return await self._retry(claim, job, until)
        run: model.Run | None = None
        async for number in tries():
            now = await self._now(until)
            in_time = claim_only.untimely(claim, now.at) is None and claim.may_run
            if number > 1 or not in_time:
                run = await self._claimed(claim, until)
            verdict = claim_only.judge_claim(claim, now, job, None, run)
            if not verdict.saved:
                return verdict.answer
            (saved,) = verdict.saved
            if await self._history.make_claim(saved.run, until):
                await self._begun(saved.run, until)
                return verdict.answer
        raise AssertionError("tries never end")

    async def _retry(
        self, claim: port.Claim, job: machine.JobRecord, until: float
    ) -> port.ClaimAnswer:
        """Another attempt of a run whose last one failed here: its row is all that changes (S22)."""
        now = await self._now(until)

        def judge(run: model.Run | None) -> tuple[port.ClaimAnswer, machine.Saved | None]:
            verdict = claim_only.judge_claim(claim, now, job, None, run)
            return verdict.answer, verdict.saved[0] if verdict.saved else None

        return await self._history.decided(claim.job, claim.slot, judge, until)

    async def _claimed(self, claim: port.Claim, until: float) -> model.Run | None:
        """The slot's run: as it was claimed, or as it is now where the token is this claim's."""
        run = await self._history.claimed(claim.job, claim.slot, until)
        if run is None or run.token != claim.token:
            return run
        return await self._history.present(run, until)

    async def _begun(self, run: model.Run, until: float) -> None:
        """Writes the row of a run that was won.

        The run is won without it: where the history does not answer, the row is made by whatever is
        next to be written about the run.
        """
        (_,) = await settled([self._history.begin(run, until)])

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Refused: a slot that nobody claimed in time is gone."""
        del plans
        raise UnsupportedError("catch_up", BACKEND, port.LEASE_BACKENDS)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Nothing is paused or triggered here. Raises `UnsupportedError`."""
        del acts
        raise UnsupportedError("control", BACKEND, port.CONTROL_BACKENDS)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        until = self._until(len(completions))
        now = await self._now(until)
        answers = await together(
            (
                self._history.decide(
                    each.job, each.slot, partial(claim_only.judge_completion, each, now), until
                )
                for each in completions
            ),
            writes=True,
        )
        return self._reply(now, answers)

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends runs whose runners are gone."""
        until = self._until(len(releases))
        now = await self._now(until)
        answers = await together(
            (
                self._history.decide(
                    each.job, each.slot, partial(claim_only.judge_release, each, now), until
                )
                for each in releases
            ),
            writes=True,
        )
        return self._reply(now, answers)

    # --- Instances and definitions -------------------------------------------------------

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat in two round trips: who it is and the time, then all else."""
        until = self._until(len(beat.renewals) + len(beat.looks))
        time = asyncio.ensure_future(self._now(until))
        alike = asyncio.ensure_future(self._registry.alike(beat.instance, until))
        since = asyncio.ensure_future(self._since(beat.sweep, until))
        await over(time, alike, since, writes=False)
        now, (known, others) = time.result(), alike.result()
        seen = replace(beat.instance, seen_at=now.at)
        lives = asyncio.ensure_future(self._registry.seen(seen, until, left=beat.leaving))
        renewed = asyncio.ensure_future(self._renewed(beat.renewals, now, until))
        places = [(slot, job) for job, slot in beat.looks]
        looked = asyncio.ensure_future(self._history.runs(places, until))
        await over(lives, renewed, looked)
        answer = port.BeatAnswer(
            renewals=tuple(renewed.result()),
            looks=tuple(machine.view(run, now) if run else None for run in looked.result()),
            unfinished=(),
            settled=since.result(),
            known=known,
            twins=tuple(each.instance.incarnation for each in others if each.is_live(now)),
        )
        return self._reply(now, [answer])

    async def _renewed(
        self, renewals: Sequence[port.Renewal], now: machine.Moment, until: float
    ) -> list[port.TokenAnswer]:
        return await together(
            (
                self._history.decide(
                    each.job, each.slot, partial(claim_only.judge_renewal, each, now), until
                )
                for each in renewals
            ),
            writes=True,
        )

    async def _since(
        self, sweep: Sequence[tuple[str, str]], until: float
    ) -> tuple[int | None, ...]:
        """When each schedule began (None: the store does not know it)."""
        if not sweep:
            return ()
        jobs = await self._registry.jobs(until)
        return tuple(
            jobs[job].since.get(schedule) if job in jobs else None for job, schedule in sweep
        )

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now."""
        until = self._until(len(definitions))
        now = await self._now(until)
        seen = replace(instance, seen_at=now.at)
        answers = await self._registry.register(seen, definitions, let_go, now, until)
        return self._reply(now, answers)

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        until = self._connection.until()
        now = await self._now(until)
        lately = [
            machine.shown_instance(member.instance, now)
            for member in await self._registry.members(until)
            if member.is_known(now)
        ]
        lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
        return self._reply(now, lately)

    # --- History -------------------------------------------------------------------------

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first."""
        until = self._connection.until()
        now = await self._now(until)
        if query.job and query.slot is not None:
            places = [(query.slot, query.job)]
        else:
            places = await self._history.places(until, query.job or "*")
        wanted = [place for place in reversed(places) if _in_range(place, query)]
        page: list[model.RunView] = []
        looked_to: tuple[int, str] | None = None
        for some in chunks(wanted[: max(LOOKED_MAX, query.limit)], max(query.limit, _CHUNK)):
            found = [run for run in await self._history.runs(some, until) if run is not None]
            page += [seen for seen in await self._shown(found, now, until) if _matches(seen, query)]
            looked_to = some[-1] if some[-1] != wanted[-1] else None
            if len(page) >= query.limit:
                looked_to = None
                break
        shown = page[: query.limit]
        reply = self._reply(
            now, shown if query.traces else [machine.without_traces(seen) for seen in shown]
        )
        return replace(reply, looked_to=looked_to)

    async def _shown(
        self, runs: Sequence[model.Run], now: machine.Moment, until: float
    ) -> list[model.RunView]:
        """The runs for people: those whose instances are gone as interrupted."""
        holders = {
            (run.current.instance_id, run.current.incarnation)
            for run in runs
            if run.current is not None and not run.state.final
        }
        members = await together(self._registry.member(*holder, until) for holder in holders)
        live = {m.instance.incarnation for m in members if m is not None and m.is_live(now)}
        return [
            claim_only.shown(
                run,
                now,
                claim_only.attempts_of(run),
                live=run.current is not None and run.current.incarnation in live,
            )
            for run in runs
        ]

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""
        until = self._connection.until()
        now = await self._now(until)
        entries = await self._registry.jobs(until)
        if not names:
            names = [name for name in sorted(entries) if name > after][:limit]
        names = [name for name in names if name in entries]
        live = [m for m in await self._registry.members(until, holds=True) if m.is_live(now)]
        last_runs = await together(self._last_run(name, now, until) for name in names)
        views: list[model.JobView] = []
        for name, last_run in zip(names, last_runs, strict=True):
            entry = entries[name]
            held = [
                (member.instance.instance_id, hold)
                for member in live
                for hold in member.holds or ()
                if hold.job == name
            ]
            views.append(
                model.JobView(
                    name=name,
                    spec=entry.specs[entry.record.definition_id],
                    definition_at=entry.record.definition_at,
                    definitions_differ=machine.definitions_differ(hold for _, hold in held),
                    instance_ids=tuple(sorted({label for label, _ in held})),
                    last_run=last_run,
                )
            )
        return self._reply(now, views)

    async def _last_run(self, job: str, now: machine.Moment, until: float) -> model.RunView | None:
        places = await self._history.places(until, job)
        run = await self._history.run(job, places[-1][0], until) if places else None
        if run is None:
            return None
        (seen,) = await self._shown([run], now, until)
        return machine.without_traces(seen)

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old runs, and definitions and instances long gone. No claims."""
        until = self._connection.until()
        now = await self._now(until)
        known = {
            member.instance.incarnation
            for member in await self._registry.members(until)
            if member.is_known(now)
        }
        gone, jobs = await self._history.prune(policy, now, known, until)
        await self._registry.prune(now, policy.history_ms, jobs, until)
        return self._reply(now, [gone])

    def watch(self) -> AsyncIterator[None]:
        """Never yields, as nothing is ever freed; ends when the store is closed."""
        return _until_closed(self._closed)

    # --- Time ----------------------------------------------------------------------------

    def _until(self, items: int) -> float:
        """When a call of so many items gives up: large batches have more time."""
        return self._connection.until(1 + items / _PER_CALL)

    async def _now(self, until: float) -> machine.Moment:
        at_us = await self._jetstream.now_us(self._subjects.claims, until)
        return machine.Moment(at_us, at_us // 1_000, "", steady=False)

    def _reply(self, now: machine.Moment, answers: Iterable[_T]) -> port.Reply[_T]:
        return port.Reply(now.at, tuple(answers), store_id=self._store_id)


async def _until_closed(closed: asyncio.Event) -> AsyncIterator[None]:
    await closed.wait()
    for _ in ():
        yield


def _in_range(place: tuple[int, str], query: port.RunQuery) -> bool:
    slot = place[0]
    return (
        (query.slot is None or slot == query.slot)
        and (query.from_slot is None or slot >= query.from_slot)
        and (query.until_slot is None or slot < query.until_slot)
        and (query.after is None or place < query.after)
    )


def _matches(seen: model.RunView, query: port.RunQuery) -> bool:
    by = [attempt.instance_id for attempt in seen.attempts]
    return (not query.states or seen.run.state in query.states) and (
        not query.instance_id or query.instance_id in by
    )


def _retention_of(address: Address) -> int:
    """How long claims are kept (ms), by the URL."""
    text = address.own.get("retention")
    if text is None:
        return RETENTION_MS
    found = _RETENTION.fullmatch(text)
    kept_ms = int(found[1]) * _UNITS_MS[found[2]] if found else 0
    if not _RETENTION_LEAST_MS <= kept_ms <= _RETENTION_MOST_MS:
        raise StoreRefused(
            f"the NATS URL's option retention is {text[:40]!r}: it is a whole number of s, m, h or "
            "d, from 15m to 366d, as in 1h"
        )
    return kept_ms
