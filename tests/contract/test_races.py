"""Many at once: connections of one process, and processes (S10, S18, S19, S20, S22, S29, I1, I4)."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from anarchon_server.core.model import CatchUpPolicy, Failure, Outcome, OverlapPolicy, RunState
from anarchon_server.core.store import ClaimOutcome
from tests.contract.harness import BACKENDS, DAY, LEASE, PERIOD, T0, Cluster, able, definition
from tests.contract.racers import RACERS, raced

ROUNDS = 20
controls = pytest.mark.parametrize("backend", able(lambda can: can.control), indirect=True)


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


@pytest.mark.parametrize("backend", able(lambda can: can.retries), indirect=True)
async def test_s22_connections_that_claim_a_retry_at_once_have_one_winner(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(RACERS)
    cluster.advance_to(T0 + PERIOD)
    seen = await nodes[0].win(T0 + PERIOD, retries=5)
    for _ in range(5):
        answer = await nodes[0].complete(seen, Outcome(failure=Failure("E")), retry_in_ms=0)
        assert answer.run is not None
        retried = answer.run
        answers = await asyncio.gather(*(node.take_over(retried, retries=5) for node in nodes))
        assert Counter(a.outcome for a in answers) == {"won": 1, "lost": RACERS - 1}
        (seen,) = [a.run for a in answers if a.run and a.outcome is ClaimOutcome.WON]


@pytest.mark.parametrize(
    "backend", able(lambda can: CatchUpPolicy.ALL in can.catch_up), indirect=True
)
async def test_s20_connections_that_plan_and_claim_at_once_run_every_missed_slot_once(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(8)
    cluster.advance_to(T0 + 12 * PERIOD)
    slots = [T0 + n * PERIOD for n in range(1, 11)]
    plans = await asyncio.gather(
        *(node.plan(slots, catch_up=CatchUpPolicy.ALL, window_ms=DAY) for node in nodes)
    )
    assert [plan.due for plan in plans if plan.done] == [len(slots)]
    for slot in slots:
        claims = (node.claim(each) for node in nodes for each in slots)
        answers = await asyncio.gather(*claims)
        (won,) = [a.run for a in answers if a.run and a.outcome is ClaimOutcome.WON]
        assert won.run.slot == slot, "the oldest goes first"
        await nodes[0].complete(won)


@pytest.mark.parametrize(
    "backend", able(lambda can: OverlapPolicy.QUEUE in can.overlap), indirect=True
)
async def test_s18_connections_that_queue_slots_at_once_leave_the_newest(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(8)
    cluster.advance_to(T0 + PERIOD)
    await nodes[0].win(T0 + PERIOD)
    cluster.advance_to(T0 + 9 * PERIOD)
    given = {"overlap": OverlapPolicy.QUEUE, "start_deadline_ms": DAY}
    before = T0 + 2 * PERIOD  # not settled: none of them makes another late
    answers = await asyncio.gather(
        *(
            node.claim(T0 + n * PERIOD, previous_slot=before, **given)
            for n, node in enumerate(nodes, 2)
        )
    )
    assert {a.outcome for a in answers} <= {"queued", "skipped"}
    waiting = await nodes[0].history(states=frozenset({RunState.DUE}))
    assert [seen.run.slot for seen in waiting] == [T0 + 9 * PERIOD]


@controls
async def test_s29_one_request_that_comes_many_times_at_once_makes_one_run(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(8)
    for n in range(5):
        answers = await asyncio.gather(
            *(node.trigger(f"r-{n}", payload=node.instance.incarnation.encode()) for node in nodes)
        )
        assert len({a.run.run.slot for a in answers if a.run}) == 1
    assert len(await nodes[0].history()) == 5


@controls
async def test_s29_different_requests_at_once_make_runs_at_different_slots(
    cluster: Cluster,
) -> None:
    nodes = await cluster.nodes_of(8)
    answers = await asyncio.gather(
        *(node.trigger(f"r-{n}", overlap=OverlapPolicy.ALLOW) for n, node in enumerate(nodes))
    )
    assert len({a.run.run.slot for a in answers if a.run}) == 8


@controls
async def test_s29_no_claim_wins_after_a_pause_that_came_between(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(8)
    jobs = [f"job-{n}" for n in range(5)]
    for node in nodes:
        await node.register(*(definition(job) for job in jobs))
    slot = T0 + PERIOD
    cluster.advance_to(slot)
    for job in jobs:
        racing = [asyncio.create_task(node.claim(slot, job=job)) for node in nodes[1:4]]
        await nodes[0].pause(job=job)
        late = await asyncio.gather(*(node.claim(slot, job=job) for node in nodes[4:]))
        outcomes = Counter([(await claim).outcome for claim in racing])
        assert outcomes[ClaimOutcome.WON] <= 1
        assert set(outcomes) <= {"won", "lost", "paused"}
        expected = "lost" if outcomes[ClaimOutcome.WON] else "paused"
        assert [answer.outcome for answer in late] == [expected] * 4


@controls
async def test_s29_resumptions_at_once_leave_one_row(cluster: Cluster) -> None:
    nodes = await cluster.nodes_of(8)
    await nodes[0].pause()
    cluster.advance_to(T0 + 5 * PERIOD)
    answers = await asyncio.gather(*(node.resume() for node in nodes))
    assert {a.outcome for a in answers} <= {"done", "stale"}
    rows = await nodes[0].history()
    assert [(seen.run.slot, seen.run.slots_covered) for seen in rows] == [(T0 + 5 * PERIOD, 5)]


@pytest.mark.timeout(120)
async def test_s10_processes_that_claim_at_once_have_one_winner(
    backend: str, directory: Path
) -> None:
    """Sixteen processes, which also open the new store at once; two attempts a slot."""
    url = BACKENDS[backend](directory).url
    if not url:
        pytest.skip("no other process can open this store")
    outputs = await raced(Path(__file__).with_name("racer.py"), url, ROUNDS)
    wins = [tuple(win) for output in outputs for win in output]
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
