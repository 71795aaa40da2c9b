"""Durations as text ("1h30m") to milliseconds and back. Imports the standard library only."""

from __future__ import annotations

import re

from anarchon_server.core.slots.errors import ScheduleError

# Largest first: the order in which they are written.
UNITS_MS = {
    "w": 604_800_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1_000,
    "ms": 1,
}

# 366 days in milliseconds have 11 digits, and so 12 a unit are more than enough.
_DURATION = re.compile("".join(rf"(?:([0-9]{{1,12}}){unit}(?![a-z]))?" for unit in UNITS_MS))
_LONGEST_TEXT = 64


def parse_duration_ms(text: str) -> int:
    """Return the whole milliseconds that `text` means: "10s", "1h30m", "250ms".

    Units are w, d, h, m, s and ms, largest first, each at most once, in ASCII, with whole numbers
    and nothing around them. Raises `ScheduleError` for any other text. The result may be any
    whole number from 0: what is too short or too long is for the caller to say.
    """
    if not isinstance(text, str):
        raise ScheduleError("duration", text, 'write a text such as "10s" or "1h30m"')
    if len(text) > _LONGEST_TEXT:
        raise ScheduleError("duration", text, f"at most {_LONGEST_TEXT} characters")
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise ScheduleError("duration", text, _what_to_write(text))
    return sum(
        int(number) * unit_ms
        for number, unit_ms in zip(match.groups(), UNITS_MS.values(), strict=True)
        if number is not None
    )


def format_duration(duration_ms: int) -> str:
    """Return the canonical text of a duration of at least 0: 5_400_000 is "1h30m", 0 is "0s"."""
    parts = []
    for unit, unit_ms in UNITS_MS.items():
        number, duration_ms = divmod(duration_ms, unit_ms)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def _what_to_write(text: str) -> str:
    grammar = (
        'write whole numbers with the units w d h m s ms, largest first, each once, as in "1h30m"'
    )
    if text != text.strip():
        return "no white space around a duration"
    if re.fullmatch(r"[0-9]+", text):
        return f'a number needs its unit: "{text}s" is seconds, "{text}m" minutes'
    if re.fullmatch(r"[0-9]*[.,][0-9]+[a-z]+", text):
        return f"no fractions: write 90m, not 1.5h; {grammar}"
    if re.fullmatch(r"[0-9]+(mo|y)", text):
        return "months and years have no fixed length: write days, or a cron expression"
    if text.upper().startswith("PT"):
        return f"ISO 8601 durations are not read; {grammar}"
    return grammar
