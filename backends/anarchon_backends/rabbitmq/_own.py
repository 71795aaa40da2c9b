"""What this instance knows: its own runs, definitions and itself. RabbitMQ can keep none of it.

Imports the port, the rules, the model and the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from anarchon_server.core import claim_only, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.machine import Moment

_Key = tuple[str, int]

DECIDED_MAX = 10_000


@dataclass(slots=True)
class _Job:
    """A job that the instance holds, or held until `held_at`."""

    record: machine.JobRecord
    definition: model.Definition
    schedule: machine.ScheduleRecord | None
    held: bool
    held_at: int


@dataclass(slots=True)
class Own:
    """All of it, in memory. A run that history has dropped stays decided for `kept_ms`, unless
    there are more than `DECIDED_MAX`: of the oldest the broker alone knows then who won.
    """

    kept_ms: int
    _instance: model.Instance | None = None
    _registered: bool = False
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _runs: dict[str, dict[int, model.Run]] = field(default_factory=dict)
    _decided: dict[_Key, model.Run] = field(default_factory=dict)

    # Runs

    def run(self, job: str, slot: int) -> model.Run | None:
        """The slot's run, as far as it was this instance's."""
        return self._runs.get(job, {}).get(slot) or self._decided.get((job, slot))

    def save(self, run: model.Run) -> None:
        """Keeps the run as it is now."""
        if (run.job, run.slot) in self._decided:
            self._decided[run.job, run.slot] = run
        else:
            self._runs.setdefault(run.job, {})[run.slot] = run

    def found(self, query: port.RunQuery, now: Moment) -> list[model.RunView]:
        """A page of history, newest slot first; equal slots by job name, last first."""
        jobs = [query.job] if query.job else list(self._runs)
        runs = [run for job in jobs for run in self._runs.get(job, {}).values()]
        runs.sort(key=lambda run: (run.slot, run.job), reverse=True)
        wanted = [_shown(run, now) for run in runs if _is_wanted(run, query)][: query.limit]
        return wanted if query.traces else [machine.without_traces(seen) for seen in wanted]

    # Definitions and the instance

    @property
    def label(self) -> str:
        """The instance's name; empty until it has said it."""
        return self._instance.instance_id if self._instance else ""

    @property
    def incarnation(self) -> str:
        """The instance's process; empty until it has said it."""
        return self._instance.incarnation if self._instance else ""

    def seen(self, beat: port.Beat, now: Moment) -> bool:
        """Notes that the instance lives, or that it leaves; whether it is registered."""
        known = self._registered and self.incarnation == beat.instance.incarnation
        self._instance = replace(beat.instance, seen_at=now.at)
        if beat.leaving:
            self._let_go(self._jobs, now.at)
            self._instance, self._registered = None, False
        return known

    def settled(self, job: str, schedule_id: str) -> int | None:
        """Since when the schedule counts; nothing settles a slot."""
        known = self._jobs.get(job)
        if known is None or known.schedule is None or known.definition.schedule_id != schedule_id:
            return None
        return known.schedule.since

    def register(
        self,
        instance: model.Instance,
        definitions: Sequence[model.Definition],
        let_go: Iterable[str],
        now: Moment,
    ) -> list[port.Registration]:
        """Takes over what the instance holds of these jobs now."""
        before = {name: job.held for name, job in self._jobs.items()}
        self._let_go(let_go, now.at)
        self._instance, self._registered = replace(instance, seen_at=now.at), True
        return [
            self._registered_one(instance, definition, now, was_held=before.get(definition.job))
            for definition in definitions
        ]

    def _registered_one(
        self,
        instance: model.Instance,
        definition: model.Definition,
        now: Moment,
        *,
        was_held: bool | None,
    ) -> port.Registration:
        name, wanted = definition.job, machine.hold_of(instance, definition)
        known = self._jobs.get(name)
        same = known is not None and known.definition.schedule_id == wanted.schedule_id
        verdict = machine.judge_registration(
            wanted,
            now,
            known.record if known else machine.JobRecord(name),
            known.schedule if known and same else None,
            [machine.hold_of(instance, known.definition)] if known and was_held else [],
        )
        job = _Job(verdict.job, definition, verdict.schedule, held=True, held_at=now.at)
        self._jobs[name] = job
        since = job.schedule.since if job.schedule else job.record.definition_at
        return port.Registration(
            job=name,
            current=True,
            since=since,
            settled=since if job.schedule else None,
            definitions_differ=False,
        )

    def _let_go(self, names: Iterable[str], at: int) -> None:
        for name in names:
            job = self._jobs.get(name)
            if job is not None and job.held:
                job.held, job.held_at = False, at

    def jobs(
        self, names: Sequence[str], after: str, limit: int, now: Moment
    ) -> list[model.JobView]:
        """The named jobs, or a page of all."""
        if not names:
            names = [name for name in sorted(self._jobs) if name > after][:limit]
        return [self._job_view(name, now) for name in names if name in self._jobs]

    def _job_view(self, name: str, now: Moment) -> model.JobView:
        job, runs = self._jobs[name], self._runs.get(name)
        last = machine.without_traces(machine.view(runs[max(runs)], now)) if runs else None
        return model.JobView(
            name=name,
            spec=job.definition.spec,
            definition_at=job.record.definition_at,
            definitions_differ=False,
            instance_ids=(self.label,) if job.held else (),
            last_run=last,
        )

    def instances(self, now: Moment) -> list[model.Instance]:
        """The instance itself."""
        if self._instance is None or machine.is_forgotten(self._instance, now):
            return []
        return [machine.shown_instance(self._instance, now)]

    # Pruning

    def prune(self, policy: port.PrunePolicy, now: Moment) -> int:
        """Drops a batch of old runs from history, and jobs long gone."""
        gone, ours = 0, (self.incarnation,)
        for name in list(self._runs):
            of_job = self._runs[name]
            runs = sorted(of_job.values(), key=lambda run: run.slot)
            for run in claim_only.prunable(runs, now, policy, ours)[: policy.batch - gone]:
                del of_job[run.slot]
                self._decided[name, run.slot] = _bare(run)
                gone += 1
            if not of_job:
                del self._runs[name]
        self._forget(policy, now)
        return gone

    def _forget(self, policy: port.PrunePolicy, now: Moment) -> None:
        for key, run in list(self._decided.items()):
            if max(run.slot, run.ended_at or 0) < now.at - self.kept_ms:
                del self._decided[key]
        while len(self._decided) > DECIDED_MAX:
            del self._decided[next(iter(self._decided))]
        for name, job in list(self._jobs.items()):
            unused = not job.held and job.held_at < now.at - policy.history_ms
            if unused and name not in self._runs:
                del self._jobs[name]


def _shown(run: model.Run, now: Moment) -> model.RunView:
    """Its runner, where it has one, is this process: it lives."""
    return machine.view(run, now, claim_only.attempts_of(run))


def _is_wanted(run: model.Run, query: port.RunQuery) -> bool:
    by = run.current.instance_id if run.current else ""
    return (
        (query.slot is None or run.slot == query.slot)
        and (not query.states or run.state in query.states)
        and (query.from_slot is None or run.slot >= query.from_slot)
        and (query.until_slot is None or run.slot < query.until_slot)
        and (query.after is None or (run.slot, run.job) < query.after)
        and (not query.instance_id or by == query.instance_id)
    )


def _bare(run: model.Run) -> model.Run:
    """The run without what may be long."""
    if run.current is None:
        return run
    return replace(run, current=replace(run.current, result="", failure=None), earlier=())
