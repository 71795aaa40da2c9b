"""Slots against a tick-by-tick oracle that shares no code with them, and their laws (S5, S8).

`make slots` (`ANARCHON_SLOT_WINDOWS=30000`) looks at more windows, and at every year of every zone;
the default takes a few seconds.
"""

from __future__ import annotations

import io
import os
import struct
from itertools import pairwise
from random import Random
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anarchon_server.core.slots import Cron, Every, ScheduleError, zone_named
from anarchon_server.core.slots.zones import Zone, zone_names
from tests.unit.server.core.slot_chance import Window, expression_around, window_at_a_change
from tests.unit.server.core.slot_oracle import (
    DAY,
    END,
    OracleCron,
    oracle_slots,
    oracle_zone,
    seconds,
)

ZONES = sorted(zone_names())
WINDOWS = int(os.environ.get("ANARCHON_SLOT_WINDOWS", "1000"))
BATCHES = 10
THOROUGH = WINDOWS >= 20_000

# Seven common years and seven leap years, each beginning on another weekday.
FOURTEEN_YEARS = [
    seconds(f"{year}-01-01T00:00:00Z") // DAY + day
    for year in (2001, 2002, 2003, 2005, 2006, 2009, 2010, *range(2000, 2028, 4))
    for day in range(366 if year % 4 == 0 else 365)
]

chances = st.integers(0, 2**64).map(Random)
windows = chances.map(lambda chance: window_at_a_change(chance, ZONES))
instants = st.integers(0, END * 1000 - 1)


def cron_of(window: Window) -> Cron | None:
    """None: no date matches, which the oracle confirms by what it does not find."""
    try:
        return Cron(window.expression, window.zone)
    except ScheduleError as refused:
        if "never fires" in refused.expected and not any(meaning(window.expression)[-1]):
            return None
        raise


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_s08_slots_around_clock_changes_are_the_oracles(batch: int) -> None:
    chance = Random(f"slots {batch}")
    for _ in range(WINDOWS // BATCHES):
        window = window_at_a_change(chance, ZONES)
        schedule = cron_of(window)
        if schedule is None:
            continue
        start, end = window.start * 1000, window.end * 1000
        expected = [slot * 1000 for slot in oracle_slots(*window)]
        assert list(schedule.between(start, end)) == expected, window
        backwards = []
        slot = schedule.previous_upto(end)
        while slot is not None and slot > start:
            backwards.append(slot)
            slot = schedule.previous_upto(slot - 1)
        assert backwards[::-1] == expected, window


@pytest.mark.parametrize(
    ("expression", "zone", "near"),
    [
        # Vostok went back by 7 h: over the limit, so fixed times ran twice.
        ("0 1-21/18 * * *", "Antarctica/Vostok", "1994-01-31T23:00:00Z"),
        ("30 22/7 * * *", "Antarctica/Vostok", "1994-01-31T23:00:00Z"),
        # A gap of 24 h, and one of 23 h.
        ("0 */5 * * *", "Pacific/Apia", "2011-12-30T10:00:00Z"),
        ("0 1,9 30 12 *", "Pacific/Apia", "2011-12-30T10:00:00Z"),
        ("15 2,22 * * *", "Pacific/Kwajalein", "1993-08-21T12:00:00Z"),
        # Exactly three hours, in both directions.
        ("30 2 * * *", "Antarctica/Casey", "2010-03-04T15:00:00Z"),
        ("30 3 * * *", "Antarctica/Casey", "2009-10-17T18:00:00Z"),
        # A gap that ends on another day, month and year.
        ("44 0,23 * * *", "Asia/Singapore", "1981-12-31T16:00:00Z"),
        # The fold begins a minute after midnight and shows the last hour of October again.
        ("30 23 31 10 *", "America/St_Johns", "2009-11-01T02:30:00Z"),
        # Offsets with seconds, and so ticks of one second.
        ("*/20 * * * *", "Africa/Monrovia", "1972-01-07T00:44:00Z"),
        ("30 0 7 1 *", "Africa/Monrovia", "1972-01-07T00:44:00Z"),
    ],
)
def test_s08_odd_changes_are_the_oracles(expression: str, zone: str, near: str) -> None:
    start, end = seconds(near) - 30 * 3600, seconds(near) + 30 * 3600
    expected = [slot * 1000 for slot in oracle_slots(expression, zone, start, end)]
    schedule = Cron(expression, zone)
    assert list(schedule.between(start * 1000, end * 1000)) == expected
    upto = [schedule.previous_upto(slot) for slot in expected]
    assert upto == expected


# ── Zones ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(1_200)
def test_zones_change_when_the_files_say() -> None:
    """In years drawn for each zone; in all years where the windows are many."""
    for name in ZONES:
        zone, judge = zone_named(name), oracle_zone(name)
        chance = Random(name)
        years = range(1970, 2200) if THOROUGH else [chance.randrange(1970, 2100) for _ in range(4)]
        for year in years:
            start, end = seconds(f"{year}-01-01T00:00:00Z"), seconds(f"{year + 1}-01-01T00:00:00Z")
            found = [
                (change.at_ms // 1000, change.before_s, change.after_s)
                for change in zone.changes(start - 1, end - 1)
            ]
            assert found == [c for c in judge.changes if start <= c[0] < end], (name, year)
            assert zone.offset_s(start) == judge.offset(start), (name, year)


def test_no_zone_changes_twice_within_two_days() -> None:
    """`Zone` looks at the offset every two days, and would miss two changes in between."""
    for name in ZONES:
        changes = [at for at, _, _ in oracle_zone(name).changes if at > -DAY]
        assert all(later - earlier > 2 * DAY for earlier, later in pairwise(changes)), name


def test_zones_come_from_the_package_and_are_all_readable() -> None:
    assert len(ZONES) > 590
    for name in (
        "posix/Europe/Athens",
        "right/Europe/Athens",
        "localtime",
        "Factory/",
        "posixrules",
    ):
        with pytest.raises(ScheduleError):
            zone_named(name)


def test_s08_a_change_just_before_the_year_ends_counts_in_the_new_one() -> None:
    """No zone has such a fold yet: from 00:30 back to 23:30 of 31 December 2001, in UTC."""
    at = seconds("2002-01-01T00:00:00Z") - 1_800
    zone = Zone("Test", ZoneInfo.from_file(io.BytesIO(tzif(at, 3_600, 0))))
    schedule = Cron("45 23,0 * * *")
    schedule._zone = zone
    slots = list(schedule.between((at - 7_200) * 1000, (at + 7_200) * 1000))
    # 23:45 shows before the change and after it; 00:45 after it only.
    assert slots == [(at - 2_700) * 1000, (at + 4_500) * 1000]
    assert [schedule.previous_upto(slot - 1) for slot in slots[1:]] == slots[:-1]
    assert schedule.previous_upto((at + 4_000) * 1000) == slots[0]
    stretch = zone.stretch_at(at + 1_800)
    assert (stretch.start_s, stretch.changed_at_s, stretch.change_s) == (at + 1_800, at, -3_600)


def tzif(at: int, before: int, after: int) -> bytes:
    """A zone file with one change."""
    types = struct.pack(">lBBlBB", before, 0, 0, after, 0, 4) + b"BEF\0AFT\0"
    block = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 0, 2, 8) + types
    full = (
        struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 1, 2, 8)
        + struct.pack(">qB", at, 1)
        + types
    )
    return block + full + b"\n\n"


# ── Laws ────────────────────────────────────────────────────────────────────────────────────────


@given(window=windows)
@settings(max_examples=200, deadline=None)
def test_s05_slots_are_the_oracles(window: Window) -> None:
    schedule = cron_of(window)
    if schedule is not None:
        expected = [slot * 1000 for slot in oracle_slots(*window)]
        assert list(schedule.between(window.start * 1000, window.end * 1000)) == expected


@given(window=windows, chance=chances)
@settings(max_examples=300, deadline=None)
def test_s05_the_start_does_not_matter(window: Window, chance: Random) -> None:
    schedule = cron_of(window)
    if schedule is None:
        return
    at = chance.randrange(window.start * 1000, window.end * 1000)
    # An object that has been asked other things answers as a new one does.
    for _ in range(3):
        schedule.next_after(chance.randrange(END * 1000))
        schedule.previous_upto(chance.randrange(END * 1000))
    fresh = Cron(window.expression, window.zone)
    assert schedule.next_after(at) == fresh.next_after(at)
    assert schedule.previous_upto(at) == fresh.previous_upto(at)
    # From anywhere in the gap before a slot, the slot is next.
    slot = schedule.next_after(at)
    if slot is not None:
        between = chance.randint(at, slot - 1)
        assert schedule.next_after(between) == slot


@given(window=windows, at=instants, nearby=st.booleans(), chance=chances)
@settings(max_examples=300, deadline=None)
def test_s05_next_and_previous_mirror_each_other(
    window: Window, at: int, nearby: bool, chance: Random
) -> None:
    schedule = cron_of(window)
    if schedule is None:
        return
    if nearby:
        at = chance.randrange(window.start * 1000, window.end * 1000)
    slot = schedule.next_after(at)
    if slot is not None:
        assert slot > at
        assert slot % 1000 == 0
        assert schedule.is_slot(slot)
        assert schedule.previous_upto(slot) == slot
        before = schedule.previous_upto(slot - 1)
        assert before is None or before <= at
    earlier = schedule.previous_upto(at)
    if earlier is not None:
        assert earlier <= at
        assert schedule.is_slot(earlier)
        following = schedule.next_after(earlier)
        assert following is None or following > at


@given(window=windows)
@settings(max_examples=200, deadline=None)
def test_s05_between_is_stepping(window: Window) -> None:
    schedule = cron_of(window)
    if schedule is None:
        return
    start, end = window.start * 1000, window.end * 1000
    stepped = []
    slot = schedule.next_after(start)
    while slot is not None and slot <= end:
        stepped.append(slot)
        slot = schedule.next_after(slot)
    assert list(schedule.between(start, end)) == stepped
    assert stepped == sorted(set(stepped))


@given(
    period=st.integers(100, 366 * DAY * 1000),
    share=st.floats(0, 1, exclude_max=True),
    at=st.integers(-(10**15), 10**15),
)
def test_s06_grids_keep_the_same_laws(period: int, share: float, at: int) -> None:
    offset = int(share * period)
    grid = Every(period, offset)
    slot, before = grid.next_after(at), grid.previous_upto(at)
    assert slot - period == before <= at < slot
    assert (slot - offset) % period == 0
    assert list(grid.between(before - 1, slot)) == [before, slot]


@given(first=chances, second=chances)
@settings(max_examples=50, deadline=None)
def test_s05_identities_are_equal_exactly_for_one_schedule(first: Random, second: Random) -> None:
    one = expression_around(first, 3, with_seconds=first.random() < 0.3)
    # Often a near relative, so that equal ones come up.
    other = (
        respelled(one, second)
        if second.random() < 0.6
        else expression_around(second, 3, with_seconds=False)
    )
    try:
        identities = [Cron(text, "Europe/Athens").identity for text in (one, other)]
    except ScheduleError:
        return
    judged = [meaning(text) for text in (one, other)]
    assert (identities[0] == identities[1]) == (judged[0] == judged[1]), (one, other)


def respelled(expression: str, chance: Random) -> str:
    """Another spelling of the schedule or of one beside it."""
    fields = expression.split()
    at = chance.randrange(len(fields))
    changed = {
        "0-23": "*",
        "*": "*/1",
        "0": "00",
        "?": "*",
        "*/2": "0,2,4,6,8,10,12,14,16,18,20,22",
    }.get(fields[at], fields[at])
    if at == len(fields) - 1 and changed.isdigit():
        changed = str((int(changed) % 7 + 7 * chance.randrange(2)) % 8)
    fields[at] = changed
    return " ".join(["0", *fields] if len(fields) == 5 and chance.random() < 0.3 else fields)


def meaning(expression: str) -> tuple[object, object, object, object, list[bool]]:
    """Class, times of day, and the dates of the fourteen calendars, as the oracle reads them."""
    judge = OracleCron(expression)
    dates = [judge.matches_date(day) for day in FOURTEEN_YEARS]
    return judge.wildcard, judge.seconds, judge.minutes, judge.hours, dates
