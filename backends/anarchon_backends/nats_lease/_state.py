"""What one job's subject holds: all that a decision about the job depends on.

That is its record, its schedules, which definitions are kept, and its runs: the unfinished ones, and
ended ones until they stand in the history. Whatever was moved there has a slot at or below `moved`,
so a slot above it that is not here has no row. Imports the machine, the model, the records and the
standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anarchon_backends.nats.records import decode, encode, plain, record_of
from anarchon_server.core import machine, model

DEFINITIONS_MAX = 64  # of one job, besides the current one; beyond it the one unused longest goes


@dataclass(slots=True)
class JobState:
    """One job. `past` has attempts of `runs` before their newest, until they are in the history."""

    record: machine.JobRecord
    moved: int = -1
    schedules: dict[str, machine.ScheduleRecord] = field(default_factory=dict)
    kept: dict[str, machine.KeptDefinition] = field(default_factory=dict)
    runs: dict[int, model.Run] = field(default_factory=dict)
    past: dict[int, dict[int, model.Attempt]] = field(default_factory=dict)

    @property
    def job(self) -> str:
        """The job's name."""
        return self.record.job

    def settled(self, schedule_id: str) -> int | None:
        """Up to where that schedule is settled. None: the job does not know it."""
        known = self.schedules.get(schedule_id)
        return known.settled if known else None

    def settle(self, schedule_id: str, settled: int | None) -> None:
        """Moves a schedule's `settled`."""
        if settled is not None:
            before = self.schedules[schedule_id]
            self.schedules[schedule_id] = replace(before, settled=settled)

    def unfinished(self) -> list[model.Run]:
        """The runs that have not ended."""
        return [run for run in self.runs.values() if not run.state.final]

    def save(self, saved: machine.Saved) -> None:
        """Takes in a run, with those of its attempts that changed."""
        run = saved.run
        before = self.runs.get(run.slot)
        changed = list(saved.attempts)
        if before is not None and before.current is not None:
            changed.insert(0, before.current)
        earlier = {each.attempt: each for each in changed if each.attempt < run.attempt}
        if earlier:
            self.past.setdefault(run.slot, {}).update(earlier)
        self.runs[run.slot] = run

    def drop(self, slot: int) -> None:
        """Forgets a run. That it was there is known from the history, or from the floor."""
        self.runs.pop(slot, None)
        self.past.pop(slot, None)
        self.moved = max(self.moved, slot)

    def lacks(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots whose rows, if they have any, stand in the history alone."""
        return sorted({slot for slot in slots if slot <= self.moved and slot not in self.runs})

    def keep(self, kept: machine.KeptDefinition, held: Iterable[str]) -> None:
        """Keeps a definition; `held` are those that instances hold, which never make room."""
        self.kept[kept.definition_id] = kept
        spared = {self.record.definition_id, kept.definition_id, *held}
        others = sorted(
            (each for each in self.kept.values() if each.definition_id not in spared),
            key=lambda each: (each.held_at, each.definition_id),
        )
        too_many = max(0, len(self.kept) - DEFINITIONS_MAX)
        self.forget([each.definition_id for each in others[:too_many]])

    def forget(self, definition_ids: Iterable[str]) -> None:
        """Drops definitions, and the schedules that no other has."""
        gone = set(definition_ids)
        if not gone:
            return
        self.kept = {name: each for name, each in self.kept.items() if name not in gone}
        used = {each.schedule_id for each in self.kept.values()}
        self.schedules = {name: each for name, each in self.schedules.items() if name in used}

    def copied(self) -> JobState:
        """A state of its own with the same content."""
        past = {slot: dict(attempts) for slot, attempts in self.past.items()}
        return replace(
            self,
            schedules=dict(self.schedules),
            kept=dict(self.kept),
            runs=dict(self.runs),
            past=past,
        )


# --- As the store keeps it ---------------------------------------------------------------


def run_json(run: model.Run) -> dict[str, Any]:
    """A run without its job and slot, which its place in the store says."""
    shown = plain(run)
    del shown["job"], shown["slot"]
    return shown


def run_from(job: str, slot: int, shown: Mapping[str, Any]) -> model.Run:
    """The run that `run_json` showed."""
    return record_of(model.Run, shown, job=job, slot=slot)


def _is_missed(run: model.Run) -> bool:
    """Whether all there is to say of the run is when it was found to be missed."""
    return run == model.Run(
        run.job,
        run.slot,
        model.Trigger.SCHEDULE,
        model.RunState.SKIPPED,
        model.Reason.MISSED,
        ended_at=run.ended_at,
    )


def state_bytes(state: JobState) -> bytes:
    """The state as its subject holds it."""
    record = plain(state.record)
    del record["job"]
    missed: dict[str, list[int]] = {}
    runs: dict[str, Any] = {}
    for slot, run in sorted(state.runs.items()):
        if _is_missed(run):
            missed.setdefault(str(run.ended_at), []).append(slot)
        else:
            runs[str(slot)] = run_json(run)
    shown: dict[str, Any] = {
        "record": record,
        "moved": state.moved,
        "schedules": {name: [s.since, s.settled] for name, s in state.schedules.items()},
        "definitions": {
            name: [each.schedule_id, each.window_ms, each.held_at]
            for name, each in state.kept.items()
        },
        "runs": runs,
        "missed": missed,
        "past": {
            str(slot): {str(number): plain(each) for number, each in attempts.items()}
            for slot, attempts in state.past.items()
        },
    }
    return encode({name: value for name, value in shown.items() if value not in ({}, -1)})


def state_from(job: str, data: bytes) -> JobState:
    """The state that `state_bytes` wrote. Raises `Unreadable`."""
    return decode(f"the job {job!r}", data, lambda shown: _state(job, shown))


def _state(job: str, shown: Mapping[str, Any]) -> JobState:
    runs = {int(slot): run_from(job, int(slot), run) for slot, run in shown.get("runs", {}).items()}
    for ended_at, slots in shown.get("missed", {}).items():
        for slot in slots:
            skipped = model.RunState.SKIPPED
            runs[slot] = model.Run(
                job,
                slot,
                model.Trigger.SCHEDULE,
                skipped,
                model.Reason.MISSED,
                ended_at=int(ended_at),
            )
    past = {
        int(slot): {int(n): record_of(model.Attempt, each) for n, each in attempts.items()}
        for slot, attempts in shown.get("past", {}).items()
    }
    return JobState(
        record_of(machine.JobRecord, shown.get("record", {}), job=job),
        shown.get("moved", -1),
        {
            name: machine.ScheduleRecord(int(since), int(settled))
            for name, (since, settled) in shown.get("schedules", {}).items()
        },
        {
            name: machine.KeptDefinition(name, str(schedule_id), int(window), int(held_at))
            for name, (schedule_id, window, held_at) in shown.get("definitions", {}).items()
        },
        runs,
        past,
    )
