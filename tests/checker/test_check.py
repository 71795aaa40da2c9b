"""The checker can tell: for each rule a small history that keeps it, and one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.checker.check import about, check
from tests.checker.events import (
    AbleFrom,
    AppDied,
    AppFroze,
    AppThawed,
    AssignmentRefused,
    ClaimWon,
    ClockStepped,
    Event,
    HandlerEnded,
    HandlerStarted,
    HandlerStepped,
    HandlerTold,
    HistoryEnded,
    InstanceDied,
    JobKnown,
    LeasesEnded,
    Note,
    ResultReceipt,
    RunSaved,
    ServedFrom,
    ServedUntil,
    SlotDue,
    UnableFrom,
    from_lines,
    shown,
    to_lines,
)

SLOT = 10_000
LEASE = 3_000
JOB = JobKnown(
    at=0,
    job="job",
    overlap=False,
    max_attempts=2,
    margin_ms=500,
    takeover_ms=1_000,
    handover_ms=1_000,
    witness_ms=1_000,
    keeps_ms=1_000,
    cancel_ms=4_000,
    clock_error_ms=0,
    clock_learned_ms=2_000,
    timeout_ms=2_000,
)
DUE = SlotDue(SLOT, "job", "every 10s", SLOT, 5_000, SLOT + 5_001, required=True, exact=True)
END = HistoryEnded(40_000)
ABLE = AbleFrom(0, "a", "job", "every 10s")

CLAIMED = RunSaved(
    at=SLOT,
    store_at=SLOT,
    job="job",
    slot=SLOT,
    state="claimed",
    reason="",
    attempt=1,
    token="t1",
    fence=1,
    instance="a",
    incarnation="a.1",
    freed="",
    cancel="",
    retry_at=None,
    failed=0,
    lease_until=SLOT + LEASE,
    blocking_slot=0,
    covered=0,
    by="claim",
    by_token="t1",
    by_incarnation="a.1",
    adopt=False,
)
STARTED = HandlerStarted(
    SLOT + 10, SLOT + 10, "job", SLOT, 1, "t1", 1, "app", SLOT + 1_500, obeys=True
)
STEPPED = HandlerStepped(SLOT + 100, "job", SLOT, "t1", 1, "app", SLOT + 1_500)
ENDED = HandlerEnded(SLOT + 500, "t1", "app")
RECEIPT = ResultReceipt(SLOT + 520, "t1", "recorded")


def saved(at: int, before: RunSaved = CLAIMED, **changes: Any) -> RunSaved:
    """The run as it is saved at that moment; its lease runs from then."""
    values = {"at": at, "store_at": at, "lease_until": at + LEASE, "by": "beat", **changes}
    return replace(before, **values)


DONE = saved(SLOT + 510, state="success", by="complete", lease_until=None)
RETRYING = saved(SLOT + 510, state="retrying", by="complete", retry_at=SLOT + 1_510)
WAITING = replace(CLAIMED, state="due", attempt=0, token="", fence=0, lease_until=None)
GOOD = (JOB, DUE, ABLE, CLAIMED, STARTED, STEPPED, ENDED, DONE, RECEIPT, END)
LOST = saved(SLOT + 200, state="interrupted", freed="runner_lost", by="release")
SECOND = saved(
    SLOT + 300,
    attempt=2,
    token="t2",
    fence=2,
    incarnation="b.1",
    instance="b",
    by="claim",
    by_token="t2",
    by_incarnation="b.1",
)


def rules(*events: Event) -> set[str]:
    """The rules that a history breaks."""
    return {violation.rule for violation in check(events)}


def without(*dropped: Event) -> tuple[Event, ...]:
    """The good history but for these."""
    return tuple(event for event in GOOD if event not in dropped)


def instead(**changed: Event) -> tuple[Event, ...]:
    """The good history with some events replaced, by their names in this module."""
    return tuple(
        next((new for name, new in changed.items() if globals()[name] is event), event)
        for event in GOOD
    )


def test_a_run_that_was_claimed_run_and_recorded_breaks_nothing() -> None:
    assert check(GOOD) == []


def counted(covered: int) -> RunSaved:
    """A row for so many missed slots."""
    missed: dict[str, Any] = {"state": "skipped", "reason": "missed", "token": "", "by": "settle"}
    return saved(39_000, covered=covered, lease_until=None, **missed)


BROKEN: dict[str, tuple[str, tuple[Event, ...]]] = {
    "a final state changes": ("I3", (*GOOD[:-1], saved(SLOT + 900, DONE, state="failed"), END)),
    "an attempt is skipped": ("I2", (JOB, CLAIMED, LOST, replace(SECOND, attempt=3), END)),
    "a token is used again": (
        "I2",
        (JOB, CLAIMED, LOST, replace(CLAIMED, slot=SLOT + 1, at=SLOT + 300, fence=5), END),
    ),
    "a fence does not grow": ("F4", (JOB, CLAIMED, LOST, replace(SECOND, fence=1), END)),
    "taken over with a live lease": ("I5", (JOB, CLAIMED, SECOND, END)),
    "an attempt too many": (
        "S19",
        (replace(JOB, max_attempts=1), CLAIMED, LOST, SECOND, END),
    ),
    "exhausted too soon": (
        "S19",
        (JOB, CLAIMED, saved(14_000, state="failed", reason="attempts_exhausted", by="claim"), END),
    ),
    "a lease shrinks": ("F8", (JOB, CLAIMED, saved(SLOT + 100, lease_until=SLOT + 200), END)),
    "renewed by another": ("F7", (JOB, CLAIMED, saved(SLOT + 100, by_incarnation="b.1"), END)),
    "completed by another": ("F7", instead(DONE=replace(DONE, by_token="t0"))),
    "renewed long after its cancel": (
        "S21a",
        (JOB, CLAIMED, *(saved(SLOT + n, cancel="timeout") for n in range(0, 9_000, 1_000)), END),
    ),
    "planned before its deadline": (
        "S20",
        (JOB, DUE, saved(SLOT + 100, state="skipped", reason="missed", token="", by="settle"), END),
    ),
    "claimed after its deadline": ("F10", (JOB, DUE, saved(SLOT + 5_100, by="claim"), END)),
    "retried after a permanent failure": (
        "S22",
        (JOB, CLAIMED, STARTED, replace(ENDED, permanent=True), RETRYING, END),
    ),
    "retried sooner than asked for": (
        "S22",
        (JOB, CLAIMED, STARTED, replace(ENDED, retry_after_ms=3_000), RETRYING, END),
    ),
    "skipped for nothing": (
        "S18",
        (JOB, saved(SLOT, state="skipped", reason="overlap", token="", blocking_slot=1), END),
    ),
    "left waiting": ("S18", (JOB, ABLE, WAITING, END)),
    "left waiting after the clock came to its slot again": (
        "S18",
        (
            JOB,
            ABLE,
            replace(WAITING, at=SLOT - 5_000),
            ClockStepped(SLOT - 4_000, -5_000),
            END,
        ),
    ),
    "told WON without having won": ("F1", (*GOOD, ClaimWon(SLOT, "job", SLOT, 1, "t9", 1, "b.1"))),
    "started twice": ("I1", (JOB, CLAIMED, STARTED, STARTED, END)),
    "started early": (
        "I7",
        (
            JOB,
            replace(CLAIMED, at=SLOT - 100, store_at=SLOT - 100),
            replace(STARTED, at=SLOT - 1, store_at=SLOT - 1),
        ),
    ),
    "started early long after the clock was set back": (
        "I7",
        (
            JOB,
            ClockStepped(SLOT - 4_000, -500),
            AbleFrom(SLOT - 3_000, "a", "job", "every 10s"),
            replace(CLAIMED, store_at=SLOT - 310),
            replace(STARTED, store_at=SLOT - 300),
            ENDED,
            DONE,
            RECEIPT,
            END,
        ),
    ),
    "a step for a run that is another's": ("I4", (JOB, CLAIMED, LOST, SECOND, STEPPED, END)),
    "a step after the result": (
        "I4",
        (*without(STEPPED, END), replace(STEPPED, at=SLOT + 700), END),
    ),
    "a step without trust": ("F16", instead(STEPPED=replace(STEPPED, trust_until=SLOT + 50))),
    "trust beyond the lease": ("F6", instead(STEPPED=replace(STEPPED, trust_until=SLOT + 2_501))),
    "a step after a later run's": (
        "F2",
        (
            JOB,
            CLAIMED,
            saved(SLOT + 50, CLAIMED, slot=20_000, token="t2", fence=2, by="claim"),
            replace(STEPPED, at=SLOT + 60, slot=20_000, token="t2", fence=2),
            STEPPED,
            END,
        ),
    ),
    "started beside one that obeys": (
        "F16",
        (
            JOB,
            CLAIMED,
            STARTED,
            LOST,
            SECOND,
            replace(STARTED, at=SLOT + 310, token="t2", attempt=2),
        ),
    ),
    "sent without room": ("S13", (*GOOD, AssignmentRefused(SLOT, "job", SLOT, "t1", "app"))),
    "recorded, and not there": ("S17", without(DONE)),
    "missed though somebody could": ("F3", (JOB, DUE, ABLE, END)),
    "neither row nor count": ("F14", (JOB, DUE, END)),
    "counted in a row that can count no more, and was not there": (
        "F14",
        (JOB, replace(DUE, slot=5_000), DUE, counted(10_000), END),
    ),
    "not counted in a row that could": (
        "F14",
        (
            JOB,
            *(replace(DUE, slot=slot) for slot in range(SLOT - 10_000, SLOT)),
            counted(9_999),
            END,
        ),
    ),
    "counted twice": (
        "F14",
        (*GOOD, saved(39_000, slot=5_000, state="skipped", reason="missed", token="", covered=3)),
    ),
    "taken over too late": ("F11", (JOB, ABLE, CLAIMED, END)),
    "not taken up when it was freed": ("F12", (JOB, ABLE, CLAIMED, LOST, END)),
    "lapsed though its holder was well": (
        "S15",
        (JOB, ABLE, CLAIMED, saved(14_000, SECOND, by="claim"), END),
    ),
    "not told that its lease ends": ("I8", (JOB, CLAIMED, STARTED, END)),
    "renewed though nobody runs it": (
        "S19",
        (JOB, CLAIMED, *(saved(at) for at in range(12_000, 40_000, 2_000)), END),
    ),
    "a result without a receipt": ("S27", without(RECEIPT)),
    "not told of its timeout": (
        "S21",
        (JOB, ServedFrom(0, "a", "job"), CLAIMED, STARTED, replace(ENDED, at=SLOT + 3_900), END),
    ),
    "a success long after its timeout": (
        "S21",
        instead(ENDED=replace(ENDED, at=SLOT + 9_000), RECEIPT=replace(RECEIPT, at=SLOT + 9_100)),
    ),
    "a success long after its timeout, by a sidecar that did not know its job yet": (
        "S21",
        (
            JOB,
            DUE,
            CLAIMED,
            STARTED,
            InstanceDied(SLOT + 100, "a.1"),
            replace(ENDED, at=SLOT + 9_000),
            replace(DONE, at=SLOT + 9_010),
            replace(RECEIPT, at=SLOT + 9_020),
            END,
        ),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_tells_when_a_promise_is_broken(name: str) -> None:
    rule, events = BROKEN[name]
    assert rule in rules(*events)


FINE: dict[str, tuple[Event, ...]] = {
    "taken over after its end": (JOB, CLAIMED, saved(13_500, SECOND, by="claim"), END),
    "handed over, which does not count": (
        replace(JOB, max_attempts=1),
        CLAIMED,
        replace(LOST, freed="handed_over"),
        SECOND,
    ),
    "a new boot ended the lease": (JOB, CLAIMED, LeasesEnded(SLOT + 100), SECOND, END),
    "started early after the clock was set back": (
        JOB,
        ClockStepped(SLOT - 100, -500),
        CLAIMED,
        replace(STARTED, store_at=SLOT - 300),
    ),
    "started early by one that was cut off when the clock was set back": (
        JOB,
        ClockStepped(SLOT - 4_000, -500),
        AbleFrom(SLOT - 1_000, "a", "job", "every 10s"),
        replace(CLAIMED, store_at=SLOT - 310),
        replace(STARTED, store_at=SLOT - 300),
        ENDED,
        DONE,
        RECEIPT,
        END,
    ),
    "beside one that is frozen": (
        JOB,
        CLAIMED,
        STARTED,
        AppFroze(SLOT + 20, "app"),
        LOST,
        SECOND,
        replace(STARTED, at=SLOT + 310, token="t2", attempt=2, fence=2, app="other"),
        AppThawed(SLOT + 400, "app"),
    ),
    "told when it thaws": (
        JOB,
        CLAIMED,
        STARTED,
        AppFroze(SLOT + 20, "app"),
        HandlerTold(SLOT + 9_000, "t1", "lease_lost"),
        AppThawed(SLOT + 9_000, "app"),
        HandlerEnded(SLOT + 9_100, "t1", "app"),
        ResultReceipt(SLOT + 9_200, "t1", "fenced"),
        END,
    ),
    "not told of its timeout while no client could be": (
        JOB,
        ServedFrom(0, "a", "job"),
        ServedUntil(SLOT + 2_500, "a", "job"),
        CLAIMED,
        STARTED,
        saved(SLOT + 2_000),
        HandlerTold(SLOT + 3_900, "t1", "lease_lost"),
        replace(ENDED, at=SLOT + 4_000),
        ResultReceipt(SLOT + 4_100, "t1", "fenced"),
        END,
    ),
    "lapsed, for its holder was not able": (
        JOB,
        ABLE,
        UnableFrom(SLOT + 2_500, "a", "job", "every 10s"),
        CLAIMED,
        saved(14_000, SECOND, state="success", by="claim"),
        END,
    ),
    "lapsed, for its holder had died": (
        JOB,
        ABLE,
        CLAIMED,
        InstanceDied(SLOT + 2_500, "a.1"),
        saved(14_000, SECOND, state="success", by="claim"),
        END,
    ),
    "lapsed, for its application had died": (
        JOB,
        ABLE,
        CLAIMED,
        AppDied(SLOT + 20, "app", "a"),
        saved(14_000, SECOND, state="success", by="claim"),
        END,
    ),
    "dead before its lease ended": (JOB, CLAIMED, STARTED, AppDied(SLOT + 20, "app", "a"), END),
    "missed, for the clock was set forward": (
        JOB,
        ABLE,
        replace(DUE, missed_at=SLOT + 10),
        saved(SLOT + 20, store_at=90_000, state="skipped", reason="missed", token="", by="settle"),
        END,
    ),
    "retried when it asked to be": (
        JOB,
        CLAIMED,
        STARTED,
        replace(ENDED, retry_after_ms=1_000),
        RETRYING,
        RECEIPT,
        END,
    ),
    "waits, for the clock was set back and has not come to its slot again": (
        JOB,
        ABLE,
        WAITING,
        ClockStepped(SLOT + 100, -3_600_000),
        END,
    ),
    "counted in a row": (JOB, replace(DUE, slot=5_000), DUE, counted(2), END),
    "more than a row can count": (
        JOB,
        *(replace(DUE, slot=slot) for slot in range(SLOT - 10_000, SLOT)),
        DUE,
        counted(10_000),
        END,
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_the_checker_is_silent_where_a_promise_is_kept(name: str) -> None:
    assert check(FINE[name]) == []


def test_a_history_is_written_and_read_as_json_lines() -> None:
    events: list[Event] = [*GOOD, LeasesEnded(1), ClockStepped(2, -3), Note(3, "kill"), LOST]
    assert list(from_lines(to_lines(events))) == events


def test_a_violation_says_what_when_and_for_which_run() -> None:
    (violation,) = check((JOB, DUE, END))
    assert str(violation) == (
        "F14: neither a row nor counted in one (job job, slot 10000, at 15001 ms)"
    )


def test_the_history_of_a_violation_has_what_concerns_its_run() -> None:
    other = replace(CLAIMED, job="other")
    events = [JOB, replace(JOB, job="other"), CLAIMED, STARTED, other, STEPPED, ENDED, END]
    violation = next(v for v in check(events) if v.rule == "S27")
    kept = about(events, violation)
    assert other not in kept
    assert {JOB, CLAIMED, STARTED, STEPPED, ENDED} <= set(kept)
    assert len(about(events, violation, most=2)) == 2


@pytest.mark.parametrize("show", [shown], ids=["one line"])
def test_an_event_is_shown_in_one_line_without_what_it_does_not_say(
    show: Callable[[Event], str],
) -> None:
    line = show(replace(CLAIMED, token="1791633610000.0123456789abcdef.job"))
    assert "token=610000.012345.job" in line
    assert "freed" not in line
