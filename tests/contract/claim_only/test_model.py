"""Any backend without leases against a reference, over random acts of three instances.

The reference is a page of plain Python that shares no code with the rules (S2, S10, S11, S17).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from anarchon_server.core.model import CancelReason, Failure, Outcome, Reason, RunView
from anarchon_server.core.store import Claim, Completion, Release
from tests.contract.claim_only.traits import NO_WAY_BACK, OWN_HISTORY
from tests.contract.harness import (
    CLAIM_ONLY,
    PERIOD,
    SECOND,
    T0,
    ClaimOnlyNode,
    Cluster,
    Node,
)

T = TypeVar("T")

NODES = st.integers(0, 2)
PICK = st.integers(0, 10_000)
OUTCOMES = {
    "x": Outcome("x"),
    "y": Outcome("y"),
    "raised": Outcome(failure=Failure("E", "m", "t")),
    **{reason.value: Outcome(stopped=reason) for reason in CancelReason},
}
ENDS = {
    "x": ("success", ""),
    "y": ("success", ""),
    "raised": ("failed", ""),
    "timeout": ("failed", "timeout"),
    "requested": ("failed", "cancelled"),
    "superseded": ("failed", "superseded"),
    "shutdown": ("failed", "runner_lost"),
}


@dataclass
class Row:
    """What became of a slot; `told`: the words that ended it."""

    token: str
    holder: str
    state: str = "claimed"
    reason: str = ""
    told: str = ""

    @property
    def final(self) -> bool:
        return self.state in ("success", "failed")


@dataclass
class Reference:
    """One job's slots. `no_way_back`: the newest slot won is a mark that claims must pass."""

    no_way_back: bool
    rows: dict[int, Row] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)

    def claim(self, claim: Claim, now: int) -> str:
        row = self.rows.get(claim.slot)
        if row is not None:
            return "won" if row.token == claim.token and not row.final else "lost"
        if claim.slot > now + SECOND:
            return "early"
        if claim.slot < now - claim.start_deadline_ms:
            return "late"
        if not claim.may_run:
            return "unchanged"
        if self.no_way_back and self.rows and claim.slot < max(self.rows):
            self.missed.add(claim.slot)
            return "old"
        self.rows[claim.slot] = Row(claim.token, claim.incarnation)
        return "won"

    def renew(self, slot: int, token: str, by: str, *, adopt: bool, starts: bool) -> str:
        row = self.rows[slot]
        if row.token != token or row.final or (row.holder != by and not adopt):
            return "fenced"
        row.holder = by
        if starts:
            row.state = "running"
        return "renewed"

    def complete(self, slot: int, token: str, told: str) -> str:
        row = self.rows[slot]
        if row.token != token:
            return "fenced"
        if row.final:
            return "recorded" if self._repeats(row, told) else "already_completed"
        if told in ("lease_lost", "fenced"):
            return "fenced"
        row.state, row.reason = ENDS[told]
        row.told = told
        return "recorded"

    def _repeats(self, row: Row, told: str) -> bool:
        """A stop is a repeat of any stop but a shutdown, which is one of a hand-over."""
        if told == "shutdown":
            return row.told in ("shutdown", "handed_over")
        if told in {reason.value for reason in CancelReason}:
            return row.told in ("timeout", "requested", "superseded")
        return row.told == told

    def release(self, slot: int, token: str, by: str, reason: str) -> str:
        row = self.rows[slot]
        if (row.token, row.holder) != (token, by):
            return "fenced"
        if row.final:
            repeats = row.told == reason or (row.told, reason) == ("shutdown", "handed_over")
            return "released" if repeats else "fenced"
        row.state, row.told = "failed", reason
        row.reason = reason if reason == "not_accepted" else "runner_lost"
        return "released"


class StoreAgainstReference(RuleBasedStateMachine):
    """Every act is done to both; every answer must be the same, and history in the end."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        in_memory = Path("/dev/shm")
        self.directory = TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None)
        database = CLAIM_ONLY[self.backend](Path(self.directory.name))
        self.cluster = Cluster(database, node_type=ClaimOnlyNode)
        self.nodes: list[Node] = self.wait(self.cluster.nodes_of(3))
        self.reference = Reference(self.backend in NO_WAY_BACK)
        self.asked: list[Claim] = []
        self.won: dict[int, RunView] = {}

    def teardown(self) -> None:
        self.wait(self.cluster.stack.aclose())
        self.runner.close()
        self.directory.cleanup()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def has_won(self) -> bool:
        return bool(self.won)

    def pick(self, number: int) -> int:
        """A slot that was won; most often an unfinished or a new one."""
        unfinished = [slot for slot in self.won if not self.reference.rows[slot].final]
        among = unfinished if unfinished and number % 4 else list(self.won)
        return among[-1 - number % min(len(among), 3)]

    def holder(self, slot: int) -> Node:
        by = self.reference.rows[slot].holder
        return next(node for node in self.nodes if node.instance.incarnation == by)

    def actor(self, node: int, slot: int) -> Node:
        """Where history is an instance's own, only the holder knows what became of a run."""
        return self.holder(slot) if self.backend in OWN_HISTORY else self.nodes[node]

    @rule(ms=st.sampled_from([1, 400, SECOND, PERIOD, PERIOD + 1, 3 * PERIOD]))
    def time_passes(self, ms: int) -> None:
        self.cluster.advance(ms)

    @rule(
        node=NODES,
        back=st.sampled_from([-1, 0, 0, 0, 1, 2, 3]),
        may_run=st.sampled_from([True, True, True, False]),
        deadline=st.sampled_from([PERIOD, 3 * PERIOD]),
    )
    def a_slot_is_claimed(self, node: int, back: int, may_run: bool, deadline: int) -> None:
        slot = (self.cluster.now // PERIOD - back) * PERIOD
        wish = self.nodes[node].wish(slot, may_run=may_run, start_deadline_ms=deadline)
        self.ask(node, wish)

    @precondition(lambda self: self.asked)
    @rule(node=NODES, number=PICK, may_run=st.booleans())
    def a_claim_is_repeated(self, node: int, number: int, may_run: bool) -> None:
        claim = self.asked[-1 - number % min(len(self.asked), 5)]
        if self.backend in OWN_HISTORY:  # another instance does not know that a run has ended
            node = next(
                n
                for n, each in enumerate(self.nodes)
                if each.instance.incarnation == claim.incarnation
            )
        self.ask(node, replace(claim, may_run=may_run))

    def ask(self, node: int, claim: Claim) -> None:
        self.asked.append(claim)
        answer = self.wait(self.nodes[node].ask(claim))
        assert answer.outcome == self.reference.claim(claim, self.cluster.now), claim
        if answer.outcome == "won":
            assert answer.run is not None
            assert answer.run.run.current is not None
            assert answer.run.run.current.fence == claim.slot * 1_000
            self.won[claim.slot] = answer.run

    @precondition(has_won)
    @rule(
        node=NODES,
        number=PICK,
        adopt=st.booleans(),
        starts=st.booleans(),
        right=st.sampled_from([True, True, True, False]),
    )
    def is_renewed(self, node: int, number: int, adopt: bool, starts: bool, right: bool) -> None:
        slot = self.pick(number)
        actor = self.actor(node, slot)
        token = self.won[slot].run.token if right else actor.wish(slot).token
        renewal = actor.renewal(
            self.won[slot],
            token=token,
            adopt=adopt,
            started_at=self.cluster.now if starts else None,
        )
        answer = self.wait(actor.beat(renewals=(renewal,))).renewals[0]
        expected = self.reference.renew(
            slot, token, actor.instance.incarnation, adopt=adopt, starts=starts
        )
        assert answer.outcome == expected, renewal

    @precondition(has_won)
    @rule(
        node=NODES,
        number=PICK,
        told=st.sampled_from(list(OUTCOMES)),
        right=st.sampled_from([True, True, True, False]),
    )
    def is_completed(self, node: int, number: int, told: str, right: bool) -> None:
        slot = self.pick(number)
        actor = self.actor(node, slot)
        token = self.won[slot].run.token if right else actor.wish(slot).token
        completion = Completion("job", slot, token, OUTCOMES[told])
        (answer,) = self.wait(actor.store.complete([completion])).answers
        assert answer.outcome == self.reference.complete(slot, token, told), completion

    @precondition(has_won)
    @rule(
        node=NODES,
        number=PICK,
        reason=st.sampled_from([Reason.HANDED_OVER, Reason.RUNNER_LOST, Reason.NOT_ACCEPTED]),
    )
    def is_released(self, node: int, number: int, reason: str) -> None:
        slot = self.pick(number)
        actor = self.holder(slot) if number % 2 else self.actor(node, slot)
        token = self.won[slot].run.token
        release = Release("job", slot, token, actor.instance.incarnation, reason)
        (answer,) = self.wait(actor.store.release([release])).answers
        expected = self.reference.release(slot, token, actor.instance.incarnation, reason)
        assert answer.outcome == expected, release

    @invariant()
    def history_shows_what_became_of_every_slot(self) -> None:
        for node in self.nodes:  # heard of lately, so that nothing shows as interrupted
            self.wait(node.beat())
        rows: dict[int, tuple[str, str, str]] = {}
        for node in self.nodes if self.backend in OWN_HISTORY else self.nodes[:1]:
            for seen in self.wait(node.history(job="job", limit=500)):
                run = seen.run
                rows[run.slot] = (run.token, run.state.value, run.reason)
        expected = {
            slot: (row.token, row.state, row.reason) for slot, row in self.reference.rows.items()
        }
        expected |= dict.fromkeys(self.reference.missed, ("", "skipped", "missed"))
        assert rows == expected


EXAMPLES = {"memory": 100}
ON_A_SERVER = 20


@pytest.mark.timeout(600)
def test_the_store_answers_as_the_rules_say(backend: str) -> None:
    usual = EXAMPLES.get(backend.partition("-")[0], ON_A_SERVER)
    machine = type(f"Against_{backend}", (StoreAgainstReference,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("ANARCHON_EXAMPLES", usual)),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


assert T0 % PERIOD == 0
