"""The canonical identity of a cron schedule: what two instances compare (S5). Pure."""

from __future__ import annotations

import hashlib

from anarchon_server.core.slots.grammar import Times
from anarchon_server.core.slots.wall import MONTH_SHAPES, Wall

_EVERY_DAY = (1 << 32) - 2
_EVERY_WEEKDAY = (1 << 7) - 1


def identity_of(wall: Wall, time_zone: str) -> str:
    """Return one text for all spellings of one schedule, and another for every other one.

    It names the class, the seconds, minutes and hours, the days, and the zone. Days are compared
    by meaning: by those that match in each of the months that the calendar has. So the day rule
    is in it exactly where it makes a difference.
    """
    times = wall.times
    kind = "wildcard" if times.wildcard else "fixed"
    fields = " ".join(set_text(mask) for mask in (times.seconds, times.minutes, times.hours))
    return f"cron {kind} {fields} {_days(wall)} {time_zone}"


def set_text(mask: int) -> str:
    """Return the numbers of a mask, runs of them as ranges: "0-2,5"."""
    runs: list[list[int]] = []
    for number in range(mask.bit_length()):
        if mask >> number & 1:
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _days(wall: Wall) -> str:
    """Return "days months weekdays" where that says it all, else a hash of the matching days."""
    plain = _only_weekdays(wall.times)
    if plain is not None:
        return f"* {set_text(wall.times.months)} {set_text(plain)}"
    masks = {shape: wall.day_mask(*shape) for shape in MONTH_SHAPES}
    months = days = weekdays = 0
    for (month, first_weekday, _), mask in masks.items():
        if mask:
            months |= 1 << month
            days |= mask << 1
            week = (mask | mask >> 7 | mask >> 14 | mask >> 21 | mask >> 28) & _EVERY_WEEKDAY
            weekdays |= (week << first_weekday | week >> 7 - first_weekday) & _EVERY_WEEKDAY
    if masks == {shape: _by_weekday(months, weekdays, shape) for shape in MONTH_SHAPES}:
        return f"* {set_text(months)} {set_text(weekdays)}"
    if masks == {shape: _by_day(months, days, shape) for shape in MONTH_SHAPES}:
        return f"{set_text(days)} {set_text(months)} *"
    text = ",".join(f"{mask:x}" for mask in masks.values())
    return f"days:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _only_weekdays(times: Times) -> int | None:
    """Return the weekdays where, as in most schedules, nothing but they and the months matter."""
    if times.days != _EVERY_DAY or times.nth_weekdays:
        return None
    return times.weekdays if times.both_days else _EVERY_WEEKDAY


def _by_weekday(months: int, weekdays: int, shape: tuple[int, int, int]) -> int:
    month, first_weekday, length = shape
    if not months >> month & 1:
        return 0
    week = (weekdays >> first_weekday | weekdays << 7 - first_weekday) & _EVERY_WEEKDAY
    return (week | week << 7 | week << 14 | week << 21 | week << 28) & (1 << length) - 1


def _by_day(months: int, days: int, shape: tuple[int, int, int]) -> int:
    month, _, length = shape
    return days >> 1 & (1 << length) - 1 if months >> month & 1 else 0
