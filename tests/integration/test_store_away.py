"""What becomes of runs and results while the store does not answer (S27)."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster

SUCCESS = run_pb2.RUN_STATE_SUCCESS
JOBS = [{"name": "work", "kind": "working", "every": "1s", "policies": {"lease": "30s"}}]


class Lock:
    """Another process's lock on the whole database file: nothing can be written meanwhile."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN EXCLUSIVE")

    def __exit__(self, *_: object) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


async def test_s27_a_result_waits_for_the_store_and_counts_when_it_is_back(
    cluster: Cluster,
) -> None:
    one = await cluster.start("one", JOBS)
    start = await cluster.wait_for(lambda e: e["what"] == "start")
    with Lock(cluster.folder / "store.db"):
        cluster.let_go()
        await cluster.wait_for(lambda e: e["what"] == "end" and e["token"] == start["token"])
        await _logged(one.sidecar.log, "store_away")
    run = await cluster.run_when(one, "work", start["slot"], lambda r: r.state == SUCCESS)
    assert len(run.attempts) == 1
    await _logged(one.sidecar.log, "store_back")
    assert one.sidecar.log.read_text().count("store_away") == 1, "it is said once"
    assert one.sidecar.child.returncode is None


async def _logged(log: Path, word: str) -> None:
    async with asyncio.timeout(20):
        while word not in await asyncio.to_thread(log.read_text):
            pass
