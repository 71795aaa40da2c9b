"""Grids and cron expressions: the shared vectors, refusals, identities, words (S5 to S9, S12)."""

from __future__ import annotations

import copy
import json
import pickle
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from anarchon_server.core.slots import (
    TZDATA_VERSION,
    ClockChange,
    Cron,
    Every,
    ScheduleError,
    format_duration,
    parse_duration_ms,
    parse_schedule,
    zone_named,
)
from anarchon_server.core.slots.grammar import parse_expression
from tests.unit.server.core.slot_oracle import seconds

VECTORS = Path(__file__).parents[3] / "conformance" / "vectors"
DAY_MS = 86_400_000
HORIZON_MS = 7_258_118_400_000


def vectors(name: str) -> dict[str, list[Any]]:
    loaded: dict[str, list[Any]] = json.loads((VECTORS / f"{name}.json").read_text("utf-8"))
    return loaded


def by_id(case: Any) -> str:
    return str(case["id"]) if isinstance(case, dict) and "id" in case else repr(case)[:40]


def ms(text: str) -> int:
    return seconds(text) * 1000


# ── The shared vectors ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", vectors("durations")["valid"], ids=by_id)
def test_a_duration_is_read_and_written(case: dict[str, Any]) -> None:
    assert parse_duration_ms(case["text"]) == case["duration_ms"]
    assert format_duration(case["duration_ms"]) == case["canonical"]
    assert parse_duration_ms(case["canonical"]) == case["duration_ms"]


@pytest.mark.parametrize("case", vectors("durations")["invalid"], ids=by_id)
def test_a_bad_duration_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError) as refused:
        parse_duration_ms(case["text"])
    assert refused.value.field == "duration"
    assert refused.value.expected == case["why"]


@pytest.mark.parametrize("case", vectors("durations")["invalid_periods"], ids=by_id)
def test_s06_a_period_outside_100_ms_to_366_days_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError) as refused:
        Every(parse_duration_ms(case["text"]))
    assert refused.value.field == "period"
    assert refused.value.expected == case["why"]


@pytest.mark.parametrize("case", vectors("grids")["cases"], ids=by_id)
def test_s06_grid_slots_are_as_the_vectors_say(case: dict[str, Any]) -> None:
    check_slots(parse_schedule(case["schedule"]), case)


@pytest.mark.parametrize("case", vectors("crons")["cases"], ids=by_id)
def test_s07_s08_cron_slots_are_as_the_vectors_say(case: dict[str, Any]) -> None:
    check_slots(parse_schedule(case["schedule"], case["time_zone"]), case)


def check_slots(schedule: Every | Cron, case: dict[str, Any]) -> None:
    """Forwards, backwards, as a list, and one by one (S5)."""
    after, slots = case["after"], case["slots"]
    assert [schedule.next_after(before) for before in (after, *slots[:-1])] == slots
    assert [schedule.previous_upto(later - 1) for later in slots[1:]] == slots[:-1]
    assert [schedule.previous_upto(slot) for slot in slots] == slots
    assert list(schedule.between(after, slots[-1])) == slots
    assert all(schedule.is_slot(slot) for slot in slots)
    assert not any(schedule.is_slot(slot + 1) for slot in slots)


@pytest.mark.parametrize("case", vectors("refused")["cases"], ids=by_id)
def test_s07_what_is_not_in_the_grammar_is_refused_by_name(case: dict[str, Any]) -> None:
    def read() -> None:
        # An empty zone is UTC to `Cron`, and no name of a zone.
        zone_named(case["time_zone"])
        Cron(case["expression"], case["time_zone"])

    with pytest.raises(ScheduleError) as refused:
        read()
    assert refused.value.field == case["field"]
    assert refused.value.expected == case["why"]
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("spellings", vectors("identities")["same"], ids=by_id)
def test_s05_spellings_of_one_schedule_share_an_identity(spellings: list[str]) -> None:
    schedules = [Cron(text, "Europe/Athens") for text in spellings]
    assert len({schedule.identity for schedule in schedules}) == 1
    assert len(set(schedules)) == 1


@pytest.mark.parametrize("pair", vectors("identities")["different"], ids=by_id)
def test_s05_schedules_that_only_look_alike_differ(pair: list[str]) -> None:
    first, second = (Cron(text, "Europe/Athens") for text in pair)
    assert first.identity != second.identity
    assert first != second


@pytest.mark.parametrize("case", vectors("hashed")["cases"], ids=by_id)
def test_s07_h_is_drawn_from_the_jobs_name(case: dict[str, Any]) -> None:
    times = parse_expression(case["expression"], case["job"])
    for name in ("seconds", "minutes", "hours", "days", "months", "weekdays"):
        mask = getattr(times, name)
        assert numbers(case[name]) == {n for n in range(60) if mask >> n & 1}, name


def numbers(text: str) -> set[int]:
    found: set[int] = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


# ── Grids ───────────────────────────────────────────────────────────────────────────────────────


def test_s06_an_offset_moves_the_grid() -> None:
    grid = Every(10_000, 2_500)
    assert grid.next_after(0) == 2_500
    assert grid.next_after(2_500) == 12_500
    assert grid.previous_upto(2_499) == -7_500
    assert list(grid.between(-10_000, 20_000)) == [-7_500, 2_500, 12_500]
    assert grid.is_slot(12_500)
    assert not grid.is_slot(10_000)
    assert grid.shortest_gap_ms(0) == 10_000
    assert grid.identity == "every 10s offset 2s500ms"
    assert grid.description == "every 10s, counted from 2s500ms after 1970-01-01 00:00 UTC"
    assert grid.remark(12_500) == ""
    assert grid.notes == ()


def test_s05_one_grid_has_one_identity() -> None:
    assert parse_schedule("90m").identity == parse_schedule("1h30m").identity == "every 1h30m"
    assert Every(5_400_000) == parse_schedule("90m")
    assert Every(5_400_000, 1) != Every(5_400_000)
    assert Every(1_000).description == "every 1s, counted from 1970-01-01 00:00 UTC"


@pytest.mark.parametrize(
    ("period", "offset", "field"),
    [
        (99, 0, "period"),
        (-10_000, 0, "period"),
        (0, 0, "period"),
        (366 * DAY_MS + 1, 0, "period"),
        (10**40, 0, "period"),
        (1_000.0, 0, "period"),
        (True, 0, "period"),
        ("10s", 0, "period"),
        (None, 0, "period"),
        (1_000, 1_000, "offset"),
        (1_000, -1, "offset"),
        (1_000, 0.5, "offset"),
    ],
)
def test_s06_a_bad_grid_is_refused(period: Any, offset: Any, field: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        Every(period, offset)
    assert refused.value.field == field


# ── Cron ────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_zone_means_utc() -> None:
    schedule = Cron("0 8 * * *")
    assert schedule.time_zone == "UTC"
    assert schedule == Cron("0 8 * * *", "UTC")
    assert schedule != Cron("0 8 * * *", "Europe/Athens")
    assert schedule != "0 8 * * *"
    assert repr(schedule) == "Cron('0 8 * * *', 'UTC')"
    assert repr(Cron("H 8 * * *", job="sync")) == "Cron('H 8 * * *', 'UTC', job='sync')"


def test_s05_the_identity_names_class_times_days_and_zone() -> None:
    assert Cron("*/30 9-17 * * 1-5", "Europe/Athens").identity == (
        "cron wildcard 0 0,30 9-17 * 1-12 1-5 Europe/Athens"
    )
    assert Cron("0 8 1,15 * *").identity == "cron fixed 0 0 8 1,15 1-12 * UTC"
    assert Cron("0 8 13 * 5").identity.startswith("cron fixed 0 0 8 days:")
    assert TZDATA_VERSION not in Cron("0 8 * * *").identity


def test_cron_slots_are_from_1970_to_2199() -> None:
    schedule = Cron("0 0 1 1 *")
    first, last = 0, ms("2199-01-01T00:00:00Z")
    assert schedule.next_after(-(10**18)) == first
    assert schedule.previous_upto(first) == first
    assert schedule.previous_upto(-1) is None
    assert schedule.previous_upto(10**18) == last
    assert schedule.next_after(last - 1) == last
    assert schedule.next_after(last) is None
    assert not schedule.is_slot(HORIZON_MS)
    assert list(schedule.between(last, 10**18)) == []
    # West of Greenwich the first of January 1970 began after the epoch, east of it before.
    assert Cron("0 0 1 1 *", "America/New_York").next_after(-1) == ms("1970-01-01T05:00:00Z")
    assert Cron("0 0 1 1 *", "Asia/Tokyo").next_after(-1) == ms("1970-12-31T15:00:00Z")
    assert Cron("0 0 1 1 *", "Asia/Tokyo").previous_upto(ms("1970-12-31T14:00:00Z")) is None
    assert Cron("0 0 29 2 *", "Asia/Tokyo").previous_upto(ms("1972-01-01T00:00:00Z")) is None


def test_between_is_lazy() -> None:
    every_second = Cron("* * * * * *").between(0, HORIZON_MS)
    assert list(islice(every_second, 3)) == [1_000, 2_000, 3_000]


def test_s09_a_time_that_is_skipped_on_its_only_day_has_no_slot() -> None:
    # The last Sunday of March has had no 01:00 to 02:00 in London since 1981. A star makes a
    # wildcard schedule, which makes up for nothing; without it there is a slot each year.
    now = ms("2026-01-01T00:00:00Z")
    assert Cron("*/15 1 * 3 0L", "Europe/London").next_after(now) is None
    assert Cron("0,15 1 * 3 0L", "Europe/London").next_after(now) == ms("2026-03-29T01:00:00Z")


@pytest.mark.parametrize("text", [None, 10, b"0 8 * * *", ["0 8 * * *"]])
def test_what_is_not_a_text_is_refused(text: Any) -> None:
    for refuse in (Cron, parse_schedule, parse_duration_ms):
        with pytest.raises(ScheduleError, match="write a text"):
            refuse(text)
    with pytest.raises(ScheduleError, match="time zone"):
        zone_named(text)


@pytest.mark.parametrize("text", ["8", "10", "1.5h", "10s\x00", "1h 30m", "08:00", "10S"])
def test_one_word_that_begins_with_a_digit_is_told_about_durations(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_schedule(text)


def test_white_space_around_a_schedule_is_trimmed() -> None:
    assert parse_schedule(" 10s\n") == Every(10_000)
    assert parse_schedule("\t0 8 * * *\r\n") == Cron("0 8 * * *")


HOSTILE = {
    "100 kB of commas": "," * 100_000 + " * * * *",
    "a long list": ",".join(["1"] * 50_000) + " * * * *",
    "nested steps": "*" + "/1" * 50_000 + " * * * *",
    "many fields": "* " * 50_000,
    "only spaces": " " * 100_000,
    "a long number": "9" * 100_000,
    "a long step": "*/" + "9" * 5_000 + " * * * *",
    "a long alias": "@" + "daily" * 20_000,
    "commas within the limit": "," * 990 + " * * * *",
    "steps within the limit": "*" + "/1" * 490 + " * * * *",
    "digits within the limit": "9" * 990 + " * * * *",
    "other digits": "٣" * 100_000,
    "a bomb for regular expressions": "1-" * 490 + " * * * *",
    "NUL": "\x00" * 1_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_at_once(text: str) -> None:
    for refuse in (Cron, parse_schedule, parse_duration_ms, zone_named):
        fastest = 1.0
        for _ in range(5):
            began = time.perf_counter()
            with pytest.raises(ScheduleError) as refused:
                refuse(text)
            fastest = min(fastest, time.perf_counter() - began)
        assert len(str(refused.value)) < 400
        assert fastest < 0.001


def test_an_error_survives_being_copied_and_pickled() -> None:
    with pytest.raises(ScheduleError) as refused:
        Cron("60 * * * *")
    for copied in (copy.copy(refused.value), pickle.loads(pickle.dumps(refused.value))):
        assert str(copied) == str(refused.value) == "minute is '60': 60 is outside 0 to 59"
        assert copied.field == "minute"


def test_h_without_a_jobs_name_is_refused() -> None:
    for job in (None, ""):
        with pytest.raises(ScheduleError, match="name the job"):
            Cron("H * * * *", job=job)
    with pytest.raises(ScheduleError, match="smaller than"):
        Cron("H/60 * * * *", job="sync")
    with pytest.raises(ScheduleError, match="at least 1"):
        Cron("H/0 * * * *", job="sync")


def test_s07_h_spreads_jobs_over_its_values() -> None:
    minutes = {Cron("H * * * *", job=f"job-{n}").next_after(-1) for n in range(1_000)}
    assert len(minutes) == 60
    days = {Cron("0 0 H * *", job=f"job-{n}").next_after(-1) for n in range(1_000)}
    assert len(days) == 28


# ── The shortest gap (S12) ──────────────────────────────────────────────────────────────────────

NEW_YEAR = 1_767_225_600_000  # 2026-01-01T00:00:00Z


@pytest.mark.parametrize(
    "text",
    [
        "* * * * *",
        "*/7 * * * *",
        "* * * * * *",
        "10,40 * * * * *",
        "59 59 * * * *",
        "0 8 * * *",
        "0 3,5 * * *",
        "30 2 * * 1-5",
        "0 0 13 * 5",
        "0 0 29 2 *",
        "0 0 1 * *",
        "0 0 L * *",
        "0 0,23 1,15 * *",
        "0 0 1,31 * *",
        "0 0 25 12 *",
        "45 1 * * 0L",
        "0,30 3,4 * * *",
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Athens", "Australia/Lord_Howe"])
@pytest.mark.parametrize("count", [1_000, 50, 2])
def test_s12_the_shortest_gap_is_the_one_that_walking_finds(
    text: str, zone: str, count: int
) -> None:
    schedule = Cron(text, zone)
    slots = list(islice(schedule.between(NEW_YEAR, HORIZON_MS), count))
    walked = min(later - earlier for earlier, later in pairwise(slots))
    assert schedule.shortest_gap_ms(NEW_YEAR, count) == walked


def test_s12_without_two_slots_the_gap_is_the_time_that_is_left() -> None:
    schedule = Cron("0 0 1 1 *")
    new_year = ms("2199-01-01T00:00:00Z")
    assert schedule.shortest_gap_ms(new_year) == HORIZON_MS - new_year
    assert schedule.shortest_gap_ms(new_year - 1) == HORIZON_MS - new_year + 1
    assert schedule.shortest_gap_ms(HORIZON_MS + 1) == 0


# ── Words ───────────────────────────────────────────────────────────────────────────────────────

WORDS = {
    "* * * * *": "every minute",
    "*/5 * * * *": "every 5 minutes",
    "*/7 * * * *": "at minutes 0, 7, ... 56 of every hour",
    "0,30 9-17,20 * * *": "every 30 minutes from 09:00 to 17:59 and 20:00 to 20:59 every day",
    "1 1,4,8,11,20,22,23 * * *": "at minute 1 in hours 1, 4, 8, 11, 20, 22 and 23 every day",
    "0 * * * *": "every hour",
    "0 */2 * * *": "every 2 hours from 00:00 every day",
    "5 * * * 1": "at minute 5 of every hour on Mondays",
    "* * * * * *": "every second",
    "*/10 * * * * *": "every 10 seconds",
    "7 * * * * *": "at second 7 of every minute",
    "15,45 * * * * *": "at seconds 15 and 45 of every minute",
    "30 */7 9-17 * * *": "at second 30 at minutes 0, 7, ... 56 from 09:00 to 17:59 every day",
    "* 5 3 * * *": "every second of 03:05 every day",
    "30 0 8 * * *": "at 08:00:30 every day",
    "0 8 * * *": "at 08:00 every day",
    "0 8,20 * * SAT,SUN": "at 08:00 and 20:00 on Saturdays and Sundays",
    "0 8 * * 1-5": "at 08:00 on Monday to Friday",
    "0 0 1,15 * *": "at 00:00 on days 1 and 15 of the month",
    "0 0 13 * 5": "at 00:00 on day 13 of the month or on Fridays",
    "0 0 */2 * 1,3": "at 00:00 on days 1, 3, ... 31 of the month where that is a Monday or Wednesday",
    "0 0 1-31 * 1": "at 00:00 every day",
    "0 0 L 2 *": "at 00:00 on the last day of the month in February",
    "0 0 1,L 1-3,7 *": (
        "at 00:00 on day 1 and the last day of the month in January to March and July"
    ),
    "0 9 15W * *": "at 09:00 on the weekday (Monday to Friday) nearest to day 15 of the month",
    "0 9 LW * *": "at 09:00 on the last weekday (Monday to Friday) of the month",
    "0 0 * * 2#2,5L": "at 00:00 on the second Tuesday and the last Friday of the month",
}


@pytest.mark.parametrize(("text", "words"), WORDS.items(), ids=WORDS)
def test_a_schedule_is_said_in_words(text: str, words: str) -> None:
    assert Cron(text, "Europe/Athens").description == f"{words}, Europe/Athens"


def test_a_star_that_decides_the_day_rule_is_noted() -> None:
    for text in ("0 0 */2 * 1", "0 0 1 * */2", "0 0 */1 * 1"):
        (note,) = Cron(text).notes
        assert "both day fields" in note
    for text in ("0 0 * * 1", "0 0 ? * 1", "0 0 */2 * *", "0 0 1 * 1", "0 0 * * */2"):
        assert Cron(text).notes == ()


@pytest.mark.parametrize(
    ("text", "slot", "remark"),
    [
        (
            "30 3 * * *",
            "2026-03-29T01:00:00Z",
            "moved: 03:30 is skipped, and made up for at 04:00",
        ),
        (
            "0,30 3 * * *",
            "2026-03-29T01:00:00Z",
            "merged: 03:00 and 03:30 are skipped, and made up for at 04:00",
        ),
        (
            "30 3,4 * * *",
            "2026-03-29T01:00:00Z",
            "moved: 03:30 is skipped, and made up for at 04:00",
        ),
        (
            "0 3,4 * * *",
            "2026-03-29T01:00:00Z",
            "merged: 03:00 is skipped, and made up for at 04:00",
        ),
        (
            "0-59 3 * * *",
            "2026-03-29T01:00:00Z",
            "merged: 60 times from 03:00 to 03:59 are skipped, and made up for at 04:00",
        ),
        (
            "15 30 3 * * *",
            "2026-03-29T01:00:00Z",
            "moved: 03:30:15 is skipped, and made up for at 04:00",
        ),
        ("0 4 * * *", "2026-03-29T01:00:00Z", ""),
        ("0 * * * *", "2026-03-29T01:00:00Z", ""),
        ("30 3 * * *", "2026-10-25T00:30:00Z", "03:30 shows twice: this is the first time"),
        ("*/30 * * * *", "2026-10-25T00:30:00Z", "03:30 shows twice: this is the first time"),
        ("*/30 * * * *", "2026-10-25T01:30:00Z", "03:30 shows twice: this is the second time"),
        ("*/30 * * * *", "2026-10-25T02:00:00Z", ""),
        ("*/30 * * * *", "2026-10-24T23:30:00Z", ""),
        ("30 3 * * *", "2026-06-01T00:30:00Z", ""),
    ],
)
def test_s08_what_a_clock_change_did_to_a_slot_is_said(text: str, slot: str, remark: str) -> None:
    schedule = Cron(text, "Europe/Athens")
    assert schedule.is_slot(ms(slot))
    assert schedule.remark(ms(slot)) == remark


def test_the_offset_of_a_zone_is_local_time_minus_utc() -> None:
    athens = zone_named("Europe/Athens")
    assert athens.offset_s(seconds("2026-01-01T00:00:00Z")) == 7_200
    assert athens.offset_s(seconds("2026-07-01T00:00:00Z")) == 10_800
    assert athens.name == "Europe/Athens"


def test_clock_changes_are_listed() -> None:
    schedule = Cron("0 8 * * *", "Europe/Athens")
    forth = ClockChange(ms("2026-03-29T01:00:00Z"), 7_200, 10_800)
    back = ClockChange(ms("2026-10-25T01:00:00Z"), 10_800, 7_200)
    assert list(schedule.clock_changes(NEW_YEAR, back.at_ms)) == [forth, back]
    assert list(schedule.clock_changes(forth.at_ms, back.at_ms - 1)) == []
    assert list(Cron("0 8 * * *").clock_changes(NEW_YEAR, NEW_YEAR + 1_000 * DAY_MS)) == []
