"""The sidecar's state machine: `step(now, input) -> commands`. Pure.

Imports the rest of the core. It is given every fact and draws nothing from the world: the
shell feeds it with what happened and carries out what it says; the simulator does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from anarchon_server.core import limits
from anarchon_server.core.attaching import Attaching
from anarchon_server.core.beating import Beating
from anarchon_server.core.claiming import Claiming
from anarchon_server.core.comparing import Comparing
from anarchon_server.core.configured import laid_over
from anarchon_server.core.context import Context
from anarchon_server.core.holding import Holding
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.lanes import Call, Lane
from anarchon_server.core.messages import (
    ClientExited,
    CloseSession,
    Command,
    Complete,
    Input,
    KeepAlive,
    Level,
    Method,
    Reload,
    Stop,
    StoreFailed,
    StoreReplied,
    StreamEnded,
    Subscribe,
    Suspended,
    Tick,
    Woken,
)
from anarchon_server.core.model import Client, Instance, InstanceState, JobSpec
from anarchon_server.core.policy import Draw, Job, resolve, shown
from anarchon_server.core.settings import Settings
from anarchon_server.core.stopping import Stopping
from anarchon_server.core.store import Capabilities, PrunePolicy, Reply


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as operators see it; `kept_alive_at` by the store's clock, if it is known."""

    session_id: str
    client: Client
    jobs: tuple[str, ...]
    max_concurrency: int
    running: int
    kept_alive_at: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """What the instance is able to do now, and what it has."""

    ready: bool
    store_reachable: bool
    reasons: tuple[str, ...]
    instance: Instance
    sessions: tuple[SessionView, ...]
    clock_usable: bool = True


class Engine:
    """One instance.

    `draw(n)` is a uniform integer in [0, n]; `new_nonce()` is 128 random bits as 32
    hexadecimal digits. `step` must be called with a clock that never goes back.
    """

    def __init__(
        self,
        settings: Settings,
        capabilities: Capabilities,
        *,
        draw: Draw,
        new_nonce: Callable[[], str],
    ) -> None:
        self._context = Context(settings, capabilities, draw, new_nonce)
        self._jobs = Jobs(self._context, lambda: self._beating.want_sweep())
        self._comparing = Comparing(self._context, self._jobs)
        self._holding = Holding(
            self._context,
            self._jobs,
            lambda: self._beating.want(),
            lambda view: self._claiming.observe(view),
        )
        self._claiming = Claiming(self._context, self._jobs, self._holding)
        self._beating = Beating(
            self._context,
            self._jobs,
            self._holding,
            self._claiming,
            lambda request, tokens: self._attaching.answer_keep_alive(request, tokens),
        )
        self._attaching = Attaching(self._context, self._jobs, self._holding, self._beating)
        self._stopping = Stopping(self._context, self._holding, self._instance)
        self._fences: dict[str, tuple[int, int]] = {}
        self._store_id = ""
        self._store_up: bool | None = None
        self._started_at: int | None = None
        self._prune_set = False
        self._timers = self._timer_handlers()

    # --- The step ------------------------------------------------------------------------

    def step(self, now: int, event: Input) -> list[Command]:
        """Takes one input in at `now` (boot-time clock, whole ms); what is to be done."""
        context = self._context
        assert now >= context.now, "the clock went back"
        context.now = now
        context.out = []
        self._take_in(event)
        for kind, *about in context.timers.pop_due(now):
            self._timers[kind](*about)
        self._pump()
        return context.out

    @property
    def wake_at(self) -> int | None:
        """When a Tick is wanted; None: only on other input."""
        return self._context.timers.next_at

    def _take_in(self, event: Input) -> None:  # noqa: C901 - a table, not a tangle
        match event:
            case Tick():
                pass
            case StoreReplied():
                self._replied(event)
            case StoreFailed():
                self._failed(event)
            case Subscribe():
                self._attaching.subscribe(event)
            case StreamEnded():
                self._attaching.stream_ended(event)
            case KeepAlive():
                self._attaching.keep_alive(event)
            case Complete():
                self._holding.complete(event)
            case CloseSession():
                self._attaching.close(event)
            case ClientExited():
                self._attaching.client_exited(event)
            case Woken():
                self._beating.want_sweep()
            case Suspended():
                self._suspended(event)
            case Reload():
                self._attaching.reload(event)
            case Stop():
                self._stopping.stop()
            case _:
                assert_never(event)

    def _timer_handlers(self) -> dict[str, Callable[..., None]]:
        """What each kind of timer means. For some the moment is enough: the pumps see it."""
        return {
            "slot": self._claiming.slot_due,
            "look": self._claiming.look_due,
            "beat": self._beating.want_sweep,
            "beat_again": self._beating.want,
            "trust": self._holding.trust_over,
            "timeout": self._holding.timed_out,
            "grace": self._holding.grace_over,
            "give_back": self._holding.give_back_due,
            "session": self._attaching.session_time_over,
            "shrink": self._attaching.shrink,
            "left": self._attaching.left_time_over,
            "stop": self._stopping.grace_over,
            "stop_end": self._stopping.end,
            "prune": self._prune,
            "compare": self._comparing.due,
            **dict.fromkeys(
                ("lane", "wish", "hand", "register", "release", "result", "quarantine"),
                _the_pumps_see_it,
            ),
        }

    def _pump(self) -> None:
        """Sends what may go: each part looks at its own lane."""
        if self._stopping.done:
            return
        self._jobs.pump(self._instance)
        self._jobs.pump_plans()
        self._claiming.pump()
        self._holding.pump_assignments()
        self._holding.pump_results()
        self._holding.pump_terms()
        self._holding.pump_releases()
        self._stopping.pump()
        self._comparing.pump()
        self._beating.pump(self._instance)  # last: it carries what the others want

    # --- The store -----------------------------------------------------------------------

    def _replied(self, event: StoreReplied) -> None:
        context, reply = self._context, event.reply
        call = context.lanes.replied(event.call_id)
        context.answered_at = context.now
        stepped = context.store_time.sample(call.sent_at, context.now, reply.store_at)
        self._measure_host_clock(call, event)
        self._store_is(up=True)
        if self._started_at is None:
            self._started_at = reply.store_at
        if not self._prune_set:
            self._prune_set = True
            self._prune_in(context.draw(context.settings.prune_every_ms))
        self._watch_for_regression(call, reply)
        if stepped:
            context.log(Level.WARNING, "store_clock_step", store_at=reply.store_at)
            self._jobs.reseed()
        call.on_reply(call, reply)

    def _failed(self, event: StoreFailed) -> None:
        call = self._context.lanes.failed(event.call_id, self._context.now)
        self._store_is(up=False, message=event.message)
        call.on_failure(event.unknown)

    def _store_is(self, *, up: bool, message: str = "") -> None:
        """Said once a change, not once a call (S27)."""
        if up and self._store_up is False:
            self._context.log(Level.INFO, "store_back")
        if not up and self._store_up is not False:
            self._context.log(Level.WARNING, "store_away", error=message)
        self._store_up = up

    def _measure_host_clock(self, call: Call, event: StoreReplied) -> None:
        """S1. The host's clock minus the store's, from replies quick enough to tell."""
        context = self._context
        round_trip = context.now - call.sent_at
        if round_trip > limits.SECOND:
            return
        usable = context.clock_usable
        context.clock_offset_ms = event.wall_at - event.reply.store_at - round_trip // 2
        if usable != context.clock_usable:
            level = Level.INFO if context.clock_usable else Level.ERROR
            context.log(level, "clock_offset", offset_ms=context.clock_offset_ms)

    def _watch_for_regression(self, call: Call, reply: Reply[Any]) -> None:
        """S27a. A fence lower than one known before the request: acknowledged writes are gone."""
        context = self._context
        went_back = bool(self._store_id) and self._store_id != reply.store_id
        self._store_id = reply.store_id
        for job, fence in reply.fences.items():
            known, learned_at = self._fences.get(job, (0, 0))
            went_back = went_back or (fence < known and call.sent_at > learned_at)
            if fence != known and (fence > known or call.sent_at > learned_at):
                self._fences[job] = (fence, context.now)
        if went_back:
            context.quarantined_until = context.now + self._jobs.longest_lease_ms
            context.timers.set(("quarantine",), context.quarantined_until)
            context.log(Level.ERROR, "store_went_back", quarantine_ms=self._jobs.longest_lease_ms)
            self._jobs.went_back()

    def _prune_in(self, delay_ms: int) -> None:
        self._context.timers.set(("prune",), self._context.now + delay_ms)

    def _prune(self) -> None:
        """S30. Whichever instance gets to it prunes a small batch."""
        context, settings = self._context, self._context.settings
        every = settings.prune_every_ms
        self._prune_in(every // 2 + context.draw(every))
        if context.stopping or not context.clock_usable:
            return
        if not context.lanes.free(Lane.PRUNE, context.now):
            return
        policy = PrunePolicy(settings.history_ms, settings.history_max, limits.PRUNE_BATCH)

        def replied(_: Call, reply: Reply[int]) -> None:
            if reply.answers[0] >= policy.batch:
                self._prune_in(limits.SECOND)

        context.out.append(
            context.lanes.call(
                Lane.PRUNE, Method.PRUNE, (policy,), context.now, replied, lambda _: None
            )
        )

    def _suspended(self, event: Suspended) -> None:
        """S4. After a stop nothing is assumed."""
        self._context.log(Level.WARNING, "suspended", gap_ms=event.gap_ms)
        self._holding.doubt_all()
        self._claiming.throw_away()
        self._jobs.reseed()
        self._beating.want_sweep()

    # --- What others may ask -------------------------------------------------------------

    def resolve(self, spec: JobSpec, wall_at: int) -> Job:
        """The job that the spec makes here. Raises what registering it would: `InvalidError`,
        `UnsupportedError`.
        """
        wanted, _ = laid_over(spec, self._context.configured)
        return self.resolve_stored(wanted, wall_at)

    def resolve_stored(self, spec: JobSpec, wall_at: int) -> Job:
        """The job of a definition that the store has: what was configured where it was registered is
        in it, and what is configured here is not about it (S29). Raises as `resolve` does.
        """
        context = self._context
        return resolve(spec, context.capabilities, context.settings.lease_ms, wall_at)

    def status(self, now: int) -> Status:
        """What the instance is able to do at `now`, and what it has."""
        context = self._context
        reasons = self._reasons()

        def store_at(moment: int) -> int | None:
            return context.store_time.at(moment) if context.store_time.known else None

        sessions = tuple(
            SessionView(
                s.session_id,
                s.client,
                s.jobs,
                s.max_concurrency,
                len(s.places),
                store_at(s.kept_alive_at),
            )
            for s in context.sessions
        )
        return Status(
            not reasons,
            bool(self._store_up),
            reasons,
            self._instance(now),
            sessions,
            context.clock_usable,
        )

    def _reasons(self) -> tuple[str, ...]:
        context = self._context
        reasons = []
        if not self._store_up:
            reasons.append("the store does not answer" if self._store_up is False else "starting")
        if context.store_time.known and not context.clock_usable:
            offset = shown(context.clock_offset_ms)
            most = shown(context.settings.max_clock_offset_ms)
            reasons.append(f"the host's clock is {offset} off the store's; at most {most}")
        if context.stopping:
            reasons.append("stopping")
        return tuple(reasons)

    def _instance(self, now: int | None = None) -> Instance:
        context, settings = self._context, self._context.settings
        at = context.now if now is None else now
        known = context.store_time.known
        state = InstanceState.ACTIVE if len(context.sessions) else InstanceState.IDLE
        reasons = self._reasons()
        outlook_at, outlook = self._comparing.outlook()
        return Instance(
            instance_id=settings.instance_id,
            incarnation=settings.incarnation,
            state=InstanceState.DRAINING if context.stopping else state,
            version=settings.version,
            backend=context.capabilities.backend,
            tzdata_version=settings.tzdata_version,
            started_at=self._started_at or 0,
            seen_at=context.store_time.at(at) if known else 0,
            clock_offset_ms=context.clock_offset_ms,
            lease_ms=self._jobs.longest_lease_ms,
            running=self._holding.running,
            ready=not reasons,
            reasons=reasons,
            doubts=settings.doubts,
            outlook_at=outlook_at,
            outlook=outlook,
        )


def _the_pumps_see_it(*_: object) -> None:
    """A timer that only wakes the engine."""
