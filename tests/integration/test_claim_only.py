"""Real sidecars and applications on a store without leases: who runs a slot, and who goes on."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster
from tests.servers import redis

QUICK = [
    {"name": name, "kind": "quick", "every": "200ms", "policies": {"overlap": "allow"}}
    for name in ("first", "second")
]
WORK = [{"name": "work", "kind": "working", "every": "1s", "policies": {"overlap": "allow"}}]
LATELY_MS = 2_000
"""Slots so near to the newest may not be decided yet."""


@pytest.fixture
def strategy(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The cluster's store is a Redis of its own, by this strategy."""
    name: str = getattr(request, "param", "script")
    with redis.private("redis") as server:
        cluster.store = f"{server.url}?strategy={name}"
        yield name


@pytest.mark.parametrize("strategy", ["script", "stream-id"], indirect=True)
async def test_i1_every_slot_has_one_winner_among_three_instances(
    cluster: Cluster, strategy: str
) -> None:
    """And what `stream-id` passed over is said to be missed (I6)."""
    for name in ("one", "two", "three"):
        await cluster.start(name, QUICK)
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
        runs = await cluster.runs(cluster.instances["one"], job)
        newest = max(r.slot for r in runs)
        slots = sorted(r.slot for r in runs if r.slot <= newest - LATELY_MS)
        assert slots == list(range(slots[0], slots[-1] + 1, 200)), "none is lost"
        words = {r.reason for r in runs if r.state == run_pb2.RUN_STATE_SKIPPED}
        assert words <= ({"missed"} if strategy == "stream-id" else set())


async def test_s26_a_sidecar_that_comes_back_adopts_what_its_application_runs(
    cluster: Cluster, strategy: str
) -> None:
    one = await cluster.start("one", WORK)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    one.sidecar.signal(signal.SIGKILL)
    await one.sidecar.ended()
    await one.start_sidecar()
    cluster.let_go()
    run = await cluster.run_when(
        one, "work", start["slot"], lambda r: r.state == run_pb2.RUN_STATE_SUCCESS
    )
    assert [attempt.attempt for attempt in run.attempts] == [1]


async def test_nobody_takes_over_from_an_instance_that_is_gone(
    cluster: Cluster, strategy: str
) -> None:
    """The other goes on with the next slots."""
    await cluster.start("one", WORK)
    await cluster.start("two", WORK)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    runner = cluster.instances[start["who"]]
    (other,) = (i for i in cluster.instances.values() if i is not runner)
    runner.sidecar.signal(signal.SIGKILL)
    runner.application.signal(signal.SIGKILL)
    seen = len(cluster.events)
    for _ in range(3):
        newest = max(e["slot"] for e in cluster.events if "slot" in e)
        await cluster.wait_for(
            lambda e, newest=newest: e["what"] == "start" and e["slot"] > newest  # type: ignore[misc]
        )
    starts = [e for e in cluster.events[seen:] if e["what"] == "start"]
    assert {e["who"] for e in starts} == {other.name}
    (run,) = [r for r in await cluster.runs(other, "work") if r.slot == start["slot"]]
    assert [attempt.attempt for attempt in run.attempts] == [1]
    assert run.state not in (run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_FAILED)
    cluster.let_go()
