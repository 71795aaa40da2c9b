"""Operators ask two sidecars of one namespace at once, on each store that sidecars share (S29).

Real sidecars and applications on servers of the tests' own, which may be killed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar

import pytest

import anarchon
from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster, Event, Instance
from tests.servers import nats, postgres, redis

DUE, RUNNING = run_pb2.RUN_STATE_DUE, run_pb2.RUN_STATE_RUNNING
RETRYING = run_pb2.RUN_STATE_RETRYING
SUCCESS, FAILED = run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_FAILED
SKIPPED = run_pb2.RUN_STATE_SKIPPED

ODD = "odd/na.me:of-a_job"
JOBS: list[dict[str, Any]] = [
    {"name": "quick", "kind": "quick", "policies": {"overlap": "allow"}},
    {"name": ODD, "kind": "quick", "policies": {"overlap": "allow"}},
    {"name": "held", "kind": "working", "policies": {"overlap": "queue"}},
    {
        "name": "failing",
        "kind": "failing",
        "policies": {"retries": 5, "retry_delay": "30m"},
    },
    {"name": "often", "kind": "quick", "every": "500ms"},
    {"name": "tick", "kind": "quick", "every": "500ms", "policies": {"overlap": "allow"}},
]
ODD_IDS = ["*", ">", "a.b c", "é\n✓", "'; DROP TABLE run; --", "{x}:requests", "x" * 128]
NO_JOBS = ["*", ">", "quick.", "qu ick", "quick\n", "é", "..", "x" * 200, "%", "_uick"]

T = TypeVar("T")


class Killable(Protocol):
    """A store's server."""

    @property
    def url(self) -> str: ...
    def start(self) -> object: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...


def _postgres() -> tuple[Killable, str]:
    return postgres.start_server(), ""


def _redis() -> tuple[Killable, str]:
    server = redis.private("redis", "--appendonly", "yes", "--appendfsync", "always")
    return server.start(), ""


def _nats() -> tuple[Killable, str]:
    return nats.private().start(), "?strategy=lease"


@pytest.fixture(params=[_postgres, _redis, _nats], ids=["postgres", "redis", "nats-lease"])
def server(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Killable]:
    """The cluster's store is this one."""
    started, options = request.param()
    cluster.store = started.url + options
    yield started
    started.stop()


@pytest.fixture
async def two(cluster: Cluster, server: Killable) -> tuple[Instance, Instance]:
    first = await cluster.start("one", JOBS)
    return first, await cluster.start("two", JOBS)


async def ask(via: Instance, call: Callable[[AdminClient], T]) -> T:
    def asked() -> T:
        with AdminClient(via.address) as admin:
            return call(admin)

    return await asyncio.to_thread(asked)


async def each(calls: Iterable[tuple[Instance, Callable[[AdminClient], T]]]) -> list[T]:
    """All at once."""
    return list(await asyncio.gather(*(ask(via, call) for via, call in calls)))


def _called(method: Any, *arguments: Any) -> Any:
    """The method for `arguments`, but for the AdminClient, which comes last."""
    *given, admin = arguments
    return method(admin, *given)


def _listed(job: str, admin: AdminClient) -> list[run_pb2.Run]:
    return list(admin.list_runs(job=job))


def triggering(job: str, request_id: str = "", payload: bytes = b"") -> Any:
    return lambda admin: admin.trigger_run(job, request_id=request_id, payload=payload)


async def state_of(via: Instance, made: run_pb2.Run, *wanted: Any) -> run_pb2.Run:
    """The run once it is in one of these states, as a watch shows it."""

    def watched(admin: AdminClient) -> run_pb2.Run:
        with admin.watch_runs(job=made.job) as changes:
            now = admin.get_run(made.job, made.slot)
            if now.state in wanted:
                return now
            return next(r for r in changes if r.slot == made.slot and r.state in wanted)

    return await ask(via, watched)


def starts(cluster: Cluster, made: run_pb2.Run) -> list[Event]:
    return [
        e
        for e in cluster.events
        if e["what"] == "start" and (e["job"], e["slot"]) == (made.job, made.slot)
    ]


async def a_request_made_at_both_at_once_is_one_run(
    cluster: Cluster, two: tuple[Instance, Instance]
) -> None:
    requests = ["r-1", *ODD_IDS]
    made = await each(
        (two[n % 2], triggering("quick", request_id, b"%d" % n))
        for request_id in requests
        for n in range(4)
    )
    slots = [{run.slot for run in made[4 * n : 4 * n + 4]} for n in range(len(requests))]
    assert all(len(each_) == 1 for each_ in slots), slots
    assert len(set.union(*slots)) == len(requests), "each request has its own"
    for run, request_id in zip(made[::4], requests, strict=True):
        shown = await state_of(two[1], run, SUCCESS)
        assert shown.request_id == request_id
        assert len(starts(cluster, run)) == 1
    (odd,) = await each([(two[0], triggering(ODD, "r-1", b"\0\xff"))])
    assert (await state_of(two[1], odd, SUCCESS)).job == ODD


async def names_that_no_job_has_are_not_found_whatever_a_store_makes_of_them(
    _: Cluster, two: tuple[Instance, Instance]
) -> None:
    for name in NO_JOBS:
        for method, *more in (
            (AdminClient.get_job,),
            (AdminClient.get_run, 5),
            (AdminClient.pause_job,),
            (AdminClient.resume_job,),
            (AdminClient.trigger_run,),
            (AdminClient.cancel_run, 5),
        ):
            with pytest.raises(anarchon.NotFoundError):
                await ask(two[0], partial(_called, method, name, *more))
        assert await ask(two[0], partial(_listed, name)) == []
    (tick,) = await each([(two[0], lambda admin: admin.get_job("tick"))])
    assert not tick.paused


async def a_pause_holds_at_the_other_and_a_resume_counts_what_passed(
    cluster: Cluster, two: tuple[Instance, Instance]
) -> None:
    first, second = two
    await cluster.wait_for(lambda e: e["what"] == "end" and e["job"] == "often")
    paused = await each((via, lambda admin: admin.pause_job("often", reason="é\n")) for via in two)
    assert all(job.paused and job.pause_reason == "é\n" for job in paused)
    before = {r.slot for r in await cluster.runs(second, "often")}
    made = await ask(second, triggering("often"))
    assert (await state_of(first, made, SUCCESS, SKIPPED)).state == SUCCESS, "triggered runs go on"
    ticks = sum(e["what"] == "start" and e["job"] == "tick" for e in cluster.events)
    await cluster.wait_for(lambda e: e["what"] == "start" and e["job"] == "tick", count=ticks + 4)
    during = {r.slot for r in await cluster.runs(first, "often")} - before
    assert during == {made.slot}, "no slot was claimed"
    resumed = await each((via, lambda admin: admin.resume_job("often")) for via in two)
    assert not any(job.paused for job in resumed)
    again = await cluster.wait_for(
        lambda e: e["what"] == "start" and e["job"] == "often" and e["slot"] > made.slot
    )
    rows = [r for r in await cluster.runs(first, "often") if r.reason == "paused"]
    assert sum(r.slots_covered for r in rows) >= 3
    assert all(r.slot < again["slot"] for r in rows)


async def a_cancel_ends_what_waits_at_once_and_what_runs_by_its_handler(
    cluster: Cluster, two: tuple[Instance, Instance]
) -> None:
    first, second = two
    failing = await ask(first, triggering("failing"))
    await state_of(second, failing, RETRYING)
    ended = await ask(
        second, lambda admin: admin.cancel_run("failing", failing.slot, reason="enough")
    )
    assert (ended.state, ended.reason, len(ended.attempts)) == (FAILED, "cancelled", 1)
    with pytest.raises(anarchon.RefusedError) as refused:
        await ask(first, lambda admin: admin.cancel_run("failing", failing.slot))
    assert refused.value.reason == "RUN_FINAL"

    running, waiting = [await ask(via, triggering("held")) for via in two]
    assert waiting.state == DUE
    await cluster.wait_for(lambda e: e["what"] == "start" and e["job"] == "held")
    both = await each(
        (via, partial(_called, AdminClient.cancel_run, "held", run.slot))
        for via, run in ((first, waiting), (first, running), (second, running))
    )
    assert (both[0].state, both[0].reason) == (SKIPPED, "cancelled")
    assert (await state_of(first, running, FAILED)).reason == "cancelled"
    end = await cluster.wait_for(lambda e: e["what"] == "end" and e["job"] == "held")
    assert end["slot"] == running.slot
    assert [e["slot"] for e in cluster.events if e["what"] == "start" and e["job"] == "held"] == [
        running.slot
    ]


@pytest.mark.timeout(180)
async def test_s29_s32_s21a_operators_are_obeyed_alike_at_both_of_two_sidecars(
    cluster: Cluster, two: tuple[Instance, Instance]
) -> None:
    """Chapters of one story, as four processes are slow to start."""
    for chapter in (
        a_request_made_at_both_at_once_is_one_run,
        names_that_no_job_has_are_not_found_whatever_a_store_makes_of_them,
        a_pause_holds_at_the_other_and_a_resume_counts_what_passed,
        a_cancel_ends_what_waits_at_once_and_what_runs_by_its_handler,
    ):
        await chapter(cluster, two)


@pytest.mark.timeout(180)
async def test_s29_a_store_killed_amid_triggers_leaves_one_run_for_each_request_that_is_repeated(
    cluster: Cluster, two: tuple[Instance, Instance], server: Killable
) -> None:
    """What became of a trigger that was not answered nobody knows: its id makes the repeat safe."""
    killed = asyncio.Event()
    acknowledged: dict[str, int] = {}

    async def trigger(number: int) -> None:
        request_id = f"r-{number}"
        while True:
            try:
                made = await ask(two[number % 2], triggering("quick", request_id))
            except anarchon.SidecarUnavailableError:
                await killed.wait()
                continue
            acknowledged.setdefault(request_id, made.slot)
            assert acknowledged[request_id] == made.slot
            return

    calls = [asyncio.create_task(trigger(number)) for number in range(40)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    early = dict(acknowledged)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    killed.set()
    await asyncio.gather(*calls)
    for request_id, slot in early.items():  # what was acknowledged before is there
        assert (await ask(two[1], triggering("quick", request_id))).slot == slot
    for slot in acknowledged.values():
        await state_of(two[0], run_pb2.Run(job="quick", slot=slot), SUCCESS)
    runs = await cluster.runs(two[0], "quick")
    assert Counter(r.request_id for r in runs) == Counter(acknowledged.keys())
