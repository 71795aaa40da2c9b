"""What applications are given for their own tests."""

from __future__ import annotations

import asyncio
import threading

import pytest

import anarchon
from anarchon.testing import FakeSidecar, make_context, run_handler


@anarchon.every("10s")
async def on_the_loop(ctx: anarchon.Context) -> str:
    ctx.check()
    await ctx.confirm()
    return f"{ctx.job} {ctx.attempt}"


@anarchon.every("10s")
def in_a_thread(ctx: anarchon.SyncContext) -> tuple[str, bool]:
    ctx.confirm()
    return ctx.job, threading.current_thread() is threading.main_thread()


async def waits(ctx: anarchon.Context) -> None:
    await ctx.sleep("1h")


def waits_in_a_thread(ctx: anarchon.SyncContext) -> None:
    ctx.sleep("1h")


async def test_a_handler_can_be_run_alone() -> None:
    assert await run_handler(on_the_loop) == "test 1"
    assert await run_handler(on_the_loop, make_context("sync", attempt=2)) == "sync 2"
    assert await run_handler(in_a_thread) == ("test", False)
    assert await run_handler(lambda: 3) == 3


async def test_what_a_handler_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_handler(lambda: 1 / 0)


@pytest.mark.parametrize("handler", [waits, waits_in_a_thread])
async def test_a_cancellation_can_be_tried(handler: object) -> None:
    with pytest.raises(anarchon.Cancelled, match="requested"):
        await run_handler(handler, cancel_after="1ms")  # type: ignore[arg-type]
    with pytest.raises(anarchon.LeaseLost):
        await run_handler(
            handler,  # type: ignore[arg-type]
            cancel_after="1ms",
            reason=anarchon.CancelReason.LEASE_LOST,
        )


async def test_a_handler_that_ends_its_own_task_is_not_taken_for_obedient() -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_handler(cancels)


async def test_a_confirmation_can_be_refused() -> None:
    with pytest.raises(anarchon.NotConfirmedError):
        await make_context(confirmed=False).confirm()
    with pytest.raises(anarchon.NotConfirmedError):
        make_context(sync=True, confirmed=False).confirm()
    make_context(sync=True).confirm()


async def test_a_timeout_can_be_set() -> None:
    remaining = make_context(timeout="10s").remaining
    assert remaining is not None
    assert 9 < remaining.total_seconds() <= 10


def test_a_puppet_without_a_client_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"wait for its subscription to be ready\(\)"):
        FakeSidecar().assign("job")
