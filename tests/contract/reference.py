"""What a store must answer, written from the rules alone: the other half of `test_model`.

Shares no code with the machine or with any backend: plain mutable rows, one method an act, the
numbers of the rules beside the lines that say them. It knows catch-up `none` and the overlaps
`skip` and `allow`, and no run is abandoned in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FINAL = {"success", "failed", "skipped"}
CANCELLED = {"timeout": "timeout", "requested": "cancelled", "superseded": "superseded"}


@dataclass
class Attempt:
    """One execution."""

    token: str
    fence: int
    label: str
    holder: str
    cause: str
    state: str = "claimed"
    reason: str = ""
    started: bool = False
    told: tuple[str, str] | None = None  # the outcome that was recorded


@dataclass
class Row:
    """One slot."""

    state: str
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    until: int = 0  # the lease's end, on the lease clock of boot `boot`
    length: int = 0
    boot: str = ""
    freed: str = ""
    cancel: str = ""
    cancelled_at: int = 0
    grace: int = 0
    lost: int = 0
    most: int = 0
    blocking: int = 0
    covered: int = 0

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def token(self) -> str:
        return self.attempts[-1].token if self.attempts else ""


@dataclass
class Holder:
    """An instance, and the definitions it holds: (definition, schedule, window)."""

    seen_at: int
    lease: int
    holds: dict[str, tuple[str, int]] = field(default_factory=dict)


class Reference:
    """One job's rows, on a store whose leases run on the boot clock or on the wall clock."""

    def __init__(self, now: int, boot: int, *, boot_leases: bool) -> None:
        self.now = now
        self.boot = boot
        self.boot_id = "boot-1" if boot_leases else ""
        self.boot_leases = boot_leases
        self.rows: dict[int, Row] = {}
        self.settled: dict[str, int] = {}
        self.floor = -1
        self.fence = 0
        self.current = ""
        self.definitions: dict[str, tuple[str, int]] = {}
        self.holders: dict[str, Holder] = {}

    # Time, and what it ends: S1, S19

    def lease_now(self) -> int:
        return self.boot if self.boot_leases else self.now

    def left(self, row: Row) -> int:
        """What is left of the lease; at most 0: it is over."""
        if row.boot != self.boot_id:
            return 0  # a new boot ends all leases
        left = row.until - self.lease_now()
        if left > row.length + row.length // 6:
            return 0  # written before a step back
        return left

    def witnessed(self, claim: Any) -> bool:
        if self.boot_leases:
            return True
        return bool(claim.vouched) and abs(claim.expected_at - self.now) <= claim.lease_ms // 6

    def over(self, row: Row, *, witnessed: bool) -> bool:
        if row.freed or row.boot != self.boot_id:
            return True
        return witnessed and self.left(row) <= 0

    # Claims: S2, S10, S11, S13, S18, S19 and S20

    def claim(self, claim: Any) -> str:
        row = self.rows.get(claim.slot)
        if row is not None:
            if row.token == claim.token and self.renewable(row):
                self.extend(row, claim.lease_ms)  # S11: also refreshes
                return "won"
            seen = (claim.seen_attempt, claim.seen_token)
            if claim.seen_attempt and not row.final and seen == (len(row.attempts), row.token):
                return self.take_over(claim, row)
            return "lost"
        settled = self.settled.get(claim.schedule_id)
        if settled is None:
            return "unregistered"
        if claim.slot - self.now > 1_000:
            return "early"
        too_old = claim.slot + claim.start_deadline_ms < self.now
        if claim.slot <= self.floor or claim.slot <= settled or too_old or claim.seen_attempt:
            return "late"
        if claim.overlap != "allow":
            blocking = self.in_the_way(claim)
            if blocking is not None and claim.slot > self.now:
                return "early"
            if blocking is not None:
                self.rows[claim.slot] = Row("skipped", "overlap", blocking=blocking)
                self.move_settled(claim)
                return "skipped"
        if not claim.may_run:
            return "unchanged"
        self.rows[claim.slot] = Row("due")
        self.start(claim, self.rows[claim.slot], "claim")
        self.move_settled(claim)
        return "won"

    def in_the_way(self, claim: Any) -> int | None:
        """The oldest unfinished run; exhausted or cancelled ones that are over are ended."""
        oldest = None
        for slot, row in sorted(self.rows.items()):
            if row.final:
                continue
            if self.over(row, witnessed=self.witnessed(claim)) and self.ended_for_good(row):
                continue
            oldest = slot if oldest is None else oldest
        return oldest

    def take_over(self, claim: Any, row: Row) -> str:
        if not self.over(row, witnessed=self.witnessed(claim)):
            stepped = (
                not self.boot_leases and abs(claim.expected_at - self.now) > claim.lease_ms // 6
            )
            if claim.vouched and stepped and self.left(row) <= 0:
                return "clock_step"
            return "lost"
        if self.ended_for_good(row):
            return "lost"
        if not claim.may_run:
            return "unchanged"
        row.lost += self.close(row)
        self.start(claim, row, "takeover")
        return "won"

    def close(self, row: Row) -> int:
        """Ends the present attempt; 1 if it counts against `max_attempts` (S19)."""
        if row.freed:
            return int(row.freed == "runner_lost")
        row.attempts[-1].state, row.attempts[-1].reason = "interrupted", "runner_lost"
        return 1

    def ended_for_good(self, row: Row) -> bool:
        """Ends a run that may have no further attempt (S19, S21a)."""
        counts = not row.freed or row.freed == "runner_lost"
        if row.cancel:
            row.lost += self.close(row)
            row.state, row.reason = "failed", CANCELLED[row.cancel]
            row.attempts[-1].state, row.attempts[-1].reason = row.state, row.reason
        elif row.lost + counts >= row.most:
            row.lost += self.close(row)
            row.state, row.reason = "failed", "attempts_exhausted"
        else:
            return False
        row.freed = ""
        return True

    def start(self, claim: Any, row: Row, cause: str) -> None:
        self.fence = max(self.fence + 1, self.now * 1_000)
        row.attempts.append(
            Attempt(claim.token, self.fence, claim.instance_id, claim.incarnation, cause)
        )
        row.state, row.reason, row.freed = "claimed", "", ""
        row.until, row.length = self.lease_now() + claim.lease_ms, claim.lease_ms
        row.boot = self.boot_id
        row.most, row.grace = claim.max_attempts, claim.cancel_grace_ms

    def move_settled(self, claim: Any) -> None:
        if claim.previous_slot is None or claim.previous_slot <= self.settled[claim.schedule_id]:
            self.settled[claim.schedule_id] = claim.slot

    # Tokens: S15, S17, S21a, S23 and S26

    def renewable(self, row: Row) -> bool:
        within = not row.cancel or abs(self.lease_now() - row.cancelled_at) <= row.grace
        return bool(row.attempts) and not row.final and not row.freed and within

    def extend(self, row: Row, length: int) -> None:
        left = self.left(row)
        if left > length:
            return
        row.until, row.length, row.boot = self.lease_now() + length, length, self.boot_id

    def renew(self, renewal: Any) -> str:
        row = self.rows.get(renewal.slot)
        if row is None:
            return "unknown_token"
        if row.token != renewal.token or not self.renewable(row):
            return "fenced"
        attempt = row.attempts[-1]
        if attempt.holder != renewal.incarnation and not renewal.adopt:
            return "fenced"
        attempt.holder, attempt.label = renewal.incarnation, renewal.instance_id
        if renewal.started_at is not None:
            attempt.started, attempt.state, row.state = True, "running", "running"
        self.extend(row, renewal.lease_ms)
        if renewal.cancel and not row.cancel:
            row.cancel, row.cancelled_at = renewal.cancel, self.lease_now()
        return "renewed"

    def complete(self, slot: int, token: str, kind: str, word: str) -> str:
        """A result: `kind` is returned, raised or stopped, `word` what or why."""
        row = self.rows.get(slot)
        if row is None or not row.attempts:
            return "unknown_token"
        told = (kind, word)
        if row.token != token:
            earlier = [a for a in row.attempts if a.token == token]
            return "recorded" if earlier and self.same(earlier[0], told) else "fenced"
        attempt = row.attempts[-1]
        if row.final or row.freed:
            if self.same(attempt, told):
                return "recorded"
            if row.final or kind == "stopped":
                return "already_completed"
        if kind == "stopped" and word in ("lease_lost", "fenced"):
            return "fenced"
        if kind == "stopped" and word == "shutdown" and not row.cancel:
            self.free(row, "handed_over")
            return "recorded"
        cancel = row.cancel or (word if kind == "stopped" else "")
        row.state = "failed" if cancel or kind == "raised" else "success"
        row.reason = CANCELLED[cancel] if cancel else ""
        row.freed = ""
        attempt.state, attempt.reason, attempt.started = row.state, row.reason, True
        attempt.told = told
        return "recorded" if self.same(attempt, told) else "already_completed"

    @staticmethod
    def same(attempt: Attempt, told: tuple[str, str]) -> bool:
        """Whether the attempt ended in the way that is told."""
        kind, word = told
        if kind == "stopped":
            if word == "shutdown":
                return attempt.reason == "handed_over"
            return attempt.state == "failed" and attempt.reason != ""
        if kind == "raised":
            return attempt.state == "failed" and attempt.told == told
        return attempt.state == "success" and attempt.told == told

    def release(self, release: Any) -> str:
        row = self.rows.get(release.slot)
        if row is None or not row.attempts:
            return "unknown_token"
        attempt = row.attempts[-1]
        if attempt.token != release.token or attempt.holder != release.incarnation or row.final:
            return "fenced"
        if not row.freed:
            self.free(row, release.reason)
        return "released"

    def free(self, row: Row, reason: str) -> None:
        row.state, row.reason, row.freed = "interrupted", reason, reason
        row.attempts[-1].state, row.attempts[-1].reason = "interrupted", reason
        self.ended_for_good(row)

    # Missed slots: S20

    def plan(
        self, schedule: str, settled: int, slots: list[int], deadline: int
    ) -> tuple[bool, int | None]:
        if self.settled.get(schedule) != settled:
            return False, self.settled.get(schedule)
        for slot in slots:
            if slot + deadline >= self.now:
                break
            if slot not in self.rows and slot > self.floor:
                self.rows[slot] = Row("skipped", "missed")
            self.settled[schedule] = slot
        return True, self.settled[schedule]

    # Definitions and pruning: S2, S28 and S30

    def live(self) -> list[Holder]:
        return [h for h in self.holders.values() if self.now - h.seen_at <= h.lease]

    def register(
        self, incarnation: str, lease: int, wanted: dict[str, tuple[str, int]]
    ) -> list[tuple[bool, int | None]]:
        """`wanted`: definition -> (schedule, window). Whether each is current; its `settled`."""
        held = {d for holder in self.live() for d in holder.holds}
        scheduled = {schedule for h in self.live() for schedule, _ in h.holds.values()}
        for name, (schedule, window) in wanted.items():
            current_schedule = self.definitions[self.current][0] if self.current else ""
            if schedule not in self.settled or schedule not in scheduled | {current_schedule}:
                self.settled[schedule] = self.now
            if name != self.current and name not in held:
                self.current = name
            self.definitions[name] = (schedule, window)
        self.holders[incarnation] = Holder(self.now, lease, dict(wanted))
        return [(name == self.current, self.settled[s]) for name, (s, _) in wanted.items()]

    def prune(self, most: int) -> int:
        """Deletes final runs beyond the newest `most`."""
        used = {self.current, *(d for holder in self.live() for d in holder.holds)} - {""}
        bound = self.now
        for name in used:
            schedule, window = self.definitions[name]
            bound = min(bound, self.now - window, self.settled[schedule])
        slots = sorted(self.rows)
        beyond = slots[: max(0, len(slots) - most)]
        gone = [slot for slot in beyond if slot <= bound and self.rows[slot].final]
        for slot in gone:
            self.floor = max(self.floor, slot)
            del self.rows[slot]
        return len(gone)

    # What is shown

    def shown(self) -> dict[int, Any]:
        """Every row as it must show now, newest slot last."""
        return {slot: self.shown_row(row) for slot, row in sorted(self.rows.items())}

    def shown_row(self, row: Row) -> Any:
        attempts = [
            (a.token, a.fence, a.label, a.holder, a.cause, a.state, a.reason) for a in row.attempts
        ]
        state, reason, left = row.state, row.reason, None
        if not row.final:
            left = self.left(row)
            if left <= 0 and not row.freed:
                state, reason = "interrupted", "runner_lost"
                attempts[-1] = (*attempts[-1][:5], state, reason)
        return (
            state,
            reason,
            row.freed,
            row.cancel,
            row.lost,
            left,
            row.blocking,
            row.covered,
            attempts,
        )
