"""The one error of slot computation. Imports nothing."""

from __future__ import annotations

_SHOWN_CHARACTERS = 72


class ScheduleError(ValueError):
    """A schedule is refused. `field` and `value` say what, `expected` what would be right.

    `field` is "period", "offset", "expression", "time zone", or a field of a cron expression
    ("minute", "day of month", ...). The message is one line of printable ASCII, also for hostile
    text.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field = field
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.field} is {_shown(self.value)}: {self.expected}"


def _shown(value: object) -> str:
    text = ascii(value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value)
    if isinstance(value, str) and max(len(text), len(value)) > _SHOWN_CHARACTERS:
        return f"{text[:_SHOWN_CHARACTERS]}... ({len(value)} characters)"
    return text[:_SHOWN_CHARACTERS]
