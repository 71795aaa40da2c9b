"""Sessions and their room: which client may be given an attempt, and which has it.

Imports `limits`, `model` and `policy`. A place is taken by a token from the moment a claim for
it is made until the client has reported the attempt or no longer names it (S13, S21a).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from anarchon_server.core import limits
from anarchon_server.core.model import CancelReason, Client, JobSpec
from anarchon_server.core.policy import Job


@dataclass(slots=True)
class Session:
    """One client's attachment. Moments are on the sidecar's boot-time clock.

    `specs` are as the client stated them, `offers` the jobs that they make here, by name.
    `ttl_ms` is the longest time for which the client may still believe in the session, `offered_ms`
    what it was told last (S15: a shorter one counts once the client has it).
    `places` maps each token that takes a place to its job; `ended` names those of them that
    the client was told to stop and that are no longer held, with the reason. `exited`: its process
    is gone for certain. `strangers` counts
    what the client runs besides, and should not. A client that leaves what it is sent unaccepted
    is `blocked`, until `blocked_until` at most; `refusals` counts how often in a row.
    """

    session_id: str
    ttl_ms: int
    offered_ms: int
    kept_alive_at: int
    client: Client = field(default_factory=Client)
    specs: tuple[JobSpec, ...] = ()
    offers: Mapping[str, Job] = field(default_factory=dict)
    max_concurrency: int = 0
    stream_id: int | None = None
    attached: bool = False
    exited: bool = False
    fresh: bool = False
    draining: bool = False
    blocked: bool = False
    blocked_until: int = 0
    refusals: int = 0
    strangers: int = 0
    places: dict[str, str] = field(default_factory=dict)
    ended: dict[str, CancelReason] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of the jobs that it offers."""
        return tuple(self.offers)

    def open_for(self, job: Job, now: int) -> bool:
        """Whether an attempt of `job` may be handed to this client now (the claim gate)."""
        if self.stream_id is None or not self.fresh or self.draining or self.blocked:
            return False
        quiet_for = now - self.kept_alive_at
        awake = quiet_for < self.ttl_ms // limits.KEEP_ALIVE_SHARE + limits.KEEP_ALIVE_SLACK
        return awake and self.fits(job.lease_ms, job.heartbeat_ms)

    def fits(self, lease_ms: int, heartbeat_ms: int) -> bool:
        """Whether the client's trust always ends before such a lease does (S15)."""
        return self.ttl_ms + heartbeat_ms + limits.lease_margin(lease_ms) <= lease_ms

    def block(self, now: int) -> None:
        """It left an attempt unaccepted: no more for a time, twice as long each time in a row."""
        self.blocked = True
        self.blocked_until = now + (self.ttl_ms << min(self.refusals, limits.REFUSALS_DOUBLED))
        self.refusals += 1

    def unblock(self) -> None:
        """It accepts what it is sent."""
        self.blocked = False
        self.refusals = 0

    @property
    def room(self) -> int:
        """How many more attempts it can run."""
        return self.max_concurrency - len(self.places) - self.strangers


class Sessions:
    """Every session of this sidecar, and who has which place."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._by_job: dict[str, dict[str, Session]] = {}
        self._taken: Counter[str] = Counter()
        self._place_of: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session | None:
        """The session, if it lives."""
        return self._sessions.get(session_id)

    def put(self, session: Session) -> None:
        """Takes in a session with the jobs it offers, as the newest that has them."""
        self._sessions[session.session_id] = session
        for job in session.jobs:
            self._by_job.setdefault(job, {})[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forgets a session and the places in it."""
        for token in tuple(session.places):
            self.leave(token)
        self.remove_jobs(session)
        del self._sessions[session.session_id]

    def remove_jobs(self, session: Session) -> None:
        """Forgets which jobs the session offers."""
        for job in session.jobs:
            holders = self._by_job[job]
            del holders[session.session_id]
            if not holders:
                del self._by_job[job]

    def offers(self, job: str) -> bool:
        """Whether any session has the job."""
        return job in self._by_job

    def newest_offers(self, jobs: Iterable[str]) -> tuple[Job, ...]:
        """Those of the jobs that any session has, each as its newest Subscribe has it (S28)."""
        holders = ((job, self._by_job[job]) for job in dict.fromkeys(jobs) if job in self._by_job)
        return tuple(next(reversed(each.values())).offers[job] for job, each in holders)

    def has_job(self, session: Session, job: str) -> bool:
        """Whether this session has the job."""
        return session.session_id in self._by_job.get(job, ())

    def take(self, job: Job, token: str, now: int) -> Session | None:
        """Takes a place for `token` in the session with most room; None: there is none."""
        best = self._roomiest(job, now)
        if best is not None:
            self.enter(best, token, job.name)
        return best

    def has_room(self, job: Job, now: int) -> bool:
        """Whether `take` would find a place."""
        return self._roomiest(job, now) is not None

    def _roomiest(self, job: Job, now: int) -> Session | None:
        if job.spec.concurrency and self._taken[job.name] >= job.spec.concurrency:
            return None
        best: Session | None = None
        for session in self._by_job.get(job.name, {}).values():
            better = best is None or session.room > best.room
            if better and session.room > 0 and session.open_for(job, now):
                best = session
        return best

    def enter(self, session: Session, token: str, job: str) -> None:
        """Gives `token` a place in this session, whatever its room (an adoption)."""
        assert token not in self._place_of, "a token has one place"
        session.places[token] = job
        self._place_of[token] = session
        self._taken[job] += 1

    def leave(self, token: str) -> None:
        """Gives the token's place back, if it has one."""
        session = self._place_of.pop(token, None)
        if session is not None:
            job = session.places.pop(token)
            session.ended.pop(token, None)
            self._taken[job] -= 1
            if not self._taken[job]:
                del self._taken[job]

    def place_of(self, token: str) -> Session | None:
        """The session in which the token has its place."""
        return self._place_of.get(token)
