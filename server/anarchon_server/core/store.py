"""The port: what the sidecar asks of a store, in the words of the domain, and nothing else.

Imports `limits` and `model`. Each method is one atomic act per item, takes a batch and answers in
its order; none is "read, then write" from outside. Every answer carries the store's time.

What a backend must decide, rule by rule, is written once as pure functions in `machine`.
A backend that locks, reads, decides and writes (memory, SQLite, NATS) calls them; one
that decides inside the store (SQL, Lua) says the same in the store's language and is held
to it by the contract suite.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, Self, TypeVar

from anarchon_server.core.limits import OP_TIMEOUT
from anarchon_server.core.model import (
    CancelReason,
    CatchUpPolicy,
    Definition,
    Instance,
    JobView,
    Outcome,
    OverlapPolicy,
    RunState,
    RunView,
)

T_co = TypeVar("T_co", covariant=True)


class StoreClock(Protocol):
    """The machine's clocks, for stores that have none of their own."""

    def wall_us(self) -> int:
        """Microseconds since the epoch. May be stepped either way."""
        ...

    def boot_ms(self) -> int:
        """Milliseconds on a clock that only goes forward and counts suspend (S3)."""
        ...

    @property
    def boot_id(self) -> str:
        """Which boot `boot_ms` belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. What it cannot is refused before anything is claimed.

    `backend` is its kind and strategy, as people see it ("sqlite", "redis:lease").
    `boot_leases`: leases are judged by a clock that cannot step, so a takeover needs no
    second witness (S1, S19). `notifies`: `watch` yields soon after a run is freed. `history`
    false: what is shown of runs, jobs and instances is this instance's own.

    Without `leases` the backend is claim-only: no backups, and `retries` are those of the
    instance that reported the failure (`claim_only` has its rules). It refuses jobs whose slots come closer than `least_gap_ms`; it knows who won for
    `kept_ms` (None: as long as its history), and of a job's newest `kept_slots` (None: of all).
    """

    backend: str
    leases: bool = True
    boot_leases: bool = False
    notifies: bool = False
    shared: bool = True
    overlap: frozenset[OverlapPolicy] = frozenset({OverlapPolicy.SKIP, OverlapPolicy.ALLOW})
    catch_up: frozenset[CatchUpPolicy] = frozenset({CatchUpPolicy.NONE})
    retries: bool = False
    control: bool = False
    history: bool = True
    least_gap_ms: int = 0
    kept_ms: int | None = None
    kept_slots: int | None = None


class Doubt(str):
    """What may be lost as the store is configured, or (`unverified`) could not be found out.

    One sentence, and the text that it is. `fix` says what an operator can change about it.
    """

    __slots__ = ("fix", "unverified")

    fix: str
    unverified: bool

    def __new__(cls, text: str, fix: str = "", *, unverified: bool = False) -> Self:
        """Return the doubt `text`, which `fix` would end."""
        doubt = super().__new__(cls, text)
        doubt.fix, doubt.unverified = fix, unverified
        return doubt

    @property
    def in_full(self) -> str:
        """The text and, where there is one, the fix."""
        return f"{self}: {self.fix}" if self.fix else str(self)


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What opening a store found: `verified` holds, one sentence each; `doubts` could not be
    verified, or may be lost as it is configured. Fatal findings raise `StoreRefused`.
    """

    location: str
    verified: tuple[str, ...] = ()
    doubts: tuple[Doubt, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply(Generic[T_co]):
    """A batch's answers, in the batch's order, with the store's time (ms) when it was done.

    `fences` has the highest fence of every job the batch touched, and `store_id` the
    store's identity: how an instance learns that a store went back (S27a). `looked_to`: a page of
    runs ended there, the (slot, job) of the last that was looked at, before it was full, as to look
    for more that match would have taken too long.
    """

    store_at: int
    answers: tuple[T_co, ...]
    fences: Mapping[str, int] = field(default_factory=dict)
    store_id: str = ""
    looked_to: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A wish to run one slot: a first attempt, or (`seen_attempt` > 0) a takeover or retry.

    `previous_slot` is the slot before in the schedule `schedule_id` (None: there is none),
    by which `settled` moves on (S20). `may_run` false only settles the slot (S13).
    `expected_at` is the store's time as the claimer reckons it and `vouched` says that it
    has watched that clock run evenly for a lease: the second witness (S19), without which
    no lease counts as over. A takeover names the attempt and token it saw.
    """

    job: str
    slot: int
    token: str
    instance_id: str
    incarnation: str
    schedule_id: str
    previous_slot: int | None
    overlap: OverlapPolicy
    start_deadline_ms: int
    lease_ms: int
    cancel_grace_ms: int
    max_attempts: int
    window_ms: int
    expected_at: int
    vouched: bool
    retries: int = 0
    may_run: bool = True
    seen_attempt: int = 0
    seen_token: str = ""


class ClaimOutcome(StrEnum):
    """What became of a claim."""

    WON = "won"  # this token holds the slot; its lease runs from the store's handling
    LOST = "lost"  # the slot has a row with another token, or is final, or a live lease
    SKIPPED = "skipped"  # the slot is now Skipped: another run of the job is unfinished
    QUEUED = "queued"  # the run waits: another is unfinished, or waits and is older
    PAUSED = "paused"  # the job is paused: its slots are neither run nor missed
    UNCHANGED = "unchanged"  # may_run was false, and there was nothing to settle
    EARLY = "early"  # more than 1 s before the slot, or blocked before its time: wait
    LATE = "late"  # missed, settled or pruned: it is never claimed, only planned
    OLD = "old"  # a newer slot has been claimed, and this backend cannot go back: it is missed
    UNREGISTERED = "unregistered"  # the store does not know the job's schedule: register
    CLOCK_STEP = "clock_step"  # the store's clock is not where the claim expects it
    UNKNOWN = "unknown"  # it may have been done; ask again with the same token


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """What became of a claim, with the slot's run as it is now (None: it has no row).

    `payload` came with the call that triggered a run that was won.
    """

    outcome: ClaimOutcome
    run: RunView | None = None
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class MissedSlot:
    """A slot that a plan takes as missed once its deadline to start is over."""

    slot: int
    start_deadline_ms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to become of slots nobody claimed in time (S20).

    `slots` ascend and are the newest after `settled`, at most `limit` + 10,000, and perhaps some that
    are not missed yet, over which `settled` may move on; `more` says that there were older ones
    still, so that the row that counts the rest says "at least".
    `catch_up` says which are run, none of them older than `window_ms`, at most `limit` of a job.
    """

    job: str
    schedule_id: str
    settled: int
    slots: tuple[MissedSlot, ...]
    more: bool = False
    limit: int = 100
    catch_up: CatchUpPolicy = CatchUpPolicy.NONE
    window_ms: int = 0


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Whether the plan was carried out (false: `settled` had moved, or the job is paused), and
    `settled` now; how many slots are Skipped as missed, and how many are now Due.
    """

    done: bool
    settled: int | None
    missed: int = 0
    due: int = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """A heartbeat for one attempt (S15). `adopt`: by a new holder (S26).

    `started_at` is given once, when the client first named the attempt. `cancel` asks
    the attempt to stop; the first such request is kept, and grace runs from it (S21a).
    """

    job: str
    slot: int
    token: str
    instance_id: str
    incarnation: str
    lease_ms: int
    adopt: bool = False
    started_at: int | None = None
    cancel: CancelReason | None = None


class TokenOutcome(StrEnum):
    """Whether a token still counted."""

    RENEWED = "renewed"
    RELEASED = "released"
    RECORDED = "recorded"  # from this report or from an earlier, equal one
    ALREADY_COMPLETED = "already_completed"  # a different outcome stands in the store
    FENCED = "fenced"  # not the current attempt's, or held by another process
    UNKNOWN_TOKEN = "unknown_token"  # the slot has no attempt at all
    UNKNOWN = "unknown"  # the part of the store that has it did not answer: ask again (S11)


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """Whether a renewal, result or release counted, and the run now (None: no row).

    `due` is the job's oldest run that waits, where the result ended what was in its way (S18).
    """

    outcome: TokenOutcome
    run: RunView | None = None
    due: RunView | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: who lives, what it renews, which runs and jobs it looks at.

    `looks` are single runs (job, slot); `sweep` are jobs, with the schedule each is
    watched under, whose unfinished runs are all wanted, at most `sweep_limit` in all,
    those whose lease is over first. Without leases only those are wanted that wait, and the
    instance's own that somebody asked to stop. `within_ms` is how long the caller waits: a store of
    several servers answers in that time what those say that answer.
    """

    instance: Instance
    renewals: tuple[Renewal, ...] = ()
    looks: tuple[tuple[str, int], ...] = ()
    sweep: tuple[tuple[str, str], ...] = ()
    sweep_limit: int = 1_000
    leaving: bool = False
    within_ms: int = OP_TIMEOUT


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """The answers to a heartbeat's parts, each in its order.

    `settled` is in the order of `sweep` (None: the store does not know that schedule).
    `known` is false where the store has no registration of the instance: register all again.
    `twins` are live instances with this one's label and another incarnation (S32).
    `unheard` are jobs that are on a part of the store that did not answer: what stands here for
    them says nothing, and their renewals are UNKNOWN.
    """

    renewals: tuple[TokenAnswer, ...]
    looks: tuple[RunView | None, ...]
    unfinished: tuple[RunView, ...]
    settled: tuple[int | None, ...]
    known: bool
    twins: tuple[str, ...] = ()
    unheard: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """A result, by its token. It counts from any process (S17).

    `retry_in_ms`: how long after a failure the run may be tried again (S22; None: it is final).
    """

    job: str
    slot: int
    token: str
    outcome: Outcome
    retry_in_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a lease before its time: `reason` is `handed_over`, `runner_lost` or
    `not_accepted`. Only `runner_lost` counts against `max_attempts` (S19).
    """

    job: str
    slot: int
    token: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Registration:
    """What became of one definition (S28). `settled` is None for a job without a schedule."""

    job: str
    current: bool
    since: int
    settled: int | None
    definitions_differ: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """No slot of the job is claimed from now on (S29)."""

    job: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """The slots of a schedule from `settled` on, the newest 10,000 up to `until`, ascending.

    `more`: there were older ones still.
    """

    schedule_id: str
    settled: int
    slots: tuple[int, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """The slots of the job are claimed again (S29).

    The store carries it out only where it is as the caller saw it: paused at `paused_at`, its
    schedules in use and what they have settled those of `passed`, and no later than `until`. `plans`
    are for what was missed when the pause began.
    """

    job: str
    paused_at: int
    until: int
    plans: tuple[Plan, ...] = ()
    passed: tuple[Passed, ...] = ()


@dataclass(frozen=True, slots=True)
class TriggerRun:
    """A run of the job that is due now (S29).

    Its slot is the first millisecond from the store's time on that is none of `slots`, the job's
    slots from about now until `until`, and not taken. A repeat of `request_id`, which is never
    empty, gives the run that was made.
    """

    job: str
    request_id: str
    payload: bytes
    slots: tuple[int, ...]
    until: int
    overlap: OverlapPolicy
    window_ms: int


@dataclass(frozen=True, slots=True)
class CancelRun:
    """A run is to stop; one that no attempt holds ends at once (S21a). `message` is for its handler."""

    job: str
    slot: int
    message: str = ""


Control = Pause | Resume | TriggerRun | CancelRun
"""What operators ask of a job (S29)."""


class ControlOutcome(StrEnum):
    """What became of it."""

    DONE = "done"  # it is as asked, now or since before
    STALE = "stale"  # the store is not as the caller saw it: look again
    NOT_FOUND = "not_found"  # there is no such job or run
    FINAL = "final"  # the run has ended
    FULL = "full"  # as many triggered runs of the job wait as may


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """What became of it, with the run that was triggered or cancelled."""

    outcome: ControlOutcome
    run: RunView | None = None


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which runs are wanted, newest slot first. None or empty: no limit of that kind.

    `after` continues a page: the (slot, job) of the last run before it. `traces` asks for
    stack traces. A run is shown where its present state, as shown, is in `states`.
    """

    job: str = ""
    slot: int | None = None
    states: frozenset[RunState] = frozenset()
    instance_id: str = ""
    from_slot: int | None = None
    until_slot: int | None = None
    after: tuple[int, str] | None = None
    limit: int = 50
    traces: bool = False


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """What history is kept (S30), and how many runs one call may delete."""

    history_ms: int
    history_max: int
    batch: int = 200


class Store(Protocol):
    """One namespace of one store.

    Any method but `open` and `close` may raise `StoreUnavailable` (surely not done) or
    `OutcomeUnknown` (perhaps done). A cancelled call counts as `OutcomeUnknown`.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do; known before `open`."""
        ...

    async def open(self) -> StoreReport:
        """Connects, creates what is missing, checks. `StoreRefused` says what to change."""
        ...

    async def close(self) -> None:
        """Lets go of everything. Safe to call twice."""
        ...

    async def claim(self, claims: Sequence[Claim]) -> Reply[ClaimAnswer]:
        """First attempts and takeovers (S10, S11, S18, S19)."""
        ...

    async def settle(self, plans: Sequence[Plan]) -> Reply[PlanAnswer]:
        """Records slots as missed (S20)."""
        ...

    async def beat(self, beat: Beat) -> Reply[BeatAnswer]:
        """One heartbeat: renews, looks and says that the instance lives. One answer."""
        ...

    async def complete(self, completions: Sequence[Completion]) -> Reply[TokenAnswer]:
        """Records results (S17)."""
        ...

    async def release(self, releases: Sequence[Release]) -> Reply[TokenAnswer]:
        """Ends leases at once (S23, S24, S25)."""
        ...

    async def register(
        self, instance: Instance, definitions: Sequence[Definition], let_go: Sequence[str] = ()
    ) -> Reply[Registration]:
        """Records that the instance holds the definitions, in the place of all that it held of
        their jobs, and holds nothing of the jobs `let_go` any more (S28).

        What else it holds stays. At most `REGISTER_BATCH` of either, and no job in both. A call that
        failed may have been done for some of its jobs; each is repeated as a whole.
        """
        ...

    async def control(self, acts: Sequence[Control]) -> Reply[ControlAnswer]:
        """Pauses, resumes, triggers and cancels, one after the other (S29)."""
        ...

    async def runs(self, query: RunQuery) -> Reply[RunView]:
        """History, with attempts (S30)."""
        ...

    async def jobs(self, names: Sequence[str], after: str, limit: int) -> Reply[JobView]:
        """The named jobs (those that exist), or a page of all by name after `after`."""
        ...

    async def instances(self) -> Reply[Instance]:
        """The instances seen lately, by label; one not heard of for its lease is LOST."""
        ...

    async def prune(self, policy: PrunePolicy) -> Reply[int]:
        """Deletes a batch of old final runs, floors first. One answer: how many went."""
        ...

    def watch(self) -> AsyncIterator[None]:
        """Yields when a run may have been freed, may go on or is to stop; a wake-up only, never relied
        on (S19).
        """
        ...


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a backend is opened with, besides its URL.

    `clock` serves stores that have none. `boot_leases` false makes the memory store judge
    leases by its wall clock, as a networked store would: for simulations of clock steps.
    `leases` false makes it claim-only, for the same purpose.
    """

    namespace: str
    clock: StoreClock
    op_timeout_ms: int = 2_000
    boot_leases: bool = True
    leases: bool = True


LEASE_BACKENDS = ("memory", "nats:lease", "postgres", "redis:lease", "sqlite")
"""The backends of ours that keep leases, as people see them."""

CONTROL_BACKENDS = tuple(sorted((*LEASE_BACKENDS, "redis:idmp", "redis:script", "redis:stream-id")))
"""The backends of ours that have pause, resume, trigger and cancel (S29)."""

CLAIM_ONLY_OVERLAP = frozenset({OverlapPolicy.ALLOW})
"""What a claim-only backend can do about overlapping runs: nothing (S18)."""
