"""Many at once on stores without leases: connections of one process, and processes (S10, I1)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import CLAIM_ONLY, PERIOD, T0, Cluster, definition
from tests.contract.racers import RACERS, raced

ROUNDS = 40


async def test_s10_connections_that_claim_one_slot_at_once_have_one_winner(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(RACERS)
    for n in range(1, ROUNDS + 1):
        slot = T0 + n * PERIOD
        cluster.advance_to(slot)
        answers = await asyncio.gather(*(node.claim(slot) for node in nodes))
        assert Counter(a.outcome for a in answers) == {"won": 1, "lost": RACERS - 1}
        (winner,) = [a.run for a in answers if a.outcome is ClaimOutcome.WON]
        assert winner is not None
        holder = winner.run.current
        assert holder is not None
        (node,) = [each for each in nodes if each.instance.instance_id == holder.instance_id]
        await node.complete(winner)


async def test_i4_a_counter_counts_every_winner_once(cluster: Cluster) -> None:
    """Everybody goes through all slots at its own pace; each slot is somebody's."""
    nodes = await cluster.nodes_of(8)
    cluster.advance_to(T0 + 30 * PERIOD)
    jobs = [f"job-{n}" for n in range(5)]
    wins: Counter[tuple[str, int]] = Counter()

    async def work(number: int) -> None:
        for n in range(1, 31):
            for job in jobs:
                slot = T0 + n * PERIOD
                answer = await nodes[number].claim(slot, job=job, start_deadline_ms=300 * PERIOD)
                if answer.outcome is ClaimOutcome.WON:
                    wins[job, slot] += 1
                else:
                    assert answer.outcome in ("lost", "old")

    for node in nodes:
        await node.register(*(definition(job) for job in jobs))
    await asyncio.gather(*(work(number) for number in range(len(nodes))))
    assert set(wins.values()) == {1}
    assert {(job, T0 + PERIOD) for job in jobs} <= set(wins), "the first slots were nobody's past"


@pytest.mark.timeout(120)
async def test_s10_processes_that_claim_at_once_have_one_winner(
    backend: str, directory: Path
) -> None:
    """Sixteen processes, which also open the new store at once."""
    url = CLAIM_ONLY[backend](directory).url
    if not url:
        pytest.skip("no other process can open this store")
    outputs = await raced(Path(__file__).with_name("racer.py"), url, ROUNDS)
    wins = Counter(n for output in outputs for n in output)
    assert set(wins.values()) == {1}
    assert ROUNDS in wins, "the newest slot is passed over by nobody"
