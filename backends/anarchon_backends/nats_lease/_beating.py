"""The heartbeat: what it has to do with each job, at once, and the instance's record beside them.

Imports the call, the jobs, the judging, the members, the records, the subjects, the machine, the
model, the port and the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anarchon_backends.nats.records import Unreadable
from anarchon_backends.nats_lease._calls import Call, all_of
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import judge_renewals
from anarchon_backends.nats_lease._members import Members
from anarchon_backends.nats_lease._subjects import instance_of
from anarchon_server.core import machine, model
from anarchon_server.core import store as port


@dataclass(slots=True)
class _Part:
    """What a heartbeat has to do with one job, and what came of it.

    `sitting` is the job as it is then; None: somebody spoilt it, and it is as if it were not there.
    """

    renewals: list[int] = field(default_factory=list)  # places in the heartbeat
    looks: list[int] = field(default_factory=list)
    answers: list[port.TokenAnswer] = field(default_factory=list)
    sitting: Sitting | None = None


@dataclass(slots=True)
class _Noted:
    """What is known of the instance and its label."""

    registered: bool = False
    twins: tuple[str, ...] = ()


class Beats:
    """The heartbeats of one namespace."""

    def __init__(self, jobs: Jobs, members: Members) -> None:
        self._jobs = jobs
        self._members = members

    async def beat(self, beat: port.Beat, call: Call) -> tuple[port.BeatAnswer, dict[str, int]]:
        """Its answer, and the fences. `call` has asked for the instances of the same label."""
        parts: dict[str, _Part] = {job: _Part() for job, _ in (*beat.sweep, *beat.looks)}
        for place, renewal in enumerate(beat.renewals):
            parts.setdefault(renewal.job, _Part()).renewals.append(place)
        for job, slot in beat.looks:
            parts[job].looks.append(slot)
        noted = _Noted()
        works = [self._part(beat, job, part, call) for job, part in parts.items()]
        await all_of([self._note(beat, noted, call), self._find_twins(beat, noted, call), *works])
        fences = {job: p.sitting.state.record.fence for job, p in parts.items() if p.sitting}
        return _answer(beat, parts, noted), fences

    async def _note(self, beat: port.Beat, noted: _Noted, call: Call) -> None:
        heard = self._members.heard_of(beat.instance, call, leaving=beat.leaving)
        noted.registered = await heard

    async def _find_twins(self, beat: port.Beat, noted: _Noted, call: Call) -> None:
        """Other live instances of this one's label."""
        own = beat.instance.incarnation
        names = [each for each in await call.listed() if instance_of(each)[1] != own]
        others = await self._members.named(names, call)
        now = await call.moment()
        noted.twins = tuple(
            each.member.instance.incarnation
            for each in others
            if not each.member.left and machine.is_live(each.member.instance, now)
        )

    async def _part(self, beat: port.Beat, job: str, part: _Part, call: Call) -> None:
        renewals = [beat.renewals[place] for place in part.renewals]

        async def judge(sitting: Sitting, some: Sequence[port.Renewal]) -> list[port.TokenAnswer]:
            await self._jobs.look_up(sitting, [each.slot for each in some], call)
            return judge_renewals(sitting, some)

        try:
            if renewals:
                part.answers, sitting = await self._jobs.judge(job, renewals, call, judge)
            else:
                sitting = await self._jobs.read(job, call)
            await self._jobs.look_up(sitting, part.looks, call)
        except Unreadable:
            part.answers = [port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)] * len(renewals)
        else:
            part.sitting = sitting


def _answer(beat: port.Beat, parts: dict[str, _Part], noted: _Noted) -> port.BeatAnswer:
    renewed = {
        place: answer
        for part in parts.values()
        for place, answer in zip(part.renewals, part.answers, strict=True)
    }
    return port.BeatAnswer(
        renewals=tuple(renewed[place] for place in range(len(beat.renewals))),
        looks=tuple(_looked(parts[job].sitting, slot) for job, slot in beat.looks),
        unfinished=_swept(beat, parts),
        settled=tuple(
            sitting.state.settled(schedule) if (sitting := parts[job].sitting) else None
            for job, schedule in beat.sweep
        ),
        known=noted.registered,
        twins=noted.twins,
    )


def _looked(sitting: Sitting | None, slot: int) -> model.RunView | None:
    run = sitting.run(slot) if sitting else None
    return machine.view(run, sitting.now) if run and sitting else None


def _swept(beat: port.Beat, parts: dict[str, _Part]) -> tuple[model.RunView, ...]:
    """The runs of the jobs that are swept which are unfinished or wait, those first whose lease is
    over. Of one that is to be retried a long failure is not shown here.
    """
    sittings = [parts[job].sitting for job in dict.fromkeys(job for job, _ in beat.sweep)]
    views = [machine.view(run, each.now) for each in sittings if each for run in each.unfinished]
    views.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
    return tuple(views[: beat.sweep_limit])
