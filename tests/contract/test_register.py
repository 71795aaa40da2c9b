"""Definitions, schedules and instances (S20, S28, S32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anarchon_server.core.model import CatchUpPolicy, InstanceState, RunState
from tests.contract.harness import (
    DAY,
    LEASE,
    PERIOD,
    SCHEDULE,
    SECOND,
    T0,
    Cluster,
    Node,
    definition,
    slots_of,
)

OLD = definition(labels=(("v", "1"),))
NEW = definition(labels=(("v", "2"),))
OTHER_SCHEDULE = definition(period=5 * SECOND)


async def test_s20_a_new_job_has_nothing_to_catch_up(cluster: Cluster) -> None:
    cluster.advance(3 * SECOND)
    node = await cluster.node()
    (answer,) = await node.register()
    now = T0 + 3 * SECOND
    assert (answer.job, answer.current, answer.since, answer.settled) == ("job", True, now, now)
    assert not answer.definitions_differ


async def test_s28_registering_what_is_current_changes_nothing(cluster: Cluster, one: Node) -> None:
    cluster.advance(SECOND)
    second = await cluster.node()
    for node in (second, one):
        (answer,) = await node.register()
        assert (answer.current, answer.since, answer.settled) == (True, T0, T0)
    (view,) = (await one.store.jobs(["job"], "", 10)).answers
    assert view.definition_at == T0


async def test_s28_a_changed_definition_becomes_current_and_keeps_its_schedule(
    cluster: Cluster, one: Node
) -> None:
    await one.register(OLD)
    cluster.advance(SECOND)
    (answer,) = await one.register(NEW)
    assert (answer.current, answer.since, answer.settled) == (True, T0, T0)
    (view,) = (await one.store.jobs(["job"], "", 10)).answers
    assert (view.spec, view.definition_at) == (NEW.spec, T0 + SECOND)
    assert not view.definitions_differ


async def test_s28_a_changed_schedule_starts_now(cluster: Cluster, one: Node) -> None:
    cluster.advance(7 * SECOND)
    (answer,) = await one.register(OTHER_SCHEDULE)
    assert (answer.current, answer.since, answer.settled) == (True, cluster.now, cluster.now)


async def test_s28_in_a_rolling_deploy_an_old_definition_that_is_held_changes_nothing(
    cluster: Cluster,
) -> None:
    a, b, c = [await cluster.node() for _ in range(3)]
    await a.register(OLD)
    await b.register(OLD)
    cluster.advance(SECOND)
    (answer,) = await c.register(NEW)
    assert (answer.current, answer.definitions_differ) == (True, True)
    cluster.advance(SECOND)
    (answer,) = await b.register(OLD)
    assert (answer.current, answer.definitions_differ) == (False, True)
    (view,) = (await a.store.jobs(["job"], "", 10)).answers
    assert (view.spec, view.definition_at, view.definitions_differ) == (NEW.spec, T0 + SECOND, True)
    await a.register(NEW)
    (answer,) = await b.register(NEW)
    assert (answer.current, answer.definitions_differ) == (True, False)


async def test_s28_both_schedules_of_a_rolling_deploy_are_claimed_and_keep_their_since(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    old, new = two
    cluster.advance_to(T0 + 5 * SECOND)
    await new.register(OTHER_SCHEDULE)
    cluster.advance_to(T0 + 10 * SECOND)
    fives = {"schedule_id": "every:5s", "previous_slot": T0 + 5 * SECOND}
    assert (await old.claim(T0 + 10 * SECOND)).outcome == "won"
    assert (await new.claim(T0 + 10 * SECOND, **fives)).outcome == "lost"
    (answer,) = await old.register(definition())
    assert (answer.current, answer.since, answer.settled) == (False, T0, T0 + 10 * SECOND)


async def test_s28_a_schedule_that_nobody_held_for_a_while_begins_anew(
    cluster: Cluster, one: Node
) -> None:
    """Its slots of the time between were not slots of the job."""
    cluster.advance(SECOND)
    await one.register(OTHER_SCHEDULE)
    cluster.advance(60 * SECOND)
    (answer,) = await one.register(definition())
    assert (answer.current, answer.since, answer.settled) == (True, cluster.now, cluster.now)


async def test_s28_what_a_lost_instance_holds_does_not_count(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    lost, lives = two
    cluster.advance(LEASE)
    await lives.register(OTHER_SCHEDULE)
    (answer,) = await lives.register(OTHER_SCHEDULE)
    assert answer.definitions_differ, "at the end of its lease it still counts as live"
    cluster.advance(1)
    (answer,) = await lives.register(OTHER_SCHEDULE)
    assert not answer.definitions_differ
    (answer,) = await lost.register(definition())
    assert answer.since == cluster.now


async def test_s28_the_current_definition_stays_current_while_all_are_down(
    cluster: Cluster, one: Node
) -> None:
    """So that what was missed is known after a night's downtime."""
    cluster.advance(DAY)
    (answer,) = await one.register()
    assert (answer.current, answer.since, answer.settled) == (True, T0, T0)


async def test_s28_a_current_schedule_that_nobody_held_while_others_went_on_catches_up(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    """The store cannot tell a version that was rolled back from one whose instances were down."""
    old, new = two
    await new.register(OTHER_SCHEDULE)
    await new.beat(leaving=True)
    for slot in range(T0 + PERIOD, T0 + 4 * PERIOD, PERIOD):
        cluster.advance_to(slot)
        await old.complete(await old.win(slot))
        await old.beat()
    cluster.advance_to(T0 + 4 * PERIOD)
    await old.register(definition())
    (answer,) = await new.register(OTHER_SCHEDULE)
    assert (answer.current, answer.since, answer.settled) == (True, T0, T0)
    fives = slots_of("every:5s", T0, T0 + 25 * SECOND)
    latest: dict[str, Any] = {"catch_up": CatchUpPolicy.LATEST, "window_ms": DAY}
    planned = await new.plan(fives, schedule="every:5s", **latest)
    assert (planned.due, planned.missed) == (1, 2)
    states = await new.states()
    assert [states[at] for at in (5, 15, 25)] == [
        (RunState.SKIPPED, "missed"),
        (RunState.SKIPPED, "missed"),
        RunState.DUE,
    ]


async def test_s28_a_heartbeat_keeps_what_is_held_alive(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    for _ in range(3):
        cluster.advance(LEASE)
        await first.beat()
    (answer,) = await second.register(NEW)
    assert answer.definitions_differ


async def test_s28_a_registration_replaces_what_the_instance_held_of_those_jobs_alone(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.register(definition("a"), definition("b"))
    await first.register(definition("b", labels=(("v", "2"),)))
    (answer,) = await second.register(definition("b", labels=(("v", "2"),)))
    assert (answer.current, answer.definitions_differ) == (True, False), "the old one is gone"
    (answer,) = await second.register(definition("a", period=5 * SECOND))
    assert answer.definitions_differ, "what it holds besides stays"
    assert await holders(second) == {
        "a": ("host:1", "host:2"),
        "b": ("host:1", "host:2"),
        "job": ("host:1", "host:2"),
    }


async def test_s28_what_an_instance_lets_go_of_it_holds_no_more_and_all_else_it_does(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.register(definition("a"), definition("b"))
    await first.let_go("a")
    assert await holders(second) == {
        "a": (),
        "b": ("host:1",),
        "job": ("host:1", "host:2"),
    }
    cluster.advance(SECOND)
    (answer,) = await second.register(definition("a", period=5 * SECOND))
    assert (answer.current, answer.definitions_differ) == (True, False)
    await first.let_go("b", "job")
    assert await holders(second) == {"a": ("host:2",), "b": (), "job": ("host:2",)}
    assert (await first.beat()).known, "it is registered, with nothing"


async def test_s28_one_call_registers_some_jobs_and_lets_go_of_others(
    cluster: Cluster, one: Node
) -> None:
    await one.register(definition("a"), definition("b"))
    reply = await one.store.register(one.instance, [definition("c")], ["a", "job"])
    assert [(answer.job, answer.current) for answer in reply.answers] == [("c", True)]
    assert await holders(one) == {"a": (), "b": ("host:1",), "c": ("host:1",), "job": ()}


async def test_s28_a_part_that_is_repeated_changes_nothing(cluster: Cluster, one: Node) -> None:
    """Its outcome may have been unknown."""
    await one.register(definition("a"), definition("b"))
    for part in (([NEW], ["a"]), ([], ["a"]), ([NEW], [])):
        before = None
        for _ in range(2):
            cluster.advance(SECOND)
            reply = await one.store.register(one.instance, *part)
            shown = (reply.answers, (await one.store.jobs((), "", 9)).answers)
            assert before in (None, shown)
            before = shown
    assert await holders(one) == {"a": (), "b": ("host:1",), "job": ("host:1",)}


async def test_s28_to_let_go_of_what_was_never_held_is_nothing(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition("theirs"))
    await first.let_go("theirs", "nobody's")
    assert await holders(first) == {"job": ("host:1", "host:2"), "theirs": ("host:2",)}


async def test_s28_an_empty_part_says_that_the_instance_lives_and_changes_nothing(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance(LEASE)
    await first.let_go()
    cluster.advance(1)
    assert await holders(second) == {"job": ("host:1",)}
    (shown, lost) = (await second.store.instances()).answers
    assert (shown.instance_id, shown.seen_at) == ("host:1", T0 + LEASE)
    assert lost.state is InstanceState.LOST


async def test_s28_a_definition_that_was_let_go_was_held_until_then(
    cluster: Cluster, one: Node
) -> None:
    """From then on its history counts, and what else is held goes on being held."""
    await one.register(definition("goes"), definition("stays"))
    cluster.advance(10 * DAY)
    await one.let_go("goes")
    for names in (["goes", "job", "stays"], ["job", "stays"]):
        cluster.advance(14 * DAY)
        await one.let_go()
        await one.prune()
        assert list(await holders(one)) == names
        cluster.advance(1)


async def test_s28_an_instance_that_comes_back_holds_what_it_registers_then(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await first.register(definition("a"), definition("b"))
    await first.beat(leaving=True)
    await first.register(definition("b"))
    assert await holders(second) == {"a": (), "b": ("host:1",), "job": ("host:2",)}


async def test_s28_an_instance_comes_and_goes_in_parts(cluster: Cluster, one: Node) -> None:
    names = [f"job-{number:03}" for number in range(30)]
    for first in range(0, 30, 10):
        await one.register(*(definition(name) for name in names[first : first + 10]))
    await one.let_go("job")
    assert await holders(one) == {"job": ()} | dict.fromkeys(names, ("host:1",))
    for first in range(0, 30, 15):
        await one.let_go(*names[first : first + 15])
    assert await holders(one) == {"job": ()} | dict.fromkeys(names, ())
    assert (await one.beat()).known


async def holders(node: Node) -> dict[str, tuple[str, ...]]:
    """Which live instances hold each job."""
    return {view.name: view.instance_ids for view in (await node.store.jobs((), "", 50)).answers}


async def test_s28_two_clients_of_one_sidecar_may_differ(cluster: Cluster, one: Node) -> None:
    answers = await one.register(OLD, NEW)
    assert [a.definitions_differ for a in answers] == [True, True]
    assert [a.current for a in answers] == [False, True]
    answers = await one.register(OLD, NEW)
    assert [a.current for a in answers] == [False, True]


async def test_a_job_without_a_schedule_has_nothing_settled(cluster: Cluster) -> None:
    node = await cluster.node()
    cluster.advance(SECOND)
    (answer,) = await node.register(definition(period=0))
    assert (answer.current, answer.since, answer.settled) == (True, T0 + SECOND, None)
    assert await node.settled(schedule="") is None


async def test_a_job_keeps_its_fence_and_runs_across_definitions(
    cluster: Cluster, one: Node
) -> None:
    cluster.advance_to(T0 + PERIOD)
    won = await one.win(T0 + PERIOD)
    assert won.run.current is not None
    reply = await one.store.register(one.instance, [OTHER_SCHEDULE])
    assert reply.fences == {"job": won.run.current.fence}
    assert (await one.renew(won)).outcome == "renewed"


# Instances


async def test_s32_twins_are_told_apart(cluster: Cluster) -> None:
    first = await cluster.node("same")
    second = await cluster.node("same")
    assert (await first.beat()).twins == ()
    assert (await second.beat()).twins == (first.instance.incarnation,)
    assert (await first.beat()).twins == (second.instance.incarnation,)
    cluster.advance(LEASE + 1)
    assert (await first.beat()).twins == ()


async def test_an_instance_that_is_not_registered_is_told_so_until_it_is(
    cluster: Cluster,
) -> None:
    """Also when the answer that said so was lost."""
    node = await cluster.node()
    assert [(await node.beat()).known for _ in range(2)] == [False, False]
    await node.register()
    assert (await node.beat()).known
    await node.let_go()
    assert (await node.beat()).known


async def test_instances_show_as_lost_for_a_day_and_then_no_more(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, _ = two
    cluster.advance(LEASE)
    await first.beat()
    cluster.advance(1)
    shown = (await first.store.instances()).answers
    assert [(i.instance_id, i.state) for i in shown] == [
        ("host:1", InstanceState.IDLE),
        ("host:2", InstanceState.LOST),
    ]
    assert [i.seen_at for i in shown] == [T0 + LEASE, T0]
    cluster.advance(DAY)
    await first.beat()
    assert [i.instance_id for i in (await first.store.instances()).answers] == ["host:1"]


async def test_s23_an_instance_that_leaves_is_gone_at_once(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance_to(T0 + PERIOD)
    running = await first.win(T0 + PERIOD)
    answer = await first.beat(renewals=(first.renewal(running),), leaving=True)
    assert answer.renewals[0].outcome == "renewed"
    assert answer.known
    assert [i.instance_id for i in (await second.store.instances()).answers] == ["host:2"]
    (registered,) = await second.register(NEW)
    assert not registered.definitions_differ
    assert not (await first.beat()).known


async def test_an_instance_is_kept_as_it_reports_itself(cluster: Cluster, one: Node) -> None:
    one.instance = replace(
        one.instance,
        state=InstanceState.ACTIVE,
        version="1.2.3",
        backend="x",
        tzdata_version="2026a",
        started_at=5,
        clock_offset_ms=-3,
        running=2,
        ready=True,
        reasons=("a", "b"),
        doubts=("c",),
        outlook_at=7,
        outlook=("Europe/Athens +7200", "UTC +0"),
    )
    cluster.advance(SECOND)
    await one.beat()
    (shown,) = (await one.store.instances()).answers
    assert shown == replace(one.instance, seen_at=T0 + SECOND)


# Jobs


async def test_jobs_are_shown_with_their_definition_instances_and_last_run(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    await second.register(definition(), definition("b"))
    cluster.advance_to(T0 + 2 * PERIOD)
    await first.complete(await first.win(T0 + 2 * PERIOD))
    await first.win(T0 + PERIOD, start_deadline_ms=DAY)
    reply = await second.store.jobs((), "", 10)
    assert [view.name for view in reply.answers] == ["b", "job"]
    b, job = reply.answers
    assert (b.instance_ids, b.last_run) == (("host:2",), None)
    assert job.instance_ids == ("host:1", "host:2")
    assert job.spec == definition().spec
    assert job.last_run is not None
    assert job.last_run.run.slot == T0 + 2 * PERIOD
    assert reply.fences["job"] > 0


async def test_jobs_are_paged_by_name(cluster: Cluster, one: Node) -> None:
    await one.register(*(definition(name) for name in ("d", "a", "c", "b", "A")))
    page = (await one.store.jobs((), "", 2)).answers
    assert [view.name for view in page] == ["A", "a"]
    page = (await one.store.jobs((), "a", 10)).answers
    assert [view.name for view in page] == ["b", "c", "d", "job"]
    named = (await one.store.jobs(["c", "missing", "a"], "", 10)).answers
    assert [view.name for view in named] == ["c", "a"]


async def test_s28_a_schedule_shared_by_two_definitions_is_one_schedule(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    cluster.advance(SECOND)
    (answer,) = await second.register(NEW)
    assert (answer.since, answer.settled) == (T0, T0)
    assert await first.settled(schedule=SCHEDULE) == T0
