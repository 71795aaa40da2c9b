"""Definitions, instances, history and pruning on stores without leases (S5, S28, S30 to S32)."""

from __future__ import annotations

import asyncio

import pytest

from anarchon_server.core.model import Failure, InstanceState, Outcome, RunState
from tests.contract.claim_only.traits import own_history, shared_history
from tests.contract.harness import (
    DAY,
    JOB,
    LEASE,
    PERIOD,
    SCHEDULE,
    SECOND,
    T0,
    Cluster,
    Node,
    definition,
)
from tests.contract.test_history import find_each_wish, mixed_runs
from tests.contract.test_names import ALIKE

SLOT = T0 + PERIOD
SOON_S = 5
HOUR = 3_600 * SECOND
RAISED = Outcome(failure=Failure("E", "first"))


async def test_s28_a_schedule_begins_when_it_is_registered(cluster: Cluster) -> None:
    """Nothing before it is a slot of the job: there is no catch-up."""
    cluster.advance(3 * SECOND)
    node = await cluster.node()
    (answer,) = await node.register()
    assert (answer.job, answer.current) == (JOB, True)
    assert answer.since == answer.settled == T0 + 3 * SECOND
    cluster.advance_to(SLOT)
    await node.complete(await node.win(SLOT))
    assert await node.settled() == T0 + 3 * SECOND, "claims do not move it"


async def test_an_instance_that_the_store_does_not_know_registers_again(
    cluster: Cluster, one: Node
) -> None:
    stranger = await cluster.node()
    answer = await stranger.beat(sweep=((JOB, "every:7s"),))
    assert not answer.known
    assert answer.settled == (None,)
    answer = await one.beat(sweep=((JOB, SCHEDULE),))
    assert answer.known
    assert (answer.settled, answer.unfinished) == ((T0,), ())


async def test_s28_what_an_instance_holds_it_says_in_parts(cluster: Cluster, one: Node) -> None:
    """A part is about its own jobs, may be repeated, and may have nothing in it."""
    for _ in range(2):
        await one.register(definition("a"), definition("b"))
    assert await holders(one) == {"a": ("host:1",), "b": ("host:1",), JOB: ("host:1",)}
    for _ in range(2):
        await one.store.register(one.instance, [definition("c")], ["a", "nobody's"])
    await one.let_go()
    held = {"a": (), "b": ("host:1",), "c": ("host:1",), JOB: ("host:1",)}
    assert await holders(one) == held
    (answer,) = await one.register(definition("b", period=5 * SECOND))
    assert (answer.current, answer.definitions_differ) == (True, False)
    assert await holders(one) == held
    await one.let_go("b", "c", JOB)
    assert await holders(one) == dict.fromkeys(held, ())
    assert (await one.beat()).known


async def test_s28_a_job_that_was_let_go_was_held_until_then(cluster: Cluster, one: Node) -> None:
    await one.register(definition("goes"))
    cluster.advance(10 * DAY)
    await one.let_go("goes")
    for names in (["goes", JOB], [JOB]):
        cluster.advance(14 * DAY)
        await one.let_go()
        await one.prune()
        assert list(await holders(one)) == names
        cluster.advance(1)


async def test_s28_an_instance_that_comes_back_holds_what_it_registers_then(
    cluster: Cluster, one: Node
) -> None:
    await one.register(definition("a"), definition("b"))
    await one.beat(leaving=True)
    await one.register(definition("b"))
    assert await holders(one) == {"a": (), "b": ("host:1",), JOB: ()}


async def holders(node: Node) -> dict[str, tuple[str, ...]]:
    """Which live instances hold each job."""
    return {view.name: view.instance_ids for view in (await node.store.jobs((), "", 9)).answers}


async def test_nothing_unfinished_is_offered_for_a_takeover(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.win(SLOT)
    cluster.advance(10 * LEASE)
    assert await one.unfinished() == []


@shared_history
async def test_s28_definitions_that_differ_are_told(cluster: Cluster) -> None:
    first, second = await cluster.node(), await cluster.node()
    await first.register(definition())
    (answer,) = await second.register(definition(labels=(("v", "2"),)))
    assert (answer.current, answer.definitions_differ, answer.since) == (True, True, T0)
    (view,) = (await first.store.jobs([JOB], "", 10)).answers
    assert view.definitions_differ
    assert view.instance_ids == ("host:1", "host:2")
    assert view.spec.labels == (("v", "2"),)


@shared_history
async def test_s32_instances_are_listed_and_twins_told_apart(cluster: Cluster) -> None:
    first, second = await cluster.node("same"), await cluster.node("same")
    await first.register()
    await second.register()
    assert (await first.beat()).twins == ("inc-2",)
    shown = (await first.store.instances()).answers
    assert [(i.instance_id, i.incarnation) for i in shown] == [("same", "inc-1"), ("same", "inc-2")]
    cluster.advance(LEASE + 1)
    await first.beat()
    states = [i.state for i in (await first.store.instances()).answers]
    assert states == [InstanceState.IDLE, InstanceState.LOST]
    await second.beat(leaving=True)
    assert len((await first.store.instances()).answers) == 1


@own_history
async def test_an_instance_shows_itself_alone(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    assert not first.store.capabilities.history
    cluster.advance_to(SLOT)
    await first.win(SLOT)
    assert len(await first.history()) == 1
    assert await second.history() == []
    assert [i.incarnation for i in (await second.store.instances()).answers] == ["inc-2"]
    assert [view.name for view in (await second.store.jobs((), "", 9)).answers] == [JOB]


async def run_through(cluster: Cluster, node: Node, count: int) -> None:
    for n in range(1, count + 1):
        cluster.advance_to(T0 + n * PERIOD)
        await node.complete(await node.win(T0 + n * PERIOD), Outcome(str(n)))


async def test_s30_runs_are_listed_newest_slot_first_in_pages(cluster: Cluster, one: Node) -> None:
    await run_through(cluster, one, 7)
    found: list[int] = []
    after: tuple[int, str] | None = None
    while page := await one.history(limit=3, after=after):
        assert len(page) <= 3
        found += [(seen.run.slot - T0) // PERIOD for seen in page]
        after = (page[-1].run.slot, page[-1].run.job)
    assert found == [7, 6, 5, 4, 3, 2, 1]


async def test_s30_runs_are_found_by_job_state_time_and_instance(
    cluster: Cluster, one: Node
) -> None:
    await one.register(definition(), definition("other"))
    await run_through(cluster, one, 3)
    running = await one.win(T0 + 3 * PERIOD, job="other")
    slots = [seen.run.slot for seen in await one.history(job=JOB)]
    assert slots == [T0 + n * PERIOD for n in (3, 2, 1)]
    unfinished = await one.history(states=frozenset({RunState.CLAIMED}))
    assert [seen.run for seen in unfinished] == [running.run]
    some = await one.history(from_slot=T0 + 2 * PERIOD, until_slot=T0 + 3 * PERIOD)
    assert [seen.run.slot for seen in some] == [T0 + 2 * PERIOD]
    assert len(await one.history(instance_id="host:1")) == 4
    assert await one.history(instance_id="host:9") == []
    assert await one.history(job="nobody") == []
    (view,) = (await one.store.jobs(["other"], "", 10)).answers
    assert view.last_run is not None
    assert view.last_run.run == running.run


@shared_history
@pytest.mark.parametrize("limit", [1, 3])
async def test_s30_what_is_wanted_of_many_jobs_is_found_however_little_is_looked_at_in_a_step(
    cluster: Cluster, two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    await mixed_runs(cluster, two)
    cluster.advance(PERIOD)
    await two[0].win(cluster.now, job="c")
    failed = await two[0].win(cluster.now, job="b", retries=1)
    await two[0].complete(failed, RAISED, retry_in_ms=SECOND)
    cluster.advance(2 * LEASE)
    await find_each_wish(two[1], monkeypatch, limit)


@shared_history
async def test_a_run_whose_sidecar_is_gone_shows_as_interrupted(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It is read from the instance, not written: the sidecar may come back and say how it ended."""
    gone, lives = two
    cluster.advance_to(SLOT)
    seen = await gone.win(SLOT)
    cluster.advance(LEASE + 1)
    await lives.beat()
    (shown,) = await lives.history()
    assert (shown.run.state, shown.run.reason) == (RunState.INTERRUPTED, "runner_lost")
    assert shown.attempts[0].state is RunState.INTERRUPTED
    found = await lives.history(states=frozenset({RunState.INTERRUPTED}))
    assert [view.run.slot for view in found] == [SLOT]
    await gone.beat()
    (shown,) = await lives.history()
    assert shown.run.state is RunState.CLAIMED
    assert (await gone.complete(seen)).outcome == "recorded"


async def test_s30_runs_beyond_the_number_kept_go_oldest_first(cluster: Cluster, one: Node) -> None:
    await run_through(cluster, one, 8)
    assert await one.prune(history_max=3) == 5
    assert sorted(await one.states()) == [60, 70, 80]
    assert await one.prune(history_max=3) == 0


@shared_history
async def test_s30_runs_that_are_too_old_go_also_those_that_nobody_can_end(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """Between two attempts, too: its instance alone would have made the next (S22, S24)."""
    gone, lives = two
    await run_through(cluster, gone, 2)
    cluster.advance_to(T0 + 3 * PERIOD)
    failed = await gone.win(T0 + 3 * PERIOD, retries=1)
    await gone.complete(failed, RAISED, retry_in_ms=SECOND)
    cluster.advance_to(T0 + 4 * PERIOD)
    await gone.win(T0 + 4 * PERIOD)
    cluster.advance_to(T0 + 2 * DAY + 4 * PERIOD)
    await lives.register()
    assert await lives.states() == {
        10: RunState.SUCCESS,
        20: RunState.SUCCESS,
        30: (RunState.INTERRUPTED, "runner_lost"),
        40: (RunState.INTERRUPTED, "runner_lost"),
    }
    assert await lives.prune(history_ms=2 * DAY) == 3
    cluster.advance(1)
    assert await lives.prune(history_ms=2 * DAY) == 1
    assert await lives.history() == []


async def test_s30_an_attempt_that_takes_longer_than_history_is_not_pruned_while_it_runs(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    cluster.advance(20 * DAY)
    await one.beat()
    assert await one.prune(history_ms=DAY) == 0
    assert await one.ended(SLOT) == (RunState.CLAIMED, "")
    assert (await one.complete(running)).outcome == "recorded"
    assert await one.ended(SLOT) == (RunState.SUCCESS, "")
    assert await one.prune(history_ms=DAY) == 0
    cluster.advance(DAY + 1)
    assert await one.prune(history_ms=DAY) == 1


async def test_s30_a_run_whose_retry_is_long_overdue_is_not_pruned_while_its_instance_lives(
    cluster: Cluster, one: Node
) -> None:
    """The instance may be full since; it is its to give up."""
    cluster.advance_to(SLOT)
    failed = await one.win(SLOT, retries=1)
    seen = await one.complete(failed, RAISED, retry_in_ms=SECOND)
    assert seen.run is not None
    cluster.advance(20 * DAY)
    await one.beat()
    assert await one.prune(history_ms=DAY) == 0
    assert (await one.release(seen.run, "runner_lost")).outcome == "released"
    assert await one.ended(SLOT) == (RunState.FAILED, "runner_lost")


@shared_history
async def test_s30_a_run_is_kept_while_its_instance_is_away_and_not_yet_forgotten(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It may be cut off from the store, with its handlers at work (S27)."""
    away, lives = two
    cluster.advance_to(SLOT)
    running = await away.win(SLOT)
    cluster.advance(20 * DAY)
    await away.beat()
    cluster.advance(DAY + LEASE)
    await lives.beat()
    assert await lives.prune(history_ms=DAY) == 0
    assert (await away.complete(running)).outcome == "recorded"


@shared_history
async def test_s30_a_run_of_an_instance_that_left_goes_by_age(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    left, stays = two
    cluster.advance_to(SLOT)
    await left.win(SLOT)
    cluster.advance(DAY + 1)
    await left.beat()
    assert await stays.prune(history_ms=DAY) == 0
    await left.beat(leaving=True)
    assert await stays.prune(history_ms=DAY) == 1


async def test_s30_a_run_that_has_not_ended_does_not_go_for_the_number_kept(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + PERIOD)
    await one.win(T0 + PERIOD)
    for n in (2, 3, 4):
        cluster.advance_to(T0 + n * PERIOD)
        await one.complete(await one.win(T0 + n * PERIOD))
    assert await one.prune(history_max=1) == 2
    assert sorted(await one.states()) == [10, 40]


async def test_s30_pruning_goes_in_batches(cluster: Cluster, one: Node) -> None:
    await run_through(cluster, one, 7)
    assert [await one.prune(history_max=0, batch=3) for _ in range(4)] == [3, 3, 1, 0]


async def test_s10_a_slot_stays_won_when_its_history_is_pruned(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await run_through(cluster, first, 3)
    await first.prune(history_max=0)
    assert await first.history() == []
    for n in (1, 2, 3):
        answer = await second.claim(T0 + n * PERIOD, start_deadline_ms=HOUR // 2)
        assert answer.outcome in ("lost", "late", "old")


async def test_s32_names_that_look_alike_are_different_jobs(cluster: Cluster) -> None:
    node = await cluster.node()
    await node.register(*(definition(name) for name in ALIKE))
    cluster.advance_to(SLOT)
    reply = await node.store.claim([node.wish(SLOT, job=name) for name in ALIKE])
    assert {answer.outcome for answer in reply.answers} == {"won"}
    for name in ALIKE:
        (seen,) = await node.history(job=name)
        assert seen.run.job == name
    assert [view.name for view in (await node.store.jobs((), "", 100)).answers] == sorted(ALIKE)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", "b:c"), ("a:b", "c")), (("a", "b/c"), ("a/b", "c")), (("a.b", "c"), ("a", "b.c"))],
)
async def test_s32_where_the_namespace_ends_and_the_job_begins_is_certain(
    cluster: Cluster, one: tuple[str, str], other: tuple[str, str]
) -> None:
    for namespace, job in (one, other):
        node = await cluster.node(namespace=namespace)
        await node.register(definition(job))
    cluster.advance_to(SLOT)
    for node, (_, job) in zip(cluster.nodes, (one, other), strict=True):
        assert (await node.claim(SLOT, job=job)).outcome == "won"


async def test_s32_names_of_128_characters_count_to_the_last(cluster: Cluster) -> None:
    names = ["j" * 127 + each for each in "xyz"]
    node = await cluster.node(namespace="n" * 128)
    near = await cluster.node(namespace="n" * 127 + "m")
    for each in (node, near):
        await each.register(*(definition(name) for name in names))
    cluster.advance_to(SLOT)
    for each in (node, near):
        assert [(await each.claim(SLOT, job=name)).outcome for name in names] == ["won"] * 3
        assert (await each.claim(SLOT, job=names[0])).outcome == "lost"


async def test_a_watch_has_nothing_to_say_and_ends_with_its_store(
    cluster: Cluster, one: Node
) -> None:
    async def news() -> None:
        async for _ in one.store.watch():
            raise AssertionError("nothing is ever freed")

    waiting = asyncio.create_task(news())
    cluster.advance_to(SLOT)
    await one.release(await one.win(SLOT))
    await asyncio.sleep(0)
    assert not waiting.done()
    await one.store.close()
    await one.store.close()
    waiting.cancel()
    await asyncio.wait([waiting], timeout=SOON_S)
    assert waiting.cancelled() or waiting.exception() is None
