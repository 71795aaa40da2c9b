"""What a watch of runs (AdminService.WatchRuns) finds on each store, by looking at its history."""

from __future__ import annotations

import pytest

from anarchon_server.core import limits
from anarchon_server.core.model import RunState
from anarchon_server.core.store import RunQuery
from anarchon_server.core.watching import RunWatch
from tests.contract.harness import JOB, LEASE, PERIOD, SECOND, T0, Cluster, Node, slots_of

SLOT = T0 + PERIOD


async def news(node: Node, watch: RunWatch) -> list[tuple[int, RunState]]:
    """What a round of looks finds."""
    found: list[tuple[int, RunState]] = []
    while (look := watch.next_look()) is not None:
        reply = await node.store.runs(look)
        changed = watch.saw(reply.answers, reply.store_at)
        found += [(view.run.slot - T0, view.run.state) for view in changed]
    return found


async def test_a_watch_sees_every_state_that_lasts_from_whichever_instance(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    watch = RunWatch(RunQuery(job=JOB))
    assert await news(second, watch) == []
    cluster.advance_to(SLOT)
    held = await first.win(SLOT)
    assert await news(second, watch) == [(PERIOD, RunState.CLAIMED)]
    cluster.advance(SECOND)
    await first.renew(held)
    assert await news(second, watch) == [], "a renewed lease is no change"
    await first.renew(held, started_at=cluster.now)
    assert await news(second, watch) == [(PERIOD, RunState.RUNNING)]
    await first.complete(held)
    assert await news(second, watch) == [(PERIOD, RunState.SUCCESS)]
    assert await news(second, watch) == []


async def test_s19_a_lease_that_is_over_and_one_that_is_mended_are_changes(
    cluster: Cluster, one: Node
) -> None:
    watch = RunWatch(RunQuery())
    cluster.advance_to(SLOT)
    held = await one.win(SLOT)
    await one.renew(held, started_at=cluster.now)
    await news(one, watch)
    cluster.advance(LEASE + SECOND)
    assert await news(one, watch) == [(PERIOD, RunState.INTERRUPTED)]
    await one.renew(held)
    assert await news(one, watch) == [(PERIOD, RunState.RUNNING)]


async def test_a_run_that_comes_and_ends_between_two_looks_and_a_plans_rows_are_seen(
    cluster: Cluster, one: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAGE_MAX", 2)
    cluster.advance_to(SLOT)
    await one.complete(await one.win(SLOT))
    cluster.advance_to(T0 + 6 * PERIOD)
    watch = RunWatch(RunQuery())
    assert await news(one, watch) == []
    await one.plan(slots_of("every:10s", SLOT, T0 + 4 * PERIOD), settled=SLOT)
    await one.complete(await one.win(T0 + 6 * PERIOD))
    found = [each for _ in range(8) for each in await news(one, watch)]
    assert sorted(found) == [
        *((number * PERIOD, RunState.SKIPPED) for number in (2, 3, 4)),
        (6 * PERIOD, RunState.SUCCESS),
    ]
