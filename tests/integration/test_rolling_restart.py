"""All instances of a service are restarted, one after another, while their jobs go on.

As a deployment does it: a pod's application gets SIGTERM, its sidecar once that is gone, and the
next is stopped when the new one is ready. `bench/rolling_restart.py` measures the same on each store.
"""

from __future__ import annotations

import pytest

from tests.integration.account import HANDED_OVER, SUCCESS, Grid, account, has_ended
from tests.integration.harness import Cluster, Event

NAMES = ("one", "two", "three")
# Leases of 30 s, so that a run taken over in time was handed over.
QUICK = {f"quick-{n}": Grid(500) for n in range(3)}
LONG = {"long-1": Grid(1_000), "long-2": Grid(1_000)}
GRIDS = {**QUICK, **LONG}
JOBS = [{"name": name, "kind": "quick", "every": "500ms"} for name in QUICK] + [
    {"name": name, "kind": "working", "every": "1s"} for name in LONG
]


def _is_work(event: Event, what: str) -> bool:
    return bool(event["what"] == what and event["job"] in LONG)


@pytest.mark.timeout(180)
async def test_s23_a_rolling_restart_loses_nothing_doubles_nothing_and_hands_long_runs_over(
    cluster: Cluster,
) -> None:
    for name in NAMES:
        await cluster.start(name, JOBS, stop_grace="200ms")
    await cluster.wait_for(lambda e: _is_work(e, "start"), count=len(LONG))
    for name in NAMES:
        instance = cluster.instances[name]
        assert await instance.stop() == (0, 0)
        # Whatever it ran is at work elsewhere, while the others go on.
        stopped = [e for e in cluster.events if e["what"] == "end" and _is_work(e, "end")]
        await cluster.wait_for(lambda e: _is_work(e, "start"), count=len(LONG) + len(stopped))
        await instance.start_again()
    last = await cluster.wait_for(
        lambda e: e["what"] == "end" and e["job"] in QUICK and e["who"] == NAMES[-1],
        count=1 + sum(e["what"] == "end" and e["who"] == NAMES[-1] for e in cluster.events),
    )
    cluster.let_go()
    one = cluster.instances["one"]
    for job in LONG:
        slot = next(e["slot"] for e in cluster.events if e["what"] == "start" and e["job"] == job)
        run = await cluster.run_when(one, job, slot, lambda r: r.state == SUCCESS)
        assert len(run.attempts) > 1
        assert {a.reason for a in run.attempts[:-1]} == {HANDED_OVER}
    until = last["slot"]
    runs = await cluster.runs_when(one, lambda runs: has_ended(GRIDS, runs, until))
    found = account(GRIDS, runs, cluster.events, until)
    assert not found.lost, f"{found.lost}\n{cluster.report()}"
    assert not found.doubled, f"{found.doubled}\n{cluster.report()}"
    assert found.handed_over >= len(LONG)
