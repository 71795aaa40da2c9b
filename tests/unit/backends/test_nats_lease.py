"""What a job's subject holds and how a batch is judged on it, without a server."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from anarchon_backends.nats.records import Unreadable, encode
from anarchon_backends.nats_lease._calls import Call, all_of
from anarchon_backends.nats_lease._judging import (
    GROWTH_MAX_BYTES,
    MESSAGES_MAX_BYTES,
    ROWS_MAX,
    UNFINISHED_MAX,
    Case,
    Known,
    attempts_lacking,
    drop_definitions,
    drop_runs,
    judge_claims,
    judge_completions,
    judge_control,
    judge_plans,
    judge_renewals,
    let_go,
)
from anarchon_backends.nats_lease._state import (
    DEFINITIONS_MAX,
    FAILURE_MAX_BYTES,
    LAYOUT,
    JobState,
    run_json,
    state_bytes,
    state_from,
)
from anarchon_backends.nats_lease._subjects import (
    Subjects,
    instance_of,
    job_of,
    payload_at,
    requested_at,
    run_at,
)
from anarchon_server.core import limits, machine
from anarchon_server.core.errors import OutcomeUnknown, StoreUnavailable
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CancelReason,
    CatchUpPolicy,
    Failure,
    Lease,
    Outcome,
    OverlapPolicy,
    Reason,
    Run,
    RunState,
    Trigger,
)
from anarchon_server.core.store import (
    CancelRun,
    Claim,
    ClaimOutcome,
    Completion,
    ControlOutcome,
    MissedSlot,
    Pause,
    Plan,
    Renewal,
    TokenOutcome,
    TriggerRun,
)

T0 = 1_800_000_000_000
PERIOD = 10_000
SLOT = T0 + PERIOD
MESSAGE_BYTES = 1024 * 1024  # a server's max_payload, where nobody has changed it
LONGEST = "j" * limits.NAME_MAX
LONG = Failure("E", "m" * limits.MESSAGE_MAX_BYTES, "t" * limits.TRACE_MAX_BYTES)
WORST = Failure("E" * 256, "\x00" * limits.MESSAGE_MAX_BYTES, "\x00" * limits.TRACE_MAX_BYTES)


def at(ms: int) -> machine.Moment:
    return machine.Moment(ms * 1_000, ms, "", steady=False)


def state_of(job: str = "job", schedule: str = "every:10s") -> JobState:
    return JobState(
        machine.JobRecord(job, definition_id="d", schedule_id=schedule, definition_at=T0),
        schedules={schedule: machine.ScheduleRecord(T0, T0)},
        kept={"d": machine.KeptDefinition("d", schedule, 0, T0)},
    )


def wish(slot: int = SLOT, token: str = "t", **given: Any) -> Claim:
    values: dict[str, Any] = {
        "job": "job",
        "slot": slot,
        "token": token,
        "instance_id": "host:1",
        "incarnation": "inc",
        "schedule_id": "every:10s",
        "previous_slot": slot - PERIOD,
        "overlap": OverlapPolicy.ALLOW,
        "start_deadline_ms": limits.DAY,
        "lease_ms": 30_000,
        "cancel_grace_ms": 5_000,
        "max_attempts": 3,
        "window_ms": limits.DAY,
        "expected_at": slot,
        "vouched": True,
    }
    return Claim(**(values | given))


def won(state: JobState, slot: int = SLOT, token: str = "t") -> Run:
    """The state with a run more."""
    (answer,) = judge_claims(Case(state, at(slot)), [wish(slot, token)])
    assert answer.outcome is ClaimOutcome.WON
    return state.runs[slot]


def failed(state: JobState, slot: int = SLOT, token: str = "t", failure: Failure = LONG) -> Run:
    """The state with a run that is to be retried."""
    run = won(state, slot, token)
    state.runs[slot] = replace(run, retries=3)
    result = Completion("job", slot, token, Outcome(failure=failure), retry_in_ms=1_000)
    judge_completions(Case(state, at(slot)), [result])
    assert state.runs[slot].state is RunState.RETRYING
    return state.runs[slot]


def trigger(number: int = 1, **given: Any) -> TriggerRun:
    values: dict[str, Any] = {
        "job": "job",
        "request_id": f"r-{number}",
        "payload": b"",
        "slots": (),
        "until": SLOT + limits.HOUR,
        "overlap": OverlapPolicy.QUEUE,
        "window_ms": limits.DAY,
    }
    return TriggerRun(**(values | given))


# What the subject holds


def test_a_state_is_read_as_it_was_written() -> None:
    state = state_of()
    won(state)
    case = Case(state, at(SLOT + 31_000))
    seen: dict[str, Any] = {"seen_attempt": 1, "seen_token": "t", "expected_at": SLOT + 31_000}
    (answer,) = judge_claims(case, [wish(token="second", **seen)])
    assert answer.outcome is ClaimOutcome.WON
    plan = Plan("job", "every:10s", SLOT, tuple(MissedSlot(SLOT + n * 10, 5) for n in (1, 2)))
    judge_plans(case, [plan], frozenset())
    (missed,) = (run for run in state.runs.values() if run.slot == SLOT + 20)
    state.runs[SLOT + 7] = replace(missed, slot=SLOT + 7, state=RunState.DUE)
    judge_control(case, trigger(payload=b"p"), Known())
    state.payloads[SLOT + 31_000] = "name"
    state.moved = T0 - 1
    failure = Failure("E", "half of a character: \ud800", "\x00\n", retry_after_ms=3)
    run = state.runs[SLOT]
    assert run.current is not None
    state.runs[SLOT] = replace(
        run, current=replace(run.current, failure=failure), cancel=CancelReason.TIMEOUT
    )
    again = state_from("job", state_bytes(state))
    assert again == state
    assert set(again.past[SLOT]) == {1}
    assert again.past[SLOT][1].reason == Reason.RUNNER_LOST


def test_a_new_job_says_no_more_than_its_layout() -> None:
    empty = JobState(machine.JobRecord("job"))
    assert json.loads(state_bytes(empty)) == {"layout": LAYOUT, "runs": []}
    assert state_from("job", state_bytes(empty)) == empty


@pytest.mark.parametrize(
    "spoilt",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"record":{"floor":"deep"}}',
        b'{"runs":{"x":{}}}',
        b'{"runs":{"1":{"trigger":"schedule","state":"odd"}}}',
        b'{"runs":{"1":{"state":"skipped"}}}',
        b'{"schedules":{"s":[1]}}',
        b'{"past":{"1":{"1":{"attempt":true}}}}',
        b'{"layout":2}',
        b'{"layout":"two","runs":[]}',
        b'{"layout":2,"runs":{"1":{}}}',
        b'{"layout":2,"runs":[[[],{"trigger":"schedule","state":"due"}]]}',
        b'{"layout":2,"runs":[[[1,"x"],{"trigger":"schedule","state":"due"}]]}',
        b'{"layout":2,"runs":[[[1],{"trigger":"schedule","state":"odd"}]]}',
        b'{"layout":2,"runs":[],"payloads":[1]}',
    ],
)
def test_what_somebody_spoilt_is_said_and_not_guessed_at(spoilt: bytes) -> None:
    with pytest.raises(Unreadable, match="the job 'job' in the store is not as Anarchon writes it"):
        state_from("job", spoilt)


def test_fields_of_a_later_version_are_passed_over() -> None:
    shown = json.loads(state_bytes(state_of()))
    shown["record"]["later"] = 1
    shown["later"] = {}
    assert state_from("job", encode(shown)) == state_of()


# As the version before wrote it: a run that was taken over, and two missed slots.
LAYOUT_1 = (
    b'{"record":{"fence":1800000041000000,"definition_id":"d","schedule_id":"every:10s",'
    b'"definition_at":1800000000000},"moved":1799999999999,"schedules":{"every:10s":[1800000000000,'
    b'1800000010020]},"definitions":{"d":["every:10s",0,1800000000000]},"runs":{"1800000010000":{'
    b'"trigger":"schedule","state":"claimed","current":{"attempt":2,"token":"second",'
    b'"fence":1800000041000000,"instance_id":"host:1","incarnation":"inc","cause":"takeover",'
    b'"state":"claimed","claimed_at":1800000041000},"lease":{"until":1800000071000,'
    b'"length_ms":30000,"end_at":1800000071000},"lost":1,"max_attempts":3,"window_ms":86400000,'
    b'"cancel_grace_ms":5000}},"missed":{"1800000041000":[1800000010010,1800000010020]},"past":{'
    b'"1800000010000":{"1":{"attempt":1,"token":"t","fence":1800000010000000,'
    b'"instance_id":"host:1","incarnation":"inc","cause":"claim","state":"interrupted",'
    b'"claimed_at":1800000010000,"reason":"runner_lost","ended_at":1800000040000}}}}'
)


def test_a_subject_of_layout_1_is_read_and_written_in_the_present_one() -> None:
    state = state_from("job", LAYOUT_1)
    assert sorted(state.runs) == [SLOT, SLOT + 10, SLOT + 20]
    run, missed = state.runs[SLOT], state.runs[SLOT + 20]
    assert (run.token, run.lost, run.retries) == ("second", 1, 0)
    assert (missed.state, missed.reason) == (RunState.SKIPPED, Reason.MISSED)
    assert (state.moved, state.past[SLOT][1].token) == (T0 - 1, "t")
    assert (state.settled("every:10s"), state.record.paused_at) == (SLOT + 20, None)
    forward = json.loads(state_bytes(state))
    assert forward["layout"] == LAYOUT
    assert "missed" not in forward
    assert state_from("job", state_bytes(state)) == state


def test_who_knows_layout_1_alone_cannot_read_the_present_one() -> None:
    """Nor write it then, which would clear a pause: it took `runs` for an object."""
    shown = json.loads(state_bytes(JobState(machine.JobRecord("job", paused_at=T0))))
    with pytest.raises(AttributeError):
        shown.get("runs", {}).items()


def test_a_later_layout_is_refused() -> None:
    shown = json.loads(state_bytes(state_of())) | {"layout": LAYOUT + 1}
    with pytest.raises(Unreadable, match=r"has the layout 3, and this version .* none after 2"):
        state_from("job", encode(shown))


def test_s20_thousands_of_slots_that_were_missed_or_wait_take_few_bytes() -> None:
    """Ten thousand are caught up, and give way to ten thousand others."""
    state = state_of()
    most = limits.CATCH_UP_LIMIT_MAX
    for begun in (0, most):
        slots = tuple(MissedSlot(SLOT + (begun + n) * PERIOD, 1) for n in range(most))
        settled = state.settled("every:10s")
        assert settled is not None
        plan = Plan("job", "every:10s", settled, slots, limit=most)
        plan = replace(plan, catch_up=CatchUpPolicy.ALL, window_ms=limits.DAY * 366)
        now = at(SLOT + (begun + most + 1) * PERIOD)
        (answer,) = judge_plans(Case(state, now), [plan], frozenset())
        assert (answer.due, answer.missed) == (most, begun)
    assert len(state.caught_up()) == most
    judge_control(Case(state, now), Pause("job"), Known())
    assert (len(state.runs), state.caught_up()) == (2 * most, [])
    assert len(state_bytes(state)) < 150_000
    assert state_from("job", state_bytes(state)) == state


def test_no_job_comes_near_the_size_of_a_message() -> None:
    """The most of everything at once: unfinished runs, what they were told, what waits, definitions,
    missed slots, results, failures that are to be retried.
    """
    schedule = "s" * 500
    state = state_of(LONGEST, schedule)
    for number in range(DEFINITIONS_MAX * 2):
        state.keep(machine.KeptDefinition(f"{number:032}", schedule, limits.DAY, T0 + number), ())
    long: dict[str, Any] = {
        "job": LONGEST,
        "schedule_id": schedule,
        "instance_id": "i" * limits.NAME_MAX,
        "incarnation": "f" * 32,
        "retries": 9,
    }
    for number in range(UNFINISHED_MAX):
        slot = SLOT + number * PERIOD
        token = f"{number:0{limits.TOKEN_MAX_BYTES}}"
        (answer,) = judge_claims(Case(state, at(slot)), [wish(slot, token, **long)])
        assert answer.outcome is ClaimOutcome.WON
    first = SLOT + UNFINISHED_MAX * PERIOD
    now = at(first - 1)
    for number in range(limits.TRIGGERED_WAITING_MAX):
        asked = trigger(
            job=LONGEST, request_id=f"{number:{limits.NAME_MAX}}", until=now.at + limits.HOUR
        )
        judge_control(Case(state, now), asked, Known())
        state.payloads[now.at + number] = "n" * 16
    for run in state.unfinished()[: UNFINISHED_MAX // 2]:
        with suppress(StoreUnavailable):
            message = "m" * limits.REASON_MAX_BYTES
            judge_control(Case(state, now), CancelRun(LONGEST, run.slot, message), Known())
    most = limits.CATCH_UP_LIMIT_MAX
    for earlier in (0, most):
        slots = tuple(MissedSlot(first + (earlier + n) * PERIOD, 1) for n in range(most))
        settled = state.settled(schedule)
        assert settled is not None
        plan = Plan(LONGEST, schedule, settled, slots, limit=most, window_ms=limits.DAY * 366)
        plan = replace(plan, catch_up=CatchUpPolicy.ALL)
        judge_plans(Case(state, at(first + 20_001 * PERIOD)), [plan], frozenset())
    now = at(first + 20_002 * PERIOD)
    begun = [run for run in state.unfinished() if run.unfinished]
    results = [
        Completion(LONGEST, run.slot, run.token, Outcome(failure=WORST), retry_in_ms=1)
        for run in begun[-40:]
    ]
    while len(results) > 2:
        answers = judge_completions(Case(state, now), results)
        assert 1 <= len(answers) < len(results), "the rest goes with the next write"
        assert len(state_bytes(state)) < MESSAGE_BYTES - 64 * 1024
        results = results[len(answers) :]
        write(state)


def write(state: JobState) -> None:
    """What a write leaves out."""
    for slot, _ in state.too_long():
        state.set_aside(slot)
    for run in [run for run in state.runs.values() if run.state.final and run.current]:
        state.drop(run.slot)


def test_s22_a_long_failure_that_is_to_be_retried_stands_aside() -> None:
    """And what is short stays."""
    state = state_of()
    run = failed(state)
    assert [each[0] for each in state.too_long()] == [SLOT]
    state.set_aside(SLOT)
    assert (state.aside, state.too_long()) == ({SLOT}, [])
    assert len(state_bytes(state)) < 1_000
    assert state_from("job", state_bytes(state)) == state
    with pytest.raises(KeyError):
        Case(state, at(SLOT)).run(SLOT)
    assert run.current is not None
    assert Case(state, at(SLOT), whole={SLOT: run.current}).run(SLOT) == run
    short = state_of()
    failed(short, failure=Failure("E", "m" * (FAILURE_MAX_BYTES - 40)))
    assert short.too_long() == []


def test_s22_the_retry_of_one_that_stands_aside_leaves_it_in_the_history() -> None:
    state = state_of()
    run = failed(state)
    state.set_aside(SLOT)
    assert run.current is not None
    case = Case(state, at(SLOT + 1_000), whole={SLOT: run.current})
    seen: dict[str, Any] = {"seen_attempt": 1, "seen_token": "t", "expected_at": SLOT + 1_000}
    (answer,) = judge_claims(case, [wish(token="second", **seen)])
    assert answer.outcome is ClaimOutcome.WON
    assert (state.aside, state.past) == (set(), {}), "it was copied when it was set aside"


def test_s21a_one_that_stands_aside_and_is_cancelled_is_whole_again() -> None:
    state = state_of()
    run = failed(state)
    state.set_aside(SLOT)
    assert run.current is not None
    case = Case(state, at(SLOT), whole={SLOT: run.current})
    answer = judge_control(case, CancelRun("job", SLOT), Known())
    assert answer.outcome is ControlOutcome.DONE
    ended = state.runs[SLOT]
    assert (ended.state, ended.reason, state.aside) == (RunState.FAILED, Reason.CANCELLED, set())
    assert ended.current is not None
    assert ended.current.failure == LONG


def test_s18_one_that_stands_aside_and_is_superseded_stays_so_until_it_is_copied() -> None:
    """Whoever supersedes it has not looked it up."""
    state = state_of()
    failed(state)
    state.set_aside(SLOT)
    slot = SLOT + PERIOD
    (answer,) = judge_claims(
        Case(state, at(slot)), [wish(slot, "next", overlap=OverlapPolicy.CANCEL)]
    )
    assert answer.outcome is ClaimOutcome.WON
    assert (state.runs[SLOT].reason, state.aside) == (Reason.SUPERSEDED, {SLOT})


def test_a_run_that_goes_on_leaves_its_earlier_attempts_behind() -> None:
    state = state_of()
    first = won(state)
    assert first.current is not None
    freed = replace(first, freed=Reason.HANDED_OVER, state=RunState.INTERRUPTED)
    state.save(machine.Saved(freed, (first.current,)))
    assert state.past == {}, "the newest attempt stands in the run"
    next_ = replace(first.current, attempt=2, token="second")
    state.save(machine.Saved(replace(freed, current=next_, freed=""), (next_,)))
    assert state.past == {SLOT: {1: first.current}}


def test_s10_slots_above_what_was_moved_have_their_rows_here_or_none() -> None:
    state = state_of()
    won(state, SLOT)
    won(state, SLOT + PERIOD)
    assert state.lacks([SLOT, SLOT + PERIOD, SLOT + 2 * PERIOD]) == []
    state.drop(SLOT + PERIOD)
    assert state.lacks([SLOT, SLOT + PERIOD, SLOT + 2 * PERIOD]) == [SLOT + PERIOD]
    assert state.lacks([SLOT - 5]) == [SLOT - 5], "an older slot may have been moved before"


def test_s10_a_slot_whose_row_was_not_looked_up_is_not_judged() -> None:
    state = state_of()
    state.moved = SLOT
    with pytest.raises(KeyError):
        judge_claims(Case(state, at(SLOT)), [wish()])
    (answer,) = judge_claims(Case(state, at(SLOT), found={SLOT: None}), [wish()])
    assert answer.outcome is ClaimOutcome.WON


def test_s28_definitions_beyond_the_most_go_the_one_unused_longest_first() -> None:
    state = state_of()
    for number in range(DEFINITIONS_MAX + 2):
        kept = machine.KeptDefinition(f"n{number}", f"s{number}", 0, T0 + number)
        state.schedules[f"s{number}"] = machine.ScheduleRecord(T0, T0)
        state.keep(kept, ["n0"])
    assert len(state.kept) == DEFINITIONS_MAX
    assert {"d", "n0"} <= set(state.kept), "the current one and those that are held stay"
    assert not {"n1", "n2", "n3"} & set(state.kept)
    assert set(state.schedules) == {each.schedule_id for each in state.kept.values()}


def test_keeping_few_definitions_drops_none() -> None:
    state = state_of()
    state.keep(machine.KeptDefinition("e", "every:10s", 0, T0), ())
    assert set(state.kept) == {"d", "e"}


# Judging


def test_what_would_not_fit_is_left_for_the_next_write() -> None:
    state = state_of()
    runs = [won(state, SLOT + n * PERIOD, f"t{n}") for n in range(50)]
    case = Case(state, at(SLOT + 51 * PERIOD))
    results = [
        Completion("job", run.slot, run.token, Outcome("x" * limits.RESULT_MAX_BYTES))
        for run in runs
    ]
    answers = judge_completions(case, results)
    assert {each.outcome for each in answers} == {TokenOutcome.RECORDED}
    assert GROWTH_MAX_BYTES < case.grown < 2 * GROWTH_MAX_BYTES
    assert len(answers) == GROWTH_MAX_BYTES // limits.RESULT_MAX_BYTES, "of 50"


def test_more_unfinished_runs_than_a_job_may_have_are_not_begun() -> None:
    """Their claims are asked again, until there is room or their slots are missed."""
    state = state_of()
    for number in range(UNFINISHED_MAX):
        won(state, SLOT + number, f"t{number}")
    before = state_bytes(state)
    case = Case(state, at(SLOT + UNFINISHED_MAX))
    (answer,) = judge_claims(case, [wish(SLOT + UNFINISHED_MAX, "more")])
    assert answer.outcome is ClaimOutcome.UNKNOWN
    assert (case.changed, state_bytes(state)) == (False, before)
    (answer,) = judge_claims(case, [wish(SLOT, "t0")])
    assert answer.outcome is ClaimOutcome.WON, "the repeat of a win begins nothing"


def test_what_waits_is_not_counted_as_unfinished_until_it_begins() -> None:
    state = state_of()
    judge_control(Case(state, at(SLOT)), trigger(overlap=OverlapPolicy.ALLOW), Known())
    waiting = next(iter(state.runs))
    for number in range(1, UNFINISHED_MAX + 1):
        won(state, SLOT + number, f"t{number}")
    case = Case(state, at(SLOT + UNFINISHED_MAX))
    (answer,) = judge_claims(case, [wish(waiting, "more")])
    assert (answer.outcome, case.changed) == (ClaimOutcome.UNKNOWN, False)


def test_s20_no_more_is_planned_before_what_was_is_in_the_history() -> None:
    state = state_of()
    slots = tuple(MissedSlot(SLOT + n * PERIOD, 1) for n in range(ROWS_MAX + 1))
    plan = Plan("job", "every:10s", T0, slots, limit=ROWS_MAX + 1)
    now = at(SLOT + (ROWS_MAX + 9) * PERIOD)
    judge_plans(Case(state, now), [plan], frozenset())
    another = replace(plan, settled=slots[-1].slot, slots=(MissedSlot(now.at - PERIOD, 1),))
    case = Case(state, now)
    assert (judge_plans(case, [another], frozenset()), case.changed) == ([], True), "it is written"
    state.drop(SLOT)
    (answer,) = judge_plans(Case(state, now), [another], frozenset())
    assert answer.done


def test_s21a_what_runs_that_are_to_stop_are_told_is_bounded() -> None:
    state = state_of()
    message = "m" * limits.REASON_MAX_BYTES
    for number in range(MESSAGES_MAX_BYTES // len(message) + 1):
        won(state, SLOT + number, f"t{number}")
    *some, last = sorted(state.runs)
    for slot in some[:-1]:
        judge_control(Case(state, at(last)), CancelRun("job", slot, message), Known())
    case = Case(state, at(last))
    with pytest.raises(StoreUnavailable, match="cancel without a reason"):
        judge_control(case, CancelRun("job", last, message), Known())
    assert not case.changed
    assert judge_control(case, CancelRun("job", last), Known()).outcome is ControlOutcome.DONE
    judge_control(case, CancelRun("job", some[0], message), Known())


def test_s18_news_are_what_others_wait_for() -> None:
    """A run that was freed, one that waits for nothing, a cancel, an end for which another waits."""
    state = state_of()
    run = won(state)
    case = Case(state, at(SLOT + 1))
    judge_renewals(case, [Renewal("job", SLOT, "t", "host:1", "inc", 30_000)])
    assert (case.changed, case.news) == (True, False)
    judge_control(case, trigger(), Known())
    assert not case.news, "it waits for the one that runs"
    case = Case(state, at(SLOT + 1))
    (answer,) = judge_completions(case, [Completion("job", SLOT, "t", Outcome())])
    assert answer.due is not None
    assert (answer.due.run.slot, case.news) == (SLOT + 1, True)
    state.drop(SLOT + 1)
    state.runs[SLOT] = run
    case = Case(state, at(SLOT + 1))
    (answer,) = judge_completions(case, [Completion("job", SLOT, "t", Outcome())])
    assert (answer.due, case.news) == (None, False)
    state.runs[SLOT] = run
    case = Case(state, at(SLOT + 1))
    judge_control(case, CancelRun("job", SLOT), Known())
    assert case.news


def test_s29_a_request_is_known_from_the_job_or_from_the_history() -> None:
    state = state_of()
    case = Case(state, at(SLOT))
    made = judge_control(case, trigger(), Known()).run
    assert made is not None
    again = judge_control(case, trigger(), Known()).run
    assert again == made
    other = judge_control(case, trigger(2), Known(before=replace(made.run, request_id="r-2"))).run
    assert other is not None
    assert (other.run.slot, len(state.runs)) == (made.run.slot, 1)
    free = judge_control(case, trigger(3), Known(taken={SLOT + 1, SLOT + 2})).run
    assert free is not None
    assert free.run.slot == SLOT + 3


def test_s17_the_repeat_of_an_earlier_attempts_result_is_known_from_the_history() -> None:
    state = state_of()
    run = won(state)
    assert run.current is not None
    earlier = replace(run.current, state=RunState.SUCCESS, result="done", ended_at=SLOT)
    state.runs[SLOT] = replace(run, current=replace(run.current, attempt=2, token="second"))
    result = Completion("job", SLOT, "t", Outcome("done"))
    case = Case(state, at(SLOT))
    assert attempts_lacking(case, [result]) == {SLOT: [1]}
    (answer,) = judge_completions(Case(state, at(SLOT), earlier={SLOT: [earlier]}), [result])
    assert answer.outcome is TokenOutcome.RECORDED
    (answer,) = judge_completions(Case(state, at(SLOT)), [result])
    assert answer.outcome is TokenOutcome.FENCED
    state.past[SLOT] = {1: earlier}
    assert attempts_lacking(case, [result]) == {SLOT: []}
    (answer,) = judge_completions(case, [result])
    assert answer.outcome is TokenOutcome.RECORDED


def test_a_judgement_that_changes_nothing_has_nothing_to_write() -> None:
    state = state_of()
    won(state)
    case = Case(state, at(SLOT))
    judge_claims(case, [wish(token="other"), wish(SLOT + limits.DAY, "early")])
    assert not case.changed


def test_s02_pruning_raises_the_floor_to_what_goes() -> None:
    state = state_of()
    run = won(state)
    state.runs[SLOT] = replace(run, state=RunState.SUCCESS, lease=None, ended_at=SLOT)
    case = Case(state, at(SLOT))
    drop_runs(case, [SLOT - PERIOD, SLOT])
    assert (case.changed, state.runs, state.record.floor) == (True, {}, SLOT)
    again = Case(state, at(SLOT))
    drop_runs(again, [SLOT - PERIOD])
    assert (again.changed, state.record.floor) == (False, SLOT)


def test_s28_a_definition_that_was_let_go_is_kept_from_then_on() -> None:
    state = state_of()
    case = Case(state, at(T0))
    let_go(case, ["d", "unknown"], T0 - 1)
    assert not case.changed
    let_go(case, ["d"], T0 + 5)
    assert (case.changed, state.kept["d"].held_at) == (True, T0 + 5)
    later = Case(state, at(T0 + 5 + limits.DAY))
    assert drop_definitions(later, (), limits.DAY) == (False, ())
    later = Case(state, at(T0 + 6 + limits.DAY))
    assert drop_definitions(later, ["d"], limits.DAY) == (False, ())
    assert drop_definitions(later, (), limits.DAY) == (True, ())
    assert set(state.kept) == {"d"}, "the last goes with the job"


def test_what_the_history_has_is_never_written_again() -> None:
    ended = Run("job", SLOT, Trigger.SCHEDULE, RunState.SUCCESS, ended_at=SLOT)
    state = state_of()
    state.moved = SLOT
    case = Case(state, at(SLOT), found={SLOT: ended})
    with pytest.raises(AssertionError):
        case.save([machine.Saved(ended)])


def test_growth_is_counted_in_bytes() -> None:
    case = Case(state_of(), at(SLOT))
    attempt = Attempt(1, "t", 1, "i", "f", AttemptCause.CLAIM, RunState.SUCCESS, 1, result="é" * 99)
    run = Run("job", SLOT, Trigger.SCHEDULE, RunState.SUCCESS, current=attempt, ended_at=SLOT)
    case.save([machine.Saved(run)])
    assert case.grown > 2 * 99
    assert case.grown == len(encode([run_json(run)]))


def test_a_lease_is_read_as_it_was_written() -> None:
    state = state_of()
    lease = Lease(SLOT + 1, 30_000, SLOT + 2)
    state.runs[SLOT] = replace(won(state), lease=lease)
    assert state_from("job", state_bytes(state)).runs[SLOT].lease == lease


# Subjects


@pytest.mark.parametrize("request_id", ["a.b", "*", ">", "a b", "\n", "é", "x" * 128])
def test_s29_a_request_may_be_named_anything(request_id: str) -> None:
    subjects = Subjects("an", "default")
    subject = subjects.request("a.b", SLOT, request_id)
    assert requested_at(subject) == SLOT
    assert subject.split(".")[-1] == subjects.requests("a.b", request_id).split(".")[-1]
    assert subject != subjects.request("a.b", SLOT, request_id + " ")
    assert len(subject.split(".")) == 8


def test_s29_a_payload_is_told_from_runs_and_attempts() -> None:
    subjects = Subjects("an", "default")
    subject = subjects.payload("a.b", SLOT, "f0f0")
    assert payload_at(subject) == (SLOT, "f0f0")
    shapes = {
        tuple(subject.split(".")[6:])
        for subject in (subjects.payload("a.b", SLOT, "f"), subjects.run("a.b", SLOT))
    }
    assert shapes == {("payload", "f"), ("0",)}


@pytest.mark.parametrize("name", ["a.b", "a:b", "a/b", "a_b", "a-b", "a", "x" * 128, "a.b.c"])
def test_s32_names_come_back_from_subjects(name: str) -> None:
    subjects = Subjects("an", "name.space")
    assert job_of(subjects.job(name)) == name
    assert run_at(subjects.run(name, SLOT)) == (name, SLOT)
    assert instance_of(subjects.instance(name, "f.f")) == (name, "f.f")
    assert all(subject.count(".") == 4 for subject in (subjects.job(name), subjects.job("a")))


def test_s31_what_ends_where_in_a_subject_is_certain() -> None:
    subjects = {
        Subjects("an", namespace).job(job)
        for namespace, job in (("a", "b:c"), ("a:b", "c"), ("a.b", "c"), ("a", "b.c"), ("a", "b/c"))
    }
    assert len(subjects) == 5


def test_news_are_kept_by_no_stream() -> None:
    subjects = Subjects("an", "default")
    assert subjects.all == "an.lease.>"
    assert not subjects.news.startswith("an.lease.")


# The time of a call


class SlowLeader:
    """A leader that says its time and whose answer is under way for `on_its_way_ms`."""

    def __init__(self, clock: HandClock, at: str, on_its_way_ms: int) -> None:
        self._clock, self._at, self._on_its_way_ms = clock, at, on_its_way_ms
        self.connection = self

    def until(self) -> float:
        return asyncio.get_running_loop().time() + 10

    async def info(self, stream: str, until: float, asked: object) -> dict[str, Any]:
        await asyncio.sleep(0)
        self._clock.boot += self._on_its_way_ms
        return {"ts": self._at, "state": {"subjects": {stream: 1}}, "asked": asked}


@dataclass
class HandClock:
    """A machine's clocks. What its wall clock shows is nothing to go by."""

    wall: int = 1
    boot: int = 5_000
    boot_id: str = "b"

    def wall_us(self) -> int:
        return self.wall

    def boot_ms(self) -> int:
        return self.boot


async def test_s15_a_call_reckons_with_what_the_leaders_clock_shows_at_the_least() -> None:
    """Its answer took 1.9 s: by then that clock is between that and 1.9 s later."""
    clock = HandClock()
    leader = SlowLeader(clock, "2027-01-15T08:00:00.25Z", 1_900)
    call = Call(leader, "s", clock, listed="x")  # type: ignore[arg-type]
    assert (await call.moment()).at == T0 + 250
    assert await call.listed() == ["s"]
    clock.boot += 100
    now = await call.moment()
    assert (now.at, now.lease_at, now.steady) == (T0 + 350, T0 + 350, False)
    assert await call.middle() == T0 + 350 - 1_000


async def test_a_virtual_time_is_that_of_its_clock() -> None:
    clock = HandClock(wall=T0 * 1_000)
    leader = SlowLeader(clock, "2020-01-01T00:00:00Z", 7)
    call = Call(leader, "s", clock, virtual=True)  # type: ignore[arg-type]
    assert (await call.moment()).at == await call.middle() == T0


async def test_s11_what_fails_after_a_write_is_unknown_and_what_fails_before_is_not() -> None:
    async def fail(call: Call) -> None:
        raise StoreUnavailable("away")

    async def fail_half_way(call: Call) -> None:
        call.wrote = True
        raise StoreUnavailable("away")

    clock = HandClock()
    for work, kind in ((fail, StoreUnavailable), (fail_half_way, OutcomeUnknown)):
        call = Call(SlowLeader(clock, "2027-01-15T08:00:00Z", 1), "s", clock)  # type: ignore[arg-type]
        with pytest.raises(kind, match="away"):
            await call.run(work)


async def test_of_several_failures_the_one_that_leaves_most_open_is_told() -> None:
    ended: list[int] = []

    async def work(number: int) -> int:
        await asyncio.sleep(0)
        if number == 1:
            raise StoreUnavailable("surely not")
        if number == 2:
            raise OutcomeUnknown("perhaps")
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(number)
        return number

    with pytest.raises(OutcomeUnknown, match="perhaps"):
        await all_of([work(number) for number in range(4)])
    assert ended == [0, 3], "nothing goes on behind the caller's back"
    assert await all_of([work(0), work(3)]) == [0, 3]
