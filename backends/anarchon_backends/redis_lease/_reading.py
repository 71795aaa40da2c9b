"""Reading for people: runs, found through an index and read in a few steps, jobs, instances (S30).

Imports the port, the machine, `control`, the model and the standard library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from anarchon_backends.redis._cluster import Server
from anarchon_backends.redis._connection import Command
from anarchon_backends.redis._sieve import (
    Place,
    Sieve,
    Stretch,
    is_selective,
    parts_of,
    span_of,
)
from anarchon_backends.redis._text import decode, decoded
from anarchon_backends.redis_lease._calls import Calls
from anarchon_backends.redis_lease._rows import (
    all_attempts_of,
    attempts_of,
    holds_of,
    instance_of,
    job_of,
    moment,
    run_of,
    settled_of,
    spec_of,
)
from anarchon_server.core import control, machine, model
from anarchon_server.core import store as port

_JOBS = 500  # jobs whose indexes are read at once

# A run whose lease is over shows as interrupted, as `machine.view` has it.
_SHOWN_AS = {model.RunState.INTERRUPTED: (model.RunState.CLAIMED, model.RunState.RUNNING)}


class Reader:
    """Reads one namespace. `clock` stands in for the server's in tests.

    In a cluster each job's keys are read where they are, every command by itself, and the time is
    that of the node which has the namespace's.
    """

    def __init__(self, server: Server, calls: Calls, clock: port.StoreClock | None) -> None:
        self._server = server
        self._calls = calls
        self._namespace = calls.namespace
        self._key_of = calls.key_of
        self._clock = clock
        self._sieve = Sieve(server, calls.key_of, _SHOWN_AS)

    async def _read(self, *commands: Command) -> tuple[machine.Moment, str, list[Any]]:
        """The store's moment, its identity, and the answers; of one server, as one step."""
        time, store_id, *answers = await self._server.read(
            ["TIME"], ["HGET", self._namespace, "store_id"], *commands
        )
        now_us = int(time[0]) * 1_000_000 + int(time[1])
        now = moment(self._clock.wall_us() if self._clock else now_us)
        return now, self._calls.identity(decode(store_id or b"")), answers

    async def probe(self, key: str) -> int:
        """Tries every command that reading uses, by a key. How often there were news in all."""
        key = f"{key}:probe"
        _, _, (news, *_) = await self._read(
            ["HGET", self._namespace, "news"],
            ["HGETALL", key],
            ["ZCOUNT", key, "-inf", "+inf"],
            ["ZRANGEBYLEX", key, "-", "+", "LIMIT", 0, 1],
            ["ZREVRANGE", key, 0, 0],
            ["ZREVRANGEBYSCORE", key, "+inf", "-inf", "LIMIT", 0, 1],
            ["ZREVRANK", key, "a"],
        )
        return int(news or 0)

    async def news(self) -> int:
        """How often there were news in the namespace."""
        _, _, (news,) = await self._read(["HGET", self._namespace, "news"])
        return int(news or 0)

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        now, store_id, (noted,) = await self._read(["HGETALL", f"{self._namespace}:instances"])
        lately = [
            machine.shown_instance(each, now)
            for each in _instances_of(noted)
            if not machine.is_forgotten(each, now)
        ]
        lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
        return port.Reply(now.at, tuple(lately), {}, store_id)

    async def job_names(self, after: str, limit: int) -> list[str]:
        """A page of the jobs that have a definition, by name."""
        start = f"({after}" if after else "-"
        index = f"{self._namespace}:jobs"
        _, _, (page,) = await self._read(["ZRANGEBYLEX", index, start, "+", "LIMIT", 0, limit])
        return [decode(each) for each in page]

    async def defined(self, names: Sequence[str]) -> list[str]:
        """Those of the jobs that have a definition."""
        _, _, ids = await self._read(*(["HGET", self._key_of(n), "definition_id"] for n in names))
        return [name for name, each in zip(names, ids, strict=True) if each]

    async def jobs(self, names: Sequence[str]) -> port.Reply[model.JobView]:
        """The jobs of these names that there are."""
        keys = [self._key_of(name) for name in names]
        commands: list[Command] = [["ZREVRANGE", f"{key}:runs", 0, 0] for key in keys]
        _, _, newest = await self._read(*commands)
        slots = [decode(each[0]) if each else "0" for each in newest]
        commands = [["HGETALL", f"{self._namespace}:instances"]]
        for key, slot in zip(keys, slots, strict=True):
            commands += [
                ["HGETALL", key],
                ["HGETALL", f"{key}:definitions"],
                ["HGETALL", f"{key}:holds"],
                ["HGETALL", f"{key}:{slot}"],
            ]
        now, store_id, answers = await self._read(*commands)
        live = {
            each.incarnation: each.instance_id
            for each in _instances_of(answers[0])
            if machine.is_live(each, now)
        }
        views: list[model.JobView] = []
        fences: dict[str, int] = {}
        for place, name in enumerate(names):
            record, kept, held, run = map(decoded, answers[1 + 4 * place : 5 + 4 * place])
            if record.get("definition_id", "") not in kept:
                continue  # there is no such job
            fences[name] = job_of(name, record).fence
            fields = run | {"job": name, "slot": slots[place]}
            shown = machine.view(run_of(fields), now) if run else None
            views.append(_job_view(name, record, kept, held, live, shown))
        return port.Reply(now.at, tuple(views), fences, store_id)

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """The runs that are wanted, newest slot first; equal slots by job name, last first."""
        found: list[tuple[model.RunView, int]] = []
        looked_to: Place | None = None
        async for places, end in parts_of(self._stretches(query), query):
            found += await self._runs(places, query)
            is_full = len(found) >= query.limit
            looked_to = None if is_full else end
            if is_full:
                break
        now, store_id, _ = await self._read()
        page = found[: query.limit]
        return port.Reply(
            now.at,
            tuple(seen if query.traces else machine.without_traces(seen) for seen, _ in page),
            {seen.run.job: fence for seen, fence in page},
            store_id,
            looked_to=looked_to,
        )

    def _stretches(self, query: port.RunQuery) -> AsyncIterator[Stretch]:
        if is_selective(query):
            if self._calls.apart and not query.job:
                return self._sifted_of_all(query)
            return self._sieve.of_index(self._namespace, query)
        return self._listed(query)

    async def _sifted_of_all(self, query: port.RunQuery) -> AsyncIterator[Stretch]:
        names = page = await self.job_names("", _JOBS)
        while len(page) == _JOBS:
            page = await self.job_names(page[-1], _JOBS)
            names = names + page
        async for each in self._sieve.of_jobs(names, query):
            yield each

    async def _listed(self, query: port.RunQuery) -> AsyncIterator[Stretch]:
        """The stretches of the index of the job or of all, of which every run is wanted."""
        below, more = query.after, True
        while more:
            if self._calls.apart and not query.job:
                places, more = await self._places_of_all(query, below)
            else:
                places, more = await self._places(query, below)
            below = places[-1] if places else below
            yield Stretch(places, below, len(places), more)

    async def _places(self, query: port.RunQuery, below: Place | None) -> tuple[list[Place], bool]:
        """The next places of the index that the query spans, newest first; whether there may be more."""
        index = f"{self._key_of(query.job)}:runs" if query.job else f"{self._namespace}:runs"
        span = span_of(query, below)
        skip = 0
        if below is not None and str(below[0]) == span.top:
            skip = await self._skipped(index, query, below)
        while True:
            _, _, (members,) = await self._read(
                ["ZREVRANGEBYSCORE", index, span.top, span.bottom, "LIMIT", skip, query.limit]
            )
            places = [_place_of(decode(each), query.job) for each in members]
            places = [each for each in places if below is None or each < below]
            more = len(members) == query.limit
            if places or not more:
                return places, more
            skip += len(
                members
            )  # `below` was pruned meanwhile: nobody tells how many stand before it

    async def _places_of_all(
        self, query: port.RunQuery, below: Place | None
    ) -> tuple[list[Place], bool]:
        """The same over the indexes of all jobs, where the namespace has none of all runs."""
        span, step = span_of(query, below), query.limit
        found, full, after = list[Place](), False, ""
        while True:
            names = await self.job_names(after, _JOBS)
            # One more than wanted, as one of each job may be `below` itself.
            commands: list[Command] = [
                ["ZREVRANGEBYSCORE", f"{key}:runs", span.top, span.bottom, "LIMIT", 0, step + 1]
                for key in map(self._key_of, names)
            ]
            _, _, answers = await self._read(*commands)
            for name, members in zip(names, answers, strict=True):
                places = [_place_of(decode(each), name) for each in members]
                found += [each for each in places if below is None or each < below]
                full = full or len(members) > step
            found.sort(reverse=True)
            full = full or len(found) > step
            del found[step:]
            if len(names) < _JOBS:
                return found, full
            after = names[-1]

    async def _skipped(self, index: str, query: port.RunQuery, below: Place) -> int:
        """How many of the index at the slot of `below` stand at or before it."""
        slot, job = below
        member = str(slot) if query.job else f"{slot} {job}"
        _, _, (rank, newer) = await self._read(
            ["ZREVRANK", index, member], ["ZCOUNT", index, f"({slot}", "+inf"]
        )
        return 0 if rank is None else int(rank) - int(newer) + 1

    async def _runs(
        self, places: Sequence[Place], query: port.RunQuery
    ) -> list[tuple[model.RunView, int]]:
        """The runs at these places that are wanted, each with its job's fence."""
        if not places:
            return []
        now, _, answers = await self._read(
            *(["HGETALL", f"{self._key_of(job)}:{slot}"] for slot, job in places),
            *(["HGET", self._key_of(job), "fence"] for _, job in places),
        )
        rows, fences = answers[: len(places)], answers[len(places) :]
        by_place = dict(zip(places, fences, strict=True))
        return [
            (seen, int(by_place[seen.run.slot, seen.run.job] or 0))
            for seen in _wanted(zip(places, rows, strict=True), query, now)
        ]


def _place_of(member: str, job: str) -> Place:
    slot, _, name = member.partition(" ")
    return int(slot), name or job


def _wanted(
    rows: Iterator[tuple[Place, Sequence[bytes]]], query: port.RunQuery, now: machine.Moment
) -> Iterator[model.RunView]:
    for (slot, job), row in rows:
        if not row:
            continue  # pruned meanwhile
        fields: Mapping[str, str] = decoded(row) | {"job": job, "slot": str(slot)}
        run = run_of(fields)
        seen = machine.view(run, now, attempts_of(run, fields))
        if query.states and seen.run.state not in query.states:
            continue
        if query.instance_id and not _attempted_by(query.instance_id, run, fields):
            continue
        yield seen


def _attempted_by(instance_id: str, run: model.Run, fields: Mapping[str, str]) -> bool:
    """Whether any attempt was that instance's, also one too old to be shown."""
    return any(each.instance_id == instance_id for each in all_attempts_of(run, fields))


def _instances_of(noted: Iterable[bytes]) -> list[model.Instance]:
    return [instance_of(incarnation, record) for incarnation, record in decoded(noted).items()]


def _job_view(
    name: str,
    record: Mapping[str, str],
    kept: Mapping[str, str],
    held: Mapping[str, str],
    live: Mapping[str, str],
    last_run: model.RunView | None,
) -> model.JobView:
    holds = [
        hold
        for incarnation, text in held.items()
        if incarnation in live
        for hold in holds_of(name, incarnation, text)
    ]
    job = job_of(name, record)
    return model.JobView(
        name=name,
        spec=spec_of(name, kept[job.definition_id]),
        definition_at=job.definition_at,
        definitions_differ=machine.definitions_differ(holds),
        instance_ids=tuple(sorted({live[hold.incarnation] for hold in holds})),
        last_run=machine.without_traces(last_run) if last_run else None,
        paused_at=job.paused_at,
        pause_reason=job.pause_reason,
        schedules=_in_use(job, record, kept, holds),
    )


def _in_use(
    job: machine.JobRecord,
    record: Mapping[str, str],
    kept: Mapping[str, str],
    holds: Sequence[machine.HeldDefinition],
) -> tuple[model.ScheduleInUse, ...]:
    """The schedules whose slots are slots of the job, each with a definition that has it."""
    ids = {hold.schedule_id: hold.definition_id for hold in holds}
    ids[job.schedule_id] = job.definition_id
    return tuple(
        model.ScheduleInUse(each, settled, spec_of(job.job, kept.get(ids[each], "")))
        for each in sorted(control.schedules_in_use(job, holds))
        if (settled := settled_of(job.job, record, each)) is not None
    )
