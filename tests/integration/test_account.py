"""The account of a rolling restart finds what it looks for, in histories made up here."""

from __future__ import annotations

from typing import Any

import pytest

from anarchon.v1 import run_pb2
from tests.integration.account import (
    HANDED_OVER,
    INTERRUPTED,
    SKIPPED,
    SUCCESS,
    Grid,
    account,
    has_ended,
)

GRIDS = {"job": Grid(1_000, offset_ms=500)}
FIRST, LAST = 10_500, 12_500


def _run(slot: int, *attempts: tuple[int, str], **fields: Any) -> run_pb2.Run:
    """A run whose attempts each end half a second after the one before."""
    run = run_pb2.Run(job="job", slot=slot, state=fields.pop("state", SUCCESS), **fields)
    for number, (state, reason) in enumerate(attempts or ((SUCCESS, ""),), 1):
        attempt = run.attempts.add(attempt=number, state=state, reason=reason)
        attempt.end_time.FromMilliseconds(slot + 500 * number)
    return run


def _stay(attempt: int, started: int, ended: int, outcome: str = "success") -> list[dict[str, Any]]:
    facts = {"job": "job", "slot": FIRST, "attempt": attempt, "who": "one"}
    token = {"token": f"{attempt} from {started}"}
    return [
        {"what": "start", "boot_ms": started, **facts, **token},
        {"what": "end", "boot_ms": ended, **facts, **token, "outcome": outcome},
    ]


ALL = [_run(12_500), _run(11_500), _run(10_500)]


def test_a_whole_history_loses_nothing() -> None:
    found = account(GRIDS, ALL, _stay(1, 0, 50), LAST + 999)
    assert (found.slots, found.success, found.lost, found.doubled) == (3, 3, [], [])
    assert has_ended(GRIDS, ALL, LAST + 999)
    assert not has_ended(GRIDS, ALL, LAST + 1_000)


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        ([], "no record"),
        ([_run(11_500, state=run_pb2.RUN_STATE_RUNNING)], "RUNNING"),
        ([_run(11_500, state=run_pb2.RUN_STATE_FAILED)], "FAILED"),
        ([_run(11_500, state=SKIPPED, reason="missed")], "missed"),
        ([_run(11_500, state=SKIPPED, reason="overlap", blocking_slot=10_500)], "had ended"),
    ],
)
def test_a_slot_without_a_good_end_is_lost(instead: list[run_pb2.Run], words: str) -> None:
    found = account(GRIDS, [ALL[0], *instead, ALL[2]], [], LAST)
    assert [words in what for what in found.lost] == [True]


def test_a_slot_skipped_for_an_unfinished_run_is_not_lost() -> None:
    skipped = _run(11_500, state=SKIPPED, reason="overlap", blocking_slot=FIRST)
    slow = _run(FIRST, (INTERRUPTED, HANDED_OVER), (INTERRUPTED, HANDED_OVER), (SUCCESS, ""))
    found = account(GRIDS, [ALL[0], skipped, slow], [], LAST)
    assert (found.lost, found.overlap) == ([], 1)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (_stay(2, 60, 90), "succeeded"),
        (_stay(2, 40, 90, "Cancelled"), "attempt 2 on one beside 1"),
        (_stay(1, 60, 90, "Cancelled"), "attempt 1 was started 2 times"),
    ],
)
def test_a_second_handler_is_found(second: list[dict[str, Any]], words: str) -> None:
    found = account(GRIDS, ALL, [*_stay(1, 0, 50), *second], LAST)
    assert [words in what for what in found.doubled] == [True]


def test_two_recorded_successes_are_found() -> None:
    twice = _run(FIRST, (SUCCESS, ""), (SUCCESS, ""))
    assert len(account(GRIDS, [*ALL[:2], twice], [], LAST).doubled) == 1


def test_a_hand_over_is_timed_from_handler_to_handler() -> None:
    over = _run(FIRST, (INTERRUPTED, HANDED_OVER), (INTERRUPTED, "runner_lost"), (SUCCESS, ""))
    told = [*_stay(1, 0, 50, "Cancelled"), *_stay(2, 120, 130, "Cancelled"), *_stay(3, 200, 250)]
    found = account(GRIDS, [*ALL[:2], over], told, LAST)
    assert (found.handed_over, found.hand_overs_ms) == (1, [70])
    assert (found.otherwise, found.doubled) == ({"runner_lost": 1}, [])
