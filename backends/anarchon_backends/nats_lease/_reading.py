"""What people ask: runs, jobs and instances, put together from what the stream holds.

Nothing is atomic here over several jobs, and nothing is decided. Imports the call, the history, the
jobs, the members, the subjects, the machine, `control`, the model, the port and the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Sequence

from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import Unreadable, decode
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._members import Members, Roll
from anarchon_backends.nats_lease._subjects import Subjects, job_of
from anarchon_server.core import control, machine, model
from anarchon_server.core import store as port

_CHUNK = 64  # runs looked at together
_LISTED_MAX = 200_000  # slots of histories that are remembered
LOOKED_MAX = 1_024  # runs looked at for one page, where few of them are wanted


class _Listings:
    """The slots of jobs' histories, as last listed at a revision of the job; the newest of them."""

    def __init__(self) -> None:
        self._of_job: dict[str, tuple[int, list[int]]] = {}
        self._slots = 0

    def get(self, job: str, revision: int) -> list[int] | None:
        """The slots of the job. None: they are not known of this revision."""
        known = self._of_job.get(job)
        return known[1] if known is not None and known[0] == revision else None

    def put(self, job: str, revision: int, slots: list[int]) -> None:
        """Remembers a listing for as long as there are not too many newer ones."""
        self._forget(job)
        self._of_job[job] = revision, slots
        self._slots += len(slots)
        while self._slots > _LISTED_MAX:
            self._forget(next(iter(self._of_job)))

    def _forget(self, job: str) -> None:
        _, slots = self._of_job.pop(job, (0, list[int]()))
        self._slots -= len(slots)


class Reader:
    """Reads one namespace."""

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
        self._listings = _Listings()

    async def job_names(self, call: Call) -> list[str]:
        """All jobs that were ever registered, by name."""
        pattern = self._subjects.jobs()
        names = await self._jetstream.subjects(self._subjects.stream, pattern, call.until)
        return sorted(job_of(each) for each in names)

    # Runs

    async def runs(
        self, query: port.RunQuery, call: Call
    ) -> tuple[list[model.RunView], dict[str, int], tuple[int, str] | None]:
        """History, newest slot first; equal slots by job name, last first. And the fences, and how far
        was looked where that was not to the end (`Reply.looked_to`).

        The jobs are read before the history is listed: what moves there meanwhile is seen twice,
        and never not at all.
        """
        names = [query.job] if query.job else await self.job_names(call)
        sittings = await call.each(lambda name: self._jobs.read(name, call), names)
        of_job = {each.state.job: each for each in sittings}
        page: list[model.RunView] = []
        looked, looked_to = 0, None
        async for keys in self._keys(query, sittings, call):
            found = await call.each(lambda key: self._view(key, of_job, query, call), keys)
            page += [each for each in found if each is not None]
            looked += len(keys)
            if len(page) >= query.limit:
                break
            if looked >= LOOKED_MAX:
                looked_to = keys[-1]
                break
        del page[query.limit :]
        jobs = {seen.run.job for seen in page}
        fences = {job: of_job[job].state.record.fence for job in jobs if job in of_job}
        return page, fences, looked_to

    async def _keys(
        self, query: port.RunQuery, sittings: Iterable[Sitting], call: Call
    ) -> AsyncIterator[list[tuple[int, str]]]:
        """The (slot, job) of runs that may be wanted, newest first, some at a time.

        A job's history is listed when nothing newer is left: where many jobs have long ones, a page
        needs few of them. Until then its newest slot stands for it, behind a mark.
        """
        of_job = {each.state.job: each for each in sittings}
        here = {(slot, each.state.job) for each in sittings for slot in each.state.runs}
        left = [(*key, False) for key in here]
        if not query.states or any(state.final for state in query.states):
            newest = _newest_wanted(query)
            marked = [each.state for each in sittings if each.state.moved >= 0]
            left += [(min(state.moved, newest), state.job, True) for state in marked]
        left.sort()
        some: list[tuple[int, str]] = []
        while left and (query.from_slot is None or left[-1][0] >= query.from_slot):
            unlisted: list[str] = []
            while left and left[-1][2] and len(unlisted) < _CHUNK:
                unlisted.append(left.pop()[1])
            if unlisted:
                some_of = [of_job[job] for job in unlisted]
                listed = await call.each(lambda sitting: self._slots(sitting, call), some_of)
                found = {
                    (slot, job)
                    for job, slots in zip(unlisted, listed, strict=True)
                    for slot in slots
                    if _within((slot, job), query)
                }
                left += [(*key, False) for key in found - here]
                left.sort()
                continue
            key = left.pop()[:2]
            if _within(key, query):
                some.append(key)
            if len(some) == _CHUNK:
                yield some
                some = []
        yield some

    async def _slots(self, sitting: Sitting, call: Call) -> list[int]:
        """The slots of the job's history, listed anew only where the job was written since.

        Whatever moves there is written there first, and then the job without it.
        """
        job, revision = sitting.state.job, sitting.revision
        slots = self._listings.get(job, revision)
        if slots is None:
            found = await self._history.slots(job, call, as_of=revision)
            slots = [slot for _, slot in found]
        self._listings.put(job, revision, slots)
        return slots

    async def _view(
        self, key: tuple[int, str], of_job: dict[str, Sitting], query: port.RunQuery, call: Call
    ) -> model.RunView | None:
        """The run as it is wanted. None: it is not, or it has gone meanwhile."""
        slot, job = key
        sitting = of_job.get(job)
        run = sitting.state.runs.get(slot) if sitting else None
        if sitting and run is not None:
            run = await self._jobs.whole(sitting, run, call)
        else:
            run = await self._history.run(job, slot, call)
        if run is None or (query.states and not _may_show(run, query)):
            return None
        first = 1 if query.instance_id else machine.first_attempt_shown(run)
        here = sitting.state.past.get(slot, {}) if sitting else {}
        numbers = [number for number in range(first, run.attempt) if number not in here]
        past = await self._history.attempts(job, slot, numbers, call)
        attempts = sorted((*past, *here.values()), key=lambda each: each.attempt)
        if run.current is not None:
            attempts.append(run.current)
        if query.instance_id and all(a.instance_id != query.instance_id for a in attempts):
            return None
        shown = [each for each in attempts if each.attempt >= machine.first_attempt_shown(run)]
        seen = machine.view(run, await call.moment(), shown)
        if query.states and seen.run.state not in query.states:
            return None
        return seen if query.traces else machine.without_traces(seen)

    # Jobs and instances

    async def jobs(
        self, names: Sequence[str], call: Call
    ) -> tuple[list[model.JobView], dict[str, int]]:
        """Those of the named jobs that exist, and their fences."""
        sittings = await call.each(lambda name: self._jobs.read(name, call), names)
        there = [each for each in sittings if each.state.kept]
        roll = await self._members.roll(call)
        views = await call.each(lambda each: self._job_view(each, roll, call), there)
        return views, {each.state.job: each.state.record.fence for each in there}

    async def page(
        self, after: str, limit: int, call: Call
    ) -> tuple[list[model.JobView], dict[str, int]]:
        """Up to `limit` jobs by name after `after`. Jobs that were forgotten are passed over."""
        names = [name for name in await self.job_names(call) if name > after]
        views: list[model.JobView] = []
        fences: dict[str, int] = {}
        while names and len(views) < limit:
            room = limit - len(views)
            some, found = await self.jobs(names[:room], call)
            views += some
            fences |= found
            names = names[room:]
        return views, fences

    async def _job_view(self, sitting: Sitting, roll: Roll, call: Call) -> model.JobView:
        record = sitting.state.record
        held = roll.live(record.job)
        last = await self._newest(sitting, call)
        return model.JobView(
            name=record.job,
            spec=await self._spec(record.job, record.definition_id, call),
            definition_at=record.definition_at,
            definitions_differ=machine.definitions_differ(held),
            instance_ids=tuple(sorted({roll.labels[hold.incarnation] for hold in held})),
            last_run=machine.without_traces(machine.view(last, sitting.now)) if last else None,
            paused_at=record.paused_at,
            pause_reason=record.pause_reason,
            schedules=await self._in_use(sitting, held, call),
        )

    async def _in_use(
        self, sitting: Sitting, held: Sequence[machine.HeldDefinition], call: Call
    ) -> tuple[model.ScheduleInUse, ...]:
        """The schedules whose slots are slots of the job, each with a definition that has it."""
        record = sitting.state.record
        ids = {hold.schedule_id: hold.definition_id for hold in held}
        ids[record.schedule_id] = record.definition_id

        async def shown(schedule_id: str) -> model.ScheduleInUse | None:
            settled = sitting.state.settled(schedule_id)
            if settled is None:
                return None
            spec = await self._spec(record.job, ids[schedule_id], call)
            return model.ScheduleInUse(schedule_id, settled, spec)

        found = await call.each(shown, sorted(control.schedules_in_use(record, held)))
        return tuple(each for each in found if each is not None)

    async def _newest(self, sitting: Sitting, call: Call) -> model.Run | None:
        """The job's run with the newest slot."""
        state = sitting.state
        here = max(state.runs, default=-1)
        if here >= state.moved:
            run = state.runs.get(here)
            return await self._jobs.whole(sitting, run, call) if run else None
        moved = await self._history.run(state.job, state.moved, call)
        if moved is not None:
            return moved
        listed = [slot for _, slot in await self._history.slots(state.job, call)]
        newest = max([here, *listed])
        if newest < 0:
            return None
        if newest in state.runs:
            return await self._jobs.whole(sitting, state.runs[newest], call)
        return await self._history.run(state.job, newest, call)

    async def _spec(self, job: str, definition_id: str, call: Call) -> model.JobSpec:
        subject = self._subjects.definition(job, definition_id)
        entry = await self._jetstream.last(self._subjects.stream, subject, call.until)
        what = f"the definition of {job!r}"
        if entry is None:
            raise Unreadable(f"{what} is not in the store: somebody removed it")
        return decode(what, entry.payload, _spec)

    async def instances(self, call: Call) -> list[model.Instance]:
        """The instances seen lately, by label."""
        now = await call.moment()
        members = [each.member for each in await self._members.all(call, strict=True)]
        lately = [
            machine.shown_instance(each.instance, now)
            for each in members
            if not each.left and not machine.is_forgotten(each.instance, now)
        ]
        return sorted(lately, key=lambda each: (each.instance_id, each.incarnation))


def _spec(shown: object) -> model.JobSpec:
    if not isinstance(shown, str):
        raise TypeError("the text of a spec expected")
    return model.JobSpec.from_json(shown)


def _newest_wanted(query: port.RunQuery) -> int:
    """The newest slot that the query can ask for."""
    bounds = [query.slot, query.after and query.after[0], query.until_slot]
    return min((each for each in bounds if each is not None), default=sys.maxsize)


def _within(key: tuple[int, str], query: port.RunQuery) -> bool:
    slot = key[0]
    return (
        (query.slot is None or slot == query.slot)
        and (query.from_slot is None or slot >= query.from_slot)
        and (query.until_slot is None or slot < query.until_slot)
        and (query.after is None or key < query.after)
    )


def _may_show(run: model.Run, query: port.RunQuery) -> bool:
    """Whether the run can show in one of the states that are asked for."""
    return run.state in query.states or (
        not run.state.final and model.RunState.INTERRUPTED in query.states
    )
