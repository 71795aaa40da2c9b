"""Schedules in words, for people: "at 08:00 on Mondays, Europe/Athens". Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from anarchon_server.core.slots.grammar import LAST, Times
from anarchon_server.core.slots.zones import ClockChange

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_MONDAY_FIRST = (1, 2, 3, 4, 5, 6, 0)
_ORDINALS = {1: "first", 2: "second", 3: "third", 4: "fourth", 5: "fifth", LAST: "last"}
_EVERY_DAY = (1 << 32) - 2
_EVERY_WEEKDAY = (1 << 7) - 1
_MOST_CLOCK_TIMES = 6
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_CONTESTED = (
    "a day field begins with *, so a date must match both day fields, as in Debian's cron; "
    "Kubernetes and croniter take either"
)


def times_in_words(times: Times) -> str:
    """Return what a cron expression names, without its zone."""
    days = f"{_days(times)} {_months(times)}".strip()
    if days == "every day" and len(_numbers(times.hours)) == 24:
        return _time_of_day(times)
    return f"{_time_of_day(times)} {days}"


def notes_on(times: Times) -> tuple[str, ...]:
    """Return what other programs read otherwise in this expression."""
    if times.contested:
        return (_CONTESTED,)
    return ()


def moved_in_words(skipped: Sequence[int], end: int, *, merged: bool) -> str:
    """Say which wall times the clock skipped that a slot at the wall time `end` makes up for."""
    shown = [clock(wall) for wall in skipped[:_MOST_CLOCK_TIMES]]
    if len(skipped) > _MOST_CLOCK_TIMES:
        shown = [f"{len(skipped)} times from {shown[0]} to {clock(skipped[-1])}"]
    are = "are" if len(skipped) > 1 else "is"
    what = "merged" if merged else "moved"
    return f"{what}: {joined(shown)} {are} skipped, and made up for at {clock(end)}"


def change_in_words(change: ClockChange) -> str:
    """Say when and how the clocks change."""
    before, after = (
        _EPOCH + timedelta(milliseconds=change.at_ms, seconds=offset_s)
        for offset_s in (change.before_s, change.after_s)
    )
    forth = "forward" if change.after_s > change.before_s else "back"
    day = "" if before.date() == after.date() else f"{after:%Y-%m-%d} "
    return f"the clocks go {forth} on {before:%Y-%m-%d} from {before:%H:%M} to {day}{after:%H:%M}"


def clock(wall_s: int) -> str:
    """Return the time of day of a wall time: "03:30", "03:30:15"."""
    minutes, second = divmod(wall_s % 86_400, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}" + (f":{second:02}" if second else "")


def joined(words: Iterable[str], conjunction: str = "and") -> str:
    """Return a list as people write it: "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} {conjunction} {last}" if most else last


# ── The time of day ─────────────────────────────────────────────────────────────────────────────


def _time_of_day(times: Times) -> str:
    seconds, minutes, hours = (_numbers(m) for m in (times.seconds, times.minutes, times.hours))
    if len(minutes) * len(hours) <= _MOST_CLOCK_TIMES:
        second = f":{seconds[0]:02}" if len(seconds) == 1 and seconds != [0] else ""
        clock = joined(f"{hour:02}:{minute:02}{second}" for hour in hours for minute in minutes)
        return f"at {clock}" if len(seconds) == 1 else f"{_seconds(seconds)} of {clock}"
    if seconds == minutes == [0] and (step := _step(hours, 24)):
        return "every hour" if step == 1 else f"every {step} hours from 00:00"
    within = _minutes(seconds, minutes)
    if len(hours) < 24:
        return f"{within} {_hours(hours)}"
    return f"{within} of every hour" if "at minute" in within else within


def _minutes(seconds: list[int], minutes: list[int]) -> str:
    if len(minutes) == 60:
        if seconds == [0]:
            return "every minute"
        return _seconds(seconds) if _step(seconds, 60) else f"{_seconds(seconds)} of every minute"
    if seconds == [0] and (step := _step(minutes, 60)):
        return f"every {step} minutes"
    at_minutes = f"at {_counted('minute', minutes)}"
    return at_minutes if seconds == [0] else f"{_seconds(seconds)} {at_minutes}"


def _seconds(seconds: list[int]) -> str:
    if step := _step(seconds, 60):
        return "every second" if step == 1 else f"every {step} seconds"
    return f"at {_counted('second', seconds)}"


def _hours(hours: list[int]) -> str:
    runs = _runs(hours)
    if len(runs) <= 3:
        return f"from {joined(f'{first:02}:00 to {last:02}:59' for first, last in runs)}"
    return f"in {_counted('hour', hours)}"


# ── The days ────────────────────────────────────────────────────────────────────────────────────


def _days(times: Times) -> str:
    by_day = "" if times.days == _EVERY_DAY else _days_of_month(times)
    by_weekday = "" if times.weekdays == _EVERY_WEEKDAY else _weekdays(times)
    if not times.both_days:
        # Either of two restricted fields; where one names all, the other does not matter.
        return f"{by_day} or {by_weekday}" if by_day and by_weekday else "every day"
    if by_day and by_weekday:
        return f"{by_day} where that is {_a_weekday(times)}"
    return by_day or by_weekday or "every day"


def _days_of_month(times: Times) -> str:
    if times.near_weekday == LAST:
        return "on the last weekday (Monday to Friday) of the month"
    if times.near_weekday is not None:
        return f"on the weekday (Monday to Friday) nearest to day {times.near_weekday} of the month"
    days = _counted("day", _numbers(times.days)) if times.days else ""
    last_day = "the last day" if times.last_day else ""
    return f"on {' and '.join(part for part in (days, last_day) if part)} of the month"


def _weekdays(times: Times) -> str:
    if times.nth_weekdays:
        named = [f"the {_ORDINALS[nth]} {_WEEKDAYS[day]}" for day, nth in times.nth_weekdays]
        return f"on {joined(named)} of the month"
    names = [_WEEKDAYS[day] for day in _MONDAY_FIRST]
    return f"on {_spans(names, _positions(times), one='{}s')}"


def _a_weekday(times: Times) -> str:
    return f"a {joined((_WEEKDAYS[_MONDAY_FIRST[at]] for at in _positions(times)), 'or')}"


def _positions(times: Times) -> list[int]:
    """Return the places of the weekdays in a week that begins on Monday."""
    return [at for at, day in enumerate(_MONDAY_FIRST) if times.weekdays >> day & 1]


def _months(times: Times) -> str:
    months = _numbers(times.months)
    if len(months) == 12:
        return ""
    return f"in {_spans(('', *_MONTHS), months)}"


# ── Numbers ─────────────────────────────────────────────────────────────────────────────────────


def _numbers(mask: int) -> list[int]:
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


def _step(numbers: list[int], size: int) -> int:
    """Return n where the numbers are every n-th of 0 to size - 1 and n divides size, else 0."""
    step = size // len(numbers)
    return step if len(numbers) > 1 and numbers == list(range(0, size, step)) else 0


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _spans(names: Sequence[str], numbers: Sequence[int], one: str = "{}") -> str:
    """Return names, runs of three and more as "A to C", and the others as `one` says."""
    spans: list[str] = []
    for first, last in _runs(numbers):
        if last - first > 1:
            spans.append(f"{names[first]} to {names[last]}")
        else:
            spans += [one.format(names[number]) for number in range(first, last + 1)]
    return joined(spans)


def _counted(noun: str, numbers: Sequence[int]) -> str:
    """Return "minute 5", "minutes 0 and 30", "minutes 1, 3, ... 59"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    step = numbers[1] - numbers[0]
    if (
        step > 1
        and len(numbers) > 4
        and list(numbers) == list(range(numbers[0], 60, step))[: len(numbers)]
    ):
        return f"{noun}s {numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    return f"{noun}s {_spans([str(number) for number in range(60)], numbers)}"
