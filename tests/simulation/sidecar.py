"""One sidecar process: the real engine, its shell played by the simulation."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anarchon_server.core import messages as m
from anarchon_server.core.engine import Engine
from anarchon_server.core.errors import AnarchonError
from anarchon_server.core.model import JobSpec
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import Reply
from tests.checker.events import InstanceDied
from tests.checker.inside import timers_of_nothing
from tests.simulation.storage import Link, Weather
from tests.simulation.timeline import Action

if TYPE_CHECKING:
    from tests.simulation.client import SimClient
    from tests.simulation.host import Host

PAUSE_NOTICED_MS = 1_000
"""A longer time without a step is told to the engine, as the shell's detector does."""

Answered = Callable[[m.KeepAliveAnswer | m.CompleteAnswer | m.Closed], None]
Refused = Callable[[AnarchonError | None], None]
"""Told the error of a request; None: there was no answer."""


class Sidecar:
    """A process with one engine. It is up, frozen or dead; a dead one never comes back."""

    def __init__(self, host: Host, incarnation: str, rng: random.Random) -> None:
        plan = host.world.plan
        self.host = host
        self.incarnation = incarnation
        self.dead = False
        self.unreachable = False
        self.stopping = False
        self.frozen_at: int | None = None
        self.registered: dict[str, str] = {}
        self._specs: dict[str, JobSpec] = {}
        self.log: list[tuple[int, m.Log]] = []
        self._timeline = host.world.timeline
        self._rng = rng
        self._queue: deque[Action] = deque()
        self._streams: dict[int, SimClient] = {}
        self._requests: dict[int, tuple[SimClient, Answered, Refused]] = {}
        self._watched: set[str] = set()
        self._ticks: set[int] = set()
        self._calls: dict[int, m.CallStore] = {}
        self.link = Link(
            host.world.storage,
            self._timeline,
            rng,
            plan.hop_ms,
            incarnation,
            plan.op_timeout_ms,
            plan.late_max_ms,
            lambda call_id, reply: self._do(lambda: self._store_replied(call_id, reply)),
            lambda call_id, unknown: self._do(lambda: self._store_failed(call_id, unknown)),
        )
        settings = Settings(
            host.name,
            incarnation,
            lease_ms=min(job.lease_ms for job in plan.jobs),
            stop_grace_ms=plan.stop_grace_ms,
            history_ms=plan.history_ms,
            history_max=plan.history_max,
            prune_every_ms=plan.prune_every_ms,
        )
        self.engine = Engine(
            settings,
            self.link.store.capabilities,
            draw=lambda n: rng.randint(0, n),
            new_nonce=lambda: f"{rng.getrandbits(128):032x}",
        )
        self.feed(m.Tick())

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return not self.dead and self.frozen_at is None

    @property
    def weather(self) -> Weather:
        """What goes wrong on the way to the store."""
        return self.link.weather

    # ── Life ────────────────────────────────────────────────────────────────────────────────────

    def die(self) -> None:
        """The process is gone: streams and requests break, nothing is said to the store."""
        if self.dead:
            return
        self.dead = self.unreachable = True
        self.host.world.record(InstanceDied(self._timeline.now, self.incarnation))
        self._queue.clear()
        self.lose_clients()

    def lose_clients(self) -> None:
        """Nobody reaches it any more, and it reaches nobody."""
        for stream_id, client in self._streams.items():
            client.app.comes(partial(client.stream_ended, stream_id, None))
        for client, _, refused in self._requests.values():
            client.app.comes(partial(refused, None))
        self._streams.clear()
        self._requests.clear()

    def freeze(self) -> None:
        """The process is stopped; what comes for it waits."""
        self.frozen_at = self._timeline.now

    def thaw(self) -> None:
        """It goes on: first it learns that it was stopped, if that shows."""
        if self.dead or self.frozen_at is None:
            return
        gap_ms = self._timeline.now - self.frozen_at
        self.frozen_at = None
        if gap_ms > PAUSE_NOTICED_MS:
            self._step(m.Suspended(gap_ms))
        while self._queue and self.up:
            self._queue.popleft()()

    def stop(self) -> None:
        """A polite stop; a second one skips the grace."""
        self.stopping = True
        self.feed(m.Stop())

    # ── What comes in ───────────────────────────────────────────────────────────────────────────

    def feed(self, event: m.Input) -> None:
        """Gives the engine an input, now or when it thaws."""
        self._do(lambda: self._step(event))

    def subscribe(self, client: SimClient, event: m.Subscribe) -> None:
        """A client opened a stream."""

        def opened() -> None:
            self._streams[event.stream_id] = client
            for spec in client.specs:
                if self._specs.get(spec.name) != spec:
                    self.registered.pop(spec.name, None)
                self._specs[spec.name] = spec
            self._step(event)

        self._do(opened)

    def ask(self, client: SimClient, event: m.Input, answered: Answered, refused: Refused) -> None:
        """A unary request."""
        request_id = getattr(event, "request_id")  # noqa: B009 - every request has one
        self._requests[request_id] = (client, answered, refused)
        self.feed(event)

    def app_exited(self, session_ids: tuple[str, ...], *, seen: bool) -> None:
        """A client's process is gone: its streams break, and its end may be seen."""
        for stream_id, client in list(self._streams.items()):
            if client.session_id in session_ids:
                del self._streams[stream_id]
                self.feed(m.StreamEnded(client.session_id, stream_id))
        for session_id in session_ids:
            if seen and session_id in self._watched:
                self.feed(m.ClientExited(session_id))

    def leave_stream(self, client: SimClient, stream_id: int) -> None:
        """A client ends one of its streams."""
        if self._streams.pop(stream_id, None) is not None:
            self.feed(m.StreamEnded(client.session_id, stream_id))

    def break_stream(self, client: SimClient) -> None:
        """A client's stream is reset: both ends learn of it."""
        for stream_id, owner in list(self._streams.items()):
            if owner is client:
                del self._streams[stream_id]
                client.app.comes(partial(client.stream_ended, stream_id, None))
                self.feed(m.StreamEnded(client.session_id, stream_id))

    def woken(self) -> None:
        """The store notified that a run was freed."""
        self.feed(m.Woken())

    def _do(self, action: Action) -> None:
        if self.dead:
            return
        if self.frozen_at is not None:
            self._queue.append(action)
        else:
            action()

    def _store_replied(self, call_id: int, reply: Reply[Any]) -> None:
        call = self._calls.pop(call_id)
        wall_at = self.host.clock.wall_ms()
        if call.method is m.Method.REGISTER:
            _, definitions, let_go = call.arguments
            self.registered |= {d.job: d.schedule_id for d in definitions}
            for job in let_go:
                self.registered.pop(job, None)
        self._step(m.StoreReplied(call_id, reply, wall_at))

    def _store_failed(self, call_id: int, unknown: bool) -> None:
        del self._calls[call_id]
        self._step(m.StoreFailed(call_id, "simulated", unknown))

    # ── Steps ───────────────────────────────────────────────────────────────────────────────────

    def _step(self, event: m.Input) -> None:
        commands = self.engine.step(self.host.clock.boot_ms(), event)
        assert not timers_of_nothing(self.engine)
        for command in commands:
            self._carry_out(command)
        self._plan_tick()
        self.host.look()

    def _plan_tick(self) -> None:
        wake_at = self.engine.wake_at
        if wake_at is None or self.dead:
            return
        moment = max(wake_at + self.host.clock.booted_at, self._timeline.now)
        if not self._ticks or moment < min(self._ticks):
            self._ticks.add(moment)
            self._timeline.at(moment, lambda: self._ticked(moment))

    def _ticked(self, moment: int) -> None:
        self._ticks.discard(moment)

        def wake() -> None:
            wake_at = self.engine.wake_at
            if wake_at is not None and wake_at <= self.host.clock.boot_ms():
                self._step(m.Tick())
            else:
                self._plan_tick()

        self._do(wake)

    def _carry_out(self, command: m.Command) -> None:
        match command:
            case m.CallStore():
                self._calls[command.call_id] = command
                self.link.call(command)
            case m.Send():
                self._send(command.stream_id, command.event)
            case m.EndStream():
                self._end_stream(command)
            case m.Answer():
                self._answer(command)
            case m.WatchClient():
                self._watched.add(command.session_id)
            case m.UnwatchClient():
                self._watched.discard(command.session_id)
            case m.Log():
                self.log.append((self._timeline.now, command))
                if command.event == "run_not_accepted":
                    self.host.disturb(self.host.world.longest_lease_ms * 2)
            case m.Stopped():
                self._timeline.after(0, lambda: self.host.sidecar_stopped(self))

    def _send(
        self, stream_id: int, event: m.Attached | m.Assigned | m.Cancelled | m.Draining
    ) -> None:
        client = self._streams.get(stream_id)
        if client is None:
            return
        client.app.comes(lambda: client.event_came(stream_id, event))

    def _end_stream(self, command: m.EndStream) -> None:
        client = self._streams.pop(command.stream_id, None)
        if client is not None:
            error = command.error
            client.app.comes(lambda: client.stream_ended(command.stream_id, error))

    def _answer(self, command: m.Answer) -> None:
        asked = self._requests.pop(command.request_id, None)
        if asked is None or asked[0].app.answers_are_lost:
            return
        client, answered, refused = asked
        answer = command.answer
        if isinstance(answer, AnarchonError):
            client.app.comes(lambda: refused(answer))
        else:
            client.app.comes(lambda: answered(answer))
