"""Grid schedules: every so many milliseconds, counted from the Unix epoch (S6). Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anarchon_server.core import limits
from anarchon_server.core.slots.duration import format_duration
from anarchon_server.core.slots.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Every:
    """Due at `offset_ms` + k * `period_ms` since the epoch, for every whole number k.

    `period_ms` is 100 ms to 366 days, `offset_ms` at least 0 and less than the period; both are
    whole milliseconds. Raises `ScheduleError`. A grid knows no zone, no clock change and no leap
    second: weeks begin on Thursdays, as 1970-01-01 did, and a day is 24 h from 00:00 UTC.
    """

    period_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
        whole_ms(self.period_ms, "period")
        whole_ms(self.offset_ms, "offset")
        if self.period_ms < limits.PERIOD_MIN:
            raise ScheduleError("period", shown_ms(self.period_ms), "at least 100ms")
        if self.period_ms > limits.PERIOD_MAX:
            raise ScheduleError(
                "period", shown_ms(self.period_ms), "at most 366d; longer ones are cron expressions"
            )
        if not 0 <= self.offset_ms < self.period_ms:
            raise ScheduleError(
                "offset",
                shown_ms(self.offset_ms),
                f"at least 0 and less than the period {format_duration(self.period_ms)}",
            )

    @property
    def identity(self) -> str:
        """What two instances compare: equal exactly for grids with the same slots."""
        offset = f" offset {format_duration(self.offset_ms)}" if self.offset_ms else ""
        return f"every {format_duration(self.period_ms)}{offset}"

    @property
    def description(self) -> str:
        """The schedule in words: "every 10s, counted from 1970-01-01 00:00 UTC"."""
        start = f"{format_duration(self.offset_ms)} after " if self.offset_ms else ""
        return f"every {format_duration(self.period_ms)}, counted from {start}1970-01-01 00:00 UTC"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader might not expect of this schedule: for a grid, nothing."""
        return ()

    def next_after(self, after_ms: int) -> int:
        """Return the first slot later than `after_ms`."""
        return after_ms + self.period_ms - (after_ms - self.offset_ms) % self.period_ms

    def previous_upto(self, upto_ms: int) -> int:
        """Return the last slot not later than `upto_ms`."""
        return upto_ms - (upto_ms - self.offset_ms) % self.period_ms

    def between(self, start_ms: int, end_ms: int) -> Iterator[int]:
        """Iterate over the slots later than `start_ms` and not later than `end_ms`, in order."""
        return iter(range(self.next_after(start_ms), end_ms + 1, self.period_ms))

    def is_slot(self, ms: int) -> bool:
        """Say whether `ms` is a slot."""
        return (ms - self.offset_ms) % self.period_ms == 0

    def remark(self, slot_ms: int) -> str:  # noqa: ARG002
        """Say what a clock change did to this slot: to a grid, nothing."""
        return ""

    def shortest_gap_ms(self, from_ms: int, count: int = 1000) -> int:  # noqa: ARG002
        """Return the period: all gaps of a grid are equal."""
        return self.period_ms


def whole_ms(value: object, field: str) -> None:
    """Refuse what is not a whole number of milliseconds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(field, value, "a whole number of milliseconds")


def shown_ms(duration_ms: int) -> str:
    """Return a duration as a message shows it, whatever its size and sign."""
    if 0 <= duration_ms <= 10 * limits.PERIOD_MAX:
        return format_duration(duration_ms)
    return "a negative duration" if duration_ms < 0 else "more than 10 years"
