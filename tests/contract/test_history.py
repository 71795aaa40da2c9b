"""What is kept and shown of runs (S30)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from anarchon_backends import nats_claim
from anarchon_backends.nats_lease import _reading as nats_reading
from anarchon_backends.redis import _sieve as redis_sieve
from anarchon_server.core.limits import NEVER
from anarchon_server.core.model import (
    AttemptCause,
    Failure,
    Outcome,
    OverlapPolicy,
    RunState,
    RunView,
)
from tests.contract.harness import DAY, LEASE, PERIOD, SECOND, T0, Cluster, Node, definition


async def test_s30_an_attempt_leaves_all_that_history_promises(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    slot = T0 + PERIOD
    cluster.advance_to(slot + 100)
    seen = await first.win(slot)
    cluster.advance(100)
    await first.renew(seen, started_at=cluster.now)
    cluster.advance(LEASE)
    answer = await second.take_over(seen)
    assert answer.run is not None
    cluster.advance(SECOND)
    failure = Failure("KeyError", "'x' — ✓", "Traceback:\n  ...", permanent=True, retry_after_ms=5)
    await second.complete(answer.run, Outcome(failure=failure, elapsed_ms=250))
    (shown,) = await first.history(traces=True)
    one, two_ = shown.attempts
    assert (one.attempt, one.instance_id, one.cause) == (1, "host:1", AttemptCause.CLAIM)
    assert (one.state, one.claimed_at, one.started_at) == (
        RunState.INTERRUPTED,
        slot + 100,
        slot + 200,
    )
    assert one.ended_at == slot + 200 + LEASE
    assert (two_.attempt, two_.instance_id, two_.cause) == (2, "host:2", AttemptCause.TAKEOVER)
    assert (two_.state, two_.failure) == (RunState.FAILED, failure)
    assert two_.ended_at == shown.run.ended_at == cluster.now
    assert two_.started_at == cluster.now - 250
    assert shown.run.current == two_


@pytest.mark.parametrize(
    ("elapsed_ms", "began_after_ms"),
    [(4_900, 200), (0, 5_000), (60_000, 100)],
    ids=["as the client measured it", "not measured", "never before the claim"],
)
async def test_s30_a_start_is_the_earlier_of_what_was_named_and_what_was_measured(
    cluster: Cluster, one: Node, elapsed_ms: int, began_after_ms: int
) -> None:
    slot = T0 + PERIOD
    cluster.advance_to(slot + 100)
    seen = await one.win(slot)
    cluster.advance_to(slot + 5_000)
    await one.renew(seen, started_at=cluster.now)
    cluster.advance_to(slot + 5_100)
    await one.complete(seen, Outcome(elapsed_ms=elapsed_ms))
    (shown,) = await one.history()
    assert shown.attempts[0].started_at == slot + began_after_ms


async def test_s30_stack_traces_are_shown_only_where_they_are_asked_for(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + PERIOD)
    seen = await one.win(T0 + PERIOD)
    await one.complete(seen, Outcome(failure=Failure("E", "m", "long trace")))
    (shown,) = await one.history()
    assert shown.run.current is not None
    for attempt in (shown.run.current, *shown.attempts):
        assert attempt.failure == Failure("E", "m")
    (view,) = (await one.store.jobs(["job"], "", 1)).answers
    assert "long trace" not in repr(view)


async def some_runs(cluster: Cluster, one: Node) -> None:
    """10 success, 20 failed, 30 lapsed, 40 claimed of `job`; 20 and 40 of `b`, claimed."""
    await one.register(definition(), definition("b"))
    free = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY}
    cluster.advance_to(T0 + 40 * SECOND)
    await one.win(T0 + 30 * SECOND, lease_ms=3 * SECOND, **free)
    cluster.advance(3 * SECOND)
    await one.complete(await one.win(T0 + 10 * SECOND, **free))
    failed = Outcome(failure=Failure("E"))
    await one.complete(await one.win(T0 + 20 * SECOND, **free), failed)
    await one.win(T0 + 40 * SECOND, **free)
    for second in (20, 40):
        await one.win(T0 + second * SECOND, job="b", **free)


async def slots(one: Node, **query: object) -> list[tuple[str, int]]:
    found = await one.history(**query)
    return [(seen.run.job, (seen.run.slot - T0) // SECOND) for seen in found]


async def test_s30_runs_are_listed_newest_slot_first(cluster: Cluster, one: Node) -> None:
    await some_runs(cluster, one)
    everything = [("job", 40), ("b", 40), ("job", 30), ("job", 20), ("b", 20), ("job", 10)]
    assert await slots(one) == everything
    assert await slots(one, job="b") == [("b", 40), ("b", 20)]
    assert await slots(one, slot=T0 + 20 * SECOND) == [("job", 20), ("b", 20)]
    assert await slots(one, job="job", slot=T0 + 20 * SECOND) == [("job", 20)]
    assert await slots(one, from_slot=T0 + 30 * SECOND) == everything[:3]
    assert await slots(one, until_slot=T0 + 30 * SECOND) == everything[3:]
    assert await slots(one, job="job", from_slot=T0 + 20 * SECOND, until_slot=T0 + 40 * SECOND) == [
        ("job", 30),
        ("job", 20),
    ]
    assert await slots(one, job="missing") == []


async def test_s30_pages_go_on_where_the_last_one_ended(cluster: Cluster, one: Node) -> None:
    await some_runs(cluster, one)
    pages: list[tuple[str, int]] = []
    after = None
    while True:
        page = await one.history(limit=2, after=after)
        if not page:
            break
        assert len(page) == 2
        pages += [(seen.run.job, (seen.run.slot - T0) // SECOND) for seen in page]
        after = (page[-1].run.slot, page[-1].run.job)
    assert pages == await slots(one)


async def test_s30_pages_go_on_where_a_run_was_that_is_pruned_meanwhile(
    cluster: Cluster, one: Node
) -> None:
    await some_runs(cluster, one)
    gone = (T0 + 40 * SECOND, "c")  # between the two at that slot
    assert await slots(one, limit=1, after=gone) == [("b", 40)]
    assert await slots(one, limit=2, after=gone) == [("b", 40), ("job", 30)]
    claimed = frozenset({RunState.CLAIMED})
    assert await slots(one, limit=1, after=gone, states=claimed) == [("b", 40)]


async def test_s19_runs_are_found_by_the_state_they_show(cluster: Cluster, one: Node) -> None:
    await some_runs(cluster, one)

    async def found(*states: RunState) -> list[tuple[str, int]]:
        return await slots(one, states=frozenset(states))

    assert await found(RunState.SUCCESS) == [("job", 10)]
    assert await found(RunState.FAILED) == [("job", 20)]
    assert await found(RunState.INTERRUPTED) == [("job", 30)]
    assert await found(RunState.CLAIMED) == [("job", 40), ("b", 40), ("b", 20)]
    assert await found(RunState.RUNNING, RunState.DUE) == []
    assert await found(RunState.SUCCESS, RunState.INTERRUPTED) == [("job", 30), ("job", 10)]
    assert await slots(one, states=frozenset({RunState.CLAIMED}), limit=2) == [
        ("job", 40),
        ("b", 40),
    ]


async def test_s30_runs_are_found_by_any_instance_that_attempted_them(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + PERIOD)
    await first.release(await first.win(T0 + PERIOD))
    seen = await second.look(T0 + PERIOD)
    assert seen is not None
    await second.take_over(seen)
    for label in ("host:1", "host:2"):
        assert await slots(first, instance_id=label) == [("job", 10)]
    assert await slots(first, instance_id="host:3") == []


async def test_s30_a_page_of_which_few_runs_are_wanted_may_end_early_and_says_where(
    cluster: Cluster, one: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reading in (redis_sieve, nats_reading):
        monkeypatch.setattr(reading, "LOOKED_MAX", 2)
    for step in ("STEP", "STEP_LEAST"):
        monkeypatch.setattr(redis_sieve, step, 2)
    monkeypatch.setattr(nats_reading, "_CHUNK", 2)
    for number in range(1, 8):
        cluster.advance_to(T0 + number * PERIOD)
        failure = Failure("E") if number in (1, 2) else None
        await one.complete(await one.win(cluster.now), Outcome(failure=failure))
    found, pages = await one.paged(states=frozenset({RunState.FAILED}), limit=1)
    assert found == [("job", 20), ("job", 10)]
    assert pages <= 6


@pytest.mark.parametrize("limit", [1, 3])
async def test_s30_what_is_wanted_of_many_jobs_is_found_however_little_is_looked_at_in_a_step(
    cluster: Cluster, two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    await mixed_runs(cluster, two)
    await two[0].win(cluster.now, job="c")
    cluster.advance(2 * LEASE)
    await find_each_wish(two[1], monkeypatch, limit)


async def mixed_runs(cluster: Cluster, two: tuple[Node, Node]) -> None:
    """Some at one slot, some of which failed; by both."""
    jobs = ("a", "ab", "b", "c")
    for node in two:
        await node.register(*(definition(job) for job in jobs))
    for number in range(1, 7):
        cluster.advance_to(T0 + number * PERIOD)
        for place, job in enumerate(jobs[: 1 + number % 4]):
            outcome = Outcome(failure=Failure("E") if (number + place) % 3 == 0 else None)
            node = two[(number + place) % 2]
            await node.complete(await node.win(cluster.now, job=job), outcome)


async def find_each_wish(node: Node, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Page by page, of which each looks at little; a page or a step may end between runs of one slot."""
    everything = await node.history(limit=500)
    for name, most in _LITTLE.items():
        monkeypatch.setattr(redis_sieve, name, most)
    for backend in (nats_claim, nats_reading):
        monkeypatch.setattr(backend, "LOOKED_MAX", 5)
        monkeypatch.setattr(backend, "_CHUNK", 2)
    for wish in WISHES:
        wanted = [each for each in everything if is_wanted(each, **wish)]
        found, _ = await node.paged(**wish, limit=limit)
        assert found == [(each.run.job, (each.run.slot - T0) // SECOND) for each in wanted], wish


_LITTLE = {"STEP": 3, "STEP_LEAST": 1, "LOOKED_MAX": 5, "READ_MAX": 2, "READ_LEAST": 1}

WISHES: list[dict[str, Any]] = [
    {"states": frozenset({RunState.SUCCESS})},
    {"states": frozenset({RunState.FAILED})},
    {"states": frozenset({RunState.CLAIMED})},
    {"states": frozenset({RunState.INTERRUPTED, RunState.FAILED})},
    {"states": frozenset({RunState.FAILED}), "job": "a"},
    {"states": frozenset({RunState.SUCCESS}), "instance_id": "host:2"},
    {"states": frozenset({RunState.SUCCESS}), "until_slot": T0 + 5 * PERIOD},
    {"instance_id": "host:1"},
    {"instance_id": "host:9"},
]


def is_wanted(
    seen: RunView,
    states: Collection[RunState] = frozenset(RunState),
    job: str = "",
    instance_id: str = "",
    until_slot: int = NEVER,
) -> bool:
    return (
        seen.run.state in states
        and seen.run.job == (job or seen.run.job)
        and seen.run.slot < until_slot
        and seen.attempts[0].instance_id == (instance_id or seen.attempts[0].instance_id)
    )
