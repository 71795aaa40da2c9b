"""What goes, and what may not (S2, S28, S30)."""

from __future__ import annotations

from anarchon_server.core.model import Definition, Outcome, OverlapPolicy, RunState
from tests.contract.harness import (
    DAY,
    JOB,
    LEASE,
    PERIOD,
    SECOND,
    T0,
    Cluster,
    Node,
    definition,
)

HOUR = 3_600 * SECOND
SHORT_WINDOW = definition(window=60 * SECOND)


async def run_through(cluster: Cluster, node: Node, count: int) -> None:
    """`count` slots after T0, each claimed in time and done."""
    for n in range(1, count + 1):
        cluster.advance_to(T0 + n * PERIOD)
        await node.complete(await node.win(T0 + n * PERIOD))


async def test_s30_runs_beyond_the_number_kept_go_oldest_first(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    await run_through(cluster, one, 20)
    assert await one.prune(history_max=5) == 14, "no slot of the last 60 s: the window"
    assert sorted(await one.states()) == [150, 160, 170, 180, 190, 200]
    cluster.advance(60 * SECOND)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_max=5) == 1
    assert sorted(await one.states()) == [160, 170, 180, 190, 200]
    assert await one.prune(history_max=5) == 0


async def test_s30_runs_that_are_too_old_go(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    await run_through(cluster, one, 6)
    cluster.advance_to(T0 + 50 * SECOND + 2 * DAY)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_ms=2 * DAY) == 4
    assert sorted(await one.states()) == [50, 60]


async def test_s30_a_run_is_as_old_as_its_end(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    cluster.advance_to(T0 + PERIOD)
    running = await one.win(T0 + PERIOD)
    cluster.advance(2 * DAY)
    await one.complete(running)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_ms=DAY) == 0
    cluster.advance(DAY + 1)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_ms=DAY) == 1


async def test_s02_no_pruned_slot_is_ever_claimed_or_planned(cluster: Cluster, one: Node) -> None:
    """The floor is raised before anything is deleted."""
    await one.register(SHORT_WINDOW)
    await run_through(cluster, one, 10)
    cluster.advance(5 * 60 * SECOND)
    await one.register(SHORT_WINDOW)
    await one.prune(history_max=0)
    assert await one.states() == {}
    late = await one.claim(T0 + 5 * PERIOD, start_deadline_ms=DAY)
    assert late.outcome == "late"
    cluster.advance(DAY)
    await one.register(definition(period=5 * SECOND, window=60 * SECOND))
    slot = T0 + 5 * PERIOD + 5 * SECOND
    answer = await one.claim(slot, schedule_id="every:5s", start_deadline_ms=2 * DAY)
    assert answer.outcome == "late", "also for a schedule that comes later"


async def test_s02_the_floor_holds_where_the_clock_was_set_back(
    cluster: Cluster, one: Node
) -> None:
    """A schedule that begins in the past, as it seems, does not bring pruned slots back."""
    await one.register(SHORT_WINDOW)
    await run_through(cluster, one, 10)
    cluster.advance(5 * 60 * SECOND)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_max=0) == 10
    cluster.step(T0 + 20 * SECOND - cluster.now)
    await one.register(definition(period=5 * SECOND))
    cluster.advance_to(T0 + 50 * SECOND)
    fives = {"schedule_id": "every:5s", "previous_slot": None}
    assert (await one.claim(T0 + 50 * SECOND, **fives)).outcome == "late"
    cluster.advance_to(T0 + 105 * SECOND)
    assert (await one.claim(T0 + 105 * SECOND, **fives)).outcome == "won"


async def test_s02_floor_and_fence_outlive_a_job_that_is_forgotten(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.store.register(second.instance, [definition("stays")], [JOB])
    await run_through(cluster, first, 3)
    last = await first.seen(T0 + 3 * PERIOD)
    await first.beat(leaving=True)
    cluster.advance(2 * DAY)
    await second.beat()
    assert await second.prune(history_ms=DAY) == 3
    assert await names(second) == ["stays"]
    cluster.step(T0 + PERIOD - cluster.now)
    await first.register()
    cluster.advance_to(T0 + 3 * PERIOD)
    assert (await first.claim(T0 + 3 * PERIOD)).outcome == "late"
    cluster.advance_to(T0 + 4 * PERIOD)
    again = await first.win(T0 + 4 * PERIOD, previous_slot=None)
    assert last.run.current is not None
    assert again.run.current is not None
    assert again.run.current.fence > last.run.current.fence


async def test_s02_the_floor_stays_below_the_catch_up_window(cluster: Cluster, one: Node) -> None:
    await one.register(definition(window=HOUR))
    await run_through(cluster, one, 5)
    assert await one.prune(history_ms=0, history_max=0) == 0
    cluster.advance(HOUR)
    await one.register(definition(window=HOUR))
    assert await one.prune(history_ms=0, history_max=0) == 5


async def test_s02_the_floor_stays_below_what_a_schedule_in_use_has_settled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.register(SHORT_WINDOW)
    cluster.advance_to(T0 + 2 * PERIOD)
    await first.complete(await first.win(T0 + 2 * PERIOD))
    assert await first.settled() == T0, "10 is neither claimed nor planned"
    cluster.advance(HOUR)
    await first.register(SHORT_WINDOW)
    assert await first.prune(history_ms=0, history_max=0) == 0
    answer = await second.plan([T0 + PERIOD, T0 + 2 * PERIOD])
    assert (answer.done, answer.missed) == (True, 1)
    assert await first.prune(history_ms=0, history_max=0) == 2


async def test_s30_a_run_that_is_not_final_never_goes(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    cluster.advance_to(T0 + 3 * PERIOD)
    free = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY}
    claimed = await one.win(T0 + PERIOD, **free)
    await one.release(await one.win(T0 + 2 * PERIOD, **free))
    await one.complete(await one.win(T0 + 3 * PERIOD, **free))
    cluster.advance(30 * DAY)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_ms=DAY, history_max=0) == 1
    assert sorted(await one.states()) == [10, 20]
    assert (await one.complete(claimed)).outcome == "recorded", "a row is never too old"


async def test_s02_a_run_below_the_floor_is_taken_over_all_the_same(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.register(SHORT_WINDOW)
    cluster.advance_to(T0 + 2 * PERIOD)
    free = {"overlap": OverlapPolicy.ALLOW, "start_deadline_ms": DAY, "window_ms": 10 * DAY}
    running = await first.win(T0 + PERIOD, **free)
    await first.complete(await first.win(T0 + 2 * PERIOD, **free))
    cluster.advance(2 * DAY)
    await first.register(SHORT_WINDOW)
    assert await first.prune(history_ms=DAY) == 1
    assert (await second.take_over(running, window_ms=10 * DAY)).outcome == "won"


async def test_s30_pruning_goes_in_small_batches(cluster: Cluster, one: Node) -> None:
    names = [f"job-{n}" for n in range(5)]
    definitions = [definition(name, window=0) for name in names]
    await one.register(*definitions)
    for n in range(1, 5):
        cluster.advance_to(T0 + n * PERIOD)
        reply = await one.store.claim([one.wish(cluster.now, job=name) for name in names])
        for answer in reply.answers:
            assert answer.run is not None
            await one.complete(answer.run)
    cluster.advance(DAY)
    await one.register(*definitions)
    gone = [await one.prune(history_max=1, batch=4) for _ in range(5)]
    assert sum(gone) == 15
    assert max(gone) == 4
    for name in names:
        assert list(await one.states(name)) == [40], "the newest of each stays"


async def test_s30_attempts_go_with_their_run(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    await run_through(cluster, one, 2)
    cluster.advance(HOUR)
    await one.register(SHORT_WINDOW)
    await one.prune(history_ms=0, history_max=0)
    assert await one.history() == []
    assert await one.history(instance_id="host:1") == []


async def test_s28_a_definition_nobody_held_for_the_history_goes_with_the_jobs_history(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition("stays"))
    await second.let_go("job")
    await run_through(cluster, first, 3)
    await first.beat(leaving=True)
    cluster.advance(DAY)
    await second.beat()
    assert await second.prune(history_ms=DAY) == 2, "only runs that are too old"
    assert await names(second) == ["job", "stays"]
    cluster.advance(1)
    assert await second.prune(history_ms=DAY) == 1
    assert await names(second) == ["stays"]
    assert await second.history() == []


async def names(node: Node) -> list[str]:
    return [view.name for view in (await node.store.jobs((), "", 100)).answers]


async def test_s28_a_definition_counts_as_held_until_its_holder_was_last_heard_of(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition("stays"))
    await second.let_go("job")
    cluster.advance(3 * DAY)
    await first.beat()
    cluster.advance(DAY + LEASE + 1)
    await second.beat()
    await second.prune(history_ms=2 * DAY)
    assert await names(second) == ["job", "stays"]
    cluster.advance(DAY)
    await second.beat()
    await second.prune(history_ms=2 * DAY)
    assert await names(second) == ["stays"]


async def test_s28_an_old_definition_goes_while_the_job_lives_on(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + PERIOD)
    await one.complete(await one.win(T0 + PERIOD))
    await one.register(definition(period=5 * SECOND))
    cluster.advance(14 * DAY + 1)
    await one.beat()
    await one.prune(history_ms=30 * DAY)
    assert await one.settled(schedule="every:10s") == T0 + PERIOD
    await one.prune(history_ms=14 * DAY)
    assert await one.settled(schedule="every:10s") is None
    assert await names(one) == ["job"]


async def test_s30_a_schedule_that_was_rolled_back_does_not_keep_the_history(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It is the current one for as long as it is kept, and nobody settles its slots any more."""
    old, new = two
    await old.register(SHORT_WINDOW)
    await new.register(definition(period=5 * SECOND, window=60 * SECOND))
    await new.beat(leaving=True)
    for n in range(1, 21):
        cluster.advance_to(T0 + n * PERIOD)
        await old.complete(await old.win(T0 + n * PERIOD))
        await old.beat()
    assert await old.prune(history_max=5) == 14, "no slot of the last 60 s: the window"


async def test_s30_a_schedule_that_only_a_lost_instance_holds_does_not_keep_the_history(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The old version died in a deploy, without a last word."""
    old, new = two
    await old.register(SHORT_WINDOW)
    fives = {"schedule_id": "every:5s", "previous_slot": None}
    await new.register(definition(period=5 * SECOND, window=60 * SECOND))
    for n in range(1, 21):
        cluster.advance_to(T0 + n * PERIOD)
        await new.complete(await new.win(T0 + n * PERIOD, **fives))
        await new.beat()
    assert await new.settled(schedule="every:5s") == cluster.now
    assert await new.prune(history_max=5) == 14, "no slot of the last 60 s: the window"


async def test_s02_a_schedule_that_nobody_holds_for_now_keeps_what_it_has_not_settled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """All instances of the job are down, and one of another job prunes."""
    holder, other = two
    await other.register(definition("other"))
    await holder.register(SHORT_WINDOW)
    cluster.advance_to(T0 + 2 * PERIOD)
    await holder.complete(await holder.win(T0 + 2 * PERIOD))
    await holder.beat(leaving=True)
    cluster.advance(HOUR)
    await other.beat()
    assert await other.prune(history_max=0) == 0, "10 is neither claimed nor planned"


async def test_s28_where_the_current_definition_goes_the_one_held_last_follows(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The new version was tried on one instance and rolled back."""
    old, new = two
    cluster.advance(SECOND)
    await new.register(definition(labels=(("v", "2"),)))
    await new.beat(leaving=True)
    cluster.advance(DAY + 1)
    await old.beat()
    await old.prune(history_ms=DAY)
    (view,) = (await old.store.jobs(["job"], "", 1)).answers
    assert view.spec == definition().spec
    (answer,) = await old.register(definition())
    assert (answer.current, answer.since) == (True, T0)


async def test_s28_of_several_definitions_that_stay_the_one_held_last_follows(
    cluster: Cluster,
) -> None:
    """In each job another, so that no order in which a store may keep them is the right one."""
    *nodes, tried = await cluster.nodes_of(5)
    jobs = [f"job-{turn}" for turn in range(4)]

    def version(number: int, job: str) -> Definition:
        return definition(job, labels=(("version", str(number)),))

    for place, node in enumerate(nodes):
        cluster.advance(SECOND)
        await node.register(*(version((place + n) % 4, job) for n, job in enumerate(jobs)))
    cluster.advance(SECOND)
    await tried.register(*(version(4, job) for job in jobs))
    await tried.beat(leaving=True)
    cluster.advance(2 * DAY)
    for node in nodes:
        await node.beat()
    await nodes[0].prune(history_ms=DAY)
    views = (await nodes[0].store.jobs(jobs, "", 10)).answers
    assert [dict(view.spec.labels)["version"] for view in views] == ["3", "0", "1", "2"]


async def test_s28_the_last_definition_stays_for_as_long_as_a_run_is_unfinished(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition("stays"))
    await second.let_go("job")
    cluster.advance_to(T0 + PERIOD)
    running = await first.win(T0 + PERIOD)
    await first.beat(leaving=True)
    cluster.advance(30 * DAY)
    await second.beat()
    assert await second.prune() == 0
    assert await names(second) == ["job", "stays"]
    await second.complete(running, Outcome("at last"))
    assert await second.prune() == 1
    assert await names(second) == ["stays"]


async def test_s30_a_run_that_waits_stays_though_nobody_handles_its_job_until_it_is_cancelled(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """It is never missed, and whoever handles the job again would run it."""
    first, second = two
    await second.register(definition("stays"))
    await second.let_go("job")
    cluster.advance(SECOND)
    waits = (await first.triggered()).run
    await first.beat(leaving=True)
    cluster.advance(30 * DAY)
    await second.beat()
    assert await second.prune(history_max=0) == 0
    assert (await second.seen(waits.slot)).run.state is RunState.DUE
    assert await names(second) == ["job", "stays"]
    await second.cancel(waits.slot)
    assert await second.prune() == 1
    assert await names(second) == ["stays"]


async def test_s17_a_forgotten_jobs_fence_and_floor_never_fall(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(T0 + PERIOD)
    won = await one.win(T0 + PERIOD)
    assert won.run.current is not None
    await one.complete(won)
    await one.beat(leaving=True)
    cluster.advance(30 * DAY)
    await one.prune()
    assert await names(one) == []
    cluster.step(-30 * DAY)
    reply = await one.store.register(one.instance, [definition()])
    assert reply.fences == {"job": won.run.current.fence}
    late = await one.claim(T0 + PERIOD, start_deadline_ms=DAY)
    assert late.outcome == "late"


async def test_lost_instances_go_after_a_day(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    cluster.advance(DAY + LEASE + 1)
    await first.beat()
    await first.prune()
    assert not (await second.beat()).known


async def test_s30_skipped_rows_are_pruned_too(cluster: Cluster, one: Node) -> None:
    await one.register(SHORT_WINDOW)
    cluster.advance_to(T0 + 10 * PERIOD)
    await one.plan([T0 + n * PERIOD for n in range(1, 9)])
    assert set(await one.states()) == {n * 10 for n in range(1, 9)}
    cluster.advance(HOUR)
    await one.register(SHORT_WINDOW)
    assert await one.prune(history_max=3) == 5
    assert set((await one.states()).values()) == {(RunState.SKIPPED, "missed")}
