"""Calls to the store: one in flight a lane, pauses after failures (S14, S27)."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon_server.core.lanes import Lane, Lanes
from anarchon_server.core.messages import CallStore, Method
from anarchon_server.core.store import Reply
from anarchon_server.core.timers import Timers


def nothing(*_: Any) -> None:
    """Nobody listens."""


def lanes_with(draw: int | None = 0) -> Lanes:
    """Lanes whose chance is always `draw` (None: the most)."""
    return Lanes(Timers(), lambda most: most if draw is None else draw)


def call(lanes: Lanes, now: int, lane: Lane = Lane.CLAIM) -> CallStore:
    command = lanes.call(lane, Method.CLAIM, ((),), now, nothing, nothing)
    assert isinstance(command, CallStore)
    return command


def test_s14_a_lane_has_one_call_in_flight_and_lanes_do_not_wait_for_each_other() -> None:
    lanes = lanes_with()
    first = call(lanes, 5)
    assert not lanes.free(Lane.CLAIM, 5)
    assert lanes.free(Lane.BEAT, 5)
    other = call(lanes, 5, Lane.BEAT)
    assert first.call_id != other.call_id
    lanes.replied(first.call_id)
    assert lanes.free(Lane.CLAIM, 5)
    waiting = lanes.idle
    lanes.replied(other.call_id)
    assert (waiting, lanes.idle) == (False, True)


def test_s14_two_calls_in_one_lane_are_a_mistake_of_ours() -> None:
    lanes = lanes_with()
    call(lanes, 5)
    with pytest.raises(AssertionError, match="two calls in lane claim"):
        call(lanes, 6)


def test_s15_a_call_remembers_when_it_was_decided_on_and_who_waits() -> None:
    lanes = lanes_with()
    heard: list[Any] = []
    command = lanes.call(
        Lane.BEAT, Method.BEAT, ("beat",), 7, lambda c, r: heard.append((c.sent_at, r)), nothing
    )
    assert isinstance(command, CallStore)
    assert (command.method, command.arguments) == (Method.BEAT, ("beat",))
    answered = lanes.replied(command.call_id)
    reply: Reply[Any] = Reply(1, ())
    answered.on_reply(answered, reply)
    assert heard == [(7, reply)]


def pauses(lanes: Lanes, count: int) -> list[int]:
    """How long the lane pauses after each of `count` failures in a row."""
    now, found = 0, []
    for _ in range(count):
        lanes.failed(call(lanes, now).call_id, now)
        resume_at = lanes.timers.next_at
        assert resume_at is not None
        assert not lanes.free(Lane.CLAIM, resume_at - 1)
        assert lanes.free(Lane.CLAIM, resume_at)
        assert list(lanes.timers.pop_due(resume_at)) == [("lane", Lane.CLAIM)]
        found.append(resume_at - now)
        now = resume_at
    return found


def test_s27_a_failing_lane_pauses_50_ms_to_1_s_half_of_it_by_chance() -> None:
    assert pauses(lanes_with(0), 7) == [25, 50, 100, 200, 400, 500, 500]
    assert pauses(lanes_with(None), 7) == [50, 100, 200, 400, 800, 1_000, 1_000]


def test_s27_an_answer_ends_the_pauses() -> None:
    lanes = lanes_with(0)
    assert pauses(lanes, 5)[-1] == 400
    lanes.replied(call(lanes, 100_000).call_id)
    lanes.failed(call(lanes, 100_000).call_id, 100_000)
    assert lanes.timers.next_at == 100_025


def test_s27_after_a_thousand_failures_the_pause_is_still_a_second() -> None:
    assert pauses(lanes_with(None), 1_000)[-1] == 1_000
