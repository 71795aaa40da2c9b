"""News of runs that were freed, that may go on, or that are to stop (S19, S18, S21a)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from anarchon_server.core.model import CancelReason, CatchUpPolicy, Outcome, OverlapPolicy, Reason
from tests.contract.harness import DAY, PERIOD, T0, Cluster, Node, able

SLOT = T0 + PERIOD
SOON_S = 5


async def news(watch: AsyncIterator[None]) -> None:
    await anext(watch)


async def test_s19_a_release_wakes_the_others(cluster: Cluster, two: tuple[Node, Node]) -> None:
    first, second = two
    assert second.store.capabilities.notifies
    watch = second.store.watch()
    waiting = asyncio.create_task(news(watch))
    cluster.advance_to(SLOT)
    seen = await first.win(SLOT)
    await first.release(seen, Reason.RUNNER_LOST)
    async with asyncio.timeout(SOON_S):
        await waiting
    waiting = asyncio.create_task(news(watch))
    answer = await second.take_over(seen)
    assert answer.run is not None
    await second.complete(answer.run, Outcome(stopped=CancelReason.SHUTDOWN))
    async with asyncio.timeout(SOON_S):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]


async def test_s19_only_a_freed_run_of_the_namespace_is_news(
    cluster: Cluster, two: tuple[Node, Node]
) -> None:
    first, second = two
    stranger = await cluster.node(namespace="stranger")
    await stranger.register()
    watch = second.store.watch()
    waiting = asyncio.create_task(news(watch))
    cluster.advance_to(SLOT)
    await stranger.release(await stranger.win(SLOT))
    seen = await first.win(SLOT)
    await first.renew(seen)
    await first.complete(seen)
    await first.beat()
    done, _ = await asyncio.wait([waiting], timeout=0.6)  # two looks of a store that is polled
    assert not done
    cluster.advance_to(SLOT + PERIOD)
    await first.release(await first.win(SLOT + PERIOD))
    async with asyncio.timeout(SOON_S):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", able(lambda can: can.control and can.notifies), indirect=True)
@pytest.mark.parametrize("what", ["ended", "cancelled", "superseded", "triggered", "caught up"])
async def test_s18_what_others_should_look_at_wakes_them(
    cluster: Cluster, one: Node, what: str
) -> None:
    """The end of a run for which another waits; a request to stop; a run that is due."""
    cluster.advance_to(SLOT)
    running = await one.win(SLOT)
    cluster.advance_to(SLOT + PERIOD)
    if what == "ended":
        await one.claim(SLOT + PERIOD, overlap=OverlapPolicy.QUEUE)
    node = await cluster.node()
    watch = node.store.watch()
    waiting = asyncio.create_task(news(watch))
    await asyncio.sleep(0)
    match what:
        case "ended":
            await one.complete(running)
        case "cancelled":
            await one.cancel(SLOT)
        case "superseded":
            await one.claim(SLOT + PERIOD, overlap=OverlapPolicy.CANCEL)
        case "triggered":
            await one.triggered(overlap=OverlapPolicy.ALLOW)
        case _:
            cluster.advance(2 * PERIOD)
            missed = [SLOT + PERIOD]
            await one.plan(missed, settled=SLOT, catch_up=CatchUpPolicy.LATEST, window_ms=DAY)
    async with asyncio.timeout(SOON_S):
        await waiting
    await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", able(lambda can: can.control and can.notifies), indirect=True)
async def test_s18_what_waits_behind_another_run_is_no_news(cluster: Cluster, one: Node) -> None:
    cluster.advance_to(SLOT)
    await one.win(SLOT)
    cluster.advance_to(SLOT + PERIOD)
    node = await cluster.node()
    watch = node.store.watch()
    waiting = asyncio.create_task(news(watch))
    await asyncio.sleep(0)
    await one.claim(SLOT + PERIOD, overlap=OverlapPolicy.QUEUE)
    await one.pause()
    done, _ = await asyncio.wait([waiting], timeout=0.6)  # two looks of a store that is polled
    assert not done
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_watch_ends_with_its_store(cluster: Cluster, one: Node) -> None:
    """Nothing hangs, and nothing is left behind, when a store is closed under a watch."""
    waiting = asyncio.create_task(news(one.store.watch()))
    await asyncio.sleep(0)
    await one.store.close()
    await one.store.close()
    waiting.cancel()
    await asyncio.wait([waiting], timeout=SOON_S)
    assert waiting.done()
