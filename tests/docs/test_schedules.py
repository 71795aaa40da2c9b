"""What `docs/schedules.md` says about schedules is so."""

from __future__ import annotations

import re
import shlex

import pytest

from anarchon_server import cli
from anarchon_server.core.slots import Cron, ScheduleError
from tests.docs.pages import ROOT
from tests.unit.server.core.slot_oracle import seconds

PAGE = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
CONSOLE = re.search(r"```console\n\$ anarchon (.*)\n((?:.*\n)*?)```", PAGE)
PICTURES = re.findall(r"```\n(real time \(UTC\) .*\n(?:.*\n)*?)```", PAGE)
REFUSED = (
    "R * * * *",
    "H(0-29) * * * *",
    "0 0 30 2 *",
    "*/90 * * * *",
    "0 0 * * 7/2",
    "0 0 L-3 * *",
)


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert CONSOLE
    assert cli.main(shlex.split(CONSOLE[1])) == 0
    assert capsys.readouterr().out == CONSOLE[2]


@pytest.mark.parametrize(
    ("picture", "date"),
    list(zip(PICTURES, ("2026-03-29", "2026-10-25"), strict=True)),
    ids=["forward", "back"],
)
def test_s08_the_pictures_of_clock_changes_are_true(picture: str, date: str) -> None:
    """A dot stands under the instant of each slot, and nowhere else."""
    head, _, _, *rows = picture.splitlines()
    places = {match.start(): match[0] for match in re.finditer(r"[0-9]{2}:[0-9]{2}", head)}
    assert rows
    for row in rows:
        expression = row[:16].strip()
        schedule = Cron(expression, "Europe/Athens")
        drawn = {places[at] for at, sign in enumerate(row) if sign == "●"}
        true = {
            time
            for time in places.values()
            if schedule.is_slot(seconds(f"{date}T{time}:00Z") * 1000)
        }
        assert drawn == true, expression


def test_s05_the_spellings_and_the_identity_are_as_the_page_says() -> None:
    spellings = re.search(r"(`[^\n]*`) are one schedule and have one\nidentity: `([^`]*)`", PAGE)
    assert spellings
    for text in re.findall(r"`([^`]*)`", spellings[1]):
        assert Cron(text, "Europe/Athens").identity == spellings[2]


@pytest.mark.parametrize("expression", REFUSED)
def test_s07_what_the_page_says_is_refused_is(expression: str) -> None:
    with pytest.raises(ScheduleError):
        Cron(expression)
