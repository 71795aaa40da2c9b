"""The account of a mixed fleet finds what it looks for, in histories made up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anarchon.v1 import run_pb2
from tests.integration.account import INTERRUPTED, SKIPPED, SUCCESS, Grid
from tests.integration.fleet_account import Kill, Life, Witnessed, judge, report

GRIDS = {"job": Grid(1_000)}
LAST = 12_000
Lines = list[dict[str, Any]]


class Story:
    """Three slots: one runs the first; two is killed in the second, and three goes on; two runs the
    third after its start. A test changes what it wants to be found.
    """

    def __init__(self) -> None:
        self.one: Lines = _handler(10_000, 1, fence=1, at=100)
        self.killed: Lines = _handler(11_000, 1, fence=2, at=1_100)[:1]
        self.three: Lines = _handler(11_000, 2, fence=3, at=1_160)
        self.again: Lines = _handler(12_000, 1, fence=4, at=2_100)
        self.runs = [
            _run(12_000, ("two", 4, SUCCESS, "")),
            _run(11_000, ("two", 2, INTERRUPTED, "runner_lost"), ("three", 3, SUCCESS, "")),
            _run(10_000, ("one", 1, SUCCESS, "")),
        ]

    def judged(self) -> Witnessed:
        lives = [
            Life("one", self.one),
            Life("two", self.killed, Kill("two", life=0, at_ms=1_150)),
            Life("two", self.again),
            Life("three", self.three),
        ]
        return judge(GRIDS, self.runs, lives, LAST)


def _handler(slot: int, attempt: int, *, fence: int, at: int) -> Lines:
    token = f"{slot} {attempt}"
    start = {"what": "started", "at_ms": at, "job": "job", "slot": slot, "attempt": attempt}
    return [
        {**start, "token": token, "fence": str(fence)},
        {"what": "ended", "at_ms": at + 20, "token": token},
    ]


def _run(slot: int, *attempts: tuple[str, int, run_pb2.RunState, str]) -> run_pb2.Run:
    run = run_pb2.Run(job="job", slot=slot, state=attempts[-1][2])
    for number, (who, fence, state, reason) in enumerate(attempts, 1):
        attempt = run.attempts.add(attempt=number, instance_id=who, fence=fence)
        attempt.state, attempt.reason = state, reason
        attempt.claim_time.FromMilliseconds(slot + number)
    return run


def test_a_whole_story_has_nothing_wrong_and_is_told() -> None:
    found = Story().judged()
    assert found.wrong == []
    assert found.wins == {"one": 1, "two": 2}
    assert [(t.before.who, t.after.who, t.delay_ms) for t in found.takeovers] == [
        ("two", "three", 10)
    ]
    said = report(found, {"one": 1, "two": 2, "three": 1}, {n: n for n in ("one", "two", "three")})
    assert "slots: 3, of them 3 run" in said
    assert "killed: two in job, attempt 1; three went on after 10 ms" in said


def _no_record(story: Story) -> None:
    del story.runs[0]


def _skipped_for_nothing(story: Story) -> None:
    story.runs[0] = run_pb2.Run(
        job="job", slot=12_000, state=SKIPPED, reason="overlap", blocking_slot=9_000
    )
    story.again.clear()


def _another_winner(story: Story) -> None:
    story.runs[2].attempts[0].instance_id = "three"


def _another_fence(story: Story) -> None:
    story.one[0]["fence"] = "7"


def _begun_twice(story: Story) -> None:
    story.again += _handler(10_000, 1, fence=1, at=500)


def _a_token_twice(story: Story) -> None:
    for line in story.again:
        line["token"] = story.one[0]["token"]


def _beside_the_killed(story: Story) -> None:
    story.three[0]["at_ms"] = 1_149


def _beside_another_slot(story: Story) -> None:
    story.again[0]["at_ms"] = 1_170


def _no_end(story: Story) -> None:
    story.one.pop()


def _a_falling_fence(story: Story) -> None:
    story.again[0]["fence"] = "1"
    story.runs[0].attempts[0].fence = 1


def _a_fence_that_fell_in_its_run(story: Story) -> None:
    story.three[0]["fence"] = "1"
    story.runs[1].attempts[1].fence = 1


def _not_final(story: Story) -> None:
    story.runs[2].state = run_pb2.RUN_STATE_RUNNING


def _nobody_went_on(story: Story) -> None:
    del story.runs[1].attempts[1]
    story.three.clear()


def _not_released(story: Story) -> None:
    story.runs[1].attempts[0].reason = ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_no_record, "there is no record of it"),
        (_skipped_for_nothing, "which had ended"),
        (_another_winner, "the history has three"),
        (_another_fence, "fence 7: the history has one and 1"),
        (_begun_twice, "the same attempt or token as"),
        (_a_token_twice, "the same attempt or token as"),
        (_beside_the_killed, "beside job 11000 attempt 1 on two, until 1150"),
        (_beside_another_slot, "beside job 11000 attempt 2 on three"),
        (_no_end, "it never ended"),
        (_a_falling_fence, "begun after"),
        (_a_fence_that_fell_in_its_run, "fence 1 after 2"),
        (_not_final, "its run is RUN_STATE_RUNNING"),
        (_nobody_went_on, "no attempt followed"),
        (_not_released, "its process was killed, and it is RUN_STATE_INTERRUPTED"),
    ],
)
def test_what_is_wrong_is_found(change: Callable[[Story], None], words: str) -> None:
    story = Story()
    change(story)
    assert any(words in what for what in story.judged().wrong), story.judged().wrong


def test_a_result_that_died_with_its_process_is_made_again() -> None:
    """It had ended, and nobody was told: the next attempt's success is the first."""
    story = Story()
    story.killed.append({"what": "ended", "at_ms": 1_149, "token": story.killed[0]["token"]})
    assert story.judged().wrong == []
    assert story.judged().takeovers == []


def test_a_handler_that_was_told_it_lost_its_run_is_in_nobodys_way() -> None:
    story = Story()
    told = {"what": "cancelled", "at_ms": 110, "token": "10000 1", "reason": "LEASE_LOST"}
    story.one[1]["at_ms"] = 5_000
    story.one.insert(1, {**told, "lost": True})
    story.runs[2] = _run(10_000, ("one", 1, INTERRUPTED, ""), ("three", 5, SUCCESS, ""))
    story.three += _handler(10_000, 2, fence=5, at=2_500)
    assert [what for what in story.judged().wrong if "beside" in what] == []
