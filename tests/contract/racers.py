"""Sixteen processes that claim the same slots at once, each with a connection of its own.

They are forked from one process that has imported what they need: they start within milliseconds
of each other, where as many interpreters would take most of a minute on a small machine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from anarchon_backends.sqlite import open_store
from anarchon_server.core.store import OpenOptions, Store
from tests.contract.harness import Cluster, FakeClock, Node
from tests.servers import nats, postgres, rabbitmq, redis
from tests.servers.lifetime import die_with_parent

RACERS = 16
ROOT = Path(__file__).parents[2]
OPENERS: dict[str, Callable[[str, OpenOptions], Store]] = {
    "sqlite": open_store,
    "postgresql": postgres.open_virtual,
    "redis": redis.open_virtual,
    "nats": nats.open_virtual,
    "amqp": rabbitmq.open_virtual,
}
_TOGETHER_S = 60.0
_FORK = multiprocessing.get_context("fork")
_together: Barrier = _FORK.Barrier(RACERS)

Race = Callable[[str, int], Coroutine[Any, Any, list[Any]]]


async def opened(url: str, clock: FakeClock, node_type: type[Node] = Node) -> Node:
    """This process's instance, once all processes have opened the store."""
    scheme = url.partition(":")[0]
    store = OPENERS[scheme](url, OpenOptions("default", clock, op_timeout_ms=60_000))
    await store.open()
    await asyncio.to_thread(_together.wait, _TOGETHER_S)
    cluster = Cluster(None, clock)  # type: ignore[arg-type]
    return node_type(cluster, store, f"host:{os.getpid()}", f"inc-{os.getpid()}")


def run_from_here(race: Race) -> None:
    """In the process that `raced` starts: forks the racers, and prints what each won as JSON."""
    url, rounds = sys.argv[1], int(sys.argv[2])
    with ProcessPoolExecutor(RACERS, _FORK, die_with_parent) as processes:
        # As none of them goes on before all have come, each process has one race.
        races = [processes.submit(_run, race, url, rounds) for _ in range(RACERS)]
        won = [each.result() for each in races]
    assert len({pid for pid, _ in won}) == RACERS
    json.dump([wins for _, wins in won], sys.stdout)


def _run(race: Race, url: str, rounds: int) -> tuple[int, list[Any]]:
    return os.getpid(), asyncio.run(race(url, rounds))


async def raced(script: Path, url: str, rounds: int) -> list[list[Any]]:
    """What each of the processes of `script` won."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), url, str(rounds)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # so that all of them can be ended together
        preexec_fn=die_with_parent,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, errors.decode()
    won: list[list[Any]] = json.loads(output)
    return won
