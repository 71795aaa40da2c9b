"""The race of `test_races` on stores without leases: every slot is claimed by all.

Run as a script, by `racers.raced`. Nobody waits for anybody, once all have opened the store.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import PERIOD, T0, ClaimOnlyNode, FakeClock, definition
from tests.contract.racers import opened, run_from_here


async def race(url: str, rounds: int) -> list[int]:
    clock = FakeClock(wall=T0 * 1_000)
    node = await opened(url, clock, ClaimOnlyNode)
    await node.register(definition())
    clock.wall = (T0 + rounds * PERIOD) * 1_000
    wins: list[int] = []
    for n in range(1, rounds + 1):
        answer = await node.claim(T0 + n * PERIOD, start_deadline_ms=rounds * PERIOD)
        if answer.outcome is ClaimOutcome.WON:
            wins.append(n)
    await node.store.close()
    return wins


if __name__ == "__main__":
    run_from_here(race)
