"""One winner a slot, and what becomes of a run when its instance, or a part of it, breaks.

Real sidecars and applications on one SQLite file. Leases are 3 s, so: heartbeat 0.5 s, margin
0.5 s, session 1.5 s, keep-alive 0.5 s. Bounds are those of docs/faults.md times 1.5.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

import pytest

from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster, Event, Instance

LEASE_MS = 3_000
MARGIN_MS = 500
SESSION_MS = 1_500
WAKE_MS = 1_000
"""A freed run is claimed within a second (S19)."""
SLACK = 1.5

WORK = [{"name": "work", "kind": "working", "every": "1s", "policies": {"lease": "3s"}}]
LONG_WORK = [{"name": "work", "kind": "working", "every": "1s", "policies": {"lease": "60s"}}]
SUCCESS, FAILED = run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_FAILED
INTERRUPTED = run_pb2.RUN_STATE_INTERRUPTED


async def _two_at_work(
    cluster: Cluster, jobs: list[dict[str, Any]] = WORK, **told: Any
) -> tuple[Instance, Instance, Event]:
    """The instance that runs `work`, the other one, and the start of the run."""
    await cluster.start("one", jobs, **told)
    await cluster.start("two", jobs, **told)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    runner = cluster.instances[start["who"]]
    other = next(i for i in cluster.instances.values() if i is not runner)
    return runner, other, start


async def _taken_over(cluster: Cluster, start: Event, other: Instance) -> Event:
    second = await cluster.wait_for(lambda e: e["what"] == "start" and e["attempt"] == 2)
    assert (second["job"], second["slot"], second["who"]) == ("work", start["slot"], other.name)
    assert second["token"] != start["token"]
    assert second["fence"] > start["fence"], "F4: fences only grow"
    return second


def _wake_ms(run: run_pb2.Run) -> int:
    """From the end of attempt 1 to the claim of attempt 2, by the store's clock."""
    ended, claimed = run.attempts[0].end_time, run.attempts[1].claim_time
    return claimed.ToMilliseconds() - ended.ToMilliseconds()


def _steps_of(cluster: Cluster, start: Event) -> list[int]:
    return [
        e["boot_ms"] for e in cluster.events if e["what"] == "step" and e["token"] == start["token"]
    ]


async def test_i1_every_slot_has_one_winner_among_three_instances(cluster: Cluster) -> None:
    jobs = [
        {"name": name, "kind": "quick", "every": "200ms", "policies": {"lease": "3s"}}
        for name in ("first", "second")
    ]
    for name in ("one", "two", "three"):
        await cluster.start(name, jobs)
    everybody = {"one", "two", "three"}
    await cluster.wait_for(
        lambda e: (
            e["what"] == "end" and {w["who"] for w in cluster.events if "slot" in w} == everybody
        )
    )
    await cluster.wait_for(lambda e: e["what"] == "end", count=100)
    starts = [e for e in cluster.events if e["what"] == "start"]
    assert set(Counter((e["job"], e["slot"]) for e in starts).values()) == {1}
    for job in ("first", "second"):
        # A busy machine can make a run of 200 ms overlap the next: then the slot is Skipped.
        runs = await cluster.runs(cluster.instances["one"], job)
        newest = max(r.slot for r in runs)
        slots = sorted(r.slot for r in runs if r.slot <= newest - 1_000)  # later ones may wait yet
        assert slots == list(range(slots[0], slots[-1] + 1, 200)), "I6: none is lost"
        assert {r.reason for r in runs if r.state == run_pb2.RUN_STATE_SKIPPED} <= {"overlap"}
        ran = {e["slot"] for e in starts if e["job"] == job}
        assert ran <= {r.slot for r in runs}


async def test_s19_both_killed_a_backup_takes_over_when_the_lease_ends(cluster: Cluster) -> None:
    runner, other, start = await _two_at_work(cluster)
    runner.sidecar.signal(signal.SIGKILL)
    runner.application.signal(signal.SIGKILL)
    second = await _taken_over(cluster, start, other)
    last_step = _steps_of(cluster, start)[-1:] or [start["boot_ms"]]
    assert last_step[0] < second["boot_ms"]
    assert second["boot_ms"] - last_step[0] <= (LEASE_MS + 1_000) * SLACK, "F11"
    cluster.let_go()
    run = await cluster.run_when(other, "work", start["slot"], lambda r: r.state == SUCCESS)
    assert [(a.attempt, a.state, a.cause) for a in run.attempts] == [
        (1, INTERRUPTED, run_pb2.ATTEMPT_CAUSE_CLAIM),
        (2, SUCCESS, run_pb2.ATTEMPT_CAUSE_TAKEOVER),
    ]
    assert "released on attempt 2" in run.attempts[1].result


async def test_s24_application_killed_its_run_is_released_at_once(cluster: Cluster) -> None:
    # With this lease the session's time alone would tell of it 20 s later at the earliest.
    runner, other, start = await _two_at_work(cluster, LONG_WORK)
    killed_at = time.time_ns() // 1_000_000
    runner.application.signal(signal.SIGKILL)
    await _taken_over(cluster, start, other)
    run = await cluster.run_when(
        other, "work", start["slot"], lambda r: r.state == run_pb2.RUN_STATE_RUNNING
    )
    assert (run.attempts[0].state, run.attempts[0].reason) == (INTERRUPTED, "runner_lost")
    released_ms = run.attempts[0].end_time.ToMilliseconds() - killed_at
    assert released_ms < 10_000, "the pidfd tells"
    assert _wake_ms(run) <= WAKE_MS * SLACK


async def test_s26_sidecar_killed_for_good_the_handler_stops_before_a_backup_starts(
    cluster: Cluster,
) -> None:
    runner, other, start = await _two_at_work(cluster)
    runner.sidecar.signal(signal.SIGKILL)
    second = await _taken_over(cluster, start, other)
    end = await cluster.wait_for(lambda e: e["what"] == "end" and e["token"] == start["token"])
    assert end["outcome"] != "success"
    assert _steps_of(cluster, start)[-1] < second["boot_ms"], "I4: no two handlers at once"
    assert end["boot_ms"] < second["boot_ms"], "I8: told before the lease ends"


async def test_s26_sidecar_restarted_adopts_with_token_attempt_and_fence(cluster: Cluster) -> None:
    # A long lease, so that a slow machine can start the new sidecar in the session's time.
    jobs = [{"name": "work", "kind": "working", "every": "1s", "policies": {"lease": "30s"}}]
    one = await cluster.start("one", jobs)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    one.sidecar.signal(signal.SIGKILL)
    await one.sidecar.ended()
    await one.start_sidecar()
    attached = await cluster.run_when(
        one, "work", start["slot"], lambda r: r.state == run_pb2.RUN_STATE_RUNNING
    )
    assert (attached.attempts[0].attempt, attached.attempts[0].fence) == (1, start["fence"])
    steps = len(_steps_of(cluster, start))
    await cluster.wait_for(
        lambda e: e["what"] == "step" and e["token"] == start["token"], count=steps + 20
    )
    cluster.let_go()
    run = await cluster.run_when(one, "work", start["slot"], lambda r: r.state == SUCCESS)
    assert [(a.attempt, a.fence, a.state) for a in run.attempts] == [(1, start["fence"], SUCCESS)]
    assert not [e for e in cluster.events if e["what"] == "end" and e["outcome"] != "success"]


async def test_s23_sigterm_hands_the_run_over_within_a_second(cluster: Cluster) -> None:
    runner, other, start = await _two_at_work(cluster, stop_grace="200ms")
    runner.application.signal(signal.SIGTERM)
    runner.sidecar.signal(signal.SIGTERM)
    stopped = await cluster.wait_for(lambda e: e["what"] == "end" and e["token"] == start["token"])
    second = await _taken_over(cluster, start, other)
    assert stopped["boot_ms"] <= second["boot_ms"], "F12: never before the handler has stopped"
    assert await runner.application.ended() == 0
    assert await runner.sidecar.ended() == 0
    run = await cluster.run_when(other, "work", start["slot"], lambda r: len(r.attempts) == 2)
    assert (run.attempts[0].state, run.attempts[0].reason) == (INTERRUPTED, "handed_over")
    assert _wake_ms(run) <= WAKE_MS * SLACK


async def test_s25_frozen_application_loses_its_run_and_learns_it_on_waking(
    cluster: Cluster,
) -> None:
    runner, other, start = await _two_at_work(cluster)
    frozen_at = start["boot_ms"]
    runner.application.signal(signal.SIGSTOP)
    second = await _taken_over(cluster, start, other)
    bound = (SESSION_MS + MARGIN_MS + WAKE_MS) * SLACK
    last = (_steps_of(cluster, start) or [frozen_at])[-1]
    assert second["boot_ms"] - last <= bound
    runner.application.signal(signal.SIGCONT)
    end = await cluster.wait_for(lambda e: e["what"] == "end" and e["token"] == start["token"])
    assert end["outcome"] in ("LeaseLost", "CancelledError", "Fenced", "Cancelled")
    late = [at for at in _steps_of(cluster, start) if at > second["boot_ms"]]
    assert not late, "I4: after the thaw no step follows those of attempt 2"
    cluster.let_go()
    run = await cluster.run_when(other, "work", start["slot"], lambda r: r.state == SUCCESS)
    assert [a.state for a in run.attempts] == [INTERRUPTED, SUCCESS]


async def test_s04_frozen_sidecar_finds_its_run_taken_and_fences_nobody(cluster: Cluster) -> None:
    runner, other, start = await _two_at_work(cluster)
    await runner.freeze_sidecar()
    second = await _taken_over(cluster, start, other)
    runner.sidecar.signal(signal.SIGCONT)
    await cluster.wait_for(lambda e: e["what"] == "end" and e["token"] == start["token"])
    assert max(_steps_of(cluster, start)) < second["boot_ms"]
    cluster.let_go()
    run = await cluster.run_when(other, "work", start["slot"], lambda r: r.state == SUCCESS)
    assert [a.attempt for a in run.attempts] == [1, 2]
    # Both go on: the next slots are won again, by whoever.
    await cluster.wait_for(lambda e: e["what"] == "end" and e["slot"] > start["slot"], count=3)


async def test_s21_a_handler_that_ignores_its_timeout_never_runs_beside_another(
    cluster: Cluster,
) -> None:
    policies = {"lease": "3s", "timeout": "500ms", "cancel_grace": "1s"}
    jobs = [{"name": "slow", "kind": "stubborn", "every": "1s", "policies": policies}]
    one = await cluster.start("one", jobs)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    run = await cluster.run_when(one, "slow", start["slot"], lambda r: r.state == FAILED)
    assert run.reason == "timeout"
    runs = await cluster.runs(one, "slow")
    blocked = [r for r in runs if r.reason == "overlap" and r.blocking_slot == start["slot"]]
    assert len(blocked) >= 2, "S18: it blocks until its lease is over"
    later = [e["slot"] for e in cluster.events if e["what"] == "start"][1:]
    assert not set(later) & {r.slot for r in blocked}


async def test_s18_a_slot_that_finds_the_job_running_is_skipped(cluster: Cluster) -> None:
    one = await cluster.start("one", WORK)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    skipped = await cluster.run_when(
        one, "work", start["slot"] + 1_000, lambda r: r.state == run_pb2.RUN_STATE_SKIPPED
    )
    assert (skipped.reason, skipped.blocking_slot) == ("overlap", start["slot"])
    cluster.let_go()
    await cluster.run_when(one, "work", start["slot"], lambda r: r.state == SUCCESS)


async def test_s22_a_failed_attempt_is_final_without_retries(cluster: Cluster) -> None:
    jobs = [{"name": "bad", "kind": "failing", "every": "1s", "policies": {"lease": "3s"}}]
    one = await cluster.start("one", jobs)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    run = await cluster.run_when(one, "bad", start["slot"], lambda r: r.state == FAILED)
    assert len(run.attempts) == 1
    assert run.attempts[0].failure.type == "ValueError"
    assert run.attempts[0].failure.message == "as it was told to"


@pytest.mark.parametrize("victim", ["one", "two"])
async def test_s20_no_slot_is_missed_when_one_of_two_is_killed(
    cluster: Cluster, victim: str
) -> None:
    jobs = [{"name": "quick", "kind": "quick", "every": "500ms", "policies": {"lease": "3s"}}]
    await cluster.start("one", jobs)
    await cluster.start("two", jobs)
    await cluster.wait_for(lambda e: e["what"] == "end", count=4)
    gone = cluster.instances[victim]
    gone.sidecar.signal(signal.SIGKILL)
    gone.application.signal(signal.SIGKILL)
    other = next(i for i in cluster.instances.values() if i is not gone)
    await cluster.wait_for(lambda e: e["what"] == "end" and e["who"] == other.name, count=15)
    runs = await cluster.runs(other, "quick")
    newest = max(r.slot for r in runs)
    slots = sorted(r.slot for r in runs if r.slot <= newest - 1_000)  # later ones may wait yet
    assert slots == list(range(slots[0], slots[-1] + 1, 500))
    assert not [r for r in runs if r.reason == "missed"]
