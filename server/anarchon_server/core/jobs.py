"""The jobs this instance handles: their registration (S28) and the slot each comes to next.

Imports the core's leaves only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from anarchon_server.core import limits
from anarchon_server.core.context import Context
from anarchon_server.core.lanes import Call, Lane
from anarchon_server.core.messages import Level, Method
from anarchon_server.core.missed import plan_of
from anarchon_server.core.model import Instance
from anarchon_server.core.policy import Job
from anarchon_server.core.store import Plan, PlanAnswer, Registration, Reply


@dataclass(slots=True)
class Coming:
    """A slot to come: `claim_at` (store's time) is the slot with its jitter drawn."""

    slot: int
    previous: int | None
    following: int | None
    claim_at: int


@dataclass(slots=True)
class JobState:
    """A handled job. `settled` is as the store last showed it (S20)."""

    job: Job
    registered: bool = False
    settled: int = -1
    coming: Coming | None = None
    overdue: tuple[int, int] | None = None
    """(settled, when the slot after it is missed): kept for the next heartbeat's look."""
    paused_at_settled: int | None = None
    """What was settled when a plan found the job paused: until that moves, nothing is planned."""


class Jobs:
    """Every job some session offers, by name. The newest Subscribe's spec makes the slots.

    The store is told in parts what is held and what is held no more, so that neither this instance
    nor the store's others wait for long. `generation` counts the changes to what is offered.
    `want_sweep` is called when runs wait that were just made.
    """

    def __init__(self, context: Context, want_sweep: Callable[[], None] = lambda: None) -> None:
        self._context = context
        self._want_sweep = want_sweep
        self._states: dict[str, JobState] = {}
        self._gone: dict[str, Job] = {}
        self._to_plan: set[str] = set()
        self._to_register: dict[str, None] = {}
        self._to_let_go: dict[str, None] = {}
        self._may_be_held: set[str] = set()
        """Jobs that were sent to be registered, and not surely let go of since."""
        self._known_since = limits.NEVER
        """When the store first answered a registration, since it last did not know us."""
        self._call_wanted = False
        """The store is to know this instance, though it may have no job."""
        self._next_part_at = 0
        self._halvings = 0
        """How often parts are halved: what fails by itself takes fewer others with it each time."""
        self.generation = 0

    def __iter__(self) -> Iterator[JobState]:
        return iter(self._states.values())

    def get(self, name: str) -> JobState | None:
        """The job, if it is handled here."""
        return self._states.get(name)

    def latest(self, name: str) -> Job | None:
        """The job as it is handled here or, by now handled no more, as it was last."""
        state = self._states.get(name)
        return state.job if state is not None else self._gone.get(name)

    def registered(self, name: str) -> JobState | None:
        """The job, if it is handled here and the store knows it."""
        state = self._states.get(name)
        return state if state is not None and state.registered else None

    def offer(self, jobs: tuple[Job, ...]) -> None:
        """Takes in what a Subscribe brought."""
        for job in jobs:
            self._gone.pop(job.name, None)
            known = self._states.get(job.name)
            if known is None or known.job.spec != job.spec:
                self._states[job.name] = JobState(job)
                self._context.timers.clear(("slot", job.name))
                self._to_register[job.name] = None
                self._to_let_go.pop(job.name, None)
                self.generation += 1
        self._take_in_leases()

    def forget_unoffered(self) -> None:
        """Drops the jobs that no session offers any more."""
        for name in [n for n in self._states if not self._context.sessions.offers(n)]:
            self._gone[name] = self._states.pop(name).job
            self._context.timers.clear(("slot", name))
            self._to_register.pop(name, None)
            if name in self._may_be_held:
                self._to_let_go[name] = None
            self.generation += 1
        for name in list(self._gone)[: -limits.JOBS_MAX]:
            del self._gone[name]
        self._take_in_leases()

    def unregistered(self, name: str) -> None:
        """The store does not know this job's schedule."""
        state = self._states.get(name)
        if state is not None:
            state.registered = False
            state.coming = None
            self._context.timers.clear(("slot", name))
            self._to_register[name] = None

    def unknown(self, asked_at: int) -> None:
        """The store, asked at `asked_at`, had no record of this instance.

        If it had one when it was asked, it lost all of it: also a part whose answer is still to
        come, as that may have been written before the loss.
        """
        if self._known_since == limits.NEVER:
            self._call_wanted = True
        elif asked_at >= self._known_since:
            self._known_since = limits.NEVER
            self._call_wanted = True
            for name in self._states:
                self.unregistered(name)

    def went_back(self) -> None:
        """S27a. What was registered of late may be gone, and what was let go of may be back."""
        self._to_register.update(dict.fromkeys(self._states))
        self._to_let_go.update(dict.fromkeys(self._gone))

    @property
    def heartbeat_ms(self) -> int:
        """How often this instance beats: as the job that wants it most often."""
        default = limits.default_heartbeat(self._context.settings.lease_ms)
        return min((s.job.heartbeat_ms for s in self._states.values()), default=default)

    @property
    def longest_lease_ms(self) -> int:
        """The longest lease in use."""
        default = self._context.settings.lease_ms
        return max((s.job.lease_ms for s in self._states.values()), default=default)

    def _take_in_leases(self) -> None:
        default = self._context.settings.lease_ms
        shortest = min((s.job.lease_ms for s in self._states.values()), default=default)
        self._context.store_time.margin_ms = limits.lease_margin(shortest)

    # --- Registration --------------------------------------------------------------------

    def pump(self, instance: Callable[[], Instance]) -> None:
        """Tells the store the next part of what has changed, when it can."""
        context = self._context
        if not (self._to_register or self._to_let_go or self._call_wanted):
            return
        if context.stopping or not context.clock_usable:
            return
        if context.now < self._next_part_at or not context.lanes.free(Lane.REGISTER, context.now):
            return
        most = max(1, limits.REGISTER_BATCH >> self._halvings)
        states = tuple(self._states[name] for name in _taken(self._to_register, most))
        # Where something fails, neither takes the other with it.
        let_go = () if states and self._halvings else _taken(self._to_let_go, most)
        self._may_be_held.update(state.job.name for state in states)

        def replied(call: Call, reply: Reply[Registration]) -> None:
            self._pause(context.now - call.sent_at)
            self._halvings = max(0, self._halvings - 1)
            self._known_since = min(self._known_since, context.now)
            self._call_wanted = False
            self._may_be_held.difference_update(let_go)
            for state, answer in zip(states, reply.answers, strict=True):
                if self._states.get(state.job.name) is state:
                    self._registered(state, answer)
            self._beat_as_often_as_wanted()

        def failed(_: bool) -> None:
            if most > 1:
                self._halvings += 1
            for name in (*(state.job.name for state in states), *let_go):
                (self._to_register if name in self._states else self._to_let_go)[name] = None

        context.out.append(
            context.lanes.call(
                Lane.REGISTER,
                Method.REGISTER,
                (instance(), tuple(state.job.definition for state in states), let_go),
                context.now,
                replied,
                failed,
            )
        )

    def _pause(self, took_ms: int) -> None:
        """Others wait for what a part has locked, and some stores do not queue them: they ask again
        and again, and have to find a gap.
        """
        context = self._context
        self._next_part_at = context.now + min(took_ms, limits.REGISTER_PAUSE_MAX)
        context.timers.set(("register",), self._next_part_at)

    def _beat_as_often_as_wanted(self) -> None:
        """When all parts are through, what is unfinished is looked at; until then that has the
        time of a heartbeat.
        """
        context = self._context
        if self._to_register:
            context.timers.bring_forward(("beat",), context.now + self.heartbeat_ms)
        else:
            context.timers.set(("beat",), context.now)
            context.timers.set(("compare",), context.now)

    def _registered(self, state: JobState, answer: Registration) -> None:
        if answer.definitions_differ:
            self._context.log(Level.WARNING, "definitions_differ", job=state.job.name)
        if not state.job.schedule_id:
            state.registered = True  # nothing is to come, or to be settled
            return
        assert answer.settled is not None, "what has a schedule is settled up to somewhere"
        if not state.registered:
            state.registered = True
            state.settled = answer.settled
            self.seed(state)
        self._show(state, answer.settled)

    # --- Slots to come -------------------------------------------------------------------

    def seed(self, state: JobState) -> None:
        """The first slot after `settled` that can still be claimed in time."""
        context, job = self._context, state.job
        longest = max(limits.START_DEADLINE_MAX_DEFAULT, job.start_deadline(0, None))
        after = max(state.settled, context.store_now - longest)
        slot = job.schedule.next_after(after)
        while slot is not None:
            following = job.schedule.next_after(slot)
            if slot >= context.store_now - job.start_deadline(slot, following):
                break
            slot = following
        self._come_to(state, slot, job.schedule.previous_upto(slot - 1) if slot else None)

    def step_on(self, state: JobState) -> None:
        """On to the slot after the coming one."""
        assert state.coming is not None
        self._come_to(state, state.coming.following, state.coming.slot)

    def reseed(self) -> None:
        """After a step of the store's clock or a suspension the coming slots are judged anew."""
        for state in self._states.values():
            if state.registered:
                self.seed(state)

    def _come_to(self, state: JobState, slot: int | None, previous: int | None) -> None:
        context, job = self._context, state.job
        key = ("slot", job.name)
        if slot is None:
            state.coming = None
            context.timers.clear(key)
            return
        following = job.schedule.next_after(slot)
        claim_at = slot + context.draw(job.longest_jitter(slot, following))
        state.coming = Coming(slot, previous, following, claim_at)
        context.timers.set(key, context.store_time.when(claim_at))

    # --- Missed slots (S20) --------------------------------------------------------------

    def show_settled(self, name: str, schedule_id: str, settled: int | None) -> None:
        """What the store showed of the job's schedule."""
        state = self.registered(name)
        if state is None or not schedule_id or state.job.schedule_id != schedule_id:
            return
        if settled is None:
            self.unregistered(name)
        else:
            self._show(state, settled)

    def _show(self, state: JobState, settled: int) -> None:
        """Whether a slot after `settled` is missed is looked at once a heartbeat.

        Without leases nothing is planned, and `settled` is where the schedule begins.
        """
        state.settled = settled
        if not self._context.capabilities.leases:
            return
        job, schedule = state.job, state.job.schedule
        if state.overdue is None or state.overdue[0] != settled:
            first = schedule.next_after(settled)
            if first is None:
                return
            missed_at = first + job.start_deadline(first, schedule.next_after(first))
            state.overdue = (settled, missed_at)
        paused = state.paused_at_settled == settled
        if state.overdue[1] < self._context.store_now and not paused:
            self._to_plan.add(job.name)

    def pump_plans(self) -> None:
        """Plans what nobody claimed in time, one batch at a time."""
        context = self._context
        if not self._to_plan or context.stopping or not context.clock_usable:
            return
        if context.quarantined_until > context.now or not context.lanes.free(
            Lane.SETTLE, context.now
        ):
            return
        plans = self._next_plans()
        if not plans:
            return

        def replied(_: Call, reply: Reply[PlanAnswer]) -> None:
            for plan, answer in zip(plans, reply.answers, strict=True):
                if answer.missed:
                    context.log(Level.WARNING, "slots_missed", job=plan.job, count=answer.missed)
                if answer.due:
                    context.log(Level.INFO, "slots_caught_up", job=plan.job, count=answer.due)
                    self._want_sweep()
                if not answer.done and answer.settled == plan.settled:
                    self._found_paused(plan)
                if answer.settled != plan.settled:
                    self.show_settled(plan.job, plan.schedule_id, answer.settled)
                # Otherwise none is missed by the store's clock: the next heartbeat looks again.

        context.out.append(
            context.lanes.call(
                Lane.SETTLE,
                Method.SETTLE,
                (plans,),
                context.now,
                replied,
                lambda _: self._to_plan.update(plan.job for plan in plans),
            )
        )

    def _found_paused(self, plan: Plan) -> None:
        """S29. A resumption moves `settled`; until then there is nothing to list."""
        state = self.registered(plan.job)
        if state is not None and state.job.schedule_id == plan.schedule_id:
            state.paused_at_settled = plan.settled

    def _next_plans(self) -> tuple[Plan, ...]:
        """A batch that one step may afford: listing slots takes its time."""
        plans: list[Plan] = []
        listed = 0
        for name in sorted(self._to_plan):
            if len(plans) == limits.PLAN_BATCH or listed >= limits.MISSED_LISTED_MAX:
                break
            self._to_plan.discard(name)
            state = self.registered(name)
            if state is None:
                continue
            plan = plan_of(state.job, state.settled, self._context.store_now)
            if plan.slots:
                plans.append(plan)
                listed += len(plan.slots)
        return tuple(plans)


def _taken(names: dict[str, None], most: int) -> tuple[str, ...]:
    """Takes out `most` at most, those first that came first."""
    taken = tuple(islice(names, most))
    for name in taken:
        del names[name]
    return taken
