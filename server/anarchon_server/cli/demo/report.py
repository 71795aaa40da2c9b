"""What the demo's history says: a table for people, and what would be wrong with it.

Imports the protocol's stubs and `core.slots`; pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anarchon.v1 import run_pb2
from anarchon_server.core.slots import Schedule

_SUCCESS, _FAILED = run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_FAILED
_SKIPPED, _INTERRUPTED = run_pb2.RUN_STATE_SKIPPED, run_pb2.RUN_STATE_INTERRUPTED
_ENDED = frozenset({_SUCCESS, _FAILED, _SKIPPED})


@dataclass(frozen=True, slots=True)
class Start:
    """A handler's own record that it began."""

    instance: str
    job: str
    slot: int
    attempt: int
    fence: int


def lateness_ms(runs: Iterable[run_pb2.Run]) -> list[int]:
    """How long after its slot each run's first attempt was won, ascending."""
    return sorted(
        run.attempts[0].claim_time.ToMilliseconds() - run.slot for run in runs if run.attempts
    )


def percentile(ascending: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile."""
    rank = max(1, -(-len(ascending) * percent // 100))
    return ascending[rank - 1]


def counted(number: int, noun: str) -> str:
    """Return "1 run", "2 runs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(runs: Sequence[run_pb2.Run], instances: Sequence[str]) -> list[str]:
    """Runs per instance, attempts and states, and lateness."""
    lines = [f"  {'instance':<12}{'attempts':>9}{'success':>9}{'failed':>8}{'interrupted':>13}"]
    for name in instances:
        states = Counter(a.state for r in runs for a in r.attempts if a.instance_id == name)
        lines.append(
            f"  {name:<12}{states.total():>9}{states[_SUCCESS]:>9}{states[_FAILED]:>8}"
            f"{states[_INTERRUPTED]:>13}"
        )
    states = Counter(run.state for run in runs)
    skipped = Counter(run.reason for run in runs if run.state == _SKIPPED)
    why = f" ({', '.join(f'{reason} {n}' for reason, n in skipped.items())})" if skipped else ""
    open_runs = sum(count for state, count in states.items() if state not in _ENDED)
    left = f", {open_runs} not ended" if open_runs else ""
    again = sum(1 for run in runs if len(run.attempts) > 1)
    lines.append("")
    lines.append(
        f"  {counted(len(runs), 'run')}: {states[_SUCCESS]} success, {states[_FAILED]} failed, "
        f"{states[_SKIPPED]} skipped{why}{left}; {again} needed a second attempt"
    )
    late = lateness_ms(runs)
    if late:
        lines.append(
            f"  won after the slot: p50 {percentile(late, 50)} ms, p99 {percentile(late, 99)} ms "
            "(the jitter is part of it)"
        )
    return lines


def not_ended(
    runs: Iterable[run_pb2.Run], schedules: Mapping[str, Schedule], since: int, until: int
) -> list[tuple[str, int]]:
    """Return the slots after `since` and up to `until`, with their jobs, whose runs are to end yet.

    A slot that nobody has claimed is one of them.
    """
    ended = {(run.job, run.slot) for run in runs if run.state in _ENDED}
    return [
        (job, slot)
        for job, schedule in schedules.items()
        for slot in schedule.between(since, until)
        if (job, slot) not in ended
    ]


def problems(
    runs: Sequence[run_pb2.Run],
    starts: Sequence[Start],
    schedules: dict[str, Schedule],
    since: int,
    until: int,
) -> list[str]:
    """What breaks the promise: a slot with two winners, or a slot that is lost.

    Slots after `since` and up to `until` must each be in the history, and not as missed.
    """
    found = []
    for key, count in Counter((s.job, s.slot, s.attempt) for s in starts).items():
        if count > 1:
            found.append(f"{key[0]} {key[1]}: attempt {key[2]} was started {count} times")
    for run in runs:
        if sum(attempt.state == _SUCCESS for attempt in run.attempts) > 1:
            found.append(f"{run.job} {run.slot}: succeeded more than once")
        if run.state == _SKIPPED and run.reason == "missed":
            found.append(f"{run.job} {run.slot}: missed, though an instance was up")
    known = {(run.job, run.slot) for run in runs}
    for job, schedule in schedules.items():
        found.extend(
            f"{job} {slot}: lost, there is no record of it"
            for slot in schedule.between(since, until)
            if (job, slot) not in known
        )
    return found
