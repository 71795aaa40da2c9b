"""What a fault test records, as flat values: one history for the simulator and for real processes.

Imports the standard library only. `at` is the true time in whole milliseconds, on one clock that
never steps (boot time, where processes are real); `store_at` is the store's wall clock. Whoever
records does so in the order in which things happen: events of equal `at` keep their order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, or a fact about the test."""

    at: int


@dataclass(frozen=True, slots=True)
class JobKnown(Event):
    """A job under test. `margin_ms`: by how much trust must end before the lease (0: at its end).

    `takeover_ms` and `handover_ms` are the bounds of F11 and F12, counted from the moment a lease
    is over or the run was freed; `witness_ms` is how long an instance must have been able before
    that (S19). `keeps_ms`: an instance that was able for so long before a lease ends has not let it
    lapse (S15). `waiting_ms` is how soon what waits is claimed once nothing is in its way, or its
    retry is due. `cancel_ms` bounds how long after the first cancel of an attempt its lease may still
    end (S21a). `clock_error_ms` bounds how far an instance's idea of the store's time may be off;
    for `clock_learned_ms` after the clock was set it may go by what it knew before.
    `timeout_ms` 0: none. `leases` false: the backend is claim-only, and what is said of leases is
    for how long things may take. `late_ms`: by how much a claim that was sent in time may come late
    to a store whose claim cannot look at a clock (S10).
    """

    job: str
    overlap: bool
    max_attempts: int
    margin_ms: int
    takeover_ms: int
    handover_ms: int
    witness_ms: int
    keeps_ms: int
    cancel_ms: int
    clock_error_ms: int
    clock_learned_ms: int
    waiting_ms: int = 0
    timeout_ms: int = 0
    leases: bool = True
    late_ms: int = 0


@dataclass(frozen=True, slots=True)
class SlotDue(Event):
    """A slot of a schedule in use; `at` is when the store's clock first came to it.

    `missed_at` is when it came to the slot's deadline. `required`: the slot must be accounted for.
    `exact`: no other schedule of the job was ever in use, so that counts add up exactly.
    """

    job: str
    schedule_id: str
    slot: int
    deadline_ms: int
    missed_at: int
    required: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class ClockStepped(Event):
    """The store's wall clock was set forward or back."""

    by_ms: int


@dataclass(frozen=True, slots=True)
class LeasesEnded(Event):
    """The machine whose boot-time clock judges leases has booted anew: every lease is over."""


@dataclass(frozen=True, slots=True)
class RunSaved(Event):
    """A run as the store holds it from now on, and what made it so.

    `lease_until` is the true time at which its lease ends (None: it has none), `retry_at` that from
    which a RETRYING run may be claimed. `by` is the store's
    method; `by_token` and `by_incarnation` are those of the request about this run (empty: the
    request was about another); `adopt`: a renewal by a new holder.
    """

    store_at: int
    job: str
    slot: int
    state: str
    reason: str
    attempt: int
    token: str
    fence: int
    instance: str
    incarnation: str
    freed: str
    cancel: str
    retry_at: int | None
    failed: int
    lease_until: int | None
    blocking_slot: int
    covered: int
    by: str
    by_token: str
    by_incarnation: str
    adopt: bool

    FINAL: ClassVar[frozenset[str]] = frozenset({"success", "failed", "skipped"})

    @property
    def final(self) -> bool:
        """Whether nothing may follow (I3)."""
        return self.state in self.FINAL


@dataclass(frozen=True, slots=True)
class ClaimWon(Event):
    """An instance was told WON."""

    job: str
    slot: int
    attempt: int
    token: str
    fence: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class HandlerStarted(Event):
    """A handler was called by an application, which then believed its trust to end at
    `trust_until` (true time). `obeys`: it ends within the margin once it is told to.
    """

    store_at: int
    job: str
    slot: int
    attempt: int
    token: str
    fence: int
    app: str
    trust_until: int
    obeys: bool


@dataclass(frozen=True, slots=True)
class HandlerStepped(Event):
    """A handler did something after it had checked that it is trusted."""

    job: str
    slot: int
    token: str
    fence: int
    app: str
    trust_until: int


@dataclass(frozen=True, slots=True)
class AssignmentRefused(Event):
    """An application was sent an attempt for which it has no room."""

    job: str
    slot: int
    token: str
    app: str


@dataclass(frozen=True, slots=True)
class HandlerTold(Event):
    """A handler was told to stop, for a reason of the protocol."""

    token: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandlerEnded(Event):
    """A handler returned, raised or obeyed. `permanent`: what it raised forbids a retry;
    `retry_after_ms`: it asks for that pause before the next (None: it raised nothing, or asks for none).
    """

    token: str
    app: str
    permanent: bool = False
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ResultReceipt(Event):
    """An application was told what became of its result."""

    token: str
    status: str


@dataclass(frozen=True, slots=True)
class AppFroze(Event):
    """An application stopped running for a while."""

    app: str


@dataclass(frozen=True, slots=True)
class AppThawed(Event):
    """It goes on."""

    app: str


@dataclass(frozen=True, slots=True)
class AppDied(Event):
    """An application's process, which was served by `instance`, is gone."""

    app: str
    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDied(Event):
    """A sidecar's process is gone."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class AbleFrom(Event):
    """From now on this instance could run a slot of the job's schedule, or take a run over: it is
    up, registered, connected with the store and a client, undisturbed, and has room.
    """

    instance: str
    job: str
    schedule_id: str


@dataclass(frozen=True, slots=True)
class UnableFrom(Event):
    """From now on it could not."""

    instance: str
    job: str
    schedule_id: str


@dataclass(frozen=True, slots=True)
class JobPaused(Event):
    """From now on no slot of the job is claimed."""

    job: str


@dataclass(frozen=True, slots=True)
class JobResumed(Event):
    """Its slots are claimed again."""

    job: str


@dataclass(frozen=True, slots=True)
class ServedFrom(Event):
    """From now on a client of this instance could be handed runs of the job, whether or not it has
    room and the store can be reached.
    """

    instance: str
    job: str


@dataclass(frozen=True, slots=True)
class ServedUntil(Event):
    """From now on none could."""

    instance: str
    job: str


@dataclass(frozen=True, slots=True)
class Note(Event):
    """A fault, or anything else that helps a reader."""

    text: str


@dataclass(frozen=True, slots=True)
class HistoryEnded(Event):
    """Nothing was recorded after this."""


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        JobKnown,
        SlotDue,
        ClockStepped,
        LeasesEnded,
        RunSaved,
        ClaimWon,
        HandlerStarted,
        HandlerStepped,
        AssignmentRefused,
        HandlerTold,
        HandlerEnded,
        ResultReceipt,
        AppFroze,
        AppThawed,
        AppDied,
        InstanceDied,
        AbleFrom,
        UnableFrom,
        JobPaused,
        JobResumed,
        ServedFrom,
        ServedUntil,
        Note,
        HistoryEnded,
    )
}


def to_lines(events: Iterable[Event]) -> Iterator[str]:
    """One JSON object a line."""
    for event in events:
        yield json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)})


def from_lines(lines: Iterable[str]) -> Iterator[Event]:
    """What `to_lines` wrote, in its order."""
    for line in lines:
        values: dict[str, Any] = json.loads(line)
        yield _KINDS[values.pop("event")](**values)


def shown(event: Event, since: int = 0) -> str:
    """One line for people: seconds since `since`, what it was, and its values but for defaults."""
    values = dataclasses.asdict(event)
    at = values.pop("at")
    parts = [f"{k}={_short(k, v)}" for k, v in values.items() if v not in ("", None, False)]
    return f"{(at - since) / 1000:9.3f}  {type(event).__name__:<14} {' '.join(parts)}"


def _short(name: str, value: object) -> str:
    text = str(value)
    if name in ("token", "by_token") and text.count(".") >= 2:
        slot, nonce, job = text.split(".", 2)
        return f"{slot[-6:]}.{nonce[:6]}.{job}"
    return text
