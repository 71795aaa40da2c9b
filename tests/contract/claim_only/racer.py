"""One of many processes that claim the same slots at once. Prints what it won as JSON.

Opens the store by its URL when it starts, says `ready`, and begins at a line on standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from anarchon_server.core.store import ClaimOutcome, OpenOptions
from tests.contract.harness import PERIOD, T0, ClaimOnlyNode, Cluster, FakeClock, definition
from tests.contract.racer import OPENERS


async def race(url: str, rounds: int) -> list[int]:
    clock = FakeClock(wall=T0 * 1_000)
    scheme = url.partition(":")[0]
    store = OPENERS[scheme](url, OpenOptions("default", clock, op_timeout_ms=20_000))
    await store.open()
    node = ClaimOnlyNode(Cluster(None, clock), store, f"host:{os.getpid()}", f"inc-{os.getpid()}")  # type: ignore[arg-type]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    await node.register(definition())
    clock.wall = (T0 + rounds * PERIOD) * 1_000
    wins: list[int] = []
    for n in range(1, rounds + 1):
        answer = await node.claim(T0 + n * PERIOD, start_deadline_ms=rounds * PERIOD)
        if answer.outcome is ClaimOutcome.WON:
            wins.append(n)
    await store.close()
    return wins


if __name__ == "__main__":
    json.dump(asyncio.run(race(sys.argv[1], int(sys.argv[2]))), sys.stdout)
