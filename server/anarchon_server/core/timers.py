"""Named timers for the engine: which moments it waits for. Pure; imports nothing of ours."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

Key = tuple[Any, ...]
"""A kind of timer, and what it is about."""


class Timers:
    """At most one moment per key, in whole milliseconds; the earliest comes first.

    A moved or cleared timer leaves a stale heap entry behind, which is dropped when it
    surfaces, so that every operation costs O(log n).
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
