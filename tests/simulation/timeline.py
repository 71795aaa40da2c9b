"""Virtual time: a queue of what is to happen, and clocks that read it each in its own way."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EPOCH_MS = 1_800_000_000_000
"""What a right wall clock shows when a simulation begins."""

Action = Callable[[], None]


class Timeline:
    """True time in whole milliseconds from 0. Actions of one moment happen in the order in which
    they were planned.
    """

    def __init__(self) -> None:
        self.now = 0
        self._queue: list[tuple[int, int, Action]] = []
        self._count = 0

    def at(self, moment: int, action: Action) -> None:
        """Plans an action; one for a moment that is past happens now."""
        self._count += 1
        heapq.heappush(self._queue, (max(moment, self.now), self._count, action))

    def after(self, delay_ms: int, action: Action) -> None:
        """Plans an action for `delay_ms` from now."""
        self.at(self.now + delay_ms, action)

    def run_until(self, end: int) -> None:
        """Lets everything happen that is planned before `end`."""
        while self._queue and self._queue[0][0] < end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end


class SimClock:
    """A machine's clocks: a wall clock that may be wrong and may be set, and one since its boot."""

    def __init__(self, timeline: Timeline, booted_at: int = 0, wrong_by_ms: int = 0) -> None:
        self._timeline = timeline
        self.booted_at = booted_at
        self.boots = 0
        self.wrong_by_ms = wrong_by_ms
        self.settings: list[tuple[int, int]] = [(0, wrong_by_ms)]
        """Since when the wall clock was wrong by how much."""

    def wall_ms(self) -> int:
        """What the wall clock shows."""
        return EPOCH_MS + self._timeline.now + self.wrong_by_ms

    def wall_us(self) -> int:
        """What the wall clock shows, in microseconds."""
        return self.wall_ms() * 1_000

    def boot_ms(self) -> int:
        """Time since the boot."""
        return self._timeline.now - self.booted_at

    @property
    def boot_id(self) -> str:
        """Which boot that is."""
        return f"boot-{self.boots}"

    def set_wall(self, wrong_by_ms: int) -> None:
        """Sets the wall clock."""
        self.wrong_by_ms = wrong_by_ms
        self.settings.append((self._timeline.now, wrong_by_ms))

    def reboot(self) -> None:
        """A new boot begins."""
        self.boots += 1
        self.booted_at = self._timeline.now

    def showing_since(self, wall_ms: int) -> int | None:
        """Since when the wall clock has shown `wall_ms` or more without a break; None: it does not."""
        since: int | None = None
        for place, (start, wrong_by_ms) in enumerate(self.settings):
            last = place + 1 == len(self.settings)
            end = self._timeline.now + 1 if last else self.settings[place + 1][0]
            crosses_at = wall_ms - EPOCH_MS - wrong_by_ms
            if crosses_at >= end:
                since = None
            elif crosses_at > start or since is None:
                since = max(start, crosses_at)
        return since

    def first_showed(self, wall_ms: int, since: int = 0) -> int:
        """The first true time from `since` on at which the wall clock showed `wall_ms` or more."""
        for place, (start, wrong_by_ms) in enumerate(self.settings):
            last = place + 1 == len(self.settings)
            end = None if last else self.settings[place + 1][0]
            moment = max(start, since, wall_ms - EPOCH_MS - wrong_by_ms)
            if end is None or moment < end:
                return moment
        raise AssertionError("the last setting holds for ever")
