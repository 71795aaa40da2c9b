"""The text of a cron expression to the times it names: our own strict grammar, with a message for
each refusal that says what to write instead. Imports the standard library only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from anarchon_server.core.slots.errors import ScheduleError

LONGEST_EXPRESSION = 1_000

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")

LAST = -1
"""As the n of "the n-th weekday of the month": the last one."""

SUNDAY = 7
"""A second number for weekday 0, so that a range can end on it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One of the six fields: its name and the values it may take, `low` to `high`.

    `hashed_high` ends the values that `H` is drawn from.
    """

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    hashed_high: int = 0

    @property
    def size(self) -> int:
        """How many values there are; a step must be smaller."""
        return self.high - self.low + 1

    @property
    def examples(self) -> str:
        """How values are written, for messages."""
        names = f" or {self.names[0]} to {self.names[-1]}" if self.names else ""
        return f"{self.low} to {SUNDAY if self is WEEKDAY else self.high}{names}"


SECOND = Field("second", 0, 59, hashed_high=59)
MINUTE = Field("minute", 0, 59, hashed_high=59)
HOUR = Field("hour", 0, 23, hashed_high=23)
# H stays below 29, so that it comes in every month.
DAY = Field("day of month", 1, 31, hashed_high=28)
MONTH = Field("month", 1, 12, MONTH_NAMES, hashed_high=12)
WEEKDAY = Field("day of week", 0, 6, WEEKDAY_NAMES, hashed_high=6)


@dataclass(frozen=True, slots=True)
class Times:
    """What an expression names. Sets of small numbers are bit masks: bit n stands for n.

    `last_day` adds the month's last day to `days`. `near_weekday` is the weekday nearest to that
    day of the month (`LAST`: the month's last weekday) and then the only one. `nth_weekdays` are
    pairs of weekday and n (1 to 5, or `LAST`), and then `weekdays` is empty. A date must match
    both day fields where `both_days`, else either; `contested` marks expressions that other
    programs read otherwise there: both day fields set, one with a starred step. `wildcard` is the
    class for clock changes: the second, minute or hour field begins with a star.
    """

    seconds: int
    minutes: int
    hours: int
    days: int
    months: int
    weekdays: int
    last_day: bool = False
    near_weekday: int | None = None
    nth_weekdays: tuple[tuple[int, int], ...] = ()
    both_days: bool = True
    contested: bool = False
    wildcard: bool = False


def parse_expression(expression: str, job: str | None = None) -> Times:
    """Return what `expression` names. `H` is drawn from the name `job`, and refused without one.

    Raises `ScheduleError`, in microseconds also for hostile text.
    """
    texts = _split(expression)
    for field, text in zip((SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY), texts, strict=True):
        _refuse_foreign(field, text)
    second, minute, hour, day, month, weekday = texts
    both_days = _starred(day) or _starred(weekday)
    times = Times(
        seconds=_values(SECOND, second, job),
        minutes=_values(MINUTE, minute, job),
        hours=_values(HOUR, hour, job),
        days=0,
        months=_values(MONTH, month, job),
        weekdays=0,
        both_days=both_days,
        contested=both_days and not {day, weekday} & {"*", "?"},
        wildcard=_starred(second) or _starred(minute) or _starred(hour),
    )
    return _with_weekdays(_with_days(times, day, job), day, weekday, job)


# ── The whole text ──────────────────────────────────────────────────────────────────────────────

_FIELDS_WANTED = (
    "write five fields (minute, hour, day of month, month, day of week) "
    "or six with seconds first, separated by spaces"
)


def _split(expression: str) -> list[str]:
    if not isinstance(expression, str):
        raise ScheduleError("expression", expression, 'write a text such as "0 8 * * *"')
    if len(expression) > LONGEST_EXPRESSION:
        raise ScheduleError("expression", expression, f"at most {LONGEST_EXPRESSION} characters")
    if not expression.isascii():
        raise ScheduleError(
            "expression", expression, "only ASCII digits, letters, signs and spaces"
        )
    text = expression.strip(" \t\r\n")
    if text.startswith("@"):
        text = _alias(text)
    if "TZ=" in text:
        raise ScheduleError(
            "expression", text, "the zone is not part of the text: give it as the time zone"
        )
    texts = [part for part in re.split(r"[ \t]+", text) if part]
    if len(texts) == 5:
        return ["0", *texts]
    if len(texts) == 6:
        return texts
    raise ScheduleError("expression", expression, _wrong_count(text, len(texts)))


def _alias(text: str) -> str:
    if text.casefold().startswith("@every"):
        raise ScheduleError(
            "expression", text, 'a grid is a schedule of its own: every("10s") in code, 10s as text'
        )
    try:
        return ALIASES[text.casefold()]
    except KeyError:
        raise ScheduleError(
            "expression", text, f"the aliases are {', '.join(ALIASES)}, each alone"
        ) from None


def _wrong_count(text: str, count: int) -> str:
    if f"@{text.casefold()}" in ALIASES:
        return f'write "@{text.casefold()}"'
    if count == 7:
        return f"7 fields, and there is no year field: {_FIELDS_WANTED}"
    return f"{count} field{'' if count == 1 else 's'}: {_FIELDS_WANTED}"


# ── One field ───────────────────────────────────────────────────────────────────────────────────

_ATOM = r"[0-9]{1,2}|[A-Za-z]{3}"
_ITEM = re.compile(rf"(?P<first>{_ATOM})(?:-(?P<last>{_ATOM}))?(?:/(?P<step>[0-9]{{1,2}}))?")
_STAR = re.compile(r"\*(?:/(?P<step>[0-9]{1,2}))?")
_HASHED = re.compile(r"[Hh](?:/(?P<step>[0-9]{1,2}))?")
_NEAR_WEEKDAY = re.compile(r"(?P<day>[0-9]{1,2}|[Ll])[Ww]")
_NTH_WEEKDAY = re.compile(rf"(?P<weekday>{_ATOM})(?:#(?P<nth>[0-9])|(?P<last>[Ll]))")


def _starred(text: str) -> bool:
    return text[0] in "*?"


def _refuse_foreign(field: Field, text: str) -> None:
    """Refuse what other programs read and we do not, each with its own message."""
    if text[0] in "Rr" and not text[1:2].isalpha():
        raise ScheduleError(
            field.name, text, "R is random, and every instance would draw another: write H"
        )
    if text[0] in "Hh" and "(" in text:
        raise ScheduleError(field.name, text, "H takes no range: write H, H/n or numbers")
    if text == "?" and field not in (DAY, WEEKDAY):
        raise ScheduleError(field.name, text, "? is for the two day fields: write *")


def _values(field: Field, text: str, job: str | None) -> int:
    """Return the mask of a field without L, W and #."""
    if text == "?":
        text = "*"
    if star := _STAR.fullmatch(text):
        return _mask(field, field.low, field.high, _step(field, text, star["step"]))
    if hashed := _HASHED.fullmatch(text):
        return _hashed_values(field, text, hashed["step"], job)
    mask = 0
    for item in text.split(","):
        mask |= _item_values(field, text, item)
    return mask


def _item_values(field: Field, text: str, item: str) -> int:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ScheduleError(field.name, text, _what_is_wrong(field, text, item))
    first = _value(field, text, match["first"])
    if match["last"] is None:
        if match["step"] is None:
            return 1 << (first % 7 if field is WEEKDAY else first)
        if field is WEEKDAY:
            raise ScheduleError(
                field.name, text, f"readers disagree on {item}: write its days as a list"
            )
        return _mask(field, first, field.high, _step(field, text, match["step"]))
    last = _value(field, text, match["last"], ends_range=True)
    if _is_one_value(field, match["first"], first, last):
        raise ScheduleError(
            field.name, text, f"{item} begins where it ends: write {match['first']} or *"
        )
    return _range_values(field, text, item, first, last, match["step"])


def _is_one_value(field: Field, first_text: str, first: int, last: int) -> bool:
    if field is not WEEKDAY:
        return first == last
    # 0-7 and 0-SUN are the whole week, as everywhere; SUN-SUN and 7-0 could be a day or a week.
    whole_week = first_text.isdigit() and first == 0 and last == SUNDAY
    return first % 7 == last % 7 and not whole_week


def _range_values(
    field: Field, text: str, item: str, first: int, last: int, step_text: str | None
) -> int:
    if first < last:
        return _mask(field, first, last, _step(field, text, step_text))
    if step_text is not None:
        raise ScheduleError(
            field.name, text, f"{item} runs backwards and has a step: write its values as a list"
        )
    if field is DAY:
        raise ScheduleError(
            field.name,
            text,
            f"{item} runs backwards, and months differ in length: "
            f"write {first}-31,1{f'-{last}' if last > 1 else ''}",
        )
    return _mask(field, first, field.high, 1) | _mask(field, field.low, last, 1)


def _mask(field: Field, first: int, last: int, step: int) -> int:
    mask = 0
    for value in range(first, last + 1, step):
        mask |= 1 << (value % 7 if field is WEEKDAY else value)
    return mask


def _step(field: Field, text: str, step_text: str | None) -> int:
    step = 1 if step_text is None else int(step_text)
    if step == 0:
        raise ScheduleError(field.name, text, "a step is at least 1")
    if step >= field.size:
        raise ScheduleError(field.name, text, _too_wide(field, step))
    return step


def _too_wide(field: Field, step: int) -> str:
    units = {"second": "s", "minute": "m", "hour": "h"}
    wide = f"a step is smaller than the field's {field.size} values"
    if field.name in units:
        return f'{wide}: for a period write every("{step}{units[field.name]}")'
    return f"{wide}: write the values as a list"


def _value(field: Field, text: str, atom: str, *, ends_range: bool = False) -> int:
    """Return the number that `atom` means; Sunday is 7 where it ends a range or is so written."""
    if not atom.isdigit():
        if atom.upper() not in field.names:
            raise ScheduleError(field.name, text, _unknown_name(field, atom))
        value = field.names.index(atom.upper()) + field.low
        return SUNDAY if ends_range and field is WEEKDAY and value == 0 else value
    value = int(atom)
    if not field.low <= value <= (SUNDAY if field is WEEKDAY else field.high):
        raise ScheduleError(field.name, text, f"{value} is outside {field.examples}")
    return value


def _unknown_name(field: Field, atom: str) -> str:
    for other in (MONTH, WEEKDAY):
        if atom.upper() in other.names:
            return f"{atom} belongs in the {other.name} field; here write {field.examples}"
    return f"{atom} is not a value of this field: write {field.examples}"


def _what_is_wrong(field: Field, text: str, item: str) -> str:
    if not item:
        return "a list has an empty place: write values with one comma between them"
    if "*" in item:
        return _wrong_star(item, text)
    if field is WEEKDAY and re.fullmatch(r"[0-9]{4}|[A-Za-z_]{4,}(/.*)?", item):
        return f"write {field.examples}; no year, user name or zone comes after this field"
    if re.fullmatch(r"[Hh](/[0-9]+)?", item):
        return "H stands alone in its field, without a list or a range"
    if re.fullmatch(r"[0-9]{3,}", item):
        return f"a value has one or two digits: write {field.examples}"
    if "#" in item or re.fullmatch(r"[A-Za-z0-9]*[LlWw]|[Ll].+", item):
        return _wrong_special(field)
    if item.startswith("/"):
        return f"nothing stands before the step: write *{item}"
    if "/" in item:
        return "a step is one whole number after a star, a value or a range, as in */5 or 10-40/5"
    if item.isalpha():
        return f"{item} is not a value of this field: write {field.examples}"
    return (
        f"write {field.examples}, ranges as in {field.low + 1}-{field.low + 5}, and lists of them"
    )


def _wrong_star(item: str, text: str) -> str:
    if item.startswith("*/"):
        if "," in text:
            return f"a star stands alone in its field: write the values of {item} as numbers"
        return "a step is one whole number of one or two digits, as in */5"
    if "," in text:
        return "a star stands alone in its field: * already names every value"
    return "a star stands alone or begins a step, as in * or */5"


def _wrong_special(field: Field) -> str:
    if field is DAY:
        return (
            "the special days are L (last day), 15W (weekday nearest the 15th), LW (last weekday)"
        )
    if field is WEEKDAY:
        return "the special weekdays are 5#2 (second Friday) and 5L (last Friday), without a step"
    return f"L, W and # are for the day fields: write {field.examples}"


# ── H ───────────────────────────────────────────────────────────────────────────────────────────


def _hashed_values(field: Field, text: str, step_text: str | None, job: str | None) -> int:
    if not job:
        raise ScheduleError(field.name, text, "H is drawn from the job's name: name the job")
    if step_text is None:
        width = field.hashed_high - field.low + 1
        return 1 << (field.low + hashed(job, field) % width)
    step = _step(field, text, step_text)
    first = field.low + hashed(job, field) % min(step, field.hashed_high - field.low + 1)
    return _mask(field, first, field.high, step)


def hashed(job: str, field: Field) -> int:
    """Return the number that H stands for: the same on every instance, spread over job names."""
    digest = hashlib.sha256(f"{job}\n{field.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


# ── The day fields ──────────────────────────────────────────────────────────────────────────────


def _with_days(times: Times, text: str, job: str | None) -> Times:
    if near := _NEAR_WEEKDAY.fullmatch(text):
        day = LAST if near["day"] in "Ll" else _value(DAY, text, near["day"])
        return replace(times, near_weekday=day)
    items = text.split(",")
    numbers = [item for item in items if item not in ("L", "l")]
    if len(items) > 1 and any(_NEAR_WEEKDAY.fullmatch(item) for item in items):
        raise ScheduleError(DAY.name, text, "15W and LW stand alone in their field")
    last_day = len(numbers) < len(items)
    if not numbers:
        return replace(times, last_day=True)
    if last_day:
        for number in numbers:
            times = replace(times, days=times.days | _item_values(DAY, text, number))
        return replace(times, last_day=True)
    return replace(times, days=_values(DAY, text, job))


def _with_weekdays(times: Times, day: str, text: str, job: str | None) -> Times:
    if "#" not in text and not re.search(r"[0-9A-Za-z][Ll]", text):
        return replace(times, weekdays=_values(WEEKDAY, text, job))
    nth_weekdays = set()
    for item in text.split(","):
        match = _NTH_WEEKDAY.fullmatch(item)
        if match is None:
            raise ScheduleError(WEEKDAY.name, text, _wrong_nth(item))
        nth = LAST if match["last"] else int(match["nth"])
        if nth == 0 or nth > 5:
            raise ScheduleError(WEEKDAY.name, text, "a weekday comes 1 to 5 times in a month")
        nth_weekdays.add((_value(WEEKDAY, text, match["weekday"]) % 7, nth))
    if day not in ("*", "?"):
        raise ScheduleError(
            WEEKDAY.name, text, "# and L need * as day of month: elsewhere their meaning differs"
        )
    return replace(times, nth_weekdays=tuple(sorted(nth_weekdays)))


def _wrong_nth(item: str) -> str:
    if _ITEM.fullmatch(item):
        return "5#2 and 5L do not mix with plain weekdays: use two jobs"
    return _wrong_special(WEEKDAY)
