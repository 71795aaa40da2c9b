"""The shared store of a simulation: the memory store, watched from inside, behind a bad network.

`Storage` carries requests out and records what they change. `Link` is one sidecar's way to it, on
which requests and replies are late, lost or doubled as the weather of its host has it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anarchon_backends.memory import MemoryDatabase, MemoryStore, _Space
from anarchon_server.core import claim_only, limits
from anarchon_server.core.machine import JobRecord, Saved
from anarchon_server.core.messages import CallStore, Method
from anarchon_server.core.model import JobView, Run
from anarchon_server.core.store import (
    Claim,
    ClaimAnswer,
    ClaimOutcome,
    Completion,
    Control,
    ControlAnswer,
    OpenOptions,
    Reply,
)
from tests.checker.events import ClaimWon, Event, RunSaved
from tests.simulation.timeline import SimClock, Timeline

NAMESPACE = "default"
Record = Callable[[Event], None]
Save = Callable[[Run | None, Run], None]


class _WatchedSpace(_Space):
    """The memory store's data, which tells of each run that is saved."""

    on_save: Save
    on_news: Callable[[], None]

    def wake_watchers(self) -> None:
        self.on_news()

    def save(self, saved: Iterable[Saved]) -> None:
        for each in saved:
            before = self.run(each.run.job, each.run.slot)
            super().save([each])
            self.on_save(before, each.run)


class ClocklessStore(MemoryStore):
    """A claim-only store whose claim cannot look at a clock, as with brokers (S10): whoever makes it
    judges its time, and looks whether the slot is recorded, before it is sent. `recorded` is what the
    store knows of a slot.
    """

    def __init__(
        self,
        database: MemoryDatabase,
        options: OpenOptions,
        recorded: Callable[[Claim], Run | None],
    ) -> None:
        super().__init__(database, options)
        self._recorded = recorded

    def look(self, claims: Sequence[Claim]) -> tuple[ClaimOutcome | None, ...]:
        """Why these claims are not made now, by the sender's reckoning; None: they are."""
        return tuple(
            None if self._recorded(claim) else claim_only.untimely(claim, claim.expected_at)
            for claim in claims
        )

    async def claim(
        self, claims: Sequence[Claim], refused: Sequence[ClaimOutcome | None] = ()
    ) -> Reply[ClaimAnswer]:
        """First attempts, whenever they come; `refused` are those that were not to be made."""
        answers = [
            self._claimed(claim) if word is None else ClaimAnswer(word)
            for claim, word in zip(claims, refused, strict=True)
        ]
        return self._reply(self._now(), answers, ())

    def _claimed(self, claim: Claim) -> ClaimAnswer:
        now = self._now()
        if not claim.seen_attempt:  # a retry is its sender's own affair
            now = replace(now, at_us=claim.slot * 1_000)
        verdict = claim_only.judge_claim(
            claim, now, JobRecord(claim.job), None, self._recorded(claim)
        )
        self._space.save(verdict.saved)
        return verdict.answer


@dataclass(slots=True)
class Stretch:
    """The time for which a schedule of a job was in use without a break (S28).

    While no live instance holds it, it keeps no history (S2): `passed` are the spans, from its
    `settled` to the job's floor, whose slots are never claimed or planned any more.
    """

    job: str
    schedule_id: str
    since: int
    begun_at: int
    settled: int
    ended: bool = False
    passed: dict[int, int] = field(default_factory=dict)

    def is_passed(self, slot: int) -> bool:
        """Whether the floor was raised above the slot while nobody held the schedule."""
        return any(settled < slot <= floor for settled, floor in self.passed.items())


@dataclass(slots=True)
class _Asked:
    """What the request in hand says about one run."""

    token: str
    incarnation: str
    adopt: bool = False


@dataclass
class Storage:
    """The store's server: one, for all hosts."""

    timeline: Timeline
    clock: SimClock
    boot_leases: bool
    record: Record
    on_freed: Callable[[], None] = lambda: None
    leases: bool = True
    kept_ms: int | None = None
    stretches: list[Stretch] = field(default_factory=list)
    calls: Counter[Method] = field(default_factory=Counter)
    _database: MemoryDatabase = field(default_factory=lambda: MemoryDatabase("simulated"))
    _winners: dict[tuple[str, int], tuple[Run, int]] = field(default_factory=dict)
    _leased_until: dict[str, int] = field(default_factory=dict)
    _method: str = ""
    _asked: dict[tuple[str, int], list[_Asked]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = _WatchedSpace()
        self.space.on_save = self._saved
        self.space.on_news = self.on_freed
        self._database._spaces[NAMESPACE] = self.space

    def connect(self) -> MemoryStore:
        """A connection for one sidecar."""
        options = OpenOptions(
            NAMESPACE, self.clock, boot_leases=self.boot_leases, leases=self.leases
        )
        if self.kept_ms is None:
            return MemoryStore(self._database, options)
        return ClocklessStore(self._database, options, self._recorded)

    def _recorded(self, claim: Claim) -> Run | None:
        """The run of a slot, for as long as it is known who won it; whoever retries it knows it."""
        assert self.kept_ms is not None
        run, since = self._winners.get((claim.job, claim.slot), (None, 0))
        return run if claim.seen_attempt or since + self.kept_ms > self.timeline.now else None

    def backup(self) -> Callable[[], None]:
        """Keeps what the store has now; the answer restores it, and what came later is lost."""
        names = ("jobs", "schedules", "kept", "specs", "members", "runs", "unfinished", "attempts")
        kept = {name: copy.deepcopy(getattr(self.space, name)) for name in names}

        def restore() -> None:
            for name, value in kept.items():
                setattr(self.space, name, value)

        return restore

    def carry_out(
        self, store: MemoryStore, method: Method, arguments: tuple[Any, ...]
    ) -> Reply[Any]:
        """Does what a request asks, in one step."""
        self.calls[method] += 1
        self._method = method
        self._asked = _what_is_asked(method, arguments)
        call = getattr(store, method)(*arguments)
        try:
            call.send(None)
        except StopIteration as done:
            self._note_schedules(store)
            reply: Reply[Any] = done.value
            return reply
        raise AssertionError("the memory store never waits")

    def _saved(self, before: Run | None, run: Run) -> None:
        won = before is None or before.token != run.token
        since = self.timeline.now if won else self._winners[run.job, run.slot][1]
        self._winners[run.job, run.slot] = (run, since)
        asked = self._asked.get((run.job, run.slot), [])
        token = before.token if before else run.token
        by = next((a for a in asked if a.token == token), asked[-1] if asked else _Asked("", ""))
        lease_at = self.clock.boot_ms() if self.boot_leases else self.clock.wall_ms()
        left = run.lease.until - lease_at if run.lease else None
        until = None if left is None else self.timeline.now + left
        renewed = self._method == Method.BEAT and any(each.token == run.token for each in asked)
        same = before is not None and (run.token, run.lease) == (before.token, before.lease)
        if until is not None and same and not renewed:
            # Nobody set it: it is what it was, wherever the clock has been set to since.
            until = self._leased_until[run.token]
        if until is not None:
            self._leased_until[run.token] = until
        current = run.current
        self.record(
            RunSaved(
                at=self.timeline.now,
                store_at=self.clock.wall_ms(),
                job=run.job,
                slot=run.slot,
                state=run.state,
                reason=run.reason,
                attempt=run.attempt,
                token=run.token,
                fence=current.fence if current else 0,
                instance=current.instance_id if current else "",
                incarnation=current.incarnation if current else "",
                freed=run.freed,
                cancel=run.cancel or "",
                retry_at=self._true_time(run.retry_at),
                failed=run.failed,
                lease_until=until,
                blocking_slot=run.blocking_slot,
                covered=run.slots_covered,
                by=self._method,
                by_token=by.token,
                by_incarnation=by.incarnation,
                adopt=by.adopt,
            )
        )

    def _true_time(self, store_at: int | None) -> int | None:
        """When the store's clock will show a moment, if it is not set meanwhile."""
        if store_at is None:
            return None
        return self.timeline.now + store_at - self.clock.wall_ms()

    def control(self, act: Control) -> ControlAnswer:
        """What an operator asks, in one step."""
        self._method, self._asked = "control", {}
        store = self.connect()
        call = store.control([act])
        try:
            call.send(None)
        except StopIteration as done:
            self._note_schedules(store)
            answer: ControlAnswer = done.value.answers[0]
            return answer
        raise AssertionError("the memory store never waits")

    def job(self, name: str) -> JobView | None:
        """A job as the store shows it."""
        call = self.connect().jobs((name,), "", 1)
        try:
            call.send(None)
        except StopIteration as done:
            views: tuple[JobView, ...] = done.value.answers
            return views[0] if views else None
        raise AssertionError("the memory store never waits")

    def _note_schedules(self, store: MemoryStore) -> None:
        """Follows each schedule's `since` and `settled`, and what the job's floor passes over."""
        open_ones = {(s.job, s.schedule_id): s for s in self.stretches if not s.ended}
        for key, kept in self.space.schedules.items():
            stretch = open_ones.pop(key, None)
            if stretch is not None and stretch.since == kept.since:
                stretch.settled = kept.settled
                self._note_floor(store, stretch)
                continue
            if stretch is not None:
                stretch.ended = True
            self.stretches.append(Stretch(*key, kept.since, self.timeline.now, kept.settled))
        for stretch in open_ones.values():
            stretch.ended = True

    def _note_floor(self, store: MemoryStore, stretch: Stretch) -> None:
        floor = self.space.job(stretch.job).floor
        if floor <= stretch.settled:
            return
        held = self.space.held(store._now(), stretch.job)
        if stretch.schedule_id not in {hold.schedule_id for hold in held}:
            stretch.passed[stretch.settled] = floor


def _what_is_asked(
    method: Method, arguments: tuple[Any, ...]
) -> dict[tuple[str, int], list[_Asked]]:
    asked: dict[tuple[str, int], list[_Asked]] = {}
    items: Iterable[Any] = arguments[0] if method is not Method.BEAT else arguments[0].renewals
    if method in (Method.CLAIM, Method.BEAT, Method.COMPLETE, Method.RELEASE):
        for item in items:
            incarnation = "" if isinstance(item, Completion) else item.incarnation
            adopt = getattr(item, "adopt", False)
            asked.setdefault((item.job, item.slot), []).append(
                _Asked(item.token, incarnation, adopt)
            )
    return asked


# ── The way to the store ────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Weather:
    """What goes wrong between one host and the store, as shares of all requests.

    `refused`: every request fails at once, surely not done. `silent`: none is answered or done.
    """

    lost: float = 0.0
    reply_lost: float = 0.0
    reply_late: float = 0.0
    done_late: float = 0.0
    doubled: float = 0.0
    unsure: float = 0.0
    refused: bool = False
    silent: bool = False


@dataclass
class Link:
    """One sidecar process's connection. `replied` and `failed` are how it hears of its calls."""

    storage: Storage
    timeline: Timeline
    rng: random.Random
    hop_ms: int
    incarnation: str
    op_timeout_ms: int
    late_max_ms: int
    replied: Callable[[int, Reply[Any]], None]
    failed: Callable[[int, bool], None]
    weather: Weather = field(default_factory=Weather)

    def __post_init__(self) -> None:
        self.store = self.storage.connect()

    def clear_up(self) -> None:
        """Nothing goes wrong on it any more."""
        self.weather = Weather()

    def call(self, command: CallStore) -> None:
        """Sends a request on its way, and plans what becomes of it."""
        weather, rng = self.weather, self.rng
        if command.method is Method.CLAIM and isinstance(self.store, ClocklessStore):
            (claims,) = command.arguments
            command = replace(command, arguments=(claims, self.store.look(claims)))
        if weather.refused:
            self.timeline.after(self._hop(), lambda: self.failed(command.call_id, False))
        elif weather.silent or rng.random() < weather.lost:
            self._give_up(command)
        elif rng.random() < weather.done_late:
            self._give_up(command)
            self._execute(command, rng.randint(100, self.late_max_ms))
        elif rng.random() < weather.reply_lost:
            self._give_up(command)
            self._execute(command, self._hop())
        else:
            self._execute(command, self._hop(), self._reply)
        if rng.random() < weather.doubled:
            self._execute(command, rng.randint(1, self.late_max_ms))

    def _give_up(self, command: CallStore) -> None:
        """The caller's time limit, or a reset connection, which shows sooner."""
        reset = self.rng.random() < 0.3
        wait = self.rng.randint(1, self.op_timeout_ms) if reset else self.op_timeout_ms
        self.timeline.after(wait, lambda: self.failed(command.call_id, True))

    def _execute(
        self,
        command: CallStore,
        delay_ms: int,
        then: Callable[[CallStore, Reply[Any], int], None] = lambda *_: None,
    ) -> None:
        boots = self.storage.clock.boots

        def arrived() -> None:
            if self.storage.boot_leases and self.storage.clock.boots != boots:
                return  # it was on the machine that has booted anew
            reply = self.storage.carry_out(self.store, command.method, command.arguments)
            then(command, reply, delay_ms)

        self.timeline.after(delay_ms, arrived)

    def _reply(self, command: CallStore, reply: Reply[Any], spent_ms: int) -> None:
        back = self._hop()
        if self.rng.random() < self.weather.reply_late:
            back = self.rng.randint(1, 2 * self.op_timeout_ms)
        if command.method is Method.CLAIM and self.rng.random() < self.weather.unsure:
            reply = replace(reply, answers=tuple(self._unsure(a) for a in reply.answers))
        if spent_ms + back > self.op_timeout_ms:
            left = self.op_timeout_ms - spent_ms
            self.timeline.after(left, lambda: self.failed(command.call_id, True))
        else:
            self.timeline.after(back, lambda: self._arrives(command, reply))

    def _unsure(self, answer: ClaimAnswer) -> ClaimAnswer:
        return ClaimAnswer(ClaimOutcome.UNKNOWN) if self.rng.random() < 0.5 else answer

    def _arrives(self, command: CallStore, reply: Reply[Any]) -> None:
        if command.method is Method.CLAIM:
            for claim, answer in zip(command.arguments[0], reply.answers, strict=True):
                self._note_won(claim, answer)
        self.replied(command.call_id, reply)

    def _note_won(self, claim: Claim, answer: ClaimAnswer) -> None:
        if answer.outcome is not ClaimOutcome.WON:
            return
        assert answer.run is not None
        assert answer.run.run.current is not None
        self.storage.record(
            ClaimWon(
                self.timeline.now,
                claim.job,
                claim.slot,
                answer.run.run.attempt,
                claim.token,
                answer.run.run.current.fence,
                self.incarnation,
            )
        )

    def _hop(self) -> int:
        return self.rng.randint(0, self.hop_ms)


def op_timeout(heartbeat_ms: int) -> int:
    """The shell's time limit for a call."""
    return min(limits.OP_TIMEOUT, heartbeat_ms)
