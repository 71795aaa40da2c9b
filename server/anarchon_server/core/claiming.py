"""Which slots and runs this instance wants, and what became of asking for them.

Imports the core's leaves, `jobs` and `holding`. First claims (S10 to S13), runs that wait (S18,
S20, S29), retries (S22) and takeovers (S19) are wishes of one kind: where room is short the oldest
slot goes first, whatever it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from anarchon_server.core import limits
from anarchon_server.core.context import Context, new_token
from anarchon_server.core.holding import Holding
from anarchon_server.core.jobs import Jobs, JobState
from anarchon_server.core.lanes import Call, Lane
from anarchon_server.core.machine import why_no_other
from anarchon_server.core.messages import Level, Method
from anarchon_server.core.model import OverlapPolicy, Reason, RunView
from anarchon_server.core.store import Claim, ClaimAnswer, ClaimOutcome, Reply

Key = tuple[str, int]
"""A job's name and a slot: one run in the whole cluster."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A lease as last seen: the end that the store wrote, and when it is over by our own clock."""

    until: int
    over_at: int


@dataclass(slots=True)
class Sights:
    """The leases last seen of the runs that are watched, by job: each claim asks for those of its own,
    and there may be thousands of others.
    """

    _by_job: dict[str, dict[int, Sight]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_job.values()))

    def __getitem__(self, key: Key) -> Sight:
        job, slot = key
        return self._by_job[job][slot]

    def __setitem__(self, key: Key, sight: Sight) -> None:
        job, slot = key
        self._by_job.setdefault(job, {})[slot] = sight

    def get(self, key: Key) -> Sight | None:
        """The run's. None: it is not watched."""
        job, slot = key
        return self.of(job).get(slot)

    def of(self, job: str) -> Mapping[int, Sight]:
        """Those of the job's runs, by slot."""
        return self._by_job.get(job, {})

    def keys_of(self, jobs: Container[str]) -> Iterator[Key]:
        """The watched runs of these jobs."""
        return (
            (job, slot) for job, of_job in self._by_job.items() if job in jobs for slot in of_job
        )

    def discard(self, key: Key) -> None:
        """The run is not watched any more, if it was."""
        job, slot = key
        of_job = self._by_job.get(job, {})
        of_job.pop(slot, None)
        if not of_job:
            self._by_job.pop(job, None)


@dataclass(slots=True)
class Wish:
    """A slot or run this instance would run. Moments are its own, but for `deadline_at`.

    `token` is that of the last claim made. While its outcome is unknown the same is asked
    again (S11), also after `deadline_at` (store's time), when a first claim is else given
    up. `settled`: it was sent without room, and needs not be sent so again (S13).
    `must_end`: another attempt is not allowed, so that the claim only ends the run.
    `expired`: what it would take over was not freed, but its lease is over. `waiting`: the slot has
    a row, and no attempt yet. `retried` is the run to retry instead, once its call is over.
    """

    job: str
    slot: int
    previous: int | None = None
    deadline_ms: int = 0
    seen_attempt: int = 0
    seen_token: str = ""
    must_end: bool = False
    expired: bool = False
    waiting: bool = False
    token: str = ""
    unknown: bool = False
    settled: bool = False
    in_call: bool = False
    not_before: int = 0
    retried: RunView | None = None

    @property
    def first(self) -> bool:
        """Whether it is a claim of a slot that has no row as far as we know."""
        return not self.seen_attempt and not self.waiting


class Claiming:
    """The wishes, and the runs of other instances that this one is a backup for."""

    def __init__(self, context: Context, jobs: Jobs, holding: Holding) -> None:
        self._context = context
        self._jobs = jobs
        self._holding = holding
        self._wishes: dict[Key, Wish] = {}
        self._watched = Sights()
        self._looks: list[Key] = []

    # --- Where wishes come from ----------------------------------------------------------

    def slot_due(self, name: str) -> None:
        """The coming slot's timer fired: it is wished for, and the next one comes."""
        state, context = self._jobs.registered(name), self._context
        assert state is not None, "a job that is not registered has no timer"
        coming = state.coming
        assert coming is not None, "a job without a slot to come has no timer"
        if context.store_now < coming.claim_at:  # the store's time is not what it was then
            context.timers.set(("slot", name), context.store_time.when(coming.claim_at))
            return
        deadline_ms = state.job.start_deadline(coming.slot, coming.following)
        if coming.slot < context.store_now - deadline_ms:  # we slept: on to what can be claimed
            self._unclaimed(name, coming.slot)
            self._jobs.seed(state)
            return
        wish = Wish(name, coming.slot, previous=coming.previous, deadline_ms=deadline_ms)
        self._wishes.setdefault((name, coming.slot), wish)
        self._jobs.step_on(state)

    def observe(self, view: RunView) -> None:
        """A run as the store shows it: watched, wished for, or of no interest (S19)."""
        run = view.run
        key = (run.job, run.slot)
        if run.waits:
            self._wish_to_start(view)
            return
        if run.state.final or self._holding.holds(run.token):
            self._holding.seen(view)
            self.forget(key)
            return
        leases = self._context.capabilities.leases
        if view.wait_ms is not None and leases:
            self._watched[key] = Sight(0, self._context.now)
            self._wish_for_another(view, self._context.now + view.wait_ms)
            return
        if view.wait_ms is not None:
            self._retry_alone(view)
            return
        if not leases:  # it ended while the heartbeat was on its way
            return
        self._watched[key] = self._sighted(view, self._watched.get(key))
        if not view.takeable:
            self._drop_takeover(key)  # its lease was mended
            assert view.lease_left_ms is not None, "a run in progress has a lease"
            look_at = self._context.now + view.lease_left_ms
            look_at += self._context.draw(limits.END_LOOK_SPREAD)
            self._context.timers.set(("look", key), look_at)
            return
        self._wish_for_another(view)

    def observe_all(self, views: tuple[RunView, ...]) -> None:
        """The unfinished runs of some jobs, all there are. Of those that wait only the oldest is
        wished for, when nothing is in its way (S18, S20).
        """
        blocked = {view.run.job for view in views if view.run.unfinished}
        for view in sorted(views, key=lambda each: each.run.slot):
            run = view.run
            state = self._jobs.get(run.job)
            overlaps = state is not None and state.job.overlap is OverlapPolicy.ALLOW
            if run.waits and run.job in blocked and not overlaps:
                self._wait_on(run.job, run.slot)
                continue
            self.observe(view)
            if run.waits:
                blocked.add(run.job)

    def _wait_on(self, job: str, slot: int) -> None:
        """Something is in the way of a run that waits: it is asked for when that is gone, which the
        next sweep shows, or a notification sooner.
        """
        key = (job, slot)
        known = self._wishes.get(key)
        if known is None or (not known.in_call and not known.unknown):
            self._wishes.pop(key, None)
            self._watched[key] = Sight(0, self._context.now)

    def _sighted(self, view: RunView, before: Sight | None) -> Sight:
        """What this sight of the run says of the end of its lease (S19).

        A lease that shows as over when it is first seen may have been written while the store's
        clock was elsewhere, by a holder that lives and mends it with its next heartbeat: it is over
        once it has stayed as it is for its length.
        """
        lease, now = view.run.lease, self._context.now
        if view.run.freed or lease is None or self._context.capabilities.boot_leases:
            return Sight(0, now)
        if before is not None and before.until == lease.until:
            return before
        left = view.lease_left_ms
        assert left is not None, "a run with a lease has something left of it, or nothing"
        return Sight(lease.until, now + (left if left > 0 else lease.length_ms))

    def _vouched(self, wish: Wish, lease_ms: int) -> bool:
        """Whether the store may take leases as over by its clock (S18, S19)."""
        context = self._context
        if not context.vouched(lease_ms):
            return False
        if wish.seen_attempt:
            return True
        return all(sight.over_at <= context.now for sight in self._watched.of(wish.job).values())

    def _wish_to_start(self, view: RunView) -> None:
        """A run that waits, with nothing in its way as far as we know."""
        run = view.run
        key = (run.job, run.slot)
        known = self._wishes.get(key)
        if known is not None and (known.in_call or known.unknown or self._is_ours_alone(known)):
            return  # the last: what was seen is older than the attempt that is to be retried
        self._watched[key] = Sight(0, self._context.now)
        ends = bool(why_no_other(run, self._context.store_now))
        self._wishes[key] = Wish(run.job, run.slot, waiting=True, must_end=ends)

    def _retry_alone(self, view: RunView) -> None:
        """S22 on a claim-only backend: a retry of what this instance has reported, which no other
        makes, and no sweep shows. A restarted instance may be claiming its slot, which it cannot win.
        """
        known = self._wishes.get((view.run.job, view.run.slot))
        if known is not None and (known.in_call or known.unknown):
            if known.seen_attempt:  # it asks for this
                return
            if known.in_call:
                known.retried = view
                return
            known.unknown = False
            self._context.sessions.leave(known.token)
        assert view.wait_ms is not None, "what is retried has a time for it"
        self._wish_for_another(view, self._context.now + view.wait_ms)

    def _retry_instead(self, wish: Wish) -> None:
        """The call is over in which a slot was asked for that has a run to retry."""
        if wish.retried is not None:
            self._retry_alone(wish.retried)

    def _wish_for_another(self, view: RunView, not_before: int = 0) -> None:
        """Another attempt of a run: a takeover, or a retry that may be made from `not_before` on."""
        run, context = view.run, self._context
        key = (run.job, run.slot)
        known = self._wishes.get(key)
        if known is not None and (known.in_call or known.unknown):
            return
        wish = Wish(
            run.job,
            run.slot,
            seen_attempt=run.attempt,
            seen_token=run.token,
            must_end=bool(why_no_other(run, context.store_now)),
            expired=not run.freed and run.lease is not None,
        )
        if not_before > context.now:
            self._hold_back(wish, not_before + context.draw(limits.END_LOOK_SPREAD))
        if known is not None and (known.seen_token, known.expired) == (run.token, wish.expired):
            wish.not_before = known.not_before  # it may have been told to wait
        if wish.expired and run.lease is not None:
            state = self._jobs.get(run.job)
            watched_for = max(run.lease.length_ms, state.job.lease_ms if state else 0)
            self._hold_back(wish, context.takeovers_from(watched_for))
            self._hold_back(wish, self._watched[key].over_at)
        self._wishes[key] = wish

    def _hold_back(self, wish: Wish, until: int) -> None:
        wish.not_before = max(wish.not_before, until)
        self._context.timers.set(("wish", (wish.job, wish.slot)), wish.not_before)

    def look_due(self, key: Key) -> None:
        """The lease of a watched run should be over about now."""
        self._looks.append(key)

    def take_looks(self) -> tuple[Key, ...]:
        """The runs to look at with the next heartbeat."""
        looks = tuple(self._looks[: limits.LOOKS_MAX])
        del self._looks[: limits.LOOKS_MAX]
        return looks

    @property
    def has_looks(self) -> bool:
        """Whether any run is to be looked at."""
        return bool(self._looks)

    def put_looks_back(self, looks: tuple[Key, ...]) -> None:
        """The heartbeat that carried these looks has failed."""
        self._looks.extend(looks)

    def seen_all(self, jobs: frozenset[str], unfinished: frozenset[Key]) -> None:
        """A sweep showed every unfinished run of these jobs: the others have ended."""
        for key in [each for each in self._watched.keys_of(jobs) if each not in unfinished]:
            self.forget(key)

    def forget(self, key: Key) -> None:
        """The run has ended, or is none of our business: no look, no takeover."""
        self._watched.discard(key)
        self._context.timers.clear(("look", key))
        self._drop_takeover(key)

    def _drop_takeover(self, key: Key) -> None:
        wish = self._wishes.get(key)
        if wish is None or wish.first or wish.in_call or wish.unknown:
            return
        if not self._is_ours_alone(wish):
            del self._wishes[key]

    def throw_away(self) -> None:
        """S4. What was wanted before a suspension is judged anew, but for what may be won."""
        for key, wish in tuple(self._wishes.items()):
            if not wish.in_call and not wish.unknown and not self._is_ours_alone(wish):
                del self._wishes[key]

    def _is_ours_alone(self, wish: Wish) -> bool:
        """Whether no other instance will make this attempt, and none will show it here again: a
        retry on a claim-only backend (S22).
        """
        return bool(wish.seen_attempt) and not self._context.capabilities.leases

    # --- Asking --------------------------------------------------------------------------

    def pump(self) -> None:
        """Sends the next batch of claims, if there is one and it may go."""
        context = self._context
        if not self._wishes:
            return
        self._drop_the_hopeless()
        if not context.clock_usable or not context.lanes.free(Lane.CLAIM, context.now):
            return
        asked: list[Wish] = []
        claims: list[Claim] = []
        for wish in sorted(self._wishes.values(), key=lambda w: w.slot):
            if len(claims) == limits.CLAIM_BATCH:
                break
            claim = self._claim(wish)
            if claim is not None:
                asked.append(wish)
                claims.append(claim)
        if not claims:
            return

        def replied(call: Call, reply: Reply[ClaimAnswer]) -> None:
            for wish, claim, answer in zip(asked, claims, reply.answers, strict=True):
                wish.in_call = False
                self._answered(wish, claim, answer, call.sent_at)
                self._retry_instead(wish)

        def failed(unknown: bool) -> None:
            newly = sum(not wish.unknown for wish in asked) if unknown else 0
            for wish in asked:
                wish.in_call = False
                wish.unknown = wish.unknown or unknown
                self._leave_place(wish)
                self._retry_instead(wish)
            if newly:
                context.log(Level.WARNING, "claim_unknown", count=newly)

        context.out.append(
            context.lanes.call(
                Lane.CLAIM, Method.CLAIM, (tuple(claims),), context.now, replied, failed
            )
        )

    def _drop_the_hopeless(self) -> None:
        """Nobody here can run it any more, or it is missed and will be planned (S20).

        What may have been won is released instead of asked for again (S11); where a claim may not
        look at a clock, before the record of its winner may be gone (S10).
        """
        context = self._context
        for wish in [wish for wish in self._wishes.values() if not wish.in_call]:
            unwanted = context.stopping or not self._is_handled(wish)
            late_ms = context.store_now - wish.slot - wish.deadline_ms if wish.first else 0
            too_late = not context.capabilities.leases and late_ms > limits.UNKNOWN_ASKED_FOR
            if unwanted or too_late or (late_ms > 0 and not wish.unknown):
                if not unwanted:
                    self._unclaimed(wish.job, wish.slot)
                self._give_up(wish)

    def _is_handled(self, wish: Wish) -> bool:
        """Whether somebody here has the job; what nobody else retries waits for its registration."""
        if self._is_ours_alone(wish):
            return self._jobs.get(wish.job) is not None
        return self._jobs.registered(wish.job) is not None

    def _unclaimed(self, job: str, slot: int) -> None:
        """This instance did not get to the slot in time: said where no plan would say it (S20)."""
        if not self._context.capabilities.leases:
            self._context.log(Level.INFO, "slot_not_claimed", job=job, slot=slot)

    def _leave_place(self, wish: Wish) -> None:
        """After a claim that was not won. Without leases a win that comes to light later must find
        a client: the place is kept for it.
        """
        if self._context.capabilities.leases or not wish.unknown:
            self._context.sessions.leave(wish.token)

    def _claim(self, wish: Wish) -> Claim | None:
        """The claim to send now; None: this wish waits."""
        context = self._context
        if wish.not_before > context.now:
            return None
        if wish.expired and context.quarantined_until > context.now:
            return None
        state = self._jobs.registered(wish.job)
        if state is None:
            assert self._is_ours_alone(wish), "others are given up before"
            return None
        token = wish.token if wish.unknown else ""
        place = context.sessions.place_of(token)
        needs_room = place is None and not self._worth_sending_without_room(wish)
        if needs_room and not context.sessions.has_room(state.job, context.now):
            return None  # before a token is drawn: a full instance may have thousands that wait
        token = token or new_token(wish.slot, context.new_nonce(), wish.job)
        place = place or context.sessions.take(state.job, token, context.now)
        wish.token = token
        wish.in_call = True
        return self._made(wish, state, may_run=place is not None)

    def _worth_sending_without_room(self, wish: Wish) -> bool:
        """S13, S19: settling a slot, ending a run and asking again need no room.

        Without leases there is nothing to settle, and what is won without a client is lost.
        """
        if not self._context.capabilities.leases:
            return False
        if wish.unknown or wish.must_end:
            return True
        return wish.first and not wish.settled

    def _made(self, wish: Wish, state: JobState, *, may_run: bool) -> Claim:
        context, job = self._context, state.job
        return Claim(
            job=job.name,
            slot=wish.slot,
            token=wish.token,
            instance_id=context.settings.instance_id,
            incarnation=context.settings.incarnation,
            schedule_id=job.schedule_id,
            previous_slot=wish.previous,
            overlap=job.overlap,
            start_deadline_ms=wish.deadline_ms,
            lease_ms=job.lease_ms,
            cancel_grace_ms=job.cancel_grace_ms,
            max_attempts=job.max_attempts,
            window_ms=job.definition.window_ms,
            expected_at=context.store_now,
            vouched=self._vouched(wish, job.lease_ms),
            retries=job.retries,
            may_run=may_run,
            seen_attempt=wish.seen_attempt,
            seen_token=wish.seen_token,
        )

    def _give_up(self, wish: Wish) -> None:
        if self._is_ours_alone(wish):
            # The run ends with its last attempt: first of all, so that what is on its way wins no more.
            self._holding.release(wish.job, wish.slot, wish.seen_token, Reason.RUNNER_LOST)
        if wish.unknown:
            self._context.sessions.leave(wish.token)
            self._release(wish)
        del self._wishes[(wish.job, wish.slot)]

    def _release(self, wish: Wish) -> None:
        deadline_at = wish.slot + wish.deadline_ms
        self._holding.release_unknown(wish.job, wish.slot, wish.token, deadline_at)

    # --- Answers -------------------------------------------------------------------------

    def _answered(self, wish: Wish, claim: Claim, answer: ClaimAnswer, sent_at: int) -> None:
        context, key = self._context, (wish.job, wish.slot)
        if answer.outcome is ClaimOutcome.WON:
            self._won(wish, claim, answer, sent_at)
            return
        leases, was_unknown = context.capabilities.leases, wish.unknown
        wish.unknown = answer.outcome is ClaimOutcome.UNKNOWN
        self._leave_place(wish)
        if wish.unknown:
            self._hold_back(wish, context.now + limits.RETRY_FIRST)
            return
        if answer.outcome is ClaimOutcome.EARLY:
            waits = answer.run.wait_ms if answer.run is not None else None
            comes_at = context.store_time.when(wish.slot) if waits is None else context.now + waits
            self._hold_back(wish, max(context.now + limits.RETRY_FIRST, comes_at))
            wish.unknown = was_unknown and not leases  # what was sent before may win, for good
            return
        if answer.outcome is ClaimOutcome.UNCHANGED and not wish.must_end:
            wish.settled = True
            return
        del self._wishes[key]
        refused = answer.outcome in (ClaimOutcome.LATE, ClaimOutcome.PAUSED)
        if refused and was_unknown and not leases:
            self._release(wish)
        self._learn(wish, answer)

    def _learn(self, wish: Wish, answer: ClaimAnswer) -> None:
        """What an answer that ends a wish says besides."""
        if answer.outcome is ClaimOutcome.UNREGISTERED:
            self._jobs.unregistered(wish.job)
        elif answer.outcome is ClaimOutcome.CLOCK_STEP:
            self._context.store_time.distrust()
            self._context.log(Level.WARNING, "store_clock_step", job=wish.job, slot=wish.slot)
        elif answer.outcome is ClaimOutcome.SKIPPED:
            assert answer.run is not None, "a skipped claim shows the slot's row"
            self._context.log(
                Level.INFO,
                "slot_skipped",
                job=wish.job,
                slot=wish.slot,
                blocking_slot=answer.run.run.blocking_slot,
            )
        elif answer.outcome is ClaimOutcome.QUEUED:
            assert answer.run is not None, "a queued claim shows the slot's row"
            self._queued(answer.run)
        elif answer.outcome is ClaimOutcome.PAUSED:
            self._context.log(Level.INFO, "slot_paused", job=wish.job, slot=wish.slot)
        elif answer.outcome is ClaimOutcome.LATE:
            self._unclaimed(wish.job, wish.slot)
        elif answer.outcome is ClaimOutcome.OLD:
            self._context.log(Level.WARNING, "slots_missed", job=wish.job, count=1)
        elif answer.outcome is ClaimOutcome.LOST and self._context.capabilities.leases:
            assert answer.run is not None, "a lost claim shows what it lost to"
            self.observe(answer.run)
            again = self._wishes.get((wish.job, wish.slot))
            if again is not None and not wish.first:  # it saw what the store did not: not at once
                self._hold_back(again, self._context.now + limits.END_LOOK_SPREAD)

    def _queued(self, view: RunView) -> None:
        """Another run is in the way of this one, which is looked at again with the next sweep."""
        run = view.run
        if run.waits:
            self._wait_on(run.job, run.slot)
        else:
            self._watched[run.job, run.slot] = Sight(0, self._context.now)
        if run.blocking_slot:  # it may be ours, and have been asked to stop by this very claim
            self._looks.append((run.job, run.blocking_slot))
        self._context.log(Level.INFO, "run_queued", job=run.job, slot=run.slot)

    def _won(self, wish: Wish, claim: Claim, answer: ClaimAnswer, sent_at: int) -> None:
        context, key = self._context, (wish.job, wish.slot)
        del self._wishes[key]
        self._watched.discard(key)
        context.timers.clear(("look", key))
        assert answer.run is not None, "a won claim shows its run"
        state = self._jobs.get(wish.job)
        job = state.job if state else None
        self._holding.won(claim, answer.run, sent_at, job, answer.payload)
