"""Watches of runs: what `core.watching` wants to look at, asked of the store for as long as somebody
reads.

Imports core and `loop`. A watch keeps no queue: the store is looked at again when what changed has
been read, so that a slow reader is sent the latest state of each run and nothing piles up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from anarchon_server.core import limits
from anarchon_server.core.errors import RefusedError, StoreError
from anarchon_server.core.model import RunView
from anarchon_server.core.store import RunQuery
from anarchon_server.core.watching import RunWatch
from anarchon_server.loop import Loop


class Watches:
    """The watches of one sidecar, `limits.WATCHES_MAX` at most."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._count = 0

    async def follow(self, query: RunQuery) -> AsyncGenerator[RunView | None, None]:
        """Yield None once the watch has begun, and each run that is unfinished then or changes later.

        Ends with `RefusedError` when the sidecar stops, and with `StoreError` where the store is away
        at first, or for `limits.WATCH_STORE_AWAY`.
        """
        if self._count >= limits.WATCHES_MAX:
            most = f"{limits.WATCHES_MAX} watches are open here, the most"
            raise RefusedError("LIMIT_EXCEEDED", f"{most}: close one, or ask another instance")
        self._count += 1
        try:
            with self._loop.news() as news:
                async with aclosing(self._followed(RunWatch(query), news)) as changes:
                    async for view in changes:
                        yield view
        finally:
            self._count -= 1

    async def _followed(
        self, watch: RunWatch, news: asyncio.Event
    ) -> AsyncGenerator[RunView | None, None]:
        clock = self._loop.clock
        begun, answered_at = False, clock.boot_ms()
        while True:
            news.clear()
            busy_ms = 0
            try:
                while (look := watch.next_look()) is not None:
                    self._loop.check_running()
                    asked_at = clock.boot_ms()
                    reply = await self._loop.read(partial(self._loop.store.runs, look))
                    answered_at = clock.boot_ms()
                    busy_ms += answered_at - asked_at
                    changed = watch.saw(reply.answers, reply.store_at)
                    if not begun:
                        begun = True
                        yield None
                    for view in changed:
                        yield view
            except StoreError:
                if not begun or clock.boot_ms() - answered_at > limits.WATCH_STORE_AWAY:
                    raise
            await self._pause(news, busy_ms)

    async def _pause(self, news: asyncio.Event, busy_ms: int) -> None:
        """Wait for news, or for `limits.WATCH_EVERY`; however much there is, the store is left alone
        for the greater part of the time.
        """
        clock = self._loop.clock
        now = clock.boot_ms()
        least_at = now + max(limits.WATCH_PAUSE_LEAST, busy_ms * limits.WATCH_BUSY_SHARE)
        most_at = max(least_at, now + limits.WATCH_EVERY)
        heard = news.is_set()
        while True:
            self._loop.check_running()
            until = least_at if heard else most_at
            if clock.boot_ms() >= until:
                return
            news.clear()
            timer = clock.call_at(until, news.set)
            try:
                await news.wait()
            finally:
                timer.cancel()
            heard = True
