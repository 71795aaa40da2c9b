"""Durations: the text "1h30m", `timedelta`, and the wire's form. Imports the standard library and
protobuf's Duration only.
"""

from __future__ import annotations

import re
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration as WireDuration

# What the public API takes wherever it says "duration".
Duration = timedelta | str

# Largest first: the order in which they are written.
_UNITS_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# 366 days in milliseconds have 11 digits, and so 12 a unit are more than enough.
_TEXT = re.compile("".join(rf"(?:([0-9]{{1,12}}){unit}(?![a-z]))?" for unit in _UNITS_MS))
_LONGEST_TEXT = 64
_GRAMMAR = 'whole numbers with the units w d h m s ms, largest first, each once, as in "1h30m"'
# What a timedelta can hold is far more than anything here needs.
_LONGEST = timedelta(days=36_600)


def to_timedelta(value: object) -> timedelta:
    """Return `value`, a `timedelta` or a text such as "90s", "1h30m" or "250ms", as a `timedelta`.

    Raises `ValueError`, saying what would be right, for anything else, for parts of a
    millisecond, and for less than nothing.
    """
    if isinstance(value, timedelta):
        if value < timedelta(0):
            raise ValueError("a duration cannot be negative")
        if value > _LONGEST:
            raise ValueError("a duration cannot be longer than a hundred years")
        if value % timedelta(milliseconds=1):
            raise ValueError("a duration must be whole milliseconds")
        return value
    if isinstance(value, str):
        return _parse(value)
    raise ValueError(f'write a timedelta or a text such as "10s", not {type(value).__name__}')


def to_ms(duration: timedelta) -> int:
    """Return whole milliseconds; parts of one are dropped."""
    return duration // timedelta(milliseconds=1)


def to_text(duration: timedelta) -> str:
    """Return the shortest text that means `duration`: "1h30m"; zero is "0s"."""
    rest_ms = to_ms(duration)
    text = ""
    for unit, unit_ms in _UNITS_MS.items():
        number, rest_ms = divmod(rest_ms, unit_ms)
        if number:
            text += f"{number}{unit}"
    return text or "0s"


def to_wire(duration: timedelta) -> WireDuration:
    """Return the wire's form of `duration`."""
    wire = WireDuration()
    wire.FromTimedelta(duration)
    return wire


def wire_to_ms(wire: WireDuration) -> int:
    """Return the whole milliseconds of a duration received; parts of one are dropped."""
    return wire.seconds * 1_000 + wire.nanos // 1_000_000


def ms_to_wire(duration_ms: int) -> WireDuration:
    """Return the wire's form of `duration_ms`."""
    return to_wire(timedelta(milliseconds=duration_ms))


def _parse(text: str) -> timedelta:
    match = _TEXT.fullmatch(text) if 0 < len(text) <= _LONGEST_TEXT else None
    if match is None:
        raise ValueError(_what_to_write(text))
    total_ms = sum(
        int(number) * unit_ms
        for number, unit_ms in zip(match.groups(), _UNITS_MS.values(), strict=True)
        if number is not None
    )
    if total_ms > to_ms(_LONGEST):
        raise ValueError("a duration cannot be longer than a hundred years")
    return timedelta(milliseconds=total_ms)


def _what_to_write(text: str) -> str:
    if len(text) > _LONGEST_TEXT:
        return f"a duration has at most {_LONGEST_TEXT} characters"
    if text != text.strip():
        return "no white space around a duration"
    if re.fullmatch(r"[0-9]+", text):
        return f'a number needs its unit: "{text}s" is seconds, "{text}m" minutes'
    if re.fullmatch(r"[0-9]*[.,][0-9]+[a-z]+", text):
        return f"no fractions (90m, not 1.5h): write {_GRAMMAR}"
    if re.fullmatch(r"[0-9]+(mo|y)", text):
        return "months and years have no fixed length: write days, or a cron expression"
    return f"write {_GRAMMAR}"
