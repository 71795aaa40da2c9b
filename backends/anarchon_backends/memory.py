"""A store in this process's memory: the reference for every other, and the simulator's store.

Atomic here: everything. No method ever waits, so each batch is one step of the event loop, or
of whoever drives the coroutine with `send(None)`. Whose clock decides: the one it was opened
with. What it cannot do: serve instances of other processes. What it can lose: everything, when
the process ends. Imports the port, the rules, the model and the standard library.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import TypeVar
from weakref import WeakValueDictionary

from anarchon_server.core import claim_only, control, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.control import ControlVerdict
from anarchon_server.core.errors import StoreRefused, UnsupportedError

_T = TypeVar("_T")


def open_store(url: str, options: port.OpenOptions) -> port.Store:
    """A store of its own, which nobody else can open, for the URL `memory:`."""
    if url not in ("memory:", "memory://"):
        raise StoreRefused(
            f"the store's URL {url!r} says more than a memory store has: use memory:"
        )
    return MemoryStore(MemoryDatabase(), options, shared=False)


@dataclass(slots=True)
class _Member:
    """An instance as last heard of. `registered`: it has said what it holds."""

    instance: model.Instance
    registered: bool = False
    holds: dict[str, list[machine.HeldDefinition]] = field(default_factory=dict)  # by job


@dataclass(slots=True)
class _Space:
    """All that is kept in one namespace (S31)."""

    jobs: dict[str, machine.JobRecord] = field(default_factory=dict)
    schedules: dict[tuple[str, str], machine.ScheduleRecord] = field(default_factory=dict)
    kept: dict[str, dict[str, machine.KeptDefinition]] = field(default_factory=dict)
    specs: dict[str, model.JobSpec] = field(default_factory=dict)
    members: dict[str, _Member] = field(default_factory=dict)
    runs: dict[str, dict[int, model.Run]] = field(default_factory=dict)
    unfinished: dict[str, dict[int, model.Run]] = field(default_factory=dict)
    attempts: dict[tuple[str, int], dict[int, model.Attempt]] = field(default_factory=dict)
    requests: dict[tuple[str, str], int] = field(default_factory=dict)  # to slots
    payloads: dict[tuple[str, int], bytes] = field(default_factory=dict)
    watchers: WeakValueDictionary[int, asyncio.Event] = field(default_factory=WeakValueDictionary)
    numbers: Iterator[int] = field(default_factory=count)

    def job(self, name: str) -> machine.JobRecord:
        return self.jobs.get(name) or machine.JobRecord(name)

    def run(self, job: str, slot: int) -> model.Run | None:
        return self.runs.get(job, {}).get(slot)

    def settled(self, job: str, schedule_id: str) -> int | None:
        record = self.schedules.get((job, schedule_id))
        return record.settled if record else None

    def settle(self, job: str, schedule_id: str, settled: int | None) -> None:
        if settled is not None:
            key = (job, schedule_id)
            self.schedules[key] = replace(self.schedules[key], settled=settled)

    def save(self, saved: Iterable[machine.Saved]) -> None:
        for each in saved:
            run = each.run
            self.runs.setdefault(run.job, {})[run.slot] = run
            unfinished = self.unfinished.setdefault(run.job, {})
            if run.state.final:
                unfinished.pop(run.slot, None)
            else:
                unfinished[run.slot] = run
            attempts = self.attempts.setdefault((run.job, run.slot), {})
            attempts.update((attempt.attempt, attempt) for attempt in each.attempts)
            if each.is_news or (each.ends_a_run and self.due(run.job) is not None):
                self.wake_watchers()

    def delete(self, run: model.Run) -> None:
        del self.runs[run.job][run.slot]
        self.attempts.pop((run.job, run.slot), None)
        self.requests.pop((run.job, run.request_id), None)
        self.payloads.pop((run.job, run.slot), None)

    def others(self, job: str, slot: int) -> list[model.Run]:
        """The job's runs at other slots that are not final."""
        return [run for run in self.unfinished.get(job, {}).values() if run.slot != slot]

    def due(self, job: str) -> model.Run | None:
        """The job's oldest run that waits."""
        waiting = [run for run in self.unfinished.get(job, {}).values() if run.waits]
        return min(waiting, key=lambda run: run.slot, default=None)

    def held(self, now: machine.Moment, job: str) -> tuple[machine.HeldDefinition, ...]:
        """What live instances hold of the job."""
        live = [member for member in self.members.values() if machine.is_live(member.instance, now)]
        return tuple(hold for member in live for hold in member.holds.get(job, ()))

    def watcher(self) -> asyncio.Event:
        """An event that is set whenever a run was freed, for as long as somebody keeps it."""
        event = asyncio.Event()
        self.watchers[next(self.numbers)] = event
        return event

    def wake_watchers(self) -> None:
        for event in list(self.watchers.values()):
            event.set()

    def let_go(self, member: _Member, at: int, jobs: Iterable[str]) -> None:
        """The instance holds nothing of these jobs any more, and did until `at`."""
        gone = [member.holds.pop(job) for job in jobs if job in member.holds]
        for hold in chain.from_iterable(gone):
            of_job = self.kept[hold.job]
            kept = of_job[hold.definition_id]
            of_job[hold.definition_id] = replace(kept, held_at=max(kept.held_at, at))


class MemoryDatabase:
    """What several `MemoryStore`s share: the "server", of which each is a connection.

    `store_id` is drawn at random where it is not given.
    """

    def __init__(self, store_id: str = "") -> None:
        self.store_id = store_id or secrets.token_hex(8)
        self._spaces: dict[str, _Space] = {}

    def space(self, namespace: str) -> _Space:
        """The namespace, made when it is first asked for."""
        return self._spaces.setdefault(namespace, _Space())


class MemoryStore:
    """One instance's connection to a `MemoryDatabase`."""

    def __init__(
        self, database: MemoryDatabase, options: port.OpenOptions, *, shared: bool = True
    ) -> None:
        self._database = database
        self._options = options
        self._space = database.space(options.namespace)
        self._leased = options.leases
        self._rules = machine if self._leased else claim_only
        if self._leased:
            self._capabilities = port.Capabilities(
                backend="memory",
                boot_leases=options.boot_leases,
                notifies=True,
                shared=shared,
                overlap=frozenset(model.OverlapPolicy),
                catch_up=frozenset(model.CatchUpPolicy),
                retries=True,
                control=True,
            )
        else:
            self._capabilities = port.Capabilities(
                backend="memory:claim",
                leases=False,
                retries=True,
                shared=shared,
                overlap=port.CLAIM_ONLY_OVERLAP,
                control=True,
            )

    @property
    def capabilities(self) -> port.Capabilities:
        """What this backend can do."""
        return self._capabilities

    async def open(self) -> port.StoreReport:
        """Nothing to connect to; says what it is not."""
        elsewhere = "use a SQLite file or a server"
        doubts = [port.Doubt("everything is lost when this process ends", elsewhere)]
        if not self._capabilities.shared:
            alone = "no other instance can use it: every run is this instance's"
            doubts.append(port.Doubt(alone, elsewhere))
        return port.StoreReport("memory:", doubts=tuple(doubts))

    async def close(self) -> None:
        """Nothing to let go of: the database lives as long as somebody refers to it."""

    def _now(self) -> machine.Moment:
        clock = self._options.clock
        at_us = clock.wall_us()
        if self._options.boot_leases:
            return machine.Moment(at_us, clock.boot_ms(), clock.boot_id, steady=True)
        return machine.Moment(at_us, at_us // 1_000, "", steady=False)

    def _reply(
        self, now: machine.Moment, answers: Iterable[_T], jobs: Iterable[str]
    ) -> port.Reply[_T]:
        fences = {job: self._space.job(job).fence for job in jobs} if self._leased else {}
        return port.Reply(now.at, tuple(answers), fences, self._database.store_id)

    async def claim(self, claims: Sequence[port.Claim]) -> port.Reply[port.ClaimAnswer]:
        """First attempts and takeovers."""
        space, now = self._space, self._now()
        answers: list[port.ClaimAnswer] = []
        for claim in claims:
            verdict = self._rules.judge_claim(
                claim,
                now,
                space.job(claim.job),
                space.settled(claim.job, claim.schedule_id),
                space.run(claim.job, claim.slot),
                space.others(claim.job, claim.slot),
            )
            space.save(verdict.saved)
            if claim.job in space.jobs:
                space.jobs[claim.job] = verdict.job
            space.settle(claim.job, claim.schedule_id, verdict.settled)
            payload = space.payloads.get((claim.job, claim.slot), b"")
            won = verdict.answer.outcome is port.ClaimOutcome.WON
            answers.append(replace(verdict.answer, payload=payload if won else b""))
        return self._reply(now, answers, (claim.job for claim in claims))

    async def settle(self, plans: Sequence[port.Plan]) -> port.Reply[port.PlanAnswer]:
        """Records slots as missed."""
        if not self._leased:
            raise UnsupportedError("catch_up", self._capabilities.backend, port.LEASE_BACKENDS)
        space, now = self._space, self._now()
        answers: list[port.PlanAnswer] = []
        for plan in plans:
            rows = space.runs.get(plan.job, {})
            verdict = machine.judge_plan(
                plan,
                now,
                space.job(plan.job),
                space.settled(plan.job, plan.schedule_id),
                frozenset(missed.slot for missed in plan.slots if missed.slot in rows),
                self._caught_up(plan.job),
            )
            space.save(verdict.saved)
            space.settle(plan.job, plan.schedule_id, verdict.answer.settled)
            answers.append(verdict.answer)
        return self._reply(now, answers, (plan.job for plan in plans))

    def _caught_up(self, job: str) -> list[model.Run]:
        waiting = self._space.unfinished.get(job, {}).values()
        return [run for run in waiting if run.waits and run.trigger is model.Trigger.CATCH_UP]

    async def control(self, acts: Sequence[port.Control]) -> port.Reply[port.ControlAnswer]:
        """Pauses, resumes, triggers and cancels."""
        space, now = self._space, self._now()
        answers: list[port.ControlAnswer] = []
        for act in acts:
            verdict = self._judge(act, now)
            space.save(verdict.saved)
            if act.job in space.jobs:
                space.jobs[act.job] = verdict.job
            for schedule_id, settled in (verdict.settled or {}).items():
                space.settle(act.job, schedule_id, settled)
            answers.append(verdict.answer)
        return self._reply(now, answers, (act.job for act in acts))

    def _judge(self, act: port.Control, now: machine.Moment) -> ControlVerdict:
        space = self._space
        job, rows = space.job(act.job), space.runs.get(act.job, {})
        match act:
            case port.Pause():
                return control.judge_pause(act, now, job, space.others(act.job, -1))
            case port.Resume():
                in_use = {
                    schedule_id: settled
                    for schedule_id in control.schedules_in_use(job, space.held(now, act.job))
                    if (settled := space.settled(act.job, schedule_id)) is not None
                }
                if not self._leased:
                    return claim_only.judge_resume(act, now, job, in_use, rows.keys())
                return control.judge_resume(
                    act, now, job, in_use, rows.keys(), self._caught_up(act.job)
                )
            case port.TriggerRun():
                before = rows.get(space.requests.get((act.job, act.request_id), -1))
                verdict = control.judge_trigger(
                    act, now, job, before, rows.keys(), space.others(act.job, -1)
                )
                made = verdict.answer.run
                if before is None and made is not None:
                    space.requests[act.job, act.request_id] = made.run.slot
                    space.payloads[act.job, made.run.slot] = act.payload
                return verdict
            case port.CancelRun():
                run = rows.get(act.slot)
                if self._leased:
                    return control.judge_cancel(act, now, job, run)
                live = run is not None and self._has_live_holder(run, now)
                return claim_only.judge_cancel(act, now, job, run, live=live)

    def _has_live_holder(self, run: model.Run, now: machine.Moment) -> bool:
        """Whether the instance that runs it was heard of within its lease."""
        member = self._space.members.get(run.current.incarnation) if run.current else None
        return member is not None and machine.is_live(member.instance, now)

    async def beat(self, beat: port.Beat) -> port.Reply[port.BeatAnswer]:
        """One heartbeat."""
        space, now = self._space, self._now()
        renewals: list[port.TokenAnswer] = []
        for renewal in beat.renewals:
            verdict = self._rules.judge_renewal(renewal, now, space.run(renewal.job, renewal.slot))
            space.save([verdict.saved] if verdict.saved else [])
            renewals.append(verdict.answer)
        looked = [space.run(job, slot) for job, slot in beat.looks]
        answer = port.BeatAnswer(
            renewals=tuple(renewals),
            looks=tuple(machine.view(run, now) if run else None for run in looked),
            unfinished=self._sweep(beat, now),
            settled=tuple(space.settled(job, schedule) for job, schedule in beat.sweep),
            known=self._seen(beat, now),
            twins=tuple(
                incarnation
                for incarnation, other in space.members.items()
                if other.instance.instance_id == beat.instance.instance_id
                and incarnation != beat.instance.incarnation
                and machine.is_live(other.instance, now)
            ),
        )
        touched = [renewal.job for renewal in beat.renewals]
        touched += [job for job, _ in (*beat.looks, *beat.sweep)]
        return self._reply(now, [answer], touched)

    def _sweep(self, beat: port.Beat, now: machine.Moment) -> tuple[model.RunView, ...]:
        jobs, ours = {job for job, _ in beat.sweep}, beat.instance.incarnation
        views = [
            machine.view(run, now)
            for job in jobs
            for run in self._space.unfinished.get(job, {}).values()
            if self._leased or claim_only.is_news(run, ours)
        ]
        views.sort(key=lambda shown: (not shown.takeable, shown.run.slot, shown.run.job))
        return tuple(views[: beat.sweep_limit])

    def _seen(self, beat: port.Beat, now: machine.Moment) -> bool:
        """Notes that the instance lives, or that it leaves; whether it is registered."""
        instance = replace(beat.instance, seen_at=now.at)
        member = self._space.members.setdefault(instance.incarnation, _Member(instance))
        member.instance = instance
        if beat.leaving:
            self._space.let_go(member, now.at, tuple(member.holds))
            del self._space.members[instance.incarnation]
        return member.registered

    async def complete(
        self, completions: Sequence[port.Completion]
    ) -> port.Reply[port.TokenAnswer]:
        """Records results."""
        space, now = self._space, self._now()
        answers: list[port.TokenAnswer] = []
        for completion in completions:
            run = space.run(completion.job, completion.slot)
            attempts = space.attempts.get((completion.job, completion.slot), {}).values()
            past = next((a for a in attempts if a.token == completion.token), None)
            verdict = self._rules.judge_completion(completion, now, run, past)
            space.save([verdict.saved] if verdict.saved else [])
            ended = verdict.saved is not None and verdict.saved.ends_a_run
            due = space.due(completion.job) if ended else None
            answers.append(replace(verdict.answer, due=machine.view(due, now) if due else None))
        return self._reply(now, answers, (completion.job for completion in completions))

    async def release(self, releases: Sequence[port.Release]) -> port.Reply[port.TokenAnswer]:
        """Ends leases at once."""
        space, now = self._space, self._now()
        answers: list[port.TokenAnswer] = []
        for release in releases:
            verdict = self._rules.judge_release(release, now, space.run(release.job, release.slot))
            space.save([verdict.saved] if verdict.saved else [])
            answers.append(verdict.answer)
        return self._reply(now, answers, (release.job for release in releases))

    async def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Sequence[str] = (),
    ) -> port.Reply[port.Registration]:
        """Records what the instance holds of these jobs now."""
        space, now = self._space, self._now()
        held_before = {each.job: space.held(now, each.job) for each in definitions}
        member = space.members.setdefault(instance.incarnation, _Member(instance))
        member.instance, member.registered = replace(instance, seen_at=now.at), True
        space.let_go(member, now.at, {*held_before, *let_go})
        wanted = [machine.hold_of(instance, each) for each in definitions]
        for hold, each in zip(wanted, definitions, strict=True):
            key = (hold.job, hold.schedule_id)
            verdict = machine.judge_registration(
                hold, now, space.job(hold.job), space.schedules.get(key), held_before[hold.job]
            )
            space.jobs[hold.job] = verdict.job
            if verdict.schedule:
                space.schedules[key] = verdict.schedule
            space.kept.setdefault(hold.job, {})[hold.definition_id] = machine.KeptDefinition(
                hold.definition_id, hold.schedule_id, each.window_ms, held_at=now.at
            )
            space.specs[hold.definition_id] = each.spec
            member.holds.setdefault(hold.job, []).append(hold)
        answers = [self._registration(hold, now) for hold in wanted]
        return self._reply(now, answers, (hold.job for hold in wanted))

    def _registration(self, hold: machine.HeldDefinition, now: machine.Moment) -> port.Registration:
        job = self._space.job(hold.job)
        schedule = self._space.schedules.get((hold.job, hold.schedule_id))
        return port.Registration(
            job=hold.job,
            current=job.definition_id == hold.definition_id,
            since=schedule.since if schedule else job.definition_at,
            settled=schedule.settled if schedule else None,
            definitions_differ=machine.definitions_differ(self._space.held(now, hold.job)),
        )

    async def runs(self, query: port.RunQuery) -> port.Reply[model.RunView]:
        """History, newest slot first; equal slots by job name, last first."""
        space, now = self._space, self._now()
        jobs = [query.job] if query.job else list(space.runs)
        found = [run for job in jobs for run in space.runs.get(job, {}).values()]
        found.sort(key=lambda run: (run.slot, run.job), reverse=True)
        page: list[model.RunView] = []
        for run in found:
            if len(page) == query.limit:
                break
            attempts = space.attempts[run.job, run.slot]
            first = machine.first_attempt_shown(run)
            shown = sorted(number for number in attempts if number >= first)
            seen = self._shown(run, now, [attempts[number] for number in shown])
            if _wanted(seen, query, attempts.values()):
                page.append(seen if query.traces else machine.without_traces(seen))
        return self._reply(now, page, {seen.run.job for seen in page})

    def _shown(
        self, run: model.Run, now: machine.Moment, attempts: Sequence[model.Attempt] = ()
    ) -> model.RunView:
        if self._leased or run.current is None:
            return machine.view(run, now, attempts)
        return claim_only.shown(run, now, attempts, live=self._has_live_holder(run, now))

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> port.Reply[model.JobView]:
        """The named jobs, or a page of all."""
        space, now = self._space, self._now()
        if not names:
            names = [name for name in sorted(space.kept) if name > after][:limit]
        views: list[model.JobView] = []
        for name in names:
            if name not in space.kept:
                continue
            job, held = space.job(name), space.held(now, name)
            runs = space.runs.get(name, {})
            views.append(
                model.JobView(
                    name=name,
                    spec=space.specs[job.definition_id],
                    definition_at=job.definition_at,
                    definitions_differ=machine.definitions_differ(held),
                    instance_ids=tuple(
                        sorted({space.members[h.incarnation].instance.instance_id for h in held})
                    ),
                    last_run=machine.without_traces(self._shown(runs[max(runs)], now))
                    if runs
                    else None,
                    paused_at=job.paused_at,
                    pause_reason=job.pause_reason,
                    schedules=self._in_use(job, held),
                )
            )
        return self._reply(now, views, (seen.name for seen in views))

    def _in_use(
        self, job: machine.JobRecord, held: Iterable[machine.HeldDefinition]
    ) -> tuple[model.ScheduleInUse, ...]:
        """The schedules whose slots are slots of the job, each with a definition that has it."""
        space = self._space
        ids = {hold.schedule_id: hold.definition_id for hold in held}
        ids[job.schedule_id] = job.definition_id
        return tuple(
            model.ScheduleInUse(
                schedule_id,
                settled if self._leased else claim_only.settled_at(settled, job),
                space.specs[ids[schedule_id]],
            )
            for schedule_id in sorted(control.schedules_in_use(job, held))
            if (settled := space.settled(job.job, schedule_id)) is not None
        )

    async def instances(self) -> port.Reply[model.Instance]:
        """The instances seen lately, by label."""
        now = self._now()
        lately = [
            machine.shown_instance(member.instance, now)
            for member in self._space.members.values()
            if not machine.is_forgotten(member.instance, now)
        ]
        lately.sort(key=lambda instance: (instance.instance_id, instance.incarnation))
        return self._reply(now, lately, ())

    async def prune(self, policy: port.PrunePolicy) -> port.Reply[int]:
        """Deletes a batch of old final runs, and definitions and instances long gone."""
        space, now = self._space, self._now()
        for incarnation, member in list(space.members.items()):
            if machine.is_forgotten(member.instance, now):
                space.let_go(member, member.instance.seen_at, tuple(member.holds))
                del space.members[incarnation]
        gone = 0
        for name in list(space.kept):
            unused = self._drop_definitions(name, now, policy)
            old = self._prunable(name, now, policy, unused=unused)[: policy.batch - gone]
            job = space.job(name)
            space.jobs[name] = replace(job, floor=max([job.floor, *(run.slot for run in old)]))
            for run in old:
                space.delete(run)
            gone += len(old)
            if unused and not space.runs.get(name):
                space.jobs[name] = machine.forgotten(space.jobs[name])
                for definition_id in space.kept.pop(name):
                    del space.specs[definition_id]
                self._drop_schedules(name, used=set())
        return self._reply(now, [gone], ())

    def _drop_definitions(self, name: str, now: machine.Moment, policy: port.PrunePolicy) -> bool:
        """Drops what nobody has held for long, but for the last; whether even that may go."""
        space = self._space
        kept = space.kept[name]
        held = {h.definition_id for m in space.members.values() for h in m.holds.get(name, ())}
        job, gone = machine.judge_definitions(
            space.job(name), kept.values(), held, now, policy.history_ms
        )
        if len(gone) == len(kept):
            return True
        space.jobs[name] = job
        for each in gone:
            del kept[each.definition_id], space.specs[each.definition_id]
        self._drop_schedules(name, used={each.schedule_id for each in kept.values()})
        return False

    def _drop_schedules(self, name: str, used: set[str]) -> None:
        for key in [k for k in self._space.schedules if k[0] == name and k[1] not in used]:
            del self._space.schedules[key]

    def _prunable(
        self, name: str, now: machine.Moment, policy: port.PrunePolicy, *, unused: bool
    ) -> list[model.Run]:
        """The job's runs that may go, oldest first; `unused`: nobody has the job any more."""
        space = self._space
        runs = sorted(space.runs.get(name, {}).values(), key=lambda run: run.slot)
        if not self._leased:
            return claim_only.prunable(runs, now, policy, space.members.keys())
        if unused:
            return [run for run in runs if run.state.final]
        live = {hold.definition_id for hold in space.held(now, name)}
        used = machine.in_use(space.job(name), space.kept[name].values(), live)
        settled = {key[1]: s.settled for key, s in space.schedules.items() if key[0] == name}
        bound = machine.prune_bound(now, used, settled)
        beyond = len(runs) - policy.history_max
        oldest = now.at - policy.history_ms
        return [
            run
            for place, run in enumerate(runs)
            if run.state.final
            and run.slot <= bound
            and (place < beyond or max(run.slot, run.ended_at or 0) < oldest)
        ]

    def watch(self) -> AsyncIterator[None]:
        """Yields soon after a run was freed, may go on or is to stop, from this call on."""
        return _each_time(self._space.watcher())


async def _each_time(event: asyncio.Event) -> AsyncIterator[None]:
    while True:
        await event.wait()
        event.clear()
        yield


def _wanted(seen: model.RunView, query: port.RunQuery, attempts: Iterable[model.Attempt]) -> bool:
    run = seen.run
    return (
        (query.slot is None or run.slot == query.slot)
        and (not query.states or run.state in query.states)
        and (query.from_slot is None or run.slot >= query.from_slot)
        and (query.until_slot is None or run.slot < query.until_slot)
        and (query.after is None or (run.slot, run.job) < query.after)
        and (not query.instance_id or any(a.instance_id == query.instance_id for a in attempts))
    )
