"""What a watch of runs finds by looking again and again, and that it forgets nothing it must tell."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from anarchon_server.core import limits
from anarchon_server.core.model import Attempt, AttemptCause, Lease, Run, RunState, RunView, Trigger
from anarchon_server.core.store import RunQuery
from anarchon_server.core.watching import RunWatch

T0 = 1_800_000_000_000


@dataclass
class Table:
    """Runs, as a store lists them."""

    at: int = T0
    runs: dict[tuple[int, str], Run] = field(default_factory=dict)

    def put(
        self, slot: int, state: RunState = RunState.SUCCESS, job: str = "job", **more: object
    ) -> Run:
        ended_at = self.at if state.final else None
        run = Run(job, slot, Trigger.SCHEDULE, state, ended_at=ended_at)
        self.runs[slot, job] = replace(run, **more)  # type: ignore[arg-type]
        return self.runs[slot, job]

    def page(self, query: RunQuery) -> list[RunView]:
        keys = sorted(self.runs, reverse=True)
        wanted = (
            key
            for key in keys
            if (query.after is None or key < query.after)
            and (not query.job or key[1] == query.job)
            and (query.slot is None or key[0] == query.slot)
        )
        return [RunView(self.runs[key]) for key, _ in zip(wanted, range(query.limit), strict=False)]

    def round(self, watch: RunWatch) -> list[tuple[int, RunState]]:
        """What a round of looks finds to be news."""
        news: list[RunView] = []
        while (look := watch.next_look()) is not None:
            news += watch.saw(self.page(look), self.at)
        return [(view.run.slot, view.run.state) for view in news]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few a page, that a handful of runs is many."""
    for name, value in {
        "PAGE_MAX": 3,
        "WATCH_HEADS_MAX": 2,
        "WATCH_ASIDES": 2,
        "WATCH_KNOWN_MAX": 6,
    }.items():
        monkeypatch.setattr(limits, name, value)


def slots(found: Iterable[tuple[int, RunState]]) -> list[int]:
    return [slot for slot, _ in found]


def test_it_begins_with_what_is_unfinished_and_leaves_out_what_ended_before() -> None:
    table = Table()
    table.put(1)
    table.put(2, RunState.RUNNING)
    table.at += 5_000
    watch = RunWatch(RunQuery())
    assert table.round(watch) == [(2, RunState.RUNNING)]
    assert table.round(watch) == []


def test_every_state_that_a_round_finds_is_news_once() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    assert table.round(watch) == []
    for state in (RunState.DUE, RunState.CLAIMED, RunState.RUNNING, RunState.SUCCESS):
        table.put(7, state)
        assert table.round(watch) == [(7, state)]
        assert table.round(watch) == []


def test_a_run_that_began_and_ended_between_two_rounds_is_news() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    table.round(watch)
    table.at += 1_000
    table.put(7)
    assert table.round(watch) == [(7, RunState.SUCCESS)]


def test_a_renewed_lease_is_no_change_and_a_handler_that_has_started_is() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    attempt = Attempt(1, "t", 1, "i", "x", AttemptCause.CLAIM, RunState.CLAIMED, T0)
    table.put(7, RunState.CLAIMED, current=attempt, lease=Lease(10, 30_000, T0))
    assert slots(table.round(watch)) == [7]
    table.put(7, RunState.CLAIMED, current=attempt, lease=Lease(20, 30_000, T0 + 10))
    assert table.round(watch) == []
    table.put(7, RunState.RUNNING, current=replace(attempt, state=RunState.RUNNING, started_at=T0))
    assert table.round(watch) == [(7, RunState.RUNNING)]


def test_a_look_that_had_no_answer_is_made_again() -> None:
    watch = RunWatch(RunQuery(job="a", from_slot=3, until_slot=9, limit=1, after=(5, "a")))
    look = watch.next_look()
    assert look == RunQuery(job="a", from_slot=3, until_slot=9, limit=limits.PAGE_MAX)
    assert watch.next_look() == look


@pytest.mark.usefixtures("small")
def test_of_a_burst_all_that_is_new_comes_in_one_round_while_pages_have_news() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    table.round(watch)
    table.at += 1_000
    for number in range(6):
        table.put(7, RunState.RUNNING, job=f"job-{number}")
    assert len(table.round(watch)) == 6


@pytest.mark.usefixtures("small")
def test_an_unfinished_run_that_newer_ones_hide_is_looked_at_by_itself() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    for slot in range(1, 21):
        table.put(slot, RunState.RUNNING if slot <= 2 else RunState.SUCCESS)
    table.at += 5_000
    for _ in range(10):
        table.round(watch)
    table.at += 5_000
    table.put(2, RunState.FAILED)
    assert (2, RunState.FAILED) in table.round(watch)


@pytest.mark.usefixtures("small")
def test_a_run_that_is_pruned_before_anybody_looked_is_forgotten() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    for slot in range(1, 21):
        table.put(slot, RunState.RUNNING if slot == 1 else RunState.SUCCESS)
    table.at += 5_000
    for _ in range(10):
        table.round(watch)
    del table.runs[1, "job"]
    table.round(watch)
    looks = []
    while (look := watch.next_look()) is not None:
        looks.append(look)
        watch.saw(table.page(look), table.at)
    assert all(look.slot is None for look in looks)


@pytest.mark.usefixtures("small")
def test_a_row_that_comes_among_old_ones_is_found_by_the_pass_over_all() -> None:
    """Missed slots leave rows in the past."""
    table, watch = Table(), RunWatch(RunQuery())
    for slot in range(10, 400, 10):
        table.put(slot)
    table.at += 60_000
    table.round(watch)
    table.at += 1_000
    table.put(15, RunState.SKIPPED)
    found = [news for _ in range(30) for news in table.round(watch)]
    assert found == [(15, RunState.SKIPPED)], "once"


@pytest.mark.usefixtures("small")
def test_s1_what_ends_after_the_stores_clock_was_set_back_is_news_all_the_same() -> None:
    table, watch = Table(), RunWatch(RunQuery())
    table.round(watch)
    table.at -= 3_600_000
    table.round(watch)
    table.at += 1_000
    table.put(7)
    assert table.round(watch) == [(7, RunState.SUCCESS)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(40))
def test_the_latest_state_of_every_run_arrives_whatever_the_order(seed: int) -> None:
    """Runs of any slot come, change and end while a watch that remembers little looks on."""
    chance = random.Random(seed)
    table = Table()
    for slot in range(0, 60, 2):
        table.put(slot)
    table.at += 60_000
    watch = RunWatch(RunQuery())
    told: dict[int, RunState] = dict(table.round(watch))
    changed: set[int] = set()
    for _ in range(60):
        table.at += chance.randint(0, 3_000)
        open_runs = [run.slot for run in table.runs.values() if not run.state.final]
        for _ in range(chance.randint(0, 3)):
            slot = chance.choice([chance.randint(0, 80), *open_runs])
            known = table.runs.get((slot, "job"))
            if known is None or not known.state.final:
                table.put(slot, chance.choice(list(RunState)))
                changed.add(slot)
        told |= dict(table.round(watch))
    for _ in range(40):
        told |= dict(table.round(watch))
    assert {slot: told.get(slot) for slot in changed} == {
        slot: table.runs[slot, "job"].state for slot in changed
    }
