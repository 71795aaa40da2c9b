"""What became of every slot while instances came and went: from the history and the handlers' records.

Two witnesses: the runs as the store has them, and what the applications wrote down when a handler
started and ended, on the machine's clock that no process sets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from anarchon.v1 import run_pb2

SUCCESS = run_pb2.RUN_STATE_SUCCESS
SKIPPED = run_pb2.RUN_STATE_SKIPPED
INTERRUPTED = run_pb2.RUN_STATE_INTERRUPTED
FINAL = (SUCCESS, run_pb2.RUN_STATE_FAILED, SKIPPED)
HANDED_OVER = "handed_over"

Slot = tuple[str, int]
"""A job and one of its slots."""


@dataclass(frozen=True, slots=True)
class Grid:
    """When a job is due, as a grid counted from the Unix epoch; and whether it may overlap itself."""

    every_ms: int
    offset_ms: int = 0
    overlaps: bool = False


@dataclass(slots=True)
class Stay:
    """One attempt as the handler's own process saw it."""

    attempt: int
    who: str
    started: int
    ended: int | None = None
    outcome: str = ""


@dataclass(slots=True)
class Account:
    """The sums, and every slot that is not as it should be, in words."""

    slots: int = 0
    success: int = 0
    overlap: int = 0
    """Slots skipped because the job's run before was unfinished when they were due, as it must be."""
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    handed_over: int = 0
    """Runs of which an attempt was handed over, and which had a further one."""
    hand_overs_ms: list[int] = field(default_factory=list)
    """From the end of a handler that was stopped to the start of the next attempt's, ascending."""
    otherwise: Counter[str] = field(default_factory=Counter)
    """Why further attempts were interrupted, where it was not a hand-over."""


def has_ended(grids: Mapping[str, Grid], runs: Iterable[run_pb2.Run], until: int) -> bool:
    """Whether every slot of the grids, from a job's first in the history to `until`, is final."""
    final = {(run.job, run.slot) for run in runs if run.state in FINAL}
    return all(which in final for which in _slots_of(grids, runs, until))


def _slots_of(grids: Mapping[str, Grid], runs: Iterable[run_pb2.Run], until: int) -> Iterator[Slot]:
    firsts: dict[str, int] = {}
    for run in runs:
        firsts[run.job] = min(run.slot, firsts.get(run.job, run.slot))
    for job, grid in grids.items():
        last = until - (until - grid.offset_ms) % grid.every_ms
        first = min(firsts.get(job, last), last)
        # Counted from the last, so that a first that is not on the grid hides nothing.
        yield from ((job, slot) for slot in range(last, first - 1, -grid.every_ms))


def account(
    grids: Mapping[str, Grid],
    runs: Iterable[run_pb2.Run],
    events: Iterable[Mapping[str, Any]],
    until: int,
) -> Account:
    """Every slot of the grids, from a job's first in the history up to `until`.

    All of them should have ended: what goes on yet is counted as lost.
    """
    found = Account()
    known = {(run.job, run.slot): run for run in runs}
    stays = stays_of(events)
    for which in _slots_of(grids, known.values(), until):
        found.slots += 1
        run = known.get(which)
        seen = stays.get(which, [])
        _count_end(found, grids[which[0]], run, which, known)
        _count_doubles(found, run, which, seen)
        if run is not None:
            _count_hand_overs(found, run, seen)
    found.hand_overs_ms.sort()
    return found


def stays_of(events: Iterable[Mapping[str, Any]]) -> dict[Slot, list[Stay]]:
    """The attempts that applications told of, in the order in which they started."""
    stays: dict[Slot, list[Stay]] = defaultdict(list)
    by_token: dict[str, Stay] = {}
    for event in sorted(events, key=lambda event: int(event["boot_ms"])):
        if event["what"] == "start":
            stay = Stay(event["attempt"], event["who"], event["boot_ms"])
            stays[event["job"], event["slot"]].append(stay)
            by_token[event["token"]] = stay
        elif event["what"] == "end":
            stay = by_token[event["token"]]
            stay.ended, stay.outcome = event["boot_ms"], event["outcome"]
    return stays


def _count_end(
    found: Account,
    grid: Grid,
    run: run_pb2.Run | None,
    which: Slot,
    known: Mapping[Slot, run_pb2.Run],
) -> None:
    job, slot = which
    if run is None:
        found.lost.append(f"{job} {slot}: there is no record of it")
    elif run.state == SUCCESS:
        found.success += 1
    elif run.state == SKIPPED and run.reason == "overlap" and not grid.overlaps:
        if _had_ended(known.get((job, run.blocking_slot)), slot):
            found.lost.append(f"{job} {slot}: skipped for {run.blocking_slot}, which had ended")
        found.overlap += 1
    else:
        found.lost.append(f"{job} {slot}: {run_pb2.RunState.Name(run.state)} {run.reason}")


def _had_ended(blocker: run_pb2.Run | None, at: int) -> bool:
    """Whether a run that was in the way of another was not, at that time."""
    if blocker is None:
        return True
    ends = [a.end_time.ToMilliseconds() for a in blocker.attempts[-1:] if a.HasField("end_time")]
    return bool(ends) and ends[0] < at


def _count_doubles(
    found: Account, run: run_pb2.Run | None, which: Slot, seen: Sequence[Stay]
) -> None:
    where = f"{which[0]} {which[1]}"
    recorded = sum(a.state == SUCCESS for a in run.attempts) if run is not None else 0
    done = sum(stay.outcome == "success" for stay in seen)
    if max(recorded, done) > 1:
        found.doubled.append(f"{where}: succeeded {recorded} times, by its handlers {done} times")
    for attempt, times in Counter(stay.attempt for stay in seen).items():
        if times > 1:
            found.doubled.append(f"{where}: attempt {attempt} was started {times} times")
    for earlier, later in pairwise(seen):
        # One that did not tell of its end may be running yet.
        if earlier.ended is None or earlier.ended > later.started:
            found.doubled.append(
                f"{where}: attempt {later.attempt} on {later.who} beside {earlier.attempt} "
                f"on {earlier.who}"
            )


def _count_hand_overs(found: Account, run: run_pb2.Run, seen: Sequence[Stay]) -> None:
    by_attempt = {stay.attempt: stay for stay in seen}
    handed_over = False
    for attempt in run.attempts:
        if attempt.state != INTERRUPTED:
            continue
        if attempt.reason != HANDED_OVER:
            found.otherwise[attempt.reason or "lease over"] += 1
            continue
        handed_over |= attempt.attempt < len(run.attempts)
        before, after = by_attempt.get(attempt.attempt), by_attempt.get(attempt.attempt + 1)
        if before is not None and before.ended is not None and after is not None:
            found.hand_overs_ms.append(after.started - before.ended)
    found.handed_over += handed_over
