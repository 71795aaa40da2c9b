"""Calls to the store: at most one in flight per lane, so that what is pending meanwhile goes
as one batch when it has ended (S14); failures are paused and repeated (S27). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from anarchon_server.core import limits
from anarchon_server.core.messages import CallStore, Command, Method
from anarchon_server.core.policy import Draw
from anarchon_server.core.store import Reply
from anarchon_server.core.timers import Timers


class Lane(StrEnum):
    """What is batched together."""

    CLAIM = "claim"
    BEAT = "beat"
    COMPLETE = "complete"
    RELEASE = "release"
    SETTLE = "settle"
    REGISTER = "register"
    PRUNE = "prune"
    INSTANCES = "instances"
    JOBS = "jobs"


@dataclass(frozen=True, slots=True)
class Call:
    """A call in flight. `sent_at` is when the engine decided on it: never later than sent."""

    lane: Lane
    method: Method
    sent_at: int
    on_reply: Callable[[Call, Reply[Any]], None]
    on_failure: Callable[[bool], None]


@dataclass(slots=True)
class _LaneState:
    busy: bool = False
    failures: int = 0
    resume_at: int = 0


@dataclass
class Lanes:
    """The lanes of one engine. A timer `("lane", lane)` ends each pause after a failure."""

    timers: Timers
    draw: Draw
    _states: dict[Lane, _LaneState] = field(default_factory=lambda: {a: _LaneState() for a in Lane})
    _calls: dict[int, Call] = field(default_factory=dict)
    _count: int = 0

    def free(self, lane: Lane, now: int) -> bool:
        """Whether a call may go now: none is in flight and no pause is on."""
        state = self._states[lane]
        return not state.busy and state.resume_at <= now

    def call(
        self,
        lane: Lane,
        method: Method,
        arguments: tuple[Any, ...],
        now: int,
        on_reply: Callable[[Call, Reply[Any]], None],
        on_failure: Callable[[bool], None],
        timeout_ms: int = limits.OP_TIMEOUT,
    ) -> Command:
        """The command for a call; `on_failure` is told whether it may have been done."""
        assert self.free(lane, now), f"two calls in lane {lane}"
        self._states[lane].busy = True
        self._count += 1
        self._calls[self._count] = Call(lane, method, now, on_reply, on_failure)
        return CallStore(self._count, method, arguments, timeout_ms)

    def replied(self, call_id: int) -> Call:
        """Ends a call that was answered."""
        call = self._calls.pop(call_id)
        self._states[call.lane] = _LaneState()
        return call

    def failed(self, call_id: int, now: int) -> Call:
        """Ends a call that failed, and pauses its lane: 50 ms to 1 s, half of it by chance."""
        call = self._calls.pop(call_id)
        state = self._states[call.lane]
        state.busy = False
        pause = min(limits.RETRY_MAX, limits.RETRY_FIRST << min(state.failures, 10))
        state.failures += 1
        state.resume_at = now + pause // 2 + self.draw(pause // 2)
        self.timers.set(("lane", call.lane), state.resume_at)
        return call

    @property
    def idle(self) -> bool:
        """Whether no call is in flight in any lane."""
        return not self._calls
