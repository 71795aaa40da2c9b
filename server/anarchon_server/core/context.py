"""What the parts of the engine share during a step: the moment, the clocks, the commands.

Imports the core's own leaves only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anarchon_server.core import limits
from anarchon_server.core.lanes import Lanes
from anarchon_server.core.lease import StoreTime
from anarchon_server.core.messages import (
    Assigned,
    Attached,
    Cancelled,
    Command,
    Draining,
    Level,
    Log,
    Send,
)
from anarchon_server.core.policy import Draw, is_name
from anarchon_server.core.sessions import Session, Sessions
from anarchon_server.core.settings import Settings
from anarchon_server.core.store import Capabilities
from anarchon_server.core.timers import Timers


class Context:
    """One engine's shared state. `now` is the moment of the present step, `configured` the jobs of
    the configuration as last loaded, `answered_at` when the store last answered any call.
    """

    def __init__(
        self,
        settings: Settings,
        capabilities: Capabilities,
        draw: Draw,
        new_nonce: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.capabilities = capabilities
        self.draw = draw
        self.new_nonce = new_nonce
        self.now = 0
        self.out: list[Command] = []
        self.timers = Timers()
        self.lanes = Lanes(self.timers, draw)
        self.store_time = StoreTime()
        self.sessions = Sessions()
        self.stopping = False
        self.configured = settings.jobs
        self.clock_offset_ms = 0
        self.quarantined_until = 0
        self.answered_at = -limits.NEVER

    @property
    def store_now(self) -> int:
        """The store's time in this step."""
        return self.store_time.at(self.now)

    @property
    def clock_usable(self) -> bool:
        """Whether the store has answered and the host's clock is near enough to it (S1)."""
        near = abs(self.clock_offset_ms) <= self.settings.max_clock_offset_ms
        return self.store_time.known and near

    def vouched(self, lease_ms: int) -> bool:
        """The second witness of S19: the store's clock was seen to run evenly for a lease."""
        return self.store_time.steady_for(self.now) >= lease_ms

    def takeovers_from(self, lease_ms: int) -> int:
        """From when an expired run may be taken over, as far as the witness goes (S19, S27a)."""
        if self.capabilities.boot_leases:
            return max(self.now, self.quarantined_until)
        wait = lease_ms - self.store_time.steady_for(self.now)
        return max(self.now + max(wait, 0), self.quarantined_until)

    def send(self, session: Session, event: Attached | Assigned | Cancelled | Draining) -> None:
        """Puts an event on the session's stream, if it has one."""
        if session.stream_id is not None:
            self.out.append(Send(session.session_id, session.stream_id, event))

    def log(self, level: Level, event: str, **fields: Any) -> None:
        """One structured log line."""
        self.out.append(Log(level, event, fields))


def new_token(slot: int, nonce: str, job: str) -> str:
    """A token: who knows it may act on the attempt, and any sidecar can read which (S17)."""
    token = f"{slot}.{nonce}.{job}"
    assert len(token) <= limits.TOKEN_MAX_BYTES
    return token


def read_token(token: str) -> tuple[str, int] | None:
    """The (job, slot) in a token; None: it is no token of ours."""
    slot, _, rest = token.partition(".")
    nonce, _, job = rest.partition(".")
    if not (slot.isascii() and slot.isdigit() and len(slot) <= 16 and nonce and is_name(job)):
        return None
    if len(token) > limits.TOKEN_MAX_BYTES:
        return None
    return job, int(slot)
