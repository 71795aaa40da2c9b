"""Reading for people: runs, merged from the indexes of their jobs, jobs, instances (S30).

Imports the port, the rules, the model, what the backends of Redis share and the standard library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    top_of,
)
from anarchon_backends.redis._text import decode, decoded
from anarchon_backends.redis_claim._rows import holds_of, instance_of, moment, run_of, spec_of
from anarchon_server.core import claim_only, control, machine, model
from anarchon_server.core import store as port

_STEP = 500  # places read at once, of all jobs together ...
_STEP_LEAST = 8  # ... and of each
_NAMES = 1_000  # names of jobs read at once

# The run of an instance that is gone shows as interrupted, as `claim_only.shown` has it.
_SHOWN_AS = {
    model.RunState.INTERRUPTED: (
        model.RunState.CLAIMED,
        model.RunState.RUNNING,
        model.RunState.RETRYING,
    )
}


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a namespace."""

    namespace: str

    @property
    def instances(self) -> str:
        """Where the instances are noted."""
        return f"{self.namespace}:instances"

    @property
    def jobs(self) -> str:
        """The index of the jobs, by name."""
        return f"{self.namespace}:jobs"

    def job(self, name: str) -> str:
        """The job's key, whose hash tag tells all keys of the job from those of all others."""
        return f"{self.namespace[:-1]}:{name}}}"


class Reader:
    """Reads one namespace. `clock` stands in for the server's in tests."""

    def __init__(self, server: Server, keys: Keys, clock: port.StoreClock | None) -> None:
        self._server = server
        self._keys = keys
        self._clock = clock
        self._sieve = Sieve(server, keys.job, _SHOWN_AS)

    async def _read(self, *commands: Command) -> tuple[machine.Moment, list[Any]]:
        """The store's moment, and what the commands answer."""
        time, _, *answers = await self._server.read(
            ["TIME"], ["EXISTS", self._keys.namespace], *commands
        )
        now_us = int(time[0]) * 1_000_000 + int(time[1])
        return moment(self._clock.wall_us() if self._clock else now_us), answers

    async def now(self) -> machine.Moment:
        """The store's moment."""
        return (await self._read())[0]

    async def probe(self) -> None:
        """Tries every command that reading uses."""
        key = f"{self._keys.namespace}:probe"
        await self._read(
            ["HGET", key, "a"],
            ["HMGET", key, "a"],
            ["HGETALL", key],
            ["ZRANGEBYLEX", key, "-", "+", "LIMIT", 0, 1],
            ["ZREVRANGE", key, 0, 0],
            ["ZREVRANGEBYSCORE", key, "+inf", "-inf", "LIMIT", 0, 1],
        )

    # Instances and jobs

    async def instances(self) -> tuple[machine.Moment, list[model.Instance]]:
        """The instances seen lately, by label."""
        now, (noted,) = await self._read(["HGETALL", self._keys.instances])
        lately = [
            machine.shown_instance(each, now)
            for each in _instances_of(noted)
            if not machine.is_forgotten(each, now)
        ]
        lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
        return now, lately

    async def live(self) -> dict[str, bool]:
        """The instances that live, by incarnation."""
        now, (noted,) = await self._read(["HGETALL", self._keys.instances])
        return dict.fromkeys(_live_of(noted, now), True)

    async def have_definitions(self, names: Sequence[str]) -> list[bool]:
        """Whether each of the jobs has a definition."""
        _, found = await self._read(
            *(["HGET", self._keys.job(name), "definition_id"] for name in names)
        )
        return [bool(each) for each in found]

    async def job_names(self, after: str, limit: int) -> list[str]:
        """A page of the jobs, by name."""
        start = f"({after}" if after else "-"
        _, (page,) = await self._read(
            ["ZRANGEBYLEX", self._keys.jobs, start, "+", "LIMIT", 0, limit]
        )
        return [decode(each) for each in page]

    async def _all_names(self) -> list[str]:
        names = page = await self.job_names("", _NAMES)
        while len(page) == _NAMES:
            page = await self.job_names(page[-1], _NAMES)
            names = names + page
        return names

    async def jobs(self, names: Sequence[str]) -> tuple[machine.Moment, list[model.JobView]]:
        """The jobs of these names that there are."""
        keys = [self._keys.job(name) for name in names]
        commands: list[Command] = [["ZREVRANGE", f"{key}:runs", 0, 0] for key in keys]
        _, found = await self._read(*commands)
        slots = [decode(each[0]) if each else "0" for each in found]
        commands = [["HGETALL", self._keys.instances]]
        for key, slot in zip(keys, slots, strict=True):
            commands += [
                ["HGETALL", key],
                ["HGETALL", f"{key}:definitions"],
                ["HGETALL", f"{key}:holds"],
                ["HGETALL", f"{key}:{slot}"],
            ]
        now, (noted, *answers) = await self._read(*commands)
        live = _live_of(noted, now)
        views: list[model.JobView] = []
        for place, name in enumerate(names):
            record, kept, held, row = answers[4 * place : 4 * place + 4]
            job = _Job(name, decoded(record), decoded(kept), decoded(held))
            if not job.is_there:
                continue
            last_run = _shown(row, (int(slots[place]), name), live, now) if row else None
            views.append(_job_view(job, live, last_run))
        return now, views

    # Runs

    async def runs(
        self, query: port.RunQuery
    ) -> tuple[machine.Moment, list[model.RunView], Place | None]:
        """The runs that are wanted, newest slot first; equal slots by job name, last first. And down to
        where was looked, where the page is not full and that was not to the end.
        """
        names = [query.job] if query.job else await self._all_names()
        found: list[model.RunView] = []
        looked_to: Place | None = None
        stretches = self._sieve.of_jobs if is_selective(query) else self._listed
        async for places, end in parts_of(stretches(names, query), query):
            found += await self._wanted_at(places, query)
            is_full = len(found) >= query.limit
            looked_to = None if is_full else end
            if is_full:
                break
        now, _ = await self._read()
        return now, found[: query.limit], looked_to

    async def _wanted_at(
        self, places: Sequence[Place], query: port.RunQuery
    ) -> list[model.RunView]:
        """The runs at these places that are wanted."""
        if not places:
            return []
        now, (noted, *rows) = await self._read(
            ["HGETALL", self._keys.instances],
            *(["HGETALL", f"{self._keys.job(job)}:{slot}"] for slot, job in places),
        )
        live = _live_of(noted, now)
        found = zip(places, rows, strict=True)
        shown = (_shown(row, place, live, now) for place, row in found if row)
        return [
            seen if query.traces else machine.without_traces(seen)
            for seen in shown
            if _is_wanted(seen, query)
        ]

    async def _listed(self, names: Sequence[str], query: port.RunQuery) -> AsyncIterator[Stretch]:
        """The stretches of the jobs' indexes, of which every run is wanted.

        A few places of each are read, and those handed out before which no job can have any that was
        not read.
        """
        lowest = span_of(query, None).bottom
        step = max(_STEP // max(len(names), 1), _STEP_LEAST)
        bounds = {name: top_of(name, query) for name in names}
        ends: dict[str, Place] = {}  # of what was read of a job that may have more
        waiting: list[Place] = []
        while bounds:
            wanted: list[Command] = [
                [
                    *("ZREVRANGEBYSCORE", f"{self._keys.job(name)}:runs", upper, lowest),
                    *("LIMIT", 0, step),
                ]
                for name, upper in bounds.items()
            ]
            _, answers = await self._read(*wanted)
            for name, members in zip(bounds, answers, strict=True):
                waiting += [(int(each), name) for each in members]
                ends.pop(name, None)
                if len(members) == step:
                    ends[name] = (int(members[-1]), name)
            barrier = max(ends.values(), default=None)
            ready = sorted((p for p in waiting if barrier is None or p >= barrier), reverse=True)
            waiting = [p for p in waiting if barrier is not None and p < barrier]
            yield Stretch(ready, barrier, len(ready), barrier is not None)
            newest = max(waiting, default=None)
            bounds = {
                name: f"({end[0]}" for name, end in ends.items() if newest is None or end > newest
            }


def _is_wanted(seen: model.RunView, query: port.RunQuery) -> bool:
    by = seen.run.current.instance_id if seen.run.current else ""
    return (not query.states or seen.run.state in query.states) and (
        not query.instance_id or by == query.instance_id
    )


def _shown(
    row: Iterable[bytes], place: Place, live: Mapping[str, str], now: machine.Moment
) -> model.RunView:
    slot, job = place
    run = run_of(decoded(row) | {"job": job, "slot": str(slot)})
    attempts = claim_only.attempts_of(run)
    lives = run.current is not None and run.current.incarnation in live
    return claim_only.shown(run, now, attempts, live=lives)


def _instances_of(noted: Iterable[bytes]) -> list[model.Instance]:
    return [instance_of(incarnation, record) for incarnation, record in decoded(noted).items()]


def _live_of(noted: Iterable[bytes], now: machine.Moment) -> dict[str, str]:
    """The labels of the instances that live, by incarnation."""
    return {
        each.incarnation: each.instance_id
        for each in _instances_of(noted)
        if machine.is_live(each, now)
    }


@dataclass(frozen=True, slots=True)
class _Job:
    """What is kept of a job: its hash, its definitions by id, what instances hold of it."""

    name: str
    fields: Mapping[str, str]
    kept: Mapping[str, str]
    held: Mapping[str, str]

    @property
    def definition_id(self) -> str:
        return self.fields.get("definition_id", "")

    @property
    def is_there(self) -> bool:
        return self.definition_id in self.kept

    @property
    def record(self) -> machine.JobRecord:
        paused_at = self.fields.get("paused_at")
        return machine.JobRecord(
            self.name,
            definition_id=self.definition_id,
            schedule_id=self.fields.get("schedule_id", ""),
            definition_at=int(self.fields.get("definition_at", 0)),
            paused_at=int(paused_at) if paused_at else None,
            pause_reason=self.fields.get("pause_reason", ""),
        )

    def holds(self, live: Mapping[str, str]) -> list[machine.HeldDefinition]:
        """What live instances hold."""
        return [
            hold
            for incarnation, text in self.held.items()
            if incarnation in live
            for hold in holds_of(self.name, incarnation, text)
        ]

    def schedules(self, held: Sequence[machine.HeldDefinition]) -> Iterator[model.ScheduleInUse]:
        """The schedules whose slots are slots of the job, each with a definition that has it."""
        job = self.record
        ids = {hold.schedule_id: hold.definition_id for hold in held}
        ids[job.schedule_id] = job.definition_id
        for schedule_id in sorted(control.schedules_in_use(job, held)):
            since, kept = self.fields.get(f"since:{schedule_id}"), self.kept.get(ids[schedule_id])
            if since and kept:
                settled = claim_only.settled_at(int(since), job)
                yield model.ScheduleInUse(schedule_id, settled, spec_of(self.name, kept))


def _job_view(job: _Job, live: Mapping[str, str], last_run: model.RunView | None) -> model.JobView:
    held, record = job.holds(live), job.record
    return model.JobView(
        name=job.name,
        spec=spec_of(job.name, job.kept[job.definition_id]),
        definition_at=record.definition_at,
        definitions_differ=machine.definitions_differ(held),
        instance_ids=tuple(sorted({live[hold.incarnation] for hold in held})),
        last_run=machine.without_traces(last_run) if last_run else None,
        paused_at=record.paused_at,
        pause_reason=record.pause_reason,
        schedules=tuple(job.schedules(held)),
    )
