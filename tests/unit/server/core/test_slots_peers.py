"""Slots against croniter and cronsim, where their rules are ours: on a clock that never changes,
with expressions that all three read alike. `docs/schedules.md` lists where they are not.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from random import Random

import pytest
from croniter import croniter
from cronsim import CronSim

from anarchon_server.core.slots import Cron, ScheduleError
from anarchon_server.core.slots.grammar import LAST, Times, parse_expression
from tests.unit.server.core.slot_chance import expression_around

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HORIZON_MS = 7_258_118_400_000
ANSWERS = 12


def expressions(seed: str, count: int) -> list[str]:
    chance = Random(seed)
    drawn = (
        expression_around(chance, chance.randrange(24), with_seconds=chance.random() < 0.3)
        for _ in range(count)
    )
    return [text for text in drawn if fires(text)]


def fires(text: str) -> bool:
    try:
        Cron(text)
    except ScheduleError:
        return False
    return True


def start_ms(text: str) -> int:
    return Random(text).randrange(2_000_000_000) * 1000


@pytest.mark.parametrize("batch", range(4))
def test_croniter_on_the_naive_clock_with_plain_lists_gives_the_same_slots(batch: int) -> None:
    for text in expressions(f"croniter {batch}", 100):
        times = parse_expression(text)
        if times.near_weekday is not None and not 0 < times.near_weekday < 29:
            continue  # It has no LW, and takes 31W for 30W in a month of 30 days.
        after = start_ms(text)
        peer = croniter(
            for_croniter(times),
            (EPOCH + timedelta(milliseconds=after)).replace(tzinfo=None),
            day_or=not times.both_days,
            max_years_between_matches=60,
        )
        ours = list(islice(Cron(text).between(after, HORIZON_MS), ANSWERS))
        theirs = [to_ms(peer.get_next(datetime).replace(tzinfo=UTC)) for _ in ours]
        assert ours == theirs, text


def for_croniter(times: Times) -> str:
    """Expanded lists, and L, W and # in croniter's spelling, seconds last."""
    day = [str(n) for n in range(1, 32) if times.days >> n & 1]
    if times.last_day:
        day.append("L")
    if times.near_weekday is not None:
        day = [f"{times.near_weekday}W"]
    weekday = [str(n) for n in range(7) if times.weekdays >> n & 1]
    if times.nth_weekdays:
        weekday = [f"L{d}" if nth == LAST else f"{d}#{nth}" for d, nth in times.nth_weekdays]
    fields = [
        numbers(times.minutes),
        numbers(times.hours),
        "*" if len(day) == 31 and times.both_days else ",".join(day),
        numbers(times.months),
        "*" if len(weekday) == 7 and times.both_days else ",".join(weekday),
        numbers(times.seconds),
    ]
    return " ".join(fields)


def numbers(mask: int) -> str:
    return ",".join(str(n) for n in range(60) if mask >> n & 1)


def to_ms(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(milliseconds=1)


def test_cronsim_in_utc_gives_the_same_slots() -> None:
    compared = 0
    for text in expressions("cronsim", 500):
        if not read_alike_by_cronsim(text):
            continue
        after = start_ms(text)
        peer = CronSim(text, EPOCH + timedelta(milliseconds=after))
        ours = list(islice(Cron(text).between(after, HORIZON_MS), ANSWERS))
        theirs = [to_ms(next(peer)) for _ in ours]
        assert ours == theirs, text
        compared += 1
    assert compared > 100


def read_alike_by_cronsim(text: str) -> bool:
    """It has no ? and no weekday W but LW, wraps no ranges, and reads n/s as we do."""
    fields = text.split()
    spans = [item.partition("/")[0].split("-") for field in fields for item in field.split(",")]
    wraps = any(
        len(span) == 2
        and (not span[0].isdigit() or not span[1].isdigit() or int(span[0]) >= int(span[1]))
        for span in spans
    )
    odd = "?" in text or any(field.endswith("W") for field in fields) or "L" in fields[-1]
    # It takes `7#1` and `SAT,SUN` as we do, but looks only 50 years ahead.
    return not wraps and not odd and "29" not in fields[-3] and "#5" not in text
