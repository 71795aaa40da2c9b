"""Named timers for the engine: which moments it waits for. Pure; imports nothing of ours."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

Key = tuple[Any, ...]
"""A kind of timer, and what it is about."""


_STALE_ALLOWED = 64


class Timers:
    """At most one moment per key, in whole milliseconds; the earliest comes first.

    A moved or cleared timer leaves a stale heap entry behind, which is dropped when it
    surfaces, or when the heap is made anew because most of it is stale: every operation costs
    O(log n) on average, and the heap stays in proportion to the timers.
    """

    def __init__(self) -> None:
        self._at: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._count = 0

    def set(self, key: Key, at: int) -> None:
        """Sets or moves the timer."""
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._at) + _STALE_ALLOWED:
            self._heap = [(at, n, key) for n, (key, at) in enumerate(self._at.items())]
            heapq.heapify(self._heap)
            self._count = len(self._heap)

    def bring_forward(self, key: Key, at: int) -> None:
        """Sets the timer, or moves one that would come later."""
        if self._at.get(key, at) >= at:
            self.set(key, at)

    def clear(self, key: Key) -> None:
        """Forgets the timer, if there is one."""
        self._at.pop(key, None)

    def pop_due(self, now: int) -> Iterator[Key]:
        """Takes out every timer whose moment has come, earliest first."""
        while self._settle() and self._heap[0][0] <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            yield key

    @property
    def next_at(self) -> int | None:
        """The earliest moment waited for; None: there is none."""
        return self._heap[0][0] if self._settle() else None

    def _settle(self) -> bool:
        """Drops stale entries from the top; whether a live one is there."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return bool(self._heap)
