"""One of many processes that claim the same slots at once. Prints what it won as JSON.

Opens the store by its URL when it starts, says `ready`, and begins at a line on standard input.
Every slot is claimed, handed over by its winner and taken over once; nobody waits for anybody.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from anarchon_backends.sqlite import open_store
from anarchon_server.core.model import OverlapPolicy
from anarchon_server.core.store import ClaimOutcome, OpenOptions
from tests.contract.harness import PERIOD, T0, Cluster, FakeClock, Node, definition
from tests.servers import nats, postgres, rabbitmq, redis

OPENERS = {
    "sqlite": open_store,
    "postgresql": postgres.open_virtual,
    "redis": redis.open_virtual,
    "nats": nats.open_virtual,
    "amqp": rabbitmq.open_virtual,
}


async def race(url: str, rounds: int) -> list[tuple[int, int]]:
    clock = FakeClock(wall=(T0 + rounds * PERIOD) * 1_000)
    scheme = url.partition(":")[0]
    store = OPENERS[scheme](url, OpenOptions("default", clock, op_timeout_ms=20_000))
    await store.open()
    node = Node(Cluster(None, clock), store, f"host:{os.getpid()}", f"inc-{os.getpid()}")  # type: ignore[arg-type]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    clock.wall = T0 * 1_000
    await node.register(definition())
    clock.wall = (T0 + rounds * PERIOD) * 1_000
    given = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": rounds * PERIOD}
    wins: list[tuple[int, int]] = []
    for n in range(1, rounds + 1):
        answer = await node.claim(T0 + n * PERIOD, **given)
        if answer.outcome is ClaimOutcome.WON:
            assert answer.run is not None
            wins.append((n, 1))
            await node.release(answer.run)
        seen = await node.look(T0 + n * PERIOD)
        if seen is not None and seen.takeable and seen.run.attempt == 1:
            answer = await node.take_over(seen, **given)
            if answer.outcome is ClaimOutcome.WON:
                wins.append((n, 2))
    await store.close()
    return wins


if __name__ == "__main__":
    json.dump(asyncio.run(race(sys.argv[1], int(sys.argv[2]))), sys.stdout)
