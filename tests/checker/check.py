"""Judges a history: `check(events)` lists what breaks I1 to I8 of the semantics, refined by F1 to F16.

Pure: imports the events, the two kinds of rules and the standard library only. Which kind applies
the history's jobs say: backends without leases promise less (S10, S18, S20).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.checker import claim_only, leased
from tests.checker.events import (
    AbleFrom,
    AssignmentRefused,
    ClaimWon,
    Event,
    HandlerEnded,
    HandlerStarted,
    HandlerStepped,
    HandlerTold,
    JobKnown,
    ResultReceipt,
    RunSaved,
    ServedFrom,
    ServedUntil,
    SlotDue,
    UnableFrom,
)
from tests.checker.history import History, Key, Violation

__all__ = ["Violation", "about", "check"]


def check(events: Iterable[Event]) -> list[Violation]:
    """What the history breaks, in the order of the moments at which it shows."""
    history = History(list(events))
    rules = leased if all(job.leases for job in history.jobs.values()) else claim_only
    return sorted(rules.judge(history), key=lambda violation: violation.at)


def about(events: Sequence[Event], violation: Violation, most: int = 60) -> list[Event]:
    """The shortest useful history of a violation: what concerns its run, its job's neighbours and
    the whole cluster, the newest `most` events up to it.
    """
    tokens = {
        e.token for e in events if isinstance(e, RunSaved) and (e.job, e.slot) == _key(violation)
    }
    wanted = [e for e in events if e.at <= violation.at and _concerns(e, violation, tokens)]
    return wanted[-most:]


def _key(violation: Violation) -> Key:
    return violation.job, violation.slot


def _concerns(event: Event, violation: Violation, tokens: set[str]) -> bool:
    match event:
        case RunSaved() | ClaimWon() | HandlerStarted() | HandlerStepped() | AssignmentRefused():
            return (event.job, event.slot) == _key(violation)
        case HandlerTold() | HandlerEnded() | ResultReceipt():
            return event.token in tokens
        case SlotDue():
            return (event.job, event.slot) == _key(violation)
        case JobKnown() | AbleFrom() | UnableFrom() | ServedFrom() | ServedUntil():
            return event.job == violation.job
        case _:
            return True
