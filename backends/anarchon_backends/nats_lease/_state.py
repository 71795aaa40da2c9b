"""What one job's subject holds: all that a decision about the job depends on.

That is its record, its schedules, which definitions are kept, and its runs: those that wait or are
unfinished, and ended ones until they stand in the history. Whatever was moved there has a slot at or
below `moved`, so a slot above it that is not here has no row. What is large and decides nothing stands
beside it: payloads, and the failures of attempts that are to be retried. Imports the machine, the
model, the records and the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from anarchon_backends.nats.records import Unreadable, decode, encode, plain, record_of
from anarchon_server.core import machine, model

LAYOUT = 2
"""How a job's subject is laid out. One of layout 1 becomes one of this with its next write."""

DEFINITIONS_MAX = 64  # of one job, besides the current one; beyond it the one unused longest goes
FAILURE_MAX_BYTES = 128  # of one that waits to be retried; beyond it it stands in the history


@dataclass(slots=True)
class JobState:
    """One job. `past` has attempts of `runs` before their newest, until they are in the history.

    `payloads` has, by slot, under which name the payload of a run stands beside the job; `aside` the
    slots of runs the failure of whose newest attempt stands in the history alone.
    """

    record: machine.JobRecord
    moved: int = -1
    schedules: dict[str, machine.ScheduleRecord] = field(default_factory=dict)
    kept: dict[str, machine.KeptDefinition] = field(default_factory=dict)
    runs: dict[int, model.Run] = field(default_factory=dict)
    past: dict[int, dict[int, model.Attempt]] = field(default_factory=dict)
    payloads: dict[int, str] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)

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
        """The runs that have not ended, and those that wait."""
        return [run for run in self.runs.values() if not run.state.final]

    def caught_up(self) -> list[model.Run]:
        """The runs that wait since an outage (S20)."""
        catch_up = model.Trigger.CATCH_UP
        return [run for run in self.runs.values() if run.waits and run.trigger is catch_up]

    def due(self) -> model.Run | None:
        """The oldest run that waits."""
        waiting = (run for run in self.runs.values() if run.waits)
        return min(waiting, key=lambda run: run.slot, default=None)

    def requested(self, request_id: str) -> model.Run | None:
        """The run that was triggered by this request (S29)."""
        if not request_id:
            return None
        return next((run for run in self.runs.values() if run.request_id == request_id), None)

    def save(self, saved: machine.Saved) -> None:
        """Takes in a run, with those of its attempts that changed.

        An attempt whose failure stands aside is in the history already.
        """
        run = saved.run
        before = self.runs.get(run.slot)
        changed = list(saved.attempts)
        if before is not None and before.current is not None:
            if run.slot not in self.aside:
                changed.insert(0, before.current)
            elif run.current != before.current:
                self.aside.discard(run.slot)
        earlier = {each.attempt: each for each in changed if each.attempt < run.attempt}
        if earlier:
            self.past.setdefault(run.slot, {}).update(earlier)
        self.runs[run.slot] = run

    def drop(self, slot: int) -> None:
        """Forgets a run. That it was there is known from the history, or from the floor."""
        self.runs.pop(slot, None)
        self.past.pop(slot, None)
        self.payloads.pop(slot, None)
        self.aside.discard(slot)
        self.moved = max(self.moved, slot)

    def too_long(self) -> list[tuple[int, model.Attempt]]:
        """The attempts, by slot, whose failures are too long to stay until they are retried."""
        return [
            (run.slot, run.current)
            for run in self.runs.values()
            if run.state is model.RunState.RETRYING
            and run.current is not None
            and run.current.failure is not None
            and len(encode(plain(run.current.failure))) > FAILURE_MAX_BYTES
        ]

    def set_aside(self, slot: int) -> None:
        """Leaves out the failure of a run's newest attempt, which the history has."""
        run = self.runs[slot]
        assert run.current is not None, "it has failed"
        self.runs[slot] = replace(run, current=replace(run.current, failure=None))
        self.aside.add(slot)

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
            payloads=dict(self.payloads),
            aside=set(self.aside),
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


_WHAT_IT_IS = attrgetter(*(f.name for f in fields(model.Run) if f.name not in ("job", "slot")))


def _grouped(runs: Iterable[model.Run]) -> list[list[Any]]:
    """The runs by slot, as [[slot, gap to the next, ...], run]: those that were never begun are often
    alike but for their slots, and may be thousands.
    """
    groups: dict[Any, list[model.Run]] = {}
    for run in sorted(runs, key=lambda run: run.slot):
        key = _WHAT_IT_IS(run) if run.current is None else run.slot
        groups.setdefault(key, []).append(run)
    return [[_gaps([run.slot for run in alike]), run_json(alike[0])] for alike in groups.values()]


def _gaps(slots: Sequence[int]) -> list[int]:
    return [slots[0], *(after - before for before, after in pairwise(slots))]


def _ungrouped(job: str, groups: Iterable[Any]) -> dict[int, model.Run]:
    runs: dict[int, model.Run] = {}
    for gaps, shown in groups:
        first = run_from(job, int(gaps[0]), shown)
        runs |= {slot: replace(first, slot=slot) for slot in accumulate(map(int, gaps))}
    return runs


def state_bytes(state: JobState) -> bytes:
    """The state as its subject holds it.

    A sidecar that knows layout 1 alone cannot read it, as `runs` is a list: it changes nothing then.
    Were it to write, it would clear what it does not know, such as a pause.
    """
    record = plain(state.record)
    del record["job"]
    shown: dict[str, Any] = {
        "layout": LAYOUT,
        "record": record,
        "moved": state.moved,
        "schedules": {name: [s.since, s.settled] for name, s in state.schedules.items()},
        "definitions": {
            name: [each.schedule_id, each.window_ms, each.held_at]
            for name, each in state.kept.items()
        },
        "runs": _grouped(state.runs.values()),
        "past": {
            str(slot): {str(number): plain(each) for number, each in attempts.items()}
            for slot, attempts in state.past.items()
        },
        "payloads": {str(slot): name for slot, name in state.payloads.items()},
    }
    if state.aside:
        shown["aside"] = sorted(state.aside)
    return encode({name: value for name, value in shown.items() if value not in ({}, -1)})


def state_from(job: str, data: bytes) -> JobState:
    """The state that `state_bytes` wrote, of this layout or an earlier one. Raises `Unreadable`."""
    return decode(f"the job {job!r}", data, lambda shown: _state(job, shown))


def _state(job: str, shown: Mapping[str, Any]) -> JobState:
    layout = int(shown.get("layout", 1))
    if layout > LAYOUT:
        raise Unreadable(
            f"the job {job!r} in the store has the layout {layout}, and this version of Anarchon "
            f"knows none after {LAYOUT}: use the version of Anarchon that wrote it"
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
        _runs_of_layout_1(job, shown) if layout == 1 else _ungrouped(job, shown["runs"]),
        past,
        {int(slot): str(name) for slot, name in shown.get("payloads", {}).items()},
        {int(slot) for slot in shown.get("aside", ())},
    )


def _runs_of_layout_1(job: str, shown: Mapping[str, Any]) -> dict[int, model.Run]:
    """The runs by slot; of those that were missed, the slots by when that was found."""
    runs = {int(slot): run_from(job, int(slot), run) for slot, run in shown.get("runs", {}).items()}
    for ended_at, slots in shown.get("missed", {}).items():
        for slot in slots:
            runs[slot] = model.Run(
                job,
                slot,
                model.Trigger.SCHEDULE,
                model.RunState.SKIPPED,
                model.Reason.MISSED,
                ended_at=int(ended_at),
            )
    return runs
