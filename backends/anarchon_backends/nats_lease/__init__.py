"""A store in a JetStream stream of NATS servers, by the strategy `lease`.

Atomic here: one job. A job's subject holds all that a decision about it depends on; it is read from
the stream's leader, judged by `machine`, and published where the subject still has the revision that
was read, else read and judged again. A batch is one such publish for each of its jobs, and so not
atomic as a whole. Whose clock decides: the stream's leader's, told with every call (`ts`), by whoever
judges; it may be stepped, so a takeover needs the second witness (S19, CLOCK_STEP). What it cannot
do: more than 250 unfinished runs of one job at once. What it can lose: by default the servers write
to disk every two minutes, so a power cut of a majority of them loses what they acknowledged.
Imports the port, the machine, the model, the limits, the errors, the standard library and, by way of
`anarchon_backends.nats`, nats-py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from anarchon_backends.nats import streams
from anarchon_backends.nats.address import Address, address_of
from anarchon_backends.nats.connection import Connection
from anarchon_backends.nats.jetstream import JetStream
from anarchon_backends.nats.records import Unreadable
from anarchon_backends.nats.time import StoreTime
from anarchon_backends.nats_lease._beating import Beats
from anarchon_backends.nats_lease._calls import Call
from anarchon_backends.nats_lease._history import History
from anarchon_backends.nats_lease._jobs import Jobs, Sitting
from anarchon_backends.nats_lease._judging import (
    attempts_lacking,
    judge_claims,
    judge_completions,
    judge_plans,
    judge_releases,
)
from anarchon_backends.nats_lease._members import Members
from anarchon_backends.nats_lease._operating import Operating
from anarchon_backends.nats_lease._pruning import Pruner
from anarchon_backends.nats_lease._reading import Reader
from anarchon_backends.nats_lease._registering import Registrar
from anarchon_backends.nats_lease._subjects import Subjects
from anarchon_server.core import model
from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreRefused, StoreUnavailable

_T = TypeVar("_T")
_R = TypeVar("_R")

SCHEMA = "1"
_PAYLOAD_LEAST = 1024 * 1024
_PRUNE_JOBS = 200  # jobs looked at by one call of `prune`

_SPOILT_CLAIM = port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)
_SPOILT_PLAN = port.PlanAnswer(False, None)
_SPOILT_TOKEN = port.TokenAnswer(port.TokenOutcome.UNKNOWN_TOKEN)


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
        self._clock, self._virtual = clock or options.clock, clock is not None
        self._connection = Connection(address, options.op_timeout_ms)
        self._jetstream = JetStream(self._connection, StoreTime(options.clock), address.domain)
        self._subjects = Subjects(address.prefix, options.namespace)
        self._history = History(self._jetstream, self._subjects)
        self._jobs = Jobs(self._jetstream, self._subjects, self._history, self._tell)
        self._members = Members(self._jetstream, self._subjects)
        parts = self._jetstream, self._subjects, self._history, self._jobs, self._members
        self._beats = Beats(self._jobs, self._members)
        self._registrar = Registrar(self._jetstream, self._subjects, self._jobs, self._members)
        self._reader = Reader(*parts)
        self._pruner = Pruner(*parts)
        self._operating = Operating(self._history, self._jobs, self._members)
        self._capabilities = port.Capabilities(
            backend="nats:lease",
            notifies=True,
            overlap=frozenset(model.OverlapPolicy),
            catch_up=frozenset(model.CatchUpPolicy),
            retries=True,
            control=True,
        )
        self._pruned_to = ""
        self._watches: set[asyncio.Event] = set()
        self._heard = False
        self._heard_on = 0
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
        self._heard_on = self._connection.generation
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
        call = Call(
            self._jetstream,
            self._subjects.stream,
            self._clock,
            virtual=self._virtual,
            listed=listed,
        )
        try:
            return await call.run(work)
        finally:
            if self._connection.generation != self._heard_on:  # news may have been missed
                self._heard_on = self._connection.generation
                self._hear(b"")

    @staticmethod
    async def _reply(call: Call, answers: Iterable[_T], fences: dict[str, int]) -> port.Reply[_T]:
        """The stream's identity is when it was made: one that was made anew is another."""
        created = (await call.info())["created"]
        return port.Reply(await call.middle(), tuple(answers), fences, str(created))

    async def _judge(
        self,
        items: Sequence[_T],
        job_of: Callable[[_T], str],
        judge: Callable[[Sitting, Sequence[_T], Call], Awaitable[list[_R]]],
        spoilt: _R | None,
    ) -> port.Reply[_R]:
        """Judges a batch: its jobs at once, the items of a job in their order.

        `spoilt` is the answer to the items of a job whose record is not as Anarchon writes it (None:
        the whole call fails).
        """
        by_job: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            by_job.setdefault(job_of(item), []).append(place)

        async def work(call: Call) -> port.Reply[_R]:
            answers: dict[int, _R] = {}
            fences: dict[str, int] = {}

            async def one(job: str) -> None:
                of_job = [items[place] for place in by_job[job]]
                try:
                    found, sitting = await self._jobs.judge(
                        job, of_job, call, lambda sitting, rest: judge(sitting, rest, call)
                    )
                except Unreadable:
                    if spoilt is None:
                        raise
                    found = [spoilt] * len(of_job)
                else:
                    fences[job] = sitting.state.record.fence
                answers.update(zip(by_job[job], found, strict=True))

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
            answers = judge_claims(sitting, some)
            return await call.each(lambda each: self._with_payload(sitting, each, call), answers)

        return await self._judge(claims, lambda claim: claim.job, judge, _SPOILT_CLAIM)

    async def _with_payload(
        self, sitting: Sitting, answer: port.ClaimAnswer, call: Call
    ) -> port.ClaimAnswer:
        """The answer, with what came with the call that triggered the run, where that was won."""
        if answer.outcome is not port.ClaimOutcome.WON or answer.run is None:
            return answer
        run = answer.run.run
        name = sitting.state.payloads.get(run.slot)
        if name is None:
            return answer
        payload = await self._history.payload(run.job, run.slot, name, call, as_of=sitting.revision)
        return replace(answer, payload=payload)

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

        return await self._judge(plans, lambda plan: plan.job, judge, _SPOILT_PLAN)

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels. An act of a job that somebody spoilt fails."""
        return await self._judge(acts, lambda act: act.job, self._operating.judge, None)

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

        return await self._judge(completions, lambda each: each.job, judge, _SPOILT_TOKEN)

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

        return await self._judge(releases, lambda each: each.job, judge, _SPOILT_TOKEN)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat."""

        async def work(call: Call) -> port.Reply[port.BeatAnswer]:
            answer, fences = await self._beats.beat(beat, call)
            return await self._reply(call, [answer], fences)

        alike = self._subjects.instances(beat.instance.instance_id)
        return await self._act(work, listed=alike)

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now."""

        async def work(call: Call) -> port.Reply[port.Registration]:
            answers, fences = await self._registrar.register(instance, definitions, let_go, call)
            return await self._reply(call, answers, fences)

        return await self._act(work)

    # Reading

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""

        async def work(call: Call) -> port.Reply[model.RunView]:
            page, fences, looked_to = await self._reader.runs(query, call)
            return replace(await self._reply(call, page, fences), looked_to=looked_to)

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
            half_s = call.left_s() / 2
            for name in names[:_PRUNE_JOBS]:
                if gone == policy.batch or call.left_s() < half_s:
                    break
                with suppress(Unreadable):  # what somebody spoilt keeps no other from being pruned
                    room = policy.batch - gone
                    gone += await self._pruner.prune_job(name, roll, policy, room, call)
                self._pruned_to = name
            else:
                if len(names) <= _PRUNE_JOBS:
                    self._pruned_to = ""
            return await self._reply(call, [gone], {})

        return await self._act(work)

    async def watch(self) -> AsyncIterator[None]:
        """Yields soon after news (`machine.Saved`), counted from `open`."""
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
        """Says that there are news; where that gets lost, others notice when they look."""

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
