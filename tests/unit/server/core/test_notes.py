"""What a client is told of its schedules when it registers them."""

from __future__ import annotations

from anarchon_server.core import limits
from anarchon_server.core.model import CronSchedule, JobSpec
from tests.unit.server.core.driver import Sidecar, World, every


def cron(name: str, expression: str, zone: str = "") -> JobSpec:
    return JobSpec(name, CronSchedule(expression, zone))


def notes(*specs: JobSpec, sidecar: Sidecar | None = None) -> tuple[str, ...]:
    client = (sidecar or Sidecar(World())).ready_client(*specs)
    assert client.attached is not None
    return client.attached.notes


def test_s7_a_cron_schedule_is_told_in_words_with_the_clock_changes_to_come() -> None:
    assert notes(cron("report", "0 8 * * MON", "Europe/Athens"), cron("utc", "@hourly")) == (
        (
            "report: at 08:00 on Mondays, Europe/Athens"
            "; the clocks go forward on 2027-03-28 from 03:00 to 04:00"
            "; the clocks go back on 2027-10-31 from 04:00 to 03:00"
        ),
        "utc: every hour, UTC",
    )


def test_s6_of_a_grid_there_is_nothing_to_say() -> None:
    assert notes(every()) == ()


def test_s7_what_others_read_otherwise_comes_first() -> None:
    first, *rest = notes(cron("a", "0 8 * * *"), cron("b", "0 0 */2 * 1"))
    assert first.startswith("b: a day field begins with *, so a date must match both day fields")
    assert rest == [
        "a: at 08:00 every day, UTC",
        "b: at 00:00 on days 1, 3, ... 31 of the month where that is a Monday, UTC",
    ]


def test_s7_while_the_stores_time_is_not_known_the_clock_changes_are_left_out() -> None:
    sidecar = Sidecar(World())
    sidecar.away = "surely"
    assert notes(cron("report", "0 8 * * *", "Europe/Athens"), sidecar=sidecar) == (
        "report: at 08:00 every day, Europe/Athens",
    )


def test_s7_of_very_many_notes_some_are_left_out_and_that_is_said() -> None:
    most = limits.NOTES_MAX
    specs = [cron(f"job-{number:03}", "0 8 * * *") for number in range(most)]
    assert len(notes(*specs)) == most
    told = notes(*specs, cron("one-more", "0 8 * * *"))
    assert told[:-1] == notes(*specs)
    assert told[-1] == "these are the first 100 notes"
