"""What a watch of runs (AdminService.WatchRuns) finds on stores without leases."""

from __future__ import annotations

from anarchon_server.core.model import RunState
from anarchon_server.core.store import RunQuery
from anarchon_server.core.watching import RunWatch
from tests.contract.harness import JOB, PERIOD, SECOND, T0, Cluster, Node
from tests.contract.test_watching import news

SLOT = T0 + PERIOD


async def test_an_instance_sees_its_own_runs_and_where_the_history_is_shared_those_of_others(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    shared = first.store.capabilities.history
    own, other = RunWatch(RunQuery(job=JOB)), RunWatch(RunQuery(job=JOB))
    assert await news(first, own) == await news(second, other) == []
    cluster.advance_to(SLOT)
    held = await first.win(SLOT)
    began = await news(first, own)
    assert [slot for slot, _ in began] == [PERIOD]
    assert await news(second, other) == (began if shared else [])
    cluster.advance(SECOND)
    await first.complete(held)
    ended = [(PERIOD, RunState.SUCCESS)]
    assert await news(first, own) == ended
    assert await news(second, other) == (ended if shared else [])
    assert await news(first, own) == []
