"""Slot computation: a schedule and a span of time to slots (S5 to S9).

A slot is a whole number of milliseconds since 1970-01-01T00:00:00Z. Everything here is a pure
function of the schedule and of the pinned time zone database, so that all instances agree. Zone
files are read from the `tzdata` package, each once; otherwise the standard library only.
"""

from __future__ import annotations

from anarchon_server.core.slots.cron import Cron
from anarchon_server.core.slots.duration import format_duration, parse_duration_ms
from anarchon_server.core.slots.errors import ScheduleError
from anarchon_server.core.slots.every import Every
from anarchon_server.core.slots.unscheduled import Unscheduled
from anarchon_server.core.slots.zones import TZDATA_VERSION, ClockChange, Zone, zone_named

__all__ = [
    "TZDATA_VERSION",
    "ClockChange",
    "Cron",
    "Every",
    "Schedule",
    "ScheduleError",
    "Unscheduled",
    "Zone",
    "format_duration",
    "parse_duration_ms",
    "parse_schedule",
    "zone_named",
]

_LONGEST_WORD = 1_000

Schedule = Every | Cron | Unscheduled


def parse_schedule(text: str, time_zone: str = "", job: str | None = None) -> Every | Cron:
    """Return the schedule that `text` means: "10s" is a grid, anything else a cron expression.

    White space around is trimmed. A zone is for cron expressions; a grid has none and ignores it.
    Raises `ScheduleError`.
    """
    if not isinstance(text, str):
        raise ScheduleError("schedule", text, 'write a text such as "10s" or "0 8 * * *"')
    if _looks_like_a_grid(text):
        return Every(parse_duration_ms(text.strip(" \t\r\n")))
    return Cron(text, time_zone, job)


def _looks_like_a_grid(text: str) -> bool:
    """One word that begins with a digit: then the message about a duration helps more."""
    words = text[:_LONGEST_WORD].split()
    return len(words) == 1 and words[0][0] in "0123456789"
