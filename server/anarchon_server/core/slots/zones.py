"""Time zones as stretches of constant offset, from the pinned `tzdata` package and never from the
machine. Reads each zone's file once; imports the standard library and `tzdata` only.
"""

from __future__ import annotations

import importlib.resources
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

import tzdata

from anarchon_server.core.slots.errors import ScheduleError

TZDATA_VERSION: str = tzdata.IANA_VERSION
"""The version of the time zone database in use, such as "2026f"."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S = 86_400
_PROBING_S = 2 * _DAY_S
_LONGEST_NAME = 64
_HOW_TO_NAME = 'write an IANA name such as "Europe/Athens" or "UTC", in its exact spelling'


class Stretch(NamedTuple):
    """A span of time, `start_s` to before `end_s`, in which a zone's offset does not change.

    `change_s` is the offset after minus the offset before, of the change that `start_s` is, or
    else of the one in the day before it (where a year begins within a day of a change); 0 without
    one. `changed_at_s` is when that was.
    """

    start_s: int
    end_s: int
    offset_s: int
    change_s: int
    changed_at_s: int


class ClockChange(NamedTuple):
    """A zone's offset (local time minus UTC, in seconds) changes at `at_ms`."""

    at_ms: int
    before_s: int
    after_s: int


class Offsets(ABC):
    """Local time minus UTC, at every moment: as stretches in which it does not change."""

    __slots__ = ()

    @abstractmethod
    def stretch_at(self, second: int) -> Stretch:
        """Return the stretch that `second` (since the epoch) is in."""

    def offset_s(self, second: int) -> int:
        """Return local time minus UTC at `second`."""
        return self.stretch_at(second).offset_s

    def changes(self, after_s: int, upto_s: int) -> Iterator[ClockChange]:
        """Iterate over the changes later than `after_s` and not later than `upto_s`."""
        stretch = self.stretch_at(after_s)
        while stretch.end_s <= upto_s:
            before, stretch = stretch, self.stretch_at(stretch.end_s)
            if before.offset_s != stretch.offset_s:
                yield ClockChange(stretch.start_s * 1000, before.offset_s, stretch.offset_s)


class Zone(Offsets):
    """A time zone by its IANA name; get one with `zone_named`.

    Computed year by year when first asked about. Safe in several threads: a year is computed
    twice at worst, with the same result.
    """

    __slots__ = ("_info", "_recent", "_years", "name")

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self._info = info
        self._years: dict[int, tuple[list[int], list[Stretch]]] = {}
        self._recent = Stretch(0, 0, 0, 0, 0)

    def stretch_at(self, second: int) -> Stretch:
        """Return the stretch that `second` is in. A stretch ends with its year."""
        recent = self._recent
        if recent.start_s <= second < recent.end_s:
            return recent
        year = (_EPOCH + timedelta(seconds=second)).year
        known = self._years.get(year)
        if known is None:
            stretches = self._stretches_of(year)
            known = self._years[year] = ([stretch.start_s for stretch in stretches], stretches)
        starts, stretches = known
        self._recent = recent = stretches[bisect_right(starts, second) - 1]
        return recent

    def _stretches_of(self, year: int) -> list[Stretch]:
        year_start = _seconds(datetime(year, 1, 1, tzinfo=UTC))
        year_end = _seconds(datetime(year + 1, 1, 1, tzinfo=UTC))
        changes = self._changes(year_start - _DAY_S, year_end)
        offset = self._probe(year_start)
        start, change, changed_at = year_start, 0, year_start
        stretches = []
        for at, before, after in changes:
            if at > year_start:
                stretches.append(Stretch(start, at, offset, change, changed_at))
            start, change, changed_at, offset = max(at, year_start), after - before, at, after
        stretches.append(Stretch(start, year_end, offset, change, changed_at))
        return stretches

    def _changes(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return (instant, offset before, offset after) of the changes after `start`, before `end`.

        No zone changes twice within two days, so that looking once in two finds all; a test holds the
        pinned database to this.
        """
        changes = []
        before = self._probe(start)
        for early in range(start, end, _PROBING_S):
            late = min(early + _PROBING_S, end) - 1
            after = self._probe(late)
            if after != before:
                changes.append((self._bisect(early, late, before), before, after))
                before = after
        return changes

    def _bisect(self, early: int, late: int, before: int) -> int:
        """Return the first second from `early` to `late` whose offset is not `before`."""
        while early < late:
            middle = (early + late) // 2
            if self._probe(middle) == before:
                early = middle + 1
            else:
                late = middle
        return late

    def _probe(self, second: int) -> int:
        local = (_EPOCH + timedelta(seconds=second)).astimezone(self._info)
        offset = local.utcoffset()
        assert offset is not None
        return offset // timedelta(seconds=1)


def zone_named(name: str) -> Zone:
    """Return the zone of the pinned database with exactly this name. Raises `ScheduleError`."""
    if not isinstance(name, str):
        raise ScheduleError("time zone", name, _HOW_TO_NAME)
    if len(name) > _LONGEST_NAME:
        raise ScheduleError("time zone", name, f"at most {_LONGEST_NAME} characters")
    if name not in zone_names():
        raise ScheduleError("time zone", name, _what_to_write(name))
    return _load(name)


@cache
def zone_names() -> frozenset[str]:
    """Return the names of all zones of the pinned database."""
    names = importlib.resources.files(tzdata).joinpath("zones").read_text(encoding="utf-8")
    return frozenset(names.split())


@cache
def _load(name: str) -> Zone:
    path = importlib.resources.files(tzdata).joinpath("zoneinfo", *name.split("/"))
    with path.open("rb") as file:
        return Zone(name, ZoneInfo.from_file(file, key=name))


@cache
def _names_by_last_part() -> dict[str, str]:
    """Map the folded name, and its part after the last slash, to the name; longer names win."""
    names = sorted(zone_names(), key=len)
    parts = {name.rpartition("/")[2].casefold(): name for name in names}
    return parts | {name.casefold(): name for name in names}


def _what_to_write(name: str) -> str:
    if not name.strip():
        return f"an empty name is no zone: {_HOW_TO_NAME}"
    meant = _names_by_last_part().get(name.strip().replace("\\", "/").casefold())
    if meant is not None:
        return f'write "{meant}"'
    return f"not a zone of the time zone database {TZDATA_VERSION}: {_HOW_TO_NAME}"


def _seconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(seconds=1)
