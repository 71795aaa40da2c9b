"""Random cron expressions and spans of time for the tests of slots, from a seeded `Random`."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tests.unit.server.core.slot_oracle import DAY, END, oracle_zone

_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_WEEKDAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


class Window(NamedTuple):
    """An expression in a zone, and a span of time in seconds since the epoch."""

    expression: str
    zone: str
    start: int
    end: int


def window_at_a_change(chance: Random, zones: list[str]) -> Window:
    """A span around one of a random zone's changes (anywhere, where it has none)."""
    zone = chance.choice(zones)
    changes = [change for change in oracle_zone(zone).changes if DAY < change[0] < END - 3 * DAY]
    at, before, _ = chance.choice(changes or [(chance.randrange(DAY, END - 3 * DAY), 0, 0)])
    with_seconds = chance.random() < 0.15
    hour = (at + before) % DAY // 3600
    expression = expression_around(chance, hour, with_seconds=with_seconds)
    reach = 4 * 3600 if with_seconds else 30 * 3600
    return Window(expression, zone, at - chance.randrange(reach), at + chance.randrange(reach))


def expression_around(chance: Random, hour: int, *, with_seconds: bool) -> str:
    """A valid expression that more often than not names the hour, or those beside it."""
    second = _field(chance, 0, 59) if with_seconds else None
    minute = chance.choice(("0", "30", "0,30", "1", "*", _field(chance, 0, 59)))
    near = [str((hour + shift) % 24) for shift in (-1, 0, 0, 1, 2)]
    hours = chance.choice((*near, ",".join(sorted(set(near), key=int)), "*", "*/2", "0-23"))
    if chance.random() < 0.3:
        hours = _field(chance, 0, 23)
    month = "*" if chance.random() < 0.8 else _field(chance, 1, 12, _MONTHS)
    day, weekday = day_fields(chance)
    fields = [minute, hours, day, month, weekday]
    return " ".join(fields if second is None else [second, *fields])


def day_fields(chance: Random) -> tuple[str, str]:
    """The fields for the day of month and the day of week."""
    kind = chance.random()
    if kind < 0.5:
        return "*", "*"
    if kind < 0.6:
        return chance.choice(("L", "1,L", "LW", f"{chance.randint(1, 31)}W", "?")), "*"
    if kind < 0.7:
        weekday = chance.choice((*_WEEKDAYS, *map(str, range(8))))
        return "*", chance.choice((f"{weekday}#{chance.randint(1, 5)}", f"{weekday}L"))
    day = chance.choice(("*", _field(chance, 1, 31, wraps=False)))
    weekday = chance.choice(("*", "?", _weekday_field(chance)))
    return day, weekday


def _field(
    chance: Random, low: int, high: int, names: list[str] | None = None, *, wraps: bool = True
) -> str:
    def value() -> str:
        number = chance.randint(low, high)
        return names[number - low] if names and chance.random() < 0.3 else str(number)

    kind = chance.randrange(6)
    if kind == 0:
        return f"*/{chance.randint(1, high - low)}"
    if kind == 1:
        return f"{value()}/{chance.randint(1, high - low)}"
    first, last = sorted(chance.sample(range(low, high + 1), 2))
    if kind == 2 and wraps and chance.random() < 0.5:
        return f"{last}-{first}"
    if kind == 2:
        return f"{first}-{last}"
    if kind == 3:
        return f"{first}-{last}/{chance.randint(1, high - low)}"
    return ",".join(value() for _ in range(chance.randint(1, 5)))


def _weekday_field(chance: Random) -> str:
    kind = chance.randrange(5)
    if kind == 0:
        return f"*/{chance.randint(1, 6)}"
    if kind == 1:
        first, last = sorted(chance.sample(range(8), 2))
        return "0-7" if (first, last) == (0, 7) else f"{first}-{last}"
    if kind == 2:
        return chance.choice(("FRI-MON", "SAT-SUN", "MON-SUN", "6-1", "7-2", "1-7/2", "0-6"))
    return ",".join(
        str(chance.choice((*_WEEKDAYS, *range(8)))) for _ in range(chance.randint(1, 3))
    )
