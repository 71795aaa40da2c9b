"""How fast slots are computed, beside croniter and cronsim in the same run, on one core.

    make bench

Each figure is the best of three rounds. Ratios are what to compare between machines.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from zoneinfo import ZoneInfo

from croniter import croniter
from cronsim import CronSim

from anarchon_server.core.slots import Cron, Schedule, parse_schedule
from anarchon_server.core.slots.zones import zone_names

ROUNDS = 3
ZONE = "Europe/Athens"
START = datetime(2026, 1, 1, tzinfo=UTC)
START_MS = 1_767_225_600_000
HORIZON_MS = 7_258_118_400_000
EXPRESSIONS = {
    "* * * * *": 20_000,
    "*/5 * * * *": 20_000,
    "0 8 * * *": 10_000,
    "30 2 * * 1-5": 10_000,
    "0 0 13 * 5": 5_000,
    "0 0 29 2 *": 40,
    "*/10 * * * * *": 20_000,
}
JOBS = 10_000


def main() -> None:
    """Measure and print."""
    next_slots()
    construction()
    many_jobs()


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        rounds.append(time.perf_counter() - began)
    return min(rounds)


# ── One schedule ────────────────────────────────────────────────────────────────────────────────


def next_slots() -> None:
    """Slots a second, walking forward from 2026."""
    print(f"next slots a second, {ZONE} (croniter also on the naive clock)\n")
    print(f"{'expression':<16}{'ours':>10}{'croniter':>10}{'naive':>10}{'cronsim':>10}", end="")
    print(f"{'/croniter':>11}{'/naive':>8}{'/cronsim':>10}")
    for expression, count in EXPRESSIONS.items():
        ours, zoned, naive, sim = (
            count / best(partial(walk, expression, count))
            for walk in (walk_ours, walk_croniter, walk_naive, walk_cronsim)
        )
        print(f"{expression:<16}{ours:>10,.0f}{zoned:>10,.0f}{naive:>10,.0f}{sim:>10,.0f}", end="")
        print(f"{ours / zoned:>11.1f}{ours / naive:>8.1f}{ours / sim:>10.1f}")


def walk_ours(expression: str, count: int) -> None:
    schedule = Cron(expression, ZONE)
    slot: int | None = START_MS
    for _ in range(count):
        assert slot is not None
        slot = schedule.next_after(slot)


def walk_croniter(expression: str, count: int) -> None:
    first = six_is_last(expression)
    peer = croniter(expression, START.astimezone(ZoneInfo(ZONE)), second_at_beginning=first)
    for _ in range(count):
        peer.get_next(datetime)


def walk_naive(expression: str, count: int) -> None:
    first = six_is_last(expression)
    peer = croniter(expression, START.replace(tzinfo=None), second_at_beginning=first)
    for _ in range(count):
        peer.get_next(datetime)


def walk_cronsim(expression: str, count: int) -> None:
    peer = CronSim(expression, START.astimezone(ZoneInfo(ZONE)))
    for _ in range(count):
        next(peer)


def six_is_last(expression: str) -> bool:
    return len(expression.split()) == 6


def construction() -> None:
    """Schedules a second."""
    print("\nconstructed a second\n")
    for expression in ("0 8 * * *", "0,15,30,45 9-17 * 1-6 1-5", "0 0 13 * 5", "0 0 * * 5#2"):
        ours = 2_000 / best(partial(construct, expression, 2_000))
        named = 2_000 / best(partial(construct_named, expression, 2_000))
        theirs = 500 / best(partial(construct_croniter, expression, 500))
        print(f"{expression:<28}ours {ours:>8,.0f}  with identity {named:>8,.0f}", end="")
        print(f"  croniter {theirs:>8,.0f}  ratio {ours / theirs:>5.1f}")


def construct(expression: str, count: int) -> None:
    for _ in range(count):
        Cron(expression, ZONE)


def construct_named(expression: str, count: int) -> None:
    for _ in range(count):
        assert Cron(expression, ZONE).identity


def construct_croniter(expression: str, count: int) -> None:
    for _ in range(count):
        croniter(expression, START)


# ── Ten thousand jobs ───────────────────────────────────────────────────────────────────────────


def many_jobs() -> None:
    """Registration, and a heap that steps from slot to slot."""
    began = time.perf_counter()
    schedules = [registered(*job) for job in islice(jobs(), JOBS)]
    print(f"\n{JOBS:,} jobs: registered in {time.perf_counter() - began:.2f} s", end="")
    print(" (read, identity, next slot, notes; zones loaded on the way)")
    texts = dict.fromkeys(text for text, _, _ in islice(jobs(), 100))
    zoned = [parse_schedule(text, ZONE, "job") for text in texts]
    for schedule in zoned:
        schedule.shortest_gap_ms(START_MS)
    spent = best(lambda: [schedule.shortest_gap_ms(START_MS) for schedule in zoned])
    print(f"shortest gap over 1,000 slots: {spent / len(zoned) * 1e3:.2f} ms a schedule", end="")
    print(", asked where a job sets its jitter")
    heap = [
        (schedule.next_after(START_MS) or HORIZON_MS, at) for at, schedule in enumerate(schedules)
    ]
    heapq.heapify(heap)
    steps, longest = 200_000, 0.0
    began = time.perf_counter()
    for _ in range(steps):
        step_began = time.perf_counter()
        slot, at = heap[0]
        heapq.heapreplace(heap, (schedules[at].next_after(slot) or HORIZON_MS, at))
        longest = max(longest, time.perf_counter() - step_began)
    spent = time.perf_counter() - began
    print(f"{JOBS:,} jobs: {steps / spent:,.0f} steps of the heap a second", end="")
    print(f", the longest {longest * 1e3:.2f} ms")


def registered(text: str, zone: str, name: str) -> Schedule:
    schedule = parse_schedule(text, zone, name)
    assert schedule.identity
    assert schedule.next_after(START_MS)
    assert schedule.notes == ()
    return schedule


def jobs() -> Iterator[tuple[str, str, str]]:
    """Grids and expressions as services have them, over all zones."""
    zones = sorted(zone_names())
    texts = (
        *("10s", "1m", "1h30m", "*/5 * * * *", "0 * * * *", "H * * * *", "H H * * *", "0 8 * * *"),
        *(
            "30 3 * * *",
            "0 9 * * 1-5",
            "0,30 9-17 * * 1-5",
            "0 0 1 * *",
            "0 6 L * *",
            "0 0 * * 5#2",
        ),
    )
    at = 0
    while True:
        yield texts[at % len(texts)], zones[at // 3 % len(zones)], f"job-{at}"
        at += 1


if __name__ == "__main__":
    main()
