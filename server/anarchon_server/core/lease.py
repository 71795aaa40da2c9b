"""Until when a claim may be trusted, and what the store's time is: arithmetic only.

Imports `limits` only. All moments are on the sidecar's boot-time clock (milliseconds, only
forward, counts suspend), unless a name says `store`.

Trust (S15, S16) is counted from the moment a request was *sent*, so that no clock is
compared with another and a late reply can only shorten it. The store's time (S1) is the
midpoint estimate of Cristian, "Probabilistic clock synchronization" (1989): of the last
samples the one with the smallest round trip decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from anarchon_server.core import limits


def trust_end(sent_at: int, lease_ms: int) -> int:
    """Until when a lease won or renewed by a request sent at `sent_at` may be believed.

    The store counts the lease from when it handled the request, which is later; the margin
    is what a handler has to obey in (S16).
    """
    return sent_at + lease_ms - limits.lease_margin(lease_ms)


@dataclass(frozen=True, slots=True)
class _Sample:
    offset: int
    """Store's time minus boot time."""
    round_trip: int


class StoreTime:
    """The store's time by the sidecar's clock, and the second witness of S19.

    `margin_ms` is the largest step that does no harm: the margin of the shortest lease in
    use. A quick sample (its round trip at most half the margin) that lies more than half
    the margin from the best quick one proves a step, and no larger step escapes; a slow one
    only proves a step that its round trip cannot explain. After a step the older samples go
    and the watching begins anew.
    """

    def __init__(self) -> None:
        self.margin_ms = limits.lease_margin(limits.LEASE_MIN)
        self._samples: deque[_Sample] = deque(maxlen=limits.CLOCK_SAMPLES)
        self._steady_since: int | None = None

    @property
    def known(self) -> bool:
        """Whether the store has answered yet."""
        return bool(self._samples)

    def at(self, now: int) -> int:
        """The store's time at `now`."""
        return now + self._best.offset

    def when(self, store_at: int) -> int:
        """When, by the sidecar's clock, the store's time will be `store_at`."""
        return store_at - self._best.offset

    def steady_for(self, now: int) -> int:
        """How long the store's clock has been seen to run evenly."""
        return 0 if self._steady_since is None else now - self._steady_since

    def sample(self, sent_at: int, received_at: int, store_at: int) -> bool:
        """Takes a reply's time in. True: the store's clock has stepped."""
        fresh = _Sample(store_at - (sent_at + received_at) // 2, received_at - sent_at)
        stepped = self.known and self._is_step(fresh)
        if stepped:
            self._samples.clear()
            self._steady_since = None
        if self._steady_since is None and self._quick(fresh):
            self._steady_since = received_at
        self._samples.append(fresh)
        return stepped

    def distrust(self) -> None:
        """The store itself said that its clock is not where it was expected (CLOCK_STEP)."""
        self._steady_since = None

    @property
    def _best(self) -> _Sample:
        assert self._samples, "asked before the store has answered"
        return min(self._samples, key=lambda sample: sample.round_trip)

    def _quick(self, sample: _Sample) -> bool:
        return 2 * sample.round_trip <= self.margin_ms

    def _is_step(self, fresh: _Sample) -> bool:
        best = self._best
        moved = abs(fresh.offset - best.offset)
        if self._quick(fresh) and self._quick(best):
            return 2 * moved > self.margin_ms
        return moved - (fresh.round_trip + best.round_trip) // 2 > self.margin_ms
