"""Slots tick by tick, as slowly and plainly as can be: the judge of `anarchon_server.core.slots`.

It shares no code with what it judges: it has its own reader of cron fields, its own reader of the
zone files (TZif with its footer), and finds slots by looking at every tick of a span of time.
"""

from __future__ import annotations

import calendar
import importlib.resources
import re
import struct
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache

DAY = 86_400
THREE_HOURS = 10_800
START = 0
END = 7_258_118_400  # 2200-01-01T00:00:00Z


# ── Zone files ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OracleZone:
    """All changes of the offset from 1969 to 2200: (instant, offset before, offset after)."""

    name: str
    changes: tuple[tuple[int, int, int], ...]
    first_offset: int

    def offset(self, instant: int) -> int:
        """Local time minus UTC, in seconds."""
        at = bisect_right(self.changes, (instant, 1 << 62, 0)) - 1
        return self.changes[at][2] if at >= 0 else self.first_offset


@cache
def oracle_zone(name: str) -> OracleZone:
    """Read a zone from the tzdata package's files."""
    data = importlib.resources.files("tzdata").joinpath(f"zoneinfo/{name}").read_bytes()
    instants, offsets, first, footer = _read_tzif(data)
    moments: dict[int, int] = dict(zip(instants, offsets, strict=True))
    last = instants[-1] if instants else -(1 << 62)
    if "," in footer:
        for year in range(1969, 2201):
            moments |= {at: to for at, to in _footer_changes(footer, year) if at > last}
    elif not instants:
        first = _footer_standard(footer)
    changes = []
    before = first
    for at in sorted(moments):
        if moments[at] != before:
            changes.append((at, before, moments[at]))
        before = moments[at]
    return OracleZone(name, tuple(changes), first)


def _read_tzif(data: bytes) -> tuple[list[int], list[int], int, str]:
    """Return the instants and offsets of the 64-bit block, the first offset, and the footer."""

    def counts(at: int) -> tuple[int, ...]:
        assert data[at : at + 4] == b"TZif"
        return struct.unpack(">6l", data[at + 20 : at + 44])

    utc_count, std_count, leap_count, time_count, type_count, char_count = counts(0)
    at = 44 + time_count * 5 + type_count * 6 + char_count + leap_count * 8 + std_count + utc_count
    utc_count, std_count, leap_count, time_count, type_count, char_count = counts(at)
    at += 44
    instants = list(struct.unpack(f">{time_count}q", data[at : at + 8 * time_count]))
    at += 8 * time_count
    indices = data[at : at + time_count]
    at += time_count
    types = [struct.unpack(">l", data[at + 6 * i : at + 6 * i + 4])[0] for i in range(type_count)]
    at += 6 * type_count + char_count + leap_count * 12 + std_count + utc_count
    footer = data[at:].decode("ascii").strip("\n")
    return instants, [types[index] for index in indices], types[0], footer


_FOOTER = re.compile(
    r"(?:<[^>]+>|[A-Za-z]+)(?P<std>[-+0-9:]+)(?:<[^>]+>|[A-Za-z]+)(?P<dst>[-+0-9:]*)"
    r",(?P<start>[^,]+),(?P<end>[^,]+)"
)


def _footer_standard(footer: str) -> int:
    match = re.fullmatch(r"(?:<[^>]+>|[A-Za-z]+)([-+0-9:]+)", footer)
    assert match, footer
    return -_clock(match[1])


def _footer_changes(footer: str, year: int) -> list[tuple[int, int]]:
    match = _FOOTER.fullmatch(footer)
    assert match, footer
    standard = -_clock(match["std"])
    summer = -_clock(match["dst"]) if match["dst"] else standard + 3600
    return [
        (_rule_instant(match["start"], year) - standard, summer),
        (_rule_instant(match["end"], year) - summer, standard),
    ]


def _rule_instant(rule: str, year: int) -> int:
    """The wall time, in seconds since the epoch, of a rule such as "M3.5.0/3" or "J60/0"."""
    day_text, _, clock_text = rule.partition("/")
    if day_text.startswith("M"):
        month, week, weekday = map(int, day_text[1:].split("."))
        matching = [
            day
            for day in range(1, calendar.monthrange(year, month)[1] + 1)
            if date(year, month, day).isoweekday() % 7 == weekday
        ]
        on = date(year, month, matching[-1] if week == 5 else matching[week - 1])
    elif day_text.startswith("J"):
        # 29 February is never counted.
        on = date(2001, 1, 1) + timedelta(days=int(day_text[1:]) - 1)
        on = on.replace(year=year)
    else:
        on = date(year, 1, 1) + timedelta(days=int(day_text))
    return (on - date(1970, 1, 1)).days * DAY + (_clock(clock_text) if clock_text else 7200)


def _clock(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    hours, minutes, seconds = (*map(int, text.lstrip("+-").split(":")), 0, 0)[:3]
    return sign * (hours * 3600 + minutes * 60 + seconds)


# ── Expressions ─────────────────────────────────────────────────────────────────────────────────

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


class OracleCron:
    """A valid expression; matches one wall time at a time."""

    def __init__(self, expression: str) -> None:
        text = _ALIASES.get(expression.strip().lower(), expression).upper().replace("?", "*")
        fields = text.split()
        second, minute, hour, day, month, weekday = fields if len(fields) == 6 else ["0", *fields]
        self.seconds = _expand(second, 0, 59)
        self.minutes = _expand(minute, 0, 59)
        self.hours = _expand(hour, 0, 23)
        self.months = _expand(month, 1, 12, _MONTHS)
        self.day_items = [day] if day.startswith("*") else day.split(",")
        self.weekday_items = [weekday] if weekday.startswith("*") else weekday.split(",")
        self.both = day[0] == "*" or weekday[0] == "*"
        self.wildcard = "*" in (second[0], minute[0], hour[0])
        self._dates: dict[int, bool] = {}

    def matches(self, wall: int) -> bool:
        """Whether the wall time (seconds since 1970-01-01 00:00 as the wall shows it) matches."""
        day, time = divmod(wall, DAY)
        return (
            time % 60 in self.seconds
            and time // 60 % 60 in self.minutes
            and time // 3600 in self.hours
            and self.matches_date(day)
        )

    def matches_date(self, day: int) -> bool:
        """Whether the date, in days since the epoch, matches the month and day fields."""
        if day not in self._dates:
            on = date(1970, 1, 1) + timedelta(days=day)
            by_day = any(_day_matches(item, on) for item in self.day_items)
            by_weekday = any(_weekday_matches(item, on) for item in self.weekday_items)
            found = by_day and by_weekday if self.both else by_day or by_weekday
            self._dates[day] = found and on.month in self.months
        return self._dates[day]


def _expand(text: str, low: int, high: int, names: list[str] | None = None) -> set[int]:
    found: set[int] = set()
    for item in text.split(","):
        span, _, step = item.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = (_number(end, low, names) for end in span.split("-"))
        else:
            first = _number(span, low, names)
            last = high if step else first
        values = range(first, last + 1, int(step or 1))
        found |= set(values) if first <= last else {*range(first, high + 1), *range(low, last + 1)}
    return found


def _number(text: str, low: int, names: list[str] | None) -> int:
    return names.index(text) + low if names and text in names else int(text)


def _day_matches(item: str, on: date) -> bool:
    length = calendar.monthrange(on.year, on.month)[1]
    if item == "L":
        return on.day == length
    if item.endswith("W"):
        return on.day == _nearest_weekday(item[:-1], on.year, on.month, length)
    return on.day in _expand(item, 1, 31)


def _nearest_weekday(day: str, year: int, month: int, length: int) -> int | None:
    working = [d for d in range(1, length + 1) if date(year, month, d).weekday() < 5]
    if day == "L":
        return working[-1]
    if int(day) > length:
        return None
    # A Saturday goes to the Friday before, a Sunday to the Monday after, where the month has them.
    return min(working, key=lambda candidate: abs(candidate - int(day)))


def _weekday_matches(item: str, on: date) -> bool:
    weekday = on.isoweekday() % 7
    nth = (on.day + 6) // 7
    if "#" in item:
        name, _, which = item.partition("#")
        return weekday == _weekday_number(name) and nth == int(which)
    if re.fullmatch(r"([0-9]+|[A-Z]{3})L", item):
        is_last = on.day + 7 > calendar.monthrange(on.year, on.month)[1]
        return weekday == _weekday_number(item[:-1]) and is_last
    if "-" in item:
        span, _, step = item.partition("/")
        first, last = span.split("-")
        low, high = _weekday_number(first), _weekday_number(last)
        if last in ("7", "SUN") or (high == 0 and low > 0):
            high = 7
        if first == "7" and last != "7":
            low = 0
        if low > high:
            return weekday >= low or weekday <= high
        return weekday in {value % 7 for value in range(low, high + 1, int(step or 1))}
    if item.startswith("*"):
        return weekday % int(item[2:] or 1) == 0
    return weekday == _weekday_number(item)


def _weekday_number(text: str) -> int:
    return _WEEKDAYS.index(text) if text in _WEEKDAYS else int(text) % 7


# ── The rule ────────────────────────────────────────────────────────────────────────────────────


def oracle_slots(expression: str, zone_name: str, start: int, end: int) -> list[int]:
    """All slots with `start` < slot <= `end`, in seconds since the epoch."""
    cron, zone = OracleCron(expression), oracle_zone(zone_name)
    found: set[int] = set()
    first, last = max(start + 1, START), min(end, END - 1)
    nearby = [c for c in zone.changes if start - 2 * DAY < c[0] <= end]
    offsets = {zone.offset(first)} | {after for _, _, after in nearby}
    tick = 60 if cron.seconds == {0} and all(offset % 60 == 0 for offset in offsets) else 1
    for instant in range(first + -first % tick, last + 1, tick):
        wall = instant + zone.offset(instant)
        if cron.matches(wall) and (cron.wildcard or not _shown_before(wall, instant, nearby)):
            found.add(instant)
    for at, before, after in nearby:
        skipped = range(at + before, at + after)
        if (
            first <= at <= last
            and not cron.wildcard
            and len(skipped) <= THREE_HOURS
            and any(map(cron.matches, skipped))
        ):
            found.add(at)
    return sorted(found)


def _shown_before(wall: int, instant: int, nearby: list[tuple[int, int, int]]) -> bool:
    """Whether a change of at most three hours made the clock show `wall` a second time."""
    return any(
        at <= instant and at + after <= wall < at + before and before - after <= THREE_HOURS
        for at, before, after in nearby
    )


def seconds(text: str) -> int:
    """An instant written in ISO 8601, in seconds since the epoch."""
    moment = datetime.fromisoformat(text)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
