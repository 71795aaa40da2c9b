"""Batches of one job, judged by `machine` on what its subject holds: pure, nothing is written here.

Imports the machine, `control`, the limits, the model, the port, the records, the state and the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anarchon_backends.nats.records import encode, plain
from anarchon_backends.nats_lease._state import JobState, run_json
from anarchon_server.core import control, machine, model
from anarchon_server.core import store as port
from anarchon_server.core.errors import StoreUnavailable
from anarchon_server.core.limits import HOUR

# These keep a subject below the size of a message, 1 MiB by default: what one write may add to it,
# how many runs of a job may be unfinished at once (with overlap `allow`), how many rows it has before
# more slots are planned, and what the unfinished runs were told with their cancels.
GROWTH_MAX_BYTES = 128 * 1024
UNFINISHED_MAX = 250
ROWS_MAX = 12_000
MESSAGES_MAX_BYTES = 64 * 1024

_HELD_LATELY_MS = HOUR  # less than any history is kept


@dataclass(slots=True)
class Case:
    """One job before the judge: what its subject holds, and what the history says besides.

    `found` has the rows of slots that the subject does not hold any more (None: there is none),
    `earlier` attempts of runs besides those that it holds, `whole` the newest attempts of those whose
    failures stand aside. Whatever is decided goes into `state`, which is the case's own; `changed`
    says whether there is anything to write, `news` whether others should look soon, `grown` by how
    many bytes about the subject has grown.
    """

    state: JobState
    now: machine.Moment
    found: Mapping[int, model.Run | None] = field(default_factory=dict)
    earlier: Mapping[int, Sequence[model.Attempt]] = field(default_factory=dict)
    whole: dict[int, model.Attempt] = field(default_factory=dict)
    changed: bool = False
    news: bool = False
    grown: int = 0

    @property
    def full(self) -> bool:
        """Whether what is decided has to be written before more is judged."""
        return self.grown > GROWTH_MAX_BYTES

    def is_crowded(self) -> bool:
        """Whether rows have to move to the history before more are made: then there is a write."""
        runs = self.state.runs.values()
        crowded = len(runs) > ROWS_MAX and any(run.state.final for run in runs)
        self.changed = self.changed or crowded
        return crowded

    @property
    def unfinished(self) -> list[model.Run]:
        """The job's runs that have not ended, and those that wait."""
        return self.state.unfinished()

    def run(self, slot: int) -> model.Run | None:
        """The slot's row."""
        run = self.state.runs.get(slot)
        if run is not None and slot in self.state.aside:
            return replace(run, current=self.whole[slot])
        if run is not None or slot > self.state.moved:
            return run
        return self.found[slot]

    def save(self, saved: Iterable[machine.Saved]) -> None:
        """Takes in runs."""
        for each in saved:
            assert self.found.get(each.run.slot) is None, "what the history has is final"
            self.state.save(each)
            self.changed = True
            goes_on = each.ends_a_run and self.state.due() is not None
            self.news = self.news or each.is_news or goes_on
            past = [plain(a) for a in each.attempts if a.attempt < each.run.attempt]
            self.grown += len(encode([run_json(each.run), *past]))

    def replace_record(self, record: machine.JobRecord) -> None:
        """Takes in the job's record."""
        if record != self.state.record:
            self.state.record = record
            self.changed = True

    def settle(self, schedule_id: str, settled: int | None) -> None:
        """Takes in a schedule's `settled`."""
        if settled != self.state.settled(schedule_id):
            self.state.settle(schedule_id, settled)
            self.changed = True


def attempts_lacking(case: Case, completions: Iterable[port.Completion]) -> dict[int, list[int]]:
    """By slot, the earlier attempts that a result may be the repeat of, and that are not here."""
    wanted: dict[int, list[int]] = {}
    for each in completions:
        run = case.run(each.slot)
        if run is not None and run.attempt > 1 and run.token != each.token:
            here = case.state.past.get(each.slot, {})
            wanted[each.slot] = [number for number in range(1, run.attempt) if number not in here]
    return wanted


# --- Judging -----------------------------------------------------------------------------


def judge_claims(case: Case, claims: Sequence[port.Claim]) -> list[port.ClaimAnswer]:
    """Decides claims, in their order, until the case is full."""
    answers: list[port.ClaimAnswer] = []
    for claim in claims:
        if case.full:
            break
        answers.append(_judge_claim(case, claim))
    return answers


def _judge_claim(case: Case, claim: port.Claim) -> port.ClaimAnswer:
    state = case.state
    unfinished = case.unfinished
    verdict = machine.judge_claim(
        claim,
        case.now,
        state.record,
        state.settled(claim.schedule_id),
        case.run(claim.slot),
        [run for run in unfinished if run.slot != claim.slot],
    )
    before = state.runs.get(claim.slot)
    begins = verdict.answer.outcome is port.ClaimOutcome.WON and (before is None or before.waits)
    if begins and sum(run.unfinished for run in unfinished) >= UNFINISHED_MAX:
        return port.ClaimAnswer(port.ClaimOutcome.UNKNOWN)  # asked again, until the slot is missed
    case.save(verdict.saved)
    case.replace_record(verdict.job)
    case.settle(claim.schedule_id, verdict.settled)
    return verdict.answer


def judge_plans(
    case: Case, plans: Sequence[port.Plan], taken: frozenset[int]
) -> list[port.PlanAnswer]:
    """Decides plans. `taken` are the slots that have a row in the history."""
    answers: list[port.PlanAnswer] = []
    for plan in plans:
        if case.full or case.is_crowded():
            break
        slots = {missed.slot for missed in plan.slots}
        verdict = machine.judge_plan(
            plan,
            case.now,
            case.state.record,
            case.state.settled(plan.schedule_id),
            frozenset(slots & (taken | case.state.runs.keys())),
            case.state.caught_up(),
        )
        case.save(verdict.saved)
        case.settle(plan.schedule_id, verdict.answer.settled)
        answers.append(verdict.answer)
    return answers


def judge_renewals(case: Case, renewals: Sequence[port.Renewal]) -> list[port.TokenAnswer]:
    """Decides renewals and adoptions, until the case is full."""
    answers: list[port.TokenAnswer] = []
    for each in renewals:
        if case.full:
            break
        verdict = machine.judge_renewal(each, case.now, case.run(each.slot))
        answers.append(_taken_in(case, verdict))
    return answers


def judge_completions(case: Case, completions: Sequence[port.Completion]) -> list[port.TokenAnswer]:
    """Decides results, until the case is full."""
    answers: list[port.TokenAnswer] = []
    for each in completions:
        if case.full:
            break
        attempts = [
            *case.state.past.get(each.slot, {}).values(),
            *case.earlier.get(each.slot, ()),
        ]
        past = next((a for a in attempts if a.token == each.token), None)
        verdict = machine.judge_completion(each, case.now, case.run(each.slot), past)
        answer = _taken_in(case, verdict)
        if verdict.saved is not None and verdict.saved.ends_a_run:
            due = case.state.due()
            answer = replace(answer, due=machine.view(due, case.now) if due else None)
        answers.append(answer)
    return answers


def judge_releases(case: Case, releases: Sequence[port.Release]) -> list[port.TokenAnswer]:
    """Decides releases, until the case is full."""
    answers: list[port.TokenAnswer] = []
    for each in releases:
        if case.full:
            break
        verdict = machine.judge_release(each, case.now, case.run(each.slot))
        answers.append(_taken_in(case, verdict))
    return answers


def _taken_in(case: Case, verdict: machine.TokenVerdict) -> port.TokenAnswer:
    if verdict.saved is not None:
        case.save([verdict.saved])
    return verdict.answer


# --- What operators ask ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """What an act of an operator depends on beside the job's subject.

    `held` is what live instances hold of the job, `taken` the slots that have a row in the history,
    `before` the run there that the same request triggered.
    """

    held: tuple[machine.HeldDefinition, ...] = ()
    taken: Collection[int] = ()
    before: model.Run | None = None


def judge_control(case: Case, act: port.Control, known: Known) -> port.ControlAnswer:
    """Decides what an operator asks (S29). Raises `StoreUnavailable` for what has no room."""
    verdict = _control_verdict(case, act, known)
    if isinstance(act, port.CancelRun) and verdict.saved:
        _check_room(case, act)
    case.save(verdict.saved)
    case.replace_record(verdict.job)
    for schedule_id, settled in (verdict.settled or {}).items():
        case.settle(schedule_id, settled)
    return verdict.answer


def _control_verdict(case: Case, act: port.Control, known: Known) -> control.ControlVerdict:
    state, now, record = case.state, case.now, case.state.record
    taken = {*known.taken, *state.runs}
    match act:
        case port.Pause():
            return control.judge_pause(act, now, record, case.unfinished)
        case port.Resume():
            in_use = control.schedules_in_use(record, known.held)
            settled = {each: mark for each in in_use if (mark := state.settled(each)) is not None}
            return control.judge_resume(act, now, record, settled, taken, state.caught_up())
        case port.TriggerRun():
            here = state.requested(act.request_id)
            before = case.run(here.slot) if here else known.before
            return control.judge_trigger(act, now, record, before, taken, case.unfinished)
        case port.CancelRun():
            return control.judge_cancel(act, now, record, case.run(act.slot))


def _check_room(case: Case, act: port.CancelRun) -> None:
    told = sum(len(encode(run.cancel_message)) for run in case.unfinished if run.cancel_message)
    if told + len(encode(act.message)) > MESSAGES_MAX_BYTES:
        raise StoreUnavailable(
            f"the runs of {act.job!r} that are to stop were told so much that nothing can be added: "
            "cancel without a reason, or wait until they have ended"
        )


# --- Definitions -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holding:
    """What is held of one job. `before`: by live instances, before a registration.

    `beside`: by live instances other than the one that registers.
    """

    before: tuple[machine.HeldDefinition, ...] = ()
    beside: tuple[machine.HeldDefinition, ...] = ()


def judge_registrations(
    case: Case,
    wanted: Sequence[tuple[machine.HeldDefinition, model.Definition]],
    holding: Holding,
) -> list[port.Registration]:
    """Decides what becomes of the definitions of one job that an instance holds from now on.

    `held_at` of one that is kept is of no account before it is let go, which sets it; so a job that
    knows all this is not written. But where that is long ago, whoever prunes may be about to drop the
    definition, and must find that the job has been written.
    """
    state = case.state
    for hold, definition in wanted:
        schedule = state.schedules.get(hold.schedule_id)
        verdict = machine.judge_registration(hold, case.now, state.record, schedule, holding.before)
        case.replace_record(verdict.job)
        if verdict.schedule and verdict.schedule != schedule:
            state.schedules[hold.schedule_id] = verdict.schedule
            case.changed = True
        kept = machine.KeptDefinition(
            hold.definition_id, hold.schedule_id, definition.window_ms, held_at=case.now.at
        )
        before = state.kept.get(hold.definition_id)
        afresh = before is None or before.held_at < case.now.at - _HELD_LATELY_MS
        if before is None or afresh or replace(before, held_at=kept.held_at) != kept:
            state.keep(kept, [each.definition_id for each in (*holding.before, *holding.beside)])
            case.changed = True
    held = [*holding.beside, *(hold for hold, _ in wanted)]
    return [_registration(state, hold, held) for hold, _ in wanted]


def _registration(
    state: JobState, hold: machine.HeldDefinition, held: Sequence[machine.HeldDefinition]
) -> port.Registration:
    schedule = state.schedules.get(hold.schedule_id)
    return port.Registration(
        job=hold.job,
        current=state.record.definition_id == hold.definition_id,
        since=schedule.since if schedule else state.record.definition_at,
        settled=schedule.settled if schedule else None,
        definitions_differ=machine.definitions_differ(held),
    )


def let_go(case: Case, definition_ids: Iterable[str], at: int) -> None:
    """Notes that an instance held these definitions until `at`."""
    for definition_id in definition_ids:
        kept = case.state.kept.get(definition_id)
        if kept is not None and kept.held_at < at:
            case.state.kept[definition_id] = replace(kept, held_at=at)
            case.changed = True


# --- Pruning -----------------------------------------------------------------------------


def drop_definitions(
    case: Case, ever: Iterable[str], history_ms: int
) -> tuple[bool, tuple[str, ...]]:
    """Drops the definitions that nobody has held for long, but for the last.

    `ever` are those that instances hold, live or not. Whether even the last may go; and which went.
    """
    kept = case.state.kept
    record, gone = machine.judge_definitions(
        case.state.record, kept.values(), set(ever), case.now, history_ms
    )
    if len(gone) == len(kept):
        return True, ()
    case.replace_record(record)
    names = tuple(each.definition_id for each in gone)
    if names:
        case.state.forget(names)
        case.changed = True
    return False, names


def prune_limit(case: Case, live: Iterable[machine.HeldDefinition]) -> int:
    """The newest slot that may go while the job is in use (S2)."""
    state = case.state
    ids = {hold.definition_id for hold in live}
    settled = {name: each.settled for name, each in state.schedules.items()}
    used = machine.in_use(state.record, state.kept.values(), ids)
    return machine.prune_bound(case.now, used, settled)


def drop_runs(case: Case, slots: Sequence[int]) -> None:
    """Raises the floor to these slots, and forgets those runs of theirs that are here."""
    if slots:
        floor = max(case.state.record.floor, *slots)
        case.replace_record(replace(case.state.record, floor=floor))
    for slot in slots:
        if slot in case.state.runs:
            case.state.drop(slot)
            case.changed = True


def forget_job(case: Case) -> tuple[str, ...]:
    """Drops the job, of which no run is left: its definitions, whose ids these are."""
    names = tuple(case.state.kept)
    case.replace_record(machine.forgotten(case.state.record))
    case.state.kept.clear()
    case.state.schedules.clear()
    case.changed = True
    return names
