"""Places: which client may be given an attempt, and which has it (S13, S15, S21a)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.model import CancelReason
from anarchon_server.core.policy import Job, resolve
from anarchon_server.core.sessions import Session, Sessions
from anarchon_server.core.store import Capabilities
from tests.unit.server.core.driver import START, every


def job(name: str = "sync", **policies: Any) -> Job:
    return resolve(every(name=name, **policies), Capabilities("memory"), 30_000, START)


def session(name: str = "s", *jobs: str, room: int = 2, **state: Any) -> Session:
    """A session that is open for its jobs, unless told otherwise."""
    values: dict[str, Any] = {
        "ttl_ms": 15_000,
        "offered_ms": 15_000,
        "kept_alive_at": 0,
        "offers": {name: job(name) for name in jobs or ("sync",)},
        "max_concurrency": room,
        "stream_id": 1,
        "fresh": True,
        **state,
    }
    return Session(name, **values)


def sessions(*all_of_them: Session) -> Sessions:
    known = Sessions()
    for each in all_of_them:
        known.put(each)
    return known


def test_s13_a_place_is_taken_until_it_is_left() -> None:
    one = session(room=1)
    known = sessions(one)
    assert known.take(job(), "t1", 0) is one
    assert (one.room, known.place_of("t1")) == (0, one)
    assert known.take(job(), "t2", 0) is None
    known.leave("t1")
    assert (one.room, known.place_of("t1")) == (1, None)
    assert known.take(job(), "t2", 0) is one


def test_s13_the_session_with_most_room_is_given_the_run() -> None:
    small, large = session("small", room=1), session("large", room=3)
    known = sessions(small, large)
    taken = [known.take(job(), f"t{n}", 0) for n in range(5)]
    assert taken == [large, large, small, large, None]


def test_s13_a_jobs_concurrency_counts_over_all_sessions() -> None:
    known = sessions(session("a"), session("b"))
    limited, other = job(concurrency=2), job("other")
    known.put(session("c", "other"))
    assert known.take(limited, "t1", 0) is not None
    assert known.take(limited, "t2", 0) is not None
    assert known.take(limited, "t3", 0) is None
    assert known.take(other, "t4", 0) is not None
    known.leave("t1")
    assert known.take(limited, "t5", 0) is not None


@pytest.mark.parametrize(
    "state",
    [
        {"stream_id": None},
        {"fresh": False},
        {"draining": True},
        {"blocked": True},
    ],
    ids=lambda state: next(iter(state)),
)
def test_s13_a_session_that_cannot_be_reached_or_does_not_want_is_given_nothing(
    state: dict[str, Any],
) -> None:
    assert sessions(session(**state)).take(job(), "t", 0) is None
    assert sessions(session()).take(job(), "t", 0) is not None


def test_s25_a_client_that_is_overdue_by_a_second_is_given_nothing() -> None:
    known = sessions(session())
    assert known.take(job(), "t1", 5_999) is not None
    assert known.take(job(), "t2", 6_000) is None


def test_s15_a_client_that_trusts_for_longer_than_the_lease_allows_is_given_nothing() -> None:
    # 15 s of the session, a third of the lease for the heartbeat, a sixth for the margin
    assert sessions(session()).take(job(heartbeat_ms=10_000), "t", 0) is not None
    assert sessions(session(ttl_ms=15_001)).take(job(heartbeat_ms=10_000), "t", 0) is None


def test_s13_only_sessions_that_have_the_job_are_given_it() -> None:
    one = session("s", "a", "b")
    known = sessions(one)
    assert known.take(job("c"), "t", 0) is None
    assert known.take(job("b"), "t", 0) is one
    assert [known.offers(name) for name in ("a", "b", "c")] == [True, True, False]
    assert [known.has_job(one, name) for name in ("a", "c")] == [True, False]


def test_s28_a_session_that_comes_again_may_offer_other_jobs() -> None:
    one, other = session("one", "a", "b"), session("other", "a")
    known = sessions(one, other)
    known.remove_jobs(one)
    one.offers = {"c": job("c")}
    known.put(one)
    assert [known.offers(name) for name in ("a", "b", "c")] == [True, False, True]
    assert known.has_job(other, "a")
    assert not known.has_job(one, "a")


def test_a_session_that_ends_takes_its_places_and_jobs_with_it() -> None:
    one, other = session("one"), session("other")
    known = sessions(one, other)
    taken = [known.take(job(concurrency=4), f"t{n}", 0) for n in range(4)]
    assert taken.count(one) == 2
    known.remove(one)
    assert [s.session_id for s in known] == ["other"]
    assert len(known) == 1
    assert known.get("one") is None
    assert known.get("other") is other
    assert sum(known.place_of(f"t{n}") is not None for n in range(4)) == 2
    known.remove(other)
    assert not known.offers("sync")
    known.put(session("third", room=9))
    fresh = [known.take(job(concurrency=4), f"n{n}", 0) for n in range(5)]
    assert fresh.count(None) == 1, "the places of the ended sessions count no more"


def test_s26_an_adopted_attempt_has_a_place_whatever_the_room() -> None:
    one = session(room=1)
    known = sessions(one)
    for token in ("t1", "t2"):
        known.enter(one, token, "sync")
    assert one.room == -1
    assert known.take(job(), "t3", 0) is None
    with pytest.raises(AssertionError, match="one place"):
        known.enter(one, "t1", "sync")


def test_s19_a_client_that_accepts_nothing_is_blocked_for_twice_as_long_each_time() -> None:
    one = session()
    known = sessions(one)
    ends = []
    for _ in range(3):
        one.block(1_000)
        ends.append(one.blocked_until - 1_000)
        assert known.take(job(), "t", 0) is None
    assert ends == [15_000, 30_000, 60_000]
    one.unblock()
    assert known.take(job(), "t", 0) is one
    one.block(1_000)
    assert one.blocked_until == 16_000, "an accepted attempt begins the count anew"
    for _ in range(100):
        one.block(0)
    assert one.blocked_until == 15_000 << 10


def test_s13_what_a_client_runs_besides_takes_room() -> None:
    one = session(room=2, strangers=1)
    known = sessions(one)
    assert known.take(job(), "t1", 0) is one
    assert known.take(job(), "t2", 0) is None


def test_s21a_a_place_that_is_left_forgets_why_it_ended_and_may_be_left_twice() -> None:
    one = session()
    known = sessions(one)
    known.enter(one, "t", "sync")
    one.ended["t"] = CancelReason.TIMEOUT
    known.leave("t")
    known.leave("t")
    assert (one.ended, one.places) == ({}, {})
