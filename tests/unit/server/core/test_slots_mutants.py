"""The tests of slots tell right from wrong: each of these small mistakes is found out (S5 to S8).

Every mutant is a copy of `anarchon_server.core.slots` under another name with one change in it. A
mutant that passes the vectors and the oracle's windows is a hole in them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from anarchon_server.core import slots
from tests.unit.server.core.slot_chance import Window, window_at_a_change
from tests.unit.server.core.slot_oracle import oracle_slots

PACKAGE = "anarchon_server.core.slots"
SOURCES = Path(slots.__file__ or "").parent
VECTORS = Path(__file__).parents[3] / "conformance" / "vectors"


class Mutant(NamedTuple):
    """In `file`, `text` becomes `wrong`."""

    mistake: str
    file: str
    text: str
    wrong: str


MUTANTS = [
    Mutant("a slot at the instant asked from", "cron", "after_ms // 1000 + 1, 0", "after_ms // 1000, 0"),
    Mutant("an inclusive end", "cron", "slot <= end_ms", "slot < end_ms"),
    Mutant("a strict previous", "cron", "min(upto_ms // 1000,", "min(upto_ms // 1000 - 1,"),
    Mutant("the limit is two hours", "cron", "CAUGHT_UP_S = 3 * 3600", "CAUGHT_UP_S = 2 * 3600"),
    Mutant("the limit is below three", "cron", "< stretch.change_s <= CAUGHT_UP_S", "< stretch.change_s < CAUGHT_UP_S"),
    Mutant("no limit to making up", "cron", "not 0 < stretch.change_s <= CAUGHT_UP_S", "not 0 < stretch.change_s"),
    Mutant("large folds are not repeated", "cron", "not -CAUGHT_UP_S <= stretch.change_s < 0", "not stretch.change_s < 0"),
    Mutant("a fold of three hours repeats", "cron", "not -CAUGHT_UP_S <= stretch", "not -CAUGHT_UP_S < stretch"),
    Mutant("wildcards are made up for", "cron", "if self._wildcard or not 0 <", "if not 0 <"),
    Mutant("wildcards are not repeated", "cron", "if self._wildcard or not -CAUGHT", "if not -CAUGHT"),
    Mutant("fixed times repeat", "cron", "return max(first, stretch.changed_at_s + stretch.offset_s - stretch.change_s)", "return first"),
    Mutant("every gap has a slot", "cron", "is not None and wall < skipped_until\n\n", "is not None\n\n"),
    Mutant("a match is kept over a fold", "cron", "not searched_from <= earliest <= wall", "not earliest <= wall"),
    Mutant("nothing before the match is looked at", "cron", "return max(stretch.end_s, wall - _NEARBY_S)", "return max(stretch.end_s, wall + _NEARBY_S)"),
    Mutant("the gap belongs to the day before", "cron", "at_or_after(skipped_until - stretch.change_s)", "at_or_after(skipped_until - 2 * stretch.change_s)"),
    Mutant("offsets are subtracted", "cron", "max(second + stretch.offset_s,", "max(second - stretch.offset_s,"),
    Mutant("a change is a second late", "zones", "early = middle + 1", "early = middle + 2"),
    Mutant("a zone is looked at once a week", "zones", "_PROBING_S = 2 * _DAY_S", "_PROBING_S = 200 * _DAY_S"),
    Mutant("the machine's zones", "zones", "ZoneInfo.from_file(file, key=name)", "ZoneInfo('UTC')"),
    Mutant("the class counts only the minute", "grammar", "wildcard=_starred(second) or _starred(minute) or _starred(hour)", "wildcard=_starred(minute)"),
    Mutant("the class counts full fields", "grammar", "wildcard=_starred(second) or _starred(minute) or _starred(hour)", "wildcard=_starred(second) or _starred(minute) or hour in ('*', '0-23')"),
    Mutant("only a bare star decides the day rule", "grammar", "both_days = _starred(day) or _starred(weekday)", "both_days = day in ('*', '?') or weekday in ('*', '?')"),
    Mutant("both day fields always", "grammar", "both_days = _starred(day) or _starred(weekday)", "both_days = True"),
    Mutant("a step begins at zero", "grammar", "range(first, last + 1, step)", "range(first - first % step, last + 1, step)"),
    Mutant("a range without its end", "grammar", "range(first, last + 1, step)", "range(first, max(last, first + 1), step)"),
    Mutant("7 is Saturday", "grammar", "1 << (value % 7 if field is WEEKDAY else value)", "1 << (value % 8 if field is WEEKDAY else value)"),
    Mutant("a wrap forgets its beginning", "grammar", "_mask(field, first, field.high, 1) | _mask", "_mask"),
    Mutant("seconds last", "grammar", 'return ["0", *texts]', 'return [*texts, "0"]'),
    Mutant("H without the field", "grammar", 'f"{job}\\n{field.name}"', 'f"{job}"'),
    Mutant("L is the 31st", "wall", "by_day |= 1 << length - 1", "by_day |= 1 << 30"),
    Mutant("W leaves the month", "wall", "2 if day == 1 else -1", "-1 if day > 1 else -0"),
    Mutant("W stays on Sunday at the end", "wall", "-2 if day == length else 1", "1 if day < length else 0"),
    Mutant("weeks begin elsewhere", "wall", "(start + 4) % 7", "(start + 3) % 7"),
    Mutant("the fifth is the last", "wall", "7 * (nth - 1)", "7 * min(nth - 1, 3)"),
    Mutant("minutes are not reset", "wall", "return hour * 3600 + self._first_time % 3600", "return hour * 3600 + self._first_time % 60"),
    Mutant("a month is missed", "wall", "return max(day, start) + _lowest(rest)", "return start + _lowest(rest)"),
    Mutant("days backwards", "wall", "(2 << max(0, day - start)) - 1", "(1 << max(0, day - start)) - 1"),
    Mutant("the grid begins at its period", "every", "(after_ms - self.offset_ms) % self.period_ms", "after_ms % self.period_ms"),
    Mutant("truncation towards zero", "every", "return after_ms + self.period_ms - (after_ms - self.offset_ms) % self.period_ms", "return int((after_ms - self.offset_ms) / self.period_ms) * self.period_ms + self.period_ms + self.offset_ms"),
]  # fmt: skip


def mutated(at: int, mutant: Mutant, folder: Path) -> str:
    """Write the mutant; return the name it is imported by."""
    name = f"slots_mutant_{at}"
    (folder / name).mkdir()
    for source in SOURCES.glob("*.py"):
        text = source.read_text("utf-8")
        if source.stem == mutant.file:
            assert text.count(mutant.text) == 1, f"{mutant.mistake}: its text is not there once"
            text = text.replace(mutant.text, mutant.wrong)
        (folder / name / source.name).write_text(text.replace(PACKAGE, name), "utf-8")
    return name


@pytest.fixture(name="on_path")
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("slots_mutant_")]:
        del sys.modules[name]


@pytest.mark.parametrize("at", range(len(MUTANTS)), ids=[m.mistake for m in MUTANTS])
def test_a_mistake_is_found_out(at: int, on_path: Path) -> None:
    module = importlib.import_module(mutated(at, MUTANTS[at], on_path))
    assert not passes(module), f"nothing found out: {MUTANTS[at].mistake}"


def test_without_a_mistake_everything_passes() -> None:
    assert passes(slots)


def passes(module: ModuleType) -> bool:
    """Whether the vectors and some of the oracle's windows say that `module` is right."""
    try:
        return (
            passes_cases(module, "grids")
            and passes_cases(module, "crons")
            and passes_offsets(module)
            and passes_hashes(module)
            and all(passes_window(module, *judged) for judged in judged_windows())
        )
    except Exception:  # noqa: BLE001 - a mutant may fail in any way
        return False


def passes_cases(module: ModuleType, name: str) -> bool:
    for case in cases(name):
        schedule = module.parse_schedule(case["schedule"], case.get("time_zone", ""))
        if not lists(schedule, case["after"], case["slots"]):
            return False
        if any(schedule.previous_upto(slot) != slot for slot in case["slots"]):
            return False
    return True


def passes_offsets(module: ModuleType) -> bool:
    grid = module.Every(1_000, 300)
    return list(grid.between(-1_000, 1_000)) == [-700, 300]


def passes_hashes(module: ModuleType) -> bool:
    minute, hour = (
        next(case for case in cases("hashed") if case["expression"] == text)[field]
        for text, field in (("H * * * *", "minutes"), ("H H * * *", "hours"))
    )
    return bool(module.Cron("H H * * *", job="sync") == module.Cron(f"{minute} {hour} * * *"))


def passes_window(module: ModuleType, window: Window, expected: list[int]) -> bool:
    schedule = module.Cron(window.expression, window.zone)
    start, end = window.start * 1000, window.end * 1000
    before = [slot for slot in expected if start < slot < end]
    return lists(schedule, start, expected, end) and all(
        schedule.previous_upto(later - 1) == earlier for earlier, later in pairwise(before)
    )


def lists(schedule: Any, start: int, expected: list[int], end: int | None = None) -> bool:
    """Whether `between` lists what is expected. A mutant may stand still, and so with a limit."""
    listed = schedule.between(start, expected[-1] if end is None else end)
    return list(islice(listed, len(expected) + 1)) == expected


_CASES: dict[str, list[dict[str, Any]]] = {}
_WINDOWS: list[tuple[Window, list[int]]] = []


def cases(name: str) -> list[dict[str, Any]]:
    if name not in _CASES:
        _CASES[name] = json.loads((VECTORS / f"{name}.json").read_text("utf-8"))["cases"]
    return _CASES[name]


def judged_windows() -> list[tuple[Window, list[int]]]:
    """Windows with the oracle's slots, computed once for all mutants."""
    if not _WINDOWS:
        chance = Random("mutants")
        odd = ["Antarctica/Vostok", "Antarctica/Casey", "Antarctica/Troll", "Pacific/Apia"]
        usual = ["Europe/Athens", "America/St_Johns", "Australia/Lord_Howe", "Africa/Casablanca"]
        drawn = [window_at_a_change(chance, zones) for zones in (odd, usual) for _ in range(75)]
        _WINDOWS.extend(
            (window, [slot * 1000 for slot in oracle_slots(*window)])
            for window in drawn
            if fires(window.expression)
        )
    return _WINDOWS


def fires(expression: str) -> bool:
    try:
        slots.Cron(expression)
    except slots.ScheduleError:
        return False
    return True
