"""Real sidecars and applications on RabbitMQ, which keeps claims and nothing else."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster
from tests.servers import rabbitmq

JOBS = [
    {
        "name": f"job-{n}",
        "kind": "quick",
        "every": "5s",
        "policies": {"overlap": "allow", "jitter": "300ms"},
    }
    for n in range(5)
]
WORK = [{"name": "work", "kind": "working", "every": "5s", "policies": {"overlap": "allow"}}]


@pytest.fixture(autouse=True)
def broker(cluster: Cluster) -> None:
    """The cluster's store is the session's oldest RabbitMQ, in a virtual host made for the test."""
    server = rabbitmq.session_broker("rabbitmq")
    if "integration" in server.ctl("list_vhosts"):
        server.ctl("delete_vhost", "integration")
    server.ctl("add_vhost", "integration")
    server.ctl("set_permissions", "-p", "integration", "guest", ".*", ".*", ".*")
    cluster.store = server.url.replace(f"/{rabbitmq.VHOST}", "/integration")


async def test_i1_every_slot_has_one_winner_among_three_instances_and_none_is_lost(
    cluster: Cluster,
) -> None:
    """S30: each shows what it ran, and all of them together every slot."""
    names = ("one", "two", "three")
    for name in names:
        await cluster.start(name, JOBS)
    await cluster.wait_for(lambda e: e["what"] == "end", count=20)
    starts = [e for e in cluster.events if e["what"] == "start"]
    assert set(Counter((e["job"], e["slot"]) for e in starts).values()) == {1}
    assert len({e["who"] for e in starts}) > 1
    for job in {e["job"] for e in starts}:
        slots = sorted(e["slot"] for e in starts if e["job"] == job)
        assert slots == list(range(slots[0], slots[-1] + 1, 5_000)), "none is lost"
    for name in names:
        shown = await cluster.runs(cluster.instances[name], "job-0")
        ended = {
            e["slot"]
            for e in cluster.events
            if (e["what"], e.get("job"), e.get("who")) == ("end", "job-0", name)
        }
        assert ended <= {run.slot for run in shown}
        others = {e["slot"] for e in starts if e["job"] == "job-0" and e["who"] != name}
        assert not others & {run.slot for run in shown}


async def test_s26_a_sidecar_that_comes_back_adopts_what_its_application_runs(
    cluster: Cluster,
) -> None:
    """By the token's number alone: the sidecar before it kept its history in memory."""
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
