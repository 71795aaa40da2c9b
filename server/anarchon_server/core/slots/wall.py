"""The matching times of a wall clock that never changes: whole seconds since 1970-01-01 00:00 as
that clock shows them. Zones and clock changes are not known here. Imports the standard library only.
"""

from __future__ import annotations

from datetime import date
from typing import NamedTuple

from anarchon_server.core.slots.grammar import LAST, Times

DAY_S = 86_400
_NO_GAP = 1_000 * DAY_S

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
# One month more on either side than instants have, for the offsets of zones.
_FIRST_YEAR, _FIRST_MONTH = 1969, 12
_MONTHS = 231 * 12 + 2

# Day masks of a month have bit 0 for the 1st. The same weekday comes every 7 days.
_WEEKLY = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28


class Month(NamedTuple):
    """A month of the calendar: its number, and `start_day` to before `end_day` since the epoch."""

    number: int
    start_day: int
    end_day: int


def _month(index: int) -> Month:
    year, before = divmod(index + _FIRST_MONTH - 1, 12)
    ends = (
        date(_FIRST_YEAR + (before + more) // 12 + year, (before + more) % 12 + 1, 1)
        for more in (0, 1)
    )
    start_day, end_day = (end.toordinal() - _EPOCH_ORDINAL for end in ends)
    return Month(before + 1, start_day, end_day)


_CALENDAR = tuple(_month(index) for index in range(_MONTHS))


def _month_index(day: int) -> int:
    found = date.fromordinal(day + _EPOCH_ORDINAL)
    return (found.year - _FIRST_YEAR) * 12 + found.month - _FIRST_MONTH


_LENGTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

MONTH_SHAPES = tuple(
    (month, first_weekday, length)
    for month, longest in enumerate(_LENGTHS, 1)
    for length in ((28, 29) if month == 2 else (longest,))
    for first_weekday in range(7)
)
"""All months there are: (month, weekday of the 1st, length). Each comes within 28 years."""

_NEIGHBOURS = tuple(
    (shape, following)
    for shape in MONTH_SHAPES
    for following in MONTH_SHAPES
    if following[:2] == (shape[0] % 12 + 1, (shape[1] + shape[2]) % 7)
)

_EVERY_HOUR = (1 << 24) - 1


class Wall:
    """The wall times that match `times`, from December 1969 to January 2200.

    Immutable but for a memory of the month last asked about, which is one assignment, and so an
    object may serve several threads.
    """

    __slots__ = ("_day_masks", "_first_time", "_last_time", "_recent", "times")

    def __init__(self, times: Times) -> None:
        self.times = times
        self._day_masks: dict[int, int] = {}
        first_hour, first_minute, first_second = map(_lowest, _masks(times))
        last_hour, last_minute, last_second = map(_highest, _masks(times))
        self._first_time = first_hour * 3600 + first_minute * 60 + first_second
        self._last_time = last_hour * 3600 + last_minute * 60 + last_second
        # Start and end of the month last asked about, and its mask.
        self._recent = (0, 0, 0)

    def at_or_after(self, wall_s: int) -> int | None:
        """Return the first match not earlier than `wall_s`; None: none until the calendar ends."""
        day, time = divmod(wall_s, DAY_S)
        if time <= self._last_time and self._matches(day):
            return day * DAY_S + self._time_from(time)
        next_day = self._day_from(day + 1)
        return None if next_day is None else next_day * DAY_S + self._first_time

    def at_or_before(self, wall_s: int) -> int | None:
        """Return the last match not later than `wall_s`; None: none since the calendar began."""
        day, time = divmod(wall_s, DAY_S)
        if time >= self._first_time and self._matches(day):
            return day * DAY_S + self._time_upto(time)
        last_day = self._day_upto(day - 1)
        return None if last_day is None else last_day * DAY_S + self._last_time

    def day_mask(self, month: int, first_weekday: int, length: int) -> int:
        """Return the matching days of a month (1 to 12) of this shape; bit 0 is the 1st."""
        if not self.times.months >> month & 1:
            return 0
        shape = first_weekday * 4 + length - 28
        mask = self._day_masks.get(shape)
        if mask is None:
            mask = self._day_masks[shape] = _days_matching(self.times, first_weekday, length)
        return mask

    def never_matches(self) -> bool:
        """Say whether no date matches, in any year."""
        return not any(self.day_mask(*shape) for shape in MONTH_SHAPES)

    def count(self, after_s: int, upto_s: int) -> int:
        """Return how many matches are later than `after_s` and not later than `upto_s`."""
        first_day, first_time = divmod(after_s, DAY_S)
        last_day, last_time = divmod(upto_s, DAY_S)
        count = self._days_between(first_day, last_day) * self._times_upto(DAY_S - 1)
        count += self._times_upto(last_time) if self._matches(last_day) else 0
        return count - (self._times_upto(first_time) if self._matches(first_day) else 0)

    def least_gap_s(self) -> int:
        """Return a length that no gap between two matches is below, and that most often one has."""
        times = self.times
        gaps = [
            _least_gap(times.seconds),
            _least_gap(times.minutes) * 60 - (self._last_time - self._first_time) % 60,
            _least_gap(times.hours) * 3600 - (self._last_time - self._first_time) % 3600,
            self._least_gap_days() * DAY_S - self._last_time + self._first_time,
        ]
        return min(gaps)

    def is_alike_each_hour(self) -> bool:
        """Say whether what matches in one hour matches in every hour of every day."""
        every_day = all(self.day_mask(*shape) == (1 << shape[2]) - 1 for shape in MONTH_SHAPES)
        return every_day and self.times.hours == _EVERY_HOUR

    def hour_mask(self) -> int:
        """Return the seconds of an hour that match: bit n stands for the second n."""
        minutes = (minute for minute in range(60) if self.times.minutes >> minute & 1)
        return sum(self.times.seconds << 60 * minute for minute in minutes)

    # ── Days ────────────────────────────────────────────────────────────────────────────────────

    def _matches(self, day: int) -> bool:
        start, end, mask = self._recent
        if not start <= day < end:
            start, mask = self._look_up(_CALENDAR[_month_index(day)])
        return bool(mask >> (day - start) & 1)

    def _look_up(self, month: Month) -> tuple[int, int]:
        number, start, end = month
        mask = self.day_mask(number, (start + 4) % 7, end - start)
        self._recent = (start, end, mask)
        return start, mask

    def _day_from(self, day: int) -> int | None:
        start, end, mask = self._recent
        if start <= day < end and (rest := mask >> (day - start)):
            return day + _lowest(rest)
        months = self.times.months
        for month in _CALENDAR[_month_index(day) :]:
            if not months >> month.number & 1:
                continue
            start, mask = self._look_up(month)
            rest = mask >> max(0, day - start)
            if rest:
                return max(day, start) + _lowest(rest)
        return None

    def _day_upto(self, day: int) -> int | None:
        months = self.times.months
        for month in _CALENDAR[_month_index(day) :: -1]:
            if not months >> month.number & 1:
                continue
            start, mask = self._look_up(month)
            rest = mask & ((2 << max(0, day - start)) - 1) if day < start + 31 else mask
            if rest:
                return start + _highest(rest)
        return None

    def _days_between(self, first_day: int, end_day: int) -> int:
        """Return how many days match from `first_day` to before `end_day`."""
        count = 0
        for month in _CALENDAR[_month_index(first_day) : _month_index(end_day) + 1]:
            start, mask = self._look_up(month)
            mask &= (1 << max(0, min(end_day, month.end_day) - start)) - 1
            count += (mask >> max(0, first_day - start)).bit_count()
        return count

    def _least_gap_days(self) -> int:
        # Two matching days with a whole month between them are at least 29 days apart.
        least = 29
        for shape, following in _NEIGHBOURS:
            days = self.day_mask(*shape) | self.day_mask(*following) << shape[2]
            least = min(least, _least_gap(days))
            if least == 1:
                break
        return least

    # ── Times of day ────────────────────────────────────────────────────────────────────────────

    def _time_from(self, time: int) -> int:
        """Return the first matching time of a day from `time` on; there is one."""
        hour, rest = divmod(time, 3600)
        minute, second = divmod(rest, 60)
        times = self.times
        if times.hours >> hour & 1:
            if times.minutes >> minute & 1 and (seconds := times.seconds >> second):
                return time + _lowest(seconds)
            if minutes := times.minutes >> minute + 1:
                minute += 1 + _lowest(minutes)
                return hour * 3600 + minute * 60 + self._first_time % 60
        hour += 1 + _lowest(times.hours >> hour + 1)
        return hour * 3600 + self._first_time % 3600

    def _time_upto(self, time: int) -> int:
        """Return the last matching time of a day up to `time`; there is one."""
        hour, rest = divmod(time, 3600)
        minute, second = divmod(rest, 60)
        times = self.times
        if times.hours >> hour & 1:
            if times.minutes >> minute & 1 and (seconds := times.seconds & (2 << second) - 1):
                return time - second + _highest(seconds)
            if minutes := times.minutes & (1 << minute) - 1:
                return hour * 3600 + _highest(minutes) * 60 + self._last_time % 60
        return _highest(times.hours & (1 << hour) - 1) * 3600 + self._last_time % 3600

    def _times_upto(self, time: int) -> int:
        """Return how many times of a day match up to `time`."""
        hour, rest = divmod(time, 3600)
        minute, second = divmod(rest, 60)
        times = self.times
        count = (times.hours & (1 << hour) - 1).bit_count() * times.minutes.bit_count()
        if times.hours >> hour & 1:
            count += (times.minutes & (1 << minute) - 1).bit_count()
        count *= times.seconds.bit_count()
        if times.hours >> hour & times.minutes >> minute & 1:
            count += (times.seconds & (2 << second) - 1).bit_count()
        return count


def _masks(times: Times) -> tuple[int, int, int]:
    return times.hours, times.minutes, times.seconds


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _least_gap(mask: int) -> int:
    """Return the least distance of two bits; a large number where there are not two."""
    for gap in range(1, mask.bit_length()):
        if mask & mask >> gap:
            return gap
    return _NO_GAP


def _highest(mask: int) -> int:
    return mask.bit_length() - 1


def _days_matching(times: Times, first_weekday: int, length: int) -> int:
    every_day = (1 << length) - 1
    by_day = times.days >> 1 & every_day
    if times.last_day:
        by_day |= 1 << length - 1
    if times.near_weekday is not None:
        by_day |= _nearest_weekday(times.near_weekday, first_weekday, length)
    by_weekday = 0
    for weekday in range(7):
        if times.weekdays >> weekday & 1:
            by_weekday |= _WEEKLY << (weekday - first_weekday) % 7
    for weekday, nth in times.nth_weekdays:
        by_weekday |= _nth_weekday(weekday, nth, first_weekday, length)
    by_weekday &= every_day
    return by_day & by_weekday if times.both_days else by_day | by_weekday


def _nth_weekday(weekday: int, nth: int, first_weekday: int, length: int) -> int:
    days = _WEEKLY << (weekday - first_weekday) % 7 & (1 << length) - 1
    if nth == LAST:
        return 1 << _highest(days)
    return days & 1 << (weekday - first_weekday) % 7 + 7 * (nth - 1)


def _nearest_weekday(day: int, first_weekday: int, length: int) -> int:
    """Return the Monday to Friday nearest to `day`, within the month; no day, no weekday."""
    if day == LAST:
        day = length
        shift = {6: -1, 0: -2}
    else:
        shift = {6: 2 if day == 1 else -1, 0: -2 if day == length else 1}
    if day > length:
        return 0
    return 1 << day - 1 + shift.get((first_weekday + day - 1) % 7, 0)
