"""Any backend against the reference, over random acts of three instances (S1 to S29, I1 to I3).

What a backend cannot do by its capabilities is left out for it, and joins as soon as it can.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from anarchon_server.core.model import (
    CancelReason,
    CatchUpPolicy,
    Failure,
    Outcome,
    OverlapPolicy,
    Reason,
    RunView,
)
from anarchon_server.core.store import (
    CancelRun,
    Claim,
    ClaimOutcome,
    Completion,
    Control,
    ControlAnswer,
    MissedSlot,
    Passed,
    Pause,
    Plan,
    PrunePolicy,
    Release,
    Resume,
    RunQuery,
    TriggerRun,
)
from tests.contract.harness import (
    BACKENDS,
    DAY,
    LEASE,
    PERIOD,
    SECOND,
    T0,
    Cluster,
    Node,
    definition,
)
from tests.contract.reference import Reference

T = TypeVar("T")

NODES = st.integers(0, 2)
WHO = st.integers(0, 5)
PICK = st.integers(0, 10_000)
LENGTHS = st.sampled_from([3 * SECOND, 12 * SECOND, LEASE])
OVERLAPS = st.sampled_from([*OverlapPolicy, OverlapPolicy.SKIP])
WINDOWS = st.sampled_from([1_000 * DAY, 1_000 * DAY, 1_000 * DAY, 20 * SECOND])
RETRIES = st.integers(0, 2)
WISHES = st.fixed_dictionaries(
    {
        "previous_slot": st.booleans(),
        "may_run": st.sampled_from([True, True, True, False]),
        "overlap": OVERLAPS,
        "start_deadline_ms": st.sampled_from([PERIOD, 30 * SECOND]),
        "lease_ms": LENGTHS,
        "max_attempts": st.integers(1, 3),
        "window_ms": WINDOWS,
        "retries": RETRIES,
        "vouched": st.booleans(),
    }
)
SCHEDULES = {"every:10s": PERIOD, "every:5s": 5 * SECOND}
VERSIONS = {
    "a": definition(window=20 * SECOND),
    "b": definition(window=60 * SECOND, labels=(("v", "b"),)),
    "c": definition(period=5 * SECOND, window=20 * SECOND),
}
OUTCOMES = {
    ("returned", "x"): Outcome("x"),
    ("returned", "y"): Outcome("y"),
    ("raised", "E"): Outcome(failure=Failure("E", "m", "t")),
    ("gave up", "P"): Outcome(failure=Failure("P", permanent=True)),
    **{("stopped", reason.value): Outcome(stopped=reason) for reason in CancelReason},
}


def shown(seen: RunView) -> Any:
    """A run in the words of the reference."""
    run = seen.run
    attempts = [
        (a.token, a.fence, a.instance_id, a.incarnation, a.cause, a.state, a.reason)
        for a in seen.attempts
    ]
    cancel = run.cancel.value if run.cancel else ""
    return (
        run.trigger,
        run.state,
        run.reason,
        run.freed,
        cancel,
        run.lost,
        run.failed,
        seen.lease_left_ms,
        seen.wait_ms,
        run.blocking_slot,
        run.slots_covered,
        run.request_id,
        attempts,
    )


class StoreAgainstReference(RuleBasedStateMachine):
    """Every act is done to both; every answer and every row must be the same."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        in_memory = Path("/dev/shm")
        self.directory = TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None)
        database = BACKENDS[self.backend](Path(self.directory.name))
        self.cluster = Cluster(database)
        self.nodes: list[Node] = [self.wait(self.cluster.node()) for _ in range(3)]
        self.can = self.nodes[0].store.capabilities
        boot_leases = self.can.boot_leases
        clock = self.cluster.clock
        self.reference = Reference(self.cluster.now, clock.boot, boot_leases=boot_leases)
        self.asked: list[Claim] = []
        self.finals: dict[int, Any] = {}

    def teardown(self) -> None:
        self.wait(self.cluster.stack.aclose())
        self.runner.close()
        self.directory.cleanup()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def synchronise(self) -> None:
        clock = self.cluster.clock
        self.reference.now, self.reference.boot = self.cluster.now, clock.boot
        if self.reference.boot_leases:
            self.reference.boot_id = clock.boot_id

    def pick(self, number: int) -> tuple[int, str]:
        """A slot and one of its tokens: most often of an unfinished run, and the newest."""
        rows = {slot: row for slot, row in self.reference.rows.items() if row.attempts}
        unfinished = sorted(slot for slot, row in rows.items() if not row.final)
        among = unfinished if unfinished and number % 5 else sorted(rows)
        slot = among[-1 - number % min(len(among), 3)]
        attempts = self.reference.rows[slot].attempts
        age = number // 7 % 3 and number // 29 % len(attempts)
        return slot, attempts[-1 - age].token

    def attempted(self) -> bool:
        return any(row.attempts for row in self.reference.rows.values())

    def waited_for(self) -> bool:
        return any(row.due or row.state == "retrying" for row in self.reference.rows.values())

    def controlled(self) -> bool:
        return self.can.control

    def possible(self, given: dict[str, Any]) -> dict[str, Any]:
        """A claim's values without what the backend cannot do."""
        able = dict(given)
        if given["overlap"] not in self.can.overlap:
            able["overlap"] = OverlapPolicy.SKIP
        if not self.can.retries:
            able["retries"] = 0
        if not self.can.control:
            able["window_ms"] = 1_000 * DAY
        return able

    def actor(self, who: int, slot: int) -> Node:
        """One of the three, or, for half of the numbers, whoever holds the slot."""
        holder = self.reference.rows[slot].attempts[-1].holder
        holds = [node for node in self.nodes if node.instance.incarnation == holder]
        return holds[0] if who > 2 else self.nodes[who]

    @initialize()
    def begin(self) -> None:
        for number in range(3):
            self.register(number, ["a", "c"] if number else ["a"])

    # Time

    @rule(
        ms=st.sampled_from([1, 400, SECOND, 2_900, 5 * SECOND, 5_001, PERIOD, 12 * SECOND, LEASE])
    )
    def time_passes(self, ms: int) -> None:
        self.cluster.advance(ms)
        self.synchronise()

    @rule(number=PICK, off=st.sampled_from([-1, 0, 0, 1]))
    def a_lease_ends(self, number: int, off: int) -> None:
        """Or is about to."""
        held = [row for row in self.reference.rows.values() if row.state in ("claimed", "running")]
        if held:
            self.cluster.advance(max(0, self.reference.left(held[number % len(held)]) + off))
            self.synchronise()

    @rule(number=PICK, off=st.sampled_from([-1, 0, 1]))
    def a_retry_comes(self, number: int, off: int) -> None:
        """Or is about to."""
        failed = [row for row in self.reference.rows.values() if row.state == "retrying"]
        if failed:
            self.cluster.advance(max(0, self.reference.wait(failed[number % len(failed)]) + off))
            self.synchronise()

    @rule(number=PICK, off=st.sampled_from([0, 1]))
    def a_grace_ends(self, number: int, off: int) -> None:
        """Or is about to."""
        asked = [row for row in self.reference.rows.values() if not row.final and row.cancel]
        if asked:
            row = asked[number % len(asked)]
            over = row.cancelled_at + row.grace + off - self.reference.lease_now()
            self.cluster.advance(max(0, over))
            self.synchronise()

    @rule(seconds=st.sampled_from([-3_600, -7, -1, 1, 7, 3_600]))
    def the_wall_clock_is_set(self, seconds: int) -> None:
        self.cluster.step(seconds * SECOND)
        self.synchronise()

    @rule(counts_on=st.booleans())
    def the_machine_starts_anew(self, counts_on: bool) -> None:
        if self.reference.boot_leases:
            self.cluster.reboot(self.cluster.clock.boot if counts_on else 0)
            self.synchronise()

    # Claims

    @rule(
        node=NODES,
        schedule=st.sampled_from(["every:10s", "every:10s", "every:5s"]),
        given=WISHES,
        before=st.sampled_from([0, 0, 0, 0, 1, 700, SECOND, SECOND + 1]),
    )
    def a_slot_comes(self, node: int, schedule: str, given: dict[str, Any], before: int) -> None:
        """Time passes until the next slot, or a little less; an instance claims it."""
        period = SCHEDULES[schedule]
        slot = ((self.cluster.now + before) // period + 1) * period
        self.cluster.advance_to(slot - before)
        self.synchronise()
        self.claims(node, slot, schedule, given)

    @rule(node=NODES, overlap=OVERLAPS, retries=RETRIES, number=PICK)
    def a_slot_is_claimed_in_time(
        self, node: int, overlap: OverlapPolicy, retries: int, number: int
    ) -> None:
        """As in quiet times, and what is in progress lives on."""
        slot = (self.cluster.now // PERIOD + 1) * PERIOD
        self.cluster.advance_to(slot)
        self.synchronise()
        for row in self.reference.rows.values():
            if row.state in ("claimed", "running") and number % 4:
                self.renew(3, row.slot, row.token)
        given = {"overlap": overlap, "retries": retries, "window_ms": 1_000 * DAY}
        self.ask(node, self.nodes[node].wish(slot, **self.possible(given)))

    @rule(
        node=NODES,
        schedule=st.sampled_from(["every:10s", "every:10s", "every:5s"]),
        given=WISHES,
        back=st.integers(0, 3),
        late=st.sampled_from([None, 0, 1]),
    )
    def an_older_slot_is_claimed(
        self, node: int, schedule: str, given: dict[str, Any], back: int, late: int | None
    ) -> None:
        """Some time after it, or just when its deadline is over."""
        period = SCHEDULES[schedule]
        slot = (self.cluster.now // period - back) * period
        if late is not None and (at := slot + given["start_deadline_ms"] + late) > self.cluster.now:
            self.cluster.advance_to(at)
            self.synchronise()
        self.claims(node, slot, schedule, given)

    def claims(self, node: int, slot: int, schedule: str, given: dict[str, Any]) -> None:
        chained = given["previous_slot"]
        previous = {"previous_slot": slot - SCHEDULES[schedule] if chained else None}
        able = self.possible(given) | previous
        self.ask(node, self.nodes[node].wish(slot, schedule_id=schedule, **able))

    def ask(self, node: int, claim: Claim) -> None:
        self.asked.append(claim)
        answer = self.wait(self.nodes[node].ask(claim))
        assert answer.outcome == self.reference.claim(claim), claim
        won = answer.outcome is ClaimOutcome.WON
        assert answer.payload == (self.reference.rows[claim.slot].payload if won else b"")
        assert self.wait(self.nodes[node].store.claim([])).fences == {}

    @rule(node=NODES, number=PICK, again=st.booleans())
    def a_claim_is_repeated(self, node: int, number: int, again: bool) -> None:
        """By a lost reply or a slow network: as it was, or as of now; most often one that won."""
        rows = self.reference.rows
        won = [c for c in self.asked if c.slot in rows and rows[c.slot].token == c.token]
        among = won if won and number % 4 else self.asked
        if among:
            claim = among[-1 - number % min(len(among), 5)]
            self.ask(node, replace(claim, expected_at=self.cluster.now) if again else claim)

    @precondition(attempted)
    @rule(
        node=NODES,
        number=PICK,
        right=st.sampled_from([True, True, True, False]),
        may_run=st.sampled_from([True, True, False]),
        vouched=st.sampled_from([True, True, False]),
        off=st.sampled_from([0, 0, 0, -600, 600, 4 * SECOND, -4 * SECOND]),
        lease=LENGTHS,
        most=st.integers(1, 3),
        overlap=OVERLAPS,
        window=WINDOWS,
        retries=RETRIES,
    )
    def takes_over(
        self,
        node: int,
        number: int,
        right: bool,
        may_run: bool,
        vouched: bool,
        off: int,
        lease: int,
        most: int,
        overlap: OverlapPolicy,
        window: int,
        retries: int,
    ) -> None:
        slot, token = self.pick(number)
        able = self.possible({"overlap": overlap, "window_ms": window, "retries": retries})
        if not self.can.control:
            able["overlap"] = OverlapPolicy.ALLOW
        claim = self.nodes[node].wish(
            slot,
            seen_attempt=len(self.reference.rows[slot].attempts) - (not right),
            seen_token=token,
            may_run=may_run,
            vouched=vouched,
            expected_at=self.cluster.now + off,
            lease_ms=lease,
            max_attempts=most,
            **able,
        )
        self.ask(node, claim)

    @precondition(waited_for)
    @rule(node=NODES, number=PICK, given=WISHES)
    def claims_what_waits(self, node: int, number: int, given: dict[str, Any]) -> None:
        """A run that is due since before, or is to be retried."""
        rows = [row for row in self.reference.rows.values() if row.due or row.state == "retrying"]
        row = rows[number % len(rows)]
        seen = {"seen_attempt": len(row.attempts), "seen_token": row.token}
        able = self.possible(given) | {"previous_slot": None}
        self.ask(node, self.nodes[node].wish(row.slot, **(able | seen)))

    # Tokens

    @precondition(attempted)
    @rule(
        who=WHO,
        number=PICK,
        adopt=st.booleans(),
        starts=st.booleans(),
        lease=LENGTHS,
        cancel=st.sampled_from([None, None, None, None, "timeout", "requested", "superseded"]),
    )
    def renews(
        self, who: int, number: int, adopt: bool, starts: bool, lease: int, cancel: str | None
    ) -> None:
        slot, token = self.pick(number)
        self.renew(who, slot, token, adopt, starts, lease, cancel)

    def renew(
        self,
        who: int,
        slot: int,
        token: str,
        adopt: bool = False,
        starts: bool = True,
        lease: int = LEASE,
        cancel: str | None = None,
    ) -> None:
        node = self.actor(who, slot)
        seen = self.wait(node.run(slot))
        assert seen is not None
        renewal = node.renewal(
            seen,
            token=token,
            adopt=adopt,
            lease_ms=lease,
            started_at=self.cluster.now if starts else None,
            cancel=CancelReason(cancel) if cancel else None,
        )
        answer = self.wait(node.beat(renewals=(renewal,)))
        assert answer.renewals[0].outcome == self.reference.renew(renewal), renewal
        self.reference.holders[renewal.incarnation].seen_at = self.cluster.now

    @precondition(attempted)
    @rule(
        node=NODES,
        number=PICK,
        told=st.sampled_from([*OUTCOMES, ("raised", "E"), ("raised", "E"), ("raised", "E")]),
        retry_in=st.sampled_from([None, 0, SECOND, SECOND, PERIOD]),
    )
    def completes(
        self, node: int, number: int, told: tuple[str, str], retry_in: int | None
    ) -> None:
        slot, token = self.pick(number)
        ended_before = self.reference.rows[slot].final
        retry_in = retry_in if self.can.retries else None
        completion = Completion("job", slot, token, OUTCOMES[told], retry_in)
        (answer,) = self.wait(self.nodes[node].store.complete([completion])).answers
        expected = self.reference.complete(slot, token, *told, retry_in=retry_in)
        assert answer.outcome == expected, completion
        ends = self.reference.rows[slot].final and not ended_before
        due = self.reference.oldest_due() if ends else None
        assert (answer.due.run.slot if answer.due else None) == due

    @precondition(attempted)
    @rule(
        who=WHO,
        number=PICK,
        reason=st.sampled_from([Reason.HANDED_OVER, Reason.RUNNER_LOST, Reason.NOT_ACCEPTED]),
    )
    def releases(self, who: int, number: int, reason: str) -> None:
        slot, token = self.pick(number)
        node = self.actor(who, slot)
        release = Release("job", slot, token, node.instance.incarnation, reason)
        (answer,) = self.wait(node.store.release([release])).answers
        assert answer.outcome == self.reference.release(release), release

    # Settling

    @rule(
        node=NODES,
        schedule=st.sampled_from(["every:10s", "every:10s", "every:5s"]),
        stale=st.sampled_from([0, 0, 0, 1]),
        deadline=st.sampled_from([PERIOD, 30 * SECOND]),
        catch_up=st.sampled_from(CatchUpPolicy),
        window=WINDOWS,
        limit=st.sampled_from([1, 2, 100]),
    )
    def plans(
        self,
        node: int,
        schedule: str,
        stale: int,
        deadline: int,
        catch_up: CatchUpPolicy,
        window: int,
        limit: int,
    ) -> None:
        plan = self.plan_of(schedule, deadline, catch_up, window, limit)
        plan = replace(plan, settled=plan.settled - stale)
        (answer,) = self.wait(self.nodes[node].store.settle([plan])).answers
        expected = self.reference.plan(plan)
        assert (answer.done, answer.settled, answer.missed, answer.due) == expected

    def plan_of(
        self, schedule: str, deadline: int, catch_up: CatchUpPolicy, window: int, limit: int
    ) -> Plan:
        """A plan for the oldest slots that are not settled."""
        period = SCHEDULES[schedule]
        settled = self.reference.settled.get(schedule, T0)
        slots = self.slots(schedule, settled, min(self.cluster.now, settled + 12 * period))
        return Plan(
            "job",
            schedule,
            settled,
            tuple(MissedSlot(slot, deadline) for slot in slots),
            limit=limit,
            catch_up=catch_up if catch_up in self.can.catch_up else CatchUpPolicy.NONE,
            window_ms=window,
        )

    @staticmethod
    def slots(schedule: str, after: int, until: int) -> tuple[int, ...]:
        period = SCHEDULES[schedule]
        return tuple(range((after // period + 1) * period, until + 1, period))

    # What operators ask

    def control(self, act: Control) -> ControlAnswer:
        (answer,) = self.wait(self.nodes[0].store.control([act])).answers
        return answer

    @precondition(controlled)
    @rule(
        what=st.sampled_from(["trigger", "trigger", "cancel", "cancel", "pause", "resume"]),
        number=PICK,
        stale=st.sampled_from(["", "", "", "", "paused_at", "settled", "until"]),
        request=st.sampled_from([f"r-{n}" for n in range(9)]),
        overlap=OVERLAPS,
        catch_up=st.sampled_from(CatchUpPolicy),
        window=WINDOWS,
        limit=st.sampled_from([1, 2, 100]),
    )
    def operators_ask(
        self,
        what: str,
        number: int,
        stale: str,
        request: str,
        overlap: OverlapPolicy,
        catch_up: CatchUpPolicy,
        window: int,
        limit: int,
    ) -> None:
        """A pause ends soon, or little else would be tried."""
        paused = self.reference.paused_at is not None
        if what == "resume" or (paused and number % 3 == 0):
            self.resumes(stale, catch_up, window, limit)
        elif what == "pause":
            assert self.control(Pause("job", "why")).outcome == self.reference.pause()
        elif what == "trigger":
            self.triggers(request, overlap, window, -1 if stale == "until" else SECOND)
        else:
            self.cancels(number)

    def resumes(self, stale: str, catch_up: CatchUpPolicy, window: int, limit: int) -> None:
        in_use = sorted(self.reference.schedules_in_use())
        until = self.cluster.now + (-1 if stale == "until" else SECOND)
        passed = [
            Passed(schedule, settled, self.slots(schedule, settled, until))
            for schedule in in_use
            for settled in [self.reference.settled[schedule] - (stale == "settled")]
        ]
        plans = [self.plan_of(each, PERIOD, catch_up, window, limit) for each in in_use]
        paused_at = (self.reference.paused_at or 0) + (stale == "paused_at")
        act = Resume("job", paused_at, until, tuple(plans), tuple(passed))
        assert self.control(act).outcome == self.reference.resume(act), act

    def triggers(self, request: str, overlap: OverlapPolicy, window: int, reach: int) -> None:
        until = self.cluster.now + reach
        slots = {
            slot for each in SCHEDULES for slot in self.slots(each, self.cluster.now - 1, until)
        }
        payload = f"{request} at {self.cluster.now}".encode()
        act = TriggerRun("job", request, payload, tuple(sorted(slots)), until, overlap, window)
        answer = self.control(act)
        made = answer.run.run.slot if answer.run else None
        assert (answer.outcome, made) == self.reference.trigger(act), act

    def cancels(self, number: int) -> None:
        rows = self.reference.rows
        unfinished = sorted(slot for slot, row in rows.items() if not row.final)
        among = unfinished if unfinished and number % 5 else sorted(rows) or [T0]
        slot = among[-1 - number % len(among)]
        assert self.control(CancelRun("job", slot)).outcome == self.reference.cancel(slot)

    # Definitions, pruning, looking

    @rule(node=NODES)
    def looks(self, node: int) -> None:
        """The sweep shows all that is not final, what can be taken over first."""
        answer = self.wait(self.nodes[node].beat(sweep=(("job", "every:10s"),)))
        incarnation = self.nodes[node].instance.incarnation
        self.reference.holders[incarnation].seen_at = self.cluster.now
        open_rows = self.reference.others(-1)
        over = {
            row.slot: row.begun
            and (row.freed != "" or (row.state != "retrying" and self.reference.left(row) <= 0))
            for row in open_rows
        }
        expected = sorted(over, key=lambda slot: (not over[slot], slot))
        assert [seen.run.slot for seen in answer.unfinished] == expected
        assert answer.settled == (self.reference.settled.get("every:10s"),)

    @rule(
        node=NODES, versions=st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True)
    )
    def register(self, node: int, versions: list[str]) -> None:
        answers = self.wait(self.nodes[node].register(*(VERSIONS[v] for v in versions)))
        wanted = {v: (VERSIONS[v].schedule_id, VERSIONS[v].window_ms) for v in versions}
        instance = self.nodes[node].instance
        expected = self.reference.register(instance.incarnation, instance.lease_ms, wanted)
        assert [(a.current, a.settled) for a in answers] == expected

    @rule(node=NODES)
    def let_go(self, node: int) -> None:
        instance = self.nodes[node].instance
        self.wait(self.nodes[node].let_go("job"))
        self.reference.let_go(instance.incarnation, instance.lease_ms)

    @rule(node=NODES, goes=st.booleans())
    def other_jobs_come_and_go(self, node: int, goes: bool) -> None:
        """What the instance holds of the job stays."""
        instance = self.nodes[node].instance
        if goes:
            self.wait(self.nodes[node].let_go("other", "never held"))
        else:
            self.wait(self.nodes[node].register(definition("other")))
        self.reference.registers_elsewhere(instance.incarnation, instance.lease_ms)

    @rule(most=st.sampled_from([0, 2]))
    def prunes(self, most: int) -> None:
        policy = PrunePolicy(10_000 * DAY, most)
        (gone,) = self.wait(self.nodes[0].store.prune(policy)).answers
        assert gone == self.reference.prune(most)
        self.finals = {slot: f for slot, f in self.finals.items() if slot in self.reference.rows}

    @invariant()
    def every_row_shows_as_it_must(self) -> None:
        reply = self.wait(self.nodes[0].store.runs(RunQuery(job="job", limit=10_000)))
        rows = {seen.run.slot: shown(seen) for seen in reversed(reply.answers)}
        assert rows == self.reference.shown()
        if reply.answers:
            assert reply.fences == {"job": self.reference.fence}
        for seen in reply.answers:
            assert [a.attempt for a in seen.attempts] == list(range(1, seen.run.attempt + 1)), "I2"
            if seen.run.state.final:
                final = self.finals.setdefault(seen.run.slot, (seen.run, seen.attempts))
                assert final == (seen.run, seen.attempts), "I3"


# How many histories are tried, by backend: each store's own cost decides. ANARCHON_EXAMPLES gives
# every backend that many.
EXAMPLES = {"memory": 120, "sqlite": 60}
ON_A_SERVER = 25


def _examples(backend: str) -> int:
    usual = EXAMPLES.get(backend.partition("-")[0], ON_A_SERVER)
    return int(os.environ.get("ANARCHON_EXAMPLES", usual))


@pytest.mark.timeout(600)
def test_the_store_answers_as_the_rules_say(backend: str) -> None:
    machine = type(f"Against_{backend}", (StoreAgainstReference,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=_examples(backend),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
