"""What a store must answer, written from the rules alone: the other half of `test_model`.

Shares no code with the machine or with any backend: plain mutable rows, one method an act, the
numbers of the rules beside the lines that say them.
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

    slot: int
    state: str
    reason: str = ""
    trigger: str = "schedule"
    request: str = ""
    payload: bytes = b""
    attempts: list[Attempt] = field(default_factory=list)
    until: int = 0  # the lease's end, on the lease clock of boot `boot`
    over_at: int = 0  # when the attempt was over, or its lease will be, by the wall clock
    length: int = 0
    boot: str = ""
    freed: str = ""
    cancel: str = ""
    cancelled_at: int = 0
    grace: int = 0
    lost: int = 0
    most: int = 0
    failed: int = 0
    retries: int = 0
    retry_at: int = 0
    delay: int = 0
    window: int = 0
    blocking: int = 0
    covered: int = 0

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def due(self) -> bool:
        return self.state == "due"

    @property
    def begun(self) -> bool:
        """Unfinished, in the words of S18."""
        return not self.final and not self.due

    @property
    def retried(self) -> bool:
        """Whether what follows is a retry (S22): it failed, or timed out with retries left."""
        if self.cancel:
            return self.cancel == "timeout" and self.failed < self.retries
        return self.state == "retrying"

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
        self.paused_at: int | None = None

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
        """Whether no attempt of a run that was begun is in progress."""
        if row.freed or row.state == "retrying" or row.boot != self.boot_id:
            return True
        return witnessed and self.left(row) <= 0

    def wait(self, row: Row, *, witnessed: bool = True) -> int:
        """How long a run that is to be retried still waits."""
        left = row.retry_at - self.now
        if witnessed and left > row.delay + 1_000:
            return 0  # written before a step back
        return max(0, left)

    # Claims: S2, S10, S11, S13, S18, S19, S20, S22 and S29

    def claim(self, claim: Any) -> str:
        row = self.rows.get(claim.slot)
        if row is not None:
            return self.claim_row(claim, row)
        settled = self.settled.get(claim.schedule_id)
        if settled is None:
            return "unregistered"
        if claim.slot - self.now > 1_000:
            return "early"
        if self.paused_at is not None:
            return "paused"
        too_old = claim.slot + claim.start_deadline_ms < self.now
        if claim.slot <= self.floor or claim.slot <= settled or too_old or claim.seen_attempt:
            return "late"
        return self.claim_fresh(claim)

    def claim_row(self, claim: Any, row: Row) -> str:
        if row.token == claim.token and self.renewable(row):
            self.extend(row, claim.lease_ms)  # S11: also refreshes
            return "won"
        if row.final or (claim.seen_attempt, claim.seen_token) != (len(row.attempts), row.token):
            return "lost"
        witnessed = self.witnessed(claim)
        if row.due:
            if row.slot - self.now > 1_000:
                return "early"
        elif row.state == "retrying":
            if self.wait(row, witnessed=witnessed):
                return "early"
        elif not self.over(row, witnessed=witnessed):
            stepped = (
                not self.boot_leases and abs(claim.expected_at - self.now) > claim.lease_ms // 6
            )
            return "clock_step" if claim.vouched and stepped and self.left(row) <= 0 else "lost"
        first = None
        if claim.overlap != "allow":
            others = self.others(row.slot)
            self.bury(others, witnessed=witnessed)
            first = self.first_before(row, others, witnessed=witnessed)
        reason = self.reason_to_end(row)
        if reason and not (reason == "abandoned" and first):
            self.end(row, reason)
            return "lost"
        if first:
            return "queued"
        if not claim.may_run:
            return "unchanged"
        cause = "claim" if row.due else "retry" if row.retried else "takeover"
        self.close(row)
        self.start(claim, row, cause)
        return "won"

    def first_before(self, row: Row, others: list[Row], *, witnessed: bool) -> Row | None:
        """Whom a run that has a row must let go first."""
        for other in others:
            if other.final:
                continue
            older = other.slot < row.slot
            if row.due and (other.begun or older):
                return other  # S18, S20
            if row.begun and other.begun:  # I4
                in_progress = not self.over(other, witnessed=witnessed)
                if older or in_progress:
                    return other
        return None

    def claim_fresh(self, claim: Any) -> str:
        unfinished: list[Row] = []
        waiting: list[Row] = []
        if claim.overlap != "allow":
            others = self.others(claim.slot)
            self.bury(others, witnessed=self.witnessed(claim))
            unfinished = [row for row in others if row.begun]
            waiting = [row for row in others if row.due]
        queues = claim.overlap in ("queue", "cancel")
        waits = queues and any(row.slot < claim.slot for row in waiting)
        if claim.slot > self.now and (unfinished or waits):
            return "early"
        superseded = False
        if claim.overlap == "cancel":
            for row in unfinished:
                superseded = True
                self.ask_to_stop(row, "superseded", witnessed=self.witnessed(claim))
            unfinished = [row for row in unfinished if row.begun]
        if unfinished or waits or (superseded and not claim.may_run):
            own = self.queue(claim, unfinished, waiting) if queues else Row(claim.slot, "skipped")
            if not queues:
                own.reason, own.blocking = "overlap", unfinished[0].slot
            self.rows[claim.slot] = own
            self.move_settled(claim)
            return "queued" if own.due else "skipped"
        if not claim.may_run:
            return "unchanged"
        self.rows[claim.slot] = Row(claim.slot, "due")
        self.start(claim, self.rows[claim.slot], "claim")
        self.move_settled(claim)
        return "won"

    def queue(self, claim: Any, unfinished: list[Row], waiting: list[Row]) -> Row:
        """The newest slot stays in the queue; what was caught up or triggered stays too."""
        scheduled = [row for row in waiting if row.trigger == "schedule"]
        before = [row.slot for row in unfinished]
        before += [r.slot for r in waiting if r not in scheduled and r.slot < claim.slot]
        newer = [row.slot for row in scheduled if row.slot > claim.slot]
        if newer:
            return Row(claim.slot, "skipped", "overlap", blocking=min(before or newer))
        for row in scheduled:
            row.state, row.reason = "skipped", "overlap"
        return Row(claim.slot, "due", window=claim.window_ms, blocking=min(before) if before else 0)

    def others(self, slot: int) -> list[Row]:
        """The rows at other slots that are not final, oldest first."""
        return [row for _, row in sorted(self.rows.items()) if row.slot != slot and not row.final]

    def bury(self, rows: list[Row], *, witnessed: bool) -> None:
        """Ends the runs that are over for good; none is abandoned while one is in progress."""
        begun = [row for row in rows if row.begun]
        busy = any(not self.over(row, witnessed=witnessed) for row in begun)
        for row in begun:
            reason = self.reason_to_end(row)
            abandoned = reason == "abandoned"
            if self.over(row, witnessed=witnessed) and reason and not (abandoned and busy):
                self.end(row, reason)

    def ask_to_stop(self, row: Row, why: str, *, witnessed: bool) -> None:
        """S21a: nothing follows what was cancelled, not even a retry after a timeout."""
        if not row.cancel:
            row.cancel, row.cancelled_at = why, self.lease_now()
        elif row.retried:
            row.cancel = why
        if self.over(row, witnessed=witnessed):
            self.end(row, self.reason_to_end(row))

    def close(self, row: Row) -> None:
        """Ends the present attempt, and counts it where it counts (S19, S22)."""
        if row.due or row.state == "retrying":
            return
        if row.retried:
            row.failed += 1
            row.attempts[-1].state, row.attempts[-1].reason = "failed", "timeout"
            return
        row.lost += row.freed in ("", "runner_lost")
        if not row.freed:
            row.attempts[-1].state, row.attempts[-1].reason = "interrupted", "runner_lost"

    def reason_to_end(self, row: Row) -> str:
        """Why a run without an attempt in progress has no other (S19, S21a); empty: it may."""
        if row.cancel and not row.retried:
            return CANCELLED[row.cancel]
        if row.begun and not row.retried:
            lost = row.lost + (row.freed in ("", "runner_lost"))
            if lost >= row.most:
                return "attempts_exhausted"
        since = row.over_at
        if row.due:
            since = row.slot
        elif row.state == "retrying":
            since = row.retry_at
        return "abandoned" if since + row.window < self.now else ""

    def end(self, row: Row, reason: str) -> None:
        if row.due:
            row.state, row.reason = "skipped", reason
            return
        self.close(row)
        if row.cancel and row.state != "retrying":
            row.attempts[-1].state, row.attempts[-1].reason = "failed", reason
        row.state, row.reason, row.freed = "failed", reason, ""

    def start(self, claim: Any, row: Row, cause: str) -> None:
        self.fence = max(self.fence + 1, self.now * 1_000)
        row.attempts.append(
            Attempt(claim.token, self.fence, claim.instance_id, claim.incarnation, cause)
        )
        row.state, row.reason, row.freed = "claimed", "", ""
        row.until, row.length = self.lease_now() + claim.lease_ms, claim.lease_ms
        row.boot, row.over_at = self.boot_id, self.now + claim.lease_ms
        row.most, row.grace = claim.max_attempts, claim.cancel_grace_ms
        row.retries, row.window = claim.retries, claim.window_ms
        row.cancel = ""

    def move_settled(self, claim: Any) -> None:
        if claim.previous_slot is None or claim.previous_slot <= self.settled[claim.schedule_id]:
            self.settled[claim.schedule_id] = claim.slot

    # Tokens: S15, S17, S21a, S23 and S26

    def renewable(self, row: Row) -> bool:
        within = not row.cancel or abs(self.lease_now() - row.cancelled_at) <= row.grace
        return row.state in ("claimed", "running") and not row.freed and within

    def extend(self, row: Row, length: int) -> None:
        left = self.left(row)
        row.over_at = self.now + max(left, length)
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

    def complete(
        self, slot: int, token: str, kind: str, word: str, retry_in: int | None = None
    ) -> str:
        """A result: `kind` is returned, raised, gave up (for good) or stopped, `word` what or why."""
        row = self.rows.get(slot)
        if row is None or not row.attempts:
            return "unknown_token"
        told = (kind, word)
        if row.token != token:
            earlier = [a for a in row.attempts if a.token == token]
            return "recorded" if earlier and self.same(earlier[0], told) else "fenced"
        attempt = row.attempts[-1]
        if row.final or row.freed or row.state == "retrying":
            if self.same(attempt, told):
                return "recorded"
            if not row.freed or kind == "stopped":
                return "already_completed"
        if kind == "stopped" and word in ("lease_lost", "fenced"):
            return "fenced"
        if kind == "stopped" and word == "shutdown" and not row.cancel:
            self.free(row, "handed_over")
            return "recorded"
        self.record(row, told, retry_in)
        return "recorded" if self.same(attempt, told) else "already_completed"

    def record(self, row: Row, told: tuple[str, str], retry_in: int | None) -> None:
        kind, word = told
        attempt = row.attempts[-1]
        cancel = row.cancel or (word if kind == "stopped" else "")
        failed = bool(cancel) or kind in ("raised", "gave up")
        attempt.state = row.state = "failed" if failed else "success"
        attempt.reason = row.reason = CANCELLED[cancel] if cancel else ""
        attempt.started, attempt.told, row.freed = True, told, ""
        left = row.retries - row.failed
        row.failed += failed
        again = retry_in is not None and kind != "gave up" and cancel in ("", "timeout")
        if failed and again and left > 0:  # S22
            row.state, row.reason, row.cancel = "retrying", "", ""
            row.retry_at, row.delay = self.now + (retry_in or 0), retry_in or 0

    def oldest_due(self) -> int | None:
        return min((row.slot for row in self.rows.values() if row.due), default=None)

    @staticmethod
    def same(attempt: Attempt, told: tuple[str, str]) -> bool:
        """Whether the attempt ended in the way that is told."""
        kind, word = told
        if kind == "stopped":
            if word == "shutdown":
                return attempt.reason == "handed_over"
            return attempt.state == "failed" and attempt.reason != ""
        if kind in ("raised", "gave up"):
            return attempt.state == "failed" and attempt.told == told
        return attempt.state == "success" and attempt.told == told

    def release(self, release: Any) -> str:
        row = self.rows.get(release.slot)
        if row is None or not row.attempts:
            return "unknown_token"
        attempt = row.attempts[-1]
        if attempt.token != release.token or attempt.holder != release.incarnation:
            return "fenced"
        if row.final or row.state == "retrying":
            return "fenced"
        if not row.freed:
            self.free(row, release.reason)
        return "released"

    def free(self, row: Row, reason: str) -> None:
        row.state, row.reason, row.freed, row.over_at = "interrupted", reason, reason, self.now
        timed_out = row.cancel == "timeout"  # S21: it is Failed, whatever it says
        row.attempts[-1].state = "failed" if timed_out else "interrupted"
        row.attempts[-1].reason = "timeout" if timed_out else reason
        why = self.reason_to_end(row)
        if why:
            self.end(row, why)

    # Missed slots: S20

    def plan(self, plan: Any, missed_by: int | None = None) -> tuple[bool, int | None, int, int]:
        """Whether it was done, `settled`, and how many are missed and Due."""
        settled = self.settled.get(plan.schedule_id)
        if settled != plan.settled or self.paused_at is not None:
            return False, settled, 0, 0
        by = self.now if missed_by is None else missed_by
        over: list[int] = []
        for missed in plan.slots:
            if missed.slot + missed.start_deadline_ms >= by:
                break
            over.append(missed.slot)
        if not over:
            return True, settled, 0, 0
        upto = over[-1]
        for follows in plan.slots[len(over) :]:
            if follows.slot not in self.rows:
                break
            upto = follows.slot
        self.settled[plan.schedule_id] = upto
        lost = [slot for slot in over if slot not in self.rows and slot > self.floor]
        most = {"none": 0, "latest": 1, "all": plan.limit}[plan.catch_up]
        run = [slot for slot in lost if slot >= self.now - plan.window_ms]
        run = run[-most:] if most else []
        skipped = [slot for slot in lost if slot not in run]
        rest = skipped[: -plan.limit]
        for slot in skipped[len(rest) :]:
            self.rows[slot] = Row(slot, "skipped", "missed")
        if rest:
            self.rows[rest[-1]] = Row(rest[-1], "skipped", "missed", covered=len(rest))
        for slot in run:
            self.rows[slot] = Row(slot, "due", trigger="catch_up", window=plan.window_ms)
        waiting = [row for row in self.others(-1) if row.due and row.trigger == "catch_up"]
        kept = 1 if plan.catch_up == "latest" else plan.limit
        for row in waiting[: max(0, len(waiting) - kept)]:
            row.state, row.reason = "skipped", "missed"
            skipped.append(row.slot)
        return True, upto, len(skipped), sum(self.rows[slot].due for slot in run)

    # What operators ask: S29

    def pause(self) -> str:
        if not self.current:
            return "not_found"
        if self.paused_at is None:
            self.paused_at = self.now
            for row in self.rows.values():
                if row.due and row.trigger != "manual":
                    row.state, row.reason = "skipped", "paused"
        return "done"

    def schedules_in_use(self) -> set[str]:
        used = {schedule for h in self.live() for schedule, _ in h.holds.values()}
        return used | ({self.definitions[self.current][0]} if self.current else set())

    def resume(self, resume: Any) -> str:
        if not self.current:
            return "not_found"
        if self.paused_at is None:
            return "done"
        in_use = {schedule: self.settled[schedule] for schedule in self.schedules_in_use()}
        seen = {passed.schedule_id: passed.settled for passed in resume.passed}
        if resume.paused_at != self.paused_at or seen != in_use or self.now > resume.until:
            return "stale"
        began, self.paused_at = min(self.paused_at, self.now), None
        for plan in resume.plans:
            self.plan(plan, missed_by=began)
        over: set[int] = set()
        for passed in resume.passed:
            after = max(self.settled[passed.schedule_id], self.floor)
            over |= {slot for slot in passed.slots if after < slot <= self.now}
            self.settled[passed.schedule_id] = max(self.settled[passed.schedule_id], self.now)
        over -= self.rows.keys()
        if over:
            newest = max(over)
            self.rows[newest] = Row(newest, "skipped", "paused", covered=len(over))
        return "done"

    def trigger(self, trigger: Any) -> tuple[str, int | None]:
        """What became of it, and the slot of the run."""
        for row in self.rows.values():
            if row.request == trigger.request_id:
                return "done", row.slot
        if not self.current:
            return "not_found", None
        slot = max(self.now, self.floor + 1)
        while slot in self.rows or slot in trigger.slots:
            slot += 1
        if slot > trigger.until:
            return "stale", None
        if sum(row.due and row.trigger == "manual" for row in self.rows.values()) >= 100:
            return "full", None
        made = Row(slot, "due", trigger="manual", window=trigger.window_ms)
        made.request, made.payload = trigger.request_id, trigger.payload
        if trigger.overlap != "allow":
            others = self.others(slot)
            self.bury(others, witnessed=self.boot_leases)
            if trigger.overlap == "cancel":
                for row in [row for row in others if row.begun]:
                    self.ask_to_stop(row, "superseded", witnessed=self.boot_leases)
            unfinished = [row for row in others if row.begun]
            if unfinished:
                made.blocking = unfinished[0].slot
            if unfinished and trigger.overlap == "skip":
                made.state, made.reason = "skipped", "overlap"
        self.rows[slot] = made
        return "done", slot

    def cancel(self, slot: int) -> str:
        row = self.rows.get(slot)
        if row is None:
            return "not_found"
        if row.final:
            return "final"
        if row.due:
            self.end(row, "cancelled")
        else:
            self.ask_to_stop(row, "requested", witnessed=self.boot_leases)
        return "done"

    # Definitions and pruning: S2, S28 and S30

    def live(self) -> list[Holder]:
        return [h for h in self.holders.values() if self.now - h.seen_at <= h.lease]

    def let_go(self, incarnation: str, lease: int) -> None:
        """The instance lives, and holds nothing of the job any more."""
        self.holders[incarnation] = Holder(self.now, lease)

    def registers_elsewhere(self, incarnation: str, lease: int) -> None:
        """The instance lives, and holds of the job what it held."""
        known = self.holders.get(incarnation)
        self.holders[incarnation] = Holder(self.now, lease, known.holds if known else {})

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
        used = {d for holder in self.live() for d in holder.holds} or {self.current} - {""}
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
        state, reason, left, wait = row.state, row.reason, None, None
        if state == "retrying":
            wait = self.wait(row)
        elif row.begun:
            left = self.left(row)
            if left <= 0 and not row.freed:
                state, reason = "interrupted", "runner_lost"
                attempts[-1] = (*attempts[-1][:5], state, reason)
        return (
            row.trigger,
            state,
            reason,
            row.freed,
            row.cancel,
            row.lost,
            row.failed,
            left,
            wait,
            row.blocking,
            row.covered,
            row.request,
            attempts,
        )
