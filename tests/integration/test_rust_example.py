"""The example in Rust, which has generated stubs and nothing else of ours, beside a real sidecar on SQLite."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from anarchon.admin import AdminClient
from anarchon.v1 import run_pb2
from tests.integration.harness import Cluster, Instance
from tests.stubs.tools import need_tools, rust_example

A_LONG_TIME_MS = b"600000"
SUCCESS, RUNNING = run_pb2.RUN_STATE_SUCCESS, run_pb2.RUN_STATE_RUNNING


@pytest.fixture(scope="module")
def program() -> str:
    need_tools("rust")
    return str(rust_example())


async def _started(cluster: Cluster, program: str) -> Instance:
    """A sidecar, and the example attached to it."""
    one = cluster.instances["one"] = Instance(cluster, "one")
    await one.start_sidecar()
    await one.application.spawn(program=program, env={"ANARCHON_ADDRESS": one.address})
    await _said(one, "attached to one")
    return one


async def _success_after(cluster: Cluster, one: Instance, slot: int) -> run_pb2.Run:
    """A run of a later slot that the example has ended with success."""

    def is_one(run: run_pb2.Run) -> bool:
        return run.slot > slot and run.state == SUCCESS

    runs = await cluster.runs_when(one, lambda runs: any(map(is_one, runs)))
    return next(run for run in runs if is_one(run))


async def _long_run(cluster: Cluster, one: Instance) -> run_pb2.Run:
    """A run that ends only when it is told to."""

    def trigger() -> int:
        with AdminClient(one.address) as admin:
            return admin.trigger_run("hello", payload=A_LONG_TIME_MS).slot

    slot = await asyncio.to_thread(trigger)
    await _said(one, f"hello: slot {slot}, attempt 1")
    return await _when(cluster, one, slot, lambda run: len(run.attempts) == 1)


def _has_ended(run: run_pb2.Run) -> bool:
    return run.attempts[0].HasField("end_time")


async def _when(
    cluster: Cluster, one: Instance, slot: int, wanted: Callable[[run_pb2.Run], bool]
) -> run_pb2.Run:
    return await cluster.run_when(one, "hello", slot, wanted)


@pytest.mark.timeout(120, func_only=True)  # the fixture builds the program
async def test_the_example_runs_goes_on_after_its_sidecar_was_killed_and_leaves_in_order(
    cluster: Cluster, program: str
) -> None:
    one = await _started(cluster, program)
    first = await _success_after(cluster, one, 0)
    assert first.attempts[0].result == f"hello from Rust, fence {first.attempts[0].fence}"

    before = await _long_run(cluster, one)
    one.sidecar.signal(signal.SIGKILL)
    await one.sidecar.ended()
    await one.start_sidecar()
    await _said(one, "attached to one", times=2)
    await _success_after(cluster, one, before.slot)
    after = await _when(cluster, one, before.slot, lambda run: run.state == RUNNING)
    assert [(a.attempt, a.fence) for a in after.attempts] == [(1, before.attempts[0].fence)], (
        "the new sidecar has adopted the attempt"
    )

    def cancel() -> None:
        with AdminClient(one.address) as admin:
            admin.cancel_run("hello", before.slot)

    await asyncio.to_thread(cancel)
    ended = await _when(cluster, one, before.slot, _has_ended)
    assert (ended.state, ended.reason) == (run_pb2.RUN_STATE_FAILED, "cancelled")

    last = await _long_run(cluster, one)
    one.application.signal(signal.SIGTERM)
    await _said(one, "stopping, with")
    one.application.signal(signal.SIGTERM)  # ends the grace
    assert await one.application.ended() == 0, one.application.log.read_text()
    handed_over = await _when(cluster, one, last.slot, _has_ended)
    attempt = handed_over.attempts[0]
    assert (attempt.state, attempt.reason) == (run_pb2.RUN_STATE_INTERRUPTED, "handed_over")


@pytest.mark.timeout(120, func_only=True)
async def test_the_example_stops_its_handler_when_its_trust_is_over(
    cluster: Cluster, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANARCHON_LEASE", "3s")
    one = await _started(cluster, program)
    await _long_run(cluster, one)
    one.sidecar.signal(signal.SIGKILL)
    await _said(one, "a handler was stopped: CANCEL_REASON_LEASE_LOST")
    assert one.application.child.returncode is None, "it goes on trying"


async def _said(one: Instance, words: str, times: int = 1) -> None:
    """Wait for it in the program's log: a file tells nobody when it grows."""
    async with asyncio.timeout(30):
        while one.application.log.read_text("utf-8").count(words) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
