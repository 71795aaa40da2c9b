"""AdminService.WatchRuns on a real gRPC server, with the real engine on the memory store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from anarchon.v1 import admin_pb2, admin_pb2_grpc, run_pb2, session_pb2
from anarchon_server.clock import SystemClock
from anarchon_server.config import Address
from anarchon_server.core import limits
from anarchon_server.core.errors import StoreUnavailable
from anarchon_server.core.store import Capabilities, RunQuery
from anarchon_server.rpc import admin as rpc_admin
from anarchon_server.rpc import server as rpc_server
from tests.servers.proxy import Proxy
from tests.unit.server.sidecars import (
    Sidecar,
    error_of,
    every,
    start_sidecar,
    stop_sidecar,
    subscribe_request,
    trailer,
)

DUE, CLAIMED, RUNNING = (
    run_pb2.RUN_STATE_DUE,
    run_pb2.RUN_STATE_CLAIMED,
    run_pb2.RUN_STATE_RUNNING,
)
SUCCESS = run_pb2.RUN_STATE_SUCCESS


async def watching(sidecar: Sidecar, **asked: Any) -> Any:
    """A watch that has begun."""
    call = sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest(**asked))
    await call.initial_metadata()
    return call


async def states_until(call: Any, last: Any) -> list[Any]:
    """The states that one run goes through, to the last of them."""
    states: list[Any] = []
    while not states or states[-1] != last:
        states.append((await call.read()).run.state)
    return states


async def subscribed(sidecar: Sidecar, *jobs: str) -> tuple[Any, str]:
    request = subscribe_request(*(every(job) for job in jobs))
    stream = sidecar.sessions.Subscribe(request)
    await stream.read()
    await sidecar.sessions.KeepAlive(session_pb2.KeepAliveRequest(session_id=request.session_id))
    await sidecar.loop.settled()
    return stream, request.session_id


async def trigger(sidecar: Sidecar, job: str = "a") -> run_pb2.Run:
    made: run_pb2.Run = (await sidecar.admin.TriggerRun(admin_pb2.TriggerRunRequest(job=job))).run
    return made


async def test_every_state_of_a_run_arrives_in_order_and_the_last_for_sure(
    sidecar: Sidecar,
) -> None:
    stream, session_id = await subscribed(sidecar, "a")
    call = await watching(sidecar)
    made = await trigger(sidecar)
    assignment = (await stream.read()).runs.assignments[0]
    states = await states_until(call, CLAIMED)
    keep = session_pb2.KeepAliveRequest(session_id=session_id, in_flight=[assignment.token])
    await sidecar.sessions.KeepAlive(keep)
    result = session_pb2.Result(
        token=assignment.token, outcome=run_pb2.Outcome(success=run_pb2.Success(result="ok"))
    )
    await sidecar.sessions.Complete(session_pb2.CompleteRequest(results=[result]))
    states += await states_until(call, SUCCESS)
    assert states == sorted(states), "never back"
    shown = (await sidecar.admin.GetRun(admin_pb2.GetRunRequest(job="a", slot=made.slot))).run
    assert shown.state == SUCCESS


async def test_the_run_is_as_a_list_shows_it(sidecar: Sidecar) -> None:
    await subscribed(sidecar, "a")
    call = await watching(sidecar)
    await trigger(sidecar)
    while True:
        change = (await call.read()).run
        if change.state == CLAIMED:
            break
    (listed,) = (await sidecar.admin.ListRuns(admin_pb2.ListRunsRequest())).runs
    assert change == listed


async def test_a_watch_begins_with_what_is_unfinished(sidecar: Sidecar) -> None:
    await subscribed(sidecar, "a")
    made = await trigger(sidecar)
    call = await watching(sidecar)
    assert (await call.read()).run.slot == made.slot


async def test_only_runs_of_the_job_and_of_the_span_come(sidecar: Sidecar) -> None:
    await subscribed(sidecar, "a", "b")
    of_job = await watching(sidecar, job="b")
    later = await watching(sidecar, from_slot=2**52)
    earlier = await watching(sidecar, until_slot=2**52)
    await trigger(sidecar, "a")
    await trigger(sidecar, "b")
    assert (await of_job.read()).run.job == "b"
    assert (await earlier.read()).run.job in ("a", "b")
    await sidecar.loop.close()
    assert trailer(await error_of(later.read())) == "DRAINING", "nothing came before"


@pytest.mark.parametrize(
    ("asked", "right"),
    [({"job": "\0"}, "no zero character"), ({"from_slot": 2**62}, "milliseconds since 1970")],
)
async def test_a_bad_request_is_refused(sidecar: Sidecar, asked: Any, right: str) -> None:
    error = await error_of(sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest(**asked)).read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert right in error.details()


async def test_a_sidecar_that_stops_ends_its_watches_at_once_with_the_reason(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_EVERY", 3_600 * limits.SECOND)
    call = await watching(sidecar)
    await sidecar.loop.close()
    error = await error_of(call.read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert trailer(error) == "DRAINING"


async def test_a_watch_goes_on_while_the_sidecar_drains(sidecar: Sidecar) -> None:
    await subscribed(sidecar, "a")
    await trigger(sidecar)
    await sidecar.loop.settled()
    call = await watching(sidecar)
    sidecar.loop.stop()
    assert (await call.read()).run.job == "a"


async def test_no_more_watches_than_the_limit_and_one_that_is_closed_makes_room(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCHES_MAX", 1)
    first = await watching(sidecar)
    error = await error_of(sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest()).read())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailer(error) == "LIMIT_EXCEEDED"
    first.cancel()
    await place_given_back(sidecar)


async def place_given_back(sidecar: Sidecar) -> None:
    for _ in range(1_000):  # the sidecar hears of it a moment later
        another = sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest())
        await another.initial_metadata()
        if not another.done():
            return
    pytest.fail("the place was not given back")


async def test_a_watcher_whose_machine_vanished_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends no connection and answers no ping: nothing of it comes any more, and nothing arrives."""
    monkeypatch.setattr(limits, "WATCHES_MAX", 1)
    monkeypatch.setattr(rpc_server, "PING_EVERY_MS", 100)
    monkeypatch.setattr(rpc_server, "PING_TIMEOUT_MS", 500)
    sidecar = await start_sidecar()
    port = int(sidecar.address.rpartition(":")[2])
    async with (
        Proxy(port) as proxy,
        aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        far = admin_pb2_grpc.AdminServiceStub(channel).WatchRuns(admin_pb2.WatchRunsRequest())
        await far.initial_metadata()
        proxy.hold_requests()
        proxy.drop_replies()
        await error_of(far.read())  # the proxy passes on that the sidecar has cut it off
        await place_given_back(sidecar)
    await stop_sidecar(sidecar)


def test_over_a_unix_socket_nobody_is_pinged() -> None:
    over_tcp = dict(rpc_server.options_at(Address("127.0.0.1", 7420)))
    assert over_tcp["grpc.keepalive_time_ms"] == rpc_server.PING_EVERY_MS
    assert "grpc.keepalive_time_ms" not in dict(rpc_server.options_at(Address(path=Path("/a"))))


async def test_s27_a_store_that_is_away_at_first_is_said_at_once(sidecar: Sidecar) -> None:
    sidecar.loop.store_open = False
    error = await error_of(sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest()).read())
    assert trailer(error) == "STORE_UNAVAILABLE"


class Away:
    """A store whose history cannot be read while `now` is set."""

    def __init__(self, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = True
        self.asked = asyncio.Event()
        whole = sidecar.store.runs

        async def runs(query: Any) -> Any:
            if self.now:
                self.asked.set()
                raise StoreUnavailable("away")
            return await whole(query)

        monkeypatch.setattr(sidecar.store, "runs", runs)


async def test_s27_a_watch_outlives_a_short_absence_of_the_store_and_misses_nothing(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribed(sidecar, "a")
    monkeypatch.setattr(limits, "WATCH_EVERY", limits.WATCH_PAUSE_LEAST)
    call = await watching(sidecar)
    away = Away(sidecar, monkeypatch)
    made = await trigger(sidecar)
    await away.asked.wait()
    away.now = False
    assert (await call.read()).run.slot == made.slot


async def test_s27_a_watch_of_a_store_that_stays_away_ends(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = await watching(sidecar)
    Away(sidecar, monkeypatch)
    monkeypatch.setattr(limits, "WATCH_STORE_AWAY", -1)
    sidecar.loop.tell_news()
    error = await error_of(call.read())
    assert trailer(error) == "STORE_UNAVAILABLE"


class Leaping(SystemClock):
    """A clock that has leapt ahead, as after a suspension."""

    ahead_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.ahead_ms


@pytest.fixture
def clock(sidecar: Sidecar) -> Leaping:
    """The clock of the watches that begin from here on."""
    sidecar.loop.clock = Leaping()
    return sidecar.loop.clock


async def test_s27_how_long_the_store_is_away_counts_from_when_it_was_first_asked_in_vain(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, clock: Leaping
) -> None:
    """Long before the store failed, the watch has asked it last: its reader was slow, or it slept."""
    await subscribed(sidecar, "a")
    call = await watching(sidecar)
    away = Away(sidecar, monkeypatch)
    clock.ahead_ms += 2 * limits.WATCH_STORE_AWAY
    sidecar.loop.tell_news()
    await away.asked.wait()
    away.now = False
    clock.ahead_ms += limits.WATCH_EVERY
    made = await trigger(sidecar)
    assert (await call.read()).run.slot == made.slot


async def test_a_store_that_fails_slowly_is_asked_no_more_than_a_fifth_of_the_time(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, clock: Leaping
) -> None:
    asked = asyncio.Event()

    async def runs(_: RunQuery) -> Any:
        clock.ahead_ms += limits.OP_TIMEOUT
        asked.set()
        raise StoreUnavailable("it took too long")

    await watching(sidecar)
    monkeypatch.setattr(sidecar.store, "runs", runs)
    clock.ahead_ms += limits.WATCH_EVERY
    sidecar.loop.tell_news()
    await asked.wait()
    asked.clear()
    clock.ahead_ms += limits.OP_TIMEOUT
    for _ in range(100):
        sidecar.loop.tell_news()
        await asyncio.sleep(0)
    assert not asked.is_set()
    clock.ahead_ms += 3 * limits.OP_TIMEOUT
    sidecar.loop.tell_news()
    await asked.wait()


async def test_an_instance_that_answers_for_itself_says_so_when_the_watch_begins(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest())
    assert rpc_admin.SCOPE_KEY not in dict(await call.initial_metadata())
    without = property(lambda _: Capabilities("rabbitmq", history=False))
    monkeypatch.setattr(type(sidecar.store), "capabilities", without)
    call = sidecar.admin.WatchRuns(admin_pb2.WatchRunsRequest())
    assert dict(await call.initial_metadata())[rpc_admin.SCOPE_KEY] == "instance=test:1"


@pytest.fixture
async def claim_only() -> AsyncIterator[Sidecar]:
    sidecar = await start_sidecar(leases=False)
    yield sidecar
    await stop_sidecar(sidecar)


async def test_runs_of_a_claim_only_store_are_watched_too(claim_only: Sidecar) -> None:
    call = await watching(claim_only)
    request = subscribe_request(every("fast", 100))
    stream = claim_only.sessions.Subscribe(request)
    await stream.read()
    await claim_only.sessions.KeepAlive(session_pb2.KeepAliveRequest(session_id=request.session_id))
    slot = (await stream.read()).runs.assignments[0].slot
    assert (await call.read()).run.slot == slot
