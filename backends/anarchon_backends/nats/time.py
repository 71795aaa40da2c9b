"""The store's time between two measurements, by the machine's boot-time clock.

Imports the port and the standard library. NATS tells the time in answers to STREAM.INFO only, and
no step of its looks at it: whoever decides by it measures first, or takes a measurement that is
not old, and reckons on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from anarchon_server.core.store import StoreClock

FRESH_MS = 5_000
_SAMPLES = 8
_SLACK_MS = 5  # the clocks' own grain, and what a schedule of the machine adds
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Sample:
    """That the store's clock was `offset_us` ahead of the boot-time clock, half a round trip off."""

    offset_us: int
    error_ms: float
    boot_ms: int


class StoreTime:
    """What the store's clock shows, in microseconds since the epoch.

    With `virtual` the store's time is that of `clock`, and nothing is measured: for tests.
    """

    def __init__(self, clock: StoreClock, *, virtual: bool = False) -> None:
        self._clock = clock
        self._virtual = virtual
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)

    def boot_ms(self) -> int:
        """The machine's clock that measurements are taken by."""
        return self._clock.boot_ms()

    @property
    def fresh(self) -> bool:
        """Whether the last measurement is not older than `FRESH_MS`."""
        if self._virtual:
            return True
        if not self._samples:
            return False
        return self._clock.boot_ms() - self._samples[-1].boot_ms <= FRESH_MS

    def note(self, at_us: int, asked_ms: int) -> None:
        """A measurement: the store's clock showed `at_us` after `asked_ms` and before now.

        One that none of the earlier ones can be reconciled with tells of a step of that clock, or of
        another node's: it stands alone from then on.
        """
        answered_ms = self._clock.boot_ms()
        error_ms = (answered_ms - asked_ms) / 2
        offset_us = at_us - int((asked_ms + answered_ms) * 500)
        sample = _Sample(offset_us, error_ms, answered_ms)
        best = min(self._samples, key=lambda s: s.error_ms, default=sample)
        apart_ms = abs(best.offset_us - offset_us) / 1_000
        if apart_ms > best.error_ms + error_ms + _SLACK_MS:
            self._samples.clear()
        self._samples.append(sample)

    def forget(self) -> None:
        """The measurements are worth nothing any more: the connection is a new one."""
        self._samples.clear()

    def now_us(self) -> int:
        """The store's time now, reckoned from the best of the last measurements."""
        if self._virtual:
            return self._clock.wall_us()
        assert self._samples, "the time is measured before it is asked for"
        best = min(self._samples, key=lambda s: s.error_ms)
        return self._clock.boot_ms() * 1_000 + best.offset_us


def microseconds(text: str) -> int:
    """A time as NATS writes it (RFC 3339 with nanoseconds), in microseconds since the epoch."""
    whole, _, zone = text.partition("Z") if text.endswith("Z") else (text[:-6], "", text[-6:])
    seconds, _, fraction = whole.partition(".")
    at = datetime.fromisoformat(seconds + (zone or "+00:00"))
    return (at - _EPOCH) // timedelta(microseconds=1) + int(fraction[:6].ljust(6, "0") or 0)
