"""Many at once: connections of one process, and processes (S10, S18, S19, I1, I4)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from anarchon_server.core.model import OverlapPolicy, RunState
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import BACKENDS, LEASE, PERIOD, T0, Cluster, definition

RACERS = 16
ROUNDS = 20


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
        await nodes[0].complete(winner)


async def test_s19_connections_that_take_over_at_once_have_one_winner(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(RACERS)
    for n in range(1, ROUNDS + 1):
        slot = T0 + n * 10 * PERIOD
        cluster.advance_to(slot)
        seen = await nodes[n % RACERS].win(slot)
        cluster.advance(LEASE)
        answers = await asyncio.gather(*(node.take_over(seen) for node in nodes))
        assert Counter(a.outcome for a in answers) == {"won": 1, "lost": RACERS - 1}
        (winner,) = [a.run for a in answers if a.outcome is ClaimOutcome.WON]
        assert winner is not None
        await nodes[0].complete(winner)


async def test_s18_connections_that_claim_different_slots_of_a_job_at_once_start_one_run(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(4)
    cluster.advance_to(T0 + 4 * PERIOD)
    answers = await asyncio.gather(
        *(
            node.claim(T0 + n * PERIOD, previous_slot=T0, start_deadline_ms=5 * PERIOD)
            for n, node in enumerate(nodes, 1)
        )
    )
    outcomes = [a.outcome for a in answers]
    assert outcomes.count(ClaimOutcome.WON) == 1
    assert set(outcomes) <= {"won", "skipped", "late"}


async def test_i4_an_unprotected_counter_counts_every_winner(cluster: Cluster) -> None:
    """Under `skip` a run has the job for itself: read, wait and write lose no update."""
    nodes = await cluster.nodes_of(8)
    counter, wins = 0, 0

    async def work(number: int) -> None:
        nonlocal counter, wins
        node = nodes[number]
        for n in range(1, 60):
            slot = T0 + n * PERIOD
            if cluster.now < slot:
                cluster.advance_to(slot)
            answer = await node.claim(slot, start_deadline_ms=1_000 * PERIOD)
            if answer.outcome is ClaimOutcome.WON:
                wins += 1
                before = counter
                await asyncio.sleep(0)
                await node.renew(answer.run)  # type: ignore[arg-type]
                counter = before + 1
                await node.complete(answer.run)  # type: ignore[arg-type]

    await asyncio.gather(*(work(number) for number in range(len(nodes))))
    rows = await nodes[0].history(limit=500)
    done = [seen for seen in rows if seen.run.state is RunState.SUCCESS]
    assert counter == wins == len(done) > 0
    assert len(rows) == 59, "every slot has its row (I6)"


async def test_s17_fences_of_claims_that_race_are_all_different(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(8)
    cluster.advance_to(T0 + 8 * PERIOD)
    answers = await asyncio.gather(
        *(
            node.claim(
                T0 + n * PERIOD,
                overlap=OverlapPolicy.ALLOW,
                previous_slot=T0 + n * PERIOD - 1,
                start_deadline_ms=9 * PERIOD,
            )
            for n, node in enumerate(nodes, 1)
        )
    )
    fences = {a.run.run.current.fence for a in answers if a.run and a.run.run.current}
    assert len(fences) == 8


@pytest.mark.timeout(120)
async def test_s10_processes_that_claim_at_once_have_one_winner(
    backend: str, directory: Path
) -> None:
    """Sixteen processes, which also open the new store at once; two attempts a slot."""
    url = BACKENDS[backend](directory).url
    if not url:
        pytest.skip("no other process can open this store")
    racer = Path(__file__).with_name("racer.py")
    root = Path(__file__).parents[2]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(racer),
            url,
            str(ROUNDS),
            cwd=root,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(RACERS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert {process.returncode for process in processes} == {0}
    wins = [tuple(win) for output, _ in outputs for win in json.loads(output)]
    expected = [(n, attempt) for n in range(1, ROUNDS + 1) for attempt in (1, 2)]
    assert sorted(wins) == expected


async def test_a_namespace_of_one_store_is_not_slowed_or_seen_by_another(
    cluster: Cluster,
) -> None:
    """S31: the same slots of the same job, at once, in different namespaces."""
    nodes = [await cluster.node(namespace=f"ns-{n}") for n in range(4)]
    await asyncio.gather(*(node.register(definition()) for node in nodes))
    cluster.advance_to(T0 + PERIOD)
    answers = await asyncio.gather(*(node.claim(T0 + PERIOD) for node in nodes))
    assert {a.outcome for a in answers} == {"won"}
