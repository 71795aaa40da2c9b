"""Clients come, say that they live, and go: the sidecar's half of the protocol's session.

Imports the core's leaves, `jobs`, `holding` and `beating`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from anarchon_server.core import limits
from anarchon_server.core.beating import Adoption, Beating
from anarchon_server.core.configured import laid_over
from anarchon_server.core.context import Context, read_token
from anarchon_server.core.errors import (
    AnarchonError,
    InvalidError,
    NotFoundError,
    RefusedError,
    StoreUnavailable,
)
from anarchon_server.core.holding import Hold, Holding
from anarchon_server.core.jobs import Jobs
from anarchon_server.core.messages import (
    Answer,
    Attached,
    ClientExited,
    Closed,
    CloseSession,
    EndStream,
    KeepAlive,
    KeepAliveAnswer,
    Level,
    Lost,
    Reload,
    StreamEnded,
    Subscribe,
    UnwatchClient,
    WatchClient,
)
from anarchon_server.core.model import CancelReason, JobSpec, Reason
from anarchon_server.core.policy import Job, resolve_all
from anarchon_server.core.sessions import Session
from anarchon_server.core.slots import Cron
from anarchon_server.core.store import Renewal, TokenAnswer, TokenOutcome

_SUBSCRIBE_AGAIN = "subscribe again, naming what is in flight"
_NOT_JUDGED_YET = "the store has not answered yet for what is in flight"


def _draining() -> RefusedError:
    return RefusedError("DRAINING", "this sidecar is stopping; subscribe to its successor")


def _by_name(jobs: Iterable[Job]) -> dict[str, Job]:
    return {job.name: job for job in jobs}


class Attaching:
    """Opens, keeps and ends sessions."""

    def __init__(self, context: Context, jobs: Jobs, holding: Holding, beating: Beating) -> None:
        self._context = context
        self._jobs = jobs
        self._holding = holding
        self._beating = beating
        self._left: dict[str, list[Hold]] = {}

    # --- Subscribe -----------------------------------------------------------------------

    def subscribe(self, request: Subscribe) -> None:
        """Opens or re-opens a session, or ends the stream with what is wrong."""
        try:
            jobs = self._checked(request)
        except AnarchonError as error:
            self._context.out.append(EndStream(request.session_id, request.stream_id, error))
            return
        known = self._context.sessions.get(request.session_id)
        before = known.jobs if known is not None else ()
        session = self._opened(request, jobs)
        self._offer_newest((*session.jobs, *before))
        ours = {t for t in request.in_flight if self._is_ours(session, t)}
        strange = tuple(t for t in dict.fromkeys(request.in_flight) if t not in ours)
        adoptable = tuple(r for t in strange if (r := self._adoption_of(session, t)) is not None)
        asked = {renewal.token for renewal in adoptable}
        lost = tuple(
            Lost(t, session.ended.get(t, CancelReason.FENCED)) for t in strange if t not in asked
        )
        if adoptable:
            self._ask_to_adopt(session, request.stream_id, adoptable, lost)
        else:
            self._attach(session, lost)

    def _offer_newest(self, names: Iterable[str]) -> None:
        """S28. Which sessions offer these jobs has changed: of those that do, the newest Subscribe
        makes the slots; what none offers is dropped.
        """
        self._jobs.offer(self._context.sessions.newest_offers(names))
        self._jobs.forget_unoffered()

    def _checked(self, request: Subscribe) -> tuple[Job, ...]:
        context = self._context
        if context.stopping:
            raise _draining()
        if not 1 <= request.max_concurrency <= limits.CONCURRENCY_MAX:
            raise InvalidError(
                "max_concurrency", request.max_concurrency, f"1 to {limits.CONCURRENCY_MAX}"
            )
        if not request.specs:
            raise InvalidError("jobs", (), "offer at least one job")
        known = context.sessions.get(request.session_id)
        if known is None and len(context.sessions) >= limits.SESSIONS_MAX:
            raise RefusedError(
                "LIMIT_EXCEEDED", f"this sidecar has {limits.SESSIONS_MAX} sessions, its limit"
            )
        near = context.store_now if context.store_time.known else request.wall_at
        return self._resolved(request.specs, context.configured, near)

    def _resolved(
        self, specs: tuple[JobSpec, ...], configured: Mapping[str, JobSpec], near: int
    ) -> tuple[Job, ...]:
        """The jobs of a client, with what the configuration says of them."""
        context = self._context
        wanted = tuple(laid_over(spec, configured)[0] for spec in specs)
        return resolve_all(wanted, context.capabilities, context.settings.lease_ms, near)

    def reload(self, request: Reload) -> None:
        """The configuration was read again: all of it counts, or, where a job would be refused,
        nothing of it. A shorter lease counts once every client knows (S15).
        """
        context = self._context
        sessions = tuple(context.sessions)
        try:
            offers = [
                self._resolved(session.specs, request.jobs, context.store_now)
                for session in sessions
            ]
        except AnarchonError as error:
            context.log(Level.ERROR, "reload_refused", file=request.file, error=str(error))
            return
        noted = self._overridden(sessions)
        context.configured = request.jobs
        for session, jobs in zip(sessions, offers, strict=True):
            session.offers = _by_name(jobs)
        self._offer_newest(name for session in sessions for name in session.jobs)
        for session, jobs in zip(sessions, offers, strict=True):
            self._offer_time(session, limits.session_ttl(min(job.lease_ms for job in jobs)))
        context.log(Level.INFO, "reloaded", jobs=len(request.jobs), file=request.file)
        # An attached client has had its notes already: what is new since then is told here.
        news = (note for note in self._overridden(sessions) if note not in noted)
        for note in islice(news, limits.NOTES_MAX):
            context.log(Level.WARNING, "job_overridden", note=note)

    def _overridden(self, sessions: Iterable[Session]) -> dict[str, None]:
        """What the configuration says otherwise than these clients: notes, each once, in order."""
        return dict.fromkeys(
            note
            for session in sessions
            for spec in session.specs
            for note in laid_over(spec, self._context.configured)[1]
        )

    def _opened(self, request: Subscribe, jobs: tuple[Job, ...]) -> Session:
        context = self._context
        offered = limits.session_ttl(min(job.lease_ms for job in jobs))
        session = context.sessions.get(request.session_id)
        reopened = session is not None
        if session is None:
            session = Session(
                request.session_id, ttl_ms=offered, offered_ms=offered, kept_alive_at=context.now
            )
        else:
            self._replace_stream(session)
            context.sessions.remove_jobs(session)
        session.client = request.client
        session.specs = request.specs
        session.offers = _by_name(jobs)
        session.max_concurrency = request.max_concurrency
        session.stream_id = request.stream_id
        session.attached = session.fresh = session.draining = session.blocked = False
        context.sessions.put(session)
        left = self._forget_left(request.session_id)
        self._offer_time(session, offered)
        self._time_session(session)
        if request.watchable:
            context.out.append(WatchClient(request.session_id, request.client.process_id))
        elif reopened or left:  # the process that opened it before may be another
            context.out.append(UnwatchClient(request.session_id))
        return session

    def _replace_stream(self, session: Session) -> None:
        if session.stream_id is not None:
            error = RefusedError("SESSION_REPLACED", "another stream has opened this session")
            self._context.out.append(EndStream(session.session_id, session.stream_id, error))

    def _is_ours(self, session: Session, token: str) -> bool:
        if self._context.sessions.place_of(token) is session:
            return self._holding.held(token) is not None
        return self._holding.has_result(token)

    def _adoption_of(self, session: Session, token: str) -> Renewal | None:
        """The renewal that would adopt the token; None: it cannot be this session's."""
        named = read_token(token)
        if named is None or named[0] not in session.offers or not self._is_free(token):
            return None
        state = self._jobs.get(named[0])
        assert state is not None, "this session offers it"
        settings = self._context.settings
        return Renewal(
            named[0],
            named[1],
            token,
            settings.instance_id,
            settings.incarnation,
            state.job.lease_ms,
            adopt=True,
        )

    def _ask_to_adopt(
        self,
        session: Session,
        stream_id: int,
        renewals: tuple[Renewal, ...],
        lost: tuple[Lost, ...],
    ) -> None:
        def judged(answers: tuple[TokenAnswer, ...] | None, sent_at: int) -> None:
            present = self._context.sessions.get(session.session_id)
            if session.exited:
                self._release_adopted(renewals, answers)
            if present is None or present.stream_id != stream_id:
                return  # the client has come again meanwhile, and asks again
            if answers is None:
                self._end_stream(present, StoreUnavailable(_NOT_JUDGED_YET))
                return
            if self._context.stopping:  # it takes them along to the successor
                self._end_stream(present, _draining())
                return
            gone = self._adopt(present, renewals, answers, sent_at)
            self._attach(present, (*lost, *gone))

        self._beating.adopt(Adoption(renewals, judged))

    def _release_adopted(
        self, renewals: tuple[Renewal, ...], answers: tuple[TokenAnswer, ...] | None
    ) -> None:
        """The client's process ended while the store was asked to adopt for it (S24). Where no
        answer came they may be ours: what is not, no release of ours ends (S17).
        """
        for place, renewal in enumerate(renewals):
            ours = answers is None or answers[place].outcome is TokenOutcome.RENEWED
            if ours and self._is_free(renewal.token):
                self._holding.release(renewal.job, renewal.slot, renewal.token, Reason.RUNNER_LOST)

    def _end_stream(self, session: Session, error: AnarchonError) -> None:
        assert session.stream_id is not None
        self._context.out.append(EndStream(session.session_id, session.stream_id, error))
        session.stream_id = None

    def _adopt(
        self,
        session: Session,
        renewals: tuple[Renewal, ...],
        answers: tuple[TokenAnswer, ...],
        sent_at: int,
    ) -> tuple[Lost, ...]:
        gone = []
        for renewal, answer in zip(renewals, answers, strict=True):
            if self._holding.has_result(renewal.token):
                continue  # it was reported meanwhile
            if answer.outcome is TokenOutcome.RENEWED and self._is_free(renewal.token):
                state = self._jobs.get(renewal.job)
                assert state is not None, "this session offers it"
                assert answer.run is not None
                self._holding.adopted(session, state.job, answer.run, sent_at)
            else:  # the store says so, or another session was quicker
                gone.append(Lost(renewal.token, CancelReason.FENCED))
        return tuple(gone)

    def _is_free(self, token: str) -> bool:
        """Whether no session of this sidecar has the token, nor had it until just now."""
        return not self._holding.holds(token) and self._context.sessions.place_of(token) is None

    def _attach(self, session: Session, lost: tuple[Lost, ...]) -> None:
        session.attached = True
        event = Attached(
            session.offered_ms // limits.KEEP_ALIVE_SHARE,
            session.offered_ms,
            lost,
            self._notes(session),
        )
        self._context.send(session, event)
        self._holding.repeat_cancels(session)
        self._context.log(
            Level.INFO,
            "session_attached",
            session_id=session.session_id,
            jobs=len(session.jobs),
            language=session.client.language,
            lost=len(lost),
        )

    def _notes(self, session: Session) -> tuple[str, ...]:
        """What a reader might not expect of the schedules, then those on the clock in words."""
        jobs = tuple(self._jobs_of(session))
        differing = self._overridden([session])
        unexpected = (f"{job.name}: {note}" for job in jobs for note in job.schedule.notes)
        in_words = (f"{job.name}: {words}" for job in jobs if (words := self._in_words(job)))
        notes = tuple(islice(chain(differing, unexpected, in_words), limits.NOTES_MAX + 1))
        if len(notes) <= limits.NOTES_MAX:
            return notes
        return (*notes[: limits.NOTES_MAX], f"these are the first {limits.NOTES_MAX} notes")

    def _in_words(self, job: Job) -> str:
        """A cron schedule in words, with the clock changes to come; empty for a grid."""
        if not isinstance(job.schedule, Cron):
            return ""
        known = self._context.store_time.known
        changes = job.schedule.forecast(self._context.store_now) if known else ()
        return "; ".join([job.schedule.description, *changes])

    # --- KeepAlive -----------------------------------------------------------------------

    def keep_alive(self, request: KeepAlive) -> None:
        """Takes in that a client lives; what it may believe goes back."""
        context = self._context
        session = context.sessions.get(request.session_id)
        if session is None:
            error = NotFoundError("session", request.session_id, _SUBSCRIBE_AGAIN)
            context.out.append(Answer(request.request_id, error))
            return
        session.kept_alive_at = context.now
        session.fresh = session.fresh or session.attached
        session.draining = session.draining or request.draining
        self._time_session(session)
        holds = self._holding.of_session(session)
        to_confirm = [h for h in holds if h.token in request.confirm or not h.confirmed]
        if to_confirm and session.attached:
            for hold in to_confirm:
                hold.renew_at = context.now
            self._beating.confirm(request)
        else:
            self.answer_keep_alive(request, frozenset())

    def answer_keep_alive(self, request: KeepAlive, confirmed: frozenset[str]) -> None:
        """The answer, now or after the heartbeat that confirmed the tokens."""
        context = self._context
        session = context.sessions.get(request.session_id)
        if session is None:  # lost while the store was asked
            error = NotFoundError("session", request.session_id, _SUBSCRIBE_AGAIN)
            context.out.append(Answer(request.request_id, error))
            return
        if not session.attached:  # no trust in what the store has not judged (S16, S26)
            unjudged = StoreUnavailable(_NOT_JUDGED_YET)
            context.out.append(Answer(request.request_id, unjudged))
            return
        lost = self._holding.named(session, request.in_flight)
        self._offer_time(session, self._shortest_ttl(session))
        handed = [h for h in self._holding.of_session(session) if h.handed_over]
        trusted = min((h.trust_end - context.now for h in handed), default=session.offered_ms)
        context.out.append(
            Answer(
                request.request_id,
                KeepAliveAnswer(
                    session_ttl_ms=max(0, min(session.offered_ms, trusted)),
                    keep_alive_ms=session.offered_ms // limits.KEEP_ALIVE_SHARE,
                    stream_open=session.stream_id is not None,
                    lost=lost,
                    confirmed=tuple(t for t in request.confirm if t in confirmed),
                ),
            )
        )

    def _shortest_ttl(self, session: Session) -> int:
        """Of the jobs' present definitions, another session's newer one included."""
        return limits.session_ttl(min(job.lease_ms for job in self._jobs_of(session)))

    def _jobs_of(self, session: Session) -> Iterator[Job]:
        for name in session.jobs:
            state = self._jobs.get(name)
            assert state is not None, "this session offers it"
            yield state.job

    def _offer_time(self, session: Session, offered_ms: int) -> None:
        """S15. A shorter time counts once every older promise has run out."""
        shorter = offered_ms < session.offered_ms
        session.offered_ms = offered_ms
        if offered_ms >= session.ttl_ms:
            session.ttl_ms = offered_ms
            self._context.timers.clear(("shrink", session.session_id))
        elif shorter:  # the same offer again does not put it off
            self._context.timers.set(
                ("shrink", session.session_id), self._context.now + session.ttl_ms
            )

    def shrink(self, session_id: str) -> None:
        """Every promise of a longer session has run out."""
        session = self._context.sessions.get(session_id)
        assert session is not None, "an ended session has no timer"
        session.ttl_ms = session.offered_ms
        self._time_session(session)

    # --- Endings -------------------------------------------------------------------------

    def stream_ended(self, event: StreamEnded) -> None:
        """S24. A broken stream is not a death: the session's time goes on."""
        session = self._context.sessions.get(event.session_id)
        if session is not None and session.stream_id == event.stream_id:
            session.stream_id = None
            session.fresh = False

    def _time_session(self, session: Session) -> None:
        end = session.kept_alive_at + session.ttl_ms
        self._context.timers.set(("session", session.session_id), end)

    def session_time_over(self, session_id: str) -> None:
        """S25. No KeepAlive came for the session's time: it is lost."""
        context = self._context
        session = context.sessions.get(session_id)
        assert session is not None, "an ended session has no timer"
        context.log(Level.WARNING, "session_lost", session_id=session_id, jobs=len(session.jobs))
        if session.stream_id is not None:
            error = NotFoundError("session", session_id, _SUBSCRIBE_AGAIN)
            context.out.append(EndStream(session_id, session.stream_id, error))
        context.out.append(UnwatchClient(session_id))
        for hold in self._part_with(session):
            self._holding.give_back_later(hold)

    def close(self, request: CloseSession) -> None:
        """The client leaves: what surely stopped is handed over, the rest lapses, if its process does
        not end before (S23).
        """
        context = self._context
        session = context.sessions.get(request.session_id)
        if session is not None:
            context.log(Level.INFO, "session_closed", session_id=session.session_id)
            if session.stream_id is not None:
                context.out.append(EndStream(session.session_id, session.stream_id, None))
            left: list[Hold] = []
            for hold in self._part_with(session):
                if hold.token in request.stopped:
                    self._holding.give_back(hold, Reason.HANDED_OVER)
                else:
                    self._holding.leave_to_lease(hold)
                    left.append(hold)
            if left and context.capabilities.leases:
                self._left[session.session_id] = left
                over_at = context.now + max(hold.lease_ms for hold in left)
                context.timers.set(("left", session.session_id), over_at)
            else:
                context.out.append(UnwatchClient(session.session_id))
        context.out.append(Answer(request.request_id, Closed()))

    def left_time_over(self, session_id: str) -> None:
        """The leases of what a client left running are over: its process is of no account any more."""
        self._forget_left(session_id)
        self._context.out.append(UnwatchClient(session_id))

    def _forget_left(self, session_id: str) -> list[Hold]:
        self._context.timers.clear(("left", session_id))
        return self._left.pop(session_id, [])

    def client_exited(self, event: ClientExited) -> None:
        """S24. The process is gone for certain: its runs are released at once."""
        context = self._context
        session = context.sessions.get(event.session_id)
        if session is None:
            for hold in self._forget_left(event.session_id):
                self._holding.release(hold.job, hold.slot, hold.token, Reason.HANDED_OVER)
            return
        session.exited = True
        context.log(Level.WARNING, "client_exited", session_id=session.session_id)
        if session.stream_id is not None:
            context.out.append(EndStream(session.session_id, session.stream_id, None))
        leaving = session.draining or context.stopping
        reason = Reason.HANDED_OVER if leaving else Reason.RUNNER_LOST
        context.out.append(UnwatchClient(session.session_id))
        for hold in self._part_with(session):
            self._holding.give_back(hold, reason)

    def _part_with(self, session: Session) -> list[Hold]:
        """Ends the session; the attempts its client has, which have no place any more.

        What was won for it and not handed over goes to another session, or back.
        """
        context = self._context
        holds = self._holding.of_session(session)
        context.sessions.remove(session)
        context.timers.clear(("session", session.session_id))
        context.timers.clear(("shrink", session.session_id))
        for hold in holds:
            if not hold.handed_over and not self._placed_anew(hold):
                self._holding.give_back(hold, Reason.NOT_ACCEPTED)
        self._offer_newest(session.jobs)
        return [hold for hold in holds if hold.handed_over]

    def _placed_anew(self, hold: Hold) -> bool:
        state, context = self._jobs.get(hold.job), self._context
        return (
            state is not None
            and context.sessions.take(state.job, hold.token, context.now) is not None
        )
