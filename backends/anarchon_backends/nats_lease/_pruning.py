"""What goes: old runs, definitions nobody holds any more, and instances long gone (S2, S28, S30).

Every step is safe to be interrupted and to be done by several at once: what is removed is first
made superfluous by a write of the job or the instance. Imports JetStream, the call, the history, the
jobs, the judging, the members, the records, the subjects, the machine, the model, the port and the standard
library.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import Unreadable
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import (
    drop_definitions,
    drop_runs,
    forget_job,
    let_go,
    prune_limit,
)
from anarchon_backends.nats_lease._members import Generation, Members, Roll, Seen, departed
from anarchon_backends.nats_lease._subjects import Subjects
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_CHUNK = 64  # runs read together, to know when they ended


@dataclass(frozen=True, slots=True)
class _Going:
    """What is to be removed once the job has been written without it.

    `payloads` are those that no run needs, by slot and name; `specs` are revisions: a spec that was written anew meanwhile has another, and stays.
    """

    slots: tuple[int, ...] = ()
    payloads: tuple[tuple[int, str], ...] = ()
    specs: tuple[int, ...] = ()


class Pruner:
    """Prunes one namespace."""

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        history: History,
        jobs: Jobs,
        members: Members,
    ) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        self._history = history
        self._jobs = jobs
        self._members = members

    # Instances

    async def prune_members(self, call: Call) -> Roll:
        """Notes in the jobs until when instances held what they let go, and removes the gone."""
        for seen in await self._members.all(call):
            await self._prune_member(seen, call)
        return await self._members.roll(call)

    async def _prune_member(self, seen: Seen, call: Call) -> None:
        member, revision = seen.member, seen.revision
        if not member.left and machine.is_forgotten(member.instance, await call.moment()):
            member = departed(member)
            written = await self._members.write(member, revision, call)
            if written is None:  # it is back
                return
            revision = written
        for generation in member.gone:
            await self._let_go(member.instance.incarnation, generation, call)
        if member.left:
            await self._members.forget(revision, call)
        elif member.gone:
            await self._members.write(replace(member, gone=()), revision, call)

    async def _let_go(self, incarnation: str, generation: Generation, call: Call) -> None:
        by_job: dict[str, list[str]] = {}
        held = await self._members.holds(incarnation, generation, call) if generation.until else ()
        for hold in held or ():
            by_job.setdefault(hold.job, []).append(hold.definition_id)

        async def note(job: str) -> None:
            async def work(sitting: Sitting) -> None:
                let_go(sitting, by_job[job], generation.until)

            with suppress(Unreadable):
                await self._jobs.transact(job, call, work)

        await call.each(note, by_job)
        await self._members.delete_holds(incarnation, generation, call)

    # Jobs

    async def prune_job(
        self, job: str, roll: Roll, policy: port.PrunePolicy, room: int, call: Call
    ) -> int:
        """Prunes one job by at most `room` runs; how many went."""

        async def work(sitting: Sitting) -> _Going:
            if not sitting.state.kept:
                return _Going()
            unused, definitions = drop_definitions(sitting, roll.ever(job), policy.history_ms)
            rows = await self._rows(sitting, call)
            if unused:
                slots = [slot for slot in rows if _is_final(sitting, slot)][:room]
            else:
                slots = await self._old(sitting, rows, roll, policy, room, call)
            drop_runs(sitting, slots)
            if unused and len(slots) == len(rows):
                definitions = forget_job(sitting)
            payloads = await self._useless(sitting, call)
            return _Going(tuple(slots), payloads, await self._specs(job, definitions, call))

        going, _ = await self._jobs.transact(job, call, work)
        await self._history.delete(job, going.slots, call)
        await self._history.delete_payloads(job, going.payloads, call)
        await call.each(lambda revision: self._members.forget(revision, call), going.specs)
        return len(going.slots)

    async def _useless(self, sitting: Sitting, call: Call) -> tuple[tuple[int, str], ...]:
        """The payloads of runs that have ended or never were.

        Where there are any the job is written, whatever else is done: a trigger that has put its
        payload there and is about to write its run finds so, and begins anew with another.
        """
        state = sitting.state
        found = await self._history.payloads(state.job, call, as_of=sitting.revision)
        useless = tuple(each for each in found if state.payloads.get(each[0]) != each[1])
        sitting.changed = sitting.changed or bool(useless)
        return useless

    async def _rows(self, sitting: Sitting, call: Call) -> list[int]:
        """The slots of all the job's runs, oldest first."""
        job = sitting.state.job
        listed = await self._history.slots(job, call, as_of=sitting.revision)
        return sorted({*sitting.state.runs, *(slot for _, slot in listed)})

    async def _old(
        self,
        sitting: Sitting,
        rows: list[int],
        roll: Roll,
        policy: port.PrunePolicy,
        room: int,
        call: Call,
    ) -> list[int]:
        """The slots of the runs that may go while the job is in use, oldest first."""
        limit = prune_limit(sitting, roll.live(sitting.state.job))
        beyond = len(rows) - policy.history_max
        oldest = sitting.now.at - policy.history_ms
        may = [
            (place < beyond, slot)
            for place, slot in enumerate(rows)
            if slot <= limit and (place < beyond or slot < oldest) and _is_final(sitting, slot)
        ]
        old: list[int] = []
        while may and len(old) < room:
            some, may = may[:_CHUNK], may[_CHUNK:]
            of_age = [slot for certain, slot in some if not certain]
            ended = await self._ended_before(sitting, of_age, oldest, call)
            old += [slot for certain, slot in some if certain or slot in ended]
        return old[:room]

    async def _ended_before(
        self, sitting: Sitting, slots: Iterable[int], at: int, call: Call
    ) -> set[int]:
        """Those of the slots whose runs had ended by then."""

        async def ended(slot: int) -> int | None:
            run: model.Run | None = sitting.state.runs.get(slot)
            if run is None:
                run = await self._history.run(sitting.state.job, slot, call)
            return slot if run is not None and (run.ended_at or 0) < at else None

        found = await call.each(ended, slots)
        return {slot for slot in found if slot is not None}

    async def _specs(self, job: str, definitions: Iterable[str], call: Call) -> tuple[int, ...]:
        """The revisions of the specs of these definitions."""

        async def revision(definition_id: str) -> int | None:
            subject = self._subjects.definition(job, definition_id)
            entry = await self._jetstream.last(self._subjects.stream, subject, call.until)
            return entry.revision if entry else None

        found = await call.each(revision, definitions)
        return tuple(each for each in found if each is not None)


def _is_final(sitting: Sitting, slot: int) -> bool:
    """Whether the slot's run has ended. All that stand in the history have."""
    run = sitting.state.runs.get(slot)
    return run is None or run.state.final
