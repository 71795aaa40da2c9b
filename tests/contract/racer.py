"""The race of `test_races`: every slot is claimed, handed over by its winner, taken over once.

Run as a script, by `racers.raced`. Nobody waits for anybody, once all have opened the store.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from anarchon_server.core.model import OverlapPolicy
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import PERIOD, T0, FakeClock, definition
from tests.contract.racers import opened, run_from_here


async def race(url: str, rounds: int) -> list[tuple[int, int]]:
    clock = FakeClock(wall=(T0 + rounds * PERIOD) * 1_000)
    node = await opened(url, clock)
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
    await node.store.close()
    return wins


if __name__ == "__main__":
    run_from_here(race)
