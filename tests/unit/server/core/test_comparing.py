"""Instances with different zone databases: what is said of them, and of slots that differ (S5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anarchon_server.core import limits
from anarchon_server.core.limits import DAY, HOUR, MINUTE, SECOND
from anarchon_server.core.messages import Level, Method
from anarchon_server.core.model import CronSchedule, Instance, InstanceState, JobSpec
from anarchon_server.core.slots.outlook import outlook_on
from anarchon_server.core.store import Beat
from tests.unit.server.core.driver import START, Sidecar, World, every, ran

OURS = "2026f"
THEIRS = "2025b"

BEGINS = START - START % DAY - DAY
"""Where every outlook begins that is written on the day of `START`, 2027-01-15."""

HERE = outlook_on("America/Vancouver", BEGINS, BEGINS + limits.OUTLOOK_SPAN)
THERE = "America/Vancouver -28800"
"""By the database here Vancouver has left its clocks at -25200 for good; by theirs it has not."""


def cron(expression: str = "0 8 * * *", name: str = "report", zone: str = "") -> JobSpec:
    return JobSpec(name, CronSchedule(expression, zone or "America/Vancouver"), jitter_ms=0)


def started(*specs: JobSpec, tzdata_version: str = OURS) -> tuple[World, Sidecar]:
    """A sidecar that has registered these jobs, and looked at the others."""
    world = World()
    sidecar = Sidecar(world, tzdata_version=tzdata_version)
    sidecar.ready_client(*(specs or (cron(),)))
    return world, sidecar


def days_pass(world: World, days: int) -> None:
    """All calendars go on, at once."""
    world.store_step += days * DAY
    for sidecar in world.sidecars:
        sidecar.host_offset += days * DAY


class Others:
    """Other instances in a world: each beats, with the zone database it says that it has."""

    def __init__(self, world: World) -> None:
        self.world = world

    def beat(self, label: str = "z", *outlook: str, leaving: bool = False, **fields: Any) -> None:
        values: dict[str, Any] = {"tzdata_version": THEIRS, "outlook_at": BEGINS, **fields}
        values.setdefault("lease_ms", HOUR)
        state = InstanceState.ACTIVE
        instance = Instance(label, f"incarnation-{label}", state, outlook=outlook, **values)
        ran(self.world.store.beat(Beat(instance, leaving=leaving)))


def looked(world: World, *outlook: str, specs: tuple[JobSpec, ...] = (), **fields: Any) -> Sidecar:
    """A sidecar that looked when another instance was there that says this of its zones."""
    Others(world).beat("z", *outlook, **fields)
    sidecar = Sidecar(world, tzdata_version=OURS)
    sidecar.ready_client(*(specs or (cron(),)))
    return sidecar


def errors(sidecar: Sidecar) -> list[dict[str, Any]]:
    lines = sidecar.logged("slots_differ")
    assert all(line.level is Level.ERROR for line in lines)
    return [dict(line.fields) for line in lines]


# --- What an instance reports ----------------------------------------------------------------


def test_s05_an_instance_reports_its_database_and_what_it_says_of_its_zones() -> None:
    athens = cron(name="athens", zone="Europe/Athens")
    world, sidecar = started(athens, cron(), cron("5 5 * * *", "second"), every())
    (shown,) = ran(world.store.instances()).answers
    assert shown.tzdata_version == OURS
    assert shown.outlook == ("America/Vancouver -25200", "Europe/Athens +7200")
    assert shown.outlook_at == BEGINS
    assert sidecar.engine.status(world.now).instance.outlook == shown.outlook


def test_s05_grids_have_no_outlook() -> None:
    world, _ = started(every())
    (shown,) = ran(world.store.instances()).answers
    assert (shown.outlook_at, shown.outlook) == (0, ())


def test_s05_before_the_store_answers_there_is_no_outlook() -> None:
    world = World()
    sidecar = Sidecar(world, tzdata_version=OURS)
    sidecar.tick()
    sidecar.client(cron())
    assert sidecar.engine.status(world.now).instance.outlook == ()


def test_s05_the_outlook_follows_the_days_and_the_jobs() -> None:
    world, sidecar = started()
    sidecar.client(cron(zone="Europe/Athens", name="athens"), name="second")
    sidecar.settle()
    (shown,) = ran(world.store.instances()).answers
    assert len(shown.outlook) == 2
    days_pass(world, 60)
    world.run_for(MINUTE)
    shown = sidecar.engine.status(world.now).instance
    assert shown.outlook_at == BEGINS + 60 * DAY
    assert shown.outlook[1] == "Europe/Athens +7200, +10800 from 1806195600000"


# --- When it looks ---------------------------------------------------------------------------


def looks(sidecar: Sidecar) -> int:
    """How often it has asked for the instances."""
    return sum(getattr(c, "method", None) is Method.INSTANCES for c in sidecar.said)


def test_s05_it_looks_after_a_registration_and_once_a_minute() -> None:
    world, sidecar = started()
    world.run_for(1)
    assert looks(sidecar) == 1
    world.run_for(MINUTE - 1)
    assert looks(sidecar) == 2
    world.run_for(10 * MINUTE)
    assert looks(sidecar) == 12
    sidecar.client(cron(name="second"), name="second")
    world.run_for(SECOND)
    assert looks(sidecar) == 13


def test_s05_it_looks_no_more_when_the_last_cron_job_is_gone() -> None:
    world, sidecar = started(cron())
    sidecar.clients["client"].specs = (every(),)
    sidecar.clients["client"].subscribe()
    sidecar.clients["client"].keep_alive()
    before = looks(sidecar)
    world.run_for(10 * MINUTE)
    assert looks(sidecar) == before


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        pytest.param(every(), OURS, id="only grids"),
        pytest.param(cron(), "", id="its own version is not known"),
    ],
)
def test_s05_it_does_not_look_where_nothing_can_be_compared(spec: JobSpec, version: str) -> None:
    world, sidecar = started(spec, tzdata_version=version)
    world.run_for(10 * MINUTE)
    assert looks(sidecar) == 0


def test_s05_a_look_that_fails_is_made_a_minute_later() -> None:
    world = World()
    Others(world).beat()
    sidecar = Sidecar(world, tzdata_version=OURS)
    sidecar.tick()
    sidecar.settle()
    sidecar.client(cron())
    sidecar.answer(Method.REGISTER)
    sidecar.fail(Method.INSTANCES)
    world.run_for(MINUTE - 1)
    assert looks(sidecar) == 1
    Others(world).beat()
    world.run_for(1)
    assert looks(sidecar) == 2
    assert sidecar.logged("tzdata_differs")


def test_s23_it_does_not_look_while_it_stops() -> None:
    world, sidecar = started()
    world.run_for(1)
    sidecar.clients["client"].lasts_ms = None
    sidecar.stop()
    world.run_for(10 * MINUTE)
    assert looks(sidecar) == 1
    assert sidecar.stopped


# --- Versions --------------------------------------------------------------------------------


def test_s05_each_instance_warns_of_the_others_version_once() -> None:
    world = World()
    old, new = Sidecar(world, "a", tzdata_version=THEIRS), Sidecar(world, "b", tzdata_version=OURS)
    for sidecar in (old, new):
        sidecar.ready_client(cron())
    world.run_for(5 * MINUTE)
    for sidecar, fields in (
        (old, {"ours": THEIRS, "theirs": OURS, "instances": ("b",)}),
        (new, {"ours": OURS, "theirs": THEIRS, "instances": ("a",)}),
    ):
        (line,) = sidecar.logged("tzdata_differs")
        assert (line.level, dict(line.fields)) == (Level.WARNING, fields)
        assert errors(sidecar) == [], "the slots are the same"


def test_s05_versions_that_agree_again_are_said_and_then_warned_of_anew() -> None:
    world, sidecar = started()
    others = Others(world)
    others.beat()
    world.run_for(MINUTE)
    others.beat(tzdata_version=OURS)
    world.run_for(MINUTE)
    (line,) = sidecar.logged("tzdata_agrees_again")
    assert (line.level, dict(line.fields)) == (Level.INFO, {"ours": OURS, "theirs": THEIRS})
    others.beat()
    world.run_for(MINUTE)
    assert len(sidecar.logged("tzdata_differs")) == 2


def test_s05_an_instance_that_is_lost_or_says_no_version_is_not_compared() -> None:
    world, sidecar = started()
    Others(world).beat("lost", THERE, lease_ms=30 * SECOND)
    world.run_for(40 * SECOND)
    Others(world).beat("silent", THERE, tzdata_version="")
    world.run_for(2 * MINUTE)
    assert not sidecar.logged("tzdata_differs")


def test_s05_of_many_instances_some_are_named_and_all_are_counted() -> None:
    world = World()
    for number in range(12):
        Others(world).beat(f"y{number:02}")
    (line,) = looked(world).logged("tzdata_differs")
    assert line.fields["instances"][0] == "y00"
    assert line.fields["instances"][9:] == ("y09", "and 3 more")


# --- Slots -----------------------------------------------------------------------------------


def test_s05_where_slots_differ_it_says_so_loudly_with_jobs_zone_and_moment() -> None:
    specs = (cron(name="b"), cron("0 9 * * *", "a"), cron("0 * * * *", "hourly"), every())
    sidecar = looked(World(), THERE, specs=specs)
    assert errors(sidecar) == [
        {
            "time_zone": "America/Vancouver",
            "first_at": "2027-01-15T15:00:00Z",
            "jobs": ("a", "b"),
            "jobs_not_looked_at": 0,
            "ours": OURS,
            "theirs": THEIRS,
            "instances": ("z",),
        }
    ]


def test_s05_what_was_said_is_not_said_again_but_a_new_job_is_named() -> None:
    world = World()
    sidecar = looked(world, THERE)
    world.run_for(3 * MINUTE)
    assert len(errors(sidecar)) == 1
    sidecar.client(cron(name="second"), cron("0 * * * *", "hourly"), name="second")
    world.run_for(SECOND)
    assert [line["jobs"] for line in errors(sidecar)] == [("report",), ("report", "second")]


def test_s05_a_difference_is_found_when_it_comes_within_30_days() -> None:
    world = World()
    yearly = cron("0 9 20 2 *")  # 2027-02-20: 36 days away
    sidecar = looked(world, THERE, specs=(yearly,))
    assert errors(sidecar) == []
    days_pass(world, 5)
    Others(world).beat("z", THERE, outlook_at=BEGINS + 5 * DAY)
    world.run_for(2 * MINUTE)
    assert errors(sidecar) == []
    days_pass(world, 1)
    Others(world).beat("z", THERE, outlook_at=BEGINS + 6 * DAY)
    world.run_for(2 * MINUTE)
    assert [line["first_at"] for line in errors(sidecar)] == ["2027-02-20T16:00:00Z"]


def test_s05_equal_outlooks_and_other_zones_say_nothing_loud() -> None:
    sidecar = looked(World(), HERE, "Asia/Tokyo +0")
    assert sidecar.logged("tzdata_differs")
    assert errors(sidecar) == []


def test_s05_an_outlook_that_cannot_be_read_leaves_the_warning() -> None:
    sidecar = looked(World(), "America/Vancouver in words of a later version")
    assert sidecar.logged("tzdata_differs")
    assert errors(sidecar) == []


@pytest.mark.parametrize("off", [-2 * DAY, 2 * DAY, -BEGINS, 10**15])
def test_s05_an_outlook_for_other_days_is_not_compared(off: int) -> None:
    assert errors(looked(World(), THERE, outlook_at=BEGINS + off)) == []


def test_s05_of_two_outlooks_of_one_version_the_newer_counts() -> None:
    world = World()
    Others(world).beat("y", HERE, outlook_at=BEGINS - DAY)
    assert len(errors(looked(world, THERE))) == 1


def test_s05_of_many_jobs_some_are_named_and_the_rest_is_counted() -> None:
    specs = tuple(cron(name=f"job-{number:02}") for number in range(25))
    (line,) = errors(looked(World(), THERE, specs=specs))
    assert line["jobs"] == tuple(f"job-{number:02}" for number in range(20))
    assert line["jobs_not_looked_at"] == 5


def test_s05_each_zone_has_its_own_line() -> None:
    specs = (cron(), cron(name="tokyo", zone="Asia/Tokyo"))
    sidecar = looked(World(), THERE, "Asia/Tokyo +32400, +36000 from 1801000000000", specs=specs)
    assert [(line["time_zone"], line["jobs"]) for line in errors(sidecar)] == [
        ("America/Vancouver", ("report",)),
        ("Asia/Tokyo", ("tokyo",)),
    ]


def test_an_instance_of_a_later_version_is_read_with_what_is_known() -> None:
    instance = Instance("a", "x", InstanceState.ACTIVE, reasons=("r",), outlook=("UTC +0",))
    text = instance.to_json()
    assert Instance.from_json(text) == instance
    assert Instance.from_json(text.replace('"ready"', '"later": 1, "ready"')) == instance
    earlier = text.replace(', "outlook": ["UTC +0"]', "")
    assert Instance.from_json(earlier) == replace(instance, outlook=())
