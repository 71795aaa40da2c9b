"""Registrations: in the jobs first, then with the instance (S28).

Who holds what is read beside the jobs and is no part of the atomic step: two registrations at one
moment may not see each other as holders. That decides nothing but what is shown as current and, of a
definition that was neither current nor held, since when; a registration that follows mends it.
Imports JetStream, the call, the jobs, the judging, the members, the records, the subjects, the model,
the machine, the port and the standard library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import encode
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import Holding, judge_registrations
from anarchon_backends.nats_lease._members import Members, Roll
from anarchon_backends.nats_lease._subjects import Subjects
from anarchon_server.core import machine, model
from anarchon_server.core import store as port

_Wanted = tuple[machine.HeldDefinition, model.Definition]


class Registrar:
    """Registers with one namespace."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, jobs: Jobs, members: Members
    ) -> None:
        self._jetstream = jetstream
        self._subjects = subjects
        self._jobs = jobs
        self._members = members

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str],
        call: Call,
    ) -> tuple[list[port.Registration], dict[str, int]]:
        """The answers, and the fences."""
        wanted = [(machine.hold_of(instance, each), each) for each in definitions]
        places: dict[str, list[int]] = {}
        for place, (hold, _) in enumerate(wanted):
            places.setdefault(hold.job, []).append(place)
        answers: dict[int, port.Registration] = {}
        fences: dict[str, int] = {}
        rolls = _Rolls(self._members, call)

        async def register_job(job: str) -> None:
            of_job = [wanted[place] for place in places[job]]

            async def judge(sitting: Sitting) -> list[port.Registration]:
                roll = await rolls.roll(sitting)
                await self._put_specs(sitting, of_job, call)
                beside = roll.live(job, but=instance.incarnation)
                return judge_registrations(sitting, of_job, Holding(roll.live(job), beside))

            found, sitting = await self._jobs.transact(job, call, judge)
            answers.update(zip(places[job], found, strict=True))
            fences[job] = sitting.state.record.fence

        await call.each(register_job, places)
        await self._members.register(instance, [hold for hold, _ in wanted], let_go, call)
        return [answers[place] for place in range(len(wanted))], fences

    async def _put_specs(self, sitting: Sitting, wanted: Sequence[_Wanted], call: Call) -> None:
        """Writes the specs that the job does not keep.

        After the job was read and before it is written: whoever drops a definition meanwhile writes
        the job, too, so that this is done again; and removes no spec that is newer than that.
        """
        for hold, definition in wanted:
            if hold.definition_id not in sitting.state.kept:
                await self._jetstream.publish(
                    self._subjects.definition(hold.job, hold.definition_id),
                    encode(definition.spec_json),
                    stream=self._subjects.stream,
                    expected=None,
                    until=call.until,
                )


class _Rolls:
    """Who holds what, as it is when the first job was read, and anew when a job was in conflict."""

    def __init__(self, members: Members, call: Call) -> None:
        self._members = members
        self._call = call
        self._reading = asyncio.Lock()
        self._roll: Roll | None = None
        self._begun_at = 0.0

    async def roll(self, sitting: Sitting) -> Roll:
        """One that was begun after the job was read, if others have written the job meanwhile."""
        asked_at = asyncio.get_running_loop().time()
        async with self._reading:
            if self._roll is None or (sitting.conflicts and self._begun_at < asked_at):
                self._begun_at = asyncio.get_running_loop().time()
                self._roll = await self._members.roll(self._call)
            return self._roll
