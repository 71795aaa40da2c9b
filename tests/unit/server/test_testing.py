"""`LocalSidecar`: users test their handlers against the real engine, in virtual time."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

from anarchon import AnarchonClient, Context, RefusedError, SyncContext, cron, every, on_trigger
from anarchon_server.core.errors import InvalidError, NotFoundError
from anarchon_server.core.model import RunState
from anarchon_server.testing import LocalSidecar


@every("10s")
async def sync(ctx: Context) -> str:
    return f"slot {ctx.slot}"


@every("10s")
def broken() -> None:
    raise ValueError("no")


async def test_the_next_slot_is_run_and_its_result_recorded() -> None:
    async with (
        LocalSidecar() as sidecar,
        AnarchonClient(transport=sidecar).subscribe([sync]) as subscription,
    ):
        assert await subscription.ready() == "local:1"
        run = await sidecar.run_next("sync")
        assert run.state == "success"
        assert run.scheduled_at == datetime(2026, 10, 10, 12, 0, 10, tzinfo=UTC)
        (attempt,) = run.attempts
        assert attempt.result == f"slot {run.slot}"
        assert sidecar.now == run.scheduled_at
        assert "success" in repr(run)


async def test_s29_a_job_without_a_schedule_is_triggered() -> None:
    @on_trigger(retries=1)
    def mend(ctx: SyncContext) -> str:
        return ctx.payload.decode()

    async with (
        LocalSidecar() as sidecar,
        AnarchonClient(transport=sidecar).subscribe([mend]) as subscription,
    ):
        await subscription.ready()
        with pytest.raises(InvalidError, match="it has no schedule"):
            await sidecar.run_next("mend")
        run = await sidecar.trigger("mend", b"seven")
        assert (run.state, run.attempts[0].result) == ("success", "seven")
        with pytest.raises(NotFoundError):
            await sidecar.trigger("unknown")


def test_it_works_without_an_event_loop_as_well() -> None:
    seen: list[int] = []

    @every("10s", name="threaded")
    def handler(ctx: SyncContext) -> None:
        seen.append(ctx.slot)

    with (
        LocalSidecar() as sidecar,
        AnarchonClient(transport=sidecar).subscribe([handler]) as subscription,
    ):
        subscription.ready().result("10s")
        first = sidecar.run_next("threaded").result("10s")
        second = sidecar.run_next("threaded").result("10s")
    assert seen == [first.slot, second.slot]
    assert second.slot - first.slot == 10_000


async def test_a_handler_that_raises_fails_its_run() -> None:
    async with (
        LocalSidecar() as sidecar,
        AnarchonClient(transport=sidecar).subscribe([broken]) as subscription,
    ):
        await subscription.ready()
        run = await sidecar.run_next("broken")
        assert run.state is RunState.FAILED
        failure = run.attempts[0].failure
        assert failure is not None
        assert (failure.type, failure.message) == ("ValueError", "no")
        assert "raise ValueError" in failure.stack_trace


async def test_every_slot_of_a_span_is_run_in_order() -> None:
    @cron("*/5 9-17 * * *", name="office")
    async def office() -> None:
        await asyncio.sleep(0)

    begin = datetime(2026, 10, 10, 8, 30, tzinfo=UTC)
    async with (
        LocalSidecar(now=begin) as sidecar,
        AnarchonClient(transport=sidecar).subscribe([office]) as subscription,
    ):
        await subscription.ready()
        await sidecar.advance("2h")
        runs = await sidecar.runs("office")
        assert sidecar.now == begin + timedelta(hours=2)
    times = [run.scheduled_at for run in reversed(runs)]
    first = datetime(2026, 10, 10, 9, tzinfo=UTC)
    assert times == [first + n * timedelta(minutes=5) for n in range(19)]
    assert {run.state for run in runs} == {RunState.SUCCESS}


async def test_s18_time_can_go_on_while_a_handler_runs() -> None:
    finish = asyncio.Event()

    @every("10s", name="slow")
    async def slow() -> None:
        await finish.wait()

    async with (
        LocalSidecar() as sidecar,
        AnarchonClient(transport=sidecar).subscribe([slow]) as subscription,
    ):
        await subscription.ready()
        await sidecar.advance("20s", wait=False)
        second, first = await sidecar.runs("slow")
        assert first.state in ("claimed", "running")
        assert (second.state, second.reason) == ("skipped", "overlap")
        finish.set()
        await sidecar.advance("0s")
        assert (await sidecar.runs("slow"))[-1].state == "success"


async def test_s21_a_timeout_is_reached_in_virtual_time() -> None:
    cancelled = asyncio.Event()

    @every("1d", name="long", timeout="1h")
    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with (
        LocalSidecar(now=datetime(2026, 10, 10, 23, 59, 59, tzinfo=UTC)) as sidecar,
        AnarchonClient(transport=sidecar).subscribe([long]) as subscription,
    ):
        await subscription.ready()
        await sidecar.advance("59m", wait=False)
        assert not cancelled.is_set()
        await sidecar.advance("2m", wait=False)
        await cancelled.wait()
        await sidecar.advance("1s")
        (run,) = await sidecar.runs("long")
        assert (run.state, run.reason) == ("failed", "timeout")


async def test_a_handler_that_never_ends_is_named() -> None:
    stuck = threading.Event()

    @every("10s", name="stuck")
    def handler() -> None:
        stuck.wait(30)

    async with (
        LocalSidecar(patience="50ms") as sidecar,
        AnarchonClient(transport=sidecar).subscribe([handler]) as subscription,
    ):
        await subscription.ready()
        with pytest.raises(TimeoutError, match=r"handlers of stuck have run for 0\.05 s"):
            await sidecar.run_next("stuck")
        stuck.set()


async def test_what_the_sidecar_refuses_is_refused() -> None:
    @cron("* * * * * *", name="jittery", jitter="1s")
    async def jittery() -> None: ...

    async with LocalSidecar() as sidecar:
        subscription = AnarchonClient(transport=sidecar).subscribe([jittery])
        with pytest.raises(RefusedError, match="shorter than the shortest gap"):
            await subscription.ready()


async def test_a_job_that_nobody_has_is_not_found() -> None:
    async with LocalSidecar() as sidecar:
        with pytest.raises(NotFoundError, match="is a client subscribed with it"):
            await sidecar.run_next("nobody")
        assert await sidecar.runs() == ()


def test_time_needs_its_zone() -> None:
    with pytest.raises(ValueError, match="with its zone"):
        LocalSidecar(now=datetime(2026, 10, 10))  # noqa: DTZ001
