"""The demo's self-check and table: pure, from a history made by hand."""

from __future__ import annotations

import pytest

from anarchon.v1 import run_pb2
from anarchon_server import cli
from anarchon_server.cli.demo.report import (
    Start,
    counted,
    lateness_ms,
    not_ended,
    percentile,
    problems,
    table,
)
from anarchon_server.core.slots import Every, Schedule

T0 = 1_800_000_000_000
SCHEDULES: dict[str, Schedule] = {"tick": Every(2_000)}
SUCCESS, SKIPPED = run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_SKIPPED


def run(
    slot: int,
    *states: run_pb2.RunState,
    state: run_pb2.RunState = SUCCESS,
    reason: str = "",
    late_ms: int = 100,
) -> run_pb2.Run:
    made = run_pb2.Run(job="tick", slot=slot, state=state, reason=reason)
    for number, attempt_state in enumerate(states, start=1):
        attempt = made.attempts.add(
            attempt=number, instance_id=f"demo-{number}", state=attempt_state
        )
        attempt.claim_time.FromMilliseconds(slot + late_ms)
    return made


def start(slot: int, attempt: int = 1) -> Start:
    return Start("demo-1", "tick", slot, attempt, 1)


def test_a_history_in_order_has_no_problems() -> None:
    runs = [run(T0 + 2_000, SUCCESS), run(T0 + 4_000, SUCCESS)]
    starts = [start(T0 + 2_000), start(T0 + 4_000)]
    assert problems(runs, starts, SCHEDULES, T0, T0 + 4_000) == []


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        (run_pb2.RUN_STATE_DUE, False),
        (run_pb2.RUN_STATE_CLAIMED, False),
        (run_pb2.RUN_STATE_RUNNING, False),
        (run_pb2.RUN_STATE_INTERRUPTED, False),
        (run_pb2.RUN_STATE_RETRYING, False),
        (SUCCESS, True),
        (run_pb2.RUN_STATE_FAILED, True),
        (SKIPPED, True),
    ],
)
def test_the_demo_waits_for_runs_that_are_to_end_yet(state: run_pb2.RunState, ended: bool) -> None:
    runs = [run(T0 + 2_000, state=state)]
    left = [] if ended else [("tick", T0 + 2_000)]
    assert not_ended(runs, SCHEDULES, T0, T0 + 3_999) == left


def test_the_demo_waits_for_slots_that_nobody_has_claimed_but_not_for_later_ones() -> None:
    runs = [run(T0 + 2_000, SUCCESS)]
    assert not_ended(runs, SCHEDULES, T0, T0 + 6_000) == [
        ("tick", T0 + 4_000),
        ("tick", T0 + 6_000),
    ]
    assert not_ended(runs, SCHEDULES, T0 + 2_000, T0 + 3_999) == []


def test_i1_one_attempt_started_twice_is_a_problem() -> None:
    runs = [run(T0 + 2_000, SUCCESS)]
    found = problems(runs, [start(T0 + 2_000)] * 2, SCHEDULES, T0, T0 + 2_000)
    assert found == [f"tick {T0 + 2_000}: attempt 1 was started 2 times"]


def test_a_second_attempt_is_no_problem_but_a_second_success_is() -> None:
    interrupted = run_pb2.RUN_STATE_INTERRUPTED
    starts = [start(T0 + 2_000), start(T0 + 2_000, attempt=2)]
    taken_over = [run(T0 + 2_000, interrupted, SUCCESS)]
    assert problems(taken_over, starts, SCHEDULES, T0, T0 + 2_000) == []
    twice = [run(T0 + 2_000, SUCCESS, SUCCESS)]
    found = problems(twice, starts, SCHEDULES, T0, T0 + 2_000)
    assert found == [f"tick {T0 + 2_000}: succeeded more than once"]


def test_i6_a_slot_without_a_record_is_a_problem() -> None:
    found = problems([run(T0 + 2_000, SUCCESS)], [], SCHEDULES, T0, T0 + 4_000)
    assert found == [f"tick {T0 + 4_000}: lost, there is no record of it"]


def test_i6_a_missed_slot_is_a_problem_and_an_overlapping_one_is_not() -> None:
    runs = [
        run(T0 + 2_000, state=SKIPPED, reason="missed"),
        run(T0 + 4_000, state=SKIPPED, reason="overlap"),
    ]
    found = problems(runs, [], SCHEDULES, T0, T0 + 4_000)
    assert found == [f"tick {T0 + 2_000}: missed, though an instance was up"]


@pytest.mark.parametrize(("percent", "value"), [(50, 3), (99, 5), (100, 5), (1, 1)])
def test_percentiles_are_nearest_rank(percent: int, value: int) -> None:
    assert percentile([1, 2, 3, 4, 5], percent) == value


def test_lateness_is_from_the_slot_to_the_first_claim() -> None:
    runs = [run(T0, SUCCESS, late_ms=300), run(T0 + 2_000, SUCCESS, late_ms=20), run(T0 + 4_000)]
    assert lateness_ms(runs) == [20, 300]


def test_the_table_counts_attempts_by_instance_and_runs_by_state() -> None:
    interrupted = run_pb2.RUN_STATE_INTERRUPTED
    runs = [
        run(T0, interrupted, SUCCESS),
        run(T0 + 2_000, SUCCESS),
        run(T0 + 4_000, state=SKIPPED, reason="overlap"),
    ]
    lines = table(runs, ["demo-1", "demo-2"])
    assert lines[1].split() == ["demo-1", "2", "1", "0", "1"]
    assert lines[2].split() == ["demo-2", "1", "1", "0", "0"]
    assert "3 runs: 2 success, 0 failed, 1 skipped (overlap 1); 1 needed a second attempt" in (
        "\n".join(lines)
    )


def test_the_runs_of_the_table_add_up_also_where_some_have_not_ended() -> None:
    interrupted = run_pb2.RUN_STATE_INTERRUPTED
    runs = [run(T0, SUCCESS), run(T0 + 2_000, interrupted, state=interrupted)]
    assert "  2 runs: 1 success, 0 failed, 0 skipped, 1 not ended; 0 needed a second attempt" in (
        table(runs, ["demo-1"])
    )
    assert "  1 run: 1 success, 0 failed, 0 skipped; 0 needed a second attempt" in (
        table(runs[:1], ["demo-1"])
    )


def test_one_is_not_counted_as_many() -> None:
    assert [counted(number, "instance") for number in (1, 2)] == ["1 instance", "2 instances"]


@pytest.mark.parametrize(
    ("store", "said"),
    [("memory:", "lives in one process"), ("mysql://h/v", "has no backend in this version")],
)
def test_a_store_that_processes_cannot_share_is_refused_with_those_they_can(
    store: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--store", store]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "sqlite:" in line
    assert "memory:" not in line.partition("; ")[2]


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("amqp://h/v", "--store: rabbitmq keeps no leases, and the demo shows a takeover; stores"),
        ("redis://h/0?strategy=script", "--store: redis:script keeps no leases"),
        ("redis://h/nine", "--store: "),
    ],
)
def test_a_store_on_which_nobody_takes_over_is_refused(
    store: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--store", store]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
