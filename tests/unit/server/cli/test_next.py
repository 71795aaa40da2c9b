"""`anarchon next`: what it prints, and what it refuses in one line with exit status 2."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from anarchon_server.cli import next as next_command
from anarchon_server.core.slots import TZDATA_VERSION

MOVED = "moved: 03:30 is skipped, and made up for at 04:00"


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="anarchon")
    next_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["next", *arguments])
    status: int = args.run(args)
    return status


def objects(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert run(*arguments, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    after = ("--after", "2026-10-10T12:00:05Z", "-n", "2", "--tz", "Europe/Athens")
    assert objects(capsys, "10s", *after) == [
        {
            "slot": 1791633610000,
            "utc": "2026-10-10T12:00:10Z",
            "local": "2026-10-10T15:00:10+03:00",
        },
        {
            "slot": 1791633620000,
            "utc": "2026-10-10T12:00:20Z",
            "local": "2026-10-10T15:00:20+03:00",
        },
    ]


def test_a_table_shows_words_times_gaps_and_what_clock_changes_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    after = ("--after", "2026-03-27T12:00:00Z", "-n", "3", "--tz", "Europe/Athens")
    assert run(*after, "--", "30 3 * * *") == 0
    assert capsys.readouterr().out.splitlines() == [
        "at 03:30 every day, Europe/Athens",
        "the clocks go forward on 2026-03-29 from 03:00 to 04:00",
        "the clocks go back on 2026-10-25 from 04:00 to 03:00",
        f"time zone database {TZDATA_VERSION}",
        "",
        "local                      UTC                            slot  gap",
        "2026-03-28T03:30:00+02:00  2026-03-28T01:30:00Z  1774661400000",
        f"2026-03-29T04:00:00+03:00  2026-03-29T01:00:00Z  1774746000000  23h30m    {MOVED}",
        "2026-03-30T03:30:00+03:00  2026-03-30T00:30:00Z  1774830600000  23h30m",
    ]


def test_what_a_clock_change_did_is_a_note_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    after = ("--after", "2026-10-25T00:00:00Z", "-n", "2", "--tz", "Europe/Athens")
    first, second = objects(capsys, "30 3 * * *", *after)
    assert first["note"] == "03:30 shows twice: this is the first time"
    assert "note" not in second


def test_a_grid_shows_milliseconds_and_no_zone_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("250ms", "--after", "2026-01-01T00:00:00.100", "-n", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "every 250ms, counted from 1970-01-01 00:00 UTC",
        "",
        "UTC                            slot  gap",
        "2026-01-01T00:00:00.250Z  1767225600250",
    ]


def test_gaps_are_counted_in_days(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("0 12 29 2 *", "--after", "2026-01-01T00:00:00Z", "-n", "2") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("  1461d")
    assert run("1w1h", "--after", "2026-01-01T00:00:00Z", "-n", "2") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("  7d1h")


def test_help_says_how_many_slots_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    assert "1 to 1000000" in " ".join(capsys.readouterr().out.split())


def test_without_after_and_n_it_shows_ten_slots_from_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slots = [shown["slot"] for shown in objects(capsys, "* * * * *")]
    assert len(slots) == 10
    assert slots[0] % 60_000 == 0


def test_an_hour_that_a_date_line_skips_is_shown_with_both_days(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("0 0 * * *", "--tz", "Pacific/Apia", "--after", "2011-12-28T23:00Z", "-n", "1") == 0
    shown = capsys.readouterr().out
    assert "the clocks go forward on 2011-12-30 from 00:00 to 2011-12-31 00:00" in shown


def test_notes_and_the_end_of_the_calendar_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("0 0 */2 * 1", "--after", "2199-12-20T00:00:00Z", "-n", "5") == 0
    shown = capsys.readouterr().out
    assert "note: a day field begins with *" in shown
    assert shown.endswith("no further slot before 2200\n")


def test_h_is_drawn_from_the_jobs_name(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = objects(
        capsys, "H * * * *", "--job", "sync", "-n", "1", "--after", "2026-01-01T00:00:00Z"
    )
    assert shown["utc"] == "2026-01-01T00:43:00Z"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["H * * * *"], "give it with --job NAME"),
        (["H 25 * * *"], "25 is outside 0 to 23"),
        (["H * * * *", "--job", ""], "name the job"),
        (["CRON_TZ=Europe/Athens 0 8 * * *"], "give it with --tz ZONE"),
        (["every 10s"], "a grid is its period alone: write 10s"),
        (["every ten"], "2 fields"),
        (["60 * * * *"], "minute is '60': 60 is outside 0 to 59"),
        (["10"], "a number needs its unit"),
        (["1ms"], "at least 100ms"),
        (["@every 10s"], "a grid is its period alone: write 10s"),
        (["0 0 30 2 *"], "never fires"),
        (["0", "8", "*", "*", "*"], "in quotes"),
        (["10s", "--tz", "europe/athens"], 'write "Europe/Athens"'),
        (["0 8 * * *", "--tz", ""], "empty name"),
        (["10s", "--after", "tomorrow"], "2026-10-25T00:30:00Z"),
        (["10s", "--after", "2200-01-01T00:00:00Z"], "1900 to 2199"),
        (["10s", "-n", "0"], "whole number from 1"),
        (["10s", "-n", "٣"], "whole number from 1"),
        (["10s", "-n", "9999999"], "whole number from 1"),
        (["10s\n8"], "anarchon next: "),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("anarchon next: ")
    assert message in captured.err
