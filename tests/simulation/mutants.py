"""Mistakes put into the engine and the store's rules on purpose, to show that the simulator bites.

Each mistake is a context: inside it, it is made. `MUTANTS` says of each where to look for it, and
which rules may tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from anarchon_server.core import claim_only, engine, limits, machine
from anarchon_server.core.claiming import Claiming, Sight
from anarchon_server.core.context import Context
from anarchon_server.core.holding import Hold, Holding
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.lanes import Call, Lane, Lanes
from anarchon_server.core.lease import StoreTime
from anarchon_server.core.messages import KeepAliveAnswer, StoreFailed
from anarchon_server.core.missed import plan_of
from anarchon_server.core.model import (
    Attempt,
    AttemptCause,
    CatchUpPolicy,
    Failure,
    Outcome,
    OverlapPolicy,
    RetrySpec,
    Run,
)
from anarchon_server.core.policy import Job
from anarchon_server.core.sessions import Session
from anarchon_server.core.store import (
    Claim,
    ClaimOutcome,
    Completion,
    Plan,
    PlanAnswer,
    Release,
    Renewal,
    TokenAnswer,
    TokenOutcome,
)
from tests.simulation.client import SpecClient
from tests.simulation.seeds import Focus

Mistake = Callable[[], AbstractContextManager[object]]


def trust_counted_from_the_reply() -> AbstractContextManager[object]:
    """S15: the sidecar believes in a lease from when it heard of it."""
    replied = Lanes.replied

    def late(self: Lanes, call_id: int) -> Call:
        call = replied(self, call_id)
        return replace(call, sent_at=max(call.sent_at, _NOW[0]))

    @contextmanager
    def both() -> Iterator[None]:
        step = engine.Engine.step

        def noting(self: engine.Engine, now: int, event: Any) -> Any:
            _NOW[0] = now
            return step(self, now, event)

        with patch.object(engine.Engine, "step", noting), patch.object(Lanes, "replied", late):
            yield

    return both()


_NOW = [0]


def client_trust_counted_from_the_answer() -> AbstractContextManager[object]:
    """Protocol: the client believes in a session from when it heard of it."""
    trust = SpecClient._trust

    def late(self: SpecClient, since: int, answer: KeepAliveAnswer) -> None:
        trust(self, self.app.host.world.timeline.now, answer)

    return patch.object(SpecClient, "_trust", late)


def no_margin() -> AbstractContextManager[object]:
    """S16: the sidecar believes in a lease to its very end."""
    return patch(
        "anarchon_server.core.holding.trust_end", lambda sent_at, lease_ms: sent_at + lease_ms
    )


def renewal_without_token_check() -> AbstractContextManager[object]:
    """S17: any renewal of the run is taken for its holder's."""
    judge = machine.judge_renewal

    def judged(renewal: Renewal, now: machine.Moment, run: Run | None) -> machine.TokenVerdict:
        if run is not None and run.current is not None and run.token != renewal.token:
            incarnation = run.current.incarnation
            renewal = replace(renewal, token=run.token, incarnation=incarnation)
        return judge(renewal, now, run)

    return patch.object(machine, "judge_renewal", judged)


def completion_without_token_check() -> AbstractContextManager[object]:
    """S17: any result ends the run."""
    judge = machine.judge_completion

    def judged(
        completion: Completion, now: machine.Moment, run: Run | None, past: Attempt | None
    ) -> machine.TokenVerdict:
        if run is not None and run.current is not None:
            completion = replace(completion, token=run.token)
        return judge(completion, now, run, past)

    return patch.object(machine, "judge_completion", judged)


def release_by_another_holder() -> AbstractContextManager[object]:
    """S17: whoever knows the token may release it, also after an adoption."""
    judge = machine.judge_release

    def judged(release: Release, now: machine.Moment, run: Run | None) -> machine.TokenVerdict:
        if run is not None and run.current is not None:
            release = replace(release, incarnation=run.current.incarnation)
        return judge(release, now, run)

    return patch.object(machine, "judge_release", judged)


def reclaim_keeps_the_lease() -> AbstractContextManager[object]:
    """S11: a claim that is asked again is WON, and its lease runs from the first time."""
    judge = machine.judge_claim

    def judged(claim: Claim, now: machine.Moment, *rest: Any) -> machine.ClaimVerdict:
        verdict = judge(claim, now, *rest)
        run: Run | None = rest[2]
        if run is not None and run.token == claim.token and verdict.saved:
            return replace(verdict, saved=())
        return verdict

    return patch.object(machine, "judge_claim", judged)


def unknown_taken_for_lost() -> AbstractContextManager[object]:
    """S11: a claim without an answer is given up."""
    failed, answered = engine.Engine._failed, Claiming._answered

    def surely(self: engine.Engine, event: StoreFailed) -> None:
        failed(self, replace(event, unknown=False))

    def lost(self: Claiming, wish: Any, claim: Claim, answer: Any, sent_at: int) -> None:
        if answer.outcome is ClaimOutcome.UNKNOWN:
            answer = replace(answer, outcome=ClaimOutcome.LATE)
        answered(self, wish, claim, answer, sent_at)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(engine.Engine, "_failed", surely),
            patch.object(Claiming, "_answered", lost),
        ):
            yield

    return both()


def overlap_not_looked_at() -> AbstractContextManager[object]:
    """S18: no run is ever in the way."""
    return patch.object(machine, "look_around", lambda others, now, witnessed: machine.Around())


def overlap_skips_before_its_time() -> AbstractContextManager[object]:
    """S18: a claim that comes early and finds a run unfinished is skipped at once."""
    first_claim = machine._first_claim

    def hasty(claim: Claim, now: machine.Moment, *rest: Any) -> machine.ClaimVerdict:
        ahead = replace(now, at_us=max(now.at_us, claim.slot * 1_000))
        return first_claim(claim, ahead, *rest)

    return patch.object(machine, "_first_claim", hasty)


def takeover_without_second_witness() -> AbstractContextManager[object]:
    """S19: the store's clock alone says that a lease is over, at both ends."""

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(machine, "_witnessed", lambda claim, now: True),
            patch.object(Context, "takeovers_from", lambda self, lease_ms: self.now),
            patch.object(
                Claiming, "_sighted", lambda self, view, before: Sight(0, self._context.now)
            ),
        ):
            yield

    return both()


def lease_not_looked_at() -> AbstractContextManager[object]:
    """S19: whoever asks may take a run over."""
    return patch.object(machine, "_over", lambda run, now, witnessed: True)


def takeover_of_another_attempt() -> AbstractContextManager[object]:
    """S19: a claim need not have seen the present attempt, and nobody counts the lost ones."""
    return patch.object(machine, "_ended_instead", lambda run, now: None)


def nobody_takes_over() -> AbstractContextManager[object]:
    """S19: what others run is nobody's business."""
    return patch.object(Claiming, "_wish_for_another", lambda self, view, not_before=0: None)


def looks_too_rarely() -> AbstractContextManager[object]:
    """S19: a backup looks too rarely."""
    return patch.object(Jobs, "heartbeat_ms", property(lambda self: 60_000))


def settled_never_moves() -> AbstractContextManager[object]:
    """S20: the plan does not say how far it came."""

    def judged(plan: Plan, now: machine.Moment, *rest: Any) -> machine.PlanVerdict:
        return machine.PlanVerdict(PlanAnswer(True, rest[1]))

    return patch.object(machine, "judge_plan", judged)


def settled_moves_too_far() -> AbstractContextManager[object]:
    """S20: a claim moves it past slots that nobody settled."""
    return patch.object(machine, "_settled_after", lambda claim, settled: max(settled, claim.slot))


def planned_too_early() -> AbstractContextManager[object]:
    """S20: a slot is missed as soon as it is due."""
    show, plan = Jobs._show, plan_of
    at_once = patch.object(Job, "start_deadline", lambda self, slot, following: 0)

    def shown(self: Jobs, state: Any, settled: int) -> None:
        with at_once:
            show(self, state, settled)

    def planned(job: Job, settled: int, at: int) -> Plan:
        with at_once:
            return plan(job, settled, at)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(Jobs, "_show", shown),
            patch("anarchon_server.core.jobs.plan_of", planned),
        ):
            yield

    return both()


def rest_not_counted() -> AbstractContextManager[object]:
    """S20: missed slots past the limit vanish."""
    missed = machine._missed

    def uncounted(job: str, slot: int, now: machine.Moment, covered: int) -> machine.Saved:
        return missed(job, slot, now, min(covered, 1))

    return patch.object(machine, "_missed", uncounted)


def handed_over_early() -> AbstractContextManager[object]:
    """S2: what was won early is handed to the client at once."""

    @contextmanager
    def both() -> Iterator[None]:
        slot_due, receiver = Claiming.slot_due, Holding._receiver

        def sooner(self: Claiming, name: str) -> None:
            with patch.object(Context, "store_now", _SOONER):
                slot_due(self, name)

        def at_once(self: Holding, hold: Hold) -> Session | None:
            with patch.object(Context, "store_now", _SOONER):
                return receiver(self, hold)

        come_to = Jobs._come_to

        def earlier(self: Jobs, state: Any, slot: int | None, previous: int | None) -> None:
            come_to(self, state, slot, previous)
            if slot is not None:
                moment = self._context.store_time.when(slot) - _SOONER_MS
                self._context.timers.set(("slot", state.job.name), moment)

        with (
            patch.object(Claiming, "slot_due", sooner),
            patch.object(Holding, "_receiver", at_once),
            patch.object(Jobs, "_come_to", earlier),
        ):
            yield

    return both()


_SOONER_MS = 800
_SOONER = property(lambda self: self.store_time.at(self.now) + _SOONER_MS)


def claims_without_room() -> AbstractContextManager[object]:
    """S13: the client's `max_concurrency` does not count, so that it refuses what is won."""
    return patch.object(Session, "room", property(lambda self: 1))


def full_instances_stay_silent() -> AbstractContextManager[object]:
    """S13: who has room again does not claim what it left to others."""
    return patch.object(Claiming, "_worth_sending_without_room", lambda self, wish: _gives_up(wish))


def _gives_up(wish: Any) -> bool:
    wish.not_before = 1 << 62
    return False


def released_while_the_client_may_run() -> AbstractContextManager[object]:
    """S25: a lost session's runs are released at once."""
    return patch.object(
        Holding, "give_back_later", lambda self, hold: self.give_back(hold, "runner_lost")
    )


def broken_stream_taken_for_a_death() -> AbstractContextManager[object]:
    """S24: when a stream breaks, its runs are released."""
    from anarchon_server.core.attaching import Attaching

    def dead(self: Attaching, event: Any) -> None:
        session = self._context.sessions.get(event.session_id)
        if session is not None and session.stream_id == event.stream_id:
            for hold in self._part_with(session):
                self._holding.give_back(hold, "runner_lost")

    return patch.object(Attaching, "stream_ended", dead)


def lost_cancels_stay_lost() -> AbstractContextManager[object]:
    """S21: what was sent on a stream that broke is not sent on the next."""
    return patch.object(Holding, "repeat_cancels", lambda self, session: None)


def cancelled_runs_renewed_for_ever() -> AbstractContextManager[object]:
    """S21a: a handler that ignores its timeout keeps its lease."""
    judge = machine.judge_renewal

    def judged(renewal: Renewal, now: machine.Moment, run: Run | None) -> machine.TokenVerdict:
        patient = None if run is None else replace(run, cancel_grace_ms=1 << 40)
        return judge(renewal, now, patient)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(Holding, "grace_over", lambda self, token: None),
            patch.object(machine, "judge_renewal", judged),
        ):
            yield

    return both()


def fence_does_not_grow() -> AbstractContextManager[object]:
    """S17: the fence is the slot's."""
    won = machine._won

    def same(claim: Claim, now: machine.Moment, job: Any, *rest: Any) -> machine.ClaimVerdict:
        verdict = won(claim, now, replace(job, fence=0), *rest)
        return replace(verdict, job=replace(verdict.job, fence=0))

    return patch.object(machine, "_won", same)


def final_runs_taken_over() -> AbstractContextManager[object]:
    """S2: a delayed duplicate of a claim runs a final run again."""
    claim_of_a_row = machine._claim_of_a_row

    def again(
        claim: Claim, now: machine.Moment, job: Any, settled: int | None, run: Run, others: Any
    ) -> machine.ClaimVerdict:
        if run.token == claim.token and run.current and run.state.final:
            before = machine.Saved(replace(run, current=None))
            return machine._won(claim, now, job, settled, before, AttemptCause.CLAIM)
        return claim_of_a_row(claim, now, job, settled, run, others)

    return patch.object(machine, "_claim_of_a_row", again)


def its_own_winner_is_a_stranger() -> AbstractContextManager[object]:
    """S11: the store does not know its own winner."""
    claim_of_a_row = machine._claim_of_a_row

    def stranger(
        claim: Claim, now: machine.Moment, job: Any, settled: int | None, run: Run, others: Any
    ) -> machine.ClaimVerdict:
        if run.token == claim.token:
            return machine._lost(run, now, job, settled)
        return claim_of_a_row(claim, now, job, settled, run, others)

    return patch.object(machine, "_claim_of_a_row", stranger)


def steps_of_the_clock_go_unseen() -> AbstractContextManager[object]:
    """S19: neither the second witness nor the own clock is asked."""

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(StoreTime, "_is_step", lambda self, fresh: False),
            patch.object(
                Claiming, "_sighted", lambda self, view, before: Sight(0, self._context.now)
            ),
            patch.object(machine, "_as_expected", lambda claim, now: True),
        ):
            yield

    return both()


# ── On claim-only stores ────────────────────────────────────────────────────────────────────────


def place_not_kept() -> AbstractContextManager[object]:
    """S11: an unknown claim gives its place back, and is asked again without room."""

    def left(self: Claiming, wish: Any) -> None:
        self._context.sessions.leave(wish.token)

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(Claiming, "_leave_place", left),
            patch.object(
                Claiming, "_worth_sending_without_room", lambda self, wish: bool(wish.unknown)
            ),
        ):
            yield

    return both()


def asked_again_for_ever() -> AbstractContextManager[object]:
    """S10: an unknown claim is asked again also when the record of its winner may be gone."""
    drop = Claiming._drop_the_hopeless

    def patient(self: Claiming) -> None:
        with patch.object(limits, "UNKNOWN_ASKED_FOR", limits.NEVER):
            drop(self)

    return patch.object(Claiming, "_drop_the_hopeless", patient)


def given_back_but_once() -> AbstractContextManager[object]:
    """S11: what a given-up claim wins after its release is nobody's."""
    return patch.object(Holding, "_may_be_on_its_way", lambda self, pending: False)


def _failures_taken_for(heard: Callable[[Failure], Failure]) -> AbstractContextManager[object]:
    completion_of = Holding._completion_of

    def misheard(self: Holding, job: str, slot: int, token: str, told: Outcome) -> Completion:
        failure = heard(told.failure) if told.failure is not None else None
        return completion_of(self, job, slot, token, replace(told, failure=failure))

    return patch.object(Holding, "_completion_of", misheard)


def permanent_failures_retried() -> AbstractContextManager[object]:
    """S22: what a handler calls permanent is retried all the same."""
    return _failures_taken_for(lambda failure: replace(failure, permanent=False))


def pauses_asked_for_not_made() -> AbstractContextManager[object]:
    """S22: the pause before a retry is the policy's, whatever a handler asks for."""
    return _failures_taken_for(lambda failure: replace(failure, retry_after_ms=None))


def result_dropped() -> AbstractContextManager[object]:
    """S27: a result that the store did not take at once is taken for recorded."""
    failed = engine.Engine._failed

    def forgetful(self: engine.Engine, event: StoreFailed) -> None:
        lane = self._context.lanes._calls[event.call_id].lane
        failed(self, event)
        for result in tuple(self._holding._results.values()) if lane is Lane.COMPLETE else ():
            self._holding._recorded(result, TokenAnswer(TokenOutcome.RECORDED))

    return patch.object(engine.Engine, "_failed", forgetful)


def release_not_sent() -> AbstractContextManager[object]:
    """S24, S25: nobody says that a run's runner is gone."""
    return patch.object(Holding, "release", lambda self, *_: None)


def claim_only_winner_is_a_stranger() -> AbstractContextManager[object]:
    """S11: the store does not know its own winner."""
    return patch.object(claim_only, "is_won", lambda claim, run: False)


def any_claim_wins() -> AbstractContextManager[object]:
    """S10: that a slot has been claimed is not looked at."""
    judge = claim_only.judge_claim

    def judged(
        claim: Claim,
        now: machine.Moment,
        job: Any,
        settled: int | None,
        run: Run | None,
        others: Any = (),
    ) -> machine.ClaimVerdict:
        ours = run if run is not None and run.token == claim.token else None
        return judge(claim, now, job, settled, ours, others)

    return patch.object(claim_only, "judge_claim", judged)


def late_claims_win() -> AbstractContextManager[object]:
    """S2: a claim is never too late."""
    return patch.object(claim_only, "untimely", lambda claim, at, floor=-1: None)


def fence_is_not_the_slots() -> AbstractContextManager[object]:
    """S17: the fence is the slot in milliseconds."""
    return patch.object(claim_only, "fence_of", lambda slot, attempt=1: slot)


def released_runs_stay_open() -> AbstractContextManager[object]:
    """S24: a release leaves the run to another attempt, which nobody makes."""
    return patch.object(claim_only, "_ended", lambda verdict, now: verdict)


def slots_let_go() -> AbstractContextManager[object]:
    """S13: a slot is only claimed in the first moment."""
    pump = Claiming.pump

    def once(self: Claiming) -> None:
        pump(self)
        for key, wish in tuple(self._wishes.items()):
            if not wish.in_call and not wish.unknown:
                del self._wishes[key]

    return patch.object(Claiming, "pump", once)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake, the rules that may tell of it, and where to look: on which plans, from which seed
    on (the first that is known to tell, so that the search is short), and how far.
    """

    mistake: Mistake
    rules: frozenset[str]
    focus: Focus
    first: int = 0
    seeds: int = 40

    @property
    def name(self) -> str:
        """What the mistake is called, and where it was made."""
        where = "" if self.focus.leases else " on a claim-only store"
        return self.mistake.__name__ + where


BAD_NETWORK = ("bad_network", "store_away", "cut_off")
ON_A_NETWORK = (("boot_leases", False),)
LONG = (("duration_ms", (1_000, 9_000)), ("step_ms", (20, 100)))
SKIPS = (
    ("overlap", OverlapPolicy.SKIP),
    ("catch_up", CatchUpPolicy.NONE),
    ("retry", None),
)
RETRIED = Focus(
    (),
    spec=(("retry", RetrySpec(3, 500, 1.5, 2_000)),),
    work=(("fails", 0.5), ("permanent", 0.3), ("asks", 0.3)),
)
BUSY = (("duration_ms", (500, 3_000)), ("step_ms", (20, 100)))


def _mutant(mistake: Mistake, rules: str, focus: Focus | None = None, first: int = 0) -> Mutant:
    return Mutant(mistake, frozenset(rules.split()), focus or Focus(), first)


def _claim_only(*faults: str, **changes: Any) -> Focus:
    return Focus(faults, leases=False, **changes)


MUTANTS = (
    _mutant(trust_counted_from_the_reply, "F6 I4 F2", Focus(BAD_NETWORK, work=LONG)),
    _mutant(
        client_trust_counted_from_the_answer,
        "F6 I4 F2",
        Focus(("slow_client_calls", "kill_sidecar", "cut_off"), work=LONG),
        first=1,
    ),
    _mutant(no_margin, "F6 F16 I4", Focus(BAD_NETWORK, work=LONG)),
    _mutant(
        renewal_without_token_check,
        "F7 I4 F2 F16",
        Focus(("bad_network", "replace_sidecar", "kill_both"), (("fault_count", 12),), work=LONG),
        first=3,
    ),
    _mutant(
        completion_without_token_check, "F7 I4 S17", Focus(("freeze_both", "cut_off"), work=LONG)
    ),
    _mutant(
        release_by_another_holder,
        "F7 I4 F2 F16",
        Focus(("replace_sidecar",), (("watchable", False),), work=LONG),
        first=50,
    ),
    _mutant(
        reclaim_keeps_the_lease,
        "F6 I4",
        Focus(("bad_network",), (("op_timeout_ms", 2_000),), work=LONG),
        first=7,
    ),
    _mutant(
        unknown_taken_for_lost, "S15", Focus(("bad_network",), spec=(("lease_ms", 9_000),)), first=3
    ),
    _mutant(overlap_not_looked_at, "F2", Focus(spec=SKIPS, work=LONG)),
    _mutant(
        overlap_skips_before_its_time,
        "S18",
        Focus(("store_clock",), ON_A_NETWORK, SKIPS, BUSY),
        first=2,
    ),
    _mutant(
        takeover_without_second_witness,
        "I5 I4 F2",
        Focus(("store_clock",), ON_A_NETWORK, work=LONG),
    ),
    _mutant(
        steps_of_the_clock_go_unseen, "I5 I4 F2", Focus(("store_clock",), ON_A_NETWORK, work=LONG)
    ),
    _mutant(lease_not_looked_at, "I5 I4 F2 F7", Focus(work=LONG), first=3),
    _mutant(takeover_of_another_attempt, "S19", Focus(("kill_app", "kill_both"), work=LONG)),
    _mutant(
        nobody_takes_over, "F11 F12 F14", Focus(("kill_app", "kill_both"), spec=SKIPS, work=LONG)
    ),
    _mutant(looks_too_rarely, "F11 F12 F14 S15", Focus(("kill_both",), work=LONG)),
    _mutant(settled_never_moves, "F14", Focus(("kill_all",))),
    _mutant(settled_moves_too_far, "F14 F3", Focus(("kill_all", "cut_off", "freeze_app")), first=2),
    _mutant(planned_too_early, "S20", Focus((), spec=(("jitter_ms", None),))),
    _mutant(
        rest_not_counted,
        "F14",
        Focus(("kill_all",), (("hosts", 2),), (("catch_up_limit", 1),)),
        first=6,
    ),
    _mutant(handed_over_early, "I7"),
    _mutant(claims_without_room, "S13", Focus(plan=(("max_concurrency", 1),), work=BUSY)),
    _mutant(
        full_instances_stay_silent,
        "F3 F14",
        Focus((), (("max_concurrency", 1), ("hosts", 2)), SKIPS, BUSY),
        first=10,
    ),
    _mutant(
        released_while_the_client_may_run,
        "I4 F16 F2",
        Focus(
            ("lose_answers", "slow_client_calls", "freeze_app"),
            work=(*LONG, ("obeys_within_ms", 400)),
        ),
    ),
    _mutant(broken_stream_taken_for_a_death, "I4 F2 F16", Focus(("lose_stream",), work=LONG)),
    _mutant(
        lost_cancels_stay_lost,
        "S21",
        Focus(
            ("lose_stream",),
            (("fault_count", 24),),
            (("timeout_ms", 700), ("cancel_grace_ms", 20_000)),
            LONG,
        ),
        first=11,
    ),
    _mutant(
        cancelled_runs_renewed_for_ever,
        "S21a",
        Focus(
            (), spec=(("timeout_ms", 500), ("cancel_grace_ms", 0)), work=(*LONG, ("ignores", 1.0))
        ),
    ),
    _mutant(permanent_failures_retried, "S22", RETRIED),
    _mutant(pauses_asked_for_not_made, "S22", RETRIED),
    _mutant(fence_does_not_grow, "F4", Focus(("kill_app", "store_clock"), ON_A_NETWORK)),
    _mutant(final_runs_taken_over, "I3 F1 I1", Focus(("bad_network",))),
    _mutant(
        its_own_winner_is_a_stranger,
        "S15",
        Focus(("bad_network",), spec=(("lease_ms", 9_000),)),
        first=13,
    ),
    _mutant(unknown_taken_for_lost, "F14", _claim_only("bad_network"), first=3),
    _mutant(
        place_not_kept,
        "S11",
        _claim_only("bad_network", plan=(("max_concurrency", 1), ("kept_ms", None)), work=BUSY),
        first=20,
    ),
    _mutant(
        given_back_but_once,
        "F14",
        _claim_only(
            "bad_network",
            "stop_app",
            "kill_app",
            plan=(
                ("hosts", 1),
                ("fault_count", 24),
                ("op_timeout_ms", 500),
                ("end_at", 80_000),
                ("kept_ms", None),
                ("watchable", True),
            ),
            spec=(("start_deadline_ms", 20_000), ("retry", None)),
            work=(("duration_ms", (10, 100)),),
        ),
        first=80,
    ),
    _mutant(result_dropped, "S17", _claim_only("bad_network", "store_away")),
    _mutant(release_not_sent, "F14", _claim_only("kill_app")),
    _mutant(claim_only_winner_is_a_stranger, "F14", _claim_only("bad_network")),
    _mutant(any_claim_wins, "F1 I3", _claim_only()),
    _mutant(
        late_claims_win,
        "F10 F1 I3",
        _claim_only("bad_network", "cut_off", plan=(("kept_ms", None),)),
        first=5,
    ),
    _mutant(fence_is_not_the_slots, "F4", _claim_only()),
    _mutant(released_runs_stay_open, "F14 S24", _claim_only("stop_app")),
    _mutant(
        slots_let_go,
        "F3",
        _claim_only(plan=(("max_concurrency", 1), ("hosts", 2)), work=BUSY),
        first=87,
    ),
    _mutant(broken_stream_taken_for_a_death, "I8 I4", _claim_only("lose_stream", work=LONG)),
)
