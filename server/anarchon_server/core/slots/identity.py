"""The canonical identity of a cron schedule: what two instances compare (S5). Pure."""

from __future__ import annotations

import hashlib

from anarchon_server.core.slots.wall import MONTH_SHAPES, Wall


def identity_of(wall: Wall, time_zone: str) -> str:
    """Return one text for all spellings of one schedule, and another for every other one.

    Days are compared by meaning: by the days that match in each of the months that the calendar
    has (12 months, 7 weekdays for the 1st, two lengths of February).
    """
    times = wall.times
    kind = "wildcard" if times.wildcard else "fixed"
    fields = " ".join(_set_text(mask) for mask in (times.seconds, times.minutes, times.hours))
    return f"cron {kind} {fields} {_days(wall)} {time_zone}"


def _days(wall: Wall) -> str:
    masks = {shape: wall.day_mask(*shape) for shape in MONTH_SHAPES}
    months = weekdays = days = 0
    for (month, first_weekday, _), mask in masks.items():
        if mask:
            months |= 1 << month
            days |= mask << 1
            week = (mask | mask >> 7 | mask >> 14 | mask >> 21 | mask >> 28) & 127
            weekdays |= (week << first_weekday | week >> (7 - first_weekday)) & 127
    if all(mask == _by_weekday(months, weekdays, shape) for shape, mask in masks.items()):
        return f"* {_set_text(months)} {_set_text(weekdays)}"
    if all(mask == _by_day(months, days, shape) for shape, mask in masks.items()):
        return f"{_set_text(days)} {_set_text(months)} *"
    text = ",".join(f"{mask:x}" for mask in masks.values())
    return f"days:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _by_weekday(months: int, weekdays: int, shape: tuple[int, int, int]) -> int:
    month, first_weekday, length = shape
    if not months >> month & 1:
        return 0
    week = (weekdays >> first_weekday | weekdays << (7 - first_weekday)) & 127
    return (week | week << 7 | week << 14 | week << 21 | week << 28) & (1 << length) - 1


def _by_day(months: int, days: int, shape: tuple[int, int, int]) -> int:
    month, _, length = shape
    return days >> 1 & (1 << length) - 1 if months >> month & 1 else 0


def _set_text(mask: int) -> str:
    """Return the numbers of a mask with runs of three and more as ranges: "0-2,5"."""
    runs: list[list[int]] = []
    for number in range(mask.bit_length()):
        if mask >> number & 1:
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
