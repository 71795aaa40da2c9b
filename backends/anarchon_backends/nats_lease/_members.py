"""Instances: a subject each, which only the instance itself and whoever prunes it write.

What an instance holds stands beside it in parts that never change; its record says which generation
of them counts, and which are no longer held but not yet noted in their jobs. Imports JetStream, the
call, the records, the subjects, the errors, the machine, the model and the standard library.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anarchon_backends.nats.jetstream import JetStream, JetStreamError
from anarchon_backends.nats.records import Unreadable, decode, encode, plain, record_of
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import STALE_WAIT_S
from anarchon_backends.nats_lease._subjects import Subjects, instance_of
from anarchon_server.core import machine, model
from anarchon_server.core.errors import StoreUnavailable

_PART_MAX_BYTES = 128 * 1024
_GENERATIONS_KEPT = 1_000  # of what is held, in memory

Holds = tuple[machine.HeldDefinition, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of what an instance holds: `parts` subjects. `until`: when it was let go, or 0
    where all of it is held on.

    Numbers are drawn at random, so that none is ever used again.
    """

    number: int = 0
    parts: int = 0
    until: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as last heard of. `registered`: it has said what it holds; `left`: it is gone.

    `gone` are generations which the jobs do not know yet that they were held until then.
    """

    instance: model.Instance
    registered: bool = False
    left: bool = False
    held: Generation = Generation()
    gone: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A member with the revision of its subject, and what it holds."""

    member: Member
    revision: int
    holds: Holds = ()


class Roll:
    """What is known of all instances at one moment. `labels`: their ids, by incarnation."""

    def __init__(self, seen: Iterable[Seen], now: machine.Moment) -> None:
        there = [each for each in seen if not each.member.left]
        instances = [each.member.instance for each in there]
        self.labels = {each.incarnation: each.instance_id for each in instances}
        self._live = {each.incarnation for each in instances if machine.is_live(each, now)}
        self._of_job: dict[str, list[machine.HeldDefinition]] = {}
        for each in there:
            for hold in each.holds:
                self._of_job.setdefault(hold.job, []).append(hold)

    def live(self, job: str, *, but: str = "") -> Holds:
        """What live instances hold of the job, other than the incarnation `but`."""
        live = self._live - {but}
        return tuple(hold for hold in self._of_job.get(job, ()) if hold.incarnation in live)

    def ever(self, job: str) -> set[str]:
        """The definitions of the job that instances hold, live or not."""
        return {hold.definition_id for hold in self._of_job.get(job, ())}


class Members:
    """The instances of one namespace."""

    def __init__(self, jetstream: JetStream, subjects: Subjects) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        self._generations: dict[tuple[str, int], Holds] = {}
        self._own: dict[str, Seen] = {}  # what we wrote last, which most often is still there

    # Reading

    async def roll(self, call: Call) -> Roll:
        """All instances, with what they hold."""
        pattern = self._subjects.instances()
        names = await self._jetstream.subjects(self._subjects.stream, pattern, call.until)
        seen = await call.each(lambda name: self._seen(name, call), names)
        return Roll([each for each in seen if each is not None], await call.moment())

    async def all(self, call: Call, *, strict: bool = False) -> list[Seen]:
        """All instances, also those that have left, without what they hold. As `named`."""
        pattern = self._subjects.instances()
        names = await self._jetstream.subjects(self._subjects.stream, pattern, call.until)
        return await self.named(names, call, strict=strict)

    async def named(self, names: Iterable[str], call: Call, *, strict: bool = False) -> list[Seen]:
        """The instances of these subjects, without what they hold.

        With `strict` one that somebody spoilt raises `Unreadable`; else it counts as one that left.
        """
        seen = await call.each(lambda name: self._read(name, call, strict=strict), names)
        return [each for each in seen if each is not None]

    async def _read(self, subject: str, call: Call, *, strict: bool = False) -> Seen | None:
        entry = await self._jetstream.last(self._subjects.stream, subject, call.until)
        if entry is None:
            return None
        label, incarnation = instance_of(subject)
        try:
            member = decode(f"the instance {label!r}", entry.payload, _member)
        except Unreadable:
            if strict:
                raise
            member = Member(model.Instance(label, incarnation), left=True)
        return Seen(member, entry.revision)

    async def _seen(self, subject: str, call: Call) -> Seen | None:
        """An instance with what it holds; again where it has become another generation meanwhile."""
        while True:
            seen = await self._read(subject, call)
            if seen is None or seen.member.left:
                return seen
            incarnation = seen.member.instance.incarnation
            holds = await self.holds(incarnation, seen.member.held, call)
            if holds is not None:
                return replace(seen, holds=holds)
            if call.left_s() <= STALE_WAIT_S:
                raise StoreUnavailable(f"what {incarnation!r} holds is not there")
            await asyncio.sleep(STALE_WAIT_S)

    async def holds(self, incarnation: str, generation: Generation, call: Call) -> Holds | None:
        """What a generation holds. None: it is not there any more."""
        if not generation.parts:
            return ()
        key = incarnation, generation.number
        if key not in self._generations:
            found = await self._read_holds(incarnation, generation, call)
            if found is None:
                return None
            while len(self._generations) >= _GENERATIONS_KEPT:
                del self._generations[next(iter(self._generations))]
            self._generations[key] = found
        return self._generations[key]

    async def _read_holds(
        self, incarnation: str, generation: Generation, call: Call
    ) -> Holds | None:
        async def part(number: int) -> Holds | None:
            subject = self._subjects.holds(incarnation, generation.number, number)
            entry = await self._jetstream.last(self._subjects.stream, subject, call.until)
            if entry is None:
                return None
            what = f"what {incarnation!r} holds"
            return decode(what, entry.payload, lambda shown: _holds(incarnation, shown))

        parts = await call.each(part, range(generation.parts))
        if any(each is None for each in parts):
            return None
        return tuple(hold for each in parts if each is not None for hold in each)

    # Writing

    async def heard_of(self, instance: model.Instance, call: Call, *, leaving: bool) -> bool:
        """Notes that the instance lives, or that it leaves; whether it was registered."""

        def noted(before: Member | None, now: machine.Moment) -> Member:
            after = replace(_present(before, instance), instance=replace(instance, seen_at=now.at))
            return _departed(after, now.at) if leaving else after

        before = await self._replace(instance, call, noted)
        return before is not None and before.registered

    async def register(
        self,
        instance: model.Instance,
        holds: Sequence[machine.HeldDefinition],
        let_go: Iterable[str],
        call: Call,
    ) -> None:
        """Notes what the instance holds from now on of the jobs of `holds` and of `let_go`.

        All that it holds is one generation, which is written anew where it changes. The one before
        is outgrown where nothing of it was let go: no job needs to know of it.
        """
        seen = await self._seen(self._of(instance), call)
        old, outgrown = (seen.holds, seen.member.held) if seen else ((), Generation())
        named = {*(hold.job for hold in holds), *let_go}
        after = [*(hold for hold in old if hold.job not in named), *holds]
        held = Generation()
        if set(after) == set(old):
            held = outgrown
        elif after:
            held = await self._write_holds(instance.incarnation, after, call)
        if held == outgrown or not set(old) <= set(after):
            outgrown = Generation()

        def noted(before: Member | None, now: machine.Moment) -> Member:
            member = _present(before, instance)
            gone = member.gone
            if member.held.parts and member.held != held:
                until = 0 if member.held == outgrown else now.at
                gone = (*gone, replace(member.held, until=until))
            return Member(replace(instance, seen_at=now.at), True, False, held, gone)

        await self._replace(instance, call, noted)
        if outgrown.parts:
            await self.delete_holds(instance.incarnation, outgrown, call)

    async def _write_holds(
        self, incarnation: str, holds: Sequence[machine.HeldDefinition], call: Call
    ) -> Generation:
        number, parts = secrets.randbits(48), _in_parts(holds)

        async def put(part: int) -> None:
            subject = self._subjects.holds(incarnation, number, part)
            await self._jetstream.publish(
                subject,
                encode([[h.job, h.definition_id, h.schedule_id] for h in parts[part]]),
                stream=self._subjects.stream,
                expected=None,
                until=call.until,
            )
            call.wrote = True

        await call.each(put, range(len(parts)))
        return Generation(number, len(parts))

    async def _replace(
        self,
        instance: model.Instance,
        call: Call,
        noted: Callable[[Member | None, machine.Moment], Member],
    ) -> Member | None:
        """Writes the instance's record anew; what stood there before."""
        subject = self._of(instance)
        seen = self._own.pop(subject, None)
        while True:
            seen = seen or await self._read(subject, call)
            before = seen.member if seen else None
            after = noted(before, await call.moment())
            revision = await self.write(after, seen.revision if seen else 0, call)
            if revision is not None:
                self._own[subject] = Seen(after, revision)
                return before if before is not None and not before.left else None
            seen = None
            if call.left_s() <= STALE_WAIT_S:
                raise StoreUnavailable(f"others keep writing the instance {instance.instance_id!r}")

    async def write(self, member: Member, revision: int, call: Call) -> int | None:
        """Writes a record where it still has this revision; its new revision, or None."""
        written = await self._jetstream.publish(
            self._of(member.instance),
            encode(_member_json(member)),
            stream=self._subjects.stream,
            expected=revision,
            until=call.until,
        )
        if written is not None:
            call.wrote = True
        return written

    # Pruning

    async def forget(self, revision: int, call: Call) -> None:
        """Removes what has this revision, if it has not been written since."""
        stream = self._subjects.stream
        try:
            await self._jetstream.api(
                f"STREAM.MSG.DELETE.{stream}",
                call.until,
                {"seq": revision, "no_erase": True},
                writes=True,
            )
        except JetStreamError as error:
            if error.code not in _GONE:
                raise
        call.wrote = True

    async def delete_holds(self, incarnation: str, generation: Generation, call: Call) -> None:
        """Removes a generation that nothing refers to any more."""
        subject = self._subjects.generation(incarnation, generation.number)
        await self._jetstream.purge(self._subjects.stream, subject, call.until)
        call.wrote = True

    def _of(self, instance: model.Instance) -> str:
        return self._subjects.instance(instance.instance_id, instance.incarnation)


_GONE = (10_037, 10_043, 10_057)  # what a delete is answered where there is no such revision


def _present(before: Member | None, instance: model.Instance) -> Member:
    """The member as it is taken up again: one that had left has nothing but what it let go."""
    if before is None:
        return Member(instance)
    return Member(instance, gone=before.gone) if before.left else before


def _departed(member: Member, at: int) -> Member:
    gone = member.gone
    if member.held.parts:
        gone = (*gone, replace(member.held, until=at))
    return Member(member.instance, left=True, gone=gone)


def departed(member: Member) -> Member:
    """A member that nobody has heard of for so long that it counts as gone."""
    return _departed(member, member.instance.seen_at)


def _in_parts(holds: Sequence[machine.HeldDefinition]) -> list[list[machine.HeldDefinition]]:
    parts: list[list[machine.HeldDefinition]] = [[]]
    size = 0
    for hold in holds:
        size += len(hold.job) + len(hold.definition_id) + 4 * len(hold.schedule_id) + 16
        if size > _PART_MAX_BYTES and parts[-1]:
            parts.append([])
            size = 0
        parts[-1].append(hold)
    return parts


def _member_json(member: Member) -> dict[str, Any]:
    shown = plain(member)
    shown["gone"] = [[each.number, each.parts, each.until] for each in member.gone]
    return shown


def _member(shown: Any) -> Member:
    gone = tuple(Generation(*map(int, each)) for each in shown.get("gone", ()))
    rest = {name: value for name, value in shown.items() if name != "gone"}
    return record_of(Member, rest, gone=gone)


def _holds(incarnation: str, shown: Any) -> Holds:
    return tuple(
        machine.HeldDefinition(incarnation, str(job), str(definition_id), str(schedule_id))
        for job, definition_id, schedule_id in shown
    )
