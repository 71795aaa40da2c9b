"""Named timers: at most one moment a key, the earliest first (S3)."""

from __future__ import annotations

from anarchon_server.core.timers import Timers


def test_s3_timers_fire_once_earliest_first_and_not_before_their_time() -> None:
    timers = Timers()
    timers.set(("late",), 30)
    timers.set(("early",), 10)
    timers.set(("middle",), 20)
    assert timers.next_at == 10
    assert list(timers.pop_due(9)) == []
    assert list(timers.pop_due(20)) == [("early",), ("middle",)]
    assert list(timers.pop_due(20)) == []
    assert timers.next_at == 30


def test_timers_of_one_moment_fire_in_the_order_in_which_they_were_set() -> None:
    timers = Timers()
    for name in ("b", "a", "c"):
        timers.set((name,), 10)
    assert list(timers.pop_due(10)) == [("b",), ("a",), ("c",)]


def test_a_timer_is_brought_forward_and_never_put_off() -> None:
    timers = Timers()
    for at in (30, 20, 25):
        timers.bring_forward(("beat",), at)
    assert list(timers.pop_due(19)) == []
    assert list(timers.pop_due(20)) == [("beat",)]
    assert timers.next_at is None


def test_timers_that_were_cleared_do_not_pile_up() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.set(("timeout", number), 86_400_000 + number)
        timers.clear(("timeout", number))
    timers.set(("kept",), 50)
    assert len(timers._heap) < 100
    assert list(timers.pop_due(90_000_000)) == [("kept",)]


def test_a_moved_timer_fires_at_its_new_time_only() -> None:
    timers = Timers()
    timers.set(("slot", "sync"), 10)
    timers.set(("slot", "sync"), 50)
    timers.set(("slot", "sync"), 50)
    assert timers.next_at == 50
    assert list(timers.pop_due(49)) == []
    timers.set(("slot", "sync"), 20)
    assert timers.next_at == 20
    assert list(timers.pop_due(60)) == [("slot", "sync")]
    assert timers.next_at is None


def test_a_timer_moved_there_and_back_fires_once() -> None:
    timers = Timers()
    for at in (10, 20, 10):
        timers.set(("x",), at)
    assert list(timers.pop_due(30)) == [("x",)]


def test_a_cleared_timer_never_fires_and_may_be_cleared_again() -> None:
    timers = Timers()
    timers.set(("x",), 10)
    timers.clear(("x",))
    timers.clear(("x",))
    assert timers.next_at is None
    assert list(timers.pop_due(99)) == []


def test_a_timer_set_while_others_fire_joins_them_if_it_is_due() -> None:
    timers = Timers()
    timers.set(("first",), 10)
    fired = []
    for key in timers.pop_due(20):
        fired.append(key)
        if key == ("first",):
            timers.set(("due",), 15)
            timers.set(("later",), 21)
    assert fired == [("first",), ("due",)]
    assert timers.next_at == 21
