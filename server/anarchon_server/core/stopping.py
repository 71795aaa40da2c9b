"""The order in which an instance stops (S23): stop claiming, go on renewing, cancel after the
grace, hand over what surely stopped, only then leave. Imports the core's leaves and `holding`.
"""

from __future__ import annotations

from collections.abc import Callable

from anarchon_server.core.context import Context
from anarchon_server.core.holding import Holding
from anarchon_server.core.lanes import Lane
from anarchon_server.core.messages import Draining, Level, Method, Stopped
from anarchon_server.core.model import CancelReason, Instance
from anarchon_server.core.store import Beat


class Stopping:
    """The stop of one instance; `done` once `Stopped` was said."""

    def __init__(
        self, context: Context, holding: Holding, instance: Callable[[], Instance]
    ) -> None:
        self._context = context
        self._holding = holding
        self._instance = instance
        self._hurried = False
        self._over = False
        self._leaving = False
        self.done = False

    def stop(self) -> None:
        """The first stop begins the grace; a second one skips it."""
        context = self._context
        if not context.stopping:
            context.stopping = True
            grace = context.settings.stop_grace_ms
            context.log(Level.INFO, "stopping", running=self._holding.running)
            for session in context.sessions:
                context.send(session, Draining(grace))
            self._holding.give_back_waiting()
            for hold in self._holding:
                own = min(hold.stop_grace_ms, grace)
                context.timers.set(("stop", hold.token), context.now + own)
            self._end_at(context.now + grace)
        elif not self._hurried:
            self._hurried = True
            for hold in self._holding:
                context.timers.set(("stop", hold.token), context.now)
            self._end_at(context.now)

    def _end_at(self, graces_over_at: int) -> None:
        longest = max((h.cancel_grace_ms for h in self._holding), default=0)
        self._context.timers.set(("stop_end",), graces_over_at + longest)

    def grace_over(self, token: str) -> None:
        """The handler has had its time: it is asked to stop, if it was not before."""
        hold = self._holding.held(token)
        assert hold is not None, "what is not held has no timer"
        if not hold.finished and hold.cancel is None:
            self._holding.cancel(hold, CancelReason.SHUTDOWN)

    def end(self) -> None:
        """Whoever has not stopped by now is left to its lease."""
        self._over = True
        self._holding.leave_all_to_leases()

    def pump(self) -> None:
        """Leaves once nothing is held and nothing is on its way."""
        context = self._context
        if not context.stopping or self._leaving or not context.lanes.free(Lane.BEAT, context.now):
            return
        quiet = self._holding.settled_down and context.lanes.idle
        if not (quiet or self._over):
            return
        self._leaving = True
        context.out.append(
            context.lanes.call(
                Lane.BEAT,
                Method.BEAT,
                (Beat(self._instance(), leaving=True),),
                context.now,
                lambda *_: self._stopped(),
                lambda _: self._stopped(),
            )
        )

    def _stopped(self) -> None:
        self.done = True
        self._context.log(Level.INFO, "stopped")
        self._context.out.append(Stopped())
