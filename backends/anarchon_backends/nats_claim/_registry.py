"""Definitions and instances: who holds what of which job.

Imports the shared JetStream and records, the rules, the port and the standard library. Nothing
of it decides a claim. A job's subject has its definitions and is written by revision; an instance's
subjects are written by itself alone, until somebody clears them away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from anarchon_backends.nats.jetstream import Entry, JetStream
from anarchon_backends.nats.records import Unreadable, decode, encode, plain, record_of
from anarchon_backends.nats_claim._batch import together
from anarchon_backends.nats_claim._history import tries
from anarchon_backends.nats_claim._subjects import Subjects
from anarchon_server.core import machine, model
from anarchon_server.core import store as port
from anarchon_server.core.machine import HeldDefinition, KeptDefinition, Moment

_HOLDS_PER_PART = 400  # each at most about 400 bytes: far below the size of a message


@dataclass(frozen=True, slots=True)
class JobEntry:
    """What is kept of a job besides its runs; `revision` is that of its subject (0: none)."""

    record: machine.JobRecord
    since: Mapping[str, int] = field(default_factory=dict)  # by schedule
    kept: Mapping[str, KeptDefinition] = field(default_factory=dict)
    specs: Mapping[str, model.JobSpec] = field(default_factory=dict)
    revision: int = 0

    def without(self, definition_ids: Iterable[str]) -> JobEntry:
        """The entry without these definitions, and the schedules that were theirs alone."""
        gone = set(definition_ids)
        kept = {name: each for name, each in self.kept.items() if name not in gone}
        used = {each.schedule_id for each in kept.values()}
        return replace(
            self,
            kept=kept,
            specs={name: spec for name, spec in self.specs.items() if name not in gone},
            since={name: at for name, at in self.since.items() if name in used},
        )


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as last heard of, with what it has registered (None: it has not)."""

    instance: model.Instance
    left: bool = False
    holds: tuple[HeldDefinition, ...] | None = None

    def is_live(self, now: Moment) -> bool:
        """Whether what it holds counts."""
        return not self.left and machine.is_live(self.instance, now)

    def is_known(self, now: Moment) -> bool:
        """Whether it is still shown: it lives, or was LOST not long ago."""
        return not self.left and not machine.is_forgotten(self.instance, now)


class Registry:
    """The definitions and instances of one namespace."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        self._jobs: dict[str, JobEntry] = {}
        self._read_at = 0

    # --- Jobs ----------------------------------------------------------------------------

    async def jobs(self, until: float) -> Mapping[str, JobEntry]:
        """All jobs, read again only if any of their subjects was written since."""
        subjects = self._subjects
        newest = await self._jetstream.last(subjects.history, subjects.job(), until)
        revision = newest.revision if newest else 0
        if revision != self._read_at:
            found = await self._jetstream.subjects(subjects.history, subjects.job(), until)
            names = [subjects.job_of(subject) for subject in found]
            entries = await together(self._readable_job(name, until) for name in names)
            self._jobs = {each.record.job: each for each in entries if each.revision}
            self._read_at = revision
        return self._jobs

    async def _refresh(self, names: Collection[str], until: float) -> None:
        """Reads these jobs again, whatever was written since."""
        for entry in await together(self._readable_job(name, until) for name in names):
            self._jobs.pop(entry.record.job, None)
            if entry.revision:
                self._jobs[entry.record.job] = entry

    async def _readable_job(self, name: str, until: float) -> JobEntry:
        """The job; what somebody spoilt is as if it were not there, until it is registered."""
        with suppress(Unreadable):
            return await self._job(name, until)
        return JobEntry(machine.JobRecord(name))

    async def _job(self, name: str, until: float) -> JobEntry:
        subject = self._subjects.job(name)
        entry = await self._jetstream.last(self._subjects.history, subject, until)
        return _job_of(name, entry) if entry else JobEntry(machine.JobRecord(name))

    async def _change(
        self, name: str, change: Callable[[JobEntry], JobEntry], until: float
    ) -> JobEntry:
        """Has a job's entry changed by whoever is first, on what it is then."""
        entry = self._jobs.get(name) or JobEntry(machine.JobRecord(name))
        async for number in tries():
            if number > 1:
                entry = await self._job(name, until)
            changed = change(entry)
            if changed == entry:
                return entry
            revision = await self._jetstream.publish(
                self._subjects.job(name),
                _job_bytes(changed),
                stream=self._subjects.history,
                expected=entry.revision,
                until=until,
            )
            if revision is not None:
                self._jobs[name] = replace(changed, revision=revision)
                return changed
        raise AssertionError("tries never end")

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Iterable[str],
        now: Moment,
        until: float,
    ) -> list[port.Registration]:
        """Records what the instance holds of these jobs now."""
        members = await self.members(until, holds=True)
        live = [member for member in members if member.is_live(now)]
        mine = instance.incarnation
        (old,) = [m for m in members if m.instance.incarnation == mine] or [Member(instance)]
        wanted = [machine.hold_of(instance, each) for each in definitions]
        named, held = {*(hold.job for hold in wanted), *let_go}, set(wanted)
        gone = [
            hold for hold in old.holds or () if (old.left or hold.job in named) and hold not in held
        ]
        await self._refresh({hold.job for hold in (*wanted, *gone)}, until)
        before = _by_job(hold for member in live for hold in member.holds or ())
        entries = await together(
            (
                self._change(each.job, _registered(each, hold, before, now), until)
                for each, hold in zip(definitions, wanted, strict=True)
            ),
            writes=True,
        )
        await self._let_go(gone, now.at, until)
        await self.seen(instance, until, left=False)
        await self._write_holds(instance, wanted, {hold.job for hold in gone} | named, until)
        others = [member for member in live if member.instance.incarnation != mine]
        after = _by_job([*wanted, *(hold for member in others for hold in member.holds or ())])
        return [
            _registration(hold, entry, after[hold.job])
            for hold, entry in zip(wanted, entries, strict=True)
        ]

    async def _let_go(self, holds: Iterable[HeldDefinition], at: int, until: float) -> None:
        """Notes on each definition that somebody held it until `at`."""
        by_job = _by_job(holds)
        await together(
            (self._change(name, _held_until(held, at), until) for name, held in by_job.items()),
            writes=True,
        )

    # --- Instances -----------------------------------------------------------------------

    async def seen(self, instance: model.Instance, until: float, *, left: bool) -> None:
        """Notes that the instance lives, or that it leaves."""
        await self._put(
            self._subjects.seen(instance.instance_id, instance.incarnation),
            {"instance": instance.to_json(), "left": left},
            until,
        )

    async def _write_holds(
        self,
        instance: model.Instance,
        wanted: Sequence[HeldDefinition],
        named: Collection[str],
        until: float,
    ) -> None:
        """Writes what the instance holds of the jobs `named`: `wanted`, and nothing else.

        Nothing else moves from one part to another, and the last part is written first: cut off
        between, only of the jobs named it is open what is held, and they are registered again.
        """
        before = await self._parts(instance.instance_id, instance.incarnation, until)
        after = _with_holds(before, wanted, named)
        for number in reversed(range(len(after))):
            grows = number == len(before) - 1 < len(after) - 1
            if number < len(before) and after[number] == before[number] and not grows:
                continue
            await self._put(
                self._subjects.holds(instance.instance_id, instance.incarnation, number),
                {
                    "parts": len(after),
                    "holds": [[h.job, h.definition_id, h.schedule_id] for h in after[number]],
                },
                until,
            )

    async def _put(self, subject: str, value: object, until: float) -> None:
        await self._jetstream.publish(
            subject, encode(value), stream=self._subjects.history, expected=None, until=until
        )

    async def member(self, instance_id: str, incarnation: str, until: float) -> Member | None:
        """An instance, without what it holds. None: the store has not heard of it, as Anarchon
        writes it.
        """
        subject = self._subjects.seen(instance_id, incarnation)
        entry = await self._jetstream.last(self._subjects.history, subject, until)
        if entry is None:
            return None
        with suppress(Unreadable):
            return decode(f"the instance {instance_id!r}", entry.payload, _member)
        return None

    async def members(
        self, until: float, instance_id: str = "", *, holds: bool = False
    ) -> list[Member]:
        """The instances (of one label), with what they hold where that is asked for.

        Without `holds`, those that have registered hold nothing, and the others None.
        """
        parts = await self._numbers(until, instance_id)
        found = await together(self.member(*key, until) for key in parts)
        members: list[Member] = []
        for (key, numbers), member in zip(parts.items(), found, strict=True):
            if member is None:
                continue
            parts_held = await self._parts(*key, until) if holds and numbers else ()
            held = tuple(hold for part in parts_held for hold in part)
            members.append(replace(member, holds=held if numbers else None))
        return members

    async def alike(self, instance: model.Instance, until: float) -> tuple[bool, list[Member]]:
        """Whether the instance has registered, and the others that have its label. It knows itself: where
        it has no twin, which is usual, no instance is read.
        """
        parts = await self._numbers(until, instance.instance_id)
        known = bool(parts.pop((instance.instance_id, instance.incarnation), None))
        found = await together(self.member(*key, until) for key in parts)
        return known, [each for each in found if each is not None]

    async def _numbers(self, until: float, instance_id: str) -> dict[tuple[str, str], list[int]]:
        """The numbers of the parts of what each instance holds (of one label), by label and
        incarnation.
        """
        subjects = self._subjects
        parts: dict[tuple[str, str], list[int]] = {}
        for subject in await self._jetstream.subjects(
            subjects.history, subjects.nodes(instance_id), until
        ):
            label, incarnation, part = subjects.node_of(subject)
            of_node = parts.setdefault((label, incarnation), [])
            if part is not None:
                of_node.append(part)
        return parts

    async def _parts(
        self, instance_id: str, incarnation: str, until: float
    ) -> list[list[HeldDefinition]]:
        """What an instance holds, by the parts in which it stands. One that somebody spoilt, or that
        is not there, is empty, and the last.
        """
        found: list[list[HeldDefinition]] = []
        parts = 1
        while len(found) < parts:
            subject = self._subjects.holds(instance_id, incarnation, len(found))
            entry = await self._jetstream.last(self._subjects.history, subject, until)
            if entry is None:
                break
            what = f"what the instance {instance_id!r} holds"
            try:
                parts, some = decode(what, entry.payload, lambda shown: _part(incarnation, shown))
            except Unreadable:
                parts, some = 0, []
            found.append(some)
        return found

    # --- Clearing away -------------------------------------------------------------------

    async def prune(
        self, now: Moment, history_ms: int, with_runs: Collection[str], until: float
    ) -> None:
        """Removes instances that are long gone, and definitions that nobody has held for long."""
        stay: list[Member] = []
        for member in await self.members(until, holds=True):
            if member.is_known(now):
                stay.append(member)
                continue
            await self._let_go(member.holds or (), member.instance.seen_at, until)
            await self._remove(member, until)
        held = {hold.definition_id for member in stay for hold in member.holds or ()}
        for name, entry in list((await self.jobs(until)).items()):
            _, gone = machine.judge_definitions(
                entry.record, entry.kept.values(), held, now, history_ms
            )
            if not gone:
                continue
            if len(gone) < len(entry.kept):
                change = partial(_reduced, held=held, now=now, history_ms=history_ms)
                await self._change(name, change, until)
            elif name not in with_runs:
                await self._jetstream.purge(self._subjects.history, self._subjects.job(name), until)
                del self._jobs[name]

    async def _remove(self, member: Member, until: float) -> None:
        node = member.instance
        pattern = self._subjects.seen(node.instance_id, node.incarnation).removesuffix("seen") + ">"
        await self._jetstream.purge(self._subjects.history, pattern, until)


def _registered(
    definition: model.Definition,
    hold: HeldDefinition,
    before: Mapping[str, Sequence[HeldDefinition]],
    now: Moment,
) -> Callable[[JobEntry], JobEntry]:
    """What the registration of a definition changes of its job (S28)."""

    def change(entry: JobEntry) -> JobEntry:
        since = entry.since.get(hold.schedule_id)
        schedule = machine.ScheduleRecord(since, since) if since is not None else None
        verdict = machine.judge_registration(
            hold, now, entry.record, schedule, before.get(hold.job, ())
        )
        begun = dict(entry.since)
        if verdict.schedule:
            begun[hold.schedule_id] = verdict.schedule.since
        kept = entry.kept.get(hold.definition_id) or KeptDefinition(
            hold.definition_id, hold.schedule_id, definition.window_ms, held_at=now.at
        )
        return replace(
            entry,
            record=verdict.job,
            since=begun,
            kept={**entry.kept, hold.definition_id: kept},
            specs={**entry.specs, hold.definition_id: definition.spec},
        )

    return change


def _reduced(entry: JobEntry, *, held: set[str], now: Moment, history_ms: int) -> JobEntry:
    """The job without the definitions that nobody has held for long, but for the last.

    It is judged on what is written anew: another may have registered meanwhile.
    """
    record, gone = machine.judge_definitions(
        entry.record, entry.kept.values(), held, now, history_ms
    )
    if not gone or len(gone) == len(entry.kept):
        return entry
    return replace(entry.without(each.definition_id for each in gone), record=record)


def _held_until(holds: Sequence[HeldDefinition], at: int) -> Callable[[JobEntry], JobEntry]:
    def change(entry: JobEntry) -> JobEntry:
        kept = dict(entry.kept)
        for hold in holds:
            each = kept.get(hold.definition_id)
            if each is not None and each.held_at < at:
                kept[hold.definition_id] = replace(each, held_at=at)
        return replace(entry, kept=kept)

    return change


def _registration(
    hold: HeldDefinition, entry: JobEntry, held: Sequence[HeldDefinition]
) -> port.Registration:
    since = entry.since.get(hold.schedule_id) if hold.schedule_id else None
    return port.Registration(
        job=hold.job,
        current=entry.record.definition_id == hold.definition_id,
        since=entry.record.definition_at if since is None else since,
        settled=since,
        definitions_differ=machine.definitions_differ(held),
    )


def _with_holds(
    parts: Sequence[Sequence[HeldDefinition]],
    wanted: Sequence[HeldDefinition],
    named: Collection[str],
) -> list[list[HeldDefinition]]:
    """The parts with what is wanted of the jobs named. What stays stays where it is."""
    new = set(wanted)
    after: list[list[HeldDefinition]] = []
    for part in parts:
        after.append([hold for hold in part if hold in new or hold.job not in named])
        new.difference_update(after[-1])
    rest = [hold for hold in wanted if hold in new]
    for part in after:
        room = _HOLDS_PER_PART - len(part)
        part.extend(rest[:room])
        rest = rest[room:]
    after += [rest[i : i + _HOLDS_PER_PART] for i in range(0, len(rest), _HOLDS_PER_PART)]
    return after or [[]]


def _by_job(holds: Iterable[HeldDefinition]) -> dict[str, list[HeldDefinition]]:
    found: dict[str, list[HeldDefinition]] = {}
    for hold in holds:
        found.setdefault(hold.job, []).append(hold)
    return found


# --- As JSON ---------------------------------------------------------------------------------


def _job_bytes(entry: JobEntry) -> bytes:
    return encode(
        {
            "record": plain(entry.record),
            "since": dict(entry.since),
            "kept": [
                [plain(each), entry.specs[name].to_json()] for name, each in entry.kept.items()
            ],
        }
    )


def _job_of(name: str, entry: Entry) -> JobEntry:
    def read(shown: Mapping[str, Any]) -> JobEntry:
        pairs = [
            (record_of(KeptDefinition, kept), model.JobSpec.from_json(spec))
            for kept, spec in shown["kept"]
        ]
        return JobEntry(
            record_of(machine.JobRecord, shown["record"]),
            {str(schedule): int(at) for schedule, at in shown["since"].items()},
            {kept.definition_id: kept for kept, _ in pairs},
            {kept.definition_id: spec for kept, spec in pairs},
            entry.revision,
        )

    return decode(f"the job {name!r}", entry.payload, read)


def _member(shown: Mapping[str, Any]) -> Member:
    return Member(model.Instance.from_json(shown["instance"]), bool(shown["left"]))


def _part(incarnation: str, shown: Mapping[str, Any]) -> tuple[int, list[HeldDefinition]]:
    holds = [HeldDefinition(incarnation, *map(str, each)) for each in shown["holds"]]
    return int(shown["parts"]), holds
