"""The checker can tell on claim-only stores: what keeps each of their rules, and what breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checker.check import check
from tests.checker.events import (
    AppFroze,
    AppThawed,
    Event,
    HandlerTold,
    InstanceDied,
    ResultReceipt,
    ServedFrom,
    ServedUntil,
)
from tests.checker.test_check import (
    ABLE,
    CLAIMED,
    DUE,
    END,
    ENDED,
    JOB,
    RECEIPT,
    SECOND,
    SLOT,
    STARTED,
    STEPPED,
    rules,
    saved,
)

ALONE = replace(JOB, leases=False, overlap=True, max_attempts=1, witness_ms=4_000)
WON = replace(CLAIMED, fence=SLOT * 1_000, lease_until=None)
DONE = saved(SLOT + 510, WON, state="success", by="complete", lease_until=None)
GIVEN_UP = saved(
    SLOT + 400, WON, state="failed", reason="runner_lost", by="release", lease_until=None
)
BACK = replace(GIVEN_UP, reason="not_accepted")
NO_GRACE = replace(GIVEN_UP, reason="cancelled", cancel="requested")
CANCELLED = replace(
    WON,
    at=SLOT + 200,
    state="running",
    cancel="requested",
    by="control",
    by_token="",
    by_incarnation="",
)
TOLD = HandlerTold(SLOT + 300, "t1", "lease_lost")
SERVED = ServedFrom(0, "a", "job")
GOOD = (ALONE, DUE, ABLE, SERVED, WON, STARTED, STEPPED, ENDED, DONE, RECEIPT, END)


def test_a_run_that_was_claimed_run_and_recorded_breaks_nothing() -> None:
    assert check(GOOD) == []


BROKEN: dict[str, tuple[str, tuple[Event, ...]]] = {
    "a final state changes": ("I3", (*GOOD[:-1], saved(SLOT + 900, DONE, state="failed"), END)),
    "won twice": ("F1", (ALONE, WON, replace(WON, at=SLOT + 9, token="t2"), END)),
    "taken over": ("I2", (ALONE, WON, replace(SECOND, lease_until=None), END)),
    "another fence": ("F4", (ALONE, replace(WON, fence=SLOT), END)),
    "the repeat of a claim writes": ("F8", (ALONE, WON, saved(SLOT + 100, WON, by="claim"), END)),
    "ended by another": ("F7", (ALONE, WON, replace(DONE, by_token="t0"), END)),
    "given up by another": ("F7", (ALONE, WON, replace(GIVEN_UP, by_incarnation="b.1"), END)),
    "given up, and left open": (
        "S24",
        (ALONE, WON, replace(GIVEN_UP, state="interrupted"), END),
    ),
    "ended by an operator who did not cancel it": (
        "F7",
        (ALONE, WON, replace(CANCELLED, state="failed", cancel=""), END),
    ),
    "a step long after a cancel without grace": (
        "I4",
        (ALONE, WON, STARTED, CANCELLED, NO_GRACE, replace(STEPPED, at=SLOT + 410), END),
    ),
    "ended by a cancel while it runs": (
        "I4",
        (ALONE, WON, STARTED, replace(CANCELLED, state="failed"), STEPPED, END),
    ),
    "planned": (
        "S20",
        (ALONE, DUE, saved(SLOT + 5_100, WON, state="skipped", token="", by="settle"), END),
    ),
    "started early": (
        "I7",
        (
            ALONE,
            replace(WON, at=SLOT - 100, store_at=SLOT - 100),
            replace(STARTED, at=SLOT - 1, store_at=SLOT - 1),
        ),
    ),
    "claimed after its deadline": ("F10", (ALONE, DUE, replace(WON, store_at=SLOT + 5_001), END)),
    "a step for a run that is another's": (
        "I4",
        (ALONE, replace(WON, token="t2"), STARTED, END),
    ),
    "a step for a run that was given up": (
        "I4",
        (ALONE, WON, STARTED, GIVEN_UP, replace(STEPPED, at=SLOT + 450), END),
    ),
    "a result that is not taken": (
        "S17",
        (ALONE, WON, STARTED, ENDED, replace(RECEIPT, status="fenced"), END),
    ),
    "a result that is not kept": ("S17", (ALONE, WON, STARTED, ENDED, RECEIPT, END)),
    "a result without a receipt": ("S27", (ALONE, WON, STARTED, ENDED, DONE, END)),
    "given up, and not told": ("I8", (ALONE, WON, STARTED, GIVEN_UP, END)),
    "cancelled without a grace, and not told": ("I8", (ALONE, WON, STARTED, NO_GRACE, END)),
    "nobody ends it": ("F14", (ALONE, WON, END)),
    "given back though a client was there": ("S11", (ALONE, DUE, SERVED, WON, BACK, END)),
    "missed though somebody could": ("F3", (ALONE, DUE, ABLE, END)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checker_tells_when_a_promise_is_broken(name: str) -> None:
    rule, events = BROKEN[name]
    assert rule in rules(*events)


FINE: dict[str, tuple[Event, ...]] = {
    "missed, and nobody could": (ALONE, DUE, END),
    "left by a sidecar that is gone": (ALONE, WON, InstanceDied(SLOT + 100, "a.1"), END),
    "runs still": (ALONE, WON, STARTED, STEPPED, END),
    "came late to a store that cannot look at a clock": (
        replace(ALONE, late_ms=8_000),
        DUE,
        replace(WON, store_at=SLOT + 12_000),
        DONE,
        END,
    ),
    "a step while the word of a cancel without grace is on its way": (
        replace(ALONE, clock_error_ms=9),
        WON,
        STARTED,
        CANCELLED,
        NO_GRACE,
        replace(STEPPED, at=SLOT + 405),
        HandlerTold(SLOT + 408, "t1", "requested"),
        replace(ENDED, at=SLOT + 500),
        ResultReceipt(SLOT + 520, "t1", "fenced"),
        END,
    ),
    "a step of one that was told to stop and does not listen": (
        ALONE,
        WON,
        STARTED,
        HandlerTold(SLOT + 300, "t1", "timeout"),
        replace(GIVEN_UP, reason="timeout"),
        replace(STEPPED, at=SLOT + 450),
        ENDED,
        ResultReceipt(SLOT + 520, "t1", "fenced"),
        END,
    ),
    "cancelled by an operator, told, and obeyed": (
        ALONE,
        WON,
        STARTED,
        CANCELLED,
        HandlerTold(SLOT + 300, "t1", "requested"),
        ENDED,
        replace(DONE, state="failed", reason="cancelled", cancel="requested"),
        RECEIPT,
        END,
    ),
    "cancelled without a grace, and told at that moment": (
        ALONE,
        WON,
        STARTED,
        NO_GRACE,
        HandlerTold(SLOT + 410, "t1", "requested"),
        ENDED,
        ResultReceipt(SLOT + 520, "t1", "fenced"),
        END,
    ),
    "given back as the client went": (
        ALONE,
        DUE,
        SERVED,
        WON,
        ServedUntil(BACK.at, "a", "job"),
        BACK,
        END,
    ),
    "passed over in a pause": (
        ALONE,
        saved(SLOT, WON, state="skipped", reason="paused", token="", by="control"),
        END,
    ),
    "told, then given up": (
        ALONE,
        WON,
        STARTED,
        TOLD,
        GIVEN_UP,
        ENDED,
        ResultReceipt(SLOT + 520, "t1", "already_completed"),
        END,
    ),
    "told when it thaws": (
        ALONE,
        WON,
        STARTED,
        AppFroze(SLOT + 20, "app"),
        GIVEN_UP,
        replace(TOLD, at=SLOT + 9_000),
        AppThawed(SLOT + 9_000, "app"),
        replace(ENDED, at=SLOT + 9_100),
        ResultReceipt(SLOT + 9_200, "t1", "fenced"),
        END,
    ),
    "given back, for its client had gone": (
        ALONE,
        DUE,
        SERVED,
        WON,
        ServedUntil(SLOT + 100, "a", "job"),
        BACK,
        END,
    ),
    "given back when nobody had known of it for long": (
        ALONE,
        DUE,
        SERVED,
        WON,
        replace(BACK, at=SLOT + 9_000, store_at=SLOT + 9_000),
        END,
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_the_checker_is_silent_where_a_promise_is_kept(name: str) -> None:
    assert check(FINE[name]) == []
