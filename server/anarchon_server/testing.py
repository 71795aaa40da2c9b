"""Virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualTimer:
    """A call that is to come in virtual time."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Make it not come."""
        self._callback = None

    def fire(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._callback is not None:
            self._callback()


class VirtualClock:
    """A `Clock` that stands still until it is moved. `wall_at` is where it begins, in milliseconds.

    Boot time and the host's clock move together; `step_wall` sets the latter apart.
    """

    def __init__(self, wall_at: int) -> None:
        self._boot_ms = 1_000_000
        self._wall_minus_boot_us = (wall_at - self._boot_ms) * 1_000
        self._timers: list[tuple[int, int, VirtualTimer]] = []
        self._numbers = itertools.count()

    def wall_us(self) -> int:
        """Return the host's clock in microseconds since the epoch."""
        return self._boot_ms * 1_000 + self._wall_minus_boot_us

    def boot_ms(self) -> int:
        """Return milliseconds since the virtual machine started."""
        return self._boot_ms

    @property
    def boot_id(self) -> str:
        """The one boot there is."""
        return "virtual"

    def step_wall(self, by_ms: int) -> None:
        """Set the host's clock forward or back."""
        self._wall_minus_boot_us += by_ms * 1_000

    def call_at(self, boot_at: int, callback: Callable[[], None]) -> VirtualTimer:
        """Call `callback` when time has been moved to `boot_at`."""
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (boot_at, next(self._numbers), timer))
        return timer

    @property
    def next_at(self) -> int | None:
        """When the next timer is due; None: there is none."""
        while self._timers and self._timers[0][2]._callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def move_to(self, boot_at: int) -> None:
        """Move time on, past no timer, and fire those that are due."""
        self._boot_ms = max(self._boot_ms, boot_at)
        while (due_at := self.next_at) is not None and due_at <= self._boot_ms:
            heapq.heappop(self._timers)[2].fire()
