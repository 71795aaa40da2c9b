"""A store in a JetStream stream of NATS servers, by the strategy `lease`.

Atomic here: one job. A job's subject holds all that a decision about it depends on; it is read from
the stream's leader, judged by `machine`, and published where the subject still has the revision that
was read, else read and judged again. A batch is one such publish for each of its jobs, and so not
atomic as a whole. Whose clock decides: the stream's leader's, told with every call (`ts`), by whoever
judges; it may be stepped, so a takeover needs the second witness (S19, CLOCK_STEP). What it cannot
do: more than 250 unfinished runs of one job at once. What it can lose: by default the servers write
to disk every two minutes, so a power cut of a majority of them loses what they acknowledged.
Imports the port, the machine, the model, the errors, the standard library and, by way of
`anarchon_backends.nats`, nats-py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from anarchon_backends.nats import streams
from anarchon_backends.nats.address import Address, address_of
from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import encode
from anarchon_backends.nats.time import StoreTime
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import (
    Holding,
    attempts_lacking,
    judge_claims,
    judge_completions,
    judge_plans,
    judge_registrations,
    judge_releases,
    judge_renewals,
)
from anarchon_backends.nats_lease._members import Members
from anarchon_backends.nats_lease._pruning import Pruner
from anarchon_backends.nats_lease._reading import Reader
from anarchon_backends.nats_lease._subjects import Subjects, incarnation_of
from anarchon_server.core import machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreRefused, StoreUnavailable

_T = TypeVar("_T")
_R = TypeVar("_R")

SCHEMA = "1"
_PAYLOAD_LEAST = 1024 * 1024
_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """The store on the servers that `nats://host:port,host:port?strategy=lease` names (`tls:` for
    TLS). Nothing is connected before `open`.
    """
    return NatsLeaseStore(address_of(url), options)


class NatsLeaseStore:
    """One instance's connection to the servers.

    `clock` stands in for the servers', in tests that move the store's time by hand.
    """

    def __init__(
        self, address: Address, options: port.OpenOptions, *, clock: port.StoreClock | None = None
    ) -> None:
        self._address = address
        self._time = StoreTime(clock or options.clock, virtual=clock is not None)
        self._connection = Connection(address, options.op_timeout_ms)
        self._jetstream = JetStream(self._connection, self._time, address.domain)
        self._subjects = Subjects(address.prefix, options.namespace)
        self._history = History(self._jetstream, self._subjects)
        self._jobs = Jobs(self._jetstream, self._subjects, self._history, self._tell)
        self._members = Members(self._jetstream, self._subjects)
        parts = self._jetstream, self._subjects, self._history, self._jobs, self._members
        self._reader = Reader(*parts)
        self._pruner = Pruner(*parts)
        self._capabilities = port.Capabilities(backend="nats:lease", notifies=True)
        self._pruned_to = ""
        self._watches: set[asyncio.Event] = set()
        self._heard = False
        self._open = False
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    def __str__(self) -> str:
        return f"NATS at {self._address.location}"

    # Opening

    async def open(self) -> port.StoreReport:
        """Connects, makes the stream where it is missing, and checks it and the servers."""
        plan = streams.StreamPlan(self._subjects.stream, (self._subjects.all,), SCHEMA)
        try:
            found = await streams.prepare(self._connection, self._jetstream, self._address, (plan,))
            await self._check_payload(found)
            await self._connection.listen(self._subjects.news, self._hear, self._connection.until())
        except BaseException:
            await self.close()
            raise
        self._open = True
        return port.StoreReport(self._address.location, tuple(found.verified), tuple(found.doubts))

    async def _check_payload(self, found: streams.Findings) -> None:
        """Whether a message may be as large as a job's subject may become."""
        most = int((await self._connection.open()).get("max_payload", 0))
        if most < _PAYLOAD_LEAST:
            raise StoreRefused(
                f"{self._address.location}: the server's max_payload is {most} bytes: a job may "
                f"need up to {_PAYLOAD_LEAST}, the server's default"
            )
        found.verified.append(f"messages may have {most} bytes")

    async def close(self) -> None:
        """Closes the connection, and ends the watches."""
        self._open = False
        self._wake()
        for task in self._telling:
            task.cancel()
        await self._connection.close()

    async def _act(self, work: Callable[[Call], Awaitable[_R]], *, listed: str = "") -> _R:
        """Does one call of the port, within its time. `listed`: subjects that it asks for."""
        call = Call(self._jetstream, self._subjects.stream, self._connection.until(), listed)
        return await call.run(work)

    @staticmethod
    async def _reply(call: Call, answers: Iterable[_T], fences: dict[str, int]) -> port.Reply[_T]:
        """The stream's identity is when it was made: one that was made anew is another."""
        now, created = await call.moment(), (await call.info())["created"]
        return port.Reply(now.at, tuple(answers), fences, str(created))

    async def _judge(
        self,
        items: Sequence[_T],
        job_of: Callable[[_T], str],
        judge: Callable[[Sitting, Sequence[_T], Call], Awaitable[list[_R]]],
    ) -> port.Reply[_R]:
        """Judges a batch: its jobs at once, the items of a job in their order."""
        by_job: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            by_job.setdefault(job_of(item), []).append(place)

        async def work(call: Call) -> port.Reply[_R]:
            answers: dict[int, _R] = {}
            fences: dict[str, int] = {}

            async def one(job: str) -> None:
                places = by_job[job]
                found, sitting = await self._jobs.judge(
                    job,
                    [items[place] for place in places],
                    call,
                    lambda sitting, rest: judge(sitting, rest, call),
                )
                answers.update(zip(places, found, strict=True))
                fences[job] = sitting.state.record.fence

            await call.each(one, by_job)
            return await self._reply(call, (answers[n] for n in range(len(items))), fences)

        return await self._act(work)

    # Calls

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""

        async def judge(
            sitting: Sitting, some: Sequence[port.Claim], call: Call
        ) -> list[port.ClaimAnswer]:
            await self._jobs.look_up(sitting, [claim.slot for claim in some], call)
            return judge_claims(sitting, some)

        return await self._judge(claims, lambda claim: claim.job, judge)

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""

        async def judge(
            sitting: Sitting, some: Sequence[port.Plan], call: Call
        ) -> list[port.PlanAnswer]:
            state = sitting.state
            taken: frozenset[int] = frozenset()
            if state.lacks(missed.slot for plan in some for missed in plan.slots):
                listed = await self._history.slots(state.job, call, as_of=sitting.revision)
                taken = frozenset(slot for _, slot in listed)
            return judge_plans(sitting, some, taken)

        return await self._judge(plans, lambda plan: plan.job, judge)

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""

        async def judge(
            sitting: Sitting, some: Sequence[port.Completion], call: Call
        ) -> list[port.TokenAnswer]:
            await self._jobs.look_up(sitting, [each.slot for each in some], call)
            await self._look_up_attempts(sitting, some, call)
            return judge_completions(sitting, some)

        return await self._judge(completions, lambda each: each.job, judge)

    async def _look_up_attempts(
        self, sitting: Sitting, completions: Sequence[port.Completion], call: Call
    ) -> None:
        job = sitting.state.job
        sitting.earlier = {
            slot: await self._history.attempts(job, slot, numbers, call)
            for slot, numbers in attempts_lacking(sitting, completions).items()
        }

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""

        async def judge(
            sitting: Sitting, some: Sequence[port.Release], call: Call
        ) -> list[port.TokenAnswer]:
            await self._jobs.look_up(sitting, [each.slot for each in some], call)
            return judge_releases(sitting, some)

        return await self._judge(releases, lambda each: each.job, judge)

    # The heartbeat

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat: the jobs' parts at once, and the instance's record beside them."""
        of_job: dict[str, _Part] = {}
        for place, renewal in enumerate(beat.renewals):
            of_job.setdefault(renewal.job, _Part()).renewals.append(place)
        for job, slot in beat.looks:
            of_job.setdefault(job, _Part()).looks.append(slot)
        for job, _ in beat.sweep:
            of_job.setdefault(job, _Part())

        async def work(call: Call) -> port.Reply[port.BeatAnswer]:
            noted, _, twins = await asyncio.gather(
                self._members.heard_of(beat.instance, call, leaving=beat.leaving),
                call.each(lambda job: self._beat_job(beat, job, of_job[job], call), of_job),
                self._twins(beat.instance, call),
            )
            return await self._reply(
                call,
                [_beat_answer(beat, of_job, known=noted, twins=twins)],
                {job: part.seated.state.record.fence for job, part in of_job.items()},
            )

        label = beat.instance.instance_id
        return await self._act(work, listed=self._subjects.instances(label))

    async def _beat_job(self, beat: port.Beat, job: str, part: _Part, call: Call) -> None:
        """What the heartbeat has to do with one job."""
        renewals = [beat.renewals[place] for place in part.renewals]
        if renewals:
            part.answers, part.sitting = await self._jobs.judge(
                job, renewals, call, lambda sitting, rest: self._renew(sitting, rest, call)
            )
        else:
            part.sitting = await self._jobs.read(job, call)
        await self._jobs.look_up(part.sitting, part.looks, call)

    async def _renew(
        self, sitting: Sitting, renewals: Sequence[port.Renewal], call: Call
    ) -> list[port.TokenAnswer]:
        await self._jobs.look_up(sitting, [each.slot for each in renewals], call)
        return judge_renewals(sitting, renewals)

    async def _twins(self, instance: model.Instance, call: Call) -> tuple[str, ...]:
        """Other live instances of this one's label."""
        named = [
            each for each in await call.listed() if incarnation_of(each) != instance.incarnation
        ]
        others = await self._members.named(named, call)
        now = await call.moment()
        return tuple(
            each.member.instance.incarnation
            for each in others
            if not each.member.left and machine.is_live(each.member.instance, now)
        )

    # Definitions

    async def register(
        self, instance: model.Instance, definitions: Sequence[model.Definition]
    ) -> port.Reply[port.Registration]:
        """Records all that the instance holds now: in the jobs, then with the instance."""
        wanted = [(machine.hold_of(instance, each), each) for each in definitions]
        by_job: dict[str, list[int]] = {}
        for place, (hold, _) in enumerate(wanted):
            by_job.setdefault(hold.job, []).append(place)

        async def work(call: Call) -> port.Reply[port.Registration]:
            roll = await self._members.roll(call)
            answers: dict[int, port.Registration] = {}
            fences: dict[str, int] = {}

            async def one(job: str) -> None:
                places = by_job[job]

                async def judge(sitting: Sitting) -> list[port.Registration]:
                    known = await self._members.roll(call) if sitting.conflicts else roll
                    await self._put_specs([wanted[place][1] for place in places], call)
                    beside = known.live(job, but=instance.incarnation)
                    return judge_registrations(
                        sitting,
                        [wanted[place] for place in places],
                        Holding(known.live(job), beside),
                    )

                found, sitting = await self._jobs.transact(job, call, judge)
                answers.update(zip(places, found, strict=True))
                fences[job] = sitting.state.record.fence

            await call.each(one, by_job)
            await self._members.register(instance, [hold for hold, _ in wanted], call)
            return await self._reply(call, (answers[n] for n in range(len(wanted))), fences)

        return await self._act(work)

    async def _put_specs(self, definitions: Iterable[model.Definition], call: Call) -> None:
        """Writes the specs, after the job was read and before it is written: see `Pruner`."""
        for each in definitions:
            await self._jetstream.publish(
                self._subjects.definition(each.job, each.definition_id),
                encode(each.spec.to_json()),
                stream=self._subjects.stream,
                expected=None,
                until=call.until,
            )

    # Reading

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""

        async def work(call: Call) -> port.Reply[model.RunView]:
            page, fences = await self._reader.runs(query, call)
            return await self._reply(call, page, fences)

        return await self._act(work)

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""

        async def work(call: Call) -> port.Reply[model.JobView]:
            if names:
                views, fences = await self._reader.jobs(names, call)
            else:
                views, fences = await self._reader.page(after, limit, call)
            return await self._reply(call, views, fences)

        return await self._act(work)

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""

        async def work(call: Call) -> port.Reply[model.Instance]:
            return await self._reply(call, await self._reader.instances(call), {})

        return await self._act(work)

    # Pruning and news

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone.

        One call looks at 200 jobs; the next goes on where it ended.
        """

        async def work(call: Call) -> port.Reply[int]:
            roll = await self._pruner.prune_members(call)
            names = [n for n in await self._reader.job_names(call) if n > self._pruned_to]
            gone = 0
            for name in names[:_PRUNE_JOBS]:
                if gone == policy.batch:
                    break
                gone += await self._pruner.prune_job(name, roll, policy, policy.batch - gone, call)
                self._pruned_to = name
            else:
                if len(names) <= _PRUNE_JOBS:
                    self._pruned_to = ""
            return await self._reply(call, [gone], {})

        return await self._act(work)

    async def watch(self) -> AsyncIterator[None]:
        """Yields soon after a run was freed, counted from `open`."""
        wake = asyncio.Event()
        if self._heard:
            wake.set()
        self._watches.add(wake)
        try:
            while True:
                await wake.wait()
                wake.clear()
                if not self._open:
                    return
                self._heard = False
                yield
        finally:
            self._watches.discard(wake)

    def _tell(self) -> None:
        """Says that a run was freed; where that gets lost, others notice when they look."""

        async def say() -> None:
            with suppress(StoreUnavailable):
                await self._connection.publish(self._subjects.news, b"", self._connection.until())

        task = asyncio.get_running_loop().create_task(say())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _hear(self, _: bytes) -> None:
        self._heard = True
        self._wake()

    def _wake(self) -> None:
        for wake in self._watches:
            wake.set()


@dataclass(slots=True)
class _Part:
    """What a heartbeat has to do with one job, and what came of it."""

    renewals: list[int] = field(default_factory=list)  # places in the heartbeat
    looks: list[int] = field(default_factory=list)
    answers: list[port.TokenAnswer] = field(default_factory=list)
    sitting: Sitting | None = None

    @property
    def seated(self) -> Sitting:
        """The job, once it was read."""
        assert self.sitting is not None
        return self.sitting


def _beat_answer(
    beat: port.Beat, of_job: dict[str, _Part], *, known: bool, twins: tuple[str, ...]
) -> port.BeatAnswer:
    renewed = {
        place: answer
        for part in of_job.values()
        for place, answer in zip(part.renewals, part.answers, strict=True)
    }
    looked = [(of_job[job].seated, of_job[job].seated.run(slot)) for job, slot in beat.looks]
    swept = [of_job[job].seated for job in dict.fromkeys(job for job, _ in beat.sweep)]
    unfinished = [machine.view(run, each.now) for each in swept for run in each.state.unfinished()]
    unfinished.sort(key=lambda seen: (not seen.takeable, seen.run.slot, seen.run.job))
    return port.BeatAnswer(
        renewals=tuple(renewed[place] for place in range(len(beat.renewals))),
        looks=tuple(machine.view(run, each.now) if run else None for each, run in looked),
        unfinished=tuple(unfinished[: beat.sweep_limit]),
        settled=tuple(of_job[job].seated.state.settled(schedule) for job, schedule in beat.sweep),
        known=known,
        twins=twins,
    )
