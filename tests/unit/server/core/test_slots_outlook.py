"""Outlooks: how two instances tell whether their slots differ, with other zone databases (S5)."""

from __future__ import annotations

from random import Random

import pytest

from anarchon_server.core.slots import Cron, zone_named
from anarchon_server.core.slots.outlook import Outlook, first_difference, outlook_on
from anarchon_server.core.slots.zones import zone_names
from tests.unit.server.core.slot_chance import expression_around, window_at_a_change
from tests.unit.server.core.slot_oracle import seconds

DAY_MS = 86_400_000
SPAN_MS = 33 * DAY_MS

# What 2025b says of the autumn of 2026, in which Vancouver leaves its clocks alone.
VANCOUVER = "America/Vancouver -25200, -28800 from 1793523600000"


def ms(text: str) -> int:
    return seconds(text) * 1000


OCTOBER = ms("2026-10-15T00:00:00Z")


# ── The text ────────────────────────────────────────────────────────────────────────────────────


def test_s05_an_outlook_tells_databases_apart_where_slots_differ() -> None:
    new_year, november = ms("2026-01-01T00:00:00Z"), ms("2026-11-01T00:00:00Z")
    assert outlook_on("Europe/Athens", new_year, new_year + SPAN_MS) == "Europe/Athens +7200"
    assert outlook_on("Europe/Athens", november - 30 * DAY_MS, november) == (
        "Europe/Athens +10800, +7200 from 1792890000000"
    )
    assert outlook_on("America/Vancouver", OCTOBER, OCTOBER + SPAN_MS) == "America/Vancouver -25200"


@pytest.mark.parametrize("name", ["Africa/Casablanca", "Antarctica/Troll", "Pacific/Apia", "UTC"])
def test_s05_an_outlook_is_read_as_it_was_written(name: str) -> None:
    zone = zone_named(name)
    start = ms("2011-12-10T00:00:00Z")
    outlook = Outlook(outlook_on(name, start, start + 400 * DAY_MS))
    assert outlook.time_zone == name
    span = (start // 1000, start // 1000 + 400 * 86_400)
    assert list(outlook.changes(*span)) == list(zone.changes(*span))
    hours = range(*span, 3_600)
    assert [outlook.offset_s(at) for at in hours] == [zone.offset_s(at) for at in hours]


def test_s05_an_outlook_is_small() -> None:
    texts = [outlook_on(name, OCTOBER, OCTOBER + SPAN_MS) for name in zone_names()]
    assert max(map(len, texts)) < 80
    assert sum(map(len, texts)) < 24_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Europe/Athens",
        "Europe/Athens 7200",
        "Europe/Athens +7200,+10800 from 5",
        "Europe/Athens +7200, +10800",
        "Europe/Athens +7200\n",
        "Europe/Athens +٧٢٠٠",
        "Europe/Athens +" + "9" * 100_000,
    ],
)
def test_s05_what_is_no_outlook_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no outlook on a zone"):
        Outlook(text)


# ── What it means for slots ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("0 8 * * *", "2026-11-01T15:00:00Z"),
        ("30 1 * * *", "2026-11-02T08:30:00Z"),  # on the 1st the first 01:30 of two is the same
        ("0 0-23 * * *", "2026-11-01T09:00:00Z"),  # a fixed time that shows twice runs once
        ("0 */2 * * *", "2026-11-01T09:00:00Z"),
        ("* * * * 1-5", "2026-11-02T07:00:00Z"),
        ("0 9 9 11 *", "2026-11-09T16:00:00Z"),
        ("0 9 15 11 *", None),  # not within the 30 days
        ("0 0 1 1 *", None),
        ("0 * * * *", None),  # whatever the hour is called
        ("*/20 * * * *", None),
        ("*/7 * * * * *", None),
    ],
)
def test_s05_the_first_slot_that_differs_is_found(text: str, first: str | None) -> None:
    schedule = Cron(text, "America/Vancouver")
    found = first_difference(schedule, Outlook(VANCOUVER), OCTOBER, OCTOBER + 30 * DAY_MS)
    assert found == (None if first is None else ms(first))


def test_s05_slots_that_have_been_are_not_compared() -> None:
    schedule, there = Cron("0 8 * * *", "America/Vancouver"), Outlook(VANCOUVER)
    after = ms("2026-11-03T15:30:00Z")  # 08:00 here was at 15:00, there it is at 16:00
    assert first_difference(schedule, there, after, after + DAY_MS) == ms("2026-11-03T16:00:00Z")
    before = ms("2026-11-01T09:00:00Z") - 1
    assert first_difference(schedule, there, before - DAY_MS, before) is None


@pytest.mark.parametrize(
    ("text", "differs"),
    [
        ("0 * * * *", True),
        ("10,40 * * * *", False),
        ("10,40 0-23 * * *", False),
        ("*/30 * * * *", False),
        ("*/15 * * * *", False),
        ("*/20 * * * *", True),
        ("* * * * * *", False),
        ("* 0-29 * * * *", True),
        ("*/30 8-17 * * *", True),
    ],
)
def test_s05_half_an_hour_does_not_hide_behind_an_hourly_schedule(text: str, differs: bool) -> None:
    zone = zone_named("Australia/Lord_Howe")
    at = ms("2026-06-01T00:00:00Z")
    there = Outlook(f"{zone.name} {zone.offset_s(at // 1000) + 1_800:+}")
    found = first_difference(Cron(text, zone.name), there, at + DAY_MS, at + 31 * DAY_MS)
    assert (found is not None) == differs


def test_s05_where_too_many_slots_are_the_same_it_is_said_too_early_rather_than_not_at_all() -> (
    None
):
    schedule, there = Cron("* * * 1-20 * *", "America/Vancouver"), Outlook(VANCOUVER)
    found = first_difference(schedule, there, OCTOBER + 7 * DAY_MS, OCTOBER + 30 * DAY_MS)
    assert found == ms("2026-11-01T09:00:00Z")


def test_s05_with_its_own_outlook_a_schedule_is_the_same() -> None:
    chance = Random("the same database")
    zones = sorted(zone_names())
    for _ in range(100):
        window = window_at_a_change(chance, zones)
        schedule = Cron(window.expression, window.zone)
        start = window.start * 1000 // DAY_MS * DAY_MS
        after, until = start + DAY_MS, start + SPAN_MS
        there = Outlook(outlook_on(window.zone, start, until))
        assert first_difference(schedule, there, after, until) is None
        middle = window.start * 1000 + 2 * DAY_MS
        here = list(schedule.between(middle, middle + DAY_MS))
        assert list(schedule.elsewhere(there).between(middle, middle + DAY_MS)) == here


def test_s05_the_first_difference_is_that_of_the_two_lists() -> None:
    chance = Random("another database")
    differ = 0
    for _ in range(60):
        expression = expression_around(chance, chance.randrange(24), with_seconds=False)
        schedule = Cron(expression, "Europe/Athens")
        start = ms("2026-10-01T00:00:00Z") + chance.randrange(30) * DAY_MS
        change = start + chance.randrange(24, 20 * 24) * 3_600_000
        shift = chance.choice((3_600, 1_800, 7_200))
        there = Outlook(f"Europe/Athens +10800, {10_800 - shift:+} from {change}")
        after, until = start + DAY_MS, start + 31 * DAY_MS
        here = set(schedule.between(after - 1, until))
        elsewhere = set(schedule.elsewhere(there).between(after - 1, until))
        expected = min(here ^ elsewhere, default=None)
        differ += expected is not None
        assert first_difference(schedule, there, after, until) == expected, expression
    assert 15 < differ < 60
